"""What learners of coupled prompts share: not a method itself (MaPLe, Khattak et al., CVPR 2023).

At each of the first J layers a linear coupling function makes the visual prompts out of the text prompts of
that layer, so that both towers learn together: P~_i = F_i(P_i), i = 0 .. J-1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drople.backbone import Backbone, Sentences
from drople.methods.base import PromptMethod, Task
from drople.options import option
from drople.prompts import TextPrompts, capped


@dataclass(frozen=True)
class CoupledOptions:
    depth: int = option(9, "prompts at the first so many layers of both towers (MaPLe 9)", low=1)
    length: int = option(2, "prompts a layer (MaPLe 2)", low=1)
    init: str = option("a photo of a", "words the first prompts start from; those beyond `length` stay words")


class CoupledPrompts(nn.Module):
    """Called, it gives the visual prompts [J, M, D_v]; `text` holds the text prompts [J, M, D_t]."""

    def __init__(self, backbone: Backbone, *, depth: int, length: int, init: str) -> None:
        super().__init__()
        self.text = TextPrompts(backbone, depth=depth, length=length, supplementary=0, init=init)
        bound = 1 / math.sqrt(backbone.text_width)
        self.weight = nn.Parameter(torch.empty(depth, backbone.text_width, backbone.vision_width))
        self.bias = nn.Parameter(torch.empty(depth, 1, backbone.vision_width))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self) -> Tensor:
        return torch.baddbmm(self.bias, self.text(), self.weight)


class CoupledMethod(PromptMethod):
    """Cross-entropy alone; a subclass adds its losses."""

    kind = "prompt"
    options: CoupledOptions
    visual_prompts: CoupledPrompts

    def __init__(self, backbone: Backbone, task: Task, options: CoupledOptions) -> None:
        super().__init__(backbone, task, options)
        layers = min(backbone.text_layers, backbone.vision_layers)
        depth, note = capped(options.depth, layers, "coupled prompts")
        self.notes += [note] if note else []
        self.visual_prompts = CoupledPrompts(backbone, depth=depth, length=options.length, init=options.init)

    def text_states(self) -> Tensor:
        return self.visual_prompts.text()

    def sentences(self, words: Sequence[str]) -> Sentences:
        # The words that the prompts do not replace stay as they are: "[V] [V] of a {class}".
        length = self.options.length
        kept = " ".join(self.options.init.split()[length:])
        return self.backbone.prompted([f"{kept} {word}".strip() for word in words], context=length)
