"""The fixture `call`, which runs a command line in the process of the test."""

from __future__ import annotations

import pytest

from tests.support.commands import Call
from tstore.cli import main


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run
