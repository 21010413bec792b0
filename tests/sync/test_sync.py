"""The blocking names: the same as the awaited ones, from any thread, loop or process."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jedi
import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support import http_server, processes
from tests.support.interrupts import AT_EVERY_MOMENT
from tests.support.sync_stub import MODULES, stub_path, sync_stub
from tstore.checkpoint.job_store import CheckpointerOptions
from tstore.checkpoint.options import CommitOptions, CommitSettings, SaveOptions, SharedOptions
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.storage.local.store import LocalStorage

CLASSES = ["Array", "Checkpointer", "Mapped", "Snapshot", "Store", "Transaction"]


def test_the_modules_have_the_same_names() -> None:
    assert set(blocking.__all__) == set(tstore.__all__)
    for name in tstore.__all__:
        awaited, counterpart = getattr(tstore, name), getattr(blocking, name)
        if inspect.isroutine(awaited):
            assert inspect.iscoroutinefunction(awaited) or inspect.isasyncgenfunction(awaited)
            assert not inspect.iscoroutinefunction(counterpart)
            assert not inspect.isasyncgenfunction(counterpart)


@pytest.mark.parametrize("module", ["tstore.sync", "tstore.sync.jax", "tstore.sync.torch"])
def test_help_and_completion_show_what_a_user_calls_and_gets(module: str) -> None:
    names = importlib.import_module(module)
    assert set(names.__all__) <= set(dir(names)) <= {*names.__all__, "jax", "torch", "zarr"}
    values = [getattr(names, name) for name in names.__all__]
    values = [value for value in values if getattr(value, "__module__", "") == module]
    methods = [method for value in values if inspect.isclass(value) for method in vars(value).values()]
    for function in filter(inspect.isfunction, [*values, *methods]):
        returned = str(inspect.signature(function).return_annotation)
        assert not any(word in returned for word in ("Coroutine", "Async", "Call")), function


@pytest.mark.parametrize("name", ["open", "save", "save_async", "restore", "steps", "quantize"])
def test_functions_have_the_same_signature(name: str) -> None:
    awaited, counterpart = (inspect.signature(getattr(m, name)) for m in (tstore, blocking))
    assert counterpart.parameters == awaited.parameters
    assert getattr(blocking, name).__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_methods_have_the_same_signature(name: str) -> None:
    awaited, counterpart = getattr(tstore, name), getattr(blocking, name)
    assert inspect.getdoc(counterpart)
    public = {n for n in vars(counterpart) if not n.startswith("_")}
    assert public <= {n for n in dir(awaited) if not n.startswith("_")} | {
        "path",
        "uuid",
        "mode",
        "id",
        "version",
        "retries",
        "copied",
    }
    for method in public:
        theirs, ours = getattr(awaited, method, None), getattr(counterpart, method)
        assert inspect.getdoc(ours), method
        if callable(theirs):
            assert callable(ours)
            assert not inspect.iscoroutinefunction(ours)
            assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, method


USERS = {
    "Array": "path shape ndim size nbytes dtype chunks chunksize attributes dimension_names "
    "fill_value codecs read write resize T transpose isel oindex vindex",
    "Checkpointer": "preempted should_save save latest best steps restore_latest restore wait close",
    "Mapped": "copied keys items values verified tree",
    "Snapshot": "version tags paths attributes array",
    "Store": "url mode uuid transaction snapshot history tags diff outcome verify close",
    "Transaction": "version id retries create_array create_group array paths delete commit abort",
}


@pytest.mark.parametrize("name", CLASSES)
def test_all_public_members_exist(name: str) -> None:
    for member in USERS[name].split():
        assert hasattr(getattr(blocking, name), member), member


@pytest.mark.parametrize("module", MODULES)
def test_the_types_are_those_of_the_awaited_names(module: str) -> None:
    made, kept = (ast.dump(ast.parse(text)) for text in (sync_stub(module), stub_path(module).read_text()))
    assert made == kept, "run: python -m tests.support.sync_stub"


SAVES = {
    "save": SaveOptions,
    "save_async": SaveOptions,
    "Checkpointer.save": CommitOptions,
    "torch.save": SharedOptions,
    "torch.save_async": SharedOptions,
    "torch.Checkpointer.save": CommitOptions,
    "torch.Checkpointer": CheckpointerOptions,
    "jax.save": SharedOptions,
    "jax.save_async": SharedOptions,
    "jax.Checkpointer.save": CommitOptions,
    "jax.Checkpointer": CheckpointerOptions,
}
"""The functions that take options, and which; each passes them on to the one that declares their defaults."""


@pytest.mark.parametrize("module", [tstore, blocking])
@pytest.mark.parametrize("name", SAVES)
def test_help_and_editors_show_every_option_of_a_save(module: Any, name: str) -> None:
    function = functools.reduce(getattr, name.split("."), module)
    parameters = inspect.signature(function).parameters
    assert SAVES[name].__annotations__.keys() <= parameters.keys()
    assert "options" not in parameters
    code = f"import {module.__name__} as t\n" + f"t.{name}(".replace("Checkpointer.", "Checkpointer('s').")
    [shown] = jedi.Script(code).get_signatures()
    assert {p.name for p in shown.params} == parameters.keys() - {"self"}


@pytest.mark.parametrize(
    ("options", "declared"),
    [(CommitOptions, CommitSettings), (SaveOptions, tstore.save), (CheckpointerOptions, tstore.Checkpointer)],
)
def test_an_option_has_one_type(options: Any, declared: Any) -> None:
    """Mypy sees a name that differs, and a type only if the declared one is narrower."""
    parameters = inspect.signature(declared).parameters
    for name, annotation in options.__annotations__.items():
        assert annotation.__forward_arg__ == parameters[name].annotation, name


@pytest.mark.parametrize(
    ("expression", "parameter", "text"),
    [
        ("tstore.open", "storage_options", "Open the store at a URL"),
        ("tstore.save", "metrics", "Nested dicts, lists, tuples"),
        ("tstore.open('s').transaction", "isolation", "`with` commits"),
        ("tstore.open('s').transaction().create_array", "fill_value", "Stage a new array"),
        ("tstore.open('s').snapshot().array('w').read", "out", "Return the verified values"),
        ("tstore.open('s').snapshot().array('w')[3:, 0].write", "values", "Stage values"),
    ],
)
def test_an_editor_shows_signatures_and_docstrings(expression: str, parameter: str, text: str) -> None:
    code = f"import tstore.sync as tstore\n{expression}("
    [signature, *_] = jedi.Script(code).get_signatures()  # `open` has one for specs too
    assert parameter in [p.name for p in signature.params]
    assert text in signature.docstring(raw=True)
    complete = jedi.Script(code[:-3]).complete()
    assert expression.rpartition(".")[2] in [c.name for c in complete]


def test_modules_are_imported_when_they_are_first_used() -> None:
    """One new interpreter imports each library once: JAX and PyTorch take seconds."""
    script = """
        import sys, tstore, tstore.sync
        for library, name in (("zarr", "ZarrStore"), ("jax", "save"), ("torch", "save")):
            assert library == "zarr" or library not in sys.modules
            for module in (tstore, tstore.sync):
                assert library not in vars(module)
                getattr(getattr(module, library), name)
            assert library in sys.modules
    """
    processes.fresh_python(script)


def test_a_function_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(blocking.save)) is blocking.save


def whole_tour(url: str) -> None:
    store = blocking.open(url)
    with store.transaction("first", tag="t") as tx:
        w = tx.create_array("g/w", (6, 4), "float32", (2, 3))
        w.write(1)
        w[1:3, ::2].write(2)
        tx.create_group("g", {"a": 1})
        assert w.read()[1].tolist() == [2, 1, 2, 1]
        assert tx.paths() == ["g/w"]
        tx.array("g/w")[0].write(3)
    assert tx.version == 1
    snapshot = store.snapshot("t")
    assert (snapshot.version, snapshot.paths(), snapshot.tags) == (1, ["g/w"], {"t": 1})
    assert snapshot.attributes("g") == {"a": 1}
    assert snapshot.array("g/w")[0].read().tolist() == [3] * 4
    tx = store.transaction()
    tx.delete("g/w")
    tx.abort()
    with pytest.raises(tstore.errors.Misuse):
        tx.commit()
    assert blocking.save(store, {"x": np.arange(3)}, 0) == 2
    assert blocking.restore(store)["x"].tolist() == [0, 1, 2]
    assert blocking.steps(url) == [0]
    assert [c.version for c in store.history()] == [2, 1]
    assert store.tags() == {"t": 1, "step/0": 2}
    assert store.verify().ok
    assert store.outcome(tx.id) is None
    store.close()
    with blocking.open(url, "r") as again:
        assert again.snapshot(2).array("x").read().tolist() == [0, 1, 2]
        assert "sync" in repr(again)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_blocking_api_works_on_every_storage(tmp_path: Path, kind: str) -> None:
    whole_tour(str(tmp_path / "s") if kind == "local" else f"memory://{uuid.uuid4()}")


async def test_the_blocking_api_works_under_a_running_loop() -> None:
    """For example in a notebook."""
    whole_tour(f"memory://{uuid.uuid4()}")


def test_the_awaited_and_the_blocking_store_see_the_same(tmp_path: Path) -> None:
    blocking.save(tmp_path / "s", {"x": np.arange(3)}, 0)
    assert asyncio.run(tstore.restore(tmp_path / "s"))["x"].tolist() == [0, 1, 2]


def test_the_blocking_api_works_from_several_threads(tmp_path: Path) -> None:
    url = tmp_path / "s"
    with blocking.open(url).transaction() as tx:
        tx.create_array("w", (64, 8), "int64", (8, 8)).write(-1)
    store = blocking.open(url)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(8):
            with store.transaction() as tx:
                tx.array("w")[8 * number + turn].write(number * 8 + turn)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert (store.snapshot().array("w").read()[:, 0] == np.arange(64)).all()
    commits = list(store.history())
    assert len({c.transaction for c in commits}) == 65
    assert commits[0].version <= 65  # commits that waited for each other share a version


@pytest.mark.parametrize("index", [0, (slice(3, 9), slice(None, None, -2)), slice(0, 0), (..., None), ([5, 2], 1)])
def test_a_small_read_of_local_files_is_made_in_the_calling_thread(
    tmp_path: Path, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 30, (800, 8), "int32")
    with blocking.open(tmp_path / "s").transaction() as tx:
        tx.create_array("w", values.shape, "int32", (70, 3), codecs=["bytes", "zstd"]).write(values)
    readers: list[threading.Thread] = []
    reader = LocalStorage.reader

    def noted(self: LocalStorage, key: str) -> Any:
        readers.append(threading.current_thread())
        return reader(self, key)

    monkeypatch.setattr(LocalStorage, "reader", noted)
    array = blocking.open(tmp_path / "s").snapshot().array("w")
    out = np.zeros_like(values[index], dtype="int64")
    assert (array[index].read() == values[index]).all()
    assert array[index].read(out) is out
    assert (out == values[index]).all()
    if isinstance(index, tuple) and isinstance(index[0], list):
        return  # points are read by worker threads
    assert set(readers) <= {threading.current_thread()}
    assert readers or not values[index].size


def test_a_small_read_of_a_damaged_chunk_names_it(tmp_path: Path) -> None:
    with blocking.open(tmp_path / "s").transaction() as tx:
        tx.create_array("w", (4096,), "f8", (2048,)).write(1.0)
    [pack] = (tmp_path / "s").glob("txn/*/pack-*")
    pack.write_bytes(bytes(16384) + pack.read_bytes()[16384:])
    array = blocking.open(tmp_path / "s").snapshot().array("w")
    assert array[2048].read() == 1
    with pytest.raises(tstore.errors.Corrupt, match=r"w, chunk \(0,\)"):
        array[5].read()


def test_errors_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(tstore.errors.NotAStore) as caught:
        blocking.open(tmp_path, "r")
    assert isinstance(caught.value, LookupError)
    assert blocking.errors is tstore.errors


async def test_an_assignment_to_an_async_array_names_the_call_that_writes() -> None:
    async with (await tstore.open(f"memory://{uuid.uuid4()}")).transaction() as transaction:
        array: Any = await transaction.create_array("w", (3,), "f4")
        with pytest.raises(tstore.errors.Misuse, match=r"w: .*await array\[index\].write\(values\)"):
            array[0] = 1
        await array.write(1)


def test_an_assignment_writes() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as transaction:
        array = transaction.create_array("w", (3, 2), "f4")
        array[...] = 1
        array[1:, 0] = [2, 3]
        array[[0, 2], 1] = 4
        array[0] = array[1]  # a view of the same transaction
        with pytest.raises(tstore.errors.InvalidArgument, match="do not fit"):
            array[:2] = [1, 2, 3]
    assert store.snapshot().array("w").read().tolist() == [[2, 1], [2, 1], [3, 4]]
    with pytest.raises(tstore.errors.Misuse, match="open a transaction"):
        store.snapshot().array("w")[0] = 1


def test_a_block_that_raises_aborts() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")

    def fails() -> None:
        with store.transaction() as tx:
            tx.create_array("w", (4,), "int8")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert store.snapshot().version == 0


LEFT_EARLY = {
    "break": "for commit in store.history(): break",
    "dropped": "next(store.history())",
    "closed": "commits = store.history(); next(commits); commits.close()",
    "exit": "commits = store.history(); next(commits)",
    "unread": "commits = store.history(); del commits",
    "raised": "try:\n    for commit in store.history(): raise ValueError\nexcept ValueError: pass",
    "cycle": "commits = [store.history()]; next(commits[0]); commits.append(commits); del commits; gc.collect()",
    "thread": "t = threading.Thread(target=lambda: next(store.history())); t.start(); t.join()",
}


@pytest.mark.parametrize("how", LEFT_EARLY)
def test_a_history_may_be_left_early(tmp_path: Path, how: str) -> None:
    with blocking.open(tmp_path / "s") as store:
        for name in "abc":
            with store.transaction() as tx:
                tx.create_group(name)
    script = f"import gc, threading, tstore.sync as tstore\nstore = tstore.open({str(tmp_path / 's')!r}, 'r')\n"
    # the loop closes the iteration asynchronously; a later call, run by the same loop, waits for that
    script += f"{LEFT_EARLY[how]}\n" + ("" if how == "exit" else "store.tags()\n")
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_blocking_call_on_its_own_loop_is_misuse() -> None:
    async def inside() -> Any:
        return blocking.open(f"memory://{uuid.uuid4()}")

    with pytest.raises(tstore.errors.Misuse, match="await"):
        BACKGROUND.run(inside())


FORKING = """
    import os, sys, warnings
    import numpy as np
    import tstore.sync as tstore
    url = sys.argv[1]
    store = tstore.open(url)
    tree = {"x": np.random.default_rng(0).random(1_000_000), "y": np.arange(3)}
    tstore.save(store, tree, 0)
    assert tstore.restore(store)["x"].tobytes() == tree["x"].tobytes()  # loop, threads and open files are there
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own advice about fork and threads
    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            ok = tstore.restore(store)["x"].tobytes() == tree["x"].tobytes()
            ok = ok and tstore.restore(url)["y"].tolist() == [0, 1, 2]
            with store.transaction() as tx:
                tx.create_array(f"child/{number}", (2,), "int8").write(number)
            os._exit(0 if ok else 3)
        children.append(pid)
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tstore.restore(store)["y"].tolist() == [0, 1, 2]
    print(store.snapshot().version, len(store.snapshot().paths()), store.verify().ok)
