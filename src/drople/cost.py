"""What a method costs: what it learns, the FLOPs and time of a step, images a second, memory.

The paper's efficiency figure. Each method is measured in a process of its own, since a process gives back
no peak of memory, on random images and ImageNet's class names: costs do not hang on what is seen.

FLOPs are those of matrix products and convolutions, two for a multiply-add. Memory is the peak while training
(for a method that learns nothing, while predicting), weights and activations, without the images: on a GPU
what torch allocated, on a CPU what the process grew by.
"""

import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drople.errors import DropleError

if TYPE_CHECKING:
    import torch

    from drople.backbone import Backbone
    from drople.methods import Method

SHOTS = 16
REPEATS = 3
WORKER = "from drople.cost import worker; worker()"


@dataclass(frozen=True)
class Cost:
    """One method on one backbone; None where a method does not train."""

    method: str
    backbone: str
    classes: int
    batch: int
    device: str
    trainable: int
    training_flops: int | None  # a step
    inference_flops: int  # an image
    step_seconds: float | None
    images_per_second: float
    memory_bytes: int


# Counting ------------------------------------------------------------------------------------------


def trainable_on(method: str, shape: str = "vit-b-16", *, classes: int = 100, shots: int = SHOTS) -> int:
    """How many numbers a method learns on a backbone that need not be there."""
    from drople.methods import Task, make
    from drople.methods.adapter import CacheAdapter

    backbone = _hollow_shape(shape)

    def count(number: int) -> int:
        made = make(method, backbone, Task(class_names(number), ("a photo of a {}.",)), {})
        keys = made.cache.keys if isinstance(made, CacheAdapter) else None
        learned_keys = keys is not None and any(keys is p for p in made.parameters())
        return made.trainable + (number * shots * backbone.embed_dim if learned_keys else 0)

    # Every count is a + b K; two small tasks give both without encoding the names of all classes.
    two, three = count(2), count(3)
    return two + (classes - 2) * (three - two)


@lru_cache
def _hollow_shape(name: str) -> "Backbone":
    from drople.backbone.shapes import shape_backbone

    return shape_backbone(name, hollow=True)


def class_names(count: int) -> tuple[str, ...]:
    """So many of ImageNet's class names."""
    text = (resources.files("drople.data") / "imagenet_classes.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    names = tuple(dict.fromkeys(line.split(maxsplit=1)[1] for line in lines))
    if not 2 <= count <= len(names):
        raise DropleError(f"costs can be measured for 2 to {len(names)} classes, not {count}.")
    return names[:count]


# Measuring -----------------------------------------------------------------------------------------


def costs(
    methods: Sequence[str] | None = None,
    backbones: Sequence[str] = ("pocket",),
    *,
    classes: int = 100,
    batch: int = 32,
    device: str = "auto",
    repeats: int = REPEATS,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Cost]:
    """Every method on every backbone: what `Backbone.load` takes, or a shape such as `shape:vit-b-16`."""
    from drople.methods import REGISTRY, find

    chosen = list(methods) if methods else sorted(REGISTRY)
    for name in chosen:
        find(name)
    class_names(classes)
    if batch < 1 or repeats < 1:
        raise DropleError(f"batch is {batch} and repeats {repeats}: both must be at least 1.")
    asked = [(method, backbone) for backbone in backbones for method in chosen]
    found = []
    for number, (method, backbone) in enumerate(asked, 1):
        found.append(_elsewhere(method, str(backbone), classes, batch, device, repeats))
        if on_done is not None:
            on_done(number, len(asked))
    return found


def _elsewhere(*arguments: object) -> Cost:
    """`measure` in a new process."""
    home = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}; a killed process often lacked memory"
        raise DropleError(f"cannot measure {arguments[0]} on {arguments[1]}: {reason}")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise DropleError(answer["error"])
    return Cost(**answer)


def worker() -> None:
    """The other end of `_elsewhere`: arguments as JSON in, a `Cost` as the last line out."""
    try:
        answer = asdict(measure(*json.loads(sys.stdin.read())))
    except DropleError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def measure(method: str, backbone: str, classes: int, batch: int, device: str, repeats: int) -> Cost:
    """Measure here. Memory is right in a fresh process only."""
    import torch

    from drople.backbone import Backbone
    from drople.backbone.shapes import PREFIX, shape_backbone
    from drople.data.images import normalise
    from drople.methods import Task, make, option_names

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError):
        raise DropleError(f"device {device!r} cannot be used here: give cpu, or auto.") from None
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    _import_everything()
    before = _resident()
    torch.manual_seed(0)
    towers = shape_backbone(backbone) if backbone.startswith(PREFIX) else Backbone.load(backbone)
    towers.to(place, dtype)
    # A cache takes its keys from features that are there, instead of encoding views of every image.
    options = {"cache_views": 0} if "cache_views" in option_names(method) else {}
    words = class_names(classes)
    made = make(method, towers, Task(words, ("a photo of a {}.",)), options).to(place)
    step, gradients = _training_step(made, classes, batch)
    images = torch.randint(0, 256, (batch, 3, towers.pixels.size, towers.pixels.size), device=place)
    pixels = normalise(images, towers.pixels, dtype)
    weights = made.class_weights(words)
    made.eval()

    def predict() -> object:
        return made.logits(pixels, weights)

    with torch.no_grad():
        _forget_peak(place)
        if made.trainable:
            made.train()
            with torch.enable_grad():
                step_seconds = _seconds(step, repeats, place)
            made.eval()
            memory = _peak(place, before)
            predict_seconds = _seconds(predict, repeats, place)
        else:
            step_seconds = None
            predict_seconds = _seconds(predict, repeats, place)
            memory = _peak(place, before)
        inference_flops = _flops(predict)
        training_flops = None
        if made.trainable:
            made.train()
            with torch.enable_grad():
                training_flops = _flops(gradients)
    return Cost(
        method=method,
        backbone=backbone,
        classes=classes,
        batch=batch,
        device=place.type,
        trainable=made.trainable,
        training_flops=training_flops,
        inference_flops=inference_flops // batch,
        step_seconds=step_seconds,
        images_per_second=batch / predict_seconds,
        memory_bytes=memory,
    )


