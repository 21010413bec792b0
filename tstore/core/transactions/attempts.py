"""The attempt of a save by several hosts: a value that all of them share, and no other save ever uses.

It contains a token that is new with each start of the job. If the token is not passed, it is detected only where
the environment provides one:

    SLURM       Job, step and restart count name one start if each host is a task of the step. A script that
                starts the program again in its task changes no variable, so this process must be the task itself.
                The tasks of a heterogeneous job have different job ids.
    torchrun    Each agent counts the restarts of its own workers, but not those for a worker of another agent, and
                a run id may be used again. So the workers of one agent have a token: the agent makes a folder with
                a random name, and in it a new folder for each start. The parent of all of them is the agent, not a
                script that starts the program again.

`tstore.torch` and `tstore.jax` exchange a token between the processes instead.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from tstore.core.format.arguments import checked_name
from tstore.core.runtime import world
from tstore.errors import InvalidArgument

__all__ = ["Attempt", "detected_attempt", "needed_attempt", "start_token"]

_HETEROGENEOUS = ("SLURM_HET_", "SLURM_PACK_", "SLURM_JOB_ID_HET_GROUP_", "SLURM_JOB_ID_PACK_GROUP_")


class Attempt(NamedTuple):
    """The identity of one save by several hosts; parts of different attempts are never mixed.

    `token` is that of this start of the job, `rollback` the version of the job's last rollback, and `save` the
    number of this save of the step since then. `replaced` is the version of the step that the save overwrites:
    without it, the id could be that of the overwritten save. `rewrites` says that the hosts save all chunks once
    more, because garbage collection condemned some to which the save referred.
    """

    token: str
    rollback: int | None = None
    save: int = 1
    replaced: int | None = None
    rewrites: bool = False

    @classmethod
    def passed_or_detected(cls, token: str | None, hosts: int) -> Self | None:
        """Return the first attempt of this start of the job; None if its token is neither passed nor detected."""
        token = detected_attempt(os.environ, hosts) if token is None else checked_name("attempt", token)
        return None if token is None else cls(token)

    def next_save(self, url: str, host: int, step: int) -> Self:
        """Return the attempt for the next save of a step: each host counts its saves, and all make the same saves.

        A save that failed may have left parts of some hosts, which must not be mixed with those of a later save.
        """
        with _lock:
            _saves[url, host, step, self] += 1
            return self._replace(save=_saves[url, host, step, self])

    def __str__(self) -> str:
        """Return the text that is hashed into the id of the transaction; different attempts have different texts.

        It is the token alone, or the token with the other fields and the length of the token: "job.7.try.2#5".
        """
        text = self.token if self.rollback is None else f"{self.token}.after.{self.rollback}"
        text += f".try.{self.save}" if self.save > 1 else ""
        text += ".anew" if self.rewrites else ""
        text += "" if self.replaced is None else f".over.{self.replaced}"
        return text if text == self.token and not _WITH_LENGTH.search(text) else f"{text}#{len(self.token)}"


_WITH_LENGTH = re.compile(r"#\d+\Z")
_lock = threading.Lock()
_saves: Counter[tuple[str, int, int, Attempt]] = Counter()
"""How often this process has saved a step, by URL, host, step and attempt."""


def start_token(token: str | None, hosts: int) -> str:
    """Return the token of this start of the job, passed or detected; a random one for a job of one host."""
    attempt = Attempt.passed_or_detected(token, hosts)
    if attempt is not None:
        return attempt.token
    return needed_attempt(os.environ, hosts) if hosts > 1 else world.token(12)


def needed_attempt(environment: Mapping[str, str], hosts: int) -> str:
    """Return the token of this start of the job; raise `InvalidArgument` if it can't be detected."""
    token = detected_attempt(environment, hosts)
    if token is not None:
        return token
    reason = ""
    if "TORCHELASTIC_RUN_ID" in environment:
        reason = " (torchrun has one only for the workers of one agent)"
    elif "SLURM_JOB_ID" in environment:
        reason = " (SLURM has one only for programs that srun starts itself, not through a script)"
    raise InvalidArgument(
        f"{hosts} hosts need attempt=…, a token that is the same on every host and new with each start of the "
        f"job{reason}: let one host draw it and send it to the others, as tstore.torch and tstore.jax do"
    )


def detected_attempt(environment: Mapping[str, str], hosts: int) -> str | None:
    """Return the token for this start of the job that every host finds in its environment, or None."""
    if "TORCHELASTIC_RUN_ID" in environment:  # perhaps within a step of SLURM
        return _torchrun_start(environment, hosts)
    return _slurm_step(environment, hosts)


def _torchrun_start(environment: Mapping[str, str], hosts: int) -> str | None:
    run, count = environment["TORCHELASTIC_RUN_ID"], environment.get("TORCHELASTIC_RESTART_COUNT", "")
    # <folder>/<run id>_<random characters>/attempt_<restart count>/<local rank>/error.json
    folder = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    has_random_name = folder.name == f"attempt_{count}" and folder.parent.name.startswith(f"{run}_")
    if environment.get("GROUP_WORLD_SIZE") != "1" or _number(environment, "LOCAL_WORLD_SIZE") < hosts:
        return None
    return _start_in(folder) if run and count and has_random_name else None


@functools.cache  # something may delete the folder while the job runs
def _start_in(folder: Path) -> str | None:
    """Return a token derived from the folder that torchrun's agent, the parent process, made for this start."""
    try:
        made = folder.stat().st_mtime_ns
    except OSError:
        return None
    return f"torchrun-{folder.parent.name}.{os.getppid()}.{made}"


def _slurm_step(environment: Mapping[str, str], hosts: int) -> str | None:
    is_task = environment.get("SLURM_TASK_PID") == str(os.getpid())
    if not is_task or _number(environment, "SLURM_STEP_NUM_TASKS") < hosts:
        return None
    ids = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    ids.append(environment.get("SLURM_RESTART_COUNT", "0"))  # set by the first restart
    if not all(ids) or any(name.startswith(_HETEROGENEOUS) for name in environment):
        return None
    return f"slurm-{'.'.join(ids)}"


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0
