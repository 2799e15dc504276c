"""Self-regulating prompts (PromptSRC).

Khattak, Wasim, Naseer, Khan, Yang, Khan. "Self-regulating Prompts: Foundational Model Adaptation without
Forgetting." ICCV 2023. Published average over 11 datasets, base-to-novel, ViT-B/16 (also in the DroPLe
paper's table): 84.26 / 76.10 / 79.97.

Independent deep prompts in both towers, held by three regularisers:

  mutual agreement    L = L_ce + 25 |g - g^o|_1 + 10 |f - f^o|_1 + KL(q^o || q)
                      f, g unit image and class features, q predictions, o the frozen branch; L1 is a mean
                      over elements, and so is KL in their code (sum over the batch / B K)
  prompt aggregation  theta* = sum_e w_e theta_e over the last prompts of each epoch e = 1 .. E, w_e a normal
                      density N(mu, sigma^2) at e, made to sum to one
  textual diversity   g^o is averaged over many sentences: the task's and eleven general ones here (60 there,
                      averaged before they are made unit vectors)

Authors' defaults: depth 9, length 4, weights 25 / 10 / 1, mu 15 and sigma 1 of 20 epochs (base-to-novel; here
as shares of the epochs, 0.75 and 0.05), SGD 2.5e-3, batch 4. Few-shot: 50 epochs, mu 30 sigma 30 or mu 45
sigma 5, by dataset.

Checked against slow references in float64 (tests/test_prompt_methods.py): differences of at most 3e-6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from drople.aggregate import GaussianAggregate
from drople.backbone import Backbone, Sentences
from drople.losses import kl_consistency, l1_consistency
from drople.methods.base import Batch, Presets, PromptMethod, Task, frozen_classes, register
from drople.options import option
from drople.prompts import deep_prompts
from drople.regulariser import Branches, Progress
from drople.templates import with_eleven


@dataclass(frozen=True)
class PromptSRCOptions:
    text_depth: int = option(9, "text prompts at the first so many layers (PromptSRC 9)", low=1)
    text_length: int = option(4, "text prompts a layer (PromptSRC 4)", low=1)
    visual_depth: int = option(9, "visual prompts at the first so many layers (PromptSRC 9)", low=1)
    visual_length: int = option(4, "visual prompts a layer (PromptSRC 4)", low=1)
    init: str = option("a photo of a", "words the first layer's text prompts start from")
    scl_text: float = option(25.0, "weight of L1 to the frozen class features (PromptSRC 25)", low=0)
    scl_image: float = option(10.0, "weight of L1 to the frozen image features (PromptSRC 10)", low=0)
    scl_logits: float = option(1.0, "weight of KL to the frozen prediction (PromptSRC 1)", low=0)
    frozen_view: Literal["same", "plain"] = option(
        "same", "the frozen branch sees the same augmented image (PromptSRC), or the plain one: one pass less"
    )
    gpa_mean: float = option(0.75, "mu of the aggregation, as a share of the epochs (PromptSRC 15/20)", low=0)
    gpa_std: float = option(0.05, "sigma of the aggregation, as a share (PromptSRC 1/20)", low=1e-3)


@register
class PromptSRC(PromptMethod):
    name = "promptsrc"
    title = "Self-regulating prompts"
    kind = "prompt"
    citation = "Khattak et al., ICCV 2023"
    Options = PromptSRCOptions
    options: PromptSRCOptions
    visual_prompts: GaussianAggregate
    presets: ClassVar[Presets] = {
        "authors": {"optimizer": "sgd", "lr": 2.5e-3, "batch_size": 4, "epochs": 20},
        "authors-few-shot": {
            "optimizer": "sgd",
            "lr": 2.5e-3,
            "batch_size": 4,
            "epochs": 50,
            "gpa_mean": 0.6,
            "gpa_std": 0.6,
        },
    }

    def __init__(self, backbone: Backbone, task: Task, options: PromptSRCOptions) -> None:
        super().__init__(backbone, task, options)
        o = options
        text, visual, notes = deep_prompts(backbone, o)
        self.notes += notes
        self.text_prompts = GaussianAggregate(text, o.gpa_mean, o.gpa_std)
        self.visual_prompts = GaussianAggregate(visual, o.gpa_mean, o.gpa_std)
        self.frozen_classes = frozen_classes(backbone, task.words, with_eleven(task.templates))

    def text_states(self) -> Tensor:
        return self.text_prompts()

    def sentences(self, words: Sequence[str]) -> Sentences:
        return self.backbone.prompted(words, context=self.options.text_length)

    def advance(self, progress: Progress) -> None:
        super().advance(progress)
        for prompts in (self.text_prompts, self.visual_prompts):
            prompts.advance(progress.epoch, progress.epochs)

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        o, frozen, frozen_logits = self.options, branches.frozen_images, branches.frozen_logits
        if o.frozen_view == "same":
            with torch.no_grad():
                frozen = self.backbone.encode_images(batch.images)
                frozen_logits = self.similarity(frozen, branches.frozen_classes)
        return {
            "scl_text": o.scl_text * l1_consistency(branches.classes, branches.frozen_classes),
            "scl_image": o.scl_image * l1_consistency(branches.images, frozen),
            "scl_logits": o.scl_logits * kl_consistency(branches.logits, frozen_logits),
        }
