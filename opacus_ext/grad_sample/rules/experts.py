"""Experts whose weights are stacked in one parameter ``[experts, ...]``.

The routing table says which expert each token went to, and with one-hot(expert) as the
first factor an expert's weight is a parameter like any other: no padding, and an
expert that no token chose has a gradient of zero.

Source: DP mixture of experts, appendix (per-sample gradients on the gathered tokens),
and main text (padded, :func:`expert_batching`).
"""

import functools
import inspect
from typing import Any, Iterable, List, Optional, Set, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.factors import Blocks, OneHot, pad_rows
from opacus_ext.grad_sample.rules.registry import (
    STAND_IN_FALLBACKS,
    Factors,
    Record,
    StandIn,
)


_BATCHING = "gathered"


def expert_batching(way: Optional[str] = None) -> str:
    """
    How the tokens that experts were given are arranged for their per-sample gradients.
    Both ways give the same numbers.

    - "gathered": as they are, beside a table that names the sample (and, where experts
      are stacked in one parameter, the expert) of each. Time and memory grow with the
      number of tokens, whatever the experts' load (the paper's appendix).
    - "padded": each expert's tokens as ``[B, C_max, width]``, zeros after the last one
      of a sample, ``C_max`` the most that one expert was given of one sample (the
      paper's main text). Products of one shape only; the more uneven the load and the
      more experts, the more of them is padding. It wins, by a few percent, where
      experts are stacked and each sample uses all of them alike (benchmarks/moe.py).

    Args:
        way: "gathered" or "padded"; None leaves it as it is

    Returns:
        The way in force before the call.

    Raises:
        ValueError: for another word

    Source:
        DP mixture of experts, "Expert per-sample gradient computation" (padded; here
        only the per-sample gradients see the padding, not the experts) and appendix
        (gathered).

    Example:
        >>> import opacus_ext
        >>> before = opacus_ext.expert_batching("padded")
        >>> opacus_ext.expert_batching(before)
        'padded'
    """
    global _BATCHING
    before = _BATCHING
    if way is not None:
        if way not in ("gathered", "padded"):
            raise ValueError(
                f'expert_batching takes "gathered" or "padded", got {way!r}.'
            )
        _BATCHING = way
    return before


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
        counts = torch.bincount(index, minlength=size)
        self.ends = counts.cumsum(0, dtype=torch.int32)
        self.counts: List[int] = counts.tolist()

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
        rows = _Permute.apply(x, self.order, self.back)
        if _at_once(rows, weights):
            found = F.grouped_mm(rows, weights.mT, offs=self.ends)
            if bias is not None:
                found = found + bias[self.index[self.order]]
        else:
            biases = [None] * self.size if bias is None else bias.unbind()
            each = zip(rows.split(self.counts), weights.unbind(), biases)
            found = torch.cat([F.linear(*expert) for expert in each])
        return _Permute.apply(found, self.back, self.order)


