"""Tensors on their way to the device and from it, while it goes on.

`tensor.to(device)` waits its turn behind what the device was asked for, and `tensor.cpu()` waits for all of it, the
next batch too. These wait for nothing but the tensor itself.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drople.device import stream_beside


def sender(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Who takes tensors to the device: those in pinned memory beside what is computed there."""
    if device.type != "cuda":
        return lambda tensor: tensor.to(device)
    beside = stream_beside(device, "pixels")

    def send(tensor: Tensor) -> Tensor:
        with torch.cuda.stream(beside):
            sent = tensor.to(device, non_blocking=True)
        here = torch.cuda.current_stream(device)
        here.wait_stream(beside)
        sent.record_stream(here)  # its memory is not given away while it is computed with
        return sent

    return send


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
        self._copied.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        if self._copied is None:
            return self._host
        self._copied.synchronize()
        # Pinned memory is scarce: the next one gets it back. NumPy copies alone; torch's threads would take the cores
        # from who decodes the next pictures, and turn around on them for a while after.
        return torch.from_numpy(self._host.numpy().copy())
