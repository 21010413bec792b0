"""Trees with modules, optimizers and other objects that have a `state_dict`: states in place of the objects.

An optimizer numbers its parameters. Its state is saved under the names that the parameters have in a module of the
same tree, so that another order, mesh or division into pipeline stages can restore it:
`{"state": {name: {…}}, "param_groups": [{"lr": …, "params": {name: None}}]}`. An optimizer whose parameters are in
no module of the tree keeps the numbers. States in the form of `Optimizer.state_dict`, with numbers, and of
`get_state_dict` of `torch.distributed.checkpoint`, with lists of names, are restored too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tstore.checkpoint.leaves import HostValues, PerHost
from tstore.checkpoint.structure import path_part
from tstore.errors import InvalidArgument
from tstore.torch.dtensors import local_tensor
from tstore.torch.forms import has_form, original_form, original_forms, stored_form
from tstore.torch.memory import Stored, child_at, with_memory
from tstore.torch.modules import bare_name, is_plain, module_state, unwrapped
from tstore.torch.tensors import check_not_nested, same_bits

__all__ = ["holds_stateful", "load", "state_tree"]

_MAX_LEVELS = 200  # as many as a saved tree may have; deeper ones are refused where they are flattened
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum"})
"""State of PyTorch's own optimizers that is shaped like the parameter."""


def state_tree(tree: Any, stored: Any = None, kept: Any = None) -> Any:
    """Return the tree with the state in place of each stateful object; the tensors share the object's memory.

    `stored`, if passed, is the tree of a checkpoint, with `Stored` for its arrays; the result is then a target for
    restoring that checkpoint. Optimizers and schedulers then have the state that the checkpoint has for them, laid
    out like their own state, and modules have its extra states. Their own state may lack some of its keys: an
    optimizer has no moments before its first step. An optimizer keeps its own state if the checkpoint has that of
    another class of optimizer, so that the differences are reported. `kept` is the part of the tree's own state
    that stays in the state of optimizers where `stored` lacks it.
    """
    if not holds_stateful(tree):
        return tree
    modules = list(_modules(tree))

    def state_of(value: Any, stored_state: Any, kept_state: Any) -> Any:
        if isinstance(value, nn.Module):
            if stored is not None and any(p.is_meta for p in value.parameters()):
                raise InvalidArgument(
                    f"a {type(value).__name__} on the meta device can't be restored in place; call "
                    "to_empty() first, or restore into its state_dict() and load that with assign=True"
                )
            own = module_state(value)
            extra = {} if stored_state is None else _extra_states(stored_state, own)
            return _stored_forms({**own, **extra})
        if isinstance(value, torch.optim.Optimizer):
            names = _names(value, modules, stored_state)
            state = _optimizer_state(value, names)
            if stored_state is None:
                return _stored_forms(state)
            kept_states = _by_number(value, _names(value, modules, None), child_at(kept_state, "state"))
            return _stored_forms(_optimizer_target(value, names, state, stored_state, kept_states))
        if has_form(value):
            return with_memory(stored_state, None, value, [])
        own = value.state_dict()
        return own if stored_state is None else with_memory(stored_state, None, own, [])

    return _replaced((tree, stored, kept), 0, state_of, _is_stateful)


