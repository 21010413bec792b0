"""The bodies of requests, received in pieces, and of responses: an object, or a range of it."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import re
from collections.abc import AsyncIterator
from io import FileIO

from aiohttp import web

from tstore.service.server.access_log import current_tally
from tstore.service.server.quotas import LONGEST_IN_MEMORY, PIECE, SIZE_ADVICE
from tstore.service.server.responses import Refused, common_headers
from tstore.service.server.served import OpenObject
from tstore.service.server.transfers import Transfer

__all__ = ["check_declared_length", "receive", "send"]

_WRITE_SIZE = 512 << 10  # bytes of a body to receive before they are written
_MAX_PARTS = 64  # yielded at once; more are joined, because short parts take much more memory than their bytes
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))")


def check_declared_length(request: web.BaseRequest, max_size: int) -> None:
    """Refuse a body that declares a length above `max_size`, or neither a length nor chunked encoding."""
    length = request.content_length
    if length is None and request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        raise Refused(411, "a body without Content-Length must be chunked")
    if length is not None and length > max_size:
        raise _too_long(max_size)


async def receive(request: web.BaseRequest, max_size: int, transfer: Transfer) -> AsyncIterator[list[bytes]]:
    """Yield the body about 512 KiB at a time, in parts; refuse one that is too long, too slow, or truncated."""
    tally, ended = current_tally(), False
    try:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # nothing of the final response is sent yet
        while not ended:
            parts: list[bytes] = []
            enough = transfer.moved + _WRITE_SIZE
            async with transfer:
                while transfer.moved < enough and not ended:
                    part, _ = await request.content.readchunk()  # empty at the end of each HTTP chunk, too
                    if part:
                        parts.append(part)
                        transfer.moved += len(part)
                    else:
                        ended = request.content.at_eof()
            tally.received = transfer.moved
            if transfer.moved > max_size:
                raise _too_long(max_size)
            if parts:
                yield parts if len(parts) <= _MAX_PARTS else [b"".join(parts)]
    except (web.RequestPayloadError, ConnectionError):
        raise Refused(400, "the body was truncated; nothing was stored", {"Connection": "close"}) from None


def _too_long(max_size: int) -> Refused:
    advice = SIZE_ADVICE if max_size == LONGEST_IN_MEMORY else "pass a greater --max-pack to tstore serve"
    message = f"the body is longer than the {max_size} bytes that this server accepts; {advice}"
    return Refused(413, message, {"Connection": "close"})


async def send(
    request: web.BaseRequest, opened: OpenObject, cache_control: str, transfer: Transfer
) -> web.StreamResponse:
    """Respond with an object, or the requested range of it."""
    headers = common_headers(**{"Accept-Ranges": "bytes", "Cache-Control": cache_control})
    if opened.etag is not None:
        headers["ETag"] = f'"{opened.etag}"'
    if opened.age is not None:
        headers["X-TStore-Age"] = f"{opened.age:.3f}"
    if opened.modified is not None:
        headers["Last-Modified"] = email.utils.formatdate(opened.modified, usegmt=True)
    _check_conditions(request, opened, headers)
    status, start, stop = _range(request, opened, headers)
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = "application/octet-stream"
    response.content_length = stop - start
    tally = current_tally()
    try:
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        while start < stop:
            async with transfer:
                sent = await _send_piece(request, response, opened, start, min(stop - start, PIECE))
                start, transfer.moved = start + sent, transfer.moved + sent
            tally.sent = transfer.moved
    except (ConnectionError, EOFError, Refused):
        if request.transport is not None:
            request.transport.abort()  # the client must not mistake a truncated body for a complete one
    return response


async def _send_piece(
    request: web.BaseRequest, response: web.StreamResponse, opened: OpenObject, offset: int, size: int
) -> int:
    """Send up to `size` bytes from `offset`, by `sendfile` if possible; return how many were sent."""
    transport, source = request.transport, opened.source
    if transport is None or transport.is_closing():  # the client has left
        raise ConnectionResetError
    if isinstance(source, FileIO) and not request.secure:
        with contextlib.suppress(NotImplementedError, asyncio.SendfileNotAvailableError):
            sent = await asyncio.get_running_loop().sendfile(transport, source, offset, size, fallback=False)
            if sent < size:
                raise EOFError  # the file has been truncated
            return sent
    data = await opened.piece(offset, size)
    if not data:
        raise EOFError
    await response.write(data)
    return len(data)


def _check_conditions(request: web.BaseRequest, opened: OpenObject, headers: dict[str, str]) -> None:
    etag, match, none_match = opened.etag, request.if_match, request.if_none_match
    if match is not None and not any(e.value == "*" or (e.value == etag and not e.is_weak) for e in match):
        raise Refused(412, "the object does not match If-Match")
    if none_match is not None and any(e.value in ("*", etag) for e in none_match):
        raise Refused(304, "", headers)


def _range(request: web.BaseRequest, opened: OpenObject, headers: dict[str, str]) -> tuple[int, int, int]:
    """Return the status, start and stop of the bytes to send: all if Range is absent, unsupported or outdated."""
    requested = _RANGE.fullmatch(request.headers.get("Range", ""))
    if_range = request.headers.get("If-Range")
    is_same_object = if_range is None or if_range in (headers.get("ETag"), headers.get("Last-Modified"))
    if requested is None or not is_same_object:
        return 200, 0, opened.size
    first, last, suffix = requested.groups()
    if suffix is None:
        start, stop = int(first), min(opened.size, int(last) + 1 if last else opened.size)
    else:
        start, stop = max(0, opened.size - int(suffix)), opened.size
    if start >= stop or (last and int(last) < int(first)):
        raise Refused(416, "the object has no such range", {"Content-Range": f"bytes */{opened.size}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{opened.size}"
    return 206, start, stop
