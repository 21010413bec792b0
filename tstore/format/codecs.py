"""The codec chain that encodes a chunk to bytes and decodes it; pure, no I/O.

The bytes of a chunk are those of Zarr v3: C order, little-endian, chunks at the array's edge padded to the full
chunk shape. A chain is one array→bytes codec (`bytes` or `exmy`), then compressors (`zstd`, `gzip`, `blosc`).
Section 9 of exmy/FORMAT.md specifies the bytes of the `exmy` codec; each chunk has its own exponent offsets.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import exmy
import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt, InvalidArgument, NotFinite, UnsupportedFormat
from tstore.format.compressors import Bytes, as_compressor, is_feasible, max_encoded_size

__all__ = [
    "FLOATS",
    "Chain",
    "Codecs",
    "as_configuration",
    "chain_documents",
    "is_exmy",
    "with_configuration",
    "without_clipping",
]

Codecs = str | exmy.Format | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""How chunks are stored: None (uncompressed), "lossless" (compressed), an eXmY format such as "e4m3" (or an
`exmy.Format`), the configuration of `exmy` (a mapping with the key "format"), or the codecs of a Zarr v3 array."""

LOSSLESS = "lossless"

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that eXmY encodes."""

_NATIVE_LITTLE = sys.byteorder == "little"
_MAX_COMPRESSORS = 8
_LOSSLESS_BLOCK = 1 << 19
"""Bytes of a blosc block. Smaller blocks compress worse: blosc splits each block by the bytes of an element."""


class _ArrayCodec(Protocol):
    """An array→bytes codec for chunks of one shape.

    `size` is the length of an encoded chunk, `plain` whether its bytes are those of the C-ordered chunk.
    """

    plain: bool
    size: int

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> None: ...
    def decode(self, data: memoryview, out: npt.NDArray[Any]) -> None: ...


class _BytesCodec:
    """Zarr's `bytes` codec, little-endian."""

    def __init__(self, dtype: np.dtype[Any], chunk_shape: tuple[int, ...]) -> None:
        self.plain = _NATIVE_LITTLE or dtype.itemsize == 1
        self.size = math.prod(chunk_shape) * dtype.itemsize
        self._stored = dtype if self.plain else dtype.newbyteorder("<")

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> None:
        np.copyto(out.view(self._stored).reshape(chunk.shape), chunk)

    def decode(self, data: memoryview, out: npt.NDArray[Any]) -> None:
        np.copyto(out, np.frombuffer(data, self._stored).reshape(out.shape))


class _ExmyCodec:
    """The `exmy` codec of low-bit floats."""

    plain = False

    def __init__(self, dtype: np.dtype[Any], chunk_shape: tuple[int, ...], settings: Mapping[str, Any]) -> None:
        if dtype.name not in FLOATS:
            raise InvalidArgument(
                f"codec exmy encodes float16, bfloat16, float32 and float64, not {dtype}; "
                "store such an array without it"
            )
        try:
            self.codec = exmy.ChunkCodec.from_configuration(settings)
            self.size = self.codec.size(chunk_shape)
        except exmy.SizeError as error:
            raise InvalidArgument(
                f"codec exmy with {settings!r:.200} does not fit chunks of shape {chunk_shape}: {error}"
            ) from None
        except exmy.ExmyError as error:
            raise UnsupportedFormat(f"codec exmy: {error!s:.300}") from None
        self._dtype = dtype

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> None:
        try:
            self.codec.encode(chunk, out=out)
        except exmy.NonFiniteError as error:
            raise NotFinite(
                f"{error.count} of {error.total} values are NaN or infinite, the first at {list(error.index)}; "
                "eXmY has only finite values"
            ) from None
        except exmy.ExmyError as error:  # such as a float64 beyond the range of every bias
            raise InvalidArgument(f"codec exmy: {error}") from None

    def decode(self, data: memoryview, out: npt.NDArray[Any]) -> None:
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        try:
            self.codec.decode(data, target.shape, self._dtype, out=target)
        except exmy.ExmyError as error:
            raise Corrupt(f"codec exmy: {error}") from error
        if target is not out:
            np.copyto(out, target)


