"""Checkpoints of PyTorch: `state_dict`s, modules, optimizers and distributed tensors. Needs the extra `torch`.

1. `tensors` views tensors of all dtypes as NumPy arrays; `dtensors` says which regions of a DTensor a process
   holds.
2. `stateful` has the states of modules and optimizers, `leaves` makes trees of arrays from trees of tensors, and
   `processes` are those of a process group.
3. `save`, `restore`, and `checkpointer`, for a series of saves. `dcp/`: `Writer` and `Reader`, the storage of
   `torch.distributed.checkpoint`.

`tstore.sync.torch` has blocking functions with the same names.
"""

from __future__ import annotations

from tstore.torch.checkpointer import Checkpointer
from tstore.torch.dcp import Reader, Writer
from tstore.torch.restore import restore
from tstore.torch.save import save, save_async

__all__ = ["Checkpointer", "Reader", "Writer", "restore", "save", "save_async"]
