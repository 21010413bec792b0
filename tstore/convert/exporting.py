"""Export checkpoints to one safetensors file, or to a folder for Hugging Face libraries.

Tensors are streamed. For safetensors, memory is bounded by one slab of 32 MiB, or one row of a tensor if that is
larger, and the chunks being decoded; for a folder of DCP (`dcp_export`) or Orbax (`orbax_export`), or a layout of
low bits (`layouts`), by the largest tensor. By default quantized arrays are decoded to their original dtype. A
file or folder appears whole and durable, or not at all, and nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tstore.convert.files import StrPath, exported_file, refuse_existing
from tstore.convert.layouts import Layout, checked_layout
from tstore.convert.low_bits import ExportedArray, LowBits
from tstore.convert.names import file_metadata, paths_by_name
from tstore.convert.safetensors import Writer
from tstore.convert.safetensors_header import Spec, bits_of, sort_tensors
from tstore.core.array import Array
from tstore.core.data.reader import new_values
from tstore.core.format.arguments import checked_index, quote
from tstore.core.format.paths import parents
from tstore.core.format.patterns import compile_patterns
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot, without_nodes
from tstore.core.steps import check_one_version, chosen_snapshot
from tstore.core.storage.local.atomic_file import new_folder, write_all
from tstore.core.storage.objects import mapped_errors
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, SnapshotExpired

__all__ = [
    "FILES",
    "MAX_SHARD_SIZE",
    "ExportReport",
    "ExportedArray",
    "FileFormat",
    "ProgressCallback",
    "export_huggingface",
    "export_safetensors",
    "format_of",
    "in_thread",
    "snapshot_to_export",
]

MAX_SHARD_SIZE = 5_000_000_000
"""The default limit on the bytes of tensors in one file of a folder, as in Hugging Face libraries."""

FILES = "files"
"""The group beside a model with the files of its configuration and tokenizer, as one-dimensional uint8 arrays."""

_SLAB = 32 << 20  # bytes

FileFormat: TypeAlias = Literal["safetensors", "huggingface", "gguf", "dcp", "orbax", "zarr", "references"]

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""A function called with the number of bytes written so far and the total."""

_SUFFIX = re.compile(r"\.[a-z][a-z0-9]*")  # does not match the end of llama-3.1 or gpt-0.5b
_OTHER_SUFFIXES = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch.save, whose files are pickles"),
    **dict.fromkeys((".npz", ".npy"), "NumPy, which has no bfloat16"),
    ".zip": "zip archives",
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "HDF5"),
    **dict.fromkeys((".pkl", ".pickle", ".msgpack", ".onnx", ".distcp"), "another format"),
}


class ExportReport(NamedTuple):
    """The result of an export.

    `left_out` names what was skipped, and what the files can't hold: values that are not arrays, and attributes.
    `quantized` describes, for safetensors and GGUF files, how each quantized array was written. `unlisted` names
    the arrays that are in a Zarr folder or reference file, but not among the members of their groups, because
    zarr-python lacks their dtype. `has_configuration` says whether a Hugging Face folder has the model's
    configuration.
    """

    version: int
    tensors: int
    bytes: int
    files: int
    left_out: list[str]
    quantized: list[ExportedArray] = []  # noqa: RUF012 - the report of an export does not change
    unlisted: list[str] = []  # noqa: RUF012
    has_configuration: bool | None = None


class _Source(NamedTuple):
    """The checkpoint to export: its arrays by name, the metadata for the files, and what they leave out.

    `low_bits` are the arrays that keep their low bits.
    """

    version: int
    arrays: dict[str, Array]
    metadata: dict[str, str] | None
    left_out: list[str]
    low_bits: LowBits

    @property
    def bytes(self) -> int:
        return sum(_size(*spec) for spec in self.specs().values())

    def specs(self) -> dict[str, Spec]:
        """Return the dtypes and shapes of the tensors, in the order of the checkpoint."""
        return {tensor: spec for name in self.arrays for tensor, spec in self.specs_of(name).items()}

    def specs_of(self, name: str) -> dict[str, Spec]:
        """Return the dtypes and shapes of the tensors of an array."""
        return self.low_bits.specs(name) or {name: (self.arrays[name].dtype, self.arrays[name].shape)}

    def report(self, files: int) -> ExportReport:
        tensors, quantized = len(self.arrays), self.low_bits.report
        return ExportReport(self.version, tensors, self.bytes, files, self.left_out, quantized)


