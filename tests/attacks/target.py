"""A server under attack, and the folder that it serves."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.support import http_server
from tests.support.http_server import READ, Wire
from tstore.service.server import Server

SECRET = b"what lies beside the store"


class Target:
    """A server under attack."""

    def __init__(self, server: Server, place: Path) -> None:
        self.server = server
        self.place = place

    def wire(self) -> contextlib.AbstractAsyncContextManager[Wire]:
        """Connect to the server."""
        return http_server.wire(self.server)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and body, or status 0 if the server closes the connection."""
        async with self.wire() as raw:
            await raw.send(request)
            return await raw.response()

    def files(self) -> dict[str, bytes]:
        """Return the contents of the served folder."""
        return files(self.place)

    async def still_well(self) -> None:
        """Check that an honest read still succeeds."""
        head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {READ}\r\n"
        response = await self.ask(f"GET /txn/old/pack-0 HTTP/1.1\r\n{head}\r\n".encode())
        assert response == (200, b"committed"), f"an honest GET afterwards got {response}"


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
