"""Class weights that know the training images: the equation, and where they must keep out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import COLOURS, picture, splits, tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_backbone

from drople import PromptLearner
from drople.data import decode, normalise
from drople.methods import Task, make
from drople.methods.base import TrainingData, plain_views
from drople.prototypes import Prototypes


@settings(max_examples=30, deadline=None)
@given(classes=st.integers(1, 5), shots=st.integers(1, 4), dim=st.integers(2, 9), weight=st.floats(0, 3))
def test_the_equation_against_loops(classes: int, shots: int, dim: int, weight: float) -> None:
    words = [f"class {k}" for k in range(classes)]
    draw = torch.Generator().manual_seed(classes * 100 + shots * 10 + dim)
    features = torch.randn(classes * shots, dim, generator=draw)
    labels = torch.arange(classes).repeat(shots)
    text = torch.randn(classes, dim, generator=draw)
    prototypes = Prototypes(words, dim, weight)
    prototypes.hold(features, labels)
    order = list(reversed(range(classes)))
    joined = prototypes.join([words[k] for k in order], text[order])
    for row, k in zip(joined, order, strict=True):
        total = torch.zeros(dim, dtype=torch.float64)
        for x, y in zip(features.double(), labels, strict=True):
            if y == k:
                total += x / x.norm()
        t = text[k].double()
        expected = t / t.norm() + weight * total / total.norm()
        torch.testing.assert_close(row.double(), expected, atol=1e-5, rtol=1e-4)


def test_one_class_that_was_not_trained_on_leaves_all_to_their_text() -> None:
    prototypes, text = Prototypes(("cat", "dog"), 3, 1.0), torch.randn(2, 3)
    prototypes.hold(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    assert torch.equal(prototypes.join(("cat", "zebra"), text), text)
    assert not torch.equal(prototypes.join(("dog", "cat"), text), text)


def test_a_class_without_images_leaves_all_without() -> None:
    prototypes = Prototypes(("cat", "dog"), 3, 1.0)
    prototypes.hold(torch.randn(2, 3), torch.tensor([0, 0]))
    assert not prototypes.means.any()


def test_training_does_not_see_them_and_novel_classes_neither() -> None:
    backbone, task = tiny_backbone(), Task(("cat", "dog"), ("a photo of a {}.",))
    torch.manual_seed(0)
    without: Any = make("drople", backbone, task, {"prototypes": 0.0}).eval()
    torch.manual_seed(0)
    method: Any = make("drople", backbone, task, {"prototypes": 0.7}).eval()
    assert method.trainable == without.trainable
    size = backbone.pixels.size
    images = torch.randint(0, 256, (6, 3, size + 5, size + 5), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    torch.testing.assert_close(method.class_weights(task.words), without.class_weights(task.words))
    method.finish(TrainingData(images, labels, torch.zeros(6, backbone.embed_dim)))
    views = torch.cat(list(plain_views(images, backbone)))
    seen = torch.nn.functional.normalize(method.image_features(views), dim=-1)
    text = without.class_weights(task.words)
    for k, row in enumerate(method.class_weights(task.words)):
        mean = seen[labels == k].sum(0)
        expected = text[k] + 0.7 * mean / mean.norm()
        torch.testing.assert_close(row, expected / expected.norm(), atol=1e-5, rtol=1e-4)
    assert torch.equal(method.class_weights(("zebra", "cat")), without.class_weights(("zebra", "cat")))
    torch.testing.assert_close(method.encode_text(method._sentences), without.encode_text(without._sentences))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_run_keeps_them(weight: float, tmp_path: Path) -> None:
    shown = [(picture(colour, number), colour) for colour in COLOURS for number in range(3)]
    one = PromptLearner(tiny_checkpoint(), epochs=1, prototypes=weight).fit(shown)
    one.save(tmp_path / "run")
    probe = [picture(colour, 50) for colour in COLOURS]
    again = PromptLearner.load(tmp_path / "run")
    np.testing.assert_array_equal(again.predict_proba(probe), one.predict_proba(probe))
    assert ("prototypes.means" in one.method_.state_dict()) == bool(weight)


def test_classes_that_were_not_trained_on_have_their_own_temperature(tmp_path: Path) -> None:
    data = splits(tmp_path / "data", tuple(COLOURS), 6)
    one = PromptLearner(tiny_checkpoint(), epochs=2, prototypes=1.0).fit(data, out=tmp_path / "run")
    assert one.temperature(one.words_) == one.temperature(one.words_[:2]) == one.temperature_
    assert one.temperature(("red", "grey")) == one.text_temperature_ != one.temperature_
    probe, words = [picture("red", 50)], ("grey", "red")
    images = normalise(*_pixels(one, probe))
    logits = one.method_.logits(images, one.method_.weights_by_text(words)).float().cpu()
    expected = (logits / one.text_temperature_).softmax(-1).numpy()
    np.testing.assert_allclose(one.predict_proba(probe, classes=words), expected, atol=1e-5)
    again = PromptLearner.load(tmp_path / "run")
    assert (again.temperature_, again.text_temperature_) == (one.temperature_, one.text_temperature_)
    without = PromptLearner(tiny_checkpoint(), epochs=2, prototypes=0.0).fit(data)
    assert without.temperature_ == without.text_temperature_


def _pixels(learner: PromptLearner, sources: list[Any]) -> tuple[torch.Tensor, Any, torch.dtype]:
    pixels = learner.backbone_.pixels
    images, _, _ = decode(sources, pixels.size, pixels.resample)
    return images.to(learner.backbone_.device), pixels, learner.backbone_.dtype
