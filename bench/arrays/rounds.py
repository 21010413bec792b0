"""The measurements of `bench.arrays`, in interleaved rounds of all contenders.

Each contender runs in a new process for each round. Not measured are: importing the library, making the volume,
emptying the folder and syncing the disk. What is read is in the page cache, since it has just been written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench import machine
from bench.arrays.peers import CONTENDERS
from bench.arrays.volume import Layout
from bench.figures import Figures
from bench.processes import HostError, Hosts
from bench.scale.cost import Cost
from bench.scale.peers import CONTENDERS as SCALE

WRITES = {"write all": True, "write all, not durable": False}
READS = {
    "read all": "read_all",
    "boxes": "read_boxes",
    "single chunks": "read_singles",
    "elements at once": "read_elements",
    "strided": "read_strided",
}
OPEN = "open a store of {:,} arrays, read one"

Results = dict[str, dict[str, Figures]]
"""The figures by piece of work and contender; the measures are the fields of `Cost`."""


class Bench:
    """Runs the rows of layouts in a folder; `share` of all small reads."""

    def __init__(
        self, folder: Path, names: Sequence[str], rows: Sequence[str], share: float, log: Callable[[str], None]
    ):
        self.folder, self.names, self.rows, self.share, self.log = folder, names, rows, share, log
        self.results: Results = {}
        self._reserve = machine.Reserve()

    def volume(self, layout: Layout, turn: int) -> None:
        """Write and read a volume."""
        for name in self._in_order(turn):
            self.log(f"{layout.title}: {name}")
            try:
                with Hosts(1, CONTENDERS[name], self.folder, layout, self.share) as process:
                    self._rows(process, layout, name, turn)
            except (HostError, RuntimeError) as error:
                self._note(f"{layout.title}: write all", name, error)

    def _rows(self, process: Hosts, layout: Layout, name: str, turn: int) -> None:
        for row, durable in WRITES.items():
            if row in self.rows and (CONTENDERS[name].durable or not durable):
                machine.clear(self.folder)
                self._provide(2 * layout.nbytes)
                self._add(f"{layout.title}: {row}", name, turn, process.call("write_all", durable)[0])
        if not any(self.folder.iterdir()):
            process.call("write_all", False)
        self._provide(layout.nbytes)
        for row, do in READS.items():
            if row in self.rows and (name != "raw" or row == "read all"):
                self._add(f"{layout.title}: {row}", name, turn, process.call(do)[0])

    def many_arrays(self, count: int, turn: int) -> None:
        """Open a store of many arrays in groups, and read an element of one."""
        row = OPEN.format(count)
        for name in [name for name in self._in_order(turn) if name in SCALE]:
            self.log(f"{row}: {name}")
            machine.clear(self.folder)
            try:
                with Hosts(1, SCALE[name], self.folder) as process:
                    process.call("write_arrays", count)
                with Hosts(1, SCALE[name], self.folder) as process:
                    middle = count // 2
                    path = f"group{middle // 10:06}/array{middle % 10}"
                    self._add(row, name, turn, process.call("read_one", path, 0, middle)[0])
            except (HostError, RuntimeError) as error:
                self._note(row, name, error)

    def _provide(self, nbytes: int) -> None:
        """Make the machine have free memory: see `machine.Reserve`."""
        self._reserve.acquire(nbytes)
        self._reserve.release()

    def _in_order(self, turn: int) -> list[str]:
        names = [name for name in self.names if not self._failed(name)]
        return [*names[turn % len(names) :], *names[: turn % len(names)]] if names else []

    def _failed(self, name: str) -> bool:
        return any(name in figures and figures[name].error for figures in self.results.values())

    def _figures(self, row: str, name: str) -> Figures:
        return self.results.setdefault(row, {}).setdefault(name, Figures(CONTENDERS[name].title))

    def _note(self, row: str, name: str, error: Exception) -> None:
        absent = "ModuleNotFoundError" in str(error)
        self._figures(row, name).error = f"{'absent' if absent else 'failed'}: {error}"
        self.log(f"{row}: {name}: {error}")

    def _add(self, row: str, name: str, turn: int, cost: Cost) -> None:
        for measure, value in Cost(*cost)._asdict().items():
            self._figures(row, name).add(measure, turn, value)
