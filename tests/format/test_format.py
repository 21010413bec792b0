"""Golden bytes of every persistent object. They must stay readable forever: never change them."""

from __future__ import annotations

import base64
import io
import json
import math
import tarfile
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tstore
from tstore.core.format.bounds import METADATA_VALUES
from tstore.core.format.checksums import BLOCK, BlockHash, as_checks, block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.object_ref import ObjectRef, reference
from tstore.core.format.objects.records import Collection, Fragment, LivingVersion, Part, Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.tables import overlay_each
from tstore.core.log.marker import Marker
from tstore.errors import Corrupt, UnsupportedFormat

DOCUMENT = b'{"zarr_format":3,"node_type":"group","attributes":{}}'


def table_of(packs: tuple[str | bytes, ...], rows: list[tuple[int, int, int, int, bytes]]) -> ChunkTable:
    """Rows are: number, position in `packs`, offset, length, checks."""
    columns = list(zip(*rows, strict=True)) or [()] * 5
    kinds = ("<u8", "<u4", "<u8", "<u8")
    index, pack, offset, length = (np.array(c, k) for c, k in zip(columns, kinds, strict=False))
    return ChunkTable.from_columns(packs, index, pack, offset, length, as_checks(b"".join(columns[4])))


TABLE = table_of(
    ("txn/a/pack-0", b"in"), [(0, 0, 0, 10, b"0" * 16), (2, 1, 0, 2, b"1" * 16), (7, 0, 10, BLOCK + 1, b"2" * 32)]
)
MANIFEST = Manifest.from_nodes(
    [("w", DOCUMENT, True, (TABLE.part(0, 2),)), ("v/b", DOCUMENT, False, (TABLE.part(2, 3),))]
)
RECORD = Record(
    "0123abc",
    41,
    1.5,
    "a message",
    ("step/1", "best"),
    True,
    ("old",),
    (ObjectRef("txn/0123abc/manifest", 99, b"c" * 16), MANIFEST),
    12,
    False,
    {"step": 1},
)
FRAGMENT = Fragment(
    "t.1", 3, 8, 7, "m", ("step/1",), True, (), MANIFEST, 5, b"s", {"step": 1}, True, {"w": b"checksum"}
)
SEVERAL = Record(
    "a.together",
    7,
    2.5,
    tags=("x",),
    manifests=(MANIFEST, MANIFEST),
    bytes_added=9,
    parts=(Part("a", 1.5, "m", ("x",), 4, {"step": 1}), Part("b", 2.5, "", (), 5, {})),
)
REUSE = Record("0123abc", 41, 1.5, collected=7, reused=("txn/old/pack-1",))
DROP = Record("0123abc", 41, 1.5, tags=("best",), collected=7, dropped=("good", "step/1"))
TAG = Record("0123abc", 41, 1.5, collected=7, tagged={"best": 40, "good": 3})
COPY = Record("0123abc", 41, 1.5, manifests=(MANIFEST,), bytes_added=9, collected=7, source=40)
GC = Record(
    "gc-1",
    9,
    2.5,
    "gc",
    collected=4,
    collection=Collection(
        (LivingVersion(8, "new", 1.5, ("step/3", "best"), True, {"loss": 0.5}, ("txn/old/pack-1",), 7),),
        (3, 5),
        {"step/1": 3},
        ("gone",),
        ("txn/old/pack-2", "roots/00000000000000000000"),
    ),
)
ROOT = Root(64, bytes(range(16)), {"step/1": 3}, MANIFEST)
CHAINED_ROOT = Root(128, bytes(range(16)), {"step/1": 3}, MANIFEST, None, ("gone",), 64)
BODIES: dict[str, tuple[Any, str]] = {
    "manifest": (
        MANIFEST,
        "baQlXa%D{c+yD`%ZDDR{W@U49lB{%iZZBakaA9L>Eij;w!~$t<k;FB7B6?wRa$ja|a&2LBB04iHB5rSFWnXl8aAhJoB4=`Mb#NjqB4Ko"
        "Na%p09bY*iQI(vP6lB0GnVxf1$2mk;8000000K@_S0mKji0000000002000000002Q7zY3V00000000000000000IC2000000K^Oc000"
        "00000010002Q7zzLY00000000000000000000000000K^yp01yBG0000A0000000002000000002QKr%8iGBPqUGBPqUGBPqUGBPqUGB"
        "PqUGBPqUGBPqUGB7YOFfcGMFfcGMFfcGMFflPPF)=YQF)=YQF)=YQF~k7G0K@>0Tg%{a6ZW7Cg_!6%H(XS}",
    ),
    "record": (
        RECORD,
        "baQlXa%EBhoTo4`GBaUfV=2o&_y7O^0001~VIXZ~b8}&5Ws;_IbY*ZaF{EN;b9BRzqi<|vl9r}#Vrpe$bhLDMZZ9w~GBaUfV=rxC"
        "ZfRy^b97_G5MyIwV`F1uV`F1uV`F1uV*rrc01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;MUuJJ|ZDDjGIx{RH"
        "Zf|5|UvznJWg<EvXL4_Ka3U-sVRUqIX<~JBWpg4rdwqS9qjoQ1p?Aax0000000000!~y^T#1H`h000000006200000006`o2LJ#7"
        "0000000000000000ssI200000#0&rc0000000031006`o3IG5A0000000000000000000000000#25hp5C8xG000UA0000000062"
        "00000006{5GBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUFfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQF)=YQ!~nzq!~l>C"
        "!hxi7bY*Y>!vFvP0000000000000000000000000000000000000000000000AEvOzWO%Ef3OhSX9ru5y8",
    ),
    "void": (
        Record("0123abc.void", 41, 1.5, void=True),
        "baQlXa%EBhoUAZ0GBaUfV=i`YX=EwOKllIu00000ppe3lkO0Gg!vFvP000000000000000000000000000000000000000000000"
        "0MBf$x=fqy#tLz;$y0WYYX",
    ),
    "record of several transactions": (
        SEVERAL,
        "baQlXa%EBh+yD@&VJ>uUXJvF~WpW40Km-5)00000ppl_?!jO{O01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;M"
        "UuJJ|ZDDjGIx{RHZf|5|UvznJWg<EvXL4_Ka3U-sVRUqIX<~JBWpg4rdwqS9qjoQ1p?Aax0000000000!~y^T#1H`h0000000062"
        "00000006`o2LJ#70000000000000000ssI200000#0&rc0000000031006`o3IG5A0000000000000000000000000#25hp5C8xG"
        "000UA000000006200000006{5GBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUFfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQ"
        "F)=YQ!~nzq!~l@o01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;MUuJJ|ZDDjGIx{RHZf|5|UvznJWg<EvXL4_K"
        "a3U-sVRUqIX<~JBWpg4rdwqS9qjoQ1p?Aax0000000000!~y^T#1H`h000000006200000006`o2LJ#70000000000000000ssI2"
        "00000#0&rc0000000031006`o3IG5A0000000000000000000000000#25hp5C8xG000UA000000006200000006{5GBPqUGBPqU"
        "GBPqUGBPqUGBPqUGBPqUGBPqUGBPqUFfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQF)=YQ!~nzq!~l>9!hpj7kie3bp<&BE_y7O^"
        "0001?ZIPjP1c9V;bY*Y>mZ4(HKm-5)00000ppXTC00000000000000000000000000000000000000000000000000Sj{`<BVv3O"
        "xVv1znw%rh",
    ),
    "record of a reuse": (
        REUSE,
        "baQlXa%EBhpQkV}GBaUfV=2o&_y7O^0001>kiw9V0K$O72a&FHcy2FmY-BHRVPk78F~9%-000000000000000000000000000000"
        "000000000000000002GWFu<Xa>h>`^h|_XCByR",
    ),
    "record of dropped tags": (
        DROP,
        "baQlXa%EBj+yD`$FflSSVPaz`%Rl%4000000HBeiVr6r5!jO;v!hpjEkid|Vq-Sq$WTta;WpFPs0000000000000000000000000"
        "0000000000000000000000000)S#jd|L^!Q1=0JXWW67M",
    ),
    "record of tagged versions": (
        TAG,
        "baQlXa%EBj+yD}%FflSSVPaz`%Rl%4000000HBb<kdOevfWrrnz>tuFq+(@rbSR`}Z*OD+000000000000000000000000000000"
        "00000000000000000000z}{)(P9V60XANQ0q`1eF",
    ),
    "record of a copy": (
        COPY,
        "baQlXa%EBo+yE1&FflSSVPaz`%Rl%4000000HBb<kdfQ~5vXlpZfRy^b99odba-wrVJ~oDV{0uippnD^X>O6kHG3j@VRCX`W^ZzB"
        "VRRxoGb|!*Z)9a(ba`-PB03^xa&L8TA}k_dbaZlQVs&(7b0Ru>eSMOnb}wR~cf<$)000000002Q0ssNT5CH%H0000000IC200000"
        "0K^yv00000000000000000002000000002Q3;+NC00000009610K^yy00000000000000000000000000002Q7y$qf00000015yA"
        "0000000IC2000000K`BtGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqSFfcGMFfcGMFfcGMFfcGNF)=YQF)=YQF)=YQF)=a3"
        "0K@>q0FVj7fWrrnz>tuDC;$Ke0000000000000000000000000000000000000000000000F#7TRZGloGt#mcAM7N)0{",
    ),
    "gc": (
        GC,
        "baQlXa%EBipQLAFEinnpKm-5)00000qGw}}!jO;v!hpjBkd={`2%~OgcgsKc00000005Gvb97~JFEgZKWpi}HfuwA2b92i--~a#s"
        "0001yu5@^AFK=vQFK}UFYb`Mck^=>SrgL;<a4#_fk)&sDZe^0Lba-wrZ){{QaA9L>Ei$@tZ*O#SFEB7LFfcGMFfcGMFfcGMFfcGM"
        "FaQ7m00000000000000000000000000000000000000000000009fvAx!eY(kKI*RGb5IhWB",
    ),
    "fragment": (
        FRAGMENT,
        "baQlXa%DyVo}+XwF#`w(p>2_-b97~JFEPWA+yD`%ZDDR{W@U49lB{%iZZBakaA9L>Eij;w!~$t<k;FB7B6?wRa$ja|a&2LBB04iHB5rS"
        "FWnXl8aAhJoB4=`Mb#NjqB4KoNa%p09bY*iQI(vP6lB0GnVxf1$2mk;8000000K@_S0mKji0000000002000000002Q7zY3V00000000"
        "000000000IC2000000K^Oc00000000010002Q7zzLY00000000000000000000000000K^yp01yBG0000A0000000002000000002QKr"
        "%8iGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGB7YOFfcGMFfcGMFfcGMFflPPF)=YQF)=YQF)=YQF~k7G0K@>01;hb!fuwVEWpDw*f"
        "uVQA2xDkvV{3DDZPTO{t)0#m0C^W!(%!w}vH",
    ),
    "root": (
        ROOT,
        "baQlXa%EHjnLxx4009C61O)~M2nh-c3=Iwsfu?hGWpFPs1Ka=+sBK|xX=Y_}bds!ecy2FYFK}UFYb`LKk;DRNZjr<_dm?&aa&lj0"
        "Z*py6bRs%4EFx}iWMyA;d2nSSIwEIsZ*_1YEFxiabaH88b#!HOB0770eUhVgFJhs0#0UTY00000006`S00G1h0RR91000000ssI2"
        "00000#25zv0000000000000000006200000006`c00000000000RR91#25+y0000000000000000000000000006`o0RRvH00000"
        "3IG5A000000ssI200000#6U7KGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPkQFfcGMFfcGMFfcGMFfcJOF)=YQF)=YQF)=YQ"
        "F)_pd!~nzqkid`t0K^ag0000000000000000001PU1vTDi1&Oc$xeI>(4&6",
    ),
    "root that refers to another": (
        CHAINED_ROOT,
        "baQlXa%EHonaqI15C8!J0|W&I2M7rY3k(eo4}qq0bY*ZaF$3HH5vXlpZfRy^b99odba-wrVJ~oDV{0uippnD^X>O6kHG3j@VRCX`"
        "W^ZzBVRRxoGb|!*Z)9a(ba`-PB03^xa&L8TA}k_dbaZlQVs&(7b0Ru>eSMOnb}wR~cf<$)000000002Q0ssNT5CH%H0000000IC2"
        "000000K^yv00000000000000000002000000002Q3;+NC00000009610K^yy00000000000000000000000000002Q7y$qf00000"
        "015yA0000000IC2000000K`BtGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqSFfcGMFfcGMFfcGMFfcGNF)=YQF)=YQF)=YQ"
        "F)=a30K@>q0Fc0uq-Sq#Wk3ML5C8xG0000000000000000J=(h2Zx#z;$_a0b5&hGJO",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_golden_bytes(name: str) -> None:
    body, golden = BODIES[name]
    data = base64.b85decode(golden)
    assert encode(body) == data
    assert decode(data, type(body)) == body


def test_an_older_tstore_does_not_read_past_a_gc_or_a_changed_tag() -> None:
    assert [encode(body)[7] for body in (RECORD, REUSE, GC, DROP, TAG, COPY)] == [1, 1, 2, 3, 3, 8]


def test_the_frame_matches_the_documentation() -> None:
    data = encode(ROOT)
    assert data[:8] == b"tstoreT\x01"
    assert data[-16:] == xxhash.xxh3_128_digest(data[:-16])
    assert [encode(b)[6:7] for b in (RECORD, MANIFEST, FRAGMENT)] == [b"R", b"M", b"F"]
    assert reference("k", data) == ObjectRef("k", len(data), data[-16:])


@pytest.mark.parametrize("name", BODIES)
def test_every_flipped_bit_and_truncation_is_detected(name: str) -> None:
    body, _ = BODIES[name]
    data = encode(body)
    for at in range(len(data)):
        for bit in range(8) if at < 10 else (at % 8,):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(Corrupt):
                decode(bytes(bad), type(body))
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            decode(data[:length], type(body))
    with pytest.raises(Corrupt):
        decode(data + b"\0", type(body))


def frame(kind: bytes, version: int, body: bytes) -> bytes:
    data = b"tstore" + kind + bytes([version]) + body
    return data + xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"text": "x" * 200_000}},
        {"deleted": tuple(f"layers/{i:040d}/weight" for i in range(4000))},
        {"reused": tuple(f"txn/{i:040d}/pack-0" for i in range(4000))},
        {
            "collection": Collection(
                tuple(LivingVersion(v, f"t{v:040d}", 1.0, (f"step/{v}",), True, {}, ()) for v in range(1, 4000)),
                (),
                {},
                (),
                (),
            )
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_long_record_that_is_no_sum_of_others_is_read_again(fields: dict[str, Any]) -> None:
    record = Record("long", 4000, 1.0, **fields)
    data = encode(record)
    assert len(data) > METADATA_VALUES
    assert decode(data, Record) == record


def test_older_readers_refuse_appended_values() -> None:
    """They would commit writes with the former shape."""
    data = encode(Manifest.from_nodes([("a", DOCUMENT, 2, ()), ("b", DOCUMENT, 0, ())]))
    assert data[7] == 7
    assert decode(data, Manifest).extended_paths() == {"a"}
    assert [flag for _, _, flag, _ in decode(data, Manifest).nodes()] == [False, False]


def test_a_newer_format_is_named() -> None:
    with pytest.raises(UnsupportedFormat, match="version 99"):
        decode(frame(b"R", 99, b"whatever it may be"), Record)


@pytest.mark.parametrize(
    "body", [b"", b"\x00", b"\xc1", b"\x91\xa6record", b"\x92\xa6record\x01", encode(ROOT)[8:-16]]
)
def test_a_frame_with_another_body_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(frame(b"R", 1, body), Record)


def test_an_object_of_another_kind_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="expected a record, got a root"):
        decode(encode(ROOT), Record)


