"""Values of a foreign checkpoint that an import skips by name, or that tstore can't store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tstore.checkpoint.structure import path_part
from tstore.convert.pickled import Unreadable
from tstore.core.format.patterns import compile_patterns

__all__ = ["Pruned", "pruned"]


class Pruned(NamedTuple):
    """A tree without the values at `skipped`; the values at the paths in `unreadable` can't be stored.

    `unused` are the globs that match nothing.
    """

    tree: Any
    skipped: list[str]
    unreadable: dict[str, str]
    unused: list[str]


def pruned(tree: Any, skip: Sequence[str], top: str = "") -> Pruned:
    """Return the tree at path `top` without the values that match globs; in a list, None stands in for each."""
    globs = {glob: compile_patterns(glob) for glob in skip}
    unused, skipped, unreadable = set(globs), list[str](), dict[str, str]()

    def is_skipped(path: str) -> bool:
        matching = [glob for glob, matches in globs.items() if matches(path)]
        unused.difference_update(matching)
        if matching:
            skipped.append(path)
        return bool(matching)

    def kept(value: Any, path: str) -> Any:
        below = f"{path}/" if path else ""
        if type(value) is dict:
            items = ((key, item, below + path_part(key)) for key, item in value.items())
            return {key: kept(item, at) for key, item, at in items if not is_skipped(at)}
        if type(value) in (list, tuple):
            places = ((item, f"{below}{i}") for i, item in enumerate(value))
            return type(value)(None if is_skipped(at) else kept(item, at) for item, at in places)
        if isinstance(value, Unreadable):
            unreadable[path or "the whole object"] = value.what
        return value

    return Pruned(kept(tree, top), skipped, unreadable, sorted(unused))
