"""Objects in a bucket of Google Cloud Storage (`gs://bucket/path`), over its JSON API.

gcsfs finds the endpoint and the credentials (`credentials`); the requests are made here, one for each call. gcsfs
itself repeats a request without telling, and reports a create of its own that landed as one that exists; it copies
the body of an upload; and its reads end in memory of their own.

1. An object is stored by one multipart upload of its metadata and its bytes, whatever its length. With
   `PutMode.CREATE` the upload carries `ifGenerationMatch=0`: the server stores it only where no object has that
   name.
2. The metadata hold the CRC32C of the bytes: Google's server refuses what arrived as something else. The answer
   holds the checksum of what was stored; it is compared too, for servers that do not look.
3. The metadata hold a token that no other upload has. Where the answer is 412 (the name is taken), the token of
   the stored object is read: if it is ours, the server or a proxy had repeated the request, and the create won.
4. A 404 may mean the bucket: unless it says "object", and the bucket was not seen yet, one listing of at most one
   name tells. The error names the bucket.
5. 401 means that nothing was done; credentials that can be renewed are, once, and the request is made again.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlencode

import google_crc32c
import msgspec
import numpy as np
from yarl import URL

from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    TStoreError,
    Unavailable,
)
from tstore.runtime import world
from tstore.runtime.pool import run
from tstore.storage.base import LONGEST, Buffers, Capabilities, checked_key, overlong
from tstore.storage.gcs.credentials import Login
from tstore.storage.gcs.responses import Listing, Object, age, clock, decoded, problem, refused
from tstore.storage.http.reply import Reply
from tstore.storage.http.responses import Sink, check_data, content_range, sanitize
from tstore.storage.http.session import Session, address, trusting
from tstore.storage.objects import WHOLE, Entry, Page, PutMode, Span
from tstore.storage.pace import checked_timeout

__all__ = ["GcsObjects"]

_PAGE = 1000  # names; more are not given at once
_LONG = 1 << 20  # bytes from which a checksum is a thread's work
_TOKEN = "tstore-upload"


class GcsObjects:
    """The objects below one path of a bucket; calls raise `InvalidArgument` where there is no such bucket.

    `token`, `endpoint_url` and `requester_pays` (True, or the project that pays) are those of gcsfs; `project` is
    the one that pays where `requester_pays` is True. `ca_file` names certificates that are trusted besides the
    system's. For `timeout` seconds the server may be silent (`pace`). Raises `InvalidArgument` for a URL without a
    bucket, and for what can't be an option.
    """

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True)

    def __init__(
        self,
        url: str,
        token: object = None,
        endpoint_url: str | None = None,
        project: str | None = None,
        requester_pays: bool | str = False,
        ca_file: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._bucket, prefix = _place(url)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"gs://{self._bucket}/{prefix}".rstrip("/")
        if endpoint_url is not None:
            try:
                endpoint_url = str(address(endpoint_url))
            except InvalidArgument as error:
                raise InvalidArgument(f"{self.url}: endpoint_url: {error}") from None
        self._login = Login(self.url, token, endpoint_url)
        self._payer = _payer(self.url, project, requester_pays)
        self._trusted = None if ca_file is None else trusting(ca_file)
        self._timeout = checked_timeout(timeout)
        self._session: Session | None = None
        self._bucket_seen = False

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        """The bytes of the span; fewer, or none, where the object ends before, as slices have it. `NotFound`."""
        start, stop = span
        if (start < 0 and stop is not None) or (stop is not None and stop <= max(start, 0)):
            entry = await self.head(key)
            if entry is None:
                raise NotFound(f"{self.url}: there is no object {key}")
            start, stop, _ = slice(start, stop).indices(entry.size)
            if start >= stop:
                return b""
        fields = {}
        if start < 0:
            fields["Range"] = f"bytes={start}"
        elif span != WHOLE:
            fields["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        async with self._data(key, fields) as response:
            if response.status == 416 or response.content_length == 0:  # fake-gcs-server: 206, "bytes 0--1/0"
                return b""
            found = _held(response, self._where(key))
            if start >= 0 and (found.start > start or (found.start < start and response.status != 200)):
                raise Corrupt(f"{self._where(key)}: bytes from {found.start} on came, not from {start} on")
            if response.status == 200:  # all of it, as it was asked for, or as the server knows no ranges
                whole = await response.whole(self._where(key), most if span == WHOLE else LONGEST, key)
                return whole[start:stop]
            if len(found) > most:
                raise overlong(self._where(key), most)
            return await response.whole(self._where(key), len(found))

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """Fills the buffers (`size` bytes in all) from `offset`; `NotFound`, `Corrupt` where it ends before."""
        if size == 0:
            return
        where = self._where(key)
        async with self._data(key, {"Range": f"bytes={offset}-{offset + size - 1}"}) as response:
            found = _held(response, where)
            if found != range(offset, offset + size):
                came = f"{found.start} to {found.stop} came" if found else "the object ends before"
                raise Corrupt(f"{where}: {size} bytes expected at {offset}, but {came}")
            sink = Sink(buffers)
            if not await response.fill(sink):
                raise Corrupt(f"{where}: the server sent more than the {size} bytes it announced")
            if not sink.full:
                raise Unavailable(f"{where}: the answer broke off")

    async def head(self, key: str) -> Entry | None:
        """The object's length and age, None where it does not exist."""
        try:
            found, now = await self._metadata(key, "name,size,updated")
        except NotFound:
            return None
        return Entry(key, found.size, age(found, now))

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """Stores the joined buffers as one object, all of it or nothing, durable once answered."""
        where = self._where(key)
        views = [memoryview(b).cast("B") for b in data]
        size = sum(map(len, views))
        check = await run(_crc32c, views) if size >= _LONG else _crc32c(views)
        token = world.token(16)
        metadata: dict[str, Any] = {"name": self._name(key), "crc32c": check, "metadata": {_TOKEN: token}}
        if mode is PutMode.REPLACE:
            metadata["cacheControl"] = "no-store"  # else Google may show an object that all may read for an hour
        boundary = world.token(16)  # the bytes hold it by no chance worth the name
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode()
            + msgspec.json.encode(metadata)
            + f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        )
        query = {"uploadType": "multipart", "fields": "size,crc32c"}
        if mode is PutMode.CREATE:
            query["ifGenerationMatch"] = "0"
        fields = {"Content-Type": f"multipart/related; boundary={boundary}"}
        body = [head, *views, f"\r\n--{boundary}--\r\n".encode()]
        try:
            async with self._asked("POST", "upload/storage/v1", "", query, where, fields, body) as response:
                stored = await decoded(response, Object, where)
        except NotFound:
            raise self._no_bucket() from None
        except AlreadyExists:
            if not await self._is_ours(key, token):
                raise
            return
        if stored.size != size or stored.crc32c not in (None, check):
            raise Corrupt(
                f"{where}: sent were {size} bytes with CRC32C {check}, but the server stored {stored.size} bytes "
                f"with {sanitize(str(stored.crc32c))}; what stands there is damaged, delete it"
            )

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """The objects whose keys begin with the prefix, page by page as the server gives them."""
        query = {
            "prefix": self._prefix + prefix,
            "maxResults": str(_PAGE),
            "fields": "nextPageToken,prefixes,items(name,size,updated)",
        }
        if delimiter:
            query["delimiter"] = delimiter
        cut = len(self._prefix)
        more: str | None = ""
        while more is not None:
            if more:
                query["pageToken"] = more
            try:
                async with self._asked("GET", "storage/v1", "", query, self.url) as response:
                    listing = await decoded(response, Listing, self.url)
                    now = clock(response)
            except NotFound:
                raise self._no_bucket() from None
            entries = [  # consoles put an empty object "folder/" where a folder is made; it is none of ours
                Entry(found.name[cut:], found.size, age(found, now))
                for found in listing.items
                if not found.name.endswith("/")
            ]
            yield Page(entries, [name[cut:] for name in listing.prefixes])
            if listing.next_page_token and listing.next_page_token == more:
                raise Corrupt(f"{self.url}: the server lists one page for ever; check that it is Google's")
            more = listing.next_page_token or None

    async def delete(self, key: str) -> None:
        """Removes the object; no error where it does not exist."""
        name = quote(self._name(key), safe="")
        with contextlib.suppress(NotFound):
            async with self._asked("DELETE", "storage/v1", name, {}, self._where(key), fine=(200, 204)):
                pass

    async def close(self) -> None:
        """Ends the session with the server."""
        if self._session is not None:
            await self._session.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key, self.url)

    def _where(self, key: str) -> str:
        return f"{self.url}: {key}"

    @contextlib.asynccontextmanager
    async def _data(self, key: str, fields: dict[str, str]) -> AsyncIterator[Reply]:
        """The answer with an object's bytes: all of them, or with `Range` in the fields a part (or status 416)."""
        name = quote(self._name(key), safe="")
        fine = (200, 206, 416) if fields else (200,)
        try:
            async with self._asked(
                "GET", "download/storage/v1", name, {"alt": "media"}, self._where(key), fields, fine=fine
            ) as response:
                check_data(response, self._where(key))
                yield response
        except NotFound:
            await self._check_bucket()
            raise

    async def _metadata(self, key: str, names: str) -> tuple[Object, datetime.datetime | None]:
        where = self._where(key)
        try:
            async with self._asked(
                "GET", "storage/v1", quote(self._name(key), safe=""), {"fields": names}, where
            ) as response:
                return await decoded(response, Object, where), clock(response)
        except NotFound:
            await self._check_bucket()
            raise

    async def _is_ours(self, key: str, token: str) -> bool:
        """Whether the object that stands at the key was stored by the upload with that token."""
        try:
            found, _ = await self._metadata(key, "metadata")
        except NotFound:
            return False
        return found.metadata.get(_TOKEN) == token

    async def _check_bucket(self) -> None:
        """Raises `InvalidArgument` where the bucket is missing, if that can be learned."""
        if self._bucket_seen:
            return
        with contextlib.suppress(Denied):  # who may read objects may not list them
            try:
                async with self._asked("GET", "storage/v1", "", {"maxResults": "1", "fields": "kind"}, self.url):
                    pass
            except NotFound:
                raise self._no_bucket() from None
        self._bucket_seen = True

    def _no_bucket(self) -> TStoreError:
        return InvalidArgument(
            f"{self.url}: there is no bucket {self._bucket}; check the URL (and endpoint_url or "
            f"STORAGE_EMULATOR_HOST), or create the bucket (gcloud storage buckets create gs://{self._bucket})"
        )

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        method: str,
        service: str,
        name: str,
        query: dict[str, str],
        where: str,
        fields: dict[str, str] | None = None,
        data: Buffers | None = None,
        fine: tuple[int, ...] = (200,),
    ) -> AsyncIterator[Reply]:
        """The answer to a request, if its status is one of `fine`; its error otherwise."""
        endpoint = await self._login.endpoint()
        if self._payer is not None:
            query = {**query, "userProject": self._payer}
        path = f"{service}/b/{quote(self._bucket, safe='')}/o{'/' if name else ''}{name}"
        url = URL(f"{endpoint}/{path}{'?' if query else ''}{urlencode(query, quote_via=quote)}", encoded=True)
        if self._session is None:
            self._session = Session(url, None, self._trusted, self._timeout)
        for last in (False, True):
            shown = {**(fields or {}), **await self._login.fields()}
            async with self._session.answer(method, url, shown, where, data) as response:
                if response.status in fine:
                    self._bucket_seen = True
                    yield response
                    return
                if response.status == 401 and not last and await self._login.renew(shown):
                    continue
                told = await problem(response)
                # Google's words; from who has others, one request more tells
                self._bucket_seen |= response.status == 404 and told.message.startswith("No such object")
                raise refused(response, told, where, self._login, self._bucket)


def _place(url: str) -> tuple[str, str]:
    """The bucket, and the path below it without slashes around."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket or not all(c.isalnum() or c in "-_." for c in bucket):
        raise InvalidArgument("the URL names no bucket; expected gs://bucket/path")
    prefix = prefix.strip("/")
    return bucket, checked_key(prefix, f"gs://{bucket}") if prefix else ""


def _payer(url: str, project: str | None, requester_pays: bool | str) -> str | None:
    if requester_pays is True and not project:
        raise InvalidArgument(f"{url}: with requester_pays=True, project=… says who pays")
    return requester_pays if isinstance(requester_pays, str) else project if requester_pays else None


def _held(response: Reply, where: str) -> range:
    """Which bytes of the object the answer holds; all of them where the server does not know ranges."""
    if response.status == 206:
        start, stop, _ = content_range(response, where)
        return range(start, stop)
    return range(response.content_length or 0) if response.status == 200 else range(0)


def _crc32c(data: Buffers) -> str:
    value = 0
    for buffer in data:
        if len(buffer):
            # an array, because the library refuses views of memory that can be written
            value = google_crc32c.extend(value, np.frombuffer(buffer, np.uint8))
    return base64.b64encode(value.to_bytes(4, "big")).decode()