rows = st.lists(
    st.tuples(
        st.integers(0, 50),
        st.integers(0, 2),
        st.integers(0, 1 << 40),
        st.sampled_from([0, 1, 100, BLOCK, BLOCK + 1, 3 * BLOCK]),
        st.binary(min_size=1, max_size=1),
    ),
    max_size=8,
    unique_by=lambda r: r[0],
)


@given(st.lists(st.tuples(st.booleans(), rows, rows), max_size=5))
def test_a_manifest_round_trips_its_nodes(nodes: list[tuple[bool, list[Any], list[Any]]]) -> None:
    packs: tuple[str | bytes, ...] = ("txn/a/pack-1", b"inline", "txn/a/pack-2")

    def table(runs: list[Any]) -> ChunkTable:
        full = [(n, p, o, s, c * 16 * max(1, -(-s // BLOCK))) for n, p, o, s, c in sorted(runs)]
        return table_of(packs, full)

    given_nodes = []
    for i, (replaces_node, old, new) in enumerate(nodes):
        document = DOCUMENT + b" " * (i % 2)
        given_nodes.append((f"n/{i}", document, replaces_node, (table(old), table(new))))
    manifest = decode(encode(Manifest.from_nodes(given_nodes)), Manifest)
    nodes_read = manifest.nodes()
    assert [(p, d.data, f) for p, d, f, _ in nodes_read] == [(p, d, f) for p, d, f, _ in given_nodes]
    for (_, old, new), (*_, (chunks,)) in zip(nodes, nodes_read, strict=True):
        assert isinstance(chunks, ChunkTable)
        expected = {**{r[0]: r for r in old}, **{r[0]: r for r in new}}
        assert chunks.number.tolist() == sorted(expected)
        for row in chunks.rows:
            n, p, o, s, c = expected[row.number]
            assert row == ChunkRow(n, packs[p], o, s, c * 16 * max(1, -(-s // BLOCK)))
    assert overlay_each([tables for *_, tables in given_nodes])[1].tolist() == [
        len({r[0] for r in old} | {r[0] for r in new}) for _, old, new in nodes
    ]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("number", b"1"),
        ("number", b""),
        ("pack", b"\xff" * 12),
        ("pack", b""),
        ("offset", b"\xff" * 24),
        ("length", b"\xff" * 24),
        ("length", bytes(16)),
        ("checks", b""),
        ("checks", bytes(15)),
        ("checks", bytes(16 * 9)),
        ("count", bytes(16)),
        ("count", bytes(8)),
        ("replaces_node", b""),
        ("replaces_node", b"\x04"),
        ("document", b"\xff" * 8),
        ("document", b""),
        ("inline", ()),
        ("inline", (b"a", b"b")),
        ("documents", ()),
    ],
)
def test_columns_that_do_not_fit_are_corrupt(column: str, value: Any) -> None:
    fields = {name: getattr(MANIFEST, name) for name in MANIFEST.__struct_fields__}
    with pytest.raises(Corrupt):
        Manifest(**{**fields, column: value}).nodes()


def test_checks_are_xxh3_128_of_each_mebibyte() -> None:
    data = np.random.default_rng(0).bytes(2 * BLOCK + 5)
    parts = [data[:BLOCK], data[BLOCK : 2 * BLOCK], data[2 * BLOCK :]]
    assert block_checks(memoryview(data)) == b"".join(xxhash.xxh3_128_digest(p) for p in parts)
    assert block_checks(memoryview(b"")) == xxhash.xxh3_128_digest(b"")


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("step", [100_000, BLOCK // 2, BLOCK, 5 * BLOCK])
def test_blocks_are_hashed_however_their_bytes_arrive(size: int, step: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    whole = BlockHash()
    for start in range(0, size, step):
        whole.update(memoryview(data)[start : start + step])
    checks = block_checks(memoryview(data))
    assert (whole.size, whole.checks()) == (size, checks)
    assert whole.hexdigest() == xxhash.xxh3_128_hexdigest(data if size <= BLOCK else checks)


# ---- a whole store, written by the first version of the format

STORE = """
{Wp48S^xk9=GL@E0stWa761SMbT8$j;K%<GLtOwD3)}>NP%<X&9eo?~^2;;q?D#kE>ehQX!Mqz*A9Ze?8Q1ZZV%6KNTg7dy6ox{XAnE{AW)?Gy
Q|3krZShw9*ZaH`ZiS3cP}Y&=#W!D$ld2fuBs>PVq*Z_eZ<3~u5MDH#YnQx<?B!0@gJnPSfbO1w%XawdI;K^%({rk|lF4^2^*R7pT8K-@JWpSv
0sw{7Xcy|I3(1K!yPjYk4|17aE9TuHI7gi1ZK~gS9u6QVr6ec~Ji5ragfKJbKE&|-eX}m`<wap9O8_C2;xZOJu)7WWCGFHij^(yUY)h``1=Vgo
svkPa#}v9uMa&9MR>I$@**b14d8Sp6q<P9n#)`GOVmDDaqFjY$l4y66nw~&jHt9IeH3%heH(mU7*y1W3@pB0yIbDac0IO02B)gUVT7(r>YRUoB
@5jHiKQ%;}cX6Bot7vlgo}WX~NVoT<bJT_A;Gl=H1-`wGQ^S@auLFQ&m_ev)nc<7+5Jyl;fvDuT`=cMky+iZu5bePHAC!G}k7r8SIcM|NDqHIJ
Yu>t-iA@wH`^*N)EDD=Lj*&HvQt?ly^$oNPR9Yed$uOKO>y67|`hv;a78<B_ma7R~a;Hld5JVX7U-|TYI>f%ZK!SKN1*6yMhzCCdc6xQSt9Jd1
gXe^8{)sq^^o1cICJxN3gxccu+72D$|2pBW&4%1_;6smy7o_Co5zw5E8?okp?=VOPxzZIc=C85`S{jbJL<uoEVm9`djx_}~!p2M?%T(vU;_I%)
A!hBqVG6Ji1V}Z`)O#To!(ahqoH%e&XIzZ)vPIU^KslUvoACsMOJ7(m*l_$DKj!=FFtIIF29tI=&O~wUtx^2TtKb&`y6I21@25jN7falVrC<8J
2{2!sq5ICK56aMWOY-L)x$JYl4&fY&$%=?@1rT~$bJ-}4EHsc_<79D|9!Q(6rrj^U!9u?AdIHM}u;8WZx{QOY?kUe=*-EV*d|c<vi4NpE3;c5)
9m&yhYlYR5^P$eG>E%03^>6JrKIN+lmgsG}Gn!Ik9%w{-twAscbwqIaj=o!ipjdik1b^<|;*`SVi%B8!R%NOM##`8yJOpbyV9izF=_F`W0Ju<%
s%b(UGsbW?Sw|f;03B2JzTMlX2K5W!M-b#~ix+$1t^|zCqpq!+8FqQ5tBu9D){AD%$XR+gYobz^F2Z5uuF3`1p&tb`)5Ca)fRk&EaC>?7Qe8GI
q^Xghu-ja3t9y~cP~CR#@9Q#oQ!ndQNV+?ueyPr@-%n$`KVML6qpD1P#k~q&nGx#X(GD6L>Qh3ptd(WVRleHOZ3g8jBh0@xX3%w+ac9Bd4okWV
N=k*CpX&mrlozhVw09<*<Wnp%80xV_qxYooh?6fM`En|fZzfOZ6FG1RcwBOlfb(QQ)ik{@r!#Re-g$640EY`6P~w-OLR+Fb7y&nFkK6*K_rs|B
JQ<a~Mlx+L7tM>lKJAW_rdm3WH&(P>wXo|Y4Gl+Y`ic|>S>uX`t)BZ1V(=Tj?3k0euv9#sWA2k@NHI&e^Gk0zVchgeK?5@&*&B4^t1BM++12g&
wMy1P-rO`CXrY{`Y1iOr8wZAx0O#CgDJ8}yuBL>GDud(PP&?%P_r4itqCMxO3c{s(VfPAIJ#gRpn(uq_<D4TVW9Y35S_JA86<wI+lJe1Mo&t4)
0EhCMKMV)?6;-Z-%W=vq?B|X;*U(YnO98zuMO=p_zyqzVeNdtrLY4sbA#jrP89i{S7w6rh#nb!IJda8N=d16Sv)HDAUG(d-)=4eV=-QXAVol5k
uv6}iaj$G>L8C;5%lo2XV^8@YH7Fr}lp$8bwcuCmyg3Mif`;&jUel)bGh-7LM2DF<I<_}8Lr8RDAi}uswzb+EbXF|7hf~ACe<qoyaNOG#oqILr
sL<Z?m63I=o((iu>gvD(fd#l^;iMx4qyBuO!5SDrJZIns@A=sdKG7ZadXjnhDBujIA0Fl~Vm)Jsb_bsAo|uCEee~&k`?{2dKIu+@e7nP-w(9Yx
d~)X;q!dAzZa<AP6m@i;<U%U_5oxLFrxVwV<3q}-U9^o;ILQFpnb=fe10>^KM84noV@RO4W>D^S;!Gh12nNHbPajin8ejRiI5b#`8(vTYsLbWr
%tZ}$GqEJ@n5dJut!t`%%U;Ik-xJw*Cvd>-xHP<qvmN#nhdetFBvlQm;LbPw4`@*&Li6P@MLkM68>n?qH`ixK8t6Rwe+CwjP&(Xc<@Js!T@=WS
kc93ybQ5*LnjxJ6sf~(l7Jc#-yY3;+X?0j?_>h0%x)i#;vX*|hGDj%o)-C^X2#987R1+VM`SuenHZ4_)uK`$Wu(M@}HU)j$;_`{wwe_$N)F5k>
Z%g=WKN^)%DXhh`d_VQb0Z-;6iTR#4x;;jW&3Di7A6yD}T-NzJy3vrQa}%TR%Eup(fQeT_baqA>eP|vB6n-VZp0~7u_Xh9kKUbOS1gV?BGFHju
A!+gmk{}e%$Ba(`ZfCHLa9MO{8^Ekb@SJVNTvBx7JomZwp$>F&UO87vsrw3=VtHWiw}o%4Yz8RgL1@NT{tEs7a2@cFwqg=yV$GKDH>PXYT~$(3
G9SIL7zNiPrJFY`Wvb_f;Y-{t-n&Z1i_mMsDi##ds#Z_KQ_}?#`tUOfMpjPPa4Om6v!wKdw1E*(GTIIAGQtkOu)WO&xM_tcvTR6jSUBJH%`Z1=
Le&SwC_}v!vvqC-Yrr5wgg^V(8a#4S1H8LX|KQL}_+C3-z7_L&nz;Mf^-U!aD>2;W8wRL>Xy5te06!v@ZN-em3T>M~gpM`I0D4#u!&%4ETa}>#
77V|TN_Ac2Vebm1Vv7t)Y(d-}@Ua`tFwpV+gqSSVMj?iTj~TE_m5t}F;Y7)+p?A_d!YexTm^hg{C=WdSc{%XE4nln#DYE8yvr>_CAW_p&f2;DY
Qku4}zr)s1MTvusm8yC@r|D@+D}sMw?d)h>CwI_&@r+oQ?VIBeC)aCEg@t`iO<v``EG+n!E6~gyL!f3!tCt^0O;ZAb2REj7;B&A+vpzGAr%Jz1
MiL&s5fW|WAZPbU-;tUyEfc=`l``6Il3uRULkwKkxyIN4+qK?Frp&jzKaO(Bx)O}D{B`Q^>!lwWDSHCHKIP1&{kdnacL?ALSz!gb7nZz0XNA82
Sde9MI)KCq$TRC@&neFDfTQmL-%b>#C3Wowh>$yt54wqLIs0L!VhZ-NAot^oNHiAoL4MTPG|9~S2sTVg$h+_mRi=Cgj;q{M6g#eQJi^f@U!~%6
Kr|^UJE_D?kTqjw($_2SkN$0LfegjYf|0N$Z_4I%ihKuIU0|McP;}ilGEMQT(Pi<(Yz;9xOf?>VLIsDa{aHjv`w(y70-`(Gy2Kwm0*$AQ@eBYK
1bNJ3y=ZKE2*p%n6G=3%{Oubd0rnqYLripjD5q$B4BcQ5$qt4|0vqJ#riWvD3Ak$EyD0i_BfS=_dm4R?Ug8QVHPbE#jjg@6IF5&R{+>CK#3FoQ
XK7}|d>oJe;79@Lz$p8W6Ao<jiSGAofpd^maGg*Y>t>Xhde}XjESBKh{C$+dPl=e%UtB{cteh|WVCmidn~Sc>;gke?L({K!w4!_RV7jak49dHo
5iq9dNNk(iJ=~m@OBR%!MPaF(8{r#Vf%my-QuP2`-wWbvQn*E&;=Ndcem?ev2p`ayh{UQ2_l;wBtvZ@@6qxYcS4#KMEw~LM)S^G!QMqs$`orq6
WJr6~1#D*SP*#knmYR-jLmep6JCY#*pLcj+fDPmpSuktB*Q-c2%lUvmyo6BXve}3|)|Wd*BPV$EW;Q_NiaWz&W$Y%^n*7fHm!Jk1PgJE_(wv;c
hmK&foLdaJI#;j$7`2KqkAv^M5%`Sk<-DWcJ>DKJ6S1C2AM6efs}=9m7C>QTQ1>&W;}sW&5IswjGej~y3|Og&K7_Q2jKeuBc=2?mX^U*%Lmzox
2a*6U2*ac}<*5?@$7x1(J^x%XyAbs$_V7s&hDDKHU%+SRaFB$0qb*^WfS*@s|8`oHvMF>raXIJJ5E1CSnx1HQ9tR?nx{wzmN&$QXhw^n~?5a+E
uC}`$JfUsd@AVv;+ln8ZJLzZg>ve_`_5*9~uyq}PEng5LAyr7;A-d@dPU7OYwm2LIZRow?7yzw+py#5YQY+tXv(tUWp%q||t{P_p75(ICV6g&d
Ot)!{rYJa4(;SD^h!5(P(Gya^W%9TpeCVr?nZ2ydpTvcu=Um65U}(mkX}y}d%bWHa;}6#~UH|x`Rz7VUNZH>hU7JXOY4Y1Tpm7_UKjp3l<I}f0
TH#z!Y@so{Q+Hv`pn{~h83`5HS($$m<>pG{t!%Q|D%T5f_?^K=q`1)uIjM$z1mLz$&j`K1h1n&!IFcnw9kB#c*k*&Ci_7ZY%I=SH&{c*okNlQ~
b7QmoWT3A^k#8JZ(%^BeXj<I--xoJoqRWk=@xy`9ruI^|p$X_YlNuICFzhDPfxhG~LR(3|D&QG|1tG6tL|(6l_?OT?e9>XW?N0k#qiE`;q5yR&
PY!_~y<{SJ38T+zOfC<=5RjKY@2KMkcikO)@_)Y@YzW1V9B{t>9O6Li2Kb1LD)`$-|JN7bARn^!Qwnu~f;}m7Ov|QuGa4Oju1c?&n_Da`O{yz(
oW8floB&p4kb#VhuPppx7tg62T0=ah=Rx#{7Vz2Ae!y)jDPa-B62<*C$0=Iwpw3VA6)&bXT0C&@LgogqWtW%NoGJ5%W|bAtQm}AeE|D>|;tDKF
|2y9A+&c&#MoN+oyP@Q1CJk539Zrza#o?|$0U#ZJePWC~AYL+cqiu@CC_2GKhLLod;>mfhcA12Cxw6yc{NpqlS#SyZmLMqRwf&^~w+0Dc-uk4^
hPad~ko~-Pb)vE&;6zf`)D+hYy{T0!Za_9@e~BIq-w%m!;i3{8@&oFH3?>U!Z6}zzqJllrVi^3&Ih1UwayK!$@VI%@8X5sL{u;vnf0^8UlmH+m
Cw;six1(4chrM)2qkSS?N|dzA?fpiEQ#|1~A%7B}SqF#uw-D5E1ECvR!hKkJnnc-*nvQnS*V5VVF_DxdO7APp577>jxcnnZAW6^cDiBH?3&b;K
WhdCX0dgr17{&7Q!(y(k7(M|gaopnf+@k&2QV@bE>^>L0VB#BhTX`CkuRM$LQzaE)V~p6DMdPQW0;3xynnMp7Mg3wfE){q`oaR#u)?2x}$uR)?
2KB*v=?M|oBT7#GKN493<)5WTo;-g1p&{)BTnMqr*G?~S)C)H7cjNS-Cv#uq29v~<SSIk5Y#N7F<#bM;mKqP2FUFbwU~7To_pJIL=zf7MUF^i;
HO!^Znsq?hbd(UGp1sTimj@esBysm<zi&pwV_{8yR)qe(LVogl()7tTAMq7f3f5)8ZD{no&l{P>Mq6yC`B-NUrPhc@=Bm`9J(IC3s2H>JXx^qT
8SPNT2ffcy7?O9Eq(W^<yD_(?0N41PqfdE4`l<ZFN;r4)VkhhwB2QWjP6wTaZ9o-OWmdk#g%Z*BiCE6W+RiF$>UoqmTL}cpesvca_1<_lkjeXl
po_)F<YcO#+rJ!&geyl=H$BhSpDMKR+cA1~gqj%uyneJyCk##H<%Ui!3^?lpfe$bc;uR;d52uE)xXcr}<<HvO?t~YMUM@8c7<xa+iO=evo=?d2
!9MGsRR>D5EDhg&I`p`dF)ic_(xf*F#kEDW31~FBjo^aSL<3_y?AKYu=RNX3GQfJ=;G_`?T}g#d%5PRrgpbxM2gyI|3HA_%!KyT8;@5U4bhUVy
<apDBh=g|n8MLGJu@)T)PEQ~E(YmIIrT~qo^u*!pmE4s?$hOl&x5)OONHTOF0q&Oji{wnjAr7PuoiPy1NZ1}v67tmLy2JH0yAsa*jlgf~MB;07
SCQTG?;hR{za>?+gbprjqYCPkh4=piM@9?9pwMr!OL6`}@&etYYOaSMzxnz{!#{4vE-mc*cpy4w5d(3VL~28#J%Gyh4Fl2vtkxR%Of?>s@uQ40
?psA7xc%ukwox}EQ#EZ&IiwE2`Tds7*D7>>07KSLT~X=OYU>go6NCT&x4W?w*nCb&00G}5fRF<K>#iFwvBYQl0ssI200dcD
"""


def contents() -> dict[str, Any]:
    """Return the contents of steps 0 and 1 of the golden store; step 1 has another `b`."""
    return {
        "params": {
            "w": np.arange(3000, dtype="f4").reshape(60, 50),
            5: np.arange(6, dtype="i8").reshape(2, 3) - 3,
            "half": np.arange(4).astype(ml_dtypes.bfloat16),
            "f8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        },
        "list": [None, 1.5, math.inf, True, b"\0x", "ü", 2 + 1j, np.float32(0.1), (), {}],
        "b": np.array([True, False]),
        "c": np.array(1 + 2j),
        "none": np.empty((0, 3), "u2"),
    }


def unpack(where: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(base64.b85decode("".join(STORE.split()))), mode="r:xz") as archive:
        for member in archive:  # `extractall` has `filter` since 3.11.4, and warns without it from 3.12 on
            if (file := archive.extractfile(member)) is not None:
                (where / member.name).parent.mkdir(parents=True, exist_ok=True)
                (where / member.name).write_bytes(file.read())


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()
    else:
        assert a == b


async def test_a_store_of_the_first_format_restores_and_takes_new_commits(tmp_path: Path) -> None:
    unpack(tmp_path)
    store = await tstore.open(tmp_path, "a")
    assert store.uuid == json.loads((tmp_path / "tstore.json").read_bytes())["uuid"]
    report = await store.verify()
    assert report.ok, report.faults
    assert await tstore.steps(store) == [0, 1]
    assert [(c.version, c.tag, c.message) async for c in store.history()] == [
        (4, None, "a region"),
        (3, "step/1/e4m3", "quantized from version 2: params/w: e4m3"),
        (2, "step/1", ""),
        (1, "step/0", "golden"),
    ]
    tree = contents()
    same(await tstore.restore(store, 0), tree)
    tree["b"] = ~tree["b"]
    same(await tstore.restore(store), tree)
    quantized = await tstore.restore(store, at="step/1/e4m3")
    same(quantized["params"][5], tree["params"][5])
    assert np.abs(quantized["params"]["w"] - tree["params"]["w"]).max() <= 2999 / 16
    newest = await store.snapshot()
    region = await (await newest.array("w")).read()
    assert region.tolist() == [[0, 0, 0], [0, 7, 7], [0, 7, 7]]
    assert (await newest.array("w")).attributes == {"unit": "m"}
    assert await tstore.save(store, tree, step=2) == 5
    same(await tstore.restore(store, 2), tree)


def test_the_golden_marker(tmp_path: Path) -> None:
    unpack(tmp_path)
    marker = json.loads((tmp_path / "tstore.json").read_bytes())
    assert set(marker) == {"format", "uuid", "created", "checksum"}
    assert marker["format"] == 1


def test_the_golden_checksum_of_a_marker() -> None:
    data = (
        b'{"format":1,"uuid":"12345678-1234-4678-9234-567812345678","created":"2026-01-02T03:04:05+00:00",'
        b'"checksum":"70de4ab0b484a5240e27471dfebcb77b"}'
    )
    fields = json.loads(data)
    made = Marker(1, uuid.UUID(fields["uuid"]), fields["created"])
    assert made.encode() == data


TABLES = st.dictionaries(
    st.integers(0, 9), st.sampled_from([(1, b"a"), (1, b"b"), (2, b"a"), (BLOCK + 1, b"ac"), (BLOCK + 1, b"ab")])
)


@given(TABLES, TABLES)
def test_tables_differ_where_bytes_do(
    mine: dict[int, tuple[int, bytes]], theirs: dict[int, tuple[int, bytes]]
) -> None:
    def table(chunks: dict[int, tuple[int, bytes]], pack: str) -> ChunkTable:
        rows = [
            (n, 0, n, length, b"".join(bytes([c]) * 16 for c in checks)) for n, (length, checks) in chunks.items()
        ]
        return ChunkTable.overlay([table_of((pack,), sorted(rows))])

    differing = table(mine, "a").differing_numbers(table(theirs, "b")).tolist()
    assert differing == sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
