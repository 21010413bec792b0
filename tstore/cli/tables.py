"""What the command line shows to people: reports as text and tables, and progress.

The reports are the documents that `--json` prints. Whatever comes from a store or a file is shown with its
control characters escaped.
"""

from __future__ import annotations

import datetime
import statistics
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

__all__ = [
    "Progress",
    "plain",
    "show_benched",
    "show_collected",
    "show_copied",
    "show_demo",
    "show_diff",
    "show_exported",
    "show_finished",
    "show_imported",
    "show_log",
    "show_ls",
    "show_probed",
    "show_quantized",
    "show_transactions",
    "show_verified",
    "sized",
]

Document = Mapping[str, Any]
_PIPE_WIDTH = 100_000


_SHOWN_NAMES = 5


def plain(text: str) -> str:
    """The text with control characters escaped, line breaks apart."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def sized(size: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class Progress:
    """What goes on, on standard error where that is a terminal and nowhere else; facts on standard output."""

    def __init__(self, facts: bool = False) -> None:
        self._facts = facts
        self._console = Console(stderr=True, markup=False, emoji=False) if sys.stderr.isatty() else None
        self._status: Status | None = None

    def doing(self, what: str) -> None:
        """Something begins that takes a while."""
        if self._console is None:
            return
        if self._status is None:
            self._status = self._console.status(Text(plain(what)))
            self._status.start()
        else:
            self._status.update(Text(plain(what)))

    def done(self, what: str) -> None:
        """Something was shown; a line of the output where facts were asked for."""
        self.stop()
        if self._facts:
            print("•", plain(what), flush=True)

    def stop(self) -> None:
        """Takes the line of progress away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def show_log(found: Document) -> None:
    """The commits, newest first."""
    heads = ["version", "tag", "time", "added", "message"]
    rows = [
        [
            str(c["version"]),
            ", ".join([*c["tags"], *(f"{tag} dropped" for tag in c["dropped"])]) + " (expired)" * c["expired"],
            _local(c["time"]),
            sized(c["bytes_added"]),
            c["message"],
        ]
        for c in found["commits"]
    ]
    if any(c["base"] < c["version"] - 1 for c in found["commits"]):  # others committed meanwhile
        heads.insert(1, "base")
        for row, c in zip(rows, found["commits"], strict=True):
            row.insert(1, str(c["base"]))
    _table(heads, rows, right={0, 1, 4} if "base" in heads else {0, 3})


def show_diff(found: Document) -> None:
    """One row for each array that differs, and their number."""
    rows = []
    for a in found["arrays"]:
        before, after = a["before"], a["after"]
        what = a["change"]
        if what == "changed":
            parts = [_changed(field, before, after) for field in a["fields"]]
            what = ", ".join(parts) or "values"
        else:
            info = before or after
            what += f": {info['dtype']} {_shape(info['shape'])}, {sized(info['stored_bytes'])}"
        row = [a["path"], what, str(a["chunks"])]
        if a["values_compared"]:
            row += ["not finite", ""] if a["largest"] is None else [f"{a['largest']:.3g}", _ratio(a)]
        rows.append([*row, *[""] * (5 - len(row))])
    if rows:
        _table(["path", "what", "chunks", "max difference", "SQNR"], rows, right={2, 3, 4})
    changes = [a["change"] for a in found["arrays"]]
    counts = ", ".join(f"{changes.count(c)} {c}" for c in ("added", "removed", "changed"))
    groups = f"; groups: {', '.join(g or '/' for g in found['groups'])}" if found["groups"] else ""
    print(plain(f"version {found['before']} → version {found['after']}: {counts}{groups}"))


def show_ls(found: Document) -> None:
    """The arrays of a version and their totals."""
    rows = [
        [
            a["path"],
            a["dtype"],
            _shape(a["shape"]),
            _shape(a["chunks"]),
            a["codec"],
            sized(a["stored_bytes"]),
            f"{a['bits_per_value']:.2f}",
        ]
        for a in found["arrays"]
    ]
    heads = ["path", "dtype", "shape", "chunks", "codec", "stored", "bits/value"]
    if rows:
        _table(heads, rows, right={5, 6})
    total = found["total"]
    tags = f" ({', '.join(found['tags'])})" if found["tags"] else ""
    print(
        plain(
            f"version {found['version']}{tags}: {total['arrays']} arrays, {total['values']:,} values, "
            f"{sized(total['stored_bytes'])} stored, {total['bits_per_value']:.2f} bits/value"
        )
    )


