"""Types of the public names, written by tests/support/sync_stub.py from those in `tstore`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tstore import sync
from tstore.checkpoint.background import InFlight, StagingChoice
from tstore.checkpoint.job_store import Tiered
from tstore.checkpoint.policies import Policy
from tstore.checkpoint.request import Cast, Missing, PerHostRule
from tstore.checkpoint.series import OnError, OnSaved
from tstore.checkpoint.stream import Order
from tstore.quantization.policy import QuantizeRules, Target
from tstore.sync import BackgroundSave, Keep, Store
from tstore.torch import Reader, Writer

__all__ = ["Checkpointer", "Reader", "Writer", "load_into", "restore", "save", "save_async", "stream"]

class Checkpointer(sync.Checkpointer):
    """`tstore.Checkpointer` for trees of tensors: the checkpoints of one job.

    Every process of the group makes the same calls. `save`, `restore` and `restore_latest` take trees as
    `tstore.torch.save` and `tstore.torch.restore` do. Policies may decide differently in different processes, so
    the processes share their decisions in an all-gather at each step; with `EverySteps(10) & OnPreemption()`, only
    at every 10th step.

    Parameters
    ----------
    group
        The process group whose processes save and restore together, by default all.
    store, every, keep, codecs, timeout, staging, in_flight, on_error, on_saved
        As `tstore.Checkpointer` takes them."""

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | Tiered,
        *,
        group: Any | None = None,
        staging: StagingChoice = "memory",
        every: int | Policy | None = None,
        keep: int | Keep | None = None,
        codecs: QuantizeRules | Target = None,
        timeout: float | None = None,
        in_flight: InFlight = "queue",
        on_error: OnError = "raise",
        on_saved: OnSaved | None = None,
    ) -> None: ...
    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        attributes: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        message: str = "",
        durability: Literal["fsync", "none"] = "fsync",
        timeout: float | None = None,
        overwrite: bool = False,
        priority: Literal["normal", "low"] | None = None,
    ) -> BackgroundSave:
        """Start saving a tree of tensors as a step, as `save_async` does, even if no policy asks for it.

        Raise what `save_async` raises. If an earlier save has failed in a process, all of them raise an error, but
        only once this one has begun."""

    def restore(self, step: int, target: Any = None, **options: Any) -> Any:
        """Return a step as `tstore.torch.restore` does, with its options; wait for saves under way first.

        Raise what `tstore.torch.restore` raises, and the error of a save that failed."""

def load_into(
    module: Any,
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    group: str = "model",
    only: str | list[str] | None = None,
    assign: bool = False,
) -> None:
    """Load the parameters and buffers of a module from a group of a checkpoint, while the next ones are read.

    All names, shapes and dtypes are checked before anything is loaded; floats are cast. If a read fails later, a
    note of the error has the names of the tensors that were filled. This process loads alone, and needs little
    more memory than the module. `tstore.torch.restore` also restores optimizers, `DTensor`s and extra state.

    Parameters
    ----------
    group
        The path of the module's `state_dict` in the saved tree, "" if it is the tree itself.
    only
        Names of tensors, or patterns of them, to load; other tensors stay, and saved ones are ignored. So
        `list(module.state_dict())` leaves out buffers that only the checkpoint has.
    assign
        Whether to replace the module's tensors by new ones on the CPU rather than to fill them, as in
        `load_state_dict`: for a module on the meta device. They keep the dtypes of the module.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import torch
    >>> saved = torch.nn.Linear(3, 2)
    >>> _ = tstore.torch.save("memory://of-load-into", {"model": saved, "epoch": 3}, step=7)
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(3, 2)
    >>> tstore.torch.load_into(model, "memory://of-load-into", assign=True)
    >>> model.weight.equal(saved.weight)
    True"""

def restore(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast | Any | Mapping[str, Any] = None,
    missing: Missing = "error",
    per_host: PerHostRule = "same",
    group: Any | None = None,
    hosts: int | None = None,
) -> Any:
    """Return the checkpoint of a step (by default the newest), or of a version or tag (`at`), as tensors.

    Every process of the process group makes this call. All restore the same step, even if another is saved
    meanwhile, and each reads only what its target holds.

    Parameters
    ----------
    target
        The tree to restore into, in place: tensors, `DTensor`s on any mesh, and objects with a `state_dict`, such
        as modules and optimizers, as in `{"model": model, "optimizer": optimizer, "epoch": 0}`. It is returned,
        with the scalars of the checkpoint. Together the targets of all processes must match the checkpoint; each
        pipeline stage may have a part. One `StructureMismatch` lists every path that is missing or unexpected, or
        has another shape or dtype. A tensor on the meta device is replaced by one on the CPU. Without a target the
        result is a nested dict of whole tensors on the CPU.
    only, rename, missing, per_host
        As in `tstore.restore`.
    dtype
        The dtype of floating-point tensors, "target" for that of the target, or dtypes by path pattern.
    group, hosts
        The process group whose processes restore the same step, by default all. With `hosts=1` this process
        restores alone, without the others.

    Raises
    ------
    As `tstore.restore`. If a read fails, the target may have a mix of old and new values.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import torch
    >>> _ = tstore.torch.save("memory://of-torch-restore", {"model": torch.nn.Linear(3, 2)}, step=7)
    >>> model = torch.nn.Linear(3, 2)
    >>> _ = tstore.torch.restore("memory://of-torch-restore", target={"model": model})  # in place
    >>> tstore.torch.restore("memory://of-torch-restore")["model"]["weight"].equal(model.weight)
    True"""

def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    group: Any | None = None,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    codecs: QuantizeRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
    overwrite: bool = False,
    priority: Literal["normal", "low"] | None = None,
) -> int:
    """Save a tree of tensors as one atomic commit and return its version. Durable on return.

    Every process of the process group calls this with its own part of the state. The processes agree through the
    group before anything is written, so an invalid tree in one of them is an error in all.

    Parameters
    ----------
    tree
        Nested dicts, lists and tuples of tensors, scalars, and objects with a `state_dict`: modules (FSDP2 and
        tensor parallel ones too), optimizers, schedulers. The state of an optimizer is saved under the names that
        its parameters have in a module of the tree. Each region of a `DTensor` is written by one of the processes
        that hold it. A tensor subclass is saved as its inner tensors, as `__tensor_flatten__` names them, and a
        `BytesIO` as an array of bytes. Any other tensor must be equal in every process that has its path, and one
        of these writes it; processes may have different paths, as pipeline stages do. State that differs between
        processes, such as that of a random number generator or a data loader, goes into a `tstore.PerHost`.
        Do not change the tensors before this returns.
    group
        The process group whose processes save together, by default all.
    host, hosts, attempt
        By default from the process group, with a new random attempt for each save. With `hosts=1` this process
        saves alone, without the others.
    options
        `codecs` and all others as in `tstore.save`.

    Raises
    ------
    As `tstore.save`, and `InvalidArgument`, with the path, for a tensor without values (`Partial`, meta device),
    with a layout other than strided, or of a dtype without whole bytes.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> tstore.torch.save("memory://of-torch-save", {"model": model, "optimizer": optimizer}, step=7)
    1"""

def save_async(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    group: Any | None = None,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    staging: StagingChoice = "memory",
    in_flight: InFlight = "queue",
    codecs: QuantizeRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
    overwrite: bool = False,
    priority: Literal["normal", "low"] | None = None,
) -> BackgroundSave:
    """Start a save in the background; return its `BackgroundSave` once the tensors may be changed.

    The arguments are those of `save`, and `staging` and `in_flight` those of `tstore.save_async`. Tensors of a GPU
    are copied to the host in a separate stream. If all tensors are on GPUs, nothing is copied twice.

    Raise as `tstore.save_async` does, and `InvalidArgument` as `save` does."""

def stream(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    group: str = "model",
    dtype: Any | None = None,
    order: Order = "storage",
) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tensor in a group of a checkpoint, and the tensor, while the next ones are read.

    `group` is the path of a `state_dict` in the saved tree, "" if it is the tree itself. Floats are cast to
    `dtype`. The tensors are on the CPU; `order` and the memory are as in `tstore.stream`.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import torch
    >>> _ = tstore.torch.save("memory://of-torch-stream", {"model": torch.nn.Linear(3, 2)}, step=7)
    >>> sorted(name for name, _ in tstore.torch.stream("memory://of-torch-stream"))
    ['bias', 'weight']"""
