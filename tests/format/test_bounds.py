"""Counting values and levels in encoded data without decoding it, and the bounds of each kind of object."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.support.work import counted_work
from tstore.core.format import bounds
from tstore.core.format.bounds import (
    json_excess_message,
    max_object_size,
    max_size_from_head,
    msgpack_excess_message,
)
from tstore.core.format.frame import seal
from tstore.core.format.objects.encoding import collection_excess_message, decode, encode, memory_of
from tstore.core.format.objects.records import Part, Record
from tstore.errors import Corrupt, InvalidArgument

TEXTS = ["", "a", '"', "\\", "[", "]]", "{}", "\n", "é" * 40, "x" * 300, "y" * 70_000]
NUMBERS = [0, -1, 200, -200, 70_000, -70_000, 1 << 40, -(1 << 40), (1 << 64) - 1, 1.5]


def value(choice: random.Random, level: int = 0) -> Any:
    kind = choice.random()
    if kind < 0.4 and level < 5:
        return [value(choice, level + 1) for _ in range(choice.choice((0, 1, 3, 17)))]
    if kind < 0.6 and level < 5:
        return {choice.choice(TEXTS): value(choice, level + 1) for _ in range(choice.choice((0, 1, 3)))}
    return choice.choice([*TEXTS, *NUMBERS, None, True])


def measured(document: Any) -> tuple[int, int]:
    """Return the number of values, including keys, and the depth of nonempty containers."""
    if not isinstance(document, (list, dict)) or not document:
        return 1, 0
    inside = [measured(v) for v in (document.values() if isinstance(document, dict) else document)]
    keys = len(document) if isinstance(document, dict) else 0
    return 1 + keys + sum(n for n, _ in inside), 1 + max(depth for _, depth in inside)


@pytest.mark.parametrize("seed", range(60))
def test_values_and_levels_are_counted_exactly(seed: int) -> None:
    document = [[value(random.Random(seed)), b"\xff" * 300]]
    count, depth = measured(document)
    packed, text = msgspec.msgpack.encode(document), msgspec.json.encode(document[0][0])
    assert msgpack_excess_message(packed, count, depth) == ""
    assert "values" in msgpack_excess_message(packed, count - 1, depth)
    assert "levels" in msgpack_excess_message(packed, count, depth - 1)
    assert "levels" not in json_excess_message(text, 1 << 20, max(0, measured(document[0][0])[1] + 1))
    for cut in range(min(len(packed), 40)):
        msgpack_excess_message(packed[:cut], count, depth)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 50_000, b"[" * 701 + b"]" * 701])
def test_deep_text_is_detected(text: bytes) -> None:
    assert "levels" in json_excess_message(text)


def test_brackets_in_texts_are_not_counted() -> None:
    assert json_excess_message(msgspec.json.encode(['["' * 900, "\\", '"[' * 900]), levels=1) == ""


def test_commas_in_texts_are_not_counted() -> None:
    text = ',"[\\' * 200_000
    assert json_excess_message(msgspec.json.encode({"a": text, "b": [text, 1]}), values=5) == ""
    assert "values" in json_excess_message(msgspec.json.encode([text, *range(6)]), values=5)


def test_many_values_are_detected_at_once() -> None:
    """In packed data by the bound; JSON is read in blocks, and not at all if it is too long."""
    empty_arrays = b"\xdd\x01\x00\x00\x00" + b"\x90" * (16 << 20)
    with counted_work() as work:
        assert "values" in msgpack_excess_message(empty_arrays, 1000, 101)
    assert work.steps < 20 * 1000
    with counted_work() as work:
        assert "values" in json_excess_message(b"[" + b"[]," * (1 << 23) + b"[]]")
        assert "bytes" in json_excess_message(b" " * (bounds.NODE_METADATA_BYTES + 1))
    assert work.steps < 1000


def test_the_structure_of_a_hundred_thousand_leaves_has_room() -> None:
    leaves = [[["str", f"layer{i}"], ["array", f"model/layers/{i}/attention/weight"]] for i in range(100_000)]
    document = msgspec.json.encode({"attributes": {"tstore": {"structure": ["dict", leaves]}}})
    assert json_excess_message(document) == ""


def test_every_kind_of_object_has_a_bound() -> None:
    assert max_object_size("tstore.json") == 4 << 10
    assert max_object_size("commits/00000000000000000001") == 32 << 20
    assert max_object_size("txn/a/part-00000-of-00001") == 8 << 20
    assert max_object_size("txn/a/pack-0") is None
    assert max_object_size("elsewhere") is None
    assert max_size_from_head("commits/00000000000000000001", b"tstoreR\2") == 32 << 20
    assert max_size_from_head("commits/00000000000000000001", b"tstoreR\1") == 8 << 20
    assert max_size_from_head("commits/00000000000000000001", b"tst") == 32 << 20
    assert max_size_from_head("latest", b"tstoreR\1") == 64


def test_a_collection_is_counted_as_long_as_it_is_packed() -> None:
    living = [
        [n, f"t{n}", 1.5, [f"step/{n}"], True, {f"m{i}": 0.5 for i in range(7)}, []] for n in range(1, 100_001)
    ]
    packed = msgspec.msgpack.encode([living, [], {}, [], []])
    assert collection_excess_message(packed) == ""
    many = dict.fromkeys(map(str, range(1 << 20)), 0)
    names = [[1, "t", 0, [], False, many, []]]
    packed = msgspec.msgpack.encode([names, [], {}, [], []])
    assert "more than 2,097,152 values" in collection_excess_message(packed)
    assert "values" in collection_excess_message(msgspec.msgpack.encode([[], [], many, ["t"], []]))
    sizes = {5: 500_000, 6: 10, 7: 300_000, 8: 400_000, 9: 0}
    heavy = [[v, "t", 0, [], False, {}, list(range(2 * size))] for v, size in sizes.items()]
    excess = collection_excess_message(msgspec.msgpack.encode([heavy, [], {}, [], []]))
    assert "(the living versions with the most are 5, 8, 7);" in excess
    packed = msgspec.msgpack.encode([[[]] * 500_000, [], {}, [], ["a" * (1 << 20)]])
    assert "values" in collection_excess_message(packed)


def parts(count: int, values: int) -> tuple[Part, ...]:
    return tuple(Part(f"part{n}", 0.0, "", (), 0, {"x": [[]] * values}) for n in range(count))


def test_the_metadata_of_all_transactions_is_counted_together() -> None:
    """Each part is within its own bound."""
    assert decode(encode(Record("a", 0, 0.0, parts=parts(4, 100_000))), Record).parts
    with pytest.raises(InvalidArgument, match="more than 524,288 values"):
        encode(Record("a", 0, 0.0, parts=parts(6, 100_000)))
    packed = msgspec.msgpack.encode(Record("a", 0, 0.0, parts=parts(80, 8000)))
    with pytest.raises(Corrupt, match="more than 524,288 values"):
        decode(seal(b"R", 1, packed), Record)


def test_names_and_metadata_of_a_record_are_counted_together() -> None:
    names = tuple(f"{n:05x}" for n in range(500_000))
    assert len(decode(encode(Record("a", 0, 0.0, deleted=names)), Record).deleted) == 500_000
    with pytest.raises(InvalidArgument, match="more than 524,288 values"):
        encode(Record("a", 0, 0.0, deleted=names, metadata={"x": [[]] * 60_000}))


def test_the_memory_of_a_record_follows_from_its_values() -> None:
    assert memory_of(encode(Record("a", 0, 0.0))) < 100
    assert memory_of(encode(Record("a", 0, 0.0, metadata={"text": "x" * 100_000}))) < 110_000
    assert memory_of(encode(Record("a", 0, 0.0, metadata={"x": [[]] * 60_000}))) > 4_000_000
    assert memory_of(encode(Record("a", 0, 0.0, deleted=tuple(f"{n:05x}" for n in range(60_000))))) > 4_000_000
