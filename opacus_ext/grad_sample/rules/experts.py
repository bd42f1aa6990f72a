"""Experts: linear maps of which each row takes one, and modules that rows are sent to.

Where weights are stacked in one parameter ``[experts, ...]`` the routing table says
which expert each token went to, and with one-hot(expert) as the first factor an
expert's weight is a parameter like any other: no padding, and an expert that no token
chose has a gradient of zero. Where experts are modules, each is given the rows of all
samples that chose it, and the table says the sample of each.

The functions here that are marked as ops show themselves to a run of single samples
(samplewise/experts.py), which calls them on the whole batch.

Source: DP mixture of experts, appendix (per-sample gradients on the gathered tokens).
The padded batches of its main text are measured in benchmarks/moe.py.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Iterable, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from opacus_ext.grad_sample.factors import Factor, OneHot, Ragged, resolved
from opacus_ext.grad_sample.rules.registry import register_substitute


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient is gathered too, which is faster."""

    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(order, back)
        return x.index_select(0, order)  # faster than x[order]

    @staticmethod
    def backward(ctx, grad):
        order, back = ctx.saved_tensors
        return _Permute.apply(grad, back, order), None, None


class Routes:
    """
    Rows sorted by the expert that each goes to, those that go to none last.

    Args:
        index: the expert of each row as it was, ``[rows]``; ``size`` or more for none
        size: number of experts
    """

    def __init__(self, index: torch.Tensor, size: int):
        self.size = size
        index = index.clamp(max=size)
        self.index, self.order = index.sort(stable=True)
        self.back = self.order.argsort()
        counts = torch.bincount(index, minlength=size)[:size]
        self.ends = counts.cumsum(0, dtype=torch.int32)
        self.counts: List[int] = counts.tolist()
        self.total = sum(self.counts)  # rows that go somewhere
        self.index = self.index[: self.total]

    def sort(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[rows, width]`` by their expert."""
        return _Permute.apply(rows, self.order, self.back)

    def unsort(self, rows: torch.Tensor) -> torch.Tensor:
        """And back."""
        return _Permute.apply(rows, self.back, self.order)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
        transposed: bool = False,
    ) -> torch.Tensor:
        """
        Every row times the weight of its expert.

        Args:
            x: ``[total, in]``, sorted
            weight: ``[experts, out, in]``, or ``[experts, in, out]`` if transposed
            bias: ``[experts, out]``

        Returns:
            ``[total, out]``
        """
        weights = weight if not transposed else weight.mT
        if _at_once(x, weights):
            found = F.grouped_mm(x, weights.mT, offs=self.ends)
            return found if bias is None else found + bias[self.index]
        biases = [None] * self.size if bias is None else bias.unbind()
        each = zip(x.split(self.counts), weights.unbind(), biases)
        return torch.cat([F.linear(*expert) for expert in each])


def _at_once(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether torch has one kernel for the products of all experts."""
    if not hasattr(F, "grouped_mm") or not rows.is_cuda or not len(rows):
        return False
    fits = all(n % 8 == 0 for n in weights.shape[1:])  # rows start at 16 bytes
    fits &= rows.dtype == weights.dtype == torch.bfloat16
    return fits and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def as_op(function: Callable) -> Callable:
    """Shows calls of a function to modes, as torch's own functions do."""

    @functools.wraps(function)
    def op(x: torch.Tensor, *args: Any) -> Any:
        if has_torch_function((x,)):
            return handle_torch_function(op, (x,), x, *args)
        return function(x, *args)

    return op


@as_op
def expert_linear(
    x: torch.Tensor,
    routes: Routes,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    transposed: bool = False,
) -> torch.Tensor:
    """See :meth:`Routes.linear`."""
    return routes.linear(x, weight, bias, transposed)


# Called as ``on_rows(function, rows, which)``: what a function makes of rows, each by
# itself, and which of those that were sent they are.
OnRows = Callable[
    [Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor
]
# What is done with rows that are sorted by expert.
Experts = Callable[[torch.Tensor, Routes, OnRows], torch.Tensor]


def all_at_once(layer: nn.Module) -> Experts:
    """Experts whose weights are stacked."""

    def call(rows: torch.Tensor, routes: Routes, on_rows: OnRows) -> torch.Tensor:
        def stacked(rows: torch.Tensor) -> torch.Tensor:
            return stacked_experts(layer, rows, routes)

        return on_rows(stacked, rows, routes.order[: routes.total])

    call.stacked = True
    return call


def one_by_one(experts: Iterable[nn.Module]) -> Experts:
    """Experts that are modules."""
    modules = list(experts)

    def call(rows: torch.Tensor, routes: Routes, on_rows: OnRows) -> torch.Tensor:
        parts = rows.split(routes.counts)
        where = routes.order[: routes.total].split(routes.counts)
        each = zip(modules, parts, where)
        found = [on_rows(e, x, i).to(rows.dtype) for e, x, i in each if len(x)]
        return torch.cat(found) if found else rows

    call.stacked = False
    return call


@as_op
def send(
    x: torch.Tensor, index: torch.Tensor, size: int, experts: Experts
) -> torch.Tensor:
    """
    Every row through its expert, which takes each by itself.

    Args:
        x: ``[*rows, width]``
        index: ``[*rows]``; ``size`` or more for none
        size: number of experts

    Returns:
        ``[*rows, width]``, zero where there is no expert
    """
    rows = x.flatten(0, -2)
    return send_rows(rows, index.flatten(), size, experts, at_once).view(x.shape)


def at_once(function: Callable, rows: torch.Tensor, which: Any) -> torch.Tensor:
    """Outside of training each row need not be told apart."""
    return function(rows)


def send_rows(
    rows: torch.Tensor,
    index: torch.Tensor,
    size: int,
    experts: Experts,
    on_rows: OnRows,
) -> torch.Tensor:
    """:func:`send` of rows ``[rows, width]``."""
    routes = Routes(index, size)
    here, rest = routes.sort(rows).tensor_split([routes.total])
    found = experts(here, routes, on_rows)
    if len(rest):
        found = torch.cat([found, torch.zeros_like(rest)])
    return routes.unsort(found)


# -- factors -------------------------------------------------------------------------


def expert_factors(
    size: int,
    transposed: bool,
    backprops: torch.Tensor,
    index: torch.Tensor,
    x: torch.Tensor,
) -> List[Tuple[Factor, ...]]:
    """
    Of weights ``[experts, out, in]``, or ``[experts, in, out]`` if transposed, and
    their bias.

    Args:
        size: number of experts
        backprops: ``[rows, T, out]``
        index: the expert of each row ``[rows, T]``
        x: its input ``[rows, T, in]``
    """
    expert = OneHot(index.long(), size)
    x = x.to(backprops.dtype)
    weight = (expert, x, backprops) if transposed else (expert, backprops, x)
    return [weight, (expert, backprops)]


def by_table(
    factors: Tuple[Factor, ...], samples: torch.Tensor, size: int
) -> Tuple[Factor, ...]:
    """
    The factors of rows that were sent to experts, as those of samples.

    Args:
        factors: ``[rows, T, width]``
        samples: of each row, ``[rows]``
        size: number of samples
    """
    flat = [_flat(f) for f in resolved(factors)]
    first = flat[0].index if isinstance(flat[0], OneHot) else flat[0]
    samples = samples.repeat_interleave(len(first) // max(1, len(samples)))
    rows = (
        OneHot(f.index[None], f.size) if isinstance(f, OneHot) else f[None]
        for f in flat
    )
    return (Ragged(samples), *rows)


def _flat(factor: Union[torch.Tensor, OneHot]) -> Union[torch.Tensor, OneHot]:
    """``[B, T, width]`` as ``[B * T, width]``"""
    if isinstance(factor, OneHot):
        return OneHot(factor.index.flatten(), factor.size)
    return factor.flatten(0, 1)


# -- layers of transformers ----------------------------------------------------------


def stacked_experts(layer: nn.Module, x: torch.Tensor, routes: Routes) -> torch.Tensor:
    """
    What experts that follow the experts interface of transformers 5 make of rows.

    Args:
        x: ``[*rows, width]``

    Returns:
        ``[*rows, width]``
    """
    gated = getattr(layer, "has_gate", True)
    transposed = getattr(layer, "is_transposed", False)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(layer, f"{name}_bias", None)
        return expert_linear(x, routes, getattr(layer, name), bias, transposed)

    y = linear(x, "gate_up_proj" if gated else "up_proj")
    if not gated:
        y = layer.act_fn(y)
    elif hasattr(layer, "_apply_gate"):
        y = layer._apply_gate(y)
    else:
        gate, up = y.chunk(2, dim=-1)
        y = layer.act_fn(gate) * up
    y = linear(y, "down_proj")
    normed = getattr(layer, "has_post_expert_norm", False)
    return layer.post_expert_norm(y) if normed else y


def weighted(
    y: torch.Tensor, weights: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """
    Args:
        y: what experts gave, ``[tokens, choices, width]``
        weights: ``[tokens, choices]``
        like: of the type that is wanted

    Returns:
        ``[tokens, width]``
    """
    return (y * weights.unsqueeze(-1)).sum(1).to(like.dtype)


def experts_interface(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """
    ``forward`` of experts that follow the experts interface of transformers 5.

    Args:
        hidden_states: ``[tokens, width]``
        top_k_index: the experts of each token, ``[tokens, choices]``; as many as there
            are experts or more for none
        top_k_weights: ``[tokens, choices]``
    """
    size = len(layer.down_proj)
    x = hidden_states.unsqueeze(1).expand(-1, top_k_index.shape[1], -1)
    y = send(x, top_k_index, size, all_at_once(layer))
    weights = top_k_weights.masked_fill(top_k_index >= size, 0)
    return weighted(y, weights, hidden_states)


def chosen_of(selected_experts: torch.Tensor) -> torch.Tensor:
    """The experts of one-hot rows ``[..., experts]``, their number for none."""
    none = 1 - selected_experts.sum(-1, keepdim=True).clamp(max=1)
    return torch.cat([selected_experts, none], dim=-1).argmax(-1)


def switch_experts(
    layer: nn.ModuleDict,
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """
    ``forward`` of a ModuleDict of experts, as Switch has it.

    Args:
        hidden_states: ``[tokens, width]``
        selected_experts: one-hot, ``[tokens, choices, experts]``, zero for none
        routing_weights: ``[tokens, choices]``
    """
    index = chosen_of(selected_experts)
    x = hidden_states.unsqueeze(1).expand(-1, index.shape[1], -1)
    y = send(x, index, len(layer), one_by_one(layer.values()))
    return weighted(y, routing_weights, hidden_states)


def nllb_experts(
    layer: nn.ModuleDict,
    hidden_states: torch.Tensor,
    router_mask: torch.Tensor,
    router_probs: torch.Tensor,
) -> torch.Tensor:
    """
    ``forward`` of the experts of NLLB-MoE.

    Args:
        hidden_states: ``[tokens, width]``
        router_mask: the experts, ``[tokens, choices]``
        router_probs: ``[tokens, choices]``
    """
    x = hidden_states.unsqueeze(1).expand(-1, router_mask.shape[1], -1)
    y = send(x, router_mask, len(layer), one_by_one(layer.values()))
    y = y * router_probs.unsqueeze(-1)
    if layer.training:
        y = layer.token_dropout(y)
    else:
        y = y * (1 - layer.moe_token_dropout)
    return y.sum(1).to(hidden_states.dtype)


_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
_INTERFACE = ["hidden_states", "top_k_index", "top_k_weights"]
_SWITCH = ["hidden_states", "selected_experts", "routing_weights"]
_NLLB = ["hidden_states", "router_mask", "router_probs"]


def _takes(layer: nn.Module) -> List[str]:
    return list(inspect.signature(type(layer).forward).parameters)[1:]


def is_experts(layer: nn.Module) -> bool:
    """
    Whether a layer follows the experts interface of transformers 5: the decorator
    ``use_experts_implementation`` or :class:`opacus_ext.layers.Experts`, or the same
    without the decorator.
    """
    if all(hasattr(layer, mark) for mark in _MARKS):
        return True
    own = {n: p for n, p in layer._parameters.items() if p is not None}
    stacked = (
        set(own) == {"gate_up_proj", "down_proj"}
        and len({len(p) if p.dim() == 3 else None for p in own.values()} - {None}) == 1
    )
    known = type(layer).__module__.startswith("transformers.models.")
    gates = hasattr(layer, "_apply_gate") or (known and hasattr(layer, "act_fn"))
    return stacked and gates and _takes(layer) == _INTERFACE


def has_experts(layer: nn.Module) -> bool:
    """Whether it is a ModuleDict that sends tokens to its entries, as Switch has it."""
    return isinstance(layer, nn.ModuleDict) and _takes(layer) == _SWITCH


@register_substitute
def _substitute(layer: nn.Module) -> Optional[Callable]:
    if getattr(layer, "_is_expert_parallel", False) or hasattr(layer, "sharding"):
        return None  # spread over processes, by transformers or by us (parallel.py)
    if is_experts(layer):
        return experts_interface
    if has_experts(layer):
        return switch_experts
    if isinstance(layer, nn.ModuleDict) and _takes(layer) == _NLLB:
        return nllb_experts
    return None
