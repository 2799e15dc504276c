"""Is a copy of a benchmark dataset whole? Counts, class names, missing and undecodable images."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from drople.data.catalog import DATASETS, Dataset, find, imagenet_names, steps
from drople.data.layouts import EUROSAT_WORDS, load_benchmark, locate, missing, read_listing
from drople.errors import DropleError
from drople.safe_image import FORMATS, MAX_PIXELS, BadImage, open_image

SHOWN = 5


@dataclass(frozen=True)
class Report:
    """What was found in a copy (and expected), and what is wrong; `problems` is empty for a whole copy."""

    name: str
    title: str
    folder: Path | None
    layout: str
    classes: tuple[int, int] = (0, 0)
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    missing: tuple[Path, ...] = ()
    undecodable: tuple[tuple[Path, str], ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def lines(self) -> list[str]:
        """The report as text to print."""
        said = [f"{self.title}: {self.folder} ({self.layout} layout)" if self.folder else self.title]
        if self.folder:
            said.append(f"classes: {self.classes[0]:,} of {self.classes[1]:,}")
        said += [f"{split}: {found:,} of {due:,} images" for split, (found, due) in self.splits.items()]
        said += [f"note: {note}" for note in self.notes]
        said += [f"problem: {problem}" for problem in self.problems]
        return said + ["whole" if self.ok else "not whole"]


def overview(root: Path) -> list[dict[str, str]]:
    """One row a dataset, for printing: what it is, where it comes from, whether it is under the data root."""
    return [
        {
            "name": entry.name,
            "title": entry.title,
            "classes": str(entry.classes),
            "domain": entry.domain,
            "licence": entry.licence,
            "source": entry.page,
            "get": ("download" if entry.tried else "download, address untried")
            if entry.fetchable
            else "by hand",
            "found": str(locate(entry, root)[0] or ""),
        }
        for entry in DATASETS
    ]


def check(
    name: str | Dataset,
    root: Path,
    *,
    deep: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Looks through a copy: every image's header, or with `deep` every pixel. Nothing is changed."""
    entry = find(name)
    folder, layout = locate(entry, root)
    if folder is None:
        absent = f"nothing at {root / entry.folder}. To get it: {' '.join(steps(entry, root))}"
        return Report(entry.name, entry.title, None, "", (0, entry.classes), problems=(absent,))
    try:
        classes, splits, notes, empty = _contents(entry, root, folder, layout)
    except DropleError as error:
        return Report(
            entry.name, entry.title, folder, layout, (0, entry.classes), problems=(str(error), _source(entry))
        )
    due = dict(zip(("train", "val", "test"), _counts(entry, layout), strict=True)) | dict(entry.extra)
    counts = {
        split: (len(splits.get(split, ())), due.get(split, 0))
        for split in (*due, *sorted(set(splits) - set(due)))
        if splits.get(split) or due.get(split)
    }
    paths = [path for found in splits.values() for path in found]
    absent_files = missing(paths)
    gone = set(absent_files)
    bad = _undecodable([path for path in paths if path not in gone], deep, progress)

    problems = list(empty)
    if len(classes) != entry.classes:
        problems.append(f"{len(classes):,} classes instead of {entry.classes:,}")
    problems += _strange_names(entry, layout, classes)
    problems += [
        f"{split} has {found:,} images instead of {expected:,}"
        for split, (found, expected) in counts.items()
        if found != expected
    ]
    if absent_files:
        problems.append(f"{len(absent_files):,} images are missing: {_some(absent_files)}")
    if bad:
        problems.append(
            f"{len(bad):,} images cannot be read: {_some(f'{path} ({why})' for path, why in bad)}"
        )
    if problems:
        problems.append(_source(entry))
    return Report(
        entry.name,
        entry.title,
        folder,
        layout,
        (len(classes), entry.classes),
        counts,
        tuple(absent_files),
        tuple(bad),
        tuple(problems),
        tuple(notes),
    )


def _contents(
    entry: Dataset, root: Path, folder: Path, layout: str
) -> tuple[tuple[str, ...], dict[str, list[Path]], tuple[str, ...], list[str]]:
    """The classes, the files of each split, the notes, and a complaint about classes without images."""
    splits: dict[str, list[tuple[Path, int]]]
    if layout == "coop":
        listing = read_listing(entry, folder, seed=0)
        classes, notes = listing.classes, listing.notes
        splits = {split: list(items) for split, items in listing.splits.items()}
    else:
        data = load_benchmark(entry, root)
        classes, notes = data.classes, data.notes
        parts = {"train": data.train, "val": data.val, "test": data.test, **data.extra}
        splits = {split: [(Path(str(e.image)), e.label) for e in found] for split, found in parts.items()}
    complaints = []
    for split, items in splits.items():
        without = sorted(set(range(len(classes))) - {label for _, label in items})
        if items and without:
            names = _some(classes[label] for label in without)
            complaints.append(f"{split} has no images of {len(without)} classes: {names}")
    return classes, {split: [path for path, _ in items] for split, items in splits.items()}, notes, complaints


def _counts(entry: Dataset, layout: str) -> tuple[int, int, int]:
    return entry.pack if layout == "pack" and entry.pack else entry.counts


def _strange_names(entry: Dataset, layout: str, classes: tuple[str, ...]) -> list[str]:
    """Class names that are not the dataset's, where the list of them is known."""
    known: set[str] = set()
    if entry.name == "eurosat":
        known = set(EUROSAT_WORDS.values()) | (set(EUROSAT_WORDS) if layout == "coop" else set())
    elif entry.name.startswith("imagenet") and layout == "coop":
        known = set(imagenet_names())
    said = []
    strange = [name for name in classes if known and name not in known]
    if strange:
        said.append(f"{len(strange)} class names are not those of {entry.title}: {_some(strange)}")
    twice = sorted({name for name in classes if classes.count(name) > 1}) if len(classes) < 2000 else []
    if twice:
        said.append(f"class names given to several classes: {_some(twice)}")
    return said


def _undecodable(
    paths: list[Path], deep: bool, progress: Callable[[int, int], None] | None
) -> list[tuple[Path, str]]:
    look = _decode if deep else _header
    bad = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="drople-check") as pool:
        for done, (path, why) in enumerate(zip(paths, pool.map(look, paths, chunksize=64), strict=True), 1):
            if why:
                bad.append((path, why))
            if progress is not None:
                progress(done, len(paths))
    return bad


def _decode(path: Path) -> str:
    try:
        open_image(path)
    except BadImage as error:
        return error.reason
    return ""


def _header(path: Path) -> str:
    """Why the file cannot be an image, from its first bytes."""
    try:
        if not path.is_file() or path.stat().st_size == 0:
            return "the file is empty" if path.is_file() else "it is not a regular file"
        with Image.open(path, formats=FORMATS) as image:
            return "too many pixels" if image.width * image.height > MAX_PIXELS else ""
    # A hostile header can make Pillow raise nearly anything; one such file must not end the check.
    except Exception as error:
        return f"not an image, or damaged ({type(error).__name__})"


def _some(things: Iterable[object]) -> str:
    listed = [str(each) for each in things]
    return ", ".join(listed[:SHOWN]) + f" and {len(listed) - SHOWN:,} more" * (len(listed) > SHOWN)


def _source(entry: Dataset) -> str:
    split = f"; the split file {entry.split_file} comes from CoOp's authors" if entry.split_file else ""
    return f"the original is published at {entry.page}{split}"
