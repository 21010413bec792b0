"""Import a plain Zarr folder: its groups and arrays, in one commit, with the bytes of their chunks unchanged.

Every chunk is decoded before its bytes are stored, so a damaged chunk fails the import and never gets a checksum.
An array whose chunks all exist becomes dense; one that lacks chunks, or has none yet, becomes sparse, since a
missing chunk of a plain array means the fill value.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from tstore.convert.exporting import ProgressCallback
from tstore.convert.files import StrPath
from tstore.convert.folder import Folder
from tstore.convert.importing import ImportReport, SourceKind
from tstore.convert.zarr_folder import ZarrArray, left_out, read_nodes
from tstore.core.format.arrays.grid import chunk_coordinates
from tstore.core.format.checksums import block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.runtime.concurrency import compute
from tstore.core.runtime.pool import each
from tstore.core.store import Store, opened
from tstore.core.transactions.encoded import EncodedStaging
from tstore.core.transactions.handles import create_array
from tstore.core.transactions.staging import Staging

__all__ = ["import_zarr"]

_ROUND_BYTES = 64 << 20  # encoded chunks in memory, unless one chunk is longer
_ROUND_CHUNKS = 4096


async def import_zarr(
    source: StrPath,
    store: StrPath | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Add the groups and arrays of a plain Zarr folder, v3 or v2, to a store in one commit; return a summary.

    `source` is a path or a URL of fsspec, to which `storage_options` are passed. Paths, attributes, dimension
    names, codecs and chunks stay the same; v2 metadata becomes that of v3. An array that is the root gets the
    name of the folder. Encoded bytes are stored unchanged, once each chunk has been decoded as a check. Other
    files, and chunks outside of the grid, are not imported; the summary has them in `left_out`, unless a server
    can't list them.

    The store is created if there is none, after all metadata has been checked. Raise `Corrupt` (naming the chunk),
    `UnsupportedFormat`, `InvalidArgument` (no Zarr folder), `NotFound`, and `AlreadyExists` (a path is in use).
    """
    location = os.fspath(source)
    folder = Folder(location, storage_options)
    nodes = await read_nodes(folder)
    name = folder.name.removesuffix(".zarr") or "array"
    by_path = {node.path: ZarrArray(folder, node) for node in nodes if node.is_array}
    others = await compute(left_out, folder, nodes, by_path)
    arrays = {path or name: array for path, array in by_path.items()}
    groups = {node.path: node.metadata.get("attributes") or {} for node in nodes if not node.is_array}
    total, done = sum(array.meta.nbytes for array in arrays.values()), 0
    async with opened(store, "a") as opened_store:
        async with opened_store.transaction(message=f"imported from {name}") as transaction:
            staging = transaction.staging
            for path, attributes in groups.items():
                if path or attributes:
                    await transaction.create_group(path, attributes)
            for path, array in arrays.items():
                await create_array(staging, path, array.meta)  # fails before anything is copied
            for path, array in arrays.items():
                await _copy(staging, path, array)
                done += array.meta.nbytes
                if progress is not None:
                    progress(done, total)
        assert transaction.version is not None
    return ImportReport(SourceKind.ZARR, transaction.version, len(arrays), total, others)


async def _copy(staging: Staging, path: str, array: ZarrArray) -> None:
    """Store the chunks of an array and stage the references to them."""
    meta = array.meta
    per_round = max(1, min(_ROUND_CHUNKS, _ROUND_BYTES // max(1, meta.chain.max_length)))
    numbers = iter(await compute(array.listed_chunks))
    tables: list[ChunkTable] = []
    while batch := list(itertools.islice(numbers, per_round)):
        loaded: dict[int, tuple[bytes, bytes]] = {}

        def load(number: int, loaded: dict[int, tuple[bytes, bytes]] = loaded) -> None:
            at = chunk_coordinates(number, meta.counts)
            data = array.encoded(at)
            if data is None:
                return
            with array.decoded(at, data):
                pass  # only check the chunk
            loaded[number] = data, block_checks(memoryview(data))

        await each(load, batch, array.workers)
        present = sorted(loaded)
        if not present:
            continue
        pack, offset = await EncodedStaging(staging).write([loaded[number][0] for number in present])
        ends = itertools.accumulate((len(loaded[number][0]) for number in present), initial=offset)
        rows = [
            ChunkRow(n, pack, at, len(loaded[n][0]), loaded[n][1]) for n, at in zip(present, ends, strict=False)
        ]
        tables.append(ChunkTable.from_rows(rows))
    chunks = ChunkTable.concat(tables) if tables else ChunkTable.from_rows([])
    await staging.adopt_array(path, array.dense() if 0 < len(chunks) == meta.chunk_count else meta, chunks)
