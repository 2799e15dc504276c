"""CLIP-LoRA: low-rank updates in the attention of both towers.

Zanella, Ben Ayed. "Low-Rank Few-Shot Adaptation of Vision-Language Models." CVPR 2024 workshops.

    W_q, W_k, W_v  <-  W + (alpha / sqrt(r)) B A   in every layer of both towers,   cross-entropy

A [r, D] drawn as a linear layer's weights, B [D, r] zero: training starts from zero-shot CLIP. The authors'
defaults, the same for every dataset: r = 2, alpha = 1 (over sqrt(r), by their code), dropout 0.25 on the
input of the update, one template, AdamW 2e-4 with weight decay 1e-2, batch 32, 500 steps a shot. Here dropout
draws the input features once a step for all tokens, not anew for each: the update enters the walk as a
weight. Any class can be asked for.

Checked against a slow reference in tests/test_adapters.py.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from drople.backbone import Backbone
from drople.backbone.walk import Updates
from drople.lora import LoRA
from drople.methods.base import Presets, Task, TowerMethod, register
from drople.options import option


@dataclass(frozen=True)
class ClipLoraOptions:
    rank: int = option(2, "rank of the updates (authors 2)", low=1)
    lora_alpha: float = option(1.0, "alpha: the update counts alpha / sqrt(rank) (authors 1)", low=0)
    lora_dropout: float = option(
        0.25, "share of the update's input features dropped a step (authors 0.25)", low=0, high=0.99
    )


@register
class ClipLora(TowerMethod):
    name = "clip-lora"
    title = "CLIP-LoRA"
    kind = "adapter"
    citation = "Zanella and Ben Ayed, CVPR workshops 2024"
    Options = ClipLoraOptions
    presets: ClassVar[Presets] = {
        "authors": {"lr": 2e-4, "weight_decay": 0.01, "warmup": 0.0, "clip_norm": 0.0}
    }

    def __init__(self, backbone: Backbone, task: Task, options: ClipLoraOptions) -> None:
        super().__init__(backbone, task, options)
        self.vision, self.text = (
            LoRA(
                width,
                range(layers),
                rank=options.rank,
                alpha=options.lora_alpha * math.sqrt(options.rank),
                dropout=options.lora_dropout,
            )
            for width, layers in (
                (backbone.vision_width, backbone.vision_layers),
                (backbone.text_width, backbone.text_layers),
            )
        )

    def vision_updates(self) -> Updates:
        return self.vision(self.backbone.dtype)

    def text_updates(self) -> Updates:
        return self.text(self.backbone.dtype)
