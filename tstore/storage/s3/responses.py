"""Refusals of an S3 server, and failures of the network, as the errors of `Storage`."""

from __future__ import annotations

from typing import Any

from tstore.errors import (
    AlreadyExists,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    Throttled,
    TStoreError,
    Unavailable,
    Unreachable,
)
from tstore.storage.http.responses import sanitize

__all__ = ["explained", "status_of"]

_MISSING = {"NoSuchKey", "404", "NotFound"}
_DENIED = {"AccessDenied", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "429"}
_FULL = {"EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_LATER = {
    "RequestTimeout",
    "ConditionalRequestConflict",
    "OperationAborted",
    "InternalError",
    "ServiceUnavailable",
}
_LATER |= {"IncompleteBody", "BadDigest", "XAmzContentChecksumMismatch"}  # the body was damaged on the way


def explained(url: str, action: str, key: str, error: Exception) -> TStoreError:
    """Return the error of tstore for one of botocore, of the HTTP client, or of the network."""
    from botocore import exceptions as boto

    what = f"{url}: can't {action} {key!r}"
    if isinstance(error, boto.ClientError):
        return _refused(action, what, error, url.split("/")[2])
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)):
        return Denied(
            f"{what}: {sanitize(str(error))}; pass storage_options={{'key': …, 'secret': …}} or {{'anon': True}}, "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, (boto.ParamValidationError, ValueError)) and not isinstance(error, OSError):
        return InvalidArgument(f"{what}: {sanitize(str(error))}; mend the URL or storage_options")
    inside = getattr(error, "kwargs", {}).get("error")
    if isinstance(inside, TStoreError):  # of `session`
        return type(inside)(f"{what}: {inside}")
    kind = Unreachable if isinstance(error, boto.EndpointConnectionError) else Unavailable
    return kind(f"{what}: {sanitize(str(error)) or type(error).__name__}; check endpoint_url, or try again")


def _refused(action: str, what: str, error: Any, bucket: str) -> TStoreError:
    refusal, status = error.response.get("Error", {}), status_of(error)
    code = sanitize(str(refusal.get("Code", "")), 60)
    said = f"{what}: {sanitize(str(refusal.get('Message') or code))} ({code}, status {status})"
    if code == "NoSuchBucket" or (status == 404 and action == "write"):
        return InvalidArgument(f"{said}; bucket {bucket} does not exist: create it first, or check the URL")
    if code in _MISSING or (status == 404 and not code):
        return NotFound(said)
    if code == "PreconditionFailed" or status == 412:
        return AlreadyExists(f"{what}: it exists already")
    if code in _BUSY or (status == 503 and "rate" in said):
        after = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
        return Throttled(f"{said}; make fewer requests at once", float(after) if after.isdigit() else None)
    if code in _FULL or status in (413, 507):
        return StorageFull(f"{said}; free space or raise the quota, then repeat")
    if code in _LATER or status == 409 or (status is not None and status >= 500 and status != 501):
        return Unavailable(f"{said}; try again")
    if code == "RequestTimeTooSkewed":
        return Denied(f"{said}; the clock of this machine is wrong; set it")
    if code in _DENIED or status in (401, 403):
        return Denied(f"{said}; check the credentials and the rights of their owner on bucket {bucket!r}")
    if status == 501:
        return Denied(f"{said}; the server lacks a feature that a store needs; use another server")
    return InvalidArgument(f"{said}; check the URL and storage_options")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore, None where it has none."""
    response = getattr(error, "response", None)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    return status if isinstance(status, int) else None
