"""A training job with torchtitan's containers of optimizers and schedulers, and the manager for stores."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from tstore.trainers.torchtitan import CheckpointManager

STEPS = 12


class Job:
    """A small training job with the parts that torchtitan passes to its manager; itself is the `train_state`."""

    def __init__(self, url: object, name: str = "layer", **config: Any) -> None:
        torch.manual_seed(7)
        self.step = self.ntokens_seen = 0
        self.model = torch.nn.Sequential()
        self.model.add_module(name, torch.nn.Linear(8, 8))
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
        optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
        self.optimizers = optimizers.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=3)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        config = {"enable": True, "folder": str(url), "interval": 4, "keep_latest_k": 2} | config
        self.checkpointer = CheckpointManager.Config(**config).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int, kill_at: int = 0) -> list[float]:
        """Train up to a step and return the losses; die by SIGKILL after the step `kill_at`."""
        losses = []
        self.checkpointer.load(step=-1)
        while self.step < steps:
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            loss = self.model(torch.randn(4, 8, generator=generator)).square().mean()
            self.optimizers.zero_grad()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.ntokens_seen += 32
            losses.append(loss.item())
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
            if self.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        self.checkpointer.close()
        return losses