def show_transactions(found: Document) -> None:
    """The cooperative transactions under way: who has delivered, who is missing, who was heard of last."""
    rows = [
        [
            t["transaction"],
            t["name"],
            f"{len(t['delivered'])} of {t['hosts']}",
            _few(t["absent"]) or "nobody: tstore finish commits it",
            f"{min(t['heartbeats'].values()):.0f} s ago" if t["heartbeats"] else "never",
        ]
        for t in found["transactions"]
    ]
    if rows:
        _table(["transaction", "name", "delivered", "missing hosts", "last heartbeat"], rows, right=set())
    print(plain(f"{found['store']}: {len(rows)} cooperative transactions under way"))


def show_finished(found: Document) -> None:
    """The version that a transaction became."""
    print(plain(f"transaction {found['transaction']} is committed as version {found['version']}"))


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, … ({len(numbers)})" if len(numbers) > 8 else shown


def show_verified(found: Document) -> None:
    """One line for each fault, or one line of what was checked; one more if other files lie in the store."""
    for fault in found["faults"]:
        print(plain(" ".join(fault.split())))
    if found["foreign"]:
        names, more = found["foreign"][:_SHOWN_NAMES], len(found["foreign"]) - _SHOWN_NAMES
        shown = ", ".join(names) + (f" and {more} more" if more > 0 else "")
        print(plain(f"{found['store']} holds files that are not tstore's, which nothing reads: {shown}"))
    if found["ok"]:
        print(
            plain(
                f"{found['store']} is whole: {found['versions']} versions, {found['arrays']} arrays, "
                f"{found['chunks']} chunks, {sized(found['bytes'])} read and checked"
            )
        )


def show_collected(found: Document) -> None:
    """What was removed, or would be."""
    would = "would go" if found["dry_run"] else "went"
    if found["versions"]:
        tags = f" ({', '.join(found['tags'])})" if found["tags"] else ""
        print(plain(f"versions {', '.join(map(str, found['versions']))}{tags} expire"))
    if found["abandoned"]:
        print(plain(f"abandoned transactions: {', '.join(found['abandoned'])}"))
    count = f"{len(found['versions'])} versions, {len(found['transactions'])} transactions"
    by = "" if found["version"] is None else f", by version {found['version']}"
    print(plain(f"{found['store']}: {count}, {found['objects']} objects, {sized(found['bytes'])} {would}{by}"))


def show_copied(found: Document) -> None:
    """What was moved, and what was there already."""
    there = f", {found['present']} were there already" if found["present"] else ""
    print(
        plain(
            f"{found['destination']} has version {found['version']}: {found['commits']} commits, "
            f"{found['objects']} objects, {sized(found['bytes'])} copied and checked{there}"
        )
    )


def show_probed(found: Document) -> None:
    """One row for each promise, and what follows for a store."""
    rows = [[c["outcome"], c["promise"], c["detail"]] for c in found["checks"]]
    _table(["", "promise", "what was found"], rows, right=set())
    verdict = "no fault was found" if found["writable"] else "it can be read, and not written"
    if found["unknown"]:
        verdict = f"unknown: {found['unknown']}; make room there, or wait until it answers, and probe again"
    if found["fails"]:
        verdict = f"broken promises: {found['fails']}; write no store here"
    print(plain(f"{found['url']}: {verdict} ({found['holds']} hold, {found['skipped']} could not be judged)"))


def show_benched(found: Document) -> None:
    """One row for each thing that was measured, and whether all came back."""
    rows = []
    for what in ("save", "restore"):
        took = found[f"{what}_seconds"]
        middle = statistics.median(took)
        spread = f"{sized(found['bytes'] / middle)}/s; {min(took):.3g} to {max(took):.3g} s in {len(took)} rounds"
        rows.append([f"{what}, together", f"{middle:.3g} s", spread])
    each, most = (f"{1e3 * found[name]:.3g} ms" for name in ("median_seconds", "p99_seconds"))
    again = found["retries"] / max(1, found["commits"])
    spread = f"{each} each, 1 of 100 more than {most}; {again:.2f} retries"
    rows.append(["small commits, each its own", f"{found['commits_per_second']:.0f}/s", spread])
    _table([f"{found['hosts']} × {sized(found['bytes'] / found['hosts'])}", "median", ""], rows, right={1})
    verdict = f"all {found['commits']} acknowledged commits are there, and every checkpoint came back the same"
    if not found["ok"]:
        verdict = f"{found['lost']} acknowledged commits are lost, {found['differing']} arrays came back different"
    rest = "" if found["removed"] else "; the store could not be removed, delete it there"
    print(plain(f"{found['url']}, durability {found['durability']}: {verdict}{rest}"))


