"""Responses of Google Cloud Storage: JSON resources, and refusals as the errors of `Storage`."""

from __future__ import annotations

import datetime
import email.utils
import re
from typing import Annotated, TypeVar

import msgspec

from tstore.errors import Corrupt, Denied, StorageFull, Throttled, TStoreError, Unavailable
from tstore.storage.gcs.credentials import Login
from tstore.storage.http.body import Response
from tstore.storage.http.responses import refusal, retry_after, sanitize

__all__ = ["Listing", "Object", "Problem", "age", "clock", "decoded", "problem", "refused"]

_LONGEST = 8 << 20  # bytes of a page of a list: a thousand names of 1024 bytes each, heavily escaped
_THROTTLED = ("rateLimitExceeded", "userRateLimitExceeded")
_FULL = ("quotaExceeded", "storageQuotaExceeded")
_DIGEST = re.compile(r"(crc32c|md5).*match", re.IGNORECASE)  # a wrong checksum has no error code


class Object(msgspec.Struct):
    """The metadata of an object, as far as requested."""

    name: str = ""
    size: int = 0
    updated: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None
    crc32c: str | None = None
    metadata: dict[str, str] = {}


class Listing(msgspec.Struct, rename="camel"):
    """One page of a listing."""

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


async def problem(response: Response) -> Problem:
    """Return the explanation in an unsuccessful response: JSON, or plain text for a download."""
    body = await response.reason()
    try:
        return msgspec.json.decode(body, type=_Refused).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Problem(body[:300].decode("utf-8", "replace"))


def refused(response: Response, said: Problem, where: str, login: Login, bucket: str) -> TStoreError:
    """Return the error for an unsuccessful response, from its status and its explanation."""
    message = sanitize(login.hide(said.message))
    because = f": {message}" if message else ""
    reason = said.errors[0].reason if said.errors else ""
    match response.status:
        case 400 if _DIGEST.search(said.message):  # the body was damaged on the way
            return Unavailable(f"{where}: the server received other bytes than were sent{because}")
        case 401 if login.anonymous:
            return Denied(
                f"{where}: the server wants credentials{because}; log in (gcloud auth application-default "
                "login), set GOOGLE_APPLICATION_CREDENTIALS, or pass storage_options={'token': …}"
            )
        case 401:
            return Denied(
                f"{where}: the server refused the credentials as wrong or expired{because}; log in again, or "
                "pass another storage_options={'token': …}"
            )
        case 403 if reason in _THROTTLED:
            return Throttled(f"{where}: the server receives too many requests{because}", retry_after(response))
        case 403 if reason in _FULL:
            return StorageFull(f"{where}: a quota is used up{because}")
        case 403:
            return Denied(
                f"{where}: the server forbids it{because}; ask for a role on gs://{bucket} that allows "
                "it (Storage Object User; Storage Object Viewer to read)"
            )
        case 409 | 410:  # a concurrent change of the same object or bucket
            return Unavailable(f"{where}: the server can't do it now: status {response.status}{because}")
        case _:
            return refusal(response, where, message)


async def decoded(response: Response, kind: type[T], where: str) -> T:
    """Return the decoded body of a successful response; raise `Corrupt` if it is not of this kind."""
    body = await response.whole(where, _LONGEST)
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{where}: the server is not Google Cloud Storage ({error}); check endpoint_url and "
            "STORAGE_EMULATOR_HOST"
        ) from error


def clock(response: Response) -> datetime.datetime | None:
    """Return the time of the response by the server's clock."""
    try:
        return email.utils.parsedate_to_datetime(response.headers["Date"])
    except (KeyError, ValueError):
        return None


def age(item: Object, now: datetime.datetime | None) -> float | None:
    """Return the seconds since the object was written, None if unknown."""
    if now is None or item.updated is None:
        return None
    return max(0.0, (now - item.updated).total_seconds())
