"""The Tree view: the groups and arrays of a version, folded, searched, sorted, and as a treemap of their bytes."""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import os.path
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from tstore.core.format.arguments import quote
from tstore.core.format.paths import checked_path
from tstore.core.format.patterns import compile_patterns
from tstore.core.maintenance.contents import ArrayInfo, contents
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument, NotFound
from tstore.service.page.views import Document, Query, at_argument, choices, natural_order, shell_command

__all__ = ["load"]

_ROWS = 100
_MAX_UNFOLDED = 40  # rows of a tree whose first levels are open
_TILES = 120  # tiles of the treemap
_PARTS = 4  # the minimum number of groups with distinct colours
_LEADING_SHARE = 0.95  # of the bytes: the tiles that have it determine the names and colours of all
_MAX_TREES = 4  # trees kept in memory
_SEPARATOR, _AFTER_SEPARATOR = "\0", "\1"  # no name has either
_MAX_LISTED = 128  # groups of a version whose rows are kept in memory
_LONGEST_FIND = 256  # characters
_SEARCHED = 1 << 16  # characters of paths searched at a time
_LONGEST_SEARCH = 10.0  # seconds
_SORTS = ("name", "bytes", "values", "bits", "dtype", "codec")


async def load(query: Query) -> Document:
    """Return one page of the rows of a group of a version, in the requested order.

    On the first page, groups are expanded (they have `rows`), level by level, until there would be too many rows.
    `at` is a version or a tag, `group` a path, `find` a pattern as in `tstore ls`, or a part of a name (then the
    rows are the matching arrays, at any depth), `sort` one of the columns, `order` "up" or "down", `first` the
    number of the first row, and `level` how deep the page indents the rows.
    """
    snapshot = await query.store.snapshot(query.version("at"))
    index = await query.results.get(
        "tree", (query.store, snapshot.version), lambda: _read(snapshot), most=_MAX_TREES
    )
    group, find = query.parameters.get("group", "").strip("/"), query.text("find")
    sort = query.choice("sort", _SORTS)
    order = query.choice("order", ("up", "down") if sort in ("name", "dtype", "codec") else ("down", "up"))
    first = query.number("first") or 0
    found = await _search(index, find) if find else None
    rows, total = await run(_select, index, group, found, sort, order)
    shown = [row.shown() for row in rows[first : first + _ROWS]]
    whole = first == 0 and not query.number("level")  # not the rows that scripts add to a page
    if whole:
        await run(_unfold, index, shown, sort, order)
    at = query.parameters.get("at", "")
    path = find if _is_pattern(find) else f"**/*{find}*/**" if find else group
    return {
        "command": shell_command("ls", [query.address, *([path] if path else [])], ["--at", at] if at else []),
        "python": _python(query.address, at_argument(at or str(snapshot.version)), path),
        "version": snapshot.version,
        "tags": [tag for tag, version in snapshot.tags.items() if version == snapshot.version],
        "at": at,
        "choices": choices(await query.store.tags()) if whole else None,
        "group": group,
        "find": find,
        "sort": sort,
        "order": order,
        "level": query.number("level") or 0,
        "total": total,
        "first": first,
        "count": len(rows),
        "rows": shown,
        "next": first + _ROWS if first + _ROWS < len(rows) else None,
        "tiles": await run(_tiles, index, rows) if whole else [],
    }


class TreeRow(Struct):
    """A `Row` as the page shows it; the `rows` of an open group are directly in it."""

    name: str
    path: str
    kind: Literal["group", "array"]
    arrays: int
    rows: list[TreeRow] | None
    dtype: str | None
    shape: tuple[int, ...] | None
    chunks: tuple[int, ...] | None
    codec: str | None
    values: int
    stored_bytes: int
    bits_per_value: float


class Total(Struct):
    """The sums of the rows."""

    arrays: int
    values: int
    stored_bytes: int


class Tile(Struct):
    """A rectangle of the treemap; `part` numbers the groups with distinct colours."""

    name: str
    path: str
    kind: Literal["group", "array", "rest"]
    part: int
    stored_bytes: int


