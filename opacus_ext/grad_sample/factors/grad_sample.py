"""The per-sample gradients of one parameter: terms, what they cost, and their sum."""

from __future__ import annotations

import functools
import math
from typing import Iterator, Sequence

import torch

from opacus_ext.grad_sample.factors.rows import (
    Factor,
    OneHot,
    cut,
    dtype_of,
    entries,
    groups_of,
    inner,
    joined,
    places_of,
    product,
    square_of_sums,
    square_sum,
    steps,
    wide,
    width_of,
    workspace,
)
from opacus_ext.refused import Refused

T = torch.Tensor
_CPU_CACHE = 2**22  # bytes worked on at a time by a CPU
_FEW = 2**26  # multiply-adds that take no longer than sorting rows by index


class Term:
    """
    Per-sample gradients ``[B, numel]`` of one use of a parameter.

    Attributes:
        batch_size: number of samples
        dtype: that norms are accumulated in, float32 or wider
        flat: the gradients, if they are there and nothing is to be computed; else None
        onehot: its one-hot factors
        sliced: whether not even the rows of one sample need fit into memory, so that
            all is done by parts. Such a term has ``length``, :meth:`part` and
            :meth:`without`
    """

    batch_size: int
    device: torch.device
    dtype: torch.dtype
    length: int
    flat: T | None = None
    onehot: Sequence[OneHot] = ()
    sliced = False

    def materialize(self, dtype: torch.dtype, out: T | None = None) -> T:
        """
        The gradients ``[B, numel]``, added to ``out`` in place if it is given, which
        may have any shape.
        """
        raise NotImplementedError

    def weighted_sum(self, weights: T, dtype: torch.dtype, out: T | None = None) -> T:
        """
        The sum over samples of ``weights[b]`` times the gradient, ``numel`` entries of
        any shape, added to ``out`` in place if it is given.
        """
        raise NotImplementedError

    def squared_norm(self) -> T:
        """The squared norms ``[B]``."""
        raise NotImplementedError

    def without(self, samples: T) -> Term:
        """The same with zeros for some samples, ``[B]`` of bool."""
        raise NotImplementedError

    def resolved(self) -> OuterProducts:
        """The same gradients as rows that are in memory."""
        return OuterProducts(self.materialize(self.dtype).unsqueeze(1))

    def part(self, shape: torch.Size, samples: slice, rows: slice) -> OuterProducts:
        """The gradients of some samples, for some rows of a parameter of this shape."""
        return self.resolved().part(shape, samples, rows)


