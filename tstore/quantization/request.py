"""Validation and description of the arguments of `quantize` that determine the formats, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

import exmy

from tstore.errors import InvalidArgument
from tstore.format.codecs import Codecs, as_configuration, is_exmy
from tstore.quantization.policy import DEFAULT, Bits, CodecRules, Default, MinSqnr, Target

__all__ = ["Request", "checked_request"]

_MAX_LENGTH = 300
"""The maximum length of a description in characters; it becomes part of a commit's message."""


class Request(NamedTuple):
    """The rules by which arrays get their codecs, and the target for the arrays without a rule.

    `defaults` are the default granularity and scale of eXmY codecs. With `auto_block`, an array without a rule has
    an exponent offset per block of 128, 64 or 32 values: the first of these sizes that divides its last axis and
    chunks. If none does, the array has one offset.
    """

    formats: CodecRules = None
    target: Target | Default | None = None
    defaults: Mapping[str, Any] = {}
    auto_block: bool = True

    def describe(self) -> str:
        """Return the request as one line, truncated if long: "**: e3m2; bits=5, error=relative; axis=0"."""
        parts = []
        if _are_rules(self.formats):
            parts.append(
                ", ".join(f"{pattern}: {_describe_codecs(codecs)}" for pattern, codecs in self.formats.items())
            )
        elif self.formats is not None:
            parts.append(_describe_codecs(self.formats))
        match self.target:
            case MinSqnr(decibel):
                parts.append(f"min_sqnr={decibel:g}")
            case Bits(average, error):
                parts.append(f"bits={average:g}, error={error}")
            case Default():
                parts.append("8 bits per value")
        if self.target is not None and self.auto_block:
            parts.append("block=auto")
        if self.defaults:
            parts.append(_describe_settings(self.defaults))
        # a pattern may contain lone surrogates, which can't be stored as UTF-8
        text = "; ".join(parts).encode("utf-8", "backslashreplace").decode()
        return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"

    def tag_suffix(self) -> str:
        """Return the formats as the last part of a tag, such as "e4m3-5bits"."""
        used = self.formats.values() if _are_rules(self.formats) else [self.formats]
        parts = [_format_name(codecs) for codecs in used if codecs is not None]
        match self.target:
            case MinSqnr(decibel):
                parts.append(f"{decibel:g}dB")
            case Bits(average, _):
                parts.append(f"{average:g}bits")
            case Default():
                parts.append("e2m5")
        return "-".join(dict.fromkeys(parts)) or "copy"


def checked_request(
    formats: CodecRules,
    min_sqnr: float | None,
    bits: float | None,
    error: Literal["absolute", "relative"] | None,
    axis: int | None,
    block: int | Literal["auto"] | None,
    scale: str,
) -> Request:
    """Return the request for these arguments of `quantize`; raise `InvalidArgument` if they are invalid."""
    target: Target | Default | None = _checked_target(min_sqnr, bits, error)
    if formats is None and target is None:
        target = DEFAULT
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
    return Request(formats, target, defaults, auto_block and axis is None and scale != "none")


def _checked_target(
    min_sqnr: float | None, bits: float | None, error: Literal["absolute", "relative"] | None
) -> Target | None:
    if min_sqnr is not None and bits is not None:
        raise InvalidArgument("min_sqnr=… and bits=… are mutually exclusive; pass one of them")
    if bits is not None:
        return Bits(bits) if error is None else Bits(bits, error)
    if error is not None:
        raise InvalidArgument(f"error={error!r} applies only to the budget bits=…; pass bits=… too")
    return None if min_sqnr is None else MinSqnr(min_sqnr)


def _are_rules(formats: CodecRules) -> TypeGuard[Mapping[str, Codecs]]:
    """Return whether these are rules by path pattern rather than one codec."""
    return isinstance(formats, Mapping) and "format" not in formats


def _format_name(codecs: Codecs) -> str:
    if isinstance(codecs, Mapping):
        return str(codecs["format"])
    if isinstance(codecs, str | exmy.Format):
        return str(codecs)
    return str(as_configuration(codecs).get("format")) if is_exmy(codecs) else "custom"


def _describe_codecs(codecs: Codecs) -> str:
    if codecs is None:
        return "kept"
    if isinstance(codecs, str | exmy.Format):
        return str(codecs)
    if isinstance(codecs, Mapping):
        settings = {key: value for key, value in codecs.items() if key != "format"}
        return " ".join([str(codecs.get("format")), *([f"({_describe_settings(settings)})"] if settings else [])])
    named = [f"{c.get('name')} ({_describe_settings(c.get('configuration') or {})})" for c in codecs]
    return " + ".join(name.removesuffix(" ()") for name in named)


def _describe_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
