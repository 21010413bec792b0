"""Faults put into the protocol on purpose that a test finds where the simulation does not (`test_simulation.py`).

    fault                                        is found by
    ------------------------------------------   --------------------------------------------------------------
    no fsync before the link                     test_power.py: a power failure at any moment
    no fsync of the folder after the link        test_power.py: a power failure at any moment
    a commit on one that is not durable          test_durability.py: what it is built on is made durable
    gc deletes before its record stands          test_collect.py: nothing is deleted before the record stands
    condemned packs are re-used                  test_collect.py: what was condemned is refused
    a version that expired is opened             test_collect.py: an expired version says so
    what a resize cut off comes back             test_transaction.py: what a resize cut off
    a dropped tag meets none that is set         test_transaction.py: dropped tags conflict
    checksums are not compared                   test_corruption.py: a flipped bit
    a chunk of no host passes                    test_group.py: a chunk of no host is refused
    a chunk of two hosts passes                  test_group.py: a chunk of two hosts is refused
    a second fragment of one host passes         test_group.py: the same host twice is refused
    only the first host's deletions count        test_group.py: what any host deletes is gone
    a fragment delivered again may be lost       test_durability.py: a fragment that is delivered again
    a host that waits trusts the record's name   test_durability.py: a host that waits makes it durable
    finish trusts the name of a record           test_durability.py: a commit that exists is durable
    a repeated save trusts the record's name     test_durability.py: a commit that exists is durable
    dropped tags go out in a group commit        test_contention.py: tags that are dropped go alone
    metrics go out in a group commit             test_contention.py: retention sees each step
    retention sees the first step tag alone      test_contention.py: retention sees each of several steps
    an expired version in between is skipped     test_reapply.py: an expired version in between loses no update
    what is patched again is not made durable    test_reapply.py: what was patched again is there
    hosts that delete and write are not compared test_group.py: hosts that stand in each other's way
    save re-uses again after SourceCondemned     test_collect.py: a save that writes anew re-uses nothing
    a commit waits for no operation              test_operations.py: a commit waits for the writes under way
    handles from before a change pass            test_operations.py: a handle from before a resize is misuse
    a part may change what it does not name      test_lossy_parts.py: a value that would wipe out the others

Each is put in for one run of its test, which must fail.
"""

from __future__ import annotations

import pytest

from tests.support.mutation import Edit

NEWFILE, APPEND, TREE = (
    "tstore.storage.local.atomic_file:StagedFile.",
    "tstore.log.log:Append.",
    "tstore.format.tree:Changes.",
)
QUEUE = "tstore.log.group_commit:QueuedCommit."
COOPERATIVE, STAGING = (
    "tstore.transactions.cooperative:CooperativeCommit.",
    "tstore.transactions.staging:Staging.",
)
POWER = "guarantees/test_power.py::test_a_power_failure_at_any_moment[small]"

