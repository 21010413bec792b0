"""What a snapshot holds, one line for each array; metadata only, no chunk is read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tstore.errors import NotFound
from tstore.format.tree import Node, is_below
from tstore.snapshot import Snapshot

__all__ = ["ArrayInfo", "array_info", "contents", "listing"]


class ArrayInfo(NamedTuple):
    """One array: what it is and what it costs. `stored` counts the encoded bytes of its chunks."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: str
    stored: int

    @property
    def values(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, those of codec headers and of filled-up edge chunks included; 0 for none."""
        return 8 * self.stored / self.values if self.values else 0.0


def contents(snapshot: Snapshot, path: str = "") -> list[ArrayInfo]:
    """The arrays at and below a path, in the order in which they were saved.

    Raises `NotFound`, which names what there is, where neither an array nor a group stands at the path.
    """
    top = path.strip("/")
    nodes = snapshot.tree.nodes
    found = [array_info(p, n) for p, n in nodes.items() if n.is_array and is_below(p, top)]
    if not found and top and top not in nodes:
        names = list(dict.fromkeys(p.partition("/")[0] for p, n in nodes.items() if n.is_array))
        shown = f"at its top are: {', '.join(names[:5])}" if names else "it holds no arrays"
        more = ", …" if len(names) > 5 else ""
        raise NotFound(f"version {snapshot.version} has nothing at {path!r}; {shown}{more}")
    return found


def listing(snapshot: Snapshot, path: str = "") -> dict[str, Any]:
    """The version and `contents` as plain values, with totals; `NotFound`."""
    arrays = contents(snapshot, path)
    stored, values = sum(a.stored for a in arrays), sum(a.values for a in arrays)
    return {
        "version": snapshot.version,
        "tags": [tag for tag, version in snapshot.tags.items() if version == snapshot.version],
        "arrays": [
            {
                "path": a.path,
                "dtype": a.dtype,
                "shape": a.shape,
                "chunks": a.chunks,
                "codec": a.codec,
                "stored_bytes": a.stored,
                "bits_per_value": a.bits_per_value,
            }
            for a in arrays
        ],
        "total": {
            "arrays": len(arrays),
            "values": values,
            "stored_bytes": stored,
            "bits_per_value": 8 * stored / values if values else 0.0,
        },
    }


def array_info(path: str, node: Node) -> ArrayInfo:
    """What the array of a node is and what it costs."""
    meta = node.meta
    names = [c.get("configuration", {}).get("format", c["name"]) for c in meta.codecs]
    stored = int(node.chunks.length.sum())
    return ArrayInfo(path, meta.dtype.name, meta.shape, meta.chunks, "+".join(names), stored)
