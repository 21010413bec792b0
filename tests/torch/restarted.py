"""A job that is killed inside two saves, and that the agent of torchrun starts again, by itself.

It saves with `dcp.save`, and with `dcp.async_save` in a process of its own. Its processes are forked from that of
the agent, which has imported torch.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import Shard, distribute_tensor

import tstore.sync as tstore

STEPS = 5
IN_BACKGROUND = range(3, 5)
"""The steps that a process in the background saves, until it was killed."""


def die_inside_saves(url: str) -> None:
    """Have the process killed that is about to create the last part of step 2 or 4 for the first time."""
    link = os.link

    def fatal(source: Any, target: Any, **options: Any) -> None:
        for step in (2, 4):
            if f"/step-{step}." in str(target) and "/part-00001-" in str(target):
                with suppress(FileExistsError):
                    Path(f"{url}.killed-{step}").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
        link(source, target, **options)

    os.link = fatal


def train(url: str) -> None:
    dist.init_process_group("cpu:gloo")
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "step": 0}
    with suppress(CheckpointException):  # there is no store yet
        dcp.load(state, storage_reader=tstore.torch.Reader(url))
    if dist.get_rank() == 0:
        print(f"after step {state['step']}", flush=True)
    for step in range(state["step"] + 1, STEPS + 1):
        state["w"] += 1
        state["step"] = step
        writer = tstore.torch.Writer(url, step)
        if step in IN_BACKGROUND and not Path(f"{url}.killed-4").exists():
            saving: Any = dcp.async_save(
                state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            )
            saving.result()
        else:
            dcp.save(state, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


torch.set_num_threads(1)
die_inside_saves(sys.argv[1])  # also in a process of `async_save`, which imports this module too
if __name__ == "__main__":
    launched = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=4,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    elastic_launch(launched, train)(sys.argv[1])
