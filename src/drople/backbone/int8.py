"""Weights at one byte each, so that a CLIP fits inside the package.

Every matrix (embedding tables and convolutions too, flattened to rows) becomes int8 with one float scale a
row: symmetric rounding, a weight w of a row with largest magnitude m stored as round(127 w / m). Vectors
and scalars (biases, norms, the logit scale) are few and delicate, and stay as they are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ":scale"


def quantise(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix as int8 under its own name, its row scales under `name:scale`; the rest unchanged."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            packed[name] = tensor.contiguous()
            continue
        rows = tensor.float().flatten(1)
        largest = rows.abs().amax(dim=1)
        # A row of zeros has no scale of its own; any will do.
        scale = torch.where(largest > 0, largest / 127, 1.0)
        packed[name] = (rows / scale[:, None]).round().to(torch.int8).reshape(tensor.shape)
        packed[name + SCALE] = scale
    return packed


def restore(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict that `quantise` took, up to rounding, in `dtype`."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            shape = (-1,) + (1,) * (tensor.ndim - 1)
            state[name] = (tensor.float() * scale.reshape(shape)).to(dtype)
        else:
            state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return state
