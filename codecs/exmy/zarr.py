"""The codec "exmy" of Zarr v3: arrays of zarr-python whose chunks are eXmY codes.

>>> import zarr
>>> z = zarr.create_array("w.zarr", shape=(4096, 4096), dtype="float32", chunks=(512, 4096),
...                       serializer=ExmyCodec("e3m2", block=32))  # doctest: +SKIP

zarr-python finds it by its entry point; nothing must be imported to read such arrays. It comes after codecs
such as `transpose` and before codecs such as `zstd` and `crc32c`, also inside of `sharding_indexed`. Where no
other codec stands beside it, reading a part of a chunk fetches only the tiles that hold it.
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

_NEAR = 4096  # bytes: what lies closer is fetched with one request
_MOST_REQUESTS = 32  # for a part of a chunk; more cost more than the whole chunk
_MOST_RUNS = 1 << 16  # that are looked at to find them


@dataclass(frozen=True, init=False)
class ExmyCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):
    """The array→bytes codec "exmy": its chunks are those of `exmy.ChunkCodec`.

    Encoding raises `exmy.NonFiniteError` for NaN and infinity, `exmy.SizeError` where axis or block do not fit the
    chunk.
    """

    is_fixed_size = True

    chunk: ChunkCodec
    """How chunks are stored."""

    def __init__(
        self,
        format: Format | str | ChunkCodec,
        *,
        scale: Scale = "search",
        axis: int | None = None,
        block: int | None = None,
    ) -> None:
        """Arguments as of `exmy.quantize`, for each chunk as it reaches this codec."""
        if not isinstance(format, ChunkCodec):
            format = ChunkCodec.of({"format": format, "scale": scale, "axis": axis, "block": block})
        object.__setattr__(self, "chunk", format)

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Return the codec of an array's metadata; FormatError, DtypeError for what this exmy does not know."""
        configuration = data.get("configuration")
        if data.get("name") != "exmy" or not isinstance(configuration, dict):
            raise FormatError(
                f"{data!r} is no codec 'exmy'; expected {{'name': 'exmy', 'configuration': {{'format': 'e4m3'}}}}"
            )
        return cls(ChunkCodec.of(configuration))

    def to_dict(self) -> dict[str, JSON]:
        """Return the codec as it stands in an array's metadata."""
        return {"name": "exmy", "configuration": self.chunk.configuration}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Refuse an array that this codec cannot encode: DtypeError, SizeError.

        A `transpose` before it may permute the axes of chunks unseen, so a block need only divide one of them.
        """
        kind_of(_native(dtype))
        axis, block = self.chunk.axis, self.chunk.block
        if (axis is not None or block is not None) and not -len(shape) <= (-1 if axis is None else axis) < len(
            shape
        ):
            raise SizeError(f"axis {axis} of codec exmy does not fit an array of {len(shape)} dimensions")
        chunks: tuple[int, ...] | None = getattr(chunk_grid, "chunk_shape", None)
        if block is not None and chunks is not None and all(n % block for n in chunks):
            raise SizeError(
                f"blocks of {block} do not fit chunks of {chunks}; choose chunks whose axis {axis} is a multiple "
                "of the block"
            )

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Return the exact bytes of an encoded chunk."""
        return self.chunk.size(chunk_spec.shape)

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        return chunk_spec.prototype.buffer.from_array_like(self.chunk.encode(chunk_array.as_numpy_array()))

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        dtype = _native(chunk_spec.dtype)
        values = self.chunk.decode(chunk_bytes.as_numpy_array(), chunk_spec.shape, dtype)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values.astype(dtype, copy=False))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    async def _decode_partial_single(
        self, byte_getter: ByteGetter, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        part = _Part.of(self.chunk, chunk_spec.shape, selection)
        wanted = [byte_getter.get(chunk_spec.prototype, request) for request in part.requests]
        fetched = await asyncio.gather(*wanted)
        found = [buffer for buffer in fetched if buffer is not None]
        if len(found) < len(fetched):
            return None  # there is no such chunk
        values = await asyncio.to_thread(part.decode, found, _native(chunk_spec.dtype))
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)[selection]

    def _decode_partial_sync(self, byte_getter: Any, selection: Any, chunk_spec: ArraySpec) -> NDBuffer | None:
        part = _Part.of(self.chunk, chunk_spec.shape, selection)
        found = []
        for request in part.requests:
            buffer = byte_getter.get_sync(prototype=chunk_spec.prototype, byte_range=request)
            if buffer is None:
                return None
            found.append(buffer)
        values = part.decode(found, _native(chunk_spec.dtype))
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)[selection]


