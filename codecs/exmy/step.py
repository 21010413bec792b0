"""Steps of weights: an array stored as its difference to an earlier one of the same shape and dtype, losslessly.

Near steps of a training run share most of their bits. Their differences are taken between the values as ordered
integers, whose sizes follow from the exponents of the earlier values (FORMAT.md, section 10). Unlike the other
codecs of exmy, this one keeps every bit: NaN payloads, infinities, subnormals and the sign of zero.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from exmy import kernels
from exmy.elements import Array
from exmy.errors import CodeError, DtypeError, FormatError, SizeError
from exmy.format import Format, as_format
from exmy.packing import code_dtype

__all__ = ["decode", "encode"]

_FLOATS = {"float16": (16, 10), "bfloat16": (16, 7), "float32": (32, 23)}


class _Elements(NamedTuple):
    """The elements of an array as flat unsigned integers, and how many bits they use, also for the mantissa."""

    words: Array
    bits: int
    mantissa_bits: int

    @staticmethod
    def of(x: Array, f: Format | str | None) -> _Elements:
        """Return the elements of an array; `f` is the format of codes. Raise `DtypeError` or `CodeError`."""
        name = x.dtype.name
        if f is not None:
            f = as_format(f)
            if x.dtype != code_dtype(f.bits):
                raise DtypeError(f"codes of {f} have dtype {code_dtype(f.bits)}, not {name!r}")
            bits, mantissa_bits = f.bits, f.mantissa_bits
        elif match := re.fullmatch(r"float[468]_e([0-7])m([0-7])\w*", name):
            bits, mantissa_bits = 1 + int(match[1]) + int(match[2]), int(match[2])
        elif name in _FLOATS:
            bits, mantissa_bits = _FLOATS[name]
        else:
            raise DtypeError(
                f"dtype {name!r} has no steps; expected float16, bfloat16, float32, a float8, float6 or float4, "
                "or codes with their format, as in encode(codes, base, 'e4m3')"
            )
        native = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
        words = np.ascontiguousarray(native).reshape(-1).view(f"u{x.dtype.itemsize}")
        if bits < 8 * x.dtype.itemsize and words.size and int(words.max()) >> bits:
            raise CodeError(f"an element has more than the {bits} bits of {f or name}; pass codes of that format")
        return _Elements(words, bits, mantissa_bits)


def encode(x: Any, base: Any, f: Format | str | None = None) -> NDArray[np.uint8]:
    """Return the bytes from which `decode` restores x, given an earlier array.

    `x`, `base`: arrays of one shape and dtype: float16, bfloat16, float32, the float8, float6 and float4 types of
    ml_dtypes, or codes of the format `f`. The result is a flat uint8 array of at most one byte more than x; one
    byte if nothing changed. It carries neither the shape nor the dtype, nor a checksum: a wrong base decodes to
    wrong values. Releases the GIL.

    Raise `SizeError` for arrays of different shapes, `DtypeError` for other or different dtypes, `CodeError` for
    codes with more bits than the format.

    Examples
    --------
    >>> base = np.float32([1, 2, 3, 4])
    >>> data = exmy.step.encode(base, base)
    >>> data.tolist(), exmy.step.decode(data, base).tolist()
    ([1], [1.0, 2.0, 3.0, 4.0])
    """
    x, base = np.asarray(x), np.asarray(base)
    if x.shape != base.shape:
        raise SizeError(f"x has shape {x.shape} and its base {base.shape}; expected arrays of one shape")
    if x.dtype.name != base.dtype.name:
        raise DtypeError(f"x is {x.dtype.name} and its base {base.dtype.name}; expected arrays of one dtype")
    new, old = _Elements.of(x, f), _Elements.of(base, f)
    out = np.empty(new.words.nbytes + 1, np.uint8)
    size = kernels.step_encode(new.bits, new.mantissa_bits, old.words, new.words, out)
    return out[:size].copy() if size < out.size // 2 else out[:size]


def decode(data: Any, base: Any, f: Format | str | None = None, out: Any = None) -> Array:
    """Return the array that `encode` was given with this base.

    `data`: bytes-like. `base`, `f`: as for `encode`. `out`: a writable, C-contiguous array of the shape and dtype
    of base, or base itself, to write to and return; undefined after an error. Releases the GIL.

    Raise `FormatError` for bytes that `encode` did not write, `SizeError` or `DtypeError` for an unsuitable `out`
    or base.
    """
    base = np.asarray(base)
    old = _Elements.of(base, f)
    if out is None:
        out = np.empty(base.shape, base.dtype.newbyteorder("="))
    elif out.shape != base.shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise SizeError(f"out has shape {out.shape}; expected a writable, contiguous array of shape {base.shape}")
    elif out.dtype != base.dtype.newbyteorder("="):
        raise DtypeError(f"out is {out.dtype.name}; expected {base.dtype.name}, as the base")
    elif np.shares_memory(out, old.words):
        old = old._replace(words=old.words.copy())
    view = np.frombuffer(data, np.uint8)
    words = out.reshape(-1).view(old.words.dtype)
    if not kernels.step_decode(old.bits, old.mantissa_bits, old.words, view, words):
        raise FormatError(
            f"these {view.size} bytes are not a step of {base.size} elements of {f or base.dtype.name}; check "
            "that they were encoded for this shape, dtype and base"
        )
    result: Array = out
    return result
