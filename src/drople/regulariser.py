"""DroPLe as something that wraps any prompt learner: importance-weighted token dropout, residual
entropy, and the alignment loss by which bridge tokens learn.

It is handed a backbone, features and sequences; who holds the prompts it does not know. Every row of
the table "paper against released code" is an option here or of the prompts; help texts name the source.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from drople.attribution import FirstPass
from drople.backbone import Backbone
from drople.dropout import Draw, DropRule, Operation, Rate, TokenDropout
from drople.errors import DropleError
from drople.importance import Bridge, Modality, Scale, Score
from drople.losses import kl_consistency, l1_consistency, l2_consistency
from drople.nonlinear_residual import NonlinearResidual
from drople.options import option
from drople.prompts import capped
from drople.residual_entropy import (
    ResidualOn,
    lambda_schedule,
    textual_residual_entropy,
    visual_residual_entropy,
)
from drople.unimodal import Standout

Residual = Literal["linear", "nonlinear"]
RangeSchedule = Literal["constant", "rising", "falling"]


@dataclass(frozen=True)
class DropleOptions:
    vision_dropout_layers: int = option(
        6, "tokens drop at the first so many vision layers (paper 6, released 6)", low=0
    )
    text_dropout_layers: int = option(6, "the same for text (paper 6, released 9)", low=0)
    p_min: float = option(
        0.1, "drop probability of the most important token (paper, released 0.1)", low=0, high=1
    )
    p_max: float = option(
        0.5, "drop probability of the least important token (paper, released 0.5)", low=0, high=1
    )
    range_schedule: RangeSchedule = option(
        "constant",
        "both probabilities over training: constant (paper), rising from 0, or falling to 0, so that the last steps "
        "see what inference sees",
    )
    operation: Operation = option(
        "hide",
        "D(x): hide = no key for the others in the next layer (our default: zeroing at six layers ruins training), "
        "zero (paper's words), zero_scaled = zero with 1/(1-p) (paper, 'Adaptive Dropout'), noise (released), "
        "remove = leave the sequence",
    )
    noise: float = option(0.03, "standard deviation of the noise operation (released 0.03)", low=0)
    draw: Draw = option(
        "layer",
        "when tokens are drawn: layer = anew at each layer (paper), shared = once a pass, "
        "one_layer = at one random layer a step",
    )
    rate: Rate = option(
        "importance",
        "importance (paper); its ablations: uniform = vanilla dropout with p_max, block = that in runs of 3, "
        "group = by density, standout = learned, attribution = AD-DROP (p_max for the tokens that the prediction leans "
        "on, in every other epoch)",
    )
    scores: tuple[Score, ...] = option(
        ("class", "self", "cross"), "scores averaged into the importance (paper: all)"
    )
    score_scale: Scale = option(
        "raw",
        "what is averaged: raw = the scores as they are (paper), sum = each over its sum (released), rank = the order "
        "of the tokens by each, so that no score outweighs the others and no token (bos, a sink of attention) the rest",
    )
    class_words_drop: bool = option(True, "class words are targets too (paper true, released false)")
    bridge_tokens: int = option(64, "bridge tokens xi (paper, released 64)", low=1)
    bridge_dim: int = option(128, "width d of the shared space (paper: not said; released 512)", low=1)
    bridge_scaled: bool = option(True, "1/sqrt(d) inside the bridge's softmax (paper true, released false)")
    alignment: float = option(1.0, "weight of the alignment loss (paper: none; released 30); 0 is off", low=0)
    alignment_detached: bool = option(
        True, "the alignment loss trains only the bridge (released false: prompts too)"
    )
    lambda0: float = option(0.1, "lambda_0 of the schedule (paper, released 0.1)", low=0, high=1)
    lambda_by: Literal["iteration", "epoch"] = option(
        "iteration", "the schedule's clock: iteration (paper) or epoch (released)"
    )
    residual: Residual = option(
        "linear",
        "z^r from a mixture (paper), or nonlinear: guessed by a network, without lambda (its appendix C)",
    )
    residual_on: ResidualOn = option(
        "embeddings",
        "residual of the embeddings, then cosine (paper), or of unit vectors as they are (released)",
    )
    residual_entropy_visual: float = option(
        0.05, "weight of L_RE^v (paper: no weight, i.e. 1; released 0.05)", low=0
    )
    residual_entropy_text: float = option(
        0.05, "weight of L_RE^t (paper: no weight, i.e. 1; released 0.05)", low=0
    )
    l1_text: float = option(
        0.0, "weight of L1 between learned and frozen class features (released 25)", low=0
    )
    l1_image: float = option(
        0.0, "weight of L1 between learned and frozen image features (released 10)", low=0
    )
    kl: float = option(0.0, "weight of KL between learned and frozen predictions (released 2.5)", low=0)
    l2: float = option(0.0, "weight of L2 between learned and frozen features (the baseline's pull)", low=0)
    cosine: float = option(0.0, "weight of 1 - cosine between them (CoPrompt's pull, an ablation)", low=0)

    def __post_init__(self) -> None:
        if self.p_min > self.p_max:
            raise DropleError(f"p_min {self.p_min} is larger than p_max {self.p_max}: swap them.")
        if self.operation == "zero_scaled" and self.p_max >= 1:
            raise DropleError("zero_scaled divides by 1 - p: p_max must be below 1.")
        if self.rate == "attribution" and self.operation == "remove":
            raise DropleError(
                "rate=attribution is of tokens in their places, and remove moves them: use hide."
            )
        if not self.scores:
            raise DropleError("scores is empty: give at least one of class, self, cross, or rate=uniform.")


RELEASED = {
    "text_dropout_layers": 9,
    "operation": "noise",
    "score_scale": "sum",
    "class_words_drop": False,
    "bridge_dim": 512,
    "bridge_scaled": False,
    "alignment": 30.0,
    "alignment_detached": False,
    "lambda_by": "epoch",
    "residual_on": "unit",
    "l1_text": 25.0,
    "l1_image": 10.0,
    "kl": 2.5,
}


@dataclass(frozen=True)
class Progress:
    """How far training is: the step about to be taken, and the whole."""

    step: int
    steps: int
    epoch: int
    epochs: int

    @property
    def done(self) -> float:
        return self.step / max(1, self.steps)


@dataclass(frozen=True)
class Branches:
    """Features of the learnable (dropped) and the frozen branch, not normalised, and both's logits."""

    images: Tensor  # z_v^d [B, E]
    classes: Tensor  # z_t^d [K, E]
    frozen_images: Tensor  # z_v^o [B, E]
    frozen_classes: Tensor  # z_t^o [K, E]
    logits: Tensor
    frozen_logits: Tensor
    dropouts: tuple[TokenDropout, TokenDropout] | None = None  # of vision and text, where tokens dropped