class Row(NamedTuple):
    """A group with the totals of the arrays below it, or one array (`info`)."""

    name: str
    path: str
    arrays: int
    values: int
    stored_bytes: int
    info: ArrayInfo | None = None

    @property
    def bits(self) -> float:
        """Stored bits per value."""
        return 8 * self.stored_bytes / self.values if self.values else 0.0

    def shown(self) -> TreeRow:
        """Return the row as the page shows it."""
        info = self.info
        return TreeRow(
            name=self.name,
            path=self.path,
            kind="group" if info is None else "array",
            arrays=self.arrays,
            rows=None,
            dtype=None if info is None else info.dtype,
            shape=None if info is None else info.shape,
            chunks=None if info is None else info.chunks,
            codec=None if info is None else info.codec,
            values=self.values,
            stored_bytes=self.stored_bytes,
            bits_per_value=self.bits,
        )


class Index:
    """The arrays of a version in the order of the tree; the totals of a group are differences of running totals.

    Groups are found when requested: all of them could take far more memory than the arrays.
    """

    def __init__(self, arrays: Sequence[ArrayInfo]) -> None:
        self.arrays = sorted(arrays, key=lambda array: _key(array.path))
        self._keys = [_key(array.path) for array in self.arrays]
        self._values = list(itertools.accumulate((array.size for array in self.arrays), initial=0))
        self._bytes = list(itertools.accumulate((array.stored_bytes for array in self.arrays), initial=0))
        self.rows = functools.lru_cache(_MAX_LISTED)(self._rows)

    def _rows(self, group: str) -> list[Row]:
        """Return the groups and the arrays directly in a group, sorted by name; none if the group is absent."""
        prefix = f"{_key(group)}{_SEPARATOR}" if group else ""
        at, stop = self._range(prefix, 0) if group else (0, len(self._keys))
        groups, arrays = list[Row](), list[Row]()
        while at < stop:
            array = self.arrays[at]
            name, inner, _ = self._keys[at][len(prefix) :].partition(_SEPARATOR)
            if not inner:
                arrays.append(_array_row(array, name))
                at += 1
                continue
            _, end = self._range(f"{prefix}{name}{_SEPARATOR}", at)
            values, stored = self._values[end] - self._values[at], self._bytes[end] - self._bytes[at]
            groups.append(Row(name, array.path[: len(prefix) + len(name)], end - at, values, stored))
            at = end
        return _by_name(groups) + _by_name(arrays)

    def _range(self, prefix: str, first: int) -> tuple[int, int]:
        """Return the start and the stop of the keys with a prefix, which ends with a separator."""
        start = bisect.bisect_left(self._keys, prefix, first)
        return start, bisect.bisect_left(self._keys, f"{prefix[:-1]}{_AFTER_SEPARATOR}", start)


def _key(path: str) -> str:
    """Return a sort key that keeps the arrays of a group together."""
    return path.replace("/", _SEPARATOR)


async def _read(snapshot: Snapshot) -> Index:
    await snapshot.read_nodes()
    return await run(lambda: Index(contents(snapshot)))


def _by_name(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: natural_order(row.name))


def _is_pattern(find: str) -> bool:
    return any(wildcard in find for wildcard in "*?")


async def _search(index: Index, find: str) -> list[ArrayInfo]:
    """Return the arrays that are found, in steps between which the search can be cancelled."""
    if len(find) > _LONGEST_FIND:
        raise InvalidArgument(f"find={quote(find)}: expected at most {_LONGEST_FIND} characters")
    matches = compile_patterns(find) if _is_pattern(find) else lambda path: find in path
    arrays, found, end = iter(index.arrays), list[ArrayInfo](), time.monotonic() + _LONGEST_SEARCH
    while await run(_search_some, arrays, matches, found):
        if time.monotonic() > end:
            raise InvalidArgument(f"find={quote(find)}: the search takes too long; use fewer wildcards")
    return found


def _search_some(arrays: Iterator[ArrayInfo], matches: Callable[[str], bool], found: list[ArrayInfo]) -> bool:
    """Search the next arrays; return whether there may be more."""
    searched = 0
    for array in arrays:
        if matches(array.path):
            found.append(array)
        searched += len(array.path)
        if searched > _SEARCHED:
            return True
    return False