class Chain:
    """The codec chain of one array, whose chunks all have one shape."""

    def __init__(
        self, dtype: np.dtype[Any], chunk_shape: tuple[int, ...], documents: Sequence[Mapping[str, Any]]
    ) -> None:
        if not documents:
            raise InvalidArgument("a codec chain needs an array→bytes codec first: 'bytes' or 'exmy'")
        first, *rest = documents
        settings = first.get("configuration") or {}
        self._array: _ArrayCodec
        match first.get("name"):
            case "bytes" if settings.get("endian", "little") == "little":
                self._array = _BytesCodec(dtype, chunk_shape)
            case "exmy" if "format" in settings and set(settings) <= set(exmy.ChunkCodec.keys):
                self._array = _ExmyCodec(dtype, chunk_shape, settings)
            case name:
                raise UnsupportedFormat(
                    f"codec {name!r:.100} with configuration {settings!r:.200} is not supported; "
                    "install a newer tstore, or use 'bytes' (little-endian) or 'exmy' first in a chain"
                )
        if len(rest) > _MAX_COMPRESSORS:
            raise UnsupportedFormat(f"{len(rest)} compressors in a chain; expected at most {_MAX_COMPRESSORS}")
        self._compressors = [as_compressor(document) for document in rest]
        self.plain = self._array.plain
        """Whether the encoded bytes before compression are those of the chunk in memory."""
        self.identity = self.plain and not self._compressors
        """Whether the encoded bytes are those of the chunk in memory."""
        self.encoded_size: int = self._array.size
        """The exact length of an encoded chunk before compression, in bytes."""
        self._max_sizes = [self.encoded_size]  # of the input of each compressor, and of the output of the last
        for compressor in self._compressors:
            if compressor.max_input is not None and self._max_sizes[-1] > compressor.max_input:
                raise InvalidArgument(
                    f"a chunk of {self.encoded_size} bytes is too long for blosc; choose smaller chunks, "
                    f"of at most {compressor.max_input} bytes"
                )
            self._max_sizes.append(max_encoded_size(self._max_sizes[-1]))

    @property
    def exmy_codec(self) -> exmy.ChunkCodec | None:
        """The eXmY codec of the chunks, compressed or not; None if they are not in an eXmY format."""
        return self._array.codec if isinstance(self._array, _ExmyCodec) else None

    @property
    def lossless(self) -> bool:
        """Whether decoding returns exactly the values that were encoded."""
        return not isinstance(self._array, _ExmyCodec)

    @property
    def has_fixed_length(self) -> bool:
        """Whether every encoded chunk has exactly `encoded_size` bytes."""
        return not self._compressors

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> memoryview:
        """Return the encoded bytes of a C-contiguous chunk: in `out` (of `encoded_size` bytes) or in new memory.

        A `plain` chain needs no `out`, and without compressors it returns the chunk's own memory. The chunk must
        not change during the call.
        """
        data: Any = chunk.reshape(-1).view(np.uint8) if self.plain else out
        if not self.plain:
            self._array.encode(chunk, out)
        for compressor in self._compressors:
            data = compressor.encode(data)
        return memoryview(data).cast("B")

    def check_length(self, length: int) -> None:
        """Raise `Corrupt` if no encoded chunk can have this length; call it before memory is allocated for one."""
        if self._compressors:
            if length > self._max_sizes[-1] or not is_feasible(self.encoded_size, length, len(self._compressors)):
                raise Corrupt(f"{length} bytes can't be the encoding of {self.encoded_size} bytes")
        elif length != self.encoded_size:
            raise Corrupt(f"expected {self.encoded_size} encoded bytes, got {length}")

    def decode(self, data: memoryview, out: npt.NDArray[Any]) -> None:
        """Decode a chunk into `out`, an array of its shape; raise `Corrupt` or `UnsupportedFormat`.

        No compressor decodes more bytes than the encoder can have passed to it, even if the data declare more.
        """
        self.check_length(len(data))
        if self._compressors:
            for stage in range(len(self._compressors) - 1, 0, -1):
                data = memoryview(self._compressors[stage].decode(data, self._max_sizes[stage])).cast("B")
            if self.plain and out.flags.c_contiguous:
                self._compressors[0].decode_into(data, out.reshape(-1).view(np.uint8))
                return
            buffer = np.empty(self.encoded_size, np.uint8)
            self._compressors[0].decode_into(data, buffer)
            data = buffer.data
        self._array.decode(data, out)


def chain_documents(dtype: np.dtype[Any], codecs: Codecs) -> list[dict[str, Any]]:
    """Return the codecs as a `zarr.json` has them; raise `InvalidArgument` for an invalid eXmY format."""
    uncompressed: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        uncompressed["configuration"] = {"endian": "little"}
    if codecs is None:
        return [uncompressed]
    if codecs == LOSSLESS:
        settings = {
            "typesize": dtype.itemsize,
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "shuffle" if dtype.itemsize > 1 else "bitshuffle",
            "blocksize": _LOSSLESS_BLOCK,
        }
        return [uncompressed, {"name": "blosc", "configuration": settings}]
    if isinstance(codecs, str | exmy.Format):
        codecs = {"format": codecs}
    if isinstance(codecs, Mapping):
        try:
            return [{"name": "exmy", "configuration": exmy.ChunkCodec.from_configuration(codecs).configuration}]
        except exmy.ExmyError as error:
            raise InvalidArgument(
                f"codecs: {error}; {LOSSLESS!r} compresses without loss, and None stores values as they are"
            ) from None
    return [dict(c) for c in codecs]


def without_clipping(codecs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the codecs with scale "max", which clips no value, in place of "search"; both decode the same chunks.

    Values decoded from a chunk are then encoded exactly again, unless a larger value was added to the chunk.
    """
    first, *rest = codecs
    settings = first.get("configuration") or {}
    if first.get("name") == "exmy" and settings.get("scale", "search") == "search":
        first = {**first, "configuration": {**settings, "scale": "max"}}
    return [first, *rest]


def is_exmy(codecs: Codecs) -> bool:
    """Return whether the codecs begin with an eXmY format."""
    if isinstance(codecs, str):
        return codecs != LOSSLESS
    if isinstance(codecs, exmy.Format | Mapping):
        return True
    return bool(codecs) and isinstance(codecs[0], Mapping) and codecs[0].get("name") == "exmy"  # type: ignore[index]


def as_configuration(codecs: Codecs) -> Mapping[str, Any]:
    """Return the configuration of the eXmY format with which the codecs begin."""
    if isinstance(codecs, str | exmy.Format):
        return {"format": str(codecs)}
    if isinstance(codecs, Mapping):
        return codecs
    assert codecs is not None
    configuration: Mapping[str, Any] = codecs[0].get("configuration") or {}
    return configuration


def with_configuration(codecs: Codecs, configuration: Mapping[str, Any]) -> Codecs:
    """Return the codecs with another configuration of their eXmY format and the same compressors."""
    if codecs is None or isinstance(codecs, str | exmy.Format | Mapping):
        return configuration
    return [{"name": "exmy", "configuration": dict(configuration)}, *codecs[1:]]
