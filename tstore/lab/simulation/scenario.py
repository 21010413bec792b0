"""The parameters of a simulated run, drawn from its seed, and the store it starts from."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import random
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import tstore
import tstore.checkpoint
import tstore.core
import tstore.quantization
from tstore.core.format.layout import is_record, root_key
from tstore.core.runtime.pool import without_threads
from tstore.core.runtime.world import use_world
from tstore.lab.simulation.client import PATHS
from tstore.lab.simulation.edits import create
from tstore.lab.simulation.history import CELLS
from tstore.lab.simulation.storage import HostStorage, SharedObjects
from tstore.lab.simulation.virtual import FaultFreeHost, FaultRates, VirtualLoop

__all__ = [
    "ARCHIVES",
    "UNARCHIVED",
    "Layout",
    "Scenario",
    "import_core",
    "initial_objects",
    "override_constants",
    "prepare_initial_stores",
]

Roots = Literal["intact", "missing", "damaged", "foreign", "ahead"]
Layout = Literal["usual", "cut"]

_LAYOUTS: dict[Layout, dict[str, int]] = {
    "usual": {},
    "cut": {
        "INLINE_MANIFEST_BYTES": 300,
        "PAGE_BYTES": 300,
        "SHORT_MANIFEST": 300,
        "MIN_SEGMENTED": 1,
        "MIN_HOST_ROWS": 1,
        "SEGMENT_ROWS": 2,
        "MAX_ROWS": 1,
        "MAX_RUNS": 1,
        "MIN_SEGMENTS": 1,
    },
}
"""The constants of each layout.

"cut" stores the references of even small arrays in segments, which are merged after a few commits, and pages
the nodes.
"""

_ROOT_EVERY: dict[Layout, tuple[int, ...]] = {"usual": (8, 8, 8, 64), "cut": (2, 2, 8)}
ARCHIVES = (2, 4, 8)
"""The choices for `archive_every`, if records are archived."""
UNARCHIVED = 512
"""An `archive_every` greater than the number of records in any run, so nothing is archived."""
_INITIAL_COMMITS = {2: (0, 1, 4), 8: (0, 0, 6, 13), 64: (0, 59, 59)}
"""The choices for `initial_commits`, by `root_every`; most are so close to a root that the run writes it."""
_DAMAGED_BYTE = -32  # index of the byte in a root that is damaged


class Scenario(NamedTuple):
    """The parameters of one run."""

    layout: Layout
    """How the metadata is split into objects: see `_LAYOUTS`."""
    root_every: int
    """The number of versions from one root to the next."""
    archive_every: int
    """The number of records in an archive."""
    fan_in: int
    """The number of fragments merged at once."""
    initial_commits: int
    """The number of small commits in the store before the run, after the one that creates its arrays."""
    roots: Roots
    """The state of the last root, at a multiple of `root_every`.

    "foreign": the last root and later ones are those of another store. "ahead": the last root is intact, but roots
    of another store exist for versions beyond the newest.
    """
    strict: bool
    """Whether the storage refuses a record as long as the previous one does not exist."""
    mirrored: bool
    """Whether the store is copied to another storage, where a host may then write too."""
    cached: bool
    """Whether each host has a cache on its disk."""
    mix: Literal["all", "edits", "checkpoints", "upkeep"]
    """Which operations are frequent: see `workload`."""
    rates: FaultRates

    @classmethod
    def draw(cls, rng: random.Random, layout: Layout, archive_every: int) -> Scenario:
        """Draw the parameters of a run with a layout and archives of this length."""
        root_every = rng.choice(_ROOT_EVERY[layout])
        rates = FaultRates(
            faults=rng.choice((0, 0.01, 0.05, 0.15)),
            crashes=rng.choice((0, 0, 0.005)),
            pauses=rng.choice((0, 0.003)),
            stale_lists=rng.choice((0, 0.2)),
            stale_heads=rng.choice((0, 0, 0, 0.1)),
            jumps=rng.choice((0, 0, 0.01)),
        )
        wrong_roots: tuple[Roots, ...] = ("missing", "damaged", "foreign", "ahead")
        return cls(
            layout,
            root_every,
            archive_every,
            rng.choice((2, 100)),
            rng.choice(_INITIAL_COMMITS[root_every]),
            rng.choice(wrong_roots) if rng.random() < 0.2 else "intact",
            strict=rng.random() < 0.2,
            mirrored=rng.random() < 0.2,
            cached=rng.random() < 0.05,
            mix=rng.choice(("all", "all", "edits", "checkpoints", "upkeep")),
            rates=rates,
        )

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the protocol in this run: the arguments of `override_constants`."""
        return {
            "ARCHIVE_EVERY": self.archive_every,
            "FAN_IN": self.fan_in,
            "ROOT_EVERY": self.root_every,
            **_LAYOUTS[self.layout],
        }

    def objects(self) -> dict[str, bytes]:
        """Return the objects of the store at the start of the run."""
        objects = initial_objects(self.initial_commits, self.root_every, self.layout)
        newest = sum(key.startswith("commits/") for key in objects)
        last = newest - newest % self.root_every
        match self.roots:
            case "missing":
                objects.pop(root_key(last), None)
            case "damaged" if last:
                data = bytearray(objects[root_key(last)])
                data[_DAMAGED_BYTE] ^= 1
                objects[root_key(last)] = bytes(data)
            case "foreign" | "ahead":
                first = (last or self.root_every) if self.roots == "foreign" else last + self.root_every
                commits = 2 * self.root_every + self.initial_commits
                foreign = initial_objects(commits, self.root_every, self.layout, fork=1)
                versions = range(first, newest + 2 * self.root_every, self.root_every)
                objects |= {root_key(v): foreign[root_key(v)] for v in versions if root_key(v) in foreign}
        return objects

    def for_repair(self) -> Scenario:
        """Return the scenario for a run with a repair.

        There are no mirrors, because copies of a repaired store have diverged, and no stale listings, because a
        repair needs true ones. If records are archived, the run begins with enough old records to archive.
        """
        scenario = self._replace(mirrored=False, rates=self.rates._replace(stale_lists=0, stale_heads=0))
        if self.archive_every < UNARCHIVED:
            scenario = scenario._replace(root_every=8, initial_commits=_INITIAL_COMMITS[8][-1])
        return scenario

    def foreign_records(self) -> list[bytes]:
        """Return the records of another store."""
        objects = initial_objects(2 * self.root_every + self.initial_commits, self.root_every, self.layout, fork=1)
        return [data for key, data in objects.items() if is_record(key)]


