"""From image files to the pixels a CLIP checkpoint expects: batches decoded ahead, cropped square, normalised."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from drople.data.decoders import Decoders
from drople.safe_image import BadImage, ImageSource, attempt

# So many files, and so many cores, are worth processes that decode; each is asked for so many pictures ahead.
MANY_FILES, MANY_CORES, AHEAD = 4000, 4, 16
DECODE_BATCH = 32


@dataclass(frozen=True)
class Pixels:
    """How a checkpoint wants its pixels; `resample` is Pillow's code (3 = bicubic)."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int = 3


def decode(
    sources: Sequence[ImageSource],
    size: int,
    resample: int,
    *,
    strict: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[torch.Tensor, list[int], list[BadImage]]:
    """All pictures as uint8 [N_good, 3, size, size], which of `sources` they are, and the ones left out.

    `progress` is called with the number of pictures handled so far; `strict` raises the first bad one.
    """
    images = torch.empty(len(sources), 3, size, size, dtype=torch.uint8)
    good: list[int] = []
    bad: list[BadImage] = []
    for batch, indices, failures in decode_batches(sources, size, resample, DECODE_BATCH, strict):
        images[len(good) : len(good) + len(batch)] = batch
        good += indices
        bad += failures
        if progress is not None:
            progress(len(good) + len(bad))
    return images[: len(good)], good, bad


def decode_batches(
    sources: Sequence[ImageSource],
    size: int,
    resample: int,
    batch_size: int,
    strict: bool = False,
    pinned: bool = False,
) -> Iterator[tuple[torch.Tensor, list[int], list[BadImage]]]:
    """Batches of (uint8 images, their indices in `sources`, bad ones), in order.

    Two batches are decoded ahead while the caller computes (by processes: some pictures for each), never more. A
    batch whose pictures are all bad is still given, with no rows, so that its bad ones are not lost. `pinned`
    batches go to a GPU without waiting for what it does.
    """
    workers = min(16, os.cpu_count() or 1)
    kept = len(sources) * 3 * size * size <= _MEMORY.whole
    files = not kept and all(isinstance(source, str | Path) for source in sources)
    many = files and len(sources) >= MANY_FILES and workers >= MANY_CORES and os.name == "posix"
    ahead = max(2, -(-AHEAD * workers // batch_size)) if many else 2
    places = (ahead + 1) * batch_size
    reader = Decoders(workers, size, resample, places) if many else _Threads(workers, size, resample)
    starts = range(0, len(sources), batch_size)
    try:
        for number in range(len(starts) + ahead):
            if number < len(starts):
                reader.begin(sources[starts[number] : starts[number] + batch_size])
            if number >= ahead:
                yield _collect(starts[number - ahead], reader.finish(), size, strict, pinned)
    finally:
        reader.close()


class _Threads:
    """Pictures of any kind, decoded by threads of this process; as `Decoders`."""

    def __init__(self, count: int, size: int, resample: int) -> None:
        self.size, self.resample = size, resample
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="drople-decode")
        self.begun: deque[list[Future[np.ndarray | BadImage]]] = deque()

    def begin(self, sources: Sequence[ImageSource]) -> None:
        asked = [self.pool.submit(_MEMORY.attempt, source, self.size, self.resample) for source in sources]
        self.begun.append(asked)

    def finish(self) -> list[np.ndarray | BadImage]:
        return [future.result() for future in self.begun.popleft()]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class _Memory:
    """Squares of picture files, kept as long as there is room; none unless `remember` was called."""

    def __init__(self) -> None:
        self.whole = self.room = 0
        self.kept: dict[tuple[str, int, int, int], np.ndarray] = {}
        self.lock = Lock()

    def attempt(self, source: ImageSource, size: int, resample: int) -> np.ndarray | BadImage:
        changed = self._changed(source)
        if changed is None:
            return attempt(source, size, resample)
        key = str(source), changed, size, resample
        if key not in self.kept:
            made = attempt(source, size, resample)
            if isinstance(made, BadImage):
                return made
            with self.lock:
                if key in self.kept or made.nbytes > self.room:
                    return made
                self.kept[key] = made
                self.room -= made.nbytes
        return self.kept[key]

    def _changed(self, source: ImageSource) -> int | None:
        """When a file was written last; None for what is not kept."""
        if not self.whole or not isinstance(source, str | Path):
            return None
        try:
            return os.stat(source).st_mtime_ns
        except (OSError, ValueError):  # a name that no file can have is a ValueError
            return None


_MEMORY = _Memory()


def remember(room: int) -> None:
    """Keep decoded pictures from now on, up to so many bytes: the runs of a benchmark see the same ones."""
    with _MEMORY.lock:
        _MEMORY.whole = room
        _MEMORY.room = max(0, room - sum(kept.nbytes for kept in _MEMORY.kept.values()))


def normalise(images: torch.Tensor, pixels: Pixels, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Pixels in 0..255, [B, 3, S, S] on any device, to what the checkpoint was trained on."""
    mean, std = _statistics(pixels, images.device)
    return ((images.float() - mean) / std).to(dtype)


@lru_cache
def _statistics(pixels: Pixels, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept on the device: copying them there at every step would make the host wait."""
    mean = torch.tensor(pixels.mean, device=device).view(3, 1, 1) * 255
    return mean, torch.tensor(pixels.std, device=device).view(3, 1, 1) * 255


def _collect(
    start: int, results: list[np.ndarray | BadImage], size: int, strict: bool, pinned: bool
) -> tuple[torch.Tensor, list[int], list[BadImage]]:
    rows: list[np.ndarray] = []
    good: list[int] = []
    bad: list[BadImage] = []
    for index, result in enumerate(results, start):
        if not isinstance(result, BadImage):
            rows.append(result)
            good.append(index)
        elif strict:
            raise result
        else:
            bad.append(result)
    batch = torch.empty(len(rows), 3, size, size, dtype=torch.uint8, pin_memory=pinned)
    if rows:
        np.stack(rows, out=batch.numpy())
    return batch, good, bad
