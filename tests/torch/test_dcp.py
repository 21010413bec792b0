"""DCP's functions in one process, with a store in place of a folder of files."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.counted_reads import count_reads
from tests.support.lazy import lazy
from tests.support.thresholds import Thresholds
from tstore.convert.importing import import_checkpoint
from tstore.errors import InvalidArgument, Unavailable

torch = lazy("torch")
dcp = lazy("torch.distributed.checkpoint")
api = lazy("torch.distributed.checkpoint.api")
planners = lazy("torch.distributed.checkpoint.default_planner")
state_dicts = lazy("torch.distributed.checkpoint.state_dict")
stores = lazy("tstore.torch")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(128, 64).to(torch.bfloat16), "b": torch.zeros(0, 3), "s": torch.tensor(2.5)},
        "list": [torch.arange(3), {"deep": torch.ones(2, dtype=torch.float8_e5m2)}],
        "epoch": 4,
        "pair": ("a", None),
    }


def empty(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: empty(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [empty(value) for value in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one.float(), other.float()) if isinstance(one, torch.Tensor) else bool(one == other)


def test_a_state_dict_round_trips_and_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    saved, url = state(), tmp_path / "s"
    writer = stores.Writer(url, 1, metrics={"loss": 0.5}, attributes={"run": "a"}, codecs="lossless", message="m")
    dcp.save(saved, storage_writer=writer)
    loaded = empty(saved)
    dcp.load(loaded, storage_reader=stores.Reader(url))
    assert equal(loaded, saved)
    store = tstore.open(url)
    assert store.verify().ok
    assert store.snapshot().attributes("")["run"] == "a"
    [commit] = store.history()
    assert (commit.version, commit.message, commit.metadata["metrics"]) == (writer.version, "m", {"loss": 0.5})
    assert store.snapshot().paths() == ["list/0", "list/1/deep", "model/b", "model/s", "model/w"]
    assert equal(tstore.torch.restore(url), saved)
    target = {"model": empty(saved["model"])}
    tstore.torch.restore(url, target=target, only="model/**")
    assert equal(target["model"], saved["model"])
    tstore.quantize(url, {"model/w": "e4m3"}, tag="small")
    dcp.load(loaded, storage_reader=stores.Reader(url, at="small"))
    assert not equal(loaded["model"]["w"], saved["model"]["w"])


def test_a_load_of_a_part_casts_floats_if_asked(tmp_path: Path) -> None:
    saved, url = state(), tmp_path / "s"
    dcp.save(saved, storage_writer=stores.Writer(url), checkpoint_id="7")
    part = {"model": {"w": torch.zeros(128, 64)}, "new": torch.ones(1)}
    partial = planners.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(part, storage_reader=stores.Reader(url, dtype="target"), planner=partial)
    assert torch.equal(part["model"]["w"], saved["model"]["w"].float())
    assert part["new"].item() == 1
    dcp.load(
        part,
        storage_reader=stores.Reader(url, dtype="target"),
        checkpoint_id="outputs/checkpoint/step-7",
        planner=planners.DefaultLoadPlanner(allow_partial_load=True),
    )
    with pytest.raises(api.CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(part, storage_reader=stores.Reader(url))


def test_a_load_casts_nothing_unasked_and_floats_only(tmp_path: Path) -> None:
    """DCP's own readers load 300.3 as a uint8 of 44, 2**40 + 1 as an int32 of 1, and drop imaginary parts."""
    saved = {"f": torch.tensor([300.3]), "i": torch.tensor([2**40 + 1]), "z": torch.tensor([1 + 2j])}
    dcp.save(saved, storage_writer=stores.Writer(tmp_path, 0))
    target = {"f": torch.zeros(1, dtype=torch.uint8), "i": torch.ones(1, dtype=torch.int32), "z": torch.zeros(1)}
    for reader in (stores.Reader(tmp_path), stores.Reader(tmp_path, dtype="target")):
        with pytest.raises(api.CheckpointException, match="3 tensors have another dtype") as raised:
            dcp.load(target, storage_reader=reader)
        assert "f: stored float32, target uint8" in str(raised.value)
        assert [tensor.item() for tensor in target.values()] == [0, 1, 0]
    for dtype in (torch.bfloat16, torch.float64):
        part = {"f": torch.zeros(1, dtype=dtype)}
        with pytest.raises(api.CheckpointException, match=r"pass Reader\(…, dtype='target'\)"):
            dcp.load(part, storage_reader=stores.Reader(tmp_path))
        dcp.load(part, storage_reader=stores.Reader(tmp_path, dtype="target"))
        assert torch.equal(part["f"], saved["f"].to(dtype))
    with pytest.raises(InvalidArgument, match="dtype='float32': expected None or 'target'"):
        stores.Reader(tmp_path, dtype="float32")  # type: ignore[arg-type]


