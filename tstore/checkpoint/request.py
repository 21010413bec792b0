"""The request of a restore: which arrays of a checkpoint, under which paths and dtypes; pure, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from tstore.core.format.arguments import checked_choice, checked_host, checked_text, quote
from tstore.core.format.arrays.array_metadata import dtype_named
from tstore.core.format.arrays.dtypes import has_nonfinite, is_float
from tstore.core.format.patterns import Extent, compile_patterns, compile_renames, extent_of
from tstore.core.format.tree_document import host_path
from tstore.errors import InvalidArgument, NotFound

__all__ = ["Cast", "Missing", "PerHostRule", "Request"]

Cast = npt.DTypeLike | Mapping[str, npt.DTypeLike] | None
"""The dtype of restored float arrays: one for all, "target" for the target's, or dtypes by path pattern."""

Missing = Literal["error", "keep"]

PerHostRule = Literal["same", "keep", "all"]
"""What to restore for values that are separate for each host."""

_EXAMPLES = 5  # paths in an error


class Request:
    """The arguments of `restore` that select, rename and cast arrays.

    `rename` is applied first; `only` and `dtype` match the new paths. `forms` are patterns of the names below a
    leaf's path under which some leaves are stored. Raise `InvalidArgument` for an invalid argument.
    """

    def __init__(
        self,
        only: str | list[str] | None,
        rename: Mapping[str, str] | None,
        dtype: Cast,
        missing: Missing,
        per_host: PerHostRule = "same",
        host: int = 0,
        hosts: int = 1,
        forms: Sequence[str] = (),
    ) -> None:
        if only is not None and not isinstance(only, str | list | tuple):
            raise InvalidArgument(f"only={quote(only)}: expected a pattern such as 'layers/**', or a list of them")
        for pattern in [only] if isinstance(only, str) else only or ():
            checked_text("only", pattern)
        checked_choice("missing", missing, get_args(Missing))
        checked_choice("per_host", per_host, get_args(PerHostRule))
        self.host, self.hosts = checked_host(host, hosts)
        self.per_host = per_host
        self.only = only
        self.keeps_missing = missing == "keep"
        self._forms = [host_path("", "*"), *(f"/{form}" for form in forms)]
        if only is not None:
            only = [form for p in ([only] if isinstance(only, str) else only) for form in self._with_forms(p)]
        self.matches: Callable[[str], bool] = (lambda path: True) if only is None else compile_patterns(only)
        self.renamed_path = self._renames(rename)
        """Return the restored path of a stored path."""
        self.renames = bool(rename)
        self.extent: Extent | None = None
        """The range of stored paths that can contain the selected ones, None for all."""
        if only is not None and not rename and "" not in (extent := extent_of(only)).starts:
            self.extent = extent
        self._rules = rename or {}
        self._casts = _casts(dtype)

    def _with_forms(self, pattern: str) -> list[str]:
        """Return a pattern, and those of the stored forms of the leaves that it matches."""
        return [pattern] if pattern.endswith("**") else [pattern, *(pattern + form for form in self._forms)]

    def _renames(self, rename: Mapping[str, str] | None) -> Callable[[str], str]:
        if rename is None:
            return lambda path: path
        if not isinstance(rename, Mapping) or not all(isinstance(t, str) for t in (*rename, *rename.values())):
            raise InvalidArgument(
                f"rename={quote(rename)}: expected new paths by stored path, as in {{'net/**': 'model/**'}}"
            )
        rules: dict[str, str] = {}
        for pattern, new in rename.items():  # in their order, because the first match applies
            rules |= dict(zip(self._with_forms(pattern), self._with_forms(new), strict=False))
        try:
            return compile_renames(rules)
        except ValueError as error:
            raise InvalidArgument(f"rename=…: {error}") from None

    def selects(self, path: str) -> bool:
        """Return whether the request selects a value at a path, including `PerHost` values."""
        return self.matches(path) or self.matches(host_path(path, self.host))

    def renamed(self, stored: Iterable[str]) -> dict[str, str]:
        """Return stored paths by restored path.

        Raise `InvalidArgument` if two arrays get the same path, or if a rename puts one array below another.
        """
        if not self.renames:
            return {path: path for path in stored}
        paths: dict[str, str] = {}
        for path in stored:
            new = self.renamed_path(path)
            if paths.setdefault(new, path) != path:
                raise InvalidArgument(f"rename=…: {paths[new]!r} and {path!r} would both be restored as {new!r}")
        for path, old in paths.items():
            above = path.rpartition("/")[0]
            while above:
                if above in paths:
                    raise InvalidArgument(
                        f"rename=…: {old!r} would be restored as {path!r}, below {paths[above]!r} as {above!r}"
                    )
                above = above.rpartition("/")[0]
        return paths

    def advice(self, paths: list[str]) -> str:
        """Say that `only` matches no array, and what to pass instead."""
        patterns = [self.only] if isinstance(self.only, str) else self.only or [""]
        meant = next(filter(None, (_meant(pattern, paths) for pattern in patterns)), None)
        hint = _similar(patterns[0], paths) if meant is None else f"{meant[1]}; did you mean only={meant[0]!r}?"
        return f"no array matches only={quote(self.only)}; {hint}"

    def check_renames(self, paths: Collection[str]) -> None:
        """Raise `NotFound` if a rule of `rename` matches none of the stored paths of arrays and other values."""
        for pattern, new in self._rules.items():
            if pattern not in paths and not any(map(compile_patterns(self._with_forms(pattern)), paths)):
                meant = _meant(pattern, paths)
                hint = _similar(pattern, paths) if meant is None else f"{meant[1]}; did you mean {meant[0]!r}?"
                raise NotFound(f"rename={{{pattern!r}: {new!r}}} matches nothing; {hint}")

    def dtype(self, path: str, stored: np.dtype[Any], target: np.dtype[Any] | None) -> np.dtype[Any]:
        """Return the dtype to restore an array in; `target` is that of the target's leaf, if there is one."""
        if not self._casts or not is_float(stored):
            return stored
        for matches, dtype in self._casts:
            if matches(path):
                if dtype is not None:
                    return dtype
                return stored if target is None or not _is_cast_target(target) else target
        return stored


