"""Objects in a bucket of Google Cloud Storage (`gs://bucket/path`), over its JSON API.

gcsfs finds the endpoint and the credentials (`credentials`); the requests are made here. gcsfs itself would repeat
a request silently and then report its own create as another writer's. It would also copy the bodies of uploads and
downloads. Like gcloud and google.auth, the requests use the proxies of the environment.

1. An object of any length is stored by one multipart upload of its metadata and its bytes. With
   `PutMode.CREATE` the upload carries `ifGenerationMatch=0`: the server stores it only if no object has that name.
2. The metadata contain the CRC32C of the bytes: Google's server refuses a body with another checksum. The response
   contains the checksum of the stored object; it is compared too, for servers that do not check.
3. The metadata contain a token that is unique to the upload. If the response is 412 (the name is taken), the token
   of the stored object is read. If it is ours, the server or a proxy repeated a request that had succeeded.
4. A 404 may mean that the bucket does not exist, or does not exist any more. Unless the response names the object,
   as Google's does, a listing of at most one name decides. The error names the bucket.
5. A response of 401 means that the request had no effect. If the credentials can be renewed, the request is
   repeated once.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import datetime
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote, urlencode

import google_crc32c
import msgspec
import numpy as np
from yarl import URL

from tstore.core.runtime import world
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.gcs.credentials import Credentials
from tstore.core.storage.gcs.responses import (
    ListPage,
    Metadata,
    age,
    decode,
    mapped_error,
    read_problem,
    says_no_object,
    server_time,
)
from tstore.core.storage.http.body import Response
from tstore.core.storage.http.responses import check_data, sanitize
from tstore.core.storage.http.session import Session, environment_proxy, parse_address, tls_context
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
    prefixes_above,
)
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotFound, TStoreError

__all__ = ["GcsStorage"]

_PAGE = 1000  # names, the server's maximum
_LONG = 1 << 20  # bytes; the checksum of a longer body is computed in the thread pool
_UPLOAD = "tstore-upload"  # the key of the upload's token in the metadata of an object


class GcsStorage(Storage):
    """The objects below a path of a bucket.

    `token`, `endpoint_url` and `requester_pays` (True, or the project that pays) mean what they mean in gcsfs;
    `project` pays if `requester_pays` is True. `ca_file` names certificates to trust besides the system's. The
    server may be silent for `timeout` seconds (`limits`). Raise `InvalidArgument` for a URL without a bucket or an
    invalid option; requests other than `delete` raise it if the bucket does not exist.
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
        self._bucket, prefix = _split_url(url)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"gs://{self._bucket}/{prefix}".rstrip("/")
        if endpoint_url is not None:
            try:
                endpoint_url = str(parse_address(endpoint_url))
            except InvalidArgument as error:
                raise InvalidArgument(f"{self.url}: endpoint_url: {error}") from None
        self._credentials = Credentials(self.url, token, endpoint_url)
        self._payer = _payer(self.url, project, requester_pays)
        self._tls = None if ca_file is None else tls_context(ca_file)
        self._timeout = checked_timeout(timeout)
        self._session: Session | None = None

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        async with self._data(key, {}) as response:
            return await response.read_all(
                self._label(key), MAX_OBJECT_BYTES if max_size is None else max_size, key
            )

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        if size == 0:
            return
        label, end = self._label(key), offset + size
        async with self._data(key, {"Range": f"bytes={offset}-{end - 1}"}) as response:
            await response.fill(label, response.checked_range(label, offset, end), buffers)

    async def head(self, key: str) -> Entry | None:
        try:
            metadata, now = await self._metadata(key, "name,size,updated")
        except NotFound:
            return None
        return Entry(key, metadata.size, age(metadata, now))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        label = self._label(key)
        views = [memoryview(b).cast("B") for b in buffers]
        size = sum(map(len, views))
        check = await run(_crc32c, views) if size >= _LONG else _crc32c(views)
        upload_token = world.token(16)
        metadata: dict[str, Any] = {"name": self._name(key), "crc32c": check, "metadata": {_UPLOAD: upload_token}}
        if mode is PutMode.REPLACE:
            metadata["cacheControl"] = "no-store"  # else Google may cache a public object for an hour
        boundary = world.token(16)  # the chance that the bytes contain it is negligible
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode()
            + msgspec.json.encode(metadata)
            + f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        )
        query = {"uploadType": "multipart", "fields": "size,crc32c"}
        if mode is PutMode.CREATE:
            query["ifGenerationMatch"] = "0"
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        body = [head, *views, f"\r\n--{boundary}--\r\n".encode()]
        try:
            async with self._request("POST", "upload/storage/v1", "", query, label, headers, body) as response:
                stored = await decode(response, Metadata, label)
        except NotFound:
            raise self._no_bucket() from None
        except AlreadyExists:
            if not await self._is_ours(key, upload_token):
                raise
            return
        if stored.size != size or stored.crc32c not in (None, check):
            raise Corrupt(
                f"{label}: {size} bytes with CRC32C {check} were sent, but the server stored {stored.size} bytes "
                f"with {sanitize(str(stored.crc32c))}; the stored object is damaged, delete it"
            )

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        query = {
            "prefix": self._prefix + prefix,
            "maxResults": str(_PAGE),
            "fields": "nextPageToken,prefixes,items(name,size,updated)",
        }
        if delimiter:
            query["delimiter"] = delimiter
        skip = len(self._prefix)
        page_token: str | None = ""
        while page_token is not None:
            if page_token:
                query["pageToken"] = page_token
            try:
                async with self._request("GET", "storage/v1", "", query, self.url) as response:
                    listing = await decode(response, ListPage, self.url)
                    now = server_time(response)
            except NotFound:
                raise self._no_bucket() from None
            entries = [  # not the empty object "folder/" that consoles create for a folder
                Entry(item.name[skip:], item.size, age(item, now))
                for item in listing.items
                if not item.name.endswith("/")
            ]
            yield Page(entries, [name[skip:] for name in listing.prefixes])
            if listing.next_page_token and listing.next_page_token == page_token:
                raise Corrupt(f"{self.url}: the server repeats a page of the listing; check that it is Google's")
            page_token = listing.next_page_token or None

    async def delete(self, key: str) -> None:
        name = quote(self._name(key), safe="")
        with contextlib.suppress(NotFound):
            async with self._request("DELETE", "storage/v1", name, {}, self._label(key), accepted=(200, 204)):
                pass

    def above(self) -> Iterator[Storage]:
        for prefix in prefixes_above(self._prefix):
            folder = copy.copy(self)  # with the same connections
            folder._prefix, folder.url = prefix, f"gs://{self._bucket}/{prefix}".rstrip("/")
            yield folder

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key, self.url)

    def _label(self, key: str) -> str:
        return f"{self.url}: {key}"

    @contextlib.asynccontextmanager
    async def _data(self, key: str, headers: dict[str, str]) -> AsyncIterator[Response]:
        """Yield the response with an object's bytes; with a `Range` header it has part of them, or status 416."""
        name = quote(self._name(key), safe="")
        accepted = (200, 206, 416) if headers else (200,)
        async with self._request(
            "GET", "download/storage/v1", name, {"alt": "media"}, self._label(key), headers, accepted=accepted
        ) as response:
            check_data(response, self._label(key))
            yield response

    async def _metadata(self, key: str, fields: str) -> tuple[Metadata, datetime.datetime | None]:
        label = self._label(key)
        name = quote(self._name(key), safe="")
        async with self._request("GET", "storage/v1", name, {"fields": fields}, label) as response:
            return await decode(response, Metadata, label), server_time(response)

    async def _is_ours(self, key: str, upload_token: str) -> bool:
        """Return whether the stored object is from the upload with this token."""
        try:
            stored, _ = await self._metadata(key, "metadata")
        except NotFound:
            return False
        return stored.metadata.get(_UPLOAD) == upload_token

    async def _check_bucket(self) -> None:
        """Raise `InvalidArgument` if the bucket does not exist, unless permissions hide that."""
        with contextlib.suppress(Denied):  # permission to read objects does not include listing them
            try:
                async with self._request("GET", "storage/v1", "", {"maxResults": "1", "fields": "kind"}, self.url):
                    pass
            except NotFound:
                raise self._no_bucket() from None

    def _no_bucket(self) -> TStoreError:
        return InvalidArgument(
            f"{self.url}: bucket {self._bucket} does not exist; check the URL (and endpoint_url or "
            f"STORAGE_EMULATOR_HOST), or create the bucket (gcloud storage buckets create gs://{self._bucket})"
        )

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        service: str,
        name: str,
        query: dict[str, str],
        label: str,
        headers: dict[str, str] | None = None,
        data: Buffers | None = None,
        accepted: tuple[int, ...] = (200,),
    ) -> AsyncIterator[Response]:
        """Yield the response to a request if its status is accepted; raise its error otherwise."""
        endpoint = await self._credentials.endpoint()
        if self._payer is not None:
            query = {**query, "userProject": self._payer}
        path = f"{service}/b/{quote(self._bucket, safe='')}/o{'/' if name else ''}{name}"
        url = URL(f"{endpoint}/{path}{'?' if query else ''}{urlencode(query, quote_via=quote)}", encoded=True)
        if self._session is None:
            self._session = Session(url, None, self._tls, self._timeout, environment_proxy(url))
        for is_last in (False, True):
            sent_headers = {**(headers or {}), **await self._credentials.headers()}
            async with self._session.request(method, url, sent_headers, label, data) as response:
                if response.status in accepted:
                    yield response
                    return
                if response.status == 401 and not is_last and await self._credentials.renew(sent_headers):
                    continue
                problem = await read_problem(response)
                error = mapped_error(response, problem, label, self._credentials, self._bucket)
            # only Google's wording shows that the bucket exists; with other servers a listing does
            if isinstance(error, NotFound) and method == "GET" and name and not says_no_object(problem):
                await self._check_bucket()
            raise error


def _split_url(url: str) -> tuple[str, str]:
    """Return the bucket, and the path below it without slashes at its ends."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket or not all(c.isalnum() or c in "-_." for c in bucket):
        shown = "the URL" if "@" in url else repr(url)  # what is before the @ may be a password
        raise InvalidArgument(f"{shown} names no bucket; expected gs://bucket/path")
    prefix = prefix.strip("/")
    return bucket, checked_key(prefix, f"gs://{bucket}") if prefix else ""


def _payer(url: str, project: str | None, requester_pays: bool | str) -> str | None:
    """Return the project that pays for the requests, None if the owner of the bucket does."""
    if requester_pays is True and not project:
        raise InvalidArgument(f"{url}: requester_pays=True needs project=…, the project that pays")
    return requester_pays if isinstance(requester_pays, str) else project if requester_pays else None


def _crc32c(data: Buffers) -> str:
    value = 0
    for buffer in data:
        if len(buffer):
            # an array, because the library refuses views of writable memory
            value = google_crc32c.extend(value, np.frombuffer(buffer, np.uint8))
    return base64.b64encode(value.to_bytes(4, "big")).decode()
