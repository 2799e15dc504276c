"""Task-Aware Clustering (TAC).

Hao, He, Wu, Wang, Song, Cheng. "Task-Aware Clustering for Prompting Vision-Language Models." CVPR 2025. Published
average over 11 datasets, base-to-novel, ViT-B/16, as the DroPLe paper's table quotes it (the authors' repository
prints no numbers): 85.24 / 77.60 / 81.24.

The task is told to the prompts: the frozen features of its classes are clustered once, and the C centres, carried
into each tower's width, stand before the learnable prompts P_i, Q_i of every layer i as a pre-context:

    c_1 .. c_C = unit centres of k-means on t^o_1 .. t^o_K by their cosine
    text       [bos, A c + a, P_i, "a photo of a {class}.", eos]        A c + a is the same at all layers
    vision     [cls, patches, B c + b, Q_i]        patches do not look at B c + b; cls and Q_i do
    L = L_ce + 20 |t - t^o|_1 + 25 |v - v^o|_1

t, v are unit class and image features, o the frozen branch, which sees the plain image; L1 is a mean over elements.
In training 0.3 of the numbers of an image feature drop before it is made unit, of the learned and of the frozen one
by draws of their own. What is used in the end is the mean of the parameters at the ends of all epochs. Novel classes
meet the centres of the classes trained on: there, too, loading a run puts them in the place of those just found.

Authors' defaults: C 5, depth 12, length 5 (10 across datasets), weights 20 / 25, SGD 2.5e-3, 20 epochs (5 across
datasets) of batches of 8 images in 4 augmented views each, crops of at least 0.4 (0.8) of an image.

What is not theirs: a batch has one view of an image, so the preset has 32 images a step and four times the epochs,
which are as many steps of as many views. t^o is averaged over the task's sentences and eleven general ones; theirs
over 60 such, or over sentences of a language model for some datasets. Prompts beyond the words they start from are
drawn; there they start from the embeddings of eos and padding.

Checked beside the authors' own code, both in float64, on the same small CLIP, centres, prompts and draws: features,
losses and all gradients differ by at most 1.1e-14 of their largest number, and the centres from the same first rows by
2.3e-16 from those of kmeans_pytorch, which they call. And against a slow reference in float64 (tests/test_tac.py):
differences of at most 3.4e-6.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.aggregate import GaussianAggregate
from drople.backbone import Backbone, Sentences
from drople.backbone.tokens import Tokens, places
from drople.losses import l1_consistency
from drople.methods.base import Batch, Presets, PromptMethod, Task, frozen_classes, register
from drople.options import option
from drople.prompts import TextPrompts, VisualPrompts, deep_prompts, words_behind
from drople.regulariser import Branches, Progress
from drople.templates import with_eleven

ROUNDS = 100  # of k-means, should the clusters not settle before


@dataclass(frozen=True)
class TACOptions:
    clusters: int = option(5, "clusters of the classes, whose centres are the pre-context (TAC 5)", low=1)
    text_depth: int = option(12, "text prompts at the first so many layers (TAC 12)", low=1)
    text_length: int = option(5, "learnable text prompts a layer (TAC 5, across datasets 10)", low=1)
    visual_depth: int = option(12, "visual prompts at the first so many layers (TAC 12)", low=1)
    visual_length: int = option(5, "learnable visual prompts a layer (TAC 5, across datasets 10)", low=1)
    init: str = option("a photo of a", "words before the class, from which the first prompts start too")
    pull_text: float = option(20.0, "weight of L1 to the frozen class features (TAC 20)", low=0)
    pull_image: float = option(25.0, "weight of L1 to the frozen image features (TAC 25)", low=0)
    feature_drop: float = option(
        0.3, "share of the numbers of image features that drop in training (TAC 0.3)", low=0, high=0.99
    )


@torch.no_grad()
def cluster_centres(features: Tensor, count: int) -> Tensor:
    """Unit centres [count, E] of k-means by the cosine, from rows drawn as the first centres.

    A cluster that loses all its rows starts anew at the row that is farthest from its centre.
    """
    rows = F.normalize(features.double().cpu(), dim=-1)
    centres = rows[torch.randperm(len(rows))[:count]]
    before: Tensor | None = None
    for _ in range(ROUNDS):
        cosine, nearest = (rows @ centres.T).max(1)
        if before is not None and torch.equal(nearest, before):
            break
        members = F.one_hot(nearest, count)
        empty = ~members.any(0)
        centres = F.normalize(members.to(rows.dtype).T @ rows, dim=-1)
        centres[empty] = rows[cosine.argsort()[: int(empty.sum())]]
        before = nearest
    return centres.float()


class TaskAwarePrompts(nn.Module):
    """Prompts [depth, C + M, D] of one tower: at each layer the pre-context, then the layer's own."""

    centres: Tensor

    def __init__(self, centres: Tensor, prompts: TextPrompts | VisualPrompts) -> None:
        super().__init__()
        # Each tower has a copy: a tensor can be saved under one name only.
        self.register_buffer("centres", centres.clone())
        self.projection = nn.Linear(centres.shape[1], prompts().shape[-1])
        self.prompts = prompts

    def forward(self) -> Tensor:
        own = self.prompts()
        return torch.cat([self.projection(self.centres).expand(len(own), -1, -1), own], dim=1)


