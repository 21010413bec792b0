"""eXmY in PyTorch: rounding with autograd, and packed codes for collectives.

>>> import exmy.torch, torch
>>> exmy.torch.round(torch.tensor([0.6, -1.0, 500.0]), "e4m3")
tensor([  0.6250,  -1.0000, 480.0000])
>>> q = exmy.torch.quantize(torch.tensor([0.6, -1.0, 500.0]), "e4m3")
>>> q.packed.dtype, q.dequantize()
(torch.uint8, tensor([  0.6250,  -1.0000, 512.0000]))

All results equal, bit for bit, those of the functions in `exmy` with the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import exmy
from exmy import integers
from exmy.elements import Kind
from exmy.emulation import Constants, Gradient, NonFiniteOutput, check_options, rounding_constants
from exmy.errors import DtypeError, SizeError
from exmy.format import Format, as_format
from exmy.groups import Groups
from exmy.packing import packed_size
from exmy.rounding import Rounding, check_uint64

__all__ = ["Quantized", "fake_quantize", "pack", "quantize", "round", "unpack"]

_LOW_32_BITS = 0xFFFFFFFF

_TYPES = {
    torch.float16: (Kind.FLOAT16, torch.int16),
    torch.bfloat16: (Kind.BFLOAT16, torch.int16),
    torch.float32: (Kind.FLOAT32, torch.int32),
    torch.float64: (Kind.FLOAT64, torch.int64),
}


def round(
    x: torch.Tensor,
    f: Format | str,
    *,
    nonfinite: NonFiniteOutput = "propagate",
    rounding: Rounding = "nearest",
    seed: int | torch.Tensor = 0,
    gradient: Gradient = "identity",
) -> torch.Tensor:
    """Return x rounded to values of f, in the shape, dtype and device of x, bit for bit equal to `exmy.round`.

    `x`: float16, bfloat16, float32 or float64. `nonfinite`: "propagate" keeps NaN and infinity; "saturate"
    replaces infinity by the largest value of its sign and NaN by +0. `rounding="stochastic"` (at most 2^32
    elements) rounds up or down at random, so that the expected value is x unless x saturates; the random bits
    depend on `seed` and on the element's position in x in C order. Under vmap, positions start at 0 in every
    example, so pass each example a different seed. `seed`: 0 ... 2^64 - 1, or a tensor of one integer, whose 32 or
    64 bits are read as unsigned; under torch.compile pass a tensor, to avoid recompiling for every seed.

    The gradient is that of a straight-through estimator: 1 everywhere with `gradient="identity"`; with
    "clipped", 0 for NaN and for magnitudes beyond the largest value of f.

    Raise `DtypeError` for other dtypes, `SizeError` for too many elements, `FormatError` for an invalid option
    or seed.
    """
    f = as_format(f)
    check_options(nonfinite, rounding, gradient)
    if not isinstance(x, torch.Tensor) or x.dtype not in _TYPES:
        actual = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise DtypeError(f"x is {actual}; expected a tensor of float16, bfloat16, float32 or float64")
    if rounding == "stochastic" and x.numel() > 1 << 32:
        raise SizeError(f"x has {x.numel()} elements; expected at most 2^32 for stochastic rounding: split it")
    if not isinstance(seed, torch.Tensor):
        seed = check_uint64("seed", seed)
    elif seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool or seed.numel() != 1:
        raise DtypeError(f"seed is a {seed.dtype} tensor of shape {tuple(seed.shape)}; expected one integer")
    s = rounding_constants(f.layout, _TYPES[x.dtype][0])
    rounded: torch.Tensor = _StraightThrough.apply(x, seed, s, nonfinite, rounding, gradient)  # type: ignore[no-untyped-call]
    return rounded


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        seed: int | torch.Tensor,
        s: Constants,
        nonfinite: NonFiniteOutput,
        rounding: Rounding,
        gradient: Gradient,
    ) -> torch.Tensor:
        return _round_bits(x, seed, s, nonfinite, rounding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, _, ctx.constants, _, _, ctx.gradient = inputs
        if ctx.gradient == "clipped":
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradient == "clipped":
            (x,) = ctx.saved_tensors
            dy = torch.where(_magnitude(x, ctx.constants) <= ctx.constants.limit, dy, 0)
        return dy, None, None, None, None, None


def _magnitude(x: torch.Tensor, s: Constants) -> torch.Tensor:
    """Return the bits of |x| as integers of at least 32 bits."""
    word = x.view(_TYPES[x.dtype][1]).to(torch.int64 if s.width == 64 else torch.int32)
    return word & ((1 << (s.width - 1)) - 1)


def _round_bits(
    x: torch.Tensor, seed: int | torch.Tensor, s: Constants, nonfinite: NonFiniteOutput, rounding: Rounding
) -> torch.Tensor:
    """Drop the low bits of each significand, and add one unit if that is nearer, or at random."""
    mantissa_bits = s.type_mantissa_bits
    magnitude = _magnitude(x, s)
    unit = torch.ones_like(magnitude)

    field = magnitude >> mantissa_bits
    significand = torch.where(field > 0, magnitude & ((1 << mantissa_bits) - 1) | (1 << mantissa_bits), magnitude)
    field = field.clamp(min=1)
    # the exponent field that the leading bit would have as a normal number
    lead = field + (_log2(significand) - mantissa_bits) if s.lowest < 1 else field
    drop = lead.clamp(min=s.lowest) - field + s.surplus
    drop = drop.clamp(0, mantissa_bits + 34)  # larger drops also round to 0
    whole = drop > mantissa_bits  # the entire significand is dropped

    rest = significand & ((unit << drop.clamp(max=mantissa_bits + 1)) - 1)
    if rounding == "nearest":
        odd = significand >> drop.clamp(max=mantissa_bits + 1) & 1
        up = 2 * rest + odd > unit << drop.clamp(max=mantissa_bits + 2)
    else:
        rest64, drop64 = rest.to(torch.int64), drop.to(torch.int64)
        fraction = rest64 << (32 - drop64).clamp(min=0) >> (drop64 - 32).clamp(min=0)
        up = _random_bits(x, seed) + fraction > _LOW_32_BITS
    truncated = torch.where(whole, 0, magnitude - rest)
    step = torch.where(whole, s.smallest, unit << drop.clamp(max=mantissa_bits))
    out = truncated + torch.where(up, step, 0)

    out = torch.where(magnitude > s.limit, s.largest, out)
    if nonfinite == "propagate":
        out = torch.where(magnitude >= s.infinity, magnitude, out)
    bits = x.view(_TYPES[x.dtype][1])
    signed = out.to(bits.dtype) | bits & -(1 << (s.width - 1))
    if nonfinite == "saturate":
        signed = torch.where(magnitude > s.infinity, 0, signed)
    return signed.view(x.dtype)


def _log2(significand: torch.Tensor) -> torch.Tensor:
    """Return floor(log2) of integers, read from their exponents as floats, which represent them exactly."""
    if significand.dtype == torch.int64:
        return (significand.to(torch.float64).view(torch.int64) >> 52) - 1023
    return (significand.to(torch.float32).view(torch.int32) >> 23) - 127


def _random_bits(x: torch.Tensor, seed: int | torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each element: a hash of its position in C order and of the seed."""
    low: Any
    high: Any
    if isinstance(seed, torch.Tensor):
        number = seed.reshape(()).to(torch.int64)
        low, high = number & _LOW_32_BITS, number >> 32 & _LOW_32_BITS if seed.itemsize == 8 else 0
    else:
        low, high = seed & _LOW_32_BITS, seed >> 32
    position = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    k0 = _mix(low ^ _mix(high ^ _mix(0x9E3779B9)))  # the high half of all positions is 0
    k1 = _mix(k0 + 0x85EBCA6B & _LOW_32_BITS)
    random: torch.Tensor = _mix(_mix(position ^ k0) + k1 & _LOW_32_BITS)
    return random


