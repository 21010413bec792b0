"""The requests that read the objects of a local store, counted."""

from __future__ import annotations

import pytest

from tstore.core.storage.base import PackReader
from tstore.core.storage.local.store import LocalStorage


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each later read of a local store appends its number of bytes."""
    sizes: list[int] = []
    reader, get = LocalStorage.reader, LocalStorage.get

    class Counted:
        def __init__(self, inner: PackReader) -> None:
            self._inner = inner

        def read_into(self, offset: int, buffers: object, size: int) -> None:
            sizes.append(size)
            self._inner.read_into(offset, buffers, size)  # type: ignore[arg-type]

    async def counted(self: LocalStorage, key: str, max_size: int | None = None) -> bytes:
        data = await get(self, key, max_size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(LocalStorage, "get", counted)
    monkeypatch.setattr(LocalStorage, "reader", lambda self, key: Counted(reader(self, key)))
    return sizes
