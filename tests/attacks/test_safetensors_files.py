"""Fuzzed safetensors files: each is imported completely, or refused before a store is made."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.fuzzing import ABSURD, bounded_time, changed, fuzz, mutated, nested
from tstore.convert.exporting import export_safetensors
from tstore.convert.importing import import_checkpoint
from tstore.errors import Corrupt, TStoreError

TENSORS = [("w", "F32", [2, 3]), ("layer.0.bias", "BF16", [4]), ("n", "I64", []), ("empty", "U8", [0, 5])]
TENSORS += [("f8", "F8_E4M3", [3]), ("b", "BOOL", [3]), ("c", "C64", [1])]
WIDTHS = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1, "F8_E4M3": 1, "BOOL": 1, "C64": 8}
ODD: list[Any] = [
    *ABSURD,
    "F32",
    "F64",
    "F4",
    "F16",
    "U8",
    "BF16",
    "__metadata__",
    "dtype",
    "shape",
    "data_offsets",
]
ODD += [
    "",
    "/",
    "..",
    "a/b",
    "zarr.json",
    "%",
    "w" * 3000,
    "a.b",
    "\n",
    "\x7f",
    [0, 0],
    [0, 24],
    [24, 0],
    [1] * 33,
]


def good() -> tuple[dict[str, Any], bytes]:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", "note": "é"}}
    end = 0
    for name, dtype, shape in TENSORS:
        size = int(np.prod(shape)) * WIDTHS[dtype]
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return fields, bytes(i % 2 for i in range(end))


FIELDS, DATA = good()


def file(header: bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def hostile(choice: random.Random) -> bytes:
    """Return the bytes of a file with one kind of fault."""
    whole = file(json.dumps(FIELDS).encode())
    match choice.randrange(8):
        case 0:
            return mutated(whole, choice)
        case 1:
            return file(nested(choice).encode())
        case 2:
            deep = json.dumps({**FIELDS, choice.choice(list(FIELDS)): "PLACE"})
            return file(deep.replace('"PLACE"', nested(choice)).encode())
        case 3:
            length = choice.choice((0, 1, len(whole), len(whole) - 8, 100_000_000, 1 << 63, (1 << 64) - 1))
            return file(json.dumps(FIELDS).encode(), length=length)
        case 4:  # another order, a name twice
            items = [
                f"{json.dumps(k)}:{json.dumps(v)}" for k, v in choice.sample(list(FIELDS.items()), len(FIELDS))
            ]
            items += choice.sample(items, choice.randrange(2))
            return file(("{" + ",".join(items) + "}").encode())
        case _:
            fields: Any = FIELDS
            for _ in range(choice.choice((1, 1, 2, 4))):
                fields = changed(fields, choice, ODD)
            data = choice.choice((DATA, DATA, DATA[:-1], DATA + b"\0", b""))
            return file(json.dumps(fields).encode("utf-8", "surrogatepass"), data)


def test_odd_files(tmp_path: Path) -> None:
    path, out = tmp_path / "x.safetensors", tmp_path / "out.safetensors"
    with asyncio.Runner() as runner:

        def attack(choice: random.Random) -> bool:
            path.write_bytes(hostile(choice))
            url = f"memory://{uuid.uuid4()}"
            try:
                runner.run(import_checkpoint(path, url, 1))
            except TStoreError as error:
                said = str(error)
                assert len(said) < 5000
                return False
            tree = runner.run(tstore.restore(url, 1))
            assert all(isinstance(leaf, np.ndarray) for leaf in tree.values())
            runner.run(export_safetensors(url, out, step=1))

            out.unlink()
            return True

        fuzz("safetensors files", attack, 200)


BIG = 8 << 20
HEADERS: dict[str, Callable[[], bytes]] = {  # made by their tests, since every worker collects this module
    "empty lists": lambda: b'{"x":[' + b"[]," * (BIG // 3) + b"0]}",
    "empty objects": lambda: b'{"x":[' + b"{}," * (BIG // 3) + b"0]}",
    "numbers": lambda: b'{"x":{"dtype":"U8","shape":[' + b"1," * (BIG // 2) + b'0],"data_offsets":[0,0]}}',
    "text": lambda: b'{"__metadata__":{"a":"' + b"x" * BIG + b'"}}',
    "lists as values": lambda: b"{" + b",".join(b'"%d":[]' % i for i in range(BIG // 12)) + b"}",
}

IMPORT = """
import sys
from tstore.convert.safetensors import open_tensors
from tstore.errors import TStoreError
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
try:
    open_tensors(sys.argv[1])
except TStoreError as error:
    print(len(str(error)))
print((peak() - before) >> 10)
"""


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_takes_less_than_ten_times_its_size(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    header = HEADERS[name]()
    path.write_bytes(file(header, b""))
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, path], capture_output=True, text=True, timeout=250, check=True
    )
    *message, megabytes = map(int, done.stdout.split())
    print(f"{name}: {megabytes} MiB for a header of {len(header) >> 20} MiB")
    assert megabytes < 10 * BIG >> 20
    assert all(size < 1000 for size in message)


def test_a_declared_length_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 61], "data_offsets": [0, 1 << 63]}}).encode()
    path.write_bytes(file(header, b""))
    with bounded_time(2), pytest.raises(Corrupt, match="x"):
        asyncio.run(import_checkpoint(path, f"memory://{uuid.uuid4()}", 1))
