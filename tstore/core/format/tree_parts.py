"""Parts of the structure of a saved tree, cut out of its JSON without decoding the rest; pure, no I/O.

The structure of 100,000 arrays takes megabytes, but each path in it is a string, or begins with one. So a search
for the first names of a path tells which nodes may have it, and only these are decoded. The search may miss arrays
if another program wrote the JSON: compare the paths of a part with those of the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tstore.core.format.patterns import Extent
from tstore.core.format.tree_document import TreeDocument, is_document, per_host_path

__all__ = ["LARGEST_SHARE", "part_of"]

LARGEST_SHARE = 0.5
"""The maximum share of a structure to cut out."""

_WITH_PATHS = b'["array', b'["scalar"'
"""Every node with paths contains one of these."""

_STRING_KEY = b'[["str",'
_ABSENT = ["arrays", "", []]
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


def part_of(structure: bytes, extent: Extent) -> TreeDocument | None:
    """Return the part of a structure that has the arrays in an extent, and the scalars next to them.

    An empty dict replaces other nodes. Return None if that is most of the structure, or has all arrays, if it is
    not valid, or if it can't be cut out because strings have escapes, or because a dict has keys that are not
    strings, since the paths of its scalars depend on all of these.
    """
    if b"\\" in structure:
        return None
    starts = [text.split("/") for text in (*extent.paths, *extent.starts)]
    cutting = _Cutting(extent, starts)
    try:
        part = cutting.part(structure, 1)
    except (msgspec.DecodeError, RecursionError, _NotCut):
        return None
    is_short = len(msgspec.json.encode(part)) < LARGEST_SHARE * len(structure)
    return part if is_short and cutting.leaves_out and is_document(part) else None


class _NotCut(Exception):
    """Raised if the paths in a part of a node depend on the rest of the node."""


class _Cutting:
    """One call of `part_of`."""

    def __init__(self, extent: Extent, starts: Sequence[Sequence[str]]) -> None:
        self._extent = extent
        self._starts = starts
        self.leaves_out = False
        """Whether arrays have been left out."""

    def part(self, data: bytes, level: int) -> Any:
        """Return the part of a node; the paths of its items have `level` names."""
        raws = list(map(bytes, _RAWS.decode(data)))
        node = [msgspec.json.decode(raw) for raw in raws[:-1]]
        match node:
            case ["array" | "scalar"]:
                path = msgspec.json.decode(raws[-1], type=str)
                return [*node, path] if self._has(path) else _ABSENT
            case ["arrays", str(start)]:
                keys = msgspec.json.decode(raws[-1], type=list[str])
                chosen = [key for key in keys if self._has(start + key)]
                if chosen and per_host_path([*node, chosen]):
                    chosen = keys  # all, because their number is the number of hosts
                return [*node, chosen] if chosen else _ABSENT
            case ["list" | "tuple"]:
                items = self._items(raws[-1], level)
                return [*node, [self.part(item, level + 1) if chosen else _ABSENT for item, chosen in items]]
            case ["dict"] | ["dataclass" | "namedtuple", _]:
                pairs = list(self._items(raws[-1], level))
                if len(node) == 1 and not all(pair.startswith(_STRING_KEY) for pair, _ in pairs):
                    raise _NotCut
                return [*node, [self._pair(pair, level) for pair, chosen in pairs if chosen]]
        return msgspec.json.decode(data)

    def _has(self, path: str) -> bool:
        is_in_extent = path in self._extent
        self.leaves_out = self.leaves_out or not is_in_extent
        return is_in_extent

    def _pair(self, data: bytes, level: int) -> list[Any]:
        """Return a key, or the name of a field, and the part of its node."""
        key, node = msgspec.json.decode(data, type=tuple[msgspec.Raw, msgspec.Raw])
        return [msgspec.json.decode(key), self.part(bytes(node), level + 1)]

    def _items(self, data: bytes, level: int) -> Iterator[tuple[bytes, bool]]:
        """Yield each item of a list, and whether it may have an array in the extent, or has no arrays at all."""
        names = ["/".join(start[:level]) + "/" * (len(start) > level) for start in self._starts]
        wanted = [msgspec.json.encode(name)[:-1] for name in dict.fromkeys(names)]
        first, others = (wanted[0], wanted[1:]) if wanted else (b"\n", [])
        array, scalar = _WITH_PATHS
        for item in map(bytes, _RAWS.decode(data)):
            chosen = first in item or (array not in item and scalar not in item)
            chosen = chosen or any(name in item for name in others)
            self.leaves_out = self.leaves_out or not chosen
            yield item, chosen
