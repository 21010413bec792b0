"""Statistics without those that an earlier test left in the cache."""

from __future__ import annotations

import pytest

from tstore.service.statistics.results import RESULTS


@pytest.fixture(autouse=True)
def _without_earlier_results() -> None:
    RESULTS.clear()
