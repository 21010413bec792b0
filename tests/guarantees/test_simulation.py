"""The protocol in a simulation with every kind of fault, and tests of the simulation itself.

Each of these faults, put into the protocol on purpose, is detected within a few hundred runs (`MUTATIONS` has the
edits). `test_mutations.py` has the faults that the simulation detects seldom or never.

    fault                                        what it would break
    ------------------------------------------   ------------------------------------------------------------
    conflict check skipped                       lost updates
    chunks written by both pass                  lost updates
    nodes created by both pass                   one array in place of another
    writes below a deletion pass                 chunks of an array that is gone
    tags set by both pass                        a step saved twice
    writes over a replaced tree pass             parts of an old tree in a new checkpoint
    own commit not recognised after a lost reply one transaction committed twice
    another's record taken for one's own         an acknowledged commit that does not exist
    lost response taken for a failure            a commit that exists but was reported as failed
    no void record                               a commit that lands after it was reported as failed
    next number without a void record            a hole, or one transaction committed twice
    unknown outcome reported as a failure        a commit that exists but was reported as failed
    create that overwrites                       acknowledged commits lost
    the hint is trusted                          readers that miss acknowledged commits
    the hint need not exist                      readers of versions that do not exist
    patches not reapplied                        lost updates of parts of a chunk
    patches reapplied to the old version         lost updates of parts of a chunk
    packs not finished before the record         commits that refer to data that never appears
    fragment check off by one                    a checkpoint that lacks the part of one host
    finisher does not scan from the base         one transaction committed twice
    finisher scans from the highest base         lost updates
    the attempt is not in the id                 two attempts mixed in one checkpoint
    a withdrawn transaction is committed         parts of two moments mixed in one checkpoint
    a condemned transaction commits              commits whose data is deleted
    reads are not validated                      write skew
    values do not count as read                  write skew
    lists of paths do not count as read          phantoms
    one conflict of several commits passes       lost updates
    a resize does not change metadata            chunks in place of others
    appended values are not moved                lost appends
    a tag that is taken is set again             a step saved twice
    gc does not spare newer references           commits whose data is deleted
    gc forgets what the next version needs       commits whose data is deleted
    gc lets the newest version expire            no version left to read
    a tag keeps no version                       a version that a rule names expires
    the best by a metric are off by one          a step that a rule keeps expires
    dropped tags share a record                  a dropped tag that still names its version
    gc expires a version just tagged             a tag of a version whose data is deleted
    deletions of the first host only             an array that a host deleted still exists
    a waiting host syncs no folder               an acknowledged commit lost in a power failure
    an own commit found again is not synced      an acknowledged commit lost in a power failure
    the commit below is not synced               a gap below an acknowledged commit after a power failure
    packs are not synced                         commits whose data is lost in a power failure
    a copied record is not synced                a gap below an acknowledged commit after a power failure
    gc forgets packs of segments                 commits whose data is deleted
    gc forgets manifests that a root repeats     commits whose data is deleted
    a root forgets deletions                     arrays that were deleted are back
    a root of another version is read            nodes of another store
    a segment is lost                            chunks of an acknowledged commit lost
    a compaction hides newer references          acknowledged chunks replaced by older ones
    references are compacted in the wrong order  acknowledged chunks replaced by older ones
    readers ignore archives                      commits that are gone
    a search ignores archives                    readers that miss acknowledged commits
    a record is deleted without an archive       commits that are gone
    an archive is not synced                     commits lost in a power failure
    a late host saves behind a rollback          a step of the abandoned run is the newest
    fill values of absent chunks are no write    lost updates
    looks at chunks do not count as read         write skew
    lists of chunks do not count as read         phantoms
    a record of another version is read          one transaction committed twice
    a record of another store is read            values of another store
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support.mutation import Edit
from tstore.core.log import log, trees
from tstore.core.runtime import pool
from tstore.core.storage.objects import Durability
from tstore.core.transactions.membership import Membership
from tstore.lab.simulation import runs
from tstore.lab.simulation.__main__ import main
from tstore.lab.simulation.history import Append
from tstore.lab.simulation.replay import Expected
from tstore.lab.simulation.runs import simulate, simulate_many
from tstore.lab.simulation.scenario import override_constants, prepare_initial_stores
from tstore.lab.simulation.storage import HostStorage, SharedObjects
from tstore.lab.simulation.virtual import NO_FAULTS, Host, Stuck, VirtualLoop

MOST = 600
"""The number of runs within which the kinds of faults and of work must occur."""

TRIED = 100
"""The number of runs within which a fault must be detected, if the run of its seed no longer detects it."""

APPEND, READER = "tstore.core.log.log:Append.", "tstore.core.log.reader:LogReader."
REAPPLY = "tstore.core.transactions.conflicts:reapply"
COOPERATIVE, TREE = (
    "tstore.core.transactions.cooperative:CooperativeCommit.",
    "tstore.core.format.tree.changes:Changes.",
)
STAGING, STORAGE = "tstore.core.transactions.staging:Staging.", "tstore.lab.simulation.storage:SharedObjects."
MERGE = "tstore.core.transactions.fragments:FragmentTree.merge_block"
GC, QUEUE, ARRAY = (
    "tstore.core.maintenance.gc:",
    "tstore.core.log.group_commit:",
    "tstore.core.transactions.staged_array:StagedArray.",
)
COMMITS = "tstore.core.log.commits:"
ENCODED = "tstore.core.transactions.encoded:EncodedStaging."
DECIDE = "await self._decide(version, error)"

MUTATIONS: dict[str, list[Edit]] = {
    "conflict check skipped": [
        Edit(TREE + "overlap", "return Overlap(conflicts, chunks, extended)", "return Overlap([], {}, [])")
    ],
    "chunks written by both pass": [Edit(TREE + "overlap", "if len(both):", "if False:")],
    "nodes created by both pass": [
        Edit(TREE + "overlap", "if mine.replaces_node or theirs.replaces_node:", "if False:")
    ],
    "writes below a deletion pass": [Edit(TREE + "overlap", "at_or_below(self.nodes, other.deleted)", "[]")],
    "tags set by both pass": [Edit(TREE + "overlap", "if t in other.tags or t in other.dropped", "if False")],
    "writes over a replaced tree pass": [Edit(TREE + "overlap", "if other.replaces:", "if False:")],
    "own commit not recognised after a lost reply": [
        Edit(APPEND + "_find_itself", "if other.commits(self._record.transaction):", "if False:")
    ],
    "another's record taken for one's own": [
        Edit(
            APPEND + "run",
            "await asyncio.sleep(pause if pause >= _TICK else 0)",
            "return await self._finish(self._requested)",
        )
    ],
    "lost response taken for a failure": [Edit(APPEND + "_create", DECIDE, "self._undecided = 0; raise")],
    "no void record": [
        Edit(
            APPEND + "_decide",
            "if isinstance(failure, TStoreError) and not isinstance(failure, Unavailable):",
            "if True:",
        )
    ],
    "next number without a void record": [Edit(APPEND + "_create", DECIDE, "self._seen += 1")],
    "unknown outcome reported as a failure": [Edit(APPEND + "run", "if self._undecided:", "if False:")],
    "create that overwrites": [Edit(STORAGE + "create", "if key in self.objects:", "if False:")],
    "the hint is trusted": [
        Edit(
            READER + "_search_newest",
            "known = self._newest\n",
            "known = self._newest or await read_hint(self.storage)\n",
        )
    ],
    "the hint need not exist": [Edit(READER + "_gallop_from_hint", "low=0", "low=hint")],
    "patches not reapplied": [Edit(REAPPLY, "if not chunks and not extended:", "if True:")],
    "patches reapplied to the old version": [
        Edit(REAPPLY, "(await guard_expiry(log, version, log.head(version))).nodes", "staged.base.nodes")
    ],
    "packs not finished before the record": [Edit(STAGING + "_flush_packs", "await self.packs.flush()", "pass")],
    "fragment check off by one": [
        Edit(MERGE, "self._member.block(level, block)", "self._member.block(level, block)[:-1]")
    ],
    "finisher does not scan from the base": [
        Edit(
            COOPERATIVE + "append",
            "version = await self.log.append(",
            "record = replace(record, base=await self.log.reader.newest())\n    version = await self.log.append(",
        )
    ],
    "finisher scans from the highest base": [
        Edit(
            "tstore.core.transactions.fragments:merge",
            "base=min(f.base for f in fragments)",
            "base=max(f.base for f in fragments)",
        )
    ],
    "the attempt is not in the id": [
        Edit(
            "tstore.core.transactions.membership:Membership.from_arguments",
            "{slug(name)}.{slug(token)}.{unique}",
            "{slug(name)}",
        )
    ],
    "a withdrawn transaction is committed": [
        Edit("tstore.core.transactions.decision:Decision.commit", "self._check(existing)", "pass")
    ],
    "a condemned transaction commits": [
        Edit(
            "tstore.core.format.tree.retention:refuse_condemned",
            "if record.transaction in collection.transactions:",
            "if False:",
        )
    ],
    "reads are not validated": [
        Edit(
            "tstore.core.transactions.conflicts:check_reads",
            "await guard_expiry(log, version, run(staged.reads.changed, base, tree))",
            "[]",
        )
    ],
    "values do not count as read": [
        Edit(
            "tstore.core.transactions.read_set:ReadSet.add_values",
            "self.add_chunks(path, numbers, meta.counts, counts)",
            "pass",
        )
    ],
    "lists of paths do not count as read": [
        Edit("tstore.core.transactions.read_set:ReadSet.add_all_arrays", "self._all_arrays = True", "pass")
    ],
    "one conflict of several commits passes": [
        Edit(
            QUEUE + "_append_together",
            "except Exception as error:\n                commit.error = error",
            "except Exception as error:\n                commit.error = error if len(commits) == 1 else None",
        )
    ],
    "a resize does not change metadata": [
        Edit(
            ARRAY + "resize",
            "self.meta, self.replaces_node, self.extension = new, True, None",
            "self.meta, self.extension = new, None",
        )
    ],
    "appended values are not moved": [Edit(REAPPLY, "for path in sorted(extended):", "for path in ():")],
    "a tag that is taken is set again": [
        Edit(
            "tstore.core.transactions.tag_edits:TagEdits.check",
            "if tag in existing and tag not in self.moved:",
            "if False:",
        )
    ],
    "gc does not spare newer references": [Edit(GC + "_Plan.spare", "self.ledger.add(version, other)", "pass")],
    "gc forgets what the next version needs": [
        Edit(GC + "_Plan._release", "inherit(next_living, inherited,", "inherit(next_living, [],")
    ],
    "gc lets the newest version expire": [
        Edit(
            "tstore.core.format.tree.retention:Keep.select",
            "max((version for version, entry in alive.items() if not entry.source), default=0)",
            "0",
        )
    ],
    "a tag keeps no version": [
        Edit("tstore.core.format.tree.retention:Keep.select", "not named.isdisjoint(entry.tags)", "False")
    ],
    "the best by a metric are off by one": [
        Edit("tstore.core.format.tree.retention:_best", "ranked[:count]", "ranked[1 : count + 1]")
    ],
    "dropped tags share a record": [Edit(QUEUE + "QueuedCommit.__init__", " or changes.dropped", "")],
    "gc expires a version just tagged": [
        Edit(GC + "_Plan.spare", "(expired and self.number < _MAX_PLANS)", "False")
    ],
    "deletions of the first host only": [
        Edit(
            "tstore.core.transactions.fragments:merge",
            "tuple(dict.fromkeys(d for f in fragments for d in f.deleted))",
            "first.deleted",
        )
    ],
    "a waiting host syncs no folder": [
        Edit(
            "tstore.core.transactions.cooperative:_Waiter.wait",
            "await self._commit.log.make_durable(version, self._commit.durability)",
            "pass",
        )
    ],
    "an own commit found again is not synced": [
        Edit(APPEND + "_find_itself", 'await self._log.storage.flush("commits", self._durability)', "pass")
    ],
    "the commit below is not synced": [Edit(APPEND + "_create", "await self._log.storage.sync()", "pass")],
    "packs are not synced": [
        Edit(
            "tstore.core.data.writer:PackSet.flush",
            "await self._storage.flush(self._folder, self._durability)",
            "pass",
        )
    ],
    "a copied record is not synced": [
        Edit(
            "tstore.core.copying.destination:Destination.create_records",
            "await together(lambda version: staged[version].write(commit_key(version)), staged)",
            "pass",
        )
    ],
    "gc forgets packs of segments": [
        Edit(
            "tstore.core.format.tree.retention:packs_of",
            "node.packs for node in tree.nodes.values()",
            "node.packs for node in tree.nodes.values() if not node.reads_segments",
        )
    ],
    "gc forgets manifests that a root repeats": [
        Edit(GC + "_Plan._release", "{m.key for m in record.manifests if isinstance(m, ObjectRef)}", "set()")
    ],
    "a root forgets deletions": [
        Edit(
            "tstore.core.format.tree.nodes:Nodes.changes",
            "tuple(path for path, node in nodes.items() if node is None)",
            "()",
        )
    ],
    "a root of another version is read": [
        Edit("tstore.core.log.trees:_is_of", "root.version == version and stored.has_root(root)", "True")
    ],
    "a segment is lost": [
        Edit(
            "tstore.core.transactions.staged_array:_in_segments",
            "sorted_runs(segments, source)",
            "sorted_runs(segments[1:], source)",
        )
    ],
    "a compaction hides newer references": [
        Edit(ARRAY + "revise_compaction", "former.without(newer.numbers)", "former")
    ],
    "references are compacted in the wrong order": [
        Edit(
            "tstore.core.format.objects.compactions:CompactionPlan.parts",
            "ChunkTable.overlay([*slab, between(rows, start, stop)])",
            "ChunkTable.overlay([between(rows, start, stop), *slab])",
        )
    ],
    "readers ignore archives": [Edit(COMMITS + "CommitObjects.get", "if archive is not None:", "if own is None:")],
    "a search ignores archives": [
        Edit(COMMITS + "CommitObjects.existing", "keys[archive_key(end)] = block", "pass")
    ],
    "a record is deleted without an archive": [
        Edit("tstore.core.maintenance.archiving:archive_records", "if archive_key(end) in archived:", "if True:"),
        Edit("tstore.core.maintenance.archiving:_delete", "if archive is not None and", "if True and"),
    ],
    "an archive is not synced": [
        Edit("tstore.core.maintenance.archiving:_archive", "Durability.FSYNC", "Durability.NONE")
    ],
    "a late host saves behind a rollback": [
        Edit(TREE + "_step_conflicts", "(self, other), (other, self)", "(other, self),")
    ],
    "fill values of absent chunks are no write": [
        Edit(
            ENCODED + "remove_chunks",
            "for number in removed.tolist()",
            "for number in removed.tolist() if number in await self._numbers(staged, path)",
        )
    ],
    "looks at chunks do not count as read": [Edit(ENCODED + "_row", "staged.note_chunks(path, [number])", "pass")],
    "lists of chunks do not count as read": [Edit(ENCODED + "_numbers", "staged.note_chunk_names(path)", "pass")],
    "a record of another version is read": [
        Edit(
            "tstore.core.log.records:Chain.check",
            "if (other := self._versions.get(check, version)) != version:",
            "if False:",
        )
    ],
    "a record of another store is read": [
        Edit(
            "tstore.core.log.records:Chain.check",
            "if self.log_id is not None and link.log_id != self.log_id:",
            "if False:",
        ),
        Edit("tstore.core.log.records:Chain.agrees", "return check in", "return True or check in"),
    ],
}


SEEDS = Path(__file__).with_name("seeds.json")
QUICK: dict[str, int] = json.loads(SEEDS.read_text())
"""The seed of a run that detects each fault. A change of the protocol may make one stale: then run
`python -m tests.guarantees.search_seeds`."""


@pytest.fixture(scope="module", autouse=True)
def beginnings() -> None:
    """Prepare the initial stores of the runs with the correct protocol, before it gets a fault."""
    prepare_initial_stores()


FAULTS = {"refused", "lost", "unanswered", "late", "repeated", "retried", "not done", "crashes", "pauses for"}
ENDS = {"late: commits/", "Conflict", "DeadlineExceeded", "Inconsistent", "CommitOutcomeUnknown"}
PLACES = {"roots='missing'", "roots='damaged'", "roots='foreign'", "roots='ahead'", "cached=True", "strict=True"}
WORKS = {
    "finishes",
    "quantized version",
    "copies up to",
    "failover",
    "merge-2",
    "gc by Keep",
    "has its clock set",
    "gave up waiting",
    "rolls back to step",
    "misplaces a record",
    "voids",
    "creates archives/",
}
VARIED = (132, 25, 3094, 3063, 54, 3, 393, 22, 7, 2, 3006, 3010)
"""The seeds of runs in which, together, all of these occur. They are tried first."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runs", [12, pytest.param(640, marks=pytest.mark.deep)])
def test_runs_with_every_kind_of_fault_break_no_promise(runs: int) -> None:
    missing, broken, commits = FAULTS | ENDS | PLACES | WORKS, dict[int, list[str]](), 0
    for count, seed in enumerate(dict.fromkeys((*VARIED, *range(MOST + runs)))):
        if count >= runs and not missing:
            break
        outcome = simulate(seed)
        if outcome.violations:
            broken[seed] = outcome.violations
        commits += outcome.counts["commits"]
        told = "\n".join(outcome.trace)
        missing = {what for what in missing if what not in told}
    assert not broken, f"replay with python -m tstore.lab.simulation --seed N --trace: {broken}"
    assert not missing
    assert commits > 5 * runs


