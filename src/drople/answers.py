"""What the commands show: predictions, evaluations and methods, as plain data and as text for people."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drople.errors import DropleError

if TYPE_CHECKING:
    from drople.learner import PromptLearner

UNFOLDED = 100_000  # columns


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


# Predictions ---------------------------------------------------------------------------------------


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Files as given, folders as the images in them."""
    from drople.safe_image import EXTENSIONS

    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            seen = (p for p in path.rglob("*") if not p.name.startswith("."))
            inside = sorted(p for p in seen if p.suffix.lower() in EXTENSIONS and p.is_file())
            if not inside:
                raise DropleError(f"the folder {path} holds no images.")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise DropleError(f"there is no image {path}: check the path.")
    return files


def predictions(
    learner: "PromptLearner", images: Sequence[Path], classes: Sequence[str] | None, top: int
) -> list[dict[str, Any]]:
    """One object an image: path, class, probability and the `top` most likely classes."""
    files = image_files(images)
    named = list(learner.classes_ if classes is None else classes)
    good, probabilities = learner.readable_proba(files, classes)
    rows = []
    for index, row in zip(good, probabilities, strict=True):
        best = row.argsort()[::-1][: max(1, top)]
        listed = [{"class": named[k], "probability": round(float(row[k]), 6)} for k in best]
        rows.append({"path": str(files[index]), **listed[0], "top": listed})
    return rows


