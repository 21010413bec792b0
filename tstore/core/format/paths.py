"""The paths of nodes: checks, order, and what is above and below; pure, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tstore.core.format.arguments import checked_text, quote
from tstore.core.format.bounds import path_excess_message
from tstore.errors import InvalidArgument

__all__ = ["at_or_below", "checked_new_path", "checked_path", "depth_first_order", "is_at_or_below", "parents"]


_RESERVED = {"", ".", "..", "zarr.json"}


def checked_path(path: str) -> str:
    """Return the path of a node without outer slashes; raise `InvalidArgument` if it is not a path."""
    stripped = checked_text("path", path).strip("/")
    if not _RESERVED.isdisjoint(stripped.split("/")) or min(stripped) < " ":
        raise InvalidArgument(
            f"{path!r} is not the path of a node: expected names joined by '/', without control characters, none "
            "of them '', '.', '..' or 'zarr.json'"
        )
    return stripped


def checked_new_path(path: str) -> str:
    """Return the path of a new node as `checked_path` does; refuse a path that is too long or too deep as well."""
    checked = checked_path(path)
    if excess := path_excess_message(checked):
        raise InvalidArgument(f"the path {quote(checked)} has {excess}; choose a shorter one")
    return checked


def depth_first_order(paths: Iterable[str]) -> list[str]:
    """Return paths sorted so that each is directly followed by the paths below it, however deep."""
    return sorted(paths, key=lambda path: path.replace("/", "\0"))


def parents(path: str) -> Iterable[str]:
    """Yield the paths above a path, the nearest first, without the root."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def is_at_or_below(path: str, top: str) -> bool:
    """Return whether a path is `top` or below it; every path is below the root, ""."""
    return path == top or not top or path.startswith(top + "/")


def at_or_below(paths: Collection[str], deleted: Iterable[str]) -> list[str]:
    """Return the paths that are at or below a deleted path, in their order."""
    tops = frozenset(deleted)
    if not tops or "" in tops:
        return list(paths) if tops else []
    removed, top = set(), "/"
    for path in depth_first_order(tops.union(paths)):
        if not path.startswith(top):
            if path not in tops:
                continue
            top = path + "/"
        removed.add(path)
    return [p for p in paths if p in removed]
