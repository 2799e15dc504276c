"""Gaussian-weighted aggregation of prompts over the epochs of training.

PromptSRC's (Khattak et al., ICCV 2023): theta* = sum_e w_e theta_e over the last prompts of each epoch, w_e a
normal density at e. The parameters are those of the present epoch; while not training, prompts are the
aggregate of the epochs so far. So nothing has to happen at the end, and a resumed run is exact.
"""

import math

import torch
from torch import Tensor, nn


def last_share(epoch: int, epochs: int, mean: float, std: float) -> float:
    """`w_e / (w_1 + ... + w_e)` at e = epoch + 1: this epoch's part in the aggregate of the epochs so far."""
    # As differences of exponents: far from the mean the densities themselves are too small for a float.
    at = [-0.5 * ((e / epochs - mean) / std) ** 2 for e in range(1, epoch + 2)]
    return 1 / sum(math.exp(a - at[-1]) if a - at[-1] < 700 else math.inf for a in at)


class GaussianAggregate(nn.Module):
    """Prompts that are the aggregate of all epochs' prompts whenever they are not being trained."""

    average: Tensor
    share: Tensor
    epoch: Tensor

    def __init__(self, prompts: nn.Module, mean: float, std: float) -> None:
        super().__init__()
        self.prompts, self.mean, self.std = prompts, mean, std
        self.now = 0  # `epoch`, where the host can read it without waiting for the device
        self.register_buffer("average", prompts().detach().clone())  # of the epochs that are over
        self.register_buffer("share", torch.ones(()))  # of the present epoch, in the aggregate with it
        self.register_buffer("epoch", torch.zeros((), dtype=torch.long))
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "now", int(self.epoch)))

    @torch.no_grad()
    def advance(self, epoch: int, epochs: int) -> None:
        """At a new epoch the last one's prompts enter the average."""
        if epoch == self.now:
            return
        self.average.copy_(self.aggregate())
        self.share.fill_(last_share(epoch, epochs, self.mean, self.std))
        self.epoch.fill_(epoch)
        self.now = epoch

    def aggregate(self) -> Tensor:
        return self.average.lerp(self.prompts(), self.share)

    def forward(self) -> Tensor:
        return self.prompts() if self.training else self.aggregate()
