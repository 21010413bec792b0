"""Arrays in mapped packs: no copies, no byte that is not verified, and valid memory whatever is deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tstore
import tstore.sync
from tstore.errors import Corrupt, InvalidArgument, SnapshotExpired

rng = np.random.default_rng(0)

TREE = {
    "net": {"w": rng.random((300, 40)), "mask": rng.random(1001) > 0.5, "b": rng.random(7)},
    "rows": rng.random((3 << 10, 1 << 10)),  # 24 MiB, in three chunks
    "scale": np.float32(0.5),
    "epoch": 3,
}
PATHS = ["net/w", "net/mask", "net/b", "rows", "scale"]


def is_mapped(values: npt.NDArray[Any], folder: Path) -> bool:
    """Return whether the system has mapped a pack of the store where an array begins and ends."""
    addresses = np.lib.array_utils.byte_bounds(values)
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    bounds = [[int(at, 16) for at in line[0].split("-")] for line in ranges]
    return all(any(low <= at < high for low, high in bounds) for at in (addresses[0], addresses[1] - 1))


def flip(folder: Path, values: bytes) -> Path:
    """Change the first byte of these values in the pack that has them, and return the pack."""
    for pack in folder.glob("txn/*/pack-*"):
        if (at := pack.read_bytes().find(values)) >= 0:
            with pack.open("r+b") as file:
                file.seek(at)
                file.write(bytes([values[0] ^ 1]))
            return pack
    raise AssertionError


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    await tstore.save(tmp_path, TREE, 1)
    return tmp_path


async def test_arrays_are_those_in_the_files(saved: Path) -> None:
    mapped = await tstore.restore(saved, map=True)
    assert mapped.copied == {}
    assert list(mapped) == PATHS
    assert len(mapped) == 5
    for path, expected in zip(PATHS, [*TREE["net"].values(), TREE["rows"], TREE["scale"]], strict=True):
        np.testing.assert_array_equal(mapped[path], expected)
        assert mapped[path].flags.aligned
        assert is_mapped(mapped[path], saved)
        with pytest.raises(ValueError, match="read-only"):
            mapped[path][...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            mapped[path].flags.writeable = True
    tree = await mapped.tree()
    assert tree["net"]["w"] is mapped["net/w"]
    assert (tree["epoch"], tree["scale"]) == (3, 0.5)


async def test_a_target_and_a_selection_apply(saved: Path) -> None:
    target = {"model": {"w": np.zeros((300, 40))}}
    mapped = await tstore.restore(saved, target=target, only="model/w", rename={"net/*": "model/*"}, map=True)
    assert list(mapped) == ["model/w"]
    assert is_mapped((await mapped.tree())["model"]["w"], saved)


async def test_chunks_of_several_versions_are_mapped_behind_each_other(tmp_path: Path) -> None:
    """A save that changes one chunk refers to the others in the packs of the version before."""
    rows = TREE["rows"].copy()
    await tstore.save(tmp_path, {"rows": rows}, 1)
    rows[1100] += 1
    await tstore.save(tmp_path, {"rows": rows}, 2)
    mapped = await tstore.restore(tmp_path, map=True)
    np.testing.assert_array_equal(mapped["rows"], rows)
    assert is_mapped(mapped["rows"][:1024], tmp_path)
    packs = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    }
    assert len({Path(pack).parent for pack in packs}) == 2


@pytest.mark.parametrize("path", ["net/w", "rows"])
async def test_a_changed_bit_is_never_handed_out(saved: Path, path: str) -> None:
    values = TREE["net"]["w"][299] if path == "net/w" else TREE["rows"][3000]
    flip(saved, values.tobytes())
    for _ in range(2):
        mapped = await tstore.restore(saved, map=True)
        with pytest.raises(
            Corrupt, match=rf"^{path}, chunk \({0 if path == 'net/w' else 2}, 0\): checksum mismatch"
        ):
            mapped[path]
        assert mapped["net/b"].tolist() == TREE["net"]["b"].tolist()
        for work in (mapped.verified, mapped.tree):
            with pytest.raises(Corrupt, match=rf"^{path}, chunk"):
                await work()
        with pytest.raises(Corrupt):
            mapped[path]
    unverified = await tstore.restore(saved, map=True, verify="never")
    assert unverified[path].shape == (TREE["net"]["w"] if path == "net/w" else TREE["rows"]).shape
    await unverified.tree()
    with pytest.raises(Corrupt, match=rf"^{path}, chunk"):
        await unverified.verified()


async def test_only_the_blocks_of_a_view_are_verified(saved: Path) -> None:
    flip(saved, TREE["rows"][2000].tobytes())  # in the second chunk, whose blocks have 128 rows
    rows = await (await (await tstore.open(saved, "r")).snapshot()).array("rows")
    for part in (rows[:1920], rows[2048:], rows[1900:1901, ::-3].T, rows[2000:2000]):
        assert is_mapped(await part.map(), saved) or not part.size
    for part in (rows, rows[1919:1921], rows[1900:2100:50], rows[2047]):
        with pytest.raises(Corrupt, match=r"^rows, chunk \(1, 0\)"):
            await part.map()
        assert (await part.map(verify="never")).shape == part.shape
    with pytest.raises(InvalidArgument, match="verify='all'"):
        await rows.map(verify="all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "index",
    [
        np.s_[:],
        np.s_[5],
        np.s_[10:20, ::-3],
        np.s_[None, 3, :, None],
        np.s_[..., 2],
        np.s_[7, 8],
        np.s_[10:3],
        np.s_[::-1],
        np.s_[[4, 2]],
        np.s_[2, [1, 1]],
    ],
    ids=str,
)
async def test_views_are_those_of_numpy(saved: Path, index: Any) -> None:
    snapshot = await (await tstore.open(saved, "r")).snapshot()
    view = (await snapshot.array("net/w"))[index]
    for mapped, expected in (
        (await view.map(), TREE["net"]["w"][index]),
        (await view.T.map(), TREE["net"]["w"][index].T),
    ):
        np.testing.assert_array_equal(mapped, expected)
        assert not mapped.flags.writeable


async def test_a_collection_leaves_mapped_memory_intact(tmp_path: Path) -> None:
    for step, values in ((1, TREE["net"]), (2, {"w": np.zeros(1000)})):
        await tstore.save(tmp_path, values, step)
        if step == 1:
            mapped = await tstore.restore(tmp_path, 1, map=True)
            stale = await (await tstore.open(tmp_path)).snapshot(1)
    packs = list(tmp_path.glob("txn/*/pack-*"))
    async with await tstore.open(tmp_path) as store:
        await store.collect(tstore.Keep(last=1))
    assert sum(pack.exists() for pack in packs) == 1
    for path in ("w", "mask", "b"):
        np.testing.assert_array_equal(mapped[path], TREE["net"][path])
    with pytest.raises(SnapshotExpired):
        await stale.array("w").map()


async def test_a_file_that_was_cut_short_is_an_error(saved: Path) -> None:
    """Touching the pages behind its end would kill the process."""
    for pack in saved.glob("txn/*/pack-*"):
        os.truncate(pack, pack.stat().st_size // 2)
    with pytest.raises(Corrupt, match="cut short"):
        await tstore.restore(saved, map=True)
    for pack in saved.glob("txn/*/pack-*"):
        pack.unlink()
    with pytest.raises(Corrupt, match=r"pack .* is missing"):
        await tstore.restore(saved, map=True)


async def test_other_arrays_are_read_and_the_plan_says_why(tmp_path: Path) -> None:
    tree = {
        "encoded": rng.random((100, 50)).astype("f4"),
        "cast": rng.random((100, 50)).astype("f4"),
        "columns": tstore.Shards(
            (1000, 2000),
            "f8",
            [((slice(0, 1000), slice(i, i + 1000)), rng.random((1000, 1000))) for i in (0, 1000)],
        ),
        "odd": rng.random((2000, 1301)),  # chunks that are not whole pages
        "empty": np.zeros((0, 3)),
        "own": tstore.PerHost({"x": 1}),
        "whole": rng.random((100, 50)),
        "parts": rng.random((100, 50)),
    }
    await tstore.save(tmp_path, tree, 1, codecs={"encoded": ["bytes", "zstd"]})
    parts = tstore.Shards((100, 50), "f8", [((slice(0, 10), slice(0, 50)), None)])
    target = {
        **tree,
        "cast": np.zeros((100, 50), "f8"),
        "parts": parts,
        "columns": np.zeros((1000, 2000)),
    }
    mapped = await tstore.restore(tmp_path, target=target, dtype={"cast": "f8"}, map=True)
    plan = await tstore.explain(tmp_path, target=target, dtype={"cast": "f8"}, map=True)
    assert mapped.copied == plan.copied
    reasons = {
        "encoded": "encoded",
        "cast": "cast to float64",
        "columns": "not parts of its first axis",
        "empty": "not all of its chunks were written",
        "own/%h0": "each host has its own",
        "parts": "parts of it",
    }
    for path, reason in reasons.items():
        assert reason in plan.copied[next(p for p in plan.copied if p.startswith(path[:5]))]
    assert "whole" not in plan.copied
    assert plan.arrays.keys() == plan.copied.keys()
    assert plan.bytes_read < (await tstore.explain(tmp_path, target=target, dtype={"cast": "f8"})).bytes_read
    restored = await mapped.tree()
    np.testing.assert_array_equal(restored["encoded"], tree["encoded"])
    np.testing.assert_array_equal(restored["cast"], tree["cast"])
    np.testing.assert_array_equal(restored["odd"], tree["odd"])
    np.testing.assert_array_equal(restored["parts"].values[0], tree["parts"][:10])
    assert restored["own"].value == {"x": 1}
    assert mapped["own"].value == {"x": 1}


async def test_stores_in_memory_and_metadata_are_read(url: str) -> None:
    await tstore.save(url, {"w": np.arange(3)}, 1)  # within the metadata
    mapped = await tstore.restore(url, map=True)
    assert mapped["w"].tolist() == [0, 1, 2]
    assert list(mapped.copied) == ["w"]
    array = await (await (await tstore.open(url)).snapshot()).array("w")
    assert (await array[1:].map()).tolist() == [1, 2]
    async with (await tstore.open(url)).transaction() as tx:
        staged = await tx.create_array("v", data=np.arange(4))
        assert (await staged[::2].map()).tolist() == [0, 2]


async def test_mapping_excludes_memory_and_codes(saved: Path) -> None:
    for options in ({"into": TREE}, {"packed": True}, {"verify": "later"}):
        with pytest.raises(InvalidArgument):
            await tstore.restore(saved, map=True, **options)


def test_blocking_mappings(saved: Path) -> None:
    mapped = tstore.sync.restore(saved, map=True)
    assert isinstance(mapped, tstore.sync.Mapped)
    mapped.verified()
    assert {**mapped}.keys() == set(PATHS)
    np.testing.assert_array_equal(mapped.tree()["rows"], TREE["rows"])
    assert "5 arrays" in repr(mapped)
    np.testing.assert_array_equal(tstore.sync.open(saved).snapshot()["rows"][5].map(), TREE["rows"][5])
