"""The training loop.

Few-shot images lie on the device as uint8 and are augmented in batches; what is frozen was computed
before. Every step seeds its own draws, so a resumed run needs no random state and repeats the bytes of
an undisturbed one.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from drople.cuda_graph import GraphedStep
from drople.data.augment import patch_randaugment, random_resized_crop_flip
from drople.data.images import normalise
from drople.errors import DropleError
from drople.losses import class_log_prior
from drople.methods import Batch, Method, Progress
from drople.methods.base import TowerMethod, TrainingData
from drople.options import option
from drople.records import read_tensors, write_bytes, write_tensors

Precision = Literal["auto", "float32", "bf16", "fp16"]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Augmentation = Literal["crop_flip", "patch_randaugment", "none"]

CHECKPOINT = "checkpoint.safetensors"
LOG = "log.jsonl"
# Losses are looked at once in so many steps: reading them makes the host wait for the device.
LOOK_EVERY = 10
# A checkpoint is written at the end of an epoch where that takes no more than this share of the time, and in long
# epochs once in so many seconds.
SAVE_SHARE = 0.05
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class TrainingOptions:
    epochs: int = option(30, "passes over the training images (released 20)", low=1)
    batch_size: int = option(32, "images a step (released 4)", low=1)
    optimizer: Literal["adamw", "sgd"] = option("adamw", "adamw (released) or sgd with momentum 0.9")
    lr: float = option(2e-3, "peak learning rate of the prompts (released 2e-4)", low=0)
    weight_decay: float = option(5e-4, "weight decay (released 5e-5)", low=0)
    warmup: float = option(
        0.05, "share of the steps in which the rate rises; then a cosine to 0", low=0, high=1
    )
    clip_norm: float = option(1.0, "largest norm of the gradient; 0 is no limit", low=0)
    loss: Literal["cross_entropy", "logit_adjusted", "compensated"] = option(
        "cross_entropy",
        "cross_entropy, or for a long tail logit_adjusted by class frequency, or compensated: that with one image "
        "more a class (Candle)",
    )
    crop_scale: float = option(
        0.08, "the smallest part of an image that a random crop keeps (CoOp 0.08)", low=0.01, high=1
    )
    augmentation: Augmentation = option(
        "crop_flip", "crop_flip, patch_randaugment (released: that on top of it), or none"
    )
    shard_classes: bool = option(
        False,
        "of several processes each encodes its part of the classes: for many classes, where the method allows it",
    )


@dataclass(frozen=True)
class Status:
    """What the last steps looked like, for whoever shows progress."""

    step: int
    steps: int
    epoch: int
    epochs: int
    values: dict[str, float]


def rate(step: int, steps: int, warmup: float) -> float:
    """Cosine with linear warm-up, as a factor of the peak rate."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def augment(images: Tensor, size: int, patch: int, kind: Augmentation, crop_scale: float = 0.08) -> Tensor:
    """uint8 images at training size to float pixels 0..255 at the backbone's size."""
    if kind == "none":
        return torch.nn.functional.interpolate(
            images.float(), size=(size, size), mode="bilinear", antialias=True
        )
    cropped = random_resized_crop_flip(images, size, scale=(crop_scale, 1.0))
    return patch_randaugment(cropped, patch) if kind == "patch_randaugment" else cropped


