"""Variances behind linear layers, activations, norms and attention.

Source: "DPFormer: Learning Differentially Private Transformer on Long-Tailed Data",
section 5.2.2 and appendix D, with its formulas corrected and, where it is silent
(everything but linear layers and ReLU), derived here. Conventions of all functions:

- Elements are taken to be independent, and Gaussian where a function's result depends
  on their distribution: whatever distribution comes out of a layer, the next one sees a
  Gaussian with its mean and variance (the paper's moment matching).
- A variance broadcasts to its mean: ``[B, T, width]``, or one number a token,
  ``[B, T, 1]``. The variances returned are means over the width, ``[*, 1]``, unless a
  function says otherwise.
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
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from opacus_ext.grad_sample.core.vmap import whole


class Moments(NamedTuple):
    """Mean ``[*, width]`` of a random tensor, and variance, which broadcasts to it."""

    mean: Tensor
    variance: Tensor

    def at(self, tokens: slice) -> Moments:
        """Selects tokens; the variance has as many as the mean."""
        return Moments(self.mean[..., tokens, :], self.variance[..., tokens, :])


def wide(x: Tensor) -> Tensor:
    """Detaches a tensor, and converts it to float32 if it is narrower."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def token(variance: Tensor) -> Tensor:
    """Returns the mean over the last dimension, ``[*, 1]``."""
    return variance if variance.size(-1) == 1 else variance.mean(-1, keepdim=True)


def _wide(x: Moments) -> Moments:
    return Moments(wide(x.mean), wide(x.variance))


def _squares(x: Tensor) -> Tensor:
    """Returns the sum of squares over the last dimension, ``[*, 1]``."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()


def linear(
    x: Moments, weight: Tensor, weight_variance: Tensor, bias_variance: Tensor | None
) -> Tensor:
    """
    The variance of each output of a linear layer, ``[*, out]``.

    Lemma D.1, with the sum over inputs that equation 5.5 leaves out: s_w and s_b are
    the variances of weight and bias, s and m those and the values of the n inputs:

        Var[y_j] = s (sum_i W_ji^2 + n s_w) + s_w sum_i m_i^2 + s_b
    """
    mean, variance = _wide(x)
    noise = weight_variance.mean()
    gain = wide(weight).square().sum(-1) + weight.size(-1) * noise
    own = _squares(mean) * noise
    if bias_variance is not None:
        own = own + bias_variance.mean()
    return own + token(variance) * gain


# Least-maximum fits, highest power first. The first: logit of Var[relu(t + z)]. The
# second: logit of Phi.
_RELU_FIT = (0.08099547, -0.0902245, 1.77563086, -0.66070619)
_PHI_FIT = (0.07056, 0.0, 1.5976, 0.0)


def _fitted(t: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Returns the logistic function of a polynomial in ``t``."""
    total = torch.zeros_like(t)
    for coefficient in coefficients:
        total = total * t + coefficient
    return total.sigmoid()


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
    return token(_fitted(t, _RELU_FIT) * s)


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
    first = _fitted(a, _PHI_FIT) + a * phi / total
    second = phi * (1 + (1 - a.square()) / total) / root
    variance = s * first.square() + s.square() / 2 * second.square()
    return token(variance).clamp(min=0)


def norm(
    x: Moments,
    weight: Tensor | None,
    eps: float | None,
    weight_variance: Tensor | None = None,
    bias_variance: Tensor | None = None,
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
    noise = token(s) * (free / width)
    center = m - m.mean(-1, keepdim=True) if centered else m
    signal = _squares(center) / width
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
    ``out`` o ``[*, T, e]``. Each of q, k and v has one variance a token, ``[*, T, 1]``.
    The scores are products of independent factors (lemma D.1):
    Var[a_u] = sum_i (s_qi s_ki + m_qi^2 s_ki + s_qi m_ki^2) scale^2.
    """
    width = v.mean.size(-1)
    q_squares, k_squares = _squares(q.mean), _squares(k.mean)
    left = torch.cat([q_squares + q.mean.size(-1) * q.variance, q.variance], -1)
    right = torch.cat([k.variance, k_squares], -1)
    of_scores = (left * scale**2) @ right.mT  # Var[a_u], [*, T, U]
    shares = weights.square()
    lifted = shares * of_scores
    # mean_j sum_u lifted_u (v_uj - o_j)^2
    sums = lifted @ torch.cat([v.mean, _squares(v.mean)], -1)
    inner = (out * sums[..., :width]).sum(-1, keepdim=True)
    moved = sums[..., width:] - 2 * inner
    moved = moved + _squares(out) * lifted.sum(-1, keepdim=True)
    return shares @ v.variance + moved.clamp(min=0) / width


# Attention weights in memory at once, of all samples and heads.
_CHUNK = 1 << 24
_CHUNK_IN_CACHE = 1 << 18


def attention_variance(
    q: Moments,
    k: Moments,
    v: Moments,
    out: Tensor,
    correction: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """
    :func:`attention`, some queries at a time, so that memory is linear in T, with the
    ``correction`` of the logits (``[*, U, 1]``) in the weights. Other arguments are
    those of ``scaled_dot_product_attention``, and its output.
    """
    q, k, v = (
        Moments(wide(x.mean), token(x.variance).expand(*x.mean.shape[:-1], 1))
        for x in (q, k, v)
    )
    out, (length, width), keys = wide(out), q.mean.shape[-2:], k.mean.size(-2)
    chunk = _CHUNK if q.mean.is_cuda else _CHUNK_IN_CACHE
    heads = whole(q.mean).numel() // max(length * width, 1)  # of all samples
    rows = max(chunk // max(heads * keys, 1), 8)
    # One more element of both, as in the attention.
    left = torch.cat([q.mean * scale, _squares(q.mean) * (-(scale**2) / 2)], -1)
    right = torch.cat([k.mean, correction.expand_as(k.variance)], -1)
    parts = []
    for start in range(0, length, rows):
        at = slice(start, min(start + rows, length))
        # The keys behind the last of these queries have no part in it.
        seen = slice(min(at.stop, keys) if causal else keys)
        logits = left[..., at, :] @ right[..., seen, :].mT
        if causal:
            ones = torch.ones(logits.shape[-2:], dtype=torch.bool, device=out.device)
            logits = logits.masked_fill(~ones.tril(start), -torch.inf)
        if mask is not None:
            part = mask.expand(*mask.shape[:-2], length, keys)[..., at, seen]
            if part.dtype == torch.bool:
                logits = logits.masked_fill(~part, -torch.inf)
            else:
                logits = logits + part
        weights = torch.softmax(logits, -1)
        if mask is not None:
            weights = weights.nan_to_num()  # of who sees no key
        chosen = q.at(at), k.at(seen), v.at(seen)
        parts.append(attention(*chosen, weights, out[..., at, :], scale))
    return torch.cat(parts, -2) if parts else q.variance
