"""Several processes learn what one does: the same gradients, the same log, resumed by any number of them."""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import RUN_FILES, Command, free_port, in_processes, splits, tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import main as torchrun

from drople.backbone import Backbone
from drople.cli import main
from drople.methods import REGISTRY, Task, make
from drople.methods.base import TrainingData
from drople.training import Training, TrainingOptions

# Five classes do not halve, and of four processes with two classes each the last owns none.
WORDS = ("red", "green tree", "blue", "old yellow cup", "white")
NOTHING_DROPS = {"p_min": 0.0, "p_max": 0.0}
EVERY_TERM = {"alignment_detached": False, "l1_text": 1.0, "kl": 1.0, "l2": 1.0, "operation": "remove"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "drople": ("drople", NOTHING_DROPS),
    "every-term": ("drople", NOTHING_DROPS | EVERY_TERM),
    "low-rank": ("drople", {**REGISTRY["drople"].presets["low_rank"], **NOTHING_DROPS}),
    "chunks": ("drople", NOTHING_DROPS),
    "text-stays": ("drople", NOTHING_DROPS | {"text_dropout_layers": 0}),
    "attribution": ("drople", NOTHING_DROPS | {"rate": "attribution"}),
    "coop": ("coop", {}),
    "tcp": ("tcp", {}),
    "mma": ("mma", {}),
    "tip-adapter-f": ("tip-adapter-f+drople", NOTHING_DROPS),
}
PLAIN = {"augmentation": "none", "batch_size": 5, "lr": 0.01}


@functools.cache
def own_backbone(checkpoint: Path, chunks: bool) -> Backbone:
    """Loaded once in each process; in `chunks`: one class at a time, recomputed for the gradient."""
    backbone = Backbone.load(checkpoint)
    if chunks:
        backbone.activation_bytes = 1
    return backbone


def new_training(checkpoint: Path, case: str, folder: Path | None = None, **options: Any) -> Training:
    backbone = own_backbone(checkpoint, chunks=case == "chunks")
    method, own = CASES[case]
    torch.manual_seed(0)
    made = make(method, backbone, Task(WORDS, ("a photo of a {}.",)), own)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (13, 3, 36, 36), dtype=torch.uint8, generator=generator)
    frozen = torch.randn(13, backbone.embed_dim, generator=generator)
    data = TrainingData(images, torch.arange(13) % 5, frozen)
    return Training(
        made, data, TrainingOptions(**PLAIN | options), seed=1, precision="float32", folder=folder
    )


def one_epoch(
    checkpoint: Path, case: str, **options: Any
) -> tuple[dict[str, Tensor], list[dict[str, float]], list[list[int]]]:
    """Gradients of every step (nothing is learned between them), the values shown, and whose images were whose."""
    run = new_training(checkpoint, case, epochs=1, clip_norm=0.0, **options)
    found: dict[str, Tensor] = {}
    shown: list[dict[str, float]] = []
    mine: list[list[int]] = []

    def keep() -> None:
        for name, parameter in run.method.named_parameters():
            if parameter.grad is not None:
                found[f"{run.step}.{name}"] = parameter.grad.clone()

    gradients = run._gradients

    def watched(indices: Tensor, share: float = 1.0) -> dict[str, Tensor]:
        mine.append(indices.tolist() if share else [])
        return gradients(indices, share)

    run.optimizer.step = keep
    run._gradients = watched  # type: ignore[method-assign]
    run.method.train()
    for indices in run._epoch():
        run.pending.append(run._step(indices))
        run.step += 1
        run._look(lambda status: shown.append(status.values))
    return found, shown, mine


@functools.cache
def alone(case: str) -> Any:
    return one_epoch(tiny_checkpoint(), case)


