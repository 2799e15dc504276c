"""The command line: one function a command, no logic. Heavy imports wait until a command runs."""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from drople import __version__
from drople.errors import DropleError
from drople.progress import speaks

if TYPE_CHECKING:
    from drople.learner import PromptLearner

app = App(
    name="drople",
    version=__version__,
    help="Teach a vision-language model your classes from a handful of images.\n\n"
    "Start with `drople demo`, then `drople fit PHOTOS --out RUN`, where PHOTOS has one folder a class.",
    help_format="markdown",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,  # `main` says what becomes of the work
)

Json = Annotated[bool, Parameter(name="--json", help="print JSON, and nothing else, to standard output")]
Strict = Annotated[bool, Parameter(help="stop at the first bad image instead of skipping it")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto: a GPU where there is one")]
Precision = Annotated[
    Literal["auto", "float32", "bf16", "fp16"],
    Parameter(help="number format of the backbone; auto: bf16 where the chip is fast at it, else float32"),
]
Names = Annotated[Path | None, Parameter(help="JSON or CSV that maps folder names to words")]
OWN_FLAGS = ("backbone", "method", "preset", "template", "seed", "device", "precision", "strict", "progress")
Settings = Annotated[
    list[str] | None,
    Parameter(name="--set", help="any option as NAME=VALUE, several times; `drople methods NAME` lists them"),
]


Methods = Annotated[tuple[str, ...], Parameter(consume_multiple=True, help="see `drople methods`")]
Seeds = Annotated[tuple[int, ...], Parameter(consume_multiple=True, help="each draws its own few shots")]


@app.command
def fit(
    data: Annotated[
        str,
        Parameter(
            help="a folder (`class/*.jpg` or `train|val|test/class/*.jpg`), or a .csv or .parquet table"
        ),
    ],
    *,
    out: Annotated[Path, Parameter(help="the run folder to write")],
    method: Annotated[
        str, Parameter(help="see `drople methods`; NAME+drople wraps a prompt learner")
    ] = "drople",
    backbone: Annotated[
        str, Parameter(help="pocket (inside drople), a folder, or a name on the Hugging Face Hub")
    ] = "pocket",
    shots: Annotated[int | Literal["all"], Parameter(help="training images a class, or all")] = 16,
    seed: Annotated[int, Parameter(help="same seed, same machine: the same bytes")] = 1,
    epochs: Annotated[int | None, Parameter(help="passes over the training images")] = None,
    preset: Annotated[
        str, Parameter(help="drople has paper, released and low_rank; none; or auto: what suits the backbone")
    ] = "auto",
    template: Annotated[str | None, Parameter(help="the sentence around a class name, with {}")] = None,
    classnames: Names = None,
    resume: Annotated[bool, Parameter(help="go on with a run that was stopped")] = False,
    device: Device = "auto",
    precision: Precision = "auto",
    strict: Strict = False,
    set_: Settings = None,
    json: Json = False,
) -> None:
    """Learn to tell classes apart from a few images of each.

    Writes a run folder (config.json, prompts.safetensors, metrics.json, log.jsonl) and prints the
    accuracy beside that of the untrained model. Test images are only looked at when training is over.
    """
    from drople.data import load_data
    from drople.learner import PromptLearner
    from drople.progress import Terminal

    options = read_settings(set_) | ({} if epochs is None else {"epochs": epochs})
    learner = PromptLearner(
        backbone,
        method,
        preset=preset,
        template=template,
        seed=seed,
        device=device,
        precision=precision,
        strict=strict,
        progress=Terminal(),
        **options,
    )
    images = load_data(data, classnames=classnames)
    learner.fit(images, None if shots == "all" else shots, out=out, resume=resume)
    if not speaks():
        return
    result = learner.evaluate(images, "test" if images.test else "val") if images.test or images.val else None
    if result is not None:
        learner.metrics_["evaluation"] = result
        learner.save(out)
    show_fit(learner, out, result, json)


@app.command
def predict(
    run: Annotated[Path, Parameter(help="a run folder of drople fit")],
    images: Annotated[list[Path], Parameter(help="image files, or folders of them")],
    *,
    classes: Annotated[
        str | None, Parameter(help='other classes than those trained on: "zebra, okapi"')
    ] = None,
    top: Annotated[int, Parameter(help="how many classes to list for each image")] = 3,
    device: Device = "auto",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Say what is on some images, and how sure that is.

    Probabilities are calibrated on the run's validation images. With --json: a list of objects with
    path, class, probability and top.
    """
    from drople.answers import predictions, print_predictions
    from drople.learner import PromptLearner
    from drople.progress import Terminal

    learner = PromptLearner.load(run, device=device, progress=Terminal())
    learner.strict = strict
    given = None if classes is None else (c.strip() for c in classes.split(","))
    # A class that is named twice would share its probability with itself.
    names = None if given is None else list(dict.fromkeys(c for c in given if c))
    found = predictions(learner, images, names, top)
    if json:
        print_json(found)
    else:
        print_predictions(found)


@app.command
def evaluate(
    run: Annotated[Path, Parameter(help="a run folder of drople fit")],
    data: Annotated[str, Parameter(help="labelled images, as for drople fit")],
    *,
    split: Annotated[
        str | None, Parameter(help="test where the data has one, else every image not trained on")
    ] = None,
    classnames: Names = None,
    device: Device = "auto",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Measure a run on labelled images, beside the untrained model.

    Classes the run never saw may be among them: then the data's classes are the choices. With --json: an
    object with accuracy, zero_shot_accuracy, ece, per_class and confusion.
    """
    from drople.answers import print_evaluation
    from drople.learner import PromptLearner
    from drople.progress import Terminal

    learner = PromptLearner.load(run, device=device, progress=Terminal())
    learner.strict = strict
    result = learner.evaluate(data, split, classnames=classnames)
    if json:
        print_json(result)
    else:
        print_evaluation(result)


@app.command
def methods(
    name: Annotated[str | None, Parameter(help="a method, to see its options")] = None,
    /,
    *,
    json: Json = False,
) -> None:
    """List the methods, or the options of one."""
    from drople.answers import describe_method, list_methods, print_method, print_methods

    if name is None:
        rows = list_methods()
        print_json(rows) if json else print_methods(rows)
    else:
        described = describe_method(name)
        print_json(described) if json else print_method(described)


@app.command
def benchmark(
    protocol: Annotated[
        Literal["base-to-novel", "few-shot", "cross-dataset", "domain-shift", "long-tail"],
        Parameter(help="what is trained on and what is tested"),
    ],
    *,
    datasets: Annotated[
        list[str],
        Parameter(
            name=["--datasets", "--data"],
            consume_multiple=True,
            help="names (`drople data list`), folders or tables",
        ),
    ],
    methods: Methods = ("zero-shot", "drople"),
    seeds: Seeds = (1, 2, 3),
    shots: Annotated[
        list[int] | None, Parameter(consume_multiple=True, help="images a class [16; few-shot: 1 2 4 8 16]")
    ] = None,
    backbone: Annotated[
        str, Parameter(help="pocket, a folder, or a name on the Hugging Face Hub")
    ] = "pocket",
    root: Annotated[
        Path, Parameter(env_var="DROPLE_DATA", help="where datasets lie that are given by name")
    ] = Path("data"),
    out: Annotated[
        Path, Parameter(help="where the records go; what is there already is not run again")
    ] = Path("records"),
    source: Annotated[str | None, Parameter(help="cross-dataset: the dataset to train on")] = None,
    targets: Annotated[
        list[str] | None,
        Parameter(consume_multiple=True, help="domain-shift: datasets with the same classes"),
    ] = None,
    ratio: Annotated[
        float, Parameter(help="long-tail: images of the largest class over those of the smallest")
    ] = 10.0,
    post_hoc: Annotated[
        Literal["gla"] | None, Parameter(help="adjust predictions after training: gla")
    ] = None,
    ablation: Annotated[
        Literal["components", "scores", "range", "bridge", "lambda", "residual", "unimodal", "default"]
        | None,
        Parameter(
            help="run the rows of this ablation table of the paper, or of our default, instead of --methods"
        ),
    ] = None,
    epochs: Annotated[int | None, Parameter(help="passes over the training images")] = None,
    preset: Annotated[str | None, Parameter(help="a preset of the methods")] = None,
    retry_failed: Annotated[bool, Parameter(help="run failed runs again")] = False,
    cluster: Annotated[
        str | None,
        Parameter(
            help="several runs at a time: local:N for N processes of this machine, on its GPUs in turn; or the "
            "workers of a Dask scheduler, by its address (tcp://HOST:8786) or scheduler file. Workers need "
            "drople[cluster], and data and backbone at the same paths; records are written here. See docs/cluster.md"
        ),
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    set_: Settings = None,
    json: Json = False,
) -> None:
    """Run methods on datasets under one protocol, and print the paper's table.

    One JSON record a run, written when it is done: kill it and call it again, and it goes on where it
    stopped. Several commands may fill one folder. `drople table` prints tables from records.
    """
    from drople.answers import print_benchmark, refuse_failures
    from drople.progress import Terminal
    from drople.protocols import benchmark as go
    from drople.protocols import plan, summary

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DropleError(
            "torchrun and accelerate launch start several processes for one training: a benchmark has many. Start it "
            "without them, with --cluster local:N for N runs at a time."
        )
    options = read_settings(set_) | ({} if epochs is None else {"epochs": epochs})
    runs = plan(
        protocol,
        datasets,
        methods,
        seeds,
        shots,
        source=source,
        targets=targets or (),
        ratio=ratio,
        ablation=ablation,
        backbone=backbone,
        preset=preset,
        options=options,
        precision=precision,
        post_hoc=post_hoc,
    )
    shown = Terminal()
    common: dict[str, Any] = {"device": device, "retry_failed": retry_failed, "progress": shown}
    if cluster is None:
        results = go(runs, root, out, **common)
    else:
        from drople.sweep import sweep

        results = sweep(runs, root, out, cluster, **common)
    found: dict[Path, Any] = {}
    try:
        for number, (run, record, there) in enumerate(results, 1):
            found[run.path] = record
            shown.line(f"[{number}/{len(runs)}] {summary(record)}{' (was there)' if there else ''}")
    except KeyboardInterrupt:
        shown.line(
            f"drople: stopped; {len(found)} of {len(runs)} runs are recorded in {out}: the same command goes on "
            "with the rest, with or without --cluster"
        )
        sys.exit(130)
    # A cluster finishes runs in an order of its own.
    records = [found[run.path] for run in runs]
    print_json(records) if json else print_benchmark(records)
    refuse_failures(records)


@app.command
def table(
    records: Annotated[list[Path], Parameter(help="records of drople benchmark: files or folders")],
    *,
    format: Annotated[
        Literal["text", "markdown", "latex", "csv"], Parameter(help="how to print it")
    ] = "text",
    by: Annotated[Literal["columns", "rows"], Parameter(help="where the datasets stand")] = "columns",
    published: Annotated[bool, Parameter(help="place the paper's numbers below ours")] = False,
) -> None:
    """Print the paper's tables from records: mean and standard deviation over seeds, best in bold."""
    from drople.answers import terminal_width
    from drople.run_records import read_records
    from drople.tables import render, tables

    found = tables(read_records(records), by=by, published=published)
    print(render(found, format, width=terminal_width()))


data_app = App(
    name="data",
    default_parameter=Parameter(negative=()),
    help="The benchmark datasets: which there are, whether a copy is whole, how to get one.",
)
app.command(data_app)

Root = Annotated[Path, Parameter(env_var="DROPLE_DATA", help="the folder that holds the datasets")]


@data_app.command(name="list")
def data_list(*, root: Root = Path("data"), json: Json = False) -> None:
    """List the datasets by name, and whether each is under the data root."""
    from drople.answers import print_datasets
    from drople.data.check import overview

    rows = overview(root)
    print_json(rows) if json else print_datasets(rows)


@data_app.command(name="check")
def data_check(
    name: Annotated[str, Parameter(help="a dataset's name")],
    *,
    root: Root = Path("data"),
    deep: Annotated[bool, Parameter(help="decode every image, not only its header")] = False,
) -> None:
    """Verify a copy: counts of each split, class names, images that cannot be read."""
    from drople.data.check import check
    from drople.progress import Terminal

    with Terminal().task(f"checking {name}", 1) as update:
        report = check(name, root, deep=deep, progress=lambda done, total: update(done, total=total))
    print("\n".join(report.lines()))
    if not report.ok:
        sys.exit(2)


@data_app.command(name="get")
def data_get(name: Annotated[str, Parameter(help="a dataset's name")], *, root: Root = Path("data")) -> None:
    """Fetch a dataset from its publisher where the licence allows; else say what to do by hand."""
    from drople.data.download import get
    from drople.progress import Terminal

    with Terminal().task(f"fetching {name}", 1) as update:
        got = get(name, root, progress=lambda file, done, total: update(done, total=total, what=file))
    print("\n".join([*got.done, *got.notes, *got.steps]))
    if not got.complete:
        sys.exit(2)


@app.command
def explain(
    run: Annotated[Path, Parameter(help="a run folder of drople fit")],
    images: Annotated[list[Path], Parameter(help="image files, or folders of them")],
    *,
    out: Annotated[Path, Parameter(help="a folder, or the picture itself (.png, .svg, .pdf)")] = Path(
        "explained"
    ),
    class_name: Annotated[str | None, Parameter(name="--class", help="what speaks for this class")] = None,
    compare: Annotated[bool, Parameter(help="zero-shot, other runs and this one below each other")] = False,
    with_runs: Annotated[
        tuple[Path, ...], Parameter(name="--with", consume_multiple=True, help="runs to compare with")
    ] = (),
    format: Annotated[Literal["png", "svg", "pdf"], Parameter(help="the kind of picture")] = "png",
    device: Device = "auto",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Draw where a run looks: Grad-CAM, the importance of every token, what would drop, the words.

    `--compare --with VANILLA_RUN` puts zero-shot CLIP, other runs and this one side by side.
    """
    from drople.answers import print_lines
    from drople.explain import explain as draw
    from drople.progress import Terminal

    rows = draw(
        run,
        images,
        out=out,
        class_name=class_name,
        compare=compare,
        compare_with=with_runs,
        format=format,
        device=device,
        strict=strict,
        progress=Terminal(),
    )
    shown = [f"{r['image']}: {r['class']} {100 * r['probability']:.1f}%, {r['picture']}" for r in rows]
    print_json(rows) if json else print_lines(shown)


@app.command
def report(
    source: Annotated[Path, Parameter(help="a run folder, or records of drople benchmark")],
    *,
    data: Annotated[str | None, Parameter(help="the run's images: then the report has pictures")] = None,
    out: Annotated[Path, Parameter(help="the file to write")] = Path("report.html"),
    device: Device = "auto",
) -> None:
    """Write one self-contained HTML page about a run or a benchmark."""
    from drople.progress import Terminal
    from drople.report import write_report

    print(write_report(source, out, data=data, device=device, progress=Terminal()))


@app.command
def export(
    run: Annotated[Path, Parameter(help="a run folder of drople fit")],
    *,
    to: Annotated[
        Literal["onnx", "hub", "torch"], Parameter(help="a file, a folder to upload, a torch program")
    ],
    out: Annotated[Path, Parameter(help="the file, or for hub the folder, to write")],
    dtype: Annotated[Literal["float32", "fp16", "int8"], Parameter(help="ONNX: number format")] = "float32",
    data: Annotated[str | None, Parameter(help="labelled images to measure the loss on")] = None,
    split: Annotated[str | None, Parameter(help="the split of those images")] = None,
    dataset: Annotated[str | None, Parameter(help="what the images are, for the model card")] = None,
    backbone: Annotated[str | None, Parameter(help="the backbone's Hub name, for the model card")] = None,
) -> None:
    """Ship a run: prompts folded in, class weights baked, checked against the run before it is written."""
    from drople.answers import print_lines
    from drople.export import export as write
    from drople.progress import Terminal

    written = write(
        run,
        to,
        out,
        dtype=dtype,
        data=data,
        split=split,
        backbone=backbone,
        dataset=dataset,
        progress=Terminal(),
    )
    print_lines(written.lines())


@app.command
def serve(
    run: Annotated[Path, Parameter(help="a run folder of drople fit")],
    *,
    data: Annotated[
        str | None, Parameter(help="the run's images: nearest ones are shown, retraining uses them")
    ] = None,
    port: Annotated[int, Parameter(help="the port of the page")] = 7860,
    host: Annotated[
        str, Parameter(help="the address to listen on; leave it, unless others may use the page")
    ] = ("127.0.0.1"),
    upload_mb: Annotated[int, Parameter(help="the largest picture that may be uploaded")] = 20,
    device: Device = "auto",
) -> None:
    """Open a web page for a run: drop pictures in, see why, try new classes, label some and retrain.

    It listens on this machine alone and calls nobody. Needs the extra drople[serve].
    """
    from drople.serve import serve as open_page  # before all else: it silences gradio's telemetry
    from drople.progress import Terminal  # isort: skip

    open_page(run, data=data, host=host, port=port, device=device, upload_mb=upload_mb, progress=Terminal())


@app.command
def cost(
    *,
    methods: Methods = (),
    backbones: Annotated[
        tuple[str, ...],
        Parameter(consume_multiple=True, help="names, folders, or shape:vit-b-16 (-b-32, -l-14)"),
    ] = ("pocket",),
    classes: Annotated[int, Parameter(help="classes in the task")] = 100,
    batch: Annotated[int, Parameter(help="images a step")] = 32,
    plot: Annotated[Path | None, Parameter(help="also draw a picture here")] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure what each method costs: parameters, FLOPs, time and memory."""
    from drople import cost as costing
    from drople.progress import Terminal

    failed: list[DropleError] = []
    with Terminal().task("measuring", 1) as update:
        found = costing.costs(
            methods or None,
            backbones,
            classes=classes,
            batch=batch,
            device=device,
            on_done=lambda done, total: update(done, total=total),
            on_failed=failed.append,
        )
    if found:
        print_json(costing.rows(found)) if json else costing.print_costs(found)
        if plot is not None:
            costing.plot(found, plot)
    if failed:
        raise DropleError("\n".join(str(error) for error in failed))


@app.command
def demo(
    *,
    out: Annotated[Path, Parameter(help="where the drawings, the runs and report.png go")] = Path("demo"),
    seed: Annotated[int, Parameter(help="another seed draws other pictures")] = 1,
) -> None:
    """See it work: drawings by code, trained on some classes, tested on those and on others.

    Needs no data, no network and no GPU.
    """
    from drople.demo.run import run_demo
    from drople.progress import Terminal

    run_demo(out, seed, Terminal())


def read_settings(given: Sequence[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; the values are read by whoever knows the option."""
    pairs = [setting.partition("=") for setting in given or ()]
    for name, equals, _ in pairs:
        if not equals or not name.strip():
            raise DropleError(f"--set {name}: give an option as NAME=VALUE, such as --set p_max=0.4.")
        if name.strip() in OWN_FLAGS:
            raise DropleError(f"--set {name}: give it as --{name.strip()}.")
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}


def show_fit(learner: "PromptLearner", out: Path, result: dict[str, Any] | None, json: bool) -> None:
    from drople.answers import print_fit

    if json:
        print_json({"run": str(out), **learner.metrics_})
    else:
        print_fit(learner, out, result)


def print_json(content: Any) -> None:
    import json

    # ASCII can be printed in every locale, and so can file names that are no UTF-8.
    print(json.dumps(content, indent=1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what the user can mend is one paragraph on standard error and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name need not fit the encoding of the terminal, nor any.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(arguments, exit_on_error=False)
    except DropleError as error:
        # Of several processes any may be the one that failed.
        who = "drople" if speaks() else f"drople (process {os.environ['RANK']})"
        print(f"{who}: {error}", file=sys.stderr)
        sys.exit(2)
    except CycloptsError:
        sys.exit(2)
    except KeyboardInterrupt:
        given = sys.argv[1:] if arguments is None else list(arguments)
        print("drople: stopped" + "; it goes on with --resume" * (given[:1] == ["fit"]), file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        print(f"drople: {error}: check the path, its permissions and the space on its disk.", file=sys.stderr)
        sys.exit(2)
