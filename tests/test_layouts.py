"""Each benchmark dataset is read from a small tree in its true layout; the label files are real ones."""

import base64
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from drople.data import ImageData
from drople.data.catalog import find, imagenet_names
from drople.data.layouts import load_benchmark, locate, missing, resolve
from drople.data.matlab import read_mat
from drople.errors import DropleError

# Written by scipy.io.savemat (1.17), all but one compressed: 30 labels, ten of each of three classes;
# 10 and 4 annotations with the classes 1, 2, 1, 2, ...; two class names.
MATS = {
    "imagelabels.mat": (
        "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFN1biBOb3YgMTUgMTA6MTM6MjkgMjAyNgAA"
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAANAAAAHic42NgYIgAYjYg5gBi"
        "TgYIYIXyGYFYDkqD1OQkJqXmFDMwMMHE4YAJDpjhgIEBALAnA4A="
    ),
    "labels_double.mat": (
        "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFN1biBOb3YgMTUgMTA6MTM6MjkgMjAyNgAA"
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0OAAAAKAEAAAYAAAAIAAAABgAAAAAA"
        "AAAFAAAACAAAAAEAAAAeAAAAAQAAAAYAAABsYWJlbHMAAAkAAADwAAAAAAAAAAAA8D8AAAAAAADwPwAAAAAAAPA/AAAAAAAA8D8A"
        "AAAAAADwPwAAAAAAAPA/AAAAAAAA8D8AAAAAAADwPwAAAAAAAPA/AAAAAAAA8D8AAAAAAAAAQAAAAAAAAABAAAAAAAAAAEAAAAAA"
        "AAAAQAAAAAAAAABAAAAAAAAAAEAAAAAAAAAAQAAAAAAAAABAAAAAAAAAAEAAAAAAAAAAQAAAAAAAAAhAAAAAAAAACEAAAAAAAAAI"
        "QAAAAAAAAAhAAAAAAAAACEAAAAAAAAAIQAAAAAAAAAhAAAAAAAAACEAAAAAAAAAIQAAAAAAAAAhA"
    ),
    "cars_meta.mat": (
        "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFN1biBOb3YgMTUgMTA6MTM6MjkgMjAyNgAA"
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAAfAAAAHic42NgYHgBxGxAzAHE"
        "jAwQwIrEZ4LS3ECcnJNYXByfl5ibWgxWxwfEAUj6WbDol0IyVwDKd/RVcE/NSy1KzFHwKM3NTS1SCA4NUzAyMDBgINpcOTRzQfyg"
        "xFwFZ/0wBefEovR8hbDEPAXfzLzMMiBtZGBoxMAAAAaGGGM="
    ),
    "cars_train_annos.mat": (
        "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFN1biBOb3YgMTUgMTA6MTM6MjkgMjAyNgAA"
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAAzgAAAHic7ZLdCoJAEIVnxSIT"
        "pLfoLtT+9K43iTUqiloDheztm3KMhYRgY+5m4XCYZQ87fJwIALIIYIg+QnnQngHNCjUmD1HamLLW9ak0Fb3zP+9iVFGUzbZJWn+Q"
        "NynNKewuunolD0Zf9+gR5br/g57/O8F7PwVTx1zdkwt/5HxM5p5b7q7c9lS058bK+T25wMpNaI7xJLPz7Uj3wvd7T+9PvqnwZe3v"
        "XPiy9nchfFn7uxS+rP1dCV/W/q6FL2t/M+HL2t9c+HL2N4ktvk+rYFPD"
    ),
    "cars_test_annos_withlabels.mat": (
        "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFN1biBOb3YgMTUgMTA6MTM6MjkgMjAyNgAA"
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAAqgAAAHic42NgYPjBysDABqQ5"
        "gJiJAQJYoXxGIGaB0txAnJiXl1+SWJKZn1cMVccCV2cAxElJ+RXxFYYQuhJKVxhB+UYMyTmJxSCdaXmJualAmg+qD2Y/Jxb7YZgB"
        "7D5GBnUy9ZVg0cdNQB8LUKclE3n6yhnJcycj1J0OSPpYsOjjRNInAOUbAIGhXlZBOlR8NHwx3clEYfgajYYvTdOv8Wj40jT9miCF"
        "LwAqzC5n"
    ),
}


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), "teal").save(path, format="JPEG")


