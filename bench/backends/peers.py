"""The contenders: each, as one of several hosts, saves and restores its share of some arrays on a storage.

A share is `ARRAYS` float32 arrays of equal size. With tstore, all hosts save one checkpoint in one commit; with
the others, each host writes its own objects, without a commit. The time includes connecting, but not importing
modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

import tstore.sync as tstore
from tstore.core.storage.connect import connect

ARRAYS = 8

Array = npt.NDArray[np.float32]


class Share:
    """The data of one host: its rows of every array."""

    def __init__(self, host: int, hosts: int, size: int) -> None:
        self.host = host
        self.hosts = hosts
        rows = size // hosts // ARRAYS // 4096
        self.shape = (rows * hosts, 1024)
        self.rows = slice(host * rows, (host + 1) * rows)
        self.part = (rows, 1024)
        self.names = [f"w{i}" for i in range(ARRAYS)]
        rng = np.random.default_rng(host)
        self.arrays = {name: rng.random(self.part, np.float32) for name in self.names}

    def empty(self) -> dict[str, Array]:
        """Return new arrays of the same shapes, whose pages are not touched yet."""
        return {name: np.empty(self.part, np.float32) for name in self.names}


class Contender(Protocol):
    """A client, measured for saves and restores on `servers`, and only for restores on `reads`."""

    servers: ClassVar[tuple[str, ...]]
    reads: ClassVar[tuple[str, ...]]
    requests: dict[str, int]

    def __init__(self, share: Share, place: dict[str, Any], server: str) -> None: ...

    def save(self, run: str) -> None: ...

    def restore(self, run: str) -> dict[str, Array]: ...


class TStore:
    """One commit of all hosts; nginx serves the files of a local store."""

    servers = ("local", "serve", "gcs", "s3")
    reads = ("nginx",)

    def __init__(self, share: Share, place: dict[str, Any], server: str) -> None:
        self.share = share
        self.place = place
        self.server = server
        self.requests: dict[str, int] = {}
        connect(place["store"], self._options())  # imports the modules of the storage

    def save(self, run: str) -> None:
        share = self.share
        url = f"{self.place['folder']}/store" if self.server == "nginx" else self.place["store"]
        tree = {
            name: tstore.Shards(share.shape, "float32", [((share.rows, slice(0, 1024)), array)])
            for name, array in share.arrays.items()
        }
        with tstore.open(url, storage_options=self._options()) as store:
            tstore.save(store, tree, int(run), host=share.host, hosts=share.hosts, attempt="bench")
            self._count(store)

    def restore(self, run: str) -> dict[str, Array]:
        share, url = self.share, self.place["store"]
        target = tstore.Shards(share.shape, "float32", [((share.rows, slice(0, 1024)), None)])
        with tstore.open(url, "r", storage_options=self._options()) as store:
            tree = tstore.restore(store, int(run), target=dict.fromkeys(share.names, target))
            self._count(store)
        return {name: tree[name].parts[0][1] for name in share.names}

    def _options(self) -> dict[str, Any] | None:
        return self.place["options"] or None

    def _count(self, store: tstore.Store) -> None:
        traffic = store.traffic
        self.requests = {} if traffic is None else dict(traffic.requests)


class TensorStore:
    """zarr3 on the drivers `file`, `http` and `gcs`, all arrays at once, in chunks of 4 MiB."""

    servers = ("local", "gcs")
    reads = ("serve", "nginx")

    def __init__(self, share: Share, place: dict[str, Any], server: str) -> None:
        import tensorstore

        self.ts: Any = tensorstore
        self.share = share
        self.place = place
        self.server = server
        self.requests: dict[str, int] = {}

    def save(self, run: str) -> None:
        rows, columns = self.share.part
        spec = {
            "driver": "zarr3",
            "metadata": {
                "shape": [rows, columns],
                "data_type": "float32",
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [max(1, min(rows, 1024)), columns]},
                },
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
        }
        driver = "gcs" if self.server == "gcs" else "file"
        opened = self._open(driver, run, spec, create=True)
        writes = [
            store.write(array, can_reference_source_data_indefinitely=True)
            for store, array in zip(opened, self.share.arrays.values(), strict=True)
        ]
        for write in writes:
            write.result()

    def restore(self, run: str) -> dict[str, Array]:
        driver = {"local": "file", "gcs": "gcs"}.get(self.server, "http")
        opened = self._open(driver, run, {"driver": "zarr3"}, open=True)
        arrays = self.share.empty()
        copies = [self.ts.array(array).write(s) for array, s in zip(arrays.values(), opened, strict=True)]
        for copy in copies:
            copy.result()
        return arrays

    def _open(self, driver: str, run: str, spec: dict[str, Any], **how: Any) -> list[Any]:
        context = self.ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        base = f"tensorstore/{run}/{self.share.host}"
        places: dict[str, dict[str, Any]] = {
            "file": {"driver": "file", "path": f"{self.place['folder']}/{base}/"},
            "http": {"driver": "http", "base_url": f"{self.place['server']}/{base}/"},
            "gcs": {"driver": "gcs", "bucket": self.place["store"].split("/")[2], "path": f"{base}/"},
        }
        if driver == "gcs":
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = self.place["server"]
        root = self.ts.KvStore.open(places[driver], context=context).result()
        futures = [self.ts.open(spec, kvstore=root / f"{n}/", context=context, **how) for n in self.share.names]
        return [future.result() for future in futures]


class Floor:
    """Objects of about 16 MiB, all transferred at once, with the thinnest client of the server."""

    servers: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, share: Share, place: dict[str, Any], server: str) -> None:
        self.share = share
        self.place = place
        self.server = server
        self.requests: dict[str, int] = {}
        self.joined = np.concatenate([a.reshape(-1).view(np.uint8) for a in share.arrays.values()])
        count = max(1, round(self.joined.size / (16 << 20)))
        bounds = np.linspace(0, self.joined.size, count + 1).astype(int).tolist()
        self.pieces = list(itertools.pairwise(bounds))

    def save(self, run: str) -> None:
        asyncio.run(self.put([self.joined[a:b] for a, b in self.pieces], self._names(run)))

    def restore(self, run: str) -> dict[str, Array]:
        buffer = np.empty_like(self.joined)
        asyncio.run(self.fetch([buffer[a:b] for a, b in self.pieces], self._names(run)))
        parts = np.split(buffer.view(np.float32), ARRAYS)
        return {name: part.reshape(self.share.part) for name, part in zip(self.share.names, parts, strict=True)}

    def _names(self, run: str) -> list[str]:
        return [f"floor/{run}/{self.share.host}-{i}" for i in range(len(self.pieces))]

    async def put(self, data: list[npt.NDArray[np.uint8]], names: list[str]) -> None:
        raise NotImplementedError

    async def fetch(self, buffers: list[npt.NDArray[np.uint8]], names: list[str]) -> None:
        raise NotImplementedError


class Aiohttp(Floor):
    """aiohttp: PUT, and GET that streams into allocated memory."""

    servers = ("serve",)
    reads = ("nginx",)

    def __init__(self, share: Share, place: dict[str, Any], server: str) -> None:
        import aiohttp

        super().__init__(share, place, server)
        self.session = aiohttp.ClientSession

    async def put(self, data: list[npt.NDArray[np.uint8]], names: list[str]) -> None:
        if self.server == "nginx":
            for piece, name in zip(data, names, strict=True):
                path = Path(self.place["folder"]) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(piece.tobytes())
            return
        async with self._session() as session:
            await asyncio.gather(*[self._put(session, p, n) for p, n in zip(data, names, strict=True)])

    async def fetch(self, buffers: list[npt.NDArray[np.uint8]], names: list[str]) -> None:
        async with self._session() as session:
            await asyncio.gather(*[self._get(session, r, n) for r, n in zip(buffers, names, strict=True)])

    def _session(self) -> Any:
        return self.session(self.place["server"])

    async def _put(self, session: Any, piece: npt.NDArray[np.uint8], name: str) -> None:
        async with session.put(f"/{name}", data=piece.data, headers={"If-None-Match": "*"}) as response:
            response.raise_for_status()

    async def _get(self, session: Any, buffer: npt.NDArray[np.uint8], name: str) -> None:
        async with session.get(f"/{name}") as response:
            response.raise_for_status()
            at, view = 0, buffer.data
            async for part in response.content.iter_any():
                view[at : at + len(part)] = part
                at += len(part)
            if at != len(buffer):
                raise ValueError(f"{name}: {at} bytes, expected {len(buffer)}")


class Fsspec(Floor):
    """gcsfs or s3fs: their put and get of whole objects, all at once."""

    servers = ("gcs", "s3")

    def __init__(self, share: Share, place: dict[str, Any], server: str) -> None:
        super().__init__(share, place, server)
        self.kind: Any
        if server == "gcs":
            from gcsfs.core import GCSFileSystem as FileSystem
        else:
            from s3fs import S3FileSystem as FileSystem
        self.kind = FileSystem

    async def put(self, data: list[npt.NDArray[np.uint8]], names: list[str]) -> None:
        async with self._files() as (files, root):
            await asyncio.gather(
                *[files._pipe_file(f"{root}/{n}", p.tobytes()) for p, n in zip(data, names, strict=True)]
            )

    async def fetch(self, buffers: list[npt.NDArray[np.uint8]], names: list[str]) -> None:
        async with self._files() as (files, root):
            replies = await asyncio.gather(*[files._cat_file(f"{root}/{n}") for n in names])
        for buffer, data in zip(buffers, replies, strict=True):
            buffer[:] = np.frombuffer(data, np.uint8)

    @contextlib.asynccontextmanager
    async def _files(self) -> AsyncIterator[tuple[Any, str]]:
        how: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True, **self.place["options"]}
        files = self.kind(**how)
        session = await (files._set_session() if self.server == "gcs" else files.set_session())
        try:
            yield files, self.place["store"].split("/")[2]
        finally:
            await session.close()


CONTENDERS: dict[str, type[Contender]] = {
    "tstore": TStore,
    "tensorstore": TensorStore,
    "aiohttp": Aiohttp,
    "fsspec": Fsspec,
}
