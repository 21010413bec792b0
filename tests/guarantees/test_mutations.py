"""Faults put into the protocol on purpose that the simulation (`test_simulation.py`) detects seldom or never.

`MUTATIONS` has each fault with the test that detects it.
"""

from __future__ import annotations

import importlib

import pytest
from _pytest.runner import runtestprotocol

from tests.support.mutation import Edit

NEWFILE, APPEND, TREE = (
    "tstore.core.storage.local.atomic_file:StagedFile.",
    "tstore.core.log.log:Append.",
    "tstore.core.format.tree.changes:Changes.",
)
QUEUE = "tstore.core.log.group_commit:QueuedCommit."
COOPERATIVE, EXCLUSION, STAGING = (
    "tstore.core.transactions.cooperative:CooperativeCommit.",
    "tstore.core.transactions.conflicts:Exclusion.",
    "tstore.core.transactions.staging:Staging.",
)
BEGUN = "transactions/test_begun_again.py::"
DECISION, WITHDRAWAL = "tstore.core.transactions.decision:Decision.", "transactions/test_withdrawal.py::"
ADMISSION, RECORDS = "tstore.service.server.admission:Admission.", "attacks/test_server_records.py::"
COMMITS = "tstore.core.log.commits:CommitObjects."
CHAIN = "tstore.core.log.records:Chain."
CHUNKS = "tstore.service.server.chunk_checks:ChunkChecks."
POISONED = "attacks/test_poisoned_chunks.py::"
PLUGINS = "pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin", "_hypothesis_pytestplugin"
REPAIRS = "maintenance/test_repair_dependents.py::"
ROOTS = "maintenance/test_repair_roots.py::"
REPLAY = "tstore.core.maintenance.replay:Replay."
PLAN, PLANS = "tstore.core.maintenance.repair_plan:RepairPlan.", "maintenance/test_repair_plan.py::"
ENCODED, CONFLICTS = "tstore.core.transactions.encoded:", "tstore.core.transactions.conflicts:"
ARRAY = "tstore.core.transactions.staged_array:StagedArray."
COPIES = "checkpoint/test_rollback.py::test_the_copies_of_a_step_that_is_removed_or_saved_again_lose_their_tags"
POWER = "guarantees/test_power.py::test_a_power_failure_at_any_moment[small]"