def _select(
    index: Index, group: str, found: Sequence[ArrayInfo] | None, sort: str, order: str
) -> tuple[list[Row], Total]:
    """Return the sorted rows of a group, or of the arrays that were found, and their total."""
    if found is not None:
        rows = [_array_row(array, array.path) for array in found]
    else:
        rows = list(index.rows(group))
        if group and not rows:
            raise NotFound(f"there is no group {checked_path(group)!r} in this version")
    sums = (sum(row.arrays for row in rows), sum(row.values for row in rows))
    total = Total(*sums, sum(row.stored_bytes for row in rows))
    if sort != "name":
        keys: dict[str, Any] = {
            "bytes": lambda row: row.stored_bytes,
            "values": lambda row: row.values,
            "bits": lambda row: row.bits,
            "dtype": lambda row: row.info.dtype if row.info else "",
            "codec": lambda row: row.info.codec if row.info else "",
        }
        rows.sort(key=keys[sort])
    if order == "down":
        rows.reverse()
    return rows, total


def _unfold(index: Index, rows: Sequence[TreeRow], sort: str, order: str) -> None:
    """Expand groups by the rows directly in them, level by level, while there are few rows in total."""
    room, level = _MAX_UNFOLDED - len(rows), rows
    while groups := [row for row in level if row.kind == "group"]:
        if len(groups) > room:  # each has at least one row, so none fits
            return
        room -= sum(len(index.rows(row.path)) for row in groups)
        if room < 0:
            return
        for row in groups:
            inner, _ = _select(index, row.path, None, sort, order)
            row.rows = [below.shown() for below in inner]
        level = [below for row in groups for below in row.rows or ()]


def _array_row(array: ArrayInfo, name: str) -> Row:
    return Row(name, array.path, 1, array.size, array.stored_bytes, array)


def _tiles(index: Index, rows: Sequence[Row]) -> list[Tile]:
    """Return the tiles of the treemap: the rows, with the largest groups replaced by their contents.

    Names begin below the group that the largest tiles share; `part` numbers the groups below it. The smallest rows
    are merged into one tile.
    """
    heap = [(-row.stored_bytes, row.path, row) for row in rows if row.stored_bytes]
    if len(heap) > _TILES:
        heap.sort()
    heap, rest = heap[:_TILES], heap[_TILES:]
    heapq.heapify(heap)
    done: list[tuple[int, str, Row]] = []
    while heap and len(heap) + len(done) < _TILES:
        entry = heapq.heappop(heap)
        row = entry[2]
        inner = [] if row.info is not None else _inner(index, row)
        if not inner or len(heap) + len(done) + len(inner) > _TILES:
            done.append(entry)
            continue
        for below in inner:
            if below.stored_bytes:
                heapq.heappush(heap, (-below.stored_bytes, below.path, below))
    shown = [row for _, _, row in sorted([*done, *heap])]
    names, parts = _names_and_parts(shown)
    tiles = [
        Tile(name, row.path, "group" if row.info is None else "array", part, row.stored_bytes)
        for row, name, part in zip(shown, names, parts, strict=True)
    ]
    if rest:
        size = -sum(entry[0] for entry in rest)
        tiles.append(Tile(f"{len(rest):,} others", "", "rest", 0, size))
    return tiles


def _names_and_parts(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """Return the names of tiles without the group that the largest share, and a number for the group of each.

    The groups are at the highest level of the tree that has several.
    """
    room = _LEADING_SHARE * sum(row.stored_bytes for row in rows)
    sizes = itertools.accumulate(row.stored_bytes for row in rows)
    large = 1 + sum(size < room for size in sizes)
    common = os.path.commonpath([row.name for row in rows[:large]]) + "/" if large > 1 else ""
    names = [row.name.removeprefix(common) for row in rows]
    tops: list[str] = []
    for depth in range(1, 4):
        tops = ["/".join(name.split("/")[:depth]) for name in names]
        if len(set(tops[:large])) >= _PARTS:
            break
    numbers = {top: i for i, top in enumerate(dict.fromkeys(tops))}
    return names, [numbers[top] for top in tops]


def _inner(index: Index, row: Row) -> list[Row]:
    """Return the direct members of a group, with names that begin with the row's name."""
    return [below._replace(name=f"{row.name}/{below.name}") for below in index.rows(row.path)]


def _python(address: str, at: str, path: str) -> str:
    if _is_pattern(path):
        plan = f"tstore.explain({address!r}, at={at}, only={path!r})"
        return f"import tstore.sync as tstore\n\nprint({plan}.arrays)"
    lines = [
        "import tstore.sync as tstore",
        "",
        f"snapshot = tstore.open({address!r}, 'r').snapshot({at})",
    ]
    if path:
        return "\n".join(
            [*lines, f"print([path for path in snapshot.paths() if path.startswith({path + '/'!r})])"]
        )
    return "\n".join([*lines, "print(snapshot.paths())"])
