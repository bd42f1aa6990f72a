"""What meets data in a run of samples, and how: values made of parameters, their uses.

An op that makes something of a parameter and of data is one *use* of the parameter. The
gradient of the op's output, with the data that were kept, are the factors of the
per-sample gradients (factors/).
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.autograd.graph import GradientEdge

from opacus_ext.grad_sample.factors import Factor
from opacus_ext.refused import Refused


class View(NamedTuple):
    """
    A view of a parameter in which no entry is repeated.

    Attributes:
        param: the parameter
        axes: for each axis of the view that of the parameter; None where strides do not
            tell
        starts: where the view begins on each axis of the parameter
    """

    param: torch.Tensor
    axes: Optional[Tuple[int, ...]]
    starts: Tuple[int, ...]


class ParameterValue:
    """
    A parameter, a view of one, or what was computed from parameters without data.

    Args:
        tensor: with its graph

    Attributes:
        shared: the same value, which the samples compute with
        edge: where the gradient of the value goes on to parameters; None of a leaf
        version: of ``tensor``, which may be changed in place later
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.shape = tensor, tensor.shape
        self.version: Optional[int] = None
        self.edge: Optional[GradientEdge] = None
        self.shared = tensor.detach()

    def leaves(self) -> List[torch.Tensor]:
        """What it was computed from; itself if it is a leaf."""
        return [self.tensor] if self.edge is None else leaves_of(self.edge.node)

    def pull(
        self, leaves: List[torch.Tensor], grads: torch.Tensor
    ) -> Sequence[Optional[torch.Tensor]]:
        """
        Follows gradients back.

        Args:
            leaves: some of :meth:`leaves`
            grads: one a sample, ``[B, *shape]``

        Returns:
            those of the leaves, one a sample
        """
        return torch.autograd.grad(
            [self.edge],
            leaves,
            [grads],
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )


def leaves_of(node: Any) -> List[torch.Tensor]:
    """The leaves that a graph ends in."""
    found, seen, todo = [], set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [parent for parent, _ in node.next_functions]
    return found


FactorsFn = Callable[..., Sequence[Optional[Tuple[Factor, ...]]]]


class ParameterUse(NamedTuple):
    """
    One use of parameters.

    Attributes:
        edge: in the graph, where the gradient of the op's output arrives; compiled, the
            number of its slot
        source: behind ``edge``, if the graph ends there
        values: what the op made use of, None for an argument left out
        factors: ``(backprops, *data)``, all ``[B, T, *event]``, to the factors of each
            of ``values``
        rows: how many dims of the output, behind that of the samples, are rows
        data: what the factors need, ``[B, *rows, *event]``
        data_rows: the same as ``rows``, of each of ``data``
        size: number of samples, if they are others than those of the group (parallel/)
        samples: which of these they are, if not all
        versions: of the data when they were kept
    """

    edge: Any
    source: Optional[GradientEdge]
    values: Tuple[Optional[ParameterValue], ...]
    factors: FactorsFn
    rows: int
    data: Sequence[torch.Tensor]
    data_rows: Tuple[int, ...]
    size: Optional[int] = None
    samples: Optional[torch.Tensor] = None
    versions: Tuple[int, ...] = ()

    def check(self) -> None:
        """
        Raises:
            Refused: if data were changed in place since, which autograd refuses too
        """
        if any(x._version != n for x, n in zip(self.data, self.versions)):
            raise Refused(
                "What a layer was called with has been changed in place since, but its "
                "gradient needs it as it was.",
                remedy="Compute without changing it in place: y = 2 * x in the place "
                "of x.mul_(2), inplace=False.",
            )

    def of(self, backprops: torch.Tensor) -> List[Tuple[ParameterValue, tuple]]:
        """The factors of each value's per-sample gradients."""
        given = (backprops, *self.data)
        if self.samples is not None:  # the others are zero
            given = tuple(
                x.new_zeros(self.size, *x.shape[1:]).index_copy(0, self.samples, x)
                for x in given
            )
        rows = (self.rows, *self.data_rows)
        found = self.factors(*(by_row(x, n) for x, n in zip(given, rows)))
        return [(v, f) for v, f in zip(self.values, found) if v is not None]


def by_row(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``[B, *rows, *event]`` as ``[B, T, *event]``."""
    if rows == 1:
        return x
    return x.unsqueeze(1) if rows == 0 else x.flatten(1, rows)


def of_copies(backprops: torch.Tensor) -> List[Tuple[torch.Tensor]]:
    """The gradient of one copy a sample, ``[B, 1, *shape]``, as factors."""
    return [(backprops.flatten(1).unsqueeze(1),)]
