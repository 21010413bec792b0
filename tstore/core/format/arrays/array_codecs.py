"""The array→bytes codecs of a chain, except for shards; pure, no I/O.

They are `bytes`, `exmy`, those for variable-length values, and two from numcodecs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.dtypes import is_ml_dtype
from tstore.core.format.arrays.grid import chunk_number
from tstore.core.format.arrays.numcodecs_classes import checked_int, new_codec, settings_of, unsupported
from tstore.core.format.arrays.variable import MAX_ENCODED, bytes_in
from tstore.errors import Corrupt, InvalidArgument, NotFinite, UnsupportedFormat

if TYPE_CHECKING:  # imported with the first codec that compresses
    from tstore.core.format.arrays.compressors import Bytes

__all__ = ["FLOATS", "ArrayCodec", "ExmyCodec", "TileRange", "Tiles", "as_array_codec"]

Values = npt.NDArray[Any]
Document = Mapping[str, Any]
Shape = tuple[int, ...]

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that eXmY encodes."""


class ArrayCodec:
    """An array→bytes codec for chunks of one shape and dtype.

    An encoded chunk has `min_size` to `max_size` bytes. `encode` needs an `out` of `out_size` bytes.
    """

    document: Document
    """Its entry in a `zarr.json`, with all settings."""
    plain = False
    """Whether the encoded bytes are those of the C-ordered chunk."""
    lossless = True
    finite = False
    """Whether it encodes finite values only."""
    has_parts = False
    """Whether `decode_part` decodes less than the whole chunk."""
    min_size: int
    max_size: int
    out_size = 0

    def encode(self, chunk: Values, out: Bytes) -> Any:
        """Return the encoded bytes, in `out` or in new memory."""
        raise NotImplementedError

    def reencode(self, chunk: Values, out: Bytes, previous: memoryview | None) -> Any:
        """Encode a chunk in which some values were decoded from `previous`; these stay equal, if possible."""
        return self.encode(chunk, out)

    def decode(self, data: memoryview, out: Values) -> None:
        """Decode into an array of the chunk's shape and dtype; raise `Corrupt` for invalid data."""
        raise NotImplementedError

    def decode_part(self, data: memoryview, inside: tuple[slice, ...], out: Values) -> None:
        """Decode the selected elements, with positive steps, and cast them to the dtype of `out`."""
        raise NotImplementedError


def as_array_codec(document: Document, dtype: np.dtype[Any], shape: Shape) -> ArrayCodec:
    """Return the array→bytes codec of a `zarr.json`; raise `UnsupportedFormat` for an unknown one."""
    name = document.get("name")
    if dtype.hasobject and name in ("bytes", "exmy", *_VARIABLE):
        return _VariableCodec(document, dtype, shape)
    match name:
        case "bytes":
            return _BytesCodec(document, dtype, shape)
        case "exmy":
            return ExmyCodec(document, dtype, shape)
        case "numcodecs.pcodec":
            return _PCodec(document, dtype, shape)
        case "numcodecs.zfpy":
            return _Zfpy(document, dtype, shape)
    raise unsupported(document, f"it encodes values of variable length, not {dtype}" if name in _VARIABLE else "")


class _BytesCodec(ArrayCodec):
    """Zarr's `bytes` codec."""

    def __init__(self, document: Document, dtype: np.dtype[Any], shape: Shape) -> None:
        settings = settings_of(document, endian=None)
        endian = settings["endian"]
        if endian not in (None, "little", "big"):
            raise unsupported(document, "expected 'endian' to be 'little' or 'big'")
        if dtype.names is not None and endian == "big":
            raise unsupported(document, "the fields of structs are little-endian")
        # ml_dtypes types have no byte order, but their bits do
        self._bits = np.dtype(f"u{dtype.itemsize}") if is_ml_dtype(dtype) else dtype
        self._stored = self._bits.newbyteorder(">" if endian == "big" else "<")
        self.plain = self._stored == self._bits
        ordered = dtype.itemsize > 1 and dtype.kind not in "S" and (dtype.kind != "V" or is_ml_dtype(dtype))
        # as zarr-python writes it: with a byte order where there is one
        self.document = {"name": "bytes", **({"configuration": {"endian": endian or "little"}} if ordered else {})}
        self.min_size = self.max_size = self.out_size = math.prod(shape) * dtype.itemsize

    def encode(self, chunk: Values, out: Bytes) -> Any:
        np.copyto(out.view(self._stored).reshape(chunk.shape), chunk.view(self._bits))
        return out

    def decode(self, data: memoryview, out: Values) -> None:
        np.copyto(out.view(self._bits), np.frombuffer(data, self._stored).reshape(out.shape))


