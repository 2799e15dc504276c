"""The commands as people and programs call them: JSON alone on standard output, errors in one paragraph."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Answer, drople, own_folder, picture, pictures, splits, tiny_checkpoint

from drople.answers import print_evaluation, print_predictions
from drople.methods import REGISTRY
from drople.methods.drople import DroPLe

TINY = ("--backbone", tiny_checkpoint())
MAIN = "from drople.cli import main; main()"


def python(*arguments: object, **extra: Any) -> subprocess.CompletedProcess[str]:
    texts = [sys.executable, *map(str, arguments)]
    how: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": 120, "check": False}
    return subprocess.run(texts, **how, **extra)


@pytest.fixture(scope="module")
def data() -> Path:
    return splits(own_folder() / "colours")


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    out = own_folder() / "run"
    settings = ("--epochs", 25, "--set", "lr=0.02", "--set", "batch_size=6")
    answer = drople("fit", data, "--out", out, *TINY, *settings)
    assert answer.code == 0, answer.err
    return out


def refused(answer: Answer) -> str:
    """One paragraph on standard error, nothing on standard output, exit code 2."""
    assert answer.code == 2, answer
    assert answer.out == ""
    last = [line for line in answer.err.splitlines() if not line.startswith("note: ")]
    assert len(last) == 1 and last[0].startswith("drople: "), answer.err
    return last[0]


# Help ----------------------------------------------------------------------------------------------


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        answer = python("-c", MAIN, "--help")
        times.append(time.perf_counter() - start)
        assert answer.returncode == 0 and "fit" in answer.stdout and "predict" in answer.stdout
    assert min(times) < 0.5, times
    watch = (
        "import sys\n"
        "from drople.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'PIL', 'accelerate', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    answer = python("-c", watch)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "methods", "demo"])
def test_every_command_explains_itself(command: str) -> None:
    answer = drople(command, "--help")
    assert answer.code == 0 and answer.err == ""
    flags = {
        "fit": ("--out", "--method", "--backbone", "--shots", "--seed", "--epochs", "--resume", "--template"),
        "predict": ("--classes", "--json"),
        "evaluate": ("--split", "--json"),
        "methods": ("--json",),
        "demo": ("--out",),
    }
    assert all(flag in answer.out for flag in flags[command])


def test_version() -> None:
    from drople import __version__

    assert drople("--version").out.strip() == __version__


# A fresh process, as installed ---------------------------------------------------------------------


def test_a_fresh_process_keeps_standard_output_for_json(data: Path, tmp_path: Path) -> None:
    """Not forked from the server of the other tests: everything imported anew, in a plain locale."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
    arguments = ("fit", data, "--out", tmp_path / "run", *TINY, "--epochs", 1, "--json")
    answer = python("-c", MAIN, *arguments, env=environment)
    assert answer.returncode == 0, answer.stderr
    content = json.loads(answer.stdout)
    assert content["evaluation"]["images"] == 18
    assert "\r" not in answer.stderr and "\x1b" not in answer.stderr, "no bars where there is no terminal"


# Fit -----------------------------------------------------------------------------------------------


def test_fit_shows_zero_shot_beside_the_trained_accuracy(data: Path, tmp_path: Path) -> None:
    arguments = ("--backbone", tiny_checkpoint(), "--epochs", 1)
    answer = drople("fit", data, "--out", tmp_path / "run", *arguments)
    assert answer.code == 0
    assert "before (zero-shot)" in answer.out and "after" in answer.out and "points" in answer.out
    metrics = json.loads((tmp_path / "run/metrics.json").read_text("utf-8"))["evaluation"]
    assert f"{100 * metrics['accuracy']:.1f}%" in answer.out
    assert f"{100 * metrics['zero_shot_accuracy']:.1f}%" in answer.out
    assert metrics["split"] == "test"


