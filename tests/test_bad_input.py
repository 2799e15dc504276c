"""Section 7 of the foundation: bad input through the commands.

Bad images are skipped, counted and named unless `--strict`; everything else is one paragraph and exit code 2;
nothing is half-written.
"""

import io
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Answer, contents, drople, own_folder, picture, pictures, splits, tiny_checkpoint
from PIL import Image

from drople.errors import DropleError
from drople.learner import CONFIG_FIELDS, PromptLearner


def fit(data: Path, out: Path, *extra: object) -> Answer:
    return drople("fit", data, "--out", out, "--backbone", tiny_checkpoint(), "--epochs", 1, *extra)


def refused(answer: Answer, *said: str) -> None:
    assert answer.code == 2 and answer.out == "", answer
    last = [line for line in answer.err.splitlines() if not line.startswith("note: ")]
    assert len(last) == 1 and last[0].startswith("drople: "), answer.err
    assert all(word in last[0] for word in said), last[0]


@pytest.fixture(scope="module")
def data() -> Path:
    return splits(own_folder() / "colours", count=3)


@pytest.fixture(scope="module")
def finished(data: Path) -> Path:
    out = own_folder() / "run"
    answer = fit(data, out, "--method", "coop")
    assert answer.code == 0, answer.err
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


# Folders -------------------------------------------------------------------------------------------


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    refused(fit(tmp_path / "photos", tmp_path / "run"), "photos", "no images", "CLASS/image.jpg")
    (tmp_path / "photos/cat").mkdir()
    refused(fit(tmp_path / "photos", tmp_path / "run"), "photos", "no images")
    assert not (tmp_path / "run").exists()


def test_one_class(tmp_path: Path) -> None:
    data = pictures(tmp_path / "photos", ("red",), 4)
    refused(fit(data, tmp_path / "run"), "only one class", "red")
    picture("blue", 1).save(data / "loose.png")
    refused(fit(data, tmp_path / "run"), "only one class")
    assert not (tmp_path / "run").exists()


def test_a_class_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    data = pictures(tmp_path / "photos", ("red", "blue"), 4)
    for path in (data / "red").iterdir():
        path.write_bytes(b"junk")
    refused(fit(data, tmp_path / "run"), "no training image of 'red' can be read: replace")
    assert not (tmp_path / "run").exists()