def prepare_initial_stores() -> None:
    """Create all initial stores now; without this call, a run creates its initial store if no earlier run did."""
    for layout, choices in _ROOT_EVERY.items():
        for root_every, before in {(each, before) for each in choices for before in _INITIAL_COMMITS[each]}:
            _initial_store(before, root_every, layout, 0)
            _initial_store(2 * root_every + before, root_every, layout, 1)


def initial_objects(commits: int, root_every: int, layout: Layout, fork: int = 0) -> dict[str, bytes]:
    """Return the objects of a store with `commits` small commits after the first.

    Stores with different `fork` have different values and records.
    """
    return dict(_initial_store(commits, root_every, layout, fork))


@functools.cache
def _initial_store(commits: int, root_every: int, layout: Layout, fork: int) -> dict[str, bytes]:
    storage = SharedObjects({})

    async def make() -> None:
        host = FaultFreeHost("maker", f"maker {fork}", lambda _who, _what: None)
        with use_world(host), without_threads(host.step):
            store = await tstore.open(HostStorage(storage, host), "x")
            async with store.transaction("begin") as tx:
                for path in PATHS[::2]:
                    await create(tx, path, None)
                    if layout == "cut":  # so that each array has references in segments
                        await (await tx.array(path)).write(0)
            for number in range(commits):
                async with store.transaction("more") as tx:
                    await (await tx.array(PATHS[2]))[number % CELLS].write(-fork)

    constants = {"ROOT_EVERY": root_every, **_LAYOUTS[layout]}
    with override_constants(**constants), contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(make())
    return storage.objects


@functools.cache
def import_core() -> None:
    """Import the modules with constants: one imported during `override_constants` would keep the override."""
    for package in (tstore.core, tstore.checkpoint, tstore.quantization):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # a storage backend whose packages are not installed
                importlib.import_module(module.name)


@contextlib.contextmanager
def override_constants(**constants: float) -> Iterator[None]:
    """Replace constants, such as ROOT_EVERY=8, in all modules of tstore inside the block.

    Raise `LookupError` if no module has a constant of this name.
    """
    import_core()
    with contextlib.ExitStack() as originals:
        modules = [module for key, module in list(sys.modules.items()) if key.startswith("tstore.")]
        for name, value in constants.items():
            owners = [module for module in modules if name in vars(module)]
            if not owners:
                raise LookupError(f"no module of tstore has a constant {name}")
            for owner in owners:
                originals.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield
