"""Dropout Prompt Learning (DroPLe).

Chen, Zuo, Jing, He, Wang. "Dropout Prompt Learning: Towards Robust and Adaptive Vision-Language
Models." AAAI 2026. Published average over 11 datasets, base-to-novel, ViT-B/16: 86.12 / 78.44 / 82.10.

Deep text and visual prompts (depth 9 and 6, length 4) and 16 supplementary text tokens; while training
tokens drop by importance, and residual entropy replaces the usual pull to the frozen branch:
L = L_CE + L_RE^v + L_RE^t. Our default has no supplementary tokens (preset `paper` has): chosen on images of
base classes, see docs/results.md. Dropout and regularisation live in `regulariser.py`, so that they wrap
other methods too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from drople.backbone import Backbone, Sentences
from drople.backbone.clip import LayerWeights
from drople.lora import LoRA
from drople.methods.base import Presets, PromptMethod, Task, register
from drople.options import option
from drople.prompts import deep_prompts
from drople.regulariser import RELEASED


@dataclass(frozen=True)
class DeepPromptOptions:
    text_depth: int = option(9, "text prompts at the first so many layers (paper 9, released 9)", low=1)
    text_length: int = option(4, "context tokens before the class words (paper 4, released 4)", low=0)
    supplementary: int = option(
        0,
        "learnable text tokens after the class words (paper 16; released 24, made by an LLM): they cost novel classes",
        low=0,
    )
    init: str = option("a photo of a", "words the first layer's context starts from (paper, released)")
    visual_depth: int = option(6, "visual prompts at the first so many layers (paper 6, released 6)", low=0)
    visual_length: int = option(4, "visual prompts a layer (paper 4, released 4)", low=1)
    lora_rank: int = option(
        0, "rank of LoRA on query and value of the later layers (released 8); 0 is none", low=0
    )
    lora_towers: Literal["vision", "both"] = option("vision", "which towers have LoRA (released vision)")
    lora_from: int = option(6, "the first layer with LoRA (released 6)", low=0)
    lora_lr: float = option(0.1, "learning rate of LoRA over that of the prompts (released 0.1)", low=0)
    lora_dropout: float = option(
        0.0, "share of the update's input features dropped a step (released 0)", low=0, high=0.99
    )
    lora_key: bool = option(False, "LoRA on the key too (released false)")


class DeepPrompts(PromptMethod):
    """The prompts of the paper, without dropout: what DroPLe and its ablations share."""

    Options = DeepPromptOptions

    def __init__(self, backbone: Backbone, task: Task, options: DeepPromptOptions) -> None:
        super().__init__(backbone, task, options)
        o = options
        self.text_prompts, self.visual_prompts, notes = deep_prompts(backbone, o, o.supplementary)
        self.notes += notes
        self.lora = self._low_rank(backbone.model.vision_model)
        self.text_lora = self._low_rank(backbone.model.text_model) if o.lora_towers == "both" else None

    def _low_rank(self, tower: Any) -> LoRA | None:
        o, layers = self.options, tower.encoder.layers
        if o.lora_rank and o.lora_from >= len(layers):
            self.notes.append(f"lora_from is {o.lora_from}; this backbone has {len(layers)} layers: no LoRA.")
        if not o.lora_rank or o.lora_from >= len(layers):
            return None
        which = range(o.lora_from, len(layers))
        names = ("q_proj", "k_proj", "v_proj") if o.lora_key else ("q_proj", "v_proj")
        return LoRA(
            layers, which, rank=o.lora_rank, alpha=float(o.lora_rank), names=names, dropout=o.lora_dropout
        )

    def text_states(self) -> Tensor:
        return self.text_prompts()

    def sentences(self, words: Sequence[str]) -> Sentences:
        return self.backbone.prompted(
            words, context=self.options.text_length, supplementary=self.options.supplementary
        )

    def vision_weights(self) -> LayerWeights | None:
        return None if self.lora is None else self.lora()

    def text_weights(self) -> LayerWeights | None:
        return None if self.text_lora is None else self.text_lora()

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        low_rank = [p for lora in (self.lora, self.text_lora) if lora is not None for p in lora.parameters()]
        slow = {id(p) for p in low_rank}
        groups = [{"params": [p for p in self.parameters() if id(p) not in slow], "lr": lr}]
        return groups + ([{"params": low_rank, "lr": lr * self.options.lora_lr}] if low_rank else [])


@register
class DroPLe(DeepPrompts):
    name = "drople"
    title = "Dropout Prompt Learning"
    kind = "prompt"
    citation = "Chen et al., AAAI 2026"
    wrapped: ClassVar[bool] = True
    presets: ClassVar[Presets] = {
        "paper": {"supplementary": 16},
        "released": {
            **RELEASED,
            "supplementary": 24,
            "lora_rank": 8,
            "lr": 2e-4,
            "weight_decay": 5e-5,
            "batch_size": 4,
            "epochs": 20,
            "augmentation": "patch_randaugment",
            "templates": "eleven",
        },
    }
