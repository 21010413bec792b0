"""One session with an HTTP server: connections, deadlines, redirects, and the token that nobody else may see.

1. A request is sent to the store's own server first. An answer that redirects is followed for reads only, up to
   five times, never from https to http, and never with the token once another origin (scheme, host and port) was
   met. A redirected write is refused: nobody knows what the other place would promise.
2. A token that was passed is sent with every request; one that the environment binds to this server (`http_token`)
   only once the server has asked for a token (401) or, where tstore serves, has refused a request without one
   (403), as the first write where everybody may read. Over http to another machine there is a warning.
3. Nothing else is taken from the environment: no proxy, no .netrc. Cookies are not kept.
4. A body is sent once. The HTTP library sends a request again where a kept connection turns out to be closed;
   for a create that might have landed this would hide that the object is ours. The outcome is unknown, then.
5. A request has the time that `pace` gives it.
6. No error, nor one that led to it, shows a token, whatever a server sends back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from tstore.errors import Corrupt, Denied, InvalidArgument, TStoreError, Unavailable, Unreachable
from tstore.storage import pace as paces
from tstore.storage.base import Buffers
from tstore.storage.http.reply import Reply
from tstore.storage.http.responses import sanitize
from tstore.storage.http.tokens import Token, warn_in_clear
from tstore.storage.pace import Pace

__all__ = ["Session", "address", "trusting"]

_UNREACHABLE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
_REDIRECTS = 5
_FOLLOWED = (301, 302, 303, 307, 308)
_PIECE = 256 << 10


def address(url: str) -> URL:
    """The URL of a store on a server, ending in '/'; `InvalidArgument` for more than scheme, host, port and path.

    A password, a query or a fragment is refused without showing it.
    """
    try:
        found = URL(url)
        _ = found.port  # raises where it is no number
    except ValueError:
        raise InvalidArgument("this is no http(s) URL; expected http://host:port/path") from None
    shown = f"{found.scheme}://{found.host}"
    if found.scheme not in ("http", "https") or not found.host:
        raise InvalidArgument(f"{shown}…: expected http://host:port/path or https://host/path")
    if found.raw_user is not None or found.raw_password is not None:
        raise InvalidArgument(
            f"{shown}: a user or password in a URL ends up in logs; take it out, and pass "
            "storage_options={'token': …}"
        )
    if found.raw_query_string or found.raw_fragment or "?" in url or "#" in url:
        raise InvalidArgument(
            f"{shown}{found.raw_path}: a store's URL has no query and no fragment (? and # in a folder's name are "
            "written %3F and %23); take them out"
        )
    return found.with_path(found.raw_path.rstrip("/") + "/", encoded=True)


def trusting(path: str | os.PathLike[str]) -> ssl.SSLContext:
    """What trusts the certificates in that file besides the system's; `InvalidArgument` where it holds none."""
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(os.fspath(path))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"ca_file {os.fspath(path)} can't be read as certificates (PEM): {error}") from error
    return context


