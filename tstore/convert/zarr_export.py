"""Export to a plain Zarr v3 folder for zarr-python, TensorStore and others.

The bytes of chunks are copied unchanged after their checksums were verified. Arrays in an eXmY format are
decoded to their dtype, since other programs do not read eXmY; `keep_exmy` copies their bytes too, for zarr-python
with the package exmy. Arrays with the few codec chains that zarr-python misreads are decoded too.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.convert.exporting import ExportReport, ProgressCallback, in_thread, snapshot_to_export
from tstore.convert.files import StrPath, refuse_existing
from tstore.convert.names import below, subtree_of, values_beside
from tstore.core.array import Array
from tstore.core.format.arrays.array_metadata import ArrayMeta, ChunkNames
from tstore.core.format.arrays.codecs import chain_documents
from tstore.core.format.arrays.dtypes import has_ml_dtype
from tstore.core.format.arrays.grid import boxes, chunk_coordinates, part_of
from tstore.core.format.arrays.numcodecs_classes import misread_by_zarr
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.paths import is_at_or_below, parents
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.runtime.pool import each, run
from tstore.core.snapshot import Snapshot
from tstore.core.storage.local.atomic_file import new_folder, write_all
from tstore.core.storage.objects import mapped_errors
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument

__all__ = ["chunk_name", "consolidate", "export_zarr", "plain_nodes", "unlisted_elsewhere", "unreadable_elsewhere"]

_ROUND_BYTES = 32 << 20  # decoded chunks in memory, unless one chunk is longer
_ROUND_CHUNKS = 1 << 14  # references in memory at once
_NAMES = ChunkNames("c", "/")  # regardless of the chunk names in the array's metadata


async def export_zarr(
    store: StrPath | Store,
    folder: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    skip: Sequence[str] = (),
    keep_exmy: bool = False,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write a version, or its group `subtree`, as a new plain folder of Zarr v3; return a summary.

    Chunks have the bytes that are stored. Where one is a whole file of a local store, on the same file system, the
    new file is a hard link to it. So replace files of the folder rather than change them in place; zarr-python and
    TensorStore do so. Arrays in an eXmY format are decoded and stored uncompressed, unless `keep_exmy`.

    zarr-python lacks some dtypes, such as bfloat16, and would list no member of a group with such an array. So
    groups above one have consolidated metadata without it; the summary names these arrays in `unlisted`.

    The folder appears whole and durable, or not at all. Raise `AlreadyExists` (there is something at `folder`),
    `NotFound` (a chunk of a dense array was never written), `Corrupt`, and the errors of opening a version.
    """
    path = os.fspath(folder)
    async with opened(store, "r") as opened_store:
        snapshot, skipped = await snapshot_to_export(opened_store, at, step, skip)
        nodes = plain_nodes(snapshot, subtree, keep_exmy=keep_exmy)
        arrays = {below(path, subtree): await snapshot.array(path) for path in subtree_of(snapshot, subtree)[1]}
        unlisted = unlisted_elsewhere(arrays)
        consolidate(nodes, {above for path in unlisted for above in ("", *parents(path))}, unlisted)
        documents = {p: msgspec.json.format(msgspec.json.encode(fields), indent=2) for p, fields in nodes.items()}
        total, done, files = sum(array.nbytes for array in arrays.values()), 0, len(documents)
        refuse_existing(path)
        async with in_thread(new_folder(path), path) as temporary:
            await run(_write_documents, temporary, documents)
            for name, array in arrays.items():
                meta = snapshot.tree.nodes[array.path].meta
                if unreadable_elsewhere(meta, keep_exmy=keep_exmy) is not None:
                    files += await _decode(snapshot, array, meta, f"{temporary}/{name}")
                else:
                    files += await _copy(snapshot, array.path, meta, f"{temporary}/{name}")
                done += array.nbytes
                if progress is not None:
                    progress(done, total)
            await run(os.sync)  # one call instead of one per file
        left_out = values_beside(snapshot, subtree)
    return ExportReport(snapshot.version, len(arrays), total, files, left_out + skipped, unlisted=unlisted)


def plain_nodes(snapshot: Snapshot, subtree: str, *, keep_exmy: bool) -> dict[str, dict[str, Any]]:
    """Return the metadata of each group and array by path, "" for the root, without tstore's own entries.

    With a subtree, the paths are those below this group. Raise `InvalidArgument` if it is an array.

    Groups that exist only as parts of paths are included. Arrays that other programs could not read, those in eXmY
    formats unless `keep_exmy`, become uncompressed ones.
    """
    nodes = snapshot.tree.nodes
    if subtree in nodes and nodes[subtree].is_array:
        raise InvalidArgument(f"{snapshot.location}: {subtree} is an array; pass a group above it as the subtree")
    paths = {below(path, subtree) for path in nodes if is_at_or_below(path, subtree)}
    paths |= {above for path in paths for above in parents(path)} | {""}
    plain = {}
    for path in sorted(paths):
        node = nodes.get(f"{subtree}/{path}".strip("/"))
        if node is None:
            fields: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        elif node.is_array:
            fields = node.meta.plain_fields()
            fields.pop("tstore", None)
            fields["chunk_key_encoding"] = {"name": "default", "configuration": {"separator": "/"}}
            if unreadable_elsewhere(node.meta, keep_exmy=keep_exmy) is not None:
                fields["codecs"] = chain_documents(node.meta.dtype, None)
        else:
            fields = msgspec.json.decode(node.document)
            if not node.path:
                fields.get("attributes", {}).pop(RESERVED_ATTRIBUTE, None)
        plain[path] = fields
    return plain


