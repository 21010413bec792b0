"""Pages of manifests: golden bytes, lookups compared with a dict, and damaged or lying bytes."""

from __future__ import annotations

import base64
import itertools
import uuid
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.thresholds import Thresholds
from tstore.core.format import layout
from tstore.core.format.frame import seal
from tstore.core.format.layout import root_key
from tstore.core.format.objects import pages as module
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.object_ref import MAX_PAGES, ObjectRef, Page
from tstore.core.format.objects.pages import StoredManifest, check_object, decode_page, manifests_in, stored
from tstore.core.format.objects.records import Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.roots import StoredRoot, decode_root, decode_root_at_end, stored_root
from tstore.core.format.objects.segments import NO_SOURCE, Segment, SortedRun
from tstore.core.format.tree import tree as tree_module
from tstore.core.format.tree.node import differs
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.stored_nodes import ManifestNodes
from tstore.core.format.tree.tree import Tree
from tstore.core.log.pages import PageReader
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability
from tstore.errors import Corrupt, InvalidArgument

KEY = "txn/a/manifest-0"
ARRAY = (
    b'{"zarr_format":3,"node_type":"array","shape":[99],"data_type":"int8","chunk_grid":{"name":"regular",'
    b'"configuration":{"chunk_shape":[1]}},"chunk_key_encoding":{"name":"default"},"fill_value":0,"codecs":'
    b'[{"name":"bytes"}]}'
)
GROUP = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
GOLDEN_REFERENCE = (
    "baQlXa%EBloS|U>%Rl%4000000HBb<kdc<AZ(?d?V|1`|cy2FYFKuCNX=Y_}bS*H=28_fI^uHH>k`czU{ZAqMuT6K%0F;!V0nCKN5F}("
    "QNU63xYw~FjXJ+1^=ai*qFfU;+0nGuT#1MWn6QQ0E6_n6FV^p%;_D__hXD}~eF#^p34a5*?==g$F72Q;EU#&d6pi2&vrDrfNVKV~F0y)"
    "GG^uHH>k`czU{ZAqMuT6K%0K$O700000000000000000000000000000000000000000000000000Wc=z1KNFK5v@htSKsQ@X"
)
GOLDEN_OBJECT = (
    "ga7~l00000baQlXa%D{c+yD`%ZDDR{W@U49kdTqYHG3j@VRCX`W^ZzBVRRxoGb|!*Z)9a(ba`-PB03^xa&L8TA}k_dbaZlQVs&(7"
    "b0Ru>eSMLj!~_5U006`R0mKLZ000000002Q0K@>q0K@>q0K@>q0K@>0BxEc|skS|9@@WufX5OLaq5%K^00000baQlXa%D{c+yD`%"
    "ZDDR{W@U49lB{%iZZBakaA9L>EikNfcy2FYFK}UFYb`O5k;L44B6?wRa$ja|a&2LBB04iHB5rSFWnXl8aAhJoB4KiJVR<4fB6DbA"
    "aAhJoTRAyhEFxrKbYWj~d2nSSIwEOqbT}d`B4cQEZfjp>a%p5DI(s5+VQpn1IwEpqXLW30aw04uV{dL|X=inEVRUJ4ZX!B+B4cQE"
    "Zfjq2Xkl<=B05_!U44BlB4cQEZfjp_WqDs^Zewp`X>MmCI(s5+VQpn1IwE9cW?^+~bRvB$B4%l9Y+rU^Y;|QKIxs9EV{c?-V{;-p"
    "TYDmIVQpn1IwE3ubY*iQeO-N#rDrfNVKBr500000!~p@s2m$~A000000K^ag0000000001000000002Q2mk;8009610K^ag00000"
    "00001000000002Q5CH%H0000000961000000K_0;V`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F2)0K@>q0FZt&6QQ0E6_n6F"
    "V^p%;_D>B000000004AzbZ>HHO#$2h5vXlpZfRy^b99odba-wrVJ~oDV{0uitaNy8FJUimVPk78F_4kO+<PK=VRCX`W^ZzBVRRxo"
    "Gb|!*Z)9a(ba`-PB03^ra&lpLA}k_vXkl<=B05_+IbAFwWMOn+UvznJWg<EvX>N2lA}k_fXmxIDUuSY@WFk6yB5q-AWg<Eva%E?A"
    "Y+-UDEFxoXZf0p`b#h^JX>V>KI(s5xXmxIDUvp?-aAhJoTQOaIeJmnlXmxIDUu$J~UuAA%Z)9n1XCgX#B5q-AWg<EvWMyVyb!>DZ"
    "eJmnoX>4p?c42IFWg<E-EFxoXWMyM>B05`pB5q-AWg<EvVtI6Bb0U3ReUhbTFfU;-rDrfNVKT%B0000000000!~y{U#1I1j00000"
    "0003100000006`w00000000000RR91000000ssI2000000000000000#1H@g000310000000000006`w00000000000RR9100000"
    "0ssI2000000000000000#2^6x00000000310000000031000000003100000006{5V`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1u"
    "V`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1u!~nzq!~l?L==g$F72Q;EU#&d6pi2%p0ssI20001Vb98TVWlaIx01>Ed"
    "VQy(=Wpi|rtaNy8FJUimVPk78FsyWVZZBakaA9L>EisUh#N2x#dSP;MUuJJ|ZDDjGIx{RHZf|5|UvznJWg<EvVRCX|c_J(#b7*03"
    "Wg<FTIXPV{B4lB7VPAB4aAhJoB57`PI3g?}V`z15YhPz_X=EZgdm?UOZDk@lB64MCb!=gBA}k_fZ*FF3XLWL6bZKvHB075_V`z15"
    "YhQC{VQ^(4I$JSaeSIt<V`z15YhP<+d0%C2V{c?>Zf7Dodm?UOZDk@lB4lM|VRdYDB7H0(W@&6}Uv^<^b!8$tFf1ZtZ)9a-b0Ruh"
    "dm?UOZDk@lB4T-TWpg5ZU44?JXD}~eGo@!SFJUmm2mk;8000000K@_T0mKjj0000000003000000002QC;$Ke000000096100000"
    "0000000000009610000000IC2000000K^mk000010000000001000000002QC;$Ke00000009610000000000000000096100000"
    "00IC2000000K_N(0000000001000000000100000000010000000001000000002QP-A0bV`F1uV`F1uV`F1uV`F1uV`F1uV`F1u"
    "V`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uW5fW&0K@>0^uHH>k`czU{ZAqMuT6K%"
)

