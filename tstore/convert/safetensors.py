"""Import and export of checkpoints as safetensors files, streamed.

A file becomes the checkpoint of a step: a flat dict {tensor name: array} in the order of the file, saved directly
from the memory map. The file's metadata becomes the attribute "safetensors" of the root group, so that a file that
the safetensors package wrote is exported again byte for byte.

Any other checkpoint is exported with the keys of its containers joined by ".", as in `params.layers.0.w`.

A file is 8 bytes of header length (little endian), a JSON header (`safetensors_header`), and the tensors' bytes.
A new file appears whole or not at all, and no file is ever overwritten (see `storage.local.atomic_file`).
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tstore.array import Array
from tstore.checkpoint.save import save
from tstore.convert.safetensors_header import Header, Spec, StrPath, encode_header, parse_header, sort_tensors
from tstore.errors import AlreadyExists, InvalidArgument, Misuse, bullet_list, parsing
from tstore.format.tree_document import stored_document
from tstore.quantization.policy import CodecRules
from tstore.runtime.pool import run
from tstore.snapshot import Snapshot
from tstore.steps import chosen_snapshot
from tstore.storage.local.atomic_file import mapped_errors, new_file, write_all
from tstore.storage.objects import Durability
from tstore.store import Store, opened

__all__ = ["ExportReport", "Writer", "export_safetensors", "import_safetensors", "open_tensors", "read_header"]

_SLAB = 32 << 20  # bytes

_ATTRIBUTE = "safetensors"

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and the total."""


class ExportReport(NamedTuple):
    """The result of an export. `left_out` names the values that are not arrays, which the file can't hold."""

    version: int
    tensors: int
    bytes: int
    left_out: list[str]


async def import_safetensors(
    file: StrPath, store: StrPath | Store, step: int, *, codecs: CodecRules = None
) -> int:
    """Save the tensors of a safetensors file as the checkpoint of a step and return its version.

    They are saved from a memory map of the file (see `open_tensors`), which must not be truncated meanwhile.
    `codecs` is the argument of `tstore.save`. The store is created if there is none, after the header has been
    checked. Raise `Corrupt` (the header does not fit the file), `UnsupportedFormat`, `InvalidArgument` for an
    index of several files, `NotFound`, and the errors of `tstore.save`.
    """
    tensors, metadata = open_tensors(file)
    name = os.path.basename(os.fspath(file))
    return await save(
        store, tensors, step, codecs=codecs, attributes={_ATTRIBUTE: metadata}, message=f"imported from {name}"
    )


