"""The events that fuzzing workers record: operations, outcomes and reads, as picklable data."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.store_model import Region
from tstore.core.format.tree.retention import Keep

__all__ = [
    "Acknowledged",
    "Attempt",
    "Collected",
    "Collecting",
    "CopyMade",
    "Copying",
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
    """Create an array."""

    path: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    sparse: bool


class Write(NamedTuple):
    """Write the values that `sample` draws from the seed to a region."""

    path: str
    region: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]
    dtype: str
    seed: int

    @property
    def slices(self) -> Region:
        """The region as a NumPy index."""
        return tuple(slice(*part) for part in self.region)

    @property
    def values(self) -> NDArray[Any]:
        """The written values."""
        return sample(self.seed, self.shape, self.dtype)


class Resize(NamedTuple):
    """Resize an array."""

    path: str
    shape: tuple[int, ...]


class Delete(NamedTuple):
    """Delete an existing array."""

    path: str


class Group(NamedTuple):
    """Create a group with attributes."""

    path: str
    attributes: dict[str, Any]


class Replace(NamedTuple):
    """Delete everything."""


class Replay(NamedTuple):
    """Become a copy of another version, which leaves the head as it is."""

    version: int


class Known(NamedTuple):
    """Write given values to an entire array."""

    path: str
    values: NDArray[Any]


Op = Create | Write | Resize | Delete | Group | Replace | Replay | Known


class Attempt(NamedTuple):
    """A commit that a worker is about to attempt, identified by its unique message.

    The tags in `moved` may have named another version before; other `tags` must have been free. They name the
    version `target`, by default that of the commit. If the attempt
    commits, it includes the first `sure` operations, and may include the others.
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
    target: int | None = None
    reads: tuple[tuple[tuple[Op, ...], str, NDArray[Any] | None], ...] = ()
    """The reads of a serializable transaction: operations before it, path, values (None if unwritten)."""


class Acknowledged(NamedTuple):
    """The attempt with this message was acknowledged as a version, at this time."""

    message: str
    version: int
    time: float


class Failed(NamedTuple):
    """The attempt with this message failed for good."""

    message: str
    error: str


class Read(NamedTuple):
    """A read of an array, or of a region of it, at a version; values are None if a chunk was never written."""

    version: int
    path: str
    region: tuple[tuple[int, int, int], ...] | None
    values: NDArray[Any] | None
    newest_since: float | None = None
    """The time when the reader queried the newest version, if it did."""


class Collecting(NamedTuple):
    """A gc began, with this rule."""

    keep: Keep | None
    abandoned: timedelta


class Collected(NamedTuple):
    """A gc ended; `version` is its commit, if it made one, and `versions` those it expired."""

    keep: Keep | None
    version: int | None
    versions: tuple[int, ...]


class Copying(NamedTuple):
    """A worker is about to copy the store to a URL."""

    url: str


class CopyMade(NamedTuple):
    """The store was copied to a URL, up to a version."""

    url: str
    version: int


class Fault(NamedTuple):
    """A violation of a promise; `verb` and `kind` classify it."""

    verb: str
    kind: str
    text: str


class Journal:
    """The events of one worker, in order; in a file, they survive a kill."""

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
        """Yield the events in a file, up to one that a kill truncated."""
        with file.open("rb") as opened:
            while True:
                try:
                    yield pickle.load(opened)
                except (EOFError, pickle.UnpicklingError):
                    return


def sample(seed: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return random values; floats are ones that every format with three mantissa bits represents exactly."""
    source = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return source.choice(np.array([0, 0.5, 1, -1.5, 2, 3, -4, 6], dtype), shape)
    if dtype == "bool":
        return source.integers(0, 2, shape).astype(bool)
    return source.integers(0, 120, shape).astype(dtype)
