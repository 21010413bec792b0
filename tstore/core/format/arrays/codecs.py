"""The codec chain that encodes a chunk to bytes and decodes it; pure, no I/O.

The bytes of a chunk are those of Zarr v3; chunks at the array's edge are padded to the full chunk shape. A chain
is any number of `filters` (array→array), one array→bytes codec, which may be a shard of chunks with their own
chains, and `bytes_codecs`, most of them compressors. Nearly all arrays have little-endian `bytes` or `exmy`, and
at most one compressor. Section 9 of exmy/FORMAT.md specifies the bytes of the `exmy` codec; each chunk has its own
exponent offsets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.format.arguments import checked_attributes, quote
from tstore.core.format.arrays.array_codecs import FLOATS, ArrayCodec, ExmyCodec, TileRange, Tiles, as_array_codec
from tstore.core.format.arrays.numcodecs_classes import Filter, Transpose, as_filter, settings_of, unsupported
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

if TYPE_CHECKING:  # imported on first use by a chain
    from tstore.core.format.arrays.compressors import Bytes, Compressor
    from tstore.core.format.arrays.sharded import Sharded

__all__ = [
    "FLOATS",
    "Chain",
    "Codecs",
    "as_configuration",
    "chain_documents",
    "checked_codecs",
    "codecs_text",
    "is_exmy",
    "with_configuration",
]

Codecs = str | exmy.Format | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
"""How chunks are stored: None (uncompressed), "lossless" (compressed), an eXmY format such as "e4m3" (or an
`exmy.Format`), the configuration of `exmy` (a mapping with the key "format"), or the codecs of a Zarr v3 array."""

LOSSLESS = "lossless"

_MAX_CODECS = 8  # limit for filters and for bytes→bytes codecs
_MAX_NESTED = 4  # shards within shards
_MAX_BYTES = 1 << 62
_LOSSLESS_BLOCK = 1 << 19
"""Bytes of a blosc block. Smaller blocks compress worse: blosc splits each block by the bytes of an element."""


class Chain:
    """The codec chain of one array, whose chunks all have one shape.

    `documents` are its codecs as a `zarr.json` has them, with the settings that depend on the array.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        chunk_shape: tuple[int, ...],
        documents: Sequence[Mapping[str, Any]],
        fill_value: Any = 0,
        *,
        max_nested: int = _MAX_NESTED,
    ) -> None:
        self._filters: list[Filter] = []
        stage, shape = dtype, chunk_shape
        rest = list(documents)
        while rest and (filter_ := as_filter(rest[0], stage, shape)) is not None:
            self._filters.append(filter_)
            stage, shape = filter_.dtype, filter_.shape
            rest.pop(0)
        if not rest:
            raise InvalidArgument("a codec chain needs an array→bytes codec, such as 'bytes' or 'exmy'")
        first, *rest = rest
        if max(len(self._filters), len(rest)) > _MAX_CODECS:
            count = max(len(self._filters), len(rest))
            raise UnsupportedFormat(f"{count} codecs of one kind in a chain; expected at most {_MAX_CODECS}")
        self._array: ArrayCodec
        if first.get("name") == "sharding_indexed":
            self._array = _sharded(first, stage, shape, fill_value, max_nested)
        else:
            self._array = as_array_codec(first, stage, shape)
        self._compressors: list[Compressor] = []
        if rest:
            from tstore.core.format.arrays.bytes_codecs import as_bytes_codec

            self._compressors = [as_bytes_codec(document, dtype.itemsize) for document in rest]
        codecs: list[Filter | ArrayCodec | Compressor] = [*self._filters, self._array, *self._compressors]
        self.documents = [codec.document for codec in codecs]
        self.plain = self._array.plain and not self._filters
        """Whether the encoded bytes before compression are those of the chunk in memory."""
        self.identity = self.plain and not self._compressors
        """Whether the encoded bytes are those of the chunk in memory."""
        self.has_parts = self._array.has_parts and not self._filters
        """Whether `decode_part` decodes less than the whole chunk."""
        self.has_tiles = isinstance(self._array, ExmyCodec) and self.has_parts and not self._compressors
        """Whether a part of the encoded bytes suffices to decode some elements."""
        self.lossless = self._array.lossless and all(each.lossless for each in self._filters)
        """Whether decoding returns exactly the values that were encoded."""
        self.finite = self._array.finite
        """Whether only finite values can be encoded."""
        self.encoded_size: int = self._array.max_size
        """The length of an encoded chunk before compression in bytes, or its maximum if the length varies."""
        self.out_size = 0 if self.plain else self._array.out_size
        """The bytes of the `out` that `encode` needs."""
        self._measure()

    def _measure(self) -> None:
        """Set the limits of encoded lengths; raise `InvalidArgument` if chunks are too long for a codec."""
        least, most = self._array.min_size, self._array.max_size
        if most >= _MAX_BYTES:
            raise InvalidArgument(f"encoded chunks of up to {most} bytes are too long: expected fewer than 2^62")
        self._max_sizes = [most]  # the maximum input of each compressor, and the maximum output of the last
        exact = least == most
        for compressor in self._compressors:
            compressor.check_input(least if exact else 0, most)
            if compressor.overhead is None:
                from tstore.core.format.arrays.compressors import max_encoded_size

                exact, most = False, max_encoded_size(most)
            else:
                least, most = least + compressor.overhead, most + compressor.overhead
            self._max_sizes.append(most)
        self.max_length = most
        """The greatest length of an encoded chunk, in bytes."""
        self.fixed_length = most if exact else None
        """The exact length of every encoded chunk, or None if it depends on the data."""
        self._max_ratio = math.prod(compressor.max_ratio for compressor in self._compressors)

    @property
    def exmy_codec(self) -> exmy.ChunkCodec | None:
        """The eXmY codec of the chunks, compressed or not; None if they are not codes of an eXmY format."""
        return self._array.codec if isinstance(self._array, ExmyCodec) and not self._filters else None

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> memoryview:
        """Return the encoded bytes of a C-contiguous chunk: in `out` (of `out_size` bytes) or in new memory.

        A `plain` chain without compressors returns the chunk's own memory. The chunk must not change during the
        call.
        """
        data: Any
        if self.plain:
            data = chunk.reshape(-1).view(np.uint8)
        else:
            for filter_ in self._filters:
                chunk = filter_.encode(chunk)
            data = self._array.encode(chunk, out)
        return self._compressed(data)

    def reencode(self, chunk: npt.NDArray[Any], out: Bytes, previous: memoryview | None) -> memoryview:
        """Encode a chunk in which some values have changed; the others stay the same, if possible.

        `previous`: the encoded bytes that the chunk was decoded from, or None. A lossy codec keeps their scales.
        """
        for filter_ in self._filters:
            chunk = filter_.encode(chunk)
        former = None if previous is None else self._decompressed(previous, 0)
        return self._compressed(self._array.reencode(chunk, out, former))

    def _compressed(self, data: Any) -> memoryview:
        for compressor in self._compressors:
            data = compressor.encode(data)
        return memoryview(data).cast("B")

    def check_length(self, length: int) -> None:
        """Raise `Corrupt` if no encoded chunk can have this length; call it before memory is allocated for one."""
        if self.fixed_length is not None:
            if length != self.fixed_length:
                raise Corrupt(f"expected {self.fixed_length} encoded bytes, got {length}")
        elif length > self.max_length or (length + 4) * self._max_ratio < self._array.min_size:
            raise Corrupt(f"{length} bytes can't be the encoding of {self.encoded_size} bytes")

    def decode(self, data: memoryview, out: npt.NDArray[Any]) -> None:
        """Decode a chunk into `out`, an array of its shape; raise `Corrupt` or `UnsupportedFormat`.

        No compressor decodes more bytes than the encoder can have passed to it, even if the data declare more.
        """
        self.check_length(len(data))
        if self._compressors and self.plain and out.flags.c_contiguous:
            self._compressors[0].decode_into(self._decompressed(data, 1), out.reshape(-1).view(np.uint8))
        else:
            self._decode_filtered(self._decompressed(data, 0), out, 0)

    def decode_part(self, data: memoryview, inside: tuple[slice, ...], out: npt.NDArray[Any]) -> None:
        """Decode the selected elements, with positive steps, and cast them to the dtype of `out`.

        The chain must have `has_parts`: a shard decodes only the inner chunks that have selected elements, and
        `exmy` only the tiles.
        """
        self.check_length(len(data))
        self._array.decode_part(self._decompressed(data, 0), inside, out)

    def tiles(self, inside: tuple[slice, ...]) -> Tiles | None:
        """Return the tiles with the selected elements, if a part of the encoded bytes suffices to decode them."""
        return self._array.tiles(inside) if isinstance(self._array, ExmyCodec) and self.has_tiles else None

    def tile_range(self, first: int, stop: int) -> TileRange:
        """Return the tiles with the elements of these numbers, if the chain `has_tiles`."""
        assert isinstance(self._array, ExmyCodec)
        return self._array.tile_range(first, stop)

    def _decompressed(self, data: memoryview, first: int) -> memoryview:
        """Undo the compressors from the last one back to the one at `first`."""
        for stage in range(len(self._compressors) - 1, first - 1, -1):
            if stage == 0 and self._array.min_size == self._array.max_size:
                buffer = np.empty(self._array.max_size, np.uint8)
                self._compressors[0].decode_into(data, buffer)
                return buffer.data
            data = memoryview(self._compressors[stage].decode(data, self._max_sizes[stage])).cast("B")
        return data

    def _decode_filtered(self, data: memoryview, out: npt.NDArray[Any], first: int) -> None:
        """Decode with the filters from `first` on; transposed chunks are decoded straight into a view of `out`."""
        if first == len(self._filters):
            self._array.decode(data, out)
            return
        filter_ = self._filters[first]
        if isinstance(filter_, Transpose):
            self._decode_filtered(data, filter_.encode(out), first + 1)
            return
        encoded = np.empty(filter_.shape, filter_.dtype)
        self._decode_filtered(data, encoded, first + 1)
        filter_.decode(encoded, out)


