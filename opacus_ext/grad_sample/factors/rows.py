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
from torch.nn import functional as F

from opacus_ext.refused import check_number

T = torch.Tensor
_workspace = 64 * 2**20


@final
class OneHot(NamedTuple):
    """Rows ``[B, T, size]`` that are one at ``index`` ``[B, T]`` and zero elsewhere."""

    index: T
    size: int


Factor = Union[T, OneHot]  # dense rows are [B, T, width]
# What gradients of a parameter are divided by before clipping: the outer product of
# vectors, each for one axis of the parameter or several in a row.
Scale = Sequence[T]


def entries(factor: Factor) -> T:
    """Returns ``[B, T, ...]``: the index of one-hot rows, or the dense rows."""
    if type(factor) is OneHot:
        return factor.index
    return factor


def cut(factor: Factor, where: Any) -> Factor:
    """Indexes the rows of a factor."""
    if type(factor) is OneHot:
        return OneHot(factor.index[where], factor.size)
    return factor[where]


def joined(factors: Sequence[Factor]) -> Factor:
    """Concatenates the rows of factors of one kind."""
    first = factors[0]
    if len(factors) == 1:
        return first
    rows = torch.cat(list(map(entries, factors)), dim=1)
    if type(first) is OneHot:
        return OneHot(rows, first.size)
    return rows


def width_of(factor: Factor) -> int:
    """Returns the size of a row."""
    if type(factor) is OneHot:
        return factor.size
    return factor.shape[2]


def inverse_of(scale: Scale) -> T:
    """Returns the inverse of each entry of a parameter's scale ``[numel]``."""
    inverse = 1 / scale[0].flatten()
    for vector in scale[1:]:
        inverse = torch.outer(inverse, 1 / vector.flatten()).flatten()
    return inverse


def inverses_of(scale: Scale, widths: Sequence[int]) -> list[T] | None:
    """
    Returns the inverse of a scale as one vector for each factor, given their widths.
    None if the vectors of the scale are not each within one factor.
    """
    inverses: list[T] = []
    left = list(scale)
    for width in widths:
        vectors: list[T] = []
        size = 1
        while left and (size < width or left[0].numel() == 1):
            vectors.append(left.pop(0))
            size *= vectors[-1].numel()
        if size != width:
            return None
        one = scale[0].new_ones(1)
        inverses.append(inverse_of([one, *vectors]))
    return inverses


def upcast(tensor: T) -> T:
    """Converts half precision to float32, in which norms are accumulated."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


def dtype_of(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the dtype in which norms are accumulated: float32 or wider."""
    widest = torch.float32
    for dtype in dtypes:
        if dtype != widest:
            widest = torch.promote_types(widest, dtype)
    return widest


class HasDtype(Protocol):
    """A tensor, or what has a dtype in which norms are accumulated."""

    @property
    def dtype(self) -> torch.dtype: ...


