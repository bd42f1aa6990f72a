"""Terms: one use of a parameter each, and how its per-sample gradients are held."""

from __future__ import annotations

import functools
from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.factors import cost, gram, segments
from opacus_ext.grad_sample.factors.rows import (
    Factor,
    OneHot,
    dtype_of,
    entries,
    product,
    square_sum,
    wide,
    width_of,
    with_entries,
)

T = torch.Tensor


class Norms(NamedTuple):
    """
    Attributes:
        squares: squared norms ``[B]``
        gradients: ``[B, numel]``, where the gradients were materialized for the norms
            and may be used instead of the term; else None
        num_bytes: memory that was spent on ``gradients``; 0 if they were there before
    """

    squares: T
    gradients: Optional[T] = None
    num_bytes: int = 0

    @staticmethod
    def of(gradients: T, num_bytes: Optional[int] = None) -> Norms:
        """Of gradients ``[B, numel]`` that were materialized now."""
        if num_bytes is None:
            num_bytes = gradients.numel() * gradients.dtype.itemsize
        return Norms(square_sum(gradients), gradients, num_bytes)


class Term:
    """
    Per-sample gradients ``[B, numel]`` of one use of a parameter.

    Attributes:
        batch_size: number of samples
        dtype: that norms are accumulated in, float32 or wider
        sliced: whether not even the rows of one sample need fit into memory, so that
            all is done by parts. Such a term has ``length``, ``device``, :meth:`part`
            and :meth:`without`
    """

    sliced = False
    batch_size: int
    dtype: torch.dtype

    def materialize(self, dtype: torch.dtype, out: Optional[T] = None) -> T:
        """
        The gradients ``[B, numel]``, added to ``out`` in place if it is given, which
        may have any shape.
        """
        raise NotImplementedError

    def weighted_sum(
        self, weights: T, dtype: torch.dtype, out: Optional[T] = None
    ) -> T:
        """
        The sum over samples of ``weights[b]`` times the gradient, ``numel`` entries of
        any shape, added to ``out`` in place if it is given.
        """
        raise NotImplementedError

    def without(self, samples: T) -> Term:
        """Zeros in the place of some samples, ``[B]`` of bool."""
        raise NotImplementedError

    def squared_norm(self, cache: int = 0) -> Optional[Norms]:
        """
        The squared norms, if the term has a way of its own; else None.

        Args:
            cache: bytes that may be spent on gradients to be returned
        """
        return None

    def flat(self) -> Optional[T]:
        """The gradients, if they are there and nothing is to be computed; else None."""
        return None

    def resolved(self) -> Batched:
        """The same gradients as rows that are in memory."""
        return Flat(self.materialize(self.dtype))

    def part(self, shape: torch.Size, samples: slice, rows: slice) -> Batched:
        """
        The gradients of some samples for some rows of the parameter.

        Args:
            shape: of the parameter
        """
        return self.resolved().part(shape, samples, rows)


def term_of(factors: Tuple[Factor, ...]) -> Batched:
    """The term of some factors."""
    if any(isinstance(f, OneHot) for f in factors):
        return Indexed(factors)
    return Dense(factors) if len(factors) > 1 else Flat(_summed(factors[0]))


def _summed(rows: T) -> T:
    """One factor alone needs no rows: what is summed can be summed now."""
    return rows.squeeze(1) if rows.shape[1] == 1 else wide(rows).sum(1)


