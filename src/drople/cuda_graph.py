"""A training step as one CUDA graph.

A small model's step is thousands of short kernels, and launching them takes longer than running them.
Captured once for a shape of batch, the forward and backward pass is a single launch. Draws inside use the
device's generator, whose seed is read at every replay: a step that seeds itself stays reproducible.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from drople.device import stream_beside

WARM_UP = 3  # passes before capture, so that lazily made workspaces exist


class GraphedStep:
    """`compute(indices)` must do forward and backward with no host sync and return tensors of fixed shape.

    Where it cannot be captured after all (another driver, a method that waits for the host), a warning says so,
    once, and steps run as they come.
    """

    def __init__(self, compute: Callable[[Tensor], dict[str, Tensor]], module: nn.Module) -> None:
        self.compute, self.module, self.plain = compute, module, False
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, dict[str, Tensor]]] = {}

    def __call__(self, indices: Tensor) -> dict[str, Tensor]:
        """One forward and backward pass; gradients are in the parameters, as after `backward`."""
        size = len(indices)
        if size not in self.graphs and not self.plain:
            try:
                self.graphs[size] = self._capture(indices)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                warnings.warn(f"a step is no CUDA graph here, and slower for it ({reason})", stacklevel=2)
                self.plain = True
        if size not in self.graphs:
            self._clear()
            return self.compute(indices)
        graph, static, shown = self.graphs[size]
        static.copy_(indices)
        graph.replay()
        # The next replay writes over these.
        return {name: value.clone() for name, value in shown.items()}

    def _capture(self, indices: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, dict[str, Tensor]]:
        static = indices.clone()
        side = stream_beside(indices.device, "branch")
        # Torch's own would be of the device that was the first to capture.
        captured = stream_beside(indices.device, "captured")
        side.wait_stream(torch.cuda.current_stream())
        state = torch.cuda.get_rng_state()
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._clear()
                    self.compute(static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with (
                _no_collection(),
                warnings.catch_warnings(),
                torch.cuda.graph(graph, stream=captured, capture_error_mode="thread_local"),
            ):
                # A parameter that both branches use gets its gradient from both streams: it waits for both.
                warnings.filterwarnings("ignore", ".*AccumulateGrad node's stream does not match")
                self._clear()
                shown = self.compute(static)
        finally:
            torch.cuda.set_rng_state(state)
        return graph, static, shown

    def _clear(self) -> None:
        """Gradients keep their place in memory: every graph, and the optimiser, knows them there."""
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()


class Branch:
    """What runs inside becomes a branch of the graph that is being captured, and may run at the same time as
    what comes between it and `join`; where nothing is captured, it runs as if it stood alone.

        with Branch(device) as branch:
            images = ...
        classes = ...
        branch.join([images])
    """

    def __init__(self, device: torch.device) -> None:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self.stream = stream_beside(device, "branch") if capturing else None
        self.inside = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def __enter__(self) -> "Branch":
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self.inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inside.__exit__(*error)

    def join(self, results: Iterable[Tensor]) -> None:
        """Wait for the branch. `results` are the tensors that go on living outside: their memory must not be
        given to the branch's backward pass while someone else reads them."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream()
        current.wait_stream(self.stream)
        for tensor in results:
            tensor.record_stream(current)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph of an earlier run that the collector freed in the middle of a capture would break it, and with it
    every later capture of the process."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
