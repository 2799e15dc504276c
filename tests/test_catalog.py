"""The catalog's facts hang together; names are found as people write them; a copy is checked for real."""

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from drople.data.catalog import BENCHMARK, DATASETS, Dataset, find, flower_names, imagenet_names, steps
from drople.data.check import check, overview
from drople.data.layouts import EUROSAT_WORDS, READERS
from drople.errors import DropleError
from drople.templates import read_template

# As the paper writes them.
PAPER = (
    *("ImageNet", "Caltech101", "OxfordPets", "StanfordCars", "Flowers102", "Food101", "FGVCAircraft"),
    *("SUN397", "DTD", "EuroSAT", "UCF101", "ImageNet-V2", "ImageNet-Sketch", "ImageNet-A", "ImageNet-R"),
)


def test_the_papers_fifteen_are_there_in_order() -> None:
    assert tuple(each.title for each in BENCHMARK) == PAPER
    assert [find(title) for title in PAPER] == list(BENCHMARK)
    assert set(READERS) == {each.name for each in BENCHMARK}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("imagenet-v2", "imagenetv2"),
        ("ImageNetV2", "imagenetv2"),
        ("imagenet_v2", "imagenetv2"),
        ("imagenet-sketch", "imagenet_sketch"),
        ("flowers-102", "oxford_flowers"),
        ("OxfordFlowers", "oxford_flowers"),
        ("oxford_pets", "oxford_pets"),
        ("caltech-101", "caltech101"),
        ("food-101", "food101"),
        ("PACS", "pacs"),
        ("dtd10", "dtd10"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert find(written).name == name


def test_no_spelling_means_two_datasets() -> None:
    for entry in DATASETS:
        for spelling in (entry.name, entry.title, entry.folder, *entry.aliases):
            assert find(spelling) is entry, spelling


def test_an_unknown_name_gets_suggestions() -> None:
    with pytest.raises(DropleError, match=r"did you mean .*oxford_pets"):
        find("oxfrd_pets")


@pytest.mark.parametrize("entry", DATASETS, ids=lambda entry: entry.name)
def test_an_entry_is_complete(entry: Dataset) -> None:
    assert len(read_template(entry.template)) == 1
    assert entry.licence and entry.domain and urlsplit(entry.page).scheme == "https"
    assert entry.fetchable or entry.manual
    assert sum(entry.counts) >= entry.classes
    for file in entry.files:
        assert file.gives and file.urls
        assert all(urlsplit(url).scheme in ("http", "https") for url in file.urls)
        assert file.md5 is None or re.fullmatch("[0-9a-f]{32}", file.md5)
        # Built on a machine without internet: no address may claim to have been tried.
        assert not file.tried
    if entry.fetchable:
        given = {path for file in entry.files if not file.optional for path in file.gives}
        folders = {need for need in entry.needs if "." not in need}
        assert folders <= given, "what `get` brings is not what the loader needs"


def test_split_sizes_add_up_to_the_whole_sets() -> None:
    # The sizes that the publishers state, without the classes CoOp leaves out.
    wholes = {
        "caltech101": 9144 - 467 - 435,
        "oxford_pets": 7349,
        "stanford_cars": 16185,
        "oxford_flowers": 8189,
        "food101": 101_000,
        "fgvc_aircraft": 10_000,
        "sun397": 397 * 100,
        "dtd": 47 * 120,
        "eurosat": 27_000,
        "ucf101": 13_320,
        "imagenet": 1_281_167 + 50_000,
    }
    for name, whole in wholes.items():
        assert sum(find(name).counts) == whole, name


def test_imagenets_names() -> None:
    names = imagenet_names()
    assert len(names) == 1000
    assert list(names) == sorted(names)
    assert all(re.fullmatch(r"n\d{8}", wnid) for wnid in names)
    # Where WordNet's own first words mislead a text encoder, OpenAI's do not.
    assert names["n02012849"] == "crane bird" and names["n03126707"] == "construction crane"
    assert names["n01440764"] == "tench" and names["n15075141"] == "toilet paper"
    assert len(set(names.values())) == 998


def test_flower_names() -> None:
    assert list(flower_names()) == [str(number) for number in range(1, 103)]
    assert len(set(flower_names().values())) == 102


def test_the_names_say_where_they_come_from() -> None:
    for name in ("imagenet_classes.txt", "flowers102_classes.txt"):
        text = (Path(check.__code__.co_filename).parent / name).read_text("utf-8")
        assert "openai/CLIP" in text and "Copyright (c) 2021 OpenAI" in text


def test_steps_name_every_address(tmp_path: Path) -> None:
    for entry in DATASETS:
        text = "\n".join(steps(entry, tmp_path))
        assert entry.page in text
        assert all(file.urls[0] in text for file in entry.files)


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), "teal").save(path, format="JPEG")


