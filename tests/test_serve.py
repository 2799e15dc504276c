"""What the web page does, and how its server guards itself; no browser is needed here."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import picture, pictures, splits, tiny_checkpoint
from PIL import Image

from drople import PromptLearner
from drople.data import load_data
from drople.data.images import normalise
from drople.errors import DropleError
from drople.learner import fingerprint
from drople.progress import Quiet
from drople.safe_image import BadImage, square
from drople.serve.server import is_loopback, running
from drople.serve.workbench import Workbench, read_classes

TEMPLATE = "a photo of a {}."


class Heard(Quiet):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def task(self, what: str, total: int):  # type: ignore[no-untyped-def]
        self.tasks.append(what)
        return super().task(what, total)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splits(tmp_path_factory.mktemp("data") / "colours", count=4)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mine"
    options = {"epochs": 12, "batch_size": 6, "lr": 0.02, "augmentation": "none"}
    PromptLearner(tiny_checkpoint(), "maple", **options).fit(data, out=out)
    return out


@pytest.fixture(scope="module")
def bench(run: Path, data: Path) -> Workbench:
    """Asked, never taught."""
    return Workbench(PromptLearner.load(run, device="cpu"), data)


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = pictures(
        tmp_path_factory.mktemp("uploads"), ("red", "green", "blue", "yellow"), count=4, first=900
    )
    return {colour.name: sorted(str(f) for f in colour.iterdir()) for colour in sorted(folder.iterdir())}


# Asking --------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_run_and_of_the_untrained_model(
    bench: Workbench, uploads: dict[str, list[str]]
) -> None:
    files = [uploads["red"][0], uploads["blue"][0]]
    found, notes = bench.verdicts(files, bench.original.classes_, TEMPLATE)
    assert notes == [] and [v.file for v in found] == files
    expected = bench.original.predict_proba(files)
    plain = bench.original.zero_shot_logits(files)[0].softmax(-1).numpy()
    np.testing.assert_allclose(np.stack([v.run for v in found]), expected, atol=1e-5)
    np.testing.assert_allclose(np.stack([v.untrained for v in found]), plain, atol=1e-5)
    assert [v.best for v in found] == bench.original.predict(files)
    assert bench.original.temperature_ != 1  # else nothing above is about calibration


def test_a_new_class_needs_no_training(bench: Workbench, uploads: dict[str, list[str]]) -> None:
    classes = [*bench.original.classes_, "a very yellow thing"]
    found, _ = bench.verdicts(uploads["yellow"][:1], classes, TEMPLATE)
    expected = bench.original.predict_proba(
        uploads["yellow"][:1], [*bench.original.words_, "a very yellow thing"]
    )
    np.testing.assert_allclose(found[0].run, expected[0], atol=1e-5)
    assert found[0].classes == tuple(classes) and found[0].run.sum() == pytest.approx(1, abs=1e-5)


def test_the_sentence_is_of_the_untrained_model_alone(
    bench: Workbench, uploads: dict[str, list[str]]
) -> None:
    asked = [
        bench.verdicts(uploads["red"][:1], bench.original.classes_, t)[0][0]
        for t in (TEMPLATE, "an x-ray of the {}!")
    ]
    np.testing.assert_array_equal(asked[0].run, asked[1].run)
    assert np.abs(asked[0].untrained - asked[1].untrained).max() > 1e-4
    with pytest.raises(DropleError, match=r"must hold \{\} once"):
        bench.verdicts(uploads["red"][:1], bench.original.classes_, "no place for a class")


def test_bad_images_are_told_and_the_others_answered(
    bench: Workbench, uploads: dict[str, list[str]], tmp_path: Path
) -> None:
    broken, text = tmp_path / "broken.png", tmp_path / "text.jpg"
    broken.write_bytes(Path(uploads["red"][0]).read_bytes()[:60])
    text.write_text("hello")
    bomb = tmp_path / "bomb.png"
    Image.new("1", (9000, 9000)).save(bomb)
    found, notes = bench.verdicts(
        [str(broken), uploads["red"][0], str(text), str(bomb)], bench.original.classes_, TEMPLATE
    )
    assert [v.file for v in found] == [uploads["red"][0]]
    assert len(notes) == 3 and notes[0].startswith("broken.png: ") and "not an image" in notes[1]
    assert "64 million pixels" in notes[2] and str(tmp_path) not in "".join(notes)
    assert bench.verdicts([str(text)], bench.original.classes_, TEMPLATE)[0] == []
    with pytest.raises(BadImage):
        bench.explain(str(text), "red", bench.original.classes_)


def test_one_class_is_no_choice(bench: Workbench, uploads: dict[str, list[str]]) -> None:
    with pytest.raises(DropleError, match="two or more"):
        bench.verdicts(uploads["red"], ["red"], TEMPLATE)


def test_the_overlay_is_of_the_class_asked_for(bench: Workbench, uploads: dict[str, list[str]]) -> None:
    classes = [*bench.original.classes_, "yellow"]
    drawn = {c: np.asarray(bench.explain(uploads["red"][1], c, classes)) for c in classes}
    assert all(image.shape == (384, 384, 3) for image in drawn.values())
    assert any(not np.array_equal(drawn["yellow"], drawn[c]) for c in classes[:-1])
    # Coloured: the photo below is drawn in grey.
    assert max(np.ptp(image.astype(int), axis=2).max() for image in drawn.values()) > 30
    with pytest.raises(DropleError, match="unknown class 'yelow': did you mean yellow"):
        bench.explain(uploads["red"][1], "yelow", classes)


def test_neighbours_are_the_nearest_training_images(
    bench: Workbench, run: Path, data: Path, uploads: dict[str, list[str]]
) -> None:
    learner = bench.original
    names = [data / sample[0] for sample in learner.config_["samples"]]

    def feature(file: str | Path) -> torch.Tensor:
        wanted = learner.backbone_.pixels
        with Image.open(file) as image:
            pixels = torch.from_numpy(square(image.convert("RGB"), wanted.size, wanted.resample))
        with torch.no_grad():
            return learner.method_.image_features(normalise(pixels[None], wanted))[0]

    asked = feature(uploads["green"][0])
    cosine = [float(asked @ f / asked.norm() / f.norm()) for f in map(feature, names)]
    best = sorted(range(len(names)), key=lambda k: -cosine[k])[:3]
    found = bench.neighbours(uploads["green"][0], 3)
    assert [n.class_name for n in found] == [names[k].parent.name for k in best]
    assert [n.similarity for n in found] == pytest.approx([cosine[k] for k in best], abs=1e-5)
    assert not any(n.uploaded for n in found)
    itself = bench.neighbours(str(names[0]), 1)[0]
    assert itself.similarity == pytest.approx(1, abs=1e-4) and itself.class_name == names[0].parent.name


def test_training_images_are_known_by_their_bytes(run: Path, data: Path, tmp_path: Path) -> None:
    learner = PromptLearner.load(run, device="cpu")
    count = len(learner.config_["samples"])
    # The same files elsewhere, under other names, with one of them changed.
    moved = tmp_path / "moved"
    shutil.copytree(data / "train", moved)
    for file in sorted(moved.rglob("*.png")):
        file.rename(file.with_name(f"renamed-{file.name}"))
    changed = next((moved / "red").iterdir())
    picture("blue", 5).save(changed)
    heard = Heard()
    bench = Workbench(learner, moved, progress=heard)
    assert len(bench.samples) == count - 1
    assert any(f"1 of {count} training images are not in the data" in line for line in heard.lines)
    trained = {fingerprint(image) for image, _ in bench.samples}
    assert trained.isdisjoint(fingerprint(image) for image, _ in bench.val)
    with pytest.raises(DropleError, match=r"none of the .* give --data"):
        Workbench(learner, pictures(tmp_path / "other", count=3, first=500))
    assert Workbench(learner).neighbours(str(data / "test" / "red" / "200.png")) == []


def test_classes_are_read_one_a_line() -> None:
    assert read_classes(" red \n\nfox, arctic\nRed\nred\n") == ["red", "fox, arctic", "Red"]


# Teaching ------------------------------------------------------------------------------------------


def test_retraining_learns_a_class_from_labelled_uploads(
    run: Path, data: Path, uploads: dict[str, list[str]], tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "mine")
    learner = PromptLearner.load(tmp_path / "mine", device="cpu")
    bench = Workbench(learner, data, runs=tmp_path)
    classes = [*learner.classes_, "yellow"]
    labelled = {file: "yellow" for file in uploads["yellow"][:3]}
    asked = uploads["yellow"][3]
    before, _ = bench.verdicts([asked], classes, TEMPLATE)
    heard = Heard()
    done = bench.retrain(labelled, classes, save_as="taught", progress=heard)
    assert (done.uploads, done.classes) == (3, tuple(classes))
    assert done.samples == len(learner.config_["samples"])
    assert done.before is not None and done.after is not None
    assert "training maple" in heard.tasks
    after, _ = bench.verdicts([asked], classes, TEMPLATE)
    assert after[0].best == "yellow"
    others = [uploads[colour][0] for colour in learner.classes_]
    assert [v.best for v in bench.verdicts(others, classes, TEMPLATE)[0]] == list(learner.classes_)
    assert after[0].run[3] > before[0].run[3]
    nearest = bench.neighbours(asked, 1)[0]
    assert nearest.uploaded and nearest.class_name == "yellow"
    # What was saved answers the same, and knows its backbone by the same name.
    again = PromptLearner.load(tmp_path / "taught", device="cpu")
    np.testing.assert_allclose(again.predict_proba([asked])[0], after[0].run, atol=1e-5)
    assert again.config_["backbone"] == learner.config_["backbone"]
    assert [s[1] for s in again.config_["samples"]].count("yellow") == 3
    bench.reset()
    np.testing.assert_array_equal(bench.verdicts([asked], classes, TEMPLATE)[0][0].run, before[0].run)
    assert not any(n.uploaded for n in bench.neighbours(asked))


def test_without_data_it_learns_from_the_uploads_alone(run: Path, uploads: dict[str, list[str]]) -> None:
    bench = Workbench(PromptLearner.load(run, device="cpu"))
    with pytest.raises(DropleError, match=r"of one class, 'red': label .* --data"):
        bench.retrain({uploads["red"][0]: "red"}, bench.original.classes_)
    done = bench.retrain(
        {uploads["red"][0]: "red", uploads["blue"][0]: "blue"}, bench.original.classes_, epochs=1
    )
    assert (done.samples, done.classes, done.after, done.saved) == (0, ("blue", "red"), None, None)
    # Green had no image, and can be asked for none the less.
    found, _ = bench.verdicts(uploads["green"][:1], bench.original.classes_, TEMPLATE)
    assert len(found[0].run) == 3


def test_a_relabelled_image_is_neither_its_old_class_nor_validated_on(run: Path, data: Path) -> None:
    bench = Workbench(PromptLearner.load(run, device="cpu"), data)
    sample, name = bench.samples[0]
    held, _ = bench.val[0]
    other = next(c for c in bench.original.classes_ if c != name)
    bench.retrain({str(sample): other, str(held): other}, bench.original.classes_, epochs=1)
    config = bench.learner.config_["samples"]
    assert [c for _, c, known in config if known == fingerprint(sample)] == [other]
    assert bench.learner.metrics_["validation"]["images"] == len(bench.val) - 1


@pytest.mark.parametrize("name", ["../out", "a/b", "/tmp/out", ".hidden", "..", "a\\b", "a\nb", "mine"])
def test_a_page_writes_only_new_folders_beside_the_run(
    run: Path, data: Path, uploads: dict[str, list[str]], name: str
) -> None:
    bench = Workbench(PromptLearner.load(run, device="cpu"), runs=run.parent)
    there = sorted(run.parent.rglob("*"))
    with pytest.raises(DropleError, match=r"cannot be a folder|is there already"):
        bench.retrain({uploads["red"][0]: "red"}, bench.original.classes_, save_as=name)
    assert sorted(run.parent.rglob("*")) == there and bench.learner is bench.original


def test_what_cannot_be_learned_is_refused_and_changes_nothing(
    bench: Workbench, uploads: dict[str, list[str]]
) -> None:
    with pytest.raises(DropleError, match="no upload is labelled"):
        bench.retrain({}, bench.original.classes_)
    with pytest.raises(DropleError, match="'pink', which is no longer"):
        bench.retrain({uploads["red"][0]: "pink"}, bench.original.classes_)
    with pytest.raises(DropleError, match="in memory only"):
        bench.retrain({uploads["red"][0]: "red"}, bench.original.classes_, save_as="x")
    with pytest.raises(DropleError):
        bench.retrain({uploads["red"][0]: "red"}, bench.original.classes_, template="no place")
    assert bench.learner is bench.original


# The server ----------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_missing_gradio_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(DropleError, match=r"needs gradio: pip install drople\[serve\]"), running(run):
        pass


def test_hosts_that_are_this_machine_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.4", "example.org", "localhost.example.org")))


@pytest.fixture(scope="module")
def served(run: Path, data: Path) -> Iterator[str]:
    pytest.importorskip("gradio", reason="gradio is not installed: pip install drople[serve]")
    with running(run, data=data, port=free_port(), upload_mb=1, device="cpu") as url:
        yield url.rstrip("/")


def test_the_page_names_no_other_site(served: str) -> None:
    import re

    import httpx

    answer = httpx.get(f"{served}/", timeout=30)
    assert answer.status_code == 200 and "Classes to choose from" in answer.text
    addresses = set(re.findall(r"https?://[^\"'\s<>\\]*", answer.text))
    assert all(a.startswith(served) for a in addresses), addresses
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    css = httpx.get(f"{served}/theme.css", timeout=30).text
    assert "system-ui" in css and set(re.findall(r"//[\w.]+", css)) <= {"//www.w3.org"}  # a namespace
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_large_uploads_and_other_sites_are_refused(served: str) -> None:
    import httpx

    where = f"{served}/gradio_api/upload"
    small = httpx.post(where, files={"files": ("a.png", b"x" * 1000)}, timeout=30)
    assert small.status_code == 200
    large = httpx.post(where, files={"files": ("a.png", b"x" * 1_200_000)}, timeout=30)
    assert large.status_code == 413
    for header in ({"Origin": "http://example.org"}, {"Host": "example.org"}, {"Origin": "null"}):
        answer = httpx.post(where, files={"files": ("a.png", b"x")}, headers=header, timeout=30)
        assert answer.status_code == 403
    assert httpx.get(f"{served}/", headers={"Origin": served}, timeout=30).status_code == 200


def test_files_of_this_machine_cannot_be_fetched(served: str, run: Path, data: Path) -> None:
    import httpx

    for file in (run / "config.json", data / "train" / "red" / "0.png", Path("/etc/hostname")):
        assert httpx.get(f"{served}/gradio_api/file={file}", timeout=30).status_code in (403, 404)


def test_it_listens_on_this_machine_alone(served: str) -> None:
    port = int(served.rsplit(":", 1)[1])
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("needs Linux: the sockets are read from /proc/net/tcp")
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    assert listening == {f"0100007F:{port:04X}"}


def test_a_taken_port_is_named_and_a_wide_host_warned_of(served: str, run: Path) -> None:
    port = int(served.rsplit(":", 1)[1])
    with pytest.raises(DropleError, match=f"{port}.*another --port"), running(run, port=port):
        pass
    with pytest.raises(DropleError, match="port"), running(run, port=70000):
        pass
    heard = Heard()
    with pytest.raises(DropleError), running(run, host="0.0.0.0", port=port, progress=heard):
        pass
    assert any("no password" in line for line in heard.lines)


def test_uploads_are_deleted_at_the_end(run: Path) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed: pip install drople[serve]")
    import httpx

    before = os.environ.get("GRADIO_TEMP_DIR")
    with running(run, port=free_port(), device="cpu") as url:
        answer = httpx.post(f"{url}gradio_api/upload", files={"files": ("a.png", b"secret")}, timeout=30)
        (kept,) = answer.json()
        assert Path(kept).read_bytes() == b"secret"
    assert not Path(kept).exists() and os.environ.get("GRADIO_TEMP_DIR") == before


def test_data_in_memory_serves_too(bench: Workbench, data: Path) -> None:
    assert len(Workbench(bench.original, load_data(data)).samples) == len(bench.samples)


def test_ctrl_c_ends_it_in_peace(run: Path) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed: pip install drople[serve]")
    code = (
        "from drople.serve import serve; from drople.progress import Terminal; "
        f"serve({str(run)!r}, port={free_port()}, device='cpu', progress=Terminal())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        assert any("open http://127.0.0.1:" in line for line in said)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "uploads are deleted" in rest and "Traceback" not in rest
    finally:
        process.kill()
