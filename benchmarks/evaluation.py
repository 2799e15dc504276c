"""What bounds the evaluation of 50,000 pictures: decoding them, the GPU, or Python.

    python benchmarks/evaluation.py [--images 50000] [--classes 998] [--backbone shape:vit-b-16] [--device auto]

Distinct pictures of ImageNet's usual size are written once and their paths repeated, so the disk plays no part. Timed
apart: decoding in as many processes as our reader has (which send nothing back), decoding by our reader, pixels on
their way to the GPU, the towers on images that are there (learned and zero-shot, as `evaluate` runs both), and
`evaluate` whole. Whole over the longest of decoding (the faster of both), way and towers is what Python adds.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from drople.backbone import Backbone
from drople.backbone.shapes import PREFIX, shape_backbone
from drople.cost import class_names
from drople.data.dataset import Example, ImageData
from drople.data.images import decode, decode_batches, normalise
from drople.learner import ENCODE_BATCH, MANY_BATCH, PromptLearner
from drople.safe_image import open_image, square

DISTINCT = 500
WIDTH, HEIGHT, QUALITY = 500, 375, 90
THREADS = min(16, os.cpu_count() or 1)  # as `decode_batches`


def draw(folder: Path, number: int) -> Path:
    """A picture with large shapes, texture and grain, so that its file is about as long as a photograph's."""
    random = np.random.default_rng(number)
    layers = [(6, 1.0), (40, 0.4), (200, 0.3), (WIDTH, 0.4)]
    pixels = np.zeros((HEIGHT, WIDTH, 3))
    for cells, weight in layers:
        coarse = random.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
        pixels += weight * np.asarray(
            Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        )
    path = folder / f"{number}.jpg"
    scaled = pixels / sum(weight for _, weight in layers)
    Image.fromarray(scaled.astype(np.uint8)).save(path, quality=QUALITY)
    return path


def decode_some(paths: list[Path], size: int, resample: int) -> int:
    return sum(square(open_image(path), size, resample).shape[0] == 3 for path in paths)


@contextmanager
def timed(times: dict[str, float], what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[what] = time.perf_counter() - start
    print(f"{what:42s} {times[what]:8.2f} s", flush=True)


def gpu_alone(learner: PromptLearner, words: tuple[str, ...], images: int) -> None:
    """Both branches on `images` images, a batch at a time, all of them there already."""
    backbone, method = learner.backbone_, learner.method_
    size, device = backbone.pixels.size, backbone.device
    batch = torch.randint(0, 256, (MANY_BATCH, 3, size, size), dtype=torch.uint8, device=device)
    learned, frozen = learner.class_weights(words), learner.class_weights(words, learned=False)
    with torch.no_grad():
        for _ in range(0, images, MANY_BATCH):
            pixels = normalise(batch, backbone.pixels, backbone.dtype)
            for logits in (
                method.logits(pixels, learned),
                method.similarity(backbone.encode_images(pixels), frozen),
            ):
                logits.float().cpu()


def send_alone(learner: PromptLearner, images: int) -> None:
    """The pixels of `images` images to the device, from memory that it can read by itself."""
    device, size = learner.backbone_.device, learner.backbone_.pixels.size
    gpu = device.type == "cuda"
    batch = torch.zeros(MANY_BATCH, 3, size, size, dtype=torch.uint8)
    batch = batch.pin_memory() if gpu else batch
    for _ in range(0, images, MANY_BATCH):
        batch.to(device, non_blocking=True)
    if gpu:
        torch.cuda.synchronize(device)


def check(learner: PromptLearner, files: list[Path], words: tuple[str, ...]) -> None:
    """What comes from the device while it works is what comes when everybody waits for it."""
    backbone = learner.backbone_
    images, *_ = decode(files, backbone.pixels.size, backbone.pixels.resample)
    with torch.no_grad():
        parts = (
            normalise(part.to(backbone.device), backbone.pixels, backbone.dtype)
            for part in images.split(ENCODE_BATCH)
        )
        waited = [learner.method_.logits(part, learner.class_weights(words)).float().cpu() for part in parts]
    assert torch.equal(learner.logits(files)[0], torch.cat(waited)), "the logits are others"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=998)
    parser.add_argument("--backbone", default="shape:vit-b-16")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    name, times = given.backbone, dict[str, float]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(THREADS) as pool:
        numbers = range(min(DISTINCT, given.images))
        files = list(pool.map(lambda number: draw(Path(folder), number), numbers))
        size = sum(path.stat().st_size for path in files) / len(files)
        print(f"{given.images} pictures of {size / 1000:.0f} kB, {THREADS} threads, {given.classes} classes")
        paths = [files[n % len(files)] for n in range(given.images)]
        torch.manual_seed(0)
        backbone = shape_backbone(name) if name.startswith(PREFIX) else Backbone.load(name)
        side, resample = backbone.pixels.size, backbone.pixels.resample
        # Before the GPU is touched, which processes cannot share by forking.
        chunks = [paths[n : n + ENCODE_BATCH] for n in range(0, len(paths), ENCODE_BATCH)]
        with ProcessPoolExecutor(THREADS, get_context("fork")) as processes:
            list(processes.map(abs, range(THREADS)))  # they start at the first thing to do
            with timed(times, f"decoding, {THREADS} processes"):
                done = processes.map(decode_some, chunks, [side] * len(chunks), [resample] * len(chunks))
                assert sum(done) == len(paths)
        with timed(times, "decoding, our reader"):
            for _ in decode_batches(paths, side, resample, MANY_BATCH):
                pass
        words = class_names(given.classes)
        labels = [n % len(words) for n in range(len(paths))]
        train = tuple(Example(paths[k % len(paths)], k) for k in range(len(words)))
        test = tuple(Example(path, label) for path, label in zip(paths, labels, strict=True))
        learner = PromptLearner(backbone, device=given.device, epochs=1)
        learner.fit(ImageData(words, words, train), shots=1)
        send_alone(learner, MANY_BATCH)
        with timed(times, "pixels to the device"):
            send_alone(learner, given.images)
        gpu_alone(learner, words, MANY_BATCH)
        with timed(times, "towers alone, learned and zero-shot"):
            gpu_alone(learner, words, given.images)
        data = ImageData(words, words, train, test=test)
        with timed(times, "evaluate, whole"):
            learner.evaluate(data)
        check(learner, files[: 3 * ENCODE_BATCH], words)
    processes_alone, reader, way, towers, whole = times.values()
    parts = {"decoding": min(processes_alone, reader), "the way to the device": way, "the towers": towers}
    bound = max(parts, key=lambda part: parts[part])
    print(f"bound: {bound}; whole over it {whole / parts[bound]:.2f}; our reader over processes ", end="")
    print(f"{reader / processes_alone:.2f}; {given.images / whole:,.0f} images a second")


if __name__ == "__main__":
    main()