def format_of(out: StrPath) -> FileFormat:
    """Return the format for the name of an export: its suffix without the dot, or `huggingface` for a folder.

    A name without a suffix is that of a folder, as is one that ends in a slash, or in a version such as `-3.1`.
    Raise `InvalidArgument` for the suffix of a format that tstore does not write.
    """
    name = os.path.basename(os.fspath(out).rstrip("/")).lower()
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(".zarr"):
        return "zarr"
    if name.endswith(".gguf"):
        return "gguf"
    suffix = os.path.splitext(name)[1]
    if suffix in (".json", ".parq", ".parquet"):
        raise InvalidArgument(
            f"{os.fspath(out)}: {suffix} is the suffix of a reference file; pass --references to write one, or a "
            "name that ends in .safetensors, or a folder"
        )
    if suffix in _OTHER_SUFFIXES:
        raise InvalidArgument(
            f"{os.fspath(out)}: tstore does not write {suffix}, the suffix of {_OTHER_SUFFIXES[suffix]}; export "
            "to a name that ends in .safetensors, or to a folder"
        )
    if _SUFFIX.fullmatch(suffix) and not os.fspath(out).endswith("/"):
        raise InvalidArgument(
            f"{os.fspath(out)}: {suffix} is not the suffix of a format that tstore writes: .safetensors, .gguf "
            "or .zarr; for a folder of that name, end it with a slash"
        )
    return "huggingface"


async def snapshot_to_export(
    store: Store, at: int | str | None, step: int | None, skip: Sequence[str]
) -> tuple[Snapshot, list[str]]:
    """Return the snapshot to export without the arrays at or below paths that match `skip`, and their paths.

    Raise `InvalidArgument` if it is empty, if a glob matches no array, or for both `at` and `step`.
    """
    check_one_version(step, at)
    snapshot = await chosen_snapshot(store, step, at)
    await snapshot.read_nodes()
    if snapshot.version == 0:
        raise InvalidArgument(f"{snapshot.location} is empty; pass another version or tag as at=…")
    paths = snapshot.paths()
    skipped: set[str] = set()
    unused = []
    for glob in skip:
        matches = compile_patterns(glob)
        matching = [path for path in paths if any(map(matches, (path, *parents(path))))]
        skipped.update(matching)
        unused += [] if matching else [quote(glob)]
    if unused:
        raise InvalidArgument(
            f"{snapshot.location} has no array at {', '.join(unused)}, which skip names; pass the path of an "
            "array, or a glob such as 'optimizer/**'"
        )
    return without_nodes(snapshot, skipped), sorted(skipped)


