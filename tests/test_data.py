"""Folders, tables and lists become labelled images; wrong ones become errors that say what to do."""

import builtins
import json
import os
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drople.data import (
    Example,
    ImageData,
    base_novel,
    by_label,
    decode,
    few_shot,
    load_data,
    long_tail,
    shortfall,
    tidy,
)
from drople.errors import DropleError


def put(root: Path, *names: str) -> None:
    """Small real images at these places."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), "teal").save(path, format="PNG")


def flat(root: Path, **counts: int) -> Path:
    for name, count in counts.items():
        put(root, *(f"{name}/{number:02}.png" for number in range(count)))
    return root


def files(data: ImageData, split: str) -> list[str]:
    assert data.root is not None
    return [Path(str(example.image)).relative_to(data.root).as_posix() for example in data.split(split)]


# ---- folders


def test_splits_in_folders(tmp_path: Path) -> None:
    put(tmp_path, *(f"train/{name}/{i}.jpg" for name in ("Cat", "Dog") for i in range(6)))
    put(
        tmp_path,
        "Validation/Cat/v.PNG",
        "Validation/Dog/v.jpeg",
        "test/Dog/deep/deeper/t.jpg",
        "test/Cat/t.jpg",
    )
    put(tmp_path, "test_sketch/Dog/s.webp", "test/Cat/.hidden.jpg", "test/.cache/x.jpg", ".git/train/x.jpg")
    (tmp_path / "train/Cat/notes.txt").write_text("not an image")
    data = load_data(tmp_path)
    assert data.classes == ("Cat", "Dog") and data.words == ("cat", "dog")
    assert [len(data.split(name)) for name in ("train", "val", "test", "test_sketch")] == [12, 2, 2, 1]
    assert files(data, "test") == ["test/Cat/t.jpg", "test/Dog/deep/deeper/t.jpg"]
    assert data.extra["test_sketch"][0].label == 1
    assert [example.label for example in data.train] == [0] * 6 + [1] * 6
    assert data.root == tmp_path and data.notes == ()
    with pytest.raises(DropleError, match="train, val, test, test_sketch"):
        data.split("test_art")


@pytest.mark.parametrize("name", ["val", "valid", "validation", "VAL"])
def test_names_of_the_validation_part(tmp_path: Path, name: str) -> None:
    put(tmp_path, "train/a/1.png", "train/b/1.png", f"{name}/a/2.png")
    assert files(load_data(tmp_path), "val") == [f"{name}/a/2.png"]


def test_flat_folder_holds_out_a_fifth_of_each_class(tmp_path: Path) -> None:
    data = load_data(flat(tmp_path, ant=20, bee=2, cow=1, dog=7))
    assert Counter(e.label for e in data.train) == {0: 16, 1: 1, 2: 1, 3: 6}
    assert Counter(e.label for e in data.val) == {0: 4, 1: 1, 3: 1}
    assert not set(data.train) & set(data.val) and data.test == ()
    assert len(set(data.train) | set(data.val)) == 30
    assert any("no validation part: 20% of train held out" in note for note in data.notes)
    assert "class 'bee' has only 2 training images" in data.notes
    assert "class 'cow' has only 1 training image" in data.notes
    assert load_data(tmp_path) == data
    assert load_data(tmp_path, seed=1).val != data.val
    with pytest.raises(DropleError, match="has no 'test' split; it has train, val"):
        data.split("test")

    flat(tmp_path, zebra=9, aardvark=9)
    again = load_data(tmp_path)
    assert set(files(data, "val")) <= set(files(again, "val")), "another class moved the held-out images"


def test_many_small_classes_are_counted_not_listed(tmp_path: Path) -> None:
    notes = load_data(flat(tmp_path, **{f"c{i}": 1 for i in range(9)})).notes
    assert sum("training image" in note for note in notes) == 4
    assert any("6 more classes" in note for note in notes)


def test_classes_called_train_and_test(tmp_path: Path) -> None:
    data = load_data(flat(tmp_path, car=3, train=3, test=2))
    assert data.classes == ("car", "test", "train") and data.test == ()


def test_folders_that_are_no_split(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.png", "train/b/1.png", "labels/a/1.png")
    (tmp_path / "val").mkdir()
    data = load_data(tmp_path)
    assert data.classes == ("a", "b") and any("labels" in note for note in data.notes)


def test_test_only(tmp_path: Path) -> None:
    put(tmp_path, "test/a/1.png", "test/b/1.png")
    data = load_data(tmp_path)
    assert len(data.test) == 2 and data.train == data.val == ()
    assert any("no training part" in note for note in data.notes)


def test_class_missing_from_train(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.png", "train/b/1.png", "test/c/1.png")
    data = load_data(tmp_path)
    assert data.classes == ("a", "b", "c") and "class 'c' has only 0 training images" in data.notes


def test_unicode_names(tmp_path: Path) -> None:
    put(tmp_path, "train/Café/ñ.png", "train/犬/写真.png", "test/Cafe\u0301/1.png")
    data = load_data(tmp_path)
    assert data.classes == ("Café", "犬") and data.words == ("café", "犬")
    assert data.test[0].label == 0, "a composed and a decomposed accent are one class"
    os.makedirs(os.fsencode(tmp_path) + b"/train/caf\xe9")
    Image.new("RGB", (2, 2)).save(os.fsdecode(os.fsencode(tmp_path) + b"/train/caf\xe9/1.png"))
    for name in load_data(tmp_path).classes:
        name.encode("utf-8")


def test_link_loops_and_links_to_other_folders(tmp_path: Path) -> None:
    root = flat(tmp_path / "data", a=2, b=2)
    put(tmp_path / "elsewhere", "x.png")
    (root / "a/up").symlink_to(root)
    (root / "a/self").symlink_to(root / "a")
    (root / "a/more").symlink_to(tmp_path / "elsewhere")
    (root / "a/nowhere").symlink_to(root / "a/nowhere")
    (root / "a/gone.png").symlink_to(root / "gone")
    data = load_data(root, seed=3)
    found = sorted(Path(str(e.image)).name for e in (*data.train, *data.val) if e.label == 0)
    assert found == ["00.png", "01.png", "gone.png", "x.png"]
    (root / "c").symlink_to(root)
    assert load_data(root).classes == ("a", "b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
@pytest.mark.parametrize("locked", ["", "a", "a/deep"])
def test_unreadable_folder(tmp_path: Path, locked: str) -> None:
    put(tmp_path, "a/deep/1.png", "b/1.png")
    (tmp_path / locked).chmod(0)
    try:
        with pytest.raises(DropleError, match="cannot read the folder"):
            load_data(tmp_path)
    finally:
        (tmp_path / locked).chmod(0o700)


def test_folder_that_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a locked folder gives, for testers who are root: the listing itself fails."""
    put(tmp_path, "a/deep/1.png", "b/1.png")
    listing = os.scandir

    def refuse(path):  # type: ignore[no-untyped-def]
        if os.path.basename(path) == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DropleError, match=r"cannot read the folder .*deep: Permission denied"):
        load_data(tmp_path)


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(DropleError, match=r"no folder or table at .*nowhere"):
        load_data(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DropleError, match="no images and no class folders"):
        load_data(tmp_path / "empty")
    put(tmp_path / "loose", "1.jpg", "2.jpg")
    with pytest.raises(DropleError, match=r"images directly inside.*CLASS/image.jpg"):
        load_data(tmp_path / "loose")
    (tmp_path / "hollow/a").mkdir(parents=True)
    (tmp_path / "hollow/b").mkdir()
    with pytest.raises(DropleError, match="no images found"):
        load_data(str(tmp_path / "hollow"))
    with pytest.raises(DropleError, match=r"only one class, 'solo'.*needs two"):
        load_data(flat(tmp_path / "one", solo=3))
    put(tmp_path / "unsorted", "train/1.jpg", "test/2.jpg")
    with pytest.raises(DropleError, match=r"test should hold class folders"):
        load_data(tmp_path / "unsorted")
    (tmp_path / "data.txt").write_text("hello")
    with pytest.raises(DropleError, match=r"neither a folder nor a \.csv"):
        load_data(tmp_path / "data.txt")


