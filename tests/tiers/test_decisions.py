"""The decision from which step a job goes on, beside an oracle that knows the true history; random, no I/O."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.support.mutation import Edit
from tstore.tiers.objects import Decision, Held, Offer, Part, Saved
from tstore.tiers.resume import decide

HISTORIES = 4_000

Disk = set[tuple[Saved, int, int]]
"""The parts on a disk: the save, the host whose part it is, and the number of hosts of the save."""


class World:
    """Disks, a durable store, and the saves that the running job rests on, oldest first."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disks: list[Disk] = [set() for _ in range(self.random.randint(1, 4))]
        self.away: list[Disk] = []
        self.durable: set[Saved] = set()
        self.lineage: list[Saved] = []
        self.decision: Decision | None = None

    def start(self) -> None:
        """Start the job on the disks that are there, and compare the decision with the oracle's."""
        number = 1 if self.decision is None else self.decision.number + 1
        offers = []
        for host, disk in enumerate(self.disks):
            held = tuple(Held(Part("job", saved, part, of), "", 0) for saved, part, of in sorted(disk))
            offers.append(Offer(host, len(self.disks), f"{host}", "", "", "", held))
        self.decision = decide(number, "", offers, self.durable, self.decision, "job")
        there: Disk = set().union(*self.disks)
        sizes = {saved: of for saved, _, of in there}
        counts = Counter(saved for saved, _, _ in there)
        whole = [s for s in self.lineage if s in self.durable or counts[s] == sizes.get(s, -1)]
        expected = whole[-1] if whole else None
        assert self.decision.saved == expected, (self.decision.saved, expected)
        held_by = sizes if self.decision.holders else {}
        assert all(self.decision.holders)
        assert len(self.decision.holders) == held_by.get(expected, 0)
        self.lineage = self.lineage[: self.lineage.index(expected) + 1] if expected else []

    def save(self) -> None:
        """Save the next step on all hosts, or on some before a crash; copy it to other hosts; push it, or not."""
        assert self.decision is not None
        last = self.lineage[-1].step if self.lineage else 0
        saved = Saved(last + self.random.randint(1, 2), self.decision.number, f"{self.random.getrandbits(40):x}")
        hosts = len(self.disks)
        complete = self.random.random() < 0.8
        for host in range(hosts):
            if complete or self.random.random() < 0.7:
                self.disks[host].add((saved, host, hosts))
                if hosts > 1 and self.random.random() < 0.6:
                    self.disks[(host + 1) % hosts].add((saved, host, hosts))
        self.lineage.append(saved)  # as far as it is whole, the job may go on from it
        if complete and self.random.random() < 0.2:
            self.durable.add(saved)

    def fail(self) -> None:
        """Lose disks, parts or hosts, or bring a disk back that was away."""
        for _ in range(self.random.randint(0, 2)):
            disk = self.random.choice(self.disks)
            match self.random.randrange(5):
                case 0:
                    disk.clear()
                case 1 if disk:
                    disk.discard(self.random.choice(sorted(disk)))
                case 2:
                    self.away.append(set(disk))
                case 3 if self.away:
                    disk |= self.random.choice(self.away)
                case 4 if self.random.random() < 0.5:
                    self.disks.append(set())
                case _ if len(self.disks) > 1 and self.random.random() < 0.3:
                    self.away.append(self.disks.pop())
        self.random.shuffle(self.disks)


def run(seeds: range) -> None:
    """Run a history for each seed."""
    for seed in seeds:
        world = World(seed)
        for _ in range(8):
            world.start()
            for _ in range(world.random.randint(0, 4)):
                world.save()
            world.fail()


def test_random_histories() -> None:
    run(range(HISTORIES))


DECIDE, COUNTS = "tstore.tiers.resume:decide", "tstore.tiers.objects:Decision.counts"
FAULTS = {
    "what was given up counts again": Edit(COUNTS, "return all", "return True or all"),
    "the decided step does not count": Edit(COUNTS, "saved.step <= limit.step", "saved.step < limit.step"),
    "only what was saved since counts": Edit(COUNTS, "limit.number > saved.epoch", "True"),
    "a save need not be covered": Edit(DECIDE, "if len(by_host) == parts[saved]", ""),
    "parts are combined by step": Edit(
        DECIDE,
        "part = held.part",
        "part = msgspec.structs.replace(held.part, saved=Saved(held.part.saved.step, 99, ''))",
    ),
    "the oldest step": Edit(DECIDE, "chosen = max(", "chosen = min("),
    "the durable store is ignored": Edit(DECIDE, "for saved in covered | durables", "for saved in covered"),
    "the durable store alone": Edit(DECIDE, "for saved in covered | durables", "for saved in durables"),
    "earlier limits are forgotten": Edit(DECIDE, "(*limits, limit)", "(limit,)"),
    "the new limit is forgotten": Edit(DECIDE, "(*limits, limit)", "tuple(limits)"),
    "a job that begins anew gives nothing up": Edit(DECIDE, "-1 if chosen is None", "1 << 40 if chosen is None"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault].apply(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run(range(HISTORIES))
