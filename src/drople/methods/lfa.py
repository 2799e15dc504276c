"""Linear Feature Alignment (LFA): one matrix carries image features to their class's text.

Ouali, Bulat, Martinez, Tzimiropoulos. "Black Box Few-Shot Adaptation for Vision-Language Models." ICCV 2023.

    W_p = U V'  from  F' P = U S V'                      (orthogonal Procrustes, one row an image)
    W_0 = W_p - beta (W_p - I)                           beta by cross-validation on the training images
    L   = mean_{i, k in nearest} max(0, d(f_i W, p_y) + m(y, k) - d(f_i W, p_k)),  m = (1 - p_y p_k') / 4

F: unit features of the training images, P: the unit class features of their labels, d: Euclidean distance of
unit vectors, `nearest`: the 3 class features closest to f W. The adaptive reranking loss L then refines W.
Inference: unit(f W). Fewer classes than dimensions leave part of W_p free, and any rotation there is as good;
beta keeps W near the identity, which is what unseen classes live by. Equations and defaults (3 neighbours,
scale 4, 25 betas, 3 splits at 80 %; AdamW 5e-4, weight decay 5e-4, 200 steps) are from the authors' code; its
noise, dropout and interpolation of features and the average of W that it keeps for new classes are left
out: the loop's image augmentation is in their place.

Checked against a slow reference in tests/test_adapters.py.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone import Backbone
from drople.methods.adapter import FeatureAdapter
from drople.methods.base import Batch, Presets, Task, TrainingData, register
from drople.options import option

BETAS, SPLITS, TRAIN_SHARE = 25, 3, 0.8


@dataclass(frozen=True)
class LfaOptions:
    neighbours: int = option(3, "nearest classes in the reranking loss (authors 3)", low=1)
    margin_scale: float = option(4.0, "margins are 1 - cos over this (authors 4)", low=0.01)


@register
class Lfa(FeatureAdapter):
    name = "lfa"
    title = "Linear Feature Alignment"
    citation = "Ouali et al., ICCV 2023"
    Options = LfaOptions
    presets: ClassVar[Presets] = {
        "authors": {"lr": 5e-4, "weight_decay": 5e-4, "warmup": 0.0, "clip_norm": 0.0}
    }

    @property
    def takes_prior(self) -> bool:
        """Distances are ranked, and a prior has no place among them."""
        return False

    def __init__(self, backbone: Backbone, task: Task, options: LfaOptions) -> None:
        super().__init__(backbone, task, options)
        self.map = nn.Parameter(torch.eye(backbone.embed_dim))

    @torch.no_grad()
    def prepare(self, data: TrainingData) -> None:
        images, classes = F.normalize(data.frozen, dim=-1), F.normalize(self.frozen_classes, dim=-1)
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(len(images), generator=generator).to(images.device) for _ in range(SPLITS)]
        betas = torch.linspace(0, 1, BETAS, device=images.device)
        right = torch.zeros(BETAS, device=images.device)
        for order in orders:
            train, held = order.tensor_split([int(TRAIN_SHARE * len(order))])
            rotation = procrustes(images[train], classes[data.labels[train]])
            for n, beta in enumerate(betas):
                guess = (images[held] @ towards_identity(rotation, beta) @ classes.T).argmax(1)
                right[n] += (guess == data.labels[held]).sum()
        self.map.copy_(towards_identity(procrustes(images, classes[data.labels]), betas[right.argmax()]))

    def adapt(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) @ self.map

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        images, classes = F.normalize(self.image_features(batch.images), dim=-1), self.training_weights()
        cosines = images @ classes.T
        self.monitor["accuracy"] = (cosines.detach().argmax(1) == batch.labels).float().mean()
        near = cosines.topk(min(self.options.neighbours, len(classes)), dim=1).indices
        # A distance has no gradient at 0, where a feature has met its class.
        distances = (2 - 2 * cosines).clamp_min(1e-12).sqrt()
        own = distances.gather(1, batch.labels[:, None])
        margins = (1 - (classes @ classes.T)[batch.labels].gather(1, near)) / self.options.margin_scale
        return {"reranking": F.relu(own + margins - distances.gather(1, near)).mean()}


def procrustes(source: Tensor, target: Tensor) -> Tensor:
    """The orthogonal W that brings `source @ W` closest to `target`, in the least squares."""
    u, _, vh = torch.linalg.svd(source.T.float() @ target.float())
    return u @ vh


def towards_identity(rotation: Tensor, beta: Tensor) -> Tensor:
    return rotation - beta * (rotation - torch.eye(len(rotation), device=rotation.device))
