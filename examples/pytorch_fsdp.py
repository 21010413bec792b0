"""Train a small transformer with FSDP2; run again after a crash or a preemption, it resumes by itself.

    torchrun --standalone --nproc-per-node 2 examples/pytorch_fsdp.py STORE --steps 30

Kill it at any step and run it again, also with another number of processes. It needs no GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tstore import EverySteps, OnPreemption
from tstore.sync.torch import Checkpointer

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 12


class Transformer(nn.Module):
    """A decoder of two layers that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's rows of the batch of a step: sequences that count up, and their next tokens."""
    random = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=random)
    stride = torch.randint(1, 4, (BATCH, 1), generator=random)
    rows = ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY)[dist.get_rank() :: dist.get_world_size()]
    return rows[:, :-1], rows[:, 1:]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Make one step of training; return the loss of the whole batch."""
    loss = model(*batch_of(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", help="a folder or URL")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    policy = EverySteps(args.save_every) | OnPreemption()
    with Checkpointer(args.store, every=policy, keep=3) as checkpoints:
        state = checkpoints.restore_latest(state) or state
        for step in range(state["step"] + 1, args.steps + 1):
            loss = train_step(model, optimizer, step)
            schedule.step()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.6f}", flush=True)
            if checkpoints.should_save(step) or step == args.steps:
                state["step"] = step
                checkpoints.save(step, state, metrics={"loss": loss})
            if checkpoints.preempted:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
