"""Types of the blocking names, written by tests/support/sync_stub.py from those of `tstore`."""

import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tstore import (
    ArrayDiff,
    Bits,
    Cache,
    CollectReport,
    Commit,
    CopyReport,
    Diff,
    Keep,
    MinSqnr,
    PendingTransaction,
    QuantizedArray,
    QuantizeReport,
    Retry,
    Shards,
    errors,
    sharding,
)
from tstore.check import VerifyReport
from tstore.chunks.grid import Index
from tstore.chunks.metadata import Codecs
from tstore.copying.copy import At
from tstore.kv.base import Backend
from tstore.kv.trace import Traffic
from tstore.quantization.policy import CodecRules, Target
from tstore.quantization.work import Progress
from tstore.store import Mode
from tstore.transactions.transaction import Isolation

__all__ = [
    "Array",
    "ArrayDiff",
    "Bits",
    "Cache",
    "CollectReport",
    "Commit",
    "CopyReport",
    "Diff",
    "Keep",
    "MinSqnr",
    "PendingTransaction",
    "QuantizeReport",
    "QuantizedArray",
    "Retry",
    "Shards",
    "Snapshot",
    "Store",
    "Transaction",
    "copy",
    "errors",
    "open",
    "quantize",
    "quantize_report",
    "restore",
    "save",
    "sharding",
    "steps",
]

class Array:
    """A chunked array, or a view of one: indexing gives a view and does no I/O."""

    @property
    def path(self) -> str:
        """Where the array stands in its tree."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each axis of the view."""

    @property
    def ndim(self) -> int:
        """Number of axes of the view."""

    @property
    def size(self) -> int:
        """Number of values in the view."""

    @property
    def nbytes(self) -> int:
        """Bytes of the view's values in memory, decoded."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values as they are read."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of one chunk of the array."""

    @property
    def attributes(self) -> dict[str, Any]:
        """The array's attributes; a copy."""

    @property
    def dimension_names(self) -> tuple[str | None, ...] | None:
        """A name or None per axis of the array, or None."""

    @property
    def fill_value(self) -> Any:
        """The value of what was not written in a sparse array, or in a chunk written in part."""

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codec chain, as in `zarr.json`."""

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """The values, verified, in a new array, or in `out` of the same shape and dtype.

        Raises `NotFound` where a chunk was never written and the array is not sparse, `Corrupt` where stored
        bytes have changed."""

    def write(self, values: npt.ArrayLike) -> None:
        """Stages values, broadcast to the view's shape; the caller may change them once this returns.

        A chunk that is written in part keeps its other values bit for bit. Where a lossy codec can't do that,
        because the values written need another shared offset, the commit (or a read before it) raises
        `InvalidArgument`.

        Raises `InvalidArgument` where shape or dtype do not fit (a cast within one kind is made), `Misuse`
        on an array of a snapshot or of a transaction that has ended."""

    def resize(self, shape: Sequence[int]) -> None:
        """Stages another shape with as many axes; chunks that fall outside are dropped.

        What is added was never written: it reads as the fill value only where the array is sparse, or where it
        lies in a chunk that holds other values. What a smaller shape cut off is gone, also when it grows again."""

    def __getitem__(self, index: Index) -> Array:
        """A view of integers, slices (of any step) and `...`; `InvalidArgument` for anything else."""
    __iter__: None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the values that `read` returns, for `np.asarray(array)`."""

class Snapshot:
    """What a store holds as of one version."""

    @property
    def version(self) -> int:
        """The version this is the state of; 0 for the empty store before its first commit."""

    @property
    def tags(self) -> dict[str, int]:
        """Every tag that was set up to this version, with the version it names."""

    def paths(self) -> list[str]:
        """The paths of all arrays, sorted."""

    def attributes(self, path: str = "") -> dict[str, Any]:
        """The attributes of the array or group at a path; empty for a group that has none."""

    def array(self, path: str) -> Array:
        """The array at a path; `NotFound` names near paths where there is none."""