@dataclass(frozen=True)
class MaskedTokens(Tokens):
    """Images' tokens whose patches do not see the pre-context, which are the first `clusters` prompts."""

    clusters: int = 0

    def visible(self, causal: bool) -> Tensor:
        assert self.slots is not None and self.stays is not None
        states, length = self.states, self.states.shape[1]
        # By the prompts' places, not by numbers: where dropout removes tokens, the others move up. cls stays the first.
        context = self.slots[..., : self.clusters].any(-1)
        patch = (self.stays[..., 0] > 0) & (places(length, states.device) > 0)
        unseen = (patch[..., :, None] & context[..., None, :]).view(-1, 1, length, length)
        room = super().visible(causal)
        if room is None:
            # Rows begin at multiples of 8, as the base class has them.
            room = states.new_zeros(len(unseen), 1, length, -(-length // 8) * 8)[..., :length]
        return room.masked_fill_(unseen, -torch.inf)


@register
class TAC(PromptMethod):
    name = "tac"
    title = "Task-Aware Clustering"
    kind = "prompt"
    citation = "Hao et al., CVPR 2025"
    Options = TACOptions
    options: TACOptions
    visual_prompts: GaussianAggregate
    presets: ClassVar[Presets] = {
        "authors": {
            "optimizer": "sgd",
            "lr": 2.5e-3,
            "batch_size": 32,
            "epochs": 80,
            "crop_scale": 0.4,
            "clip_norm": 0.0,
        },
        "authors-cross-dataset": {
            "optimizer": "sgd",
            "lr": 2.5e-3,
            "batch_size": 32,
            "epochs": 20,
            "crop_scale": 0.8,
            "clip_norm": 0.0,
            "text_length": 10,
            "visual_length": 10,
        },
    }

    def __init__(self, backbone: Backbone, task: Task, options: TACOptions) -> None:
        super().__init__(backbone, task, options)
        self.clusters = min(options.clusters, len(task.words))
        if self.clusters < options.clusters:
            self.notes.append(
                f"{options.clusters} clusters were asked for; the task has {self.clusters} classes, so each is its own."
            )
        self.frozen_classes = frozen_classes(backbone, task.words, with_eleven(task.templates))
        centres = cluster_centres(self.frozen_classes, self.clusters)
        text, visual, notes = deep_prompts(backbone, options)
        self.notes += notes
        # A normal density of no end to its width: all epochs count the same. The pre-context is linear in what is
        # learned of it, so its mean is that of the mean parameters.
        self.text_prompts = GaussianAggregate(TaskAwarePrompts(centres, text), 0.0, math.inf)
        self.visual_prompts = GaussianAggregate(TaskAwarePrompts(centres, visual), 0.0, math.inf)

    def text_states(self) -> Tensor:
        return self.text_prompts()

    def sentences(self, words: Sequence[str]) -> Sentences:
        context = self.clusters + self.options.text_length
        before = words_behind(self.options.init, 0)
        return self.backbone.prompted(words, context=context, before=before, after=".")

    def advance(self, progress: Progress) -> None:
        super().advance(progress)
        for prompts in (self.text_prompts, self.visual_prompts):
            prompts.advance(progress.epoch, progress.epochs)

    def encode_images(self, images: Tensor, dropout: Any = None) -> Tensor:
        features = self.backbone.encode_images(
            images,
            prompts=self.visual_prompts(),
            dropout=dropout,
            tokens=partial(MaskedTokens, clusters=self.clusters),
        )
        return self._thinned(features)

    def _thinned(self, features: Tensor) -> Tensor:
        return F.dropout(features, self.options.feature_drop, self.training)

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        o, frozen = self.options, self._thinned(branches.frozen_images)
        return {
            "pull_text": o.pull_text * l1_consistency(branches.classes, branches.frozen_classes),
            "pull_image": o.pull_image * l1_consistency(branches.images, frozen),
        }