def test_many_runs_are_spread_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_BATCH", 5)
    tallies = list(simulate_many(range(6), processes=1))
    assert [t.runs for t in tallies] == [5, 1]
    assert sum(t.counts["commits"] for t in tallies) > 5 * 6
    assert not any(t.broken for t in tallies)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_in_the_protocol_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in MUTATIONS[name]:
        edit.apply(monkeypatch)
    first = QUICK[name]
    seeds = (first, *(seed for seed in range(TRIED) if seed != first))
    detected = any(simulate(seed).violations for seed in seeds)
    assert detected, f"no run of {TRIED} detects it; run python -m tests.guarantees.search_seeds"


def test_pauses_do_not_count_as_a_host_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this run a host is paused for 345 of 416 seconds."""
    monkeypatch.setattr(runs, "_DEADLINE", 100.0)
    assert simulate(2019).violations == []
    monkeypatch.setattr(runs, "_DEADLINE", 1.0)
    assert any("hosts had not ended after 1 s" in violation for violation in simulate(2019).violations)


@pytest.mark.parametrize("seed", [1651, 2384, 1053, 3089])
def test_a_repair_beside_everything(seed: int) -> None:
    assert simulate(seed).violations == []


def test_an_append_over_a_voided_one_keeps_the_cells_that_it_took_over() -> None:
    """In the voided version the array had 13 cells, so the append is to the chunk of the last one."""
    base = Expected({"a": (1,) * 12}, ({"a": (*(1,) * 12, 2)},), {})
    appended = base.after([Append("a", 6, 3)], {}, takes_over=True)
    assert appended.matches({"a": (*(1,) * 12, 2, *(3,) * 6)})
    assert not appended.matches({"a": (*(1,) * 12, *(3,) * 6)})


def test_hosts_may_see_what_holds_between_two_voided_versions() -> None:
    """Of a repair that crashed after it had voided the first one."""
    expected = Expected({"a": (0,)}, ({"a": (2,)}, {"a": (1,)}), {}, existed=True)
    for cell in (0, 1, 2):
        assert expected.agrees({"a": (cell,)}, [], partial=False)
    assert not expected.agrees({"a": (3,)}, [], partial=False)
    assert not expected.matches({"a": (1,)})


def test_the_table_above_lists_the_faults() -> None:
    assert __doc__ is not None
    rows = [line[4:48].strip() for line in __doc__.splitlines() if line.startswith("    ")]
    assert rows[2:] == list(MUTATIONS)


# ---- a seed determines a run


def fingerprint(seeds: range) -> str:
    """Return a digest of the events of some runs."""
    outcomes = [simulate(seed) for seed in seeds]
    return hashlib.sha256(repr(outcomes).encode()).hexdigest()


def test_a_seed_replays_exactly_in_any_process() -> None:
    seeds = range(22, 23)  # with most kinds of faults and of work
    mine = fingerprint(seeds)
    assert mine == fingerprint(seeds)
    code = f"""
