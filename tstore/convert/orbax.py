"""Orbax checkpoints, read through tensorstore.

A folder has `_METADATA`, a JSON document with the keys that lead to each leaf. The document also says whether the
arrays are stored in one OCDBT database or each in a folder, and whether as Zarr v2 or v3. Strings are in
`_strings.json`, and the implementations of typed PRNG keys in `array_metadatas/process_*`. The folder of a step
has such a folder for each item of the checkpoint.

A chunk that is missing is an error, where tensorstore and Orbax would return zeros.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.checkpoint.jobs import StreamedArray
from tstore.convert.files import left_out_of, read_whole
from tstore.convert.nesting import Keys, nested
from tstore.core.format.arrays.array_metadata import dtype_named
from tstore.core.format.tree_document import IMPL
from tstore.core.storage.objects import mapped_errors
from tstore.errors import Corrupt, InvalidArgument, NotFound, Unavailable, UnsupportedFormat

__all__ = ["METADATA", "check_committed", "is_orbax", "left_out", "open_orbax"]

METADATA = "_METADATA"
"""The name of the metadata in the folder of an item."""

_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_OCDBT = "manifest.ocdbt"
_STRINGS = "_strings.json"
_ARRAY_METADATAS = "array_metadatas"
_UNNAMED = "default"  # the item of a step saved without item names
_UNCOMMITTED = ".orbax-checkpoint-tmp"  # in the names of folders that Orbax renames when they are complete
_ZARR_FILE = re.compile(r"zarr\.json|\.zarray|\.zattrs|(c[/.])?[0-9]+([/.][0-9]+)*|c")
_ABOUT = (_CHECKPOINT_METADATA, "commit_success.txt")
"""The files that say whether a step or an item is complete."""
_MAX_DOCUMENT = 1 << 28  # bytes
_EAGER = 1 << 20  # bytes; smaller arrays are read when they are opened
_MAX_OPENING = 256  # arrays opened concurrently
_SEQUENCE = 1  # the `key_type` of a position in a sequence

_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
"""The containers without leaves, by the names that Orbax gives them."""


class _Key(msgspec.Struct):
    key: str
    key_type: Literal[1, 2]  # of a sequence, or of a dict


class _Value(msgspec.Struct):
    value_type: str


class _Entry(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value


class _Document(msgspec.Struct):
    """The part of `_METADATA` that is read; parsing only this takes little memory."""

    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool = True
    use_zarr3: bool = False
    custom_metadata: dict[str, msgspec.Raw] | None = None


class _Extension(msgspec.Struct):
    random_key_impl: str | None = None


class _ArrayMetadata(msgspec.Struct):
    param_name: str
    ext_metadata: _Extension | None = None


class _ArrayEntry(msgspec.Struct):
    array_metadata: _ArrayMetadata


class _ArrayMetadatas(msgspec.Struct):
    """The part of a file of `array_metadatas` that is read."""

    array_metadatas: list[_ArrayEntry]


class _Step(msgspec.Struct):
    """The part of `_CHECKPOINT_METADATA` that is read."""

    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, msgspec.Raw] | None = None


_T = TypeVar("_T")


class _Leaf(NamedTuple):
    keys: Keys
    kind: str  # Orbax's name for its type: "jax.Array", "scalar", "string", "Dict", …

    @property
    def name(self) -> str:
        """The name under which the leaf is stored."""
        return ".".join(map(str, self.keys))

    @property
    def is_array(self) -> bool:
        """Whether it is stored as an array; the names of others may be those of anything."""
        return self.kind not in _EMPTY and self.kind != "string"


def is_orbax(folder: str) -> bool:
    """Return whether a folder is an Orbax checkpoint or an item of an Orbax checkpoint."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (METADATA, _CHECKPOINT_METADATA, _OCDBT))


