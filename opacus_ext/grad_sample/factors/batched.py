"""Batched rows: every factor holds ``[B, T, width]``, or an index ``[B, T]``."""

from __future__ import annotations

import functools
import math
from typing import List, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.factors import cost, gram, segments, sums
from opacus_ext.grad_sample.factors.rows import (
    OneHot,
    Rows,
    Size,
    entries,
    of_samples,
    square_sum,
    wide,
    width_of,
    with_entries,
)
from opacus_ext.grad_sample.factors.term import Norms, Term, dtype_of


def batched(factors: Tuple[Rows, ...]) -> Batched:
    """The structure of some factors."""
    if any(isinstance(f, OneHot) for f in factors):
        return Indexed(factors)
    return Dense(factors) if len(factors) > 1 else Flat(factors)


def scaled(
    term: Term, weights: torch.Tensor, dtype: torch.dtype, blocks: int = 1
) -> Batched:
    """
    All rows as those of one sample, scaled.

    Args:
        term: its rows are there
        weights: of each row, ``[B, 1]`` or ``[1, rows]``
        blocks: number of blocks that the rows of a sample come in, which become samples
    """
    narrowest = min(term.dense, key=lambda f: f.shape[2]) if term.dense else None
    factors: List[Rows] = []
    for f in term.factors:
        if isinstance(f, OneHot):
            factors.append(OneHot(f.index.reshape(1, -1), f.size))
            continue
        rows = f.to(dtype)
        if f is narrowest:
            rows, narrowest = rows * weights[:, :, None], None
        if blocks > 1:
            rows = rows.unflatten(1, (blocks, -1)).transpose(0, 1)
        factors.append(rows.reshape(blocks, -1, f.shape[2]))
    if not term.dense:
        index = entries(term.factors[0])
        factors.append(weights.expand(index.shape).reshape(1, -1, 1))
    return batched(tuple(factors))