_VARIABLE = {"vlen-utf8": "T", "vlen-bytes": "O"}
"""The codecs of variable length, and the kind of dtype that each encodes."""
_LENGTH_SIZE = 4  # bytes of each length, and of the number of values


class _VariableCodec(ArrayCodec):
    """Zarr's `vlen-utf8` and `vlen-bytes`: the number of values, then each with its length, as numcodecs does."""

    def __init__(self, document: Document, dtype: np.dtype[Any], shape: Shape) -> None:
        name = str(document["name"])
        if _VARIABLE.get(name) != dtype.kind:
            fit = next(codec for codec, kind in _VARIABLE.items() if kind == dtype.kind)
            raise unsupported(document, f"chunks of this dtype are encoded by {fit!r}")
        self.document = {"name": name, "configuration": settings_of(document)}
        self.min_size = _LENGTH_SIZE * (1 + math.prod(shape))
        self.max_size = MAX_ENCODED
        if self.min_size > MAX_ENCODED:
            raise InvalidArgument(
                f"chunks of shape {list(shape)} are too large: a chunk of values of variable length has at most "
                f"{MAX_ENCODED} bytes, {_LENGTH_SIZE} of them for each value"
            )
        self._codec = new_codec(document, {})

    def encode(self, chunk: Values, out: Bytes) -> Any:
        if (size := self.min_size + bytes_in(chunk)) <= MAX_ENCODED:
            encoded = self._codec.encode(np.ascontiguousarray(chunk).reshape(-1))
            if (size := len(encoded)) <= MAX_ENCODED:  # characters may have several bytes
                return encoded
        raise InvalidArgument(
            f"its values need {size} bytes or more, but a chunk of values of variable length has at most "
            f"{MAX_ENCODED}; choose smaller chunks"
        )

    def decode(self, data: memoryview, out: Values) -> None:
        if (count := int.from_bytes(data[:_LENGTH_SIZE], "little")) != out.size:
            raise Corrupt(f"expected {out.size} values, but the chunk declares {count}")
        try:
            np.copyto(out, self._codec.decode(data).reshape(out.shape), casting="unsafe")
        except ValueError as error:
            raise Corrupt(f"{self.document['name']} bytes do not decode: {error}") from error


