"""
Bounds of a composition of mechanisms, from their privacy profiles.

The method is that of Gopi, Lee and Wutschitz, "Numerical composition of differential
privacy" (2021): the privacy loss of each mechanism is put on a grid, the grids are
convolved, and epsilon is read from the result. Four parts differ from their package
``prv-accountant``:

- The dots of the privacy profile are connected (Doroshenko et al., 2022) and losses are
  not rounded. The result dominates the true mechanism, so the upper bound needs no
  allowance for the grid, and no mean of the loss, for which the package's quadrature is
  too coarse at a million steps or a tiny sampling rate.
- The formula of the loss keeps its digits at small sampling rates.
- Spectra of different mechanisms are multiplied, so that losses leave the grid in one
  place only, where that is bounded.
- Chernoff's bound gives the width of the grid on both sides. The package takes at least
  3, which makes millions of points where epsilon is small.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq
from scipy.special import logsumexp

from opacus_ext.accountants.profiles import Profile, delta_at

#: Points of a grid: 2^20 of them take about 0.3 GB and a second for each mechanism.
POINTS = 2**20
#: Beyond, exp(loss) is too large for extended precision.
_WIDEST = 1e4

_ROUNDING = float(np.finfo(np.longdouble).eps)

# Orders for Chernoff's bound, and losses on which it is computed.
# Opacus's (less 1) are among the orders, so that its bound is never the better one.
_ORDERS = np.union1d(
    np.geomspace(1e-3, 1e10, 120),
    [*(1 + x / 10.0 - 1 for x in range(1, 100)), *range(11, 63)],
)
_CONVERT = _ORDERS * np.log(_ORDERS) - (1 + _ORDERS) * np.log1p(_ORDERS)
_LOSSES = np.geomspace(1e-14, 1e14, 2800)


class Bounds(NamedTuple):
    """A lower bound, an estimate and an upper bound."""

    lower: float
    estimate: float
    upper: float


class Step(NamedTuple):
    """A mechanism that is used ``count`` times."""

    profile: Profile
    count: int


def connect_the_dots(profile: Profile, losses: NDArray) -> Tuple[NDArray, float, float]:
    """
    Returns the probabilities of losses on a grid that dominate those of a mechanism
    (Doroshenko et al., 2022), that of an infinite loss, and that below the grid.

    The mass between two points goes to both, with the same probability under either
    data set; mass below the grid goes to its lowest point, and a part of the mass above
    counts as infinite. The divergence is exact at the points, and its convex upper
    bound between them.

    Args:
        losses: the points, ascending, with 0 among them
    """
    excess = profile(losses)
    share = -np.expm1(-np.diff(losses))
    zero = int(np.searchsorted(losses, 0.0))
    # The probability above each interval, and for losses below 0 that of the rest, both
    # from small numbers only.
    rise = np.diff(excess) / share
    above = excess[zero + 1 :] - rise[zero:]
    below = rise[:zero] - excess[1 : zero + 1]
    p = np.empty_like(losses)
    p[zero] = 1 - below[-1] - above[0]
    p[zero + 1 :] = above - np.append(above[1:], excess[-1])
    p[:zero] = np.diff(below, prepend=0.0)
    return p, float(excess[-1]), float(below[0])


class _Tails(NamedTuple):
    """Moments and tails of a composition, before the convolution."""

    above: NDArray  # [orders]: log E[exp(order * loss)]
    under: NDArray  # [orders]: log E[exp(-(1 + order) * loss)]
    widest: float  # the loss of one step that matters
    cut: float

    def log_delta(self, epsilon: float) -> float:
        """Returns the log of an upper bound of delta."""
        return min(0.0, float(np.min(self.above + _CONVERT - _ORDERS * epsilon)))

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound (Canonne et al., 2020, proposition 12)."""
        left = delta - self.cut
        if left <= 0:
            return math.inf
        at_orders = (self.above + _CONVERT - math.log(left)) / _ORDERS
        return max(0.0, float(np.min(at_orders)))

    def half(self, mass: float) -> float:
        """Returns a loss that is exceeded, on either side, with this probability."""
        left = -math.log(mass)
        above = np.min((self.above + left) / _ORDERS)
        return float(max(above, np.min((self.under + left) / (1 + _ORDERS))))


