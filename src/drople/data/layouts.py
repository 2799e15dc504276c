"""The benchmark datasets as people have them on disk: CoOp's folders and split files, or our own packs.

Nothing is written. Where a split file is absent the split is drawn, the same for the same seed, in the
proportions and with the rounding that CoOp used for its own files, and a note says so.
"""

import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drople.data.catalog import (
    DATASETS,
    Dataset,
    find,
    flower_names,
    imagenet_names,
    is_known,
    read_names,
    steps,
)
from drople.data.dataset import Example, ImageData, load_data
from drople.data.matlab import read_mat
from drople.data.rows import split_name
from drople.errors import DropleError, unknown
from drople.safe_image import EXTENSIONS
from drople.templates import DEFAULT

TRAIN, VAL = 0.5, 0.2
VAL_OF_TRAINVAL = 0.2
# As many a class as ImageNet's own validation set has.
IMAGENET_VAL = 50

# CoOp leaves these two out and reads the others in the singular.
CALTECH_IGNORED = ("BACKGROUND_Google", "Faces_easy")
CALTECH_WORDS = {
    "airplanes": "airplane",
    "Faces": "face",
    "Leopards": "leopard",
    "Motorbikes": "motorbike",
}
EUROSAT_WORDS = {
    "AnnualCrop": "Annual Crop Land",
    "Forest": "Forest",
    "HerbaceousVegetation": "Herbaceous Vegetation Land",
    "Highway": "Highway or Road",
    "Industrial": "Industrial Buildings",
    "Pasture": "Pasture Land",
    "PermanentCrop": "Permanent Crop Land",
    "Residential": "Residential Buildings",
    "River": "River",
    "SeaLake": "Sea or Lake",
}

Item = tuple[Path, int]


@dataclass(frozen=True)
class Listing:
    """What a copy says it holds, before anybody looks whether the images are there."""

    classes: tuple[str, ...]
    words: tuple[str, ...]
    splits: Mapping[str, Sequence[Item]]
    notes: tuple[str, ...] = ()


def load_benchmark(name: str | Dataset, root: Path, seed: int = 0) -> ImageData:
    """A dataset of the catalog, from its folder under the data root `root`."""
    entry = find(name)
    folder, layout = locate(entry, root)
    if folder is None:
        raise DropleError(
            f"{entry.title} is not under {root}: expected {root / entry.folder} with "
            f"{', '.join(entry.needs) or 'train/, val/ and test/'}. To get it: {' '.join(steps(entry, root))}"
        )
    if layout == "pack":
        return load_data(folder, seed=seed)
    listing = read_listing(entry, folder, seed)
    absent = missing(path for items in listing.splits.values() for path, _ in items)
    if absent:
        shown = ", ".join(str(path) for path in absent[:3])
        raise DropleError(
            f"{len(absent)} images of {entry.title} are not there: {shown}{', ...' * (len(absent) > 3)}. "
            f"See drople data check {entry.name}; the original is published at {entry.page}."
        )
    examples = {
        split: tuple(Example(path, label) for path, label in sorted(items, key=lambda item: item[1]))
        for split, items in listing.splits.items()
    }
    train, val, test = (examples.get(split, ()) for split in ("train", "val", "test"))
    return ImageData(listing.classes, listing.words, train, val, test, root=folder, notes=listing.notes)


def check_name(spec: str | Path) -> None:
    """Refuse a name, not a path, that is neither in the catalog nor here."""
    path = Path(os.path.expanduser(spec))
    if len(path.parts) == 1 and not path.suffix and not path.exists() and not is_known(str(spec)):
        raise unknown("dataset, and no file or folder", str(spec), [each.name for each in DATASETS])


