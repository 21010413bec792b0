"""Mutation testing: functions of the source, temporarily replaced by faulty versions."""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest


class Edit(NamedTuple):
    """Replace the text `old`, which must occur once, by `new` in a function ("module:Class.method")."""

    function: str
    old: str
    new: str

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function by the edited one, everywhere it was imported."""
        name, _, path = self.function.partition(":")
        module = importlib.import_module(name)
        *owners, last = path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part)
        source = textwrap.dedent(inspect.getsource(getattr(owner, last)))
        assert source.count(self.old) == 1, f"{self.function} has changed; adapt this mutation: {self.old!r}"
        flags = __future__.annotations.compiler_flag
        assert inspect.unwrap(getattr(owner, last)).__module__ == name, f"{self.function} is defined elsewhere"
        code = compile(source.replace(self.old, self.new), f"<mutated {self.function}>", "exec", flags)
        made: dict[str, Any] = {}
        exec(code, module.__dict__, made)
        real = getattr(owner, last)
        patch.setattr(owner, last, made[last])
        for name, other in list(sys.modules.items()):  # modules that imported it by name, tests too
            if name.partition(".")[0] in ("tstore", "tests") and vars(other).get(last) is real:
                patch.setattr(other, last, made[last])