class ExmyCodec(ArrayCodec):
    """The `exmy` codec of low-bit floats."""

    lossless = False
    finite = True

    def __init__(self, document: Document, dtype: np.dtype[Any], shape: Shape) -> None:
        settings = document.get("configuration") or {}
        if dtype.name not in FLOATS:
            raise InvalidArgument(
                f"codec exmy encodes float16, bfloat16, float32 and float64, not {dtype}; "
                "store such an array without it"
            )
        if "format" not in settings or not settings.keys() <= set(exmy.ChunkCodec.keys):
            raise unsupported(
                document, f"expected a 'format', and other settings among {', '.join(exmy.ChunkCodec.keys)}"
            )
        try:
            self.codec = exmy.ChunkCodec.from_configuration(settings)
            self.min_size = self.max_size = self.out_size = self.codec.size(shape)
        except exmy.SizeError as error:
            raise InvalidArgument(
                f"codec exmy with {settings!r:.200} does not fit chunks of shape {shape}: {error}"
            ) from None
        except exmy.ExmyError as error:
            raise UnsupportedFormat(f"codec exmy: {error!s:.300}") from None
        self.document = document
        self.has_parts = not self.codec.has_planes
        self._dtype = dtype
        self._shape = shape

    def encode(self, chunk: Values, out: Bytes) -> Any:
        """Encode into `out`; raise `NotFinite` or `InvalidArgument` for values that have no code."""
        return self._encoded(lambda: self.codec.encode(chunk, out))

    def reencode(self, chunk: Values, out: Bytes, previous: memoryview | None) -> Any:
        """Encode without clipping, with the scales of `previous` wherever possible; raise as `encode` does."""
        return self._encoded(lambda: self.codec.reencode(chunk, previous, out))

    @staticmethod
    def _encoded(encode: Callable[[], Values]) -> Values:
        try:
            return encode()
        except exmy.NonFiniteError as error:
            raise NotFinite(
                f"{error.count} of {error.total} values are NaN or infinite, the first at {list(error.index)}; "
                "eXmY has only finite values"
            ) from None
        except exmy.ExmyError as error:  # such as a float64 beyond the range of every bias
            raise InvalidArgument(f"codec exmy: {error}") from None

    def decode(self, data: memoryview, out: Values) -> None:
        """Decode into `out`."""
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        try:
            self.codec.decode(data, target.shape, self._dtype, out=target)
        except exmy.ExmyError as error:
            raise Corrupt(f"codec exmy: {error}") from error
        if target is not out:
            np.copyto(out, target)

    def tiles(self, inside: tuple[slice, ...]) -> Tiles:
        """Return the tiles that contain the selected elements; steps must be positive."""
        return Tiles(self.codec, self._dtype, self._shape, inside)

    def tile_range(self, first: int, stop: int) -> TileRange:
        """Return the tiles that contain the elements with these numbers."""
        return TileRange(self.codec, self._dtype, self._shape, first, stop)

    def decode_part(self, data: memoryview, inside: tuple[slice, ...], out: Values) -> None:
        """Decode the tiles that contain the selected elements."""
        tiles = self.tiles(inside)
        tiles.decode(data[: tiles.header_size], data[tiles.first_byte : tiles.end_byte], out)


class TileRange:
    """The tiles of an encoded chunk that contain the elements `first:stop` in C order.

    The chunk's header is its first `header_size` bytes, and the tiles are the bytes from `first_byte`
    up to `end_byte`.
    """

    def __init__(self, codec: exmy.ChunkCodec, dtype: np.dtype[Any], shape: Shape, first: int, stop: int) -> None:
        self._slice = codec.slice(shape, first, stop)
        self._dtype = dtype
        self.start = self._slice.start
        """The number of the first element in the tiles."""
        self.header_size, self.first_byte = self._slice.header_size, self._slice.first_byte
        self.end_byte = self._slice.end_byte

    def elements(self, header: Any, codes: Any) -> Values:
        """Return the elements of the tiles, decoded; raise `Corrupt`."""
        try:
            return self._slice.decode(header, codes, self._dtype)
        except exmy.ExmyError as error:
            raise Corrupt(f"codec exmy: {error}") from error


class Tiles(TileRange):
    """The tiles of an encoded chunk from the first to the last selected element; steps are positive."""

    def __init__(
        self, codec: exmy.ChunkCodec, dtype: np.dtype[Any], shape: Shape, inside: tuple[slice, ...]
    ) -> None:
        counts = tuple(len(range(s.start, s.stop, s.step)) for s in inside)
        # elements are numbered in C order
        first = chunk_number([s.start for s in inside], shape)
        last = chunk_number([s.start + (n - 1) * s.step for s, n in zip(inside, counts, strict=True)], shape)
        super().__init__(codec, dtype, shape, first, last + 1)
        self._counts = counts
        strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
        self._offset = (first - self.start) * dtype.itemsize
        self._strides = tuple(stride * s.step for stride, s in zip(strides, inside, strict=True))

    def decode(self, header: Any, codes: Any, out: Values) -> None:
        """Decode the selected elements and cast them to the dtype of `out`; raise `Corrupt`."""
        values = self.elements(header, codes)
        selected = np.ndarray(self._counts, values.dtype, values, self._offset, self._strides)
        np.copyto(out, selected, casting="unsafe")


