"""The trees, arrays and tags of a store."""

import itertools
import math

import numpy as np

from tests.support.independent_reader.codecs import decode
from tests.support.independent_reader.documents import grown, parse_document
from tests.support.independent_reader.frames import (
    MIB,
    Expired,
    Refused,
    array,
    checksum,
    digest,
    fields,
    frame,
    key_of,
    names,
    nat,
    need,
    optional,
    path_,
    text,
    unpack_msgpack,
    versions_of,
)
from tests.support.independent_reader.log import Log
from tests.support.independent_reader.manifests import parse_manifest, parse_rows

REFERENCE = (
    ("kind", text), ("key", text), ("length", nat), ("check", digest), ("segment_bytes", nat, 0),
    ("pages", array, []),
)  # fmt: skip
PAGE = (("first", path_), ("nodes", nat), ("length", nat), ("check", digest))
ROOT = (
    ("version", nat), ("record_check", digest), ("tags", versions_of), ("manifest", array),
    ("base", optional, None), ("deleted", names, []), ("parent", nat, 0),
    ("copies", nat, 0), ("parent_check", digest, bytes(16)),
)  # fmt: skip


def groups_of(path):
    """Return the paths of the groups around a node, without the root."""
    return [path[:i] for i in range(1, len(path)) if path[i] == "/"]


def without(runs, compaction):
    """Return runs without the segments and rows that a compaction replaces."""
    kept = [s for s in runs if isinstance(s, dict) or s.check not in compaction.replaced]
    return [
        {n: r for n, r in s.items() if n not in compaction.numbers} if isinstance(s, dict) else s for s in kept
    ]


