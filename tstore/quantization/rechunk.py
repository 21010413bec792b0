"""The metadata of an array in other codecs, its chunks cut anew where they would cut rows or blocks; pure."""

from __future__ import annotations

from tstore.format.array_metadata import ArrayMeta
from tstore.format.codecs import Codecs, as_configuration, is_exmy
from tstore.format.grid import default_chunks

__all__ = ["encoded_meta", "stored_bytes"]


def encoded_meta(old: ArrayMeta, codecs: Codecs) -> ArrayMeta:
    """The metadata of the same array in other codecs; `InvalidArgument` where they do not fit it."""
    chunks = old.chunks
    if is_exmy(codecs) and old.shape:
        settings = as_configuration(codecs)
        axis, block = settings.get("axis"), settings.get("block")
        if axis is not None or block is not None:
            chunks = _holding(old, -1 if axis is None else axis, block)
    same = (old.fill_value, old.attributes, old.dimension_names)
    return ArrayMeta.new(old.shape, old.dtype, chunks, codecs, *same, sparse=old.sparse)


def _holding(old: ArrayMeta, axis: int, block: int | None) -> tuple[int, ...]:
    """Chunks that hold whole rows or blocks along an axis, of about the old size where they must change."""
    k = axis % len(old.shape)
    if old.chunks[k] == old.shape[k] or (block is not None and old.chunks[k] % block == 0):
        return old.chunks
    # default_chunks cuts leading axes first: the rows' own goes last
    order = [*(i for i in range(len(old.shape)) if i != k), k]
    cut = default_chunks([old.shape[i] for i in order], old.dtype.itemsize)
    chunks = dict(zip(order, cut, strict=True))
    chunks[k] = old.shape[k] if block is None else min(old.shape[k], -(-chunks[k] // block) * block)
    return tuple(chunks[i] for i in range(len(old.shape)))


def stored_bytes(meta: ArrayMeta) -> int:
    """The encoded bytes of all chunks, filled-up ones included; before compressors, where there are any."""
    return meta.encoded_bound * meta.chunk_count