class _Numcodec(ArrayCodec):
    """An array→bytes codec of numcodecs, whose encoded chunks have any length up to a limit."""

    min_size = 0

    def __init__(
        self, document: Document, settings: Mapping[str, Any], dtype: np.dtype[Any], shape: Shape, probe: Shape
    ) -> None:
        # zarr-python requires a configuration, even an empty one
        self.document = {"name": document["name"], "configuration": document.get("configuration") or {}}
        from tstore.core.format.arrays.compressors import max_encoded_size

        self.max_size = max_encoded_size(math.prod(shape) * dtype.itemsize)
        self._dtype = dtype
        self._codec = new_codec(document, settings)
        try:
            self._codec.encode(np.zeros(probe, dtype))
        except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
            raise unsupported(document, f"chunks of {dtype} can't be encoded: {error}") from None

    def encode(self, chunk: Values, out: Bytes) -> Any:
        try:
            return self._codec.encode(np.ascontiguousarray(chunk))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgument(f"codec {self.document['name']}: {error}") from None

    def _failed(self, error: object) -> Corrupt:
        return Corrupt(f"{self.document['name']} bytes do not decode: {error}")


class _PCodec(_Numcodec):
    """The `pcodec` of numcodecs, for numbers in any order."""

    def __init__(self, document: Document, dtype: np.dtype[Any], shape: Shape) -> None:
        settings = settings_of(
            document,
            level=8,
            mode_spec="auto",
            delta_spec="auto",
            paging_spec="equal_pages_up_to",
            delta_encoding_order=None,
            equal_pages_up_to=1 << 18,
        )
        checked_int(document, settings, "level", 0, 12)
        checked_int(document, settings, "equal_pages_up_to", 1, 1 << 24)
        if settings["delta_encoding_order"] is not None:
            checked_int(document, settings, "delta_encoding_order", 0, 7)
        if dtype.kind not in "iuf":
            raise unsupported(document, f"it encodes integers and floats, not {dtype}")
        super().__init__(document, settings, dtype, shape, (1,))

    def decode(self, data: memoryview, out: Values) -> None:
        from pcodec import standalone  # not through numcodecs, which hides whether all values were decoded

        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        try:
            progress = standalone.simple_decompress_into(bytes(data), target.reshape(-1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error
        if progress.n_processed != out.size or not progress.finished:
            raise self._failed(f"expected {out.size} values, got {progress.n_processed} or more")
        if target is not out:
            np.copyto(out, target)


_ZFP_MODES = (2, 3, 4)  # fixed rate, fixed precision, fixed accuracy


class _Zfpy(_Numcodec):
    """The `zfpy` of numcodecs, for up to four axes of smooth numbers."""

    lossless = False

    def __init__(self, document: Document, dtype: np.dtype[Any], shape: Shape) -> None:
        settings = settings_of(document, mode=4, tolerance=-1, rate=-1, precision=-1, compression_kwargs=None)
        for key in ("tolerance", "rate", "precision"):
            if type(settings[key]) not in (int, float):
                raise unsupported(document, f"expected {key!r} to be a number")
        if settings["mode"] not in _ZFP_MODES or not 1 <= len(shape) <= 4:
            raise unsupported(document, f"expected one to four axes, and 'mode' to be one of {_ZFP_MODES}")
        super().__init__(document, settings, dtype, shape, (1,) * len(shape))
        self.finite = dtype.kind == "f"
        # zfp reads on at the end of its input, at most two bits for each bit of the blocks of four elements a side
        self._padding = bytes(64 + 16 * math.prod(n + -n % 4 for n in shape))

    def encode(self, chunk: Values, out: Bytes) -> Any:
        if chunk.dtype.kind == "f" and not np.isfinite(chunk).all():
            raise NotFinite(f"codec {self.document['name']} encodes only finite values, without NaN or infinity")
        return super().encode(chunk, out)

    def decode(self, data: memoryview, out: Values) -> None:
        import zfpy  # not through numcodecs, which does not check the header

        padded = bytes(data) + self._padding
        try:
            header = zfpy.header(padded)
            sides = tuple(header[key] for key in ("nw", "nz", "ny", "nx"))
            shape, dtype = tuple(n for n in sides if n), np.dtype(header["type"])
            if shape != out.shape or dtype != self._dtype:
                raise Corrupt(f"expected values of {self._dtype}{list(out.shape)}, not of {dtype}{list(shape)}")
            np.copyto(out, zfpy.decompress_numpy(padded))
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise self._failed(error) from error
