"""One frozen layer of a tower, on the weights of `transformers`' own module.

The module's forward is written out here because prompts and dropout need what it hides: query, key and value
come from one product, a watcher sees them, and the last layer is run for the global token alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from drople.kernels import usable

# What a watcher is shown of a layer's attention: query, key, value [N, H, L, head], scaling, mask, causal.
Watch = Callable[[Tensor, Tensor, Tensor, float, Tensor | None, bool], None]

JOINED = ("q_proj", "k_proj", "v_proj")

# On a GPU, up to so many tokens the "efficient" attention takes two thirds of the time of the others; beyond, more.
SHORT = 64


class Layer:
    """Attention and MLP of one layer. The module's three projections become views of one weight, so that
    joining them takes no memory."""

    def __init__(self, module: Any) -> None:
        self.module, self.attention = module, module.self_attn
        parts = [getattr(self.attention, name) for name in JOINED]
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias = torch.cat([part.bias.detach() for part in parts])
        for part, weight, bias in zip(parts, self.weight.chunk(3), self.bias.chunk(3), strict=True):
            part.weight.data, part.bias.data = weight, bias
        self.width = len(self.weight) // 3

    def __reduce__(self) -> tuple[type["Layer"], tuple[Any]]:
        """A copied or sent module's projections are no views any more: they have to be joined anew."""
        return Layer, (self.module,)

    @property
    def joined(self) -> bool:
        """Whether the module's projections are still parts of the weight: moving the module parts them."""
        return self.attention.v_proj.weight.data_ptr() == self.weight.chunk(3)[2].data_ptr()

    def __call__(
        self,
        states: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        watch: Watch | None = None,
        update: Tensor | None = None,
    ) -> Tensor:
        """The states [N, L, D] that leave the layer. `mask` is added to the logits of attention, `update` to the
        weight of query, key and value."""
        states, normed = add_norm(states, None, self.module.layer_norm1)
        joined = F.linear(normed, self._updated(update), self.bias)
        query, key, value = (self._heads(part) for part in joined.chunk(3, -1))
        if watch is not None:
            watch(query, key, value, self.attention.scale, mask, causal)
        return self._leave(states, query, key, value, mask, causal)

    def for_one(
        self,
        states: Tensor,
        which: tuple[Tensor, Tensor],
        mask: Tensor | None,
        update: Tensor | None = None,
    ) -> Tensor:
        """The same for one token of each sequence, [N, 1, D]: all tokens are keys, but the others need no
        query, no projection and no MLP. `mask` [N, 1, 1, L]."""
        states, normed = add_norm(states, None, self.module.layer_norm1)
        weight, bias, width = self._updated(update), self.bias, self.width
        query = F.linear(normed[which][:, None], weight[:width], bias[:width])
        key, value = F.linear(normed, weight[width:], bias[width:]).chunk(2, -1)
        query, key, value = (self._heads(part) for part in (query, key, value))
        return self._leave(states[which][:, None], query, key, value, mask, False)

    def _updated(self, update: Tensor | None) -> Tensor:
        return self.weight if update is None else self.weight + update

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.attention.head_dim)).transpose(1, 2)

    def _leave(
        self,
        states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """From query, key and value to the end of the layer."""
        mixed = attend(query, key, value, self.attention.scale, mask, causal)
        out = self.attention.out_proj
        added = F.linear(mixed.transpose(1, 2).flatten(-2), out.weight, out.bias)
        states, normed = add_norm(states, added, self.module.layer_norm2)
        return states + self.module.mlp(normed)


def add_norm(states: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """The residual sum, and the layer norm of it."""
    if usable(states) and not norm._forward_hooks:  # explain.py looks at what a norm gives
        from drople.kernels.add_norm import AddNorm

        return AddNorm.apply(states, added, norm.weight, norm.bias, norm.eps)
    states = states if added is None else states + added
    return states, norm(states)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """Fused attention [N, H, L, head]."""
    with _backend(query):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and mask is None, scale=scaling
        )


def _backend(query: Tensor) -> AbstractContextManager[None]:
    """Where torch's own choice of a kernel is not the fastest."""
    # The gradient of fused bf16 attention on a CPU takes 2 to 8 times that of plain products.
    if query.requires_grad and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return sdpa_kernel(SDPBackend.MATH)
    # Somebody who wants the gradient of a gradient has ruled it out.
    if query.is_cuda and query.shape[-2] <= SHORT and torch.backends.cuda.mem_efficient_sdp_enabled():
        # Which heads of an odd number of channels cannot have.
        return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return nullcontext()
