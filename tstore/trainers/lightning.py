"""Checkpoints of Lightning: a plugin that saves them, a strategy for FSDP2, and the files that Lightning sees.

A folder of checkpoints is a store, and the name of a checkpoint is a tag. Lightning looks for checkpoints through
fsspec, so the URL of a folder begins with `tstore::`. `tstore::gs://bucket/run/last.ckpt` is the version tagged
`last.ckpt` of the store `gs://bucket/run`. The plugin serves `pytorch_lightning` if only that is imported, or if
`lightning` is not installed.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import io
import random
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import fsspec
import numpy as np
import torch
import torch.distributed as dist

import tstore
import tstore.sync as blocking
from tstore.checkpoint.options import SharedOptions
from tstore.checkpoint.structure import flatten
from tstore.errors import InvalidArgument, NotFound
from tstore.torch import save_async
from tstore.torch.dtensors import is_dtensor
from tstore.trainers.named_steps import NamedSteps, named_steps, wait_all

__all__ = ["CheckpointFiles", "CheckpointIO", "ModelParallelStrategy", "RandomStates"]

_is_old = "lightning" not in sys.modules and "pytorch_lightning" in sys.modules
_pl: Any = importlib.import_module(
    "pytorch_lightning" if _is_old or not importlib.util.find_spec("lightning") else "lightning.pytorch"
)
_plugins: Any = importlib.import_module(f"{_pl.__name__}.plugins")
_strategies: Any = importlib.import_module(f"{_pl.__name__}.strategies")

_HYPER_PARAMETERS = re.compile(r"(datamodule_)?(hyper_parameters|hparams_\w+)")
_EXAMPLE = "tstore::gs://bucket/run/last.ckpt"
_PER_PROCESS = "per_process"
"""Where a checkpoint of several processes has what is neither the state of the model nor of an optimizer."""


class CheckpointIO(_plugins.CheckpointIO):
    """A plugin of Lightning that saves the checkpoints of folders `tstore::URL` to stores, in the background.

    Use it in a `Trainer` or in `Fabric`, and pass the URL as the `dirpath` of `ModelCheckpoint`. All arguments of
    `ModelCheckpoint` but `save_last="link"` work as they do on a disk. A name moves to the new checkpoint in the
    commit that saves it, and unchanged values are not written again. A removed checkpoint is collected, but not
    the newest step. The error of a save is raised by the next one, or at the end of training.

    Hyper-parameters that a store can't hold, such as paths, enums and functions, are left out, with a warning that
    names them: pass them to `load_from_checkpoint`. Such a value elsewhere is an error that names its path.

    Parameters
    ----------
    options
        `codecs` and others, as `tstore.torch.save` takes them.
    """

    def __init__(self, **options: Unpack[SharedOptions]) -> None:
        self._options = options
        self._left_out: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Begin to save a checkpoint; return when its tensors may be changed.

        With `DTensor`s in the checkpoint, every process makes this call.
        """
        if storage_options is not None:
            raise InvalidArgument("storage_options: pass options of tstore.torch.save to CheckpointIO(…) instead")
        steps, name = _located(path)
        tree = self._storable(checkpoint)
        number = next((tree[key] for key in ("global_step", "step") if type(tree.get(key)) is int), None)
        if not any(map(is_dtensor, flatten(tree)[1].values())):
            steps.save(name, tree, number, **self._options)
            return
        if number is None:
            raise InvalidArgument(f"{path}: the checkpoint has neither 'global_step' nor 'step'; add the step")
        whole = {str(key): tree.pop(key) for key in ("state_dict", "optimizer_states") if key in tree}
        whole[_PER_PROCESS] = tstore.PerHost(tree)
        options: SharedOptions = {"overwrite": True, "tags": [name], **self._options}
        steps.save_together(name, save_async(steps.url, whole, number, **options))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Return a checkpoint, with its tensors on the CPU; nothing is ever unpickled."""
        steps, name = _located(path)
        tree = steps.restore(name, hosts=1, per_host="all")
        if _PER_PROCESS not in tree:
            return tree
        states = {"optimizer_states": [_numbered(state) for state in tree.pop("optimizer_states", [])]}
        return {**tree.pop(_PER_PROCESS)[0], **tree, **states}

    def load_into(self, path: Any, model: Any, optimizers: list[Any]) -> Any:
        """Load the states of a sharded model and its optimizers in place; return the rest of the checkpoint.

        Every process makes this call. The rest is that of the process with the same rank, or, if another number of
        processes saved the checkpoint, that of the first.
        """
        steps, name = _located(path)
        target: dict[str, Any] = {"state_dict": model, **({"optimizer_states": optimizers} if optimizers else {})}
        steps.restore(name, target=target, only=[f"{key}/**" for key in target])
        with blocking.open(steps.url, "r") as store:
            is_sharded = _PER_PROCESS in store.snapshot(name)
        if not is_sharded:
            return self.load_checkpoint(path)
        values = steps.restore(name, only=_PER_PROCESS, hosts=1, per_host="all")[_PER_PROCESS]
        return values[dist.get_rank() if len(values) == dist.get_world_size() else 0]

    def remove_checkpoint(self, path: Any) -> None:
        """Begin to remove a checkpoint, once the saves before are committed."""
        steps, name = _located(path)
        steps.remove(name)

    def teardown(self) -> None:
        """Wait for all saves and removals; raise the error of the first that failed."""
        wait_all()

    def _storable(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint without the hyper-parameters that can't be stored; warn once of each."""
        tree: dict[str, Any] = {}
        left_out: list[str] = []
        for key, value in checkpoint.items():
            kept = _kept(value, key, left_out) if _HYPER_PARAMETERS.fullmatch(key) else value
            if kept is not None or value is None:
                tree[key] = kept
        if new := sorted(set(left_out) - self._left_out):
            self._left_out.update(new)
            warnings.warn(
                f"left out of the checkpoints, because a store can't hold their values: {', '.join(new)}; pass "
                "them to load_from_checkpoint, or exclude them with save_hyperparameters(ignore=…)",
                stacklevel=2,
            )
        return tree


