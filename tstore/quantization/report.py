"""Reports of a quantization: the size and measured error of each array, as data and as stored in the commit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import exmy

from tstore.errors import NotFound, parsing
from tstore.snapshot import Snapshot

__all__ = ["QuantizeReport", "QuantizedArray", "read_report", "stored_document"]

_STORED_HISTOGRAMS = 8
"""The number of arrays, those with the lowest SQNR, whose exponent histograms are stored in the commit."""

_UNBOUNDED = ("signal", "noise", "largest_error", "largest_relative")
"""Fields that may be infinite or NaN, which JSON can't express."""

_NO_DIFFERENCE = exmy.Difference(0, 0.0, 0.0, 0.0, 0.0)


class QuantizedArray(NamedTuple):
    """The format and error of one array, measured on its stored bytes, read back and decoded.

    `format` is None if the array is exact; `reason` then says why, unless a rule asked for it. `granularity` says
    which values share an offset: "tensor", "row", or a "block of 32". `bytes_before` and `bytes_after` are
    encoded bytes with the codec's metadata. `signal` and `noise` are the sums of the squared values and errors.
    `clipped` is the fraction of values beyond the largest that their format and scale can represent. `exponents`
    is (lowest, counts): how many values have floor(log2 |x|) = lowest, lowest + 1, …; None if not stored.
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

    def __repr__(self) -> str:
        coded = f"{self.format} per {self.granularity}, SQNR {self.sqnr:.1f} dB" if self.format else "exact"
        return f"<QuantizedArray {self.path}: {coded}, {self.bits_per_value:.2f} bits/value>"

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
    """The version and tag of a quantized copy of `source`, the request in words, and a row for each array."""

    version: int
    tag: str
    source: int
    arrays: list[QuantizedArray]
    request: str = ""

    def __repr__(self) -> str:
        """Return one line with the commit and the totals; `arrays`, `worst` and `document()` have the rest."""
        return (
            f"<QuantizeReport version {self.version} ({self.tag}), from version {self.source}: "
            f"{len(self.encoded)} of {len(self.arrays)} arrays encoded, "
            f"{self.bits_per_value:.2f} bits/value, SQNR {self.sqnr:.1f} dB>"
        )

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
                "sqnr_db": _finite(self.sqnr),
                "largest_error": _finite(self.largest_error),
                "largest_relative": _finite(self.largest_relative),
                "clipped": self.clipped,
            },
            "arrays": [
                {
                    **{k: v for k, v in a._asdict().items() if k != "exponents"},
                    **{name: _finite(getattr(a, name)) for name in _UNBOUNDED},
                    "bits_per_value": a.bits_per_value,
                    "sqnr_db": _finite(a.sqnr),
                    **({} if a.exponents is None else {"exponents": a.exponents}),
                }
                for a in self.arrays
            ],
        }


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
            f"version {snapshot.version} has no report, because it is not a commit of tstore.quantize; pass the "
            "version or tag of one, as tstore log lists them"
        )
    with parsing(f"version {snapshot.version}: its report"):
        arrays = [_array(row) for row in document["arrays"]]
        return QuantizeReport(snapshot.version, document["tag"], document["source"], arrays, document["request"])


def _array(row: Mapping[str, Any]) -> QuantizedArray:
    fields = {name: row[name] for name in QuantizedArray._fields if name in row}
    for name in _UNBOUNDED:
        fields[name] = math.inf if fields[name] is None else fields[name]
    if fields["format"] is not None:
        exmy.Format(fields["format"])  # raises ValueError or TypeError
    if "exponents" in fields:
        lowest, counts = fields["exponents"]
        fields["exponents"] = (lowest, list(counts))
    return QuantizedArray(**fields)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