def resolve(spec: str | Path, root: Path, seed: int = 0) -> tuple[ImageData, str]:
    """The data that a name of the catalog or a path means, and the template that fits it."""
    path = Path(os.path.expanduser(spec))
    if len(path.parts) == 1 and is_known(str(spec)):
        entry = find(str(spec))
        if locate(entry, root)[0] or not path.exists():
            return load_benchmark(entry, root, seed), entry.template
    if not path.exists():
        check_name(spec)
        raise DropleError(f"there is no folder or table at {path}: check the path, or give a dataset's name.")
    # A benchmark's own folder given by its path: read as plain class folders it would be nonsense.
    for entry in DATASETS:
        if path.name in (entry.name, entry.folder) and _layout(entry, path)[0] is not None:
            return load_benchmark(replace(entry, folder=path.name), path.parent, seed), entry.template
    return load_data(path, seed=seed), DEFAULT


def locate(name: str | Dataset, root: Path) -> tuple[Path | None, str]:
    """The folder of a dataset under the data root and its layout, "coop" or "pack"; or None and ""."""
    entry = find(name)
    for folder in dict.fromkeys((root / entry.folder, root / entry.name)):
        found, layout = _layout(entry, folder)
        if found is not None:
            return found, layout
    return None, ""


def read_listing(entry: Dataset, folder: Path, seed: int) -> Listing:
    """The classes and splits of a copy in CoOp's layout, from its split file or else drawn."""
    split_file = folder / entry.split_file
    if entry.split_file and split_file.is_file():
        return _from_split_file(split_file, folder / entry.images)
    try:
        return READERS[entry.name](entry, folder, seed)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DropleError(
            f"the label files of {entry.title} in {folder} do not fit together "
            f"({type(error).__name__}: {error}). Get them again from {entry.page}."
        ) from error


def missing(paths: Iterable[Path]) -> list[Path]:
    """Those of `paths` that do not exist. Folders are listed once: a look at every file takes minutes."""
    listed: dict[Path, frozenset[str]] = {}
    absent = set()
    for path in paths:
        parent = path.parent
        if parent not in listed:
            listed[parent] = _names(parent)
        if path.name not in listed[parent]:
            absent.add(path)
    return sorted(absent)


def _layout(entry: Dataset, folder: Path) -> tuple[Path | None, str]:
    # FGVCAircraft is found as unpacked too, where CoOp moves the contents of data/ up.
    inner = (folder, folder / "data", folder / "fgvc-aircraft-2013b" / "data")
    for each in inner if entry.name == "fgvc_aircraft" else (folder,):
        if entry.needs and any((each / need).is_dir() for need in entry.needs):
            return each, "coop"
    if entry.name == "imagenet" and any((folder / part).is_dir() for part in ("train", "val")):
        return folder, "coop"
    if any(split_name(name) for name in _names(folder) if (folder / name).is_dir()):
        return folder, "pack"
    return None, ""


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as error:
        raise DropleError(f"cannot read the folder {folder}: {error.strerror}.") from None


def _images(folder: Path) -> list[Path]:
    return [
        folder / name
        for name in sorted(_names(folder))
        if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS
    ]


def _class_folders(folder: Path) -> list[str]:
    return sorted(name for name in _names(folder) if not name.startswith(".") and (folder / name).is_dir())


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DropleError(f"cannot read {path}: {error}.") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DropleError(f"cannot read {path} as JSON: {error}. Get it again.") from None


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _from_split_file(path: Path, images: Path) -> Listing:
    """CoOp's {"train": [[file, label, class], ...], "val": ..., "test": ...}."""
    given = _json(path)
    names: dict[int, str] = {}
    splits: dict[str, list[Item]] = {}
    try:
        for split in ("train", "val", "test"):
            splits[split] = [(images / str(file), int(label)) for file, label, _ in given[split]]
            for _, label, name in given[split]:
                if names.setdefault(int(label), str(name)) != str(name):
                    raise ValueError(f"label {label} is called both {names[int(label)]!r} and {name!r}")
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DropleError(
            f"{path} is not a split file ({what}): expected train, val and test, each a list of "
            "[file, label, class name]."
        ) from None
    # Somebody's subset may leave labels out; those of ImageData have no gaps.
    labels = {label: number for number, label in enumerate(sorted(names))}
    classes = tuple(names[label] for label in sorted(names))
    renumbered = {split: [(file, labels[label]) for file, label in items] for split, items in splits.items()}
    return Listing(classes, tuple(map(_spaced, classes)), renumbered, (f"split read from {path.name}",))


