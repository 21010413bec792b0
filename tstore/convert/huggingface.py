"""Models in several safetensors files, as Hugging Face libraries write them: a folder, its index, or the files.

The index, `model.safetensors.index.json`, lists the file of each tensor. The files are read as one flat dict, in
the order of the index, of their names, or of the arguments. Files that torch.distributed.checkpoint wrote for
Hugging Face have pieces of tensors, and their metadata says where each piece begins; the pieces are joined.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.checkpoint.jobs import StreamedArray
from tstore.convert.file_parts import FilePart, joined
from tstore.convert.files import read_whole, within
from tstore.convert.safetensors import open_tensors
from tstore.errors import Corrupt, InvalidArgument, NotFound, bullet_list

__all__ = ["INDEX_SUFFIX", "TORCH_INDEX_SUFFIX", "open_files", "open_folder", "open_index"]

INDEX_SUFFIX = ".safetensors.index.json"
TORCH_INDEX_SUFFIX = ".bin.index.json"  # an index of torch.save files

_MAX_INDEX = 1 << 26  # bytes; the longest known have about 20 MB
_COUNTS = ("total_size", "total_parameters")  # what transformers and PyTorch write as the metadata of an index
_PIECES = "DCP_SHARDING_INFO"  # the key of a file's metadata with the offsets of its pieces, as JSON

_NUMBERED = re.compile(r"(?!shard-\d)(.*-)\d+-of-(\d+)\.safetensors")
"""A file of several, unless one of several processes wrote it: `shard-00000-model-00001-of-00002.safetensors`."""

Tensors = dict[str, npt.NDArray[Any] | StreamedArray]


class _Index(msgspec.Struct):
    """The part of an index that is read. Parsing no more than this keeps memory small for any file."""

    weight_map: msgspec.Raw
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class _Offsets(msgspec.Struct):
    """The offset of a piece in the whole tensor."""

    saved_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class _File(NamedTuple):
    """The tensors of one file, and where each begins if the file has pieces of tensors."""

    name: str
    tensors: dict[str, npt.NDArray[Any]]
    offsets: dict[str, tuple[int, ...]] | None


def open_folder(folder: str) -> tuple[Tensors, dict[str, str], list[str], set[str]]:
    """Return the tensors that a folder's index lists, or, without an index, those of all its safetensors files.

    The tensors are views of memory maps. Also return the metadata that the files agree on, and the names of the
    files that were read. Raise the errors of `open_files` and `open_index`, `NotFound` if the names of the files
    tell of more files, and `InvalidArgument` for several indices, none of which has the usual name.
    """
    names = sorted(os.listdir(folder))
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indices) > 1 and f"model{INDEX_SUFFIX}" not in indices:
        raise InvalidArgument(f"{folder} has {len(indices)} indices; pass one of them:{bullet_list(indices)}")
    if indices:
        name = f"model{INDEX_SUFFIX}" if len(indices) > 1 else indices[0]
        path = os.path.join(folder, name)
        return *open_index(path), {name, *_index(path)[0].values()}
    _check_numbered(folder, names)
    files = [name for name in names if name.endswith(".safetensors")]
    return *open_files([os.path.join(folder, name) for name in files]), set(files)


def _check_numbered(folder: str, names: Iterable[str]) -> None:
    """Raise `NotFound` if the files that are numbered as parts of one model are fewer than their names say."""
    present = Counter((match[1], match[2]) for name in names if (match := _NUMBERED.fullmatch(name)) is not None)
    for (begin, count), number in present.items():
        if number < int(count):
            raise NotFound(
                f"{folder} has {number} of the {int(count)} files {begin[:200]}…-of-{count}.safetensors, and no "
                "index; copy the others to it, or pass the files themselves to import only these"
            )


def open_index(
    path: str, open_one: Callable[[str], tuple[dict[str, Any], dict[str, str]]] = open_tensors
) -> tuple[Tensors, dict[str, str], list[str]]:
    """Return the tensors that an index lists, the metadata of its files, and the keys of other metadata.

    `open_one` returns the tensors and the metadata of a file; by default it reads safetensors. Raise `Corrupt` if
    the index names a file outside of its folder or a tensor that its file lacks, or if it leaves out a tensor of a
    file; raise `NotFound` for a missing file.
    """
    weight_map, unused = _index(path)
    files = list(dict.fromkeys(weight_map.values()))
    paths = [within(os.path.dirname(path) or ".", name, os.path.basename(path)) for name in files]
    absent = [name[:200] for name, file in zip(files, paths, strict=True) if not os.path.exists(file)]
    if absent:
        raise NotFound(
            f"{path} lists {len(files)} files, but {len(absent)} are missing; copy them to its folder:"
            f"{bullet_list(absent)}"
        )
    opened = [open_one(file) for file in paths]
    file_of = {tensor: name for name, (tensors, _) in zip(files, opened, strict=True) for tensor in tensors}
    faults = [
        f"{tensor[:200]}: in {file[:200]}" for tensor, file in weight_map.items() if file_of.get(tensor) != file
    ]
    faults += [f"{tensor[:200]}: only in {file}" for tensor, file in file_of.items() if tensor not in weight_map]
    if faults:
        raise Corrupt(
            f"{path} and its files disagree on {len(faults)} tensors; copy the folder again, or pass the files "
            f"instead of the index:{bullet_list(faults)}"
        )
    merged = _merged([_file(p, tensors, metadata) for p, (tensors, metadata) in zip(paths, opened, strict=True)])
    common, differing = _common_metadata([metadata for _, metadata in opened])
    return merged, common, [*differing, *(key for key in unused if key not in common)]


def open_files(paths: Sequence[str]) -> tuple[Tensors, dict[str, str], list[str]]:
    """Return the tensors of several safetensors files, their common metadata, and the keys of the other metadata.

    Raise `Corrupt` if two files have a tensor of the same name, or pieces that do not fit together.
    """
    opened = [(path, *open_tensors(path)) for path in paths]
    return _merged([_file(*file) for file in opened]), *_common_metadata([metadata for _, _, metadata in opened])


def _index(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the file of each tensor that an index lists, and the keys of its metadata that are not counts."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items = dict(pairs)
        if len(items) < len(pairs):
            raise ValueError("a name is repeated")
        return items

    data = read_whole(path, _MAX_INDEX)
    try:
        index = msgspec.json.decode(data, type=_Index)
        weight_map, metadata = index.weight_map, msgspec.json.decode(index.metadata, type=dict[str, msgspec.Raw])
        msgspec.json.decode(weight_map, type=dict[str, str])
        files: dict[str, str] = json.loads(bytes(weight_map), object_pairs_hook=build)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(
            f"{path} is not an index of a model's files ({error!r:.200}); check the path, or download it again"
        ) from error
    if not files:
        raise Corrupt(f"{path} lists no tensors; download it again, or pass the files instead of the index")
    return files, [key for key in metadata if key not in _COUNTS]


def _file(path: str, tensors: dict[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> _File:
    if _PIECES not in metadata:
        return _File(path, tensors, None)
    try:
        stored = msgspec.json.decode(metadata[_PIECES], type=dict[str, _Offsets])
        offsets = {name: stored[name].saved_offsets for name in tensors}
    except (msgspec.DecodeError, ValueError, KeyError, RecursionError) as error:
        raise Corrupt(
            f"{path}: its {_PIECES} does not have the format that PyTorch writes ({error!r:.200}); copy it again"
        ) from error
    return _File(path, tensors, offsets)


def _merged(files: Sequence[_File]) -> Tensors:
    """Return the tensors of all files in one dict."""
    merged: Tensors = {}
    pieces: dict[str, list[FilePart]] = {}
    origin: dict[str, str] = {}  # the last file so far with each tensor
    for file in files:
        for name, values in file.tensors.items():
            if file.offsets is not None and (name in pieces or name not in origin):
                pieces.setdefault(name, []).append(FilePart(file.offsets[name], values))
            elif name in origin:
                raise Corrupt(
                    f"{origin[name]} and {file.name} both have a tensor {name[:200]!r}; pass only the files of "
                    "one model"
                )
            merged[name] = values  # replaced below for a tensor in pieces, which keeps this position
            origin[name] = file.name
    for name, parts in pieces.items():
        shape, dtype = _shape_and_dtype(name, parts)
        merged[name] = joined(repr(name[:200]), shape, dtype, parts)
    return merged


def _shape_and_dtype(name: str, parts: Sequence[FilePart]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of a tensor in pieces."""
    dtypes = {part.values.dtype for part in parts}
    if len(dtypes) > 1 or any(len(part.offsets) != part.values.ndim for part in parts):
        raise Corrupt(f"the pieces of {name[:200]!r} differ in dtype or in their number of axes; check the files")
    ends = [[o + n for o, n in zip(part.offsets, part.values.shape, strict=True)] for part in parts]
    return tuple(max(end) for end in zip(*ends, strict=True)), dtypes.pop()


def _common_metadata(metadata: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the metadata that all files share, and the keys of the rest, without those about pieces."""
    keys = dict.fromkeys(key for one in metadata for key in one if not key.startswith("DCP_"))
    common = {key: metadata[0][key] for key in keys if len({one.get(key) for one in metadata}) == 1}
    return common, [key for key in keys if key not in common]
