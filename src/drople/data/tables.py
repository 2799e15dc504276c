"""A .csv or .parquet table, pairs in memory, and better words for class names."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from drople.data.rows import LAYOUT, Row, class_name, split_name
from drople.errors import DropleError

PATH_COLUMNS = ("path", "image", "file", "filename")
LABEL_COLUMNS = ("label", "class", "category")


def read_table(path: Path) -> list[Row]:
    """The rows of a table with a column of image files, one of classes, and perhaps one of splits."""
    rows = list(_table_rows(path))
    _check_files(rows, f"{path} (relative paths start at the folder of the table)")
    return rows


def read_pairs(pairs: Iterable[Any]) -> list[Row]:
    """Rows from (image, label) pairs, all for training."""
    if not isinstance(pairs, Iterable):
        raise DropleError(f"data is a folder, a table or (image, label) pairs, not {_short(pairs)}.")
    rows = [_pair_row(number, pair) for number, pair in enumerate(pairs)]
    _check_files(rows, "the list")
    return rows


def read_classnames(source: Mapping[str, str] | str | Path | None) -> Mapping[str, str]:
    """Words for classes, from a mapping or from a JSON or CSV file."""
    if source is None or isinstance(source, Mapping):
        mapping: Any = source or {}
    else:
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8-sig")
            if path.suffix.lower() == ".json":
                mapping = json.loads(text)
            else:
                lines = [line for line in csv.reader(text.splitlines()) if line]
                # dict() refuses lines that are not pairs.
                mapping = dict(line for line in lines if line != ["folder", "words"])
        except (OSError, ValueError, csv.Error) as error:
            raise DropleError(
                f"cannot read class names from {path}: {error}. It should be a JSON object of class to "
                "words, or a CSV with the two columns folder,words."
            ) from None
    if not isinstance(mapping, Mapping) or not all(isinstance(each, str) for each in mapping.values()):
        raise DropleError("class names must map each class to the words for it, such as n02084071: dog.")
    return {class_name(name): words for name, words in mapping.items()}


def _table_rows(path: Path) -> Iterator[Row]:
    columns, records = _csv_table(path) if path.suffix.lower() == ".csv" else _parquet_table(path)
    lowered = {column.strip().lower(): column for column in columns}
    image_column = next((lowered[name] for name in PATH_COLUMNS if name in lowered), None)
    label_column = next((lowered[name] for name in LABEL_COLUMNS if name in lowered), None)
    for column, names, what in (
        (image_column, PATH_COLUMNS, "image file"),
        (label_column, LABEL_COLUMNS, "class"),
    ):
        if column is None:
            raise DropleError(
                f"the table {path} has no column for the {what}: call it {' or '.join(names)}. "
                f"It has {', '.join(columns) or 'no columns'}."
            )
    for number, record in enumerate(records, 2):
        image, label = record[image_column], record[label_column]
        if not isinstance(image, str) or not image.strip() or label is None or not class_name(label):
            raise DropleError(
                f"row {number} of {path} (the header is row 1) needs a file path and a class, "
                f"but has {_short(image)} and {_short(label)}."
            )
        given = record.get(lowered.get("split", ""))
        split = split_name(str(given)) if given not in (None, "") else "train"
        if split is None:
            raise DropleError(
                f"row {number} of {path} has the split {given!r}: it may be train, val, test or test_NAME."
            )
        # Joining with an absolute path gives that path.
        yield split, path.parent / image.strip(), class_name(label)


def _short(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float)
    return repr(value) if plain else f"a {type(value).__name__}"


def _csv_table(path: Path) -> tuple[list[str], list[dict[Any, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        header = text.partition("\n")[0]
        # Spreadsheets of some countries write semicolons.
        delimiter = max(",;\t", key=header.count)
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        return list(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DropleError(f"cannot read the table {path} as CSV in UTF-8 ({error}): save it so.") from None


def _parquet_table(path: Path) -> tuple[list[str], list[dict[Any, Any]]]:
    if path.suffix.lower() not in (".parquet", ".pq"):
        raise DropleError(f"{path} is neither a folder nor a .csv or .parquet table. {LAYOUT}")
    try:
        import pyarrow.parquet
    except ImportError:
        raise DropleError(
            f"reading {path} needs pyarrow, which is not installed: pip install pyarrow, or use a .csv table."
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DropleError(f"cannot read the table {path} as Parquet: {error}.") from None
    return table.column_names, table.to_pylist()


def _pair_row(number: int, pair: Any) -> Row:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DropleError(
            f"item {number} of the list is not an (image, label) pair but {_short(pair)}: give "
            "list(zip(images, labels))."
        )
    image, label = pair
    if not isinstance(image, str | Path | Image.Image | np.ndarray):
        raise DropleError(
            f"the image of item {number} is not a path, a picture or an array but {_short(image)}."
        )
    if isinstance(label, bool) or not isinstance(label, str | int | np.integer) or not class_name(label):
        raise DropleError(f"the label of item {number} is not a name or a number but {_short(label)}.")
    return "train", Path(image) if isinstance(image, str) else image, class_name(label)


def _check_files(rows: Sequence[Row], where: str) -> None:
    missing = [str(image) for _, image, _ in rows if isinstance(image, Path) and not os.path.exists(image)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DropleError(
            f"{len(missing)} of {len(rows)} image files do not exist: {', '.join(missing[:3])}{more}. "
            f"Correct them in {where}, or take them out."
        )
