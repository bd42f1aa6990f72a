"""The per-sample gradients of one parameter: terms, the cost model, and their sum."""

from __future__ import annotations

import enum
import functools
import math
from typing import Any, Iterator, NamedTuple, Sequence

import torch

from opacus_ext.grad_sample.factors.places import (
    add_by_index,
    groups_of,
    index_of,
    is_crowded,
    kernel,
    places_of,
    square_of_sums,
)
from opacus_ext.grad_sample.factors.rows import (
    Factor,
    OneHot,
    Scale,
    Squares,
    added,
    column_blocks,
    common_dtype,
    cut,
    dtype_of,
    entries,
    inner,
    inverse_of,
    inverses_of,
    joined,
    least_of_entries,
    may_write_out,
    product,
    rows_product,
    sample_norms,
    scaled_norms,
    square_sum,
    sums_wide,
    times,
    weighted_halves,
    wide_product,
    width_of,
    workspace,
)
from opacus_ext.refused import Refused, check_argument

T = torch.Tensor
# A block of this many bytes stays in the cache of a CPU.
_CPU_CACHE = 2**22
# Gradients of at most this many entries are materialized in one block.
_SMALL = 2**16
# So many multiply-adds are cheaper than sorting rows by their index.
_FEW = 2**26
# So many take half of the ops of sorting, and hardly more time.
_FEWER = 2**24