def _top(profile: Profile, mass: float) -> float:
    """
    Returns the loss beyond which this mass lies, on either side, as a continuous
    function, which a search for a noise multiplier needs.
    """

    def left(t: NDArray) -> NDArray:
        # The probability below -2t is at most excess(-t) / (1 - exp(-t)).
        under = profile(-t / 2) / -np.expm1(-t / 2)
        return np.log(np.maximum(np.maximum(profile(t), under), 1e-300) / mass)

    last = int(np.max(np.nonzero(left(_LOSSES) > 0)[0], initial=0))
    if last + 1 == len(_LOSSES) or left(_LOSSES[:1])[0] <= 0:
        return float(_LOSSES[last])
    between = _LOSSES[last], _LOSSES[last + 1]
    return (1 + 1e-5) * brentq(lambda t: left(np.array([t]))[0], *between, rtol=1e-6)


def _tails(steps: Sequence[Step], mass: float) -> _Tails:
    """Returns the tails; large losses of single steps of this ``mass`` are cut off."""
    above, under = np.zeros_like(_ORDERS), np.zeros_like(_ORDERS)
    cut = widest = 0.0
    for profile, count in steps:
        start = delta_at(profile, 0.0)
        if start == 0:
            continue
        # Losses far below the typical one count as 0 or as a thousandth of it.
        top = max(start, _top(profile, mass / (count * len(steps))))
        right = np.geomspace(1e-3 * start, top, 700)
        # Below -600 the probability is less than exp(-600), which floats can't follow.
        losses = np.concatenate([-right[right < 600][::-1], [0.0], right])
        p, lost, below = connect_the_dots(profile, losses)
        cut += count * (lost + below)
        widest = max(widest, top)
        for orders, sums in ((_ORDERS, above), (-1 - _ORDERS, under)):
            # Rounding makes some probabilities negative, which cancel.
            with np.errstate(over="ignore"):  # an order at which it is inf is no use
                grown = logsumexp(np.multiply.outer(orders, losses), b=p, axis=1)
            sums += count * np.maximum(np.nan_to_num(grown, nan=np.inf), 0)
    return _Tails(above, under, widest, cut)


class _Composed(NamedTuple):
    """The composition on a grid, and bounds of its errors."""

    losses: NDArray
    masses: NDArray
    loss_error: float  # the most by which a loss is too large
    delta_error: float

    def delta(self, epsilon: float) -> float:
        # Extended: exp(epsilon) overflows above 709.
        gained = 1 - np.exp(np.longdouble(epsilon)) * np.exp(-self.losses)
        return float(np.where(self.losses >= epsilon, self.masses * gained, 0.0).sum())

    def deltas(self, epsilon: float) -> Bounds:
        lower = self.delta(epsilon + self.loss_error) - self.delta_error
        estimate = self.delta(epsilon)
        upper = min(estimate + self.delta_error, 1.0)
        return Bounds(max(lower, 0.0), max(estimate, 0.0), upper)

    def epsilons(self, delta: float) -> Bounds:
        """Returns bounds of epsilon, 0 where delta is not reached at any."""
        most = self.delta(0.0)
        # Sums over all losses from each point on: of P, and of Q times exp(point).
        above = np.cumsum(self.masses[::-1])[::-1]
        below = np.cumsum((self.masses * np.exp(-self.losses))[::-1])[::-1]
        deltas = above - np.exp(self.losses) * below

        def read(target: float) -> float:
            if target >= most:
                return 0.0
            if target <= len(deltas) * _ROUNDING:  # it drowns
                return math.inf
            first = np.searchsorted(-deltas, -target)
            return float(np.log((above[first] - target) / below[first]))

        lower = read(delta + self.delta_error) - self.loss_error
        values = lower, read(delta), read(delta - self.delta_error)
        return Bounds(*(max(value, 0.0) for value in values))


def _compose(
    steps: Sequence[Step],
    tails: _Tails,
    epsilon_error: float,
    delta_error: float,
) -> Optional[_Composed]:
    part = delta_error / 6
    total = sum(step.count for step in steps)
    hoeffding = total / 2 * math.log(1 / part)

    half = max(tails.half(part), 1.05 * tails.widest)
    mesh = min(epsilon_error / math.sqrt(hoeffding), half / 500)
    mesh = max(mesh, 2 * half / POINTS)
    if not half < _WIDEST:
        return None
    right = next_fast_len(math.ceil(half / mesh) + 1)
    points, zero = 2 * right, right - 1
    half = zero * mesh
    losses = (np.arange(points) - zero) * mesh

    spectrum, cut = 1.0, 0.0
    for profile, count in steps:
        p, lost, below = connect_the_dots(profile, losses)
        cut += count * (lost + below)
        # Extended precision: a tiny delta is the sum of what is far from the mode.
        p = np.roll(p.astype(np.longdouble), -zero)
        spectrum = spectrum * rfft(p) ** count
    masses = np.roll(irfft(spectrum, points), zero)

    # Each loss is at most `mesh` from where it was, with exp(-difference) of mean 1:
    # by Hoeffding's lemma, then his inequality.
    grown = total * mesh**2 / 8
    loss_error = min(grown + mesh * math.sqrt(hoeffding), total * mesh)
    # The same lemma for the moments of the losses on the grid, which go around it.
    orders = _ORDERS * (1 + _ORDERS) * grown
    around = sum(
        math.exp(min(0.0, float(np.min(log - order * half))))
        for log, order in (
            (tails.above + orders, _ORDERS),
            (tails.under + orders + (1 + _ORDERS) * grown, 1 + _ORDERS),
        )
    )
    rounding = (4 * total + 2 * points + 256) * _ROUNDING
    error = part + around + cut + tails.cut + rounding
    extended = np.linspace(-half, right * mesh, points, dtype=np.longdouble)
    return _Composed(extended, masses, loss_error, error)