def open_orbax(folder: str) -> Any:
    """Return the tree of an Orbax checkpoint; long arrays are read while they are saved.

    For the folder of a step, return a dict of the trees of its items by name; for a step saved without names, the
    tree. Raise `Corrupt`, `NotFound` (an array is missing), `Unavailable`, `UnsupportedFormat` (such as a
    checkpoint without `_METADATA`), or `InvalidArgument` (tensorstore is not installed).
    """
    if os.path.exists(os.path.join(folder, METADATA)):
        return _open_item(folder)
    items = {name: os.path.join(folder, name) for name, is_tree in _items(folder).items() if is_tree}
    if not items:
        raise UnsupportedFormat(
            f"{folder} is an Orbax checkpoint without {METADATA}, as old versions of Orbax wrote it; restore it "
            "with Orbax and save it with tstore.save"
        )
    if list(items) == [_UNNAMED]:
        return _open_item(items[_UNNAMED])
    return {name: _open_item(path) for name, path in items.items()}


def check_committed(folder: str) -> None:
    """Raise `InvalidArgument` for a checkpoint that Orbax has not completed."""
    folder = os.path.abspath(folder)
    with mapped_errors("read", folder):
        items = os.listdir(folder) if is_orbax(folder) else []
    names = [*folder.split(os.sep)[-2:], *items]  # a step and its items, or a step and its item
    unfinished = next((name for name in names if _UNCOMMITTED in name), None)
    path = os.path.join(folder, _CHECKPOINT_METADATA)
    if unfinished is None and os.path.exists(path):
        step = _parse(path, _Step)
        if step.init_timestamp_nsecs is not None and step.commit_timestamp_nsecs is None:
            unfinished = _CHECKPOINT_METADATA
    if unfinished is not None:
        raise InvalidArgument(
            f"{folder} is a checkpoint that Orbax has not committed, as {unfinished} tells: the save is under "
            "way, or it was interrupted; pass the folder of a step that is complete"
        )


def left_out(folder: str) -> list[str]:
    """Return the files of a checkpoint that `open_orbax` skips, such as the metrics of a step."""
    if os.path.exists(os.path.join(folder, METADATA)):
        trees, taken = [""], set(_taken(folder))
    else:
        trees = [f"{name}/" for name, is_tree in _items(folder).items() if is_tree]
        taken = {*_ABOUT, *(name + file for name in trees for file in _taken(os.path.join(folder, name)))}
    documents: list[tuple[str, type[_Step | _Document]]] = [(f"{name}{METADATA}", _Document) for name in trees]
    if os.path.exists(os.path.join(folder, _CHECKPOINT_METADATA)):
        documents.append((_CHECKPOINT_METADATA, _Step))
    custom = [name for name, kind in documents if _parse(os.path.join(folder, name), kind).custom_metadata]
    return [*left_out_of(folder, taken), *(f"{name}: custom_metadata" for name in custom)]


def _taken(folder: str) -> Iterable[str]:
    """Return the imported entries of an item's folder: files, and the folders of databases as a whole."""
    yield from (METADATA, _ARRAY_METADATAS, "_sharding", *_ABOUT)
    document = _parse(os.path.join(folder, METADATA), _Document)
    leaves = [_leaf(entry, folder) for entry in document.tree_metadata.values()]
    if any(leaf.kind == "string" for leaf in leaves):
        yield _STRINGS
    if _is_ocdbt(folder, document):
        yield from (_OCDBT, "d", *(name for name in os.listdir(folder) if name.startswith("ocdbt.process_")))
        return
    for array in (os.path.join(folder, leaf.name) for leaf in leaves if leaf.is_array):
        files = (
            os.path.relpath(os.path.join(above, f), array) for above, _, names in os.walk(array) for f in names
        )
        yield from (os.path.relpath(f"{array}/{file}", folder) for file in files if _ZARR_FILE.fullmatch(file))


def _is_ocdbt(folder: str, document: _Document) -> bool:
    return document.use_ocdbt and os.path.exists(os.path.join(folder, _OCDBT))


