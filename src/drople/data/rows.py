"""What every kind of source is read into before it becomes an `ImageData`: rows of split, image and class."""

import re
import unicodedata
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

Row: TypeAlias = tuple[str, Path | Image.Image | np.ndarray, str]

LAYOUT = (
    "Expected CLASS/image.jpg, or train/CLASS/image.jpg with val/ and test/ beside train/, "
    "each CLASS folder named after what its images show."
)
_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


def split_name(name: str) -> str | None:
    """Which split a folder or a table cell means; None when it means none."""
    lower = name.strip().lower()
    if lower in _SPLITS:
        return _SPLITS[lower]
    return name.strip() if re.match(r"test[_-].", lower) else None


def class_name(name: object) -> str:
    """A class as text to print and compare: accents composed, bytes that are no UTF-8 marked."""
    text = str(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return unicodedata.normalize("NFC", text).strip()
