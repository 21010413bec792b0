"""Checkpoints of torch.distributed.checkpoint (DCP), read without torch.

A folder has a pickle `.metadata`, read as data (see `pickled`), and files such as `__0_0.distcp`. For each tensor,
the metadata has the shape and dtype, the keys that lead to the tensor in the nested state dict, and the regions in
which it was saved, each with its location: the file, the position and the length. The bytes there are an archive
of `torch.save` (see `torch_archive`). Other values, such as an optimizer's learning rate, are archives too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.convert.file_parts import FilePart, joined
from tstore.convert.files import map_file, read_whole, within
from tstore.convert.nesting import Keys, nested
from tstore.convert.pickled import Instance, Name, Unreadable, Visits, parse_pickle
from tstore.convert.torch_archive import read_archive
from tstore.core.data.casting import TORCH_DTYPES
from tstore.core.storage.objects import mapped_errors
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

__all__ = ["METADATA", "open_dcp"]

METADATA = ".metadata"
"""The name of the metadata in a folder."""

_MAX_METADATA = 1 << 28  # bytes
_MAX_UNCHECKED = 1 << 20  # bytes; longer metadata is compared with the size of the files before it is parsed
_MAX_NDIM = 64  # the limit of NumPy

_CLASSES = "torch.distributed.checkpoint.metadata"
_OLD_CLASSES = "torch.distributed._shard.sharded_tensor.metadata"  # written by PyTorch 2.0 to 2.2
_ENUMS = {(_OLD_CLASSES, "MEM_FORMAT_ENCODING"), (_CLASSES, "_MEM_FORMAT_ENCODING")}
_ALLOWED = {
    *_ENUMS,
    *((module, "getattr") for module in ("builtins", "__builtin__")),  # of members of these enums
    (_OLD_CLASSES, "TensorProperties"),
    *((_CLASSES, n) for n in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_CLASSES, n) for n in ("BytesStorageMetadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name in TORCH_DTYPES),
    *(("pathlib", n) for n in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(("pathlib._local", n) for n in ("PosixPath", "WindowsPath")),
    ("collections", "OrderedDict"),
}


class _Location(NamedTuple):
    """The bytes of a value in a file. `offset` is where a region begins in its tensor; None for another value."""

    name: str
    offset: tuple[int, ...] | None
    file: str
    start: int
    length: int


def open_dcp(folder: str) -> tuple[Any, set[str]]:
    """Return the state dict of a DCP folder, with tensors as views of memory maps, and the names of its files.

    Values other than tensors, plain containers and numbers become `Unreadable`. Raise `Corrupt`,
    `UnsupportedFormat` and `NotFound`. The values of tensors are not read yet; all other values are.
    """
    subject = os.path.join(folder, METADATA)
    data = read_whole(subject, _MAX_METADATA)
    _check_length(folder, data)
    metadata = parse_pickle(data, _ALLOWED, subject, Visits(subject), enums=_ENUMS)
    fields = _fields(metadata, "Metadata", subject)
    del data, metadata
    try:
        items, keys = _dict(fields["state_dict_metadata"]), _dict(fields.get("planner_data") or {})
        locations = list(_locations(fields["storage_data"]))
        _check_distinct(locations, subject)
        by_name: dict[str, list[_Location]] = {name: [] for name in items}
        for location in locations:
            by_name[location.name].append(location)
        files = _Files(folder)
        leaves = []
        for name, item in items.items():
            try:
                value = _value(name, item, by_name[name], files)
            except UnsupportedFormat as error:  # the import reports it with all others, or skips it by name
                value = Unreadable(str(error))
            leaves.append((_checked_keys(keys.get(name, (name,))), value))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise Corrupt(
            f"{subject} does not have the format that PyTorch writes ({error!r:.200}); check the folder"
        ) from error
    return nested(leaves, folder), {METADATA, *(location.file for location in locations)}


def _check_length(folder: str, metadata: bytes) -> None:
    """Raise `Corrupt` if metadata is too long for its files, because parsing it takes many times its size.

    A value has about 150 bytes of metadata, and an archive of a thousand bytes or more.
    """
    if len(metadata) <= _MAX_UNCHECKED:
        return
    with mapped_errors("read", folder):
        paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
        sizes = [os.stat(path) for path in paths if os.path.exists(path)]
        total = sum(min(size.st_size, 512 * size.st_blocks) for size in sizes)  # without sparse holes
    if total < 2 * len(metadata):  # the total includes the metadata
        raise Corrupt(
            f"{folder}: {METADATA} has {len(metadata)} bytes, but the files of the values only "
            f"{max(0, total - len(metadata))} on the disk; copy the folder again"
        )


class _Files:
    """The memory maps of the files of a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._maps: dict[str, npt.NDArray[np.uint8]] = {}
        self._visits, self._chunks = (Visits(os.path.join(folder, METADATA)) for _ in range(2))

    def value(self, location: _Location, subject: str) -> Any:
        """Return the value at a location."""
        return read_archive(self._bytes(location), subject, self._visits)

    def count_chunk(self) -> None:
        """Count a chunk in the metadata; many tensors may share one long list."""
        self._chunks.add()

    def _bytes(self, location: _Location) -> npt.NDArray[np.uint8]:
        """Return the bytes at a location as a view."""
        if location.file not in self._maps:
            self._maps[location.file] = map_file(within(self._folder, location.file, METADATA))
        data = self._maps[location.file]
        if location.start < 0 or location.length < 0 or location.start + location.length > len(data):
            raise Corrupt(
                f"{self._folder}: {location.name!r:.200} lies at bytes {location.start} to "
                f"{location.start + location.length} of {location.file}, which has {len(data)}; copy the folder "
                "again"
            )
        return data[location.start : location.start + location.length]