class Training:
    """One run of the loop. State is the parameters, the optimiser and the number of the next step."""

    def __init__(
        self,
        method: Method,
        data: TrainingData,
        options: TrainingOptions,
        *,
        seed: int,
        precision: Precision,
        folder: Path | None = None,
    ) -> None:
        self.data, self.options, self.seed, self.folder = data, options, seed, folder
        device = method.backbone.device
        if precision == "fp16" and device.type != "cuda":
            raise DropleError("fp16 training needs a CUDA GPU: use precision bf16 or float32 here.")
        if not dist.is_initialized():
            # Accelerate remembers where, and in what numbers, this process trained first.
            AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=device.type == "cpu", mixed_precision="fp16" if precision == "fp16" else "no"
        )
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.method = method.to(device)
        if options.loss != "cross_entropy":
            method.log_prior = class_log_prior(
                data.labels, len(method.task.words), compensated=options.loss == "compensated"
            ).float()
        for part in method.modules():
            if isinstance(part, TowerMethod):
                part.shard_classes = options.shard_classes and part.shares_classes and self.world > 1
        method.prepare(data)
        groups = method.parameter_groups(options.lr)
        kind: Any = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.SGD
        extra: dict[str, Any] = {} if options.optimizer == "adamw" else {"momentum": 0.9}
        # A fused SGD whose first step overflows in fp16 keeps a momentum that was never written.
        extra["fused"] = device.type == "cuda" and (options.optimizer == "adamw" or precision != "fp16")
        optimizer = kind(groups, lr=options.lr, weight_decay=options.weight_decay, **extra)
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.module, self.optimizer = method, optimizer
        if method.trainable:
            # Mixed precision alone: what is learned is so small that gradients are joined here (`_join`).
            self.module = self.accelerator.prepare_model(method, False, evaluation_mode=True)
            self.optimizer = self.accelerator.prepare(optimizer)
        if self.world > 1:
            for tensor in method.state_dict().values():
                dist.broadcast(tensor, 0)
        self.per_epoch = math.ceil(len(data.labels) / options.batch_size)
        self.steps = self.per_epoch * options.epochs
        self.step = 0
        self.graphed: GraphedStep | None = None
        one = self.world == 1 and precision != "fp16"
        if device.type == "cuda" and one and method.fixed_shapes:
            self.graphed = GraphedStep(self._gradients, method)
        self.pending: list[dict[str, Any]] = []

    def wait_for_everyone(self) -> None:
        """Accelerate's own asks for a GPU of each process's number, though all train on the CPU."""
        device = self.accelerator.device
        if self.world > 1:
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)

    def run(self, on_status: Callable[[Status], None] | None = None, resume: bool = False) -> None:
        """Train to the end, from the last checkpoint if there is one and `resume` is set."""
        if resume:
            self._load()
        elif self.folder is not None and self.accelerator.is_main_process:
            write_bytes(self.folder / LOG, b"")
        self.method.train()
        try:
            self._train(on_status)
        except RuntimeError as error:
            # NCCL has its own error, gloo a plain one.
            if self.world == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise DropleError(
                f"process {self.rank} of {self.world} cannot reach the others: one of them has ended, and what it "
                "printed says why. Start them all again with --resume to go on from the last checkpoint."
            ) from None
        self.method.eval()

    def _train(self, on_status: Callable[[Status], None] | None) -> None:
        saved, cost = time.monotonic(), 0.0
        while self.step < self.steps:
            for indices in self._epoch():
                self.pending.append(self._step(indices))
                self.step += 1
                ends = self.step % self.per_epoch == 0
                look = ends or self.step % LOOK_EVERY == 0
                since = time.monotonic() - saved
                # Processes look together, so none may do it by its own clock.
                late = since > SAVE_SECONDS and (look or self.world == 1)
                save = late or (ends and cost <= SAVE_SHARE * since) or self.step == self.steps
                if look or save:
                    self._look(on_status)
                if save:
                    self._check_parameters()
                    begun = time.monotonic()
                    self._save()
                    saved = time.monotonic()
                    cost = saved - begun

    def _epoch(self) -> Iterator[Tensor]:
        """The batches that are left of this epoch."""
        order = epoch_order(len(self.data.labels), self.seed, self.step // self.per_epoch)
        # At once: copying them batch by batch would make the host wait for each step.
        order = order.to(self.data.labels.device)
        return iter(order.split(self.options.batch_size)[self.step % self.per_epoch :])

    def _step(self, indices: Tensor) -> dict[str, Any]:
        torch.manual_seed(((self.seed << 32) + self.step * self.world + self.rank) % (1 << 63))
        mine = indices[self.rank :: self.world]
        # A process without a sample takes part with weight 0, so that gradients can meet.
        share = len(mine) * self.world / len(indices)
        mine = mine if len(mine) else indices[:1]
        self.method.advance(Progress(self.step, self.steps, self.step // self.per_epoch, self.options.epochs))
        factor = rate(self.step, self.steps, self.options.warmup)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = factor * peak
        shown = self.graphed(mine) if self.graphed is not None else self._gradients(mine, share)
        self._join()
        if self.options.clip_norm:
            self.accelerator.clip_grad_norm_(self.method.parameters(), self.options.clip_norm)
        self.optimizer.step()
        if self.graphed is None:
            self.optimizer.zero_grad(set_to_none=True)
        return {**shown, "lr": factor * self.options.lr, "share": share}

    def _gradients(self, mine: Tensor, share: float = 1.0) -> dict[str, Tensor]:
        """Forward and backward on some images; the losses, and what the method shows besides."""
        backbone = self.method.backbone
        size = backbone.pixels.size
        pixels = augment(
            self.data.images[mine],
            size,
            size // backbone.patch_grid,
            self.options.augmentation,
            self.options.crop_scale,
        )
        batch = Batch(
            images=normalise(pixels, backbone.pixels, backbone.dtype),
            labels=self.data.labels[mine],
            frozen=self.data.frozen[mine],
        )
        losses = self.module(batch)
        total = torch.stack(list(losses.values())).sum()
        self.accelerator.backward(total * share)
        return {"loss": total.detach()} | {n: v.detach() for n, v in losses.items()} | self.method.monitor

    def _join(self) -> None:
        """Gradients become their mean over the processes, in one message."""
        gradients = [p.grad for p in self.method.parameters() if p.grad is not None]
        if self.world == 1 or not gradients:
            return
        joined = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), "mean")
        for gradient, mean in zip(gradients, joined.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def _look(self, on_status: Callable[[Status], None] | None) -> None:
        """Read the steps since the last look, of all processes: refuse what is not finite, log the rest."""
        if not self.pending:
            return
        first = self.step - len(self.pending)
        names = [name for name, value in self.pending[0].items() if isinstance(value, Tensor)]
        # One transfer, and one message to the other processes, for all of them.
        table = torch.stack([torch.stack([row[n].double() for n in names]) for row in self.pending])
        if self.world > 1:
            shares = table.new_tensor([[row["share"]] for row in self.pending])
            table = self.accelerator.reduce(shares * table, "mean")
        rows = [
            dict(zip(names, values, strict=True)) | {"lr": float(row["lr"])}
            for values, row in zip(table.tolist(), self.pending, strict=True)
        ]
        self.pending = []
        for number, row in enumerate(rows, first):
            if not math.isfinite(row["loss"]):
                terms = ", ".join(f"{n} {v:.4g}" for n, v in row.items())
                raise self._diverged(f"the loss is not finite at step {number + 1} of {self.steps} ({terms})")
        if self.folder is not None and self.accelerator.is_main_process:
            with open(self.folder / LOG, "a", encoding="utf-8") as log:
                for number, row in enumerate(rows, first):
                    shown = {n: float(f"{v:.6g}") for n, v in row.items()}
                    log.write(json.dumps({"step": number, "epoch": number // self.per_epoch, **shown}) + "\n")
        if on_status is not None:
            epoch = (self.step - 1) // self.per_epoch
            on_status(Status(self.step, self.steps, epoch, self.options.epochs, rows[-1]))

    def _check_parameters(self) -> None:
        """A step with a finite loss can still leave NaN behind, and after the last no loss would show it."""
        for name, parameter in self.method.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise self._diverged(f"{name} is not finite after step {self.step} of {self.steps}")

    def _diverged(self, what: str) -> DropleError:
        return DropleError(
            f"{what}. Lower the learning rate (lr is {self.options.lr:g}), train in float32 or bf16, or keep "
            "clip_norm above 0."
        )

    def _save(self) -> None:
        if self.folder is None or not self.accelerator.is_main_process:
            return
        tensors = {f"method.{name}": value for name, value in self.method.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        log_bytes = (self.folder / LOG).stat().st_size
        scaler = "" if self.accelerator.scaler is None else json.dumps(self.accelerator.scaler.state_dict())
        metadata = {"step": str(self.step), "log_bytes": str(log_bytes), "scaler": scaler}
        write_tensors(self.folder / CHECKPOINT, tensors, metadata)

    def _load(self) -> None:
        assert self.folder is not None
        path, log = self.folder / CHECKPOINT, self.folder / LOG
        main = self.accelerator.is_main_process
        if not path.exists():
            if main:
                write_bytes(log, b"")
            self._check_together()
            return
        tensors, metadata = read_tensors(path)
        try:
            own = {n.removeprefix("method."): t for n, t in tensors.items() if n.startswith("method.")}
            self.method.load_learned(own)
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith("optimizer."):
                    _, index, key = name.split(".", 2)
                    state.setdefault(int(index), {})[key] = tensor
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
            if self.options.optimizer == "sgd":
                # What had no gradient where the run began may have one of zeros here.
                for parameter in self.method.parameters():
                    moving = self.optimizer.state[parameter]
                    moving.setdefault("momentum_buffer", torch.zeros_like(parameter))
            self.step = int(metadata["step"])
            if log.stat().st_size < int(metadata["log_bytes"]):
                raise ValueError(f"{LOG} is shorter than it was")
            if main:
                os.truncate(log, int(metadata["log_bytes"]))
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            raise DropleError(
                f"{path} does not fit this run ({error}): train anew without --resume."
            ) from None
        if self.accelerator.scaler is not None and metadata.get("scaler"):
            self.accelerator.scaler.load_state_dict(json.loads(metadata["scaler"]))
        self._check_together()

    def _check_together(self) -> None:
        steps = self.accelerator.gather(torch.tensor([self.step], device=self.accelerator.device))
        if len(steps.unique()) > 1:
            raise DropleError(
                "the processes do not read the same checkpoint: on several machines the run folder must lie on a "
                "disk that all of them see."
            )

    def finish(self) -> None:
        """The checkpoint has served once its run is saved."""
        if self.folder is not None and self.accelerator.is_main_process:
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