# ---- tables


def test_csv(tmp_path: Path) -> None:
    put(tmp_path, "pics/a.png", "pics/b, or c.png", "pics/d.png", "pics/e.png")
    table = tmp_path / "table.csv"
    table.write_text(
        "\ufefffilename,Category,split,other\n"
        "pics/a.png,AnnualCrop,train,1\n"
        '"pics/b, or c.png",Forêt,train,2\n'
        "\n"
        f"{tmp_path}/pics/d.png,Forêt,validation,\n"
        "pics/e.png,AnnualCrop,test_sketch,4\n",
        encoding="utf-8",
    )
    data = load_data(table)
    assert data.classes == ("AnnualCrop", "Forêt") and data.words == ("annual crop", "forêt")
    assert files(data, "train") == ["pics/a.png", "pics/b, or c.png"]
    assert files(data, "val") == ["pics/d.png"] and files(data, "test_sketch") == ["pics/e.png"]
    assert decode([e.image for e in data.train], 4, 3)[0].shape == (2, 3, 4, 4)

    table.write_text("path;label\npics/a.png;x\npics/d.png;y\n")
    assert load_data(table).classes == ("x", "y")


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    put(tmp_path, *(f"{i}.png" for i in range(12)))
    columns = {"image": [f"{i}.png" for i in range(12)], "class": list(range(12))}
    parquet.write_table(pa.table(columns), tmp_path / "table.parquet")
    data = load_data(tmp_path / "table.parquet")
    assert data.classes == tuple(str(i) for i in range(12)), "numbers sort as numbers"
    assert any("say nothing to a text encoder" in note for note in data.notes)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DropleError, match="as Parquet"):
        load_data(tmp_path / "broken.parquet")
    parquet.write_table(pa.table({"image": [{"bytes": b"x"}], "label": [1]}), tmp_path / "bytes.parquet")
    with pytest.raises(DropleError, match="needs a file path and a class, but has a dict and 1"):
        load_data(tmp_path / "bytes.parquet")

    real_import = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):  # type: ignore[no-untyped-def]
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DropleError, match="pip install pyarrow"):
        load_data(tmp_path / "table.parquet")


