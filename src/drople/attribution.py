"""Attribution-driven dropout (AD-DROP), for the paper's comparison with unimodal dropout (its appendix D).

Yang, Deng, Quan, Wang, Nie. "AD-DROP: Attribution-Driven Dropout for Robust Language Model Fine-Tuning."
NeurIPS 2022. What a prediction leans on most drops, so that it learns to lean on the rest:

  1. a pass without dropout gives the pseudo label, the class of the highest logit F;
  2. the gradient of F says what each position did for it: its attribution;
  3. the share p of the positions with the highest attribution are candidates, and each drops with q;
  4. the step is taken on a second pass, with that dropout. In every other epoch, the first among them, nothing
     drops (cross-tuning).

There positions are those of the attention maps, sorted row by row. Here tokens drop, and the appendix says no
more than that attribution is applied to the tokens of each modality. Our reading: dropping token j after a layer
takes column j out of the next layer's maps A, so its attribution is that column's,

    sum_h,r A_hrj dF/dA_hrj = sum_h v_hj . dF/dv_hj        (as A v is all that A does)

which fused attention gives without a map. F of an image is the logit of its best class, F of a class that of
the batch's best image, so that every sentence has one. q is p_max, p the default of the authors' code; they
search both for each task.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drople.backbone.layer import Watch
from drople.backbone.tokens import Tokens

SHARE = 0.3  # p


@dataclass
class FirstPass:
    """Stands where token dropout would, at the first so many layers of a tower, and drops nothing."""

    layers: int
    # The next layer's values [N, H, L, head] and the target tokens, by layer and, where the classes come in
    # chunks, the number of the chunk's first.
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def reaches(self, layer: int) -> bool:
        return layer <= self.layers

    def watch(self, layer: int, tokens: Tokens) -> Watch | None:
        if not 1 <= layer <= self.layers:
            return None

        def see(query: Tensor, key: Tensor, value: Tensor, *_: object) -> None:
            # A chunk that is recomputed in the backward pass comes by again.
            self.seen.setdefault((layer - 1, tokens.first), (value, tokens.target))

        return see

    def drop(self, layer: int, tokens: Tokens) -> Tokens:
        if layer >= self.layers or tokens.states.requires_grad:
            return tokens
        # Where nothing is learned below, a graph begins here.
        return replace(tokens, states=tokens.states.detach().requires_grad_())

    def candidates(self, logits: Tensor) -> dict[tuple[int, int], Tensor]:
        """Which tokens may drop [N, L], by layer and part; `logits` holds F of every sequence, in any shape."""
        if not self.seen:
            return {}
        values = [value for value, _ in self.seen.values()]
        gradients = torch.autograd.grad(logits.sum(), values, retain_graph=True)
        return {
            key: highest((value.detach().float() * gradient.float()).sum((1, 3)), target, SHARE)
            for (key, (value, target)), gradient in zip(self.seen.items(), gradients, strict=True)
        }


def highest(attribution: Tensor, target: Tensor, share: float) -> Tensor:
    """The share of each sequence's target tokens, rounded up, with the highest attribution. [N, L]"""
    order = attribution.masked_fill(~target, -math.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(1)
    # 0.3 of 10 is 3, not the 4 of 3.0000001 rounded up.
    return (rank < (share * target.sum(1, keepdim=True) - 1e-4).ceil()) & target
