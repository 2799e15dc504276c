"""The pictures of `drople explain`: heat over photos, small multiples of maps, coloured words.

Drawing only. What is shown is computed in explain.py; every picture is laid out in inches from its top
left corner and written whole.
"""

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

from drople.demo.picture import FAINT, INK, QUIET, STYLE
from drople.records import write_bytes

Format = Literal["png", "svg", "pdf"]
FORMATS: tuple[Format, ...] = get_args(Format)

WIDTH, MARGIN = 14.0, 0.55
DPI = 120
# A row of a comparison holds at most so many images.
COLUMNS = 6
ACCENT = "#2f6db5"
FONTS = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans", "Noto Sans Arabic"]
LOOK: Any = STYLE | {"text.parse_math": False, "font.family": FONTS, "svg.hashsalt": "drople"}
SHORT = {"class": "Class", "self": "Self", "cross": "Cross-modal"}


def fading(name: str, low: float = 0.0, high: float = 1.0, strongest: float = 0.85) -> Colormap:
    """A part of a colour map, clear at 0 and nearly opaque at 1: the photo shows where little is."""
    colours = matplotlib.colormaps[name](np.linspace(low, high, 256))
    colours[:, 3] = strongest * np.linspace(0, 1, 256) ** 0.8
    return ListedColormap(colours, name=f"fading {name}")


# Both run evenly from light to dark, so that they read the same to every kind of eye and in print. What is
# kept is warm ("redder colors indicate higher feature attention"), what drops is blue.
HEAT = fading("YlOrRd", 0.15, 1.0)
DROP = fading("Blues", 0.1, 1.0)


@dataclass(frozen=True)
class Word:
    """A token of a sentence as it is shown: how important over all dropout layers, and at each."""

    text: str
    importance: tuple[float, ...]  # a layer; empty for the token that has none (eos)
    joined: bool = False  # continues the word before it
    special: bool = False  # a prompt or an end of the sentence: no word

    @property
    def mean(self) -> float | None:
        return sum(self.importance) / len(self.importance) if self.importance else None


@dataclass(frozen=True)
class Explanation:
    """All that the picture of one image shows."""

    photo: Image.Image
    name: str  # of the image
    run: str
    class_name: str
    probability: float
    answers: tuple[tuple[str, float], ...]  # most likely first
    heat: np.ndarray  # Grad-CAM [g, g]
    maps: Mapping[str, np.ndarray]  # [layers, g, g] each: scores, importance, probability
    words: tuple[Word, ...]
    drop_range: tuple[float, float]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """One image of a comparison: the class explained, and of each model its heat and its answer."""

    photo: Image.Image
    class_name: str
    heats: tuple[np.ndarray, ...]
    answers: tuple[tuple[str, float], ...]


def overlay(
    image: Image.Image, heat: np.ndarray, *, colours: Colormap = HEAT, smooth: bool = True
) -> Image.Image:
    """The image in pale grey, so that every colour is of the values in 0..1 [g, g] that lie over it.

    Patches are drawn as they are, or with `smooth` run into each other.
    """
    method = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    small = Image.fromarray(np.asarray(heat, dtype=np.float32))
    spread = np.asarray(small.resize(image.size, method)).clip(0, 1)
    rgba = np.asarray(colours(spread))
    below = 0.3 + 0.7 * np.asarray(image.convert("L"), dtype=np.float64)[..., None] / 255
    mixed = below + rgba[..., 3:] * (rgba[..., :3] - below)
    return Image.fromarray(np.rint(255 * mixed).astype(np.uint8))


