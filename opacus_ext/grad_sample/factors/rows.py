"""Factors: the rows whose outer products add up to a per-sample gradient.

Norms need inner products of rows: of all pairs, in Gram matrices (:func:`inner`), or
of rows with the same place (places.py).
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import (
    Any,
    ContextManager,
    Iterable,
    Iterator,
    NamedTuple,
    Protocol,
    Sequence,
    Union,
    final,
)

import torch

from opacus_ext.refused import Refused

T = torch.Tensor
_workspace = 64 * 2**20


@final
class OneHot(NamedTuple):
    """Rows ``[B, T, size]`` that are one at ``index`` ``[B, T]`` and zero elsewhere."""

    index: T
    size: int


Factor = Union[T, OneHot]  # dense rows are [B, T, width]


def entries(factor: Factor) -> T:
    """Returns ``[B, T, ...]``: the index of one-hot rows, or the dense rows."""
    return factor.index if type(factor) is OneHot else factor


def cut(factor: Factor, where: Any) -> Factor:
    """Indexes the rows of a factor."""
    rows = entries(factor)[where]
    return OneHot(rows, factor.size) if isinstance(factor, OneHot) else rows


def joined(factors: Sequence[Factor]) -> Factor:
    """Concatenates the rows of factors of one kind."""
    if len(factors) == 1:
        return factors[0]
    rows = torch.cat([entries(f) for f in factors], dim=1)
    return OneHot(rows, width_of(factors[0])) if rows.dim() == 2 else rows


def width_of(factor: Factor) -> int:
    """Returns the size of a row."""
    return factor.size if type(factor) is OneHot else factor.shape[2]


def upcast(x: T) -> T:
    """Converts half precision to float32, in which norms are accumulated."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dtype_of(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the dtype in which norms are accumulated: float32 or wider."""
    found = torch.float32
    for dtype in dtypes:
        if dtype != found:
            found = torch.promote_types(found, dtype)
    return found


class HasDtype(Protocol):
    """A tensor, or what has a dtype in which norms are accumulated."""

    @property
    def dtype(self) -> torch.dtype: ...


def common_dtype(operands: Iterable[HasDtype]) -> torch.dtype:
    """Returns the dtype in which norms over several operands are accumulated."""
    return dtype_of(*[operand.dtype for operand in operands])


def product(sizes: Iterable[int]) -> int:
    """Multiplies sizes; ``torch.compile`` does not support ``math.prod``."""
    found = 1
    for size in sizes:
        found *= size
    return found


def rows_product(left: T, right: T) -> T:
    """Returns the outer products of rows, flattened: ``[..., product of widths]``."""
    return (left[..., None] * right[..., None, :]).flatten(-2)


