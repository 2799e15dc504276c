"""Does a benchmark that is killed again and again give the table of one that is left alone?

    python benchmarks/kill_benchmark.py [--kills 20] [--backbone pocket] [--epochs 2]
    python benchmarks/kill_benchmark.py --data ROOT --datasets dtd10 eurosat

Two methods with three seeds make six runs on each dataset. One process goes through undisturbed; another
is sent SIGKILL at random moments and started anew until it gets to its end; that is done again from the
beginning until all kills are spent. The tables of both must be the same letter for letter, and so must the
records but for their timing. Without --datasets the drawings of `drople demo` are used, small, so that no
data is needed. Exit status 0: equal; 1: not.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drople.demo.drawings import draw

DROPLE = (sys.executable, "-c", "from drople.cli import main; main()")


def command(given: argparse.Namespace, datasets: list[str], out: Path) -> list[str]:
    listed = {
        "--datasets": datasets,
        "--methods": given.methods,
        "--seeds": ["1", "2", "3"],
        "--shots": [str(given.shots)],
        "--backbone": [given.backbone],
        "--epochs": [str(given.epochs)],
        "--root": [given.data],
        "--out": [str(out)],
    }
    return [
        *DROPLE,
        "benchmark",
        "base-to-novel",
        *(text for flag, texts in listed.items() for text in (flag, *texts)),
    ]


def undisturbed(call: list[str], out: Path) -> float:
    """Go through; the seconds from the first file that was written to the end."""
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_work(process, out)
    begun = time.monotonic()
    if process.wait():
        raise SystemExit(f"the benchmark ended with {process.returncode}: {' '.join(call)}")
    return time.monotonic() - begun


def killed(call: list[str], out: Path, seconds: float) -> bool:
    """Kill it so long after its first file, unless it got to its end: a kill while Python starts tells little."""
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_work(process, out)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    if process.returncode:
        raise SystemExit(f"the benchmark ended with {process.returncode}: {' '.join(call)}")
    return False


def wait_for_work(process: "subprocess.Popen[bytes]", out: Path) -> None:
    before = written(out)
    while process.poll() is None and written(out) == before:
        time.sleep(0.01)


def written(out: Path) -> set[tuple[str, int]]:
    """The files, and when they were written; one may vanish while it is looked at."""
    found = set()
    for path in out.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((str(path), path.stat().st_mtime_ns))
    return found


def table(out: Path) -> str:
    call = [*DROPLE, "table", str(out)]
    return subprocess.run(call, check=True, capture_output=True, encoding="utf-8").stdout


def records(out: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(out.rglob("*.json")):
        found[path.relative_to(out).as_posix()] = json.loads(path.read_text("utf-8"))
        found[path.relative_to(out).as_posix()].pop("timing")
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Which fields of which records differ: the environment does when the source changes meanwhile."""
    names = sorted({*one, *other})
    return [
        f"{name}: {field}"
        for name in names
        for field in sorted({*one.get(name, {}), *other.get(name, {})})
        if one.get(name, {}).get(field) != other.get(name, {}).get(field)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--backbone", default="pocket", help="pocket, or a folder")
    parser.add_argument(
        "--data", default="data", metavar="ROOT", help="where datasets lie that are given by name"
    )
    parser.add_argument("--datasets", nargs="+", help="names, folders or tables [drawings]")
    parser.add_argument("--methods", nargs="+", default=["coop", "drople"])
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="another seed kills at other moments")
    given = parser.parse_args()
    moments = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="drople-kill-") as folder:
        place = Path(folder)
        datasets = given.datasets or [
            str(draw(place / "drawings", train_per_class=6, test_per_class=4, size=96))
        ]
        left_alone = place / "undisturbed"
        seconds = undisturbed(command(given, datasets, left_alone), left_alone)
        print(table(left_alone))
        kills = inside = rounds = 0
        equal = True
        while kills < given.kills:
            rounds += 1
            out = place / f"disturbed{rounds}"
            call = command(given, datasets, out)
            # Within the first third of the work, so that there is more left to kill.
            while kills < given.kills and killed(call, out, moments.uniform(0, 1 / 3) * seconds):
                kills += 1
                left = any((out / ".work").glob("*/*"))
                inside += left
                whole = len(list(out.glob("*/[!.]*.json")))
                print(
                    f"kill {kills}: {whole} records written{', one run begun' * left}",
                    file=sys.stderr,
                    flush=True,
                )
            undisturbed(call, out)
            changed = differing(records(left_alone), records(out))
            same = {
                "tables": table(out) == table(left_alone),
                "records but timing": not changed,
                "what lies beside them": not (out / ".work").exists(),
            }
            equal = equal and all(same.values())
            print(
                f"round {rounds}: "
                + ", ".join(f"{what} {'equal' if ok else 'DIFFER'}" for what, ok in same.items())
            )
            print("\n".join(changed), end="\n" * bool(changed))
        print(
            f"{len(records(left_alone))} runs, {kills} kills in {rounds} rounds, {inside} of them inside a run: ",
            end="",
        )
        print("equal" if equal else "NOT EQUAL")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