async def export_safetensors(
    store: StrPath | Store,
    out: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write the version or tag `at`, or a step (by default the newest), to the new file `out`; return a summary.

    Quantized arrays are decoded to their original dtype. The file appears whole and durable, or not at all. Memory
    is bounded by one slab of 32 MiB, or one row of a tensor if that is larger, and the chunks being decoded.
    Raise `AlreadyExists` (`out` exists; it is unchanged), `NotAStore`, `NotFound`, `Corrupt`, `InvalidArgument`
    (two arrays with the same name, or a dtype that safetensors lacks), `StorageFull`.
    """
    if step is not None and at is not None:
        raise InvalidArgument("step=… and at=… both name a version; pass one of them")
    async with opened(store, "r") as source:
        snapshot = await chosen_snapshot(source, step, at)
        if snapshot.version == 0:
            raise InvalidArgument(f"{snapshot.location} is empty; pass another version or tag as at=…")
        paths, left_out = _paths_by_name(snapshot)
        arrays = {name: await snapshot.array(path) for name, path in paths.items()}
        specs: dict[str, Spec] = {name: (a.dtype, a.shape) for name, a in arrays.items()}
        metadata = _file_metadata(snapshot)
        if metadata is None:
            specs = sort_tensors(specs)
        total, done = sum(a.nbytes for a in arrays.values()), 0
        buffer = np.empty(min(_SLAB, max((a.nbytes for a in arrays.values()), default=0)), np.uint8)
        async with _open_in_thread(Writer(out, specs, metadata)) as file:
            for name in specs:
                async for slab in _slabs(arrays[name], buffer):
                    await run(file.write, name, slab)
                    done += slab.nbytes
                    if progress is not None:
                        progress(done, total)
    return ExportReport(snapshot.version, len(arrays), total, left_out)


def read_header(path: StrPath) -> Header:
    """Return the header of a safetensors file, checked against the file.

    Raise `Corrupt` for a header that does not fit the file, `UnsupportedFormat` for elements below one byte (F4,
    F6_…) and for unknown fields, `InvalidArgument` for a JSON file, such as an index of several files, and
    `NotFound` or `Denied` for a file that can't be opened.
    """
    with _open_file(path) as file:
        return parse_header(file, path)


def open_tensors(path: StrPath) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Return the tensors of a safetensors file as read-only arrays, in the order of their bytes, and its metadata.

    The arrays are views of one memory map: nothing is read until it is used, and the file must not be truncated
    meanwhile. Tensors that are not aligned for their dtype are copied; early versions of the safetensors package
    wrote such files. Raise the errors of `read_header`.
    """
    with _open_file(path) as file:
        header = parse_header(file, path)
        data = np.asarray(np.memmap(file, np.uint8, "r"))
    tensors = {}
    for name, info in header.tensors.items():
        array = data[info.start : info.stop].view(info.dtype).reshape(info.shape)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        tensors[name] = array
    return tensors, header.metadata


class Writer:
    """A new safetensors file, which appears whole and durable when the `with` block ends without an exception.

        with Writer("out.safetensors", {"w": (np.dtype("f4"), (2, 3))}, {"format": "np"}) as file:
            file.write("w", w)

    Header and data follow the order of `tensors`. Raise `InvalidArgument` for a name, dtype, shape or metadata
    that the format can't hold, `Misuse` for incomplete tensors, `AlreadyExists` if the file exists, and
    `StorageFull`, `Denied` or `NotFound` from the file system. After an error no new file is left.
    """

    def __init__(
        self, path: StrPath, tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = os.fspath(path)
        self._open = contextlib.ExitStack()
        self._fd = -1
        self._header, self._tensors = encode_header(self.path, tensors, metadata or {})
        self._positions = {name: info.start for name, info in self._tensors.items()}

    def __enter__(self) -> Self:
        if os.path.lexists(self.path):
            raise AlreadyExists(
                f"{self.path} exists already and is unchanged; choose another name, or remove it first"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(mapped_errors("write", self.path))
            self._fd = stack.enter_context(new_file(self.path, Durability.FSYNC))
            write_all(self._fd, [self._header], 0)
            self._open = stack.pop_all()
        return self

    def write(self, name: str, part: np.ndarray[Any, Any]) -> None:
        """Write a whole tensor, or its next rows (parts along the first dimension, in order).

        Tensors may come in any order. `part` has the declared dtype and, except for the number of rows, the
        declared shape. Raise `InvalidArgument` for a part that does not fit, `Misuse` outside the `with` block.
        """
        path = self.path
        if self._fd < 0:
            raise Misuse(f"{path} is not open for writing; write inside its `with` block")
        if name not in self._tensors:
            raise InvalidArgument(
                f"tensor {name!r} is not declared for {path}; declare it in the tensors of Writer"
            )
        info, position = self._tensors[name], self._positions[name]
        if part.dtype.newbyteorder("=") != info.dtype:
            raise InvalidArgument(
                f"tensor {name!r} of {path} is declared as {info.dtype}, but a part is {part.dtype}; convert the "
                "part, or declare its dtype"
            )
        fits = part.ndim == len(info.shape) and part.shape[1:] == info.shape[1:]
        if not fits or position + part.nbytes > info.stop:
            raise InvalidArgument(
                f"tensor {name!r} of {path} is declared with shape {info.shape} and has "
                f"{position - info.start} of {info.stop - info.start} bytes, so a part of shape {part.shape} does "
                "not fit; write each row once, in order"
            )
        flat = np.ascontiguousarray(part, info.dtype).reshape(-1).view(np.uint8)
        with mapped_errors("write", path):
            write_all(self._fd, [flat.data], position)
        self._positions[name] = position + part.nbytes

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is not None:
                self._open.__exit__(error_type, error, trace)
                return
            with self._open:
                self._check_complete()
        finally:
            self._fd = -1

    def _check_complete(self) -> None:
        incomplete = [
            f"{name}: {self._positions[name] - info.start} of {info.stop - info.start} bytes"
            for name, info in self._tensors.items()
            if self._positions[name] != info.stop
        ]
        if incomplete:
            raise Misuse(
                f"{self.path} was not written, because {len(incomplete)} of {len(self._tensors)} tensors are "
                f"incomplete; write them all before the `with` block ends:{bullet_list(incomplete)}"
            )


@contextlib.contextmanager
def _open_file(path: StrPath) -> Iterator[BinaryIO]:
    with mapped_errors("read", os.fspath(path)):
        kind = os.stat(path).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # opening a pipe may wait for ever
        raise InvalidArgument(
            f"{os.fspath(path)} is a pipe or a device, but tensors are read from a memory-mapped file; pass a "
            "regular file"
        )
    with mapped_errors("read", os.fspath(path)), open(path, "rb") as file:
        yield file


@contextlib.asynccontextmanager
async def _open_in_thread(writer: Writer) -> AsyncIterator[Writer]:
    """Enter and exit the writer in a thread, because both wait for the disk."""
    await run(writer.__enter__)
    try:
        yield writer
    except BaseException as error:
        await run(writer.__exit__, type(error), error, error.__traceback__)
        raise
    await run(writer.__exit__, None, None, None)


async def _slabs(array: Array, buffer: npt.NDArray[np.uint8]) -> AsyncIterator[npt.NDArray[Any]]:
    """Yield the array in runs of rows, mostly views of `buffer`; each is valid until the next is requested."""
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


def _runs(length: int, chunk: int, max_rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `max_rows` rows, in whole chunks if a chunk has at most that many."""
    size = max_rows // chunk * chunk or max_rows
    for start in range(0, length, size):
        yield start, min(start + size, length)


def _file_metadata(snapshot: Snapshot) -> dict[str, str] | None:
    """Return the metadata of the imported file; None if the attribute is absent or not a dict of strings."""
    stored = snapshot.attributes().get(_ATTRIBUTE)
    if isinstance(stored, dict) and all(isinstance(text, str) for text in stored.values()):
        return stored
    return None


def _paths_by_name(snapshot: Snapshot) -> tuple[dict[str, str], list[str]]:
    """Return the path of each array by its name in the file, and the names of the values that are not arrays."""
    document = stored_document(snapshot.reserved_attributes().get("structure"), snapshot.paths())
    if document is None:
        pairs = [(path.replace("/", "."), path) for path in snapshot.paths()]
        left_out = []
    else:
        with parsing(f"version {snapshot.version}: its structure"):
            leaves = list(_leaves(document, ()))
        pairs = [(name, path) for name, path in leaves if path is not None]
        left_out = [name for name, path in leaves if path is None]
    names: dict[str, str] = {}
    clashes = []
    for name, path in pairs:
        if name in names:
            clashes.append(f"{names[name]} and {path} would both be {name!r}")
        names.setdefault(name, path)
    if clashes:
        raise InvalidArgument(
            f"version {snapshot.version} can't be exported: joining keys by '.' gives several arrays the same "
            f"name; rename their keys and save again:{bullet_list(clashes)}"
        )
    return names, left_out


def _leaves(document: list[Any], keys: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each leaf of a structure document, in order, with its path, None if it is not an array."""
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
