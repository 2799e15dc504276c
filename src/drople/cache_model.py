"""A key-value cache of training images beside a classifier (Tip-Adapter's cache model).

    votes(f) = alpha exp(-beta (1 - f K')) L

K [N, E] holds the unit features of the training images, L [N, C] their labels, one-hot. It knows features
and labels, not where they come from.
"""

import torch
from torch import Tensor, nn

# Tip-Adapter's code walks 200 betas and 20 alphas, from 0.1 up to a limit of its own a dataset.
BETAS, ALPHAS, LOWEST = 200, 20, 0.1


class CacheModel(nn.Module):
    """Empty until `hold` fills it, and silent while it is empty. Its size hangs on the data."""

    keys: Tensor
    labels: Tensor
    alpha: Tensor
    beta: Tensor

    def __init__(
        self, width: int, classes: int, *, alpha: float, beta: float, learn_keys: bool = False
    ) -> None:
        super().__init__()
        self.classes = classes
        keys = torch.zeros(0, width)
        if learn_keys:
            self.keys = nn.Parameter(keys)
        else:
            self.register_buffer("keys", keys)
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long))
        self.register_buffer("alpha", torch.tensor(alpha))
        self.register_buffer("beta", torch.tensor(beta))

    def hold(self, keys: Tensor, labels: Tensor) -> None:
        """Keep these unit features and their labels."""
        device = self.alpha.device
        keys = keys.detach().float().to(device)
        self.keys = nn.Parameter(keys) if isinstance(self.keys, nn.Parameter) else keys
        self.labels = labels.to(device)

    def forward(self, affinity: Tensor) -> Tensor:
        """Votes [B, C] from affinities [B, N] with the keys."""
        return self.alpha * self.sharpened(affinity, self.beta)

    def sharpened(self, affinity: Tensor, beta: float | Tensor) -> Tensor:
        values = self.labels[:, None] == torch.arange(self.classes, device=self.labels.device)
        return torch.exp(-beta * (1 - affinity)) @ values.to(affinity.dtype)

    @torch.no_grad()
    def search(
        self, affinity: Tensor, logits: Tensor, labels: Tensor, *, largest_alpha: float, largest_beta: float
    ) -> None:
        """Take the alpha and beta that classify these images best; what stood before stays on a tie."""
        best = ((logits + self(affinity)).argmax(1) == labels).sum()
        chosen = self.alpha.clone(), self.beta.clone()
        alphas = steps(largest_alpha, ALPHAS, logits.device)
        for beta in steps(largest_beta, BETAS, logits.device):
            votes = self.sharpened(affinity, beta)
            for alpha in alphas:
                right = ((logits + alpha * votes).argmax(1) == labels).sum()
                if right > best:
                    best, chosen = right, (alpha, beta)
        self.alpha.copy_(chosen[0])
        self.beta.copy_(chosen[1])


def steps(largest: float, count: int, device: torch.device) -> Tensor:
    """`count` values from LOWEST on; the limit itself is not one of them."""
    return LOWEST + (largest - LOWEST) * torch.arange(count, device=device) / count
