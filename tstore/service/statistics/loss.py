"""The error of a quantized array against its source: where it is worst, and the errors of other formats."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.array import Array
from tstore.core.format.arguments import checked_budget, quote
from tstore.core.format.paths import checked_path
from tstore.core.format.plain_text import finite_or_none, text_table
from tstore.core.runtime.pool import run
from tstore.core.steps import copy_snapshot
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, NotFound
from tstore.quantization.report import QuantizedArray, read_report
from tstore.service.statistics.numbers import as_floats, check_numbers
from tstore.service.statistics.reading import (
    SAMPLE_BYTES,
    Batch,
    Coverage,
    Region,
    SampleCounts,
    parts,
    sample_of,
)
from tstore.service.statistics.results import RESULTS, result_key
from tstore.service.statistics.strips import StripSums

__all__ = ["OtherFormat", "QuantizationLoss", "StripLoss", "quantization_loss"]

_REGION = 1 << 14  # values per region when searching for the worst SQNR
_SURVEYED = 1 << 18  # values used to measure other formats
_BLOCKS = (32, 16)  # values that share an offset in another format, if they divide the rows
_MAX_OTHERS = 8
_WIDTHS = range(2, 17)  # the widths of eXmY formats


@dataclass(frozen=True, eq=False)
class StripLoss:
    """The SQNR of strips of adjacent rows or columns in dB: NaN for a strip that was not read."""

    axis: int
    bounds: npt.NDArray[np.int64]
    """The first index of each strip, and the length of the axis."""
    sqnr: npt.NDArray[np.float64]

    @property
    def worst(self) -> slice | None:
        """The strip with the lowest SQNR; None if none was read."""
        if np.isnan(self.sqnr).all():
            return None
        i = int(np.nanargmin(self.sqnr))
        return slice(int(self.bounds[i]), int(self.bounds[i + 1]))

    def document(self) -> dict[str, Any]:
        """Return the strips as JSON values, with None for infinity and NaN."""
        sqnr = [finite_or_none(x) for x in self.sqnr.tolist()]
        return {"axis": self.axis, "bounds": self.bounds.tolist(), "sqnr_db": sqnr}


class OtherFormat(NamedTuple):
    """A packed format in which an array might have been stored, and its error on a sample of the source.

    `granularity` says which values would share an offset, as in `QuantizedArray`.
    """

    format: str
    granularity: str
    bits_per_value: float
    sqnr: float
    clipped: float


@dataclass(frozen=True, eq=False)
class QuantizationLoss:
    """The error of a quantized array against its source: the result of `tstore.quantization_loss`."""

    path: str
    """The path of the array."""
    version: int
    """The version of the quantized copy."""
    source: int
    """The version from which the array was quantized."""
    quantized: QuantizedArray
    """The row of the quantization's report: format, size, and the error and clipped share of all values."""
    coverage: Coverage
    """How many of the values were read."""
    difference: exmy.Difference
    """The error of the values that were read."""
    worst: Region | None
    """The region with the lowest SQNR, of those of at most 16,384 values that were read."""
    worst_sqnr: float
    """The SQNR of this region in dB; NaN without one."""
    rows: StripLoss | None
    """The errors of the rows, which are indices along the last axis but one; None without such an axis."""
    columns: StripLoss | None
    """The errors of the columns, which are indices along the last axis; None for an array without axes."""
    others: tuple[OtherFormat, ...]
    """Packed formats of about the same size and their error on values of the source, the best first."""

    @property
    def sqnr(self) -> float:
        """The SQNR of the values that were read, in dB."""
        return self.difference.sqnr

    def __repr__(self) -> str:
        return (
            f"<tstore.QuantizationLoss {self.path!r} {self.quantized.format}, "
            f"{self.quantized.bits_per_value:.2f} bits/value: SQNR {self.sqnr:.1f} dB, "
            f"{self.quantized.clipped:.2%} clipped, of {self.coverage}>"
        )

    def table(self) -> str:
        """Return the array's format and other formats of its size as lines of text."""
        rows = [("format", "bits/value", "SQNR dB", "clipped")]
        own = self.quantized
        cells = (f"{own.bits_per_value:.2f}", f"{self.sqnr:.1f}", f"{own.clipped:.2%}")
        rows.append((f"{own.format} {own.coding} (stored)", *cells))
        for other in self.others:
            cells = (f"{other.bits_per_value:.2f}", f"{other.sqnr:.1f}", f"{other.clipped:.2%}")
            rows.append((f"{other.format} per {other.granularity}", *cells))
        return f"{self!r}\n{text_table(rows)}"

    def document(self) -> dict[str, Any]:
        """Return the error as JSON values, with None for infinity and NaN."""
        own = self.quantized
        return {
            "path": self.path,
            "version": self.version,
            "source": self.source,
            "format": own.format,
            "coding": own.coding,
            "granularity": own.granularity,
            "bits_per_value": own.bits_per_value,
            "clipped": own.clipped,
            "coverage": self.coverage.document(),
            "sqnr_db": finite_or_none(self.sqnr),
            "largest_error": finite_or_none(self.difference.largest_error),
            "largest_relative": finite_or_none(self.difference.largest_relative),
            "worst": None if self.worst is None else [[side.start, side.stop] for side in self.worst],
            "worst_sqnr_db": finite_or_none(self.worst_sqnr),
            "rows": None if self.rows is None else self.rows.document(),
            "columns": None if self.columns is None else self.columns.document(),
            "others": [
                {
                    "format": c.format,
                    "granularity": c.granularity,
                    "bits_per_value": c.bits_per_value,
                    "sqnr_db": finite_or_none(c.sqnr),
                    "clipped": c.clipped,
                }
                for c in self.others
            ],
        }


