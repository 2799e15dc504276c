"""Generalised logit adjustment and the logit-adjusted loss, against slow references and a bias that is known."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import COLOURS, own_folder, splits, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drople import gla
from drople.backbone import Backbone
from drople.data.dataset import load_data
from drople.data.shots import few_shot, only_classes
from drople.learner import PromptLearner
from drople.losses import class_log_prior, cross_entropy
from drople.methods import REGISTRY, Batch, Progress, Task, make
from drople.methods.base import TrainingData
from drople.metrics import accuracy, ece
from drople.protocols import Run, execute, find_data, long_tailed

PULL = 1e-3


def world(classes: int, count: int, seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-shot logits whose bias is known: log p(x|y) of Gaussian classes with the bias log q put in.

    The classes are drawn by a pi_s of their own, so with enough of them q is the minimiser of the risk.
    """
    generator = torch.Generator().manual_seed(seed)
    log_q, log_pi = (
        (scale * torch.randn(classes, generator=generator, dtype=torch.float64)).log_softmax(0)
        for scale in (spread, 0.7)
    )
    centres = 1.2 * torch.randn(classes, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(log_pi.exp(), count, replacement=True, generator=generator)
    points = centres[labels] + torch.randn(count, 3, generator=generator, dtype=torch.float64)
    evidence = -0.5 * torch.cdist(points, centres).square()
    return evidence + log_q, labels, log_q


# The prior and the loss ----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_the_prior_is_the_frequency_of_the_classes(labels: list[int]) -> None:
    counts = [max(1, labels.count(k)) for k in range(6)]
    expected = [math.log(count / sum(counts)) for count in counts]
    got = class_log_prior(torch.tensor(labels), 6)
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert got.exp().sum().item() == pytest.approx(1)


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 10**6))
def test_the_logit_adjusted_loss_is_its_formula(classes: int, count: int, seed: int) -> None:
    """Menon et al.: -log(pi_y e^f_y / sum_k pi_k e^f_k)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (count,), generator=generator)
    prior = torch.rand(classes, generator=generator, dtype=torch.float64).softmax(0)
    expected = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        weighted = [float(p) * math.exp(f) for p, f in zip(prior, row, strict=True)]
        expected -= math.log(weighted[label] / sum(weighted)) / count
    assert cross_entropy(logits, labels, prior.log()).item() == pytest.approx(expected, rel=1e-9)
    uniform = torch.full((classes,), -math.log(classes), dtype=torch.float64)
    plain = cross_entropy(logits, labels)
    assert cross_entropy(logits, labels, uniform).item() == pytest.approx(plain.item(), rel=1e-9)


# The bias of the zero-shot model -------------------------------------------------------------------


def slow_bias(zero_shot: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """The same risk, its gradient by hand, plain descent in float64."""
    count, classes = zero_shot.shape
    logits, target = zero_shot.double(), torch.zeros(count, classes, dtype=torch.float64)
    for i, label in enumerate(labels.tolist()):
        target[i, label] = 1
    log_q = torch.zeros(classes, dtype=torch.float64)
    for _ in range(30_000):
        shares = (logits - log_q + log_prior).softmax(1)
        gradient = (target - shares).mean(0) + 2 * PULL * log_q / classes
        log_q = log_q - gradient
        if float(gradient.abs().max()) < 1e-10:
            break
    return log_q.log_softmax(0)


@pytest.mark.parametrize(
    ("classes", "count", "scale"), [(2, 20, 1.0), (5, 60, 1.0), (4, 40, 4.0), (7, 12, 1.0)]
)
def test_the_estimate_is_the_minimum_of_the_risk(classes: int, count: int, scale: float) -> None:
    zero_shot, labels, _ = world(classes, count, seed=classes)
    prior = class_log_prior(labels, classes)
    got = gla.estimate_label_bias((scale * zero_shot).float(), labels, prior)
    expected = slow_bias((scale * zero_shot).float(), labels, prior)
    assert got.exp().sum().item() == pytest.approx(1)
    assert torch.allclose(got, expected, atol=2e-3), (got, expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_known_bias_is_found(seed: int) -> None:
    classes = 5
    zero_shot, labels, log_q = world(classes, 40_000, seed)
    got = gla.estimate_label_bias(zero_shot, labels, class_log_prior(labels, classes))
    assert torch.allclose(got, log_q, atol=0.12), (got, log_q)
    assert (got - log_q).abs().mean() < 0.06
    assert (log_q - log_q.mean()).abs().max() > 0.5, "the bias is too flat to tell anything"


def test_the_estimate_does_not_hang_on_a_constant_and_stays_finite() -> None:
    zero_shot, labels, _ = world(4, 200, 9)
    prior = class_log_prior(labels, 4)
    here = gla.estimate_label_bias(zero_shot, labels, prior)
    shifted = gla.estimate_label_bias(zero_shot + torch.randn(200, 1) * 30, labels, prior)
    assert torch.allclose(here, shifted, atol=1e-3)
    # Separable, and a class without an image: nothing but the pull holds the estimate.
    sure = 100 * torch.eye(4)[torch.tensor([0, 1, 2, 0])]
    alone = gla.estimate_label_bias(sure, torch.tensor([0, 1, 2, 0]), prior)
    assert alone.isfinite().all()


def test_the_estimate_works_inside_no_grad() -> None:
    zero_shot, labels, _ = world(3, 50, 4)
    prior = class_log_prior(labels, 3)
    outside = gla.estimate_label_bias(zero_shot, labels, prior)
    with torch.no_grad():
        assert torch.equal(gla.estimate_label_bias(zero_shot, labels, prior), outside)


def test_adjust_is_its_formula_and_undoes_both_biases() -> None:
    zero_shot, labels, log_q = world(5, 4000, 7, spread=2.0)
    prior = class_log_prior(labels, 5)
    learned = zero_shot - log_q + prior
    expected = torch.tensor(
        [
            [learned[i, k] + zero_shot[i, k] - prior[k] - log_q[k] for k in range(5)]
            for i in range(len(labels))
        ]
    )
    got = gla.adjust(learned, zero_shot, prior, log_q)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), expected, atol=1e-5)
    without = gla.adjust(learned, zero_shot, None, log_q)
    assert torch.allclose(without.double(), expected + prior, atol=1e-5)
    # Balanced labels: what carries neither bias beats what carries one.
    balanced = torch.multinomial(
        (zero_shot - log_q).softmax(1), 1, generator=torch.Generator().manual_seed(0)
    )[:, 0]
    assert accuracy(got, balanced) > accuracy(zero_shot, balanced) + 0.05
    assert accuracy(got, balanced) > accuracy(learned, balanced)


# Through training and the protocol -----------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> Path:
    return splits(own_folder() / "colours", tuple(COLOURS), 8)


def tail(data: Path, **changed: Any) -> Run:
    common: dict[str, Any] = {"backbone": str(tiny_checkpoint()), "ratio": 4.0, "options": {"epochs": 3}}
    return Run("long-tail", str(data), "coop", 1, 8, **{**common, **changed})


def test_training_adjusts_by_the_frequencies_of_the_samples(data: Path) -> None:
    images = only_classes(load_data(data), [0, 1, 2])
    uneven = [e for e in images.train if e.label == 0] + [e for e in images.train if e.label == 1][:3]
    uneven += [e for e in images.train if e.label == 2][:1]
    learner = PromptLearner(Backbone.load(tiny_checkpoint()), "coop", epochs=1, loss="logit_adjusted")
    learner.fit(replace(images, train=tuple(uneven)), None)
    assert learner.method_.log_prior is not None
    expected = torch.tensor([8 / 12, 3 / 12, 1 / 12]).log()
    assert torch.allclose(learner.method_.log_prior.float().cpu(), expected, atol=1e-6)
    # Few shots are drawn first: their frequencies count, not those of all training images.
    learner.fit(replace(images, train=tuple(uneven)), 2)
    assert torch.allclose(
        learner.method_.log_prior.float().cpu(), torch.tensor([2 / 5, 2 / 5, 1 / 5]).log(), atol=1e-6
    )
    learner.set_params(loss="cross_entropy").fit(replace(images, train=tuple(uneven)), None)
    assert learner.method_.log_prior is None


def by_hand(run: Run, work: Path, log_prior: bool) -> list[float]:
    """Per-class accuracy of GLA on the base classes, from the saved run and the formula."""
    data, _ = find_data(run.dataset, Path("."))
    train, tests = long_tailed(data, run, Path("."))
    learner = PromptLearner.load(work)
    base = next(images for part, images, _ in tests if part == "base")
    learned, zero_shot = (
        torch.cat(
            [
                learner.method_.logits(images, learner.class_weights(learner.words_, learned))
                if learned
                else learner.method_.similarity(
                    learner.backbone_.encode_images(images), learner.class_weights(learner.words_, False)
                )
                for images, _ in learner._batches(base.test)
            ]
        )
        .detach()
        .double()
        .cpu()
        for learned in (True, False)
    )
    labels = torch.tensor([e.label for e in train.train])
    prior = torch.bincount(labels, minlength=len(train.classes)).double()
    prior = (prior / prior.sum()).log()
    bias = slow_bias(learner.zero_shot_logits([e.image for e in train.train])[0], labels, prior)
    final = learned + zero_shot - bias - (prior if log_prior else 0)
    truth = torch.tensor([e.label for e in base.test])
    hits = final.argmax(1) == truth
    return [hits[truth == k].double().mean().item() for k in range(len(train.classes))]


@pytest.mark.parametrize("loss", ["cross_entropy", "logit_adjusted"])
def test_the_protocol_adjusts_the_base_classes_once(data: Path, tmp_path: Path, loss: str) -> None:
    run = tail(data, options={"epochs": 3, "loss": loss}, post_hoc="gla")
    record = execute(run, Path("."), tmp_path / "work")
    assert record["status"] == "done", record["error"]
    base = record["results"]["base"]["per_class"]
    got = [row["accuracy"] for row in base.values()]
    assert got == pytest.approx(by_hand(run, tmp_path / "work", log_prior=loss == "cross_entropy"))
    plain = execute(replace(run, post_hoc=None), Path("."), tmp_path / "plain")
    assert plain["results"]["novel"] == record["results"]["novel"], "novel classes are not adjusted"
    assert plain["samples"] == record["samples"]


def test_the_prior_is_subtracted_where_it_was_learned_and_nowhere_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at `gla.adjust` itself: accuracies of few images may agree by chance."""
    priors: list[Tensor | None] = []
    real = gla.adjust

    def adjust(learned: Tensor, zero_shot: Tensor, log_prior: Tensor | None, log_q: Tensor) -> Tensor:
        priors.append(log_prior)
        return real(learned, zero_shot, log_prior, log_q)

    monkeypatch.setattr(gla, "adjust", adjust)
    cases = {
        "learned": ("coop", "cross_entropy", True),
        "removed by the loss": ("coop", "logit_adjusted", False),
        "never learned": ("zero-shot", "cross_entropy", False),
        "no loss to remove it": ("tip-adapter", "logit_adjusted", True),
        "a ranking has no place for it": ("lfa", "compensated", True),
        "nor has a contrast of images": ("dac-v", "logit_adjusted", True),
        "the text's cross-entropy has": ("dac-vt", "logit_adjusted", False),
    }
    for name, (method, loss, subtracted) in cases.items():
        priors.clear()
        run = replace(tail(data, post_hoc="gla", options={"epochs": 1, "loss": loss}), method=method)
        record = execute(run, Path("."), tmp_path / name)
        assert record["status"] == "done", record["error"]
        assert len(priors) == 2, "of validation and of test images"
        assert all((prior is not None) == subtracted for prior in priors), name


