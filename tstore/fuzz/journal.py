"""What the workers of a fuzzing run did, were told and saw, as plain data that also reaches another process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tstore.format.retention import Keep
from tstore.simulation.store_model import Region

__all__ = [
    "Acknowledged",
    "Attempt",
    "Collected",
    "Collecting",
    "CopyMade",
    "Create",
    "Delete",
    "Failed",
    "Fault",
    "Group",
    "Journal",
    "Op",
    "Read",
    "Replace",
    "Replay",
    "Resize",
    "Write",
    "sample",
]

UNWRITTEN = "a chunk that was never written"


class Create(NamedTuple):
    """A new array."""

    path: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    sparse: bool


class Write(NamedTuple):
    """The values of a region, which `sample` draws from the seed; `kinds` of them differ in size alone."""

    path: str
    region: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]
    dtype: str
    seed: int

    @property
    def slices(self) -> Region:
        """The region as NumPy takes it."""
        return tuple(slice(*part) for part in self.region)

    @property
    def values(self) -> NDArray[Any]:
        """What is written."""
        return sample(self.seed, self.shape, self.dtype)


class Resize(NamedTuple):
    """Another shape of an array."""

    path: str
    shape: tuple[int, ...]


class Delete(NamedTuple):
    """An array goes that was there before."""

    path: str


class Group(NamedTuple):
    """A group gets attributes."""

    path: str
    attributes: dict[str, Any]


class Replace(NamedTuple):
    """Nothing stays of what was there."""


class Replay(NamedTuple):
    """Everything becomes as it was in another version."""

    version: int


class Known(NamedTuple):
    """An array gets values that are known by themselves."""

    path: str
    values: NDArray[Any]


Op = Create | Write | Resize | Delete | Group | Replace | Replay | Known


class Attempt(NamedTuple):
    """A commit that a worker is about to ask for; its message is unique.

    Of its `tags` those in `moved` may have named another version before, the others named none.
    The ops up to `sure` belong to it if it is committed, those behind them perhaps.
    """

    message: str
    ops: tuple[Op, ...]
    tags: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    metrics: dict[str, float] | None = None
    sure: int | None = None
    base: int | None = None
    reads: tuple[tuple[tuple[Op, ...], str, NDArray[Any] | None], ...] = ()
    """What a serializable transaction read: after some ops, an array; None if a chunk was never written."""


class Acknowledged(NamedTuple):
    """The attempt of this message became a version, as somebody was told at this time."""

    message: str
    version: int
    time: float


class Failed(NamedTuple):
    """The attempt of this message is not committed, and will not be."""

    message: str
    error: str


class Read(NamedTuple):
    """An array of a version, or one of its regions, as it was read; None where a chunk was never written."""

    version: int
    path: str
    region: tuple[tuple[int, int, int], ...] | None
    values: NDArray[Any] | None
    newest_since: float | None = None
    """When the reader asked for the newest version, if it did."""


class Collecting(NamedTuple):
    """A gc was begun with a rule."""

    keep: Keep | None
    abandoned: timedelta


class Collected(NamedTuple):
    """A gc ended; `version` is its commit, if it made one."""

    keep: Keep | None
    version: int | None
    versions: tuple[int, ...]


class CopyMade(NamedTuple):
    """The store was copied to a place, up to a version."""

    url: str
    version: int


class Fault(NamedTuple):
    """Something happened that never may; `verb` and `kind` tell faults apart."""

    verb: str
    kind: str
    text: str


class Journal:
    """The events of one worker, in order; in a file, they also survive a kill."""

    def __init__(self, file: Path | None = None) -> None:
        self.events: list[Any] = []
        self._file: BinaryIO | None = None if file is None else file.open("ab", buffering=0)

    def note(self, event: Any) -> None:
        """Add an event."""
        if self._file is None:
            self.events.append(event)
        else:
            self._file.write(pickle.dumps(event))

    @staticmethod
    def read(file: Path) -> Iterator[Any]:
        """The events in a file, up to one that a kill cut short."""
        with file.open("rb") as opened:
            while True:
                try:
                    yield pickle.load(opened)
                except (EOFError, pickle.UnpicklingError):
                    return


def sample(seed: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Random values of a seed; of floats such as every format with three mantissa bits holds."""
    source = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return source.choice(np.array([0, 0.5, 1, -1.5, 2, 3, -4, 6], dtype), shape)
    if dtype == "bool":
        return source.integers(0, 2, shape).astype(bool)
    return source.integers(0, 120, shape).astype(dtype)
