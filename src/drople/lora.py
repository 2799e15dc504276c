"""Low-rank updates of frozen projections (LoRA), as weights handed to the walk.

The frozen weights are never touched, so the frozen branch cannot carry what was learned.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoRA(nn.Module):
    """`W + (alpha / r) B A` for the named attention projections of some layers.

    `dropout` is that of the update's input features, in training: one draw a pass, for all tokens, since
    it is a weight that leaves here.
    """

    def __init__(
        self,
        layers: Any,
        which: Sequence[int],
        *,
        rank: int,
        alpha: float,
        names: Sequence[str],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale, self.dropout = alpha / rank, dropout
        self.frozen = {
            (i, f"self_attn.{name}.weight"): layers[i].get_submodule(f"self_attn.{name}").weight
            for i in which
            for name in names
        }
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for (i, name), weight in self.frozen.items():
            key = f"{i}_{name.replace('.', '_')}"
            self.a[key] = nn.Parameter(torch.empty(rank, weight.shape[1]))
            nn.init.kaiming_uniform_(self.a[key], a=math.sqrt(5))
            self.b[key] = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self) -> dict[int, dict[str, Tensor]]:
        weights: dict[int, dict[str, Tensor]] = {}
        parts = zip(self.frozen.items(), self.a.values(), self.b.values(), strict=True)
        for ((i, name), weight), a, b in parts:
            if self.training and self.dropout:
                a = a * F.dropout(torch.ones_like(a[:1]), self.dropout)
            weights.setdefault(i, {})[name] = weight + (self.scale * b @ a).to(weight.dtype)
        return weights