class Sheet:
    """A page on which things are placed in inches from the top left corner."""

    def __init__(self, width: float, height: float, path: Path) -> None:
        self.width, self.height, self.path = width, height, path
        self.format = path.suffix[1:].lower()
        self.figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def text(self, left: float, top: float, text: str, **style: Any) -> float:
        """Write a line, its baseline at `top`; returns where it ends."""
        drawn = self.figure.text(left / self.width, 1 - top / self.height, shown(text), **style)
        return float(drawn.get_window_extent().x1 / self.figure.dpi)

    def picture(self, left: float, top: float, side: float, image: Image.Image, edge: str = FAINT) -> Axes:
        axes = self.axes(left, top, side, side)
        # A vector file keeps the pixels as they are; on a raster they are fitted to its own.
        axes.imshow(image, interpolation="auto" if self.format == "png" else "none", aspect="auto")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(visible=True, color=edge, linewidth=1)
        return axes

    def scale(self, left: float, top: float, height: float, colours: Colormap, low: str, high: str) -> None:
        """An upright colour scale with words or numbers at its ends."""
        width = 0.11
        axes = self.axes(left, top, width, height)
        axes.imshow(over_white(colours, np.linspace(1, 0, 128))[:, None], aspect="auto")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(visible=True, color=FAINT, linewidth=0.8)
        self.text(left + width + 0.07, top, high, size=8.5, color=QUIET, va="top")
        self.text(left + width + 0.07, top + height, low, size=8.5, color=QUIET, va="bottom")

    def heading(self, top: float, title: str, what: str) -> None:
        end = self.text(MARGIN, top, title, size=13, weight="bold")
        self.text(end + 0.18, top, what, color=QUIET)

    def save(self) -> None:
        content = io.BytesIO()
        # Without a date the same explanation is the same bytes.
        dated: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(self.format)
        self.figure.savefig(content, format=self.format, dpi=DPI, metadata=dated)
        write_bytes(self.path, content.getvalue())


def over_white(colours: Colormap, values: np.ndarray) -> np.ndarray:
    """The colours of values as paper shows them, RGB."""
    rgba = np.asarray(colours(values))
    return 1 + rgba[..., 3:] * (rgba[..., :3] - 1)


def shown(text: str, limit: int = 0) -> str:
    """A name as it can be drawn: one line, no longer than `limit`, and no half of a character."""
    whole = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return whole if not limit or len(whole) <= limit else whole[: limit - 1].rstrip() + "…"


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def number(value: float) -> str:
    return f"{value:.2g}"


def save_explanation(path: Path, content: Explanation) -> None:
    """Draw all that is known of one image and write it."""
    with warnings.catch_warnings(), matplotlib.rc_context(LOOK):
        # A script none of the fonts has is drawn as boxes; a warning a letter would help no one.
        warnings.filterwarnings("ignore", message="Glyph")
        maps = content.maps if "importance" in content.maps else {}
        rows = len(maps)
        layers = len(maps["importance"]) if maps else 1
        cell = min(1.5, (WIDTH - 2 * MARGIN - 2.05 - 0.75) / layers - 0.1)
        top_maps = 5.05
        top_words = top_maps + (0.75 + rows * (cell + 0.1) + 0.2 if rows else 0)
        lines = flow(content.words)
        top_notes = top_words + (0.5 + len(lines) * 0.62 if content.words else 0)
        height = top_notes + 0.25 * len(content.notes) + 0.25
        sheet = Sheet(WIDTH, height, path)
        draw_top(sheet, content)
        if maps:
            draw_maps(sheet, content, top_maps, cell)
        if content.words:
            draw_words(sheet, lines, content, top_words)
        for index, note in enumerate(content.notes):
            sheet.text(MARGIN, top_notes + 0.25 * index, note, size=9.5, color=QUIET)
        sheet.save()


