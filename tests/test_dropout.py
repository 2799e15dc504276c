"""Token dropout: each D(x) by hand, whole towers replayed slowly, and what may never drop."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiny import (
    random_images,
    slow_bridge_attention,
    slow_class_score,
    slow_importance,
    slow_layer,
    slow_linear,
    slow_norm,
    slow_self_score,
    tiny_backbone,
)
from torch import Tensor

import drople.dropout
from drople.backbone import Backbone, Tokens
from drople.dropout import OPERATIONS, DropRule, Modality, TokenDropout
from drople.importance import Bridge, Score

NAMES = ["cat", "red and white striped lighthouse", "golden retriever"]
CONTEXT, SUPPLEMENTARY, VISUAL = 3, 2, 3
EXACT = ["zero", "zero_scaled", "noise"]  # without drops no mask is made either


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rule(**changes: Any) -> DropRule:
    given: dict[str, Any] = {
        "layers": 2,
        "p_min": 0.2,
        "p_max": 0.7,
        "operation": "hide",
        "draw": "layer",
        "rate": "importance",
        "scores": ("class", "self", "cross"),
        "scale": "raw",
        "noise": 0.5,
    }
    return DropRule(**(given | changes))


def bridge_of(backbone: Backbone) -> Bridge:
    torch.manual_seed(5)
    bridge = Bridge(backbone.vision_width, backbone.text_width, tokens=5, dim=7, scaled=True)
    torch.nn.init.normal_(bridge.tokens, std=2.0)
    return bridge


def prompts_of(backbone: Backbone, modality: Modality, depth: int = 2) -> Tensor:
    count, width = VISUAL, backbone.vision_width
    if modality == "text":
        count, width = CONTEXT + SUPPLEMENTARY, backbone.text_width
    drawn = torch.randn(depth, count, width, generator=torch.Generator().manual_seed(2))
    return drawn.to(backbone.dtype)


def encode(
    backbone: Backbone,
    modality: Modality,
    dropout: TokenDropout | None,
    prompts: Tensor | None = None,
    class_words_drop: bool = True,
) -> Tensor:
    prompts = prompts_of(backbone, modality) if prompts is None else prompts
    if modality == "vision":
        return backbone.encode_images(random_images(backbone, 3), prompts=prompts, dropout=dropout)
    sentences = backbone.prompted(NAMES, context=CONTEXT, supplementary=SUPPLEMENTARY)
    return backbone.encode_text(
        sentences, prompts=prompts, dropout=dropout, class_words_drop=class_words_drop
    )


# D(x) ----------------------------------------------------------------------------------------------


def some_tokens() -> tuple[Tokens, Tensor, Tensor]:
    """Two sequences of 6 and 4 tokens with cls in front; which are chosen; with which p."""
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    target = real.clone()
    target[:, 0] = False
    slots = torch.zeros(2, 6, 2, dtype=torch.bool)
    slots[0, 4, 0] = slots[0, 5, 1] = slots[1, 2, 0] = slots[1, 3, 1] = True
    tokens = Tokens(torch.randn(2, 6, 3), torch.tensor([0, 0]), real, target, slots=slots)
    chosen = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    p = torch.tensor([[0, 0.5, 0.1, 0.3, 0.2, 0.4], [0, 0.25, 0.5, 0.1, 0, 0]])
    return tokens, chosen, p


@pytest.mark.parametrize("operation", ["zero", "zero_scaled", "hide"])
def test_operations_against_loops(operation: Any) -> None:
    tokens, chosen, p = some_tokens()
    after = OPERATIONS[operation](tokens, chosen, p, rule())
    for n in range(2):
        for j in range(6):
            expected = tokens.states[n, j]
            if operation == "zero" and chosen[n, j]:
                expected = torch.zeros(3)
            if operation == "zero_scaled":
                expected = torch.zeros(3) if chosen[n, j] else expected / (1 - p[n, j])
            torch.testing.assert_close(after.states[n, j], expected)
    if operation == "hide":
        assert after.hidden is not None and torch.equal(after.hidden, chosen)
        assert torch.equal(after.states, tokens.states)
    for name in ("anchor", "real", "target", "slots"):
        assert torch.equal(getattr(after, name), getattr(tokens, name))


def test_noise_is_gaussian_elementwise_and_only_on_the_chosen() -> None:
    chosen = torch.rand(200, 10) < 0.4
    real = torch.ones(200, 10, dtype=torch.bool)
    tokens = Tokens(torch.randn(200, 10, 12), torch.zeros(200, dtype=torch.long), real, real)
    after = OPERATIONS["noise"](tokens, chosen, torch.zeros(200, 10), rule(noise=0.03)).states
    assert torch.equal(after[~chosen], tokens.states[~chosen])
    epsilon = ((after / tokens.states - 1) / 0.03)[chosen].double()
    count = epsilon.numel()
    assert abs(float(epsilon.mean())) < 4 / math.sqrt(count)
    assert float(epsilon.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / count))
    inside = float((epsilon.abs() < 1).double().mean())
    assert inside == pytest.approx(0.6827, abs=4 * 0.47 / math.sqrt(count))
    assert abs(float((epsilon[:, 0] * epsilon[:, 1]).mean())) < 4 / math.sqrt(len(epsilon)), "not elementwise"


def test_remove_moves_the_rest_together() -> None:
    tokens, chosen, p = some_tokens()
    after = OPERATIONS["remove"](tokens, chosen, p, rule())
    kept = [[0, 2, 3, 5], [0, 1, 3]]
    assert after.states.shape[1] == 4 and after.slots is not None and tokens.slots is not None
    for n, places in enumerate(kept):
        for new, old in enumerate(places):
            assert torch.equal(after.states[n, new], tokens.states[n, old])
            assert torch.equal(after.slots[n, new], tokens.slots[n, old])
            assert after.target[n, new] == tokens.target[n, old]
        assert after.real[n].tolist() == [j < len(places) for j in range(4)]
        assert not after.target[n, len(places) :].any()
    assert after.anchor.tolist() == [0, 0]


def test_remove_finds_the_anchor_again() -> None:
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    tokens = Tokens(torch.randn(2, 5, 3), torch.tensor([4, 2]), real, real)
    chosen = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 0, 0]], dtype=torch.bool)
    after = OPERATIONS["remove"](tokens, chosen, torch.zeros(2, 5), rule())
    assert after.anchor.tolist() == [2, 1]
    assert torch.equal(after.states[0, 2], tokens.states[0, 4])
    assert torch.equal(after.states[1, 1], tokens.states[1, 2])


def test_zero_scaled_keeps_the_expectation() -> None:
    count = 30000
    real = torch.ones(count, 4, dtype=torch.bool)
    target = torch.tensor([False, True, True, True]).expand(count, 4)
    states = torch.tensor([[1.0, -2.0], [3.0, 1.0], [-1.0, 4.0], [2.0, 2.0]]).expand(count, 4, 2)
    tokens = Tokens(states, torch.zeros(count, dtype=torch.long), real, target)
    bridge = Bridge(2, 2, tokens=3, dim=4, scaled=True)
    dropout = TokenDropout(
        rule(operation="zero_scaled", scores=("cross",), p_min=0.1, p_max=0.6), "vision", bridge, record=True
    )
    after = dropout.drop(0, tokens).states
    p = dropout.seen[0].probability[0].double()
    assert len(set(p.tolist())) == 4
    for j in range(4):
        error = 4.5 * math.sqrt(float(p[j]) / (1 - float(p[j])) / count)  # of Bernoulli(1-p)/(1-p)
        for d in range(2):
            x = float(states[0, j, d])
            assert float(after[:, j, d].double().mean()) == pytest.approx(x, abs=abs(x) * error + 1e-6)


# Whole towers, replayed ----------------------------------------------------------------------------


def first_sequence(
    backbone: Backbone, modality: Modality, n: int, prompts: Tensor
) -> tuple[Tensor, int, list[int]]:
    """What layer 0 sees of sequence n: states, the global token's place, the places of the prompts."""
    if modality == "vision":
        tower = backbone.model.vision_model
        image = random_images(backbone, 3)[n : n + 1]
        x = torch.cat([tower.embeddings(image)[0], prompts[0]])
        return slow_norm(tower.pre_layrnorm, x.double()), 0, list(range(len(x) - VISUAL, len(x)))
    embeddings, tokenizer = backbone.model.text_model.embeddings, backbone.tokenizer
    words = tokenizer.words(NAMES[n])
    parts = [[tokenizer.bos], words, [tokenizer.eos]]
    bos, middle, eos = (embeddings.token_embedding(torch.tensor(ids)) for ids in parts)
    x = torch.cat([bos, prompts[0, :CONTEXT], middle, prompts[0, CONTEXT:], eos])
    x = (x + embeddings.position_embedding.weight[: len(x)]).double()
    after = 1 + CONTEXT + len(words)
    return x, len(x) - 1, [*range(1, 1 + CONTEXT), *range(after, after + SUPPLEMENTARY)]


