"""Modules, optimizers and schedulers: restored in place, they train on as if they had never stopped."""

from __future__ import annotations

import copy
import io
import uuid
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.lazy import lazy
from tstore.errors import InvalidArgument, NotFound, StructureMismatch

torch = lazy("torch")
nn = lazy("torch.nn")
api = lazy("torch.distributed.checkpoint.api")
dcp = lazy("torch.distributed.checkpoint")
state_dicts = lazy("torch.distributed.checkpoint.state_dict")
net = lazy("tests.torch.net")


class Loader:
    """Has other keys from batch to batch, as stateful data loaders have."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.loads = state, 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.loads = state, self.loads + 1


def url() -> str:
    return f"memory://{uuid.uuid4()}"


def training(seed: int, optimizer: str = "AdamW") -> dict[str, Any]:
    torch.manual_seed(seed)
    model = net.Net()
    own = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01 + seed)
    return {"model": model, "optimizer": own, "scheduler": torch.optim.lr_scheduler.StepLR(own, 2), "epoch": seed}


def train(state: dict[str, Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(state["model"](x), x)
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
def test_training_goes_on_as_if_it_had_not_stopped(optimizer: str) -> None:
    store, state = url(), training(0, optimizer)
    train(state, range(3))
    tstore.torch.save(store, state, 3)
    uninterrupted = train(state, range(3, 6))
    resumed = training(1, optimizer)
    result = tstore.torch.restore(store, target=resumed)
    assert (result["epoch"], result["model"]) == (0, resumed["model"])
    assert resumed["model"].out.weight is resumed["model"].embed.weight
    assert train(resumed, range(3, 6)) == uninterrupted
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(tensor, resumed["model"].state_dict()[name]), name
    assert resumed["scheduler"].state_dict() == state["scheduler"].state_dict()


def test_a_save_before_the_first_step_and_a_restore_into_a_state_of_later() -> None:
    store, state = url(), training(0)
    tstore.torch.save(store, state, 0)
    assert not state["optimizer"].state
    first = train(state, range(2))
    resumed = training(1)
    tstore.torch.restore(store, target=resumed)
    assert train(resumed, range(2)) == first
    tstore.torch.save(store, state, 2)
    second = train(state, range(2, 4))
    memory = resumed["optimizer"].state[resumed["model"].layer.weight]["exp_avg"].data_ptr()
    tstore.torch.restore(store, target=resumed)
    assert resumed["optimizer"].state[resumed["model"].layer.weight]["exp_avg"].data_ptr() == memory
    assert train(resumed, range(2, 4)) == second


def test_states_whose_keys_have_changed_since_the_save() -> None:
    store, state = url(), training(0)
    state["loader"] = Loader({"worker": [1, {"rng": torch.arange(3)}], "position": (4, None)})
    del state["optimizer"].param_groups[0]["foreach"]
    tstore.torch.save(store, state, 0)  # before the first step
    later = {**training(1), "loader": Loader({})}
    train(later, range(2))
    tstore.torch.restore(store, target=later)
    assert not later["optimizer"].state
    assert later["optimizer"].param_groups[0]["foreach"] is None
    assert later["loader"].state["worker"][1]["rng"].tolist() == [0, 1, 2]
    assert later["loader"].state["position"] == (4, None)
    state["optimizer"].param_groups[0]["foreach"] = None
    assert train(later, range(2)) == train(state, range(2))


def test_an_object_with_arrays_gets_arrays() -> None:
    store, random, other = url(), np.random.Philox(0), np.random.Philox(1)
    tstore.torch.save(store, {"loader": Loader(dict(random.state))}, 0)
    loader = Loader(dict(other.state))
    tstore.torch.restore(store, target={"loader": loader})
    other.state = loader.state  # takes no tensors of uint64
    assert other.random_raw() == random.random_raw()


def test_the_state_of_an_optimizer_has_the_names_of_its_parameters() -> None:
    store, state = url(), training(0)
    train(state, range(1))
    tstore.torch.save(store, state, 1)
    saved = tstore.torch.restore(store)["optimizer"]
    assert list(saved["state"]) == ["embed.weight", "layer.weight", "layer.bias", "norm.weight", "norm.bias"]
    assert torch.equal(saved["state"]["layer.bias"]["step"], torch.tensor(1.0))
    # another order of the parameters, in groups
    torch.manual_seed(1)
    model = net.Net()
    parameters = dict(model.named_parameters())
    late = torch.optim.AdamW(reversed(list(parameters.values())), lr=0.5)
    tstore.torch.restore(store, target={"model": model, "optimizer": late}, only=["model/**", "optimizer/**"])
    own = state["optimizer"].state[state["model"].layer.weight]["exp_avg"]
    assert torch.equal(late.state[parameters["layer.weight"]]["exp_avg"], own)
    assert late.param_groups[0]["lr"] == 0.01


def test_an_optimizer_without_its_module_keeps_its_numbers() -> None:
    store, state = url(), training(0)
    train(state, range(1))
    tstore.torch.save(store, [state["optimizer"]], 1)
    assert list(tstore.torch.restore(store)[0]["state"]) == [0, 1, 2, 3, 4]
    resumed = training(1)
    tstore.torch.restore(store, target=[resumed["optimizer"]])
    own, other = state["optimizer"].state_dict(), resumed["optimizer"].state_dict()
    assert torch.equal(own["state"][1]["exp_avg"], other["state"][1]["exp_avg"])
    assert own["param_groups"] == other["param_groups"]


@pytest.mark.parametrize("names", [False, True])
def test_an_optimizer_is_restored_from_what_torch_makes_of_it(names: bool) -> None:
    store, state = url(), training(0)
    train(state, range(2))
    del state["scheduler"]
    as_torch = state_dicts.get_state_dict(state["model"], state["optimizer"]) if names else None
    model, optimizer = as_torch or (state["model"].state_dict(), state["optimizer"].state_dict())
    tstore.torch.save(store, {"model": model, "optimizer": optimizer, "epoch": 2}, 2)
    resumed = training(1)
    del resumed["scheduler"]
    tstore.torch.restore(store, target=resumed)
    own, restored = state["optimizer"].state_dict(), resumed["optimizer"].state_dict()
    assert restored["param_groups"] == own["param_groups"]
    for number, values in own["state"].items():
        assert torch.equal(restored["state"][number]["exp_avg"], values["exp_avg"])


def test_numbered_state_of_parameters_in_another_order_is_refused() -> None:
    store, state = url(), training(0)
    train(state, range(1))
    tstore.torch.save(store, {"optimizer": state["optimizer"].state_dict()}, 1)
    late = torch.optim.AdamW(reversed(list(net.Net().parameters())))
    with pytest.raises(StructureMismatch, match=r"state/0/exp_avg: stored float32\[11, 8\], target float32\[8\]"):
        tstore.torch.restore(store, target={"optimizer": late})


@pytest.mark.parametrize("kind", ["a number", "a tensor"])
def test_a_schedule_of_milestones_goes_on_behind_a_warm_up(kind: str) -> None:
    """A new `SequentialLR` has one tensor as the rate of all its schedulers, which is later several."""
    store, state, resumed = url(), training(0), training(1)
    rate = torch.tensor(0.01) if kind == "a tensor" else 0.01
    rates = []
    for each in (state, resumed):
        each["optimizer"] = torch.optim.Adam(each["model"].parameters(), lr=copy.deepcopy(rate))
        warm_up = torch.optim.lr_scheduler.LinearLR(each["optimizer"], 0.1, total_iters=3)
        decay = torch.optim.lr_scheduler.MultiStepLR(each["optimizer"], [1, 3])
        each["scheduler"] = torch.optim.lr_scheduler.SequentialLR(each["optimizer"], [warm_up, decay], [3])
    train(state, range(5))
    tstore.torch.save(store, state, 2)
    tstore.torch.restore(store, target=resumed)
    for each in (state, resumed):
        rates.append([(train(each, range(1)), each["scheduler"].get_last_lr())[1] for _ in range(6)])
    assert rates[0] == rates[1]


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("resumed_has_state", [True, False])
@pytest.mark.parametrize(("weights", "moments"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_moments_of_another_dtype_than_their_parameter_are_restored_exactly(
    weights: str, moments: str, resumed_has_state: bool, names: bool
) -> None:
    """PyTorch's own `load_state_dict` casts them to the dtype of the parameter."""

    def tree(with_state: bool) -> dict[str, Any]:
        model = nn.Linear(4, 4).to(getattr(torch, weights))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters() if with_state else ():
            random = [torch.randn(parameter.shape).to(getattr(torch, moments)) for _ in range(3)]
            state = {"step": torch.tensor(3.0), "exp_avg": random[0], "exp_avg_sq": random[1].abs()}
            rows = torch.tensor([2**24 + 1] * 4)  # no float32 and no bfloat16
            optimizer.state[parameter] = state | {"other": {"masters": [random[2]], "rows": rows}}
        return {"model": model, "optimizer": optimizer} if names else {"optimizer": optimizer}

    store, saved = url(), tree(True)
    tstore.torch.save(store, saved, 0)
    resumed = tree(resumed_has_state)
    tstore.torch.restore(store, target=resumed)
    states = [job["optimizer"].state_dict()["state"] for job in (resumed, saved)]
    torch.testing.assert_close(*states, rtol=0, atol=0, check_dtype=True)