def _drawn(
    members: Mapping[int, Sequence[Path]], classes: Sequence[str], words: Sequence[str], seed: int
) -> Listing:
    """Half of each class to train, a fifth to val, the rest to test."""
    splits: dict[str, list[Item]] = defaultdict(list)
    for label, paths in members.items():
        order = _shuffled(paths, seed, classes[label])
        train, val = round(len(order) * TRAIN), round(len(order) * VAL)
        bounds = {"train": (0, train), "val": (train, train + val), "test": (train + val, len(order))}
        for split, (start, end) in bounds.items():
            splits[split] += [(path, label) for path in order[start:end]]
    note = f"no split file: 50% train, 20% val and 30% test of each class drawn with seed {seed}"
    return Listing(tuple(classes), tuple(words), splits, (note,))


def _official_test(
    trainval: Sequence[Item], test: Sequence[Item], classes: Sequence[str], words: Sequence[str], seed: int
) -> Listing:
    """The official test set, and a fifth of each class of the official training set for validation."""
    members: dict[int, list[Path]] = defaultdict(list)
    for path, label in trainval:
        members[label].append(path)
    train, val = _held_out(members, classes, seed, lambda count: round(count * VAL_OF_TRAINVAL))
    note = f"no split file: official test set; 20% of each class of train drawn for val with seed {seed}"
    return Listing(tuple(classes), tuple(words), {"train": train, "val": val, "test": list(test)}, (note,))


def _held_out(
    members: Mapping[int, Sequence[Path]], classes: Sequence[str], seed: int, size: Callable[[int], int]
) -> tuple[list[Item], list[Item]]:
    train: list[Item] = []
    val: list[Item] = []
    for label, paths in members.items():
        order = _shuffled(paths, seed, classes[label])
        held = size(len(order))
        val += [(path, label) for path in order[:held]]
        train += [(path, label) for path in order[held:]]
    return train, val


def _shuffled(paths: Sequence[Path], seed: int, name: str) -> list[Path]:
    # Seeded by the class, so that a change in one class does not move the others' images.
    return random.Random(f"{seed}/{name}").sample(sorted(paths, key=str), len(paths))


def _class_folders_drawn(entry: Dataset, folder: Path, seed: int) -> Listing:
    """Caltech101, Food101, DTD, EuroSAT: a folder a class, split by CoOp and not by the publisher."""
    images = folder / entry.images
    classes = [name for name in _class_folders(images) if name not in CALTECH_IGNORED]
    renamed = CALTECH_WORDS | EUROSAT_WORDS if entry.name in ("caltech101", "eurosat") else {}
    words = [renamed.get(name, _spaced(name)) for name in classes]
    return _drawn({label: _images(images / name) for label, name in enumerate(classes)}, classes, words, seed)


def _pets(entry: Dataset, folder: Path, seed: int) -> Listing:
    def part(filename: str) -> list[tuple[str, int]]:
        lines = _lines(_needed(entry, folder / "annotations" / filename))
        return [(image, int(number)) for image, number in (line.split()[:2] for line in lines)]

    trainval, test = part("trainval.txt"), part("test.txt")
    # The publisher's numbers; the breed is the file's name up to its last underscore.
    names = {number: image.rpartition("_")[0].lower() for image, number in trainval + test}
    labels = {number: label for label, number in enumerate(sorted(names))}
    classes = [names[number] for number in labels]

    def items(pairs: list[tuple[str, int]]) -> list[Item]:
        return [(folder / entry.images / f"{image}.jpg", labels[number]) for image, number in pairs]

    return _official_test(items(trainval), items(test), classes, [_spaced(name) for name in classes], seed)


