"""The command line: one function a command, no logic. Heavy imports wait until a command runs."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from drople import __version__
from drople.errors import DropleError

if TYPE_CHECKING:
    from drople.learner import PromptLearner

app = App(
    name="drople",
    version=__version__,
    help="Teach a vision-language model your classes from a handful of images.\n\n"
    "Start with `drople demo`, then `drople fit PHOTOS --out RUN`, where PHOTOS has one folder a class.",
    help_format="markdown",
)

Json = Annotated[bool, Parameter(name="--json", negative="", help="print JSON, and nothing else, to standard output")]
Strict = Annotated[bool, Parameter(negative="", help="stop at the first bad image instead of skipping it")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto: a GPU where there is one")]
Names = Annotated[Path | None, Parameter(help="JSON or CSV that maps folder names to words")]
OWN_FLAGS = ("backbone", "method", "preset", "template", "seed", "device", "precision", "strict", "progress")
Settings = Annotated[
    list[str] | None,
    Parameter(name="--set", negative="", help="any option as NAME=VALUE, several times; `drople methods NAME` lists them"),
]


@app.command
def fit(
    data: Annotated[str, Parameter(help="a folder (`class/*.jpg` or `train|val|test/class/*.jpg`), or a .csv or .parquet table")],
    *,
    out: Annotated[Path, Parameter(help="the run folder to write")],
    method: Annotated[str, Parameter(help="see `drople methods`; NAME+drople wraps a prompt learner")] = "drople",
    backbone: Annotated[str, Parameter(help="pocket (inside drople), a folder, or a name on the Hugging Face Hub")] = "pocket",
    shots: Annotated[int | Literal["all"], Parameter(help="training images a class, or all")] = 16,
    seed: Annotated[int, Parameter(help="same seed, same machine: the same bytes")] = 1,
    epochs: Annotated[int | None, Parameter(help="passes over the training images")] = None,
    preset: Annotated[str | None, Parameter(help="drople has paper (its default) and released")] = None,
    template: Annotated[str | None, Parameter(help="the sentence around a class name, with {}")] = None,
    classnames: Names = None,
    resume: Annotated[bool, Parameter(negative="", help="go on with a run that was stopped")] = False,
    device: Device = "auto",
    precision: Annotated[Literal["auto", "float32", "bf16", "fp16"], Parameter(help="number format of the backbone")] = "auto",
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
    from drople.progress import Terminal, speaks

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
    classes: Annotated[str | None, Parameter(help='other classes than those trained on: "zebra, okapi"')] = None,
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
    names = None if classes is None else [c.strip() for c in classes.split(",") if c.strip()]
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
    split: Annotated[str | None, Parameter(help="test where the data has one, else every image not trained on")] = None,
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
    name: Annotated[str | None, Parameter(help="a method, to see its options")] = None, /, *, json: Json = False
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
        print_json({"run": str(out), "trainable_parameters": learner.method_.trainable, **learner.metrics_})
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
        print(f"drople: {error}", file=sys.stderr)
        sys.exit(2)
    except CycloptsError:
        sys.exit(2)
    except KeyboardInterrupt:
        print("drople: stopped; a training run goes on with --resume", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        print(f"drople: {error}: check the path, its permissions and the space on its disk.", file=sys.stderr)
        sys.exit(2)
