"""Reference files of kerchunk, which say where in the packs of a store the chunks of a version are.

fsspec's reference file system, and zarr through it, read the version in place, with no tstore installed. No value
is read or copied. The references do not keep the version: once a garbage collection has removed it, reading fails.

1. JSON, version 1 (https://fsspec.github.io/kerchunk/spec.html): Zarr v3 metadata, and for each chunk its URL,
   offset and length. Chunks that are stored in the metadata of a commit are inline, in base64.
2. Parquet, for many chunks: a folder with files of 100,000 references, which are read when they are needed. Its
   metadata is that of Zarr v2, which fsspec requires.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tstore.convert.exporting import ExportReport, ProgressCallback, snapshot_to_export
from tstore.convert.files import StrPath, refuse_existing
from tstore.convert.zarr_export import chunk_name, plain_documents, uses_exmy
from tstore.convert.zarr_v2 import v2_array
from tstore.errors import InvalidArgument, NotFound, UnsupportedFormat
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkRow
from tstore.format.grid import chunk_coordinates
from tstore.format.node import Node
from tstore.runtime.pool import run
from tstore.snapshot import Snapshot
from tstore.storage.local.atomic_file import mapped_errors, new_file, new_folder
from tstore.storage.objects import Durability
from tstore.store import Store, opened

__all__ = ["export_references"]

_ROUND_CHUNKS = 1 << 14  # of which the references are in memory
_RECORD_SIZE = 100_000  # references in a Parquet file


async def export_references(
    store: StrPath | Store,
    out: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    base_url: str | None = None,
    keep_exmy: bool = False,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write a reference file to the chunks of a version; return a summary.

    `out` ends in .json, or in .parquet for a folder of Parquet files (needs pyarrow; dtypes and codecs of Zarr v2
    only). The references begin with `base_url`, by default the URL of the store. They have no token: readers pass
    their own, as `remote_options`. Arrays in eXmY formats are refused unless `keep_exmy`: zarr-python reads them
    with the package exmy.

    Raise `AlreadyExists` (there is something at `out`), `InvalidArgument`, `UnsupportedFormat`, `NotFound` (a
    chunk of a dense array was never written), and the errors of opening a version.
    """
    path = os.fspath(out)
    kind = os.path.splitext(path)[1]
    if kind not in (".json", ".parquet"):
        raise InvalidArgument(f"{path}: the name of a reference file ends in .json or .parquet")
    async with opened(store, "r") as opened_store:
        snapshot = await snapshot_to_export(opened_store, at, step)
        arrays = _arrays(snapshot, keep_exmy)
        base = _base_url(opened_store.url, base_url)
        refuse_existing(path)
        await run(_write_json if kind == ".json" else _write_parquet, path, snapshot, arrays, base)
        total = sum(array.meta.nbytes for array in arrays)
        if progress is not None:
            progress(total, total)
    return ExportReport(snapshot.version, len(arrays), total, 1, [])


def _never(codecs: object) -> bool:
    """Return False: references are to the bytes as they are."""
    return False


class _Reference(NamedTuple):
    """Where the bytes of a chunk are: at `offset` of `url`, or in `data`."""

    number: int
    url: str
    offset: int
    length: int
    data: bytes | None


def _arrays(snapshot: Snapshot, keep_exmy: bool) -> list[Node]:
    nodes = [snapshot.tree.nodes[path] for path in snapshot.paths()]
    exmy = [node.path for node in nodes if uses_exmy(node.meta.codecs)]
    if exmy and not keep_exmy:
        raise InvalidArgument(
            f"{snapshot.location}: {len(exmy)} of its arrays are in eXmY formats, such as {exmy[0]!r}, which only "
            "programs with the package exmy read; pass keep_exmy=True (--keep-exmy) if yours has it, or export a "
            "Zarr folder, in which they are decoded"
        )
    return nodes


def _base_url(url: str, base_url: str | None) -> str:
    """Return the URL of the packs' folders; raise `InvalidArgument` for a store that no other process can read."""
    if base_url is not None:
        return base_url.rstrip("/")
    if url.startswith("memory://"):
        raise InvalidArgument(
            f"{url} exists only in this process, so references to it are of no use; copy it first"
        )
    return url if "://" in url else f"file://{os.path.abspath(url)}"


