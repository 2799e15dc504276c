"""What only a GPU can show. `DROPLE_TEST_GPU=1` runs all other tests on it too."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import picture, splits, tiny_checkpoint
from test_methods import LEARNERS, NAMES

from drople.learner import PromptLearner
from drople.progress import Quiet, Update
from drople.records import read_tensors

if not torch.cuda.is_available():
    pytest.skip("no GPU here, or DROPLE_TEST_GPU=1 is not set", allow_module_level=True)

# Steps that are no graph run too, slower: of the methods that say they can be one, all must.
pytestmark = pytest.mark.filterwarnings("error:a step is no CUDA graph")
PROBE = [picture(colour, number) for colour in ("red", "green", "blue") for number in range(40, 44)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splits(tmp_path_factory.mktemp("data") / "colours", count=4)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_says_the_same_on_both(name: str, data: Path, tmp_path: Path) -> None:
    made = PromptLearner(tiny_checkpoint(), name, epochs=2, device="cpu", precision="float32").fit(data)
    made.save(tmp_path / "run")
    there = PromptLearner.load(tmp_path / "run", device="cuda")
    np.testing.assert_allclose(there.predict_proba(PROBE), made.predict_proba(PROBE), atol=2e-3)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "float32"])
@pytest.mark.parametrize("name", LEARNERS)
def test_every_method_trains_in_every_kind_of_number(name: str, precision: str, data: Path) -> None:
    made = PromptLearner(tiny_checkpoint(), name, epochs=3, batch_size=4, device="cuda", precision=precision)
    made.fit(data)
    assert all(bool(p.isfinite().all()) for p in made.method_.parameters())
    assert np.isfinite(made.predict_proba(PROBE)).all()


@pytest.mark.parametrize("name", ["drople", "coop", "clip-lora"])
def test_fp16_whose_first_steps_overflow(name: str, data: Path) -> None:
    """The scale of fp16 begins far too large: steps are left out until it fits, and momentum must not know of them."""
    made = PromptLearner(
        tiny_checkpoint(), name, epochs=6, batch_size=4, device="cuda", precision="fp16", optimizer="sgd"
    ).fit(data)
    assert all(bool(p.isfinite().all()) and float(p.abs().max()) < 100 for p in made.method_.parameters())


class StopsAt(Quiet):
    """Somebody who presses Ctrl-C when training has done so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    @contextmanager
    def task(self, what: str, total: int) -> Iterator[Update]:
        def update(done: int, values: object = None, **more: object) -> None:
            if what.startswith("training") and done >= self.step:
                raise KeyboardInterrupt

        yield update


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["drople", "coop", "prometar"])
def test_a_run_that_was_stopped_goes_on(name: str, precision: str, data: Path, tmp_path: Path) -> None:
    def learner(progress: Quiet) -> PromptLearner:
        given = {"device": "cuda", "precision": precision, "progress": progress}
        return PromptLearner(tiny_checkpoint(), name, epochs=6, batch_size=4, **given)

    learner(Quiet()).fit(data, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        learner(StopsAt(9)).fit(data, out=tmp_path / "stopped")
    learner(Quiet()).fit(data, out=tmp_path / "stopped", resume=True)
    whole, resumed = (read_tensors(tmp_path / run / "prompts.safetensors")[0] for run in ("whole", "stopped"))
    for key, value in whole.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-2, atol=1e-3)
