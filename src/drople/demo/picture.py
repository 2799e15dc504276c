"""The demo's one picture: what DroPLe says of test drawings, the training curves, and the comparison."""

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image

from drople.records import write_bytes

# Building its font cache on a fresh machine is worth a warning to matplotlib, but not to the demo's user.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

INK, QUIET, FAINT = "#1f2933", "#6b7680", "#d9dee3"
RIGHT, WRONG = "#2a9d5c", "#d1495b"
COLOURS = {"zero-shot": "#a9b2bb", "CoOp": "#e8a33d", "DroPLe": "#2f6db5"}
MEASURES = {"base": "Base", "novel": "Novel", "harmonic_mean": "Harmonic mean"}
LEFT, RIGHT_EDGE = 0.04, 0.965
STYLE: Any = {
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titlepad": 12,
    "axes.axisbelow": True,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Sample:
    """One drawing, what it is, and what was said of it."""

    image: Path
    truth: str
    predicted: str
    probability: float


def save_report(
    path: Path,
    samples: Mapping[str, Sequence[Sample]],
    scores: Mapping[str, Mapping[str, float]],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Draw the picture and write it whole: samples of base and novel, scores and logs of each method."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 10), facecolor="white")
        figure.text(LEFT, 0.952, "What prompts learn from a few drawings", size=21, weight="bold")
        figure.text(
            LEFT,
            0.919,
            "The first test drawing of each class, with DroPLe's answer and its probability.",
            color=QUIET,
        )
        figure.text(0.88, 0.919, "■ right", color=RIGHT, ha="right")
        figure.text(RIGHT_EDGE, 0.919, "■ wrong", color=WRONG, ha="right")
        draw_samples(figure, samples["base"], "Base classes", "trained on", bottom=0.69)
        draw_samples(figure, samples["novel"], "Novel classes", "never trained on", bottom=0.435)
        grid = figure.add_gridspec(
            1, 3, left=0.065, right=RIGHT_EDGE, bottom=0.075, top=0.295, wspace=0.22, width_ratios=(1, 1, 1.5)
        )
        accuracy, loss, bars = grid.subplots(squeeze=False)[0]
        draw_curves(accuracy, histories, "accuracy", "Training accuracy")
        accuracy.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        accuracy.set_ylim(0, 1.02)
        draw_curves(loss, histories, "cross_entropy", "Training cross-entropy")
        loss.set_ylim(bottom=0)
        draw_bars(bars, scores)
        figure.legend(
            *bars.get_legend_handles_labels(),
            loc="center right",
            bbox_to_anchor=(RIGHT_EDGE, 0.365),
            ncols=len(scores),
            handlelength=1,
            borderpad=0,
            borderaxespad=0,
        )
        figure.text(LEFT, 0.36, "Training, and what came of it", size=13, weight="bold")
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120)
    write_bytes(path, content.getvalue())


def draw_samples(figure: Figure, samples: Sequence[Sample], name: str, what: str, bottom: float) -> None:
    """A row of drawings in frames of right and wrong."""
    top = bottom + 0.165
    heading = figure.text(LEFT, top + 0.018, name, size=13, weight="bold")
    heading_end = heading.get_window_extent().x1 / figure.bbox.width
    right = sum(sample.predicted == sample.truth for sample in samples)
    figure.text(
        heading_end + 0.01, top + 0.018, f"{what} · {right} of these {len(samples)} right", color=QUIET
    )
    grid = figure.add_gridspec(
        1, len(samples), left=LEFT, right=RIGHT_EDGE, bottom=bottom, top=top, wspace=0.12
    )
    for axes, sample in zip(grid.subplots(squeeze=False)[0], samples, strict=True):
        with Image.open(sample.image) as image:
            axes.imshow(np.asarray(image.convert("RGB")))
        correct = sample.predicted == sample.truth
        colour = RIGHT if correct else WRONG
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set(visible=True, color=colour, linewidth=3)
        below: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center", "va": "top"}
        answer = f"{sample.predicted} {sample.probability:.0%}"
        axes.annotate(answer, (0.5, 0), (0, -7), color=colour, weight="bold", **below)
        if not correct:
            axes.annotate(f"truth: {sample.truth}", (0.5, 0), (0, -23), color=QUIET, size=9.5, **below)


def draw_curves(
    axes: Axes, histories: Mapping[str, Sequence[Mapping[str, Any]]], value: str, title: str
) -> None:
    """Every step faintly, the mean of each epoch boldly: a step is one small batch and jumps."""
    for name, rows in histories.items():
        steps = np.array([row["step"] for row in rows]) + 1
        values = np.array([row[value] for row in rows])
        epochs = np.array([row["epoch"] for row in rows])
        means = [(steps[epochs == e].mean(), values[epochs == e].mean()) for e in np.unique(epochs)]
        axes.plot(steps, values, color=COLOURS[name], alpha=0.25, linewidth=1)
        axes.plot(
            *zip(*means, strict=True),
            color=COLOURS[name],
            linewidth=2.2,
            marker="o",
            markersize=4,
            label=name,
        )
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.02)


def draw_bars(axes: Axes, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Base, novel and harmonic mean of the methods side by side."""
    width = 0.8 / len(scores)
    for index, (name, row) in enumerate(scores.items()):
        places = np.arange(len(MEASURES)) + (index - (len(scores) - 1) / 2) * width
        bars = axes.bar(places, [row[m] for m in MEASURES], 0.92 * width, color=COLOURS[name], label=name)
        axes.bar_label(bars, [f"{100 * row[m]:.1f}" for m in MEASURES], padding=3, size=10, color=INK)
    axes.set_title("Test accuracy, %")
    axes.set_xticks(np.arange(len(MEASURES)), list(MEASURES.values()), size=11.5, color=INK)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(0, 1.12 * max(row[m] for row in scores.values() for m in MEASURES) or 1)
