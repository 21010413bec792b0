"""Types of the public names, written by tests/support/sync_stub.py from those in `tstore`."""

import datetime
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal, overload

import exmy
import numpy as np
import numpy.typing as npt

from tstore import (
    Appended,
    ArrayDiff,
    BackgroundSave,
    Bits,
    Cache,
    CollectReport,
    Commit,
    Continuous,
    CopyReport,
    Diff,
    EverySeconds,
    EverySteps,
    HeatMap,
    Keep,
    MinSqnr,
    OnPreemption,
    PackedShards,
    Patch,
    PendingTransaction,
    PerHost,
    QuantizationLoss,
    QuantizedArray,
    QuantizeReport,
    RestorePlan,
    Retry,
    SaveReport,
    Shards,
    Step,
    Summary,
    Tiers,
    TierStep,
    errors,
    sharding,
)
from tstore import zarr as zarr
from tstore.checkpoint.background import InFlight, StagingChoice
from tstore.checkpoint.job_store import Tiered
from tstore.checkpoint.policies import Policy
from tstore.checkpoint.request import Cast, Missing, PerHostRule
from tstore.checkpoint.series import OnError, OnSaved
from tstore.checkpoint.stream import Order
from tstore.core.array import Verify
from tstore.core.copying.copy import At
from tstore.core.data.casting import Casting
from tstore.core.data.planning import ReadPlan
from tstore.core.following import Versions
from tstore.core.format.arrays.codecs import Codecs
from tstore.core.format.arrays.indices import Index, Indexer, IndexItem
from tstore.core.maintenance.repair import RepairReport
from tstore.core.maintenance.verify import VerifyProgress, VerifyReport
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Traffic
from tstore.core.store import Mode, Moment
from tstore.core.transactions.staging import Isolation
from tstore.quantization.policy import QuantizeRules, Target
from tstore.quantization.sensitivity import Sensitivity
from tstore.quantization.work import ProgressCallback
from tstore.sync import jax as jax
from tstore.sync import torch as torch

__all__ = [
    "Appended",
    "Array",
    "ArrayDiff",
    "BackgroundSave",
    "Bits",
    "Cache",
    "Checkpointer",
    "CollectReport",
    "Commit",
    "Continuous",
    "CopyReport",
    "Diff",
    "EverySeconds",
    "EverySteps",
    "Follower",
    "HeatMap",
    "Keep",
    "Mapped",
    "MinSqnr",
    "OnPreemption",
    "PackedShards",
    "Patch",
    "PendingTransaction",
    "PerHost",
    "QuantizationLoss",
    "QuantizeReport",
    "QuantizedArray",
    "RestorePlan",
    "Retry",
    "SaveReport",
    "Shards",
    "Snapshot",
    "Step",
    "Store",
    "Summary",
    "TierStep",
    "Tiers",
    "Transaction",
    "baseline",
    "copy",
    "errors",
    "explain",
    "heat_map",
    "open",
    "quantization_loss",
    "quantize",
    "quantize_report",
    "restore",
    "save",
    "save_async",
    "sharding",
    "steps",
    "stream",
    "summarize",
]

