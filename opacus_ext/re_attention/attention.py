"""Re-Attention: attention corrected for the errors that private training makes."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from opacus_ext.re_attention.moments import Moments, attention_variance
from opacus_ext.re_attention.passes import TrackedPass, active, is_corrected
from opacus_ext.re_attention.variances import Lost, quietly
from opacus_ext.refused import Refused


def corrected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variance: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    where: str = "logits",
) -> Tensor:
    """
    Attention without the weight that tokens with noisy keys attract.

    Source: "DPFormer: Learning Differentially Private Transformer on Long-Tailed Data",
    section 5. A Gaussian error of variance sigma_i^2 in key i multiplies the expected
    weight of a token that gets little of it by exp(|q|^2 sigma_i^2 / (2 d))
    (equation 5.2, whose C = <q, q> leaves out the factor 1 / d of the logits). Dividing
    by it is

    - on the "logits", <q, k_i> / sqrt(d) - |q|^2 sigma_i^2 / (2 d): weights sum to 1.
      Nothing overflows, and keys of equal variance are not affected. The correction is
      a product of one number a query and one a key, so it becomes one more element of
      both, and ``scaled_dot_product_attention`` does the rest: memory is linear in T
      where its kernel's is;
    - on the "scores", the weights after the softmax, which then sum to less than 1:
      the paper to the letter. This one holds all [T, U] weights.

    Args:
        query: ``[*, T, d]``
        key: ``[*, U, d]``
        value: ``[*, U, e]``
        variance: sigma_i^2 of the elements of each key, broadcastable to ``[*, U, 1]``;
            it counts as a constant in the backward pass
        attn_mask: boolean or added to the logits, broadcastable to ``[*, T, U]``
        dropout_p: probability of dropping a weight
        is_causal: whether a query sees keys up to its own position only
        scale: in place of 1 / sqrt(d)
        where: "logits" or "scores"

    Returns:
        ``[*, T, e]``

    Raises:
        Refused: for another ``where``

    Example:
        >>> q, k, v = torch.ones(1, 4), torch.ones(2, 4), torch.eye(2)
        >>> noisy = torch.tensor([[0.0], [2.0]])
        >>> corrected_attention(q, k, v, noisy)  # softmax of (2, 2 - 4 * 2 / (2 * 4))
        tensor([[0.7311, 0.2689]])
        >>> corrected_attention(q, k, v, noisy, where="scores")
        tensor([[0.5000, 0.1839]])
    """
    given = query, key, value
    if where == "scores" and has_torch_function(given):
        # For who measures attention: there is no scaled_dot_product_attention in it.
        rest = attn_mask, dropout_p, is_causal, scale, where
        return handle_torch_function(
            corrected_attention, given, *given, variance, *rest
        )
    scale = query.size(-1) ** -0.5 if scale is None else scale
    wide = torch.promote_types(query.dtype, torch.float32)
    # [*, T, 1] and [*, U, 1]; scale times their product is the correction.
    left = query.to(wide).square().sum(-1, keepdim=True) * (scale / 2)
    right = variance.detach().to(wide).expand(*key.shape[:-1], 1)
    if is_causal and (attn_mask is not None or where == "scores"):
        attn_mask, is_causal = _causal(query, key, attn_mask), False
    if where == "scores":
        logits = (query @ key.mT).to(wide) * scale
        correction = torch.exp(-scale * left @ right.mT)
        if attn_mask is None:
            weights = torch.softmax(logits, -1) * correction
        else:
            # Who sees no key gets 0, as from scaled_dot_product_attention.
            seen = attn_mask
            if seen.dtype != torch.bool:
                logits, seen = logits + attn_mask, attn_mask != -torch.inf
            logits = logits.masked_fill(~seen, torch.finfo(wide).min)
            weights = (torch.softmax(logits, -1) * correction).masked_fill(~seen, 0)
        return F.dropout(weights, dropout_p).to(value.dtype) @ value
    if where != "logits":
        raise Refused(
            f'where must be "logits" or "scores", not {where!r}.', parameter="where"
        )
    if right.size(-2):
        # What all keys have in common changes nothing, but would cost digits.
        right = right - right.amin(-2, keepdim=True)
    right = right.clamp(max=torch.finfo(key.dtype).max)
    # Widths that are multiples of 8, and equal, are what the kernels that save memory
    # ask for.
    blank = (0, -(query.size(-1) + 1) % 8)
    queries = F.pad(torch.cat([query, left.to(query.dtype)], -1), blank)
    keys = F.pad(torch.cat([key, -right.to(key.dtype)], -1), blank)
    width = value.size(-1)
    if width == query.size(-1):
        value = F.pad(value, (0, queries.size(-1) - width))
    out = F.scaled_dot_product_attention(
        queries, keys, value, attn_mask, dropout_p, is_causal, scale=scale
    )
    return out[..., :width]


def _causal(query: Tensor, key: Tensor, mask: Optional[Tensor]) -> Tensor:
    """A mask that is causal as well."""
    shape = query.size(-2), key.size(-2)
    seen = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, -torch.inf)


def errors_of(
    key: Tensor, module: Optional[nn.Module]
) -> Optional[Tuple[TrackedPass, Tensor]]:
    """The pass that tracks errors and the keys' variance; None if none does."""
    mode = active()
    if mode is not None:
        return mode, mode.key_variance(key, module)
    if module is not None and is_corrected(id(module), module.training):
        raise Refused(
            f"{type(module).__name__}: attention {list(key.shape)} is computed outside "
            "of the model's forward pass, where errors are not tracked.",
            module=type(module).__name__,
            remedy="Call the model itself.",
        )
    return None


