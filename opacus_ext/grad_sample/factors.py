"""A per-sample gradient as a sum of rank-one terms.

For every layer that matters here the gradient of sample ``b`` with respect to one
parameter is ``G[b] = sum_t f1[b, t] (x) f2[b, t] (x) ...``, one factor for each axis
of the parameter. A factor is either dense rows ``[B, T, width]`` or one-hot rows,
given by an index ``[B, T]`` (:class:`OneHot`). Every mode of DP-SGD is one of four
operations on that object, :class:`GradSample`.

Source: ghost norms for dense layers (Lee & Kifer 2020; Li et al. 2021), for a tied
embedding (DPFormer, claim 4.1, whose printed square on the first term is a misprint).
"""

from __future__ import annotations

import functools
import math
from typing import (
    Callable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch

from opacus_ext.refused import Refused

_WORKSPACE = 64 * 2**20
_CACHE = 2**22  # bytes worked on at a time by a CPU
_LARGE = 128  # rows of a group that is a product of its own
_FEW_ROWS = 8  # of a group, below which groups are better taken together
_FEW = 2**23  # multiply-adds that take no longer than sorting rows by sample


def workspace(num_bytes: Optional[int] = None) -> int:
    """
    The one setting that trades memory for time: how many bytes the per-sample
    gradients may occupy for a while beside what training needs anyway.

    It bounds the blocks in which norms are computed, and in "ghost_bk" also the sum
    of all per-sample gradients that are kept from the norm to the clipped sum.
    Results do not depend on it.

    Args:
        num_bytes: new bound in bytes; None leaves it as it is

    Returns:
        The bound in force before the call, in bytes.

    Raises:
        ValueError: if ``num_bytes`` is not positive

    Example:
        >>> import opacus_ext
        >>> before = opacus_ext.workspace(256 * 2**20)
        >>> opacus_ext.workspace(before) == 256 * 2**20
        True
    """
    global _WORKSPACE
    before = _WORKSPACE
    if num_bytes is not None:
        if num_bytes <= 0:
            raise Refused(f"The workspace must be positive, got {num_bytes} bytes.")
        _WORKSPACE = int(num_bytes)
    return before


Size = Union[int, torch.SymInt]


def known(size: Size) -> int:
    """
    A size, to choose by: in a program that is compiled for any batch what it is in the
    first, so that choices don't bind the program to it.
    """
    return size.node.hint if isinstance(size, torch.SymInt) else size


class OneHot(NamedTuple):
    """Rows ``[B, T, size]`` that are one at ``index`` and zero elsewhere."""

    index: torch.Tensor
    size: int


class Blocks(NamedTuple):
    """
    One-hot rows ``[B, T, size]`` whose index is ``t // (T / size)``: the other factors
    hold ``size`` blocks of rows, one after the other, as a grouped convolution does.
    It comes first among the factors, and what follows is dense.
    """

    size: int


class Ragged(NamedTuple):
    """
    The sample of each row, ``[rows]``: the other factors hold the rows of all samples
    in any order, ``[1, rows, width]``, and none for padding. It comes first among the
    factors, and one at least of the others is dense.
    """

    samples: torch.Tensor


class Lazy:
    """
    Dense rows that are computed when they are needed, for some samples at a time,
    because they take more memory than what they are computed from.

    Args:
        make: computes rows ``[b, length, width]`` from ``b`` entries of ``source``
        source: ``[B, ...]``
        length: number of rows a sample
        width: size of a row
        summed: the sum over all samples and rows of the product with another dense
            factor ``[B, length, other]``, computed without the rows, from the source
            and that factor; ``other * width`` entries
    """

    def __init__(
        self,
        make: Callable[[torch.Tensor], torch.Tensor],
        source: torch.Tensor,
        length: int,
        width: int,
        summed: Optional[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = None,
    ):
        self._make, self._source, self._summed = make, source, summed
        self.shape = torch.Size((source.shape[0], length, width))
        self.dtype, self.device = source.dtype, source.device

    def without(self, samples: torch.Tensor) -> "Lazy":
        """Zeros in the place of some samples, ``[B]`` of bool."""
        shape = (-1,) + (1,) * (self._source.dim() - 1)
        source = self._source.masked_fill(samples.view(shape), 0)
        return Lazy(self._make, source, *self.shape[1:], self._summed)

    def rows(self, start: int = 0, stop: Optional[int] = None) -> torch.Tensor:
        """The rows of the samples from ``start`` to ``stop``."""
        return self._make(self._source[start:stop])

    def summed(self, other: torch.Tensor) -> Optional[torch.Tensor]:
        """See the argument of this name; None without it."""
        return None if self._summed is None else self._summed(self._source, other)


class Columns(Lazy):
    """
    Dense rows ``[B, T, width]`` that are computed for some samples and some columns at
    a time, as not even those of one sample need fit into memory. They come first among
    the factors: the parameter's first axis is worked on in slices.

    Args:
        make: ``make(start, stop, columns)`` computes the rows of the samples from
            ``start`` to ``stop``, ``[b, T, columns]``
        dtype: of the rows
        device: of the rows
        shape: ``[B, T, width]``
    """

    def __init__(
        self,
        make: Callable[[Optional[int], Optional[int], slice], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        shape: Tuple[int, int, int],
    ):
        self._columns, self._summed = make, None
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def rows(
        self,
        start: Optional[int] = None,
        stop: Optional[int] = None,
        columns: slice = slice(None),
    ) -> torch.Tensor:
        """The rows of the samples from ``start`` to ``stop``, and some columns."""
        return self._columns(start, stop, columns)

    def without(self, samples: torch.Tensor) -> "Columns":
        """Zeros in the place of some samples, ``[B]`` of bool."""

        def make(start: Optional[int], stop: Optional[int], columns: slice):
            rows = self._columns(start, stop, columns)
            return rows.masked_fill(samples[start:stop, None, None], 0)

        return Columns(make, self.dtype, self.device, tuple(self.shape))


Factor = Union[torch.Tensor, OneHot, Blocks, Ragged, Lazy]


class _Term(NamedTuple):
    factors: Tuple[Factor, ...]
    blocks: int = 1  # the factor Blocks, if there is one, beside the others
    # Of Ragged: the sample of each row, and the number of samples.
    ragged: Optional[Tuple[torch.Tensor, int]] = None

    @property
    def deferred(self) -> bool:
        """Whether it takes :meth:`parts` or :meth:`resolved` before it is computed."""
        return self.blocks > 1 or any(isinstance(f, Lazy) for f in self.factors)

    @property
    def segmented(self) -> bool:
        """Whether its rows meet by an index."""
        return self.ragged is not None or bool(self.onehot)

    def resolved(self) -> "_Term":
        """Rows computed and padded, and a :class:`OneHot` for the blocks."""
        if self.ragged is not None:
            padded = [pad_rows(_rows(f)[0], *self.ragged) for f in self.factors]
            return _Term(tuple(map(_with_rows, self.factors, padded)))
        if not self.deferred:
            return self
        factors = [f.rows() if isinstance(f, Lazy) else f for f in self.factors]
        if self.blocks > 1:
            like = factors[0]
            index = torch.arange(like.shape[1], device=like.device)
            index = index // max(1, like.shape[1] // self.blocks)
            factors.insert(0, OneHot(index.expand(like.shape[0], -1), self.blocks))
        return _Term(tuple(factors))

    def parts(self) -> Iterator[Tuple[int, int, "_Term"]]:
        """Slices of the batch, rows computed: the first and last sample of each."""
        batch_size, length = self.factors[0].shape[:2]
        widths = [f.shape[2] for f in self.factors if isinstance(f, Lazy)]
        bound = workspace()
        if self.factors[0].device.type == "cpu":
            bound = min(bound, _CACHE)
        step = batch_size
        if widths:
            step = max(1, bound // max(1, known(length) * max(widths) * 4))
        for start, stop in _steps(batch_size, step):
            yield start, stop, _Term(
                tuple(
                    f.rows(start, stop) if isinstance(f, Lazy) else f[start:stop]
                    for f in self.factors
                ),
                self.blocks,
            )

    def without(self, samples: torch.Tensor) -> "_Term":
        """Zeros in the place of some samples, ``[B]`` of bool."""
        rows = samples if self.ragged is None else samples[self.ragged[0]][None]

        def drop(f: Factor) -> Factor:
            if isinstance(f, OneHot):
                return f
            if isinstance(f, Lazy):
                return f.without(samples)
            where = rows[:, None, None] if self.ragged is None else rows[..., None]
            return f.masked_fill(where, 0)

        factors = tuple(map(drop, self.factors))
        if not self.dense:  # rows that count as one
            ones = factors[0].index.new_ones(1, dtype=torch.float32)
            ones = ones.expand(*factors[0].index.shape).unsqueeze(-1)
            factors = (*factors, drop(ones))
        return self._replace(factors=factors)

    def blocks_as_samples(self) -> "_Term":
        """Factors ``[B * blocks, T / blocks, width]``."""
        if self.blocks == 1:
            return self
        return _Term(
            tuple(f.unflatten(1, (self.blocks, -1)).flatten(0, 1) for f in self.factors)
        )

    @property
    def widths(self) -> Tuple[int, ...]:
        return tuple(_width(f) for f in self.factors)

    @property
    def batch_size(self) -> int:
        if self.ragged is not None:
            return self.ragged[1]
        return _rows(self.factors[0]).shape[0]

    @property
    def length(self) -> int:
        return _rows(self.factors[0]).shape[1]

    @property
    def dense(self) -> List[torch.Tensor]:
        return [f for f in self.factors if not isinstance(f, OneHot)]

    @property
    def onehot(self) -> List[OneHot]:
        return [f for f in self.factors if isinstance(f, OneHot)]

    @property
    def kind(self) -> tuple:
        """Terms of one kind can be concatenated along T."""
        return tuple(
            (isinstance(f, OneHot), _width(f), _rows(f).dtype) for f in self.factors
        )


def _rows(factor: Factor) -> torch.Tensor:
    return factor.index if isinstance(factor, OneHot) else factor


def _with_rows(factor: Factor, rows: torch.Tensor) -> Factor:
    return OneHot(rows, factor.size) if isinstance(factor, OneHot) else rows


def _width(factor: Factor) -> int:
    return factor.size if isinstance(factor, OneHot) else factor.shape[2]


def wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision is widened: norms are accumulated in float32 or better."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _bytes(x: torch.Tensor) -> int:
    return known(x.numel()) * x.dtype.itemsize


def pad_rows(x: torch.Tensor, groups: torch.Tensor, size: int) -> torch.Tensor:
    """
    Rows ``[N, ...]`` by their groups ``[N]``, below ``size``, in their order:
    ``[size, most rows of one group, ...]``, zeros after them.
    """
    counts = torch.bincount(groups, minlength=size)
    most = int(counts.max()) if size else 0
    ranked, order = groups.sort(stable=True)
    start = counts.cumsum(0) - counts
    place = torch.arange(x.shape[0], device=x.device) - start[ranked]
    out = x.new_zeros(size * most, *x.shape[1:])
    out[ranked * most + place] = x[order]
    return out.view(size, most, *x.shape[1:])


def resolved(factors: Tuple[Factor, ...]) -> Tuple[Union[torch.Tensor, OneHot], ...]:
    """Rows that were to be computed later computed, blocks as :class:`OneHot`."""
    if isinstance(factors[0], Blocks):
        return _Term(tuple(factors[1:]), factors[0].size).resolved().factors
    return _Term(tuple(factors)).resolved().factors


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
        self.kept_bytes = 0  # of gradients materialised to be kept
        self._terms: List[_Term] = []
        self._kept = rows  # [B, numel], in place of all terms

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
            ValueError: if the factors do not fit the parameter or the batch
        """
        blocks, ragged, rows = 1, None, self.batch_size
        first = factors[0] if len(factors) == 1 else None
        if isinstance(first, torch.Tensor) and self._fits(first):
            if rows:
                self._add_flat(first)
            return
        if factors and isinstance(factors[0], Blocks):
            blocks, factors = factors[0].size, factors[1:]
        elif factors and isinstance(factors[0], Ragged):
            ragged, factors = (factors[0].samples, self.batch_size), factors[1:]
            rows = 1
        shapes = [tuple(_rows(f).shape) for f in factors]
        dims = [2 if isinstance(f, OneHot) else 3 for f in factors]
        if (
            not factors
            or [len(shape) for shape in shapes] != dims
            or any(shape[:2] != shapes[0][:2] for shape in shapes)
            or shapes[0][0] != rows
            or (ragged and shapes[0][1] != ragged[0].shape[0])
            or (ragged and not any(isinstance(f, torch.Tensor) for f in factors))
            or blocks * math.prod(_width(f) for f in factors) != self.numel
            or shapes[0][1] % blocks
            or (blocks > 1 and any(isinstance(f, OneHot) for f in factors))
        ):
            sizes = [f.size for f in factors if isinstance(f, OneHot)]
            raise Refused(
                f"Factors of shapes {shapes}{f', one-hot sizes {sizes}' * bool(sizes)} "
                "do not describe the gradient of a parameter of shape "
                f"{tuple(self.shape)} for a batch of {self.batch_size}: each must be "
                "[B, T, width], or a OneHot with index [B, T], one for each axis."
            )
        if self.batch_size == 0:
            return
        if len(factors) == 1 and ragged is not None:
            summed = wide(factors[0])
            zeros = summed.new_zeros(self.batch_size, summed.shape[2])
            self._add_flat(zeros.index_add_(0, ragged[0], summed[0])[:, None])
            return
        self._unkeep()
        self._terms.append(_Term(tuple(factors), blocks, ragged))

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
        self._unkeep()
        if len(self._terms) == 1 and len(self._terms[0].factors) == 1:
            old = self._terms[0].factors[0]
            if isinstance(old, torch.Tensor) and old.shape == x.shape:
                x = old + x
                self._terms.clear()
        self._terms.append(_Term((x,)))

    def flat(self) -> Optional[torch.Tensor]:
        """
        ``[B, numel]``, if the gradients are there already and nothing is to be
        computed; else None.
        """
        if self._kept is not None:
            return self._kept
        if len(self._terms) != 1 or len(self._terms[0].factors) != 1:
            return None
        (only,) = self._terms[0].factors
        if not isinstance(only, torch.Tensor) or self._terms[0].ragged is not None:
            return None
        return only.squeeze(1) if only.shape[1] == 1 else None

    def _unkeep(self) -> None:
        """What was kept is one more materialised use."""
        if self._kept is not None:
            self._terms.append(_Term((self._kept[:, None],)))
            self._kept, self.kept_bytes = None, 0

    def materialise(self) -> torch.Tensor:
        """
        Returns:
            The per-sample gradients ``[B, *shape]``.
        """
        dense = self._kept
        if dense is None and self._by_columns:
            for samples, columns, part in self._slices():
                new = part.materialise()
                if dense is None:
                    dense = new.new_zeros(self.batch_size, *self.shape)
                dense[samples, columns] = new
        elif dense is None and self._deferred:
            parts = [_materialised(t) for _, _, t in self._terms[0].parts()]
            dense = torch.cat(parts) if len(parts) > 1 else parts[0]
        elif dense is None:
            terms = [t.resolved() if t.deferred else t for t in self._terms]
            for term in sorted(terms, key=lambda t: len(t.onehot)):
                dense = _add_outer(dense, term, _dtype(*self._terms))
        if dense is None:
            dense = torch.zeros(self.batch_size, self.numel)
        return dense.view(self.batch_size, *self.shape)

    def inner(self, other: "GradSample") -> torch.Tensor:
        """
        The inner product with other per-sample gradients of the same shape.

        Returns:
            ``[B]``, the sum over the entries of ``self[b] * other[b]``.

        Raises:
            ValueError: if shapes or batch sizes differ
        """
        if (self.shape, self.batch_size) != (other.shape, other.batch_size):
            raise Refused(
                f"Inner product of gradients of shapes {tuple(self.shape)} and "
                f"{tuple(other.shape)}, batches of {self.batch_size} and "
                f"{other.batch_size}."
            )
        self._unkeep()
        other._unkeep()
        total = torch.zeros(self.batch_size)
        for u in _merge([t.resolved() for t in self._terms]):
            for v in _merge([t.resolved() for t in other._terms]):
                total = total.to(_rows(u.factors[0]).device) + _inner(u, v)
        return total

    def squared_norm(self, keep: int = 0) -> torch.Tensor:
        """
        Squared norms, by the cheapest of three ways under :func:`workspace`: products
        of Gram matrices, sums over segments of equal index, or per-sample gradients
        materialised block by block. Never negative.

        Args:
            keep: bytes that may be spent on keeping materialised gradients for a
                later :meth:`weighted_sum`; ``kept_bytes`` tells how many were

        Returns:
            ``[B]``, in float32 or wider.
        """
        if self._kept is not None:
            return _square_sum(self._kept)
        if self._by_columns:
            return self._squared_norm_by_columns(keep)
        terms = self._terms = _merge(self._terms)
        if not any(t.length for t in terms):
            return torch.zeros(self.batch_size)
        if self._deferred:
            return self._squared_norm_by_parts(keep)
        if len(terms) == 1 and len(terms[0].factors) == 1 and terms[0].dense:
            # Materialised already: a bias, a scale, a gradient from functorch.
            self._kept, self._terms = terms[0].factors[0].flatten(1), []
            return _square_sum(self._kept)
        alone = terms[0] if len(terms) == 1 else None
        if alone and alone.ragged is not None:
            if _by_segments(alone):
                return _own_square(alone)
            return self._squared_norm_by_groups(alone)
        if alone and alone.length == 1:
            return _own_square(alone)
        gram, blocks = self._gram_cost(terms), self._block_cost(terms)
        if self._worth_keeping(terms, keep, min(gram, blocks)):
            self._kept, self._terms = self.materialise().flatten(1), []
            self.kept_bytes = _bytes(self._kept)
            return _square_sum(self._kept)
        if alone and alone.onehot and len(alone.dense) > 1:
            return self._squared_norm_by_groups(alone)
        if gram <= blocks:
            norm = sum(_own_square(t) for t in terms)
            for i, u in enumerate(terms):
                norm = norm + 2 * sum(_inner(u, v) for v in terms[:i])
        else:
            norm = self._blockwise_square(terms)
        return norm.clamp(min=0)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """
        The sum over the batch of ``weights[b] * G[b]``, without per-sample gradients.

        Args:
            weights: ``[B]``, for example clipping factors

        Returns:
            ``[*shape]``
        """
        if self._kept is not None:
            return (weights.to(self._kept.dtype) @ self._kept).view(self.shape)
        if self._by_columns:
            total = None
            for samples, columns, part in self._slices():
                new = part.weighted_sum(weights[samples])
                if total is None:
                    total = new.new_zeros(self.shape)
                total[columns] += new
            return total
        dtype = _dtype(*self._terms)
        if not any(t.dense for t in self._terms):
            dtype = weights.dtype
        total = torch.zeros(self.shape) if not self._terms else None
        if self._deferred:
            direct = self._summed_directly(weights.to(dtype))
            if direct is not None:
                return direct.reshape(self.shape)
            for start, stop, term in self._terms[0].parts():
                term = _as_one_sample(term, weights[start:stop], dtype)
                total = _add_outer(total, term, dtype)
            return total.view(self.shape)
        if len(self._terms) == 1 and len(self._terms[0].dense) == 2:
            if not self._terms[0].onehot:  # a linear layer: one product
                rows = _as_one_sample(self._terms[0], weights, dtype).factors
                return (rows[0][0].mT @ rows[1][0]).view(self.shape)
        terms = [t.resolved() if t.deferred else t for t in self._terms]
        # Dense terms first: one-hot ones then add into the rows they touch.
        for term in sorted(terms, key=lambda t: len(t.onehot)):
            total = _add_outer(total, _as_one_sample(term, weights, dtype), dtype)
        return total.view(self.shape)

    @property
    def _deferred(self) -> bool:
        return len(self._terms) == 1 and self._terms[0].deferred

    @property
    def _by_columns(self) -> bool:
        return any(isinstance(t.factors[0], Columns) for t in self._terms)

    def _slices(self) -> Iterator[Tuple[slice, slice, "GradSample"]]:
        """Slices of the batch and of the first axis, with the gradients in them."""
        size, width = self.batch_size, self.shape[0]
        first = next(t for t in self._terms if isinstance(t.factors[0], Columns))
        itemsize = max(4, first.factors[0].dtype.itemsize)
        entries = max(1, workspace() // (max(1, first.length) * itemsize))
        step = min(width, max(64, entries))
        some = max(1, entries // step)
        for start in range(0, width, step):
            columns = slice(start, min(start + step, width))
            for i in range(0, size, some):
                samples = slice(i, min(i + some, size))
                part = GradSample(
                    torch.Size((columns.stop - start, *self.shape[1:])),
                    samples.stop - i,
                )
                for term in self._terms:
                    part.add(*_part(term, self.shape, samples, columns))
                yield samples, columns, part

    def _squared_norm_by_columns(self, keep: int) -> torch.Tensor:
        if known(self.batch_size * self.numel) * 8 <= keep:
            self._kept, self._terms = self.materialise().flatten(1), []
            self.kept_bytes = _bytes(self._kept)
            return _square_sum(self._kept)
        norm = None
        for samples, _, part in self._slices():
            new = part.squared_norm()
            if norm is None:
                norm = new.new_zeros(self.batch_size)
            norm[samples] += new
        return norm

    def _squared_norm_by_parts(self, keep: int) -> torch.Tensor:
        (whole,) = self._terms
        numel, norms, kept = self.numel, [], []
        if (
            known(self.batch_size * numel) * max(4, whole.dense[0].dtype.itemsize)
            > keep
        ):
            keep = 0  # all samples or none
        for start, stop, term in whole.parts():
            term = term.blocks_as_samples()
            part = GradSample(
                torch.Size((numel // whole.blocks,)), term.factors[0].shape[0]
            )
            part.add(*term.factors)
            norms.append(
                part.squared_norm(keep).unflatten(0, (-1, whole.blocks)).sum(1)
            )
            kept.append(part._kept)
        if keep and all(k is not None for k in kept):
            kept = [k.view(-1, numel) for k in kept]
            self._kept = torch.cat(kept) if len(kept) > 1 else kept[0]
            self._terms, self.kept_bytes = [], _bytes(self._kept)
        return torch.cat(norms)

    def _summed_directly(self, weights: torch.Tensor) -> Optional[torch.Tensor]:
        """The weighted sum of a term whose last rows know how, or None."""
        *others, last = self._terms[0].factors
        dense = len(others) == 1 and isinstance(others[0], torch.Tensor)
        if not dense or not isinstance(last, Lazy):
            return None
        return last.summed(others[0].to(weights.dtype) * weights[:, None, None])

    def _squared_norm_by_groups(self, term: _Term) -> torch.Tensor:
        """Two or more dense axes: rows meet in one sample and of one index."""
        places, size = _segments(term)
        if _few(term, len(places)):
            return _square_of_few(term, places, size)
        runs = _runs(places)
        if runs is not None and len(term.dense) == 2 and places.device.type == "cpu":
            return _square_of_runs(term, *runs, size)
        norm = torch.zeros(self.batch_size, dtype=_dtype(term))
        norm = norm.to(term.dense[0].device)
        for keys, rows in _groups(term):
            group = GradSample(torch.Size(rows.widths), len(keys))
            group.add(*rows.factors)
            norm.index_add_(0, keys // size, group.squared_norm().to(norm.dtype))
        return norm

    def merge(self, other: "GradSample") -> None:
        """Adds the uses of another one, of the same samples."""
        self._unkeep()
        other._unkeep()
        self._terms += other._terms

    def drop(self, samples: torch.Tensor) -> None:
        """
        Makes the gradients of some samples zero, whatever they are.

        Args:
            samples: which, ``[B]`` of bool
        """
        if self._kept is not None:
            self._kept = self._kept.masked_fill(samples[:, None], 0)
        self._terms = [t.without(samples) for t in self._terms]

    def clear(self) -> None:
        """Forgets the uses; what was computed from them stays valid."""
        self._terms, self._kept, self.kept_bytes = [], None, 0

    # -- which way ---------------------------------------------------------------
    # Costs are multiply-adds a sample. The constants weigh in memory traffic: about 4
    # for an entry in cache; 60 for one that is written, read twice and takes memory.
    # They were set by timing on CPU; only speed depends on them.

    def _gram_cost(self, terms: Sequence[_Term]) -> float:
        if len({t.widths for t in terms}) > 1:
            return math.inf
        cost = 0.0
        for i, u in enumerate(terms):
            if _by_segments(u):
                cost += known(u.length) * (16 + sum(f.shape[2] for f in u.dense))
            else:  # one triangle and the diagonal blocks
                widths = sum(f.shape[2] for f in u.dense)
                cost += 0.65 * known(u.length) ** 2 * (8 + widths)
            for v in terms[:i]:
                both = [
                    f.shape[2]
                    for f, g in zip(u.factors, v.factors)
                    if not isinstance(f, OneHot) and not isinstance(g, OneHot)
                ]
                pairs = known(u.length) * known(v.length)
                cost += pairs * (8 * len(u.factors) + sum(both))
        return cost

    def _block_cost(self, terms: Sequence[_Term]) -> float:
        numel = known(self.numel)
        cost = 4.0 * numel
        for t in terms:
            if t.onehot:
                rows = math.prod(f.shape[2] for f in t.dense)
                cost += 2 * numel + known(t.length) * rows
            else:
                cost += known(t.length) * numel
        return cost

    def _worth_keeping(self, terms: Sequence[_Term], keep: int, cost: float) -> bool:
        if any(t.segmented and len(t.dense) > 1 for t in terms):
            return False
        if all(len(t.dense) < 2 for t in terms):
            return False  # nothing to gain
        numel, size = known(self.numel), _dtype(*terms).itemsize
        return known(self.batch_size) * numel * size <= keep and 60 * numel <= cost

    def _blockwise_square(self, terms: Sequence[_Term]) -> torch.Tensor:
        widths = max((t.widths for t in terms), key=len)
        terms = [_split(t, widths) for t in terms]
        axis = max(range(len(widths)), key=widths.__getitem__)
        size = known(self.batch_size * self.numel) * 8
        on_cpu = _rows(terms[0].factors[0]).device.type == "cpu"
        bound = min(workspace(), _CACHE) if on_cpu else workspace()
        # Those of a shared parameter are not in memory at once but to be kept.
        count = max(4 if len(terms) > 1 or terms[0].onehot else 1, size // bound)
        step = max(1, math.ceil(widths[axis] / count))
        norm, dtype = 0, _dtype(*terms)
        for start in range(0, widths[axis], step):
            block = None
            for t in terms:
                part = _slice(t, axis, start, start + step)
                block = _add_outer(block, part, dtype)
            norm = norm + _square_sum(block)
        return norm


def _merge(terms: Sequence[_Term]) -> List[_Term]:
    """Concatenates the terms of one kind, so that cross terms between them vanish."""
    if len(terms) == 1:
        return list(terms)
    terms = [t.resolved() for t in terms]
    kinds: dict = {}
    for term in terms:
        kinds.setdefault(term.kind, []).append(term)
    merged = []
    for same in kinds.values():
        if len(same) > 1 and len(same[0].factors) == 1 and same[0].dense:
            merged.append(_Term((sum(t.factors[0] for t in same),)))
        elif len(same) > 1:
            merged.append(_Term(tuple(map(_cat, zip(*(t.factors for t in same))))))
        else:
            merged.append(same[0])
    return merged


def _cat(factors: Sequence[Factor]) -> Factor:
    return _with_rows(factors[0], torch.cat([_rows(f) for f in factors], dim=1))


def _by_segments(term: _Term) -> bool:
    return term.segmented and len(term.dense) <= 1


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    x = x if x.dim() == 2 else x.flatten(1)
    return torch.linalg.vector_norm(x, dim=1).square_()


def _combined_index(term: _Term) -> Tuple[torch.Tensor, int]:
    index, size = term.onehot[0]
    for other in term.onehot[1:]:
        index, size = index * other.size + other.index, size * other.size
    return index, size


def _segments(term: _Term) -> Tuple[torch.Tensor, int]:
    """``sample * size + index`` of all rows, flattened, and ``size``."""
    rows = _rows(term.factors[0])
    index, size = _combined_index(term) if term.onehot else (0, 1)
    if term.ragged is None:
        sample = torch.arange(rows.shape[0], device=rows.device)[:, None]
    else:
        sample = term.ragged[0][None]
    return (sample * size + index).flatten(), size


def _own_square(term: _Term) -> torch.Tensor:
    if term.length == 1 and term.ragged is None:
        # One product of rows: its norm is the product of theirs.
        dtype = _dtype(term)
        rows = _rows(term.factors[0])
        squares = [_square_sum(f.to(dtype)) for f in term.dense]
        if not squares:
            return torch.ones(rows.shape[0], dtype=dtype, device=rows.device)
        return functools.reduce(torch.mul, squares)
    if not _by_segments(term):
        return _inner(term, term)
    places, size = _segments(term)
    rows = _row_products(term, _dtype(term)).flatten(0, 1)
    # Numbers of the segments: as many as there are rows at most, so that nobody has to
    # know how many there are (which a device would have to be waited for).
    ranked, order = places.sort()
    new = torch.zeros_like(ranked)
    new[1:] = ranked[1:] != ranked[:-1]
    number = new.cumsum(0)
    segment = torch.empty_like(number).scatter_(0, order, number)
    squares = _square_sum(torch.zeros_like(rows).index_add_(0, segment, rows))
    sample = torch.zeros_like(number).scatter_(0, number, ranked // size)
    return rows.new_zeros(term.batch_size).index_add_(0, sample, squares)


def _few(term: _Term, rows: int) -> bool:
    width = 64 + sum(f.shape[2] for f in term.dense)  # 64: the passes over the product
    size = 3 * rows**2 * _dtype(term).itemsize
    return rows**2 * width <= _FEW and size <= workspace()


def _square_of_few(term: _Term, places: torch.Tensor, size: int) -> torch.Tensor:
    """All rows meet all rows, and those of one place count."""
    rows = (f.flatten(0, 1).to(_dtype(term)) for f in term.dense)
    product = functools.reduce(torch.mul, (f @ f.mT for f in rows))
    product = product.masked_fill_(places[:, None] != places, 0).sum(1)
    norm = product.new_zeros(term.batch_size)
    return norm.index_add_(0, places // size, product).clamp_(min=0)


def _runs(places: torch.Tensor) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    """
    Of rows that lie together by place the places and how many rows each has; None of
    others, and of many places.
    """
    keys, counts = places.unique_consecutive(return_counts=True)
    if len(places) < _FEW_ROWS * len(keys) or len(keys.unique()) < len(keys):
        return None
    return keys, counts


def _square_of_runs(
    term: _Term, keys: torch.Tensor, counts: torch.Tensor, size: int
) -> torch.Tensor:
    """Two dense factors, their rows together by place: no copies of them."""
    left, right = (f.flatten(0, 1).to(_dtype(term)) for f in term.dense)
    numel = left.shape[1] * right.shape[1]
    found = []
    for u, v in zip(left.split(counts.tolist()), right.split(counts.tolist())):
        if len(u) * (left.shape[1] + right.shape[1]) < 2 * numel:
            found.append(torch.dot((u @ u.mT).flatten(), (v @ v.mT).flatten()))
        else:
            whole = (u.mT @ v).flatten()
            found.append(torch.dot(whole, whole))
    norm = left.new_zeros(term.batch_size)
    return norm.index_add_(0, keys // size, torch.stack(found)).clamp_(min=0)


def _inner(u: _Term, v: _Term) -> torch.Tensor:
    """``sum_{t,t'} prod_k <u_k[t], v_k[t']>``, in chunks of t under the workspace."""
    if u.widths != v.widths:
        widths = max(u.widths, v.widths, key=len)
        u, v = _split(u, widths), _split(v, widths)
    dtype = _dtype(u, v)
    batch_size, itemsize = _rows(u.factors[0]).shape[0], dtype.itemsize
    size = 2 * known(batch_size) * known(v.length) * itemsize
    step = max(1, workspace() // max(1, size))
    symmetric = u is v
    if symmetric:
        # Only one of the triangles: a chunk meets itself and, twice, what follows.
        step = min(step, max(64, math.ceil(known(u.length) / 4)))
    total = 0
    for start, stop in _steps(u.length, step):
        product = None
        for f, g in zip(u.factors, v.factors):
            if symmetric:
                g = _chunk(g, start, u.length)
            gram = _gram(_chunk(f, start, stop), g, dtype)
            product = gram if product is None else product.mul_(gram)
        if symmetric and product.shape[2] > product.shape[1]:
            product[:, :, stop - start :] *= 2
        total = total + product.sum((1, 2))
    return total


def _steps(size: Size, step: int) -> Iterator[Tuple[Size, Size]]:
    """Where the parts of an axis begin and end; of one of any size there is one."""
    if isinstance(size, torch.SymInt):
        yield 0, size
        return
    for start in range(0, size, step):
        yield start, min(start + step, size)


def _chunk(f: Factor, start: int, stop: int) -> Factor:
    if isinstance(f, OneHot):
        return OneHot(f.index[:, start:stop], f.size)
    return f[:, start:stop]


def _dtype(*terms: _Term) -> torch.dtype:
    dtype = torch.float32
    for f in (f for t in terms for f in t.dense):
        dtype = torch.promote_types(dtype, f.dtype)
    return dtype


def _gram(f: Factor, g: Factor, dtype: torch.dtype) -> torch.Tensor:
    """``[B, T, T']`` of ``<f[t], g[t']>``."""
    if isinstance(f, OneHot) and isinstance(g, OneHot):
        return (f.index[:, :, None] == g.index[:, None, :]).to(dtype)
    if isinstance(f, OneHot):
        return _gram(g, f, dtype).mT.contiguous()
    if isinstance(g, OneHot):
        index = g.index[:, None, :].expand(-1, f.shape[1], -1)
        return f.gather(2, index).to(dtype)
    return torch.bmm(f.to(dtype), g.to(dtype).mT)


def _groups(term: _Term) -> Iterator[Tuple[torch.Tensor, _Term]]:
    """
    The rows of each (sample, index) as a sample of their own: dense factors
    ``[groups, rows, width]``, padded with zeros. Small groups of about one size come
    together, so that at most half of it is padding however uneven they are.

    Yields:
        ``sample * size + index`` of each group, and its dense factors
    """
    index, _ = _segments(term)
    sorted_, order = index.sort(stable=True)
    keys, counts = torch.unique_consecutive(sorted_, return_counts=True)
    if len(order) >= _LARGE * len(keys):
        dense = [f.flatten(0, 1) for f in term.dense]
        if _runs(index) is None:
            dense = [f.index_select(0, order) for f in dense]
        else:
            keys, counts = index.unique_consecutive(return_counts=True)
        parts = zip(*(f.split(counts.tolist()) for f in dense))
        for key, part in zip(keys.split(1), parts):
            yield key, _Term(tuple(f[None] for f in part))
        return
    starts, level = counts.cumsum(0) - counts, counts.float().log2().ceil()
    for i in level.unique().tolist():
        chosen = level == i
        step = torch.arange(int(counts[chosen].max()), device=index.device)
        inside = step < counts[chosen, None]
        rows = order[(starts[chosen, None] + step).clamp(max=len(order) - 1)]
        first, *rest = (
            f.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, -1)
            for f in term.dense
        )
        yield keys[chosen], _Term((first * inside[..., None], *rest))


def _row_products(term: _Term, dtype: torch.dtype) -> torch.Tensor:
    """The dense factors of each row multiplied out: ``[B, T, product of widths]``."""
    index = _rows(term.factors[0])
    rows = None
    for f in term.dense:
        f = f.to(dtype)
        rows = f if rows is None else (rows[..., None] * f[:, :, None, :]).flatten(2)
    if rows is None:
        rows = torch.ones(*index.shape[:2], 1, dtype=dtype, device=index.device)
    return rows


def _materialised(term: _Term) -> torch.Tensor:
    samples = term.blocks_as_samples()
    return _add_outer(None, samples, _dtype(term)).flatten(1)


def _add_outer(
    out: Optional[torch.Tensor], term: _Term, dtype: torch.dtype
) -> torch.Tensor:
    """Adds the outer products of ``term``, summed over T, to ``out``: [B, numel]."""
    batch_size = term.batch_size
    if not term.segmented:
        left = term.dense[0].to(dtype)
        if len(term.dense) == 1:
            new = left.sum(1)
            return new if out is None else out.add_(new)
        right = _row_products(_Term(tuple(term.dense[1:])), dtype)
        if out is None:
            return torch.bmm(left.mT, right).flatten(1)
        view = out.view(batch_size, left.shape[2], right.shape[2])
        view.baddbmm_(left.mT, right)
        return out

    places, size = _segments(term)
    leading = all(isinstance(f, OneHot) for f in term.factors[: len(term.onehot)])
    in_place = leading and out is not None
    if len(term.dense) <= 1:
        rows = _row_products(term, dtype)
        if in_place:
            table = out.view(batch_size * size, rows.shape[2])
        else:
            table = rows.new_zeros(batch_size * size, rows.shape[2])
        table.index_add_(0, places, rows.flatten(0, 1))
        if in_place:
            return out
    else:
        width = math.prod(f.shape[2] for f in term.dense)
        table = places.new_zeros(batch_size * size, width, dtype=dtype)
        for keys, rows in _groups(term):
            if len(keys) == 1 and len(rows.dense) == 2:
                left, right = (f[0].to(dtype) for f in rows.dense)
                place = table[int(keys)].view(left.shape[1], -1)
                torch.mm(left.mT, right, out=place)
            else:
                table[keys] = _add_outer(None, rows, dtype)
    if not leading:
        # Axes back from (one-hot axes, dense axes) to the parameter's order.
        order = sorted(
            range(len(term.factors)),
            key=lambda i: not isinstance(term.factors[i], OneHot),
        )
        table = table.view(batch_size, *(term.widths[i] for i in order))
        table = table.permute([0] + [1 + order.index(i) for i in range(len(order))])
    new = table.reshape(batch_size, math.prod(term.widths))
    return new if out is None else out.add_(new)


def _as_one_sample(term: _Term, weights: torch.Tensor, dtype: torch.dtype) -> _Term:
    """
    The whole batch as one sample of B * T rows, row b scaled by ``weights[b]``; blocks
    become samples.
    """
    weights = weights.to(dtype)[:, None]
    if term.ragged is not None:
        weights = weights[term.ragged[0]].T
    scaled = min(term.dense, key=lambda f: f.shape[2]) if term.dense else None
    factors: List[Factor] = []
    for f in term.factors:
        if isinstance(f, OneHot):
            factors.append(OneHot(f.index.reshape(1, -1), f.size))
            continue
        rows = f.to(dtype)
        if f is scaled:
            rows, scaled = rows * weights[:, :, None], None
        if term.blocks > 1:
            rows = rows.unflatten(1, (term.blocks, -1)).transpose(0, 1)
        factors.append(rows.reshape(term.blocks, -1, f.shape[2]))
    if not term.dense:
        index = _rows(term.factors[0])
        factors.append(weights.expand(index.shape).reshape(1, -1, 1))
    return _Term(tuple(factors))


def _split(term: _Term, widths: Tuple[int, ...]) -> _Term:
    """Writes a materialised term so that it has one factor for each of ``widths``."""
    if term.widths == widths:
        return term
    if len(term.factors) != 1 or isinstance(term.factors[0], OneHot):
        term = _Term((_add_outer(None, term, _dtype(term))[:, None],))
    # G = sum over i of e_i (x) G[i]: rows of an identity are the first factor.
    dense = term.factors[0].flatten(1)
    batch_size = dense.shape[0]
    index = torch.arange(widths[0], device=dense.device).expand(batch_size, -1)
    rest = dense.view(batch_size, widths[0], math.prod(widths[1:]))
    if len(widths) == 2:
        return _Term((OneHot(index, widths[0]), rest))
    length = math.prod(widths[:-1])
    index = torch.arange(length, device=dense.device)
    factors: List[Factor] = []
    for i, width in enumerate(widths[:-1]):
        stride = math.prod(widths[i + 1 : -1])
        factors.append(OneHot((index // stride % width).expand(batch_size, -1), width))
    return _Term((*factors, dense.view(batch_size, length, widths[-1])))


def _part(
    term: _Term, shape: torch.Size, samples: slice, columns: slice
) -> Tuple[Factor, ...]:
    """The factors of some samples for some rows of the parameter's first axis."""
    first, *rest = term.factors
    if isinstance(first, Columns):
        rows = first.rows(samples.start, samples.stop, columns)
        return (rows, *(f[samples] for f in rest))
    term = term.resolved()
    term = _Term(tuple(_with_rows(f, _rows(f)[samples]) for f in term.factors))
    if term.widths[0] != shape[0]:
        term = _split(term, tuple(shape))
    return _slice(term, 0, columns.start, columns.stop).factors


def _slice(term: _Term, axis: int, start: int, stop: int) -> _Term:
    """The term for rows ``start:stop`` of one axis of the parameter."""
    factors = list(term.factors)
    f = factors[axis]
    if not isinstance(f, OneHot):
        factors[axis] = f[:, :, start:stop]
        return _Term(tuple(factors))
    stop = min(stop, f.size)
    inside = (f.index >= start) & (f.index < stop)
    factors[axis] = OneHot((f.index - start).clamp(0, stop - start - 1), stop - start)
    for i, g in enumerate(factors):
        if not isinstance(g, OneHot):
            factors[i] = torch.where(inside[..., None], g, g.new_zeros(()))
            return _Term(tuple(factors))
    # Only one-hot factors: the rows outside need a weight of zero.
    return _Term((*factors, inside[..., None].to(torch.get_default_dtype())))
