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
from tstore.format.chunk_refs import ChunkRow, ChunkTable
from tstore.format.encoding import decode, encode
from tstore.format.layers import overlay_each
from tstore.format.object_ref import ObjectRef, reference
from tstore.format.records import Collection, Fragment, LivingVersion, Part, Record, Root
from tstore.format.references import Manifest
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
GC = Record(
    "gc-1",
    9,
    2.5,
    "gc",
    collected=4,
    collection=Collection(
        (LivingVersion(8, "new", 1.5, ("step/3", "best"), True, {"loss": 0.5}, ("txn/old/pack-1",)),),
        (3, 5),
        {"step/1": 3},
        ("gone",),
        ("txn/old/pack-2", "roots/00000000000000000000"),
    ),
)
ROOT = Root(64, bytes(range(16)), {"step/1": 3}, MANIFEST)
BODIES: dict[str, tuple[Any, str]] = {
    "manifest": (
        MANIFEST,
        "baQlXa%D{c+yD`%ZDDR{W@U49lB{%iZZBakaA9L>Eij;w!~$t<k;FB7B6?wRa$ja|a&2LBB04iHB5rSFWnXl8aAhJoB4=`Mb#Njq"
        "B4KoNa%p09bY*iQI(vP6lA(8_b}wSY2mk;8000000K@_T0K^ai0000000001000000002Q7ytkO0000000IC20000000#g700000"
        "0K^Oc00001000000002Q7ytkO000000000000000015yA000000K^yy0000000002000000000101yBG0002QKrk>cFfcGMFfcGM"
        "FfcGMFflPPF)=YQF)=YQF)=YQF)}hTGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGQ<GH0K@>02K;K@8LfH`5N)RX7fcT^",
    ),
    "record": (
        RECORD,
        "baQlXa%EBhoTo4`GBaUfV=2o&_y7O^0001~VIXZ~b8}&5Ws;_IbY*ZaF{EN;b9BRzqi<|vl9r}#Vrpe$bhLDMZZ9w~GBaUfV=rxC"
        "ZfRy^b97_G5MyIwV`F1uV`F1uV`F1uV*rrc01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;MUuJJ|ZDDjGIx{RH"
        "Zf|5|UvznJWg<EvXL4_Ka3U-sVRUqIX<~JBWpg4rdwqS9p?9NpFJi<90000000000!~y{T#1H}i000000003100000006`o00000"
        "000000ssI2000002LJ#700000#0&rc0003100000006`o000000000000000000003IG5A00000#25+y00000000620000000031"
        "5C8xG006{5FfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQF)=YQGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqU!~nzq!~l>C"
        "!hxi7bY*Y>!}QE!Tn<7?Go=w>pu=)uFa",
    ),
    "void": (
        Record("0123abc.void", 41, 1.5, void=True),
        "baQlXa%EBhoUAZ0GBaUfV=i`YX=EwOKllIu00000ppe3lkO0Gg!x>o>m3x2}#M?9ZC0XyV@&",
    ),
    "record of several transactions": (
        SEVERAL,
        "baQlXa%EBh+yD@&VJ>uUXJvF~WpW40Km-5)00000ppl_?!jO{O01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;M"
        "UuJJ|ZDDjGIx{RHZf|5|UvznJWg<EvXL4_Ka3U-sVRUqIX<~JBWpg4rdwqS9p?9NpFJi<90000000000!~y{T#1H}i0000000031"
        "00000006`o00000000000ssI2000002LJ#700000#0&rc0003100000006`o000000000000000000003IG5A00000#25+y00000"
        "0006200000000315C8xG006{5FfcGMFfcGMFfcGMFfcGMF)=YQF)=YQF)=YQF)=YQGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqU"
        "GBPqU!~nzq!~l@o01>EdVQy(=Wpi|rtaNy8FJUimVPk78Frbmd0%>lM#5H>&dSP;MUuJJ|ZDDjGIx{RHZf|5|UvznJWg<EvXL4_K"
        "a3U-sVRUqIX<~JBWpg4rdwqS9p?9NpFJi<90000000000!~y{T#1H}i000000003100000006`o00000000000ssI2000002LJ#7"
        "00000#0&rc0003100000006`o000000000000000000003IG5A00000#25+y000000006200000000315C8xG006{5FfcGMFfcGM"
        "FfcGMFfcGMF)=YQF)=YQF)=YQF)=YQGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqU!~nzq!~l>9!hpj7kie3bp<&BE_y7O^"
        "0001?ZIPjP1c9V;bY*Y>mZ4(HKm-5)00000ppXTCtfb7X8FgW;DG^XIaS!)_",
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
    "gc": (
        GC,
        "baQlXa%EBipQLAFEinnpKm-5)00000qGw}}!jO;v!hpjBkd={_2%~OgcgsKc00000005Gvb97~JFEgZKWpi}HfuwA2b92i--~a#s"
        "0001yu5@^AFK=vQFK}UFYb`O70|kMmb97~JFEIm=q-Sq#Ws<IRcy2FmY-BHRVPk78GP-haZ*+4nFfcGMFfcGMFfcGMFfcGMFfcGM"
        "2Hdmheda}Z_TNU!q7^l6",
    ),
    "fragment": (
        FRAGMENT,
        "baQlXa%DyVouhOvF#`w(p>2_-b97~JFEPWA+yD`%ZDDR{W@U49lB{%iZZBakaA9L>Eij;w!~$t<k;FB7B6?wRa$ja|a&2LBB04iH"
        "B5rSFWnXl8aAhJoB4=`Mb#NjqB4KoNa%p09bY*iQI(vP6lA(8_b}wSY2mk;8000000K@_T0K^ai0000000001000000002Q7ytkO"
        "0000000IC20000000#g7000000K^Oc00001000000002Q7ytkO000000000000000015yA000000K^yy00000000020000000001"
        "01yBG0002QKrk>cFfcGMFfcGMFfcGMFflPPF)=YQF)=YQF)=YQF)}hTGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGQ<GH0K@>0"
        "1;hb!fuwVEWpDw*<e1Os;pg%I4tHSsM5^Cd",
    ),
    "root": (
        ROOT,
        "baQlXa%EHjmO#W1009C61O)~M2nh-c3=Iwsfu?hGWpFPs1Ka=+sBK|xX=Y_}bds!ecy2FYFK}UFYb`LKk;DRNZjr<_dm?&aa&lj0"
        "Z*py6bRs%4EFx}iWMyA;d2nSSIwEIsZ*_1YEFxiabaH88b#!HOB0770eUhPfqjoQ1#0UTY00000006`S0RY4h0ssI2000000RR91"
        "00000#25eo000000006200000000L700000006`c000000RR9100000#25eo000000000000000000UA00000006`o3IG5A00000"
        "0ssI2000000RRvH00000#6U1GFfcGMFfcGMFfcGMFfcJOF)=YQF)=YQF)=YQF)=bSGBPqUGBPqUGBPqUGBPqUGBPqUGBPqUGBPqU"
        "GBU&f!~nzqkid{gSI<qCJ_SWqv%NvPs&RG",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_golden_bytes(name: str) -> None:
    body, golden = BODIES[name]
    data = base64.b85decode(golden)
    assert encode(body) == data
    assert decode(data, type(body)) == body


def test_an_older_tstore_does_not_read_past_a_gc_or_a_changed_tag() -> None:
    assert [encode(body)[7] for body in (RECORD, REUSE, GC, DROP, TAG)] == [1, 1, 2, 3, 3]


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


def test_a_newer_format_is_named() -> None:
    with pytest.raises(UnsupportedFormat, match="version 6"):
        decode(frame(b"R", 6, b"whatever it may be"), Record)


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
{Wp48S^xk9=GL@E0stWa8~^|S5YJf5;K%<EcwGP&3)}>NP%<X&9eo?~^2;;q?D#kE>ehQX!Mqz*A9Ze?8Q1ZZV%6KNTg7dy6ox{XAnE{AW)?Gy
Q|3krZShvTCoA53$gm7K#kEXyi*%<o+cMCX#GLwU4}9cXT7G$`r<%UHY=s1qCt&cRRx;sx@rN_TKRCp4x$U6;;!3APJD&~nuu6i|`!e1x1YBAU
Mw9Ppw2lb%PRO)?EmH&3cZWAmK&PCe_FxPj0&kj7FUSTC0C(7&lRFx@U41tm@fP2JzIF)rwvlx1H&zP`*%93pE81{;2-$q7rJaBiTkbBhVrMq=
)rv~)h!>~mg4|SOF$9q({qc}0B>i4#!~3Cr7b$-<Ca#PK#<tg$0R-0AY6ivLZdMbz{8A5r_mSjNU?2@s_5t!QX=nRgUBuS6uc%_${_o^`m>+hy
LCq9`=cE?oGR0>15B<PjQ2e9LJwn6%B+_vnOSYd<A+f8d(n!iB`9{81$O=JyRC8TYachZ{J3b|Id=~2B<Cr5UFb9%k?#hS<HglcgP5UgOZ;uGr
l<AekrL9Iy769J>Z+Y53*WKq;r1oXHw3(h_p|S_P4O%aY-=*5IRhnG2k9w45&I0i8A1z!?z>A@U=`tO%q70gun}4Z981^0IyRj@9+L*}!oUe>l
0`-}fY4JhQe*J(3m-3+cH7GEN4^#nk(>y15Zv~<?IYw1?yS}s$LVpp@qvt`a%CY>#bU~_VntZwS7Z_0^E(8gmd7T-xZ<WUvn0n7go4)BBwZ%P&
aGkP`UhC8TwVi&EGj|fe;T><!I&iNp<w)5cABCUpTe@;Wk7`z`ES`F`i;_-aOBP{*Y8c`_7nIX|oqSF`sfeicPLsq7BLPBnvQzljTG-CK-u`K}
JG(;%WVNJDxTb&#D4_tUsAJOD{}0HevQl8Cri#<&ps%o&B4h2i<%V`3$*~ePnCye_qnmw(;kPg2_51ZIT638EgsNpuC#4f*_YwyCG1wXLagVL8
#A1L)Eq?l*5=>EbMRkwlMt3uI-8mCZj_rtzLX1IL1V0|b(9ta4A^!lM3T?5~Mc5&tU@8?E6UsJc(lBK`4&t*mx@(4XZCZ2EQ)%~@<e0fGFQF>L
BN+F<@3niDWW2dqP&pyi&sW1*ADMfocQSQA*m_omTOYVD(VwA^I?BbW@uFxcDg~8s%mNz?R<7P|*8&(xoV!}9zkGiUFp{`DXiJB{2IjRMK^HJ0
QRX?g9)^QCN#yzl)`-Jm#W4g%$D@4R?5Dit<VLS-%VV{vpvO;6FO!0S%=6G|@l_8(+sBe(=4Ux$an$I!&la>LbGDu{1crY@=YrYQe62$A0^v|n
kIfLI2unpqS{X1~w=(^1L%TvqyIg^sPFF?sFIRsT*g?}DNU$wDv$BUK;*#GTUn$mCx_60;1lw>Iw|zs3NUV(W@gJ@LA_GK|kuapgLs6G33yUc&
>r}w@=BdOhUlF@2*m<)4*Fa=NLHQ)?73por`c{N@Wy(#^$2=@uhJJ}}c;M0h<TBm<319W&80a6e9w$)MC*K+GEeQneK+F3R8xMKh42LJvP>4tk
F~ZG+K3}lJD6a$*>?3U7#Jn#~#F8(J+lEDym-lGV7+VC4B|E@UR9s!YP(S1_#1zjV_0C5L!~?~22^xxDK>4it$%)1Ex+Vfs05guXt7V9?@rC%|
q})sF12KjsKzxq$sUoICn*E_kIlXTuLlRC&te@u85&rTTL~>37xZ{IdLEe8>n!2C09i?D(isiq3{SnXct|B-x|La&da*c$<k2rr9{`d5%s{stX
ZdzH~cS2}#*=1aQ5PX#>+o5n96!<Kxzy#UQq7t2C2f3mCmCam&mQOs2T(i3Xk_$UAdl`(BAX6b!;?Yg1Dw+R?n<KM4dIp|L=+)iz(JGJXbNoDD
o5z~F8T*FC`&sm@GG@-68KJOgoJk{-z=0sJm=yU&$1&@vIYB{o*gCi{QJ0LC{fKx)3XPd1db;p9;4D=qC216vif9pPj6hDF7MS}hmXf1<ZwyW4
8d#Z(u-&OYP%A5$(~^kf*K}NH1&iDCO5h3@pjEXt4zr{*KJ{cab1Cah-)BR653K-8kxCbaRv#I9)~XAf=`LWL=lXe8>8%MU_;27)UFY~Z(F(Se
fdSOw8<lkjy*&uSvTI8J%Md+z9H!nqv7$*8LJ(&}1N%F!Y13{rM5Y-brm4g<+hkFrsg4~y)?SAy?#s$vITA8cT&K1|M=kJ0GPi1SgLBX-5~O2$
PM<0o<2p2926gKvay$E1=n9ZuEjsVOwq7+IZ8d7f#z#JE2a^=!gRg(c0YB~0$@`BcvB_PM9xI5up8=UR53Ai!C$!P|dPiRh{FES-ls`}L#16;I
(WFfer5AL}xs`FkKA<AF)c;Z$8<l%(x!6oCa!aZOV40=krJX!x==!Ey@&a8lwZbY<P$7L8`Ie?X*H{Y44@-0bG7D$7!bn6f7Q`y67qzeK2Enc{
Gi^<rTBe5Jk#D_4Gk2?Pr__i$y`hiE*PbWdgU3yBCe(@H(7irI$#=0f*6ohw*|=0Z%EZB+_IxGMGH|+~Qt%tNa+he|PKyci;@|1QA$}zxz!XB#
kOGe(am@n)@IOy)Uzx>c-N`)k0_6{1AGy=;TrVbYcp;D=s~FrbzX3hTiZ8FXeW<f3GxqqsITeBX(v?`9#*vy;E_11T+98g=FKUz6p&@yI_BSZI
q!CykB)e6EUbJBYg~VT4R|;L3PEC-`=$xwi(0L;h4xf<3w{@-0-=t{&tEsLLm`gCvponuvEi<5>WrQ+Fjlc<fg5}dI16Sak?sh*pj-Uz;>DSZ|
vPO`iXYd~<HYuWLek&gC<|UPPI!pOR#ZU!x<N_t`yFc3l6d|-8VDGO?6K#ojGGf5P@Y7krC^LkZzv|zz#y5&t#dZhxe&`%gd%d+I>8?8I-|nN_
-)~dq?<h`vCJBsax|PmFujd33#&4v0_e8BS?+kA{A@YH1@26k{Gc?<R<}PChg`t-v(MUx{g67>qrOH$+dRA~aFEcrR)3}|yvq;Gff<1wW_{Xk2
=4+uxm80qhJ0txda(&TYSa0kb#%GTF5pRrRkR2a|xl+d*ZahybIlS?H4d(bSL~C|-f}rGaMBV_4x?8yCjEmDx>67`$_WfLD99pgzb|mQ6`TzNe
vCahBBNa2*t?nY~7Gg1&3u_0@=MQ<_3?#KCoyK)ZQD<oxY#oCNUWsl_y{967oE+XBoxQO&6fEmq1v6Oxo0yEzT}RwYWH8hE)!9i~F5@dsEK~#n
N_%M}5B=nH!>e+uhG4TpW2EW8R`=x~FDQX`7h=JbIh`sE1pO?y=|(OR?EA^@eVLXUv~1CNRVLLO78#PRf4f2UB>ItXQeY9AqohfJq|#|^cnHt`
t4<XqTwcH0Bx%HLKX42irGvfWK`aN#9HTnn^lbi=<OOG{ZWnCjDCeoib<lyFITsN5U=<@JKni4OSvyVWOzfi!R5_uDNVsv|pyDTZ=>a4PJ337#
GRA@;1ZnaHt2{Bs39&zJ(wj&5Y`ZQx-Nq-?OwYi|*XNDVEoc$O<u$f?cXnL#0(fvUN4c%Lqigr;ATx2#j-$FJrc3knc(0-Bv^Oj3m3A_JIgJW`
8y}#np$E<oJ_DS3D|R!rTbDn5&A)>5hW}Oc$Dy?q8omW^t*0Dm7za>D&cb2{s!+tzk=Kz&g+B5!Li4CqobIO>F~ZRt-~_IB#lY}5&Xx1+RMLsd
a7R3?#}YIv(SfG|;xt+9lfGdWZ-rCQb9~cO+~&D3X=IZy8n*>dRg`APO8}BX4QTrlw)A1-d=65Sl-Ephw^@2^xX|dLKz2IyrJQnn3J!9cAV~cZ
!jnonO0e<VfulUKlZU{mfcHWPstYIjqYAXYyO`AU9por3!0LQat{fpL^N`cc{KncT(c^LhyUob<fD8Qe{yY>;x5AF1EI8bT$B_$qB=ya6o{kdf
)_7ehg%q<Fj0Kjt>(iqg>W+*J#d5A67|=*xFQ|(an)L&zH)YV*Ijrzs0s7R?$5a*aV(IWTaYYOAH+s<{MFX%=8}dg^1bNEIxxvmXH_)a50G$x^
;C+4oNjkqbCQ1-FKU(SyQtMAr%Qub74vSvy=-Kleh4aou`BV;ih3Y^y)Q=d*&V_{mE7&d2-&_SRC)@2n;5x$5O?gWHs4Zb@WTM4mH`fvpnsE(T
J1DIf4uYyb;m%ui2mz6~*wwsHq#+OHyh`xfFXRdc$z}7<)$m<dju)$sNhZ)*)Ig^R>^z*WY(JOKMC!e7D?va(x~ko{AS#$ssL!95@;lok&&W)^
$}g-cr))_fT8RZy&^q`<z)|cgvW_=3tmP;DyW-P~lFscKKJTf1kjnhTV3!sl+(ul8x*gqyHYaoQ!sZPEX*Uq0{VAQCMk=B{1@+FAQ#OSJnravn
)yD|#SaUma?CzyUKsl;dHBgZ~%z#zgDC*>5lgi+|Y3q!w9AknlcU}n&zDGOqtr=IGsx;jyJy06s5)zn~ZpY9(t*21pN@lGKsuX&?$mCGs)X!cZ
hm)VKHzfIJAY7cWpy#lA>J<j^&m(LRf_hXI6Qffn3RL+hgqozYsRMDj0C`{tAUGo2H$LFUkB-(NN%#7Vd}N*ImZrt*X~sUOZbNb4+B&b}3uDZi
ps$B<I_K4y^`p-Y2vKQ#LfacqYRN*a9-@@9*M;7GjFw2pZULnzG%LTMh!F0{H7EiNQU%mPtK>UL#6-*k6zqA!3DqEdI2F}D(P6ZHzn{<dh4D0i
KDbeqeU^_M_8qi9w<`g-xsYCT*hvE<WWWWj6ZP`ZIu3CxAAoFs0B~D1SqzW8`%A<>?F?z}1)@oIcU~P9m-6HS%xw!>VQ#SL*`wWn<i$=#p`h7-
578#sE#bY;FFtrBemQa*1X+QhMp-0Hv1kks)#%9WaBTDgoLF`)FOX1eD7NL<!XPM`B&#uej*8XAVkxP-m6H2!nW?`r6yF!tlE4`e<1R#JqzM3P
xqZJkEY?uk@e>I~3cAg8ws4<cD;zV?SDU|PCu2~uelc{8E7dunJ68y!Vm~6x=Q|n%FhNTadba!y+wvEL6M3UdySj5AX_|SE^!PojNoFz11GI{z
uDJY4vZq^(o`ic`Uo{WdWwb8=nHOH%`=R;D7{v$|0>8171droTV@1?-2nT-m5$dMTFu6&mKG4{A|9{)Y%k?ZZ{*=}5{Gcao64xoz5iqMBy8#O$
zpu2-q@U8~(=h-Vw^^X%SJcb=(->Rpm47@>Tcbh?B^{EdhurzTmlg=C>o6iZ{(1q?UDdIy`~8q%$5C|B=T;DyU}DqlO?&6=bQBw4E2?2iNKAs&
hsstI{o^5p&_vAKbvFYv(Za|Ss2e}7*Of0qu<jap(e|FXq^@PZzfP><>Wz63*sRO=gJ;`=ubu>T9bIh2kCnZiC@!(16`R`n+nv%g0S;w3RT-9&
?S$dtjHaxl<r+4G$RpE)FL7(8Vn6@@dNSw!x_~m#00ERCfRF<KG}~l?vBYQl0ssI200dcD
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
        (3, "step/1/e4m3", "quantized from version 2"),
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
    assert set(marker) == {"format", "uuid", "created"}
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
