"""Pytrees as leaves with paths, and as the nested dicts and lists that the core saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from jax import tree_util

from tstore.checkpoint.structure import path_part
from tstore.core.format.tree_document import MAX_LEVELS
from tstore.errors import InvalidArgument

__all__ = ["Pytree"]

_KEY_TYPES = (bool, int, float, str, bytes)


class Pytree:
    """A pytree taken apart: `leaves` has its leaves by path.

    A path is made of the keys that JAX gives: those of dicts, the positions in sequences, and the names of fields.
    So a tree of arrays, its abstract tree, and a dict with the names of its fields have the same paths. That of a
    tree that is a leaf is "".
    """

    def __init__(self, tree: Any) -> None:
        try:
            _check_depth(tree, [])
            keyed, self._definition = tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
        except InvalidArgument:
            raise
        except Exception as error:  # JAX and the code of registered classes may raise anything
            reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")
            raise InvalidArgument(
                f"JAX can't flatten the tree: {reason}; pass a pytree without cycles, with dict keys that can be "
                "sorted"
            ) from error
        self._keys = [tuple(map(_key, keys)) for keys, _ in keyed]
        self._entries: dict[str, Any] = {}  # the leaves, None and empty containers, in the order of JAX
        for keys, (_, entry) in zip(self._keys, keyed, strict=True):
            path = "/".join(map(path_part, keys))
            if path in self._entries:
                raise InvalidArgument(f"{path}: two leaves have this path; rename the keys of one of them")
            self._entries[path] = entry
        self.leaves = {path: entry for path, entry in self._entries.items() if not _is_empty(entry)}

    def nested(self, values: Mapping[str, Any]) -> Any:
        """Return nested dicts, lists and tuples with these values, by path, in place of the leaves.

        None and empty containers stay; containers of other classes, such as named tuples, become dicts.
        """
        entries = [values[p] if p in self.leaves else _plain(entry) for p, entry in self._entries.items()]
        return _nested(self._definition, 0, iter(zip(self._keys, entries, strict=True)))[1]

    def with_leaves(self, values: Mapping[str, Any]) -> Any:
        """Return a pytree of the same types with these values, by path, in place of the leaves."""
        return tree_util.tree_unflatten(self._definition, {**self._entries, **values}.values())


def _check_depth(node: Any, ancestors: list[Any]) -> None:
    """Raise `InvalidArgument` for a tree that contains itself or is too deep.

    JAX would raise `RecursionError`, after which the calling thread could never call a Python function again.
    """
    level = tree_util.default_registry.flatten_one_level(node)
    if level is None:
        return
    if any(node is ancestor for ancestor in ancestors):
        raise InvalidArgument(f"{_path_to(node, ancestors)}: the tree contains itself; pass a tree without cycles")
    if len(ancestors) == MAX_LEVELS:
        raise InvalidArgument(f"the tree is more than {MAX_LEVELS} levels deep; pass a flatter one")
    ancestors.append(node)
    for child in level[0]:
        _check_depth(child, ancestors)
    ancestors.pop()


def _path_to(node: Any, ancestors: list[Any]) -> str:
    """Return the path of a node inside its ancestors."""
    parts = []
    for parent, child in pairwise([*ancestors, node]):
        keyed, _ = tree_util.tree_flatten_with_path(parent, is_leaf=lambda value, root=parent: value is not root)
        parts.append(next(path_part(_key(keys[0])) for keys, value in keyed if value is child))
    return "/".join(parts)


class _Position(int):
    """The position of an element in a sequence."""


def _key(key: Any) -> Any:
    """Return a key of JAX as one that the core can store."""
    match key:
        case tree_util.SequenceKey():
            return _Position(key.idx)
        case tree_util.FlattenedIndexKey():  # of a class that does not name its fields
            return _Position(key.key)
        case tree_util.GetAttrKey():
            return key.name
        case tree_util.DictKey():
            return key.key if type(key.key) in _KEY_TYPES else str(key.key)
    return str(key)


def _is_empty(node: Any) -> bool:
    """Return whether a node is None or a container without elements."""
    level = tree_util.default_registry.flatten_one_level(node)
    return level is not None and not list(level[0])


def _plain(empty: Any) -> Any:
    """Return None or an empty container as the core stores it."""
    return empty if empty is None or type(empty) in (dict, list, tuple) else {}


def _nested(definition: Any, depth: int, entries: Iterator[tuple[tuple[Any, ...], Any]]) -> Any:
    """Return the keys of the first of the entries that a container takes, and the container with all of them."""
    node = definition.node_data()
    if node is None:
        return next(entries)
    children = [_nested(child, depth + 1, entries) for child in definition.children()]
    parts, values = [keys[depth] for keys, _ in children], [value for _, value in children]
    first_keys = children[0][0]
    if any(type(part) is not _Position for part in parts):
        return first_keys, {int(p) if type(p) is _Position else p: v for p, v in zip(parts, values, strict=True)}
    return first_keys, tuple(values) if node[0] is tuple else values