@pytest.mark.parametrize(
    "content, message",
    [
        (
            "picture,label\na.png,x\n",
            r"no column for the image file: call it path or .*It has picture, label",
        ),
        ("path,kind\na.png,x\n", r"no column for the class: .*It has path, kind"),
        ("", "It has no columns"),
        ("path,label\n", "has no images"),
        ("path,label\na.png,x\na.png,\n", r"row 3 of .* but has 'a.png' and ''"),
        ("path,label\na.png,x\na.png,  \n", r"row 3 of .* but has 'a.png' and '  '"),
        ("path,label\n  ,x\n", r"row 2 of .* but has '  ' and 'x'"),
        ("path,label\na.png\n", "and None"),
        ("path,label,split\na.png,x,holdout\n", "the split 'holdout': it may be train, val, test"),
        ("path,label\na.png,x\na.png,x\n", "only one class, 'x'"),
        (
            "path,label\na.png,x\n1.png,x\n2.png,x\n3.png,y\n4.png,y\n",
            r"4 of 5 image files .*1.png.*2.png.*3.png and 1 more",
        ),
    ],
)
def test_wrong_tables(tmp_path: Path, content: str, message: str) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DropleError, match=message):
        load_data(tmp_path / "t.csv")


def test_table_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"path,label\n\xff\xfe\x00,b\n")
    with pytest.raises(DropleError, match="as CSV in UTF-8"):
        load_data(tmp_path / "t.csv")