def add_into(total: T | None, gradients: T) -> T:
    """Returns gradients, added in place to ``total`` if given."""
    if total is None:
        return gradients
    return total.add_(gradients.reshape(total.shape))


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

    def materialize(self, dtype: torch.dtype, total: T | None = None) -> T:
        """Returns the gradients ``[B, numel]``, added into ``total`` if given."""
        raise NotImplementedError

    def weighted_sum(
        self,
        weights: T,
        dtype: torch.dtype,
        total: T | None = None,
    ) -> T:
        """Returns ``sum_b weights[b] * gradient[b]``, added to ``total`` if given."""
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

    def divided(self, scale: Scale) -> Term:
        """Returns the gradients divided by the scale of the parameter."""
        raise NotImplementedError

    def tensors(self) -> Sequence[T]:
        """Returns the tensors that it keeps in memory."""
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
        dense: Any = factors
        if OneHot in map(type, factors):
            self.onehot = [factor for factor in factors if type(factor) is OneHot]
            dense = [factor for factor in factors if type(factor) is not OneHot]
            if not dense:
                # A dense factor of width one counts each row once.
                index = self.onehot[0].index
                ones = torch.ones(*index.shape, 1, device=index.device)
                dense = (ones,)
                factors = (*factors, ones)
        elif not factors[1:]:
            (rows,) = dense
            # Half precision is summed in float32, without a copy of all rows.
            dtype = torch.float32 if rows.dtype.itemsize <= 2 else rows.dtype
            if rows.shape[1] == 1:
                self.flat = rows.squeeze(1).to(dtype)
            else:
                self.flat = rows.sum(1, dtype=dtype)
            dense = factors = (self.flat.unsqueeze(1),)
        self.factors = factors
        self.dense: list[T] = list(dense)
        first = self.dense[0]
        self.batch_size, self.length, _ = first.shape
        self.device = first.device
        self.dtype = torch.float32
        for rows in self.dense:
            if rows.dtype != self.dtype:
                self.dtype = dtype_of(self.dtype, rows.dtype)
        # Rows of bfloat16 are multiplied as they are, with float32 sums.
        if first.dtype == torch.bfloat16 and len(factors) == len(self.dense) == 2:
            self.sums_wide = sums_wide(*self.dense)

    def tensors(self) -> Sequence[T]:
        return [entries(factor) for factor in self.factors]

    @property
    def widths(self) -> tuple[int, ...]:
        """The row sizes of the factors."""
        # No call of width_of(): this runs for each parameter of each step.
        return tuple(
            [
                factor.size if type(factor) is OneHot else factor.shape[2]
                for factor in self.factors
            ]
        )

    @property
    def kind(self) -> Kind:
        """What the cost of its squares depends on."""
        is_dense = (True,) * len(self.factors)
        if self.onehot:
            is_dense = tuple([type(factor) is not OneHot for factor in self.factors])
        traffic = _ON_CPU if self.device.type == "cpu" else _ON_GPU
        if sums_wide(*self.dense):
            traffic = _OF_BFLOAT16
        return Kind(self.length, self.widths, is_dense, self.dtype, traffic)

    def materialize(self, dtype: torch.dtype, total: T | None = None) -> T:
        if self.onehot:
            return self._by_index(dtype, total)
        if self.flat is not None:
            # The caller may write to the result, but not to the factor.
            return add_into(total, self.flat.to(dtype, copy=total is None))
        if len(self.dense) == 2 and total is None:
            left, right = self.dense
            return times(left.mT, right, dtype).flatten(1)
        left, right, *others = [rows.to(dtype) for rows in self.dense]
        right = functools.reduce(rows_product, others, right)
        if total is None:
            return torch.bmm(left.mT, right).flatten(1)
        matrices = total.view(self.batch_size, left.shape[2], -1)
        matrices.baddbmm_(left.mT, right)
        return total

    def _by_index(self, dtype: torch.dtype, total: T | None) -> T:
        """Sums the rows of each index, in a table whose first axes are one-hot."""
        index, size = self.onehot[0]
        if self.onehot[1:]:
            index, size = index_of(self.onehot)
        is_dense = [False, *[type(factor) is not OneHot for factor in self.factors]]
        axes = list(range(len(is_dense)))
        order = sorted(axes, key=is_dense.__getitem__)
        left, *others = [rows.to(dtype) for rows in self.dense]
        if others:
            places, _ = places_of(self.onehot)
            right = functools.reduce(rows_product, others).flatten(0, 1)
            count = self.batch_size * size
            left = left.flatten(0, 1)
            table = torch.ops.opacus_ext.sum_by_place(left, right, places, count)
        else:
            shape = self.batch_size, size, left.shape[2]
            if total is not None and order == axes:
                add_by_index(total.view(shape), index, left)
                return total
            table = add_by_index(left.new_zeros(shape), index, left)
        # The axes are put into the order that they have in the parameter.
        sizes = (self.batch_size, *self.widths)
        table = table.view([sizes[axis] for axis in order])
        return add_into(total, table.movedim(axes, order).flatten(1))

    def weighted_sum(
        self,
        weights: T,
        dtype: torch.dtype,
        total: T | None = None,
    ) -> T:
        if weights.dtype == torch.bfloat16 and self.sums_wide:
            return self._wide_sum(weights, total)
        if weights.dtype != dtype:
            weights = weights.to(dtype)
        if self.flat is not None:
            return add_into(total, weights @ self.flat.to(dtype))
        scaled = self._scaled(weights[:, None, None], dtype)
        if len(scaled) == 2 and not self.onehot and total is None:
            left, right = scaled
            return left.flatten(0, 1).mT @ right.flatten(0, 1)
        # The rows of all samples are summed as if they were those of one sample.
        for position, factor in enumerate(scaled):
            if type(factor) is OneHot:
                index = factor.index.reshape(1, -1)
                scaled[position] = OneHot(index, factor.size)
            else:
                scaled[position] = factor.reshape(1, -1, factor.shape[2])
        return OuterProducts(*scaled).materialize(dtype, total)

    def _scaled(self, weights: T, dtype: torch.dtype) -> list[Any]:
        """Returns the factors, of which the narrowest is multiplied by weights."""
        narrowest: Any = self.dense[0]
        # torch.compile does not support min() with a key.
        for rows in self.dense:
            if rows.shape[2] < narrowest.shape[2]:
                narrowest = rows
        factors: list[Any] = list(self.factors)
        for position, factor in enumerate(factors):
            if type(factor) is OneHot:
                continue
            rows = factor
            if rows.dtype != dtype:
                rows = rows.to(dtype)
            if factor is narrowest:
                # The product is made contiguous, so that a reshape need not copy it.
                out = None
                if not torch.is_grad_enabled():
                    out = rows.new_empty(rows.shape)
                rows = torch.mul(rows, weights, out=out)
                # The same tensor may be two factors; weights multiply only one.
                narrowest = None
            factors[position] = rows
        return factors

    def _wide_sum(self, weights: T, total: T | None) -> T:
        """Sums without rounding: two bfloat16 hold the 16 bits of a weighted number."""
        left, right = self.dense
        narrow, wide = sorted(self.dense, key=width_of)
        halves = weighted_halves(narrow, weights).flatten(0, 1)
        sums = left.new_empty(left.shape[2], right.shape[2], dtype=torch.float32)
        # One product takes both halves, which stand beside each other in its result.
        flat, made = wide.flatten(0, 1), 4 * halves.shape[1]
        for columns, (rows,) in column_blocks(flat, made=made):
            size = columns.stop - columns.start
            if narrow is right:
                upper, excess = wide_product(rows, halves)[:size].chunk(2, dim=1)
                target = sums[columns]
            else:
                upper, excess = wide_product(halves, rows)[:, :size].chunk(2, dim=0)
                target = sums[:, columns]
            if may_write_out():
                torch.sub(upper, excess, out=target)
            else:
                target.copy_(upper - excess)
        return add_into(total, sums)

    def without(self, samples: T) -> OuterProducts:
        mask = samples[:, None, None]
        factors = list(self.factors)
        for position, factor in enumerate(factors):
            if not isinstance(factor, OneHot):
                factors[position] = factor.masked_fill(mask, 0)
        return OuterProducts(*factors)

    def resolved(self) -> OuterProducts:
        return self

    def divided(self, scale: Scale) -> OuterProducts:
        inverses = inverses_of(scale, self.widths)
        if inverses is None:
            rows = self.materialize(self.dtype) * inverse_of(scale)
            return OuterProducts(rows.unsqueeze(1))
        factors: list[Any] = []
        by_index: list[T] = []  # what divides the rows of one-hot factors [B, T]
        for factor, inverse in zip(self.factors, inverses):
            if type(factor) is OneHot:
                by_index.append(inverse[factor.index])
                factors.append(factor)
            else:
                factors.append(factor * inverse)
        if by_index:
            rows_of = functools.reduce(torch.mul, by_index).unsqueeze(2)
            is_dense = [type(factor) is not OneHot for factor in factors]
            first = is_dense.index(True)
            factors[first] = factors[first] * rows_of
        return OuterProducts(*factors)

    def wide(self, samples: T) -> OuterProducts:
        factors = list(self.factors)
        for position, factor in enumerate(factors):
            selected = cut(factor, samples.to(self.device))
            if not isinstance(selected, OneHot):
                selected = selected.double()
            factors[position] = selected
        return OuterProducts(*factors)

    def squares(self) -> Squares:
        method = _method_of(self.kind, self.batch_size, workspace())
        return self.squares_by(method)

    def squares_by(self, method: Method) -> Squares:
        """Returns the squared norms, computed by rows, segments or Gram matrices."""
        if method is Method.ROWS:
            # Of a single product, the bound is the norm.
            return Squares(self.size().square_())
        if method is Method.SEGMENTS:
            if is_crowded(*index_of(self.onehot)):
                # The table is small, then.
                squares = square_sum(self.materialize(self.dtype))
            else:
                rows = self.dense[0].to(self.dtype).flatten(0, 1)
                places, _ = places_of(self.onehot)
                squares = square_of_sums(rows, places, self.batch_size)
            least = least_of_entries(self.size(), self.dtype)
            return Squares(squares, least)
        return inner(self.factors, None, self.dtype)

    def size(self) -> T:
        norms = [sample_norms(rows, self.dtype) for rows in self.dense]
        if len(norms) == 1 and self.length > 1:
            # By Cauchy-Schwarz: the sum of T norms is at most sqrt(T) times the root
            # of their squares' sum.
            norms[0] = norms[0] * math.sqrt(self.length)
        return functools.reduce(torch.mul, norms)

    def part(self, shape: torch.Size, rows: slice) -> OuterProducts:
        """Returns the gradients of some rows of the parameter, of this shape."""
        # Not in one assignment: Dynamo of torch 2.11 makes the rest a tuple.
        first, others = self.factors[0], list(self.factors[1:])
        if self.widths[0] != shape[0]:
            # The first factor covers several axes of the parameter.
            gradients = self.materialize(self.dtype).view(-1, 1, *shape)
            return OuterProducts(gradients[:, :, rows].flatten(2))
        if not isinstance(first, OneHot):
            return OuterProducts(first[:, :, rows], *others)
        index = first.index - rows.start
        size = rows.stop - rows.start
        is_inside = (index >= 0) & (index < size)
        # Rows that are outside are spread, as a GPU adds those of one index in turn.
        index = index % size
        # Zeros in one dense factor leave out the rows of other indices.
        for position, factor in enumerate(others):
            if not isinstance(factor, OneHot):
                others[position] = torch.where(is_inside.unsqueeze(-1), factor, 0)
                break
        return OuterProducts(OneHot(index, size), *others)