class Store:
    """Everything under one URL. Readers never block; writers meet only in the commit."""

    @property
    def mode(self) -> Mode:
        """How the store was opened."""

    @property
    def uuid(self) -> str:
        """The identity of the store, drawn when it was created."""

    @property
    def url(self) -> str:
        """Where the store is."""

    @property
    def traffic(self) -> Traffic | None:
        """What was asked of the server since the store was opened; None for a store without one."""

    def transaction(
        self,
        message: str = "",
        tag: str | None = None,
        isolation: Isolation = "snapshot",
        durability: Literal["fsync", "none"] = "fsync",
        *,
        move_tag: str | None = None,
        drop_tag: str | None = None,
        name: str | None = None,
        host: int = 0,
        hosts: int = 1,
        attempt: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Transaction:
        """A new transaction; `with` commits it on exit and aborts it on an exception.

        `tag` names the version it becomes; one that names another version is refused (`AlreadyExists`, by the
        first use of the transaction), but `move_tag` takes its tag from whatever had it. `drop_tag` then names
        no version any more; one that names none is refused (`NotFound`).
        `isolation="serializable"` also fails the commit with a `Conflict` where anything it has read through its
        own arrays and paths has changed. `durability="none"` gives up surviving a power failure. With `name`,
        `host`, `hosts` and `attempt` it is one host's part of a cooperative transaction, which becomes one
        commit once all hosts have called `commit`.
        Raises `Denied` on a store opened with mode "r", `InvalidArgument` where the arguments do not fit,
        `Misuse` where this host has the same transaction open already in this `Store`."""

    def snapshot(self, at: int | str | datetime.datetime | None = None) -> Snapshot:
        """The state as of a version, a tag, or a time; by default the newest.

        Raises `NotFound` where there is no such version or tag, or nothing was committed by that time, and
        `SnapshotExpired`, one of its kind, where garbage collection removed it."""

    def tags(self) -> dict[str, int]:
        """Every tag and the version it names."""

    def outcome(self, transaction: str) -> int | None:
        """The version that a transaction became, None if it is not committed (and if voided never will be).

        A store that may be written makes that version durable before it tells of it."""

    def transactions(self) -> list[PendingTransaction]:
        """The cooperative transactions that are under way or were given up, with the hosts that are missing.

        Its cost grows with the number of commits."""

    def finish(self, transaction: str) -> int:
        """The version of a cooperative transaction all of whose hosts have delivered; commits it if nobody has.

        `transaction` is its id, or its name where one attempt of that name is under way. For a group whose
        hosts died between their fragments and the commit; any process may call it, at any time.
        Raises `DeadlineExceeded` (names the absent hosts) at once where hosts have not delivered, `NotFound`,
        `InvalidArgument` (several attempts have that name), `Inconsistent`, `Conflict`, `Denied`."""

    def diff(
        self, before: int | str | datetime.datetime, after: int | str | datetime.datetime | None = None
    ) -> Diff:
        """How the arrays of one version differ from those of another, each named as for `snapshot`.

        Only those chunks of float arrays are read that differ. Raises `NotFound` as `snapshot` does."""

    def verify(self) -> VerifyReport:
        """Reads and checks every record, manifest and chunk of every version; the report lists each fault.

        No cache is used."""

    def collect(
        self, keep: Keep | None = None, *, abandoned: datetime.timedelta = ..., dry_run: bool = False
    ) -> CollectReport:
        """What garbage collection removed, or would remove: versions that no rule of `keep` keeps, and remains.

        Without `keep` no version expires. Remains are what transactions left that never became a version and
        that nobody has written to for the time `abandoned`; one that still goes on then can't be committed.
        Safe while others write, read and collect. Raises `Denied` on a store opened with mode "r" (unless
        `dry_run`), `NotFound` for a tag or metric that no living version has, `InvalidArgument`."""

    def close(self) -> None:
        """Releases open files; the store can still be used, and opens them again."""

    def history(self) -> Iterator[Commit]:
        """Iterate over the commits, newest first, including those whose version has expired.

        Transactions that were committed together share a version."""

    def __enter__(self) -> Store: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Transaction:
    """Staged changes over a snapshot; `with` commits on exit and aborts on an exception."""

    @property
    def id(self) -> str:
        """Its id in the log."""

    @property
    def version(self) -> int | None:
        """The version it became, None before."""

    @property
    def retries(self) -> list[Retry]:
        """What came in the way of the commit and was overcome."""

    def create_array(
        self,
        path: str,
        shape: Sequence[int],
        dtype: Any,
        chunks: Sequence[int] | None = None,
        codecs: Codecs = None,
        fill_value: Any = 0,
        attributes: Mapping[str, Any] | None = None,
        dimension_names: Sequence[str | None] | None = None,
        *,
        sparse: bool = False,
    ) -> Array:
        """A new array of this transaction; nothing is written yet.

        `chunks` is the shape of one chunk, by default about 8 MiB. `codecs` is None (stored as it is),
        "lossless" (compressed), the name of an eXmY format ("e4m3") or a configuration of it ({"format":
        "e3m2", "block": 32}), or a Zarr v3 codec list. Reading a chunk that was never written is an error,
        unless the array is `sparse`: then it has the fill value.
        Raises `AlreadyExists` where the path is taken, `InvalidArgument` where the arguments do not fit."""

    def create_group(self, path: str, attributes: Mapping[str, Any] | None = None) -> None:
        """Stages a group with attributes; groups without need not be created. The root's path is ""."""

    def array(self, path: str) -> Array:
        """The array at a path, as this transaction sees it, for reading and writing; `NotFound`."""

    def paths(self) -> list[str]:
        """The paths of all arrays as this transaction sees them, sorted."""

    def delete(self, path: str) -> None:
        """Stages the removal of an array, or of a group with all below it; `NotFound` where nothing is."""

    def commit(self, timeout: float | None = None) -> int:
        """Commit and return the version that the transaction became; it is as durable as was asked for.

        The commit waits for operations of this transaction that are under way, and includes what they do.
        `timeout` (seconds; a group's default is 300) bounds the wait for the other hosts of a group.
        Raises `Conflict`, `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the absent hosts),
        `CommitOutcomeUnknown`, `StorageFull`; `Misuse` where an operation that was under way failed. After an
        error nothing of it is visible, unless the error says that the outcome is unknown."""

    def abort(self) -> None:
        """Drop all that was staged, once operations under way have ended; nothing of it will ever be visible.

        Does nothing after the end of the transaction; raises `Misuse` while a commit of it is under way."""

    def __enter__(self) -> Transaction: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

def copy(
    source: str | os.PathLike[str] | Store,
    destination: str | os.PathLike[str] | Store,
    at: At = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = ...,
) -> CopyReport:
    """What was moved to make the destination a copy of the source, or, with `at`, of one version alone.

    Repeat it after any failure: only what is missing moves. `progress(done, total)` is told of the bytes of packs.
    `storage_options` are those of the destination; a source that needs some is passed as an opened store.
    Raises `AlreadyExists` where the destination holds something else, `Conflict` where it is this store with
    commits of its own, `Corrupt` where the source is damaged (nothing damaged is copied), `NotFound` and
    `SnapshotExpired` for a version that is not there, `Denied`."""

def open(
    url: str | os.PathLike[str] | Backend,
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Store:
    """The store at a URL: a path, `file://…` or `memory://name`; or on a backend of your own.

    `storage_options` are what the kind of storage takes, as a `token`; they are shown nowhere. `cache` is a folder
    of this machine in which what is read is kept, under `Cache`'s limit of bytes.
    Mode "r" reads a store, "r+" reads and writes one, "a" also creates one if nothing is there, "x" a new one.
    Raises `NotAStore` (nothing of tstore's is there, or other files are), `AlreadyExists` (mode "x"),
    `UnsupportedFormat` (written by a newer tstore), `Denied` (also where the storage can't create exclusively,
    which is put to the test where a store is made), `InvalidArgument`."""

def quantize(
    where: str | os.PathLike[str] | Store,
    formats: CodecRules = None,
    *,
    min_sqnr: float | None = None,
    bits: float | None = None,
    error: Literal["absolute", "relative"] | None = None,
    at: int | str | None = None,
    tag: str | None = None,
    message: str = "",
    axis: int | None = None,
    block: int | Literal["auto"] | None = "auto",
    scale: Literal["search", "max", "none", "float"] = "search",
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Commit a copy of a version with its float arrays in low-bit formats, and return what it cost.

    The source stays as it is.

    `formats` is one eXmY format, or rules by path pattern, first match first, None for "keep all bits". What no
    rule matches is decided by the data: with `min_sqnr` (dB) each array gets the fewest bits that keep its SQNR,
    the ratio 10·log10(Σx² / Σ(x−y)²) of values x and their stored forms y; with `bits` the arrays get the formats
    that have the least error together at that many stored bits a value, all arrays of the checkpoint counted
    (`Bits` says what `error` means; it is "relative" by default). Without `formats`, `min_sqnr` and `bits` each
    array gets 8 bits a value: e2m5 in blocks.

    Integers, arrays of under 64 values, and those with NaN or infinity keep their bits, and the report says so; so
    do one-dimensional arrays unless a rule names them, that is, unless the last part of its pattern is more than
    wildcards ("**/bias" names, "**" and "layers/*" do not).

    `axis`, `block` and `scale` say what shares an exponent offset, as in `exmy.quantize`. With block="auto" and no
    `axis`, arrays in `formats` have one offset, as block=None says, and arrays that the data decides have blocks
    of 128 along their last axis, or of 64 or 32 where those divide it and 128 does not, or else one offset.
    The codes are those that `exmy.quantize` gives. `at` is a version or tag, by default the newest step
    (without steps, the newest version that is no quantized copy). `tag` names the new commit, by default the
    source's tag (or v<version>) with the formats behind it; it can't be that of a step, which only `save` makes.
    `executor`: its workers (threads, processes, a Dask cluster's) read, encode and write; they must reach the
    store by its URL. Memory is about 200 MiB, or 100 MiB in each worker of an executor.
    Where newer steps and a gc overtake the work on the newest step, it begins again with a newer one.
    Raises `InvalidArgument` (a pattern without a match, a budget that can't be met), `AlreadyExists` (the tag),
    `NotFound`, `SnapshotExpired`, `StorageFull`; after an error nothing is committed."""

def quantize_report(where: str | os.PathLike[str] | Store, at: int | str | None = None) -> QuantizeReport:
    """The report that a quantized commit keeps; `NotFound` where the version or tag is no such commit."""

def restore(
    where: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    packed: bool = False,
) -> Any:
    """The tree of a checkpoint, as NumPy arrays: of a step, a version or tag (`at`), or the newest step.

    `target` (leaves with `shape` and `dtype`, or `Shards` for a part of an array) gives the structure that is
    returned, and must fit: every path, shape and dtype that does not is listed in one `StructureMismatch`.
    Without it, dataclasses come back as dicts. `only="params/**"` restores the paths that match; the target's
    other leaves stay as they are. Only the chunks that are needed are read. With `packed`, arrays in eXmY come
    back as `exmy.Quantized`, as they are stored, without decoding; those of one value (no dimensions) decoded.
    Where newer steps and a gc overtake the reading of the newest step, a newer one is read.
    Raises `NotFound`, `SnapshotExpired` (a gc removed the version), `Corrupt`, `StructureMismatch`,
    `InvalidArgument`."""

def save(
    where: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    host: int = 0,
    hosts: int = 1,
    attempt: str | None = None,
    codecs: CodecRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
) -> int:
    """Save a tree of arrays as one atomic commit and return its version. Durable on return.

    `tree` nests dicts, lists, tuples and dataclasses; its leaves are arrays of NumPy (or of a library whose
    arrays NumPy can take), `Shards`, and scalars. Do not change the arrays before this returns: a checkpoint of
    arrays that change meanwhile can be restored, but is a mix of their values before and after.
    Many hosts call with the same tree structure, `step`, `hosts` and `attempt` (see the README) and each its
    own `host`; an array that is no `Shards` is the same on every host and written by one of them.
    `codecs`: None, "lossless", an eXmY format for all float arrays, or rules by path pattern, first match first,
    where chunks have exponent offsets of their own; or, of one host, `MinSqnr(30)` or `Bits(5)`: see `quantize`.
    `metrics` go into the history: numbers, also NumPy's; a NaN is kept and is never the best. `attributes` (JSON)
    go into the root group.

    Raises `AlreadyExists` (the step is saved already), `Inconsistent` (hosts disagree), `DeadlineExceeded`
    (names the absent hosts), `NotFinite`, `InvalidArgument`, `StorageFull`, `CommitOutcomeUnknown`. After an
    error the step is not saved and what was saved before still is."""

def steps(where: str | os.PathLike[str] | Store) -> list[int]:
    """The steps that are saved, in increasing order."""