def epsilon_bounds(steps: Sequence[Step], delta: float) -> Bounds:
    """
    Returns a lower bound, an estimate and an upper bound of epsilon.

    Where no grid serves (epsilon above 10,000, or a delta that would drown in rounding)
    the upper bound is Chernoff's, that is the one of Renyi accounting, and the lower 0.
    """
    if sum(step.count * delta_at(step.profile, 0.0) for step in steps) <= delta:
        return Bounds(0.0, 0.0, 0.0)
    if _is_single(steps):
        return _near(_closed_epsilon(steps[0].profile, delta))
    error = delta / 1000
    tails = _tails(steps, error / 6)
    best = Bounds(0.0, *[tails.epsilon(delta)] * 2)
    if math.isinf(best.upper):
        return best
    # Chernoff's bound may be many times too large: a coarse grid finds the scale.
    coarse = True
    for _ in range(6):
        aim = _mesh_error(best.estimate, error) * (10 if coarse else 1)
        composed = _compose(steps, tails, aim, error)
        if composed is None:
            break
        before, best = best, _tighter(best, composed.epsilons(delta))
        if best.estimate == 0 or not coarse or len(composed.losses) >= POINTS:
            break
        coarse = best.estimate < before.estimate / 10
    return best


def delta_bounds(steps: Sequence[Step], epsilon: float) -> Bounds:
    """Returns a lower bound, an estimate and an upper bound of delta."""
    if _is_single(steps):
        near = _near(delta_at(steps[0].profile, epsilon))
        return near._replace(upper=min(near.upper, 1.0))
    if not any(delta_at(step.profile, 0.0) for step in steps):
        return Bounds(0.0, 0.0, 0.0)
    tails = _tails(steps, 1e-9)
    scale = min(tails.cut + math.exp(tails.log_delta(epsilon)), 1.0)
    best, width = Bounds(0.0, scale, scale), 1e-2
    for _ in range(8):
        if scale < 1e-15:  # what rounding leaves
            break
        tails = _tails(steps, scale / 6000)
        composed = _compose(steps, tails, width * tails.half(scale), scale / 1000)
        if composed is None or best.upper == 0:
            break
        best = _tighter(best, composed.deltas(epsilon))
        if best.estimate < scale / 2:  # too coarse a scale
            scale = max(best.estimate, best.upper / 100)
        elif best.lower < 0.98 * best.upper and len(composed.losses) < POINTS:
            width *= max(0.01 / (1 - best.lower / best.upper), 1e-3)
        else:
            break
    return best


def _is_single(steps: Sequence[Step]) -> bool:
    """True if delta has a closed form: of a mechanism that is used once."""
    return len(steps) == 1 and steps[0].count == 1


def _closed_epsilon(profile: Profile, delta: float) -> float:
    top = 1.0
    while delta_at(profile, top) > delta:
        top *= 2
        if math.isinf(top):  # its tail counts as infinite loss
            return top
    precise = dict(xtol=1e-300, rtol=1e-12, maxiter=500)
    return brentq(lambda t: delta_at(profile, t) - delta, 0, top, **precise)


def _near(value: float) -> Bounds:
    """Returns bounds of a value with about ten digits."""
    lower = 0.0 if math.isinf(value) else value * (1 - 1e-9)
    return Bounds(lower, value, value * (1 + 1e-9))


def _mesh_error(scale: float, delta: float) -> float:
    """
    Returns the error for an epsilon of about ``scale``, at which the second-order
    effect of the mesh on the upper bound is small: total mesh^2 / 8 <= scale / 10,000.
    """
    return min(0.01 * scale, math.sqrt(4e-4 * scale * -math.log(delta)))


def _tighter(a: Bounds, b: Bounds) -> Bounds:
    lower, upper = max(a.lower, b.lower), min(a.upper, b.upper)
    return Bounds(lower, min(max(b.estimate, lower), upper), upper)