def re_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    *,
    module: Optional[nn.Module] = None,
) -> Tensor:
    """
    ``scaled_dot_product_attention``, corrected where the model's errors are tracked.

    Inside a model of which :func:`opacus_ext.track_errors` tracks the errors it is
    :func:`corrected_attention` with the variances of these very keys; anywhere else it
    is plain attention.

    Args:
        query: ``[*, H, T, d]``
        key: ``[*, H, U, d]``
        value: ``[*, H, U, e]``
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as for
            ``scaled_dot_product_attention``
        module: the module that computes this attention, for messages

    Returns:
        ``[*, H, T, e]``

    Raises:
        Refused: if the errors of the keys can't be tracked; it names the operation

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> re_attention(x, x, x, is_causal=True).shape
        torch.Size([1, 2, 5, 4])
    """
    errors = errors_of(key, module)
    if errors is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, errors)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor],
    dropout_p: float,
    is_causal: bool,
    scale: Optional[float],
    errors: Tuple[TrackedPass, Tensor],
) -> Tensor:
    """:func:`re_attention` with the errors at hand; notes those of the output."""
    mode, variance = errors
    tracker = mode.tracker
    repeats = query.size(-3) // max(key.size(-3), 1)
    queries, values = mode.token(query), mode.token(value)
    mode.paused = True
    try:
        if repeats > 1:  # a group of queries has one key
            key = key.repeat_interleave(repeats, -3)
            value = value.repeat_interleave(repeats, -3)
            variance = _repeat_heads(variance, repeats)
        bounded = variance
        if tracker.cap is not None:
            size = key.detach().to(variance.dtype).square().mean(-1, keepdim=True)
            bounded = torch.minimum(variance, tracker.cap * size)
        out = corrected_attention(
            query,
            key,
            value,
            bounded,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            where=tracker.where,
        )
    finally:
        mode.paused = False
    for each in (queries, values):
        if isinstance(each, Lost):
            mode.table.set(out, each)
            return out
    with quietly(query):
        made = attention_variance(
            Moments(query.detach(), queries),
            Moments(key.detach(), variance),
            Moments(value.detach(), _repeat_heads(values, repeats)),
            mask=attn_mask,
            causal=is_causal,
            scale=scale,
            out=out.detach(),
            correction=bounded,
        )
    mode.table.set(out, made)
    return out


def _repeat_heads(variance: Tensor, repeats: int) -> Tensor:
    """The variance of keys, or values, that are repeated for a group of queries."""
    one = repeats == 1 or variance.dim() < 3 or variance.size(-3) == 1
    return variance if one else variance.repeat_interleave(repeats, -3)


class SelfAttention(nn.Module):
    """
    Multi-head self-attention that Re-Attention corrects.

    Plain attention until :func:`opacus_ext.track_errors` is called for the model.

    Args:
        width: model dimension
        heads: number of heads; must divide ``width``
        causal: whether a token sees itself and earlier ones only
        dropout: probability of dropping an attention weight
        bias: whether the two linear layers have biases

    Raises:
        Refused: if ``heads`` does not divide ``width``

    Example:
        >>> attention = SelfAttention(8, heads=2, causal=True)
        >>> attention(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int = 1,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__()
        if width % heads:
            raise Refused(
                f"heads={heads} must divide width={width}.", parameter="heads"
            )
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.proj = nn.Linear(width, width, bias)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """
        Args:
            x: ``[B, T, width]``
            mask: boolean, which tokens take part, ``[B, T]``, or which a token sees,
                broadcastable to ``[B, heads, T, T]``

        Returns:
            ``[B, T, width]``
        """
        width = self.proj.in_features // self.heads
        # [B, T, 3 * width] -> three of [B, heads, T, width / heads]
        q, k, v = (
            z.reshape(*z.shape[:-1], self.heads, width).transpose(1, 2)
            for z in self.qkv(x).chunk(3, dim=-1)
        )
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        out = re_attention(q, k, v, mask, dropout, self.causal, module=self)
        return self.proj(out.transpose(1, 2).flatten(2))
