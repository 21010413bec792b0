"""The Zarr v3 codec "exmy": zarr-python arrays whose chunks are eXmY codes.

>>> import zarr
>>> z = zarr.create_array("w.zarr", shape=(4096, 4096), dtype="float32", chunks=(512, 4096),
...                       serializer=ExmyCodec("e3m2", block=32))  # doctest: +SKIP

zarr-python discovers the codec by its entry point, so reading such arrays needs no import. As an array→bytes codec
it follows array→array codecs such as `transpose` and precedes bytes→bytes codecs such as `zstd` and `crc32c`,
inside `sharding_indexed` too. If it is the only codec, partial reads of a chunk fetch only the necessary tiles.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
from zarr.abc.store import ByteGetter, RangeByteRequest
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import JSON

from exmy.chunk import ChunkCodec, ChunkSlice
from exmy.elements import Array, kind_of
from exmy.errors import FormatError, SizeError
from exmy.format import Format
from exmy.quantizer import Scale
from exmy.reference import TILE

__all__ = ["ExmyCodec"]

_MAX_GAP = 4096  # bytes: ranges with at most this gap between them are fetched with one request
_MAX_REQUESTS = 32  # per partial read; more would cost more than fetching the whole chunk
_MAX_RUNS = 1 << 16  # runs of selected elements; with more, the whole chunk is fetched


@dataclass(frozen=True, init=False)
class ExmyCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):
    """The array→bytes codec "exmy", which encodes chunks with `exmy.ChunkCodec`.

    Encoding raises `exmy.NonFiniteError` for NaN and infinity, `exmy.SizeError` if axis or block do not fit.
    """

    is_fixed_size = True
    """Whether all chunks of a shape have the same encoded size: they do."""

    chunk_codec: ChunkCodec
    """The encoding of chunks."""

    def __init__(
        self,
        format: Format | str | ChunkCodec,
        *,
        scale: Scale = "search",
        axis: int | None = None,
        block: int | None = None,
    ) -> None:
        """Create the codec. The arguments are those of `exmy.quantize`, or one `ChunkCodec` that has them all."""
        if not isinstance(format, ChunkCodec):
            format = ChunkCodec.from_configuration(
                {"format": format, "scale": scale, "axis": axis, "block": block}
            )
        object.__setattr__(self, "chunk_codec", format)

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Return the codec from an array's metadata. Raise `FormatError` or `DtypeError` if it is invalid."""
        configuration = data.get("configuration")
        if data.get("name") != "exmy" or not isinstance(configuration, dict):
            raise FormatError(
                f"{data!r} is not codec exmy; expected {{'name': 'exmy', 'configuration': {{'format': 'e4m3'}}}}"
            )
        return cls(ChunkCodec.from_configuration(configuration))

    def to_dict(self) -> dict[str, JSON]:
        """Return the codec's entry in an array's metadata."""
        return {"name": "exmy", "configuration": self.chunk_codec.configuration}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Raise `DtypeError` or `SizeError` for an array that this codec cannot encode.

        The block need only divide the chunk's length along some axis: this codec does not see whether a preceding
        `transpose` permutes the axes.
        """
        kind_of(_native_dtype(dtype))
        block = self.chunk_codec.block
        axis = -1 if self.chunk_codec.axis is None and block is not None else self.chunk_codec.axis
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise SizeError(f"axis {axis} of codec exmy does not fit an array of {len(shape)} dimensions")
        chunks: tuple[int, ...] | None = getattr(chunk_grid, "chunk_shape", None)
        if block is not None and chunks is not None and all(n % block for n in chunks):
            raise SizeError(
                f"blocks of {block} do not divide chunks of {chunks}; choose chunks whose length along axis "
                f"{axis} is a multiple of the block"
            )

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Return the exact size in bytes of an encoded chunk."""
        return self.chunk_codec.size(chunk_spec.shape)

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        return chunk_spec.prototype.buffer.from_array_like(self.chunk_codec.encode(chunk_array.as_numpy_array()))

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        dtype = _native_dtype(chunk_spec.dtype)
        values = self.chunk_codec.decode(chunk_bytes.as_numpy_array(), chunk_spec.shape, dtype)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values.astype(dtype, copy=False))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    async def _decode_partial_single(
        self, byte_getter: ByteGetter, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        part = _PartialRead.from_selection(self.chunk_codec, chunk_spec.shape, selection)
        reads = [byte_getter.get(chunk_spec.prototype, request) for request in part.requests]
        results = await asyncio.gather(*reads)
        buffers = [buffer for buffer in results if buffer is not None]
        if len(buffers) < len(results):
            return None  # the chunk does not exist
        values = await asyncio.to_thread(part.decode, buffers, _native_dtype(chunk_spec.dtype))
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)[selection]

    def _decode_partial_sync(self, byte_getter: Any, selection: Any, chunk_spec: ArraySpec) -> NDBuffer | None:
        part = _PartialRead.from_selection(self.chunk_codec, chunk_spec.shape, selection)
        buffers = []
        for request in part.requests:
            buffer = byte_getter.get_sync(prototype=chunk_spec.prototype, byte_range=request)
            if buffer is None:
                return None
            buffers.append(buffer)
        values = part.decode(buffers, _native_dtype(chunk_spec.dtype))
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)[selection]


