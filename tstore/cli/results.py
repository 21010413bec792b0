"""The typed results of commands, which are printed as tables or as JSON.

A field `report` has the library's own report. In JSON its keys are merged into those of the result, with `ok`
if it has one.
"""

from __future__ import annotations

import datetime
import enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tstore.convert.exporting import ExportReport
    from tstore.convert.importing import ImportReport
    from tstore.core.copying.copy import CopyReport
    from tstore.core.log.history import Commit
    from tstore.core.maintenance.contents import DetailedListing
    from tstore.core.maintenance.diff import Diff
    from tstore.core.maintenance.repair import RepairReport
    from tstore.core.transactions.pending import PendingTransaction
    from tstore.lab.conformance import Finding
    from tstore.quantization.report import QuantizeReport

__all__ = [
    "Compared",
    "Copied",
    "Exported",
    "Finished",
    "Imported",
    "Log",
    "OfStore",
    "Pending",
    "Probed",
    "Quantized",
    "Removed",
    "RemovedStep",
    "Repaired",
    "Scalar",
    "ScalarChange",
    "Tag",
    "Tagged",
    "Tags",
    "Tree",
    "is_ok",
    "json_of",
]


R = TypeVar("R")


class OfStore(Struct, Generic[R]):
    """The report of a command about a store."""

    store: str
    report: R


class Log(Struct):
    """The result of `tstore log`."""

    store: str
    commits: list[Commit]
    has_older: bool


class Pending(Struct):
    """The result of `tstore ls --pending`."""

    store: str
    pending: list[PendingTransaction]


class Scalar(Struct):
    """A Python scalar of a saved tree, with its value as text."""

    path: str
    dtype: str
    value: str


class Tree(Struct):
    """The result of `tstore show`."""

    store: str
    depth: int | None
    report: DetailedListing
    scalars: list[Scalar]


class ScalarChange(Struct):
    """A Python scalar that differs between two versions, with its values as text; None where it is absent."""

    path: str
    before: str | None
    after: str | None


class Compared(Struct):
    """The result of `tstore diff`; `groups` are those of the report that people see as changed."""

    store: str
    report: Diff
    groups: list[str]
    scalars: list[ScalarChange]


class Tag(Struct):
    """A tag and the version that it names."""

    tag: str
    version: int


class Tags(Struct):
    """The result of `tstore tag`."""

    store: str
    tags: list[Tag]


class Tagged(Struct):
    """The result of `tstore tag NAME`: the tag names `target`, or was dropped from the version `dropped`."""

    store: str
    tag: str
    target: int | None
    version: int
    dropped: int | None


class RemovedStep(Struct):
    """A step that was removed, or would be."""

    step: int
    version: int
    bytes_added: int


class Removed(Struct):
    """The result of `tstore rm`."""

    store: str
    removed: list[RemovedStep]
    version: int | None
    dry_run: bool


class Quantized(Struct):
    """The result of `tstore quantize` and of `tstore report`."""

    store: str
    report: QuantizeReport
    plot: str | None


class Repaired(Struct):
    """The result of `tstore repair`."""

    store: str
    report: RepairReport
    void_already: list[int]


class Exported(Struct):
    """The result of `tstore export`."""

    store: str
    file: str
    format: str
    layout: str | None
    report: ExportReport


class Imported(Struct):
    """The result of `tstore import`."""

    store: str
    tag: str | None
    report: ImportReport


class Copied(Struct):
    """The result of `tstore copy`."""

    source: str
    destination: str
    at: int | str | None
    report: CopyReport


class Finished(Struct):
    """The result of `tstore finish`."""

    store: str
    transaction: str
    version: int


class Probed(Struct):
    """The result of `tstore probe`."""

    store: str
    ok: bool
    writable: bool
    holds: int
    fails: int
    skipped: int
    unknown: int
    checks: list[Finding]


def json_of(value: Any) -> Any:
    """Return a result as JSON values: its `document()` if it has one, else its fields."""
    if hasattr(value, "document"):
        return value.document()
    if isinstance(value, Struct) or hasattr(value, "_asdict"):
        names = value.__struct_fields__ if isinstance(value, Struct) else value._fields
        return _merged({name: getattr(value, name) for name in names})
    if isinstance(value, dict):
        return {key: json_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_of(each) for each in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return value.value if isinstance(value, enum.Enum) else value


def _merged(fields: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in fields.items():
        if name != "report":
            document[name] = json_of(value)
        else:
            document |= ({"ok": value.ok} if hasattr(value, "ok") else {}) | json_of(value)
    return document


def is_ok(result: Any) -> bool:
    """Return whether neither a result nor its report contains a fault."""
    return getattr(result, "ok", True) and getattr(getattr(result, "report", None), "ok", True)
