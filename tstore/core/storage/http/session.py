"""One session with an HTTP server: connections, deadlines, redirects, and a token that no other server sees.

1. A request goes to the store's server first. Redirects are followed for reads only, up to five times, and never
   from https to http. The token is dropped at the first redirect to another origin (scheme, host and port). A
   redirected write is refused: it is unknown what the other server guarantees.
2. A token that was passed is sent with every request. A token that the environment binds to this server (`tokens`)
   is sent only after the server has asked for one (401) or, if it is a `tstore serve`, has refused a request
   without one (403), such as the first write to a store that everybody may read. A warning is given if a token
   goes over http to another machine.
3. Nothing else is taken from the environment, such as a .netrc. A proxy is used only if the caller passes one.
   Cookies are not stored.
4. A body is sent once. The HTTP library would repeat a request if a kept-alive connection turns out to be closed.
   After a create that took effect, the repetition would find the key taken. Instead the error is `Unavailable`.
5. `limits.Deadline` bounds the time of a request.
6. Neither an error nor its cause shows a token, even if a server sends one back.

A server has a long time to respond to a long body (`limits.Deadline`). If its machine has vanished, or something
in between has dropped the connection silently, the kernel breaks the connection within two minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import re
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from tstore.core.runtime.event_loops import PerLoop
from tstore.core.storage import limits
from tstore.core.storage.http.body import Response
from tstore.core.storage.http.responses import is_temporary, sanitize
from tstore.core.storage.http.tokens import Token, warn_if_cleartext
from tstore.core.storage.limits import Deadline
from tstore.core.storage.objects import Buffers
from tstore.errors import (
    Corrupt,
    Denied,
    InvalidArgument,
    TemporaryFailure,
    TStoreError,
    Unavailable,
    Unreachable,
)

__all__ = ["Session", "environment_proxy", "open_socket", "parse_address", "tls_context"]

_GONE_SECONDS = 120
_OPTIONS = {  # as far as the system has them
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 30,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 1000 * _GONE_SECONDS,
}

_Address = tuple[int, int, int, str, tuple[object, ...]]


def open_socket(address: _Address) -> socket.socket:
    """Return a socket for an address as `socket.getaddrinfo` returns it."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError:
        made.close()
        raise
    return made


_UNREACHABLE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 256 << 10
_MAX_HOST_LENGTH = 253


def parse_address(url: str) -> URL:
    """Return the URL of a store on a server, ending in '/'.

    Raise `InvalidArgument`, which shows no secrets, if it is invalid or has more than scheme, host, port and path.
    """
    try:
        parsed = URL(url)
        _ = parsed.port  # raises if it is not a number
    except ValueError:
        raise InvalidArgument(
            f"{_authority(url)}: the host or port is invalid; expected http://host:port/path, with a port "
            "from 1 to 65535, and an IPv6 address in brackets"
        ) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidArgument(f"{_authority(url)}: no host; expected http://host:port/path or https://host/path")
    shown = f"{parsed.scheme}://{parsed.host}"
    if parsed.raw_user is not None or parsed.raw_password is not None:
        raise InvalidArgument(
            f"{shown}: a user or password in a URL ends up in logs; remove it, and pass "
            "storage_options={'token': …}"
        )
    if parsed.raw_query_string or parsed.raw_fragment or "?" in url or "#" in url:
        raise InvalidArgument(
            f"{shown}{parsed.raw_path}: a store's URL has no query and no fragment (? and # in a folder's name "
            "are written %3F and %23); remove them"
        )
    return parsed.with_path(parsed.raw_path.rstrip("/") + "/", encoded=True)


