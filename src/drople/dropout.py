"""Token dropout: which tokens drop at a layer, how likely, and what dropping does to them.

Section "Token Dropout" of the paper. It knows sequences of tokens and nothing of who holds the prompts.
The operation D(x), the rate and the draw are exchanged by name; a new one is one function.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from drople.backbone.layer import Watch
from drople.backbone.tokens import Tokens
from drople.importance import (
    Bridge,
    Modality,
    Scale,
    Score,
    attention_scores,
    cross_score,
    importance,
    padded,
)
from drople.unimodal import Standout, group_value

Operation = Literal["hide", "zero", "zero_scaled", "noise", "remove"]
Draw = Literal["layer", "shared", "one_layer"]
Rate = Literal["importance", "uniform", "block", "group", "standout", "attribution"]

BLOCK = 3  # consecutive tokens that drop together with the rate `block` (the paper's ablation)


@dataclass(frozen=True)
class DropRule:
    """How tokens drop in one tower."""

    layers: int  # the first so many layers have dropout
    p_min: float
    p_max: float
    operation: Operation
    draw: Draw
    rate: Rate  # `uniform` is vanilla dropout: every target token with p_max; `block` too, in runs
    scores: tuple[Score, ...]
    scale: Scale  # of each score before they are averaged
    noise: float  # standard deviation of `noise`


# D(x): what becomes of the chosen tokens. (tokens, chosen [N, L], p [N, L], rule) -> tokens


def zero(tokens: Tokens, chosen: Tensor, p: Tensor, rule: DropRule) -> Tokens:
    return replace(tokens, states=tokens.states.masked_fill(chosen[..., None], 0.0))


def zero_scaled(tokens: Tokens, chosen: Tensor, p: Tensor, rule: DropRule) -> Tokens:
    """Zero, and 1/(1-p) for the kept, so that the expectation stays (section "Adaptive Dropout")."""
    factor = (~chosen).to(p.dtype) / (1 - p)
    return replace(tokens, states=tokens.states * factor[..., None].to(tokens.states.dtype))


def noise(tokens: Tokens, chosen: Tensor, p: Tensor, rule: DropRule) -> Tokens:
    """x (1 + sigma eps), elementwise (released code)."""
    factor = 1 + rule.noise * torch.randn_like(tokens.states)
    return replace(tokens, states=torch.where(chosen[..., None], tokens.states * factor, tokens.states))


def hide(tokens: Tokens, chosen: Tensor, p: Tensor, rule: DropRule) -> Tokens:
    """The next layer's other tokens cannot attend to the chosen ones; the tokens themselves are intact."""
    return replace(tokens, hidden=chosen)


def remove(tokens: Tokens, chosen: Tensor, p: Tensor, rule: DropRule) -> Tokens:
    """The chosen tokens leave the sequence for all layers to come."""
    return tokens.keep(tokens.real & ~chosen)


OPERATIONS: dict[Operation, Callable[[Tokens, Tensor, Tensor, DropRule], Tokens]] = {
    "hide": hide,
    "zero": zero,
    "zero_scaled": zero_scaled,
    "noise": noise,
    "remove": remove,
}


def in_runs(p: float | Tensor, target: Tensor, length: int) -> Tensor:
    """DropBlock along the sequence: runs of `length` tokens drop together, each target token with p.

    A token drops where a run covers it, and `length` runs may: each starts with `1 - (1 - p)^(1/length)`.
    Runs may start before the sequence does, so that the first tokens drop as often as the others.
    """
    count, tokens = target.shape
    starts = torch.rand(count, tokens + length - 1, device=target.device) < 1 - (1 - p) ** (1 / length)
    return starts.unfold(1, length, 1).any(-1) & target


def drop_probability(normalised_importance: Tensor, target: Tensor, p_min: float, p_max: float) -> Tensor:
    """`p_j = p_max - I (p_max - p_min)` for target tokens, 0 for the others."""
    return (p_max - normalised_importance * (p_max - p_min)) * target


@dataclass
class Seen:
    """What one layer showed, for curves and pictures."""

    layer: int
    scores: dict[Score, Tensor]
    importance: Tensor
    probability: Tensor
    chosen: Tensor


