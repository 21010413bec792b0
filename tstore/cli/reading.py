"""The commands that read a store: `tstore log`, `ls`, `show` and `diff`."""

from __future__ import annotations

from typing import Any

import click

import tstore
from tstore.checkpoint.request import Request
from tstore.checkpoint.source import Source
from tstore.cli.console import Progress, at_options, json_option, run, store_argument, version_or_tag
from tstore.cli.listings import show_diff, show_log, show_ls, show_pending
from tstore.cli.results import Compared, Log, OfStore, Pending, Scalar, ScalarChange, Tree
from tstore.cli.statistics import budget_option
from tstore.cli.tree import show_tree
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.maintenance.contents import Listing, detailed_listing, glob_of, listing, selected_by
from tstore.core.runtime import pool
from tstore.core.snapshot import Snapshot

__all__ = ["diff", "log", "ls", "show"]


@click.command("log")
@store_argument
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    default=50,
    show_default=True,
    help="The number of commits to list.",
)
@click.option("--all", "list_all", is_flag=True, help="List all commits.")
@json_option
def log(store: str, limit: int, list_all: bool, as_json: bool) -> int:
    """List the newest commits, newest first."""

    async def work(progress: Progress) -> Log:
        progress.doing(f"reading the history of {store}")
        async with await tstore.open(store, "r") as opened:
            commits: list[tstore.Commit] = []
            has_older = False
            async for commit in opened.history():
                if has_older := len(commits) == limit and not list_all:
                    break
                commits.append(commit)
        return Log(opened.url, commits, has_older)

    return run(work, show_log, as_json)


@click.command("ls")
@store_argument
@click.argument("path", default="")
@at_options("A version number or a tag; by default the head, the newest version that is not a copy.")
@click.option("--pending", is_flag=True, help="List the cooperative transactions not committed yet.")
@json_option
def ls(store: str, path: str, at: int | str | None, pending: bool, as_json: bool) -> int:
    """List the arrays of a version.

    With PATH, list only the array or group at that path and everything below it. PATH may also be a pattern such
    as 'params/**/w', which selects the arrays that match: * stands for any part of a name, ** for any number of
    names.
    """
    if pending and (path or at is not None):
        raise click.UsageError("--pending lists transactions, not arrays; pass it without PATH, --at and --step")

    async def list_pending(progress: Progress) -> Pending:
        progress.doing(f"reading {store}")
        async with await tstore.open(store, "r") as opened:
            return Pending(opened.url, await opened.pending())

    async def list_arrays(progress: Progress) -> OfStore[Listing]:
        progress.doing(f"reading {store}")
        async with await tstore.open(store, "r") as opened:
            return OfStore(opened.url, await pool.run(listing, await opened.snapshot(at), path))

    return run(list_pending, show_pending, as_json) if pending else run(list_arrays, show_ls, as_json)


@click.command("show")
@store_argument
@click.argument("path", default="")
@at_options("A version number or a tag; by default the head, the newest version that is not a copy.")
@click.option(
    "--depth", type=click.IntRange(1), metavar="N", help="Show N levels; by default, as many as fit in 100 rows."
)
@json_option
def show(store: str, path: str, at: int | str | None, depth: int | None, as_json: bool) -> int:
    """Show the tree of a version.

    Lists the groups, arrays and Python scalars with their dtypes, shapes, chunks, codecs, bytes and stored bytes,
    and how many of the stored bytes are shared with earlier versions. PATH selects as in `tstore ls`. With --json
    all arrays and scalars are listed.
    """

    async def work(progress: Progress) -> Tree:
        progress.doing(f"reading {store}")
        async with await tstore.open(store, "r") as opened:
            snapshot = await opened.snapshot(at)
            scalars = await _scalars(snapshot, path)
            tree = await detailed_listing(opened.log.reader, snapshot, path, [s.path for s in scalars])
            selects = selected_by(snapshot, path)
            return Tree(opened.url, depth, tree, [scalar for scalar in scalars if selects(scalar.path)])

    return run(work, show_tree, as_json)


async def _scalars(snapshot: Snapshot, path: str) -> list[Scalar]:
    """Return the Python scalars that `tstore show PATH` lists, with their values as text, and perhaps others.

    They are all scalars of the saved tree if PATH selects nothing, for the error that names other paths.
    """
    await snapshot.read_nodes(["", path.strip("/")])
    if snapshot.reserved_attribute("structure") == b"null":
        return []  # no tree was saved
    glob = glob_of(snapshot, path)
    source = await Source.read(snapshot, Request(glob, None, None, "error"))
    if not source.scalars and not any(map(source.selects, source.stored)):
        source = await Source.read(snapshot, Request(None, None, None, "error"))
    scalars = source.scalars.items()
    return [Scalar(path, type(value).__name__, repr(value)) for path, value in scalars]


def _own_attributes(snapshot: Snapshot) -> dict[str, Any]:
    """Return the attributes of the root that users have set."""
    return {name: value for name, value in snapshot.attributes().items() if name != RESERVED_ATTRIBUTE}


async def _changed_scalars(before: Snapshot, after: Snapshot) -> list[ScalarChange]:
    """Return the Python scalars that differ between two versions."""
    old, new = [{s.path: s.value for s in await _scalars(snapshot, "")} for snapshot in (before, after)]
    return [
        ScalarChange(path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    ]


@click.command("diff")
@store_argument
@click.argument("before", callback=version_or_tag, metavar="A")
@click.argument("after", callback=version_or_tag, metavar="B")
@budget_option("all", "How many bytes of values to compare, such as 100MB; if more differ, a sample is compared.")
@json_option
def diff(store: str, before: int | str, after: int | str, budget: int | None, as_json: bool) -> int:
    """Show what changed between two versions.

    A and B are version numbers or tags. The output lists the arrays that differ, how many of their chunks differ,
    and for float arrays, of the values in these chunks: the norm of the difference relative to that of the values,
    the largest difference, and the SQNR (see `tstore quantize --help`). The arrays that changed most come first.
    The last line also names the Python scalars that differ, and the groups that were added or removed, or whose
    attributes differ.
    """

    async def work(progress: Progress) -> Compared:
        progress.doing(f"comparing {before} and {after} of {store}")
        async with await tstore.open(store, "r") as opened:
            diff = await opened.diff(before, after, budget=budget)
            scalars: list[ScalarChange] = []
            groups = list(diff.groups)
            if "" in groups:  # the scalars are among tstore's own attributes of the root
                old, new = await opened.snapshot(before), await opened.snapshot(after)
                scalars = await _changed_scalars(old, new)
                same_structure = old.reserved_attribute("structure") == new.reserved_attribute("structure")
                if (scalars or same_structure) and _own_attributes(old) == _own_attributes(new):
                    groups.remove("")  # nothing else differs but, in a copy, the report of `quantize`
            return Compared(opened.url, diff, groups, scalars)

    return run(work, show_diff, as_json)
