"""The report of one run: what was trained on what, how well it does, how it went, what it gets wrong."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drople.data.dataset import load_data
from drople.errors import DropleError
from drople.learner import CONFIG, CONFIG_FIELDS, METRICS, PROMPTS, PromptLearner, sound
from drople.methods import Method, find
from drople.progress import Progress
from drople.records import read_json, read_tensors
from drople.regulariser import DropleOptions
from drople.report.charts import (
    Line,
    confidence_chart,
    confusion_chart,
    line_chart,
    number,
    reliability_chart,
    share,
    side_by_side,
    thin,
)
from drople.report.commands import fit_command, public_name
from drople.report.pictures import Looked, look
from drople.training import LOG

CONFUSIONS = 12
# Columns of the log that are no term of the loss.
NO_TERMS = ("step", "epoch", "loss", "lambda", "drop_rate_vision", "drop_rate_text", "accuracy", "lr")
TERMS = {
    "loss": ("Total loss", "the sum of the terms, which is minimised"),
    "cross_entropy": ("Cross-entropy", "of the learnable branch, against the labels"),
    "residual_entropy_visual": (
        "Residual entropy, visual",
        "weight × −H: it falls as what is left of an image says less of its class",
    ),
    "residual_entropy_text": ("Residual entropy, text", "weight × −H: the same for what is left of a class"),
    "alignment": ("Alignment", "weighted; by it the bridge tokens learn"),
    "accuracy": ("Training accuracy", "of each batch, with tokens dropped"),
    "lambda": ("λ", "how much of the frozen feature the residual is without"),
    "drop_rate_vision": ("Mean drop rate, image tokens", "share of the target tokens that dropped"),
    "drop_rate_text": ("Mean drop rate, text tokens", "share of the target tokens that dropped"),
    "lr": ("Learning rate", "linear warm-up, then a cosine"),
}


def run_page(folder: Path, data: str | Path | None, device: str, progress: Progress) -> dict[str, Any]:
    """Everything the template of a run shows."""
    config = read_json(folder / CONFIG)
    if not (folder / METRICS).exists():
        raise DropleError(f"{folder} is not finished: go on with drople fit --resume, then report.")
    if not all(isinstance(config.get(n), kind) for n, kind in CONFIG_FIELDS.items()) or not sound(config):
        raise DropleError(f"{folder / CONFIG} is damaged: copy the run again, or train anew.")
    saved = read_json(folder / METRICS)
    looked: Looked | None = None
    if data is not None:
        learner = PromptLearner.load(folder, device=device, progress=progress)
        looked = look(learner, load_data(data))
        learned = f"{learner.trainable_:,} parameters"
    else:
        tensors, _ = read_tensors(folder / PROMPTS)
        learned = f"{sum(tensor.numel() for tensor in tensors.values()):,} numbers kept"
    evaluation = looked.evaluation if looked is not None else saved.get("evaluation")
    log = read_log(folder / LOG)
    kind, wrapped = find(config["method"])
    title = kind.title + (" + DroPLe" if wrapped and "+" in config["method"] else "")
    return {
        "title": f"{title} on {len(config['classes'])} classes",
        "version": config.get("drople", "unknown"),
        "method": title,
        "citation": kind.citation,
        "facts": facts(config, saved, learned, len(log)),
        "config": config,
        "command": fit_command(config),
        "evaluation": evaluation,
        "interval": None if evaluation is None else wilson(evaluation["accuracy"], evaluation["images"]),
        "validation": saved.get("validation"),
        "chosen": "the temperature alone"
        if kind.select is Method.select
        else "what was searched, and the temperature",
        "temperature": float(saved.get("temperature", 1.0)),
        "bars": [] if evaluation is None else class_bars(evaluation, looked),
        "confusion": None if evaluation is None else confusion_part(evaluation),
        "reliability": None if looked is None else reliability_part(looked),
        "looked": looked,
        "losses": [curve(log, name) for name in loss_terms(log)],
        "course": [curve(log, name) for name in ("accuracy", "lr") if has(log, name)],
        "dropout": dropout_part(config, log, wrapped),
        "steps": len(log),
    }


def read_log(path: Path) -> list[dict[str, float]]:
    """The steps of training; a method that learns nothing has none."""
    try:
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DropleError(f"{path} cannot be read ({error}): copy the run again, or train anew.") from None
    # A learner saved by hand writes rows without their number.
    return [{"step": step, **row} for step, row in enumerate(rows)]


def facts(config: Mapping[str, Any], saved: Mapping[str, Any], learned: str, steps: int) -> dict[str, str]:
    """What was trained on what."""
    training = config["training"]
    shots, unread = config.get("shots"), int(saved.get("unread_images", 0))
    templates = config["templates"]
    return {
        "Backbone": f"{public_name(config['backbone'])} (frozen)",
        "Learned": learned,
        "Training images": f"{len(config['samples']) - unread} ({'all' if shots is None else shots} a class"
        + (f"; {unread} could not be read)" if unread else ")"),
        "Classes": str(len(config["classes"])),
        "Template": templates[0] if len(templates) == 1 else f"{len(templates)} sentences, averaged",
        "Training": f"{training['epochs']} epochs, {steps} steps of {training['batch_size']} images",
        "Optimiser": f"{training['optimizer']}, learning rate {training['lr']:g}",
        "Preset": config.get("preset") or "none",
        "Precision": saved.get("dtype", config["precision"]),
        "Seed": str(config["seed"]),
    }


def wilson(accuracy: float, images: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson, 1927): how far the test images alone pin the accuracy down."""
    z = 1.96
    centre = (accuracy + z * z / (2 * images)) / (1 + z * z / images)
    half = z / (1 + z * z / images) * math.sqrt(accuracy * (1 - accuracy) / images + (z / (2 * images)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def class_bars(evaluation: Mapping[str, Any], looked: Looked | None) -> list[dict[str, Any]]:
    """Classes by falling accuracy; those without images last."""
    before = looked.zero_shot_classes if looked is not None else [None] * len(evaluation["per_class"])
    rows = [
        {"name": name, "zero_shot": zero_shot, **row}
        for (name, row), zero_shot in zip(evaluation["per_class"].items(), before, strict=True)
    ]
    return sorted(rows, key=lambda row: -1.0 if row["accuracy"] is None else row["accuracy"], reverse=True)


def confusion_part(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    counts, classes = np.asarray(evaluation["confusion"]), list(evaluation["per_class"])
    order = side_by_side(counts)
    off = counts.copy()
    np.fill_diagonal(off, 0)
    largest = np.argsort(off, axis=None, kind="stable")[::-1][:CONFUSIONS]
    pairs = [divmod(place, len(classes)) for place in largest.tolist() if off.flat[place] > 0]
    about = f"Confusion matrix of {len(classes)} classes; the table beside it lists the largest confusions."
    return {
        "chart": confusion_chart(counts[np.ix_(order, order)], [classes[k] for k in order], about),
        "top": [
            {
                "truth": classes[r],
                "predicted": classes[c],
                "count": int(counts[r, c]),
                "of": int(counts[r].sum()),
            }
            for r, c in pairs
        ],
    }


def reliability_part(looked: Looked) -> list[dict[str, Any]]:
    """The diagram before and after temperature scaling, and how sure the answers are."""
    found, old, new = looked.evaluation, looked.uncalibrated, looked.calibrated
    spread = confidence_chart(old["edges"], old["counts"], new["counts"], "How many answers are how sure.")
    caption = "Bars: the share of a bin that is right. Red: too sure. Green: not sure enough."
    diagrams = [
        {
            "title": name,
            "last": f"ECE {100 * ece:.1f}%",
            "caption": caption,
            "chart": reliability_chart(
                bins["edges"],
                bins["accuracy"],
                bins["confidence"],
                bins["counts"],
                f"Reliability {name.lower()}: expected calibration error {share(ece)}.",
            ),
        }
        for name, bins, ece in (
            ("Before temperature scaling", old, found["ece_uncalibrated"]),
            ("After temperature scaling", new, found["ece"]),
        )
    ]
    bars = "Answers in each bin: bars after temperature scaling, outlines before."
    return [*diagrams, {"title": "Confidence", "caption": bars, "chart": spread}]


def has(log: Sequence[Mapping[str, float]], name: str) -> bool:
    return any(name in row for row in log)


def loss_terms(log: Sequence[Mapping[str, float]]) -> list[str]:
    """The loss, then its terms; a loss of one term is that term."""
    terms = [name for name in dict.fromkeys(name for row in log for name in row) if name not in NO_TERMS]
    return (["loss"] if has(log, "loss") and len(terms) != 1 else []) + terms


def curve(
    log: Sequence[Mapping[str, float]],
    name: str,
    colour: int = 0,
    band: tuple[float, float, str] | None = None,
) -> dict[str, Any]:
    """One value over the steps: every step faintly, the mean of each epoch boldly, as a batch alone jumps."""
    rows = [row for row in log if name in row]
    steps, values = [row["step"] + 1 for row in rows], [row[name] for row in rows]
    lines = [Line(name, *thin(steps, values), colour)]
    epochs = np.array([row.get("epoch", 0) for row in rows])
    if name not in ("lambda", "lr") and 1 < len(np.unique(epochs)) < len(rows):
        x, y = np.array(steps), np.array(values)
        means = [(x[epochs == e].mean(), y[epochs == e].mean()) for e in np.unique(epochs)]
        bold = Line(name, [m[0] for m in means], [m[1] for m in means], colour, marks=len(means) <= 30)
        lines = [Line(name, *thin(steps, values), colour, faint=True), bold]
    shares = name == "accuracy" or name.startswith("drop_rate")
    heading, caption = TERMS.get(name, (name.replace("_", " ").capitalize(), ""))
    form = share if shares else number
    about = (
        f"{heading} over {len(rows)} steps: {form(lines[-1].y[0])} at first, {form(lines[-1].y[-1])} at last."
    )
    y_range = (0.0, min(1.0, 1.1 * max(values)) or 1.0) if name == "accuracy" else None
    if band is not None:
        y_range = (max(0.0, min(band[0], *values) - 0.05), min(1.0, max(band[1], *values) + 0.05))
    chart = line_chart(lines, about=about, x_title="step", y_format=form, y_range=y_range, band=band)
    return {"title": heading, "caption": caption, "chart": chart, "last": form(lines[-1].y[-1])}


def dropout_part(
    config: Mapping[str, Any], log: Sequence[Mapping[str, float]], wrapped: bool
) -> dict[str, Any] | None:
    """How tokens dropped over training, beside the drop range they are drawn from."""
    if not wrapped or not (has(log, "drop_rate_vision") or has(log, "drop_rate_text")):
        return None
    usual = DropleOptions()
    options = {name: config["options"].get(name, getattr(usual, name)) for name in vars(usual)}
    band = (options["p_min"], options["p_max"], "drop range")
    rates = [curve(log, name, 2, band) for name in ("drop_rate_vision", "drop_rate_text") if has(log, name)]
    return {
        "charts": rates + ([curve(log, "lambda", 4)] if has(log, "lambda") else []),
        "facts": {
            "Drop range": f"{options['p_min']:g} to {options['p_max']:g}",
            "Rate": options["rate"],
            "Scores": ", ".join(options["scores"]),
            "Drawn": options["draw"],
            "Operation": options["operation"],
            "Layers": f"{options['vision_dropout_layers']} image, {options['text_dropout_layers']} text",
            "λ₀": f"{options['lambda0']:g}",
        },
    }
