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
# Shades of a confusion matrix; above STRONG a number on one is written in the colour of the page.
LEVELS, STRONG = 6, 3
QUARTERS = (0, 0.25, 0.5, 0.75, 1)

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A named line. `faint` is thin and has no marks; `spread` are half-widths of a band around it."""

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


# Numbers -------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Short, as an axis needs it: 1.5k, 20, 0.05, 2e-05."""
    if value < 0:
        return f"−{number(-value)}"
    if value and value < 1e-3:
        return f"{value:.0e}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def share(value: float) -> str:
    return f"{100 * value:.3g}%"


def whole(value: float) -> str:
    return f"{value:.3g}%"


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


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most POINTS points: means of equal runs of steps."""
    if len(x) <= POINTS:
        return list(x), list(y)
    runs = np.array_split(np.arange(len(x)), POINTS)
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    return [float(xs[r].mean()) for r in runs], [float(ys[r].mean()) for r in runs]


def side_by_side(counts: np.ndarray) -> np.ndarray:
    """An order of the classes in which those taken for each other stand together (the Fiedler vector)."""
    tied = (counts + counts.T).astype(float)
    np.fill_diagonal(tied, 0)
    # A trace of everything with everything, or classes never confused would be parts without an order.
    tied += 1e-3 * max(tied.max(), 1) / len(tied)
    laplacian = np.diag(tied.sum(1)) - tied
    return np.argsort(np.linalg.eigh(laplacian)[1][:, min(1, len(tied) - 1)], kind="stable")


def padded(values: Sequence[float], at_least: float = 0.0) -> tuple[float, float]:
    """The range of the values with a little air; a constant gets a range too."""
    low, high = min(values), max(values)
    air = max(0.06 * (high - low), at_least) or 0.1 * abs(high) or 1.0
    # What is never negative is not shown below zero.
    return (max(low - air, 0.0) if low >= 0 else low - air), high + air


# Charts --------------------------------------------------------------------------------------------


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
        y_range = padded([v for line in lines for edge in _edges(line) for v in edge])
    xs = sorted({x for line in lines for x in line.x})
    forward: Callable[[float], float] = math.log2 if log_x else float
    frame = _Frame((forward(xs[0]), forward(xs[-1])), y_range, forward)
    x_ticks = xs if log_x else ticks(xs[0], xs[-1], 5)
    parts = [_axes(frame, x_ticks, ticks(*y_range, 4), number, y_format, x_title)]
    if band is not None:
        low, high, name = band
        parts.append(_bar(frame, "band", LEFT, WIDTH - LEFT - RIGHT, low, high))
        parts.append(_tag("text", name, cls="note", x=LEFT + 5, y=frame.y(high) + 13))
    parts += [_line(frame, line) for line in lines]
    return _chart(parts, about)


def reliability_chart(
    edges: Sequence[float],
    accuracy: Sequence[float | None],
    confidence: Sequence[float | None],
    counts: Sequence[int],
    about: str,
) -> Markup:
    """Accuracy of each bin of confidence as a bar, and its gap to the bin's mean confidence."""
    frame = _Frame((0, 1), (0, 1))
    parts = [_axes(frame, QUARTERS, QUARTERS, share, share, "confidence")]
    for low, high, right, sure, count in zip(edges, edges[1:], accuracy, confidence, counts, strict=False):
        if right is not None and sure is not None:
            place = frame.x(low) + 0.75, frame.x(high) - frame.x(low) - 1.5
            gap = _bar(frame, "over" if sure > right else "under", *place, min(right, sure), max(right, sure))
            title = _tag("title", f"{count} images, {share(sure)} sure on average, {share(right)} right")
            parts.append(_tag("g", title + _bar(frame, "bar", *place, 0, right) + gap))
    parts.append(_tag("path", cls="diagonal", d=_path(frame, (0, 1), (0, 1))))
    return _chart(parts, about)