@pytest.mark.parametrize("name", [*REGISTRY, "tip-adapter+drople", "dac-v+drople", "dac-vt+drople"])
def test_a_method_takes_the_prior_where_it_changes_its_losses(name: str) -> None:
    """What a method says of itself, held against its training step, for every method there is."""
    backbone = Backbone.load(tiny_checkpoint())
    method = make(name, backbone, Task(("red", "green", "blue"), ("a photo of a {}.",)), {})
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    images = torch.randint(256, (6, 3, 36, 36), dtype=torch.uint8, generator=generator)
    frozen = torch.randn(6, backbone.embed_dim, generator=generator)
    if not method.trainable:
        assert not method.takes_prior
        return
    method.prepare(TrainingData(images, labels, frozen))
    method.train()
    method.advance(Progress(0, 10, 0, 5))
    side = backbone.pixels.size
    batch = Batch(torch.randn(6, 3, side, side, generator=generator), labels, frozen)
    totals = []
    for prior in (None, class_log_prior(labels, 3).float()):
        method.log_prior = prior
        torch.manual_seed(0)
        totals.append(sum(float(loss.detach()) for loss in method(batch).values()))
    assert (totals[0] != totals[1]) == method.takes_prior


def test_gla_reaches_every_part_whose_classes_were_trained_on(data: Path, tmp_path: Path) -> None:
    """A row called +gla must not be the plain method again: few-shot has no part called base."""
    common: dict[str, Any] = {"backbone": str(tiny_checkpoint()), "options": {"epochs": 1}}
    run = Run("few-shot", str(data), "coop", 1, 2, **common)
    plain = execute(run, Path("."), tmp_path / "plain")
    adjusted = execute(replace(run, post_hoc="gla"), Path("."), tmp_path / "gla")
    assert plain["results"]["test"]["ece_uncalibrated"] != adjusted["results"]["test"]["ece_uncalibrated"]
    assert adjusted["label"] == "coop+gla"


