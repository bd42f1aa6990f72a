"""Blocks of rows, and rows that are computed for some samples at a time."""

from __future__ import annotations

from typing import Any, Iterator, Optional, Tuple

import torch

from opacus_ext.grad_sample.factors.batched import Batched, batched, scaled
from opacus_ext.grad_sample.factors.rows import (
    Factor,
    Lazy,
    OneHot,
    Rows,
    Size,
    known,
    num_bytes,
    of_samples,
    steps,
)
from opacus_ext.grad_sample.factors.settings import bound_on
from opacus_ext.grad_sample.factors.term import Norms, Term


class BlockedRows(Term):
    """
    Dense factors ``[B, blocks * n, width]``, whose rows come block by block: one more
    axis of the parameter, the first, says the block.

    Args:
        factors: see above
        blocks: number of blocks
    """

    deferred = True

    def __init__(self, factors: Tuple[Rows, ...], blocks: int):
        super().__init__(factors)
        self.blocks = blocks

    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        if out is not None:
            out = out.view(self.batch_size * self.blocks, -1)
        return self._as_samples().materialise(dtype, out).view(self.batch_size, -1)

    def squared_norm(self, cache: int = 0) -> Norms:
        squares, gradients, size = self._as_samples().squared_norm(cache)
        if gradients is not None:
            gradients = gradients.view(self.batch_size, -1)
        return Norms(squares.unflatten(0, (-1, self.blocks)).sum(1), gradients, size)

    def inner(self, other: Term) -> torch.Tensor:
        return self.resolved().inner(other)

    def weighted_sum(
        self,
        weights: torch.Tensor,
        dtype: torch.dtype,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        rows = weights.to(dtype)[:, None]
        return scaled(self, rows, dtype, self.blocks).summed(dtype, out)

    def resolved(self) -> Batched:
        like = self.factors[0]
        index = torch.arange(like.shape[1], device=like.device)
        index = index // max(1, like.shape[1] // self.blocks)
        block = OneHot(index.expand(like.shape[0], -1), self.blocks)
        return batched((block, *self.factors))

    def without(self, samples: torch.Tensor) -> BlockedRows:
        where = samples[:, None, None]
        factors = tuple(f.masked_fill(where, 0) for f in self.factors)
        return BlockedRows(factors, self.blocks)

    def _as_samples(self) -> Batched:
        """Factors ``[B * blocks, n, width]``."""
        return batched(
            tuple(f.unflatten(1, (self.blocks, -1)).flatten(0, 1) for f in self.factors)
        )


class LazyRows(Term):
    """
    Factors of which one or more are computed for some samples at a time.

    Args:
        factors: :class:`Lazy` ones, and others
        blocks: of the rows, as :class:`BlockedRows` has them; 1 for none
    """

    deferred = True

    def __init__(self, factors: Tuple[Factor, ...], blocks: int = 1):
        super().__init__(factors)
        self._blocks = blocks

    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        parts = [term.materialise(dtype) for _, _, term in self._parts()]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole if out is None else out.add_(whole.view_as(out))

    def squared_norm(self, cache: int = 0) -> Norms:
        numel: Size = self._blocks
        for width in self.widths:
            numel = numel * width
        itemsize = max(4, self.dense[0].dtype.itemsize)
        if known(self.batch_size * numel) * itemsize > cache:
            cache = 0  # all samples or none
        norms = [term.squared_norm(cache) for _, _, term in self._parts()]
        squares = torch.cat([part.squares for part in norms])
        each = [part.gradients for part in norms if part.gradients is not None]
        if not cache or len(each) < len(norms):
            return Norms(squares)
        gradients = torch.cat(each) if len(each) > 1 else each[0]
        return Norms(squares, gradients, num_bytes(gradients))

    def inner(self, other: Term) -> torch.Tensor:
        return self.resolved().inner(other)

    def weighted_sum(
        self,
        weights: torch.Tensor,
        dtype: torch.dtype,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        if out is None:
            direct = self._summed_directly(weights.to(dtype))
            if direct is not None:
                return direct
        for start, stop, term in self._parts():
            out = term.weighted_sum(weights[start:stop], dtype, out)
        return out

    def resolved(self) -> Batched:
        return self._computed(0, None).resolved()

    def without(self, samples: torch.Tensor) -> LazyRows:
        where = samples[:, None, None]

        def drop(f: Any) -> Factor:
            if isinstance(f, OneHot):
                return f
            return (
                f.without(samples) if isinstance(f, Lazy) else f.masked_fill(where, 0)
            )

        return LazyRows(tuple(map(drop, self.factors)), self._blocks)

    def _computed(self, start: Size, stop: Optional[Size]) -> Term:
        rows = tuple(of_samples(f, start, stop) for f in self.factors)
        return BlockedRows(rows, self._blocks) if self._blocks > 1 else batched(rows)

    def _parts(self) -> Iterator[Tuple[Size, Size, Term]]:
        """Slices of the batch, rows computed: the first and last sample of each."""
        widths = [f.shape[2] for f in self.factors if isinstance(f, Lazy)]
        bound = bound_on(self.device.type)
        step = max(1, bound // max(1, known(self.length) * max(widths) * 4))
        for start, stop in steps(self.batch_size, step):
            yield start, stop, self._computed(start, stop)

    def _summed_directly(self, weights: torch.Tensor) -> Optional[torch.Tensor]:
        """The weighted sum, if the last rows know how; else None."""
        *others, last = self.factors
        dense = len(others) == 1 and isinstance(others[0], torch.Tensor)
        if not dense or not isinstance(last, Lazy):
            return None
        return last.summed(others[0].to(weights.dtype) * weights[:, None, None])
