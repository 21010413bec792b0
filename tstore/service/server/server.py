"""The configuration, start and shutdown of a server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import resource
import ssl
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from tstore.core.format.arguments import quote
from tstore.core.format.layout import MARKER
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.local.store import LocalStorage
from tstore.errors import InvalidArgument, NotAStore
from tstore.service.server.access import Access, Scope
from tstore.service.server.app import App
from tstore.service.server.browsers import Page
from tstore.service.server.connections import Connections
from tstore.service.server.folder import ServedFolder
from tstore.service.server.kinds import ServedKeys
from tstore.service.server.listener import Listener
from tstore.service.server.quotas import LIMITS, Limits, checked_limits
from tstore.service.server.served import ServedStorage

__all__ = ["Certificate", "Server"]

_OTHER_FILES = 64  # open files of the process other than connections
_HOSTNAME = re.compile(r"(?=.{1,253})[A-Za-z0-9_-]{1,63}(?:[.][A-Za-z0-9_-]{1,63})*[.]?")

_log = logging.getLogger("tstore.server")


class Certificate(NamedTuple):
    """The files of a TLS certificate and its key, as PEM."""

    cert: str
    key: str


class Server:
    """Serves a store over HTTP on the running event loop during an `async with` block.

    `store` is the URL of a store, or of an empty folder or prefix in which clients will create one; `mode="r"`
    serves it read-only; `storage_options` are those of `tstore.open`. `access` holds the tokens; without it
    everyone who can connect may read and write, so the server must listen on a loopback address. Port 0 selects a
    free port: see `url`. `names="any"` serves any keys, not only those of a store's layout. The Host of a request
    without a token must be an address, localhost, `host`, or one of `hostnames`, which are names without scheme or
    port. `page` is what browsers see (`service.page`); without one they see nothing. At the end of the block,
    requests under way have `limits.drain` seconds to complete. Raise `InvalidArgument`, `NotAStore`, `Denied` (no
    permission for the port), `Unavailable` (port in use).
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        mode: Literal["r", "a"] = "a",
        storage_options: Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        access: Access | None = None,
        certificate: Certificate | None = None,
        names: ServedKeys = "layout",
        hostnames: Collection[str] = (),
        limits: Limits = LIMITS,
        page: Page | None = None,
    ) -> None:
        if not isinstance(mode, str) or mode not in ("r", "a"):
            raise InvalidArgument(f"mode={quote(mode)}: expected 'r' (read) or 'a' (write)")
        access = access or Access(anonymous="write")
        _check_exposure(host, access)
        if not _is_loopback(host) and certificate is None:
            _log.warning("listening on %s without TLS: tokens are in cleartext unless a proxy adds TLS", host)
        self.store = os.fspath(store)
        self._mode = mode
        self._options = storage_options
        self._host, self._port = host, port
        self._access = access
        self._tls = None if certificate is None else _tls_context(certificate)
        self._names = names
        self._hostnames = {host, *map(_checked_hostname, hostnames)}
        self._limits = checked_limits(limits)
        self._page = page

    @property
    def url(self) -> str:
        """The URL of the server."""
        host, port = self._listener.address
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def set_access(self, access: Access) -> None:
        """Replace the tokens; requests under way are not affected."""
        _check_exposure(self._host, access)
        self._access = access
        self._app.set_access(access)

    async def __aenter__(self) -> Server:
        storage, wait = connect(self.store, self._options), self._limits.wait
        await self._check_store(storage)
        local = isinstance(storage, LocalStorage)
        self._served = ServedFolder(storage.url, wait) if local else ServedStorage(storage, wait)
        if self._mode == "a":
            await self._served.remove_unfinished()
        max_scope = Scope.READ if self._mode == "r" else Scope.ADMIN
        self._app = App(
            self._served, self._access, max_scope, self._names, self._limits, self._hostnames, self._page
        )
        if self._page is not None:
            await self._page.open(self._served.storage)
        self._connections = Connections(self._app.handle, _with_capped_connections(self._limits))
        self._listener = Listener(self._connections, self._tls)
        await self._listener.open(self._host, self._port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._listener.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain):
                await self._app.drain()
        await self._connections.close()
        await self._listener.close()
        if self._page is not None:
            await self._page.close()
        await self._served.storage.close()

    async def _check_store(self, storage: Storage) -> None:
        """Raise `NotAStore` unless the location has a store, or is empty and clients may create one there."""
        if self._names == "any" or await storage.head(MARKER) is not None:
            return
        url = storage.url
        if self._mode == "r":
            raise NotAStore(f"{url} is not a tstore store: it has no {MARKER}; check the path")
        if not await storage.empty():
            raise NotAStore(f"{url} has other files and no {MARKER}, so it is not served; check the path")


def _with_capped_connections(limits: Limits) -> Limits:
    """Return the limits with `connections` capped by the process's limit of open files, at two per connection."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits
    return limits._replace(connections=min(limits.connections, max(1, (files - _OTHER_FILES) // 2)))


def _checked_hostname(name: str) -> str:
    """Return a host name; raise `InvalidArgument` if it can't be the name in a Host header."""
    if not _HOSTNAME.fullmatch(name):
        raise InvalidArgument(
            f"hostname {quote(name)}: expected a name such as ckpt.example.com, without http://, port or path; an "
            "internationalized name in its encoded form (xn--…); addresses need not be listed"
        )
    return name


def _check_exposure(host: str, access: Access) -> None:
    """Raise `InvalidArgument` if other machines could reach a server that has no tokens."""
    if not access.token_count and not _is_loopback(host):
        raise InvalidArgument(
            f"host {host}: other machines can reach this address, so the server needs tokens; pass a token file, "
            "or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _tls_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    cert, key = certificate
    for path in certificate:
        if not os.access(path, os.R_OK):
            raise InvalidArgument(f"{path} can't be read; pass the PEM files of a certificate and its key")
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"{cert} and {key} can't be used for TLS ({error}); expected PEM files of a certificate and its key "
            "without a passphrase"
        ) from error
    return context