def test_tensors_whose_memory_has_other_values_than_they(tmp_path: Path) -> None:
    """Lazily conjugated and negated tensors got no values; tied and expanded ones got mixed values."""
    complex_values, many = torch.tensor([1 + 2j, 3 - 4j]), torch.arange(600_000.0)
    saved = {"z": complex_values, "imag": complex_values.imag, "a": many, "b": -many}
    tstore.torch.save(tmp_path / "s", saved, 0)
    z = torch.zeros(2, dtype=torch.complex64)
    tied = torch.zeros(600_000)
    loaded = {"z": z.conj(), "imag": torch.zeros(2, dtype=torch.complex64).conj().imag, "a": tied, "b": tied}
    dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s"))
    assert torch.equal(loaded["z"], saved["z"])
    assert torch.equal(z, saved["z"].conj())
    assert torch.equal(loaded["imag"], saved["imag"])
    assert torch.equal(tied, saved["a"]) or torch.equal(tied, saved["b"])
    part = tied[1000:]  # of the same memory, at another address
    with pytest.raises(api.CheckpointException, match="Size mismatch"):
        dcp.load({"a": tied, "b": part}, storage_reader=stores.Reader(tmp_path / "s"))
    tstore.torch.save(tmp_path / "s", {"a": many, "b": -many[1000:]}, 1)
    dcp.load({"a": tied, "b": part}, storage_reader=stores.Reader(tmp_path / "s"))
    assert torch.equal(tied[:1000], many[:1000])
    assert torch.equal(part, many[1000:]) or torch.equal(part, -many[1000:])
    with pytest.raises(api.CheckpointException, match="more than one element"):
        dcp.load({"a": torch.zeros(1).expand(600_000)}, storage_reader=stores.Reader(tmp_path / "s"))


def test_a_step_that_is_saved_while_another_is_loaded(tmp_path: Path) -> None:
    """A process that saw the newer step took its numbers, and the tensors of the coordinator's."""
    url, coordinator, other = tmp_path / "s", stores.Reader(tmp_path / "s"), stores.Reader(tmp_path / "s")
    dcp.save({"w": torch.zeros(4), "epoch": 1, "moved": torch.ones(1)}, storage_writer=stores.Writer(url, 1))
    coordinator.read_metadata()
    dcp.save({"w": torch.ones(4), "epoch": 2, "moved": 5}, storage_writer=stores.Writer(url, 2))
    loaded, planner = {"w": torch.full((4,), 9.0), "epoch": 0}, planners.DefaultLoadPlanner()
    planner.set_up_planner(loaded, other.read_metadata(), False)
    [plan] = coordinator.prepare_global_plan([other.prepare_local_plan(planner.create_local_plan())])
    other.read_data(planner.finish_plan(plan), planner)
    assert (loaded["w"].tolist(), loaded["epoch"]) == ([0] * 4, 1)
    loaded["moved"] = 0
    planner.set_up_planner(loaded, other.read_metadata(), False)
    [plan] = coordinator.prepare_global_plan([planner.create_local_plan()])
    with pytest.raises(Unavailable, match=r"version 2 was committed while .* version 1, .*:\n  moved$"):
        other.read_data(planner.finish_plan(plan), planner)


