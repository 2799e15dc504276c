"""Tensors that come from the device while it goes on.

`tensor.cpu()` waits for everything the device was asked for, the next batch too; this waits for the tensor alone.
"""

import torch
from torch import Tensor


class Arriving:
    """A tensor on its way to the host; one that is there already is given as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.cpu()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def get(self) -> Tensor:
        if self._copied is None:
            return self._host
        self._copied.synchronize()
        # Pinned memory is scarce: the next one gets it back.
        return self._host.clone()
