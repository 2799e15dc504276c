"""A folder of class folders, perhaps in train, val and test, as rows."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from drople.data.rows import LAYOUT, Row, class_name, split_name
from drople.errors import DropleError
from drople.safe_image import EXTENSIONS, OTHER_EXTENSIONS


def read_folder(root: Path, notes: list[str]) -> list[Row]:
    """The images of each class folder, in order; what the user should know is added to `notes`."""
    folders, loose = _entries(root)
    if not folders:
        found = "images directly inside, but no class folders" if loose else "no images and no class folders"
        raise DropleError(f"the folder {root} has {found}. {LAYOUT}")
    splits = {folder: name for folder in folders if (name := split_name(folder.name))}
    inside = {folder: _entries(folder) for folder in splits}
    # A class may be called "train" (the vehicle): a split holds folders only.
    flat = [folder for folder, (_, images) in inside.items() if images]
    only_splits = len(splits) == len(folders)
    if only_splits and flat:
        raise DropleError(f"the folder {flat[0]} should hold class folders and no loose images. {LAYOUT}")
    if only_splits or ("train" in splits.values() and not flat):
        ignored = [folder.name for folder in folders if folder not in splits]
        if ignored:
            notes.append(f"ignored, being neither train, val, test nor test_*: {', '.join(ignored)}")
        class_folders = [(name, each) for folder, name in splits.items() for each in inside[folder][0]]
    else:
        class_folders = [("train", each) for each in folders]
        if splits:
            names = " and ".join(folder.name for folder in splits)
            notes.append(
                f"{names} taken for a class, standing beside class folders; as a split it needs a train folder"
            )
        if loose:
            notes.append(f"images directly in {root.name}, outside the class folders, are ignored")
    rows: list[Row] = []
    other: Counter[str] = Counter()
    for split, folder in class_folders:
        found_images = sorted(_images_under(folder, root, other), key=lambda image: image.as_posix())
        rows += [(split, image, class_name(folder.name)) for image in found_images]
        if not found_images:
            notes.append(f"the folder {folder.relative_to(root)} holds no images")
    unread = ", ".join(f"{count} {kind}" for kind, count in sorted(other.items()))
    if unread:
        notes.append(f"pictures of kinds not read here: {unread}; convert them to JPEG or PNG to use them")
    if not rows:
        found = f" (but {unread}, which are not read here: convert them to JPEG or PNG)" if unread else ""
        raise DropleError(f"no images found in the class folders of {root}{found}. {LAYOUT}")
    return rows


def _images_under(folder: Path, root: Path, other: Counter[str]) -> Iterator[Path]:
    """The images anywhere below a class folder, links followed but no folder entered twice; pictures of `other` kinds
    are counted."""

    def fail(error: OSError) -> None:
        raise _unreadable(error) from None

    # With its parents seen too, a link back up does not pour the other classes into this one.
    seen = {os.path.realpath(parent) for parent in folder.parents if parent == root or root in parent.parents}
    for here, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        kinds = (os.path.splitext(name)[1].lower() for name in files if not name.startswith("."))
        other.update(kind for kind in kinds if kind in OTHER_EXTENSIONS)
        yield from (Path(here, name) for name in files if _is_image(name))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def _entries(folder: Path) -> tuple[list[Path], bool]:
    """The visible folders inside a folder, and whether it holds images directly."""
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry.name, entry.is_dir()) for entry in found if entry.name[0] != ".")
    except OSError as error:
        raise _unreadable(error) from None
    folders = [folder / name for name, is_folder in entries if is_folder]
    return folders, any(_is_image(name) and not is_folder for name, is_folder in entries)


def _unreadable(error: OSError) -> DropleError:
    return DropleError(
        f"cannot read the folder {error.filename}: {error.strerror}. Give read permission or remove it."
    )