def replay(
    backbone: Backbone, modality: Modality, n: int, prompts: Tensor, dropout: TokenDropout, bridge: Bridge
) -> Tensor:
    """The feature of sequence n with the tokens that `dropout` drew, one token at a time.

    On the way every recorded importance and probability is checked against the slow one.
    """
    drop = dropout.rule
    model = backbone.model
    tower = model.vision_model if modality == "vision" else model.text_model
    x, anchor, places = first_sequence(backbone, modality, n, prompts)
    ids = list(range(len(x)))  # which token of the first sequence stands where
    seen = {record.layer: record for record in dropout.seen}
    hidden: set[int] = set()
    shared: dict[int, float] = {}  # the p of each chosen or kept token, where one draw serves all layers
    for i, layer in enumerate(tower.encoder.layers):
        if 0 < i < len(prompts):
            rows = list(x)
            for m, place in enumerate(places):
                if place in ids:
                    rows[ids.index(place)] = prompts[i, m].double()
            x = torch.stack(rows)
        length = len(ids)
        may_look = torch.zeros(length, length, dtype=torch.bool)
        for q in range(length):
            for k in range(length):
                past = modality == "vision" or k <= q
                may_look[q, k] = past and (ids[k] not in hidden or k == q)
        x, attention = slow_layer(layer, x, may_look)
        hidden = set()
        if i not in dropout.drawing:
            continue
        if i in seen:
            here = ids.index(anchor)
            cross, _ = slow_bridge_attention(bridge.tokens, bridge.project[modality], x, scaled=True)
            by_name = {
                "class": [slow_class_score(attention, here, j) for j in range(length)],
                "self": [slow_self_score(attention, here, length, j) for j in range(length)],
                "cross": [max(cross[:, j].tolist()) for j in range(length)],
            }
            content = [j for j in range(length) if j != here]
            scores = [by_name[name] for name in drop.scores]
            slow = slow_importance(scores, content, drop.scale)
            record = seen[i]
            for j in range(record.chosen.shape[1]):
                assert float(record.importance[n, j]) == pytest.approx(slow.get(j, 0.0), abs=1e-3)
                p = drop.p_max - slow[j] * (drop.p_max - drop.p_min) if j in slow else 0.0
                assert float(record.probability[n, j]) == pytest.approx(p, abs=1e-3)
            chosen = {ids[j] for j in range(length) if record.chosen[n, j]}
            assert not record.chosen[n, length:].any() and anchor not in chosen
            p_of = {ids[j]: float(record.probability[n, j]) for j in range(length)}
            if drop.draw == "shared":
                shared, shared_chosen = p_of, chosen
        else:
            p_of, chosen = shared, shared_chosen
        if drop.operation == "hide":
            hidden = chosen
        elif drop.operation == "remove":
            x = torch.stack([x[j] for j in range(length) if ids[j] not in chosen])
            ids = [token for token in ids if token not in chosen]
        elif drop.operation == "zero":
            x = torch.stack([0 * x[j] if ids[j] in chosen else x[j] for j in range(length)])
        elif drop.operation == "zero_scaled":
            x = torch.stack(
                [0 * x[j] if ids[j] in chosen else x[j] / (1 - p_of[ids[j]]) for j in range(length)]
            )
    end = x[ids.index(anchor)]
    if modality == "vision":
        return slow_linear(model.visual_projection, slow_norm(model.vision_model.post_layernorm, end))
    return slow_linear(model.text_projection, slow_norm(model.text_model.final_layer_norm, end))