class Batched(Term):
    """
    Sums over rows of outer products of the factors of each row.

    Args:
        factors: one or more axes of the parameter each, left to right
    """

    def __init__(self, factors: Tuple[Factor, ...]):
        self.factors = factors
        self.dense: List[T] = [f for f in factors if not isinstance(f, OneHot)]
        self.onehot: List[OneHot] = [f for f in factors if isinstance(f, OneHot)]
        self.widths = tuple(map(width_of, factors))
        first = entries(factors[0])
        self.batch_size, self.length = first.shape[:2]
        self.device = first.device
        self.dtype = dtype_of(*(f.dtype for f in self.dense))

    def weighted_sum(
        self, weights: T, dtype: torch.dtype, out: Optional[T] = None
    ) -> T:
        # All rows as those of one sample, the narrowest factor scaled.
        at = None  # no min() with a key, which the compiler does not know
        for f in self.dense:
            if at is None or f.shape[2] < at.shape[2]:
                at = f
        factors: List[Factor] = []
        for f in self.factors:
            if isinstance(f, OneHot):
                factors.append(OneHot(f.index.reshape(1, -1), f.size))
                continue
            rows = f.to(dtype)
            if f is at:
                rows, at = rows * weights.to(dtype)[:, None, None], None
            factors.append(rows.reshape(1, -1, f.shape[2]))
        if not self.dense:
            rows = weights.to(dtype)[:, None].expand(self.batch_size, self.length)
            factors.append(rows.reshape(1, -1, 1))
        if len(factors) == len(self.dense) == 2 and out is None:
            left, right = factors
            return left[0].mT @ right[0]  # one product
        return term_of(tuple(factors)).materialize(dtype, out)

    def without(self, samples: T) -> Batched:
        where = samples[:, None, None]
        factors: Tuple[Factor, ...] = tuple(
            f if isinstance(f, OneHot) else f.masked_fill(where, 0)
            for f in self.factors
        )
        if not self.dense:  # rows that count as one
            ones = self._only_rows(self.dtype).view(*self.onehot[0].index.shape, 1)
            factors = (*factors, ones.masked_fill(where, 0))
        return term_of(factors)

    def resolved(self) -> Batched:
        return self

    def squared_norm(self, cache: int = 0) -> Optional[Norms]:
        return Norms(self.square_by_grams()) if self.length == 1 else None

    def square_by_grams(self) -> T:
        """Squared norms ``[B]`` by products of Gram matrices."""
        if self.length == 1:  # the norm of a product of rows is the product of theirs
            squares = [square_sum(f.to(self.dtype)) for f in self.dense]
            ones = torch.ones(self.batch_size, dtype=self.dtype, device=self.device)
            return functools.reduce(torch.mul, squares) if squares else ones
        return gram.inner(self.factors, None, self.dtype)

    @property
    def kind(self) -> tuple:
        """Terms of one kind can be concatenated along T."""
        each = zip(self.factors, self.widths)
        return tuple((isinstance(f, OneHot), n, entries(f).dtype) for f, n in each)

    def joined(self, terms: Sequence[Batched]) -> Batched:
        """The sum of some terms of one kind."""
        columns = zip(*(t.factors for t in terms))
        return term_of(
            tuple(
                with_entries(each[0], torch.cat([entries(f) for f in each], dim=1))
                for each in columns
            )
        )

    def part(self, shape: torch.Size, samples: slice, rows: slice) -> Batched:
        some = [with_entries(f, entries(f)[samples]) for f in self.factors]
        first = some[0]
        if self.widths[0] != shape[0]:  # it has several axes
            whole = term_of(tuple(some)).materialize(self.dtype)
            return Flat(whole.unflatten(1, (shape[0], -1))[:, rows].flatten(1))
        if not isinstance(first, OneHot):
            return term_of((first[:, :, rows], *some[1:]))
        inside = (first.index >= rows.start) & (first.index < rows.stop)
        index = torch.where(inside, first.index - rows.start, 0)
        weight = inside.unsqueeze(-1).to(self.dtype)
        for i, f in enumerate(some):
            if not isinstance(f, OneHot):
                some[i] = torch.where(inside.unsqueeze(-1), f, 0)
                weight = None
                break
        cut = (OneHot(index, rows.stop - rows.start), *some[1:])
        return Indexed(cut if weight is None else (*cut, weight))

    def _only_rows(self, dtype: torch.dtype) -> T:
        """``[rows, width]`` of the only dense factor, or ones."""
        if self.dense:
            return self.dense[0].to(dtype).flatten(0, 1)
        count = self.batch_size * self.length
        return torch.ones(count, 1, dtype=dtype, device=self.device)