async def quantization_loss(
    store: str | os.PathLike[str] | Store,
    path: str,
    at: int | str | None = None,
    *,
    budget: int | None = SAMPLE_BYTES,
) -> QuantizationLoss:
    """Return the error of an array of a quantized copy against the version from which it was quantized.

    The region with the lowest SQNR, and the SQNR of rows and columns, are those of the values that are read; other
    formats of about the same size are measured on some of them. Results are cached by the checksums of the chunks.

    Parameters
    ----------
    path, at
        The array, and the version or tag of the quantized copy, by default the newest copy.
    budget
        Bytes of values of the array to read, by default 8 MiB, and as many values of the source; None reads all.

    Raises
    ------
    `NotFound` if the version is not a quantized copy or has no such array, its subclass `SnapshotExpired` if the
    source has expired, `InvalidArgument` if the array is not quantized, and what `summarize` raises.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-loss", {"w": np.random.randn(64, 64)}, step=7)
    >>> _ = tstore.quantize("memory://of-loss", {"w": "e4m3"})
    >>> tstore.quantization_loss("memory://of-loss", "w").sqnr > 30
    True
    """
    budget = checked_budget(budget)
    path = checked_path(path)
    async with opened(store, "r") as target:
        after = await copy_snapshot(target, at)
        report = read_report(after)
        view = await after.array(path)
        row = next((row for row in report.arrays if row.path == path), None)
        if row is None:
            raise NotFound(f"{after.location}: the report of its quantization has no array {quote(path)}")
        if row.format is None:
            raise InvalidArgument(f"{path} is exact in version {after.version}{row.reason and f' ({row.reason})'}")
        before = await (await target.snapshot(report.source)).array(path)
        if before.shape != view.shape:
            raise InvalidArgument(
                f"{path} has the shape {view.shape} in version {after.version}, and {before.shape} in its source, "
                f"version {report.source}"
            )
        check_numbers(path, before.dtype)
        sample = await sample_of(view, budget)
        keys = [
            await sample.key("loss", tuple(row._replace(path=""))),
            await (await sample_of(before, budget)).key("loss"),
        ]
        key = None if None in keys else result_key([k for k in keys if k is not None])
        cached = None if key is None else RESULTS.get(key)
        if isinstance(cached, QuantizationLoss):
            return dataclasses.replace(
                cached, path=path, version=after.version, source=report.source, quantized=row
            )
        measured = _Measured(view)
        counts = SampleCounts()
        async for batch in sample.batches(counts, before):
            await run(measured.add, batch)
        result = QuantizationLoss(
            path,
            after.version,
            report.source,
            row,
            counts.coverage(view),
            measured.difference,
            measured.worst,
            measured.worst_sqnr,
            *measured.strips(),
            await run(measured.others, row, view),
        )
        if key is not None:
            RESULTS.put(key, result, 32 << 10)
        return result


