"""Manifests: nodes, and the references to their chunks."""

import itertools
from types import SimpleNamespace

import numpy as np

from tests.support.independent_reader.frames import MIB, array, blob, fields, key_of, names, nat, need, path_, text

MANIFEST = (
    ("kind", text), ("packs", names), ("inline", array), ("documents", array), ("paths", names),
    ("document", blob), ("replaces_node", blob), ("count", blob), ("number", blob), ("pack", blob),
    ("offset", blob), ("length", blob), ("checks", blob), ("segment_count", blob, b""),
    ("segments", blob, b""), ("segment_packs", blob, b""),
    ("compactions", array, []),
)  # fmt: skip
SEGMENT = np.dtype(
    [("first", "<u8"), ("last", "<u8"), ("rows", "<u8"), ("stored", "<u8"), ("packs", "<u4"), ("pack", "<u4"),
     ("offset", "<u8"), ("length", "<u8"), ("check", "V16")]
)  # fmt: skip


def column(data, dtype):
    need(len(data) % np.dtype(dtype).itemsize == 0, "a column is cut")
    return np.frombuffer(data, dtype)


def ascending(numbers):
    return bool(np.all(numbers[1:] > numbers[:-1]))


def parse_rows(number, pack, offset, length, checks, packs):
    """Return rows: number, pack (its key, or the bytes of an inline one), offset, length, checksums of blocks."""
    number, offset, length = (column(c, "<u8").tolist() for c in (number, offset, length))
    pack = column(pack, "<u4").tolist()
    need(len(number) == len(pack) == len(offset) == len(length), "columns of rows differ in length")
    rows, at = [], 0
    for n, p, o, size in zip(number, pack, offset, length, strict=True):
        need(p < len(packs) and o < 1 << 62 and size < 1 << 62, "a row is out of range")
        if isinstance(packs[p], bytes):
            need(o + size <= len(packs[p]), "a chunk lies outside of its inline pack")
        end = at + 16 * max(1, -(-size // MIB))
        rows.append((n, packs[p], o, size, checks[at:end]))
        at = end
    need(at == len(checks), "wrong number of checks")
    return rows


def parse_manifest(items):
    """Return nodes as (path, document, flags, compaction or None, runs); a run is a segment, or a dict of rows."""
    m = fields(items, *MANIFEST)
    need(m.kind == "manifest", "not a manifest")
    need(m.packs.count("") == len(m.inline), "wrong number of inline packs")
    inline = iter(m.inline)
    packs = [blob(next(inline)) if k == "" else (key_of("pack-", k), k)[1] for k in m.packs]
    n = len(m.paths)
    need(n <= 131072 and len(m.documents) <= 131072, "too many nodes or documents")
    paths = [path_(p) for p in m.paths]
    need(all(a < b for a, b in itertools.pairwise(paths)), "paths out of order")
    document, flags, count = column(m.document, "<u4").tolist(), m.replaces_node, column(m.count, "<u8").tolist()
    need(len(document) == len(flags) == len(count) == n, "columns of nodes differ in length")
    need(
        all(d < len(m.documents) for d in document) and all(f <= 3 for f in flags),
        "document or flags out of range",
    )
    need(all(len(blob(d)) <= 64 * MIB for d in m.documents), "a document is too long")
    rows = parse_rows(m.number, m.pack, m.offset, m.length, m.checks, packs)
    need(sum(count) == len(rows), "counts of rows do not fit")

    segments, spacks, at = [], column(m.segment_packs, "<u4").tolist(), 0
    need(all(p < len(packs) and isinstance(packs[p], str) for p in spacks), "a pack of segments is out of range")
    for s in column(m.segments, SEGMENT):
        s = SimpleNamespace(**{k: s[k].tobytes() if k == "check" else int(s[k]) for k in SEGMENT.names})
        need(s.pack < len(packs) and isinstance(packs[s.pack], str) and s.offset < 1 << 62, "pack of a segment")
        checks = s.length - 28 * s.rows
        need(
            1 <= s.rows <= 16384 and s.length <= MIB and checks % 16 == 0 and checks >= 16 * s.rows, "segment size"
        )
        need(s.first <= s.last and s.rows <= s.last - s.first + 1, "range of a segment")
        need(at + s.packs <= len(spacks), "too few packs of segments")
        s.key, s.own = packs[s.pack], [packs[p] for p in spacks[at : at + s.packs]]
        at += s.packs
        segments.append(s)
    need(at == len(spacks), "too many packs of segments")
    scount = column(m.segment_count, "<u4").tolist() or [0] * n
    need(len(scount) == n and sum(scount) == len(segments), "counts of segments do not fit")

    compactions, last = {}, -1
    for item in m.compactions:
        g = fields(item, ("node", nat), ("segments", nat), ("replaced", blob), ("numbers", blob))
        need(last < g.node < n and g.segments <= scount[g.node], "a compaction is out of range")
        last = g.node
        need(len(g.replaced) % 16 == 0 and ascending(column(g.numbers, "<u8")), "a compaction is invalid")
        g.replaced = {g.replaced[i : i + 16] for i in range(0, len(g.replaced), 16)}
        g.numbers = set(column(g.numbers, "<u8").tolist())
        compactions[g.node] = g

    nodes, r, s = [], 0, 0
    for i, p in enumerate(paths):
        own = rows[r : r + count[i]]
        need(all(a[0] < b[0] for a, b in itertools.pairwise(own)), "numbers out of order")
        runs = segments[s : s + scount[i]]
        r, s = r + count[i], s + scount[i]
        if i in compactions:
            first = runs[: compactions[i].segments]
            need(all(a.last < b.first for a, b in itertools.pairwise(first)), "compacted segments overlap")
        runs += [{row[0]: row for row in own}] if own else []
        nodes.append((p, m.documents[document[i]], flags[i], compactions.get(i), runs))
    return nodes
