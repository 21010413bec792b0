"""Shardings: the semantics of NamedSharding, by hand and by property."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstore.errors import InvalidArgument
from tstore.sharding import Mesh, P, Shard


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], P]:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    names = [f"axis{i}" for i in range(len(sizes))]
    devices = math.prod(sizes)
    per_host = draw(st.sampled_from([k for k in range(1, devices + 1) if devices % k == 0]))
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    axes = draw(st.permutations(names))
    parts: list[Any] = [[] for _ in range(draw(st.integers(0, len(shape))))]
    for axis in axes:
        where = draw(st.integers(-1, len(parts) - 1))
        if where >= 0:
            parts[where].append(axis)
    return Mesh(dict(zip(names, sizes, strict=True)), per_host), shape, P(*map(tuple, parts))


@given(layouts())
def test_replica_zero_partitions_the_array_exactly(layout: tuple[Mesh, tuple[int, ...], P]) -> None:
    mesh, shape, spec = layout
    count = np.zeros(shape, int)
    for shard in mesh.shards(shape, spec):
        if shard.replica == 0:
            count[shard.index] += 1
    assert (count == 1).all()


@given(layouts())
def test_hosts_together_write_the_array_exactly_once(layout: tuple[Mesh, tuple[int, ...], P]) -> None:
    mesh, shape, spec = layout
    count = np.zeros(shape, int)
    for host in range(mesh.hosts):
        for index in mesh.host_shards(host, shape, spec):
            assert count[index].size
            count[index] += 1
    assert (count == 1).all()


@given(layouts())
def test_every_replica_set_has_the_same_size(layout: tuple[Mesh, tuple[int, ...], P]) -> None:
    mesh, shape, spec = layout
    shards = mesh.shards(shape, spec)
    per_replica = Counter(shard.replica for shard in shards)
    assert sorted(per_replica) == list(range(len(per_replica)))
    assert len(set(per_replica.values())) == 1
    seen: Counter[str] = Counter()
    for shard in shards:  # "running number among the devices that hold the same index"
        if all(i.start < i.stop for i in shard.index):
            assert shard.replica == seen[str(shard.index)]
            seen[str(shard.index)] += 1
    assert len(set(seen.values())) <= 1


@given(layouts())
def test_shard_shape_bounds_every_shard(layout: tuple[Mesh, tuple[int, ...], P]) -> None:
    mesh, shape, spec = layout
    bound = mesh.shard_shape(shape, spec)
    sizes = [tuple(i.stop - i.start for i in s.index) for s in mesh.shards(shape, spec)]
    assert all(a <= b for size in sizes for a, b in zip(size, bound, strict=True))
    assert sizes[0] == bound


def test_two_axes_by_hand() -> None:
    mesh = Mesh({"data": 2, "model": 2}, devices_per_host=2)
    assert (mesh.axes, mesh.shape, mesh.devices, mesh.hosts) == (
        ("data", "model"),
        {"data": 2, "model": 2},
        4,
        2,
    )
    assert mesh.shards((4, 6), P("model")) == [
        Shard(0, 0, (slice(0, 2), slice(0, 6)), 0),
        Shard(1, 0, (slice(2, 4), slice(0, 6)), 0),
        Shard(2, 1, (slice(0, 2), slice(0, 6)), 1),
        Shard(3, 1, (slice(2, 4), slice(0, 6)), 1),
    ]
    assert mesh.host_shards(1, (4, 6), P("model")) == []


def test_a_tuple_of_axes_has_its_first_slowest() -> None:
    mesh = Mesh({"data": 2, "model": 3})
    assert [s.index[0].start for s in mesh.shards((6,), P(("data", "model")))] == [0, 1, 2, 3, 4, 5]
    assert [s.index[0].start for s in mesh.shards((6,), P(("model", "data")))] == [0, 2, 4, 1, 3, 5]


def test_uneven_pieces_are_shorter_at_the_end_and_may_be_empty() -> None:
    mesh = Mesh({"data": 4})
    pieces = [(s.index[0].start, s.index[0].stop) for s in mesh.shards((5,), P("data"))]
    assert pieces == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert mesh.shard_shape((5,), P("data")) == (2,)
    assert mesh.host_shards(3, (5,), P("data")) == []


def test_a_scalar_is_written_by_the_first_host() -> None:
    mesh = Mesh({"data": 4})
    assert mesh.host_shards(0, (), P()) == [()]
    assert mesh.host_shards(1, (), P()) == []


def test_spec_is_a_normalised_tuple() -> None:
    assert P("data", ("model",), ()) == P("data", "model", None) == ("data", "model", None)
    assert repr(P("a", None, ("b", "c"))) == "P('a', None, ('b', 'c'))"
    assert pickle.loads(pickle.dumps(P("a", ("b", "c")))) == P("a", ("b", "c"))
    assert isinstance(pickle.loads(pickle.dumps(P("a"))), P)


def test_mesh_is_a_value() -> None:
    mesh = Mesh({"data": 4, "model": 2}, devices_per_host=4)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert hash(mesh) == hash(Mesh({"data": 4, "model": 2}, 4))
    assert mesh != Mesh({"model": 2, "data": 4}, 4)
    assert mesh == Mesh({"data": 4, "model": 2}, device_hosts=[0] * 4 + [1] * 4)
    assert mesh != Mesh({"data": 4, "model": 2}, 4, hosts=3)
    assert repr(mesh) == "Mesh({'data': 4, 'model': 2}, devices_per_host=4)"
    permuted = Mesh({"x": 2}, device_hosts=[1, 0], hosts=3)
    assert repr(permuted) == "Mesh({'x': 2}, device_hosts=[1, 0], hosts=3)"
    assert pickle.loads(pickle.dumps(permuted)) == permuted


def test_hosts_hold_devices_in_any_order() -> None:
    mesh = Mesh({"data": 2, "model": 2}, device_hosts=[3, 0, 0, 1])
    assert (mesh.hosts, mesh.device_hosts) == (4, (3, 0, 0, 1))
    assert [s.device for s in mesh.shards((4, 4), P(), host=0)] == [1, 2]
    assert mesh.host_shards(3, (4, 4), P("data", "model")) == [(slice(0, 2), slice(0, 2))]
    assert mesh.host_shards(2, (4, 4), P("data", "model")) == []
    assert Mesh({"data": 2}, hosts=5).host_shards(4, (4,), P("data")) == []


class Device:
    """A device as JAX has it on a mesh, without a backend."""

    platform, device_kind, client = "cpu", "cpu", None

    def __init__(self, number: int) -> None:
        self.id, self.process_index = number, number // 2


def test_a_mesh_and_the_specs_of_jax_are_accepted() -> None:
    jax = pytest.importorskip("jax")
    devices = np.array([Device(number) for number in range(8)])[[3, 1, 0, 2, 7, 6, 5, 4]].reshape(4, 2)
    foreign = jax.sharding.Mesh(devices, ("data", "model"))
    mesh = Mesh.of(foreign)
    assert mesh.device_hosts == (1, 0, 0, 1, 3, 3, 2, 2)
    for spec in (("data", "model"), (None, ("model", "data")), (("data",),), ("model", None), ()):
        sharding = jax.sharding.NamedSharding(foreign, jax.sharding.PartitionSpec(*spec))
        for shape in ((8, 16), (16, 8, 3)):
            expected = sharding.devices_indices_map(shape)
            shards = mesh.shards(shape, sharding.spec)
            assert mesh.shard_shape(shape, sharding.spec) == sharding.shard_shape(shape)
            for device, shard in zip(devices.flat, shards, strict=True):
                assert shard.host == device.process_index
                slices = zip(expected[device], shape, strict=True)
                assert shard.index == tuple(slice(*s.indices(n)[:2]) for s, n in slices)


def test_what_jax_leaves_open_is_refused() -> None:
    jax = pytest.importorskip("jax")
    spec_of, unconstrained = jax.sharding.PartitionSpec, jax.sharding.PartitionSpec.UNCONSTRAINED
    abstract = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    assert Mesh(abstract.shape, devices_per_host=4).hosts == 2
    with pytest.raises(InvalidArgument, match=r"pass Mesh\(abstract_mesh.shape, devices_per_host=…\)"):
        Mesh.of(abstract)
    with pytest.raises(InvalidArgument, match="has no devices"):
        Mesh.of(jax.sharding.Mesh(np.empty((), object), ()))
    with pytest.raises(InvalidArgument, match="leaves a dimension unconstrained"):
        P.of(spec_of("x", unconstrained))
    with pytest.raises(InvalidArgument, match="has unreduced values"):
        P.of(spec_of("x", unreduced={"y"}))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.shards((4, 4), P("rows")), ["'rows'", "'data'", "'model'"]),
        (lambda m: P("data", "data"), ["'data'", "twice"]),
        (lambda m: P(("data", "model", "data")), ["'data'", "twice"]),
        (lambda m: P(3), ["3", "axis name"]),
        (lambda m: m.shards((4,), P("data", "model")), ["2 dimensions", "(4,)"]),
        (lambda m: m.shards((4, -1), P()), ["-1"]),
        (lambda m: m.shards((4, 1.5), P()), ["1.5"]),
        (lambda m: m.shards((4,), ("data",)), ["P('data', None)"]),
        (lambda m: m.host_shards(8, (4,), P()), ["host 8", "0 to 7"]),
        (lambda m: P.of("data"), ["P('data', None)", "not 'data'"]),
        (lambda m: Mesh.of({"data": 4}), ["Mesh({'data': 4})", "a jax Mesh or a torch DeviceMesh"]),
        (lambda m: Mesh({"data": 4}, device_hosts=[0]), ["1 hosts", "4 devices"]),
        (lambda m: Mesh({"data": 1}, device_hosts=[-1]), ["device_hosts", "-1"]),
        (lambda m: Mesh({"data": 4}, hosts=3), ["at least 4", "3"]),
        (lambda m: m.host_shards(-1, (4,), P()), ["host number", "-1"]),
        (lambda m: Mesh({"data": 0}), ["'data'", "0"]),
        (lambda m: Mesh({"": 2}), ["''"]),
        (lambda m: Mesh({"data": 4}, devices_per_host=3), ["4 devices", "3"]),
    ],
)
def test_bad_arguments_are_named(call: Any, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as error:
        call(Mesh({"data": 4, "model": 2}))
    assert all(word in str(error.value) for word in words), error.value
