"""Policies: the codecs of the arrays of a checkpoint, by path pattern or by a target for size or error.

Pure, no I/O.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from tstore.core.format.arguments import checked_choice
from tstore.core.format.arrays.codecs import FLOATS, Codecs, checked_codecs, is_exmy
from tstore.core.format.patterns import compile_patterns
from tstore.core.format.tree_document import host_path
from tstore.errors import InvalidArgument, bullet_list

__all__ = [
    "DEFAULT_BITS",
    "ONE_DIMENSIONAL",
    "Bits",
    "CodecRules",
    "Coding",
    "Match",
    "MinSqnr",
    "QuantizeRules",
    "Rules",
    "Target",
    "parse_policy",
]


_MAX_COMPARED = 5  # patterns without a match; comparing one with 4,000 paths takes 50 ms
_MAX_DECIBELS = 1000  # far beyond float64, whose rounding error is 320 dB below the values


Coding = Literal["entropy", "packed"]
"""How eXmY codes are stored: compressed to about their entropy, or packed in the width of their format.

Entropy-coded arrays have far less error at the same size (`examples/minilm.py --defaults`), and their size can be
any fraction of a bit. Packed arrays are read faster, in parts of chunks too, and `restore(packed=True)`
returns their stored codes.
"""


@dataclass(frozen=True)
class MinSqnr:
    """Each array gets the fewest bits in eXmY that keep its SQNR at `decibel` dB or above.

    `coding` is how the formats are stored, as `quantize` takes it.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://sqnr", {"w": np.random.randn(256, 256)}, step=0)
    >>> report = tstore.quantize("memory://sqnr", {"w": tstore.MinSqnr(30)})
    >>> report.arrays[0].sqnr >= 30
    True
    """

    decibel: float
    coding: Coding = "entropy"

    def __post_init__(self) -> None:
        checked_choice("coding", self.coding, get_args(Coding))
        object.__setattr__(self, "decibel", _number("min_sqnr", self.decibel))
        if not 0 <= self.decibel <= _MAX_DECIBELS:
            raise InvalidArgument(
                f"min_sqnr={self.decibel:g}: expected decibels from 0, which zeros have, to {_MAX_DECIBELS}"
            )


@dataclass(frozen=True)
class Bits:
    """All arrays together get the eXmY formats with the least error at `average` stored bits per value or less.

    `error` is the sum to minimize over the arrays: "relative", each array's squared error divided by its sum of
    squares; or "absolute", the squared errors themselves. "relative" suits the weights of a model far better: each
    layer multiplies its inputs by its weights, so that the relative errors of layers add up, whatever their sizes
    (`examples/minilm.py --defaults` measures both). Packed codes can only have a few whole widths; for them,
    relative errors times the square root of the number of values give better models. `coding` is how the formats
    are stored, as `quantize` takes it.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://bits", {"w": np.random.randn(256, 256)}, step=0)
    >>> report = tstore.quantize("memory://bits", {"w": tstore.Bits(4.5)})
    >>> report.bits_per_value <= 4.5
    True
    """

    average: float
    error: Literal["absolute", "relative"] = "relative"
    coding: Coding = "entropy"

    def __post_init__(self) -> None:
        checked_choice("coding", self.coding, get_args(Coding))
        object.__setattr__(self, "average", _number("bits", self.average))
        if not 0 < self.average < math.inf:
            raise InvalidArgument(f"bits={self.average:g}: expected a positive number of bits per value")
        checked_choice("error", self.error, ("absolute", "relative"))

    def weight(self, signal: float, values: int) -> float:
        """Return the weight of the squared error of an array, from its sum of squares and its number of values."""
        if self.error == "absolute" or signal == 0:
            return 1.0
        return (1.0 if self.coding == "entropy" else math.sqrt(values)) / signal


DEFAULT_BITS: Mapping[Coding, float] = {"entropy": 8.0, "packed": 8.1}
"""The average bits per value of a quantization without a target; packed ones have room for headers and offsets."""

Target = MinSqnr | Bits
"""A target for error or size; formats are chosen from the values of arrays to meet it."""

CodecRules = Codecs | Mapping[str, Codecs]
"""Codecs for all arrays, or codecs by path pattern; the first pattern that matches an array applies."""

QuantizeRules = CodecRules | Mapping[str, Codecs | Target]
"""`CodecRules`, or such rules with targets; a target applies to all arrays of its pattern together."""


class Match(NamedTuple):
    """The codecs of an array in a quantization, or the target of its rule, and the pattern of that rule.

    If `codecs` is None, the array stays unchanged; `reason` says why, and is empty if a rule leaves it unchanged.
    """

    codecs: Codecs | Target
    reason: str = ""
    pattern: str = ""


def _number(argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidArgument(f"{argument}={value!r:.100}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{argument}: the integer does not fit into a float") from None


ONE_DIMENSIONAL = "one-dimensional; to encode it, add a rule with its name"
"""Why vectors are not encoded: those of a model are small and sensitive (biases, gains of normalizations)."""


class _Rule(NamedTuple):
    """A rule; `has_name` says whether its pattern names arrays, as the docstring of `Rules` explains."""

    pattern: str
    matches: Callable[[str], bool]
    codecs: Codecs | Target
    has_name: bool


class Rules:
    """Codecs or targets by path pattern; codecs alone are the rule "**".

    A mapping with the key "format" is the configuration of one eXmY codec, not a set of rules, and one such as
    {"name": "zstd"} is one codec (a rule for an array called "name" is {"**/name": …}). A mapping such as
    {"bits": 3} or {"min_sqnr": 30, "coding": "packed"}, as a JSON file has it, is a target.

    An eXmY format is for floats only. In a quantization, one-dimensional arrays get one only from a rule whose
    pattern names them. A pattern names arrays if its last part has characters other than wildcards:
    "layers/0/bias", "**/bias" and "**/norm*" do, "**", "layers/**" and "layers/*" do not.
    """

    def __init__(self, rules: QuantizeRules, argument: str = "codecs") -> None:
        has_patterns = isinstance(rules, Mapping) and not _is_codec(rules) and not _is_target(rules)
        by_pattern: Any = rules if has_patterns else {"**": rules}
        self.has_patterns = has_patterns
        """Whether these are rules by path pattern rather than one codec."""
        self.by_pattern = {
            pattern: _parse_rule(pattern, value, None if has_patterns else argument)
            for pattern, value in by_pattern.items()
        }
        """The codecs or the target of each pattern."""
        self._rules = [
            _Rule(p, compile_patterns(_forms(p)), codecs, _has_name(p)) for p, codecs in self.by_pattern.items()
        ]

    @staticmethod
    def from_paths(codecs: Mapping[str, Codecs]) -> Rules:
        """Return rules for exactly these paths, in which no character is a wildcard."""
        rules = Rules({})
        rules._rules = [_Rule(path, path.__eq__, path_codecs, True) for path, path_codecs in codecs.items()]
        return rules

    @functools.cached_property
    def _has_codecs(self) -> bool:
        """Whether any rule has codecs; in most saves, none has."""
        return any(rule.codecs is not None for rule in self._rules)

    def match(self, path: str, dtype: np.dtype[Any], ndim: int) -> Match | None:
        """Return the match of an array in a quantization, by the first rule that matches; None if none does."""
        for pattern, matches, codecs, has_name in self._rules:
            if matches(path):
                is_lossy = isinstance(codecs, MinSqnr | Bits) or is_exmy(codecs)
                if is_lossy and dtype.name not in FLOATS:
                    return Match(None, f"{dtype} is not encoded", pattern)
                if is_lossy and ndim == 1 and not has_name:
                    return Match(None, ONE_DIMENSIONAL, pattern)
                return Match(codecs, "", pattern)
        return None

    @property
    def targets(self) -> dict[str, Target]:
        """The targets by the pattern of their rule."""
        return {p: target for p, target in self.by_pattern.items() if isinstance(target, MinSqnr | Bits)}

    def codecs(self, path: str, dtype: np.dtype[Any]) -> Codecs:
        """Return the codecs of an array in a save; None without a rule, for a target, and eXmY without floats."""
        if not self._has_codecs:
            return None
        for _, matches, codecs, _ in self._rules:
            if matches(path):
                if isinstance(codecs, MinSqnr | Bits) or (is_exmy(codecs) and dtype.name not in FLOATS):
                    return None
                return codecs
        return None

    def check(self, paths: Iterable[str]) -> None:
        """Raise `InvalidArgument`, naming similar paths, if a pattern matches none of the paths."""
        all_paths = list(paths)
        if not self.has_patterns:
            return
        unmatched = [pattern for pattern, matches, _, _ in self._rules if not any(map(matches, all_paths))]
        if unmatched:
            similar = {p: ", ".join(_similar_paths(p, all_paths)) for p in unmatched[:_MAX_COMPARED]}
            lines = [f"{p!r}; similar paths: {similar[p]}" if similar.get(p) else repr(p) for p in unmatched]
            raise InvalidArgument(
                f"{len(unmatched)} of {len(self._rules)} patterns match no array of this checkpoint; correct or "
                f"remove them ('**/' matches any number of leading groups, including none):{bullet_list(lines)}"
            )


def _is_codec(value: Mapping[Any, Any]) -> bool:
    return "format" in value or ("name" in value and value.keys() <= {"name", "configuration"})


def _parse_rule(pattern: Any, value: Any, argument: str | None) -> Codecs | Target:
    """Return the codecs or the target of a rule; raise `InvalidArgument` if it is invalid.

    `argument` is the name of the argument that has codecs alone, without a pattern.
    """
    if isinstance(value, MinSqnr | Bits):
        return value
    if not isinstance(pattern, str):
        raise InvalidArgument(
            f"the rule {pattern!r:.100}: expected the pattern of paths as text, such as '**/norm*'"
        )
    if isinstance(value, Mapping) and "format" not in value and {"bits", "min_sqnr"} & value.keys():
        return _parse_target(pattern, value)
    return checked_codecs(value, f"the rule {pattern!r}: " if argument is None else f"{argument}=")


def _is_target(rules: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a target such as {"bits": 4} rather than rules by pattern."""
    numbers = int | float | np.integer | np.floating
    return any(isinstance(rules.get(key), numbers) for key in ("bits", "min_sqnr"))


