"""The token sequences of a tower between two layers, and which token of them is what.

`U^(i)` in the paper: `{v_cls, E_patch, P_v^(i)}` for images, `{t_bos, P_t^(i), T_embed, t_eos}` for
text. Sequences of a batch are padded on the right; padding never counts anywhere.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

# The same at every layer of every step: made once for a length, and as normal tensors even if the first to
# ask is in inference mode.


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def places(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def itself(length: int, device: torch.device) -> Tensor:
    """[L, L], True where a token meets itself."""
    return torch.eye(length, dtype=torch.bool, device=device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def earlier(length: int, device: torch.device) -> Tensor:
    """[L, L], True where a token of a causal tower may look: at itself and what is before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def number(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number that is there already: `torch.where` writes a Python one to the device at every call."""
    return torch.tensor(value, dtype=dtype, device=device)


@dataclass(frozen=True)
class Tokens:
    """N sequences of L tokens. Every mask is [N, L]."""

    states: Tensor  # [N, L, D]
    anchor: Tensor  # [N], the place of the global token: cls or eos
    real: Tensor  # not padding
    target: Tensor  # may drop (J_target)
    numbers: Tensor | None = None  # [N], which of the classes these are
    first: int = 0  # how many sequences were walked before these, where classes come in parts
    padded: bool = False  # padding that attention could see: only after tokens were removed
    slots: Tensor | None = None  # [N, L, M], or [L, M] for all: one-hot, which prompt of a layer enters where
    stays: Tensor | None = None  # [N, L, 1] or [L, 1]: 1 where none does, 0 where one does
    hidden: Tensor | None = None  # as keys, hidden from the others in the next layer
    chosen: Tensor | None = None  # drawn at an earlier layer, where layers share one draw
    probability: Tensor | None = None  # with which they were drawn

    @property
    def content(self) -> Tensor:
        """All tokens but the global one and padding: the tokens that have an importance."""
        return self.real & ~self.is_anchor

    @property
    def is_anchor(self) -> Tensor:
        return places(self.real.shape[1], self.real.device) == self.anchor[:, None]

    def enter(self, prompts: Tensor) -> "Tokens":
        """This layer's prompts [M, D] take their places; what stood there is forgotten.

        A product with a one-hot matrix rather than an index: its gradient is a matrix product too, so
        it is fast and the same bytes every time.
        """
        if self.slots is None or self.stays is None:
            return self
        return replace(self, states=torch.addcmul(self.slots @ prompts, self.states, self.stays))

    def keep(self, kept: Tensor) -> "Tokens":
        """Only the tokens of the mask `kept`, moved together in order and padded on the right."""
        length = int(kept.sum(1).max())
        order = torch.argsort(~kept, dim=1, stable=True)[:, :length]

        def pick(mask: Tensor) -> Tensor:
            return mask.gather(1, order)

        still_there = pick(kept)
        return replace(
            self,
            states=self.states.gather(1, order[..., None].expand(-1, -1, self.states.shape[-1])),
            padded=True,
            anchor=pick(self.is_anchor).int().argmax(1),
            real=pick(self.real) & still_there,
            target=pick(self.target) & still_there,
            slots=_moved(self.slots, order),
            stays=_moved(self.stays, order),
            hidden=None if self.hidden is None else pick(self.hidden),
            chosen=None if self.chosen is None else pick(self.chosen) & still_there,
            probability=None if self.probability is None else pick(self.probability),
        )

    @property
    def _keys(self) -> Tensor | None:
        """The tokens that others may look at; None is all."""
        if self.hidden is None:
            return self.real if self.padded else None
        return self.real & ~self.hidden if self.padded else ~self.hidden

    def visible(self, causal: bool) -> Tensor | None:
        """What attention adds to its logits [N, 1, L, L] (0: may look, -inf: may not), or None where the plain
        mask serves. Right padding needs none in a causal tower: no real token can see it.
        """
        if self.hidden is None and (causal or not self.padded):
            return None
        keys = self._keys
        assert keys is not None
        length, device = keys.shape[1], keys.device
        mask = keys[:, None, :] | itself(length, device)
        if causal:
            mask = mask & earlier(length, device)
        return self._added(mask)[:, None]

    def only_global(self, states: Tensor) -> "Tokens":
        """What is left where only the global token of each sequence is, with these states [N, 1, D]."""
        one = self.real.new_ones(len(states), 1)
        return Tokens(states, torch.zeros_like(self.anchor), one, ~one)

    def visible_to_global(self, causal: bool) -> Tensor | None:
        """The same for cls or eos alone [N, 1, 1, L]."""
        keys = self._keys
        if causal:
            before = places(self.real.shape[1], self.real.device) <= self.anchor[:, None]
            keys = before if keys is None else keys & before
        return None if keys is None else self._added(keys[:, None])[:, None]

    def _added(self, mask: Tensor) -> Tensor:
        """A mask [N, Q, L] as the numbers that attention adds to its logits: 0, or -inf where it is False.

        Rows begin at multiples of 8: of others, and of booleans, fused attention would make a copy that does.
        """
        dtype, device, length = self.states.dtype, self.states.device, mask.shape[-1]
        room = torch.empty(*mask.shape[:-1], -(-length // 8) * 8, dtype=dtype, device=device)[..., :length]
        return torch.where(mask, number(0.0, device, dtype), number(-torch.inf, device, dtype), out=room)


def _moved(slots: Tensor | None, order: Tensor) -> Tensor | None:
    """What stands at [N, L, M] or, for all sequences, at [L, M], in another order [N, L']."""
    if slots is None:
        return None
    every = slots.expand(len(order), -1, -1)
    return every.gather(1, order[..., None].expand(-1, -1, every.shape[-1]))
