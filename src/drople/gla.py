"""Generalised logit adjustment (GLA), post hoc on top of any method.

Zhu, Tang, Sun, Zhang. "Generalized Logit Adjustment: Calibrating Fine-tuned Models by Removing Label Bias
in Foundation Models." NeurIPS 2023. The zero-shot model carries the label bias q of its pre-training; the
adjusted prediction joins both models with their biases removed:

    f_gla(x) = f_learned(x) + f_zero-shot(x) - log pi_s - log q

pi_s is the class frequency of the training images (already gone where the loss was logit-adjusted), and q
is estimated on the training images: the simplex point under which the zero-shot model, its bias removed and
pi_s put back, has the least risk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def estimate_label_bias(zero_shot: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """log q [K], q on the simplex: argmin of the risk of f_zero-shot - log q + log pi_s.

    The risk is convex in log q up to a constant, so a quasi-Newton method on log q, normalised at the
    end, finds the minimum. A weak pull to the uniform q keeps it finite where classes are separable.
    """
    logits, log_prior = zero_shot.double(), log_prior.double()
    log_q = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_q], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        risk = F.cross_entropy(logits - log_q + log_prior, labels) + 1e-3 * log_q.square().mean()
        risk.backward()
        return risk

    with torch.enable_grad():
        optimizer.step(closure)
    return log_q.detach().log_softmax(-1)


def adjust(learned: Tensor, zero_shot: Tensor, log_prior: Tensor | None, log_q: Tensor) -> Tensor:
    """f_gla; `log_prior` None where the learned model's loss already removed it."""
    joined = learned.double() + zero_shot.double() - log_q
    return (joined if log_prior is None else joined - log_prior).float()
