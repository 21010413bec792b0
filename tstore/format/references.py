"""Manifests, which contain the references to chunks, and references to manifests; pure, no I/O.

A manifest is columnar: it has a row for each chunk of the short arrays of one writer, so that they are five
buffers, not as many objects, and a row for each segment of the references to the chunks of longer arrays
(`segments`). Columns are little-endian.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt
from tstore.format.bounds import MANIFEST_BYTES, MAX_NAMES
from tstore.format.checksums import CHECK_SIZE, as_checks
from tstore.format.chunk_refs import ChunkRow, ChunkTable
from tstore.format.columns import largest, parse_column, ranges, total
from tstore.format.documents import LONG_DOCUMENT, Document
from tstore.format.frame import SHORTEST_FRAME, check_of
from tstore.format.layers import Table, layers, segments_first
from tstore.format.layout import is_manifest, is_pack
from tstore.format.segments import (
    NO_SOURCE,
    Segment,
    SegmentedTable,
    SegmentSource,
    parse_segments,
    segment_columns,
)
from tstore.format.wellformed import LONGEST_MESSAGE, check_documents, check_keys, check_paths

__all__ = ["Body", "Checksum", "Manifest", "Message", "Names", "Natural", "ObjectRef", "gather", "reference"]

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""A version, a host, or a number of hosts or bytes."""

Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_NAMES)]
Message = Annotated[str, msgspec.Meta(max_length=LONGEST_MESSAGE)]
Checksum = Annotated[bytes, msgspec.Meta(min_length=CHECK_SIZE, max_length=CHECK_SIZE)]


class Body(msgspec.Struct, array_like=True, frozen=True):
    """The contents of a frame, encoded as msgpack (`encoding`)."""

    def validate(self) -> None:
        """Raise `Corrupt` for values that are invalid in any store."""


class ObjectRef(Body, tag="object", frozen=True):
    """The key of a manifest that is a separate object, with its length and checksum.

    `segment_bytes` is the length of all segments of the manifest.
    """

    key: str
    length: Annotated[int, msgspec.Meta(ge=SHORTEST_FRAME, le=MANIFEST_BYTES)]
    check: Checksum
    segment_bytes: Natural = 0

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        check_keys((self.key,), is_manifest, "a manifest")

    def matches(self, data: bytes) -> bool:
        """Return whether these bytes have the length and checksum of the reference."""
        return len(data) == self.length and check_of(data) == self.check


