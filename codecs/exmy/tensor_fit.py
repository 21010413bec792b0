"""Fit the bias of a tensor that is larger than memory, slab by slab."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from exmy.elements import Kind, NonFinite, as_flat, saturates
from exmy.errors import DtypeError, FormatError, NonFiniteError, SizeError
from exmy.exponents import Exponents, exponents_of
from exmy.fit import BiasFit
from exmy.format import Format, as_format
from exmy.importance import Importance
from exmy.packing import check_count
from exmy.threads import check_threads

__all__ = ["TensorFit", "TensorScale"]

TensorScale: TypeAlias = Literal["search", "max", "none"]


class TensorFit:
    """The search for the best bias of a tensor of `count` elements, added slab by slab in up to 3 passes.

    >>> fit = exmy.TensorFit("e3m2", 4)
    >>> while not fit.done:
    ...     for slab in (np.float32([0.5, -1]), np.float32([0.25, 3])):
    ...         fit.add(slab)
    ...     fit.end_pass()
    >>> fit.format
    Format('e3m2b6')

    `scale`: "search" is the bias with the least squared error, "max" the largest bias that clips nothing,
    "none" the bias of f. The result equals that of `Format.fit` and `quantize`; it depends neither on the slabs
    (which may differ between passes) nor on `threads`, the maximum number of threads. An empty or all-zero tensor
    keeps the bias of f. `nonfinite` is as for `encode`; with "saturate", only finite values count, also in `noise`
    and `signal`. With `measures="bias"`, `noise` and `signal` are left out, which takes less time; with
    "exponents", `exponents` replaces them.
    """

    def __init__(
        self,
        f: Format | str,
        count: int,
        scale: TensorScale = "search",
        *,
        nonfinite: NonFinite = "error",
        threads: int = 1,
        measures: Literal["bias", "errors", "exponents"] = "errors",
    ) -> None:
        if scale not in ("search", "max", "none"):
            raise FormatError(f"scale is {scale!r}; expected 'search', 'max' or 'none'")
        if measures not in ("bias", "errors", "exponents"):
            raise FormatError(f"measures is {measures!r}; expected 'bias', 'errors' or 'exponents'")
        self._measures = measures
        self._f, self._count, self._scale = as_format(f), check_count(count), scale
        self._saturates, self._threads = saturates(nonfinite), check_threads(threads)
        self._kind: Kind | None = None
        self._is_weighted = False
        self._fit = self._start(Kind.FLOAT32)

    def _start(self, kind: Kind) -> BiasFit:
        return BiasFit(
            self._f.layout,
            kind,
            self._count,
            self._scale,
            reports_noise=self._measures == "errors",
            counts_exponents=self._measures == "exponents",
        )

    def add(self, slab: Any, importance: Any = None) -> None:
        """Add the next elements of the pass, in C order: float16, bfloat16, float32 or float64 of any shape.

        `importance`: the weights of the squared errors of the slab's elements, as for `quantize`, on one scale for
        all slabs; `noise` and `signal` are then weighted. Pass it with all slabs or with none.

        Raise `DtypeError` for other dtypes and if the dtype differs from that of earlier slabs, `SizeError` if
        the pass exceeds `count` elements, `FormatError` for unsuitable importance.
        """
        elements, kind, shape = as_flat(slab)
        weights = None if importance is None else Importance.from_argument(importance, shape)
        if self._kind is None:
            self._kind, self._fit, self._is_weighted = kind, self._start(kind), weights is not None
        if self._is_weighted is (weights is None):
            raise FormatError("importance must be passed with all slabs of a tensor or with none")
        if kind is not self._kind:
            raise DtypeError(f"this slab is {kind.name.lower()}; expected {self._kind.name.lower()}, as before")
        if self._fit.added + elements.size > self._count:
            raise SizeError(f"this pass adds {self._fit.added + elements.size} elements; expected {self._count}")
        self._fit.add(elements, self._threads, weights)

    def end_pass(self) -> None:
        """Complete the pass.

        Raise `SizeError` if the pass did not add `count` elements. With nonfinite="error", raise `NonFiniteError`
        if any element is NaN or infinite, with the number of these and the flat position of the first.
        """
        if self._fit.added != self._count:
            raise SizeError(f"this pass added {self._fit.added} elements; expected {self._count}")
        self._fit.end_pass()
        if self._fit.nonfinite_count and not self._saturates:
            raise NonFiniteError(self._fit.nonfinite_count, self._count, (self._fit.first_nonfinite,))

    @property
    def done(self) -> bool:
        """Whether the format is known and no further pass is needed."""
        return self._fit.done

    @property
    def format(self) -> Format:
        """The format with the best bias. Raise `SizeError` before the fit is `done`."""
        if not self.done:
            raise SizeError("the format is not known yet; add the slabs of another pass and call end_pass")
        return self._f.with_bias(self._fit.bias)

    @property
    def noise(self) -> float | None:
        """The sum of squared errors with `format`; None if not measured.

        With scale "max", or if the largest magnitude alone decides on the bias, measuring it takes another pass
        after the fit is `done`.
        """
        return self._fit.noise if self.done else None

    @property
    def signal(self) -> float:
        """The sum of squares of all elements. Raise `SizeError` before the first pass, or if not measured."""
        if not self._fit.passes or self._measures != "errors":
            raise SizeError(
                "the signal is not known yet; measure errors, add the slabs of a pass and call end_pass"
            )
        return self._fit.signal

    @property
    def exponents(self) -> Exponents:
        """The histogram of the exponents of all finite elements.

        Raise `SizeError` before the first pass, or if not measured.
        """
        if not self._fit.passes or self._measures != "exponents":
            raise SizeError(
                "the exponents are not known yet; measure exponents, add the slabs of a pass and call end_pass"
            )
        return exponents_of(self._fit.exponent_counts)