def show_imported(found: Document) -> None:
    """What was imported."""
    print(plain(f"version {found['version']} ({found['tag']}) of {found['store']}: {_tensors(found)}"))


def show_exported(found: Document) -> None:
    """What was exported, and what the file could not hold."""
    print(plain(f"{found['file']}: {_tensors(found)} of version {found['version']}"))
    if found["left_out"]:
        print(plain(f"left out, being no arrays: {', '.join(found['left_out'])}"))


def show_quantized(found: Document) -> None:
    """One row for each array, the reasons of those that were kept, and the whole."""
    rows = []
    for a in found["arrays"]:
        row = [a["path"], a["format"] or "kept", a["granularity"]]
        row += [sized(a["bytes_before"]), sized(a["bytes_after"]), f"{a['bits_per_value']:.2f}"]
        if a["format"]:
            row += [_decibel(a["sqnr_db"]), _number(a["largest_error"]), _share(a["clipped"])]
        rows.append([*row, *[""] * (9 - len(row))])
    heads = ["path", "format", "offset per", "before", "after", "bits/value", "SQNR", "max error", "clipped"]
    _table(heads, rows, right={3, 4, 5, 6, 7, 8})
    reasons: dict[str, list[str]] = {}
    for a in found["arrays"]:
        if a["reason"]:
            reasons.setdefault(a["reason"], []).append(a["path"])
    for reason, paths in reasons.items():
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        print(plain(f"kept as they are ({reason}): {', '.join(paths[:3])}{more}"))
    total = found["total"]
    print(
        plain(
            f"version {found['version']} ({found['tag']}), from version {found['source']}: "
            f"{sized(total['bytes_before'])} → {sized(total['bytes_after'])}, "
            f"{total['bits_per_value']:.2f} bits/value, SQNR {_decibel(total['sqnr_db'])}, "
            f"max error {_number(total['largest_error'])}, {_share(total['clipped'])} clipped"
        )
    )


def show_demo(found: Document) -> None:
    """One row for each commit, and what to try next."""
    rows = [
        [
            str(c["version"]),
            c["tag"],
            sized(c["bytes_added"]),
            sized(c["bytes_stored"]),
            f"{c['bits_per_value']:.2f}",
            _decibel(c["sqnr_db"]),
            f"{c['seconds']:.2f}",
            f"{c['gb_per_s']:.2f}",
        ]
        for c in found["commits"]
    ]
    heads = ["version", "tag", "added", "stored", "bits/value", "SQNR", "seconds", "GB/s"]
    _table(heads, rows, right={0, 2, 3, 4, 5, 6, 7})
    restored = found["restored"]
    print(
        f"restored on {restored['hosts']} hosts: {sized(restored['bytes'])} in {restored['seconds']:.2f} s, "
        f"{restored['gb_per_s']:.2f} GB/s; all in {found['seconds']:.1f} s"
    )
    print(plain(f"\nThe store is kept in {found['store']}. Try next:"))
    for command in found["try_next"]:
        print(plain(f"  {command}"))


def _tensors(found: Document) -> str:
    return f"{found['tensors']} tensors, {sized(found['bytes'])}"


def _decibel(sqnr: float | None) -> str:
    return "exact" if sqnr is None else f"{sqnr:.1f} dB"


def _ratio(array: Document) -> str:
    if array["largest"] == 0:
        return "exact"
    return "no signal" if array["sqnr_db"] is None else f"{array['sqnr_db']:.1f} dB"


def _changed(field: str, before: Document, after: Document) -> str:
    """What became of one field of an array's metadata."""
    if field in ("shape", "chunks"):
        return f"{field} {_shape(before[field])} → {_shape(after[field])}"
    if field == "codecs":
        return f"codec {before['codec']} → {after['codec']}"
    return f"{field} {before[field]} → {after[field]}" if field == "dtype" else field


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3g}"


def _share(part: float) -> str:
    return f"{100 * part:.3g}%"


def _shape(lengths: Sequence[int]) -> str:
    return "×".join(map(str, lengths)) or "scalar"


def _local(time: str) -> str:
    return datetime.datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)  # the demo's fits in 80 columns
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(plain(cell)) for cell in row])
    if sys.stdout.isatty():
        Console(markup=False, emoji=False, highlight=False).print(table)
        return
    console = Console(width=_PIPE_WIDTH, markup=False, emoji=False, highlight=False)  # paths are never cut
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        if line.strip():
            print(line.rstrip())
