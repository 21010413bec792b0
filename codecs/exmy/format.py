"""eXmY number formats: 1 sign bit, X exponent bits, Y mantissa bits and a bias."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import reference
from exmy.elements import Layout, NonFinite, as_flat, saturates
from exmy.errors import DtypeError, FormatError, NonFiniteError
from exmy.fit import BIAS_LIMIT, FitMethod, fit_bias
from exmy.importance import Importance

__all__ = ["Format", "as_format", "formats"]

_NAME = re.compile(r"e(0|[1-9]\d?)m(0|[1-9]\d?)(?:b(0|-?[1-9]\d{0,3}))?", re.ASCII)


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Format:
    """An eXmY number format, named `e4m3`, or `e4m3b11` and `e4m3b-3` with a non-standard bias.

    The value of a code with sign s, exponent field e and mantissa field m is (-1)^s 2^(max(e,1) - bias) ((e>0) +
    m/2^Y): there are subnormals, but no NaN and no infinity. X is 0 ... 8 and the width 1+X+Y is 2 ... 16. The
    standard bias is 2^(X-1) - 1 (1 for X = 0); other biases are -512 ... 512. Formats are immutable and hashable,
    and compare by bits and bias.

    Raise `FormatError` for any other name, `DtypeError` if the name is not a str.

    Examples
    --------
    >>> f = exmy.Format("e2m1")
    >>> f.bits, f.max, f.smallest_normal
    (4, 6.0, 1.0)
    >>> f.values()[:8]
    array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ])
    """

    exponent_bits: int
    """X, the number of exponent bits."""
    mantissa_bits: int
    """Y, the number of mantissa bits."""
    bias: int
    """The exponent bias."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise DtypeError(f"a format is named by a str such as 'e4m3', not by {type(name).__name__}")
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise FormatError(
                f"{name!r:.100} does not name a format; expected e<exponent bits>m<mantissa bits>[b<bias>], such "
                "as 'e4m3' or 'e4m3b11'"
            )
        x, y = int(parts[1]), int(parts[2])
        if not (x <= 8 and 2 <= 1 + x + y <= 16):
            raise FormatError(
                f"{name!r} is not an eXmY format; expected 0 to 8 exponent bits and a width 1+X+Y of 2 to 16"
            )
        bias = _standard_bias(x) if parts[3] is None else int(parts[3])
        if abs(bias) > BIAS_LIMIT:
            raise FormatError(f"the bias of {name!r} is out of range; expected -{BIAS_LIMIT} to {BIAS_LIMIT}")
        object.__setattr__(self, "exponent_bits", x)
        object.__setattr__(self, "mantissa_bits", y)
        object.__setattr__(self, "bias", bias)

    @property
    def name(self) -> str:
        """The shortest name, which includes the bias only if it is not the standard one."""
        stem = f"e{self.exponent_bits}m{self.mantissa_bits}"
        return stem if self.bias == _standard_bias(self.exponent_bits) else f"{stem}b{self.bias}"

    @property
    def standard(self) -> Format:
        """The format with the same bits and its standard bias."""
        return Format(f"e{self.exponent_bits}m{self.mantissa_bits}")

    @property
    def bits(self) -> int:
        """The width of a code: 1 + exponent bits + mantissa bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def layout(self) -> Layout:
        """Exponent bits, mantissa bits and bias, the arguments of the kernels."""
        return Layout(self.exponent_bits, self.mantissa_bits, self.bias)

    @property
    def max(self) -> float:
        """The largest value; larger inputs saturate to it."""
        return float(self._decode((1 << (self.bits - 1)) - 1))

    @property
    def smallest_normal(self) -> float | None:
        """The smallest positive normal value, 2^(1 - bias); None for X = 0, which has only subnormals."""
        return 2.0 ** (1 - self.bias) if self.exponent_bits else None

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value, 2^(1 - bias - Y); for Y = 0 this is the smallest normal."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def values(self) -> NDArray[np.float64]:
        """Return the values of all codes in ascending order of codes, as float64 of shape (2^bits,).

        The second half is the first half negated, including -0.0, so 2^bits - 1 values are distinct.
        """
        return self._decode(np.arange(1 << self.bits))

    def _decode(self, codes: Any) -> NDArray[np.float64]:
        return reference.decode(np.asarray(codes), self.layout)

    def with_bias(self, bias: int) -> Format:
        """Return the format with the same bits and another bias.

        Raise `FormatError` unless the bias is -512 ... 512, `DtypeError` if it is not an integer.
        """
        if isinstance(bias, bool) or not isinstance(bias, (int, np.integer)):
            raise DtypeError(f"a bias is an int, not {type(bias).__name__}")
        return Format(f"e{self.exponent_bits}m{self.mantissa_bits}b{int(bias)}")

    def fit(
        self, x: Any, method: FitMethod = "max", *, nonfinite: NonFinite = "error", importance: Any = None
    ) -> Format:
        """Return this format with the best bias for x: an exponent offset that all values of x share.

        `method`: "max" is the largest bias that clips no value; "search" is the bias with the least squared
        error, which may clip a few large values to give the others finer steps. The bias of this format has no
        influence, but is kept if x is empty or all zero. `x` and the errors are as for `encode`; with
        `nonfinite="saturate"`, only finite values count. `importance` is as for `quantize`. Raise `FormatError` if
        even bias -512 clips.
        """
        if method not in ("max", "search"):
            raise FormatError(f"method is {method!r}; expected 'max' or 'search'")
        saturate = saturates(nonfinite)
        elements, kind, shape = as_flat(x)
        weights = Importance.from_array(importance, shape)
        fit = fit_bias(elements, kind, self.layout, method, saturate=saturate, importance=weights)
        if fit.nonfinite_count and not saturate:
            raise NonFiniteError.at(fit.nonfinite_count, fit.first_nonfinite, shape)
        return self.with_bias(fit.bias)

    def __eq__(self, other: object) -> bool:
        return self.layout == other.layout if isinstance(other, Format) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.layout)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Format({self.name!r})"

    def __reduce__(self) -> tuple[type[Format], tuple[str]]:
        return Format, (self.name,)


def _standard_bias(exponent_bits: int) -> int:
    return (1 << (exponent_bits - 1)) - 1 if exponent_bits else 1


def as_format(f: Format | str) -> Format:
    """Return f, or the format named f."""
    return f if isinstance(f, Format) else Format(f)


def formats(bits: int) -> tuple[Format, ...]:
    """Return all formats of a width of 2 ... 16 bits, with their standard biases, fewest exponent bits first.

    Raise `FormatError` for another width.
    """
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) or not 2 <= bits <= 16:
        raise FormatError(f"there are no formats of {bits!r} bits; expected an integer from 2 to 16")
    return tuple(Format(f"e{x}m{int(bits) - 1 - x}") for x in range(min(8, int(bits) - 1) + 1))
