"""The readable form of each command's JSON document: sentences and tables, one function per command."""

from __future__ import annotations

import datetime
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tstore.cli.text import Column, counted, plain, print_table, ranges, shortened, sized

__all__ = [
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
    "show_pending",
    "show_probed",
    "show_quantized",
    "show_repaired",
    "show_verified",
]

Document = Mapping[str, Any]

_VOIDED_AT_ONCE = 20
_PATH = Column("path", min_width=40)


def show_log(log: Document) -> None:
    """Print the commits, newest first."""
    columns = [
        Column("version", right=True),
        Column("base", right=True, rank=1),
        Column("tag", min_width=16),
        Column("time"),
        Column("added", right=True, rank=2),
        Column("message", min_width=16),
    ]
    rows = [
        [
            str(c["version"]),
            str(c["base"]),
            ", ".join([*c["tags"], *(f"{tag} dropped" for tag in c["dropped"])]) + " (expired)" * c["expired"],
            _local(c["time"]),
            sized(c["bytes_added"]),
            c["message"],
        ]
        for c in log["commits"]
    ]
    if all(c["base"] >= c["version"] - 1 for c in log["commits"]):  # no concurrent transactions: bases are obvious
        del columns[1]
        for row in rows:
            del row[1]
    if rows:
        print_table(columns, rows)
    else:
        print(plain(f"{log['store']}: no commits yet"))


def show_diff(diff: Document) -> None:
    """Print a row for each array that differs, and the counts."""
    rows = []
    for a in diff["arrays"]:
        before, after = a["before"], a["after"]
        change = a["change"]
        if change == "changed":
            change = ", ".join(_field_change(field, before, after) for field in a["fields"]) or "values"
        else:
            info = before or after
            change += f": {info['dtype']} {_shape(info['shape'])}, {sized(info['stored_bytes'])}"
        row = [a["path"], change, f"{a['chunks']:,}"]
        if a["values_compared"]:
            row += ["not finite", ""] if a["largest"] is None else [f"{a['largest']:.3g}", _diff_sqnr(a)]
        rows.append([*row, *[""] * (5 - len(row))])
    if rows:
        columns = [
            _PATH,
            Column("change", min_width=16),
            Column("chunks", right=True, rank=1),
            Column("max difference", right=True, rank=2),
            Column("SQNR", right=True),
        ]
        print_table(columns, rows)
    changes = [a["change"] for a in diff["arrays"]]
    added, removed, changed = (changes.count(c) for c in ("added", "removed", "changed"))
    counts = f"{counted(added, 'array')} added, {removed} removed, {changed} changed"
    groups = f"; groups changed: {shortened([g or '/' for g in diff['groups']])}" if diff["groups"] else ""
    print(plain(f"version {diff['before']} → version {diff['after']}: {counts}{groups}"))


def show_ls(listing: Document) -> None:
    """Print the arrays of a version and their totals."""
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
        for a in listing["arrays"]
    ]
    if rows:
        columns = [
            _PATH,
            Column("dtype", rank=2),
            Column("shape"),
            Column("chunks", rank=1),
            Column("codec", min_width=8),
            Column("stored", right=True),
            Column("bits/value", right=True, rank=3),
        ]
        print_table(columns, rows)
    total = listing["total"]
    tags = f" ({', '.join(listing['tags'])})" if listing["tags"] else ""
    sizes = f"{counted(total['values'], 'value')}, {sized(total['stored_bytes'])} stored"
    rate = f", {total['bits_per_value']:.2f} bits/value" if total["values"] else ""
    print(plain(f"version {listing['version']}{tags}: {counted(total['arrays'], 'array')}, {sizes}{rate}"))


def show_pending(pending: Document) -> None:
    """Print the uncommitted cooperative transactions with their missing hosts and last heartbeats."""
    rows = [
        [
            t["transaction"],
            t["name"],
            f"{len(t['delivered'])} of {t['hosts']}",
            shortened(ranges(t["absent"])) or "none (run tstore finish)",
            f"{min(t['heartbeats'].values()):.0f} s ago" if t["heartbeats"] else "never",
        ]
        for t in pending["pending"]
    ]
    if rows:
        columns = [
            Column("transaction"),
            Column("name", min_width=8, rank=1),
            Column("delivered"),
            Column("missing hosts", min_width=13),
            Column("last heartbeat", rank=2),
        ]
        print_table(columns, rows)
    print(plain(f"{pending['store']}: {counted(len(rows), 'cooperative transaction')} not committed yet"))


def show_finished(finished: Document) -> None:
    """Print the version of a finished transaction."""
    print(plain(f"transaction {finished['transaction']} is committed as version {finished['version']}"))


