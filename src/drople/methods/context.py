"""What learners of a context share: not a method itself.

M learnable vectors before the class words at the first text layer, the same for all classes; the image tower
stays as it is: t_k = [V]_1 ... [V]_M [CLASS_k].
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drople.backbone import Backbone, Sentences
from drople.methods.base import PromptMethod, Task
from drople.options import option
from drople.prompts import TextPrompts


@dataclass(frozen=True)
class ContextOptions:
    length: int = option(4, "context tokens (the authors 4, where they start from words)", low=1)
    init: str = option("a photo of a", "words the context starts from; empty: random")


class ContextMethod(PromptMethod):
    """Cross-entropy alone; a subclass adds its losses."""

    kind = "prompt"

    def __init__(self, backbone: Backbone, task: Task, options: ContextOptions) -> None:
        super().__init__(backbone, task, options)
        self.text_prompts = TextPrompts(
            backbone, depth=1, length=options.length, supplementary=0, init=options.init
        )

    def text_states(self) -> Tensor:
        return self.text_prompts()

    def sentences(self, words: Sequence[str]) -> Sentences:
        return self.backbone.prompted(words, context=self.text_prompts.length)