def _authority(url: str) -> str:
    """Return the scheme, host and port of an invalid URL, or the scheme alone if it may have a password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://" + ("…" if "@" in rest else sanitize(re.split("[/?#]", rest)[0][:_MAX_HOST_LENGTH]))


def tls_context(path: str | os.PathLike[str]) -> ssl.SSLContext:
    """Return a TLS context that trusts the system's certificates and those in a file.

    Raise `InvalidArgument` if the file can't be read.
    """
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(os.fspath(path))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"ca_file {os.fspath(path)} can't be read as certificates (PEM): {error}") from error
    return context


class Session:
    """Requests to one server; connections are opened for each event loop, and again after a fork."""

    def __init__(
        self,
        url: URL,
        token: Token | None,
        tls: ssl.SSLContext | None,
        timeout: float | None,
        proxy: URL | None = None,
    ) -> None:
        self._origin = url.origin()
        self._token = token
        self._proxy = proxy
        self._timeout = timeout
        self._clients = PerLoop(functools.partial(_Client, tls))

    def sanitize(self, text: str, max_length: int = 200) -> str:
        """Return a server's text without the token, fit for an error message."""
        return sanitize(text if self._token is None else self._token.hide(text), max_length)

    @property
    def sends_token(self) -> bool:
        """Whether every request carries a token: one was passed, or the server has asked for one."""
        return self._token is not None and self._token.preemptive

    def is_same_origin(self, response: Response) -> bool:
        """Return whether a response is from the store's server, not from the target of a redirect."""
        return response.url.origin() == self._origin

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: URL, headers: dict[str, str], label: str, data: Buffers | None = None
    ) -> AsyncIterator[Response]:
        """Yield the response to a request, of any status, before its body is read.

        Raise `Unreachable`, `Unavailable` (no response, or an incomplete or slow one), `Denied` (the certificate,
        a redirect of a write or from https to http), `Corrupt` (not HTTP, endless redirects).
        """
        deadline = Deadline(self._timeout)
        secret = _authorization(headers).rpartition(" ")[2]  # from a caller with credentials, such as `gcs`

        def hide(text: str) -> str:
            shown = text if self._token is None else self._token.hide(text)
            return shown.replace(secret, "…") if secret else shown

        with _hidden_tokens(hide), _mapped_errors(label, deadline, lambda text: sanitize(hide(text))):
            async with deadline, await self._send(method, url, headers, label, data, deadline) as response:
                deadline.start_phase()
                yield Response(response, deadline)

    async def _send(
        self, method: str, url: URL, headers: dict[str, str], label: str, data: Buffers | None, deadline: Deadline
    ) -> aiohttp.ClientResponse:
        token = self._token
        for _ in range(1 + _MAX_REDIRECTS):
            first_token = token if token is not None and token.preemptive else None
            response = await self._send_once(method, url, headers, data, first_token, deadline)
            if token is not None and first_token is None and _wants_token(response):
                token.preemptive = True
                response.close()
                response = await self._send_once(method, url, headers, data, token, deadline)
            if response.status not in _REDIRECTS:
                return response
            response.close()
            url = self._redirect_target(response, label, method)
            if url.origin() != self._origin:
                token = None  # for good, even if that server redirects back
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        raise Corrupt(f"{label}: the server redirects more than {_MAX_REDIRECTS} times; check the URL")

    def _redirect_target(self, response: aiohttp.ClientResponse, label: str, method: str) -> URL:
        try:
            target = response.url.join(URL(response.headers.get("Location", ""), encoded=True))
            target = target.with_user(None).with_fragment(None)
            shown = f"{target.origin()}{target.raw_path}"  # without the query, which may be a signature
        except ValueError:
            raise Corrupt(f"{label}: the server redirects to an invalid URL") from None
        if method not in ("GET", "HEAD"):
            raise Denied(
                f"{label}: the server redirects a write to {shown}, which is refused; open the store there"
            )
        if target.scheme not in ("http", "https") or (response.url.scheme, target.scheme) == ("https", "http"):
            raise Denied(f"{label}: the server redirects from {response.url.scheme} to {shown}, which is refused")
        return target

    async def _send_once(
        self,
        method: str,
        url: URL,
        headers: dict[str, str],
        data: Buffers | None,
        token: Token | None,
        deadline: Deadline,
    ) -> aiohttp.ClientResponse:
        if token is not None:
            headers = {**headers, "Authorization": token.header}
        if _authorization(headers):
            warn_if_cleartext(url)
        body = None if data is None else _Body(data, deadline)
        client = self._clients.get().session
        return await client.request(
            method, url, headers=headers, data=body, allow_redirects=False, proxy=self._proxy
        )

    async def close(self) -> None:
        """Close every connection; the next request opens the session again."""
        client = self._clients.pop()
        if client is not None:
            await client.close()


