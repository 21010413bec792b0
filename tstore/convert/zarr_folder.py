"""Plain Zarr folders, v3 and v2, local or at a URL of fsspec: their groups and arrays, read in place.

Reading is blocking: it happens in worker threads. The chunks are decoded by the codec chains that also decode
those of stores, so a chunk that decodes to too much or too little is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.convert.folder import Folder
from tstore.convert.zarr_v2 import V2_KEYS, v3_array
from tstore.core.array import Appended
from tstore.core.data.pieces import chunk_memory
from tstore.core.data.planning import ByteRange, ReadPlan
from tstore.core.format.arrays.array_metadata import KNOWN_KEYS, ArrayMeta, ChunkNames
from tstore.core.format.arrays.grid import Selection, chunk_number, part_of, projections
from tstore.core.format.arrays.points import PointProjection, PointSelection, point_projections
from tstore.core.format.paths import parents
from tstore.core.format.plain_text import pluralize, with_json_numbers
from tstore.core.runtime.concurrency import compute
from tstore.core.runtime.pool import each
from tstore.errors import Corrupt, InvalidArgument, Misuse, NotFound, UnsupportedFormat

__all__ = ["ZarrArray", "ZarrNode", "left_out", "read_array", "read_nodes"]

_MAX_METADATA = 64 << 20  # bytes, of consolidated metadata too
_MAX_DEPTH = 64  # levels of groups
_GROUP_KEYS = ("zarr_format", "node_type", "attributes", "tstore")
_FEW_CHUNKS = 16  # the chunks of a smaller array are looked up one by one
_MAX_LOOKED_UP = 1 << 24  # chunks to look up, one request each, on a server without listings


class ZarrNode(NamedTuple):
    """A group or array of a folder: its path, "" for the root, and its metadata as a `zarr.json` of Zarr v3.

    `files` are the names of the files that have the metadata, and `unused` names the entries that have no meaning.
    """

    path: str
    metadata: Mapping[str, Any]
    files: frozenset[str]
    unused: tuple[str, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether it is an array, not a group."""
        return bool(self.metadata["node_type"] == "array")