def check_replay(modality: Modality, **changes: Any) -> TokenDropout:
    backbone = tiny_backbone(dtype=torch.float64, text_layers=4, image=8)
    bridge, prompts = bridge_of(backbone), prompts_of(backbone, modality)
    torch.manual_seed(1)
    dropout = TokenDropout(rule(layers=3, **changes), modality, bridge, record=True)
    ours = encode(backbone, modality, dropout, prompts)
    assert any(record.chosen.any() for record in dropout.seen)
    for n in range(3):
        with torch.no_grad():
            slow = replay(backbone, modality, n, prompts, dropout, bridge)
        torch.testing.assert_close(ours[n].double(), slow, rtol=1e-5, atol=1e-5)
    plain = encode(backbone, modality, None, prompts)
    assert (plain - ours).abs().max() > 1e-3
    return dropout


@pytest.mark.parametrize("modality", ["vision", "text"])
@pytest.mark.parametrize("draw", ["layer", "shared", "one_layer"])
@pytest.mark.parametrize("operation", ["hide", "zero", "zero_scaled", "remove"])
def test_towers_against_the_slow_replay(modality: Modality, draw: Any, operation: Any) -> None:
    dropout = check_replay(modality, draw=draw, operation=operation)
    layers = [record.layer for record in dropout.seen]
    if draw == "layer":
        assert layers == [0, 1, 2]
        if operation == "hide":
            masks = [record.chosen for record in dropout.seen]
            assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    elif draw == "shared":
        assert layers == [0] and dropout.drawing == {0, 1, 2}
    else:
        assert len(layers) == 1 and set(layers) == dropout.drawing


