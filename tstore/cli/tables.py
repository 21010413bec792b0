"""The results of the commands that maintain, move and quantize stores, as sentences and tables.

There is one function for each command. `listings` and `tree` have those of the commands that read a store.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tstore.cli.results import Copied, Exported, Finished, Imported, OfStore, Probed, Quantized, Repaired
from tstore.cli.text import (
    PATH_COLUMN,
    Column,
    Table,
    abbreviate,
    escape,
    format_decibels,
    format_ranges,
    format_size,
    print_rows,
    print_table,
)
from tstore.convert.low_bits import ExportedArray
from tstore.convert.references import reader_options
from tstore.core.format.layout import ARCHIVE_EVERY, archive_end, commit_key
from tstore.core.format.plain_text import pluralize
from tstore.core.maintenance.collect_report import CollectReport
from tstore.core.maintenance.damage import DamagedVersion
from tstore.core.maintenance.verify import VerifyReport
from tstore.quantization.report import QuantizedArray, QuantizeReport

if TYPE_CHECKING:
    from tstore.lab.conformance import Finding

__all__ = [
    "show_benched",
    "show_collected",
    "show_copied",
    "show_demo",
    "show_exported",
    "show_finished",
    "show_imported",
    "show_probed",
    "show_quantized",
    "show_repaired",
    "show_verified",
]

_MAX_SUGGESTED_VERSIONS = 20
_NUMBER = re.compile(r"\b\d[\d,]*\b")
_RECORD = re.compile(r"commits/\d{20}")


def show_finished(finished: Finished) -> None:
    """Print the version of a finished transaction."""
    print(escape(f"transaction {finished.transaction} is committed as version {finished.version}"))


def show_repaired(repaired: Repaired) -> None:
    """Print the damaged versions, those that were voided, and how to void the others."""
    report = repaired.report
    voided = report.voided
    by_reason: dict[tuple[str, str], list[DamagedVersion]] = {}  # with the state
    for d in report.damaged:
        reason = d.reason.replace(commit_key(d.version), "its record")
        by_reason.setdefault(("voided" if d.version in voided else "damaged", reason), []).append(d)
    for (state, reason), alike in by_reason.items():
        versions = f"{_nouns(alike, 'version')} {_ranges([d.version for d in alike])}"
        print(f"{versions} ({state}): {escape(alike[0].reason if len(alike) == 1 else reason)}")
    if report.saved:
        print(f"saved the replaced {_nouns(report.saved, 'record')} as {abbreviate(report.saved)}")
    if report.expired:
        numbers = _ranges(report.expired)
        print(f"expired {numbers}: their data was deleted by a garbage collection that is now voided")
    if voided:
        print(f"voided {_ranges(voided)}; recorded as version {report.version}")
    remaining = [d for d in report.damaged if d.version not in voided]
    if suggested := _suggested(remaining):
        options = " ".join(
            f"--void{'-intact' * d.record_intact} {d.version}" for d in suggested[:_MAX_SUGGESTED_VERSIONS]
        )
        more = " ..." if len(suggested) > _MAX_SUGGESTED_VERSIONS else ""
        print("restore the missing or damaged objects from a copy, or void these versions and lose their changes:")
        print(f"tstore repair {shlex.quote(repaired.store)} {options}{more}")
    elif repaired.void_already:
        print(f"already void: {_ranges(repaired.void_already)}; nothing was committed")
    elif not voided:
        print("no damaged version: every record is intact, and all objects of living versions exist")


def _suggested(damaged: Sequence[DamagedVersion]) -> Sequence[DamagedVersion]:
    """Return the versions to void first; the others may then be intact, or be voided with them."""
    lost = [d for d in damaged if not d.record_intact]
    blocks = [list(block) for _, block in itertools.groupby(lost, lambda d: archive_end(d.version))]
    # a repair that voids one version of a lost archive voids all of them
    return [d for block in blocks for d in (block[:1] if len(block) == ARCHIVE_EVERY else block)] or damaged


def _ranges(versions: Sequence[int]) -> str:
    return abbreviate(format_ranges(versions), 20)


def _nouns(items: Sequence[object], noun: str) -> str:
    return noun if len(items) == 1 else f"{noun}s"


def show_verified(verified: OfStore[VerifyReport]) -> None:
    """Print each fault, the files that do not belong to the store, and the totals."""
    store, report = verified.store, verified.report
    for _, faults in itertools.groupby(report.faults, lambda fault: _RECORD.sub("", fault)):
        first, *others = faults
        print(escape(" ".join(first.split())))
        if others and (last := _RECORD.search(others[-1])) is not None:
            print(f"the same of {pluralize(len(others), 'other record')}, up to {last[0]}")
    if report.unchecked:
        versions = _ranges(report.unchecked)
        print(f"not checked completely, because the record of another version is damaged: {versions}")
    if report.foreign:
        names = abbreviate(report.foreign, 5)
        print(escape(f"{store} contains files that do not belong to the store: {names}"))
    counts = ", ".join(
        pluralize(count, noun)
        for count, noun in ((report.versions, "version"), (report.arrays, "array"), (report.chunks, "chunk"))
    )
    checked = f"{counts}, {format_size(report.bytes)} read and verified"
    verdict = "is intact" if report.ok else f"has {pluralize(len(report.faults), 'fault')}"
    print(escape(f"{store} {verdict}: {checked}"))


def show_collected(collected: OfStore[CollectReport]) -> None:
    """Print what was removed, or what would be."""
    report = collected.report
    remove = "would remove" if report.dry_run else "removed"
    if report.versions:
        tags = f" (tags: {abbreviate(report.tags)})" if report.tags else ""
        print(escape(f"{remove} {_nouns(report.versions, 'version')} {_ranges(sorted(report.versions))}{tags}"))
    if report.abandoned:
        print(escape(f"{remove} the data of abandoned transactions: {abbreviate(report.abandoned)}"))
    recorded = "" if report.version is None else f"; recorded as version {report.version}"
    versions, objects = pluralize(len(report.versions), "version"), pluralize(report.objects, "object")
    print(escape(f"{collected.store}: {remove} {versions}, {objects}, {format_size(report.bytes)}{recorded}"))


def show_copied(copied: Copied) -> None:
    """Print what was copied."""
    report = copied.report
    if not report.commits and not report.objects:
        print(escape(f"{copied.destination} is already at version {report.version}: nothing to copy"))
        return
    present = f"; {pluralize(report.present, 'object')} already present" if report.present else ""
    counts = f"{pluralize(report.commits, 'commit')}, {pluralize(report.objects, 'object')}"
    state = f"{copied.destination} is at version {report.version}"
    print(escape(f"{state}: copied and verified {counts}, {format_size(report.bytes)}{present}"))
    if copied.at is not None:
        kept = f"version {copied.at}" if isinstance(copied.at, int) else copied.at
        only = f"This copy is a separate store that has only {kept}"
        print(escape(f"{only}; to copy later versions too, choose another destination and omit --at"))


def show_probed(probed: Probed) -> None:
    """Print each promise with its outcome, and whether the storage is suitable for a store."""
    table: Table[Finding] = [
        (Column("outcome"), lambda finding: finding.outcome),
        (Column("promise", preferred_width=24), lambda finding: finding.promise),
        (Column("detail", preferred_width=24), lambda finding: finding.detail),
    ]
    print_rows(table, probed.checks)
    verdict = "no fault found" if probed.writable else "it can be read but not written"
    if probed.unknown:
        verdict = f"unknown: {probed.unknown}; free space or wait until the storage responds, and probe again"
    if probed.fails:
        verdict = f"broken promises: {probed.fails}; do not use it for a store"
    print(escape(f"{probed.store}: {verdict} ({probed.holds} hold, {probed.skipped} skipped)"))


def show_benched(report: dict[str, Any]) -> None:
    """Print the measurements, and whether all data was read back."""
    rows = []
    for operation in ("save", "restore"):
        seconds = report[f"{operation}_seconds"]
        median = statistics.median(seconds)
        rate = f"{format_size(report['bytes'] / median)}/s"
        spread = f"; {min(seconds):.3g} to {max(seconds):.3g} s" if len(seconds) > 1 else ""
        rows.append([f"{operation} of one checkpoint", f"{median:.3g} s", f"{rate}{spread}"])
    typical, p99 = (f"{1e3 * report[name]:.3g} ms" for name in ("median_seconds", "p99_seconds"))
    retries = report["retries"] / max(1, report["commits"])
    latency = f"median {typical}, 99th percentile {p99}, {retries:.2f} retries each"
    rows.append(["small commits", f"{report['commits_per_second']:.0f}/s", latency])
    title = f"{pluralize(report['hosts'], 'host')} × {format_size(report['bytes'] / report['hosts'])}"
    print_table([Column(title), Column("median", align_right=True), Column("detail", preferred_width=24)], rows)
    lost, differing = pluralize(report["lost"], "acknowledged commit"), pluralize(report["differing"], "array")
    verdict = f"{lost} lost, {differing} restored with other values"
    if report["ok"]:
        verdict = f"{pluralize(report['commits'], 'acknowledged commit')} and every checkpoint were read back"
    remains = "" if report["removed"] else "; the store could not be removed: delete it by hand"
    print(escape(f"{report['store']}, durability {report['durability']}: {verdict}{remains}"))


def show_imported(imported: Imported) -> None:
    """Print the recognized kind of the source, and what was imported."""
    report = imported.report
    version = f"version {report.version}" + (f" ({imported.tag})" if imported.tag else "")
    summary = _tensor_summary(report.tensors, report.bytes)
    print(escape(f"{imported.store}: imported {summary} from {report.kind.value}, as {version}"))
    if report.left_out:
        print(escape(f"not imported: {abbreviate(report.left_out, 20)}"))


def show_exported(exported: Exported) -> None:
    """Print what was exported, and the leaves that the file format can't represent."""
    report = exported.report
    summary = _tensor_summary(report.tensors, report.bytes)
    summary += f" in {report.files} files" if report.files > 1 else ""
    print(escape(f"{exported.file}: exported {summary}, of version {report.version}"))
    if exported.format == "references":
        options = {"fo": exported.file, **reader_options(exported.store)}
        print(escape(f'to read it: zarr.open_group("reference://", mode="r", storage_options={options})'))
    _show_low_bits(exported)
    if report.has_configuration is False:
        needed = f"from_pretrained also needs the config.json and tokenizer in {exported.file}"
        print(escape(f"no configuration: {needed}"))
    if report.left_out:
        print(escape(f"not exported: {abbreviate(report.left_out, 20)}"))
    if report.unlisted:
        names = abbreviate(report.unlisted, 20)
        print(escape(f"not listed in their groups, because zarr lacks the dtype: {names}"))