def pictures(folder: Path, count: int, pattern: str = "{:04}.jpg", start: int = 1) -> list[str]:
    names = [pattern.format(number) for number in range(start, start + count)]
    for name in names:
        picture(folder / name)
    return names


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")


def mat(path: Path, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(MATS[name or path.name]))


def sizes(data: ImageData) -> tuple[int, int, int]:
    return len(data.train), len(data.val), len(data.test)


def files(data: ImageData, split: str) -> list[str]:
    assert data.root is not None
    return [Path(str(each.image)).relative_to(data.root).as_posix() for each in data.split(split)]


def everything_once(data: ImageData) -> None:
    """No image is in two splits, and every one of them can be opened."""
    found = [str(each.image) for each in (*data.train, *data.val, *data.test)]
    assert len(found) == len(set(found))
    for path in found:
        with Image.open(path) as image:
            image.load()


def snapshot(root: Path) -> set[str]:
    return {path.as_posix() for path in root.rglob("*")}


def test_caltech101_is_drawn_half_a_fifth_and_the_rest(tmp_path: Path) -> None:
    images = tmp_path / "caltech-101" / "101_ObjectCategories"
    for name in (
        "BACKGROUND_Google",
        "Faces",
        "Faces_easy",
        "Motorbikes",
        "accordion",
        "airplanes",
        "sea_horse",
    ):
        pictures(images / name, 11, "image_{:04}.jpg")
    (images / "accordion" / "notes.txt").write_text("not an image")
    before = snapshot(tmp_path)
    data = load_benchmark("Caltech101", tmp_path)
    assert snapshot(tmp_path) == before
    assert data.classes == ("Faces", "Motorbikes", "accordion", "airplanes", "sea_horse")
    assert data.words == ("face", "motorbike", "accordion", "airplane", "sea horse")
    # 11 images: round(5.5) is 6 in Python, as in CoOp's files; round(2.2) is 2; 3 are left.
    assert sizes(data) == (30, 10, 15)
    assert set(Counter(each.label for each in data.train).values()) == {6}
    assert any("drawn with seed 0" in note for note in data.notes)
    everything_once(data)
    again, other = load_benchmark("caltech101", tmp_path), load_benchmark("caltech101", tmp_path, seed=1)
    assert again == data
    assert other.train != data.train


def test_a_split_file_decides(tmp_path: Path) -> None:
    folder = tmp_path / "caltech-101"
    for name in ("accordion", "airplanes"):
        pictures(folder / "101_ObjectCategories" / name, 4, "image_{:04}.jpg")
    split = {
        "train": [
            ["airplanes/image_0002.jpg", 1, "airplane"],
            ["accordion/image_0001.jpg", 0, "accordion_x"],
        ],
        "val": [["accordion/image_0003.jpg", 0, "accordion_x"]],
        "test": [["airplanes/image_0001.jpg", 1, "airplane"]],
    }
    (folder / "split_zhou_Caltech101.json").write_text(json.dumps(split))
    data = load_benchmark("caltech101", tmp_path)
    assert data.classes == ("accordion_x", "airplane")
    assert data.words == ("accordion x", "airplane")
    assert files(data, "train") == [
        "101_ObjectCategories/accordion/image_0001.jpg",
        "101_ObjectCategories/airplanes/image_0002.jpg",
    ]
    assert [each.label for each in data.train] == [0, 1]
    assert files(data, "val") == ["101_ObjectCategories/accordion/image_0003.jpg"]
    assert data.notes == ("split read from split_zhou_Caltech101.json",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "as JSON"),
        ('{"train": [], "val": []}', "'test' is missing"),
        ('{"train": [["a.jpg", 0]], "val": [], "test": []}', "not a split file"),
        ('{"train": [["a.jpg", 0, "x"], ["b.jpg", 0, "y"]], "val": [], "test": []}', "both 'x' and 'y'"),
        ('{"train": [["gone.jpg", 0, "x"]], "val": [], "test": []}', "1 images of DTD are not there"),
    ],
)
def test_a_bad_split_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    pictures(tmp_path / "dtd" / "images" / "banded", 2)
    (tmp_path / "dtd" / "split_zhou_DescribableTextures.json").write_text(content)
    with pytest.raises(DropleError, match=said):
        load_benchmark("dtd", tmp_path)


