"""CLIP-Adapter: a bottleneck behind the image tower, mixed with the frozen feature.

Gao, Geng, Zhang, Ma, Fang, Zhang, Li, Qiao. "CLIP-Adapter: Better Vision-Language Models with Feature
Adapters." IJCV 2024.

    A(f) = relu(relu(f W_1') W_2'),   f* = r A(f) + (1 - r) f,   logits = scale cos(f*, w)

f: image feature, not normalised; W_1 narrows it to a quarter; r = 0.2. The paper also tries an adapter behind
the text tower; its code has the visual one only, and so has this. It learns nothing of single classes, so
it answers for any.

Checked against a slow reference in tests/test_adapters.py.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone
from drople.methods.adapter import FeatureAdapter
from drople.methods.base import Task, register
from drople.options import option


@dataclass(frozen=True)
class ClipAdapterOptions:
    reduction: int = option(4, "the bottleneck is so many times narrower than the feature (authors 4)", low=1)
    ratio: float = option(0.2, "share r of the adapted feature (authors 0.2)", low=0, high=1)


@register
class ClipAdapter(FeatureAdapter):
    name = "clip-adapter"
    title = "CLIP-Adapter"
    citation = "Gao et al., IJCV 2024"
    Options = ClipAdapterOptions

    def __init__(self, backbone: Backbone, task: Task, options: ClipAdapterOptions) -> None:
        super().__init__(backbone, task, options)
        narrow = max(1, backbone.embed_dim // options.reduction)
        self.down = nn.Linear(backbone.embed_dim, narrow, bias=False)
        self.up = nn.Linear(narrow, backbone.embed_dim, bias=False)

    def adapt(self, features: Tensor) -> Tensor:
        adapted = F.relu(self.up(F.relu(self.down(features))))
        return self.options.ratio * adapted + (1 - self.options.ratio) * features
