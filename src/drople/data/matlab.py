"""MATLAB 5 files, as far as the labels of Flowers102 and StanfordCars need them.

After "MAT-File Format", The MathWorks: a 128-byte header, then elements of a type, a length and a body padded
to 8 bytes; an element of type 15 is another one compressed. Every array is returned flat.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from drople.errors import DropleError

_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_MATRIX, _COMPRESSED = 14, 15
_CELL, _STRUCT, _CHAR = 1, 2, 4
# The largest file read here, the labels of StanfordCars, is below 3 MB unpacked.
_MOST = 64 * 2**20


def read_mat(path: Path) -> dict[str, Any]:
    """The variables of a file: numbers as a flat array, a text as str, a cell as list, a struct as dicts."""
    try:
        data = path.read_bytes()
        if data[126:128] not in (b"IM", b"MI"):
            raise ValueError("it has no MATLAB 5 header")
        order = "<" if data[126:128] == b"IM" else ">"
        found = {}
        for kind, body in _elements(data[128:], order):
            if kind == _COMPRESSED:
                unpacker = zlib.decompressobj()
                kind, body = next(_elements(unpacker.decompress(body, _MOST), order))
            if kind == _MATRIX:
                name, value = _array(body, order)
                found[name] = value
        return found
    except OSError as error:
        raise DropleError(f"cannot read {path}: {error.strerror}.") from None
    # A damaged file can end anywhere, with nearly any error of the lines above.
    except Exception as error:
        raise DropleError(f"cannot read {path} as a MATLAB 5 file: {error}. Get it again.") from error


def _elements(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        if kind >> 16:
            # At most four bytes are kept within the tag itself.
            kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            start = at + 8
            # Only compressed elements go without padding.
            end = start + size + (-size % 8 if kind != _COMPRESSED else 0)
        if start + size > len(data):
            raise ValueError("it is cut short")
        yield kind, data[start : start + size]
        at = end


def _array(body: bytes, order: str) -> tuple[str, Any]:
    parts = _elements(body, order)
    if not body:
        return "", np.empty(0)
    flags = struct.unpack_from(f"{order}I", next(parts)[1])[0] & 0xFF
    count = int(np.prod(_values(next(parts), order)))
    name = next(parts)[1].decode("ascii")
    if flags == _CELL:
        return name, [_array(next(parts)[1], order)[1] for _ in range(count)]
    if flags == _STRUCT:
        width = int(_values(next(parts), order)[0])
        names = next(parts)[1]
        fields = [names[at : at + width].rstrip(b"\0").decode("ascii") for at in range(0, len(names), width)]
        return name, [{field: _array(next(parts)[1], order)[1] for field in fields} for _ in range(count)]
    kind, data = next(parts, (2, b""))
    if flags == _CHAR:
        wide = "-le" if order == "<" else "-be"
        encoding = _TEXTS.get(kind, "latin-1")
        return name, data.decode(encoding + wide if encoding in ("utf-16", "utf-32") else encoding)
    return name, _values((kind, data), order)


def _values(element: tuple[int, bytes], order: str) -> np.ndarray:
    kind, data = element
    return np.frombuffer(data, order + _NUMBERS[kind])
