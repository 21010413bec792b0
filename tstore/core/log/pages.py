"""The pages and segments of a store's manifests: read when needed, verified, and cached up to a bound."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

from tstore.core.format.frame import NO_RECORD
from tstore.core.format.layout import is_root
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.object_ref import ObjectRef, Page, PagePlace
from tstore.core.format.objects.pages import decode_page
from tstore.core.format.objects.segments import Segment, SegmentSource, decode_segment
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.stored_nodes import DerivedNodes, ManifestNodes, PageNodes
from tstore.core.format.tree.tree import Tree
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.cache import forget
from tstore.errors import Corrupt, NotFound, TimelineChanged

__all__ = ["PageReader", "Ranges", "SegmentReader", "pages_of_root", "read_pages", "read_range"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_CACHED_BYTES = 32 << 20


class Ranges(Generic[K, V]):
    """A cache of decoded ranges, which threads may share; the most recently used one always stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with their lengths
        self._size = 0

    def get(self, key: K) -> V | None:
        """Return what is cached for a key, or None."""
        with self._lock:
            if key not in self._cached:
                return None
            self._cached.move_to_end(key)
            return self._cached[key][0]

    def __contains__(self, key: object) -> bool:
        return key in self._cached

    def put(self, key: K, value: V, length: int) -> V:
        """Cache a decoded range of this length, and return it, or what another thread has cached meanwhile."""
        with self._lock:
            cached, _ = self._cached.setdefault(key, (value, length))
            if cached is value:
                self._size += length
            while self._size > _CACHED_BYTES and len(self._cached) > 1:
                _, (_, evicted) = self._cached.popitem(last=False)
                self._size -= evicted
        return cached


def read_range(storage: Storage, key: str, offset: int, length: int, decode: Callable[[bytes], V]) -> V:
    """Read and decode a range of an object; blocking.

    Raise `NotFound` if the object is missing, or `Corrupt` with the URL if it is damaged.
    """
    try:
        try:
            return decode(_read(storage, key, offset, length))
        except Corrupt:
            if not forget(storage, key):
                raise
            return decode(_read(storage, key, offset, length))  # the damage may have been in a cached copy
    except NotFound as error:
        raise NotFound(f"{storage.url}: {key} is missing; restore it from a copy of the store") from error
    except Corrupt as error:
        raise Corrupt(f"{storage.url}: {error}") from error


def _read(storage: Storage, key: str, offset: int, length: int) -> bytes:
    data = np.empty(length, np.uint8)  # uses no memory until it is filled, in case the object is shorter
    storage.reader(key).read_into(offset, [data.data], length)
    return data.tobytes()


_Key = tuple[str, int, Page, str | None]  # the object and the place of the page: everything that is verified