def draw_top(sheet: Sheet, content: Explanation) -> None:
    """The photo, Grad-CAM over it, and what the run answers."""
    title = f"{shown(content.class_name, 48)}  {percent(content.probability)}"
    sheet.text(MARGIN, 0.72, title, size=21, weight="bold")
    sheet.text(MARGIN, 1.06, f"{shown(content.name, 70)} · {shown(content.run, 70)}", color=QUIET)
    top, side, gap = 1.72, 2.75, 0.3
    second = MARGIN + side + gap
    sheet.text(MARGIN, top - 0.13, "What the model sees", size=11.5)
    sheet.picture(MARGIN, top, side, content.photo)
    sheet.text(second, top - 0.13, f"Grad-CAM of {shown(content.class_name, 22)}", size=11.5)
    sheet.picture(second, top, side, overlay(content.photo, content.heat))
    sheet.scale(second + side + 0.12, top, side, HEAT, "no part in it", "speaks for it")
    names = [shown(name, 30) for name, _ in content.answers]
    left = second + side + 1.35 + max(text_width(name, 10.5) for name in names)
    sheet.text(left, top - 0.13, "Answers", size=11.5)
    axes = sheet.axes(left, top, WIDTH - MARGIN - left - 0.6, min(side, 0.55 * len(names)))
    shares = [share for _, share in content.answers]
    colours = [ACCENT if name == content.class_name else "#a9b2bb" for name, _ in content.answers]
    places = np.arange(len(names))
    bars = axes.barh(places, shares, 0.62, color=colours)
    axes.bar_label(bars, [percent(share) for share in shares], padding=5, size=10, color=INK)
    axes.set_yticks(places, names, size=10.5, color=INK)
    axes.set_xticks([])
    axes.set_xlim(0, max(*shares, 1e-6))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines["bottom"].set_visible(False)


def draw_maps(sheet: Sheet, content: Explanation, top: float, cell: float) -> None:
    """A row a score, a column a dropout layer; one scale a row, so that layers can be compared."""
    sheet.heading(top, "What the dropout layers make of the patches", "important tokens drop less often")
    first, step = MARGIN + 2.05, cell + 0.1
    titles = {name: (f"{SHORT[name]} score", SCORES[name]) for name in SHORT if name in content.maps}
    titles["importance"] = ("Importance", "their mean, from 0 to 1" if titles else "that it drops by")
    titles["probability"] = ("Drop probability", "while training")
    photo = content.photo.resize((192, 192), Image.Resampling.LANCZOS)
    top += 0.5
    for layer in range(len(content.maps["importance"])):
        middle = first + layer * step + cell / 2
        sheet.text(middle, top - 0.1, f"layer {layer + 1}", size=9.5, color=QUIET, ha="center")
    for row, (name, (title, what)) in enumerate(titles.items()):
        values, at = content.maps[name], top + row * step
        weight = "bold" if name == "importance" else "normal"
        sheet.text(MARGIN, at + cell / 2 - 0.03, title, size=11, weight=weight)
        sheet.text(MARGIN, at + cell / 2 + 0.17, what, size=9, color=QUIET)
        # Cross-modal scores differ little, so a score's scale begins at its least value.
        ends = {"probability": content.drop_range, "importance": (0.0, 1.0)}
        low, high = ends.get(name, (float(values.min()), float(values.max())))
        colours = DROP if name == "probability" else HEAT
        for layer, value in enumerate((values - low) / (high - low or 1)):
            drawn = overlay(photo, value, colours=colours, smooth=False)
            sheet.picture(first + layer * step, at, cell, drawn)
        as_text = percent if name == "probability" else number
        sheet.scale(first + len(values) * step + 0.02, at, cell, colours, as_text(low), as_text(high))


SCORES = {
    "class": "attention from cls",
    "self": "attention to other tokens",
    "cross": "attention from bridge tokens",
}


def text_width(text: str, size: float) -> float:
    """In inches."""
    ruler = Figure(dpi=DPI)
    return float(ruler.text(0, 0, shown(text), size=size).get_window_extent().width) / DPI


def flow(words: Sequence[Word]) -> list[list[tuple[Word, float, float]]]:
    """Words in lines as wide as the page: (word, left, width) each."""
    lines: list[list[tuple[Word, float, float]]] = [[]]
    end = MARGIN
    for word in words:
        width = text_width(word.text, word_size(word)) + 0.16
        left = end + (0.02 if word.joined else 0.1) if lines[-1] else MARGIN
        if lines[-1] and left + width > WIDTH - MARGIN - 0.75:
            lines.append([])
            left = MARGIN
        lines[-1].append((word, left, width))
        end = left + width
    return lines


def word_size(word: Word) -> float:
    return 9.5 if word.special else 13