def _value(name: str, item: Instance, locations: list[_Location], files: _Files) -> Any:
    """Return a tensor or another value of the state dict."""
    subject = f"{name!r:.200}"
    if item.function.name == "BytesStorageMetadata":
        if len(locations) != 1:
            raise Corrupt(f"{subject} is stored {len(locations)} times; expected once; check the folder")
        return files.value(locations[0], subject)
    fields = _fields(item, "TensorStorageMetadata", subject)
    properties = _state(fields["properties"], "TensorProperties")
    dtype_name = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype_name, Name):
        raise Corrupt(f"{subject} has an invalid dtype")
    dtype, shape = TORCH_DTYPES[dtype_name.name], _size(fields["size"])
    # by text, whose hashes have a secret: a folder could choose tuples of numbers that collide
    chunk_sizes = {
        str(_size(chunk["offsets"])): _size(chunk["sizes"]) for chunk in _chunks(fields["chunks"], files)
    }
    pieces: dict[str, FilePart] = {}
    for location in locations:
        offset = (0,) * len(shape) if location.offset is None else location.offset
        values = files.value(location, subject)
        if (
            not isinstance(values, np.ndarray)
            or values.dtype != dtype
            or values.shape != chunk_sizes.get(str(offset))
        ):
            raise Corrupt(
                f"{subject} has in {location.file} {getattr(values, 'dtype', type(values).__name__)} values of "
                f"shape {getattr(values, 'shape', '')}; its metadata expects {dtype} values of shape "
                f"{chunk_sizes.get(str(offset))}"
            )
        pieces[str(offset)] = FilePart(offset, values)
    return joined(subject, shape, dtype, list(pieces.values()))


def _locations(storage: Any) -> Iterator[_Location]:
    for index, info in _dict(storage).items():
        key, location = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        offset = None if key.get("offset") is None else _size(key["offset"])
        name, file, start, length = key["fqn"], location["relative_path"], location["offset"], location["length"]
        if (
            not isinstance(name, str)
            or not isinstance(file, str)
            or type(start) is not int
            or type(length) is not int
        ):
            raise ValueError("an invalid location")
        if location.get("transform_descriptors"):
            raise UnsupportedFormat(f"{name!r:.200} was written with extensions, which tstore does not read")
        yield _Location(name, offset, file, start, length)


def _check_distinct(locations: list[_Location], subject: str) -> None:
    """Raise `Corrupt` if two values lie at the same bytes: many such values could make a store of any size."""
    nonempty = [location for location in locations if location.length > 0]
    nonempty.sort(key=lambda location: (location.file, location.start))
    for one, other in pairwise(nonempty):
        if one.file == other.file and one.start + one.length > other.start:
            names = f"{one.name!r:.200} and {other.name!r:.200}"
            raise Corrupt(f"{subject}: {names} lie at the same bytes of {one.file!r:.200}; check the folder")


def _chunks(chunks: Any, files: _Files) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        files.count_chunk()
        yield _state(chunk, "ChunkStorageMetadata")


def _state(value: Any, name: str) -> Any:
    """Return the state of an object of the class `name`; raise `ValueError` for another value."""
    if not isinstance(value, Instance) or value.function.name != name:
        raise ValueError(f"a value that is not a {name}")
    return value.state


def _fields(value: Any, name: str, subject: str) -> dict[str, Any]:
    """Return the fields of an object of the class `name`; raise `Corrupt` if it is another value."""
    state = _state(value, name) if isinstance(value, Instance) and value.function.name == name else None
    if not isinstance(state, dict):
        raise Corrupt(f"{subject} is not a {name} of torch.distributed.checkpoint; check where it is from")
    return state


def _dict(value: Any) -> dict[Any, Any]:
    """Return a dict of the pickle; raise `ValueError` for another container, whose items may not be hashable."""
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} in place of a dict")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    numbers = value.arguments[0] if isinstance(value, Instance) else value
    if not isinstance(numbers, (tuple, list)) or len(numbers) > _MAX_NDIM:
        raise ValueError("an invalid size")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("an invalid size")
    return tuple(numbers)


def _checked_keys(keys: Any) -> Keys:
    if not isinstance(keys, tuple) or not all(
        type(key) is str or (type(key) is int and 0 <= key < 1 << 62) for key in keys
    ):
        raise ValueError("invalid keys of a value")
    return keys
