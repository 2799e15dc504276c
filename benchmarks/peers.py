"""The authors' own MaPLe and PromptSRC, run from checkouts of their repositories; nothing of them is here.

Run as they are: their CLIP, text encoder, prompts, config file (`vit_b16_...batch4...`: fp16, SGD), `build_model` and
`forward_backward` (77 tokens, losses, backward, optimiser step), and Dassl's optimiser. Left out, in their favour:
Dassl's loop, decoding and augmentation; images lie on the device. Stood in for, while they are imported: packages that
only Dassl's data code uses, and the file of pre-trained weights, which is random. Of PromptSRC's 60 templates
`TEMPLATES` are encoded: they are averaged before the first step, which nothing here measures.
"""

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from torch import nn

CONFIGS = {
    "promptsrc": "configs/trainers/PromptSRC/vit_b16_c2_ep20_batch4_4+4ctx.yaml",
    "maple": "configs/trainers/MaPLe/vit_b16_c2_ep5_batch4_2ctx.yaml",
}
TRAINERS = {"promptsrc": "PromptSRC", "maple": "MaPLe"}
TEMPLATES = 2
VOCABULARY, CONTEXT, HEAD, TEXT_LAYERS = 49408, 77, 64, 12
LARGE = 1 << 20  # of the frozen towers' matrices; what the authors add is smaller


class CfgNode(SimpleNamespace):
    """yacs, as far as Dassl's defaults use it."""


class TrainerX:
    """Dassl's trainer, as far as `build_model` and `forward_backward` use it within an epoch."""

    def register_model(self, *_: Any) -> None:
        pass


class Registry:
    def register(self) -> Callable[[type], type]:
        return lambda trainer: trainer


def plain_regex() -> SimpleNamespace:
    """`regex` by the standard library, for the one pattern of CLIP's tokenizer."""

    def compile_pattern(pattern: str, flags: int) -> re.Pattern[str]:
        letters = pattern.replace(r"[\p{L}]", r"[^\W\d_]").replace(r"[\p{N}]", r"\d")
        return re.compile(letters.replace(r"[^\s\p{L}\p{N}]", r"(?:[^\s\w]|_)"), flags)

    return SimpleNamespace(
        compile=compile_pattern, sub=re.sub, findall=re.findall, IGNORECASE=int(re.IGNORECASE)
    )


def stand_ins() -> dict[str, ModuleType]:
    """Modules by name; what they hold is what the authors' files import from them."""
    nothing = SimpleNamespace(BICUBIC=None)
    held: dict[str, dict[str, Any]] = {
        "yacs": {},
        "yacs.config": {"CfgNode": CfgNode},
        "ftfy": {"fix_text": lambda text: text},
        "tqdm": {"tqdm": nothing},
        "torchvision": {},
        "torchvision.transforms": dict.fromkeys(
            ("Compose", "Resize", "CenterCrop", "ToTensor", "Normalize", "InterpolationMode"), nothing
        ),
        "dassl.engine": {"TRAINER_REGISTRY": Registry(), "TrainerX": TrainerX},
        "dassl.utils": {"load_pretrained_weights": nothing, "load_checkpoint": nothing},
        "dassl.metrics": {"compute_accuracy": nothing},
    }
    if importlib.util.find_spec("regex") is None:
        held["regex"] = vars(plain_regex())
    modules = {}
    for name, contents in held.items():
        modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None)
        vars(modules[name]).update(contents)
    return modules


@contextlib.contextmanager
def importing_from(*checkouts: Path) -> Iterator[None]:
    """Imports find the checkouts first, and stand-ins for what only other parts of them need."""
    stood_in = stand_ins()
    before = {name: sys.modules[name] for name in stood_in if name in sys.modules}
    sys.modules.update(stood_in)
    sys.path[:0] = [str(checkout) for checkout in checkouts]
    try:
        yield
    finally:
        del sys.path[: len(checkouts)]
        for name in stood_in:
            del sys.modules[name]
        sys.modules.update(before)


def merge(node: SimpleNamespace, given: dict[str, Any]) -> SimpleNamespace:
    """A config file over the defaults, as yacs reads it: a string that is a literal is its value."""
    for name, value in given.items():
        if isinstance(value, dict):
            setattr(node, name, merge(getattr(node, name, CfgNode()), value))
            continue
        if isinstance(value, str):
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
        setattr(node, name, value)
    return node


@contextlib.contextmanager
def large_weights_undrawn() -> Iterator[None]:
    """What a file of weights will overwrite need not be drawn first: it takes most of the set-up."""

    def quick(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda tensor, *rest, **more: (
            tensor if tensor.numel() >= LARGE else draw(tensor, *rest, **more)
        )

    init = nn.init
    with (
        mock.patch.object(init, "normal_", quick(init.normal_)),
        mock.patch.object(init, "kaiming_uniform_", quick(init.kaiming_uniform_)),
    ):
        yield


@lru_cache
def random_weights(clip: Callable[..., nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """Their plain CLIP, in place of OpenAI's file."""
    width, layers, _, patch, pixels, text_width, _, joint = shape
    plain = {"trainer": "CoOp", "vision_depth": 0, "language_depth": 0, "vision_ctx": 0, "language_ctx": 0}
    text_heads = text_width // HEAD
    return clip(
        joint, pixels, layers, width, patch, CONTEXT, VOCABULARY, text_width, text_heads, TEXT_LAYERS, plain
    )


def authors_step(
    rival: str,
    checkout: Path,
    dassl: Path,
    names: Sequence[str],
    batch: int,
    shape: tuple[int, ...],
    device: torch.device,
) -> Callable[[], object]:
    """A training step of `promptsrc` or `maple` on random images; `shape` as in `drople.backbone.shapes`."""
    pixels = shape[4]
    with importing_from(checkout, dassl):
        defaults = importlib.import_module("dassl.config.defaults")
        code: Any = importlib.import_module(f"trainers.{rival}")
        model = importlib.import_module("clip.model")
    config = merge(defaults._C, yaml.safe_load((checkout / CONFIGS[rival]).read_text("utf-8")))
    config.INPUT.SIZE = (pixels, pixels)
    # The schedule moves between epochs, and Dassl's warm-up does not know today's torch.
    config.OPTIM.WARMUP_EPOCH = 0
    weights = random_weights(model.CLIP, shape)
    if hasattr(code, "IMAGENET_TEMPLATES"):
        code.IMAGENET_TEMPLATES = code.IMAGENET_TEMPLATES[:TEMPLATES]
    if device.type == "cpu":  # to try this file where there is no GPU: theirs says .cuda() everywhere
        nn.Module.cuda = torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
    trainer = getattr(code, TRAINERS[rival])()
    trainer.cfg, trainer.device = config, device
    trainer.dm = SimpleNamespace(dataset=SimpleNamespace(classnames=list(names)))
    trainer.batch_idx, trainer.num_batches = 0, sys.maxsize  # never the last of an epoch
    with (
        mock.patch.object(code.clip, "_download", lambda url: url),
        mock.patch.object(torch.jit, "load", lambda *_, **__: weights),
        contextlib.redirect_stdout(sys.stderr),
        large_weights_undrawn(),
    ):
        trainer.build_model()
    trainer.model.train()
    batch_data = {
        "img": torch.randn(batch, 3, pixels, pixels, device=device),
        "label": torch.arange(batch, device=device) % len(names),
    }
    return lambda: trainer.forward_backward(batch_data)
