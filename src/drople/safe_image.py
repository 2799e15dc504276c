"""From an image file to a square of pixels, decoded safely.

Files come from anywhere, so whatever is wrong with one ends as a `BadImage` that says what, and nothing is
decoded before its header has been checked. Without torch, which a process that only decodes need not wait for.
"""

import mmap
import os
import re
import stat
import struct
import sys
import warnings
from pathlib import Path
from typing import TypeAlias

import numpy as np
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
# Pictures of kinds that are not read here.
OTHER_EXTENSIONS = frozenset(
    (".heic", ".heif", ".avif", ".jxl", ".jp2", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw")
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


def attempt(source: ImageSource, size: int, resample: int) -> np.ndarray | BadImage:
    """The square of a picture, or what is wrong with it."""
    try:
        return square(open_image(source), size, resample)
    except BadImage as error:
        return error


ASKED = struct.Struct("<ii")  # the place for a picture, the bytes of its path, which follow
SAID = struct.Struct("<i")  # the bytes of what is wrong with it, which follow; 0 if it is where it should be
GREETING = b"ready"
NICE = 5  # who has the pictures to work with goes first: all cores may be decoding


class Shared:
    """Memory of several processes: how many pictures each of them is done with, then places for pictures."""

    HEAD = 4096

    def __init__(self, memory: int, size: int) -> None:
        self.memory, self.size = memory, size
        shared = mmap.mmap(memory, 0)
        self.done = np.frombuffer(shared, np.int64, self.HEAD // 8)
        self.squares = np.frombuffer(shared, np.uint8, offset=self.HEAD).reshape(-1, 3, size, size)

    @classmethod
    def length(cls, places: int, size: int) -> int:
        return cls.HEAD + places * 3 * size * size


def serve() -> None:
    """The other end of `data/decoders.py`: paths in, squares into the memory of both, until nobody asks."""
    number, memory, size, resample = map(int, sys.argv[1:])
    os.nice(NICE)
    shared = Shared(memory, size)
    asked, says = sys.stdin.buffer, sys.stdout.buffer
    says.write(GREETING)
    says.flush()
    while len(head := asked.read(ASKED.size)) == ASKED.size:
        place, length = ASKED.unpack(head)
        answer = attempt(os.fsdecode(asked.read(length)), size, resample)
        if isinstance(answer, BadImage):
            reason = answer.reason.encode("utf-8", "backslashreplace")
            says.write(SAID.pack(len(reason)) + reason)
        else:
            shared.squares[place] = answer
            says.write(SAID.pack(0))
        shared.done[number] += 1
        says.flush()


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