def unlisted_elsewhere(arrays: Mapping[str, Array]) -> list[str]:
    """Return the arrays with a dtype of ml_dtypes, or a backslash in the path.

    With one of these among the members of a group, zarr-python would open none of the others.
    """
    return [path for path, array in arrays.items() if has_ml_dtype(array.dtype) or "\\" in path]


def consolidate(nodes: Mapping[str, dict[str, Any]], groups: Iterable[str], unlisted: Collection[str]) -> None:
    """Add consolidated metadata of all nodes below, except those in `unlisted`, to the metadata of groups."""
    plain = {path: fields if fields["node_type"] == "array" else {**fields} for path, fields in nodes.items()}
    apart = set(unlisted)
    parts: dict[str, dict[str, Any]] = {group: {"metadata": {}, "unlisted": {}} for group in groups}
    for path, fields in plain.items():
        part = "unlisted" if path in apart or "\\" in path else "metadata"
        for above in (*parents(path), "") if path else ():
            if above in parts:
                parts[above][part][path.removeprefix(f"{above}/")] = fields
    for group, both in parts.items():
        nodes[group]["consolidated_metadata"] = {"kind": "inline", "must_understand": False, **both}


def unreadable_elsewhere(meta: ArrayMeta, *, keep_exmy: bool) -> str | None:
    """Return why other programs can't read the chunks of an array, None if they can."""
    if not keep_exmy and _has_exmy(meta.chain.documents):
        return "is in an eXmY format, which only programs with the package exmy read"
    return misread_by_zarr(meta.chain.documents, meta.dtype.itemsize)


def _has_exmy(codecs: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        codec["name"] == "exmy" or _has_exmy((codec.get("configuration") or {}).get("codecs") or ())
        for codec in codecs
    )


def chunk_name(number: int, counts: Sequence[int]) -> str:
    """Return the name of a chunk in the folder of its array, by its C-order number in the grid."""
    return _NAMES.name(chunk_coordinates(number, tuple(counts)))


def _write_documents(folder: str, documents: Mapping[str, bytes]) -> None:
    with mapped_errors("write", folder):
        for path, document in documents.items():
            _write(f"{folder}/{path}/zarr.json" if path else f"{folder}/zarr.json", memoryview(document))


def _write(path: str, data: memoryview) -> None:
    """Write a new file, and the folders above it that are missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, flags, 0o644)
    try:
        write_all(fd, [data], 0)
    finally:
        os.close(fd)


async def _copy(snapshot: Snapshot, path: str, meta: ArrayMeta, folder: str) -> int:
    """Write the stored bytes of all chunks of an array into its folder; return the number of files."""

    def deliver(row: ChunkRow, data: npt.NDArray[np.uint8]) -> None:
        name = f"{folder}/{chunk_name(row.number, meta.counts)}"
        with mapped_errors("write", name):
            if not _link(snapshot, row, name):
                _write(name, data.data)

    files = 0
    async for references in snapshot.all_references(path, _ROUND_CHUNKS):
        await snapshot.read_encoded(path, references, deliver)
        files += len(references)
    return files


def _link(snapshot: Snapshot, row: ChunkRow, name: str) -> bool:
    """Make a hard link to a pack that is exactly one chunk; return False if that is impossible."""
    source = snapshot.pack_path(row.pack) if isinstance(row.pack, str) and not row.offset else None
    if source is None:
        return False
    with contextlib.suppress(OSError):
        if os.stat(source).st_size == row.length:
            os.makedirs(os.path.dirname(name), exist_ok=True)
            os.link(source, name)
            return True
    return False


async def _decode(snapshot: Snapshot, array: Array, meta: ArrayMeta, folder: str) -> int:
    """Write the decoded chunks of an array into its folder; return the number of files."""
    files = 0
    async for box in _boxes(snapshot, array, meta):
        sides = list(zip(box, meta.chunks, meta.shape, strict=True))
        region = tuple(slice(r.start * c, min(r.stop * c, n)) for r, c, n in sides)
        values = await array[region].read()
        cells = [len(side) for side in box]

        def write(cell: tuple[int, ...], values: npt.NDArray[Any] = values, box: tuple[range, ...] = box) -> None:
            chunk = np.full(meta.chunks, meta.fill_value, meta.dtype)
            inside = tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, meta.chunks, strict=True))
            part = part_of(values, inside)
            chunk[tuple(map(slice, part.shape))] = part
            name = f"{folder}/{_NAMES.name([r[i] for r, i in zip(box, cell, strict=True)])}"
            with mapped_errors("write", name):
                _write(name, chunk.reshape(-1).view(np.uint8).data)

        await each(write, np.ndindex(*cells))
        files += math.prod(cells)
    return files


async def _boxes(snapshot: Snapshot, array: Array, meta: ArrayMeta) -> AsyncIterator[tuple[range, ...]]:
    """Yield boxes of chunks that partition an array, or each chunk of a sparse array that exists."""
    if not meta.sparse:
        for box in boxes(meta.counts, max(1, _ROUND_BYTES // (meta.chunk_size * meta.dtype.itemsize))):
            yield box
        return
    async for references in snapshot.all_references(array.path, _ROUND_CHUNKS):
        for number in references.number.tolist():
            yield tuple(range(i, i + 1) for i in chunk_coordinates(number, meta.counts))
