"""The components of paths for the keys of containers; pure, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tstore.errors import InvalidArgument

__all__ = ["are_names", "join", "named_items", "path_part"]

_ESCAPED = re.compile(r"[%/\x00-\x1f]")
_RESERVED = frozenset({".", "..", "zarr.json"})  # names that no node can have
_MAX_EQUAL_TEXTS = 16  # keys of a dict with the same text: some of other types, or NaNs, of which no two are equal


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
    """Return whether `path_part` returns all keys of a mapping as they are."""
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
