"""The groups of attacks, in the order in which they run."""

from __future__ import annotations

from tests.attacks import floods, heavy_metadata, lists, metadata, random_requests, requests, scopes, stores
from tests.attacks.case import family
from tests.attacks.runner import Group

__all__ = ["NAMES", "PRELOAD", "groups"]

NAMES = ("requests", "scopes", "metadata", "floods", "stores")

PRELOAD = ["tests.attacks.honest", "tests.attacks.victim"]
"""The modules that client processes need."""

_SEEDED = 60


def groups(seed: int) -> list[Group]:
    """Return all groups; one name has two groups if its cases run in two settings, such as over TLS."""
    drawn = family(
        "random requests",
        "sends requests with parts swapped, doubled and left out",
        "no 500, and the next honest read succeeds",
        random_requests.send,
        [(str(n), n) for n in range(seed * _SEEDED, (seed + 1) * _SEEDED)],
    )
    return [
        Group("requests", [*requests.CASES, *drawn], lambda harness: harness.target, bare=True, each=0.15),
        Group("requests", requests.CASES, lambda harness: harness.target, bare=True, tls=True, each=0.15),
        Group("scopes", scopes.CASES, lambda harness: harness),
        Group("metadata", metadata.CASES, lambda harness: harness),
        Group("floods", [*lists.CASES, *floods.PLAIN, *heavy_metadata.CASES], lambda harness: harness, each=20),
        Group("floods", floods.TLS, lambda harness: harness, tls=True, each=20),
        Group("stores", stores.CASES, lambda harness: harness, together=12, each=20),
        Group("stores", stores.HEAVY, lambda harness: harness, together=2, each=20),
    ]
