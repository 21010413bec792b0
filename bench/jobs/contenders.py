"""The contenders by name. A library is imported when its contender is made, in the process of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy.typing as npt

from bench.jobs import on_jax, on_numpy, on_torch
from bench.jobs.states import Piece
from bench.save.workloads import Workload


class Contender(Protocol):
    """One process of a job of `processes` processes, with its part of the state of the workload.

    `stagings`: the staging modes of a save in the background; empty if the contender has no such save.
    `durabilities`: whether saves can be made with fsync (True) and without. `reshards`: restores in another layout
    are measured too. `parts`: a tenth of the state can be restored alone, and changed between saves.
    """

    title: ClassVar[str]
    processes: ClassVar[int]
    stagings: ClassVar[tuple[str, ...]]
    durabilities: ClassVar[tuple[bool, ...]]
    reshards: ClassVar[bool]
    parts: ClassVar[bool]

    def __init__(self, workload: Workload, host: int, hosts: int, rendezvous: Path) -> None: ...

    def values(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the values that this process holds, each once."""
        ...

    def wait_for_others(self) -> None:
        """Return when all processes of the job have called this."""
        ...

    def save(self, folder: Path, step: int, durable: bool) -> None: ...

    def begin_save(self, folder: Path, step: int, staging: str) -> Callable[[], Any]:
        """Start a save with fsync and, once the state may change, return a function that waits for its end."""
        ...

    def restore(self, folder: Path, step: int, what: str) -> Any:
        """Restore "same" as it was saved, in the "other" layout, or a "tenth" as it was saved."""
        ...

    def change_tenth(self) -> None:
        """Change all values of the tenth of the state that can be restored alone."""
        ...

    def pieces(self, restored: Any) -> Iterator[Piece]:
        """Yield the pieces of a restored state that this process holds."""
        ...


CONTENDERS: dict[str, type[Contender]] = {
    "raw": on_numpy.Raw,
    "safetensors": on_numpy.Safetensors,
    "tstore": on_numpy.TStore,
    "tstore-jax": on_jax.TStore,
    "orbax": on_jax.Orbax,
    "orbax-plain": on_jax.OrbaxUncompressed,
    "levanter": on_jax.Levanter,
    "tstore-torch": on_torch.TStore,
    "dcp": on_torch.CheckpointFiles,
}
TSTORE = ("tstore", "tstore-jax", "tstore-torch")
ORBAX = ("orbax", "orbax-plain")
PEERS = (*ORBAX, "dcp")
LARGE_ONLY = ("orbax-plain",)
