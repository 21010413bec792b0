"""Fixtures: a test with `level` runs on every kernel level of this machine, including the reference."""

from collections.abc import Iterator

import exmy
import pytest

ALL_FORMATS = [f for bits in range(2, 17) for f in exmy.formats(bits)]


@pytest.fixture(params=exmy.kernels.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with exmy.kernels.use(request.param):
        yield request.param


@pytest.fixture(params=[name for name in exmy.kernels.levels() if name != "reference"])
def native(request: pytest.FixtureRequest) -> Iterator[str]:
    with exmy.kernels.use(request.param):
        yield request.param


@pytest.fixture(scope="session")
def all_formats() -> list[exmy.Format]:
    return ALL_FORMATS
