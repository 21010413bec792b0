"""TensorFit: the bias that suits a tensor which is never in memory as a whole."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from exmy.elements import Kind, NonFinite, as_flat, saturates
from exmy.errors import DtypeError, FormatError, NonFiniteError, SizeError
from exmy.fit import BiasFit
from exmy.format import Format, as_format
from exmy.packing import check_count
from exmy.threads import check_threads

__all__ = ["TensorFit", "TensorScale"]

TensorScale: TypeAlias = Literal["search", "max", "none"]


class TensorFit:
    """The search for the bias of a tensor of `count` elements, which comes slab by slab, in up to 3 passes.

    >>> fit = TensorFit("e3m2", 4)
    >>> while not fit.done:
    ...     for slab in (np.float32([0.5, -1]), np.float32([0.25, 3])):
    ...         fit.add(slab)
    ...     fit.end_pass()
    >>> fit.format
    Format('e3m2b6')

    scale "search": the bias with the least squared error; "max": the largest with which nothing clips; "none":
    that of f.  The format found is the one of ``Format.fit`` and ``quantize``, however the tensor is cut into
    slabs (differently in each pass, if need be) and whatever the threads that share the work.  f is kept where
    count is 0 or all is zero.  nonfinite as for `encode`; where it saturates, the finite values decide, and only
    they count in noise and signal.
    """

    def __init__(
        self,
        f: Format | str,
        count: int,
        scale: TensorScale = "search",
        *,
        nonfinite: NonFinite = "error",
        threads: int = 1,
    ) -> None:
        if scale not in {"search", "max", "none"}:
            raise FormatError(f"scale is {scale!r}; expected 'search', 'max' or 'none'")
        self._f, self._count, self._scale = as_format(f), check_count(count), scale
        self._saturates, self._threads = saturates(nonfinite), check_threads(threads)
        self._kind: Kind | None = None
        self._fit = self._start(Kind.FLOAT32)

    def _start(self, kind: Kind) -> BiasFit:
        return BiasFit(self._f.layout, kind, self._count, self._scale, measures=True)

    def add(self, slab: Any) -> None:
        """Take the next elements of the pass, in C order: float16, bfloat16, float32 or float64 of any shape.

        DtypeError for other dtypes, and for one that earlier slabs have not; SizeError beyond `count`.
        """
        elements, kind, _ = as_flat(slab)
        if self._kind is None:
            self._kind, self._fit = kind, self._start(kind)
        if kind is not self._kind:
            raise DtypeError(f"this slab is {kind.name.lower()}, and those before are {self._kind.name.lower()}")
        if self._fit.at + elements.size > self._count:
            raise SizeError(f"this pass brings {self._fit.at + elements.size} elements, expected {self._count}")
        self._fit.add(elements, self._threads)

    def end_pass(self) -> None:
        """Say that the pass is complete.

        SizeError where it did not bring `count` elements; NonFiniteError after the first pass, with how many
        are not finite and the flat position of the first.
        """
        if self._fit.at != self._count:
            raise SizeError(f"this pass brought {self._fit.at} elements, expected {self._count}")
        self._fit.end_pass()
        if self._fit.bad and not self._saturates:
            raise NonFiniteError(self._fit.bad, self._count, (self._fit.first,))

    @property
    def done(self) -> bool:
        """Whether the format is known, and no more pass is needed."""
        return self._fit.done

    @property
    def format(self) -> Format:
        """The format with the bias found; SizeError before it is `done`."""
        if not self.done:
            raise SizeError("the format is not known yet; add the slabs of another pass and call end_pass")
        return self._f.with_bias(self._fit.bias)

    @property
    def noise(self) -> float | None:
        """The sum of squared errors with `format`.

        With scale "max" one more pass, made after it is `done`, must bring it: None until then.
        """
        return self._fit.noise if self.done else None

    @property
    def signal(self) -> float:
        """The sum of squares of all elements; SizeError before the first pass has ended."""
        if not self._fit.passes:
            raise SizeError("the signal is not known yet; add the slabs of a pass and call end_pass")
        return self._fit.signal
