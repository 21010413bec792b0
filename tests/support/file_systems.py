"""File systems of fsspec for tests."""

from __future__ import annotations

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["Exclusive", "register"]


class Exclusive(LocalFileSystem):  # type: ignore[misc]
    """Local files with an exclusive create."""

    protocol = "exclusive"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(f"{cls.protocol}://")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
        with open(path, "xb" if mode == "create" else "wb") as file:
            file.write(value)


def register(*kinds: type[Exclusive]) -> None:
    """Let URLs that begin with the protocol of a kind name its files."""
    for kind in kinds:
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