def _mix(h: Any) -> Any:
    """Hash 32-bit integers stored as int64: the second factor is negative, so that no product overflows."""
    h = h ^ h >> 16
    h = h * 0x7FEB352D & _LOW_32_BITS
    h = h ^ h >> 15
    h = h * (0x846CA68B - (1 << 32)) & _LOW_32_BITS
    return h ^ h >> 16


class _Operations:
    """The operations of `exmy.integers` in PyTorch."""

    where = staticmethod(torch.where)
    bit_length = staticmethod(lambda a: _log2(a) + 1)

    def minimum(self, a: torch.Tensor, b: Any) -> torch.Tensor:
        return a.clamp(max=b)

    def maximum(self, a: torch.Tensor, b: Any) -> torch.Tensor:
        return a.clamp(min=b)

    def largest(self, a: torch.Tensor, axis: int | None) -> torch.Tensor:
        return a.max() if axis is None else a.amax(axis, keepdim=True)

    def smallest(self, a: torch.Tensor) -> torch.Tensor:
        return a.min()

    def concatenate(self, parts: list[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(parts, axis)

    def zeros(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


_OPERATIONS: Any = _Operations()


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """The packed codes of a tensor on its device, and the exponent offset of each group."""

    packed: torch.Tensor
    """The packed codes, flat uint8, as FORMAT.md, section 5, defines them."""
    offsets: torch.Tensor
    """The offset of each group, int16 of shape `groups.counts`."""
    format: Format
    """The format of the codes; each group's offset is added to its bias."""
    groups: Groups
    """Which elements share an offset."""
    dtype: torch.dtype
    """The dtype of the tensor that was quantized."""

    def dequantize(self) -> torch.Tensor:
        """Return the values, in the dtype of the tensor that was quantized."""
        integers.check_shapes(self.packed, self.offsets, self.format.bits, self.groups)
        count = math.prod(self.groups.shape)
        if count == 0:
            return torch.zeros(self.groups.shape, dtype=self.dtype, device=self.packed.device)
        kind, word = _TYPES[self.dtype]
        shape, axis = integers.grouped_shape(self.groups)
        codes = integers.unpack(self.packed.to(torch.int32), self.format.bits, count, _OPERATIONS).reshape(shape)
        offsets = self.offsets.to(torch.int32)
        offsets = offsets if axis is None else offsets.unsqueeze(axis)
        bits, negative = integers.decode(codes, kind, self.format.layout, offsets, _OPERATIONS)
        signed: torch.Tensor = bits | negative << (8 * self.dtype.itemsize - 1)
        return signed.to(word).view(self.dtype).reshape(self.groups.shape)

    def to_numpy(self) -> exmy.Quantized:
        """Return the same codes and offsets on the host."""
        integers.check_shapes(self.packed, self.offsets, self.format.bits, self.groups)
        offsets, packed = self.offsets.cpu().numpy(), self.packed.cpu().numpy()
        return exmy.Quantized(self.format, self.groups, offsets, None, packed, str(self.dtype).rpartition(".")[2])


def quantize(x: torch.Tensor, f: Format | str, axis: int | None = None, block: int | None = None) -> Quantized:
    """Quantize x to format f, with one exponent offset for the whole tensor, per row or per block.

    The result is that of `exmy.quantize` with scale="max" and nonfinite="saturate": the offsets, computed on the
    device, are the largest that clip no finite value, infinity becomes the largest value of its sign, and
    NaN becomes +0. `x`: float16, bfloat16 or float32.

    Raise `DtypeError` for other dtypes, `SizeError` if axis or block do not fit the shape, `FormatError` for an
    invalid format or block.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in _TYPES:
        actual = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise DtypeError(f"x is {actual}; expected a tensor of float16, bfloat16 or float32")
    kind, word = _TYPES[x.dtype]
    integers.float_type(kind)
    f, groups = as_format(f).standard, Groups.from_shape(tuple(x.shape), axis, block)
    if x.numel() == 0:
        packed = torch.zeros(0, dtype=torch.uint8, device=x.device)
        return Quantized(packed, x.new_zeros(groups.counts, dtype=torch.int16), f, groups, x.dtype)
    shape, axis = integers.grouped_shape(groups)
    signed = x.detach().contiguous().view(word).to(torch.int32).reshape(shape)
    sign = 8 * x.dtype.itemsize - 1
    bits, negative = signed & ((1 << sign) - 1), signed >> sign & 1
    offsets = integers.unclipped_offsets(bits, kind, f.layout, axis, _OPERATIONS)
    codes = integers.encode(bits, negative, kind, f.layout, offsets, _OPERATIONS)
    packed = integers.pack(codes.reshape(-1), f.bits, _OPERATIONS).to(torch.uint8)
    return Quantized(packed, offsets.reshape(groups.counts).to(torch.int16), f, groups, x.dtype)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes packed on their device: `exmy.pack`. Bits above the width are dropped, not refused.

    Raise `DtypeError` for codes that are not integers.
    """
    packed_size(0, bits)  # raises FormatError
    _check_tensor("codes", codes)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise DtypeError(f"codes have dtype {codes.dtype}; expected integers")
    packed: torch.Tensor = integers.pack(codes.reshape(-1).to(torch.int32), bits, _OPERATIONS)
    return packed.to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return `count` codes of packed bytes, flat uint8 or uint16, unpacked on their device: `exmy.unpack`.

    Raise `DtypeError` unless `packed` is uint8, `SizeError` unless its size is `exmy.packed_size(count, bits)`.
    """
    _check_tensor("packed codes", packed)
    if packed.dtype != torch.uint8:
        raise DtypeError(f"packed codes have dtype {packed.dtype}; expected uint8")
    if tuple(packed.shape) != (packed_size(count, bits),):
        raise SizeError(f"packed has shape {tuple(packed.shape)}; expected {packed_size(count, bits)} bytes")
    codes: torch.Tensor = integers.unpack(packed.to(torch.int32), bits, count, _OPERATIONS)
    return codes.to(torch.uint8 if bits <= 8 else torch.uint16)


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{name} are {type(value).__name__}; expected a tensor, such as torch.from_numpy returns")


def fake_quantize(
    x: torch.Tensor, f: Format | str, axis: int | None = None, block: int | None = None
) -> torch.Tensor:
    """Return the values of `quantize(x, f, axis, block)`; the gradient is 1 everywhere (straight-through).

    Raise as `quantize` does.
    """
    values: torch.Tensor = _FakeQuantize.apply(x, f, axis, block)  # type: ignore[no-untyped-call]
    return values


class _FakeQuantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, f: Format | str, axis: int | None, block: int | None) -> torch.Tensor:
        return quantize(x, f, axis, block).dequantize()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return dy, None, None, None