def test_what_tstore_saved_loads_with_dcp(tmp_path: Path) -> None:
    saved, url = state(), tmp_path / "s"
    tstore.torch.save(url, saved, 0)
    loaded = empty(saved)
    dcp.load(loaded, storage_reader=stores.Reader(url))
    assert equal(loaded, saved)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tstore.torch.save(url, {"model": model, "optim": optimizer, "tuple": (torch.ones(1),)}, 1)
    other = torch.nn.Linear(3, 2)
    names = state_dicts.get_state_dict(other, torch.optim.AdamW(other.parameters()))
    loaded = {"model": names[0], "optim": names[1]}
    dcp.load(loaded, storage_reader=stores.Reader(url))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(loaded["optim"]["state"]["bias"]["exp_avg"], optimizer.state[model.bias]["exp_avg"])
    assert loaded["optim"]["param_groups"][0]["lr"] == 0.25
    with pytest.raises(api.CheckpointException, match="tuple: DCP can't load tensors in a tuple"):
        dcp.load({"tuple": (torch.zeros(1),)}, storage_reader=stores.Reader(url))


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_what_dcp_saved_is_restored_into_objects(tmp_path: Path, names: bool, folder: bool) -> None:
    """Moments in float32 of bfloat16 parameters stay exact, which `load_state_dict` of optimizers casts."""

    def training() -> dict[str, Any]:
        model = torch.nn.Linear(3, 2).bfloat16()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.25), "epoch": 0}

    state, resumed = training(), training()
    state["model"](torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    state["optimizer"].step()
    for values in state["optimizer"].state.values():
        values["exp_avg"] = torch.rand(values["exp_avg"].shape)
    own = state["optimizer"].state_dict()
    as_torch = (
        state_dicts.get_state_dict(state["model"], state["optimizer"])
        if names
        else (state["model"].state_dict(), own)
    )
    saved = {"model": as_torch[0], "optimizer": as_torch[1], "epoch": 3}
    if folder:
        dcp.save(saved, checkpoint_id=tmp_path / "folder")
        asyncio.run(import_checkpoint(str(tmp_path / "folder"), str(tmp_path / "s"), 1))
    else:
        dcp.save(saved, storage_writer=stores.Writer(tmp_path / "s", 1))
    assert tstore.torch.restore(tmp_path / "s", target=resumed)["epoch"] == 3
    restored = resumed["optimizer"].state_dict()
    assert restored["param_groups"] == own["param_groups"]
    assert torch.equal(resumed["model"].weight, state["model"].weight)
    for number, values in own["state"].items():
        assert torch.equal(restored["state"][number]["exp_avg"], values["exp_avg"])


def test_objects_too_long_for_the_structure_stay_pickles(tmp_path: Path) -> None:
    saved = {"long": list(range(100_000)), "size": torch.Size([2]), "w": torch.ones(2)}
    dcp.save(saved, storage_writer=stores.Writer(tmp_path / "s", 0))
    assert tstore.open(tmp_path / "s").snapshot().paths() == ["long", "size", "w"]
    loaded: dict[str, Any] = {"long": [], "size": None, "w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s"))
    assert loaded["long"] == saved["long"]
    assert type(loaded["size"]) is torch.Size


def test_objects_too_deep_or_under_too_long_a_path_stay_pickles(tmp_path: Path) -> None:
    """As part of the structure, the first would make all other numbers disappear, the second would be an error."""
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    state = {"deep": deep, "k" * 4095: [1, 2, 3], "epoch": 7}
    dcp.save(state, storage_writer=tstore.torch.Writer(tmp_path, 1), no_dist=True)
    assert tstore.torch.restore(tmp_path)["epoch"] == 7
    target = dict.fromkeys(state, 0)
    dcp.load(target, storage_reader=tstore.torch.Reader(tmp_path), no_dist=True)
    assert target == state


def test_numbers_of_numpy_load_with_dcp_as_tensors(tmp_path: Path) -> None:
    tstore.save(tmp_path / "s", {"lr": np.float32(0.5), "t": (np.int64(3), 4), "w": np.ones(2, "f4")}, 0)
    loaded: dict[str, Any] = {"lr": torch.tensor(0.0), "w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s"))
    assert (loaded["lr"].item(), loaded["w"].tolist()) == (0.5, [1, 1])
    with pytest.raises(api.CheckpointException, match="t: DCP can't load tensors in a tuple"):
        dcp.load({"t": None}, storage_reader=stores.Reader(tmp_path / "s"))


def test_trees_that_are_no_state_dicts_are_told(tmp_path: Path) -> None:
    for step, tree, reason in (
        (0, [np.ones(2)], "not a state dict that DCP can load"),
        (1, {"a.b": np.ones(2), "a": {"b": np.ones(2)}}, r"duplicated flatten key a\.b"),
    ):
        tstore.save(tmp_path / "s", tree, step)
        with pytest.raises(api.CheckpointException, match=f"{reason}.*tstore.torch.restore"):
            dcp.load({"a": torch.ones(2)}, storage_reader=stores.Reader(tmp_path / "s"))