def test_labels_left_out_of_a_split_file_leave_no_gap(tmp_path: Path) -> None:
    pictures(tmp_path / "dtd" / "images" / "a", 2)
    pictures(tmp_path / "dtd" / "images" / "b", 2)
    split = {
        "train": [["b/0001.jpg", 7, "b"], ["a/0001.jpg", 3, "a"]],
        "val": [],
        "test": [["b/0002.jpg", 7, "b"]],
    }
    (tmp_path / "dtd" / "split_zhou_DescribableTextures.json").write_text(json.dumps(split))
    data = load_benchmark("dtd", tmp_path)
    assert data.classes == ("a", "b")
    assert [each.label for each in data.test] == [1]


def test_oxford_pets(tmp_path: Path) -> None:
    folder = tmp_path / "oxford_pets"
    cats = pictures(folder / "images", 15, "Abyssinian_{}.jpg")
    dogs = pictures(folder / "images", 15, "american_bulldog_{}.jpg")
    (folder / "images" / "Abyssinian_1.mat").write_bytes(b"stray, as in the publisher's archive")
    rows = [(name, 1, 1) for name in cats] + [(name, 2, 2) for name in dogs]
    lines = [f"{name[:-4]} {label} {species} 1" for name, label, species in rows]
    write(folder / "annotations" / "trainval.txt", *lines[:10], *lines[15:25])
    write(folder / "annotations" / "test.txt", *lines[10:15], *lines[25:])
    data = load_benchmark("OxfordPets", tmp_path)
    assert data.classes == ("abyssinian", "american_bulldog")
    assert data.words == ("abyssinian", "american bulldog")
    assert sizes(data) == (16, 4, 10)
    assert files(data, "test")[:2] == ["images/Abyssinian_11.jpg", "images/Abyssinian_12.jpg"]
    assert any("official test set" in note for note in data.notes)
    everything_once(data)


def test_stanford_cars_from_the_devkit(tmp_path: Path) -> None:
    folder = tmp_path / "stanford_cars"
    pictures(folder / "cars_train", 10, "{:05}.jpg")
    pictures(folder / "cars_test", 4, "{:05}.jpg")
    mat(folder / "devkit" / "cars_meta.mat")
    mat(folder / "devkit" / "cars_train_annos.mat")
    mat(folder / "cars_test_annos_withlabels.mat")
    data = load_benchmark("StanfordCars", tmp_path)
    assert data.words == ("2000 AM General Hummer SUV", "2012 Ram C/V Cargo Van Minivan")
    assert sizes(data) == (8, 2, 4)
    assert files(data, "test") == [f"cars_test/0000{number}.jpg" for number in (1, 3, 2, 4)]
    assert [each.label for each in data.test] == [0, 0, 1, 1]
    everything_once(data)


def test_stanford_cars_from_its_split_file(tmp_path: Path) -> None:
    folder = tmp_path / "stanford_cars"
    pictures(folder / "cars_train", 2, "{:05}.jpg")
    pictures(folder / "cars_test", 1, "{:05}.jpg")
    rows = {
        "train": [["cars_train/00001.jpg", 0, "2000 AM General Hummer SUV"]],
        "val": [["cars_train/00002.jpg", 1, "2012 Acura RL Sedan"]],
        "test": [["cars_test/00001.jpg", 0, "2000 AM General Hummer SUV"]],
    }
    (folder / "split_zhou_StanfordCars.json").write_text(json.dumps(rows))
    data = load_benchmark("cars", tmp_path)
    assert sizes(data) == (1, 1, 1)
    everything_once(data)


def test_stanford_cars_without_labels_says_what_is_needed(tmp_path: Path) -> None:
    pictures(tmp_path / "stanford_cars" / "cars_train", 1, "{:05}.jpg")
    with pytest.raises(
        DropleError, match=r"cars_meta\.mat, which is not there\. split_zhou_StanfordCars\.json"
    ):
        load_benchmark("stanford_cars", tmp_path)


