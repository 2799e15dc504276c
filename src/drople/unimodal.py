"""Adaptive dropout that looks at one modality alone: what the paper's appendix D compares DroPLe with.

Each gives a token a value in [0, 1] in place of the importance: `p = p_max - value (p_max - p_min)`.

- group: Ke et al., "Group-wise Dynamic Dropout Based on Latent Semantic Variations", AAAI 2020. The tokens
  of a sequence are projected onto their two principal components and counted on a grid; where many stand
  they repeat each other and drop more often.
- standout: Ba, Frey, "Adaptive dropout for training deep neural networks", NIPS 2013. A learned probability:
  `value = sigmoid(w x + b)`, one w and b a modality.

The appendix names both in a sentence each; grid size, range and how StandOut learns are our reading.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drople.backbone.tokens import Tokens
from drople.importance import Modality, importance

CELLS = 4  # of the grid, a side: 16 cells for some 10 to 200 tokens
ITERATIONS = 10


def principal_coordinates(states: Tensor, counted: Tensor) -> Tensor:
    """Where the counted tokens stand along their sequence's first two principal components. [N, L, 2]

    Subspace iteration on the tokens' Gram matrix: an eigensolver would make the host wait at each layer. A
    direction's length and sign are free, which a min-max grid does not see.
    """
    states, mask = states.float(), counted[..., None].float()
    centred = (states - (states * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)) * mask
    gram = centred @ centred.transpose(1, 2)
    places = torch.arange(states.shape[1], device=states.device)
    # Any start that is no eigenvector will do; this one is the same every time.
    start = torch.stack([torch.cos(1.7 * places), torch.cos(2.9 * places + 1)], -1)
    basis = start.expand(len(states), -1, -1)
    for _ in range(ITERATIONS):
        first, second = (gram @ basis).unbind(-1)
        first = F.normalize(first, dim=-1)
        second = F.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
        basis = torch.stack([first, second], -1)
    return basis


def density(states: Tensor, counted: Tensor) -> Tensor:
    """How many counted tokens of its sequence share a token's cell of the grid, itself among them. [N, L]"""
    at = principal_coordinates(states, counted)
    low = at.masked_fill(~counted[..., None], torch.inf).amin(1, keepdim=True)
    high = at.masked_fill(~counted[..., None], -torch.inf).amax(1, keepdim=True)
    cell = ((at - low) / (high - low).clamp_min(1e-12) * CELLS).floor().clamp(0, CELLS - 1)
    together = (cell[:, :, None] == cell[:, None, :]).all(-1) & counted[:, None, :]
    return together.sum(-1).float().masked_fill(~counted, 0.0)


def group_value(tokens: Tokens) -> Tensor:
    """1 for the loneliest content token of a sequence, 0 for those in the densest cell. [N, L]"""
    return importance([-density(tokens.states, tokens.content)], tokens)


class Standout(nn.Module):
    """Learned probabilities. Drawing passes no gradient, so a token's gate learns as if the token were
    multiplied by it (its expectation, once kept), while forward nothing is."""

    def __init__(self, vision_width: int, text_width: int) -> None:
        super().__init__()
        self.gate: Mapping[str, nn.Linear] = nn.ModuleDict(  # type: ignore[assignment]
            {"vision": nn.Linear(vision_width, 1), "text": nn.Linear(text_width, 1)}
        )

    def value(self, modality: Modality, tokens: Tokens) -> Tensor:
        """`sigmoid(w x + b)` of the tokens at unit variance. [N, L]"""
        states = tokens.states.detach().float()
        return self.gate[modality](F.layer_norm(states, states.shape[-1:])).squeeze(-1).sigmoid()

    def through(self, modality: Modality, tokens: Tokens) -> Tensor:
        """The states as they are, with a gradient for the gates of the target tokens."""
        value = self.value(modality, tokens).masked_fill(~tokens.target, 0.0)
        return tokens.states * (1 + value - value.detach()).to(tokens.states.dtype)[..., None]
