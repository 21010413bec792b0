"""Objects on an HTTP server: read from any file server, write to `tstore serve`.

Reading
1. Part of an object is requested with `Range`. The response must be 206, name exactly that range, and have its
   length. The bytes go from the socket into the caller's buffers (`body`).
2. A server that ignores `Range` (200) sends the whole object. One pass over the object serves all reads ahead of
   its position (`passes`), and the connection is closed after the last read. That is slow, so a warning is given.
3. Objects that are read in parts never change. The validator of each object (its ETag, else its length and time)
   is remembered; if a later response has a different one, the error is `Corrupt`. The checksums of chunks are
   verified in any case.
4. A successful response with a web page, an encoded body, or a part that was not requested is `Corrupt`.

Writing
5. A server that identifies itself (`Server: tstore/…`, or `X-TStore-Version` if a proxy replaced that header)
   creates exclusively: its response to `PUT` with `If-None-Match: *` is 201, or 412 if the key is taken. It also
   lists and deletes. Any other server is only read from: if its `PUT` is not exclusive, two creates of one key may
   succeed, and one object is lost.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from urllib.parse import quote

import msgspec
from exmy.user_warnings import warn
from yarl import URL

from tstore.core.format.checksums import BlockHash
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.http.body import Response
from tstore.core.storage.http.passes import Passes
from tstore.core.storage.http.responses import age, check_data, status_error, validator
from tstore.core.storage.http.session import Session, parse_address, tls_context
from tstore.core.storage.http.tokens import find_token, token_advice
from tstore.core.storage.limits import checked_timeout
from tstore.core.storage.objects import (
    MAX_OBJECT_BYTES,
    Buffers,
    Capabilities,
    Durability,
    Entry,
    Page,
    PutMode,
    checked_key,
)
from tstore.errors import Corrupt, Denied, Unavailable

__all__ = ["HttpStorage"]

_MAX_VALIDATORS = 4096  # kept for the most recently read objects
_PAGE = 1000  # names in a page of a listing
_MAX_REASON = 320  # characters of the server's explanation quoted in an error
_MAX_PAGE_SIZE = 4 << 20  # bytes: `_PAGE` of the longest keys
_LONG = 1 << 20  # bytes; the checksum of a longer body is computed in the thread pool


class _ListEntry(msgspec.Struct):
    key: str
    size: int
    age: float | None = None


class _ListPage(msgspec.Struct):
    entries: list[_ListEntry]
    folders: list[str] = []
    next: str | None = None


class _Problem(msgspec.Struct):
    error: str


class HttpStorage(Storage):
    """The objects below an `http://` or `https://` URL.

    `token` is sent as a bearer token to this server only. If it is None and the server asks for a token, the one
    configured for this server in the environment is sent: `TSTORE_TOKEN_<HOST>`, or a line of the file
    `TSTORE_TOKEN_FILE` (`tokens`). `ca_file` names certificates to trust besides the system's. The server may be
    silent for `timeout` seconds (`limits`). Proxies and .netrc of the environment are not used.
    Raise `InvalidArgument` for a URL with a password, query or fragment, and for an invalid option.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._base_url = parse_address(url)
        self.url = str(self._base_url).rstrip("/")
        tls = None if ca_file is None else tls_context(ca_file)
        self._session = Session(self._base_url, find_token(self._base_url, token), tls, checked_timeout(timeout))
        self._server: str | None = None  # its name, once it has responded
        self._is_tstore = False
        self._ranges: bool | None = None  # whether the server supports `Range`, if known
        self._validators: OrderedDict[str, str] = OrderedDict()
        self._passes = Passes()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that the server's responses have shown so far."""
        is_tstore = self._is_tstore  # it removes a folder with its last object
        return Capabilities(is_tstore, listing=is_tstore, ranges=bool(self._ranges), durable=is_tstore)

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        no_cache = {"Cache-Control": "no-cache"}  # a cache in between may lack objects that the server has
        async with self._request("GET", key, no_cache) as (response, label):
            await self._check(response, label, 200)
            return await response.read_all(label, MAX_OBJECT_BYTES if max_size is None else max_size, key)

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        if not size:
            return
        if self._ranges is not False and await self._read_range(key, offset, buffers, offset + size):
            return
        await self._passes.read(self._blocks, key, offset, buffers, size, self._label(key))

    async def head(self, key: str) -> Entry | None:
        async with self._request("HEAD", key, {"Cache-Control": "no-cache"}) as (response, label):
            if response.status in (404, 410):
                return None
            await self._check(response, label, 200)
            if response.content_length is None:
                raise Corrupt(
                    f"{label}: the server does not send the object's length; configure it to serve plain files"
                )
            return Entry(key, response.content_length, age(response))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        await self._check_writable(self._label(key))
        size = sum(memoryview(b).nbytes for b in buffers)
        checksum = _checksum(buffers) if size <= _LONG else await run(_checksum, buffers)
        headers = {"X-TStore-XXH3": checksum}
        if mode is PutMode.CREATE:
            headers["If-None-Match"] = "*"
        async with self._request("PUT", key, headers, buffers) as (response, label):
            if response.status == 412 and mode is PutMode.REPLACE:
                raise Unavailable(f"{label}: the server refused an unconditional replacement; try again")
            if response.status not in (200, 201, 204):
                raise await self._status_error(response, label)
        self._validators.pop(key, None)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        label = f"{self.url}: the listing of {prefix!r}"
        await self._check_listable(label)
        query = {"list": "", "prefix": prefix, "delimiter": delimiter, "limit": str(_PAGE)}
        last = ""
        while True:
            async with self._session.request("GET", self._base_url.with_query(query), {}, label) as response:
                self._learn(response)
                await self._check(response, label, 200)
                body = await response.read_all(label, _MAX_PAGE_SIZE)
            try:
                listing = msgspec.json.decode(body, type=_ListPage)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Corrupt(f"{label}: the server sent an invalid listing ({error})") from error
            names = [e.key for e in listing.entries] + listing.folders
            advances = listing.next is None or listing.next > last
            if not advances or not all(name.startswith(prefix) for name in names):
                raise Corrupt(f"{label}: the server listed names that are out of order or were not requested")
            yield Page([Entry(e.key, e.size, e.age) for e in listing.entries], listing.folders)
            if listing.next is None:
                return
            query["after"] = last = listing.next

    async def delete(self, key: str) -> None:
        await self._check_writable(self._label(key))
        async with self._request("DELETE", key, {}) as (response, label):
            if response.status not in (200, 202, 204, 404, 410):
                raise await self._status_error(response, label)

    async def close(self) -> None:
        await self._passes.close()
        await self._session.close()

    def _label(self, key: str) -> str:
        return f"{self.url}: {checked_key(key, self.url)}"

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, key: str, headers: dict[str, str], data: Buffers | None = None
    ) -> AsyncIterator[tuple[Response, str]]:
        """Yield the response to a request, of any status, and the label of the object for errors."""
        label = self._label(key)
        url = URL(f"{self._base_url}{quote(key, safe='/')}", encoded=True)
        async with self._session.request(method, url, headers, label, data) as response:
            self._learn(response)
            yield response, label

    async def _read_range(self, key: str, offset: int, buffers: Buffers, end: int) -> bool:
        """Read a range; return False if the server ignores ranges."""
        async with self._request("GET", key, {"Range": f"bytes={offset}-{end - 1}"}) as (response, label):
            if response.status != 416:
                await self._check(response, label, 200, 206)
            if response.status == 200:
                self._note_ignored_ranges()
                return False
            part = response.checked_range(label, offset, end)
            self._check_unchanged(key, response, part.total, label)
            await response.fill(label, part, buffers)
            return True

    async def _blocks(self, key: str) -> AsyncGenerator[bytes, None]:
        async with self._request("GET", key, {}) as (response, label):
            await self._check(response, label, 200)
            self._check_unchanged(key, response, response.content_length, label)
            async for block in response.blocks():
                yield block

    def _learn(self, response: Response) -> None:
        """Record what the headers of a response reveal about the store's server."""
        if not self._session.is_same_origin(response):
            return
        self._server = self._session.sanitize(response.headers.get("Server", "no name"), 60)
        self._is_tstore |= self._server.startswith("tstore/") or "X-TStore-Version" in response.headers
        if self._ranges is None and response.headers.get("Accept-Ranges", "").lower() == "bytes":
            self._ranges = True

    async def _check(self, response: Response, label: str, *statuses: int) -> None:
        """Raise the error of a response unless it has one of the statuses and its body can be an object."""
        if response.status not in statuses:
            raise await self._status_error(response, label)
        check_data(response, label)
        if response.status == 206 and self._ranges is None:
            self._ranges = True

    async def _status_error(self, response: Response, label: str) -> Exception:
        reason = ""
        media_type = response.headers.get("Content-Type", "").partition(";")[0]
        if response.method != "HEAD" and media_type in ("text/plain", "application/json"):
            reason = (await response.read_reason()).decode("utf-8", "replace")
        if response.status in (404, 410, 412):  # expected during every commit: no explanation needed
            return status_error(response, label, "")
        if media_type == "application/json":
            try:
                reason = msgspec.json.decode(reason, type=_Problem).error
            except msgspec.DecodeError:
                reason = ""
        reason = self._session.sanitize(reason, _MAX_REASON)
        because = f": {reason}" if reason else ""
        if response.status == 401 and not self._session.is_same_origin(response):
            origin = response.url.origin()
            return Denied(
                f"{label}: {origin}, to which the server redirects, wants a token{because}; open the store there"
            )
        if response.status == 401 and not self._session.sends_token:
            return Denied(f"{label}: the server wants a token{because}; {token_advice(self._base_url)}")
        return status_error(response, label, reason)

    def _check_unchanged(self, key: str, response: Response, total: int | None, label: str) -> None:
        current = validator(response, total)
        if current is None:
            return
        earlier = self._validators.pop(key, current)
        if earlier != current:  # popped, so that the new object can be read from now on
            raise Corrupt(
                f"{label} changed since it was read: it was {earlier}, now it is {current}; objects of a store "
                "never change. Find out who replaces files there, then open the store again"
            )
        self._validators[key] = current
        if len(self._validators) > _MAX_VALIDATORS:
            self._validators.popitem(last=False)

    def _note_ignored_ranges(self) -> None:
        """Record that the server ignores `Range`; warn the first time."""
        if self._ranges is not False:
            self._ranges = False
            warn(
                f"{self.url}: the server ({self._server}) ignores Range, so reading part of an object transfers "
                "all of it; use a server that supports ranges, such as nginx or tstore serve",
                RuntimeWarning,
            )

    async def _identify(self, label: str) -> None:
        """Identify the server, unless it has responded before."""
        if self._server is None:
            async with self._session.request("GET", self._base_url / "-" / "health", {}, label) as response:
                self._learn(response)

    async def _check_writable(self, label: str) -> None:
        await self._identify(label)
        if not self._is_tstore:
            raise Denied(
                f"{label} can't be written: the server ({self._server}) is not tstore's, and may not create "
                "objects exclusively. Run `tstore serve` there, or write to another location and copy the files"
            )

    async def _check_listable(self, label: str) -> None:
        await self._identify(label)
        if not self._is_tstore:
            raise Denied(
                f"{self.url} can't be listed: the server ({self._server}) is not tstore's, and plain HTTP has no "
                "listing. Reading snapshots needs none; to write, or to look for garbage, run `tstore serve` there"
            )


def _checksum(buffers: Buffers) -> str:
    state = BlockHash()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()
