"""Responses of an S3 server: limits of their size, no redirects, and error responses as the errors of `Storage`.

The body of an object is streamed, and `store` limits it. botocore reads all other responses (listings, error
responses) whole. If reading or parsing a response fails, its connection stays open until `closing_responses`
closes it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Self

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiohttp.connector import Connection
from botocore import exceptions as boto
from botocore.loaders import create_loader
from multidict import CIMultiDict

from tstore.core.storage.http.responses import FORBIDDEN, is_temporary, retry_after, sanitize
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
    Unavailable,
    Unreachable,
)

__all__ = ["BoundedSession", "closing_responses", "mapped_error", "new_session", "status_of"]

_MISSING = {"NoSuchKey", "404", "NotFound"}
_DENIED = {"AccessDenied", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"}
# from the token service, with status 400
_DENIED |= {"ExpiredTokenException", "InvalidIdentityToken", "InvalidClientTokenId", "UnrecognizedClientException"}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_BUSY |= {"ThrottledException", "RequestThrottled", "RequestThrottledException", "TooManyRequestsException"}
_BUSY |= {"BandwidthLimitExceeded", "LimitExceededException", "PriorRequestNotComplete"}
_FULL = {"EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_TRANSIENT = {
    "RequestTimeout",
    "RequestTimeoutException",
    "IDPCommunicationError",
}  # with status 400; other temporary failures are known by their status
# with status 400: the body was damaged in transit
_TRANSIENT |= {"IncompleteBody", "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}

_NETWORK = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError)
_NO_TOKEN = (boto.CredentialRetrievalError, boto.MetadataRetrievalError)  # a process or a server gave none
# by name, because older versions lack some: the credentials are missing, incomplete or expired
_LOG_IN = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "UnknownCredentialError"}
_LOG_IN |= {"SSOError", "LoginError", "TokenRetrievalError", "NoAuthTokenError", "RefreshWithMFAUnsupportedError"}

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_RESPONSES = 8  # responses per request: botocore finds the region of a bucket, and sends the request again

_MAX_LISTING_BYTES = 4 << 20  # a thousand names of 1024 bytes each, all of them escaped
_MAX_REFUSAL_BYTES = 64 << 10

_received: ContextVar[list[aiohttp.ClientResponse] | None] = ContextVar("tstore_s3_responses", default=None)


def mapped_error(url: str, bucket: str, action: str, key: str, error: Exception) -> TStoreError:
    """Return the error of `Storage` for an error of botocore, of the HTTP client, or of the network."""
    failure = f"{url}: can't {action} {key!r}"
    if isinstance(error, boto.ClientError):
        return _refusal(action, failure, error, bucket)
    reason = sanitize(str(error)) or type(error).__name__
    if not _LOG_IN.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return Denied(
            f"{failure}: {reason}; log in again (aws sso login), pass storage_options={{'key': …, 'secret': …}} "
            "or {'anon': True}, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, _NO_TOKEN):
        return TemporaryFailure(f"{failure}: credentials can't be obtained now ({reason}); try again")
    if isinstance(error, boto.SSLError):
        return Denied(
            f"{failure}: no trusted connection ({reason}); check that the server speaks https, and check its "
            "certificate; name a private authority in AWS_CA_BUNDLE, or as client_kwargs={'verify': FILE}"
        )
    if isinstance(error, (boto.BotoCoreError, ValueError)) and not isinstance(error, (OSError, *_NETWORK)):
        return InvalidArgument(f"{failure}: {reason}; check the URL, storage_options and the settings of AWS")
    cause = getattr(error, "kwargs", {}).get("error")
    if isinstance(cause, TStoreError):  # raised by `BoundedSession`
        return type(cause)(f"{failure}: {cause}")
    error_type = Unreachable if isinstance(error, boto.EndpointConnectionError) else Unavailable
    return error_type(f"{failure}: {reason}; check endpoint_url, or try again")


def _refusal(action: str, failure: str, error: Any, bucket: str) -> TStoreError:
    """Return the error of `Storage` for an error response."""
    refusal, status = error.response.get("Error", {}), status_of(error)
    code = sanitize(str(refusal.get("Code", "")), 60)
    reason = sanitize(str(refusal.get("Message") or code))
    message = f"{failure}: {reason} ({code}, status {status})"
    if code == "NoSuchBucket" or (status == 404 and action in ("write", "list")):
        return InvalidArgument(f"{message}; bucket {bucket} does not exist: check the URL, or create it")
    if code in _MISSING or (status == 404 and not code):
        return NotFound(message)
    if code == "PreconditionFailed" or status == 412:
        return AlreadyExists(f"{failure}: it already exists")
    if code in _FULL or status in (413, 507):
        return StorageFull(f"{message}; free space or raise the quota, then repeat")
    headers = CIMultiDict(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
    temporary = code in _TRANSIENT or (status is not None and is_temporary(status))
    if code in _BUSY or status == 429 or (temporary and "Retry-After" in headers):
        return Throttled(f"{message}; make fewer requests at once", retry_after(headers))
    if temporary:
        return TemporaryFailure(f"{message}; try again")
    if code == "RequestTimeTooSkewed":
        return Denied(f"{message}; the clock of this machine is wrong; set it")
    if code in _DENIED or status in (401, 402, 403, 407, 451, 511):
        note = f" ({FORBIDDEN})" if status == 403 and action in ("read", "stat") else ""
        return Denied(
            f"{message}; check the credentials and the rights of their owner on bucket {bucket!r}{note}; if its "
            "requesters pay, pass storage_options={'requester_pays': True}"
        )
    if status in _REDIRECTS:
        return Denied(f"{message}; redirects are not followed: check endpoint_url and the region of the bucket")
    if status in (405, 501, 505):
        return Denied(f"{message}; the server lacks a feature that a store needs; use another server")
    return InvalidArgument(f"{message}; check the URL and storage_options")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error of botocore, None if it has none."""
    response = getattr(error, "response", None)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    return status if isinstance(status, int) else None


