"""Where the time of `drople fit` goes.

    python benchmarks/profile_fit.py DATA [--epochs 30] [--shots 16] [--precision auto] [--set NAME=VALUE ...]

Runs `fit` and the evaluation after it as the command does, with a clock around the parts. A part's time is its
own: what it calls and has a clock too is taken out, so that the rows add up to the whole. Wall time of the main
thread; decoding runs beside the model, and only what the model waited for it is counted.
"""

import argparse
import functools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from drople import learner as learning
from drople import training
from drople.backbone import Backbone
from drople.cli import read_settings
from drople.data import images, load_data
from drople.dropout import TokenDropout
from drople.methods import Method

PHASES = {
    (learning.PromptLearner, "_set_up"): "setting up: backbone and method",
    (learning.PromptLearner, "_training_data"): "training images",
    (training.Training, "run"): "training",
    (learning.PromptLearner, "_validate"): "calibration on validation images",
    (learning.PromptLearner, "evaluate"): "evaluation, learned and zero-shot",
}
PARTS = {
    (images, "_collect"): "waiting for decoded images",
    (training, "augment"): "augmentation",
    (Backbone, "encode_images"): "image tower, forward",
    (Backbone, "encode_text"): "text tower, forward",
    (TokenDropout, "_see"): "attention maps, class and self scores",
    (TokenDropout, "drop"): "cross-modal score, draws and dropping",
    (Method, "forward"): "losses",
    (Accelerator, "backward"): "backward of both towers and the losses",
    (Accelerator, "clip_grad_norm_"): "clipping and optimiser",
    (torch.optim.AdamW, "step"): "clipping and optimiser",
    (training.Training, "_look"): "log and checkpoint",
    (training.Training, "_save"): "log and checkpoint",
}


class Clock:
    """Seconds and calls of each (phase, part), without those of the parts inside."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.phase = "the rest"
        self.inside: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start, phase = time.perf_counter(), self.phase
        self.inside.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            self.seconds[phase, name] += whole - self.inside.pop()
            self.calls[phase, name] += 1
            if self.inside:
                self.inside[-1] += whole

    def watch(self, owner: Any, name: str, *, part: str = "the rest", phase: str | None = None) -> None:
        """Put a clock around a function; with `phase` all that happens inside belongs to that phase."""
        work: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(work)
        def timed(*arguments: Any, **options: Any) -> Any:
            before = self.phase
            self.phase = phase or before
            try:
                with self.part(part):
                    return work(*arguments, **options)
            finally:
                self.phase = before

        setattr(owner, name, timed)

    def print(self) -> None:
        whole = sum(self.seconds.values())
        for phase in dict.fromkeys(phase for phase, _ in self.seconds):
            rows = {part: s for (of, part), s in self.seconds.items() if of == phase}
            print(f"{sum(rows.values()):8.1f} s {sum(rows.values()) / whole:6.1%}  {phase}")
            for part, seconds in sorted(rows.items(), key=lambda row: -row[1]):
                each = 1000 * seconds / self.calls[phase, part]
                print(f"{seconds:12.1f} s {seconds / whole:6.1%}  {part} ({each:.1f} ms each)")
        print(f"{whole:8.1f} s in all, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--method", default="drople")
    parser.add_argument("--backbone", default="pocket")
    parser.add_argument("--precision", default="auto", choices=("auto", "float32", "bf16"))
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()

    clock = Clock()
    for (owner, name), phase in PHASES.items():
        clock.watch(owner, name, phase=phase)
    for (owner, name), part in PARTS.items():
        clock.watch(owner, name, part=part)
    with tempfile.TemporaryDirectory() as folder, clock.part("the rest"):
        data = load_data(given.data)
        learner = learning.PromptLearner(
            given.backbone,
            given.method,
            precision=given.precision,
            epochs=given.epochs,
            **read_settings(given.set),
        )
        learner.fit(data, given.shots, out=Path(folder) / "run")
        result = learner.evaluate(data, "test")
    clock.print()
    print(f"accuracy {result['accuracy']:.1%} on {result['images']} test images")


if __name__ == "__main__":
    main()
