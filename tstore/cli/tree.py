"""The result of `tstore show` as a tree: groups with their totals, and below them the arrays and Python scalars.

Without `--depth` as many levels are shown as fit into `_MAX_ROWS` rows; deeper groups are summarized.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tstore.cli.results import Scalar, Tree
from tstore.cli.text import Column, Table, abbreviate, escape, format_shape, format_size, print_rows
from tstore.core.format.plain_text import pluralize
from tstore.core.maintenance.contents import DetailedArray

__all__ = ["show_tree"]

_MAX_ROWS = 100
_MAX_VALUE = 40  # characters of a Python scalar

_DIGITS = re.compile(r"([0-9]+)")

Leaf: TypeAlias = DetailedArray | Scalar


class _Node(NamedTuple):
    """A row of the tree: a group with all leaves below it, or one leaf (an array or a Python scalar).

    The uppermost rows have level 1.
    """

    name: str
    level: int
    is_group: bool
    leaves: list[Leaf]


def show_tree(tree: Tree) -> None:
    """Print the groups, arrays and scalars of a version, and the totals."""
    listing = tree.report
    leaves: list[Leaf] = [*listing.arrays, *tree.scalars]
    nodes = _nodes(sorted(leaves, key=lambda leaf: _natural_sort_key(leaf.path)))
    depth, limit = tree.depth, None
    if depth is None:
        depth, limit = _fitting_depth(nodes), _MAX_ROWS
    rows = [node for node in nodes if node.level <= depth]
    print_rows(_TABLE, rows[:limit])
    if limit is not None and len(rows) > limit:
        print(f"({len(rows) - limit:,} more rows; pass a PATH, a pattern, or --depth 1 for all of them)")
    elif len(rows) < len(nodes):
        print(f"(groups of level {depth} are summarized; pass a PATH, a pattern, or --depth {depth + 1} for more)")
    total, tags = listing.total, f" ({abbreviate(listing.tags)})" if listing.tags else ""
    sizes = f"{format_size(total.value_bytes)} of values, {format_size(total.stored_bytes)} stored"
    if total.shared_bytes:
        sizes += f", {format_size(total.shared_bytes)} of it shared with earlier versions"
    print(escape(f"version {listing.version}{tags}: {pluralize(total.arrays, 'array')}, {sizes}"))


def _natural_sort_key(path: str) -> list[list[str | tuple[int, str]]]:
    """Return a sort key that puts "layers/2" before "layers/10"."""
    return [[_number(p) if i % 2 else p for i, p in enumerate(_DIGITS.split(part))] for part in path.split("/")]


def _number(digits: str) -> tuple[int, str]:
    """Return a sort key for numbers of any length; `int` accepts only some thousand digits."""
    digits = digits.lstrip("0")
    return len(digits), digits


def _nodes(leaves: Sequence[Leaf]) -> list[_Node]:
    """Return all groups and leaves in the order of the rows, from sorted leaves.

    A group has no row if it contains nothing but another group, or a single leaf.
    """
    numbers: dict[tuple[int, str], int] = {}  # group numbers, by the number of the parent group and the name
    below: list[list[Leaf]] = [[]]  # the leaves of each group, by group number; 0 is the root
    for leaf in leaves:
        group = 0
        for name in leaf.path.split("/")[:-1]:
            group = numbers.setdefault((group, name), len(below))
            if group == len(below):
                below.append([])
            below[group].append(leaf)
    hidden = {above for (above, _), group in numbers.items() if len(below[above]) == len(below[group])}
    nodes: list[_Node] = []
    shown: set[int] = set()
    for leaf in leaves:
        path, group, level, start, stop = leaf.path, 0, 1, 0, 0  # `start`: the end of the row above
        for name in path.split("/")[:-1]:
            group, stop = numbers[group, name], stop + len(name) + 1
            if group in hidden or len(below[group]) == 1:
                continue
            if group not in shown:
                shown.add(group)
                nodes.append(_Node("  " * (level - 1) + path[start:stop], level, True, below[group]))
            level, start = level + 1, stop
        nodes.append(_Node("  " * (level - 1) + path[start:], level, False, [leaf]))
    return nodes


def _fitting_depth(nodes: Sequence[_Node]) -> int:
    """Return the number of levels that fit into a table, at least 1."""
    counts = collections.Counter(node.level for node in nodes)
    totals = list(itertools.accumulate(counts[level] for level in sorted(counts)))
    return max(1, sum(total <= _MAX_ROWS for total in totals))


def _dtype(node: _Node) -> str:
    names = sorted({leaf.dtype for leaf in _arrays(node) or node.leaves})
    return abbreviate(names, 2)


def _arrays(node: _Node) -> list[DetailedArray]:
    return [leaf for leaf in node.leaves if isinstance(leaf, DetailedArray)]


def _shape(node: _Node) -> str:
    """Return the shape of an array, the value of a scalar, or what a group contains."""
    arrays = _arrays(node)
    if node.is_group:
        scalars = len(node.leaves) - len(arrays)
        return ", ".join(pluralize(n, noun) for n, noun in ((len(arrays), "array"), (scalars, "scalar")) if n)
    if arrays:
        return format_shape(arrays[0].shape)
    [scalar] = node.leaves
    assert isinstance(scalar, Scalar)
    value = scalar.value
    return value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 1] + "…"


def _chunks(node: _Node) -> str:
    if node.is_group or not (arrays := _arrays(node)):
        return ""
    return f"{arrays[0].chunk_count:,} of {format_shape(arrays[0].chunks)}"


def _codec(node: _Node) -> str:
    return abbreviate(sorted({array.codec for array in _arrays(node)}), 2)


def _size(node: _Node, size_of: Callable[[DetailedArray], int]) -> str:
    arrays = _arrays(node)
    return format_size(sum(map(size_of, arrays))) if arrays else ""


def _shared(node: _Node) -> str:
    """Return the size of the stored chunks shared with earlier versions: "" if none are, "all" if all are."""
    arrays = _arrays(node)
    stored, shared = sum(a.stored_bytes for a in arrays), sum(a.shared_bytes for a in arrays)
    return "" if not shared else "all" if shared == stored else format_size(shared)


_TABLE: Table[_Node] = [
    (Column("path", preferred_width=24), lambda node: node.name),
    (Column("dtype", rank=2), _dtype),
    (Column("shape", preferred_width=12), _shape),
    (Column("chunks", rank=1), _chunks),
    (Column("codec", rank=5), _codec),
    (Column("values", align_right=True, rank=3), lambda node: _size(node, lambda array: array.value_bytes)),
    (Column("stored", align_right=True), lambda node: _size(node, lambda array: array.stored_bytes)),
    (Column("shared", align_right=True, rank=4), _shared),
]
