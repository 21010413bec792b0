"""Manifests, which contain the references to chunks; pure, no I/O.

A manifest is columnar: it has a row for each chunk of the short arrays of one writer, stored as five
buffers instead of many objects, and a row for each segment of the references to the chunks of longer arrays
(`segments`). Columns are little-endian.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.bounds import MAX_NAMES
from tstore.core.format.checksums import CHECK_SIZE, as_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow, parse_column
from tstore.core.format.objects.compactions import Compaction, CompactionEntry
from tstore.core.format.objects.documents import LONG_DOCUMENT, Document
from tstore.core.format.objects.segments import (
    NO_SOURCE,
    SEGMENT_ROW,
    Segment,
    SegmentSource,
    SortedRun,
    parse_segments,
    segment_columns,
)
from tstore.core.format.objects.tables import Table, overlay_each, segments_first, sorted_runs
from tstore.core.format.objects.wellformed import (
    LONGEST_MESSAGE,
    NodeColumns,
    check_documents,
    check_nodes,
    check_order,
    check_packs,
    surely_valid_rows,
)
from tstore.errors import Corrupt

__all__ = ["EXTENDS", "REPLACES", "Body", "Checksum", "Manifest", "Message", "Names", "Natural"]

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""A version, a host, or a number of hosts or bytes."""

Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_NAMES)]
Message = Annotated[str, msgspec.Meta(max_length=LONGEST_MESSAGE)]
Checksum = Annotated[bytes, msgspec.Meta(min_length=CHECK_SIZE, max_length=CHECK_SIZE)]


_NODE_BYTES = 20  # bytes of a node in a manifest, without its path, document and chunks
_ROW_BYTES = 28  # bytes of a chunk in a manifest, without its checksums

_path_of = operator.itemgetter(0)

REPLACES, EXTENDS = 1, 2
"""The flags of a node that is new or has new metadata, and of an array to which values were appended."""


class Body(msgspec.Struct, array_like=True, frozen=True):
    """The contents of a frame, encoded as msgpack (`encoding`)."""

    def validate(self) -> None:
        """Raise `Corrupt` for values that are invalid in any store."""