def test_fit_as_json(data: Path, tmp_path: Path) -> None:
    answer = drople("fit", data, "--out", tmp_path / "run", *TINY, "--epochs", 1, "--json")
    content = answer.json
    assert content["run"] == str(tmp_path / "run") and content["trainable_parameters"] > 0
    assert {"accuracy", "zero_shot_accuracy", "ece", "per_class", "confusion"} <= set(content["evaluation"])
    stored = json.loads((tmp_path / "run/metrics.json").read_text("utf-8"))
    assert stored["evaluation"] == content["evaluation"] and stored["temperature"] == content["temperature"]


def test_fit_takes_its_flags(data: Path, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('{"red": "scarlet thing"}', "utf-8")
    words = ("--template", "one {}", "--classnames", tmp_path / "names.json")
    flags = ("--shots", 2, "--seed", 5, "--epochs", 1, *words)
    settings = (
        "--set",
        "p-max=0.4",
        "--set",
        "batch_size=3",
        "--set",
        "scores=class,self",
        "--preset",
        "paper",
    )
    common = (*TINY, "--precision", "bf16", "--device", "cpu")
    answer = drople("fit", data, "--out", tmp_path / "run", *flags, *settings, *common)
    assert answer.code == 0, answer.err
    config = json.loads((tmp_path / "run/config.json").read_text("utf-8"))
    assert config["shots"] == 2 and config["seed"] == 5 and config["templates"] == ["one {}"]
    assert config["words"] == ["blue", "green", "scarlet thing"] and config["classes"] == [
        "blue",
        "green",
        "red",
    ]
    paper = DroPLe.presets["paper"]
    assert config["options"] == {**paper, "p_max": 0.4, "scores": ["class", "self"]}
    assert config["training"]["batch_size"] == 3 and config["training"]["epochs"] == 1
    assert config["precision"] == "bf16" and len(config["samples"]) == 6
    every = drople("fit", data, "--out", tmp_path / "all", "--shots", "all", "--epochs", 1, *common)
    assert every.code == 0
    assert len(json.loads((tmp_path / "all/config.json").read_text("utf-8"))["samples"]) == 18


def test_fit_on_a_flat_folder_evaluates_on_what_it_held_out(tmp_path: Path) -> None:
    data = pictures(tmp_path / "photos", count=5)
    arguments = ("--backbone", tiny_checkpoint(), "--epochs", 1, "--json")
    answer = drople("fit", data, "--out", tmp_path / "run", *arguments)
    assert answer.json["evaluation"]["split"] == "val" and answer.json["evaluation"]["images"] == 3
    assert "held out" in answer.err


# Predict -------------------------------------------------------------------------------------------


def test_predict_as_json(run: Path, data: Path) -> None:
    files = sorted((data / "test").rglob("*.png"))
    answer = drople("predict", run, *files, "--json")
    assert answer.code == 0 and all(line.startswith("note:") for line in answer.err.splitlines())
    rows = answer.json
    assert [row["path"] for row in rows] == [str(f) for f in files]
    for row in rows:
        assert set(row) == {"path", "class", "probability", "top"}
        probabilities = [t["probability"] for t in row["top"]]
        assert len(probabilities) == 3 and sum(probabilities) == pytest.approx(1, abs=1e-4)
        assert probabilities == sorted(probabilities, reverse=True)
        assert row["top"][0] == {"class": row["class"], "probability": row["probability"]}
    right = sum(Path(row["path"]).parent.name == row["class"] for row in rows)
    assert right >= 15


def test_predict_other_classes(run: Path, data: Path) -> None:
    file = next((data / "test/red").iterdir())
    answer = drople("predict", run, file, "--classes", " zebra, okapi ,, okapi bird", "--top", 2, "--json")
    (row,) = answer.json
    assert len(row["top"]) == 2 and {t["class"] for t in row["top"]} <= {"zebra", "okapi", "okapi bird"}
    assert "two or more" in refused(drople("predict", run, file, "--classes", "zebra", "--json"))


def test_predict_a_folder_for_people(run: Path, data: Path) -> None:
    answer = drople("predict", run, data / "test/red")
    assert answer.code == 0 and "%" in answer.out and "red" in answer.out


def test_predict_with_class_names_and_files_in_any_script(run: Path, tmp_path: Path) -> None:
    names = ["猫 кот.png", "naïve café.png", "emoji 🐈.png", "two\nlines.png", os.fsdecode(b"latin \xe9.png")]
    files = [tmp_path / name for name in names]
    for file in files:
        with open(file, "wb") as handle:
            picture("red", 1).save(handle, "png")
    answer = drople("predict", run, *files, "--classes", "größe, 東京, crème brûlée", "--json")
    assert answer.code == 0, answer.err
    assert [row["path"] for row in answer.json] == [str(f) for f in files]
    assert {t["class"] for row in answer.json for t in row["top"]} == {"größe", "東京", "crème brûlée"}
    shown = drople("predict", run, *files, "--classes", "größe, 東京")
    assert shown.code == 0, shown.err


# Evaluate ------------------------------------------------------------------------------------------


def test_evaluate_as_json(run: Path, data: Path) -> None:
    answer = drople("evaluate", run, data, "--json")
    assert answer.code == 0
    result = answer.json
    assert {"accuracy", "zero_shot_accuracy", "ece", "per_class", "confusion"} <= set(result)
    assert result["split"] == "test" and result["images"] == 18
    assert set(result["per_class"]) == {"blue", "green", "red"}
    hits = sum(result["confusion"][k][k] for k in range(3))
    assert result["accuracy"] == pytest.approx(hits / 18)
    stored = json.loads((run / "metrics.json").read_text("utf-8"))["evaluation"]
    assert stored == result, "the same as fit measured"
    validation = drople("evaluate", run, data, "--split", "val", "--json").json
    assert validation["split"] == "val"
    shown = drople("evaluate", run, data)
    assert "hardest first" in shown.out and f"{100 * result['accuracy']:.1f}%" in shown.out


def test_evaluate_a_table_and_class_names(run: Path, data: Path, tmp_path: Path) -> None:
    rows = [f"{f},{f.parent.name}" for f in sorted((data / "test").rglob("*.png"))]
    (tmp_path / "table.csv").write_text("\n".join(["image,class", *rows]), "utf-8")
    assert drople("evaluate", run, tmp_path / "table.csv", "--json").json["images"] == 18
    novel = pictures(tmp_path / "novel", ("yellow", "red"), 3)
    (tmp_path / "names.csv").write_text("folder,words\nyellow,lemon\n", "utf-8")
    answer = drople("evaluate", run, novel, "--classnames", tmp_path / "names.csv", "--json")
    assert set(answer.json["per_class"]) == {"yellow", "red"}


def test_an_unknown_split_is_refused(run: Path, data: Path) -> None:
    said = refused(drople("evaluate", run, data, "--split", "tset", "--json"))
    assert "tset" in said and "test" in said


# Methods -------------------------------------------------------------------------------------------


def test_methods_are_listed_and_described() -> None:
    rows = drople("methods", "--json").json
    assert [row["name"] for row in rows] == sorted(REGISTRY)
    shown = drople("methods").out
    assert all(name in shown for name in ("drople", "coop", "zero-shot"))
    one = drople("methods", "drople", "--json").json
    assert one["options"]["drople"]["p_max"]["default"] == 0.5 and one["options"]["training"]["lr"]["help"]
    assert set(one["presets"]) == {"paper", "released", "low_rank"}
    assert one["preset_with"] == {"pocket": "low_rank"}
    assert "p_max" in drople("methods", "coop+drople").out and "p_max" not in drople("methods", "coop").out
    assert "did you mean coop" in refused(drople("methods", "cop"))


# Errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--method", "droppel"), "did you mean drople"),
        (("--method", "coop+dropel"), "coop+drople"),
        (("--set", "p_mx=0.3"), "p_max"),
        (("--set", "p_max"), "NAME=VALUE"),
        (("--set", "=3"), "NAME=VALUE"),
        (("--set", "p_max=lots"), "number"),
        (("--set", "lr=nan"), "finite"),
        (("--set", "p_max=nan"), "finite"),
        (("--set", "weight_decay=inf"), "finite"),
        (("--set", "lr=-1"), "at least 0"),
        (("--set", "seed=3"), "--seed"),
        (("--set", "backbone=pocket"), "--backbone"),
        (("--epochs", "0"), "at least 1"),
        (("--shots", "0"), "shots must be 1 or more"),
        (("--shots", "-2"), "shots must be 1 or more"),
        (("--seed", "-3"), "seed"),
        (("--preset", "papre"), "paper"),
        (("--template", "no place"), "once"),
        (("--device", "tpu9"), "device"),
        (("--backbone", "./nowhere"), "nowhere"),
        (("--classnames", "nowhere.json"), "nowhere.json"),
    ],
)
def test_a_wrong_flag_is_one_paragraph_and_leaves_nothing(
    flags: tuple[str, ...], said: str, data: Path, tmp_path: Path
) -> None:
    backbone = () if "--backbone" in flags else ("--backbone", tiny_checkpoint())
    answer = drople("fit", data, "--out", tmp_path / "run", *backbone, *flags, "--json")
    assert said in refused(answer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("fit",),
        ("fit", "data"),
        ("fit", "data", "--out"),
        ("fit", "data", "--out", "x", "--shots", "many"),
        ("fit", "data", "--out", "x", "--precision", "float8"),
        ("predict",),
        ("predict", "run"),
        ("predict", "run", "image", "--colour"),
        ("evaluate", "run"),
        ("nonsense",),
    ],
)
def test_a_command_that_cannot_be_read_exits_with_2(arguments: tuple[str, ...]) -> None:
    answer = drople(*arguments)
    assert answer.code == 2 and answer.out == "" and answer.err.strip()
    assert "Traceback" not in answer.err