class ModelParallelStrategy(_strategies.ModelParallelStrategy):
    """Lightning's strategy for FSDP2 and tensor parallelism, whose checkpoints go through the `CheckpointIO`.

    Every process saves its own shards, and restores them for any number of processes.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begin to save the shards of this process."""
        if self._save_distributed_checkpoint or self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load the states of the model and the optimizers in place; return the rest."""
        return self.checkpoint_io.load_into(self.broadcast(checkpoint_path), self.model, list(self.optimizers))


class RandomStates(_pl.Callback):
    """A callback that saves the random number generators of every process, and restores them at the next batch.

    Lightning saves none, so without it dropout differs after a resume. If another number of processes saved the
    checkpoint, the generators are left alone.
    """

    def __init__(self) -> None:
        self._restored: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all processes."""
        own = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        states: list[Any] = [own]
        if dist.is_available() and dist.is_initialized():
            states *= dist.get_world_size()
            dist.all_gather_object(states, own)
        return {"states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note the states for the next batch: making the data loaders draws random numbers too."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        states = state_dict["states"]
        self._restored = states[rank] if len(states) == size else None

    def on_train_batch_start(self, *_: Any) -> None:
        """Restore the generators, once."""
        if self._restored is not None:
            random.setstate(self._restored["python"])
            kind, keys, *rest = self._restored["numpy"]
            np.random.set_state((kind, np.asarray(keys), *rest))
            torch.set_rng_state(self._restored["torch"])
            if len(self._restored["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(self._restored["cuda"])
        self._restored = None


class CheckpointFiles(fsspec.AbstractFileSystem):
    """The checkpoints of stores as files of fsspec, `tstore::URL/NAME.ckpt`, to list and to read.

    A file has the bytes that `torch.save` would write, so `load_from_checkpoint` and `torch.load` read it.
    """

    protocol = "tstore"
    """The scheme by which fsspec finds this class."""

    cachable = False
    """Whether fsspec keeps an instance for later calls with the same arguments."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path

    def exists(self, path: Any, **_: Any) -> bool:
        """Return whether there is such a checkpoint, or a folder with checkpoints."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def info(self, path: Any, **_: Any) -> dict[str, Any]:
        """Return the name and type of a checkpoint, or of a folder; raise `FileNotFoundError` if there is none."""
        path = str(path)
        if not path.endswith(".ckpt"):
            if not _located(f"{path}/.ckpt")[0].names():
                raise FileNotFoundError(path)
            return {"name": path, "size": None, "type": "directory"}
        steps, name = _located(path)
        if name not in steps.names():
            raise FileNotFoundError(path)
        return {"name": path, "size": None, "type": "file"}

    def ls(self, path: Any, detail: bool = True, **_: Any) -> list[Any]:
        """Return the checkpoints of a folder, without other tags, such as those of quantized copies."""
        folder = str(path).rstrip("/")
        names = sorted(n for n in _located(f"{folder}/.ckpt")[0].names() if n.endswith(".ckpt") and "/" not in n)
        return [self.info(f"{folder}/{name}") if detail else f"{folder}/{name}" for name in names]

    def modified(self, path: Any) -> datetime.datetime:
        """Return when a checkpoint was committed."""
        steps, name = _located(path)
        return steps.time(name)

    def _open(self, path: Any, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode != "rb":
            raise InvalidArgument(
                f"{path}: mode={mode!r}: expected 'rb'; pass CheckpointIO() to the Trainer to save"
            )
        try:
            checkpoint = CheckpointIO().load_checkpoint(path)
        except NotFound as error:
            raise FileNotFoundError(str(error)) from error
        file = io.BytesIO()
        torch.save(checkpoint, file)
        file.seek(0)
        return file


fsspec.register_implementation("tstore", CheckpointFiles, clobber=True)


def _located(path: Any) -> tuple[NamedSteps, str]:
    """Return the store and the name of the checkpoint at a path, whose double slashes may have been lost."""
    folder, _, name = str(path).removeprefix("tstore::").rpartition("/")
    if not str(path).startswith("tstore::") or not folder or not name.endswith(".ckpt"):
        raise InvalidArgument(
            f"{path}: expected the URL of a checkpoint, such as {_EXAMPLE}; pass dirpath='tstore::URL' to "
            "ModelCheckpoint"
        )
    return named_steps(re.sub(r"^(?!file:)([\w+.-]+):/+", r"\1://", folder)), name


def _kept(value: Any, path: str, left_out: list[str]) -> Any:
    """Return what can be stored of a value, None if that is nothing; add the paths of the rest to `left_out`."""
    try:
        flatten({"": value})
        return value
    except InvalidArgument:
        if not isinstance(value, Mapping):
            left_out.append(path)
            return None
    kept = {key: _kept(item, f"{path}/{key}", left_out) for key, item in value.items() if isinstance(key, str)}
    return {key: item for key, item in kept.items() if item is not None or value[key] is None}


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with numbers in place of the names of its parameters."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[name]: values for name, values in state["state"].items()}, "param_groups": groups}
