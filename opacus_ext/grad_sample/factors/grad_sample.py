"""The per-sample gradients of one parameter: terms, the cost model, and their sum."""

from __future__ import annotations

import enum
import functools
import math
from typing import Any, Iterator, NamedTuple, Sequence

import torch

from opacus_ext.grad_sample.factors.places import (
    groups_of,
    kernel,
    places_of,
    square_of_sums,
)
from opacus_ext.grad_sample.factors.rows import (
    Factor,
    OneHot,
    Squares,
    added,
    cut,
    dtype_of,
    entries,
    inner,
    joined,
    least_of_entries,
    product,
    rows_product,
    sample_norms,
    scaled_norms,
    square_sum,
    steps,
    sums_wide,
    times,
    upcast,
    width_of,
    workspace,
)
from opacus_ext.refused import Refused

T = torch.Tensor
_CPU_CACHE = 2**22  # bytes in a block on CPU
_SMALL = 2**16  # entries that are materialized in one block
_FEW = 2**26  # multiply-adds that are cheaper than sorting rows by index
_FEWER = 2**24  # those that take half of the ops of sorting, and not much longer


class Term:
    """
    Per-sample gradients ``[B, numel]`` of one use of a parameter.

    Attributes:
        dtype: the dtype in which norms are accumulated, float32 or wider
        flat: the gradients, if they are materialized already; else None
        onehot: its one-hot factors
        sums_wide: True if its rows are multiplied as bfloat16, with float32 sums
    """

    batch_size: int
    device: torch.device
    dtype: torch.dtype
    flat: T | None = None
    onehot: Sequence[OneHot] = ()
    sums_wide = False

    def materialize(self, dtype: torch.dtype, out: T | None = None) -> T:
        """Returns the gradients ``[B, numel]``, added in place to ``out`` if given."""
        raise NotImplementedError

    def weighted_sum(self, weights: T, dtype: torch.dtype, out: T | None = None) -> T:
        """Returns ``sum_b weights[b] * gradient[b]``, added to ``out`` if given."""
        raise NotImplementedError

    def squares(self) -> Squares:
        """Returns the squared norms."""
        raise NotImplementedError

    def size(self) -> T:
        """Returns a bound ``[B]`` of the sum of the norms of the rows' products."""
        raise NotImplementedError

    def without(self, samples: T) -> Term:
        """Returns a term with zeros for the samples of a mask ``[B]``."""
        raise NotImplementedError

    def wide(self, samples: T) -> Term:
        """Returns the gradients of some samples, by their indices, in float64."""
        raise NotImplementedError

    def resolved(self) -> OuterProducts:
        """Returns the same gradients as a term whose rows are in memory."""
        return OuterProducts(self.materialize(self.dtype).unsqueeze(1))


