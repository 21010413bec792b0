"""Following a store: its new versions as they are committed, and arrays in memory that are kept at the newest.

1. A version is due if its commit changed the tree (without a pattern of tags), or if a commit gave it a matching
   tag. Records that change nothing, and numbers that a repair voided, are passed over: no gap ends the iteration.
2. A wait ends when the folder of the log gets a name (`watch`), and otherwise polls with growing pauses.
3. `update` reads only the chunks that differ from the version in memory, all of them before it changes anything.
   They are copied under a lock, so a reader that takes it sees one version. If copying fails, the next call reads
   all arrays.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tstore.core.data.changes import Region, changed_regions, region_job, region_shape
from tstore.core.data.destinations import check_distinct
from tstore.core.format.arguments import checked_choice, checked_index, quote
from tstore.core.format.patterns import compile_patterns
from tstore.core.log.expiry import guard_expiry
from tstore.core.log.history import commits_of
from tstore.core.log.reader import LogReader
from tstore.core.runtime import world
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot, array_node, head_snapshot, snapshot_of
from tstore.core.storage.watch import Watch
from tstore.errors import Corrupt, InvalidArgument, Misuse, NotFound, SnapshotExpired, bullet_list

__all__ = ["Follower", "Versions"]

Versions = Literal["each", "newest"]
"""Which new versions to yield: each of them, in order, or only the newest."""

_SHORTEST, _LONGEST = 0.05, 2.0  # seconds between polls
_NOTIFIED = 5.0  # seconds between polls beside notifications, which a network file system may not send

_Arrays = dict[str, npt.NDArray[Any]]


class _Change(NamedTuple):
    """Values to copy to a region of an array."""

    array: npt.NDArray[Any]
    region: Region
    values: npt.NDArray[Any]


class Follower:
    """The new versions of a store, from `Store.follow`: an asynchronous iterator of snapshots that never ends."""

    def __init__(
        self, log: LogReader, since: int | None, tags: str | list[str] | None, versions: Versions
    ) -> None:
        patterns = [] if tags is None else [tags] if isinstance(tags, str) else tags
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise InvalidArgument(f"tags={quote(tags)}: expected a pattern such as 'step/*', or a list of them")
        self._log = log
        self._selects: Callable[[str], bool] | None = None if tags is None else compile_patterns(patterns)
        checked_choice("versions", versions, ("each", "newest"))
        self._versions = versions
        self._position = None if since is None else checked_index("since", since)
        if self._position is not None and self._position < 0:
            raise InvalidArgument(f"since={quote(since)}: expected the last version that is known, 0 for none")
        self._due: collections.deque[int] = collections.deque()
        self._turn = asyncio.Lock()  # of one call at a time to wait for a version and take it
        self._held: tuple[Snapshot, _Arrays] | None = None
        self.lock = threading.Lock()
        """Held by `update` while it changes arrays: a thread that reads them under it sees one version."""

    @property
    def held(self) -> int | None:
        """The version that the arrays of the last update hold, None for none; to be read under `lock`, too."""
        return None if self._held is None else self._held[0].version

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Snapshot:
        """Wait for the next version. After `SnapshotExpired`, go on behind the version that it names."""
        async with self._turn:
            snapshot = await self._wait()
            self._due.popleft()
        return snapshot

    async def _wait(self) -> Snapshot:
        """Wait for the next version and return it; it stays the first that is due."""
        if (snapshot := await self._poll()) is not None:
            return snapshot
        async with Watch(self._log.storage, "commits") as watch:
            pause = _SHORTEST
            while (snapshot := await self._poll()) is None:
                await watch.wait(_NOTIFIED if watch.notified else pause * world.uniform(0.5, 1))
                pause = min(2 * pause, _LONGEST)
        return snapshot

    async def _poll(self) -> Snapshot | None:
        """Return the next version, or None if there is none yet."""
        newest = await self._log.newest()
        if self._position is None:
            snapshot = await self._current(newest)
            self._due += [] if snapshot is None else [snapshot.version]
            self._position = newest
        async for version, record in self._log.each_record(range(self._position + 1, newest + 1)):
            self._due += self._named(version, record)
            self._position = version
        while self._due:
            if self._versions == "newest":
                self._due = collections.deque([self._due[-1]])
            version = self._due[0]  # stays due until there is a snapshot, or there will never be one
            try:
                return await snapshot_of(self._log, version, await self._log.newest())
            except SnapshotExpired as error:
                self._due.popleft()
                if self._versions == "each":
                    raise SnapshotExpired(
                        f"{error}. The follower was slower than the retention: go on with the next version, keep "
                        "versions for longer, or follow with versions='newest'"
                    ) from error
        return None

    async def _current(self, newest: int) -> Snapshot | None:
        """Return the snapshot to begin with: the head, or the newest version with a matching tag."""
        if not newest:
            return None
        if self._selects is None:
            head = await head_snapshot(self._log)
            return head if head.version else None
        tags = (await self._log.head(newest)).tags
        versions = [version for tag, version in tags.items() if self._selects(tag)]
        return await snapshot_of(self._log, max(versions), newest) if versions else None

    def _named(self, version: int, record: Any) -> Iterator[int]:
        """Yield the versions that a commit makes due."""
        if record.void or record.collection is not None:
            return
        if self._selects is None:
            if not record.source and (record.manifests or record.deleted or record.replaces):
                yield version
            return
        for commit in reversed(commits_of(version, record)):
            yield from (target for tag, target in commit.tagged.items() if self._selects(tag))
        if any(self._selects(tag) for commit in commits_of(version, record) for tag in commit.tags):
            yield version

    async def update(self, into: Any, timeout: float | None = None) -> Snapshot | None:
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
        read-only or shares memory with another, and `SnapshotExpired` as the iteration does.
        """
        arrays = dict(_arrays_in(into, ""))
        if not arrays:
            raise InvalidArgument(
                f"into={quote(into)} has no NumPy arrays; pass those to bring to the new version"
            )
        async with self._turn:
            try:
                async with asyncio.timeout(timeout):
                    snapshot = await self._wait()
            except TimeoutError:
                return None
            try:
                changes = await self._changes(snapshot, arrays)
            except SnapshotExpired:
                self._due.popleft()  # there are newer versions
                raise
            await run(self._apply, snapshot, arrays, changes)
        return snapshot

    async def _changes(self, snapshot: Snapshot, arrays: _Arrays) -> list[_Change]:
        """Read what differs from the arrays."""
        await snapshot.read_nodes(arrays)
        nodes = {path: array_node(snapshot.tree, path, snapshot.location) for path in arrays}
        unfit = [
            f"{path} is {node.meta.dtype.name} of shape {node.meta.shape}, not {a.dtype.name} of {a.shape}"
            for path, node in nodes.items()
            if (a := arrays[path]).shape != node.meta.shape or a.dtype != node.meta.dtype
        ]
        unfit += [f"{path} can't be written" for path, array in arrays.items() if not array.flags.writeable]
        if unfit:
            raise InvalidArgument(f"{snapshot.location} does not fit these arrays: {bullet_list(unfit)}")
        check_distinct(arrays.items())
        regions = await self._regions(nodes, arrays)
        changes, jobs = [], []
        for path, node in nodes.items():
            whole = tuple(slice(0, n) for n in node.meta.shape)
            for region in [whole] if regions[path] is None else regions[path] or ():
                values = np.empty(region_shape(region), node.meta.dtype)
                changes.append(_Change(arrays[path], region, values))
                jobs.append(region_job(node, region, values))
        await snapshot.read_jobs(jobs)
        return changes

    async def _regions(self, nodes: Mapping[str, Any], arrays: _Arrays) -> dict[str, list[Region] | None]:
        """Return the regions of each array to read; None for a whole array."""
        everything: dict[str, list[Region] | None] = dict.fromkeys(nodes)
        if self._held is None:
            return everything
        base, known = self._held
        same = [path for path, array in arrays.items() if known.get(path) is array]
        try:
            await base.read_nodes(same)
            old = {
                path: node for path in same if (node := base.tree.nodes.get(path)) is not None and node.is_array
            }
            compared = run(lambda: {path: changed_regions(node, nodes[path]) for path, node in old.items()})
            return everything | await guard_expiry(self._log, base.version, compared)
        except (Corrupt, NotFound):  # the base has expired since, or is damaged
            return everything

    def _apply(self, snapshot: Snapshot, arrays: _Arrays, changes: Sequence[_Change]) -> None:
        with self.lock:
            self._held = None
            for array, region, values in changes:
                array[region] = values
            self._held = snapshot, arrays
        self._due.popleft()

    def __reduce__(self) -> str:
        raise Misuse("a follower belongs to its process and can't be pickled: pass the store, and follow it there")

    def __repr__(self) -> str:
        return f"<tstore.Follower {self._log.storage.url} behind version {self._position or 0}>"


def _arrays_in(tree: Any, path: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the arrays in dicts, lists and tuples with their paths."""
    if isinstance(tree, np.ndarray):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _arrays_in(value, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _arrays_in(value, f"{path}/{i}" if path else str(i))
    elif hasattr(tree, "shape"):
        raise InvalidArgument(
            f"{path or 'into'} is a {type(tree).__name__}; expected NumPy arrays to update in place"
        )