class Array:
    """A chunked array, or a view of one: indexing returns a view without I/O.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> with tstore.open("memory://of-array").transaction() as tx:
    ...     a = tx.create_array("a", shape=(4, 6), dtype="int32", chunks=(2, 3))
    ...     a.write(0)
    ...     a[1:3, ::2].write(7)
    ...     a[1].read()
    array([7, 0, 7, 0, 7, 0], dtype=int32)"""

    @property
    def path(self) -> str:
        """The path of the array in its tree."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the view along each axis."""

    @property
    def ndim(self) -> int:
        """The number of axes of the view."""

    @property
    def size(self) -> int:
        """The number of values in the view."""

    @property
    def nbytes(self) -> int:
        """The size of the view's decoded values in bytes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values as they are read."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of one chunk, from which `dask.array.from_array` chooses its own.

        In a view, it is the selected part of a chunk: `array[::2]` has chunks of half the length. On a new
        axis, and on an axis of points that index several axes, it is the length of the axis."""

    @property
    def chunksize(self) -> tuple[int, ...]:
        """The shape of one chunk, by Dask's name for it."""

    @property
    def attributes(self) -> dict[str, Any]:
        """A copy of the array's attributes."""

    @property
    def attrs(self) -> dict[str, Any]:
        """A copy of the array's attributes, by Zarr's name for it."""

    @property
    def dimension_names(self) -> tuple[str | None, ...] | None:
        """The name of each axis of the view (None for one without a name), or None if the array has no names."""

    @property
    def fill_value(self) -> Any:
        """The value of elements that were never written, in a sparse array or in a partly written chunk."""

    @property
    def sparse(self) -> bool:
        """Whether chunks that were never written read as the fill value; otherwise that is an error."""

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codec chain, as in `zarr.json`."""

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the verified values in a new array, or in `out`, which has the same shape and any strides.

        `out` may have another dtype if NumPy can safely cast the array's to it. Raise `InvalidArgument` for an
        unsuitable `out`, `NotFound` if a chunk was never written and the array is not sparse, and `Corrupt` if
        stored bytes have changed."""

    def map(self, verify: Verify = "first") -> npt.NDArray[Any]:
        """Return the values in read-only memory, if they can be mapped without a copy, or else read them.

        The memory is the system's cache of the files of a store in a local folder, which processes share. An
        array can be mapped if `save` wrote it without codecs, and is not so small that it is in the metadata;
        views by index arrays can't be. With `verify="first"`, the blocks that have the values are read and
        compared with their checksums before they are returned, and otherwise ("never") not at all.

        Raise what `read` raises."""

    def explain(self) -> ReadPlan:
        """Return which chunks, and which bytes of each object, `read` would read; reads no chunk.

        Raise `NotFound` if a chunk was never written and the array is not sparse."""

    def write(self, values: npt.ArrayLike, casting: Casting = "same_kind") -> None:
        """Stage values, broadcast to the view's shape; the caller may change them once this returns.

        An element that index arrays select several times gets the last of its values in the view's C order. The
        other values of a partly written chunk stay the same, bit for bit. If a lossy codec can't preserve them,
        because the new values need another exponent offset, the commit (or a read before it) raises
        `InvalidArgument`.

        Raise `InvalidArgument` if the shape does not fit or NumPy's rule `casting` does not allow the cast, and
        `Misuse` for an array of a snapshot or of a transaction that has ended."""

    def append(self, values: npt.ArrayLike, axis: int = 0, casting: Casting = "same_kind") -> Appended:
        """Stage values past the end of an axis; the caller may change them once this returns.

        Their region is allotted by the commit: if others have appended since, it begins where theirs ends, so
        any number of transactions append at once without a conflict. The appends of one transaction to an array
        are stored in the order of the calls. Until the commit, this transaction sees the values past the
        end of the array that its base has; after it, `Appended.region` of the result tells where they are.

        Appends conflict with a resize, and with those along another axis. In a transaction that also writes to the
        array, resizes or creates it, they conflict like a resize. If the codecs are lossy, a copy of the values
        stays in memory until the commit.

        Raise `InvalidArgument` unless the values have as many axes as the array and its length on each other axis,
        or if NumPy's rule `casting` does not allow the cast, and `Misuse` for an array of a snapshot, of a
        transaction that has ended, or of one of several hosts.

        Examples
        --------
        >>> import tstore.sync as tstore
        >>> with tstore.open("memory://of-append").transaction() as tx:
        ...     added = tx.create_array("log", data=np.zeros(3)).append(np.ones(2))
        >>> added.region
        (slice(3, 5, None),)"""

    def resize(self, shape: Sequence[int]) -> None:
        """Stage a new shape with the same number of axes; chunks outside of it are dropped.

        New elements count as never written: they read as the fill value only if the array is sparse, or if their
        chunk contains other values. Values that a smaller shape cuts off do not return when the array grows.

        Raise `InvalidArgument` for another number of axes, a negative length, and on a view, and `Misuse` for an
        array of a snapshot or of a transaction that has ended."""

    @property
    def T(self) -> Array:
        """The view with its axes in reverse order."""

    def transpose(self, *axes: int | Sequence[int]) -> Array:
        """Return the view with its axes in the given order, by default reversed, like NumPy's `transpose`.

        Raise `InvalidArgument` unless each axis is given once."""

    def isel(self, /, **indices: IndexItem) -> Array:
        """Return the view that selects along axes by name, along each independently: `isel(layer=3)`.

        Raise `InvalidArgument` for a name that no axis has, or several."""

    @property
    def oindex(self) -> Indexer[Array]:
        """Index each axis independently: `array.oindex[[0, 5], [1, 2, 7]]` has the shape (2, 3), as in Zarr."""

    @property
    def vindex(self) -> Indexer[Array]:
        """Index points: `array.vindex[[0, 5], [1, 2]]` has two values, as in Zarr.

        Arrays are broadcast together. Their axes come first, before those of slices, as in Dask."""

    def __getitem__(self, index: Index) -> Array:
        """Return the view that NumPy's indexing selects; raise `InvalidIndex`, an `IndexError`.

        Write to a view with `array[index].write(values)`."""

    def __setitem__(self, index: Index, values: Any) -> None:
        """Write to the elements that an index selects, as `array[index].write(values)` does."""

    def __len__(self) -> int:
        """Return the length of the first axis; raise `TypeError` if there is none, as NumPy does."""

    def __bool__(self) -> bool:
        """Return True, as for other objects: whether an array is empty is in its `size`."""
    __iter__: None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the values as `read` does, for `np.asarray(array)`."""

class Checkpointer:
    """The checkpoints of one job at one URL, saved in the background; garbage collection removes those not kept.

    If a save or garbage collection fails, the next call raises its error; `save` first begins to save its step.
    `on_error` changes that.
    `with` closes the `Checkpointer`.

    Parameters
    ----------
    store
        A URL, a path, a `Store`, or `Tiers`. A store that does not exist is created by the first save.
    every
        When `should_save` returns True: a number of steps, or policies such as
        `EverySteps(1000) | EverySeconds(600) | OnPreemption()`, or `Continuous()`; by default at every step.
    keep
        The steps to keep, as `Store.collect` takes them, or the number of the highest steps to keep. Host 0
        collects the other steps in the background after each commit. A rule whose metric or tag no step has yet
        selects none, with one warning. By default all are kept. Call `rollback` before a job continues from an
        earlier step.
    host, hosts, attempt, codecs, timeout
        As `save` takes them.
    staging, in_flight
        As `save_async` takes them. The memory for copies is kept from one save to the next.
    on_error
        With "warn" a failed save or garbage collection, as in a full bucket, does not stop the job: the error is
        logged to `tstore.checkpoint`, `unsaved` has it, and the next save tries again. `close` raises
        `Unavailable` if no later save succeeded. `InvalidArgument` and `Misuse` are raised all the same.
    on_saved
        A function that gets the `SaveReport` of each commit of this host, one after the other, in a thread of its
        own. Garbage collection, `wait` and `close` wait for it, so it must not call these. Its error is treated
        like one of garbage collection. The report is also logged to `tstore.checkpoint`, at INFO.
    agree
        With several hosts, all policies but `EverySteps` need a function that gets a bool of this host and returns
        on each host whether any host passed True, such as an all-reduce. `should_save` calls it at each step where
        one of these may be due, so every host must call `should_save` at the same steps. If these calls take too
        long, let the hosts agree less often: `EverySteps(10) & OnPreemption()`.

    Raises
    ------
    `InvalidArgument`, and `Misuse` for `OnPreemption` outside of the main thread.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> with tstore.Checkpointer("memory://of-checkpointer", every=10, keep=2) as checkpoints:
    ...     state = checkpoints.restore_latest() or {"w": np.zeros(4)}
    ...     for step in range(1 + (checkpoints.latest() or 0), 31):
    ...         state = {"w": state["w"] + 1}
    ...         if checkpoints.should_save(step):
    ...             _ = checkpoints.save(step, state, metrics={"loss": 1 / step})
    ...     checkpoints.latest(), checkpoints.best("loss")
    (30, 30)"""

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | Tiered,
        *,
        every: int | Policy | None = None,
        keep: int | Keep | None = None,
        host: int = 0,
        hosts: int = 1,
        attempt: str | None = None,
        codecs: QuantizeRules | Target = None,
        timeout: float | None = None,
        staging: StagingChoice = "memory",
        in_flight: InFlight = "queue",
        on_error: OnError = "raise",
        on_saved: OnSaved | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None: ...
    @property
    def preempted(self) -> bool:
        """Whether a signal of `OnPreemption` has come and a step was saved since, so that the job should end."""

    @property
    def unsaved(self) -> Mapping[int, BaseException]:
        """The errors of the saves that have failed since one succeeded, by step, with on_error="warn"."""

    def should_save(self, step: int) -> bool:
        """Return whether the policies say to save after a step; False for the step that was saved last.

        The last step of the run is not known here. To save it too, write
        `if checkpoints.should_save(step) or step == last`. If a step is to be saved, `save` raises the error of an
        earlier save, so that all hosts make the same calls even if only one has an error."""

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        attributes: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        message: str = "",
        durability: Literal["fsync", "none"] = "fsync",
        timeout: float | None = None,
        overwrite: bool = False,
        priority: Literal["normal", "low"] | None = None,
    ) -> BackgroundSave:
        """Start saving a tree as a step, as `save_async` does with these options, even if no policy asks for it.

        Raise what `save_async` raises, `InvalidArgument` for a step before the newest one (call `rollback` first),
        and `Misuse` after `close`. Raise the error of an earlier save once this one has begun; it continues."""

    def latest(self) -> int | None:
        """Wait for saves under way; return the newest step, None if there is no step or no store."""

    def best(self, metric: str, order: Literal["min", "max"] = "min") -> int | None:
        """Return the step with the lowest or highest value of a metric, the newest of equal ones.

        Return None if no step has a finite value of the metric. Raise `InvalidArgument` for another order."""

    def steps(self) -> list[Step]:
        """Wait for saves under way; return the saved steps in increasing order, none if there is no store.

        A `Step` has the number, version, time and metrics; `tstore.steps` returns only the numbers."""

    def tiers(self) -> list[TierStep]:
        """Return what each tier has of each step, as far as this host knows; see `Tiers`."""

    def restore_latest(self, target: Any = None, *, fallback: bool = False, **options: Any) -> Any:
        """Restore the newest step as `restore` does; return None if there is no step or no store.

        `options` are those of `restore`, such as `only`. If the step is damaged this raises `Corrupt`; call
        `rollback` to go on from an older one. With `fallback` this does that by itself: it restores the newest
        step that is not damaged on any host, logs a warning for each that is, and makes the restored step the
        newest, as `rollback` does, so that `latest` returns it and the next step can be saved. The damaged steps
        stay readable as versions until garbage collection. No other error makes it fall back, and
        `missing="keep"` is refused, because it could mix the values of two steps. If the record or
        manifest of the newest version is damaged, nothing can be saved: run `tstore repair` first.

        Each of several hosts looks up the newest step for itself. If another step may be committed meanwhile, call
        `latest` on one host, send its result to all hosts, and call `restore` with it; the classes of
        `tstore.torch` and `tstore.jax` do that."""

    def restore(self, step: int, target: Any = None, **options: Any) -> Any:
        """Restore a step as `tstore.restore` does, with its options; wait for saves under way first.

        Raise what `tstore.restore` raises, and the error of a save that failed."""

    def rollback(self, step: int) -> int:
        """Make a step the newest: remove all later steps in one commit, and return the version of that commit.

        Call it on every host before the job continues from an earlier step: host 0 commits, and the others wait.
        A repeated call finds no later steps, commits nothing and returns the same version. If no later steps
        were ever removed, the version of the step is returned. The removed steps stay readable as versions (`at=`)
        until garbage collection.

        Wait for saves under way first. Raise `NotFound` if there is no such step, and `DeadlineExceeded` if host 0
        has not removed the later steps after `timeout` seconds."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves and collections have ended; raise the error of any that failed.

        Raise `DeadlineExceeded` if any of them is still under way after `timeout` seconds; it continues."""

    def close(self, timeout: float | None = None) -> None:
        """Wait as `wait` does, free the memory for copies, and restore the previous signal handlers.

        A save that is under way after `timeout` seconds is abandoned, unless its commit has begun: the store does
        not change, and `DeadlineExceeded` is raised. Afterwards the `Checkpointer` restores, but saves no more."""

    def __enter__(self) -> Checkpointer: ...
    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None: ...

class Follower:
    """The new versions of a store, from `Store.follow`: an iterator of snapshots that never ends."""

    @property
    def lock(self) -> threading.Lock:
        """Held by `update` while it changes arrays: a thread that reads them under it sees one version."""

    @property
    def held(self) -> int | None:
        """The version that the arrays of the last update hold, None for none; to be read under `lock`, too."""

    def update(self, into: Any, timeout: float | None = None) -> Snapshot | None:
        """Wait for the next version, bring arrays in memory to it, and return its snapshot.

        The first call reads all arrays; later ones with the same arrays read only the chunks that differ. They are
        read before anything changes and are copied in place while `lock` is held. So the arrays hold one version
        before and after the call, also if reading it fails: then the next call tries the same version again, or
        with versions="newest" one that is newer by then. The differences are in memory twice, the first time all
        arrays.

        Parameters
        ----------
        into
            Writable NumPy arrays with the shapes and dtypes of those in the store, in dicts, lists or tuples: the
            array at "layers/0/w" is `into["layers"][0]["w"]`. Arrays that `into` lacks are not read, and Python
            scalars in it stay as they are.
        timeout
            How many seconds to wait for a new version; None returned if there was none. By default wait for ever.

        Raises
        ------
        `NotFound` if the version lacks one of the arrays, `InvalidArgument` if one has another shape or dtype, is
        read-only or shares memory with another, and `SnapshotExpired` as the iteration does."""

    def __next__(self) -> Snapshot:
        """Wait for the next version. After `SnapshotExpired`, go on behind the version that it names."""

    def __iter__(self) -> Follower: ...

class Mapped:
    """The arrays of a checkpoint by path, in read-only memory that is the system's cache of its files.

    Nothing is read before it is used, and processes share what they have mapped. With `verify="first"`, each array
    is compared with its checksums when it is first taken out, which reads it; `Corrupt` names a damaged chunk.
    Arrays that can't be mapped were read, and `copied` has the reason by path. The memory stays valid if garbage
    collection deletes the files, but not if they are cut short by another program.

    Examples
    --------
    >>> import tempfile
    >>> import tstore.sync as tstore
    >>> folder = tempfile.mkdtemp()
    >>> _ = tstore.save(folder, {"net": {"w": np.ones((64, 64)), "b": np.zeros(8)}, "epoch": 3}, step=7)
    >>> mapped = tstore.restore(folder, map=True)
    >>> mapped["net/w"].flags.writeable, list(mapped)
    (False, ['net/w', 'net/b'])
    >>> mapped.tree()["epoch"]
    3"""

    @property
    def copied(self) -> dict[str, str]:
        """The arrays that can't be mapped, and were read, with the reason by path."""

    def __getitem__(self, path: str) -> Any:
        """Return the values at a path; with `verify="first"`, verify them first, in this thread."""

    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def verified(self) -> None:
        """Verify in threads all arrays that are not verified yet; raise `Corrupt`, which names a damaged chunk."""

    def tree(self) -> Any:
        """Return what `restore` returns, with mapped arrays; with `verify="first"`, after all are verified."""

