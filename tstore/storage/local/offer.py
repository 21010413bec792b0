"""A record written and forced to disk once, then linked under one number after another until one is free."""

from __future__ import annotations

import os
from collections.abc import Callable

from tstore.runtime.pool import run
from tstore.storage.local.atomic_file import StagedFile, explained, write_all
from tstore.storage.objects import Durability

__all__ = ["LocalOffer"]


class LocalOffer:
    """The bytes of one object under a temporary name; `create` links it, `withdraw` removes it."""

    def __init__(
        self,
        data: bytes,
        durability: Durability,
        path_of: Callable[[str], str],
        make_folder: Callable[[str, Durability], None],
    ) -> None:
        self._data = data
        self._durability = durability
        self._path_of = path_of
        self._make_folder = make_folder
        self._draft: StagedFile | None = None

    async def create(self, key: str) -> None:
        """Create the object under this key; raise `AlreadyExists` where the key is taken."""
        await run(self._create, key)

    async def withdraw(self) -> None:
        """Remove what was written under the temporary name."""
        if self._draft is not None:
            await run(self._draft.close)

    def _create(self, key: str) -> None:
        path = self._path_of(key)
        with explained("create", path):
            if self._draft is None:
                self._draft = self._written(os.path.dirname(path))
            self._draft.publish(path)
        self._draft = None

    def _written(self, folder: str) -> StagedFile:
        self._make_folder(folder, self._durability)
        draft = StagedFile(folder, "offer", self._durability)
        try:
            write_all(draft.fd, [self._data], 0)
            draft.force()
        except BaseException:
            draft.close()
            raise
        return draft