@pytest.mark.parametrize("modality", ["vision", "text"])
@pytest.mark.parametrize("scores", [("class",), ("self",), ("cross",), ("class", "cross")])
def test_each_score_alone_against_the_slow_replay(modality: Modality, scores: Any) -> None:
    check_replay(modality, scores=scores, scale=("raw", "sum", "rank")[len(scores) - 1])


@pytest.mark.parametrize("modality", ["vision", "text"])
@pytest.mark.parametrize("operation", ["hide", "zero", "remove"])
def test_everything_may_drop_but_the_global_token(modality: Modality, operation: Any) -> None:
    dropout = check_replay(modality, operation=operation, p_min=1.0, p_max=1.0)
    assert all(int((~r.chosen & (r.probability > 0)).sum()) == 0 for r in dropout.seen)


def test_a_hidden_token_is_intact_and_sees_itself() -> None:
    """One layer by hand: others get nothing of the hidden token, it gets what it would have got."""
    backbone = tiny_backbone(dtype=torch.float64)
    layer = backbone.vision[0]
    real = torch.ones(1, 5, dtype=torch.bool)
    states = torch.randn(1, 5, backbone.vision_width, dtype=torch.float64)
    chosen = torch.tensor([[False, False, True, False, False]])
    tokens = Tokens(states, torch.tensor([0]), real, real)

    def run(x: Tensor, hide: bool) -> Tensor:
        given = OPERATIONS["hide"](dataclasses.replace(tokens, states=x), chosen, torch.zeros(1, 5), rule())
        mask = given.visible(causal=False) if hide else None
        return layer(x, mask)[0]

    plain, hidden = run(states, False), run(states, True)
    torch.testing.assert_close(hidden[2], plain[2])
    assert all((hidden[j] - plain[j]).abs().max() > 1e-3 for j in (0, 1, 3, 4))
    changed = states.clone()
    changed[0, 2] += torch.randn(backbone.vision_width, dtype=torch.float64)
    again = run(changed, True)
    for j in (0, 1, 3, 4):
        assert torch.equal(again[j], hidden[j])
    assert (again[2] - hidden[2]).abs().max() > 1e-2


def test_hiding_lasts_one_layer() -> None:
    """Dropout at layer 0 alone: the tokens count again from layer 2 on."""
    backbone = tiny_backbone(dtype=torch.float64)
    torch.manual_seed(3)
    dropout = TokenDropout(rule(layers=1, p_min=1.0, p_max=1.0), "vision", bridge_of(backbone))
    images = random_images(backbone, 1).requires_grad_()
    prompts = prompts_of(backbone, "vision").requires_grad_()
    backbone.encode_images(images, prompts=prompts, dropout=dropout).square().sum().backward()
    assert prompts.grad is not None and prompts.grad[1].abs().max() > 1e-6


