"""Reading arrays in eXmY formats as `exmy.Quantized`, without decoding their values.

Each chunk has its own exponent offsets. Chunks are joined into one `Quantized` if they share one offset, or if one
offset per row, or per block, of the whole array can represent all of theirs. Codes are moved, but never changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.data.pieces import ReadJob
from tstore.data.reader import new_values, read_chunks
from tstore.errors import Corrupt, InvalidArgument
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkSource
from tstore.format.grid import Selection
from tstore.storage.base import Storage

__all__ = ["PackedRead", "is_packed", "join_chunks", "read_packed", "read_packed_chunks"]

Region = tuple[slice, ...]


def is_packed(meta: ArrayMeta) -> bool:
    """Return whether the chunks of an array are in an eXmY format, compressed or not."""
    return meta.chain.exmy_codec is not None


class PackedRead(NamedTuple):
    """A request to read chunks of an array, by number, without decoding their values."""

    path: str
    meta: ArrayMeta
    source: ChunkSource
    numbers: range


async def read_packed_chunks(storage: Storage, requests: Sequence[PackedRead]) -> list[list[exmy.Quantized]]:
    """Read and verify the chunks of all requests in one call; chunks at an array's edge are padded."""
    jobs, payloads = [], []
    for path, meta, source, numbers in requests:
        size = meta.encoded_size
        out = new_values(path, (len(numbers), size), np.dtype(np.uint8))
        # Read the encoded chunks as an array of bytes with the same compressors, so that no value is decoded.
        compressed: list[Mapping[str, Any]] = [{"name": "bytes"}, *meta.chain.documents[1:]]
        stored = ArrayMeta.new((meta.chunk_count * size,), "uint8", (size,), compressed)
        region = Selection((range(numbers.start * size, numbers.stop * size),))
        jobs.append(ReadJob(path, stored, source, region, out.reshape(-1)))
        payloads.append(out)
    await read_chunks(storage, jobs)
    quantized = []
    for request, payload in zip(requests, payloads, strict=True):
        meta, codec = request.meta, request.meta.chain.exmy_codec
        assert codec is not None
        try:
            quantized.append([_standard(codec.to_quantized(data, meta.chunks, meta.dtype)) for data in payload])
        except exmy.ExmyError as error:
            raise Corrupt(f"{request.path}: the eXmY header of a chunk does not parse: {error}") from error
    return quantized


async def read_packed(storage: Storage, path: str, meta: ArrayMeta, source: ChunkSource) -> exmy.Quantized:
    """Return the codes of a whole array; raise `InvalidArgument` if it is not in an eXmY format."""
    if not is_packed(meta):
        raise InvalidArgument(f"{path} is not stored in an eXmY format; read its values instead")
    [parts] = await read_packed_chunks(storage, [PackedRead(path, meta, source, range(meta.chunk_count))])
    return join_chunks(path, meta, parts)