class _Measured:
    """The errors of the tiles that were added."""

    def __init__(self, view: Array) -> None:
        self.difference = exmy.Difference(0, 0.0, 0.0, 0.0, 0.0)
        self.worst: Region | None = None
        self.worst_sqnr = math.nan
        axes = range(max(0, view.ndim - 2), view.ndim)
        self._sums = {axis: [StripSums(axis, view.shape[axis]) for _ in range(2)] for axis in axes}
        self._ndim = view.ndim
        self._kept: list[npt.NDArray[Any]] = []
        self._room = _SURVEYED

    def add(self, batch: Batch) -> None:
        """Add tiles of the quantized array, with those of its source."""
        for region, decoded, original in batch:
            for starts, [y, x] in parts(region, decoded, original, most=_REGION):
                difference = exmy.compare(x, y)
                self.difference += difference
                if difference.count and not self.worst_sqnr <= difference.sqnr:
                    self.worst = tuple(slice(a, a + n) for a, n in zip(starts, x.shape, strict=True))
                    self.worst_sqnr = difference.sqnr
                signal = as_floats(x).astype(np.float64)
                with np.errstate(all="ignore"):
                    noise = signal - as_floats(y)
                finite = np.isfinite(noise)
                for signals, noises in self._sums.values():
                    signals.add(starts, signal, finite)
                    noises.add(starts, noise, finite)
            self._keep(original)

    def _keep(self, values: npt.NDArray[Any]) -> None:
        """Keep rows of a tile of the source, as many as there is room for."""
        rows = values.reshape(-1, values.shape[-1] if values.ndim else 1)
        if rows.size and (not self._kept or rows.shape[1] == self._kept[0].shape[1]):
            taken = rows[: max(not self._kept, min(len(rows), self._room // rows.shape[1]))]
            self._room -= taken.size
            self._kept.append(taken.copy())

    def strips(self) -> tuple[StripLoss | None, StripLoss | None]:
        """Return the SQNR of the rows and of the columns."""
        losses: list[StripLoss | None] = []
        for axis, (signals, noises) in self._sums.items():
            signal, noise = signals.strips(), noises.strips()
            with np.errstate(all="ignore"):
                losses.append(StripLoss(axis, signal.bounds, 20 * np.log10(signal.norms / noise.norms)))
        rows, columns = [None] * (2 - len(losses)) + losses
        return rows, columns

    def others(self, row: QuantizedArray, view: Array) -> tuple[OtherFormat, ...]:
        """Return the packed formats of about the size of a row, by their error on the kept values.

        They have one offset for each group of values of the stored format, or for the array, and for each block.
        """
        width = min(max(_WIDTHS), max(min(_WIDTHS), round(row.bits_per_value)))
        codec: dict[str, Any] = next((c.get("configuration", {}) for c in view.codecs if c["name"] == "exmy"), {})
        values = np.concatenate(self._kept) if self._kept else np.zeros((0, 1), np.float32)
        measured: list[OtherFormat] = []
        blocks = [b for b in (codec.get("block"), *_BLOCKS) if b and values.shape[1] % b == 0]
        for block in (0, *blocks[:1]):
            rows = bool(block) or codec.get("axis") is not None
            granularity = f"block of {block}" if block else "row" if rows else "tensor"
            with contextlib.suppress(exmy.FormatError):  # values beyond the range of every format
                candidates = exmy.survey(
                    values, [width], axis=1 if rows else None, block=block or None, nonfinite="saturate"
                )
                measured += [
                    OtherFormat(c.format.standard.name, granularity, c.bits_per_value, c.sqnr, c.clipped)
                    for c in candidates
                ]
        measured.sort(key=lambda other: -other.sqnr)
        return tuple(measured[:_MAX_OTHERS])
