"""Splitting a tree into a document of its structure and its arrays by path, and the reverse, without I/O.

`tstore.core.format.tree_document` describes the document. A path is the keys joined by "/".
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from tstore.checkpoint.leaves import HostValues, PerHost, checked_fields, state_advice
from tstore.core.format.bounds import PATH_LEVELS, path_excess_message
from tstore.core.format.tree_document import (
    MAX_LEVELS,
    SCALARS,
    NumberKeys,
    TreeDocument,
    host_path,
    host_places,
    is_scalar,
    paths_in,
    per_host_node,
    per_host_path,
    scalar_node,
    scalar_value,
)
from tstore.errors import InvalidArgument

__all__ = [
    "are_names",
    "flatten",
    "join",
    "named_items",
    "path_part",
    "scalars_in",
    "unflatten",
    "unflatten_like",
    "values_in",
]

_ESCAPED = re.compile(r"[%/\x00-\x1f]")
_RESERVED = frozenset({".", "..", "zarr.json"})  # invalid names for a node
_MAX_EQUAL_TEXTS = 16  # keys of a dict with the same text: keys of different types, or several NaNs


def named_items(
    mapping: Mapping[Any, Any], error: type[ValueError] = InvalidArgument
) -> Iterator[tuple[Any, Any, str]]:
    """Yield keys, values and path components; a "%" distinguishes keys with the same text, such as 5 and "5".

    Raise `error` if too many keys have the same text.
    """
    if type(mapping) is dict and are_names(mapping):
        yield from zip(mapping, mapping.values(), mapping, strict=True)
        return
    used_parts: set[str] = set()
    for key, value in mapping.items():
        text = part = path_part(key)
        while part in used_parts:
            part += "%"
        if len(part) > len(text) + _MAX_EQUAL_TEXTS:
            raise error(f"a dict has over {_MAX_EQUAL_TEXTS} keys that are written {text:.40}; use text as keys")
        used_parts.add(part)
        yield key, value, part


def are_names(keys: Mapping[Any, Any]) -> bool:
    """Return whether `path_part` returns all keys of a mapping unchanged."""
    if set(map(type, keys)) != {str} or "" in keys or not _RESERVED.isdisjoint(keys):
        return False
    return _ESCAPED.search("".join(keys)) is None


def path_part(key: Any) -> str:
    """Return the component of a path for a key of a dict."""
    part = str(key) or "%"
    if key != "" and _ESCAPED.search(part) is not None:
        part = _ESCAPED.sub(lambda match: f"%{ord(match[0]):02x}", part)
    return f"%{part}" if part in _RESERVED else part


def join(path: str, part: str) -> str:
    """Return the path of a component below a path."""
    return f"{path}/{part}" if path else part


_KEY_TYPES = (bool, int, float, str, bytes)
_MAX_SHOWN_LENGTH = 200  # characters of a path in an error message
_MAX_PATHS = 1 << 28  # characters in the paths of all containers and Python scalars of a tree


def flatten(tree: Any, hosts: int = 1, refusal: str = "") -> tuple[TreeDocument, dict[str, Any]]:
    """Return the document of a tree that `hosts` hosts save, and its leaves by path in the order of the tree.

    A leaf is a `PerHost`, or anything with `shape` and `dtype`; a NumPy scalar becomes a 0-d array. Raise
    `InvalidArgument`, naming the path, for any other object that is not a container or Python scalar, and for a
    tree that contains itself or is too deep. `refusal` is the reason in a tree that is not to be saved.
    """
    flattening = _Flattening(hosts, refusal)
    return flattening.node(tree, ""), flattening.leaves


class _UnstoredPaths:
    """The paths of containers and Python scalars; a document implies them, but they may be far longer than it."""

    def __init__(self) -> None:
        self._characters = 0

    def excess_message(self, path: str) -> str:
        """Count a path; return the message if it, or all paths together, exceed their bounds, else ""."""
        self._characters += len(path)
        if self._characters > _MAX_PATHS:
            return f"with those of the other containers and scalars more than {_MAX_PATHS:,} characters"
        return path_excess_message(path)


class _Flattening:
    """One call of `flatten`.

    The functions that recurse over leaves are methods, because a nested function that calls itself is part of a
    reference cycle, and so keeps the arrays until Python's cycle collector frees it.
    """

    def __init__(self, hosts: int, refusal: str) -> None:
        self.leaves: dict[str, Any] = {}
        self._hosts, self._refusal = hosts, refusal
        self._ancestors: list[Any] = []  # the containers around the current node
        self._unstored = _UnstoredPaths()

    def node(self, value: Any, path: str) -> TreeDocument:
        """Return the document of a value at a path."""
        if type(value) is np.ndarray:  # the usual case
            return "array", self._add(path, value)
        if isinstance(value, np.generic):
            return "scalar", self._add(path, np.asarray(value))
        if isinstance(value, np.ndarray) and hasattr(value, "mask"):
            raise InvalidArgument(
                f"{_display(path)}: a masked array would lose its mask; save its data and its mask as two arrays"
            )
        try:
            is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        except Exception as error:  # each library raises its own exceptions
            raise InvalidArgument(
                f"{_display(path)}: a {type(value).__name__} has no shape ({str(error).splitlines()[0]})"
            ) from error
        if is_array:
            return "array", self._add(path, value)
        if isinstance(value, PerHost):
            path = self._add(path, value)
            _check_length(path, path_excess_message(host_path(path, self._hosts - 1)))
            return per_host_node(path, self._hosts)
        if isinstance(value, HostValues):
            raise value.refusal(_display(path))
        _check_length(path, self._unstored.excess_message(path))
        if value is None:
            return ("none",)
        if type(value) in SCALARS:
            return _scalar(value, path)
        if any(value is container for container in self._ancestors):
            raise InvalidArgument(f"{_display(path)}: the tree contains itself; pass a tree without cycles")
        if len(self._ancestors) == MAX_LEVELS:
            raise InvalidArgument(
                f"{_display(path)}: the tree is more than {MAX_LEVELS} levels deep; pass a flatter one"
            )
        self._ancestors.append(value)
        document = self._container(value, path)
        self._ancestors.pop()
        return document

    def _container(self, value: Any, path: str) -> TreeDocument:
        if isinstance(value, Mapping):
            keys, start = _key_nodes(value, path), f"{path}/" if path else ""
            if self._add_all(value, start):
                return "arrays", start, tuple(value)
            nodes = [self.node(item, start + part) for _, item, part in named_items(value)]
            return "dict", tuple(zip(keys, nodes, strict=True))
        fields = _fields(value, path)
        if fields is not None:
            node_type = "namedtuple" if isinstance(value, tuple) else "dataclass"
            return node_type, type(value).__name__, tuple((f, self.node(v, join(path, f))) for f, v in fields)
        if isinstance(value, (list, tuple)):
            node_type = "list" if isinstance(value, list) else "tuple"
            return node_type, tuple(self.node(v, join(path, str(i))) for i, v in enumerate(value))
        reason = self._refusal or f"can't be stored; {state_advice(value) or _advice(self._ancestors)}"
        raise InvalidArgument(f"{_display(path)}: an object of type {type(value).__name__} {reason}")

    def _add_all(self, mapping: Mapping[Any, Any], start: str) -> bool:
        """Add the leaves of a dict of arrays, and return True; or return False if it is another mapping."""
        if type(mapping) is not dict or set(map(type, mapping.values())) != {np.ndarray}:
            return False
        if not are_names(mapping) or len(start) + max(map(len, mapping)) > PATH_LEVELS:
            return False
        paths = list(map(start.__add__, mapping))
        if not self.leaves.keys().isdisjoint(paths):
            return False
        self.leaves.update(zip(paths, mapping.values(), strict=True))
        return True

    def _add(self, path: str, leaf: Any) -> str:
        path = path or "value"
        while path in self.leaves:
            path += "%"
        if len(path) > PATH_LEVELS:  # a shorter path has fewer levels
            _check_length(path, path_excess_message(path))
        self.leaves[path] = leaf
        return path


def _advice(containers: list[Any]) -> str:
    """Return advice for an object that can't be stored, the last in these containers: what to pass instead."""
    if isinstance(containers[-1], io.BytesIO):
        return "pass its getvalue(), or a uint8 array of that if it is long"
    if callable(getattr(containers[-1], "state_dict", None)):
        return "pass its state_dict(), or save the tree with tstore.torch.save, which takes modules and optimizers"
    bases = [base for container in containers for base in type(container).__mro__]
    if any(base.__module__.partition(".")[0] in ("jax", "flax", "optax") for base in bases):
        return "save the tree with tstore.jax.save, which takes any pytree"
    return "expected arrays, Python or NumPy scalars, None, and dicts, lists, tuples and dataclasses of them"


