"""The arrays of a snapshot with their shapes, codecs and stored sizes, from metadata alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tstore.errors import NotFound
from tstore.format.tree import Node, is_at_or_below
from tstore.snapshot import Snapshot

__all__ = ["ArrayInfo", "array_info", "contents", "listing"]


class ArrayInfo(NamedTuple):
    """The type, shape, codec and size of one array. `stored_bytes` counts the encoded bytes of its chunks."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: str
    stored_bytes: int

    @property
    def values(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per element, codec headers and the padding of edge chunks included; 0 for an empty array."""
        return 8 * self.stored_bytes / self.values if self.values else 0.0


def contents(snapshot: Snapshot, path: str = "") -> list[ArrayInfo]:
    """Return the arrays at and below a path.

    Raise `NotFound`, naming the top-level paths, if the path is neither an array nor a group.
    """
    top = path.strip("/")
    nodes = snapshot.tree.nodes
    arrays = [array_info(p, n) for p, n in nodes.items() if n.is_array and is_at_or_below(p, top)]
    if not arrays and top and top not in nodes:
        names = list(dict.fromkeys(p.partition("/")[0] for p, n in nodes.items() if n.is_array))
        shown = f"its top-level paths are: {', '.join(names[:5])}" if names else "it has no arrays"
        more = ", …" if len(names) > 5 else ""
        raise NotFound(f"{snapshot.location} has no array or group {path!r}; {shown}{more}")
    return arrays


def listing(snapshot: Snapshot, path: str = "") -> dict[str, Any]:
    """Return the version, its tags, its arrays (those of `contents`) and totals, as plain JSON values."""
    arrays = contents(snapshot, path)
    stored, values = sum(a.stored_bytes for a in arrays), sum(a.values for a in arrays)
    return {
        "version": snapshot.version,
        "tags": [tag for tag, version in snapshot.tags.items() if version == snapshot.version],
        "arrays": [{**a._asdict(), "bits_per_value": a.bits_per_value} for a in arrays],
        "total": {
            "arrays": len(arrays),
            "values": values,
            "stored_bytes": stored,
            "bits_per_value": 8 * stored / values if values else 0.0,
        },
    }


def array_info(path: str, node: Node) -> ArrayInfo:
    """Return the description of the array at a node."""
    meta = node.meta
    names = [c.get("configuration", {}).get("format", c["name"]) for c in meta.codecs]
    stored = int(node.chunks.length.sum())
    return ArrayInfo(path, meta.dtype.name, meta.shape, meta.chunks, "+".join(names), stored)