class Manifest(Body, tag="manifest", dict=True, frozen=True):
    """The nodes that one writer touched and the chunks that it wrote, as columns.

    `packs[i]` is the key of a pack, or "" for an inline pack; `inline` has the inline packs in the same order.
    Node i has the path `paths[i]`, the metadata `documents[document[i]]`, and the next `count[i]` rows of the
    chunk columns. `replaces_node[i]` says that the node was created or its metadata changed: then these rows
    replace all of its rows in earlier commits. Otherwise they replace only the earlier rows of the same chunks.
    """

    packs: Names
    inline: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_NAMES)]
    documents: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_NAMES)]
    paths: Names
    document: bytes  # u32
    replaces_node: bytes  # u8
    count: bytes  # u64
    number: bytes  # u64, the chunk's C-order number in its grid
    pack: bytes  # u32
    offset: bytes  # u64
    length: bytes  # u64
    checks: bytes  # 16 bytes per block
    segment_count: bytes = b""  # u32, or empty if there are no segments
    segments: bytes = b""  # `SEGMENT_ROW`
    segment_packs: bytes = b""  # u32

    @functools.cached_property
    def table(self) -> ChunkTable:
        """All chunk rows; raises `Corrupt` if any value of the manifest is invalid."""
        inline = iter(self.inline)
        if self.packs.count("") != len(self.inline):
            raise Corrupt("the number of inline packs in a manifest differs from the number that it names")
        table = ChunkTable.from_columns(
            tuple([key or next(inline) for key in self.packs]),
            parse_column(self.number, "<u8"),
            parse_column(self.pack, "<u4"),
            parse_column(self.offset, "<u8"),
            parse_column(self.length, "<u8"),
            as_checks(self.checks),
        )
        table.validate()
        self._check_nodes(len(table))
        _ = self._segments_by_node
        check_keys(filter(None, self.packs), is_pack, "a pack")
        if len(table) > 1:
            self._check_order(table.number)
        check_documents(document for document in self.documents if len(document) <= LONG_DOCUMENT)
        return table

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        _ = self.table

    def _check_nodes(self, rows: int) -> None:
        """Raise `Corrupt` if the columns of the nodes are invalid, or their counts do not add up to `rows`."""
        n = len(self.paths)
        if len(self.document) != 4 * n or len(self.replaces_node) != n or len(self.count) != 8 * n:
            raise Corrupt("the columns of a manifest differ in length")
        if total(parse_column(self.count, "<u8"), rows) != rows:
            raise Corrupt("the chunk counts in a manifest do not add up to its number of chunks")
        if n and largest(parse_column(self.document, "<u4")) >= len(self.documents):
            raise Corrupt("a manifest refers to a metadata document that it does not have")
        check_paths(list(filter(None, self.paths)))
        if not self._is_sorted and len(set(self.paths)) < n:
            raise Corrupt("a manifest names a node twice")
        if self.replaces_node.translate(None, b"\0\1"):
            raise Corrupt("a manifest has a flag that is neither 0 nor 1")

    def _check_order(self, number: npt.NDArray[np.uint64]) -> None:
        rising = number[1:] > number[:-1]
        if rising.all():
            return
        ends = np.cumsum(parse_column(self.count, "<u8")).astype(np.int64)
        rising[ends[(ends > 0) & (ends < len(number))] - 1] = True  # where the next node begins
        if not rising.all():
            raise Corrupt("the chunks of a node are out of order, or one is listed twice")

    def position(self, path: str) -> int | None:
        """Return the position of a node in `paths`, or None if there is none."""
        if not self._is_sorted:
            return self._positions.get(path)
        at = bisect.bisect_left(self.paths, path)
        return at if at < len(self.paths) and self.paths[at] == path else None

    @functools.cached_property
    def _is_sorted(self) -> bool:
        """Whether the paths ascend, as writers sort them, so that a search needs no dict."""
        return all(map(operator.lt, self.paths, itertools.islice(self.paths, 1, None)))

    @functools.cached_property
    def _positions(self) -> dict[str, int]:
        """The position of each node, by path."""
        return dict(zip(self.paths, itertools.count(), strict=False))

    def attach(self, source: SegmentSource) -> Manifest:
        """Set where segments are read, and return the manifest."""
        self.__dict__["source"] = source
        return self

    def node(self, position: int) -> tuple[Document, tuple[Table, ...]]:
        """Return the metadata and the rows of the node at a position in `paths`."""
        stops = self._stops
        rows = self.table.part(int(stops[position - 1]) if position else 0, int(stops[position]))
        document = self._shared_documents[int(self._document_positions[position])]
        if not self.segments:
            return document, (rows,)
        return document, self._tables(self._segments_by_node[position], rows)

    def nodes(self) -> list[tuple[str, Document, bool, tuple[Table, ...]]]:
        """Return the path, the metadata, the `replaces_node` flag and the rows of each node."""
        table, counts = self.table, parse_column(self.count, "<u8").tolist()
        stops = itertools.accumulate(counts)
        rows = zip(self.paths, self.metadata(), self.replaces_node, stops, counts, strict=True)
        if not self.segments:
            return [(path, data, bool(flag), (table.part(stop - n, stop),)) for path, data, flag, stop, n in rows]
        segments = self._segments_by_node
        return [
            (path, document, bool(flag), self._tables(listed, table.part(stop - n, stop)))
            for (path, document, flag, stop, n), listed in zip(rows, segments, strict=True)
        ]

    def _tables(self, segments: Sequence[Segment], rows: ChunkTable) -> tuple[Table, ...]:
        """Return the tables of a node with these segments and, over them, these rows."""
        if not segments:
            return (rows,)
        tables = layers(segments, self.__dict__.get("source", NO_SOURCE))
        return (*tables, rows) if len(rows) else tuple(tables)

    @functools.cached_property
    def _stops(self) -> npt.NDArray[np.int64]:
        """The end of each node's rows in `table`."""
        return np.cumsum(parse_column(self.count, "<u8").astype(np.int64))

    @functools.cached_property
    def _document_positions(self) -> npt.NDArray[np.uint32]:
        return parse_column(self.document, "<u4")

    def tables(self) -> Iterator[ChunkTable]:
        """Yield the references to the segments' own bytes, if there are any, and then the rows of all chunks."""
        if self.segments:
            yield self.segment_table
        for _, table in self.chunks_by_node():
            yield table

    def chunks_by_node(self) -> Iterator[tuple[npt.NDArray[np.int64], ChunkTable]]:
        """Yield tables of all chunk rows, with the position of each row's node in `paths`; reads all segments."""
        counts = parse_column(self.count, "<u8").astype(np.int64)
        yield np.repeat(np.arange(len(counts)), counts), self.table
        for node, segments in enumerate(self._segments_by_node):
            for segment in segments:
                [table] = self.__dict__.get("source", NO_SOURCE).load((segment,))
                yield np.full(len(table), node), table

    @property
    def segment_table(self) -> ChunkTable:
        """The references to the segments' own bytes, as if they were chunks."""
        segments = itertools.chain.from_iterable(self._segments_by_node)
        return ChunkTable.from_rows([ChunkRow(s.first, s.pack, s.offset, s.length, s.check) for s in segments])

    @property
    def segment_bytes(self) -> int:
        """The length of all segments."""
        return sum(segment.length for segment in itertools.chain.from_iterable(self._segments_by_node))

    @functools.cached_property
    def _segments_by_node(self) -> list[list[Segment]]:
        """The segments of each node; raises `Corrupt` if one contradicts itself."""
        if not (self.segment_count or self.segments or self.segment_packs):
            return []
        counts = parse_column(self.segment_count, "<u4")
        if len(counts) != len(self.paths):
            raise Corrupt("the segment counts in a manifest are not those of its nodes")
        segments = parse_segments(self.segments, parse_column(self.segment_packs, "<u4"), self.packs)
        if len(segments) != int(counts.sum()):
            raise Corrupt("the segment counts in a manifest do not add up to its number of segments")
        ends = itertools.accumulate(counts.tolist())
        return [segments[end - n : end] for end, n in zip(ends, counts.tolist(), strict=True)]

    def metadata(self) -> list[Document]:
        """Return the metadata of each node."""
        shared = self._shared_documents
        return [shared[d] for d in parse_column(self.document, "<u4").tolist()]

    @functools.cached_property
    def _shared_documents(self) -> list[Document]:
        return list(map(Document, self.documents))

    @property
    def size(self) -> int:
        """The bytes of all columns, inline packs, documents and names; the encoded manifest is slightly longer."""
        columns = (self.document, self.replaces_node, self.count, self.number, self.pack, self.offset, self.length)
        parts = (columns, self.packs, self.inline, self.documents, self.paths)
        fixed = len(self.checks) + len(self.segment_count) + len(self.segments) + len(self.segment_packs)
        return fixed + sum(sum(map(len, part)) for part in parts)

    def reused(self, transaction: str) -> tuple[str, ...]:
        """Return the packs to which the manifest refers but which another transaction wrote."""
        own_folder = f"txn/{transaction}/"
        return tuple(key for key in self.packs if key and not key.startswith(own_folder))

    @staticmethod
    def from_nodes(nodes: Sequence[tuple[str, bytes, bool, Sequence[Table]]]) -> Manifest:
        """Return the manifest of nodes, each given by its path, document, `replaces_node` flag and chunk tables.

        The rows of a later table replace those of an earlier one. Segments over other tables are read.
        """
        nodes = [(path, data, flag, segments_first(tables)) for path, data, flag, tables in nodes]
        table, counts = gather([[t for t in tables if isinstance(t, ChunkTable)] for *_, tables in nodes])
        manifest = Manifest.from_table([node[:3] for node in nodes], counts.tolist(), table)
        segmented = [[t for t in tables if isinstance(t, SegmentedTable)] for *_, tables in nodes]
        first = next(itertools.chain.from_iterable(segmented), None)
        if first is None:
            return manifest
        segments = [[segment for table in tables for segment in table.segments] for tables in segmented]
        return manifest._with_segments(segments).attach(first.source)

    def _with_segments(self, by_node: Sequence[Sequence[Segment]]) -> Manifest:
        segments = [segment for listed in by_node for segment in listed]
        names = {pack: position for position, pack in enumerate(self.packs) if pack}
        packs = list(self.packs)
        for pack in itertools.chain.from_iterable((*s.packs, s.pack) for s in segments):
            if pack not in names:
                names[pack] = len(packs)
                packs.append(pack)
        rows, positions = segment_columns(segments, names)
        return msgspec.structs.replace(
            self,
            packs=tuple(packs),
            segment_count=np.array(list(map(len, by_node)), "<u4").tobytes(),
            segments=rows.tobytes(),
            segment_packs=positions.tobytes(),
        )

    @staticmethod
    def from_table(nodes: Sequence[tuple[str, bytes, bool]], counts: Sequence[int], table: ChunkTable) -> Manifest:
        """Return the manifest of nodes, each given by its path, document and `replaces_node` flag.

        `counts` has the number of rows in the table of each node, one node after the other.
        """
        documents: dict[bytes, int] = {}
        per_node = [document for _, document, _ in nodes]
        ids = list(map(id, per_node))  # nodes can share a long document, so each is compared once
        positions = {
            key: documents.setdefault(document, len(documents))
            for key, document in dict(zip(ids, per_node, strict=True)).items()
        }
        return Manifest(
            packs=tuple(p if isinstance(p, str) else "" for p in table.packs),
            inline=tuple(p for p in table.packs if isinstance(p, bytes)),
            documents=tuple(documents),
            paths=tuple(path for path, *_ in nodes),
            document=np.array([positions[key] for key in ids], "<u4").tobytes(),
            replaces_node=bytes(replaces_node for _, _, replaces_node in nodes),
            count=np.array(counts, "<u8").tobytes(),
            number=table.number.tobytes(),
            pack=table.pack.tobytes(),
            offset=table.offset.tobytes(),
            length=table.length.tobytes(),
            checks=table.checks.tobytes(),
        )


