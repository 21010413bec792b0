"""Requests: what was asked of a quantization, in words; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tstore.format.codecs import Codecs
from tstore.quantization.policy import Bits, CodecRules, Default, MinSqnr, Target

__all__ = ["describe_request"]

_LIMIT = 300
"""Characters of a description: it goes into the message of a commit."""


def describe_request(
    formats: CodecRules, target: Target | Default | None, recipe: Mapping[str, Any], *, automatic: bool
) -> str:
    """Return a request in one line, as "**/norm*: kept, **: e3m2; bits=5, error=relative; axis=0".

    Long ones are cut, and end with "…". `automatic` says that arrays left to their data have blocks that fit.
    """
    parts = []
    if isinstance(formats, Mapping) and "format" not in formats:
        parts.append(", ".join(f"{pattern}: {_codecs(codecs)}" for pattern, codecs in formats.items()))
    elif formats is not None:
        parts.append(_codecs(formats))
    match target:
        case MinSqnr(decibel):
            parts.append(f"min_sqnr={decibel:g}")
        case Bits(average, error):
            parts.append(f"bits={average:g}, error={error}")
        case Default():
            parts.append("8 bits a value")
    if target is not None and automatic:
        parts.append("block=128 where it fits")
    if recipe:
        parts.append(_settings(recipe))
    text = "; ".join(parts).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LIMIT else text[: _LIMIT - 1] + "…"


def _codecs(codecs: Codecs) -> str:
    if codecs is None:
        return "kept"
    if isinstance(codecs, str):
        return codecs
    if isinstance(codecs, Mapping):
        settings = {key: value for key, value in codecs.items() if key != "format"}
        return " ".join([str(codecs.get("format")), *([f"({_settings(settings)})"] if settings else [])])
    named = [f"{c.get('name')} ({_settings(c.get('configuration') or {})})" for c in codecs]
    return " + ".join(name.removesuffix(" ()") for name in named)


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
