"""Policies: which codecs each array of a checkpoint gets, by the pattern of its path or by its data; pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import exmy
import msgspec
import numpy as np

from tstore.errors import InvalidArgument, listed
from tstore.format.arguments import checked_attributes
from tstore.format.codecs import FLOATS, Codecs, as_configuration, is_exmy
from tstore.format.patterns import compile_patterns

__all__ = [
    "DEFAULT",
    "ONE_DIMENSIONAL",
    "Bits",
    "CodecRules",
    "Default",
    "Match",
    "MinSqnr",
    "Rules",
    "Target",
    "parse_policy",
]

CodecRules = Codecs | Mapping[str, Codecs]
"""Codecs for all arrays, or by path pattern, first match first."""


_MOST_DECIBEL = 1000  # far beyond float64, whose own rounding is 320 dB below its values


@dataclass(frozen=True)
class MinSqnr:
    """Each array gets the eXmY format of the fewest bits that keeps its SQNR at `decibel` or above."""

    decibel: float

    def __post_init__(self) -> None:
        if not -_MOST_DECIBEL <= _number("min_sqnr", self.decibel) <= _MOST_DECIBEL:
            raise InvalidArgument(
                f"min_sqnr={self.decibel!r}: expected a finite number of decibels from "
                f"-{_MOST_DECIBEL} to {_MOST_DECIBEL}"
            )


@dataclass(frozen=True)
class Bits:
    """The eXmY formats of all arrays together: the least error at `average` stored bits a value or less.

    `error` says what is added up over the arrays: "relative", each array's squared error over its squared values,
    times the square root of its number of values; or "absolute", the squared errors themselves. "relative" serves
    the weights of a model far better: its layers rescale what comes in, and large tables of small influence do not
    take all bits (`examples/minilm.py --defaults` measures both).
    """

    average: float
    error: Literal["absolute", "relative"] = "relative"

    def __post_init__(self) -> None:
        if not 0 < _number("bits", self.average) < math.inf:
            raise InvalidArgument(f"bits={self.average!r}: expected a positive number of bits a value")
        if self.error not in ("absolute", "relative"):
            raise InvalidArgument(f"error={self.error!r}: expected 'absolute' or 'relative'")

    def weight(self, signal: float, values: int) -> float:
        """By how much the squared error of an array counts."""
        if self.error == "absolute" or signal == 0:
            return 1.0
        return math.sqrt(values) / signal


@dataclass(frozen=True)
class Default:
    """Each array gets 8 bits a value: e2m5 where blocks or rows share an offset, e3m4 where the whole array does.

    Of all formats of 8 bits these have the least error on the weights of a model: the values of a block lie within
    the few powers of two that e2m5 tells apart, those of a whole array need the wider range of e3m4.
    """


DEFAULT = Default()

Target = MinSqnr | Bits
"""What the data of an array decides by, where no rule matches its path."""


class Match(NamedTuple):
    """What the first rule that matches an array gives it: codecs, or None, and why it gets none after all."""

    codecs: Codecs
    reason: str = ""


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{what}={value!r}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{what}: the integer does not fit into a float") from None


ONE_DIMENSIONAL = "one-dimensional; a rule with its name encodes it"
"""Why vectors keep their bits: those of a model are few and decide much (biases, the gains of normalisations)."""


class Rules:
    """Codecs by path pattern. One codec alone stands for the rule "**".

    A mapping with the key "format" is no set of rules but the configuration of one eXmY codec.

    An eXmY format is for floats only. Where a version is quantized, one-dimensional arrays get it only from a rule
    that names them: one whose last part has other characters than wildcards, as "layers/0/bias", "**/bias"
    and "**/norm*" have, and "**", "layers/**" and "layers/*" have not.
    """

    def __init__(self, rules: CodecRules) -> None:
        listed = rules if isinstance(rules, Mapping) and "format" not in rules else {"**": rules}
        self._given = isinstance(rules, Mapping) and listed is rules
        for pattern, codecs in listed.items():
            if not isinstance(pattern, str) or not isinstance(codecs, str | Mapping | list | tuple | None):
                raise InvalidArgument(
                    f"the rule {pattern!r}: {codecs!r:.100} can't be read; expected a path pattern, and None, "
                    "'lossless', an eXmY format such as 'e4m3', its configuration, or a list of Zarr codecs"
                )
            if isinstance(codecs, list | tuple):
                _check_codecs(pattern, codecs)
            if is_exmy(codecs):
                _check_exmy(pattern, codecs)
        self._tests = [(p, compile_patterns(p), codecs, _names(p)) for p, codecs in listed.items()]

    @staticmethod
    def exact(codecs: Mapping[str, Codecs]) -> Rules:
        """Return the rules that give these paths, taken letter by letter, these codecs."""
        rules = Rules({})
        rules._tests = [(path, path.__eq__, chosen, True) for path, chosen in codecs.items()]
        return rules

    def match(self, path: str, dtype: np.dtype[Any], dimensions: int) -> Match | None:
        """Return what the first rule that matches gives an array that is quantized, None where none does."""
        for _, matches, codecs, names in self._tests:
            if matches(path):
                if is_exmy(codecs) and dtype.name not in FLOATS:
                    return Match(None, f"{dtype} is not encoded")
                if is_exmy(codecs) and dimensions == 1 and not names:
                    return Match(None, ONE_DIMENSIONAL)
                return Match(codecs)
        return None

    def codecs(self, path: str, dtype: np.dtype[Any]) -> Codecs:
        """Return the codecs that an array is saved in; None, which keeps all bits, where no rule matches."""
        codecs = next((codecs for _, matches, codecs, _ in self._tests if matches(path)), None)
        return None if is_exmy(codecs) and dtype.name not in FLOATS else codecs

    def check(self, paths: Iterable[str]) -> None:
        """Raises `InvalidArgument` for patterns that match none of the paths, with the nearest paths."""
        there = list(paths)
        if not self._given:
            return
        idle = [pattern for pattern, matches, _, _ in self._tests if not any(map(matches, there))]
        if idle:
            lines = [f"{p!r}; near it are: {', '.join(_near(p, there)) or 'none'}" for p in idle]
            raise InvalidArgument(
                f"{len(idle)} of {len(self._tests)} patterns match no array of this checkpoint; mend or remove "
                f"them ('**/' stands for any folders above, also none):{listed(lines)}"
            )


def _check_codecs(pattern: str, codecs: Sequence[Any]) -> None:
    """Raise `InvalidArgument` for a list that holds anything but Zarr codecs."""
    checked_attributes({"codecs": codecs}, f"the rule {pattern!r}: ")
    for codec in codecs:
        if (
            not isinstance(codec, Mapping)
            or not isinstance(codec.get("name"), str)
            or not isinstance(codec.get("configuration", {}), Mapping)
        ):
            raise InvalidArgument(
                f"the rule {pattern!r}: {codec!r:.100} is no codec of Zarr; expected a mapping such as "
                '{"name": "zstd", "configuration": {"level": 1}}'
            )


def _check_exmy(pattern: str, codecs: Codecs) -> None:
    """Raise `InvalidArgument` for a format that exmy does not know, even if no array would be stored in it."""
    try:
        exmy.ChunkCodec.of(as_configuration(codecs))
    except exmy.ExmyError as error:
        raise InvalidArgument(
            f"the rule {pattern!r}: {error}; or pass 'lossless', or None to keep arrays as they are"
        ) from None


def _names(pattern: str) -> bool:
    """Return whether a pattern names arrays: whether its last part has more than wildcards."""
    return bool(pattern.rpartition("/")[2].strip("*?"))


def _near(pattern: str, paths: list[str]) -> list[str]:
    """Paths like the pattern, as a whole or in their last name."""
    plain = pattern.replace("*", "").strip("/")
    whole = difflib.get_close_matches(plain, paths, 3, 0.5)
    name = plain.rpartition("/")[2]
    names = {path.rpartition("/")[2]: path for path in reversed(paths)}
    return list(dict.fromkeys([*whole, *(names[n] for n in difflib.get_close_matches(name, names, 3, 0.5))]))[:3]


_WORDS = ("formats", "min_sqnr", "bits", "error", "axis", "block", "scale")


def parse_policy(text: bytes, where: str) -> dict[str, Any]:
    """The arguments of `tstore.quantize` in a policy file: JSON, rules by path pattern or an object of arguments.

    An object with "formats", "min_sqnr" or "bits" is one of arguments, which may also hold "error", "axis",
    "block" and "scale". `InvalidArgument` names the file `where` it does not parse.
    """
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{where} is no JSON: {error}") from None
    if not isinstance(document, dict) or not document:
        raise InvalidArgument(f'{where}: expected an object such as {{"**/norm*": null, "**": "e3m2"}}')
    if not {"formats", "min_sqnr", "bits"} & document.keys():
        return {"formats": document}
    unknown = sorted(document.keys() - set(_WORDS))
    if unknown:
        raise InvalidArgument(f"{where}: unknown keys {', '.join(unknown)}; known are: {', '.join(_WORDS)}")
    return document