def reference(key: str, data: bytes, segment_bytes: int = 0) -> ObjectRef:
    """Return the reference to a manifest with these bytes, whose segments have `segment_bytes`."""
    return ObjectRef(key, len(data), check_of(data), segment_bytes)


def gather(nodes: Sequence[Sequence[ChunkTable]]) -> tuple[ChunkTable, npt.NDArray[np.int64]]:
    """Overlay the tables of each node; return all rows in one table, node by node, and the row count of each.

    The result depends on the rows alone, not on how they are divided into tables. Columns that many tables share
    are copied once.
    """
    first_rows: dict[int, int] = {}  # in `joined`, by the id of the columns
    shared: list[ChunkTable] = []
    size = 0
    for table in itertools.chain.from_iterable(nodes):
        columns = table.columns
        if id(columns) not in first_rows:
            first_rows[id(columns)] = size
            shared.append(ChunkTable(columns, 0, len(columns.number)))
            size += len(columns.number)
    joined = ChunkTable.concat(shared)
    owners = np.array([i for i, tables in enumerate(nodes) for _ in tables], np.int64)
    starts = np.array([first_rows[id(t.columns)] + t.start for tables in nodes for t in tables], np.int64)
    sizes = np.array([t.stop - t.start for tables in nodes for t in tables], np.int64)
    at, owner = ranges(starts, sizes), np.repeat(owners, sizes)
    order = np.lexsort((joined.number[at], owner))  # stable: of equal numbers the newest is the last
    at, owner = at[order], owner[order]
    number = joined.number[at]
    newest = np.ones(len(at), np.bool_)
    newest[:-1] = (owner[1:] != owner[:-1]) | (number[1:] != number[:-1])
    counts = np.bincount(owner[newest], minlength=len(nodes)).astype(np.int64)
    return joined.take(at[newest]).compact(), counts
