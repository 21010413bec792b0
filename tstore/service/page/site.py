"""The requests of browsers below `/-/page/`, who may make them, and the headers of every response.

1. `GET /-/page/<view>?…`: a view, as HTML, or with `Accept: application/json` its document.
2. `GET /-/page/static/<file>`: style sheet, script and icon; these need no token.
3. `GET /-/page/enter?code=…`: signs in a browser by a code that works once (`tstore view`).
4. `POST /-/page/login`, `logout`, and the actions of views: forms with a token that no other site knows.

A request has the scope of its `Authorization` header, of its session, or the server's scope without a token. No
request changes the store. Text from a store can run no script, since the policy (`_POLICY`) permits only those of
`static/`, and no other site can frame the page or read it.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import traceback
from collections.abc import Hashable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web

from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.errors import InvalidArgument, NotAStore, NotFound, TimelineChanged, TStoreError
from tstore.service.page.navigation import VIEWS
from tstore.service.page.opening import OpenStore, start_apart, wait_apart
from tstore.service.page.rendering import asset, load_templates, render
from tstore.service.page.results import Results
from tstore.service.page.sessions import Sessions
from tstore.service.page.turns import Turns
from tstore.service.page.verification import Verification
from tstore.service.page.views import Document, Query, View
from tstore.service.server import PAGE, Access, Scope, Visit
from tstore.service.server.access_log import current_tally
from tstore.service.server.responses import Refused, common_headers
from tstore.service.server.transfers import client_at

__all__ = ["Site"]

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
_MAX_FORM = 8 << 10  # bytes
_MAX_PARAMETERS = 50
_FORM_TIMEOUT = 10.0  # seconds
_MAX_VIEWS = 4  # views computed at once
_LEFT = 499  # the status in the access log of a request whose client left before the response
_LONGEST_WAIT = 30.0  # seconds for a turn to be computed
_LONG = 1 << 20  # bytes; longer responses are sent before their turn ends, so that few are in memory at once
_LONGEST_SEND = 120.0  # seconds for such a response
_SHORTEST_COMPRESSED = 1 << 10  # bytes
_COMPRESSION = 3

_log = logging.getLogger("tstore.server")


class Visitor(NamedTuple):
    """The sender of a request: its session ("" if it has none), its scope, and its identity among clients."""

    session: str
    scope: Scope
    client: Hashable
    has_token: bool

    @property
    def may_start_jobs(self) -> bool:
        """Whether the visitor may make the server read the whole store: with a token, or if anybody may write."""
        return self.has_token or self.scope >= Scope.WRITE


class Site:
    """The page about the store of one server.

    `address` is how commands name the store, by default the URL of the server as the browser names it.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._sessions = Sessions()
        self._views = {view.name: view for view in VIEWS}
        self._named_views = [view for view in VIEWS if view.title]
        self._turns = Turns(_MAX_VIEWS)
        self._results = Results()
        self._verification = Verification()
        self._store: OpenStore | None = None

    async def open(self, storage: Storage) -> None:
        """Prepare for requests, and the templates, so that the first view need not wait for them."""
        self._store = OpenStore(storage)
        await run(load_templates)

    async def close(self) -> None:
        """End all work in the background."""
        await self._verification.stop()

    def entrance(self, server_url: str, token: str, seconds: float) -> str:
        """Return a URL that gives the first browser that opens it, within some seconds, a session of a token."""
        matched = Access({token: "read"}).match(f"Bearer {token}")
        assert matched is not None
        return f"{server_url}{PAGE}enter?code={self._sessions.add_link(matched[0], seconds)}"

    async def respond(self, visit: Visit) -> web.StreamResponse:
        """Return the response to a request for a path below `PAGE`."""
        request = visit.request
        try:
            visitor = self._visitor(visit)
            current_tally().scope = visitor.scope.name.lower()
            return await self._route(visit, visitor)
        except Refused as refused:
            return self._refusal(request, refused)
        except TStoreError as error:
            _release_frames(error)
            return self._refusal(request, self._refusal_from(error, request))
        except ConnectionResetError:
            return web.Response(status=_LEFT)

    def _visitor(self, visit: Visit) -> Visitor:
        """Return the sender of a request; raise `Refused` for an unknown token."""
        remote = visit.request.remote
        authorization = visit.request.headers.get("Authorization")
        if authorization is not None:
            matched = visit.access.match(authorization)
            if matched is None:
                raise Refused(401, "unknown token", {"WWW-Authenticate": 'Bearer realm="tstore"'})
            client = client_at(remote, matched[0])
            return Visitor("", min(matched[1], visit.max_scope), client, has_token=True)
        session = visit.request.cookies.get(_cookie_name(visit.request), "")
        digest = self._sessions.token_digest(session) if session else None
        scope = None if digest is None else visit.access.scope_of(digest)
        if digest is None or scope is None:
            return Visitor(
                "", min(visit.access.anonymous, visit.max_scope), client_at(remote, b""), has_token=False
            )
        return Visitor(session, min(scope, visit.max_scope), client_at(remote, digest), has_token=True)

    async def _route(self, visit: Visit, visitor: Visitor) -> web.StreamResponse:
        request = visit.request
        path, _, query = request.raw_path.partition("?")
        if path == PAGE[:-1]:
            return _redirect(PAGE)
        name = path.removeprefix(PAGE)
        if request.method == "POST":
            return await self._act(name, visit, visitor)
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "the page supports GET, HEAD and POST", {"Allow": "GET, HEAD, POST"})
        if name.startswith("static/"):
            return _asset_response(request, name.removeprefix("static/"))
        parameters = _parsed(query)
        if name == "enter":
            if request.method != "GET":  # programs that look at links must not use up the code
                raise Refused(405, "this address works once, for one browser", {"Allow": "GET"})
            return self._enter(request, parameters)
        if visitor.scope is Scope.NONE:
            raise Refused(401, "sign in with a token", {"WWW-Authenticate": 'Bearer realm="tstore"'})
        if name not in self._views:
            raise Refused(404, "the page has no such view")
        return await self._show(self._views[name], request, visitor, parameters)

    async def _show(
        self, view: View, request: web.BaseRequest, visitor: Visitor, parameters: Mapping[str, str]
    ) -> web.StreamResponse:
        """Return a view as HTML, or its document if the client prefers JSON."""
        as_json = not view.template or _prefers_json(request)
        frame = {
            "view": view,
            "views": self._named_views,
            "here": request.raw_path,
            "theme": _theme(request),
            "address": self._address_for(request),
            "signed_in": bool(visitor.session),
            "may_start_jobs": visitor.may_start_jobs,
            "form_token": self._sessions.form_token(visitor.session),
            "parameters": parameters,
        }
        try:
            async with self._turns.turn(visitor.client, _LONGEST_WAIT):
                response = await wait_apart(start_apart(self._view(view, request, as_json, frame)), request)
                if (response.content_length or 0) > _LONG:
                    await _send(response, request)
                return response
        except TimeoutError:
            raise Refused(503, "other views are being computed; try again", {"Retry-After": "5"}) from None

    async def _view(self, view: View, request: web.BaseRequest, as_json: bool, frame: Document) -> web.Response:
        """Return a view; all of it, also its compression, runs apart from the server's loop."""
        body = await self._body(view, as_json, frame)
        headers = {"Vary": "Accept, Cookie, Accept-Encoding", "Cache-Control": "no-store"}
        return _response(request, 200, body, "application/json" if as_json else "text/html", headers)

    async def _body(self, view: View, as_json: bool, frame: Document) -> bytes:
        assert self._store is not None
        query = Query(
            await self._store.get(), frame["address"], frame["parameters"], self._results, self._verification
        )
        try:
            document = await view.load(query)
        except TimelineChanged:  # noticed just now: the store was replaced, for example by a backup
            document = await view.load(query._replace(store=await self._store.get()))
        if as_json:
            return msgspec.json.encode(document)
        return render(view.template, data=document, **frame).encode(errors="backslashreplace")

    async def _act(self, name: str, visit: Visit, visitor: Visitor) -> web.StreamResponse:
        """Return the response to a form."""
        request = visit.request
        form = await _read_form(request)
        if name == "login":
            matched = visit.access.match(f"Bearer {form.get('token', '').strip()}")
            if matched is None or not matched[0]:
                raise Refused(401, "this server does not know that token")
            self._sessions.end(visitor.session)  # another begins
            return self._signed_in(request, matched[0])
        expected = self._sessions.form_token(visitor.session)
        if form.get("form_token") != expected:
            raise Refused(403, "the form is out of date; load the page again")
        if name == "logout":
            self._sessions.end(visitor.session)
            response = _redirect(PAGE)
            response.del_cookie(_cookie_name(request), path=PAGE)
            return response
        if name not in ("health/start", "health/stop"):
            raise Refused(404, "the page has no such action")
        if not visitor.may_start_jobs:
            raise Refused(403, "to start or stop a verification, sign in with a token")
        assert self._store is not None
        if name == "health/start":
            self._verification.start(self._store)
        else:
            await self._verification.stop()
        return _redirect(f"{PAGE}health")

    def _enter(self, request: web.BaseRequest, parameters: Mapping[str, str]) -> web.StreamResponse:
        digest = self._sessions.redeem(parameters.get("code", ""))
        if digest is None:
            reason = "this address works once, and not for long: start tstore view again, or sign in with a token"
            raise Refused(401, reason)
        return self._signed_in(request, digest)

    def _signed_in(self, request: web.BaseRequest, digest: bytes) -> web.StreamResponse:
        response = _redirect(PAGE)
        response.set_cookie(
            _cookie_name(request),
            self._sessions.start(digest),
            path=PAGE,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return response

    def _address_for(self, request: web.BaseRequest) -> str:
        return self._address or f"{'https' if request.secure else 'http'}://{request.host}"

    def _refusal(self, request: web.BaseRequest, refused: Refused) -> web.StreamResponse:
        headers = {"Vary": "Accept", "Cache-Control": "no-store"} | refused.headers
        if _prefers_json(request):
            body = msgspec.json.encode({"error": refused.message})
            return _response(request, refused.status, body, "application/json", headers)
        template = "login.html" if refused.status == 401 else "error.html"
        frame = {"views": self._named_views, "theme": _theme(request)}
        text = render(template, status=refused.status, message=refused.message, **frame)
        return _response(request, refused.status, text.encode(), "text/html", headers)

    def _refusal_from(self, error: TStoreError, request: web.BaseRequest) -> Refused:
        """Translate an error of the library; its message names the store as the visitor knows it."""
        status = 500
        if isinstance(error, NotFound | NotAStore):
            status = 404
        elif isinstance(error, InvalidArgument):
            status = 400
        else:
            _log.warning("the page: %s: %s", type(error).__name__, error)
        message = str(error)
        if self._store is not None:
            message = message.replace(self._store.url, self._address_for(request))
        return Refused(status, message)


def _release_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an error and of its contexts.

    Futures refer to the error, and these variables to the futures. So all data in the variables would stay in
    memory until Python's next full garbage collection: gigabytes after a few requests for a large, damaged store.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _cookie_name(request: web.BaseRequest) -> str:
    """Return the name of the session's cookie; browsers share cookies between the ports of a host."""
    port = request.host.rpartition(":")[2]
    return f"tstore-session-{port}" if port.isascii() and port.isdigit() else "tstore-session"


def _theme(request: web.BaseRequest) -> str:
    """Return the theme that the visitor has chosen, "" if it is the system's."""
    theme = request.cookies.get("tstore-theme", "")
    return theme if theme in ("dark", "light") else ""


def _prefers_json(request: web.BaseRequest) -> bool:
    return "text/html" not in request.headers.get("Accept", "")


def _parsed(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS))
    except ValueError:
        raise Refused(400, "the query is malformed") from None


