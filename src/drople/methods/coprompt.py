"""Consistency-guided Prompt Learning (CoPrompt).

Roy, Etemad. "Consistency-guided Prompt Learning for Vision-Language Models." ICLR 2024. Published average
over 11 datasets, base-to-novel, ViT-B/16: 84.00 / 77.23 / 80.48 (the DroPLe paper cites the harmonic mean).

Coupled deep prompts in both towers, a small adapter on both features, and a consistency loss between the
learned branch and the frozen one, which sees other inputs:

    z' = m A(z) + (1 - m) z,  A = ReLU(W_2 ReLU(W_1 z)),  W_1 a fourth as wide as the features
    L = L_ce + lambda [ (1 - cos(z'_t, z_t^o(another sentence))) + (1 - cos(z'_v, z_v^o(another view))) ]

each a mean over classes and images. Authors' defaults: m 0.1 for images and 0.2 for text; on ImageNet depth
12, length 4, lambda 8, and others by dataset (depth 9 or 12, length 2 or 4, lambda 0.1 to 8); SGD 3.5e-3,
batch 4, 8 epochs.

Two inputs differ from theirs. "Another sentence" is one that a language model wrote of the class, drawn at
each step; here one of the task's templates and eleven general ones is drawn. "Another view" is a second
RandAugment of the image; here it is the plain image. Checked against a slow reference in float64
(tests/test_prompt_methods.py): differences of at most 3e-6.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drople.backbone import Backbone, Sentences
from drople.losses import cosine_consistency
from drople.methods.base import Batch, Presets, Task, frozen_classes, register
from drople.methods.coupled import CoupledMethod, CoupledOptions
from drople.options import option
from drople.regulariser import Branches
from drople.templates import with_eleven


@dataclass(frozen=True)
class CoPromptOptions(CoupledOptions):
    depth: int = option(12, "prompts at the first so many layers of both towers (CoPrompt 12 or 9)", low=1)
    length: int = option(4, "prompts a layer (CoPrompt 4 or 2)", low=1)
    consistency: float = option(8.0, "weight lambda of consistency (CoPrompt 0.1 to 8, by dataset)", low=0)
    image_adapter: float = option(0.1, "share m of the image adapter (CoPrompt 0.1)", low=0, high=1)
    text_adapter: float = option(0.2, "share m of the text adapter (CoPrompt 0.2)", low=0, high=1)


class FeatureAdapter(nn.Module):
    """`m A(z) + (1 - m) z`."""

    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        self.share = share
        hidden = max(1, width // 4)
        self.net = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False), nn.ReLU()
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.share * self.net(features) + (1 - self.share) * features


@register
class CoPrompt(CoupledMethod):
    name = "coprompt"
    title = "Consistency-guided Prompt Learning"
    citation = "Roy and Etemad, ICLR 2024"
    Options = CoPromptOptions
    options: CoPromptOptions
    presets: ClassVar[Presets] = {
        "authors": {"optimizer": "sgd", "lr": 3.5e-3, "batch_size": 4, "epochs": 8},
    }

    def __init__(self, backbone: Backbone, task: Task, options: CoPromptOptions) -> None:
        super().__init__(backbone, task, options)
        self.image_adapter = FeatureAdapter(backbone.embed_dim, options.image_adapter)
        self.text_adapter = FeatureAdapter(backbone.embed_dim, options.text_adapter)
        self.frozen_sentences = torch.stack(
            [frozen_classes(backbone, task.words, [template]) for template in with_eleven(task.templates)]
        )

    def encode_images(self, images: Tensor, dropout: Any = None) -> Tensor:
        return self.image_adapter(super().encode_images(images, dropout))

    def encode_text(self, sentences: Sentences, dropout: Any = None) -> Tensor:
        return self.text_adapter(super().encode_text(sentences, dropout))

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        drawn = torch.randint(len(self.frozen_sentences), (1,), device=self.frozen_sentences.device)
        another = self.frozen_sentences.index_select(0, drawn)[0]
        text = cosine_consistency(branches.classes, another)
        image = cosine_consistency(branches.images, branches.frozen_images)
        return {"consistency": self.options.consistency * (text + image)}
