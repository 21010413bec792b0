"""The codes of a region of an array as one `exmy.Quantized`, joined from those of its chunks; pure, no I/O.

Each chunk has its own exponent offsets or scales. A region has a single one if all its chunks share it, and
otherwise one per row or per block if these can represent those of the chunks. Codes are moved, never changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import covering_chunks

__all__ = ["Unrepresentable", "join_chunks"]

Region = tuple[slice, ...]


class Unrepresentable(Exception):
    """Raised if no offsets or scales of a region can represent those of its chunks; the text says why."""


def join_chunks(meta: ArrayMeta, region: Region, parts: Sequence[exmy.Quantized]) -> exmy.Quantized:
    """Return the codes of a region from those of the chunks that overlap it, passed in C order.

    Raise `Unrepresentable` if no offsets per row or block of the region can represent those of its chunks.
    """
    codec = meta.chain.exmy_codec
    assert codec is not None
    shape = tuple(side.stop - side.start for side in region)
    if len(parts) == 1 and shape == meta.chunks:
        return parts[0]
    f = codec.format.standard
    if codec.axis is None and codec.block is None and all(_alike(part, parts[0]) for part in parts):
        groups = exmy.Groups.from_shape(shape, None, None)
        offsets = parts[0].offsets if parts else np.zeros((), np.int16)
        scale = parts[0].group_scales if parts else None  # the fixed scale of entropy-coded chunks, or None
        return exmy.Quantized(
            f, groups, offsets, scale, _joined_codes(f.bits, meta, region, parts), meta.dtype.name
        )
    groups = _groups(meta, region, codec)
    offsets = np.zeros(groups.counts, np.int16)
    scales = None if not parts or parts[0].scales is None else np.ones(groups.counts, np.float32)
    for (target, source), part in zip(_overlaps(meta, region), parts, strict=True):
        target, source = _in_groups(target, groups), _in_groups(source, groups)
        offsets[target] = _per_group(part.offsets, part.groups, groups)[source]
        if scales is not None and part.scales is not None:
            scales[target] = _per_group(part.scales, part.groups, groups)[source]
    group_scales = None if scales is None else exmy.GroupScales.from_values(scales)
    codes = _joined_codes(f.bits, meta, region, parts)
    return exmy.Quantized(f, groups, offsets, group_scales, codes, meta.dtype.name)


def _alike(part: exmy.Quantized, other: exmy.Quantized) -> bool:
    """Return whether two chunks have the same offsets and scales."""
    if part.scales is not None and other.scales is not None and not np.array_equal(part.scales, other.scales):
        return False
    return np.array_equal(part.offsets, other.offsets)


def _groups(meta: ArrayMeta, region: Region, codec: exmy.ChunkCodec) -> exmy.Groups:
    """Return the groups of a region that can represent those of its chunks, or raise `Unrepresentable`."""
    shape = tuple(side.stop - side.start for side in region)
    axis = len(shape) - 1 if codec.axis is None else codec.axis % len(shape)
    start, length, chunk = region[axis].start, shape[axis], meta.chunks[axis]
    block = codec.block
    if block is None and len(covering_chunks(region, meta.chunks)[axis]) <= 1:
        return exmy.Groups.from_shape(shape, axis, None)
    # A row that spans several chunks can have several offsets only if the region has offsets per block. Blocks can
    # represent one offset per chunk (`codec.axis` is None), but not one per row of a chunk.
    if block is None and codec.axis is not None:
        raise Unrepresentable(
            f"rows along axis {axis} span several chunks of shape {meta.chunks}, each with its own offsets; "
            "tstore.quantize gives such rows one offset"
        )
    blocks = [b for b in exmy.BLOCKS if all(n % b == 0 for n in (block or chunk, chunk, start, length))]
    if blocks:
        return exmy.Groups.from_shape(shape, axis, blocks[-1])
    if block is not None and length == meta.shape[axis]:
        raise Unrepresentable(f"blocks of {block}, which share an offset, do not divide its length {length}")
    if block is not None:
        raise Unrepresentable(
            f"{start}:{start + length} along axis {axis} cuts blocks of {block}, which share an offset; cut at "
            f"multiples of {block}, or at least of {exmy.BLOCKS[0]}"
        )
    raise Unrepresentable(
        f"no offsets per row or per block can represent those of its chunks, which have the shape {meta.chunks}; "
        "tstore.quantize gives an array one offset, and float scales per row or block if axis= or block= asks for "
        "them"
    )


def _overlaps(meta: ArrayMeta, region: Region) -> Iterator[tuple[Region, Region]]:
    """Yield for each chunk that overlaps a region, in C order, the overlap within the region and the chunk."""
    box = covering_chunks(region, meta.chunks)
    for at in np.ndindex(*(len(side) for side in box)):
        target, source = [], []
        for i, chunks, length, side in zip(at, box, meta.chunks, region, strict=True):
            first = chunks[i] * length
            low, high = max(first, side.start), min(first + length, side.stop)
            target.append(slice(low - side.start, high - side.start))
            source.append(slice(low - first, high - first))
        yield tuple(target), tuple(source)


def _in_groups(region: Region, groups: exmy.Groups) -> Region:
    """Return the groups that cover a region of values, as an index into an array with one element per group."""
    axis = groups.axis
    assert axis is not None
    side, block = region[axis], groups.block
    blocks = () if block is None else (slice(side.start // block, side.stop // block),)
    return region[:axis] + blocks + region[axis + 1 :]


def _per_group(values: npt.NDArray[Any], of: exmy.Groups, groups: exmy.Groups) -> npt.NDArray[Any]:
    """Expand a chunk's offsets or scales from its groups to smaller groups."""
    axis = groups.axis
    assert axis is not None
    if of.axis is None:
        smaller = exmy.Groups(of.shape, axis, groups.block)
        return np.broadcast_to(values, smaller.counts)
    if of.block is None or groups.block is None:
        return values
    return np.repeat(values, of.block // groups.block, axis)


def _joined_codes(
    bits: int, meta: ArrayMeta, region: Region, parts: Sequence[exmy.Quantized]
) -> npt.NDArray[np.uint8]:
    """Return the packed codes of a region, by concatenating those of its chunks if that gives the same bytes."""
    shape = [side.stop - side.start for side in region]
    divided = [k for k, side in enumerate(covering_chunks(region, meta.chunks)) if len(side) > 1]
    # whether each chunk is a contiguous run of the region's elements in C order
    contiguous = not divided or all(c == 1 for c in meta.chunks[: divided[-1]])
    if (
        parts
        and contiguous
        and meta.chunk_size % exmy.TILE == 0
        and math.prod(shape) == meta.chunk_size * len(parts)
    ):
        return np.concatenate([q.packed for q in parts])
    codes = np.empty(shape, np.uint8 if bits <= 8 else np.uint16)
    for (target, source), part in zip(_overlaps(meta, region), parts, strict=True):
        codes[target] = part.codes()[source]
    return exmy.pack(codes, bits)
