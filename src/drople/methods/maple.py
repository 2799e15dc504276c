"""Multi-modal Prompt Learning (MaPLe).

Khattak, Rasheed, Maaz, Khan, Khan. "MaPLe: Multi-modal Prompt Learning." CVPR 2023. Published average over
11 datasets, base-to-novel, ViT-B/16: 82.28 / 75.14 / 78.55.

Text prompts P_i at the first J layers; the visual prompts of a layer are a linear function of them, so both
towers are tuned together:

    [_, W_i] = L_i([P_{i-1}, W_{i-1}])                i = 1 .. J   (text)
    [c_i, E_i, _] = V_i([c_{i-1}, E_{i-1}, F_i(P_{i-1})])          (vision), F_i linear
    L = L_ce

Authors' defaults: J 9, two tokens from the first words of "a photo of a" (the other two stay frozen words),
SGD 3.5e-3, batch 4, 5 epochs; J 3 and 2 epochs across datasets. Their deep coupling functions start as copies
of one draw; here each is drawn by itself.

Checked against a slow reference in float64 (tests/test_prompt_methods.py): differences of at most 3e-6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from drople.backbone import Backbone, Sentences
from drople.coupled_prompts import CoupledPrompts
from drople.methods.base import Presets, PromptMethod, Task, register
from drople.options import option
from drople.prompts import capped


@dataclass(frozen=True)
class MaPLeOptions:
    depth: int = option(9, "prompts at the first so many layers of both towers (MaPLe 9)", low=1)
    length: int = option(2, "prompts a layer (MaPLe 2)", low=1)
    init: str = option("a photo of a", "words the first prompts start from; those beyond `length` stay words")


@register
class MaPLe(PromptMethod):
    name = "maple"
    title = "Multi-modal Prompt Learning"
    kind = "prompt"
    citation = "Khattak et al., CVPR 2023"
    Options = MaPLeOptions
    visual_prompts: CoupledPrompts
    presets: ClassVar[Presets] = {
        "authors": {"optimizer": "sgd", "lr": 3.5e-3, "batch_size": 4, "epochs": 5},
    }

    def __init__(self, backbone: Backbone, task: Task, options: MaPLeOptions) -> None:
        super().__init__(backbone, task, options)
        layers = min(backbone.text_layers, backbone.vision_layers)
        depth, note = capped(options.depth, layers, "coupled prompts")
        self.notes += [note] if note else []
        self.visual_prompts = CoupledPrompts(backbone, depth=depth, length=options.length, init=options.init)

    def text_states(self) -> Tensor:
        return self.visual_prompts.text()

    def sentences(self, words: Sequence[str]) -> Sentences:
        return self.visual_prompts.sentences(self.backbone, words)
