"""What adapters that work on the frozen features share: not a method itself.

The towers stay as they are; what is learned stands behind them. Where an adapter knows only its training
classes (a cache, a weight a class), `class_weights` says so: a row is the class's unit feature and behind
it a one-hot of which training class it is, all zeros for a class never trained on. Such a class gets its
zero-shot logit and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drople.backbone import Backbone
from drople.cache_model import CacheModel
from drople.data.augment import random_resized_crop_flip
from drople.data.images import normalise
from drople.losses import cross_entropy
from drople.methods.base import Batch, Method, Task, TrainingData, frozen_classes
from drople.options import option

ENCODE_BATCH = 64
CROP_SCALE = (0.5, 1.0)  # of the crops that Tip-Adapter's code caches and trains on


class FeatureAdapter(Method):
    """Cross-entropy of `scores` over frozen features of the augmented images."""

    kind = "adapter"

    def image_features(self, images: Tensor) -> Tensor:
        return self.adapt(self.backbone.encode_images(images))

    def class_features(self, words: Sequence[str]) -> Tensor:
        if tuple(words) == self.task.words:
            return self.frozen_classes
        return frozen_classes(self.backbone, words, self.task.templates)

    def adapt(self, features: Tensor) -> Tensor:
        """What becomes of an image's frozen features [B, E]."""
        return features

    def training_weights(self) -> Tensor:
        """The class weights of the training classes, with the gradient of what is learned in them."""
        return F.normalize(self.frozen_classes, dim=-1)

    def scores(self, features: Tensor, class_weights: Tensor) -> Tensor:
        """Logits [B, K] of (adapted) image features."""
        return self.similarity(features, class_weights)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        logits = self.scores(self.image_features(batch.images), self.training_weights())
        self.monitor["accuracy"] = (logits.detach().argmax(1) == batch.labels).float().mean()
        return {"cross_entropy": cross_entropy(logits, batch.labels, self.log_prior)}

    @torch.no_grad()
    def logits(self, images: Tensor, class_weights: Tensor) -> Tensor:
        return self.scores(self.image_features(images), class_weights)

    def seen(self, words: Sequence[str]) -> Tensor:
        """[K, C] one-hot: which training class each word is, zeros for none."""
        device = self.frozen_classes.device
        places = {word: n for n, word in enumerate(self.task.words)}
        which = torch.tensor([places.get(word, -1) for word in words], device=device)
        return (which[:, None] == torch.arange(len(places), device=device)).float()


@dataclass(frozen=True)
class CacheOptions:
    cache_alpha: float = option(1.17, "weight of the cache before the search (authors 1.17 to 10)", low=0)
    cache_beta: float = option(1.0, "sharpness of the cache before the search (authors 1)", low=0)
    largest_alpha: float = option(10.0, "alpha is searched below this (authors 3 to 50, by dataset)", low=0.1)
    largest_beta: float = option(12.0, "beta is searched below this (authors 7 to 50, by dataset)", low=0.1)
    cache_views: int = option(10, "random crops averaged into a key (authors 10); 0: the plain image", low=0)


class CacheAdapter(FeatureAdapter):
    """Zero-shot logits plus the votes of a cache: `scale f W' + alpha exp(-beta (1 - g(f) K')) L`."""

    Options = CacheOptions
    learn_keys = False
    own: Tensor

    def __init__(self, backbone: Backbone, task: Task, options: Any) -> None:
        super().__init__(backbone, task, options)
        self.cache = CacheModel(
            backbone.embed_dim,
            len(task.words),
            alpha=options.cache_alpha,
            beta=options.cache_beta,
            learn_keys=self.learn_keys,
        )
        self.register_buffer("own", torch.eye(len(task.words)), persistent=False)

    def affinity(self, features: Tensor) -> Tensor:
        """How alike images [B, E] and keys are [B, N]."""
        return F.normalize(features, dim=-1) @ self.cache.keys.T

    @torch.no_grad()
    def prepare(self, data: TrainingData) -> None:
        keys = data.frozen
        if self.options.cache_views:
            # Seeded here, whatever was drawn before: a resumed run must find the same keys.
            generator = torch.Generator(data.images.device).manual_seed(0)
            views = [self._view(data.images, generator) for _ in range(self.options.cache_views)]
            keys = torch.stack(views).mean(0)
        self.cache.hold(F.normalize(keys, dim=-1), data.labels)

    def _view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        pixels, dtype = self.backbone.pixels, self.backbone.dtype
        crops = (
            random_resized_crop_flip(part, pixels.size, generator, scale=CROP_SCALE)
            for part in images.split(ENCODE_BATCH)
        )
        return torch.cat([self.backbone.encode_images(normalise(crop, pixels, dtype)) for crop in crops])

    @torch.no_grad()
    def class_weights(self, words: Sequence[str]) -> Tensor:
        return torch.cat([F.normalize(self.class_features(words), dim=-1), self.seen(words)], dim=1)

    def training_weights(self) -> Tensor:
        return torch.cat([super().training_weights(), self.own], dim=1)

    def scores(self, features: Tensor, class_weights: Tensor) -> Tensor:
        text, own = class_weights.split([self.backbone.embed_dim, len(self.own)], dim=1)
        return self.similarity(features, text) + self.cache(self.affinity(features)) @ own.T

    @torch.no_grad()
    def select(self, images: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> None:
        """alpha and beta by the accuracy on validation images."""
        batches = [(self.image_features(pixels), labels) for pixels, labels in images()]
        if not batches:
            return
        features, labels = (torch.cat(part) for part in zip(*batches, strict=True))
        text = self.training_weights()[:, : self.backbone.embed_dim]
        self.cache.search(
            self.affinity(features),
            self.similarity(features, text),
            labels,
            largest_alpha=self.options.largest_alpha,
            largest_beta=self.options.largest_beta,
        )

    def load_learned(self, tensors: Mapping[str, Tensor]) -> None:
        if "cache.keys" in tensors and "cache.labels" in tensors:
            self.cache.hold(tensors["cache.keys"], tensors["cache.labels"])
        super().load_learned(tensors)