class Snapshot:
    """The tree of groups and arrays as of one version; it never changes."""

    @property
    def version(self) -> int:
        """The version, 0 for the empty store before its first commit."""

    @property
    def tags(self) -> dict[str, int]:
        """All tags with the versions that they name, as of this version (for the head, as of opening it)."""

    def paths(self) -> list[str]:
        """Return the paths of all arrays, sorted."""

    def attributes(self, path: str = "") -> dict[str, Any]:
        """Return the attributes of the array or group at a path, {} if it has none or nothing is there."""

    def array(self, path: str) -> Array:
        """Return the array at a path; raise `NotFound`, which names similar paths, if there is none.

        Its values can be read at once: `snapshot.array("w")[0:10].read()`."""

    def __getitem__(self, path: str) -> Array:
        """Return the array at a path, as `array` does."""

    def __contains__(self, path: object) -> bool:
        """Return whether there is an array at a path."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the paths of all arrays, sorted."""

    def read_packed(self, path: str, region: tuple[slice, ...] | None = None) -> exmy.Quantized:
        """Return the eXmY codes of an array, or of a region: a slice with a start and a stop for each axis.

        A region of an array with offsets per block must be cut at multiples of 16 along that axis. Raise
        `NotFound`, or `InvalidArgument` for other codecs and for regions that cut blocks."""

    def patches(self, since: int | str) -> Iterator[Patch]:
        """Yield the values that differ from another version, a version number or a tag, array by array.

        Chunks that both have are not read. Values are compared bit for bit, so NaN equals NaN, and -0 is
        not 0. An array that is new, or has another shape or dtype, is yielded as a whole, as is one that is
        smaller than its differences would be; one that only the other version has is not yielded. Raise `NotFound`
        if there is no such version, and `SnapshotExpired` if garbage collection removed it: then read all arrays.

        Examples
        --------
        >>> import tstore.sync as tstore
        >>> for step in range(2):
        ...     _ = tstore.save("memory://of-patches", {"w": np.arange(8.0) + (np.arange(8) == 5) * step}, step)
        >>> for path, indices, values in tstore.open("memory://of-patches").snapshot().patches(since=1):
        ...     print(path, indices, values)
        w [5] [6.]"""

    def read_many(
        self, views: Iterable[Array], out: Iterable[npt.NDArray[Any]] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Return the values of arrays of this snapshot, or of views of them, as `Array.read` does, in their order.

        All are read in one call, so adjacent chunks of a pack are read together, even of different arrays. They
        are read into new arrays, or into those of `out`, one for each view, as for `Array.read`; these must not
        share memory. If that fails, a note on the error lists the arrays that are partly filled. Raise
        `InvalidArgument` for an array of another snapshot, and what `Array.read` raises."""

class Store:
    """Everything under one URL. Readers never block; writers can conflict only when they commit."""

    @property
    def mode(self) -> Mode:
        """The mode in which the store was opened."""

    @property
    def uuid(self) -> str:
        """The identity of the store, chosen at random at its creation."""

    @property
    def url(self) -> str:
        """The URL or path of the store."""

    @property
    def traffic(self) -> Traffic | None:
        """The requests to the server since the store was opened; None for a store without a server."""

    def transaction(
        self,
        message: str = "",
        tag: str | None = None,
        isolation: Isolation = "snapshot",
        durability: Literal["fsync", "none"] = "fsync",
        *,
        move_tag: str | Sequence[str] | None = None,
        drop_tag: str | Sequence[str] | None = None,
        name: str | None = None,
        host: int = 0,
        hosts: int = 1,
        attempt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Transaction:
        """Return a new transaction; `with` commits it on exit and aborts it on an exception.

        Parameters
        ----------
        message, metadata
            A text and a JSON object, which `history` shows.
        tag, move_tag, drop_tag
            `tag` is a new tag for the new version; if it is in use, the first use of the transaction raises
            `AlreadyExists`. `move_tag` is a tag for the new version, or a list of them; one that is in use moves
            there. `drop_tag` is a tag to remove, or a list of them; if one does not exist, the first use raises
            `NotFound`.
        isolation
            With "serializable" the commit also raises `Conflict` if anything read through the transaction has
            changed.
        durability
            With "none" a power failure may undo the commit.
        name, host, hosts, attempt
            The transaction is one host's part of a cooperative transaction, which is committed once all hosts
            have called `commit`. `attempt` is a token that all hosts share and no other start of the job uses.

        Raises
        ------
        `Denied` on a store opened with mode "r", `InvalidArgument` if the arguments contradict each other,
        `Misuse` if this host already has the same transaction open in this `Store`."""

    def snapshot(self, at: Moment | None = None) -> Snapshot:
        """Return the snapshot at a version, tag or time; by default the head, the newest version except copies.

        A time selects the head at that time. Raise `NotFound` if there is no such version or tag, or nothing was
        committed by that time, and its subclass `SnapshotExpired` if garbage collection removed the version."""

    def tags(self) -> dict[str, int]:
        """Return every tag with the version that it names."""

    def outcome(self, transaction: str) -> int | None:
        """Return the version that a transaction was committed as, or None if it is not committed.

        If the store is open for writing, the version is durable on return, unless it was committed with durability
        "none". The cost grows with the number of commits. Raise `Corrupt` if a record is damaged."""

    def pending(self) -> list[PendingTransaction]:
        """Return the cooperative transactions that are not committed, with the hosts that are absent.

        The cost grows with the number of commits."""

    def finish(self, transaction: str) -> int:
        """Commit a cooperative transaction whose hosts have all delivered their fragments, and return its version.

        Use it when hosts died between their fragments and the commit; any process may call it, at any time.
        `transaction` is an id, or a name with only one attempt under way; it may already be committed.
        Raise `DeadlineExceeded` at once if fragments are missing, and name their hosts, or if a host of a
        `Checkpointer` gave up and withdrew the transaction. Also raise `NotFound`, `InvalidArgument` (several
        attempts have that name), `Inconsistent`, `Conflict` or `Denied`."""

    def diff(self, before: Moment, after: Moment | None = None, *, budget: int | None = None) -> Diff:
        """Return how the arrays of two versions differ; `before` and `after` take what `snapshot` takes as `at`.

        Only chunks of float arrays that differ are read; with a budget, about as many bytes of their values: small
        arrays whole, and samples of others. Raise `NotFound` as `snapshot` does.

        Examples
        --------
        >>> import tstore.sync as tstore
        >>> for step in range(2):
        ...     _ = tstore.save("memory://of-diff", {"w": np.full(4, float(step)), "b": np.zeros(2)}, step)
        >>> [(array.path, array.change) for array in tstore.open("memory://of-diff").diff(1, 2).arrays]
        [('w', 'changed')]"""

    def verify(self, progress: Callable[[VerifyProgress], object] | None = None) -> VerifyReport:
        """Read and check every record, manifest and chunk of every version; report each fault.

        The cache is bypassed. `progress` is called with the work done, often and from any thread. Faults are in
        the report, and are not raised."""

    def repair(self, void: Sequence[int] = ..., *, void_intact: Sequence[int] = ...) -> RepairReport:
        """Report the versions whose records are damaged or refer to missing objects; void the versions passed.

        To void a version is to replace its record by one without changes: what the version changed is lost, and
        readers and commits continue with the other versions. Without arguments nothing is changed. `void` lists
        versions whose record is damaged or missing. Versions in `void_intact` are voided even if their record is
        intact, for example because it is forged. The bytes of each voided record are kept under `damaged/`.
        Processes that have the store open must open it again (`TimelineChanged`). Raise `Denied` on a store opened
        with mode "r" or through a server, `InvalidArgument` for a version that does not exist, an intact one in
        `void`, or one on which other versions rest."""

    def collect(
        self, keep: Keep | None = None, *, abandoned: datetime.timedelta = ..., dry_run: bool = False
    ) -> CollectReport:
        """Remove the versions that `keep` does not keep, and the data of abandoned transactions; report both.

        Without `keep` every version is kept. A transaction is abandoned if it is not committed and nothing was
        written to it for the time `abandoned`; if its writer continues later, its commit fails. `dry_run` removes
        nothing. A collection is safe while others write, read and collect. Raise `Denied` on a store opened with
        mode "r" (unless `dry_run`), `NotFound` if no living version has a tag or metric that `keep` names, and
        `InvalidArgument` for other bad values."""

    def follow(
        self, since: int | None = None, tags: str | list[str] | None = None, versions: Versions = "each"
    ) -> Follower:
        """Return an endless iteration over new versions, which also keeps arrays in memory at the newest one.

        It waits for each version: on a local disk until it is told of a commit, elsewhere by polling. Numbers
        without a snapshot, of garbage collections or voided commits, are passed over. After an error, such as a
        server that was away for longer than requests are retried, the iteration goes on when it is continued.

        Parameters
        ----------
        since
            The last version that is known: those after it are yielded. By default the newest one comes first.
        tags
            A pattern such as "step/*", or a list of patterns: only versions that were given a matching tag, when
            they were committed or later. By default every version that is not a copy.
        versions
            "each" yields all of them in order, "newest" only the newest whenever it is asked.

        Raises
        ------
        `InvalidArgument` for bad values. The iteration raises `SnapshotExpired` if a version was collected before
        it was yielded, unless only the newest is asked for, and `TimelineChanged` after a repair.

        Examples
        --------
        >>> import tstore.sync as tstore
        >>> store = tstore.open("memory://of-follow")
        >>> _ = tstore.save(store, {"w": np.zeros(3)}, step=1)
        >>> held = {"w": np.empty(3)}
        >>> follower = store.follow(tags="step/*")
        >>> follower.update(into=held).version, held["w"].tolist()
        (1, [0.0, 0.0, 0.0])
        >>> _ = tstore.save(store, {"w": np.ones(3)}, step=2)
        >>> follower.update(into=held).version, held["w"].tolist()
        (2, [1.0, 1.0, 1.0])"""

    def close(self) -> None:
        """Wait for saves in the background, and release open files and connections.

        Further use of the store opens them again."""

    def history(self) -> Iterator[Commit]:
        """Iterate over the commits, newest first, including those whose version has expired.

        Transactions that were committed together share a version. Raise `Corrupt` if a record is damaged, and
        `NotFound` if one is missing."""

    def __enter__(self) -> Store: ...
    def __exit__(self, *_: object) -> None: ...

class Transaction:
    """Staged changes over a snapshot; `with` commits on exit and aborts on an exception."""

    @property
    def id(self) -> str:
        """The transaction's id in the log."""

    @property
    def version(self) -> int | None:
        """The committed version, None before the commit."""

    @property
    def retries(self) -> list[Retry]:
        """A `Retry` for each time that the commit was tried again."""

    def create_array(
        self,
        path: str,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        chunks: Sequence[int] | None = None,
        codecs: Codecs = None,
        fill_value: Any = 0,
        attributes: Mapping[str, Any] | None = None,
        dimension_names: Sequence[str | None] | None = None,
        *,
        data: Any = None,
        sparse: bool = False,
    ) -> Array:
        """Stage a new array and return it; write its values next, or pass them as `data`.

        Slashes around `path` are ignored, as in Zarr: "/a/b" is "a/b". `dtype` is one of NumPy, ml_dtypes or
        PyTorch, or a name. `chunks` is the shape of a chunk, by default one of about 8 MiB. `codecs` is None
        (uncompressed), "lossless" (compressed), an eXmY format ("e4m3"), its configuration ({"format": "e3m2",
        "block": 32}), or a Zarr v3 codec list. `data` has the values, by default also the shape and the dtype.
        Reading a chunk that was never written is an error, or gives the fill value if the array is `sparse`.
        Raise `AlreadyExists` if the path is in use, `InvalidArgument` if the arguments contradict each other."""

    def copy_array(
        self,
        source: Array,
        path: str,
        chunks: Sequence[int] | None = None,
        codecs: Codecs | Literal["same"] = "same",
    ) -> Array:
        """Stage a new array with the values and the metadata of another one, or of a view, and return it.

        `source` is an array of a snapshot or a transaction, of this store or another, or a plain Zarr array, which
        `tstore.open` returns for a spec. By default the copy has the source's chunks and codecs. Then encoded
        chunks are verified and copied, not decoded; from a snapshot of this store, the copy refers to the chunks
        that exist. With other `chunks` or `codecs` (see `create_array`), and of a view or a plain array, each new
        chunk is written once, from values of which at most 48 MiB are read at a time, or one chunk if that is
        larger. A sparse array keeps its holes.

        Raise `AlreadyExists` if the path is in use, `NotFound` if a chunk of a dense source was never written
        (unless the copy refers to chunks, of which it then lacks the same), `Corrupt` if one is damaged,
        `InvalidArgument` for chunks or codecs that do not fit."""

    def create_group(self, path: str, attributes: Mapping[str, Any] | None = None) -> None:
        """Stage a group with these attributes, which replace all that it had; the root's path is "".

        Groups need not be created: an array may have any path. Raise `AlreadyExists` if an array is in the way."""

    def array(self, path: str) -> Array:
        """Return the array at a path as this transaction sees it, to read and write; raise `NotFound`.

        Values can be written at once: `tx.array("w")[0:10].write(values)`."""

    def __getitem__(self, path: str) -> Array:
        """Return the array at a path, as `array` does."""
    __iter__: None

    def paths(self) -> list[str]:
        """Return the sorted paths of all arrays, as this transaction sees them."""

    def delete(self, path: str) -> None:
        """Stage the removal of an array, or of a group with all below it; raise `NotFound` if there is neither."""

    def commit(self, timeout: float | None = None) -> int:
        """Commit and return the version that the transaction became, as durable as requested.

        The commit waits for operations of this transaction that are under way, and includes their changes.
        `timeout` (seconds; 300 by default) bounds the wait for the other hosts of a cooperative transaction.
        Raise `Conflict`, `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the absent hosts),
        `CommitOutcomeUnknown`, `StorageFull`; `Misuse` if an operation that was under way failed. After an
        error nothing is committed, and never will be, with two exceptions: after `DeadlineExceeded`, absent hosts
        may still deliver their fragments. After `CommitOutcomeUnknown`, call `commit` again once the storage
        responds: it returns the version if the transaction is committed, and otherwise commits it."""

    def deliver(self) -> int | None:
        """Deliver this host's fragment, as durable as requested, without waiting for the other hosts.

        Return the version if this host was the last, so that it has committed, else None: the transaction is
        committed when all hosts have delivered. Raise what `commit` raises, also if it is known by now that the
        transaction can't be committed any more, and `Misuse` for a transaction of one host."""

    def abort(self) -> None:
        """Drop all staged changes, once operations under way have ended.

        Do nothing after the end of the transaction, or in a forked child; raise `Misuse` during its commit."""

    def __enter__(self) -> Transaction: ...
    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None: ...

def baseline(store: str | os.PathLike[str] | Store, at: int | str | None = None) -> int:
    """Return the version to compare another with (by default the head).

    It is the source of a copy, the step before a step, or else the living version before, except copies. If the
    source has expired, its number is returned anyway. Raise `NotFound` if there is no earlier version."""

def copy(
    source: str | os.PathLike[str] | Store,
    destination: str | os.PathLike[str] | Store,
    at: At = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = ...,
) -> CopyReport:
    """Copy a store, or with `at` one version of it, and return what was transferred.

    After a failure call it again: it transfers only what is missing. `progress(done, total)` is called with the
    bytes of packs copied so far and the total. `storage_options` configure the destination; for a source that
    needs options pass an open `Store`. Raise `AlreadyExists` if the destination has other contents, `Conflict` if
    it is a copy of the source that has diverged from it, `Corrupt` if the source is damaged (damaged data are not
    copied), `NotFound` or `SnapshotExpired` if the source does not have the version, or `Denied` if a storage
    refuses access."""

def explain(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    missing: Missing = "error",
    map: bool = False,
    per_host: PerHostRule = "same",
    host: int = 0,
    hosts: int = 1,
) -> RestorePlan:
    """Return what `restore` with the same arguments would read, without reading any chunk.

    Raise what `restore` raises, except `Corrupt` for damaged chunks.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-explain", {"w": np.ones((256, 256)), "b": np.zeros(2)}, step=7)
    >>> tstore.explain("memory://of-explain", only="w").arrays
    {'w': 524288}"""

def heat_map(view: Array, *, cells: tuple[int, int] = ..., budget: int | None = ...) -> HeatMap:
    """Return the mean and the root mean square of the values of a matrix, cell by cell.

    To zoom, index the array: `heat_map(array[0, 512:768, :256])`. Results are cached like those of `summarize`.

    Parameters
    ----------
    view
        An array or a view of at most two axes. A vector is one row.
    cells
        The number of rows and columns of cells, at most 1,024 each. There are fewer if the view is smaller, or if
        a sample has no values for some of them: then adjacent cells are joined until each has some.
    budget
        Bytes of values to read, by default 64 MiB; None reads all.

    Raises
    ------
    As `summarize` does; `InvalidArgument` for more than two axes.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-heat-map", {"w": np.arange(16.0).reshape(4, 4)}, step=7)
    >>> tstore.heat_map(tstore.open("memory://of-heat-map").snapshot().array("w"), cells=(2, 2)).means
    array([[ 2.5,  4.5],
           [10.5, 12.5]])"""

@overload
def open(
    url: str | os.PathLike[str] | Storage,
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Store:
    """Open the store at a URL or path, or on a `Storage`.

    URLs begin with `file://`, `memory://`, `http(s)://`, `gs://`, `s3://` or another scheme that fsspec knows.
    `storage_options` are options of that storage, such as a `token`; they are never shown. `cache` is a local
    folder of at most 10 GiB for objects read from a server; pass a `Cache` for another limit.

    The modes "r" (read) and "r+" (read and write) require a store and create nothing. The mode "a" opens a store
    for reading and writing; if it is missing, its first transaction creates it. "x" creates a store and fails if
    there is one. Raise `NotAStore` (there is no store, or the folder has other files), `AlreadyExists` (mode "x"),
    `UnsupportedFormat` (written by a newer tstore), `Denied` (no permission, or a test found that the storage does
    not create objects exclusively), `InvalidArgument` (a wrong URL, option or mode).

    In place of a URL, pass the spec of a plain Zarr array, v3 or v2, as TensorStore takes it: `{"driver": "zarr3",
    "kvstore": "file:///folder/"}`. That returns a read-only array, which is read in place. Chunks that do not
    exist have the fill value; others have no checksums, so a damaged one is noticed only if it does not decode.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> store = tstore.open("memory://of-open")
    >>> with store.transaction(tag="first") as tx:
    ...     w = tx.create_array("w", data=np.arange(6.0))
    >>> store.snapshot("first").array("w")[2:4].read()
    array([2., 3.])"""

@overload
def open(
    url: Mapping[str, Any],
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Array:
    """Open the store at a URL or path, or on a `Storage`.

    URLs begin with `file://`, `memory://`, `http(s)://`, `gs://`, `s3://` or another scheme that fsspec knows.
    `storage_options` are options of that storage, such as a `token`; they are never shown. `cache` is a local
    folder of at most 10 GiB for objects read from a server; pass a `Cache` for another limit.

    The modes "r" (read) and "r+" (read and write) require a store and create nothing. The mode "a" opens a store
    for reading and writing; if it is missing, its first transaction creates it. "x" creates a store and fails if
    there is one. Raise `NotAStore` (there is no store, or the folder has other files), `AlreadyExists` (mode "x"),
    `UnsupportedFormat` (written by a newer tstore), `Denied` (no permission, or a test found that the storage does
    not create objects exclusively), `InvalidArgument` (a wrong URL, option or mode).

    In place of a URL, pass the spec of a plain Zarr array, v3 or v2, as TensorStore takes it: `{"driver": "zarr3",
    "kvstore": "file:///folder/"}`. That returns a read-only array, which is read in place. Chunks that do not
    exist have the fill value; others have no checksums, so a damaged one is noticed only if it does not decode.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> store = tstore.open("memory://of-open")
    >>> with store.transaction(tag="first") as tx:
    ...     w = tx.create_array("w", data=np.arange(6.0))
    >>> store.snapshot("first").array("w")[2:4].read()
    array([2., 3.])"""

def quantization_loss(
    store: str | os.PathLike[str] | Store, path: str, at: int | str | None = None, *, budget: int | None = ...
) -> QuantizationLoss:
    """Return the error of an array of a quantized copy against the version from which it was quantized.

    The region with the lowest SQNR, and the SQNR of rows and columns, are those of the values that are read; other
    formats of about the same size are measured on some of them. Results are cached by the checksums of the chunks.

    Parameters
    ----------
    path, at
        The array, and the version or tag of the quantized copy, by default the newest copy.
    budget
        Bytes of values of the array to read, by default 8 MiB, and as many values of the source; None reads all.

    Raises
    ------
    `NotFound` if the version is not a quantized copy or has no such array, its subclass `SnapshotExpired` if the
    source has expired, `InvalidArgument` if the array is not quantized, and what `summarize` raises.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-loss", {"w": np.random.randn(64, 64)}, step=7)
    >>> _ = tstore.quantize("memory://of-loss", {"w": "e4m3"})
    >>> tstore.quantization_loss("memory://of-loss", "w").sqnr > 30
    True"""

def quantize(
    store: str | os.PathLike[str] | Store,
    formats: QuantizeRules = None,
    *,
    min_sqnr: float | None = None,
    bits: float | None = None,
    error: Literal["absolute", "relative"] | None = None,
    coding: Literal["entropy", "packed"] | None = None,
    sensitivity: Sensitivity | None = None,
    at: int | str | None = None,
    subtree: str = "",
    tag: str | None = None,
    message: str = "",
    axis: int | None = None,
    block: int | Literal["auto"] | None = "auto",
    scale: Literal["search", "max", "none", "float", "e4m3", "6bit"] = "search",
    executor: Executor | None = None,
    memory: int = ...,
    progress: ProgressCallback | None = None,
) -> QuantizeReport:
    """Commit a copy of a version with its float arrays in low-bit formats, and return a report of its errors.

    The source version and the head are unchanged: the copy is read by its tag or version, and garbage collection
    removes it with its source unless a rule of `Keep` says otherwise. The store must exist.

    Integers, arrays of fewer than 64 values, and arrays with NaN or infinity get no eXmY format, and the report
    says why. Nor do one-dimensional arrays, unless the last part of a rule's pattern has characters other than
    wildcards ("**/bias" encodes them, "**" and "layers/*" do not). The encoding is that of `exmy.quantize`.

    Parameters
    ----------
    formats
        One eXmY format, or rules: formats or targets by path pattern. The first pattern that matches an array
        applies; None leaves the array unchanged, and `Bits(3)`, `MinSqnr(30)`, {"bits": 3} or {"min_sqnr": 30} is
        a target for the arrays of the rule alone. Without `formats`, `min_sqnr` and `bits`, the arrays that can be
        encoded get 8 bits per value.
    min_sqnr
        Each array without a rule gets the fewest bits that reach this SQNR in dB: 10·log10(Σx² / Σ(x−y)²), where x
        are the values and y the decoded values. If rows or columns have an importance (`sensitivity`), it weights
        the squares.
    bits, error
        The arrays without a rule get the formats with the least total error whose stored size, averaged over all
        arrays of the checkpoint, is at most `bits` per value. The header of a chunk of packed codes, 8 to 19
        bytes, does not count. `error`, by default "relative", is described in `Bits`.
    coding
        How the formats chosen for a target are stored. "entropy": one step size per array, or one per row where
        the magnitudes of rows differ, and codes compressed by zstd; this has the least error at a given size, and
        reaches any average number of bits (an array of up to 4096 values may be packed, with one offset, if that
        takes fewer bytes). "packed": codes in the width of their format, with an offset per block; parts of a
        chunk can be read, and `restore(packed=True)` returns the codes. By default "packed" if `axis`, `block` or
        `scale` is passed, otherwise "entropy".
    sensitivity
        How much `bits` weights the relative error of each array: weights by path (1 for the others), or a
        function. A weight of shape (columns,) or (rows, 1) is the importance of each column or row, such as the
        mean square of a layer's inputs (the imatrix of llama.cpp). It weights the errors when steps, offsets and
        scales are chosen, even in a format that a rule names, and the report has the weighted SQNR beside the
        unweighted errors. A function takes a dict of the arrays by path, and returns the loss of the model. It is
        called once per array, with 10 % noise added to that array; the increase of the loss is its weight.
    at
        A version or tag; by default the newest step, or without steps the head. If garbage collection removes that
        version meanwhile, the newest one by then is quantized.
    subtree
        Copy only this path and what is below it, such as "model" in a training step; paths stay the same.
    tag
        The tag of the new commit, which must not name a step. By default, the source's tag (or v<version>) and
        the formats, such as "step/100/8bits".
    axis, block, scale
        Which values of a packed array share an exponent offset, as in `exmy.quantize`. By default (block="auto",
        no `axis`) an array with a format has one offset, or a float scale for each chunk. An array with a target
        has one per block of 128, 64 or 32 values along its last axis, the first of these sizes that divides the
        axis and its chunks; if none does, it has one offset.
    executor
        An executor of threads, processes or a Dask cluster, whose workers read, encode and write. They open the
        store by its URL.
    memory
        The size in bytes of the cache of values in this process, or in each worker (by default 256 MB), which
        saves reading them again; the result does not depend on it. Slabs and buffers take up to 200 MiB more on 4
        cores, and 400 MiB on 16 or more.
    progress
        Called with the number of bytes of values processed so far, and with the total.

    Raises
    ------
    `NotAStore`, `InvalidArgument` (a pattern without a match, a budget that can't be met), `AlreadyExists` (the
    tag), `Conflict`, `NotFound`, `SnapshotExpired`, `StorageFull`, `Unavailable` (also if the executor breaks).
    After an error other than `CommitOutcomeUnknown` nothing is committed.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-quantize", {"w": np.random.randn(256, 256)}, step=7)
    >>> report = tstore.quantize("memory://of-quantize", {"**": "e4m3"}, tag="small")
    >>> report.tag, report.arrays[0].format
    ('small', 'e4m3')
    >>> tstore.restore("memory://of-quantize", at="small")["w"].dtype
    dtype('float64')"""

def quantize_report(store: str | os.PathLike[str] | Store, at: int | str | None = None) -> QuantizeReport:
    """Return the report of a quantized copy, by default the newest; raise `NotFound` if the version is not one."""

def restore(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    into: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    missing: Missing = "error",
    packed: bool = False,
    map: bool = False,
    verify: Verify = "first",
    per_host: PerHostRule = "same",
    host: int = 0,
    hosts: int = 1,
) -> Any:
    """Return the checkpoint of a step (by default the newest), or of a version or tag (`at`), as NumPy arrays.

    Only the chunks that are needed are read. If garbage collection removes the newest step during the read, the
    step that is newest by then is restored instead.

    Parameters
    ----------
    target
        The structure to return, with leaves that have `shape` and `dtype`, or `Shards` for a part of an array. It
        must fit the checkpoint: one `StructureMismatch` lists every path, shape and dtype that does not. Without a
        target, dataclasses and namedtuples become dicts.
    into
        A target whose NumPy arrays are filled and returned, whatever their strides and memory; `Shards`
        have an array for each part. Nothing is changed unless the checkpoint fits, all arrays are writable, and
        none share memory. If a read fails later, a note on the error lists the arrays that are partly filled.
    only
        A pattern such as "params/**", or a list of patterns: only arrays and Python scalars with a matching path
        are restored. The target's other leaves are returned unchanged.
    rename
        New paths, keyed by patterns of stored paths; the first match applies. A wildcard in a new path stands for
        what the same wildcard matched: {"net/**": "model/**"}, or {"**": "model/**"} for all. The other arguments
        refer to the new paths. Without a target, the result consists of nested dicts.
    dtype
        The dtype of restored float arrays: one dtype, "target" for the dtypes of the target, or a mapping from
        path patterns. By default nothing is cast.
    missing
        With "keep", leaves of the target that the checkpoint lacks are returned unchanged; by default they are a
        mismatch. With `into`, no other step is then restored if the newest is removed during the read.
    packed
        Return arrays in eXmY formats as `exmy.Quantized`, neither decoded nor cast, and those for which the
        target has `Shards` as `PackedShards`. Other arrays are returned as without `packed`, and so are 0-d ones.
        Codes that do not fit together (chunks or regions that cut rows or blocks with an offset of their own) are
        an `InvalidArgument` that names all these arrays.
    map
        Return a `Mapped`: the arrays by path, in read-only memory that is the system's cache of a local store,
        without a copy. Arrays that codecs encode, parts of others, and those of other storage are read.
    verify
        When mapped arrays are compared with their checksums: with "first", before each is first taken out of
        the `Mapped`, so that no changed bit goes unnoticed, and nothing is read that is not used; with "never",
        only by `Mapped.verified`.
    per_host
        What to restore for a saved `PerHost`. "same": the value of the host with the same number; the number of
        hosts must be the same. "keep": as "same", but the target's value if the number of hosts differs. "all": a
        list of the values of all hosts, on any number of hosts.
    host, hosts
        The number of this host, and the number of hosts, for `per_host`.

    Raises
    ------
    `NotAStore`, `NotFound`, `SnapshotExpired` (garbage collection removed the version), `Corrupt`,
    `StructureMismatch`, `InvalidArgument`.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-restore", {"w": np.arange(4.0), "b": np.zeros(2)}, step=7)
    >>> tstore.restore("memory://of-restore", only="w")
    {'w': array([0., 1., 2., 3.])}
    >>> target = {"w": np.empty(4, "float32"), "b": np.empty(2, "float32")}
    >>> tstore.restore("memory://of-restore", target=target, dtype="target")["w"].dtype
    dtype('float32')"""

def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    host: int = 0,
    hosts: int = 1,
    attempt: str | None = None,
    codecs: QuantizeRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
    overwrite: bool = False,
    priority: Literal["normal", "low"] | None = None,
) -> int:
    """Save a tree of arrays as one atomic commit and return its version. Durable on return.

    The store is created if there is none. To save from many hosts, each calls this with the same tree structure,
    `step`, `hosts` and `attempt`, and with its own `host`.

    Parameters
    ----------
    tree
        Nested dicts, lists, tuples and dataclasses of arrays (of NumPy, or a library whose arrays NumPy can take),
        `Shards`, scalars, and `PerHost` for values that differ between hosts. All others must be equal on every
        host, and one host writes each array. Do not change the arrays before this returns.
    host, hosts, attempt
        The number of this host, the number of hosts, and a token that differs each time the job is started; by
        default it is detected under srun and under one agent of torchrun (see the guide on operation). To save
        other values as a step whose save has failed, pass another token on every host, as a `Checkpointer` does.
    codecs
        None, "lossless", an eXmY format for all float arrays, or rules by path pattern (the first match
        applies); each chunk has its own exponent offset. On one host, `MinSqnr(30)` and `Bits(5)` choose formats.
    metrics, attributes
        Numbers for the history (NaN never counts as the best), and JSON attributes of the root group. Every host
        passes the same ones.
    tags
        Names for this version, set by the same commit. A tag that is in use moves here.
    durability, timeout
        With durability "none" a power failure may undo the commit. `timeout` is how long to wait for the other
        hosts, in seconds.
    overwrite
        Whether to replace the step if it is already saved. The old checkpoint stays until the new one is
        committed, and after that in the history, as its version.
    priority
        With "low" the save uses fewer threads, and pauses while the main thread is busy; with "normal" it does
        neither. By default only a save in the background has low priority, once its values are staged.

    Raises
    ------
    `AlreadyExists` (the step is already saved), `Conflict` (another writer saved the step to be overwritten),
    `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the absent hosts), `NotFinite`, `InvalidArgument`,
    `StorageFull`, `CommitOutcomeUnknown`. Earlier commits are unchanged. After an error the step is not saved, and
    never will be, with two exceptions: after `DeadlineExceeded`, absent hosts may still deliver their parts. After
    `CommitOutcomeUnknown`, repeat the save to find out: it raises `AlreadyExists` if the step is saved, or returns
    the version if it has several hosts and the same attempt.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> tree = {"layers": {0: np.zeros((4, 3), "float32")}, "epoch": 2}
    >>> tstore.save("memory://of-save", tree, step=7, metrics={"loss": 0.5})
    1
    >>> tstore.steps("memory://of-save")
    [7]"""

def save_async(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    staging: StagingChoice = "memory",
    in_flight: InFlight = "queue",
    host: int = 0,
    hosts: int = 1,
    attempt: str | None = None,
    codecs: QuantizeRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
    overwrite: bool = False,
    priority: Literal["normal", "low"] | None = None,
) -> BackgroundSave:
    """Start a save in the background; return its `BackgroundSave` once the arrays may be changed.

    A process that ends normally finishes its saves first, wherever they began. If a save fails, `wait` of the
    `BackgroundSave` raises its error, and so does an `await` of its `committed`. If nobody waits for either, the
    process prints the error at exit, and its exit status is 1. A forked child does not continue the saves of its
    parent.

    While the main thread is busy, the save pauses after each stretch of Python code, so that the save hardly slows
    the main thread. A save of very many leaves therefore takes longer. The save does not pause while the main
    thread waits, for a device or for the save.

    Parameters
    ----------
    store, tree, step, and options not named here
        As `save` takes them. If a `Store` is passed, its `close` waits for the end of the save.
    staging
        With "memory" the values are copied, so the save needs as much memory again as the state. With "turns" this
        returns when all values are written, and only the fsync and the commit are left. That takes longer, but
        needs no more memory than `save`. With "reference" nothing is copied: do not change the arrays before the
        commit.
    in_flight
        A host runs at most one save to a URL at a time. With "queue" the next save waits for the current one
        before it copies its values; with "refuse" it raises `Misuse`.

    Raises
    ------
    `InvalidArgument`, `Misuse` (a save is under way, or the process is exiting), `Denied`; with "turns" also what
    `save` raises while it writes.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> w = np.zeros(4)
    >>> saving = tstore.save_async("memory://of-save-async", {"w": w}, step=7)
    >>> w += 1  # what is saved is a copy
    >>> saving.wait()
    1"""

def steps(store: str | os.PathLike[str] | Store) -> list[int]:
    """Return the numbers of the saved steps, in increasing order; raise `NotAStore` if there is no store.

    `Checkpointer.steps` returns a `Step` for each, with its version, time and metrics."""

def stream(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    order: Order = "storage",
    host: int = 0,
    hosts: int = 1,
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the values of each array of a checkpoint, while the next ones are read.

    Up to 64 MiB are read ahead, or one longer array, so a consumer that keeps no array needs little memory. Python
    scalars are not among the arrays: `restore` returns them. If the consumer stops early, what is being read is
    cancelled; `contextlib.aclosing` makes it wait for that.

    Parameters
    ----------
    target, only, rename, dtype, host, hosts
        As in `tstore.restore`; a target need not have Python scalars. A target's `Shards` come with the parts that
        they ask for, and only these are read.
    order
        "storage", the order of the bytes in the store, which is read fastest; or paths, which come first.

    Raises
    ------
    As `tstore.restore`, before an array that can't be read, or the small arrays that are read together with it;
    `SnapshotExpired` if garbage collection removes the version meanwhile.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-stream", {"w": np.ones((2, 3)), "b": np.zeros(2)}, step=7)
    >>> for path, values in tstore.stream("memory://of-stream", order=["b"]):
    ...     print(path, values.shape)
    b (2,)
    w (2, 3)"""

def summarize(
    array: Array, *, budget: int | None = ..., rows: int | None = None, columns: int | None = None, bins: int = 64
) -> Summary:
    """Return the statistics of an array or a view: counts, extremes, mean, histograms, norms of rows and columns.

    Memory is bounded, and so is the time if there is a budget. Results are cached by the checksums of the chunks.

    Parameters
    ----------
    array
        An array of numbers or booleans. Complex numbers count by their magnitude.
    budget
        Bytes of values to read, by default 8 MiB: tiles of chunks that are spread over the array, always the same
        ones. None reads all values. `Summary.coverage` tells what was read.
    rows, columns
        The axes whose norms to return, by default the last two, in at most 256 strips of adjacent indices each.
    bins
        The number of bins of the histogram of values, at most 4,096. Integers between close bounds have a bin
        each.

    Raises
    ------
    `InvalidArgument` (values that are not numbers, an axis that does not exist, chunks too long to decode for a
    part), `NotFound` if a chunk was never written and the array is not sparse, `Corrupt`, `SnapshotExpired`.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-summarize", {"w": np.array([[0.0, 3.0], [4.0, -1.0]])}, step=7)
    >>> summary = tstore.summarize(tstore.open("memory://of-summarize").snapshot().array("w"))
    >>> summary.minimum, summary.maximum, summary.mean, summary.zeros
    (-1.0, 4.0, 1.5, 1)"""
