"""Two processes that save distributed tensors, each its own part: run with a folder."""

import multiprocessing
import sys

import torch
import torch._dynamo  # which DTensor imports when it is first used: once for both processes
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def whole(*shape: int) -> torch.Tensor:
    """Return a tensor whose elements are numbered."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def save(folder: str, rank: int) -> None:
    """Save a checkpoint, and one for Hugging Face libraries."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        "rows": distribute_tensor(whole(7, 3), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole(4, 6).to(torch.bfloat16), mesh, [Shard(1)]),
        "copied": distribute_tensor(whole(5), mesh, [Replicate()]),
        "plain": whole(2, 2),
    }
    dcp.save({"model": tensors, "step": 3}, checkpoint_id=f"{folder}/dcp")
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))
    dist.destroy_process_group()


def main(folder: str) -> int:
    """Fork both processes, and return 0 if neither failed."""
    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=save, args=(folder, rank)) for rank in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    return int(any(job.exitcode for job in jobs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