def confidence_chart(
    edges: Sequence[float], before: Sequence[int], after: Sequence[int], about: str
) -> Markup:
    """How many answers fall in each bin of confidence: bars after scaling, an outline before it."""
    frame = _Frame((0, 1), (0, 1.08 * max(*before, *after, 1)))
    parts = [_axes(frame, QUARTERS, ticks(*frame.y_range, 4), share, number, "confidence")]
    for low, high, old, new in zip(edges, edges[1:], before, after, strict=False):
        place = frame.x(low) + 0.75, frame.x(high) - frame.x(low) - 1.5
        title = f"{share(low)} to {share(high)} sure: {new} answers, {old} before scaling"
        bars = _bar(frame, "bar", *place, 0, new) + _bar(frame, "outline", *place, 0, old)
        parts.append(_tag("g", _tag("title", title) + bars))
    return _chart(parts, about)


def halves_chart(dots: Sequence[Dot], about: str) -> Markup:
    """Novel over base accuracy in percent, with contours of equal harmonic mean."""
    (x0, x1), (y0, y1) = padded([d.x for d in dots], 4), padded([d.y for d in dots], 4)
    frame = _Frame((x0, min(100, x1)), (y0, min(100, y1)))
    x_ticks, y_ticks = ticks(*frame.x_range, 5), ticks(*frame.y_range, 4)
    parts = [_axes(frame, x_ticks, y_ticks, whole, whole, "base accuracy")]
    corners = [2 * x * y / (x + y) if x + y else 0.0 for x in frame.x_range for y in frame.y_range]
    bases = np.linspace(*frame.x_range, 60)
    for level in ticks(min(corners), max(corners), 6):
        reached = bases[2 * bases > level + 1e-9]
        novels = level * reached / (2 * reached - level)
        inside = (novels >= frame.y_range[0]) & (novels <= frame.y_range[1])
        if level > 0 and inside.sum() > 1:
            parts.append(_tag("path", cls="contour", d=_path(frame, reached[inside], novels[inside])))
            x, y = (
                max(frame.x(reached[inside][-1]), LEFT + 34),
                min(frame.y(novels[inside][-1]) - 3, HEIGHT - BOTTOM - 4),
            )
            parts.append(_tag("text", f"H {level:g}", cls="note", x=x - 3, y=y, text_anchor="end"))
    parts.append(_tag("text", "novel accuracy", x=LEFT + 4, y=TOP))
    return _chart([*parts, *_dots(frame, dots)], about)


