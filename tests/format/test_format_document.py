"""The examples and tables of the format's FORMAT.md agree with the code."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import xxhash
from msgspec import msgpack, structs

import tstore.sync as tstore
from tstore.core.format import layout
from tstore.core.format.bounds import max_object_size
from tstore.core.format.checksums import digest
from tstore.core.format.frame import LINK_SIZE, MAGIC, Link, check_of, linked, seal, unseal
from tstore.core.format.layout import root_chain
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.collection import Collection
from tstore.core.format.objects.compactions import CompactionEntry
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.object_ref import PAGE_HEADER, ObjectRef, Page, PagePlace
from tstore.core.format.objects.pages import decode_page
from tstore.core.format.objects.records import Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import SEGMENT_ROW
from tstore.core.log.marker import Marker
from tstore.core.transactions.staged_manifest import short_manifest
from tstore.errors import UnsupportedFormat

TEXT = Path(layout.__file__).with_name("FORMAT.md").read_text()
LOG = UUID("00112233-4455-6677-8899-aabbccddeeff")
TRANSACTION = "c73c73bd90789e4072a56afa"
PACK = f"txn/{TRANSACTION}/pack-34e16238-0"
VALUES = np.array([1, 2, 3, 0], "<i2").tobytes()


def dumps() -> list[bytes]:
    """Return the bytes of each hexadecimal dump in the document, whose lines begin with their offsets."""
    found: list[bytes] = []
    for offset, digits in re.findall(r"^    ([0-9a-f]{4})  ([0-9a-f ]+)$", TEXT, re.MULTILINE):
        if offset == "0000":
            found.append(b"")
        assert int(offset, 16) == len(found[-1])
        found[-1] += bytes.fromhex(digits)
    return found


def names_after(before: str) -> list[str]:
    """Return the names in the first table that follows a text of the document."""
    table = TEXT[TEXT.index(before) :]
    rows = itertools.takewhile(lambda line: line.startswith("|"), table[table.index("\n|") + 1 :].splitlines())
    return [match[1] for row in rows if (match := re.match(r"\| (?:\d+–\d+ \| )?`(\w+)` \|", row))]


def document_of(record: Record) -> bytes:
    """Return the only document in a record's only manifest."""
    [manifest] = record.manifests
    assert isinstance(manifest, Manifest)
    [document] = manifest.documents
    return document


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """The record that a store writes for the example, with the example's id and time."""
    store = tstore.open(tmp_path / "store", mode="x")
    with store.transaction("hello", tag="first") as tx:
        tx.create_array("w", shape=(3,), dtype="int16", chunks=(2,)).write(np.array([1, 2, 3], "int16"))
    data = (tmp_path / "store" / "commits" / f"{1:020}").read_bytes()
    return structs.replace(decode(data, Record), transaction=TRANSACTION, time=1796031437.5)


def test_record(record: Record) -> None:
    assert dumps()[0] == linked(encode(record), Link(LOG.bytes))


def test_places_in_record(record: Record) -> None:
    data, body = dumps()[0], []
    for places in re.findall(r"^\| ([0-9a-f]{4}.*?) \|", TEXT[TEXT.index("**A record**") :], re.MULTILINE):
        for place in places.split(", "):
            first, _, last = place.partition("–")
            body.append(data[int(first, 16) : int(last or first, 16) + 1])
    head, count, *fields, link, check = body
    assert head + count + b"".join(fields) + link + check == data
    assert (head[:6], len(link), check) == (MAGIC, LINK_SIZE, digest(data[:-16]))
    assert count == bytes([0x90 + 12])
    decoded = [msgpack.decode(field) for field in fields[:-1]]
    expected = [record.transaction, 0, record.time, "hello", ["first"], False, []]
    assert decoded[:-1] == expected
    assert msgpack.decode(b"\x94" + fields[-1]) == [8, False, {}, True]


