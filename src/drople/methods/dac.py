"""Domain Aligned CLIP: DAC-V aligns images with images, DAC-VT images with class texts too.

Gondal, Gast, Ruiz, Droste, Macri, Kumar, Staudigl. "Domain Aligned CLIP for Few-shot Classification."
WACV 2024. Published 16-shot ImageNet accuracy (from the DroPLe paper's appendix): DAC-V 72.98 / 67.77,
DAC-VT 74.59 / 69.64 with ViT-B/16 / ViT-B/32.

    g(f)   = unit(f A'),  A [E, E] starting at the identity          the visual adapter
    L_v    = -log sum_{j: y_j = y} exp(g(f) g(k_j)' / tau) / sum_j exp(g(f) g(k_j)' / tau)
    L_t    = cross-entropy of scale f unit(W + R)',  R [K, E] starting at zero        (DAC-VT)
    logits = scale f unit(W + R)' + alpha exp(-beta (1 - g(f) g(K)')) L

K, L: the cached training images and their labels; f: unit image feature; W: class features. Taken from the
paper's abstract: a light adapter trained with an intra-modal contrastive objective, and modulated class
embeddings, neither tower touched. Its equations and code could not be read here, so the rest is our reading:
the form of L_v (an image against the cache and the plain images of its batch; all of its class are
positives), tau, the residual R, and the cache's logits, which are Tip-Adapter's. alpha and beta are searched
on validation images. A class never trained on has neither votes nor a residual: its logit is zero-shot.

"+ DroPLe" (published DAC-V 73.44 / 67.92, DAC-VT 74.74 / 70.05): f, K and W are features of DroPLe's prompts.
While training, K are those of the prompts as they started, and an image is held against K alone: its batch's
plain images are known by their frozen features only.

Checked against a slow reference of these equations in tests/test_adapters.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone
from drople.losses import cross_entropy
from drople.methods.adapter import CacheAdapter, CacheOptions
from drople.methods.base import Batch, Task, register
from drople.options import option


@dataclass(frozen=True)
class DacOptions(CacheOptions):
    contrast: float = option(0.1, "temperature tau of the intra-modal contrast (ours)", low=0.001)


@register
class DacV(CacheAdapter):
    name = "dac-v"
    title = "Domain Aligned CLIP, visual"
    citation = "Gondal et al., WACV 2024"
    Options = DacOptions

    def __init__(self, backbone: Backbone, task: Task, options: DacOptions) -> None:
        super().__init__(backbone, task, options)
        self.adapter = nn.Parameter(torch.eye(backbone.embed_dim))

    @property
    def takes_prior(self) -> bool:
        """The contrast has no place for it; the cross-entropy of prompts has."""
        return self.prompts is not None

    def aligned(self, features: Tensor) -> Tensor:
        """`g(f)` of features of any length."""
        return F.normalize(F.normalize(features, dim=-1) @ self.adapter.T, dim=-1)

    def affinity(self, features: Tensor) -> Tensor:
        return self.aligned(features) @ self.aligned(self.cache.keys).T

    def losses(self, features: Tensor, class_weights: Tensor, batch: Batch) -> dict[str, Tensor]:
        others, labels = self.cache.keys, self.cache.labels
        if self.prompts is None:
            others, labels = torch.cat([others, batch.frozen]), torch.cat([labels, batch.labels])
        closeness = self.aligned(features) @ self.aligned(others).T / self.options.contrast
        alike = closeness.masked_fill(batch.labels[:, None] != labels, -torch.inf)
        return {"intra_modal": (closeness.logsumexp(1) - alike.logsumexp(1)).mean()}


@register
class DacVT(DacV):
    name = "dac-vt"
    title = "Domain Aligned CLIP, visual and textual"

    def __init__(self, backbone: Backbone, task: Task, options: DacOptions) -> None:
        super().__init__(backbone, task, options)
        self.modulation = nn.Parameter(torch.zeros(len(task.words), backbone.embed_dim))

    @property
    def takes_prior(self) -> bool:
        return True

    def class_features(self, words: Sequence[str]) -> Tensor:
        return F.normalize(super().class_features(words), dim=-1) + self.seen(words) @ self.modulation

    def weights_of(self, classes: Tensor) -> Tensor:
        return super().weights_of(F.normalize(classes, dim=-1) + self.modulation)

    def losses(self, features: Tensor, class_weights: Tensor, batch: Batch) -> dict[str, Tensor]:
        logits = self.similarity(features, class_weights[:, : self.backbone.embed_dim])
        self.monitor["accuracy"] = (logits.detach().argmax(1) == batch.labels).float().mean()
        inter = cross_entropy(logits, batch.labels, self.log_prior)
        return super().losses(features, class_weights, batch) | {"inter_modal": inter}