# ---- pairs


def test_pairs(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    array = np.zeros((5, 5, 3), np.uint8)
    picture = Image.new("L", (5, 5))
    data = load_data(
        [(tmp_path / "a.png", "Cat"), (str(tmp_path / "a.png"), "Cat"), (array, "dog"), (picture, "dog")]
    )
    assert data.classes == ("Cat", "dog") and data.root is None
    assert len(data.train) == len(data.val) == 2
    images, _, bad = decode([e.image for e in (*data.train, *data.val)], 4, 3)
    assert len(images) == 4 and not bad
    assert load_data([(array, np.int64(10)), (array, 9)]).classes == ("9", "10")


@pytest.mark.parametrize(
    "pairs, message",
    [
        ([], "no images"),
        ([("a.png",)], "item 0 of the list is not an"),
        (["a.png"], "item 0 of the list is not an"),
        ([(3, "a")], "image of item 0"),
        ([(np.zeros((2, 2), np.uint8), None)], "label of item 0"),
        ([(np.zeros((2, 2), np.uint8), " ")], "label of item 0"),
        ([("no/such.png", "a"), ("no/such.png", "b")], "2 of 2 image files do not exist"),
        (5, "not 5"),
    ],
)
def test_wrong_pairs(pairs: list, message: str) -> None:
    with pytest.raises(DropleError, match=message):
        load_data(pairs)


# ---- class names


@pytest.mark.parametrize(
    "name, words",
    [
        ("AnnualCrop", "annual crop"),
        ("German_Shorthaired-Pointer", "german shorthaired pointer"),
        ("Boeing 737-800", "boeing 737-800"),
        ("DC-10", "dc-10"),
        ("An-12", "an-12"),
        ("ÉcoleÉlémentaire", "école élémentaire"),
        ("東京タワー", "東京タワー"),
        ("SUVs", "suvs"),
        ("HTMLPages", "html pages"),
        ("  many__spaces - here ", "many spaces here"),
        ("already fine", "already fine"),
        ("___", "___"),
        ("n02084071", "n02084071"),
    ],
)
def test_tidy(name: str, words: str) -> None:
    assert tidy(name) == words


def test_classnames(tmp_path: Path) -> None:
    root = flat(tmp_path / "data", n01=6, n02=6)
    (tmp_path / "names.json").write_text(json.dumps({"n01": "grey owl", "n02": "chouette"}))
    (tmp_path / "names.csv").write_text('folder,words\nn02,"owl, barn"\n')
    assert any("say nothing" in note for note in load_data(root).notes)
    assert load_data(root, classnames=tmp_path / "names.json").words == ("grey owl", "chouette")
    assert not any(
        "say nothing" in note for note in load_data(root, classnames=tmp_path / "names.json").notes
    )
    assert load_data(root, classnames=tmp_path / "names.csv").words == ("n01", "owl, barn")
    same = load_data(root, classnames={"n01": "owl", "n02": "owl"})
    assert any("'n01' and 'n02' read the same, 'owl'" in note for note in same.notes)
    with pytest.raises(DropleError, match="did you mean n0"):
        load_data(root, classnames={"n03": "tawny owl"})
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "wide.csv").write_text("a,b,c\n")
    for wrong in ("broken.json", "wide.csv", "missing.json"):
        with pytest.raises(DropleError, match="cannot read class names"):
            load_data(root, classnames=tmp_path / wrong)
    with pytest.raises(DropleError, match="must map each class"):
        load_data(root, classnames=tmp_path / "list.json")


# ---- shots


def numbered(*counts: int) -> list[Example]:
    return [Example(Path(f"{label}/{i}"), label) for label, count in enumerate(counts) for i in range(count)]