def _show_low_bits(exported: Exported) -> None:
    """Print the types of the quantized arrays in the file, and which were decoded or rounded, and why."""
    kept: dict[str, list[str]] = {}
    decoded: dict[str, list[ExportedArray]] = {}
    rounded: dict[str, list[ExportedArray]] = {}
    quantized, keeps_low_bits = exported.report.quantized, exported.layout not in (None, "decoded")
    for a in quantized:
        if a.reason and a.changed == 0:
            decoded.setdefault(_NUMBER.sub("…", a.reason), []).append(a)
        elif exported.format == "gguf" or keeps_low_bits:
            kept.setdefault(a.written_as, []).append(a.name)
    for kind, names in kept.items():
        print(escape(f"{pluralize(len(names), 'quantized array')} as {kind}: {abbreviate(names, 3)}"))
    for a in quantized:
        if a.changed is None:
            rounded.setdefault(f"{a.written_as} {_NUMBER.sub('…', a.reason)}", []).append(a)
        elif a.changed:
            print(escape(f"rounded to {a.written_as}: {a.changed:,} values of {a.name}"))
    for verb, groups in (("rounded to {}", rounded), ("decoded", decoded)):
        for each in groups.values():
            print(escape(f"{verb.format(each[0].written_as)} {_reasons(each)}"))
    if quantized and not kept and not decoded:
        count = pluralize(len(quantized), "quantized array")
        print(f"decoded {count}; --layout compressed-tensors or --layout fp8 keeps low bits")
    if keeps_low_bits and not quantized:
        print(
            f"version {exported.report.version} has no quantized arrays, so nothing is in low bits; pass the tag "
            "of a quantized copy as --at"
        )


