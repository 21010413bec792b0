"""The statistics of one array, or of a view of one: numbers, histograms, and the norms of rows and columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import exmy
import numpy as np

from tstore.core.array import Array
from tstore.core.format.arguments import checked_budget, quote
from tstore.core.format.arrays.dtypes import dtype_text, is_integer
from tstore.core.format.arrays.samples import Tiling
from tstore.core.format.plain_text import finite_or_none, text_table
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument
from tstore.service.statistics.histograms import Histogram, ValueBins, value_bins
from tstore.service.statistics.moments import Moments
from tstore.service.statistics.number_range import NumberRange, dtype_range, stored_range
from tstore.service.statistics.numbers import Floats, as_floats, check_numbers
from tstore.service.statistics.reading import SAMPLE_BYTES, Batch, Coverage, Sample, SampleCounts, parts, sample_of
from tstore.service.statistics.results import RESULTS
from tstore.service.statistics.strips import Strips, StripSums

__all__ = ["Summary", "summarize"]

_PREVIEW_BYTES = 8 << 20  # bytes of values used to choose the bounds of a histogram
_MAX_BINS = 4096


@dataclass(frozen=True, eq=False)
class Summary:
    """The statistics of an array or view: the result of `tstore.summarize`.

    They describe the values that were read (`coverage`). `minimum`, `maximum`, `mean`, `rms`, histograms and
    norms are of finite values only; for complex numbers, of their magnitudes. Without finite values they are NaN.
    """

    path: str
    """The path of the array."""
    shape: tuple[int, ...]
    """The shape of the view."""
    dtype: str
    """The dtype of the values as they are read."""
    coverage: Coverage
    zeros: int
    """The number of values that are zero."""
    negative: int
    """The number of finite values below zero."""
    nonfinite: int
    """The number of values that are NaN or infinite."""
    minimum: float
    """The least value; an int for integers."""
    maximum: float
    """The greatest value; an int for integers."""
    mean: float
    rms: float
    """The root mean square."""
    histogram: Histogram
    """The number of values between bounds, which exclude outliers."""
    exponents: exmy.Exponents
    """The number of values by floor(log2 |x|)."""
    rows: Strips | None
    """The norms of the rows: of the indices along the last axis but one. None without such an axis."""
    columns: Strips | None
    """The norms of the columns: of the indices along the last axis. None for an array without axes."""
    range: NumberRange | None
    """The magnitudes that the stored numbers can have; of an eXmY array, with the scales of some of its chunks."""

    def __repr__(self) -> str:
        return (
            f"<tstore.Summary {self.path!r} {self.dtype} {self.shape}: {self.minimum:.4g} … {self.maximum:.4g}, "
            f"mean {self.mean:.4g}, rms {self.rms:.4g}, {self.nonfinite:,} not finite, of {self.coverage}>"
        )

    def table(self) -> str:
        """Return the numbers as lines of text."""
        read = max(1, self.coverage.values_read)
        rows = [
            ("values", str(self.coverage)),
            ("zeros", f"{self.zeros:,} ({self.zeros / read:.2%})"),
            ("negative", f"{self.negative:,} ({self.negative / read:.2%})"),
            ("not finite", f"{self.nonfinite:,}"),
            ("minimum", f"{self.minimum:.6g}"),
            ("maximum", f"{self.maximum:.6g}"),
            ("mean", f"{self.mean:.6g}"),
            ("rms", f"{self.rms:.6g}"),
        ]
        if self.exponents.counts.size:
            rows.append(("exponents", f"{self.exponents.lowest} … {self.exponents.highest}"))
        return f"{self.path} {self.dtype} {self.shape}\n{text_table(rows)}"

    def document(self) -> dict[str, Any]:
        """Return the statistics as JSON values, with None for infinity and NaN."""
        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "coverage": self.coverage.document(),
            "zeros": self.zeros,
            "negative": self.negative,
            "nonfinite": self.nonfinite,
            "minimum": finite_or_none(self.minimum),
            "maximum": finite_or_none(self.maximum),
            "mean": finite_or_none(self.mean),
            "rms": finite_or_none(self.rms),
            "histogram": self.histogram.document(),
            "exponents": {"lowest": self.exponents.lowest, "counts": self.exponents.counts.tolist()},
            "rows": None if self.rows is None else self.rows.document(),
            "columns": None if self.columns is None else self.columns.document(),
            "range": None if self.range is None else self.range.document(),
        }


async def summarize(
    array: Array,
    *,
    budget: int | None = SAMPLE_BYTES,
    rows: int | None = None,
    columns: int | None = None,
    bins: int = 64,
) -> Summary:
    """Return the statistics of an array or a view: counts, extremes, mean, histograms, norms of rows and columns.

    Memory is bounded, and so is the time if there is a budget. Results are cached by the checksums of the chunks.

    Parameters
    ----------
    array
        An array of numbers or booleans. Complex numbers count by their magnitude.
    budget
        Bytes of values to read, by default 8 MiB: tiles of chunks that are spread over the array, always the same
        ones. None reads all values. `Summary.coverage` tells what was read.
    rows, columns
        The axes whose norms to return, by default the last two, in at most 256 strips of adjacent indices each.
    bins
        The number of bins of the histogram of values, at most 4,096. Integers between close bounds have a bin
        each.

    Raises
    ------
    `InvalidArgument` (values that are not numbers, an axis that does not exist, chunks too long to decode for a
    part), `NotFound` if a chunk was never written and the array is not sparse, `Corrupt`, `SnapshotExpired`.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-summarize", {"w": np.array([[0.0, 3.0], [4.0, -1.0]])}, step=7)
    >>> summary = tstore.summarize(tstore.open("memory://of-summarize").snapshot().array("w"))
    >>> summary.minimum, summary.maximum, summary.mean, summary.zeros
    (-1.0, 4.0, 1.5, 1)
    """
    if not isinstance(array, Array):
        raise InvalidArgument(f"{quote(array)} is not an array of a snapshot or a transaction, nor a view of one")
    check_numbers(array.path, array.dtype)
    budget = checked_budget(budget)
    if isinstance(bins, bool) or not isinstance(bins, int | np.integer) or not 1 <= bins <= _MAX_BINS:
        raise InvalidArgument(f"bins={quote(bins)}: expected a number from 1 to {_MAX_BINS}")
    axes = _axis(array, "rows", rows, 2), _axis(array, "columns", columns, 1)
    sample = await sample_of(array, budget)
    key = await sample.key("summary", axes, int(bins))
    cached = None if key is None else RESULTS.get(key)
    if isinstance(cached, Summary):
        return dataclasses.replace(cached, path=array.path)
    summary = await _Summing(sample, axes, int(bins)).summary()
    if key is not None:
        RESULTS.put(key, summary, _size(summary))
    return summary


def _axis(array: Array, name: str, axis: int | None, default: int) -> int | None:
    """Return an axis as a non-negative number; by default the axis -`default`, if there is one."""
    if axis is None:
        return array.ndim - default if array.ndim >= default else None
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -array.ndim <= axis < array.ndim:
        raise InvalidArgument(
            f"{array.path}: {name}={quote(axis)}: expected an axis of the array, which has {array.ndim}"
        )
    return int(axis) % array.ndim


def _size(summary: Summary) -> int:
    """Return about how many bytes a summary takes."""
    arrays = [summary.histogram.edges, summary.histogram.counts, summary.exponents.counts]
    for strips in (summary.rows, summary.columns):
        if strips is not None:
            arrays += [strips.bounds, strips.counts, strips.norms]
    return 4096 + sum(array.nbytes for array in arrays)


class _Summing:
    """A summary being computed."""

    def __init__(self, sample: Sample, axes: tuple[int | None, int | None], bins: int) -> None:
        self._sample = sample
        self._view = view = sample.view
        self._bins = bins
        self._moments = Moments()
        self._strips = [None if axis is None else StripSums(axis, view.shape[axis]) for axis in axes]
        self._exponents = exmy.Exponents(0, np.zeros(0, np.int64), 0)
        self._integer = view.dtype.kind == "b" or is_integer(view.dtype)
        self._extremes: list[int] = []  # exact extremes of integers
        self._histogram: ValueBins | None = None

    async def summary(self) -> Summary:
        """Read the sample, and return its statistics."""
        view, tiling = self._view, self._sample.tiling
        counts = SampleCounts()
        kept: list[Floats] = []
        if tiling.sampled_values * view.dtype.itemsize > _PREVIEW_BYTES:
            preview = Tiling.of(view.shape, view.chunks, view.dtype.itemsize, _PREVIEW_BYTES)
            async for batch in Sample(view, preview, None, ()).batches(SampleCounts()):
                await run(_keep_finite, kept, batch)
            self._histogram = await run(value_bins, kept, self._bins, 1.0 if self._integer else None)
            async for batch in self._sample.batches(counts):
                await run(self._add, batch)
        else:
            async for batch in self._sample.batches(counts):
                await run(self._add, batch)
                await run(_keep_finite, kept, batch)
            self._histogram = await run(value_bins, kept, self._bins, 1.0 if self._integer else None)
            await run(self._count, kept)
        moments = self._moments
        extremes: Sequence[float] = self._extremes or [moments.minimum, moments.maximum]
        rows, columns = [None if strips is None else strips.strips() for strips in self._strips]
        return Summary(
            view.path,
            view.shape,
            dtype_text(view.dtype),
            counts.coverage(view),
            moments.zeros,
            moments.negative,
            moments.nonfinite,
            min(extremes),
            max(extremes),
            moments.mean,
            moments.rms,
            self._histogram.histogram(),
            self._exponents,
            rows,
            columns,
            await self._range(),
        )

    async def _range(self) -> NumberRange | None:
        node, source = self._sample.node, self._sample.source
        if node is not None and isinstance(source, Snapshot) and self._sample.chunks:
            stored = await stored_range(source, node, self._sample.chunks)
            if stored is not None:
                return stored
        return dtype_range(self._view.dtype)

    def _add(self, batch: Batch) -> None:
        for region, tile, _ in batch:
            for starts, [values] in parts(region, tile):
                if self._integer and values.size:
                    exact = values if values.dtype.kind in "iu" else values.astype(np.int16)
                    self._extremes = [
                        min([int(exact.min()), *self._extremes]),
                        max([int(exact.max()), *self._extremes]),
                    ]
                floats = as_floats(values)
                finite = np.isfinite(floats)
                self._moments.add(floats, finite)
                self._exponents += exmy.exponents(np.ascontiguousarray(floats), nonfinite="saturate")
                for strips in self._strips:
                    if strips is not None:
                        strips.add(starts, floats, finite)
                if self._histogram is not None:
                    self._histogram.add(floats[finite])

    def _count(self, kept: Sequence[Floats]) -> None:
        assert self._histogram is not None
        for values in kept:
            self._histogram.add(values)


def _keep_finite(kept: list[Floats], batch: Batch) -> None:
    for region, tile, _ in batch:
        for _, [values] in parts(region, tile):
            floats = as_floats(values)
            kept.append(floats[np.isfinite(floats)])
