"""Losses between predictions and labels, and between the learnable and the frozen branch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, log_prior: Tensor | None = None) -> Tensor:
    """Cross-entropy; with the log frequencies of the training classes it is the logit-adjusted loss
    (Menon et al. 2021; balanced softmax, Ren et al. 2020), which a long tail asks for."""
    return F.cross_entropy(logits if log_prior is None else logits + log_prior, labels)


def class_log_prior(labels: Tensor, classes: int, *, compensated: bool = False) -> Tensor:
    """log pi_k of the training images; a class without one counts as having one.

    `compensated` is the prior of Candle's compensating logit-adjusted loss (Shi et al., KDD 2024): every class has
    one image more, pi_k = (n_k + 1) / (N + K). There that one is the class's visual prototype, a sample of the
    batch, and novel classes, of which it is the only one, stand beside the others; here methods train on images
    and are not told of novel classes, so what is left is the prior, gentler with classes of few images.
    """
    counts = torch.bincount(labels, minlength=classes).double()
    counts = counts + 1 if compensated else counts.clamp_min(1)
    return (counts / counts.sum()).log()


def l1_consistency(learned: Tensor, frozen: Tensor) -> Tensor:
    """Mean absolute difference of unit features (PromptSRC's self-regularisation of features)."""
    return F.l1_loss(F.normalize(learned, dim=-1), F.normalize(frozen, dim=-1))


def l2_consistency(learned: Tensor, frozen: Tensor) -> Tensor:
    """Squared distance of unit features, mean over rows: the pull of KgCoOp and of the paper's baseline."""
    return (F.normalize(learned, dim=-1) - F.normalize(frozen, dim=-1)).square().sum(-1).mean()


def kl_consistency(logits: Tensor, frozen_logits: Tensor) -> Tensor:
    """KL divergence of the frozen branch's distribution from the learned one's, mean over elements
    (PromptSRC's self-regularisation of logits, in its normalisation)."""
    return (
        F.kl_div(logits.log_softmax(-1), frozen_logits.log_softmax(-1), reduction="sum", log_target=True)
        / logits.numel()
    )


def cosine_consistency(learned: Tensor, frozen: Tensor) -> Tensor:
    """One minus the cosine, mean over rows (CoPrompt, TCP): half of `l2_consistency`."""
    return 1 - F.cosine_similarity(learned, frozen, dim=-1).mean()


def soft_cross_entropy(logits: Tensor, frozen_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy with the frozen branch's distribution as the target, times the squared temperature."""
    target = (frozen_logits / temperature).softmax(-1)
    return -(target * (logits / temperature).log_softmax(-1)).sum(-1).mean() * temperature**2


def with_gradients(loss: Tensor, at: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """The value of `loss` with other gradients at `at`, for methods that change gradients, not losses."""
    surrogate = torch.stack([(x * g.detach()).sum() for x, g in zip(at, gradients, strict=True)]).sum()
    return loss.detach() + (surrogate - surrogate.detach())


def hsic(learned: Tensor, frozen: Tensor) -> Tensor:
    """Hilbert-Schmidt independence criterion with linear kernels, `tr(H K H K')` for rows [K, E] that are
    divided by their Frobenius norm (DeKg): with centred rows the squared norm of their cross-covariance."""
    centred, other = (x / x.norm() - (x / x.norm()).mean(0) for x in (learned, frozen))
    return (centred.T @ other).square().sum()