class Batched(Term):
    """What structures of batched rows have in common."""

    def inner(self, other: Term) -> torch.Tensor:
        u, v = self, other.resolved()
        if u.widths != v.widths:
            widths = max(u.widths, v.widths, key=len)
            u, v = u.split(widths), v.split(widths)
        return gram.inner(u.factors, v.factors, dtype_of(u, v))

    def weighted_sum(
        self,
        weights: torch.Tensor,
        dtype: torch.dtype,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        whole = scaled(self, weights.to(dtype)[:, None], dtype)
        return whole.summed(dtype, out)

    def summed(self, dtype: torch.dtype, out: Optional[torch.Tensor]) -> torch.Tensor:
        """The gradient of a batch of one."""
        return self.materialise(dtype, out)

    def resolved(self) -> Batched:
        return self

    def without(self, samples: torch.Tensor) -> Batched:
        where = samples[:, None, None]
        factors = tuple(
            f if isinstance(f, OneHot) else f.masked_fill(where, 0)
            for f in self.factors
        )
        if not self.dense:  # rows that count as one
            ones = factors[0].index.new_ones(1, dtype=torch.float32)
            ones = ones.expand(*factors[0].index.shape).unsqueeze(-1)
            factors = (*factors, ones.masked_fill(where, 0))
        return batched(factors)

    def square_by_grams(self) -> torch.Tensor:
        """Squared norms ``[B]`` by products of Gram matrices."""
        if self.length == 1:
            # One product of rows: its norm is the product of theirs.
            dtype = dtype_of(self)
            squares = [square_sum(f.to(dtype)) for f in self.dense]
            if not squares:
                return torch.ones(self.batch_size, dtype=dtype, device=self.device)
            return functools.reduce(torch.mul, squares)
        return self.inner(self)

    @property
    def kind(self) -> tuple:
        """Terms of one kind can be concatenated along T."""
        return tuple(
            (isinstance(f, OneHot), width_of(f), entries(f).dtype) for f in self.factors
        )

    def joined(self, terms: Sequence[Batched]) -> Batched:
        """The sum of some terms of one kind."""
        return batched(
            tuple(
                with_entries(each[0], torch.cat([entries(f) for f in each], dim=1))
                for each in zip(*(t.factors for t in terms))
            )
        )

    def split(self, widths: Tuple[Size, ...]) -> Batched:
        """With one factor for each of ``widths``: materialised, if it has others."""
        if self.widths == widths:
            return self
        # G = sum over i of e_i (x) G[i]: rows of an identity are the first factor.
        dense = self.flat()
        if dense is None:
            dense = self.materialise(dtype_of(self))
        batch_size = dense.shape[0]
        index = torch.arange(widths[0], device=dense.device).expand(batch_size, -1)
        rest = dense.view(batch_size, widths[0], math.prod(widths[1:]))
        if len(widths) == 2:
            return Indexed((OneHot(index, widths[0]), rest))
        length = math.prod(widths[:-1])
        index = torch.arange(length, device=dense.device)
        factors: List[Rows] = []
        for i, width in enumerate(widths[:-1]):
            stride = math.prod(widths[i + 1 : -1])
            of_axis = (index // stride % width).expand(batch_size, -1)
            factors.append(OneHot(of_axis, width))
        return Indexed((*factors, dense.view(batch_size, length, widths[-1])))

    def part(self, shape: torch.Size, samples: slice, columns: slice) -> Batched:
        term = batched(
            tuple(of_samples(f, samples.start, samples.stop) for f in self.factors)
        )
        if term.widths[0] != shape[0]:
            term = term.split(tuple(shape))
        return term.cut(0, columns.start, columns.stop)

    def cut(self, axis: int, start: int, stop: int) -> Batched:
        """The entries ``start:stop`` of one axis of the parameter."""
        factors = list(self.factors)
        factors[axis] = factors[axis][:, :, start:stop]
        return batched(tuple(factors))


class Flat(Batched):
    """One factor ``[B, T, numel]``: gradients that are there, to be summed over T."""

    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        new = self.factors[0].to(dtype).sum(1)
        return new if out is None else out.add_(new.view_as(out))

    def squared_norm(self, cache: int = 0) -> Norms:
        rows = wide(self.factors[0])
        rows = rows.flatten(1) if rows.shape[1] == 1 else rows.sum(1)
        return Norms(square_sum(rows), rows)

    def flat(self) -> Optional[torch.Tensor]:
        rows = self.factors[0]
        return rows.squeeze(1) if rows.shape[1] == 1 else None

    def joined(self, terms: Sequence[Batched]) -> Batched:
        each = (t.factors[0] for t in terms)
        summed = (x if x.shape[1] == 1 else wide(x).sum(1, keepdim=True) for x in each)
        return Flat((sum(summed),))


class Dense(Batched):
    """Two or more dense factors: a linear layer, a window of a convolution."""

    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        left, right = self.dense[0].to(dtype), row_products(self.dense[1:], dtype)
        if out is None:
            return torch.bmm(left.mT, right).flatten(1)
        view = out.view(self.batch_size, left.shape[2], right.shape[2])
        view.baddbmm_(left.mT, right)
        return out

    def squared_norm(self, cache: int = 0) -> Norms:
        if self.length == 1:
            return Norms(self.square_by_grams())
        return sums.squared_norm_of_batched([self], cache)

    def summed(self, dtype: torch.dtype, out: Optional[torch.Tensor]) -> torch.Tensor:
        if out is None and len(self.factors) == 2 and self.batch_size == 1:
            left, right = self.factors
            return left[0].mT @ right[0]  # one product
        return self.materialise(dtype, out)


class Indexed(Batched):
    """One-hot factors, and dense ones or none: an embedding, stacked experts."""

    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        return add_by_place(self, *self.places(), dtype, out)

    def squared_norm(self, cache: int = 0) -> Norms:
        if self.length == 1:
            return Norms(self.square_by_grams())
        if len(self.dense) > 1 and not cost.worth_caching([self], cache, math.inf):
            return Norms(square_by_groups(self, *self.places()))
        return sums.squared_norm_of_batched([self], cache)

    def square_by_grams(self) -> torch.Tensor:
        if self.length != 1 and cost.by_segments(self):
            return square_by_segments(self, *self.places())
        return super().square_by_grams()

    def places(self) -> Tuple[torch.Tensor, int]:
        """See segments.py."""
        rows = entries(self.factors[0])
        samples = torch.arange(rows.shape[0], device=rows.device)[:, None]
        return segments.places_of(samples, self.onehot)

    def cut(self, axis: int, start: int, stop: int) -> Batched:
        factors = list(self.factors)
        f = factors[axis]
        if not isinstance(f, OneHot):
            return super().cut(axis, start, stop)
        stop = min(stop, f.size)
        inside = (f.index >= start) & (f.index < stop)
        index = (f.index - start).clamp(0, stop - start - 1)
        factors[axis] = OneHot(index, stop - start)
        for i, g in enumerate(factors):
            if not isinstance(g, OneHot):
                factors[i] = torch.where(inside[..., None], g, g.new_zeros(()))
                return Indexed(tuple(factors))
        # Only one-hot factors: the rows outside need a weight of zero.
        weight = inside[..., None].to(torch.get_default_dtype())
        return Indexed((*factors, weight))


# -- rows that meet by place (segments.py), of Indexed and of Ragged rows --------------


def row_products(dense: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The dense factors of each row multiplied out: ``[B, T, product of widths]``."""
    rows = dense[0].to(dtype)
    for f in dense[1:]:
        rows = (rows[..., None] * f.to(dtype)[:, :, None, :]).flatten(2)
    return rows


def _only_rows(term: Term, dtype: torch.dtype) -> torch.Tensor:
    """``[rows, width]`` of the only dense factor, or ones."""
    if term.dense:
        return term.dense[0].to(dtype).flatten(0, 1)
    index = entries(term.factors[0])
    return torch.ones(*index.shape[:2], 1, dtype=dtype, device=index.device).flatten(
        0, 1
    )


def square_by_segments(term: Term, places: torch.Tensor, size: int) -> torch.Tensor:
    """Squared norms ``[B]`` of terms of at most one dense factor."""
    rows = _only_rows(term, dtype_of(term))
    return segments.square_of_sums(rows, places, size, term.batch_size)


def square_by_groups(term: Term, places: torch.Tensor, size: int) -> torch.Tensor:
    """Squared norms ``[B]`` of terms of two or more dense factors."""
    dtype, batch_size = dtype_of(term), term.batch_size

    def flat() -> List[torch.Tensor]:
        return [f.flatten(0, 1).to(dtype) for f in term.dense]

    if cost.few(term.dense, len(places), dtype):
        return segments.square_of_few(flat(), places, size, batch_size)
    runs = segments.runs_of(places)
    if runs is not None and len(term.dense) == 2 and places.device.type == "cpu":
        return segments.square_of_runs(flat(), runs, size, batch_size)
    norm = torch.zeros(batch_size, dtype=dtype).to(places.device)
    dense = [f.flatten(0, 1) for f in term.dense]
    for keys, rows in segments.groups_of(dense, places):
        squares = Dense(tuple(rows)).squared_norm().squares
        norm.index_add_(0, keys // size, squares.to(norm.dtype))
    return norm


def add_by_place(
    term: Term,
    places: torch.Tensor,
    size: int,
    dtype: torch.dtype,
    out: Optional[torch.Tensor],
) -> torch.Tensor:
    """The gradients ``[B, numel]``, added to ``out`` if it is given."""
    batch_size, factors = term.batch_size, term.factors
    leading = all(isinstance(f, OneHot) for f in factors[: len(term.onehot)])
    if len(term.dense) <= 1:
        rows = _only_rows(term, dtype)
        if leading and out is not None:  # in place
            out.view(batch_size * size, rows.shape[1]).index_add_(0, places, rows)
            return out
        table = rows.new_zeros(batch_size * size, rows.shape[1])
        table.index_add_(0, places, rows)
    else:
        width = math.prod(f.shape[2] for f in term.dense)
        table = places.new_zeros(batch_size * size, width, dtype=dtype)
        dense = [f.flatten(0, 1) for f in term.dense]
        for keys, group in segments.groups_of(dense, places):
            if len(keys) == 1 and len(group) == 2:
                left, right = (f[0].to(dtype) for f in group)
                place = table[int(keys)].view(left.shape[1], -1)
                torch.mm(left.mT, right, out=place)
            else:
                table[keys] = Dense(tuple(group)).materialise(dtype)
    if not leading:
        # Axes back from (one-hot axes, dense axes) to the parameter's order.
        order = sorted(
            range(len(factors)), key=lambda i: not isinstance(factors[i], OneHot)
        )
        table = table.view(batch_size, *(term.widths[i] for i in order))
        table = table.permute([0] + [1 + order.index(i) for i in range(len(order))])
    new = table.reshape(batch_size, math.prod(term.widths))
    return new if out is None else out.add_(new.view_as(out))
