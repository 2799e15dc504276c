"""Prompt Meta-Regularization (ProMetaR).

Park, Ko, Kim. "Prompt Learning via Meta-Regularization." CVPR 2024. Published average over 11 datasets,
base-to-novel, ViT-B/16: 84.39 / 76.93 / 80.49, as a later paper's table quotes it (the authors' repository prints no
numbers); the DroPLe paper's tables have 66.15 across datasets and 60.77 under domain shift.

Independent deep prompts theta in both towers. How much of the pull to the frozen features each part of a prompt
gets is learned: g is the gradient of the cross-entropy, r that of the pull, and a gate phi of its own at each layer
reads both. v, t are unit image and class features, o the frozen branch; L1 is a mean over elements:

    L_reg = 50 |t - t^o|_1 + 20 |v - v^o|_1
    M(g, r) = sigma(W_2 W_1 [g; r]) * r      eight neighbouring numbers of a layer's prompts share one gate
    step      theta <- theta - lr (g + M(g, r))

The gates, and the prompts once more, learn from a task made of the batch: the images of one of its classes, drawn,
are held out (the query), those of the others are the support. One inner step on the support, then the loss of the
held-out images, whose features are mixed with those of support images so that there are more tasks than classes:

    theta' = theta - alpha (g_s + M(g_s, r_s))                 gradients on the support
    z = l z_q + (1 - l) z_s,  l ~ Beta(0.5, 0.5)               image features of theta', not yet made unit
    L_meta = rho [ l CE(z, y_q) + (1 - l) CE(z, y_s) ]         minimised over theta and phi, through theta'

A batch of one class has no such task. Authors' defaults: depth 9, length 4, weights 50 / 20, alpha 5e-4, rho 5e-4,
W_1 to a sixteenth of what it reads, W_2 square, no bias and nothing between them, SGD 2.5e-3 (gates a tenth of it),
batch 4, 10 epochs. With rho alpha = 2.5e-7 before their gradient the gates hardly leave where they start, near a
half: on pocket-clip 30 steps of SGD changed their weights by 1e-5 of their size, 24 of AdamW by 9e-4 at most.

What is not theirs: a batch is one step here. They take a step of the optimiser by g + M, draw the task, and take
another by the gradient of L_meta at the new prompts (so momentum and weight decay count twice a batch); here both
gradients are taken at the same prompts, and their sum makes one step. The support then needs no pass of its own.
t^o is averaged over the task's sentences and eleven general ones, not 60. With "+ DroPLe" tokens drop in the step
and the inner step, and not at theta'. The gates serve training alone, so a finished run does not keep them.

Gradients of gradients need attention in plain products, not a fused kernel: all of them are taken inside the step,
and the losses are returned with their values and that gradient.

Checked beside the authors' own code, theirs in float64, with a stand-in for learn2learn's clone and update of a
module, on the same small CLIP, prompts, gates and draws, their optimiser held still so that both gradients are at the
same prompts: the gradient of the step, L_meta, and its gradient for prompts and gates differ by at most 5e-5 of their
largest number, at their alpha and at a hundred times it. And against a slow reference in float64, whose gradient of
L_meta comes of central differences (tests/test_prometar.py): losses and the step's gradient differ by at most
4e-6, the slopes of L_meta by 1e-4 of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributions import Beta
from torch.nn.attention import SDPBackend, sdpa_kernel

from drople.backbone import Backbone, Sentences
from drople.losses import l1_consistency, with_gradients
from drople.methods.base import Batch, Presets, PromptMethod, Task, TrainingData, frozen_classes, register
from drople.options import option
from drople.prompts import VisualPrompts, deep_prompts
from drople.regulariser import Branches
from drople.templates import with_eleven

SHARED = 8  # neighbouring numbers under one gate


@dataclass(frozen=True)
class ProMetaROptions:
    text_depth: int = option(9, "text prompts at the first so many layers (ProMetaR 9)", low=1)
    text_length: int = option(4, "text prompts a layer (ProMetaR 4)", low=1)
    visual_depth: int = option(9, "visual prompts at the first so many layers (ProMetaR 9)", low=1)
    visual_length: int = option(4, "visual prompts a layer (ProMetaR 4)", low=1)
    init: str = option("a photo of a", "words the first layer's text prompts start from")
    pull_text: float = option(50.0, "weight of L1 to the frozen class features (ProMetaR 50)", low=0)
    pull_image: float = option(20.0, "weight of L1 to the frozen image features (ProMetaR 20)", low=0)
    frozen_view: Literal["same", "plain"] = option(
        "same", "the frozen branch sees the same augmented image (ProMetaR), or the plain one: one pass less"
    )
    inner_lr: float = option(5e-4, "alpha: size of the inner step (ProMetaR 5e-4)", low=0)
    meta: float = option(5e-4, "rho: weight of the loss after the inner step (ProMetaR 5e-4)", low=0)
    mixup: float = option(0.5, "both numbers of the Beta that mixes features (ProMetaR 0.5)", low=1e-3)
    gate_lr: float = option(0.1, "learning rate of the gates over that of the prompts (ProMetaR 0.1)", low=0)


class Gates(nn.Module):
    """`sigma(W_2 W_1 [g; r])` for the prompts [depth, M, D] of one tower; a pair of matrices each layer."""

    def __init__(self, prompts: Tensor) -> None:
        super().__init__()
        depth, numbers = len(prompts), prompts[0].numel()
        hidden = -(-numbers // SHARED)
        self.first = nn.Parameter(torch.empty(depth, 2 * numbers, hidden))
        self.second = nn.Parameter(torch.empty(depth, hidden, hidden))
        for weight in (self.first, self.second):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, own: Tensor, pull: Tensor) -> Tensor:
        both = torch.cat([own.flatten(1), pull.flatten(1)], 1)[:, None]
        gates = (both @ self.first @ self.second).sigmoid().transpose(1, 2)  # [depth, hidden, 1]
        return gates.expand(-1, -1, SHARED).flatten(1)[:, : pull[0].numel()].view_as(pull)


@dataclass(frozen=True)
class MetaTask:
    """Which images of a batch are held out, and which image of the support each is mixed with, and how much."""

    query: Tensor  # bool [B]
    partner: Tensor  # [B]
    share: Tensor  # [B], of the image itself

    @property
    def exists(self) -> Tensor:
        """0 where all images are of one class."""
        return (~self.query).any().float()


def draw_task(labels: Tensor, classes: int, mixup: float) -> MetaTask:
    """Every class of the batch, and every image of the support, is as likely; the shapes are always the same."""
    count, device = len(labels), labels.device
    present = torch.zeros(classes, device=device).index_fill(0, labels, 1)
    query = labels == ((1 + torch.rand(classes, device=device)) * present).argmax()
    partner = ((1 + torch.rand(count, count, device=device)) * ~query).argmax(1)
    both = torch.full((count,), mixup, device=device)
    return MetaTask(query, partner, Beta(both, both, validate_args=False).sample())


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of some values, 0 of none."""
    return (values * chosen).sum() / chosen.sum().clamp_min(1)


