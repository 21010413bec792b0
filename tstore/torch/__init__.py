"""Checkpoints of PyTorch: `state_dict`s, modules, optimizers and distributed tensors. Needs the extra `torch`.

1. `tensors` views tensors of all dtypes as NumPy arrays; `dtensors` says which regions of a DTensor a process
   holds.
2. `forms`: tensor subclasses and `BytesIO`, which are stored as tensors. `modules`: modules inside wrappers.
   `stateful`: the states of modules and optimizers, and `memory` to read them into. `leaves`: trees of arrays,
   made from trees of tensors. `processes`: the processes of a process group.
3. `save`, `restore`, `loading` of tensors one after the other, and `checkpointer`, for a series of saves. `dcp/`:
   `Writer` and `Reader`, the storage of `torch.distributed.checkpoint`.

`tstore.sync.torch` has blocking functions with the same names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tstore.core.hints import no_such_name
from tstore.torch.checkpointer import Checkpointer
from tstore.torch.loading import load_into, stream
from tstore.torch.restore import restore
from tstore.torch.save import save, save_async

if TYPE_CHECKING:
    from tstore.torch.dcp import Reader, Writer

__all__ = ["Checkpointer", "Reader", "Writer", "load_into", "restore", "save", "save_async", "stream"]


def __getattr__(name: str) -> Any:
    if name in ("Reader", "Writer"):  # DCP takes a second to import
        return getattr(importlib.import_module("tstore.torch.dcp"), name)
    raise no_such_name(__name__, name)
