"""The geometry of histograms and the image of a heat map, for the template of a tensor."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.service.page.plots import LARGEST, SIZE, SMALLEST, round_ticks, tick_label

__all__ = ["Distribution", "HeatImage", "exponent_plot", "heat_image", "value_plot"]

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_ROOM = 6  # how many exponents beyond those of the values are shown for the format's range
_LABELS = 5
_MAX_BARS = 256
_SEQUENTIAL = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")
_DIVERGING = ("053061", "2166ac", "4393c3", "92c5de", "f2f2f2", "f4a582", "d6604d", "b2182b", "67001f")
_BRIGHTEST = 0.995  # the quantile at which the colour scale ends, so that one outlier does not darken all cells

Shares = Sequence[float]


class Distribution(NamedTuple):
    """A bar chart: one SVG path for all bars, bands and marks for a format's range, and labels."""

    path: str
    bands: list[tuple[float, float, str]]
    """The start, the width and the class of each band."""
    marks: list[float]
    x_labels: list[str]
    y_labels: list[str]
    positions: list[tuple[float, float, float, float]]
    labels: list[str]
    """The description of each bar."""


class HeatImage(NamedTuple):
    """An image of cells and its legend as data URLs, and the values at the ends of the colour scale."""

    url: str
    legend: str
    low: float
    high: float


def value_plot(histogram: Mapping[str, Any], limits: Mapping[str, Any] | None) -> Distribution:
    """Return the bars of a histogram of values, with marks at the format's largest values if they are in range."""
    edges, counts = histogram["edges"], histogram["counts"]
    low, high = (edges[0], edges[-1]) if edges else (0.0, 1.0)
    if -LARGEST < low < high < LARGEST and high - low > SMALLEST:
        ticks = round_ticks(low, high)
        x_labels = [tick_label(x, ticks[1] - ticks[0]) for x in ticks]
        low, high = ticks[0], ticks[-1]
    else:
        ticks = [low * (1 - i / (_LABELS - 1)) + high * (i / (_LABELS - 1)) for i in range(_LABELS)]
        x_labels = [f"{x:.3g}" for x in ticks]
    place = _placed(low, high)
    labels = [f"{a:.4g} … {b:.4g}: {n:,}" for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]
    ends = [] if limits is None or limits["largest"] is None else [-limits["largest"], limits["largest"]]
    marks = [place(x) for x in ends if low <= x <= high]
    return _bars([place(x) for x in edges], counts, labels, [], marks, x_labels)


