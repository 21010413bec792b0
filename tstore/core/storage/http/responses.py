"""The head of an HTTP response: status, length, range and type, checked before any of the body is used."""

from __future__ import annotations

import email.utils
import math
import re
from typing import NamedTuple, Protocol

from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    TemporaryFailure,
    Throttled,
    TStoreError,
)

__all__ = [
    "FORBIDDEN",
    "Head",
    "Range",
    "age",
    "check_data",
    "content_range",
    "is_temporary",
    "retry_after",
    "sanitize",
    "status_error",
    "validator",
    "wrong_range",
]

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.IGNORECASE)
_WEB_PAGE = ("text/html", "application/xhtml+xml")

FORBIDDEN = "a missing object may be forbidden too; to only read a store, open it with mode='r'"

# timeouts, concurrent changes, another server's connection, early data, rates, a client that seems to have left
_TEMPORARY = (408, 409, 421, 425, 429, 499)
_LASTING = (501, 505, 507, 511)  # not supported, no space, a network that wants a log-in


class Headers(Protocol):
    """Headers by case-insensitive name."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, None if it is absent."""


class Head(Protocol):
    """The head of a response, from aiohttp or any other client."""

    @property
    def status(self) -> int:
        """The status code."""

    @property
    def headers(self) -> Headers:
        """The headers."""

    @property
    def content_length(self) -> int | None:
        """The length of the body, None if the server did not send it."""


class Range(NamedTuple):
    """The range of an object that a response contains, and the size of the object (None if it was not sent)."""

    start: int
    stop: int
    total: int | None


def content_range(head: Head, label: str) -> Range:
    """Return the range in a response; raise `Corrupt` if it is missing, or contradicts the length of the body."""
    text = head.headers.get("Content-Range") or ""
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if match is not None:
        start, stop = int(match[1]), int(match[2]) + 1
        total = None if match[3] == "*" else int(match[3])
        if start < stop and (total is None or stop <= total) and head.content_length in (None, stop - start):
            return Range(start, stop, total)
    raise Corrupt(
        f"{label}: the server sent part of the object with a wrong Content-Range, {sanitize(text)!r} for "
        f"{head.content_length} bytes; check the server and its proxies"
    )


def check_data(head: Head, label: str) -> None:
    """Raise `Corrupt` if the body of a successful response is not an object, but a web page or encoded bytes."""
    media_type = (head.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    if media_type in _WEB_PAGE:
        raise Corrupt(
            f"{label}: the server sent a web page ({media_type}) instead of the object, as log-in pages do; "
            "check the URL, and open it in a browser to see the page"
        )
    encoding = (head.headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise Corrupt(
            f"{label}: the server sent Content-Encoding {sanitize(encoding)!r}, which was not requested; "
            "configure it to serve files unencoded"
        )


def validator(head: Head, total: int | None) -> str | None:
    """Return what identifies the contents: the ETag, else the length and modification time; None if unknown."""
    tag = head.headers.get("ETag")
    if tag is not None:
        return f"ETag {sanitize(tag.removeprefix('W/'))}"
    modified = head.headers.get("Last-Modified")
    return None if modified is None or total is None else f"{total} bytes of {sanitize(modified)}"


def age(head: Head) -> float | None:
    """Return the seconds since the object was written, by the server's clock; None if unknown."""
    text = head.headers.get("X-TStore-Age")
    if text is not None:
        try:
            seconds = float(text)
        except ValueError:
            return None
        return max(0.0, seconds) if math.isfinite(seconds) else None
    now, written = (_time(head.headers.get(name)) for name in ("Date", "Last-Modified"))
    return None if now is None or written is None else max(0.0, now - written)


def _time(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def retry_after(headers: Headers) -> float | None:
    """Return the seconds to wait by the Retry-After header, None if it is absent or invalid."""
    text = headers.get("Retry-After")
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    now, end = _time(headers.get("Date")), _time(text)
    return None if now is None or end is None else max(0.0, end - now)


def is_temporary(status: int) -> bool:
    """Return whether a status means that the same request may succeed later, whichever server sends it."""
    return status in _TEMPORARY or (status >= 500 and status not in _LASTING)


def sanitize(text: str, max_length: int = 200) -> str:
    """Return a server's text fit for an error message: one line of printable characters, truncated if long."""
    printable = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(printable.split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def status_error(head: Head, label: str, reason: str) -> TStoreError:
    """Return the error for an unsuccessful response; `reason` is the explanation in its body."""
    because = f": {reason}" if reason else ""
    match head.status:
        case 404 | 410:
            return NotFound(f"{label} does not exist")
        case 412:
            return AlreadyExists(f"{label} already exists")
        case 401:
            return Denied(f"{label}: the server refused the token as wrong or expired{because}; pass another")
        case 403 if reason and head.headers.get("WWW-Authenticate") is None:  # no token would change that
            return Denied(f"{label}: the server forbids the request{because}")
        case 403:
            note = "" if reason else f" ({FORBIDDEN})"
            return Denied(f"{label}: the server forbids the request{because}; pass a token of wider scope{note}")
        case 407 | 511:
            return Denied(f"{label}: a proxy or the network wants a log-in (status {head.status}){because}")
        case 402 | 451:
            return Denied(f"{label}: the server forbids the request (status {head.status}){because}")
        case 405 | 501 | 505:
            return Denied(f"{label}: the server does not support the request{because}; it may be read-only")
        case 400 | 422 | 428:
            return InvalidArgument(f"{label}: the server rejected the request as invalid{because}")
        case 413:
            advice = because or "; raise its limit (nginx: client_max_body_size)"
            return StorageFull(
                f"{label}: the server, or a proxy in front of it, accepts no object of that length{advice}"
            )
        case 507:
            return StorageFull(f"{label}: the server has no space for it{because}; free some there, then repeat")
        case 429:
            return Throttled(f"{label}: the server receives too many requests{because}", retry_after(head.headers))
        case status if is_temporary(status):
            pause = retry_after(head.headers)
            if pause is not None:
                return Throttled(f"{label}: the server is busy and asks to retry in {pause:g} s{because}", pause)
            return TemporaryFailure(f"{label}: the server can't serve it now: status {status}{because}")
        case status:
            return Corrupt(f"{label}: the server sent status {status}{because}, unexpected for that request")


def wrong_range(label: str, offset: int, end: int, start: int, stop: int | None) -> Corrupt:
    """Return the error for a response with a range that was not requested."""
    got = f"{start} to {stop}" if stop is not None else f"{start} and beyond"
    return Corrupt(f"{label}: bytes {offset} to {end} were requested, but the server sent {got}; check the server")