def steps(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Yields the start and stop of each chunk of an axis."""
    for start in range(0, size, step):
        yield start, min(start + step, size)


#: torch adds squares one after another on a CPU: in float32 the norm of 4e7 is off by
#: 0.3 to 8 %. Longer rows, contiguous or strided, are cut into parts: 6e-5 at most.
_MOST, _MOST_STRIDED, _PART = 2**16, 2**12, 2**12


def sample_norms(x: T) -> T:
    """Returns the norms ``[B]`` of the samples ``[B, ...]``, in float32 or wider."""
    x = x if x.dim() == 2 else x.flatten(1)
    size, end = x.shape[1], x.shape[1] // _PART * _PART
    most = _MOST if x.stride(1) == 1 else _MOST_STRIDED
    if size <= most or x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.linalg.vector_norm(x, dim=1)
    norms = torch.linalg.vector_norm(x[:, :end].unflatten(1, (-1, _PART)), dim=2)
    return sample_norms(norms if end == size else torch.cat([norms, x[:, end:]], 1))


def square_sum(x: T) -> T:
    """Returns the squared norms ``[B]`` of the samples ``[B, ...]``."""
    return sample_norms(x).square_()


def scaled_norms(x: T) -> T:
    """Returns the norms ``[B]`` of rows ``[B, n]``, whose squares may be too large."""
    largest = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_ones(len(x), 1)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
    return sample_norms(x / scale) * scale.squeeze(1)


def norm_of_each(tensors: list[T]) -> list[T]:
    """Returns the norm of each tensor; all must be float32 or wider."""
    if not tensors or any(x.device.type == "cpu" for x in tensors):
        return [sample_norms(x.reshape(1, -1))[0] for x in tensors]
    return list(torch._foreach_norm(tensors))


# -- memory ----------------------------------------------------------------------------


class _Bound(int):
    """A bound that is restored where a ``with`` block ends."""

    def __enter__(self) -> int:
        return self

    def __exit__(self, *exception: Any) -> None:
        workspace(self)


def workspace(num_bytes: int | None = None) -> int:
    """
    Sets how many bytes temporary per-sample gradients may occupy, which trades memory
    for time. Results do not depend on it.

    It bounds the blocks in which norms are computed. In "ghost_bk" it also bounds the
    per-sample gradients that are cached between the norms and the clipped sum.

    Args:
        num_bytes: the new bound, permanent or for a ``with`` block; None only reads it

    Returns:
        The bound in bytes before the call.

    Raises:
        Refused: if ``num_bytes`` is not positive

    Example:
        >>> import opacus_ext
        >>> before = opacus_ext.workspace(256 * 2**20)
        >>> opacus_ext.workspace(before) == 256 * 2**20
        True
        >>> with opacus_ext.workspace(2**20):
        ...     print(opacus_ext.workspace())
        1048576
        >>> opacus_ext.workspace() == before
        True
    """
    global _workspace
    if num_bytes is None:
        return _workspace
    if num_bytes <= 0:
        raise Refused(
            f"The workspace must be positive, got {num_bytes} bytes.",
            parameter="num_bytes",
            remedy="Results do not depend on it; the default is 64 MiB.",
        )
    before, _workspace = _workspace, int(num_bytes)
    return _Bound(before)


# -- squares ---------------------------------------------------------------------------

#: The share of its value by which a square may be wrong that is certain.
ROUNDING = 2.0**-9
# A square is certain if it is at least this many units of rounding, times the sum of
# the absolute values of the products that were added up to it. An inner product of rows
# of 250,000 entries was wrong by 150 units.
_OF_PRODUCTS = 2.0**15
# Units for each entry of bfloat16 rows: tensor cores round toward zero, which adds up
# (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores").
_OF_WIDE_PRODUCTS = 16.0
# The same for the entries of materialized gradients, of which squares are taken.
_OF_ENTRIES = 2.0**10


class Squares(NamedTuple):
    """
    Squared norms of per-sample gradients.

    Attributes:
        values: ``[B]``, which rounding may make negative where terms cancel
        least: ``[B]``; a value below it may be wrong by more than :data:`ROUNDING`, its
            norm by half of that. None if no terms were added up
    """

    values: T
    least: T | None = None


def added(parts: Sequence[Squares]) -> Squares:
    """Adds the squares of different entries, or terms, of the same gradients."""
    values, least = parts[0]
    for part in parts[1:]:
        values = values + part.values
        if part.least is not None:
            least = part.least if least is None else least + part.least
    return Squares(values, least)


def least_of_entries(size: T, dtype: torch.dtype) -> T:
    """
    Returns :attr:`Squares.least` of materialized gradients, given a bound ``[B]`` of
    the sum of the norms of their terms.
    """
    return (size * (_OF_ENTRIES * torch.finfo(dtype).eps)).square_()


# -- products --------------------------------------------------------------------------

# Devices that sum products of bfloat16 in float32: no product is rounded.
_backends: Any = getattr(torch, "backends")
_WIDE_SUMS = {"cuda"} if "dtype" in torch.ops.aten.bmm.overloads() else set()


def sums_wide(*factors: T) -> bool:
    """Returns True for bfloat16 rows whose products the device sums in float32."""
    for f in factors:
        if f.dtype != torch.bfloat16 or f.device.type not in _WIDE_SUMS:
            return False
    return True


def times(left: T, right: T, dtype: torch.dtype) -> T:
    """Returns ``left @ right`` for each sample, with products and sums in ``dtype``."""
    if left.dtype == dtype and right.dtype == dtype:
        return torch.bmm(left, right)
    if dtype == torch.float32 and sums_wide(left, right):
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


def rounded_down(factors: T) -> T:
    """Rounds positive numbers to 8 bits, toward zero: they are bfloat16 then."""
    return (factors.float().view(torch.int32) & -(2**16)).view(torch.float32)


def tf32_settings(device: torch.device | None = None) -> list[tuple]:
    """
    Returns the settings that make float32 products less precise (TF32). Each is a
    function that sets it, its value, and the value for full precision. Those of
    convolutions are among them if a CUDA device is given.
    """
    cudnn, found = _backends.cudnn, list[tuple[Any, Any, Any]]()
    try:
        before = torch.get_float32_matmul_precision()
        if before != "highest":
            found.append((torch.set_float32_matmul_precision, before, "highest"))
        if device is not None and device.type == "cuda" and cudnn.allow_tf32:
            found.append((partial(setattr, cudnn, "allow_tf32"), True, False))
        return found
    except RuntimeError:  # it was set by the names of torch 2.9
        name, cpu = "fp32_precision", _backends.mkldnn
        for x in (_backends.cuda.matmul, cpu.matmul, cudnn.conv, cudnn.rnn):
            found.append((partial(setattr, x, name), getattr(x, name), "ieee"))
        return [each for each in found if each[1] != each[2]]


def full_precision(device: torch.device | None = None) -> ContextManager:
    """
    Within it, float32 is multiplied without rounding it first; see
    :func:`tf32_settings`. It does nothing where code is being compiled: enter it
    around the call of compiled code.
    """
    changes = [] if torch.compiler.is_compiling() else tf32_settings(device)
    return _changed(changes) if changes else nullcontext()


@contextmanager
def _changed(settings: list[tuple]) -> Iterator[None]:
    """Changes settings, see :func:`tf32_settings`, within a block."""
    for change, _, precise in settings:
        change(precise)
    try:
        yield
    finally:
        for change, before, _ in settings:
            change(before)


# -- inner products --------------------------------------------------------------------


def inner(
    left: Sequence[Factor], right: Sequence[Factor] | None, dtype: torch.dtype
) -> Squares:
    """
    Returns ``sum_{t,t'} prod_k <left_k[t], right_k[t']>`` for each sample, computed in
    chunks of t that fit into the workspace. If ``right`` is None it equals ``left``.
    """
    symmetric, first = right is None, entries(left[-1])
    others = left if right is None else right
    batch_size, rows = first.shape[:2]
    row_bytes = 2 * batch_size * entries(others[-1]).shape[1] * dtype.itemsize
    step = rows
    if rows * row_bytes > _workspace:
        step = max(1, _workspace // max(1, row_bytes))
    if symmetric and rows > _FEWEST_AT_ONCE:  # one triangle suffices: each chunk with
        step = min(step, chunk(rows, first.device))  # itself and twice with later ones
    values = absolute = None
    for start in range(0, rows, step or 1):
        stop, later = start + step, others
        some = left if step >= rows else _some_rows(left, slice(start, stop))
        if symmetric and start:
            later = _some_rows(others, slice(start, None))
        product: Any = None
        for f, g in zip(some, later):
            gram = _gram(f, g, dtype)
            product = gram if product is None else product.mul_(gram)
        if symmetric and step < rows:
            product[:, :, step:].mul_(2)
        squares = product.sum((1, 2))
        sizes = product.abs_().sum((1, 2))
        values = squares if values is None else values + squares
        absolute = sizes if absolute is None else absolute + sizes
    if values is None or absolute is None:
        return Squares(first.new_zeros(batch_size, dtype=dtype))
    units = _OF_PRODUCTS
    if first.device.type in _WIDE_SUMS:
        units = max(units, _OF_WIDE_PRODUCTS * max(map(_width_of_wide, left)))
    return Squares(values, absolute * (units * torch.finfo(dtype).eps))


def _some_rows(factors: Sequence[Factor], rows: slice) -> list[Factor]:
    return [cut(f, (slice(None), rows)) for f in factors]


def _width_of_wide(factor: Factor) -> int:
    """Returns the width of rows that :func:`sums_wide` is true for, or 0."""
    return factor.shape[2] if isinstance(factor, T) and sums_wide(factor) else 0


#: The fewest rows of a triangle of Gram matrices that are multiplied at once.
_FEWEST_AT_ONCE = 128


def chunk(rows: int, device: torch.device) -> int:
    """Returns how many rows of a triangle of Gram matrices are multiplied at once."""
    fewest = _FEWEST_AT_ONCE if device.type == "cpu" else 512
    return max(fewest, math.ceil(rows / 4))


def _gram(f: Factor, g: Factor, dtype: torch.dtype) -> T:
    """Returns ``<f[t], g[t']>`` as ``[B, T, T']``."""
    if type(f) is OneHot and type(g) is OneHot:
        return (f.index[:, :, None] == g.index[:, None, :]).to(dtype)
    if type(f) is OneHot:
        return _gram(g, f, dtype).mT.contiguous()
    if type(g) is OneHot:
        index = g.index[:, None, :].expand(-1, f.shape[1], -1)
        return f.gather(2, index).to(dtype)
    return times(f, g.mT, dtype)
