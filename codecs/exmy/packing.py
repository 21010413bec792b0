"""Packing of B-bit codes into exactly B bits per element, in tiles of 256 elements that can be sliced.

FORMAT.md, section 5, defines the layout: codes are cut into planes of 8, 4, 2 and 1 bits, from the low bits up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import kernels
from exmy.elements import Array
from exmy.errors import CodeError, DtypeError, FormatError, SizeError
from exmy.reference import TILE

__all__ = [
    "TILE",
    "as_bytes",
    "as_codes",
    "check_count",
    "checked_output",
    "code_dtype",
    "pack",
    "packed_size",
    "slice_bytes",
    "unpack",
]


def _check_bits(bits: int) -> int:
    if isinstance(bits, (int, np.integer)) and 2 <= bits <= 16:
        return int(bits)
    raise FormatError(f"{bits!r} bits is not an eXmY width; expected an integer from 2 to 16")


def check_count(count: int, name: str = "count") -> int:
    """Return a number of elements as an int. Raise `SizeError` unless it is an integer of at least 0."""
    if isinstance(count, (int, np.integer)) and count >= 0:
        return int(count)
    raise SizeError(f"{name} is {count!r}; expected an integer of 0 or more")


def checked_output(out: Any, size: int) -> NDArray[np.uint8]:
    """Return the array of `size` bytes in `out`, or a new one. Raise `DtypeError` or `SizeError` if unsuitable."""
    if out is None:
        return np.empty(size, np.uint8)
    if not isinstance(out, np.ndarray) or out.dtype != np.uint8:
        raise DtypeError(f"out is not a uint8 array; expected one of {size} bytes")
    if out.shape != (size,) or not (out.flags.c_contiguous and out.flags.writeable):
        raise SizeError(f"out has shape {out.shape}; expected {size} contiguous, writable bytes in one dimension")
    return out


def code_dtype(bits: int) -> np.dtype[Any]:
    """Return the dtype of unpacked codes: uint8 up to 8 bits, uint16 above."""
    return np.dtype(np.uint8 if bits <= 8 else np.uint16)


def as_codes(codes: Any, bits: int) -> Array:
    """Return valid codes as a C-contiguous array of `code_dtype(bits)`, else raise `CodeError` or `DtypeError`."""
    array = np.asarray(codes)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"codes have dtype {array.dtype.name!r}; expected integers, such as exmy.encode returns")
    dtype = code_dtype(bits)
    if array.size and (array.dtype != dtype or bits not in {8, 16}):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << bits:
            raise CodeError(
                f"code {low if low < 0 else high} does not fit {bits} bits (0 ... {(1 << bits) - 1}); "
                "check that the codes were encoded in this format"
            )
    return np.asarray(array, dtype=dtype, order="C")


def as_bytes(packed: Any, bits: int, count: int) -> NDArray[np.uint8]:
    """Return packed codes as a flat uint8 array. Raise `DtypeError` or `SizeError` for another type or size."""
    if isinstance(packed, np.ndarray):
        if packed.dtype != np.uint8:
            raise DtypeError(f"packed codes have dtype {packed.dtype.name!r}; expected uint8 or a bytes object")
        array = np.ascontiguousarray(packed).reshape(-1)
    else:
        try:
            array = np.frombuffer(packed, np.uint8)
        except (TypeError, AttributeError) as cause:
            raise DtypeError(
                f"packed codes are {type(packed).__name__}; expected uint8 or a bytes object"
            ) from cause
    size = packed_size(count, bits)
    if array.size != size:
        fault = "truncated" if array.size < size else "too long"
        raise SizeError(
            f"packed codes are {fault}: {array.size} bytes, expected {size} for {count} codes of {bits} bits"
        )
    return array


def packed_size(count: int, bits: int) -> int:
    """Return the size in bytes of `count` packed codes: `bits` bytes for every 8 codes or part of 8.

    Raise `SizeError` for a negative count, and `FormatError` for a width outside of 2 ... 16 bits.
    """
    return (check_count(count) + 7) // 8 * _check_bits(bits)


def slice_bytes(bits: int, start: int, stop: int, count: int | None = None) -> tuple[int, int]:
    """Return the byte range (first, end) of the elements start ... stop-1 of a packed array.

    These bytes are valid packed codes of stop - start elements. Each bound must be a multiple of 256, or `count`,
    the length of the array. Raise `SizeError` otherwise.
    """
    _check_bits(bits)
    start, stop = check_count(start, "start"), check_count(stop, "stop")
    if start > stop or (count is not None and stop > check_count(count)):
        bound = "stop" if count is None else f"stop <= {count}"
        raise SizeError(f"the slice {start}:{stop} is out of range; expected 0 <= start <= {bound}")
    if stop == count and start == stop:
        end = packed_size(stop, bits)
        return end, end
    if start % TILE or (stop % TILE and stop != count):
        raise SizeError(
            f"the slice {start}:{stop} is not aligned to tiles of {TILE} elements; widen it to "
            f"{start // TILE * TILE}:{-(-stop // TILE) * TILE}, or pass count= if the array ends there"
        )
    return packed_size(start, bits), packed_size(stop, bits)


def pack(codes: Any, bits: int) -> NDArray[np.uint8]:
    """Return the codes packed into a flat uint8 array of `packed_size(codes.size, bits)` bytes.

    `codes`: integers of any shape, read in C order. Raise `CodeError` for codes beyond 0 ... 2^bits - 1.

    Examples
    --------
    >>> exmy.pack([1, 2, 3, 0, 1, 2, 3, 0], bits=2).nbytes
    2
    >>> exmy.unpack(exmy.pack([1, 2, 3], bits=2), bits=2, count=3)
    array([1, 2, 3], dtype=uint8)
    """
    array = as_codes(codes, _check_bits(bits)).reshape(-1)
    out = np.empty(packed_size(array.size, bits), np.uint8)
    kernels.pack(bits, array, out)
    return out


def unpack(packed: Any, bits: int, count: int) -> Array:
    """Return `count` packed codes as a flat array, uint8 up to 8 bits, uint16 above.

    `packed`: a uint8 array or bytes-like object. Raise `SizeError` unless it has `packed_size(count, bits)`
    bytes.
    """
    array = as_bytes(packed, _check_bits(bits), check_count(count))
    out = np.empty(count, code_dtype(bits))
    kernels.unpack(bits, array, out)
    return out
