"""The names of a checkpoint's arrays in a flat file: the keys joined by ".", such as `layers.0.w`."""

from __future__ import annotations

from collections.abc import Iterator

from tstore.checkpoint.structure import path_part
from tstore.core.format.arguments import quote
from tstore.core.format.paths import is_at_or_below, parents
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.format.tree_document import TreeDocument, expanded, is_document, paths_in
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument, bullet_list, name_list, parsing

__all__ = ["ATTRIBUTE", "attributes_in", "below", "file_metadata", "paths_by_name", "subtree_of", "values_beside"]

ATTRIBUTE = "safetensors"
"""The attribute of the root group with the metadata of the safetensors files that were imported."""


def file_metadata(snapshot: Snapshot) -> dict[str, str] | None:
    """Return the metadata of the imported file; None if the attribute is absent or not a dict of strings."""
    stored = snapshot.attributes().get(ATTRIBUTE)
    if isinstance(stored, dict) and all(isinstance(text, str) for text in stored.values()):
        return stored
    return None


def subtree_of(snapshot: Snapshot, subtree: str) -> tuple[TreeDocument | None, list[str]]:
    """Return the structure of the part of a checkpoint at a path, "" for all, and the paths of its arrays.

    The structure may have arrays that the snapshot lacks, and is None if it lacks some of the snapshot's. Raise
    `InvalidArgument` if no array is at or below the path.
    """
    every = snapshot.paths()
    paths = [path for path in every if is_at_or_below(path, subtree)]
    if subtree and not paths:
        groups = sorted({path.partition("/")[0] for path in every})
        raise InvalidArgument(
            f"{snapshot.location} has no array at or below {quote(subtree)}; pass the path of a group, with its "
            f"keys joined by '/'; {name_list('outermost names', groups)}"
        )
    document = _document_of(snapshot, subtree)
    saved = [] if document is None else paths_in(document)
    has_all = len(set(saved)) == len(saved) and set(saved).issuperset(paths)
    return document if has_all else None, paths


def _document_of(snapshot: Snapshot, subtree: str) -> TreeDocument | None:
    """Return the structure at a path of the tree that was saved, which may lack arrays that were created since."""
    document = snapshot.reserved_attributes().get("structure")
    if not is_document(document):
        return None
    for part in subtree.split("/") if subtree else ():
        if document is None:
            break
        document = next((child for key, child in _children(document) if path_part(key) == part), None)
    return document


def below(path: str, subtree: str) -> str:
    """Return a path at or below a subtree relative to it."""
    return path[len(subtree) :].removeprefix("/") if subtree else path


def values_beside(snapshot: Snapshot, subtree: str, separator: str = "/") -> list[str]:
    """Return the keys, joined from a subtree on, of the values in it that are not arrays, and empty containers."""
    document = _document_of(snapshot, subtree)
    with parsing(f"version {snapshot.version}: its structure"):
        leaves = [] if document is None else list(_leaves(document, ()))
    return [separator.join(keys) for keys, path in leaves if keys and path is None]


def attributes_in(snapshot: Snapshot, subtree: str) -> list[str]:
    """Return a phrase for each group and array at or below a path with attributes, and for each empty group."""
    nodes = {path: node for path, node in snapshot.tree.nodes.items() if is_at_or_below(path, subtree)}
    own = {RESERVED_ATTRIBUTE, ATTRIBUTE}
    above = {"", *(group for path in nodes for group in parents(path))}
    phrases = {path: f"empty group {path}" for path in nodes if path not in above and not nodes[path].is_array}
    phrases |= {
        path: f"attributes of {path or 'the root'}" for path in nodes if snapshot.attributes(path).keys() - own
    }
    return [phrases[path] for path in sorted(phrases)]


def paths_by_name(snapshot: Snapshot, subtree: str = "", strip: str = "") -> tuple[dict[str, str], list[str]]:
    """Return the path of each array by its name in the file, and what the file can't hold.

    Names begin below `subtree`, and without `strip`. Raise `InvalidArgument` if no name begins with `strip`, or
    two arrays have the same name.
    """
    document, paths = subtree_of(snapshot, subtree)
    if document is None:
        pairs = [((below(path, subtree) or _last(path)).replace("/", "."), path) for path in paths]
    else:
        with parsing(f"version {snapshot.version}: its structure"):
            leaves = list(_leaves(document, ()))
        known = set(paths)
        pairs = [(".".join(keys or (_last(path),)), path) for keys, path in leaves if path in known]
    if strip and not any(name.startswith(strip) for name, _ in pairs):
        raise InvalidArgument(
            f"{snapshot.location}: no name begins with {quote(strip)}, which was to be stripped; "
            f"{name_list('names', [name for name, _ in pairs])}"
        )
    names: dict[str, str] = {}
    clashes = []
    for full, path in pairs:
        name = full.removeprefix(strip) or full
        if name in names:
            clashes.append(f"{names[name]} and {path} would both be {name!r}")
        names.setdefault(name, path)
    if clashes:
        raise InvalidArgument(
            f"version {snapshot.version} can't be exported: joining keys by '.' gives several arrays the same "
            f"name; rename their keys and save again:{bullet_list(clashes)}"
        )
    return names, values_beside(snapshot, subtree, ".") + attributes_in(snapshot, subtree)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _leaves(document: TreeDocument, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield the keys of each leaf of a structure document, in order, with its path; None for other than arrays."""
    node = expanded(document)
    if node[0] in ("array", "scalar"):
        yield keys, node[1]
    elif node[0] in _CONTAINERS and node[-1]:
        for key, child in _children(node):
            yield from _leaves(child, (*keys, key))
    else:
        yield keys, None


_CONTAINERS = ("dict", "dataclass", "namedtuple", "list", "tuple")


def _children(document: TreeDocument) -> Iterator[tuple[str, TreeDocument]]:
    """Yield the members of a container with the text of their keys; none for a leaf."""
    match expanded(document):
        case ["dict", items]:
            yield from ((key, child) for (_, key), child in items)
        case ["dataclass" | "namedtuple", _, items]:
            yield from items
        case ["list" | "tuple", items]:
            yield from ((str(i), child) for i, child in enumerate(items))
