"""What bounds the evaluation of 50,000 pictures: decoding them, the GPU, or Python.

    python benchmarks/evaluation.py [--images 50000] [--classes 998] [--backbone shape:vit-b-16] [--device auto]

Distinct pictures of ImageNet's usual size are written once and their paths repeated, so the disk plays no part. Timed
apart: decoding in as many processes as our reader has (which send nothing back), decoding by our reader, pixels on
their way to the GPU, the towers on images that are there (learned and zero-shot, as `evaluate` runs both), and
`evaluate` whole. Whole over the longest of decoding (the faster of both), way and towers is what Python adds.

A machine that is lent does not keep its speed for minutes, so all of it is timed twice, the second time backwards.
How much of the cores `evaluate` has, and what part of that its own process and not the decoders, is printed too.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
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
WORKERS = min(16, os.cpu_count() or 1)  # as `decode_batches`


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


def cores(before: os.times_result, after: os.times_result) -> tuple[float, float]:
    """Seconds of all cores that this process had, and the processes that it started and ended."""
    own = after.user + after.system - before.user - before.system
    others = after.children_user + after.children_system - before.children_user - before.children_system
    return own, others


def gpu_alone(learner: PromptLearner, words: tuple[str, ...], images: int) -> None:
    """Both branches on `images` images, a batch at a time, all of them there already."""
    backbone, method = learner.backbone_, learner.method_
    size, device = backbone.pixels.size, backbone.device
    count = min(MANY_BATCH, images)
    batch = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, device=device)
    learned, frozen = learner.class_weights(words), learner.class_weights(words, learned=False)
    with torch.no_grad():
        for _ in range(0, images, count):
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
    name, times = given.backbone, dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        numbers = range(min(DISTINCT, given.images))
        files = list(pool.map(lambda number: draw(Path(folder), number), numbers))
        size = sum(path.stat().st_size for path in files) / len(files)
        print(f"{given.images} pictures of {size / 1000:.0f} kB, {WORKERS} decoders, {given.classes} classes")
        paths = [files[n % len(files)] for n in range(given.images)]
        torch.manual_seed(0)
        backbone = shape_backbone(name) if name.startswith(PREFIX) else Backbone.load(name)
        side, resample = backbone.pixels.size, backbone.pixels.resample
        words = class_names(given.classes)
        train = tuple(Example(paths[k % len(paths)], k) for k in range(len(words)))
        test = tuple(Example(path, n % len(words)) for n, path in enumerate(paths))
        data = ImageData(words, words, train, test=test)
        chunks = [paths[n : n + ENCODE_BATCH] for n in range(0, len(paths), ENCODE_BATCH)]
        with ProcessPoolExecutor(WORKERS, get_context("fork")) as processes:
            # They start at the first thing to do: before the GPU is touched, which cannot be shared by forking.
            list(processes.map(abs, range(WORKERS)))
            learner = PromptLearner(backbone, device=given.device, epochs=1)
            learner.fit(ImageData(words, words, train), shots=1)
            check(learner, files[: 3 * ENCODE_BATCH], words)
            send_alone(learner, MANY_BATCH)
            gpu_alone(learner, words, MANY_BATCH)

            def decode_alone() -> None:
                done = processes.map(decode_some, chunks, [side] * len(chunks), [resample] * len(chunks))
                assert sum(done) == len(paths)

            def read() -> None:
                for _ in decode_batches(paths, side, resample, MANY_BATCH):
                    pass

            def evaluate() -> None:
                before, start = os.times(), time.perf_counter()
                learner.evaluate(data)
                own, others = cores(before, os.times())
                share = (own + others) / WORKERS / (time.perf_counter() - start)
                print(
                    f"{share:.0%} of the cores, of it {own / (own + others):.0%} by the process that evaluates"
                )

            timed: list[tuple[str, Callable[[], None]]] = [
                (f"decoding, {WORKERS} processes", decode_alone),
                ("decoding, our reader", read),
                ("pixels to the device", lambda: send_alone(learner, given.images)),
                ("towers alone, learned and zero-shot", lambda: gpu_alone(learner, words, given.images)),
                ("evaluate, whole", evaluate),
            ]
            for what, do in timed + timed[::-1]:
                start = time.perf_counter()
                do()
                times.setdefault(what, []).append(time.perf_counter() - start)
                print(f"{what:42s} {times[what][-1]:8.2f} s", flush=True)
    processes_alone, reader, way, towers, whole = map(statistics.mean, times.values())
    parts = {"decoding": min(processes_alone, reader), "the way to the device": way, "the towers": towers}
    bound = max(parts, key=lambda part: parts[part])
    print(f"bound: {bound}; whole over it {whole / parts[bound]:.2f}; our reader over processes ", end="")
    print(f"{reader / processes_alone:.2f}; {given.images / whole:,.0f} images a second")


if __name__ == "__main__":
    main()
