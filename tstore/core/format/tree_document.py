"""The structure of a saved tree: its containers and scalars as JSON, with the paths of its arrays; pure, no I/O.

    ["dict", [[key, node], …]]                        ["list", [node, …]]    ["tuple", [node, …]]
    ["dataclass", name, [[field, node], …]]           ["namedtuple", name, [[field, node], …]]
    ["array", path]    ["scalar", path]    ["none"]   ["int", "5"] and so on for Python scalars
    ["arrays", start, [key, …]]

"arrays" is a dict of arrays with strings as keys, each at the path that begins with `start` and ends with its key.
Large checkpoints have little else, and it is short and fast to read. A "scalar" is a NumPy scalar, stored as a 0-d
array. A key is a Python scalar's node, so that 5 and "5" differ.

A `tstore.PerHost` value is a dict with an array of bytes for each host: the array of
host 3 is at "…/%host=3". No key gives such a path, because a "%" in a key becomes "%25".

`NumberKeys` bounds the time that keys chosen by others may take. Python hashes text and bytes with a secret, but
numbers without one. So a file can contain distinct small numbers that collide, and each insertion then probes
most earlier ones: 100,000 take a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tstore.core.format.bounds import ROOT_BYTES
from tstore.core.format.paths import parents

__all__ = [
    "IMPL",
    "MAX_LEVELS",
    "SCALARS",
    "NumberKeys",
    "TreeDocument",
    "expanded",
    "host_path",
    "host_places",
    "is_document",
    "is_scalar",
    "nested_document",
    "paths_in",
    "per_host_node",
    "per_host_path",
    "scalar_node",
    "scalar_value",
    "stored_document",
    "value_path",
]

TreeDocument = Sequence[Any]
"""A node: lists if it was decoded, else tuples, which Python's cycle collector need not track."""

MAX_LEVELS = 200
"""The maximum nesting of containers in a tree; Python's recursion limit allows about 300."""

SCALARS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bool: (str, lambda text: text == "True"),
    int: (str, int),
    float: (float.hex, float.fromhex),
    complex: (
        lambda c: f"{c.real.hex()} {c.imag.hex()}",
        lambda text: complex(*(float.fromhex(part) for part in text.split())),
    ),
    str: (str, str),
    bytes: (bytes.hex, bytes.fromhex),
}
"""For each type of Python scalar: a function from value to text, and its inverse; `["int", "3"]` is a node."""

_NAMES = {t.__name__: t for t in SCALARS}
_HOST = "%host="

IMPL = "impl="
"""Typed PRNG keys of JAX are stored as a dict: their data, at this key with the name of their implementation."""


def is_scalar(node: TreeDocument) -> bool:
    """Return whether a node other than that of an array is a Python scalar, not None or a container."""
    return len(node) == 2 and isinstance(node[1], str)


def scalar_node(value: Any) -> tuple[str, str]:
    """Return the node of a Python scalar; raise `ValueError` if its text cannot be stored."""
    text = SCALARS[type(value)][0](value)
    text.encode()
    return type(value).__name__, text


def scalar_value(node: Sequence[str]) -> Any:
    """Return the Python scalar of a node that `is_document` accepts."""
    return SCALARS[_NAMES[node[0]]][1](node[1])


def stored_document(stored: Any, paths: Sequence[str]) -> TreeDocument | None:
    """Return a stored value if it is a document with exactly these paths, otherwise None.

    Other programs may have written the value, or added and deleted arrays since the tree was saved.
    """
    if not is_document(stored) or sorted(paths_in(stored)) != sorted(paths):
        return None
    document: TreeDocument = stored
    return document


def is_document(stored: Any) -> bool:
    """Return whether a stored value is a valid document, with no more paths than a root can have."""
    return _is_node(stored, 0) and _repeated_characters(stored) <= ROOT_BYTES


def _is_node(node: Any, level: int) -> bool:
    if _is_pair(node) and node[0] == "array":  # the usual case
        return isinstance(node[1], str)
    match node:
        case ["scalar", str()] | ["none"]:
            return True
        case [_, [*_]] | [_, _, [*_]] if level == MAX_LEVELS:
            return False
        case ["arrays", str(), [*keys]]:
            return set(map(type, keys)) <= {str} and len(set(keys)) == len(keys)
        case ["dict", [*items]]:
            return all(_is_pair(i) and _is_python_scalar(i[0]) and _is_node(i[1], level + 1) for i in items)
        case ["list" | "tuple", [*items]]:
            return all(_is_node(i, level + 1) for i in items)
        case ["dataclass" | "namedtuple", str(), [*items]]:
            return all(_is_pair(i) and isinstance(i[0], str) and _is_node(i[1], level + 1) for i in items)
    return _is_python_scalar(node)


