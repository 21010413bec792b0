"""What an HTTP server answered: judged by status, length, range and kind, before a byte of it is believed."""

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
    Throttled,
    TStoreError,
    Unavailable,
)
from tstore.storage.base import Buffers

__all__ = ["Answer", "Sink", "age", "check_data", "content_range", "refusal", "sanitize", "short", "version"]

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.IGNORECASE)
_PAGE = ("text/html", "application/xhtml+xml")


class Headers(Protocol):
    """Header fields by name, whatever its case."""

    def get(self, name: str, /) -> str | None:
        """The field's value, None where the answer has no such field."""


class Answer(Protocol):
    """What is looked at of an answer: of aiohttp's, or of any other client's."""

    @property
    def status(self) -> int:
        """The status code."""

    @property
    def headers(self) -> Headers:
        """The header fields."""

    @property
    def content_length(self) -> int | None:
        """The body's length, where the server told it."""


class Range(NamedTuple):
    """Which bytes an answer with status 206 holds, and of how many (None: not told)."""

    start: int
    stop: int
    total: int | None


def content_range(answer: Answer, where: str) -> Range:
    """The range that an answer says it holds; `Corrupt` where it says none, or one that its length belies."""
    text = answer.headers.get("Content-Range") or ""
    found = _CONTENT_RANGE.fullmatch(text.strip())
    if found is not None:
        start, stop = int(found[1]), int(found[2]) + 1
        total = None if found[3] == "*" else int(found[3])
        if start < stop and (total is None or stop <= total) and answer.content_length in (None, stop - start):
            return Range(start, stop, total)
    raise Corrupt(
        f"{where}: the server answered with a part of the object that it does not name rightly: Content-Range "
        f"{sanitize(text)!r} with {answer.content_length} bytes; check the server and what lies between"
    )


def check_data(answer: Answer, where: str) -> None:
    """Raises `Corrupt` where an answer of success is a web page, or is encoded: no object of a store is."""
    kind = (answer.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    if kind in _PAGE:
        raise Corrupt(
            f"{where}: the server answered with a web page ({kind}) instead of the object, as log-in pages and "
            "applications do; check the URL, and open it in a browser to see what it says"
        )
    encoding = (answer.headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise Corrupt(
            f"{where}: the server answered with Content-Encoding {sanitize(encoding)!r}, which was not asked for; "
            "let it serve the files as they are"
        )


def version(answer: Answer, total: int | None) -> str | None:
    """What tells this state of the object from a later one: its ETag, or when it was modified and its length."""
    tag = answer.headers.get("ETag")
    if tag is not None:
        return f"ETag {sanitize(tag.removeprefix('W/'))}"
    modified = answer.headers.get("Last-Modified")
    return None if modified is None or total is None else f"{total} bytes of {sanitize(modified)}"


def age(answer: Answer) -> float | None:
    """Seconds since the object was written, by the server's clock; None where it does not tell."""
    told = answer.headers.get("X-TStore-Age")
    if told is not None:
        try:
            seconds = float(told)
        except ValueError:
            return None
        return max(0.0, seconds) if math.isfinite(seconds) else None
    now, then = (_time(answer.headers.get(name)) for name in ("Date", "Last-Modified"))
    return None if now is None or then is None else max(0.0, now - then)


def _time(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def retry_after(answer: Answer) -> float | None:
    """The seconds after which the server asks to be asked again, where it tells."""
    told = answer.headers.get("Retry-After")
    if told is None:
        return None
    if told.strip().isdecimal():
        return float(told)
    now, then = _time(answer.headers.get("Date")), _time(told)
    return None if now is None or then is None else max(0.0, then - now)


def sanitize(text: str, longest: int = 200) -> str:
    """What a server said, fit for an error: one line of printable text, cut where it is long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def refusal(answer: Answer, where: str, said: str) -> TStoreError:
    """The error for an answer that is no success; `said` is what its body tells."""
    because = f": {said}" if said else ""
    match answer.status:
        case 404 | 410:
            return NotFound(f"{where}: there is no such object")
        case 412:
            return AlreadyExists(f"{where} exists already")
        case 401:
            return Denied(f"{where}: the server refused the token, as wrong or expired{because}; pass another one")
        case 403 if said and answer.headers.get("WWW-Authenticate") is None:  # no token would change that
            return Denied(f"{where}: the server forbids it{because}")
        case 403:
            more = "" if said else " (some file servers, as S3's, also say so of a missing object)"
            return Denied(f"{where}: the server forbids it{because}; pass a token whose scope allows it{more}")
        case 405 | 501:
            return Denied(f"{where}: the server does not do that{because}; it may be read-only")
        case 400 | 422 | 428:
            return InvalidArgument(f"{where}: the server refused the request as wrong{because}")
        case 413:
            advice = because or "; raise its limit (nginx: client_max_body_size)"
            return StorageFull(
                f"{where}: the server, or a proxy before it, takes no object of that length{advice}"
            )
        case 507:
            return StorageFull(f"{where}: the server has no room for it{because}; make room there, then repeat")
        case 429:
            return Throttled(f"{where}: the server gets too many requests{because}", retry_after(answer))
        case 503 if (pause := retry_after(answer)) is not None:
            return Throttled(f"{where}: the server is busy and asks to come back in {pause:g} s{because}", pause)
        case 408 | 409 | 425 | 500 | 502 | 503 | 504:
            return Unavailable(f"{where}: the server can't do it now: it answered {answer.status}{because}")
        case status:
            return Corrupt(f"{where}: the server answered {status}{because}, which is no answer to that request")


def short(where: str, offset: int, end: int, total: int | None = None) -> Corrupt:
    """The error for an object that ends before what is read of it."""
    length = "is shorter" if total is None else f"has only {total}"
    return Corrupt(f"{where}: bytes {offset} to {end} expected, the object {length}; restore it from a copy")


class Sink:
    """Buffers that are filled one after the other; `size` bytes in `count` buffers, `left` to come."""

    def __init__(self, buffers: Buffers) -> None:
        views = [view for view in (memoryview(b).cast("B") for b in buffers) if len(view)]
        self.size = self.left = sum(map(len, views))
        self.count = len(views)
        self._rest = iter(views)
        self.room = next(self._rest, memoryview(b""))
        """What of the next buffer is not filled yet; it is empty when all are."""

    @property
    def full(self) -> bool:
        """Whether every buffer is filled."""
        return not self.room

    def filled(self, size: int) -> None:
        """So many bytes, at least one, have been put into `room`."""
        self.left -= size
        self.room = self.room[size:] if size < len(self.room) else next(self._rest, memoryview(b""))

    def take(self, block: bytes | memoryview) -> bool:
        """Puts the bytes where they belong; False where some are left over."""
        rest = memoryview(block)
        while rest and self.room:
            size = min(len(rest), len(self.room))
            self.room[:size] = rest[:size]
            rest = rest[size:]
            self.filled(size)
        return not len(rest)
