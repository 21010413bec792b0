"""The results of `tstore log`, `ls`, `diff` and `tag` as tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Set

from tstore.cli.results import Compared, Log, OfStore, Pending, Removed, ScalarChange, Tag, Tagged, Tags
from tstore.cli.text import (
    PATH_COLUMN,
    Column,
    Table,
    abbreviate,
    escape,
    format_decibels,
    format_ranges,
    format_shape,
    format_size,
    print_rows,
)
from tstore.core.format.objects.records import REPAIR, VOIDED
from tstore.core.format.plain_text import pluralize
from tstore.core.log.history import Commit
from tstore.core.maintenance.contents import ArrayInfo, ListedArray, Listing
from tstore.core.maintenance.diff import ArrayDiff
from tstore.core.transactions.pending import PendingTransaction

__all__ = ["show_diff", "show_log", "show_ls", "show_pending", "show_removed", "show_tagged", "show_tags"]

_MAX_SUBJECT = 100  # characters of the first line of a commit message
_MAX_TAGS = 4  # of one commit in a table; one may drop the tags of thousands of steps


def show_log(log: Log) -> None:
    """Print the commits, newest first."""
    commits = log.commits
    voided = {version for c in commits for version in _voided_by(c)}
    table: Table[Commit] = [
        (Column("version", align_right=True), lambda c: str(c.version)),
        (Column("base", align_right=True, rank=1), lambda c: str(c.base)),
        (Column("tag", preferred_width=16), lambda c: _tags(c, voided)),
        (Column("time"), lambda c: f"{c.time.astimezone():%Y-%m-%d %H:%M:%S}"),
        (Column("added", align_right=True, rank=2), lambda c: format_size(c.bytes_added)),
        (Column("message", preferred_width=16), lambda c: _subject(c.message)),
    ]
    if all(c.base >= c.version - 1 for c in commits):  # every base is the version before
        del table[1]
    print_rows(table, commits)
    if not commits:
        print(escape(f"{log.store}: no commits yet"))
    if log.has_older:
        print("There are older commits: list more with --limit, or all with --all")


def show_diff(compared: Compared) -> None:
    """Print a row for each array that differs, and the counts."""
    diff = compared.report
    table: Table[ArrayDiff] = [
        (PATH_COLUMN, lambda a: a.path),
        (Column("change", preferred_width=16), _change),
        (Column("chunks", align_right=True, rank=1), lambda a: f"{a.chunks:,}"),
        (Column("relative norm", align_right=True, rank=3), _relative_norm),
        (Column("max difference", align_right=True, rank=2), _largest_difference),
        (Column("SQNR", align_right=True), _diff_sqnr),
    ]
    print_rows(table, diff.by_change)
    changes: list[str] = [a.change for a in diff.arrays]
    added, removed, changed = (changes.count(c) for c in ("added", "removed", "changed"))
    counts = f"{pluralize(added, 'array')} added, {removed} removed, {changed} changed"
    if compared.scalars:
        counts += f"; {abbreviate([_scalar_change(scalar) for scalar in compared.scalars])}"
    groups = f"; groups changed: {abbreviate([g or '/' for g in compared.groups])}" if compared.groups else ""
    print(escape(f"version {diff.before} → version {diff.after}: {counts}{groups}"))
    values, read = sum(a.values for a in diff.arrays), sum(a.distance.count for a in diff.arrays if a.distance)
    if read < values:
        print(f"norms and differences are of {read:,} of {values:,} values in chunks that differ")


def _scalar_change(scalar: ScalarChange) -> str:
    values = ("absent" if value is None else value for value in (scalar.before, scalar.after))
    return f"{scalar.path} {' → '.join(values)}"


def show_ls(listed: OfStore[Listing]) -> None:
    """Print the arrays of a version and their totals."""
    table: Table[ListedArray] = [
        (PATH_COLUMN, lambda a: a.path),
        (Column("dtype", rank=2), lambda a: a.dtype),
        (Column("shape"), lambda a: format_shape(a.shape)),
        (Column("chunks", rank=1), lambda a: format_shape(a.chunks)),
        (Column("codec", preferred_width=8), lambda a: a.codec),
        (Column("stored", align_right=True), lambda a: format_size(a.stored_bytes)),
        (Column("bits/value", align_right=True, rank=3), lambda a: f"{a.bits_per_value:.2f}"),
    ]
    listing = listed.report
    print_rows(table, listing.arrays)
    total, tags = listing.total, f" ({abbreviate(listing.tags)})" if listing.tags else ""
    sizes = f"{pluralize(total.values, 'value')}, {format_size(total.stored_bytes)} stored"
    rate = f", {total.bits_per_value:.2f} bits/value" if total.values else ""
    print(escape(f"version {listing.version}{tags}: {pluralize(total.arrays, 'array')}, {sizes}{rate}"))


def show_pending(pending: Pending) -> None:
    """Print the uncommitted cooperative transactions with their missing hosts and last heartbeats."""
    table: Table[PendingTransaction] = [
        (Column("transaction"), lambda t: t.transaction),
        (Column("name", preferred_width=8, rank=1), lambda t: t.name),
        (Column("delivered"), lambda t: f"{len(t.delivered)} of {t.hosts}"),
        (Column("missing hosts", preferred_width=13), _missing_hosts),
        (
            Column("last heartbeat", rank=2),
            lambda t: f"{min(t.heartbeats.values()):.0f} s ago" if t.heartbeats else "none",
        ),
    ]
    print_rows(table, pending.pending)
    count = len(pending.pending)
    number = "no cooperative transaction is" if not count else pluralize(count, "cooperative transaction")
    verb = "" if not count else " is" if count == 1 else " are"
    print(escape(f"{pending.store}: {number}{verb} pending"))


def _missing_hosts(transaction: PendingTransaction) -> str:
    if transaction.withdrawn_by is not None:
        return f"withdrawn by host {transaction.withdrawn_by}"
    return abbreviate(format_ranges(transaction.absent)) or "none (run tstore finish)"


def show_tags(tags: Tags) -> None:
    """Print the tags with their versions."""
    table: Table[Tag] = [
        (Column("tag", preferred_width=16), lambda t: t.tag),
        (Column("version", align_right=True), lambda t: str(t.version)),
    ]
    print_rows(table, tags.tags)
    if not tags.tags:
        print(escape(f"{tags.store}: no tags yet"))


def show_tagged(tagged: Tagged) -> None:
    """Print the result of setting, moving or dropping a tag."""
    change = f"now names version {tagged.target}"
    if tagged.dropped is not None:
        change = f"was dropped from version {tagged.dropped}"
    print(escape(f"{tagged.tag} {change} (recorded as version {tagged.version})"))


def show_removed(removed: Removed) -> None:
    """Print which steps were removed, or would be, and when their data is deleted."""
    steps = abbreviate(
        [
            f"step {row.step} (version {row.version}, which added {format_size(row.bytes_added)})"
            for row in removed.removed
        ]
    )
    if removed.version is None:
        print(escape(f"{removed.store}: {f'would remove {steps}' if steps else 'there are no later steps'}"))
        return
    print(escape(f"{removed.store}: removed {steps}, recorded as version {removed.version}"))
    command = f"tstore gc {shlex.quote(removed.store)} --keep-last 5"
    print(escape(f"the data stays until garbage collection removes the version, for example with {command}"))


def _subject(message: str) -> str:
    text = message.strip()
    subject = text.partition("\n")[0][:_MAX_SUBJECT].rstrip()
    return subject + "…" * (subject != text)


def _tags(commit: Commit, voided: Set[int]) -> str:
    tagged = [f"{tag} names {version}" for tag, version in commit.tagged.items()]
    dropped = [f"{tag} dropped" for tag in commit.dropped]
    state = ", which is voided" if commit.source in voided else ""
    copied = "" if commit.source is None else f" (copy of {commit.source}{state})"
    expired = " (expired)" if commit.expired else ""
    return (abbreviate([*commit.tags, *tagged, *dropped], _MAX_TAGS) + copied + expired).strip()


def _voided_by(commit: Commit) -> list[int]:
    """Return the versions that a repair voided, if the commit is that of a repair."""
    voided = commit.metadata.get(VOIDED) if commit.transaction.startswith(REPAIR) else None
    return voided if isinstance(voided, list) else []


def _change(array: ArrayDiff) -> str:
    before, after = array.before, array.after
    if before is not None and after is not None:
        return ", ".join(_field_change(field, before, after) for field in array.fields) or "values"
    info = before or after
    assert info is not None
    return f"{array.change}: {info.dtype} {format_shape(info.shape)}, {format_size(info.stored_bytes)}"


def _relative_norm(array: ArrayDiff) -> str:
    norm = array.relative_norm  # NaN if no values were compared
    return f"{norm:.3g}" if math.isfinite(norm) and _is_finite(array) else ""


def _largest_difference(array: ArrayDiff) -> str:
    if array.distance is None or not array.distance.count:
        return ""
    return f"{array.distance.largest_error:.3g}" if _is_finite(array) else "not finite"


def _diff_sqnr(array: ArrayDiff) -> str:
    """Format the SQNR of an array that differs, which is not finite if the values before were all zero."""
    if array.distance is None or not array.distance.count or not _is_finite(array):
        return ""
    if array.distance.largest_error == 0:
        return "exact"
    sqnr = array.distance.sqnr
    return format_decibels(sqnr) if math.isfinite(sqnr) else "all were zero"


def _is_finite(array: ArrayDiff) -> bool:
    return array.distance is not None and math.isfinite(array.distance.largest_error)


def _field_change(field: str, before: ArrayInfo, after: ArrayInfo) -> str:
    """Describe the change of a metadata field; only name the field if it is not shape, chunks, codecs or dtype."""
    match field:
        case "shape":
            return f"shape {format_shape(before.shape)} → {format_shape(after.shape)}"
        case "chunks":
            return f"chunks {format_shape(before.chunks)} → {format_shape(after.chunks)}"
        case "codecs":
            return f"codec {before.codec} → {after.codec}"
        case "dtype":
            return f"dtype {before.dtype} → {after.dtype}"
    return field
