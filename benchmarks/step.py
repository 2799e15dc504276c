"""The cost of a DroPLe training step against another: the same prompts, updates and pull without dropout and residual
entropy, or DroPLe written plainly (naive_drople.py), then the paper's, without updates and pull.

    python benchmarks/step.py [--against plain] [--classes 37] [--batch 32] [--steps 12] [--backbone pocket]
    python benchmarks/step.py --against naive
    python benchmarks/step.py --memory --classes 1000

Steps of both alternate in one process, so that whatever else the machine does falls on both; the claim is the
ratio of the medians. `--memory` prints the peak resident memory of one DroPLe step.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from naive_drople import NaiveDroPLe
from torch import Tensor

from drople.ablations import PAPER
from drople.backbone import Backbone
from drople.methods import Batch, Method, Progress, Task, make
from drople.methods.drople import DeepPromptOptions
from drople.options import names


def words(count: int) -> tuple[str, ...]:
    """Class names of the usual length: two or three words."""
    colours = ("red", "green", "golden", "spotted", "northern", "old", "small", "wooden", "wild", "striped")
    things = (
        "bird",
        "terrier",
        "flower",
        "sports car",
        "fruit salad",
        "river bank",
        "church",
        "guitar",
        "cup",
        "lizard",
    )
    kinds = (
        "",
        "of spring",
        "type b",
        "with stripes",
        "at night",
        "in snow",
        "from above",
        "mark two",
        "junior",
        "x",
    )
    names = [f"{c} {t} {k}".strip() for k in kinds for t in things for c in colours]
    return tuple(names[:count])


def step(method: Method, loss: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    method.advance(Progress(5, 10, 0, 1))
    loss().backward()
    for parameter in method.parameters():
        parameter.grad = None
    return time.perf_counter() - start


def loss_of(method: Method, batch: Batch) -> Callable[[], Tensor]:
    return lambda: torch.stack(list(method.training_step(batch).values())).sum()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", choices=("plain", "naive"), default="plain")
    parser.add_argument("--backbone", default="pocket")
    parser.add_argument("--classes", type=int, default=37)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--memory", action="store_true", help="peak memory of one DroPLe step instead")
    given = parser.parse_args()

    torch.manual_seed(0)
    backbone = Backbone.load(given.backbone)
    size = backbone.pixels.size
    batch = Batch(
        images=torch.randn(given.batch, 3, size, size),
        labels=torch.randint(given.classes, (given.batch,)),
        frozen=torch.randn(given.batch, backbone.embed_dim),
    )
    task = Task(words(given.classes), ("a photo of a {}.",))
    naively = given.against == "naive"
    drople = make("drople", backbone, task, PAPER if naively else {})
    ours = loss_of(drople, batch)
    if given.memory:
        step(drople, ours)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        print(f"{given.classes} classes, batch {given.batch}: peak memory {peak:.2f} GB")
        return
    if naively:
        other, naive = drople, NaiveDroPLe(drople)
        theirs = partial(naive.loss, batch.images, batch.images, batch.labels)
    else:
        same = {name: getattr(drople.options, name) for name in names(DeepPromptOptions)}
        other = make("baseline", backbone, task, {**same, "consistency": drople.regulariser.options.l2})
        theirs = loss_of(other, batch)
    times: dict[str, list[float]] = {"drople": [], given.against: []}
    for number in range(given.steps + 2):
        for name, method, loss in ((given.against, other, theirs), ("drople", drople, ours)):
            seconds = step(method, loss)
            if number >= 2:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{given.classes} classes, batch {given.batch}, {backbone.name}, {torch.get_num_threads()} threads")
    for name, seconds in medians.items():
        print(f"  {name:8s} {1000 * seconds:8.1f} ms a step")
    print(f"  ratio    {medians['drople'] / medians[given.against]:8.2f}")


if __name__ == "__main__":
    main()