@dataclass(frozen=True)
class _PartialRead:
    """The slices of a chunk that cover a selection, and the byte ranges to request: None for the whole chunk."""

    codec: ChunkCodec
    shape: tuple[int, ...]
    slices: Sequence[ChunkSlice]
    requests: Sequence[RangeByteRequest | None]

    @staticmethod
    def from_selection(codec: ChunkCodec, shape: tuple[int, ...], selection: Any) -> _PartialRead:
        """Return the read for a selection of zarr-python: one integer, slice or index array per axis."""
        tiles = _tile_runs(selection, shape)
        if tiles is None or len(tiles) >= _MAX_REQUESTS:
            return _PartialRead(codec, shape, (), (None,))
        slices = [codec.slice(shape, low, high) for low, high in tiles]
        ranges = [(0, slices[0].header_size)] if slices else []
        for piece in slices:
            if piece.first_byte - ranges[-1][1] <= _MAX_GAP:
                ranges[-1] = (ranges[-1][0], piece.end_byte)
            else:
                ranges.append((piece.first_byte, piece.end_byte))
        if 2 * sum(end - first for first, end in ranges) > codec.size(shape):
            return _PartialRead(codec, shape, (), (None,))
        return _PartialRead(codec, shape, slices, [RangeByteRequest(first, end) for first, end in ranges])

    def decode(self, buffers: Sequence[Buffer], dtype: np.dtype[Any]) -> Array:
        """Return an array of the chunk's shape with the values of the selection; other elements are undefined."""
        fetched = [buffer.as_numpy_array() for buffer in buffers]
        if not self.slices and fetched:
            return self.codec.decode(fetched[0], self.shape, dtype).astype(dtype, copy=False)
        out = np.empty(math.prod(self.shape), dtype)
        for piece in self.slices:
            header = self._byte_range(fetched, 0, piece.header_size)
            codes = self._byte_range(fetched, piece.first_byte, piece.end_byte)
            out[piece.start : piece.stop] = piece.decode(header, codes, dtype)
        return out.reshape(self.shape)

    def _byte_range(self, fetched: Sequence[Array], first: int, end: int) -> Array:
        """Return the bytes first ... end-1 of the chunk; fewer if the fetched bytes end earlier."""
        for request, data in zip(self.requests, fetched, strict=True):
            if request is not None and request.start <= first and end <= request.end:
                return data[first - request.start : end - request.start]
        raise AssertionError("a slice needs bytes that were not requested")


def _tile_runs(selection: Any, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """Return the runs of tiles that cover a selection, as (start, stop) elements; None for the whole chunk."""
    axes = _indices(selection, shape)
    if axes is None:
        return None
    if any(len(indices) == 0 for indices in axes):
        return []
    last = max((k for k, n in enumerate(shape) if len(axes[k]) < n), default=-1)  # the last axis selected in part
    if last < 0 or math.prod(len(indices) for indices in axes[:last]) > _MAX_RUNS:
        return None
    starts, stride = np.zeros(1, np.int64), math.prod(shape[last + 1 :])
    for indices, length in zip(axes[:last], shape[:last], strict=True):
        starts = (starts[:, None] * length + indices).reshape(-1)
    starts = (starts * shape[last] + axes[last][0]) * stride
    length = int(axes[last][-1] - axes[last][0] + 1) * stride
    low, high = starts // TILE, -(-(starts + length) // TILE)
    gaps = np.flatnonzero(low[1:] > high[:-1])
    firsts, lasts = low[np.append(0, gaps + 1)], high[np.append(gaps, len(high) - 1)]
    count = math.prod(shape)
    return [(int(a) * TILE, min(int(b) * TILE, count)) for a, b in zip(firsts, lasts, strict=True)]


def _indices(selection: Any, shape: tuple[int, ...]) -> list[NDArray[np.int64]] | None:
    """Return ascending indices along each axis, whose combinations cover the selection.

    Return None for a kind of selection that partial reads do not support.
    """
    if not isinstance(selection, tuple) or len(selection) != len(shape):
        return None
    axes = []
    for selector, length in zip(selection, shape, strict=True):
        if isinstance(selector, slice):
            indices = np.arange(length)[selector]
        elif isinstance(selector, (int, np.integer)) or (
            isinstance(selector, np.ndarray) and selector.dtype.kind in "iu"
        ):
            indices = np.asarray(selector).reshape(-1)
        else:
            return None
        indices = np.unique(indices).astype(np.int64)
        if indices.size and not 0 <= indices[0] <= indices[-1] < length:
            return None
        axes.append(indices)
    return axes


def _native_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of an array; zarr-python wraps dtypes in its own classes since 3.1."""
    to_native = getattr(dtype, "to_native_dtype", None)
    native: np.dtype[Any] = np.dtype(dtype) if to_native is None else to_native()
    return native
