"""Every system's layouts: each element is saved once, and comes back under any other layout."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
from tstore import Shards
from tstore.errors import InvalidArgument
from tstore.sharding import Mesh, P, Pipeline, Placements, pod, spec_from_rules, tile_in_halo, with_halo

Array = npt.NDArray[Any]


class Layout(NamedTuple):
    """A system's layout of one array: what `Shards.of` and `Shards.wanted` take."""

    mesh: Mesh
    spec: P | Placements
    split: bool = False

    def saved(self, values: Array, host: int) -> Shards:
        return Shards.of(
            values, self.mesh, self.spec, host, replicas="split" if self.split else "first", min_bytes=8
        )

    def wanted(self, values: Array, host: int, halo: list[int] | None = None) -> Shards:
        return Shards.wanted(values.shape, values.dtype, self.mesh, self.spec, host, halo=halo)


@st.composite
def layouts(draw: st.DrawFn, dimensions: int) -> Layout:
    sizes = dict(zip("abc", draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), strict=False))
    devices = math.prod(sizes.values())
    if draw(st.booleans()):
        mesh = Mesh(sizes, device_hosts=draw(st.permutations([d // 2 for d in range(devices)])))
    else:
        mesh = Mesh(sizes, hosts=devices + draw(st.integers(0, 2)))
    if draw(st.booleans()):
        choices = ["replicate", *[("shard", d) for d in range(dimensions)]]
        choices += [("strided_shard", d, f) for d in range(dimensions) for f in (2, 3)]
        return Layout(mesh, Placements(*[draw(st.sampled_from(choices)) for _ in sizes]), draw(st.booleans()))
    parts: list[list[str]] = [[] for _ in range(dimensions)]
    for axis in draw(st.permutations(list(sizes))):
        place = draw(st.integers(-1, dimensions - 1))
        if place >= 0:
            parts[place].append(axis)
    return Layout(mesh, P(*map(tuple, parts)), draw(st.booleans()))


def numbered(shape: tuple[int, ...]) -> Array:
    return np.arange(1, math.prod(shape) + 1).reshape(shape)


def check_saved_once(values: Array, layout: Layout) -> None:
    """Check that all hosts together save each element once, in shards that chunks fit."""
    whole = np.zeros_like(values)
    shard_shapes = set()
    for host in range(layout.mesh.hosts):
        shards = layout.saved(values, host)
        shard_shapes.add(shards.shard_shape)
        for index, part in shards.parts:
            assert part is not None
            assert part.size
            whole[index] += part
            for s, n, length in zip(index, values.shape, shards.shard_shape, strict=True):
                assert s.start % length == 0
                assert s.stop % length == 0 or s.stop == n
    assert np.array_equal(whole, values)
    assert len(shard_shapes) == 1


def check_restored(values: Array, layout: Layout) -> None:
    """Check that the regions that the hosts want cover the array, and that each device finds its shard in them."""
    restored = np.zeros_like(values)
    for host in range(layout.mesh.hosts):
        wanted = layout.wanted(values, host)
        indices = [index for index, _ in wanted.parts]
        for index in indices:
            restored[index] = values[index]
        shards = layout.mesh.shards(values.shape, layout.spec, host)
        assert all(shard.index in indices for shard in shards)
    assert np.array_equal(restored, values)


@st.composite
def arrays_and_layouts(draw: st.DrawFn) -> tuple[Array, Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    return numbered(shape), draw(layouts(len(shape)))


@given(arrays_and_layouts())
def test_every_element_is_saved_once_and_wanted_by_somebody(case: tuple[Array, Layout]) -> None:
    values, layout = case
    check_saved_once(values, layout)
    check_restored(values, layout)


async def save_by_all(url: str, step: int, tree_of: Callable[[int], Any], hosts: int) -> None:
    await asyncio.gather(
        *(tstore.save(url, tree_of(h), step, host=h, hosts=hosts, attempt="a") for h in range(hosts))
    )


MANY = (12, 10, 6)
LAYOUTS = {
    "GSPMD": Layout(Mesh({"data": 2, "model": 3}, devices_per_host=2), P(("data", "model"), None)),
    "partial replication": Layout(Mesh({"data": 2, "model": 2, "replica": 2}, 2), P("model", None, "data")),
    "uneven": Layout(Mesh({"data": 4}), P(None, "data")),
    "a permuted mesh": Layout(Mesh({"data": 3, "model": 2}, device_hosts=[2, 0, 1, 1, 0, 2]), P("data", "model")),
    "FSDP2 with TP": Layout(Mesh({"dp": 2, "tp": 2}), Placements(("strided_shard", 1, 2), ("shard", 1))),
    "nested and uneven": Layout(Mesh({"dp": 2, "tp": 3}), Placements(("shard", 1), ("shard", 1))),
    "weight-update sharding": Layout(Mesh({"data": 4, "model": 2}, 2), P(None, "model"), split=True),
    "HSDP, split": Layout(Mesh({"dp": 2, "tp": 2}), Placements("replicate", ("shard", 0)), split=True),
    "Mesh-TensorFlow": Layout(
        Mesh({"rows": 2, "columns": 2}),
        spec_from_rules(["batch", "length", "hidden"], "batch:rows;hidden:columns;vocab:columns"),
    ),
    "spatial": Layout(Mesh({"x": 2, "y": 2, "z": 2}, 4), P("x", "y", "z")),
    "experts": Layout(Mesh({"expert": 4, "model": 2}, 2), P("expert", None, "model")),
    "a pod": Layout(pod({"x": 4, "y": 2}), P("x", "y")),
}


async def test_a_checkpoint_of_any_layout_is_restored_under_all_others() -> None:
    values = numbered(MANY).astype("f4")
    url = f"memory://{uuid.uuid4()}"
    for step, layout in enumerate(LAYOUTS.values()):
        check_saved_once(values, layout)
        await save_by_all(url, step, lambda h, layout=layout: {"w": layout.saved(values, h)}, layout.mesh.hosts)
    for step in range(len(LAYOUTS)):
        assert np.array_equal((await tstore.restore(url, step))["w"], values)
        for layout in (list(LAYOUTS.values()) * 2)[step + 1 : step + 5]:
            for host in range(layout.mesh.hosts):
                restored = await tstore.restore(url, step, target={"w": layout.wanted(values, host)})
                assert all(np.array_equal(part, values[index]) for index, part in restored["w"].parts)


async def test_the_stages_of_a_pipeline_save_their_layers_and_another_pipeline_restores_them() -> None:
    values = {f"layer{i}": numbered((8, 6)).astype("f4") + 100 * i for i in range(5)}
    described = np.dtype("f4")
    specs = [P("data", "model"), P(None, "data")]  # layouts differ from stage to stage
    saving, restoring = Pipeline(2, 5, hosts_per_stage=2), Pipeline(3, [1, 3, 1])

    def part(host: int, layer: int) -> Shards:
        stage = saving.stage_of_layer(layer)
        held = values[f"layer{layer}"] if saving.stage_of_host(host) == stage else Described((8, 6), described)
        return Shards.of(held, saving.mesh(stage, {"data": 2, "model": 2}), specs[stage], host)

    url = f"memory://{uuid.uuid4()}"
    await save_by_all(url, 0, lambda h: {f"layer{i}": part(h, i) for i in range(5)}, saving.hosts)
    meshes = [restoring.mesh(stage, {"m": 2}) for stage in range(3)]
    for host in range(restoring.hosts):
        target = {
            f"layer{i}": Shards.wanted((8, 6), "f4", meshes[restoring.stage_of_layer(i)], P("m"), host)
            for i in range(5)
        }
        restored = await tstore.restore(url, target=target)
        own = restoring.layers(restoring.stage_of_host(host))
        for i in range(5):
            assert len(restored[f"layer{i}"].parts) == (2 if i in own else 0)
            for index, rows in restored[f"layer{i}"].parts:
                assert np.array_equal(rows, values[f"layer{i}"][index])


class Described(NamedTuple):
    """What a host knows of an array that it does not hold."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def test_the_layers_of_stages() -> None:
    pipeline = Pipeline(4, 10, hosts_per_stage=2)
    assert [list(pipeline.layers(s)) for s in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [pipeline.stage_of_layer(i) for i in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert [pipeline.stage_of_host(h) for h in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert pipeline.mesh(1, {"data": 4}) == Mesh({"data": 4}, device_hosts=[2, 2, 3, 3], hosts=8)
    assert repr(Pipeline(2, (1, 4))) == "Pipeline(2, [1, 4], hosts_per_stage=1)"


def test_by_default_replicas_share_parts_of_at_least_1_mib() -> None:
    def saved(mib: int) -> list[int]:
        values = np.zeros((mib << 10, 1 << 10), "u1")
        shards = [Shards.of(values, Mesh({"data": 4}), P(), host, replicas="split") for host in range(4)]
        return sorted(sum(part.nbytes for _, part in s.parts if part is not None) >> 20 for s in shards)

    assert [saved(mib) for mib in (1, 2, 4, 8)] == [[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2]]


def test_experts_are_spread_over_hosts_and_over_another_number_of_hosts_on_restore() -> None:
    values = numbered((6, 4))
    check_saved_once(values, Layout(Mesh({"expert": 6}, devices_per_host=2), P("expert")))
    for hosts, experts in ((2, [3, 3]), (4, [2, 2, 2, 0]), (6, [1] * 6)):
        layout = Layout(Mesh({"expert": hosts}), P("expert"))
        wanted = [layout.wanted(values, host) for host in range(hosts)]
        assert [sum(s[0].stop - s[0].start for s, _ in w.parts) for w in wanted] == experts
    alone = Pipeline(stages=3, layers=6)  # each expert is an array of its own
    assert [list(alone.layers(host)) for host in range(3)] == [[0, 1], [2, 3], [4, 5]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.data())
def test_a_halo_extends_a_tile_over_its_neighbors(shape: list[int], data: st.DataObject) -> None:
    widths = [data.draw(st.integers(0, 4) | st.tuples(st.integers(0, 4), st.integers(0, 4))) for _ in shape]
    values = numbered(tuple(shape))
    sides = [width if isinstance(width, tuple) else (width, width) for width in widths]
    padded = np.pad(values, sides)
    mesh = Mesh({"x": 3, "y": 2})
    for shard in mesh.shards(shape, P(*["x", "y"][: len(shape)])):
        tile = values[shard.index]
        if not tile.size:
            continue
        window = tuple(slice(s.start, s.stop + a + b) for s, (a, b) in zip(shard.index, sides, strict=True))
        outer = values[with_halo(shard.index, shape, widths)]
        assert sorted(outer.ravel()) == sorted(padded[window][padded[window] > 0])
        assert np.array_equal(outer[tile_in_halo(shard.index, shape, widths)], tile)


async def test_tiles_are_saved_without_their_halo_and_restored_with_it() -> None:
    values, layout, halo = numbered((9, 8)).astype("f4"), LAYOUTS["a pod"], [2, 1]
    url = f"memory://{uuid.uuid4()}"

    def tiles(host: int) -> Shards:
        """Return the tiles of a host, which it holds with their halo."""
        parts = []
        for index in layout.mesh.host_shards(host, values.shape, layout.spec):
            buffer = values[with_halo(index, values.shape, halo)]
            parts.append((index, buffer[tile_in_halo(index, values.shape, halo)]))
        return Shards(values.shape, "f4", parts, shard_shape=layout.mesh.shard_shape(values.shape, layout.spec))

    await save_by_all(url, 0, lambda h: {"w": tiles(h)}, layout.mesh.hosts)
    for host in range(layout.mesh.hosts):
        restored = await tstore.restore(url, target={"w": layout.wanted(values, host, halo)})
        for index, part in restored["w"].parts:
            assert np.array_equal(part, values[index])


def test_each_replica_saves_its_part_above_the_floor() -> None:
    values, mesh = np.zeros((8, 6), "f4"), Mesh({"data": 4, "model": 2}, devices_per_host=2)

    def saved(min_bytes: int, spec: P) -> list[int]:
        shards = [Shards.of(values, mesh, spec, h, replicas="split", min_bytes=min_bytes) for h in range(4)]
        return [sum(part.size for _, part in s.parts if part is not None) for s in shards]

    assert saved(24, P("model")) == [12, 12, 12, 12]
    assert saved(24, P()) == [12, 12, 12, 12]  # 8 pieces, and two replicas on each host
    assert saved(48, P("model")) == [0, 24, 0, 24]  # two pieces
    assert saved(49, P("model")) == [48, 0, 0, 0]
    assert [sum(p.size for _, p in Shards.of(values, mesh, P("model"), h).parts) for h in range(4)] == [
        48,
        0,
        0,
        0,
    ]


def test_layout_rules_name_the_axis_of_each_dimension() -> None:
    rules = {"batch": "data", "hidden": "model", "vocab": "model"}
    assert spec_from_rules(["vocab", "length"], rules) == P("model", None)
    assert spec_from_rules(["batch", None, "hidden"], "batch:data; hidden:model") == P("data", None, "model")
    assert spec_from_rules([], rules) == P()


def test_a_pod_has_blocks_of_chips_on_each_host() -> None:
    mesh = pod()
    assert (mesh.shape, mesh.devices, mesh.hosts) == ({"x": 128, "y": 32}, 4096, 1024)
    assert np.reshape(mesh.device_hosts, (128, 32))[:4, :6].tolist() == [
        [0, 0, 1, 1, 2, 2],
        [0, 0, 1, 1, 2, 2],
        [16, 16, 17, 17, 18, 18],
        [16, 16, 17, 17, 18, 18],
    ]
    assert len(mesh.shards((4096, 4096), P("x", "y"), host=5)) == 4
    cube = pod({"x": 4, "y": 4, "z": 4}, host_block=(2, 2, 1))
    assert (cube.hosts, cube.device_hosts[:4]) == (16, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: spec_from_rules(["a", "b"], {"a": "x", "b": "x"}),
            "'a' and 'b' of ('a', 'b') on the mesh axis 'x'",
        ),
        (lambda: spec_from_rules(["a", "a"], {}), "two dimensions of ('a', 'a') are named 'a'"),
        (lambda: spec_from_rules("batch", {}), "names of dimensions and rules"),
        (lambda: spec_from_rules(["a"], "a=x"), "'dimension:axis;…'"),
        (lambda: spec_from_rules(["a"], "a:x;a:y"), "each dimension once"),
        (lambda: spec_from_rules(["a"], 3), "names of dimensions and rules"),  # type: ignore[arg-type]
        (lambda: spec_from_rules(["a"], {"a": 3}), "not 3"),  # type: ignore[dict-item]
        (lambda: Pipeline(0, 4), "the number of stages"),
        (lambda: Pipeline(2, [4]), "1 numbers of layers for 2 stages"),
        (lambda: Pipeline(2, 4).layers(2), "there is no stage 2; pass one of 0 to 1"),
        (lambda: Pipeline(2, 4).stage_of_layer(4), "there is no layer 4"),
        (lambda: Pipeline(2, 4).stage_of_host(-1), "the number of a host"),
        (lambda: Pipeline(2, 4, 2).mesh(0, {"x": 3}), "3 devices does not divide over the 2 hosts"),
        (lambda: pod({"x": 4, "y": 3}), "blocks of (2, 2) chips do not fill a pod of (4, 3)"),
        (lambda: pod({"x": 4}), "blocks of (2, 2)"),
        (lambda: with_halo((slice(0, 1),), (4,), [1, 2]), "a width for each of the 1 dimensions"),
        (lambda: with_halo((slice(0, 1),), (4,), [-1]), "a width of a halo"),
        (lambda: with_halo((slice(0, 1),), (4,), [(1, 2, 3)]), "one before and one after"),  # type: ignore[list-item]
        (lambda: Shards.of(np.ones(2), Mesh({"x": 2}), P("x"), 0, replicas="all"), "'first' or 'split'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        call()
    assert words in str(error.value)
