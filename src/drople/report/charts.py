"""Charts as inline SVG. Colours are the page's CSS variables, so a chart follows light, dark and print.

Every chart is drawn about 360 units wide: on a phone one unit is one pixel, so its letters stay readable.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 34
# The page's stylesheet has so many colours; beyond them a dash tells lines apart, and another mark points.
COLOURS = 8
DASHES = ("", "5 3", "1.5 3")
# More steps than this are averaged in runs: a line of 360 pixels shows no more.
POINTS = 180
LEVELS = 6

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A named line. `faint` is drawn below, thin and unnamed; `spread` are half-widths of a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    faint: bool = False
    marks: bool = False
    spread: Sequence[float | None] = ()


@dataclass(frozen=True)
class Dot:
    """A named point of a scatter plot."""

    name: str
    x: float
    y: float
    colour: int


def number(value: float) -> str:
    """Short, as an axis needs it: 1.5k, 20, 0.05, 2e-05."""
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def share(value: float) -> str:
    return f"{100 * value:.3g}%"


def whole(value: float) -> str:
    return f"{value:.3g}%"


def line_chart(
    lines: Sequence[Line],
    *,
    about: str,
    x_title: str,
    y_format: Format = number,
    y_range: tuple[float, float] | None = None,
    band: tuple[float, float, str] | None = None,
    log_x: bool = False,
) -> Markup:
    """Lines over one axis. `band` shades a range of y and names it; `log_x` puts a tick at every x."""
    if y_range is None:
        values = [v for line in lines for v in line.y]
        values += [v + d * (s or 0) for line in lines if line.spread
                   for v, s in zip(line.y, line.spread, strict=True) for d in (-1, 1)]
        y_range = _padded(values)
    xs = sorted({x for line in lines for x in line.x})
    forward: Callable[[float], float] = math.log2 if log_x else float
    frame = _Frame((forward(xs[0]), forward(xs[-1])), y_range, forward)
    x_ticks = xs if log_x else ticks(xs[0], xs[-1], 5)
    parts = [_axes(frame, x_ticks, ticks(*y_range, 4), number, y_format, x_title)]
    if band is not None:
        low, high, name = band
        parts.append(
            Markup('<rect class="band" x="{}" y="{}" width="{}" height="{}"/>').format(
                LEFT, _n(frame.y(high)), WIDTH - LEFT - RIGHT, _n(frame.y(low) - frame.y(high)))
        )
        parts.append(Markup('<text class="note" x="{}" y="{}">{}</text>').format(
            LEFT + 5, _n(frame.y(high) + 13), name))
    for line in lines:
        parts.append(_line(frame, line))
    return _svg(parts, about)


def reliability_chart(edges: Sequence[float], accuracy: Sequence[float | None], confidence: Sequence[float | None],
                      counts: Sequence[int], about: str) -> Markup:
    """Accuracy of each bin of confidence as a bar, its gap to the diagonal hatched in the colour of wrong."""
    frame = _Frame((0, 1), (0, 1))
    parts = [_axes(frame, [0, 0.25, 0.5, 0.75, 1], [0, 0.25, 0.5, 0.75, 1], share, share, "confidence")]
    for low, high, right, sure, count in zip(edges, edges[1:], accuracy, confidence, counts, strict=False):
        if right is None or sure is None:
            continue
        x, width = frame.x(low) + 0.75, frame.x(high) - frame.x(low) - 1.5
        top, bottom = max(right, sure), min(right, sure)
        parts.append(Markup(
            '<g><title>{} images, {} sure on average, {} right</title>'
            '<rect class="bar" x="{}" y="{}" width="{}" height="{}"/>'
            '<rect class="gap" x="{}" y="{}" width="{}" height="{}"/></g>'
        ).format(count, share(sure), share(right), _n(x), _n(frame.y(right)), _n(width),
                 _n(frame.y(0) - frame.y(right)), _n(x), _n(frame.y(top)), _n(width),
                 _n(frame.y(bottom) - frame.y(top))))
    parts.append(Markup('<path class="diagonal" d="M{} {}L{} {}"/>').format(
        _n(frame.x(0)), _n(frame.y(0)), _n(frame.x(1)), _n(frame.y(1))))
    return _svg(parts, about)


def halves_chart(dots: Sequence[Dot], about: str) -> Markup:
    """Novel over base accuracy in percent, with contours of equal harmonic mean."""
    x_range, y_range = _padded([d.x for d in dots], 4), _padded([d.y for d in dots], 4)
    x_range, y_range = (max(0, x_range[0]), min(100, x_range[1])), (max(0, y_range[0]), min(100, y_range[1]))
    frame = _Frame(x_range, y_range)
    parts = [_axes(frame, ticks(*x_range, 5), ticks(*y_range, 4), whole, whole, "base accuracy")]
    corners = [_harmonic(x, y) for x in x_range for y in y_range]
    bases = np.linspace(*x_range, 60)
    for level in ticks(min(corners), max(corners), 6):
        if level <= 0:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            novels = level * bases / (2 * bases - level)
        inside = (2 * bases > level) & (novels >= y_range[0]) & (novels <= y_range[1])
        if inside.sum() < 2:
            continue
        path = _path(frame, bases[inside], novels[inside])
        parts.append(Markup('<path class="contour" d="{}"/>').format(path))
        x, y = frame.x(bases[inside][-1]), frame.y(novels[inside][-1])
        anchor = "end" if x > WIDTH - 60 else "start"
        parts.append(Markup('<text class="note" x="{}" y="{}" text-anchor="{}">H {:g}</text>').format(
            _n(x - 3 if anchor == "end" else x + 3), _n(min(y - 3, HEIGHT - BOTTOM - 4)), anchor, level))
    parts += _dots(frame, dots)
    parts.append(Markup('<text class="tick" x="{}" y="{}">novel</text>').format(LEFT + 4, TOP + 8))
    return _svg(parts, about)


def cost_chart(dots: Sequence[Dot], *, about: str, x_title: str) -> Markup:
    """Accuracy in percent over a cost on a logarithmic axis; what costs nothing stands at the left edge."""
    costs = [d.x for d in dots if d.x > 0] or [1.0]
    low, high = math.floor(math.log10(min(costs))), math.ceil(math.log10(max(costs)) + 1e-9)
    free = any(d.x <= 0 for d in dots)
    start = low - 1 if free else low
    high = max(high, low + 1)

    def forward(x: float) -> float:
        return math.log10(x) if x > 0 else start + 0.25

    y_range = _padded([d.y for d in dots], 4)
    frame = _Frame((start, high), (max(0, y_range[0]), min(100, y_range[1])), forward)
    step = max(1, (high - low) // 5)
    x_ticks = [*([0.0] if free else []), *(10.0**power for power in range(low, high + 1, step))]
    parts = [_axes(frame, x_ticks, ticks(*frame.y_range, 4), number, whole, x_title), *_dots(frame, dots)]
    return _svg(parts, about)


def confusion_chart(counts: np.ndarray, classes: Sequence[str], about: str, titled: int = 300) -> Markup:
    """Rows are true classes, columns predicted ones; the shade is the share of the row's images.

    Cells of one shade are one path, so that a thousand classes stay small; the largest confusions have hover
    titles. Up to 150 classes every row and column has its name.
    """
    many = len(classes)
    cell = 18 if many <= 40 else 10 if many <= 150 else max(1, 1000 // many)
    named = many <= 150
    letters = min(11, cell)
    margin = 6 + round(0.56 * letters * min(24, max(map(len, classes)))) if named else 6
    size = many * cell
    totals = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    shade = np.where(counts > 0, np.clip(np.ceil(np.sqrt(shares) * LEVELS), 1, LEVELS), 0).astype(int)
    parts = [Markup('<rect class="field" x="{0}" y="{0}" width="{1}" height="{1}"/>').format(margin, size)]
    diagonal = np.eye(many, dtype=bool)
    for kind, mask in (("hit", diagonal), ("miss", ~diagonal)):
        for level in range(1, LEVELS + 1):
            rows, columns = np.nonzero((shade == level) & mask)
            moves = "".join(
                f"M{margin + c * cell} {margin + r * cell}h{cell}v{cell}h-{cell}z"
                for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
            )
            if moves:
                parts.append(Markup('<path class="{} l{}" d="{}"/>').format(kind, level, moves))
    if named:
        for k, name in enumerate(classes):
            middle = margin + (k + 0.5) * cell
            short = name if len(name) <= 24 else name[:23] + "…"
            parts.append(Markup('<text style="font-size:{3}px" x="{0}" y="{1}" text-anchor="end">{2}</text>').format(
                margin - 4, _n(middle + 0.35 * letters), short, letters))
            parts.append(Markup(
                '<text style="font-size:{3}px" transform="translate({0} {1})rotate(-90)">{2}</text>'
            ).format(_n(middle + 0.35 * letters), margin - 4, short, letters))
    off = np.where(diagonal, 0, counts)
    largest = np.argsort(off, axis=None, kind="stable")[::-1][:titled]
    for place in largest[off.ravel()[largest] > 0].tolist():
        r, c = divmod(place, many)
        parts.append(Markup(
            '<rect class="hover" x="{}" y="{}" width="{cell}" height="{cell}"><title>{} taken for {}: {} of {}</title></rect>'
        ).format(margin + c * cell, margin + r * cell, classes[r], classes[c], int(counts[r, c]), int(totals[r, 0]),
                 cell=cell))
    for k in range(many):
        parts.append(Markup(
            '<rect class="hover" x="{0}" y="{0}" width="{1}" height="{1}"><title>{2}: {3} of {4} right</title></rect>'
        ).format(margin + k * cell, cell, classes[k], int(counts[k, k]), int(totals[k, 0])))
    full = margin + size + 2
    return Markup(
        '<svg class="confusion" role="img" aria-label="{}" viewBox="0 0 {} {}" style="--natural:{}px">{}</svg>'
    ).format(about, full, full, full, Markup("").join(parts))


def side_by_side(counts: np.ndarray) -> np.ndarray:
    """An order of the classes in which those taken for each other stand together (the Fiedler vector)."""
    tied = (counts + counts.T).astype(float)
    np.fill_diagonal(tied, 0)
    # A trace of everything with everything, or classes never confused would be parts without an order.
    tied += 1e-3 * max(tied.max(), 1) / len(tied)
    laplacian = np.diag(tied.sum(1)) - tied
    return np.argsort(np.linalg.eigh(laplacian)[1][:, min(1, len(tied) - 1)], kind="stable")


def swatch(colour: int, dot: bool = False) -> Markup:
    """The key of a line, or of a point, in a legend."""
    if dot:
        return Markup('<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{}</svg>').format(_mark(13, 5, colour))
    return Markup(
        '<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">'
        '<path class="line s{}" stroke-dasharray="{}" d="M1 5H25"/></svg>'
    ).format(colour % COLOURS, DASHES[colour // COLOURS % len(DASHES)])


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most POINTS points: means of equal runs of steps."""
    if len(x) <= POINTS:
        return list(x), list(y)
    runs = np.array_split(np.arange(len(x)), POINTS)
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    return [float(xs[r].mean()) for r in runs], [float(ys[r].mean()) for r in runs]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within [low, high], near `about` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough), 10 * power)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + k) * step, 12) for k in range(count)]


