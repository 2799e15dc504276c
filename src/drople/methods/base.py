"""What a method is, and the registry it enters by standing in this folder.

A method holds what is learned, turns a batch into named losses, and class names and images into
features. `TowerMethod` learns something inside the towers by cross-entropy, with DroPLe around it if asked;
`PromptMethod` is its common case.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone
from drople.backbone.walk import Adapt, Updates
from drople.cuda_graph import Branch
from drople.data.images import normalise
from drople.losses import cross_entropy
from drople.regulariser import Branches, DropleOptions, Progress, Regulariser
from drople.sharding import shared_out

Presets = Mapping[str, Mapping[str, Any]]
ENCODE_BATCH = 64


@dataclass(frozen=True)
class Task:
    """What is to be told apart: the words of each class and the sentences around them."""

    words: tuple[str, ...]
    templates: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """Augmented, normalised images, their labels, and the frozen features of the plain images."""

    images: Tensor  # [B, 3, S, S]
    labels: Tensor  # [B]
    frozen: Tensor  # [B, E]


@dataclass(frozen=True)
class TrainingData:
    """Decoded images, labels and frozen features, all on the device."""

    images: Tensor  # uint8 [N, 3, R, R]
    labels: Tensor  # [N]
    frozen: Tensor  # [N, E]


@dataclass(frozen=True)
class NoOptions:
    """For methods that have none."""


@torch.no_grad()
def plain_views(images: Tensor, backbone: Backbone) -> Iterator[Tensor]:
    """Training images as prediction sees them: at the backbone's size, normalised, a portion at a time."""
    size = backbone.pixels.size
    for part in images.split(ENCODE_BATCH):
        pixels = F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True)
        yield normalise(pixels, backbone.pixels, backbone.dtype)


def frozen_classes(backbone: Backbone, words: Sequence[str], templates: Sequence[str]) -> Tensor:
    """`z_t^o` [K, E]: the frozen features of each class, mean over the templates. Not normalised."""
    features = [backbone.encode_text(backbone.sentences([t.format(w) for w in words])) for t in templates]
    if len(features) == 1:
        return features[0]
    return torch.stack([F.normalize(f, dim=-1) for f in features]).mean(0)


class Method(nn.Module, ABC):
    """One way of adapting a frozen backbone.

    Parameters and persistent buffers are what is saved: the backbone is held, not owned, so a saved method
    is as small as what it learned.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kind: ClassVar[str]  # "prompt", "adapter", "zero-shot"
    citation: ClassVar[str]
    Options: ClassVar[type] = NoOptions
    presets: ClassVar[Presets] = {}
    # Which of them suits a backbone better than the default does, by the backbone's name.
    preset_with: ClassVar[Mapping[str, str]] = {}
    training: bool

    def __init__(self, backbone: Backbone, task: Task, options: Any) -> None:
        super().__init__()
        self.backbone, self.task, self.options = backbone, task, options
        self.notes: list[str] = []
        self.frozen_classes = frozen_classes(backbone, task.words, task.templates)
        self.monitor: dict[str, Tensor] = {}  # shown beside the losses
        self.log_prior: Tensor | None = None  # set by training where the loss is logit-adjusted

    def prepare(self, data: TrainingData) -> None:
        """Shown the training images once, before the first step: caches and closed forms are made here."""

    def finish(self, data: TrainingData) -> None:
        """Shown them once more after the last step: what is made of learned features is made here."""

    def select(self, images: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> None:
        """After training: validation batches (normalised images, labels) for what is searched."""

    @abstractmethod
    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        """Named, weighted losses; their sum is minimised. No host sync: a step may be a CUDA graph."""

    @abstractmethod
    def class_features(self, words: Sequence[str]) -> Tensor:
        """Features [K, E] of any classes, seen in training or not."""

    @abstractmethod
    def image_features(self, images: Tensor) -> Tensor:
        """Features [B, E] of normalised images."""

    def advance(self, progress: Progress) -> None:
        """Told before each step how far training is; what changes with it belongs here."""

    @property
    def fixed_shapes(self) -> bool:
        """Whether every step runs the same kernels, so that a CUDA graph can stand for them."""
        return True

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.training_step(batch)

    @torch.no_grad()
    def class_weights(self, words: Sequence[str]) -> Tensor:
        """Unit features of the classes: computed once, then a classifier is one matrix product."""
        return F.normalize(self.class_features(words), dim=-1)

    def weights_by_text(self, words: Sequence[str]) -> Tensor:
        """Those that the classes would have if nothing but their text were known: the confidence of a list of
        classes that were not trained on is calibrated by them."""
        return self.class_weights(words)

    @torch.no_grad()
    def logits(self, images: Tensor, class_weights: Tensor) -> Tensor:
        return self.similarity(self.image_features(images), class_weights)

    def similarity(self, images: Tensor, classes: Tensor) -> Tensor:
        """`sim(z_v, z_t) / tau`."""
        return self.backbone.logit_scale * F.normalize(images, dim=-1) @ F.normalize(classes, dim=-1).T

    def load_learned(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what was saved (`state_dict`); a method whose shapes hang on the data makes room first."""
        self.load_state_dict(dict(tensors))

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """What the optimiser gets; a method may give some of its parameters another rate."""
        return [{"params": list(self.parameters()), "lr": lr}]

    @property
    def takes_prior(self) -> bool:
        """Whether the option `loss` keeps the class prior out of what is learned; no, for a method without a
        cross-entropy for it to enter."""
        return self.trainable > 0

    @property
    def learns(self) -> bool:
        """Whether it looks at the training images at all."""
        return self.trainable > 0 or type(self).prepare is not Method.prepare

    @property
    def trainable(self) -> int:
        return sum(p.numel() for p in self.parameters())


