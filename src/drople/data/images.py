"""From an image file to the pixels a CLIP checkpoint expects: decoded safely, cropped square, normalised.

Files come from anywhere, so whatever is wrong with one ends as a `BadImage` that says what, and nothing is
decoded before its header has been checked.
"""

import os
import re
import stat
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from drople.errors import DropleError

ImageSource: TypeAlias = str | Path | Image.Image | np.ndarray

MAX_PIXELS = 64_000_000
# Pictures longer than this many times their short side lose their far ends before they are resized: enlarged
# whole, one of 1 x 60,000,000 pixels would fill the memory, and only the middle is kept anyway.
THIN = 64
# Only formats decoded inside Pillow: EPS, for one, would start ghostscript on a stranger's file.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".gif")
    + (".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)

_PILLOW_NOISE = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(DropleError):
    """An image that cannot be used, and why."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"cannot use the image {source}: {reason}")
        self.source = source
        self.reason = reason


@dataclass(frozen=True)
class Pixels:
    """How a checkpoint wants its pixels; `resample` is Pillow's code (3 = bicubic)."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int = 3


def open_image(source: ImageSource) -> Image.Image:
    """The picture as RGB, right side up, transparent parts on white; the first frame of an animation."""
    name = _name(source)
    _hush_pillow()
    try:
        if isinstance(source, np.ndarray):
            return _to_rgb(_from_array(source, name), name)
        if isinstance(source, Image.Image):
            return _to_rgb(source, name)
        _check_file(Path(source), name)
        with open(source, "rb") as file, Image.open(file, formats=FORMATS) as image:
            return _to_rgb(image, name)
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(name, f"not an image of a kind read here ({', '.join(FORMATS)}), or damaged") from None
    except Image.DecompressionBombError:
        raise BadImage(name, _too_large()) from None
    except FileNotFoundError:
        raise BadImage(name, "there is no such file") from None
    except PermissionError:
        raise BadImage(name, "no permission to read it") from None
    except MemoryError:
        raise BadImage(name, "decoding it needs more memory than there is") from None
    # A hostile file can make a decoder raise nearly anything; one such file must not end a run.
    except Exception as error:
        raise BadImage(name, f"damaged or cut short ({str(error) or type(error).__name__})") from error


def square(image: Image.Image, size: int, resample: int) -> np.ndarray:
    """Shortest side resized to `size`, centre cropped: uint8 [3, size, size], as CLIP's own preprocessing."""
    short, long = min(image.size), max(image.size)
    tall = image.height > image.width
    if long > THIN * short:
        middle, half = long // 2, THIN * short // 2
        box = (0, middle - half, short, middle + half) if tall else (middle - half, 0, middle + half, short)
        image, long = image.crop(box), 2 * half
    scaled = int(size * long / short)
    small = image.resize((size, scaled) if tall else (scaled, size), Image.Resampling(resample))
    start = (scaled - size) // 2
    across, down = (0, start) if tall else (start, 0)
    small = small.crop((across, down, across + size, down + size))
    return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))


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
    for batch, indices, failures in decode_batches(sources, size, resample, batch_size=32, strict=strict):
        images[len(good) : len(good) + len(batch)] = batch
        good += indices
        bad += failures
        if progress is not None:
            progress(len(good) + len(bad))
    return images[: len(good)], good, bad


def decode_batches(
    sources: Sequence[ImageSource], size: int, resample: int, batch_size: int, strict: bool = False
) -> Iterator[tuple[torch.Tensor, list[int], list[BadImage]]]:
    """Batches of (uint8 images, their indices in `sources`, bad ones), in order.

    Two batches are decoded ahead while the caller computes, never more. A batch whose pictures are all bad
    is still given, with no rows, so that its bad ones are not lost.
    """

    def load(source: ImageSource) -> np.ndarray | BadImage:
        try:
            return _MEMORY.square(source, size, resample)
        except BadImage as error:
            return error

    starts = range(0, len(sources), batch_size)
    pending: deque[tuple[int, list[Future[np.ndarray | BadImage]]]] = deque()
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="drople-decode")
    try:
        for upcoming in [*starts, None, None]:
            if upcoming is not None:
                end = min(upcoming + batch_size, len(sources))
                pending.append((upcoming, [pool.submit(load, sources[i]) for i in range(upcoming, end)]))
            if pending and (len(pending) > 2 or upcoming is None):
                yield _collect(*pending.popleft(), size, strict)
    finally:
        pool.shutdown(cancel_futures=True)