def _sharded(
    document: Mapping[str, Any], dtype: np.dtype[Any], shape: tuple[int, ...], fill_value: Any, max_nested: int
) -> Sharded:
    from tstore.core.format.arrays.sharded import Sharded, inner_counts

    settings = settings_of(document, chunk_shape=None, codecs=None, index_codecs=None, index_location="end")
    counts = inner_counts(document, shape)
    if not max_nested:
        raise unsupported(document, f"shards are nested more than {_MAX_NESTED} deep")
    for key in ("codecs", "index_codecs"):
        if not isinstance(settings[key], (list, tuple)):
            raise unsupported(document, f"expected {key!r} to be a list of codecs")
    inner_shape = tuple(n // count for n, count in zip(shape, counts, strict=True))
    codecs, index_codecs = (_as_documents(settings[key]) for key in ("codecs", "index_codecs"))
    inner = Chain(dtype, inner_shape, codecs, fill_value, max_nested=max_nested - 1)
    index = Chain(np.dtype(np.uint64), (*counts, 2), index_codecs, max_nested=0)
    settings |= {"chunk_shape": list(inner_shape), "codecs": inner.documents, "index_codecs": index.documents}
    with np.errstate(all="ignore"):
        fill = np.full((), fill_value, dtype) if dtype.hasobject else np.asarray(fill_value).astype(dtype)
    return Sharded({"name": "sharding_indexed", "configuration": settings}, shape, counts, fill, inner, index)


def _as_documents(codecs: Sequence[Any]) -> list[dict[str, Any]]:
    """Return codecs as objects with names; a name alone is the short form of one."""
    documents = [{"name": codec} if isinstance(codec, str) else codec for codec in codecs]
    for document in documents:
        if not isinstance(document, Mapping) or not isinstance(document.get("name"), str):
            raise UnsupportedFormat(
                f"{document!r:.100} is not a codec: expected an object with a name, such as {{'name': 'zstd'}}; "
                "for a codec of zarr-python, pass its to_dict()"
            )
        if not isinstance(document.get("configuration") or {}, Mapping):
            raise unsupported(document, "its configuration is not an object")
    return [dict(document) for document in documents]


def checked_codecs(codecs: Any, where: str = "codecs=") -> Codecs:
    """Parse the codecs of a `codecs=` argument or a rule; those of a list become objects with names.

    Raise `InvalidArgument`, prefixed by `where`, for codecs that no array could have. A `Chain` checks
    whether they suit a particular array.
    """
    if codecs is None or (isinstance(codecs, str) and codecs == LOSSLESS):
        return codecs
    from tstore.core.format.arrays.bytes_codecs import is_bytes_codec

    if is_bytes_codec(codecs) if isinstance(codecs, str) else isinstance(codecs, Mapping) and "name" in codecs:
        raise InvalidArgument(
            f"{where}{quote(codecs)}: pass Zarr codecs as a list, such as {['bytes', codecs]!r:.200}; without a "
            f"list, expected {LOSSLESS!r} or an eXmY format, such as 'e4m3'"
        )
    if isinstance(codecs, str | exmy.Format | Mapping):
        _check_exmy(codecs, where)
        return codecs
    if not isinstance(codecs, list | tuple):
        raise InvalidArgument(f"{where}{quote(codecs)}: expected an eXmY format, such as 'e4m3'. {_OTHER_CODECS}")
    if not codecs:
        raise InvalidArgument(f"{where}[]: the list of codecs is empty. {_OTHER_CODECS}")
    try:
        documents = _as_documents(codecs)
        for document in documents:
            if others := sorted(map(str, document.keys() - {"name", "configuration", "must_understand"})):
                raise unsupported(document, f"its settings, such as {others[0]!r}, belong in its 'configuration'")
    except UnsupportedFormat as error:
        raise InvalidArgument(f"{where}{quote(codecs)}: {error}") from None
    checked_attributes({"codecs": documents}, where)
    if is_exmy(documents):
        _check_exmy(documents, where)
    return documents


def _check_exmy(codecs: Codecs, where: str) -> None:
    try:
        exmy.ChunkCodec.from_configuration(as_configuration(codecs))
    except exmy.ExmyError as error:
        raise InvalidArgument(f"{where}{quote(codecs)}: {error}. {_OTHER_CODECS}") from None


def chain_documents(dtype: np.dtype[Any], codecs: Codecs) -> list[dict[str, Any]]:
    """Return the codecs in the form of a `zarr.json`; raise `InvalidArgument` for invalid ones."""
    codecs = checked_codecs(codecs)
    uncompressed: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        uncompressed["configuration"] = {"endian": "little"}
    if dtype.hasobject:
        uncompressed = {"name": "vlen-utf8" if dtype.kind == "T" else "vlen-bytes"}
    if codecs is None:
        return [uncompressed]
    if codecs == LOSSLESS and dtype.hasobject:
        return [uncompressed, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    if codecs == LOSSLESS:
        settings = {
            "typesize": dtype.itemsize,
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "shuffle" if dtype.itemsize > 1 else "bitshuffle",
            "blocksize": _LOSSLESS_BLOCK,
        }
        return [uncompressed, {"name": "blosc", "configuration": settings}]
    if isinstance(codecs, str | exmy.Format | Mapping):
        configuration = exmy.ChunkCodec.from_configuration(as_configuration(codecs)).configuration
        return [{"name": "exmy", "configuration": configuration}]
    from tstore.core.format.arrays.bytes_codecs import is_bytes_codec

    documents = _as_documents(codecs)
    if is_bytes_codec(documents[0]["name"]):
        documents.insert(0, uncompressed)  # as TensorStore does
    return documents


_OTHER_CODECS = (
    f"Other codecs are {LOSSLESS!r}, None (uncompressed) and lists of Zarr v3 codecs, such as ['bytes', 'zstd']"
)


def codecs_text(codecs: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of codecs for display: an eXmY codec by its format, and shards with the codecs inside."""
    names = []
    for document in codecs:
        name, settings = str(document["name"]), document.get("configuration") or {}
        if name == "exmy":
            name = settings["format"]
        elif name == "sharding_indexed":
            name = f"shards({codecs_text(settings['codecs'])})"
        names.append(name)
    return "+".join(names)


def is_exmy(codecs: Codecs) -> bool:
    """Return whether the codecs begin with an eXmY format."""
    if isinstance(codecs, str | exmy.Format | Mapping):
        return codecs != LOSSLESS
    return bool(codecs) and isinstance(codecs[0], Mapping) and codecs[0].get("name") == "exmy"  # type: ignore[index]


def as_configuration(codecs: Codecs) -> Mapping[str, Any]:
    """Return the configuration of the eXmY format with which the codecs begin."""
    if isinstance(codecs, str | exmy.Format):
        return {"format": str(codecs)}
    if isinstance(codecs, Mapping):
        return codecs
    assert codecs is not None
    first = codecs[0]
    configuration: Mapping[str, Any] = {} if isinstance(first, str) else first.get("configuration") or {}
    return configuration


def with_configuration(codecs: Codecs, configuration: Mapping[str, Any]) -> Codecs:
    """Return the codecs with another configuration of their eXmY format and the same compressors."""
    if codecs is None or isinstance(codecs, str | exmy.Format | Mapping):
        return configuration
    return [{"name": "exmy", "configuration": dict(configuration)}, *codecs[1:]]