class OuterProducts(Term):
    """
    The sum over rows of the outer products of their factors. The rows of a single
    dense factor are summed immediately.

    Args:
        factors: each for one or more axes of the parameter, left to right
    """

    def __init__(self, *factors: Factor):
        self.onehot: list[OneHot] = []
        self.dense: list[T] = []
        if OneHot in map(type, factors):
            self.onehot = [f for f in factors if type(f) is OneHot]
            self.dense = [f for f in factors if type(f) is not OneHot]
            if not self.dense:  # each row counts as one
                index = self.onehot[0].index
                self.dense = [torch.ones(*index.shape, 1, device=index.device)]
                factors = (*factors, *self.dense)
        elif factors[1:]:
            self.dense = list(factors)
        else:
            rows = factors[0] if factors[0].dtype.itemsize > 2 else upcast(factors[0])
            self.flat = rows.squeeze(1) if rows.shape[1] == 1 else rows.sum(1)
            factors = (self.flat.unsqueeze(1),)
            self.dense = list(factors)
        self.factors = factors
        first = self.dense[0]
        self.batch_size, self.length, _ = first.shape
        self.device, self.dtype = first.device, torch.float32
        for f in self.dense:
            if f.dtype != self.dtype:
                self.dtype = dtype_of(self.dtype, f.dtype)
        # Rows of bfloat16 are multiplied as they are, with float32 sums.
        if first.dtype == torch.bfloat16 and len(factors) == len(self.dense) == 2:
            self.sums_wide = sums_wide(*self.dense)

    @property
    def widths(self) -> tuple[int, ...]:
        """The row sizes of the factors."""
        return tuple(
            [f.size if type(f) is OneHot else f.shape[2] for f in self.factors]
        )

    @property
    def kind(self) -> Kind:
        """What the cost of its squares depends on."""
        if self.onehot:
            is_dense = tuple([type(f) is not OneHot for f in self.factors])
        else:
            is_dense = (True,) * len(self.factors)
        return Kind(self.length, self.widths, is_dense, self.dtype)

    def materialize(self, dtype: torch.dtype, out: T | None = None) -> T:
        if self.onehot:
            return self._by_index(dtype, out)
        if self.flat is not None:
            new = self.flat.to(dtype, copy=out is None)
            return new if out is None else out.add_(new.view_as(out))
        if len(self.dense) == 2 and out is None:
            return times(self.dense[0].mT, self.dense[1], dtype).flatten(1)
        left, right, *others = [f.to(dtype) for f in self.dense]
        right = functools.reduce(rows_product, others, right)
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
            left, *others = [f.to(dtype).flatten(0, 1) for f in self.dense]
            right = functools.reduce(rows_product, others)
            count = self.batch_size * size
            table = torch.ops.opacus_ext.sum_by_place(left, right, places, count)
        else:
            rows = self.dense[0].to(dtype).flatten(0, 1)
            into = out if leading else None
            if into is None:
                into = rows.new_zeros(self.batch_size, size, rows.shape[1])
            table = into.view(-1, rows.shape[1]).index_add_(0, places, rows)
            if into is out:
                return out
        if not leading:  # reorders axes (one-hot, dense) as in the parameter
            table = table.view(self.batch_size, *(self.widths[i] for i in order))
            table = table.permute(0, *(1 + order.index(i) for i in range(len(order))))
        new = table.reshape(self.batch_size, product(self.widths))
        return new if out is None else out.add_(new.view_as(out))

    def weighted_sum(self, weights: T, dtype: torch.dtype, out: T | None = None) -> T:
        if weights.dtype == torch.bfloat16 and self.sums_wide:
            return self._wide_sum(weights, out)
        if weights.dtype != dtype:
            weights = weights.to(dtype)
        if self.flat is not None:
            new = weights @ self.flat.to(dtype)
            return new if out is None else out.add_(new.view_as(out))
        scaled = self._scaled(weights[:, None, None], dtype)
        if len(scaled) == 2 and not self.onehot and out is None:
            left, right = scaled
            return left.flatten(0, 1).mT @ right.flatten(0, 1)
        # All rows are those of one sample.
        factors: list[Factor] = []
        for f in scaled:
            if type(f) is OneHot:
                factors.append(OneHot(f.index.reshape(1, -1), f.size))
            else:
                factors.append(f.reshape(1, -1, f.shape[2]))
        return OuterProducts(*factors).materialize(dtype, out)

    def _scaled(self, weights: T, dtype: torch.dtype) -> list[Factor]:
        """Returns the factors, of which the narrowest is multiplied by weights."""
        narrowest = self.dense[0]
        for f in self.dense:  # torch.compile does not support min(key=)
            if f.shape[2] < narrowest.shape[2]:
                narrowest = f
        factors = list(self.factors)
        for i, f in enumerate(factors):
            if type(f) is OneHot:
                continue
            rows = f if f.dtype == dtype else f.to(dtype)
            if f is narrowest:  # contiguous, so that it need not be copied to reshape
                out = None if torch.is_grad_enabled() else rows.new_empty(rows.shape)
                rows, narrowest = torch.mul(rows, weights, out=out), None
            factors[i] = rows
        return factors

    def _wide_sum(self, weights: T, out: T | None) -> T:
        """Sums without rounding: two bfloat16 hold the 16 bits of a weighted number."""
        left, right = self.dense
        swap = right.shape[2] < left.shape[2]
        narrow, wide = (right, left) if swap else (left, right)
        rows = narrow.float() * weights[:, None, None].float()
        high = rows.bfloat16()
        whole, sums = wide.flatten(0, 1)[None], []
        for part in (high, (rows - high).bfloat16()):
            part = part.flatten(0, 1)[None]
            a, b = (whole, part) if swap else (part, whole)
            sums.append(times(a.mT, b, torch.float32)[0])
        total = sums[0].add_(sums[1])
        return total if out is None else out.add_(total.view_as(out))

    def without(self, samples: T) -> OuterProducts:
        where, factors = samples[:, None, None], list(self.factors)
        for i, f in enumerate(factors):
            factors[i] = f if isinstance(f, OneHot) else f.masked_fill(where, 0)
        return OuterProducts(*factors)

    def resolved(self) -> OuterProducts:
        return self

    def wide(self, samples: T) -> OuterProducts:
        factors = [cut(f, samples.to(self.device)) for f in self.factors]
        for i, f in enumerate(factors):
            factors[i] = f if isinstance(f, OneHot) else f.double()
        return OuterProducts(*factors)

    def squares(self) -> Squares:
        return self.squares_by(_way_of(self.kind, self.batch_size, workspace()))

    def squares_by(self, way: Way) -> Squares:
        """Returns the squared norms, computed by way of rows, segments or Grams."""
        if way is Way.ROWS:
            norms = [sample_norms(f[:, 0].to(self.dtype)) for f in self.dense]
            return Squares(functools.reduce(torch.mul, norms).square_())
        if way is Way.SEGMENTS:
            rows = self.dense[0].to(self.dtype).flatten(0, 1)
            places, _ = places_of(self.onehot)
            squares = square_of_sums(rows, places, self.batch_size)
            return Squares(squares, least_of_entries(self.size(), self.dtype))
        return inner(self.factors, None, self.dtype)

    def size(self) -> T:
        norms = [sample_norms(f.to(self.dtype)) for f in self.dense]
        if len(norms) == 1:
            norms[0] = norms[0] * math.sqrt(self.length)
        return functools.reduce(torch.mul, norms)

    def part(self, shape: torch.Size, rows: slice) -> OuterProducts:
        """Returns the gradients of some rows of the parameter, of this shape."""
        some = list(self.factors)
        first = some[0]
        if self.widths[0] != shape[0]:  # the factor covers several axes
            whole = self.materialize(self.dtype)
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