def report_epochs(checkpoint: Path, folder: str, cases: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """What each process of several writes down."""
    for name, (case, options) in cases.items():
        found, shown, mine = one_epoch(checkpoint, case, **options)
        save_file(found, f"{folder}/{name}-{os.environ['RANK']}.safetensors")
        Path(f"{folder}/{name}-{os.environ['RANK']}.json").write_text(json.dumps([shown, mine]), "utf-8")


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_and_log_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    """Batches of 5, 5 and 3: shares differ, and of four processes one has no image of the last."""
    names = CASES if world == 2 else ("drople", "every-term")
    cases: dict[str, Any] = {f"{n}-whole": (n, {}) for n in names}
    cases |= {f"{n}-shared": (n, {"shard_classes": True}) for n in names}
    in_processes(world, report_epochs, tiny_checkpoint(), str(tmp_path), cases)
    for name, (case, _) in cases.items():
        wanted, rows, everything = alone(case)
        parts = []
        for rank in range(world):
            found = load_file(tmp_path / f"{name}-{rank}.safetensors")
            assert found.keys() == wanted.keys()
            for at, gradient in wanted.items():
                torch.testing.assert_close(found[at], gradient, rtol=1e-4, atol=1e-5, msg=f"{name} {at}")
            shown, mine = json.loads((tmp_path / f"{name}-{rank}.json").read_text("utf-8"))
            assert [row.keys() for row in shown] == [row.keys() for row in rows]
            for row, other in zip(shown, rows, strict=True):
                assert row == pytest.approx(other, rel=1e-4, abs=1e-6), name
            parts.append(mine)
        for step, indices in enumerate(everything):
            divided = [n for mine in parts for n in mine[step]]
            assert sorted(divided) == sorted(indices), "every image once"


# Resumed by another number of processes ------------------------------------------------------------


def train(checkpoint: Path, folder: Path, stop: int | None, resume: bool) -> None:
    run = new_training(checkpoint, "drople", folder, epochs=4)
    take = run._step

    def stopping(indices: Tensor) -> dict[str, Any]:
        if run.step == stop:
            raise InterruptedError
        return take(indices)

    run._step = stopping  # type: ignore[method-assign]
    try:
        run.run(resume=resume)
    except InterruptedError:
        return
    if run.rank == 0:
        save_file(run.method.state_dict(), folder / "learned.safetensors")


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_resumed_by_another_number_of_processes(first: int, then: int, tmp_path: Path) -> None:
    """Without draws the result is that of a run that was never disturbed; the checkpoint is two steps old."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny_checkpoint(), whole, None, False)
    in_processes(first, train, tiny_checkpoint(), cut, 8, False)
    assert not (cut / "learned.safetensors").exists() and len(log(cut)) == 6
    in_processes(then, train, tiny_checkpoint(), cut, None, True)
    wanted, found = (load_file(f / "learned.safetensors") for f in (whole, cut))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=2e-5)
    for row, other in zip(log(cut), log(whole), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


# As a user does it ---------------------------------------------------------------------------------


def launch(*arguments: object) -> Command:
    """torchrun, in a process that need not import torch first; those that it starts do."""
    launcher = ("--nproc-per-node", 2, "--master-port", free_port(), "-m", "drople")
    paths = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return Command(*launcher, *arguments, environment=environment, main=torchrun)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splits(tmp_path_factory.mktemp("data") / "colours")


def test_torchrun_trains_one_run_and_one_process_speaks(data: Path, tmp_path: Path) -> None:
    settings = ("--backbone", tiny_checkpoint(), "--epochs", 3, "--set", "shard_classes=true", "--json")
    settings += ("--device", "cpu")
    answer = launch("fit", data, "--out", tmp_path / "run", *settings).wait()
    assert answer.code == 0, answer.err
    assert answer.json["evaluation"]["images"] == 18, "one answer, of every image once"
    assert answer.err.count("class 'red' has only 6") == 1
    noise = [line for line in answer.err.splitlines() if not line.startswith("note: ")]
    assert not noise, noise
    assert {p.name for p in (tmp_path / "run").iterdir()} == set(RUN_FILES)


def torchrun_forking(arguments: list[str]) -> None:
    """What torchrun does, but its processes are forked: they need not import torch first."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, one_rank)(arguments)


def one_rank(arguments: list[str]) -> None:
    folder = Path(arguments[arguments.index("--out") + 1]).parent
    (folder / f"pid-of-{os.environ['RANK']}").write_text(str(os.getpid()), "utf-8")
    # A launcher that forks ends the others the moment one dies, and their last words are what is asked for.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main(arguments)


def test_when_one_process_dies_all_end_and_say_what_to_do(data: Path, tmp_path: Path) -> None:
    arguments = ("fit", data, "--out", tmp_path / "run", "--backbone", tiny_checkpoint(), "--epochs", 100_000)
    arguments += ("--device", "cpu")
    run = Command(*arguments, environment={"OMP_NUM_THREADS": "1"}, main=torchrun_forking)
    try:
        end = time.monotonic() + 100
        while not (tmp_path / "run/checkpoint.safetensors").exists():
            assert run.process.is_alive() and time.monotonic() < end
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid-of-1").read_text("utf-8")), signal.SIGKILL)
        answer = run.wait(60)
    finally:
        run.process.kill()
    assert answer.code != 0
    assert "drople: process 0 of 2 cannot reach the others" in answer.err and "--resume" in answer.err