class _Client:
    """The connections of one event loop, closed when this object is garbage-collected."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self.session = aiohttp.ClientSession(
            # `LimitedStorage` bounds the requests
            connector=_Connector(limit=0, ssl=tls or True, socket_factory=open_socket),
            timeout=aiohttp.ClientTimeout(total=None, connect=limits.CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": f"tstore aiohttp/{aiohttp.__version__}"},
            auto_decompress=False,
            trust_env=False,
        )
        self._finalizer = weakref.finalize(self, _abandon, self.session, asyncio.get_running_loop(), os.getpid())

    async def close(self) -> None:
        self._finalizer.detach()
        await self.session.close()


class _Connector(aiohttp.TCPConnector):
    """Connections that stay open when they are garbage-collected: a forked child shares them with its parent."""

    def __del__(self, *_: Any) -> None:
        return None


def _abandon(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop, process: int) -> None:
    """Close a session on its loop; in a forked child, leave that to the parent."""
    connector = session.connector
    session.detach()
    if connector is not None and process == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(_close(connector)))


async def _close(connector: aiohttp.BaseConnector) -> None:
    await connector.close()


class _Body(Payload):
    """Buffers as the body of a request that is sent once."""

    def __init__(self, data: Buffers, deadline: Deadline) -> None:
        super().__init__(data, content_type="application/octet-stream")
        self._views = [memoryview(b).cast("B") for b in data]
        self._deadline = deadline
        self._started = False

    @property
    def size(self) -> int:
        return sum(map(len, self._views))

    @property
    def consumed(self) -> bool:
        """Whether part of the body was sent; the library then does not send it again."""
        return self._started

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._views).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        self._started = True
        self._deadline.start_phase()
        for view in self._views:
            for at in range(0, len(view), _PIECE):
                piece = view[at : at + _PIECE]
                await writer.write(piece)
                self._deadline.extend(len(piece))
        self._deadline.await_response()


def _wants_token(response: aiohttp.ClientResponse) -> bool:
    """Return whether the server probably refused the request because it had no token."""
    return response.status == 401 or (response.status == 403 and "X-TStore-Version" in response.headers)


def _authorization(headers: dict[str, str]) -> str:
    return next((value for name, value in headers.items() if name.lower() == "authorization"), "")


@contextlib.contextmanager
def _hidden_tokens(hide: Callable[[str], str]) -> Iterator[None]:
    """Remove tokens from errors, in case a server has sent one back."""
    try:
        yield
    except TStoreError as error:
        if (hidden := hide(str(error))) != str(error):
            error.args = (hidden, *error.args[1:])
        raise


@contextlib.contextmanager
def _mapped_errors(label: str, deadline: Deadline, clean: Callable[[str], str]) -> Iterator[None]:
    """Map failures of the network to the errors of `Storage`; `clean` makes a server's text fit for a message."""
    try:
        yield
    except aiohttp.ClientHttpProxyError as error:
        kind = TemporaryFailure if is_temporary(error.status) else Denied
        raise kind(
            f"{label}: the proxy refused the connection with status {error.status} ({_strip(error, clean)}); "
            "check HTTPS_PROXY, and list servers that need no proxy in NO_PROXY"
        ) from None
    except aiohttp.ClientResponseError as error:
        raise Corrupt(f"{label}: the server does not speak HTTP ({_strip(error, clean)}); check the URL") from None
    except aiohttp.ConnectionTimeoutError as error:
        raise Unavailable(
            f"{label}: no connection within {limits.CONNECT_SECONDS:g} s; check the address and the server"
        ) from error
    except TimeoutError as error:
        raise Unavailable(f"{label}: {deadline.message}") from error
    except aiohttp.ClientPayloadError as error:
        raise Unavailable(f"{label}: the response broke off ({_strip(error, clean)}); try again") from None
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
        raise Denied(
            f"{label}: no trusted connection ({sanitize(str(error))}); check that the server speaks https, and "
            "check its certificate; pass a private authority as storage_options={'ca_file': …}"
        ) from error
    except aiohttp.ClientConnectorError as error:
        unknown_host = isinstance(error.os_error, socket.gaierror)
        error_type = Unreachable if unknown_host or error.errno in _UNREACHABLE else Unavailable
        reason = os.strerror(error.errno) if error.errno in _UNREACHABLE else str(error.os_error.strerror or error)
        via, what = "", "server"
        if isinstance(error, aiohttp.ClientProxyConnectionError):
            via, what = " to the proxy that HTTPS_PROXY or HTTP_PROXY names", "proxy"
        advice = f"the address, and that the {what} is running"
        if unknown_host:  # named, since a URL such as gs://bucket does not show it
            via, advice = via or f" to {sanitize(error.host)}", "this name, and the network"
        raise error_type(f"{label}: no connection{via} ({sanitize(reason)}); check {advice}") from error
    except aiohttp.InvalidURL as error:
        raise InvalidArgument(f"{label}: this URL is invalid; check it") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"{label}: the connection broke ({sanitize(str(error) or repr(error))})") from error


def _strip(error: aiohttp.ClientError, clean: Callable[[str], str]) -> str:
    """Return the clean text of the HTTP library's error, and remove its other parts, which may show a token."""
    text = clean(error.message if isinstance(error, aiohttp.ClientResponseError) else str(error))
    if isinstance(error, aiohttp.ClientResponseError):
        method = error.request_info.method
        error.request_info = aiohttp.RequestInfo(URL(), method, CIMultiDictProxy(CIMultiDict()), URL())
        error.message, error.headers, error.history = text, None, ()
    error.args = (text,)
    error.__cause__ = error.__context__ = None
    return text


def environment_proxy(url: URL) -> URL | None:
    """Return the proxy for a server, by the rules of urllib, None if there is none.

    Raise `InvalidArgument`, which shows no password, if it can't be used.
    """
    proxies = getproxies()
    text = proxies.get(url.scheme) or proxies.get("all")
    if not text or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    name = f"{url.scheme.upper()}_PROXY" if proxies.get(url.scheme) else "ALL_PROXY"
    try:
        proxy = URL(text if "://" in text else f"http://{text}")
        usable = proxy.scheme in ("http", "https") and bool(proxy.host) and proxy.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise InvalidArgument(
            f"the proxy of {name} can't be used for {url.origin()}; expected http://host:port, or the name of the "
            "server in NO_PROXY"
        )
    return proxy