MUTATIONS: dict[str, tuple[str, Edit]] = {
    "no fsync before the link": (POWER, Edit(NEWFILE + "sync", "os.fsync(self.fd)", "pass")),
    "no fsync of the folder after the link": (POWER, Edit(NEWFILE + "publish", "fsync_folder(folder)", "pass")),
    "a commit does not sync what it is based on": (
        "guarantees/test_durability.py::test_a_durable_commit_syncs_the_data_it_references",
        Edit(APPEND + "_create", "await self._log.storage.sync()", "pass"),
    ),
    "a copied record appears before it is synced": (
        "guarantees/test_power.py::test_a_power_failure_after_a_commit_above_two_concurrent_copies",
        Edit(
            "tstore.core.copying.destination:Destination.create_records",
            "await together(lambda version: staged[version].write(commit_key(version)), staged)",
            "pass",
        ),
    ),
    "a void record outlives the commit below it": (
        "guarantees/test_durability.py::test_a_void_record_is_as_durable_as_the_commit",
        Edit(APPEND + "_decide", "link), self._durability", "link), Durability.FSYNC"),
    ),
    "gc deletes before its record exists": (
        "maintenance/test_collect.py::test_nothing_is_deleted_before_the_record_exists",
        Edit(
            "tstore.core.maintenance.gc:_commit",
            "return await run_to_end",
            "await _delete(log.reader, None, plan.collection(), plan.listed); return await run_to_end",
        ),
    ),
    "condemned packs are reused": (
        "maintenance/test_collect.py::test_a_commit_that_reuses_condemned_packs_is_refused",
        Edit("tstore.core.format.tree.retention:refuse_condemned", "if removed:", "if False:"),
    ),
    "an expired version can be opened": (
        "maintenance/test_collect.py::test_an_expired_version_is_reported_as_expired",
        Edit("tstore.core.log.expiry:check_alive", "changed not in alive", "False"),
    ),
    "values cut off by a resize come back": (
        "transactions/test_transaction.py::test_values_cut_off_by_a_resize_do_not_come_back",
        Edit("tstore.core.format.tree.node:shrinking_axes", "if length < former and length % chunk", "if False"),
    ),
    "an append passes over a resize": (
        "transactions/test_append.py::test_what_conflicts",
        Edit(TREE + "overlap", "(theirs.extends or not theirs.replaces_node)", "True"),
    ),
    "moved values are encoded from rounded ones": (
        "transactions/test_append.py::test_a_lossy_codec_encodes_the_original_values",
        Edit("tstore.core.transactions.appends:moved", "elif extension.kept:", "elif False:"),
    ),
    "a region is that of the base": (
        "transactions/test_append.py::test_an_append_at_the_end_of_a_chunk_moves_no_bytes",
        Edit("tstore.core.transactions.appends:moved", "extension.start = start", "pass"),
    ),
    "a compaction hides rows written since its base": (
        "transactions/test_compactions.py::test_a_compaction_replaces_all_rows_but_those_written_meanwhile",
        Edit(
            "tstore.core.format.objects.compactions:Compaction.without",
            "np.setdiff1d(self.numbers, numbers, assume_unique=True)",
            "self.numbers",
        ),
    ),
    "a compaction hides segments written since": (
        "transactions/test_compactions.py::test_segments_written_since_the_base_drop_the_compaction",
        Edit(
            "tstore.core.transactions.staged_array:StagedArray.revise_compaction",
            "newer.replaces_node or newer.has_segments",
            "newer.replaces_node",
        ),
    ),
    "a compaction restates rows that were replaced": (
        "transactions/test_compactions.py::test_a_row_below_newer_segments_is_not_restated",
        Edit(
            "tstore.core.format.objects.compactions:CompactionPlan.rows",
            "in segments_first(self.tables)",
            "in self.tables",
        ),
    ),
    "a compaction fails a commit": (
        "transactions/test_compactions.py::test_a_collected_chunk_that_only_a_compaction_needs_does_not_fail_the_commit",
        Edit(
            "tstore.core.transactions.staged_tree:StagedTree.drop_compactions", "array.compaction = None", "pass"
        ),
    ),
    "compactions are accepted unchecked": (
        "transactions/test_compactions.py::test_a_compaction_that_changes_chunks_is_noticed",
        Edit("tstore.core.format.tree.validation:check_compactions", "if differs:", "if False:"),
    ),
    "dropping and setting a tag do not conflict": (
        "transactions/test_transaction.py::test_dropped_tags_conflict",
        Edit(TREE + "overlap", "for t in self.dropped if t in other.tags", "for t in ()"),
    ),
    "checksums are not compared": (
        "guarantees/test_corruption.py::test_every_flipped_byte_is_detected",
        Edit(
            "tstore.core.data.pieces:ChunkPiece.verify", "if checks != self.checks[", "if False and self.checks["
        ),
    ),
    "a chunk that no host wrote passes": (
        "transactions/test_group.py::test_a_chunk_that_no_host_wrote_is_refused",
        Edit("tstore.core.transactions.fragments:check_complete", "if incomplete:", "if False:"),
    ),
    "a chunk that two hosts wrote passes": (
        "transactions/test_group.py::test_a_chunk_that_two_hosts_wrote_is_refused",
        Edit("tstore.core.transactions.fragments:_check_once", "if twice:", "if False:"),
    ),
    "a second fragment of a host passes": (
        "transactions/test_group.py::test_a_second_different_fragment_of_a_host_is_refused",
        Edit(COOPERATIVE + "_delivered", "if not same:", "if False:"),
    ),
    "a withdrawn transaction is committed": (
        WITHDRAWAL + "test_a_withdrawal_overtakes_the_claim_of_finish",
        Edit(DECISION + "commit", "self._check(existing)", "pass"),
    ),
    "others commit without the decision": (
        WITHDRAWAL + "test_finish_decides_before_it_commits",
        Edit(COOPERATIVE + "take_over", "await self.fragments.decision.commit()", "pass"),
    ),
    "a commit that was decided is withdrawn": (
        WITHDRAWAL + "test_a_host_that_gives_up_after_another_claimed_does_not_withdraw",
        Edit(COOPERATIVE + "withdraw", "elif not withdrawn:", "elif False:"),
    ),
    "a withdrawal is lost in a power failure": (
        WITHDRAWAL + "test_a_withdrawal_is_durable",
        Edit(DECISION + "withdraw", "claim, self._durability)", "claim, Durability.NONE)"),
    ),
    "only the first host's deletions apply": (
        "transactions/test_group.py::test_deletions_of_every_host_are_applied",
        Edit(
            "tstore.core.transactions.fragments:merge",
            "deleted=tuple(dict.fromkeys(d for f in fragments for d in f.deleted))",
            "deleted=first.deleted",
        ),
    ),
    "blocks of hosts are not compared": (
        "transactions/test_group.py::test_values_that_some_hosts_lack_are_compared_between_blocks[known2-True]",
        Edit(
            "tstore.core.transactions.fragments:merge",
            "replicated=dict(itertools.islice(replicated.items(), MAX_TAGS_SET))",
            "replicated=first.replicated",
        ),
    ),
    "a condemned transaction begins again": (
        BEGUN + "test_hosts_are_told_at_once_and_another_attempt_is_committed[manifest*-2]",
        Edit(COOPERATIVE + "_create_fragment", "await self.exclusion.check_begun_again(fragment.base)", "pass"),
    ),
    "hosts are told what an earlier use became": (
        BEGUN + "test_a_host_of_the_first_use_that_wakes_up_is_told_its_version_and_the_others_are_not",
        Edit(COOPERATIVE + "append", "if version <= base:", "if False:"),
    ),
    "a host commits a later use of its id": (
        BEGUN + "test_a_host_of_the_first_use_that_helps_does_not_commit_the_second",
        Edit(COOPERATIVE + "append", "base=min(merged.base, base)", "base=merged.base"),
    ),
    "manifests of two uses of an id have one key": (
        BEGUN + "test_an_older_collection_that_stands_still_removes_nothing_that_is_committed[manifest*]",
        Edit(COOPERATIVE + "_write_manifest", "/manifest-{base}", "/manifest"),
    ),
    "single objects of an earlier use are ignored": (
        BEGUN + "test_an_expired_version_whose_packs_are_needed_is_told_too",
        Edit(EXCLUSION + "check_begun_again", "*map(owner_of, collection.objects)", ""),
    ),
    "the outcome is that of an earlier use": (
        BEGUN + "test_the_id_is_committed_once_more_and_the_store_is_valid",
        Edit("tstore.core.store:Store.outcome", "await base_of(self.log.reader, transaction)", "0"),
    ),
    "a redelivered fragment is not synced": (
        "guarantees/test_durability.py::test_a_redelivered_fragment_is_made_durable",
        Edit("tstore.core.storage.local.store:LocalStorage._create", "sync_existing(path)", "pass"),
    ),
    "a waiting host does not sync the record": (
        "guarantees/test_durability.py::test_a_waiting_host_syncs_the_name_of_the_record",
        Edit(
            "tstore.core.transactions.cooperative:_Waiter.wait",
            "await self._commit.log.make_durable(version, self._commit.durability)",
            "pass",
        ),
    ),
    "finish does not sync an existing record": (
        "guarantees/test_durability.py::test_an_existing_commit_is_synced_before_its_report",
        Edit(
            COOPERATIVE + "finish",
            "await self.log.make_durable(version, Durability.FSYNC if fragment.durable else Durability.NONE)",
            "pass",
        ),
    ),
    "a repeated save does not sync the record": (
        "guarantees/test_durability.py::test_an_existing_commit_is_synced_before_its_report",
        Edit(
            "tstore.checkpoint.checkpoint:Checkpoint._confirm_repeated",
            "await store.log.make_durable(version, checked_durability(self.settings.durability))",
            "pass",
        ),
    ),
    "dropped tags join a group commit": (
        "guarantees/test_contention.py::test_dropped_tags_never_share_a_record",
        Edit(QUEUE + "__init__", "or changes.dropped", ""),
    ),
    "tags of other versions join a group commit": (
        "guarantees/test_contention.py::test_tags_of_earlier_versions_never_share_a_record",
        Edit(QUEUE + "__init__", "or record.tagged ", ""),
    ),
    "conflicting commits join a group commit": (
        "guarantees/test_contention.py::test_conflicting_commits_do_not_share_a_record[local]",
        Edit(
            "tstore.core.log.group_commit:QueuedCommit.may_share_with",
            "return self._few_chunks.isdisjoint(other._few_chunks)",
            "return True",
        ),
    ),
    "two creations join a group commit": (
        "guarantees/test_contention.py::test_conflicting_changes_of_metadata_do_not_share_a_record[local]",
        Edit(TREE + "few_chunks", "n.replaces_node or ", ""),
    ),
    "copies of removed steps keep their tags": (
        COPIES,
        Edit("tstore.core.tags:remove_steps", "step_tags(tags, step)]", "step_tags(tags, step)[:1]]"),
    ),
    "copies of an overwritten step keep their tags": (
        COPIES,
        Edit(
            "tstore.checkpoint.checkpoint:Checkpoint._transaction",
            "(step_tags(tags, self.step)[1:] or None)",
            "None",
        ),
    ),
    "metrics join a group commit": (
        "guarantees/test_contention.py::test_retention_sees_every_step_of_a_group_commit",
        Edit(QUEUE + "__init__", 'or "metrics" in record.metadata', ""),
    ),
    "retention sees only the first step tag": (
        "guarantees/test_contention.py::test_retention_sees_every_step_tag_of_one_version",
        Edit(
            "tstore.core.format.tree.retention:Keep.select", "for tag in entry.tags)", "for tag in entry.tags[:1])"
        ),
    ),
    "an expired intermediate version is skipped": (
        "transactions/test_reapply.py::test_an_expired_intermediate_version_loses_no_update",
        Edit("tstore.core.transactions.conflicts:reapply", "version = newer[-1][0]", "version = newer[0][0]"),
    ),
    "reapplied chunks are not synced": (
        "transactions/test_reapply.py::test_reapplied_chunks_are_durable_once_the_commit_is",
        Edit(STAGING + "_flush_packs", "await self.packs.flush()", "pass"),
    ),
    "deletions and writes of hosts not compared": (
        "transactions/test_group.py::test_conflicting_changes_of_two_hosts_are_refused",
        Edit("tstore.core.transactions.fragments:_check_paths", "if colliding:", "if False:"),
    ),
    "a gc overlooks a step that became the newest": (
        "maintenance/test_collect.py::test_a_step_that_is_the_newest_again_during_a_gc_stays",
        Edit("tstore.core.maintenance.gc:_Plan.spare", "or dropped ", ""),
    ),
    "save reuses again after SourceCondemned": (
        "maintenance/test_collect.py::test_a_save_that_rewrites_chunks_reuses_no_others",
        Edit("tstore.checkpoint.checkpoint:Checkpoint.save", "_no_prior)", "_newest_step)"),
    ),
    "a commit does not wait for operations": (
        "transactions/test_operations.py::test_a_commit_waits_for_pending_writes",
        Edit("tstore.core.transactions.lifecycle:Lifecycle.wait_idle", "while self._under_way:", "while False:"),
    ),
    "handles from before a change are accepted": (
        "transactions/test_operations.py::test_a_handle_from_before_a_resize_is_misuse",
        Edit("tstore.core.transactions.staged_tree:StagedTree.check_handle", "if not is_same or", "if"),
    ),
    "a partial write may change other values": (
        "data/test_lossy_parts.py::test_a_value_that_would_erase_others_is_refused",
        Edit("tstore.core.transactions.patches:_reencoded", "if count:", "if False:"),
    ),
    "a root that the server did not make passes": (
        RECORDS + "test_only_the_correct_root_is_accepted",
        Edit(ADMISSION + "check_root", "if await run(_hash, data) != cached[1]:", "if False:"),
    ),
    "a write token condemns data": (
        RECORDS + "test_a_collection_that_contradicts_the_log_is_refused",
        Edit(ADMISSION + "_admit_collection", "if scope < Scope.ADMIN:", "if False:"),
    ),
    "a pack may be shorter than its chunks": (
        POISONED + "test_a_chunk_beyond_the_end_of_its_pack_is_refused",
        Edit(CHUNKS + "absent_packs", "elif sizes[key] < ends[key]:", "elif False:"),
    ),
    "chunks may have other bytes": (
        POISONED + "test_a_chunk_of_other_bytes_is_refused",
        Edit(CHUNKS + "_check", 'if b"".join(actual) == checks:', "if True:"),
    ),
    "received blocks may have other bytes": (
        POISONED + "test_each_block_of_a_long_chunk_is_verified",
        Edit(
            "tstore.service.server.chunk_checks:ReceivedPacks.unverified",
            "(checks[starts[hashed] // BLOCK] != expected[hashed]).any(axis=1)",
            "False",
        ),
    ),
    "every chunk of another pack is known": (
        POISONED + "test_a_chunk_of_other_bytes_is_refused",
        Edit(
            "tstore.core.format.tree.added_chunks:_equal",
            "(x.checks != y.checks).any(axis=1)",
            "(x.checks != x.checks).any(axis=1)",
        ),
    ),
    "checks go on from before a collection": (
        POISONED + "test_a_verification_begins_again_after_a_collection[collect]",
        Edit("tstore.service.server.log_state:LogState.advance", "self.progress = CheckProgress()", "pass"),
    ),
    "a check goes on where one of others ended": (
        POISONED + "test_a_verification_begins_again_after_a_collection[another]",
        Edit(CHUNKS + "check", "msgspec.msgpack.encode(content)", 'b""'),
    ),
    "a chunk written again since is known": (
        "format/test_added_chunks.py::test_only_the_newest_row_of_a_chunk_is_known",
        Edit(
            "tstore.core.format.tree.added_chunks:_groups",
            "table = tables[at][-depth]",
            "table = tables[at][depth - 1]",
        ),
    ),
    "finding new chunks reads whole arrays": (
        "format/test_added_chunks.py::test_the_work_depends_on_the_chunks_of_the_record_alone",
        Edit(
            "tstore.core.format.objects.chunk_refs:ChunkTable.take",
            "columns.number[at]",
            "(columns.number + 0)[at]",
        ),
    ),
    "the first commit is not the outcome": (
        "log/test_log.py::test_the_outcome_of_a_transaction_is_its_first_commit",
        Edit(
            "tstore.core.log.reader:LogReader.find",
            "first = version if stored.record.commits(transaction) else first",
            "first = first or (version if stored.record.commits(transaction) else None)",
        ),
    ),
    "the values of a record are not counted": (
        "format/test_bounds.py::test_the_metadata_of_all_transactions_is_counted_together",
        Edit("tstore.core.format.objects.encoding:_check_size", "if excess:", "if False:"),
    ),
    "a body needs no least rate": (
        "server/test_server.py::test_server_and_client_tolerate_the_same_slowness",
        Edit(
            "tstore.service.server.transfers:Transfer._remaining",
            "return min(stall - (self._waited - self._piece_end[1]), stall + self.moved / rate - self._waited)",
            "return 1e9",
        ),
    ),
    "any Host passes without a token": (
        "attacks/test_server_http.py::test_other_host_names_are_refused_without_a_token",
        Edit("tstore.service.server.app:App._names_this_server", "return False", "return True"),
    ),
    "a zstd frame may declare any size": (
        "attacks/test_frames.py::test_the_declared_size_is_checked_before_anything_is_decoded",
        Edit(
            "tstore.core.format.arrays.compressors:_Zstd.decode",
            "size > max_size or not is_feasible(size, len(data))",
            "False",
        ),
    ),
    "reads have no bound by kind of object": (
        "attacks/test_endless_responses.py::test_every_storage_stops_at_the_bound",
        Edit(
            "tstore.core.storage.objects:read_limit",
            "MAX_OBJECT_BYTES if limit is None else limit",
            "MAX_OBJECT_BYTES",
        ),
    ),
    "errors in a document keep their own type": (
        "attacks/test_array_documents.py::test_the_error_of_an_invalid_document_names_its_path",
        Edit(
            "tstore.core.format.arrays.array_metadata:ArrayMeta.__init__",
            "except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)",
            "except LookupError",
        ),
    ),
    "a token without a host goes everywhere": (
        "storage/test_http_token.py::test_a_token_without_a_host_is_never_sent",
        Edit(
            "tstore.core.storage.http.tokens:_variables",
            "if variable != _FILE]",
            "if variable != _FILE] + ['TSTORE_TOKEN']",
        ),
    ),
    "long records are held together": (
        "log/test_log.py::test_long_records_are_held_one_at_a_time",
        Edit("tstore.core.log.trees:_drop_if_long", "if stored.is_long", "if False"),
    ),
    "metadata may be nested without a limit": (
        "format/test_bounds.py::test_values_and_levels_are_counted_exactly",
        Edit("tstore.core.format.bounds:msgpack_excess_message", "if len(remaining) > levels:", "if False:"),
    ),
    "TLS handshakes are not counted": (
        "attacks/test_server_floods.py::test_the_oldest_handshake_is_closed_for_a_new_connection",
        Edit(
            "tstore.service.server.connections:Connections.add", "self._open[Stage.ACCEPTED][new] = None", "pass"
        ),
    ),
    "each spelling of a token is a client": (
        "attacks/test_server_floods.py::test_a_token_is_one_client_however_it_is_spelled",
        Edit(
            "tstore.service.server.access:Access.match",
            "match = known, scope",
            "match = authorization.encode(), scope",
        ),
    ),
    "turns go to the oldest request": (
        "attacks/test_server_floods.py::test_equal_clients_are_served_in_turn_however_many_requests_each_has",
        Edit("tstore.service.server.quotas:Shares._order", "self._served.get(waiter.client, 0)", "0"),
    ),
    "metadata is checked in one step": (
        "attacks/test_server_floods.py::test_large_metadata_is_checked_in_steps",
        Edit("tstore.core.format.tree.validation:_check_nodes", "if parsed > _STEP_BYTES:", "if False:"),
    ),
    "a new node may be below an array": (
        "format/test_paths.py::test_a_node_below_an_array_is_refused[0]",
        Edit("tstore.core.format.tree.validation:_check_nesting", "nodes[path].is_array", "False"),
    ),
    "gc does not look for records above a gap": (
        "maintenance/test_collect.py::test_a_gap_in_the_log_prevents_the_collection[lost0-folder]",
        Edit("tstore.core.maintenance.gc:collect", "await checked_newest(reader)", "await reader.newest()"),
    ),
    "a writer does not look for records far above": (
        "log/test_log.py::test_a_gap_in_the_log_is_not_filled[5]",
        Edit(APPEND + "_create", "await self._log.look_ahead(self._seen)", "pass"),
    ),
    "a server lets a gc ignore later records": (
        RECORDS + "test_a_collection_below_later_records_is_refused",
        Edit(
            "tstore.service.server.log_state:LogState.ledger_at_end", "missing := await", "missing := () and await"
        ),
    ),
    "a transaction on a voided version commits": (
        REPAIRS + "test_a_transaction_that_has_not_read_the_voided_record_conflicts",
        Edit("tstore.core.log.expiry:refuse_voided", "if voided and", "if False and"),
    ),
    "finish commits what was voided": (
        REPAIRS + "test_finish_never_commits_again_what_was_voided",
        Edit(EXCLUSION + "_check_voided", "if newer.voids:", "if False:"),
    ),
    "hosts give up at a repair that has not ended": (
        "maintenance/test_repair_races.py::test_no_host_is_told_that_a_transaction_is_not_committed_because_an_earlier_version_was_voided",
        Edit(EXCLUSION + "_check_voided", "if newer.voids:", "if newer.voids or newer.was_voided:"),
    ),
    "what a host gave up is committed later": (
        BEGUN + "test_what_a_host_is_told_that_waited_in_vain_is_not_committed_later",
        Edit(
            "tstore.core.transactions.cooperative:_Waiter._check_not_removed",
            "if await self._commit.withdraw(base) is not None:",
            "if False:",
        ),
    ),
    "writes over other metadata are read": (
        REPAIRS + "test_a_version_that_rests_on_a_damaged_one_is_named",
        Edit("tstore.core.format.tree.stored_nodes:Write.check_above", "raise no_foundation(path)", "pass"),
    ),
    "a repair ignores what rests on a version": (
        REPAIRS + "test_an_intact_version_on_which_a_later_one_rests_is_not_voided_alone",
        Edit("tstore.core.maintenance.repair:_check_consequences", "if after:", "if False:"),
    ),
    "trees of voided versions are kept": (
        REPAIRS + "test_an_open_store_forgets_trees_of_voided_versions",
        Edit("tstore.core.log.trees:Trees.drop_voided", "self._cached.drop_from(version)", "pass"),
    ),
    "a repair drops a tag set meanwhile": (
        REPAIRS + "test_a_tag_set_during_the_repair_is_not_dropped",
        Edit("tstore.core.maintenance.repair:_append", "isdisjoint(record.dropped)", "isdisjoint(())"),
    ),
    "a voided gc goes on": (
        REPAIRS + "test_a_gc_whose_record_was_damaged_and_voided_ends",
        Edit("tstore.core.maintenance.gc:_delete", "if version is not None:", "if False:"),
    ),
    "what a voided gc condemned is alive again": (
        REPAIRS + "test_a_gc_that_is_still_deleting_while_its_record_is_voided",
        Edit("tstore.core.maintenance.repair_plan:RepairPlan._needing_revoked", "if gone:", "if False:"),
    ),
    "an append passes a cooperative commit": (
        "transactions/test_group.py::test_values_appended_before_the_hosts_commit_are_not_lost",
        Edit(EXCLUSION + "check", "*overlap.chunks, *overlap.extended]", "*overlap.chunks]"),
    ),
    "a repair drops a tag of another version": (
        REPAIRS + "test_a_tag_moved_away_before_the_repair_is_not_dropped[3]",
        Edit("tstore.core.maintenance.repair:_tags_of", ".tags.items() if version in voided)", ".tags.items())"),
    ),
    "a copy replaces manifests of another one": (
        "copying/test_copy_histories.py::test_an_object_of_a_diverged_copy_is_not_replaced[manifest]",
        Edit("tstore.core.copying.copy:_Copy._copy_manifests", "await self._check_common_records()", "pass"),
    ),
    "pages of another store's root are read": (
        "transactions/test_roots.py::test_a_writer_does_not_read_the_root_that_a_backup_left_in_place_of_its_own",
        Edit("tstore.core.log.roots:write_root", "if is_stored:", "if True:"),
    ),
    "an expired version is tagged": (
        "maintenance/test_tags.py::test_a_version_that_expires_during_the_commit_is_not_tagged",
        Edit("tstore.core.format.tree.retention:refuse_condemned", "(collection.expired)", "(())"),
    ),
    "a create does not look for an archive": (
        "log/test_archives.py::test_a_stalled_writer_whose_number_was_archived_commits_another_one",
        Edit("tstore.core.storage.base:_StagedInMemory.create", "if unless and", "if False and"),
    ),
    "readers prefer an object to its archive": (
        "log/test_archives.py::test_readers_ignore_an_object_beside_the_archive",
        Edit(COMMITS + "leading", "added = added[:", "_ = added[:"),
    ),
    "records are deleted as they are archived": (
        "log/test_archives.py::test_nothing_is_deleted_by_the_collection_that_archives",
        Edit(
            "tstore.core.maintenance.archiving:archive_records",
            "await _archive(log, end)",
            "await _archive(log, end); await _delete(log, end, versions)",
        ),
    ),
    "a server does not look after a create": (
        "log/test_archives.py::test_a_server_looks_for_the_archive_after_it_has_created_a_record",
        Edit(COMMITS + "create", "await self.check_not_archived(version)", "pass"),
    ),
    "a server takes any archive": (
        "log/test_archives.py::test_a_server_accepts_only_archives_of_its_own_records",
        Edit(ADMISSION + "check_archive", "!= data", "== b''"),
    ),
    "a server deletes any record": (
        "log/test_archives.py::test_a_server_accepts_only_archives_of_its_own_records",
        Edit(ADMISSION + "is_archived", "is not None", "is not Ellipsis"),
    ),
    "records of another store are accepted": (
        "log/test_chain.py::test_the_only_record_of_another_store_is_noticed",
        Edit(CHAIN + "check", "link.log_id != self.log_id", "False"),
    ),
    "a record may be that of another block": (
        "log/test_chain.py::test_a_record_of_another_block_is_noticed_by_itself",
        Edit(CHAIN + "check", "not first <= link.version < version", "False"),
    ),
    "a record may be there twice": (
        "log/test_chain.py::test_a_record_at_another_number_is_noticed[5-6]",
        Edit(CHAIN + "check", "self._versions.get(check, version)", "version"),
    ),
    "records need not follow each other": (
        "log/test_chain.py::test_merged_copies_are_noticed[3-0]",
        Edit(CHAIN + "check", "not self.agrees(link.version, link.check)", "False"),
    ),
    "what follows another history is ours": (
        "log/test_chain.py::test_the_rest_of_another_history_can_be_voided",
        Edit(CHAIN + "add", "self._accepted.setdefault(version, ())", "pass"),
    ),
    "a voided record is known by no other name": (
        "log/test_chain.py::test_a_record_out_of_place_can_be_voided[2-3]",
        Edit("tstore.core.maintenance.lost_records:named_checks", "named[link.version].add(link.check)", "pass"),
    ),
    "a root continues any other root": (
        "log/test_chain.py::test_copies_merged_below_the_newest_root_are_noticed",
        Edit(
            "tstore.core.log.trees:Trees._tree_of_root",
            "not self._records.chain.agrees(each.parent, each.parent_check)",
            "False",
        ),
    ),
    "a staged record is kept beyond a root": (
        "log/test_chain.py::test_a_record_is_made_again_only_beyond_a_root[6]",
        Edit(
            "tstore.core.log.log:_CandidateRecord.prepare",
            "self._link.version < first_link(link.version + 1)",
            "False",
        ),
    ),
    "a server takes any link": (
        "log/test_chain.py::test_a_server_refuses_a_record_that_does_not_follow",
        Edit(ADMISSION + "admit", "state.chain.check(version, record, data)", "pass"),
    ),
    "records out of place are archived": (
        "log/test_chain.py::test_records_out_of_place_are_not_archived",
        Edit("tstore.core.maintenance.archiving:_archive", "chain.add(version, record, data)", "pass"),
    ),
    "a stale root outlives a repair": (
        ROOTS + "test_no_reader_gets_a_root_with_voided_changes_once_the_repair_is_committed[3]",
        Edit("tstore.core.maintenance.repair:_append", "or version % ROOT_EVERY == 0:", ":"),
    ),
    "a root vouches with voided changes": (
        ROOTS + "test_a_repair_that_is_begun_again_uses_no_root_with_changes_that_it_has_voided",
        Edit(
            "tstore.core.maintenance.void_records:VoidRecords._find_resumptions",
            "stop = min((v for v, resumes in self.resumes.items() if not resumes)",
            "stop = min((v for v in self._former if not self.resumes.get(v, 1))",
        ),
    ),
    "a repair ends others without their roots": (
        ROOTS + "test_a_repair_that_ends_another_one_leaves_no_root_with_changes_that_this_voided",
        Edit("tstore.core.maintenance.repair:repair_store", "{*wanted, *repairs.unlisted}", "set(wanted)"),
    ),
    "a repair ends others without their gc": (
        ROOTS + "test_a_repair_that_ends_that_of_a_collection_expires_what_this_had_deleted",
        Edit("tstore.core.maintenance.repair:repair_store", "in to_void if await", "in wanted if await"),
    ),
    "pages of two histories are mixed": (
        ROOTS + "test_a_snapshot_whose_root_was_written_anew_says_that_the_timeline_changed",
        Edit("tstore.core.log.pages:pages_of_root", "same = same and reference.matches", "reference.matches"),
    ),
    "a repair trusts what a gc is deleting": (
        REPAIRS + "test_a_gc_that_is_still_deleting_what_a_version_needs_after_a_repair[True]",
        Edit("tstore.core.maintenance.repair:_doomed", "if min(void, default=last) < last", "if False"),
    ),
    "a repair expires a head that is damaged": (
        PLANS + "test_the_head_of_a_voided_collection_lost_its_pack_in_another_way",
        Edit(PLAN + "_expire", "max(set(older) - ledger.copies, default=0)", "max(older, default=0)"),
    ),
    "a repair forgets manifests of the newest": (
        PLANS + "test_older_manifests_that_the_newest_state_needs_stay",
        Edit(PLAN + "_complete", "objects |= {", "_ = {"),
    ),
    "a repair revives what lacks a manifest": (
        PLANS + "test_what_a_collection_still_deletes_is_not_alive_again",
        Edit(PLAN + "_complete", "if number == version or not record.source:", "if number == version:"),
    ),
    "a repair revives what a gc is deleting": (
        REPAIRS + "test_a_gc_that_is_still_deleting_what_a_version_needs_after_a_repair",
        Edit(PLAN + "_expire", "if previous is not None:", "if False:"),
    ),
    "a repair forgets who needs a manifest": (
        PLANS + "test_what_needs_a_manifest_that_a_voided_collection_still_deletes_is_expired",
        Edit(PLAN + "_needing_revoked", "(manifest_gone and not record.replaces) or own_gone", "own_gone"),
    ),
    "a repair expires what needs no manifest": (
        PLANS + "test_what_needs_a_manifest_that_a_voided_collection_still_deletes_is_expired",
        Edit(PLAN + "_needing_revoked", "(manifest_gone and not record.replaces)", "manifest_gone"),
    ),
    "a repair ignores who reuses condemned packs": (
        PLANS + "test_a_commit_beside_the_repair_reuses_what_a_voided_collection_still_deletes",
        Edit(PLAN + "add", " or any(map(self._revoked.includes, other.reused))", ""),
    ),
    "a repair ignores tags of what it voids": (
        PLANS + "test_a_tag_of_a_version_that_is_being_voided_is_dropped",
        Edit(PLAN + "add", "not removed.isdisjoint(other.named_versions) or any", "any"),
    ),
    "a gc takes the manifest of a lost record": (
        PLANS + "test_a_collection_keeps_the_manifest_that_a_lost_record_wrote",
        Edit(PLAN + "protect", "used |= {base.key} if", "used |= set() if"),
    ),
    "a copy inherits what a lost record wrote": (
        PLANS + "test_what_a_lost_record_wrote_outlives_a_copy_whose_root_has_its_changes",
        Edit(PLAN + "protect", "ledger.alive.keys() - ledger.copies", "ledger.alive.keys()"),
    ),
    "an heir of a lost record is standalone": (
        PLANS + "test_what_a_lost_record_wrote_outlives_a_copy_whose_root_has_its_changes",
        Edit(PLAN + "protect", "standalone=ledger.alive[version].standalone", "standalone=True"),
    ),
    "a save needs the manifests before it": (
        PLANS + "test_a_write_after_a_save_needs_nothing_from_before_it",
        Edit(
            REPLAY + "_advance",
            "max([v async for v, record in self._records(versions) if record.replaces], default=0)",
            "0",
        ),
    ),
    "what is not known stays so after a save": (
        PLANS + "test_a_write_after_a_save_needs_nothing_from_before_it",
        Edit(REPLAY + "_advance", "if number == first:", "if False:"),
    ),
    "roots vouch for nothing in a forecast": (
        "maintenance/test_repair_archives.py::test_versions_that_rest_on_a_lost_one_go_on_from_the_next_root",
        Edit(REPLAY + "_records", "_void(self._voided[number])", "_void(0)"),
    ),
    "a manifest that is gone is not missed": (
        PLANS + "test_what_needs_a_manifest_that_is_gone_is_damaged",
        Edit(
            REPLAY + "_manifests",
            "as error:\n        self._nodes_known, self._lost = False, (version, str(error))",
            "as error:\n        pass",
        ),
    ),
    "a repair condemns nothing again": (
        PLANS + "test_a_transaction_that_reuses_what_a_voided_collection_still_deletes_conflicts",
        Edit(PLAN + "collection", "sorted(self._condemned.transactions - living)", "()"),
    ),
    "a version that lacks a pack is restated": (
        PLANS + "test_a_repair_restates_no_version_that_lacks_a_pack",
        Edit(PLAN + "newest_complete", "if version not in incomplete:", "if True:"),
    ),
    "a copy inherits what expired versions wrote": (
        PLANS + "test_what_an_expired_version_wrote_outlives_a_copy_above_it",
        Edit(PLAN + "_expire", "set(self.expired) - ledger.copies)", "set(self.expired))"),
    ),
    "packs of expired versions are not inherited": (
        PLANS + "test_what_an_expired_version_wrote_outlives_a_copy_above_it",
        Edit(PLAN + "_expire", "(*entry.dependencies, *keys)", "entry.dependencies"),
    ),
    "an heir of a voided version is standalone": (
        PLANS + "test_a_version_that_inherits_from_a_voided_one_needs_older_ones_too",
        Edit(PLAN + "_expire", "standalone=ledger.alive[version].standalone", "standalone=True"),
    ),
    "a version inherits what is being deleted": (
        PLANS + "test_no_version_inherits_what_a_collection_still_deletes",
        Edit(PLAN + "_expire", "itertools.filterfalse(self._condemned.includes, (*", "((*"),
    ),
    "a copy replaces packs of another one": (
        "copying/test_copy_histories.py::test_an_object_of_a_diverged_copy_is_not_replaced",
        Edit("tstore.core.copying.copy:_Copy._copy_packs", "await self._check_common_records()", "pass"),
    ),
    "a copy misses a voided record of that length": (
        REPAIRS + "test_a_voided_record_as_long_as_the_one_before_is_noticed_by_a_copy",
        Edit("tstore.core.copying.destination:Destination.create_records", "REPAIR.encode() in data", "False"),
    ),
    "a repair keeps tags if the head is damaged": (
        REPAIRS + "test_a_tag_of_a_damaged_version_is_dropped_though_the_head_rests_on_that",
        Edit("tstore.core.maintenance.repair:_tags_of", "range(voided[0] + 1, base + 1)", "range(0)"),
    ),
    "a copy needs the manifests of the head": (
        PLANS + "test_what_needs_a_manifest_that_a_voided_collection_still_deletes_is_expired",
        Edit(PLAN + "_needing_revoked", "gone = own_gone if record.source else", "gone ="),
    ),
    "a version that was deleted is alive again": (
        PLANS + "test_a_version_that_an_older_collection_deleted_is_not_alive_again",
        Edit(PLAN + "_complete", "None if lacks or", "None if"),
    ),
    "a gc forgets manifests below the last": (
        PLANS + "test_older_manifests_that_the_newest_state_needs_stay",
        Edit(
            "tstore.core.maintenance.gc:_Plan._release",
            "max((i for i, e in enumerate(entries) if e.standalone), default=0)",
            "len(entries) - 1",
        ),
    ),
    "a gc deletes a root that is needed again": (
        "maintenance/test_repair_archives.py::test_a_root_that_a_voided_collection_did_not_delete_is_kept",
        Edit("tstore.core.maintenance.gc:_Plan.make", "*map(root_key, self._needed_roots)", "*()"),
    ),
    "a gc deletes what a forged one condemned": (
        "maintenance/test_collect_hostile.py::test_a_forged_gc_condemns_what_living_versions_need",
        Edit("tstore.core.maintenance.gc:_Plan.make", "- in_use", "- self.ledger.transactions"),
    ),
    "a gc takes a pack that a forged one names": (
        "maintenance/test_collect_hostile.py::test_a_forged_gc_condemns_what_living_versions_need",
        Edit("tstore.core.maintenance.gc:_Plan.make", "and owner_of(key) not in self.ledger.transactions", ""),
    ),
    "a chunk beside fill values is hidden": (
        "zarr/test_fill_values.py::test_fill_values_hide_no_other_chunk_of_their_pack",
        Edit(
            ENCODED + "_same_place",
            "mine.pack == other.pack and mine.offset == other.offset",
            "mine.pack == other.pack",
        ),
    ),
    "arrays share their fill values": (
        "zarr/test_fill_values.py::test_arrays_of_one_transaction_have_fill_values_of_their_own",
        Edit(ENCODED + "_fill_key", '"codecs", "fill_value"', '"codecs"'),
    ),
    "bytes of a former dtype are staged": (
        "zarr/test_programs.py::test_a_change_of_an_array_while_a_chunk_is_written[another dtype]",
        Edit(ENCODED + "EncodedStaging._stage", "not _same_chunks(meta, current) or ", ""),
    ),
    "metadata of a former dtype is staged": (
        "transactions/test_long_arrays.py::test_what_happens_while_zarr_sets_metadata_is_not_lost",
        Edit(ENCODED + "_in_grid", "if not _same_chunks(node.meta, meta):", "if False:"),
    ),
    "zarr makes dense arrays sparse": (
        "zarr/test_programs.py::test_a_dense_array_stays_dense_when_its_attributes_change",
        Edit(ENCODED + "EncodedStaging.set_array", "sparse=not was_dense", "sparse=True"),
    ),
    "chunks written beside metadata are lost": (
        "transactions/test_long_arrays.py::test_what_happens_while_zarr_sets_metadata_is_not_lost",
        Edit(ENCODED + "EncodedStaging._restate", "if is_current and not array.has_unapplied:", "if True:"),
    ),
    "a chunk written beside a resize is lost": (
        "transactions/test_long_arrays.py::test_what_is_written_while_a_resize_reads_segments_is_not_lost",
        Edit(ARRAY + "resize", "if self.whole_chunks.tables is whole.tables:", "if True:"),
    ),
    "parts outlive chunks in segments": (
        "transactions/test_long_arrays.py::test_chunks_in_segments_replace_what_was_written_before",
        Edit(ARRAY + "numbers_in_segments", "if not (job.segments and self.patches):", "if True:"),
    ),
    "a part is applied to the chunk of the base": (
        "transactions/test_long_arrays.py::test_a_part_of_a_chunk_that_the_transaction_wrote_whole",
        Edit(ARRAY + "_rows_of", "(base, whole)", "(whole, base)"),
    ),
    "a resize forgets to drop applied parts": (
        "transactions/test_operations.py::test_a_part_written_after_a_resize_is_that_of_its_new_chunk",
        Edit(ARRAY + "resize", "self._applied = {}", "pass"),
    ),
    "a write keeps the caller's buffer": (
        "transactions/test_operations.py::test_values_are_written_in_the_order_and_as_of_the_call",
        Edit(ARRAY + "write", "np.array(values[", "np.asarray(values["),
    ),
    "a compaction is revised for one commit": (
        "transactions/test_compactions.py::test_a_compaction_replaces_all_rows_but_those_written_meanwhile",
        Edit(CONFLICTS + "revise_compactions", "in newer if compacting", "in newer[:1] if compacting"),
    ),
    "a compaction is revised for one array": (
        "transactions/test_compactions.py::test_compactions_of_two_arrays_leave_out_the_rows_written_meanwhile",
        Edit(
            CONFLICTS + "revise_compactions",
            "revised |= array.path in nodes and",
            "revised = revised or array.path in nodes and",
        ),
    ),
    "a copy lacks the manifest below a root": (
        "maintenance/test_repair_archives.py::test_a_collection_keeps_what_a_lost_record_wrote[True-True]",
        Edit("tstore.core.copying.inventory:take_inventory", "inventory.add_base(tree)", "pass"),
    ),
}