GOLDEN_ROOT = (
    "ga7~l00000baQlXa%D{c+yD`%ZDDR{W@U49kdTqYHG3j@VRCX`W^ZzBVRRxoGb|!*Z)9a(ba`-PB03^xa&L8TA}k_dbaZlQVs&(7b0Ru"
    ">eSMLj!~_5U006`R0mKLZ000000002Q0K@>q0K@>q0K@>q0K@>0BxEc|skS|9@@WufX5OLaq5%K^00000baQlXa%D{c+yD`%ZDDR{W@U"
    "49lB{%iZZBakaA9L>EikNfcy2FYFK}UFYb`O5k;L44B6?wRa$ja|a&2LBB04iHB5rSFWnXl8aAhJoB4KiJVR<4fB6DbAaAhJoTRAyhEF"
    "xrKbYWj~d2nSSIwEOqbT}d`B4cQEZfjp>a%p5DI(s5+VQpn1IwEpqXLW30aw04uV{dL|X=inEVRUJ4ZX!B+B4cQEZfjq2Xkl<=B05_!U"
    "44BlB4cQEZfjp_WqDs^Zewp`X>MmCI(s5+VQpn1IwE9cW?^+~bRvB$B4%l9Y+rU^Y;|QKIxs9EV{c?-V{;-pTYDmIVQpn1IwE3ubY*iQ"
    "eO-N#rDrfNVKBr500000!~p@s2m$~A000000K^ag0000000001000000002Q2mk;8009610K^ag0000000001000000002Q5CH%H0000"
    "000961000000K_0;V`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F2)0K@>q0FZt&6QQ0E6_n6FV^p%;_D>B000000004AzbZ>HHO#$"
    "2h5vXlpZfRy^b99odba-wrVJ~oDV{0uitaNy8FJUimVPk78F_4kO+<PK=VRCX`W^ZzBVRRxoGb|!*Z)9a(ba`-PB03^ra&lpLA}k_vXk"
    "l<=B05_+IbAFwWMOn+UvznJWg<EvX>N2lA}k_fXmxIDUuSY@WFk6yB5q-AWg<Eva%E?AY+-UDEFxoXZf0p`b#h^JX>V>KI(s5xXmxIDU"
    "vp?-aAhJoTQOaIeJmnlXmxIDUu$J~UuAA%Z)9n1XCgX#B5q-AWg<EvWMyVyb!>DZeJmnoX>4p?c42IFWg<E-EFxoXWMyM>B05`pB5q-A"
    "Wg<EvVtI6Bb0U3ReUhbTFfU;-rDrfNVKT%B0000000000!~y{U#1I1j000000003100000006`w00000000000RR91000000ssI20000"
    "00000000000#1H@g000310000000000006`w00000000000RR91000000ssI2000000000000000#2^6x00000000310000000031000"
    "000003100000006{5V`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1u!~nzq!~"
    "l?L==g$F72Q;EU#&d6pi2%p0ssI20001Vb98TVWlaIx01>EdVQy(=Wpi|rtaNy8FJUimVPk78FsyWVZZBakaA9L>EisUh#N2x#dSP;MU"
    "uJJ|ZDDjGIx{RHZf|5|UvznJWg<EvVRCX|c_J(#b7*03Wg<FTIXPV{B4lB7VPAB4aAhJoB57`PI3g?}V`z15YhPz_X=EZgdm?UOZDk@l"
    "B64MCb!=gBA}k_fZ*FF3XLWL6bZKvHB075_V`z15YhQC{VQ^(4I$JSaeSIt<V`z15YhP<+d0%C2V{c?>Zf7Dodm?UOZDk@lB4lM|VRdY"
    "DB7H0(W@&6}Uv^<^b!8$tFf1ZtZ)9a-b0Ruhdm?UOZDk@lB4T-TWpg5ZU44?JXD}~eGo@!SFJUmm2mk;8000000K@_T0mKjj00000000"
    "03000000002QC;$Ke0000000961000000000000000009610000000IC2000000K^mk000010000000001000000002QC;$Ke0000000"
    "961000000000000000009610000000IC2000000K_N(0000000001000000000100000000010000000001000000002QP-A0bV`F1uV"
    "`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uW5fW&0K@>0^uHH>"
    "k`czU{ZAqMuT6K%baQlXa%EHonLxx4V`F1uV`F1uV`F1uV`F1ufuVE(mZooFYGq?|x^i!CbaO8-FfcGMFfcGMFfcGMFfcGMFg7&J28_f"
    "I^uHH>k`czU{ZAqMuT6K%0F;!V0nCKN5F}(QNU63xYw~FjXJ+1^=ai*qFfU;+0nGuT#1MWn6QQ0E6_n6FV^p%;_D__hXD}~eF#^p34a5"
    "*?==g$F72Q;EU#&d6pi2&vrDrfNVKV~F0y)GG^uHH>k`czU{ZAqMuT6K%z>oj{#1H@g000000000000000006UIgoEtdT(O2Gv|dbLv+"
    "V8w00000000"
)