@pytest.mark.parametrize("named", [True, False])
def test_oxford_flowers(tmp_path: Path, named: bool) -> None:
    folder = tmp_path / "oxford_flowers"
    pictures(folder / "jpg", 30, "image_{:05}.jpg")
    mat(folder / "imagelabels.mat")
    if named:
        (folder / "cat_to_name.json").write_text('{"3": "bells", "1": "pink primrose", "2": "orchid"}')
    data = load_benchmark("Flowers102", tmp_path)
    last = ("orchid", "bells") if named else ("hard-leaved pocket orchid", "canterbury bells")
    assert data.classes == data.words == ("pink primrose", *last)
    assert sizes(data) == (15, 6, 9)
    for each in (*data.train, *data.val, *data.test):
        assert each.label == (int(Path(str(each.image)).stem[-5:]) - 1) // 10
    everything_once(data)


def test_food101(tmp_path: Path) -> None:
    for name in ("apple_pie", "baby_back_ribs"):
        pictures(tmp_path / "food-101" / "images" / name, 10, "{:06}.jpg")
    write(tmp_path / "food-101" / "meta" / "classes.txt", "apple_pie", "baby_back_ribs")
    data = load_benchmark("Food101", tmp_path)
    assert data.words == ("apple pie", "baby back ribs")
    assert sizes(data) == (10, 4, 6)
    everything_once(data)


@pytest.mark.parametrize("inner", ["", "data", "fgvc-aircraft-2013b/data"])
def test_fgvc_aircraft_has_official_splits(tmp_path: Path, inner: str) -> None:
    folder = tmp_path / "fgvc_aircraft" / inner
    pictures(folder / "images", 6, "{:07}.jpg")
    write(folder / "variants.txt", "737-800", "F/A-18")
    for number, split in enumerate(("train", "val", "test")):
        lines = (f"{2 * number + 1:07} F/A-18", f"{2 * number + 2:07} 737-800")
        write(folder / f"images_variant_{split}.txt", *lines)
    data = load_benchmark("FGVCAircraft", tmp_path)
    assert data.words == ("737-800", "F/A-18")
    assert files(data, "val") == ["images/0000004.jpg", "images/0000003.jpg"]
    assert sizes(data) == (2, 2, 2)
    everything_once(data)


def test_sun397_from_the_partitions(tmp_path: Path) -> None:
    folder = tmp_path / "sun397"
    classes = ("/a/airplane_cabin", "/c/church/indoor")
    write(folder / "ClassName.txt", *classes)
    listed = [f"{name}/sun_{number}.jpg" for name in classes for number in range(15)]
    for name in listed:
        picture(folder / "SUN397" / name.strip("/"))
    write(folder / "Training_01.txt", *listed[:10], *listed[15:25])
    write(folder / "Testing_01.txt", *listed[10:15], *listed[25:])
    data = load_benchmark("SUN397", tmp_path)
    assert data.words == ("airplane cabin", "indoor church")
    assert sizes(data) == (16, 4, 10)
    everything_once(data)
    (folder / "Testing_01.txt").unlink()
    with pytest.raises(DropleError, match=r"Testing_01\.txt, which is not there"):
        load_benchmark("SUN397", tmp_path)


def test_dtd_and_eurosat_words(tmp_path: Path) -> None:
    for name in ("banded", "polka-dotted"):
        pictures(tmp_path / "dtd" / "images" / name, 10, name + "_{:04}.jpg")
    for name in ("AnnualCrop", "SeaLake", "Highway"):
        pictures(tmp_path / "eurosat" / "2750" / name, 10, name + "_{}.jpg")
    assert load_benchmark("DTD", tmp_path).words == ("banded", "polka-dotted")
    eurosat = load_benchmark("EuroSAT", tmp_path)
    assert eurosat.words == ("Annual Crop Land", "Highway or Road", "Sea or Lake")
    assert sizes(eurosat) == (15, 6, 9)


