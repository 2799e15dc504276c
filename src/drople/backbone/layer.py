"""One frozen layer of a tower, on the weights of `transformers`' own module.

The module's forward is written out here because prompts and dropout need what it hides: query, key and value
come from one product, a watcher sees them, and the last layer is run for the global token alone.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# What a watcher is shown of a layer's attention: query, key, value [N, H, L, head], scaling, mask, causal.
Watch = Callable[[Tensor, Tensor, Tensor, float, Tensor | None, bool], None]

# What stands in for named weights of a layer (LoRA) without touching the frozen ones.
Weights = Mapping[str, Tensor]

JOINED = ("q_proj", "k_proj", "v_proj")


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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layer":
        """Copied parameters are no views of the copied weight: they have to be joined anew."""
        return Layer(deepcopy(self.module, memo))

    def __call__(
        self,
        states: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        watch: Watch | None = None,
        weights: Weights | None = None,
    ) -> Tensor:
        """The states [N, L, D] that leave the layer; `mask` is added to the logits of attention."""
        own = weights or {}
        joined = F.linear(self.module.layer_norm1(states), self._joined(own), self.bias)
        query, key, value = (self._heads(part) for part in joined.chunk(3, -1))
        if watch is not None:
            watch(query, key, value, self.attention.scale, mask, causal)
        return self._leave(states, query, key, value, mask, causal, own)

    def for_one(
        self,
        states: Tensor,
        which: tuple[Tensor, Tensor],
        mask: Tensor | None,
        weights: Weights | None = None,
    ) -> Tensor:
        """The same for one token of each sequence, [N, 1, D]: all tokens are keys, but the others need no
        query, no projection and no MLP. `mask` [N, 1, 1, L]."""
        own, normed = weights or {}, self.module.layer_norm1(states)
        width = states.shape[-1]
        weight, bias = self._joined(own), self.bias
        query = F.linear(normed[which][:, None], weight[:width], bias[:width])
        key, value = F.linear(normed, weight[width:], bias[width:]).chunk(2, -1)
        query, key, value = (self._heads(part) for part in (query, key, value))
        return self._leave(states[which][:, None], query, key, value, mask, False, own)

    def _joined(self, own: Weights) -> Tensor:
        names = [f"self_attn.{name}.weight" for name in JOINED]
        if not any(name in own for name in names):
            return self.weight
        frozen = self.weight.chunk(3)
        return torch.cat([own.get(name, weight) for name, weight in zip(names, frozen, strict=True)])

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
        own: Weights,
    ) -> Tensor:
        """From query, key and value to the end of the layer."""
        mixed = attend(query, key, value, self.attention.scale, mask, causal)
        out = self.attention.out_proj
        weight = own.get("self_attn.out_proj.weight", out.weight)
        states = states + F.linear(mixed.transpose(1, 2).flatten(-2), weight, out.bias)
        return states + self.module.mlp(self.module.layer_norm2(states))


def attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """Fused attention [N, H, L, head]."""
    # The gradient of torch's fused bf16 attention on a CPU takes 2 to 8 times that of plain products.
    slow = query.requires_grad and query.dtype == torch.bfloat16 and query.device.type == "cpu"
    with sdpa_kernel(SDPBackend.MATH) if slow else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and mask is None, scale=scaling
        )
