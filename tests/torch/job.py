"""Jobs of processes forked from one that has imported torch: `python -m tests.torch.job FOLDER CHECK:PROCESSES …`.

Each check is a function that all processes of a gloo group call; a failure in one of them fails the job.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from concurrent import futures
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, AsyncMock, patch

import numpy as np
import pytest
import torch
import torch._dynamo  # which DTensor imports when it is first used: once for all processes
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tstore.sync as tstore
from tests.support.held_saves import held_saves
from tstore import EverySeconds, EverySteps
from tstore.checkpoint.source import Source
from tstore.errors import Corrupt, Inconsistent, InvalidArgument, StructureMismatch, TStoreError, Unavailable


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.down(torch.relu(self.up(x))))
        return result


def parallel(mesh: DeviceMesh) -> Net:
    """Return one divided by columns and rows over the axis "tp", if the mesh has it, and by FSDP2 over "dp"."""
    torch.manual_seed(5)
    net = Net()
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (net.up, net.down, net):
        fully_shard(layer, mesh=mesh["dp"])
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tree: Any) -> Any:
    if isinstance(tree, DTensor):
        return tree.full_tensor().detach().clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def same(one: Any, other: Any, path: str = "") -> None:
    assert isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), f"{path}: {one} {other}"
    else:
        assert one == other, path


def keep(file: Path, tree: Any) -> None:
    """Keep the whole tensors of a tree, for the processes that restore it."""
    tree = whole(tree)
    if dist.get_rank() == 0:
        torch.save(tree, file)


def save_2d(folder: Path) -> None:
    """Four processes train and save a module of FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, range(2))
    tstore.torch.save(folder / "2d", {"model": net, "optimizer": optimizer, "epoch": 2}, 2)
    keep(folder / "2d.pt", {"model": net.state_dict(), "state": optimizer.state_dict()["state"]})


def restore_1d(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = parallel(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    target = {"model": net, "optimizer": optimizer, "epoch": 0}
    assert tstore.torch.restore(folder / "2d", target=target)["epoch"] == 2
    expected = torch.load(folder / "2d.pt")
    same(whole(net.state_dict()), expected["model"])
    same(whole(optimizer.state_dict()["state"]), expected["state"])
    assert optimizer.param_groups[0]["lr"] == 0.01


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": state, "epoch": 3, "note": ["a", None]}


def stages(rank: int, count: int) -> dict[str, Any]:
    """Return the state of a pipeline stage: of the four layers those of this process, with an optimizer."""
    torch.manual_seed(rank)
    layers = nn.ModuleDict({f"layer{i}": nn.Linear(3, 3) for i in range(4) if i % count == rank})
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.1 / count)
    sum(layer(torch.ones(2, 3)).sum() for layer in layers.values()).backward()
    optimizer.step()
    return {"model": layers, "optimizer": optimizer, "shared": torch.full((2,), 5.0), f"rng{rank}": rank}


def save_stages(folder: Path) -> None:
    """Pipeline stages have different trees, and one process that can't save its part fails all."""
    rank, count = dist.get_rank(), dist.get_world_size()
    state = stages(rank, count)
    tstore.torch.save(folder / "stages", state, 0)
    broken = torch.empty(1, device="meta") if rank == 2 else torch.ones(1)
    for tree, message in (
        ({"w": broken}, "w: a tensor on the meta device"),
        ({"n": rank}, "different values at the same path"),
        ({"w": torch.ones(rank + 1)}, "different arrays at the same path"),
    ):
        with pytest.raises(TStoreError, match=message):
            tstore.torch.save(folder / "stages", tree, 1)
    parts: list[Any] = [None] * count
    dist.all_gather_object(parts, {"model": state["model"].state_dict(), "state": state["optimizer"].state_dict()})
    if rank == 0:
        assert tstore.steps(folder / "stages") == [0]
        torch.save(parts, folder / "stages.pt")


def restore_stages(folder: Path) -> None:
    rank, count = dist.get_rank(), dist.get_world_size()
    state = stages(rank, count)
    state = {key: value for key, value in state.items() if not key.startswith("rng")} | {
        f"rng{i}": 9 for i in range(4)
    }
    result = tstore.torch.restore(folder / "stages", target=state)
    assert [result[f"rng{i}"] for i in range(4)] == [0, 1, 2, 3]
    parts = torch.load(folder / "stages.pt")
    for i, layer in enumerate(("layer0", "layer1", "layer2", "layer3")):
        if layer in state["model"]:
            assert torch.equal(state["model"][layer].weight, parts[i]["model"][f"{layer}.weight"])
            own = state["optimizer"].state[state["model"][layer].weight]["exp_avg"]
            assert torch.equal(own, parts[i]["state"]["state"][0]["exp_avg"])
    assert state["optimizer"].param_groups[0]["lr"] == 0.1 / 4
    del state["rng3"]
    with pytest.raises(StructureMismatch, match="unexpected, not in the target: rng3"):
        tstore.torch.restore(folder / "stages", target=state)


class Loader:
    """A data loader with a state of its own."""

    def __init__(self, position: int) -> None:
        self.state = {"position": position, "seen": list(range(position)), "seed": torch.tensor([position])}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def own_state(rank: int) -> dict[str, Any]:
    """Return a state with what each process has for itself, and the same weights in all."""
    torch.manual_seed(rank)
    np.random.seed(rank)  # many jobs use it
    rng = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()}
    own = {
        "loader": tstore.PerHost(Loader(rank)),
        "rng": tstore.PerHost(rng),
        "bf16": tstore.PerHost(torch.ones(rank).bfloat16()),
    }
    return {"w": torch.ones(3), "own": own}


