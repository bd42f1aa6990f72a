"""The per-sample gradients of one parameter."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Tuple

import torch

from opacus_ext.grad_sample.factors import sums
from opacus_ext.grad_sample.factors.batched import Flat, batched
from opacus_ext.grad_sample.factors.columns import ColumnRows
from opacus_ext.grad_sample.factors.deferred import BlockedRows, LazyRows
from opacus_ext.grad_sample.factors.ragged import RaggedRows
from opacus_ext.grad_sample.factors.rows import (
    Blocks,
    Columns,
    Factor,
    Lazy,
    OneHot,
    Ragged,
    Rows,
    Size,
    entries,
    square_sum,
    wide,
    width_of,
)
from opacus_ext.grad_sample.factors.term import Term
from opacus_ext.refused import Refused


def term_of(factors: Tuple[Any, ...], batch_size: int) -> Term:
    """The structure of the factors (:data:`Factor`) of one use."""
    first = factors[0]
    if isinstance(first, Ragged):
        return RaggedRows(tuple(factors[1:]), first.samples, batch_size)
    blocks = first.size if isinstance(first, Blocks) else 1
    factors = tuple(factors[1:] if isinstance(first, Blocks) else factors)
    if isinstance(factors[0], Columns):
        return ColumnRows(factors)
    if any(isinstance(f, Lazy) for f in factors):
        return LazyRows(factors, blocks)
    return BlockedRows(factors, blocks) if blocks > 1 else batched(factors)


def resolved(factors: Tuple[Factor, ...]) -> Tuple[Rows, ...]:
    """Rows that were to be computed later computed, blocks as :class:`OneHot`."""
    return term_of(factors, 0).resolved().factors


class GradSample:
    """
    The per-sample gradients of one parameter, summed over all its uses in a step.

    Args:
        shape: shape of the parameter
        batch_size: number of samples ``B``
        rows: the gradients, if they are known, ``[B, numel]``

    Example:
        >>> import torch
        >>> g = GradSample(torch.Size([3, 4]), batch_size=2)
        >>> g.add(torch.randn(2, 5, 3), torch.randn(2, 5, 4))       # a Linear
        >>> g.add(OneHot(torch.randint(3, (2, 7)), 3), torch.randn(2, 7, 4))  # tied
        >>> torch.allclose(g.squared_norm(), g.materialise().pow(2).sum((1, 2)))
        True
    """

    def __init__(
        self, shape: torch.Size, batch_size: int, rows: Optional[torch.Tensor] = None
    ):
        self.shape = torch.Size(shape)
        self.batch_size = batch_size
        self.cached_bytes = 0  # of gradients materialised to be cached
        self._terms: List[Term] = []
        self._cached = rows  # [B, numel], in place of all terms

    def add(self, *factors: Factor) -> None:
        """
        Adds one use of the parameter.

        Args:
            factors: one a parameter axis, left to right: dense ``[B, T, width]`` or
                :class:`OneHot` with index ``[B, T]``. Neighbouring axes may share one
                factor, so ``[B, 1, numel]`` is a materialised per-sample gradient.
                Dense rows may be :class:`Lazy`; :class:`Blocks` or :class:`Ragged`
                may lead.

        Raises:
            Refused: if the factors do not fit the parameter or the batch
        """
        first = factors[0] if len(factors) == 1 else None
        if isinstance(first, torch.Tensor) and self._fits(first):
            if self.batch_size:
                self._add_flat(first)
            return
        self._check(factors)
        if self.batch_size == 0:
            return
        term = term_of(factors, self.batch_size)
        if isinstance(term, RaggedRows) and len(term.factors) == 1:
            self._add_flat(term.materialise(wide(term.dense[0]).dtype)[:, None])
            return
        self._uncache()
        self._terms.append(term)

    def _check(self, factors: Tuple[Factor, ...]) -> None:
        blocks, ragged, rows = 1, None, self.batch_size
        if factors and isinstance(factors[0], Blocks):
            blocks, factors = factors[0].size, factors[1:]
        elif factors and isinstance(factors[0], Ragged):
            ragged, factors, rows = factors[0].samples, factors[1:], 1
        shapes = [tuple(entries(f).shape) for f in factors]
        dims = [2 if isinstance(f, OneHot) else 3 for f in factors]
        if (
            not factors
            or [len(shape) for shape in shapes] != dims
            or any(shape[:2] != shapes[0][:2] for shape in shapes)
            or shapes[0][0] != rows
            or (ragged is not None and shapes[0][1] != ragged.shape[0])
            or (ragged is not None and any(isinstance(f, Lazy) for f in factors))
            or (ragged is not None and all(isinstance(f, OneHot) for f in factors))
            or blocks * math.prod(width_of(f) for f in factors) != self.numel
            or shapes[0][1] % blocks
            or (blocks > 1 and any(isinstance(f, OneHot) for f in factors))
            or (blocks > 1 and isinstance(factors[0], Columns))
        ):
            sizes = [f.size for f in factors if isinstance(f, OneHot)]
            raise Refused(
                f"Factors of shapes {shapes}{f', one-hot sizes {sizes}' * bool(sizes)} "
                "do not describe the gradient of a parameter of shape "
                f"{tuple(self.shape)} for a batch of {self.batch_size}:",
                remedy="each must be [B, T, width], or a OneHot with index [B, T], one "
                "for each axis.",
            )

    @property
    def numel(self) -> Size:
        """Entries of the parameter."""
        return math.prod(self.shape)

    def _fits(self, x: torch.Tensor) -> bool:
        numel = self.numel
        return x.dim() == 3 and x.shape[0] == self.batch_size and x.shape[2] == numel

    def _add_flat(self, x: torch.Tensor) -> None:
        """One factor alone needs no rows: what is summed can be summed now."""
        x = wide(x)
        x = x if x.shape[1] == 1 else x.sum(1, keepdim=True)
        self._uncache()
        if len(self._terms) == 1 and isinstance(self._terms[0], Flat):
            old = self._terms[0].factors[0]
            if old.shape == x.shape:
                x = old + x
                self._terms.clear()
        self._terms.append(Flat((x,)))

    def flat(self) -> Optional[torch.Tensor]:
        """
        ``[B, numel]``, if the gradients are there already and nothing is to be
        computed; else None.
        """
        if self._cached is not None:
            return self._cached
        return self._terms[0].flat() if len(self._terms) == 1 else None

    def _uncache(self) -> None:
        """What was cached is one more materialised use."""
        if self._cached is not None:
            self._terms.append(Flat((self._cached[:, None],)))
            self._cached, self.cached_bytes = None, 0

    def materialise(self) -> torch.Tensor:
        """
        Returns:
            The per-sample gradients ``[B, *shape]``.
        """
        dense = self._cached
        if dense is None and self._terms:
            dense = sums.materialise(self._terms, self.shape)
        elif dense is None:
            dense = torch.zeros(self.batch_size, self.numel)
        return dense.view(self.batch_size, *self.shape)

    def inner(self, other: GradSample) -> torch.Tensor:
        """
        The inner product with other per-sample gradients of the same shape.

        Returns:
            ``[B]``, the sum over the entries of ``self[b] * other[b]``.

        Raises:
            Refused: if shapes or batch sizes differ
        """
        if (self.shape, self.batch_size) != (other.shape, other.batch_size):
            raise Refused(
                f"Inner product of gradients of shapes {tuple(self.shape)} and "
                f"{tuple(other.shape)}, batches of {self.batch_size} and "
                f"{other.batch_size}.",
                remedy="Both must be of one shape and of the same samples.",
            )
        self._uncache()
        other._uncache()
        return sums.inner(self._terms, other._terms, self.batch_size)

    def squared_norm(self, cache: int = 0) -> torch.Tensor:
        """
        Squared norms, by the cheapest of three ways under :func:`workspace`: products
        of Gram matrices, sums over segments of equal index, or per-sample gradients
        materialised block by block. Never negative.

        Args:
            cache: bytes that may be spent on caching materialised gradients for a
                later :meth:`weighted_sum`; ``cached_bytes`` tells how many were

        Returns:
            ``[B]``, in float32 or wider.
        """
        if self._cached is not None:
            return square_sum(self._cached)
        if not self._terms:
            return torch.zeros(self.batch_size)
        if not any(t.sliced for t in self._terms):
            self._terms = sums.merged(self._terms)
        norms = sums.squared_norm(self._terms, self.shape, cache)
        if norms.gradients is not None:
            self._cached, self._terms = norms.gradients, []
            self.cached_bytes = norms.num_bytes
        return norms.squares

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """
        The sum over the batch of ``weights[b] * G[b]``, without per-sample gradients.

        Args:
            weights: ``[B]``, for example clipping factors

        Returns:
            ``[*shape]``
        """
        if self._cached is not None:
            return (weights.to(self._cached.dtype) @ self._cached).view(self.shape)
        if not self._terms:
            return torch.zeros(self.shape)
        return sums.weighted_sum(self._terms, self.shape, weights)

    def merge(self, other: GradSample) -> None:
        """Adds the uses of another one, of the same samples."""
        self._uncache()
        other._uncache()
        self._terms += other._terms

    def drop(self, samples: torch.Tensor) -> None:
        """
        Makes the gradients of some samples zero, whatever they are.

        Args:
            samples: which, ``[B]`` of bool
        """
        if self._cached is not None:
            self._cached = self._cached.masked_fill(samples[:, None], 0)
        self._terms = [t.without(samples) for t in self._terms]

    def clear(self) -> None:
        """Forgets the uses; what was computed from them stays valid."""
        self._terms, self._cached, self.cached_bytes = [], None, 0
