"""Reference files in kerchunk's format, which let fsspec and zarr-python read a version in place.

The file has the metadata of all arrays, and for each chunk the URL of its pack, its offset and its length. A small
file is one JSON document; a Parquet folder, which readers load in parts, is for many chunks. fsspec
computes the position of a chunk in such a folder from v2 names of chunks (`a/0.1`), so arrays there have these.
No option or token with which the store was opened is written: readers pass their own.
"""

from __future__ import annotations

import base64
import importlib.util
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from tstore.convert.exporting import ExportReport, ProgressCallback, in_thread, snapshot_to_export
from tstore.convert.files import StrPath, exported_file, refuse_existing
from tstore.convert.names import below, subtree_of, values_beside
from tstore.convert.zarr_export import (
    chunk_name,
    consolidate,
    plain_nodes,
    unlisted_elsewhere,
    unreadable_elsewhere,
)
from tstore.core.array import Array
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.checksums import block_checks
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.storage.local.atomic_file import new_folder, write_all
from tstore.core.storage.objects import mapped_errors
from tstore.core.store import Store, opened
from tstore.errors import Corrupt, InvalidArgument

__all__ = ["export_references", "is_parquet", "reader_options"]

_RECORD = 100_000  # chunks in one Parquet file
_ROUND = 1 << 14  # references read at once


