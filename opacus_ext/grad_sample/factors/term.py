"""What every structure of per-sample gradients must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Tuple

import torch

from opacus_ext.grad_sample.factors.rows import (
    OneHot,
    Size,
    entries,
    width_of,
)

if TYPE_CHECKING:
    from opacus_ext.grad_sample.factors.batched import Batched


class Norms(NamedTuple):
    """
    Attributes:
        squares: squared norms ``[B]``
        gradients: ``[B, numel]``, where the gradients were materialised for the norms
            and may be used instead of the term; else None
        num_bytes: memory that was spent on ``gradients``; 0 if they were there before
    """

    squares: torch.Tensor
    gradients: Optional[torch.Tensor] = None
    num_bytes: int = 0


class Term(ABC):
    """
    Per-sample gradients ``[B, numel]`` that are sums over rows of outer products of the
    factors of each row. A structure is a subclass: how rows are arranged, and how the
    four operations use it.

    Args:
        factors: one or more axes of the parameter each, left to right
    """

    # Whether ``resolved`` computes rows.
    deferred = False
    # Whether not even the rows of one sample need fit into memory; see columns.py.
    sliced = False

    def __init__(self, factors: Tuple[Any, ...]):
        self.factors = factors  # of the kinds that the structure takes
        self.dense: List = [f for f in factors if not isinstance(f, OneHot)]
        self.onehot: List[OneHot] = [f for f in factors if isinstance(f, OneHot)]

    # -- required: every structure has its own -----------------------------------------

    @abstractmethod
    def materialise(
        self, dtype: torch.dtype, out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """
        The gradients ``[B, numel]``, added to ``out`` in place if it is given, which
        may have any shape.
        """

    @abstractmethod
    def squared_norm(self, cache: int = 0) -> Norms:
        """
        Squared norms, the cheapest way; of at least one row.

        Args:
            cache: bytes that may be spent on gradients to be returned
        """

    @abstractmethod
    def inner(self, other: Term) -> torch.Tensor:
        """``[B]``, the inner products with the gradients of another term."""

    @abstractmethod
    def weighted_sum(
        self,
        weights: torch.Tensor,
        dtype: torch.dtype,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """
        The sum over samples of ``weights[b]`` times the gradient, ``numel`` entries of
        any shape, added to ``out`` in place if it is given.
        """

    @abstractmethod
    def resolved(self) -> Batched:
        """The same gradients as batched rows that are there."""

    @abstractmethod
    def without(self, samples: torch.Tensor) -> Term:
        """Zeros in the place of some samples, ``[B]`` of bool."""

    # -- optional: right for all, where a structure does not know better ---------------

    @property
    def batch_size(self) -> Size:
        """Number of samples."""
        return entries(self.factors[0]).shape[0]

    @property
    def length(self) -> Size:
        """Rows of a sample."""
        return entries(self.factors[0]).shape[1]

    @property
    def widths(self) -> Tuple[Size, ...]:
        """Size of a row of each factor."""
        return tuple(map(width_of, self.factors))

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return entries(self.factors[0]).device

    def flat(self) -> Optional[torch.Tensor]:
        """The gradients, if they are there and nothing is to be computed; else None."""
        return None

    def part(self, shape: torch.Size, samples: slice, columns: slice) -> Term:
        """
        The gradients of some samples for some rows of the parameter's first axis.

        Args:
            shape: of the parameter
        """
        return self.resolved().part(shape, samples, columns)


def dtype_of(*terms: Term) -> torch.dtype:
    """The type that norms of these terms are accumulated in: float32 or wider."""
    dtype = torch.float32
    for f in (f for t in terms for f in t.dense):
        dtype = torch.promote_types(dtype, f.dtype)
    return dtype
