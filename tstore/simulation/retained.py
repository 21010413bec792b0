"""Checks that garbage collection expired exactly the versions that its retention rule does not keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tstore.format.records import Record
from tstore.format.retention import Keep
from tstore.simulation.history import Attempt, History

__all__ = ["retained", "retention_faults"]


class _Committed(Protocol):
    @property
    def record(self) -> Record:
        """The record of a version."""


def retained(
    keep: Keep, alive: set[int], tags: Mapping[str, int], metrics: Mapping[int, Mapping[str, float]]
) -> set[int]:
    """Return the live versions that a rule without a time keeps; the newest version and step are always kept."""
    steps = {int(tag[5:]): v for tag, v in tags.items() if tag.startswith("step/") and v in alive}
    order = sorted(steps)
    kept = {max(alive), *(steps[s] for s in order[-1:])}
    if keep.last is not None:
        kept |= {steps[s] for s in order[-keep.last :]}
    if keep.every is not None:
        kept |= {steps[s] for s in order if s % keep.every == 0}
    if keep.best is not None:
        count, name, *direction = keep.best
        sign = -1 if direction == ["max"] else 1
        rated = {v: metrics[v][name] for v in steps.values() if name in metrics.get(v, {})}
        kept |= set(sorted(rated, key=lambda v: (sign * rated[v], -v))[:count])
    kept |= {v for tag in keep.tags if (v := tags.get(tag, 0)) in alive}
    return kept


def retention_faults(
    log: Mapping[int, _Committed],
    attempts: Mapping[int, Sequence[Attempt]],
    tags: Mapping[int, Mapping[str, int]],
    history: History,
) -> list[str]:
    """Return one sentence for each gc that expired other versions than its rule demands."""
    rules = {each.version: each.keep for each in history.collected}
    alive_as_of = {history.start: set(range(1, history.start + 1))}
    metrics: dict[int, Mapping[str, float]] = {}
    faults = []
    for version, commit in log.items():
        alive = set(alive_as_of[version - 1])
        collection = commit.record.collection
        if collection is None:
            alive |= set() if commit.record.void else {version}
            metrics[version] = {k: v for a in attempts[version] for k, v in a.metadata.get("metrics", {}).items()}
        else:
            alive -= set(collection.expired)
            keep, base = rules.get(version), commit.record.base
            if keep is not None and keep.newer_than is None and base >= history.start:
                expected = alive_as_of[base] - retained(keep, alive_as_of[base], tags[base], metrics)
                if set(collection.expired) != expected:
                    faults.append(
                        f"version {version} expired {sorted(collection.expired)} by {keep}, "
                        f"expected {sorted(expected)}"
                    )
        alive_as_of[version] = alive
    return faults
