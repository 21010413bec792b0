"""Deliberate faults: a function of the source rewritten, and put in its place for a while."""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest


class Edit(NamedTuple):
    """In the function `where` ("module:Class.method"), the text `old`, which must be there once, becomes `new`."""

    where: str
    old: str
    new: str

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Puts the rewritten function in the place of the real one."""
        name, _, path = self.where.partition(":")
        module = importlib.import_module(name)
        *owners, last = path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part)
        source = textwrap.dedent(inspect.getsource(getattr(owner, last)))
        assert source.count(self.old) == 1, f"{self.where} has changed; mend this mutation: {self.old!r}"
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), f"<mutated {self.where}>", "exec", flags)
        made: dict[str, Any] = {}
        exec(code, module.__dict__, made)
        real = getattr(owner, last)
        patch.setattr(owner, last, made[last])
        for name, other in list(sys.modules.items()):  # where it was imported by its name
            if name.partition(".")[0] == "tstore" and vars(other).get(last) is real:
                patch.setattr(other, last, made[last])