@dataclass(frozen=True)
class _Part:
    """What must be fetched of a chunk to decode a selection; without slices, all of it."""

    codec: ChunkCodec
    shape: tuple[int, ...]
    slices: Sequence[ChunkSlice]
    requests: Sequence[RangeByteRequest | None]

    @staticmethod
    def of(codec: ChunkCodec, shape: tuple[int, ...], selection: Any) -> _Part:
        """Return the part for a selection of zarr-python's: an integer, slice or index array for each axis."""
        tiles = _tiles(selection, shape)
        if tiles is None or len(tiles) >= _MOST_REQUESTS:
            return _Part(codec, shape, (), (None,))
        slices = [codec.slice(shape, low, high) for low, high in tiles]
        ranges = [(0, slices[0].head)] if slices else []
        for piece in slices:
            if piece.first - ranges[-1][1] <= _NEAR:
                ranges[-1] = (ranges[-1][0], piece.end)
            else:
                ranges.append((piece.first, piece.end))
        if 2 * sum(end - first for first, end in ranges) > codec.size(shape):
            return _Part(codec, shape, (), (None,))
        return _Part(codec, shape, slices, [RangeByteRequest(first, end) for first, end in ranges])

    def decode(self, buffers: Sequence[Buffer], dtype: np.dtype[Any]) -> Array:
        """Return the chunk with the values of the selection; others are undefined."""
        pieces = [buffer.as_numpy_array() for buffer in buffers]
        if not self.slices and pieces:
            return self.codec.decode(pieces[0], self.shape, dtype).astype(dtype, copy=False)
        out = np.empty(math.prod(self.shape), dtype)
        for piece in self.slices:
            head, codes = (self._cut(pieces, *at) for at in ((0, piece.head), (piece.first, piece.end)))
            out[piece.start : piece.stop] = piece.decode(head, codes, dtype)
        return out.reshape(self.shape)

    def _cut(self, pieces: Sequence[Array], first: int, end: int) -> Array:
        """Return the bytes first ... end-1 of the chunk; fewer where what was fetched ends before."""
        for request, piece in zip(self.requests, pieces, strict=True):
            if request is not None and request.start <= first and end <= request.end:
                return piece[first - request.start : end - request.start]
        raise AssertionError("every byte of a slice is requested")


def _tiles(selection: Any, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """Return the runs of tiles, as elements first and stop, that hold a selection; None for all or too many."""
    axes = _indices(selection, shape)
    if axes is None:
        return None
    if any(len(chosen) == 0 for chosen in axes):
        return []
    cut = max((k for k, chosen in enumerate(axes) if len(chosen) < shape[k]), default=-1)
    if cut < 0 or math.prod(len(chosen) for chosen in axes[:cut]) > _MOST_RUNS:
        return None
    starts, stride = np.zeros(1, np.int64), math.prod(shape[cut + 1 :])
    for chosen, length in zip(axes[:cut], shape[:cut], strict=True):
        starts = (starts[:, None] * length + chosen).reshape(-1)
    starts = (starts * shape[cut] + axes[cut][0]) * stride
    length = int(axes[cut][-1] - axes[cut][0] + 1) * stride
    low, high = starts // TILE, -(-(starts + length) // TILE)
    apart = np.flatnonzero(low[1:] > high[:-1])
    firsts, lasts = low[np.append(0, apart + 1)], high[np.append(apart, len(high) - 1)]
    count = math.prod(shape)
    return [(int(a) * TILE, min(int(b) * TILE, count)) for a, b in zip(firsts, lasts, strict=True)]


def _indices(selection: Any, shape: tuple[int, ...]) -> list[NDArray[np.int64]] | None:
    """Return the indices along each axis, ascending, whose product holds the selection; None for unknown kinds."""
    if not isinstance(selection, tuple) or len(selection) != len(shape):
        return None
    axes = []
    for chosen, length in zip(selection, shape, strict=True):
        if isinstance(chosen, slice):
            some = np.arange(length)[chosen]
        elif isinstance(chosen, (int, np.integer)) or (
            isinstance(chosen, np.ndarray) and chosen.dtype.kind in "iu"
        ):
            some = np.asarray(chosen).reshape(-1)
        else:
            return None
        some = np.unique(some).astype(np.int64)
        if some.size and not 0 <= some[0] <= some[-1] < length:
            return None
        axes.append(some)
    return axes


def _native(dtype: Any) -> np.dtype[Any]:
    """Return NumPy's dtype for that of an array; zarr-python has types of its own since 3.1."""
    native = getattr(dtype, "to_native_dtype", None)
    found: np.dtype[Any] = np.dtype(dtype) if native is None else native()
    return found