def _parse_target(pattern: str, value: Mapping[str, Any]) -> Target:
    is_budget = "bits" in value
    if unknown := sorted(
        map(str, value.keys() - {*(("bits", "error") if is_budget else ("min_sqnr",)), "coding"})
    ):
        raise InvalidArgument(
            f"the rule {pattern!r}: a target can't have {', '.join(unknown)}; expected either bits, perhaps with "
            "error and coding, or min_sqnr, perhaps with coding"
        )
    try:
        options = {key: each for key, each in value.items() if key not in ("bits", "min_sqnr")}
        return Bits(value["bits"], **options) if is_budget else MinSqnr(value["min_sqnr"], **options)
    except InvalidArgument as error:
        raise InvalidArgument(f"the rule {pattern!r}: {error}") from None


def _forms(pattern: str) -> str | list[str]:
    """Return a pattern of values, with that of the bytes of each host if the value is a `PerHost`."""
    return pattern if pattern.endswith("**") else [pattern, host_path(pattern, "*")]


def _has_name(pattern: str) -> bool:
    """Return whether the last part of a pattern has characters other than wildcards."""
    return bool(pattern.rpartition("/")[2].strip("*?"))


def _similar_paths(pattern: str, paths: list[str]) -> list[str]:
    """Return up to three paths that are similar to the pattern as a whole, or in their last part."""
    plain = pattern.replace("*", "").strip("/")
    by_path = difflib.get_close_matches(plain, paths, 3, 0.5)
    path_by_name = {path.rpartition("/")[2]: path for path in reversed(paths)}
    names = difflib.get_close_matches(plain.rpartition("/")[2], path_by_name, 3, 0.5)
    return list(dict.fromkeys([*by_path, *(path_by_name[name] for name in names)]))[:3]


