"""Zero-shot CLIP with a template ensemble: nothing learned, many sentences a class.

Radford et al. "Learning Transferable Visual Models From Natural Language Supervision." ICML 2021, section
"Prompt Engineering and Ensembling".

    w_k = mean over templates of unit(G(template with class k)),   logits = scale cos(f, w_k)

The templates are the task's own and the eleven of `templates.py`, which are CLIP's seven best for ImageNet
and four more of its eighty. Checked against a slow reference in tests/test_adapters.py.
"""

from collections.abc import Sequence

from torch import Tensor

from drople.methods.base import Batch, Method, frozen_classes, register
from drople.templates import with_eleven


@register
class ZeroShotEnsemble(Method):
    name = "zero-shot-ensemble"
    title = "Zero-shot CLIP, template ensemble"
    kind = "zero-shot"
    citation = "Radford et al., ICML 2021"

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def class_features(self, words: Sequence[str]) -> Tensor:
        return frozen_classes(self.backbone, words, with_eleven(self.task.templates))

    def image_features(self, images: Tensor) -> Tensor:
        return self.backbone.encode_images(images)
