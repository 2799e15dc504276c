"""Kernels of our own for a GPU, in Triton, each beside the plain torch code that it stands in for.

Triton comes with torch's builds for GPUs. Without it, and on a CPU, the plain code runs.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _there() -> bool:
    return find_spec("triton") is not None


def usable(tensor: Tensor) -> bool:
    """Whether a kernel may take this tensor: it is of a short type, on a GPU, and Triton is there."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _there()