class PageReader:
    """Reads the pages of manifests of one store, whose segments `segments` reads; threads may share it.

    `derive` returns the nodes of each page in a root as the records determine them, None if that fails: roots only
    save time.
    """

    derive: Callable[[ObjectRef], Sequence[PageNodes] | None] = staticmethod(lambda reference: None)

    def __init__(self, storage: Storage, segments: SegmentSource) -> None:
        self._storage = storage
        self._segments = segments
        self._cached: Ranges[_Key, ManifestNodes] = Ranges()
        self._derived: dict[tuple[str, bytes], Sequence[PageNodes]] = {}  # pages of damaged and missing roots

    def has(self, reference: ObjectRef, at: int) -> bool:
        """Return whether a page is cached, so that loading it does not block."""
        derived = (reference.key, reference.check) in self._derived
        return derived or _key(reference.key, reference.place(at)) in self._cached

    def load(self, reference: ObjectRef, start: int, stop: int) -> Sequence[PageNodes]:
        """Return the nodes of the pages from `start` up to `stop`; blocking.

        Consecutive pages that are not cached are read together. Raise `Corrupt`, or `NotFound` if the object is
        missing.
        """
        root = reference.key, reference.check
        if root in self._derived:
            return self._derived[root][start:stop]
        try:
            return self._load(reference, start, stop)
        except (Corrupt, NotFound):
            if not is_root(reference.key):
                raise
            derived = self.derive(reference)
            if derived is None:
                raise
            return self._derived.setdefault(root, derived)[start:stop]

    def _load(self, reference: ObjectRef, start: int, stop: int) -> list[ManifestNodes]:
        places = [reference.place(at) for at in range(start, stop)]
        loaded = [self._cached.get(_key(reference.key, place)) for place in places]
        nodes: list[ManifestNodes] = []
        for is_cached, positions in itertools.groupby(range(len(places)), lambda at: loaded[at] is not None):
            at = list(positions)
            if is_cached:
                nodes += [cached for cached in loaded[at[0] : at[-1] + 1] if cached is not None]
            else:
                nodes += self._read(reference.key, places[at[0] : at[-1] + 1])
        return nodes

    def _read(self, key: str, places: list[PagePlace]) -> list[ManifestNodes]:
        """Return the nodes of consecutive pages, read by one request."""
        begin, length = places[0].offset, places[-1].offset + places[-1].page.length - places[0].offset

        def decoded(data: bytes) -> list[ManifestNodes]:
            view = memoryview(data)
            parts = [view[p.offset - begin : p.offset - begin + p.page.length] for p in places]
            manifests = [decode_page(bytes(part), key, p) for part, p in zip(parts, places, strict=True)]
            return [ManifestNodes(manifest.attach(self._segments)) for manifest in manifests]

        nodes = read_range(self._storage, key, begin, length, decoded)
        return [
            self._cached.put(_key(key, place), page, place.page.length)
            for place, page in zip(places, nodes, strict=True)
        ]


async def read_pages(nodes: Nodes, paths: Collection[str] | None = None) -> None:
    """Read the pages that have these paths, or all pages, in a thread, so that later lookups do not block."""
    if nodes.is_paged and (paths is None or nodes.reads(paths)):
        await run(nodes.load, paths)


def _key(key: str, place: PagePlace) -> _Key:
    return key, place.offset, place.page, place.stop


def pages_of_root(reference: ObjectRef, tree: Tree, url: str) -> list[DerivedNodes]:
    """Return the nodes of a tree in the pages of its root; raise `TimelineChanged` if the root has others."""
    changed = tree.nodes.changed(tree.nodes.parent_of(tree.version))
    known = {path: node for path, node in changed.items() if node is not None}
    items = iter(known.items())
    pages = [DerivedNodes(dict(itertools.islice(items, page.nodes))) for page in reference.pages]
    firsts = [page.paths[0] if page.paths else "" for page in pages]
    same = len(known) == sum(p.nodes for p in reference.pages) and firsts == [p.first for p in reference.pages]
    with contextlib.suppress(Corrupt, NotFound):  # its bytes can't be made if segments have expired
        same = same and reference.matches(tree.root(NO_RECORD).data[: reference.length])
    if not same:
        raise TimelineChanged(
            f"{url}: {reference.key} is missing or damaged, and the records determine another tree than it had, "
            "as if a repair had voided a version while the store was open; open it again"
        )
    return pages


class SegmentReader:
    """Reads the segments of one store; threads may share it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._cached: Ranges[Segment, ChunkTable] = Ranges()

    def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
        """Return the rows of each segment; blocking. Raise `Corrupt`, or `NotFound` if a pack is missing."""
        return [self._load(segment) for segment in segments]

    def _load(self, segment: Segment) -> ChunkTable:
        table = self._cached.get(segment)
        if table is None:
            table = self._cached.put(segment, self._read(segment), segment.length)
        return table

    def _read(self, segment: Segment) -> ChunkTable:
        decode = functools.partial(decode_segment, segment=segment)
        return read_range(self._storage, segment.pack, segment.offset, segment.length, decode)
