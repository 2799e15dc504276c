"""Where a model runs, and in which numbers if nobody says."""

import os
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from drople.errors import DropleError


def find_device(wanted: str) -> torch.device:
    """The device of a name, tried and made the current one. "auto" is a GPU where there is one; of several processes
    on a machine, "auto" and "cuda" are each one's own."""
    device = wanted
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    together, count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if device.startswith("cuda:") and together > 1:
        raise DropleError(
            f"{together} processes cannot all train on {device}: give --device cuda, one for each."
        )
    if device == "cuda" and count:
        if together > count:
            raise DropleError(
                f"{together} processes train on this machine, which has {count} GPU{'s' * (count > 1)}: start "
                f"{count}, or give --device cpu."
            )
        # A cluster may show each process its own GPU alone.
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
        if place.type == "cuda":
            torch.cuda.set_device(place)
    except (RuntimeError, AssertionError):
        raise DropleError(f"device {wanted!r} cannot be used here: give cpu, or auto.") from None
    return place


def own_draws() -> AbstractContextManager[None]:
    """Random numbers that are drawn inside leave those outside as they were, wherever any are."""
    return torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())


@lru_cache
def stream_beside(device: torch.device, role: str) -> torch.cuda.Stream:
    """One for all who do the same: a stream's workspaces are never given back, and its memory to no other stream."""
    return torch.cuda.Stream(device)


def newer(gpu: torch.device) -> bool:
    """Whether it multiplies bf16, and Triton is made for it: Ampere (2020) and what came after."""
    return torch.cuda.get_device_capability(gpu) >= (8, 0)


def usual_dtype(place: torch.device) -> torch.dtype:
    """bf16 where the chip multiplies it fast: newer GPUs, and processors that say so. Others would be slower by it."""
    if place.type == "cuda":
        fast = newer(place)
    else:
        # Older torch does not know of its processor.
        processor: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        fast = bool(processor.get("avx512_bf16") or processor.get("amx_bf16"))
    return torch.bfloat16 if fast else torch.float32
