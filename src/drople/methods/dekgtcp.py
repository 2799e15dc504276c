"""Divergence-enhanced Knowledge-guided Context Optimization on class-aware prompts (DeKgTCP).

Li et al. "Divergence-enhanced Knowledge-guided Context Optimization for Visual-Language Prompt Tuning." ICLR
2025. Published average over 11 datasets, base-to-novel, ViT-B/16 (from the DroPLe paper's table):
84.96 / 76.38 / 80.44.

The pull to CLIP's class features keeps what was known but also keeps the prompts near it; a second term asks
that learned and frozen class features depend little on each other, by the Hilbert-Schmidt independence
criterion with linear kernels:

    L = L_ce + 8 * 1/K sum_k (1 - cos(w_k, w_k^clip)) + 6 * HSIC(W, W^clip)
    HSIC(W, W^clip) = tr(H K H K^clip),  K = W W^T,  H = I - 1/K 1 1^T

with W (as encoded) and W^clip (unit rows), [K, E], each divided by its Frobenius norm; class-aware prompts
are in class_aware.py. The weights, the norms and the absent factor (K - 1)^-2 are those of the authors' code,
as are Adam 2e-3, batch 32, 100 epochs and a random context of 4.

Checked against a slow reference in float64 (tests/test_prompt_methods.py): differences of at most 1e-6.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from drople.losses import hsic
from drople.methods.base import Batch, Presets, register
from drople.methods.class_aware import ClassAwareMethod, ClassAwareOptions
from drople.options import option
from drople.regulariser import Branches


@dataclass(frozen=True)
class DeKgTCPOptions(ClassAwareOptions):
    divergence: float = option(6.0, "weight of HSIC between learned and frozen classes (DeKg 6)", low=0)


@register
class DeKgTCP(ClassAwareMethod):
    name = "dekgtcp"
    title = "Divergence-enhanced Knowledge-guided Context Optimization"
    citation = "Li et al., ICLR 2025"
    Options = DeKgTCPOptions
    options: DeKgTCPOptions
    presets: ClassVar[Presets] = {"authors": {"init": "", "lr": 2e-3, "batch_size": 32, "epochs": 100}}

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        dependence = hsic(branches.classes, F.normalize(branches.frozen_classes, dim=-1))
        return super().extra_losses(branches, batch) | {"divergence": self.options.divergence * dependence}