# -- cost model ------------------------------------------------------------------------
#
# Costs are multiply-adds a sample. Results do not depend on them. A choice depends only
# on sizes, and is made once for equal ones.


class Traffic(NamedTuple):
    """
    Memory traffic, in the multiply-adds that take as long.

    Attributes:
        block: an entry of a gradient that is written and read once
        kept: an entry that is written and read twice, for the norm and for the sum
        gram: an entry of a Gram matrix
        factor: an entry of a row, each time that it is read
        halves: products that the weighted sum takes beyond one
        launches: what the ops take to start, of all samples, if nothing is kept
        share: the share of the cache that one parameter may take
    """

    block: float
    kept: float
    gram: float
    factor: float = 0
    halves: int = 0
    launches: float = 0
    share: float = 1


# Timed: blocks stay in cache.
_ON_CPU = Traffic(block=4, kept=60, gram=8)
# By the data sheet of an H100: 10 multiply-adds of float32 a byte, 150 of bfloat16, and
# ten launches of 2 us. Many small gradients in the cache save more than a large one.
_ON_GPU = Traffic(80, 120, 280, 40, launches=7e8, share=0.25)
_OF_BFLOAT16 = Traffic(1200, 1800, 4000, 300, halves=1, launches=1e10, share=0.25)


class Method(enum.Enum):
    """A method to compute squared norms."""

    #: The product of the norms of the factors, of which each sample has one row.
    ROWS = "rows"
    #: Sums of the rows with the same index.
    SEGMENTS = "segments"
    #: Products of Gram matrices, over all pairs of terms.
    GRAMS = "grams"
    #: Groups of rows with the same index, each with a method of its own.
    GROUPS = "groups"
    #: Gradients, materialized block by block.
    BLOCKS = "blocks"
    #: Blocks of the dense terms, and products of Gram matrices with the others.
    APART = "apart"
    #: Gradients, materialized and kept for the clipped sum.
    CACHE = "cache"