import hashlib
from tstore.lab.simulation.runs import simulate
outcomes = [simulate(seed) for seed in {seeds}]
print(hashlib.sha256(repr(outcomes).encode()).hexdigest())
"""
    number = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # of this process, it is random
    other = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": number},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert other.stdout.strip() == mine


def test_the_command_tells_the_events_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7", "--trace"]) == 0
    told = capsys.readouterr().out
    assert "starts at version" in told
    assert "creates commits/" in told
    assert told.endswith("0 violations\n")


def test_the_command_names_the_seeds_that_broke_a_promise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for edit in MUTATIONS["conflict check skipped"]:
        edit.apply(monkeypatch)
    seed = next(s for s in range(MOST) if simulate(s).violations)
    assert main(["--seed", str(seed)]) == 1
    assert "both changed" in capsys.readouterr().out


# ---- the parts of the simulation


def test_constants_are_overridden_only_inside_the_block() -> None:
    before = trees.ROOT_EVERY
    with override_constants(ROOT_EVERY=8, FAN_IN=2):
        assert trees.ROOT_EVERY == log.ROOT_EVERY == 8
        assert Membership.from_arguments("x", 0, 6, "a").top == 2
    assert trees.ROOT_EVERY == log.ROOT_EVERY == before
    with pytest.raises(LookupError, match="NO_SUCH"), override_constants(ROOT_EVERY=8, NO_SUCH=1):
        pass
    assert before == trees.ROOT_EVERY


async def test_a_power_failure_loses_unsynced_changes() -> None:
    shared = SharedObjects({})
    host = Host("a", "a", NO_FAULTS, 0, lambda _who, _what: None)
    storage = HostStorage(shared, host)
    await storage.create("commits/1", b"synced", Durability.FSYNC)
    shared.create("commits/2", b"its creator died before it had synced the folder")
    await storage.create("txn/a/pack-1", b"scratch", Durability.NONE)
    pack = storage.writer("txn/b/pack-1", Durability.FSYNC)
    pack.append([b"data"], 4)
    pack.finish()
    chances = [shared.copy().after_power_failure(random.Random(seed)).objects for seed in range(20)]
    assert {frozenset(objects) for objects in chances} == {
        frozenset({"commits/1"}),
        frozenset({"commits/1", "commits/2"}),
    }
    await storage.flush("txn/b", Durability.FSYNC)
    await storage.flush("commits", Durability.FSYNC)
    left = shared.after_power_failure(random.Random(0)).objects
    assert left.keys() == {"commits/1", "commits/2", "txn/b/pack-1"}
    await storage.sync()
    assert shared.after_power_failure(random.Random(0)).objects == shared.objects


def test_virtual_time_passes_at_once_and_in_order() -> None:
    order = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((seconds, asyncio.get_running_loop().time()))

    async def several() -> None:
        await asyncio.gather(*[wait(s) for s in (1e6, 3, 0, 20)])

    loop = VirtualLoop()
    loop.run_until_complete(several())
    assert [s for s, _ in order] == [0, 3, 20, 1e6]
    assert all(at == pytest.approx(s) for s, at in order)
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_simultaneous_timers_run_in_order_of_creation_unless_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    loop, order = VirtualLoop(), list[int]()
    timers = [loop.call_at(5, order.append, number) for number in range(20)]
    timers[3].cancel()
    loop.call_at(1e9, order.append, -1).cancel()
    loop.call_soon(order.index, 100)  # fails; the others still run
    loop.run_until_complete(asyncio.sleep(7, loop))
    assert order == [number for number in range(20) if number != 3]
    assert loop.time() == 7
    assert "ValueError" in caplog.text
    with pytest.raises(Stuck):
        loop.run_forever()
    loop.close()


async def test_inline_work_needs_no_thread_and_pauses_before_each_item() -> None:
    pauses: list[int] = []
    done: list[int] = []

    async def pause() -> None:
        pauses.append(len(done))

    with pool.without_threads(pause):
        assert await pool.run(lambda: 5) == 5
        await pool.each(done.append, range(3))
        url = "memory://inline"
        await tstore.save(url, {"x": np.arange(5000)}, 1)
    assert done == [0, 1, 2]
    assert pauses[:4] == [0, 0, 1, 2]
    assert len(pauses) > 4
    assert (await tstore.restore(url))["x"].tolist() == list(range(5000))
