"""What learners of class-aware prompts share: not a method itself.

A shared context at the first text layer is replaced, at one deep layer, by prompts of each class's own, which
a small network (textual knowledge embedding) makes out of the class's frozen text feature (Yao et al., CVPR
2024): P_k = W_up QuickGELU(W_down w_k^clip), P_k in R^(M x D), W_down a fourth as wide as the features.
Because w_k^clip exists for any words, classes never seen in training get prompts of their own too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone, Sentences
from drople.backbone.layer import Watch
from drople.backbone.tokens import Tokens
from drople.backbone.walk import LayerDropout
from drople.errors import DropleError
from drople.losses import cosine_consistency
from drople.methods.base import Batch, Task, frozen_classes
from drople.methods.context import ContextMethod, ContextOptions
from drople.options import option
from drople.regulariser import Branches


@dataclass(frozen=True)
class ClassAwareOptions(ContextOptions):
    class_layer: int = option(8, "the layer, from 0, where class-aware prompts enter (the authors 8)", low=1)
    knowledge: float = option(8.0, "weight of the pull to CLIP's class features (the authors 8)", low=0)


@dataclass(frozen=True, kw_only=True)
class ClassAwareSentences(Sentences):
    """Sentences that bring the frozen unit features [K, E] of their classes."""

    classes: Tensor


@dataclass(frozen=True)
class Entering:
    """Prompts [K, M, D] that take their places before one deep layer, whatever else drops on the way.

    The walk asks after each layer what the next one gets: the same question that token dropout answers.
    """

    prompts: Tensor
    layer: int
    dropout: LayerDropout | None

    def reaches(self, layer: int) -> bool:
        return layer < self.layer or (self.dropout is not None and self.dropout.reaches(layer))

    def watch(self, layer: int, tokens: Tokens) -> Watch | None:
        return None if self.dropout is None else self.dropout.watch(layer, tokens)

    def drop(self, layer: int, tokens: Tokens) -> Tokens:
        if self.dropout is not None:
            tokens = self.dropout.drop(layer, tokens)
        if layer + 1 != self.layer:
            return tokens
        return tokens.enter(self.prompts[tokens.numbers])


class TextualKnowledge(nn.Module):
    """TKE: a class's frozen feature [K, E] to its prompts [K, M, D]."""

    def __init__(self, backbone: Backbone, length: int) -> None:
        super().__init__()
        hidden = max(1, backbone.embed_dim // 4)
        self.down = nn.Linear(backbone.embed_dim, hidden)
        self.up = nn.Linear(hidden, length * backbone.text_width)
        self.length = length

    def forward(self, classes: Tensor) -> Tensor:
        hidden = self.down(classes)
        return self.up(hidden * torch.sigmoid(1.702 * hidden)).unflatten(1, (self.length, -1))


class ClassAwareMethod(ContextMethod):
    """Cross-entropy and the pull to the frozen classes: L_ce + lambda 1/K sum_k (1 - cos(w_k, w_k^clip))."""

    options: ClassAwareOptions

    def __init__(self, backbone: Backbone, task: Task, options: ClassAwareOptions) -> None:
        super().__init__(backbone, task, options)
        if backbone.text_layers < 2:
            raise DropleError("class-aware prompts enter before a deep layer: this text tower has only one.")
        self.layer = min(options.class_layer, backbone.text_layers - 1)
        if self.layer != options.class_layer:
            self.notes.append(
                f"class-aware prompts were asked for at layer {options.class_layer}; this backbone's last is "
                f"{self.layer}, so they enter there."
            )
        self.knowledge = TextualKnowledge(backbone, options.length)

    def sentences(self, words: Sequence[str]) -> ClassAwareSentences:
        classes = frozen_classes(self.backbone, words, self.task.templates)
        return ClassAwareSentences(**vars(super().sentences(words)), classes=F.normalize(classes, dim=-1))

    def encode_text(self, sentences: ClassAwareSentences, dropout: LayerDropout | None = None) -> Tensor:
        prompts = self.knowledge(sentences.classes).to(self.backbone.dtype)
        entering: Any = Entering(prompts, self.layer, dropout)
        return super().encode_text(sentences, entering)

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        pull = cosine_consistency(branches.classes, branches.frozen_classes)
        return {"knowledge": self.options.knowledge * pull}
