"""Kernels of our own for a GPU, in Triton, each beside the plain torch code that it stands in for.

Triton comes with torch's builds for GPUs, and needs a C compiler. Where either is missing, on older GPUs, and on a CPU,
the plain code runs.
"""

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from drople.device import newer


def usable(tensor: Tensor) -> bool:
    """Whether a kernel may take this tensor: it is of a short type, on a GPU, and Triton works there."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and works(tensor.device)


@cache
def works(device: torch.device) -> bool:
    """Tried once, with a small one; why it does not is said, once."""
    if find_spec("triton") is None or (device.type == "cuda" and not newer(device)):
        return False
    try:
        from drople.kernels.add_norm import AddNorm

        with torch.no_grad():
            some = torch.zeros(16, device=device)
            AddNorm.apply(some, some, some, some, 1.0)
    # A compiler, a driver or a header that is missing: Triton has no error of its own.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"Triton builds no kernels here ({reason}): plain ones run, and take longer", stacklevel=2
        )
        return False
    return True