# -- cost model ------------------------------------------------------------------------
#
# Costs are multiply-adds a sample. Constants stand for memory traffic, timed on CPU: 4
# for an entry in cache, 60 for one that is written and read twice. Results do not
# depend on them. What is chosen depends on sizes, and is decided once for equal ones.


class Way(enum.Enum):
    """A way to compute squared norms."""

    ROWS = "rows"  # one row a sample: the product of the norms of its factors
    SEGMENTS = "segments"  # sums of rows with the same index
    GRAMS = "grams"  # products of Gram matrices, over all pairs of terms
    GROUPS = "groups"  # groups of rows with the same index
    BLOCKS = "blocks"  # gradients materialized block by block
    CACHE = "cache"  # gradients materialized and kept for the clipped sum


class Kind(NamedTuple):
    """
    What the cost of a term depends on.

    Attributes:
        length: number of rows of a sample
        widths: size of a row of each factor
        is_dense: for each factor, False if it is one-hot
        dtype: in which norms are accumulated
    """

    length: int
    widths: tuple[int, ...]
    is_dense: tuple[bool, ...]
    dtype: torch.dtype

    @property
    def dense_widths(self) -> list[int]:
        """The sizes of rows of the dense factors."""
        return [n for n, dense in zip(self.widths, self.is_dense) if dense]

    @property
    def has_onehot(self) -> bool:
        """True if a factor is one-hot."""
        return not all(self.is_dense)

    @property
    def has_segments(self) -> bool:
        """True if rows are grouped by index faster than Gram matrices are made."""
        several = len(self.dense_widths) > 1
        return self.has_onehot and not several and self.length > 32


def _has_few_rows(kind: Kind, batch_size: int, bound: int, most: int) -> bool:
    """Returns True if Gram matrices of all rows take few multiply-adds."""
    width = 64 + sum(kind.dense_widths)  # 64: passes over the product
    size = batch_size * kind.length**2
    return size * width <= most and 3 * size * kind.dtype.itemsize <= bound


def _way_of(kind: Kind, batch_size: int, bound: int) -> Way:
    """Chooses between the ways of a term by itself."""
    if kind.length == 1:
        return Way.ROWS
    if kind.has_segments and not _has_few_rows(kind, batch_size, bound, _FEWER):
        return Way.SEGMENTS
    return Way.GRAMS