async def export_safetensors(
    store: StrPath | Store,
    out: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    strip: str = "",
    skip: Sequence[str] = (),
    layout: Layout = "decoded",
    requantize: Literal["fp8"] | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write the version or tag `at`, or a step (by default the newest), to the new file `out`; return a summary.

    With `subtree`, only the arrays at or below this path are written, by their names below it; names lose the
    prefix `strip`, and those without it stay. So `subtree="model"` makes a model of a training step, and
    `strip="module."` undoes a wrapper. Arrays at or below paths that match `skip` are left out. An imported file
    is exported again byte for byte if the safetensors package wrote it. With `layout="fp8"`, quantized arrays
    whose values FP8 has are written as F8_E4M3 or F8_E5M2 with float32 scales at `NAME_scale`; with
    `requantize="fp8"`, the values of all others are rounded to F8_E4M3. Raise `AlreadyExists` (`out` exists; it is
    unchanged), `NotAStore`, `NotFound`, `Corrupt`, `InvalidArgument` (two arrays with the same name, or a dtype
    that safetensors lacks), `StorageFull`.
    """
    checked_layout(layout, requantize)
    if layout == "compressed-tensors":
        raise InvalidArgument(
            f"{os.fspath(out)}: compressed-tensors needs a config.json beside the file; export a folder with "
            "export_huggingface, or to a name without .safetensors"
        )
    async with opened(store, "r") as opened_store:
        source = await _source(
            *await snapshot_to_export(opened_store, at, step, skip), subtree, strip, layout, requantize
        )
        # the tensors of an imported file keep their order
        specs = source.specs() if source.metadata is not None else sort_tensors(source.specs())
        counter = _Progress(source.bytes, progress)
        await _write(os.fspath(out), specs, source.metadata or {}, source, counter)
    return source.report(1)


async def export_huggingface(
    store: StrPath | Store,
    folder: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    strip: str = "",
    skip: Sequence[str] = (),
    max_shard_size: int = MAX_SHARD_SIZE,
    layout: Layout = "decoded",
    requantize: Literal["fp8"] | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write a checkpoint to a new folder of safetensors files, as Hugging Face libraries do; return a summary.

    The files are named `model.safetensors`, or, if the tensors have more than `max_shard_size` bytes,
    `model-00001-of-00002.safetensors` and so on with the index `model.safetensors.index.json`, which is written
    last. A tensor is never split. The other arguments are as in `export_safetensors`. If `subtree` has a sibling
    group `files` with a configuration, as in the steps of a `TStoreCallback`, its files are written too, for a
    quantized copy of `subtree` those of its source, and `from_pretrained` reads the folder. With an
    adapter_config.json, the file is `adapter_model.safetensors`.
    `layout="compressed-tensors"` writes the matrices NAME.weight that are quantized in the layout of that package
    (`layouts`), with its quantization_config in config.json: unless the model's own is among the files, merge it
    into that. Raise the errors of `export_safetensors`.
    """
    checked_layout(layout, requantize)
    limit, path = checked_index("max_shard_size", max_shard_size), os.fspath(folder)
    async with opened(store, "r") as opened_store:
        snapshot, skipped = await snapshot_to_export(opened_store, at, step, skip)
        source = await _source(snapshot, skipped, subtree, strip, layout, requantize)
        files = await _model_files(snapshot, subtree)
        origin = (await opened_store.log.reader.record(snapshot.version)).source
        if origin and not files and not skip:  # a copy of the model alone
            with contextlib.suppress(SnapshotExpired):
                files = await _model_files(await opened_store.snapshot(origin), subtree)
        has_configuration = bool(files)
        stem = "adapter_model" if "adapter_config.json" in files else "model"
        metadata = {"format": "pt"} if source.metadata is None else source.metadata
        shards = _shards(source.specs(), limit)
        counter = _Progress(source.bytes, progress)
        refuse_existing(path)
        async with in_thread(new_folder(path), path) as temporary:
            names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
            if len(shards) == 1:
                names = [f"{stem}.safetensors"]
            for name, specs in zip(names, shards, strict=True):
                await _write(f"{temporary}/{name}", sort_tensors(specs), metadata, source, counter)
            if layout == "compressed-tensors":
                config = json.loads(files.get("config.json", b"{}"))
                config["quantization_config"] = source.low_bits.config()
                files["config.json"] = _json(config)
            for name, data in files.items():
                await run(_write_file, f"{temporary}/{name}", data)
            if len(shards) > 1:
                index = {tensor: name for name, specs in zip(names, shards, strict=True) for tensor in specs}
                document = {"metadata": {"total_size": source.bytes}, "weight_map": index}
                await run(_write_file, f"{temporary}/{stem}.safetensors.index.json", _json(document))
    return source.report(len(shards))._replace(has_configuration=has_configuration)


def _shards(specs: Mapping[str, Spec], limit: int) -> list[dict[str, Spec]]:
    """Split tensors, in order, into files of at most `limit` bytes; a longer tensor gets its own file."""
    shards: list[dict[str, Spec]] = [{}]
    size = 0
    for name, (dtype, shape) in specs.items():
        nbytes = _size(dtype, shape)
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += nbytes
    return shards


def _size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor in a file."""
    return math.prod(shape) * bits_of(dtype) // 8


async def _model_files(snapshot: Snapshot, subtree: str) -> dict[str, bytes]:
    """Return the files of the configuration and tokenizer of the model at a path, if they are saved beside it."""
    parent = subtree.strip("/").rpartition("/")[0]
    group = f"{parent}/{FILES}" if parent else FILES
    paths = {path.removeprefix(f"{group}/"): path for path in snapshot.paths() if path.startswith(f"{group}/")}
    if not subtree or paths.keys().isdisjoint(("config.json", "adapter_config.json")):
        return {}
    arrays = {name: await snapshot.array(path) for name, path in paths.items()}
    return {name: (await a.read()).tobytes() for name, a in arrays.items() if a.dtype == np.uint8 and a.ndim == 1}


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _write_file(path: str, data: bytes) -> None:
    with mapped_errors("write", path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with exported_file(path) as fd:
            write_all(fd, [data], 0)


async def _source(
    snapshot: Snapshot, skipped: list[str], subtree: str, strip: str, layout: Layout, requantize: str | None
) -> _Source:
    paths, left_out = paths_by_name(snapshot, subtree, strip)
    arrays = {name: await snapshot.array(path) for name, path in paths.items()}
    low_bits = await LowBits.plan(snapshot, arrays, layout, requantize=requantize is not None)
    return _Source(snapshot.version, arrays, file_metadata(snapshot), left_out + skipped, low_bits)


class _Progress:
    """Counts the bytes written, and calls the callback with the count and the total."""

    def __init__(self, total: int, callback: ProgressCallback | None) -> None:
        self._done, self._total, self._callback = 0, total, callback

    def add(self, size: int) -> None:
        self._done += size
        if self._callback is not None:
            self._callback(self._done, self._total)


async def _write(
    path: str,
    specs: Mapping[str, Spec],
    metadata: Mapping[str, str],
    source: _Source,
    progress: _Progress,
) -> None:
    """Write these tensors to a new file."""
    arrays = source.arrays
    whole = {name: array.nbytes for name, array in arrays.items() if name in specs}
    buffer = np.empty(min(_SLAB, max(whole.values(), default=0)), np.uint8)
    async with in_thread(Writer(path, specs, metadata), path) as file:
        for name in arrays:
            if source.low_bits.specs(name):
                if not specs.keys().isdisjoint(source.specs_of(name)):
                    for tensor, values in (await source.low_bits.tensors(name)).items():
                        if tensor in specs:
                            await run(file.write, tensor, values)
                            progress.add(values.nbytes)
            elif name in specs:
                async for slab in _slabs(arrays[name], buffer):
                    await run(file.write, name, slab)
                    progress.add(_size(slab.dtype, slab.shape))


@contextlib.asynccontextmanager
async def in_thread(manager: contextlib.AbstractContextManager[Any], path: str) -> AsyncIterator[Any]:
    """Enter and exit a context manager in a thread, because both steps wait for the disk."""

    def enter() -> Any:
        with mapped_errors("write", path):
            return manager.__enter__()

    def leave(error: BaseException | None) -> None:
        with mapped_errors("write", path):
            manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    entered = await run(enter)
    try:
        yield entered
    except BaseException as error:
        await run(leave, error)
        raise
    await run(leave, None)


async def _slabs(array: Array, buffer: npt.NDArray[np.uint8]) -> AsyncIterator[npt.NDArray[Any]]:
    """Yield the array in runs of rows, mostly views of `buffer`; each is valid until the next is requested."""
    if array.ndim == 0 or array.nbytes <= buffer.nbytes:
        out = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        yield await array.read(out)
        return
    row_size = array.nbytes // array.shape[0]
    for start, stop in _row_ranges(array.shape[0], array.chunks[0], max(1, _SLAB // row_size)):
        shape = (stop - start, *array.shape[1:])
        size = math.prod(shape) * array.dtype.itemsize
        fits = size <= buffer.nbytes
        out = (
            buffer[:size].view(array.dtype).reshape(shape) if fits else new_values(array.path, shape, array.dtype)
        )
        yield await array[start:stop].read(out)


def _row_ranges(length: int, chunk: int, max_rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `max_rows` rows, in whole chunks if a chunk has at most that many."""
    size = max_rows // chunk * chunk or max_rows
    for start in range(0, length, size):
        yield start, min(start + size, length)
