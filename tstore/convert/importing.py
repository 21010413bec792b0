"""Import checkpoints of other formats: recognize a file or folder, and save its tree in one commit.

`recognize` looks at the names in a folder, and at the first bytes of a file. Each format opens its source as a
tree of arrays that are memory-mapped or read while they are saved, so that memory stays flat.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from tstore.checkpoint.leaves import dtype_of
from tstore.checkpoint.save import save
from tstore.checkpoint.structure import flatten
from tstore.convert import dcp, orbax
from tstore.convert.files import StrPath, left_out_of, open_file
from tstore.convert.huggingface import INDEX_SUFFIX, TORCH_INDEX_SUFFIX, open_files, open_folder, open_index
from tstore.convert.names import ATTRIBUTE
from tstore.convert.skipping import pruned
from tstore.convert.torch_file import open_state_dict, open_trusted
from tstore.core.format.arguments import quote
from tstore.core.format.plain_text import pluralize
from tstore.core.runtime.concurrency import compute
from tstore.core.storage.objects import mapped_errors
from tstore.core.store import Store
from tstore.errors import InvalidArgument, TStoreError, UnsupportedFormat, bullet_list, name_list
from tstore.quantization.policy import CodecRules

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
    TORCH_INDEX = "an index of files of torch.save"
    ZARR = "a Zarr folder"


class ImportReport(NamedTuple):
    """The result of an import: the recognized kind of the source, and the version and size of the commit.

    `left_out` names what was not imported: files and folders (with a slash at the end) of the source, relative
    to it, such as the state of an optimizer beside a model, and the values that `skip` named.
    """

    kind: SourceKind
    version: int
    tensors: int
    bytes: int
    left_out: list[str]


_LEVELS, _ENTRIES = 3, 10_000  # the search for checkpoints: levels of folders, and entries
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")
# the first bytes of zip archives, NumPy files and pickles
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
        kind = None if os.path.isdir(path) else _file_kind(path)
        if kind is not SourceKind.SAFETENSORS:
            what = "a folder" if kind is None else kind.value
            index = ", or pass the index of its files (*.bin.index.json)" if kind is SourceKind.TORCH else ""
            raise InvalidArgument(f"{path} is {what}; pass it alone, or pass only safetensors files{index}")
    return SourceKind.FILES


async def import_checkpoint(
    sources: StrPath | Sequence[StrPath],
    store: StrPath | Store,
    step: int,
    *,
    codecs: CodecRules = None,
    skip: Sequence[str] = (),
) -> ImportReport:
    """Save a checkpoint of another format as the checkpoint of a step; return its kind and the commit.

    `sources` is a safetensors file, several of them, their index or folder, a folder of
    torch.distributed.checkpoint, or an Orbax checkpoint, which needs tensorstore. Safetensors become a flat dict
    {name: array}, other checkpoints nested dicts and lists. Files must not be changed meanwhile. `codecs` is the
    argument of `tstore.save`. `skip` has globs of paths that are not imported, such as `"args"` or
    `"optimizer/**"`.

    The store is created if there is none, after the source has been checked. Raise `Corrupt`, `UnsupportedFormat`,
    `NotFound`, `InvalidArgument` (not a checkpoint, one that was not committed, or a file of torch.save; see
    `import_torch_file`), and the errors of `tstore.save`.
    """
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    kind = recognize(paths)
    if kind in (SourceKind.TORCH, SourceKind.TORCH_INDEX):
        what = "a pickle" if kind is SourceKind.TORCH else "each a pickle"
        raise InvalidArgument(
            f"{os.fspath(paths[0])} is {kind.value}, {what}, and loading one may run code that is in it; if you "
            "trust its origin, import it with tstore import --trust or import_torch_file"
        )
    if kind is SourceKind.ZARR:
        raise InvalidArgument(
            f"{os.fspath(paths[0])} is {kind.value}, which has no step; import it with import_zarr"
        )
    return await _save(kind, [os.fspath(path) for path in paths], store, step, codecs, skip)


async def import_torch_file(
    file: StrPath, store: StrPath | Store, step: int, *, codecs: CodecRules = None, skip: Sequence[str] = ()
) -> ImportReport:
    """Save a file of torch.save as the checkpoint of a step; pass only files whose origin you trust.

    `file` may also be the index of several files, `pytorch_model.bin.index.json`. Tensors, plain containers and
    numbers are read without running anything. A file with objects of other classes is loaded by
    torch.load(weights_only=False), which runs the code that the file names. The loaded object must consist of
    tensors and plain values, or have a `state_dict` method. Objects at paths that match a glob of `skip` are
    neither loaded nor imported. Raise the errors of `import_checkpoint`.
    """
    path = os.fspath(file)
    kind = SourceKind.TORCH_INDEX if path.endswith(TORCH_INDEX_SUFFIX) else SourceKind.TORCH
    return await _save(kind, [path], store, step, codecs, skip)


async def _save(
    kind: SourceKind,
    paths: Sequence[str],
    store: StrPath | Store,
    step: int,
    codecs: CodecRules,
    skip: Sequence[str],
) -> ImportReport:
    opened = await compute(_OPEN[kind], paths, skip)
    tree, skipped, unreadable, unused = await compute(pruned, opened.tree, skip)
    if unused:
        raise InvalidArgument(
            f"{paths[0]} has no value at {', '.join(map(quote, unused))}, which skip names; pass the path of a "
            "value, with the keys joined by '/', or a glob such as 'optimizer/**'"
        )
    if unreadable:
        listed = bullet_list([f"{path}: {what}" for path, what in unreadable.items()])
        raise UnsupportedFormat(
            f"{paths[0]} has {pluralize(len(unreadable), 'value')} that tstore can't store; save it without "
            f"them, or leave them out of the import by skip=[path, …] or --skip PATH:{listed}"
        )
    name = os.fsencode(os.path.basename(paths[0].rstrip("/"))).decode(errors="replace")
    name += f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    _, leaves = await compute(flatten, tree)
    sizes = [math.prod(leaf.shape) * dtype_of(p, leaf).itemsize for p, leaf in leaves.items()]
    version = await save(
        store, tree, step, codecs=codecs, attributes=opened.attributes, message=f"imported from {name}"
    )
    left_out = [os.fsencode(name).decode(errors="replace") for name in opened.left_out]
    return ImportReport(kind, version, len(leaves), sum(sizes), left_out + skipped)


class _Opened(NamedTuple):
    """A source: its tree, the files that are not in the tree, and the attributes of the root group."""

    tree: Any
    left_out: list[str] = []  # noqa: RUF012 - never changed
    attributes: dict[str, Any] = {}  # noqa: RUF012 - never changed


def _open_folder(folder: str) -> _Opened:
    tensors, metadata, differing, names = open_folder(folder)
    opened = _open_tensors(tensors, metadata, differing)
    return opened._replace(left_out=left_out_of(folder, names) + opened.left_out)


def _open_dcp(folder: str) -> _Opened:
    tree, names = dcp.open_dcp(folder)
    return _Opened(tree, left_out_of(folder, names))


def _open_tensors(tensors: Any, metadata: dict[str, str], differing: Sequence[str]) -> _Opened:
    return _Opened(tensors, [f"metadata {key!r}" for key in differing], {ATTRIBUTE: metadata})


_OPEN: dict[SourceKind, Callable[[Sequence[str], Sequence[str]], _Opened]] = {
    SourceKind.SAFETENSORS: lambda paths, _: _open_tensors(*open_files(paths)),
    SourceKind.FILES: lambda paths, _: _open_tensors(*open_files(paths)),
    SourceKind.INDEX: lambda paths, _: _open_tensors(*open_index(paths[0])),
    SourceKind.FOLDER: lambda paths, _: _open_folder(paths[0]),
    SourceKind.DCP: lambda paths, _: _open_dcp(paths[0]),
    SourceKind.ORBAX: lambda paths, _: _Opened(orbax.open_orbax(paths[0]), orbax.left_out(paths[0])),
    SourceKind.TORCH: lambda paths, skip: _Opened(open_trusted(paths[0], skip)),
    SourceKind.TORCH_INDEX: lambda paths, skip: _Opened(
        open_index(paths[0], lambda file: open_state_dict(file, skip))[0]
    ),
}
"""For each kind of source a function that opens its paths; only for files of torch.save it needs `skip`."""


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
    if path.endswith(TORCH_INDEX_SUFFIX):
        return SourceKind.TORCH_INDEX
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
    kind = _known_kind(folder, names)
    if kind in (SourceKind.ORBAX, None):
        orbax.check_committed(folder)
    if kind is not None:
        return kind
    if "tstore.json" in names:
        raise InvalidArgument(f"{folder} is a tstore store already; copy it with tstore copy")
    if any(name.endswith(".distcp") for name in names):
        raise InvalidArgument(
            f"{folder} has files of torch.distributed.checkpoint, but not {dcp.METADATA}, which is written last: "
            "the save is under way, or it was interrupted; pass the folder of a complete checkpoint"
        )
    if below := _checkpoints_below(folder):
        raise InvalidArgument(
            f"{folder} is not a checkpoint, but has {pluralize(len(below), 'checkpoint')} below it; pass the "
            f"folder of one, such as {os.path.join(folder, below[-1])}; {name_list('checkpoints', below)}"
        )
    indices = [name for name in names if name.endswith(TORCH_INDEX_SUFFIX)]
    if pickles := indices or [name for name in names if name.endswith(_TORCH_SUFFIXES)]:
        raise InvalidArgument(f"{folder} has files of torch.save; pass one of them: {', '.join(pickles[:10])}")
    raise InvalidArgument(
        f"{folder} can't be imported: it has neither *.safetensors nor {dcp.METADATA} of "
        f"torch.distributed.checkpoint nor {orbax.METADATA} of Orbax nor zarr.json of Zarr; pass the folder "
        "with these files"
    )


def _known_kind(folder: str, names: Sequence[str]) -> SourceKind | None:
    """Return the kind of a folder with entries of these names, None if it is of no known kind."""
    if dcp.METADATA in names:
        return SourceKind.DCP
    if orbax.is_orbax(folder):
        return SourceKind.ORBAX
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
        return SourceKind.FOLDER
    if any(os.path.isfile(os.path.join(folder, name)) for name in _ZARR_FILES):
        return SourceKind.ZARR
    return None


def _checkpoints_below(folder: str) -> list[str]:
    """Return the folders that can be imported in a folder, or else one or two levels below, the newest last."""
    level, entries_left = [""], _ENTRIES
    for _ in range(_LEVELS):
        deeper, found = [], []
        for name in level:
            with mapped_errors("read", folder), os.scandir(os.path.join(folder, name)) as entries:
                names = [
                    os.path.join(name, e.name)
                    for e in itertools.islice(entries, entries_left)
                    if e.is_dir(follow_symlinks=False)
                ]
            entries_left -= len(names)
            deeper += names
        for name in deeper:
            try:
                recognized = _known_kind(os.path.join(folder, name), os.listdir(os.path.join(folder, name)))
                if recognized is SourceKind.ORBAX:
                    orbax.check_committed(os.path.join(folder, name))
            except (OSError, TStoreError):  # not readable, or not complete
                continue
            if recognized is not None:
                found.append(name)
        if found:
            return sorted(found, key=_with_numbers)
        level = deeper
    return []


def _with_numbers(name: str) -> list[str | int]:
    """Return a key that sorts checkpoint-10 after checkpoint-9."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]