def _cost_of_grams(kinds: Sequence[Kind]) -> float:
    """Returns the cost of squared norms by Gram matrices, over all pairs of terms."""
    if len({kind.widths for kind in kinds}) > 1:
        return math.inf
    cost = 0.0
    for i, first in enumerate(kinds):
        width = sum(first.dense_widths)
        if first.has_segments:
            cost += first.length * (16 + width)
        else:  # one triangle and the diagonal blocks
            cost += 0.65 * first.length**2 * (8 + width)
        for second in kinds[:i]:
            are_dense = zip(first.widths, first.is_dense, second.is_dense)
            width = sum([n for n, dense, other in are_dense if dense and other])
            cost += first.length * second.length * (8 * len(first.widths) + width)
    return cost


def _cost_of_blocks(kinds: Sequence[Kind]) -> float:
    """Returns the cost of squared norms by materializing blocks."""
    numel = product(kinds[0].widths)
    cost = 4.0 * numel
    for kind in kinds:
        if kind.has_onehot:
            cost += 2 * numel + kind.length * product(kind.dense_widths)
        else:
            cost += kind.length * numel
    return cost


def _is_worth_caching(
    kinds: Sequence[Kind], batch_size: int, cache: int, cost: float
) -> bool:
    """
    Returns True if gradients are to be materialized for the norm and kept for the
    clipped sum, with ``cache`` bytes left, and the cost of the cheapest other way.
    """
    several = [kind for kind in kinds if len(kind.dense_widths) > 1]
    if not several or any([kind.has_onehot for kind in several]):
        return False
    numel = product(kinds[0].widths)
    dtype = dtype_of(*[kind.dtype for kind in kinds])
    return batch_size * numel * dtype.itemsize <= cache and 60 * numel <= cost


@functools.lru_cache(maxsize=2**14)
def _choose(
    kinds: tuple[Kind, ...], batch_size: int, cache: int, bound: int
) -> tuple[Way, tuple[Way, ...]]:
    """
    Chooses the way for a sum of terms, and those of its terms where it is by Grams.
    ``cache`` and ``bound`` are the bytes that gradients may occupy until the clipped
    sum, and temporarily.
    """
    by_term = tuple([_way_of(kind, batch_size, bound) for kind in kinds])
    first = kinds[0]
    if len(kinds) == 1 and first.length == 1:
        return Way.GRAMS, by_term
    grams, blocks = _cost_of_grams(kinds), _cost_of_blocks(kinds)
    if _is_worth_caching(kinds, batch_size, cache, min(grams, blocks)):
        return Way.CACHE, by_term
    if len(kinds) == 1 and first.has_onehot and len(first.dense_widths) > 1:
        if not _has_few_rows(first, batch_size, bound, _FEW):
            return Way.GROUPS, by_term
    return (Way.BLOCKS if grams > blocks else Way.GRAMS), by_term


# -- sum of terms ----------------------------------------------------------------------


