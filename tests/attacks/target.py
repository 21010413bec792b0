"""A server under attack, in this process or its own, and the folder that it serves."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from tests.attacks.case import check
from tests.support import http_server
from tests.support.http_server import ADMIN, READ, WRITE, Wire
from tstore.server import Server

__all__ = ["HOSTILE", "SECRET", "TOKENS", "Target", "changes", "files", "lay_out"]

SECRET = b"what lies beside the store"
HOSTILE = "hostile-0123456789"
"""A second token of scope write, for those whose share must not be that of honest writers."""

TOKENS = f"read {READ}\nwrite {WRITE}\nwrite {HOSTILE}\nadmin {ADMIN}"


class Target:
    """What attacks are run against."""

    def __init__(
        self, server: Server | http_server.Process, place: Path, trusting: ssl.SSLContext | None = None
    ) -> None:
        self.server = server
        self.place = place
        self.trusting = trusting

    @contextlib.asynccontextmanager
    async def wire(self, source: str | None = None) -> AsyncIterator[Wire]:
        """A connection to the server."""
        async with http_server.wire(self.server, self.trusting, source) as raw:
            yield raw

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Return the status and body of the answer to one request, 0 if the server closes instead."""
        async with self.wire() as raw:
            await raw.send(request)
            return await raw.response()

    def files(self) -> dict[str, bytes]:
        """Return the contents of the folder that is served."""
        return files(self.place)

    async def still_well(self) -> None:
        """Raise `Broken` unless the server still gives an honest reader what is stored."""
        head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {READ}\r\n"
        said = await self.ask(f"GET /txn/old/pack-0 HTTP/1.1\r\n{head}\r\n".encode())
        check(said == (200, b"committed"), f"an honest GET afterwards is answered {said}")


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder."""
    contents = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if path.is_file():
                contents[str(path.relative_to(folder))] = path.read_bytes()
    return contents


def changes(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Return which files are others now; a hidden one that went was the remains of an upload."""
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return sorted(name for name in names if name in after or not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")


def lay_out(folder: Path) -> Path:
    """Make a folder with a small store, beside which a secret lies, and return the store's."""
    (folder / "secret").write_bytes(SECRET)
    (folder / "outside").mkdir()
    (folder / "outside" / "pack-0").write_bytes(SECRET)
    place = folder / "store"
    (place / "txn" / "old").mkdir(parents=True)
    (place / "tstore.json").write_bytes(http_server.MARKER)
    (place / "txn" / "old" / "pack-0").write_bytes(b"committed")
    (place / "txn" / "old" / ".0123456789abcdef.tmp").write_bytes(SECRET)
    return place