def _display(path: str) -> str:
    """Return a path, shortened if it is long, for an error message."""
    return f"{path[:_MAX_SHOWN_LENGTH]}…" if len(path) > _MAX_SHOWN_LENGTH else path or "the tree"


def _check_length(path: str, excess: str) -> None:
    """Raise `InvalidArgument` if a path exceeds its bounds, as `excess` says."""
    if excess:
        raise InvalidArgument(f"{_display(path)}: its path has {excess}; pass a flatter tree, or shorter keys")


def _key_nodes(mapping: Mapping[Any, Any], path: str) -> list[tuple[str, str]]:
    """Return the nodes of the keys of a mapping at a path."""
    if set(map(type, mapping)) == {str}:
        with contextlib.suppress(UnicodeEncodeError):  # `_key` names the key
            "".join(mapping).encode()
            return [("str", key) for key in mapping]
    return [_key(key, path) for key in mapping]


def _key(key: Any, path: str) -> tuple[str, str]:
    if type(key) not in _KEY_TYPES:
        raise InvalidArgument(
            f"{_display(path)}: a dict key of type {type(key).__name__} can't be stored; expected str, int, "
            "float, bool or bytes"
        )
    return _scalar(key, path)


def _scalar(value: Any, path: str) -> tuple[str, str]:
    try:
        return scalar_node(value)
    except ValueError as error:
        raise InvalidArgument(
            f"{_display(path)}: a value of type {type(value).__name__} can't be stored: {error}"
        ) from None


