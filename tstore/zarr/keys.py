"""Zarr keys: the node whose metadata or chunk a key names; pure, no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta, ChunkNames
from tstore.core.format.arrays.grid import chunk_coordinates, chunk_number
from tstore.core.format.arrays.numcodecs_classes import misread_by_zarr
from tstore.core.format.plain_text import with_json_numbers
from tstore.core.format.tree.node import Node
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.errors import UnsupportedFormat

__all__ = [
    "ChunkKeys",
    "enclosing_folders",
    "group_document",
    "metadata_key",
    "metadata_path",
    "parsed_metadata",
    "served_document",
]

_METADATA = "zarr.json"


def metadata_key(path: str) -> str:
    """Return the key of the metadata of the node at a path, "" for the root."""
    return f"{path}/{_METADATA}" if path else _METADATA


def metadata_path(key: str) -> str | None:
    """Return the path of the node whose metadata has this key, or None."""
    path, _, name = key.rpartition("/")
    return path if name == _METADATA else None


def parsed_metadata(key: str, data: bytes) -> dict[str, Any] | None:
    """Return the metadata of a group or array of Zarr v3, None if the bytes are something else.

    Numbers that JSON lacks become text. Raise `UnsupportedFormat` for metadata of Zarr v2.
    """
    name = key.rpartition("/")[2]
    if name not in (_METADATA, ".zarray", ".zgroup"):
        return None
    try:
        fields = _decoded(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    if name != _METADATA and "zarr_format" in fields:
        raise UnsupportedFormat(f"{key!r} is metadata of Zarr v2; tstore stores Zarr v3, so pass zarr_format=3")
    return fields if fields.get("node_type") in ("group", "array") else None


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except ValueError:
        return with_json_numbers(json.loads(data))  # zarr-python writes NaN


def enclosing_folders(key: str) -> list[str]:
    """Return the folders that contain a key, the outermost first, without the root."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


class ChunkKeys:
    """The keys of the chunks of one array."""

    def __init__(self, path: str, document: bytes, meta: ArrayMeta) -> None:
        self._prefix = f"{path}/"
        self._names = ChunkNames.parse(msgspec.json.decode(document).get("chunk_key_encoding"))
        self._counts = meta.counts

    @staticmethod
    def of_array(node: Node) -> ChunkKeys:
        """Return the keys of the chunks of an array."""
        return ChunkKeys(node.path, node.document, node.meta)

    def key(self, number: int) -> str:
        """Return the key of the chunk with this C-order number."""
        return self._prefix + self._names.name(chunk_coordinates(number, self._counts))

    def number(self, key: str) -> int | None:
        """Return the number of the chunk with this key, None if no chunk in the grid has it."""
        if not key.startswith(self._prefix):
            return None
        at = self._names.coordinates(key.removeprefix(self._prefix), len(self._counts))
        if at is None or any(i >= n for i, n in zip(at, self._counts, strict=True)):
            return None
        return chunk_number(at, self._counts)

    def below(self, numbers: npt.NDArray[np.int64], folder: str) -> Iterator[tuple[int, str]]:
        """Yield the chunks in a folder (the array's or one below it), with their keys."""
        within = f"{folder}/"
        for number in numbers.tolist():
            if (key := self.key(number)).startswith(within):
                yield number, key


def group_document(attributes: dict[str, Any]) -> bytes:
    """Return the `zarr.json` of a group."""
    return msgspec.json.encode({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def served_document(node: Node) -> bytes:
    """Return the `zarr.json` of a group or array as other programs read it, without tstore's own entries.

    Raise `UnsupportedFormat` for an array that zarr-python would decode wrongly.
    """
    if not node.is_array:
        return group_document({k: v for k, v in node.attributes.items() if node.path or k != RESERVED_ATTRIBUTE})
    if (fault := misread_by_zarr(node.meta.chain.documents, node.meta.dtype.itemsize)) is not None:
        raise UnsupportedFormat(
            f"{node.path} {fault}; read it with tstore, or export a Zarr folder, where it is decoded"
        )
    fields = msgspec.json.decode(node.document)
    if "tstore" not in fields:
        return node.document
    del fields["tstore"]
    return msgspec.json.encode(fields)
