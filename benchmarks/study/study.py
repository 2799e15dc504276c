"""Many small runs on one GPU: backbone and decoded images stay on the device, workers share it.

    python benchmarks/study/study.py --grid benchmarks/study/grids/NAME.json --data DATA --backbone pocket \
        --workers 6 --out records.jsonl

A grid is a JSON object: {"datasets": [...], "seeds": [...], "protocol": "base-novel" | "all",
"variants": {"name": {"method": "drople", "options": {...}}, ...}, "shots": 16}. Each line of the output is
one run with validation and test accuracies; runs already in the output are not repeated. Hyper-parameters
are chosen by the validation accuracy of the classes trained on, never by a test column.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from drople.backbone import Backbone
from drople.data import ImageData, base_novel, few_shot, load_data
from drople.data.dataset import Example
from drople.data.images import decode, normalise
from drople.data.shots import only_classes
from drople.learner import ROOM
from drople.methods import Method, Task, make
from drople.methods.base import TrainingData
from drople.metrics import harmonic_mean
from drople.options import build, names
from drople.training import Training, TrainingOptions

TEMPLATES = {
    "oxford_pets": "a photo of a {}, a type of pet.",
    "eurosat": "a centered satellite photo of {}.",
    "dtd10": "{} texture.",
}
_worker: dict[str, Any] = {}


class Pictures:
    """All images of a dataset, decoded once: at training size and as the backbone sees them."""

    def __init__(self, data: ImageData, backbone: Backbone, device: str) -> None:
        everything = [*data.train, *data.val, *data.test, *(e for part in data.extra.values() for e in part)]
        paths = [e.image for e in everything]
        self.place = {str(path): number for number, path in enumerate(paths)}
        pixels = backbone.pixels
        plain, _, _ = decode(paths, pixels.size, pixels.resample, strict=True)
        roomy, _, _ = decode(
            [e.image for e in data.train], round(pixels.size * ROOM), pixels.resample, strict=True
        )
        self.plain, self.roomy = plain.to(device), roomy.to(device)
        self.train_place = {str(e.image): number for number, e in enumerate(data.train)}
        with torch.no_grad():
            parts = [
                backbone.encode_images(normalise(p, pixels, backbone.dtype)) for p in self.plain.split(256)
            ]
        self.frozen = torch.cat(parts)

    def rows(self, examples: list[Example] | tuple[Example, ...]) -> Tensor:
        return torch.tensor([self.place[str(e.image)] for e in examples], device=self.plain.device)


def start(root: str, backbone: str, device: str, datasets: list[str]) -> None:
    """What a worker keeps for all its runs."""
    torch.set_num_threads(2)
    frozen = Backbone.load(backbone).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    _worker.update(backbone=frozen, device=device, root=root, datasets={})


def dataset(name: str) -> tuple[ImageData, Pictures]:
    if name not in _worker["datasets"]:
        data = load_data(Path(_worker["root"]) / name)
        _worker["datasets"][name] = data, Pictures(data, _worker["backbone"], _worker["device"])
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


def run(task: dict[str, Any]) -> dict[str, Any]:
    begun = time.time()
    data, pictures = dataset(task["dataset"])
    backbone = _worker["backbone"]
    base, novel = base_novel(data.classes)
    seen = data if task["protocol"] == "all" else only_classes(data, base)
    chosen = few_shot(seen.train, task["shots"], task["seed"])
    options = {k: v for k, v in task["options"].items() if k not in names(TrainingOptions)}
    training_options = build(TrainingOptions, {k: v for k, v in task["options"].items() if k not in options})
    torch.manual_seed(task["seed"])
    template = TEMPLATES.get(task["dataset"], "a photo of a {}.")
    method = make(task["method"], backbone, Task(seen.words, (template,)), options).to(backbone.device)
    record = dict(task)
    rows = pictures.rows(chosen)
    if list(method.parameters()):
        train_rows = torch.tensor(
            [pictures.train_place[str(e.image)] for e in chosen], device=backbone.device
        )
        labels = torch.tensor([e.label for e in chosen], device=backbone.device)
        few = TrainingData(pictures.roomy[train_rows], labels, pictures.frozen[rows])
        training = Training(method, few, training_options, seed=task["seed"], precision="bf16")
        last: dict[str, float] = {}
        training.run(lambda status: last.update(status.values))
        record["last_step"] = {k: round(v, 5) for k, v in last.items()}
    method.eval()
    record["val"] = accuracy(method, pictures, seen.words, seen.val)
    record["test"] = accuracy(method, pictures, seen.words, seen.test)
    for name, examples in seen.extra.items():
        record[name] = accuracy(method, pictures, seen.words, examples)
    if task["protocol"] != "all":
        unseen = only_classes(data, novel)
        record["novel"] = accuracy(method, pictures, unseen.words, unseen.test)
        record["harmonic_mean"] = harmonic_mean(record["test"], record["novel"])
    record["seconds"] = round(time.time() - begun, 2)
    return record


def tasks(grid: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "variant": name,
            "dataset": data,
            "seed": seed,
            "protocol": grid["protocol"],
            "shots": grid.get("shots", 16),
        }
        | {"method": variant["method"], "options": grid.get("common", {}) | variant.get("options", {})}
        for seed, data, (name, variant) in itertools.product(
            grid["seeds"], grid["datasets"], grid["variants"].items()
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=Path, required=True)
    parser.add_argument("--data", required=True)
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
            done.add((row["variant"], row["dataset"], row["seed"]))
    todo = [t for t in tasks(grid) if (t["variant"], t["dataset"], t["seed"]) not in done]
    begun = time.time()
    arguments = (given.data, given.backbone, given.device, grid["datasets"])
    with mp.get_context("spawn").Pool(given.workers, start, arguments) as pool, given.out.open("a") as out:
        for number, record in enumerate(pool.imap_unordered(run, todo), 1):
            out.write(json.dumps({"backbone": given.backbone, **record}) + "\n")
            out.flush()
            if number % 20 == 0:
                print(f"{number}/{len(todo)} runs, {time.time() - begun:.0f} s", flush=True)
    print(f"{len(todo)} runs in {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
