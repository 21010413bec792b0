"""Globs over the paths of a checkpoint; pure.

Patterns come from policies, which may be anybody's, so matching takes a time that is linear in the path: a pattern
with more than a few wildcards is matched by an automaton, on which a regular expression would backtrack for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["compile_patterns"]

_FEW = 2  # wildcards with which a regular expression is at most quadratic
_TOKENS = re.compile(r"\*\*/|/\*\*(?=\Z)|\*\*|\*|\?|[^*?/]+|/")
_REGEX = {"**/": r"(?:[^/]+/)*", "/**": r"(?:/.*)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}


def compile_patterns(patterns: str | list[str] | tuple[str, ...]) -> Callable[[str], bool]:
    """A test of paths against globs: `*` within one name, `**` over any number, `?` one character."""
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    tokens = [_TOKENS.findall(glob) for glob in globs]
    simple = ["".join(_REGEX.get(t, re.escape(t)) for t in ts) for ts in tokens if _wildcards(ts) <= _FEW]
    joined = re.compile("|".join(f"(?:{regex})" for regex in simple) or r"(?!)", re.DOTALL)
    others = [_Automaton(ts) for ts in tokens if _wildcards(ts) > _FEW]
    return lambda path: joined.fullmatch(path) is not None or any(other.matches(path) for other in others)


def _wildcards(tokens: list[str]) -> int:
    return sum("*" in token for token in tokens)


class _Automaton:
    """A glob as an automaton: bit i of an integer is set where the part before position i has matched."""

    def __init__(self, tokens: list[str]) -> None:
        self._step: dict[str, int] = {}  # by character: the states that it takes to the next one
        self._step_name = 0  # those that any character but "/" takes to the next one
        self._stay_name = self._stay_slash = 0  # those that a character leaves as they are
        self._back = 0  # those that "/" takes to the one before
        self._skip_one = self._skip_two = 0  # those that are also the next one, or the one after that
        at = 0
        for token in tokens:
            bit = 1 << at
            match token:
                case "*":
                    self._stay_name |= bit
                    self._skip_one |= bit
                case "**":
                    self._stay_name |= bit
                    self._stay_slash |= bit
                    self._skip_one |= bit
                case "**/":  # between names, and inside of one
                    self._step_name |= bit
                    self._stay_name |= bit << 1
                    self._back |= bit << 1
                    self._skip_two |= bit
                    at += 1
                case "/**":  # nothing, or a slash and anything
                    self._step["/"] = self._step.get("/", 0) | bit
                    self._stay_name |= bit << 1
                    self._stay_slash |= bit << 1
                    self._skip_two |= bit
                    self._skip_one |= bit << 1
                    at += 1
                case "?":
                    self._step_name |= bit
                case _:
                    for character in token:
                        self._step[character] = self._step.get(character, 0) | 1 << at
                        at += 1
                    continue
            at += 1
        self._end = 1 << at

    def matches(self, path: str) -> bool:
        """Return whether the glob matches all of the path."""
        states = self._skipped(1)
        for character in path:
            step = self._step.get(character, 0)
            if character == "/":
                after = (states & step) << 1 | states & self._stay_slash | (states & self._back) >> 1
            else:
                after = (states & (step | self._step_name)) << 1 | states & self._stay_name
            states = self._skipped(after)
            if not states:
                return False
        return bool(states & self._end)

    def _skipped(self, states: int) -> int:
        """Return the states with those that they also are."""
        while True:
            more = states | (states & self._skip_one) << 1 | (states & self._skip_two) << 2
            if more == states:
                return states
            states = more
