"""The geometry of plots, which templates draw as SVG and label in HTML.

A plot fills a box of 1000 × 1000 units, which the browser stretches to the available space; the lines keep
their width. Ticks are spaced evenly, so that their labels need no positions of their own. All functions take plain
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = [
    "LARGEST",
    "SIZE",
    "SMALLEST",
    "Bars",
    "Line",
    "Tile",
    "bars",
    "line",
    "round_ticks",
    "tick_label",
    "treemap",
]

SIZE = 1000.0
LARGEST, SMALLEST = 1e300, 1e-290
"""Beyond these, the numbers of an axis could overflow or underflow."""

_MAX_POINTS = 600  # points of a line; longer lines show the minimum and maximum of each stretch
_LOG_RATIO = 100.0  # positive values that differ by more than this factor have a logarithmic axis
_WIDEST_BAR = 60.0
_BAR_SHARE = 0.72  # the width of a bar, relative to the distance between bars
_MAX_GAPS = 100  # bars with gaps between them; gaps between more bars would be narrower than a pixel
_MAX_DECADES = 5  # ticks of a logarithmic axis
_ROUNDED = 100  # the middle of at least this many steps is labelled with the nearest whole step
_FLAT = 1e-12  # values that differ by less, relative to their magnitude, are drawn as equal


class Line(NamedTuple):
    """A line over steps: the path, its end, and the labels of the axes, the lowest first."""

    path: str
    end: tuple[float, float] | None
    x_labels: list[str]
    y_labels: list[str]
    logarithmic: bool
    positions: list[tuple[float, float, float, float]]
    """The place of each drawn point, x and y in the box, and its values."""


class Bars(NamedTuple):
    """Bars over steps: one path of all rectangles, and the labels of the axes."""

    path: str
    x_labels: list[str]
    y_labels: list[str]
    positions: list[tuple[float, float, float, float]]


class Tile(NamedTuple):
    """A tile of a treemap, in percent of its width and height."""

    item: int
    x: float
    y: float
    width: float
    height: float


def line(xs: Sequence[float], ys: Sequence[float | None]) -> Line:
    """Return a line through the finite values; others leave gaps."""
    known = [y for y in ys if y is not None and math.isfinite(y)]
    if not known:
        return Line("", None, _x_labels(xs), [], False, [])
    lowest, highest = _drawable(min(known)), _drawable(max(known))
    logarithmic = lowest > 0 and highest / lowest > _LOG_RATIO
    ticks = _decades(math.log10(lowest), math.log10(highest)) if logarithmic else round_ticks(lowest, highest)
    low, high = ticks[0], ticks[-1]
    place = _places(xs)
    path, positions, gap = [], [], True
    for x, y in _thinned(list(zip(xs, ys, strict=True))):
        if y is None or not math.isfinite(y):
            gap = True
            continue
        drawn = math.log10(_drawable(y)) if logarithmic else _drawable(y)
        at = place(x), SIZE * (1 - (drawn - low) / (high - low))
        path.append(f"{'M' if gap else 'L'}{at[0]:.1f} {at[1]:.1f}")
        positions.append((round(at[0], 1), round(at[1], 1), x, y))
        gap = False
    labels = [f"{10.0**t:.4g}" if logarithmic else tick_label(t, ticks[1] - ticks[0]) for t in ticks]
    end = (positions[-1][0], positions[-1][1])
    return Line("".join(path), end, _x_labels(xs), labels, logarithmic, positions)


def bars(xs: Sequence[float], ys: Sequence[float | None]) -> Bars:
    """Return a bar from zero for each positive, finite value; of many adjacent ones, only the highest is drawn."""
    place = _places(xs)
    stretch = max(1, -(-len(xs) // _MAX_POINTS))
    highest: list[tuple[float, float]] = []
    for start in range(0, len(xs), stretch):
        part = [
            (y, x)
            for x, y in zip(xs[start : start + stretch], ys[start : start + stretch], strict=True)
            if y and math.isfinite(y) and y >= SMALLEST
        ]
        if part:
            y, x = max(part)
            highest.append((x, y))
    ticks = round_ticks(0, max((_drawable(y) for _, y in highest), default=1))
    count = max(1, len(xs) / stretch)
    width = min(_WIDEST_BAR, SIZE / count * (_BAR_SHARE if count <= _MAX_GAPS else 1))
    path, positions = [], []
    for x, y in highest:
        left, top = place(x) * (1 - width / SIZE), SIZE * (1 - _drawable(y) / ticks[-1])
        path.append(f"M{left:.1f} {SIZE:.0f}V{top:.1f}h{width:.1f}V{SIZE:.0f}z")
        positions.append((round(left + width / 2, 1), round(top, 1), x, y))
    return Bars("".join(path), _x_labels(xs), [tick_label(t, ticks[1]) for t in ticks], positions)


def treemap(sizes: Sequence[float]) -> list[Tile]:
    """Return a tile for each positive size, with an area in proportion, as square as possible (squarified)."""
    order = sorted((i for i, size in enumerate(sizes) if size > 0), key=lambda i: -sizes[i])
    total = sum(sizes[i] for i in order)
    tiles: list[Tile] = []
    x = y = 0.0
    width, height = 160.0, 90.0  # the ratio at which it is shown
    area = width * height
    while order:
        side = min(width, height)
        row: list[int] = []
        row_area = 0.0
        while order:
            next_area = sizes[order[0]] / total * area
            if row and _worst(row, row_area, sizes, total, area, side) < _worst(
                [*row, order[0]], row_area + next_area, sizes, total, area, side
            ):
                break
            row.append(order.pop(0))
            row_area += next_area
        thickness, offset = row_area / side, 0.0
        for i in row:
            length = sizes[i] / total * area / thickness if thickness else 0.0
            box = (x, y + offset, thickness, length) if width >= height else (x + offset, y, length, thickness)
            tiles.append(Tile(i, box[0] / 1.6, box[1] / 0.9, box[2] / 1.6, box[3] / 0.9))
            offset += length
        if width >= height:
            x, width = x + thickness, width - thickness
        else:
            y, height = y + thickness, height - thickness
    return tiles


def _worst(
    row: list[int], row_area: float, sizes: Sequence[float], total: float, area: float, side: float
) -> float:
    """Return the largest ratio of the sides of the tiles of a row."""
    largest, smallest = sizes[row[0]] / total * area, sizes[row[-1]] / total * area
    return max(side * side * largest / row_area**2, row_area**2 / (side * side * smallest))


def _places(xs: Sequence[float]) -> Callable[[float], float]:
    """Return a function from x to its place in the box; a single x is in the middle."""
    low, high = (min(xs), max(xs)) if xs else (0.0, 0.0)
    return lambda x: SIZE * (x - low) / (high - low) if high > low else SIZE / 2


def _thinned(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Return fewer points that draw about the same line: the first, lowest and highest of each stretch."""
    if len(points) <= _MAX_POINTS:
        return points
    stretch = -(-3 * len(points) // _MAX_POINTS)
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        known = [(y, i) for i, (_, y) in enumerate(part) if y is not None and math.isfinite(y)]
        chosen = {0, min(known)[1], max(known)[1]} if known else {0}
        kept += [part[i] for i in sorted(chosen)]
    return [*kept, points[-1]]


def _drawable(value: float) -> float:
    """Return a finite value, or the one nearest to it with which axes can be computed."""
    return 0.0 if abs(value) < SMALLEST else max(-LARGEST, min(LARGEST, value))


def round_ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers, evenly spaced, that enclose the values."""
    if high - low <= _FLAT * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Return the exponents of evenly spaced powers of ten that enclose the values."""
    first, last = math.floor(low), math.ceil(high)
    step = -(-(last - first) // _MAX_DECADES)
    return [float(first + i * step) for i in range(-(-(last - first) // step) + 1)]


def tick_label(value: float, step: float) -> str:
    """Format a tick with the decimals that its step needs."""
    if abs(value) >= 1e6 or abs(step) < 1e-4:
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step < 1 else 0
    decimals += step < 1 and not math.isclose(step * 10**decimals % 1, 0, abs_tol=1e-6)
    return f"{value:,.{decimals}f}"


def _x_labels(xs: Sequence[float]) -> list[str]:
    """Return the first x, the one in the middle unless it would be rounded visibly, and the last."""
    if not xs:
        return []
    low, high = min(xs), max(xs)
    middle = (low + high) / 2
    exact = high - low >= _ROUNDED or middle == round(middle)
    return [f"{x:,.0f}" for x in (sorted({low, middle, high}) if exact else [low, high])]
