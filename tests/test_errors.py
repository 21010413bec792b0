"""Errors as they leave a process: `multiprocessing` and `torch.distributed` pickle them."""

from __future__ import annotations

import copy
import pickle

import pytest

from tstore import errors

ERRORS = [
    errors.Conflict("a conflict", ["a", "b"]),
    errors.SourceCondemned("a conflict", []),
    errors.Inconsistent("hosts disagree", ["a"]),
    errors.StructureMismatch("a store at version 1", ["a"], ["b"], ["c: stored int8[1], target int8[2]"], ["x"]),
    errors.Throttled("slow down", 2.5),
    errors.DeadlineExceeded("too late", [3, 4]),
    errors.CommitOutcomeUnknown("unknown", "the id"),
    errors.NotAStore("nothing here"),
    errors.InvalidArgument("a wrong argument"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_pickled_and_copied(error: errors.TStoreError) -> None:
    error.add_note("a note")
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