class OuterProducts(Term):
    """
    Sums over rows of outer products of the factors of each row. One dense factor alone
    needs no rows: what is summed is summed at once.

    Args:
        factors: one or more axes of the parameter each, left to right
    """

    def __init__(self, *factors: Factor):
        first = entries(factors[0])
        if len(factors) == 1 and not isinstance(factors[0], OneHot):
            first = wide(first)
            if first.shape[1] != 1:
                first = first.sum(1, keepdim=True)
            factors, self.flat = (first,), first.squeeze(1)
        self.dense: list[T] = [f for f in factors if isinstance(f, T)]
        self.onehot = [f for f in factors if isinstance(f, OneHot)]
        if not self.dense:  # each row counts as one
            self.dense = [torch.ones(*first.shape, 1, device=first.device)]
            factors = (*factors, *self.dense)
        self.factors = factors
        self.batch_size, self.length = first.shape[:2]
        self.device = first.device

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the factors."""
        return tuple(map(width_of, self.factors))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """That norms are accumulated in."""
        return dtype_of(*(f.dtype for f in self.dense))

    def materialize(self, dtype: torch.dtype, out: T | None = None) -> T:
        if self.onehot:
            return self._by_index(dtype, out)
        if self.flat is not None:
            new = self.flat.to(dtype, copy=out is None)
            return new if out is None else out.add_(new.view_as(out))
        left, right, *others = [f.to(dtype) for f in self.dense]
        for f in others:  # multiplied out: [B, T, product of widths]
            right = (right[..., None] * f[:, :, None, :]).flatten(2)
        if out is None:
            return torch.bmm(left.mT, right).flatten(1)
        out.view(self.batch_size, left.shape[2], -1).baddbmm_(left.mT, right)
        return out

    def _by_index(self, dtype: torch.dtype, out: T | None) -> T:
        places, size = places_of(self.onehot)
        kinds = [not isinstance(f, OneHot) for f in self.factors]
        order = sorted(range(len(kinds)), key=kinds.__getitem__)
        leading = kinds == sorted(kinds)
        if len(self.dense) > 1:
            width = product(f.shape[2] for f in self.dense)
            table = places.new_zeros(self.batch_size * size, width, dtype=dtype)
            large = 8 if places.device.type == "cpu" else 128
            for keys, group in groups_of(self.dense, places, large):
                into = table[keys] if isinstance(keys, slice) else None
                found = OuterProducts(*group).materialize(dtype, into)
                if into is None:
                    table[keys] = found
        else:
            rows = self.dense[0].to(dtype).flatten(0, 1)
            into = out if leading else None
            if into is None:
                into = rows.new_zeros(self.batch_size, size, rows.shape[1])
            table = into.view(-1, rows.shape[1]).index_add_(0, places, rows)
            if into is out:
                return out
        if not leading:  # axes back from (one-hot, dense) to the parameter's order
            table = table.view(self.batch_size, *(self.widths[i] for i in order))
            table = table.permute(0, *(1 + order.index(i) for i in range(len(order))))
        new = table.reshape(self.batch_size, product(self.widths))
        return new if out is None else out.add_(new.view_as(out))

    def weighted_sum(self, weights: T, dtype: torch.dtype, out: T | None = None) -> T:
        weights = weights.to(dtype)
        if self.flat is not None:
            new = weights @ self.flat.to(dtype)
            return new if out is None else out.add_(new.view_as(out))
        # All rows as those of one sample, the narrowest factor scaled.
        at, weights = None, weights[:, None, None]
        for f in self.dense:  # no min() with a key, which the compiler does not know
            if at is None or f.shape[2] < at.shape[2]:
                at = f
        factors: list[Factor] = []
        for f in self.factors:
            if isinstance(f, OneHot):
                factors.append(OneHot(f.index.reshape(1, -1), f.size))
                continue
            rows = f.to(dtype)
            if f is at:
                rows, at = rows * weights, None
            factors.append(rows.reshape(1, -1, f.shape[2]))
        if len(factors) == 2 and not self.onehot and out is None:
            left, right = factors
            return left[0].mT @ right[0]  # one product
        return OuterProducts(*factors).materialize(dtype, out)

    def without(self, samples: T) -> OuterProducts:
        where = samples[:, None, None]
        return OuterProducts(
            *(
                f if isinstance(f, OneHot) else f.masked_fill(where, 0)
                for f in self.factors
            )
        )

    def resolved(self) -> OuterProducts:
        return self

    def squared_norm(self) -> T:
        """By products of Gram matrices, or sums of rows of one index."""
        if self.length == 1:  # the norm of a product of rows is the product of theirs
            squares = [square_sum(f.to(self.dtype)) for f in self.dense]
            return functools.reduce(torch.mul, squares)
        if by_segments(self):
            rows = self.dense[0].to(self.dtype).flatten(0, 1)
            return square_of_sums(rows, *places_of(self.onehot), self.batch_size)
        return inner(self.factors, None, self.dtype)

    def part(self, shape: torch.Size, samples: slice, rows: slice) -> OuterProducts:
        some = [cut(f, samples) for f in self.factors]
        first = some[0]
        if self.widths[0] != shape[0]:  # it has several axes
            whole = OuterProducts(*some).materialize(self.dtype)
            return OuterProducts(whole.view(-1, 1, *shape)[:, :, rows].flatten(2))
        if not isinstance(first, OneHot):
            return OuterProducts(first[:, :, rows], *some[1:])
        inside = (first.index >= rows.start) & (first.index < rows.stop)
        some[0] = OneHot(
            torch.where(inside, first.index - rows.start, 0), rows.stop - rows.start
        )
        for i, f in enumerate(some):
            if not isinstance(f, OneHot):
                some[i] = torch.where(inside.unsqueeze(-1), f, 0)
                break
        return OuterProducts(*some)


# -- what it costs ---------------------------------------------------------------------
#
# Multiply-adds a sample. The constants weigh in memory traffic: about 4 for an entry in
# cache; 60 for one that is written, read twice and takes memory. They were set by
# timing on CPU; only speed depends on them.


def by_segments(term: OuterProducts) -> bool:
    """
    Whether rows of equal index are summed: one-hot factors, with one dense, and so
    many rows that sorting them takes less than to let all meet.
    """
    return bool(term.onehot) and len(term.dense) == 1 and term.length > 32


def of_grams(terms: Sequence[OuterProducts]) -> float:
    """Cost of the squared norm by Gram matrices of the terms and of each pair."""
    if len({t.widths for t in terms}) > 1:
        return math.inf
    cost = 0.0
    for i, u in enumerate(terms):
        widths = sum(f.shape[2] for f in u.dense)
        if by_segments(u):
            cost += u.length * (16 + widths)
        else:  # one triangle and the diagonal blocks
            cost += 0.65 * u.length**2 * (8 + widths)
        for v in terms[:i]:
            both = [
                f.shape[2]
                for f, g in zip(u.factors, v.factors)
                if not isinstance(f, OneHot) and not isinstance(g, OneHot)
            ]
            cost += u.length * v.length * (8 * len(u.factors) + sum(both))
    return cost


def of_blocks(terms: Sequence[OuterProducts]) -> float:
    """Cost of the squared norm by gradients materialized block by block."""
    numel = product(terms[0].widths)
    cost = 4.0 * numel
    for t in terms:
        if t.onehot:
            cost += 2 * numel + t.length * product(f.shape[2] for f in t.dense)
        else:
            cost += t.length * numel
    return cost


def worth_caching(terms: Sequence[OuterProducts], cache: int, cost: float) -> bool:
    """
    Whether gradients are materialized for their norm and cached for the clipped sum,
    in so many bytes at most, where another way to the norm has a cost.
    """
    several = [len(t.dense) > 1 for t in terms]
    if not any(several) or any(t.onehot and n for t, n in zip(terms, several)):
        return False  # nothing to gain
    numel = product(terms[0].widths)
    size = terms[0].batch_size * numel * dtype_of(*(t.dtype for t in terms)).itemsize
    return size <= cache and 60 * numel <= cost


def few(term: OuterProducts) -> bool:
    """Whether rows are so few that all pairs may meet, most of them in vain."""
    width = 64 + sum(f.shape[2] for f in term.dense)  # 64: passes over the product
    size = term.batch_size * term.length**2
    return size * width <= _FEW and 3 * size * term.dtype.itemsize <= workspace()


# -- their sum -------------------------------------------------------------------------


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

    def __init__(self, shape: torch.Size, batch_size: int, rows: T | None = None):
        self.shape, self.numel = torch.Size(shape), product(shape)
        self.batch_size = batch_size
        self.cached_bytes = 0  # of gradients materialized to be cached
        self._terms: list[Term] = []
        if rows is not None:
            self._terms.append(OuterProducts(rows.unsqueeze(1)))

    def add(self, *factors: Factor | Term) -> None:
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
            term = OuterProducts(*factors)
        last = self._terms[-1].flat if self._terms else None
        if last is not None and term.flat is not None:  # added at once
            self._terms[-1] = OuterProducts((last + term.flat).unsqueeze(1))
        elif self.batch_size:
            self._terms.append(term)

    def _check(self, factors: Sequence[Factor]) -> None:
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
                remedy="each must be [B, T, width], or an opacus_ext.OneHot with index "
                "[B, T], one for each axis.",
            )

    def flat(self) -> T | None:
        """
        ``[B, numel]``, if the gradients are there already and nothing is to be
        computed; else None.
        """
        return self._terms[0].flat if len(self._terms) == 1 else None

    def materialize(self) -> T:
        """The per-sample gradients ``[B, *shape]``."""
        out = None
        if self._by_parts:
            out = self._zeros(self.batch_size, *self.shape)
            for samples, rows, part in self._slices():
                out[samples, rows] = part.materialize()
            return out
        for term in self._in_order():
            out = term.materialize(self._dtype, out)
        return out.reshape(self.batch_size, *self.shape)

    def weighted_sum(self, weights: T) -> T:
        """
        The sum over the batch of ``weights[b] * G[b]``, without per-sample gradients.

        Args:
            weights: ``[B]``, for example clipping factors

        Returns:
            ``[*shape]``
        """
        total = None
        if self._by_parts:
            total = self._zeros(*self.shape)
            for samples, rows, part in self._slices():
                total[rows] += part.weighted_sum(weights[samples])
            return total
        for term in self._in_order():
            total = term.weighted_sum(weights, self._dtype, total)
        return total.reshape(self.shape)

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
        if not all(isinstance(t, OuterProducts) for t in self._terms):
            if self.batch_size * self.numel * self._dtype.itemsize <= cache:
                return self._cache(self)
            if not self._by_parts and len(self._terms) == 1:
                return self._terms[0].squared_norm()
        if self._by_parts:
            squares = self._zeros(self.batch_size)
            for samples, _, part in self._slices():
                squares[samples] += part.squared_norm()
            return squares
        merged = self._merged() if len(self._terms) > 1 else self
        terms: Sequence[OuterProducts] = merged._terms
        if len(terms) == 1 and terms[0].length == 1:
            return terms[0].squared_norm()
        grams, blocks = of_grams(terms), of_blocks(terms)
        if worth_caching(terms, cache, min(grams, blocks)):
            return self._cache(merged)
        if len(terms) == 1 and terms[0].onehot and len(terms[0].dense) > 1:
            if not torch.compiler.is_compiling() and not few(terms[0]):
                return _square_by_groups(terms[0])
        if grams > blocks:
            return merged._square_by_blocks()
        squares = sum(t.squared_norm() for t in terms)
        for i, u in enumerate(terms):
            for v in terms[:i]:
                squares = squares + 2 * inner(u.factors, v.factors, self._dtype)
        return squares.clamp(min=0)

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

    @property
    def _dtype(self) -> torch.dtype:
        return dtype_of(*(t.dtype for t in self._terms))

    def _zeros(self, *shape: int) -> T:
        device = self._terms[0].device if self._terms else None
        return torch.zeros(shape, dtype=self._dtype, device=device)

    def _in_order(self) -> Sequence[Term]:
        """One-hot terms come last: they add into the entries that they touch."""
        return sorted(self._terms, key=lambda t: len(t.onehot))

    def _cache(self, same: GradSample) -> T:
        """Materializes the same gradients to be used from now on; squared norms."""
        flat = same.materialize().flatten(1)
        self._terms = [OuterProducts(flat.unsqueeze(1))]
        self.cached_bytes = flat.numel() * flat.dtype.itemsize
        return square_sum(flat)

    def _merged(self) -> GradSample:
        """The terms of one kind as one, so that products between them vanish."""
        kinds: dict[tuple, list[OuterProducts]] = {}
        for term in (t.resolved() for t in self._terms):
            kind = tuple((width_of(f), entries(f).dtype) for f in term.factors)
            kinds.setdefault(kind, []).append(term)
        each = (zip(*(t.factors for t in same)) for same in kinds.values())
        merged = [OuterProducts(*map(joined, columns)) for columns in each]
        return _sum_of(merged, self.shape, self.batch_size)

    def _square_by_blocks(self) -> T:
        first, bound = self._terms[0], workspace()
        if first.device.type == "cpu":
            bound = min(bound, _CPU_CACHE)
        # Those of a shared parameter are not in memory at once but to be cached.
        several = len(self._terms) > 1 or bool(first.onehot)
        count = max(4 if several else 1, self.batch_size * self.numel * 8 // bound)
        step = max(1, math.ceil(self.shape[0] / count))
        parts = self._parts(step, self.batch_size)
        return sum(square_sum(part.materialize()) for _, _, part in parts)

    # -- parts -------------------------------------------------------------------------

    @property
    def _by_parts(self) -> bool:
        """Whether all is done by parts, of which there are none without terms."""
        return not self._terms or any(t.sliced for t in self._terms)

    def _slices(self) -> Iterator[tuple[slice, slice, GradSample]]:
        """Yields parts whose rows fit into the workspace."""
        for term in (t for t in self._terms if t.sliced):
            count = max(1, workspace() // (max(1, term.length) * term.dtype.itemsize))
            step = min(self.shape[0], max(64, count))
            yield from self._parts(step, max(1, count // step))
            break

    def _parts(self, step: int, some: int) -> Iterator[tuple[slice, slice, GradSample]]:
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


def _square_by_groups(term: OuterProducts) -> T:
    """Squared norms ``[B]``, where rows of one sample and one index meet."""
    places, size = places_of(term.onehot)
    squares = places.new_zeros(term.batch_size * size, dtype=term.dtype)
    shape = torch.Size(f.shape[2] for f in term.dense)
    for keys, group in groups_of(term.dense, places):
        each = GradSample(shape, len(group[0]))
        each.add(*group)
        squares[keys] = each.squared_norm().to(squares)
    return squares.view(term.batch_size, size).sum(1)
