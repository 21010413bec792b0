"""A search for what an import of a folder leaves out without a word: by files that are added or removed."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tstore as async_tstore
from tstore.convert.importing import SourceKind, import_checkpoint, recognize
from tstore.convert.zarr_import import import_zarr
from tstore.errors import TStoreError


async def imported(source: Path) -> tuple[Any, list[str]]:
    """Return what a store has after an import of a folder, and what the import left out."""
    url = f"memory://{uuid.uuid4()}"
    if recognize([source]) is SourceKind.ZARR:
        report = await import_zarr(source, url)
    else:
        report = await import_checkpoint(source, url, 0)
    async with await async_tstore.open(url, "r") as store:
        snapshot = await store.snapshot()
        await snapshot.read_nodes()
        nodes: dict[str, Any] = {path: snapshot.attributes(path) for path in snapshot.tree.nodes}
        values = {path: await (await snapshot.array(path)).read() for path in snapshot.paths()}
        described = {path: (str(v.dtype), v.shape, v.tobytes()) for path, v in values.items()}
        return (nodes, described, snapshot.reserved_attributes()), report.left_out


def is_told(file: str, left_out: list[str]) -> bool:
    """Return whether a file, or a folder with it, is among what an import left out."""
    return any(
        file == name.partition(" (")[0] or (name.endswith("/") and file.startswith(name)) for name in left_out
    )


def untold_additions(source: Path, names: Iterable[str]) -> list[str]:
    """Add files to all folders in a folder; return those of which an import does not tell."""
    added = []
    for folder in [source, *(path for path in source.rglob("*") if path.is_dir())]:
        for name in names:
            stray = folder / name
            if not stray.exists() and not (folder / "c").is_file():
                stray.parent.mkdir(parents=True, exist_ok=True)
                stray.write_bytes(b"stray")
                added.append(stray.relative_to(source).as_posix())
    _, left_out = asyncio.run(imported(source))
    return [file for file in added if not is_told(file, left_out)]


def untold_removals(source: Path, tmp_path: Path) -> Iterator[str]:
    """Yield the files that an import neither needs nor tells of."""
    before, left_out = asyncio.run(imported(source))
    for path in (path for path in source.rglob("*") if path.is_file()):
        file, copy = path.relative_to(source).as_posix(), tmp_path / "copy"
        if is_told(file, left_out):
            continue
        shutil.copytree(source, copy)
        (copy / file).unlink()
        try:
            after, _ = asyncio.run(imported(copy))
        except TStoreError:
            after = None
        shutil.rmtree(copy)
        if after == before:
            yield file
