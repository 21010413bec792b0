"""The numcodecs codec "exmy", for Zarr v2 and other users of numcodecs.

Encoded buffers are self-describing (`Quantized.to_bytes`), so decoding needs no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numcodecs.abc import Codec

from exmy.chunk import ChunkCodec
from exmy.elements import Array, output_dtype
from exmy.errors import SizeError
from exmy.format import Format
from exmy.quantized import Quantized
from exmy.quantizer import Scale, quantize

__all__ = ["Exmy"]


class Exmy(Codec):  # type: ignore[misc]
    """A codec that encodes float arrays as low-bit codes: a compressor, or the first filter.

    The arguments are those of `exmy.quantize`. Raise `FormatError` or `DtypeError` for invalid arguments.

    Examples
    --------
    >>> from exmy.numcodecs import Exmy
    >>> codec = Exmy("e4m3")
    >>> codec.decode(codec.encode(np.float32([0.5, -1, 2])))
    array([ 0.5, -1. ,  2. ], dtype=float32)
    """

    codec_id = "exmy"
    """The name of the codec."""

    def __init__(
        self, format: Format | str, scale: Scale = "search", axis: int | None = None, block: int | None = None
    ) -> None:
        self.chunk_codec = ChunkCodec.from_configuration(
            {"format": format, "scale": scale, "axis": axis, "block": block}
        )
        """The encoding of the codes."""

    def encode(self, buf: Any) -> bytes:
        """Return `exmy.quantize(buf, …).to_bytes()`.

        Raise as `exmy.quantize` does, and `SizeError` for an array in Fortran order, because numcodecs would
        expect `decode` to return that order.
        """
        array, c = np.asarray(buf), self.chunk_codec
        if array.flags.f_contiguous and not array.flags.c_contiguous:
            raise SizeError("codec exmy cannot encode an array in Fortran order; use order='C'")
        return quantize(array, c.format, c.axis, c.block, c.scale).to_bytes()

    def decode(self, buf: Any, out: Any = None) -> Array:
        """Return the values in the shape and dtype of the array before encoding.

        The values take at most 32 bytes for each byte of `buf`. `out`: a writable, C-contiguous buffer of that
        array's size in bytes, to write to and return. Raise `SizeError` for an unsuitable `out`, and as
        `Quantized.from_bytes` does.
        """
        q = Quantized.from_bytes(buf)
        if out is None:
            return q.dequantize(q.dtype)
        target = out if isinstance(out, np.ndarray) else np.frombuffer(out, np.uint8)
        if not (target.flags.c_contiguous and target.flags.writeable):
            raise SizeError("out is read-only or not contiguous; expected writable, C-contiguous memory")
        values = target.reshape(-1).view(np.uint8)
        expected = q.size * output_dtype(q.dtype).itemsize
        if values.size != expected:  # check before decoding: the declared shape may be huge
            raise SizeError(f"out has {values.size} bytes; expected {expected} for {q.dtype} {q.shape}")
        values[:] = q.dequantize(q.dtype).reshape(-1).view(np.uint8)
        return target

    def get_config(self) -> dict[str, Any]:
        """Return the id and the configuration, without keys at their defaults."""
        return {"id": self.codec_id, **self.chunk_codec.configuration}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the codec for a configuration. Raise as `ChunkCodec.from_configuration` does."""
        c = ChunkCodec.from_configuration({key: value for key, value in config.items() if key != "id"})
        return cls(c.format, c.scale, c.axis, c.block)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.chunk_codec.configuration.items())
        return f"Exmy({arguments})"