# What may drop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_words_drop", [True, False])
def test_targets_of_text(class_words_drop: bool) -> None:
    """Paper: all but eos. Released code: not the class words either. Padding never."""
    backbone = tiny_backbone()
    torch.manual_seed(1)
    dropout = TokenDropout(rule(p_min=0.4, p_max=0.9), "text", bridge_of(backbone), record=True)
    encode(backbone, "text", dropout, class_words_drop=class_words_drop)
    for record in dropout.seen:
        for n, name in enumerate(NAMES):
            words = len(backbone.tokenizer.words(name))
            eos = 1 + CONTEXT + words + SUPPLEMENTARY
            for j, p in enumerate(record.probability[n].tolist()):
                is_word = 1 + CONTEXT <= j < 1 + CONTEXT + words
                may = j < eos and (class_words_drop or not is_word)
                assert (0.4 - 1e-6 <= p <= 0.9 + 1e-6) if may else p == 0, (name, j)
                assert may or not record.chosen[n, j]


def test_targets_of_vision() -> None:
    backbone = tiny_backbone()
    dropout = TokenDropout(rule(p_min=0.4, p_max=0.9), "vision", bridge_of(backbone), record=True)
    encode(backbone, "vision", dropout)
    for record in dropout.seen:
        assert record.probability.shape == (3, 1 + 9 + VISUAL)
        assert torch.count_nonzero(record.probability[:, 0]) == 0 and not record.chosen[:, 0].any()
        assert record.probability[:, 1:].min() >= 0.4 - 1e-6 and record.probability.max() <= 0.9 + 1e-6


@pytest.mark.parametrize("modality", ["vision", "text"])
def test_uniform_is_p_max_for_every_target(modality: Modality) -> None:
    backbone = tiny_backbone()
    dropout = TokenDropout(rule(rate="uniform"), modality, record=True)
    encode(backbone, modality, dropout)
    for record in dropout.seen:
        assert record.probability.unique().tolist() == pytest.approx([0.0, 0.7])
        if modality == "vision":
            assert int((record.probability > 0).sum()) == 3 * (9 + VISUAL)
        else:
            lengths = [len(backbone.tokenizer.words(name)) for name in NAMES]
            assert int((record.probability > 0).sum()) == sum(lengths) + 3 * (1 + CONTEXT + SUPPLEMENTARY)


@pytest.mark.parametrize("rate", ["importance", "uniform"])
def test_the_empirical_rate_is_p(rate: Any) -> None:
    """One sequence many times: each token drops as often as its p says, cls and padding never."""
    count = 20000
    real = torch.tensor([True] * 7 + [False] * 2).expand(count, 9)
    target = real & (torch.arange(9) != 0)
    states = torch.randn(1, 9, 4).expand(count, 9, 4)
    tokens = Tokens(states, torch.zeros(count, dtype=torch.long), real, target)
    bridge = Bridge(4, 4, tokens=3, dim=5, scaled=True)
    asked = rule(rate=rate, scores=("cross",), p_min=0.1, p_max=0.5)
    dropout = TokenDropout(asked, "vision", bridge, record=True)
    hidden = dropout.drop(0, tokens).hidden
    assert hidden is not None
    p = dropout.seen[0].probability[0].double()
    assert p[[0, 7, 8]].tolist() == [0, 0, 0] and float(p.max()) == pytest.approx(0.5)
    assert float(p[1:7].min()) == pytest.approx(0.1 if rate == "importance" else 0.5)
    often = hidden.double().mean(0)
    for j in range(9):
        error = 4.5 * math.sqrt(float(p[j] * (1 - p[j])) / count)
        assert float(often[j]) == pytest.approx(float(p[j]), abs=error)
    pairs = float((hidden[:, 1] & hidden[:, 2]).double().mean())
    error = 4.5 * 0.5 / math.sqrt(count)
    assert pairs == pytest.approx(float(p[1] * p[2]), abs=error), "tokens do not drop independently"
    assert float(dropout.drop_rate()) == pytest.approx(int(hidden.sum()) / (6 * count))


