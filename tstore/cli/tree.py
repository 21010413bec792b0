"""The result of `tstore show` as a tree: groups with their totals, and below them the arrays and Python scalars.

Without `--depth` as many levels are shown as fit into `_MAX_ROWS` rows; deeper groups are summarized.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from tstore.cli.console import Document
from tstore.cli.text import Column, Table, abbreviate, escape, format_shape, format_size, pluralize, print_rows

__all__ = ["show_tree"]

_MAX_ROWS = 100
_MAX_VALUE = 40  # characters of a Python scalar

_DIGITS, _SLASH = re.compile(r"([0-9]+)"), re.compile("/")


class _Node(NamedTuple):
    """A row of the tree: a group with all leaves below it, or one leaf (an array or a Python scalar).

    The uppermost rows have level 1.
    """

    name: str
    level: int
    is_group: bool
    leaves: list[Document]


def show_tree(document: Document) -> None:
    """Print the groups, arrays and scalars of a version, and the totals."""
    leaves = sorted([*document["arrays"], *document["scalars"]], key=lambda leaf: _natural_sort_key(leaf["path"]))
    nodes, depth, limit = _nodes(leaves), document["depth"], None
    if depth is None:
        depth, limit = _fitting_depth(nodes), _MAX_ROWS
    rows = [node for node in nodes if node.level <= depth]
    print_rows(_TABLE, rows[:limit])
    if limit is not None and len(rows) > limit:
        print(f"({len(rows) - limit:,} more rows; pass a PATH, a pattern, or --depth 1 for all of them)")
    elif len(rows) < len(nodes):
        print(f"(groups of level {depth} are summarized; pass a PATH, a pattern, or --depth {depth + 1} for more)")
    total, tags = document["total"], f" ({', '.join(document['tags'])})" if document["tags"] else ""
    sizes = f"{format_size(total['value_bytes'])} of values, {format_size(total['stored_bytes'])} stored"
    if total["shared_bytes"]:
        sizes += f", {format_size(total['shared_bytes'])} of it shared with earlier versions"
    print(escape(f"version {document['version']}{tags}: {pluralize(total['arrays'], 'array')}, {sizes}"))


def _natural_sort_key(path: str) -> list[list[str | int]]:
    """Return a sort key that puts "layers/2" before "layers/10"."""
    return [[int(p) if i % 2 else p for i, p in enumerate(_DIGITS.split(part))] for part in path.split("/")]


def _nodes(leaves: Sequence[Document]) -> list[_Node]:
    """Return all groups and leaves in the order of the rows, from sorted leaves.

    A group has no row if it contains nothing but another group, or a single leaf.
    """
    groups: dict[str, list[Document]] = {}  # by path with a slash at its end
    for leaf in leaves:
        for group in _groups_above(leaf["path"]):
            groups.setdefault(group, []).append(leaf)
    hidden: set[str] = set()  # groups that contain nothing but another group
    for group, below in groups.items():
        hidden.update(outer for outer in _groups_above(group[:-1])[-1:] if len(groups[outer]) == len(below))
    nodes: dict[str, _Node] = {}
    for leaf in leaves:
        above = [g for g in _groups_above(leaf["path"]) if g not in hidden and len(groups[g]) > 1]
        for level, (parent, path) in enumerate(itertools.pairwise(["", *above, leaf["path"]]), 1):
            if path not in nodes:
                name = "  " * (level - 1) + path.removeprefix(parent)
                is_group = level <= len(above)
                nodes[path] = _Node(name, level, is_group, groups[path] if is_group else [leaf])
    return list(nodes.values())


def _groups_above(path: str) -> list[str]:
    """Return the groups that contain a path, the outermost first, each with a slash at its end."""
    return [path[: match.end()] for match in _SLASH.finditer(path)]


def _fitting_depth(nodes: Sequence[_Node]) -> int:
    """Return the number of levels that fit into a table, at least 1."""
    counts = collections.Counter(node.level for node in nodes)
    totals = list(itertools.accumulate(counts[level] for level in sorted(counts)))
    return max(1, sum(total <= _MAX_ROWS for total in totals))


def _dtype(node: _Node) -> str:
    names = sorted({leaf["dtype"] for leaf in _arrays(node) or node.leaves})
    return abbreviate(names, 2)


def _arrays(node: _Node) -> list[Document]:
    return [leaf for leaf in node.leaves if "value" not in leaf]


def _shape(node: _Node) -> str:
    """Return the shape of an array, the value of a scalar, or what a group contains."""
    arrays = _arrays(node)
    if node.is_group:
        scalars = len(node.leaves) - len(arrays)
        return ", ".join(pluralize(n, noun) for n, noun in ((len(arrays), "array"), (scalars, "scalar")) if n)
    if arrays:
        return format_shape(arrays[0]["shape"])
    value: str = node.leaves[0]["value"]
    return value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 1] + "…"


def _chunks(node: _Node) -> str:
    if node.is_group or not _arrays(node):
        return ""
    [array] = node.leaves
    return f"{array['chunk_count']:,} of {format_shape(array['chunks'])}"


def _codec(node: _Node) -> str:
    return abbreviate(sorted({array["codec"] for array in _arrays(node)}), 2)


def _size(node: _Node, field: str) -> str:
    arrays = _arrays(node)
    return format_size(sum(array[field] for array in arrays)) if arrays else ""


def _shared(node: _Node) -> str:
    """Return the size of the stored chunks shared with earlier versions: "" if none are, "all" if all are."""
    stored, shared = (sum(a[field] for a in _arrays(node)) for field in ("stored_bytes", "shared_bytes"))
    return "" if not shared else "all" if shared == stored else format_size(shared)


_TABLE: Table = [
    (Column("path", preferred_width=24), lambda node: node.name),
    (Column("dtype", rank=2), _dtype),
    (Column("shape", preferred_width=12), _shape),
    (Column("chunks", rank=1), _chunks),
    (Column("codec", rank=5), _codec),
    (Column("values", align_right=True, rank=3), lambda node: _size(node, "value_bytes")),
    (Column("stored", align_right=True), lambda node: _size(node, "stored_bytes")),
    (Column("shared", align_right=True, rank=4), _shared),
]
