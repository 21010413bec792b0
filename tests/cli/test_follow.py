"""`tstore follow`: a line or a command for each version."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tstore.sync as tstore
from tests.support.commands import Call, failed


def test_a_command_runs_for_each_version_until_it_fails(tmp_path: Path, call: Call) -> None:
    store = tmp_path / "store"
    for step in (1, 2, 3):
        tstore.save(store, {"w": np.full(3, step)}, step)
    each = call("follow", store, "--since", 0, "--tags", "step/*", "--count", 2)
    assert each == (0, "version 1 step/1\nversion 2 step/2\n", "")
    assert call("follow", store, "--newest", "--since", 0, "--count", 1)[1] == "version 3 step/3\n"
    script = f'echo "$TSTORE_URL $TSTORE_VERSION $TSTORE_TAGS" >> {tmp_path}/lines; test $TSTORE_VERSION != 2'
    code, _, err = call("follow", store, "--since", 0, "--exec", script)
    assert (code, (tmp_path / "lines").read_text()) == (1, f"{store} 1 step/1\n{store} 2 step/2\n")
    assert "the command for version 2 exited with 1" in err
    assert "continue with --since 1" in err
    failed(call("follow", tmp_path / "none", "--count", 1), "does not exist")