@pytest.fixture(autouse=True)
def short(thresholds: Thresholds) -> None:
    """Make pages of a few nodes."""
    thresholds(PAGE_BYTES=300, SHORT_MANIFEST=300)


def table_of(*numbers: int, by: str = "a") -> ChunkTable:
    return ChunkTable.from_rows([ChunkRow(n, f"txn/{by}/pack-{n % 2}", n, 1, b"c" * 16) for n in numbers])


def manifest_of(paths: list[str]) -> Manifest:
    return Manifest.from_nodes(
        [
            (p, ARRAY if p else GROUP, True, (table_of(*range(at % 3 + 1)),) if p else ())
            for at, p in enumerate(paths)
        ]
    )


PATHS = ["", *(f"g{n // 4}/a{n % 4}" for n in range(12))]


class Memory:
    """The pages of objects in memory, and which were read."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.read: list[int] = []

    def write(self, manifest: Manifest, key: str = KEY) -> Nodes:
        reference, self.objects[key] = stored(key, manifest)
        assert reference.pages
        return Nodes.from_pages(reference, self)

    def load(self, reference: ObjectRef, start: int, stop: int) -> list[ManifestNodes]:
        self.read += range(start, stop)
        places = [reference.place(at) for at in range(start, stop)]
        data = self.objects[reference.key]
        return [
            ManifestNodes(decode_page(data[p.offset : p.offset + p.page.length], reference.key, p)) for p in places
        ]

    def has(self, reference: ObjectRef, at: int) -> bool:
        return False


def test_golden_bytes() -> None:
    reference, data = stored(KEY, manifest_of(PATHS[:6]))
    record = Record("a", 1, 1.5, manifests=(reference,))
    assert encode(record)[7] == 5  # so that an older tstore does not take it for one frame
    assert base64.b85encode(encode(record)).decode() == GOLDEN_REFERENCE
    assert base64.b85encode(data).decode() == GOLDEN_OBJECT
    [read] = decode(base64.b85decode(GOLDEN_REFERENCE), Record).manifests
    assert read == reference
    assert [p for m in manifests_in(reference, data) for p in m.paths] == PATHS[:6]
    assert [page.first for page in reference.pages] == ["", "g0/a0", "g0/a1", "g0/a3"]


def test_a_short_manifest_is_one_frame() -> None:
    manifest = manifest_of(PATHS[:1])
    reference, data = stored(KEY, manifest)
    assert (reference.pages, data) == ((), encode(manifest))
    assert list(manifests_in(reference, data)) == [manifest]


def test_a_page_has_a_bounded_number_of_nodes(thresholds: Thresholds) -> None:
    manifest = manifest_of(PATHS)
    thresholds(MANIFEST_NODES=3, PAGE_BYTES=manifest.size - 1, SHORT_MANIFEST=manifest.size - 1)
    reference, data = stored(KEY, manifest)
    assert [page.nodes for page in reference.pages] == [3, 3, 3, 3, 1]
    assert [path for m in manifests_in(reference, data) for path in m.paths] == PATHS


@pytest.mark.parametrize("paths", [["b", "a"], ["a", "b", "b"]])
def test_nodes_out_of_order_or_listed_twice_are_refused(paths: list[str]) -> None:
    manifest = replace(manifest_of([f"n{i}" for i in range(len(paths))]), paths=tuple(paths))
    with pytest.raises(Corrupt, match="out of order, or one is listed twice"):
        decode(seal(b"M", 1, msgspec.msgpack.encode(manifest)), Manifest)


def test_more_nodes_than_a_page_holds_are_refused_before_they_are_decoded() -> None:
    fields = [f"{i:06}" for i in range((1 << 17) + 1)]
    body = ["manifest", [], [], [], fields, *[b""] * 8]
    with pytest.raises(Corrupt, match="a manifest without pages has 131,073 nodes or documents, over 131,072"):
        decode(seal(b"M", 1, msgspec.msgpack.encode(body)), Manifest)


def test_golden_bytes_of_a_root_in_pages() -> None:
    root, data = stored_root(Root(64, b"c" * 16, {"t": 1}, manifest_of(PATHS[:6])))
    assert data == base64.b85decode(GOLDEN_ROOT)
    assert isinstance(root.manifest, ObjectRef)
    assert decode_root(data) == root
    start = root.manifest.length
    assert data[start : start + 8] == b"tstoreT\x06"
    assert decode_root_at_end(data[start - 5 :], len(data)) == root
    for at in range(len(data)):
        with pytest.raises(Corrupt):
            decode_root(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for wrong in (b"", data[:-1], data + b"\0", data[8:], data[start:], data[start:-8]):
        with pytest.raises(Corrupt):
            decode_root(wrong)
    with pytest.raises(Corrupt):
        decode_root_at_end(data[start + 1 :], len(data))


def test_long_names_make_longer_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NAMES", 1000)
    reference, data = stored(KEY, manifest_of([f"{n:03}{'x' * 200}" for n in range(40)]))
    assert 2 <= len(reference.pages) <= 5
    assert sum(len(page.first) for page in reference.pages) <= 1000
    assert sum(len(m.paths) for m in manifests_in(reference, data)) == 40


def test_a_page_has_only_the_packs_documents_and_segments_of_its_nodes() -> None:
    segments = [Segment(n, n, 1, 5, (f"txn/a/pack-{n}",), f"txn/a/pack-9{n}", 0, 44, b"s" * 16) for n in range(9)]
    documents = [ARRAY.replace(b"[99]", b"[9%d]" % n) for n in range(9)]
    nodes = [
        (f"a{n}", documents[n], n % 2 == 0, (SortedRun([segments[n]], NO_SOURCE), table_of(n, by=str(n))))
        for n in range(9)
    ]
    whole = Manifest.from_nodes(nodes)
    reference, data = stored(KEY, whole)
    pages = list(manifests_in(reference, data))
    assert len(pages) > 3
    assert sum(page.segment_bytes for page in pages) == reference.segment_bytes == 9 * 44
    for page in pages:
        used = {f"txn/a/pack-{p[1:]}" for p in page.paths} | {f"txn/a/pack-9{p[1:]}" for p in page.paths}
        assert set(page.packs) == used | {f"txn/{p[1:]}/pack-{int(p[1:]) % 2}" for p in page.paths}
        assert page.documents == tuple(documents[int(p[1:])] for p in page.paths)
    joined = [node for page in pages for node in page.nodes()]
    for (path, document, flag, tables), expected in zip(joined, whole.nodes(), strict=True):
        assert (path, document.data, flag) == (expected[0], expected[1].data, expected[2])
        assert [getattr(t, "segments", None) or t.rows for t in tables] == [
            getattr(t, "segments", None) or t.rows for t in expected[3]
        ]


def test_a_lookup_reads_one_page_and_a_group_those_in_its_range() -> None:
    memory = Memory()
    nodes = memory.write(manifest_of(PATHS))
    assert (len(nodes), bool(nodes), memory.read) == (13, True, [])
    assert nodes["g1/a2"].chunk_count == nodes["g1/a2"].chunk_count
    [page] = memory.read
    memory.read.clear()
    assert sorted(nodes.at_or_below("g1")) == PATHS[5:9]
    assert page in memory.read
    assert len(set(memory.read)) <= 3
    memory.read.clear()
    assert nodes.get("zzz") is None
    assert "g2/a9" not in nodes
    assert len(memory.read) == 1  # the last page has both places
    memory.read.clear()
    changed = nodes.after([Manifest.from_nodes([("g2/a0", ARRAY, False, (table_of(5),))])])
    assert not memory.read  # writing a chunk of a stored array reads nothing
    assert 5 in changed["g2/a0"].chunks.number.tolist()
    assert changed["g2/a0"].chunk_count == nodes["g2/a0"].chunk_count + 1


NAMES = st.sampled_from(["", "a", "a/b", "a-b", "a/b/c", "a0", "b", "b/a", "b/a0", "c/d/e", "ab/c", "z"])
CHANGE = st.one_of(
    st.tuples(st.just("write"), NAMES.filter(bool), st.integers(0, 9)),
    st.tuples(st.just("replace"), NAMES.filter(bool), st.integers(0, 9)),
    st.tuples(st.just("delete"), NAMES, st.just(0)),
)


@given(st.sets(NAMES, min_size=4), st.lists(CHANGE, max_size=12), st.lists(NAMES), st.booleans())
def test_lookups_equal_those_in_a_dict(
    paths: set[str], changes: list[tuple[str, str, int]], lookups: list[str], look_between: bool
) -> None:
    """The nodes in pages, in several manifests, and in one, with changes and lookups between them."""
    manifest = manifest_of(sorted(paths))
    cuts = [0, len(paths) // 2, len(paths)]
    every = [
        Memory().write(manifest),
        Nodes.from_manifests([manifest]),
        Nodes.from_manifests([manifest.part(a, b) for a, b in itertools.pairwise(cuts)]),
    ]
    expected: dict[str, dict[int, str]] = {
        path: {row.number: "a" for row in (tables[0].rows if tables else [])}
        for path, *_, tables in manifest.nodes()
    }
    for at, (kind, path, number) in enumerate(changes):
        by = f"t{at}"
        if kind == "delete":
            below = [p for p in expected if not path or p == path or p.startswith(f"{path}/")]
            expected = {p: rows for p, rows in expected.items() if p not in below}
            every = [nodes.without([path]) for nodes in every]
        elif kind == "replace" or path in expected:
            rows = {} if kind == "replace" else expected[path]
            expected[path] = {**rows, number: by}
            change = Manifest.from_nodes([(path, ARRAY, kind == "replace", (table_of(number, by=by),))])
            every = [nodes.after([change]) for nodes in every]
        if look_between:
            assert len({nodes.get(path) is None for nodes in every}) == 1
    for nodes in every:
        assert sorted(nodes) == sorted(expected)
        assert len(nodes) == len(expected)
        assert bool(nodes) == bool(expected)
        assert sorted(nodes.array_paths()) == sorted(path for path in expected if path)
        for path in (*expected, *lookups):
            node, rows = nodes.get(path), expected.get(path)
            assert (node is None, path in nodes) == (rows is None, rows is not None)
            if node is not None and rows is not None:
                assert {r.number: r.pack for r in node.chunks.rows} == {
                    n: f"txn/{by}/pack-{n % 2}" for n, by in rows.items()
                }
            below = [p for p in expected if not path or p == path or p.startswith(f"{path}/")]
            assert sorted(nodes.at_or_below(path)) == sorted(below)
    assert not any(differs(every[0][path], every[1][path]) for path in expected)


def test_damage_to_any_byte_is_noticed() -> None:
    reference, data = stored(KEY, manifest_of(PATHS))
    assert len(reference.pages) > 3
    for place in reference.places():
        page = data[place.offset : place.offset + place.page.length]
        assert decode_page(page, KEY, place).paths[0] == place.page.first
        for at in range(len(page)):
            with pytest.raises(Corrupt, match=KEY):
                decode_page(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :], KEY, place)
        for wrong in (b"", page[:-1], page + b"\0"):
            with pytest.raises(Corrupt, match=KEY):
                decode_page(wrong, KEY, place)
    check_object(data)
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(Corrupt, match=KEY):
            list(manifests_in(reference, damaged))
        with pytest.raises(Corrupt):
            check_object(damaged)
    for wrong in (b"", data[:-1], data + b"\0", data[8:]):
        with pytest.raises(Corrupt):
            check_object(wrong)


def test_a_page_with_other_nodes_than_its_reference_is_corrupt() -> None:
    def object_of(*listed: list[str]) -> StoredManifest:
        frames = [encode(manifest_of(paths)) for paths in listed]
        pages = [Page(p[0], len(p), len(f), f[-16:]) for p, f in zip(listed, frames, strict=True)]
        data = b"".join(len(f).to_bytes(8, "little") + f for f in frames)
        return StoredManifest(ObjectRef(KEY, len(data), data[-16:], 0, tuple(pages)), data)

    def loaded(reference: ObjectRef, data: bytes) -> None:
        reference.validate()
        memory = Memory()
        memory.objects[KEY] = data
        list(Nodes.from_pages(reference, memory).items())

    good, data = object_of(["a", "b"], ["c", "d"])
    loaded(good, data)
    first, last = good.pages
    forged = {
        "another first path": [replace(first, first="Z"), last],
        "fewer nodes": [replace(first, nodes=1), last],
        "more nodes": [first, replace(last, nodes=1 << 20)],
        "a range that ends earlier": [first, replace(last, first="b")],
    }
    for pages in forged.values():
        with pytest.raises(Corrupt, match=KEY):
            loaded(replace(good, pages=tuple(pages)), data)
    for listed in (["a", "d"], ["c", "e"]), (["b", "a"], ["c", "d"]), (["a", "a"], ["c", "d"]):
        with pytest.raises((Corrupt, InvalidArgument)):
            loaded(*object_of(*listed))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, length=r.length + 1),
        lambda r: replace(r, check=bytes(16)),
        lambda r: replace(r, pages=r.pages[1:]),
        lambda r: replace(r, pages=r.pages[::-1]),
        lambda r: replace(r, pages=(r.pages[0], *r.pages)),
        lambda r: replace(r, pages=(replace(r.pages[0], length=r.pages[0].length + 1), *r.pages[1:])),
        lambda r: replace(r, pages=(*r.pages[:-1], replace(r.pages[-1], first="a//b"))),
        lambda r: replace(r, pages=(*r.pages[:-1], replace(r.pages[-1], nodes=0))),
        lambda r: replace(r, pages=(*r.pages[:-1], replace(r.pages[-1], nodes=1 << 60))),
        lambda r: replace(r, pages=(*r.pages[:-1], replace(r.pages[-1], length=1 << 61))),
        lambda r: replace(r, pages=(*r.pages[:-1], replace(r.pages[-1], check=b""))),
        lambda r: replace(r, pages=r.pages * MAX_PAGES),
    ],
)
def test_a_reference_that_contradicts_itself_is_refused(change: Callable[[ObjectRef], ObjectRef]) -> None:
    reference, _ = stored(KEY, manifest_of(PATHS))
    encode(Record("a", 1, 1.5, manifests=(reference,)))
    with pytest.raises(InvalidArgument):
        encode(Record("a", 1, 1.5, manifests=(change(reference),)))


def test_a_page_with_the_same_paths_and_other_contents_is_corrupt() -> None:
    """As of a manifest that another transaction wrote; its own checksum is right."""
    other = manifest_of(PATHS)
    other = Manifest.from_nodes([(p, d.data, True, (table_of(7),)) for p, d, *_ in other.nodes()])
    mine = Manifest.from_nodes([(p, d.data, True, (table_of(5),)) for p, d, *_ in other.nodes()])
    (reference, data), (_, forged) = stored(KEY, mine), stored(KEY, other)
    assert len(forged) == len(data)
    for place in reference.places():
        part = slice(place.offset, place.offset + place.page.length)
        assert decode_page(data[part], KEY, place).paths == decode(forged[part], Manifest).paths
        with pytest.raises(Corrupt, match="their checksum is another"):
            decode_page(forged[part], KEY, place)


def test_a_very_long_manifest_has_longer_pages_rather_than_too_many(thresholds: Thresholds) -> None:
    thresholds(PAGE_BYTES=1)
    paths = [f"a{n:04}" for n in range(6000)]
    reference, data = stored(KEY, Manifest.from_nodes([(path, GROUP, True, ()) for path in paths]))
    assert 100 < len(reference.pages) <= MAX_PAGES
    assert [path for page in manifests_in(reference, data) for path in page.paths] == paths


def test_a_long_list_reads_some_pages_at_once_and_not_all() -> None:
    memory = Memory()
    nodes = memory.write(manifest_of([f"a{n:03}" for n in range(600)]))
    requests: list[int] = []  # pages in each
    load = memory.load

    def counted(reference: ObjectRef, start: int, stop: int) -> list[ManifestNodes]:
        requests.append(stop - start)
        return load(reference, start, stop)

    memory.load = counted  # type: ignore[method-assign]
    for visit in (lambda: len(list(nodes)), lambda: nodes.load() or 600):
        requests.clear()
        assert visit() == 600
        assert len(set(memory.read)) > 200
        assert len(requests) < 10
        assert max(requests) <= 100


async def test_pages_are_cached_and_read_together() -> None:
    storage = MemoryStorage(uuid.uuid4().hex)
    reference, data = stored(KEY, manifest_of(PATHS))
    await storage.create(KEY, data, Durability.NONE)
    reads: list[tuple[int, int]] = []
    inner = storage.reader

    class Recorded:
        def __init__(self, key: str) -> None:
            self._reader = inner(key)

        def read_into(self, offset: int, buffers: object, size: int) -> None:
            reads.append((offset, size))
            self._reader.read_into(offset, buffers, size)

    storage.reader = Recorded
    source = PageReader(storage, NO_SOURCE)
    nodes = Nodes.from_pages(reference, source)
    assert nodes.reads(["g1/a1"])
    assert nodes["g1/a1"].path == "g1/a1"
    assert not nodes.reads(["g1/a1"])
    assert len(reads) == 1
    again = Nodes.from_pages(reference, source)
    assert again["g1/a1"] is nodes["g1/a1"]
    nodes.load()
    assert len(reads) == 3  # the pages before and behind the one that was read
    assert len(list(nodes)) == 13
    assert sum(size for _, size in reads) <= len(data)
    nodes.load()
    assert len(reads) == 3


COMMITS = st.lists(st.lists(CHANGE, max_size=3), min_size=1, max_size=30)


@given(st.sets(NAMES, min_size=5), COMMITS, st.sets(st.integers(0, 30)), st.booleans())
def test_roots_do_not_depend_on_how_their_tree_was_loaded(
    paths: set[str], commits: list[list[tuple[str, str, int]]], kept: set[int], is_saved: bool
) -> None:
    """Trees built from records alone, in memory or in pages, and from a root that was written in between."""
    memory = Memory()
    whole = manifest_of(sorted(paths))
    reference, memory.objects[KEY] = stored(KEY, whole)
    start = Record("a", 0, 1.5, manifests=(reference,) if is_saved else (whole,), replaces=is_saved)
    listed = list(manifests_in(reference, memory.objects[KEY]))
    replayed = [
        Tree.empty().after(1, start, Nodes.from_pages(reference, memory) if is_saved else [whole]),
        Tree.empty().after(1, start, listed if is_saved else [whole]),
    ]
    roots: dict[int, StoredRoot] = {}

    def opened(version: int) -> Tree:
        """Return the tree of a root over those to which it refers, as a reader that starts there."""
        root = decode_root(roots[version].data)
        return Tree.from_root(root, memory, opened(root.parent) if root.parent else None)

    with pytest.MonkeyPatch.context() as patch:
        for module in (layout, tree_module):
            patch.setattr(module, "ROOT_EVERY", 2)
        for at, changes in enumerate(commits):
            version = 2 + at
            nodes: dict[str, tuple[str, bytes, bool, tuple[ChunkTable, ...]]] = {}
            deleted = tuple(path for kind, path, _ in changes if kind == "delete" and path)
            for kind, path, number in changes:
                exists = path in replayed[0].nodes.without(deleted)
                if kind != "delete" and (kind == "replace" or exists):
                    change = (table_of(number, by=f"t{at}"),)
                    nodes[path] = (path, ARRAY, kind == "replace", change)
            manifest = Manifest.from_nodes(sorted(nodes.values()))
            record = Record(f"t{at}", version - 1, 1.5, manifests=(manifest,), deleted=deleted)
            replayed = [tree.after(version, record, [manifest]) for tree in replayed]
            if version % 2:
                continue
            root, *others = [tree.root(b"c" * 16) for tree in replayed]
            assert {other.data for other in others} <= {root.data}
            roots[version], memory.objects[root_key(version)] = root, root.data
            read = opened(version)
            assert read.root(b"c" * 16).data == root.data
            for tree in replayed:
                assert not read.differences(tree, nodes=True)
                assert len(read.nodes) == len(tree.nodes) == len(list(tree.nodes))
                assert sorted(read.nodes.array_paths()) == sorted(tree.nodes.array_paths())
                assert bool(read.nodes) == bool(tree.nodes)
            if at in kept:
                replayed.append(read)
                replayed.append(Tree(version, replayed[at % 2].nodes.compacted(), {}))


def test_what_a_root_repeats_is_what_changed_after_its_parent() -> None:
    memory, tree, roots = Memory(), Tree.empty(), dict[int, Root]()
    for version in range(1, 64 * 17 + 1):
        created = Manifest.from_nodes([(f"a{version:04}", ARRAY, True, (table_of(version % 99),))])
        tree = tree.after(version, Record("a", version - 1, 1.5, manifests=(created,)), [created])
        if version % 64 == 0:
            roots[version // 64], data = tree.root(b"c" * 16)
            memory.objects[root_key(version)] = data
    assert {n: root.parent // 64 for n, root in roots.items()} == {
        1: 0,
        2: 1,
        3: 2,
        4: 0,
        5: 4,
        6: 5,
        7: 6,
        8: 4,
        9: 8,
        10: 9,
        11: 10,
        12: 8,
        13: 12,
        14: 13,
        15: 14,
        16: 0,
        17: 16,
    }
    for n, root in roots.items():
        assert isinstance(root.manifest, ObjectRef)
        first = root.parent + 1
        assert root.manifest.pages[0].first == f"a{first:04}"
        assert sum(page.nodes for page in root.manifest.pages) == 64 * n - root.parent
    memory.read.clear()
    read = Tree.from_root(roots[17], memory, Tree.from_root(roots[16], memory))
    assert not memory.read
    assert read.nodes["a0500"].path == "a0500"
    assert len(memory.read) == 1
    assert sorted(read.nodes) == sorted(tree.nodes)
    with pytest.raises(Corrupt, match="replaced since"):
        Tree.from_root(roots[17], memory, Tree.from_root(roots[15], memory, tree))


def test_a_root_refers_to_the_pages_of_its_base() -> None:
    memory = Memory()
    reference, memory.objects[KEY] = stored(KEY, manifest_of(PATHS))
    tree = Tree(1, Nodes.from_pages(reference, memory), {})
    change = Manifest.from_nodes([("g1/a1", ARRAY, False, (table_of(9),))])
    record = Record("b", 1, 1.5, manifests=(change,), deleted=("g2",))
    root, data = tree.after(64, record, [change]).root(b"c" * 16)
    assert data[7] == 5  # so that an older tstore does not read it without its base
    assert (root.base, root.manifest.paths) == (reference, ("g1/a1",))
    assert root.deleted == ("g2/a0", "g2/a1", "g2/a2", "g2/a3")
    read = Tree.from_root(decode_root(data), memory)
    assert sorted(read.nodes) == PATHS[:9]
    assert 9 in read.nodes["g1/a1"].chunks.number.tolist()
    for change_of_root in (
        {"base": None},
        {"base": replace(reference, pages=())},
        {"base": replace(reference, key="tstore.json")},
        {"deleted": ("g1/a1",)},
        {"deleted": ("a//b",)},
        {"parent": 64},
        {"version": 128, "parent": 64},
        {"version": 128, "parent": 128, "base": None},
    ):
        with pytest.raises(InvalidArgument):
            encode(replace(root, **change_of_root))
    with pytest.raises(RuntimeError, match="not attached"):
        Tree.from_root(root).nodes.get("g0/a0")
