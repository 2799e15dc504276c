"""Decoding in processes: the same pixels and the same reasons, and none of their deaths is ours."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drople.data import decode_batches, decoders, images
from drople.data.decoders import Decoders
from drople.safe_image import BadImage, open_image, square

SIZE, PLACES = 24, 9
DIES_OF_SOME = """
import os, drople.safe_image as safe
real = safe.open_image
safe.open_image = lambda path: os._exit(1) if "deadly" in path else real(path)
safe.serve()
"""
FIRST_WAITS_FOR_A_SIGN = """
import os, sys, time, drople.safe_image as safe
real = safe.open_image
def waiting(path):
    while sys.argv[1] == "0" and not os.path.exists(os.path.dirname(path) + "/go"):
        time.sleep(0.01)
    return real(path)
safe.open_image = waiting
safe.serve()
"""
GREETS_AND_DIES = "import sys; sys.stdout.write('ready'); sys.stdout.flush(); sys.stdin.buffer.read(4)"


def picture(folder: Path, name: str, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (30 + seed, 41, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return folder / name


def slow(path: Path) -> np.ndarray:
    return square(open_image(path), SIZE, 3)


def one(made: Decoders, path: Path) -> np.ndarray:
    made.begin([path])
    (answer,) = made.finish()
    if isinstance(answer, BadImage):
        raise answer
    return answer


@pytest.fixture
def two() -> Iterator[Decoders]:
    made = Decoders(2, SIZE, 3, PLACES)
    yield made
    made.close()
    assert all(decoder.process is None or decoder.process.poll() is not None for decoder in made.all)


def test_the_same_pixels(two: Decoders, tmp_path: Path) -> None:
    names = ["a.png", "b.jpg", "c.webp", "a b.gif", "new\nline.png", "ümläut.png", "d.bmp"]
    for number, path in enumerate([picture(tmp_path, n, i) for i, n in enumerate(names)]):
        assert np.array_equal(one(two, path), slow(path)), number
    odd = os.fsencode(tmp_path) + b"/no-utf8-\xff.png"
    os.rename(picture(tmp_path, "e.png", 3), odd)
    assert np.array_equal(one(two, Path(os.fsdecode(odd))), slow(Path(os.fsdecode(odd))))


def test_the_same_reasons(two: Decoders, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no picture", "utf-8")
    (tmp_path / "empty.png").touch()
    cut = picture(tmp_path, "cut.png", 5)
    cut.write_bytes(cut.read_bytes()[:900])
    for path in (tmp_path / "text.jpg", tmp_path / "empty.png", cut, tmp_path / "gone.png", tmp_path):
        with pytest.raises(BadImage) as theirs:
            one(two, path)
        with pytest.raises(BadImage) as ours:
            slow(path)
        assert (theirs.value.source, theirs.value.reason) == (ours.value.source, ours.value.reason)


def test_begun_ahead_and_finished_in_order(two: Decoders, tmp_path: Path) -> None:
    paths = [picture(tmp_path, f"{n}.png", n) for n in range(24)]
    (tmp_path / "text.jpg").write_text("no picture", "utf-8")
    paths.insert(7, tmp_path / "text.jpg")
    batches = [paths[n : n + 3] for n in range(0, len(paths), 3)]
    for number in range(len(batches) + 2):
        if number < len(batches):
            two.begin(batches[number])
        if number >= 2:
            for path, answer in zip(batches[number - 2], two.finish(), strict=True):
                if path.suffix == ".jpg":
                    assert isinstance(answer, BadImage) and answer.source == str(path)
                else:
                    assert np.array_equal(answer, slow(path))


def test_who_is_done_is_asked_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "SERVE", FIRST_WAITS_FOR_A_SIGN)
    paths, made = [picture(tmp_path, f"{n}.png", n) for n in range(6)], Decoders(2, SIZE, 3, PLACES)
    held_up, free = made.all
    made.begin(paths[:4])
    assert made.begun[-1] == [held_up, free, held_up, free]
    end = time.monotonic() + 60
    while free.waiting() and time.monotonic() < end:
        time.sleep(0.01)
    made.begin(paths[4:])
    assert made.begun[-1] == [free, free] and held_up.waiting() == 2
    (tmp_path / "go").touch()
    answers = [answer.copy() for _ in range(2) for answer in made.finish()]
    assert all(np.array_equal(answer, slow(path)) for path, answer in zip(paths, answers, strict=True))
    made.close()


def test_one_that_was_killed_is_replaced(two: Decoders, tmp_path: Path) -> None:
    path = picture(tmp_path, "a.png")
    for _ in range(4):
        one(two, path)
    paths = [picture(tmp_path, f"{n}.png", n) for n in range(PLACES)]
    two.begin(paths[:5])
    first = [decoder.process.pid for decoder in two.all]
    for decoder in two.all:
        os.kill(decoder.process.pid, signal.SIGKILL)
        decoder.process.wait()
    two.begin(paths[5:])
    answers = [answer.copy() for _ in range(2) for answer in two.finish()]
    assert all(np.array_equal(answer, slow(path)) for path, answer in zip(paths, answers, strict=True))
    assert not set(first) & {decoder.process.pid for decoder in two.all}


def test_a_picture_that_kills_is_a_bad_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "SERVE", GREETS_AND_DIES)
    deadly = Decoders(1, SIZE, 3, PLACES)
    with pytest.raises(BadImage, match="ended the process"):
        one(deadly, picture(tmp_path, "a.png"))
    deadly.close()


def test_of_some_pictures_only_the_one_that_kills_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "SERVE", DIES_OF_SOME)
    names = ["a.png", "deadly1.png", "b.png", "deadly2.png", "deadly3.png", "c.png"]
    paths, made = [picture(tmp_path, name, n) for n, name in enumerate(names)], Decoders(1, SIZE, 3, PLACES)
    (tmp_path / "a.txt").write_text("no picture", "utf-8")
    made.begin([*paths, tmp_path / "a.txt", paths[0]])
    answers = made.finish()
    made.close()
    assert len(answers) == len(paths) + 2
    for path, answer in zip([*paths, tmp_path / "a.txt", paths[0]], answers, strict=True):
        if isinstance(answer, BadImage):
            assert answer.source == str(path) and ("ended the process" in answer.reason) == (
                "deadly" in path.name
            )
        else:
            assert path.suffix == ".png" and "deadly" not in path.name and np.array_equal(answer, slow(path))


def test_where_none_can_be_started_this_process_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "SERVE", "raise SystemExit(1)")
    path, none = picture(tmp_path, "a.png"), Decoders(1, SIZE, 3, PLACES)
    for _ in range(3):
        assert np.array_equal(one(none, path), slow(path))
    none.close()


def test_where_the_system_refuses_processes_this_one_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object, **more: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    path, none = picture(tmp_path, "a.png"), Decoders(2, SIZE, 3, PLACES)
    for _ in range(3):
        assert np.array_equal(one(none, path), slow(path))
    none.close()
    # Where it refuses some, those that it gave do their part.
    monkeypatch.undo()
    some = Decoders(2, SIZE, 3, PLACES)
    some.all[0].close()
    some.all[0].process = None
    some.begin([path] * 4)
    assert some.begun[-1] == some.all * 2
    assert all(np.array_equal(answer, slow(path)) for answer in some.finish())
    some.close()


def test_no_code_beside_the_pictures_is_run(
    two: Decoders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("import os; os._exit(1)", "utf-8")
    monkeypatch.chdir(tmp_path)
    made = Decoders(1, SIZE, 3, PLACES)
    one(made, picture(tmp_path, "a.png"))
    assert made.all[0].greeted
    made.close()


def test_a_process_needs_no_torch() -> None:
    code = "import sys, drople.safe_image; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_many_files_are_decoded_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [picture(tmp_path, f"{n}.png", n) for n in range(11)]
    (tmp_path / "bad.png").touch()
    paths.insert(4, tmp_path / "bad.png")
    # Another test may have asked for pictures to be remembered, which is done in this process.
    monkeypatch.setattr(images, "_MEMORY", images._Memory())
    few = list(decode_batches(paths, SIZE, 3, 5))
    begun = []
    monkeypatch.setattr(images, "MANY_FILES", len(paths))
    monkeypatch.setattr(images, "MANY_CORES", 1)
    monkeypatch.setattr(images, "Decoders", lambda *given: begun.append(Decoders(*given)) or begun[-1])
    many = list(decode_batches(paths, SIZE, 3, 5))
    assert len(begun) == 1 and all(decoder.process.poll() is not None for decoder in begun[0].all)
    for (rows, good, bad), (others, same, failed) in zip(few, many, strict=True):
        assert rows.equal(others) and good == same
        assert [b.reason for b in bad] == [f.reason for f in failed]
    # What is remembered is decoded here, unless it does not fit anyway.
    room = len(paths) * 3 * SIZE * SIZE
    images.remember(room)
    list(decode_batches(paths, SIZE, 3, 5))
    assert len(begun) == 1
    images.remember(room - 1)
    list(decode_batches(paths, SIZE, 3, 5))
    assert len(begun) == 2
    # Pictures in memory cannot be sent by name.
    assert len(list(decode_batches([*paths, Image.open(paths[0])], SIZE, 3, 5))) == 3
    assert len(begun) == 2