def eurosat(root: Path) -> Path:
    """Ten classes of ten images, with a split file."""
    folder = root / "eurosat"
    split: dict[str, list[list[object]]] = {"train": [], "val": [], "test": []}
    for label, (name, words) in enumerate(EUROSAT_WORDS.items()):
        for number in range(10):
            file = f"{name}/{name}_{number}.jpg"
            picture(folder / "2750" / file)
            part = "train" if number < 5 else "val" if number < 7 else "test"
            split[part].append([file, label, words])
    (folder / "split_zhou_EuroSAT.json").write_text(json.dumps(split))
    return folder


# EuroSAT's entry, expecting as many images as the small tree has.
SMALL = replace(find("eurosat"), counts=(50, 20, 30))


def test_a_whole_copy(tmp_path: Path) -> None:
    eurosat(tmp_path)
    seen: list[tuple[int, int]] = []
    report = check(SMALL, tmp_path, deep=True, progress=lambda *each: seen.append(each))
    assert report.ok, report.problems
    assert report.splits == {"train": (50, 50), "val": (20, 20), "test": (30, 30)}
    assert report.classes == (10, 10)
    assert seen[-1] == (100, 100)
    assert report.lines()[-1] == "whole"


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder = eurosat(tmp_path)
    gone, empty, text, cut = (folder / "2750" / "River" / f"River_{number}.jpg" for number in range(4))
    Image.effect_noise((64, 64), 90).save(cut, format="JPEG")
    gone.unlink()
    empty.write_bytes(b"")
    text.write_text("<html>")
    cut.write_bytes(cut.read_bytes()[:-1000])
    report = check(SMALL, tmp_path)
    assert report.missing == (gone,)
    assert {path for path, _ in report.undecodable} == {empty, text}
    assert not report.ok
    assert any(str(gone) in line for line in report.lines())
    assert any("github.com/phelber/EuroSAT" in line for line in report.lines())
    deep = check(SMALL, tmp_path, deep=True)
    assert {path for path, _ in deep.undecodable} == {empty, text, cut}


def test_wrong_counts_and_class_names(tmp_path: Path) -> None:
    folder = eurosat(tmp_path)
    path = folder / "split_zhou_EuroSAT.json"
    split = json.loads(path.read_text())
    split["train"] = [row if row[1] != 3 else [row[0], 3, "Autobahn"] for row in split["train"]][:-5]
    split["val"] = [row for row in split["val"] if row[1] != 3]
    split["test"] = [row for row in split["test"] if row[1] != 3]
    path.write_text(json.dumps(split))
    problems = " ".join(check(find("eurosat"), tmp_path).problems)
    assert "train has 45 images instead of 13,500" in problems
    assert "class names are not those of EuroSAT: Autobahn" in problems
    assert "train has no images of 1 classes: Sea or Lake" in problems


def test_nothing_there(tmp_path: Path) -> None:
    report = check("imagenet", tmp_path)
    assert report.folder is None and not report.ok
    assert "image-net.org" in report.lines()[-2]


def test_an_unreadable_split_file_is_a_problem_not_an_error(tmp_path: Path) -> None:
    (eurosat(tmp_path) / "split_zhou_EuroSAT.json").write_text("{")
    report = check("eurosat", tmp_path)
    assert not report.ok and "as JSON" in report.problems[0]


def test_without_a_split_file_the_note_says_so(tmp_path: Path) -> None:
    (eurosat(tmp_path) / "split_zhou_EuroSAT.json").unlink()
    report = check(SMALL, tmp_path)
    assert report.ok
    assert any("drawn" in line for line in report.lines())


def test_overview(tmp_path: Path) -> None:
    folder = eurosat(tmp_path)
    rows = {row["name"]: row for row in overview(tmp_path)}
    assert rows["eurosat"]["found"] == str(folder)
    assert rows["dtd"]["found"] == ""
    assert rows["dtd"]["get"] == "download, address untried"
    assert rows["imagenet"]["get"] == "by hand"
    assert len(rows) == 17


@pytest.mark.parametrize("name", ["eurosat", "pacs"])
def test_the_real_packs_are_whole(shared: Path, tmp_path: Path, name: str) -> None:
    with tarfile.open(shared / "data" / f"{name}.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    report = check(name, tmp_path)
    assert report.ok, report.problems
    assert report.layout == "pack"
