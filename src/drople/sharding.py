"""Class text encoding shared out over processes: each encodes its part of the classes, all get every feature.

With many classes the text tower is most of a step, and every process would walk it for the same classes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from drople.backbone import Sentences
from drople.dropout import TokenDropout


class Summed(torch.autograd.Function):
    """The sum over processes, of which each holds a part and zeros elsewhere.

    Every process's loss looks at the whole, so the gradient of a part is the sum of theirs. Training takes the
    mean of what the processes then hold, which is the gradient of the joined batch as it is without sharing.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Summed.forward(ctx, gradients[0])


def summed(part: Tensor) -> Tensor:
    return Summed.apply(part)


def shared_out(
    encode: Callable[[Sentences], Tensor], sentences: Sentences, dropout: TokenDropout | None = None
) -> Tensor:
    """`encode(sentences)` [K, E], of which this process computes a part. All processes must call it together.

    Parts are of one size, so that no process has nothing to do; where that makes them overlap, a class counts
    for the process that owns it alone.
    """
    world, rank, count = dist.get_world_size(), dist.get_rank(), len(sentences)
    size = math.ceil(count / world)
    owned = min(rank * size, count)
    first = min(owned, count - size)
    keeping = dropout if dropout is not None and dropout.keep_states else None
    mine = None if keeping is None else _ask_everyone(keeping, size)
    features = encode(sentences.rows(first, first + size))[owned - first :]
    if keeping is not None and mine is not None:
        _hand_over(keeping, mine, length=sentences.base.shape[1])
    return summed(F.pad(features, (0, 0, owned, count - owned - len(features))))


def _ask_everyone(dropout: TokenDropout, size: int) -> slice:
    """The classes whose states any process asks for, as far as this one owns them; where its own wishes lie."""
    assert dropout.rows is not None, "without rows every process would be sent the states of every class"
    world, rank, wishes = dist.get_world_size(), dist.get_rank(), len(dropout.rows)
    most = torch.tensor(wishes, device=dropout.rows.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    start = rank * int(most)
    asked = torch.zeros(world * int(most), dtype=torch.long, device=dropout.rows.device)
    asked[start : start + wishes] = dropout.rows + 1
    dist.all_reduce(asked)
    asked = asked - 1
    dropout.rows = torch.where(asked // size == rank, asked, -1)
    return slice(start, start + wishes)


def _hand_over(dropout: TokenDropout, mine: slice, length: int) -> None:
    """The kept states of every process's classes to who asked for them, of all layers in one message."""
    kept = [
        F.pad(torch.cat([states, real[..., None].to(states.dtype)], -1), (0, 0, 0, length - states.shape[1]))
        for states, real in dropout.kept.values()
    ]
    if not kept:  # nothing drops
        return
    whole = summed(torch.stack(kept))[:, mine]
    dropout.kept = {
        layer: (each[..., :-1], each[..., -1] > 0) for layer, each in zip(dropout.kept, whole, strict=True)
    }