def show_repaired(document: Document) -> None:
    """Print the damaged versions, those that were voided, and how to void the others."""
    for damage in document["damaged"]:
        state = "voided" if damage["version"] in document["voided"] else "damaged"
        print(f"version {damage['version']} ({state}): {plain(damage['reason'])}")
    for key in document["saved"]:
        print(f"saved the replaced record as {key}")
    left = [damage for damage in document["damaged"] if damage["version"] not in document["voided"]]
    left = [damage for damage in left if not damage["readable"]] or left  # the others may be whole after these
    if document["expired"]:
        print(f"expired {', '.join(map(str, document['expired']))}: a voided garbage collection had deleted data")
    if document["voided"]:
        numbers = ", ".join(map(str, document["voided"]))
        print(f"voided {numbers}; recorded as version {document['version']}")
    if left:
        options = " ".join(f"--void{'-readable' * d['readable']} {d['version']}" for d in left[:_VOIDED_AT_ONCE])
        more = " ..." if len(left) > _VOIDED_AT_ONCE else ""
        print("restore the missing or damaged objects from a copy, or void these versions and lose their changes:")
        print(f"tstore repair {shlex.quote(document['store'])} {options}{more}")
    elif not document["voided"]:
        print("no damaged version: every record is readable, and all objects of living versions exist")


def show_verified(report: Document) -> None:
    """Print each fault, the files that do not belong to the store, and the totals."""
    for fault in report["faults"]:
        print(plain(" ".join(fault.split())))
    if report["unchecked"]:
        versions = shortened(ranges(report["unchecked"]), 20)
        print(f"not checked completely, because the record of another version is damaged: {versions}")
    if report["foreign"]:
        names = shortened(report["foreign"], 5)
        print(plain(f"{report['store']} contains files that do not belong to the store: {names}"))
    counts = ", ".join(counted(report[f"{noun}s"], noun) for noun in ("version", "array", "chunk"))
    checked = f"{counts}, {sized(report['bytes'])} read and verified"
    verdict = "is intact" if report["ok"] else f"has {counted(len(report['faults']), 'fault')}"
    print(plain(f"{report['store']} {verdict}: {checked}"))


def show_collected(report: Document) -> None:
    """Print what was removed, or what would be."""
    remove = "would remove" if report["dry_run"] else "removed"
    if report["versions"]:
        noun = "version" if len(report["versions"]) == 1 else "versions"
        tags = f" (tags: {shortened(report['tags'])})" if report["tags"] else ""
        print(plain(f"{remove} {noun} {shortened(ranges(sorted(report['versions'])), 20)}{tags}"))
    if report["abandoned"]:
        print(plain(f"{remove} the data of abandoned transactions: {shortened(report['abandoned'])}"))
    by = "" if report["version"] is None else f"; recorded as version {report['version']}"
    versions, objects = counted(len(report["versions"]), "version"), counted(report["objects"], "object")
    print(plain(f"{report['store']}: {remove} {versions}, {objects}, {sized(report['bytes'])}{by}"))


def show_copied(report: Document) -> None:
    """Print what was copied."""
    if not report["commits"] and not report["objects"]:
        print(plain(f"{report['destination']} is at version {report['version']} already: nothing to copy"))
        return
    present = f"; {counted(report['present'], 'object')} already present" if report["present"] else ""
    counts = f"{counted(report['commits'], 'commit')}, {counted(report['objects'], 'object')}"
    print(
        plain(
            f"{report['destination']} is at version {report['version']}: copied and verified {counts}, "
            f"{sized(report['bytes'])}{present}"
        )
    )


def show_probed(report: Document) -> None:
    """Print each promise with its outcome, and whether the storage is suitable for a store."""
    rows = [[c["outcome"], c["promise"], c["detail"]] for c in report["checks"]]
    print_table([Column("outcome"), Column("promise", min_width=24), Column("detail", min_width=24)], rows)
    verdict = "no fault found" if report["writable"] else "it can be read but not written"
    if report["unknown"]:
        verdict = f"unknown: {report['unknown']}; free space or wait until the storage responds, and probe again"
    if report["fails"]:
        verdict = f"broken promises: {report['fails']}; do not use it for a store"
    print(plain(f"{report['url']}: {verdict} ({report['holds']} hold, {report['skipped']} skipped)"))


def show_benched(report: Document) -> None:
    """Print the measurements, and whether all data was read back."""
    rows = []
    for operation in ("save", "restore"):
        seconds = report[f"{operation}_seconds"]
        median = statistics.median(seconds)
        rate = f"{sized(report['bytes'] / median)}/s"
        spread = f"; {min(seconds):.3g} to {max(seconds):.3g} s" if len(seconds) > 1 else ""
        rows.append([f"{operation} of one checkpoint", f"{median:.3g} s", f"{rate}{spread}"])
    each, slow = (f"{1e3 * report[name]:.3g} ms" for name in ("median_seconds", "p99_seconds"))
    retries = report["retries"] / max(1, report["commits"])
    spread = f"median {each}, 99th percentile {slow}, {retries:.2f} retries each"
    rows.append(["small commits", f"{report['commits_per_second']:.0f}/s", spread])
    title = f"{counted(report['hosts'], 'host')} × {sized(report['bytes'] / report['hosts'])}"
    print_table([Column(title), Column("median", right=True), Column("detail", min_width=24)], rows)
    lost, differing = counted(report["lost"], "acknowledged commit"), counted(report["differing"], "array")
    verdict = f"{lost} lost, {differing} restored with other values"
    if report["ok"]:
        verdict = f"{counted(report['commits'], 'acknowledged commit')} and every checkpoint were read back"
    remains = "" if report["removed"] else "; the store could not be removed: delete it by hand"
    print(plain(f"{report['url']}, durability {report['durability']}: {verdict}{remains}"))


