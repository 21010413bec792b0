"""Checkpoints with names, such as the files of a trainer, as tagged steps of a store, saved in the background.

A trainer that names its checkpoints also decides which to remove. Its calls are carried out in order, so a
checkpoint is removed only after the one that replaces it is committed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import torch

import tstore
import tstore.sync as blocking
from tstore.checkpoint.structure import flatten, unflatten_like
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.steps import step_tag, steps_of
from tstore.core.tags import drop_tag, move_tag
from tstore.errors import Conflict, Corrupt, NotAStore, NotFound
from tstore.torch import restore, save
from tstore.torch.tensors import same_bits

__all__ = ["NamedSteps", "named_steps", "wait_all"]


class NamedSteps:
    """The named checkpoints of one store, and what this process has yet to do to them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store: tstore.Store | None = None
        self._turn = asyncio.Lock()
        self._expected: collections.deque[tuple[str, bool]] = collections.deque()
        """The names that calls under way will set (True) or drop, in order."""
        self._ends: list[Any] = []  # futures of the calls
        self._error: BaseException | None = None
        self._pending: tuple[str, Any] | None = None  # the name and values of the save under way
        self._before = 0  # the newest step's version when this job began
        self._saved: set[int] = set()  # the versions of the steps that this job saved

    def names(self) -> dict[str, int | None]:
        """Return the version of each checkpoint by name, None for one whose save is under way."""
        try:
            with blocking.open(self.url, "r") as store:
                names: dict[str, int | None] = {t: v for t, v in store.tags().items() if not steps_of([t])}
        except NotAStore:
            names = {}
        for name, is_set in list(self._expected):
            if is_set:
                names[name] = None
            else:
                names.pop(name, None)
        return names

    def time(self, name: str) -> datetime.datetime:
        """Return when a checkpoint was committed; wait for saves under way."""
        self.wait()
        with blocking.open(self.url, "r") as store:
            version = store.snapshot(name).version
            times = (commit.time for commit in store.history() if commit.version == version)
            return next(times)

    def save(self, name: str, tree: Any, step: int | None, **options: Any) -> None:
        """Begin to save a tree of tensors as a step, by default the next one, with a name that may be in use.

        A tree that equals the one whose save is under way only adds its name to that one; otherwise wait for that
        save, so that there is one copy at a time. Raise the error of an earlier call.
        """
        store = self._opened()
        pending = self._pending
        if pending is not None and _equal(pending[1], tree):
            self._start(name, True, lambda: self._name_again(store, name, pending[0]))
            return
        if pending is not None:
            self.wait()
        copies = _copied(tree)

        async def run() -> None:
            tags = await store.tags()
            self._check_alone(tags)
            number = (steps_of(tags) or [-1])[-1] + 1 if step is None else step
            version = await save(
                store, copies, number, hosts=1, overwrite=True, tags=[name], priority="low", **options
            )
            self._saved.add(version)
            if self._pending is not None and self._pending[1] is copies:
                self._pending = None
            if name in tags:
                await _collect(store)

        self._pending = name, copies  # before it can end
        self._start(name, True, run)

    def save_together(self, name: str, begun: Coroutine[Any, Any, tstore.BackgroundSave]) -> None:
        """Wait until the values of a save with the other processes are copied; the name is one of its tags."""
        self._opened()
        saving: tstore.BackgroundSave = BACKGROUND.run(begun)

        async def run() -> None:
            self._saved.add(await saving.committed)

        self._pending = None
        self._start(name, True, run)

    def remove(self, name: str) -> None:
        """Drop a name, and collect the versions that have none, but the newest step."""
        store = self._opened()

        async def run() -> None:
            with contextlib.suppress(NotFound):
                await drop_tag(store, name)
            await _collect(store)

        self._start(name, False, run)

    def restore(self, name: str, **options: Any) -> Any:
        """Restore a checkpoint as `tstore.torch.restore` does; wait for saves under way first."""
        self.wait()
        try:
            return BACKGROUND.run(restore(self.url, at=name, **options))
        except Corrupt as error:
            others = ", ".join(sorted(other for other in self.names() if other != name)) or "none"
            raise Corrupt(f"{name}: {error}; the other checkpoints of {self.url} are: {others}") from error

    def wait(self) -> None:
        """Wait until all calls have ended; raise the error of the first that failed."""
        while self._ends:
            self._ends.pop(0).exception()
        self._raise_error()

    def _opened(self) -> tstore.Store:
        self._raise_error()
        if self._store is None:
            self._store = BACKGROUND.run(tstore.open(self.url))
            self._before = max(BACKGROUND.run(self._store.tags()).values(), default=0)
        return self._store

    def _start(self, name: str, is_set: bool, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            async with self._turn:
                try:
                    if self._error is None:  # nothing is removed after a save that failed
                        await work()
                except BaseException as error:
                    self._error, self._pending = error, None
                    BACKGROUND.report_at_exit(self, f"the checkpoint {name} of {self.url}: {error}")
                finally:
                    self._expected.popleft()

        self._expected.append((name, is_set))
        self._ends = [end for end in self._ends if not end.done()]
        self._ends.append(BACKGROUND.start(run()).future)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            BACKGROUND.withdraw(self)
            raise error

    async def _name_again(self, store: tstore.Store, name: str, other: str) -> None:
        is_used = name in await store.tags()
        await move_tag(store, name, other)
        if is_used:
            await _collect(store)

    def _check_alone(self, tags: dict[str, int]) -> None:
        """Raise `Conflict` if another job has saved a step since this one began."""
        for step in steps_of(tags):
            if (version := tags[step_tag(step)]) > self._before and version not in self._saved:
                raise Conflict(
                    f"{self.url}: another job saved step {step}, as version {version}, while this one was "
                    "running; end one of them, or give each job a folder of its own",
                    [f"tag {step_tag(step)}"],
                )


async def _collect(store: tstore.Store) -> None:
    """Collect the versions that no name keeps."""
    names = tuple(tag for tag in await store.tags() if not steps_of([tag]))
    await store.collect(tstore.Keep(last=1, tags=names))


_all: dict[str, NamedSteps] = {}
os.register_at_fork(after_in_child=_all.clear)  # a child does not go on with the saves of its parent


def named_steps(url: str) -> NamedSteps:
    """Return the named checkpoints of a store, the same object for each call with its URL."""
    return _all.setdefault(url, NamedSteps(url))


def wait_all() -> None:
    """Wait for all saves and removals of this process; raise the error of the first that failed."""
    for steps in _all.values():
        steps.wait()


def _copied(tree: Any) -> Any:
    """Return a tree with copies of its tensors in the host's memory; those that share memory share a copy."""
    _, leaves = flatten(tree)
    copies: dict[Any, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf.copy()
        key = leaf.device, leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype
        if key not in copies or not leaf.numel():
            copies[key] = leaf.detach().to("cpu", copy=True)
        return copies[key]

    return unflatten_like(tree, {path: copied(leaf) for path, leaf in leaves.items()}, {})


def _equal(a: Any, b: Any) -> bool:
    """Return whether two trees have the same structure, scalars and values."""
    (document, leaves), (other_document, others) = flatten(a), flatten(b)
    return document == other_document and all(map(_same, leaves.values(), others.values()))


def _same(a: Any, b: Any) -> bool:
    a, b = (torch.as_tensor(leaf).detach().cpu() for leaf in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