def test_images_that_could_not_be_read_are_not_counted(tmp_path: Path) -> None:
    data = pictures(tmp_path / "photos", ("red", "blue"), 6)
    (data / "train").mkdir()
    for colour in ("red", "blue"):
        (data / colour).rename(data / "train" / colour)
    (data / "train/red/3.png").write_bytes(b"junk")
    answer = fit(pictures(data / "val", ("red", "blue"), 3).parent, tmp_path / "run", "--json")
    assert answer.code == 0 and answer.json["unread_images"] == 1, answer
    page = drople("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert page.code == 0, page.err
    assert "11 (16 a class; 1 could not be read)" in (tmp_path / "report.html").read_text("utf-8")


def test_a_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    data = pictures(tmp_path / "photos", ("red", "blue"), 3)
    refused(fit(data, data), "photos holds blue and no run", "--out")
    assert sorted(path.name for path in data.iterdir()) == ["blue", "red"]


def test_no_training_part(tmp_path: Path) -> None:
    pictures(tmp_path / "photos/test", count=2)
    refused(fit(tmp_path / "photos", tmp_path / "run"), "no training images")


def test_fewer_images_than_shots(tmp_path: Path) -> None:
    data = splits(tmp_path / "photos", count=5)
    (data / "train/red/0.png").unlink()
    answer = fit(data, tmp_path / "run", "--shots", 5)
    assert answer.code == 0
    assert "class 'red' has only 4 of the 5 training images" in answer.err and "'blue'" not in answer.err
    config = json.loads((tmp_path / "run/config.json").read_text("utf-8"))
    assert sorted(sample[1] for sample in config["samples"]).count("red") == 4


def test_unicode_class_folders(tmp_path: Path) -> None:
    data = tmp_path / "φωτογραφίες"
    for colour, name in (("red", "κόκκινο"), ("blue", "蓝色 🟦"), ("green", "grün_hell")):
        pictures(tmp_path / "plain", (colour,), 3)
        shutil.copytree(tmp_path / "plain" / colour, data / name)
    answer = fit(data, tmp_path / "run", "--json")
    assert answer.code == 0, answer.err
    assert set(answer.json["evaluation"]["per_class"]) == {"κόκκινο", "蓝色 🟦", "grün_hell"}
    row = drople("predict", tmp_path / "run", data / "蓝色 🟦", "--json").json[0]
    assert row["class"] in {"κόκκινο", "蓝色 🟦", "grün_hell"} and "蓝色 🟦" in row["path"]


def test_a_symlink_loop(data: Path, tmp_path: Path) -> None:
    looped = tmp_path / "photos"
    shutil.copytree(data, looped)
    (looped / "train/red/again").symlink_to(looped / "train", target_is_directory=True)
    (looped / "train/blue/self").symlink_to(looped / "train/blue", target_is_directory=True)
    (looped / "train/blue/turn.png").symlink_to(looped / "train/blue/turn.png")
    answer = fit(looped, tmp_path / "run")
    assert answer.code == 0, answer.err
    config = json.loads((tmp_path / "run/config.json").read_text("utf-8"))
    prints = [sample[-1] for sample in config["samples"] if not sample[-1].startswith("unreadable")]
    assert len(prints) == len(set(prints)) == 9
    assert "turn.png" in answer.err
    predicted = drople("predict", tmp_path / "run", looped, "--json")
    assert predicted.code == 0 and len(predicted.json) == 27


# Images --------------------------------------------------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb() -> bytes:
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 100000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


BAD: dict[str, Callable[[], bytes]] = {
    "truncated.jpg": lambda: encoded(picture("red", 5).resize((200, 200)), "JPEG")[:1500],
    "corrupt.png": lambda: encoded(picture("red", 5), "PNG")[:60] + b"\0" * 400,
    "bomb.png": bomb,
    "text.jpg": lambda: b"this is no image at all",
    "empty.jpg": lambda: b"",
    "page.jpg": lambda: b"<html><body>404</body></html>",
}


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture("red", 6), "JPEG", exif=exif)