def print_predictions(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("image", "class", "sure", "then"):
        table.add_column(column, justify="right" if column == "sure" else "left", overflow="fold")
    for row in rows:
        others = ", ".join(f"{o['class']} {percent(o['probability'])}" for o in row["top"][1:])
        table.add_row(
            Text(row["path"]), Text(row["class"], "bold"), percent(row["probability"]), Text(others, "dim")
        )
    # In a file or a pipe nobody looks at the width, and a folded path cannot be searched for.
    Console(width=None if Console().is_terminal else UNFOLDED).print(table)


# Fit and evaluate ----------------------------------------------------------------------------------


def accuracy_table(result: dict[str, Any]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title=Text(f"{result['images']} images of {result['split']}", "table.title"),
        title_justify="left",
    )
    table.add_column("")
    table.add_column("accuracy", justify="right")
    gain = result["accuracy"] - result["zero_shot_accuracy"]
    table.add_row("before (zero-shot)", percent(result["zero_shot_accuracy"]))
    table.add_row("after", Text(percent(result["accuracy"]), "bold"), f"({100 * gain:+.1f} points)")
    table.add_row(
        "calibration error",
        percent(result["ece"]),
        f"({percent(result['ece_uncalibrated'])} before calibration{' on these images' * (result['split'] == 'val')})",
    )
    return table


def print_fit(learner: "PromptLearner", out: Path, result: dict[str, Any] | None) -> None:
    from drople.metrics import at_bound

    console = Console(highlight=False)
    if result is not None:
        console.print(accuracy_table(result))
    checked = learner.metrics_.get("validation", {}).get("images", 0)
    if checked and at_bound(learner.temperature_):
        doubt = f"{checked} validation images do not tell how sure to be: take probabilities with care, or add more"
        console.print(Text(doubt, "yellow"))
    trained = f"{learner.trainable_:,} numbers learned"
    console.print(Text(f"{out}: {trained}. Next: drople predict {quote(str(out))} IMAGE...", "dim"))


def print_evaluation(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(accuracy_table(result))
    seen = [(name, r) for name, r in result["per_class"].items() if r["count"]]
    seen.sort(key=lambda row: (row[1]["accuracy"], row[0]))
    table = Table(box=None, pad_edge=False, title="classes, hardest first", title_justify="left")
    for column, justify in (("class", "left"), ("accuracy", "right"), ("images", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, r in seen[:10]:
        table.add_row(Text(name), percent(r["accuracy"]), str(r["count"]))
    console.print(table)
    if len(seen) > 10:
        console.print(
            f"... and {len(seen) - 10} more; --json has them all, and the confusion matrix", style="dim"
        )


# Benchmarks and data ---------------------------------------------------------------------------------


def terminal_width() -> int:
    return Console().width


def print_benchmark(records: Sequence[dict[str, Any]]) -> None:
    from drople.tables import render, tables

    if any(r["status"] == "done" for r in records):
        print(render(tables(list(records)), "text", width=terminal_width()))


def refuse_failures(records: Sequence[dict[str, Any]]) -> None:
    """A benchmark in which a run failed ends in an error, after all that could be done."""
    failed = [r for r in records if r["status"] != "done"]
    if failed:
        why = failed[0]["error"] or "no reason recorded"
        raise DropleError(
            f"{len(failed)} of {len(records)} runs failed; the first, {failed[0]['label']} on "
            f"{failed[0]['dataset']}: {why.rstrip('.')}. Their records say why; --retry-failed "
            "tries them again."
        )


def print_lines(lines: Sequence[str]) -> None:
    """Lines with file names in them: neither wrapped nor coloured."""
    for line in lines:
        Console().print(Text(line), soft_wrap=True)


def print_datasets(rows: Sequence[dict[str, str]]) -> None:
    """Two lines a dataset: what it is, and below it where it is published and where it lies."""
    console = Console(highlight=False)
    for row in rows:
        what = Text(f"{row['name']:16}", "bold")
        what.append(f"{row['classes']:>5} classes  {row['domain']}; {row['licence']}", "not bold")
        console.print(what, soft_wrap=True)
        console.print(Text(f"      {row['source']} ({row['get']})", "dim"), soft_wrap=True)
        if row["found"]:
            console.print(Text(f"      found at {row['found']}", "green"), soft_wrap=True)


# Methods -------------------------------------------------------------------------------------------


def list_methods() -> list[dict[str, Any]]:
    """Every method with its citation, kind, what it learns on ViT-B/16 (100 classes, 16 shots) and whether
    DroPLe can wrap it."""
    from drople.cost import trainable_on
    from drople.methods import REGISTRY, wraps

    return [
        {
            "name": name,
            "title": kind.title,
            "kind": kind.kind,
            "citation": kind.citation,
            "parameters_vit_b_16": trainable_on(name),
            "wraps": wraps(kind),
            "presets": list(kind.presets),
        }
        for name, kind in sorted(REGISTRY.items())
    ]


def print_methods(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "what it is", "kind", "citation", "learns", "+drople"):
        table.add_column(column, justify="right" if column == "learns" else "left", no_wrap=column == "name")
    for row in rows:
        table.add_row(
            Text(row["name"], "bold"),
            row["title"],
            row["kind"],
            row["citation"],
            f"{row['parameters_vit_b_16']:,}",
            "yes" if row["wraps"] else "",
        )
    Console().print(table)
    Console().print(
        "learns: numbers learned on ViT-B/16 with 100 classes of 16 shots. drople methods NAME lists the options "
        "of one; NAME+drople trains it with token dropout.",
        style="dim",
    )


def describe_method(name: str) -> dict[str, Any]:
    """A method's options, those of DroPLe where it wraps it, and those of training, with defaults and help."""
    from drople.methods import find, option_groups
    from drople.training import TrainingOptions

    kind, _ = find(name)
    groups = option_groups(name) | {"training": TrainingOptions}
    return {
        "name": name,
        "about": (sys_doc(kind) or kind.title).strip(),
        "presets": {p: dict(v) for p, v in kind.presets.items()},
        "preset_with": dict(kind.preset_with),
        "options": {
            group: {
                f.name: {"default": f.default, "help": f.metadata.get("help", "")}
                for f in dataclasses.fields(options)
            }
            for group, options in groups.items()
        },
    }


def sys_doc(kind: type) -> str | None:
    import sys

    return sys.modules[kind.__module__].__doc__


def print_method(described: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(Text(described["about"]))
    for group, options in described["options"].items():
        if not options:
            continue
        table = Table(box=None, pad_edge=False, title=f"\noptions of {group}", title_justify="left")
        table.add_column("--set")
        table.add_column("default")
        table.add_column("meaning")
        for name, row in options.items():
            default = (
                ",".join(map(str, row["default"]))
                if isinstance(row["default"], tuple)
                else str(row["default"])
            )
            table.add_row(Text(name, "bold"), default, Text(row["help"]))
        console.print(table)
    if described["presets"]:
        console.print(f"presets: {', '.join(described['presets'])} (--preset NAME)", style="dim")
    for backbone, preset in described["preset_with"].items():
        console.print(f"with {backbone}, drople fit takes {preset} (--preset none: the above)", style="dim")
