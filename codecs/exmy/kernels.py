"""Kernels: which implementation does the work, and the one way to call it.

The levels are "reference" (NumPy), "baseline", "avx2" and "avx512" (C).  The best that the machine runs is
chosen at import; the environment variable EXMY_KERNELS or ``use`` names another.  All give the same bits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from exmy import blockwise
from exmy.elements import Array, Kind, Layout
from exmy.errors import KernelError, SlowPathWarning
from exmy.rounding import Dither

if TYPE_CHECKING:
    from exmy.groups import Groups

try:
    from exmy import _kernels
except ImportError:  # no compiler was found at install
    _kernels = None  # type: ignore[assignment]

__all__ = [
    "EXPONENTS",
    "LEAST_EXPONENT",
    "columns",
    "compare",
    "decode",
    "decode_groups",
    "encode",
    "encode_groups",
    "energy",
    "exponents",
    "least",
    "level",
    "levels",
    "noise",
    "pack",
    "peak",
    "peaks",
    "round",
    "squared_errors",
    "unpack",
    "use",
]

_NAMES = ("reference", "baseline", "avx2", "avx512")
EXPONENTS = 2098
"""How many exponents a float64 can have."""
LEAST_EXPONENT = -1074
"""The exponent of the smallest float64."""

_CODES, _PACKED, _VALUES = range(3)  # what _kernels.stochastic writes
_BIG = 1 << 16  # elements from which the slow path is worth a warning


def levels() -> tuple[str, ...]:
    """Return the names of the levels that this machine and this install can run, slowest first."""
    if _kernels is None:
        return _NAMES[:1]
    return _NAMES[:1] + tuple(name for i, name in enumerate(_NAMES[1:]) if _kernels.supports(i))


def _index(name: str) -> int:
    """Return -1 for the reference, else the number of a C level; KernelError where it cannot run."""
    if name not in levels():
        wanted = "one of " + ", ".join(levels())
        raise KernelError(f"kernel level {name!r} cannot run here; expected {wanted} (EXMY_KERNELS, kernels.use)")
    return _NAMES.index(name) - 1


class _Choice:
    """The level in use."""

    def __init__(self, name: str | None) -> None:
        self.index = _index(name or levels()[-1])
        self.quiet = name is not None or _kernels is not None  # the reference was chosen, or is not used

    def native(self, count: int) -> bool:
        """Say whether the C kernels do the work; warn once where they are missed."""
        if self.index < 0 and not self.quiet and count >= _BIG:
            self.quiet = True
            warnings.warn(
                "exmy runs without its C kernels, some hundred times slower, because they were not built. "
                "Install a C compiler (Debian: apt-get install gcc python3-dev) and run pip install "
                "--force-reinstall --no-cache-dir on the package again; EXMY_KERNELS=reference silences "
                "this warning",
                SlowPathWarning,
                stacklevel=4,
            )
        return self.index >= 0


_choice = _Choice(os.environ.get("EXMY_KERNELS"))


def level() -> str:
    """Return the name of the level in use."""
    return _NAMES[_choice.index + 1]


@contextmanager
def use(name: str) -> Iterator[None]:
    """Use another level inside of a ``with`` block, in all threads of the process: for tests and benchmarks.

    KernelError where the level cannot run here.
    """
    saved = _choice.index, _choice.quiet
    _choice.index, _choice.quiet = _index(name), True
    try:
        yield
    finally:
        _choice.index, _choice.quiet = saved


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
    """Write the codes of src into out; return how many values are not finite and where the first lies.

    src is flat and plain (``elements.as_flat``); out is flat, packed bytes or codes.  Unless `saturate`,
    out is undefined when the first number returned is not 0.  With a dither, rounding is stochastic.
    """
    if _choice.native(src.size):
        if dither is not None:
            target = _PACKED if packed else _CODES
            return _kernels.stochastic(_choice.index, kind, *layout, *dither, target, saturate, src, out)
        return _kernels.encode(_choice.index, kind, *layout, packed, saturate, src, out)
    return blockwise.encode(kind, layout, src, out, packed=packed, saturate=saturate, dither=dither)


def decode(kind: Kind, layout: Layout, codes: Array, out: Array, *, packed: bool) -> None:
    """Write the values of codes, or of packed bytes, into out."""
    if _choice.native(out.size):
        _kernels.decode(_choice.index, kind, *layout, packed, codes, out)
    else:
        blockwise.decode(kind, layout, codes, out, packed=packed)


def round(
    kind: Kind, layout: Layout, src: Array, out: Array, *, saturate: bool, dither: Dither | None = None
) -> tuple[int, int]:
    """Write the values of the codes of src into out, of the same kind; return as `encode` does.

    out may be src itself.
    """
    if _choice.native(src.size):
        if dither is not None:
            return _kernels.stochastic(_choice.index, kind, *layout, *dither, _VALUES, saturate, src, out)
        return _kernels.round(_choice.index, kind, *layout, saturate, src, out)
    return blockwise.round(kind, layout, src, out, saturate=saturate, dither=dither)


def pack(bits: int, codes: Array, out: Array) -> None:
    """Write packed codes into out."""
    if _choice.native(codes.size):
        _kernels.pack(_choice.index, bits, codes.size, codes, out)
    else:
        blockwise.pack(bits, codes, out)


def unpack(bits: int, packed: Array, out: Array) -> None:
    """Write the codes of packed bytes into out."""
    if _choice.native(out.size):
        _kernels.unpack(_choice.index, bits, out.size, packed, out)
    else:
        blockwise.unpack(bits, packed, out)


def peak(kind: Kind, src: Array) -> tuple[float, int, int]:
    """Return the largest magnitude, how many values are not finite, and where the first lies."""
    if _choice.native(src.size):
        return _kernels.peak(_choice.index, kind, src)
    return blockwise.peak(kind, src)


def squared_errors(kind: Kind, layout: Layout, src: Array, biases: int) -> list[float]:
    """Return the sum of squared errors for each of `biases` (1 to 64) biases from the layout's on.

    Differences are taken in float32 where all of these formats lie well within it, in float64 otherwise and
    for float64; sums are float64 in a fixed order, so all levels return the same.  src must be finite.
    """
    exponent_bits, mantissa_bits, bias = layout
    highest = (1 << exponent_bits) - 1 if exponent_bits else 1
    wide = kind is Kind.FLOAT64 or bias + biases > 128 or highest - bias + 23 - mantissa_bits > 127
    if _choice.native(src.size):
        out = np.empty(biases)
        _kernels.squared_errors(_choice.index, kind, *layout, wide, src, out)
        sums: list[float] = out.tolist()
        return sums
    return blockwise.squared_errors(kind, layout, src, biases, np.dtype(np.float64 if wide else np.float32))


def energy(kind: Kind, src: Array) -> float:
    """Return the sum of squares, float64 in a fixed order; src must be finite."""
    if _choice.native(src.size):
        return _kernels.energy(_choice.index, kind, src)
    return blockwise.energy(kind, src)


def peaks(kind: Kind, runs: Array, out: Array) -> None:
    """Write the largest magnitude of each row of runs into the float64 array out; not finite where one is."""
    if _choice.native(runs.size):
        _kernels.peaks(_choice.index, kind, runs.shape[1], runs, out)
    else:
        blockwise.peaks(kind, runs, out)


def noise(kind: Kind, layout: Layout, runs: Array, scales: Array, factors: Array, out: Array) -> None:
    """Write the squared error of each row of runs, times its scale and each of the factors, into out.

    The rows are scaled in the dtype of scales: float64, or float32 if every value of the layout and its
    half steps are float32 too.  factors are 1 to 64 float64; out is float64 by row and factor.
    """
    if _choice.native(runs.size):
        wide = scales.itemsize == 8
        _kernels.noise(_choice.index, kind, *layout, wide, runs.shape[1], scales, factors, runs, out)
    else:
        blockwise.noise(kind, layout, runs, scales, factors, out)


def least(
    kind: Kind,
    layout: Layout,
    runs: Array,
    scales: Array,
    factors: Array,
    tries: Array,
    found: Array,
    error: Array,
    *,
    rising: bool,
) -> None:
    """Write which of the factors gives each row of runs the least `noise` / factor^2, and that error.

    tries (int64): how many of the factors each row tries; found: int64.  Of equal errors, the smallest factor
    is taken.  `rising` says that the factors are 1, 2, 4 ... and that nothing clips with the scales alone: then
    factors that cannot win are left out.
    """
    if _choice.native(runs.size):
        wide = scales.itemsize == 8
        length = runs.shape[1]
        _kernels.least(
            _choice.index, kind, *layout, wide, rising, length, scales, factors, tries, runs, found, error
        )
    else:
        blockwise.least(kind, layout, runs, scales, factors, tries, found, error)


def columns(matrix: Array, first: int, out: Array) -> None:
    """Write the columns of a matrix from `first` on into the rows of out, as many as it has."""
    if _choice.native(out.size):
        rows, stride = matrix.shape
        _kernels.columns(matrix.itemsize, rows, stride, first, len(out), matrix, out)
    else:
        out[...] = matrix[:, first : first + len(out)].T


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
) -> None:
    """Write the packed codes of src, times the scale of each element's group, into out.

    src are the elements of the whole array from `first` on.  Infinity becomes the largest value, NaN 0.
    With a seed, rounding is stochastic.
    """
    if _choice.native(src.size):
        wide = scales.itemsize == 8
        if seed is not None:
            _kernels.stochastic_groups(
                _choice.index, kind, *layout, wide, groups.length, groups.inner, first, seed, scales, src, out
            )
            return
        _kernels.encode_groups(
            _choice.index, kind, *layout, wide, groups.length, groups.inner, first, scales, src, out
        )
    else:
        blockwise.encode_groups(kind, layout, groups, first, scales, src, out, seed=seed)


def decode_groups(
    kind: Kind, layout: Layout, groups: Groups, first: int, scales: Array, packed: Array, out: Array
) -> None:
    """Write the values of packed codes, times the scale of each element's group, into out.

    With float32 scales, every product must round once to the kind: for float16 and bfloat16, be a float32.
    """
    if _choice.native(out.size):
        wide = scales.itemsize == 8
        _kernels.decode_groups(
            _choice.index, kind, *layout, wide, groups.length, groups.inner, first, scales, packed, out
        )
    else:
        blockwise.decode_groups(kind, layout, groups, first, scales, packed, out)


def exponents(kind: Kind, src: Array, out: Array) -> None:
    """Add to the int64 array out how many of src have each exponent, from LEAST_EXPONENT on.

    After those EXPONENTS counts come how many are zero, and how many are not finite.
    """
    if _choice.native(src.size):
        _kernels.exponents(_choice.index, kind, src, out)
    else:
        blockwise.exponents(kind, src, out)


def compare(kind: Kind, x: Array, y: Array) -> tuple[float, float, float, float]:
    """Return the sums of x^2 and of (x - y)^2, the largest |x - y|, and the largest |x - y| / |x| over x != 0.

    Sums are float64 in a fixed order, so all levels return the same; maxima pass over NaN.
    """
    if _choice.native(x.size):
        return _kernels.compare(_choice.index, kind, x, y)
    return blockwise.compare(kind, x, y)
