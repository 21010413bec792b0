"""Store: everything under one URL, with its snapshots, transactions, history and maintenance."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tstore.core.format.arguments import (
    checked_choice,
    checked_function,
    checked_indices,
    checked_metadata,
    checked_text,
    quote,
)
from tstore.core.format.tree.retention import ABANDONED_AFTER, Keep
from tstore.core.log.expiry import check_tag_alive
from tstore.core.log.log import Log
from tstore.core.log.marker import Marker, create_marker, marker_for
from tstore.core.log.reader import LogReader, read_hint
from tstore.core.snapshot import Snapshot, SnapshotCall, head_snapshot, snapshot_of
from tstore.core.storage.base import Storage
from tstore.core.storage.cache import Cache, CachedStorage, without_cache
from tstore.core.storage.connect import Address, storage_at
from tstore.core.storage.objects import Durability, Traffic, checked_durability
from tstore.core.storage.wrapper import ReadOnlyStorage
from tstore.core.transactions.membership import membership
from tstore.core.transactions.staging import Isolation
from tstore.core.transactions.tag_edits import TagEdits
from tstore.core.transactions.transaction import Transaction
from tstore.errors import Denied, InvalidArgument, Misuse, NotAStore, NotFound, TStoreError

if TYPE_CHECKING:  # rarely used modules are imported on first use
    from tstore.core.following import Follower, Versions
    from tstore.core.log.history import Commit
    from tstore.core.maintenance.diff import Diff
    from tstore.core.maintenance.gc import CollectReport
    from tstore.core.maintenance.repair import RepairReport
    from tstore.core.maintenance.verify import VerifyProgress, VerifyReport
    from tstore.core.transactions.pending import PendingTransaction

__all__ = ["Mode", "Moment", "Store", "close_after", "open", "opened"]

Mode = Literal["r", "r+", "a", "x"]
"""How to open a store: "r" reads, "r+" reads and writes, "a" also creates a missing store, "x" only creates."""

Moment = int | str | datetime.datetime  # identifies a version: its number, a tag, or the time of its commit


async def open(
    url: str | os.PathLike[str] | Storage,
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Store:
    """Open a store at a URL or path, or on a `Storage`: see `tstore.open`."""
    if not isinstance(mode, str) or mode not in get_args(Mode):
        raise InvalidArgument(
            f"mode={quote(mode)}: expected 'r' (read), 'r+' (read and write), 'a' (read and write, create if "
            "missing) or 'x' (create)"
        )
    if isinstance(url, Store):
        raise InvalidArgument(f"{url!r} is already open; use it, or pass its url to open it once more")
    storage = storage_at(url, storage_options)
    hint = asyncio.ensure_future(_prefetch_hint(storage))
    try:
        local = cache if cache is None or isinstance(cache, Cache) else Cache(cache)
        marker, writable = await marker_for(storage, mode, deferred=local is None)
        is_local = storage.capabilities.native_io
        used = storage if writable or is_local else ReadOnlyStorage(storage)
        if local is not None and marker is not None:
            used = CachedStorage(used, local, str(marker.uuid))
        return Store(used, marker, mode, await hint, Address.of(url, storage_options, local))
    except BaseException:
        hint.cancel()
        await asyncio.wait([hint])
        if storage is not url:
            await storage.close()
        raise


async def _prefetch_hint(storage: Storage) -> int | None:
    """Return the hint to the newest version, read concurrently with the marker where requests wait for a server.

    Return None if the hint can't be read, and for other storage, where `Store` reads the hint when it needs it.
    """
    if not storage.tuning.latency_bound:
        return None
    try:
        return await read_hint(storage)
    except TStoreError:
        return None


@contextlib.asynccontextmanager
async def opened(store: str | os.PathLike[str] | Store, mode: Mode) -> AsyncIterator[Store]:
    """Yield an open `Store` unchanged, or open the store at a URL in this mode and close it afterwards."""
    if isinstance(store, Store):
        yield store
        return
    async with await open(store, mode) as new:
        yield new


def close_after(store: Store, work: Future[None]) -> None:
    """Make `store.close` wait for work in the background, which uses the same storage."""
    store._background.add(work)
    work.add_done_callback(store._background.discard)


class Store:
    """Everything under one URL. Readers never block; writers can conflict only when they commit."""

    def __init__(
        self,
        storage: Storage,
        marker: Marker | None,
        mode: Mode,
        hint: int | None = None,
        address: Address | None = None,
    ) -> None:
        log_id = None if marker is None else marker.log_id
        reader = LogReader(storage, hint, log_id=log_id, address=address)
        self.log = Log(reader, self._create if marker is None else None)
        """The log of commits."""
        self._cooperating: weakref.WeakValueDictionary[tuple[str, int], Transaction] = (
            weakref.WeakValueDictionary()
        )
        """The cooperative transactions opened here, by id and host."""
        self._background: set[Future[None]] = set()
        self.marker = marker
        """None until the first transaction creates the store."""
        self.mode = mode

    @property
    def url(self) -> str:
        """The URL or path of the store."""
        return self.log.storage.url

    @property
    def uuid(self) -> str:
        """The identity of the store, chosen at random at its creation; raises `NotAStore` before it."""
        if self.marker is None:
            raise NotAStore(f"{self.url} does not exist yet; its first transaction creates it")
        return str(self.marker.uuid)

    async def _create(self) -> None:
        """Create the store, or read the marker of another process that did."""
        self.marker, _ = await create_marker(self.log.storage, 2)
        self.log.reader.records.chain.log_id = self.marker.log_id

    @property
    def traffic(self) -> Traffic | None:
        """The requests to the server since the store was opened; None for a store without a server."""
        return without_cache(self.log.storage).traffic

    @property
    def _log_id(self) -> bytes | None:
        return None if self.marker is None else self.marker.log_id

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
        """Return a new transaction; `async with` commits it on exit and aborts it on an exception.

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
        `Misuse` if this host already has the same transaction open in this `Store`.
        """
        self._check_writable()
        checked_choice("isolation", isolation, ("snapshot", "serializable"))
        member = membership(name, host, hosts, attempt, isolation, drop_tag)
        if member is not None:
            earlier = self._cooperating.get((member.transaction, host))
            if earlier is not None and not earlier.ended:
                raise Misuse(
                    f"{self.url}: host {host} already has transaction {name!r} open; use that one, or end it first"
                )
        transaction = Transaction(
            self.log,
            message=checked_text("message", message),
            tags=TagEdits.from_arguments(tag, move_tag, drop_tag),
            isolation=isolation,
            durability=checked_durability(durability),
            member=member,
            metadata=None if metadata is None else checked_metadata(metadata),
        )
        if member is not None:
            self._cooperating[member.transaction, host] = transaction
        return transaction

    def snapshot(self, at: Moment | None = None) -> SnapshotCall:
        """Return the snapshot at a version, tag or time; by default the head, the newest version except copies.

        A time selects the head at that time. Raise `NotFound` if there is no such version or tag, or nothing was
        committed by that time, and its subclass `SnapshotExpired` if garbage collection removed the version.
        """
        return SnapshotCall(head_snapshot(self.log.reader) if at is None else self._snapshot(at))

    async def _snapshot(self, at: Moment) -> Snapshot:
        if isinstance(at, np.integer):  # a version taken from an array
            at = int(at)
        if not isinstance(at, int | str | datetime.datetime) or isinstance(at, bool):
            raise InvalidArgument(f"at={quote(at)}: expected a version, a tag, a datetime, or None for the head")
        newest = await self.log.reader.newest()
        if isinstance(at, datetime.datetime):
            from tstore.core.log.history import version_at

            version = await version_at(self.log.reader, at, newest)
        else:
            version = await self._resolve(at, newest)
        return await snapshot_of(self.log.reader, version, newest)

    async def _resolve(self, at: int | str, newest: int) -> int:
        from tstore.core.log.history import version_named

        try:
            return await version_named(self.log.reader, at, newest)
        except NotFound:
            if isinstance(at, str):
                await check_tag_alive(self.log.reader, at)
            raise

    async def diff(self, before: Moment, after: Moment | None = None, *, budget: int | None = None) -> Diff:
        """Return how the arrays of two versions differ; `before` and `after` take what `snapshot` takes as `at`.

        Only chunks of float arrays that differ are read; with a budget, about as many bytes of their values: small
        arrays whole, and samples of others. Raise `NotFound` as `snapshot` does.

        Examples
        --------
        >>> import tstore.sync as tstore
        >>> for step in range(2):
        ...     _ = tstore.save("memory://of-diff", {"w": np.full(4, float(step)), "b": np.zeros(2)}, step)
        >>> [(array.path, array.change) for array in tstore.open("memory://of-diff").diff(1, 2).arrays]
        [('w', 'changed')]
        """
        from tstore.core.maintenance.diff import diff_snapshots

        snapshots = await self.snapshot(before), await self.snapshot(after)
        return await diff_snapshots(self.log.reader, *snapshots, budget)

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
        (2, [1.0, 1.0, 1.0])
        """
        from tstore.core.following import Follower

        return Follower(self.log.reader, since, tags, versions)

    def history(self) -> AsyncIterator[Commit]:
        """Iterate over the commits, newest first, including those whose version has expired.

        Transactions that were committed together share a version. Raise `Corrupt` if a record is damaged, and
        `NotFound` if one is missing.
        """
        from tstore.core.log.history import history

        return history(self.log.reader)

    async def tags(self) -> dict[str, int]:
        """Return every tag with the version that it names."""
        return (await self.snapshot()).tags

    async def outcome(self, transaction: str) -> int | None:
        """Return the version that a transaction was committed as, or None if it is not committed.

        If the store is open for writing, the version is durable on return, unless it was committed with durability
        "none". The cost grows with the number of commits. Raise `Corrupt` if a record is damaged.
        """
        from tstore.core.transactions.pending import base_of

        transaction = checked_text("transaction", transaction)
        version = await self.log.reader.find(transaction, await base_of(self.log.reader, transaction))
        if version is not None and self.mode != "r":
            durable = (await self.log.reader.record(version)).durable
            await self.log.make_durable(version, Durability.FSYNC if durable else Durability.NONE)
        return version

    async def pending(self) -> list[PendingTransaction]:
        """Return the cooperative transactions that are not committed, with the hosts that are absent.

        The cost grows with the number of commits.
        """
        from tstore.core.transactions.pending import pending

        return await pending(self.log.reader)

    async def finish(self, transaction: str) -> int:
        """Commit a cooperative transaction whose hosts have all delivered their fragments, and return its version.

        Use it when hosts died between their fragments and the commit; any process may call it, at any time.
        `transaction` is an id, or a name with only one attempt under way; it may already be committed.
        Raise `DeadlineExceeded` at once if fragments are missing, and name their hosts, or if a host of a
        `Checkpointer` gave up and withdrew the transaction. Also raise `NotFound`, `InvalidArgument` (several
        attempts have that name), `Inconsistent`, `Conflict` or `Denied`.
        """
        from tstore.core.transactions.cooperative import CooperativeCommit
        from tstore.core.transactions.pending import find_pending

        self._check_writable()
        member = await find_pending(self.log.reader, transaction)
        return await CooperativeCommit(self.log, member, Durability.FSYNC).finish()

    async def verify(self, progress: Callable[[VerifyProgress], object] | None = None) -> VerifyReport:
        """Read and check every record, manifest and chunk of every version; report each fault.

        The cache is bypassed. `progress` is called with the work done, often and from any thread. Faults are in
        the report, and are not raised.
        """
        from tstore.core.maintenance.verify import verify_store

        checked_function("progress", progress)
        return await verify_store(LogReader.strict(without_cache(self.log.storage), self._log_id), progress)

    async def repair(self, void: Sequence[int] = (), *, void_intact: Sequence[int] = ()) -> RepairReport:
        """Report the versions whose records are damaged or refer to missing objects; void the versions passed.

        To void a version is to replace its record by one without changes: what the version changed is lost, and
        readers and commits continue with the other versions. Without arguments nothing is changed. `void` lists
        versions whose record is damaged or missing. Versions in `void_intact` are voided even if their record is
        intact, for example because it is forged. The bytes of each voided record are kept under `damaged/`.
        Processes that have the store open must open it again (`TimelineChanged`). Raise `Denied` on a store opened
        with mode "r" or through a server, `InvalidArgument` for a version that does not exist, an intact one in
        `void`, or one on which other versions rest.
        """
        from tstore.core.maintenance.repair import repair_store

        damaged, intact = checked_indices("void", void), checked_indices("void_intact", void_intact)
        if damaged or intact:
            self._check_writable()
        return await repair_store(self.log.storage, self._log_id, damaged, intact)

    async def collect(
        self, keep: Keep | None = None, *, abandoned: datetime.timedelta = ABANDONED_AFTER, dry_run: bool = False
    ) -> CollectReport:
        """Remove the versions that `keep` does not keep, and the data of abandoned transactions; report both.

        Without `keep` every version is kept. A transaction is abandoned if it is not committed and nothing was
        written to it for the time `abandoned`; if its writer continues later, its commit fails. `dry_run` removes
        nothing. A collection is safe while others write, read and collect. Raise `Denied` on a store opened with
        mode "r" (unless `dry_run`), `NotFound` if no living version has a tag or metric that `keep` names, and
        `InvalidArgument` for other bad values.
        """
        from tstore.core.maintenance.gc import collect

        if self.mode == "r" and not dry_run:
            raise Denied(f"{self.url} was opened with mode='r'; open it with mode='r+', or pass dry_run=True")
        if keep is not None and not isinstance(keep, Keep):
            raise InvalidArgument(f"keep={quote(keep)}: expected a tstore.Keep, such as Keep(last=5), or None")
        return await collect(self.log, keep, abandoned, dry_run=dry_run)

    def _check_writable(self) -> None:
        if self.mode == "r":
            raise Denied(f"{self.url} was opened with mode='r'; open it with mode='r+' to write")

    async def close(self) -> None:
        """Wait for saves in the background, and release open files and connections.

        Further use of the store opens them again.
        """
        await asyncio.gather(*map(asyncio.wrap_future, self._background), return_exceptions=True)
        await self.log.storage.close()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<tstore.Store {self.url} mode={self.mode!r}>"
