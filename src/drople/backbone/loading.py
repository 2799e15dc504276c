"""A CLIP checkpoint by name: `pocket` (embedded), a folder, or a name on the Hugging Face Hub.

What goes wrong with checkpoints goes wrong quietly: a missing tensor is filled with random numbers, another
model's tokenizer gives wrong ids. So a checkpoint loads completely or not at all, and never from pickle.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPModel

from drople.backbone.int8 import restore
from drople.backbone.tokenizer import Tokenizer
from drople.data.images import Pixels
from drople.errors import DropleError

POCKET = "pocket"
WEIGHTS, INDEX, INT8 = "model.safetensors", "model.safetensors.index.json", "model.int8.safetensors"
FROM_HUB = [
    "config.json",
    "*processor_config.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    WEIGHTS,
    INDEX,
    "model-*-of-*.safetensors",
]
# The statistics of OpenAI's CLIP, for a folder that does not say.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Checkpoint:
    """A frozen CLIP in float32, with the tokenizer and the pixels it was trained on."""

    name: str
    model: CLIPModel
    tokenizer: Tokenizer
    pixels: Pixels


def load_checkpoint(name: str | Path) -> Checkpoint:
    """Loads `pocket`, a folder, or a Hub name such as `openai/clip-vit-base-patch16`."""
    if name == POCKET:
        with resources.as_file(resources.files("drople") / "assets" / POCKET) as folder:
            return _from_folder(POCKET, folder)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(str(name), folder)
    if folder.exists():
        raise DropleError(
            f"{name} is a file; a checkpoint is a folder with config.json, {WEIGHTS} and tokenizer.json. "
            "Give the folder."
        )
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise DropleError(
            f"there is no folder {name}. Give a folder that holds a CLIP checkpoint, a name on the Hugging "
            f"Face Hub, or {POCKET!r}, the small CLIP inside drople."
        )
    return _from_folder(name, _hub_folder(name), hub_name=name)


def _from_folder(name: str, folder: Path, hub_name: str | None = None) -> Checkpoint:
    config = _config(folder)
    tokenizer = Tokenizer(folder, config.text_config)
    pixels = _pixels(folder, config.vision_config.image_size)
    with _quiet():
        model = _model(folder, config, hub_name)
    model.eval().requires_grad_(False)
    return Checkpoint(name, model, tokenizer, pixels)


def _hub_folder(name: str) -> Path:
    """The local snapshot of a Hub repository, with no network where the cache has all of it."""
    with contextlib.suppress(OSError, ValueError):
        cached = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        weights = (cached / WEIGHTS).is_file() or (cached / INDEX).is_file()
        words = (cached / "tokenizer.json").is_file() or (cached / "merges.txt").is_file()
        if weights and words and (cached / "config.json").is_file():
            return cached
    try:
        # Fails at once where there is no network; transformers would try for half a minute first.
        huggingface_hub.HfApi().model_info(name, timeout=10)
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=FROM_HUB))
    except Exception as error:  # of whichever HTTP library the installed client uses
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise DropleError(
            f"cannot get the checkpoint {name!r} from the Hugging Face Hub, and it is not in the local cache "
            f"({type(error).__name__}: {reason}). Check the spelling and the network, give a folder that "
            f"holds the checkpoint, or use {POCKET!r}, the small CLIP inside drople."
        ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DropleError(
            f"{file} is not valid JSON ({error}): it is damaged or incomplete. Download it again."
        ) from error
    if not isinstance(content, dict):
        raise DropleError(
            f"{file} should hold a JSON object, not a {type(content).__name__}. Download it again."
        )
    return content


def _config(folder: Path) -> CLIPConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise DropleError(
            f"{folder} has no config.json, so it is no checkpoint in the Hugging Face layout. Give the "
            f"folder that holds config.json, {WEIGHTS} and tokenizer.json side by side; "
            "`model.save_pretrained(folder)` writes it."
        )
    kind = _json(file).get("model_type")
    if kind != "clip":
        raise DropleError(
            f"{folder} holds a model of type {kind!r}; drople adapts CLIP models (model_type 'clip' in "
            f"config.json, both towers). Give a CLIP checkpoint, such as openai/clip-vit-base-patch16 or "
            f"{POCKET!r}."
        )
    with _quiet():
        return CLIPConfig.from_pretrained(folder)


def _model(folder: Path, config: CLIPConfig, hub_name: str | None) -> CLIPModel:
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    try:
        if (folder / INT8).is_file():
            _check_file(folder / INT8)
            state = restore(load_file(folder / INT8))
            model, info = CLIPModel.from_pretrained(None, state_dict=state, **options)
        else:
            # A Hub repository with pickle alone often has safetensors on a branch, which transformers finds.
            source = folder if _has_weights(folder, hub_name is not None) else hub_name
            model, info = CLIPModel.from_pretrained(source, use_safetensors=True, **options)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the checkpoint {hub_name}" if hub_name else str(folder)
        reason = " ".join(str(error).split())
        raise DropleError(
            f"the weights of {where} cannot be loaded ({reason[:300]}). They must be safetensors and fit "
            "config.json: download both again from one place."
        ) from error
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DropleError(
            f"the weights in {folder} lack {', '.join(missing[:3])}{more}, which would be left random. The "
            "download is incomplete, or config.json belongs to another model: download both again from one "
            "place."
        )
    return model


def _has_weights(folder: Path, on_hub: bool) -> bool:
    """Whether complete safetensors are there; an error unless the Hub may still have them elsewhere."""
    if (folder / WEIGHTS).is_file():
        _check_file(folder / WEIGHTS)
        return True
    if (folder / INDEX).is_file():
        shards = sorted(set(_json(folder / INDEX).get("weight_map", {}).values()))
        if absent := [shard for shard in shards if not (folder / shard).is_file()]:
            raise DropleError(
                f"{folder} lacks {', '.join(absent)}: its index names {len(shards)} weight files and "
                f"{len(absent)} of them are not there. Download the missing ones into the folder."
            )
        for shard in shards:
            _check_file(folder / shard)
        return True
    if on_hub:
        return False
    if pickles := sorted(file.name for file in (*folder.glob("*.bin"), *folder.glob("*.pt"))):
        raise DropleError(
            f"{folder} has its weights only as pickle ({', '.join(pickles)}), which can run code when "
            f"opened and is never read here. If you trust it, convert it once: "
            f"CLIPModel.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) in a Python with "
            f"transformers writes {WEIGHTS}."
        )
    raise DropleError(
        f"{folder} has no weights: {WEIGHTS} (or its shards with {INDEX}) is missing. Download it into the "
        "folder."
    )


def _check_file(file: Path) -> None:
    # Opening compares the header with the length of the file, and reads no weights.
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise DropleError(
            f"{file} is not a complete safetensors file ({error}; {file.stat().st_size} bytes): the "
            "download was cut short, or it is a Git LFS pointer. Download it again."
        ) from error


def _pixels(folder: Path, image_size: int) -> Pixels:
    """From preprocessor_config.json, or the part of processor_config.json that newer versions write."""
    said: dict[str, Any] = {}
    if (folder / "preprocessor_config.json").is_file():
        said = _json(folder / "preprocessor_config.json")
    elif (folder / "processor_config.json").is_file():
        said = _json(folder / "processor_config.json").get("image_processor") or {}
    crop = said.get("crop_size") if said.get("do_center_crop", True) else None
    sides = _sides(crop if crop is not None else said.get("size", image_size))
    if sides != {image_size}:
        raise DropleError(
            f"the image processor of {folder} makes images of {' x '.join(map(str, sorted(sides)))} pixels, "
            f"but the image tower takes {image_size} (vision_config.image_size). Correct crop_size in "
            "preprocessor_config.json, or take the file of the same checkpoint."
        )
    if not said.get("do_normalize", True):
        return Pixels(image_size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), said.get("resample", 3))
    mean, std = said.get("image_mean", MEAN), said.get("image_std", STD)
    return Pixels(image_size, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), said.get("resample", 3))


def _sides(size: int | dict[str, int]) -> set[int]:
    return {size} if isinstance(size, int) else {side for side in size.values() if side is not None}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars, notes or FutureWarnings of transformers: what matters of them is checked and raised here."""
    log = transformers.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
