"""The figures of one contender, by measure and round, and how they compare with another's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isnan
from statistics import median
from typing import Any


@dataclass
class Figures:
    """The figures of one contender: fewer rounds if it is slow, and the `error` if it failed."""

    title: str
    values: dict[str, dict[int, float]] = field(default_factory=dict)  # by measure and round
    error: str = ""

    def add(self, measure: str, turn: int, value: float) -> None:
        self.values.setdefault(measure, {})[turn] = value

    def of(self, measure: str) -> dict[int, float]:
        """Return the values of a measure by round; empty if it was not measured."""
        return self.values.get(measure, {})

    def median(self, measure: str) -> float:
        values = self.of(measure).values()
        return median(values) if values else float("nan")

    def ratio(self, measure: str, other: Figures, of_measure: str | None = None) -> float:
        """Return the median ratio of this figure to the other's, over the rounds that both have."""
        mine, theirs = self.of(measure), other.of(of_measure or measure)
        pairs = [mine[r] / theirs[r] for r in mine.keys() & theirs.keys() if theirs[r]]
        return median(pairs) if pairs else float("nan")

    def beyond(self, measure: str, other: Figures) -> float:
        """Return the median difference between this figure and the other's, over the rounds that both have."""
        mine, theirs = self.of(measure), other.of(measure)
        differences = [mine[turn] - theirs[turn] for turn in mine.keys() & theirs.keys()]
        return median(differences) if differences else float("nan")

    def as_data(self) -> dict[str, Any]:
        """Return all values, and the median of each measure, for JSON."""
        return asdict(self) | {"median": {measure: or_none(self.median(measure)) for measure in self.values}}


def or_none(value: float) -> float | None:
    """Return a figure for JSON: None instead of NaN."""
    return None if isnan(value) else value