"""


def test_a_forked_child_works(tmp_path: Path) -> None:
    assert processes.python(FORKING, tmp_path / "s").split() == ["5", "6", "True"]


FORKED_INSIDE = """
    import os, sys, warnings
    import numpy as np
    import tstore.sync as tstore
    from tstore.errors import Misuse
    warnings.simplefilter("ignore", DeprecationWarning)
    store = tstore.open(sys.argv[1])
    expected = np.arange(80_000.0).reshape(4, 20_000)
    with store.transaction() as tx:
        w = tx.create_array("w", (4, 20_000), "f8", (1, 20_000))
        w[:2].write(expected[:2])
        uses = [
            (lambda: w[2].write(0), 3),
            (lambda: w[0].read(), 3),
            (tx.commit, 3),
            (lambda: tx.__exit__(None, None, None), 3),
            (lambda: tx.__exit__(KeyError, KeyError(), None), 0),
            (tx.abort, 0),
        ]
        for use, status in uses:
            pid = os.fork()
            if pid == 0:
                try:
                    use()
                except Misuse as error:
                    os._exit(3 if "forked" in str(error) else 4)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
        w[2:].write(expected[2:])
    print(tx.version, np.array_equal(store.snapshot().array("w").read(), expected), store.verify().ok)
"""


@pytest.mark.parametrize("place", ["local", "served"])
def test_a_forked_child_cannot_harm_a_transaction(tmp_path: Path, place: str) -> None:
    with contextlib.ExitStack() as stack:
        url: object = tmp_path / "s"
        if place == "served":
            url = stack.enter_context(http_server.serving(url, "--anonymous", "write")).url
        assert processes.python(FORKED_INSIDE, url).split() == ["1", "True", "True"]


INTERRUPTED = """
    import sys, time
    import numpy as np
    import tstore.sync as tstore
    from tstore.core.storage.local.store import LocalStorage
    url, stage = sys.argv[1:]
    store = tstore.open(url)
    tree = {f"x{i}": np.random.default_rng(i).random(4_000_000) for i in range(8)}
    more = {"host": 0, "hosts": 2, "attempt": "a"} if stage == "wait" else {}
    print("ready", flush=True)
    start = time.monotonic()
    try:
        while True:
            if stage == "wait":
                tstore.save(store, {"x": np.zeros(3)}, 1, timeout=1000, **more)
            else:
                tstore.save(store, tree, 1 + (tstore.steps(store) or [0])[-1], durability="none")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    import gc
    gc.collect()
    known = tstore.steps(store)
    print(known[0], len(known), tstore.open(url).verify().ok)
    print(tstore.save(store, {"x": np.ones(3)}, 10_000) > 1)
