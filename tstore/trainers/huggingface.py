"""A callback that saves the checkpoints of Hugging Face's `Trainer` to a store, and makes folders to resume from.

The `Trainer` resumes only from a folder of files. So `TStoreCallback.latest` writes one from the newest step, once
on each node, and it is removed when training has begun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

import tstore
import tstore.sync as blocking
from tstore.checkpoint.structure import flatten
from tstore.convert.exporting import FILES
from tstore.core.format.tree.retention import Keep
from tstore.errors import InvalidArgument
from tstore.quantization.policy import QuantizeRules, Target
from tstore.torch.processes import Processes

__all__ = ["TStoreCallback"]

T = TypeVar("T")

_LONGEST_FILE = 64 << 20  # of a tokenizer, in bytes; longer files are not configurations


class _Options(TypedDict, total=False):
    codecs: QuantizeRules | Target
    timeout: float | None


class TStoreCallback(transformers.TrainerCallback):
    """A callback of the `Trainer` that saves its checkpoints to a store, in the background, in place of folders.

    It saves when `save_strategy` ("steps" or "epoch") and `save_steps` say so: the model (of PEFT, the adapter
    alone), the optimizer, the scheduler, the scaler, the `TrainerState`, the random number generators of every
    process, and the files of the configuration and the tokenizer. An error of a save is raised by the next one, or
    at the end of training. Pass `resume_from_checkpoint=callback.latest()` to `Trainer.train`.

    Parameters
    ----------
    url
        The store; each run has its own.
    keep
        Which steps to keep, as `tstore.Checkpointer` takes it; by default `save_total_limit` steps. The metrics of
        an evaluation at a step are metrics of the step: `Keep(last=2, best=(1, "eval_loss"))`.
    codecs, timeout
        As `tstore.torch.Checkpointer` takes them.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, keep: int | Keep | None = None, **options: Unpack[_Options]
    ) -> None:
        self._url = url
        self._keep = keep
        self._options = options
        self._checkpoints: Any = None
        self._pending: Any = None  # the random states at the end of a step that is to be saved
        self._saved_step = -1
        self._files: dict[str, Any] = {}  # of the configuration and the tokenizer
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def latest(self) -> str | None:
        """Return a folder with the newest step, to resume from; None if there is no step or no store.

        With several processes, each makes this call after the `Trainer` was made. The first of each node writes
        the folder, which is removed once training has begun.
        """
        processes, here = Processes.of(None), socket.gethostname()
        everywhere = _exchanged(processes, lambda: (_newest(self._url), here))
        step = everywhere[0][0]
        if step is None:
            return None
        writes = here not in [host for _, host in everywhere[: processes.host]]
        paths = _exchanged(processes, lambda: self._written(step) if writes else "")
        return next(path for path, (_, host) in zip(paths, everywhere, strict=True) if path and host == here)

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the arguments of the `Trainer`."""
        if args.save_strategy == "best" or args.load_best_model_at_end:
            raise InvalidArgument(
                "TStoreCallback needs save_strategy='steps' or 'epoch', without load_best_model_at_end; to keep "
                "the best step, pass keep=Keep(last=1, best=(1, 'eval_loss'))"
            )
        if getattr(args, "fsdp", None) or args.deepspeed:
            raise InvalidArgument(
                "TStoreCallback saves whole models, and the Trainer shards this one; omit fsdp and deepspeed"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the step before, whose metrics are logged by now."""
        self._save(args, state, objects)

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> Any:
        """Note that the step is to be saved, in place of the `Trainer`."""
        self._forget_folder()
        return self._take_over(state, control, objects)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> Any:
        """Do what `on_step_begin` and `on_step_end` do."""
        self._save(args, state, objects)
        return self._take_over(state, control, objects)

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Note the random states after the evaluation, which may change them."""
        if self._pending is not None:
            self._pending = _random_states()

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the last step, and wait for all saves."""
        self._forget_folder()
        self._save(args, state, objects)
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()

    def _take_over(self, state: Any, control: Any, objects: Mapping[str, Any]) -> Any:
        if control.should_save and state.global_step != self._saved_step:
            self._pending = _random_states()
        control.should_save = False  # else the Trainer would write a folder too
        return control

    def _save(self, args: Any, state: Any, objects: Mapping[str, Any]) -> None:
        if self._pending is None:
            return
        own, self._pending = {"random": self._pending, "state": _bytes(_state_text(state))}, None
        self._saved_step = state.global_step
        if self._checkpoints is None:
            keep = args.save_total_limit if self._keep is None else self._keep
            self._checkpoints = blocking.torch.Checkpointer(self._url, keep=keep, **self._options)
            self._files = _files(objects["model"], objects["processing_class"])
        model, optimizer = objects["model"], objects["optimizer"]
        tree = {
            "model": _model_state(model),
            "optimizer": optimizer.state_dict(),
            "scheduler": objects["lr_scheduler"].state_dict(),
            FILES: self._files,
            "per_process": tstore.PerHost(own),
        }
        if (scaler := getattr(optimizer, "scaler", None)) is not None:
            tree["scaler"] = scaler.state_dict()
        last = [entry for entry in state.log_history if entry.get("step") == state.global_step]
        numbers = {key: n for entry in last for key, n in entry.items() if isinstance(n, int | float)}
        numbers = Processes.of(None).gather(numbers)[0]  # others measured other times, as of an evaluation
        self._checkpoints.save(state.global_step, tree, metrics=numbers)

    def _written(self, step: int) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="tstore-")
        path = os.path.join(self._folder.name, f"checkpoint-{step}")
        _write_checkpoint(self._url, step, path)
        return path

    def _forget_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()


