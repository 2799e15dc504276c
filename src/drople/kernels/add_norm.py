"""A residual sum and the layer norm of it in one pass, and their gradient in another.

Plain torch reads and writes the states four times for it in either direction, most of them at less than
half of the memory's speed. The norm's weights are frozen: they get no gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(
    states, added, total, normed, weight, bias, means, rates, width, epsilon,
    ADDED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside, here = places < width, row * width + places
    value = tl.load(states + here, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(total.dtype.element_ty)
        tl.store(total + here, kept, mask=inside)
        value = kept.to(tl.float32)  # the norm is of what the next layer sees
    mean = tl.sum(value, 0) / width
    away = tl.where(inside, value - mean, 0.0)
    rate = 1 / tl.sqrt(tl.sum(away * away, 0) / width + epsilon)
    factor = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + here, away * rate * factor + shift, mask=inside)
    tl.store(means + row, mean)
    tl.store(rates + row, rate)


@triton.jit
def _backward(
    total, gradient, beside, result, weight, means, rates, width,
    BESIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside, here = places < width, row * width + places
    value = tl.load(total + here, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(rates + row)
    unit = tl.where(inside, (value - tl.load(means + row)) * rate, 0.0)
    factor = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32) * factor
    out = (own - tl.sum(own, 0) / width - unit * (tl.sum(own * unit, 0) / width)) * rate
    if BESIDE:
        out += tl.load(beside + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + here, out, mask=inside)


class AddNorm(torch.autograd.Function):
    """(states, added or None) -> states + added, and its layer norm."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        states = states.contiguous()
        total = states if added is None else torch.empty_like(states)
        normed, width = torch.empty_like(states), states.shape[-1]
        rows = states.numel() // width
        means, rates = torch.empty(2, rows, device=states.device)
        with torch.cuda.device_of(states):
            _forward[(rows,)](
                states, states if added is None else added.contiguous(), total, normed, weight, bias, means, rates,
                width, epsilon, ADDED=added is not None, **_shape(width),
            )  # fmt: skip
        ctx.save_for_backward(total, weight, bias, means, rates)
        ctx.both, ctx.epsilon = added is not None, epsilon
        ctx.set_materialize_grads(False)
        return (total.view_as(total) if added is None else total), normed

    @staticmethod
    def backward(ctx: Any, beside: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, bias, means, rates = ctx.saved_tensors
        width = total.shape[-1]
        if gradient is None:
            result = beside
        elif torch.is_grad_enabled():  # somebody wants the gradient of a gradient
            normed = F.layer_norm(total, (width,), weight, bias, ctx.epsilon)
            (result,) = torch.autograd.grad(normed, total, gradient, create_graph=True)
            result = result if beside is None else result + beside
        else:
            result, gradient = torch.empty_like(total), gradient.contiguous()
            with torch.cuda.device_of(total):
                _backward[(len(means),)](
                    total, gradient, gradient if beside is None else beside.contiguous(), result, weight, means,
                    rates, width, BESIDE=beside is not None, **_shape(width),
                )  # fmt: skip
        return result, result if ctx.both else None, None, None, None


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": block, "num_warps": min(8, max(1, block // 256))}