def test_one_layer_takes_every_layer_in_turn() -> None:
    counts = [0] * 4
    for seed in range(200):
        torch.manual_seed(seed)
        (layer,) = TokenDropout(rule(layers=4, draw="one_layer", rate="uniform"), "vision").drawing
        counts[layer] += 1
    assert min(counts) > 25 and sum(counts) == 200


# Nothing and the same ------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["vision", "text"])
@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("draw", ["layer", "shared", "one_layer"])
def test_without_drops_features_are_unchanged(modality: Modality, operation: Any, draw: Any) -> None:
    backbone = tiny_backbone()
    bridge = bridge_of(backbone)
    plain = encode(backbone, modality, None)
    no_layers = TokenDropout(rule(layers=0, operation=operation, draw=draw), modality, bridge)
    assert torch.equal(encode(backbone, modality, no_layers), plain)
    never = TokenDropout(rule(p_min=0.0, p_max=0.0, operation=operation, draw=draw), modality, bridge)
    features = encode(backbone, modality, never)
    if operation in EXACT:
        assert torch.equal(features, plain)
    torch.testing.assert_close(features, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("modality", ["vision", "text"])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_the_same_seed_gives_the_same_bytes(modality: Modality, operation: Any) -> None:
    backbone = tiny_backbone()
    bridge = bridge_of(backbone)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return encode(backbone, modality, TokenDropout(rule(operation=operation), modality, bridge))

    assert torch.equal(run(4), run(4))
    assert not torch.equal(run(4), run(5))


@pytest.mark.parametrize("modality", ["vision", "text"])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_importance_of_a_sequence_does_not_depend_on_the_others(modality: Modality, operation: Any) -> None:
    """Longer neighbours mean padding; the first draw sees the same numbers with and without."""
    backbone = tiny_backbone()
    bridge, prompts = bridge_of(backbone), prompts_of(backbone, modality)
    records = []
    for rows in ([0, 1, 2], [0]):
        dropout = TokenDropout(rule(operation=operation, layers=1), modality, bridge, record=True)
        if modality == "vision":
            backbone.encode_images(random_images(backbone, 3)[rows], prompts=prompts, dropout=dropout)
        else:
            names = [NAMES[n] for n in rows]
            sentences = backbone.prompted(names, context=CONTEXT, supplementary=SUPPLEMENTARY)
            backbone.encode_text(sentences, prompts=prompts, dropout=dropout)
        records.append(dropout.seen[0])
    among, alone = records[0].importance[0], records[1].importance[0]
    torch.testing.assert_close(among[: len(alone)], alone, rtol=1e-4, atol=1e-4)


# What it costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["vision", "text"])
def test_scores_keep_no_graph_but_features_do(modality: Modality) -> None:
    backbone = tiny_backbone()
    prompts = prompts_of(backbone, modality).requires_grad_()
    dropout = TokenDropout(rule(), modality, bridge_of(backbone), record=True)
    features = encode(backbone, modality, dropout, prompts)
    for record in dropout.seen:
        for tensor in (*record.scores.values(), record.importance, record.probability):
            assert not tensor.requires_grad
    features.square().sum().backward()
    assert prompts.grad is not None and prompts.grad.abs().amax(dim=(1, 2)).min() > 0
    bridge = dropout.bridge
    assert bridge is not None and all(p.grad is None for p in bridge.parameters())


def test_no_attention_scores_where_none_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()
    bridge = bridge_of(backbone)
    layers: list[int] = []
    real = drople.dropout.attention_scores

    def counting(*given: Any) -> dict[Score, Tensor]:
        layers.append(1)
        return real(*given)

    monkeypatch.setattr(drople.dropout, "attention_scores", counting)
    for asked, maps in (
        (rule(scores=("cross",)), 0),
        (rule(rate="uniform"), 0),
        (rule(layers=0), 0),
        (rule(scores=("class",)), 2),
        (rule(scores=("self", "cross"), draw="shared"), 1),
        (rule(draw="one_layer"), 1),
    ):
        layers.clear()
        encode(backbone, "vision", TokenDropout(asked, "vision", bridge))
        assert len(layers) == maps, asked
