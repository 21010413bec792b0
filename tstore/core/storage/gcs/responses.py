"""Responses of Google Cloud Storage: JSON resources, and refusals as the errors of `Storage`."""

from __future__ import annotations

import datetime
import email.utils
import re
from typing import Annotated, TypeVar

import msgspec

from tstore.core.storage.gcs.credentials import Credentials
from tstore.core.storage.http.body import Response
from tstore.core.storage.http.responses import FORBIDDEN, retry_after, sanitize, status_error
from tstore.errors import (
    Corrupt,
    Denied,
    InvalidArgument,
    StorageFull,
    TemporaryFailure,
    Throttled,
    TStoreError,
)

__all__ = [
    "ListPage",
    "Metadata",
    "Problem",
    "age",
    "decode",
    "mapped_error",
    "read_problem",
    "says_no_object",
    "server_time",
]

_MAX_SIZE = 8 << 20  # bytes of a page of a listing: a thousand names of 1024 bytes each, heavily escaped
_THROTTLED = ("rateLimitExceeded", "userRateLimitExceeded")
_FULL = ("quotaExceeded", "storageQuotaExceeded")
_DIGEST = re.compile(r"(crc32c|md5).*match", re.IGNORECASE)  # a wrong checksum has no error code


class Metadata(msgspec.Struct):
    """The metadata of an object, as far as requested."""

    name: str = ""
    size: int = 0
    updated: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None
    crc32c: str | None = None
    metadata: dict[str, str] = {}


class ListPage(msgspec.Struct, rename="camel"):
    """One page of a listing."""

    items: list[Metadata] = []
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


T = TypeVar("T", Metadata, ListPage)


async def read_problem(response: Response) -> Problem:
    """Return the explanation in an unsuccessful response: JSON, or plain text for a download."""
    body = await response.read_reason()
    try:
        return msgspec.json.decode(body, type=_Refused).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Problem(body[:300].decode("utf-8", "replace"))


def says_no_object(problem: Problem) -> bool:
    """Return whether a 404 is about an object, as opposed to its bucket."""
    return problem.message.startswith("No such object")


def mapped_error(
    response: Response, problem: Problem, label: str, credentials: Credentials, bucket: str
) -> TStoreError:
    """Return the error of `Storage` for an unsuccessful response."""
    message = sanitize(credentials.hide(problem.message))
    because = f": {message}" if message else ""
    reason = problem.errors[0].reason if problem.errors else ""
    match response.status:
        case 400 if _DIGEST.search(problem.message):  # the body was damaged in transit
            return TemporaryFailure(f"{label}: the server received different bytes from those sent{because}")
        case 400 if "requester pays" in problem.message.lower():
            return InvalidArgument(
                f"{label}: gs://{bucket} lets requesters pay{because}; pass "
                "storage_options={'requester_pays': …} with the project that pays"
            )
        case 401 if credentials.anonymous:
            return Denied(
                f"{label}: the server requires credentials{because}; log in (gcloud auth application-default "
                "login), set GOOGLE_APPLICATION_CREDENTIALS, or pass storage_options={'token': …} "
                f"({FORBIDDEN})"
            )
        case 401:
            return Denied(
                f"{label}: the server refused the credentials as wrong or expired{because}; log in again, or "
                "pass another storage_options={'token': …}"
            )
        case 403 if reason in _THROTTLED:
            return Throttled(
                f"{label}: the server receives too many requests{because}", retry_after(response.headers)
            )
        case 403 if reason in _FULL:
            return StorageFull(f"{label}: a quota is used up{because}")
        case 403:
            return Denied(
                f"{label}: the server forbids the request{because}; ask for a role on gs://{bucket} that allows "
                f"it (Storage Object User; Storage Object Viewer to read; {FORBIDDEN})"
            )
        case 410:  # a concurrent change of the same object or bucket
            return TemporaryFailure(f"{label}: the server can't serve it now: status 410{because}")
        case _:
            return status_error(response, label, message)


async def decode(response: Response, resource_type: type[T], label: str) -> T:
    """Return the JSON resource in a successful response; raise `Corrupt` if it is not of this type."""
    body = await response.read_all(label, _MAX_SIZE)
    try:
        return msgspec.json.decode(body, type=resource_type, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{label}: the server is not Google Cloud Storage ({error}); check endpoint_url and "
            "STORAGE_EMULATOR_HOST"
        ) from error


def server_time(response: Response) -> datetime.datetime | None:
    """Return the time of the response by the server's clock, None if unknown."""
    try:
        return email.utils.parsedate_to_datetime(response.headers["Date"])
    except (KeyError, ValueError):
        return None


def age(item: Metadata, now: datetime.datetime | None) -> float | None:
    """Return the seconds since the object was written, None if unknown."""
    if now is None or item.updated is None:
        return None
    return max(0.0, (now - item.updated).total_seconds())