def _reasons(arrays: list[ExportedArray]) -> str:
    """Return the reason that arrays have in common, with "…" for numbers that differ, and their names."""
    reasons = {a.reason for a in arrays}
    reason = _NUMBER.sub("…", arrays[0].reason) if len(reasons) > 1 else arrays[0].reason
    return f"({reason}): {abbreviate([a.name for a in arrays], 3)}"


def show_quantized(quantized: Quantized) -> None:
    """Print a row for each array, the reasons why some were not quantized, and the totals."""
    table: Table[QuantizedArray] = [
        (PATH_COLUMN, lambda a: a.path),
        (Column("format"), lambda a: a.format or "unchanged"),
        (Column("coding", rank=1), _coding),
        (Column("before", align_right=True, rank=2), lambda a: format_size(a.bytes_before)),
        (Column("after", align_right=True), lambda a: format_size(a.bytes_after)),
        (Column("bits/value", align_right=True, rank=5), lambda a: f"{a.bits_per_value:.2f}"),
        (Column("SQNR", align_right=True), lambda a: _quantized_sqnr(a) if a.format else ""),
        (
            Column("max error", align_right=True, rank=4),
            lambda a: _number(a.largest_error) if a.format else "",
        ),
        (Column("clipped", align_right=True, rank=3), lambda a: _percent(a.clipped) if a.format else ""),
    ]
    report = quantized.report
    print_rows(table, report.arrays)
    unchanged: dict[str, list[str]] = {}
    for a in report.arrays:
        if a.reason:
            unchanged.setdefault(a.reason, []).append(a.path)
    for reason, paths in unchanged.items():
        print(escape(f"not quantized ({reason}): {abbreviate(paths, 3)}"))
    print(
        escape(
            f"version {report.version} ({report.tag}), from version {report.source}: "
            f"{format_size(report.bytes_before)} → {format_size(report.bytes_after)}, "
            f"{report.bits_per_value:.2f} bits/value, SQNR {_quantized_sqnr(report)}, "
            f"max error {_number(report.largest_error)}, {_percent(report.clipped)} clipped"
        )
    )
    if quantized.plot:
        print(escape(f"wrote {quantized.plot}"))