def _items(folder: str) -> dict[str, bool]:
    """Return the names of the items of a step, and whether each is a tree of arrays; none for a single item."""
    if os.path.exists(os.path.join(folder, METADATA)):
        return {}
    with mapped_errors("read", folder), os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    return {name: os.path.exists(os.path.join(folder, name, METADATA)) for name in names}


def _open_item(folder: str) -> Any:
    path = os.path.join(folder, METADATA)
    document = _parse(path, _Document)
    leaves = [_leaf(entry, path) for entry in document.tree_metadata.values()]
    arrays = [leaf for leaf in leaves if leaf.is_array]
    source = _Source(folder, _is_ocdbt(folder, document), "zarr3" if document.use_zarr3 else "zarr")
    values = dict(zip([leaf.name for leaf in arrays], source.open(arrays), strict=True))
    if len(values) != len(arrays):
        raise Corrupt(f"{path} gives two arrays one name; check the folder")
    strings: dict[str, str] = {}
    if any(leaf.kind == "string" for leaf in leaves):
        strings = _parse(os.path.join(folder, _STRINGS), dict[str, str])
    for name, impl in _key_impls(os.path.join(folder, _ARRAY_METADATAS)).items():
        if name in values:
            values[name] = {f"{IMPL}{impl}": values[name]}
    return nested(((leaf.keys, _value(leaf, values, strings, folder)) for leaf in leaves), folder)


def _key_impls(folder: str) -> dict[str, str]:
    """Return the implementations of typed PRNG keys by the names of their arrays; each process wrote a file."""
    if not os.path.isdir(folder):
        return {}
    with mapped_errors("read", folder):
        documents = [_parse(os.path.join(folder, name), _ArrayMetadatas) for name in sorted(os.listdir(folder))]
    entries = [entry.array_metadata for document in documents for entry in document.array_metadatas]
    impls = {entry.param_name: (entry.ext_metadata or _Extension()).random_key_impl for entry in entries}
    return {name: impl for name, impl in impls.items() if impl is not None}


def _value(leaf: _Leaf, arrays: Mapping[str, Any], strings: Mapping[str, str], folder: str) -> Any:
    if leaf.kind in _EMPTY:
        return _EMPTY[leaf.kind]
    if leaf.kind != "string":
        return arrays[leaf.name]
    text = strings.get(leaf.name)
    if text is None:
        raise Corrupt(f"{os.path.join(folder, _STRINGS)} has no text {leaf.name!r}; copy the folder again")
    return text


def _number(values: npt.NDArray[Any]) -> Any:
    """Return the Python number that Orbax stored as this array, or a NumPy scalar if none has its dtype."""
    number = values.item()
    return number if np.asarray(number).dtype == values.dtype else values[()]


