"""States of wrapped modules, by names that do not depend on the wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn

from tstore.errors import InvalidArgument

__all__ = ["bare_name", "is_plain", "module_state", "unwrapped"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing insert in the names of parameters."""

_PLAIN_METHODS = (
    *("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"),
    *("get_extra_state", "set_extra_state"),
)
_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside `DistributedDataParallel` and `torch.compile`."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state by names without wrappers; raise `InvalidArgument` if two values get one name."""
    cleaned: dict[str, Any] = {}
    for name, value in unwrapped(module).state_dict().items():
        bare = bare_name(name)
        if bare in cleaned:
            raise InvalidArgument(
                f"a module has two values named {bare!r}, one of them {name!r} in a wrapper; rename one"
            )
        cleaned[bare] = value
    return cleaned


def bare_name(name: str) -> str:
    """Return the name of a value of a module without those of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_plain(module: nn.Module) -> bool:
    """Return whether `state_dict` returns the module's own memory, so that reading into it completes the load."""
    return all(getattr(type(module), m) is getattr(nn.Module, m) for m in _PLAIN_METHODS) and not any(
        getattr(module, hooks) for hooks in _HOOKS
    )
