"""Constants for rounding the values of a float type to a format with integer operations on their bits.

exmy.jax and exmy.torch round in integer arithmetic, so that no compiler can change a bit by flushing subnormals,
fusing operations or keeping excess precision. `Constants` has the constants for one format and one float type.
They are computed without NumPy, so that torch.compile can trace the computation.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from exmy.elements import Kind, Layout
from exmy.errors import FormatError

__all__ = ["Constants", "Gradient", "NonFiniteOutput", "check_options", "rounding_constants"]

Gradient: TypeAlias = Literal["identity", "clipped"]
NonFiniteOutput: TypeAlias = Literal["propagate", "saturate"]
"""The options for NaN and infinity in JAX and PyTorch; those for NumPy arrays are `elements.NonFinite`."""

# The width of each type in bits, and its mantissa bits.
_FLOAT_TYPES = {Kind.FLOAT16: (16, 10), Kind.BFLOAT16: (16, 7), Kind.FLOAT32: (32, 23), Kind.FLOAT64: (64, 52)}


class Constants(NamedTuple):
    """A format described in terms of a float type; a magnitude is the bits of an element without its sign.

    Rounding drops the low max(t, lowest) - e + surplus bits of the significand. For a normal element, e and t are
    the exponent field. For a subnormal, e is 1, and t is 1 minus the number of leading zeros of the significand.
    """

    width: int
    """Bits of the float type."""
    type_mantissa_bits: int
    """Mantissa bits of the float type."""
    infinity: int
    """The magnitude of infinity; greater magnitudes are NaN."""
    lowest: int
    """The exponent field of the format's smallest normal; below 1 if this normal is a subnormal of the type."""
    surplus: int
    """Mantissa bits of the type minus those of the format; may be negative."""
    smallest: int
    """The magnitude of the format's smallest subnormal, rounded to the type."""
    limit: int
    """The largest magnitude that does not exceed the format's largest value."""
    largest: int
    """The format's largest value, rounded to the type: larger magnitudes saturate to it."""


def rounding_constants(layout: Layout, kind: Kind) -> Constants:
    """Return the constants for rounding values of a float type to a format."""
    exponent_bits, mantissa_bits, bias = layout
    width, type_mantissa_bits = _FLOAT_TYPES[kind]
    infinity = (1 << (width - 1)) - (1 << type_mantissa_bits)
    type_bias = infinity >> (type_mantissa_bits + 1)  # half the range of the exponent field
    top_field = max((1 << exponent_bits) - 1, 1)  # the exponent field of the largest value
    top_significand = (1 << mantissa_bits) - 1 + ((1 << mantissa_bits) if exponent_bits else 0)
    finest = 1 - bias - mantissa_bits  # the exponent of the smallest subnormal
    largest, above = _nearest(top_significand, finest + top_field - 1, type_mantissa_bits, type_bias, infinity)
    smallest, _ = _nearest(1, finest, type_mantissa_bits, type_bias, infinity)
    return Constants(
        width=width,
        type_mantissa_bits=type_mantissa_bits,
        infinity=infinity,
        lowest=1 - bias + type_bias,
        surplus=type_mantissa_bits - mantissa_bits,
        smallest=smallest,
        limit=largest - above,
        largest=largest,
    )


def _nearest(n: int, exponent: int, mantissa_bits: int, type_bias: int, infinity: int) -> tuple[int, int]:
    """Return the magnitude nearest to n 2^exponent > 0 (ties to even), and 1 if that rounds up, else 0."""
    field = max(n.bit_length() - 1 + exponent + type_bias, 1)
    drop = field - type_bias - mantissa_bits - exponent  # low bits of n beyond the precision of the type
    if drop <= 0:
        significand, above = n << -drop, False
    else:
        significand, rest = n >> drop, n & ((1 << drop) - 1)
        above = 2 * rest + (significand & 1) > 1 << drop
    magnitude = ((field - 1) << mantissa_bits) + significand + above
    return min(magnitude, infinity), int(above or magnitude >= infinity)


def check_options(nonfinite: str, rounding: str, gradient: str) -> None:
    """Raise `FormatError` unless each option has one of its two values."""
    for name, value, known in (
        ("nonfinite", nonfinite, ("propagate", "saturate")),
        ("rounding", rounding, ("nearest", "stochastic")),
        ("gradient", gradient, ("identity", "clipped")),
    ):
        if value not in known:
            raise FormatError(f"{name} is {value!r}; expected {known[0]!r} or {known[1]!r}")
