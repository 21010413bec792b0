"""Conversion of float arrays to codes or packed bytes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from exmy import kernels
from exmy.elements import Array, NonFinite, as_flat, builtin_view, kind_of, output_dtype, saturates
from exmy.errors import DtypeError, NonFiniteError, SizeError
from exmy.format import Format, as_format
from exmy.packing import as_bytes, as_codes, code_dtype, packed_size
from exmy.rounding import Rounding, make_dither

__all__ = ["decode", "decode_packed", "encode", "encode_packed", "round"]


def _check_finite(count_and_first: tuple[int, int], shape: tuple[int, ...]) -> None:
    """Raise `NonFiniteError` if a kernel counted any non-finite elements in an array of this shape."""
    count, first = count_and_first
    if count:
        raise NonFiniteError.at(count, first, shape)


def encode(
    x: Any,
    f: Format | str,
    *,
    nonfinite: NonFinite = "error",
    rounding: Rounding = "nearest",
    seed: int = 0,
    first: int = 0,
) -> Array:
    """Return the codes of the values of f nearest to x, in the shape of x: uint8 up to 8 bits, uint16 above.

    `x`: float16, bfloat16, float32 or float64 of any shape, strides and byte order; an array that is not
    C-contiguous is copied once. Each element is rounded once, to nearest, ties to the even mantissa (FORMAT.md,
    section 3); magnitudes beyond `f.max` saturate to it, and the sign of zero is preserved. `nonfinite="saturate"`
    encodes infinity as the largest value of its sign and NaN as +0; the default is to raise.

    `rounding="stochastic"` rounds up or down at random, so that the expected value is x wherever x does not
    saturate; elements that f represents exactly are unchanged. The random bits depend only on `seed`
    (0 ... 2^64 - 1) and the element's position in C order (FORMAT.md, section 3). If x is a part of a longer
    array, `first` is the position of its first element there.

    Raise `DtypeError` for other dtypes, `NonFiniteError` for NaN and infinity, `FormatError` for an invalid
    format, option or seed.

    Examples
    --------
    >>> exmy.encode(np.float32([0.6, -1, 500]), "e4m3")
    array([ 50, 184, 127], dtype=uint8)
    """
    f = as_format(f)
    saturate, dither = saturates(nonfinite), make_dither(rounding, seed, first)
    elements, kind, shape = as_flat(x)
    out = np.empty(shape, code_dtype(f.bits))
    target = out.reshape(-1)
    count_and_first = kernels.encode(
        kind, f.layout, elements, target, packed=False, saturate=saturate, dither=dither
    )
    _check_finite(count_and_first, shape)
    return out


def decode(codes: Any, f: Format | str, dtype: DTypeLike = "float32") -> Array:
    """Return the values of codes, with the same shape.

    `dtype`: float16, bfloat16 (needs ml_dtypes), float32 or float64. Values that the dtype can represent are exact
    (float64 represents all); others are rounded once, ties to even, with gradual underflow and overflow to
    infinity. Raise `DtypeError` for another dtype or codes that are not integers, `CodeError` for codes beyond
    0 ... 2^bits - 1.

    Examples
    --------
    >>> exmy.decode([50, 184, 127], "e4m3")
    array([  0.625,  -1.   , 480.   ], dtype=float32)
    """
    f = as_format(f)
    array = as_codes(codes, f.bits)
    out = np.empty(array.shape, output_dtype(dtype))
    kind = kind_of(out.dtype)
    kernels.decode(kind, f.layout, array.reshape(-1), builtin_view(out.reshape(-1), kind), packed=False)
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
    """Return x rounded to values of f, in the shape and dtype of x: equal to decode(encode(x, f), f, x.dtype).

    `out`: a writable, C-contiguous array of x's shape and dtype to write to and return; pass x itself to round in
    place. The other arguments are those of `encode`.
    Raise as `encode` does, and `SizeError` or `DtypeError` for an unsuitable `out`. After `NonFiniteError` the
    contents of `out` are undefined.

    Examples
    --------
    >>> exmy.round(np.float64([0.6, -1, 500]), "e4m3")
    array([  0.625,  -1.   , 480.   ])
    """
    f = as_format(f)
    saturate, dither = saturates(nonfinite), make_dither(rounding, seed, first)
    elements, kind, shape = as_flat(x)
    dtype = output_dtype(np.asarray(x).dtype)
    result = np.empty(shape, dtype) if out is None else _caller_array(out, dtype)
    if result.shape != shape:
        raise SizeError(f"out has shape {result.shape}; expected that of x, {shape}")
    target = builtin_view(result.reshape(-1), kind)
    if np.may_share_memory(elements, target) and elements.ctypes.data != target.ctypes.data:
        elements = elements.copy()  # writing to out, which overlaps x, would overwrite elements not yet read
    count_and_first = kernels.round(kind, f.layout, elements, target, saturate=saturate, dither=dither)
    _check_finite(count_and_first, shape)
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
    """Return the packed codes of x as a flat uint8 array: pack(encode(x, f), f.bits) in one pass.

    `out`: a writable, contiguous uint8 array or other buffer of `packed_size(x.size, f.bits)` bytes to write to
    and return. The other arguments are those of `encode`. Raise as `encode` does, and `SizeError` or `DtypeError`
    for an unsuitable `out`. After `NonFiniteError` the contents of `out` are undefined.
    """
    f = as_format(f)
    saturate, dither = saturates(nonfinite), make_dither(rounding, seed, first)
    elements, kind, shape = as_flat(x)
    size = packed_size(elements.size, f.bits)
    target = np.empty(size, np.uint8) if out is None else _caller_array(out, np.dtype(np.uint8))
    if target.size != size:
        raise SizeError(f"out has {target.size} bytes; expected {size} for {elements.size} codes of {f.bits} bits")
    flat = target.reshape(-1)
    count_and_first = kernels.encode(kind, f.layout, elements, flat, packed=True, saturate=saturate, dither=dither)
    _check_finite(count_and_first, shape)
    return target


def decode_packed(
    packed: Any, f: Format | str, count: int, dtype: DTypeLike | None = None, out: Any = None
) -> Array:
    """Return the values of `count` packed codes: decode(unpack(packed, f.bits, count), f, dtype) in one pass.

    `packed`: a uint8 array or bytes-like object of `packed_size(count, f.bits)` bytes. `dtype`: as for `decode`;
    None means that of `out` if it is an array, else float32. `out`: a writable, C-contiguous array of `count`
    elements and any shape, or another buffer of that size, to write to and return.
    Raise `SizeError` or `DtypeError` for an unsuitable `packed` or `out`.
    """
    f = as_format(f)
    data = as_bytes(packed, f.bits, count)
    if dtype is None:
        native = out.dtype if isinstance(out, np.ndarray) else np.dtype(np.float32)
    else:
        native = output_dtype(dtype)
    kind = kind_of(native)
    target = np.empty(count, native) if out is None else _caller_array(out, native)
    if target.size != count:
        raise SizeError(f"out has {target.size} elements; expected {count}")
    kernels.decode(kind, f.layout, data, builtin_view(target.reshape(-1), kind), packed=True)
    return target


def _caller_array(out: Any, dtype: np.dtype[Any]) -> Array:
    """Return the caller's `out` as an array of that dtype. Raise `DtypeError` or `SizeError` if it can't be."""
    if isinstance(out, np.ndarray):
        array = out
    else:
        try:
            array = np.frombuffer(out, np.uint8)
        except (TypeError, AttributeError) as cause:
            raise DtypeError(f"out is {type(out).__name__}; expected an array or a writable buffer") from cause
        if array.size % dtype.itemsize:
            raise SizeError(
                f"out has {array.size} bytes; expected a multiple of {dtype.itemsize} for {dtype.name}"
            )
        array = array.view(dtype)
    if array.dtype != dtype or not array.dtype.isnative:
        raise DtypeError(f"out has dtype {array.dtype!r}; expected native {dtype.name}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        fault = "is not C-contiguous" if array.flags.writeable else "is read-only"
        raise SizeError(f"out {fault}; expected a writable, C-contiguous array")
    return array
