"""Training steps and inference on a GPU, ours beside the authors' own code and a naive DroPLe.

    python benchmarks/gpu.py --promptsrc CHECKOUT --maple CHECKOUT --dassl CHECKOUT [--out FILE.json] [--seconds 240]

ViT-B/16 shapes with random weights, ImageNet's class names, random images on the device. Ours is the whole step of
`drople.training` in bf16: augmentation, clipping, optimiser. Theirs (`peers.py`) is `forward_backward` in fp16 as
their configs say, without decoding and augmentation; the naive DroPLe (`naive_drople.py`) is in bf16 without
augmentation, and is the paper's: ours beside it has the paper's prompts too ("drople (paper)"), elsewhere it is our
default. What is left out favours them. Every rival has a process of its own, new for the cells that decide.

A step's time is the median of some blocks of steps, from one synchronisation to the next, after warm-up and capture.
Peak memory is what torch allocated, without training images; `held` is what it kept from the driver for it. In 8 GB all
16 images a class lie on the device too, as in a run. The floor is the FLOPs of our step of the same method (forward,
and backward to what is learned, nothing twice) over the measured bf16 rate of a product of two 8192 x 8192 matrices.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

Cell = tuple[int, int]  # classes, batch
Row = dict[str, Any]

OURS = ("drople", "promptsrc", "maple", "coop")
THEIRS, THEIR_MAPLE = "promptsrc (authors)", "maple (authors)"
AUTHORS = {THEIRS: "promptsrc", THEIR_MAPLE: "maple"}
PADDED, SHORT = "drople (naive)", "drople (naive, its longest class for 77 tokens)"
NAIVE = {PADDED: 77, SHORT: None}
# Ours with the prompts of the paper, as the naive one has them; and our default in little memory.
SAME, LIMITED, MACHINE = "drople (paper)", "drople (in 8 GB)", "machine"
LIMIT = 8 * 10**9
# Whose floor a rival is held to.
METHOD = {name: name for name in (*OURS, SAME)} | AUTHORS | dict.fromkeys(NAIVE, SAME) | {LIMITED: "drople"}

BLOCK_SECONDS, MOST_STEPS, BLOCKS = 0.15, 50, 3
INFERENCE_BATCH = 256


# In a rival's own process ---------------------------------------------------------------------------


class Worker:
    """Measures the cells of one rival, and prints a line of JSON for each."""

    def __init__(self, job: Row) -> None:
        self.job, self.rival, self.device = job, job["rival"], torch.device(job["device"])
        self.cuda = self.device.type == "cuda"

    def run(self) -> None:
        until = time.monotonic() + self.job["seconds"]
        for cell in self.job["cells"]:
            if time.monotonic() > until:
                return
            torch.manual_seed(0)
            try:
                row = self.machine() if self.rival == MACHINE else self.measure(*cell)
            except torch.OutOfMemoryError:
                row = {"error": "out of memory"}
            print(json.dumps({"rival": self.rival, "classes": cell[0], "batch": cell[1], **row}), flush=True)
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def measure(self, classes: int, batch: int) -> Row:
        """Seconds a step, peak memory, and for ours the FLOPs that must be done."""
        if self.rival == LIMITED and self.cuda:
            there = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(LIMIT / there, torch.cuda.current_device())
        count: Callable[[], int] | None = None
        if self.rival in AUTHORS:
            step = self.authors(classes, batch)
        elif self.rival in NAIVE:
            step = self.naive(classes, batch, NAIVE[self.rival])
        else:
            step, count = self.ours(classes, batch)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row: Row = {"seconds": self.seconds(step)}
        if self.cuda:
            row |= {"peak": torch.cuda.max_memory_allocated(), "held": torch.cuda.max_memory_reserved()}
        if count is not None and self.rival != LIMITED:
            row["flops"] = count()
        return row

    def ours(self, classes: int, batch: int) -> tuple[Callable[[], object], Callable[[], int] | None]:
        from drople.ablations import PAPER
        from drople.cost import SHOTS, flops
        from drople.learner import ROOM
        from drople.methods.base import TrainingData
        from drople.training import LOOK_EVERY, Training, TrainingOptions

        name = "drople" if self.rival in (SAME, LIMITED) else self.rival
        method = self.method(name, classes, PAPER if self.rival == SAME else None)
        backbone = method.backbone
        size, images = round(backbone.pixels.size * ROOM), batch * 4
        if self.rival == LIMITED:
            images = max(images, classes * SHOTS)
        data = TrainingData(
            torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8, device=self.device),
            torch.arange(images, device=self.device) % classes,
            torch.randn(images, backbone.embed_dim, device=self.device),
        )
        training = Training(method, data, TrainingOptions(batch_size=batch), seed=0, precision="auto")
        method.train()

        def forever() -> Iterator[torch.Tensor]:
            while True:
                yield from training._epoch()

        batches = forever()

        def step() -> None:
            training.pending.append(training._step(next(batches)))
            training.step = (training.step + 1) % training.steps
            if len(training.pending) == LOOK_EVERY:
                training._look(None)

        def count() -> int:
            budget, backbone.activation_bytes = backbone.activation_bytes, sys.maxsize  # nothing twice
            counted = flops(lambda: training._gradients(torch.arange(batch, device=self.device)))
            backbone.activation_bytes = budget
            return counted

        return step, count

    def naive(self, classes: int, batch: int, length: int | None) -> Callable[[], object]:
        from naive_drople import NaiveDroPLe

        from drople.ablations import PAPER
        from drople.regulariser import Progress

        method = self.method("drople", classes, PAPER)
        longest = method._sentences.base.shape[1]
        rival, size = NaiveDroPLe(method, length or longest), method.backbone.pixels.size
        images, plain = (
            torch.randn(batch, 3, size, size, device=self.device, dtype=method.backbone.dtype)
            for _ in range(2)
        )
        labels = torch.arange(batch, device=self.device) % classes
        optimizer = torch.optim.AdamW(method.parameters(), 2e-3)
        method.advance(Progress(5, 10, 0, 1))

        def step() -> float:
            loss = rival.loss(images, plain, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    def authors(self, classes: int, batch: int) -> Callable[[], object]:
        from peers import authors_step

        from drople.backbone.shapes import SHAPES

        name = AUTHORS[self.rival]
        checkouts = {key: Path(value).resolve() for key, value in self.job["checkouts"].items()}
        return authors_step(
            name,
            checkouts[name],
            checkouts["dassl"],
            words(classes),
            batch,
            SHAPES[self.job["shape"]],
            self.device,
        )

    def method(self, name: str, classes: int, options: Mapping[str, Any] | None = None) -> Any:
        from drople.methods import Task, make

        if not hasattr(self, "backbone"):
            from drople.backbone.shapes import shape_backbone

            dtype = torch.bfloat16 if self.cuda else torch.float32
            self.backbone = shape_backbone(self.job["shape"]).to(self.device, dtype)
        return make(name, self.backbone, Task(words(classes), ("a photo of a {}.",)), options or {}).to(
            self.device
        )

    def machine(self) -> Row:
        """The rate of matrix products; images a second of ours with folded weights and of the plain tower."""
        side = 8192 if self.cuda else 512
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        rate = 2 * side**3 / self.seconds(lambda: a @ b)
        method = self.method("drople", self.job["cells"][0][0]).eval()
        backbone = method.backbone
        batch = INFERENCE_BATCH if self.cuda else 2
        size = backbone.pixels.size
        images = torch.randn(batch, 3, size, size, device=self.device, dtype=backbone.dtype)
        weights = method.class_weights(method.task.words)
        plain = plain_tower(backbone)
        # By turns, so that a warmer chip is both's.
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in range(BLOCKS):
            times["ours"].append(self.seconds(lambda: method.logits(images, weights)))
            times["plain"].append(self.seconds(lambda: plain(images)))
        speed = {name: batch / statistics.median(each) for name, each in times.items()}
        name = torch.cuda.get_device_name() if self.cuda else "CPU"
        return {"device": name, "torch": torch.__version__, "rate": rate, "images": speed}

    def seconds(self, step: Callable[[], object]) -> float:
        """The median of some blocks of steps. A slow step is measured once, after one to warm up."""
        step()
        once = self.block(step, 1)
        steps = max(1, min(MOST_STEPS, int(BLOCK_SECONDS / once)))
        if once > 10 * BLOCK_SECONDS:
            return once
        return statistics.median(self.block(step, steps) / steps for _ in range(BLOCKS))

    def block(self, step: Callable[[], object], steps: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def plain_tower(backbone: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' own image tower with the same weights and its own fused attention."""
    import copy

    model = copy.deepcopy(backbone.model)
    model.set_attn_implementation("sdpa")

    @torch.no_grad()
    def features(images: torch.Tensor) -> torch.Tensor:
        return model.visual_projection(model.vision_model(pixel_values=images).pooler_output)

    return features


