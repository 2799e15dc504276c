"""The non-linear residual of the paper's appendix C: `z^d = MLP([z^o; z^r])` instead of a linear mixture.

It cannot be inverted, so z^r has to be guessed. Our reading: a second network guesses it,
`z^r = Q([z^d; z^o])`, and both learn together by rebuilding z^d: `L = 1 - cos(MLP([z^o; z^r]), z^d)`, its
weight 1. Residual entropy then looks at the guess. It trains what gives z^d and not Q, which would otherwise
learn to guess what has a high entropy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


class NonlinearResidual(nn.Module):
    """For one modality, on unit features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.guess = mlp(width)
        self.rebuild = mlp(width)

    def residual(self, dropped: Tensor, original: Tensor) -> Tensor:
        """`z^r` [N, E], with a gradient for the features alone."""
        fixed = {name: p.detach() for name, p in self.guess.named_parameters()}
        return functional_call(self.guess, fixed, (joined(dropped, original),))

    def loss(self, dropped: Tensor, original: Tensor) -> Tensor:
        """How far the rebuilt z^d is off, with a gradient for the networks alone."""
        dropped, original = dropped.detach(), original.detach()
        rebuilt = self.rebuild(joined(original, self.guess(joined(dropped, original))))
        return (1 - F.cosine_similarity(rebuilt, dropped, dim=-1)).mean()


def joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([F.normalize(one, dim=-1), F.normalize(other, dim=-1)], dim=-1)


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))
