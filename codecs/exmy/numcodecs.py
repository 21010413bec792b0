"""The codec "exmy" of numcodecs: for Zarr v2 and everything else that finds its codecs there.

An encoded buffer describes itself (`Quantized.to_bytes`), so decoding needs no configuration.
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
    """Arrays of floats as low-bit codes: a compressor, or a filter that stands first.

    Arguments as of `exmy.quantize`; FormatError, DtypeError for what it does not take.
    """

    codec_id = "exmy"

    def __init__(
        self, format: Format | str, scale: Scale = "search", axis: int | None = None, block: int | None = None
    ) -> None:
        self.chunk = ChunkCodec.of({"format": format, "scale": scale, "axis": axis, "block": block})

    def encode(self, buf: Any) -> bytes:
        """Return `exmy.quantize(buf, …).to_bytes()`.

        buf: an array of float16, bfloat16, float32 or float64 (DtypeError otherwise) without NaN and infinity
        (NonFiniteError).  SizeError where axis or block do not fit it, and for arrays in Fortran order, which
        users of numcodecs expect back in that order.
        """
        array, c = np.asarray(buf), self.chunk
        if array.flags.f_contiguous and not array.flags.c_contiguous:
            raise SizeError("codec exmy takes arrays in C order, not in Fortran order; use order='C'")
        return quantize(array, c.format, c.axis, c.block, c.scale).to_bytes()

    def decode(self, buf: Any, out: Any = None) -> Array:
        """Return the values in the shape and dtype that were encoded: at most 32 bytes for each of buf.

        out: a writable, C-contiguous buffer of as many bytes, to write to and return (SizeError, DtypeError
        otherwise).  FormatError, SizeError where buf is not what `encode` returned.
        """
        q = Quantized.from_bytes(buf)
        if out is None:
            return q.dequantize(q.dtype)
        target = out if isinstance(out, np.ndarray) else np.frombuffer(out, np.uint8)
        if not (target.flags.c_contiguous and target.flags.writeable):
            raise SizeError("out is not contiguous or read-only; expected writable, C-contiguous memory")
        values = target.reshape(-1).view(np.uint8)
        wanted = q.size * output_dtype(q.dtype).itemsize
        if values.size != wanted:  # before anything is decoded, as what the bytes declare may be large
            raise SizeError(f"out has {values.size} bytes; expected {wanted} for {q.dtype} {q.shape}")
        values[:] = q.dequantize(q.dtype).reshape(-1).view(np.uint8)
        filled: Array = target
        return filled

    def get_config(self) -> dict[str, Any]:
        """Return the id and the configuration, without what has its default."""
        return {"id": self.codec_id, **self.chunk.configuration}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the codec of a configuration; FormatError for keys and values that this exmy does not know."""
        c = ChunkCodec.of({key: value for key, value in config.items() if key != "id"})
        return cls(c.format, c.scale, c.axis, c.block)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.chunk.configuration.items())
        return f"Exmy({arguments})"