def words(count: int) -> tuple[str, ...]:
    """ImageNet's class names; of its thousand two are named as another one is."""
    from drople.cost import class_names

    return (*class_names(min(count, 998)), "construction crane", "swimming costume")[:count]


# In the parent --------------------------------------------------------------------------------------


def jobs(given: argparse.Namespace) -> list[tuple[str, list[Cell]]]:
    """What to measure, what decides first."""
    cells = [(classes, batch) for classes in given.classes for batch in given.batch]
    deciding = [cell for cell in ((500, 32), (50, 4), (1000, 32), (1000, 4)) if cell in cells] or cells
    rest = [cell for cell in cells if cell not in deciding]
    first, largest = deciding[:1], [max(cells)]
    plan = [
        (MACHINE, first),
        ("drople", deciding),
        (THEIRS, deciding),
        (SAME, first),
        (PADDED, first),
        (LIMITED, largest),
        ("drople", rest),
        (THEIRS, rest),
        (THEIR_MAPLE, deciding + rest),
        *((name, deciding + rest) for name in OURS[1:]),
        (SHORT, first),
        (PADDED, (deciding + rest)[1:]),
    ]

    def there(rival: str) -> bool:
        return rival not in AUTHORS or bool(getattr(given, AUTHORS[rival]) and given.dassl)

    return [(rival, wanted) for rival, wanted in plan if wanted and there(rival)]


