"""The encoding of an array's chunks, for stores that keep format, shape and dtype in the array's metadata.

FORMAT.md, section 9, defines the layout: a header with the bias and the offsets or scales, then the packed codes.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from exmy import kernels
from exmy.codes import encode_packed
from exmy.elements import Array, Kind, Layout, builtin_view, clamp_infinities, kind_of, output_dtype, output_kind
from exmy.errors import DtypeError, FormatError, SizeError
from exmy.fit import BIAS_LIMIT
from exmy.format import Format, as_format
from exmy.groups import Groups
from exmy.packing import checked_output, packed_size
from exmy.quantized import Quantized, decoding, needs_clamping
from exmy.quantizer import Scale, check_scale, quantize
from exmy.reencoding import requantize
from exmy.reference import TILE
from exmy.scales import FloatScale, fixed_scale, is_float_scale, parse_scales, scales_size

__all__ = ["ChunkCodec", "ChunkSlice"]

_HEADER = struct.Struct("<h6x")  # the bias, plus the least offset of the groups; 6 reserved bytes


@dataclass(frozen=True, slots=True)
class ChunkCodec:
    """The encoding of chunks: their number format, and which elements of a chunk share an offset or scale.

    Each chunk has the codes that `exmy.quantize` returns for it with the same arguments.

    Examples
    --------
    >>> codec = exmy.ChunkCodec.from_configuration({"format": "e3m2", "block": 32})
    >>> chunk = codec.encode(np.ones((4, 64), "float32"))
    >>> codec.decode(chunk, (4, 64), "float32")[0, :3]
    array([1., 1., 1.], dtype=float32)
    """

    format: Format
    """The format of the codes."""
    scale: Scale = "search"
    """How the offsets or scales are chosen: see `exmy.quantize`."""
    axis: int | None = None
    """The axis along which elements share an offset; None means the last if there is a block, else all axes."""
    block: int | None = None
    """The number of elements along the axis that share an offset; None for all of them."""

    keys: ClassVar[tuple[str, ...]] = ("format", "scale", "axis", "block")
    """The keys that a JSON configuration may have."""

    def __post_init__(self) -> None:
        for name, value in (("axis", self.axis), ("block", self.block)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
                raise DtypeError(f"{name} is {value!r}; expected an integer or None")
            object.__setattr__(self, name, None if value is None else int(value))
        object.__setattr__(self, "scale", check_scale(self.scale, self.axis, self.block))
        if self.block is not None:
            Groups.from_shape((self.block,), None, self.block)  # raises FormatError for an invalid block length

    @staticmethod
    def from_configuration(configuration: Mapping[str, Any]) -> ChunkCodec:
        """Return the codec for a configuration such as {"format": "e3m2", "axis": -1, "block": 32}.

        "format" is required; the other keys are optional, with the meanings and defaults of `exmy.quantize`.
        Raise `FormatError` for unknown keys, invalid values or a missing format, `DtypeError` for a wrong type.
        """
        if not isinstance(configuration, Mapping):
            raise DtypeError(f"a configuration is a mapping such as {{'format': 'e4m3'}}, not {configuration!r}")
        unknown = [key for key in configuration if key not in ChunkCodec.keys]
        if unknown:
            raise FormatError(
                f"the configuration has the unknown keys {', '.join(map(repr, unknown))}; expected "
                f"{', '.join(ChunkCodec.keys)}. Install a newer exmy if a newer one wrote it"
            )
        if "format" not in configuration:
            raise FormatError(f"the configuration {dict(configuration)} has no format; add 'format': 'e4m3'")
        return ChunkCodec(**{**configuration, "format": as_format(configuration["format"])})

    @property
    def configuration(self) -> dict[str, Any]:
        """The JSON configuration, without keys at their defaults; the inverse of `from_configuration`."""
        options = {"scale": self.scale, "axis": self.axis, "block": self.block}
        defaults = {"scale": "search", "axis": None, "block": None}
        changed = {key: value for key, value in options.items() if value != defaults[key]}
        return {"format": self.format.name, **changed}

    @property
    def granularity(self) -> str:
        """The elements that share an offset or scale, for display: "tensor", "row", or "block of 32"."""
        if self.block is not None:
            return f"block of {self.block}"
        return "tensor" if self.axis is None else "row"

    @property
    def stored_scales(self) -> FloatScale | None:
        """How chunks store the scales of groups; None if they store none."""
        if isinstance(self.scale, float):
            return None if self.axis is None and self.block is None else "e4m3"
        return self.scale if is_float_scale(self.scale) else None

    @property
    def has_planes(self) -> bool:
        """Whether the upper 8 bits of all codes precede their lower bits; if so, chunks are only decoded whole."""
        return isinstance(self.scale, float) and self.format.bits > 8

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the exact size in bytes of an encoded chunk. Raise `SizeError` if axis or block do not fit."""
        return self._header_size(self._groups(shape)) + packed_size(math.prod(shape), self.format.bits)

    def overhead(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of an encoded chunk that are neither codes nor offsets or scales of groups.

        Raise `SizeError` as `size` does.
        """
        groups = self._groups(shape)
        unit = 4 if self.stored_scales == "e4m3" else 0
        return self._header_size(groups) - self._parameters_size(groups) + unit

    def encode(self, x: Any, out: Any = None, *, importance: Any = None) -> NDArray[np.uint8]:
        """Return the encoded chunk as a flat uint8 array.

        `x`: float16, bfloat16, float32 or float64 of any shape and strides. `out`: a writable, contiguous uint8
        array of `size(x.shape)` bytes to write to and return. `importance` is as for `exmy.quantize`. Raise
        `SizeError` or `DtypeError` for an unsuitable `out` or `x`, and otherwise as `exmy.quantize` does. After an
        error the contents of `out` are undefined.
        """
        x = np.asarray(x)
        kind_of(x.dtype)
        groups = self._groups(x.shape)
        size, header_size = self.size(x.shape), self._header_size(groups)
        data = checked_output(out, size)
        f = self.format if self.scale == "none" else self.format.standard
        if groups.axis is None and self.scale in {"search", "max"}:
            f = f.fit(x, "max" if self.scale == "max" else "search", importance=importance)
        if groups.axis is None and self.scale in {"search", "max", "none"}:
            _HEADER.pack_into(data.data, 0, f.bias)
            encode_packed(x, f, out=data[header_size:])
            return data
        out = np.empty(size - header_size, np.uint8) if self.has_planes else data[header_size:]
        q = quantize(x, f, self.axis, self.block, self.scale, importance=importance, out=out)
        return self._put(q, data)

    def reencode(self, x: Any, previous: Any = None, out: Any = None) -> NDArray[np.uint8]:
        """Encode a chunk after some values have changed; the other values stay exactly the same.

        `previous`: the encoded chunk, bytes-like, from which the values that have not changed were decoded; None
        if there was none. No value clips. A value that had to change, because a greater one needs a larger scale,
        differs from x in the decoded chunk. Raise as `encode` and `decode` do.
        """
        if previous is None or self.stored_scales is None:
            unclipped = replace(self, scale="max") if self.scale == "search" else self
            return unclipped.encode(x, out)
        x = np.asarray(x)
        data = checked_output(out, self.size(x.shape))
        q = requantize(x, self.to_quantized(previous, x.shape, x.dtype))
        data[data.size - q.packed.size :] = q.packed
        return self._put(q, data)

    def _put(self, q: Quantized, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Write the header of a chunk and, if they are in planes, its codes; return it."""
        header_size = data.size - q.packed.size
        if self.has_planes:
            kernels.split_planes(q.format.bits, q.packed, q.size, *_planes(data[header_size:], q.size))
        self._put_header(q, data[:header_size])
        return data

    def _put_header(self, q: Quantized, header: Array) -> None:
        """Write the header of a chunk that has more than one offset, or scales."""
        base = int(q.offsets.min()) if q.offsets.size else 0
        _HEADER.pack_into(header.data, 0, q.format.bias + base)
        parameters = np.empty(0, np.uint8)  # a fixed scale is in the configuration
        if q.group_scales is None:
            parameters = (q.offsets.reshape(-1).astype(np.int32) - base).astype(np.uint8)
        elif self.stored_scales is not None:
            parameters = q.group_scales.stored
        header[_HEADER.size : _HEADER.size + parameters.size] = parameters
        header[_HEADER.size + parameters.size :] = 0

    def decode(self, data: Any, shape: tuple[int, ...], dtype: DTypeLike, out: Any = None) -> Array:
        """Return the values of an encoded chunk of that shape, in float16, bfloat16, float32 or float64.

        `data`: bytes-like. `out`: a writable, C-contiguous array of that shape and dtype to write to and return.
        Raise `SizeError` if `data` is truncated or too long, `FormatError` if its header is invalid.
        """
        if out is not None and isinstance(self.scale, float) and self.stored_scales is None:
            native = dtype if isinstance(dtype, np.dtype) else output_dtype(dtype)
            view, known = _bytes(data), _known_chunk(self, tuple(shape), native)
            if known.fits(view, out):
                return known.decode(view, out)
        return self.to_quantized(data, shape, dtype).dequantize(dtype, out=out)

    def to_quantized(self, data: Any, shape: tuple[int, ...], dtype: DTypeLike) -> Quantized:
        """Return an encoded chunk as `exmy.Quantized`, without copying the codes unless they are in planes.

        `dtype`: the dtype before encoding. Raise as `decode` does.
        """
        groups = self._groups(shape)
        view = _bytes(data)
        header_size = self._header_size(groups)
        size = header_size + packed_size(math.prod(shape), self.format.bits)
        if view.size != size:
            fault = "truncated" if view.size < size else "too long"
            raise SizeError(
                f"a chunk of shape {tuple(shape)} in {self} is {fault}: {view.size} bytes, expected {size}"
            )
        codes = self._packed(view[header_size:], math.prod(shape))
        return self._parse(view[:header_size], codes, groups, output_kind(dtype).name.lower())

    def slice(self, shape: tuple[int, ...], start: int, stop: int) -> ChunkSlice:
        """Return the position in a chunk of the elements start ... stop-1 (in C order), widened to whole tiles.

        If the codes are in planes (see `has_planes`), a slice that is not empty is the whole chunk.
        Raise `SizeError` unless 0 <= start <= stop <= the number of elements.
        """
        groups, count = self._groups(shape), math.prod(shape)
        if not 0 <= start <= stop <= count:
            raise SizeError(f"the slice {start}:{stop} does not fit a chunk of {count} elements")
        low = start // TILE * TILE
        high = min(-(-stop // TILE) * TILE, count) if stop > start else low
        header_size, bits = self._header_size(groups), self.format.bits
        first_byte, end_byte = (header_size + packed_size(count, bits) for count in (low, high))
        if self.has_planes and stop > start:
            low, high, first_byte, end_byte = 0, count, header_size, self.size(shape)
        return ChunkSlice(self, groups, low, high, header_size, first_byte, end_byte)

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.configuration.items())

    def _packed(self, codes: Array, count: int) -> Array:
        """Return the packed codes of a chunk: `codes` themselves, or a joined copy if they are in planes."""
        if not self.has_planes or not count:
            return codes
        packed = np.empty(codes.size, np.uint8)
        kernels.join_planes(self.format.bits, *_planes(codes, count), count, packed)
        return packed

    def _groups(self, shape: tuple[int, ...]) -> Groups:
        return Groups.from_shape(tuple(shape), self.axis, self.block)

    def _header_size(self, groups: Groups) -> int:
        """Return the number of bytes before the packed codes."""
        return -(-(_HEADER.size + self._parameters_size(groups)) // 8) * 8

    def _parameters_size(self, groups: Groups) -> int:
        """Return the number of bytes that store the offsets or scales."""
        if self.stored_scales is not None:
            return scales_size(self.stored_scales, groups)
        return 0 if groups.axis is None else math.prod(groups.counts)

    def _parse(self, header: Array, packed: Array, groups: Groups, dtype: str) -> Quantized:
        """Return the codes of a chunk or slice with the parsed header; raise `FormatError` if it is invalid."""
        (bias,) = _HEADER.unpack_from(header.data)
        count = math.prod(groups.counts)
        f = self.format if self.scale == "none" else self.format.standard
        deltas, scales, end = np.zeros(groups.counts, np.int32), None, _HEADER.size
        if self.stored_scales is not None:
            end += scales_size(self.stored_scales, groups)
            scales = parse_scales(self.stored_scales, header[_HEADER.size : end], groups)
            valid = bias == f.bias
        elif isinstance(self.scale, float):
            scales = fixed_scale(self.scale, groups)
            valid = bias == f.bias
        elif groups.axis is None:
            valid = abs(bias) <= BIAS_LIMIT and (self.scale != "none" or bias == f.bias)
        else:
            end += count
            deltas = header[_HEADER.size : end].astype(np.int32).reshape(groups.counts)
            valid = -BIAS_LIMIT <= bias <= bias + int(deltas.max(initial=0)) <= BIAS_LIMIT
        unused = header[2 : _HEADER.size].tobytes() + header[end:].tobytes()
        if not valid or unused.strip(b"\0"):
            raise FormatError(
                f"these bytes are not a chunk in {self}: the header has bias {bias} and reserved bytes "
                f"{header[2:8].tobytes().hex()}; check that the chunk was encoded with this configuration"
            )
        offsets = np.asarray(deltas + (bias - f.bias), np.int16)
        return Quantized(f, groups, offsets, scales, packed, dtype)


@dataclass(frozen=True, slots=True)
class _KnownChunk:
    """The header of the chunks that have a fixed scale, and the arguments for decoding them.

    Parsing a header anew takes as long as decoding 100,000 values.
    """

    codec: ChunkCodec
    dtype: np.dtype[Any]
    quantized: Quantized
    size: int
    header: bytes
    layout: Layout
    scales: Array | None

    def fits(self, data: Array, out: Array) -> bool:
        """Return whether these bytes have this header and size, and can be decoded directly into `out`."""
        is_expected = data.size == self.size and data[: len(self.header)].tobytes() == self.header
        is_plain = out.shape == self.quantized.shape and out.dtype == self.dtype and self.scales is not None
        return is_expected and is_plain and out.flags.c_contiguous and out.flags.writeable

    def decode(self, data: Array, out: Array) -> Array:
        """Decode a chunk for which `fits` is true into `out`, and return it."""
        kind = kind_of(self.dtype)
        assert self.scales is not None
        target, codes = builtin_view(out.reshape(-1), kind), data[len(self.header) :]
        groups, in_planes = self.quantized.groups, self.codec.has_planes
        kernels.decode_groups(kind, self.layout, groups, 0, self.scales, codes, target, in_planes=in_planes)
        if needs_clamping(self.quantized, kind):
            clamp_infinities(target, kind)
        return out


@functools.lru_cache
def _known_chunk(codec: ChunkCodec, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _KnownChunk:
    """Return the header and decoding arguments that all chunks of this shape share, if the scale is fixed."""
    native, f, groups = output_dtype(dtype), codec.format.standard, codec._groups(shape)
    header = _HEADER.pack(f.bias).ljust(codec._header_size(groups), b"\0")
    scale, no_codes = fixed_scale(float(codec.scale), groups), np.empty(0, np.uint8)
    q = Quantized(f, groups, np.zeros(groups.counts, np.int16), scale, no_codes, native.name)
    layout, scales = decoding(q, kind_of(native))
    return _KnownChunk(codec, native, q, codec.size(shape), header, layout, scales)


@dataclass(frozen=True, slots=True)
class ChunkSlice:
    """The position of a range of elements in an encoded chunk: the result of `ChunkCodec.slice`."""

    codec: ChunkCodec
    """The encoding of the chunk."""
    groups: Groups
    """The groups of elements that share an offset or scale."""
    start: int
    """The first element, in C order; it begins a tile."""
    stop: int
    """One past the last element."""
    header_size: int
    """The size of the chunk's header in bytes. Decoding any slice of the chunk needs the whole header."""
    first_byte: int
    """The position of the first byte of the slice's codes in the chunk."""
    end_byte: int
    """One past the position of the last byte of the slice's codes."""

    def decode(self, header: Any, packed: Any, dtype: DTypeLike) -> Array:
        """Return the elements start ... stop-1 as a flat array, equal to the same elements of the decoded chunk.

        `header`, `packed`: the bytes 0 ... header_size-1 and first_byte ... end_byte-1 of the chunk, bytes-like.
        Raise as `ChunkCodec.decode` does.
        """
        header, codes = _bytes(header), _bytes(packed)
        if header.size != self.header_size or codes.size != self.end_byte - self.first_byte:
            raise SizeError(
                f"the slice {self.start}:{self.stop} has a header of {header.size} bytes and {codes.size} bytes "
                f"of codes; expected {self.header_size} and {self.end_byte - self.first_byte}"
            )
        native = output_dtype(dtype)
        codes = self.codec._packed(codes, self.stop - self.start)
        q = self.codec._parse(header, codes, self.groups, native.name)
        out = np.empty(self.stop - self.start, native)
        kind: Kind = kind_of(native)
        target, layout = builtin_view(out, kind), q.format.layout
        if q.groups.axis is None and q.scales is None:
            layout = layout._replace(bias=layout.bias + int(q.offsets))
            kernels.decode(kind, layout, codes, target, packed=True)
        elif out.size:
            # float64 represents every product exactly, so each is rounded once, as in `Quantized.dequantize`.
            scales = (
                np.ldexp(1.0, -q.offsets.astype(np.int32)) if q.scales is None else q.scales.astype(np.float64)
            )
            kernels.decode_groups(kind, layout, q.groups, self.start, scales.reshape(-1), codes, target)
        if needs_clamping(q, kind):
            clamp_infinities(target, kind)
        return out


def _planes(codes: Array, count: int) -> tuple[Array, Array]:
    """Return the planes of the upper 8 bits and of the lower bits of `count` codes."""
    end = packed_size(count, 8)
    return codes[:end], codes[end:]


def _bytes(data: Any) -> NDArray[np.uint8]:
    """Return bytes-like data as a flat, read-only view."""
    if isinstance(data, np.ndarray) and data.flags.c_contiguous:
        flat: NDArray[np.uint8] = data.reshape(-1).view(np.uint8)
    else:
        try:
            flat = np.frombuffer(data, np.uint8)
        except (TypeError, AttributeError, ValueError, BufferError) as cause:
            raise DtypeError(f"an encoded chunk is {type(data).__name__}; expected a bytes-like object") from cause
    view = flat[:]
    view.flags.writeable = False
    return view
