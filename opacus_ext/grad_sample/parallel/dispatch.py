"""Tokens travel to the process that holds their expert, and back."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

import torch
from torch import nn

from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.rules.experts import (
    OnRows,
    all_at_once,
    as_op,
    at_once,
    is_experts,
    one_by_one,
    send_rows,
)


class _Exchange(torch.autograd.Function):
    """
    Rows and numbers beside them travel together; the gradient travels back, in every
    process or in none: so it hangs on the anchor of the run, whatever else it does.
    """

    @staticmethod
    def forward(ctx, group, rows, numbers, send, receive, anchor):
        ctx.group, ctx.back = group, (receive, send)
        if numbers is None:
            return group.exchange(rows, send, receive), None
        # As bytes, so that one exchange carries both without rounding the numbers.
        width = numbers.shape[1] * numbers.element_size()
        parts = [_packed(x).view(torch.uint8) for x in (numbers, rows)]
        got = group.exchange(torch.cat(parts, dim=1), send, receive)
        numbers = _packed(got[:, :width]).view(numbers.dtype)
        ctx.mark_non_differentiable(numbers)
        return _packed(got[:, width:]).view(rows.dtype), numbers

    @staticmethod
    def backward(ctx, grad, _):
        back = ctx.group.exchange(grad, *ctx.back)
        return None, back, None, None, None, None


def _packed(x: torch.Tensor) -> torch.Tensor:
    """A copy whose bytes can be seen as another type: one row is not always, though
    ``contiguous`` takes it for that."""
    return x.clone(memory_format=torch.contiguous_format)


class DispatchedTokens(NamedTuple):
    """
    Rows that came from all processes.

    Attributes:
        rows: ``[received, width]``
        samples: of each row, counted through the samples of all processes
        expert: of each row, counted through the experts of this process
    """

    rows: torch.Tensor
    samples: torch.Tensor
    expert: torch.Tensor


def dispatch(
    group: ExpertGroup,
    x: torch.Tensor,
    index: torch.Tensor,
    per_process: int,
    compute: Callable[[DispatchedTokens], torch.Tensor],
    anchor: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """
    Sends rows to the processes that hold their experts, and the results back.

    Args:
        x: ``[tokens * choices, width]``, sample after sample
        index: the expert of each row; no expert has as high a number, or higher, as
            there are experts: such rows stay here and give zero
        per_process: number of experts a process holds
        compute: what the experts here do with the rows they are given
        anchor: requires a gradient, in all processes or in none

    Returns:
        ``[tokens * choices, width]``
    """
    owner = index // per_process
    travels = (owner < group.size).nonzero()[:, 0]
    order = travels[owner[travels].argsort(stable=True)]
    counts = torch.bincount(owner[order], minlength=group.size)
    receive = group.exchange_counts(counts)
    send = counts.tolist()
    per_sample = max(1, len(x) // max(1, group.batch_sizes[group.rank]))
    numbers = torch.stack([order // per_sample, index[order] % per_process], dim=1)
    rows, numbers = _Exchange.apply(group, x[order], numbers, send, receive, anchor)
    sizes = torch.tensor(group.batch_sizes)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(torch.tensor(receive))
    samples, expert = numbers.unbind(1)
    out = compute(DispatchedTokens(rows, samples + first.to(samples.device), expert))
    out, _ = _Exchange.apply(group, out, None, receive, send, anchor)
    return out.new_zeros(len(x), out.shape[1]).index_copy(0, order, out)


@as_op
def through_experts(
    x: torch.Tensor, index: torch.Tensor, layer: nn.Module
) -> torch.Tensor:
    """
    Every row through its expert, wherever that is.

    Args:
        x: ``[*rows, width]``
        index: ``[*rows]``; as many as there are experts, or more, for none

    Returns:
        ``[*rows, width]``, zero where there is no expert.
    """
    rows = x.flatten(0, -2)
    return rows_through_experts(rows, index.flatten(), layer, at_once).view(x.shape)


def rows_through_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    layer: nn.Module,
    on_rows: OnRows,
    anchor: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """
    Args:
        x: ``[rows, width]``, sample after sample
        index: ``[rows]``
        on_rows: is told the sample of each row
        anchor: see :func:`dispatch`

    Returns:
        ``[rows, width]``
    """
    per_process = layer.sharding.count // layer.sharding.group.size
    if is_experts(layer):
        experts = all_at_once(layer)
    else:
        experts = one_by_one(layer.values())

    def compute(tokens: DispatchedTokens) -> torch.Tensor:
        def here(function: Callable, rows: torch.Tensor, which: torch.Tensor):
            return on_rows(function, rows, tokens.samples[which])

        return send_rows(tokens.rows, tokens.expert, per_process, experts, here)

    return dispatch(layer.sharding.group, x, index, per_process, compute, anchor)