class Kind(NamedTuple):
    """
    What the cost of a term depends on.

    Attributes:
        length: number of rows of a sample
        widths: size of a row of each factor
        is_dense: for each factor, False if it is one-hot
        dtype: in which norms are accumulated
        traffic: the cost of its entries
    """

    length: int
    widths: tuple[int, ...]
    is_dense: tuple[bool, ...]
    dtype: torch.dtype
    traffic: Traffic

    @property
    def dense_widths(self) -> list[int]:
        """The sizes of rows of the dense factors."""
        return [width for width, dense in zip(self.widths, self.is_dense) if dense]

    @property
    def has_onehot(self) -> bool:
        """True if a factor is one-hot."""
        return not all(self.is_dense)

    @property
    def has_segments(self) -> bool:
        """True if rows are grouped by index faster than Gram matrices are made."""
        several = len(self.dense_widths) > 1
        return self.has_onehot and not several and self.length > 32


def _has_few_rows(
    kind: Kind,
    batch_size: int,
    bound: int,
    most: int,
) -> bool:
    """Returns True if Gram matrices of all rows take few multiply-adds."""
    # 64 stands for the passes over the product.
    width = 64 + sum(kind.dense_widths)
    size = batch_size * kind.length**2
    # A product of Gram matrices has three of them in memory at a time.
    return size * width <= most and 3 * size * kind.dtype.itemsize <= bound


def _method_of(kind: Kind, batch_size: int, bound: int) -> Method:
    """Chooses the method for a term by itself."""
    if kind.length == 1:
        return Method.ROWS
    if kind.has_segments and not _has_few_rows(kind, batch_size, bound, _FEWER):
        return Method.SEGMENTS
    return Method.GRAMS


def _cost_of_grams(kinds: Sequence[Kind]) -> float:
    """Returns the cost of squared norms by Gram matrices, over all pairs of terms."""
    if len({kind.widths for kind in kinds}) > 1:
        return math.inf
    cost, traffic = 0.0, kinds[0].traffic
    for number, first in enumerate(kinds):
        width = sum(first.dense_widths)
        if first.has_segments:
            cost += first.length * (16 + width)
        else:
            # The triangle takes half of all products, the blocks on its diagonal more.
            cost += 0.65 * first.length**2 * (traffic.gram + width)
            cost += first.length * width * traffic.factor
        for second in kinds[:number]:
            cost += _cost_of_pair(first, second, traffic)
    return cost