def animated() -> bytes:
    frames = [picture("red", n).convert("P") for n in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


GOOD: dict[str, Callable[[], bytes]] = {
    "animated.gif": animated,
    "cmyk.jpg": lambda: encoded(picture("red", 6).convert("CMYK"), "JPEG"),
    "sixteen.png": lambda: encoded(Image.fromarray(np.full((40, 40), 40000, np.uint16)), "PNG"),
    "alpha.png": lambda: encoded(picture("red", 6).convert("RGBA"), "PNG"),
    "grey.png": lambda: encoded(picture("red", 6).convert("L"), "PNG"),
    "turned.jpg": turned,
}


def test_bad_images_are_skipped_named_and_counted_in_training(data: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "photos"
    shutil.copytree(data, spoiled)
    for name, content in (BAD | GOOD).items():
        (spoiled / "train/red" / name).write_bytes(content())
    (spoiled / "train/red/dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    answer = fit(spoiled, tmp_path / "run", "--shots", "all")
    assert answer.code == 0, answer.err
    skipped = [line for line in answer.err.splitlines() if "skipped" in line and "in all" not in line]
    assert len(skipped) == len(BAD) + 1
    assert all(any(name in line for line in skipped) for name in [*BAD, "dangling.jpg"])
    assert not any(name in line for name in GOOD for line in skipped)
    assert f"{len(BAD) + 1} images skipped in all" in answer.err
    assert "Traceback" not in answer.err and "Warning" not in answer.err
    strict = fit(spoiled, tmp_path / "strict", "--shots", "all", "--strict")
    refused(strict, "cannot use the image", "train/red")
    assert not (tmp_path / "strict").exists()


def test_bad_images_at_prediction(finished: Path, data: Path, tmp_path: Path) -> None:
    files = []
    for name, content in (BAD | GOOD).items():
        (tmp_path / name).write_bytes(content())
        files.append(tmp_path / name)
    answer = drople("predict", finished, *files, "--json")
    assert answer.code == 0
    assert [Path(row["path"]).name for row in answer.json] == list(GOOD)
    assert all(name in answer.err for name in BAD) and f"{len(BAD)} images skipped in all" in answer.err
    refused(drople("predict", finished, *files, "--json", "--strict"), "cannot use the image")
    refused(drople("predict", finished, tmp_path / "text.jpg"), "text.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    refused(drople("predict", finished, tmp_path / "pipe.jpg"), "pipe.jpg")


def test_bad_images_at_evaluation(finished: Path, data: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "photos"
    shutil.copytree(data, spoiled)
    for name, content in BAD.items():
        (spoiled / "test/red" / name).write_bytes(content())
    result = drople("evaluate", finished, spoiled, "--json")
    assert result.code == 0
    assert result.json["images"] == 9 and {Path(p).name for p in result.json["skipped"]} == set(BAD)
    assert {n: result.json[n] for n in ("accuracy", "confusion")} == {
        n: drople("evaluate", finished, data, "--json").json[n] for n in ("accuracy", "confusion")
    }
    refused(drople("evaluate", finished, spoiled, "--json", "--strict"), "cannot use the image")


def test_no_readable_image_at_all(tmp_path: Path) -> None:
    data = splits(tmp_path / "photos", count=2)
    for file in (data / "train").rglob("*.png"):
        file.write_bytes(b"garbage")
    refused(fit(data, tmp_path / "run"), "none of the training images can be read")
    assert not (tmp_path / "run").exists()


def test_no_readable_validation_or_test_image(tmp_path: Path) -> None:
    data = splits(tmp_path / "photos", count=2)
    for file in [*(data / "val").rglob("*.png"), *(data / "test").rglob("*.png")]:
        file.write_bytes(b"garbage")
    refused(fit(data, tmp_path / "run"), "none of the 6 images of test can be read")
    # Training is over by then, and its run is kept.
    assert PromptLearner.load(tmp_path / "run").temperature_ == 1.0
    refused(drople("evaluate", tmp_path / "run", data, "--split", "val"), "none of the 6 images of val")


def test_an_unreadable_file_is_skipped(data: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    copy = tmp_path / "photos"
    shutil.copytree(data, copy)
    (copy / "train/red/0.png").chmod(0)
    answer = fit(copy, tmp_path / "run")
    assert answer.code == 0 and "0.png" in answer.err and "permission" in answer.err


def test_images_are_right_side_up(tmp_path: Path) -> None:
    """A picture stored turned, with the EXIF note that says so, is predicted as the picture itself."""
    half = np.zeros((32, 32, 3), np.uint8)
    half[:16] = (220, 40, 40)
    upright = Image.fromarray(half)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.save(tmp_path / "upright.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "lying.png")
    data = splits(tmp_path / "photos", count=2)
    learner = PromptLearner(tiny_checkpoint(), "zero-shot").fit(data)
    rows = learner.predict_proba([tmp_path / f"{name}.png" for name in ("upright", "turned", "lying")])
    np.testing.assert_array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


# Tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no columns"),
        ("name,label\na.png,red\n", "no column for the image file"),
        ("path,colour\na.png,red\n", "no column for the class"),
        ("path,label\nnowhere.png,red\nnowhere2.png,blue\n", "2 of 2 image files do not exist"),
        ("path,label\n,red\n", "row 2"),
        ("path,label\na.png,\n", "row 2"),
        ("path,label,split\na.png,red,tarin\n", "tarin"),
        ("path,label\n", "no images"),
    ],
)
def test_a_bad_table(text: str, said: str, tmp_path: Path) -> None:
    picture("red", 1).save(tmp_path / "a.png")
    (tmp_path / "table.csv").write_text(text, "utf-8")
    refused(fit(tmp_path / "table.csv", tmp_path / "run"), said)
    assert not (tmp_path / "run").exists()


def test_other_files_as_data(tmp_path: Path) -> None:
    (tmp_path / "table.xlsx").write_bytes(b"PK")
    (tmp_path / "table.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "latin.csv").write_bytes("path,label\ncafé.png,x\n".encode("latin-1"))
    for name in ("table.xlsx", "table.parquet", "latin.csv"):
        refused(fit(tmp_path / name, tmp_path / "run"), name)


# Run folders ---------------------------------------------------------------------------------------

NEEDED = ("config.json", "prompts.safetensors", "metrics.json")


def ask(run: Path, data: Path) -> Answer:
    return drople("predict", run, data / "test/red", "--json")


@pytest.mark.parametrize("name", NEEDED)
def test_a_run_with_a_missing_file(name: str, run: Path, data: Path) -> None:
    (run / name).unlink()
    refused(ask(run, data), str(run))


def test_the_log_is_not_needed_to_predict(run: Path, data: Path) -> None:
    (run / "log.jsonl").unlink()
    assert ask(run, data).code == 0


@pytest.mark.parametrize("name", NEEDED)
def test_a_run_with_a_truncated_file(name: str, run: Path) -> None:
    whole = (run / name).read_bytes()
    for kept in sorted({0, 1, 7, 8, 9, len(whole) // 3, len(whole) // 2, len(whole) - 5}):
        (run / name).write_bytes(whole[:kept])
        with pytest.raises(DropleError, match=name):
            PromptLearner.load(run)


@pytest.mark.parametrize("name", NEEDED)
def test_a_run_with_a_truncated_file_on_the_command_line(name: str, run: Path, data: Path) -> None:
    whole = (run / name).read_bytes()
    (run / name).write_bytes(whole[: len(whole) // 2])
    refused(ask(run, data), name)


def test_a_run_with_the_file_of_another(run: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert fit(data, other).code == 0
    kept = contents(run)
    shutil.copy(other / "prompts.safetensors", run)
    refused(ask(run, data), "prompts.safetensors", "not of one run")
    (run / "prompts.safetensors").write_bytes(kept["prompts.safetensors"])
    shutil.copy(other / "config.json", run)
    refused(ask(run, data), "prompts.safetensors", "not of one run")
    (run / "config.json").write_bytes(kept["config.json"])
    shutil.copy(tiny_checkpoint() / "config.json", run)
    refused(ask(run, data), "config.json", "not written by drople")
    (run / "config.json").write_bytes(kept["config.json"])
    shutil.copy(tiny_checkpoint() / "config.json", run / "metrics.json")
    refused(ask(run, data), "metrics.json")


@pytest.mark.parametrize("value", [None, 7, "text", [], {}, [1, 2], {"a": 1}, -1, True])
@pytest.mark.parametrize("field", CONFIG_FIELDS)
def test_a_config_with_a_foreign_value_is_refused_or_harmless(
    field: str, value: Any, run: Path, data: Path
) -> None:
    config = json.loads((run / "config.json").read_text("utf-8"))
    config[field] = value
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    try:
        learner = PromptLearner.load(run)
        learner.predict([picture("red", 1)])
        learner.evaluate(data, "val")
        learner.evaluate([(picture("red", 1), "red"), (picture("blue", 1), "blue")])
    except DropleError as error:
        assert str(error)


@pytest.mark.parametrize("temperature", [None, "1", 0, -1, float("inf"), float("nan")])
def test_metrics_without_a_temperature(temperature: Any, run: Path) -> None:
    (run / "metrics.json").write_text(json.dumps({"temperature": temperature}), "utf-8")
    with pytest.raises(DropleError, match=r"metrics\.json"):
        PromptLearner.load(run)


def test_a_run_whose_backbone_is_gone(run: Path, data: Path) -> None:
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["backbone"] = "/nowhere/clip"
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    refused(ask(run, data), "/nowhere/clip")
