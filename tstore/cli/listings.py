"""The results of `tstore log`, `ls`, `diff` and `tag` as tables."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Set

from tstore.cli.console import Document
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
    print_table,
)
from tstore.core.format.objects.records import REPAIR, VOIDED
from tstore.core.format.plain_text import pluralize
from tstore.core.maintenance.diff import change_order

__all__ = ["show_diff", "show_log", "show_ls", "show_pending", "show_removed", "show_tagged", "show_tags"]

_MAX_SUBJECT = 100  # characters of the first line of a commit message
_MAX_TAGS = 4  # of one commit in a table; one may drop the tags of thousands of steps


def show_log(log: Document) -> None:
    """Print the commits, newest first."""
    commits = log["commits"]
    voided = {version for c in commits for version in _voided_by(c)}
    table: Table = [
        (Column("version", align_right=True), lambda c: str(c["version"])),
        (Column("base", align_right=True, rank=1), lambda c: str(c["base"])),
        (Column("tag", preferred_width=16), lambda c: _tags(c, voided)),
        (Column("time"), lambda c: f"{datetime.datetime.fromisoformat(c['time']).astimezone():%Y-%m-%d %H:%M:%S}"),
        (Column("added", align_right=True, rank=2), lambda c: format_size(c["bytes_added"])),
        (Column("message", preferred_width=16), lambda c: _subject(c["message"])),
    ]
    if all(c["base"] >= c["version"] - 1 for c in commits):  # every base is the version before
        del table[1]
    print_rows(table, commits)
    if not commits:
        print(escape(f"{log['store']}: no commits yet"))
    if log["has_older"]:
        print("There are older commits: list more with --limit, or all with --all")


def show_diff(diff: Document) -> None:
    """Print a row for each array that differs, and the counts."""
    rows = []
    for a in sorted(diff["arrays"], key=lambda a: change_order(a["values_compared"], a["relative_norm"])):
        before, after = a["before"], a["after"]
        if (change := a["change"]) == "changed":
            change = ", ".join(_field_change(field, before, after) for field in a["fields"]) or "values"
        else:
            info = before or after
            change += f": {info['dtype']} {format_shape(info['shape'])}, {format_size(info['stored_bytes'])}"
        row = [a["path"], change, f"{a['chunks']:,}"]
        if a["values_compared"]:
            if a["largest"] is None:
                row += ["", "not finite"]
            else:
                row += ["" if (norm := a["relative_norm"]) is None else f"{norm:.3g}", f"{a['largest']:.3g}"]
                row.append(_diff_sqnr(a))
        rows.append([*row, *[""] * (6 - len(row))])
    columns = [
        PATH_COLUMN,
        Column("change", preferred_width=16),
        Column("chunks", align_right=True, rank=1),
        Column("relative norm", align_right=True, rank=3),
        Column("max difference", align_right=True, rank=2),
        Column("SQNR", align_right=True),
    ]
    print_table(columns, rows)
    changes = [a["change"] for a in diff["arrays"]]
    added, removed, changed = (changes.count(c) for c in ("added", "removed", "changed"))
    counts = f"{pluralize(added, 'array')} added, {removed} removed, {changed} changed"
    if diff["scalars"]:
        counts += f"; {abbreviate([_scalar_change(scalar) for scalar in diff['scalars']])}"
    groups = f"; groups changed: {abbreviate([g or '/' for g in diff['groups']])}" if diff["groups"] else ""
    print(escape(f"version {diff['before']} → version {diff['after']}: {counts}{groups}"))
    values, compared = (sum(a[key] for a in diff["arrays"]) for key in ("values", "values_compared"))
    if compared < values:
        print(f"norms and differences are of {compared:,} of {values:,} values in chunks that differ")


def _scalar_change(scalar: Document) -> str:
    values = ("absent" if value is None else value for value in (scalar["before"], scalar["after"]))
    return f"{scalar['path']} {' → '.join(values)}"


def show_ls(listing: Document) -> None:
    """Print the arrays of a version and their totals."""
    table: Table = [
        (PATH_COLUMN, lambda a: a["path"]),
        (Column("dtype", rank=2), lambda a: a["dtype"]),
        (Column("shape"), lambda a: format_shape(a["shape"])),
        (Column("chunks", rank=1), lambda a: format_shape(a["chunks"])),
        (Column("codec", preferred_width=8), lambda a: a["codec"]),
        (Column("stored", align_right=True), lambda a: format_size(a["stored_bytes"])),
        (Column("bits/value", align_right=True, rank=3), lambda a: f"{a['bits_per_value']:.2f}"),
    ]
    print_rows(table, listing["arrays"])
    total = listing["total"]
    tags = f" ({abbreviate(listing['tags'])})" if listing["tags"] else ""
    sizes = f"{pluralize(total['values'], 'value')}, {format_size(total['stored_bytes'])} stored"
    rate = f", {total['bits_per_value']:.2f} bits/value" if total["values"] else ""
    print(escape(f"version {listing['version']}{tags}: {pluralize(total['arrays'], 'array')}, {sizes}{rate}"))


def show_pending(pending: Document) -> None:
    """Print the uncommitted cooperative transactions with their missing hosts and last heartbeats."""
    table: Table = [
        (Column("transaction"), lambda t: t["transaction"]),
        (Column("name", preferred_width=8, rank=1), lambda t: t["name"]),
        (Column("delivered"), lambda t: f"{len(t['delivered'])} of {t['hosts']}"),
        (Column("missing hosts", preferred_width=13), _missing_hosts),
        (
            Column("last heartbeat", rank=2),
            lambda t: f"{min(t['heartbeats'].values()):.0f} s ago" if t["heartbeats"] else "never",
        ),
    ]
    print_rows(table, pending["pending"])
    count = len(pending["pending"])
    number = "no cooperative transaction is" if not count else pluralize(count, "cooperative transaction")
    verb = "" if not count else " is" if count == 1 else " are"
    print(escape(f"{pending['store']}: {number}{verb} pending"))


def _missing_hosts(transaction: Document) -> str:
    if transaction["withdrawn_by"] is not None:
        return f"withdrawn by host {transaction['withdrawn_by']}"
    return abbreviate(format_ranges(transaction["absent"])) or "none (run tstore finish)"


def show_tags(document: Document) -> None:
    """Print the tags with their versions."""
    table: Table = [
        (Column("tag", preferred_width=16), lambda t: t["tag"]),
        (Column("version", align_right=True), lambda t: str(t["version"])),
    ]
    print_rows(table, document["tags"])
    if not document["tags"]:
        print(escape(f"{document['store']}: no tags yet"))


def show_tagged(tagged: Document) -> None:
    """Print the result of setting, moving or dropping a tag."""
    target, dropped = tagged["target"], tagged["dropped"]
    change = f"now names version {target}" if dropped is None else f"was dropped from version {dropped}"
    print(escape(f"{tagged['tag']} {change} (recorded as version {tagged['version']})"))


def show_removed(removed: Document) -> None:
    """Print which steps were removed, or would be, and when their data is deleted."""
    steps = abbreviate(
        [
            f"step {step['step']} (version {step['version']}, which added {format_size(step['bytes_added'])})"
            for step in removed["removed"]
        ]
    )
    if removed["version"] is None:
        print(escape(f"{removed['store']}: {f'would remove {steps}' if steps else 'there are no later steps'}"))
        return
    print(escape(f"{removed['store']}: removed {steps}, recorded as version {removed['version']}"))
    command = f"tstore gc {shlex.quote(removed['store'])} --keep-last 5"
    print(escape(f"the data stays until garbage collection removes the version, for example with {command}"))


def _subject(message: str) -> str:
    text = message.strip()
    subject = text.partition("\n")[0][:_MAX_SUBJECT].rstrip()
    return subject + "…" * (subject != text)


def _tags(commit: Document, voided: Set[int]) -> str:
    tagged = [f"{tag} names {version}" for tag, version in commit["tagged"].items()]
    dropped = [f"{tag} dropped" for tag in commit["dropped"]]
    state = ", which is voided" if commit["source"] in voided else ""
    copied = "" if commit["source"] is None else f" (copy of {commit['source']}{state})"
    expired = " (expired)" if commit["expired"] else ""
    return (abbreviate([*commit["tags"], *tagged, *dropped], _MAX_TAGS) + copied + expired).strip()


def _voided_by(commit: Document) -> list[int]:
    """Return the versions that a repair voided, if the commit is that of a repair."""
    voided = commit["metadata"].get(VOIDED) if commit["transaction"].startswith(REPAIR) else None
    return voided if isinstance(voided, list) else []


def _diff_sqnr(array: Document) -> str:
    """Format the SQNR of an array that differs, where None means that the values before were all zero."""
    if array["largest"] == 0:
        return "exact"
    return "all were zero" if array["sqnr_db"] is None else format_decibels(array["sqnr_db"])


def _field_change(field: str, before: Document, after: Document) -> str:
    """Describe the change of a metadata field; only name the field if it is not shape, chunks, codecs or dtype."""
    if field in ("shape", "chunks"):
        return f"{field} {format_shape(before[field])} → {format_shape(after[field])}"
    if field == "codecs":
        return f"codec {before['codec']} → {after['codec']}"
    return f"{field} {before[field]} → {after[field]}" if field == "dtype" else field