@register
class ProMetaR(PromptMethod):
    name = "prometar"
    title = "Prompt Meta-Regularization"
    kind = "prompt"
    citation = "Park et al., CVPR 2024"
    Options = ProMetaROptions
    options: ProMetaROptions
    visual_prompts: VisualPrompts
    gates: nn.ModuleList | None
    shardable = False
    presets: ClassVar[Presets] = {
        "authors": {"optimizer": "sgd", "lr": 2.5e-3, "batch_size": 4, "epochs": 10},
    }

    def __init__(self, backbone: Backbone, task: Task, options: ProMetaROptions) -> None:
        super().__init__(backbone, task, options)
        self.text_prompts, self.visual_prompts, notes = deep_prompts(backbone, options)
        self.notes += notes
        self.gates = nn.ModuleList(Gates(prompts) for prompts in self._prompts)
        self.frozen_classes = frozen_classes(backbone, task.words, with_eleven(task.templates))

    @property
    def _prompts(self) -> tuple[Tensor, Tensor]:
        return self.text_prompts.prompts, self.visual_prompts.prompts

    def text_states(self) -> Tensor:
        return self.text_prompts()

    def sentences(self, words: Sequence[str]) -> Sentences:
        return self.backbone.prompted(words, context=self.options.text_length)

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        slow = [] if self.gates is None else list(self.gates.parameters())
        known = {id(p) for p in slow}
        quick = [p for p in self.parameters() if id(p) not in known]
        return [{"params": quick, "lr": lr}, {"params": slow, "lr": lr * self.options.gate_lr}]

    def finish(self, data: TrainingData) -> None:
        self.gates = None

    def load_learned(self, tensors: Mapping[str, Tensor]) -> None:
        if not any(name.startswith("gates.") for name in tensors):
            self.gates = None
        super().load_learned(tensors)

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        # Left to the caller, the backward pass would recompute chunks of classes with a fused kernel.
        with sdpa_kernel(SDPBackend.MATH):
            losses = super().training_step(batch)
            learned = list(self.parameters())
            found = grad(torch.stack(list(losses.values())).sum(), learned, allow_unused=True)
        used = [(p, g) for p, g in zip(learned, found, strict=True) if g is not None]
        losses = {name: loss.detach() for name, loss in losses.items()}
        return losses | {"meta": with_gradients(losses["meta"], *zip(*used, strict=True))}

    def extra_losses(self, branches: Branches, batch: Batch) -> dict[str, Tensor]:
        o, theta = self.options, self._prompts
        frozen = branches.frozen_images
        if o.frozen_view == "same":
            with torch.no_grad():
                frozen = self.backbone.encode_images(batch.images)
        own = self._cross_entropies(branches.logits, batch.labels)
        apart = F.normalize(branches.images, dim=-1) - F.normalize(frozen, dim=-1)
        pull_text = o.pull_text * l1_consistency(branches.classes, branches.frozen_classes)
        pull_image = o.pull_image * apart.abs().mean(-1)

        task = draw_task(batch.labels, len(self.task.words), o.mixup)
        support = ~task.query
        text = grad(pull_text, theta[0], create_graph=True)  # the same classes, whichever the images
        image = grad(mean_of(pull_image, support), theta[1], create_graph=True)
        inner = grad(mean_of(own, support), theta, create_graph=True)
        moved = [
            prompts - o.inner_lr * (g + pull)
            for prompts, g, pull in zip(theta, inner, self._modulated(inner, text + image), strict=True)
        ]
        meta = o.meta * self._meta_loss(batch, moved, task)

        direct = grad(own.mean(), theta, retain_graph=True)
        image = grad(pull_image.mean(), theta[1], retain_graph=True)
        pulls = self._modulated(direct, text + image)
        return {
            "cross_entropy": with_gradients(own.mean(), theta, direct),
            "pull_text": with_gradients(pull_text, theta[:1], pulls[:1]),
            "pull_image": with_gradients(pull_image.mean(), theta[1:], pulls[1:]),
            "meta": meta,
        }

    def _modulated(self, own: Sequence[Tensor], pulls: Sequence[Tensor]) -> list[Tensor]:
        """`M(g, r)` of both towers."""
        assert self.gates is not None, "a finished run trains no more"
        return [gates(g, r) * r for gates, g, r in zip(self.gates, own, pulls, strict=True)]

    def _meta_loss(self, batch: Batch, prompts: Sequence[Tensor], task: MetaTask) -> Tensor:
        classes = self.backbone.encode_text(self._sentences, prompts=prompts[0])
        images = self.backbone.encode_images(batch.images, prompts=prompts[1])
        share = task.share[:, None]
        logits = self.similarity(share * images + (1 - share) * images[task.partner], classes)
        losses = task.share * self._cross_entropies(logits, batch.labels)
        losses = losses + (1 - task.share) * self._cross_entropies(logits, batch.labels[task.partner])
        return task.exists * mean_of(losses, task.query)

    def _cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        """That of each image."""
        adjusted = logits if self.log_prior is None else logits + self.log_prior
        return F.cross_entropy(adjusted, labels, reduction="none")