def new_session(profile: str | None) -> Any:
    """Return a session that shares the service descriptions of botocore with all others; loading them is slow."""
    session = AioSession(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


_loader = functools.cache(create_loader)


@contextlib.contextmanager
def closing_responses() -> Iterator[None]:
    """Close the connections of the responses received in this block that were not read to their end."""
    received: list[aiohttp.ClientResponse] = []
    reset_token = _received.set(received)
    try:
        yield
    finally:
        _received.reset(reset_token)
        for response in received:
            if not response.closed:
                response.close()


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]
    """An HTTP session for botocore that limits the size of responses in memory, and follows no redirects.

    botocore itself follows those to another region, and signs the request for it. aiohttp would send the body and
    the session token of the credentials to any server.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._response_class = _BoundedResponse  # aiobotocore has no setting for this
        return _WithoutRedirects(session)


class _WithoutRedirects:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, method: str, **arguments: Any) -> aiohttp.ClientResponse:
        return await self._session.request(method, allow_redirects=False, **arguments)


class _BoundedResponse(aiohttp.ClientResponse):
    async def start(self, connection: Connection) -> Self:
        """Wait for the head of the response, and register the response for `closing_responses`."""
        await super().start(connection)
        if (received := _received.get()) is not None:
            received.append(self)
            if len(received) > _MAX_RESPONSES:
                raise Denied("the server redirects without end; check endpoint_url and the region of the bucket")
        return self

    async def read(self) -> bytes:
        """Return the body, or only its beginning if it is a long error response."""
        if self._body is None:
            body = bytearray()
            async for block in self.content.iter_any():
                body += block
                if self.status >= 300 and len(body) > _MAX_REFUSAL_BYTES:
                    self.close()
                    break
                if len(body) > _MAX_LISTING_BYTES:
                    self.close()
                    raise Corrupt(f"the server sent more than {_MAX_LISTING_BYTES} bytes; check endpoint_url")
            self._body = bytes(body)
        return self._body
