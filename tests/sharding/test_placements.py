"""The placements of DTensor: as torch cuts, and as a partition spec where lengths divide."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstore.errors import InvalidArgument
from tstore.sharding import Mesh, P, Placements


def local_of(whole: Any, placements: Any, sizes: list[int], coordinates: tuple[int, ...]) -> Any:
    """Return the local tensor of a device, cut by torch itself."""
    for placement, size, number in zip(placements, sizes, coordinates, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, size, with_padding=False)[0][number]
    return whole


def test_devices_hold_what_torch_gives_them() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    choices = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    cases = [([2, 3], (13, 7), choices), ([4, 2], (5, 12), choices), ([2, 2, 2], (16, 9), choices[1:4])]
    for sizes, shape, placed in cases:
        whole = torch.arange(math.prod(shape)).reshape(shape)
        for placements in itertools.product(placed, repeat=len(sizes)):
            layout = Placements(*placements).layout(sizes, shape)
            for coordinates in itertools.product(*map(range, sizes)):
                local = local_of(whole, placements, sizes, coordinates)
                parts = layout.parts(coordinates)
                assert sum(whole[index].numel() for index, _ in parts) == local.numel()
                assert all(torch.equal(local[inner], whole[index]) for index, inner in parts)


def test_a_device_mesh_and_its_placements_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        ranks = torch.tensor([[6, 2, 4], [1, 3, 5]])
        meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")), DeviceMesh("cpu", ranks)]
    finally:
        torch.distributed.destroy_process_group()
    named, unnamed = map(Mesh.of, meshes)
    assert named == Mesh({"dp": 2, "tp": 3}, device_hosts=[6, 2, 4, 1, 3, 5])
    assert unnamed.axes == ("dim0", "dim1")
    assert Placements(Replicate(), Shard(1)) == Placements("replicate", ("shard", 1))
    assert named.host_shards(4, (2, 6), Placements(Replicate(), Shard(1))) == [(slice(0, 2), slice(4, 6))]
    assert Mesh.of(meshes[0], hosts=8).host_shards(7, (2, 6), Placements(Replicate(), Shard(1))) == []
    with pytest.raises(InvalidArgument, match=r"placement Partial\(sum\) has no final values yet"):
        Placements(Partial())


@given(st.data())
def test_a_spec_is_the_placements_of_the_same_shards(data: st.DataObject) -> None:
    sizes = dict(zip("abc", data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), strict=False))
    parts: list[list[str]] = [[], []]
    for axis in data.draw(st.permutations(list(sizes))):
        place = data.draw(st.integers(-1, 1))
        if place >= 0:
            parts[place].append(axis)
    spec = P(*map(tuple, parts))
    mesh = Mesh(sizes, 1)
    even = tuple(math.prod(sizes[axis] for axis in axes) * data.draw(st.integers(1, 3)) for axes in parts)
    assert mesh.shards(even, Placements.from_spec(spec, sizes, even)) == mesh.shards(even, spec)
    uneven = tuple(data.draw(st.lists(st.integers(0, 17), min_size=2, max_size=2)))
    filled = [s for s in mesh.shards(uneven, spec) if all(i.start < i.stop for i in s.index)]
    try:
        placements = Placements.from_spec(spec, sizes, uneven)
    except InvalidArgument:
        assert any(len(axes) > 1 for axes in parts)
        return
    assert mesh.shards(uneven, placements) == filled


def test_placements_by_hand() -> None:
    sizes = {"dp": 2, "tp": 2}
    assert Placements.from_spec(P(("tp", "dp"), None), sizes, (8, 8)) == (("strided_shard", 0, 2), ("shard", 0))
    assert Placements.from_spec(P(("dp", "tp")), sizes, (8,)) == (("shard", 0), ("shard", 0))
    mesh = Mesh(sizes)
    fsdp = Placements(("strided_shard", 0, 2), ("shard", 0))
    assert [s.index[0].start for s in mesh.shards((8,), fsdp)] == [0, 4, 2, 6]
    assert mesh.shard_shape((8,), fsdp) == (2,)
    assert [(s.device, s.index[0].start, s.index[0].stop) for s in mesh.shards((5,), fsdp)] == [
        (0, 0, 2), (1, 3, 4), (2, 2, 3), (3, 4, 5)
    ]  # fmt: skip
    one = Placements(("strided_shard", 0, 2)).layout([2], (8,))
    assert one.parts([1]) == [((slice(2, 4),), (slice(0, 2),)), ((slice(6, 8),), (slice(2, 4),))]
    assert Placements(("shard", -1)).layout([2], (4, 6)).shard_shape == (4, 3)
    assert pickle.loads(pickle.dumps(fsdp)) == fsdp
    assert repr(fsdp) == "Placements(('strided_shard', 0, 2), ('shard', 0))"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Placements(("shard", 2)).layout([2], (4, 4)), "shards dimension 2, but shape (4, 4) has 2"),
        (lambda: Placements("replicate").layout([2, 2], (4,)), "has 1 placements, but the mesh has 2 axes"),
        (lambda: Placements("partial"), "placement 'partial'"),
        (lambda: Placements(("strided_shard", 0, 0)), "placement ('strided_shard', 0, 0)"),
        (lambda: Placements(P("x")), "placement P('x')"),
        (lambda: Placements("replicate").layout([2], (-4,)), "a dimension of shape (-4,)"),
        (lambda: Placements.from_spec(P(("a", "b")), {"a": 2, "b": 3}, (7,)), "dimension 0 and do not divide"),
    ],
)
def test_wrong_placements_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        call()
    assert words in str(error.value)