@dataclass
class TokenDropout:
    """Token dropout of one tower in one forward pass.

    `rows` asks for the states of some sequences before each drop (the alignment loss needs those of
    the batch's classes): they are found in `kept`. `record` fills `seen`.
    """

    rule: DropRule
    modality: Modality
    bridge: Bridge | None = None
    standout: Standout | None = None
    strength: float | Tensor = 1.0  # of every probability: where the drop range moves over training
    # For the rate `attribution`, by layer and part of the classes.
    candidates: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    detach: bool = True
    keep_states: bool = False
    record: bool = False
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    drawn: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the chosen and the target tokens
    drawing: frozenset[int] = field(init=False)  # the layers at which tokens drop in this pass
    _watched: dict[Score, Tensor] = field(default_factory=dict)  # the scores that this layer's attention gave
    # Of `rows`, by part of the classes.
    _places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.drawing = frozenset(range(self.rule.layers))
        if self.rule.draw == "one_layer" and self.rule.layers:
            self.drawing = frozenset({int(torch.randint(self.rule.layers, ()))})

    def reaches(self, layer: int) -> bool:
        return layer < self.rule.layers

    def watch(self, layer: int, tokens: Tokens) -> Watch | None:
        needs_map = self.rule.rate == "importance" and {"class", "self"} & set(self.rule.scores)
        if layer in self.drawing and needs_map and tokens.chosen is None:
            return partial(self._see, tokens)
        return None

    @torch.no_grad()
    def _see(
        self,
        tokens: Tokens,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        mask: Tensor | None,
        causal: bool,
    ) -> None:
        self._watched = attention_scores(query, key, scaling, mask, causal, tokens)

    def drop(self, layer: int, tokens: Tokens) -> Tokens:
        if layer < self.rule.layers and self.keep_states:
            self._keep(layer, tokens)
        if layer not in self.drawing:
            return tokens
        if self.standout is not None:
            tokens = replace(tokens, states=self.standout.through(self.modality, tokens))
        chosen, probability = tokens.chosen, tokens.probability
        if chosen is None or probability is None:
            chosen, probability = self._draw(layer, tokens)
        if self.rule.draw == "shared":
            tokens = replace(tokens, chosen=chosen, probability=probability)
        return OPERATIONS[self.rule.operation](tokens, chosen, probability, self.rule)

    @torch.no_grad()
    def _draw(self, layer: int, tokens: Tokens) -> tuple[Tensor, Tensor]:
        scores: dict[Score, Tensor] = {}
        weight = RATES[self.rule.rate](self, layer, tokens, scores)
        low, high = self.rule.p_min, self.rule.p_max
        probability = self.strength * drop_probability(weight, tokens.target, low, high)
        if self.rule.rate == "block":
            chosen = in_runs(self.strength * high, tokens.target, BLOCK)
        else:
            chosen = torch.rand_like(probability) < probability
        self.drawn.append((chosen, tokens.target))
        if self.record:
            self.seen.append(Seen(layer, scores, weight, probability, chosen))
        return chosen, probability

    def _score(self, name: Score, tokens: Tokens) -> Tensor:
        return cross_score(self._carried, tokens) if name == "cross" else self._watched.pop(name)

    @cached_property
    def _carried(self) -> Tensor:
        """The bridge tokens in the tower's width, the same at all its layers."""
        assert self.bridge is not None, "the cross-modal score needs bridge tokens"
        return self.bridge.carried(self.modality)

    def take_kept(self) -> list[tuple[Tensor, Tensor]]:
        """The kept (states, real) of each layer. Recomputing a chunk in the backward pass fills a new one."""
        kept, self.kept = self.kept, {}
        return [kept[layer] for layer in sorted(kept)]

    def tensors(self) -> Iterator[Tensor]:
        """All that a pass leaves behind for losses and log."""
        for pair in (*self.kept.values(), *self.drawn):
            yield from pair

    def drop_rate(self) -> Tensor:
        """The share of target tokens that dropped, over the draws of this pass."""
        chosen, targets = (torch.cat([t.flatten() for t in c]).sum() for c in zip(*self.drawn, strict=True))
        return chosen / targets.clamp_min(1)

    def _keep(self, layer: int, tokens: Tokens) -> None:
        """Gather the asked rows; where classes come in chunks each chunk adds the rows it holds."""
        states, real = tokens.states, tokens.real
        if self.detach:
            states = states.detach()
        if self.rows is not None:
            inside, place = self._found(self.rows, tokens)
            states = states[place] * inside[:, None, None].to(states.dtype)
            real = real[place] & inside[:, None]
        if layer in self.kept:
            # Chunks may differ in length: by their groups, and once tokens were removed.
            (there, there_real), (states, real) = padded([self.kept[layer], (states, real)])
            states, real = there + states, there_real | real
        self.kept[layer] = states, real

    def _found(self, rows: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Which of the asked rows these sequences hold, and where; the same at every layer."""
        if tokens.first not in self._places:
            assert tokens.numbers is not None
            match = rows[:, None] == tokens.numbers
            self._places[tokens.first] = match.any(1), match.int().argmax(1)
        return self._places[tokens.first]


# What stands for the importance in p: 1 drops with p_min, 0 with p_max.
# (dropout, layer, tokens, scores to fill where there are any) -> value [N, L]


def by_importance(dropout: TokenDropout, layer: int, tokens: Tokens, scores: dict[Score, Tensor]) -> Tensor:
    for name in dropout.rule.scores:
        scores[name] = dropout._score(name, tokens)
    return importance(list(scores.values()), tokens, dropout.rule.scale)


def uniform(dropout: TokenDropout, layer: int, tokens: Tokens, scores: dict[Score, Tensor]) -> Tensor:
    return torch.zeros(tokens.real.shape, device=tokens.real.device)


def by_density(dropout: TokenDropout, layer: int, tokens: Tokens, scores: dict[Score, Tensor]) -> Tensor:
    return group_value(tokens)


def by_standout(dropout: TokenDropout, layer: int, tokens: Tokens, scores: dict[Score, Tensor]) -> Tensor:
    assert dropout.standout is not None, "StandOut needs its learned gates"
    return dropout.standout.value(dropout.modality, tokens)


def by_attribution(dropout: TokenDropout, layer: int, tokens: Tokens, scores: dict[Score, Tensor]) -> Tensor:
    candidates = dropout.candidates.get((layer, tokens.first))
    if candidates is None:  # after the last layer there is no attention to lean on
        return torch.ones(tokens.real.shape, device=tokens.real.device)
    return (~candidates).float()


RATES: dict[Rate, Callable[[TokenDropout, int, Tokens, dict[Score, Tensor]], Tensor]] = {
    "importance": by_importance,
    "uniform": uniform,
    "block": uniform,
    "group": by_density,
    "standout": by_standout,
    "attribution": by_attribution,
}
