"""The figures of one contender, by measure and round, and how they compare with another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import isnan
from statistics import median
from typing import Any


@dataclass
class Figures:
    """The figures of one contender: fewer rounds if it is slow, and the `error` if it failed."""

    title: str = ""
    values: dict[str, dict[int, float]] = field(default_factory=dict)  # by measure and round
    error: str = ""

    def add(self, measure: str, turn: int, value: float) -> None:
        self.values.setdefault(measure, {})[turn] = value

    def of(self, measure: str) -> dict[int, float]:
        """Return the values of a measure by round; empty if it was not measured."""
        return self.values.get(measure, {})

    def median(self, measure: str) -> float:
        return median_of(self.of(measure).values())

    def ratio(self, measure: str, other: Figures, of_measure: str | None = None) -> float:
        """Return the median ratio of this figure to the other's, over the rounds that both have."""
        mine, theirs = self.of(measure), other.of(of_measure or measure)
        return median_of([mine[r] / theirs[r] for r in mine.keys() & theirs.keys() if theirs[r]])

    def beyond(self, measure: str, other: Figures) -> float:
        """Return the median difference between this figure and the other's, over the rounds that both have."""
        mine, theirs = self.of(measure), other.of(measure)
        return median_of([mine[turn] - theirs[turn] for turn in mine.keys() & theirs.keys()])

    def as_data(self) -> dict[str, Any]:
        """Return all values, and the median of each measure, for JSON."""
        return asdict(self) | {"median": {measure: or_none(self.median(measure)) for measure in self.values}}


NONE = Figures()
"""The figures of a contender that did not run."""


def fastest(figures: Mapping[str, Figures], names: Iterable[str], measure: str = "seconds") -> Figures:
    """Return the contender of these with the least median, or `NONE` if none was measured."""
    have = [figures[name] for name in names if name in figures and figures[name].of(measure)]
    return min(have, key=lambda f: f.median(measure), default=NONE)


def lead(
    figures: Mapping[str, Figures], peers: Iterable[str], measure: str = "seconds", name: str = "tstore"
) -> float:
    """Return how many times as fast as the fastest of these peers a contender is; NaN if one is absent."""
    return fastest(figures, peers, measure).ratio(measure, figures.get(name, NONE))


def faster(figures: Mapping[str, Figures], name: str, other: str, measure: str = "seconds") -> float:
    """Return how many times as fast one work is as another, the median of the rounds."""
    return figures[other].ratio(measure, figures[name])


def median_of(values: Iterable[float]) -> float:
    """Return the median, or NaN of no values."""
    some = list(values)
    return median(some) if some else float("nan")


def or_none(value: float) -> float | None:
    """Return a figure for JSON: None instead of NaN."""
    return None if isnan(value) else value
