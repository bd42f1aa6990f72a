"""
Bounds of a composition of mechanisms, from their privacy profiles.

The method is that of Gopi, Lee and Wutschitz, "Numerical composition of differential
privacy" (2021), with their package ``prv-accountant``: the privacy loss of each
mechanism is put on a grid, the grids are convolved, and epsilon is read from the
result. Its grids and its reading are used here as they are. Four parts are not:

- The loss is put on the grid by connecting the dots of the privacy profile (Doroshenko
  et al., 2022) and not by rounding it. What is composed then is a mechanism that
  dominates the true one, so the upper bound needs no allowance for the grid. It also
  needs no mean of the loss, which the package gets from a quadrature that is too coarse
  for a million steps or a tiny sampling rate.
- The loss comes from a formula that loses no digits at small sampling rates.
- Mechanisms that differ are multiplied as spectra, so that losses can leave the grid in
  one place only, and that is bounded.
- The grid is as wide as Chernoff's bound says on both sides. The package takes at
  least 3, which makes millions of points where epsilon is small.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from prv_accountant.discrete_privacy_random_variable import (
    DiscretePrivacyRandomVariable,
)
from prv_accountant.domain import Domain
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq
from scipy.special import logsumexp

from opacus_ext.accountants.profiles import Profile, total_variation

#: Points of a grid: 2^20 of them take about 0.3 GB and a second for each mechanism.
POINTS = 2**20
#: The package computes exp(loss) in extended precision.
_WIDEST = 1e4

_ROUNDING = float(np.finfo(np.longdouble).eps)

# Orders for Chernoff's bound, and losses on which it is computed.
# Opacus's (less 1) are among the orders, so that its bound is never the better one.
_ORDERS = np.union1d(
    np.geomspace(1e-3, 1e10, 120),
    [*(1 + x / 10.0 - 1 for x in range(1, 100)), *range(11, 63)],
)
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
    infinite: float = 0.0  # probability of an infinite loss, beside the profile
    greatest: float = math.inf  # of the finite losses


def connect_the_dots(
    profile: Profile, losses: np.ndarray
) -> Tuple[np.ndarray, float, float]:
    """
    Losses on a grid that dominate those of a mechanism (Doroshenko et al., 2022).

    The mass between two points goes to both, such that its probability under either
    data set stays what it is; what is below the grid goes to its lowest point, and of
    what is above it a part counts as infinite. The divergence at the points is the
    true one, and its convex upper bound between them.

    Args:
        losses: the points, ascending, with 0 among them

    Returns:
        The probabilities of the points, the infinite part, and what was below.

    Example:
        >>> from opacus_ext.accountants.profiles import pure
        >>> p, infinite, below = connect_the_dots(pure(1.0), np.linspace(-2, 2, 9))
        >>> [f"{x:.3f}" for x in p[[2, 6]]], bool(abs(p.sum() - 1) < 1e-15)
        (['0.269', '0.731'], True)
    """
    excess = profile(losses)
    share = -np.expm1(-np.diff(losses))
    zero = int(np.searchsorted(losses, 0.0))
    # Between the points: the probability above, and below 0 of what is not above, each
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
    """What is known of a composition before it is convolved."""

    above: np.ndarray  # [orders]: log E[exp(order * loss)]
    under: np.ndarray  # [orders]: log E[exp(-(1 + order) * loss)]
    infinite: float
    widest: float  # the loss of one step that matters
    cut: float

    def log_delta(self, epsilon: float) -> float:
        """Log of an upper bound of delta."""
        convert = _ORDERS * np.log(_ORDERS) - (1 + _ORDERS) * np.log1p(_ORDERS)
        return min(0.0, float(np.min(self.above + convert - _ORDERS * epsilon)))

    def epsilon(self, delta: float) -> float:
        """An upper bound (Canonne et al., 2020, proposition 12)."""
        left = delta - self.infinite - self.cut
        if left <= 0:
            return math.inf
        convert = _ORDERS * np.log(_ORDERS) - (1 + _ORDERS) * np.log1p(_ORDERS)
        found = (self.above + convert - math.log(left)) / _ORDERS
        return max(0.0, float(np.min(found)))


def _top(profile: Profile, mass: float) -> float:
    """
    The loss beyond which this part of the mass counts as infinite, or is below.

    Without jumps: who searches for a noise multiplier needs a continuous epsilon.
    """

    def left(t: np.ndarray) -> np.ndarray:
        # The probability below -2t is at most excess(-t) / (1 - exp(-t)).
        under = profile(-t / 2) / -np.expm1(-t / 2)
        return np.log(np.maximum(np.maximum(profile(t), under), 1e-300) / mass)

    last = int(np.max(np.nonzero(left(_LOSSES) > 0)[0], initial=0))
    if last + 1 == len(_LOSSES) or left(_LOSSES[:1])[0] <= 0:
        return float(_LOSSES[last])
    between = _LOSSES[last], _LOSSES[last + 1]
    found = brentq(lambda t: left(np.array([t]))[0], *between, rtol=1e-6)
    return float(found * (1 + 1e-5))


def _tails(steps: Sequence[Step], mass: float) -> _Tails:
    """
    Args:
        mass: the probability by which large losses of single steps may be cut off
    """
    above, under = np.zeros_like(_ORDERS), np.zeros_like(_ORDERS)
    finite = cut = widest = 0.0
    for profile, count, infinite, _ in steps:
        finite += count * math.log1p(-infinite)
        start = total_variation(profile)
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
            # Signed: rounding makes some of them negative, and adds up to nothing.
            with np.errstate(over="ignore"):  # an order at which it is inf is no use
                grown = logsumexp(np.multiply.outer(orders, losses), b=p, axis=1)
            sums += count * np.maximum(np.nan_to_num(grown, nan=np.inf), 0)
    return _Tails(above, under, -math.expm1(finite), widest, cut)


# -- the composition ---------------------------------------------------------------


class _Composed(NamedTuple):
    """The composition on a grid, and what it may be wrong by."""

    prv: DiscretePrivacyRandomVariable
    loss_error: float  # by which a loss may be too large
    delta_error: float
    points: int

    def deltas(self, epsilon: float) -> Bounds:
        # Extended: the package takes exp(epsilon), which overflows above 709.
        at = [np.longdouble(epsilon + shift) for shift in (self.loss_error, 0.0)]
        lower, found = (float(self.prv.compute_delta_estimate(x)) for x in at)
        upper = min(found + self.delta_error, 1.0)
        return Bounds(max(lower - self.delta_error, 0.0), max(found, 0.0), upper)

    def epsilons(self, delta: float) -> Bounds:
        """Where delta is reached at no positive epsilon, that is 0."""
        most = float(self.prv.compute_delta_estimate(0.0))

        def read(target: float) -> float:
            if target >= most:
                return 0.0
            if target <= self.points * _ROUNDING:  # the package refuses these
                return math.inf
            return self.prv.compute_epsilon(target, 0.0, 0.0)[1]

        error = self.delta_error
        if delta + error < most and delta - error > self.points * _ROUNDING:
            lower, estimate, upper = self.prv.compute_epsilon(delta, error, 0.0)
        else:
            lower, estimate, upper = map(read, (delta + error, delta, delta - error))
        found = lower - self.loss_error, estimate, upper
        return Bounds(*(max(float(x), 0.0) for x in found))


def _compose(
    steps: Sequence[Step],
    tails: _Tails,
    epsilon_error: float,
    delta_error: float,
) -> Optional[_Composed]:
    part = delta_error / 6
    total = sum(step.count for step in steps)
    hoeffding = total / 2 * math.log(1 / part)

    half = max(_half(tails, part), 1.05 * tails.widest)
    mesh = min(epsilon_error / math.sqrt(hoeffding), half / 500)
    mesh = max(mesh, 2 * half / POINTS)
    if not half < _WIDEST:
        return None
    right = next_fast_len(math.ceil(half / mesh) + 1)
    points, zero = 2 * right, right - 1
    domain = Domain(-zero * mesh, right * mesh, points)
    half = zero * mesh
    losses = (np.arange(points) - zero) * mesh

    spectrum, cut = 1.0, 0.0
    for profile, count, *_ in steps:
        p, lost, below = connect_the_dots(profile, losses)
        cut += count * (lost + below)
        # Extended precision: a tiny delta is the sum of what is far from the mode.
        p = np.roll(p.astype(np.longdouble), -zero)
        spectrum = spectrum * rfft(p) ** count
    pmf = np.roll(irfft(spectrum, points), zero)

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
    infinite = -math.expm1(
        sum(step.count * math.log1p(-step.infinite) for step in steps)
    )
    prv = DiscretePrivacyRandomVariable(
        pmf, domain, log_pmc_inf=np.log1p(-np.longdouble(infinite))
    )
    error = part + around + cut + tails.cut + rounding
    return _Composed(prv, loss_error, error, points)


def _half(tails: _Tails, mass: float) -> float:
    """A loss that the composition exceeds, on either side, with this probability."""
    left = -math.log(mass)
    above = np.min((tails.above + left) / _ORDERS)
    return float(max(above, np.min((tails.under + left) / (1 + _ORDERS))))


def epsilon_bounds(
    steps: Sequence[Step],
    delta: float,
    eps_error: Optional[float] = None,
    delta_error: Optional[float] = None,
) -> Bounds:
    """
    Lower bound, estimate and upper bound of epsilon.

    Where no grid serves (epsilon above 10,000, or a delta that would drown in rounding)
    the upper bound is Chernoff's, that is the one of Renyi accounting, and the lower 0.

    Args:
        steps: what is composed
        delta: of the guarantee
        eps_error: distance of the lower bound from the estimate; by default 1 % of
            epsilon, and more where that would take too many points
        delta_error: the part of delta that is spent on what is cut off; by default a
            thousandth of it

    Example:
        >>> from opacus_ext.accountants.profiles import gaussian, sampled
        >>> bounds = epsilon_bounds([Step(sampled(gaussian(1.0), 0.01), 1000)], 1e-5)
        >>> [f"{x:.2f}" for x in bounds]
        ['1.81', '1.83', '1.83']
    """
    if sum(count * total_variation(p) + count * i for p, count, i, _ in steps) <= delta:
        return Bounds(0.0, 0.0, 0.0)
    if exact := _alone(steps):
        if steps[0].infinite >= delta:
            return Bounds(
                *[math.inf if steps[0].infinite > delta else steps[0].greatest] * 3
            )
        top = 1.0
        while exact(top) > delta:
            top *= 2
        return _near(
            brentq(
                lambda t: exact(t) - delta, 0, top, xtol=1e-300, rtol=1e-12, maxiter=500
            )
        )
    error = delta / 1000 if delta_error is None else delta_error
    tails = _tails(steps, error / 6)
    upper = tails.epsilon(delta)
    if tails.infinite <= delta:
        upper = min(upper, sum(step.count * step.greatest for step in steps))
    best = Bounds(0.0, upper, upper)
    if math.isinf(upper):
        return best._replace(lower=upper if tails.infinite > delta else 0.0)
    # Chernoff's bound may be many times too large: a coarse grid finds the scale.
    coarse = eps_error is None
    for _ in range(6):
        aim = eps_error or _mesh_error(best.estimate, error) * (10 if coarse else 1)
        before = best.estimate
        found = _compose(steps, tails, aim, error)
        if found is None:
            break
        best = _tighter(best, found.epsilons(delta))
        if best.estimate == 0 or not coarse or found.points >= POINTS:
            break
        coarse = best.estimate < before / 10
    return best


def delta_bounds(steps: Sequence[Step], epsilon: float) -> Bounds:
    """
    Lower bound, estimate and upper bound of delta, as :func:`epsilon_bounds`.

    Example:
        >>> from opacus_ext.accountants.profiles import gaussian, sampled
        >>> bounds = delta_bounds([Step(sampled(gaussian(1.0), 0.01), 1000)], 0.0)
        >>> [f"{x:.2f}" for x in bounds]
        ['0.16', '0.16', '0.16']
    """
    if exact := _alone(steps):
        found = _near(exact(epsilon))
        return found._replace(upper=min(found.upper, 1.0))
    if not any(total_variation(p) + i for p, _, i, _ in steps):
        return Bounds(0.0, 0.0, 0.0)
    tails = _tails(steps, 1e-9)
    upper = tails.infinite + tails.cut + math.exp(tails.log_delta(epsilon))
    upper = min(upper, 1.0)
    best = Bounds(0.0, upper, upper)
    width, scale = 1e-2, best.upper
    for _ in range(8):
        if scale < 1e-15:  # what rounding leaves
            break
        tails = _tails(steps, scale / 6000)
        found = _compose(steps, tails, width * _half(tails, scale), scale / 1000)
        if found is None or best.upper == 0:
            break
        best = _tighter(best, found.deltas(epsilon))
        if best.estimate < scale / 2:  # too coarse a scale
            scale = max(best.estimate, best.upper / 100)
        elif best.lower < 0.98 * best.upper and found.points < POINTS:
            width *= max(0.01 / (1 - best.lower / best.upper), 1e-3)
        else:
            break
    return best


def _alone(steps: Sequence[Step]) -> Optional[Callable[[float], float]]:
    """Delta as a function of epsilon where it has a closed form: of one step."""
    if len(steps) != 1 or steps[0].count != 1:
        return None
    profile, _, infinite, _ = steps[0]
    return lambda t: infinite + (1 - infinite) * float(profile(np.array([t]))[0])


def _near(value: float) -> Bounds:
    """Bounds of what is known to about ten digits."""
    return Bounds(value * (1 - 1e-9), value, value * (1 + 1e-9))


def _mesh_error(scale: float, delta: float) -> float:
    """
    The error to compute with, for an epsilon of about ``scale``.

    The mesh also moves the upper bound, by a second-order effect that is kept
    small: total * mesh^2 / 8 <= scale / 10,000.
    """
    return min(0.01 * scale, math.sqrt(4e-4 * scale * -math.log(delta)))


def _tighter(a: Bounds, b: Bounds) -> Bounds:
    lower, upper = max(a.lower, b.lower), min(a.upper, b.upper)
    return Bounds(lower, min(max(b.estimate, lower), upper), upper)
