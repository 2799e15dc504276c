"""Conditional Context Optimization (CoCoOp).

Zhou, Yang, Loy, Liu. "Conditional Prompt Learning for Vision-Language Models." CVPR 2022. Published average
over 11 datasets, base-to-novel, ViT-B/16: 80.47 / 71.69 / 75.83.

A meta-net h (linear, ReLU, linear; the hidden layer 16 times narrower than the features) turns an image into
a shift of every context vector, so each image has its own class features:

    v_m(x) = v_m + h(x),  t_k(x) = [v_1(x)] ... [v_M(x)] [CLASS_k]
    p(y | x) = softmax_k( sim(x, g(t_k(x))) / tau ),  x the unit feature of the image,  L = L_ce

Authors' defaults: 4 tokens from "a photo of a", SGD 2e-3, batch 1, 10 epochs.

A batch of B images costs B K sentences, in training and at every prediction. `class_features` are those at
the unshifted context, for whoever needs one vector a class; predictions never use them. With "+ DroPLe" the
regulariser sees the batch's mean of each class's features. Checked against a slow reference in float64, one
image and one class at a time (tests/test_prompt_methods.py): logits differ by at most 4e-6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone, Sentences
from drople.losses import cross_entropy
from drople.methods.base import Batch, Presets, Task, register
from drople.methods.context import ContextMethod, ContextOptions
from drople.options import option
from drople.regulariser import Branches

# At prediction images come in portions of at most so many sentences, whose tokens lie in memory at once.
SENTENCES_AT_ONCE = 4096


@dataclass(frozen=True)
class CoCoOpOptions(ContextOptions):
    reduction: int = option(16, "features over the meta-net's hidden layer, in width (CoCoOp 16)", low=1)


@register
class CoCoOp(ContextMethod):
    name = "cocoop"
    title = "Conditional Context Optimization"
    citation = "Zhou et al., CVPR 2022"
    Options = CoCoOpOptions
    presets: ClassVar[Presets] = {"authors": {"optimizer": "sgd", "lr": 2e-3, "batch_size": 1, "epochs": 10}}

    def __init__(self, backbone: Backbone, task: Task, options: CoCoOpOptions) -> None:
        super().__init__(backbone, task, options)
        hidden = max(1, backbone.embed_dim // options.reduction)
        self.meta_net = nn.Sequential(
            nn.Linear(backbone.embed_dim, hidden), nn.ReLU(), nn.Linear(hidden, backbone.text_width)
        )
        self._named: dict[str, int] = {}  # the classes that were asked for, numbered
        self._asked: tuple[list[int], Sentences] | None = None

    @property
    def fixed_shapes(self) -> bool:
        # Whether all sentences fit at once hangs on the size of the batch.
        return False

    def conditional_classes(self, images: Tensor, sentences: Sentences, dropout: Any = None) -> Tensor:
        """`g(t_k(x))` [B, K, E]: the features of the classes as each image [B, E] conditions them."""
        shift = self.meta_net(F.normalize(images, dim=-1))
        context = self.text_states() + shift[:, None]  # [B, M, D]
        every = context[:, None].expand(-1, len(sentences), -1, -1).flatten(0, 1)
        features = self.backbone.encode_text(
            sentences.repeated(len(images)),
            prompts=every[None],
            dropout=dropout,
            class_words_drop=self.regulariser is None or self.regulariser.options.class_words_drop,
        )
        return features.unflatten(0, (len(images), len(sentences)))

    def conditional_similarity(self, images: Tensor, classes: Tensor) -> Tensor:
        """Each image [B, E] against its own class features [B, K, E]."""
        cosines = (F.normalize(classes, dim=-1) @ F.normalize(images, dim=-1)[..., None]).squeeze(-1)
        return self.backbone.logit_scale * cosines

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        vision = text = None
        if self.regulariser is not None:
            first = torch.arange(len(batch.labels), device=batch.labels.device) * len(self._sentences)
            vision = self.regulariser.dropout("vision")
            text = self.regulariser.dropout("text", rows=first + batch.labels)
            self.regulariser.attribute(vision, text, partial(self._best_logits, batch.images))
        images = self.encode_images(batch.images, vision)
        classes = self.conditional_classes(images, self._sentences, text)
        logits = self.conditional_similarity(images, classes)
        losses = {"cross_entropy": cross_entropy(logits, batch.labels, self.log_prior)}
        if self.regulariser is not None and vision is not None and text is not None:
            branches = Branches(
                images=images,
                classes=classes.mean(0),
                frozen_images=batch.frozen,
                frozen_classes=self.frozen_classes,
                logits=logits,
                frozen_logits=self.similarity(batch.frozen, self.frozen_classes),
            )
            losses |= self.regulariser.losses(branches, vision, text)
            self.monitor = self.regulariser.monitor(vision, text)
        self.monitor["accuracy"] = (logits.detach().argmax(1) == batch.labels).float().mean()
        return losses

    def _best_logits(self, images: Tensor, vision: Any, text: Any) -> tuple[Tensor, Tensor]:
        """The logit of each image's best class; a sentence is for one image, and has no other."""
        features = self.encode_images(images, vision)
        classes = self.conditional_classes(features, self._sentences, text)
        logits = self.conditional_similarity(features, classes)
        return logits.amax(1), logits

    @torch.no_grad()
    def class_weights(self, words: Sequence[str]) -> Tensor:
        """No features to fold, for they hang on the image: a unit row a class, by which `logits` knows it."""
        numbers = [self._named.setdefault(word, len(self._named)) for word in words]
        return F.one_hot(torch.tensor(numbers, device=self.backbone.device), len(self._named)).float()

    @torch.no_grad()
    def logits(self, images: Tensor, class_weights: Tensor) -> Tensor:
        numbers = class_weights.argmax(1).tolist()
        if self._asked is None or self._asked[0] != numbers:
            named = list(self._named)
            self._asked = numbers, self.sentences([named[n] for n in numbers])
        sentences = self._asked[1]
        portions = self.image_features(images).split(max(1, SENTENCES_AT_ONCE // len(sentences)))
        return torch.cat(
            [self.conditional_similarity(x, self.conditional_classes(x, sentences)) for x in portions]
        )
