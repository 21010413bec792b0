"""A volume of 512³ voxels: written by several processes in one commit, served over HTTP, and read in parts.

    pip install 'tstore[plot]' && python examples/volume.py [SIDE]

Each process makes and writes a slab; all slabs become visible in one commit. A server then serves the store, and a
client reads a plane, and voxels on a tilted grid, without reading the rest. Writes volume.png.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import uuid

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

import tstore
import tstore.sync
from tstore.server import Server

HOSTS = 4
CHUNK = 64

Voxels = npt.NDArray[np.uint8]


def slab(first: int, last: int, side: int) -> Voxels:
    """Return the planes from `first` up to `last`: a porous solid, with cells in it."""
    voxels = np.empty((last - first, side, side), "u1")
    b, c = np.ogrid[0 : 10 * np.pi : side * 1j, 0 : 10 * np.pi : side * 1j]
    for z in range(first, last):
        a = 10 * np.pi * z / (side - 1)
        walls = np.sin(a) * np.cos(b) + np.sin(b) * np.cos(c) + np.sin(c) * np.cos(a)
        voxels[z - first] = np.clip(90 + 60 * walls, 0, 180)
    rng = np.random.default_rng(0)
    for center, radius in zip(rng.uniform(0, side, (60, 3)), rng.uniform(side / 40, side / 14, 60), strict=True):
        low, high = np.clip([center - radius, center + radius + 1], 0, side).astype(int)
        low[0], high[0] = np.clip([low[0], high[0]], first, last)
        axes = np.ogrid[tuple(map(slice, low, high))]
        inside = sum((axis - at) ** 2 for axis, at in zip(axes, center, strict=True)) < radius**2
        voxels[low[0] - first : high[0] - first, low[1] : high[1], low[2] : high[2]][inside] = 255
    return voxels


def write(host: int, url: str, side: int, attempt: str) -> None:
    """Write one slab; the host that sees all slabs delivered commits them."""
    first, last = (side * i // HOSTS // CHUNK * CHUNK if i < HOSTS else side for i in (host, host + 1))
    with tstore.sync.open(url) as store:
        with store.transaction(name="volume", host=host, hosts=HOSTS, attempt=attempt, tag="made") as tx:
            volume = tx.create_array(
                "volume", (side,) * 3, "uint8", (CHUNK,) * 3, "lossless", dimension_names=("z", "y", "x")
            )
            volume[first:last].write(slab(first, last, side))


async def look(url: str, side: int) -> tuple[Voxels, Voxels]:
    """Read a plane, and a box on a tilted grid, from a server; return the plane, and the middle of the box."""
    async with Server(url, mode="r") as server:
        snapshot = await (await tstore.open(server.url, "r")).snapshot("made")
        volume = await snapshot.array("volume")
        print(f"{server.url}: {volume.nbytes:,} bytes in {len(snapshot.paths())} array")
        plane = volume.isel(z=side // 2)
        tilted = volume.vindex[tilted_box(side)]
        for name, view in (("plane", plane), ("tilted box", tilted)):
            plan = await view.explain()
            print(f"{name} of {view.shape}: {plan.bytes_read:,} bytes in {len(plan.requests)} requests")
        return await plane.read(), (await tilted.read())[4]


def tilted_box(side: int) -> tuple[npt.NDArray[np.intp], ...]:
    """Return the positions, along each axis, of the voxels nearest to a box of 8 × 200 × 200 that is turned."""
    tilt, turn = np.deg2rad(35), np.deg2rad(20)
    one = np.array([[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]])
    two = np.array([[np.cos(turn), 0, np.sin(turn)], [0, 1, 0], [-np.sin(turn), 0, np.cos(turn)]])
    grid = np.stack(np.meshgrid(*((np.arange(n) - n / 2) * side / 512 for n in (8, 200, 200)), indexing="ij"))
    at = np.einsum("ij,j...->i...", one @ two, grid) + side / 2
    z, y, x = np.rint(at).astype(np.intp).clip(0, side - 1)
    return z, y, x


def main(side: int, url: str = "volumes") -> None:
    attempt = uuid.uuid4().hex
    spawn = multiprocessing.get_context("spawn")
    hosts = [spawn.Process(target=write, args=(host, url, side, attempt)) for host in range(HOSTS)]
    for process in hosts:
        process.start()
    for process in hosts:
        process.join()
    assert all(process.exitcode == 0 for process in hosts)
    version = tstore.sync.open(url, "r").snapshot("made").version
    print(f"{HOSTS} processes wrote {side**3:,} voxels: version {version}")
    plane, tilted = asyncio.run(look(url, side))
    assert np.array_equal(plane, slab(side // 2, side // 2 + 1, side)[0])
    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    for axis, image, title in zip(axes, (plane, tilted), (f"z = {side // 2}", "tilted"), strict=True):
        axis.imshow(image, cmap="magma", vmin=0, vmax=255)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig("volume.png", dpi=120)
    print("volume.png")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
