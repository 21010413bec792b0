"""The level "reference" of `kernels`: the NumPy functions of `reference`, applied to arrays block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import reference
from exmy.elements import Array, Kind, Layout
from exmy.groups import Groups
from exmy.rounding import Dither

__all__ = [
    "best_factors",
    "compare",
    "decode",
    "decode_groups",
    "encode",
    "encode_groups",
    "energy",
    "exponents",
    "join_planes",
    "measure",
    "merge_zeros",
    "noise",
    "pack",
    "peak",
    "peaks",
    "round",
    "split_planes",
    "squared_errors",
    "unpack",
]

_BLOCK_SIZE = 1 << 16


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks; all but the last consist of whole tiles."""
    for start in range(0, count, _BLOCK_SIZE):
        yield start, min(start + _BLOCK_SIZE, count)


def _byte_range(start: int, stop: int, bits: int) -> slice:
    """Return the byte range of the packed elements start ... stop-1; `start` is a multiple of the tile length."""
    whole, rest = stop // reference.TILE * reference.TILE, stop % reference.TILE
    return slice(start // 8 * bits, (whole // 8 + (rest + 7) // 8) * bits)


def _count_nonfinite(kind: Kind, src: Array, offset: int) -> tuple[int, int]:
    """Return the number of non-finite values and the index of the first; none may be before `offset`."""
    count = first = 0
    for start, stop in _blocks(src.size - offset):
        indices = np.flatnonzero(~np.isfinite(reference.widen(src[offset + start : offset + stop], kind)))
        if indices.size and not count:
            first = offset + start + int(indices[0])
        count += indices.size
    return count, first


def _codes(values: Array, layout: Layout, dither: Dither | None, start: int) -> Array:
    """Return the codes of values, the first of which is element `start` of the array."""
    if dither is None:
        return reference.encode(values, layout)
    return reference.encode(values, layout, reference.random_bits(*dither.at(start), values.size))


def encode(
    kind: Kind,
    layout: Layout,
    src: Array,
    out: Array,
    *,
    packed: bool,
    saturate: bool,
    dither: Dither | None = None,
) -> tuple[int, int]:
    """See kernels.encode."""
    for start, stop in _blocks(src.size):
        values = reference.widen(src[start:stop], kind)
        if not saturate and not np.isfinite(values).all():
            return _count_nonfinite(kind, src, start)
        codes = _codes(values, layout, dither, start)
        if packed:
            out[_byte_range(start, stop, layout.bits)] = reference.pack(codes, layout.bits)
        else:
            out[start:stop] = codes
    return 0, 0


def decode(kind: Kind, layout: Layout, codes: Array, out: Array, *, packed: bool) -> None:
    """See kernels.decode."""
    for start, stop in _blocks(out.size):
        if packed:
            part = reference.unpack(codes[_byte_range(start, stop, layout.bits)], layout.bits, stop - start)
        else:
            part = codes[start:stop]
        out[start:stop] = reference.narrow(reference.decode(part, layout), kind)


def round(
    kind: Kind, layout: Layout, src: Array, out: Array, *, saturate: bool, dither: Dither | None = None
) -> tuple[int, int]:
    """See kernels.round."""
    for start, stop in _blocks(src.size):
        values = reference.widen(src[start:stop], kind)
        if not saturate and not np.isfinite(values).all():
            return _count_nonfinite(kind, src, start)
        codes = _codes(values, layout, dither, start)
        out[start:stop] = reference.narrow(reference.decode(codes, layout), kind)
    return 0, 0


def pack(bits: int, codes: Array, out: Array) -> None:
    """See kernels.pack."""
    for start, stop in _blocks(codes.size):
        out[_byte_range(start, stop, bits)] = reference.pack(codes[start:stop], bits)


def unpack(bits: int, packed: Array, out: Array) -> None:
    """See kernels.unpack."""
    for start, stop in _blocks(out.size):
        out[start:stop] = reference.unpack(packed[_byte_range(start, stop, bits)], bits, stop - start)


def split_planes(bits: int, packed: Array, count: int, upper: Array, lower: Array) -> None:
    """See kernels.split_planes."""
    for start, stop in _blocks(count):
        codes = reference.unpack(packed[_byte_range(start, stop, bits)], bits, stop - start)
        for plane, width, part in ((upper, 8, codes >> (bits - 8)), (lower, bits - 8, codes % (1 << (bits - 8)))):
            plane[_byte_range(start, stop, width)] = reference.pack(part, width)


def join_planes(bits: int, upper: Array, lower: Array, count: int, packed: Array) -> None:
    """See kernels.join_planes."""
    for start, stop in _blocks(count):
        high, low = (
            reference.unpack(plane[_byte_range(start, stop, width)], width, stop - start)
            for plane, width in ((upper, 8), (lower, bits - 8))
        )
        packed[_byte_range(start, stop, bits)] = reference.pack(high << (bits - 8) | low, bits)


def peak(kind: Kind, src: Array) -> tuple[float, int, int]:
    """See kernels.peak."""
    largest = 0.0
    for start, stop in _blocks(src.size):
        values = np.abs(reference.widen(src[start:stop], kind))
        if not np.isfinite(values).all():
            return (float("inf"), *_count_nonfinite(kind, src, start))
        largest = max(largest, float(values.max()))
    return largest, 0, 0


def squared_errors(kind: Kind, layout: Layout, src: Array, count: int, dtype: np.dtype[Any]) -> list[float]:
    """See kernels.squared_errors."""
    out = np.zeros((1, 1))
    sums = []
    for k in range(count):
        noise(kind, layout._replace(bias=layout.bias + k), src[None], np.ones(1, dtype), np.ones(1), out)
        sums.append(float(out[0, 0]))
    return sums


def energy(kind: Kind, src: Array) -> float:
    """See kernels.energy."""
    return float(_sums_of_squares(reference.widen(src, kind)))


def peaks(kind: Kind, runs: Array, out: Array) -> None:
    """See kernels.peaks."""
    for i, run in enumerate(runs):
        out[i] = peak(kind, run)[0]


def noise(kind: Kind, layout: Layout, runs: Array, scales: Array, factors: Array, out: Array) -> None:
    """See kernels.noise."""
    pairs = max(1, _BLOCK_SIZE // max(1, runs.shape[1]))  # pairs of a row and a factor per block
    rows, columns = max(1, pairs // factors.size), min(factors.size, pairs)
    multipliers = factors.astype(scales.dtype)[:, None]
    for i in range(0, len(runs), rows):
        scaled = _multiply(kind, runs[i : i + rows], scales[i : i + rows, None])[:, None]
        for k in range(0, factors.size, columns):
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                z = np.abs(scaled * multipliers[k : k + columns])
                nearest = reference.decode(reference.encode(z.astype(np.float64), layout), layout)
                errors = (z - nearest.astype(z.dtype)).astype(np.float64)
                out[i : i + rows, k : k + columns] = _sums_of_squares(errors)


def _sums_of_squares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of squares over the last axis, added in the order of the C kernels.

    Element i goes to partial sum i mod 16; the 16 partial sums are then added by halves.
    """
    *others, size = values.shape
    lanes = np.zeros((*others, max(1, -(-size // 16)) * 16))
    with np.errstate(over="ignore", under="ignore"):
        np.square(values, out=lanes[..., :size])
        sums = np.cumsum(lanes.reshape(*others, -1, 16), axis=-2)[..., -1, :]
        for half in (8, 4, 2, 1):
            sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def best_factors(
    kind: Kind, layout: Layout, runs: Array, scales: Array, factors: Array, tries: Array, best: Array, error: Array
) -> None:
    """See kernels.best_factors; this implementation tries every factor."""
    rows = max(1, _BLOCK_SIZE // max(1, runs.shape[1] * factors.size))
    order = np.argsort(factors, kind="stable")
    for i in range(0, len(runs), rows):
        part = slice(i, i + rows)
        errors = np.empty((len(runs[part]), factors.size))
        noise(kind, layout, runs[part], scales[part], factors, errors)
        errors /= factors * factors
        errors[np.arange(factors.size) >= tries[part, None]] = np.inf
        best[part] = order[np.argmin(errors[:, order], axis=1)]
        error[part] = np.take_along_axis(errors, best[part, None], axis=1)[:, 0]


def _multiply(kind: Kind, src: Array, scales: Array) -> Array:
    """Return src times scales, in the dtype of the scales."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return reference.widen(src, kind).astype(scales.dtype) * scales


def encode_groups(
    kind: Kind,
    layout: Layout,
    groups: Groups,
    first: int,
    scales: Array,
    src: Array,
    out: Array,
    *,
    seed: int | None = None,
) -> bool:
    """See kernels.encode_groups."""
    finite = True
    for start, stop in _blocks(src.size):
        group = groups.index(first + start, first + stop)
        values = _multiply(kind, src[start:stop], scales.reshape(-1)[group]).astype(np.float64)
        finite &= bool(np.isfinite(values).all())
        codes = _codes(values, layout, None if seed is None else Dither(seed, first), start)
        out[_byte_range(start, stop, layout.bits)] = reference.pack(codes, layout.bits)
    return finite


def merge_zeros(bits: int, packed: Array, count: int) -> None:
    """Replace packed codes of -0 by those of +0."""
    for start, stop in _blocks(count):
        part = _byte_range(start, stop, bits)
        codes = reference.unpack(packed[part], bits, stop - start)
        packed[part] = reference.pack(np.where(codes == 1 << (bits - 1), 0, codes).astype(codes.dtype), bits)


def decode_groups(
    kind: Kind,
    layout: Layout,
    groups: Groups,
    first: int,
    scales: Array,
    packed: Array,
    out: Array,
    *,
    in_planes: bool = False,
) -> None:
    """See kernels.decode_groups; a float64 represents every product exactly, so each is rounded only once."""
    if in_planes:
        end, planes, packed = -(-out.size // 8) * 8, packed, np.empty_like(packed)
        join_planes(layout.bits, planes[:end], planes[end:], out.size, packed)
    for start, stop in _blocks(out.size):
        codes = reference.unpack(packed[_byte_range(start, stop, layout.bits)], layout.bits, stop - start)
        group = groups.index(first + start, first + stop)
        values = reference.decode(codes, layout) * scales.reshape(-1)[group].astype(np.float64)
        out[start:stop] = reference.narrow(values, kind)


def exponents(kind: Kind, src: Array, out: Array) -> None:
    """See kernels.exponents."""
    for start, stop in _blocks(src.size):
        out += reference.exponents(reference.widen(src[start:stop], kind))


def measure(
    kind: Kind, layout: Layout, groups: Groups, scales: Array | None, limit: float, packed: Array, x: Array
) -> tuple[float, float, float, float, int]:
    """See kernels.measure."""
    decoded = np.empty_like(x)
    if scales is None:
        decode(kind, layout, packed, decoded, packed=True)
    else:
        decode_groups(kind, layout, groups, 0, scales, packed, decoded)
    return *compare(kind, x, decoded), int(np.count_nonzero(np.abs(reference.widen(x, kind)) > limit))


def compare(kind: Kind, x: Array, y: Array) -> tuple[float, float, float, float]:
    """See kernels.compare. Element i goes to lane i mod 8 of the partial sums and maxima, as in C."""
    sums, largest = np.zeros((2, 1, 8)), np.zeros((2, 8))
    for start, stop in _blocks(x.size):
        parts = reference.compare(reference.widen(x[start:stop], kind), reference.widen(y[start:stop], kind))
        with np.errstate(invalid="ignore", over="ignore"):
            for k in range(2):
                sums[k, 0] = np.add.reduce(np.concatenate([sums[k], parts[k]]), axis=0)
                largest[k] = np.fmax(largest[k], np.fmax.reduce(parts[k + 2], axis=0))
    with np.errstate(invalid="ignore", over="ignore"):
        signal, noise = (float(np.cumsum(lanes)[-1]) for lanes in sums)
    return signal, noise, float(largest[0].max()), float(largest[1].max())
