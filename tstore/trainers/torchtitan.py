"""A checkpoint manager of torchtitan whose checkpoints are the steps of a store.

torchtitan builds the manager that its configuration names, so a job changes one line of that:
`checkpoint=CheckpointManager.Config(enable=True, folder="gs://bucket/run", interval=500)`, with this class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.tools import filesystem

import tstore.sync as tstore
from tstore.checkpoint.series import OnError
from tstore.errors import InvalidArgument

__all__ = ["CheckpointManager"]

_REFUSED = ("last_save_in_hf", "initial_load_in_hf", "initial_load_in_hf_quantized")


class CheckpointManager(BaseCheckpointManager):
    """Save the steps of a torchtitan job in the background, and resume from the newest.

    The state of the job has the keys `model`, `optimizer`, `lr_scheduler`, `dataloader` and `train_state`, so that
    `only="model/**"` selects the weights. The last step has all of these
    too, regardless of `last_save_model_only`: what has not changed is not stored again, and a job with more steps
    goes on from it. torchtitan itself reads `enable`, `save_future` and `keep_latest_k`.

    Parameters
    ----------
    config
        A `CheckpointManager.Config`, in which `folder` and `initial_load_path` are URLs or paths of stores.
        `on_error` is that of `tstore.Checkpointer`. Options for folders of Hugging Face are refused.
    others
        As torchtitan passes them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The configuration of torchtitan's managers, with `on_error`."""

        on_error: OnError = "raise"

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None  # saves in the background are known to the Checkpointer
        if not self.enable:
            return
        if refused := [name for name in _REFUSED if getattr(config, name)]:
            raise InvalidArgument(
                f"{refused[0]}: a store has no folders of Hugging Face; use tstore import and tstore export"
            )
        self.folder = filesystem.join(base_folder, config.folder)
        self.keep_latest_k = config.keep_latest_k
        self._config = config
        parts = {
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            LR_SCHEDULER: lr_schedulers,
            DATALOADER: dataloader,
        }
        self._states = {key: state for key, state in {**states, **parts}.items() if state is not None}
        keep = config.keep_latest_k or None
        self._checkpoints = tstore.torch.Checkpointer(self.folder, keep=keep, on_error=config.on_error)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        if curr_step != self._checkpoints.latest():  # a job that resumes at its last step
            self._checkpoints.save(curr_step, {key: state.state_dict() for key, state in self._states.items()})
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        config, newest = self._config, self._checkpoints.latest()
        if step == -1 and newest is None:
            path = config.initial_load_path
            return path is not None and self._load_from(path, None, config.initial_load_model_only)
        step = newest if newest is not None and step == -1 else step
        return self._load_from(self.folder, step, step == 0)  # step 0 is a seed

    def _load_from(self, url: str, step: int | None, model_only: bool) -> bool:
        """Load the weights, or all states that are not excluded, from a step, by default the newest."""
        keys = [key for key in self._states if key not in self._config.exclude_from_loading]
        keys = [MODEL] if model_only else keys
        target = {key: self._states[key].state_dict() for key in keys}
        restored = tstore.torch.restore(url, step, target=target, only=[f"{key}/**" for key in keys])
        for key in keys:
            self._states[key].load_state_dict(restored[key])
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save returns when its values are staged."""

    def _wait_for_saving(self) -> None:
        self._checkpoints.wait()

    def _close(self) -> None:
        if hasattr(self, "_checkpoints"):  # `__init__` may have raised
            self._checkpoints.close()