class Store(Log):
    """The versions of a store, with their trees, tags and arrays."""

    # manifests

    def manifest(self, items, transactions=None, front=None, key=None):
        """Nodes of a manifest or of the reference to one. `front`: the pages, if they are in front of a root."""
        if array(items) and items[0] == "manifest":
            return parse_manifest(items)
        ref = fields(items, *REFERENCE)
        need(ref.kind == "object", "neither a manifest nor a reference")
        if front is None:
            t = key_of("manifest", ref.key)
            need(transactions is None or t in transactions, f"{ref.key} is of another transaction")
            front = self.get(ref.key, 1 << 30)
        else:
            need(ref.key == key, f"{key} refers to {ref.key}")
        need(len(front) == ref.length >= 24 and front[-16:] == ref.check, f"{ref.key} is not what was referred to")
        if not ref.pages:
            return parse_manifest(unpack_msgpack(frame(front, b"M", ref.key)))
        pages = [fields(p, *PAGE) for p in ref.pages]
        need(len(pages) <= 4096 and sum(p.length + 8 for p in pages) == ref.length, f"pages of {ref.key}")
        nodes, at = [], 0
        for p, after in zip(pages, [*pages[1:], None], strict=True):
            need(int.from_bytes(front[at : at + 8], "little") == p.length, f"length of a page of {ref.key}")
            data = front[at + 8 : at + 8 + p.length]
            at += 8 + p.length
            need(len(data) == p.length and data[-16:] == p.check, f"a page of {ref.key} differs")
            own = parse_manifest(unpack_msgpack(frame(data, b"M", f"page of {ref.key}")))
            need(
                1 <= p.nodes <= 131072 and len(own) == p.nodes and own[0][0] == p.first,
                f"nodes of a page of {ref.key}",
            )
            need(after is None or own[-1][0] < after.first, f"pages of {ref.key} overlap")
            nodes += own
        return nodes

    def manifests(self, r):
        transactions = {r.transaction, *(p.transaction for p in r.parts)}
        return [self.manifest(m, transactions) for m in r.manifests]

    # trees

    def root(self, version):
        """The root of a version: its fields, checked as far as its nodes are not concerned."""
        key = f"roots/{version:020}"
        data = self.get(key, 1 << 30)
        front = b""
        if data[:6] != b"tstore":
            size = int.from_bytes(data[-8:], "little")
            need(24 <= size <= len(data) - 8, f"{key} is invalid")
            front, data = data[: len(data) - 8 - size], data[len(data) - 8 - size : -8]
        t = fields(unpack_msgpack(frame(data, b"T", key)), *ROOT)
        t.front, t.key = front, key
        need(t.version == version, f"{key} is of version {t.version}")
        r = self.record(version)
        ok = t.record_check == r.check or (r.resumes == version and t.record_check in r.replaced)
        need(ok, f"{key} is of another record")
        n, step = version // self.every_root, 1
        while n % (step * 4) == 0:
            step *= 4
        need(t.parent in (0, self.every_root * (n - step)), f"{key} has another parent")
        if t.parent:
            need(self.names_record(t.parent, t.parent_check), f"{key} has another parent")
        return t

    def root_nodes(self, t):
        nodes = {}
        if t.parent:
            nodes = dict(self.nodes(t.parent))
        elif t.base is not None:
            nodes = {p: (d, runs) for p, d, _, _, runs in self.manifest(t.base)}
        for p in t.deleted:
            nodes.pop(path_(p), None)
        inside = t.manifest and t.manifest[0] == "manifest"
        for p, d, flags, _, runs in self.manifest(t.manifest, front=None if inside else t.front, key=t.key):
            need(flags & 1, "a node of a root has not flag 1")
            nodes[p] = (d, runs)
        return nodes

    def apply(self, nodes, r):
        if r.void or r.alive is not None or r.source:
            return nodes
        if r.replaces or "" in r.deleted:
            nodes = {}
        elif r.deleted:
            gone = set(r.deleted)
            nodes = {p: n for p, n in nodes.items() if p not in gone and gone.isdisjoint(groups_of(p))}
        return self.add(dict(nodes), r)

    def add(self, nodes, r):
        created = set()
        for manifest in self.manifests(r):
            made = set()
            for p, document, flags, compaction, runs in manifest:
                compacted = compaction.segments if compaction else 0
                if p not in nodes or (flags & 1 and p not in created):
                    need(flags & 1, f"version {r.version} adds to {p!r}, which is missing")
                    nodes[p] = (document, runs[compacted:])
                    made.add(p)
                    continue
                before, below = nodes[p]
                if not flags & 1:
                    need(
                        document == before or (flags & 2 and grown(before, document)), f"document of {p!r} differs"
                    )
                if compaction:
                    top = max((i + 1 for i, s in enumerate(below) if not isinstance(s, dict)), default=0)
                    below = without(below[:top], compaction) + runs[:compacted] + without(below[top:], compaction)
                nodes[p] = (document, below + runs[compacted:])
            created |= made
        return nodes

    def chain(self, v, tags=False):
        """The usable root (or None) and the records from which the tree of v is made."""
        r = v // self.every_root * self.every_root
        while True:
            records = [self.record(n) for n in range(r + 1, v + 1)]
            try:
                root = self.root(r) if r else None
                if root and not tags and not any(x.replaces and not x.void for x in records):
                    self.root_nodes(root)
            except Refused:  # also if it is newer: roots only save time
                r -= self.every_root
                continue
            need(not any(0 < x.resumes <= v for x in records), f"version {v} lacks a lost commit")
            return root, records

    def nodes(self, v):
        """The nodes of the head of v."""
        if v not in self.trees:
            root, records = self.chain(v)
            starts = [i for i, r in enumerate(records) if r.replaces and not r.source and not r.void]
            nodes = self.root_nodes(root) if root and not starts else {}
            for r in records[starts[-1] if starts else 0 :]:
                nodes = self.apply(nodes, r)
            self.trees[v] = nodes
        return self.trees[v]

    def tree(self, v):
        """Paths of version v with (document, runs)."""
        if self.expired(v):
            raise Expired(f"version {v} has expired")
        nodes = self.add({}, self.record(v)) if v and self.record(v).source else self.nodes(v)
        documents = {p: parse_document(d) for p, (d, _) in nodes.items()}
        arrays = {p for p, d in documents.items() if d["node_type"] == "array"}
        need("" not in arrays, "the root is an array")
        for p in nodes:
            need(arrays.isdisjoint(groups_of(p)), f"{p!r} is below an array")
        return {p: (documents[p], nodes[p][1]) for p in sorted(nodes)}

    def tags(self, v=None):
        v = self.newest() if v is None else v
        root, records = self.chain(v, tags=True)
        tags = dict(root.tags) if root else {}
        for r in records:
            for t in r.dropped:
                tags.pop(t, None)
            tags.update(dict.fromkeys(r.tags, r.version))
            tags.update(r.tagged)
            if r.alive is not None:
                tags = {t: n for t, n in tags.items() if n == r.version or n in r.alive}
        return tags

    # arrays

    def segment(self, s):
        data = self.part(s.key, s.offset, s.length)
        need(checksum(data) == s.check, f"a segment of {s.key} has a wrong checksum")
        at, n = [0, 8, 12, 20, 28], s.rows
        rows = parse_rows(*(data[a * n : b * n] for a, b in itertools.pairwise(at)), data[28 * n :], s.own)
        need(all(a[0] < b[0] for a, b in itertools.pairwise(rows)), "numbers of a segment out of order")
        need(rows[0][0] == s.first and rows[-1][0] == s.last, "range of a segment differs")
        need(sum(r[3] for r in rows) == s.stored, "size of a segment differs")
        return {r[0]: r for r in rows}

    def chunks(self, runs, total):
        """The row of each chunk number."""
        found = {}
        for run in reversed(runs):
            if not isinstance(run, dict):
                need(run.last < total, "a chunk outside of the grid")
                if all(n in found for n in range(run.first, run.last + 1)):
                    continue
                run = self.segment(run)
            for n, row in run.items():
                need(n < total, "a chunk outside of the grid")
                found.setdefault(n, row)
        return found

    def chunk(self, row):
        _, pack, offset, length, checks = row
        data = pack[offset : offset + length] if isinstance(pack, bytes) else self.part(pack, offset, length)
        for i in range(len(checks) // 16):
            need(
                checksum(data[i * MIB : (i + 1) * MIB]) == checks[16 * i : 16 * i + 16],
                "a chunk has a wrong checksum",
            )
        return data

    def read(self, v, path, tree=None):
        document, runs = (tree or self.tree(v))[path]
        need(document["node_type"] == "array", f"{path!r} is a group")
        a = document["_array"]
        grid = [-(-s // c) for s, c in zip(a.shape, a.chunk, strict=True)]
        rows = self.chunks(runs, math.prod(grid))
        out = np.empty(a.shape, a.type.dtype)
        for n, at in enumerate(np.ndindex(*grid)):
            place = tuple(slice(i * c, min((i + 1) * c, s)) for i, c, s in zip(at, a.chunk, a.shape, strict=True))
            if n in rows:
                part = decode(self.chunk(rows[n]), a.codecs, a.type, tuple(a.chunk), a.fill)
                out[place] = part[tuple(slice(0, p.stop - p.start) for p in place)]
            else:
                need(a.sparse, f"chunk {n} of {path!r} is missing")
                out[place] = a.type.fill(a.fill)
        return out
