"""Tip-Adapter-F: a cache of the training images whose keys are fine-tuned.

Zhang, Fang, Zhang, Gao, Li, Dai, Qiao, Li. "Tip-Adapter: Training-free Adaption of CLIP for Few-shot
Classification." ECCV 2022. Published 16-shot ImageNet accuracy (from the DroPLe paper's appendix):
73.70 with ViT-B/16.

    logits = scale f W' + alpha exp(-beta (1 - f K')) L,   cross-entropy, K learned

K starts from the unit features of the training images, each the mean over 10 random crops, and is not
normalised again. The authors: AdamW 1e-3, batch 256, 20 epochs (EuroSAT 100); alpha and beta as they start
while training, then searched on validation images. Their code keeps the epoch that is best on the test
images; here the last one is kept. Classes that the cache was not built from keep their zero-shot logits.
"+ DroPLe" (published 73.66) trains keys and prompts together.

Checked against a slow reference in tests/test_adapters.py.
"""

from typing import ClassVar

from drople.methods.adapter import CacheAdapter
from drople.methods.base import Presets, register


@register
class TipAdapterF(CacheAdapter):
    name = "tip-adapter-f"
    title = "Tip-Adapter, keys fine-tuned"
    citation = "Zhang et al., ECCV 2022"
    presets: ClassVar[Presets] = {
        "authors": {"lr": 1e-3, "weight_decay": 0.01, "batch_size": 256, "warmup": 0.0, "clip_norm": 0.0}
    }
    learn_keys = True
