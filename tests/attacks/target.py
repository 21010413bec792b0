"""A server under attack, in this or another process, and the folder that it serves."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from tests.attacks.case import check
from tests.support import http_server
from tests.support.http_server import ADMIN, READ, WRITE, Wire
from tstore.service.server import Server

__all__ = ["HOSTILE", "SECRET", "TOKENS", "Target", "changes", "files", "lay_out"]

SECRET = b"what lies beside the store"
HOSTILE = "hostile-0123456789"
"""A second token of scope write, for attackers, so that their share of resources is separate."""

TOKENS = f"read {READ}\nwrite {WRITE}\nwrite {HOSTILE}\nadmin {ADMIN}"


class Target:
    """A server under attack."""

    def __init__(
        self, server: Server | http_server.Process, place: Path, trusting: ssl.SSLContext | None = None
    ) -> None:
        self.server = server
        self.place = place
        self.trusting = trusting

    @contextlib.asynccontextmanager
    async def wire(self, source: str | None = None) -> AsyncIterator[Wire]:
        """Connect to the server."""
        async with http_server.wire(self.server, self.trusting, source) as raw:
            yield raw

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and body, or status 0 if the server closes the connection."""
        async with self.wire() as raw:
            await raw.send(request)
            return await raw.response()

    def files(self) -> dict[str, bytes]:
        """Return the contents of the served folder."""
        return files(self.place)

    async def still_well(self) -> None:
        """Raise `Broken` unless an honest read still succeeds."""
        head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {READ}\r\n"
        response = await self.ask(f"GET /txn/old/pack-0 HTTP/1.1\r\n{head}\r\n".encode())
        check(response == (200, b"committed"), f"an honest GET afterwards got {response}")


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder."""
    contents = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
            if path.is_file():
                contents[str(path.relative_to(folder))] = path.read_bytes()
    return contents


def changes(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Return the files that changed, except removed hidden ones, which are remains of uploads."""
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return sorted(name for name in names if name in after or not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")


def lay_out(folder: Path) -> Path:
    """Make a small store with a secret file beside it, and return the folder of the store."""
    (folder / "secret").write_bytes(SECRET)
    (folder / "outside").mkdir()
    (folder / "outside" / "pack-0").write_bytes(SECRET)
    place = folder / "store"
    (place / "txn" / "old").mkdir(parents=True)
    (place / "tstore.json").write_bytes(http_server.MARKER)
    (place / "txn" / "old" / "pack-0").write_bytes(b"committed")
    (place / "txn" / "old" / ".0123456789abcdef.tmp").write_bytes(SECRET)
    return place
