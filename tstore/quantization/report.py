"""What quantizing a checkpoint cost and saved, array by array: as plain data, and as the commit keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tstore.errors import NotFound
from tstore.snapshot import Snapshot

__all__ = ["QuantizeReport", "QuantizedArray", "stored_form", "stored_report"]

_HISTOGRAMS = 8
"""Arrays, those of the least SQNR, whose exponent histogram is kept with the commit."""


class QuantizedArray(NamedTuple):
    """What became of one array: measured on what was stored, read back and decoded.

    `format` is None where not a bit was lost, and `reason` says why if that was not asked for. `granularity`
    is what shares an offset: "tensor", "row", "block of 32", or "chunk". `bytes_before` and `bytes_after` are
    encoded bytes with the codec's metadata. `clipped` is the share of values beyond the largest of their group.
    `exponents` counts floor(log2 |x|) of the values from `lowest` on: (lowest, counts), None where not kept.
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

    @property
    def sqnr(self) -> float:
        """10·log10(Σx² / Σ(x−y)²) in dB; infinite for an exact copy."""
        return _decibel(self.signal, self.noise)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, metadata of the codec included."""
        return 8 * self.bytes_after / self.values if self.values else 0.0


class QuantizeReport(NamedTuple):
    """The commit that holds the quantized arrays, and what became of each."""

    version: int
    tag: str
    source: int
    arrays: list[QuantizedArray]

    @property
    def encoded(self) -> list[QuantizedArray]:
        """The arrays that lost something."""
        return [a for a in self.arrays if a.format]

    @property
    def worst(self) -> list[QuantizedArray]:
        """The encoded arrays, those of the least SQNR first."""
        return sorted(self.encoded, key=lambda a: a.sqnr)

    @property
    def sqnr(self) -> float:
        """Over all encoded arrays together, in dB."""
        return _decibel(sum(a.signal for a in self.encoded), sum(a.noise for a in self.encoded))

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
        """The largest |x − y| of all arrays."""
        return max((a.largest_error for a in self.encoded), default=0.0)

    @property
    def largest_relative(self) -> float:
        """The largest |x − y| / |x| of all values that are not zero."""
        return max((a.largest_relative for a in self.encoded), default=0.0)

    @property
    def clipped(self) -> float:
        """The share of clipped values among those of encoded arrays."""
        values = sum(a.values for a in self.encoded)
        return sum(a.clipped * a.values for a in self.encoded) / values if values else 0.0

    def document(self) -> dict[str, Any]:
        """The report as JSON has it: no infinities (None), totals beside the arrays."""
        return {
            "version": self.version,
            "tag": self.tag,
            "source": self.source,
            "total": {
                "values": sum(a.values for a in self.arrays),
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "bits_per_value": self.bits_per_value,
                "sqnr_db": _finite(self.sqnr),
                "largest_error": _finite(self.largest_error),
                "largest_relative": _finite(self.largest_relative),
                "clipped": self.clipped,
            },
            "arrays": [
                {
                    **{k: v for k, v in a._asdict().items() if k != "exponents"},
                    "largest_error": _finite(a.largest_error),
                    "largest_relative": _finite(a.largest_relative),
                    "bits_per_value": a.bits_per_value,
                    "sqnr_db": _finite(a.sqnr),
                    **({} if a.exponents is None else {"exponents": a.exponents}),
                }
                for a in self.arrays
            ],
        }


def stored_form(report: QuantizeReport) -> dict[str, Any]:
    """What the commit keeps of a report: its version is not known yet, histograms of the worst arrays only."""
    worst = {a.path for a in report.worst[:_HISTOGRAMS]}
    document = report.document()
    del document["version"]
    for row in document["arrays"]:
        if row["path"] not in worst:
            row.pop("exponents", None)
    return document


def stored_report(snapshot: Snapshot) -> QuantizeReport:
    """The report that is stored in a quantized commit; `NotFound` for any other commit."""
    found = snapshot.attributes().get("tstore", {}).get("quantization")
    if not isinstance(found, Mapping):
        raise NotFound(
            f"version {snapshot.version} has no report: it is no commit of tstore.quantize; tstore log shows "
            "which are, pass the version or the tag of one"
        )
    return QuantizeReport(
        snapshot.version, found["tag"], found["source"], [_array(row) for row in found["arrays"]]
    )


def _array(row: Mapping[str, Any]) -> QuantizedArray:
    fields = {name: row[name] for name in QuantizedArray._fields if name in row}
    for name in ("largest_error", "largest_relative"):
        fields[name] = math.inf if fields[name] is None else fields[name]
    if "exponents" in fields:
        lowest, counts = fields["exponents"]
        fields["exponents"] = (lowest, list(counts))
    return QuantizedArray(**fields)


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
