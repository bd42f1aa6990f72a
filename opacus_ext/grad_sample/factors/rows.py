"""Factors: the rows of which per-sample gradients are outer products."""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple, Union

import torch

Size = Union[int, torch.SymInt]


def known(size: Size) -> int:
    """
    A size, to choose by: in a program that is compiled for any batch what it is in the
    first, so that choices don't bind the program to it.
    """
    return size.node.hint if isinstance(size, torch.SymInt) else size


def wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision is widened: norms are accumulated in float32 or better."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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

    def without(self, samples: torch.Tensor) -> Lazy:
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

    def without(self, samples: torch.Tensor) -> Columns:
        """Zeros in the place of some samples, ``[B]`` of bool."""

        def make(start: Optional[int], stop: Optional[int], columns: slice):
            rows = self._columns(start, stop, columns)
            return rows.masked_fill(samples[start:stop, None, None], 0)

        return Columns(make, self.dtype, self.device, tuple(self.shape))


Factor = Union[torch.Tensor, OneHot, Blocks, Ragged, Lazy]
Rows = Union[torch.Tensor, OneHot]  # that are there: no more to be computed


def entries(factor: Factor) -> torch.Tensor:
    """``[B, T, ...]``: the index of one-hot rows, dense ones as they are."""
    return factor.index if isinstance(factor, OneHot) else factor


def with_entries(factor: Rows, rows: torch.Tensor) -> Rows:
    """A factor of the same kind with other rows."""
    return OneHot(rows, factor.size) if isinstance(factor, OneHot) else rows


def width_of(factor: Factor) -> Size:
    """Size of a row."""
    return factor.size if isinstance(factor, OneHot) else factor.shape[2]


def of_samples(factor: Any, start: Size, stop: Optional[Size]) -> Rows:
    """The rows of the samples from ``start`` to ``stop``, computed."""
    if isinstance(factor, Lazy):
        return factor.rows(start, stop)
    return with_entries(factor, entries(factor)[start:stop])


def of_places(factor: Rows, start: Size, stop: Size) -> Rows:
    """The rows from ``start`` to ``stop`` of every sample."""
    return with_entries(factor, entries(factor)[:, start:stop])


def steps(size: Size, step: int) -> Iterator[Tuple[Size, Size]]:
    """Where the parts of an axis begin and end; of one of any size there is one."""
    if isinstance(size, torch.SymInt):
        yield 0, size
        return
    for start in range(0, size, step):
        yield start, min(start + step, size)


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


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """Squared norms ``[B]`` of what each sample has, ``[B, ...]``."""
    x = x if x.dim() == 2 else x.flatten(1)
    return torch.linalg.vector_norm(x, dim=1).square_()


def num_bytes(x: torch.Tensor) -> int:
    """Memory of the entries of a tensor."""
    return known(x.numel()) * x.dtype.itemsize