MODULES = list(dict.fromkeys(node.partition("::")[0] for node, _ in MUTATIONS.values()))


class Runs:
    """Runs, in a session of pytest, the test of each fault with the fault; notes the faults that it detects."""

    def __init__(self, faults: dict[str, tuple[str, Edit]]) -> None:
        self._faults = faults
        self.detected: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for name, (node, fault) in self._faults.items():
            items = [item for item in session.items if f"{item.nodeid}[".startswith(f"tests/{node}[")]
            with pytest.MonkeyPatch.context() as patch:
                fault.apply(patch)
                if any(report.failed for item in items for report in runtestprotocol(item, log=False)):
                    self.detected.append(name)
        return True


@pytest.mark.parametrize("module", MODULES)
def test_each_fault_is_detected_by_its_test(
    module: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {name: fault for name, fault in MUTATIONS.items() if fault[0].startswith(f"{module}::")}
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a search through the metadata of every package,
    plugins = [importlib.import_module(name) for name in PLUGINS]  # and so is each option -p
    options = ["-q", "--no-header", "--tb=no", "--rootdir", str(pytestconfig.rootpath), "-o", "timeout=0"]
    nodes = dict.fromkeys(str(pytestconfig.rootpath / "tests" / node) for node, _ in faults.values())
    runs = Runs(faults)
    pytest.main([*options, *nodes], plugins=[*plugins, runs])
    assert runs.detected == list(faults), capsys.readouterr().out