def draw_words(
    sheet: Sheet, lines: Sequence[Sequence[tuple[Word, float, float]]], content: Explanation, top: float
) -> None:
    """Each token on the colour of its importance, a strip of its layers below it."""
    what = (
        "mean importance; below it, each dropout layer in turn · P: context prompts, S: supplementary tokens"
    )
    sheet.heading(top, "What they make of the words", what)
    top += 0.25
    page = sheet.axes(0, 0, WIDTH, sheet.height)
    page.set(xlim=(0, WIDTH), ylim=(sheet.height, 0))
    page.axis("off")
    for index, line in enumerate(lines):
        at = top + 0.62 * index
        for word, left, width in line:
            mean = word.mean
            colour = np.ones(3) if mean is None else over_white(HEAT, np.array(mean))
            ink = "white" if colour @ (0.299, 0.587, 0.114) < 0.5 else INK
            page.add_patch(
                FancyBboxPatch(
                    (left, at),
                    width,
                    0.32,
                    boxstyle="round,pad=0,rounding_size=0.05",
                    facecolor=tuple(colour),
                    edgecolor=FAINT,
                    linewidth=0.8,
                )
            )
            middle = left + width / 2
            place: Any = {"ha": "center", "va": "center_baseline"}
            page.text(middle, at + 0.165, shown(word.text), size=word_size(word), color=ink, **place)
            part = width / max(1, len(word.importance))
            for layer, value in enumerate(word.importance):
                shade = tuple(over_white(HEAT, np.array(value)))
                corner = left + layer * part, at + 0.36
                page.add_patch(Rectangle(corner, part, 0.07, facecolor=shade, linewidth=0))
    sheet.scale(WIDTH - MARGIN - 0.42, top, 0.62 * len(lines) - 0.19, HEAT, "0", "1")


def save_comparison(path: Path, models: Sequence[str], columns: Sequence[Column]) -> None:
    """The paper's figure: a row a model, a column an image, Grad-CAM of one class down each column."""
    with warnings.catch_warnings(), matplotlib.rc_context(LOOK):
        warnings.filterwarnings("ignore", message="Glyph")
        side, gap, labels, below = 1.72, 0.16, 2.0, 0.42
        width = max(9.0, MARGIN + labels + len(columns) * (side + gap) + 1.3)
        top = 1.75
        height = top + side + 0.3 + len(models) * (side + below) + 0.1
        sheet = Sheet(width, height, path)
        sheet.text(MARGIN, 0.72, "Where each model looks", size=21, weight="bold")
        what = "Grad-CAM of the class above each image; below each picture, what that model would answer."
        sheet.text(MARGIN, 1.06, what, color=QUIET)
        sheet.text(MARGIN, top + side / 2, "Image", size=12)
        for n, column in enumerate(columns):
            left = MARGIN + labels + n * (side + gap)
            sheet.text(left, top - 0.13, shown(column.class_name, 20), size=11, weight="bold")
            sheet.picture(left, top, side, column.photo)
            for m, (heat, (answer, share)) in enumerate(zip(column.heats, column.answers, strict=True)):
                at = top + side + 0.3 + m * (side + below)
                sheet.picture(left, at, side, overlay(column.photo, heat))
                agrees = answer == column.class_name
                said = f"{shown(answer, 17)} {percent(share)}"
                sheet.text(left, at + side + 0.2, said, size=9.5, color=INK if agrees else QUIET)
        for m, model in enumerate(models):
            at = top + side + 0.3 + m * (side + below)
            for line, part in enumerate(model.split("\n")):
                bold = "bold" if m == len(models) - 1 and not line else "normal"
                size, colour = (9.5, QUIET) if line else (12.0, INK)
                place = at + side / 2 + 0.22 * line
                sheet.text(MARGIN, place, shown(part, 24), size=size, color=colour, weight=bold)
        start = MARGIN + labels + len(columns) * (side + gap)
        sheet.scale(start, top + side + 0.3, side, HEAT, "no part in it", "speaks for it")
        sheet.save()
