"""Context Optimization (CoOp).

Zhou, Yang, Loy, Liu. "Learning to Prompt for Vision-Language Models." IJCV 2022. Published average
over 11 datasets, base-to-novel, ViT-B/16 (from the DroPLe paper's table): 82.69 / 63.22 / 71.66.

M context vectors before the class words, shared by all classes, learned by cross-entropy:
t_k = [V]_1 ... [V]_M [CLASS_k]. The authors' defaults: 16 tokens drawn at random, or 4 from
"a photo of a" (base-to-novel, CoCoOp paper); SGD 2e-3. Here 4, from the words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drople.backbone import Backbone, Sentences
from drople.methods.base import PromptMethod, Task, register
from drople.options import option
from drople.prompts import TextPrompts


@dataclass(frozen=True)
class CoOpOptions:
    length: int = option(4, "context tokens (CoOp 16 or 4)", low=1)
    init: str = option("a photo of a", "words the context starts from; empty: random")


@register
class CoOp(PromptMethod):
    name = "coop"
    title = "Context Optimization"
    kind = "prompt"
    citation = "Zhou et al., IJCV 2022"
    Options = CoOpOptions

    def __init__(self, backbone: Backbone, task: Task, options: CoOpOptions) -> None:
        super().__init__(backbone, task, options)
        self.text_prompts = TextPrompts(
            backbone, depth=1, length=options.length, supplementary=0, init=options.init
        )

    def text_states(self) -> Tensor:
        return self.text_prompts()

    def sentences(self, words: Sequence[str]) -> Sentences:
        return self.backbone.prompted(words, context=self.text_prompts.length)