def _exchanged(processes: Processes, call: Callable[[], T]) -> list[T]:
    """Return what the call returns in each process; if it fails in one of them, raise in all."""
    value, failure = None, None
    try:
        value = call()
    except Exception as error:  # the others wait for this process
        failure = error
    return processes.exchange(value, failure)


def _newest(url: str | os.PathLike[str]) -> int | None:
    """Return the newest step, None if there is no step or no store."""
    with contextlib.suppress(tstore.errors.NotAStore):
        return max(blocking.steps(url), default=None)
    return None


def _write_checkpoint(url: str | os.PathLike[str], step: int, folder: str | os.PathLike[str]) -> None:
    """Write a step of `TStoreCallback` as a folder from which the `Trainer` resumes."""
    tree = blocking.torch.restore(url, step, hosts=1, per_host="all")
    if not {"model", "optimizer", "scheduler", FILES, "per_process"} <= tree.keys():
        raise InvalidArgument(f"{os.fspath(url)}: step {step} is not of TStoreCallback; it has {', '.join(tree)}")
    target = Path(folder)
    target.mkdir(parents=True)
    is_adapter = "adapter_config.json" in tree[FILES]
    name = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    tensors = {key: value.contiguous() for key, value in tree["model"].items()}
    save_file(tensors, target / name, metadata={"format": "pt"})
    for file, data in flatten(tree[FILES])[1].items():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_bytes(data.numpy().tobytes())
    for key, file in (("optimizer", "optimizer.pt"), ("scheduler", "scheduler.pt"), ("scaler", "scaler.pt")):
        if key in tree:
            torch.save(tree[key], target / file)
    processes = tree["per_process"]
    for number, own in enumerate(processes):
        states = own["random"]
        kind, keys, *rest = states["numpy"]
        states["numpy"] = (kind, np.asarray(keys), *rest)
        torch.save(states, target / ("rng_state.pth" if len(processes) == 1 else f"rng_state_{number}.pth"))
    (target / "trainer_state.json").write_bytes(processes[0]["state"].numpy().tobytes())


def _random_states() -> dict[str, Any]:
    """Return the states of this process's random number generators, by the names that the `Trainer` uses."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        many = dist.is_initialized()
        states["cuda"] = torch.cuda.get_rng_state_all() if many else torch.cuda.get_rng_state()
    return states


def _state_text(state: Any) -> str:
    return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"


def _bytes(text: str | bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)


def _model_state(model: Any) -> dict[str, Any]:
    """Return the state to save of a model, with the first process's buffers, such as the statistics of BatchNorm.

    `DistributedDataParallel` copies these to all processes at the beginning of the next step.
    """
    state = _adapter(model) or model.state_dict()
    if Processes.of(None).hosts > 1:
        buffers = {buffer.data_ptr() for buffer in model.buffers()}
        for name, values in state.items():
            if isinstance(values, torch.Tensor) and values.data_ptr() in buffers:
                state[name] = values.clone()
                dist.broadcast(state[name], 0)
    return state


def _adapter(model: Any) -> dict[str, Any] | None:
    """Return the state of the active adapter of a PEFT model, None for another model."""
    if not hasattr(model, "peft_config"):
        return None
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=_adapter_name(model))
    return state


def _adapter_name(model: Any) -> str:
    names = list(model.peft_config)
    if len(names) != 1:
        raise InvalidArgument(
            f"the model has the adapters {', '.join(names)}; TStoreCallback saves models with one"
        )
    return str(names[0])


def _files(model: Any, processing_class: Any) -> dict[str, Any]:
    """Return the files of the configuration and the tokenizer, as `save_pretrained` writes them."""
    parts = [getattr(model, "config", None), getattr(model, "generation_config", None)]
    if hasattr(model, "peft_config"):
        parts = [model.peft_config[_adapter_name(model)]]
    with tempfile.TemporaryDirectory() as folder:
        for part in (*parts, processing_class):
            if part is not None:
                part.save_pretrained(folder)
        files: dict[str, Any] = {}
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and path.stat().st_size < _LONGEST_FILE:
                group = files
                for part in path.relative_to(folder).parent.parts:  # the further chat templates have a folder
                    group = group.setdefault(part, {})
                group[path.name] = _bytes(path.read_bytes())
        return files
