"""Is one method above the others? Paired differences of the harmonic mean of base and novel, from records.

    python benchmarks/study/compare.py RECORDS [RECORDS ...] [--ours drople] [--protocol long-tail|few-shot]

For every other label of the same backbone and shots: the average over datasets (harmonic mean of the average base and
novel accuracy, as the tables have it; with few shots of all classes their accuracy) for each seed, the mean difference
to ours over seeds with its standard error, the same over all pairs of dataset and seed, how many of these pairs are
won, and Student's t for pairs. Only what both have is compared. A difference counts here if it is larger than its
standard error over seeds. Prints Markdown.
"""

import argparse
import math
import statistics
from collections import defaultdict
from pathlib import Path

from drople.metrics import harmonic_mean
from drople.run_records import read_records

Pair = tuple[str, int]  # dataset, seed
Scores = dict[Pair, tuple[float, float]]  # base, novel in %
# Where all classes are trained the harmonic mean is the accuracy.
PARTS = {"base-to-novel": ("base", "novel"), "long-tail": ("base", "novel"), "few-shot": ("test", "test")}


def scores(folders: list[Path], protocol: str = "base-to-novel") -> dict[tuple[str, int], dict[str, Scores]]:
    """By backbone and shots, then by label."""
    found: dict[tuple[str, int], dict[str, Scores]] = defaultdict(lambda: defaultdict(dict))
    for record in read_records(folders):
        if record["protocol"] != protocol or record["status"] != "done":
            continue
        both = tuple(100 * record["results"][part]["accuracy"] for part in PARTS[protocol])
        of = found[Path(record["backbone"]).name, record["shots"]]
        of[record["label"]][record["dataset"], record["seed"]] = both
    return found


def average(own: Scores, pairs: set[Pair], seed: int) -> float:
    base, novel = zip(*(own[pair] for pair in pairs if pair[1] == seed), strict=True)
    return harmonic_mean(statistics.mean(base), statistics.mean(novel))


def spread(differences: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    if len(differences) < 2:
        return statistics.mean(differences), math.nan
    return statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def whole(own: Scores, other: Scores) -> set[Pair]:
    """The pairs of those seeds that both have for the same datasets: averages must be over the same ones."""
    pairs = own.keys() & other.keys()
    datasets = {dataset for dataset, _ in pairs}
    seeds = {seed for _, seed in pairs if all((dataset, seed) in pairs for dataset in datasets)}
    return {pair for pair in pairs if pair[1] in seeds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--ours", default="drople", help="the label that the others are held against")
    parser.add_argument("--protocol", choices=PARTS, default="base-to-novel")
    given = parser.parse_args()
    for (backbone, shots), labels in scores(given.records, given.protocol).items():
        if given.ours not in labels:
            print(f"{backbone}, {shots} shots: no {given.ours}\n")
            continue
        own = labels[given.ours]
        print(f"{given.ours} against, on {backbone} with {shots} shots:\n")
        print("| | datasets | seeds | by seeds | by datasets and seeds | won | t | counts |")
        print("|:--|--:|--:|--:|--:|--:|--:|:--|")
        for label, other in labels.items():
            pairs = whole(own, other)
            if label == given.ours or not pairs:
                continue
            seeds = sorted({seed for _, seed in pairs})
            by_seed = [average(own, pairs, seed) - average(other, pairs, seed) for seed in seeds]
            each = [harmonic_mean(*own[pair]) - harmonic_mean(*other[pair]) for pair in pairs]
            (mean, error), (mean_each, error_each) = spread(by_seed), spread(each)
            counts = "yes" if abs(mean) > error else "no"
            print(
                f"| {label} | {len({d for d, _ in pairs})} | {len(seeds)} | {mean:+.2f} ± {error:.2f} | "
                f"{mean_each:+.2f} ± {error_each:.2f} | {sum(d > 0 for d in each)}/{len(each)} | "
                f"{mean_each / error_each if error_each else math.inf:+.1f} | {counts} |"
            )
        print()


if __name__ == "__main__":
    main()