def test_names_that_are_not_nested(tmp_path: Path) -> None:
    saved = {"a/b.c": torch.ones(2), "x": {"y": torch.ones(1)}}  # DCP pickles x, and does not load it
    dcp.save(
        saved,
        storage_writer=stores.Writer(tmp_path / "s", 0),
        planner=planners.DefaultSavePlanner(flatten_state_dict=False),
    )
    loaded: dict[str, Any] = {"a/b.c": torch.zeros(2), "x": None}
    dcp.load(
        loaded,
        storage_reader=stores.Reader(tmp_path / "s"),
        planner=planners.DefaultLoadPlanner(flatten_state_dict=False),
    )
    assert torch.equal(loaded["a/b.c"], saved["a/b.c"])
    assert tstore.open(tmp_path / "s").snapshot().paths() == ["a%2fb.c", "x"]


class Custom:
    """An object whose unpickling runs code."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_that_could_run_code_are_loaded_only_on_trust(tmp_path: Path) -> None:
    dcp.save({"x": Custom(5)}, storage_writer=stores.Writer(tmp_path / "s", 0))
    loaded: dict[str, Any] = {"x": None}
    with pytest.raises(api.CheckpointException, match=r"x: a pickled object that may run code.*'trusted'"):
        dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s"))
    assert loaded["x"] is None
    dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s", pickles="trusted"))
    assert loaded["x"].value == 5
    harmless = {"x": (torch.ones(2), {"n": 3})}
    dcp.save(harmless, storage_writer=stores.Writer(tmp_path / "s", 1))
    dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s", 1))
    assert (loaded["x"][0].tolist(), loaded["x"][1]) == ([1, 1], {"n": 3})
    with pytest.raises(InvalidArgument, match="'safe' or 'trusted'"):
        stores.Reader(tmp_path / "s", pickles="yes")  # type: ignore[arg-type]


def test_bytes_in_memory_are_pickled_and_loaded(tmp_path: Path) -> None:
    dcp.save({"b": io.BytesIO(b"abc")}, storage_writer=stores.Writer(tmp_path, 0))
    loaded = {"b": io.BytesIO()}
    dcp.load(loaded, storage_reader=stores.Reader(tmp_path))
    assert loaded["b"].getvalue() == b"abc"
    with pytest.raises(InvalidArgument, match=r"an object that DCP has pickled; load it with dcp\.load"):
        tstore.torch.restore(tmp_path, target=loaded)


def test_pickled_objects_are_not_given_to_a_torch_that_runs_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"x": Custom(5), "w": torch.ones(3)}, storage_writer=stores.Writer(tmp_path / "s", 0))
    loaded: dict[str, Any] = {"x": None}
    with monkeypatch.context() as patch:
        patch.setattr("torch.__version__", "2.9.1+cu128")
        patch.setattr("torch.load", lambda *_, **__: pytest.fail("the bytes of the store were unpickled"))
        tensors = {"w": torch.zeros(3)}
        dcp.load(tensors, storage_reader=stores.Reader(tmp_path / "s"))
        assert tensors["w"].tolist() == [1, 1, 1]
        with pytest.raises(api.CheckpointException, match=r"PyTorch 2.9.1\+cu128 .*install PyTorch 2.10 or newer"):
            dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s"))
    monkeypatch.setattr("torch.__version__", "2.9.1+cu128")
    dcp.load(loaded, storage_reader=stores.Reader(tmp_path / "s", pickles="trusted"))
    assert loaded["x"].value == 5


def test_a_save_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: Any) -> None:
        raise RuntimeError("interrupted")

    url = tmp_path / "s"
    writer = stores.Writer(url, 1)
    with monkeypatch.context() as broken:
        broken.setattr(writer, "finish", interrupted)
        with pytest.raises(api.CheckpointException, match="interrupted"):
            dcp.save(state(), storage_writer=writer)
    assert tstore.steps(url) == []
    dcp.save(state(), storage_writer=writer)
    assert (tstore.steps(url), writer.version) == ([1], 1)


def test_saves_in_the_background_that_overlap(tmp_path: Path) -> None:
    """The first was committed as the step of the second."""
    second_ended, first_began = threading.Event(), threading.Event()

    class Planner(planners.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            first_began.set()
            assert second_ended.wait(60)
            return super().create_local_plan()

    writer = stores.Writer(tmp_path / "s", overwrite=True)
    first = dcp.async_save(
        {"x": torch.ones(3)}, checkpoint_id="1", storage_writer=writer, planner=Planner(), no_dist=True
    )
    assert first_began.wait(60)
    second = dcp.async_save({"x": torch.zeros(3)}, checkpoint_id="2", storage_writer=writer, no_dist=True)
    second.result()  # type: ignore[union-attr]
    second_ended.set()
    first.result()  # type: ignore[union-attr]
    assert [tstore.restore(tmp_path / "s", step)["x"].sum() for step in (1, 2)] == [3, 0]


def test_a_list_of_the_values_of_all_hosts_is_refused(tmp_path: Path) -> None:
    tstore.torch.save(tmp_path, {"w": torch.ones(2), "own": tstore.PerHost(3)}, 1)
    values = tstore.torch.restore(tmp_path, per_host="all")
    for tree in (values, {"deep": [values["own"]]}):
        with pytest.raises(api.CheckpointException, match=r"(own|deep)\S*: DCP would save"):
            dcp.save(tree, storage_writer=stores.Writer(tmp_path, 2))
    values["own"].append(torch.nn.Linear(1, 1))  # also if its objects have a state
    with pytest.raises(InvalidArgument, match="own: a list of the values of 2 hosts"):
        tstore.torch.save(tmp_path, values, 2)
    assert tstore.steps(tmp_path) == [1]


def test_wrong_use(tmp_path: Path) -> None:
    url = tmp_path / "s"
    with pytest.raises(InvalidArgument, match="a URL or a path"):
        stores.Writer(tstore.open("memory://wrong"), 1)
    with pytest.raises(InvalidArgument, match="both name a version"):
        stores.Reader(url, 1, at=2)
    with pytest.raises(InvalidArgument, match="expected a step, such as"):
        dcp.save(state(), storage_writer=stores.Writer(url), checkpoint_id=str(tmp_path))
    with pytest.raises(api.CheckpointException, match="no step: pass it"):
        dcp.save(state(), storage_writer=stores.Writer(url))
    with pytest.raises(api.CheckpointException, match="is not a tstore store"):
        dcp.load(state(), storage_reader=stores.Reader(url))
    with pytest.raises(api.CheckpointException, match="w: a tensor of layout"):
        dcp.save({"w": torch.eye(2).to_sparse()}, storage_writer=stores.Writer(url, 1))
    assert not url.exists()
    dcp.save(state(), storage_writer=stores.Writer(url, 1))
    with pytest.raises(api.CheckpointException, match="step 1 is already saved"):
        dcp.save(state(), storage_writer=stores.Writer(url, 1))
    dcp.save(state(), storage_writer=stores.Writer(url, 1, overwrite=True))
    assert tstore.steps(url) == [1]
    assert stores.Writer.validate_checkpoint_id("100")
    assert all(
        map(stores.Writer.validate_checkpoint_id, ("step/7", "step-7", "/run/step-7", "gs://b/run/step_7/"))
    )
    assert not any(map(stores.Reader.validate_checkpoint_id, ("/a/path", "run/7", "laststep-7", "step-7/part")))


def test_a_load_of_few_tensors_reads_the_metadata_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    thresholds(PAGE_BYTES=4000, SHORT_MANIFEST=4000)
    tstore.save(tmp_path, {f"w{number:04}": np.full(2, number) for number in range(2000)}, 1)
    sizes = count_reads(monkeypatch)
    read_data, before = stores.Reader.read_data, []

    def counted(*arguments: Any) -> Any:
        before.append(sum(sizes))
        return read_data(*arguments)

    monkeypatch.setattr(stores.Reader, "read_data", counted)
    target = {"w1234": torch.zeros(2, dtype=torch.int64)}
    dcp.load(target, storage_reader=stores.Reader(tmp_path))
    assert target["w1234"].tolist() == [1234, 1234]
    assert sum(sizes) - before[0] < 20_000 < before[0] / 7
