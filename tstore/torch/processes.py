"""The processes of a torch process group that save or restore together."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tstore.errors import InvalidArgument

__all__ = ["ALONE", "Processes"]


class Processes(NamedTuple):
    """This process, `host` of `hosts`, and the process group through which they agree, if there is one.

    `device` is the GPU of the thread that made this, because NCCL uses the current device of the calling thread.
    """

    host: int
    hosts: int
    group: dist.ProcessGroup | None
    device: torch.device | None

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Processes:
        """Return the processes of a group (by default all), or only this one without `init_process_group`."""
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group = group if group is not None else dist.group.WORLD
        host = dist.get_rank(group)
        if host < 0:
            raise InvalidArgument("this process is not in the process group; only its members make the call")
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        return Processes(host, dist.get_world_size(group), group, device)

    def exchange(self, value: Any, failure: Exception | None) -> list[Any]:
        """Return the values of all processes in their order; raise in all processes if one has a `failure`."""
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        proposals = self.gather((value, text))
        if failure is not None:
            raise failure
        for number, (_, reason) in enumerate(proposals):
            if reason:
                raise InvalidArgument(f"process {number} of {self.hosts} can't take part: {reason}")
        return [value for value, _ in proposals]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, each of which makes this call, in their order."""
        if self.hosts == 1:
            return [value]
        values: list[Any] = [None] * self.hosts
        with torch.cuda.device(self.device) if self.device is not None else contextlib.nullcontext():
            dist.all_gather_object(values, value, group=self.group)
        return values


ALONE = Processes(0, 1, None, None)
"""This process without others."""