def _fields(value: Any, path: str) -> list[tuple[str, Any]] | None:
    """Return the fields of a dataclass or namedtuple with their names; None for other objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return checked_fields(value, _display(path))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return None


_LEFT_OUT = object()
"""The marker that `_built` returns for an omitted part of the tree."""


def unflatten(
    document: TreeDocument,
    leaves: Mapping[str, Any],
    is_part: bool = False,
    selects: Callable[[str], bool] | None = None,
) -> Any:
    """Return the tree of a document, or of a part of one, with these leaves.

    Dataclasses and named tuples become dicts of their fields, because no class is ever loaded from a store.
    Python scalars, None and empty containers stay if `selects` returns True for their paths; by default they stay
    if no leaf is left out. In lists, None stands in for what is left out.
    """
    paths = paths_in(document)
    places = host_places(paths)
    partial = is_part or selects is not None or not leaves.keys() >= {places.get(path, path) for path in paths}
    chosen = map(selects, dict(values_in(document))) if selects else itertools.repeat(not partial)
    tree = _built(document, leaves, partial, chosen, NumberKeys())
    return {} if tree is _LEFT_OUT else tree


def _built(
    node: TreeDocument, leaves: Mapping[str, Any], partial: bool, chosen: Iterator[bool], keys: NumberKeys
) -> Any:
    """Return the tree of a node: `partial` if leaves are left out, with the `chosen` ones of `values_in`."""
    if node[0] != "array" and (path := per_host_path(node)) is not None:
        return leaves.get(path, _LEFT_OUT)
    match node:
        case ["array", path]:
            return leaves.get(path, _LEFT_OUT)
        case ["arrays", start, names]:
            built = {key: leaves[path] for key in names if (path := start + key) in leaves}
        case ["scalar", path]:
            return leaves[path][()] if path in leaves else _LEFT_OUT
        case ["none"]:
            return None if next(chosen, False) else _LEFT_OUT
        case [str(node_type), *_, []]:
            return {"list": [], "tuple": ()}.get(node_type, {}) if next(chosen, False) else _LEFT_OUT
        case ["dict", items]:
            built = {}
            for key, item in items:
                if (value := _built(item, leaves, partial, chosen, keys)) is not _LEFT_OUT:
                    keys.insert(built, scalar_value(key), value)
        case ["dataclass" | "namedtuple", _, items]:
            built = {f: v for f, n in items if (v := _built(n, leaves, partial, chosen, keys)) is not _LEFT_OUT}
        case ["list" | "tuple" as node_type, items]:
            values = [_built(n, leaves, partial, chosen, keys) for n in items]
            if partial and all(v is _LEFT_OUT for v in values):
                return _LEFT_OUT
            return (list if node_type == "list" else tuple)(None if v is _LEFT_OUT else v for v in values)
        case [name, text]:  # a Python scalar; the default is for a forged dict that has a key twice
            return scalar_value([name, text]) if next(chosen, False) else _LEFT_OUT
        case _:
            raise ValueError("a node has an unknown type")
    return _LEFT_OUT if partial and not built else built


def unflatten_like(target: Any, leaves: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
    """Return the target's structure with these leaves and Python scalars, by path, in place of its own."""
    return _Unflattening(leaves, scalars).built(target, "")


