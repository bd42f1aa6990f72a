"""Experts: a stack of linear maps, of which each row uses one.

The weights are stacked in one parameter ``[experts, ...]``. Its first factor is
one-hot(expert), from the routing table. So there is no padding, and an expert that no
token chose has a gradient of zero.

Source: DP mixture of experts, appendix (per-sample gradients on the gathered tokens).
The padded batches of its main text are measured in benchmarks/moe.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Sequence

import torch
from torch import nn

from opacus_ext.grad_sample.factors import Factor, OneHot
from opacus_ext.grad_sample.rules.registry import Op, of_all, register_rule

T = torch.Tensor


_grouped_linear = torch.ops.opacus_ext.grouped_linear  # factors/places.py


def grouped_linear(x: T, index: T, weight: T, transposed: bool = False) -> T:
    """
    Multiplies each row by the weight of its expert.

    Args:
        x: ``[rows, in]``
        index: the expert of each row ``[rows]``; the number of experts stands for none
        weight: ``[experts, in, out]``
        transposed: if True it is ``[experts, out, in]``, as in ``nn.Linear``

    Returns:
        ``[rows, out]``, zero where there is no expert.

    Example:
        >>> x, weight = torch.ones(3, 2), torch.ones(2, 2, 1)
        >>> grouped_linear(x, torch.tensor([0, 1, 2]), weight).flatten()
        tensor([2., 2., 0.])
    """
    return _grouped_linear(x.to(weight.dtype), index, weight, transposed)


@register_rule(_grouped_linear)
def _of_experts(x: T, index: T, weight: T, transposed: bool = False) -> Op:
    run_all = partial(_of_rows, transposed)
    factors = partial(_experts, weight.shape[0], transposed)
    return Op((weight,), (x, index), factors, 1, (1, 0), run_all)


@of_all(_grouped_linear)
def _of_all(x: T, index: T, weight: T, transposed: bool = False) -> T:
    """Multiplies the rows of all samples together if they share the weight."""
    if len(weight) != 1 or len(x) != len(index):
        return NotImplemented
    return _of_rows(transposed, [weight[0]], x, index)


def _of_rows(transposed: bool, params: Sequence, x: T, index: T) -> T:
    rows = x.flatten(0, -2), index.flatten()
    y = grouped_linear(*rows, params[0], transposed)
    return y.unflatten(0, x.shape[:-1])


def _experts(
    size: int, transposed: bool, backprops: T, x: T, index: T
) -> list[tuple[Factor, ...]]:
    """Returns the factors of weights ``[size, in, out]``, or ``[size, out, in]``."""
    none = (index >= size).unsqueeze(-1)
    rows = x.to(backprops.dtype).masked_fill(none, 0)
    expert = OneHot(index.long().clamp(max=size - 1), size)
    pair = (backprops, rows) if transposed else (rows, backprops)
    return [(expert, *pair)]


# -- layers that follow the experts interface of transformers 5 ------------------------


def experts_interface(
    layer: nn.Module, hidden_states: T, top_k_index: T, top_k_weights: T
) -> T:
    """
    The ``forward`` of experts with the experts interface of transformers 5, of
    ``hidden_states [tokens, width]``, and indices and weights ``[tokens, choices]``. An
    index that is not below the number of experts stands for none.
    """
    size, choices = len(layer.down_proj), top_k_index.shape[-1]
    transposed = getattr(layer, "is_transposed", False)
    index = top_k_index.flatten().clamp(max=size)
    known = index.clamp(max=size - 1)

    def linear(x: T, name: str) -> T:
        y = grouped_linear(x, index, getattr(layer, name), not transposed)
        bias = getattr(layer, f"{name}_bias", None)
        return y if bias is None else y + bias[known]

    y = hidden_states.unsqueeze(1).expand(-1, choices, -1).flatten(0, 1)
    if not getattr(layer, "has_gate", True):
        y = layer.act_fn(linear(y, "up_proj"))
    elif hasattr(layer, "_apply_gate"):
        y = layer._apply_gate(linear(y, "gate_up_proj"))
    else:
        gate, up = linear(y, "gate_up_proj").chunk(2, dim=-1)
        y = layer.act_fn(gate) * up
    y = linear(y, "down_proj")
    if getattr(layer, "has_post_expert_norm", False):
        y = layer.post_expert_norm(y)
    weights = torch.where(index < size, top_k_weights.flatten(), 0)
    y = (y * weights.unsqueeze(-1)).unflatten(0, (-1, choices))
    return y.sum(1).to(hidden_states.dtype)


def register_with(
    experts_functions: dict[str, Callable], is_one_a_sample: Callable[[T], bool]
) -> Callable[[], None]:
    """
    Registers :func:`experts_interface` in transformers' ``ALL_EXPERTS_FUNCTIONS``. It
    runs where samples run together; transformers' own functions run elsewhere. Returns
    a function that undoes this.
    """

    def dispatched(plain: Callable | None) -> Callable:
        def forward(layer: nn.Module, hidden_states: T, *args: Any, **kwargs: Any) -> T:
            spread = getattr(layer, "_is_expert_parallel", False)
            own = plain or type(layer).forward.__wrapped__
            if is_one_a_sample(hidden_states) and not spread:
                own = experts_interface
            return own(layer, hidden_states, *args, **kwargs)

        return forward

    names = "eager", "grouped_mm", "batched_mm"
    for name in names:
        experts_functions[name] = dispatched(experts_functions.get(name))

    def undo() -> None:
        for name in names:
            del experts_functions[name]

    return undo