class _Frame:
    """From values to places inside the axes."""

    def __init__(
        self, x_range: tuple[float, float], y_range: tuple[float, float], forward: Callable[[float], float] = float
    ) -> None:
        self.x_range, self.y_range, self.forward = x_range, y_range, forward

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (self.forward(value) - low) / (high - low or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low or 1) * (HEIGHT - TOP - BOTTOM)


def _padded(values: Sequence[float], at_least: float = 0.0) -> tuple[float, float]:
    """The range of the values with a little air; a constant gets a range too."""
    low, high = min(values), max(values)
    air = max(0.06 * (high - low), at_least) or 0.1 * abs(high) or 1.0
    # What never falls below zero is shown from zero or above, not from a number it cannot reach.
    return (max(low - air, 0.0) if low >= 0 else low - air), high + air


def _harmonic(base: float, novel: float) -> float:
    return 2 * base * novel / (base + novel) if base + novel else 0.0


def _axes(
    frame: _Frame, xs: Iterable[float], ys: Iterable[float], x_format: Format, y_format: Format, x_title: str
) -> Markup:
    parts = []
    for y in ys:
        parts.append(Markup('<path class="grid" d="M{} {}H{}"/><text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT, _n(frame.y(y)), WIDTH - RIGHT, LEFT - 6, _n(frame.y(y) + 4), y_format(y)))
    for x in xs:
        parts.append(Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            _n(min(frame.x(x), WIDTH - 14)), HEIGHT - BOTTOM + 15, x_format(x)))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(Markup('<text class="tick title" x="{}" y="{}" text-anchor="middle">{}</text>').format(
        _n(middle), HEIGHT - 4, x_title))
    return Markup("").join(parts)


def _line(frame: _Frame, line: Line) -> Markup:
    colour, dash = line.colour % COLOURS, DASHES[line.colour // COLOURS % len(DASHES)]
    if line.faint:
        return Markup('<path class="line faint s{}" d="{}"/>').format(colour, _path(frame, line.x, line.y))
    parts = []
    if any(line.spread):
        wide = [s or 0.0 for s in line.spread]
        over = [v + s for v, s in zip(line.y, wide, strict=True)]
        under = [v - s for v, s in zip(line.y, wide, strict=True)]
        outline = _path(frame, [*line.x, *list(line.x)[::-1]], [*over, *under[::-1]])
        parts.append(Markup('<path class="area s{}" d="{}z"/>').format(colour, outline))
    parts.append(Markup('<path class="line s{}" stroke-dasharray="{}" d="{}"><title>{}</title></path>').format(
        colour, dash, _path(frame, line.x, line.y), line.name))
    if line.marks or len(line.x) == 1:
        for x, y in zip(line.x, line.y, strict=True):
            parts.append(_mark(frame.x(x), frame.y(y), line.colour, 3))
    return Markup("").join(parts)


def _dots(frame: _Frame, dots: Sequence[Dot]) -> list[Markup]:
    return [
        Markup("<g>{}<title>{}</title></g>").format(_mark(frame.x(d.x), frame.y(d.y), d.colour), d.name) for d in dots
    ]


def _mark(x: float, y: float, colour: int, radius: float = 5) -> Markup:
    """A circle, then a square, then a diamond, as the colours run out."""
    kind = colour // COLOURS % 3
    if kind == 0:
        return Markup('<circle class="dot s{}" cx="{}" cy="{}" r="{}"/>').format(colour % COLOURS, _n(x), _n(y), radius)
    side = 1.7 * radius
    turned = f"rotate(45 {_n(x)} {_n(y)})" if kind == 2 else ""
    return Markup('<rect class="dot s{}" x="{}" y="{}" width="{}" height="{}" transform="{}"/>').format(
        colour % COLOURS, _n(x - side / 2), _n(y - side / 2), _n(side), _n(side), turned)


def _path(frame: _Frame, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    return "M" + "L".join(f"{_n(frame.x(a))} {_n(frame.y(b))}" for a, b in zip(x, y, strict=True))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _svg(parts: Iterable[Markup], about: str) -> Markup:
    return Markup('<svg class="chart" role="img" viewBox="0 0 {} {}" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, escape(about), Markup("").join(parts))
