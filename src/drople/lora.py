"""Low-rank updates of frozen projections (LoRA), as weights that the layers of a walk add to their own.

The frozen weights are never touched, so the frozen branch cannot carry what was learned.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROJECTIONS = "qkv"


class LoRA(nn.Module):
    """`(alpha / r) B A` for query, key or value of some layers, all of them from one product.

    `dropout` is that of the update's input features, in training: one draw a pass, for all tokens, since
    it is a weight that leaves here.
    """

    def __init__(
        self,
        width: int,
        layers: Sequence[int],
        *,
        rank: int,
        alpha: float,
        on: Sequence[str] = PROJECTIONS,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layers, self.on = tuple(layers), tuple(on)
        self.scale, self.dropout = alpha / rank, dropout
        start = torch.empty(len(layers) * len(on) * rank, width)
        nn.init.kaiming_uniform_(start, a=math.sqrt(5))
        self.a = nn.Parameter(start.view(len(layers), len(on), rank, width))
        self.b = nn.Parameter(torch.zeros(len(layers), len(on), width, rank))

    def forward(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """What each layer adds to its joined projections [3 D, D], by the layer's number."""
        a: Tensor = self.a
        if self.training and self.dropout:
            a = a * F.dropout(torch.ones_like(a[:, :, :1]), self.dropout)
        updates = (self.scale * self.b @ a).to(dtype)
        if self.on != tuple(PROJECTIONS):
            there = dict(zip(self.on, updates.unbind(1), strict=True))
            none = torch.zeros_like(updates[:, 0])
            updates = torch.stack([there.get(name, none) for name in PROJECTIONS], 1)
        return dict(zip(self.layers, updates.flatten(1, 2).unbind(), strict=True))
