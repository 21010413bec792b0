"""zarr-python's state machines compare a `ZarrStore` with models, over random operations."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine

import tstore.sync
from tstore.zarr import ZarrStore

SETTINGS = settings(
    settings(),
    max_examples=settings().max_examples // 2,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def new_store() -> ZarrStore:
    return ZarrStore(tstore.sync.open(f"memory://{uuid.uuid4()}").transaction())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("machine", [ZarrStoreStateMachine, ZarrHierarchyStateMachine])
def test_a_transaction_behaves_as_the_model(machine: type[ZarrStoreStateMachine]) -> None:
    run_state_machine_as_test(lambda: machine(new_store()), settings=SETTINGS)
