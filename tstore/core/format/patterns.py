"""Globs over the paths of a checkpoint; pure, no I/O.

Patterns may come from an untrusted policy, and a regular expression can backtrack exponentially. So a pattern with
more than a few wildcards is matched by an automaton, in time linear in the length of the path.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Extent", "compile_patterns", "compile_renames", "extent_of"]

_MAX_REGEX_WILDCARDS = 2  # with up to this many, a regular expression takes at most quadratic time
_TOKENS = re.compile(r"\*\*/|/\*\*(?=\Z)|\*\*|\*|\?|[^*?/]+|/")
_LAST = {"/**": "**"}  # both are written "**" at the end of a pattern
_REGEX = {"**/": r"(?:[^/]+/)*", "/**": r"(?:/.*)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}


def compile_patterns(patterns: str | list[str] | tuple[str, ...]) -> Callable[[str], bool]:
    """Return a predicate: whether any of the globs matches a path.

    `*` matches within one name, `**` any number of names, `?` one character of a name.
    """
    if patterns == "**":
        return _matches_all
    regexes: list[str] = []
    automata: list[_Automaton] = []
    for glob in [patterns] if isinstance(patterns, str) else patterns:
        tokens = _TOKENS.findall(glob)
        if sum("*" in token for token in tokens) <= _MAX_REGEX_WILDCARDS:
            regexes.append("".join(_REGEX.get(token, re.escape(token)) for token in tokens))
        else:
            automata.append(_Automaton(tokens))
    joined = re.compile("|".join(f"(?:{regex})" for regex in regexes) or r"(?!)", re.DOTALL)
    return functools.partial(_matches_any, joined, automata)  # unlike a closure, it can be pickled


def _matches_all(path: str) -> bool:
    return True


def _matches_any(joined: re.Pattern[str], automata: list[_Automaton], path: str) -> bool:
    return joined.fullmatch(path) is not None or any(glob.matches(path) for glob in automata)


@dataclass(frozen=True)
class Extent:
    """The paths that globs can match: one of `paths`, or paths that begin with one of `starts`."""

    paths: frozenset[str]
    starts: tuple[str, ...]

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and (path in self.paths or path.startswith(self.starts))

    def with_groups(self, groups: Iterable[str]) -> Extent:
        """Return the extent with these groups, and all paths below them, added."""
        groups = frozenset(groups)
        return Extent(self.paths | groups, (*self.starts, *(f"{group}/" for group in groups)))


def extent_of(patterns: str | list[str] | tuple[str, ...]) -> Extent:
    """Return the extent of globs, from the text before the first wildcard of each."""
    paths: set[str] = set()
    starts: set[str] = set()
    for glob in [patterns] if isinstance(patterns, str) else patterns:
        tokens = _TOKENS.findall(glob)
        literal = list(itertools.takewhile(lambda token: token not in _REGEX, tokens))
        start, wildcard = "".join(literal), next(iter(tokens[len(literal) :]), "")
        if wildcard in ("", "/**"):
            paths.add(start)
        if wildcard:  # nothing sorts after strings that begin with the last Unicode character
            starts.add(f"{start}/" if wildcard == "/**" else start.rstrip("\U0010ffff"))
    return Extent(frozenset(paths), tuple(sorted(starts)))


def compile_renames(rules: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that renames a path by the first rule whose glob matches it, or returns it unchanged.

    A rule maps a glob to the new path, in which each wildcard stands for what the same wildcard has matched, in
    order: `{"net/*/w": "model/*/kernel"}`. `{"**": "model/**"}` moves all paths below a name, and
    `{"model/**": "**"}` moves them back. Raise `ValueError` for a new path with other wildcards than its glob.
    """
    compiled = []
    for glob, new in rules.items():
        tokens, new_tokens = _TOKENS.findall(glob), _TOKENS.findall(new)
        wildcards = [token for token in tokens if token in _REGEX]
        if [_LAST.get(w, w) for w in wildcards] != [_LAST.get(t, t) for t in new_tokens if t in _REGEX]:
            raise ValueError(f"{new!r} must have the wildcards of {glob!r}, in the same order")
        regex = "".join(f"({_REGEX[token]})" if token in _REGEX else re.escape(token) for token in tokens)
        compiled.append((re.compile(regex, re.DOTALL), wildcards, new_tokens))

    def renamed(path: str) -> str:
        for regex, wildcards, new_tokens in compiled:
            if match := regex.fullmatch(path):
                matched = zip(wildcards, match.groups(), strict=True)
                parts = [_replaced(token, *next(matched)) if token in _REGEX else token for token in new_tokens]
                return "".join(parts) or path
        return path

    return renamed


def _replaced(token: str, wildcard: str, text: str) -> str:
    """Return what stands for a wildcard of a new path, from the text that the glob's wildcard has matched."""
    if token == wildcard or not text:
        return text
    return text.removeprefix("/") if token == "**" else f"/{text}"


class _Automaton:
    """A glob as a nondeterministic automaton; a set of states is an integer, with bit i for state i."""

    def __init__(self, tokens: list[str]) -> None:
        self._step: dict[str, int] = {}  # for each character, the states from which it leads to the next state
        self._step_name = 0  # the states from which any character but "/" leads to the next state
        self._stay_name = 0  # the states that stay on any character but "/"
        self._stay_slash = 0  # the states that stay on "/"
        self._back = 0  # the states from which "/" leads to the previous state
        self._skip_one = self._skip_two = 0  # the states with an empty transition one or two states ahead
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
                case "**/":  # two states: between names, and inside a name
                    self._step_name |= bit
                    self._stay_name |= bit << 1
                    self._back |= bit << 1
                    self._skip_two |= bit
                    at += 1
                case "/**":  # two states: nothing so far, or a slash and anything
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
        states = self._reachable(1)
        for character in path:
            step = self._step.get(character, 0)
            if character == "/":
                after = (states & step) << 1 | states & self._stay_slash | (states & self._back) >> 1
            else:
                after = (states & (step | self._step_name)) << 1 | states & self._stay_name
            states = self._reachable(after)
            if not states:
                return False
        return bool(states & self._end)

    def _reachable(self, states: int) -> int:
        """Return these states and those that empty transitions reach from them."""
        while True:
            more = states | (states & self._skip_one) << 1 | (states & self._skip_two) << 2
            if more == states:
                return states
            states = more
