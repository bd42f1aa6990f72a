"""Embeddings: rows of a table, looked up by index."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Sequence

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, OneHot
from opacus_ext.grad_sample.rules.registry import Group, Op, handles, register_rule
from opacus_ext.refused import Refused

T = torch.Tensor


# By the setting that is private, why others are not.
_PRIVATE = {
    "max_norm=None": "max_norm rescales the rows of the batch's tokens in place in the "
    "forward pass, which is not private.",
    "scale_grad_by_freq=False": "scale_grad_by_freq divides a sample's gradient by how "
    "often the other samples use its tokens.",
    "sparse=False": "sparse=True gives a gradient whose pattern shows which tokens the "
    "batch holds, and the noise is dense anyway.",
}


def refuse_embedding(
    what: str,
    max_norm: float | None,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> None:
    """Refuses arguments with which an embedding can't be private."""
    are_set = max_norm is not None, scale_grad_by_freq, sparse
    for is_set, (setting, reason) in zip(are_set, _PRIVATE.items()):
        if is_set:
            raise Refused(
                f"{what}: {reason}",
                module=what,
                parameter=setting.partition("=")[0],
                remedy=f"Set {setting}.",
            )


@register_rule(F.embedding)
def embedding(
    input: T,
    weight: T,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Op:
    """``weight [V, d]`` at ``input [*]``; rows at ``padding_idx`` get no gradient."""
    what = f"An embedding of shape {tuple(weight.shape)}"
    refuse_embedding(what, max_norm, scale_grad_by_freq, sparse)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    factors = partial(_rows, weight.shape[0], padding_idx)

    def run_all(params: Sequence[T], ids: T) -> T:
        return F.embedding(ids, params[0], padding_idx)

    return Op(
        params=(weight,),
        data=(input,),
        factors=factors,
        data_dims=(0,),
        run_all=run_all,
    )


@handles(F.embedding)
def padded(
    group: Group,
    function: Callable,
    input: T,
    weight: T,
    padding_idx: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> T:
    """Applies ``padding_idx`` to per-sample tables, for which vmap ignores it."""
    if padding_idx is None or not group.is_batched(weight):
        return group.call(function, input, weight, padding_idx, *args, **kwargs)
    padding_idx %= len(weight)
    rows = group.call(function, input, weight, None, *args, **kwargs)
    # Rows at the padding have their value, and no gradient.
    with group:
        is_padding = (input == padding_idx).unsqueeze(-1)
        return torch.where(is_padding, rows.detach(), rows)


@handles(torch.embedding, torch.ops.aten.embedding, torch.ops.aten.embedding.default)
def _embedding(
    group: Group,
    function: Callable,
    weight: T,
    input: T,
    padding_idx: int = -1,
    *args: Any,
) -> T:
    """Calls the function of ``nn.functional``, for which no padding is None."""
    padding = None
    if padding_idx >= 0:
        padding = padding_idx
    return padded(group, F.embedding, input, weight, padding, None, 2.0, *args)


@register_rule(T.__getitem__)
def getitem(table: T, index: Any) -> Op | None:
    """``table [V, *]`` at ``index [*]``, a tensor of integers."""
    if not isinstance(index, T) or index.is_floating_point() or table.dim() < 1:
        return None
    if index.dtype in (torch.bool, torch.uint8):
        return None
    return Op(
        params=(table,),
        data=(index,),
        factors=partial(_rows, len(table), None),
        event_dims=table.dim() - 1,
        data_dims=(0,),
        run_all=_look_up,
    )


def _look_up(params: Sequence[T], index: T) -> T:
    return params[0][index]


def _rows(
    size: int,
    padding: int | None,
    backprops: T,
    ids: T,
) -> list[tuple[Factor, ...]]:
    """Returns the factors of a table ``[size, *]``, whose index may be negative."""
    # Rows are flattened, as ``view(*shape, -1)`` fails for a sequence of no tokens.
    rows = backprops.unsqueeze(2).flatten(2)
    # An index ``table[ids]`` may be on the CPU where the table is not.
    ids = ids.to(rows.device, torch.long)
    if padding is not None:
        is_padding = ids == padding
        rows = rows.masked_fill(is_padding.unsqueeze(-1), 0)
        # Rows of zeros are spread, as a GPU adds those of one index in turn.
        ids = torch.where(
            is_padding, torch.arange(ids.shape[1], device=ids.device), ids
        )
    return [(OneHot(ids % size, size), rows)]