def _references(snapshot: Snapshot, node: Node, base: str) -> Iterator[_Reference]:
    """Yield the references to the chunks of an array, in the order of their numbers; reads segments."""
    count = node.meta.chunk_count
    for start in range(0, count, _ROUND_CHUNKS):
        numbers = range(start, min(start + _ROUND_CHUNKS, count))
        rows = node.select(numbers).rows
        if len(rows) < len(numbers) and not node.meta.sparse:
            absent = chunk_coordinates(min(set(numbers).difference(row.number for row in rows)), node.meta.counts)
            raise NotFound(f"{snapshot.location}: chunk {absent} of {node.path} was never written; write it first")
        for row in rows:
            yield _reference(row, base)


def _reference(row: ChunkRow, base: str) -> _Reference:
    if isinstance(row.pack, bytes):
        return _Reference(row.number, "", 0, 0, row.pack[row.offset : row.offset + row.length])
    return _Reference(row.number, f"{base}/{row.pack}", row.offset, row.length, None)


def _write_json(path: str, snapshot: Snapshot, arrays: list[Node], base: str) -> None:
    documents = plain_documents(snapshot, _never)
    encode = msgspec.json.encode
    with (
        mapped_errors("write", path),
        new_file(path, Durability.FSYNC) as fd,
        open(fd, "wb", closefd=False) as file,
    ):
        file.write(b'{"version": 1, "refs": {')
        for number, (name, document) in enumerate(documents.items()):
            key = f"{name}/zarr.json" if name else "zarr.json"
            file.write(b",\n" if number else b"\n")
            file.write(encode(key) + b": " + encode(msgspec.json.format(document, indent=-1).decode()))
        for node in arrays:
            for found in _references(snapshot, node, base):
                value: Any = [found.url, found.offset, found.length]
                if found.data is not None:
                    value = f"base64:{base64.standard_b64encode(found.data).decode()}"
                key = f"{node.path}/{chunk_name(found.number, node.meta.counts)}"
                file.write(b",\n" + encode(key) + b": " + encode(value))
        file.write(b"\n}}\n")


def _write_parquet(path: str, snapshot: Snapshot, arrays: list[Node], base: str) -> None:
    try:
        import pyarrow  # noqa: F401 - asks whether it is there
    except ImportError as error:
        raise InvalidArgument(
            f"{path}: Parquet is written by pyarrow; pip install pyarrow, or write .json"
        ) from error
    with mapped_errors("write", path), new_folder(path) as folder:
        metadata = _v2_metadata(snapshot)
        for node in arrays:
            os.makedirs(f"{folder}/{node.path}")
            records: dict[int, list[_Reference]] = {}
            for found in _references(snapshot, node, base):
                record = found.number // _RECORD_SIZE
                for complete in [number for number in records if number < record]:
                    _write_record(f"{folder}/{node.path}", complete, records.pop(complete), node.meta)
                records.setdefault(record, []).append(found)
            for record, references in records.items():
                _write_record(f"{folder}/{node.path}", record, references, node.meta)
        with open(f"{folder}/.zmetadata", "wb") as file:
            file.write(msgspec.json.encode({"metadata": metadata, "record_size": _RECORD_SIZE}))
        os.sync()


def _v2_metadata(snapshot: Snapshot) -> Mapping[str, Any]:
    """Return the metadata of Zarr v2 by key; raise `UnsupportedFormat` for what that lacks."""
    metadata: dict[str, Any] = {}
    for path, document in plain_documents(snapshot, _never).items():
        fields, prefix = msgspec.json.decode(document), f"{path}/" if path else ""
        attributes = fields.get("attributes", {})
        if fields["node_type"] == "group":
            metadata[f"{prefix}.zgroup"] = {"zarr_format": 2}
        else:
            try:
                metadata[f"{prefix}.zarray"], attributes = v2_array(ArrayMeta.parse(document))
            except UnsupportedFormat as error:
                raise UnsupportedFormat(f"{path}: {error}; write references as .json") from error
        metadata[f"{prefix}.zattrs"] = attributes
    return metadata


def _write_record(folder: str, record: int, references: list[_Reference], meta: ArrayMeta) -> None:
    """Write the references to chunks of one range of numbers, with empty rows for those that do not exist."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = min(_RECORD_SIZE, meta.chunk_count - record * _RECORD_SIZE)
    urls, data = [None] * size, [None] * size
    places = np.zeros((2, size), np.int64)
    columns: tuple[list[Any], list[Any]] = urls, data
    for found in references:
        at = found.number - record * _RECORD_SIZE
        columns[0][at] = found.url or None
        columns[1][at] = found.data
        places[:, at] = found.offset, found.length
    table = pa.table(
        {
            "path": pa.array(urls, pa.string()),
            "offset": pa.array(places[0]),
            "size": pa.array(places[1]),
            "raw": pa.array(data, pa.binary()),
        }
    )
    pq.write_table(table, f"{folder}/refs.{record}.parq", compression="zstd")