async def _read_form(request: web.BaseRequest) -> dict[str, str]:
    """Return the fields of a form; refuse one that another site may have sent."""
    origin = request.headers.get("Origin")
    own = f"http://{request.host}", f"https://{request.host}"  # a proxy may add TLS
    if origin is not None and origin not in own:
        raise Refused(403, "the form is from another site")
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Refused(403, "the form is from another site")
    length = request.content_length
    if length is None or length > _MAX_FORM:
        raise Refused(413, f"a form has at most {_MAX_FORM} bytes", {"Connection": "close"})
    try:
        async with asyncio.timeout(_FORM_TIMEOUT):
            body = await request.content.readexactly(length) if length else b""
    except (TimeoutError, asyncio.IncompleteReadError, web.RequestPayloadError):
        raise Refused(408, "the form was not received completely", {"Connection": "close"}) from None
    return _parsed(body.decode(errors="replace"))


def _asset_response(request: web.BaseRequest, name: str) -> web.StreamResponse:
    found = asset(name)
    if found is None:
        raise Refused(404, "the page has no such file")
    data, content_type, _ = found  # the digest in the URL changes with the file
    headers = {"Cache-Control": "private, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    return _response(request, 200, data, content_type, headers)


def _redirect(location: str) -> web.Response:
    return web.Response(status=303, headers=_headers() | {"Location": location, "Cache-Control": "no-store"})


def _response(
    request: web.BaseRequest, status: int, body: bytes, content_type: str, headers: Mapping[str, str]
) -> web.Response:
    combined = _headers() | dict(headers)
    if len(body) >= _SHORTEST_COMPRESSED and "gzip" in request.headers.get("Accept-Encoding", ""):
        body = gzip.compress(body, _COMPRESSION)
        combined["Content-Encoding"] = "gzip"
    return web.Response(status=status, body=body, headers=combined, content_type=content_type, charset="utf-8")


async def _send(response: web.Response, request: web.BaseRequest) -> None:
    """Send a response; close the connection of a client that reads too slowly."""
    try:
        async with asyncio.timeout(_LONGEST_SEND):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client reads too slowly") from None


def _headers() -> dict[str, str]:
    return common_headers() | {
        "Content-Security-Policy": _POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "same-origin",  # with no-referrer, browsers would hide the origin of forms
        "X-Frame-Options": "DENY",
    }
