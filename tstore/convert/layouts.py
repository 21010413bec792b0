"""Layouts of safetensors files that keep the low bits of quantized arrays.

`compressed-tensors` is the layout of the package of that name, which vLLM and transformers load: a matrix
`NAME.weight` becomes integers of 4 or 8 bits, or FP4, FP6 or FP8 numbers, and `NAME.weight_scale` the scales of
its blocks of 32, rows, or of all. Its `quantization_config` names the scheme of each matrix. Embeddings are
decoded. `fp8` is for arrays of all names and shapes: F8_E4M3 or F8_E5M2 numbers under the name of the array, and
float32 scales at `NAME_scale`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import exmy
import ml_dtypes
import numpy as np
import numpy.typing as npt

from tstore.convert.dense_bits import pack_bits
from tstore.convert.narrow import NoCounterpart, Scaled, as_floats, as_integers
from tstore.core.format.arguments import quote
from tstore.errors import InvalidArgument

__all__ = ["LAYOUTS", "Encoded", "Layout", "checked_layout", "encoder", "quantization_config", "requantized"]

Layout: TypeAlias = Literal["decoded", "compressed-tensors", "fp8"]
"""How a file stores quantized arrays: decoded, or in the low bits of a layout."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_EMBEDDING = re.compile(r"embed|(^|_)emb(_|$)|^(wte|wpe|shared|relative_attention_bias)$")
"""The parts of names that mark an embedding in the models of transformers."""

_MX_BLOCK = 32
_E8M0_BIAS = 127
_F32_EXPONENTS = (-126, 127)  # the exponents of normal numbers


class Encoded(NamedTuple):
    """A quantized array in a layout: its tensors, by the suffix of their names.

    `scheme` names the scheme, such as "mxfp4-pack-quantized" or "F8_E4M3"; `weights` is the entry of
    compressed-tensors for it. `changed` is the number of values that were rounded.
    """

    scheme: str
    tensors: dict[str, npt.NDArray[Any]]
    changed: int
    weights: Mapping[str, Any]


def checked_layout(layout: str, requantize: str | None) -> None:
    """Raise `InvalidArgument` for an unknown layout, or a type for requantizing that the layout lacks."""
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout={quote(layout)}: expected one of {', '.join(LAYOUTS)}")
    if requantize not in (None, "fp8"):
        raise InvalidArgument(f"requantize={quote(requantize)}: expected 'fp8' or None for a safetensors file")
    if requantize and layout == "decoded":
        raise InvalidArgument(
            "requantize='fp8' is for a layout of low bits; pass layout='compressed-tensors' or layout='fp8' too"
        )


def encoder(layout: Layout) -> Callable[[str, exmy.Quantized, bool], Encoded]:
    """Return the function that encodes an array of this name, with rounding only if it is allowed.

    It raises `NoCounterpart` for an array that the layout can't represent.
    """
    return _compressed if layout == "compressed-tensors" else _fp8


def requantized(values: npt.NDArray[Any]) -> exmy.Quantized:
    """Return values with one offset per row, for arrays whose offsets the layout can't represent."""
    return exmy.quantize(values, "e4m3", axis=-1, scale="max")