class ZarrArray:
    """A plain Zarr array, which is read in place; the source of a read-only `Array`."""

    def __init__(self, folder: Folder, node: ZarrNode, *, sparse: bool = True) -> None:
        self._folder = folder
        self._prefix = f"{node.path}/" if node.path else ""
        self.location = f"{folder.url}/{node.path}".rstrip("/")
        fields = {k: v for k, v in node.metadata.items() if k not in ("consolidated_metadata", "tstore")}
        try:
            self._names = ChunkNames.parse(fields.get("chunk_key_encoding"))
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{self.location}: {error}") from error
        fields["chunk_key_encoding"] = {"name": "default", "configuration": {"separator": "/"}}
        self._fields = fields
        self.meta = self._parsed(sparse)

    def dense(self) -> ArrayMeta:
        """Return the metadata of the array when every chunk exists: a missing one is an error then."""
        return self._parsed(False)

    def _parsed(self, sparse: bool) -> ArrayMeta:
        extension = {"tstore": {"must_understand": False, "sparse": True}} if sparse else {}
        try:
            meta = ArrayMeta.parse(msgspec.json.encode(self._fields | extension))
            return ArrayMeta.parse(msgspec.json.encode(meta.plain_fields()))
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.location}: {error}") from error

    async def stored_chunks(self, path: str, meta: ArrayMeta) -> npt.NDArray[np.int64] | None:
        """Return the numbers of the chunks that may exist, ascending; None if the server can't list them."""
        if self._folder.is_http:
            return None
        return np.array(await compute(self.listed_chunks), np.int64)

    def listed_chunks(self) -> Sequence[int]:
        """Return the numbers of all chunks that may exist, ascending. Blocking.

        Listing is faster than looking up every chunk of a large grid, most of which may not exist.
        """
        meta = self.meta
        every = range(meta.chunk_count)
        if len(every) <= _FEW_CHUNKS:
            return every
        files = self._folder.files(self._prefix, len(meta.shape))
        if files is None and len(every) <= _MAX_LOOKED_UP:
            return every
        if files is None:
            raise UnsupportedFormat(
                f"{self.location} has {len(every):,} chunks, on a server that can't list which of them exist; "
                f"expected at most {_MAX_LOOKED_UP:,}: import a copy on a disk"
            )
        listed = (self._names.coordinates(file, len(meta.shape)) for file in files)
        inside = (
            at for at in listed if at is not None and all(i < n for i, n in zip(at, meta.counts, strict=True))
        )
        return sorted({chunk_number(at, meta.counts) for at in inside})

    def has_chunk(self, file: str) -> bool | None:
        """Return whether a file below the array is a chunk in its grid, None if it is not named like a chunk."""
        at = self._names.coordinates(file, len(self.meta.shape))
        return None if at is None else all(i < n for i, n in zip(at, self.meta.counts, strict=True))

    def has_folder(self, folder: str) -> bool:
        """Return whether chunks may be in a folder below the array."""
        parts = folder.split("/")
        return len(parts) <= len(self.meta.shape) and all(part == "c" or part.isdecimal() for part in parts)

    def encoded(self, chunk: Sequence[int]) -> bytes | None:
        """Return the bytes of a chunk, None if it does not exist. Blocking."""
        return self._folder.get(self._prefix + self._names.name(chunk), self.meta.chain.max_length)

    @contextlib.contextmanager
    def decoded(self, chunk: Sequence[int], data: bytes) -> Iterator[npt.NDArray[Any]]:
        """Yield the values of a chunk, whose memory is reused once the context ends.

        Raise `Corrupt`, `UnsupportedFormat`, or `InvalidArgument` if memory is short.
        """
        where = f"{self.location}, chunk {tuple(chunk)}"
        try:
            with chunk_memory(self.meta) as values:
                self.meta.chain.decode(memoryview(data), values)
                yield values
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{where}: {error}") from error
        except MemoryError as error:
            raise InvalidArgument(f"{where}: too little memory to decode it ({error})") from error

    async def read_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> None:
        """Read a selection into `out`; chunks that do not exist have the fill value."""

        def read(projection: Any) -> None:
            data = self.encoded(projection.chunk)
            if data is None:
                out[projection.result] = meta.fill_value
                return
            with self.decoded(projection.chunk, data) as values:
                if isinstance(projection, PointProjection):
                    projection.read(values.reshape(-1), 0, out)
                else:
                    target = part_of(out, projection.result)
                    np.copyto(target, values[projection.inside], casting="unsafe")

        await each(read, _projections(selection, meta), self._folder.workers)

    async def map_array(self, path: str) -> None:
        """Return None: each chunk of a folder is a separate file."""

    async def explain_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> ReadPlan:
        """Return what `read_array` would read: the whole file of each chunk."""
        files: dict[int, ByteRange] = {}

        def look_up(projection: Any) -> None:
            key = self._prefix + self._names.name(projection.chunk)
            if (size := self._folder.size(key)) is not None:
                files[chunk_number(projection.chunk, meta.counts)] = ByteRange(key, 0, size)

        await each(look_up, _projections(selection, meta), self._folder.workers)
        numbers = sorted(files)
        return ReadPlan(numbers, [files[number] for number in numbers], out.nbytes)

    async def write_array(self, path: str, meta: ArrayMeta, selection: Any, values: npt.NDArray[Any]) -> None:
        """Raise `Misuse`: a plain array is only read."""
        raise Misuse(f"{self.location} is a plain Zarr array, which is read in place; import it to change it")

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Raise `Misuse`: a plain array is only read."""
        raise Misuse(f"{self.location} is a plain Zarr array, which is read in place; import it to change it")

    async def append_array(
        self, path: str, meta: ArrayMeta, axis: int, values: npt.NDArray[Any]
    ) -> tuple[ArrayMeta, Appended]:
        """Raise `Misuse`: a plain array is only read."""
        raise Misuse(f"{self.location} is a plain Zarr array, which is read in place; import it to change it")

    @property
    def workers(self) -> int:
        """How many threads should read chunks at the same time."""
        return self._folder.workers


def _projections(selection: Selection | PointSelection, meta: ArrayMeta) -> Iterator[Any]:
    """Return the intersections of a selection with chunks."""
    if isinstance(selection, PointSelection):
        return iter(point_projections(selection, meta.shape, meta.chunks))
    return iter(projections(selection, meta.shape, meta.chunks))


async def read_array(folder: Folder, path: str, format_: int) -> ZarrArray:
    """Return the array at a path, of Zarr format 2 or 3; raise `NotFound` if there is none."""
    node = await compute(_node, folder, path, (format_,))
    if node is None or not node.is_array:
        what = "no array" if node is None else "a group, not an array,"
        raise NotFound(f"{folder.url}/{path} has {what} of Zarr v{format_}; check the path and the format")
    return ZarrArray(folder, node)


async def read_nodes(folder: Folder) -> list[ZarrNode]:
    """Return all groups and arrays, parents first; raise `InvalidArgument` if the folder is no Zarr hierarchy.

    Where a server can't list its files, the nodes are those of consolidated metadata.
    """
    return await compute(lambda: list(_walk(folder)))


def left_out(folder: Folder, nodes: Sequence[ZarrNode], arrays: Mapping[str, ZarrArray]) -> list[str]:
    """Return the files and whole folders that are neither metadata of these nodes nor chunks of the arrays.

    Chunks outside the grid of an array count as one. For a server that can't list its files, nothing is
    returned.
    """
    known = {above for node in nodes for above in (node.path, *parents(node.path))}
    metadata = {f"{node.path}/{file}".lstrip("/") for node in nodes for file in node.files}

    def array_above(path: str) -> str | None:
        return next((above for above in ("", *parents(path)) if above in arrays), None)

    def has_part(path: str) -> bool:
        """Return whether a folder may have nodes or chunks."""
        above = array_above(path)
        return path in known or (above is not None and arrays[above].has_folder(path.removeprefix(f"{above}/")))

    names, outside = set[str](), dict[str, list[str]]()
    for file in folder.all_files(has_part) or ():
        above = array_above(file)
        within = None if above is None else arrays[above].has_chunk(file.removeprefix(f"{above}/"))
        if within is None and file not in metadata:
            folders = reversed([*parents(file)])
            names.add(next((f"{above}/" for above in folders if not has_part(above)), file))
        elif above is not None and within is False:
            outside.setdefault(above, []).append(file)
    counts = [
        f"{min(chunks)} ({pluralize(len(chunks), 'chunk')} outside of the grid)" for chunks in outside.values()
    ]
    return sorted([*names, *counts, *(entry for node in nodes for entry in node.unused)])


def _walk(folder: Folder) -> Iterator[ZarrNode]:
    root = _node(folder, "", (3, 2))
    if root is None:
        raise InvalidArgument(
            f"{folder.url} is not a Zarr hierarchy: it has neither zarr.json nor .zgroup nor .zarray; pass the "
            "folder of a group or an array"
        )
    yield root
    if root.is_array:
        return
    if folder.is_http:  # no listings, or only HTML pages
        yield from _consolidated(folder, root)
    else:
        yield from _below(folder, "", 0)


def _below(folder: Folder, path: str, depth: int) -> Iterator[ZarrNode]:
    """Yield the nodes below a group, from its listing."""
    if depth == _MAX_DEPTH:
        raise UnsupportedFormat(f"{folder.url}/{path}: groups are nested more than {_MAX_DEPTH} deep")
    for name in folder.names(path):
        child = f"{path}/{name}".lstrip("/")
        node = _node(folder, child, (3, 2))
        if node is not None:
            yield node
        if node is None or not node.is_array:
            if folder.is_link(child):
                raise UnsupportedFormat(
                    f"{folder.url}/{child} is a symbolic link to a folder that is not an array; remove it, or "
                    "replace it by a copy of the folder"
                )
            yield from _below(folder, child, depth + 1)


def _consolidated(folder: Folder, root: ZarrNode) -> Iterator[ZarrNode]:
    """Yield the nodes below the root from consolidated metadata."""
    try:
        consolidated = root.metadata.get("consolidated_metadata") or {}
        # an export of tstore does not list arrays of dtypes that zarr-python lacks
        documents = {**(consolidated.get("metadata") or {}), **(consolidated.get("unlisted") or {})}
        if not documents and (v2 := _json(folder, ".zmetadata")) is not None:
            files = v2["metadata"]
            for name in files:
                path, _, file = name.rpartition("/")
                if path and file in (".zarray", ".zgroup"):
                    documents[path] = _v3(f"{folder.url}/{path}", files[name], files.get(f"{path}/.zattrs"))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{folder.url}: its consolidated metadata does not parse: {error!r:.300}") from error
    if not documents:
        raise InvalidArgument(
            f"{folder.url} is a group on a server that can't list its members; pass one of its arrays, or "
            "consolidate its metadata with zarr.consolidate_metadata"
        )
    for path in sorted(documents):
        yield _checked(f"{folder.url}/{path}", path, documents[path])


def _node(folder: Folder, path: str, formats: Sequence[int]) -> ZarrNode | None:
    """Return the group or array at a path, of one of these formats, or None if there is neither."""
    prefix, location = f"{path}/" if path else "", f"{folder.url}/{path}".rstrip("/")
    if 3 in formats and (fields := _json(folder, f"{prefix}zarr.json")) is not None:
        node = _checked(location, path, fields, "zarr.json")
        known = KNOWN_KEYS if node.is_array else _GROUP_KEYS
        return node._replace(unused=_unused(f"{prefix}zarr.json", fields, known))
    for file in (".zarray", ".zgroup") if 2 in formats else ():
        if (fields := _json(folder, prefix + file)) is not None:
            files = frozenset({file, ".zattrs", ".zmetadata"})
            metadata = _v3(location, fields, _json(folder, f"{prefix}.zattrs"))
            return ZarrNode(path, metadata, files, _unused(prefix + file, fields, V2_KEYS))
    return None


def _unused(file: str, fields: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    return tuple(f"{file}: {key}" for key in fields if key not in known and key != "consolidated_metadata")


def _json(folder: Folder, key: str) -> Any:
    """Return the contents of a metadata file, None if there is none; raise `Corrupt` unless it is JSON."""
    data = folder.get(key, _MAX_METADATA)
    if data is None:
        return None
    try:
        fields = json.loads(data)  # not msgspec: zarr-python writes NaN
        msgspec.json.encode(fields)  # fails for lone surrogates
        return fields
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{folder.url}/{key} is not JSON: {error}") from error


def _checked(location: str, path: str, fields: Any, *files: str) -> ZarrNode:
    """Return the node with the fields of a `zarr.json`; raise `Corrupt` or `UnsupportedFormat`."""
    if not isinstance(fields, dict) or fields.get("node_type") not in ("array", "group"):
        raise Corrupt(f"{location}: its metadata is not that of a Zarr group or array")
    if fields.get("zarr_format") != 3:
        raise UnsupportedFormat(
            f"{location} has the Zarr format {fields.get('zarr_format')!r:.40}; expected 2 or 3"
        )
    attributes = fields.get("attributes") or {}
    if not isinstance(attributes, dict):
        raise Corrupt(f"{location}: its attributes are not a JSON object")
    fields = fields | {"attributes": attributes}
    try:
        converted = {key: with_json_numbers(fields[key]) for key in fields.keys() & {"attributes", "fill_value"}}
        return ZarrNode(path, fields | converted, frozenset(files))
    except RecursionError as error:
        raise Corrupt(f"{location}: its attributes are nested too deep") from error


def _v3(location: str, fields: Any, attributes: Any) -> dict[str, Any]:
    """Return the `zarr.json` for the metadata of a v2 group or array."""
    try:
        attributes = dict(attributes or {})
        if "shape" in fields:
            return v3_array(fields, attributes)
        return {"zarr_format": 3, "node_type": "group", "attributes": with_json_numbers(attributes)}
    except (InvalidArgument, UnsupportedFormat) as error:
        raise UnsupportedFormat(f"{location}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{location}: its Zarr v2 metadata does not parse: {error!r:.300}") from error
