"""Zero-shot CLIP: class names in sentences, nothing learned.

Radford et al. "Learning Transferable Visual Models From Natural Language Supervision." ICML 2021.
With several templates the unit features of the sentences are averaged.
"""

from collections.abc import Sequence

from torch import Tensor

from drople.methods.base import Batch, Method, frozen_classes, register


@register
class ZeroShot(Method):
    name = "zero-shot"
    title = "Zero-shot CLIP"
    kind = "zero-shot"
    citation = "Radford et al., ICML 2021"

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def class_features(self, words: Sequence[str]) -> Tensor:
        return frozen_classes(self.backbone, words, self.task.templates)

    def image_features(self, images: Tensor) -> Tensor:
        return self.backbone.encode_images(images)
