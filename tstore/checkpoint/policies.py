"""Save policies: after which training steps a `Checkpointer` saves. They compose with `|` and `&`."""

from __future__ import annotations

import abc
import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from tstore.core.format.arguments import checked_function, quote
from tstore.errors import InvalidArgument, Misuse

__all__ = [
    "Continuous",
    "EverySeconds",
    "EverySteps",
    "Moment",
    "OnPreemption",
    "Policy",
    "PreemptionSignal",
    "checked_policy",
]


class Moment(NamedTuple):
    """The inputs of a policy.

    These are the step, the seconds since the last save, whether the process is to stop, and whether no save is
    under way.
    """

    step: int
    seconds: float
    preempted: bool
    idle: bool


class Policy(abc.ABC):
    """When to save; `a | b` saves when either does, `a & b` when both do."""

    @property
    def uses_clock(self) -> bool:
        """Whether the decision depends on a clock, so that hosts may decide differently."""
        return False

    @property
    def signals(self) -> frozenset[int]:
        """The signals that tell the process to stop."""
        return frozenset()

    @property
    def waits_for_save(self) -> bool:
        """Whether the decision depends on the end of the previous save."""
        return False

    @property
    def differs_by_host(self) -> bool:
        """Whether hosts may decide differently, unless they agree."""
        return self.uses_clock or self.waits_for_save or bool(self.signals)

    @abc.abstractmethod
    def due(self, moment: Moment) -> bool:
        """Return whether to save."""

    def __or__(self, other: Policy) -> Policy:
        return _Either(self, other) if isinstance(other, Policy) else NotImplemented

    def __and__(self, other: Policy) -> Policy:
        return _Both(self, other) if isinstance(other, Policy) else NotImplemented


@dataclasses.dataclass(frozen=True)
class EverySteps(Policy):
    """Save at the steps that are multiples of `steps`, step 0 included.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> every = tstore.EverySteps(100) | tstore.EverySeconds(3600)
    >>> with tstore.Checkpointer("memory://of-every-steps", every=every, keep=2) as checkpoints:
    ...     for step in range(1, 401):
    ...         if checkpoints.should_save(step):
    ...             _ = checkpoints.save(step, {"w": np.full(4, step)})
    ...     [step for step, *_ in checkpoints.steps()]
    [300, 400]
    """

    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidArgument(f"EverySteps({quote(self.steps)}): expected an integer of at least 1")

    def due(self, moment: Moment) -> bool:
        """Return whether the step is a multiple."""
        return moment.step % self.steps == 0


@dataclasses.dataclass(frozen=True)
class EverySeconds(Policy):
    """Save once `seconds` have passed since `Checkpointer.save` last returned.

    Before the first save, the seconds count from the creation of the `Checkpointer`.
    """

    seconds: float

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not self.seconds > 0:
            raise InvalidArgument(f"EverySeconds({quote(self.seconds)}): expected a number above 0")

    @property
    def uses_clock(self) -> bool:
        """Whether the decision depends on a clock."""
        return True

    def due(self, moment: Moment) -> bool:
        """Return whether the time has passed."""
        return moment.seconds >= self.seconds


@dataclasses.dataclass(frozen=True)
class Continuous(Policy):
    """Save whenever no save is under way, so that the next one begins as soon as the last is committed.

    The steps in between are not saved. Several hosts agree at each step whether any of them is still saving; with
    `EverySteps(10) & Continuous()` only at every tenth step.
    """

    @property
    def waits_for_save(self) -> bool:
        """Whether the decision depends on the end of the previous save."""
        return True

    def due(self, moment: Moment) -> bool:
        """Return whether no save is under way."""
        return moment.idle


