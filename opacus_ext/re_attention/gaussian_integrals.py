"""Integrals of a Gaussian through activations, free of cancellation.

Every activation here satisfies f(x) - f(-x) = x. So f(x) = x + f(-x), and with Stein's
lemma, Cov(x, f(x)) = s^2 E[f'(x)], the moments at a positive mean follow from those at
the negative one by terms that do not cancel:

    E[f](|m|) = |m| + E[f](-|m|)
    Var[f](|m|) = s^2 (1 - 2 E[f'](-|m|)) + Var[f](-|m|)

Only means <= 0 are left. There a function returns (mean, variance, slope E[f']).
"""

import math
from typing import Callable, NamedTuple, Tuple

import numpy as np
import torch
from torch import Tensor

Triple = Tuple[Tensor, Tensor, Tensor]

_ROOT_HALF = math.sqrt(0.5)
_ROOT_HALF_PI = math.sqrt(math.pi / 2)
_ROOT_TWO_PI = math.sqrt(2 * math.pi)


def density(x: Tensor) -> Tensor:
    """The standard Gaussian density."""
    return torch.exp(-0.5 * x * x) / _ROOT_TWO_PI


def mills(b: Tensor) -> Triple:
    """
    Mills's ratio R = (1 - Phi(b)) / phi(b) of b >= 0, K1 = 1/R - b and K2 = 1/K1 - b.

    From 3 on they are tails of Laplace's continued fraction,
    R = 1/(b + 1/(b + 2/(b + 3/(b + ...)))), whose terms are positive, so that nothing
    cancels; below, erfcx and the definitions lose two digits at most. The integrals of
    the tail are products: int_b^inf (x - b) phi = phi R K1, and with (x - b)^2,
    phi R K1 K2.
    """
    large = b.clamp(min=3.0)
    rest = large
    for k in range(36 if b.dtype == torch.float64 else 15, 2, -1):
        rest = large + k / rest
    k2 = 2 / rest
    k1 = 1 / (large + k2)
    r = 1 / (large + k1)
    small = b.clamp(max=3.0)
    r_small = torch.special.erfcx(small * _ROOT_HALF) * _ROOT_HALF_PI
    k1_small = 1 / r_small - small
    near = b < 3
    return (
        torch.where(near, r_small, r),
        torch.where(near, k1_small, k1),
        torch.where(near, 1 / k1_small - small, k2),
    )


def relu(m: Tensor, variance: Tensor) -> Triple:
    """ReLU at means ``-m <= 0``; see :func:`mills` for the integrals."""
    s = variance.sqrt()
    b = ratio(m, s)
    r, k1, k2 = mills(b)
    tail = density(b)
    mean = tail * r * k1
    return s * mean, variance * mean * (k2 - mean), tail * r


def ratio(m: Tensor, s: Tensor) -> Tensor:
    """``m / s``, at most 40 (no mass of a Gaussian is left there), 0 at 0 / 0."""
    tiny = torch.finfo(s.dtype).tiny
    return (m / s.clamp(min=tiny)).clamp(max=40.0)


class Smooth(NamedTuple):
    """
    A smooth activation with f(x) - f(-x) = x.

    Attributes:
        value: f
        difference: ``(x, d)`` to f(x + d) - f(x) without cancellation
        remainder: f - ReLU of positive x; it is even, so this is all of it
        reach: where the remainder has vanished
        switch: the standard deviation up to which Gauss-Hermite nodes are used, and
            from which the remainder is integrated on a fixed grid
        nodes: how many of the latter
    """

    value: Callable[[Tensor], Tensor]
    difference: Callable[[Tensor, Tensor], Tensor]
    remainder: Callable[[Tensor], Tensor]
    reach: float
    switch: float
    nodes: int


def _gated(
    gate: Callable, step: Callable, reach: float, switch: float, nodes: int
) -> Smooth:
    """
    f(x) = x S(g(x)) with S the logistic function, g odd and ``step(x, d)`` equal to
    g(x + d) - g(x). Differences of f keep their digits, as for any g < h
    S(h) - S(g) = S(h) S(-g) (1 - exp(g - h)).
    """

    def difference(x: Tensor, d: Tensor) -> Tensor:
        before, after, gap = gate(x), gate(x + d), step(x, d)
        low, high = torch.minimum(before, after), torch.maximum(before, after)
        change = torch.sigmoid(high) * torch.sigmoid(-low) * -torch.expm1(-gap.abs())
        return d * torch.sigmoid(after) + x * change * gap.sign()

    return Smooth(
        value=lambda x: x * torch.sigmoid(gate(x)),
        difference=difference,
        remainder=lambda x: -x * torch.sigmoid(-gate(x)),
        reach=reach,
        switch=switch,
        nodes=nodes,
    )


SILU = _gated(lambda x: x, lambda x, d: d, reach=36.0, switch=1.0, nodes=64)

