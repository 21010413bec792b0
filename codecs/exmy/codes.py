"""Codes: floats to codes or packed bytes, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from exmy import kernels
from exmy.elements import Array, NonFinite, as_flat, kind_of, output_dtype, plain, saturates
from exmy.errors import DtypeError, NonFiniteError, SizeError
from exmy.format import Format, as_format
from exmy.packing import as_bytes, as_codes, code_dtype, packed_size
from exmy.rounding import Rounding, dither_of

__all__ = ["decode", "decode_packed", "encode", "encode_packed", "round"]


def _check_finite(census: tuple[int, int], shape: tuple[int, ...]) -> None:
    bad, first = census
    if bad:
        raise NonFiniteError(bad, math.prod(shape), tuple(int(i) for i in np.unravel_index(first, shape)))


def encode(
    x: Any,
    f: Format | str,
    *,
    nonfinite: NonFinite = "error",
    rounding: Rounding = "nearest",
    seed: int = 0,
    first: int = 0,
) -> Array:
    """Return the codes of the values nearest to x: same shape, uint8 up to 8 bits, uint16 above.

    x: float16, bfloat16, float32 or float64 of any shape, strides and byte order (DtypeError otherwise); an
    array that is not C-contiguous is copied once.  Each element is rounded once, to nearest, ties to the
    even mantissa (FORMAT.md, section 3); magnitudes beyond `f.max` become it, and the sign of zero is kept.
    NonFiniteError for NaN and infinity, unless nonfinite="saturate": infinity then becomes the largest value of
    its sign and NaN becomes +0.

    rounding "stochastic": up or down at random, so that the mean is x wherever x does not saturate; values of
    f stay what they are.  The random bits follow from the seed (0 ... 2^64 - 1) and the element's position in
    C order alone (FORMAT.md, section 3); first is the position of x[0], for a part of a longer array.
    FormatError for another rounding or seed.
    """
    f = as_format(f)
    saturate, dither = saturates(nonfinite), dither_of(rounding, seed, first)
    elements, kind, shape = as_flat(x)
    out = np.empty(shape, code_dtype(f.bits))
    target = out.reshape(-1)
    census = kernels.encode(kind, f.layout, elements, target, packed=False, saturate=saturate, dither=dither)
    _check_finite(census, shape)
    return out


def decode(codes: Any, f: Format | str, dtype: DTypeLike = "float32") -> Array:
    """Return the values of codes: same shape, in the dtype asked for.

    codes: integers below 2^bits (CodeError otherwise).  dtype: float16, bfloat16 (needs ml_dtypes), float32
    or float64.  Values are exact where the dtype holds them (float64 holds all); others are rounded once,
    ties to even, with gradual underflow, and what rounds beyond the dtype's largest becomes infinity.
    """
    f = as_format(f)
    array = as_codes(codes, f.bits)
    out = np.empty(array.shape, output_dtype(dtype))
    kind = kind_of(out.dtype)
    kernels.decode(kind, f.layout, array.reshape(-1), plain(out.reshape(-1), kind), packed=False)
    return out


def round(
    x: Any,
    f: Format | str,
    *,
    out: Any = None,
    nonfinite: NonFinite = "error",
    rounding: Rounding = "nearest",
    seed: int = 0,
    first: int = 0,
) -> Array:
    """Return x rounded to values of f, in the shape and dtype of x: what decode(encode(x, f), f) gives.

    Values that f has and the dtype of x has not are rounded as `decode` does.  out: a writable, C-contiguous
    array of x's shape and dtype to write to and return (SizeError, DtypeError otherwise); x itself rounds in
    place.  After NonFiniteError its contents are undefined.  Else as `encode`.
    """
    f = as_format(f)
    saturate, dither = saturates(nonfinite), dither_of(rounding, seed, first)
    elements, kind, shape = as_flat(x)
    dtype = output_dtype(np.asarray(x).dtype)
    result = np.empty(shape, dtype) if out is None else _caller_array(out, dtype)
    if result.shape != shape:
        raise SizeError(f"out has shape {result.shape}; expected that of x, {shape}")
    target = plain(result.reshape(-1), kind)
    if np.may_share_memory(elements, target) and elements.ctypes.data != target.ctypes.data:
        elements = elements.copy()  # out begins within x: writing it would change what is still to be read
    census = kernels.round(kind, f.layout, elements, target, saturate=saturate, dither=dither)
    _check_finite(census, shape)
    return result


def encode_packed(
    x: Any,
    f: Format | str,
    out: Any = None,
    *,
    nonfinite: NonFinite = "error",
    rounding: Rounding = "nearest",
    seed: int = 0,
    first: int = 0,
) -> NDArray[np.uint8]:
    """Return the packed codes of x in one pass: pack(encode(x, f), f.bits), a flat uint8 array.

    out: a writable, contiguous uint8 array or other buffer of `packed_size(x.size, f.bits)` bytes to write
    to and return (SizeError, DtypeError otherwise).  After NonFiniteError its contents are undefined.  Else
    as `encode`.
    """
    f = as_format(f)
    saturate, dither = saturates(nonfinite), dither_of(rounding, seed, first)
    elements, kind, shape = as_flat(x)
    size = packed_size(elements.size, f.bits)
    target = np.empty(size, np.uint8) if out is None else _caller_array(out, np.dtype(np.uint8))
    if target.size != size:
        raise SizeError(f"out has {target.size} bytes; expected {size} for {elements.size} codes of {f.bits} bits")
    flat = target.reshape(-1)
    census = kernels.encode(kind, f.layout, elements, flat, packed=True, saturate=saturate, dither=dither)
    _check_finite(census, shape)
    return target


def decode_packed(
    packed: Any, f: Format | str, count: int, dtype: DTypeLike | None = None, out: Any = None
) -> Array:
    """Return the values of `count` packed codes in one pass: decode(unpack(packed, f.bits, count), f, dtype).

    packed: a uint8 array or bytes-like object of `packed_size(count, f.bits)` bytes (SizeError otherwise).
    dtype: as in `decode`; None means the dtype of `out`, or float32 where there is none.  out: a writable,
    C-contiguous array of `count` elements and any shape, or another buffer of that size, to write to and
    return.
    """
    f = as_format(f)
    data = as_bytes(packed, f.bits, count)
    if dtype is None:
        wanted = out.dtype if isinstance(out, np.ndarray) else np.dtype(np.float32)
    else:
        wanted = output_dtype(dtype)
    kind = kind_of(wanted)
    target = np.empty(count, wanted) if out is None else _caller_array(out, wanted)
    if target.size != count:
        raise SizeError(f"out has {target.size} elements; expected {count}")
    kernels.decode(kind, f.layout, data, plain(target.reshape(-1), kind), packed=True)
    return target


def _caller_array(out: Any, dtype: np.dtype[Any]) -> Array:
    """Return the caller's memory as an array to write to; errors say what is wrong with it."""
    if isinstance(out, np.ndarray):
        array = out
    else:
        try:
            array = np.frombuffer(out, np.uint8)
        except (TypeError, AttributeError) as cause:
            raise DtypeError(f"out is {type(out).__name__}; expected an array or a writable buffer") from cause
        if array.size % dtype.itemsize:
            raise SizeError(f"out has {array.size} bytes, which is no whole number of {dtype.name} elements")
        array = array.view(dtype)
    if array.dtype != dtype or not array.dtype.isnative:
        raise DtypeError(f"out has dtype {array.dtype!r}; expected native {dtype.name}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        fault = "is not C-contiguous" if array.flags.writeable else "is read-only"
        raise SizeError(f"out {fault}; expected a writable, C-contiguous array")
    return array