def _at_once(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether torch has one kernel for the products of all experts."""
    if not hasattr(F, "grouped_mm") or not rows.is_cuda or not len(rows):
        return False
    fits = all(n % 8 == 0 for n in weights.shape[1:])  # rows start at 16 bytes
    fits &= rows.dtype == weights.dtype == torch.bfloat16
    return fits and torch.cuda.get_device_capability(rows.device) >= (8, 0)


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
    factors: Factors = {} if bias is None else {bias: (expert, backprops)}
    pair = (backprops, x.to(backprops.dtype))
    lead = expert
    if expert_batching() == "padded":
        lead, pair = Blocks(len(weight)), _padded(expert, pair)
    factors[weight] = (lead, *(pair[::-1] if transposed else pair))
    return factors


def _padded(expert: OneHot, rows: Iterable[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
    """Rows ``[B, T, width]`` as ``[B, experts * C_max, width]``."""
    batch_size, size = len(expert.index), expert.size
    sample = torch.arange(batch_size, device=expert.index.device)[:, None]
    groups = (sample * size + expert.index).flatten()
    padded = (pad_rows(x.flatten(0, 1), groups, batch_size * size) for x in rows)
    return tuple(x.unflatten(0, (batch_size, size)).flatten(1, 2) for x in padded)


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
    y = y.unflatten(0, index.shape)
    return record(y, (index, x), (weight, bias), factors, by_row=True)


def experts_on_rows(
    layer: nn.Module,
    record: Record,
    x: torch.Tensor,
    index: torch.Tensor,
    routes: Routes,
) -> torch.Tensor:
    """
    What experts that follow the experts interface of transformers 5 make of tokens.

    Args:
        x: ``[tokens, choices, width]``
        index: ``[tokens, choices]``, as in ``routes``

    Returns:
        ``[tokens, choices, width]``
    """
    gated = getattr(layer, "has_gate", True)
    transposed = getattr(layer, "is_transposed", False)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        weights = getattr(layer, name), getattr(layer, f"{name}_bias", None)
        return record_experts(record, x, index, routes, *weights, transposed)

    y = linear(x, "gate_up_proj" if gated else "up_proj")
    y = layer._apply_gate(y) if gated else layer.act_fn(y)
    y = linear(y, "down_proj")
    normed = getattr(layer, "has_post_expert_norm", False)
    return layer.post_expert_norm(y) if normed else y


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
    size = len(layer.down_proj)
    dropped = top_k_index >= size
    index = top_k_index.masked_fill(dropped, 0)
    x = hidden_states.unsqueeze(1).expand(-1, index.shape[1], -1)
    y = experts_on_rows(layer, record, x, index, Routes(index.flatten(), size))
    weights = top_k_weights.masked_fill(dropped, 0)
    return (y * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def sorted_experts(
    layer: nn.Module, record: Record, inputs: torch.Tensor, expert_size: Any
) -> torch.Tensor:
    """
    ``forward`` of stacked linear experts whose tokens come sorted by expert, as in
    ScatterMoE and JetMoe.

    Args:
        inputs: ``[tokens, in]``
        expert_size: number of tokens of each expert
    """
    return _sorted(record, inputs, expert_size, layer.weight)


def dense_experts(
    layer: nn.Module, record: Record, hidden_states: torch.Tensor
) -> torch.Tensor:
    """
    ``forward`` of gated experts that all see every token, one expert after the other,
    as in Llama 4.

    Args:
        hidden_states: ``[experts * tokens, width]``
    """
    size = len(layer.gate_up_proj)
    counts = [len(hidden_states) // size] * size
    y = _sorted(record, hidden_states, counts, layer.gate_up_proj, True)
    gate, up = y.chunk(2, dim=-1)
    return _sorted(record, up * layer.act_fn(gate), counts, layer.down_proj, True)


def _sorted(
    record: Record,
    x: torch.Tensor,
    counts: Any,
    weight: nn.Parameter,
    transposed: bool = False,
) -> torch.Tensor:
    index = torch.arange(len(weight), device=x.device)
    index = index.repeat_interleave(torch.as_tensor(counts, device=x.device))
    args = (x.unsqueeze(1), index.unsqueeze(1), Routes(index, len(weight)), weight)
    return record_experts(record, *args, transposed=transposed).squeeze(1)


class _Unrecorded:
    """In the place of ``record``: nothing is noted."""

    def __call__(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return output

    def dealt(self, samples: torch.Tensor, index: torch.Tensor) -> "_Unrecorded":
        """See :class:`~opacus_ext.grad_sample.stand_in.Recorder`."""
        return self

    def mark(self, rows: torch.Tensor) -> torch.Tensor:
        """See :class:`~opacus_ext.grad_sample.stand_in.Recorder`."""
        return rows


unrecorded = _Unrecorded()


_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
_GATED = {"gate_up_proj", "down_proj"}


def is_experts(layer: nn.Module) -> bool:
    """
    Whether a layer follows the experts interface of transformers 5: the decorator
    ``use_experts_implementation`` or :class:`opacus_ext.layers.Experts`, or the same
    without the decorator.
    """
    if all(hasattr(layer, mark) for mark in _MARKS):
        return True
    taken = ["hidden_states", "top_k_index", "top_k_weights"]
    return hasattr(layer, "_apply_gate") and _is_stack(layer, _GATED, taken)


def _is_stack(layer: nn.Module, names: Set[str], taken: List[str]) -> bool:
    """Whether a layer owns these 3-D parameters alone, and what its forward takes."""
    own = dict(layer.named_parameters())
    if set(own) != names or any(p.dim() != 3 for p in own.values()):
        return False
    return list(inspect.signature(type(layer).forward).parameters)[1:] == taken


def _recognise(layer: nn.Module) -> Optional[StandIn]:
    if getattr(layer, "_is_expert_parallel", False):
        return None
    if is_experts(layer):
        return experts_interface
    if _is_stack(layer, {"weight"}, ["inputs", "expert_size"]):
        return sorted_experts
    if hasattr(layer, "act_fn") and _is_stack(layer, _GATED, ["hidden_states"]):
        return dense_experts
    return None


STAND_IN_FALLBACKS.append(_recognise)
