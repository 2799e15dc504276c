"""What learners of coupled prompts share: not a method itself (MaPLe, Khattak et al., CVPR 2023).

At each of the first J layers a linear coupling function makes the visual prompts out of the text prompts of
that layer, so that both towers learn together: P~_i = F_i(P_i), i = 0 .. J-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drople.backbone import Backbone, Sentences
from drople.methods.base import PromptMethod, Task, TrainingData
from drople.options import option
from drople.prompts import CoupledPrompts, TextPrompts, capped, words_behind


@dataclass(frozen=True)
class CoupledOptions:
    depth: int = option(9, "prompts at the first so many layers of both towers (MaPLe 9)", low=1)
    length: int = option(2, "prompts a layer (MaPLe 2)", low=1)
    init: str = option("a photo of a", "words the first prompts start from; those beyond `length` stay words")


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
        text = TextPrompts(backbone, depth=depth, length=options.length, supplementary=0, init=options.init)
        self.visual_prompts = CoupledPrompts(backbone, text, depth)

    def finish(self, data: TrainingData) -> None:
        self.visual_prompts.fold()

    def text_states(self) -> Tensor:
        return self.visual_prompts.text()

    def sentences(self, words: Sequence[str]) -> Sentences:
        o = self.options
        return self.backbone.prompted(words, context=o.length, before=words_behind(o.init, o.length))
