"""The groups of attacks, in the order in which they run."""

from __future__ import annotations

from tests.attacks import floods, lists, metadata, requests, scopes, seeded, stores
from tests.attacks.case import family
from tests.attacks.judge import Group

__all__ = ["NAMES", "PRELOAD", "groups"]

NAMES = ("requests", "scopes", "metadata", "floods", "stores")

PRELOAD = ["tests.attacks.honest", "tests.attacks.victim"]
"""What clients in processes of their own need."""

_SEEDED = 60


def groups(seed: int) -> list[Group]:
    """Return all groups; those that go on elsewhere, as over TLS, have the same name."""
    drawn = family(
        "seeded",
        "sends requests of which parts were swapped, doubled and left out",
        "no 500, and an honest reader is answered next",
        seeded.fuzzed,
        [(str(n), n) for n in range(seed * _SEEDED, (seed + 1) * _SEEDED)],
    )
    return [
        Group("requests", [*requests.CASES, *drawn], lambda stage: stage.target, bare=True, each=0.15),
        Group("requests", requests.CASES, lambda stage: stage.target, bare=True, tls=True, each=0.15),
        Group("scopes", scopes.CASES, lambda stage: stage),
        Group("metadata", metadata.CASES, lambda stage: stage),
        Group("floods", [*lists.CASES, *floods.PLAIN], lambda stage: stage, each=20),
        Group("floods", floods.TLS, lambda stage: stage, tls=True, each=20),
        Group("stores", stores.CASES, lambda stage: stage, together=12, each=20),
    ]
