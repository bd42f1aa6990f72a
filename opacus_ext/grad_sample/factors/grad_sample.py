"""The per-sample gradients of one parameter."""

from __future__ import annotations

import math
from typing import Iterator, List, Optional, Sequence, Tuple, Union

import torch

from opacus_ext.grad_sample.factors import cost, gram
from opacus_ext.grad_sample.factors.rows import (
    Factor,
    OneHot,
    dtype_of,
    entries,
    product,
    square_sum,
    steps,
    width_of,
)
from opacus_ext.grad_sample.factors.segments import groups_of
from opacus_ext.grad_sample.factors.settings import bound_on, workspace
from opacus_ext.grad_sample.factors.terms import (
    Batched,
    Flat,
    Indexed,
    Norms,
    Term,
    term_of,
)
from opacus_ext.refused import Refused

T = torch.Tensor


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
        >>> torch.allclose(g.squared_norm(), g.materialize().pow(2).sum((1, 2)))
        True
    """

    def __init__(self, shape: torch.Size, batch_size: int, rows: Optional[T] = None):
        self.shape = torch.Size(shape)
        self.numel = product(shape)
        self.batch_size = batch_size
        self.cached_bytes = 0  # of gradients materialized to be cached
        self._terms: List[Term] = [] if rows is None else [Flat(rows)]

    def add(self, *factors: Union[Factor, Term]) -> None:
        """
        Adds one use of the parameter.

        Args:
            factors: one a parameter axis, left to right: dense ``[B, T, width]`` or
                :class:`OneHot` with index ``[B, T]``. Neighboring axes may share one
                factor, so ``[B, 1, numel]`` is a materialized per-sample gradient. Or
                one :class:`Term`.

        Raises:
            Refused: if the factors do not fit the parameter or the batch
        """
        self.cached_bytes = 0
        if factors and isinstance(factors[0], Term):
            term = factors[0]
        else:
            self._check(factors)
            term = term_of(factors)
        last = self._terms[-1] if self._terms else None
        if isinstance(term, Flat) and isinstance(last, Flat):  # added at once
            self._terms[-1] = last.joined([last, term])
        elif self.batch_size:
            self._terms.append(term)

    def _check(self, factors: Tuple[Factor, ...]) -> None:
        shapes = [tuple(entries(f).shape) for f in factors]
        dims = [2 if isinstance(f, OneHot) else 3 for f in factors]
        if (
            not factors
            or [len(shape) for shape in shapes] != dims
            or any(shape[:2] != shapes[0][:2] for shape in shapes)
            or shapes[0][0] != self.batch_size
            or product(map(width_of, factors)) != self.numel
        ):
            sizes = [f.size for f in factors if isinstance(f, OneHot)]
            raise Refused(
                f"Factors of shapes {shapes}{f', one-hot sizes {sizes}' * bool(sizes)} "
                "do not describe the gradient of a parameter of shape "
                f"{tuple(self.shape)} for a batch of {self.batch_size}:",
                remedy="each must be [B, T, width], or a OneHot with index [B, T], one "
                "for each axis.",
            )

    def flat(self) -> Optional[T]:
        """
        ``[B, numel]``, if the gradients are there already and nothing is to be
        computed; else None.
        """
        return self._terms[0].flat() if len(self._terms) == 1 else None

    def materialize(self) -> T:
        """The per-sample gradients ``[B, *shape]``."""
        if not self._terms:
            return torch.zeros(self.batch_size, *self.shape)
        out = None
        if not self._sliced:
            for term in self._in_order():
                out = term.materialize(self._dtype, out)
            return out.reshape(self.batch_size, *self.shape)
        for samples, rows, part in self._slices():
            new = part.materialize()
            if out is None:
                out = new.new_zeros(self.batch_size, *self.shape)
            out[samples, rows] = new
        return out

    def squared_norm(self, cache: int = 0) -> T:
        """
        Squared norms, by the cheapest of three ways under :func:`workspace`: products
        of Gram matrices, sums over segments of equal index, or per-sample gradients
        materialized block by block. Never negative.

        Args:
            cache: bytes that may be spent on caching materialized gradients for a
                later :meth:`weighted_sum`; ``cached_bytes`` tells how many were

        Returns:
            ``[B]``, in float32 or wider.
        """
        if not self._terms:
            return torch.zeros(self.batch_size)
        norms = self._norms(cache)
        if norms.gradients is not None:
            self._terms = [Flat(norms.gradients)]
            self.cached_bytes = self.cached_bytes or norms.num_bytes
        return norms.squares

    def weighted_sum(self, weights: T) -> T:
        """
        The sum over the batch of ``weights[b] * G[b]``, without per-sample gradients.

        Args:
            weights: ``[B]``, for example clipping factors

        Returns:
            ``[*shape]``
        """
        if not self._terms:
            return torch.zeros(self.shape)
        total = None
        if not self._sliced:
            for term in self._in_order():
                total = term.weighted_sum(weights, self._dtype, total)
            return total.reshape(self.shape)
        for samples, rows, part in self._slices():
            new = part.weighted_sum(weights[samples])
            if total is None:
                total = new.new_zeros(self.shape)
            total[rows] += new
        return total

    def drop(self, samples: T) -> None:
        """
        Makes the gradients of some samples zero, whatever they are.

        Args:
            samples: which, ``[B]`` of bool
        """
        self._terms = [t.without(samples) for t in self._terms]

    def clear(self) -> None:
        """Forgets the gradients; norms that were computed stay valid."""
        self._terms, self.cached_bytes = [], 0

    # -- the sum of several terms ------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return dtype_of(*(t.dtype for t in self._terms))

    @property
    def _sliced(self) -> bool:
        return any(t.sliced for t in self._terms)

    def _in_order(self) -> Sequence[Term]:
        """One-hot terms come last: they add into the entries that they touch."""
        if len(self._terms) == 1:
            return self._terms
        return sorted((t.resolved() for t in self._terms), key=lambda t: len(t.onehot))

    def _norms(self, cache: int) -> Norms:
        if self._sliced:
            if self.batch_size * self.numel * 8 <= cache:
                return Norms.of(self.materialize().flatten(1))
            squares = torch.zeros(self.batch_size, dtype=self._dtype)
            squares = squares.to(self._terms[0].device)
            for samples, _, part in self._slices():
                squares[samples] += part.squared_norm()
            return Norms(squares)
        terms = self._merged() if len(self._terms) > 1 else self._terms
        if len(terms) > 1:
            return _sum_of(terms, self.shape, self.batch_size)._norms_of_rows(cache)
        own = terms[0].squared_norm(cache)
        return self._norms_of_rows(cache) if own is None else own

    def _merged(self) -> List[Batched]:
        """The terms of one kind as one, so that products between them vanish."""
        kinds: dict = {}
        for term in (t.resolved() for t in self._terms):
            kinds.setdefault(term.kind, []).append(term)
        return [
            same[0].joined(same) if len(same) > 1 else same[0]
            for same in kinds.values()
        ]

    def _norms_of_rows(self, cache: int) -> Norms:
        terms: Sequence[Batched] = self._terms
        grams, blocks = cost.of_grams(terms), cost.of_blocks(terms)
        if cost.worth_caching(terms, cache, min(grams, blocks)):
            return Norms.of(self.materialize().flatten(1))
        if len(terms) == 1 and terms[0].onehot and len(terms[0].dense) > 1:
            if not torch.compiler.is_compiling() and not cost.few(terms[0]):
                return Norms(_square_by_groups(terms[0]))
        if grams <= blocks:
            squares = sum(t.square_by_grams() for t in terms)
            for i, u in enumerate(terms):
                for v in terms[:i]:
                    squares = squares + 2 * gram.inner(
                        u.factors, v.factors, self._dtype
                    )
        else:
            squares = self._square_by_blocks()
        return Norms(squares.clamp(min=0))

    def _square_by_blocks(self) -> T:
        terms: Sequence[Batched] = self._terms
        bound = bound_on(terms[0].device.type)
        # Those of a shared parameter are not in memory at once but to be cached.
        several = len(terms) > 1 or bool(terms[0].onehot)
        count = max(4 if several else 1, self.batch_size * self.numel * 8 // bound)
        step = max(1, math.ceil(self.shape[0] / count))
        parts = self._parts(step, self.batch_size)
        return sum(square_sum(part.materialize()) for _, _, part in parts)

    def _slices(self) -> Iterator[Tuple[slice, slice, GradSample]]:
        """Parts of which the workspace holds the rows."""
        first = next(t for t in self._terms if t.sliced)
        count = max(1, workspace() // (max(1, first.length) * first.dtype.itemsize))
        step = min(self.shape[0], max(64, count))
        return self._parts(step, max(1, count // step))

    def _parts(self, step: int, some: int) -> Iterator[Tuple[slice, slice, GradSample]]:
        """The gradients of ``some`` samples, for ``step`` rows of the parameter."""
        for start, stop in steps(self.shape[0], step):
            shape = torch.Size((stop - start, *self.shape[1:]))
            for first, last in steps(self.batch_size, some):
                samples, rows = slice(first, last), slice(start, stop)
                terms = [t.part(self.shape, samples, rows) for t in self._terms]
                yield samples, rows, _sum_of(terms, shape, last - first)


def _sum_of(terms: Sequence[Term], shape: torch.Size, size: int) -> GradSample:
    found = GradSample(shape, size)
    found._terms = list(terms)
    return found


def _square_by_groups(term: Indexed) -> T:
    """Squared norms ``[B]``, where rows of one sample and one index meet."""
    places, size = term.places()
    squares = torch.zeros(term.batch_size, dtype=term.dtype, device=term.device)
    shape = torch.Size(f.shape[2] for f in term.dense)
    for keys, group in groups_of(term.dense, places):
        each = GradSample(shape, len(keys))
        each.add(*group)
        squares.index_add_(0, keys // size, each.squared_norm().to(squares))
    return squares
