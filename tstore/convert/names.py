"""The names of a checkpoint's arrays in a flat file: the keys joined by ".", such as `layers.0.w`."""

from __future__ import annotations

from collections.abc import Iterator

from tstore.errors import InvalidArgument, bullet_list, parsing
from tstore.format.tree_document import TreeDocument, expanded, stored_document
from tstore.snapshot import Snapshot

__all__ = ["ATTRIBUTE", "file_metadata", "paths_by_name"]

ATTRIBUTE = "safetensors"
"""The attribute of the root group with the metadata of the safetensors files that were imported."""


def file_metadata(snapshot: Snapshot) -> dict[str, str] | None:
    """Return the metadata of the imported file; None if the attribute is absent or not a dict of strings."""
    stored = snapshot.attributes().get(ATTRIBUTE)
    if isinstance(stored, dict) and all(isinstance(text, str) for text in stored.values()):
        return stored
    return None


def paths_by_name(snapshot: Snapshot) -> tuple[dict[str, str], list[str]]:
    """Return the path of each array by its name in the file, and the names of the values that are not arrays."""
    document = stored_document(snapshot.reserved_attributes().get("structure"), snapshot.paths())
    if document is None:
        pairs = [(path.replace("/", "."), path) for path in snapshot.paths()]
        left_out = []
    else:
        with parsing(f"version {snapshot.version}: its structure"):
            leaves = list(_leaves(document, ()))
        pairs = [(name, path) for name, path in leaves if path is not None]
        left_out = [name for name, path in leaves if path is None]
    names: dict[str, str] = {}
    clashes = []
    for name, path in pairs:
        if name in names:
            clashes.append(f"{names[name]} and {path} would both be {name!r}")
        names.setdefault(name, path)
    if clashes:
        raise InvalidArgument(
            f"version {snapshot.version} can't be exported: joining keys by '.' gives several arrays the same "
            f"name; rename their keys and save again:{bullet_list(clashes)}"
        )
    return names, left_out


def _leaves(document: TreeDocument, keys: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each leaf of a structure document, in order, with its path, None if it is not an array."""
    match expanded(document):
        case ["array" | "scalar", path]:
            yield ".".join(keys) if keys else path, path
        case ["dict", items]:
            for (_, key), child in items:
                yield from _leaves(child, (*keys, key))
        case ["dataclass" | "namedtuple", _, items]:
            for field, child in items:
                yield from _leaves(child, (*keys, field))
        case ["list" | "tuple", items]:
            for i, child in enumerate(items):
                yield from _leaves(child, (*keys, str(i)))
        case ["none"]:
            return
        case _:
            yield ".".join(keys), None
