"""The Compare view: the arrays that differ between two versions, the largest changes first."""

from __future__ import annotations

import math

from tstore.core.maintenance.diff import ArrayDiff, Diff
from tstore.core.runtime.pool import run
from tstore.core.steps import steps_of
from tstore.errors import InvalidArgument, NotFound
from tstore.service.page.views import Document, Query, at_argument, choices, shell_command
from tstore.service.statistics.baseline import baseline

__all__ = ["load"]

_BUDGET = 50_000_000  # bytes of values
_MAX_READ = 1_000_000_000
_BUDGETS = (_BUDGET, _MAX_READ)
_ROWS = 100
_MAX_DIFFS = 4  # differences kept in memory
_MAX_GROUPS = 100
_SORTS = ("change", "name", "largest", "chunks")
_KINDS = ("", "changed", "added", "removed")


async def load(query: Query) -> Document:
    """Return one page of the arrays that differ between two versions, in the requested order.

    `after` is a version or a tag, by default the head; `before` by default the source of a quantized copy, the
    step before a step, or the version before. `budget` is how many bytes of values to compare, `sort` one of the
    columns, `only` a kind of change, `find` a part of a path, and `first` the number of the first row.
    """
    budget = query.number("budget", _BUDGET) or _BUDGET
    if budget > _MAX_READ:
        raise InvalidArgument(f"budget={budget}: the page reads at most {_MAX_READ}; tstore diff reads more")
    sort, only, find = query.choice("sort", _SORTS), query.choice("only", _KINDS), query.text("find")
    after = await query.store.snapshot(query.version("after"))
    names = {"before": query.parameters.get("before", ""), "after": query.parameters.get("after", "")}
    try:
        chosen = query.version("before")
        earlier = await query.store.snapshot(
            await baseline(query.store, after.version) if chosen is None else chosen
        )
    except NotFound as error:
        if names["before"]:
            raise
        return await _empty(query, names, after.version, query.message(error))
    diff = await query.results.get(
        "diff",
        (query.store, earlier.version, after.version, budget),
        lambda: query.store.diff(earlier.version, after.version, budget=budget),
        most=_MAX_DIFFS,
    )
    rows = await run(_selected, diff, sort, only, find)
    first = query.number("first") or 0
    b, a = names["before"] or str(earlier.version), names["after"] or str(after.version)
    return {
        **await _empty(query, names, after.version, None),
        "command": shell_command("diff", [query.address, b, a], ["--budget", str(budget)]),
        "python": _python(query.address, b, a, budget),
        "before": earlier.version,
        "titles": {"before": _title(after.tags, earlier.version), "after": _title(after.tags, after.version)},
        "budget": budget,
        "budgets": [n for n in _BUDGETS if n != budget],
        "sort": sort,
        "only": only,
        "find": find,
        "counts": {kind: sum(x.change == kind for x in diff.arrays) for kind in _KINDS[1:]},
        "groups": list(diff.groups[:_MAX_GROUPS]),
        "group_count": len(diff.groups),
        "values": sum(x.values for x in diff.arrays),
        "values_compared": sum(x.distance.count for x in diff.arrays if x.distance is not None),
        "relative_change": _relative_change(diff),
        "largest_norm": max((n for x in diff.arrays if math.isfinite(n := x.relative_norm)), default=0.0),
        "count": len(rows),
        "first": first,
        "rows": [row.document() for row in rows[first : first + _ROWS]],
        "next": first + _ROWS if first + _ROWS < len(rows) else None,
    }


async def _empty(query: Query, names: Document, after: int, problem: str | None) -> Document:
    """Return the document without a version to compare with."""
    return {
        "command": shell_command("log", [query.address]),
        "python": "",
        "names": names,
        "choices": choices(await query.store.tags()),
        "before": None,
        "after": after,
        "problem": problem,
    }


def _relative_change(diff: Diff) -> float | None:
    """Return the norm of all differences relative to the norm of the values before, None if that is not finite.

    Both are of the values in chunks that differ; of a sample, each array counts as much as all its values.
    """
    noise = signal = 0.0
    for row in diff.arrays:
        if row.distance is not None and row.distance.count:
            noise += row.distance.noise * row.values / row.distance.count
            signal += row.distance.signal * row.values / row.distance.count
    change = math.sqrt(noise / signal) if signal and noise >= 0 else math.inf if noise else 0.0
    return change if math.isfinite(change) else None


def _title(tags: dict[str, int], version: int) -> str:
    """Return the step of a version, else its first tag, else "version 5"."""
    own = [tag for tag, named in tags.items() if named == version]
    if steps := steps_of(own):
        return f"step {steps[-1]:,}"
    return own[0] if own else f"version {version:,}"


def _selected(diff: Diff, sort: str, only: str, find: str) -> list[ArrayDiff]:
    rows = [x for x in diff.by_change if only in ("", x.change) and find in x.path]
    if sort == "name":
        rows.sort(key=lambda x: x.path)
    elif sort == "chunks":
        rows.sort(key=lambda x: -x.chunks)
    elif sort == "largest":
        rows.sort(key=_largest)
    return rows


def _largest(row: ArrayDiff) -> float:
    """Return a key that puts the largest differences first, then arrays whose values were not compared."""
    if row.distance is None:
        return math.inf
    return -row.distance.largest_error if math.isfinite(row.distance.largest_error) else -math.inf


def _python(address: str, before: str, after: str, budget: int) -> str:
    return "\n".join(
        [
            "import tstore.sync as tstore",
            "",
            f"store = tstore.open({address!r}, 'r')",
            f"print(store.diff({at_argument(before)}, {at_argument(after)}, budget={budget}).table())",
        ]
    )
