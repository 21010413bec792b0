"""A volume that several processes write in one commit, and that readers slice over HTTP.

    python examples/volume.py [SIDE]

Each process is one host of a cooperative transaction and writes its own layers of chunks. The volume is then
served over HTTP. A reader takes a slice, a box that fits no chunk, and an oblique slab, prints the bytes that each
transfers, and draws the slice to `slice.png` in the current folder. The store lies in a temporary folder.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import tstore
import tstore.sync
from tstore.service.server import Server

HOSTS = 4
CHUNK = 64


Values = npt.NDArray[Any]


def density(index: Sequence[Values], side: int) -> npt.NDArray[np.uint8]:
    """Return the voxels at some coordinates, which are broadcast: a porous ball in a dim haze."""
    z, y, x = (coordinates.astype("float32") for coordinates in index)
    gyroid = np.sin(z / 9) * np.cos(y / 9) + np.sin(y / 9) * np.cos(x / 9) + np.sin(x / 9) * np.cos(z / 9)
    radius = np.sqrt((z / side - 0.5) ** 2 + (y / side - 0.5) ** 2 + (x / side - 0.5) ** 2)
    return np.where((radius < 0.45) & (gyroid > 0), 120 + 60 * gyroid, 30 * (1 - radius)).astype("uint8")


def write(store: str, host: int, side: int) -> None:
    """Run one host: write every `HOSTS`-th layer of chunks, and commit with the others."""
    with tstore.sync.open(store).transaction(name="scan", host=host, hosts=HOSTS, attempt="scan-1") as tx:
        volume = tx.create_array(
            "scan",
            shape=(side, side, side),
            dtype="uint8",
            chunks=(CHUNK, CHUNK, CHUNK),
            codecs=[{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}],
            dimension_names=("z", "y", "x"),
        )
        for start in range(host * CHUNK, side, HOSTS * CHUNK):
            layer = np.ogrid[start : min(start + CHUNK, side), :side, :side]
            volume[start : start + CHUNK].write(density(layer, side))


def scan(store: str, side: int) -> None:
    """Write the volume from `HOSTS` processes."""
    context = multiprocessing.get_context("spawn")
    hosts = [context.Process(target=write, args=(store, host, side)) for host in range(HOSTS)]
    for process in hosts:
        process.start()
    for process in hosts:
        process.join()
    assert not any(process.exitcode for process in hosts)
    [commit] = tstore.sync.open(store, "r").history()
    print(f"{HOSTS} processes wrote {side}³ voxels in version {commit.version}")


async def look(url: str) -> None:
    """Read parts of the volume over HTTP, and tell how many bytes each takes."""
    from matplotlib.image import imsave  # takes a second, and the processes that write do not need it

    async with await tstore.open(url, "r") as store:
        snapshot = await store.snapshot()
        volume = await snapshot.array("scan")
        side = volume.shape[0]
        print(f"all {volume.nbytes / 1e6:.0f} MB of values: {(await volume.explain()).bytes_read / 1e6:.2f} MB")
        depth, low, high = side // 2, side // 3, side // 2
        plane = await read("a slice", volume.isel(z=depth))
        box = await read("a box", volume[low:high, low:high, low:high])
        points = oblique(side)
        slab = await read("an oblique slab", volume.vindex[points])

    assert np.array_equal(plane, density(np.ogrid[depth : depth + 1, :side, :side], side)[0])
    assert np.array_equal(box, density(np.ogrid[low:high, low:high, low:high], side))
    assert np.array_equal(slab, density(points, side))
    imsave("slice.png", plane, cmap="magma")


async def read(what: str, view: tstore.Array) -> Values:
    """Read a view after printing what its read transfers."""
    plan = await view.explain()  # asks only for metadata
    print(
        f"{what} of {' × '.join(map(str, view.shape))}: {plan.bytes_read / 1e6:.2f} MB "
        f"(chunks: {len(plan.chunks)}, requests: {len(plan.requests)})"
    )
    return await view.read()


def oblique(side: int) -> tuple[Values, ...]:
    """Return the coordinates of a slab of two layers, tilted by 30° about x."""
    depth, v, u = np.meshgrid(np.arange(2), np.arange(side // 2), np.arange(side // 2), indexing="ij")
    cos, sin = np.cos(np.pi / 6), np.sin(np.pi / 6)
    z = side / 4 + v * sin + depth * cos
    y = side / 4 + v * cos - depth * sin
    return np.rint(z).astype(int), np.rint(y).astype(int), u + side // 4


async def main(side: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(scan, folder, side)
        async with Server(folder) as server:
            await look(server.url)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 512))