def _cars(entry: Dataset, folder: Path, seed: int) -> Listing:
    meta = read_mat(_needed(entry, folder / "devkit" / "cars_meta.mat"))
    # The year goes first, as CoOp has it: 2000 AM General Hummer SUV.
    classes = [re.sub(r"^(.*) (\S+)$", r"\2 \1", name) for name in meta["class_names"]]

    def part(images: str, labels: Path) -> list[Item]:
        found = read_mat(_needed(entry, labels))["annotations"]
        return [(folder / images / each["fname"], int(each["class"][0]) - 1) for each in found]

    trainval = part("cars_train", folder / "devkit" / "cars_train_annos.mat")
    test = part("cars_test", folder / "cars_test_annos_withlabels.mat")
    return _official_test(trainval, test, classes, classes, seed)


def _flowers(entry: Dataset, folder: Path, seed: int) -> Listing:
    labels = read_mat(_needed(entry, folder / "imagelabels.mat"))["labels"]
    beside = folder / "cat_to_name.json"
    names = _json(beside) if beside.is_file() else flower_names()
    present = sorted({int(label) for label in labels})
    members: dict[int, list[Path]] = {number: [] for number in range(len(present))}
    numbers = {label: number for number, label in enumerate(present)}
    for index, label in enumerate(labels, 1):
        members[numbers[int(label)]].append(folder / entry.images / f"image_{index:05}.jpg")
    classes = [names[str(label)] for label in present]
    listing = _drawn(members, classes, classes, seed)
    if not beside.is_file():
        listing = replace(
            listing, notes=(*listing.notes, "no cat_to_name.json: flowers named as OpenAI does")
        )
    return listing


def _aircraft(entry: Dataset, folder: Path, seed: int) -> Listing:
    classes = _lines(_needed(entry, folder / "variants.txt"))
    labels = {name: label for label, name in enumerate(classes)}
    splits: dict[str, list[Item]] = {}
    for split in ("train", "val", "test"):
        lines = _lines(_needed(entry, folder / f"images_variant_{split}.txt"))
        pairs = (line.partition(" ") for line in lines)
        splits[split] = [
            (folder / entry.images / f"{image}.jpg", labels[name.strip()]) for image, _, name in pairs
        ]
    return Listing(tuple(classes), tuple(classes), splits, ("official split",))


def _sun(entry: Dataset, folder: Path, seed: int) -> Listing:
    classes = [line.strip("/") for line in _lines(_needed(entry, folder / "ClassName.txt"))]
    # /c/church/indoor reads "indoor church": without its letter, the last word first.
    words = [_spaced(" ".join(reversed(name.split("/")[1:]))) for name in classes]
    labels = {name: label for label, name in enumerate(classes)}

    def part(filename: str) -> list[Item]:
        files = [line.strip("/") for line in _lines(_needed(entry, folder / filename))]
        return [(folder / entry.images / file, labels[file.rpartition("/")[0]]) for file in files]

    return _official_test(part("Training_01.txt"), part("Testing_01.txt"), classes, words, seed)


def _ucf(entry: Dataset, folder: Path, seed: int) -> Listing:
    lists = folder / "ucfTrainTestlist"
    numbered = [line.split() for line in _lines(_needed(entry, lists / "classInd.txt"))]
    ordered = sorted(numbered, key=lambda pair: int(pair[0]))
    labels = {name: label for label, (_, name) in enumerate(ordered)}
    # ApplyEyeMakeup lies in the folder Apply_Eye_Makeup.
    folders = {name: "_".join(re.findall("[A-Z][^A-Z]*", name)) for name in labels}

    def part(filename: str) -> list[Item]:
        items = []
        for line in _lines(_needed(entry, lists / filename)):
            name, _, video = line.split()[0].partition("/")
            frame = Path(video).with_suffix(".jpg").name
            items.append((folder / entry.images / folders[name] / frame, labels[name]))
        return items

    classes = [folders[name] for name in labels]
    words = [_spaced(name) for name in classes]
    return _official_test(part("trainlist01.txt"), part("testlist01.txt"), classes, words, seed)