@dataclasses.dataclass(frozen=True)
class OnPreemption(Policy):
    """Save once after the process was told to stop by a `signal`, by default SIGTERM.

    The `Checkpointer` handles the signal, so that it does not end the process; once the step is saved,
    `Checkpointer.preempted` is True. Several hosts agree at each step whether the signal has come, which may take
    some milliseconds. With `EverySteps(10) & OnPreemption()` they agree only at every tenth step.
    """

    signal: int = signal.SIGTERM

    def __post_init__(self) -> None:
        if not isinstance(self.signal, int) or self.signal not in signal.valid_signals():
            raise InvalidArgument(f"OnPreemption({quote(self.signal)}): expected a signal, such as signal.SIGTERM")

    @property
    def signals(self) -> frozenset[int]:
        """The signal."""
        return frozenset([self.signal])

    def due(self, moment: Moment) -> bool:
        """Return whether the signal has come."""
        return moment.preempted


@dataclasses.dataclass(frozen=True)
class _Pair(Policy):
    one: Policy
    other: Policy

    @property
    def uses_clock(self) -> bool:
        """Whether either depends on a clock."""
        return self.one.uses_clock or self.other.uses_clock

    @property
    def waits_for_save(self) -> bool:
        """Whether either depends on the end of the previous save."""
        return self.one.waits_for_save or self.other.waits_for_save

    @property
    def signals(self) -> frozenset[int]:
        """The signals of both."""
        return self.one.signals | self.other.signals


class _Either(_Pair):
    def due(self, moment: Moment) -> bool:
        """Return whether either is due."""
        return self.one.due(moment) or self.other.due(moment)

    def __repr__(self) -> str:
        return f"{self.one} | {self.other}"


class _Both(_Pair):
    def due(self, moment: Moment) -> bool:
        """Return whether both are due."""
        return self.one.due(moment) and self.other.due(moment)

    def __repr__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, _Either) else f"{p}" for p in (self.one, self.other))


def checked_policy(every: Any, hosts: int, agree: Any) -> Policy:
    """Return the policy that `every` stands for.

    Raise `InvalidArgument` if it stands for none, and if hosts could decide differently by it and do not agree.
    """
    checked_function("agree", agree)
    is_number = isinstance(every, int) and not isinstance(every, bool) and every > 0
    policy = EverySteps(1 if every is None else every) if every is None or is_number else every
    if not isinstance(policy, Policy):
        raise InvalidArgument(
            f"every={quote(every)}: expected a number of steps, at least 1, or policies: EverySteps(100) | "
            "EverySeconds(600)"
        )
    if hosts > 1 and agree is None and policy.differs_by_host:
        raise InvalidArgument(
            f"every={quote(every)}: {hosts} hosts could decide differently; pass agree=…, a function that returns "
            "whether any host passed True, or only EverySteps"
        )
    return policy


class PreemptionSignal:
    """Handlers of signals that only record that a signal has come, and call the previous handlers.

    In a forked child a signal restores the previous handlers, so that the parent can end the child. Raise `Misuse`
    outside of the main thread, where Python can't handle signals.
    """

    def __init__(self, signals: frozenset[int]) -> None:
        self.received = False
        self._process: int | None = os.getpid()  # None once removed
        self._previous: dict[int, Any] = {}
        if signals and threading.current_thread() is not threading.main_thread():
            raise Misuse(
                "OnPreemption needs the main thread, where signals are handled; make the Checkpointer there"
            )
        for number in signals:
            self._previous[number] = signal.signal(number, self._receive)

    def remove(self) -> None:
        """Restore the previous handlers, except for signals whose handler other code has replaced since."""
        self._process = None
        if threading.current_thread() is threading.main_thread():  # otherwise the next signal restores them
            for number in self._previous:
                self._restore(number)

    def _restore(self, number: int) -> None:
        if signal.getsignal(number) == self._receive:
            previous = self._previous[number]
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        active = os.getpid() == self._process  # neither removed nor in a forked child
        if not active and signal.getsignal(number) == self._receive:  # not called by a later handler
            self._restore(number)
            signal.raise_signal(number)
            return
        self.received |= active
        previous: Callable[[int, FrameType | None], object] | int | None = self._previous[number]
        # `default_int_handler` would raise KeyboardInterrupt
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
