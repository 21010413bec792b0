"""Checkpoints of other formats with changed bytes or values: imported and restored, or refused in one sentence."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np

import tstore
from tests.support.fuzzing import ABSURD, changed, fuzz, mutated
from tests.support.lazy import lazy
from tstore.checkpoint.structure import flatten
from tstore.convert.importing import import_checkpoint
from tstore.convert.safetensors import Writer
from tstore.convert.torch_archive import read_archive
from tstore.errors import TStoreError

torch = lazy("torch")

ODD: list[Any] = [*ABSURD, "a.safetensors", "../x", "/etc/passwd", "F32", "BF16", "x", [0], [1, 1], [0, 12]]
ODD += [[2**63 - 1], [2**62, 0], [2**64], [2, 3], {"saved_offsets": [0]}, {"x": {"saved_offsets": [1, 1]}}]
PIECES = "DCP_SHARDING_INFO"


def write(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    with Writer(path, {name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata) as file:
        for name, values in tensors.items():
            file.write(name, values)


def changed_json(data: bytes, choice: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(choice.choice((1, 1, 3))):
        value = changed(value, choice, ODD)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def changed_file(name: str, data: bytes, choice: random.Random) -> bytes:
    """Return a file of a set with other values in its JSON, or with other bytes."""
    if choice.random() < 0.3:
        return mutated(data, choice)
    if name.endswith(".json"):
        return changed_json(data, choice)
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end]
    fields = json.loads(header)
    if PIECES in fields.get("__metadata__", {}) and choice.random() < 0.5:
        fields["__metadata__"][PIECES] = changed_json(fields["__metadata__"][PIECES].encode(), choice).decode()
        header = json.dumps(fields).encode()
    else:
        header = changed_json(header, choice)
    return len(header).to_bytes(8, "little") + header + data[end:]


def attack_folder(name: str, folder: Path) -> None:
    """Change one file of a folder at a time and import it."""
    files = {file: file.read_bytes() for file in folder.iterdir()}
    with asyncio.Runner() as runner:

        def attack(choice: random.Random) -> bool:
            chosen = choice.choice(sorted(files))
            for file, data in files.items():
                file.write_bytes(changed_file(file.name, data, choice) if file == chosen else data)
            url = f"memory://{uuid.uuid4()}"
            try:
                runner.run(import_checkpoint(folder, url, 1))
            except TStoreError as error:
                refusal = str(error)
            else:
                runner.run(tstore.restore(url, 1))
                return True
            assert len(refusal) < 5000
            return False

        fuzz(name, attack, 300)


def test_odd_sets_with_an_index(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": np.ones((2, 3), "f4"), "y": np.arange(4)}, {"format": "pt"})
    write(tmp_path / "b.safetensors", {"z": np.ones(3, "f2")}, {})
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    attack_folder("sets with an index", tmp_path)


def test_odd_sets_of_pieces(tmp_path: Path) -> None:
    for i in range(2):
        offsets = {"x": {"saved_offsets": [2 * i, 0]}, "e": {"saved_offsets": [3 * i]}}
        tensors = {"x": np.full((2, 3), i, "f4"), "e": np.full(3, i, "i4")}
        write(tmp_path / f"{i}.safetensors", tensors, {PIECES: json.dumps(offsets)})
    attack_folder("sets of pieces", tmp_path)


def test_odd_files_of_torch(tmp_path: Path) -> None:
    torch.save(
        {"w": torch.ones(3, 4), "b": torch.ones(2).bfloat16(), "l": [1, "x", None, (2,)]}, tmp_path / "m.pt"
    )
    good = (tmp_path / "m.pt").read_bytes()

    def attack(choice: random.Random) -> bool:
        try:
            tree = read_archive(np.frombuffer(mutated(good, choice), np.uint8), "m.pt")
            leaves = flatten(tree)[1].values()  # refuses objects that are not read
        except TStoreError as error:
            refusal = str(error)
        else:
            return all(isinstance(leaf.tobytes(), bytes) for leaf in leaves)
        assert len(refusal) < 5000
        return False

    fuzz("files of torch.save", attack, 600)