"""


@pytest.mark.parametrize("stage", ["write", "wait"])
def test_ctrl_c_cancels_a_save_at_once_and_harms_nothing(tmp_path: Path, stage: str) -> None:
    url = tmp_path / "s"
    blocking.save(url, {"x": np.zeros(3)}, 0)
    process = processes.start(INTERRUPTED, url, stage)
    with processes.running(process):
        assert processes.line(process) == "ready"
        assert process.stdout is not None
        assert asyncio.run(begun(url))
        process.send_signal(signal.SIGINT)
        killer = threading.Timer(processes.DEADLINE, process.kill)
        killer.start()
        assert processes.line(process) == "interrupted"
        killer.cancel()
        known, rest = processes.result(process).splitlines()
    assert known.endswith("True")
    assert rest == "True"
    assert not blocking.restore(url, 0)["x"].any()


NOT_WOKEN = """
    import os, signal, sys, threading
    import numpy as np
    import tstore.sync as tstore
    store, wait = tstore.open(sys.argv[1]), sys.argv[2]

    def signals():
        sys.stdin.readline()
        # a signal that comes just before a wait begins does not end it; nor does one that this thread receives
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=signals, daemon=True).start()
    more = {"host": 0, "hosts": 2, "attempt": "a", "timeout": 1000}
    try:
        if wait == "save":
            tstore.save(store, {"x": np.zeros(3)}, 1, **more)
        else:
            tstore.save_async(store, {"x": np.zeros(3)}, 1, **more).wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    os._exit(0)  # without waiting for a background save
