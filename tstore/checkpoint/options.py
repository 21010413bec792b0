"""The options of a save: names, types and defaults, each declared once for all functions that take them.

A function takes them as `**options: Unpack[SaveOptions]`, which type checkers understand, and passes them on to
`checkpoint_to_save`, or to `CommitSettings`, which have the defaults. `complete` gives it their parameters, for
`help()` and `inspect.signature`; the stubs have them too, and the docstring of `save` documents them. So a new
option of the commit needs a line in `CommitOptions`, a default and check in `CommitSettings`, and its use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from tstore.core.format.arguments import (
    checked_attributes,
    checked_choice,
    checked_commit_timeout,
    checked_metadata,
    checked_metrics,
    checked_tag,
    checked_text,
    quote,
)
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.hints import hinting
from tstore.core.storage.objects import checked_durability
from tstore.errors import InvalidArgument
from tstore.quantization.policy import QuantizeRules, Target

__all__ = ["CommitOptions", "CommitSettings", "SaveOptions", "SharedOptions", "complete"]

F = TypeVar("F", bound=Callable[..., Any])


class CommitOptions(TypedDict, total=False):
    """The options that may differ from one save of a job to the next."""

    metrics: Mapping[str, float] | None
    attributes: Mapping[str, Any] | None
    tags: Sequence[str]
    message: str
    durability: Literal["fsync", "none"]
    timeout: float | None
    overwrite: bool
    priority: Literal["normal", "low"] | None


class SharedOptions(CommitOptions, total=False):
    """The options that are the same for arrays of NumPy, PyTorch and JAX."""

    codecs: QuantizeRules | Target


class SaveOptions(SharedOptions, total=False):
    """The options of `save`."""

    host: int
    hosts: int
    attempt: str | None


class CommitSettings:
    """The checked values of `CommitOptions`; raise `InvalidArgument` for an invalid one."""

    @hinting
    def __init__(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        attributes: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        message: str = "",
        durability: Literal["fsync", "none"] = "fsync",
        timeout: float | None = None,
        overwrite: bool = False,
        priority: Literal["normal", "low"] | None = None,
    ) -> None:
        self.message = checked_text("message", message)
        self.metrics = checked_metrics(metrics)
        self.attributes = checked_attributes(attributes)
        if RESERVED_ATTRIBUTE in self.attributes:
            raise InvalidArgument(
                f"attributes[{RESERVED_ATTRIBUTE!r}] is reserved for the structure of the tree; use another key"
            )
        if not isinstance(tags, list | tuple):
            raise InvalidArgument(f"tags={quote(tags)}: expected a list of tags, such as ['best']")
        self.tags = tuple(checked_tag("tags", tag) for tag in tags)
        if steps := [tag for tag in self.tags if tag.startswith("step/")]:
            raise InvalidArgument(f"tags={quote(tags)}: {steps[0]!r} names a step, which step=… sets; omit it")
        checked_commit_timeout(timeout)
        self.timeout = timeout
        checked_durability(durability)
        self.durability = durability
        self.overwrite = overwrite
        checked_choice("priority", priority, ("normal", "low", None))
        self.priority = priority

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata of the commit of a step."""
        return checked_metadata({"step": step, **({"metrics": self.metrics} if self.metrics else {})})


def complete(options: type, declared: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function so that its signature has the parameters of `declared` that are among the options."""

    def decorate(call: F) -> F:
        signature = inspect.signature(call)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = inspect.signature(declared).parameters.items()
        added = [p for name, p in named if name in options.__annotations__]
        call.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return call

    return decorate
