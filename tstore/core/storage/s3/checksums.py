"""Checksums of uploads to S3, and what a response says about the bytes that the server stored.

1. Every PUT carries the CRC32 of the body in a header. A server that knows the header refuses other bytes, and
   returns the checksum of what it stored, which is compared.
2. A server that does not return it may give each object an ETag that is the MD5 of its bytes. Not every server
   does, and none does for objects that it encrypts. The first ETag that is the MD5 of the body shows that this
   server does; from then on any other is an error. If the first ETags are others, a short new object is read back,
   once: other bytes are an error too.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tstore.core.runtime.pool import run
from tstore.core.storage.http.responses import sanitize
from tstore.errors import Corrupt, Denied, NotFound

__all__ = ["StoredBytes", "crc32", "declare_checksum"]

_LONG = 1 << 20  # bytes; the checksum of a longer body is computed in the thread pool
_HEADER = "x-amz-checksum-crc32"

Body = bytes | bytearray


class StoredBytes:
    """Compares what the server stored with what was sent, as far as the response allows."""

    def __init__(self) -> None:
        self._etags_are_md5: bool | None = None  # not known yet

    async def check(
        self,
        label: str,
        body: Body,
        check: str,
        response: Mapping[str, Any],
        read_back: Callable[[], Awaitable[Body]] | None,
    ) -> None:
        """Raise `Corrupt` if other bytes than the body, which has the CRC32 `check`, were stored.

        `read_back` reads the object, unless others may have replaced it since.
        """
        sent, stored = f"CRC32 {check}", response.get("ChecksumCRC32")
        if stored is None and self._etags_are_md5 is not False:
            md5 = await _computed(_md5, body)
            stored = str(response.get("ETag", "")).strip('"')
            if stored == md5:
                self._etags_are_md5 = True
                return
            if self._etags_are_md5:
                sent = f"MD5 {md5}"
            elif read_back is None or len(body) > _LONG:
                return
            else:
                try:
                    stored = _crc32(await read_back())
                except (Denied, NotFound):  # without permission to read, or deleted since
                    return
                self._etags_are_md5 = False if stored == check else None
        if stored not in (None, check):
            raise Corrupt(
                f"{label}: {len(body)} bytes with {sent} were sent, but the server stored other bytes, with "
                f"{sanitize(str(stored))}; the stored object is damaged, delete it"
            )


async def crc32(body: Body) -> str:
    """Return the CRC32 of a body, as S3 writes it."""
    return await _computed(_crc32, body)


def declare_checksum(params: dict[str, Any], **_: Any) -> None:
    """Declare the checksum in the header to botocore, so that over https it signs no SHA-256 of the body."""
    algorithm = {"algorithm": "crc32", "in": "header", "name": _HEADER}
    params["context"]["checksum"] = {"request_algorithm": algorithm}


async def _computed(checksum: Callable[[Body], str], body: Body) -> str:
    return await run(checksum, body) if len(body) >= _LONG else checksum(body)


def _crc32(body: Body) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def _md5(body: Body) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()