class Session:
    """Requests to one server from one event loop at a time; opened at the first request, again after a fork."""

    def __init__(
        self, home: URL, token: Token | None, trusted: ssl.SSLContext | None, timeout: float | None
    ) -> None:
        self._home = home.origin()
        self._token = token
        self._trusted = trusted
        self._timeout = timeout
        self._client: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forget: weakref.finalize[..., Any]

    def hidden(self, text: str, longest: int = 200) -> str:
        """What a server said, without the token, fit for an error."""
        return sanitize(text if self._token is None else self._token.hide(text), longest)

    @property
    def known(self) -> bool:
        """Whether the server has been shown a token."""
        return self._token is not None and self._token.shown

    def at_home(self, response: Reply) -> bool:
        """Whether an answer is the store's own server's, not one from where that redirected to."""
        return response.url.origin() == self._home

    @contextlib.asynccontextmanager
    async def answer(
        self, method: str, url: URL, fields: dict[str, str], where: str, data: Buffers | None = None
    ) -> AsyncIterator[Reply]:
        """The answer to a request, whatever its status, its body still to be read.

        `Unreachable`, `Unavailable` (no answer, half an answer, too slow a one), `Denied` (its certificate, a
        redirect of a write or from https to http), `Corrupt` (it does not speak HTTP, or redirects without end).
        """
        pace = Pace(self._timeout)
        secret = _authorization(fields).rpartition(" ")[2]

        def hide(text: str) -> str:
            shown = text if self._token is None else self._token.hide(text)
            return shown.replace(secret, "…") if secret else shown

        with _hiding(hide), _mapped(where, pace, lambda text: sanitize(hide(text))):
            async with pace, await self._final(method, url, fields, where, data, pace) as response:
                pace.begin()
                yield Reply(response, pace)

    async def _final(
        self, method: str, url: URL, fields: dict[str, str], where: str, data: Buffers | None, pace: Pace
    ) -> aiohttp.ClientResponse:
        token = self._token
        for _ in range(1 + _REDIRECTS):
            shown = token is not None and token.shown
            response = await self._sent(method, url, fields, data, token if shown else None, pace)
            if token is not None and not shown and _asks(response):
                token.shown = True
                response.close()
                response = await self._sent(method, url, fields, data, token, pace)
            if response.status not in _FOLLOWED:
                return response
            response.close()
            url = self._followed(response, where, method)
            if url.origin() != self._home:
                token = None  # for good: what comes from elsewhere must not lead back with it
                fields = {name: text for name, text in fields.items() if name.lower() != "authorization"}
        raise Corrupt(f"{where}: the server redirects more than {_REDIRECTS} times; check the URL")

    def _followed(self, response: aiohttp.ClientResponse, where: str, method: str) -> URL:
        try:
            target = response.url.join(URL(response.headers.get("Location", ""), encoded=True))
            target = target.with_user(None).with_fragment(None)
            shown = f"{target.origin()}{target.raw_path}"  # its query may hold a signature
        except ValueError:
            raise Corrupt(f"{where}: the server redirects to what is no URL") from None
        if method not in ("GET", "HEAD"):
            raise Denied(f"{where}: the server redirects to {shown}, which is not done for writes; open that URL")
        if target.scheme not in ("http", "https") or (response.url.scheme, target.scheme) == ("https", "http"):
            raise Denied(f"{where}: the server redirects from {response.url.scheme} to {shown}; that is not done")
        return target

    async def _sent(
        self,
        method: str,
        url: URL,
        fields: dict[str, str],
        data: Buffers | None,
        token: Token | None,
        pace: Pace,
    ) -> aiohttp.ClientResponse:
        client = self._opened()
        if token is not None:
            fields = {**fields, "Authorization": token.header}
        if _authorization(fields):
            warn_in_clear(url)
        body = None if data is None else _Body(data, pace)
        return await client.request(method, url, headers=fields, data=body, allow_redirects=False)

    def _opened(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._client is not None and self._loop is not loop:
            self._forget()
        if self._client is None or self._client.closed:
            self._client = aiohttp.ClientSession(
                connector=_Connector(limit=0, ssl=self._trusted or True),  # kv.limits bounds the requests
                timeout=aiohttp.ClientTimeout(total=None, connect=paces.CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": f"tstore aiohttp/{aiohttp.__version__}"},
                auto_decompress=False,
                trust_env=False,
            )
            self._loop = loop
            self._forget = weakref.finalize(self, _forgotten, self._client, loop, os.getpid())
        return self._client

    async def close(self) -> None:
        """Closes every connection; the next request opens the session again."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            self._forget.detach()
            await client.close()
        elif client is not None:
            self._forget()


class _Connector(aiohttp.TCPConnector):
    """Connections of which a forked child forgets its copies without touching them: the parent uses them."""

    def __del__(self, *_: Any) -> None:
        return None


def _forgotten(client: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop, process: int) -> None:
    """Ends a session that nobody closed, on its own loop; only forgets it in a child that was forked."""
    connector = client.connector
    client.detach()
    if connector is not None and process == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(_closed(connector)))


async def _closed(connector: aiohttp.BaseConnector) -> None:
    await connector.close()


class _Body(Payload):
    """Buffers as the body of a request, which is sent once."""

    def __init__(self, data: Buffers, pace: Pace) -> None:
        super().__init__(data, content_type="application/octet-stream")
        self._views = [memoryview(b).cast("B") for b in data]
        self._pace = pace
        self._begun = False

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return sum(map(len, self._views))

    @property
    def consumed(self) -> bool:
        """Whether it was sent, if only in part; the library does not send it again then."""
        return self._begun

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text."""
        return b"".join(self._views).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Sends it."""
        self._begun = True
        self._pace.begin()
        for view in self._views:
            for at in range(0, len(view), _PIECE):
                piece = view[at : at + _PIECE]
                await writer.write(piece)
                self._pace.moved(len(piece))
        self._pace.begin()


def _asks(response: aiohttp.ClientResponse) -> bool:
    """Whether a token may change the answer to a request without one."""
    return response.status == 401 or (response.status == 403 and "X-TStore-Version" in response.headers)


def _authorization(fields: dict[str, str]) -> str:
    return next((text for name, text in fields.items() if name.lower() == "authorization"), "")


@contextlib.contextmanager
def _hiding(hide: Callable[[str], str]) -> Iterator[None]:
    """Leaves no token in an error, should a server have sent it back."""
    try:
        yield
    except TStoreError as error:
        if (hidden := hide(str(error))) != str(error):
            error.args = (hidden, *error.args[1:])
        raise


@contextlib.contextmanager
def _mapped(where: str, pace: Pace, hidden: Callable[[str], str]) -> Iterator[None]:
    """Turns what goes wrong on the way into the errors of `objects`; `hidden` makes a server's words fit."""
    try:
        yield
    except aiohttp.ClientResponseError as error:
        said = _bared(error, hidden)
        raise Corrupt(f"{where}: what answered does not speak HTTP ({said})") from None
    except aiohttp.ConnectionTimeoutError as error:
        raise Unavailable(
            f"{where}: no connection within {paces.CONNECT_SECONDS:g} s; check the address, and that it runs"
        ) from error
    except TimeoutError as error:
        raise Unavailable(f"{where}: {pace.lost}") from error
    except aiohttp.ClientPayloadError as error:
        said = _bared(error, hidden)
        raise Unavailable(f"{where}: the answer broke off ({said})") from None
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
        raise Denied(
            f"{where}: no trusted connection ({sanitize(str(error))}); check that the server speaks https, and "
            "its certificate; a private authority is named by storage_options={'ca_file': …}"
        ) from error
    except aiohttp.ClientConnectorError as error:
        unknown_host = isinstance(error.os_error, socket.gaierror)
        kind = Unreachable if unknown_host or error.errno in _UNREACHABLE else Unavailable
        reason = os.strerror(error.errno) if error.errno in _UNREACHABLE else str(error.os_error.strerror or error)
        raise kind(
            f"{where}: no connection ({sanitize(reason)}); check the address, and that the server runs"
        ) from error
    except aiohttp.InvalidURL as error:
        raise InvalidArgument(f"{where}: this is no URL that can be asked") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"{where}: the connection broke ({sanitize(str(error) or repr(error))})") from error


def _bared(error: aiohttp.ClientError, hidden: Callable[[str], str]) -> str:
    """What an error of the HTTP library tells, which keeps neither headers nor a server's words."""
    said = hidden(error.message if isinstance(error, aiohttp.ClientResponseError) else str(error))
    if isinstance(error, aiohttp.ClientResponseError):
        method = error.request_info.method
        error.request_info = aiohttp.RequestInfo(URL(), method, CIMultiDictProxy(CIMultiDict()), URL())
        error.message, error.headers, error.history = said, None, ()
    error.args = (said,)
    error.__cause__ = error.__context__ = None
    return said