def measure(rival: str, cells: list[Cell], given: argparse.Namespace, until: float) -> list[Row]:
    """A rival's rows from a process of its own; after a crash a new one goes on with the next cell."""
    rows: list[Row] = []
    while len(rows) < len(cells):
        left = until - time.monotonic()
        if left <= 0:
            return rows
        job = {
            "rival": rival,
            "cells": cells[len(rows) :],
            "shape": given.shape,
            "device": given.device,
            "seconds": left,
            "checkouts": {name: getattr(given, name) for name in ("promptsrc", "maple", "dassl")},
        }
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said, errors = process.communicate(json.dumps(job), timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()
            said, errors = process.communicate()
        rows += [json.loads(line) for line in said.splitlines() if line.startswith('{"rival"')]
        if process.returncode == 0 or time.monotonic() >= until:
            return rows
        classes, batch = cells[len(rows)]
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        print("\n".join(lines[-15:]), file=sys.stderr)
        rows.append({"rival": rival, "classes": classes, "batch": batch, "error": lines[-1]})
    return rows


def ratio(rows: dict[tuple[str, int, int], Row], key: str, one: str, other: str, cell: Cell) -> float | None:
    """`one` over `other` of a cell, where both were measured."""
    values = [rows.get((name, *cell), {}).get(key) for name in (one, other)]
    return values[0] / values[1] if values[0] and values[1] else None


def claims(rows: dict[tuple[str, int, int], Row]) -> list[tuple[str, float | None, str, bool | None]]:
    """What must hold: in words, as measured, as asked, and whether it does; None where it was not measured."""
    asked: list[tuple[str, float | None, str, Callable[[float], bool]]] = [
        (
            f"DroPLe's step against {rival}, {cell[0]} classes, batch {cell[1]}: times as fast",
            ratio(rows, "seconds", rival, SAME if rival == PADDED else "drople", cell),
            f"at least {least}",
            lambda value, least=least: value >= least,  # type: ignore[misc]
        )
        for rival, cell, least in ((THEIRS, (500, 32), 4), (PADDED, (500, 32), 8), (THEIRS, (50, 4), 2))
    ]
    asked += [
        (
            f"peak memory over that of {THEIRS}, 1000 classes, batch {batch}",
            ratio(rows, "peak", "drople", THEIRS, (1000, batch)),
            "at most 0.25",
            lambda value: value <= 0.25,
        )
        for batch in (32, 4)
    ]
    limited = rows.get((LIMITED, 1000, 32), {})
    asked.append(
        (
            "1000 classes, batch 32, torch held to 8 GB: memory held, in GB",
            9e99 if "error" in limited else limited["held"] / 1e9 if "held" in limited else None,
            "trains",
            lambda value: value <= LIMIT / 1e9,
        )
    )
    images = next((row["images"] for row in rows.values() if "images" in row), None)
    asked.append(
        (
            f"images a second over the plain image tower's, batch {INFERENCE_BATCH}, weights folded",
            images["ours"] / images["plain"] if images else None,
            "at least 0.95",
            lambda value: value >= 0.95,
        )
    )
    return [(what, value, bar, None if value is None else test(value)) for what, value, bar, test in asked]


def report(found: list[Row]) -> str:
    """The tables, in Markdown."""
    rows = {(row["rival"], row["classes"], row["batch"]): row for row in found}
    machine: Row = next(
        (row for row in found if "rate" in row), {"device": "unknown", "torch": "", "rate": None}
    )
    rate = machine["rate"]
    lines = [f"{machine['device']}, torch {machine['torch']}"]
    if rate:
        lines[0] += f", bf16 products at {rate / 1e12:.0f} TFLOP/s"
    lines += [
        "",
        "| classes | batch | | samples a second | ms a step | peak GB | held GB | share of the floor |",
    ]
    lines += ["|--:|--:|---|--:|--:|--:|--:|--:|"]
    for rival, classes, batch in sorted(
        rows, key=lambda key: (key[1], key[2], [MACHINE, *METHOD].index(key[0]))
    ):
        row = rows[rival, classes, batch]
        if rival == MACHINE:
            continue
        start = f"| {classes} | {batch} | {rival} "
        if "error" in row:
            lines.append(start + f"| {row['error']} | | | | |")
            continue
        flops = rows.get((METHOD[rival], classes, batch), {}).get("flops")
        share = f"{flops / rate / row['seconds']:.0%}" if flops and rate else ""
        memory = [f"{row[key] / 1e9:.2f}" if key in row else "" for key in ("peak", "held")]
        lines.append(
            start
            + f"| {batch / row['seconds']:,.1f} | {1000 * row['seconds']:,.2f} | {' | '.join(memory)} | {share} |"
        )
    lines += ["", "| classes | batch | ours | against | times as fast | their peak memory over ours |"]
    lines += ["|--:|--:|---|---|--:|--:|"]
    pairs = [("drople", THEIRS), *((mine, rival) for rival, mine in AUTHORS.items())]
    pairs += [(SAME, rival) for rival in NAIVE]
    for cell in sorted({key[1:] for key in rows}):
        for mine, rival in pairs:
            faster = ratio(rows, "seconds", rival, mine, cell)
            smaller = ratio(rows, "peak", rival, mine, cell)
            if faster is not None:
                shown = "" if smaller is None else f"{smaller:.1f}"
                lines.append(f"| {cell[0]} | {cell[1]} | {mine} | {rival} | {faster:.1f} | {shown} |")
    lines += ["", "| what must hold | measured | asked | holds |", "|---|--:|---|---|"]
    for what, value, bar, holds in claims(rows):
        shown = "not measured" if value is None else "failed" if value > 1e9 else f"{value:.2f}"
        lines.append(f"| {what} | {shown} | {bar} | {'' if holds is None else 'yes' if holds else 'NO'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("promptsrc", "maple", "dassl"):
        parser.add_argument(f"--{name}", help=f"a checkout of the authors' {name}")
    parser.add_argument("--classes", type=int, nargs="+", default=[50, 500, 1000])
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--out", type=Path, help="the rows, as JSON")
    parser.add_argument("--seconds", type=float, default=240, help="begin no measurement after so long")
    parser.add_argument("--shape", default="vit-b-16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        Worker(json.loads(sys.stdin.read())).run()
        return
    begun, found = time.monotonic(), []
    for rival, cells in jobs(given):
        start = time.monotonic()
        found += measure(rival, cells, given, begun + given.seconds)
        print(f"{rival} {cells}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        # A run that is cut short has said what it knows.
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(report(found))


if __name__ == "__main__":
    main()
