"""The ablations of DroPLe: other rates, other pulls to the frozen branch, the non-linear residual."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import random_images, tiny_backbone
from torch import Tensor

from drople.attribution import SHARE, FirstPass, highest
from drople.backbone import Tokens
from drople.dropout import DropRule, TokenDropout, in_runs
from drople.errors import DropleError
from drople.methods import Batch, Progress, Task, make
from drople.nonlinear_residual import NonlinearResidual
from drople.regulariser import Branches, DropleOptions, Regulariser
from drople.unimodal import CELLS, Standout, density, group_value, principal_coordinates

TASK = Task(("cat", "golden retriever", "soup bowl"), ("a photo of a {}.",))
RATES: Any = ["uniform", "block", "group", "standout"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rule(**changes: Any) -> DropRule:
    given: dict[str, Any] = {
        "layers": 2,
        "p_min": 0.2,
        "p_max": 0.6,
        "operation": "zero",
        "draw": "layer",
        "rate": "uniform",
        "scores": ("class",),
        "scale": "raw",
        "noise": 0.0,
    }
    return DropRule(**(given | changes))


def some_tokens(count: int = 3, length: int = 9, width: int = 8) -> Tokens:
    """cls in front; the last sequence has two tokens of padding."""
    real = torch.ones(count, length, dtype=torch.bool)
    real[-1, -2:] = False
    target = real.clone()
    target[:, 0] = False
    return Tokens(torch.randn(count, length, width), torch.zeros(count, dtype=torch.long), real, target)


# Rates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.3, 0.5])
def test_runs_of_three_drop_at_the_overall_rate(p: float) -> None:
    target = torch.ones(20000, 12, dtype=torch.bool)
    target[:, 0] = False
    chosen = in_runs(p, target, 3)
    assert not chosen[:, 0].any()
    error = 4 * math.sqrt(p * (1 - p) / len(target))
    for share in chosen[:, 1:].double().mean(0).tolist():  # edges as often as the middle
        assert share == pytest.approx(p, abs=error)
    # Away from the edges no run is shorter than three.
    for row in chosen[:500, 1:].tolist():
        runs = "".join("x" if dropped else "." for dropped in row).strip("x").split(".")
        assert all(len(run) >= 3 for run in runs if run)
    # Two neighbours: neither of four possible runs starts, against 1 - p for one of them.
    quiet = (1 - p) ** (1 / 3)
    both = float((chosen[:, 4] & chosen[:, 5]).double().mean())
    assert both == pytest.approx(1 - 2 * quiet**3 + quiet**4, abs=error)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_runs_at_the_ends_of_the_range(p: float) -> None:
    target = torch.rand(5, 7) < 0.7
    assert torch.equal(in_runs(p, target, 3), target if p else torch.zeros_like(target))


def slow_density(states: Tensor, counted: Tensor) -> list[int]:
    """Of one sequence: PCA by an eigensolver, then cells, one token at a time."""
    x = states[counted].double()
    x = x - x.mean(0)
    axes = torch.linalg.eigh(x.T @ x).eigenvectors[:, -2:].flip(1)
    at = x @ axes
    cells = []
    for place in at:
        cell = []
        for axis in range(2):
            low, high = float(at[:, axis].min()), float(at[:, axis].max())
            cell.append(min(int((float(place[axis]) - low) / (high - low) * CELLS), CELLS - 1))
        cells.append(tuple(cell))
    return [cells.count(cell) for cell in cells]


def spread(tokens: Tokens) -> Tokens:
    """Two directions far ahead of the others, so that ten iterations find what an eigensolver finds."""
    states = tokens.states.clone()
    states[..., 0] *= 30
    states[..., 1] *= 8
    turn = torch.linalg.qr(torch.randn(states.shape[-1], states.shape[-1])).Q
    return Tokens(states @ turn + 3, tokens.anchor, tokens.real, tokens.target)


def test_density_against_an_eigensolver() -> None:
    tokens = spread(some_tokens(count=6, length=15))
    found = density(tokens.states, tokens.content)
    for n in range(6):
        content = tokens.content[n]
        counts = slow_density(tokens.states[n], content)
        # A sign of its own turns an axis of the grid around, and with it what a cell border belongs to.
        assert found[n, content].tolist() == counts
        assert (found[n, ~content] == 0).all()
    along = principal_coordinates(tokens.states, tokens.content)
    torch.testing.assert_close((along**2).sum(1), torch.ones(6, 2))


def test_tokens_that_repeat_each_other_drop_more_often() -> None:
    """A crowd of seven and four tokens far off, in two directions."""
    tokens = some_tokens(count=1, length=12)
    states = 0.01 * tokens.states
    far = torch.tensor([6.0, -3.0, 4.0, -2.0])
    states[0, 8:10, 0], states[0, 10:12, 1] = far[:2], far[2:]
    alone = Tokens(states, tokens.anchor, torch.ones(1, 12, dtype=torch.bool), tokens.real)
    alone.target[0, 0] = False
    value = group_value(alone)[0]
    assert (value[1:8] == 0).all() and (value[8:] == 1).all()
    dropout = TokenDropout(rule(rate="group"), "vision", record=True)
    dropout.drop(0, alone)
    p = dropout.seen[0].probability[0]
    torch.testing.assert_close(p[1:8], torch.full((7,), 0.6))
    torch.testing.assert_close(p[8:10], torch.full((2,), 0.2))


def test_sequences_with_nothing_to_group() -> None:
    tokens = some_tokens(count=2, length=4)
    alike = Tokens(torch.ones(2, 4, 8), tokens.anchor, tokens.real, tokens.target)
    lonely = Tokens(tokens.states[:, :1], tokens.anchor, tokens.real[:, :1], tokens.target[:, :1])
    for case in (alike, lonely):
        value = group_value(case)
        assert value.isfinite().all() and (value >= 0).all() and (value <= 1).all()


def test_standout_draws_by_its_gates_and_learns_them() -> None:
    tokens = some_tokens()
    standout = Standout(8, 5)
    weight, bias = standout.gate["vision"].weight, standout.gate["vision"].bias
    dropout = TokenDropout(rule(rate="standout"), "vision", standout=standout, record=True)
    after = dropout.drop(0, tokens)
    seen = dropout.seen[0]
    values = torch.zeros(3, 9)
    for n in range(3):
        for j in range(9):
            x = tokens.states[n, j]
            x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
            values[n, j] = torch.sigmoid(weight[0] @ x + bias[0]).detach()
    torch.testing.assert_close(seen.probability, (0.6 - 0.4 * values) * tokens.target)
    # Forward nothing is scaled; backward a gate's gradient is that of a factor on its token.
    expected = tokens.states.masked_fill(seen.chosen[..., None], 0.0)
    torch.testing.assert_close(after.states.detach(), expected)
    factor = standout.value("vision", tokens)
    probe = torch.randn_like(expected)
    scaled = factor[..., None] * expected * tokens.target[..., None]
    wanted = torch.autograd.grad((scaled * probe).sum(), weight)
    found = torch.autograd.grad((after.states * probe).sum(), weight)
    torch.testing.assert_close(found[0], wanted[0])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("operation", ["hide", "zero_scaled", "remove"])
def test_every_rate_with_other_operations(rate: Any, operation: Any) -> None:
    backbone = tiny_backbone()
    regulariser = Regulariser(backbone, DropleOptions(rate=rate, operation=operation, p_max=0.6))
    images = random_images(backbone, 4)
    features = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        dropout = regulariser.dropout("vision", record=True)
        features.append(backbone.encode_images(images, dropout=dropout))
        for seen in dropout.seen:
            assert not seen.chosen[:, 0].any(), "cls never drops"
            assert (seen.probability <= 0.6 + 1e-6).all() and (seen.probability >= 0).all()
    assert torch.equal(features[0], features[2]) and not torch.equal(features[0], features[1])
    assert features[0].isfinite().all()
    # What is asked of attention costs; these rates ask nothing.
    assert regulariser.bridge is None and dropout.watch(0, some_tokens()) is None


# Attribution ---------------------------------------------------------------------------------------


def test_the_highest_against_sorting_one_sequence_at_a_time() -> None:
    attribution = torch.randn(40, 13).round(decimals=1)  # some alike
    target = torch.rand(40, 13) < torch.rand(40, 1)
    for share in (0.0, 0.3, 0.5, 1.0):
        found = highest(attribution, target, share)
        for n in range(40):
            places = [j for j in range(13) if target[n, j]]
            count = math.ceil(round(share * len(places), 6))
            places.sort(key=lambda j: -float(attribution[n, j]))
            assert found[n].nonzero().flatten().tolist() == sorted(places[:count])


@contextmanager
def column(layer: Any, sequence: int, token: int, factor: float) -> Iterator[None]:
    """One column of a layer's attention maps times a factor, by the value that it weighs."""
    at = torch.zeros(sequence + 1, token + 1)
    at[sequence, token] = factor - 1

    def scaled(states: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        count, length = len(value), value.shape[2]
        where = torch.nn.functional.pad(at, (0, length - token - 1, 0, count - sequence - 1))
        return plain(states, query, key, value * (1 + where[:, None, :, None]), *rest)

    plain, layer._leave = layer._leave, scaled
    yield
    layer._leave = plain


def attributed(**options: Any) -> tuple[Any, Tensor, Batch]:
    """DroPLe with AD-DROP in an epoch with dropout; a batch in which each class is some image's best or not."""
    backbone = tiny_backbone()
    method: Any = make("drople", backbone, TASK, {"rate": "attribution", "supplementary": 2, **options})
    images = random_images(backbone, 3)
    method.advance(Progress(5, 10, 1, 2))
    return method, images, Batch(images, torch.arange(3), backbone.encode_images(images))


@pytest.mark.parametrize("modality", ["vision", "text"])
def test_attributions_are_those_of_small_changes(modality: str) -> None:
    """A dF/dA is what F changes by when A is scaled: every column of every map is, one after the other."""
    method, images, _ = attributed()
    first = FirstPass(2), FirstPass(2)
    own, which = method._best_logits(images, *first), int(modality == "text")
    found = first[which].candidates(own[which])
    assert found.keys() == {(0, 0), (1, 0)}
    best = method.similarity(method.image_features(images), method.class_features(TASK.words)).argmax(
        1 - which
    )
    layers = getattr(method.backbone, modality)
    for (layer, _), (_, target) in first[which].seen.items():
        for n in range(3):
            changes = {}
            for j in target[n].nonzero().flatten().tolist():
                logits = []
                for factor in (1.05, 0.95):
                    with torch.no_grad(), column(layers[layer + 1], n, j, factor):
                        visual, textual = method.image_features(images), method.class_features(TASK.words)
                    pair = (int(best[n]), n) if which else (n, int(best[n]))
                    logits.append(float(method.similarity(visual, textual)[pair]))
                changes[j] = logits[0] - logits[1]
            count = math.ceil(round(SHARE * len(changes), 6))
            expected = sorted(sorted(changes, key=lambda j: -changes[j])[:count])
            assert found[layer, 0][n].nonzero().flatten().tolist() == expected


def test_candidates_drop_with_q_and_no_others() -> None:
    method, images, batch = attributed(p_max=1.0)
    vision, text = method.forward_branches(batch).dropouts
    for dropout in (vision, text):
        dropout.record = True
    # The tiny text tower has three layers, and all drop: after the last there is no attention.
    assert [len(vision.candidates), len(text.candidates)] == [4 - 1, 3 - 1]
    method.encode_images(images, vision)
    method.encode_text(method._sentences, text)
    for dropout in (vision, text):
        for seen in dropout.seen:
            candidates = dropout.candidates.get((seen.layer, 0))
            assert torch.equal(
                seen.chosen, torch.zeros_like(seen.chosen) if candidates is None else candidates
            )
    method.regulariser.strength.fill_(0.25)
    vision.seen.clear()
    method.encode_images(images, vision)
    assert set(vision.seen[0].probability.unique().tolist()) == {0.0, 0.25}


def test_every_other_epoch_is_without_dropout() -> None:
    method, _, batch = attributed()
    dropped = []
    for epoch in range(4):
        method.advance(Progress(5, 10, epoch, 4))
        method.training_step(batch)
        dropped.append(float(method.monitor["drop_rate_vision"]) > 0)
    assert dropped == [False, True, False, True]


@pytest.mark.parametrize("name", ["coop+drople", "cocoop+drople", "maple+drople"])
def test_attribution_in_chunks_and_without_prompts_in_a_tower(name: str) -> None:
    """Classes in chunks that are computed again in the backward pass have the same candidates and gradients."""
    found = []
    for room in (2**40, 1):
        torch.manual_seed(0)
        backbone = tiny_backbone()
        backbone.activation_bytes = room
        method: Any = make(name, backbone, TASK, {"rate": "attribution", "p_max": 1.0})
        images = random_images(backbone, 4)
        method.advance(Progress(5, 10, 1, 2))
        losses = method.training_step(Batch(images, torch.arange(4) % 3, backbone.encode_images(images)))
        torch.stack(list(losses.values())).sum().backward()
        found.append([p.grad for p in method.parameters()] + [method.monitor["drop_rate_text"]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_attribution_needs_tokens_in_their_places() -> None:
    with pytest.raises(DropleError, match="remove"):
        DropleOptions(rate="attribution", operation="remove")


# Consistency and the residual ----------------------------------------------------------------------


def branches(width: int) -> Branches:
    images, frozen_images = torch.randn(2, 4, width).double()
    classes, frozen_classes = torch.randn(2, 3, width).double()
    logits, frozen_logits = torch.randn(2, 4, 3).double()
    return Branches(images, classes, frozen_images, frozen_classes, logits, frozen_logits)


def slow_cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float(a @ b / (a @ a).sqrt() / (b @ b).sqrt())


def test_cosine_and_l2_pulls_against_loops() -> None:
    backbone = tiny_backbone()
    quiet: Any = {"residual_entropy_visual": 0.0, "residual_entropy_text": 0.0, "alignment": 0.0}
    regulariser = Regulariser(backbone, DropleOptions(cosine=3.0, l2=0.5, **quiet))
    of = branches(6)
    losses = regulariser.losses(of, regulariser.dropout("vision"), regulariser.dropout("text"))
    cosine = l2 = 0.0
    for learned, frozen in ((of.images, of.frozen_images), (of.classes, of.frozen_classes)):
        for a, b in zip(learned, frozen, strict=True):
            cosine += (1 - slow_cosine(a, b)) / len(learned)
            l2 += float((a / a.norm() - b / b.norm()).square().sum()) / len(learned)
    assert {n: float(v) for n, v in losses.items()} == pytest.approx({"cosine": 3 * cosine, "l2": 0.5 * l2})


def test_the_guessed_residual() -> None:
    of = branches(20)
    module = NonlinearResidual(20).double()
    image = of.images.clone().requires_grad_()
    guess = module.residual(image, of.frozen_images)
    for n in range(4):
        x = torch.cat([of.images[n] / of.images[n].norm(), of.frozen_images[n] / of.frozen_images[n].norm()])
        torch.testing.assert_close(guess[n], module.guess(x))
    guess.square().sum().backward()
    assert image.grad is not None and bool(image.grad.abs().max() > 0)
    assert all(p.grad is None for p in module.parameters()), "entropy may not train the guess"
    off = module.loss(image, of.frozen_images)
    expected = 0.0
    for n in range(4):
        x = torch.cat([of.frozen_images[n] / of.frozen_images[n].norm(), guess[n] / guess[n].norm()])
        expected += (1 - slow_cosine(module.rebuild(x), of.images[n])) / 4
    assert float(off.detach()) == pytest.approx(expected)
    image.grad = None
    off.backward()
    assert image.grad is None and all(p.grad is not None for p in module.parameters())


def test_a_network_learns_to_rebuild() -> None:
    of = branches(20)
    module = NonlinearResidual(20).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    values = []
    for _ in range(60):
        loss = module.loss(of.images, of.frozen_images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < 0.1 * values[0]


@pytest.mark.parametrize(
    "options",
    [{"rate": rate} for rate in [*RATES, "attribution"]]
    + [{"residual": "nonlinear"}, {"cosine": 2.0}, {"l2": 8.0}],
    ids=str,
)
def test_each_trains_all_that_it_adds(options: dict[str, Any]) -> None:
    backbone = tiny_backbone()
    method = make("drople", backbone, TASK, {"bridge_dim": 6, "alignment": 1.0, **options})
    images = random_images(backbone, 6)
    batch = Batch(images, torch.arange(6) % 3, backbone.encode_images(images))
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-2)
    started = {n: p.detach().clone() for n, p in method.named_parameters()}
    totals = []
    for _ in range(5):
        torch.manual_seed(3)
        method.advance(Progress(1, 10, 0, 1))
        total = torch.stack(list(method.training_step(batch).values())).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        totals.append(float(total.detach()))
    assert all(math.isfinite(t) for t in totals) and totals[-1] < totals[0]
    assert not [n for n, p in method.named_parameters() if torch.equal(started[n], p)]