def test_what_is_not_there_is_named(run: Path, data: Path, tmp_path: Path) -> None:
    assert "nowhere" in refused(drople("fit", tmp_path / "nowhere", "--out", tmp_path / "run"))
    assert "nowhere" in refused(drople("predict", tmp_path / "nowhere", data / "test/red/200.png"))
    assert "nowhere.png" in refused(drople("predict", run, tmp_path / "nowhere.png"))
    assert "nowhere" in refused(drople("evaluate", run, tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "no images" in refused(drople("predict", run, tmp_path / "empty"))
    assert "config.json" in refused(drople("predict", tmp_path / "empty", data / "test/red"))


# On a terminal -------------------------------------------------------------------------------------


def test_a_terminal_sees_a_bar_with_losses_and_a_program_does_not(data: Path, tmp_path: Path) -> None:
    """Standard error is a pseudo-terminal, standard output a pipe: bars on one, JSON alone on the other."""
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    arguments = [
        "fit",
        str(data),
        "--out",
        str(tmp_path / "run"),
        *map(str, TINY),
        "--epochs",
        "40",
        "--json",
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MAIN, *arguments, "--set", "batch_size=4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, env=environment)
    os.close(writer)
    shown = bytearray()
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not part:
            break
        shown += part
    assert process.stdout is not None
    out = process.stdout.read()
    assert process.wait(60) == 0, shown.decode("utf-8", "replace")
    os.close(reader)
    assert json.loads(out)["evaluation"]["images"] == 18
    text = shown.decode("utf-8", "replace")
    assert "training drople" in text and "accuracy" in text and "0:00:" in text


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A split's name is no markup, and in a pipe a long path is not folded."""
    shares = {"accuracy": 0.5, "zero_shot_accuracy": 0.25, "ece": 0.1, "ece_uncalibrated": 0.2}
    print_evaluation({"images": 2, "split": "test_[/x]", "per_class": {}, **shares})
    assert "2 images of test_[/x]" in capsys.readouterr().out
    path = "a folder/" * 30 + "a.jpg"
    answer = {"class": "cat", "probability": 0.75}
    print_predictions([{"path": path, **answer, "top": [answer]}])
    assert path in capsys.readouterr().out
