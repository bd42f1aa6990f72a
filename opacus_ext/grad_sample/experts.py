"""Experts whose weights are stacked in one parameter ``[experts, ...]``.

The routing table says which expert each token went to, and with one-hot(expert) as the
first factor an expert's weight is a parameter like any other: no padding, and an
expert that no token chose has a gradient of zero.

Source: DP mixture of experts, appendix (per-sample gradients on the gathered tokens).
"""

import functools
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.factors import OneHot
from opacus_ext.grad_sample.rules import (
    STAND_IN_FALLBACKS,
    Factors,
    Record,
    StandIn,
)


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient is gathered too, which is faster."""

    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(order, back)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        order, back = ctx.saved_tensors
        return _Permute.apply(grad, back, order), None, None


class Routes:
    """
    Which expert each row goes to.

    Args:
        index: ``[rows]``, below ``size``
        size: number of experts
    """

    def __init__(self, index: torch.Tensor, size: int):
        self.index, self.size = index, size
        self.order = index.argsort(stable=True)
        self.back = self.order.argsort()
        self.counts: List[int] = torch.bincount(index, minlength=size).tolist()

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
            x: ``[rows, in]``
            weight: ``[experts, out, in]``, or ``[experts, in, out]`` if transposed
            bias: ``[experts, out]``

        Returns:
            ``[rows, out]``
        """
        weights = weight if not transposed else weight.mT
        biases = [None] * self.size if bias is None else bias.unbind()
        rows = _Permute.apply(x, self.order, self.back).split(self.counts)
        found = [F.linear(*each) for each in zip(rows, weights.unbind(), biases)]
        return _Permute.apply(torch.cat(found), self.back, self.order)


def _factors(
    weight: nn.Parameter,
    bias: Optional[nn.Parameter],
    transposed: bool,
    activations: Tuple[torch.Tensor, torch.Tensor],
    backprops: torch.Tensor,
) -> Factors:
    """
    Args:
        activations: the expert of each row ``[B, T]``, and its input ``[B, T, in]``
        backprops: ``[B, T, out]``
    """
    index, x = activations
    expert = OneHot(index.long(), len(weight))
    pair = (backprops, x.to(backprops.dtype))
    factors: Factors = {weight: (expert, *(pair[::-1] if transposed else pair))}
    if bias is not None:
        factors[bias] = (expert, backprops)
    return factors


def record_experts(
    record: Record,
    x: torch.Tensor,
    index: torch.Tensor,
    routes: Routes,
    weight: nn.Parameter,
    bias: Optional[nn.Parameter] = None,
    transposed: bool = False,
) -> torch.Tensor:
    """
    A linear map by each row's expert inside a stand-in.

    Args:
        x: ``[tokens, choices, in]``
        index: ``[tokens, choices]``

    Returns:
        ``[tokens, choices, out]``
    """
    y = routes.linear(x.flatten(0, 1), weight, bias, transposed)
    factors = functools.partial(_factors, weight, bias, transposed)
    return record(y.unflatten(0, index.shape), (index, x), (weight, bias), factors)


def experts_interface(
    layer: nn.Module,
    record: Record,
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
    inner = layer.gate_up_proj if layer.has_gate else layer.up_proj
    name = "gate_up_proj" if layer.has_gate else "up_proj"
    biases = [getattr(layer, f"{n}_bias", None) for n in (name, "down_proj")]
    dropped = top_k_index >= len(inner)
    index = top_k_index.masked_fill(dropped, 0)
    weights = top_k_weights.masked_fill(dropped, 0)
    routes = Routes(index.flatten(), len(inner))
    linear = functools.partial(*(record_experts, record), index=index, routes=routes)
    x = hidden_states.unsqueeze(1).expand(-1, index.shape[1], -1)
    y = linear(x, weight=inner, bias=biases[0], transposed=layer.is_transposed)
    y = layer._apply_gate(y) if layer.has_gate else layer.act_fn(y)
    y = linear(
        y, weight=layer.down_proj, bias=biases[1], transposed=layer.is_transposed
    )
    if layer.has_post_expert_norm:
        y = layer.post_expert_norm(y)
    y = (y * weights.unsqueeze(-1)).sum(1)
    return y.to(hidden_states.dtype)


def _recognise(layer: nn.Module) -> Optional[StandIn]:
    """Whether transformers' decorator ``use_experts_implementation`` has been here."""
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    if not all(hasattr(layer, mark) for mark in marks):
        return None
    return None if getattr(layer, "_is_expert_parallel", False) else experts_interface


STAND_IN_FALLBACKS.append(_recognise)