def real_rows(x: T) -> T:
    """Returns the entries of each sample ``[B, n]``, as real numbers, upcast."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = upcast(x)
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def common_dtype(operands: Iterable[HasDtype]) -> torch.dtype:
    """Returns the dtype in which norms over several operands are accumulated."""
    return dtype_of(*[operand.dtype for operand in operands])


def product(sizes: Iterable[int]) -> int:
    """Multiplies sizes; ``torch.compile`` does not support ``math.prod``."""
    number = 1
    for size in sizes:
        number *= size
    return number


def rows_product(left: T, right: T) -> T:
    """Returns the outer products of rows, flattened: ``[..., product of widths]``."""
    products = left[..., None] * right[..., None, :]
    return products.flatten(-2)


# torch adds squares one after another on a CPU: in float32 the norm of 4e7 entries is
# off by 0.3 to 8 %. It is off by 6e-5 at most if long rows are cut into parts.
_PART = 2**12
# The longest rows that are not cut, contiguous and strided.
_MOST = 2**16
_MOST_STRIDED = 2**12


def sample_norms(tensor: T, dtype: torch.dtype | None = None) -> T:
    """
    Returns the norms ``[B]`` of the samples ``[B, ...]``: in ``dtype``, which half
    precision needs and others may have, as it is float32 or wider.
    """
    rows = tensor
    if rows.dim() != 2:
        rows = rows.flatten(1)
    size = rows.shape[1]
    most = _MOST if rows.stride(1) == 1 else _MOST_STRIDED
    if size <= most or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    if dtype is not None:
        rows = rows.to(dtype)
    end = size // _PART * _PART
    parts = rows[:, :end].unflatten(1, (-1, _PART))
    norms = torch.linalg.vector_norm(parts, dim=2)
    # The entries of an incomplete last part are their own norms.
    norms = torch.cat([norms, rows[:, end:]], dim=1)
    return sample_norms(norms)


def square_sum(tensor: T) -> T:
    """Returns the squared norms ``[B]`` of the samples ``[B, ...]``."""
    return sample_norms(tensor).square_()


def scaled_norms(rows: T) -> T:
    """Returns the norms ``[B]`` of rows ``[B, n]``, whose squares may be too large."""
    if not rows.shape[1]:
        return sample_norms(rows)
    largest = rows.abs().amax(1, keepdim=True)
    # Rows of zeros would be divided by zero, and an infinite entry by infinity.
    is_scale = (largest > 0) & largest.isfinite()
    scale = torch.where(is_scale, largest, 1)
    return sample_norms(rows / scale) * scale.squeeze(1)


def norm_of_each(tensors: list[T]) -> list[T]:
    """Returns the norm of each tensor; all must be float32 or wider."""
    if not tensors or any(tensor.device.type == "cpu" for tensor in tensors):
        return [sample_norms(tensor.reshape(1, -1))[0] for tensor in tensors]
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
    check_number("num_bytes", num_bytes)
    before, _workspace = _workspace, int(num_bytes)
    return _Bound(before)


# -- squares ---------------------------------------------------------------------------

#: The share of its value by which a square may be wrong that is certain.
ROUNDING = 2.0**-9
# A square is certain if it is at least this many units of rounding, times the sum of
# the absolute values of the products that were added up to it. An inner product of rows
# of 250,000 entries was wrong by 150 units.
_OF_PRODUCTS = 2.0**15
# The units for each entry of bfloat16 rows: tensor cores round toward zero, which adds
# up (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores").
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
        if least is None:
            least = part.least
        elif part.least is not None:
            least = least + part.least
    return Squares(values, least)


def least_of_entries(size: T, dtype: torch.dtype) -> T:
    """
    Returns :attr:`Squares.least` of materialized gradients, given a bound ``[B]`` of
    the sum of the norms of their terms.
    """
    units = _OF_ENTRIES * torch.finfo(dtype).eps
    return (size * units).square_()


# -- products --------------------------------------------------------------------------

_backends: Any = getattr(torch, "backends")
# Devices that sum products of bfloat16 in float32: no product is rounded.
_WIDE_SUMS = {"cuda"} if "dtype" in torch.ops.aten.bmm.overloads() else set()


def sums_wide(*factors: T) -> bool:
    """Returns True for bfloat16 rows whose products the device sums in float32."""
    for rows in factors:
        if rows.dtype != torch.bfloat16 or rows.device.type not in _WIDE_SUMS:
            return False
    return True


def times(
    left: T,
    right: T,
    dtype: torch.dtype,
) -> T:
    """Returns ``left @ right`` for each sample, with products and sums in ``dtype``."""
    if left.dtype == dtype and right.dtype == dtype:
        return torch.bmm(left, right)
    if dtype == torch.float32 and sums_wide(left, right):
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


# A GPU multiplies rows of bfloat16 fast if they begin at multiples of 16 bytes. Of
# narrower rows a copy is not worth its launch.
_ALIGNED = 8
_WIDE_ROWS = 2**10


def may_write_out() -> bool:
    """Returns True if ops may write to memory given as ``out``."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled()


def wide_product(left: T, right: T) -> T:
    """Returns ``left^T @ right`` of bfloat16 rows ``[n, width]``, summed in float32."""
    return times(left[None].mT, right[None], torch.float32)[0]


