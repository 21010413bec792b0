"""Errors of exmy: one root, one class for each way to handle them."""

from __future__ import annotations

__all__ = [
    "CodeError",
    "DtypeError",
    "ExmyError",
    "FormatError",
    "KernelError",
    "NonFiniteError",
    "SizeError",
    "SlowPathWarning",
]


class ExmyError(Exception):
    """Root of every error that exmy raises on purpose."""


class FormatError(ExmyError, ValueError):
    """A format, width, bias or option lies outside of what eXmY defines."""


class DtypeError(ExmyError, TypeError):
    """An argument has a type or dtype that eXmY does not take."""


class CodeError(ExmyError, ValueError):
    """A code does not fit the width that it is said to have."""


class SizeError(ExmyError, ValueError):
    """A length, shape or slice does not fit what it belongs to."""


class KernelError(ExmyError, RuntimeError):
    """A kernel level was asked for by a wrong name, or cannot run here."""


class NonFiniteError(ExmyError, ValueError):
    """The input holds NaN or infinity, for which eXmY has no code.

    ``count`` says how many, ``index`` is the position of the first as a tuple, one integer for each axis.
    """

    def __init__(self, count: int, total: int, index: tuple[int, ...]) -> None:
        self.count = count
        self.total = total
        self.index = index
        super().__init__(count, total, index)

    def __str__(self) -> str:
        """Return the sentence that says how many, where, and what to do."""
        where = f"[{', '.join(map(str, self.index))}]" if self.index else "the only element"
        return (
            f"{self.count} of {self.total} values are NaN or infinite, the first at {where}; eXmY codes are "
            "all finite. Repair the input, or pass nonfinite='saturate' (infinity becomes the largest value "
            "of its sign, NaN becomes 0)"
        )


class SlowPathWarning(UserWarning):
    """The C kernels are missing, so the NumPy reference does the work, some hundred times slower."""