def load(tree: Any, restored: Any, stored: Any) -> Any:
    """Load restored states into the stateful objects of a tree; return what was restored, with these objects.

    `stored` is the tree that was passed to `state_tree`; an object for which it has no state is left alone. Raise
    `InvalidArgument` if an object refuses its state.
    """
    modules = list(_modules(tree))

    def load_into(value: Any, state: Any, stored_state: Any) -> Any:
        if has_form(value):
            return value if stored_state is None else original_form(value, state)
        try:
            load_state(value, state, stored_state)
        except Exception as error:  # code of the class may raise anything
            raise InvalidArgument(
                f"a {type(value).__name__} of the target can't load the state that the checkpoint has for it "
                f"({type(error).__name__}: {error!s:.300}); restore the other objects with only=…"
            ) from error
        return value

    def load_state(value: Any, state: Any, stored_state: Any) -> None:
        if stored_state is None:
            return
        if isinstance(value, nn.Module):
            module = unwrapped(value)
            if not all(is_plain(m) for m in module.modules()):  # tensors of plain modules have the values already
                full_state = module.state_dict()  # has the names and the metadata that its hooks expect
                full_state.update({n: original_forms(state[bare_name(n)], own) for n, own in full_state.items()})
                module.load_state_dict(full_state)
        elif isinstance(value, torch.optim.Optimizer):
            _load_optimizer(value, _names(value, modules, stored_state), state)
        else:
            value.load_state_dict(state)

    return _replaced((tree, restored, stored), 1, load_into, _is_stateful)


def _stored_forms(state: dict[str, Any]) -> Any:
    return _replaced((state,), 0, stored_form, has_form)


def _replaced(
    trees: tuple[Any, ...],
    base: int,
    replace: Callable[..., Any],
    is_replaced: Callable[[Any], bool],
    level: int = 0,
) -> Any:
    """Return a tree with replacements for some of its values, by default the stateful ones.

    The first of `trees` has the values, and the others their counterparts at the same places; `replace` takes all
    of them. All other values are those of `trees[base]`.
    """
    tree, *others = trees
    if is_replaced(tree):
        return replace(*trees)
    if isinstance(tree, PerHost):
        if not base:
            return PerHost(_replaced((tree.value, *(None for _ in others)), base, replace, is_replaced, level))
        restored, stored = others
        if stored is None or not isinstance(restored, PerHost):
            return tree if stored is None else restored
        trees = (tree.value, restored.value, restored.value)
        return PerHost(_replaced(trees, base, replace, is_replaced, level))
    if level == _MAX_LEVELS or isinstance(tree, HostValues) or not isinstance(tree, Mapping | list | tuple):
        return trees[base]
    keys = list(tree) if isinstance(tree, Mapping) else list(range(len(tree)))
    children = [(tree[key], *(child_at(other, key) for other in others)) for key in keys]
    values = [_replaced(child, base, replace, is_replaced, level + 1) for child in children]
    if all(value is child[base] for value, child in zip(values, children, strict=True)):
        return trees[base]
    if isinstance(tree, Mapping):
        return dict(zip(keys, values, strict=True))
    if isinstance(tree, list):
        return values
    return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)


def holds_stateful(tree: Any) -> bool:
    """Return whether a tree has stateful objects; raise `InvalidArgument` if it contains itself."""
    return _search(tree, [], [])


def _search(value: Any, ancestors: list[Any], keys: list[Any]) -> bool:
    """Return whether a value has stateful objects; `keys` lead to it through its ancestors."""
    if isinstance(value, PerHost):
        return _search(value.value, ancestors, keys)
    if isinstance(value, torch.Tensor):
        check_not_nested(f"{'/'.join(map(path_part, keys)):.200}", value)  # else its shape raises
    if not isinstance(value, Mapping | list | tuple):
        return _is_stateful(value)
    if any(value is ancestor for ancestor in ancestors):
        path = "/".join(map(path_part, keys))
        raise InvalidArgument(f"{path:.200}: the tree contains itself; pass a tree without cycles")
    if len(ancestors) == _MAX_LEVELS:
        return False
    ancestors.append(value)
    keys.append(None)
    has_stateful = False
    for keys[-1], child in value.items() if isinstance(value, Mapping) else enumerate(value):
        has_stateful = _search(child, ancestors, keys) or has_stateful  # continues, to find cycles
    ancestors.pop()
    keys.pop()
    return has_stateful


def _is_stateful(value: Any) -> bool:
    return _has_state(type(value)) or has_form(value)  # type: ignore[arg-type]  # types are hashable


