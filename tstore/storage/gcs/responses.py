"""What Google Cloud Storage answers: its JSON resources, and its refusals as the errors of `storage.objects`."""

from __future__ import annotations

import datetime
import email.utils
import re
from typing import Annotated, TypeVar

import msgspec

from tstore.errors import Corrupt, Denied, StorageFull, Throttled, TStoreError, Unavailable
from tstore.storage.gcs.credentials import Login
from tstore.storage.http.reply import Reply
from tstore.storage.http.responses import refusal, retry_after, sanitize

__all__ = ["Listing", "Object", "Problem", "age", "clock", "decoded", "problem", "refused"]

_LONGEST = 8 << 20  # bytes of a page of a list: of a thousand names, of 1024 bytes each, and much escaped
_THROTTLED = ("rateLimitExceeded", "userRateLimitExceeded")
_FULL = ("quotaExceeded", "storageQuotaExceeded")
_DIGEST = re.compile(r"(crc32c|md5).*match", re.IGNORECASE)  # no code of its own tells it


class Object(msgspec.Struct):
    """An object's metadata, as far as they were asked for."""

    name: str = ""
    size: int = 0
    updated: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None
    crc32c: str | None = None
    metadata: dict[str, str] = {}


class Listing(msgspec.Struct, rename="camel"):
    """Some of the objects of a bucket."""

    items: list[Object] = []
    prefixes: list[str] = []
    next_page_token: str | None = None


class _Detail(msgspec.Struct):
    reason: str = ""


class Problem(msgspec.Struct):
    """Why a request was refused."""

    message: str = ""
    errors: list[_Detail] = []


class _Refused(msgspec.Struct):
    error: Problem


T = TypeVar("T", Object, Listing)


async def problem(response: Reply) -> Problem:
    """What an answer that is no success tells, in JSON or (about bytes) in plain text."""
    body = await response.reason()
    try:
        return msgspec.json.decode(body, type=_Refused).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Problem(body[:300].decode("utf-8", "replace"))


def refused(response: Reply, told: Problem, where: str, login: Login, bucket: str) -> TStoreError:
    """The error for an answer that is no success, from its status and its reason."""
    said = sanitize(login.hide(told.message))
    because = f": {said}" if said else ""
    reason = told.errors[0].reason if told.errors else ""
    match response.status:
        case 400 if _DIGEST.search(told.message):  # the body did not arrive as it was sent
            return Unavailable(f"{where}: the server got other bytes than were sent{because}")
        case 401 if login.anonymous:
            return Denied(
                f"{where}: the server wants credentials{because}; log in (gcloud auth application-default "
                "login), set GOOGLE_APPLICATION_CREDENTIALS, or pass storage_options={'token': …}"
            )
        case 401:
            return Denied(
                f"{where}: the server refused the credentials, as wrong or expired{because}; log in again, or "
                "pass another storage_options={'token': …}"
            )
        case 403 if reason in _THROTTLED:
            return Throttled(f"{where}: the server gets too many requests{because}", retry_after(response))
        case 403 if reason in _FULL:
            return StorageFull(f"{where}: a quota is used up{because}")
        case 403:
            return Denied(
                f"{where}: the server forbids it{because}; ask for a role on gs://{bucket} that allows "
                "it (Storage Object User; Storage Object Viewer to read)"
            )
        case 409 | 410:  # another request changes the same object or bucket just now
            return Unavailable(f"{where}: the server can't do it now: it answered {response.status}{because}")
        case _:
            return refusal(response, where, said)


async def decoded(response: Reply, kind: type[T], where: str) -> T:
    """What an answer of success tells; `Corrupt` where it is of another kind."""
    body = await response.whole(where, _LONGEST)
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{where}: what answered is not Google Cloud Storage ({error}); check endpoint_url and "
            "STORAGE_EMULATOR_HOST"
        ) from error


def clock(response: Reply) -> datetime.datetime | None:
    """The time of the answer, by the server's clock."""
    try:
        return email.utils.parsedate_to_datetime(response.headers["Date"])
    except (KeyError, ValueError):
        return None


def age(found: Object, now: datetime.datetime | None) -> float | None:
    """Seconds since the object was written, None where the server does not tell."""
    if now is None or found.updated is None:
        return None
    return max(0.0, (now - found.updated).total_seconds())
