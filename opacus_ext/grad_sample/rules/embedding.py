"""Rows of a table, looked up by index."""

import functools
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, OneHot
from opacus_ext.grad_sample.rules.registry import Op, is_shared, register_op
from opacus_ext.refused import Refused

MAX_NORM = (
    "max_norm rescales rows in place in the forward pass, by which tokens the batch "
    "holds: that step is not private. Set max_norm=None"
)
BY_FREQ = (
    "scale_grad_by_freq divides a sample's gradient by how often the other samples use "
    "its tokens. Set scale_grad_by_freq=False"
)
SPARSE = (
    "sparse=True gives a gradient whose pattern shows which tokens the batch holds, "
    "and the noise is dense anyway. Set sparse=False"
)


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
    for given, reason in (
        (max_norm is not None, MAX_NORM),
        (scale_grad_by_freq, BY_FREQ),
        (sparse, SPARSE),
    ):
        if given:
            raise Refused(f"An embedding of shape {tuple(weight.shape)}: {reason}.")
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