class Manifest(Body, tag="manifest", dict=True, frozen=True):
    """The nodes that one writer touched and the chunks that it wrote, as columns.

    `packs[i]` is the key of a pack, or "" for an inline pack; `inline` has the inline packs in the same order.
    The paths ascend. Node i has the path `paths[i]`, the metadata `documents[document[i]]`, and the next
    `count[i]` rows of the chunk columns. `replaces_node[i]` is a sum of flags. 1 says that the node was created or
    its metadata changed: then these rows replace all of its rows in earlier commits. Otherwise they replace only
    the earlier rows of the same chunks. 2 (`EXTENDS`) says that values were appended, so an axis is longer.
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
    compactions: Annotated[tuple[CompactionEntry, ...], msgspec.Meta(max_length=MAX_NAMES)] = ()

    @functools.cached_property
    def table(self) -> ChunkTable:
        """All chunk rows; raises `Corrupt` if any value of the manifest is invalid."""
        if self.packs.count("") != len(self.inline):
            raise Corrupt("the number of inline packs in a manifest differs from the number that it names")
        nodes = NodeColumns(self.documents, self.paths, self.document, self.replaces_node, self.count)
        chunks = self.number, self.pack, self.offset, self.length, self.checks
        segments = self.segment_count or self.segments or self.segment_packs or self.compactions
        if not segments and len(self.inline) == len(self.packs):
            rows = surely_valid_rows(nodes, self.inline, chunks)
            if rows is not None:
                return ChunkTable.from_rows(rows)
        inline = iter(self.inline)
        table = ChunkTable.from_columns(
            tuple([key or next(inline) for key in self.packs]),
            parse_column(self.number, "<u8"),
            parse_column(self.pack, "<u4"),
            parse_column(self.offset, "<u8"),
            parse_column(self.length, "<u8"),
            as_checks(self.checks),
        )
        table.validate()
        check_nodes(nodes, len(table))
        _ = self._segments_by_node
        check_packs(list(filter(None, self.packs)))
        if len(table) > 1:
            check_order(table.number, self._stops)
        check_documents(document for document in self.documents if len(document) <= LONG_DOCUMENT)
        return table

    def with_table(self, table: ChunkTable) -> Manifest:
        """Set `table`, whose rows and nodes are valid, and return the manifest."""
        self.__dict__["table"] = table
        return self

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        _ = self.table

    def position(self, path: str) -> int | None:
        """Return the position of a node in `paths`, or None if there is none."""
        at = bisect.bisect_left(self.paths, path)
        return at if at < len(self.paths) and self.paths[at] == path else None

    def attach(self, source: SegmentSource) -> Manifest:
        """Set the source of segments, and return the manifest."""
        self.__dict__["source"] = source
        return self

    @functools.cached_property
    def source(self) -> SegmentSource:
        """The default source of segments, until `attach` sets it."""
        return NO_SOURCE

    def node(self, position: int) -> tuple[Document, tuple[Table, ...]]:
        """Return the metadata and the rows of the node at a position in `paths`."""
        return self._shared_documents[self._document_position(position)], self.tables_at(position)

    def tables_at(self, position: int) -> tuple[Table, ...]:
        """Return the rows of the node at a position in `paths`."""
        if len(self.paths) == 1 and not self.segments:
            return (self.table,)
        stops = self._stops
        rows = self.table.part(int(stops[position - 1]) if position else 0, int(stops[position]))
        return self._tables(self._written_segments[position] if self.segments else (), rows)

    def document_at(self, position: int) -> bytes:
        """Return the metadata of the node at a position in `paths`."""
        return self.documents[self._document_position(position)]

    def _document_position(self, position: int) -> int:
        return int.from_bytes(self.document[4 * position : 4 * position + 4], "little")

    def nodes(self) -> list[tuple[str, Document, bool, tuple[Table, ...]]]:
        """Return the path, the metadata, whether its rows replace all earlier ones, and the rows of each node."""
        ends = list(itertools.accumulate(parse_column(self.count, "<u8").tolist()))
        parts = map(self.table.part, [0, *ends], ends)
        flags = [bool(flag & REPLACES) for flag in self.replaces_node]
        tables: Iterator[tuple[Table, ...]] = zip(parts)
        if self.segments:
            tables = map(self._tables, self._written_segments, parts)
        return list(zip(self.paths, self.metadata(), flags, tables, strict=True))

    def numbers(self) -> Iterator[tuple[str, int, npt.NDArray[np.uint64]]]:
        """Yield the path, the flags and the numbers of the chunks of each node, without those in segments."""
        number, start = self.table.number, 0
        counts = parse_column(self.count, "<u8").tolist()
        for path, flags, count in zip(self.paths, self.replaces_node, counts, strict=True):
            yield path, flags, number[start : start + count]
            start += count

    def extended_paths(self) -> set[str]:
        """Return the paths of the arrays to which values were appended."""
        return {path for path, flags in zip(self.paths, self.replaces_node, strict=True) if flags & EXTENDS}

    def compactions_by_path(self) -> dict[str, Compaction]:
        """Return the compactions that earlier commits wrote; the rows of `nodes` are without them."""
        segments = self._segments_by_node
        return {
            self.paths[entry.node]: Compaction.from_entry(
                entry, SortedRun(segments[entry.node][: entry.segments], self.source)
            )
            for entry in self.compactions
        }

    @functools.cached_property
    def _written_segments(self) -> Sequence[Sequence[Segment]]:
        """The segments of each node, without those of compactions."""
        by_node: Sequence[Sequence[Segment]] = self._segments_by_node
        if not self.compactions:
            return by_node
        compacted = {entry.node: entry.segments for entry in self.compactions}
        return [segments[compacted.get(at, 0) :] for at, segments in enumerate(by_node)]

    def _tables(self, segments: Sequence[Segment], rows: ChunkTable) -> tuple[Table, ...]:
        """Return the tables of a node with these segments and, over them, these rows."""
        if not segments:
            return (rows,)
        tables = sorted_runs(segments, self.source)
        return (*tables, rows) if len(rows) else tuple(tables)

    @functools.cached_property
    def _stops(self) -> npt.NDArray[np.int64]:
        """The end of each node's rows in `table`."""
        return parse_column(self.count, "<u8").astype(np.int64).cumsum()

    def part(self, start: int, stop: int) -> Manifest:
        """Return the manifest of the nodes at these positions in `paths`, with only the packs that they need."""
        first, end = [int(self._stops[at - 1]) if at else 0 for at in (start, stop)]
        rows = self.table.part(first, end).with_used_packs()
        used, document = np.unique(parse_column(self.document, "<u4")[start:stop], return_inverse=True)
        manifest = Manifest(
            packs=tuple(p if isinstance(p, str) else "" for p in rows.packs),
            inline=tuple(p for p in rows.packs if isinstance(p, bytes)),
            documents=tuple([self.documents[position] for position in used.tolist()]),
            paths=self.paths[start:stop],
            document=document.astype("<u4").tobytes(),
            replaces_node=self.replaces_node[start:stop],
            count=self.count[8 * start : 8 * stop],
            number=rows.number.tobytes(),
            pack=rows.pack.tobytes(),
            offset=rows.offset.tobytes(),
            length=rows.length.tobytes(),
            checks=rows.checks.tobytes(),
        )
        segments = self._segments_by_node[start:stop]
        compactions = [
            msgspec.structs.replace(m, node=m.node - start) for m in self.compactions if start <= m.node < stop
        ]
        return manifest._with_segments(segments, tuple(compactions)) if any(segments) else manifest

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """About how many bytes each node takes; a document counts for the first node that has it."""
        blocks = np.concatenate([np.zeros(1, np.int64), self._stops])
        sizes = np.fromiter(map(len, self.paths), np.int64, len(self.paths)) + _NODE_BYTES
        sizes += np.diff(self.table.blocks[blocks] * CHECK_SIZE + blocks * _ROW_BYTES)
        used, first = np.unique(parse_column(self.document, "<u4"), return_index=True)
        sizes[first] += np.array([len(self.documents[position]) for position in used.tolist()], np.int64)
        if self.segments:
            packs = [sum(len(s.packs) for s in segments) for segments in self._segments_by_node]
            count = np.array(list(map(len, self._segments_by_node)), np.int64)
            sizes += count * SEGMENT_ROW.itemsize + 4 * np.array(packs, np.int64)
        for compaction in self.compactions:
            sizes[compaction.node] += len(compaction.replaced) + len(compaction.numbers)
        return sizes

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
                [table] = self.source.load((segment,))
                yield np.full(len(table), node), table

    def segments_at(self, position: int) -> Sequence[Segment]:
        """Return the segments of the node at a position in `paths`, also those of a compaction."""
        return self._segments_by_node[position] if self.segments else ()

    @property
    def all_segments(self) -> Iterator[Segment]:
        """The segments of all nodes, also those of compactions."""
        return itertools.chain.from_iterable(self._segments_by_node)

    @property
    def segment_table(self) -> ChunkTable:
        """The references to the segments' own bytes, as if they were chunks."""
        rows = [ChunkRow(s.first, s.pack, s.offset, s.length, s.check) for s in self.all_segments]
        return ChunkTable.from_rows(rows)

    @property
    def segment_bytes(self) -> int:
        """The length of all segments."""
        return sum(segment.length for segment in self.all_segments)

    @functools.cached_property
    def _segments_by_node(self) -> list[list[Segment]]:
        """The segments of each node; raises `Corrupt` if one contradicts itself."""
        if not (self.segment_count or self.segments or self.segment_packs or self.compactions):
            return []
        counts = parse_column(self.segment_count, "<u4")
        if len(counts) != len(self.paths):
            raise Corrupt("the segment counts in a manifest are not those of its nodes")
        nodes = [compaction.node for compaction in self.compactions]
        if not all(map(operator.lt, [-1, *nodes], [*nodes, len(counts)])):
            raise Corrupt(
                "the compactions in a manifest are out of order, or one is of a node that it does not have"
            )
        segments = parse_segments(self.segments, parse_column(self.segment_packs, "<u4"), self.packs)
        if len(segments) != int(counts.sum()):
            raise Corrupt("the segment counts in a manifest do not add up to its number of segments")
        ends = itertools.accumulate(counts.tolist())
        by_node = [segments[end - n : end] for end, n in zip(ends, counts.tolist(), strict=True)]
        for compaction in self.compactions:
            compaction.check(by_node[compaction.node])
        return by_node

    def metadata(self) -> list[Document]:
        """Return the metadata of each node."""
        return list(map(self._shared_documents.__getitem__, parse_column(self.document, "<u4").tolist()))

    @functools.cached_property
    def _shared_documents(self) -> list[Document]:
        return list(map(Document, self.documents))

    @functools.cached_property
    def size(self) -> int:
        """The bytes of all columns, inline packs, documents and names; the encoded manifest is slightly longer."""
        columns = (self.document, self.replaces_node, self.count, self.number, self.pack, self.offset, self.length)
        parts = (columns, self.packs, self.inline, self.documents, self.paths)
        fixed = len(self.checks) + len(self.segment_count) + len(self.segments) + len(self.segment_packs)
        fixed += sum([len(compaction.replaced) + len(compaction.numbers) for compaction in self.compactions])
        return fixed + sum([sum(map(len, part)) for part in parts])

    def reused(self, transaction: str) -> tuple[str, ...]:
        """Return the packs to which the manifest refers but which another transaction wrote."""
        if not any(self.packs):
            return ()  # all chunks are inline
        own_folder = f"txn/{transaction}/"
        return tuple(key for key in self.packs if key and not key.startswith(own_folder))

    @staticmethod
    def from_nodes(
        nodes: Sequence[tuple[str, bytes, int, Sequence[Table]]],
        compactions: Mapping[str, Compaction] = MappingProxyType({}),
    ) -> Manifest:
        """Return the manifest of nodes, each given by its path, document, `replaces_node` flags and chunk tables.

        The rows of a later table replace those of an earlier one. Segments over other tables are read.
        `compactions` has those of nodes, by path.
        """
        nodes = [(p, data, flag, segments_first(tables)) for p, data, flag, tables in sorted(nodes, key=_path_of)]
        table, counts = overlay_each([[t for t in tables if isinstance(t, ChunkTable)] for *_, tables in nodes])
        manifest = Manifest.from_table([node[:3] for node in nodes], counts.tolist(), table)
        segmented = [[t for t in tables if isinstance(t, SortedRun)] for *_, tables in nodes]
        for tables, (path, *_) in zip(segmented, nodes, strict=True):
            tables[:0] = [compactions[path].run] if path in compactions else []
        first = next(itertools.chain.from_iterable(segmented), None)
        if first is None:
            return manifest
        segments = [[segment for table in tables for segment in table.segments] for tables in segmented]
        entries = [compactions[path].entry(at) for at, (path, *_) in enumerate(nodes) if path in compactions]
        return manifest._with_segments(segments, tuple(entries)).attach(first.source)

    def _with_segments(
        self, by_node: Sequence[Sequence[Segment]], compactions: tuple[CompactionEntry, ...]
    ) -> Manifest:
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
            compactions=compactions,
        )

    @staticmethod
    def from_table(nodes: Sequence[tuple[str, bytes, int]], counts: Sequence[int], table: ChunkTable) -> Manifest:
        """Return the manifest of nodes, each given by its path, document and `replaces_node` flags; paths ascend.

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
            replaces_node=bytes(flags for _, _, flags in nodes),
            count=np.array(counts, "<u8").tobytes(),
            number=table.number.tobytes(),
            pack=table.pack.tobytes(),
            offset=table.offset.tobytes(),
            length=table.length.tobytes(),
            checks=table.checks.tobytes(),
        )