class GradSample:
    """
    The per-sample gradients of one parameter, summed over all its uses in a step. Its
    products are taken in :func:`~rows.full_precision` by those who ask for them.

    Args:
        shape: shape of the parameter
        batch_size: number of samples ``B``
        rows: materialized gradients ``[B, numel]``, if any

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
        self.cached_bytes = 0  # size of cached materialized gradients
        self.mask: T | None = None  # samples that count ``[B]``, in compiled code
        self._terms: list[Term] = []
        if rows is not None:
            self._terms.append(OuterProducts(rows.unsqueeze(1)))

    def add(self, *factors: Factor | Term) -> None:
        """
        Adds one use of the parameter.

        Args:
            factors: one for each axis of the parameter: dense ``[B, T, width]`` or
                :class:`OneHot` with index ``[B, T]``; or one :class:`Term`. Adjacent
                axes may share a factor: ``[B, 1, numel]`` is a materialized gradient

        Raises:
            Refused: if the factors do not fit the parameter or the batch
        """
        self.cached_bytes = 0
        if factors and isinstance(factors[0], Term):
            term = factors[0]
        else:
            if not self._fits(factors):
                self._refuse(factors)
            term = OuterProducts(*factors)
        if not self._terms:
            if self.batch_size:
                self._terms.append(term)
            return
        last = self._terms[-1].flat
        if last is not None and term.flat is not None:
            self._terms[-1] = OuterProducts((last + term.flat).unsqueeze(1))
        else:
            self._terms.append(term)

    def _fits(self, factors: Sequence[Factor]) -> bool:
        numel, rows = 1, None
        for f in factors:
            shape = f.shape if type(f) is not OneHot else (*f.index.shape, f.size)
            try:
                size, length, width = shape
            except ValueError:
                return False
            if rows is None:
                rows = size, length
            if rows != (size, length):
                return False
            numel *= width
        return rows is not None and rows[0] == self.batch_size and numel == self.numel

    def _refuse(self, factors: Sequence[Factor]) -> None:
        shapes = [tuple(entries(f).shape) for f in factors]
        sizes = [f.size for f in factors if isinstance(f, OneHot)]
        raise Refused(
            f"Factors of shapes {shapes}{f', one-hot sizes {sizes}' * bool(sizes)} "
            "do not describe the gradient of a parameter of shape "
            f"{tuple(self.shape)} for a batch of {self.batch_size}:",
            remedy="each must be [B, T, width], or an opacus_ext.OneHot with index "
            "[B, T], one for each axis.",
        )

    def flat(self) -> T | None:
        """Returns ``[B, numel]`` if the gradients are materialized, else None."""
        return self._terms[0].flat if len(self._terms) == 1 else None

    def materialize(self) -> T:
        """Returns the per-sample gradients ``[B, *shape]``."""
        if not self._terms:
            return self._zeros(self.batch_size, *self.shape)
        first, *others = self._in_order()
        dtype = self._dtype if others else first.dtype
        out = first.materialize(dtype)
        for term in others:
            out = term.materialize(dtype, out)
        return out.reshape(self.batch_size, *self.shape)

    def weighted_sum(self, weights: T) -> T:
        """
        Returns ``sum_b weights[b] * G[b]``, ``[*shape]``, without per-sample gradients;
        ``weights [B]`` are for example clipping factors.
        """
        if not self._terms:
            return self._zeros(*self.shape)
        first, *others = self._in_order()
        dtype = self._dtype if others else first.dtype
        total = first.weighted_sum(weights, dtype)
        for term in others:
            total = term.weighted_sum(weights, dtype, total)
        return total.reshape(self.shape)

    @property
    def sums_wide(self) -> bool:
        """True if rows are multiplied as bfloat16: weights should be bfloat16, too."""
        for term in self._terms:
            if term.sums_wide:
                return True
        return False

    def squared_norm(self, cache: int = 0) -> T:
        """
        Returns squared norms ``[B]``, in float32 or wider; see :meth:`squares`. Those
        that rounding may have changed are computed anew, by :meth:`exact_norms`.

        Args:
            cache: bytes that materialized gradients may occupy until
                :meth:`weighted_sum`; ``cached_bytes`` is the number used
        """
        values, least = self.squares(cache)
        if least is not None:
            (at,) = (values < least).nonzero(as_tuple=True)
            if len(at):
                values[at] = self.wide(at).exact_norms().square().to(values)
        return values

    def squares(self, cache: int = 0) -> Squares:
        """
        Returns squared norms, in float32 or wider. It chooses the cheapest way under
        :func:`workspace`: Gram matrices, sums over segments of equal index, or
        per-sample gradients materialized block by block. See :meth:`squared_norm`.
        """
        if not self._terms:
            return Squares(self._zeros(self.batch_size))
        if not all([isinstance(t, OuterProducts) for t in self._terms]):
            if self.batch_size * self.numel * self._dtype.itemsize <= cache:
                return self._cache(self)
            if len(self._terms) == 1:
                return self._terms[0].squares()
        merged = self._merged() if len(self._terms) > 1 else self
        terms: Sequence[OuterProducts] = merged._terms
        kinds = tuple([t.kind for t in terms])
        choose: Any = _choose
        if torch.compiler.is_compiling():  # Dynamo would warn of a cache
            choose = _choose.__wrapped__
        way, by_term = choose(kinds, self.batch_size, cache, workspace())
        if way is Way.CACHE:
            return self._cache(merged)
        if way is Way.GROUPS:
            return _square_by_groups(terms[0])
        if way is Way.BLOCKS:
            size = functools.reduce(torch.add, [t.size() for t in terms])
            values = sum(square_sum(x.materialize()) for x in merged._blocks())
            return Squares(values, least_of_entries(size, self._dtype))
        squares = [t.squares_by(way) for t, way in zip(terms, by_term)]
        for i, first in enumerate(terms):
            for second in terms[:i]:
                both = inner(first.factors, second.factors, self._dtype)
                squares += [both, both]  # first with second, and the reverse
        return added(squares)

    def exact_norms(self) -> T:
        """Returns the norms ``[B]`` of materialized gradients, however large."""
        norms = self._zeros(self.batch_size)
        if self._terms:
            terms = [t.resolved() for t in self._terms]
            for block in _sum_of(terms, self.shape, self.batch_size)._blocks():
                of_block = scaled_norms(block.materialize().flatten(1))
                norms = torch.hypot(norms, of_block)
        return norms

    def drop(self, samples: T) -> None:
        """Sets the gradients of the samples of a mask ``[B]`` to zero."""
        self._terms = [t.without(samples) for t in self._terms]

    def wide(self, samples: T) -> GradSample:
        """Returns the gradients of some samples, by their indices, in float64."""
        terms = [t.wide(samples) for t in self._terms]
        return _sum_of(terms, self.shape, len(samples))

    def clear(self) -> None:
        """Drops the gradients."""
        self._terms, self.cached_bytes = [], 0

    @property
    def _dtype(self) -> torch.dtype:
        if len(self._terms) == 1:
            return self._terms[0].dtype
        return dtype_of(*[t.dtype for t in self._terms])

    def _zeros(self, *shape: int) -> T:
        device = self._terms[0].device if self._terms else None
        return torch.zeros(shape, dtype=self._dtype, device=device)

    def _in_order(self) -> Sequence[Term]:
        """Returns terms, one-hot ones last: these only touch some entries."""
        if not self._terms[1:]:
            return self._terms
        return sorted(self._terms, key=lambda t: len(t.onehot))

    def _cache(self, same: GradSample) -> Squares:
        """Replaces the terms by materialized gradients; returns squared norms."""
        flat = same.materialize().flatten(1)
        self._terms = [OuterProducts(flat.unsqueeze(1))]
        self.cached_bytes = flat.numel() * flat.dtype.itemsize
        if self.mask is not None:
            flat = flat * self.mask.to(flat.device)[:, None]  # see Collector
        return Squares(square_sum(flat))

    def _merged(self) -> GradSample:
        """Concatenates terms of one kind, which leaves fewer pairs of terms."""
        kinds: dict[tuple, list[OuterProducts]] = {}
        for term in (t.resolved() for t in self._terms):
            kind = tuple((width_of(f), entries(f).dtype) for f in term.factors)
            kinds.setdefault(kind, []).append(term)
        each = (zip(*(t.factors for t in same)) for same in kinds.values())
        merged = [OuterProducts(*map(joined, columns)) for columns in each]
        return _sum_of(merged, self.shape, self.batch_size)

    def _blocks(self) -> Iterator[GradSample]:
        """Yields some rows of the parameter, which are cheap to materialize."""
        first, bound = self._terms[0], workspace()
        if first.device.type == "cpu":
            bound = min(bound, _CPU_CACHE)
        # Gradients of a shared parameter are materialized whole only for the cache.
        several = len(self._terms) > 1 or bool(first.onehot)
        size = self.batch_size * self.numel
        count = max(4 if several and size > _SMALL else 1, size * 8 // bound)
        step = max(1, math.ceil(self.shape[0] / count))
        for start, stop in steps(self.shape[0], step):
            shape = torch.Size((stop - start, *self.shape[1:]))
            terms: Any = self._terms  # each is resolved
            parts = [t.part(self.shape, slice(start, stop)) for t in terms]
            yield _sum_of(parts, shape, self.batch_size)


def _sum_of(terms: Sequence[Term], shape: torch.Size, size: int) -> GradSample:
    found = GradSample(shape, size)
    found._terms = list(terms)
    return found


def _square_by_groups(term: OuterProducts) -> Squares:
    """Returns squared norms from groups of rows with the same place."""
    places, size = places_of(term.onehot)
    dense = [f.flatten(0, 1) for f in term.dense]
    count = term.batch_size * size
    both = torch.ops.opacus_ext.square_by_place(dense, places, count)
    return Squares(*both.view(2, term.batch_size, size).sum(2))


@kernel("square_by_place")
def _square_by_place(dense: Sequence[T], places: T, count: int) -> T:
    """Returns the squared norm of each place, and its least, see places.py."""
    shape = torch.Size(f.shape[1] for f in dense)
    found = places.new_zeros(2, count, dtype=dtype_of(*(f.dtype for f in dense)))
    for keys, group in groups_of(dense, places):
        each = GradSample(shape, len(group[0]))
        each.add(*group)
        for into, x in zip(found, each.squares()):
            if x is not None:
                into[keys] = x.to(into)
    return found