def column_blocks(
    *factors: T,
    made: int = 0,
) -> Iterator[tuple[slice, list[T]]]:
    """
    Yields all columns of bfloat16 rows ``[..., width]``, in blocks that fit into the
    workspace, of one factor or of several. Blocks of rows that are not aligned, as
    those of 50,257 words, are copies, of which the last is padded with zeros.

    Args:
        made: bytes of what is made of a column
    """
    width = factors[0].shape[-1]
    # Rows are multiplied by themselves most often, and copied once then.
    distinct = {id(rows): rows for rows in factors}
    copied = width >= _WIDE_ROWS and not all(map(_is_aligned, factors))
    column_bytes = made
    if copied:
        column_bytes += sum(2 * rows[..., 0].numel() for rows in distinct.values())
    if not may_write_out() or not column_bytes:
        yield slice(0, width), list(factors)
        return
    step = max(_ALIGNED, _workspace // column_bytes // _ALIGNED * _ALIGNED)
    for start in range(0, width, step):
        columns = slice(start, min(start + step, width))
        blocks = {key: rows[..., columns] for key, rows in distinct.items()}
        if copied:
            blocks = {key: _aligned(block) for key, block in blocks.items()}
        yield columns, [blocks[id(rows)] for rows in factors]


def _is_aligned(rows: T) -> bool:
    return rows.stride(-1) != 1 or rows.stride(-2) % _ALIGNED == 0


def _aligned(block: T) -> T:
    """Copies some columns, padded with zeros if needed."""
    padding = -block.shape[-1] % _ALIGNED
    if padding:
        return F.pad(block, (0, padding))
    return block.contiguous()


def weighted_halves(rows: T, weights: T) -> T:
    """
    Multiplies rows ``[B, T, width]`` and weights ``[B]``, both bfloat16, exactly.
    Returns ``[B, T, 2 * width]``: bfloat16 with the upper bits of the products, and
    beside it what these are larger by.
    """
    weights = weights[:, None, None]
    if not may_write_out():
        # A compiler takes out a cast to bfloat16 and back, but not a change of bits.
        exact = rows.float() * weights.float()
        upper = rounded_down(exact)
        return torch.cat([upper.bfloat16(), (upper - exact).bfloat16()], dim=2)
    halves = rows.new_empty(*rows.shape[:2], 2 * rows.shape[2])
    upper, excess = halves.chunk(2, dim=2)
    torch.mul(rows, weights, out=upper)
    # It is computed in float32, and has no more than 8 bits.
    torch.addcmul(upper, rows, weights, value=-1, out=excess)
    return halves


def rounded_down(factors: T) -> T:
    """Rounds positive numbers to 8 bits, toward zero: they are bfloat16 then."""
    bits = factors.float().view(torch.int32)
    # bfloat16 is the upper half of a float32.
    return (bits & -(2**16)).view(torch.float32)


def tf32_settings(device: torch.device | None = None) -> list[tuple]:
    """
    Returns the settings that make float32 products less precise (TF32). Each is a
    function that sets it, its value, and the value for full precision. Those of
    convolutions are among them if a CUDA device is given.
    """
    cudnn = _backends.cudnn
    settings: list[tuple] = []
    try:
        before = torch.get_float32_matmul_precision()
        if before != "highest":
            settings.append((torch.set_float32_matmul_precision, before, "highest"))
        if device is not None and device.type == "cuda" and cudnn.allow_tf32:
            settings.append((partial(setattr, cudnn, "allow_tf32"), True, False))
    except RuntimeError:
        # The precision was set by the names of torch 2.9, which exclude the older ones.
        name = "fp32_precision"
        matmuls = _backends.cuda.matmul, _backends.mkldnn.matmul
        for backend in (*matmuls, cudnn.conv, cudnn.rnn):
            before = getattr(backend, name)
            if before != "ieee":
                settings.append((partial(setattr, backend, name), before, "ieee"))
    return settings


def full_precision(device: torch.device | None = None) -> ContextManager:
    """
    Within it, float32 is multiplied without rounding it first; see
    :func:`tf32_settings`. It does nothing where code is being compiled: enter it
    around the call of compiled code.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    settings = tf32_settings(device)
    if not settings:
        return nullcontext()
    return _changed(settings)


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
    left: Sequence[Factor],
    right: Sequence[Factor] | None,
    dtype: torch.dtype,
) -> Squares:
    """
    Returns ``sum_{t,t'} prod_k <left_k[t], right_k[t']>`` for each sample, computed in
    chunks of t that fit into the workspace. If ``right`` is None it equals ``left``.
    """
    others = left if right is None else right
    first = entries(left[-1])
    batch_size, length = first.shape[:2]
    # Two Gram matrices are in memory at a time: a factor's own, and their product.
    width = entries(others[-1]).shape[1]
    row_bytes = 2 * batch_size * width * dtype.itemsize
    step = length
    if length * row_bytes > _workspace:
        step = max(1, _workspace // max(1, row_bytes))
    if right is None and length > _FEWEST_AT_ONCE:
        # One triangle suffices: a chunk with itself, and twice with later ones.
        step = min(step, chunk(length, first.device))
    values = absolute = None
    for start in range(0, length, step or 1):
        some, later = left, others
        if step < length:
            some = _some_rows(left, slice(start, start + step))
        if right is None and start:
            later = _some_rows(others, slice(start, None))
        product: Any = None
        for pair in zip(some, later):
            gram = _gram(*pair, dtype)
            product = gram if product is None else product.mul_(gram)
        if right is None and step < length:
            product[:, :, step:].mul_(2)
        squares = product.sum((1, 2))
        if first.device.type in _WIDE_SUMS and not torch.compiler.is_compiling():
            # This reads the product once, but is slow on a CPU.
            sizes = torch.linalg.vector_norm(product, 1, (1, 2))
        else:
            sizes = product.abs_().sum((1, 2))
        if values is None or absolute is None:
            values, absolute = squares, sizes
        else:
            values, absolute = values + squares, absolute + sizes
    if values is None or absolute is None:
        return Squares(first.new_zeros(batch_size, dtype=dtype))
    units = _OF_PRODUCTS
    if first.device.type in _WIDE_SUMS:
        units = max(units, _OF_WIDE_PRODUCTS * max(map(_width_of_wide, left)))
    return Squares(values, absolute * (units * torch.finfo(dtype).eps))


def _some_rows(factors: Sequence[Factor], rows: slice) -> list[Factor]:
    return [cut(factor, (slice(None), rows)) for factor in factors]


def _width_of_wide(factor: Factor) -> int:
    """Returns the width of rows that :func:`sums_wide` is true for, or 0."""
    if isinstance(factor, T) and sums_wide(factor):
        return factor.shape[2]
    return 0


# The fewest rows of a triangle of Gram matrices that are multiplied at once.
_FEWEST_AT_ONCE = 128


def chunk(length: int, device: torch.device) -> int:
    """Returns how many rows of a triangle of Gram matrices are multiplied at once."""
    fewest = _FEWEST_AT_ONCE if device.type == "cpu" else 512
    return max(fewest, math.ceil(length / 4))


def _gram(
    left: Factor,
    right: Factor,
    dtype: torch.dtype,
) -> T:
    """Returns ``<left[t], right[t']>`` as ``[B, T, T']``."""
    if type(left) is OneHot and type(right) is OneHot:
        are_equal = left.index[:, :, None] == right.index[:, None, :]
        return are_equal.to(dtype)
    if type(left) is OneHot:
        return _gram(right, left, dtype).mT.contiguous()
    if type(right) is OneHot:
        # A product with one-hot rows is a look-up.
        index = right.index.unsqueeze(1).expand(-1, left.shape[1], -1)
        return left.gather(2, index).to(dtype)
    if left.shape[1] < _FEWEST_AT_ONCE or not sums_wide(left, right):
        return times(left, right.mT, dtype)
    gram: Any = None
    for _, (block, other) in column_blocks(left, right):
        part = times(block, other.mT, dtype)
        gram = part if gram is None else gram.add_(part)
    return gram
