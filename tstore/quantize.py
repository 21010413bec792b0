"""Quantized copies of checkpoints: the float arrays of a version in eXmY formats, as a new commit.

The source commit stays. Arrays that no rule encodes are referenced, not copied. The error is measured on what was
really stored: each slab is written, read back and compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tstore.array import Array
from tstore.checkpoint import CodecRules, chosen_snapshot, codec_for
from tstore.codec import ArrayMeta
from tstore.errors import AlreadyExists, InvalidArgument
from tstore.grid import boxes
from tstore.snapshot import Snapshot
from tstore.store import Store, opened
from tstore.transaction import Transaction
from tstore.tree import Node

__all__ = ["QuantizeReport", "QuantizedArray", "quantize"]

_SLAB = 32 << 20


class QuantizedArray(NamedTuple):
    """What became of one array. `sqnr` in dB, infinite where nothing was lost; sizes in stored bytes."""

    path: str
    format: str | None
    values: int
    bytes_before: int
    bytes_after: int
    signal: float
    noise: float

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
    def sqnr(self) -> float:
        """Over all encoded arrays together, in dB."""
        encoded = [a for a in self.arrays if a.format]
        return _decibel(sum(a.signal for a in encoded), sum(a.noise for a in encoded))

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value over all arrays."""
        values = sum(a.values for a in self.arrays)
        return 8 * sum(a.bytes_after for a in self.arrays) / values if values else 0.0


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


async def quantize(
    where: str | os.PathLike[str] | Store,
    formats: CodecRules = "e4m3",
    *,
    at: int | str | None = None,
    tag: str | None = None,
    message: str = "",
) -> QuantizeReport:
    """The report of a new commit in which float arrays are stored in low-bit formats; the source stays.

    `formats` is one format or rules by path pattern, first match first, None for "as it is". `at` is a
    version or tag, by default the newest step. `tag` names the new commit, by default the source's tag (or
    v<version>) with the formats behind it. Integer arrays stay as they are.
    Raises `NotFinite` for NaN or infinity in an array to be encoded, `NotFound`, `InvalidArgument`.
    """
    async with opened(where) as store:
        source = await chosen_snapshot(store, None, at)
        choose = codec_for(formats)
        name = tag or _default_tag(source, formats)
        async with store.transaction(message or f"quantized from version {source.version}", name) as tx:
            if name in (await tx.base()).tags:
                raise AlreadyExists(f"{store.url}: the tag {name!r} is taken; pass another one as tag=…")
            await tx.replace_all(b"")
            rows = []
            for path, node in source.tree.nodes.items():
                if not node.is_array:
                    await tx.create_group(path, node.attributes)
                    continue
                codecs = choose(path, node.meta.dtype)
                if codecs is None:
                    rows.append(await _keep(tx, path, node))
                elif isinstance(codecs, str):
                    rows.append(await _encode(tx, source, path, node, codecs))
                else:
                    raise InvalidArgument(
                        f"{path}: expected the name of an eXmY format, as 'e4m3', not {codecs!r}"
                    )
        assert tx.version is not None
        return QuantizeReport(tx.version, name, source.version, rows)


def _default_tag(source: Snapshot, formats: CodecRules) -> str:
    names = [t for t, v in source.tags.items() if v == source.version] or [f"v{source.version}"]
    used = formats.values() if isinstance(formats, Mapping) else [formats]
    return "/".join([names[0], "-".join(dict.fromkeys(str(u) for u in used if u is not None)) or "copy"])


async def _keep(tx: Transaction, path: str, node: Node) -> QuantizedArray:
    await tx.keep_array(path, node.meta, node.chunks)
    size = _stored(node)
    return QuantizedArray(path, None, math.prod(node.meta.shape), size, size, 0.0, 0.0)


async def _encode(tx: Transaction, source: Snapshot, path: str, node: Node, codecs: str) -> QuantizedArray:
    old = node.meta
    meta = ArrayMeta.of(
        old.shape, old.dtype, old.chunks, codecs, old.fill_value, old.attributes, old.dimension_names
    )
    stored, encoded = await source.array(path), await tx.put_array(path, meta)
    signal = noise = 0.0
    for slab in _slabs(stored, old.dtype.itemsize):
        x = await stored[slab].read()
        await encoded[slab].write(x)
        y = await encoded[slab].read()
        signal += float(np.sum(np.square(x, dtype=np.float64)))
        noise += float(np.sum(np.square(np.subtract(x, y, dtype=np.float64))))
    after = meta.encoded_bound * meta.chunk_count
    return QuantizedArray(path, codecs, math.prod(old.shape), _stored(node), after, signal, noise)


def _stored(node: Node) -> int:
    return int(node.chunks.length.sum())


def _slabs(array: Array, itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of whole chunks of at most `_SLAB` bytes that cover the array."""
    counts: Sequence[int] = [-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True)]
    for box in boxes(counts, _SLAB // max(1, math.prod(array.chunks) * itemsize)):
        yield tuple(
            slice(r.start * c, min(r.stop * c, n)) for r, c, n in zip(box, array.chunks, array.shape, strict=True)
        )
