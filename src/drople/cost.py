"""What a method costs: what it learns, the FLOPs and time of a step, images a second, memory.

The paper's efficiency figure. Each method is measured in a process of its own, since a process gives back
no peak of memory, on random images and ImageNet's class names: costs do not hang on what is seen.

FLOPs are those of matrix products and convolutions, two for a multiply-add. Memory is the peak while training
(for a method that learns nothing, while predicting), weights and activations, without the training images: on
a GPU what torch allocated, on a CPU what the process grew by.
"""

import ctypes
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drople.errors import DropleError

if TYPE_CHECKING:
    import torch

    from drople.backbone import Backbone
    from drople.methods import Method

SHOTS = 16
REPEATS = 3
WARM_UP = 2  # runs before any that counts: on a GPU the first captures the step as a CUDA graph
AT_LEAST_SECONDS = 0.2  # short runs are repeated for so long: the clock of one alone says little
AREA = 900  # of the bubble with the most memory, in points
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
    on_failed: Callable[[DropleError], None] | None = None,
) -> list[Cost]:
    """Every method on every backbone: what `Backbone.load` takes, or a shape such as `shape:vit-b-16`.

    With `on_failed` a method that cannot be measured is told of and left out, so that the others are not lost.
    """
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
        try:
            found.append(_elsewhere(method, str(backbone), classes, batch, device, repeats))
        except DropleError as error:
            if on_failed is None:
                raise
            on_failed(error)
        if on_done is not None:
            on_done(number, len(asked))
    return found


def _elsewhere(*arguments: object) -> Cost:
    """`measure` in a new process."""
    home = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", WORKER],  # -P: nothing of the folder it is started in
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
    from drople.device import find_device, usual_dtype
    from drople.methods import Task, make, option_names

    place = find_device(device)
    dtype = usual_dtype(place)
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
    step_seconds = training_flops = memory = None
    _forget_peak(place)
    if made.trainable:
        made.train()
        step_seconds = _seconds(step, repeats, place)
        memory = _peak(place, before)
        training_flops = flops(gradients)
    made.eval()
    images = torch.randint(0, 256, (batch, 3, *2 * [towers.pixels.size]), dtype=torch.uint8, device=place)
    pixels = normalise(images, towers.pixels, dtype)
    weights = made.class_weights(words)

    def predict() -> object:
        return made.logits(pixels, weights)

    predict_seconds = _seconds(predict, repeats, place)
    if memory is None:
        memory = _peak(place, before)
    return Cost(
        method=method,
        backbone=backbone,
        classes=classes,
        batch=batch,
        device=place.type,
        trainable=made.trainable,
        training_flops=training_flops,
        inference_flops=flops(predict) // batch,
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
    indices = torch.arange(batch, device=device)
    return (lambda: training._step(indices)), (lambda: training._gradients(indices))


def _seconds(work: Callable[[], object], repeats: int, device: "torch.device") -> float:
    """The median of at least so many runs, after those that warm up."""
    import torch

    times: list[float] = []
    while len(times) < WARM_UP + repeats or sum(times[WARM_UP:]) < AT_LEAST_SECONDS:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def flops(work: Callable[[], object]) -> int:
    """What torch's own FlopCounterMode counts.

    That one also follows which module an operation belongs to, by hooks that fail where a step asks for
    gradients inside itself (ProGrad); only its formulas are used here.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = kwargs or {}
            out = func(*args, **given)
            formula = flop_registry.get(func.overloadpacket)
            self.total += 0 if formula is None else int(formula(*args, **given, out_val=out))
            return out

    # Fused attention on a CPU counts as nothing.
    with sdpa_kernel(SDPBackend.MATH), Counter() as counter:
        work()
    return counter.total


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
    from matplotlib.ticker import LogLocator

    trained = [cost for cost in found if cost.step_seconds is not None]
    if not trained:
        raise DropleError("there is nothing to plot: none of these methods trains. Add one, such as drople.")
    largest = max(cost.memory_bytes for cost in trained)
    figure, axes = pyplot.subplots(figsize=(10, 7), layout="constrained")
    backbones = list(dict.fromkeys(cost.backbone for cost in trained))
    areas = [AREA * max(0.02, cost.memory_bytes / max(1, largest)) for cost in trained]
    for index, backbone in enumerate(backbones):
        part = [n for n, cost in enumerate(trained) if cost.backbone == backbone]
        axes.scatter(
            [trained[n].trainable for n in part],
            [trained[n].step_seconds or 0.0 for n in part],
            s=[areas[n] for n in part],
            color=f"C{index}",
            alpha=0.35,
            edgecolor=f"C{index}",
            label=backbone,
        )
    axes.set(xscale="log", yscale="log", xlabel="numbers learned", ylabel="time of a training step")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    axes.yaxis.set_minor_formatter(lambda seconds, _: duration(seconds))
    axes.tick_params(which="both", labelsize=8)
    axes.set_title(
        f"{trained[0].classes} classes, batch {trained[0].batch}, {trained[0].device}; "
        f"area: peak memory, the largest {largest / 2**20:,.0f} MiB",
        fontsize=10,
    )
    axes.grid(alpha=0.2, which="both")
    axes.margins(0.12)
    if len(backbones) > 1:
        axes.legend(frameon=False, markerscale=0.4)
    _label(axes, trained, areas)
    try:
        figure.savefig(Path(out), dpi=150)
    except (OSError, ValueError) as error:
        raise DropleError(
            f"cannot write a plot to {out} ({error}): give a .png, .svg or .pdf file."
        ) from None
    finally:
        pyplot.close(figure)


def _label(axes: Any, trained: Sequence[Cost], areas: Sequence[float]) -> None:
    """Each bubble's name at the nearest place around it that no other name or bubble takes."""
    axes.figure.canvas.draw()
    per_point = axes.figure.dpi / 72
    frame = axes.bbox
    spots = axes.transData.transform([(cost.trainable, cost.step_seconds) for cost in trained])
    radii = [math.sqrt(area / math.pi) * per_point for area in areas]
    taken = [Box(x, y, 0.8 * r, 0.8 * r) for (x, y), r in zip(spots, radii, strict=True)]
    for cost, (x, y), radius in zip(trained, spots, radii, strict=True):
        # What one character of this size takes, with some air.
        width, height = 5.2 * len(cost.method) * per_point, 11 * per_point
        for step in range(400):
            turn, away = math.tau * (step % 16) / 16, radius + (4 + 5 * (step // 16)) * per_point
            to_right, up = math.cos(turn), math.sin(turn)
            box = Box(x + to_right * (away + width / 2), y + up * (away + height / 2), width / 2, height / 2)
            inside = (
                frame.x0 + box.half_width < box.x < frame.x1 - box.half_width
                and frame.y0 + box.half_height < box.y < frame.y1 - box.half_height
            )
            if inside and not any(box.meets(other) for other in taken):
                break
        taken.append(box)
        axes.annotate(
            cost.method,
            (cost.trainable, cost.step_seconds),
            ((box.x - x) / per_point, (box.y - y) / per_point),
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "0.45", "shrinkA": 1, "shrinkB": 0},
        )


class Box(NamedTuple):
    """A rectangle of a picture, around its middle."""

    x: float
    y: float
    half_width: float
    half_height: float

    def meets(self, other: "Box") -> bool:
        near = abs(self.x - other.x) < self.half_width + other.half_width
        return near and abs(self.y - other.y) < self.half_height + other.half_height