def test_ucf101_from_the_official_lists(tmp_path: Path) -> None:
    folder = tmp_path / "ucf101"
    write(folder / "ucfTrainTestlist" / "classInd.txt", "1 ApplyEyeMakeup", "2 YoYo")
    train, test = [], []
    for label, (name, place) in enumerate((("ApplyEyeMakeup", "Apply_Eye_Makeup"), ("YoYo", "Yo_Yo")), 1):
        for number in range(15):
            video = f"v_{name}_g{number:02}_c01"
            picture(folder / "UCF-101-midframes" / place / f"{video}.jpg")
            if number < 5:
                test.append(f"{name}/{video}.avi")
            else:
                train.append(f"{name}/{video}.avi {label}")
    write(folder / "ucfTrainTestlist" / "trainlist01.txt", *train)
    write(folder / "ucfTrainTestlist" / "testlist01.txt", *test)
    data = load_benchmark("UCF101", tmp_path)
    assert data.words == ("Apply Eye Makeup", "Yo Yo")
    assert sizes(data) == (16, 4, 10)
    everything_once(data)


def test_damaged_lists_are_an_error_that_names_them(tmp_path: Path) -> None:
    folder = tmp_path / "fgvc_aircraft"
    pictures(folder / "images", 1, "{:07}.jpg")
    write(folder / "variants.txt", "737-800")
    for split in ("train", "val", "test"):
        write(folder / f"images_variant_{split}.txt", "0000001 Concorde")
    with pytest.raises(DropleError, match=r"label files of FGVCAircraft .* do not fit together"):
        load_benchmark("fgvc_aircraft", tmp_path)


TENCH, GOLDFISH, PAPER = "n01440764", "n01443537", "n15075141"


@pytest.mark.parametrize("images", ["images", "."])
def test_imagenet_tests_on_val_and_validates_on_train(tmp_path: Path, images: str) -> None:
    folder = tmp_path / "imagenet" / images
    for name in (TENCH, GOLDFISH, PAPER):
        pictures(folder / "train" / name, 10, name + "_{}.JPEG")
        pictures(folder / "val" / name, 2, "ILSVRC2012_val_" + name[-3:] + "{:08}.JPEG")
    data = load_benchmark("ImageNet", tmp_path)
    assert data.classes == (TENCH, GOLDFISH, PAPER)
    assert data.words == ("tench", "goldfish", "toilet paper")
    assert sizes(data) == (24, 6, 6)
    assert all("/train/" in str(each.image) for each in (*data.train, *data.val))
    assert all("/val/" in str(each.image) for each in data.test)
    everything_once(data)
    write(
        tmp_path / "imagenet" / "classnames.txt",
        f"{TENCH} fish one",
        f"{GOLDFISH} fish two",
        f"{PAPER} paper",
    )
    assert load_benchmark("imagenet", tmp_path).words == ("fish one", "fish two", "paper")


def test_imagenet_val_not_in_class_folders(tmp_path: Path) -> None:
    pictures(tmp_path / "imagenet" / "images" / "val", 3, "ILSVRC2012_val_{:08}.JPEG")
    with pytest.raises(DropleError, match="no class folders such as train/n01440764"):
        load_benchmark("imagenet", tmp_path)


def test_imagenetv2_numbers_its_classes(tmp_path: Path) -> None:
    folder = tmp_path / "imagenetv2" / "imagenetv2-matched-frequency-format-val"
    for number in (0, 2, 10, 999):
        pictures(folder / str(number), 2, "hash{}.jpeg")
    data = load_benchmark("ImageNet-V2", tmp_path)
    assert data.words == ("tench", "great white shark", "brambling", "toilet paper")
    assert [Path(str(each.image)).parent.name for each in data.test] == [
        "0",
        "0",
        "2",
        "2",
        "10",
        "10",
        "999",
        "999",
    ]
    assert [each.label for each in data.test] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not data.train and not data.val
    assert "no training part" in data.notes[0]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("ImageNet-Sketch", "imagenet-sketch/images"),
        ("ImageNet-A", "imagenet-adversarial/imagenet-a"),
        ("ImageNet-R", "imagenet-rendition/imagenet-r"),
    ],
)
def test_imagenet_variants_use_the_classes_present(tmp_path: Path, name: str, folder: str) -> None:
    for wnid in (GOLDFISH, PAPER):
        pictures(tmp_path / folder / wnid, 3, "sketch_{}.JPEG")
    (tmp_path / folder / "README.txt").write_text("as in the archives of -A and -R")
    data = load_benchmark(name, tmp_path)
    assert data.classes == (GOLDFISH, PAPER)
    assert data.words == (imagenet_names()[GOLDFISH], imagenet_names()[PAPER])
    assert sizes(data) == (0, 0, 6)
    pictures(tmp_path / folder / "n99999999", 1)
    with pytest.raises(DropleError, match="no classes of ImageNet: n99999999"):
        load_benchmark(name, tmp_path)