def save_own_state(folder: Path) -> None:
    url, rank = folder / "own", dist.get_rank()
    tstore.torch.save(url, own_state(rank), 1)
    restored = tstore.torch.restore(url, target=own_state(9))["own"]
    same(restored["loader"].value.state, Loader(rank).state)
    same(restored["rng"].value["torch"], own_state(rank)["own"]["rng"].value["torch"])
    np.random.set_state(restored["rng"].value["numpy"])
    assert type(restored["rng"].value["numpy"][1]) is np.ndarray
    same(tstore.torch.restore(url)["own"]["bf16"].value, torch.ones(rank).bfloat16())
    untouched = own_state(9)
    tstore.torch.restore(url, target=untouched, only="w")
    assert untouched["own"]["loader"].value.state["position"] == 9
    with tstore.torch.Checkpointer(url) as checkpoints:
        checkpoints.save(2, own_state(rank + 10))
        assert checkpoints.restore_latest(own_state(0))["own"]["loader"].value.state["position"] == rank + 10
    mesh = init_device_mesh("cpu", (2, 2))
    replicated = [Replicate(), Replicate()]
    for tree in (
        {"rng": DTensor.from_local(torch.full((2,), rank), mesh, replicated)},
        {"rng": DTensor.from_local(torch.full((1 << 20,), rank).bfloat16(), mesh, replicated)},
        {"rng": torch.full((2,), rank)},
        {"rng": np.float32(rank)},
        {"rng": rank},
        {"rng": bytes([rank])},
    ):
        with pytest.raises(Inconsistent, match=r"tstore.PerHost\(value\)(.|\n)*\n  rng"):
            tstore.torch.save(url, tree, 3)
    stage = {"loader": tstore.PerHost(Loader(rank))} if rank % 2 else {}  # only some of the stages read data
    tstore.torch.save(url, {"w": torch.ones(1), **stage}, 4)
    target = {"w": torch.zeros(1), **({"loader": tstore.PerHost(Loader(0))} if stage else {})}
    restored = tstore.torch.restore(url, 4, target=target)
    assert "loader" not in restored or restored["loader"].value.state["position"] == rank


def restore_own_state(folder: Path) -> None:
    url, rank = folder / "own", dist.get_rank()
    with pytest.raises(InvalidArgument, match=r"own/loader: saved by 4 hosts; this is host . of 2"):
        tstore.torch.restore(url, 1, target=own_state(rank))
    values = tstore.torch.restore(url, 1, target=own_state(rank), per_host="all")["own"]
    for restored in (values, tstore.torch.restore(url, 1, per_host="all")["own"]):
        assert [state["position"] for state in restored["loader"]] == [0, 1, 2, 3]
        assert [state["seed"] for state in restored["loader"]] == [torch.tensor([i]) for i in range(4)]
        with pytest.raises(InvalidArgument, match=r"loader: a list of the values of 4 hosts.*PerHost\(value"):
            tstore.torch.save(url, restored, 9)
    kept = tstore.torch.restore(url, 1, target=own_state(7), per_host="keep")["own"]
    assert kept["loader"].value.state["position"] == 7


