"""The dialect of HTTP/1.1 in which a store is served.

1. `GET` or `HEAD /<key>`: the object, whole or one range of it (206; 416 beyond its end), where they are known
   with a strong `ETag` and `Last-Modified`, and for HEAD with `X-TStore-Age`: seconds since it was written,
   by the server's clock. `If-Match`, `If-None-Match` and `If-Range` as in RFC 9110. 404 where there is none.
2. `PUT /<key>` with `If-None-Match: *` creates (201), all or nothing, durable once answered, or answers 412 where
   the key is taken; of any number of racing requests exactly one gets 201. Without that header only what may be
   replaced is taken (204): `latest` and heartbeats; for all else 428. A record, root, manifest, fragment or marker
   is parsed and checked before it is stored. A record has to follow from the one before it, and what it names has
   to be there; a root has to be what the server makes itself; else 422, or 403 where the scope does not suffice.
   `X-TStore-XXH3`, the xxh3-128 of the body in hexadecimal, is checked where it is sent: 409, to be sent again.
3. `DELETE /<key>`: 204, also where nothing was there. Only what a gc's commit condemns and no version is made of
   can be removed, and heartbeats; all else is 403, whatever the token.
4. `GET /?list&prefix=P&delimiter=/&after=NAME&limit=N`: the names behind `after` in their order, at most 1000, as
   `{"entries": [{"key", "size", "age"}], "folders": […], "next": NAME or null}`; a folder ends in "/", and `next`
   is the `after` of the rest.
5. `GET /-/health`: 200, or 503 once the server is about to end.
6. Other answers: 400 for what can't be understood, 401 without a token that is known, 403 where its scope does not
   suffice, 405, 408 for a body that is too slow, 411, 413 for one too long, 415, 503 with `Retry-After` where too
   much is asked at once, 507.

Every answer names the server, `Server: tstore/<version>` and, since a proxy may put its own name there,
`X-TStore-Version: <version>`: so a client learns that all this is there.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Collection
from urllib.parse import parse_qsl

from aiohttp import web

from tstore.errors import InvalidArgument, TStoreError
from tstore.server.access import Access, Scope
from tstore.server.access_log import tally
from tstore.server.bodies import send
from tstore.server.limits import Limits
from tstore.server.names import Kind, Names, key_of, kind_of
from tstore.server.responses import Refused, answer, refusal_of
from tstore.server.served import Served
from tstore.server.storing import Storing
from tstore.server.transfers import Transfers, client_of
from tstore.storage.objects import PutMode, checked_key

__all__ = ["App"]

_PAGE = 1000
_LIST = {"list", "prefix", "delimiter", "after", "limit"}
_NEEDED = {"GET": Scope.READ, "HEAD": Scope.READ, "PUT": Scope.WRITE, "DELETE": Scope.WRITE}
_METHODS = ", ".join(_NEEDED)
_CONDITIONS = "If-Match", "If-None-Match", "If-Unmodified-Since"
_FOR_EVER = "private, max-age=31536000, immutable"


class App:
    """Answers the requests for the objects of one store.

    `most` is the scope that no token exceeds. A request without a token has to name the server by an address,
    localhost, or one of the `hostnames`: a page in a browser could make others, under a name of its own that it
    lets point here. Over TLS it could not, since the certificate is for another name.
    """

    def __init__(
        self,
        served: Served,
        access: Access,
        most: Scope,
        names: Names,
        limits: Limits,
        hostnames: Collection[str],
    ) -> None:
        self.draining = False
        self._served = served
        self._transfers = Transfers(limits)
        self._storing = Storing(served, limits, self._transfers)
        self._access = access
        self._most = most
        self._names = names
        self._hostnames = {"localhost", *map(str.lower, hostnames)}
        self._limits = limits
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to one request, whatever it is."""
        self._busy += 1
        self._idle.clear()
        try:
            return await self._answer(request)
        except Refused as refused:
            said = None if refused.status == 304 else {"error": refused.message}
            return answer(refused.status, said, refused.more)
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    def admit(self, access: Access) -> None:
        """Has `access` say from now on who may do what."""
        self._access = access

    async def drain(self) -> None:
        """Takes no more requests, and returns when those under way are answered."""
        self.draining = True
        await self._idle.wait()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        if path == "/-/health" and request.method in ("GET", "HEAD"):
            return answer(503 if self.draining else 200, {"status": "ending" if self.draining else "fine"})
        if self.draining:
            raise Refused(503, "the server is about to end", {"Retry-After": "1", "Connection": "close"})
        if request.method not in _NEEDED:
            raise Refused(405, f"this server knows {_METHODS}", {"Allow": _METHODS})
        scope = self._admitted(request)  # before anything is ended for this request
        if self._busy > self._limits.requests and not self._transfers.make_room(client_of(request)):
            raise Refused(503, "too many requests at once; try again", {"Retry-After": "1"})
        try:
            if path == "/":
                return await self._list(request, query)
            key = key_of(path)
            if query:
                raise Refused(400, "an object has no query")
            return await self._object(request, key, kind_of(key, self._names), scope)
        except InvalidArgument as error:
            raise Refused(400, str(error)) from error
        except TStoreError as error:
            raise refusal_of(error) from error

    def _admitted(self, request: web.BaseRequest) -> Scope:
        """The scope of who asks, which suffices for the method."""
        given = request.headers.get("Authorization")
        scope = self._access.scope(given)
        if scope is None or (scope is Scope.NONE and given is None):
            why = "the token is not known" if given is not None else "a token is needed (Authorization: Bearer …)"
            error = ', error="invalid_token"' if given is not None else ""
            raise Refused(401, why, {"WWW-Authenticate": f'Bearer realm="tstore"{error}'})
        tally().scope = scope.name.lower()
        if given is None and not request.secure and not self._knows(request.host):
            raise Refused(
                403,
                "a request without a token must name this server by an address, as localhost or by a --hostname "
                "that it was started with",
            )
        self._check_scope(scope, _NEEDED[request.method])
        return scope

    def _knows(self, host: str) -> bool:
        """Whether a Host header has a name of this server: a page's that points here by its own is another."""
        name = (host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host).lower()
        if name in self._hostnames:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _check_scope(self, scope: Scope, needed: Scope) -> None:
        if needed > self._most:
            raise Refused(403, "this store is served for reading only")
        if scope < needed:
            name = needed.name.lower()
            challenge = f'Bearer realm="tstore", error="insufficient_scope", scope="{name}"'
            said = f"that needs the scope {name}; this request has {scope.name.lower()}"
            raise Refused(403, said, {"WWW-Authenticate": challenge})

    async def _object(
        self, request: web.BaseRequest, key: str, kind: Kind | None, scope: Scope
    ) -> web.StreamResponse:
        if request.method in ("GET", "HEAD"):
            if kind is None or kind is Kind.FOLDER:
                raise Refused(404, "there is no such object")
            async with self._served.opened(key, kind) as opened:
                if request.method == "HEAD" and opened.age is None:
                    entry = await self._served.storage.head(key)
                    opened = opened._replace(age=None if entry is None else entry.age)
                caching = "no-store" if kind.replaceable else _FOR_EVER
                with self._transfers.begun(client_of(request)) as transfer:
                    return await send(request, opened, caching, transfer)
        if kind is None or (kind is Kind.FOLDER and request.method == "PUT"):
            raise Refused(403, f"no object of a store is named {key}")
        if request.method == "PUT":
            return answer(201 if await self._storing.put(request, key, kind, scope) is PutMode.CREATE else 204)
        if any(name in request.headers for name in _CONDITIONS):
            raise Refused(400, "a DELETE takes no condition")
        if kind is not Kind.HEARTBEAT:
            self._check_scope(scope, Scope.ADMIN)
        await self._storing.remove(key, kind)
        return answer(204)

    async def _list(self, request: web.BaseRequest, query: str) -> web.StreamResponse:
        try:
            pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=len(_LIST))
        except ValueError:
            raise Refused(400, "the query can't be understood") from None
        asked = dict(pairs)
        if "list" not in asked or request.method not in ("GET", "HEAD"):
            raise Refused(404, "an object has a name; GET /?list shows them")
        if not set(asked) <= _LIST or len(asked) != len(pairs):
            raise Refused(400, f"a list takes {', '.join(sorted(_LIST))}, each once")
        limit, delimiter = asked.get("limit", str(_PAGE)), asked.get("delimiter", "")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and int(limit) > 0):
            raise Refused(400, "limit: expected a number above 0")
        if delimiter not in ("", "/"):
            raise Refused(400, "delimiter: expected / or none")
        prefix, most = asked.get("prefix", ""), min(_PAGE, int(limit))
        checked_key(f"{prefix}x", "this store")
        page, more = await self._served.page(prefix, delimiter, asked.get("after", ""), most)
        entries = [e._asdict() for e in page.entries if kind_of(e.key, self._names)]
        return answer(200, {"entries": entries, "folders": page.folders, "next": more})
