"""The measurements of `bench.arrays`, in interleaved rounds of all contenders.

Each piece of work runs in a new process. Not measured are: importing the library, making values, opening the array
that is read, emptying the folder, syncing the disk, and filling the page cache, from which all contenders read,
except in the row "read cold", before which the files leave the cache (those of a tmpfs stay).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine
from bench.arrays.peers import CONTENDERS, MANY_ARRAYS, PEERS, RAW, RAW_CHUNKS
from bench.arrays.volume import Volume
from bench.cost import Cost
from bench.processes import Hosts
from bench.rounds import Results, Rounds
from bench.scale.contenders import array_name

WRITE, WRITE_DURABLE, READ_ALL, READ_COLD = "write", "write durable", "read", "read cold"
READS = (READ_ALL, READ_COLD, "boxes", "single chunks", "elements", "strided")
ARRAYS = ("write many arrays", "open many arrays")
ROWS = (WRITE, WRITE_DURABLE, *READS, "arrays")
"""The pieces of work on a volume, and that on many arrays."""


class Sizes(NamedTuple):
    """How many regions of each kind are read."""

    boxes: int
    singles: int
    elements: int
    arrays: int


class Bench(Rounds):
    """Runs the chosen rows in a folder; the pieces of work are named after the volume and the row.

    Calls `save` after each piece of work, so that an interrupted run keeps its figures.
    """

    def __init__(
        self,
        folder: Path,
        sizes: Sizes,
        rows: Sequence[str],
        peers: Sequence[str],
        log: Callable[[str], None],
        save: Callable[[Results], None],
    ) -> None:
        super().__init__({name: each.title for name, each in CONTENDERS.items()}, PEERS, peers, log)
        self.folder, self.sizes, self.rows, self.save = folder, sizes, rows, save
        self._reserve = machine.Reserve()

    def volume(self, volume: Volume, turn: int) -> None:
        """Write the volume, durably and not, and read parts of what was written last."""
        contenders = [name for name, each in CONTENDERS.items() if each.handles(volume)]
        for name in self.names(contenders, turn, work(volume, WRITE)):
            for row, durable in ((WRITE_DURABLE, True), (WRITE, False)):
                if row in self.rows or not durable:
                    if durable and not CONTENDERS[name].durable:
                        continue
                    with self.attempt(work(volume, row), name):
                        machine.clear(self.folder)
                        self._measure(volume, row, name, turn, "write", durable)
            if self.figures(work(volume, WRITE), name).error:
                continue
            for row, do, argument in self._reads(volume):
                if row in self.rows and name in self._readers(row):
                    with self.attempt(work(volume, row), name):
                        prepare = machine.evict if row == READ_COLD else machine.warm
                        prepare(self.folder)
                        self._measure(volume, row, name, turn, do, *argument)
        machine.clear(self.folder)

    def many_arrays(self, turn: int) -> None:
        """Write many arrays in groups; open the store and read an element of one of them."""
        middle = self.sizes.arrays // 2
        calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("write_arrays", (self.sizes.arrays,)),
            ("read_one", (array_name(middle), 0, middle)),
        )
        for name in self.names(MANY_ARRAYS, turn, ARRAYS[0]):
            machine.clear(self.folder)
            for row, (do, arguments) in zip(ARRAYS, calls, strict=True):
                with self.attempt(row, name), Hosts(1, MANY_ARRAYS[name], self.folder) as process:
                    [cost] = process.call(do, *arguments)
                    self.add(row, name, turn, Cost(*cost)._asdict())
                    self.save(self.results)
        machine.clear(self.folder)

    def _reads(self, volume: Volume) -> list[tuple[str, str, tuple[Any, ...]]]:
        sizes = self.sizes
        return [
            (READ_COLD, "read_all", ()),
            (READ_ALL, "read_all", ()),
            ("boxes", "read_boxes", (volume.boxes(sizes.boxes),)),
            ("single chunks", "read_boxes", (volume.single_chunks(sizes.singles),)),
            ("elements", "read_elements", (volume.elements(sizes.elements),)),
            ("strided", "read_boxes", ([volume.strided()],)),
        ]

    def _readers(self, row: str) -> Iterable[str]:
        """Return the contenders that make this read."""
        if row in (READ_ALL, READ_COLD):
            return CONTENDERS
        without_chunks = CONTENDERS.keys() - set(RAW)
        return without_chunks if row in ("boxes", "single chunks") else without_chunks - set(RAW_CHUNKS)

    def _measure(self, volume: Volume, row: str, name: str, turn: int, do: str, *arguments: Any) -> None:
        with Hosts(1, CONTENDERS[name], self.folder, volume) as process:
            self._reserve.acquire(2 * volume.nbytes)
            self._reserve.release()
            [cost] = process.call(do, *arguments)
        self.add(work(volume, row), name, turn, Cost(*cost)._asdict())
        self.save(self.results)


def work(volume: Volume, row: str) -> str:
    """Return the name of a piece of work on a volume."""
    return f"{volume.title}: {row}"