def join_chunks(path: str, meta: ArrayMeta, parts: Sequence[exmy.Quantized]) -> exmy.Quantized:
    """Join all chunks of an array, passed in C order.

    Raise `InvalidArgument` if no offsets per row or block of the whole array can represent those of its chunks.
    """
    if len(parts) == 1 and meta.shape == meta.chunks:
        return parts[0]
    codec = meta.chain.exmy_codec
    assert codec is not None
    shape, chunks = meta.shape, meta.chunks
    f = codec.format.standard
    packed = _joined_codes(f.bits, meta, parts)
    axis, block = codec.axis, codec.block
    if axis is None and block is None:
        offsets = np.array([int(q.offsets) for q in parts], np.int16)
        if parts and np.all(offsets == offsets[0]):
            groups = exmy.Groups.from_shape(shape, None, None)
            scales_of_all = parts[0].group_scales  # the fixed scale of entropy-coded chunks, or None
            return exmy.Quantized(f, groups, offsets[:1].reshape(()), scales_of_all, packed, meta.dtype.name)
        axis, block = len(shape) - 1, None
    axis = len(shape) - 1 if axis is None else axis % len(shape)
    blocks = [b for b in exmy.BLOCKS if chunks[axis] % b == 0 and shape[axis] % b == 0]
    # A row that spans several chunks can have several offsets only if the array has offsets per block. Blocks can
    # represent one offset per chunk (`codec.axis` is None), but not one per row of a chunk. If no blocks can
    # represent the offsets, `block` becomes 0, which is not a block size and is refused below.
    if block is None and meta.counts[axis] > 1:
        block = blocks[-1] if blocks and codec.axis is None else 0
    if block is not None and block not in blocks:
        raise InvalidArgument(
            f"{path}: no offsets per row or per block of the whole array can represent those of its chunks, which "
            f"have the shape {chunks}; restore the array without packed=True, or quantize it with "
            "tstore.quantize, which gives an array one offset"
        )
    groups = exmy.Groups.from_shape(shape, axis, block)
    offsets = np.zeros(groups.counts, np.int16)
    scales = None if not parts or parts[0].scales is None else np.ones(groups.counts, np.float32)
    for region, part in zip(_group_regions(meta, groups), parts, strict=True):
        _fill(offsets, region, part.offsets)
        if scales is not None and part.scales is not None:
            _fill(scales, region, part.scales)
    group_scales = None if scales is None else exmy.GroupScales.from_values(scales)
    return exmy.Quantized(f, groups, offsets, group_scales, packed, meta.dtype.name)


def _standard(q: exmy.Quantized) -> exmy.Quantized:
    """Return the same codes with the format's standard bias, as `exmy.quantize` does; the offsets compensate."""
    f = q.format.standard
    if q.format == f:
        return q
    offsets = np.asarray(q.offsets + (q.format.bias - f.bias), np.int16)
    return exmy.Quantized(f, q.groups, offsets, q.group_scales, q.packed, q.dtype)


def _joined_codes(bits: int, meta: ArrayMeta, parts: Sequence[exmy.Quantized]) -> npt.NDArray[np.uint8]:
    """Return the packed codes of the array, by concatenating those of its chunks if that gives the same bytes."""
    divided = [k for k, n in enumerate(meta.counts) if n > 1]
    # whether each chunk is one run of the array's elements in C order
    contiguous = not divided or all(c == 1 for c in meta.chunks[: divided[-1]])
    if contiguous and meta.chunk_size % exmy.TILE == 0 and math.prod(meta.shape) == meta.chunk_size * len(parts):
        return np.concatenate([q.packed for q in parts])
    codes = np.empty(meta.shape, np.uint8 if bits <= 8 else np.uint16)
    for region, part in zip(_regions(meta.shape, meta.chunks, meta.counts), parts, strict=True):
        _fill(codes, region, part.codes())
    return exmy.pack(codes, bits)


def _regions(shape: Sequence[int], chunks: Sequence[int], counts: Sequence[int]) -> Iterator[Region]:
    """Yield the region of each chunk in the array, in C order."""
    for at in np.ndindex(*counts):
        yield tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(at, chunks, shape, strict=True))


def _group_regions(meta: ArrayMeta, groups: exmy.Groups) -> Iterator[Region]:
    """Yield the region of each chunk's scale groups among those of the array."""
    shape, chunks, counts = list(meta.shape), list(meta.chunks), list(meta.counts)
    axis = groups.axis
    assert axis is not None
    if groups.block is None:
        for sides in (shape, chunks, counts):
            del sides[axis]
    else:
        shape[axis] //= groups.block
        chunks[axis] //= groups.block
    return _regions(shape, chunks, counts)


def _fill(target: npt.NDArray[Any], region: Region, values: npt.NDArray[Any]) -> None:
    """Copy a chunk's values, or its single value, to their region; omit those beyond the array's edge."""
    part = target[region]
    part[...] = values if values.ndim == 0 else values[tuple(slice(n) for n in part.shape)]
