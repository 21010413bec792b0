"""Callbacks of Keras 3 that save to a store in the background, with the surface of Keras's own.

A step of the store has the number of updates that the optimizer has made. Its items are the variables of the
`model` and of its `optimizer`, the number of the next `epoch`, and the `random` states of the generators from
which Keras draws the order of samples. With JAX, variables may be sharded over the processes of a job.

Keras numbers the layers that have no name of their own, and optimizers, by how many a process made before. The
names in a step count from the lowest number in the model, so that a notebook that builds the model again can
restore it.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import keras
import numpy as np

import tstore.sync
from tstore.core.tags import remove_steps
from tstore.errors import Corrupt, InvalidArgument
from tstore.sync.facade import blocking

__all__ = ["BackupAndRestore", "ModelCheckpoint", "restore_model"]

_NUMBERED = re.compile("(.+)_([1-9][0-9]*)")

_remove_steps = blocking(remove_steps, __name__)


class _SavingCallback(keras.callbacks.Callback):
    """Saves the model at the end of each epoch, or every `save_freq` batches."""

    def __init__(self, url: str | os.PathLike[str], save_freq: str | int, keep: int | tstore.Keep | None) -> None:
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise InvalidArgument(f"save_freq={save_freq!r}: expected 'epoch' or a number of batches")
        with tstore.sync.open(url):  # so that a wrong URL raises before training
            self._checkpoints = _library().Checkpointer(url, keep=keep)
        self._save_freq = save_freq
        self._unsaved = 0  # batches since the last save
        self._epoch, self._batch = 0, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count the batches of an epoch."""
        self._epoch, self._batch = epoch, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if enough batches have passed; with `steps_per_execution`, each call stands for several."""
        self._unsaved += batch - self._batch
        self._batch = batch
        if isinstance(self._save_freq, int) and self._unsaved >= self._save_freq:
            self._save(self._epoch, logs or {})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if each epoch is saved."""
        if self._save_freq == "epoch":
            self._save(epoch + 1, logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for saves under way, and raise the error of any that failed."""
        self._checkpoints.wait()

    def _save(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._unsaved = 0
        tree = {**self._items(), "epoch": epoch, "random": _random_states()}
        metrics = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        self._checkpoints.save(int(self.model.optimizer.iterations), tree, metrics=metrics)

    def _items(self) -> dict[str, Any]:
        """Return the variables to save."""
        return _values(_variables(self.model))


class BackupAndRestore(_SavingCallback):
    """Save the state of training, and resume from it when `fit` is called again.

    Use it like `keras.callbacks.BackupAndRestore`. The variables of the model and the optimizer, the number of the
    epoch, and the states of the random generators of Python, NumPy and PyTorch are restored, so that training goes
    on as if it had not been interrupted. Saves are atomic and in the background: a process that is killed leaves
    the step before, or the new one. The state of other callbacks is not saved.

    Parameters
    ----------
    backup_dir
        The path or URL of a store, for this callback alone.
    save_freq
        "epoch", or a number of batches. Training always resumes at the beginning of an epoch: with a number, with
        the variables of the last save in that epoch, so that some of its batches are seen again, as in Keras.
    double_checkpoint
        Keep the last two steps, and resume from the earlier one if the newest is damaged. Both share equal chunks.
    delete_checkpoint
        Remove the steps when training ends without an error, so that the next `fit` starts from the beginning.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__(backup_dir, save_freq, 2 if double_checkpoint else 1)
        self._url = backup_dir
        self._falls_back, self._deletes = double_checkpoint, delete_checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest step if there is one."""
        model = self.model
        if not model.built:
            raise InvalidArgument(
                f"the model {model.name!r} has no variables yet; build it before fit, such as with model.build(…)"
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables = _variables(model)
        target = {**_values(variables), "epoch": 0, "random": tstore.PerHost(None)}
        try:
            restored = self._checkpoints.restore_latest(target, per_host="keep")
        except Corrupt:
            steps = self._checkpoints.steps()
            if not self._falls_back or len(steps) < 2:
                raise
            self._checkpoints.rollback(steps[-2].step)
            restored = self._checkpoints.restore_latest(target, per_host="keep")
        if restored is None:
            return
        _assign(variables, restored)
        model._initial_epoch = restored["epoch"]  # as Keras's own callback does: `fit` offers no other way
        if restored["random"].value is not None:  # saved by as many processes
            _set_random_states(restored["random"].value)

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for saves under way, and remove the steps if requested."""
        super().on_train_end(logs)
        if self._deletes:
            _remove(self._url, [saved.step for saved in self._checkpoints.steps()])


class ModelCheckpoint(_SavingCallback):
    """Save the model at each epoch or every few batches, with its metrics.

    Use it like `keras.callbacks.ModelCheckpoint`, and `restore_model` to load a step.

    Parameters
    ----------
    filepath
        The path or URL of a store. The steps are numbered by the updates of the optimizer. Pass this callback
        after `BackupAndRestore`, so that it knows where training resumes.
    monitor, mode
        The metric to compare steps by, and whether the "min" or "max" is best. "auto" knows losses and accuracies.
    save_best_only
        Save only if the metric is better than in all steps of the store, also those of an earlier `fit`. NaN is
        never better.
    save_weights_only
        Leave out the variables of the optimizer.
    save_freq
        "epoch", or a number of batches.
    initial_value_threshold
        With `save_best_only`, the value that the first step must surpass.
    keep
        What to keep, as `tstore.Checkpointer` takes it: by default all steps, with `save_best_only` the best.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        keep: int | tstore.Keep | None = None,
    ) -> None:
        super().__init__(filepath, save_freq, 1 if save_best_only and keep is None else keep)
        self._url, self._monitor = filepath, monitor
        self._order = _order(monitor, mode) if save_best_only else None
        self._best = initial_value_threshold
        self._weights_only = save_weights_only

    def on_train_begin(self, logs: Any = None) -> None:
        """Look up the best step; if training resumes, remove the later steps, which it will save again."""
        updates = int(self.model.optimizer.iterations)
        if updates > 0:
            _remove(self._url, [saved.step for saved in self._checkpoints.steps() if saved.step > updates])
        if self._order is not None and (best := self._checkpoints.best(self._monitor, self._order)) is not None:
            value = next(s.metrics[self._monitor] for s in self._checkpoints.steps() if s.step == best)
            self._best = value if self._best is None else (min if self._order == "min" else max)(value, self._best)

    def _save(self, epoch: int, logs: Mapping[str, Any]) -> None:
        if self._order is not None:
            if self._monitor not in logs:
                raise InvalidArgument(
                    f"monitor={self._monitor!r}: the epoch has no such metric, only {', '.join(sorted(logs))}"
                )
            value = float(logs[self._monitor])
            sign = 1 if self._order == "min" else -1
            if math.isnan(value) or (self._best is not None and sign * value >= sign * self._best):
                return
            self._best = value
        super()._save(epoch, logs)

    def _items(self) -> dict[str, Any]:
        return _values({"model": _own_variables(self.model)}) if self._weights_only else super()._items()


def restore_model(model: Any, url: str | os.PathLike[str], step: int | None = None) -> None:
    """Restore the variables of a built model, without its optimizer, from a step (by default the newest)."""
    variables = {"model": _own_variables(model)}
    _assign(variables, _library().restore(url, step, target=_values(variables), only="model/**"))


def _remove(url: str | os.PathLike[str], steps: Sequence[int]) -> None:
    if steps:
        with tstore.sync.open(url, "r+") as store:
            _remove_steps(store, steps)


def _library() -> ModuleType:
    """Return the module that saves and restores the values of variables."""
    return tstore.sync.jax if keras.backend.backend() == "jax" else tstore.sync


def _own_variables(model: Any) -> dict[str, Any]:
    """Return the variables of a model by their paths in a step; raise `InvalidArgument` if two have one path."""
    own: dict[str, Any] = {}
    for variable in (*model.trainable_variables, *model.non_trainable_variables):
        if own.setdefault(variable.path, variable) is not variable:
            raise InvalidArgument(
                f"the model {model.name!r} has two variables {variable.path!r}; give each layer a name of its own"
            )
    paths = _stable_paths(list(own))
    return {paths[path]: variable for path, variable in own.items()}


def _variables(model: Any) -> dict[str, dict[str, Any]]:
    """Return the variables of a model and of its optimizer by their paths in a step."""
    own = _own_variables(model)
    paths = {variable.path: path for path, variable in own.items()}
    slots: dict[str, Any] = {}
    for variable in model.optimizer.variables if model.optimizer is not None else ():
        name = variable.path.rpartition("/")[2]
        # a slot has the path of its variable, with another separator, in its name
        owner = max((p for p in paths if name.startswith(p.replace("/", "_") + "_")), key=len, default=None)
        path = name if owner is None else f"{paths[owner]}/{name[len(owner) + 1 :]}"
        path = path if path not in slots else variable.path
        if path in slots:
            raise InvalidArgument(
                f"the optimizer of the model {model.name!r} has two variables {path!r}; give each layer a name of "
                "its own"
            )
        slots[path] = variable
    return {"model": own, "optimizer": slots}


def _stable_paths(paths: Sequence[str]) -> dict[str, str]:
    """Return each path with the numbers at the ends of its names counted from the lowest beside it."""
    beside: dict[str, set[str]] = {}  # the names in each group
    for path in paths:
        for group, name in _places(path):
            beside.setdefault(group, set()).add(name)
    stable = {group: _stable_names(names) for group, names in beside.items()}
    return {path: "/".join(stable[group][name] for group, name in _places(path)) for path in paths}


def _places(path: str) -> Iterator[tuple[str, str]]:
    """Yield each name of a path with the path above it."""
    group = ""
    for name in path.split("/"):
        yield group, name
        group += f"/{name}"


def _stable_names(names: Iterable[str]) -> dict[str, str]:
    """Return names with their numbers counted from the lowest, unless two would be equal: "x_2_1" and "x_3"."""
    numbered = {name: (m[1], int(m[2])) if (m := _NUMBERED.fullmatch(name)) else (name, 0) for name in names}
    lowest: dict[str, int] = {}
    for base, number in numbered.values():
        lowest[base] = min(lowest.get(base, number), number)
    stable = {
        name: base + (f"_{number - lowest[base]}" if number > lowest[base] else "")
        for name, (base, number) in numbered.items()
    }
    return stable if len(set(stable.values())) == len(stable) else {name: name for name in stable}


def _values(variables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of variables in nested dicts, as arrays of JAX or NumPy."""
    of_jax = keras.backend.backend() == "jax"
    tree: dict[str, Any] = {}
    for item, named in variables.items():
        tree[item] = {}
        for path, variable in named.items():
            *above, name = path.split("/")
            group = tree[item]
            for part in above:
                group = group.setdefault(part, {})
            group[name] = variable.value if of_jax else keras.ops.convert_to_numpy(variable)
    return tree


def _assign(variables: Mapping[str, Mapping[str, Any]], tree: Any) -> None:
    """Assign the values in nested dicts to variables."""
    for item, named in variables.items():
        for path, variable in named.items():
            variable.assign(functools.reduce(operator.getitem, path.split("/"), tree[item]))


def _random_states() -> tstore.PerHost:
    """Return the states of the generators that order samples, which each process has for itself."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if keras.backend.backend() == "torch":
        import torch

        states["torch"] = torch.get_rng_state().numpy()
    return tstore.PerHost(states)


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))


def _order(monitor: str, mode: str) -> Literal["min", "max"]:
    """Return whether the lowest or the highest value of a metric is best; raise `InvalidArgument` if unknown."""
    if mode == "min" or (mode == "auto" and monitor.endswith(("loss", "error"))):
        return "min"
    if mode == "max" or (mode == "auto" and monitor.endswith(("acc", "accuracy", "auc"))):
        return "max"
    raise InvalidArgument(f"mode={mode!r} for {monitor!r}: pass 'min' or 'max', whichever value is better")