class Flat(Batched):
    """Gradients that are there, ``[B, numel]``."""

    def __init__(self, rows: T):
        super().__init__((rows.unsqueeze(1),))
        self.rows = rows

    def materialize(self, dtype: torch.dtype, out: Optional[T] = None) -> T:
        if out is None:
            return self.rows.to(dtype, copy=True)
        return out.add_(self.rows.to(dtype).view_as(out))

    def squared_norm(self, cache: int = 0) -> Norms:
        return Norms.of(wide(self.rows), 0)

    def weighted_sum(
        self, weights: T, dtype: torch.dtype, out: Optional[T] = None
    ) -> T:
        new = weights.to(dtype) @ self.rows.to(dtype)
        return new if out is None else out.add_(new.view_as(out))

    def flat(self) -> T:
        return self.rows

    def joined(self, terms: Sequence[Batched]) -> Batched:
        return Flat(sum(wide(t.rows) for t in terms))

    def part(self, shape: torch.Size, samples: slice, rows: slice) -> Batched:
        some = self.rows[samples].unflatten(1, (shape[0], -1))
        return Flat(some[:, rows].flatten(1))


class Dense(Batched):
    """Two or more dense factors: a linear layer, a window of a convolution."""

    def materialize(self, dtype: torch.dtype, out: Optional[T] = None) -> T:
        left, right = self.dense[0].to(dtype), self.dense[1].to(dtype)
        for f in self.dense[2:]:  # multiplied out: [B, T, product of widths]
            right = (right[..., None] * f.to(dtype)[:, :, None, :]).flatten(2)
        if out is None:
            return torch.bmm(left.mT, right).flatten(1)
        out.view(self.batch_size, left.shape[2], -1).baddbmm_(left.mT, right)
        return out


class Indexed(Batched):
    """One-hot factors, and dense ones or none: an embedding, stacked experts."""

    def materialize(self, dtype: torch.dtype, out: Optional[T] = None) -> T:
        places, size = self.places()
        kinds = [not isinstance(f, OneHot) for f in self.factors]
        order = sorted(range(len(kinds)), key=kinds.__getitem__)
        leading = kinds == sorted(kinds)
        if len(self.dense) > 1:
            table = self._by_groups(places, size, dtype)
        else:
            rows = self._only_rows(dtype)
            if leading and out is not None:  # in place
                table = out.view(self.batch_size * size, rows.shape[1])
                table.index_add_(0, places, rows)
                return out
            table = rows.new_zeros(self.batch_size * size, rows.shape[1])
            table.index_add_(0, places, rows)
        if not leading:  # axes back from (one-hot, dense) to the parameter's order
            table = table.view(self.batch_size, *(self.widths[i] for i in order))
            table = table.permute(0, *(1 + order.index(i) for i in range(len(order))))
        new = table.reshape(self.batch_size, product(self.widths))
        return new if out is None else out.add_(new.view_as(out))

    def _by_groups(self, places: T, size: int, dtype: torch.dtype) -> T:
        """The products of rows of one place, two dense factors or more."""
        width = product(f.shape[2] for f in self.dense)
        table = places.new_zeros(self.batch_size * size, width, dtype=dtype)
        for keys, group in segments.groups_of(self.dense, places):
            table[keys] = Dense(tuple(group)).materialize(dtype)
        return table

    def square_by_grams(self) -> T:
        if self.length != 1 and cost.by_segments(self):
            rows, (places, size) = self._only_rows(self.dtype), self.places()
            return segments.square_of_sums(rows, places, size, self.batch_size)
        return super().square_by_grams()

    def places(self) -> Tuple[T, int]:
        """See segments.py."""
        return segments.places_of(self.onehot)