def test_few_shot() -> None:
    examples = numbered(30, 2, 10)
    drawn = few_shot(examples, 4, seed=1)
    assert [e.label for e in drawn] == [0] * 4 + [1] * 2 + [2] * 4
    assert len(set(drawn)) == 10 and set(drawn) <= set(examples)
    assert few_shot(examples, 4, seed=1) == drawn != few_shot(examples, 4, seed=2)
    others = [e for e in numbered(30, 50, 3) if e.label < 2]
    assert few_shot(others, 4, seed=1)[:4] == drawn[:4], "another class changed this one's draw"
    assert few_shot(examples, 2, seed=1)[:2] == drawn[:2]
    assert few_shot(reversed(examples), None, seed=0) == [
        e for members in by_label(reversed(examples)).values() for e in members
    ]
    firsts = {few_shot(examples, 1, seed)[0] for seed in range(200)}
    assert len(firsts) > 25, "every image of a class can be drawn"
    with pytest.raises(DropleError, match="1 or more"):
        few_shot(examples, 0, seed=0)


def test_shortfall() -> None:
    notes = shortfall(numbered(30, 2), 16, ["a", "b", "c"])
    assert len(notes) == 2 and "'b' has only 2 of the 16" in notes[0] and "'c' has only 0" in notes[1]
    assert shortfall(numbered(1, 1), None, ["a", "b"]) == []


def test_base_novel() -> None:
    assert base_novel("abcd") == ([0, 1], [2, 3])
    assert base_novel("abcde") == ([0, 1, 2], [3, 4])
    assert base_novel("a") == ([0], [])


def test_long_tail() -> None:
    examples = numbered(100, 100, 100, 100, 100)
    tail = long_tail(examples, 50, seed=0)
    expected = [max(1, round(100 * 50 ** (-k / 4))) for k in range(5)]
    assert expected == [100, 38, 14, 5, 2]
    assert list(Counter(e.label for e in tail).values()) == expected
    assert set(tail) <= set(examples) and len(set(tail)) == len(tail)
    assert long_tail(examples, 50, seed=0) == tail != long_tail(examples, 50, seed=1)
    assert len(long_tail(examples, 1, seed=0)) == 500
    assert Counter(e.label for e in long_tail(numbered(4, 4, 4), 1000, seed=0)) == {0: 4, 1: 1, 2: 1}
    assert len(long_tail(numbered(5), 10, seed=0)) == 5 and long_tail([], 10, seed=0) == []
    with pytest.raises(DropleError, match="1 or more"):
        long_tail(examples, 0.5, seed=0)


# ---- real data


def test_eurosat(shared: Path, tmp_path: Path) -> None:
    with tarfile.open(shared / "data" / "eurosat.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    data = load_data(tmp_path / "eurosat")
    assert len(data.classes) == 10 and data.words[0] == "annual crop land"
    assert (len(data.train), len(data.val), len(data.test)) == (640, 160, 2000)
    assert data.notes == ()
    shots = few_shot(data.train, 4, seed=1)
    images, good, bad = decode([example.image for example in shots], 32, 3)
    assert images.shape == (40, 3, 32, 32) and good == list(range(40)) and not bad
    assert images.float().std() > 10


def test_pictures_of_other_kinds_are_counted(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/1.png"):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    for name in ("cat/2.HEIC", "cat/3.heic", "dog/2.avif", "dog/.4.heic"):
        (tmp_path / name).touch()
    (note,) = (note for note in load_data(tmp_path).notes if "convert" in note)
    assert "1 .avif, 2 .heic" in note
    for name in ("cat/1.png", "dog/1.png"):
        (tmp_path / name).unlink()
    with pytest.raises(DropleError, match=r"but 1 \.avif, 2 \.heic"):
        load_data(tmp_path)


def test_a_split_beside_classes_is_a_class_and_said(tmp_path: Path) -> None:
    for name in ("cat", "dog", "test/cat"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    data = load_data(tmp_path)
    assert data.classes == ("cat", "dog", "test")
    assert any("test taken for a class" in note for note in data.notes)