def test_the_temperature_is_that_of_the_adjusted_logits_of_the_validation_images(
    data: Path, tmp_path: Path
) -> None:
    """Calibrated by hand: the temperature, by trying many, of the formula's logits of validation images."""
    run = tail(data, post_hoc="gla")
    base = execute(run, Path("."), tmp_path / "work")["results"]["base"]
    images, _ = find_data(run.dataset, Path("."))
    train, _ = long_tailed(images, run, Path("."))
    learner = PromptLearner.load(tmp_path / "work")
    few = torch.tensor([e.label for e in train.train])
    prior = class_log_prior(few, len(train.classes))
    bias = slow_bias(learner.zero_shot_logits([e.image for e in train.train])[0], few, prior)
    logits, labels = {}, {}
    for part, examples in {"val": train.val, "test": only_classes(images, [0, 1]).test}.items():
        sources = [e.image for e in examples]
        both = learner.logits(sources)[0] + learner.zero_shot_logits(sources)[0]
        logits[part] = both.double() - prior - bias
        labels[part] = torch.tensor([e.label for e in examples])
    tried = [1.02**n for n in range(-200, 200)]
    costs = [cross_entropy(logits["val"] / t, labels["val"]).item() for t in tried]
    best = tried[costs.index(min(costs))]
    assert abs(math.log(best / learner.temperature_)) > 0.1, "too near the temperature without GLA to tell"

    def error(temperature: float) -> float:
        return ece((logits["test"] / temperature).softmax(1), labels["test"])

    near = [error(step * best) for step in (0.98, 0.99, 1, 1.01, 1.02)]
    low, high = min(near) - 1e-3, max(near) + 1e-3
    assert low <= base["ece"] <= high
    assert not low <= error(learner.temperature_) <= high
    assert base["ece_uncalibrated"] == pytest.approx(error(1), abs=1e-3)


