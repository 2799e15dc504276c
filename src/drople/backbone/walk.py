"""The one place that walks the layers of a tower.

At layer i prompts enter, the layer runs, its attention scores come out and tokens drop. The layers are
`transformers`' own, called one by one; attention is exchanged through its public registry.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from drople.backbone.tokens import Tokens, places

ATTENTION = "drople_watched"

# What a watcher is shown of a layer's attention: query, key, value [N, H, L, head], scaling, mask, causal.
Watch = Callable[[Tensor, Tensor, Tensor, float, Tensor | None, bool], None]

# What an adapter adds to a layer's output, token by token, from the layer's number and its input [N, L, D]; None is
# nothing.
Adapt = Callable[[int, Tensor], Tensor | None]


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


def watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    is_causal: bool = False,
    watch: Watch | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Fused attention; a watcher gets what goes in, so that maps exist only where scores are asked."""
    if watch is not None:
        watch(query, key, value, scaling, attention_mask, is_causal)
    # The gradient of torch's fused bf16 attention on a CPU takes 2 to 8 times that of plain products.
    slow = query.requires_grad and query.dtype == torch.bfloat16 and query.device.type == "cpu"
    with sdpa_kernel(SDPBackend.MATH) if slow else nullcontext():
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=is_causal and attention_mask is None,
            scale=scaling,
        )
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, watched_attention)


def walk(
    layers: Sequence[nn.Module],
    tokens: Tokens,
    *,
    causal: bool,
    prompts: Tensor | None = None,
    dropout: LayerDropout | None = None,
    weights: Mapping[int, Mapping[str, Tensor]] | None = None,
    adapt: Adapt | None = None,
) -> Tokens:
    """The global tokens after the last layer, or all tokens where dropout reaches it.

    `prompts` [depth, M, D] are the prompts of layers 0 to depth-1; those of layer 0 are already in
    `tokens`. `weights` stands in for named weights of a layer (LoRA) without touching the frozen ones.
    `adapt` adds to what a layer gives, beside it, before tokens drop.
    """
    for i, layer in enumerate(layers):
        if prompts is not None and 0 < i < len(prompts):
            tokens = tokens.enter(prompts[i])
        own = {} if weights is None else weights.get(i, {})
        if i == len(layers) - 1 and not (dropout and dropout.reaches(i)):
            return global_only(layer, tokens, causal, own, None if adapt is None else partial(adapt, i))
        watch = None if dropout is None else dropout.watch(i, tokens)
        call = {"attention_mask": tokens.visible(causal), "is_causal": causal, "watch": watch}
        if own:
            states = functional_call(layer, dict(own), (tokens.states,), call)
        else:
            states = layer(tokens.states, **call)
        added = None if adapt is None else adapt(i, tokens.states)
        if added is not None:
            states = states + added
        tokens = replace(tokens, states=states, hidden=None)
        if dropout is not None:
            tokens = dropout.drop(i, tokens)
    return tokens


def global_only(
    layer: Any,
    tokens: Tokens,
    causal: bool,
    weights: Mapping[str, Tensor],
    adapt: Callable[[Tensor], Tensor | None] | None,
) -> Tokens:
    """A layer for the global token alone: all tokens are keys, but only its feature leaves the tower, so the
    others need no query, no projection and no MLP."""
    anchor, attention = tokens.anchor, layer.self_attn
    mine = places(len(anchor), anchor.device), anchor
    before, normed = tokens.states[mine][:, None], layer.layer_norm1(tokens.states)

    def project(name: str, states: Tensor) -> Tensor:
        frozen, weight = getattr(attention, name), weights.get(f"self_attn.{name}.weight")
        return frozen(states) if weight is None else F.linear(states, weight, frozen.bias)

    def heads(states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    mixed, _ = watched_attention(
        attention,
        heads(project("q_proj", normed[mine][:, None])),
        heads(project("k_proj", normed)),
        heads(project("v_proj", normed)),
        tokens.visible_to_global(causal),
        attention.scale,
    )
    state = before + project("out_proj", mixed.flatten(-2))
    state = state + layer.mlp(layer.layer_norm2(state))
    added = None if adapt is None else adapt(before)
    one = tokens.real.new_ones(len(anchor), 1)
    return Tokens(state if added is None else state + added, torch.zeros_like(anchor), one, ~one)
