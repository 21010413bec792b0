"""The part of some objects whose keys begin with a prefix, as objects of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tstore.storage.base import LONGEST, Buffers, Capabilities, checked_key
from tstore.storage.objects import WHOLE, Entry, Objects, Page, PutMode, Span

__all__ = ["Prefix"]


class Prefix:
    """The objects below `prefix/`, by what follows it."""

    def __init__(self, inner: Objects, prefix: str) -> None:
        self.inner = inner
        self._prefix = f"{checked_key(prefix, inner.url)}/"

    @property
    def url(self) -> str:
        """Where the objects are."""
        return f"{self.inner.url.rstrip('/')}/{self._prefix[:-1]}"

    @property
    def capabilities(self) -> Capabilities:
        """What the server has."""
        return self.inner.capabilities

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        """See `Objects.get`."""
        return await self.inner.get(self._whole(key), span, most)

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """See `Objects.read`."""
        await self.inner.read(self._whole(key), offset, buffers, size)

    async def head(self, key: str) -> Entry | None:
        """See `Objects.head`."""
        found = await self.inner.head(self._whole(key))
        return None if found is None else found._replace(key=key)

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """See `Objects.put`."""
        await self.inner.put(self._whole(key), data, mode)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Objects.pages`."""
        cut = len(self._prefix)
        async for entries, folders in self.inner.pages(self._prefix + prefix, delimiter):
            yield Page([e._replace(key=e.key[cut:]) for e in entries], [f[cut:] for f in folders])

    async def delete(self, key: str) -> None:
        """See `Objects.delete`."""
        await self.inner.delete(self._whole(key))

    async def close(self) -> None:
        """See `Objects.close`."""
        await self.inner.close()

    def _whole(self, key: str) -> str:
        return self._prefix + checked_key(key, self.url)
