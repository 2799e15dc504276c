"""Scores and importance against loops over one sequence at a time, in float64."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import slow_bridge_attention, slow_class_score, slow_importance, slow_self_score
from torch import Tensor

from drople.backbone import Tokens
from drople.dropout import drop_probability
from drople.importance import (
    SCALES,
    Bridge,
    Modality,
    Scale,
    attention_map,
    class_score,
    cross_attention,
    cross_score,
    importance,
    self_score,
)

TOLERANCE = 2e-6  # scores are float32 by design


@dataclass(frozen=True)
class Case:
    """Sequences of random lengths with random queries and keys."""

    tokens: Tokens
    query: Tensor
    key: Tensor
    lengths: list[int]
    causal: bool

    @property
    def map(self) -> Tensor:
        mask = self.tokens.visible(self.causal)
        return attention_map(self.query, self.key, self.query.shape[-1] ** -0.5, mask, self.causal)

    def content(self, n: int) -> list[int]:
        return [j for j in range(self.lengths[n]) if j != int(self.tokens.anchor[n])]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count, heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(2, 7), min_size=count, max_size=count))
    longest = max(lengths)
    causal = draw(st.booleans())
    last = causal or draw(st.booleans())  # a causal tower's global token is its last
    torch.manual_seed(draw(st.integers(0, 999)))
    query, key = 2 * torch.randn(2, count, heads, longest, size, dtype=torch.float64)
    real = torch.tensor([[j < n for j in range(longest)] for n in lengths])
    anchor = torch.tensor([n - 1 if last else 0 for n in lengths])
    target = real.clone()
    target[torch.arange(count), anchor] = False
    states = torch.randn(count, longest, draw(st.integers(2, 6)), dtype=torch.float64)
    tokens = Tokens(states, anchor, real, target, padded=not causal)
    return Case(tokens, query, key, lengths, causal)


def slow_map(case: Case, n: int) -> Tensor:
    """softmax(q k / sqrt(size)) over the real keys that a query may see. [H, L, L] of the real tokens."""
    length, size = case.lengths[n], case.query.shape[-1]
    heads = []
    for q, k in zip(case.query[n], case.key[n], strict=True):
        head = torch.zeros(length, length, dtype=torch.float64)
        for i in range(length):
            seen = range(i + 1) if case.causal else range(length)
            weights = [math.exp(float(q[i] @ k[j]) / math.sqrt(size)) for j in seen]
            for j, weight in zip(seen, weights, strict=True):
                head[i, j] = weight / sum(weights)
        heads.append(head)
    return torch.stack(heads)


def close(ours: Tensor, slow: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours.double(), slow.double(), rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), scale=st.sampled_from(tuple(SCALES)))
def test_attention_scores_and_importance_against_loops(case: Case, scale: Scale) -> None:
    attention = case.map
    by_class, by_self = class_score(attention, case.tokens), self_score(attention.clone(), case.tokens)
    ours = importance([by_class, by_self], case.tokens, scale)
    p = drop_probability(ours, case.tokens.target, 0.1, 0.5)
    for n, length in enumerate(case.lengths):
        slow, anchor, content = slow_map(case, n), int(case.tokens.anchor[n]), case.content(n)
        close(attention[n, :, :length, :length], slow)
        slow_class = [slow_class_score(slow, anchor, j) for j in range(length)]
        slow_self = [slow_self_score(slow, anchor, length, j) for j in range(length)]
        for j in content:
            assert float(by_class[n, j]) == pytest.approx(slow_class[j], abs=TOLERANCE)
            assert float(by_self[n, j]) == pytest.approx(slow_self[j], abs=TOLERANCE)
        means = [(a + b) / 2 for a, b in zip(slow_class, slow_self, strict=True)]
        spread = max(means[j] for j in content) - min(means[j] for j in content)
        if 0 < spread < 1e-3:
            continue  # min-max of nearly equal numbers magnifies float32's rounding
        expected = slow_importance([slow_class, slow_self], content, scale)
        for j in range(ours.shape[1]):
            assert float(ours[n, j]) == pytest.approx(expected.get(j, 0.0), abs=2e-3), (n, j)
            if j in content:
                assert float(p[n, j]) == pytest.approx(0.5 - expected[j] * 0.4, abs=1e-3)
            else:
                assert p[n, j] == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=cases(),
    xi=st.integers(1, 5),
    dim=st.integers(1, 6),
    scaled=st.booleans(),
    modality=st.sampled_from(["vision", "text"]),
)
def test_bridge_against_loops(case: Case, xi: int, dim: int, scaled: bool, modality: Modality) -> None:
    states = case.tokens.states.float()
    tokens = dataclasses.replace(case.tokens, states=states)
    other = states.shape[-1] + 1
    widths = (states.shape[-1], other) if modality == "vision" else (other, states.shape[-1])
    bridge = Bridge(*widths, tokens=xi, dim=dim, scaled=scaled)
    torch.nn.init.normal_(bridge.tokens, std=1.5)
    assert bridge.tokens.shape == (xi, dim)
    attention = cross_attention(bridge.carried(modality), states, tokens.real)
    score = cross_score(bridge.carried(modality), tokens)
    pooled = bridge.pool(modality, states, tokens.real)
    for n, length in enumerate(case.lengths):
        slow, projected = slow_bridge_attention(
            bridge.tokens, bridge.project[modality], states[n, :length], scaled=scaled
        )
        close(attention[n, :, :length], slow, 1e-5)
        assert torch.count_nonzero(attention[n, :, length:]) == 0
        close(score[n, :length], torch.tensor([max(slow[:, j].tolist()) for j in range(length)]), 1e-5)
        slow_pool = torch.zeros(xi, dim, dtype=torch.float64)
        for kappa in range(xi):
            for j in range(length):
                slow_pool[kappa] += slow[kappa, j] * projected[j]
        close(pooled[n], slow_pool, 1e-4)


def test_all_three_scores_are_averaged() -> None:
    torch.manual_seed(0)
    real = torch.ones(1, 5, dtype=torch.bool)
    tokens = Tokens(torch.randn(1, 5, 4), torch.tensor([0]), real, real)
    scores = [torch.rand(1, 5) for _ in range(3)]
    lists = [score[0].tolist() for score in scores]
    for scale in SCALES:
        expected = slow_importance(lists, [1, 2, 3, 4], scale)
        ours = importance(scores, tokens, scale)
        close(ours[0], torch.tensor([0.0] + [expected[j] for j in range(1, 5)]))
        assert ours[0, 1:].min() == 0 and ours[0, 1:].max() == 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=cases())
def test_padding_and_the_global_token_never_count(case: Case) -> None:
    """Other numbers in padded queries, keys, states and scores: nothing changes for a real token."""
    tokens = dataclasses.replace(case.tokens, states=case.tokens.states.float())
    real = tokens.real
    states = torch.where(real[..., None], tokens.states, 50 * torch.randn_like(tokens.states))
    other = dataclasses.replace(
        case,
        tokens=dataclasses.replace(tokens, states=states),
        query=torch.where(real[:, None, :, None], case.query, 50 * torch.randn_like(case.query)),
        key=torch.where(real[:, None, :, None], case.key, 50 * torch.randn_like(case.key)),
    )
    bridge = Bridge(states.shape[-1], 3, tokens=4, dim=5, scaled=True)
    close(bridge.pool("vision", tokens.states, real), bridge.pool("vision", states, real), 1e-5)
    results = []
    for each in (dataclasses.replace(case, tokens=tokens), other):
        attention = each.map
        scores = [
            class_score(attention, each.tokens),
            self_score(attention, each.tokens),
            cross_score(bridge.carried("vision"), each.tokens),
        ]
        results.append((scores, [importance(scores, each.tokens, scale) for scale in SCALES]))
    (scores, ours), (scores_again, again) = results
    for one, two in zip([*scores, *ours], [*scores_again, *again], strict=True):
        close(one[tokens.content], two[tokens.content], 1e-5)
    loud = [torch.where(tokens.content, s, torch.full_like(s, 9.0)) for s in scores]
    for scale, one in zip(SCALES, ours, strict=True):
        close(importance(loud, tokens, scale), one, 1e-5)
        assert torch.count_nonzero(one[~tokens.content]) == 0


def test_self_score_leaves_out_itself_and_the_global_token() -> None:
    """A token that looks almost only at itself and at cls has a small score."""
    rows = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.07, 0.03], [0.0, 0.9, 0.1, 0.0], [0.25] * 4]
    attention = torch.tensor([[rows]])
    real = torch.ones(1, 4, dtype=torch.bool)
    tokens = Tokens(torch.zeros(1, 4, 2), torch.tensor([0]), real, real)
    close(self_score(attention.clone(), tokens)[0, 1:], torch.tensor([0.07, 0.9, 0.25]))
    close(class_score(attention, tokens)[0, 1:], torch.tensor([0.2, 0.3, 0.4]))
    as_text = dataclasses.replace(tokens, anchor=torch.tensor([3]))
    close(self_score(attention.clone(), as_text)[0, :3], torch.tensor([0.3, 0.5, 0.9]))
    close(class_score(attention, as_text)[0, :3], torch.tensor([0.25] * 3))


def test_bos_sees_only_itself() -> None:
    real = torch.ones(1, 4, dtype=torch.bool)
    tokens = Tokens(torch.zeros(1, 4, 2), torch.tensor([3]), real, real)
    attention = attention_map(torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 3), 1.0, None, True)
    assert attention[0, :, 0].tolist() == [[1, 0, 0, 0]] * 2
    assert self_score(attention, tokens)[0, 0] == 0


def test_tokens_that_are_alike_get_one_half() -> None:
    real = torch.tensor([[True] * 4 + [False], [True, True, False, False, False]])
    tokens = Tokens(torch.zeros(2, 5, 2), torch.tensor([3, 1]), real, real)
    ours = importance([torch.full((2, 5), 0.2)], tokens)
    assert ours.tolist() == [[0.5, 0.5, 0.5, 0, 0], [0.5, 0, 0, 0, 0]]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), batch=st.integers(1, 3), layers=st.integers(1, 3))
def test_alignment_against_loops(seed: int, batch: int, layers: int) -> None:
    torch.manual_seed(seed)
    bridge = Bridge(5, 3, tokens=4, dim=6, scaled=False)
    torch.nn.init.normal_(bridge.tokens)

    def sequences(width: int, length: int) -> list[tuple[Tensor, Tensor]]:
        real = torch.arange(length) < torch.randint(1, length + 1, (batch, 1))
        return [(torch.randn(batch, length, width), real) for _ in range(layers)]

    vision, text = sequences(5, 7), sequences(3, 4)
    terms = []
    for layer in range(layers):
        for b in range(batch):
            pooled = []
            for name, (states, real) in (("vision", vision[layer]), ("text", text[layer])):
                attention, projected = slow_bridge_attention(
                    bridge.tokens, bridge.project[name], states[b, : int(real[b].sum())], scaled=False
                )
                pooled.append(attention @ projected)
            for v, t in zip(*pooled, strict=True):
                cosine = float(v @ t) / math.sqrt(float(v @ v) * float(t @ t))
                terms.append((1 - cosine) / 2)
    assert len(terms) == layers * batch * 4
    loss = bridge.alignment(vision, text)
    assert float(loss.detach()) == pytest.approx(sum(terms) / len(terms), abs=1e-5)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in bridge.parameters())


def test_alignment_is_zero_for_the_same_and_one_for_the_opposite() -> None:
    bridge = Bridge(4, 4, tokens=3, dim=5, scaled=True)
    vision, text = bridge.project["vision"], bridge.project["text"]
    one = [(torch.randn(2, 1, 4), torch.ones(2, 1, dtype=torch.bool))]
    for sign, loss in ((1, 0.0), (-1, 1.0)):
        text.load_state_dict({name: sign * weight for name, weight in vision.state_dict().items()})
        assert float(bridge.alignment(one, one).detach()) == pytest.approx(loss, abs=1e-6)


def test_alignment_of_towers_with_unlike_numbers_of_layers() -> None:
    torch.manual_seed(0)
    bridge = Bridge(4, 3, tokens=3, dim=5, scaled=True)
    vision = [(torch.randn(2, 6, 4), torch.ones(2, 6, dtype=torch.bool)) for _ in range(2)]
    text = [(torch.randn(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)) for _ in range(3)]
    assert torch.equal(bridge.alignment(vision, text), bridge.alignment(vision, text[:2]))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    value=st.floats(0, 1, width=32),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    target=st.booleans(),
)
def test_drop_probability(value: float, bounds: list[float], target: bool) -> None:
    low, high = bounds
    p = float(drop_probability(torch.tensor([value]), torch.tensor([target]), low, high))
    assert p == pytest.approx(high - value * (high - low) if target else 0.0, abs=1e-6)
    assert drop_probability(torch.tensor([1.0, 0.0]), torch.tensor([True, True]), 0.1, 0.5).tolist() == (
        pytest.approx([0.1, 0.5])
    )
