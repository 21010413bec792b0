"""Plots of a report: errors and sizes of the encoded arrays, and the exponents of those with the lowest SQNR."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import exmy

from tstore.errors import InvalidArgument
from tstore.quantization.report import QuantizedArray, QuantizeReport

__all__ = ["check_plot", "plot_report"]

_DRAWN_HISTOGRAMS = 6

_MARKERS = [(f"C{color}", marker) for marker in "osD^vPX*<>pHd8h" for color in range(10)]
"""Pairs of a colour and a marker, enough for the 107 formats of 2 to 16 bits."""


def check_plot(file: str | os.PathLike[str]) -> None:
    """Raise `InvalidArgument` if a plot can't be written to the file, or Matplotlib is not installed."""
    path = pathlib.Path(file)
    suffixes = sorted(_figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in suffixes:
        raise InvalidArgument(f"{path}: expected one of the suffixes {', '.join(suffixes)} for the plot's file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgument(f"{path} can't be written: {path.parent} is missing, not a folder, or not writable")


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure  # takes half a second, and only plots need it
    except ImportError:
        raise InvalidArgument("plots need matplotlib: pip install matplotlib") from None
    return Figure(**options)


def plot_report(report: QuantizeReport, file: str | os.PathLike[str]) -> None:
    """Write the plots as an image; the suffix of the file is its format (.png, .svg, .pdf).

    Raise `InvalidArgument` as `check_plot` does, and if the file can't be written.
    """
    check_plot(file)
    worst = [a for a in report.worst if a.exponents is not None][:_DRAWN_HISTOGRAMS]
    rows = -(-len(worst) // 3)
    figure = _figure(figsize=(11, 4.5 + 2.2 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, 3, height_ratios=[4.5, *[2.2] * rows])
    _draw_errors(figure.add_subplot(grid[0, :]), report)
    for k, array in enumerate(worst):
        _draw_exponents(figure.add_subplot(grid[1 + k // 3, k % 3]), array)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(file)} can't be written: {error}") from None


def _draw_errors(axes: Any, report: QuantizeReport) -> None:
    """Draw a point for each encoded array; its area shows the number of values, its marker the format."""
    largest = max((a.values for a in report.encoded), default=1)
    names = sorted({a.format for a in report.encoded if a.format}, key=lambda n: (exmy.Format(n).bits, n))
    for (color, marker), name in zip(_MARKERS, names, strict=False):
        arrays = [a for a in report.encoded if a.format == name]
        sizes = [12 + 240 * a.values / largest for a in arrays]
        x, y = [a.bits_per_value for a in arrays], [a.sqnr for a in arrays]
        axes.scatter(x, y, s=sizes, alpha=0.6, label=name, color=color, marker=marker)
    exact = len(report.arrays) - len(report.encoded)
    axes.set_title(
        f"{report.tag}: {report.bits_per_value:.2f} bits per value, {report.sqnr:.1f} dB, "
        f"{len(report.encoded)} arrays encoded, {exact} exact"
    )
    axes.set_xlabel("bits per value, metadata included")
    axes.set_ylabel("SQNR, dB")
    axes.grid(alpha=0.3)
    if report.encoded:
        title, columns = "format (area: values)", -(-len(names) // 16)
        outside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        axes.legend(title=title, fontsize="small", markerscale=0.7, ncols=columns, **outside)


def _draw_exponents(axes: Any, array: QuantizedArray) -> None:
    """Draw the histogram of an array's exponents."""
    assert array.exponents is not None
    lowest, counts = array.exponents
    share = [100 * n / max(1, array.values) for n in counts]
    axes.bar(range(lowest, lowest + len(counts)), share, width=1.0)
    axes.set_title(f"{array.path}\n{array.format}, {array.sqnr:.1f} dB", fontsize="small")
    axes.set_xlabel("floor(log2 |x|)", fontsize="small")
    axes.set_ylabel("% of values", fontsize="small")
    axes.tick_params(labelsize="small")
