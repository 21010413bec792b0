"""Validation and description of the arguments of `quantize` that determine the formats, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import exmy

from tstore.core.format.arguments import checked_choice
from tstore.core.format.arrays.codecs import Codecs, as_configuration, is_exmy
from tstore.errors import InvalidArgument
from tstore.quantization.policy import (
    DEFAULT_BITS,
    Bits,
    Coding,
    MinSqnr,
    QuantizeRules,
    Rules,
    Target,
)

__all__ = ["Request", "checked_request"]

_MAX_LENGTH = 300
"""The maximum length of a description in characters; it becomes part of a commit's message."""

_MAX_NAMES = 4
"""The maximum number of names in the suffix of a tag."""


class Request(NamedTuple):
    """The codec rules, and the target for the arrays without a rule.

    `defaults` are the default granularity and scale of packed eXmY codecs. With `auto_block`, a packed array whose
    format is chosen from its values has an exponent offset per block of 128, 64 or 32 values: the first of these
    sizes that divides its last axis and chunks. If none does, the array has one offset. `is_default` means that
    the caller passed no rules or targets, so that the target counts only the arrays that can be encoded.
    """

    rules: Rules | None = None
    target: Target | None = None
    defaults: Mapping[str, Any] = {}
    auto_block: bool = True
    is_default: bool = False

    def describe(self) -> str:
        """Return the request as one line, truncated if long: "**: e3m2; bits=5, error=relative; axis=0"."""
        parts = []
        if self.rules is not None:
            rules = [(f"{p}: " if self.rules.has_patterns else "", c) for p, c in self.rules.by_pattern.items()]
            parts.append(", ".join(f"{pattern}{_describe_codecs(codecs)}" for pattern, codecs in rules))
        if self.target is not None:
            parts.append(_describe_target(self.target))
            if self.target.coding == "packed" and self.auto_block:
                parts.append("block=auto")
        if self.defaults:
            parts.append(_describe_settings(self.defaults))
        # a pattern may contain lone surrogates, which can't be stored as UTF-8
        text = "; ".join(parts).encode("utf-8", "backslashreplace").decode()
        return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"

    def tag_suffix(self) -> str:
        """Return the formats as the last part of a tag, such as "e4m3-5bits"."""
        used = [] if self.rules is None else self.rules.by_pattern.values()
        names = list(dict.fromkeys(_short_name(value) for value in (*used, self.target) if value is not None))
        if len(names) > _MAX_NAMES:
            names[_MAX_NAMES - 1 :] = [f"and-{len(names) - _MAX_NAMES + 1}-more"]
        return "-".join(names) or "copy"


def checked_request(
    formats: QuantizeRules,
    min_sqnr: float | None,
    bits: float | None,
    error: Literal["absolute", "relative"] | None,
    coding: Coding | None,
    axis: int | None,
    block: int | Literal["auto"] | None,
    scale: str,
) -> Request:
    """Return the request for these arguments of `quantize`; raise `InvalidArgument` if they are invalid."""
    if not isinstance(scale, str):
        raise InvalidArgument(f"scale={scale!r:.100}: expected 'search', 'max', 'none', 'float', 'e4m3' or '6bit'")
    auto_block = isinstance(block, str) and block == "auto"
    settings: dict[str, Any] = {
        "axis": axis,
        "block": None if auto_block else block,
        "scale": None if scale == "search" else scale,
    }
    defaults = {key: value for key, value in settings.items() if value is not None}
    try:
        exmy.ChunkCodec.from_configuration({"format": "e4m3", **defaults})
    except exmy.ExmyError as invalid:
        raise InvalidArgument(f"axis, block or scale is invalid: {invalid!s:.300}") from None
    is_packed = bool(defaults) or not auto_block
    if is_packed and coding == "entropy":
        raise InvalidArgument(
            "axis, block and scale are settings of packed codes, while entropy-coded arrays have one step for all "
            "values; leave them out, or pass coding='packed'"
        )
    if coding is not None:
        checked_choice("coding", coding, get_args(Coding))
    chosen: Coding = coding or ("packed" if is_packed else "entropy")
    target = _checked_target(min_sqnr, bits, error, chosen)
    if target is None and formats is not None and coding is not None:
        raise InvalidArgument(
            f"coding={coding!r} applies to bits=… and min_sqnr=…; pass one of them too, or put it into the target "
            f"of a rule, such as {{'bits': 4, 'coding': {coding!r}}}"
        )
    auto_block = auto_block and axis is None and scale != "none"
    if target is None and formats is None:
        return Request(None, Bits(DEFAULT_BITS[chosen], coding=chosen), defaults, auto_block, is_default=True)
    return Request(None if formats is None else Rules(formats, "formats"), target, defaults, auto_block)


def _checked_target(
    min_sqnr: float | None, bits: float | None, error: Literal["absolute", "relative"] | None, coding: Coding
) -> Target | None:
    if min_sqnr is not None and bits is not None:
        raise InvalidArgument("min_sqnr=… and bits=… are mutually exclusive; pass one of them")
    if bits is not None:
        return Bits(bits, "relative" if error is None else error, coding)
    if error is not None:
        raise InvalidArgument(f"error={error!r} applies only to the budget bits=…; pass bits=… too")
    return None if min_sqnr is None else MinSqnr(min_sqnr, coding)


def _short_name(value: Codecs | Target) -> str:
    """Return codecs or a target as a part of a tag."""
    if isinstance(value, MinSqnr | Bits):
        size = f"{value.average:g}bits" if isinstance(value, Bits) else f"{value.decibel:g}dB"
        return size if value.coding == "entropy" else f"{size}-packed"
    if isinstance(value, Mapping):
        return str(value["format"])
    if isinstance(value, str | exmy.Format):
        return str(value)
    return str(as_configuration(value).get("format")) if is_exmy(value) else "custom"


def _describe_target(target: Target) -> str:
    if isinstance(target, MinSqnr):
        return f"min_sqnr={target.decibel:g}, coding={target.coding}"
    return f"bits={target.average:g}, error={target.error}, coding={target.coding}"


def _describe_codecs(codecs: Codecs | Target) -> str:
    if codecs is None:
        return "kept"
    if isinstance(codecs, MinSqnr | Bits):
        return _describe_target(codecs)
    if isinstance(codecs, str | exmy.Format):
        return str(codecs)
    if isinstance(codecs, Mapping):
        settings = {key: value for key, value in codecs.items() if key != "format"}
        return " ".join([str(codecs.get("format")), *([f"({_describe_settings(settings)})"] if settings else [])])
    named = [
        c if isinstance(c, str) else f"{c.get('name')} ({_describe_settings(c.get('configuration') or {})})"
        for c in codecs
    ]
    return " + ".join(name.removesuffix(" ()") for name in named)


def _describe_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
