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

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

_WORKSPACE = 64 * 2**20


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
            raise ValueError(f"The workspace must be positive, got {num_bytes} bytes.")
        _WORKSPACE = int(num_bytes)
    return before


class OneHot(NamedTuple):
    """Rows ``[B, T, size]`` that are one at ``index`` and zero elsewhere."""

    index: torch.Tensor
    size: int


Factor = Union[torch.Tensor, OneHot]


class _Term(NamedTuple):
    factors: Tuple[Factor, ...]

    @property
    def widths(self) -> Tuple[int, ...]:
        return tuple(_width(f) for f in self.factors)

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


def _width(factor: Factor) -> int:
    return factor.size if isinstance(factor, OneHot) else factor.shape[2]


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision is widened: norms are accumulated in float32 or better."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class GradSample:
    """
    The per-sample gradients of one parameter, summed over all its uses in a step.

    Args:
        shape: shape of the parameter
        batch_size: number of samples ``B``

    Example:
        >>> import torch
        >>> g = GradSample(torch.Size([3, 4]), batch_size=2)
        >>> g.add(torch.randn(2, 5, 3), torch.randn(2, 5, 4))       # a Linear
        >>> g.add(OneHot(torch.randint(3, (2, 7)), 3), torch.randn(2, 7, 4))  # tied
        >>> torch.allclose(g.squared_norm(), g.materialise().pow(2).sum((1, 2)))
        True
    """

    def __init__(self, shape: torch.Size, batch_size: int):
        self.shape = torch.Size(shape)
        self.batch_size = batch_size
        self.kept_bytes = 0  # of gradients materialised to be kept
        self._terms: List[_Term] = []
        self._kept: Optional[torch.Tensor] = None  # [B, numel], in place of all terms

    def add(self, *factors: Factor) -> None:
        """
        Adds one use of the parameter.

        Args:
            factors: one a parameter axis, left to right: dense ``[B, T, width]`` or
                :class:`OneHot` with index ``[B, T]``. Neighbouring axes may share one
                factor, so ``[B, 1, numel]`` is a materialised per-sample gradient.

        Raises:
            ValueError: if the factors do not fit the parameter or the batch
        """
        shapes = [tuple(_rows(f).shape) for f in factors]
        dims = [2 if isinstance(f, OneHot) else 3 for f in factors]
        if (
            not factors
            or [len(shape) for shape in shapes] != dims
            or any(shape[:2] != shapes[0][:2] for shape in shapes)
            or shapes[0][0] != self.batch_size
            or math.prod(_width(f) for f in factors) != self.shape.numel()
        ):
            sizes = [f.size for f in factors if isinstance(f, OneHot)]
            raise ValueError(
                f"Factors of shapes {shapes}{f', one-hot sizes {sizes}' * bool(sizes)} "
                "do not describe the gradient of a parameter of shape "
                f"{tuple(self.shape)} for a batch of {self.batch_size}: each must be "
                "[B, T, width], or a OneHot with index [B, T], one for each axis."
            )
        if len(factors) == 1 and not isinstance(factors[0], OneHot):
            # One factor alone needs no rows: what is summed can be summed now.
            factors = (_wide(factors[0]).sum(1, keepdim=True),)
        self._unkeep()
        self._terms.append(_Term(tuple(factors)))

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
        if dense is None:
            for term in sorted(self._terms, key=lambda t: len(t.onehot)):
                dense = _add_outer(dense, term, _dtype(*self._terms))
        if dense is None:
            dense = torch.zeros(self.batch_size, self.shape.numel())
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
            raise ValueError(
                f"Inner product of gradients of shapes {tuple(self.shape)} and "
                f"{tuple(other.shape)}, batches of {self.batch_size} and "
                f"{other.batch_size}."
            )
        self._unkeep()
        other._unkeep()
        total = torch.zeros(self.batch_size)
        for u in _merge(self._terms):
            for v in _merge(other._terms):
                total = total.to(_rows(u.factors[0]).device) + _inner(u, v)
        return total

    def squared_norm(
        self, keep: int = 0, reuse: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """
        Squared norms, by the cheapest of three ways under :func:`workspace`: products
        of Gram matrices, sums over segments of equal index, or per-sample gradients
        materialised block by block. Never negative.

        Args:
            reuse: what an earlier step's ``kept`` was, to be written again: fetching
                memory from the system costs more than the product that fills it
            keep: bytes that may be spent on keeping materialised gradients for a
                later :meth:`weighted_sum`; ``kept_bytes`` tells how many were

        Returns:
            ``[B]``, in float32 or wider.
        """
        terms = self._terms = _merge(self._terms)
        if self._kept is not None:
            return _square_sum(self._kept)
        if not any(t.length for t in terms):
            return torch.zeros(self.batch_size)
        if len(terms) == 1 and len(terms[0].factors) == 1 and terms[0].dense:
            # Materialised already: a bias, a scale, a gradient from functorch.
            self._kept, self._terms = terms[0].factors[0].flatten(1), []
            return _square_sum(self._kept)
        gram, blocks = self._gram_cost(terms), self._block_cost(terms)
        if self._worth_keeping(terms, keep, min(gram, blocks)):
            self._kept, self._terms = self._materialise_into(reuse), []
            self.kept_bytes = self._kept.nbytes
            return _square_sum(self._kept)
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
        dtype = _dtype(*self._terms)
        if not any(t.dense for t in self._terms):
            dtype = weights.dtype
        total = torch.zeros(self.shape) if not self._terms else None
        # Dense terms first: one-hot ones then add into the rows they touch.
        for term in sorted(self._terms, key=lambda t: len(t.onehot)):
            total = _add_outer(total, _as_one_sample(term, weights, dtype), dtype)
        return total.view(self.shape)

    @property
    def kept(self) -> Optional[torch.Tensor]:
        """The gradients ``[B, numel]`` that ``kept_bytes`` counts."""
        return self._kept if self.kept_bytes else None

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
                cost += u.length * (16 + sum(f.shape[2] for f in u.dense))
            else:  # one triangle and the diagonal blocks
                cost += 0.65 * u.length**2 * (8 + sum(f.shape[2] for f in u.dense))
            for v in terms[:i]:
                both = [
                    f.shape[2]
                    for f, g in zip(u.factors, v.factors)
                    if not isinstance(f, OneHot) and not isinstance(g, OneHot)
                ]
                cost += u.length * v.length * (8 * len(u.factors) + sum(both))
        return cost

    def _block_cost(self, terms: Sequence[_Term]) -> float:
        numel = self.shape.numel()
        cost = 4.0 * numel
        for t in terms:
            if t.onehot:
                cost += 2 * numel + t.length * math.prod(f.shape[2] for f in t.dense)
            else:
                cost += t.length * numel
        return cost

    def _worth_keeping(self, terms: Sequence[_Term], keep: int, cost: float) -> bool:
        if len(terms) != 1 or terms[0].onehot or len(terms[0].dense) < 2:
            return False  # nothing to gain, or a shared parameter
        numel = self.shape.numel()
        size = max(4, terms[0].dense[0].element_size())
        return self.batch_size * numel * size <= keep and 60 * numel <= cost

    def _materialise_into(self, reuse: Optional[torch.Tensor]) -> torch.Tensor:
        term, dtype = self._terms[0], _dtype(*self._terms)
        numel = self.batch_size * self.shape.numel()
        if (
            len(self._terms) > 1
            or term.onehot
            or reuse is None
            or reuse.numel() < numel
            or (reuse.dtype, reuse.device) != (dtype, term.dense[0].device)
        ):
            return self.materialise().flatten(1)
        right = _row_products(_Term(tuple(term.dense[1:])), dtype)
        out = reuse.flatten()[:numel].view(self.batch_size, -1, right.shape[2])
        return torch.bmm(term.dense[0].to(dtype).mT, right, out=out).flatten(1)

    def _blockwise_square(self, terms: Sequence[_Term]) -> torch.Tensor:
        widths = max((t.widths for t in terms), key=len)
        terms = [_split(t, widths) for t in terms]
        axis = max(range(len(widths)), key=widths.__getitem__)
        size = self.batch_size * self.shape.numel() * 8
        on_cpu = _rows(terms[0].factors[0]).device.type == "cpu"
        bound = min(workspace(), 2**22) if on_cpu else workspace()  # stay in cache
        # A shared parameter never has its per-sample gradients in memory at once.
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
    rows = torch.cat([_rows(f) for f in factors], dim=1)
    return OneHot(rows, factors[0].size) if isinstance(factors[0], OneHot) else rows


def _by_segments(term: _Term) -> bool:
    return bool(term.onehot) and len(term.dense) <= 1


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=1).square()


