"""The paper's ablation tables: every row trains as its label says, under a label of its own."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import COLOURS, drople, own_folder, splits, tiny_checkpoint

from drople.ablations import ABLATIONS, PAPER
from drople.backbone import Backbone
from drople.errors import DropleError
from drople.methods import Batch, Progress, Task, make
from drople.methods.base import PromptMethod
from drople.methods.drople import DroPLe
from drople.protocols import Run, benchmark, plan
from drople.tables import render, tables

BACKBONE = str(tiny_checkpoint())
ROOT = Path("no-data-here")
NO_RESIDUAL_ENTROPY = {"residual_entropy_visual", "residual_entropy_text"}


@pytest.fixture(scope="module")
def four() -> Path:
    return splits(own_folder() / "four", tuple(COLOURS), 2)


def runs_of(ablation: str, folder: Path, **more: Any) -> list[Run]:
    given: dict[str, Any] = {"options": {"epochs": 1}, **more}
    return plan("base-to-novel", [str(folder)], [], [1], [2], ablation=ablation, backbone=BACKBONE, **given)


def method_of(ablation: str, label: str) -> PromptMethod:
    row = next(row for row in ABLATIONS[ablation] if row.label == label)
    task = Task(("red", "green", "blue"), ("a photo of a {}.",))
    made = make(row.method, Backbone.load(tiny_checkpoint()), task, row.options)
    assert isinstance(made, PromptMethod)
    return made


def losses_of(method: PromptMethod) -> set[str]:
    images = torch.randn(3, 3, 32, 32)
    method.advance(Progress(1, 2, 0, 1))
    return set(method.training_step(Batch(images, torch.arange(3), method.backbone.encode_images(images))))


# The paper's rows ----------------------------------------------------------------------------------


def test_the_tables_are_those_of_the_paper() -> None:
    sizes = {name: len(rows) for name, rows in ABLATIONS.items()}
    expected = {
        "components": 8,
        "scores": 3,
        "range": 4,
        "bridge": 4,
        "lambda": 4,
        "residual": 2,
        "unimodal": 5,
        "default": 8,  # ours
    }
    assert sizes == expected
    labels = [row.label for rows in ABLATIONS.values() for row in rows]
    assert len(set(labels)) == len(labels), "rows of several tables may lie in one folder"


def test_they_stand_on_the_preset_of_the_paper() -> None:
    assert DroPLe.presets["paper"] == {**PAPER, "supplementary": 16}


def test_the_settings_are_those_the_paper_prints() -> None:
    """The values in the first columns of its tables 4 (a), (b) and (c), read from its source."""
    paper = Path(os.environ.get("DROPLE_SHARED", Path(__file__).parents[2] / "shared")) / "paper"
    source = paper / "dropout_prompt_learning.tex"
    if not source.exists():
        pytest.skip("the paper is not here")
    text = source.read_text("utf-8")
    heads = {"range": r"Range (\%)", "bridge": r"$\xi$ &", "lambda": r"$\lambda_0$ &"}
    for name, head in heads.items():
        table = text[text.index(head) :].split(r"\end{tabular}")[0]
        printed = re.findall(r"^\s*([\d.-]+)\s+&", table, re.MULTILINE)
        assert [row.label.split()[-1] for row in ABLATIONS[name]] == printed
    for row in ABLATIONS["unimodal"]:
        assert row.label in text


@pytest.mark.parametrize(
    ("label", "rate", "pull", "terms"),
    [
        ("+Dropout 0.5", "uniform", True, set()),
        ("+Dropout 0.3", "uniform", True, set()),
        ("+Dropblock", "block", True, set()),
        ("+IWTD", "importance", True, {"alignment"}),
        ("IWTD, D_cos", "importance", False, {"cosine", "alignment"}),
        ("IWTD, D_KL+L_1", "importance", False, {"kl", "l1_text", "l1_image", "alignment"}),
        ("IWTD, L_RE", "importance", False, {*NO_RESIDUAL_ENTROPY, "alignment"}),
    ],
)
def test_a_component_has_its_dropout_and_its_losses(
    label: str, rate: str, pull: bool, terms: set[str]
) -> None:
    method = method_of("components", label)
    assert method.regulariser is not None and method.regulariser.options.rate == rate
    assert losses_of(method) == {"cross_entropy", *terms, *(["consistency"] if pull else [])}
    if rate in ("uniform", "block"):
        assert method.regulariser.options.p_max == (0.3 if "0.3" in label else 0.5)


def test_the_baseline_drops_nothing() -> None:
    method = method_of("components", "Baseline")
    assert method.regulariser is None and losses_of(method) == {"cross_entropy", "consistency"}


@pytest.mark.parametrize(
    "ablation", ["components", "scores", "range", "bridge", "lambda", "residual", "unimodal"]
)
def test_one_row_of_each_table_is_the_default(ablation: str) -> None:
    """The paper colours it, and it has the numbers of the full method."""
    usual = method_of("components", "IWTD, L_RE").regulariser
    assert usual is not None
    same = 0
    for row in ABLATIONS[ablation]:
        regulariser = method_of(ablation, row.label).regulariser
        options = None if regulariser is None else dataclasses.asdict(regulariser.options)
        wanted = dataclasses.asdict(usual.options)
        for each in (options, wanted):
            if each is not None:
                each["scores"] = set(each["scores"])
        same += row.method == "drople" and options == wanted
    assert same == 1


# Under a protocol ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ablation", list(ABLATIONS))
def test_every_row_trains_and_stands_in_the_table(ablation: str, four: Path, tmp_path: Path) -> None:
    runs = runs_of(ablation, four)
    assert [run.label for run in runs] == [row.label for row in ABLATIONS[ablation]]
    assert len({run.path for run in runs}) == len(runs)
    records = [record for _, record, _ in benchmark(runs, ROOT, tmp_path)]
    assert [record["error"] for record in records] == [None] * len(runs)
    (table,) = tables(records)
    assert sorted(row.name for row in table.rows) == sorted(row.label for row in ABLATIONS[ablation])
    for form in ("text", "markdown", "latex", "csv"):
        assert render(table, form)
    for run in runs:
        assert run.label in render(table, "markdown").replace("\\", "")


def test_what_is_set_for_all_rows_is_said_and_what_a_row_sets_stays(four: Path) -> None:
    runs = runs_of("range", four, options={"epochs": 1, "lr": "0.01", "p_max": "0.9"}, post_hoc="gla")
    assert [run.options["p_max"] for run in runs] == [0.4, 0.45, 0.5, 0.7]
    assert all(run.options["lr"] == 0.01 for run in runs)
    assert runs[0].label == "range 0-40 (lr=0.01, p_max=0.9)+gla"


def test_runs_without_a_row_keep_their_key() -> None:
    """Records from before rows had names are found again."""
    before = Run("few-shot", "dtd", "coop", 1, 16)
    assert before.key == "f3521ee023", "a new key runs every finished benchmark again"
    assert dataclasses.replace(before, row="x").key != before.key


def test_an_unknown_ablation_suggests_the_nearest() -> None:
    with pytest.raises(DropleError, match="components"):
        plan("base-to-novel", ["a"], [], [1], ablation="component")


def test_the_command_line_runs_an_ablation(four: Path, tmp_path: Path) -> None:
    common = ["--datasets", four, "--seeds", "1", "--shots", "2", "--backbone", BACKBONE, "--epochs", "1"]
    answer = drople("benchmark", "base-to-novel", "--ablation", "residual", *common, "--out", tmp_path)
    assert answer.code == 0, answer.err
    assert "Linear" in answer.out and "Non-linear" in answer.out and "zero-shot" not in answer.out
    assert "[2/2]" in answer.err
    wrong = drople("benchmark", "base-to-novel", "--ablation", "rezidual", *common, "--out", tmp_path)
    assert wrong.code == 2 and "residual" in wrong.err


def test_the_command_line_knows_every_ablation() -> None:
    import typing

    from drople.cli import benchmark as command

    offered = typing.get_type_hints(command)["ablation"]
    literal = next(arg for arg in typing.get_args(offered) if arg is not type(None))
    assert set(typing.get_args(literal)) == set(ABLATIONS)
