"""What adapters that work on the towers' features share: not a method itself.

The towers stay as they are; what is learned stands behind them. An adapter that takes prompts may stand on
the features of a prompt learner instead of the frozen ones ("+ DroPLe" on adapters, the paper's appendix
B.3, which says no more than that; this is our reading): one pass of the prompted, dropped towers gives the
losses of both, which train together, and an adapter's loss reaches the prompts too.

Where an adapter knows only its training classes (a cache, a weight a class), `class_weights` says so: a row
is the class's unit feature and behind it a one-hot of which training class it is, all zeros for a class never
trained on. Such a class gets its zero-shot logit and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from drople.backbone import Backbone
from drople.cache_model import CacheModel
from drople.data.augment import random_resized_crop_flip
from drople.data.images import normalise
from drople.losses import cross_entropy
from drople.methods.base import (
    ENCODE_BATCH,
    Batch,
    Method,
    Task,
    TowerMethod,
    TrainingData,
    frozen_classes,
    plain_views,
)
from drople.options import option
from drople.regulariser import Progress

CROP_SCALE = (0.5, 1.0)  # of the crops that Tip-Adapter's code caches and trains on


class FeatureAdapter(Method):
    """Cross-entropy of `scores` over features of the augmented images."""

    kind = "adapter"
    takes_prompts: ClassVar[bool] = False

    def __init__(self, backbone: Backbone, task: Task, options: Any) -> None:
        super().__init__(backbone, task, options)
        self.prompts: TowerMethod | None = None

    def stand_on(self, prompts: TowerMethod) -> None:
        """Take the features of these prompts, and train them."""
        # A class name too long to stand among the prompts is refused here, not at the first step.
        prompts.sentences(self.task.words)
        self.prompts = prompts
        self.notes += prompts.notes

    def encode(self, images: Tensor) -> Tensor:
        """The features that the adapter stands on [B, E]: nothing drops."""
        if self.prompts is not None:
            return self.prompts.image_features(images)
        return self.backbone.encode_images(images)

    def image_features(self, images: Tensor) -> Tensor:
        return self.adapt(self.encode(images))

    def class_features(self, words: Sequence[str]) -> Tensor:
        if self.prompts is not None:
            return self.prompts.class_features(words)
        if tuple(words) == self.task.words:
            return self.frozen_classes
        return frozen_classes(self.backbone, words, self.task.templates)

    def adapt(self, features: Tensor) -> Tensor:
        """What becomes of an image's features [B, E]."""
        return features

    def training_weights(self) -> Tensor:
        """The class weights of the training classes, with the gradient of what is learned in them."""
        prompts, words = self.prompts, self.task.words
        return self.weights_of(self.frozen_classes if prompts is None else prompts.class_features(words))

    def weights_of(self, classes: Tensor) -> Tensor:
        """The class weights of the training classes from their features [K, E]."""
        return F.normalize(classes, dim=-1)

    def scores(self, features: Tensor, class_weights: Tensor) -> Tensor:
        """Logits [B, K] of (adapted) image features."""
        return self.similarity(features, class_weights)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        if self.prompts is None:
            return self.losses(self.image_features(batch.images), self.training_weights(), batch)
        self.prompts.log_prior = self.log_prior
        branches = self.prompts.forward_branches(batch)
        of_prompts = self.prompts.branch_losses(branches, batch)
        self.monitor = {}
        own = self.losses(self.adapt(branches.images), self.weights_of(branches.classes), batch)
        self.monitor = self.prompts.monitor | self.monitor
        return of_prompts | {f"adapter_{name}": loss for name, loss in own.items()}

    def losses(self, features: Tensor, class_weights: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Of adapted features of the batch and the weights of the training classes."""
        logits = self.scores(features, class_weights)
        self.monitor["accuracy"] = (logits.detach().argmax(1) == batch.labels).float().mean()
        return {"cross_entropy": cross_entropy(logits, batch.labels, self.log_prior)}

    def advance(self, progress: Progress) -> None:
        if self.prompts is not None:
            self.prompts.advance(progress)

    def finish(self, data: TrainingData) -> None:
        if self.prompts is not None:
            self.prompts.finish(data)

    @property
    def fixed_shapes(self) -> bool:
        return self.prompts is None or self.prompts.fixed_shapes

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        if self.prompts is None:
            return super().parameter_groups(lr)
        theirs = {id(p) for p in self.prompts.parameters()}
        own = [p for p in self.parameters() if id(p) not in theirs]
        return self.prompts.parameter_groups(lr) + ([{"params": own, "lr": lr}] if own else [])

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
    """Zero-shot logits plus the votes of a cache: `scale f W' + alpha exp(-beta (1 - g(f) K')) L`.

    On prompts the keys of the first step are features of prompts that have not learned yet. Keys that do not
    learn themselves are made anew when training is over, of the learned prompts, with nothing dropped.
    """

    Options = CacheOptions
    takes_prompts = True
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
        if self.options.cache_views:
            # Seeded here, whatever was drawn before: a resumed run must find the same keys.
            generator = torch.Generator(data.images.device).manual_seed(0)
            views = [self._view(data.images, generator) for _ in range(self.options.cache_views)]
            keys = torch.stack(views).mean(0)
        elif self.prompts is None:
            keys = data.frozen
        else:
            keys = torch.cat([self.encode(view) for view in plain_views(data.images, self.backbone)])
        self.cache.hold(F.normalize(keys, dim=-1), data.labels)

    def finish(self, data: TrainingData) -> None:
        super().finish(data)
        if self.prompts is not None and not self.learn_keys:
            self.prepare(data)

    def _view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        backbone = self.backbone
        size = backbone.pixels.size
        crops = (
            random_resized_crop_flip(part, size, generator, scale=CROP_SCALE)
            for part in images.split(ENCODE_BATCH)
        )
        return torch.cat([self.encode(normalise(crop, backbone.pixels, backbone.dtype)) for crop in crops])

    @torch.no_grad()
    def class_weights(self, words: Sequence[str]) -> Tensor:
        return torch.cat([F.normalize(self.class_features(words), dim=-1), self.seen(words)], dim=1)

    def weights_of(self, classes: Tensor) -> Tensor:
        return torch.cat([F.normalize(classes, dim=-1), self.own], dim=1)

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
        keys, labels = tensors.get("cache.keys"), tensors.get("cache.labels")
        # Keys that an optimiser already holds must stay where they are.
        if keys is not None and labels is not None and keys.shape != self.cache.keys.shape:
            self.cache.hold(keys, labels)
        super().load_learned(tensors)
