"""Experts: a stack of linear maps, of which each row uses one.

The weights are stacked in one parameter ``[experts, ...]``. Its first factor is
one-hot(expert), from the routing table. So gradients need no padding, and an expert
that no token chose has a gradient of zero. The products may be padded, which changes no
number.

Source: DP mixture of experts, appendix (per-sample gradients on the gathered tokens).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Sequence

import torch
from torch import nn

from opacus_ext.grad_sample.factors import Factor, OneHot
from opacus_ext.grad_sample.rules.registry import Op, of_all, register_rule

T = torch.Tensor


# The op, its kernel and its derivatives stand in factors/places.py.
_grouped_linear = torch.ops.opacus_ext.grouped_linear


def grouped_linear(
    x: T,
    index: T,
    weight: T,
    transposed: bool = False,
    padded: bool = False,
) -> T:
    """
    Multiplies each row by the weight of its expert.

    Args:
        x: ``[rows, in]``
        index: the expert of each row ``[rows]``; the number of experts means no expert
        weight: ``[experts, in, out]``
        transposed: if True it is ``[experts, out, in]``, as in ``nn.Linear``
        padded: whether to multiply by all experts at once, with the rows of each padded
            to the most that one has

    Returns:
        ``[rows, out]``, zero where there is no expert.

    Example:
        >>> x, weight = torch.ones(3, 2), torch.ones(2, 2, 1)
        >>> grouped_linear(x, torch.tensor([0, 1, 2]), weight).flatten()
        tensor([2., 2., 0.])
    """
    return _grouped_linear(x.to(weight.dtype), index, weight, transposed, padded)


@register_rule(_grouped_linear)
def _of_experts(
    inputs: T,
    index: T,
    weight: T,
    transposed: bool = False,
    padded: bool = False,
) -> Op:
    return Op(
        params=(weight,),
        data=(inputs, index),
        factors=partial(_experts, weight.shape[0], transposed),
        data_dims=(1, 0),
        run_all=partial(_of_rows, transposed, padded),
    )


@of_all(_grouped_linear)
def _for_all(
    inputs: T,
    index: T,
    weight: T,
    transposed: bool = False,
    padded: bool = False,
) -> T:
    """Multiplies the rows of all samples together if they share the weight."""
    if len(weight) != 1 or len(inputs) != len(index):
        return NotImplemented
    return _of_rows(transposed, padded, [weight[0]], inputs, index)


def _of_rows(
    transposed: bool,
    padded: bool,
    params: Sequence,
    inputs: T,
    index: T,
) -> T:
    rows = inputs.flatten(0, -2)
    outputs = grouped_linear(rows, index.flatten(), params[0], transposed, padded)
    return outputs.unflatten(0, inputs.shape[:-1])


def _experts(
    size: int,
    transposed: bool,
    backprops: T,
    inputs: T,
    index: T,
) -> list[tuple[Factor, ...]]:
    """Returns the factors of weights ``[size, in, out]``, or ``[size, out, in]``."""
    has_none = (index >= size).unsqueeze(-1)
    # A row without an expert counts for the last one, as a row of zeros.
    rows = inputs.to(backprops.dtype).masked_fill(has_none, 0)
    known = index.long().clamp(max=size - 1)
    expert = OneHot(known, size)
    if transposed:
        return [(expert, backprops, rows)]
    return [(expert, rows, backprops)]


# -- layers that follow the experts interface of transformers 5 ------------------------


def experts_interface(
    layer: nn.Module,
    hidden_states: T,
    top_k_index: T,
    top_k_weights: T,
) -> T:
    """
    The ``forward`` of experts with the experts interface of transformers 5, of
    ``hidden_states [tokens, width]``, and indices and weights ``[tokens, choices]``. An
    index that is not below the number of experts means no expert.
    """
    size, choices = len(layer.down_proj), top_k_index.shape[-1]
    transposed = getattr(layer, "is_transposed", False)
    padded = getattr(layer, "dispatch", None) == "padded"
    index = top_k_index.flatten().clamp(max=size)
    known = index.clamp(max=size - 1)

    def linear(rows: T, name: str) -> T:
        weight = getattr(layer, name)
        outputs = grouped_linear(rows, index, weight, not transposed, padded)
        bias = getattr(layer, f"{name}_bias", None)
        if bias is None:
            return outputs
        return outputs + bias[known]

    rows = hidden_states.unsqueeze(1).expand(-1, choices, -1)
    rows = rows.flatten(0, 1)
    if not getattr(layer, "has_gate", True):
        rows = layer.act_fn(linear(rows, "up_proj"))
    elif hasattr(layer, "_apply_gate"):
        rows = layer._apply_gate(linear(rows, "gate_up_proj"))
    else:
        gate, values = linear(rows, "gate_up_proj").chunk(2, dim=-1)
        rows = layer.act_fn(gate) * values
    rows = linear(rows, "down_proj")
    if getattr(layer, "has_post_expert_norm", False):
        rows = layer.post_expert_norm(rows)
    # The weight of an index that means no expert may be anything.
    weights = torch.where(index < size, top_k_weights.flatten(), 0)
    rows = rows * weights.unsqueeze(-1)
    rows = rows.unflatten(0, (-1, choices)).sum(1)
    return rows.to(hidden_states.dtype)


def register_with(
    experts_functions: dict[str, Callable], is_one_a_sample: Callable[[T], bool]
) -> Callable[[], None]:
    """
    Registers :func:`experts_interface` in transformers' ``ALL_EXPERTS_FUNCTIONS``. It
    runs where samples run together; transformers' own functions run elsewhere. Returns
    a function that undoes this.
    """

    def dispatched(plain: Callable | None) -> Callable:
        def forward(
            layer: nn.Module,
            hidden_states: T,
            *args: Any,
            **kwargs: Any,
        ) -> T:
            # If transformers' table has no entry, the class's own forward runs.
            function = plain or type(layer).forward.__wrapped__
            is_spread = getattr(layer, "_is_expert_parallel", False)
            if is_one_a_sample(hidden_states) and not is_spread:
                function = experts_interface
            return function(layer, hidden_states, *args, **kwargs)

        return forward

    names = "eager", "grouped_mm", "batched_mm"
    for name in names:
        experts_functions[name] = dispatched(experts_functions.get(name))

    def undo() -> None:
        for name in names:
            del experts_functions[name]

    return undo
