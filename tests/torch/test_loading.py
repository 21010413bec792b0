"""Tensors of a checkpoint for servers: streamed, loaded into modules, and handed to transformers and vLLM."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tstore
import tstore.sync
from tests.support.documents import ROOT
from tests.support.modules import module_at
from tstore.errors import Corrupt, InvalidArgument, NotFound, StructureMismatch

torch.manual_seed(0)


def network() -> torch.nn.Sequential:
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    return module.to(torch.bfloat16)


@pytest.fixture
def saved(url: str) -> tuple[str, torch.nn.Module]:
    module = network()
    tstore.sync.torch.save(url, {"run": {"net": module}, "epoch": 3, "other": torch.ones(2)}, 1)
    return url, module


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    states = [module.state_dict() for module in (one, other)]
    return states[0].keys() == states[1].keys() and all(states[0][k].equal(states[1][k]) for k in states[0])


async def test_tensors_are_streamed(saved: tuple[str, torch.nn.Module]) -> None:
    url, module = saved
    tensors = {name: tensor async for name, tensor in tstore.torch.stream(url, group="run/net")}
    state = module.state_dict()
    assert tensors.keys() == state.keys()
    assert all(tensors[name].equal(state[name]) for name in state)
    stream = tstore.torch.stream(url, group="run/net", dtype=torch.float32, order=["2.bias"])
    name, cast = await anext(stream)
    await stream.aclose()
    assert (name, cast.dtype) == ("2.bias", torch.float32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
async def test_modules_are_filled_or_get_new_tensors(saved: tuple[str, torch.nn.Module], device: str) -> None:
    url, module = saved
    with torch.device(device):
        loaded = network()
    before = loaded[0].weight
    await tstore.torch.load_into(loaded, url, group="run/net", assign=device == "meta")
    assert same(loaded, module)
    assert (loaded[0].weight is before) == (device == "cpu")
    assert all(parameter.requires_grad for parameter in loaded.parameters())


async def test_floats_are_cast_to_the_dtypes_of_the_module(saved: tuple[str, torch.nn.Module]) -> None:
    url, module = saved
    for assign in (False, True):
        loaded = network().float()
        await tstore.torch.load_into(loaded, url, group="run/net", assign=assign)
        assert loaded[2].weight.dtype == torch.float32
        assert same(loaded.to(torch.bfloat16), module)


async def test_nothing_is_loaded_unless_everything_fits(saved: tuple[str, torch.nn.Module]) -> None:
    url, _ = saved
    for module, mismatch in (
        (torch.nn.Sequential(*network(), torch.nn.Linear(3, 3)), "missing in the checkpoint: run/net/3.weight"),
        (network()[:2], "unexpected, not in the target: run/net/2.weight"),
        (torch.nn.Sequential(*network()[:2], torch.nn.Linear(5, 4)), "run/net/2.weight: stored bfloat16"),
    ):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with pytest.raises(StructureMismatch, match=mismatch):
            await tstore.torch.load_into(module, url, group="run/net")
        assert all(before[name].equal(tensor) for name, tensor in module.state_dict().items())


class WithExtra(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


async def test_what_cannot_be_loaded_is_refused(url: str) -> None:
    expanded = torch.nn.Linear(3, 2)
    expanded.weight = torch.nn.Parameter(torch.zeros(2, 1).expand(2, 3))
    for module, message in (
        (torch.nn.Linear(3, 2, device="meta"), "weight is on the meta device .* pass assign=True"),
        (WithExtra(3, 2), "_extra_state: load_into loads no extra state"),
        (expanded, "weight: its elements share memory"),
    ):
        await tstore.torch.save(url, {"model": WithExtra(3, 2)}, 1, overwrite=True)
        with pytest.raises(InvalidArgument, match=message):
            await tstore.torch.load_into(module, url)


async def test_a_failed_read_says_which_tensors_were_filled(tmp_path: Path) -> None:
    module = torch.nn.ParameterDict({f"p{n}": torch.full((3 << 20,), n + 1.0) for n in range(3)})
    await tstore.torch.save(tmp_path, {"model": module}, 1)
    *_, (last, _) = [item async for item in tstore.torch.stream(tmp_path)]
    for pack in tmp_path.glob("txn/*/pack-*"):
        data = pack.read_bytes()
        if (at := data.find(module[last].detach().numpy().tobytes())) >= 0:
            pack.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    loaded = torch.nn.ParameterDict({name: torch.zeros(3 << 20) for name in module})
    with pytest.raises(Corrupt) as caught:
        await tstore.torch.load_into(loaded, tmp_path)
    filled = [name for name, tensor in loaded.items() if tensor.any()]
    assert filled
    [note] = caught.value.__notes__
    assert [line.strip() for line in note.splitlines()[1:]] == filled


def test_a_state_dict_is_the_whole_tree(url: str) -> None:
    module, loaded = network(), network()
    tstore.sync.torch.save(url, module.state_dict(), 1)
    tstore.sync.torch.load_into(loaded, url, group="")
    assert same(loaded, module)
    with pytest.raises(NotFound, match="group='model' is where the state_dict is saved, '' if"):
        tstore.sync.torch.load_into(loaded, url)


@pytest.mark.parametrize("group", ["", "model"])
def test_only_names_the_tensors_to_load(url: str, group: str) -> None:
    """As for a buffer that the module no longer has, though its checkpoint does."""
    module, loaded = network(), network()
    saved = {**module.state_dict(), "old": torch.zeros(2)}
    tstore.sync.torch.save(url, {group: saved} if group else saved, 1)
    with pytest.raises(StructureMismatch, match=r"unexpected, not in the target: .*old"):
        tstore.sync.torch.load_into(loaded, url, group=group)
    tstore.sync.torch.load_into(loaded, url, group=group, only="0.*")
    assert loaded[0].weight.equal(module[0].weight)
    assert not same(loaded, module)
    tstore.sync.torch.load_into(loaded, url, group=group, only=list(module.state_dict()))
    assert same(loaded, module)


def test_transformers_take_a_stream_as_a_state_dict(url: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=32
    )
    model = transformers.BertModel(config)
    tstore.sync.torch.save(url, {"model": model}, 1)
    state = dict(tstore.sync.torch.stream(url))
    loaded = transformers.BertModel.from_pretrained(None, config=config, state_dict=state)
    assert same(loaded, model)


LOADERS: dict[str, type] = {}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The interface of vLLM's model loaders, as its source has it in 2026: vLLM itself needs CUDA."""

    class ModelConfig:
        model = "config-and-tokenizer/"

    class LoadConfig:
        def __init__(self, model_loader_extra_config: dict[str, Any]) -> None:
            self.model_loader_extra_config = model_loader_extra_config

    class BaseModelLoader:
        def __init__(self, load_config: LoadConfig) -> None:
            self.load_config = load_config

        def download_model(self, model_config: ModelConfig) -> None:
            raise NotImplementedError

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            raise NotImplementedError

    def register_model_loader(load_format: str) -> Any:
        def register(loader: type) -> type:
            assert issubclass(loader, BaseModelLoader)
            LOADERS[load_format] = loader
            return loader

        return register

    for name, members in {
        "vllm": {},
        "vllm.config": {"ModelConfig": ModelConfig},
        "vllm.config.load": {"LoadConfig": LoadConfig},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules["vllm.model_executor.model_loader.base_loader"]
    LOADERS.clear()


def test_the_loader_for_vllm_has_its_interface(saved: tuple[str, torch.nn.Module], vllm: Any) -> None:
    url, module = saved
    module_at(ROOT / "examples" / "vllm_loader.py")

    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> set[str]:
            self.received = {name: tensor.clone() for name, tensor in weights}
            return set(self.received)

    options = {"url": url, "group": "run/net"}
    loader, model = LOADERS["tstore"](sys.modules["vllm.config.load"].LoadConfig(options)), Model()
    for method in ("download_model", "load_weights"):
        ours, theirs = (inspect.signature(getattr(c, method)) for c in (type(loader), vllm.BaseModelLoader))
        assert list(ours.parameters) == list(theirs.parameters)
    config = sys.modules["vllm.config"].ModelConfig()
    loader.download_model(config)
    loader.load_weights(model, config)
    state = module.state_dict()
    assert model.received.keys() == state.keys()
    assert all(model.received[name].equal(state[name]) for name in state)
    assert options["url"] == url  # the configuration is not changed