class _Unflattening:
    """One call of `unflatten_like`."""

    def __init__(self, leaves: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        self._leaves = leaves
        self._scalars = scalars
        self._used_paths: set[str] = set()

    def built(self, value: Any, path: str) -> Any:
        """Return a value of the target at a path, with the leaves and scalars in it."""
        if value is None:
            return None
        if isinstance(value, PerHost):
            return self._leaf(path, value)
        if isinstance(value, np.generic):
            leaf = self._leaf(path, value)
            return leaf[()] if isinstance(leaf, np.ndarray) else leaf
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return self._leaf(path, value)
        if type(value) in SCALARS:
            return self._scalars.get(path, value)
        if isinstance(value, Mapping):
            items = {k: self.built(v, join(path, p)) for k, v, p in named_items(value)}
            return _rebuilt(path, value, lambda: _mapping_like(value, items))
        fields = _fields(value, path)
        if fields is not None:
            new_fields = {f: self.built(v, join(path, f)) for f, v in fields}
            return _rebuilt(path, value, lambda: _with_fields(value, new_fields))
        values = [self.built(v, join(path, str(i))) for i, v in enumerate(value)]
        return values if isinstance(value, list) else tuple(values)

    def _leaf(self, path: str, old: Any) -> Any:
        """Return the restored leaf at a path, made unique as `flatten` does, or the old leaf if there is none."""
        path = path or "value"
        while path in self._used_paths:
            path += "%"
        self._used_paths.add(path)
        return self._leaves.get(path, old)


def _rebuilt(path: str, value: Any, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # code of the class may raise anything
        raise InvalidArgument(
            f"{_display(path)}: the target's {type(value).__name__} can't be copied with the restored values "
            f"({type(error).__name__}: {error}); leave out target, or pass a dict there"
        ) from error


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of a namedtuple or dataclass with these fields, even those that `__init__` does not take."""
    if isinstance(value, tuple):
        return type(value)(**fields)
    arguments = {field.name for field in dataclasses.fields(value) if field.init}
    copied = dataclasses.replace(value, **{name: item for name, item in fields.items() if name in arguments})
    for name in fields.keys() - arguments:
        object.__setattr__(copied, name, fields[name])  # the class may be frozen
    return copied


def _mapping_like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with these items, which have the same keys."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, MutableMapping) and (isinstance(mapping, dict) or hasattr(type(mapping), "__copy__")):
        copied = copy.copy(mapping)  # because the constructor may take other arguments, like defaultdict's
        for key, item in items.items():  # `update` would add to the values of a Counter
            copied[key] = item
        return copied
    return type(mapping)(items)  # type: ignore[call-arg]


def scalars_in(document: TreeDocument) -> dict[str, Any]:
    """Return the Python scalars of a document by path; raise `ValueError` for paths that are too long."""
    return {path: scalar_value(node) for path, node in values_in(document) if is_scalar(node)}


def values_in(document: TreeDocument) -> list[tuple[str, TreeDocument]]:
    """Return the nodes of Python scalars, None and empty containers by path, in order."""
    values: list[tuple[str, TreeDocument]] = []
    unstored, keys = _UnstoredPaths(), NumberKeys()

    def walk(node: TreeDocument, path: str) -> None:
        if node[0] in ("array", "scalar", "arrays"):
            return
        if excess := unstored.excess_message(path):
            raise ValueError(f"the path of a container or scalar has {excess}")
        match node:
            case ["none"] | [*_, []] | [_, str()]:
                values.append((path, node))
            case ["dict", items] if any(child[0] != "array" for _, child in items):
                children: dict[Any, TreeDocument] = {}
                for key, child in items:
                    keys.insert(children, scalar_value(key), child)
                for _, child, part in named_items(children, ValueError):
                    walk(child, join(path, part))
            case ["dataclass" | "namedtuple", _, items]:
                for field, child in items:
                    walk(child, join(path, field))
            case ["list" | "tuple", items]:
                for i, child in enumerate(items):
                    walk(child, join(path, str(i)))

    walk(document, "")
    return values