def series(folder: Path) -> None:
    """A `Checkpointer` saves in the background, decides alike in all processes, and resumes."""
    url = folder / "series"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state: dict[str, Any] = {"n": 0}
    state["w"] = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(1), Shard(0)])
    state["hybrid"] = [distribute_tensor(torch.arange(5.0) + i, mesh, [Replicate(), Shard(0)]) for i in range(8)]
    state["one"] = distribute_tensor(torch.ones(1), mesh, [Shard(0), Shard(0)])  # three processes have none of it
    with tstore.torch.Checkpointer(url, every=EverySteps(2) | EverySeconds(1e6), keep=2) as checkpoints:
        assert checkpoints.restore_latest(state) is None
        for step in range(1, 8):
            state["w"] += 1
            state["n"] = step
            if checkpoints.should_save(step):
                checkpoints.save(step, state, metrics={"loss": 1 / step})
        checkpoints.wait()
        assert checkpoints.latest() == 6
        target = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Replicate(), Shard(1)]), "n": 0}
        target |= {"hybrid": [torch.zeros(5) for _ in range(8)], "one": torch.zeros(1)}
        assert checkpoints.restore_latest(target)["n"] == 6
        assert [t[4].item() for t in target["hybrid"]] == list(range(4, 12))
        assert target["one"].item() == 1
        assert torch.equal(target["w"].full_tensor(), torch.arange(24.0).reshape(6, 4) + 6)
        assert checkpoints.rollback(4) == checkpoints.rollback(4)
        assert checkpoints.restore_latest(target)["n"] == 4
        checkpoints.save(6, state, metrics={"loss": 2.0})
        assert checkpoints.restore_latest(target)["n"] == 7
        # one process finds the newest step damaged, so all of them fall back to the one before
        damaged = AsyncMock(wraps=Source.read, side_effect=[Corrupt("lost"), DEFAULT])
        with patch.object(Source, "read", damaged) if dist.get_rank() == 1 else nullcontext():
            assert checkpoints.restore_latest(target, fallback=True)["n"] == 4
        assert checkpoints.latest() == 4
        lost = AsyncMock(side_effect=Unavailable("no network"))
        lookup = patch("tstore.checkpoint.job_store.steps", lost)
        with lookup if dist.get_rank() == 1 else nullcontext(), pytest.raises(TStoreError, match="no network"):
            checkpoints.restore_latest(target)  # raises in every process
        with patch("tstore.core.store.Store.collect", lost):  # only the first process collects
            futures.wait([checkpoints.save(8, state)._work.ended])
        with pytest.raises(TStoreError, match="no network"):  # again in every process
            checkpoints.save(10, state) if checkpoints.should_save(10) else None
        handle = tstore.torch.save_async(url, state, 9)
        state["w"] += 100
        handle.wait()
    with held_saves(dist.get_rank() == 1) as release:
        with tstore.torch.Checkpointer(folder / "continuous", every=tstore.Continuous()) as checkpoints:
            assert checkpoints.should_save(1)
            save = checkpoints.save(1, state)
            if dist.get_rank() != 1:
                save.wait()
            assert not checkpoints.should_save(2)  # in no process while one of them is not done
            release()
            save.wait()
            assert checkpoints.should_save(3)
    dist.barrier()
    assert torch.equal(tstore.torch.restore(url)["w"], torch.arange(24.0).reshape(6, 4) + 7)
    tiers = tstore.Tiers(folder / f"local{dist.get_rank()}", folder / "tiered", address="127.0.0.1")
    with suppress(KeyError), tstore.torch.Checkpointer(tiers) as checkpoints:
        assert checkpoints.restore_latest(target) is None
        checkpoints.save(2, state)
        raise KeyError  # so that nothing is pushed to the durable store
    with tstore.torch.Checkpointer(tiers) as checkpoints:
        assert checkpoints.restore_latest(target)["n"] == 7
        assert torch.equal(target["w"].full_tensor(), state["w"].full_tensor())
        assert tstore.steps(folder / "tiered") == []