class TowerMethod(Method):
    """Something learned inside the towers (prompts, weights, adapters), trained by cross-entropy.

    A subclass says what it puts there and may add losses. With a `regulariser` tokens drop and DroPLe's
    terms join.
    """

    # Whether processes may share the classes out: not where a step looks at gradients of its own batch.
    shardable: ClassVar[bool] = True
    # The options of dropout and its terms, where tokens drop.
    DropOptions: ClassVar[type[DropleOptions]] = DropleOptions

    def __init__(self, backbone: Backbone, task: Task, options: Any) -> None:
        super().__init__(backbone, task, options)
        self.regulariser: Regulariser | None = None
        self.visual_prompts: nn.Module | None = None
        self.shard_classes = False  # set by training where processes share the text encoding out
        self.folded = False  # whether the image tower has its updates in its weights

    @property
    def shares_classes(self) -> bool:
        """Whether processes may share its classes out; what a prediction leans on is asked of all classes at once."""
        leaning = self.regulariser is not None and self.regulariser.options.rate == "attribution"
        return self.shardable and not leaning

    def text_states(self) -> Tensor | None:
        """The text prompts of every layer [depth, M, D]."""
        return None

    def sentences(self, words: Sequence[str]) -> Any:
        """The classes as the text tower reads them, with places for prompts where there are any."""
        before, after = self.task.templates[0].split("{}")
        return self.backbone.prompted(words, context=0, before=before, after=after)

    def vision_updates(self) -> Updates | None:
        """What the layers of the image tower add to their projections."""
        return None

    def text_updates(self) -> Updates | None:
        return None

    def adapt_vision(self) -> Adapt | None:
        """What is added to the layers of the image tower."""
        return None

    def adapt_text(self) -> Adapt | None:
        return None

    @cached_property
    def _sentences(self) -> Any:
        """Those of the classes trained on, laid out once."""
        return self.sentences(self.task.words)

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        return {}

    def advance(self, progress: Progress) -> None:
        if self.regulariser is not None:
            self.regulariser.advance(progress)

    @property
    def fixed_shapes(self) -> bool:
        at_once = self.backbone.fits_at_once(self._sentences)
        return at_once and (self.regulariser is None or self.regulariser.fixed_shapes)

    def wrap(self, regulariser: Regulariser) -> None:
        """Let tokens drop: "+ DroPLe"."""
        self.regulariser = regulariser
        self.notes += regulariser.notes

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        return self.branch_losses(self.forward_branches(batch), batch)

    def forward_branches(self, batch: Batch) -> Branches:
        """Both branches' features of a batch; with a regulariser the learnable one's tokens drop."""
        vision = text = dropouts = None
        if self.regulariser is not None:
            vision = self.regulariser.dropout("vision")
            text = self.regulariser.dropout("text", rows=batch.labels)
            self.regulariser.attribute(vision, text, partial(self._best_logits, batch.images))
            dropouts = vision, text
        # The towers know nothing of each other until their features meet: on a GPU they run side by side.
        with Branch(batch.images.device) as branch:
            images = self.encode_images(batch.images, vision)
        encode = partial(self.encode_text, dropout=text)
        classes = shared_out(encode, self._sentences, text) if self.shard_classes else encode(self._sentences)
        branch.join([images] if vision is None else [images, *vision.tensors()])
        return Branches(
            images=images,
            classes=classes,
            frozen_images=batch.frozen,
            frozen_classes=self.frozen_classes,
            logits=self.similarity(images, classes),
            frozen_logits=self.similarity(batch.frozen, self.frozen_classes),
            dropouts=dropouts,
        )

    def _best_logits(self, images: Tensor, vision: Any, text: Any) -> tuple[Tensor, Tensor]:
        """The logit of each image's best class and of each class's best image."""
        logits = self.similarity(self.encode_images(images, vision), self.encode_text(self._sentences, text))
        return logits.amax(1), logits.amax(0)

    def branch_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        losses = {"cross_entropy": cross_entropy(branches.logits, batch.labels, self.log_prior)}
        if self.regulariser is not None and branches.dropouts is not None:
            losses |= self.regulariser.losses(branches, *branches.dropouts)
            self.monitor = self.regulariser.monitor(*branches.dropouts)
        # Last: a method that takes gradients recomputes chunks of classes, and what dropout keeps of them with it.
        losses |= self.extra_losses(branches, batch)
        self.monitor["accuracy"] = (branches.logits.detach().argmax(1) == batch.labels).float().mean()
        return losses

    def encode_images(self, images: Tensor, dropout: Any = None) -> Tensor:
        prompts = None if self.visual_prompts is None else self.visual_prompts()
        return self.backbone.encode_images(
            images,
            prompts=prompts,
            dropout=dropout,
            updates=None if self.folded else self.vision_updates(),
            adapt=self.adapt_vision(),
        )

    @torch.no_grad()
    def fold(self) -> None:
        """Put what the image tower's layers add to their projections into these: for a copy that predicts, and has
        a backbone of its own."""
        for layer, update in (self.vision_updates() or {}).items():
            self.backbone.vision[layer].weight += update
        self.folded = True

    def encode_text(self, sentences: Any, dropout: Any = None) -> Tensor:
        return self.backbone.encode_text(
            sentences,
            prompts=self.text_states(),
            dropout=dropout,
            class_words_drop=self.regulariser is None or self.regulariser.options.class_words_drop,
            updates=self.text_updates(),
            adapt=self.adapt_text(),
        )

    def class_features(self, words: Sequence[str]) -> Tensor:
        return self.encode_text(self.sentences(words))

    def image_features(self, images: Tensor) -> Tensor:
        return self.encode_images(images)


class PromptMethod(TowerMethod):
    """Prompts in one or both towers: a subclass sets `visual_prompts` (a module returning [depth, M, D]), or
    not, and gives the text prompts and where they stand."""

    @abstractmethod
    def text_states(self) -> Tensor:
        """The text prompts of every layer [depth, M, D]."""

    @abstractmethod
    def sentences(self, words: Sequence[str]) -> Any:
        """Where this method's prompts stand around the class words."""


REGISTRY: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Stand a method beside the others, under its name."""
    REGISTRY[method.name] = method
    return method
