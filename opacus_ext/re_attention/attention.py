"""Re-Attention: attention corrected for the errors that private training makes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opacus_ext.re_attention.moments import attention_variance, wide
from opacus_ext.re_attention.propagation import Propagating, Uncertain, quietly
from opacus_ext.refused import Refused


def corrected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variance: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
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
    scale = query.size(-1) ** -0.5 if scale is None else scale
    dtype = torch.promote_types(query.dtype, torch.float32)
    # [*, T, 1] and [*, U, 1]; scale times their product is the correction.
    left = query.to(dtype).square().sum(-1, keepdim=True) * (scale / 2)
    right = variance.detach().to(dtype).expand(*key.shape[:-1], 1)
    if is_causal and (attn_mask is not None or where == "scores"):
        attn_mask, is_causal = _causal(query, key, attn_mask), False
    if where == "scores":
        logits = (query @ key.mT).to(dtype) * scale
        correction = torch.exp(-scale * left @ right.mT)
        seen = logits.new_ones((), dtype=torch.bool) if attn_mask is None else attn_mask
        if seen.dtype != torch.bool:
            logits, seen = logits + seen, seen != -torch.inf
        logits = logits.masked_fill(~seen, torch.finfo(dtype).min)
        # Who sees no key gets 0, as from scaled_dot_product_attention.
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


def _causal(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """A mask that is causal as well."""
    shape = query.size(-2), key.size(-2)
    seen = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, -torch.inf)


def re_attention(
    query: Uncertain,
    key: Uncertain,
    value: Uncertain,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Uncertain:
    """
    ``scaled_dot_product_attention``, corrected where the model's errors are tracked.

    For the method ``propagate`` of a module. Errors of the keys are those of
    :class:`~opacus_ext.re_attention.Uncertain`.

    Args:
        query: ``[*, H, T, d]``
        key: ``[*, H, U, d]``
        value: ``[*, H, U, e]``
        attn_mask, dropout_p, is_causal, scale: as for ``scaled_dot_product_attention``

    Returns:
        ``[*, H, T, e]``, and its variance ``[*, H, T, 1]``

    Example:
        >>> x = Uncertain(torch.randn(1, 2, 5, 4))
        >>> re_attention(x, x, x, is_causal=True).value.shape
        torch.Size([1, 2, 5, 4])
    """
    query.same_pass(key, value)
    values, errors = (query.value, key.value, value.value), key.errors
    rest = attn_mask, dropout_p, is_causal
    if errors is None:
        out = F.scaled_dot_product_attention(*values, *rest, scale=scale)
        return Uncertain(out)
    errors.corrected += 1
    scale = query.value.size(-1) ** -0.5 if scale is None else scale
    moments = query.moments(), key.moments(), value.moments()
    correction = moments[1].variance
    if errors.cap is not None:
        with quietly(key.value):
            size = wide(key.value).square().mean(-1, keepdim=True)
            correction = torch.minimum(correction, errors.cap * size)
    out = corrected_attention(*values, correction, *rest, scale, errors.where)
    with quietly(out):
        variance = attention_variance(
            *moments, out, correction, attn_mask, is_causal, scale
        )
    return Uncertain(out, variance, errors)


class SelfAttention(Propagating):
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

    Shape:
        - x: ``[B, T, width]``
        - mask: boolean, which tokens take part, ``[B, T]``, or which a token sees,
          broadcastable to ``[B, heads, T, T]``; by default all
        - output: ``[B, T, width]``

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

    def propagate(self, x: Uncertain, mask: Tensor | None = None) -> Uncertain:
        """Computes the output, and the variance of its error."""
        # [B, T, 3 * width] -> three of [B, heads, T, width / heads]
        q, k, v = x.through(self.qkv).parts(
            lambda z: z.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :]
        dropout = self.dropout * self.training
        out = re_attention(q, k, v, mask, dropout, self.causal)
        return out.moved(lambda z: z.transpose(1, 2).flatten(2)).through(self.proj)
