"""Textual-based Class-aware Prompt tuning (TCP).

Yao, Zhang, Xu. "TCP: Textual-based Class-aware Prompt tuning for Visual-Language Model." CVPR 2024. Published
average over 11 datasets, base-to-novel, ViT-B/16: 84.13 / 75.36 / 79.51.

A shared learnable context at the first layer; at one deep layer it is replaced by prompts of each class's own,
which a small network (textual knowledge embedding, TKE) makes out of the class's frozen text feature:

    P_k = W_up QuickGELU(W_down w_k^clip),  W_down a fourth as wide as the features,  P_k in R^(M x D)
    L = L_ce + 8 * 1/K sum_k (1 - cos(w_k, w_k^clip))

Because w_k^clip exists for any words, classes never seen in training get their own prompts too. Authors'
defaults: 4 tokens drawn at random, layer 8 (the ninth), weight 8, Adam 2e-3, batch 32, 50 epochs; their code
leaves the sentence of most datasets its tail (", a type of pet."), which the prompts here do not have.

Checked against a slow reference in float64 (tests/test_prompt_methods.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone, Sentences
from drople.backbone.tokens import Tokens
from drople.backbone.walk import LayerDropout, Watch
from drople.errors import DropleError
from drople.losses import cosine_consistency
from drople.methods.base import Batch, Presets, PromptMethod, Task, frozen_classes, register
from drople.options import option
from drople.prompts import TextPrompts
from drople.regulariser import Branches


@dataclass(frozen=True)
class TCPOptions:
    length: int = option(4, "context tokens (TCP 4)", low=1)
    init: str = option("a photo of a", "words the context starts from; empty: random (TCP)")
    class_layer: int = option(8, "the layer, counted from 0, where class-aware prompts enter (TCP 8)", low=1)
    knowledge: float = option(8.0, "weight of the pull to CLIP's class features (TCP 8)", low=0)


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

    def watch(self, layer: int, tokens: Tokens) -> Watch | None:
        return None if self.dropout is None else self.dropout.watch(layer, tokens)

    def drop(self, layer: int, tokens: Tokens) -> Tokens:
        if self.dropout is not None:
            tokens = self.dropout.drop(layer, tokens)
        if layer + 1 != self.layer:
            return tokens
        return tokens.enter(self.prompts[tokens.first : tokens.first + len(tokens.states)])


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


@register
class TCP(PromptMethod):
    name = "tcp"
    title = "Textual-based Class-aware Prompt tuning"
    kind = "prompt"
    citation = "Yao et al., CVPR 2024"
    Options = TCPOptions
    options: TCPOptions
    presets: ClassVar[Presets] = {"authors": {"init": "", "lr": 2e-3, "batch_size": 32, "epochs": 50}}

    def __init__(self, backbone: Backbone, task: Task, options: TCPOptions) -> None:
        super().__init__(backbone, task, options)
        if backbone.text_layers < 2:
            raise DropleError("class-aware prompts enter before a deep layer: this text tower has only one.")
        self.layer = min(options.class_layer, backbone.text_layers - 1)
        if self.layer != options.class_layer:
            self.notes.append(
                f"class-aware prompts were asked for at layer {options.class_layer}; this backbone's last is "
                f"{self.layer}, so they enter there."
            )
        self.text_prompts = TextPrompts(
            backbone, depth=1, length=options.length, supplementary=0, init=options.init
        )
        self.knowledge = TextualKnowledge(backbone, options.length)

    def text_states(self) -> Tensor:
        return self.text_prompts()

    def sentences(self, words: Sequence[str]) -> ClassAwareSentences:
        plain = self.backbone.prompted(words, context=self.text_prompts.length)
        classes = frozen_classes(self.backbone, words, self.task.templates)
        return ClassAwareSentences(**vars(plain), classes=F.normalize(classes, dim=-1))

    def _encode_text(self, sentences: ClassAwareSentences, dropout: LayerDropout | None = None) -> Tensor:
        prompts = self.knowledge(sentences.classes).to(self.backbone.dtype)
        entering: Any = Entering(prompts, self.layer, dropout)
        return super()._encode_text(sentences, entering)

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        pull = cosine_consistency(branches.classes, branches.frozen_classes)
        return {"knowledge": self.options.knowledge * pull}