def _import_everything() -> None:
    """Code is no part of a method's memory, and torch imports much of its own at the first step only."""
    import torch

    import drople.training  # noqa: F401

    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    (weight * weight).sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    optimizer.step()


def _training_step(
    method: "Method", classes: int, batch: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of the training loop as it is, on images that take no memory of their own; and its products.

    On a GPU a step may be a CUDA graph, in which nothing can be counted: the second one never is.
    """
    import torch

    from drople.learner import ROOM
    from drople.methods.base import TrainingData
    from drople.training import Training, TrainingOptions

    backbone, device = method.backbone, method.backbone.device
    size, count = round(backbone.pixels.size * ROOM), max(classes * SHOTS, batch)
    image = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8, device=device)
    data = TrainingData(
        images=image.expand(count, -1, -1, -1),
        labels=torch.arange(count, device=device) % classes,
        frozen=torch.randn(count, backbone.embed_dim, device=device),
    )
    if not method.trainable and not hasattr(method, "cache"):
        return (lambda: None), (lambda: None)
    training = Training(method, data, TrainingOptions(batch_size=batch), seed=0, precision="auto")
    indices = torch.arange(batch)
    return (lambda: training._step(indices)), (lambda: training._gradients(indices.to(device)))


def _seconds(work: Callable[[], object], repeats: int, device: "torch.device") -> float:
    """The median of some runs, after one to warm up."""
    import torch

    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def _flops(work: Callable[[], object]) -> int:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # Fused attention on a CPU counts as nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def _forget_peak(device: "torch.device") -> None:
    """Let the peak begin here: loading weights may have taken more than training will."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # elsewhere than on Linux the peak of loading counts too


def _peak(device: "torch.device", before: int) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return max(0, _peak_resident() - before)


def _peak_resident() -> int:
    """The most bytes this process has had, since `_forget_peak` where that is possible."""
    try:
        return _kilobytes("VmHWM") * 1024
    except OSError:
        # Not on Linux, where it would also count the process that started this one.
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident() -> int:
    """Bytes of this process now; elsewhere than on Linux the most so far."""
    try:
        return _kilobytes("VmRSS") * 1024
    except OSError:
        return _peak_resident()


def _kilobytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


# Showing -------------------------------------------------------------------------------------------


def rows(found: Sequence[Cost]) -> list[dict[str, Any]]:
    """As plain data, for JSON."""
    return [asdict(cost) for cost in found]


def print_costs(found: Sequence[Cost]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    first = found[0]
    title = f"{first.classes} classes, batch {first.batch}, {first.device}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("method", no_wrap=True, min_width=max(len(cost.method) for cost in found))
    table.add_column("backbone")
    for column in ("learned", "FLOPs/step", "FLOPs/image", "step", "images/s", "memory"):
        table.add_column(column, justify="right")
    for cost in found:
        table.add_row(
            Text(cost.method, "bold"),
            Text(cost.backbone),
            f"{cost.trainable:,}",
            short(cost.training_flops),
            short(cost.inference_flops),
            "-" if cost.step_seconds is None else duration(cost.step_seconds),
            f"{cost.images_per_second:,.{0 if cost.images_per_second >= 10 else 1}f}",
            f"{cost.memory_bytes / 2**20:,.0f} MiB",
        )
    Console().print(table)


def short(number: float | None) -> str:
    """1,234,567,890 as 1.23 G."""
    if number is None:
        return "-"
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {unit}".strip()
        number /= 1000
    return f"{number:,.3g} P"


def duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def plot(found: Sequence[Cost], out: str | Path) -> None:
    """Learned numbers against step time, a bubble's area the memory; what learns nothing is not on it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    trained = [cost for cost in found if cost.step_seconds is not None]
    if not trained:
        raise DropleError("there is nothing to plot: none of these methods trains. Add one, such as drople.")
    largest = max(cost.memory_bytes for cost in trained)
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    backbones = list(dict.fromkeys(cost.backbone for cost in trained))
    for index, backbone in enumerate(backbones):
        part = [cost for cost in trained if cost.backbone == backbone]
        axes.scatter(
            [cost.trainable for cost in part],
            [cost.step_seconds or 0.0 for cost in part],
            s=[60 + 1500 * cost.memory_bytes / largest for cost in part],
            color=f"C{index}",
            alpha=0.45,
            edgecolor=f"C{index}",
            label=backbone,
        )
    axes.set(xscale="log", yscale="log", xlabel="numbers learned", ylabel="seconds a training step")
    for cost in trained:
        place = cost.trainable, cost.step_seconds or 0.0
        axes.annotate(cost.method, place, fontsize=8, ha="center", va="center")
    axes.set_title(
        f"{trained[0].classes} classes, batch {trained[0].batch}, {trained[0].device}; "
        f"area: peak memory, the largest {largest / 2**30:.1f} GiB",
        fontsize=10,
    )
    axes.grid(alpha=0.25, which="both")
    axes.margins(0.15)
    if len(backbones) > 1:
        axes.legend(frameon=False, markerscale=0.4)
    try:
        figure.savefig(Path(out), dpi=150)
    except (OSError, ValueError) as error:
        raise DropleError(
            f"cannot write a plot to {out} ({error}): give a .png, .svg or .pdf file."
        ) from None
    finally:
        pyplot.close(figure)