_TANH = (2 * math.sqrt(2 / math.pi), 0.044715)
GELU_TANH = _gated(
    lambda x: _TANH[0] * (x + _TANH[1] * x**3),
    lambda x, d: _TANH[0] * d * (1 + _TANH[1] * (3 * x * (x + d) + d * d)),
    reach=7.0,
    switch=0.5,
    nodes=40,
)


def smooth(m: Tensor, variance: Tensor, f: Smooth) -> Triple:
    """A smooth activation at means ``-m <= 0``, by quadrature."""
    small = variance <= f.switch**2
    below = torch.where(small, variance, 0.5 * f.switch**2)
    above = torch.where(small, 2 * f.switch**2, variance)
    pairs = zip(_hermite(m, below, f), _on_grid(m, above, f))
    mean, var, slope = (torch.where(small, a, b) for a, b in pairs)
    return mean, var, slope


def _hermite(m: Tensor, variance: Tensor, f: Smooth) -> Triple:
    """Gauss-Hermite in differences f(x + d) - f(x), so that tiny variances survive."""
    x, s = -m, variance.sqrt()
    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    weights = weights / weights.sum()
    gaps = [f.difference(x, s * z) for z in nodes]
    mean = sum(w * gap for w, gap in zip(weights, gaps))
    var = sum(w * (gap - mean) ** 2 for w, gap in zip(weights, gaps))
    lift = sum(w * z * gap for z, w, gap in zip(nodes, weights, gaps))
    slope = lift / s.clamp(min=torch.finfo(s.dtype).tiny)
    return f.value(x) + mean, var, slope


def _on_grid(m: Tensor, variance: Tensor, f: Smooth) -> Triple:
    """ReLU in closed form, and the remainder by Gauss-Legendre on [0, reach]."""
    s = variance.sqrt()
    mean, var, slope = relu(m, variance)
    t, inv = ratio(m, s), 1 / s
    nodes, weights = np.polynomial.legendre.leggauss(f.nodes)
    first = second = lift = torch.zeros_like(m + s)
    for x, w in zip((nodes + 1) * f.reach / 2, weights * f.reach / 2):
        rest = float(f.remainder(torch.tensor(x, dtype=torch.float64)))
        right, left = x * inv + t, x * inv - t
        p, q = density(right) * inv * w, density(left) * inv * w
        first = first + rest * (p + q)
        second = second + rest * (2 * x + rest) * p + rest * rest * q
        lift = lift + rest * inv * (right * p - left * q)
    total = var + second - (2 * mean + first) * first
    return mean + first, total.clamp(min=0), slope + lift


def gelu(m: Tensor, variance: Tensor) -> Triple:
    """
    The exact GELU, x Phi(x), at means ``-m <= 0``.

    With r = sqrt(1 + s^2), b = m / r, and R, K1 of :func:`mills`:

        E[f] = phi(b) (s^2 R K1 - b R) / r,      E[f'] = phi(b) (R - b / r^2)

    are the textbook forms, mu Phi(mu / r) + s^2 phi(mu / r) / r and its derivative,
    without their cancellation. For the variance up to s = 1/2, the Hermite expansion
    Var f = sum_n s^(2n) / n! E[f^(n)]^2, a sum of squares, with the derivatives of E[f]
    in mu, (-1)^n phi r^(1-n) (He_(n-2) - He_n / r^2) for n >= 2; it converges like
    (s / r)^(2n). Above, ReLU and the remainder on a grid.
    """
    root = (1 + variance).sqrt()
    b = (m / root).clamp(max=40.0)
    r, k1, _ = mills(b)
    tail = density(b)
    mean = tail * (variance * r * k1 - b * r) / root
    slope = tail * (r - b / root**2)

    switch = 0.25
    small = variance <= switch
    series = _gelu_series(m, torch.where(small, variance, 0.5 * switch))
    grid = _on_grid(m, torch.where(small, 2 * switch, variance), _GELU)[1]
    return mean, torch.where(small, series, grid), slope


def _gelu_series(m: Tensor, variance: Tensor) -> Tensor:
    root = (1 + variance).sqrt()
    a = -(m / root).clamp(max=40.0)
    tail = density(a)
    share = variance / root**2
    slope = tail * (mills(-a)[0] + a / root**2)
    total = variance * slope**2
    # h_n = phi He_n / sqrt(n!): bounded, by its three-term recurrence
    before, h = tail, a * tail
    older, power = [before, h], share
    for n in range(2, 31 if m.dtype == torch.float64 else 18):
        before, h = h, (a * h - math.sqrt(n - 1) * before) / math.sqrt(n)
        older.append(h)
        power = power * share
        term = older[n - 2] / math.sqrt(n * (n - 1)) - h / root**2
        total = total + root**2 * power * term**2
    return total


def _gelu_remainder(x: Tensor) -> Tensor:
    return -x * 0.5 * torch.special.erfc(x * _ROOT_HALF)


_GELU = Smooth(
    value=lambda x: x * torch.special.ndtr(x),
    difference=lambda x, d: x,  # the series stands in
    remainder=_gelu_remainder,
    reach=8.5,
    switch=0.5,
    nodes=40,
)
