"""Credentials for Google Cloud Storage, in all forms that gcsfs accepts, and the headers made from them.

1. Without a token the credentials are those of the environment (GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth
   application-default login`, the service account of the machine), if there are any. An endpoint that is not
   Google's gets none: an emulator, or any other server, must not learn them.
2. A string that is neither a method of gcsfs ("cloud") nor a file is an access token. It is sent to the store's
   endpoint only; gcsfs would also send it to Google's token service.
3. Finding and renewing credentials makes requests to other servers and may take seconds, so it runs in the thread
   pool.
4. A token is used until it expires. google.auth wants a new one some minutes before, which is then fetched in the
   background. So neither a slow nor a failing token service affects requests in these minutes; they wait for a
   token only if there is no usable one.
5. A token service or metadata server that fails temporarily, or is silent for as long as no server may be, is a
   `TemporaryFailure`, which `retry` repeats.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any
from urllib.parse import urlsplit

from tstore.core.runtime.event_loops import PerLoop
from tstore.core.runtime.pool import run
from tstore.core.storage.http.responses import is_temporary
from tstore.core.storage.limits import Deadline
from tstore.errors import Denied, InvalidArgument, TemporaryFailure, TStoreError

__all__ = ["Credentials"]

_METHODS = ("anon", "google_default", "cloud", "cache")
_RENEWAL_PAUSE = 10.0  # seconds after a renewal failed, while the token can still be used

_log = logging.getLogger("tstore.storage")


class Credentials:
    """The credentials for one endpoint, found at the first use; its repr does not show them."""

    def __init__(self, url: str, token: object, endpoint_url: str | None) -> None:
        self._url = url
        self._token = token
        self._endpoint_url = endpoint_url
        self._file_system: Any = None  # a gcsfs file system; only its endpoint and credentials are used
        self._lock = PerLoop(asyncio.Lock)
        self._renewal = PerLoop(_Renewal)

    async def endpoint(self) -> str:
        """Return the URL of the server, such as `https://storage.googleapis.com`, by gcsfs's rules."""
        if self._file_system is None:
            async with self._lock.get():
                if self._file_system is None:
                    self._file_system = await run(self._discover)
        base: str = self._file_system.base
        return base.removesuffix("/storage/v1/").rstrip("/")

    async def headers(self) -> dict[str, str]:
        """Return the headers that authorize a request, {} if anonymous.

        Raise `InvalidArgument` for an invalid token, `Denied` if there are no usable credentials, and
        `TemporaryFailure` if credentials cannot be obtained now.
        """
        await self.endpoint()
        headers: dict[str, str] = {}
        credentials = self._google_credentials
        if credentials is not None:
            if not credentials.valid:  # False from some minutes before they expire
                from google.auth.credentials import TokenState

                is_usable = credentials.token_state is not TokenState.INVALID
                renewal = self._renewing(credentials, is_usable)
                if not is_usable and renewal is not None:
                    await self._wait(renewal)
            credentials.apply(headers)
        return headers

    async def renew(self, sent: dict[str, str]) -> bool:
        """Renew the credentials after a server refused the headers `sent`; return False if that is impossible."""
        credentials = self._google_credentials
        if credentials is None or getattr(credentials, "refresh_token", True) is None:
            return False  # anonymous, or an access token that was passed
        current: dict[str, str] = {}
        credentials.apply(current)
        if current.items() <= sent.items():  # no other task has renewed them since
            renewal = self._renewing(credentials, is_usable=False)
            assert renewal is not None
            await self._wait(renewal)
        return True

    async def _wait(self, renewal: asyncio.Task[None]) -> None:
        """Wait for a renewal as long as for any response; raise `TemporaryFailure` if it takes longer."""
        deadline = Deadline()
        try:
            async with deadline:
                await asyncio.shield(renewal)
        except TimeoutError as error:
            raise TemporaryFailure(
                f"{self._url}: credentials can't be obtained now ({deadline.message}); try again"
            ) from error

    def _renewing(self, credentials: Any, is_usable: bool) -> asyncio.Task[None] | None:
        """Return the renewal in progress or a new one; None if one of a usable token failed a moment ago."""
        state, clock = self._renewal.get(), asyncio.get_running_loop().time

        async def renew() -> None:
            try:
                await run(self._with_mapped_errors, _renew, credentials)
            except TStoreError as error:
                state.not_before = clock() + _RENEWAL_PAUSE
                _log.info("%s: the access token was not renewed: %s", self._url, error)
                raise

        if state.task is None or state.task.done():
            if is_usable and clock() < state.not_before:
                return None
            state.task = asyncio.create_task(renew())
            state.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is logged
        return state.task

    @property
    def anonymous(self) -> bool:
        """Whether requests carry no credentials."""
        return self._google_credentials is None

    def hide(self, text: str) -> str:
        """Return the text without the access token, in case a server sent it back."""
        token = getattr(self._google_credentials, "token", None)
        return text.replace(token, "…") if token else text

    def __repr__(self) -> str:
        return "<Credentials …>"

    @property
    def _google_credentials(self) -> Any:
        """The credentials as an object of google.auth, None if requests carry none."""
        return None if self._file_system is None else self._file_system.credentials.credentials

    def _discover(self) -> Any:
        """Return a file system of gcsfs with the endpoint and the credentials that rules 1 and 2 determine."""
        # gcsfs.GCSFileSystem, a subclass of this one, would ask Google by gRPC for the type of the bucket
        from gcsfs.core import GCSFileSystem

        def file_system(token: object) -> Any:
            return GCSFileSystem(
                token=token,
                project="",
                endpoint_url=self._endpoint_url,
                access="read_write",
                asynchronous=True,
                skip_instance_cache=True,
                use_listings_cache=False,
            )

        anonymous, token = file_system("anon"), self._token
        if token is None:
            host = urlsplit(anonymous.base).hostname or ""
            domain = os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"
            if not host.endswith(f".{domain}"):
                return anonymous
            return self._with_mapped_errors(self._from_environment, file_system, anonymous)
        if isinstance(token, str) and token not in _METHODS and not os.path.exists(token):
            token = self._from_access_token(token)
        return self._with_mapped_errors(file_system, token)

    def _from_environment(self, file_system: Any, anonymous: Any) -> Any:
        from google.auth.exceptions import DefaultCredentialsError

        try:
            return file_system("google_default")
        except DefaultCredentialsError:
            if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
                raise
            return anonymous

    def _from_access_token(self, token: str) -> object:
        from google.oauth2 import credentials

        if token.endswith(".json") or token.startswith(("/", "./", "../", "~")):
            raise InvalidArgument(
                f"{self._url}: the file {token}, which storage_options['token'] names, does not exist"
            )
        if not token or not all("!" <= c <= "~" for c in token):
            raise InvalidArgument(
                f"{self._url}: storage_options['token'] is empty, or has invalid characters "
                f"(spaces, line breaks); expected an access token, a file of credentials, or one of "
                f"{', '.join(_METHODS)}"
            )
        credentials_class: Any = credentials.Credentials  # untyped
        return credentials_class(token)

    def _with_mapped_errors(self, call: Any, *arguments: object) -> Any:
        from google.auth.exceptions import GoogleAuthError

        try:
            return call(*arguments)
        except (GoogleAuthError, ValueError, KeyError, OSError) as error:
            if _is_temporary(error):
                raise TemporaryFailure(
                    f"{self._url}: credentials can't be obtained now ({error}); try again"
                ) from error
            raise Denied(
                f"{self._url}: no usable credentials ({type(error).__name__}: {error}); log in again "
                "(gcloud auth application-default login), or correct GOOGLE_APPLICATION_CREDENTIALS or "
                "storage_options={'token': …}"
            ) from error


def _renew(credentials: Any) -> None:
    import requests
    from google.auth.transport.requests import Request

    with requests.Session() as session:
        credentials.refresh(Request(session))


class _Renewal:
    """The renewal of the credentials on one event loop."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.not_before = 0.0  # when to renew a token that can still be used, by the clock of the loop


def _is_temporary(error: BaseException) -> bool:
    """Return whether a token service or metadata server could not be reached, or failed temporarily."""
    from google.auth.exceptions import GoogleAuthError, TransportError

    if isinstance(error, GoogleAuthError) and error.retryable:
        return True
    if isinstance(error, TransportError):
        # the metadata server's response is an argument of the error if it was a lasting refusal
        statuses = [status for status in (getattr(a, "status", None) for a in error.args) if status is not None]
        return all(map(is_temporary, statuses))
    return isinstance(error, GoogleAuthError) and error.__cause__ is not None and _is_temporary(error.__cause__)
