"""Trees of nested containers: taken apart into a document and the arrays at their paths, and built again; pure.

`tstore.format.tree_document` has the form of a document. Paths join the keys by "/".
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from tstore.errors import InvalidArgument
from tstore.format.bounds import path_excess
from tstore.format.tree_document import DEEPEST, SCALARS, Document, paths_in, scalar_node, scalar_value

__all__ = [
    "flatten",
    "scalars_in",
    "unflatten",
    "unflatten_like",
]

_KEY_TYPES = (bool, int, float, str, bytes)
_LONGEST_SHOWN = 200  # characters of a path in an error


def flatten(tree: Any) -> tuple[Document, dict[str, Any]]:
    """Return the document of a tree, and its arrays by path in the order of the tree.

    Leaves are everything with `shape` and `dtype`; NumPy scalars become 0-d arrays. Raises `InvalidArgument`,
    naming the path, for anything else that is no container or Python scalar, and for a tree that contains itself
    or is too deep.
    """
    leaves: dict[str, Any] = {}
    around: list[Any] = []  # the containers around the node

    def add(path: str, leaf: Any) -> str:
        path = path or "value"
        while path in leaves:
            path += "%"
        if excess := path_excess(path):
            raise InvalidArgument(f"{_shown(path)}: its path has {excess}; pass a flatter tree, or shorter keys")
        leaves[path] = leaf
        return path

    def node(value: Any, path: str) -> Document:
        if value is None:
            return ["none"]
        if isinstance(value, np.generic):
            return ["scalar", add(path, np.asarray(value))]
        if isinstance(value, np.ndarray) and hasattr(value, "mask"):
            raise InvalidArgument(
                f"{_shown(path)}: a masked array would lose its mask; store its data and its mask apart"
            )
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return ["array", add(path, value)]
        if type(value) in SCALARS:
            return _scalar(value, path)
        if any(value is container for container in around):
            raise InvalidArgument(f"{_shown(path)}: the tree contains itself there; pass a tree without cycles")
        if len(around) == DEEPEST:
            raise InvalidArgument(
                f"{_shown(path)}: the tree is more than {DEEPEST} levels deep; pass a flatter one"
            )
        around.append(value)
        document = container(value, path)
        around.pop()
        return document

    def container(value: Any, path: str) -> Document:
        if isinstance(value, Mapping):
            return ["dict", [[_key(k, path), node(v, _join(path, p))] for k, v, p in _named(value)]]
        fields = _fields(value)
        if fields is not None:
            kind = "namedtuple" if isinstance(value, tuple) else "dataclass"
            return [kind, type(value).__name__, [[f, node(v, _join(path, f))] for f, v in fields]]
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [node(v, _join(path, str(i))) for i, v in enumerate(value)]]
        raise InvalidArgument(
            f"{_shown(path)}: a {type(value).__name__} can't be stored; expected arrays, Python or NumPy scalars, "
            "None, and dicts, lists, tuples and dataclasses of them"
        )

    return node(tree, ""), leaves


def _named(mapping: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Keys, values and path components; of two keys with one text (5 and "5") the later gets a mark."""
    taken: set[str] = set()
    for key, value in mapping.items():
        part = re.sub(r"[%/\x00-\x1f]", lambda m: f"%{ord(m[0]):02x}", str(key)) if key != "" else "%"
        if part in (".", "..", "zarr.json"):
            part = "%" + part
        while part in taken:
            part += "%"
        taken.add(part)
        yield key, value, part


def _join(path: str, part: str) -> str:
    return f"{path}/{part}" if path else part


def _shown(path: str) -> str:
    """A path as errors name it."""
    if not path:
        return "the tree"
    return path if len(path) <= _LONGEST_SHOWN else f"{path[:_LONGEST_SHOWN]}…"


def _key(key: Any, path: str) -> list[str]:
    if type(key) not in _KEY_TYPES:
        raise InvalidArgument(
            f"{_shown(path)}: a dict key of type {type(key).__name__} can't be stored; expected str, int, "
            "float, bool or bytes"
        )
    return _scalar(key, path)


def _scalar(value: Any, path: str) -> list[str]:
    try:
        return scalar_node(value)
    except ValueError as error:
        raise InvalidArgument(f"{_shown(path)}: a {type(value).__name__} there can't be stored: {error}") from None


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return None


