"""Pytrees as leaves with paths, and as the nested dicts and lists that the core saves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from jax import tree_util

from tstore.checkpoint.structure import path_part
from tstore.errors import InvalidArgument
from tstore.format.tree_document import MAX_LEVELS

__all__ = ["Pytree"]

_KEY_TYPES = (bool, int, float, str, bytes)


class Pytree:
    """A pytree taken apart: `leaves` has its leaves by path.

    A path is made of the keys that JAX gives: those of dicts, the positions in sequences, and the names of fields.
    So a tree of arrays, its abstract tree, and a dict with the names of its fields have the same paths.
    """

    def __init__(self, tree: Any) -> None:
        try:
            _check_depth(tree, [])
            keyed, self._definition = tree_util.tree_flatten_with_path(tree)
        except InvalidArgument:
            raise
        except Exception as error:  # JAX and the code of registered classes may raise anything
            reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")
            raise InvalidArgument(
                f"JAX can't flatten the tree: {reason}; pass a pytree without cycles, with dict keys that can be "
                "sorted"
            ) from error
        self._keys = [tuple(map(_key, keys)) for keys, _ in keyed]
        paths = ["/".join(map(path_part, keys)) or "value" for keys in self._keys]
        self.leaves: dict[str, Any] = {}
        for path, (_, leaf) in zip(paths, keyed, strict=True):
            if path in self.leaves:
                raise InvalidArgument(f"{path}: two leaves have this path; rename the keys of one of them")
            self.leaves[path] = leaf

    def nested(self, values: Mapping[str, Any]) -> Any:
        """Return nested dicts and lists with these values, by path, in place of the leaves.

        In a list, None stands for an element without leaves.
        """
        root = _Node()
        for keys, path in zip(self._keys, self.leaves, strict=True):
            if not keys:
                return values[path]
            node = root
            for key in keys[:-1]:
                node = node.setdefault(key, _Node())
            node[keys[-1]] = values[path]
        return _plain(root)

    def with_leaves(self, values: Mapping[str, Any]) -> Any:
        """Return a pytree of the same types with these values, by path, in place of the leaves."""
        return tree_util.tree_unflatten(self._definition, [values[path] for path in self.leaves])


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


class _Node(dict[Any, Any]):
    """A container, with its elements by key."""


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


def _plain(node: Any) -> Any:
    """Return a container as a dict, or as a list if its keys are positions; return any other node unchanged."""
    if type(node) is not _Node:
        return node
    if node and all(type(key) is _Position for key in node):
        return [_plain(node.get(position)) for position in range(max(node) + 1)]
    return {int(key) if type(key) is _Position else key: _plain(value) for key, value in node.items()}
