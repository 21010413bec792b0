"""Nested dicts and lists from a list of leaves with keys, as in the metadata of DCP and Orbax checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tstore.core.format.tree_document import MAX_LEVELS
from tstore.errors import Corrupt

__all__ = ["Keys", "nested"]

Keys = tuple[str | int, ...]
"""The keys of a leaf from the outermost container on; a number is an index of a list."""


class _Container(dict[str | bytes, Any]):
    """A dict or list while it is being filled; a list has its positions, as bytes, for keys.

    The hashes of bytes have a secret, so that a checkpoint can't choose positions that collide.
    """


def nested(leaves: Iterable[tuple[Keys, Any]], subject: str) -> Any:
    """Return the tree of these leaves, which may come in any order; raise `Corrupt` if they form no tree."""
    root = _Container()
    for keys, leaf in leaves:
        if not keys or len(keys) > MAX_LEVELS:
            raise Corrupt(f"{subject} has a leaf with {len(keys)} keys; expected 1 to {MAX_LEVELS}")
        node = root
        *above, last = (b"%d" % key if isinstance(key, int) else key for key in keys)
        for key in above:
            child = node.setdefault(key, _Container())
            if not isinstance(child, _Container):
                raise Corrupt(f"{subject} has a value above {_shown(keys)}; check the checkpoint")
            node = child
        if last in node:
            raise Corrupt(
                f"{subject} has two values, or a value and a container, at {_shown(keys)}; check the checkpoint"
            )
        node[last] = leaf
    return _without_containers(root, subject, ())


def _without_containers(node: Any, subject: str, keys: Keys) -> Any:
    """Return the tree at these keys, with dicts and lists in place of `_Container`."""
    if not isinstance(node, _Container):
        return node
    if texts := [key for key in node if isinstance(key, str)]:
        if len(texts) == len(node):
            return {key: _without_containers(node[key], subject, (*keys, key)) for key in texts}
    elif all(b"%d" % i in node for i in range(len(node))):
        return [_without_containers(node[b"%d" % i], subject, (*keys, i)) for i in range(len(node))]
    shown = ", ".join(repr(key) if isinstance(key, str) else key.decode() for key in list(node)[:10])
    raise Corrupt(
        f"{subject} has the keys {shown:.300} in one list, at {_shown(keys)}; expected 0 to {len(node) - 1}"
    )


def _shown(keys: Keys) -> str:
    """Return the keys as a path, for messages."""
    return "/".join(map(str, keys))[:200] or "its root"
