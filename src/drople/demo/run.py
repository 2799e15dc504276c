"""`drople demo`: base-to-novel on the drawings, from nothing to one table and one picture.

Prompts are learned on a few drawings of the base classes; then base and novel classes are told apart in
drawings no run has seen, beside zero-shot. Epochs were chosen for the time they take, and nothing here
looks at a test result before the end: what comes out is what is shown.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drople import __version__
from drople.data.dataset import ImageData, load_data
from drople.data.shots import base_novel, by_label, only_classes
from drople.demo.drawings import CLASSES, TEMPLATE, draw
from drople.demo.picture import MEASURES, Sample, save_report
from drople.errors import DropleError
from drople.learner import CONFIG, METRICS, PROMPTS, PromptLearner
from drople.metrics import harmonic_mean
from drople.progress import Progress
from drople.records import write_json
from drople.training import CHECKPOINT, LOG

DRAWINGS, RESULTS, PICTURE = "drawings", "results.json", "report.png"
ZERO_SHOT = "zero-shot"
METHODS = {"coop": "CoOp", "drople": "DroPLe"}
RUN_FILES = {CONFIG, PROMPTS, METRICS, LOG, CHECKPOINT}

Scores = dict[str, float]


def run_demo(
    out: Path,
    seed: int,
    progress: Progress,
    *,
    shots: int = 16,
    epochs: int = 12,
    train_per_class: int = 24,
    test_per_class: int = 30,
) -> dict[str, Any]:
    """Draw, train, evaluate and report into `out`; returns what `results.json` holds."""
    began = time.monotonic()
    for name in METHODS:
        clear_run(out / name)
    drawings = prepare_drawings(out / DRAWINGS, seed, train_per_class, test_per_class, progress)
    data = load_data(drawings)
    parts = {
        kind: only_classes(data, labels)
        for kind, labels in zip(("base", "novel"), base_novel(data.classes), strict=True)
    }
    scores: dict[str, Scores] = {}
    for name in METHODS:
        # Both learners start from the words that zero-shot is asked with, so that no one begins behind.
        learner = PromptLearner(
            "pocket",
            name,
            template=TEMPLATE,
            init=TEMPLATE.partition("{}")[0].strip(),
            seed=seed,
            epochs=epochs,
            progress=progress,
        )
        learner.fit(parts["base"], shots, out=out / name)
        scores |= judge(learner, parts, zero_shot=not scores)
    samples = {kind: sample_answers(learner, part) for kind, part in parts.items()}
    save_report(out / PICTURE, samples, scores, {title: read_log(out / n) for n, title in METHODS.items()})
    results = {
        "drople": __version__,
        "backbone": "pocket",
        "template": TEMPLATE,
        "seed": seed,
        "shots": shots,
        "epochs": epochs,
        **{
            kind: {"classes": list(part.classes), "test_images": len(part.test)}
            for kind, part in parts.items()
        },
        "methods": scores,
        "seconds": round(time.monotonic() - began, 1),
    }
    write_json(out / RESULTS, results)
    print_results(results, out)
    return results


def judge(learner: PromptLearner, parts: Mapping[str, ImageData], *, zero_shot: bool) -> dict[str, Scores]:
    """Accuracy on the test drawings of base and novel classes, each told apart among their own."""
    found = {kind: learner.evaluate(part, "test", zero_shot=zero_shot) for kind, part in parts.items()}
    keys = {ZERO_SHOT: "zero_shot_accuracy"} if zero_shot else {}
    keys[METHODS[learner.method]] = "accuracy"
    return {name: scored(found["base"][key], found["novel"][key]) for name, key in keys.items()}


def scored(base: float, novel: float) -> Scores:
    return {"base": base, "novel": novel, "harmonic_mean": harmonic_mean(base, novel)}


def read_log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / LOG).read_text("utf-8").splitlines()]


def sample_answers(learner: PromptLearner, part: ImageData) -> list[Sample]:
    """The first test drawing of every class, whatever becomes of it: a picked one would flatter."""
    shown = [examples[0] for examples in by_label(part.test).values()]
    probabilities = learner.predict_proba([e.image for e in shown], part.words)
    return [
        Sample(Path(str(e.image)), part.words[e.label], part.words[row.argmax()], float(row.max()))
        for e, row in zip(shown, probabilities, strict=True)
    ]


# What an earlier demo left --------------------------------------------------------------------------


def clear_run(run: Path) -> None:
    """Remove the run of an earlier demo, and nothing that is not one."""
    if not run.exists():
        return
    if not run.is_dir() or {path.name for path in run.iterdir()} - RUN_FILES:
        raise DropleError(f"{run} holds other things than a run of the demo: give another --out.")
    rmtree(run)


def prepare_drawings(folder: Path, seed: int, train: int, test: int, progress: Progress) -> Path:
    """The drawings of this seed: those of an earlier demo where they are the same, else drawn now."""
    if folder.exists():
        files = [path for path in folder.rglob("*") if not path.is_dir()]
        if not folder.is_dir() or any(p.parent.name not in CLASSES or p.suffix != ".jpg" for p in files):
            raise DropleError(f"{folder} holds other things than the demo's drawings: give another --out.")
        if same_drawings(folder, seed, train, test):
            return folder
        rmtree(folder)
    with progress.task("drawing", 1) as update:
        draw(folder, seed=seed, train_per_class=train, test_per_class=test)
        update(1)
    return folder


def same_drawings(folder: Path, seed: int, train: int, test: int) -> bool:
    """Whether the folder is complete and of this seed: more drawings never change the first of a class."""
    counts = {"train": train, "val": train // 3, "test": test}
    complete = all(
        len(list((folder / split / name).glob("*.jpg"))) == count
        for split, count in counts.items()
        for name in CLASSES
    )
    if not complete:
        return False
    with tempfile.TemporaryDirectory() as place:
        first = draw(Path(place) / DRAWINGS, seed=seed, train_per_class=1, test_per_class=1)
        return all(
            path.read_bytes() == (folder / path.relative_to(first)).read_bytes()
            for path in first.rglob("*.jpg")
        )


# For people -----------------------------------------------------------------------------------------


def print_results(results: Mapping[str, Any], out: Path) -> None:
    """The table, what it means, and where to go from here."""
    base, novel, scores = results["base"], results["novel"], results["methods"]
    table = Table(title="Accuracy on test drawings", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in MEASURES.values():
        table.add_column(column, justify="right", min_width=6)
    for name, row in scores.items():
        table.add_row(Text(name, "bold"), *(f"{100 * row[measure]:.1f}%" for measure in MEASURES))
    console = Console(highlight=False)
    console.print()
    console.print(table)
    each = f"{results['shots']} drawings each"
    lines = (
        f"Base: the {len(base['classes'])} classes that prompts were learned on, {each}.",
        f"Novel: {len(novel['classes'])} other classes, never trained on.",
        *outcome(scores),
        "One seed of small drawings shows how this works; it does not rank methods.",
        "",
        f"time     {took(results['seconds'])}",
        f"picture  {out / PICTURE}",
        f"runs     {', '.join(str(out / name) for name in METHODS)}",
        "next     drople fit YOUR_PHOTOS --out RUN   (YOUR_PHOTOS has one folder a class)",
    )
    # Folding by rich would cut the paths and the command that people copy.
    console.print(Text("\n".join(lines)), soft_wrap=True)


def outcome(scores: Mapping[str, Scores]) -> list[str]:
    """What was measured, in words that favour no one."""
    best = max(row["harmonic_mean"] for row in scores.values())
    first = [name for name, row in scores.items() if row["harmonic_mean"] == best]
    drople, before = scores[METHODS["drople"]], scores[ZERO_SHOT]
    base, novel = (f"{100 * (drople[part] - before[part]):+.1f} points" for part in ("base", "novel"))
    return [
        f"Highest harmonic mean: {listed(first)}, {100 * best:.1f}%.",
        f"DroPLe against zero-shot: {base} on base, {novel} on novel.",
    ]


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def took(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
