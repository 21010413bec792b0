"""Readers of the packs that chunks refer to, in storage or inline in a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tstore.errors import Corrupt, NotFound
from tstore.storage.base import Backend, PackReader

__all__ = ["pack_reader"]


def pack_reader(backend: Backend, pack: str | bytes, label: str) -> PackReader:
    """Return the reader of a pack; raise `Corrupt`, naming the chunk `label`, if the pack does not exist.

    On some storage only the first read shows that; its error does not name the chunk.
    """
    if isinstance(pack, bytes):
        return _InlinePack(pack)
    try:
        return _RequiredPack(backend.reader(pack))
    except NotFound as error:
        raise Corrupt(f"{label}: its pack is gone: {error}") from error


class _InlinePack:
    """A pack in a manifest."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, buffers: Sequence[Any], size: int) -> None:
        if offset + size > len(self._data):
            raise Corrupt(f"an inline pack of {len(self._data)} bytes has no {size} bytes at {offset}")
        for buffer in buffers:
            buffer[:] = np.frombuffer(self._data, np.uint8, len(buffer), offset)
            offset += len(buffer)


class _RequiredPack:
    """A pack that chunks refer to: without it the store is `Corrupt`."""

    def __init__(self, reader: PackReader) -> None:
        self._reader = reader

    def read_into(self, offset: int, buffers: Sequence[Any], size: int) -> None:
        try:
            self._reader.read_into(offset, buffers, size)
        except NotFound as error:
            raise Corrupt(f"its pack is gone: {error}") from error
