"""Import of checkpoints of other formats: recognize a file or folder, and save its tree in one commit.

`recognize` looks at the names in a folder, and at the first bytes of a file. Each format opens its source as a
tree of arrays that are memory-mapped or read while they are saved, so that memory stays flat.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from tstore.checkpoint.leaves import dtype_of
from tstore.checkpoint.save import save
from tstore.checkpoint.structure import flatten
from tstore.convert import dcp, orbax
from tstore.convert.files import StrPath, open_file
from tstore.convert.huggingface import INDEX_SUFFIX, open_files, open_folder, open_index
from tstore.convert.names import ATTRIBUTE
from tstore.convert.torch_file import open_trusted
from tstore.errors import InvalidArgument, name_list
from tstore.quantization.policy import CodecRules
from tstore.runtime.computing import compute
from tstore.storage.local.atomic_file import mapped_errors
from tstore.store import Store

__all__ = ["ImportReport", "SourceKind", "import_checkpoint", "import_torch_file", "recognize"]


class SourceKind(Enum):
    """The kinds of sources to import; the values describe them in messages."""

    SAFETENSORS = "a safetensors file"
    FILES = "several safetensors files"
    INDEX = "an index of safetensors files"
    FOLDER = "a folder of safetensors files"
    DCP = "a torch.distributed.checkpoint folder"
    ORBAX = "an Orbax checkpoint"
    TORCH = "a file of torch.save"
    ZARR = "a Zarr folder"


class ImportReport(NamedTuple):
    """The result of an import: the recognized kind of the source, and the version and size of the commit.

    `left_out` names the items of an Orbax checkpoint that are not trees of arrays, and so are not imported.
    """

    kind: SourceKind
    version: int
    tensors: int
    bytes: int
    left_out: list[str]


_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")
# how zip archives, NumPy files and pickles begin
_ZIP, _NUMPY, _PICKLE = b"PK\x03\x04", b"\x93NUMPY", 0x80


def recognize(sources: Sequence[StrPath]) -> SourceKind:
    """Return the kind of the sources; raise `InvalidArgument` for a file or folder of no known kind."""
    paths = [os.fspath(source) for source in sources]
    if not paths:
        raise InvalidArgument("there is no source to import; pass a file, a folder or several safetensors files")
    if len(paths) == 1:
        [path] = paths
        if "://" in path:
            return SourceKind.ZARR
        return _folder_kind(path) if os.path.isdir(path) else _file_kind(path)
    for path in paths:
        if os.path.isdir(path) or (kind := _file_kind(path)) is not SourceKind.SAFETENSORS:
            what = "a folder" if os.path.isdir(path) else kind.value
            raise InvalidArgument(f"{path} is {what}; pass it alone, or pass only safetensors files")
    return SourceKind.FILES


async def import_checkpoint(
    sources: StrPath | Sequence[StrPath], store: StrPath | Store, step: int, *, codecs: CodecRules = None
) -> ImportReport:
    """Save a checkpoint of another format as the checkpoint of a step; return its kind and the commit.

    `sources` is a safetensors file, several of them, their index or folder, a folder of
    torch.distributed.checkpoint, or an Orbax checkpoint, which needs tensorstore. Safetensors become a flat dict
    {name: array}, other checkpoints nested dicts and lists. Files must not be changed meanwhile. `codecs` is the
    argument of `tstore.save`.

    The store is created if there is none, after the source has been checked. Raise `Corrupt`, `UnsupportedFormat`,
    `NotFound`, `InvalidArgument` (not a checkpoint, or a file of torch.save; see `import_torch_file`), and the
    errors of `tstore.save`.
    """
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    kind = recognize(paths)
    if kind is SourceKind.TORCH:
        raise InvalidArgument(
            f"{os.fspath(paths[0])} is {kind.value}, a pickle, and loading one may run code that is in it; if you "
            "trust its origin, import it with tstore import --trust or import_torch_file"
        )
    if kind is SourceKind.ZARR:
        raise InvalidArgument(
            f"{os.fspath(paths[0])} is {kind.value}, which has no step; import it with import_zarr"
        )
    return await _save(kind, [os.fspath(path) for path in paths], store, step, codecs)


async def import_torch_file(
    file: StrPath, store: StrPath | Store, step: int, *, codecs: CodecRules = None
) -> ImportReport:
    """Save a file of torch.save as the checkpoint of a step; pass only files whose origin you trust.

    Tensors, plain containers and numbers are read without running anything. A file with objects of other classes
    is loaded by torch.load(weights_only=False), which runs the code that the file names. The loaded object must
    consist of tensors and plain values, or have a `state_dict` method. Raise the errors of `import_checkpoint`.
    """
    return await _save(SourceKind.TORCH, [os.fspath(file)], store, step, codecs)


async def _save(
    kind: SourceKind, paths: Sequence[str], store: StrPath | Store, step: int, codecs: CodecRules
) -> ImportReport:
    tree, attributes = await compute(_OPEN[kind], paths)
    name = os.fsencode(os.path.basename(paths[0].rstrip("/"))).decode(errors="replace")
    name += f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    _, leaves = await compute(flatten, tree)
    sizes = [math.prod(leaf.shape) * dtype_of(p, leaf).itemsize for p, leaf in leaves.items()]
    version = await save(store, tree, step, codecs=codecs, attributes=attributes, message=f"imported from {name}")
    left_out = orbax.other_items(paths[0]) if kind is SourceKind.ORBAX else []
    return ImportReport(kind, version, len(leaves), sum(sizes), left_out)


def _with_metadata(opened: tuple[Any, dict[str, str]]) -> tuple[Any, dict[str, Any]]:
    """Return the tensors, and their metadata as an attribute of the root group."""
    tensors, metadata = opened
    return tensors, {ATTRIBUTE: metadata}


_Open = Callable[[Sequence[str]], tuple[Any, dict[str, Any]]]

_OPEN: dict[SourceKind, _Open] = {
    SourceKind.SAFETENSORS: lambda paths: _with_metadata(open_files(paths)),
    SourceKind.FILES: lambda paths: _with_metadata(open_files(paths)),
    SourceKind.INDEX: lambda paths: _with_metadata(open_index(paths[0])),
    SourceKind.FOLDER: lambda paths: _with_metadata(open_folder(paths[0])),
    SourceKind.DCP: lambda paths: (dcp.open_dcp(paths[0]), {}),
    SourceKind.ORBAX: lambda paths: (orbax.open_orbax(paths[0]), {}),
    SourceKind.TORCH: lambda paths: (open_trusted(paths[0]), {}),
}
"""For each kind of source a function that returns its tree and the attributes of the root group."""


def _file_kind(path: str) -> SourceKind:
    with open_file(path) as file:
        head = file.read(512)
    start = head[:8]
    # the first 8 bytes of a safetensors file are the length of its header, of which the high bytes are zero
    not_safetensors = len(start) == 8 and start[4:] != b"\0\0\0\0"
    if start.startswith(_NUMPY) or (start.startswith(_ZIP) and _first_name(head).endswith(b".npy")):
        raise InvalidArgument(
            f"{path} is a file of NumPy; load it with numpy.load, and save its arrays with tstore.save"
        )
    if start.startswith(_ZIP) or (not_safetensors and start[0] == _PICKLE):
        return SourceKind.TORCH
    if path.endswith(INDEX_SUFFIX) or (path.endswith(".json") and start.startswith(b"{") and not_safetensors):
        return SourceKind.INDEX
    if not_safetensors and not path.endswith(".safetensors"):
        raise InvalidArgument(
            f"{path} can't be imported: it begins neither like a safetensors file nor like a file of "
            "torch.save; pass such a file, or a folder"
        )
    return SourceKind.SAFETENSORS


def _first_name(head: bytes) -> bytes:
    """Return the name of the first file in a zip archive that begins with these bytes."""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")]


def _folder_kind(folder: str) -> SourceKind:
    with mapped_errors("read", folder):
        names = sorted(os.listdir(folder))
    if dcp.METADATA in names:
        return SourceKind.DCP
    if orbax.is_orbax(folder):
        return SourceKind.ORBAX
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
        return SourceKind.FOLDER
    if any(os.path.isfile(os.path.join(folder, name)) for name in _ZARR_FILES):
        return SourceKind.ZARR
    if "tstore.json" in names:
        raise InvalidArgument(f"{folder} is a tstore store already; copy it with tstore copy")
    steps = [name for name in names if orbax.is_orbax(os.path.join(folder, name))]
    if steps:
        raise InvalidArgument(
            f"{folder} has {len(steps)} Orbax checkpoints; pass the folder of one, such as "
            f"{os.path.join(folder, steps[-1])}; {name_list('checkpoints', steps)}"
        )
    pickles = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    if pickles:
        raise InvalidArgument(f"{folder} has files of torch.save; pass one of them: {', '.join(pickles[:10])}")
    raise InvalidArgument(
        f"{folder} can't be imported: it has neither *.safetensors nor {dcp.METADATA} of "
        f"torch.distributed.checkpoint nor {orbax.METADATA} of Orbax nor zarr.json of Zarr; pass the folder "
        "with these files"
    )
