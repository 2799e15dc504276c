"""The runs behind docs/results.md, several at a time on one machine.

    python benchmarks/tables.py --root DATA --out RECORDS [--jobs 12] [--seconds 500] [--tables NAME ...]

Does what the `drople benchmark` commands of docs/results.md do, run by run and record by record, only in
parallel; it too goes on where it stopped. `drople table RECORDS` prints the tables.
"""

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from drople.backbone import Backbone
from drople.data.images import decode, remember
from drople.learner import ROOM
from drople.methods import REGISTRY
from drople.protocols import Run, benchmark, find_data, plan, recorded, summary

FOUR = ("caltech101", "oxford_pets", "eurosat", "dtd10")
SEEDS = (1, 2, 3)
OURS = ("zero-shot", "drople")
ROOM_FOR_PICTURES = 16 << 30
# The rows of the study on real weights (docs/results.md).
STUDY = ("zero-shot", "coop", "cocoop", "kgcoop", "maple", "promptsrc", "baseline")


def tables(backbone: str) -> dict[str, list[Run]]:
    common: dict[str, Any] = {"backbone": backbone, "options": {}}
    every = sorted(REGISTRY)
    return {
        "few-shot-ours": plan("few-shot", FOUR, OURS, SEEDS, **common),
        "cross-dataset": plan("cross-dataset", FOUR[1:], OURS, SEEDS, source=FOUR[0], **common),
        "domain-shift": plan("domain-shift", ("pacs",), OURS, SEEDS, **common),
        "long-tail": plan("long-tail", FOUR, OURS, SEEDS, **common)
        + plan("long-tail", FOUR, ("drople",), SEEDS, post_hoc="gla", **common),
        "base-to-novel": plan("base-to-novel", FOUR, every, SEEDS, **common),
        "few-shot": plan("few-shot", FOUR, every, SEEDS, **common),
        "pacs": plan("few-shot", ("pacs",), OURS, SEEDS, **common)
        + plan("base-to-novel", ("pacs",), OURS, SEEDS, **common)
        + plan("long-tail", ("pacs",), OURS, SEEDS, **common),
        "study": plan("base-to-novel", FOUR, STUDY, SEEDS, **common),
        "study-shift": plan("domain-shift", ("pacs",), (*STUDY, "drople"), SEEDS, **common),
        "study-long-tail": plan("long-tail", FOUR, STUDY, SEEDS, **common),
        "study-drople": plan("base-to-novel", FOUR, ("drople",), SEEDS, **common),
        "study-more-seeds": plan(
            "base-to-novel", FOUR, ("maple", "promptsrc", "baseline", "drople"), range(4, 9), **common
        )
        + plan("base-to-novel", FOUR, ("drople",), range(4, 9), preset="low_rank", **common),
        "study-presets": [
            run
            for preset in ("paper", "released", "low_rank")
            for run in plan("base-to-novel", FOUR, ("drople",), SEEDS, preset=preset, **common)
        ],
        "few-shot-low-rank": plan("few-shot", FOUR, ("drople",), SEEDS, preset="low_rank", **common),
    } | {
        f"ablation-{name}": plan("base-to-novel", FOUR, (), SEEDS, ablation=name, **common)
        for name in ("components", "scores", "default")
    }


def decode_once(runs: list[Run], root: Path, backbone: str) -> None:
    """The pictures of all runs, in the parent: workers that are forked from it have them."""
    remember(ROOM_FOR_PICTURES)
    pixels = Backbone.load(backbone).pixels
    for name in dict.fromkeys(name for run in runs for name in (run.dataset, *run.targets)):
        data, _ = find_data(name, root)
        rest = (example for part in data.extra.values() for example in part)
        for examples, size in (
            ((*data.train, *data.val, *data.test, *rest), pixels.size),
            (data.train, round(pixels.size * ROOM)),
        ):
            decode([example.image for example in examples], size, pixels.resample)


def one(job: tuple[Run, Path, Path, str]) -> str:
    run, root, out, device = job
    torch.set_num_threads(1)
    (_, record, there), *_ = benchmark([run], root, out, device=device, retry_failed=True)
    return summary(record) + (" (was there)" if there else f" ({record['timing']['seconds']:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="where the datasets lie")
    parser.add_argument("--out", type=Path, required=True, help="where the records go")
    parser.add_argument("--backbone", default="pocket")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further run after so long")
    parser.add_argument("--tables", nargs="*", default=None)
    parser.add_argument("--methods", nargs="*", default=None, help="only these of the tables' methods")
    parser.add_argument("--without", nargs="*", default=(), help="all but these")
    parser.add_argument("--labels", nargs="*", default=None, help="only these of the tables' rows")
    parser.add_argument("--datasets", nargs="*", default=None, help="only these of the tables' datasets")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    wanted = [
        run
        for name, runs in tables(given.backbone).items()
        if not given.tables or name in given.tables
        for run in runs
        if run.method not in given.without and (given.methods is None or run.method in given.methods)
        if given.labels is None or run.label in given.labels
        if given.datasets is None or run.dataset in given.datasets
    ]
    runs = list({run.path: run for run in wanted}.values())
    # The longest first, so that none is left alone at the end.
    left = (run for run in runs if recorded(given.out / run.path, retry_failed=True) is None)
    todo = sorted(left, key=lambda run: -(run.shots or 0))
    print(f"{len(runs)} runs, {len(todo)} to do", flush=True)
    begun, ready = time.monotonic(), 0
    waiting = iter(todo)
    decode_once(todo, given.root, given.backbone)
    print(f"decoded in {time.monotonic() - begun:.0f} s", flush=True)
    with mp.get_context("fork").Pool(given.jobs) as pool:
        # Asked to end, it ends its workers too: left alone they would go on.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; what is done is kept"))
        pending: list[Any] = []
        while True:
            while len(pending) < given.jobs and time.monotonic() - begun < given.seconds:
                run = next(waiting, None)
                if run is None:
                    break
                pending.append(pool.apply_async(one, ((run, given.root, given.out, given.device),)))
            if not pending:
                break
            finished = [p for p in pending if p.ready()]
            for result in finished:
                ready += 1
                print(f"[{ready}/{len(todo)}, {time.monotonic() - begun:.0f} s] {result.get()}", flush=True)
                pending.remove(result)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
