"""Dispatch to the compute kernels: C for the instruction set of the machine, or NumPy.

The levels are "reference" (NumPy), "baseline", "avx2" and "avx512" (C). At import, the fastest one that the
machine supports is selected; the environment variable EXMY_KERNELS or `use` selects another. All levels
return the same bits.

In this module, `src` is flat and in a built-in dtype, as `elements.as_flat` returns it. `runs` is a matrix of such
elements; the elements of a row share a scale.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from exmy import blockwise, step_reference
from exmy.elements import Array, Kind, Layout
from exmy.errors import FormatError, KernelError, SlowPathWarning
from exmy.groups import Groups
from exmy.rounding import Dither
from exmy.user_warnings import warn

try:
    from exmy import _kernels
except ImportError:  # installed without a C compiler
    _kernels = None  # type: ignore[assignment]

__all__ = [
    "EXPONENT_COUNT",
    "MIN_EXPONENT",
    "best_factors",
    "columns",
    "compare",
    "decode",
    "decode_groups",
    "encode",
    "encode_groups",
    "energy",
    "exponents",
    "join_planes",
    "level",
    "levels",
    "measure",
    "noise",
    "pack",
    "peak",
    "peaks",
    "round",
    "runs",
    "split_planes",
    "squared_errors",
    "step_decode",
    "step_encode",
    "unpack",
    "use",
]

_NAMES = ("reference", "baseline", "avx2", "avx512")
EXPONENT_COUNT = 2098
"""The number of exponents of float64, subnormals included."""
MIN_EXPONENT = -1074
"""The exponent of the smallest float64."""

_CODES, _PACKED, _VALUES = range(3)  # the outputs of _kernels.stochastic
_WARNING_SIZE = 1 << 16  # elements; for at least as many, the slow path warns


def levels() -> tuple[str, ...]:
    """Return the names of the levels that this machine and installation can run, slowest first."""
    if _kernels is None:
        return _NAMES[:1]
    return _NAMES[:1] + tuple(name for i, name in enumerate(_NAMES[1:]) if _kernels.supports(i))


def _level_index(name: str) -> int:
    """Return -1 for the reference, else the index of the C level; raise `KernelError` if the level cannot run."""
    if name not in levels():
        available = ", ".join(levels())
        raise KernelError(
            f"kernel level {name!r} cannot run here; expected one of {available} in EXMY_KERNELS or kernels.use"
        )
    return _NAMES.index(name) - 1


class _Selection:
    """The level in use, and whether to warn that it is slow."""

    def __init__(self, name: str | None) -> None:
        self.index = _level_index(name or levels()[-1])
        self.quiet = name is not None or _kernels is not None  # the reference was requested, or is not in use

    def native(self, count: int) -> bool:
        """Return whether to call the C kernels. Warn once if they are not built and the array is large."""
        if self.index < 0 and not self.quiet and count >= _WARNING_SIZE:
            self.quiet = True
            warn(
                "exmy runs without its C kernels, about a hundred times slower, because they were not built; "
                "install a C compiler (Debian: apt-get install gcc python3-dev) and run pip install "
                "--force-reinstall --no-cache-dir on the package again, or set EXMY_KERNELS=reference to silence "
                "this warning",
                SlowPathWarning,
            )
        return self.index >= 0


_selection = _Selection(os.environ.get("EXMY_KERNELS"))


def level() -> str:
    """Return the name of the level in use."""
    return _NAMES[_selection.index + 1]


@contextmanager
def use(name: str) -> Iterator[None]:
    """Use another level inside a `with` block, in all threads of the process: for tests and benchmarks.

    Raise `KernelError` if the level cannot run on this machine.

    Examples
    --------
    >>> with exmy.kernels.use("reference"):
    ...     exmy.kernels.level()
    'reference'
    """
    saved = _selection.index, _selection.quiet
    _selection.index, _selection.quiet = _level_index(name), True
    try:
        yield
    finally:
        _selection.index, _selection.quiet = saved


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
    """Write the codes of src into out; return the number of non-finite values and the index of the first.

    `out` is flat: packed bytes or codes. With `saturate` the number is always 0. If the number is not 0, `out` is
    undefined. With a `dither`, rounding is stochastic.
    """
    if _selection.native(src.size):
        if dither is not None:
            target = _PACKED if packed else _CODES
            return _kernels.stochastic(_selection.index, kind, *layout, *dither, target, saturate, src, out)
        return _kernels.encode(_selection.index, kind, *layout, packed, saturate, src, out)
    return blockwise.encode(kind, layout, src, out, packed=packed, saturate=saturate, dither=dither)


def decode(kind: Kind, layout: Layout, codes: Array, out: Array, *, packed: bool) -> None:
    """Write the values of codes, or of packed bytes, into out."""
    if _selection.native(out.size):
        _kernels.decode(_selection.index, kind, *layout, packed, codes, out)
    else:
        blockwise.decode(kind, layout, codes, out, packed=packed)


def round(
    kind: Kind, layout: Layout, src: Array, out: Array, *, saturate: bool, dither: Dither | None = None
) -> tuple[int, int]:
    """Write src, rounded, into out (of the same kind, possibly src itself); return what `encode` returns."""
    if _selection.native(src.size):
        if dither is not None:
            return _kernels.stochastic(_selection.index, kind, *layout, *dither, _VALUES, saturate, src, out)
        return _kernels.round(_selection.index, kind, *layout, saturate, src, out)
    return blockwise.round(kind, layout, src, out, saturate=saturate, dither=dither)


def pack(bits: int, codes: Array, out: Array) -> None:
    """Write packed codes into out."""
    if _selection.native(codes.size):
        _kernels.pack(_selection.index, bits, codes.size, codes, out)
    else:
        blockwise.pack(bits, codes, out)


def unpack(bits: int, packed: Array, out: Array) -> None:
    """Write the codes of packed bytes into out."""
    if _selection.native(out.size):
        _kernels.unpack(_selection.index, bits, out.size, packed, out)
    else:
        blockwise.unpack(bits, packed, out)


def split_planes(bits: int, packed: Array, count: int, upper: Array, lower: Array) -> None:
    """Split packed codes of 9 to 16 bits into packed planes: of their upper 8 bits and of their lower bits."""
    if _selection.native(count):
        _kernels.split_planes(_selection.index, bits, count, packed, upper, lower)
    else:
        blockwise.split_planes(bits, packed, count, upper, lower)


def join_planes(bits: int, upper: Array, lower: Array, count: int, packed: Array) -> None:
    """Join the two planes that `split_planes` wrote into packed codes."""
    if _selection.native(count):
        _kernels.join_planes(_selection.index, bits, count, upper, lower, packed)
    else:
        blockwise.join_planes(bits, upper, lower, count, packed)


def peak(kind: Kind, src: Array) -> tuple[float, int, int]:
    """Return the largest magnitude, the number of non-finite values, and the index of the first."""
    if _selection.native(src.size):
        return _kernels.peak(_selection.index, kind, src)
    return blockwise.peak(kind, src)


def squared_errors(kind: Kind, layout: Layout, src: Array, count: int) -> list[float]:
    """Return the sums of squared errors for `count` (1 to 64) consecutive biases, starting at the layout's.

    Differences are float32 if the formats with these biases are all well within the range of float32 and `src` is
    not float64, else float64. Sums are float64 in a fixed order, so all levels return the same. `src` must be
    finite.
    """
    exponent_bits, mantissa_bits, bias = layout
    highest = (1 << exponent_bits) - 1 if exponent_bits else 1
    wide = kind is Kind.FLOAT64 or bias + count > 128 or highest - bias + 23 - mantissa_bits > 127
    if _selection.native(src.size):
        out = np.empty(count)
        _kernels.squared_errors(_selection.index, kind, *layout, wide, src, out)
        sums: list[float] = out.tolist()
        return sums
    return blockwise.squared_errors(kind, layout, src, count, np.dtype(np.float64 if wide else np.float32))


def energy(kind: Kind, src: Array) -> float:
    """Return the sum of squares, added as float64 in a fixed order. `src` must be finite."""
    if _selection.native(src.size):
        return _kernels.energy(_selection.index, kind, src)
    return blockwise.energy(kind, src)


def peaks(kind: Kind, runs: Array, out: Array) -> None:
    """Write the largest magnitude of each row of runs to out, as float64; infinity or NaN if the row has one."""
    if _selection.native(runs.size):
        _kernels.peaks(_selection.index, kind, runs.shape[1], runs, out)
    else:
        blockwise.peaks(kind, runs, out)


def noise(kind: Kind, layout: Layout, runs: Array, scales: Array, factors: Array, out: Array) -> None:
    """Write, for each row of runs and each factor, the sum of squared errors of encoding row * scale * factor.

    Rows are scaled in the dtype of `scales`: float64, or float32 if it represents every value of the layout and
    the midpoints between values. `factors` (1 to 64) and `out`, of shape (rows, factors), are float64.
    """
    if _selection.native(runs.size):
        wide = scales.itemsize == 8
        _kernels.noise(_selection.index, kind, *layout, wide, runs.shape[1], scales, factors, runs, out)
    else:
        blockwise.noise(kind, layout, runs, scales, factors, out)


def best_factors(
    kind: Kind,
    layout: Layout,
    runs: Array,
    scales: Array,
    factors: Array,
    tries: Array,
    best: Array,
    error: Array,
    *,
    rising: bool,
) -> None:
    """Write, for each row of runs, the index of the factor with the least `noise` / factor^2, and this quotient.

    Row i tries the first `tries[i]` (int64) factors and writes `best[i]` (int64) and `error[i]` (float64). Ties go
    to the smallest factor. `rising` asserts that the factors are 1, 2, 4 ... and that nothing clips with the
    scales alone, so factors that cannot win are skipped.
    """
    if _selection.native(runs.size):
        wide, length = scales.itemsize == 8, runs.shape[1]
        _kernels.least(
            _selection.index, kind, *layout, wide, rising, length, scales, factors, tries, runs, best, error
        )
    else:
        blockwise.best_factors(kind, layout, runs, scales, factors, tries, best, error)


def columns(matrix: Array, first: int, out: Array) -> None:
    """Copy the columns first ... first + len(out) - 1 of a matrix into the rows of out."""
    if _selection.native(out.size):
        rows, stride = matrix.shape
        _kernels.columns(matrix.itemsize, rows, stride, first, len(out), matrix, out)
    else:
        out[...] = matrix[:, first : first + len(out)].T


def runs(groups: Groups, elements: Array, low: int, high: int) -> Array:
    """Return the groups low ... high-1 of one strip as the rows of a contiguous matrix."""
    length, inner = groups.length, groups.inner
    if inner == 1:
        return elements[low * length : high * length].reshape(high - low, length)
    out = np.empty((high - low, length), elements.dtype)
    first = low
    while first < high:
        outer, column = divmod(first, inner)
        matrix = elements[outer * length * inner : (outer + 1) * length * inner].reshape(length, inner)
        stop = min(high, first - column + inner)
        columns(matrix, column, out[first - low : stop - low])
        first = stop
    return out


def encode_groups(
    kind: Kind,
    layout: Layout,
    groups: Groups,
    first: int,
    scales: Array,
    src: Array,
    out: Array,
    *,
    positive_zero: bool = False,
    seed: int | None = None,
) -> bool:
    """Write the packed codes of src, times the scale of each element's group, into out.

    `first` is the position of src[0] in the whole array. Infinity becomes the largest value of its sign, NaN
    becomes +0, and with `positive_zero` so does -0. With a `seed`, rounding is stochastic. Return whether all
    scaled values are known to be finite; if not, elements may be NaN or infinite.
    """
    if _selection.native(src.size):
        wide, length, inner = scales.itemsize == 8, groups.length, groups.inner
        if seed is not None:
            _kernels.stochastic_groups(
                _selection.index, kind, *layout, wide, length, inner, first, seed, scales, src, out
            )
            if positive_zero:
                blockwise.merge_zeros(layout.bits, out, src.size)
            return False
        return _kernels.encode_groups(
            _selection.index, kind, *layout, wide, length, inner, first, scales, src, out, positive_zero
        )
    finite = blockwise.encode_groups(kind, layout, groups, first, scales, src, out, seed=seed)
    if positive_zero:
        blockwise.merge_zeros(layout.bits, out, src.size)
    return finite


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
    """Write the values of packed codes, times the scale of each element's group, into out.

    With `in_planes`, `packed` consists of the two planes that `split_planes` writes, the upper bits first.

    With float32 scales and a float16 or bfloat16 `out`, float32 must represent every product exactly, so that
    each is rounded only once.
    """
    if _selection.native(out.size):
        wide, length, inner = scales.itemsize == 8, groups.length, groups.inner
        _kernels.decode_groups(
            _selection.index, kind, *layout, wide, length, inner, first, scales, packed, out, in_planes
        )
    else:
        blockwise.decode_groups(kind, layout, groups, first, scales, packed, out, in_planes=in_planes)


def exponents(kind: Kind, src: Array, out: Array) -> None:
    """Add the number of values with each exponent, from MIN_EXPONENT on, to the int64 array out.

    The last two elements of `out`, after EXPONENT_COUNT counts, are for zeros and for non-finite values.
    """
    if _selection.native(src.size):
        _kernels.exponents(_selection.index, kind, src, out)
    else:
        blockwise.exponents(kind, src, out)


def compare(kind: Kind, x: Array, y: Array) -> tuple[float, float, float, float]:
    """Return the sums of x^2 and of (x - y)^2, the largest |x - y|, and the largest |x - y| / |x| over x != 0.

    Sums are float64 in a fixed order, so all levels return the same; maxima ignore NaN.
    """
    if _selection.native(x.size):
        return _kernels.compare(_selection.index, kind, x, y)
    return blockwise.compare(kind, x, y)


def measure(
    kind: Kind, layout: Layout, groups: Groups, scales: Array | None, limit: float, packed: Array, x: Array
) -> tuple[float, float, float, float, int]:
    """Return what `compare` returns for x and the values of packed codes, without storing these values.

    The last result is the number of elements of x whose magnitude exceeds `limit`. The values are decoded to the
    kind of x: by `decode_groups` from position 0 on if there are scales, else by `decode`.
    """
    if _selection.native(x.size):
        wide = scales is not None and scales.itemsize == 8
        length, inner = groups.length, groups.inner
        return _kernels.measure(_selection.index, kind, *layout, wide, length, inner, limit, scales, packed, x)
    return blockwise.measure(kind, layout, groups, scales, limit, packed, x)


def step_encode(bits: int, mantissa_bits: int, old: Array, new: Array, out: Array) -> int:
    """Write the step from old to new elements into out, of one byte more than these; return its size."""
    if _selection.native(new.size):
        return _kernels.step_encode(_selection.index, new.itemsize, bits, mantissa_bits, old, new, out)
    data = step_reference.encode(bits, mantissa_bits, old, new)
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


def step_decode(bits: int, mantissa_bits: int, old: Array, data: Array, out: Array) -> bool:
    """Write the elements of a step into out; return whether its bytes are valid."""
    if _selection.native(out.size):
        return _kernels.step_decode(_selection.index, out.itemsize, bits, mantissa_bits, old, data, out)
    try:
        step_reference.decode(bits, mantissa_bits, old, data, out)
    except FormatError:
        return False
    return True
