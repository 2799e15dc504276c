"""A training step as one CUDA graph.

A small model's step is thousands of short kernels, and launching them takes longer than running them.
Captured once for a shape of batch, the forward and backward pass is a single launch. Draws inside use the
device's generator, whose seed is read at every replay: a step that seeds itself stays reproducible.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WARM_UP = 3  # passes before capture, so that lazily made workspaces exist


class GraphedStep:
    """`compute(indices)` must do forward and backward with no host sync and return tensors of fixed shape."""

    def __init__(self, compute: Callable[[Tensor], dict[str, Tensor]], module: nn.Module) -> None:
        self.compute, self.module = compute, module
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, dict[str, Tensor]]] = {}

    def __call__(self, indices: Tensor) -> dict[str, Tensor]:
        """One forward and backward pass; gradients are in the parameters, as after `backward`."""
        size = len(indices)
        if size not in self.graphs:
            self.graphs[size] = self._capture(indices)
        graph, static, shown = self.graphs[size]
        static.copy_(indices)
        graph.replay()
        # The next replay writes over these.
        return {name: value.clone() for name, value in shown.items()}

    def _capture(self, indices: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, dict[str, Tensor]]:
        static = indices.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        state = torch.cuda.get_rng_state()
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._clear()
                self.compute(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._clear()
            shown = self.compute(static)
        torch.cuda.set_rng_state(state)
        return graph, static, shown

    def _clear(self) -> None:
        """Gradients keep their place in memory: every graph, and the optimiser, knows them there."""
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()


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
