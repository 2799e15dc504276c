"""What the paper's base-to-novel study costs: 11 datasets x seeds x methods, in GPU minutes from measured steps.

    for K in 5 50 200 500; do drople cost --backbones shape:vit-b-16 --classes $K --json > cost-$K.json; done
    python benchmarks/full_study.py cost-*.json [--epochs 30] [--shots 16] [--seeds 3]

A run trains on half of the classes and then predicts their validation images and all test images. How long a
step and a prediction take depends on the number of classes, so between the numbers that were measured
a straight line is drawn. Images a class may be fewer than the shots: minutes are at most these. Starting a process,
reading images from the disk and encoding class names are not in it. Prints a Markdown table.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drople.data.catalog import BENCHMARK, Dataset

Costs = dict[str, list[dict[str, Any]]]
STUDY = [entry for entry in BENCHMARK if entry.counts[0]]


def read(files: Sequence[Path]) -> Costs:
    """The rows of `drople cost --json` by method, by rising number of classes."""
    rows = [row for file in files for row in json.loads(file.read_text("utf-8"))]
    kinds = {(row["backbone"], row["device"], row["batch"]) for row in rows}
    if len(kinds) != 1:
        raise SystemExit(f"costs of one backbone, device and batch are needed, not of {sorted(kinds)}")
    found: Costs = {}
    for row in sorted(rows, key=lambda row: row["classes"]):
        found.setdefault(row["method"], []).append(row)
    return found


def between(rows: Sequence[dict[str, Any]], classes: int, values: Sequence[float]) -> float:
    measured = [row["classes"] for row in rows]
    if not measured[0] <= classes <= measured[-1]:
        raise SystemExit(
            f"{rows[0]['method']} was measured with {measured} classes; measure it with {classes} too"
        )
    return float(np.interp(classes, measured, values))


def steps(entry: Dataset, batch: int, epochs: int, shots: int) -> int:
    """The first half of an odd number of classes is the larger."""
    return epochs * math.ceil(shots * math.ceil(entry.classes / 2) / batch)


def minutes(rows: Sequence[dict[str, Any]], entry: Dataset, epochs: int, shots: int) -> float:
    """One run of a method on a dataset."""
    classes = math.ceil(entry.classes / 2)
    _, val, test = entry.counts
    seconds = (val / 2 + test) * between(rows, classes, [1 / row["images_per_second"] for row in rows])
    if all(row["step_seconds"] is not None for row in rows):
        step = between(rows, classes, [row["step_seconds"] for row in rows])
        seconds += step * steps(entry, rows[0]["batch"], epochs, shots)
    return seconds / 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("costs", nargs="+", type=Path, help="what drople cost --json printed")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    costs = read(given.costs)
    first = next(iter(costs.values()))[0]
    table = {
        entry: [minutes(rows, entry, given.epochs, given.shots) for rows in costs.values()] for entry in STUDY
    }
    print(f"| dataset | classes trained | steps a run | {' | '.join(costs)} |")
    print("|:--|--:|--:|" + "--:|" * len(costs))
    for entry, values in table.items():
        shown = " | ".join(f"{given.seeds * value:.1f}" for value in values)
        number = steps(entry, first["batch"], given.epochs, given.shots)
        print(f"| {entry.title} | {math.ceil(entry.classes / 2)} | {number:,} | {shown} |")
    totals = [given.seeds * sum(column) for column in zip(*table.values(), strict=True)]
    print(f"| all | | | {' | '.join(f'{total:.1f}' for total in totals)} |")
    runs = given.seeds * len(table) * len(costs)
    longest = max(value for values in table.values() for value in values)
    print(
        f"\nMinutes for {given.seeds} seeds: {first['backbone']} on {first['device']}, batch {first['batch']}, "
        f"{given.epochs} epochs, {given.shots} shots. All {runs} runs: {sum(totals):.0f} minutes on one device; "
        f"the longest single run, below which no cluster gets: {longest:.1f} minutes."
    )


if __name__ == "__main__":
    main()