class _Memory:
    """Squares of picture files, kept as long as there is room; none unless `remember` was called."""

    def __init__(self) -> None:
        self.on, self.room = False, 0
        self.kept: dict[tuple[str, int, int, int], np.ndarray] = {}
        self.lock = Lock()

    def square(self, source: ImageSource, size: int, resample: int) -> np.ndarray:
        changed = self._changed(source)
        if changed is None:
            return square(open_image(source), size, resample)
        key = str(source), changed, size, resample
        if key not in self.kept:
            made = square(open_image(source), size, resample)
            with self.lock:
                if key in self.kept or made.nbytes > self.room:
                    return made
                self.kept[key] = made
                self.room -= made.nbytes
        return self.kept[key]

    def _changed(self, source: ImageSource) -> int | None:
        """When a file was written last; None for what is not kept."""
        if not self.on or not isinstance(source, str | Path):
            return None
        try:
            return os.stat(source).st_mtime_ns
        except (OSError, ValueError):  # a name that no file can have is a ValueError
            return None


_MEMORY = _Memory()


def remember(room: int) -> None:
    """Keep decoded pictures from now on, up to so many bytes: the runs of a benchmark see the same ones."""
    with _MEMORY.lock:
        _MEMORY.on = room > 0
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
    start: int, futures: list[Future[np.ndarray | BadImage]], size: int, strict: bool
) -> tuple[torch.Tensor, list[int], list[BadImage]]:
    rows: list[np.ndarray] = []
    good: list[int] = []
    bad: list[BadImage] = []
    for index, future in enumerate(futures, start):
        result = future.result()
        if not isinstance(result, BadImage):
            rows.append(result)
            good.append(index)
        elif strict:
            raise result
        else:
            bad.append(result)
    batch = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, 3, size, size, dtype=torch.uint8)
    return batch, good, bad


def _name(source: ImageSource) -> str:
    if isinstance(source, np.ndarray):
        return f"(an array of {source.dtype} {list(source.shape)})"
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or f"(a {source.mode} picture in memory)")
    return str(source)


def _hush_pillow() -> None:
    """Pillow warns about odd metadata and sizes, which is noise here: sizes are refused, metadata is unused.

    A filter that stays, since `warnings.catch_warnings` must not be entered from several threads.
    """
    if not warnings.filters or warnings.filters[0] != _PILLOW_NOISE:
        warnings.filterwarnings("ignore", module=r"PIL\.")


def _check_file(path: Path, name: str) -> None:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise BadImage(name, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        # Opening a named pipe would wait for ever.
        raise BadImage(name, "it is not a regular file")
    if status.st_size == 0:
        raise BadImage(name, "the file is empty")


def _too_large() -> str:
    return f"it has more than {MAX_PIXELS // 1_000_000} million pixels; make it smaller first"


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    shape_fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not shape_fits or array.size == 0:
        raise BadImage(name, "an array must be uint8, height x width or height x width x 3 or 4")
    return Image.fromarray(np.ascontiguousarray(array))


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.width * image.height == 0:
        raise BadImage(name, "it has no pixels")
    if image.width * image.height > MAX_PIXELS:
        raise BadImage(name, _too_large())
    image.load()
    # Asked after loading, because Pillow turns a TIFF by itself and then forgets its orientation.
    turn = _UPRIGHT.get(_orientation(image))
    if image.mode.startswith("I") or image.mode == "F":
        rgb = Image.fromarray(_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    elif image.has_transparency_data:
        # Pillow converts each mode with alpha only to its nearest relative.
        middle = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)
        rgba = image.convert(middle).convert("RGBA")
        rgb = Image.alpha_composite(Image.new("RGBA", image.size, "white"), rgba).convert("RGB")
    else:
        rgb = image.convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image.Image) -> int:
    # Metadata is often broken in files whose pixels are fine: such a file counts as upright.
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Grey of 16 bits, 32 bits or floats, to 0..255 by scale: Pillow's own conversion clips at 255."""
    grey = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(grey.min()), float(grey.max())
    if mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif mode == "F" and low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    return np.rint((grey - low) * (255 / (high - low or 1))).clip(0, 255).astype(np.uint8)