def _cost_of_pair(first: Kind, second: Kind, traffic: Traffic) -> float:
    """Returns the cost of the inner products of two terms by Gram matrices."""
    cost = traffic.gram * len(first.widths)
    for size, dense, other in zip(first.widths, first.is_dense, second.is_dense):
        if dense and other:
            cost += size
    return first.length * second.length * cost


def _cost_of_blocks(kinds: Sequence[Kind]) -> float:
    """Returns the cost of squared norms by materializing blocks."""
    numel = product(kinds[0].widths)
    cost = kinds[0].traffic.block * numel
    for kind in kinds:
        if kind.has_onehot:
            cost += 2 * numel + kind.length * product(kind.dense_widths)
        else:
            cost += kind.length * numel
    return cost


def _is_worth_caching(
    kinds: Sequence[Kind],
    batch_size: int,
    cache: int,
    bound: int,
    cost: float,
) -> bool:
    """
    Returns True if gradients are to be materialized for the norm and kept for the
    clipped sum, with ``cache`` of ``bound`` bytes left, and the cost of the cheapest
    other method.
    """
    numel, traffic = product(kinds[0].widths), kinds[0].traffic
    cost += traffic.launches / max(1, batch_size)
    has_products = False
    for kind in kinds:
        widths = kind.dense_widths
        if len(widths) > 1:
            has_products = True
            if kind.has_onehot:
                return False
        # For the sum the narrowest factor is read, multiplied by weights, and read.
        cost += kind.length * (sum(widths) + 6 * min(widths)) * traffic.factor
        cost += kind.length * product(widths) * traffic.halves
    num_bytes = batch_size * numel * common_dtype(kinds).itemsize
    return (
        has_products
        and num_bytes <= min(cache, traffic.share * bound)
        and traffic.kept * numel <= cost
    )


def _can_be_apart(kinds: Sequence[Kind]) -> bool:
    """Returns True for tables that are looked up and multiplied, as tied heads are."""
    has_dense = has_onehot = False
    for kind in kinds:
        has_several = len(kind.dense_widths) > 1
        # Groups have both, and materialized gradients neither.
        if kind.has_onehot == has_several:
            return False
        has_onehot |= kind.has_onehot
        has_dense |= has_several
    return has_dense and has_onehot and len({kind.widths for kind in kinds}) == 1


def _saves_apart(kinds: Sequence[Kind], batch_size: int, bound: int) -> bool:
    """Returns True if Gram matrices take less than one-hot terms in each block."""
    numel, traffic = product(kinds[0].widths), kinds[0].traffic
    count = batch_size * numel * 8 / bound
    by_block = by_pair = 0.0
    for first in kinds:
        if not first.has_onehot:
            continue
        # A block reads and writes all rows, four times.
        rows = 4 * first.length * sum(first.dense_widths)
        by_block += rows * traffic.factor * count
        for second in kinds:
            if second is not first:
                by_pair += _cost_of_pair(first, second, traffic)
    return by_pair < by_block


@functools.lru_cache(maxsize=2**14)
def _choose(
    kinds: tuple[Kind, ...],
    batch_size: int,
    cache: int,
    bound: int,
) -> tuple[Method, tuple[Method, ...]]:
    """
    Chooses the method for a sum of terms, and those of its terms where it is by Grams.
    ``cache`` and ``bound`` are the bytes that gradients may occupy until the clipped
    sum, and temporarily.
    """
    by_term = tuple([_method_of(kind, batch_size, bound) for kind in kinds])
    first = kinds[0]
    is_single = len(kinds) == 1
    if is_single and first.length == 1:
        return Method.GRAMS, by_term
    grams, blocks = _cost_of_grams(kinds), _cost_of_blocks(kinds)
    if _is_worth_caching(kinds, batch_size, cache, bound, min(grams, blocks)):
        return Method.CACHE, by_term
    if is_single and first.has_onehot and len(first.dense_widths) > 1:
        if not _has_few_rows(first, batch_size, bound, _FEW):
            return Method.GROUPS, by_term
    if grams > blocks:
        if _can_be_apart(kinds) and _saves_apart(kinds, batch_size, bound):
            return Method.APART, by_term
        return Method.BLOCKS, by_term
    return Method.GRAMS, by_term


