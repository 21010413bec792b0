"""Zarr's `sharding_indexed`: a chunk that holds inner chunks, and an index of where each lies; pure, no I/O.

The index has the offset and the length of each inner chunk in C order, both 2^64 - 1 for one that is not stored
because all of its values are the fill value. Every inner chunk is checked against the end of the data and against
its own codecs before memory is allocated for it. So the metadata of an array alone bounds the memory for its
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_codecs import ArrayCodec
from tstore.core.format.arrays.compressors import Bytes
from tstore.core.format.arrays.grid import AxisProjection, AxisRun, Projection, axis_runs, part_of
from tstore.core.format.arrays.numcodecs_classes import unsupported
from tstore.core.format.arrays.variable import MAX_ENCODED
from tstore.errors import Corrupt, InvalidArgument

__all__ = ["InnerChain", "Sharded", "inner_counts"]

Values = npt.NDArray[Any]
Shape = tuple[int, ...]

_ABSENT = (1 << 64) - 1


class InnerChain(Protocol):
    """The interface of `Chain` for the inner chunks of a shard, and for its index."""

    lossless: bool
    finite: bool
    has_parts: bool
    out_size: int
    max_length: int
    fixed_length: int | None

    def encode(self, chunk: Values, out: Bytes) -> memoryview:
        """Return the encoded bytes of a C-contiguous chunk."""

    def reencode(self, chunk: Values, out: Bytes, previous: memoryview | None) -> memoryview:
        """Encode a chunk in which some values have changed since it was decoded from `previous`."""

    def check_length(self, length: int) -> None:
        """Raise `Corrupt` if no encoded chunk can have this length."""

    def decode(self, data: memoryview, out: Values) -> None:
        """Decode a chunk into `out`."""

    def decode_part(self, data: memoryview, inside: tuple[slice, ...], out: Values) -> None:
        """Decode the selected elements, if it `has_parts`."""


def inner_counts(document: Mapping[str, Any], shape: Shape) -> Shape:
    """Return the number of inner chunks along each axis of a shard; raise if they do not partition it."""
    inner = (document.get("configuration") or {}).get("chunk_shape")
    if not isinstance(inner, (list, tuple)) or not all(type(n) is int and n > 0 for n in inner):
        raise unsupported(document, "expected 'chunk_shape' to be a list of positive integers")
    if len(inner) != len(shape) or any(n % i for n, i in zip(shape, inner, strict=True)):
        raise InvalidArgument(
            f"codec sharding_indexed: inner chunks of shape {list(inner)} do not divide chunks of {list(shape)}"
        )
    return tuple(n // i for n, i in zip(shape, inner, strict=True))


class Sharded(ArrayCodec):
    """The codec for chunks of one shape, with `counts` inner chunks along each axis."""

    has_parts = True

    def __init__(
        self,
        document: Mapping[str, Any],
        shape: Shape,
        counts: Shape,
        fill: Values,
        inner: InnerChain,
        index: InnerChain,
    ) -> None:
        location = document["configuration"].get("index_location", "end")
        if location not in ("start", "end"):
            raise unsupported(document, "expected 'index_location' to be 'start' or 'end'")
        if index.fixed_length is None:
            raise unsupported(document, "the length of its index must not depend on the data")
        self.document = document
        self.lossless = inner.lossless
        self.finite = inner.finite
        self._inner = inner
        self._index = index
        self._index_size = index.fixed_length
        self._index_first = location == "start"
        self._shape = shape
        self._counts = counts
        self._chunks = tuple(n // count for n, count in zip(shape, counts, strict=True))
        self._fill = fill
        self.min_size = self._index_size
        self.max_size = self._index_size + math.prod(counts) * inner.max_length
        if fill.dtype.hasobject:
            self.max_size = min(self.max_size, self._index_size + max(MAX_ENCODED, inner.max_length))

    def encode(self, chunk: Values, out: Bytes) -> Any:
        """Return the inner chunks that have values other than the fill value, and the index."""
        return self._encoded(chunk, lambda _, values, inner_out: self._inner.encode(values, inner_out))

    def reencode(self, chunk: Values, out: Bytes, previous: memoryview | None) -> Any:
        """Return the same, with each inner chunk encoded by `Chain.reencode`."""
        index = None if previous is None else self._decoded_index(previous)

        def encode_inner(coordinates: Shape, values: Values, inner_out: Bytes) -> memoryview:
            former = None if previous is None or index is None else self._inner_data(previous, index, coordinates)
            return self._inner.reencode(values, inner_out, former)

        return self._encoded(chunk, encode_inner)

    def _encoded(self, chunk: Values, encode_inner: Callable[[Shape, Values, Bytes], memoryview]) -> bytes:
        index = np.full((*self._counts, 2), _ABSENT, np.uint64)
        parts: list[memoryview] = []
        at = self._index_size if self._index_first else 0
        for coordinates in _morton_order(self._counts):
            region = tuple(slice(i * n, (i + 1) * n) for i, n in zip(coordinates, self._chunks, strict=True))
            values = np.array(part_of(chunk, region), order="C")  # the encoded bytes may refer to its memory
            if _is_filled(values, self._fill):
                continue
            data = encode_inner(coordinates, values, np.empty(self._inner.out_size, np.uint8))
            index[coordinates] = at, len(data)
            at += len(data)
            parts.append(data)
        if (size := self._index_size + sum(map(len, parts))) > self.max_size:
            raise InvalidArgument(
                f"a shard of values of variable length has {size} bytes, more than {self.max_size}; choose "
                "smaller chunks"
            )
        encoded_index = self._index.encode(index, np.empty(self._index.out_size, np.uint8))
        return b"".join([encoded_index, *parts] if self._index_first else [*parts, encoded_index])

    def decode(self, data: memoryview, out: Values) -> None:
        """Decode all inner chunks."""
        self.decode_part(data, tuple(slice(0, n, 1) for n in self._shape), out)

    def decode_part(self, data: memoryview, inside: tuple[slice, ...], out: Values) -> None:
        """Decode the selected elements, whose steps are positive, and cast them to the dtype of `out`."""
        index = self._decoded_index(data)
        for projection in self._projections(inside):
            target = part_of(out, projection.result)
            inner = self._inner_data(data, index, projection.chunk)
            if inner is None:
                np.copyto(target, self._fill, casting="unsafe")
                continue
            try:
                self._decode_inner(inner, projection.inside, target)
            except Corrupt as error:
                raise Corrupt(f"inner chunk {projection.chunk}: {error}") from error

    @staticmethod
    def _inner_data(data: memoryview, index: npt.NDArray[np.uint64], coordinates: Shape) -> memoryview | None:
        """Return the encoded bytes of an inner chunk, or None if it was not stored."""
        offset, length = (int(n) for n in index[coordinates])
        if offset == length == _ABSENT:
            return None
        if length > len(data) or offset > len(data) - length:
            raise Corrupt(f"inner chunk {coordinates} has {length} bytes at {offset}, beyond the end of its shard")
        return data[offset : offset + length]

    def _decode_inner(self, data: memoryview, inside: tuple[slice, ...], target: Values) -> None:
        if target.shape == self._chunks and target.dtype == self._fill.dtype:
            self._inner.decode(data, target)
        elif self._inner.has_parts:
            self._inner.decode_part(data, inside, target)
        else:
            self._inner.check_length(len(data))
            decoded = np.empty(self._chunks, self._fill.dtype)
            self._inner.decode(data, decoded)
            np.copyto(target, decoded[inside], casting="unsafe")

    def _decoded_index(self, data: memoryview) -> npt.NDArray[np.uint64]:
        if len(data) < self._index_size:
            raise Corrupt(f"{len(data)} bytes are less than the {self._index_size} of a shard's index")
        index = np.empty((*self._counts, 2), np.uint64)
        part = data[: self._index_size] if self._index_first else data[len(data) - self._index_size :]
        try:
            self._index.decode(part, index)
        except Corrupt as error:
            raise Corrupt(f"the index of a shard: {error}") from error
        return index

    def _projections(self, inside: tuple[slice, ...]) -> Iterator[Projection]:
        """Yield the intersections of a selection with the inner chunks."""
        axes = (range(s.start, s.stop, s.step) for s in inside)
        per_axis = [axis_runs(r, n, c) for r, n, c in zip(axes, self._shape, self._chunks, strict=True)]
        for parts in _product(per_axis):
            yield Projection.from_axes(parts)


def _product(per_axis: Sequence[Sequence[AxisRun]]) -> Iterator[tuple[AxisProjection, ...]]:
    """Yield the product of the parts of runs lazily; `itertools.product` would keep millions in memory."""
    if not per_axis:
        yield ()
        return
    for run in per_axis[0]:
        for part in run.each():
            for rest in _product(per_axis[1:]):
                yield part, *rest


def _is_filled(values: Values, fill: Values) -> bool:
    """Return whether all elements have the bits of the fill value."""
    if fill.dtype.hasobject:
        return bool((values == fill).all())
    data, size = values.reshape(-1).view(np.uint8), fill.dtype.itemsize
    return data[:size].tobytes() == fill.tobytes() and bool((data[size:] == data[:-size]).all())


def _morton_order(counts: Shape) -> Iterator[Shape]:
    """Yield the coordinates of a grid in Morton order, in which zarr-python stores inner chunks.

    The bits of a chunk's position interleave those of its coordinates: (x1x0, y1y0) is at position y1x1y0x0.
    """
    coordinates = np.indices(counts).reshape(len(counts), math.prod(counts))
    place, shift = np.zeros(math.prod(counts), np.uint64), 0
    widths = [(n - 1).bit_length() for n in counts]
    for bit in range(max(widths, default=0)):
        for axis, width in enumerate(widths):
            if bit < width:
                place |= (coordinates[axis].astype(np.uint64) >> np.uint64(bit) & np.uint64(1)) << np.uint64(shift)
                shift += 1
    for number in np.argsort(place).tolist():
        yield tuple(int(i) for i in np.unravel_index(number, counts)) if counts else ()
