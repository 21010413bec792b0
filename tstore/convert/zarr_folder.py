"""Plain Zarr folders, v3 and v2, local or at a URL of fsspec: their groups and arrays, read in place.

Reading is blocking: it happens in worker threads. The chunks are decoded by the codec chains that also decode
those of stores, so a chunk that decodes to too much or too little is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.convert.zarr_v2 import v3_array, v3_attributes
from tstore.data.planning import ReadPlan
from tstore.errors import Corrupt, InvalidArgument, Misuse, NotFound, Unavailable, UnsupportedFormat
from tstore.format.arguments import quote
from tstore.format.array_metadata import ArrayMeta
from tstore.format.grid import Selection, part_of, projections
from tstore.format.points import PointProjection, PointSelection, point_projections
from tstore.runtime.budget import scratch
from tstore.runtime.pool import WORKERS, each, run
from tstore.storage.local.atomic_file import mapped_errors

__all__ = ["Folder", "ZarrArray", "ZarrNode", "read_array", "read_nodes"]

_MAX_METADATA = 64 << 20  # bytes, of consolidated metadata too
_MAX_DEPTH = 64  # groups in groups
_REQUESTS = 32  # to a server at a time


class Folder:
    """The files below a path or URL, as fsspec reads them; its methods block."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        import fsspec

        try:
            self._fs, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
        except (ValueError, ImportError, TypeError) as error:
            raise InvalidArgument(f"{quote(url)} can't be opened by fsspec: {error}") from error
        self._root = root.rstrip("/")
        self.url = url.rstrip("/")
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.is_http = bool(protocols & {"http", "https"})
        self.workers = WORKERS if "file" in protocols else _REQUESTS

    def get(self, key: str, max_size: int) -> bytes | None:
        """Return the bytes of a file, None if there is none; raise `Corrupt` if there are more than `max_size`."""
        from aiohttp import ClientError

        path = f"{self._root}/{key}"
        try:
            with mapped_errors("read", f"{self.url}/{key}"):
                try:
                    data: bytes = self._fs.cat_file(path, 0, max_size + 1)
                except ClientError as error:
                    failure = f"can't read {self.url}/{key}: {error}"
                    raise Unavailable(f"{failure}; check the URL and the server, or try again") from error
        except NotFound:
            return None
        if len(data) > max_size:
            raise Corrupt(
                f"{self.url}/{key} has more than {max_size} bytes, more than its array's codecs can write"
            )
        return data

    def names(self, key: str) -> list[str]:
        """Return the sorted names of the folders below a folder; raise `NotFound` if there is no such folder."""
        path = f"{self._root}/{key}".rstrip("/")
        with mapped_errors("list", f"{self.url}/{key}"):
            entries = self._fs.ls(path, detail=True)
        names = {e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"}
        return sorted(names)


class ZarrNode(NamedTuple):
    """A group or array of a folder: its path, "" for the root, and its metadata as a `zarr.json` of Zarr v3."""

    path: str
    metadata: Mapping[str, Any]

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
        self._key = _chunk_keys(fields.get("chunk_key_encoding"), self.location)
        fields["chunk_key_encoding"] = {"name": "default", "configuration": {"separator": "/"}}
        self._fields = fields
        self.meta = self._parsed(sparse)

    def dense(self) -> ArrayMeta:
        """Return the metadata of the array when every chunk exists: a missing one is an error then."""
        return self._parsed(False)

    def _parsed(self, sparse: bool) -> ArrayMeta:
        extension = {"tstore": {"must_understand": False, "sparse": True}} if sparse else {}
        try:
            return ArrayMeta.parse(msgspec.json.encode(self._fields | extension))
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.location}: {error}") from error

    def encoded(self, chunk: Sequence[int]) -> bytes | None:
        """Return the bytes of a chunk, None if it does not exist. Blocking."""
        return self._folder.get(self._prefix + self._key(chunk), self.meta.chain.max_length)

    def decode(self, chunk: Sequence[int], data: bytes, out: npt.NDArray[Any]) -> None:
        """Decode a chunk into `out`, an array of its shape; raise `Corrupt` or `UnsupportedFormat`."""
        try:
            self.meta.chain.decode(memoryview(data), out)
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.location}, chunk {tuple(chunk)}: {error}") from error

    async def read_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> None:
        """Read a selection into `out`; chunks that do not exist have the fill value."""
        touched: Iterator[Any]
        if isinstance(selection, PointSelection):
            touched = point_projections(selection, meta.shape, meta.chunks)
        else:
            touched = projections(selection, meta.shape, meta.chunks)

        def read(projection: Any) -> None:
            data = self.encoded(projection.chunk)
            if data is None:
                out[projection.result] = meta.fill_value
                return
            with scratch(meta.chunk_size * meta.dtype.itemsize) as buffer:
                values = buffer.view(meta.dtype)
                self.decode(projection.chunk, data, values.reshape(meta.chunks))
                if isinstance(projection, PointProjection):
                    projection.read(values, 0, out)
                else:
                    target = part_of(out, projection.result)
                    np.copyto(target, values.reshape(meta.chunks)[projection.inside], casting="unsafe")

        await each(read, touched, self._folder.workers)

    async def explain_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> ReadPlan:
        """Raise `Misuse`: the sizes of the chunks are unknown until they are read."""
        raise Misuse(f"{self.location} is a plain Zarr array, whose reads can't be planned; read it, or import it")

    async def write_array(self, path: str, meta: ArrayMeta, selection: Any, values: npt.NDArray[Any]) -> None:
        """Raise `Misuse`: a plain array is only read."""
        raise Misuse(f"{self.location} is a plain Zarr array, which is read in place; import it to change it")

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Raise `Misuse`: a plain array is only read."""
        raise Misuse(f"{self.location} is a plain Zarr array, which is read in place; import it to change it")

    @property
    def workers(self) -> int:
        """How many threads should read chunks at the same time."""
        return self._folder.workers


async def read_array(folder: Folder, path: str, format_: int) -> ZarrArray:
    """Return the array at a path, of Zarr format 2 or 3; raise `NotFound` if there is none."""
    node = await run(_node, folder, path, (format_,))
    if node is None or not node.is_array:
        what = "no array" if node is None else "a group, not an array,"
        raise NotFound(f"{folder.url}/{path} has {what} of Zarr v{format_}; check the path and the format")
    return ZarrArray(folder, node)


async def read_nodes(folder: Folder) -> list[ZarrNode]:
    """Return all groups and arrays, parents first; raise `InvalidArgument` if the folder is no Zarr hierarchy.

    Where a server can't list its files, the nodes are those of consolidated metadata.
    """
    return await run(lambda: list(_walk(folder)))


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
    if folder.is_http:  # which has no listings, or only pages for people
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
            yield from _below(folder, child, depth + 1)


def _consolidated(folder: Folder, root: ZarrNode) -> Iterator[ZarrNode]:
    """Yield the nodes below the root from consolidated metadata."""
    consolidated = root.metadata.get("consolidated_metadata") or {}
    documents = dict(consolidated.get("metadata") or {})
    if not documents and (v2 := _json(folder, ".zmetadata")) is not None:
        files = v2["metadata"]
        for name in files:
            path, _, file = name.rpartition("/")
            if path and file in (".zarray", ".zgroup"):
                documents[path] = _v3(f"{folder.url}/{path}", files[name], files.get(f"{path}/.zattrs"))
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
        return _checked(location, path, fields)
    for file in (".zarray", ".zgroup") if 2 in formats else ():
        if (fields := _json(folder, prefix + file)) is not None:
            return ZarrNode(path, _v3(location, fields, _json(folder, f"{prefix}.zattrs")))
    return None


def _json(folder: Folder, key: str) -> Any:
    """Return the contents of a metadata file, None if there is none; raise `Corrupt` unless it is JSON."""
    data = folder.get(key, _MAX_METADATA)
    if data is None:
        return None
    try:
        return json.loads(data)  # not msgspec: writers of v2 use NaN
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{folder.url}/{key} is not JSON: {error}") from error


def _checked(location: str, path: str, fields: Any) -> ZarrNode:
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
    return ZarrNode(path, fields | {"attributes": v3_attributes(attributes)})


def _v3(location: str, fields: Any, attributes: Any) -> dict[str, Any]:
    """Return the `zarr.json` for the metadata of a v2 group or array."""
    try:
        attributes = dict(attributes or {})
        if "shape" in fields:
            return v3_array(fields, attributes)
        return {"zarr_format": 3, "node_type": "group", "attributes": v3_attributes(attributes)}
    except (InvalidArgument, UnsupportedFormat) as error:
        raise UnsupportedFormat(f"{location}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{location}: its Zarr v2 metadata does not parse: {error!r:.300}") from error


def _chunk_keys(encoding: Any, location: str) -> Callable[[Sequence[int]], str]:
    """Return the function from the coordinates of a chunk to its name."""
    encoding = {"name": encoding} if isinstance(encoding, str) else encoding
    name = encoding.get("name") if isinstance(encoding, dict) else None
    defaults = {"default": "/", "v2": "."}
    if name not in defaults:
        raise UnsupportedFormat(f"{location}: chunk keys of the kind {encoding!r:.100} are not supported")
    separator = (encoding.get("configuration") or {}).get("separator", defaults[name])
    if separator not in ("/", "."):
        raise UnsupportedFormat(f"{location}: the separator {separator!r:.40} of chunk keys is not '/' or '.'")
    if name == "default":
        return lambda chunk: separator.join(["c", *map(str, chunk)])
    return lambda chunk: separator.join(map(str, chunk)) or "0"
