"""The residual, its entropy, the schedule and the losses, against loops in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_images, tiny_backbone
from torch import Tensor

from drople.dropout import TokenDropout
from drople.errors import DropleError
from drople.losses import cross_entropy, kl_consistency, l1_consistency, l2_consistency
from drople.methods.base import Batch, Task
from drople.methods.drople import DeepPromptOptions, DroPLe
from drople.options import build
from drople.regulariser import Branches, DropleOptions, Progress, Regulariser
from drople.residual_entropy import (
    entropy,
    lambda_schedule,
    residual,
    textual_residual_entropy,
    visual_residual_entropy,
)

ON: list[Any] = ["embeddings", "unit"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit(a: list[float]) -> list[float]:
    return [x / math.sqrt(dot(a, a)) for x in a]


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def slow_entropy(p: list[float]) -> float:
    return -sum(q * math.log(q) for q in p if q > 0)


def slow_residual(z_d: list[float], z_o: list[float], lam: float, on: str) -> list[float]:
    """z^r as it enters the similarity: of the embeddings and then unit, or of unit vectors as it is."""
    if on == "unit":
        z_d, z_o = unit(z_d), unit(z_o)
    rest = [(d - lam * o) / (1 - lam) for d, o in zip(z_d, z_o, strict=True)]
    return rest if on == "unit" else unit(rest)


def slow_visual(z_d: Tensor, z_o: Tensor, classes: Tensor, lam: float, scale: float, on: str) -> float:
    values = []
    for d, o in zip(z_d.tolist(), z_o.tolist(), strict=True):
        rest = slow_residual(d, o, lam, on)
        p = softmax([scale * dot(rest, unit(w)) for w in classes.tolist()])
        values.append(-slow_entropy(p))
    return sum(values) / len(values)


def slow_textual(w_d: Tensor, w_o: Tensor, images: Tensor, lam: float, scale: float, on: str) -> float:
    """One distribution over the classes for each frozen image."""
    rests = [slow_residual(d, o, lam, on) for d, o in zip(w_d.tolist(), w_o.tolist(), strict=True)]
    values = []
    for image in images.tolist():
        p = softmax([scale * dot(unit(image), rest) for rest in rests])
        values.append(-slow_entropy(p))
    return sum(values) / len(values)


# The residual --------------------------------------------------------------------------------------


@given(lam=st.floats(0, 0.95), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_residual_inverts_the_mixture(lam: float, seed: int) -> None:
    z_o, z_r = random(2, 3, 7, seed=seed)
    torch.testing.assert_close(residual(lam * z_o + (1 - lam) * z_r, z_o, lam), z_r)


def test_without_lambda_the_residual_is_the_feature_itself() -> None:
    z_d, z_o = random(2, 3, 7)
    assert torch.equal(residual(z_d, z_o, 0.0), z_d)


def test_lambda_schedule() -> None:
    assert lambda_schedule(0.1, 0.0) == 0
    assert lambda_schedule(0.1, 1.0) == pytest.approx(0.1 * (1 - 11**-0.75))
    assert lambda_schedule(0.1, 1.0) == pytest.approx(0.083, abs=5e-4)  # the released code's last value
    assert lambda_schedule(0.4, 0.3) == pytest.approx(0.4 * (1 - 4**-0.75))
    values = [lambda_schedule(1.0, t / 50) for t in range(51)]
    assert all(a < b for a, b in itertools.pairwise(values))
    assert all(0 <= v < 1 for v in values)


@pytest.mark.parametrize("by", ["iteration", "epoch"])
def test_the_clock_of_lambda(by: str) -> None:
    regulariser = Regulariser(tiny_backbone(), DropleOptions(lambda_by=by, lambda0=0.5))
    done = {"iteration": 30 / 40, "epoch": 1 / 4}[by]
    expected = 0.5 * (1 - (1 + 10 * done) ** -0.75)
    assert float(regulariser.lam) == 0
    regulariser.advance(Progress(step=30, steps=40, epoch=1, epochs=4))
    assert float(regulariser.lam) == pytest.approx(expected)
    assert "lam" not in regulariser.state_dict(), "lambda is no learned state"


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(DropleError, match="lambda_by"):
        build(DropleOptions, {"lambda_by": "iterations"})


# Its entropy ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    batch=st.integers(1, 4),
    classes=st.integers(1, 6),
    lam=st.floats(0, 0.9),
    scale=st.floats(0.5, 30),
    on=st.sampled_from(ON),
)
def test_residual_entropies_against_loops(
    seed: int, batch: int, classes: int, lam: float, scale: float, on: Any
) -> None:
    z_d, z_o = 3 * random(2, batch, 5, seed=seed)
    w_d, w_o = 2 * random(2, classes, 5, seed=seed + 1)
    visual = float(visual_residual_entropy(z_d, z_o, w_o, lam, scale, on))
    textual = float(textual_residual_entropy(w_d, w_o, z_o, lam, scale, on))
    assert visual == pytest.approx(slow_visual(z_d, z_o, w_o, lam, scale, on), abs=1e-9)
    assert textual == pytest.approx(slow_textual(w_d, w_o, z_o, lam, scale, on), abs=1e-9)
    for loss in (visual, textual):
        assert -math.log(classes) - 1e-9 <= loss <= 1e-9


def test_entropy_bounds_and_extremes() -> None:
    assert float(entropy(torch.zeros(3, 8, dtype=torch.float64))) == pytest.approx(math.log(8))
    certain = torch.tensor([[1000.0, 0.0, 0.0], [0.0, 0.0, 2000.0]], requires_grad=True)
    value = entropy(certain)
    assert float(value.detach()) == 0
    value.backward()
    assert certain.grad is not None and torch.isfinite(certain.grad).all()
    rows = random(4, 5)
    expected = sum(slow_entropy(softmax(row)) for row in rows.tolist()) / 4
    assert float(entropy(rows)) == pytest.approx(expected)


@pytest.mark.parametrize("on", ON)
def test_less_residual_entropy_loss_is_less_certainty(on: Any) -> None:
    """Descending on it makes p(y | z^r) more even; the frozen side gets no say in the sign."""
    z_o, w_o = random(3, 5), random(4, 5, seed=1)
    z_d = random(3, 5, seed=2).requires_grad_()
    before = visual_residual_entropy(z_d, z_o, w_o, 0.08, 10.0, on)
    (gradient,) = torch.autograd.grad(before, z_d)
    after = slow_visual((z_d - 1e-3 * gradient).detach(), z_o, w_o, 0.08, 10.0, on)
    assert after < float(before.detach())


# losses.py -----------------------------------------------------------------------------------------


def test_losses_against_loops() -> None:
    logits, frozen = 3 * random(2, 4, 5)
    labels = torch.tensor([1, 0, 4, 2])
    rows = [softmax(row) for row in logits.tolist()]
    expected = -sum(math.log(p[label]) for p, label in zip(rows, labels.tolist(), strict=True)) / 4
    assert float(cross_entropy(logits, labels)) == pytest.approx(expected)
    prior = [0.4, 0.3, 0.15, 0.1, 0.05]
    adjusted = 0.0
    for p, label in zip(rows, labels.tolist(), strict=True):
        weighed = [a * b for a, b in zip(p, prior, strict=True)]
        adjusted -= math.log(weighed[label] / sum(weighed)) / 4
    log_prior = torch.tensor(prior, dtype=torch.float64).log()
    assert float(cross_entropy(logits, labels, log_prior)) == pytest.approx(adjusted)

    others = [softmax(row) for row in frozen.tolist()]
    kl = 0.0
    for p, q in zip(others, rows, strict=True):
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert float(kl_consistency(logits, frozen)) == pytest.approx(kl / 20)
    assert float(kl_consistency(logits, logits)) == pytest.approx(0, abs=1e-12)

    learned, kept = 2 * random(2, 3, 6, seed=1)
    pairs = [(unit(a), unit(b)) for a, b in zip(learned.tolist(), kept.tolist(), strict=True)]
    l1 = sum(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))
    l2 = sum((x - y) ** 2 for a, b in pairs for x, y in zip(a, b, strict=True))
    assert float(l1_consistency(learned, kept)) == pytest.approx(l1 / 18)
    assert float(l2_consistency(learned, kept)) == pytest.approx(l2 / 3)
    assert float(l2_consistency(learned, 5 * learned)) == pytest.approx(0, abs=1e-12)


# Together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ON)
def test_the_regulariser_weighs_its_terms(on: Any) -> None:
    options = DropleOptions(
        residual_on=on,
        residual_entropy_visual=0.3,
        residual_entropy_text=0.7,
        l1_text=25.0,
        l1_image=10.0,
        kl=2.5,
        alignment=0.0,
        lambda0=0.6,
    )
    backbone = tiny_backbone()
    regulariser = Regulariser(backbone, options)
    z_d, z_o = random(2, 3, 5)
    w_d, w_o = random(2, 4, 5, seed=1)
    logits, frozen = random(2, 3, 4, seed=2)
    branches = Branches(z_d, w_d, z_o, w_o, logits, frozen)
    vision, text = regulariser.dropout("vision"), regulariser.dropout("text")
    regulariser.advance(Progress(step=5, steps=10, epoch=0, epochs=1))
    losses = regulariser.losses(branches, vision, text)
    lam, scale = 0.6 * (1 - 6**-0.75), backbone.logit_scale
    expected = {
        "residual_entropy_visual": 0.3 * slow_visual(z_d, z_o, w_o, lam, scale, on),
        "residual_entropy_text": 0.7 * slow_textual(w_d, w_o, z_o, lam, scale, on),
        "l1_text": 25 * float(l1_consistency(w_d, w_o)),
        "l1_image": 10 * float(l1_consistency(z_d, z_o)),
        "kl": 2.5 * float(kl_consistency(logits, frozen)),
    }
    assert {name: float(loss) for name, loss in losses.items()} == pytest.approx(expected)
    off = Regulariser(backbone, DropleOptions(residual_entropy_visual=0.0, residual_entropy_text=0.0))
    assert off.losses(branches, vision, text) == {}


def test_algorithm_1_end_to_end() -> None:
    """L = L_CE + L_RE^v + L_RE^t of one step, put together by hand from the method's own features."""
    backbone = tiny_backbone()
    task = Task(("cat", "golden retriever", "soup bowl"), ("a photo of a {}.",))
    torch.manual_seed(0)
    method = DroPLe(backbone, task, DeepPromptOptions(text_depth=2, supplementary=2, visual_depth=3))
    method.wrap(
        Regulariser(
            backbone,
            DropleOptions(
                vision_dropout_layers=3,
                text_dropout_layers=2,
                residual_entropy_visual=1.0,
                residual_entropy_text=1.0,
                alignment=0.0,
                bridge_tokens=4,
                bridge_dim=6,
                lambda0=0.5,
            ),
        )
    )
    plain = random_images(backbone, 4)
    images, labels = random_images(backbone, 4, seed=9), torch.tensor([2, 0, 1, 2])
    z_o = backbone.encode_images(plain)
    batch = Batch(images, labels, z_o)
    torch.manual_seed(7)
    method.advance(Progress(step=20, steps=40, epoch=0, epochs=1))
    losses = method.training_step(batch)
    assert set(losses) == {"cross_entropy", "residual_entropy_visual", "residual_entropy_text"}

    torch.manual_seed(7)
    regulariser = method.regulariser
    assert regulariser is not None and method.visual_prompts is not None
    vision, text = regulariser.dropout("vision"), regulariser.dropout("text", rows=labels)
    with torch.no_grad():
        z_d = backbone.encode_images(images, prompts=method.visual_prompts(), dropout=vision)
        sentences = backbone.prompted(task.words, context=4, supplementary=2)
        w_d = backbone.encode_text(sentences, prompts=method.text_prompts(), dropout=text)
        w_o = backbone.encode_text(backbone.sentences([f"a photo of a {word}." for word in task.words]))
    lam, scale = 0.5 * (1 - 6**-0.75), backbone.logit_scale
    ce = 0.0
    for z, label in zip(z_d.tolist(), labels.tolist(), strict=True):
        ce -= math.log(softmax([scale * dot(unit(z), unit(w)) for w in w_d.tolist()])[label]) / 4
    expected = {
        "cross_entropy": ce,
        "residual_entropy_visual": slow_visual(z_d, z_o, w_o, lam, scale, "embeddings"),
        "residual_entropy_text": slow_textual(w_d, w_o, z_o, lam, scale, "embeddings"),
    }
    assert {name: float(loss.detach()) for name, loss in losses.items()} == pytest.approx(expected, abs=1e-4)
    torch.stack(list(losses.values())).sum().backward()
    learned = dict(method.named_parameters())
    for name, parameter in learned.items():
        if "bridge" not in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert float(method.monitor["lambda"]) == pytest.approx(lam)

    # Inference has no dropout: the same every time, and independent of the seed.
    method.eval()
    without = backbone.encode_images(images, prompts=method.visual_prompts())
    assert torch.equal(method.image_features(images), without)
    assert torch.equal(method.class_features(task.words), method.class_features(task.words))