def _combined_index(term: _Term) -> Tuple[torch.Tensor, int]:
    index, size = term.onehot[0]
    for other in term.onehot[1:]:
        index, size = index * other.size + other.index, size * other.size
    return index, size


def _own_square(term: _Term) -> torch.Tensor:
    if not _by_segments(term):
        return _inner(term, term)
    index, size = _combined_index(term)
    batch_size, length = index.shape
    rows = _row_products(term, _dtype(term)).flatten(0, 1)
    sample = torch.arange(batch_size, device=index.device)
    keys, segment = torch.unique(
        (sample[:, None] * size + index).flatten(), return_inverse=True
    )
    sums = rows.new_zeros(len(keys), rows.shape[1]).index_add_(0, segment, rows)
    norm = rows.new_zeros(batch_size)
    return norm.index_add_(0, keys // size, _square_sum(sums))


def _inner(u: _Term, v: _Term) -> torch.Tensor:
    """``sum_{t,t'} prod_k <u_k[t], v_k[t']>``, in chunks of t under the workspace."""
    if u.widths != v.widths:
        widths = max(u.widths, v.widths, key=len)
        u, v = _split(u, widths), _split(v, widths)
    dtype = _dtype(u, v)
    batch_size, itemsize = _rows(u.factors[0]).shape[0], dtype.itemsize
    step = max(1, workspace() // max(1, 2 * batch_size * v.length * itemsize))
    symmetric = u is v
    if symmetric:
        # Only one of the triangles: a chunk meets itself and, twice, what follows.
        step = min(step, max(64, math.ceil(u.length / 4)))
    total = 0
    for start in range(0, u.length, step):
        stop = start + step
        product = None
        for f, g in zip(u.factors, v.factors):
            if symmetric:
                g = _chunk(g, start, u.length)
            gram = _gram(_chunk(f, start, stop), g, dtype)
            product = gram if product is None else product.mul_(gram)
        if symmetric:
            product[:, :, step:] *= 2
        total = total + product.sum((1, 2))
    return total


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


def _add_outer(
    out: Optional[torch.Tensor], term: _Term, dtype: torch.dtype
) -> torch.Tensor:
    """Adds the outer products of ``term``, summed over T, to ``out``: [B, numel]."""
    batch_size = _rows(term.factors[0]).shape[0]
    if not term.onehot:
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

    index, size = _combined_index(term)
    leading = all(isinstance(f, OneHot) for f in term.factors[: len(term.onehot)])
    in_place = leading and out is not None
    if len(term.dense) <= 1:
        rows = _row_products(term, dtype)
        if in_place:
            table = out.view(batch_size * size, rows.shape[2])
        else:
            table = rows.new_zeros(batch_size * size, rows.shape[2])
        sample = torch.arange(batch_size, device=index.device)[:, None]
        flat = (sample * size + index).flatten()
        table.index_add_(0, flat, rows.flatten(0, 1))
        if in_place:
            return out
    else:
        first, *rest = term.dense
        width = math.prod(f.shape[2] for f in term.dense)
        table = first.new_zeros(batch_size, size, width, dtype=dtype)
        for i in index.unique().tolist():
            chosen = _Term((first * (index == i)[..., None], *rest))
            table[:, i] = _add_outer(None, chosen, dtype)
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
    """The whole batch as one sample of B * T rows, row b scaled by ``weights[b]``."""
    weights = weights.to(dtype)
    scaled = min(term.dense, key=lambda f: f.shape[2]) if term.dense else None
    factors: List[Factor] = []
    for f in term.factors:
        if isinstance(f, OneHot):
            factors.append(OneHot(f.index.reshape(1, -1), f.size))
            continue
        rows = f.to(dtype)
        if f is scaled:
            rows, scaled = rows * weights[:, None, None], None
        factors.append(rows.reshape(1, -1, f.shape[2]))
    if not term.dense:
        index = _rows(term.factors[0])
        factors.append(weights[:, None].expand(index.shape).reshape(1, -1, 1))
    return _Term(tuple(factors))


def _split(term: _Term, widths: Tuple[int, ...]) -> _Term:
    """Writes a materialised term so that it has one factor for each of ``widths``."""
    if term.widths == widths:
        return term
    if len(term.factors) != 1 or isinstance(term.factors[0], OneHot):
        raise ValueError(
            f"Uses with factor widths {term.widths} and {widths} of one parameter "
            "cannot be combined."
        )
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