_DROPPED = object()


def unflatten(document: Document, leaves: Mapping[str, Any]) -> Any:
    """The tree of a document with these leaves.

    Dataclasses and named tuples come back as dicts of their fields: a class is never loaded from a store.
    Where leaves are left out, dicts lose their keys and lists hold None in their place; Python scalars stay
    only in containers that keep a leaf, or where nothing is left out.
    """
    partial = any(path not in leaves for path in paths_in(document))

    def build(node: Document) -> Any:
        match node:
            case ["array", path]:
                return leaves.get(path, _DROPPED)
            case ["scalar", path]:
                return leaves[path][()] if path in leaves else _DROPPED
            case ["none"]:
                return _DROPPED if partial else None
            case ["dict", items]:
                found = {scalar_value(k): v for k, n in items if (v := build(n)) is not _DROPPED}
            case ["dataclass" | "namedtuple", _, items]:
                found = {f: v for f, n in items if (v := build(n)) is not _DROPPED}
            case ["list" | "tuple" as kind, items]:
                values = [build(n) for n in items]
                if partial and all(v is _DROPPED for v in values):
                    return _DROPPED
                values = [None if v is _DROPPED else v for v in values]
                return values if kind == "list" else tuple(values)
            case [name, text]:
                return _DROPPED if partial else scalar_value([name, text])
            case _:
                raise ValueError("a node is of no kind that is known")
        return _DROPPED if partial and not found else found

    built = build(document)
    return {} if built is _DROPPED else built


def unflatten_like(target: Any, leaves: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
    """The target's structure with these leaves, and Python scalars by path, in place of its own."""
    counter: dict[str, int] = {}

    def take(path: str, old: Any) -> Any:
        path = path or "value"
        while path in counter:
            path += "%"
        counter[path] = 1
        return leaves.get(path, old)

    def build(value: Any, path: str) -> Any:
        if value is None:
            return None
        if isinstance(value, np.generic):
            found = take(path, value)
            return found[()] if isinstance(found, np.ndarray) else found
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return take(path, value)
        if type(value) in SCALARS:
            return scalars.get(path, value)
        if isinstance(value, Mapping):
            built = {k: build(v, _join(path, p)) for k, v, p in _named(value)}
            return rebuilt(path, value, lambda: _like(value, built))
        fields = _fields(value)
        if fields is not None:
            made = {f: build(v, _join(path, f)) for f, v in fields}
            return rebuilt(path, value, lambda: _with_fields(value, made))
        items = [build(v, _join(path, str(i))) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)

    def rebuilt(path: str, value: Any, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # the class's own code
            raise InvalidArgument(
                f"{_shown(path)}: the target's {type(value).__name__} can't be made anew with the restored values "
                f"({type(error).__name__}: {error}); leave out target, or pass a dict there"
            ) from error

    return build(target, "")


def _with_fields(value: Any, made: dict[str, Any]) -> Any:
    """Return a copy of a namedtuple or dataclass with these fields, also those that `__init__` does not take."""
    if isinstance(value, tuple):
        return type(value)(**made)
    taken = {field.name for field in dataclasses.fields(value) if field.init}
    copied = dataclasses.replace(value, **{name: item for name, item in made.items() if name in taken})
    for name in made.keys() - taken:
        object.__setattr__(copied, name, made[name])  # the class may be frozen
    return copied


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with these items in place of its own, under the same keys."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, MutableMapping):  # its class may take other arguments, as defaultdict does
        copied = copy.copy(mapping)
        copied.update(items)
        return copied
    return type(mapping)(items)  # type: ignore[call-arg]


def scalars_in(document: Document) -> dict[str, Any]:
    """The Python scalars of a document by path."""
    found: dict[str, Any] = {}

    def walk(node: Document, path: str) -> None:
        match node:
            case ["array" | "scalar", _] | ["none"]:
                return
            case ["dict", items]:
                for _, child, part in _named({scalar_value(k): n for k, n in items}):
                    walk(child, _join(path, part))
            case ["dataclass" | "namedtuple", _, items]:
                for field, child in items:
                    walk(child, _join(path, field))
            case ["list" | "tuple", items]:
                for i, child in enumerate(items):
                    walk(child, _join(path, str(i)))
            case [name, text]:
                found[path] = scalar_value([name, text])

    walk(document, "")
    return found