"""


@pytest.mark.parametrize("wait", ["save", "wait"])
def test_ctrl_c_is_noticed_though_it_does_not_wake_the_main_thread(tmp_path: Path, wait: str) -> None:
    url = tmp_path / "s"
    blocking.save(url, {"x": np.zeros(3)}, 0)
    process = processes.start(NOT_WOKEN, url, wait)
    with processes.running(process):
        assert asyncio.run(begun(url))
        assert process.communicate("now\n", timeout=processes.DEADLINE)[0] == "interrupted\n"


INTERRUPTED_ANYWHERE = (
    AT_EVERY_MOMENT
    + """
    import warnings
    import tstore.sync as tstore
    warnings.simplefilter("ignore")  # of coroutines that had no time to begin
    array = tstore.open("memory://interrupted").transaction().create_array("a", (3,), "int32")
    moments = interrupted_at_every_moment(lambda: array.write([1, 2, 3]))
    print(moments > 20, array.read().tolist())
"""
)


def test_ctrl_c_at_any_moment_leaves_later_calls_and_the_exit_unblocked() -> None:
    assert processes.python(INTERRUPTED_ANYWHERE).split(maxsplit=1) == ["True", "[1, 2, 3]\n"]


async def begun(url: Path) -> bool:
    """Return once the store has an object of a second transaction."""
    deadline = asyncio.get_running_loop().time() + 30
    while asyncio.get_running_loop().time() < deadline:
        if any(files for _, _, files in os.walk(url / "txn")):
            return True
        await asyncio.sleep(0.001)
    return False
