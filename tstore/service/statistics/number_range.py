"""The magnitudes that a dtype, or a format with the scales of stored chunks, can represent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import exmy
import ml_dtypes
import numpy as np

from tstore.core.data.exmy_chunks import PackedRead, read_packed_chunks
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.dtypes import is_integer
from tstore.core.format.plain_text import finite_or_none
from tstore.core.format.tree.node import Node
from tstore.core.snapshot import Snapshot

__all__ = ["NumberRange", "dtype_range", "stored_range"]

_CHUNKS = 4  # chunks whose scales are read
_CHUNK_BYTES = 8 << 20  # encoded bytes read for scales


class NumberRange(NamedTuple):
    """The smallest magnitude above 0 and the largest that stored numbers can have."""

    name: str
    """The dtype or the format."""
    smallest: float
    smallest_normal: float
    """The least magnitude with all mantissa bits; smaller ones are less precise."""
    largest: float

    def document(self) -> dict[str, Any]:
        """Return the range as JSON values."""
        return {
            "name": self.name,
            "smallest": self.smallest,
            "smallest_normal": self.smallest_normal,
            "largest": finite_or_none(self.largest),
        }


def dtype_range(dtype: np.dtype[Any]) -> NumberRange | None:
    """Return the range of a dtype; None for booleans."""
    if dtype.kind == "b":
        return None
    if is_integer(dtype):
        integers = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        largest = float(max(-int(integers.min), int(integers.max)))
        return NumberRange(dtype.name, 1.0, 1.0, largest)
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    info: Any = ml_dtypes.finfo(part)  # type: ignore[no-untyped-call]
    with np.errstate(all="ignore"):
        limits = [float(x) for x in (info.smallest_subnormal, info.smallest_normal, info.max)]
    return NumberRange(dtype.name, *limits)


async def stored_range(snapshot: Snapshot, node: Node, numbers: Sequence[int]) -> NumberRange | None:
    """Return the range of an array's format with the scales of some of these chunks, which are stored.

    Return None if the array is not in an eXmY format.
    """
    meta: ArrayMeta = node.meta
    if meta.chain.exmy_codec is None:
        return None
    most = max(1, min(_CHUNKS, _CHUNK_BYTES // max(1, meta.encoded_size)))
    chosen = [numbers[i * len(numbers) // most] for i in range(most)] if len(numbers) > most else list(numbers)
    if not chosen:
        return None
    read = PackedRead(node.path, meta, node, sorted(set(chosen)))
    [chunks] = await read_packed_chunks(snapshot.log.storage, [read])
    factors = np.concatenate([_factors(q) for q in chunks])
    factors = factors[factors > 0]
    if not factors.size:
        return None
    f = chunks[0].format
    low, high = float(factors.min()), float(factors.max())
    smallest, largest = f.smallest_subnormal * low, f.max * high
    normal = smallest if f.smallest_normal is None else f.smallest_normal * high
    return NumberRange(f.standard.name, smallest, min(normal, largest), largest) if largest < math.inf else None


def _factors(q: exmy.Quantized) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the factor of each group of a chunk."""
    if q.scales is not None:
        return q.scales.ravel().astype(np.float64)
    return np.ldexp(1.0, -q.offsets.ravel().astype(np.int64))
