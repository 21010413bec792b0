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
from tstore.errors import Corrupt, UnsupportedFormat
from tstore.format.bounds import METADATA_VALUES
from tstore.format.checksums import BLOCK, BlockHash, as_checks, block_checks
from tstore.format.objects.chunk_refs import ChunkTable
from tstore.format.objects.chunk_rows import ChunkRow
from tstore.format.objects.encoding import decode, encode
from tstore.format.objects.layers import overlay_each
from tstore.format.objects.object_ref import ObjectRef, reference
from tstore.format.objects.records import Collection, Fragment, LivingVersion, Part, Record, Root
from tstore.format.objects.references import Manifest
from tstore.log.marker import Marker

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
FRAGMENT = Fragment("t.1", 3, 8, 7, "m", ("step/1",), True, (), MANIFEST, 5, b"s", {"step": 1})
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
        "baQlXa%EBhoTo4`GBaUfV=2o&_y7O^0001~VIXZ~b8}&5Ws;_IbY*ZaF{EN;b9BRzqi<|vl9r}#Vrpe$bhLDMZZ9w~GBaUfV=rxCZfRy"
        "^b97_G5MyIwV`F1uV`F1uV`F1uV*rrc01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;MUuJJ|ZDDjGIx{RHZf|5|Uvz"
        "nJWg<EvXL4_Ka3U-sVRUqIX<~JBWpg4rdwqS9qjoQ1p?Aax0000000000!~y^T#1H`h000000006200000006`o2LJ#7000000000000"
        "0000ssI200000#0&rc0000000031006`o3IG5A0000000000000000000000000#25hp5C8xG000UA000000006200000006{5GBPqUG"
        "BPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUFfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQF)=YQ!~nzq!~l>C!hxi7bY*Y>!%fFY+vD}N"
        "r}NGm`h$D!t^",
    ),
    "void": (
        Record("0123abc.void", 41, 1.5, void=True),
        "baQlXa%EBhoUAZ0GBaUfV=i`YX=EwOKllIu00000ppe3lkO0Gg!x>o>m3x2}#M?9ZC0XyV@&",
    ),
    "record of several transactions": (
        SEVERAL,
        "baQlXa%EBh+yD@&VJ>uUXJvF~WpW40Km-5)00000ppl_?!jO{O01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;MUuJJ"
        "|ZDDjGIx{RHZf|5|UvznJWg<EvXL4_Ka3U-sVRUqIX<~JBWpg4rdwqS9qjoQ1p?Aax0000000000!~y^T#1H`h000000006200000006"
        "`o2LJ#70000000000000000ssI200000#0&rc0000000031006`o3IG5A0000000000000000000000000#25hp5C8xG000UA0000000"
        "06200000006{5GBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUFfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQF)=YQ!~nzq!~l@o0"
        "1>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;MUuJJ|ZDDjGIx{RHZf|5|UvznJWg<EvXL4_Ka3U-sVRUqIX<~JBWpg4r"
        "dwqS9qjoQ1p?Aax0000000000!~y^T#1H`h000000006200000006`o2LJ#70000000000000000ssI200000#0&rc0000000031006`"
        "o3IG5A0000000000000000000000000#25hp5C8xG000UA000000006200000006{5GBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBP"
        "qUFfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQF)=YQ!~nzq!~l>9!hpj7kie3bp<&BE_y7O^0001?ZIPjP1c9V;bY*Y>mZ4(HKm-5)00"
        "000ppXTCLAPPI_wHx6B#X*f4}#_V",
    ),
    "record of a reuse": (
        REUSE,
        "baQlXa%EBhpQkV}GBaUfV=2o&_y7O^0001>kiw9V0K$O72a&FHcy2FmY-BHRVPk78F~ACjJS#TFzI%R3Qgj3j{LK",
    ),
    "record of dropped tags": (
        DROP,
        "baQlXa%EBj+yD`$FflSSVPaz`%Rl%4000000HBeiVr6r5!jO;v!hpjEkid|Vq-Sq$WTta;WpFPsvTsi$5Yd+B3$IH9>1<G8",
    ),
    "record of tagged versions": (
        TAG,
        "baQlXa%EBj+yD}%FflSSVPaz`%Rl%4000000HBb<kdOevfWrrnz>tuFq+(@rbSR`}Z*OD+O%EoN4hhQH0UwTecI@vI",
    ),
    "record of a copy": (
        COPY,
        "baQlXa%EBo+yE1&FflSSVPaz`%Rl%4000000HBb<kdfQ~5vXlpZfRy^b99odba-wrVJ~oDV{0uippnD^X>O6kHG3j@VRCX`W^ZzBVRRx"
        "oGb|!*Z)9a(ba`-PB03^xa&L8TA}k_dbaZlQVs&(7b0Ru>eSMOnb}wR~cf<$)000000002Q0ssNT5CH%H0000000IC2000000K^yv000"
        "00000000000000002000000002Q3;+NC00000009610K^yy00000000000000000000000000002Q7y$qf00000015yA0000000IC200"
        "0000K`BtGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqSFfcGMFfcGMFfcGMFfcGNF)=YQF)=YQF)=YQF)=a30K@>q0FVj7fWrrnz"
        ">tuDD1UG9-zi-^6HvQsh4Bb^{Q",
    ),
    "gc": (
        GC,
        "baQlXa%EBipQLAFEinnpKm-5)00000qGw}}!jO;v!hpjBkd={`2%~OgcgsKc00000005Gvb97~JFEgZKWpi}HfuwA2b92i--~a#s0001"
        "yu5@^AFK=vQFK}UFYb`Mck^=>SrgL;<a4#_fk)&sDZe^0Lba-wrZ){{QaA9L>Ei$@tZ*O#SFEB7LFfcGMFfcGMFfcGMFfcGMFrjkq@@T"
        "Uw={Qahn#tguNB",
    ),
    "fragment": (
        FRAGMENT,
        "baQlXa%DyVouhOvF#`w(p>2_-b97~JFEPWA+yD`%ZDDR{W@U49lB{%iZZBakaA9L>Eij;w!~$t<k;FB7B6?wRa$ja|a&2LBB04iHB5rS"
        "FWnXl8aAhJoB4=`Mb#NjqB4KoNa%p09bY*iQI(vP6lB0GnVxf1$2mk;8000000K@_S0mKji0000000002000000002Q7zY3V00000000"
        "000000000IC2000000K^Oc00000000010002Q7zzLY00000000000000000000000000K^yp01yBG0000A0000000002000000002QKr"
        "%8iGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGB7YOFfcGMFfcGMFfcGMFflPPF)=YQF)=YQF)=YQF~k7G0K@>01;hb!fuwVEWpDw*q"
        "Vq7W)bb~2{sHO8y%o}u",
    ),
    "root": (
        ROOT,
        "baQlXa%EHjm_Wo3009C61O)~M2nh-c3=Iwsfu?hGWpFPs1Ka=+sBK|xX=Y_}bds!ecy2FYFK}UFYb`LKk;DRNZjr<_dm?&aa&lj0Z*py"
        "6bRs%4EFx}iWMyA;d2nSSIwEIsZ*_1YEFxiabaH88b#!HOB0770eUhVgFJhs0#0UTY00000006`S00G1h0RR91000000ssI200000#25"
        "zv0000000000000000006200000006`c00000000000RR91#25+y0000000000000000000000000006`o0RRvH000003IG5A000000s"
        "sI200000#6U7KGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPkQFfcGMFfcGMFfcGMFfcJOF)=YQF)=YQF)=YQF)_pd!~nzqkid`t0"
        "NeOcOX*}P$V;R7CY;XI5C",
    ),
    "root that refers to another": (
        CHAINED_ROOT,
        "baQlXa%EHon9P905C8!J0|W&I2M7rY3k(eo4}qq0bY*ZaF$3HH5vXlpZfRy^b99odba-wrVJ~oDV{0uippnD^X>O6kHG3j@VRCX`W^Zz"
        "BVRRxoGb|!*Z)9a(ba`-PB03^xa&L8TA}k_dbaZlQVs&(7b0Ru>eSMOnb}wR~cf<$)000000002Q0ssNT5CH%H0000000IC2000000K^"
        "yv00000000000000000002000000002Q3;+NC00000009610K^yy00000000000000000000000000002Q7y$qf00000015yA0000000"
        "IC2000000K`BtGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqSFfcGMFfcGMFfcGMFfcGNF)=YQF)=YQF)=YQF)=a30K@>q0Fc0uq"
        "-Sq#Wk3MzEdu0wk#tp+2vTpOFx+b",
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
{Wp48S^xk9=GL@E0stWa761SMbT8$j;K%<G8eISv3)}>NP%<X&9eo?~^2;;q?D#kE>ehQX!Mqz*A9Ze?8Q1ZZV%6KNTg7dy6ox{XAnE{AW)?Gy
Q|3krZShw9*ZaH`ZiS3cP}Y&=#W!D$ld2fuBs>PVq*Z_eZ<3~u5MDH#YnQx<?B!0@gJnPSfbO1w%XawdI;K^%({rk|lF4^2^*R7pT8K-@JWpSv
0ssRW@>xu?m=<(eE}U<*<(K*?N?nW&38P`+4DJ|6z!^V^9=oY25d6|$G6Q&b7MwS!?fD`@!IQK}hHlJ&pPs9=Q}mVG^jVHF+CTXkoU%ApM{piy
?Y_64L_S=(jLPjd#Rt3+Ri}lqJ{}|~<{*U|rG)BD(KBf7^vWISLj;gTPuwnjWHUy#9YS>jP6hJ8T&sWG!090}@>J8Q9WuP6on<%B{h!g@55;H2
2hl&c#%@zgdZ$kA`JyQ>yj3(fS^_^AnTi!UM?Qt(J56MY4n`B3K<V`e!Y;xfyKVgEH_UGzJ(9v{jg15yM_IzqA7IJZ+0m>D@@6bA(e?@==^A80
Dz23PS49inVCKU_oAhx~XbW1Bb>h)KS9B~B4c2{HhDoOGNfFC8OR6soDz$Ia|Aj==ZSuQUeiN|+mJW5kFe_M5N0Lh171kA>6yDK|)r$su-WSxj
wptOC*TlY>f#ftrI{M~O;x{)jO?w#A6lt7&0mobTb(*HQ$vYNK(xc?bRsn@jNgz+;=<My}rTgFl2=T>f0KM$8NRIFdXhl<+gjEKcm?ag_e!s?P
X$g{pjwE(Kn3D<_7f)T5If9k*eM`Dxui!PNfU{K>JUm$90>5|v3S@?s=)^Zkq$h<}rJ9=7EN75iQW*WdsV#aHZXk<HE^jng3@D(oeQ@`5rE?hx
kWLXD(&08if|nho>-8j^W4qGGo{2dg$~b`(wxi3Vup?6Qg3CisAYW1x>=}#<1MlwrXr+tMYC<OhkX%>;WxCmZtZ+TjWFozb`ry?d48EQC&s|5>
vGl?VIF!XykB-nne^NOq<V;0%PQh9^WPo$KKBT7=8!T4THb2AFOQUllEtB35ePc_rwqMzgIdg;sPJF0OwHV!9{Ngn0y7BcsmdM#nz4C`)wIGvZ
fzqz)#m2Ynpg(j{Ce}9+e2Z<^chQ4^)a>CUlm~&jh2ho^$T-uGA(^X$cvV9SRE@{XAadesCS;i_QE7^b>Ak`drrnfXxq);DcK2cUfdOIVvu%yT
vfv+Dx{nv;^mIuuJ{a81*Oav_(eh?M9<03+e+Q}0IrRSe>%m`3-W%fwK(E#-7eRpuvo46CIq0wr8m3#f{?wPR^t>g3VNFTH4EGcqh5_z@rXV}y
nhi&Be=KibTBJOLsT5|G3KZA0tR=cpT{hlJ5Lfo&F&XNsSJcO^9n)ZOsg$~MJ|oJqbTQH#)z^dO)`iRmap6-Tqs;s6F9(D`;hb|@HB*VIxGS(R
*`IwWy&ic{-G%vDPl;^TE504)Cl6JyT!0fA`Txa<5$H+y;D#Tqt%O_+Z>RW?C=EoF<bOpVn{CsmLz(;TH2a8Dr1CM;AD3^v^$C?pCjVtj1dMtV
DY39_j6-LZN6T}aB!OZNtb_Jq2^q+Pdp+-tr-zx&pM3M@!uK1Xza^QNeF3_TVP&GkNjv<4lGp<zU?Sk$I1uJ^ekz;0ImoK6d!?~8xw1Y~YR#C|
NN<_>_xHvV2F;S|{fizmWk|1pqU3jrm}JdIqyl1yu?5L4_v}AR6OA+4{gqDDUGXzfWF3lLeIaUN>cZ5#yDk(6Msya=JH@^k18_Zsec&%pLNu=F
=JwQnn&E+-Q6!N=i9)gbh}46eFZ-yXSD3jc)Pg+BW;Q#y&&H_!-I^zWsh;E<LSteLgxuRvsLM`Pt=?D1tps$?=8uUo2<9k4<SyG3M*C-pI9(1u
1fPHAD}FEy%{@9}(z+x^?t$WY#vxBkYyn1UEtDYD^KIam2F}0HolKd{cjyYi!Pvye#p;Cg)2dAUJ`3Uowl@l|{{<aX)Yk$+V}?g2MHKF*n5Uvm
f8WUQVMLOAl!R)AlVlbJ*R+Sxuk6wa$wGExKspYbu%S4RxH7Oqok1^o1&oOJ_uycvpUMfUBYXng+EYq84V&c9&bJ~8@RJ|?YAa%@s1=k4KTU(E
uEW6kToVP&j#kRQ4tFzAm<Ro}Nq-`7#+>iJr&uz9d(W`gTJKy;XzM5x2ba@Ws4$7&_m~=E?zF>I_&mI0w&@nbto7^285<0TlO~;o&d`)P?s|LU
GGsd|2XIEW`UlL3yFq$S*o-V+kvm#HtTy-!RvPO0zh1m`naJWjM_H+JgHGzPnbCC=<>#z9)z(|Zh6b4b;mrk5kfbYp-|J|k177pz{i8k&a#CJU
CoPgPF=xntM&&}_dk(Yzni2Sg3S)f3wj~eXMiT~+P<(E~^S4EmNJg_(cGK2~yJ=UhX~4NZJZ3Z)=%)NR0+@V;X^GoyBTl~ogP4V6+{+Vu)87|=
W)~q+)M20ln#lsY)L?xSF1L7z^D(y7ZqGL!YZZ_MH;q|&?V<oy<nm~aTRW^hvYEusf52uON6@qogta#mVME`@ICA|2zvb6>PBOSzJofV9xmb}@
=}P<%Q$w6@I-~VX>)1BrNWj~a{4Q30iAH{LX({Q4()_Nj{h9eYjkVACzu|+I+hW6h)6Oxy2i7cmB@`McO%I(})CA*r(=<8wBdt#3v?R5Pf-w3j
%u_8=<&U8+|JV-QTwUygJ#sL7$@@a1D_Xk)<U~2TQNqfKkF%|$a?8ehK{aiYvt2nvbYWtf%S_b32(!?JZVac_WI5bCu3l9V#HD&b&@*~(4H+{|
>*+%Yv7s}-6tjQ<ja*yRHMVgqC`dToY$W4jiGRSd@B`pxJ>dkF5NnyeGYo~90wa>}A7tlR5$PLoXMPldLEXT>lOv+1l%|`Qwf#F&3Cf9$udF1j
qOC2iu9Q=#Tn+1IH(8)c_26^kB)C@~4Q-lIZh?o`0;}V~5rwxs^q(fMuiz{G#Kb)}EtTg+2tDvE`)!w~5P%)&XLYSg?D5d`?cpfWLnq7sbt2ec
Asz&F*k-9=?l{%?IlAONd9O5PZo05^vuwf})0Z;Yb;hkk9sg%r6D1jP*lc(d;R$ZQcVvbSbA9g-+m05u017Awv+`Ul3~TIQ+jNF9@n!B7Gi?LR
vga$@^STcgx#HdT#(`?x6mr`+Gcb^oo6bzu{ho!|r8=Ee$6Oh~{BR+`r_Uamp{J%*Vzy6urrfe%Rd*MAI7ZcThd#V1nu>JwxnkoS&qT^^ikI3#
-e?JXzbZ-;3==_U*5GRqmA@^TClTBHUP?4|+C_v+90SUkcAhspR_>(q!>yvk1kgF`ID!#<hcIapA`#pOyF%<5wM6H>p?<96h3USX3iN8PyIwX3
94hq|-oad^JMA{NqNmee@PeuYFzaEZGH#fqkSuQA)=GW%9d}a@5OT4%)!z6;s)x#oJZe;D;npLv4&##4w$%<*>3w!^>^D%%e=-1WI3PRvbYg@{
Jfrc}_-J$cw^6jet2)|tM&!G@X<Iu2<1%J)$N$&QrApE$C~P%r_c65x=@80p4b%ug#V|ErW+Hqp-CAv&GWgko4PBTO$<BX8j7(lQ#af@XzD|)P
SkNl97&;w%9d60?jF8dXLrV6lBE!@pBeNt~A0xXiF&%VQzPkhm)!n7-fL{=dQZ$IM;Fuq&xTRCG^9<dJq9I$pzBP}dF|lCJAdequd?w1*8}3<j
vGrkAHSBqBQZWR#)j*^hTwO&{J9pCY=Zi#(NStzdWt#~@Y6-QfPZN1m<99jfaG5y(gBT?zQ<s0&@5p}(?3hFh-aF^857kw6kxeLy3ke1tWzP%H
AJh9Jk#WV%FvryWCcclOd)am_YFuGWH+o0+_*Of#07bsv(6y4Paj>JrhI$6kjPOTuZ<X(b@J;FNqq!8&((}csrZ!WEba?g**qDOUZ_={-9AmB%
^LkS8;AF7x^w47B>jDKDTGVYg^q`Kz)6|{j=R|M7d@&r}bL%KWs+025to0kH8&;Q?#i=0`@J0JT)zW%zTgcbhfW5pn;#t<mvlA1A&I<ju3U|uc
zl6cR16j9lGtY+%QVO%USXad!DwR5A30)(gX|!7OIU2IcvS!M9_}*3$9&=|Yrda_EJY}!CU1SkFSKI!jUCpc92R)B@yieCPP1K@*XW9Wd*?CZ#
Br)nOSAv5T2K2^9${&b8x_L@X1G|w>S<oWrt)$kF<fCh_k{_mjSgRWK$p1$412^?iN`^HR#`vN(g9xt9F#(fhvtOs<o2bo2dCKv@C^c5|`rS8e
gj=e&naU@p%z}o`a{FPZ%n%M4e0OLJj14IMsjFrN2G4Cca>sb2^(aLHsoRM0VJ$Z(@1J2DbDye<-y4CS?QCk&7g<X5qo*$&UeA65EdpzYPvpLB
q-vJ86#T3oI;G*|Brswc-}fg)ZMQB;HmM8v!h8vuhEQu{?`rr5{g97Fbblm-bI&?Tr7d?*7QaPUzFr*?1=6cGI1<vM&0$m?;+yt1<F&7~-VR%R
n<*R3A{c_Z;mY39NtSfMa`NiIWQ1YG_rPv@pHPuWZ6eJvLHFmun(#cSt%#7V^LePjDdIvMPzKECF{X_a(A65!K_qmU&8Oa*Z2SkEED`uh!>jKx
oLRad>!6U-%D`UVxnu!e9TmHb?qFS$?R)&xiaaU^*1sy3@vtgGGp|=(OYX9{G9~j$;cO0O-`W^=3c7`D_agb?J{L^aS|8RDl+^9zxbsem0cgqI
ZgTUuSKGVmI0Y1*sND~JD>kUzv<G+Cin*F7M5KTQV@_R)8%jxfLQF>D9t)2L-TUwrxW<om+lnTU5N7S^7q1D*=35_8^%jr{0jcS>33f$t(7oz=
m#`nj7911F=OP0%-9j5Y`O)#E=!9vb>HcNCc111Y+2Jdm*-S`6FB>dw4fR*Cve4w*O46(}^J(h^lCzoSd<CyPj`ip7Tm<4nbJU`}GgyJns5T7g
5BMS9#E~{Ln6;fVK!QaDy6%jeD#M0*UgI8(!^aQ*2Yj1URFfP7$N5DFH3Bc94M)A^%H_Q|RsA^0<Nl>|{l6uii2uvQ0owyv7H^m11Rj1(x0cZX
Q2VPROyZx3UtYEby~Y5l`@D(5*y^UR;QRXV6x&5cdp@ZaEq^6{j4v+R!QNZ$D*2zx_mB?t^K<M54|I8UNe^d>p6nBjVM=4Lm!n4n%4ycN0d2?z
s9HzUz+O#{(!CysM`c$M8;{2ORqPXlGmeE0pEH75ikt7p1IF@;eN+ey+FwnTF>_8hFLDg3Z*)zlj<^UHvyq5S=vNV$`8w8iehgYIj|o;muJRv#
B^WQpvN^c%TR?==1^Dm0A~~XQpqb=dwZ&dfGz!KOC_wx*la=+Rx%I?pLuPJ6PsQ;P`1`QKT(X7Jm_kso|8X`T*AI_^D)}B@fx7FY<X_o3^tUl^
4U3^NRD18=49ZcB4#KFjPfPTCdAoI_O%P2c1PVsOvP2E9-QW@BgiO%nLh$Txm4?k+j`RBQTXfS?55UN^P}u!jj`g<i+qaaiG3B*h1aW9o4zi8H
*eq%xwWc@^!=8E~=7tA$7)ewLDp_O~aU5{qL39i?!<{b8)jAJ5tfO71UEdymiB^qSAI+)H6yqR<yyU(fD>-c)5b0$SYe$>p<E$H1zJeP+mDUgW
(I*Pgz6zL1UYFT|ajfzbyR<nA+yqSol{s3XnJ&B+-I?m)q{h2JfLP_SHeY8~Zjqd$`*(;CK&4q<<QfI()-T<w0%pTDfIeIDMX~!T%DtTdA-24y
RR!A`#`<M|nbSfRqpD$}7SwEic8)t#o3*^$d<&H#YvGBHJMseS2{-0IUudo!<u5MvpLrIbA(CnjN3@E*P^1<A_cgp(>R8;M=y|hp;iUo9#;;;^
30e-yYIGCHW%)3Q<23}FHp7!z^dH*p64HGYWjL1Rp0JVzxKT(COtv50OTIV=?qF^U&_H*xe;UoLt!|(xr;Qq9u@qtZGd90{j5Jclzx)t<SN5Rk
zyJUMsB?K;l>TE_00FinfRF<KdGO!>vBYQl0ssI200dcD
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
        archive.extractall(where, filter="data")


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
