"""Text prompts and the visual prompts that are functions of them (MaPLe, Khattak et al., CVPR 2023).

At each of the first J layers a linear coupling function makes the visual prompts out of the text prompts of
that layer, so that both towers learn together: P~_i = F_i(P_i), i = 0 .. J-1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drople.backbone import Backbone, Sentences
from drople.prompts import TextPrompts


class CoupledPrompts(nn.Module):
    """Called, it gives the visual prompts [J, M, D_v]; `text` holds the text prompts [J, M, D_t]."""

    def __init__(self, backbone: Backbone, *, depth: int, length: int, init: str) -> None:
        super().__init__()
        self.text = TextPrompts(backbone, depth=depth, length=length, supplementary=0, init=init)
        # The words that the prompts do not replace stay as they are: "[V] [V] of a {class}".
        self.kept = " ".join(init.split()[length:])
        bound = 1 / math.sqrt(backbone.text_width)
        self.weight = nn.Parameter(torch.empty(depth, backbone.text_width, backbone.vision_width))
        self.bias = nn.Parameter(torch.empty(depth, 1, backbone.vision_width))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self) -> Tensor:
        return torch.baddbmm(self.bias, self.text(), self.weight)

    def sentences(self, backbone: Backbone, words: Sequence[str]) -> Sentences:
        return backbone.prompted([f"{self.kept} {word}".strip() for word in words], context=self.text.length)