def _parse(path: str, document_type: type[_T]) -> _T:
    data = read_whole(path, _MAX_DOCUMENT)
    try:
        return msgspec.json.decode(data, type=document_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(
            f"{path} does not have the format that Orbax writes ({error!s:.200}); copy the folder again"
        ) from error


def _leaf(entry: _Entry, path: str) -> _Leaf:
    """Return the leaf that an entry of the tree's metadata describes."""
    try:
        keys = tuple(int(k.key) if k.key_type == _SEQUENCE else k.key for k in entry.key_metadata)
    except ValueError as error:
        raise Corrupt(
            f"{path} does not have the format that Orbax writes ({error!s:.200}); check the folder"
        ) from error
    return _Leaf(keys, entry.value_metadata.value_type)


class _Source:
    """The arrays of an item's folder, opened with tensorstore."""

    def __init__(self, folder: str, ocdbt: bool, driver: str) -> None:
        try:
            import tensorstore
        except ImportError as error:
            raise InvalidArgument(
                f"{folder} is an Orbax checkpoint, which is read with tensorstore; run pip install tensorstore"
            ) from error
        self._tensorstore = tensorstore
        self._folder, self._ocdbt, self._driver = os.path.abspath(folder), ocdbt, driver
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})

    def open(self, leaves: list[_Leaf]) -> Iterator[Any]:
        """Yield the arrays of these leaves: numbers, arrays of NumPy, and longer ones as `StreamedArray`."""
        for start in range(0, len(leaves), _MAX_OPENING):
            batch = leaves[start : start + _MAX_OPENING]
            futures = [self._open(leaf) for leaf in batch]
            stored = [self._result(leaf, future) for leaf, future in zip(batch, futures, strict=True)]
            dtypes = [self._checked_dtype(leaf, array) for leaf, array in zip(batch, stored, strict=True)]
            reads = [
                array.read() if math.prod(array.shape) * dtype.itemsize <= _EAGER else None
                for array, dtype in zip(stored, dtypes, strict=True)
            ]
            for leaf, array, dtype, read in zip(batch, stored, dtypes, reads, strict=True):
                if read is None:
                    yield self._streamed(leaf, array, dtype)
                    continue
                values: npt.NDArray[Any] = np.asarray(self._result(leaf, read), dtype)
                yield _number(values) if leaf.kind == "scalar" else values

    def _open(self, leaf: _Leaf) -> Any:
        if self._ocdbt:
            store: dict[str, Any] = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self._folder}/"}}
            store["path"] = f"{leaf.name}/"
        else:
            if "/" in leaf.name or leaf.name in ("", ".", "..") or "\0" in leaf.name:
                raise Corrupt(
                    f"{self._folder}: the array {leaf.name!r:.200} is not in the folder; check the folder"
                )
            if not os.path.isdir(os.path.join(self._folder, leaf.name)):
                raise NotFound(f"{self._folder} has no array {leaf.name!r}; copy the folder again")
            store = {"driver": "file", "path": f"{self._folder}/{leaf.name}/"}
        spec = {"driver": self._driver, "kvstore": store, "fill_missing_data_reads": False}
        return self._tensorstore.open(spec, open=True, read=True, context=self._context)

    def _streamed(self, leaf: _Leaf, array: Any, dtype: np.dtype[Any]) -> StreamedArray:
        def read(region: tuple[slice, ...]) -> npt.NDArray[Any]:
            return np.asarray(self._result(leaf, array[region].read()), dtype)

        return StreamedArray(array.shape, dtype, read, array.chunk_layout.read_chunk.shape)

    def _checked_dtype(self, leaf: _Leaf, array: Any) -> np.dtype[Any]:
        """Return the dtype of an array; raise if tstore lacks the dtype, or the chunks are impossible or huge.

        Huge chunks are refused, because tensorstore ends the process if there is no memory for a chunk.
        """
        try:
            dtype = dtype_named(array.dtype.numpy_dtype).newbyteorder("=")
        except (InvalidArgument, AttributeError, TypeError) as error:
            raise UnsupportedFormat(f"{self._folder}: {leaf.name!r}: {error}") from error
        chunk_shape = array.chunk_layout.read_chunk.shape or ()
        if any(c > max(1, n) for c, n in zip(chunk_shape, array.shape, strict=True)):
            raise Corrupt(f"{self._folder}: {leaf.name!r} has shape {array.shape}, but chunks of {chunk_shape}")
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if math.prod(chunk_shape) * dtype.itemsize > memory // 2:
            raise UnsupportedFormat(
                f"{self._folder}: {leaf.name!r} has chunks of shape {chunk_shape}, which take more than half of "
                "the memory; import it on another machine"
            )
        return dtype

    def _result(self, leaf: _Leaf, future: Any) -> Any:
        """Return the result of a tensorstore future; the kind of its exceptions is only in their text."""
        try:
            return future.result()
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            kind, _, reason = str(error).partition(":")
            text = f"{self._folder}: {leaf.name!r} can't be read ({kind}:{reason[:300]})"
            if kind in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"):
                raise Unavailable(f"{text}; try again") from error
            raise Corrupt(f"{text}; copy the folder again") from error