async def export_references(
    store: StrPath | Store,
    file: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    skip: Sequence[str] = (),
    keep_exmy: bool = False,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write the references of a version, or of its group `subtree`, to a new file (`.json`) or folder (`.parq`).

    Return a summary. A folder may also end in `.parquet`. With it, zarr-python reads the version through the
    file system `reference://` of fsspec, without tstore, until the version is collected. The chunks stay in the
    store; those that are stored in a record are copied into the file. A Parquet folder needs the package
    fastparquet, here and where it is read. Arrays of a dtype that zarr-python lacks, such as bfloat16, are in
    the file, but not among the members of their groups; the summary names them in `unlisted`.

    Raise `InvalidArgument` for another name, a store in memory, and an array that other programs can't read (in an
    eXmY format, unless `keep_exmy`); `AlreadyExists`, `NotFound` (a chunk of a dense array was never written),
    `Corrupt`, and the errors of opening a version.
    """
    path = os.fspath(file)
    write = _write_parquet if is_parquet(path) else _write_json
    refuse_existing(path)
    async with opened(store, "r") as opened_store:
        snapshot, skipped = await snapshot_to_export(opened_store, at, step, skip)
        arrays = {below(path, subtree): await snapshot.array(path) for path in subtree_of(snapshot, subtree)[1]}
        source = _Source(snapshot, _url_for_fsspec(opened_store.url), subtree, arrays)
        source.check_readable(keep_exmy)
        report = _Reporter(arrays, progress)
        files = await write(path, source, report)
        left_out, unlisted = values_beside(snapshot, subtree), unlisted_elsewhere(arrays)
    return ExportReport(snapshot.version, len(arrays), report.total, files, left_out + skipped, unlisted=unlisted)


def is_parquet(path: str) -> bool:
    """Return whether the name of a reference file is that of a Parquet folder; raise `InvalidArgument` for others.

    fsspec takes every path with `.json` in it for JSON.
    """
    name = path.rstrip("/")
    if name.endswith(".json") and name == path:
        return False
    if not name.endswith((".parq", ".parquet")) or ".json" in os.path.abspath(name):
        raise InvalidArgument(
            f"{path}: expected a name for a reference file that ends in .json, or in .parq or .parquet (a folder, "
            "for many chunks) without .json in its path"
        )
    if importlib.util.find_spec("fastparquet") is None:
        raise InvalidArgument(
            f"{path}: references in Parquet need the package fastparquet, which is not installed; run pip install "
            "fastparquet, or write a .json file"
        )
    return True


def reader_options(store: StrPath) -> dict[str, Any]:
    """Return the options of `reference://` for reading the chunks of a store at this URL with zarr-python."""
    scheme, separator, _ = os.fspath(store).partition("://")
    if not separator or scheme == "file":
        return {"remote_protocol": "file"}
    return {"remote_protocol": scheme, "remote_options": {"asynchronous": True}}


def _url_for_fsspec(url: str) -> str:
    """Return the URL of a store as fsspec takes it; raise `InvalidArgument` if only this process can read it."""
    if url.startswith("memory://"):
        raise InvalidArgument(
            f"{url} can't be referred to: other programs can't read a store in memory; save to a folder or to "
            "another URL"
        )
    return url.rstrip("/") if "://" in url else f"file://{url}"


@dataclass(frozen=True)
class _Source:
    """The version whose chunks are referred to, the URL of its store, and the arrays of a subtree by path."""

    snapshot: Snapshot
    url: str
    subtree: str
    arrays: Mapping[str, Array]

    def check_readable(self, keep_exmy: bool) -> None:
        """Raise `InvalidArgument` if other programs can't read the chunks of an array."""
        for name in self.arrays:
            reason = unreadable_elsewhere(self.meta(name), keep_exmy=keep_exmy)
            if reason is not None:
                advice = "" if keep_exmy else "pass --keep-exmy (keep_exmy=True) if your readers have exmy, or "
                raise InvalidArgument(f"{name} {reason}; {advice}export a Zarr folder, where it is decoded")

    def meta(self, name: str) -> ArrayMeta:
        """Return the metadata of an array."""
        return self.snapshot.tree.nodes[self.arrays[name].path].meta

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the metadata of each group and array by path.

        Each group repeats that of all below it, since zarr-python can't list groups through `reference://`.
        """
        nodes = plain_nodes(self.snapshot, self.subtree, keep_exmy=True)
        groups = [path for path, fields in nodes.items() if fields["node_type"] == "group" and "\\" not in path]
        consolidate(nodes, groups, unlisted_elsewhere(self.arrays))
        return nodes

    def key(self, pack: str) -> str:
        """Return the URL of a pack relative to the URL of the store."""
        if self.url.startswith("file://"):
            path = self.snapshot.pack_path(pack)
            return pack if path is None else os.path.relpath(path, self.url.removeprefix("file://"))
        return quote(pack, safe="/") if self.url.startswith(("http://", "https://")) else pack

    def inline(self, name: str, row: ChunkRow) -> bytes | None:
        """Return the verified bytes of a chunk that is stored in the metadata, None if it is in a pack."""
        if isinstance(row.pack, str):
            return None if row.length else b""
        data = row.pack[row.offset : row.offset + row.length]
        checks = block_checks(memoryview(data))
        if checks != row.checks:
            raise Corrupt(f"{name}, chunk number {row.number}: {row.mismatch(checks, self.snapshot.location)}")
        return data

    async def rows(self, name: str) -> AsyncIterator[list[ChunkRow]]:
        """Yield the references to the chunks of an array, in rounds."""
        async for references in self.snapshot.all_references(self.arrays[name].path, _ROUND):
            yield references.rows

    async def records(self, name: str, size: int) -> AsyncIterator[tuple[range, list[ChunkRow]]]:
        """Yield ranges of `size` chunk numbers that have chunks, with the references to these."""
        count, numbers, rows = self.meta(name).chunk_count, range(0), list[ChunkRow]()
        async for references in self.snapshot.all_references(self.arrays[name].path, _ROUND):
            for row in references.rows:
                if row.number not in numbers:
                    if rows:
                        yield numbers, rows
                    start = row.number - row.number % size
                    numbers, rows = range(start, min(start + size, count)), []
                rows.append(row)
        if rows:
            yield numbers, rows


class _Reporter:
    """Reports progress in bytes of the values of finished arrays."""

    def __init__(self, arrays: Mapping[str, Array], callback: ProgressCallback | None) -> None:
        self.total = sum(array.nbytes for array in arrays.values())
        self._done, self._callback = 0, callback

    def add(self, array: Array) -> None:
        """Count an array as finished."""
        self._done += array.nbytes
        if self._callback is not None:
            self._callback(self._done, self.total)


async def _write_json(path: str, source: _Source, report: _Reporter) -> int:
    # a template lets readers replace the URL of a store that has moved; fsspec would evaluate braces in its value
    templates = {} if "{{" in source.url else {"store": source.url}
    base = "{{store}}" if templates else source.url
    keys: dict[str, str] = {}

    def entries(name: str, rows: list[ChunkRow]) -> bytes:
        references: dict[str, Any] = {}
        for row in rows:
            key, data = f"{name}/{chunk_name(row.number, source.meta(name).counts)}", source.inline(name, row)
            if data is not None:
                references[key] = f"base64:{base64.b64encode(data).decode()}"
                continue
            assert isinstance(row.pack, str)
            if row.pack not in keys:
                keys[row.pack] = f"{base}/{source.key(row.pack)}"
            references[key] = [keys[row.pack], row.offset, row.length]
        return b",\n" + msgspec.json.encode(references)[1:-1] if references else b""

    def append(data: bytes, offset: int) -> int:
        with mapped_errors("write", path):
            return offset + write_all(fd, [memoryview(data)], offset)

    async with in_thread(exported_file(path), path) as fd:
        head = msgspec.json.encode({"version": 1, "templates": templates, "refs": {}})
        metadata = {_document_name(p): msgspec.json.encode(n).decode() for p, n in source.nodes().items()}
        end = await run(append, head[:-2] + b"\n" + msgspec.json.encode(metadata)[1:-1], 0)
        for name, array in source.arrays.items():
            async for rows in source.rows(name):
                end = await run(append, await run(entries, name, rows), end)
            report.add(array)
        await run(append, b"\n}}\n", end)
    return 1


async def _write_parquet(path: str, source: _Source, report: _Reporter) -> int:
    files = 1
    async with in_thread(new_folder(path), path) as temporary:
        await run(_write_metadata, f"{temporary}/.zmetadata", source)
        for name, array in source.arrays.items():
            async for numbers, rows in source.records(name, _RECORD):  # fsspec treats all others as missing
                out = f"{temporary}/{name}/refs.{numbers.start // _RECORD}.parq"
                await run(_write_record, out, source, name, numbers, rows)
                files += 1
            report.add(array)
        await run(os.sync)
    return files


def _write_metadata(out: str, source: _Source) -> None:
    nodes, stubs = source.nodes(), {}
    for path in source.arrays:
        nodes[path]["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "."}}
        meta = source.meta(path)
        stubs[f"{path}/.zarray"] = {"shape": meta.shape, "chunks": meta.chunks}  # fsspec counts chunks with it
    metadata = {**{_document_name(path): fields for path, fields in nodes.items()}, **stubs}
    with mapped_errors("write", out), open(out, "wb") as file:
        file.write(msgspec.json.encode({"metadata": metadata, "record_size": _RECORD}))


def _document_name(path: str) -> str:
    return f"{path}/zarr.json" if path else "zarr.json"


def _write_record(out: str, source: _Source, name: str, numbers: range, rows: list[ChunkRow]) -> None:
    """Write a Parquet file with a row for each of these numbers, empty for missing chunks."""
    import fastparquet
    import pandas as pd

    size, keys = len(numbers), dict[str, str]()
    urls: list[str | None] = [None] * size
    raws: list[bytes | None] = [None] * size
    offsets, sizes = [0] * size, [0] * size
    for row in rows:
        at, data = row.number - numbers.start, source.inline(name, row)
        if data is not None:
            raws[at] = data
            continue
        assert isinstance(row.pack, str)
        if row.pack not in keys:
            keys[row.pack] = f"{source.url}/{source.key(row.pack)}"
        urls[at], offsets[at], sizes[at] = keys[row.pack], row.offset, row.length
    columns = {"path": pd.Series(urls, dtype=object), "offset": offsets, "size": sizes}
    frame = pd.DataFrame({**columns, "raw": pd.Series(raws, dtype=object)})
    # pandas 3 reads a null among texts as NaN, which fsspec mistakes for a URL, but one among JSON values as None
    path_encoding = "utf8" if len(rows) == size else "json"
    with mapped_errors("write", out):
        os.makedirs(os.path.dirname(out), exist_ok=True)
        fastparquet.write(
            out,
            frame,
            compression="ZSTD",
            write_index=False,
            stats=False,
            has_nulls=["path", "raw"],
            object_encoding={"path": path_encoding, "raw": "bytes"},
        )
