"""Losses for a long tail: the priors against counts by hand, and every method trained with each."""

import math
from dataclasses import replace

import pytest
import torch
from checkpoints import COLOURS, own_folder, splits, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_images, tiny_backbone

from drople import PromptLearner
from drople.backbone import Backbone
from drople.data import load_data
from drople.losses import class_log_prior, cross_entropy
from drople.methods import REGISTRY, Task, make
from drople.methods.base import TrainingData
from drople.training import Training, TrainingOptions

UNTRAINED = {"zero-shot", "zero-shot-ensemble", "tip-adapter"}
# Trained by other losses than cross-entropy: contrast among images, and ranks.
NO_CROSS_ENTROPY = {"dac-v", "lfa"}


def slow_loss(logits: list[list[float]], labels: list[int], counts: list[float]) -> float:
    """The mean of -log(n_y e^f_y / sum_k n_k e^f_k), one image at a time."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        weighted = [n * math.exp(f) for n, f in zip(counts, row, strict=True)]
        total -= math.log(weighted[label] / sum(weighted)) / len(labels)
    return total


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 10**6))
def test_both_losses_against_counts(labels: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    batch = torch.randint(5, (6,), generator=generator)
    counts = [labels.count(k) for k in range(5)]
    for compensated, own in ((False, [max(1, n) for n in counts]), (True, [n + 1 for n in counts])):
        prior = class_log_prior(torch.tensor(labels), 5, compensated=compensated)
        assert prior.exp().sum().item() == pytest.approx(1)
        expected = slow_loss(logits.tolist(), batch.tolist(), [float(n) for n in own])
        assert cross_entropy(logits, batch, prior).item() == pytest.approx(expected, rel=1e-9)


def test_compensation_is_gentler_with_the_tail() -> None:
    labels = torch.tensor([0] * 100 + [1])
    plain, gentle = (class_log_prior(labels, 2, compensated=c) for c in (False, True))
    assert (plain[0] - plain[1]).exp().item() == pytest.approx(100)
    assert (gentle[0] - gentle[1]).exp().item() == pytest.approx(101 / 2)
    balanced = torch.arange(12) % 3
    assert torch.allclose(class_log_prior(balanced, 3), class_log_prior(balanced, 3, compensated=True))


@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - UNTRAINED))
def test_every_method_that_trains_takes_the_prior(name: str) -> None:
    """Two images of one class and one of two others: the first loss differs as the priors do."""
    backbone = tiny_backbone()
    images = torch.randint(0, 256, (4, 3, 14, 14), dtype=torch.uint8)
    frozen = backbone.encode_images(random_images(backbone, 4))
    data = TrainingData(images, torch.tensor([0, 0, 1, 2]), frozen)
    found = []
    for loss in ("cross_entropy", "logit_adjusted", "compensated"):
        torch.manual_seed(0)
        method = make(name, backbone, Task(("cat", "dog", "soup bowl"), ("a photo of a {}.",)), {})
        options = TrainingOptions(batch_size=4, loss=loss, augmentation="none")  # type: ignore[arg-type]
        training = Training(method, data, options, seed=0, precision="auto")
        found.append(float(training._step(torch.arange(4))["loss"]))
    assert all(math.isfinite(value) for value in found)
    assert len(set(found)) == (1 if name in NO_CROSS_ENTROPY else 3)


def test_a_learner_counts_its_own_samples() -> None:
    data = load_data(splits(own_folder() / "tail", tuple(COLOURS)[:2], 4))
    uneven = [e for e in data.train if e.label == 0] + [e for e in data.train if e.label == 1][:1]
    few = sum(e.label == 0 for e in uneven)
    learner = PromptLearner(Backbone.load(tiny_checkpoint()), "coop", epochs=1, loss="compensated")
    learner.fit(replace(data, train=tuple(uneven)), None)
    assert learner.method_.log_prior is not None
    expected = torch.tensor([few + 1, 2.0])
    assert torch.allclose(learner.method_.log_prior.cpu(), (expected / expected.sum()).log(), atol=1e-6)
