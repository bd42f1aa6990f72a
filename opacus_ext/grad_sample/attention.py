"""``nn.MultiheadAttention``: three projections of which the weights may be one."""

import functools
import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.factors import wide
from opacus_ext.grad_sample.linear import linear_factors, record_linear
from opacus_ext.grad_sample.rules import Factors, Record, register_forward


def _slice_factors(
    weight: Optional[nn.Parameter],
    bias: Optional[nn.Parameter],
    start: int,
    stop: int,
    x: torch.Tensor,
    backprops: torch.Tensor,
) -> Factors:
    """Factors where a projection uses the rows ``start:stop`` of weight and bias."""
    factors: Factors = {}
    total = len(bias) if weight is None else len(weight)
    rest = (start, total - stop)
    if weight is not None:
        factors = linear_factors(weight, None, x, F.pad(backprops, rest))
    if bias is not None:
        factors[bias] = (F.pad(wide(backprops).sum(1, keepdim=True), rest),)
    return factors


def _projections(
    layer: nn.MultiheadAttention,
    record: Record,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width, bias = layer.embed_dim, layer.in_proj_bias
    if not layer._qkv_same_embed_dim:
        weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight

        def project(i: int, x: torch.Tensor) -> torch.Tensor:
            x = record_linear(record, x, weights[i])
            if bias is None:
                return x
            rows = (i * width, (i + 1) * width)
            factors = functools.partial(_slice_factors, None, bias, *rows)
            return record(x + bias[slice(*rows)], None, (bias,), factors)

        return project(0, query), project(1, key), project(2, value)

    weight = layer.in_proj_weight

    def part(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows = (start * width, stop * width)
        some = None if bias is None else bias[slice(*rows)]
        factors = functools.partial(_slice_factors, weight, bias, *rows)
        return record(
            F.linear(x, weight[slice(*rows)], some), x, (weight, bias), factors
        )

    if query is key and key is value:
        return record_linear(record, query, weight, bias).chunk(3, dim=-1)
    if key is value:
        return part(query, 0, 1), *part(key, 1, 3).chunk(2, dim=-1)
    return part(query, 0, 1), part(key, 1, 2), part(value, 2, 3)


def _added(
    record: Record, x: torch.Tensor, bias: Optional[nn.Parameter]
) -> torch.Tensor:
    """``x`` ``[B, T, width]`` with one more row, the same for all samples."""
    if bias is None:
        return x
    row = bias.expand(len(x), 1, -1)
    return torch.cat([x, record(row, None, (bias,), lambda _, g: {bias: (g,)})], dim=1)


def _as_float(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


@register_forward(nn.MultiheadAttention)
def multihead_attention(
    layer: nn.MultiheadAttention,
    record: Record,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: Optional[torch.Tensor] = None,
    need_weights: bool = True,
    attn_mask: Optional[torch.Tensor] = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """
    ``nn.MultiheadAttention.forward``, with all its arguments, through
    ``F.scaled_dot_product_attention`` where the weights are not asked for.

    Raises:
        ValueError: for nested tensors
        RuntimeError: for ``is_causal=True`` without ``attn_mask``, as torch does
    """
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError(
            "nn.MultiheadAttention takes padded tensors here, not nested ones: pad "
            "them and pass key_padding_mask."
        )
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    unbatched = query.dim() == 2
    batch_dim = 0 if unbatched or layer.batch_first else 1
    q, k, v = _projections(layer, record, query, key, value)
    if unbatched:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
    elif batch_dim == 1:
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    k, v = _added(record, k, layer.bias_k), _added(record, v, layer.bias_v)
    if layer.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))

    heads = layer.num_heads
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    # As torch has it: the hint replaces the mask where nothing else needs one.
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else attn_mask
    if mask is not None:
        mask = _as_float(mask, q.dtype)
        mask = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
    if key_padding_mask is not None:
        padding = _as_float(key_padding_mask, q.dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))

    dropout = layer.dropout if layer.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        weights = F.dropout(weights, dropout) if dropout > 0 else weights
        output = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        output = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    # As torch does, without a call of out_proj and its hooks.
    last, output = layer.out_proj, output.transpose(1, 2).flatten(2)
    output = record_linear(record, output, last.weight, last.bias)
    if unbatched:
        output = output.squeeze(0)
        weights = None if weights is None else weights.squeeze(0)
    elif batch_dim == 1:
        output = output.transpose(0, 1)
    return output, weights