class Regulariser(nn.Module):
    """The regulariser: learnable bridge tokens, dropout for a pass, and its loss terms."""

    lam: Tensor
    strength: Tensor

    def __init__(self, backbone: Backbone, options: DropleOptions) -> None:
        super().__init__()
        self.options = options
        self.scale = backbone.logit_scale
        self.notes: list[str] = []
        self.layers: dict[Modality, int] = {}
        asked: dict[Modality, tuple[int, int]] = {
            "vision": (options.vision_dropout_layers, backbone.vision_layers),
            "text": (options.text_dropout_layers, backbone.text_layers),
        }
        for modality, (wanted, there) in asked.items():
            self.layers[modality], note = capped(wanted, there, f"{modality} dropout")
            self.notes += [note] if note else []
        # Tensors, so that a step captured as a CUDA graph sees them change.
        self.register_buffer("lam", torch.zeros(()), persistent=False)
        self.register_buffer("strength", torch.ones(()), persistent=False)
        self.bridge: Bridge | None = None
        if "cross" in options.scores and options.rate == "importance":
            self.bridge = Bridge(
                backbone.vision_width,
                backbone.text_width,
                tokens=options.bridge_tokens,
                dim=options.bridge_dim,
                scaled=options.bridge_scaled,
            )
        self.standout: Standout | None = None
        if options.rate == "standout":
            self.standout = Standout(backbone.vision_width, backbone.text_width)
        self.nonlinear: Mapping[str, NonlinearResidual] | None = None
        if options.residual == "nonlinear":
            both = {name: NonlinearResidual(backbone.embed_dim) for name in ("vision", "text")}
            self.nonlinear = nn.ModuleDict(both)  # type: ignore[assignment]

    def dropout(self, modality: Modality, rows: Tensor | None = None, record: bool = False) -> TokenDropout:
        """Fresh dropout for one pass of a tower; `rows` are the sequences the alignment loss compares."""
        o = self.options
        rule = DropRule(
            layers=self.layers[modality],
            # AD-DROP drops no token that is no candidate.
            p_min=0.0 if o.rate == "attribution" else o.p_min,
            p_max=o.p_max,
            operation=o.operation,
            draw=o.draw,
            rate=o.rate,
            scores=o.scores,
            scale=o.score_scale,
            noise=o.noise,
        )
        return TokenDropout(
            rule,
            modality,
            self.bridge,
            self.standout,
            strength=self.strength,
            rows=rows,
            detach=o.alignment_detached,
            keep_states=self.bridge is not None and o.alignment > 0,
            record=record,
        )

    def attribute(
        self,
        vision: TokenDropout,
        text: TokenDropout,
        logits: Callable[[FirstPass, FirstPass], tuple[Tensor, Tensor]],
    ) -> None:
        """Where AD-DROP is asked for, its first pass: `logits` gives that of each image and each sentence."""
        if self.options.rate != "attribution":
            return
        both = FirstPass(vision.rule.layers), FirstPass(text.rule.layers)
        for dropout, first, own in zip((vision, text), both, logits(*both), strict=True):
            dropout.candidates = first.candidates(own)

    def advance(self, progress: Progress) -> None:
        """Move lambda and the drop range along their schedules."""
        done = (
            progress.done
            if self.options.lambda_by == "iteration"
            else progress.epoch / max(1, progress.epochs)
        )
        self.lam.fill_(lambda_schedule(self.options.lambda0, done))
        levels = {"constant": 1.0, "rising": progress.done, "falling": 1 - progress.done}
        # AD-DROP's cross-tuning: the first epoch and every other one without dropout.
        crossing = progress.epoch % 2 if self.options.rate == "attribution" else 1
        self.strength.fill_(crossing * levels[self.options.range_schedule])

    @property
    def fixed_shapes(self) -> bool:
        """Removing tokens changes lengths, and one random layer changes which kernels run."""
        return self.options.operation != "remove" and self.options.draw != "one_layer"

    def losses(self, branches: Branches, vision: TokenDropout, text: TokenDropout) -> dict[str, Tensor]:
        """The weighted terms, by name; a weight of 0 leaves its term out."""
        o, b = self.options, branches
        losses: dict[str, Tensor] = {}
        images, classes, lam = b.images, b.classes, self.lam
        if self.nonlinear is not None:
            # With lambda 0 the residual of a guess is the guess.
            lam = torch.zeros_like(lam)
            images = self.nonlinear["vision"].residual(b.images, b.frozen_images)
            classes = self.nonlinear["text"].residual(b.classes, b.frozen_classes)
            rebuilt = self.nonlinear["vision"].loss(b.images, b.frozen_images)
            losses["rebuild"] = rebuilt + self.nonlinear["text"].loss(b.classes, b.frozen_classes)
        if o.residual_entropy_visual:
            losses["residual_entropy_visual"] = o.residual_entropy_visual * visual_residual_entropy(
                images, b.frozen_images, b.frozen_classes, lam, self.scale, o.residual_on
            )
        if o.residual_entropy_text:
            losses["residual_entropy_text"] = o.residual_entropy_text * textual_residual_entropy(
                classes, b.frozen_classes, b.frozen_images, lam, self.scale, o.residual_on
            )
        if o.l1_text:
            losses["l1_text"] = o.l1_text * l1_consistency(b.classes, b.frozen_classes)
        if o.l1_image:
            losses["l1_image"] = o.l1_image * l1_consistency(b.images, b.frozen_images)
        if o.kl:
            losses["kl"] = o.kl * kl_consistency(b.logits, b.frozen_logits)
        if o.l2 or o.cosine:
            pull = l2_consistency(b.images, b.frozen_images) + l2_consistency(b.classes, b.frozen_classes)
            # Of unit vectors |a - b|^2 = 2 (1 - cos).
            losses |= {"l2": o.l2 * pull} if o.l2 else {}
            losses |= {"cosine": o.cosine * pull / 2} if o.cosine else {}
        seen, said = vision.take_kept(), text.take_kept()
        if self.bridge is not None and o.alignment and seen and said:
            losses["alignment"] = o.alignment * self.bridge.alignment(seen, said)
        return losses

    @torch.no_grad()
    def monitor(self, vision: TokenDropout, text: TokenDropout) -> dict[str, Tensor]:
        """What the log shows besides losses."""
        shown = {"lambda": self.lam.clone()}
        for name, dropout in (("drop_rate_vision", vision), ("drop_rate_text", text)):
            if dropout.drawn:
                shown[name] = dropout.drop_rate()
        return shown
