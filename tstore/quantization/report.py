"""Reports of a quantization: the size and measured error of each array, as data, in the commit, and as plots."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import exmy
import msgspec

from tstore.core.format.arguments import quote
from tstore.core.format.plain_text import finite_or_none, text_table
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument, NotFound, parsing

__all__ = ["QuantizeReport", "QuantizedArray", "check_plot", "plot_report", "read_report", "stored_document"]

T = TypeVar("T")

_STORED_HISTOGRAMS = 8
"""The number of arrays whose exponent histograms are stored in the commit: those with the lowest SQNR."""

_DRAWN_HISTOGRAMS = 6

NONFINITE = "values are NaN or infinite"
"""The ending of the reason for keeping an array with NaN or infinity exact."""

_SHOWN = 3  # paths in one line

_MARKERS = [(f"C{color}", marker) for marker in "osD^vPX*<>pHd8h" for color in range(10)]
"""Pairs of a colour and a marker, enough for the 107 formats of 2 to 16 bits."""

_UNBOUNDED = ("signal", "noise", "largest_error", "largest_relative")
"""Fields that may be infinite or NaN, which JSON can't express."""

_NO_DIFFERENCE = exmy.Difference(0, 0.0, 0.0, 0.0, 0.0)


class QuantizedArray(NamedTuple):
    """The format and error of the array at `path`, of `values` elements; the error is that of the decoded codes.

    `format` is None if the array is exact; `reason` then says why, unless a rule requested it. `granularity` says
    which values share an offset or scale: "tensor", "chunk", "row", or a "block of 32". `coding` is "entropy" or
    "packed", and empty for an exact array. `sensitivity` is the weight of the array's error in a budget.
    `bytes_before` and `bytes_after` are encoded bytes with the codec's metadata. `signal` and `noise` are the sums
    of the squared values and errors. `clipped` is the fraction of values beyond the largest that their format and
    scale can represent. `exponents` is (lowest, counts): how many values have floor(log2 |x|) = lowest, lowest +
    1, …; None if not stored. `weighted_sqnr` is the SQNR in dB with squares weighted by the importance of rows or
    columns, which also guided the choice of codes; None without importance. All other errors are unweighted:
    `largest_error` is the largest |x − y|, and `largest_relative` the largest |x − y| / |x|.
    """

    path: str
    format: str | None
    granularity: str
    reason: str
    values: int
    bytes_before: int
    bytes_after: int
    signal: float = 0.0
    noise: float = 0.0
    largest_error: float = 0.0
    largest_relative: float = 0.0
    clipped: float = 0.0
    exponents: tuple[int, list[int]] | None = None
    coding: str = ""
    sensitivity: float = 1.0
    weighted_sqnr: float | None = None

    def __repr__(self) -> str:
        encoding = "exact"
        if self.format:
            how = "entropy-coded" if self.coding == "entropy" else f"per {self.granularity}"
            encoding = f"{self.format} {how}, SQNR {self.sqnr:.1f} dB"
        return f"<QuantizedArray {self.path}: {encoding}, {self.bits_per_value:.2f} bits/value>"

    @property
    def sqnr(self) -> float:
        """10·log10(Σx² / Σ(x−y)²) in dB; infinite for an exact copy, NaN if a sum overflows float64."""
        return self._difference.sqnr

    @property
    def _difference(self) -> exmy.Difference:
        return exmy.Difference(self.values, self.signal, self.noise, self.largest_error, self.largest_relative)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, metadata of the codec included."""
        return 8 * self.bytes_after / self.values if self.values else 0.0


class QuantizeReport(NamedTuple):
    """The `version` and `tag` of a quantized copy of `source`, the `request` in words, and a row for each array.

    `arrays` has the rows, by path.
    """

    version: int
    tag: str
    source: int
    arrays: list[QuantizedArray]
    request: str = ""

    def __repr__(self) -> str:
        """Return one line with the commit and the totals; `table()` has the rest."""
        nonfinite = [a.path for a in self.arrays if a.reason.endswith(NONFINITE)]
        shown = ", ".join(nonfinite[:_SHOWN]) + ", …" * (len(nonfinite) > _SHOWN)
        left_out = f" ({len(nonfinite)} left exact because of NaN or infinity: {shown})" if nonfinite else ""
        return (
            f"<QuantizeReport version {self.version} ({self.tag}), from version {self.source}: "
            f"{len(self.encoded)} of {len(self.arrays)} arrays encoded{left_out}, "
            f"{self.bits_per_value:.2f} bits/value, SQNR {self.sqnr:.1f} dB>"
        )

    def table(self) -> str:
        """Return a line of text for each array, with the reasons why some are exact, and the totals."""
        rows = [("array", "format", "bits/value", "SQNR dB", "largest error", "why exact")]
        for a in self.arrays:
            measured = (_sqnr_text(a), f"{a.largest_error:.3g}") if a.format else ("", "")
            name = f"{a.format} {a.coding}" if a.format else "exact"
            rows.append((a.path, name, f"{a.bits_per_value:.2f}", *measured, a.reason))
        return f"{text_table(rows, left=(0, 1, 5))}\n{self!r}"

    @property
    def encoded(self) -> list[QuantizedArray]:
        """The arrays that are not exact."""
        return [a for a in self.arrays if a.format]

    @property
    def worst(self) -> list[QuantizedArray]:
        """The encoded arrays by SQNR, the lowest first; an SQNR of NaN comes before all others."""
        return sorted(self.encoded, key=lambda a: -math.inf if math.isnan(a.sqnr) else a.sqnr)

    @property
    def sqnr(self) -> float:
        """The SQNR of all encoded arrays together, in dB."""
        return sum((a._difference for a in self.encoded), _NO_DIFFERENCE).sqnr

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value over all arrays."""
        values = sum(a.values for a in self.arrays)
        return 8 * self.bytes_after / values if values else 0.0

    @property
    def bytes_before(self) -> int:
        """Encoded bytes of the source."""
        return sum(a.bytes_before for a in self.arrays)

    @property
    def bytes_after(self) -> int:
        """Encoded bytes of the new commit."""
        return sum(a.bytes_after for a in self.arrays)

    @property
    def largest_error(self) -> float:
        """The largest |x − y| over all arrays."""
        return max((a.largest_error for a in self.encoded), default=0.0)

    @property
    def largest_relative(self) -> float:
        """The largest |x − y| / |x| over all values x that are not zero."""
        return max((a.largest_relative for a in self.encoded), default=0.0)

    @property
    def clipped(self) -> float:
        """The fraction of clipped values among those of encoded arrays."""
        values = sum(a.values for a in self.encoded)
        return sum(a.clipped * a.values for a in self.encoded) / values if values else 0.0

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values, with totals, and None for infinity and NaN."""
        return {
            "version": self.version,
            "tag": self.tag,
            "source": self.source,
            "request": self.request,
            "total": {
                "values": sum(a.values for a in self.arrays),
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "bits_per_value": self.bits_per_value,
                "sqnr_db": finite_or_none(self.sqnr),
                "largest_error": finite_or_none(self.largest_error),
                "largest_relative": finite_or_none(self.largest_relative),
                "clipped": self.clipped,
            },
            "arrays": [
                {
                    **{k: v for k, v in a._asdict().items() if k != "exponents"},
                    **{name: finite_or_none(getattr(a, name)) for name in _UNBOUNDED},
                    "bits_per_value": a.bits_per_value,
                    "sqnr_db": finite_or_none(a.sqnr),
                    **({} if a.exponents is None else {"exponents": a.exponents}),
                }
                for a in self.arrays
            ],
        }


def _sqnr_text(array: QuantizedArray) -> str:
    weighted = array.weighted_sqnr
    return f"{array.sqnr:.1f}" if weighted is None else f"{array.sqnr:.1f} (weighted {weighted:.1f})"


def stored_document(report: QuantizeReport) -> dict[str, Any]:
    """Return the document that a commit stores: without its version, with histograms of the worst arrays only."""
    worst = {a.path for a in report.worst[:_STORED_HISTOGRAMS]}
    document = report.document()
    del document["version"]
    for row in document["arrays"]:
        if row["path"] not in worst:
            row.pop("exponents", None)
    return document


def read_report(snapshot: Snapshot) -> QuantizeReport:
    """Return the report that a quantized commit stores; raise `NotFound` for any other commit."""
    document = snapshot.reserved_attributes().get("quantization")
    if not isinstance(document, Mapping):
        raise NotFound(
            f"{snapshot.location} has no report, since it is not a quantized copy; make one with tstore.quantize "
            "(in a shell, tstore quantize) or pass the version or tag of one, as tstore log lists them"
        )
    with parsing(f"version {snapshot.version}: its report"):
        arrays = [_parse_row(row) for row in document["arrays"]]
        texts = _typed((document["tag"], document["request"]), tuple[str, str])
        source = _typed(document["source"], int)
        return QuantizeReport(snapshot.version, texts[0], source, arrays, texts[1])


def _parse_row(row: Mapping[str, Any]) -> QuantizedArray:
    """Return the array of a row of a stored document; null, which stands for infinity or NaN, becomes infinity."""
    fields = {name: row[name] for name in QuantizedArray._fields if name in row}
    for name in _UNBOUNDED:
        fields[name] = math.inf if fields[name] is None else fields[name]
    if fields["format"] is not None:
        exmy.Format(fields["format"])  # raises ValueError or TypeError
    if "exponents" in fields:
        lowest, counts = fields["exponents"]
        fields["exponents"] = (lowest, list(counts))
    array = _typed(tuple(QuantizedArray(**fields)), QuantizedArray)
    sizes = array.values, array.bytes_before, array.bytes_after, array.signal, array.noise
    if min(sizes) < 0 or not 0 <= array.clipped <= 1:
        raise ValueError(f"a size, a sum of squares or a share of {quote(array.path)} is out of its range")
    return array


def _typed(value: Any, expected: type[T]) -> T:
    """Return a value from a stored document; raise `ValueError` if it has another type."""
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


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
    """Plot the errors and sizes of the encoded arrays, and the exponents of those with the lowest SQNR.

    The suffix of the file is its format (.png, .svg, .pdf). Raise `InvalidArgument` as `check_plot` does, and if
    the file can't be written.
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
        f"{len(report.encoded)} arrays encoded, {exact} exact",
        parse_math=False,
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
    axes.set_title(f"{array.path}\n{array.format}, {array.sqnr:.1f} dB", fontsize="small", parse_math=False)
    axes.set_xlabel("floor(log2 |x|)", fontsize="small")
    axes.set_ylabel("% of values", fontsize="small")
    axes.tick_params(labelsize="small")
