"""What each process holds of a DTensor, on a mesh of which only one process exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.lazy import lazy
from tstore.errors import InvalidArgument

torch = lazy("torch")
meshes = lazy("torch.distributed.device_mesh")
tensors = lazy("torch.distributed.tensor")
placements = lazy("torch.distributed.tensor.placement_types")
fakes = lazy("torch.testing._internal.distributed.fake_pg")
dtensors = lazy("tstore.torch.dtensors")


@pytest.fixture
def processes() -> Iterator[None]:
    """A group of four processes, of which only this one exists."""
    torch.distributed.init_process_group("fake", store=fakes.FakeStore(), rank=1, world_size=4)
    yield
    torch.distributed.destroy_process_group()


def held(tensor: Any) -> list[Any]:
    layout = dtensors.layout_of("w", tensor)
    return [[[s.start, s.stop] for s in whole] for whole, _ in layout.parts]


def test_layouts_on_a_mesh(processes: None) -> None:
    mesh = meshes.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(50.0).reshape(10, 5)
    assert held(tensors.distribute_tensor(whole, mesh, [tensors.Shard(0), tensors.Shard(1)])) == [[[0, 5], [3, 5]]]
    assert held(tensors.distribute_tensor(whole, mesh, [tensors.Shard(0), tensors.Shard(0)])) == [[[3, 5], [0, 5]]]
    assert dtensors.layout_of(
        "w", tensors.distribute_tensor(whole, mesh, [tensors.Shard(0), tensors.Shard(0)])
    ).shard_shape == (1, 5)
    assert dtensors.layout_of(
        "w", tensors.distribute_tensor(whole, mesh, [tensors.Replicate(), tensors.Shard(0)])
    ).shard_shape == (5, 5)
    strided = tensors.DTensor.from_local(
        torch.zeros(6, 5),
        mesh,
        [placements._StridedShard(0, split_factor=2), tensors.Replicate()],
        shape=(10, 5),
        stride=(5, 1),
    )
    assert held(strided) == [[[0, 3], [0, 5]], [[5, 8], [0, 5]]]
    assert [local for _, local in dtensors.layout_of("w", strided).parts] == [
        (slice(0, 3), slice(0, 5)),
        (slice(3, 6), slice(0, 5)),
    ]
    assert held(tensors.distribute_tensor(torch.ones(()), mesh, [tensors.Replicate(), tensors.Replicate()])) == [
        []
    ]
    assert held(tensors.distribute_tensor(torch.ones(1), mesh, [tensors.Shard(0), tensors.Shard(0)])) == []
    replicas = tensors.distribute_tensor(whole, mesh, [tensors.Replicate(), tensors.Replicate()])
    assert 8 <= sum(dtensors.layout_of(f"w{i}", replicas).writes for i in range(64)) <= 24


def test_values_that_are_not_there_are_refused(processes: None) -> None:
    mesh = meshes.init_device_mesh("cpu", (4,))
    partial = tensors.DTensor.from_local(torch.ones(3), mesh, [tensors.Partial()])
    with pytest.raises(InvalidArgument, match=r"^a/0: placement Partial.*redistribute"):
        tstore.torch.save("memory://partial", {"a": [partial]}, 0, hosts=1)
    odd = tensors.DTensor.from_local(torch.ones(3), mesh, [tensors.Shard(0)], shape=(10,), stride=(1,))
    assert held(odd) == [[[3, 6]]]
    odd = tensors.DTensor.from_local(torch.ones(2), mesh, [tensors.Shard(0)], shape=(10,), stride=(1,))
    with pytest.raises(InvalidArgument, match=r"^w: the local tensor has shape \[2\].*give \[3\]"):
        dtensors.layout_of("w", odd)


def test_a_replica_restores_and_one_process_alone_saves(processes: None) -> None:
    mesh = meshes.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(50.0).reshape(10, 5)
    tstore.torch.save("memory://alone", {"w": whole}, 0, hosts=1)
    target = tensors.distribute_tensor(torch.zeros(10, 5), mesh, [tensors.Replicate(), tensors.Shard(0)])
    tstore.torch.restore("memory://alone", target={"w": target}, hosts=1)
    assert np.array_equal(target.to_local(), whole[5:])
    with pytest.raises(InvalidArgument, match="no shard covers"):
        tstore.torch.save(
            "memory://alone",
            {"w": tensors.distribute_tensor(whole, mesh, [tensors.Shard(0), tensors.Shard(1)])},
            1,
            hosts=1,
        )


class Average:
    """Has a state of distributed tensors, as one made with `get_state_dict` has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["average"])  # DTensor refuses to mix with ordinary tensors


def test_a_stateful_object_gets_its_state_in_its_own_layout(processes: None) -> None:
    mesh = meshes.init_device_mesh("cpu", (4,))
    whole = torch.arange(24.0).reshape(8, 3)
    tstore.torch.save("memory://stateful", {"ema": Average(whole)}, 0, hosts=1)
    target = Average(tensors.distribute_tensor(torch.zeros(8, 3), mesh, [tensors.Shard(0)]))
    tstore.torch.restore("memory://stateful", target={"ema": target}, hosts=1)
    assert torch.equal(target.tensor.to_local(), whole[2:4])
