"""Metadata of an array in new codecs, with new chunks if the present ones would cut rows or blocks; pure."""

from __future__ import annotations

from tstore.format.array_metadata import ArrayMeta
from tstore.format.codecs import Codecs, as_configuration, is_exmy
from tstore.format.grid import default_chunks

__all__ = ["encoded_meta", "stored_bytes"]


def encoded_meta(old: ArrayMeta, codecs: Codecs) -> ArrayMeta:
    """Return the metadata of the same array in other codecs; raise `InvalidArgument` if they do not fit it."""
    chunks = old.chunks
    if is_exmy(codecs) and old.shape:
        settings = as_configuration(codecs)
        axis, block = settings.get("axis"), settings.get("block")
        if axis is not None or block is not None:
            chunks = _whole_groups(old, -1 if axis is None else axis, block)
    same = (old.fill_value, old.attributes, old.dimension_names)
    return ArrayMeta.new(old.shape, old.dtype, chunks, codecs, *same, sparse=old.sparse)


def _whole_groups(old: ArrayMeta, axis: int, block: int | None) -> tuple[int, ...]:
    """Return chunks of whole rows or blocks along an axis: the old ones, or others of about their size."""
    k = axis % len(old.shape)
    if old.chunks[k] == old.shape[k] or (block is not None and old.chunks[k] % block == 0):
        return old.chunks
    # default_chunks cuts leading axes first, so that the axis of the rows comes last
    order = [*(i for i in range(len(old.shape)) if i != k), k]
    cut = default_chunks([old.shape[i] for i in order], old.dtype.itemsize)
    chunks = dict(zip(order, cut, strict=True))
    chunks[k] = old.shape[k] if block is None else min(old.shape[k], -(-chunks[k] // block) * block)
    return tuple(chunks[i] for i in range(len(old.shape)))


def stored_bytes(meta: ArrayMeta) -> int:
    """Return the encoded bytes of all chunks, including the padding at the edges, before any compressors."""
    return meta.encoded_bound * meta.chunk_count
