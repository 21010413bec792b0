"""Fuzzed policy files: a quantization follows them, or says what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import uuid
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.fuzzing import ABSURD, bounded_time, changed, fuzz, mutated, nested
from tstore.core.format.patterns import compile_patterns
from tstore.errors import InvalidArgument, TStoreError
from tstore.quantization.policy import Rules, parse_policy

POLICIES: list[Any] = [
    {"**/embed*": "e4m3", "head": None, "**": "e3m4"},
    {"formats": {"head": None, "**": {"format": "e3m2", "block": 32}}, "axis": 0, "scale": "max"},
    {"formats": {"layers/*/w": "lossless"}, "bits": 5.5, "block": 64, "error": "absolute"},
    {"min_sqnr": 20, "block": None},
    {
        "**": [
            {"name": "exmy", "configuration": {"format": "e2m3"}},
            {"name": "zstd", "configuration": {"level": 1}},
        ]
    },
    {"formats": "e4m3", "block": "auto"},
]
ODD: list[Any] = [*ABSURD, "e4m3", "e99m9", "lossless", "**", "*", "?", "head", "layers/**/w", "[", "(?P<", "\\"]
ODD += ["formats", "bits", "min_sqnr", "scale", "float", "none", "auto", "*a" * 40, "**/" * 40, 16, 1e-300, 1e5]
ODD += [{"name": "exmy"}, {"name": "bytes"}, {"format": "e4m3", "x": 1}, [{"name": "bytes"}], ["exmy"], {"**": 5}]
TREE = {
    "embed": np.linspace(-1, 1, 512, dtype="f4").reshape(8, 64),
    "head": np.ones((4, 32), "f2"),
    "layers": [{"w": np.arange(128, dtype="f4").reshape(2, 64), "bias": np.ones(64, "f4")} for _ in range(2)],
    "steps": np.arange(100),
}


def policy(choice: random.Random) -> bytes:
    document = choice.choice(POLICIES)
    if choice.random() < 0.1:
        return mutated(json.dumps(document).encode(), choice)
    if choice.random() < 0.05:
        return json.dumps({"formats": "PLACE", "bits": 5}).replace('"PLACE"', nested(choice)).encode()
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        document = changed(document, choice, ODD)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def test_odd_policies() -> None:
    with asyncio.Runner() as runner:
        store = runner.run(tstore.open(f"memory://{uuid.uuid4()}"))
        runner.run(tstore.save(store, TREE, 1))

        def attack(choice: random.Random) -> bool:
            try:
                arguments = parse_policy(policy(choice), "p.json")
                runner.run(tstore.quantize(store, **arguments, at=1, tag=str(uuid.uuid4())))
            except TStoreError as error:
                said = str(error)
            else:
                return True
            assert len(said) < 20_000, len(said)
            return False

        fuzz("policies", attack, 150)


@pytest.mark.parametrize("levels", [150, 500, 900, 5000, 100_000])
def test_deep_policies_are_refused(levels: int) -> None:
    texts = ("[" * levels, '{"a":' * levels, '{"a":' + "[" * levels + "]" * levels + "}")
    for text in (*texts, '{"a":' + '{"format":' * levels + '"e4m3"' + "}" * levels + "}"):
        with pytest.raises(InvalidArgument):
            Rules(parse_policy(text.encode(), "p.json")["formats"])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"**": "e3m2", "head": null, "**": "e4m3"}', "**"),
        ('{"**": "e3m2", "\\u002a*": "e3m2"}', "**"),
        ('{"bits": 5, "formats": {}, "bits": 5}', "bits"),
        ('{"formats": {"a": null, "a": "e3m2"}, "bits": 5}', "a"),
        ('{"**": {"format": "e3m2", "block": 16, "block": 32}}', "block"),
        ('{"**": [{"name": "exmy", "configuration": {"format": "e3m2", "format": "e4m3"}}]}', "format"),
        ('{"": null, "": "e3m2"}', ""),
    ],
)
def test_a_key_twice_in_one_object_is_refused(text: str, key: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"p.json has the key {key!r} twice")):
        parse_policy(text.encode(), "p.json")


def test_equal_keys_of_different_objects() -> None:
    text = '{"a": {"format": "e3m2"}, "b": {"format": "e3m2"}, "c": [1e5]}'
    assert list(parse_policy(text.encode(), "p.json")["formats"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "arguments",
    [{"axis": "1"}, {"block": "32"}, {"block": 33}, {"scale": 5}, {"axis": True}, {"axis": []}, {"bits": "5"}],
    ids=str,
)
async def test_arguments_of_wrong_types_are_refused(arguments: dict[str, Any]) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(store, TREE, 1)
    with pytest.raises(InvalidArgument):
        await tstore.quantize(store, **{"formats": "e4m3", **arguments})


LONG = "a" * 300 + "/" + "a" * 300
GLOBS = ["*a" * 30 + "b", "**/" * 20 + "b", "**a" * 20 + "b", "*?" * 40 + "b", "a**" * 30, "?*" * 100, "**/*a" * 9]


@pytest.mark.parametrize("glob", GLOBS)
def test_a_pattern_of_many_wildcards_is_matched_at_once(glob: str) -> None:
    with bounded_time(2):
        compile_patterns(glob)(LONG)


def test_patterns_match_as_their_regular_expressions_say() -> None:
    """Both matchers implement one rule: patterns of few wildcards use the first, others the second."""
    names = {"**/": "(?:[^/]+/)*", "/**$": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]", "/": "/"}
    pieces = ["a", "b", "ab", "/", "/", "*", "*", "**", "**/", "/**", "?"]
    choice, matched = random.Random(1), 0
    for _ in range(3000):
        glob = "".join(choice.choices(pieces, k=choice.randrange(1, 9)))
        tokens = re.findall(r"\*\*/|/\*\*(?=$)|\*\*|\*|\?|[^*?/]+|/", glob)
        ends = [names.get(t + "$" if t == "/**" else t, t) for t in tokens]
        wanted = re.compile("".join(ends))
        matches = compile_patterns(glob)
        for _ in range(10):
            path = "".join(choice.choices("aab/", k=choice.randrange(0, 9)))
            assert matches(path) == (wanted.fullmatch(path) is not None), (glob, path)
            matched += matches(path)
    assert matched > 1000