def test_an_optimizer_that_changes_what_it_loads_has_the_last_word() -> None:
    class Halved(torch.optim.SGD):  # type: ignore[misc, name-defined]
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["momentum_buffer"] /= 2

    store, weight = url(), nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = Halved([weight])
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([1.0, 2.0, 3.0])
    tstore.torch.save(store, {"optimizer": optimizer}, 0)
    tstore.torch.restore(store, target={"optimizer": optimizer})
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert (buffer.dtype, buffer.tolist()) == (torch.bfloat16, [0.5, 1, 1.5])


def test_several_modules_with_an_optimizer_each() -> None:
    def pair(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
        optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in nets]
        joint = torch.optim.Adam([*nets[0].parameters(), *nets[1].parameters()])
        for optimizer in (*optimizers, joint):
            nets[1](nets[0](torch.ones(2, 3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"nets": nets, "optimizers": (*optimizers, joint)}

    store, state, target = url(), pair(0), pair(1)
    tstore.torch.save(store, state, 0)
    tstore.torch.restore(store, target=target)
    assert "optimizers/2/state/nets.1.bias/exp_avg" in tstore.open(store).snapshot().paths()
    for one, other in zip(state["optimizers"], target["optimizers"], strict=True):
        for p, q in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            assert torch.equal(p, q)
            assert all(torch.equal(v, other.state[q][k]) for k, v in one.state[p].items() if v is not None)


def test_hooks_and_extra_state_take_part_in_loading() -> None:
    class Custom(nn.Linear):
        loaded = 0

        def get_extra_state(self) -> Any:
            return {"scale": torch.tensor([2.0]), "version": 7}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state["version"] + int(state["scale"])

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").T.contiguous()

    def renamed_back(state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").T

    def make() -> nn.Module:
        module = Custom(2, 3)
        module._register_state_dict_hook(renamed)
        module._register_load_state_dict_pre_hook(renamed_back)
        return module

    store, one, other = url(), make(), make()
    tstore.torch.save(store, one, 0)
    assert set(tstore.torch.restore(store)) == {"kernel", "bias", "_extra_state"}
    tstore.torch.restore(store, target=other)
    assert torch.equal(one.weight, other.weight)
    assert other.loaded == 9


HISTORIES: list[Callable[[], Any]] = [
    lambda: torch.arange(5, dtype=torch.uint8),
    lambda: {"amax": [torch.ones(2)], "n": 3},
    lambda: None,
]


@pytest.mark.parametrize("history", HISTORIES)
def test_an_extra_state_of_another_shape(history: Callable[[], Any]) -> None:
    class Calibrated(nn.Linear):
        """Its extra state grows in training, as that of fp8 modules does."""

        history: Any = torch.zeros(0, dtype=torch.uint8)

        def get_extra_state(self) -> Any:
            return self.history

        def set_extra_state(self, state: Any) -> None:
            self.history = state

    store, saved, loaded = url(), Calibrated(2, 2), nn.Sequential(Calibrated(2, 2))
    saved.history = history()
    tstore.torch.save(store, {"model": nn.Sequential(saved)}, 0)
    tstore.torch.restore(store, target={"model": loaded}, only="model/0.weight")
    assert not len(loaded[0].history)
    tstore.torch.restore(store, target={"model": loaded})
    assert str(loaded[0].history) == str(history())
    tstore.torch.restore(store, target={"net": loaded}, rename={"model/**": "net/**"})
    assert str(loaded[0].history) == str(history())
    assert torch.equal(loaded[0].weight, saved.weight)


def two(one: Any, other: Any) -> Any:
    """Return a tensor of a subclass with two inner tensors, `a` and `b`, as those of torchao have some."""
    return lazy("torch.testing._internal.two_tensor").TwoTensor(one, other)


def quantized(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(two(torch.randn(2, 3), two(torch.randn(2, 3), torch.randn(2, 3))))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        buffer = two(torch.randn(parameter.shape), torch.randn(parameter.shape))
        optimizer.state[parameter]["momentum_buffer"] = buffer
    tensors = [two(torch.randn(3), torch.randn(3))]
    return {"model": model, "optimizer": optimizer, "w": tensors, "plain": torch.ones(1)}


def inner(job: dict[str, Any]) -> list[Any]:
    weight = job["model"].weight
    moments = [job["optimizer"].state[p]["momentum_buffer"] for p in job["model"].parameters()]
    return [weight.a, weight.b.a, weight.b.b, *(t for m in [*moments, *job["w"]] for t in (m.a, m.b))]


def test_tensor_subclasses_are_stored_by_their_inner_tensors() -> None:
    store, saved, other = url(), quantized(0), quantized(1)
    tstore.torch.save(store, saved, 0)
    assert torch.equal(tstore.torch.restore(store)["model"]["weight"]["b"]["a"], saved["model"].weight.b.a)
    memory = [tensor.data_ptr() for tensor in inner(other)]
    restored = tstore.torch.restore(store, target=other)
    assert restored["w"][0] is other["w"][0]
    torch.testing.assert_close(inner(other), inner(saved), rtol=0, atol=0)
    assert [tensor.data_ptr() for tensor in inner(other)] == memory
    assert type(other["optimizer"].state[other["model"].weight]["momentum_buffer"]) is type(saved["w"][0])
    state = quantized(2)["model"].state_dict()
    weight = tstore.torch.restore(store, target={"model": state}, only="model/**")["model"]["weight"]
    assert weight is state["weight"]
    assert torch.equal(weight.a, saved["model"].weight.a)
    meta = {"w": [two(torch.empty(3, device="meta"), torch.empty(3, device="meta"))]}
    assert torch.equal(tstore.torch.restore(store, target=meta, only="w/**")["w"][0].b, saved["w"][0].b)
    with pytest.raises(StructureMismatch) as raised:
        tstore.torch.restore(store, target={"w": [torch.zeros(3)]}, only="w/**")
    assert raised.value.unexpected == ["w/0/a", "w/0/b"]
    fresh = {**other, "optimizer": torch.optim.SGD(other["model"].parameters(), momentum=0.9)}
    with pytest.raises(InvalidArgument, match="the SGD of the target has no such tensor; take a step before"):
        tstore.torch.restore(store, target=fresh)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_the_state_of_another_object_cannot_have_is_refused_with_advice_that_works() -> None:
    store, tensor = url(), two(torch.ones(3), torch.zeros(3))
    writer = tstore.torch.Writer(store, 0)
    with pytest.raises(
        api.CheckpointException, match=r"x: a TwoTensor has no memory .*; pass ordinary tensors, such as"
    ):
        dcp.save({"x": tensor}, storage_writer=writer, no_dist=True)
    for step, value, message, stored in (
        (1, io.BytesIO(b"ab"), "h/value: an object of type BytesIO can't be stored; pass its getvalue", b"ab"),
        (2, tensor, "h/value: a TwoTensor .* ordinary tensors, such as its inner ones", {"a": tensor.a}),
    ):
        with pytest.raises(InvalidArgument, match=message):
            tstore.torch.save(store, {"h": Loader({"value": value})}, step)
        tstore.torch.save(store, {"h": Loader({"value": stored})}, step)
        other = Loader({"value": type(stored)()})
        tstore.torch.restore(store, step, target={"h": other})
        assert str(other.state["value"]) == str(stored)


def with_bytes(scale: float) -> Any:
    """Return a module whose extra state is a `BytesIO`, as that of modules of TransformerEngine is."""

    class WithBytes(nn.Linear):  # type: ignore[misc, name-defined]
        scale: float

        def get_extra_state(self) -> io.BytesIO:
            torch.save({"scale": [self.scale] * int(self.scale)}, stream := io.BytesIO())
            return stream

        def set_extra_state(self, state: io.BytesIO) -> None:
            state.seek(0)
            self.scale = torch.load(state)["scale"][0]

    module = WithBytes(2, 2)
    module.scale = scale
    return module


def test_bytes_in_memory_are_stored_as_an_array_of_bytes() -> None:
    store, saved = url(), with_bytes(900.0)
    tstore.torch.save(store, {"model": saved, "note": io.BytesIO(b"ab"), "none": io.BytesIO()}, 0)
    assert tstore.torch.restore(store)["note"].tolist() == [97, 98]
    model, note = with_bytes(1.0), io.BytesIO(b"longer")
    result = tstore.torch.restore(store, target={"model": model, "note": note, "none": io.BytesIO(b"x")})
    assert model.scale == 900
    assert (result["note"].read(), result["none"].read()) == (b"ab", b"")
    target = {"model": with_bytes(1.0).state_dict(), "note": note}
    restored = tstore.torch.restore(store, target=target, only="model/**")
    assert restored["model"]["_extra_state"].getvalue() == saved.get_extra_state().getvalue()
    assert restored["note"] is note
    tstore.torch.save(store, {"note": torch.ones(2)}, 1)
    with pytest.raises(StructureMismatch, match=r"note: stored float32\[2\], target uint8\[6\]"):
        tstore.torch.restore(store, target={"note": note})


def test_wrappers_leave_no_trace_in_the_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    store, plain = url(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    class Compiled(nn.Module):  # as torch.compile makes, whose import takes seconds
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), Compiled(nn.Linear(2, 2)))
    compiled = Compiled(wrapped)
    tstore.torch.save(store, plain, 0)
    tstore.torch.restore(store, target=compiled)
    tstore.torch.save(store, {"m": compiled, "o": torch.optim.SGD(compiled.parameters(), momentum=0.1)}, 1)
    again = tstore.torch.restore(store)
    assert again["o"]["param_groups"][0]["params"].keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again["m"][name], tensor)


def test_a_module_that_does_not_fit() -> None:
    store = url()
    tstore.torch.save(store, {"model": nn.Linear(2, 3)}, 0)
    with pytest.raises(StructureMismatch) as caught:
        tstore.torch.restore(store, target={"model": nn.Sequential(nn.Linear(2, 3))})
    assert caught.value.missing == ["model/0.weight", "model/0.bias"]
    assert caught.value.unexpected == ["model/weight", "model/bias"]
    model = nn.Sequential(nn.Linear(2, 3))
    tstore.torch.restore(store, target={"model": model}, rename={"model/*": "model/0.*"})
    with torch.device("meta"):
        abstract = nn.Linear(2, 3)
    with pytest.raises(InvalidArgument, match="meta"):
        tstore.torch.restore(store, target={"model": abstract})
    state = tstore.torch.restore(store, target={"model": abstract.state_dict()})["model"]
    abstract.load_state_dict(state, assign=True)
    assert torch.equal(abstract.weight, model[0].weight)


def test_tied_weights_whose_values_differ_in_the_checkpoint() -> None:
    store = url()
    untied = net.Net()
    untied.out.weight = nn.Parameter(untied.embed.weight.detach() + 1)
    tstore.torch.save(store, {"model": untied}, 0)
    with pytest.raises(InvalidArgument, match=r"^model/out\.weight: is tied to model/embed\.weight in the target"):
        tstore.torch.restore(store, target={"model": net.Net()})
    tied = net.Net()
    tstore.torch.restore(store, target={"model": tied}, only="model/out.weight")
    assert torch.equal(tied.embed.weight, untied.out.weight)
    untied.out.weight = untied.embed.weight
    with torch.no_grad():
        untied.embed.weight[0, 0] = torch.nan  # equal bits, though NaN is not equal to itself
    tstore.torch.save(store, {"model": untied}, 1)
    tstore.torch.restore(store, target={"model": tied})
    assert torch.equal(tied.embed.weight[1:], untied.embed.weight[1:])
    assert tied.out.weight is tied.embed.weight


def mismatch(store: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> StructureMismatch:
    with pytest.raises(StructureMismatch) as caught:
        tstore.torch.restore(store, target={"model": model, "optimizer": optimizer}, **options)
    return caught.value


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    store, model = url(), nn.Linear(3, 3)
    group = "optimizer/param_groups/0"
    adam = stepped(model, torch.optim.AdamW(model.parameters()))
    tstore.torch.save(store, {"model": model, "optimizer": adam}, 0)
    error = mismatch(store, model, torch.optim.SGD(model.parameters(), momentum=0.9))
    assert {f"{group}/momentum", f"{group}/dampening"} <= set(error.missing)
    assert {"optimizer/state/weight/exp_avg", f"{group}/betas/0"} <= set(error.unexpected)
    error = mismatch(store, model, torch.optim.SGD(model.parameters()), only="**")
    assert "optimizer/state/bias/exp_avg_sq" in error.unexpected
    sgd = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    mismatch(store, model, sgd, missing="keep")
    tstore.torch.save(store, {"model": model, "optimizer": sgd}, 1)
    error = mismatch(store, model, adam)
    assert {"optimizer/state/weight/exp_avg", f"{group}/eps"} <= set(error.missing)
    assert "optimizer/state/bias/momentum_buffer" in error.unexpected
    error = mismatch(store, model, torch.optim.AdamW(model.parameters()))
    assert "optimizer/state/bias/momentum_buffer" in error.unexpected
    # an optimizer of the same class with other hyperparameters gets those of the checkpoint
    plain = torch.optim.SGD(model.parameters())
    tstore.torch.restore(store, target={"model": model, "optimizer": plain})
    assert plain.param_groups[0]["momentum"] == 0.9
    assert torch.equal(plain.state[model.bias]["momentum_buffer"], sgd.state[model.bias]["momentum_buffer"])


def test_parameters_that_have_changed_groups_are_refused() -> None:
    store, model = url(), nn.Linear(3, 3)
    decay, none = {"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}
    tstore.torch.save(store, {"model": model, "optimizer": torch.optim.AdamW([decay, none])}, 0)
    tstore.torch.restore(store, target={"model": model, "optimizer": torch.optim.AdamW([decay, none])})
    error = mismatch(store, model, torch.optim.AdamW([none, decay]))
    assert error.missing == [f"optimizer/param_groups/{n}/params/{p}" for n, p in ((0, "bias"), (1, "weight"))]
    error = mismatch(store, model, torch.optim.AdamW(model.parameters()))
    assert error.missing == ["optimizer/param_groups/0/params/bias"]
    tstore.torch.save(store, {"model": model, "optimizer": torch.optim.AdamW([model.weight])}, 1)
    whole = torch.optim.AdamW(model.parameters(), lr=0.5)
    assert mismatch(store, model, whole).missing == ["optimizer/param_groups/0/params/bias"]
    tstore.torch.restore(store, target={"model": model, "optimizer": whole}, missing="keep")
    assert whole.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("kept", ["embed.weight", "out.weight"])
def test_a_tied_weight_that_the_checkpoint_has_once_fills_both(kept: str) -> None:
    """safetensors' `save_model`, as Hugging Face uses it, leaves out all but one of tied weights."""
    store, saved, model = url(), net.Net(), net.Net()
    assert model.out.weight is model.embed.weight
    state = {
        name: value for name, value in saved.state_dict().items() if name not in ("embed.weight", "out.weight")
    }
    tstore.torch.save(store, {**state, kept: saved.embed.weight}, 0)
    for target in (model, model.state_dict()):
        model.embed.weight.data.zero_()
        tstore.torch.restore(store, target=target)
        assert torch.equal(model.embed.weight, saved.embed.weight)
        assert torch.equal(model.out.weight, saved.embed.weight)
    untied = {**model.state_dict(), "embed.weight": model.embed.weight.clone()}
    with pytest.raises(StructureMismatch) as raised:
        tstore.torch.restore(store, target=untied)
    assert len(raised.value.missing) == 1


def test_tied_weights_are_stored_once() -> None:
    store = url()
    embed = nn.Embedding(1024, 256)  # 1 MiB
    head = nn.Linear(256, 1024, bias=False)
    head.weight = embed.weight
    tstore.torch.save(store, {"embed": embed, "head": head}, 0)
    [commit] = tstore.open(store).history()
    assert commit.bytes_added == 1024 * 256 * 4
    restored = tstore.torch.restore(store)
    assert torch.equal(restored["embed"]["weight"], embed.weight)
    assert torch.equal(restored["head"]["weight"], embed.weight)


def test_two_values_of_a_module_with_one_name() -> None:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._orig_mod = nn.Linear(2, 2)

    with pytest.raises(InvalidArgument, match=r"two values named '0\.weight', one of them '0\._orig_mod\.weight'"):
        tstore.torch.save(url(), {"m": nn.Sequential(Odd())}, 0)


def test_two_parameters_with_one_name_have_numbers() -> None:
    store, one, other = url(), nn.Linear(3, 3), nn.Linear(3, 3)
    tree = {"a": {"b.c": one}, "a.b": {"c": other}}
    sgd = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    tstore.torch.save(store, {**tree, "optimizer": stepped(nn.Sequential(one, other), sgd)}, 0)
    assert list(tstore.torch.restore(store)["optimizer"]["state"]) == [0, 1, 2, 3]
    fresh = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    tstore.torch.restore(store, target={**tree, "optimizer": fresh})
    for parameter in (*one.parameters(), *other.parameters()):
        assert torch.equal(fresh.state[parameter]["momentum_buffer"], sgd.state[parameter]["momentum_buffer"])


def test_only_leaves_all_other_objects_as_they_are() -> None:
    """Their states were replaced by uninitialized tensors."""
    store, state = url(), {**training(0), "loader": Loader({"position": torch.ones(5)})}
    train(state, range(2))
    tstore.torch.save(store, state, 1)
    odd = np.zeros(2, ml_dtypes.float8_e3m4)  # torch has no such dtype
    tstore.save(store, {**tstore.restore(store), "odd": odd}, 2)
    target = {**training(1), "loader": Loader({"n": 7})}
    restored = tstore.torch.restore(store, target=target, only="model/**")
    assert torch.equal(target["model"].layer.weight, state["model"].layer.weight)
    assert not target["optimizer"].state
    assert target["optimizer"].param_groups[0]["lr"] == 1.01
    assert target["scheduler"].last_epoch == 0
    assert (target["loader"].state, target["loader"].loads) == ({"n": 7}, 0)
    assert restored["epoch"] == 1
    tstore.torch.restore(store, target=target, only=["optimizer/**", "epoch"])
    assert target["optimizer"].param_groups[0]["lr"] == pytest.approx(0.001)
    assert len(target["optimizer"].state) == 5
    assert target["scheduler"].last_epoch == 0
    tstore.torch.restore(store, step=1, target={**target, "new": Loader({"n": 8})}, missing="keep")
    assert target["scheduler"].last_epoch == 2
    assert target["loader"].state["position"].sum() == 5


@pytest.mark.parametrize("numbered", [False, True])
def test_an_optimizer_keeps_the_state_that_is_not_restored(numbered: bool) -> None:
    """`only` and missing="keep" dropped the moments of all other parameters."""
    store, state = url(), training(0)
    train(state, range(2))
    saved = state["optimizer"].state_dict() if numbered else state["optimizer"]
    tstore.torch.save(store, {"model": state["model"], "optimizer": saved}, 1)
    layer = "1" if numbered else "layer.weight"

    def steps(**options: Any) -> dict[str, float]:
        new = training(1)
        train(new, range(5))
        model, optimizer = new["model"], new["optimizer"]
        lr = optimizer.param_groups[0]["lr"]
        tstore.torch.restore(store, target={"model": model, "optimizer": optimizer}, **options)
        assert (optimizer.param_groups[0]["lr"] == lr) == ("param_groups" not in str(options))
        assert all(set(values) == {"step", "exp_avg", "exp_avg_sq"} for values in optimizer.state.values())
        return {name: float(optimizer.state[p]["step"]) for name, p in model.named_parameters()}

    unchanged = dict.fromkeys(["embed.weight", "layer.weight", "layer.bias", "norm.weight", "norm.bias"], 5.0)
    assert steps(only="optimizer/param_groups/**") == unchanged
    changed = {**unchanged, "layer.weight": 2.0}
    assert steps(only=["optimizer/param_groups/**", f"optimizer/state/{layer}/**"]) == changed
    if not numbered:  # the groups of the checkpoint say that it numbers the parameters
        assert steps(only=f"optimizer/state/{layer}/step") == changed


def test_an_optimizer_keeps_the_state_that_the_checkpoint_lacks() -> None:
    store, small, large = url(), nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizers = {}
    for model, steps in ((small, 2), (large, 5)):
        optimizers[model] = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizers[model].step()
    tstore.torch.save(store, {"model": small, "optimizer": optimizers[small]}, 1)
    own = optimizers[large]
    tstore.torch.restore(store, target={"model": large, "optimizer": own}, missing="keep")
    assert [float(own.state[p]["step"]) for p in large.parameters()] == [2, 2, 5, 5]


def test_only_may_select_what_has_no_arrays() -> None:
    store, state, resumed = url(), training(0), training(1)
    train(state, range(3))
    tstore.torch.save(store, state, 3)
    scheduler = resumed["scheduler"]
    tstore.torch.restore(store, target={"scheduler": scheduler}, only="scheduler/**")
    assert scheduler.state_dict() == state["scheduler"].state_dict()
    assert tstore.torch.restore(store, target={"epoch": 5}, only="epoch") == {"epoch": 0}
    assert tstore.torch.restore(store, only="epoch") == {"epoch": 0}
    with pytest.raises(NotFound, match=r"did you mean only='scheduler/\*\*'"):
        tstore.torch.restore(store, target={"scheduler": scheduler}, only="scheduler")


def test_objects_beside_renamed_ones_keep_their_containers() -> None:
    store, state = url(), training(0)
    state["scheduler"] = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda step: 0.5**step)
    state["loader"] = Loader({"worker": (1, {"rng": [torch.arange(3)]}), 5: None})
    train(state, range(2))
    optimizer, scheduler = state["optimizer"], state["scheduler"]
    saved = {"net": state["model"], "all": [optimizer, scheduler, state["loader"]], "alone": (optimizer,)}
    tstore.torch.save(store, saved, 0)
    new = training(1)
    late = torch.optim.lr_scheduler.LambdaLR(new["optimizer"], lambda step: 0.5**step)
    loader = Loader({"worker": (2, {"rng": [torch.zeros(3)]}), 5: None})
    numbered = torch.optim.AdamW(new["model"].parameters())
    target = {"model": new["model"], "all": [new["optimizer"], late, loader], "alone": (numbered,)}
    tstore.torch.restore(store, target=target, rename={"net/**": "model/**"})
    assert late.state_dict() == scheduler.state_dict()
    assert loader.state["worker"][1]["rng"][0].tolist() == [0, 1, 2]
    assert (loader.state["worker"][0], loader.state[5]) == (1, None)
    for own in (new["optimizer"], numbered):
        assert own.param_groups[0]["betas"] == (0.9, 0.999)
        one, other = own.state[new["model"].layer.bias], optimizer.state[state["model"].layer.bias]
        assert torch.equal(one["exp_avg"], other["exp_avg"])
    new["scheduler"], state["loader"] = late, None
    assert train(new, range(2, 4)) == train(state, range(2, 4))


@pytest.mark.parametrize("state", [5, "text", [1, [2]], {"last_epoch": "x", "a": {}}, {"base_lrs": None}])
def test_an_object_that_refuses_its_state_is_named(state: Any) -> None:
    """Another program may have written the state."""

    class Picky(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["w"] == 1

    url = f"memory://{uuid.uuid4()}"
    tstore.torch.save(url, {"loader": state, "epoch": 1}, 1)
    target = {"loader": Picky({}), "epoch": 0}
    with pytest.raises(
        InvalidArgument, match="a Picky of the target can't load the state that the checkpoint has"
    ):
        tstore.torch.restore(url, target=target)


def test_a_state_beyond_the_memory_is_refused() -> None:
    url = f"memory://{uuid.uuid4()}"
    with tstore.open(url) as store:
        tstore.torch.save(store, {"loader": {"x": torch.ones(2), "epoch": 1}}, 1)
        with store.transaction(move_tag="step/1") as tx:
            tx.delete("loader/x")
            tx.create_array("loader/x", (1 << 58,), "float32", (1 << 20,), sparse=True)
    with pytest.raises(InvalidArgument, match="does not fit in memory"):
        tstore.torch.restore(url, target={"loader": Loader({})})


def test_a_state_of_nested_lists_of_tensors() -> None:
    store, model = url(), nn.Linear(3, 3)

    def optimizer() -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
        own = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> Any:
            own.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        return own, closure

    (one, closure), (other, _) = optimizer(), optimizer()
    one.step(closure)
    tstore.torch.save(store, {"model": model, "optimizer": one}, 0)
    tstore.torch.restore(store, target={"model": model, "optimizer": other})
    mine, restored = one.state[model.weight], other.state[model.weight]
    assert mine["old_dirs"]
    assert all(map(torch.equal, mine["old_dirs"], restored["old_dirs"]))
