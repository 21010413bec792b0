"""tstore as the storage of `torch.distributed.checkpoint`: `dcp.save`, `dcp.load` and `dcp.async_save` unchanged.

1. `plans`: what the coordinator adds to the plans of all processes. `identifiers`: the `checkpoint_id` as a step.
2. `replicated`: checksums of the values that several processes have.
3. `writer`, `reader`: `Writer` and `Reader`, the storage that is passed to the functions of DCP.

A checkpoint of DCP has ordinary arrays at the paths of its state dict, so all of tstore works on them. Numbers,
text, None, and lists and tuples of these are stored as `tstore.torch.save` stores them; any other object that DCP
pickles is stored as an array of bytes. `Reader` reads any checkpoint, also those of `tstore.torch.save`.
"""

from __future__ import annotations

from tstore.torch.dcp.reader import Reader
from tstore.torch.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