FOUND: dict[str, tuple[str, Edit]] = {
    "no fsync before the link": (
        POWER,
        Edit(NEWFILE + "force", "os.fsync(self.fd)", "pass"),
    ),
    "no fsync of the folder after the link": (
        POWER,
        Edit(NEWFILE + "publish", "fsync_folder(os.path.dirname(os.path.abspath(path)))", "pass"),
    ),
    "a commit on one that is not durable": (
        "guarantees/test_durability.py::test_a_durable_commit_makes_durable_what_it_is_built_on",
        Edit(APPEND + "_create", "await self._log.storage.sync()", "pass"),
    ),
    "gc deletes before its record stands": (
        "maintenance/test_collect.py::test_nothing_is_deleted_before_the_record_stands",
        Edit(
            "tstore.maintenance.gc:collect",
            "version = await uncancelled(_append(log, plan, transaction))",
            "await _delete(log, plan.collection()); version = await uncancelled(_append(log, plan, transaction))",
        ),
    ),
    "condemned packs are re-used": (
        "maintenance/test_collect.py::test_a_commit_that_re_uses_what_was_condemned_is_refused",
        Edit("tstore.format.retention:check_condemned", "if removed:", "if False:"),
    ),
    "a version that expired is opened": (
        "maintenance/test_collect.py::test_an_expired_version_says_so",
        Edit("tstore.log.expiry:check_alive", "state not in alive", "False"),
    ),
    "what a resize cut off comes back": (
        "transactions/test_transaction.py::test_what_a_resize_cut_off_does_not_come_back",
        Edit("tstore.transactions.staged_array:StagedArray.reshape", "if n < had and n % chunk:", "if False:"),
    ),
    "a dropped tag meets none that is set": (
        "transactions/test_transaction.py::test_dropped_tags_conflict",
        Edit(TREE + "overlap", "for t in self.dropped if t in other.tags", "for t in ()"),
    ),
    "checksums are not compared": (
        "guarantees/test_corruption.py::test_every_flipped_byte_is_found",
        Edit("tstore.data.pieces:ChunkPiece.deliver", "if block_checks(data.data) != self.checks:", "if False:"),
    ),
    "a chunk of no host passes": (
        "transactions/test_group.py::test_a_chunk_of_no_host_is_refused",
        Edit("tstore.transactions.fragments:check_complete", "if incomplete:", "if False:"),
    ),
    "a chunk of two hosts passes": (
        "transactions/test_group.py::test_a_chunk_of_two_hosts_is_refused",
        Edit("tstore.transactions.fragments:_check_once", "if twice:", "if False:"),
    ),
    "a second fragment of one host passes": (
        "transactions/test_group.py::test_the_same_host_twice_is_refused_unless_it_says_the_same",
        Edit(COOPERATIVE + "_deliver", "await self._storage.get(key) == data", "True"),
    ),
    "only the first host's deletions count": (
        "transactions/test_group.py::test_what_any_host_deletes_is_gone",
        Edit(
            "tstore.transactions.fragments:merged",
            "deleted=tuple(dict.fromkeys(d for f in fragments for d in f.deleted))",
            "deleted=first.deleted",
        ),
    ),
    "a fragment delivered again may be lost": (
        "guarantees/test_durability.py::test_a_fragment_that_is_delivered_again_is_made_durable",
        Edit(
            COOPERATIVE + "_deliver",
            "await self._storage.flush(self.member.folder, self.durability)",
            "pass",
        ),
    ),
    "a host that waits trusts the record's name": (
        "guarantees/test_durability.py::test_a_host_that_waits_makes_the_name_of_the_record_durable",
        Edit(
            "tstore.transactions.cooperative:_Waiter.wait",
            "await self._commit.log.make_durable(version, self._commit.durability)",
            "pass",
        ),
    ),
    "finish trusts the name of a record": (
        "guarantees/test_durability.py::test_a_commit_that_exists_is_durable_before_it_is_told_again",
        Edit(
            COOPERATIVE + "finish",
            "await self.log.make_durable(version, Durability.FSYNC if fragment.durable else Durability.NONE)",
            "pass",
        ),
    ),
    "a repeated save trusts the record's name": (
        "guarantees/test_durability.py::test_a_commit_that_exists_is_durable_before_it_is_told_again",
        Edit("tstore.checkpoint.save:_saved_already", "await store.log.make_durable(version, durability)", "pass"),
    ),
    "dropped tags go out in a group commit": (
        "guarantees/test_contention.py::test_tags_that_are_dropped_go_alone",
        Edit(QUEUE + "__init__", "or changes.dropped", ""),
    ),
    "metrics go out in a group commit": (
        "guarantees/test_contention.py::test_retention_sees_each_step_that_was_committed_with_others",
        Edit(QUEUE + "__init__", 'or "metrics" in record.metadata', ""),
    ),
    "retention sees the first step tag alone": (
        "guarantees/test_contention.py::test_retention_sees_each_of_several_steps_of_one_version",
        Edit(
            "tstore.format.retention:Keep.chosen", "for tag in a.tags if (step", "for tag in a.tags[:1] if (step"
        ),
    ),
    "an expired version in between is skipped": (
        "transactions/test_reapply.py::test_an_expired_version_in_between_loses_no_update",
        Edit(
            STAGING + "validate",
            "version = newer[-1][0]",
            "version = newer[0][0]",
        ),
    ),
    "what is patched again is not made durable": (
        "transactions/test_reapply.py::test_what_was_patched_again_is_there_once_the_commit_is",
        Edit(STAGING + "validate", "await self._packs.flush()", "pass"),
    ),
    "hosts that delete and write are not compared": (
        "transactions/test_group.py::test_hosts_that_stand_in_each_others_way_are_refused",
        Edit("tstore.transactions.fragments:_check_paths", "if colliding:", "if False:"),
    ),
    "save re-uses again after SourceCondemned": (
        "maintenance/test_collect.py::test_a_save_that_writes_anew_re_uses_nothing_again",
        Edit("tstore.checkpoint.save:save", "_nothing)", "_newest_step)"),
    ),
    "a commit waits for no operation": (
        "transactions/test_operations.py::test_a_commit_waits_for_the_writes_under_way",
        Edit("tstore.transactions.lifecycle:Lifecycle.idle", "while self._under_way:", "while False:"),
    ),
    "handles from before a change pass": (
        "transactions/test_operations.py::test_a_handle_from_before_a_resize_is_misuse",
        Edit("tstore.transactions.staged_tree:StagedTree.check_handle", "if now is not meta and", "if False and"),
    ),
    "a part may change what it does not name": (
        "data/test_lossy_parts.py::test_a_value_that_would_wipe_out_the_others_is_refused",
        Edit("tstore.transactions.staged_array:StagedArray._check_kept", "if count:", "if False:"),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found_by_its_test(
    name: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    node, fault = FOUND[name]
    fault.apply(monkeypatch)
    options = ["-x", "-q", "--no-header", "--rootdir", str(pytestconfig.rootpath), "-o", "timeout=0"]
    code = pytest.main([*options, str(pytestconfig.rootpath / "tests" / node)])
    assert code == pytest.ExitCode.TESTS_FAILED, capsys.readouterr().out


def test_the_table_above_lists_the_faults() -> None:
    assert __doc__ is not None
    rows = [line[4:48].strip() for line in __doc__.splitlines() if line.startswith("    ")]
    assert rows[2:] == list(FOUND)