def _repeated_characters(node: TreeDocument) -> int:
    """Return the total length of the path starts in "arrays" nodes, which even a short document can make long."""
    match node:
        case ["arrays", start, keys]:
            return len(start) * len(keys)
        case ["list" | "tuple", items]:
            return sum(map(_repeated_characters, items))
        case ["dict" | "dataclass" | "namedtuple", *_, items]:
            return sum(_repeated_characters(item) for _, item in items if item[0] != "array")
    return 0


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2


def _is_python_scalar(node: Any) -> bool:
    if _is_pair(node) and node[0] == "str":  # the usual case
        return isinstance(node[1], str)
    match node:
        case [str(name), str(text)] if name in _NAMES:
            try:
                scalar_value([name, text])
            except (ValueError, TypeError, OverflowError):
                return False
            return True
    return False


def expanded(node: TreeDocument) -> TreeDocument:
    """Return the equal "dict" node if this is an "arrays" node, otherwise the node itself."""
    if node[0] != "arrays":
        return node
    _, start, keys = node
    return "dict", tuple((("str", key), ("array", start + key)) for key in keys)


def nested_document(nodes: Mapping[str, TreeDocument]) -> TreeDocument:
    """Return a document of nested dicts with a node at each path.

    No path may be below another one.
    """
    root: dict[str, Any] = {}
    for path, node in nodes.items():
        *parents, name = path.split("/")
        group = root
        for parent in parents:
            group = group.setdefault(parent, {})
        group[name] = node

    def document(group: Any) -> TreeDocument:
        if isinstance(group, dict):
            return "dict", tuple((("str", name), document(node)) for name, node in group.items())
        node: TreeDocument = group
        return node

    return document(root)


def host_path(path: str, host: int | str) -> str:
    """Return the path of a host's bytes in a `PerHost` value."""
    return f"{path}/{_HOST}{host}"


def value_path(path: str) -> str:
    """Return the path of the value whose bytes are at a path; return the path of another array unchanged."""
    above, _, name = path.rpartition("/")
    return above if above and name.startswith(_HOST) else path


def host_places(paths: Iterable[str]) -> dict[str, str]:
    """Return the path of the `PerHost` value for each path with the bytes of a host.

    A group that also has other arrays, which only a transaction can create, is not such a value.
    """
    paths = list(paths)
    places = {path: place for path in paths if _HOST in path and (place := value_path(path)) != path}
    mixed = {above for path in paths if path not in places for above in parents(path)} if places else ()
    return {path: place for path, place in places.items() if place not in mixed}


def per_host_node(path: str, hosts: int) -> TreeDocument:
    """Return the node of a `PerHost` value of `hosts` hosts."""
    return "arrays", f"{path}/", tuple(f"{_HOST}{host}" for host in range(hosts))


def per_host_path(node: TreeDocument) -> str | None:
    """Return the path of a `PerHost` value, or None for any other node."""
    match node:
        case ["arrays", start, [name, *_] as names] if name.startswith(_HOST):
            paths = list(map(start.__add__, names))
        case ["dict", [[_, ["array", path]], *_] as items] if _HOST in path:
            paths = [child[1] for _, child in items if child[0] == "array"]
        case _:
            return None
    values, is_whole = set(map(value_path, paths)), len(paths) == len(node[-1])
    return values.pop() if is_whole and len(values) == 1 and paths[0] not in values else None


def paths_in(document: TreeDocument) -> list[str]:
    """Return the paths of all arrays in a document, in its order."""
    paths: list[str] = []
    _add_paths(document, paths)
    return paths


def _add_paths(node: TreeDocument, paths: list[str]) -> None:
    kind = node[0]
    if kind in ("array", "scalar"):
        paths.append(node[1])
    elif kind == "arrays":
        paths.extend(map(node[1].__add__, node[2]))
    elif kind in ("list", "tuple"):
        for item in node[1]:
            _add_paths(item, paths)
    elif kind in ("dict", "dataclass", "namedtuple"):
        for _, item in node[-1]:
            if item[0] == "array":  # the usual case
                paths.append(item[1])
            else:
                _add_paths(item, paths)


_MAX_SECONDS = 5.0  # CPU seconds; a million ordinary numbers take less than one


class NumberKeys:
    """Inserts the keys of all dicts of one file, until those that are not text have taken too long."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def insert(self, target: dict[Any, Any], key: Any, value: Any) -> None:
        """Do `target[key] = value`; raise `ValueError` if all such calls have taken more than 5 s of CPU."""
        if isinstance(key, (str, bytes)):
            target[key] = value
            return
        start = time.thread_time()
        target[key] = value
        self._seconds += time.thread_time() - start
        if self._seconds > _MAX_SECONDS:
            raise ValueError("numbers as keys of dicts collide")
