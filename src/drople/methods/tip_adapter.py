"""Tip-Adapter: a cache of the training images beside zero-shot CLIP, nothing trained.

Zhang, Fang, Zhang, Gao, Li, Dai, Qiao, Li. "Tip-Adapter: Training-free Adaption of CLIP for Few-shot
Classification." ECCV 2022. Published 16-shot ImageNet accuracy (from the DroPLe paper's appendix):
70.83 with ViT-B/16, 65.60 with ViT-B/32.

    logits = scale f W' + alpha exp(-beta (1 - f K')) L

f: unit image feature, W: class features, K: unit features of the training images, each the mean over 10
random crops, L: their labels, one-hot. The authors' code starts from alpha 1.17 to 10 and beta 1 and searches
both, on validation images; so does `select`, and nothing here ever sees a test image. The cache has no votes
for classes it was not built from: those keep their zero-shot logits, and beside trained classes they are at
a disadvantage. "+ DroPLe" (published 71.19 / 66.32) trains prompts and builds the cache on their features.

Checked against a slow reference in tests/test_adapters.py.
"""

from torch import Tensor

from drople.methods.adapter import CacheAdapter
from drople.methods.base import Batch, register


@register
class TipAdapter(CacheAdapter):
    name = "tip-adapter"
    title = "Tip-Adapter"
    citation = "Zhang et al., ECCV 2022"

    def losses(self, features: Tensor, class_weights: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {}
