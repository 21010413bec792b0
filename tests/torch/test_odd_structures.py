"""Structure documents written by another program: modules and optimizers are restored, or it is refused."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from typing import Any

import tstore
from tests.support.fuzzing import ABSURD, changed, fuzz
from tests.support.lazy import lazy
from tstore.core.format.objects.documents import Document
from tstore.errors import TStoreError

torch = lazy("torch")
nn = lazy("torch.nn")
stores = lazy("tstore.torch")

WORDS = ["array", "scalar", "dict", "list", "tuple", "namedtuple", "none", "int", "float", "str", "bytes", "bool"]
KEYS = [["str", name] for name in ("params", "state", "param_groups", "lr", "weight", "0")]
NODES = [["none"], ["list", []], ["dict", []], ["tuple", []], ["int", "5"], ["int", "9" * 5000], ["float", "nan"]]
ODD: list[Any] = [*ABSURD, *WORDS, *KEYS, *NODES, ["list", [["int", "1"]]], ["dict", [[["str", "a"], ["none"]]]]]


def objects() -> dict[str, Any]:
    """Return a module, an optimizer with a state, and a scheduler."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 3}


def replaced(node: Any, choice: random.Random) -> None:
    """Replace a node at random below a container's by a valid one."""
    children = [pair for pair in node[1] if isinstance(pair[1], list)]
    pair = choice.choice(children)
    if pair[1][0] == "dict" and pair[1][1] and choice.random() < 0.8:
        replaced(pair[1], choice)
    else:
        pair[1] = json.loads(json.dumps(choice.choice(NODES)))


def test_odd_structures_of_states() -> None:
    with asyncio.Runner() as runner:
        store = runner.run(tstore.open(f"memory://{uuid.uuid4()}"))
        runner.run(stores.save(store, objects(), 1))
        snapshot = runner.run(store.snapshot())
        root, paths = snapshot.tree.nodes[""], list(snapshot.paths())
        good = root.document
        odd = [*ODD, ["array", paths[0]], ["scalar", paths[-1]]]

        async def restore(target: Any, choice: random.Random) -> None:
            way = choice.randrange(4)
            if way == 0:
                await stores.restore(store, 1, hosts=1)
            elif way == 1:
                await stores.restore(store, 1, target=target, hosts=1)
            elif way == 2:
                await stores.restore(store, 1, target=target, only="optimizer/**", hosts=1)
            else:
                renamed = {"m" if name == "model" else name: value for name, value in target.items()}
                names = {"model/**": "m/**"}
                await stores.restore(store, 1, target=renamed, rename=names, missing="keep", hosts=1)

        def attack(choice: random.Random) -> bool:
            fields = json.loads(good)
            document = fields["attributes"]["tstore"]["structure"]
            if choice.random() < 0.5:
                replaced(document, choice)
            else:
                document = changed(document, choice, odd)
            fields["attributes"]["tstore"]["structure"] = document
            root.metadata = Document(json.dumps(fields).encode("utf-8", "surrogatepass"))
            try:
                runner.run(restore(objects(), choice))
            except TStoreError as error:
                refusal = str(error)
            else:
                return True
            assert len(refusal) < 20_000
            return False

        fuzz("structures of states", attack, 300)
