"""Objects of an HTTP server: any that serves files for reading, `tstore serve` also for writing.

Reading
1. A part of an object is asked for with `Range`. The answer must be 206, name exactly that range, and be as long.
   Its bytes go from the socket into the caller's buffers (`http_body`); no object is held in memory.
2. A server that ignores `Range` (200) sends each object from its start; one pass over it serves all reads that
   still lie ahead (`http_pass`), and the connection is closed behind the last. It is slow, so there is a warning.
3. Objects of a store never change. The ETag (or else length and time) of each object that is read in parts is
   remembered, and another one later is `Corrupt`. Whatever the server says, checksums have the last word.
4. A web page, an encoded answer, a part that nobody asked for are `Corrupt`, whatever their status.

Writing
5. A server that names itself (`Server: tstore/…`, or `X-TStore-Version` where a proxy has put its own name there)
   creates exclusively: `PUT` with `If-None-Match: *` is answered 201, or 412 where the key is taken. It also
   lists, and deletes. From any other server objects are only read: what it would make of a `PUT` is not known,
   and of two that both succeed one is lost.
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

from tstore.errors import Corrupt, Denied, NotFound, Unavailable
from tstore.runtime.pool import run
from tstore.storage.base import LONGEST, Buffers, Capabilities, checked_key, overlong
from tstore.storage.http.passes import Passes
from tstore.storage.http.reply import Reply
from tstore.storage.http.responses import Sink, age, check_data, content_range, refusal, short, version
from tstore.storage.http.session import Session, address, trusting
from tstore.storage.http.tokens import find_token, token_advice
from tstore.storage.objects import WHOLE, Entry, Page, PutMode, Span
from tstore.storage.pace import checked_timeout

__all__ = ["HttpObjects"]

_REMEMBERED = 4096
_PAGE = 1000
_LONGEST_SAID = 320  # characters of what a server says of a refusal
_LONGEST_PAGE = 4 << 20  # bytes: that many of the longest keys
_CHECKED_HERE = 1 << 20


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


class HttpObjects:
    """The objects below one `http://` or `https://` URL.

    `token` is sent as bearer token to that server alone; without it the one that the environment has for it, in
    `TSTORE_TOKEN_<HOST>` or a line of the file `TSTORE_TOKEN_FILE` (`http_token`), where it is asked for.
    `ca_file` names certificates that are trusted besides the system's. For `timeout` seconds the server may be
    silent (`pace`). Proxies and .netrc of the environment are not used.
    Raises `InvalidArgument` for a URL with a password, query or fragment, and for what can't be a token.
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
        """What the server has shown so far; before its first answer nothing."""
        return Capabilities(
            conditional_create=self._creates,
            listing=self._creates,
            ranges=bool(self._ranges),
            durable=self._creates,
        )

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        """The bytes of the span; fewer, or none, where the object ends before, as slices have it."""
        start, stop = span
        if stop is not None and (start < 0 or stop < 0 or stop <= start):
            entry = await self.head(key)
            if entry is None:
                raise NotFound(f"{self.url}: there is no object {key}")
            start, stop, _ = slice(start, stop).indices(entry.size)
            if stop <= start:
                return b""
        fields = {"Cache-Control": "no-cache"}  # no cache on the way may know of less than the server
        if (start, stop) != (0, None):
            fields["Range"] = f"bytes={'' if start < 0 else start}-{'' if stop is None else stop - 1}"
            if start < 0:
                fields["Range"] = f"bytes={start}"
        async with self._answer("GET", key, fields) as (response, where):
            if response.status == 416 and "Range" in fields:
                return b""
            await self._succeeded(response, where, 200, 206)
            if response.status == 200:
                if "Range" not in fields:
                    return await response.whole(where, most, key)
                self._without_ranges()
                if start < 0:
                    return (await response.whole(where, LONGEST))[start:]
                return await response.part(where, start, stop, most)
            part = content_range(response, where)
            wanted = max(0, (part.total or 0) + start) if start < 0 else start
            end = part.total if part.total is not None and (stop is None or stop > part.total) else stop
            if part.start != wanted or part.stop != end or "Range" not in fields:
                raise _another(where, f"bytes {start} to {stop}", part.start, part.stop)
            if part.stop - part.start > most:
                raise overlong(where, most)
            found = await response.whole(where, part.stop - part.start)
            if len(found) != part.stop - part.start:
                raise _another(where, f"bytes {start} to {stop}", part.start, part.start + len(found))
            return found

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """Fills the buffers (`size` bytes in all) from `offset`; `NotFound`, `Corrupt` where it ends before."""
        if not size:
            return
        if self._ranges is not False and await self._read_range(key, offset, buffers, offset + size):
            return
        where = f"{self.url}: {checked_key(key, self.url)}"
        await self._passes.read(self._blocks, key, offset, buffers, size, where)

    async def head(self, key: str) -> Entry | None:
        """The object's length and age, None where it does not exist."""
        async with self._answer("HEAD", key, {"Cache-Control": "no-cache"}) as (response, where):
            if response.status in (404, 410):
                return None
            await self._succeeded(response, where, 200)
            if response.content_length is None:
                raise Corrupt(
                    f"{where}: the server does not tell how long the object is; let it serve plain files"
                )
            return Entry(key, response.content_length, age(response))

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """Stores the joined buffers as one object, all of it or nothing, durable once answered."""
        await self._writable(f"{self.url}: {checked_key(key, self.url)}")
        size = sum(memoryview(b).nbytes for b in data)
        fields = {"X-TStore-XXH3": _check(data) if size <= _CHECKED_HERE else await run(_check, data)}
        if mode is PutMode.CREATE:
            fields["If-None-Match"] = "*"
        async with self._answer("PUT", key, fields, data) as (response, where):
            if response.status == 412 and mode is PutMode.REPLACE:
                raise Unavailable(f"{where}: the server refused to replace it, without being asked to")
            if response.status not in (200, 201, 204):
                raise await self._refusal(response, where)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """The objects whose keys begin with the prefix, page by page as the server gives them."""
        where = f"{self.url}: the listing of {prefix!r}"
        await self._listing(where)
        query = {"list": "", "prefix": prefix, "delimiter": delimiter, "limit": str(_PAGE)}
        last = ""
        while True:
            async with self._session.answer("GET", self._home.with_query(query), {}, where) as response:
                self._learn(response)
                await self._succeeded(response, where, 200)
                body = await response.whole(where, _LONGEST_PAGE)
            try:
                found = msgspec.json.decode(body, type=_Listing)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Corrupt(f"{where}: what the server answered is no listing ({error})") from error
            named = [e.key for e in found.entries] + found.folders
            forward = found.next is None or found.next > last
            if not forward or not all(name.startswith(prefix) for name in named):
                raise Corrupt(f"{where}: the server listed other names than those that were asked for")
            yield Page([Entry(e.key, e.size, e.age) for e in found.entries], found.folders)
            if found.next is None:
                return
            query["after"] = last = found.next

    async def delete(self, key: str) -> None:
        """Removes the object; no error where it does not exist."""
        await self._writable(f"{self.url}: {checked_key(key, self.url)}")
        async with self._answer("DELETE", key, {}) as (response, where):
            if response.status not in (200, 202, 204, 404, 410):
                raise await self._refusal(response, where)

    async def close(self) -> None:
        """Ends the session with the server."""
        await self._passes.close()
        await self._session.close()

    def __repr__(self) -> str:
        return f"<HttpObjects {self.url}>"

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, key: str, fields: dict[str, str], data: Buffers | None = None
    ) -> AsyncIterator[tuple[Reply, str]]:
        where = f"{self.url}: {checked_key(key, self.url)}"
        url = URL(f"{self._home}{quote(key, safe='/')}", encoded=True)
        async with self._session.answer(method, url, fields, where, data) as response:
            self._learn(response)
            yield response, where

    async def _read_range(self, key: str, offset: int, buffers: Buffers, end: int) -> bool:
        """Whether the server gave the range alone."""
        async with self._answer("GET", key, {"Range": f"bytes={offset}-{end - 1}"}) as (response, where):
            if response.status == 416:
                raise short(where, offset, end)
            await self._succeeded(response, where, 200, 206)
            if response.status == 200:
                self._without_ranges()
                return False
            part = content_range(response, where)
            if part.start == offset and part.stop == part.total and part.stop < end:
                raise short(where, offset, end, part.total)
            if (part.start, part.stop) != (offset, end):
                raise _another(where, f"bytes {offset} to {end}", part.start, part.stop)
            self._check_unchanged(key, response, part.total, where)
            sink = Sink(buffers)
            if not await response.fill(sink):
                raise _another(where, f"bytes {offset} to {end}", offset, None)
            if not sink.full:
                raise short(where, offset, end)
            return True

    async def _blocks(self, key: str) -> AsyncGenerator[bytes, None]:
        async with self._answer("GET", key, {}) as (response, where):
            await self._succeeded(response, where, 200)
            self._check_unchanged(key, response, response.content_length, where)
            async for block in response.blocks():
                yield block

    def _learn(self, response: Reply) -> None:
        """What the store's own server is; what it once showed it keeps."""
        if not self._session.at_home(response):
            return
        self._server = self._session.hidden(response.headers.get("Server", "no name"), 60)
        self._creates |= self._server.startswith("tstore/") or "X-TStore-Version" in response.headers
        if self._ranges is None and response.headers.get("Accept-Ranges", "").lower() == "bytes":
            self._ranges = True

    async def _succeeded(self, response: Reply, where: str, *statuses: int) -> None:
        if response.status not in statuses:
            raise await self._refusal(response, where)
        check_data(response, where)
        if response.status == 206 and self._ranges is None:
            self._ranges = True

    async def _refusal(self, response: Reply, where: str) -> Exception:
        said = ""
        kind = response.headers.get("Content-Type", "").partition(";")[0]
        if response.method != "HEAD" and kind in ("text/plain", "application/json"):
            said = (await response.reason()).decode("utf-8", "replace")
        if kind == "application/json":
            try:
                said = msgspec.json.decode(said, type=_Refused).error
            except msgspec.DecodeError:
                said = ""
        said = self._session.hidden(said, _LONGEST_SAID)
        because = f": {said}" if said else ""
        if response.status == 401 and not self._session.at_home(response):
            place = response.url.origin()
            return Denied(f"{where}: {place}, where the server led, wants a token{because}; open the URL there")
        if response.status == 401 and not self._session.known:
            return Denied(f"{where}: the server wants a token{because}; {token_advice(self._home)}")
        return refusal(response, where, said)

    def _check_unchanged(self, key: str, response: Reply, total: int | None, where: str) -> None:
        found = version(response, total)
        if found is None:
            return
        before = self._versions.pop(key, found)
        if before != found:  # and forgotten, so that what is there now can be read from here on
            raise Corrupt(
                f"{where} changed while it was read: it was {before}, now it is {found}; objects of a store never "
                "change. Find out who replaces files there, then open the store again"
            )
        self._versions[key] = found
        if len(self._versions) > _REMEMBERED:
            self._versions.popitem(last=False)

    def _without_ranges(self) -> None:
        if self._ranges is not False:
            self._ranges = False
            warnings.warn(
                f"{self.url}: the server ({self._server}) ignores Range, so whoever reads parts has whole "
                "objects transferred; serve the store with one that has ranges, as nginx or tstore serve",
                RuntimeWarning,
                stacklevel=2,
            )

    async def _ask_its_name(self, where: str) -> None:
        if self._server is None:
            async with self._session.answer("GET", self._home / "-" / "health", {}, where) as response:
                self._learn(response)

    async def _writable(self, where: str) -> None:
        await self._ask_its_name(where)
        if not self._creates:
            raise Denied(
                f"{where} can't be written: the server ({self._server}) is not tstore's, so nobody knows whether "
                "it creates objects exclusively. Run `tstore serve` there, or write at the source and copy"
            )

    async def _listing(self, where: str) -> None:
        await self._ask_its_name(where)
        if not self._creates:
            raise Denied(
                f"{self.url} lists nothing: the server ({self._server}) is not tstore's, and plain HTTP has no "
                "listing. Reading snapshots needs none; to write, or to look for garbage, run `tstore serve` there"
            )


def _check(data: Buffers) -> str:
    whole = xxhash.xxh3_128()
    for buffer in data:
        whole.update(buffer)
    return whole.hexdigest()


def _another(where: str, wanted: str, start: int, stop: int | None) -> Corrupt:
    got = f"{start} to {stop}" if stop is not None else f"{start} and on, beyond them"
    return Corrupt(f"{where}: {wanted} were asked for, the server answered with {got}; check what serves it")