def test_without_validation_images_adjusted_logits_stay_as_they_are(tmp_path: Path) -> None:
    folder = splits(tmp_path / "data", tuple(COLOURS), 4)
    for file in (folder / "val").rglob("*.png"):
        file.write_bytes(b"no image")  # of a folder that is not there a part of the training images is made
    record = execute(tail(folder, post_hoc="gla"), Path("."), tmp_path / "work")
    assert record["status"] == "done", record["error"]
    base = record["results"]["base"]
    assert base["ece"] == pytest.approx(base["ece_uncalibrated"])


def test_another_post_hoc_method_is_refused(data: Path, tmp_path: Path) -> None:
    record = execute(tail(data, post_hoc="gla2"), Path("."), tmp_path / "work")
    assert record["status"] == "failed" and "did you mean gla?" in record["error"]


def test_the_tail_of_a_few_shot_draw_is_what_the_prior_counts(data: Path) -> None:
    images, _ = find_data(str(data), Path("."))
    train, _ = long_tailed(images, tail(data), Path("."))
    labels = torch.tensor([e.label for e in train.train])
    assert class_log_prior(labels, 2).exp().tolist() == pytest.approx([8 / 10, 2 / 10])
    assert set(train.train) <= set(few_shot(only_classes(images, [0, 1]).train, 8, 1))
