"""Residual entropy regularisation: the residual, its entropy over classes, the lambda schedule.

Section "Residual Entropy Regularization". Features come in from anywhere; nothing here knows of prompts.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

ResidualOn = Literal["embeddings", "unit"]


def lambda_schedule(lambda0: float, progress: float) -> float:
    """`lambda0 [1 - (1 + 10 t/T)^(-3/4)]`, from 0 up to 0.83 lambda0.

    The paper prints the exponent 3/4, which makes lambda negative while the text lets it grow inside
    (0, 1); the released code has -3/4, which does what the text says.
    """
    return lambda0 * (1 - (1 + 10 * progress) ** -0.75)


def residual(dropped: Tensor, original: Tensor, lam: float | Tensor) -> Tensor:
    """`z^r = (z^d - lambda z^o) / (1 - lambda)`."""
    return (dropped - lam * original) / (1 - lam)


def class_residual_logits(
    dropped: Tensor, original: Tensor, lam: float | Tensor, others: Tensor, scale: float, on: ResidualOn
) -> Tensor:
    """`sim(z^r, others) / tau` [N, M].

    `embeddings`: the residual of the embeddings as they are, then cosines (the paper's sim). `unit`:
    the residual of unit vectors, not normalised again (released code).
    """
    if on == "unit":
        rest = residual(F.normalize(dropped, dim=-1), F.normalize(original, dim=-1), lam)
    else:
        rest = F.normalize(residual(dropped, original, lam), dim=-1)
    return scale * rest @ F.normalize(others, dim=-1).T


def entropy(logits: Tensor) -> Tensor:
    """`H(p)` of softmax over the last dimension, mean over the rest."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).mean()


def visual_residual_entropy(
    z_d: Tensor, z_o: Tensor, class_weights_o: Tensor, lam: float | Tensor, scale: float, on: ResidualOn
) -> Tensor:
    """`L_RE^v = -H(p(y | z_v^r))` against the frozen class embeddings W_t^o."""
    return -entropy(class_residual_logits(z_d, z_o, lam, class_weights_o, scale, on))


def textual_residual_entropy(
    w_d: Tensor, w_o: Tensor, images_o: Tensor, lam: float | Tensor, scale: float, on: ResidualOn
) -> Tensor:
    """`L_RE^t`: over the classes' residuals [K, E], seen from each frozen image feature [B, E]."""
    return -entropy(class_residual_logits(w_d, w_o, lam, images_o, scale, on).T)