def show_imported(report: Document) -> None:
    """Print what was imported."""
    print(
        plain(f"{report['store']}: imported {_tensors(report)} as version {report['version']} ({report['tag']})")
    )


def show_exported(report: Document) -> None:
    """Print what was exported, and the leaves that the file format can't represent."""
    print(plain(f"{report['file']}: exported {_tensors(report)} of version {report['version']}"))
    if report["left_out"]:
        print(plain(f"not exported, because they are not arrays: {shortened(report['left_out'], 20)}"))


def show_quantized(report: Document) -> None:
    """Print a row for each array, the reasons why some were not quantized, and the totals."""
    rows = []
    for a in report["arrays"]:
        row = [a["path"], a["format"] or "unchanged", a["granularity"]]
        row += [sized(a["bytes_before"]), sized(a["bytes_after"]), f"{a['bits_per_value']:.2f}"]
        if a["format"]:
            row += [_measured(a), _number(a["largest_error"]), _percent(a["clipped"])]
        rows.append([*row, *[""] * (9 - len(row))])
    columns = [
        _PATH,
        Column("format"),
        Column("offset per", rank=1),
        Column("before", right=True, rank=2),
        Column("after", right=True),
        Column("bits/value", right=True, rank=5),
        Column("SQNR", right=True),
        Column("max error", right=True, rank=4),
        Column("clipped", right=True, rank=3),
    ]
    if rows:
        print_table(columns, rows)
    unchanged: dict[str, list[str]] = {}
    for a in report["arrays"]:
        if a["reason"]:
            unchanged.setdefault(a["reason"], []).append(a["path"])
    for reason, paths in unchanged.items():
        print(plain(f"not quantized ({reason}): {shortened(paths, 3)}"))
    total = report["total"]
    print(
        plain(
            f"version {report['version']} ({report['tag']}), from version {report['source']}: "
            f"{sized(total['bytes_before'])} → {sized(total['bytes_after'])}, "
            f"{total['bits_per_value']:.2f} bits/value, SQNR {_measured(total)}, "
            f"max error {_number(total['largest_error'])}, {_percent(total['clipped'])} clipped"
        )
    )
    if report["plot"]:
        print(plain(f"wrote {report['plot']}"))


def show_demo(report: Document) -> None:
    """Print a row for each commit, and what to try next."""
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
        for c in report["commits"]
    ]
    columns = [
        Column("version", right=True),
        Column("tag", min_width=11),
        Column("added", right=True),
        Column("stored", right=True, rank=1),
        Column("bits/value", right=True),
        Column("SQNR", right=True),
        Column("seconds", right=True, rank=2),
        Column("GB/s", right=True),
    ]
    print_table(columns, rows)
    restored = report["restored"]
    print(
        f"restored on {restored['hosts']} hosts: {sized(restored['bytes'])} in {restored['seconds']:.2f} s, "
        f"{restored['gb_per_s']:.2f} GB/s; the whole demo took {report['seconds']:.1f} s"
    )
    print(plain(f"\nThe store remains in {report['store']}. Try next:"))
    for command in report["try_next"]:
        print(plain(f"  {command}"))


def _tensors(report: Document) -> str:
    return f"{counted(report['tensors'], 'tensor')}, {sized(report['bytes'])},"


def _decibel(sqnr: float | None) -> str:
    return "exact" if sqnr is None else f"{sqnr:.1f} dB"


def _measured(row: Document) -> str:
    """Format the SQNR of a row of a quantization report, where None stands for infinity or NaN."""
    if row["sqnr_db"] is None:
        return "exact" if row["largest_error"] == 0 else "unknown"
    return f"{row['sqnr_db']:.1f} dB"


def _diff_sqnr(array: Document) -> str:
    if array["largest"] == 0:
        return "exact"
    return "all were zero" if array["sqnr_db"] is None else f"{array['sqnr_db']:.1f} dB"


def _field_change(field: str, before: Document, after: Document) -> str:
    """Describe the change of one metadata field of an array."""
    if field in ("shape", "chunks"):
        return f"{field} {_shape(before[field])} → {_shape(after[field])}"
    if field == "codecs":
        return f"codec {before['codec']} → {after['codec']}"
    return f"{field} {before[field]} → {after[field]}" if field == "dtype" else field


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3g}"


def _percent(part: float) -> str:
    return f"{100 * part:.3g}%"


def _shape(lengths: Sequence[int]) -> str:
    return "×".join(map(str, lengths)) or "scalar"


def _local(time: str) -> str:
    return datetime.datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
