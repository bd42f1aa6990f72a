"""Rows of a table, looked up by index."""

from __future__ import annotations

import functools
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, OneHot
from opacus_ext.grad_sample.rules.registry import Op, is_shared, register_op
from opacus_ext.refused import Refused


class Fault(NamedTuple):
    """An argument of an embedding that can't be private: why, and what to do."""

    parameter: str
    reason: str
    remedy: str


_FAULTS = (
    Fault(
        "max_norm",
        "max_norm rescales rows in place in the forward pass, by which tokens the "
        "batch holds: that step is not private.",
        "Set max_norm=None.",
    ),
    Fault(
        "scale_grad_by_freq",
        "scale_grad_by_freq divides a sample's gradient by how often the other samples "
        "use its tokens.",
        "Set scale_grad_by_freq=False.",
    ),
    Fault(
        "sparse",
        "sparse=True gives a gradient whose pattern shows which tokens the batch "
        "holds, and the noise is dense anyway.",
        "Set sparse=False.",
    ),
)


def fault_of(
    max_norm: Optional[float], scale_grad_by_freq: bool, sparse: bool
) -> Optional[Fault]:
    """The first argument of an embedding that can't be private, or None."""
    given = (max_norm is not None, scale_grad_by_freq, sparse)
    return next((fault for fault, is_set in zip(_FAULTS, given) if is_set), None)


@register_op(F.embedding)
def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: Optional[int] = None,
    max_norm: Optional[float] = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Optional[Op]:
    """``weight [V, d]`` at ``input [*]``; rows at ``padding_idx`` get no gradient."""
    fault = fault_of(max_norm, scale_grad_by_freq, sparse)
    if fault is not None:
        raise Refused(
            f"An embedding of shape {tuple(weight.shape)}: {fault.reason}",
            parameter=fault.parameter,
            remedy=fault.remedy,
        )
    if not is_shared(weight):
        return None

    def whole(params: Sequence, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, params[0], padding_idx)

    factors = _rows_of(len(weight), padding_idx)
    return Op((weight,), (input,), factors, 1, (0,), whole)


@functools.lru_cache(maxsize=None)  # one for all tables alike: taken together
def _rows_of(size: int, padding: Optional[int]) -> Callable[..., List]:
    if padding is not None and padding < 0:
        padding += size

    def factors(backprops: torch.Tensor, ids: torch.Tensor) -> List[Tuple[Factor, ...]]:
        if padding is not None:
            backprops = backprops.masked_fill((ids == padding).unsqueeze(-1), 0)
        return [(OneHot(ids.long(), size), backprops)]

    return factors
