"""Which device, and in which numbers if nobody says. The GPUs here are made up; real ones are in test_gpu.py."""

import pytest
import torch

from drople.device import find_device, usual_dtype
from drople.errors import DropleError


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "cuda:77"])
def test_what_is_no_device_is_named(name: str) -> None:
    with pytest.raises(DropleError, match=f"^device '{name}' cannot be used here: give cpu, or auto"):
        find_device(name)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_more_processes_than_gpus(name: str, one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        DropleError, match=r"^2 processes train on this machine, which has 1 GPU: start 1, or"
    ):
        find_device(name)
    with pytest.raises(DropleError, match=r"^2 processes cannot all train on cuda:0: give --device cuda"):
        find_device("cuda:0")
    assert find_device("cpu") == torch.device("cpu")


def test_processes_that_see_one_gpu_each(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr("torch.empty", lambda *size, device: tried.append(device))
    monkeypatch.setattr("torch.cuda.set_device", tried.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("auto") == torch.device("cuda:0") and tried == 2 * [torch.device("cuda:0")]


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16), ((12, 0), torch.bfloat16)],
)
def test_older_gpus_have_no_bf16(
    capability: tuple[int, int], wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda place: capability)
    assert usual_dtype(torch.device("cuda:0")) == wanted
