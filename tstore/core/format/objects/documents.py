"""The metadata documents of nodes, each checked once, however many nodes share it; pure, no I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from tstore.core.format.arrays.array_metadata import SHORT_DOCUMENT, ArrayMeta, short_meta
from tstore.core.format.objects.wellformed import check_documents
from tstore.errors import Corrupt, UnsupportedFormat, parsing

__all__ = ["LONG_DOCUMENT", "Document"]

LONG_DOCUMENT = 64 << 10
"""Bytes; a longer document is compared with its bounds when it is parsed, a shorter one when it is decoded."""


class Document:
    """A `zarr.json` that nodes of a manifest share; `data` are its bytes.

    A manifest of a few megabytes can give one long document to a million nodes. So the document is parsed once,
    and the metadata, or the error, is kept for all of them. Attributes are parsed at each access and not kept.
    """

    __slots__ = ("_group_fault", "_is_array", "_meta", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._is_array: bool | None = None  # None: not yet parsed
        self._meta: ArrayMeta | Corrupt | UnsupportedFormat | None = None  # an error if `data` do not parse
        self._group_fault: str | None = None  # why this is not a group; "" if it is a group, None: not yet checked

    @property
    def is_array(self) -> bool:
        """Whether this is the metadata of an array, not of a group; raises `Corrupt` if `data` do not parse."""
        if self._is_array is None:
            try:
                self._is_array = _KIND.decode(self._bounded_data()).node_type == "array"
            except (RecursionError, msgspec.DecodeError) as error:
                raise Corrupt(f"the metadata of a node does not parse: {error!r:.300}") from error
        return self._is_array

    @property
    def meta(self) -> ArrayMeta:
        """The metadata of an array; raises `Corrupt` or `UnsupportedFormat`."""
        if len(self.data) <= SHORT_DOCUMENT:
            return short_meta(self.data)  # cached by content
        if self._meta is None:
            try:
                self._meta = ArrayMeta.parse(self._bounded_data())
            except (Corrupt, UnsupportedFormat) as error:
                self._meta = type(error)(str(error))  # a copy without a traceback, which would keep values alive
        if isinstance(self._meta, ArrayMeta):
            return self._meta
        raise type(self._meta)(str(self._meta))

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of an array or group, parsed again at each access; raises `Corrupt`."""
        data = self._bounded_data()
        with parsing("its metadata"):
            attributes = msgspec.json.decode(data).get("attributes", {})
            if not isinstance(attributes, dict):
                raise TypeError("attributes are not a JSON object")
            return attributes

    def attribute(self, *names: str) -> bytes | None:
        """Return the JSON of an attribute, or of a value in it, without decoding it; None if there is none."""
        data: bytes | msgspec.Raw = self._bounded_data()
        for name in ("attributes", *names):
            try:
                data = _FIELDS.decode(data).get(name, _NULL)
            except (RecursionError, msgspec.DecodeError):  # not an object
                return None
        return None if bytes(data) == _NULL else bytes(data)

    def check_group(self) -> None:
        """Raise `Corrupt` unless this is the metadata of a group with valid attributes."""
        if self._group_fault is None:
            self._group_fault = self._find_group_fault()
        if self._group_fault:
            raise Corrupt(self._group_fault)

    def _find_group_fault(self) -> str:
        try:
            with parsing("its metadata"):
                kind = _KIND.decode(self.data).node_type
            _ = self.attributes
        except Corrupt as error:
            return str(error)
        if kind == "array":
            return "its metadata is that of an array; expected a group"
        return "" if kind == "group" else f"its metadata has node_type {kind!r:.100}; expected 'group' or 'array'"

    def _bounded_data(self) -> bytes:
        """Return `data`; raise `Corrupt` if a long document exceeds its bounds."""
        if len(self.data) > LONG_DOCUMENT:
            check_documents([self.data])
        return self.data

    def equals(self, other: Document) -> bool:
        """Return whether both have the same bytes; equal documents then share them, so later calls are fast."""
        if self.data is other.data:
            return True
        if hash(self.data) != hash(other.data) or self.data != other.data:  # Python computes each hash once
            return False
        other.data = self.data
        return True


class _Kind(msgspec.Struct):
    node_type: str


_KIND = msgspec.json.Decoder(_Kind)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = b"null"
