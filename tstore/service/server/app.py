"""The HTTP/1.1 protocol of a store, request by request.

1. `GET` or `HEAD /<key>`: the object, whole or one range of it (206; 416 beyond its end), with a strong `ETag` and
   `Last-Modified` if known. HEAD adds `X-TStore-Age`: seconds since it was written, by the server's clock.
   `If-Match`, `If-None-Match` and `If-Range` are as in RFC 9110. 404 if there is no such object.
2. `PUT /<key>` with `If-None-Match: *` creates an object (201) atomically, durable when the response is sent, or
   responds 412 if it exists; of any number of concurrent requests exactly one gets 201. Without that header only
   replaceable objects (`latest`, heartbeats) are accepted (204), and with the scope admin packs and manifests that
   have every checksum that living versions give for them; any other gets 428. A record, root, manifest,
   fragment or marker is validated before it is stored. A record must follow from the one before it, and everything
   that it names must exist, chunks with their checksums; a root must be the one that the server derives itself;
   otherwise the response is 422, or 403 if the scope is insufficient. `X-TStore-XXH3` is verified if sent: a
   mismatch gets 409, and the client sends the body again. It is the xxh3-128 of the body in hexadecimal; of a body
   longer than 1 MiB, the xxh3-128 of the joined xxh3-128 digests of each MiB.
3. `DELETE /<key>`: 204, even if there was no such object. Only heartbeats, and objects that a garbage collection
   condemned and no version needs, can be deleted; for any other object the response is 403, whatever the token.
   With `--names any`, objects outside a store's layout can be replaced and deleted at any time.
4. `GET /?list&prefix=P&delimiter=/&after=NAME&limit=N`: the names after `after` in order, at most 1000, as
   `{"entries": [{"key", "size", "age"}], "folders": […], "next": NAME or null}`; a folder ends in "/", and `next`
   is the `after` of the next page.
5. `GET /-/health`: 200, or 503 while the server is shutting down.
6. `/-/page/…`, if the server has a page (`browsers`): the response of the page. Browsers are redirected there from
   `/`.
7. Other statuses: 400 for a malformed request, 401 without a known token, 403 for insufficient scope, 405 for
   other methods, 408 for a body that is too slow, 411 for one of unknown length, 413 for one too long, 415 for an
   encoded or partial one, 500 if the storage fails, 503 with `Retry-After` under overload, 507 if the storage is
   full.

Every response names the server, as `Server: tstore/<version>` and, since a proxy may replace that, as
`X-TStore-Version: <version>`. From these a client learns that the server supports this protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Collection
from urllib.parse import parse_qsl

from aiohttp import HttpVersion11, web

from tstore.core.storage.objects import PutMode, checked_key
from tstore.errors import InvalidArgument, TStoreError
from tstore.service.server.access import Access, Scope, Sender
from tstore.service.server.access_log import current_tally
from tstore.service.server.bodies import send
from tstore.service.server.browsers import PAGE, Page, Visit, is_browser
from tstore.service.server.kinds import Kind, ServedKeys, key_of, kind_of
from tstore.service.server.quotas import Limits
from tstore.service.server.responses import Refused, common_headers, json_response, refusal_from
from tstore.service.server.served import ServedStorage
from tstore.service.server.transfers import Transfers, client_at
from tstore.service.server.writes import Writes

__all__ = ["App"]

_PAGE = 1000
_PARAMETERS = {"list", "prefix", "delimiter", "after", "limit"}
_REQUIRED_SCOPES = {"GET": Scope.READ, "HEAD": Scope.READ, "PUT": Scope.WRITE, "DELETE": Scope.WRITE}
_METHODS = ", ".join(_REQUIRED_SCOPES)
_CONDITIONS = "If-Match", "If-None-Match", "If-Unmodified-Since"
_CLOSE = {"Connection": "close"}
_IMMUTABLE = "private, max-age=31536000, immutable"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\]|[\w.~-]+)(?::\d*)?", re.ASCII)
"""A host name or address, such as ckpt.example.com or [fe80::1%eth0], and a port."""


class App:
    """Handles the requests for the objects of one store.

    `max_scope` limits the scope of every request. The Host header of a request without a token must be an address,
    localhost, or one of the `hostnames`: otherwise a web page could send requests to a host name that it makes
    resolve to this server (DNS rebinding). With TLS any Host is accepted, since a browser checks the certificate.
    """

    def __init__(
        self,
        served: ServedStorage,
        access: Access,
        max_scope: Scope,
        names: ServedKeys,
        limits: Limits,
        hostnames: Collection[str],
        page: Page | None = None,
    ) -> None:
        self.draining = False
        self._page = page
        self._served = served
        self._transfers = Transfers(limits)
        self._writes = Writes(served, limits, self._transfers)
        self._access = access
        self._max_scope = max_scope
        self._names = names
        self._hostnames = {"localhost", *map(str.lower, hostnames)}
        self._limits = limits
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response to any request."""
        self._active += 1
        self._idle.clear()
        try:
            return await self._handle(request)
        except Refused as refused:
            document = None if refused.status == 304 else {"error": refused.message}
            response = json_response(refused.status, document, refused.headers)
            if refused.headers.get("Connection") == "close":
                response.force_close()
            return response
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    def set_access(self, access: Access) -> None:
        """Replace the tokens for requests from now on."""
        self._access = access

    async def drain(self) -> None:
        """Refuse new requests, and wait until those under way have ended."""
        self.draining = True
        await self._idle.wait()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        if path == "/-/health" and request.method in ("GET", "HEAD"):
            status, text = (503, "shutting down") if self.draining else (200, "ok")
            return json_response(status, {"status": text})
        if self.draining:
            raise Refused(503, "the server is shutting down", {"Retry-After": "1", "Connection": "close"})
        if self._page is not None and path.startswith(PAGE[:-1]):
            return await self._show_page(self._page, request)
        if request.method not in _REQUIRED_SCOPES:
            raise Refused(405, f"this server supports {_METHODS}", {"Allow": _METHODS})
        if self._page is not None and path == "/" and not query and is_browser(request):
            return web.Response(status=303, headers=common_headers(Location=PAGE, Vary="Accept"))
        _check_headers(request)
        sender = self._authorize(request)  # first: a request that is refused must not end another's transfer
        if self._active > self._limits.requests and not self._transfers.make_room(sender.client):
            raise Refused(503, "too many requests at once; try again", {"Retry-After": "1"})
        try:
            if path == "/" or (path.endswith("/") and self._names == "any"):
                folder = "" if path == "/" else f"{key_of(path[:-1])}/"
                return await self._handle_listing(request, query, folder)
            key = key_of(path)
            if query:
                raise Refused(400, "a request for an object takes no query")
            return await self._handle_object(request, key, kind_of(key, self._names), sender)
        except InvalidArgument as error:
            raise Refused(400, str(error)) from error
        except TStoreError as error:
            raise refusal_from(error) from error

    async def _show_page(self, page: Page, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response of the page; the Host must name this server even if there is a token."""
        _check_headers(request)
        if not request.secure and not self._names_this_server(request.host):
            raise Refused(403, "the Host must be an address, localhost or a --hostname of the server")
        if self._active > self._limits.requests:
            raise Refused(503, "too many requests at once; try again", {"Retry-After": "1"})
        return await page.respond(Visit(request, self._access, self._max_scope))

    def _authorize(self, request: web.BaseRequest) -> Sender:
        """Return the sender of a request; raise `Refused` if its scope is insufficient for the method."""
        authorization = request.headers.get("Authorization")
        token, scope = self._access.match(authorization) or (b"", Scope.NONE)
        if scope is Scope.NONE:  # no token has this scope
            reason = "a token is required (Authorization: Bearer …)" if authorization is None else "unknown token"
            error = ', error="invalid_token"' if authorization is not None else ""
            raise Refused(401, reason, {"WWW-Authenticate": f'Bearer realm="tstore"{error}'})
        current_tally().scope = scope.name.lower()
        if authorization is None and not request.secure and not self._names_this_server(request.host):
            message = "without a token, the Host must be an address, localhost or a --hostname of the server"
            raise Refused(403, message)
        self._check_scope(scope, _REQUIRED_SCOPES[request.method])
        return Sender(client_at(request.remote, token), scope)

    def _names_this_server(self, host: str) -> bool:
        """Return whether a Host header has an address, or a name that no web page can point to this server."""
        parsed = _HOST.fullmatch(host)
        name = parsed[1].lower() if parsed else ""
        if name in self._hostnames:
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.strip("[]"))
            return True
        return False

    def _check_scope(self, scope: Scope, needed: Scope) -> None:
        if needed > self._max_scope:
            raise Refused(403, "this store is served read-only")
        if scope < needed:
            name = needed.name.lower()
            challenge = f'Bearer realm="tstore", error="insufficient_scope", scope="{name}"'
            has = f"this request has the scope {scope.name.lower()}"
            message = f"{name} access needs a token with the scope {name}; {has}"
            raise Refused(403, message, {"WWW-Authenticate": challenge})

    async def _handle_object(
        self, request: web.BaseRequest, key: str, kind: Kind | None, sender: Sender
    ) -> web.StreamResponse:
        if request.method in ("GET", "HEAD"):
            if kind is None or kind is Kind.FOLDER:
                raise Refused(404, "there is no such object")
            async with self._served.open(key, kind) as opened:
                if kind is Kind.RECORD and self._max_scope > Scope.READ:
                    await self._writes.make_durable(key)
                if request.method == "HEAD" and opened.age is None:
                    entry = await self._served.storage.head(key)
                    opened = opened._replace(age=None if entry is None else entry.age)
                cache_control = "no-store" if kind.replaceable else _IMMUTABLE
                with self._transfers.track(sender.client) as transfer:
                    return await send(request, opened, cache_control, transfer)
        if kind is None or (kind is Kind.FOLDER and request.method == "PUT"):
            raise Refused(403, f"{key} is not a key of this store's layout, so it can't be changed")
        if request.method == "PUT":
            mode = await self._writes.put(request, key, kind, sender)
            return json_response(201 if mode is PutMode.CREATE else 204)
        if any(name in request.headers for name in _CONDITIONS):
            raise Refused(400, "DELETE takes no conditions")
        if kind not in (Kind.HEARTBEAT, Kind.TIERS):
            self._check_scope(sender.scope, Scope.ADMIN)
        await self._writes.delete(key, kind)
        return json_response(204)

    async def _handle_listing(self, request: web.BaseRequest, query: str, folder: str) -> web.StreamResponse:
        """Return a page of the names below a folder, relative to it; with `names="any"` it may have a store."""
        try:
            pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=len(_PARAMETERS))
        except ValueError:
            raise Refused(400, "the query is malformed") from None
        parameters = dict(pairs)
        if "list" not in parameters or request.method not in ("GET", "HEAD"):
            raise Refused(404, "there is no object at /; GET /?list lists the objects")
        if not set(parameters) <= _PARAMETERS or len(parameters) != len(pairs):
            raise Refused(400, f"a listing takes {', '.join(sorted(_PARAMETERS))}, each at most once")
        limit, delimiter = parameters.get("limit", str(_PAGE)), parameters.get("delimiter", "")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and int(limit) > 0):
            raise Refused(400, "limit: expected a number above 0")
        if delimiter not in ("", "/"):
            raise Refused(400, "delimiter: expected / or none")
        prefix, after = parameters.get("prefix", ""), parameters.get("after", "")
        checked_key(f"{prefix}x", "this store")
        after = after and f"{folder}{after}"
        page, last = await self._served.page(f"{folder}{prefix}", delimiter, after, min(_PAGE, int(limit)))
        entries = [
            {**entry._asdict(), "key": entry.key.removeprefix(folder)}
            for entry in page.entries
            if kind_of(entry.key, self._names)
        ]
        folders = [name.removeprefix(folder) for name in page.folders]
        next_after = None if last is None else last.removeprefix(folder)
        return json_response(200, {"entries": entries, "folders": folders, "next": next_after})


def _check_headers(request: web.BaseRequest) -> None:
    """Refuse a request that a proxy in front of the server may understand differently (RFC 9112).

    The parser of aiohttp refuses other such requests, for example one with two Host headers.
    """
    headers = request.headers
    if len(headers.getall("Authorization", ())) > 1:
        raise Refused(400, "a request has at most one Authorization header", _CLOSE)
    if "Host" in headers and not _HOST.fullmatch(headers["Host"]):
        raise Refused(400, "Host: expected a name or an address, and at most a port", _CLOSE)
    if request.version < HttpVersion11 and "Transfer-Encoding" in headers:
        raise Refused(400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length", _CLOSE)
