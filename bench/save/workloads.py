"""The workloads: named sets of float32 arrays, the same for every contender."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Workload:
    """`count` arrays of one shape, and the chunk shape that tensorstore uses for them.

    If `chunked`, the chunk shape is part of the task; otherwise contenders choose their own.
    """

    name: str
    title: str
    count: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    chunked: bool = False

    @property
    def names(self) -> list[str]:
        return [f"w{i:05}" for i in range(self.count)]

    @property
    def nbytes(self) -> int:
        return self.count * 4 * int(np.prod(self.shape))

    def make(self) -> Arrays:
        """Return new arrays of normal values with deviation 0.02, like weights; always the same values."""
        return dict(self.items())

    def items(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Yield the names and the arrays that `make` returns."""
        rng = np.random.default_rng(20)
        for name in self.names:
            array = rng.standard_normal(self.shape, dtype=np.float32)
            array *= np.float32(0.02)
            yield name, array


WORKLOADS = {
    w.name: w
    for w in (
        # 16 MiB chunks: tensorstore restores them up to twice as fast as one chunk per array
        Workload("large", "1 GiB in 16 arrays of 4096×4096", 16, (4096, 4096), (1024, 4096)),
        Workload("chunks64k", "256 MiB in 4096 chunks of 64 KiB", 1, (8192, 8192), (128, 128), chunked=True),
        Workload("leaves", "10,000 leaves of 4 KiB", 10_000, (1024,), (1024,)),
    )
}