def cost_chart(dots: Sequence[Dot], *, about: str, x_title: str) -> Markup:
    """Accuracy in percent over a cost on a logarithmic axis; what costs nothing stands at the left edge."""
    costs = [d.x for d in dots if d.x > 0] or [1.0]
    low = math.floor(math.log10(min(costs)))
    high = max(math.ceil(math.log10(max(costs))), low + 1)
    free = any(d.x <= 0 for d in dots)
    start = low - 1 if free else low

    def forward(x: float) -> float:
        return math.log10(x) if x > 0 else start + 0.25

    y0, y1 = padded([d.y for d in dots], 4)
    frame = _Frame((start, high), (y0, min(100, y1)), forward)
    x_ticks = [*([0.0] if free else []), *(10.0**p for p in range(low, high + 1, max(1, (high - low) // 4)))]
    axes = _axes(frame, x_ticks, ticks(*frame.y_range, 4), number, whole, x_title)
    return _chart([axes, *_dots(frame, dots)], about)


def confusion_chart(counts: np.ndarray, classes: Sequence[str], about: str, titled: int = 300) -> Markup:
    """Rows are true classes, columns predicted ones; the shade is the share of the row's images.

    Cells of one shade are one path, so that a thousand classes stay small; the largest confusions have hover
    titles. Up to 150 classes every row and column has its name.
    """
    many, named = len(classes), len(classes) <= 150
    longest = min(24, max(map(len, classes)))
    # Up to some forty classes leave room for a table beside the matrix; more of them fill the page.
    few = min(40, max(14, (680 - 6 * longest) // many))
    cell = few if many <= 50 else 10 if named else max(1, 1000 // many)
    letters = min(11, cell)
    margin = 6 + round(0.56 * letters * longest) if named else 6
    full = margin + many * cell + 2
    totals = counts.sum(1)
    shares = counts / np.maximum(totals[:, None], 1)
    # By the root, or most cells of a good model would be as pale as none.
    shade = np.clip(np.ceil(np.sqrt(shares) * LEVELS), 0, LEVELS).astype(int)
    diagonal = np.eye(many, dtype=bool)
    parts = [_tag("rect", cls="field", x=margin, y=margin, width=many * cell, height=many * cell)]
    for kind, mask in (("hit", diagonal), ("miss", ~diagonal)):
        for level in range(1, LEVELS + 1):
            places = np.argwhere((shade == level) & mask) * cell + margin
            moves = "".join(f"M{x} {y}h{cell}v{cell}h-{cell}z" for y, x in places.tolist())
            if moves:
                parts.append(_tag("path", cls=f"{kind} l{level}", d=moves))
    for k, name in enumerate(classes if named else ()):
        short = name if len(name) <= 24 else name[:23] + "…"
        line = margin + (k + 0.5) * cell + 0.35 * letters
        size = f"font-size:{letters}px"
        parts.append(_tag("text", short, style=size, x=margin - 4, y=line, text_anchor="end"))
        turned = f"translate({_n(line)} {margin - 4})rotate(-90)"
        parts.append(_tag("text", short, style=size, transform=turned))
    off = np.where(diagonal, 0, counts)
    largest = np.argsort(off, axis=None, kind="stable")[::-1][:titled]
    shown = [divmod(place, many) for place in largest.tolist() if off.flat[place]]
    for r, c in [*shown, *((k, k) for k in range(many))]:
        x, y, count = margin + c * cell, margin + r * cell, int(counts[r, c])
        if cell >= 24 and count:
            kind = "strong" if shade[r, c] > STRONG else "count"
            middle = {"x": x + cell / 2, "y": y + cell / 2 + 4, "text_anchor": "middle"}
            parts.append(_tag("text", str(count), cls=kind, **middle))
        said = f"{classes[r]} taken for {classes[c]}" if r != c else f"{classes[r]} right"
        title = _tag("title", f"{said}: {count} of {int(totals[r])}")
        parts.append(_tag("rect", title, cls="hover", x=x, y=y, width=cell, height=cell))
    return _tag(
        "svg",
        Markup("").join(parts),
        cls="confusion",
        role="img",
        aria_label=about,
        viewBox=f"0 0 {full} {full}",
        style=f"--natural:{full}px",
    )


def swatch(colour: int, dot: bool = False) -> Markup:
    """The key of a line, or of a point, in a legend."""
    dash = DASHES[colour // COLOURS % len(DASHES)]
    line = _tag("path", cls=f"line s{colour % COLOURS}", stroke_dasharray=dash, d="M1 5H25")
    mark = _mark(13, 5, colour) if dot else line
    return _tag("svg", mark, cls="swatch", viewBox="0 0 26 10", aria_hidden="true")


# Parts ---------------------------------------------------------------------------------------------


class _Frame:
    """From values to places inside the axes."""

    def __init__(
        self,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        forward: Callable[[float], float] = float,
    ) -> None:
        self.x_range, self.y_range, self.forward = x_range, y_range, forward

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (self.forward(value) - low) / (high - low or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low or 1) * (HEIGHT - TOP - BOTTOM)


def _axes(
    frame: _Frame, xs: Iterable[float], ys: Iterable[float], x_format: Format, y_format: Format, x_title: str
) -> Markup:
    parts = []
    for y in ys:
        parts.append(_tag("path", cls="grid", d=f"M{LEFT} {_n(frame.y(y))}H{WIDTH - RIGHT}"))
        parts.append(_tag("text", y_format(y), x=LEFT - 6, y=frame.y(y) + 4, text_anchor="end"))
    for x in xs:
        # The last one would stand out of the picture.
        middle = min(frame.x(x), WIDTH - 14)
        parts.append(_tag("text", x_format(x), x=middle, y=HEIGHT - BOTTOM + 15, text_anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_tag("text", x_title, x=middle, y=HEIGHT - 4, text_anchor="middle"))
    return Markup("").join(parts)


def _edges(line: Line) -> tuple[list[float], list[float]]:
    """The upper and the lower edge of a line's band; without one, the line itself twice."""
    wide = [s or 0.0 for s in line.spread] or [0.0] * len(line.y)
    return (
        [v + s for v, s in zip(line.y, wide, strict=True)],
        [v - s for v, s in zip(line.y, wide, strict=True)],
    )


def _line(frame: _Frame, line: Line) -> Markup:
    colour, path = f"s{line.colour % COLOURS}", _path(frame, line.x, line.y)
    if line.faint:
        return _tag("path", cls=f"line faint {colour}", d=path)
    parts = []
    if any(line.spread):
        over, under = _edges(line)
        outline = _path(frame, [*line.x, *reversed(line.x)], [*over, *reversed(under)])
        parts.append(_tag("path", cls=f"area {colour}", d=outline + "z"))
    dash = DASHES[line.colour // COLOURS % len(DASHES)]
    parts.append(_tag("path", _tag("title", line.name), cls=f"line {colour}", stroke_dasharray=dash, d=path))
    if line.marks or len(line.x) == 1:
        parts += [_mark(frame.x(x), frame.y(y), line.colour, 3) for x, y in zip(line.x, line.y, strict=True)]
    return Markup("").join(parts)


def _bar(frame: _Frame, kind: str, x: float, width: float, low: float, high: float) -> Markup:
    return _tag("rect", cls=kind, x=x, y=frame.y(high), width=width, height=frame.y(low) - frame.y(high))


def _dots(frame: _Frame, dots: Sequence[Dot]) -> list[Markup]:
    return [
        _tag("g", _tag("title", dot.name) + _mark(frame.x(dot.x), frame.y(dot.y), dot.colour)) for dot in dots
    ]


def _mark(x: float, y: float, colour: int, radius: float = 5) -> Markup:
    """A circle, then a square, then a diamond, as the colours run out."""
    kind, name = colour // COLOURS % 3, f"dot s{colour % COLOURS}"
    if kind == 0:
        return _tag("circle", cls=name, cx=x, cy=y, r=radius)
    side = 1.7 * radius
    turned = f"rotate({45 * (kind - 1)} {_n(x)} {_n(y)})"
    return _tag("rect", cls=name, x=x - side / 2, y=y - side / 2, width=side, height=side, transform=turned)


def _path(frame: _Frame, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    return "M" + "L".join(f"{_n(frame.x(a))} {_n(frame.y(b))}" for a, b in zip(x, y, strict=True))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _chart(parts: Iterable[Markup], about: str) -> Markup:
    return _tag(
        "svg",
        Markup("").join(parts),
        cls="chart",
        role="img",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        aria_label=about,
    )


def _tag(name: str, inside: str = "", *, cls: str = "", **attributes: float | str) -> Markup:
    """An element; all that is not Markup already is escaped, numbers are cut to a tenth of a pixel."""
    given = {"class": cls, **attributes}
    written = "".join(
        f' {key.replace("_", "-")}="{escape(value if isinstance(value, str) else _n(value))}"'
        for key, value in given.items()
        if value != ""
    )
    return Markup(f"<{name}{written}>{escape(inside)}</{name}>")
