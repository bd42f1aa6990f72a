"""Rows that are computed for some samples and some columns at a time."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from opacus_ext.grad_sample.factors import sums
from opacus_ext.grad_sample.factors.batched import Batched, batched
from opacus_ext.grad_sample.factors.rows import Lazy, of_samples
from opacus_ext.grad_sample.factors.term import Norms, Term


class ColumnRows(Term):
    """
    A first factor :class:`Columns`, and others: whatever is done with it, and with the
    terms beside it, is done in slices of the batch and of the parameter's first axis.
    """

    deferred = sliced = True

    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        whole = sums.materialise([self], self._shape).to(dtype)
        return whole if out is None else out.add_(whole.view_as(out))

    def squared_norm(self, cache: int = 0) -> Norms:
        return sums.squared_norm([self], self._shape, cache)

    def inner(self, other: Term) -> torch.Tensor:
        return self.resolved().inner(other)

    def weighted_sum(
        self,
        weights: torch.Tensor,
        dtype: torch.dtype,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        whole = sums.weighted_sum([self], self._shape, weights).to(dtype)
        return whole if out is None else out.add_(whole.view_as(out))

    def resolved(self) -> Batched:
        return batched(
            tuple(f.rows() if isinstance(f, Lazy) else f for f in self.factors)
        )

    def without(self, samples: torch.Tensor) -> ColumnRows:
        first, *rest = self.factors
        others = batched(tuple(rest)).without(samples).factors
        return ColumnRows((first.without(samples), *others))

    def part(self, shape: torch.Size, samples: slice, columns: slice) -> Term:
        first, *rest = self.factors
        rows = first.rows(samples.start, samples.stop, columns)
        others = (of_samples(f, samples.start, samples.stop) for f in rest)
        return batched((rows, *others))

    @property
    def _shape(self) -> torch.Size:
        widths: Any = self.widths
        return torch.Size((widths[0], math.prod(widths[1:])))
