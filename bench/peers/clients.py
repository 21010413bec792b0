"""The thinnest clients of a server: objects of about 16 MiB, all transferred at once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench.contender import Contender
from bench.workloads import Tree, Values


class Client(Contender):
    """Saves a host's part of the arrays as some objects."""

    async def put(self, data: list[Values], names: list[str]) -> None:
        raise NotImplementedError

    async def fetch(self, buffers: list[Values], names: list[str]) -> None:
        raise NotImplementedError

    @cached_property
    def state(self) -> Tree:
        """The joined arrays."""
        joined = np.concatenate([a.reshape(-1).view(np.uint8) for a in self.arrays.values()])
        count = max(1, round(joined.size / (16 << 20)))
        self.cuts = list(itertools.pairwise(np.linspace(0, joined.size, count + 1).astype(int).tolist()))
        return {"": joined}

    def save(self, step: int, durable: bool) -> None:
        asyncio.run(self.put([self.state[""][a:b] for a, b in self.cuts], self._names(step)))

    def restore(self, step: int, what: str) -> Tree:
        buffer = np.empty_like(self.state[""])
        asyncio.run(self.fetch([buffer[a:b] for a, b in self.cuts], self._names(step)))
        parts = np.split(buffer.view(np.float32), len(self.arrays))
        return {name: part.reshape(a.shape) for part, (name, a) in zip(parts, self.arrays.items(), strict=True)}

    def _names(self, step: int) -> list[str]:
        return [f"floor/{step}/{self.number}-{i}" for i in range(len(self.cuts))]


class Aiohttp(Client):
    """aiohttp: PUT, and GET that streams into allocated memory; nginx has the objects in its folder."""

    title = "aiohttp"

    def prepare(self) -> None:
        self.session: Any = importlib.import_module("aiohttp").ClientSession

    async def put(self, data: list[Values], names: list[str]) -> None:
        if self.work.server == "nginx":
            for piece, name in zip(data, names, strict=True):
                path = Path(self.work.place.folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(piece.tobytes())
            return
        async with self.session(self.work.place.server) as session:
            await asyncio.gather(*[self._put(session, p, n) for p, n in zip(data, names, strict=True)])

    async def fetch(self, buffers: list[Values], names: list[str]) -> None:
        async with self.session(self.work.place.server) as session:
            await asyncio.gather(*[self._get(session, b, n) for b, n in zip(buffers, names, strict=True)])

    async def _put(self, session: Any, piece: Values, name: str) -> None:
        async with session.put(f"/{name}", data=piece.data, headers={"If-None-Match": "*"}) as response:
            response.raise_for_status()

    async def _get(self, session: Any, buffer: Values, name: str) -> None:
        async with session.get(f"/{name}") as response:
            response.raise_for_status()
            at, view = 0, buffer.data
            async for part in response.content.iter_any():
                view[at : at + len(part)] = part
                at += len(part)
            if at != len(buffer):
                raise ValueError(f"{name}: {at} bytes, expected {len(buffer)}")


class Fsspec(Client):
    """gcsfs or s3fs: their put and get of whole objects, all at once."""

    title = "fsspec"

    def prepare(self) -> None:
        module, kind = ("gcsfs", "GCSFileSystem") if self.work.server == "gcs" else ("s3fs", "S3FileSystem")
        self.kind: Any = getattr(importlib.import_module(f"{module}.core"), kind)

    async def put(self, data: list[Values], names: list[str]) -> None:
        async with self._files() as (files, root):
            puts = [files._pipe_file(f"{root}/{n}", p.tobytes()) for p, n in zip(data, names, strict=True)]
            await asyncio.gather(*puts)

    async def fetch(self, buffers: list[Values], names: list[str]) -> None:
        async with self._files() as (files, root):
            replies = await asyncio.gather(*[files._cat_file(f"{root}/{n}") for n in names])
        for buffer, data in zip(buffers, replies, strict=True):
            buffer[:] = np.frombuffer(data, np.uint8)

    @contextlib.asynccontextmanager
    async def _files(self) -> AsyncIterator[tuple[Any, str]]:
        how: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True, **self.work.place.options}
        files = self.kind(**how)
        session = await (files._set_session() if self.work.server == "gcs" else files.set_session())
        try:
            yield files, self.work.place.store.split("/")[2]
        finally:
            await session.close()
