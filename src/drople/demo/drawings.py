"""A small image dataset drawn by code, so that the demo needs no download and no licence.

Sixteen everyday things, each drawn by one short function with a pen that wobbles: in ink, as a wash or in
colour, on varied paper, among clutter, sometimes partly hidden, blurred or grainy. The first half of the
sorted names are the base classes, the second half the novel ones. Things, variation and template were chosen
with the embedded model so that its zero-shot is far above chance and far below perfect on both halves: a few
images can then teach it something. So these drawings show how methods work; they do not rank them.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFilter

from drople.errors import DropleError

TEMPLATE = "a sketch of a {}."
SUPERSAMPLING = 3

Colour = tuple[int, int, int]
Points = NDArray[np.float64]


class Pen:
    """Draws in a figure's own coordinates, [-1, 1] with y downwards, in one drawing's hand and style."""

    def __init__(
        self, image: Image.Image, rng: np.random.Generator, radius: float, centre: Points, paper: Colour
    ) -> None:
        self.rng = rng
        self._draw = ImageDraw.Draw(image)
        turn, mirror = rng.normal(0, 0.1), rng.choice([-1.0, 1.0])
        stretch = np.diag([mirror * rng.uniform(0.88, 1.12), rng.uniform(0.88, 1.12)]) * radius
        self._matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ stretch
        self._centre = centre
        self._unit = radius
        self._wobble = rng.uniform(0.004, 0.018)
        self._outline = rng.uniform(0.015, 0.035)
        self._ink = shade(rng, rng.uniform(), rng.uniform(0, 0.6), rng.uniform(0.05, 0.35))
        # Most are line drawings on plain paper; some are washed with thin colour, some painted.
        self._paper = paper
        self._strength = rng.choice([0.0, 0.3, 1.0], p=[0.6, 0.25, 0.15])
        self._hue_shift = rng.normal(0, 0.05)

    def tint(self, hue: float, saturation: float = 0.7, value: float = 0.85) -> Colour:
        """A colour near the one asked for, as strong as the style has it: bare paper in a line drawing."""
        red, green, blue = shade(self.rng, hue + self._hue_shift, saturation, value)
        mixed = self._strength * np.array([red, green, blue]) + (1 - self._strength) * np.array(self._paper)
        red, green, blue = mixed.astype(int).tolist()
        return red, green, blue

    def shape(self, points: ArrayLike, fill: Colour, *, smooth: bool = True) -> None:
        """A closed, filled and outlined shape."""
        corners = self._place(points, smooth, closed=True)
        self._draw.polygon(corners, fill=fill)
        self._stroke([*corners, *corners[:2]], self._outline * self._unit, self._ink)

    def box(self, left: float, top: float, right: float, bottom: float, fill: Colour) -> None:
        self.shape([(left, top), (right, top), (right, bottom), (left, bottom)], fill, smooth=False)

    def oval(self, x: float, y: float, width: float, height: float, fill: Colour) -> None:
        self.shape(arc(x, y, width, height, 0, 11 / 12, 12), fill)

    def dot(self, x: float, y: float, radius: float) -> None:
        (centre,) = self._place([(x, y)], smooth=False, closed=False)
        self._disc(centre, radius * self._unit, self._ink)

    def line(self, points: ArrayLike, *, smooth: bool = True, thickness: float = 1.0) -> None:
        """An open stroke of ink, its thickness relative to the outlines."""
        path = self._place(points, smooth, closed=False)
        self._stroke(path, thickness * self._outline * self._unit, self._ink)

    def tubes(self, paths: Sequence[ArrayLike], width: float, fill: Colour) -> None:
        """Thick outlined strokes that grow into one another: all the ink comes before any colour."""
        placed = [self._place(path, smooth=True, closed=False) for path in paths]
        for extra, colour in ((2 * self._outline, self._ink), (0.0, fill)):
            for path in placed:
                self._stroke(path, (width + extra) * self._unit, colour)

    def _place(self, points: ArrayLike, smooth: bool, closed: bool) -> list[tuple[float, float]]:
        path = np.asarray(points, dtype=np.float64)
        path = path + self.rng.normal(0, self._wobble, path.shape)
        if smooth:
            path = spline(path, closed)
        return [(float(x), float(y)) for x, y in path @ self._matrix.T + self._centre]

    def _stroke(self, path: list[tuple[float, float]], width: float, colour: Colour) -> None:
        self._draw.line(path, fill=colour, width=max(1, round(width)), joint="curve")
        for end in (path[0], path[-1]):
            self._disc(end, width / 2, colour)

    def _disc(self, centre: tuple[float, float], radius: float, colour: Colour) -> None:
        x, y = centre
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def shade(rng: np.random.Generator, hue: float, saturation: float, value: float) -> Colour:
    """The colour of a hue in turns, slightly off, as from another paint box."""
    s, v = np.clip([saturation + rng.normal(0, 0.06), value + rng.normal(0, 0.06)], 0, 1)
    # HSV to RGB in closed form: each channel is a trapezoid over the circle of hues.
    k = (np.array([5.0, 3.0, 1.0]) + 6 * (hue % 1.0)) % 6
    channels = v - v * s * np.clip(np.minimum(k, 4 - k), 0, 1)
    red, green, blue = (255 * channels).astype(int).tolist()
    return red, green, blue


def spline(points: Points, closed: bool, steps: int = 8) -> Points:
    """The Catmull-Rom curve through the points."""
    around = [points[-1:], points, points[:2]] if closed else [points[:1], points, points[-1:]]
    p = np.concatenate(around)
    t = np.linspace(0, 1, steps, endpoint=False)[None, :, None]
    a, b, c, d = (p[i : len(p) - 3 + i, None, :] for i in range(4))
    curve = b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    path = curve.reshape(-1, 2)
    return path if closed else np.concatenate([path, points[-1:]])


def mirrored(points: ArrayLike) -> Points:
    """A symmetric outline from its right half: the points, then their mirror images backwards."""
    right = np.asarray(points, dtype=np.float64)
    return np.concatenate([right, right[::-1] * (-1, 1)])


def arc(x: float, y: float, width: float, height: float, start: float, end: float, count: int = 9) -> Points:
    """Points of an ellipse, the angles in turns, clockwise on the page from the right."""
    angles = 2 * np.pi * np.linspace(start, end, count)
    return np.stack([x + width * np.cos(angles), y + height * np.sin(angles)], axis=1)


def bicycle(pen: Pen) -> None:
    frame = pen.tint(pen.rng.uniform())
    spokes = int(pen.rng.integers(3, 6))
    for x in (-0.58, 0.58):
        for ring in (0.4, 0.36):
            pen.line(arc(x, 0.3, ring, ring, 0, 1, 17))
        for turn in np.arange(spokes) / spokes / 2:
            (a, b), (c, d) = arc(x, 0.3, 0.38, 0.38, turn, turn + 0.5, 2)
            pen.line([(a, b), (c, d)], thickness=0.5)
    paths: list[ArrayLike] = [
        [(-0.58, 0.3), (-0.25, -0.3)], [(-0.25, -0.3), (0.42, -0.3)], [(0.42, -0.3), (0.0, 0.3)],
        [(0.0, 0.3), (-0.58, 0.3)], [(0.0, 0.3), (-0.3, -0.45)], [(0.58, 0.3), (0.36, -0.5)],
    ]  # fmt: skip
    pen.tubes(paths, 0.03, frame)
    pen.oval(-0.32, -0.5, 0.18, 0.06, pen.tint(0.05, 0.5, 0.3))
    pen.line([(0.36, -0.5), (0.5, -0.6), (0.66, -0.52), (0.6, -0.4)], thickness=1.5)
    pen.oval(0, 0.3, 0.09, 0.09, frame)


def butterfly(pen: Pen) -> None:
    upper, lower = pen.tint(pen.rng.uniform()), pen.tint(pen.rng.uniform())
    spots = pen.tint(pen.rng.uniform(), 0.4, 0.95)
    for side in (-1, 1):
        pen.shape(
            np.array([(0.05, 0.05), (0.6, 0.1), (0.8, 0.45), (0.55, 0.85), (0.25, 0.6)]) * (side, 1), lower
        )
        pen.shape(
            np.array([(0.05, 0), (0.25, -0.6), (0.8, -0.88), (0.98, -0.5), (0.65, 0.08)]) * (side, 1), upper
        )
        pen.oval(side * 0.66, -0.48, 0.15, 0.17, spots)
        pen.oval(side * 0.5, 0.43, 0.11, 0.13, spots)
        pen.line([(side * 0.02, -0.4), (side * 0.12, -0.75), (side * 0.32, -0.9)])
        pen.dot(side * 0.32, -0.9, 0.05)
    pen.oval(0, 0.05, 0.08, 0.5, pen.tint(0.08, 0.5, 0.35))


def chair(pen: Pen) -> None:
    wood = pen.tint(pen.rng.choice([0.07, 0.08, 0.0, 0.55]), 0.6, 0.65)
    for x, y in ((-0.25, 0.72), (0.68, 0.72)):
        pen.box(x - 0.05, 0.1, x + 0.05, y, wood)
    for x in (-0.5, 0.28):
        pen.box(x - 0.05, -0.95, x + 0.05, 0.1, wood)
    if pen.rng.uniform() < 0.5:
        for y in (-0.9, -0.6, -0.3):
            pen.box(-0.5, y, 0.28, y + 0.16, wood)
    else:
        pen.box(-0.5, -0.95, 0.28, -0.2, pen.tint(0.02, 0.6))
    pen.shape(
        [(-0.56, 0.02), (0.32, 0.02), (0.76, 0.22), (-0.3, 0.22)], pen.tint(0.08, 0.5, 0.8), smooth=False
    )
    for x in (-0.3, 0.7):
        pen.box(x - 0.05, 0.22, x + 0.06, 0.98, wood)
    pen.box(-0.3, 0.22, 0.76, 0.32, wood)


def clock(pen: Pen) -> None:
    pen.oval(0, 0, 0.9, 0.9, pen.tint(pen.rng.uniform(), 0.5, 0.7))
    pen.oval(0, 0, 0.76, 0.76, pen.tint(0.13, 0.06, 0.98))
    for turn in np.arange(12) / 12:
        pen.line(np.stack([arc(0, 0, r, r, turn, turn, 1)[0] for r in (0.6, 0.7)]), thickness=1.2)
    for length, thickness in ((0.36, 2.0), (0.56, 1.2)):
        turn = pen.rng.uniform()
        pen.line([(0, 0), arc(0, 0, length, length, turn, turn, 1)[0]], thickness=thickness)
    pen.dot(0, 0, 0.06)


def cup(pen: Pen) -> None:
    clay = pen.tint(pen.rng.uniform(), 0.55, 0.9)
    pen.oval(0, 0.78, 0.85, 0.16, pen.tint(0.1, 0.1, 0.95))
    pen.tubes([arc(0.5, 0.15, 0.35, 0.28, -0.24, 0.24)], 0.13, clay)
    pen.shape(
        [(-0.6, -0.25), (0.6, -0.25), (0.52, 0.4), (0.32, 0.78), (-0.32, 0.78), (-0.52, 0.4)],
        clay,
        smooth=False,
    )
    pen.oval(0, -0.25, 0.6, 0.14, pen.tint(0.07, 0.6, 0.4))
    for x in (-0.25, 0.02, 0.28):
        pen.line([(x, -0.45), (x + 0.08, -0.58), (x - 0.04, -0.74), (x + 0.05, -0.92)], thickness=0.8)


def guitar(pen: Pen) -> None:
    wood = pen.tint(pen.rng.choice([0.07, 0.02, 0.6]), 0.65, 0.75)
    pen.shape(
        mirrored(
            [(0.04, -0.08), (0.3, -0.02), (0.3, 0.2), (0.26, 0.3), (0.46, 0.55), (0.38, 0.88), (0.05, 0.98)]
        ),
        wood,
    )
    pen.oval(0, 0.3, 0.14, 0.14, pen.tint(0.07, 0.5, 0.25))
    pen.box(-0.06, -0.78, 0.06, 0.2, pen.tint(0.07, 0.5, 0.4))
    pen.shape([(-0.1, -1.02), (0.1, -1.02), (0.07, -0.76), (-0.07, -0.76)], wood, smooth=False)
    pen.box(-0.18, 0.66, 0.18, 0.73, pen.tint(0.07, 0.5, 0.3))
    for x in (-0.03, 0, 0.03):
        pen.line([(x, -0.78), (x, 0.68)], smooth=False, thickness=0.4)
    for y in np.linspace(-0.68, -0.1, 6):
        pen.line([(-0.06, y), (0.06, y)], thickness=0.5)
    for y in (-0.96, -0.86):
        for side in (-1, 1):
            pen.dot(side * 0.15, y, 0.035)


def house(pen: Pen) -> None:
    wall, roof = (
        pen.tint(pen.rng.uniform(), 0.35, 0.92),
        pen.tint(pen.rng.choice([0.01, 0.06, 0.6]), 0.7, 0.65),
    )
    glass = pen.tint(0.55, 0.35, 0.95)
    pen.box(0.36, -0.85, 0.56, -0.3, roof)
    pen.box(-0.7, -0.15, 0.7, 0.9, wall)
    pen.shape([(-0.92, -0.12), (0, -0.9), (0.92, -0.12)], roof, smooth=False)
    door = pen.rng.choice([-0.15, 0.2])
    pen.box(door - 0.14, 0.32, door + 0.16, 0.9, pen.tint(0.07, 0.6, 0.5))
    pen.dot(door + 0.09, 0.62, 0.03)
    for x in (door - 0.38, door + 0.4):
        if abs(x) < 0.62:
            pen.box(x - 0.13, 0.08, x + 0.13, 0.38, glass)
            pen.line([(x, 0.08), (x, 0.38)], thickness=0.6)
            pen.line([(x - 0.13, 0.23), (x + 0.13, 0.23)], thickness=0.6)
    if pen.rng.uniform() < 0.5:
        pen.line([(0.46, -0.9), (0.55, -1.0), (0.48, -1.08), (0.6, -1.2)])


def ladder(pen: Pen) -> None:
    wood = pen.tint(pen.rng.choice([0.08, 0.1, 0.55]), 0.5, 0.75)
    count = int(pen.rng.integers(6, 10))
    for y in np.linspace(-0.8, 0.8, count):
        half = 0.3 + 0.06 * y
        pen.box(-half, y - 0.035, half, y + 0.035, wood)
    for side in (-1, 1):
        pen.shape(
            np.array([(0.2, -0.98), (0.28, -0.98), (0.42, 0.98), (0.32, 0.98)]) * (side, 1),
            wood,
            smooth=False,
        )


def palm_tree(pen: Pen) -> None:
    leaf, bark = pen.tint(0.33, 0.65, 0.6), pen.tint(0.08, 0.5, 0.55)
    pen.shape(arc(0, 0.98, 0.8, 0.2, 0.5, 1.0), pen.tint(0.12, 0.4, 0.95))
    pen.tubes([[(0.1, 0.9), (0.15, 0.4), (0.05, -0.1), (-0.1, -0.4)]], 0.13, bark)
    for y in np.linspace(-0.2, 0.8, 7):
        pen.line([(0.0, y), (0.18, y - 0.03)], thickness=0.6)
    for x, y in (
        (-0.85, -0.1),
        (0.7, 0.0),
        (-0.75, -0.7),
        (0.65, -0.65),
        (-0.2, -0.98),
        (0.3, -0.9),
        (-0.55, 0.2),
    ):
        a, b = (-0.1 + x) / 2, (-0.45 + y) / 2 - 0.18
        pen.shape([(-0.1, -0.42), (a, b - 0.1), (x, y), (a, b + 0.1)], leaf)
        pen.line([(-0.1, -0.42), (a, b), (x, y)], thickness=0.6)
    for x in (-0.16, 0.0):
        pen.oval(x, -0.35, 0.09, 0.09, bark)


def pineapple(pen: Pen) -> None:
    leaf = pen.tint(0.35, 0.6, 0.55)
    for x in (-0.45, 0.45, -0.25, 0.25, 0.0):
        pen.shape(
            [(x * 0.3 - 0.1, -0.25), (x * 0.8, -0.65), (x, -0.98 + abs(x) * 0.4), (x * 0.3 + 0.12, -0.3)],
            leaf,
        )
    pen.oval(0, 0.32, 0.48, 0.62, pen.tint(0.12, 0.7, 0.9))
    for slope in (-0.6, 0.6):
        along = np.array([np.cos(slope), np.sin(slope)])
        for offset in np.linspace(-0.75, 0.75, 5):
            middle, reach = offset * along[::-1] * (-1, 1), np.sqrt(1 - offset**2)
            chord = np.array([middle - reach * along, middle + reach * along])
            pen.line(chord * (0.48, 0.62) + (0, 0.32), thickness=0.6)


def pumpkin(pen: Pen) -> None:
    skin = pen.tint(pen.rng.choice([0.07, 0.08, 0.1]), 0.8, 0.9)
    pen.tubes([[(0, -0.45), (0.04, -0.65), (0.16, -0.78)]], 0.12, pen.tint(0.3, 0.5, 0.5))
    for x, width in ((-0.58, 0.36), (0.58, 0.36), (-0.32, 0.36), (0.32, 0.36), (0.0, 0.3)):
        pen.oval(x, 0.15, width, 0.62 - 0.12 * abs(x), skin)


def sailboat(pen: Pen) -> None:
    hull, sail = (
        pen.tint(pen.rng.uniform(), 0.65, 0.7),
        pen.tint(pen.rng.choice([0.1, 0.0, 0.55]), pen.rng.uniform(0, 0.6), 0.97),
    )
    pen.tubes([[(0, 0.4), (0, -0.95)]], 0.05, pen.tint(0.08, 0.5, 0.5))
    pen.shape([(0.07, -0.9), (0.35, -0.35), (0.68, 0.22), (0.07, 0.22)], sail, smooth=False)
    pen.shape([(-0.07, -0.72), (-0.35, -0.2), (-0.6, 0.22), (-0.07, 0.22)], sail, smooth=False)
    pen.shape([(0.02, -0.95), (0.02, -1.1), (-0.22, -1.02)], pen.tint(0.0), smooth=False)
    pen.shape([(-0.85, 0.36), (0.92, 0.36), (0.6, 0.78), (-0.6, 0.78)], hull, smooth=False)
    waves = np.linspace(-1.0, 1.0, 13)
    for y in (0.8, 0.95):
        pen.line(np.stack([waves, y + 0.05 * np.cos(np.arange(13) * np.pi)], axis=1))


def scissors(pen: Pen) -> None:
    metal, grip = pen.tint(0.6, 0.1, 0.85), pen.tint(pen.rng.uniform())
    opening = pen.rng.uniform(0.18, 0.42)
    for side in (-1, 1):
        pen.shape(
            np.array([(-0.05, 0.12), (0.07, 0.1), (opening, -0.95), (opening - 0.12, -0.6)]) * (side, 1),
            metal,
            smooth=False,
        )
        pen.tubes([[(0, 0.1), (-side * 0.22, 0.42)]], 0.06, grip)
        pen.tubes([arc(-side * 0.36, 0.66, 0.22, 0.28, 0, 1, 13)], 0.06, grip)
    pen.dot(0, 0.08, 0.05)


def sunflower(pen: Pen) -> None:
    petal, stem = pen.tint(0.13, 0.85, 0.95), pen.tint(0.33, 0.6, 0.55)
    pen.tubes([[(0, -0.1), (0.04, 0.4), (0, 0.98)]], 0.08, stem)
    for side in (-1, 1):
        pen.shape([(0.02, 0.8), (side * 0.2, 0.45), (side * 0.62, 0.45), (side * 0.4, 0.75)], stem)
    count = int(pen.rng.integers(13, 19))
    for turn in np.arange(count) / count:
        tip = arc(0, -0.3, 0.68, 0.66, turn, turn, 1)[0]
        sides = arc(0, -0.3, 0.46, 0.46, turn - 0.5 / count, turn + 0.5 / count, 2)
        feet = arc(0, -0.3, 0.28, 0.28, turn - 0.3 / count, turn + 0.3 / count, 2)
        pen.shape([feet[0], sides[0], tip, sides[1], feet[1]], petal)
    pen.oval(0, -0.3, 0.32, 0.32, pen.tint(0.07, 0.6, 0.4))
    for y in np.linspace(-0.25, 0.25, 5):
        reach = np.sqrt(0.085 - y * y)
        pen.line([(-reach, -0.3 + y), (reach, -0.3 + y)], thickness=0.5)
        pen.line([(y, -0.3 - reach), (y, -0.3 + reach)], thickness=0.5)


def windmill(pen: Pen) -> None:
    wall, sail = pen.tint(pen.rng.uniform(), 0.25, 0.9), pen.tint(0.1, 0.15, 0.95)
    pen.shape([(-0.24, -0.25), (0.24, -0.25), (0.42, 0.98), (-0.42, 0.98)], wall, smooth=False)
    pen.shape([(-0.3, -0.25), (0, -0.6), (0.3, -0.25)], pen.tint(0.03, 0.6, 0.6), smooth=False)
    pen.box(-0.12, 0.62, 0.12, 0.97, pen.tint(0.07, 0.5, 0.45))
    pen.box(-0.1, 0.15, 0.1, 0.35, pen.tint(0.55, 0.3, 0.95))
    start = pen.rng.uniform(0, 0.25)
    for quarter in range(4):
        turn = 2 * np.pi * (start + quarter / 4)
        along, across = np.array([np.cos(turn), np.sin(turn)]), np.array([-np.sin(turn), np.cos(turn)])
        hub = np.array([0, -0.3])
        pen.shape(
            [
                hub + 0.18 * along,
                hub + 0.78 * along,
                hub + 0.78 * along + 0.2 * across,
                hub + 0.18 * along + 0.16 * across,
            ],
            sail,
            smooth=False,
        )
        for step in (0.33, 0.48, 0.63):
            pen.line([hub + step * along, hub + step * along + 0.18 * across], thickness=0.6)
        pen.line([hub, hub + 0.85 * along], thickness=1.2)
    pen.dot(0, -0.3, 0.06)


def wine_glass(pen: Pen) -> None:
    glass, wine = pen.tint(0.55, 0.08, 0.98), pen.tint(pen.rng.choice([0.97, 0.98, 0.14]), 0.75, 0.7)
    pen.oval(0, 0.88, 0.38, 0.09, glass)
    pen.box(-0.035, 0.1, 0.035, 0.86, glass)
    pen.shape(mirrored([(0.36, -0.95), (0.42, -0.5), (0.34, -0.1), (0.06, 0.14)]), glass)
    pen.shape(mirrored([(0.4, -0.45), (0.33, -0.1), (0.06, 0.12)]), wine)
    pen.oval(0, -0.95, 0.36, 0.07, glass)
    pen.oval(0, -0.45, 0.4, 0.06, wine)


FIGURES: dict[str, Callable[[Pen], None]] = {
    figure.__name__.replace("_", " "): figure
    for figure in (
        bicycle, butterfly, chair, clock, cup, guitar, house, ladder,
        palm_tree, pineapple, pumpkin, sailboat, scissors, sunflower, windmill, wine_glass,
    )
}  # fmt: skip
CLASSES: tuple[str, ...] = tuple(sorted(FIGURES))


def picture(name: str, rng: np.random.Generator, size: int) -> Image.Image:
    """One drawing of a class."""
    large = size * SUPERSAMPLING
    paper = shade(rng, rng.uniform(), abs(rng.normal(0, 0.05)), 1.0)
    image = background(rng, size, paper).resize((large, large), Image.Resampling.BILINEAR)
    scribble(image, rng, paper, int(rng.choice([0, 0, 1, 3, 5])))
    radius = large * rng.uniform(0.33, 0.46)
    room = max(0.0, large / 2 - radius)
    centre = large / 2 + rng.uniform(-room, room, size=2)
    FIGURES[name](Pen(image, rng, radius, centre, paper))
    if rng.uniform() < 0.2:
        scribble(image, rng, paper, int(rng.integers(1, 3)))
    image = image.reduce(SUPERSAMPLING)
    if rng.uniform() < 0.2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    pixels = np.asarray(image, dtype=np.float64) * rng.uniform(0.85, 1.05)
    grain = rng.normal(0, 1, (size, size, 1)) * rng.choice([0.0, 3.0, 10.0], p=[0.6, 0.25, 0.15])
    return Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))


def background(rng: np.random.Generator, size: int, paper: Colour) -> Image.Image:
    """Plain paper, or paper with a gradient, clouds of colour, ruled lines, or hills under a sky."""
    y, x = np.mgrid[0:size, 0:size] / size
    canvas = np.ones((size, size, 1)) * np.array(paper)
    colour = np.array(shade(rng, rng.uniform(), rng.uniform(0.1, 0.5), rng.uniform(0.7, 1)))
    kind = rng.choice(["plain", "gradient", "clouds", "ruled", "hills"], p=[0.4, 0.15, 0.15, 0.15, 0.15])
    if kind == "gradient":
        turn = rng.uniform(0, 2 * np.pi)
        mix = 0.5 + 0.6 * (np.cos(turn) * (x - 0.5) + np.sin(turn) * (y - 0.5))
    elif kind == "clouds":
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8))
        mix = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)) / 400
    elif kind == "ruled":
        step = int(rng.integers(8, 20))
        grid = rng.uniform() < 0.5
        mix = 0.6 * (((y * size) % step < 1) | (grid & ((x * size) % step < 1)))
    elif kind == "hills":
        height, length, phase = rng.uniform((0.55, 0.5, 0), (0.9, 1.5, 1), size=(2, 3)).T[:, :, None, None]
        mix = 0.15 + 0.3 * (y > height + 0.07 * np.sin(2 * np.pi * (length * x + phase))).sum(axis=0)
    else:
        mix = np.zeros((size, size))
    canvas += (colour - canvas) * mix[:, :, None]
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def scribble(image: Image.Image, rng: np.random.Generator, paper: Colour, count: int) -> None:
    """Clutter: small discs, triangles, boxes and squiggles, under the figure or over it."""
    for _ in range(count):
        centre = rng.uniform(0, image.width, size=2)
        pen = Pen(image, rng, image.width * rng.uniform(0.03, 0.08), centre, paper)
        colour = pen.tint(rng.uniform())
        match rng.integers(4):
            case 0:
                pen.oval(0, 0, 1, 1, colour)
            case 1:
                pen.shape(arc(0, 0, 1, 1, 0, 2 / 3, 3), colour, smooth=False)
            case 2:
                pen.box(-0.9, -0.7, 0.9, 0.7, colour)
            case _:
                steps = np.arange(7)
                pen.line(np.stack([steps / 3 - 1, 0.5 * np.cos(steps * np.pi)], axis=1), thickness=3)


def draw(
    out: Path, *, seed: int = 0, train_per_class: int = 24, test_per_class: int = 30, size: int = 144
) -> Path:
    """Write `out/SPLIT/CLASS/NNN.jpg` for train, val (a third of train) and test; a seed fixes every byte."""
    if out.exists():
        raise DropleError(f"{out} exists already: remove it, or draw into another folder.")
    splits = {"train": train_per_class, "val": train_per_class // 3, "test": test_per_class}
    out.parent.mkdir(parents=True, exist_ok=True)
    # Drawn beside its place and moved there whole, so that an interrupted run leaves no half a dataset.
    workshop = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for split_index, (split, count) in enumerate(splits.items()):
            for class_index, name in enumerate(CLASSES):
                folder = workshop / split / name
                folder.mkdir(parents=True)
                for index in range(count):
                    # A stream an image: asking for more images does not change the first ones.
                    rng = np.random.default_rng([seed, split_index, class_index, index])
                    picture(name, rng, size).save(folder / f"{index:03d}.jpg", quality=90)
        workshop.chmod(0o755)
        workshop.rename(out)
    except BaseException:
        shutil.rmtree(workshop, ignore_errors=True)
        raise
    return out
