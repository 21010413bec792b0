"""Nested dicts and lists from a list of leaves with keys, as in the metadata of DCP and Orbax checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tstore.errors import Corrupt
from tstore.format.tree_document import MAX_LEVELS

__all__ = ["Keys", "nested"]

Keys = tuple[str | int, ...]
"""The keys of a leaf from the outermost container on; a number is an index of a list."""


class _Container(dict[str | int, Any]):
    """A dict or list while it is being filled; lists have numbers as keys."""


def nested(leaves: Iterable[tuple[Keys, Any]], subject: str) -> Any:
    """Return the tree of these leaves, which may come in any order; raise `Corrupt` if they form no tree."""
    root = _Container()
    for keys, leaf in leaves:
        if not keys or len(keys) > MAX_LEVELS:
            raise Corrupt(f"{subject} has a leaf with {len(keys)} keys; expected 1 to {MAX_LEVELS}")
        node = root
        for key in keys[:-1]:
            child = node.setdefault(key, _Container())
            if not isinstance(child, _Container):
                raise Corrupt(f"{subject} has a value above {_shown(keys)}; check the checkpoint")
            node = child
        if keys[-1] in node:
            raise Corrupt(
                f"{subject} has two values, or a value and a container, at {_shown(keys)}; check the checkpoint"
            )
        node[keys[-1]] = leaf
    return _without_containers(root, subject, ())


def _without_containers(node: Any, subject: str, keys: Keys) -> Any:
    """Return the tree at these keys, with dicts and lists in place of `_Container`."""
    if not isinstance(node, _Container):
        return node
    if not any(isinstance(key, int) for key in node):
        return {key: _without_containers(child, subject, (*keys, key)) for key, child in node.items()}
    if set(node) != set(range(len(node))):
        raise Corrupt(
            f"{subject} has the keys {', '.join(map(repr, list(node)[:10])):.300} in one list, at {_shown(keys)}; "
            f"expected 0 to {len(node) - 1}"
        )
    return [_without_containers(node[i], subject, (*keys, i)) for i in range(len(node))]


def _shown(keys: Keys) -> str:
    """Return the keys as a path, for messages."""
    return "/".join(map(str, keys))[:200] or "its root"