def _meant(pattern: str, paths: Iterable[str]) -> tuple[str, str] | None:
    """Suggest a correction for a pattern that matches no path, with the reason; None if that is unclear."""
    top = pattern.strip("/")
    below = compile_patterns(f"{top}/**")
    matches = compile_patterns(top)
    for path in paths:
        if matches(path):
            return top, "paths do not begin or end with a slash"
        if below(path):
            return f"{top}/**", f"{top!r} selects no arrays, but groups of them"
        if "%" in path and matches(unquote(path)):
            return path, "a slash within a key is written %2f"
    return None


def _similar(pattern: str, paths: Collection[str]) -> str:
    """Return a list of some paths, those near the first name of a pattern if there are any."""
    top = pattern.strip("/")
    while top := top.rpartition("/")[0]:
        if near := [path for path in paths if path.startswith(f"{top}/")][:_EXAMPLES]:
            return f"similar paths: {', '.join(near)}"
    return f"its paths: {', '.join(itertools.islice(paths, _EXAMPLES)) or 'none'}"


def _is_cast_target(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays can be cast to a dtype: a float with NaN and a useful range."""
    return is_float(dtype) and has_nonfinite(dtype)


def _casts(dtype: Cast) -> list[tuple[Callable[[str], bool], np.dtype[Any] | None]]:
    """Return a path matcher and a dtype for each rule of a cast; None stands for the dtype of the target."""
    if dtype is None:
        return []
    rules = dtype if isinstance(dtype, Mapping) else {"**": dtype}
    casts = []
    for pattern, name in rules.items():
        if name is None:
            raise InvalidArgument(f"dtype={quote(dtype)}: expected a dtype, such as 'float32', for {pattern!r}")
        cast = None if isinstance(name, str) and name == "target" else dtype_named(name)
        if cast is not None and not _is_cast_target(cast):
            raise InvalidArgument(
                f"dtype={quote(dtype)}: {cast} is not a float dtype of 8 bits or more; only float arrays are "
                "cast, and tstore.quantize stores floats in fewer bits"
            )
        casts.append((compile_patterns(pattern), cast))
    return casts
