"""The one place that walks the layers of a tower.

At layer i prompts enter, the layer runs, its attention scores come out and tokens drop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from drople.backbone.layer import Layer, Watch
from drople.backbone.tokens import Tokens, places

# What an adapter adds to a layer's output, token by token, from the layer's number and its input [N, L, D]; None is
# nothing.
Adapt = Callable[[int, Tensor], Tensor | None]

# What is added to the joined weight of query, key and value [3 D, D], by the layer's number.
Updates = Mapping[int, Tensor]


class LayerDropout(Protocol):
    """What the walk asks of token dropout (see dropout.py)."""

    def reaches(self, layer: int) -> bool:
        """Whether it watches this layer, or does anything after it."""
        ...

    def watch(self, layer: int, tokens: Tokens) -> Watch | None:
        """What shall see the attention of this layer, if anything."""
        ...

    def drop(self, layer: int, tokens: Tokens) -> Tokens:
        """The sequence that the next layer gets."""
        ...


def walk(
    layers: Sequence[Layer],
    tokens: Tokens,
    *,
    causal: bool,
    prompts: Tensor | None = None,
    dropout: LayerDropout | None = None,
    updates: Updates | None = None,
    adapt: Adapt | None = None,
) -> Tokens:
    """The global tokens after the last layer, or all tokens where dropout reaches it.

    `prompts` [depth, M, D] are the prompts of layers 0 to depth-1; those of layer 0 are already in
    `tokens`. `updates` are added to the attention projections of layers (LoRA) without touching the frozen ones.
    `adapt` adds to what a layer gives, beside it, before tokens drop.
    """
    # At once: each index of its own would fill a gradient of zeros.
    entering = () if prompts is None else prompts.unbind()
    for i, layer in enumerate(layers):
        if 0 < i < len(entering):
            tokens = tokens.enter(entering[i])
        update, before = (updates or {}).get(i), tokens.states
        if i == len(layers) - 1 and not (dropout and dropout.reaches(i)):
            which = places(len(before), before.device), tokens.anchor
            states = layer.for_one(before, which, tokens.visible_to_global(causal), update)
            tokens = tokens.only_global(states)
            before = before if adapt is None else before[which][:, None]
        else:
            watch = None if dropout is None else dropout.watch(i, tokens)
            states = layer(before, tokens.visible(causal), causal, watch, update)
            tokens = replace(tokens, states=states, hidden=None)
        added = None if adapt is None else adapt(i, before)
        if added is not None:
            tokens = replace(tokens, states=tokens.states + added)
        if dropout is not None:
            tokens = dropout.drop(i, tokens)
    return tokens