def test_a_dataset_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DropleError, match=r"ImageNet is not under .*image-net\.org.*Register"):
        load_benchmark("imagenet", tmp_path)


def pack(root: Path, name: str, splits: tuple[str, ...]) -> Path:
    for split in splits:
        for each in ("dog", "old house"):
            pictures(root / name / split / each, 6)
    return root / name


def test_packs_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    folder = pack(tmp_path, "oxford_pets", ("train", "val", "test"))
    data, template = resolve("OxfordPets", tmp_path)
    assert (sizes(data), data.words) == ((12, 12, 12), ("dog", "old house"))
    assert template == "a photo of a {}, a type of pet."
    assert locate("oxford_pets", tmp_path) == (folder, "pack")
    by_path, template = resolve(folder, tmp_path / "elsewhere")
    assert by_path == data
    assert template == "a photo of a {}, a type of pet."


def test_pacs_keeps_its_four_tests(tmp_path: Path) -> None:
    tests = ("test_photo", "test_art_painting", "test_cartoon", "test_sketch")
    pack(tmp_path, "pacs", ("train", "val", *tests))
    data, _ = resolve("pacs", tmp_path)
    assert set(data.extra) == set(tests)
    assert not data.test


def test_resolve_reads_a_path_and_a_table(tmp_path: Path) -> None:
    folder = pack(tmp_path, "mine", ("train", "test"))
    data, template = resolve(str(folder), tmp_path)
    assert (len(data.test), template) == (12, "a photo of a {}.")
    write(
        tmp_path / "table.csv",
        "path,label",
        "mine/train/dog/0001.jpg,dog",
        "mine/train/old house/0001.jpg,house",
    )
    assert resolve(tmp_path / "table.csv", tmp_path)[0].classes == ("dog", "house")


def test_resolve_reads_a_benchmark_folder_by_its_path(tmp_path: Path) -> None:
    for name in ("banded", "dotted"):
        pictures(tmp_path / "dtd" / "images" / name, 10)
        write(tmp_path / "dtd" / "labels" / "train1.txt", "banded/0001.jpg")
    data, template = resolve(tmp_path / "dtd", tmp_path / "elsewhere")
    assert (data.classes, template) == (("banded", "dotted"), "{} texture.")


def test_resolve_suggests_near_names(tmp_path: Path) -> None:
    with pytest.raises(DropleError, match="did you mean eurosat"):
        resolve("eurosta", tmp_path)
    with pytest.raises(DropleError, match="there is no folder or table at"):
        resolve(tmp_path / "nowhere", tmp_path)


def test_the_real_packs_are_read(shared: Path, tmp_path: Path) -> None:
    with tarfile.open(shared / "data" / "dtd10.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    data, template = resolve("dtd10", tmp_path)
    assert (len(data.classes), sizes(data), template) == (10, find("dtd10").counts, "{} texture.")


def test_missing_names_each_file_once(tmp_path: Path) -> None:
    pictures(tmp_path / "a", 2)
    paths = [tmp_path / "a" / "0001.jpg", tmp_path / "a" / "0009.jpg", tmp_path / "b" / "0001.jpg"]
    assert missing(paths * 2) == paths[1:]


def test_mat_files(tmp_path: Path) -> None:
    path = tmp_path / "imagelabels.mat"
    mat(path)
    assert read_mat(path)["labels"].tolist() == [1] * 10 + [2] * 10 + [3] * 10
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:150], b"<html>" * 40, whole[:140] + b"\xff" * 40):
        path.write_bytes(damaged)
        with pytest.raises(DropleError, match="as a MATLAB 5 file"):
            read_mat(path)


def test_uncompressed_mat_files_of_doubles(tmp_path: Path) -> None:
    path = tmp_path / "labels.mat"
    mat(path, "labels_double.mat")
    assert read_mat(path)["labels"].tolist() == [1.0] * 10 + [2.0] * 10 + [3.0] * 10
