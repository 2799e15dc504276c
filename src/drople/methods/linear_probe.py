"""Linear probe: logistic regression on the frozen image features.

Radford et al. "Learning Transferable Visual Models From Natural Language Supervision." ICML 2021.

    logits = scale (f V' + b),   cross-entropy

f: unit image feature; V [K, E] and b [K] start at zero, so no text is used. The authors fit by L-BFGS with
an L2 penalty chosen on validation images; here the common loop does it, with its weight decay, and `scale`
is CLIP's own, so that the loop's rate fits a weight of features of length 1. `start=text` puts the class
features into V first: the zero-shot initialised probe of Silva-Rodriguez et al., "A Closer Look at the
Few-Shot Adaptation of Large Vision-Language Models", CVPR 2024 (without its constraints).

A probe knows its training classes and nothing else: asked for any other class it answers zero-shot, for all
classes asked, since the two kinds of logits cannot be compared.

Checked against a slow reference in tests/test_adapters.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone
from drople.methods.adapter import FeatureAdapter
from drople.methods.base import Task, register
from drople.options import option


@dataclass(frozen=True)
class LinearProbeOptions:
    start: Literal["zero", "text"] = option("zero", "weights start at zero, or at the class features (ZS-LP)")


@register
class LinearProbe(FeatureAdapter):
    name = "linear-probe"
    title = "Linear probe"
    citation = "Radford et al., ICML 2021"
    Options = LinearProbeOptions

    def __init__(self, backbone: Backbone, task: Task, options: LinearProbeOptions) -> None:
        super().__init__(backbone, task, options)
        start = F.normalize(self.frozen_classes, dim=-1).cpu()
        self.weight = nn.Parameter(start if options.start == "text" else torch.zeros_like(start))
        self.bias = nn.Parameter(torch.zeros(len(task.words)))

    def training_weights(self) -> Tensor:
        return torch.cat([self.weight, self.bias[:, None]], dim=1)

    @torch.no_grad()
    def class_weights(self, words: Sequence[str]) -> Tensor:
        """Rows of weight and bias."""
        seen = self.seen(words)
        if seen.any(1).all():
            return seen @ self.training_weights()
        return F.pad(super().class_weights(words), (0, 1))

    def scores(self, features: Tensor, class_weights: Tensor) -> Tensor:
        weight, bias = class_weights[:, :-1], class_weights[:, -1]
        return self.backbone.logit_scale * (F.normalize(features, dim=-1) @ weight.T + bias)
