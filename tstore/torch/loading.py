"""Loading for serving: tensors one after the other, and the parameters of a module, while the next are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import torch

from tstore.checkpoint.stream import Order
from tstore.checkpoint.stream import stream as stream_arrays
from tstore.checkpoint.structure import flatten
from tstore.core.store import Store
from tstore.errors import InvalidArgument, NotFound, bullet_list
from tstore.torch.leaves import restored_value
from tstore.torch.tensors import numpy_dtype, shares_elements

__all__ = ["load_into", "stream"]


async def stream(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    group: str = "model",
    dtype: torch.dtype | None = None,
    order: Order = "storage",
) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
    """Yield the name of each tensor in a group of a checkpoint, and the tensor, while the next ones are read.

    `group` is the path of a `state_dict` in the saved tree, "" if it is the tree itself. Floats are cast to
    `dtype`. The tensors are on the CPU; `order` and the memory are as in `tstore.stream`.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import torch
    >>> _ = tstore.torch.save("memory://of-torch-stream", {"model": torch.nn.Linear(3, 2)}, step=7)
    >>> sorted(name for name, _ in tstore.torch.stream("memory://of-torch-stream"))
    ['bias', 'weight']
    """
    cast = None if dtype is None else numpy_dtype("dtype=…", dtype)
    start = f"{group}/" if group else ""
    if not isinstance(order, str):
        order = [start + name for name in order]
    arrays = stream_arrays(store, step, at=at, only=f"{start}**" if group else None, dtype=cast, order=order)
    async with _of_group(group), contextlib.aclosing(arrays):
        async for path, values in arrays:
            yield path.removeprefix(start), restored_value(path, values)


async def load_into(
    module: torch.nn.Module,
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
    True
    """
    own = _tensors(module, assign)
    target: Any = {name: _Like(name, tensor) for name, tensor in own.items()}
    for part in reversed(group.split("/") if group else []):
        target = {part: target}
    names = dict(zip(flatten(target)[1], own, strict=True))
    start = f"{group}/" if group else ""
    patterns = [only] if isinstance(only, str) else only or ["**"]
    chosen = [start + pattern for pattern in patterns] if group or only else None
    loaded: dict[str, torch.Tensor] = {}
    arrays = stream_arrays(store, step, at=at, target=target, only=chosen, dtype="target")
    filled: list[str] = []
    try:
        async with _of_group(group), contextlib.aclosing(arrays):
            async for path, values in arrays:
                tensor = restored_value(path, values)
                if assign:
                    loaded[names[path]] = tensor
                else:
                    own[names[path]].copy_(tensor)
                    filled.append(names[path])
    except BaseException as error:
        if filled:
            error.add_note(
                "tensors of the module that have their new values, unlike the others:" + bullet_list(filled)
            )
        raise
    if assign:
        module.load_state_dict(loaded, strict=False, assign=True)


@contextlib.asynccontextmanager
async def _of_group(group: str) -> AsyncGenerator[None, None]:
    """Name the argument `group` in the error for a checkpoint that has nothing there."""
    try:
        yield
    except NotFound as error:
        if not group or "no array matches" not in str(error):
            raise
        where = f"group={group!r} is where the state_dict is saved, '' if it is the whole tree"
        raise NotFound(f"{error}; {where}") from None


def _tensors(module: torch.nn.Module, assign: bool) -> dict[str, torch.Tensor]:
    """Return the tensors to load by name; raise `InvalidArgument` if one of them can't be loaded."""
    own: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict().items():
        if name.rpartition(".")[2] == "_extra_state":
            raise InvalidArgument(f"{name}: load_into loads no extra state; tstore.torch.restore(target=…) does")
        if isinstance(tensor, torch.Tensor):
            own[name] = tensor
            if tensor.is_meta and not assign:
                raise InvalidArgument(f"{name} is on the meta device and can't be filled; pass assign=True")
            if shares_elements(tensor):
                raise InvalidArgument(
                    f"{name}: its elements share memory; pass assign=True, for memory of its own"
                )
    return own


class _Like:
    """The shape and dtype of a tensor, as a leaf of a target."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype: np.dtype[Any] = numpy_dtype(name, tensor.dtype)
