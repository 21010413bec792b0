"""The dialect of HTTP/1.1 in which a store is served.

1. `GET` or `HEAD /<key>`: the object, whole or one range of it (206; 416 beyond its end), with a strong `ETag`,
   and, where they are known, `Last-Modified` and `X-TStore-Age`: the seconds since it was written, by the server's
   clock. `If-Match`, `If-None-Match` and `If-Range` as in RFC 9110. 404 where there is none.
2. `PUT /<key>` with `If-None-Match: *` creates (201), all or nothing, durable once answered, or answers 412 where
   the key is taken; of any number of racing requests exactly one gets 201. Without that header only what may be
   replaced is taken (204): `latest` and heartbeats; for all else 428. A record, root, manifest, fragment or marker
   is parsed and checked before it is stored; one that would break the store is refused with 422.
   `X-TStore-XXH3`, the xxh3-128 of the body in hexadecimal, is checked where it is sent (422).
3. `DELETE /<key>`: 204, also where nothing was there.
4. `GET /?list&prefix=P&delimiter=/&after=NAME&limit=N`: the names behind `after` in their order, at most 1000, as
   `{"entries": [{"key", "size", "age"}], "folders": […], "next": NAME or null}`; a folder ends in "/", and `next`
   is the `after` of the rest.
5. `GET /-/health`: 200, or 503 once the server is about to end.
6. Other answers: 400 for what can't be understood, 401 without a token that is known, 403 where its scope does not
   suffice, 405, 408 for a body that stalls, 411, 413 for one too long, 415, 503 with `Retry-After`, 507.

Every answer names the server, `Server: tstore/<version>`: so a client learns that all this is there.
"""

from __future__ import annotations

import logging
from urllib.parse import parse_qsl

import xxhash
from aiohttp import web

from tstore.errors import InvalidArgument, TStoreError
from tstore.kv.base import checked_key
from tstore.kv.objects import PutMode
from tstore.server.answers import Refused, answer, refusal_of
from tstore.server.bodies import declared_length, received, send
from tstore.server.limits import HELD, LONGEST_HELD, LONGEST_SMALL, Budget, Limits
from tstore.server.names import Kind, Names, key_of, kind_of
from tstore.server.served import Served

__all__ = ["App"]

_PAGE = 1000
_SMALL = (Kind.MARKER, Kind.HINT, Kind.HEARTBEAT)
_LIST = {"list", "prefix", "delimiter", "after", "limit"}
_METHODS = "GET, HEAD, PUT, DELETE"

_log = logging.getLogger("tstore.server")


