"""Checkpoints from safetensors files and back, streamed.

A file becomes the checkpoint of a step: a flat dict {tensor name: array} in the order of the file, saved directly
from the memory map. The file's metadata becomes the attribute "safetensors" of the root group, so that a file that
the safetensors package wrote is exported again byte for byte.

Any other checkpoint is exported with the keys of its containers joined by ".", as in `params.layers.0.w`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tstore.array import Array
from tstore.checkpoint.save import save
from tstore.convert.safetensors import Writer, open_tensors
from tstore.convert.safetensors_header import Spec, by_alignment
from tstore.errors import InvalidArgument, listed, parsing
from tstore.format.tree_document import stored_document
from tstore.quantization.policy import CodecRules
from tstore.runtime.pool import run
from tstore.snapshot import Snapshot
from tstore.steps import chosen_snapshot
from tstore.store import Store, opened

__all__ = ["Exported", "export_safetensors", "import_safetensors"]

_SLAB = 32 << 20
_ATTRIBUTE = "safetensors"

Path: TypeAlias = str | os.PathLike[str]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done, and with the total."""


class Exported(NamedTuple):
    """The result of an export. `left_out` names the values that are not arrays, which the file can't hold."""

    version: int
    tensors: int
    bytes: int
    left_out: list[str]


async def import_safetensors(file: Path, store: Path | Store, step: int, *, codecs: CodecRules = None) -> int:
    """Save the tensors of a safetensors file as the checkpoint of a step and return its version.

    Nothing is copied: the tensors are views of the memory-mapped file, which must not be truncated meanwhile.
    `codecs` as in `tstore.save`. The store is created if there is none, after the header has been checked.
    Raises `Corrupt` (the file's header is wrong), `UnsupportedFormat`, `InvalidArgument` for an index of several
    files, `NotFound`, and the errors of `tstore.save`.
    """
    tensors, metadata = open_tensors(file)
    name = os.path.basename(os.fspath(file))
    return await save(
        store,
        tensors,
        step,
        codecs=codecs,
        attributes={_ATTRIBUTE: metadata},
        message=f"imported from {name}",
    )


async def export_safetensors(
    store: Path | Store,
    out: Path,
    *,
    at: int | str | None = None,
    step: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write a version or tag (`at`), a step, or the newest step to the new file `out` and return what it has.

    Quantized arrays are decoded to their original dtype. The file appears whole and durable, or not at all. Memory
    is bounded by one slab of 32 MiB, or by one row of a tensor if that is larger.
    Raises `AlreadyExists` (`out` exists; it is unchanged), `NotAStore`, `NotFound`, `Corrupt`, `InvalidArgument`
    (two arrays would get the same name, or safetensors has no name for a dtype), `StorageFull`.
    """
    if step is not None and at is not None:
        raise InvalidArgument("step=… and at=… both name a version; pass one of them")
    async with opened(store, "r") as source:
        snapshot = await chosen_snapshot(source, step, at)
        paths, left_out = _names(snapshot)
        arrays = {name: await snapshot.array(path) for name, path in paths.items()}
        specs: dict[str, Spec] = {name: (a.dtype, a.shape) for name, a in arrays.items()}
        metadata = _metadata(snapshot)
        if metadata is None:
            specs = by_alignment(specs)
        total, done = sum(a.nbytes for a in arrays.values()), 0
        buffer = np.empty(min(_SLAB, max((a.nbytes for a in arrays.values()), default=0)), np.uint8)
        async with _in_thread(Writer(out, specs, metadata)) as file:
            for name in specs:
                async for slab in _slabs(arrays[name], buffer):
                    await run(file.write, name, slab)
                    done += slab.nbytes
                    if progress is not None:
                        progress(done, total)
    return Exported(snapshot.version, len(arrays), total, left_out)


@contextlib.asynccontextmanager
async def _in_thread(writer: Writer) -> AsyncIterator[Writer]:
    """Enter and exit the writer in a thread, because both wait for the disk."""
    await run(writer.__enter__)
    try:
        yield writer
    except BaseException as error:
        await run(writer.__exit__, type(error), error, error.__traceback__)
        raise
    await run(writer.__exit__, None, None, None)


async def _slabs(array: Array, buffer: npt.NDArray[np.uint8]) -> AsyncIterator[npt.NDArray[Any]]:
    """Yield the array in runs of rows; each is valid until the next is requested."""
    if array.ndim == 0 or array.nbytes <= buffer.nbytes:
        out = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        yield await array.read(out)
        return
    row = array.nbytes // array.shape[0]
    for start, stop in _runs(array.shape[0], array.chunks[0], max(1, _SLAB // row)):
        shape = (stop - start, *array.shape[1:])
        size = math.prod(shape) * array.dtype.itemsize
        fits = size <= buffer.nbytes
        out = buffer[:size].view(array.dtype).reshape(shape) if fits else np.empty(shape, array.dtype)
        yield await array[start:stop].read(out)


def _runs(length: int, chunk: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `most` rows, of whole chunks if a chunk has no more rows."""
    size = most // chunk * chunk or most
    for start in range(0, length, size):
        yield start, min(start + size, length)


def _metadata(snapshot: Snapshot) -> dict[str, str] | None:
    """Return the metadata of the imported file; None if there was none or the attribute is another caller's."""
    stored = snapshot.attributes().get(_ATTRIBUTE)
    if isinstance(stored, dict) and all(isinstance(text, str) for text in stored.values()):
        return stored
    return None


def _names(snapshot: Snapshot) -> tuple[dict[str, str], list[str]]:
    """Return the path of each array by its name in the file, and the names of the values that are not arrays."""
    document = stored_document(snapshot.own_attributes().get("structure"), snapshot.paths())
    if document is None:
        named = [(path.replace("/", "."), path) for path in snapshot.paths()]
        left_out = []
    else:
        with parsing(f"version {snapshot.version}: its structure"):
            leaves = list(_leaves(document, ()))
        named = [(name, path) for name, path in leaves if path is not None]
        left_out = [name for name, path in leaves if path is None]
    names: dict[str, str] = {}
    clashes = []
    for name, path in named:
        if name in names:
            clashes.append(f"{names[name]} and {path} would both be {name!r}")
        names.setdefault(name, path)
    if clashes:
        raise InvalidArgument(
            f"version {snapshot.version} can't be exported: joining keys by '.' gives several arrays the same "
            f"name; rename their keys and save again:{listed(clashes)}"
        )
    return names, left_out


def _leaves(document: list[Any], keys: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield the name and path of each leaf of a structure document, in order; no path if it is not an array."""
    match document:
        case ["array" | "scalar", path]:
            yield ".".join(keys) if keys else path, path
        case ["dict", items]:
            for (_, key), child in items:
                yield from _leaves(child, (*keys, key))
        case ["dataclass" | "namedtuple", _, items]:
            for field, child in items:
                yield from _leaves(child, (*keys, field))
        case ["list" | "tuple", items]:
            for i, child in enumerate(items):
                yield from _leaves(child, (*keys, str(i)))
        case ["none"]:
            return
        case _:
            yield ".".join(keys), None