def exponent_plot(exponents: Mapping[str, Any], limits: Mapping[str, Any] | None) -> Distribution:
    """Return the bars of a histogram of exponents, over bands for the normal and subnormal numbers."""
    counts: list[int] = exponents["counts"]
    lowest = exponents["lowest"]
    first, last = lowest, lowest + max(1, len(counts))
    spans: list[tuple[int, int, str]] = []
    if limits is not None and limits["largest"] is not None:
        smallest, normal, largest = (
            math.frexp(limits[key])[1] - 1 for key in ("smallest", "smallest_normal", "largest")
        )
        first = min(first, max(smallest, first - _ROOM))
        last = max(last, min(largest + 1, last + _ROOM))
        spans = [(smallest, normal, "subnormal"), (normal, largest + 1, "normal")]
    if last - first >= 2 * _LABELS:
        last += -(last - first) % (_LABELS - 1)  # so that the labels are at whole exponents
    place = _placed(first, last)
    bands = []
    for start, stop, kind in spans:
        a, b = max(start, first), min(stop, last)
        if a < b:
            bands.append((round(place(a), 1), round(place(b) - place(a), 1), kind))
    inner = [place(x) for span in spans for x in span[:2] if first < x < last]
    width = -(-len(counts) // _MAX_BARS)  # exponents of one bar
    starts = range(0, len(counts), width or 1)
    counts = [sum(counts[i : i + width]) for i in starts]
    edges = [place(lowest + i) for i in (*starts, len(counts) * width)] if counts else []
    labels = [
        f"{_power(lowest + i)} … {_power(lowest + i + width)}: {n:,}" for i, n in zip(starts, counts, strict=True)
    ]
    ticks = range(first, last + 1, (last - first) // (_LABELS - 1) if last - first >= 2 * _LABELS else 1)
    return _bars(edges, counts, labels, bands, sorted(set(inner)), [_power(x) for x in ticks])


def _bars(
    edges: Shares,
    counts: Sequence[int],
    labels: list[str],
    bands: list[tuple[float, float, str]],
    marks: list[float],
    x_labels: list[str],
) -> Distribution:
    most = max(counts, default=0) or 1
    total = sum(counts) or 1
    path: list[str] = []
    positions: list[tuple[float, float, float, float]] = []
    for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True):
        top = SIZE * (1 - count / most)
        gap = min(1.5, (b - a) * 0.1)
        if count:
            path.append(f"M{a + gap:.1f} {SIZE:.0f}V{min(top, SIZE - 4):.1f}H{b - gap:.1f}V{SIZE:.0f}z")
        positions.append((round((a + b) / 2, 1), round(top, 1), round((a + b) / 2, 1), count))
    y_labels = [_percent(share * most / total) for share in (0, 0.5, 1)]
    return Distribution("".join(path), bands, marks, x_labels, y_labels, positions, labels)


def _placed(low: float, high: float) -> Any:
    """Return a function from a value to its position in the box; it does not overflow."""
    half = high / 2 - low / 2
    return lambda x: SIZE * min(1.0, max(0.0, (x / 2 - low / 2) / half)) if half else SIZE / 2


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share > 0.0995 else f"{100 * share:.2g} %"


def _power(exponent: int) -> str:
    return f"2{str(exponent).translate(_SUPERSCRIPTS)}"


def heat_image(heat_map: Mapping[str, Any], show: str) -> HeatImage | None:
    """Return an image of the cells' "rms" or "mean", None if no cell has a value."""
    cells = heat_map["rms" if show == "rms" else "means"]
    values = np.array([[math.nan if x is None else x for x in row] for row in cells], np.float64)
    known = values[np.isfinite(values)]
    if not known.size:
        return None
    diverging = show == "mean" and known.min() < 0 < known.max()
    if diverging:
        high = float(np.quantile(np.abs(known), _BRIGHTEST)) or float(np.abs(known).max())
        low = -high
    else:
        low, high = float(known.min()), float(np.quantile(known, _BRIGHTEST))
        high = high if high > low else float(known.max())
    palette = _palette(_DIVERGING if diverging else _SEQUENTIAL)
    half = high / 2 - low / 2
    shares = np.clip((values / 2 - low / 2) / half, 0, 1) if half > 0 else np.full(values.shape, 0.5)
    indices = np.where(np.isfinite(values), 1 + np.nan_to_num(shares) * 254, 0).astype(np.uint8)
    ramp = np.arange(1, 256, dtype=np.uint8).reshape(1, -1)
    return HeatImage(_data_url(indices, palette), _data_url(ramp, palette), low, high)


def _palette(colours: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Return 256 colours; the first is for cells without a value, which are transparent."""
    anchors = np.array([[int(c[i : i + 2], 16) for i in (0, 2, 4)] for c in colours], np.float64)
    at = np.linspace(0, len(colours) - 1, 255)
    ramp = np.stack([np.interp(at, np.arange(len(colours)), anchors[:, k]) for k in range(3)], axis=1)
    return np.concatenate([np.zeros((1, 3)), ramp]).round().astype(np.uint8)


def _data_url(indices: npt.NDArray[np.uint8], palette: npt.NDArray[np.uint8]) -> str:
    """Return a PNG of palette indices as a URL."""
    height, width = indices.shape
    lines = np.zeros((height, width + 1), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = indices
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.tobytes()),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return f"data:image/png;base64,{base64.standard_b64encode(data).decode()}"
