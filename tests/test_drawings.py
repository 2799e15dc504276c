"""The demo's drawings: complete, readable, the same for a seed, and different from class to class."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drople.demo import drawings
from drople.errors import DropleError


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawings.draw(
        tmp_path_factory.mktemp("demo") / "a" / "set", train_per_class=6, test_per_class=4, size=48
    )


def test_every_split_has_every_class_and_count(drawn: Path) -> None:
    assert len(drawings.CLASSES) >= 12
    assert list(drawings.CLASSES) == sorted(set(drawings.CLASSES))
    assert sorted(path.name for path in drawn.iterdir()) == ["test", "train", "val"]
    for split, count in {"train": 6, "val": 2, "test": 4}.items():
        assert sorted(path.name for path in (drawn / split).iterdir()) == list(drawings.CLASSES)
        for name in drawings.CLASSES:
            assert len(list((drawn / split / name).iterdir())) == count
    assert [path.name for path in drawn.parent.iterdir()] == ["set"], "the temporary folder was left behind"


def test_every_image_opens_and_none_is_empty_or_repeated(drawn: Path) -> None:
    files = contents(drawn)
    assert len(set(files.values())) == len(files)
    for path in drawn.rglob("*.jpg"):
        with Image.open(path) as image:
            pixels = np.asarray(image)
        assert pixels.shape == (48, 48, 3)
        assert np.ptp(pixels.astype(int)) > 60, f"nothing is drawn in {path}"


def test_same_seed_same_bytes_and_more_images_keep_the_first(drawn: Path, tmp_path: Path) -> None:
    first = contents(drawn)
    again = contents(drawings.draw(tmp_path / "again", train_per_class=6, test_per_class=4, size=48))
    assert first == again
    fewer = contents(drawings.draw(tmp_path / "fewer", train_per_class=3, test_per_class=2, size=48))
    assert fewer.items() <= first.items()
    other = contents(drawings.draw(tmp_path / "other", seed=1, train_per_class=3, test_per_class=2, size=48))
    assert not set(other.values()) & set(first.values())


def test_classes_differ_in_what_is_drawn() -> None:
    """On blank paper, with one hand and one place, the ink of any two classes lies elsewhere."""

    def figure(name: str) -> np.ndarray:
        image = Image.new("RGB", (96, 96), "white")
        pen = drawings.Pen(image, np.random.default_rng(3), 42.0, np.array([48.0, 48.0]), (255, 255, 255))
        drawings.FIGURES[name](pen)
        return np.asarray(image, dtype=float)

    images = np.stack([figure(name) for name in drawings.CLASSES])
    apart = np.abs(images[:, None] - images[None]).mean(axis=(2, 3, 4))
    assert apart[~np.eye(len(images), dtype=bool)].min() > 8


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DropleError, match="exists already"):
        drawings.draw(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        drawings.draw(tmp_path / "set", size=0)
    assert list(tmp_path.iterdir()) == []


def test_the_template_takes_a_class() -> None:
    assert drawings.TEMPLATE.format("clock") != drawings.TEMPLATE.format("house")
