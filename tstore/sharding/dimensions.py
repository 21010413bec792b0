"""Layout rules of Mesh-TensorFlow, which give each dimension name a mesh axis, for all tensors at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tstore.errors import InvalidArgument
from tstore.sharding.spec import P

__all__ = ["spec_from_rules"]


def spec_from_rules(dimensions: Sequence[str | None], rules: Mapping[str, str] | str) -> P:
    """Return the spec of a tensor with these named dimensions.

    `rules` maps names of dimensions to axes of the mesh, as {"batch": "data", "hidden": "model"} or in the syntax
    of Mesh-TensorFlow, "batch:data;hidden:model". A dimension without a rule or a name is not sharded. Raise
    `InvalidArgument` if two dimensions of the tensor have the same name or the same axis.

    Examples
    --------
    >>> from tstore.sharding import spec_from_rules
    >>> spec_from_rules(("batch", "length", "hidden"), "batch:data;hidden:model")
    P('data', None, 'model')
    """
    axis_of = _parsed(rules) if isinstance(rules, str) else rules
    if isinstance(dimensions, str) or not isinstance(axis_of, Mapping):
        raise InvalidArgument(
            f"expected names of dimensions and rules such as {{'batch': 'data'}}, not {dimensions!r:.100} and "
            f"{rules!r:.100}"
        )
    dimension_on: dict[str, str] = {}
    for number, name in enumerate(dimensions):
        if name is not None and name in dimensions[:number]:
            raise InvalidArgument(f"two dimensions of {tuple(dimensions)} are named {name!r}; rename one")
        axis = None if name is None else axis_of.get(name)
        if name is None or axis is None:
            continue
        if other := dimension_on.get(axis):
            raise InvalidArgument(
                f"the rules put the dimensions {other!r} and {name!r} of {tuple(dimensions)} on the mesh axis "
                f"{axis!r}; an axis can shard one dimension of a tensor"
            )
        dimension_on[axis] = name
    return P(*(None if name is None else axis_of.get(name) for name in dimensions))


def _parsed(rules: str) -> dict[str, str]:
    axis_of: dict[str, str] = {}
    for rule in rules.split(";"):
        name, colon, axis = (part.strip() for part in rule.partition(":"))
        if not (name and colon and axis) or name in axis_of:
            raise InvalidArgument(f"layout rules {rules!r}: expected 'dimension:axis;…', each dimension once")
        axis_of[name] = axis
    return axis_of
