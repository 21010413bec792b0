"""Objects on an HTTP server: reading from any that serves files, writing to `tstore serve`.

Reading
1. Part of an object is requested with `Range`. The response must be 206, name exactly that range, and be as long.
   Its bytes go from the socket into the caller's buffers (`body`); no object is held in memory.
2. A server that ignores `Range` (200) sends each object from its start; one pass over it serves all reads that are
   still ahead of it (`passes`), and the connection is closed after the last. That is slow, so a warning is given.
3. Objects of a store never change. The ETag (or else length and time) of each object that is read in parts is
   remembered, and a different one later is `Corrupt`. Whatever the server says, checksums decide in the end.
4. A web page, an encoded response, or a part that was not requested is `Corrupt`, whatever its status.

Writing
5. A server that identifies itself (`Server: tstore/…`, or `X-TStore-Version` if a proxy replaced that header)
   creates exclusively: its response to `PUT` with `If-None-Match: *` is 201, or 412 if the key is taken. It also
   lists and deletes. Any other server is only read from: it is unknown whether its `PUT` is exclusive, and if two
   succeed, one is lost.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from urllib.parse import quote

import msgspec
import xxhash
from yarl import URL

from tstore.errors import Corrupt, Denied, Unavailable
from tstore.runtime.pool import run
from tstore.storage.base import Storage
from tstore.storage.http.body import Response
from tstore.storage.http.passes import Passes
from tstore.storage.http.responses import age, check_data, refusal, version
from tstore.storage.http.session import Session, address, trusting
from tstore.storage.http.tokens import find_token, token_advice
from tstore.storage.limits import checked_timeout
from tstore.storage.objects import LONGEST, Buffers, Capabilities, Durability, Entry, Page, PutMode, checked_key

__all__ = ["HttpStorage"]

_REMEMBERED = 4096
_PAGE = 1000
_LONGEST_SAID = 320  # characters of a server's explanation that an error quotes
_LONGEST_PAGE = 4 << 20  # bytes: `_PAGE` of the longest keys
_CHECKED_HERE = 1 << 20  # bytes; a longer body is hashed by a thread


class _Listed(msgspec.Struct):
    key: str
    size: int
    age: float | None = None


class _Listing(msgspec.Struct):
    entries: list[_Listed]
    folders: list[str] = []
    next: str | None = None


class _Refused(msgspec.Struct):
    error: str


class HttpStorage(Storage):
    """The objects below an `http://` or `https://` URL.

    `token` is sent as a bearer token to this server only. Without it, if the server asks for a token, the one that
    the environment binds to this server is sent: `TSTORE_TOKEN_<HOST>`, or a line of the file `TSTORE_TOKEN_FILE`
    (`tokens`). `ca_file` names certificates to trust besides the system's. The server may be silent for `timeout`
    seconds (`limits`). Proxies and .netrc of the environment are not used.
    Raise `InvalidArgument` for a URL with a password, query or fragment, and for an invalid token.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._home = address(url)
        self.url = str(self._home).rstrip("/")
        trusted = None if ca_file is None else trusting(ca_file)
        self._session = Session(self._home, find_token(self._home, token), trusted, checked_timeout(timeout))
        self._server: str | None = None
        self._creates = False
        self._ranges: bool | None = None
        self._versions: OrderedDict[str, str] = OrderedDict()
        self._passes = Passes()

    @property
    def capabilities(self) -> Capabilities:
        """What the server has shown so far; nothing before its first response."""
        return Capabilities(
            conditional_create=self._creates,
            listing=self._creates,
            ranges=bool(self._ranges),
            durable=self._creates,
        )

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        no_cache = {"Cache-Control": "no-cache"}  # a cache on the way may lack objects that the server has
        async with self._request("GET", key, no_cache) as (response, where):
            await self._check(response, where, 200)
            return await response.whole(where, LONGEST if max_size is None else max_size, key)

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        if not size:
            return
        if self._ranges is not False and await self._read_range(key, offset, buffers, offset + size):
            return
        where = f"{self.url}: {checked_key(key, self.url)}"
        await self._passes.read(self._blocks, key, offset, buffers, size, where)

    async def head(self, key: str) -> Entry | None:
        async with self._request("HEAD", key, {"Cache-Control": "no-cache"}) as (response, where):
            if response.status in (404, 410):
                return None
            await self._check(response, where, 200)
            if response.content_length is None:
                raise Corrupt(
                    f"{where}: the server sends no length of the object; configure it to serve plain files"
                )
            return Entry(key, response.content_length, age(response))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        await self._check_writable(f"{self.url}: {checked_key(key, self.url)}")
        size = sum(memoryview(b).nbytes for b in buffers)
        checksum = _checksum(buffers) if size <= _CHECKED_HERE else await run(_checksum, buffers)
        headers = {"X-TStore-XXH3": checksum}
        if mode is PutMode.CREATE:
            headers["If-None-Match"] = "*"
        async with self._request("PUT", key, headers, buffers) as (response, where):
            if response.status == 412 and mode is PutMode.REPLACE:
                raise Unavailable(f"{where}: the server refused an unconditional replacement; try again")
            if response.status not in (200, 201, 204):
                raise await self._refusal(response, where)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        where = f"{self.url}: the listing of {prefix!r}"
        await self._check_lists(where)
        query = {"list": "", "prefix": prefix, "delimiter": delimiter, "limit": str(_PAGE)}
        last = ""
        while True:
            async with self._session.request("GET", self._home.with_query(query), {}, where) as response:
                self._learn(response)
                await self._check(response, where, 200)
                body = await response.whole(where, _LONGEST_PAGE)
            try:
                listing = msgspec.json.decode(body, type=_Listing)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Corrupt(f"{where}: the server sent an invalid listing ({error})") from error
            names = [e.key for e in listing.entries] + listing.folders
            forward = listing.next is None or listing.next > last
            if not forward or not all(name.startswith(prefix) for name in names):
                raise Corrupt(f"{where}: the server listed names that were not requested")
            yield Page([Entry(e.key, e.size, e.age) for e in listing.entries], listing.folders)
            if listing.next is None:
                return
            query["after"] = last = listing.next

    async def delete(self, key: str) -> None:
        await self._check_writable(f"{self.url}: {checked_key(key, self.url)}")
        async with self._request("DELETE", key, {}) as (response, where):
            if response.status not in (200, 202, 204, 404, 410):
                raise await self._refusal(response, where)

    async def close(self) -> None:
        await self._passes.close()
        await self._session.close()

    def __repr__(self) -> str:
        return f"<HttpStorage {self.url}>"

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, key: str, headers: dict[str, str], data: Buffers | None = None
    ) -> AsyncIterator[tuple[Response, str]]:
        where = f"{self.url}: {checked_key(key, self.url)}"
        url = URL(f"{self._home}{quote(key, safe='/')}", encoded=True)
        async with self._session.request(method, url, headers, where, data) as response:
            self._learn(response)
            yield response, where

    async def _read_range(self, key: str, offset: int, buffers: Buffers, end: int) -> bool:
        """Read a range; return False if the server ignores ranges."""
        async with self._request("GET", key, {"Range": f"bytes={offset}-{end - 1}"}) as (response, where):
            if response.status != 416:
                await self._check(response, where, 200, 206)
            if response.status == 200:
                self._warn_of_ranges()
                return False
            part = response.range(where, offset, end)
            self._check_unchanged(key, response, part.total, where)
            await response.fill(where, part, buffers)
            return True

    async def _blocks(self, key: str) -> AsyncGenerator[bytes, None]:
        async with self._request("GET", key, {}) as (response, where):
            await self._check(response, where, 200)
            self._check_unchanged(key, response, response.content_length, where)
            async for block in response.blocks():
                yield block

    def _learn(self, response: Response) -> None:
        """Record what the store's server can do."""
        if not self._session.at_home(response):
            return
        self._server = self._session.hidden(response.headers.get("Server", "no name"), 60)
        self._creates |= self._server.startswith("tstore/") or "X-TStore-Version" in response.headers
        if self._ranges is None and response.headers.get("Accept-Ranges", "").lower() == "bytes":
            self._ranges = True

    async def _check(self, response: Response, where: str, *statuses: int) -> None:
        """Raise the error of a response unless it has one of the statuses and carries an object."""
        if response.status not in statuses:
            raise await self._refusal(response, where)
        check_data(response, where)
        if response.status == 206 and self._ranges is None:
            self._ranges = True

    async def _refusal(self, response: Response, where: str) -> Exception:
        said = ""
        kind = response.headers.get("Content-Type", "").partition(";")[0]
        if response.method != "HEAD" and kind in ("text/plain", "application/json"):
            said = (await response.reason()).decode("utf-8", "replace")
        if response.status in (404, 410, 412):  # expected during every commit, and needs no explanation
            return refusal(response, where, "")
        if kind == "application/json":
            try:
                said = msgspec.json.decode(said, type=_Refused).error
            except msgspec.DecodeError:
                said = ""
        said = self._session.hidden(said, _LONGEST_SAID)
        because = f": {said}" if said else ""
        if response.status == 401 and not self._session.at_home(response):
            origin = response.url.origin()
            return Denied(
                f"{where}: {origin}, to which the server redirects, wants a token{because}; open that URL"
            )
        if response.status == 401 and not self._session.token_shown:
            return Denied(f"{where}: the server wants a token{because}; {token_advice(self._home)}")
        return refusal(response, where, said)

    def _check_unchanged(self, key: str, response: Response, total: int | None, where: str) -> None:
        now = version(response, total)
        if now is None:
            return
        before = self._versions.pop(key, now)
        if before != now:  # it is forgotten here, so that the new object can be read from now on
            raise Corrupt(
                f"{where} changed while it was read: it was {before}, now it is {now}; objects of a store never "
                "change. Find out who replaces files there, then open the store again"
            )
        self._versions[key] = now
        if len(self._versions) > _REMEMBERED:
            self._versions.popitem(last=False)

    def _warn_of_ranges(self) -> None:
        if self._ranges is not False:
            self._ranges = False
            warnings.warn(
                f"{self.url}: the server ({self._server}) ignores Range, so reading part of an object transfers "
                "all of it; serve the store with one that supports ranges, such as nginx or tstore serve",
                RuntimeWarning,
                stacklevel=2,
            )

    async def _identify(self, where: str) -> None:
        """Find out which server this is."""
        if self._server is None:
            async with self._session.request("GET", self._home / "-" / "health", {}, where) as response:
                self._learn(response)

    async def _check_writable(self, where: str) -> None:
        await self._identify(where)
        if not self._creates:
            raise Denied(
                f"{where} can't be written: the server ({self._server}) is not tstore's, and may not create "
                "objects exclusively. Run `tstore serve` there, or write at the source and copy"
            )

    async def _check_lists(self, where: str) -> None:
        await self._identify(where)
        if not self._creates:
            raise Denied(
                f"{self.url} lists nothing: the server ({self._server}) is not tstore's, and plain HTTP has no "
                "listing. Reading snapshots needs none; to write, or to look for garbage, run `tstore serve` there"
            )


def _checksum(buffers: Buffers) -> str:
    whole = xxhash.xxh3_128()
    for buffer in buffers:
        whole.update(buffer)
    return whole.hexdigest()