def test_page(record: Record) -> None:
    rows = [ChunkRow(i, PACK, at, 4, digest(VALUES[4 * i :][:4])) for i, at in ((0, 0), (1, 4), (1, 12))]
    document = document_of(record)
    frame = encode(short_manifest([("w/0", document, 1), ("w/1", document, 0)], [2, 1], rows))
    assert dumps()[1] == len(frame).to_bytes(PAGE_HEADER, "little") + frame
    assert f"`length` {len(frame)} and `check` `{check_of(frame).hex()}`" in " ".join(TEXT.split())
    page = decode_page(frame, PACK, PagePlace(Page("w/0", 2, len(frame), check_of(frame)), PAGE_HEADER, None))
    assert page.table.rows == rows
    assert len(document) == 306


def test_marker_and_checksums() -> None:
    marker = Marker(1, LOG, "2026-11-30T09:37:17+00:00").encode()
    assert f"\n    {marker.decode()}\n" in TEXT
    text = f"1\n{LOG}\n2026-11-30T09:37:17+00:00"
    assert json.loads(marker)["checksum"] == xxhash.xxh3_128_hexdigest(text.encode())
    assert repr(text).strip("'") in TEXT
    for data in (b"", b"tstore", VALUES[:4], VALUES[4:]):
        assert digest(data).hex()[:6] in TEXT
    assert digest(b"tstore").hex() in TEXT


@pytest.mark.parametrize(
    ("before", "fields"),
    [
        ("## 5. Records", Record.__struct_fields__),
        ("**Collections.**", Collection.__struct_fields__),
        ("## 8. Manifests", Manifest.__struct_fields__),
        ("**Segments.**", SEGMENT_ROW.names),
        ("**Compactions.**", CompactionEntry.__struct_fields__),
        ("**References.**", ObjectRef.__struct_fields__),
        ("**Pages.**", Page.__struct_fields__),
        ("**Roots**", Root.__struct_fields__),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields(before: str, fields: tuple[str, ...]) -> None:
    assert names_after(before) == list(fields)


def test_places_in_segment() -> None:
    table = TEXT[TEXT.index("**Segments.**") : TEXT.index("**Compactions.**")]
    places = re.findall(r"^\| (\d+)–(\d+) \| `(\w+)`", table, re.MULTILINE)
    assert SEGMENT_ROW.fields is not None
    assert {n: (int(a), int(b) + 1 - int(a)) for a, b, n in places} == {
        name: (offset, dtype.itemsize) for name, (dtype, offset, *_) in SEGMENT_ROW.fields.items()
    }


def test_versions_of_frames() -> None:
    table = TEXT[TEXT.index("## 4. Frames") : TEXT.index("## 5. Records")]
    last = max(map(int, re.findall(r"^\| (\d) \|", table, re.MULTILINE)))
    assert f"above {last}" in table
    unseal(seal(b"M", last, b""), b"M")
    with pytest.raises(UnsupportedFormat):
        unseal(seal(b"M", last + 1, b""), b"M")


def test_limits_and_parents_of_roots() -> None:
    sizes = [max_object_size(key) for key in ("tstore.json", "latest", "archives/1", "roots/1", "txn/a/part-1")]
    assert sizes == [4 << 10, 64, 32 << 20, 1 << 30, 8 << 20]
    assert "4 KiB; 64 bytes" in TEXT
    assert root_chain(64 * 27) == [64 * n for n in (16, 20, 24, 25, 26, 27)]


def test_structure(tmp_path: Path) -> None:
    values = np.ones(1)
    tree = {"w": values, "n": None, "t": (1, np.float32(2)), "e": {5: values, "5": values}}
    tstore.save(tmp_path / "store", tree, step=0)
    example = TEXT[TEXT.index('    ["dict",[[["str","w"]') :].split("\n\n")[0]
    assert tstore.open(tmp_path / "store").snapshot().attributes()["tstore"]["structure"] == json.loads(example)
