"""The demo, really run on few drawings: its files, its table, and what it does with an earlier demo."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drople.demo.drawings import CLASSES, draw
from drople.demo.run import clear_run, outcome, prepare_drawings, run_demo
from drople.errors import DropleError
from drople.learner import PromptLearner
from drople.progress import Quiet

FEW: Any = {"shots": 2, "epochs": 1, "train_per_class": 3, "test_per_class": 2}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_demo_ends_with_a_table_a_picture_and_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    returned = run_demo(out, 1, Quiet(), **FEW)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert sorted(p.name for p in out.iterdir()) == [
        "coop",
        "drawings",
        "drople",
        "report.png",
        "results.json",
    ]

    results = json.loads((out / "results.json").read_text("utf-8"))
    assert results == returned
    assert results["base"]["classes"] + results["novel"]["classes"] == list(CLASSES)
    assert list(results["methods"]) == ["zero-shot", "CoOp", "DroPLe"]
    for name, row in results["methods"].items():
        base, novel = row["base"], row["novel"]
        assert row["harmonic_mean"] == pytest.approx(2 * base * novel / (base + novel) if base * novel else 0)
        (line,) = (line for line in shown.out.splitlines() if line.split()[:1] == [name] and "%" in line)
        numbers = [float(n) for n in re.findall(r"([\d.]+)%", line)]
        assert numbers == pytest.approx([100 * v for v in row.values()], abs=0.051)
    for words in (
        "Base:",
        "Novel:",
        "drople fit YOUR_PHOTOS --out RUN",
        str(out / "report.png"),
        str(out / "drople"),
    ):
        assert words in shown.out

    with Image.open(out / "report.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape == (1200, 1680, 3) and pixels.std() > 20

    # The run folder holds what was measured: loaded again it scores the same on the base test drawings.
    learner = PromptLearner.load(out / "drople")
    assert learner.classes_ == tuple(results["base"]["classes"])
    images = sorted(p for name in learner.classes_ for p in (out / "drawings" / "test" / name).iterdir())
    right = np.mean([p.parent.name == said for p, said in zip(images, learner.predict(images), strict=True)])
    assert right == pytest.approx(results["methods"]["DroPLe"]["base"])

    before = contents(out / "drawings")
    again = run_demo(out, 1, Quiet(), **FEW)
    assert contents(out / "drawings") == before
    assert again["methods"] == results["methods"]


def test_drawings_are_kept_only_where_they_are_the_same(tmp_path: Path) -> None:
    folder = draw(tmp_path / "drawings", seed=1, train_per_class=3, test_per_class=2)
    first = contents(folder)
    made = folder.stat().st_ino
    assert prepare_drawings(folder, 1, 3, 2, Quiet()).stat().st_ino == made
    shutil.rmtree(folder / "test" / CLASSES[0])
    assert contents(prepare_drawings(folder, 1, 3, 2, Quiet())) == first, "an incomplete set was kept"
    other = contents(prepare_drawings(folder, 2, 3, 2, Quiet()))
    assert other.keys() == first.keys() and not set(other.values()) & set(first.values())


def test_what_is_not_a_demo_is_never_removed(tmp_path: Path) -> None:
    mine = tmp_path / "drople" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("keep")
    (mine.parent / "config.json").write_text("{}")
    with pytest.raises(DropleError, match="give another --out"):
        clear_run(mine.parent)
    with pytest.raises(DropleError, match="give another --out"):
        run_demo(tmp_path, 1, Quiet(), **FEW)
    photo = tmp_path / "drawings" / "train" / "grandmother" / "1.jpg"
    photo.parent.mkdir(parents=True)
    photo.write_bytes(b"keep")
    with pytest.raises(DropleError, match="give another --out"):
        prepare_drawings(tmp_path / "drawings", 1, 3, 2, Quiet())
    assert mine.read_text() == "keep" and photo.read_bytes() == b"keep"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drawings", "drople"]


def test_the_outcome_is_said_whoever_wins() -> None:
    def row(base: float, novel: float, mean: float) -> dict[str, float]:
        return {"base": base, "novel": novel, "harmonic_mean": mean}

    lost = outcome(
        {"zero-shot": row(0.6, 0.6, 0.6), "CoOp": row(0.5, 0.5, 0.5), "DroPLe": row(0.7, 0.2, 0.31)}
    )
    assert lost == [
        "Highest harmonic mean: zero-shot, 60.0%.",
        "DroPLe against zero-shot: +10.0 points on base, -40.0 points on novel.",
    ]
    same = dict.fromkeys(("zero-shot", "CoOp", "DroPLe"), row(0.5, 0.5, 0.5))
    assert outcome(same)[0] == "Highest harmonic mean: zero-shot, CoOp and DroPLe, 50.0%."
