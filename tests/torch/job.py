"""Jobs of processes forked from one that has imported torch: `python -m tests.torch.job FOLDER CHECK:PROCESSES …`.

Each check is a function that all processes of a gloo group call; a failure in one of them fails the job.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tstore.sync as tstore


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


def save_2d(folder: Path) -> None:
    """Four processes train and save a module of FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, range(2))
    tstore.torch.save(folder / "2d", {"model": net, "optimizer": optimizer, "epoch": 2}, 2)
    expected = {"model": whole(net.state_dict()), "state": whole(optimizer.state_dict()["state"])}
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def restore_1d(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = parallel(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    target = {"model": net, "optimizer": optimizer, "epoch": 0}
    assert tstore.torch.restore(folder / "2d", target=target)["epoch"] == 2
    expected = torch.load(folder / "expected.pt")
    same(whole(net.state_dict()), expected["model"])
    same(whole(optimizer.state_dict()["state"]), expected["state"])
    assert optimizer.param_groups[0]["lr"] == 0.01


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": state, "epoch": 3, "note": ["a", None]}


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
        dcp.save(
            state,
            storage_writer=writer,
            checkpoint_id=str(step),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        same(
            whole({"m": state["model"]}),
            whole(
                {
                    "m": tstore.torch.restore(
                        url, step, only="model/**", target={"model": parallel(mesh).state_dict()}, hosts=1
                    )["model"]
                }
            ),
        )
    future = dcp.async_save(state, storage_writer=tstore.torch.Writer(url, 5))
    train(net, optimizer, range(9, 10))
    future.result()
    if rank == 0:
        assert tstore.steps(url) == [1, 2, 3, 4, 5]
        assert not tstore.open(url).pending()
        tstore.open(url).verify()
    with pytest.raises(CheckpointException, match="step 5 is saved already"):
        dcp.save(state, storage_writer=tstore.torch.Writer(url, 5))
    dcp.save(state, storage_writer=tstore.torch.Writer(url, 6))
    expected = {"model": whole(state["model"]), "state": whole(state["optimizer"]["state"])}
    if rank == 0:
        torch.save(expected, folder / "dcp.pt")


def dcp_load(folder: Path) -> None:
    for store in ("dcp", "2d"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        net = parallel(mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
        state = state_of(net, optimizer)
        if store == "2d":
            del state["note"]
        dcp.load(state, storage_reader=tstore.torch.Reader(folder / store))
        expected = torch.load(folder / ("dcp.pt" if store == "dcp" else "expected.pt"))
        same(whole(state["model"]), expected["model"])
        if store == "dcp":
            same(whole(state["optimizer"]["state"]), expected["state"])
            assert state["note"] == ["a", None]
        assert state["epoch"] == (3 if store == "dcp" else 2)
        assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
        part = {"model": {"up.bias": torch.zeros(10)}}
        dcp.load(part, storage_reader=tstore.torch.Reader(folder / store))
        assert torch.equal(part["model"]["up.bias"], expected["model"]["up.bias"])


CHECKS: dict[str, list[Callable[[Path], None]]] = {"save": [save_2d, dcp_save], "restore": [restore_1d, dcp_load]}


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
