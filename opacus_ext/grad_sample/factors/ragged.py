"""Rows of all samples in any order, and the sample of each: no padding."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from opacus_ext.grad_sample.factors import segments
from opacus_ext.grad_sample.factors.batched import (
    Batched,
    add_by_place,
    batched,
    scaled,
    square_by_groups,
    square_by_segments,
)
from opacus_ext.grad_sample.factors.rows import (
    OneHot,
    Rows,
    entries,
    pad_rows,
    with_entries,
)
from opacus_ext.grad_sample.factors.term import Norms, Term


class RaggedRows(Term):
    """
    Factors ``[1, rows, width]``, one dense at least.

    Args:
        factors: see above
        samples: the sample of each row ``[rows]``
        batch_size: number of samples
    """

    def __init__(
        self, factors: Tuple[Rows, ...], samples: torch.Tensor, batch_size: int
    ):
        super().__init__(factors)
        self._samples, self._batch_size = samples, batch_size

    @property
    def batch_size(self) -> int:
        return self._batch_size

    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        return add_by_place(self, *self._places(), dtype, out)

    def squared_norm(self, cache: int = 0) -> Norms:
        square = square_by_segments if len(self.dense) == 1 else square_by_groups
        return Norms(square(self, *self._places()))

    def inner(self, other: Term) -> torch.Tensor:
        return self.resolved().inner(other)

    def weighted_sum(
        self,
        weights: torch.Tensor,
        dtype: torch.dtype,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        weights = weights.to(dtype)[:, None][self._samples].T
        return scaled(self, weights, dtype).summed(dtype, out)

    def resolved(self) -> Batched:
        return batched(
            tuple(
                with_entries(f, pad_rows(entries(f)[0], self._samples, self.batch_size))
                for f in self.factors
            )
        )

    def without(self, samples: torch.Tensor) -> RaggedRows:
        where = samples[self._samples][None, :, None]
        factors = tuple(
            f if isinstance(f, OneHot) else f.masked_fill(where, 0)
            for f in self.factors
        )
        return RaggedRows(factors, self._samples, self.batch_size)

    def _places(self) -> Tuple[torch.Tensor, int]:
        return segments.places_of(self._samples[None], self.onehot)