class App:
    """Answers the requests for the objects of one store."""

    def __init__(self, served: Served, names: Names, limits: Limits) -> None:
        self.served = served
        self.draining = False
        self._names = names
        self._limits = limits
        self._budget = Budget(HELD)
        self._busy = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to one request, whatever it is."""
        self._busy += 1
        try:
            if self._busy > self._limits.requests:
                raise Refused(503, "too many requests at once; try again", {"Retry-After": "1"})
            return await self._answer(request)
        except Refused as refused:
            said = None if refused.status == 304 else {"error": refused.message}
            return answer(refused.status, said, refused.more)
        finally:
            self._busy -= 1

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        if path == "/-/health" and request.method in ("GET", "HEAD"):
            return answer(503 if self.draining else 200, {"status": "ending" if self.draining else "fine"})
        if request.method not in ("GET", "HEAD", "PUT", "DELETE"):
            raise Refused(405, f"this server knows {_METHODS}", {"Allow": _METHODS})
        try:
            if path == "/":
                return await self._list(request, query)
            key = key_of(path)
            kind = kind_of(key, self._names)
            if query:
                raise Refused(400, "an object has no query")
            match request.method:
                case "PUT":
                    return await self._put(request, key, kind)
                case "DELETE":
                    return await self._delete(key, kind)
                case _:
                    return await self._get(request, key, kind)
        except InvalidArgument as error:
            raise Refused(400, str(error)) from error
        except TStoreError as error:
            raise refusal_of(error) from error

    async def _get(self, request: web.BaseRequest, key: str, kind: Kind | None) -> web.StreamResponse:
        if kind is None:
            raise Refused(404, "there is no such object")
        async with self.served.opened(key) as found:
            keep = "no-store" if kind.replaceable else "private, max-age=31536000, immutable"
            return await send(request, found, keep, self._limits)

    async def _put(self, request: web.BaseRequest, key: str, kind: Kind | None) -> web.StreamResponse:
        if kind is None:
            raise Refused(403, f"no object of a store is named {key}")
        mode = _mode(request, kind)
        if "Content-Encoding" in request.headers or "Content-Range" in request.headers:
            raise Refused(415, "an object is sent as it is and whole")
        if mode is PutMode.CREATE and await self.served.exists(key):
            raise Refused(412, f"{key} exists already; it was left as it is")
        if kind.streamed and mode is PutMode.CREATE:
            await self._stream(request, key)
        else:
            await self._hold(request, key, kind, mode)
        return answer(201 if mode is PutMode.CREATE else 204)

    async def _stream(self, request: web.BaseRequest, key: str) -> None:
        most = self._limits.object_bytes
        declared_length(request, most)
        digest = _Digest(request)
        async with self.served.incoming(key) as incoming:
            async for piece in received(request, most, self._limits):
                digest.update(piece)
                await incoming.write(piece)
            digest.check()

    async def _hold(self, request: web.BaseRequest, key: str, kind: Kind, mode: PutMode) -> None:
        most = LONGEST_SMALL if kind in _SMALL else LONGEST_HELD
        length = declared_length(request, most)
        if length is None:
            raise Refused(411, f"{key} needs a Content-Length")
        digest = _Digest(request)
        async with self._budget.claim(2 * length if length < HELD // 2 else HELD):
            pieces = []
            async for piece in received(request, most, self._limits):
                digest.update(piece)
                pieces += piece
            digest.check()
            await self.served.put(key, b"".join(pieces), mode)

    async def _delete(self, key: str, kind: Kind | None) -> web.StreamResponse:
        if kind is None:
            raise Refused(403, f"no object of a store is named {key}")
        if kind in (Kind.MARKER, Kind.RECORD):
            raise Refused(403, f"{key} is never removed")
        await self.served.delete(key)
        return answer(204)

    async def _list(self, request: web.BaseRequest, query: str) -> web.StreamResponse:
        try:
            pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=len(_LIST))
        except (ValueError, UnicodeDecodeError):
            raise Refused(400, "the query can't be understood") from None
        asked = dict(pairs)
        if request.method == "PUT" or "list" not in asked:
            raise Refused(404, "an object has a name; GET /?list shows them")
        if not set(asked) <= _LIST or len(asked) != len(pairs) or request.method not in ("GET", "HEAD"):
            raise Refused(400, f"a list takes {', '.join(sorted(_LIST))}, each once")
        limit, delimiter = asked.get("limit", str(_PAGE)), asked.get("delimiter", "")
        if not (limit.isascii() and limit.isdigit() and 0 < len(limit) < 10 and int(limit) > 0):
            raise Refused(400, "limit: expected a number above 0")
        if delimiter not in ("", "/"):
            raise Refused(400, "delimiter: expected / or none")
        prefix, most = asked.get("prefix", ""), min(_PAGE, int(limit))
        checked_key(f"{prefix}x", "this store")
        page, more = await self.served.page(prefix, delimiter, asked.get("after", ""), most)
        return answer(
            200,
            {
                "entries": [e._asdict() for e in page.entries if kind_of(e.key, self._names)],
                "folders": page.folders,
                "next": more,
            },
        )


class _Digest:
    """The checksum of a body, where the client sent one."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._wanted = request.headers.get("X-TStore-XXH3")
        self._made = xxhash.xxh3_128()

    def update(self, pieces: list[bytes]) -> None:
        if self._wanted is not None:
            for piece in pieces:
                self._made.update(piece)

    def check(self) -> None:
        if self._wanted is not None and self._wanted.lower() != self._made.hexdigest():
            raise Refused(
                422, "the body has another checksum than X-TStore-XXH3; nothing was stored, send it again"
            )


def _mode(request: web.BaseRequest, kind: Kind) -> PutMode:
    wanted = request.headers.getall("If-None-Match", [])
    if wanted == ["*"]:
        return PutMode.CREATE
    if wanted or "If-Match" in request.headers:
        raise Refused(400, "the only condition of a PUT is If-None-Match: *")
    if not kind.replaceable:
        raise Refused(428, "this name can't be replaced; create it with If-None-Match: *")
    return PutMode.REPLACE
