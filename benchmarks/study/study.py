"""Many small runs on one GPU: backbone and decoded images stay on the device, workers share it.

    python benchmarks/study/study.py --grid benchmarks/study/grids/NAME.json --data DATA --backbone pocket \
        --workers 6 --out records.jsonl

A grid is a JSON object: {"datasets": [...], "seeds": [...], "protocol": "nested" | "base-novel" | "all",
"variants": {"name": {"method": "drople", "options": {...}}, ...}, "shots": 16}; "datasets" may be an object
that gives each its own seeds. "commit" says when a grid was run: options that it does not name are that day's
defaults. Each line of the output is one run; runs already in it are not repeated.

Hyper-parameters are chosen by "nested": base-to-novel inside the base classes. The seed divides them into two
halves; one trains, and both are asked about images of theirs that were not trained on (validation and, of the
held-out classes, training images). No test image and no novel class has a part in it.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from drople.backbone import Backbone
from drople.data import ImageData, base_novel, few_shot
from drople.data.dataset import Example
from drople.data.images import decode, normalise
from drople.data.layouts import resolve
from drople.data.shots import only_classes
from drople.learner import ROOM
from drople.methods import Method, Task, make
from drople.methods.base import TrainingData
from drople.metrics import harmonic_mean
from drople.options import build, names
from drople.training import Training, TrainingOptions

_worker: dict[str, Any] = {}


class Pictures:
    """All images of a dataset on the device: at training size, as the backbone sees them, and their features."""

    def __init__(self, data: ImageData, folder: Path, device: str) -> None:
        self.place = {str(e.image): number for number, e in enumerate(everything(data))}
        self.train_place = {str(e.image): number for number, e in enumerate(data.train)}
        self.plain, self.roomy, self.frozen = (
            torch.from_numpy(np.load(folder / f"{name}.npy")).to(device)
            for name in ("plain", "roomy", "frozen")
        )

    def rows(self, examples: list[Example] | tuple[Example, ...]) -> Tensor:
        return torch.tensor([self.place[str(e.image)] for e in examples], device=self.plain.device)


def everything(data: ImageData) -> list[Example]:
    return [*data.train, *data.val, *data.test, *(e for part in data.extra.values() for e in part)]


def prepare(data: ImageData, backbone: Backbone, folder: Path) -> None:
    """Decode and encode once, for all workers."""
    pixels = backbone.pixels
    plain, _, _ = decode([e.image for e in everything(data)], pixels.size, pixels.resample, strict=True)
    size = round(pixels.size * ROOM)
    roomy, _, _ = decode([e.image for e in data.train], size, pixels.resample, strict=True)
    with torch.no_grad():
        parts = [
            backbone.encode_images(normalise(p.to(backbone.device), pixels, backbone.dtype))
            for p in plain.split(256)
        ]
    folder.mkdir(parents=True)
    for name, tensor in (("plain", plain), ("roomy", roomy), ("frozen", torch.cat(parts).cpu())):
        np.save(folder / f"{name}.npy", tensor.numpy())


def start(root: Path, prepared: Path, backbone: str, device: str) -> None:
    """What a worker keeps for all its runs."""
    torch.set_num_threads(1)
    frozen = Backbone.load(backbone).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    _worker.update(backbone=frozen, device=device, root=root, prepared=prepared, datasets={})


def dataset(name: str) -> tuple[ImageData, str, Pictures]:
    if name not in _worker["datasets"]:
        data, template = resolve(name, _worker["root"])
        pictures = Pictures(data, _worker["prepared"] / name, _worker["device"])
        _worker["datasets"][name] = data, template, pictures
    return _worker["datasets"][name]


def accuracy(
    method: Method, pictures: Pictures, words: tuple[str, ...], examples: tuple[Example, ...]
) -> float | None:
    if not examples:
        return None
    backbone, right = method.backbone, 0.0
    weights = method.class_weights(words)
    labels = torch.tensor([e.label for e in examples], device=pictures.plain.device)
    for rows, truth in zip(pictures.rows(examples).split(256), labels.split(256), strict=True):
        images = normalise(pictures.plain[rows], backbone.pixels, backbone.dtype)
        right += float((method.logits(images, weights).argmax(1) == truth).sum())
    return right / len(examples)


Part = tuple[tuple[str, ...], tuple[Example, ...]]  # class words, and images of those classes


def parts(data: ImageData, task: dict[str, Any]) -> tuple[ImageData, list[Example], dict[str, Part]]:
    """What a protocol trains on (classes, and the images of them), and what it asks about."""
    base, novel = base_novel(data.classes)
    if task["protocol"] == "all":
        rest = {"val": data.val, "test": data.test, **data.extra}
        return (
            data,
            few_shot(data.train, task["shots"], task["seed"]),
            {n: (data.words, e) for n, e in rest.items()},
        )
    seen, unseen = only_classes(data, base), only_classes(data, novel)
    if task["protocol"] == "base-novel":
        asked = {
            "val": (seen.words, seen.val),
            "test": (seen.words, seen.test),
            "novel": (unseen.words, unseen.test),
        }
        return seen, few_shot(seen.train, task["shots"], task["seed"]), asked
    labels = list(range(len(seen.classes)))
    random.Random(task["seed"]).shuffle(labels)
    half = (len(labels) + 1) // 2
    inner, held = (only_classes(seen, sorted(part)) for part in (labels[:half], labels[half:]))
    chosen = few_shot(inner.train, task["shots"], task["seed"])
    taken = {str(e.image) for e in chosen}
    left = tuple(e for e in inner.train if str(e.image) not in taken)
    return (
        inner,
        chosen,
        {"val": (inner.words, inner.val + left), "novel": (held.words, held.val + held.train)},
    )


def begin(
    task: dict[str, Any],
) -> tuple[Method, TrainingData, TrainingOptions, list[Example], dict[str, Part]]:
    """The method of a task, the images it trains on (decoded, and which), its schedule, and what is asked."""
    data, template, pictures = dataset(task["dataset"])
    backbone = _worker["backbone"]
    seen, chosen, asked = parts(data, task)
    options = {k: v for k, v in task["options"].items() if k not in names(TrainingOptions)}
    schedule = build(TrainingOptions, {k: v for k, v in task["options"].items() if k not in options})
    torch.manual_seed(task["seed"])
    method = make(task["method"], backbone, Task(seen.words, (template,)), options).to(backbone.device)
    rows = torch.tensor([pictures.train_place[str(e.image)] for e in chosen], device=backbone.device)
    labels = torch.tensor([e.label for e in chosen], device=backbone.device)
    few = TrainingData(pictures.roomy[rows], labels, pictures.frozen[pictures.rows(chosen)])
    return method, few, schedule, chosen, asked


def run(task: dict[str, Any]) -> dict[str, Any]:
    begun = time.time()
    method, few, schedule, _, asked = begin(task)
    pictures = dataset(task["dataset"])[2]
    record = dict(task)
    if method.trainable:
        training = Training(method, few, schedule, seed=task["seed"], precision="bf16")
        last: dict[str, float] = {}
        training.run(lambda status: last.update(status.values))
        method.eval()
        method.finish(few)
        record["last_step"] = {k: round(v, 5) for k, v in last.items()}
    method.eval()
    for name, (words, examples) in asked.items():
        record[name] = accuracy(method, pictures, words, examples)
    if "novel" in record:
        record["harmonic_mean"] = harmonic_mean(record.get("test", record["val"]), record["novel"])
    record["seconds"] = round(time.time() - begun, 2)
    return record


def attempt(task: dict[str, Any]) -> dict[str, Any]:
    """One run that fails must not end the study."""
    try:
        return run(task)
    except Exception as error:
        return {**task, "error": f"{type(error).__name__}: {error}"}


def tasks(grid: dict[str, Any]) -> list[dict[str, Any]]:
    """Every run, in the order of the grid's datasets: the largest first leaves none alone at the end."""
    datasets = grid["datasets"]
    seeds = datasets if isinstance(datasets, dict) else dict.fromkeys(datasets, grid["seeds"])
    return [
        {
            "variant": name,
            "dataset": data,
            "seed": seed,
            "protocol": grid["protocol"],
            "shots": grid.get("shots", 16),
        }
        | {"method": variant["method"], "options": grid.get("common", {}) | variant.get("options", {})}
        for data, of in seeds.items()
        for seed in of
        for name, variant in grid["variants"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="pocket")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    grid = json.loads(given.grid.read_text())
    done = set()
    if given.out.exists():
        for line in given.out.read_text().splitlines():
            row = json.loads(line)
            if "error" not in row:
                done.add((row["variant"], row["dataset"], row["seed"]))
    todo = [t for t in tasks(grid) if (t["variant"], t["dataset"], t["seed"]) not in done]
    begun = time.time()
    with tempfile.TemporaryDirectory(prefix="drople-study-") as folder:
        prepared = Path(folder)
        start(given.data, prepared, given.backbone, given.device)
        for name in dict.fromkeys(t["dataset"] for t in todo):
            prepare(resolve(name, given.data)[0], _worker["backbone"], prepared / name)
        print(f"{len(todo)} runs to do; decoded in {time.time() - begun:.0f} s", flush=True)
        arguments = (given.data, prepared, given.backbone, given.device)
        with (
            mp.get_context("spawn").Pool(given.workers, start, arguments) as pool,
            given.out.open("a") as out,
        ):
            for number, record in enumerate(pool.imap_unordered(attempt, todo), 1):
                out.write(json.dumps({"backbone": given.backbone, **record}) + "\n")
                out.flush()
                if number % 20 == 0:
                    print(f"{number}/{len(todo)} runs, {time.time() - begun:.0f} s", flush=True)
    print(f"{len(todo)} runs in {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