_ARGUMENTS = ("formats", "min_sqnr", "bits", "error", "coding", "sensitivity", "axis", "block", "scale")


def parse_policy(text: bytes, file: str) -> dict[str, Any]:
    """Return the arguments of `tstore.quantize` in a JSON policy file, which contains either rules or arguments.

    An object with the key "formats", "min_sqnr" or "bits" contains arguments; it may also have the keys "error",
    "coding", "sensitivity", "axis", "block" and "scale". Any other object contains rules. Raise `InvalidArgument`,
    naming the file, if the policy is invalid, also if it has a key twice: one of the two would be ignored.
    """

    def check_keys(pairs: list[tuple[str, Any]]) -> None:
        keys = sorted(key for key, _ in pairs)
        twice = [key for key, other in pairwise(keys) if key == other]
        if twice:
            raise InvalidArgument(f"{file} has the key {twice[0]!r:.200} twice in one object; remove one of them")

    try:
        document = msgspec.json.decode(text)  # it keeps the last of duplicate keys
        json.loads(text, object_pairs_hook=check_keys, parse_int=float)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{file} is not JSON: {error}") from None
    if not isinstance(document, dict) or not document:
        raise InvalidArgument(f'{file}: expected an object such as {{"**/norm*": null, "**": "e3m2"}}')
    if not {"formats", "min_sqnr", "bits"} & document.keys():
        return {"formats": document}
    unknown = sorted(document.keys() - set(_ARGUMENTS))
    if unknown:
        raise InvalidArgument(
            f"{file}: unknown keys {', '.join(unknown)}; expected some of {', '.join(_ARGUMENTS)}"
        )
    return document
