"""Files of a run are whole or not there, and what is wrong with one is said in words."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import drople, picture, splits, tiny_checkpoint

from drople.errors import DropleError
from drople.learner import PromptLearner
from drople.records import read_json, read_tensors, write_bytes, write_json, write_tensors


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "deep/er/a.json", {"b": [1, 0.1, None], "a": "Ünïcödé 猫"})
    assert read_json(tmp_path / "deep/er/a.json") == {"b": [1, 0.1, None], "a": "Ünïcödé 猫"}
    tensors = {"x": torch.randn(3, 4), "y": torch.arange(5)}
    write_tensors(tmp_path / "t", tensors, {"step": "7", "a": "b"})
    read, metadata = read_tensors(tmp_path / "t")
    assert all(torch.equal(read[n], tensors[n]) for n in tensors) and metadata == {"step": "7", "a": "b"}
    write_tensors(tmp_path / "t", tensors)
    assert read_tensors(tmp_path / "t")[1] == {}


def test_tensors_are_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """safetensors keeps metadata in a hash map whose order changes from process to process."""
    code = (
        "import sys, torch; from pathlib import Path; from drople.records import write_tensors; "
        "write_tensors(Path(sys.argv[1]), {'x': torch.arange(4.)}, {c: c for c in 'abcdefgh'})"
    )
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.json"
    write_json(file, {"old": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(file, b"new")
    assert read_json(file) == {"old": 1} and list(tmp_path.iterdir()) == [file]


def test_files_allow_what_new_files_of_this_process_do(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from drople.records import write_bytes; write_bytes(Path('a'), b'')"
    for mask, mode in ((0o077, 0o600), (0o022, 0o644), (0o002, 0o664)):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, umask=mask)
        assert (tmp_path / "a").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_is_no_json_is_not_written(value: object, tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", {"new": value})
    assert read_json(tmp_path / "a.json") == {"old": 1} and len(list(tmp_path.iterdir())) == 1


def test_killed_while_writing_a_reader_sees_whole_files_only(tmp_path: Path) -> None:
    """A process that does nothing but write is killed at odd moments."""
    file = tmp_path / "big.json"
    code = (
        "import sys, itertools; from pathlib import Path; from drople.records import write_json\n"
        "for n in itertools.count(): write_json(Path(sys.argv[1]), {'number': n, 'same': [n] * 200000})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(file)])
    try:
        end = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        for _ in range(20):
            content = read_json(file)
            assert set(content["same"]) == {content["number"]} and len(content["same"]) == 200000
            time.sleep(0.003)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert set(read_json(file)["same"]) == {read_json(file)["number"]}


def test_names_that_are_no_utf8_survive(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    write_json(tmp_path / "a.json", {"skipped": [name]})
    assert read_json(tmp_path / "a.json") == {"skipped": [name]}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"a"', b"\xff\xfe", b"null", b'{"a": 1'])
def test_a_file_that_is_no_json_object_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DropleError, match=r"config\.json"):
        read_json(tmp_path / "config.json")
    with pytest.raises(DropleError, match=r"no other\.json"):
        read_json(tmp_path / "other.json")


class Trap:
    """Touches a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.file),)


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    data = splits(tmp_path / "data", count=2)
    run = tmp_path / "run"
    PromptLearner(tiny_checkpoint(), "coop", epochs=1).fit(data, out=run)
    picture("red", 1).save(tmp_path / "red.png")
    sprung = tmp_path / "sprung"
    torch.save({"trap": Trap(sprung)}, tmp_path / "trap.pt")
    for content in (pickle.dumps(Trap(sprung)), (tmp_path / "trap.pt").read_bytes()):
        for name in ("prompts.safetensors", "config.json", "metrics.json"):
            kept = (run / name).read_bytes()
            (run / name).write_bytes(content)
            with pytest.raises(DropleError, match=name):
                PromptLearner.load(run)
            answer = drople("predict", run, tmp_path / "red.png")
            assert answer.code == 2 and name in answer.err
            (run / name).write_bytes(kept)
    assert not sprung.exists()
    assert PromptLearner.load(run).predict([tmp_path / "red.png"])
    assert json.loads((run / "config.json").read_text("utf-8"))["method"] == "coop"