# -- sum of terms ----------------------------------------------------------------------


def covers(shape: torch.Size, widths: Sequence[int]) -> bool:
    """Returns True if each width is that of one axis, or of several in a row."""
    if not product(shape):
        return not product(widths)
    axes = [size for size in shape if size > 1]
    for width in widths:
        taken = 1
        while axes and taken < width:
            taken *= axes.pop(0)
        if taken != width:
            return False
    return not axes


def scale_of(what: str, divisor: Any, parameter: T) -> Scale:
    """
    Returns what the gradients of a parameter are divided by, as vectors.

    Args:
        what: what it is called in errors
        divisor: a tensor of the parameter's shape, or a tuple of vectors, each for one
            axis or several in a row
        parameter: the parameter

    Raises:
        Refused: if it has another type or other shapes
    """
    is_whole = isinstance(divisor, T)
    vectors = (divisor,) if is_whole else divisor
    check_argument(
        what,
        vectors,
        type(vectors) in (tuple, list) and all(isinstance(v, T) for v in vectors),
        "a tensor or a tuple of tensors",
        "Give what the gradients of the parameter are divided by.",
    )
    shapes = [tuple(vector.shape) for vector in vectors]
    if is_whole:
        fits = shapes[0] == tuple(parameter.shape)
    else:
        widths = [shape[0] for shape in shapes if len(shape) == 1]
        fits = len(widths) == len(shapes) and covers(parameter.shape, widths)
    if not fits:
        raise Refused(
            f"{what} has shapes {shapes}, and the parameter has "
            f"{tuple(parameter.shape)}.",
            parameter="scale",
            remedy="Give one tensor of the parameter's shape, or a tuple of "
            "vectors, each for one axis or several in a row, left to right.",
        )
    return vectors


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

    def __init__(
        self,
        shape: torch.Size,
        batch_size: int,
        rows: T | None = None,
    ):
        self.shape = torch.Size(shape)
        self.numel = product(shape)
        self.batch_size = batch_size
        #: Bytes of the materialized gradients that are kept for the clipped sum.
        self.cached_bytes = 0
        #: In compiled code, the samples that count ``[B]``.
        self.mask: T | None = None
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
        term: Any = factors[0] if factors else None
        if not isinstance(term, Term):
            sized: Any = factors
            if not self._fits(sized):
                self._refuse(sized)
            term = OuterProducts(*sized)
        if not self._terms:
            if self.batch_size:
                self._terms.append(term)
            return
        flat = self._terms[-1].flat
        if flat is not None and term.flat is not None:
            rows = (flat + term.flat).unsqueeze(1)
            self._terms[-1] = OuterProducts(rows)
        else:
            self._terms.append(term)

    def join(self, other: GradSample) -> None:
        """Adds the gradients of other uses of the parameter."""
        for term in other._terms:
            self.add(term)

    def compact(self) -> None:
        """Materializes the gradients if that takes less memory."""
        kept = 0
        for term in self._terms:
            kept += sum(tensor.numel() for tensor in term.tensors())
        if self.batch_size * self.numel < kept:
            rows = self.materialize().flatten(1)
            self._terms = [OuterProducts(rows.unsqueeze(1))]

    def _fits(self, factors: Sequence[Factor]) -> bool:
        widths: list[int] = []
        rows = None
        for factor in factors:
            shape: Sequence[int]
            if type(factor) is OneHot:
                shape = (*factor.index.shape, factor.size)
            else:
                shape = factor.shape
            try:
                size, length, width = shape
            except ValueError:
                return False
            if rows is None:
                rows = size, length
            if rows != (size, length):
                return False
            widths += [width]
        if rows is None or rows[0] != self.batch_size:
            return False
        return tuple(widths) == self.shape or covers(self.shape, widths)

    def _refuse(self, factors: Sequence[Factor]) -> None:
        shapes = str([tuple(entries(factor).shape) for factor in factors])
        sizes = [factor.size for factor in factors if isinstance(factor, OneHot)]
        if sizes:
            shapes += f", one-hot sizes {sizes}"
        raise Refused(
            f"Factors of shapes {shapes} do not describe the gradient of a parameter "
            f"of shape {tuple(self.shape)} for a batch of {self.batch_size}:",
            remedy="each must be [B, T, width], or an opacus_ext.OneHot with index "
            "[B, T], one for each axis, left to right.",
        )

    def flat(self) -> T | None:
        """Returns ``[B, numel]`` if the gradients are materialized, else None."""
        if len(self._terms) != 1:
            return None
        return self._terms[0].flat

    def materialize(self) -> T:
        """Returns the per-sample gradients ``[B, *shape]``."""
        if not self._terms:
            return self._zeros(self.batch_size, *self.shape)
        first, *others = self._in_order()
        dtype = self._dtype if others else first.dtype
        total = first.materialize(dtype)
        for term in others:
            total = term.materialize(dtype, total)
        return total.reshape(self.batch_size, *self.shape)

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
        # A loop, as any() would call a generator for each parameter of each step.
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
            (uncertain,) = (values < least).nonzero(as_tuple=True)
            if len(uncertain):
                norms = self.wide(uncertain).exact_norms()
                values[uncertain] = norms.square().to(values)
        return values

    def squares(self, cache: int = 0) -> Squares:
        """
        Returns squared norms, in float32 or wider. It chooses the cheapest method under
        :func:`workspace`: Gram matrices, sums over segments of equal index, or
        per-sample gradients materialized block by block. See :meth:`squared_norm`.
        """
        if not self._terms:
            return Squares(self._zeros(self.batch_size))
        for term in self._terms:
            if not isinstance(term, OuterProducts):
                if self.batch_size * self.numel * self._dtype.itemsize <= cache:
                    return self._cache(self)
                if len(self._terms) == 1:
                    return term.squares()
        merged = self
        if len(self._terms) > 1:
            merged = self._merged()
        terms: Any = merged._in_order()
        kinds = tuple([term.kind for term in terms])
        choose: Any = _choose
        if torch.compiler.is_compiling():
            # Dynamo would warn of a function that has a cache.
            choose = _choose.__wrapped__
        chosen, by_term = choose(kinds, self.batch_size, cache, workspace())
        if chosen is Method.CACHE:
            return self._cache(merged)
        if chosen is Method.GROUPS:
            return _square_by_groups(terms[0])
        if chosen is Method.BLOCKS:
            return merged._squares_of_blocks()
        is_apart = chosen is Method.APART
        squares = []
        if is_apart:
            dense = [term for term in terms if not term.onehot]
            blocks = _sum_of(dense, self.shape, self.batch_size)
            squares.append(blocks._squares_of_blocks())
        for number, first in enumerate(terms):
            if first.onehot or not is_apart:
                squares.append(first.squares_by(by_term[number]))
            for second in terms[:number]:
                if is_apart and not (first.onehot or second.onehot):
                    continue
                # The sum over all pairs has the first with the second, and the reverse.
                products = inner(first.factors, second.factors, self._dtype)
                squares += [products, products]
        return added(squares)

    def _squares_of_blocks(self) -> Squares:
        """Returns squared norms; gradients are materialized block by block."""
        sizes = [term.size() for term in self._terms]
        size = functools.reduce(torch.add, sizes)
        values = self._zeros(self.batch_size)
        for block in self._blocks():
            values = values + square_sum(block.materialize())
        return Squares(values, least_of_entries(size, self._dtype))

    def exact_norms(self) -> T:
        """Returns the norms ``[B]`` of materialized gradients, however large."""
        norms = self._zeros(self.batch_size)
        if self._terms:
            terms = [term.resolved() for term in self._terms]
            resolved = _sum_of(terms, self.shape, self.batch_size)
            for block in resolved._blocks():
                block_norms = scaled_norms(block.materialize().flatten(1))
                norms = torch.hypot(norms, block_norms)
        return norms

    def drop(self, samples: T) -> None:
        """Sets the gradients of the samples of a mask ``[B]`` to zero."""
        self._terms = [term.without(samples) for term in self._terms]

    def wide(self, samples: T) -> GradSample:
        """Returns the gradients of some samples, by their indices, in float64."""
        terms = [term.wide(samples) for term in self._terms]
        return _sum_of(terms, self.shape, len(samples))

    def divided(self, scale: Scale) -> GradSample:
        """Returns the gradients divided by the scale of the parameter."""
        if not self.numel:
            return self
        terms = [term.divided(scale) for term in self._terms]
        sample = _sum_of(terms, self.shape, self.batch_size)
        sample.mask = self.mask
        return sample

    def clear(self) -> None:
        """Drops the gradients."""
        self._terms, self.cached_bytes = [], 0

    @property
    def _dtype(self) -> torch.dtype:
        if len(self._terms) == 1:
            return self._terms[0].dtype
        return common_dtype(self._terms)

    def _zeros(self, *shape: int) -> T:
        device = self._terms[0].device if self._terms else None
        return torch.zeros(shape, dtype=self._dtype, device=device)

    def _in_order(self) -> Sequence[Term]:
        """Returns terms, one-hot ones last: these only touch some entries."""
        if not self._terms[1:]:
            return self._terms
        return sorted(self._terms, key=lambda term: len(term.onehot))

    def _cache(self, source: GradSample) -> Squares:
        """Replaces the terms by materialized gradients; returns squared norms."""
        flat = source.materialize().flatten(1)
        self._terms = [OuterProducts(flat.unsqueeze(1))]
        self.cached_bytes = flat.numel() * flat.dtype.itemsize
        if self.mask is not None:
            # Collector states how compiled code counts only some samples.
            flat = flat * self.mask.to(flat.device)[:, None]
        return Squares(square_sum(flat))

    def _merged(self) -> GradSample:
        """Concatenates terms of one kind, which leaves fewer pairs of terms."""
        by_kind: dict[tuple, list[OuterProducts]] = {}
        for term in self._terms:
            resolved = term.resolved()
            factors = resolved.factors
            kind = tuple(
                [(width_of(factor), entries(factor).dtype) for factor in factors]
            )
            by_kind.setdefault(kind, []).append(resolved)
        merged = []
        for terms in by_kind.values():
            columns = zip(*[term.factors for term in terms])
            merged.append(OuterProducts(*map(joined, columns)))
        return _sum_of(merged, self.shape, self.batch_size)

    def _blocks(self) -> Iterator[GradSample]:
        """Yields some rows of the parameter, which are cheap to materialize."""
        first, bound = self._terms[0], workspace()
        if first.device.type == "cpu":
            bound = min(bound, _CPU_CACHE)
        size = self.batch_size * self.numel
        count = max(1, size * 8 // bound)
        # Gradients of a shared parameter are materialized whole only for the cache.
        if size > _SMALL and (len(self._terms) > 1 or first.onehot):
            count = max(4, count)
        step = max(1, math.ceil(self.shape[0] / count))
        # Who asks for blocks has only terms whose rows are in memory.
        terms: Any = self._terms
        length, *others = self.shape
        for start in range(0, length, step):
            stop = min(start + step, length)
            rows = slice(start, stop)
            parts = [term.part(self.shape, rows) for term in terms]
            shape = torch.Size([stop - start, *others])
            yield _sum_of(parts, shape, self.batch_size)


def _sum_of(
    terms: Sequence[Term],
    shape: torch.Size,
    size: int,
) -> GradSample:
    """Returns the sum of terms that are known to fit the shape."""
    sample = GradSample(shape, size)
    sample._terms = list(terms)
    return sample


def _square_by_groups(term: OuterProducts) -> Squares:
    """Returns squared norms from groups of rows with the same place."""
    places, size = places_of(term.onehot)
    dense = [rows.flatten(0, 1) for rows in term.dense]
    count = term.batch_size * size
    by_place = torch.ops.opacus_ext.square_by_place(dense, places, count)
    values, least = by_place.view(2, term.batch_size, size).sum(2)
    return Squares(values, least)


@kernel("square_by_place")
def _square_by_place(
    dense: Sequence[T],
    places: T,
    count: int,
) -> T:
    """Returns the squared norm of each place, and its least, see places.py."""
    shape = torch.Size([rows.shape[1] for rows in dense])
    squares = places.new_zeros(2, count, dtype=common_dtype(dense))
    for keys, factors in groups_of(dense, places):
        sample = GradSample(shape, len(factors[0]))
        sample.add(*factors)
        values, least = sample.squares()
        squares[0, keys] = values.to(squares)
        if least is not None:
            squares[1, keys] = least.to(squares)
    return squares