def _imagenet(entry: Dataset, folder: Path, seed: int) -> Listing:
    images = folder / entry.images if (folder / entry.images).is_dir() else folder
    names = _names_of_ids(folder)
    ids = sorted({*_class_folders(images / "train"), *_class_folders(images / "val")})
    if not ids:
        raise DropleError(
            f"{images} has no class folders such as train/n01440764 and val/n01440764: sort the images of "
            "train and val into a folder for each WordNet id."
        )
    _check_ids(ids, names, images)
    members = {label: found for label, each in enumerate(ids) if (found := _images(images / "train" / each))}
    train, val = _held_out(
        members, ids, seed, lambda count: min(IMAGENET_VAL, round(count * VAL_OF_TRAINVAL))
    )
    test = [(path, label) for label, each in enumerate(ids) for path in _images(images / "val" / each)]
    notes = [f"the official validation set is the test set; val drawn from train with seed {seed}"]
    if not train:
        notes = ["no training part: this data can be tested on, not trained on"]
    splits = {"train": train, "val": val, "test": test}
    return Listing(tuple(ids), tuple(names[each] for each in ids), splits, tuple(notes))


def _imagenet_variant(entry: Dataset, folder: Path, seed: int) -> Listing:
    """Test sets over all or 200 of ImageNet's classes; those present are the folders present."""
    images = folder / entry.images
    names = _names_of_ids(folder)
    folders = _class_folders(images)
    # ImageNet-V2 numbers its folders by the place of the class in the list.
    numbered = {str(number): each for number, each in enumerate(sorted(names))}
    ids = {each: numbered.get(each, each) if entry.name == "imagenetv2" else each for each in folders}
    _check_ids(list(ids.values()), names, images)
    classes = tuple(sorted(ids.values()))
    labels = {each: label for label, each in enumerate(classes)}
    test = [(path, labels[ids[each]]) for each in folders for path in _images(images / each)]
    note = "no training part: this data can be tested on, not trained on"
    return Listing(classes, tuple(names[each] for each in classes), {"test": test}, (note,))


def _names_of_ids(folder: Path) -> Mapping[str, str]:
    """The user's own classnames.txt where there is one, as CoOp reads it; else OpenAI's names."""
    beside = folder / "classnames.txt"
    return read_names("\n".join(_lines(beside))) if beside.is_file() else imagenet_names()


def _check_ids(ids: Sequence[str], names: Mapping[str, str], images: Path) -> None:
    strangers = [each for each in ids if each not in names]
    if strangers:
        raise DropleError(
            f"{images} has {len(strangers)} folders that are no classes of ImageNet: "
            f"{', '.join(strangers[:3])}. Expected WordNet ids such as n01440764 (for ImageNet-V2, numbers "
            "from 0 to 999); take the others out."
        )


def _needed(entry: Dataset, path: Path) -> Path:
    if path.is_file():
        return path
    instead = f" {entry.split_file} of CoOp in its place does too." if entry.split_file else ""
    raise DropleError(f"{entry.title} needs {path}, which is not there.{instead} Published at {entry.page}.")


READERS: dict[str, Callable[[Dataset, Path, int], Listing]] = {
    "imagenet": _imagenet,
    "caltech101": _class_folders_drawn,
    "oxford_pets": _pets,
    "stanford_cars": _cars,
    "oxford_flowers": _flowers,
    "food101": _class_folders_drawn,
    "fgvc_aircraft": _aircraft,
    "sun397": _sun,
    "dtd": _class_folders_drawn,
    "eurosat": _class_folders_drawn,
    "ucf101": _ucf,
    "imagenetv2": _imagenet_variant,
    "imagenet_sketch": _imagenet_variant,
    "imagenet_a": _imagenet_variant,
    "imagenet_r": _imagenet_variant,
}