@functools.cache
def _has_state(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def _modules(tree: Any, path: str = "", level: int = 0) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(tree, nn.Module):
        yield path, tree
    elif isinstance(tree, PerHost):
        yield from _modules(tree.value, path, level)
    elif level < _MAX_LEVELS and isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _modules(value, f"{path}{key}.", level + 1)


def _extra_states(stored_state: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return targets for the extra states of a module, which may be of another form than its own ones."""
    stored = stored_state if isinstance(stored_state, Mapping) else {}
    return {
        name: with_memory(stored[name], None, value, [])
        for name, value in own.items()
        if name.rpartition(".")[2] == "_extra_state" and name in stored
    }


Names = Mapping[int, str]
"""The name of each parameter, by its `id`."""


def _names(
    optimizer: torch.optim.Optimizer, modules: list[tuple[str, nn.Module]], stored_state: Any
) -> Names | None:
    """Return the names of an optimizer's parameters in a module that has all of them, else in all modules.

    Return None if a parameter has no unique name, or if the checkpoint numbers the parameters, as
    `Optimizer.state_dict` does.
    """
    stored_params = child_at(child_at(child_at(stored_state, "param_groups"), 0), "params")
    if isinstance(stored_params, list) and all(type(number) is int for number in stored_params):
        return None
    parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    all_names: dict[int, str] = {}
    for path, module in modules:
        names = {id(p): bare_name(name) for name, p in unwrapped(module).named_parameters()}
        if parameter_ids <= names.keys():
            return names
        all_names |= {key: f"{path}{name}" for key, name in names.items()}
    unique = len(set(all_names.values())) == len(all_names)
    return all_names if parameter_ids <= all_names.keys() and unique else None


def _optimizer_state(optimizer: torch.optim.Optimizer, names: Names | None) -> dict[str, Any]:
    state = optimizer.state_dict()
    if names is None:
        return state
    name_of: dict[int, str] = {}
    groups = []
    for group, optimizer_group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        group_names = [names[id(p)] for p in optimizer_group["params"]]
        name_of |= dict(zip(group["params"], group_names, strict=True))
        groups.append({**group, "params": dict.fromkeys(group_names)})
    return {
        "state": {name_of[number]: values for number, values in state["state"].items()},
        "param_groups": groups,
    }


def _by_number(optimizer: torch.optim.Optimizer, names: Names | None, states: Any) -> list[Any]:
    """Return the states of an optimizer's parameters in their order, None for a parameter without state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [child_at(states, i if names is None else names[id(p)]) for i, p in enumerate(parameters)]


def _optimizer_target(
    optimizer: torch.optim.Optimizer,
    names: Names | None,
    own_state: dict[str, Any],
    stored_state: Any,
    kept_states: Sequence[Any],
) -> dict[str, Any]:
    """Return the state that a checkpoint has for an optimizer, with tensors laid out as its parameters are.

    `kept_states` has, for each parameter, what stays of the optimizer's state where the checkpoint lacks it.
    """
    state: dict[Any, Any] = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        name = number if names is None else names[id(parameter)]
        of_parameters = child_at(stored_state, "state")
        values = child_at(of_parameters, name) or child_at(of_parameters, str(name))  # DCP makes all keys text
        if isinstance(values, Mapping):
            _check_forms(optimizer, values, own_state["state"].get(name, {}))
            memory = with_memory(values, parameter, own_state["state"].get(name), [])
            state[name] = memory | _refused_moments(optimizer, parameter, values)
        if isinstance(kept_states[number], Mapping):
            state[name] = {**kept_states[number], **state.get(name, {})}
    groups = []
    for number, group in enumerate(own_state["param_groups"]):
        stored_group = child_at(child_at(stored_state, "param_groups"), number)
        if isinstance(stored_group, Mapping):
            if _lacks_options(stored_group, group, optimizer.defaults):
                return own_state
            params = _group_params(group["params"], stored_group.get("params"))
            group = with_memory(stored_group, None, group, []) | {"params": params}
        groups.append(group)
    return {"state": state, "param_groups": groups}


def _check_forms(optimizer: torch.optim.Optimizer, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for inner tensors of a moment, if the optimizer has none of the subclass yet."""
    for key in _MOMENTS & values.keys():
        if isinstance(values[key], Mapping) and not (has_form(own.get(key)) or isinstance(own.get(key), Mapping)):
            raise InvalidArgument(
                f"the checkpoint has {key} as the inner tensors of a tensor subclass, and the "
                f"{type(optimizer).__name__} of the target has no such tensor; take a step before the restore, "
                "which replaces its results"
            )


def _refused_moments(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return targets shaped like the parameter for stored moments of another shape: the restore refuses those.

    The moments of PyTorch's own optimizers have the shape of their parameter. A moment of another shape can also
    mean that the checkpoint numbers the parameters in another order.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}  # other optimizers may keep moments of lower rank
    stored = {key: values[key] for key in _MOMENTS & values.keys() if isinstance(values[key], Stored)}
    return {
        key: torch.empty_like(parameter, dtype=moment.dtype, requires_grad=False)
        for key, moment in stored.items()
        if moment.shape != tuple(parameter.shape)
    }


def _lacks_options(stored: Mapping[str, Any], group: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Return whether a stored group lacks a numeric option of this class of optimizers, as Adam lacks momentum.

    Such a group is from an optimizer of another class, whose state this one could not use. Flags do not count:
    versions of PyTorch have added some.
    """
    numbers = (key for key in defaults if type(group.get(key)) in (int, float, tuple))
    return any(key not in stored for key in numbers)


def _group_params(own: Any, stored: Any) -> Any:
    """Return the parameters of a group: None for each that the stored group has, and True for each that it lacks.

    True is not a value of the checkpoint, so the restore reports a mismatch of the parameter. The stored group may
    be a list of the same names, as `torch.distributed.checkpoint.state_dict` makes.
    """
    if isinstance(own, Mapping) and isinstance(stored, list) and own.keys() == set(stored):
        return stored
    if not (isinstance(own, Mapping) and isinstance(stored, Mapping)):
        return own
    return {name: None if name in stored else True for name in own}


def _load_optimizer(optimizer: torch.optim.Optimizer, names: Names | None, state: dict[str, Any]) -> None:
    if names is not None:
        numbers: dict[str, int] = {}
        groups, first = [], 0
        for group, optimizer_group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            group_names = [names[id(p)] for p in optimizer_group["params"]]
            order = range(first, first := first + len(group_names))
            numbers |= dict(zip(group_names, order, strict=True))
            groups.append({**optimizer_group, **group, "params": list(order)})  # a newer torch may have more keys
        state = {"state": {numbers[n]: values for n, values in state["state"].items()}, "param_groups": groups}
    state["state"] = original_forms(state["state"], optimizer.state_dict()["state"])
    optimizer.load_state_dict(state)
    numbers_of_parameters = (number for group in state["param_groups"] for number in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in zip(numbers_of_parameters, parameters, strict=True):
        if parameter in optimizer.state:
            saved = state["state"].get(number)
            optimizer.state[parameter] = _without_cast(optimizer.state[parameter], saved)


def _without_cast(loaded: Any, saved: Any) -> Any:
    """Return the saved tensors in place of those that `Optimizer.load_state_dict` cast to the parameter's dtype.

    A tensor that the class of the optimizer has changed otherwise stays as loaded.
    """
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded.keys() & saved.keys() - {"step"}:  # fused kernels need a float32 step
            loaded[key] = _without_cast(loaded[key], saved[key])
    elif isinstance(loaded, list | tuple) and isinstance(saved, list | tuple):
        return type(loaded)(_without_cast(value, child_at(saved, i)) for i, value in enumerate(loaded))
    elif isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor) and loaded.dtype != saved.dtype:
        if has_form(saved):
            return saved
        cast = local_tensor(saved).to(loaded.device, loaded.dtype)
        if cast.shape == local_tensor(loaded).shape and same_bits(cast, local_tensor(loaded)):
            return saved.to(loaded.device)
    return loaded
