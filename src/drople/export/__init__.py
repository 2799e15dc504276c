"""A run made ready for elsewhere: an ONNX file, a `torch.export` program, a folder for the Hugging Face Hub.

Files are checked before they are written: what comes out of one is compared with what the run itself says of
the same pictures.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from drople.data.dataset import DataSource, ImageData
from drople.errors import DropleError, unknown
from drople.export.check import TOLERANCE, Agreement, compare, own_answers, pictures_to_check
from drople.export.hub import write_hub
from drople.learner import CONFIG, METRICS, PromptLearner
from drople.progress import Progress
from drople.records import read_json, write_bytes, write_json

Target = Literal["onnx", "hub", "torch"]
Number = Literal["float32", "fp16", "int8"]
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}

__all__ = ["Agreement", "Exported", "Number", "Target", "export"]


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with the run."""

    path: Path
    to: str
    dtype: str
    bytes: int
    check: Agreement

    def lines(self) -> list[str]:
        """For people."""
        return [f"{self.path}: {self.bytes / 1e6:.1f} MB, {self.to}, {self.dtype}", *self.check.lines()]


def export(
    run: str | Path | PromptLearner,
    to: Target,
    out: str | Path,
    *,
    dtype: Number = "float32",
    data: DataSource | ImageData | None = None,
    split: str | None = None,
    backbone: str | None = None,
    dataset: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write a run (a folder, or a learner) as `to` at `out`.

    `data` are labelled images to check on and to measure accuracy with; without them drawings made by code
    serve. `dtype` is for ONNX. `backbone` (its name on the Hub, where the run has a local folder) and
    `dataset` (what the images are) are for the model card.
    """
    for what, given, known in (("export", to, get_args(Target)), ("dtype", dtype, get_args(Number))):
        if given not in known:
            raise unknown(what, given, known)
    if dtype != "float32" and to != "onnx":
        raise DropleError(f"dtype {dtype} is for --to onnx: {to} keeps float32.")
    out = Path(out)
    _check_place(out, to)
    learner = _plain(run, progress)
    batches = pictures_to_check(learner, data, split)
    if to == "hub":
        write_hub(learner, out, backbone=backbone, dataset=dataset)
        check = compare(learner, own_answers(_reloaded(out, learner)), batches)
        if check.largest_difference > TOLERANCE:
            raise DropleError(f"{out} does not answer as the run does ({check.lines()[0]}): this is a bug.")
        size = sum(file.stat().st_size for file in out.iterdir())
        return Exported(out, to, dtype, size, check)
    if to == "onnx":
        from drople.export.onnx_file import onnx_bytes, onnx_runner

        content = onnx_bytes(learner, dtype)
        answers = onnx_runner(content)
    else:
        from drople.export.torch_program import program_bytes, program_runner

        content = program_bytes(learner)
        answers = program_runner(content)
    check = compare(learner, answers, batches)
    if dtype == "float32" and check.largest_difference > TOLERANCE:
        raise DropleError(
            f"the {to} file does not answer as the run does ({check.lines()[0]}): nothing was written. "
            "Try another version of torch or of onnxruntime, and tell the authors."
        )
    write_bytes(out, content)
    return Exported(out, to, dtype, len(content), check)


def _check_place(out: Path, to: Target) -> None:
    """Refuse what cannot be written to before the work begins."""
    if to == "hub":
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise DropleError(f"{out} is there already: give --out a new folder.")
    elif out.suffix != SUFFIX[to]:
        raise DropleError(f"--to {to} writes a file: give --out a name that ends in {SUFFIX[to]}, not {out}.")
    elif out.is_dir():
        raise DropleError(f"{out} is a folder: give --out the name of a file.")


def _plain(run: str | Path | PromptLearner, progress: Progress | None) -> PromptLearner:
    """The learner in float32 on the CPU, whatever it was trained in."""
    if not isinstance(run, PromptLearner):
        learner = PromptLearner.load(run, device="cpu", progress=progress)
    else:
        run._check_fitted()
        learner = run
    backbone = learner.backbone_
    if backbone.device.type == "cpu" and backbone.dtype == torch.float32:
        return learner
    with tempfile.TemporaryDirectory() as folder:
        learner.save(folder)
        write_json(Path(folder) / CONFIG, read_json(Path(folder) / CONFIG) | {"precision": "float32"})
        return PromptLearner.load(folder, device="cpu", progress=progress)


def _reloaded(folder: Path, original: PromptLearner) -> PromptLearner:
    """What the folder holds, on the backbone at hand: its name there may be one that only the Hub knows."""
    config = read_json(folder / CONFIG)
    learner = PromptLearner(original.backbone_, config["method"], device="cpu", precision="float32")
    learner._set_up(config, config["options"])
    return learner._restore(folder, read_json(folder / METRICS))