def quantization_config(schemes: Mapping[str, Encoded], others: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` for these arrays; `others` are the matrices that are not quantized."""
    groups: list[dict[str, Any]] = []
    for name, encoded in schemes.items():
        module = name.removesuffix(".weight")
        for group in groups:
            if group["format"] == encoded.scheme and group["weights"] == encoded.weights:
                group["targets"].append(module)
                break
        else:
            group = {"targets": [module], "weights": dict(encoded.weights), "input_activations": None}
            groups.append({**group, "output_activations": None, "format": encoded.scheme})
    formats = sorted({group["format"] for group in groups})
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [name.removesuffix(".weight") for name in others],
    }


def _compressed(name: str, q: exmy.Quantized, rounding: bool) -> Encoded:
    if not name.endswith(".weight") or len(q.shape) != 2:
        raise NoCounterpart("compressed-tensors has only matrices whose names end in .weight")
    if not q.size:
        raise NoCounterpart("it is empty")
    if _EMBEDDING.search(name.removesuffix(".weight").rpartition(".")[2]):
        raise NoCounterpart("vLLM and transformers load only linear layers, and its name is that of an embedding")
    if q.format.exponent_bits <= 1:  # a uniform grid
        with contextlib.suppress(NoCounterpart):
            return _integers(q)
    run = q.shape[-1] if q.axis is None else q.block or q.shape[-1]
    if q.scales is None and q.shape[-1] % _MX_BLOCK == 0 and run % _MX_BLOCK == 0:
        for bits, dtype in ((4, ml_dtypes.float4_e2m1fn), (6, ml_dtypes.float6_e2m3fn)):
            if q.format.bits <= bits and not (scaled := as_floats(q, dtype)).changed:
                return _mx(scaled, bits)
        if q.block is not None:
            return _mx(_rounded(as_floats(q, ml_dtypes.float8_e4m3fn), rounding), 8)
    scaled = _rounded(as_floats(q, ml_dtypes.float8_e4m3fn), rounding)
    strategy = {"tensor": "tensor", "row": "channel", "block": "group"}[q.granularity]
    scales = _float32(scaled.scales).reshape(-1, 1 if q.block is None else q.shape[-1] // q.block)
    tensors = {"": scaled.numbers, "_scale": scales.reshape(-1) if q.axis is None else scales}
    weights = _weights(8, strategy, q.block, None)
    return Encoded("float-quantized", tensors, scaled.changed, weights)


def _integers(q: exmy.Quantized) -> Encoded:
    """Return integers of 4 or 8 bits, packed into words of 32 bits, with a float32 scale for each row or block."""
    try:
        bits, scaled = 4, as_integers(q, 7)
    except NoCounterpart:
        bits, scaled = 8, as_integers(q, 127)
    rows, columns = q.shape
    if columns * bits % 32:
        raise NoCounterpart(f"{columns} integers of {bits} bits do not fill words of 32 bits")
    codes = scaled.numbers.view(np.uint8) + np.uint8(1 << (bits - 1))
    packed = pack_bits(codes, 4) if bits == 4 else codes.reshape(-1)
    scales = np.ascontiguousarray(_float32(scaled.scales_of_runs(q.block or columns)))
    shape = np.array(q.shape, np.int64)
    tensors = {"_packed": packed.view("<i4").reshape(rows, -1), "_scale": scales, "_shape": shape}
    weights = _weights(bits, "channel" if q.block is None else "group", q.block, None, "int")
    return Encoded("pack-quantized", tensors, 0, weights)


def _mx(scaled: Scaled, bits: int) -> Encoded:
    """Return numbers of 4, 6 or 8 bits in blocks of 32 with scales of 8 bits, as OCP MX defines them."""
    exponents = np.frexp(scaled.scales_of_runs(_MX_BLOCK))[1].astype(np.int64) - 1 + _E8M0_BIAS
    if exponents.min(initial=0) < 0 or exponents.max(initial=0) > 2 * _E8M0_BIAS:
        raise NoCounterpart("it has scales below 2^-127 or above 2^127")
    weights = _weights(bits, "group", _MX_BLOCK, "torch.uint8")
    tensors = {"_scale": exponents.astype(np.uint8)}
    if bits == 8:
        return Encoded("mxfp8-quantized", {"": scaled.numbers, **tensors}, scaled.changed, weights)
    rows = scaled.numbers.shape[0]
    packed = pack_bits(scaled.numbers.view(np.uint8), bits).reshape(rows, -1)
    return Encoded(f"mxfp{bits}-pack-quantized", {"_packed": packed, **tensors}, scaled.changed, weights)


def _fp8(name: str, q: exmy.Quantized, rounding: bool) -> Encoded:
    if not q.shape or not q.size:
        raise NoCounterpart("it has no elements along an axis")
    scaled, scheme = as_floats(q, ml_dtypes.float8_e4m3fn), "F8_E4M3"
    if scaled.changed and not (wider := as_floats(q, ml_dtypes.float8_e5m2)).changed:
        scaled, scheme = wider, "F8_E5M2"
    scaled = _rounded(scaled, rounding)
    shape = () if q.axis is None else (*q.shape[:-1], q.shape[-1] // (q.block or q.shape[-1]))
    tensors = {"": scaled.numbers, "_scale": _float32(scaled.scales).reshape(shape)}
    return Encoded(scheme, tensors, scaled.changed, {})


def _rounded(scaled: Scaled, allowed: bool) -> Scaled:
    """Return numbers of FP8; raise `NoCounterpart` if values were rounded, but may not be."""
    if scaled.changed and not allowed:
        raise NoCounterpart(f"FP8 lacks the values of {scaled.changed:,} of its {scaled.numbers.size:,} elements")
    return scaled


def _float32(scales: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    narrow = scales.astype(np.float32)
    exponents = np.frexp(scales)[1] - 1
    low, high = _F32_EXPONENTS
    if not np.array_equal(narrow, scales) or exponents.min(initial=0) < low or exponents.max(initial=0) > high:
        raise NoCounterpart("it has scales that are not normal numbers of float32")
    return narrow


def _weights(
    bits: int,
    strategy: str,
    group_size: int | None,
    scale_dtype: str | None,
    kind: Literal["int", "float"] = "float",
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": group_size,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": scale_dtype,
        "zp_dtype": scale_dtype,
    }