def dcp_save(folder: Path) -> None:
    """DCP's functions save to a store, also with a cache of plans, and in a thread."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, range(2))
    url, rank = folder / "dcp", dist.get_rank()
    state = state_of(net, optimizer)
    writer = tstore.torch.Writer(url, 1, metrics={"loss": 0.5})
    dcp.save(state, storage_writer=writer)
    assert (writer.version == 1) == (rank == 0)
    writer = tstore.torch.Writer(url)
    for step in (2, 3, 4):
        train(net, optimizer, range(step, step + 1))
        state = state_of(net, optimizer)
        if step == 4:
            state["more"] = distribute_tensor(torch.arange(7.0), mesh, [Shard(0), Shard(0)])
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if step == 3:  # a save that fails when all other processes have delivered their parts of it
            lost = patch.object(tstore.torch.Writer, "finish", side_effect=OSError("no network"))
            with lost if rank == 0 else nullcontext(), pytest.raises(CheckpointException, match="no network"):
                dcp.save(state, storage_writer=writer, checkpoint_id="3", planner=planner)
            train(net, optimizer, range(10, 11))
            state, planner = state_of(net, optimizer), DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), planner=planner)
        restored = {"model": parallel(mesh).state_dict()}
        tstore.torch.restore(url, step, only="model/**", target=restored)
        same(whole(state["model"]), whole(restored["model"]))
    future = dcp.async_save(state, storage_writer=tstore.torch.Writer(url, 5))
    train(net, optimizer, range(9, 10))
    future.result()
    if rank == 0:
        assert tstore.steps(url) == [1, 2, 3, 4, 5]
        assert [transaction.name for transaction in tstore.open(url).pending()] == ["step/3"]
        assert tstore.open(url).verify().ok
    with pytest.raises(CheckpointException, match="step 5 is already saved"):
        dcp.save(state, storage_writer=tstore.torch.Writer(url, 5))
    values = np.random.default_rng(rank).standard_normal((600, 600))
    for odd, path in (
        ({"rng": torch.full((5,), rank, dtype=torch.uint8)}, "rng: hosts"),
        ({"a": {"long": torch.from_numpy(values).T}}, "a/long: hosts"),  # of which samples are compared
        ({"a": {"n": [rank, 1]}}, "a/n/0: hosts"),
        ({"own": tstore.PerHost(rank)}, r"own: .* another key in each process, such as f'rank\{rank\}'"),
    ):
        with pytest.raises(CheckpointException, match=path):
            dcp.save({**odd, "w": torch.ones(2)}, storage_writer=tstore.torch.Writer(folder / "dcp-odd", 1))
    own = {f"rank{rank}": {"n": rank, "t": torch.full((2,), rank)}, "long": torch.ones(600, 600)}
    dcp.save(own, storage_writer=tstore.torch.Writer(folder / "dcp-odd", 1))
    own[f"rank{rank}"] = {"n": -1, "t": torch.zeros(2, dtype=torch.int64)}
    dcp.load(own, storage_reader=tstore.torch.Reader(folder / "dcp-odd"))
    assert own[f"rank{rank}"]["n"] == own[f"rank{rank}"]["t"][1] == rank
    writer = tstore.torch.Writer(url, 6)
    save_state_dict: Any = dcp.save_state_dict  # deprecated, so without types
    save_state_dict(state, writer, coordinator_rank=1)
    assert (writer.version is None) == (rank != 1)
    keep(folder / "dcp.pt", {"model": state["model"], "state": state["optimizer"]["state"]})


def dcp_load(folder: Path) -> None:
    for store in ("dcp", "2d"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        net = parallel(mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
        state = state_of(net, optimizer)
        if store == "2d":
            del state["note"]
        dcp.load(state, storage_reader=tstore.torch.Reader(folder / store))
        expected = torch.load(folder / f"{store}.pt")
        same(whole(state["model"]), expected["model"])
        if store == "dcp":
            same(whole(state["optimizer"]["state"]), expected["state"])
            assert state["note"] == ["a", None]
        assert state["epoch"] == (3 if store == "dcp" else 2)
        assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
        part = {"model": {"up.bias": torch.zeros(10)}}
        dcp.load(part, storage_reader=tstore.torch.Reader(folder / store))
        assert torch.equal(part["model"]["up.bias"], expected["model"]["up.bias"])


CHECKS: dict[str, list[Callable[[Path], None]]] = {
    "save": [save_2d, save_stages, save_own_state, series, dcp_save],
    "restore": [restore_1d, restore_stages, restore_own_state, dcp_load],
}


def run(check: str, folder: Path, rank: int, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group-{check}", rank=rank, world_size=count)
    for function in CHECKS[check]:
        function(folder)
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        check, _, count = argument.partition(":")
        children = []
        for rank in range(int(count)):
            child = os.fork()
            if not child:
                code = 1
                try:
                    run(check, folder, rank, int(count))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
