"""The command that makes a run, or a benchmark, again: from what was written down when it was made."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drople.data.dataset import tidy
from drople.methods import find
from drople.options import build, names, written
from drople.protocols import SHOTS
from drople.templates import DEFAULT, ELEVEN, read_template
from drople.training import TrainingOptions


def fit_command(config: Mapping[str, Any]) -> str:
    """`drople fit` as it was called, without what is a default. DATA, RUN and NAMES stand for paths."""
    kind, _ = find(config["method"])
    preset = dict(kind.presets.get(config.get("preset") or "", {}))
    words = ["drople", "fit", "DATA", "--out", "RUN", "--method", config["method"]]
    words += ["--backbone", public_name(config["backbone"])]
    words += [
        "--shots",
        "all" if config.get("shots") is None else str(config["shots"]),
        "--seed",
        str(config["seed"]),
    ]
    if config.get("preset"):
        words += ["--preset", config["preset"]]
    elif config["backbone"] in kind.preset_with:
        words += ["--preset", "none"]
    usual = read_template(preset.get("templates", DEFAULT))
    templates = tuple(config["templates"])
    if templates != usual:
        words += ["--template", "eleven" if templates == ELEVEN else templates[0]]
    if [tidy(name) for name in config["classes"]] != list(config["words"]):
        words += ["--classnames", "NAMES"]
    if config["precision"] != "auto":
        words += ["--precision", config["precision"]]
    expected = build(TrainingOptions, {n: v for n, v in preset.items() if n in names(TrainingOptions)})
    settings = {n: v for n, v in config["training"].items() if v != getattr(expected, n, None)}
    if "epochs" in settings:
        words += ["--epochs", str(settings.pop("epochs"))]
    settings |= {
        n: v for n, v in config["options"].items() if n not in preset or written(v) != written(preset[n])
    }
    return shlex.join(words + _set(settings))


def benchmark_commands(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """One `drople benchmark` for the records that differ only in dataset, method, shots and seed."""
    bags: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        shared = [
            record["protocol"],
            record["backbone"],
            record.get("preset"),
            record.get("precision", "auto"),
        ]
        shared += [
            record.get("ratio"),
            record.get("post_hoc"),
            record.get("targets") or (),
            record.get("options") or {},
        ]
        shared += [record["dataset"]] if record["protocol"] == "cross-dataset" else []
        bags.setdefault(repr(shared), []).append(record)
    return [_benchmark_command(bag) for bag in bags.values()]


def _benchmark_command(bag: Sequence[Mapping[str, Any]]) -> str:
    first = bag[0]

    def all_of(field: str) -> list[str]:
        return list(dict.fromkeys(str(record[field]) for record in bag))

    targets = [str(target) for target in first.get("targets") or ()]
    words = ["drople", "benchmark", first["protocol"]]
    if first["protocol"] == "cross-dataset":
        words += ["--source", first["dataset"], "--datasets", *targets]
    else:
        words += ["--datasets", *all_of("dataset"), *(["--targets", *targets] if targets else [])]
    words += ["--methods", *all_of("method"), "--seeds", *sorted(all_of("seed"), key=int)]
    shots = sorted({record["shots"] for record in bag if record["shots"] is not None})
    if shots and tuple(shots) != SHOTS.get(first["protocol"], (16,)):
        words += ["--shots", *map(str, shots)]
    words += ["--backbone", public_name(first["backbone"])]
    for name, usual in (("preset", None), ("precision", "auto"), ("post_hoc", None)):
        if first.get(name, usual) != usual:
            words += [f"--{name.replace('_', '-')}", first[name]]
    if first.get("ratio") is not None:
        words += ["--ratio", f"{first['ratio']:g}"]
    return shlex.join(words + _set(first.get("options") or {}))


def public_name(backbone: str) -> str:
    """A backbone's name; of a folder on some machine only its last part."""
    return Path(backbone).name if Path(backbone).is_absolute() else backbone


def _set(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={written(value)}")]
