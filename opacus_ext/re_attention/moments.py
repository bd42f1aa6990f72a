"""Variances through activations, norms and attention, one number a token.

Source: "DPFormer: Learning Differentially Private Transformer on Long-Tailed Data",
section 5.2.2 and appendix D, with its formulas corrected and, where it is silent
(everything but linear layers and ReLU), derived here. Conventions of all functions:

- Elements are taken to be independent, and Gaussian where a function's result depends
  on their distribution: whatever distribution comes out of a layer, the next one sees a
  Gaussian with its mean and variance (the paper's moment matching).
- A variance broadcasts to its mean: ``[B, T, width]``, or one number a token,
  ``[B, T, 1]``. The variances returned are means over the width, ``[*, 1]``; those of
  a tensor of one dimension are of its elements.
- The values of the forward pass are taken for the means, as in the paper. Where errors
  are larger than the signal, they are not: the true mean after a LayerNorm shrinks, the
  value doesn't, and later variances come out too small (down to a quarter after two
  blocks with errors of ten times the signal; their order stays).
- bfloat16 and float16 are computed, and returned, in float32. Variances are never
  negative, and a variance of 0 gives 0.

Independence leaves out that errors of a weight are the same for all tokens, as are
those of an embedding wherever its token occurs, and that the elements of a token share
errors behind a layer.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from opacus_ext.grad_sample.core.vmap import whole
from opacus_ext.re_attention.variances import Variance, last_mean, squares, wide


class Moments(NamedTuple):
    """Mean ``[*, width]`` of a random tensor, and variance, which broadcasts to it."""

    mean: Tensor
    variance: Tensor


def _wide(x: Moments) -> Moments:
    return Moments(wide(x.mean), wide(x.variance))


# Least-maximum fits, highest power first. The first: logit of Var[relu(t + z)]. The
# second: logit of Phi.
_RELU_FIT = (0.08099547, -0.0902245, 1.77563086, -0.66070619)
_PHI_FIT = (0.07056, 0.0, 1.5976, 0.0)


def _cubic(t: Tensor, a3: float, a2: float, a1: float, a0: float) -> Tensor:
    constant = partial(torch.full, (), dtype=t.dtype, device=t.device)
    y = torch.add(constant(a2), t, alpha=a3)
    for a in (a1, a0):
        y = torch.addcmul(constant(a), y, t)
    return y


def relu(x: Moments) -> Tensor:
    """
    The variance after ReLU.

    With c the mean, d the variance and t = c / sqrt(d):

        E[y] = c Phi(t) + sqrt(d) phi(t)
        Var[y] = (c^2 + d) Phi(t) + c sqrt(d) phi(t) - E[y]^2

    Equation 5.6 as printed subtracts c^2 in place of E[y]^2, which gives negative
    variances (c = -1, d = 1). Var[y] / d is computed as a logistic function of a cubic
    in t, fitted: within 4e-4 of the true one everywhere.
    """
    m, s = _wide(x)
    t = m * s.clamp(min=torch.finfo(s.dtype).tiny).rsqrt()
    share = _cubic(t, *_RELU_FIT).sigmoid_()
    if s.size(-1) > 1 or s.dim() < 2:
        return last_mean(share.mul_(s))
    return share.mean(-1, keepdim=True) * s


def gelu(x: Moments) -> Tensor:
    """
    The variance after GELU, also in its approximation by a hyperbolic tangent.

    The paper takes ReLU's moments for it (remark D.3); they are 36 % too high at mean
    0 and standard deviation 0.01. Here, with m the mean, s^2 the variance,
    r = sqrt(1 + s^2) and a = m / r:

        E[y] = m Phi(a) + s^2 phi(a) / r          (E[x Phi(x)], by Stein's lemma)
        E[y'] = Phi(a) + a phi(a) / r^2           (its derivative in m)
        Var[y] = sum_(n >= 1) s^(2n) / n! (d^n E[y] / dm^n)^2     (Hermite expansion)

    of which the first two terms are taken: at most 0.0182 s^2 too low (at a mean of
    -1.73 and s = 2.11) and 0.0011 s^2 too high, for all means and all s from 1e-4 to
    1000.
    """
    m, s = _wide(x)
    total = 1 + s
    root = total.sqrt()
    a = (m / root).clamp(-40.0, 40.0)
    phi = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    first = torch.addcmul(_cubic(a, *_PHI_FIT).sigmoid_(), a, phi / total)
    second = phi * (1 + (1 - a.square()) / total) / root
    return _two_terms(s, first, second)


def silu(x: Moments) -> Tensor:
    """
    The variance after SiLU, x S(x) with S the logistic function: the two terms of
    :func:`gelu` with S in the place of Phi and S' = S (1 - S) in that of phi. The
    logistic distribution has the variance pi^2 / 3; 3.05 in its place has the least
    error, 0.0281 s^2 for all means and all s from 1e-4 to 1000.
    """
    m, s = _wide(x)
    total = 1 + s / 3.05
    root = total.sqrt()
    a = m / root
    share = torch.sigmoid(a)
    slope = share * (1 - share)
    first = share + a * slope / total
    second = slope * (1 + (1 + a * (1 - 2 * share)) / total) / root
    return _two_terms(s, first, second)


def _two_terms(s: Tensor, first: Tensor, second: Tensor) -> Tensor:
    variance = s * first.square() + s.square() / 2 * second.square()
    return last_mean(variance).clamp(min=0)


def norm(
    x: Moments,
    weight: Optional[Tensor],
    eps: Optional[float],
    weight_variance: Optional[Tensor] = None,
    bias_variance: Optional[Tensor] = None,
    centered: bool = True,
) -> Tensor:
    """
    The variance after LayerNorm, or without centering RMSNorm, over the last dimension.

    With v(m) the variance over the means, s the mean variance of the errors, and the
    shares that signal and error have in the expected square by which is divided,

        tau^2 = v(m) + (1 - 1/d) s + eps,  q = v(m) / tau^2,  r = (1 - 1/d) s / tau^2

    that square has a variance of tau^4 (4 q r + 2 r^2) / D with D = d - 1 dimensions,
    and to first order in 1 / D, with h = (m - mean(m)) / tau,

        E[y] = h (1 + r (3 q / 2 + 3 r / 4 - 1) / D)
        mean_i E[y_i^2] = 1 - (1 - q - r) (1 + (4 q r + 2 r^2) / D)
        mean_i Var[y_i] = r (1 - (q (2 - q) + r (2 - 9 q / 2 - 2 r)) / D)

    times the weight's mean square. RMSNorm: tau^2 = mean(m^2) + s + eps,
    q = mean(m^2) / tau^2, r = s / tau^2 and D = d. Small errors: first order, exact for
    s -> 0 where all elements err alike. Large ones: variance 1. Against sampling, with
    errors of 0.01 to 100 times the signal, it is within 1 % from width 16 on (8: 3 %)
    where all elements err alike, with the signal spread evenly or in one element alone;
    and within 4 % at width 16 (64: 1 %) where their variances differ by up to a factor
    of 9 and the signal is spread evenly. A signal in one element takes the error of
    that one away, not a mean one: 5 % too low to 8 % too high at width 16 (64: 2 %) for
    standard deviations that rise evenly to three times the first, 50 % too high
    (64: 13 %) if its element alone has 9 times the variance. It is a token's average:
    an element that has all of the signal errs less than the others. An error in weight
    and bias adds s_w E[h_i^2] + s_b (lemma D.1).
    """
    m, s = _wide(x)
    eps = torch.finfo(x.mean.dtype).eps if eps is None else eps  # as nn.RMSNorm's
    width = m.size(-1)
    free = width - 1 if centered else width
    noise = s.mean(-1, keepdim=True) * (free / width)
    center = m - m.mean(-1, keepdim=True) if centered else m
    signal = squares(center) / width
    squared = signal + noise + eps
    q, r = signal / squared, noise / squared
    less = q * (2 - q) + r * (2 - 4.5 * q - 2 * r)
    variance = r * (1 - less / max(free, 1))
    if weight is not None:
        variance = variance * wide(weight).square().mean()
    if weight_variance is not None:
        variance = variance + (q + r) * weight_variance.mean()
    if bias_variance is not None:
        variance = variance + bias_variance.mean()
    return variance.clamp(min=0)


def attention(
    q: Moments, k: Moments, v: Moments, weights: Tensor, out: Tensor, scale: float
) -> Tensor:
    """
    The variance after softmax(q k^T scale) v, with independent errors in q, k and v.

    With p the attention weights of the means and o = p v, errors of the scores move the
    output by sum_u p_u (v_u - o) da_u, to first order. Keys err independently; the
    errors that a query brings into the scores are taken as independent too, which needs
    no ``[T, d, e]`` tensor; values err by themselves:

        Var[o_j] = sum_u p_u^2 Var[a_u] (v_uj - o_j)^2 + sum_u p_u^2 s_vuj

    of which this is the mean over j, ``[*, T, 1]``, of ``weights`` p ``[*, T, U]`` and
    ``out`` o ``[*, T, e]``. The scores are products of independent factors
    (lemma D.1): Var[a_u] = sum_i (s_qi s_ki + m_qi^2 s_ki + s_qi m_ki^2) scale^2.
    """
    q, k, v = (Moments(m, s.mean(-1, keepdim=True)) for m, s in map(_wide, (q, k, v)))
    o, e = wide(out), v.mean.size(-1)
    p_squares = wide(weights).square()
    variance = p_squares @ v.variance
    lifted = p_squares * _score_variance(q, k, scale)
    # mean_j sum_u lifted_u (v_uj - o_j)^2
    columns = torch.cat([v.mean, squares(v.mean)], -1)
    sums = lifted @ columns
    inner = (o * sums[..., :e]).sum(-1, keepdim=True)
    moved = sums[..., e:] - 2 * inner + squares(o) * lifted.sum(-1, keepdim=True)
    return variance + moved.clamp(min=0) / e


def _score_variance(q: Moments, k: Moments, scale: float) -> Tensor:
    """``[*, T, U]``, of queries and keys with one variance each."""
    d = q.mean.size(-1)
    q2, k2 = squares(q.mean), squares(k.mean)
    s_q, s_k = q.variance.expand_as(q2), k.variance.expand_as(k2)
    left, right = torch.cat([q2 + d * s_q, s_q], -1), torch.cat([s_k, k2], -1)
    return (left * scale**2) @ right.transpose(-1, -2)


# Attention weights in memory at once, of all samples and heads.
_CHUNK = 1 << 24
_CHUNK_IN_CACHE = 1 << 18


def attention_variance(
    q: Moments,
    k: Moments,
    v: Moments,
    *,
    mask: Optional[Tensor],
    causal: bool,
    scale: Optional[float],
    out: Tensor,
    correction: Optional[Tensor] = None,
) -> Variance:
    """
    :func:`attention` of one variance a token, some queries at a time, so that memory is
    linear in T, with the ``correction`` of the logits (``[B, H, U, 1]``) in the
    weights. Other arguments are those of ``scaled_dot_product_attention``, and its
    output.
    """
    (length, d), keys = q.mean.shape[-2:], k.mean.size(-2)
    scale = d**-0.5 if scale is None else scale
    full = (*q.mean.shape[:-1], 1)
    s_q = q.variance.expand(full)
    q, k, v = (Moments(wide(x.mean), x.variance) for x in (q, k, v))
    k, v = (Moments(x.mean, x.variance.expand(*x.mean.shape[:-1], 1)) for x in (k, v))
    chunk = _CHUNK if q.mean.is_cuda else _CHUNK_IN_CACHE
    rows = max(chunk // max(whole(q.mean).numel() // (length * d) * keys, 1), 8)
    left, right = q.mean * scale, k.mean
    if correction is not None:  # one more element of both, as in the attention
        left = torch.cat([left, squares(q.mean) * (-(scale**2) / 2)], -1)
        right = torch.cat([right, correction.expand_as(k.variance)], -1)
    given, parts, every = wide(out), [], (k, v)
    for at in range(0, length, rows):
        to = min(at + rows, length)
        seen = min(to, keys) if causal else keys  # the others have no part in it
        k, v = (Moments(*(z[..., :seen, :] for z in x)) for x in every)
        logits = left[..., at:to, :] @ right[..., :seen, :].transpose(-1, -2)
        if causal:
            ones = torch.ones(to - at, seen, dtype=torch.bool, device=logits.device)
            logits.masked_fill_(ones.tril_(at).logical_not_(), -torch.inf)
        if mask is not None:
            part = mask[..., at:to, :] if mask.size(-2) > 1 else mask
            part = part[..., :seen] if part.size(-1) > 1 else part
            if part.dtype == torch.bool:
                logits = logits.masked_fill(~part, -torch.inf)
            else:
                logits = logits + part
        p = torch.softmax(logits, -1)
        p = p if mask is None else p.nan_to_num_()
        queries = Moments(q.mean[..., at:to, :], s_q[..., at:to, :])
        at_queries = given[..., at:to, :]
        parts.append(attention(queries, k, v, p, at_queries, scale))
    return Variance(torch.cat(parts, -2) if parts else s_q)
