"""A `CheckpointManager` with the methods of Orbax's, over `tstore.sync.jax.Checkpointer`.

A step is one commit. Its items are in a dict by their names, and `default` is the item of a step without names.
Items of `JsonSave` are stored as text, and so come back exactly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

import tstore.sync
from tstore.core.tags import remove_steps
from tstore.errors import InvalidArgument
from tstore.sync.facade import blocking

__all__ = ["CheckpointManager"]

_DEFAULT = "default"
_REFUSED = (
    "keep_time_interval",
    "preservation_policy",
    "save_decision_policy",
    "save_on_steps",
    "should_save_fn",
    "read_only",
)
_SCORE = "best_fn"
"""The name of the metric that has what `best_fn` returned."""

_JSON = "json_items"
"""The attribute of a step that has the names of the items of `JsonSave`."""

_remove_steps = blocking(remove_steps, __name__)


class CheckpointManager:
    """Save and restore the steps of a job, with the methods of `orbax.checkpoint.CheckpointManager`.

    Parameters
    ----------
    directory
        The path or URL of a store.
    options
        An `orbax.checkpoint.CheckpointManagerOptions`, of which these count: `max_to_keep`, `keep_period`,
        `save_interval_steps`, `best_fn` and `best_mode`. The newest step is always kept. Other options that decide
        what is saved or kept are refused.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, options: ocp.CheckpointManagerOptions | None = None
    ) -> None:
        options = options or ocp.CheckpointManagerOptions()
        if refused := [name for name in _REFUSED if getattr(options, name, None)]:
            raise InvalidArgument(
                f"CheckpointManagerOptions({refused[0]}=…): not supported here; pass max_to_keep, keep_period, "
                "save_interval_steps, best_fn and best_mode"
            )
        self._url, self._best_fn, self._mode = directory, options.best_fn, options.best_mode
        count, keep = options.max_to_keep, None
        if count is not None:
            best = {"best": (count, _SCORE, self._mode)} if self._best_fn else {"last": count}
            keep = tstore.sync.Keep(every=options.keep_period, **best)
        with tstore.sync.open(directory):  # so that a wrong URL raises before training
            self._checkpoints = tstore.sync.jax.Checkpointer(
                directory, every=options.save_interval_steps, keep=keep
            )
        self._is_first = self._checkpoints.latest() is None
        self._interval, self._deleted = options.save_interval_steps, -1

    def should_save(self, step: int) -> bool:
        """Return whether a step is due: the first one of the store, and then by `save_interval_steps`."""
        is_due_again = step == self._deleted and step % self._interval == 0
        return self._checkpoints.should_save(step) or self._is_first or is_due_again

    def save(
        self,
        step: int,
        items: Any = None,
        *,
        args: Any = None,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Begin to save a step if it is due, or with `force`; return whether it is saved."""
        if not force and not self.should_save(step):
            return False
        named = _named(args if args is not None else items)
        tree = {name: _saved(argument) for name, argument in named.items()}
        texts = [name for name, argument in named.items() if isinstance(argument, ocp.args.JsonSave)]
        metrics = dict(metrics or {})
        if self._best_fn is not None and metrics:
            metrics[_SCORE] = float(self._best_fn(metrics))
        self._checkpoints.save(step, tree, metrics=metrics, attributes={_JSON: texts} if texts else None)
        self._is_first, self._deleted = False, -1
        return True

    def restore(self, step: int | None = None, items: Any = None, *, args: Any = None) -> Any:
        """Return a step, by default the newest: the items that `args` names, each into its abstract tree if given.

        Without `args`, return all items; a step without names is returned as its item.
        """
        step = self._checkpoints.latest() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{os.fspath(self._url)} has no step to restore")
        wanted = args if args is not None else items
        named = {} if wanted is None else _named(wanted)
        restored = {name: self._item(step, name, argument) for name, argument in named.items()}
        if wanted is None:
            restored = self._checkpoints.restore(step)
            restored |= {name: json.loads(restored[name]) for name in self._json_items(step)}
        return ocp.args.Composite(**restored) if list(restored) != [_DEFAULT] else restored[_DEFAULT]

    def _item(self, step: int, name: str, argument: Any) -> Any:
        only = [name, f"{name}/**"]
        if isinstance(argument, ocp.args.JsonRestore):
            return json.loads(self._checkpoints.restore(step, only=only)[name])
        abstract = getattr(argument, "item", argument)
        target = None if abstract is None else {name: abstract}
        return self._checkpoints.restore(step, target, only=only)[name]

    def _json_items(self, step: int) -> list[str]:
        with tstore.sync.open(self._url, "r") as store:
            names: list[str] = store.snapshot(f"step/{step}").attributes().get(_JSON, [])
        return names

    def item_metadata(self, step: int) -> Any:
        """Return the abstract trees of the items of a step, None for those of `JsonSave`."""
        self._checkpoints.wait()
        tree = tstore.sync.jax.metadata(self._url, step) | dict.fromkeys(self._json_items(step))
        return ocp.args.Composite(**tree) if list(tree) != [_DEFAULT] else tree[_DEFAULT]

    def latest_step(self) -> int | None:
        """Return the newest step, None if there is none."""
        return self._checkpoints.latest()

    def best_step(self) -> int | None:
        """Return the best step by `best_fn`, the newest without one."""
        return self.latest_step() if self._best_fn is None else self._checkpoints.best(_SCORE, self._mode)

    def all_steps(self) -> list[int]:
        """Return all steps, in increasing order."""
        return [saved.step for saved in self._checkpoints.steps()]

    def metrics(self, step: int) -> dict[str, float] | None:
        """Return the metrics of a step, None if it has none."""
        saved = next((s.metrics for s in self._checkpoints.steps() if s.step == step), {})
        return {name: value for name, value in saved.items() if name != _SCORE} or None

    def delete(self, step: int) -> None:
        """Remove a step; its chunks are deleted by the next garbage collection.

        Every process makes this call. Raise `FileNotFoundError` if there is no such step.
        """
        self.wait_until_finished()
        with tstore.sync.open(self._url, "r+") as store:
            version = _remove_steps(store, [step])
        if version is None and jax.process_count() == 1:  # else another process was first
            raise FileNotFoundError(f"{os.fspath(self._url)} has no step {step} to delete")
        self._deleted = step

    def wait_until_finished(self) -> None:
        """Wait for saves under way, and raise the error of any that failed."""
        self._checkpoints.wait()

    def close(self) -> None:
        """Wait for saves under way, and free the memory of copies."""
        self._checkpoints.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(args: Any) -> dict[str, Any]:
    """Return the arguments of a save or restore by the names of items."""
    return dict(args.items()) if isinstance(args, ocp.args.Composite) else {_DEFAULT: args}


def _saved(argument: Any) -> Any:
    """Return what is stored of an item."""
    item = getattr(argument, "item", argument)
    return json.dumps(item) if isinstance(argument, ocp.args.JsonSave) else item
