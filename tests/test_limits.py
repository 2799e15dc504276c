"""Section 8 of the foundation: sizes, memory and the cost of a step, with the embedded backbone."""

import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from checkpoints import picture

from drople.learner import PromptLearner

STEP = Path(__file__).parent.parent / "benchmarks" / "step.py"


def benchmark(*arguments: object) -> str:
    if not STEP.exists():
        pytest.skip("the benchmarks are part of the repository only")
    command = [sys.executable, str(STEP), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_one_step_at_a_thousand_classes_stays_under_3_gb() -> None:
    said = benchmark("--memory", "--classes", 1000, "--batch", 32)
    found = re.search(r"1000 classes.*peak memory ([0-9.]+) GB", said)
    assert found and 0.2 < float(found[1]) < 3


def test_a_step_costs_little_more_than_one_without_dropout() -> None:
    """The claim is 1.4 on a quiet machine; here, on a busy one, only that nothing is badly wrong."""
    found = re.search(r"ratio +([0-9.]+)", benchmark("--steps", 3, "--batch", 8, "--classes", 10))
    assert found and 0.5 < float(found[1]) < 2.5


def test_what_was_learned_is_small(tmp_path: Path) -> None:
    pairs = [(picture(c, n), c) for c in ("red", "blue") for n in range(2)]
    PromptLearner(epochs=1, batch_size=4).fit(pairs, out=tmp_path / "run")
    assert 10_000 < (tmp_path / "run/prompts.safetensors").stat().st_size < 1_000_000
    assert sum(file.stat().st_size for file in (tmp_path / "run").iterdir()) < 1_100_000


def test_the_embedded_backbone_is_at_most_26_mb() -> None:
    with resources.as_file(resources.files("drople") / "assets") as assets:
        files = [file for file in assets.rglob("*") if file.is_file()]
        assert any(file.suffix == ".safetensors" for file in files)
        assert sum(file.stat().st_size for file in files) <= 26_000_000