@pytest.mark.parametrize("detached", [True, False])
def test_alignment_trains_the_bridge_and_prompts_only_if_asked(detached: bool) -> None:
    backbone = tiny_backbone()
    task = Task(("cat", "golden retriever", "soup bowl"), ("a photo of a {}.",))
    method = DroPLe(backbone, task, DeepPromptOptions(text_depth=2, supplementary=2, visual_depth=3))
    method.wrap(
        Regulariser(backbone, DropleOptions(alignment=2.0, alignment_detached=detached, bridge_dim=6))
    )
    images = random_images(backbone, 2)
    batch = Batch(images, torch.tensor([2, 1]), backbone.encode_images(images))
    losses = method.training_step(batch)
    losses["alignment"].backward()
    assert 0 <= float(losses["alignment"].detach()) <= 2
    for name, parameter in method.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
        assert moved == ("bridge" in name or not detached), name


def test_options_that_cannot_be() -> None:
    with pytest.raises(DropleError, match="p_min"):
        DropleOptions(p_min=0.6, p_max=0.5)
    with pytest.raises(DropleError, match="p_max must be below 1"):
        DropleOptions(operation="zero_scaled", p_max=1.0)
    with pytest.raises(DropleError, match="scores"):
        DropleOptions(scores=())


def test_dropout_layers_are_capped_at_the_tower() -> None:
    regulariser = Regulariser(tiny_backbone(text_layers=3, vision_layers=4), DropleOptions())
    assert regulariser.layers == {"vision": 4, "text": 3}
    assert len(regulariser.notes) == 2 and "6" in regulariser.notes[0] and "4" in regulariser.notes[0]
    dropout = regulariser.dropout("text")
    assert isinstance(dropout, TokenDropout) and dropout.rule.layers == 3
