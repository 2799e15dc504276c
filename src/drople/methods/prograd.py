"""Prompt-aligned Gradient (ProGrad).

Zhu, Niu, Han, Wu, Zhang. "Prompt-aligned Gradient for Prompt Tuning." ICCV 2023. Published average over 11
datasets, base-to-novel, ViT-B/16 (from the KgCoOp paper's table): 82.48 / 70.75 / 76.16.

The context may not unlearn what zero-shot CLIP says. G_d is the gradient of the cross-entropy, G_g that of
the divergence from the zero-shot prediction; where they conflict, G_d loses its part along G_g:

    G = G_d                                        if G_d . G_g >= 0
    G = G_d - lambda (G_d . G_g / |G_g|^2) G_g     otherwise

    L_g = -T^2 sum_k p_zs(k | x, T) log p(k | x, T), whose gradient is that of the KL divergence

Authors' defaults: lambda 1, T 1, 16 tokens (4 from words for base-to-novel), SGD 2e-3, batch 32.

Gradients are changed, not losses, and a step here returns losses: so both gradients are taken inside the
step, and the cross-entropy is returned with its own value and the projected gradient. With "+ DroPLe" only
the cross-entropy is projected; DroPLe's terms keep their gradients. Several processes project each on its
own share of the batch. Checked against gradients through a slow reference in float64
(tests/test_prompt_methods.py): differences of at most 4e-6.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from drople.losses import cross_entropy, soft_cross_entropy, with_gradients
from drople.methods.base import Batch, Presets, register
from drople.methods.context import ContextMethod, ContextOptions
from drople.options import option
from drople.regulariser import Branches


@dataclass(frozen=True)
class ProGradOptions(ContextOptions):
    projection: float = option(1.0, "lambda: how much of a conflict is taken away (ProGrad 1)", low=0)
    temperature: float = option(1.0, "T of the divergence from zero-shot CLIP (ProGrad 1)", low=1e-3)


def project(own: Tensor, general: Tensor, strength: float) -> Tensor:
    """`own` without its part against `general`, where they conflict."""
    conflict = (own * general).sum().clamp_max(0)
    return own - strength * conflict / general.square().sum().clamp_min(1e-30) * general


@register
class ProGrad(ContextMethod):
    name = "prograd"
    title = "Prompt-aligned Gradient"
    citation = "Zhu et al., ICCV 2023"
    Options = ProGradOptions
    options: ProGradOptions
    shardable = False
    presets: ClassVar[Presets] = {
        "authors": {"optimizer": "sgd", "lr": 2e-3, "batch_size": 32, "epochs": 100}
    }

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        losses = super().training_step(batch)
        self.monitor["general"] = self._general
        return losses

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        # The image tower has no prompts: unless its tokens drop, what it says of this view is CLIP's own.
        seen = branches.images if self.regulariser is None else branches.frozen_images
        zero_shot = self.similarity(seen, branches.frozen_classes).detach()
        own = cross_entropy(branches.logits, batch.labels, self.log_prior)
        general = soft_cross_entropy(branches.logits, zero_shot, self.options.temperature)
        self._general = general.detach()
        context = self.text_prompts.prompts
        own_gradient, general_gradient = (
            torch.autograd.grad(loss, context, retain_graph=True)[0] for loss in (own, general)
        )
        projected = project(own_gradient, general_gradient, self.options.projection)
        return {"cross_entropy": with_gradients(own, [context], [projected])}
