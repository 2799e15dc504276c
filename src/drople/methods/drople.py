"""Dropout Prompt Learning (DroPLe).

Chen, Zuo, Jing, He, Wang. "Dropout Prompt Learning: Towards Robust and Adaptive Vision-Language
Models." AAAI 2026. Published average over 11 datasets, base-to-novel, ViT-B/16: 86.12 / 78.44 / 82.10.

Deep text and visual prompts (depth 9 and 6, length 4) and 16 supplementary text tokens; while training
tokens drop by importance, and residual entropy replaces the usual pull to the frozen branch:
L = L_CE + L_RE^v + L_RE^t. That is the preset `paper`. Our default, chosen on images of base classes (see
docs/results.md), trains by the same loss with the same dropout and a quarter of the baseline's pull; it has two
context tokens a layer and visual prompts that a linear function makes of them (MaPLe's coupling), at nine layers, no
supplementary tokens, and class weights that know the training images (`prototypes.py`). The preset `low_rank` starts
at zero-shot CLIP instead: the context is the task's own template at the first layer, and low-rank updates of both
towers stand for the prompts of the other layers (the released code has such updates in the image tower). Dropout and
regularisation live in `regulariser.py`, so that they wrap other methods too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drople.ablations import PAPER
from drople.backbone import Backbone, Sentences
from drople.backbone.walk import Updates
from drople.lora import LoRA
from drople.methods.base import Presets, PromptMethod, Task, TrainingData, plain_views, register
from drople.options import option, with_defaults
from drople.prompts import CoupledPrompts, coupled_visual, deep_text, deep_visual, words_behind
from drople.prototypes import Prototypes
from drople.regulariser import RELEASED, DropleOptions

TEMPLATE, WORDS = "template", "a photo of a"


@dataclass(frozen=True)
class DeepPromptOptions:
    text_depth: int = option(9, "text prompts at the first so many layers (paper 9, released 9)", low=1)
    text_length: int = option(
        4,
        "context tokens before the class words (paper 4, released 4); words of `init` beyond them stay words",
        low=0,
    )
    supplementary: int = option(
        0,
        "learnable text tokens after the class words (paper 16; released 24, made by an LLM): they cost novel classes",
        low=0,
    )
    init: str = option(
        WORDS,
        "words the first layer's context starts from (paper, released: a photo of a); template = the task's own: words "
        "before the class are the context, those behind it supplementary tokens",
    )
    visual_depth: int = option(6, "visual prompts at the first so many layers (paper 6, released 6)", low=0)
    visual_length: int = option(4, "visual prompts a layer (paper 4, released 4)", low=1)
    coupled: bool = option(
        False,
        "the visual prompts of a layer are a linear function of its context, and as many (MaPLe); paper, released: no",
    )
    prototypes: float = option(
        0.0,
        "omega: weight of the mean feature of a class's training images beside its text, where all classes asked for "
        "were trained on (paper, released: none)",
        low=0,
    )
    lora_rank: int = option(
        0, "rank of LoRA on query and value of the later layers (released 8); 0 is none", low=0
    )
    lora_towers: Literal["vision", "both"] = option("vision", "which towers have LoRA (released vision)")
    lora_from: int = option(6, "the first layer with LoRA (released 6)", low=0)
    lora_lr: float = option(0.1, "learning rate of LoRA over that of the prompts (released 0.1)", low=0)


class DeepPrompts(PromptMethod):
    """The prompts of the paper, without dropout: what DroPLe and its ablations share."""

    Options = DeepPromptOptions

    def __init__(self, backbone: Backbone, task: Task, options: DeepPromptOptions) -> None:
        super().__init__(backbone, task, options)
        o = options
        before, after = o.init, ""
        self.context, self.supplementary = o.text_length, o.supplementary
        if o.init == TEMPLATE:
            before, after = task.templates[0].split("{}")
            self.context, behind = (len(backbone.tokenizer.words(part)) for part in (before, after))
            self.supplementary += behind
            if not self.context + self.supplementary:
                before, self.context = WORDS, o.text_length
                self.notes.append(
                    f"the template {task.templates[0]!r} has no words: context starts from {WORDS!r}."
                )
        self.start = before
        own = replace(o, text_length=self.context, init=before)
        text, notes = deep_text(backbone, own, self.supplementary, after)
        self.notes += notes
        if o.coupled and not self.context:
            self.notes.append(
                "no context stands before the class words: visual prompts are not coupled to it."
            )
        if o.coupled and o.visual_depth and self.context:
            self.visual_prompts, notes = coupled_visual(backbone, o, text)
            self.notes += notes
        else:
            self.text_prompts = text
            if o.visual_depth:
                self.visual_prompts, notes = deep_visual(backbone, o)
                self.notes += notes
        self.prototypes = Prototypes(task.words, backbone.embed_dim, o.prototypes) if o.prototypes else None
        self.lora = self._low_rank(backbone.vision_width, backbone.vision_layers)
        both = o.lora_towers == "both"
        self.text_lora = self._low_rank(backbone.text_width, backbone.text_layers) if both else None

    def _low_rank(self, width: int, layers: int) -> LoRA | None:
        o = self.options
        if o.lora_rank and o.lora_from >= layers:
            self.notes.append(f"lora_from is {o.lora_from}; this backbone has {layers} layers: no LoRA.")
        if not o.lora_rank or o.lora_from >= layers:
            return None
        which = range(o.lora_from, layers)
        return LoRA(width, which, rank=o.lora_rank, alpha=float(o.lora_rank), on="qv")

    def text_states(self) -> Tensor:
        visual = self.visual_prompts
        return visual.text() if isinstance(visual, CoupledPrompts) else self.text_prompts()

    def sentences(self, words: Sequence[str]) -> Sentences:
        kept = words_behind(self.start, self.context)
        return self.backbone.prompted(
            words, context=self.context, supplementary=self.supplementary, before=kept
        )

    @torch.no_grad()
    def finish(self, data: TrainingData) -> None:
        if isinstance(self.visual_prompts, CoupledPrompts):
            self.visual_prompts.fold()
        if self.prototypes is not None:
            views = plain_views(data.images, self.backbone)
            self.prototypes.hold(torch.cat([self.image_features(view) for view in views]), data.labels)

    def class_features(self, words: Sequence[str]) -> Tensor:
        features = super().class_features(words)
        return features if self.prototypes is None else self.prototypes.join(words, features)

    @torch.no_grad()
    def weights_by_text(self, words: Sequence[str]) -> Tensor:
        return F.normalize(super().class_features(words), dim=-1)

    def vision_updates(self) -> Updates | None:
        return None if self.lora is None else self.lora(self.backbone.dtype)

    def text_updates(self) -> Updates | None:
        return None if self.text_lora is None else self.text_lora(self.backbone.dtype)

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
    Options = with_defaults(DeepPromptOptions, text_length=2, visual_depth=9, coupled=True, prototypes=1.0)
    DropOptions = with_defaults(DropleOptions, l2=2.0)
    presets: ClassVar[Presets] = {
        "paper": {**PAPER, "supplementary": 16},
        "released": {
            **PAPER,
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
        "low_rank": {
            "init": TEMPLATE,
            "text_depth": 1,
            "visual_depth": 0,
            "l2": 0.0,
            "lora_rank": 2,
            "lora_towers": "both",
            "lora_from": 0,
            "lora_lr": 1.0,
        },
    }
    # Prompts alone cannot teach a small backbone what it never knew (docs/results.md, "Choosing the configuration").
    preset_with: ClassVar[Mapping[str, str]] = {"pocket": "low_rank"}
