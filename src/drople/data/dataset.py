"""Labelled images from a folder, a table or pairs in memory, as one `ImageData`. No pixel is read here."""

import os
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from drople.data.folders import read_folder
from drople.data.rows import LAYOUT, Row
from drople.data.tables import read_classnames, read_pairs, read_table
from drople.errors import DropleError, unknown

HELD_OUT = 0.2
# Below this many training images a class is worth a word to the user.
FEW = 5


@dataclass(frozen=True)
class Example:
    """One image and the number of its class."""

    image: Path | Image.Image | np.ndarray
    label: int


@dataclass(frozen=True)
class ImageData:
    """Labelled images in splits. `classes` are named as the user did, `words` go into the sentences."""

    classes: tuple[str, ...]
    words: tuple[str, ...]
    train: tuple[Example, ...]
    val: tuple[Example, ...] = ()
    test: tuple[Example, ...] = ()
    extra: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    root: Path | None = None
    notes: tuple[str, ...] = ()

    def split(self, name: str) -> tuple[Example, ...]:
        """The examples of one split, by name."""
        splits = {"train": self.train, "val": self.val, "test": self.test, **self.extra}
        present = {known: examples for known, examples in splits.items() if examples}
        if name not in present:
            raise DropleError(
                f"this data has no {name!r} split; it has {', '.join(present)}. "
                f"Choose one of them, or add a folder {name}/ with a folder for each class."
            )
        return present[name]


DataSource: TypeAlias = str | Path | Sequence[tuple[str | Path | Image.Image | np.ndarray, str | int]]


def load_data(
    source: DataSource,
    *,
    classnames: Mapping[str, str] | str | Path | None = None,
    seed: int = 0,
    least: int = 2,
) -> ImageData:
    """Reads a folder of class folders (perhaps in splits), a .csv or .parquet table, or (image, label) pairs.

    `classnames` gives some classes better words (a mapping, or a JSON or CSV file of class, words). Without a
    validation part, a fifth of each class's training images is held out, the same ones for the same `seed`. Fewer
    classes than `least` are refused.
    """
    root: Path | None = None
    where: str | Path = "the list"
    notes: list[str] = []
    if not isinstance(source, str | os.PathLike):
        rows = read_pairs(source)
    else:
        path = Path(os.path.expanduser(source))
        if not os.path.exists(path):
            raise DropleError(f"there is no folder or table at {path}: check the path. {LAYOUT}")
        root, where = path if path.is_dir() else path.parent, path
        rows = read_folder(path, notes) if path.is_dir() else read_table(path)
    found = sorted({name for *_, name in rows})
    if len(found) < least:
        what = f"only one class, {found[0]!r}" if found else "no images"
        raise DropleError(f"{where} has {what}: telling classes apart needs two. {LAYOUT}")
    return _assemble(rows, root, notes, read_classnames(classnames), seed)


def tidy(name: str) -> str:
    """A folder name as words: AnnualCrop -> annual crop; the hyphens of 737-800 or DC-10 stay."""
    spaced = "".join(f" {letter}" if _starts_word(name, at) else letter for at, letter in enumerate(name))
    words = re.sub(r"(?<!\d)-(?!\d)", " ", spaced.replace("_", " ")).lower().split()
    return " ".join(words) or name


def _starts_word(name: str, at: int) -> bool:
    """Whether a capital begins a word inside a CamelCase name; SUVs and HTMLPages count as acronyms."""
    if at == 0 or not name[at].isupper():
        return False
    following = name[at + 1 : at + 3]
    begins = len(following) == 2 and following.islower() and following.isalpha()
    return name[at - 1].islower() or (name[at - 1].isupper() and begins)


def _assemble(
    rows: Sequence[Row], root: Path | None, notes: list[str], classnames: Mapping[str, str], seed: int
) -> ImageData:
    names = {name for _, _, name in rows}
    numeric = all(re.fullmatch(r"[0-9]+", name) for name in names)
    classes = tuple(sorted(names, key=(lambda name: (int(name), name)) if numeric else None))
    for name in classnames:
        if name not in names:
            raise unknown("class in the class names", name, classes)
    words = tuple(classnames.get(name) or tidy(name) for name in classes)

    labels = {name: label for label, name in enumerate(classes)}
    splits: dict[str, list[Example]] = defaultdict(list)
    for split, image, name in rows:
        splits[split].append(Example(image, labels[name]))
    ordered = {split: tuple(sorted(found, key=lambda e: e.label)) for split, found in splits.items()}
    train, val, test = (ordered.pop(split, ()) for split in ("train", "val", "test"))

    notes += _notes_on_classes(classes, words, train)
    if train and not val:
        train, val = _hold_out(train, classes, seed)
        notes.append(f"no validation part: {HELD_OUT:.0%} of train held out ({len(val)} images)")
    return ImageData(classes, words, train, val, test, ordered, root, tuple(notes))


def _notes_on_classes(
    classes: Sequence[str], words: Sequence[str], train: Sequence[Example]
) -> Iterator[str]:
    if not train:
        yield "no training part: this data can be tested on, not trained on"
        return
    counts = [0] * len(classes)
    for example in train:
        counts[example.label] += 1
    few = [(name, count) for name, count in zip(classes, counts, strict=True) if count < FEW]
    yield from (
        f"class {name!r} has only {count} training image{'s' * (count != 1)}" for name, count in few[:3]
    )
    if len(few) > 3:
        yield f"{len(few) - 3} more classes have fewer than {FEW} training images"
    same: dict[str, list[str]] = defaultdict(list)
    for name, word in zip(classes, words, strict=True):
        same[word].append(name)
    for word, shared in same.items():
        if len(shared) > 1:
            names = " and ".join(map(repr, shared))
            yield f"classes {names} read the same, {word!r}: tell them apart with --classnames"
    codes = [word for word in words if re.fullmatch(r"n?\d+", word)]
    if codes:
        yield f"class names such as {codes[0]!r} say nothing to a text encoder: give words with --classnames"


def _hold_out(
    train: Sequence[Example], classes: Sequence[str], seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """A fifth of each class for validation; a class of two or more gives one at least, and keeps one."""
    members: dict[int, list[int]] = defaultdict(list)
    for index, example in enumerate(train):
        members[example.label].append(index)
    held: set[int] = set()
    for label, indices in members.items():
        count = max(1, round(HELD_OUT * len(indices))) if len(indices) > 1 else 0
        # Seeded by the class, so that a change in one class does not move the others' images.
        held.update(random.Random(f"{seed}/{classes[label]}").sample(indices, count))
    kept = tuple(example for index, example in enumerate(train) if index not in held)
    return kept, tuple(train[index] for index in sorted(held))