def _coding(array: QuantizedArray) -> str:
    """Describe how the codes of an array are stored, and for packed codes which values share an offset."""
    return "entropy" if array.coding == "entropy" else f"packed, {array.granularity}" * bool(array.coding)


def show_demo(report: dict[str, Any]) -> None:
    """Print a row for each commit, and what to try next."""
    table: Table[dict[str, Any]] = [
        (Column("version", align_right=True), lambda c: str(c["version"])),
        (Column("tag", preferred_width=11), lambda c: c["tag"]),
        (Column("added", align_right=True), lambda c: format_size(c["bytes_added"])),
        (Column("stored", align_right=True, rank=1), lambda c: format_size(c["bytes_stored"])),
        (Column("bits/value", align_right=True), lambda c: f"{c['bits_per_value']:.2f}"),
        (
            Column("SQNR", align_right=True),
            lambda c: "exact" if c["sqnr_db"] is None else format_decibels(c["sqnr_db"]),
        ),
        (Column("seconds", align_right=True, rank=2), lambda c: f"{c['seconds']:.2f}"),
        (Column("GB/s", align_right=True), lambda c: f"{c['gb_per_s']:.2f}"),
    ]
    print_rows(table, report["commits"])
    restored = report["restored"]
    print(
        f"restored on {restored['hosts']} hosts: {format_size(restored['bytes'])} in {restored['seconds']:.2f} s, "
        f"{restored['gb_per_s']:.2f} GB/s; the whole demo took {report['seconds']:.1f} s"
    )
    print(escape(f"\nThe store remains in {report['store']}. Try next:"))
    for command in report["try_next"]:
        print(escape(f"  {command}"))


def _tensor_summary(tensors: int, size: int) -> str:
    return f"{pluralize(tensors, 'tensor')}, {format_size(size)}"


def _quantized_sqnr(row: QuantizedArray | QuantizeReport) -> str:
    """Format the SQNR of an array or of all, which is not finite for an exact copy and if a sum overflows."""
    if math.isfinite(row.sqnr):
        return format_decibels(row.sqnr)
    return "exact" if row.largest_error == 0 else "unknown"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def _percent(part: float) -> str:
    return f"{100 * part:.3g}%"
