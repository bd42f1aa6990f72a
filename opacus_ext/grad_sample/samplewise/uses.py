"""How ops have used what is made of parameters: together the per-sample gradients.

What an op makes of parameters and data is passed through a node of autograd,
:class:`Capture`, that keeps the data and is shown the gradient: they are the factors of
the per-sample gradients (factors.py).
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Callable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch.autograd.graph import get_gradient_edge

from opacus_ext.grad_sample.factors import Factor
from opacus_ext.grad_sample.rules.registry import Op

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.run import Run


class Root:
    """
    Something made of parameters, as a run has met it: a parameter, a view of one or
    what was computed of some.

    Args:
        tensor: with its graph
        attached: whether gradients of the whole batch will be asked for
    """

    def __init__(self, tensor: torch.Tensor, attached: bool):
        self.tensor, self.version = tensor, tensor._version
        # Of what is changed in place later, as it is now.
        self.edge = None if tensor.is_leaf else get_gradient_edge(tensor)
        self.shape = tensor.shape
        self.shared = tensor.detach()
        if attached:
            self.shared.requires_grad_()
        self.recipe: Optional[Tuple[Op, Tuple[Optional[Root], ...]]] = None
        self.same: Optional["Root"] = None  # whose entries it has


FactorsFn = Callable[..., Sequence[Optional[Tuple[Factor, ...]]]]


class RowTable(NamedTuple):
    """
    Rows of some samples each, as experts are given them.

    Attributes:
        samples: of each row, ``[rows]``
        size: the number of samples
        by_sample: ``(factors, samples, size)``: factors of rows as those of samples
    """

    samples: torch.Tensor
    size: int
    by_sample: Callable[..., Tuple[Factor, ...]]


class Use(NamedTuple):
    """
    How an op used roots.

    Attributes:
        roots: in the order of the factors
        factors: ``(backprops, *saved)``, all ``[B, T, *event]``, to one tuple of
            factors a root
        rows: how many dims of the output, behind that of the samples, are rows
        saved_rows: the same of each saved tensor
        table: of rows that were sent to experts, whose they are
    """

    run: "Run"
    roots: Tuple[Optional[Root], ...]
    factors: FactorsFn
    rows: int
    saved_rows: Tuple[int, ...]
    table: Optional[RowTable] = None

    @property
    def size(self) -> int:
        """The number of samples that are told apart."""
        return self.run.size if self.table is None else self.table.size

    def uses(
        self, backprops: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> List[Tuple[Root, Tuple[Factor, ...]]]:
        """The factors of each root's per-sample gradients."""
        arranged = [by_sample(x, n) for x, n in zip(saved, self.saved_rows)]
        found = self.factors(by_sample(backprops, self.rows), *arranged)
        if self.table is not None:
            samples, size, by_table = self.table
            found = [f if f is None else by_table(f, samples, size) for f in found]
        return [(r, f) for r, f in zip(self.roots, found) if r is not None]


def by_sample(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``[B, *rows, *event]`` -> ``[B, T, *event]``"""
    if rows == 1:
        return x
    return x.unsqueeze(1) if rows == 0 else x.flatten(1, rows)


class Capture(torch.autograd.Function):
    """Behind what an op made: keeps the data, shows the gradient to the run."""

    @staticmethod
    def forward(ctx, y, anchor, use, *saved):
        ctx.use = use
        # Kept as any activation: checkpointing may drop it, and a later change in
        # place is noticed.
        ctx.save_for_backward(*saved)
        return y.detach()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        use = ctx.use
        use.run.engine.deliver(use, grad, saved)
        return (grad, None, None) + (None,) * len(saved)
