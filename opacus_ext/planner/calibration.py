"""
How much noise a privacy budget asks for, over whole grids of budgets.

The scaling laws of private training (McKenna et al. 2025, "Scaling Laws for
Differentially Private Language Models", section 2 and appendix B) know the noise only
through the noise-batch ratio, sigma / B. A plan asks for thousands of them.

All come from the privacy profile delta(epsilon) of the removal of a user, as an
integral in the complex plane (Alghamdi et al. 2023, "The Saddle-Point Method in
Differential Privacy"). With L the privacy loss of one of T steps,

    delta(epsilon) = 1 / (2 pi i) int exp(K(z) - z epsilon) / (z (z + 1)) dz,
    K(z) = T log E[exp(z L)],

along any vertical line Re z = t > 0. Unlike there nothing is expanded: both integrals,
this one and the expectation, are trapezoidal sums of analytic functions, which converge
exponentially. There is no grid of losses that could be too coarse. What can't be had to
the stated precision is refused.

A calibrated noise multiplier spends delta but for a part in 100,000, which is more than
all numerical errors, and lies within 0.01 % above the least one that would do.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfc, gammaln, log_ndtr, logsumexp

from opacus_ext.refused import Refused

_MARGIN = 5e-5  # of delta, relative, that a calibrated noise leaves unspent
_PRECISION = 1e-5  # of delta, relative, despite all cancellation
_TOLERANCE = 1e-4  # of an integral, relative, before the last halving squares it
_STRICT = 1e-6  # where that is not taken for granted
_FAR = 38.0  # standard deviations: less than any number is beyond
_FINEST = 2**15  # points of the integral over z
_NODES = 2**20  # of the expectation
_CHUNK = 2**18  # entries of a matrix
_ENTRIES = 2**25  # of all of them
_GRADING = 16.0  # widths of the saddle after which the points spread out


class Calibration(NamedTuple):
    """
    The least noise for a budget, from :func:`calibrate`: arrays of one shape.

    Attributes:
        noise_multiplier: sigma, for ``make_private``
        ratio: the noise-batch ratio, sigma / B
        amplified: whether it is that of Poisson sampling, or of deterministic batches
    """

    noise_multiplier: Any
    ratio: Any
    amplified: Any


class Doubling(NamedTuple):
    """What doubling a budget saves, ``ratio(x) / ratio(2 x) - 1``, for each budget."""

    epsilon: Any
    batch_size: Any
    users: Any


# -- the privacy profile -------------------------------------------------------------


class _TooHardError(ArithmeticError):
    """
    The sums would need more points, or more digits, than there are.

    Its argument, if any, is a rough value of what was asked for.
    """


class _Step(NamedTuple):
    """
    One step, for a user with ``records`` that are sampled independently.

    The privacy loss is L(x) = log sum_j w_j exp((2 j x - j^2) / (2 noise^2)), with w_j
    the binomial weights, at x ~ N(0, noise^2) without the user and ~ N(j, noise^2) with
    probability w_j with it. (Charles et al. 2024, "Fine-Tuning Large Language Models
    with User-Level Differential Privacy", show that no user of so many records has more
    to lose.)
    """

    noise: float
    rate: float
    records: int

    @property
    def least(self) -> float:
        """The infimum of L."""
        return self.records * math.log1p(-self.rate)

    def log_binomial(self) -> NDArray:
        """``log w_j``, j from 0 to records."""
        k, j = self.records, np.arange(self.records + 1)
        log_choices = gammaln(k + 1) - gammaln(j + 1) - gammaln(k - j + 1)
        return log_choices + j * math.log(self.rate) + (k - j) * math.log1p(-self.rate)

    def loss(self, x: NDArray) -> NDArray:
        """``L(x)``, [n] complex, precise where it is small."""
        rows = max(1, _CHUNK // self.records)
        parts = [self._loss(x[i : i + rows]) for i in range(0, len(x), rows)]
        return np.concatenate(parts)

    def _loss(self, x: NDArray) -> NDArray:
        j = np.arange(1, self.records + 1)
        exponent = (2 * x[:, None] - j) * (j / (2 * self.noise**2))
        log_weight = self.log_binomial()[1:]
        log_term = exponent + log_weight
        largest = np.append(log_term, np.full((len(x), 1), self.least), axis=1)
        rows = np.arange(len(x))
        largest = largest[rows, largest.real.argmax(axis=1)]
        terms = np.exp(log_term - largest[:, None]).sum(axis=1)
        loss = largest + np.log(terms + np.exp(self.least - largest))

        # a small loss as log1p of sum_j w_j (exp(..) - 1), of which nothing is lost
        near = np.abs(loss) < 0.5
        small = exponent[near].real < 1
        u = np.where(
            small,
            np.expm1(np.where(small, exponent[near], 0.0)) * np.exp(log_weight),
            np.exp(np.where(small, 0.0, log_term[near])) - np.exp(log_weight),
        ).sum(axis=1)
        loss[near] = _log1p(u)
        return loss

    def inverse(self, loss: float) -> float:
        """Where L is ``loss``, but no farther than anything is."""
        s, q, k = self
        low, high = -_FAR * s, k + _FAR * s
        if k == 1:
            exponent = loss - math.log(q)
            if loss < 300:
                exponent = math.log1p(math.expm1(loss) / q)
            return min(0.5 + s * s * exponent, high)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.loss(np.array([middle + 0j]))[0].real < loss
            low, high = (middle, high) if below else (low, middle)
        return high


def _log1p(u: NDArray) -> NDArray:
    """numpy's own loses the real part of a small complex number."""
    small = np.abs(u) < 0.5
    near = np.where(small, u, 0.0)
    real = 0.5 * np.log1p(2 * near.real + near.real**2 + near.imag**2)
    far = np.log(np.where(small | (u == -1), 1.0, 1 + u))
    return np.where(small, real + 1j * np.angle(1 + u), np.where(u == -1, -800.0, far))


class _Law:
    """
    The law of a step's privacy loss, of those outcomes that lie below a cut.

    It stands as a trapezoidal sum over a line above the real axis that bends down to
    the cut: ``E[exp(z L); x < cut]`` is the sum of ``exp(log_weight + z loss)`` for
    Im z >= 0. L is analytic up to a height of pi noise^2, where all its singularities
    are: sum_j w_j X^j has real roots, and the factors exp(-j^2 / 2 noise^2) keep them
    real (Polya and Schur). Up to there Im L >= 0, so exp(z L) is damped where it would
    oscillate, and one set of nodes will do for all z.
    """

    def __init__(self, step: _Step, cut: float, fineness: float):
        s = step.noise
        scale = min(s, s * s)
        height = min(1.2 * s, math.pi / 3 * s * s)
        width = scale / 5 / fineness
        low, high = -8.7 * s, cut + 36 * scale
        if not (high - low) / width < _NODES:
            raise _TooHardError
        y = (np.arange(low, high, width) + 1j * height - cut) / scale
        # x = cut - scale log(1 + exp(-y)), its last part without overflow
        past = y.real > 0
        decay = np.log1p(np.exp(np.where(past, -y, y)))
        x = cut + scale * (np.where(past, 0.0, y) - decay)
        self.loss = step.loss(x)
        jacobian = np.where(past, -y, 0.0) - decay
        self.log_weight = self.loss - (x / s) ** 2 / 2 + jacobian
        self.log_weight += math.log(width / s / math.sqrt(2 * math.pi))

    def tilted(self, tilt: float) -> Tuple[NDArray, NDArray, float]:
        """The losses, weights ~ exp(tilt L) that sum to 1, and what log they had."""
        log_weight = self.log_weight + tilt * self.loss
        top = log_weight.real.max()
        kept = log_weight.real > top - 46
        weight = np.exp(log_weight[kept] - top)
        total = weight.sum().real  # as along the real axis, where all of it is real
        return self.loss[kept], weight / total, top + math.log(total)

    def moments(self, tilt: float) -> Tuple[float, float]:
        """Mean and variance under the tilted law."""
        loss, weight, _ = self.tilted(tilt)
        mean = (weight @ loss).real
        return mean, max((weight @ (loss - mean) ** 2).real, 0.0)


def _log_delta(
    step: _Step,
    steps: float,
    epsilon: float,
    tilt: float = 1.0,
    fineness: float = 1.0,
) -> Tuple[float, float]:
    """
    ``log delta(epsilon)`` of ``steps`` such steps, and the saddle point.

    Args:
        tilt: a guess at the saddle point
        fineness: of all sums, which then take other nodes on other lines, and more
    """
    s, _, k = step
    # A run in which a single step loses so much that the others can't make up for it
    # counts in full, by a closed form. What remains has no far tail: there the saddle
    # would be that of a tail that nobody sees, instead of that of the bulk.
    law = _Law(step, k + _FAR * s, fineness)
    mean, variance = law.moments(0.0)
    rare = 23.0  # - log of the chance that the others do: Bernstein's inequality
    room = math.sqrt(2 * rare * steps * variance) + rare * (mean - step.least)
    room = epsilon + min(room, -steps * step.least)
    cut = step.inverse(epsilon + room)
    if cut < k + _FAR * s:
        law = _Law(step, cut, fineness)
    if steps * law.loss[-1].real <= epsilon:
        return -1e6, tilt  # less than any number
    log_beyond = _log_beyond(step, steps, epsilon, cut)

    t = _saddle(law, steps, epsilon, tilt) / math.sqrt(fineness)
    width = 1 / math.sqrt(_slopes(law, steps, epsilon, t)[1])
    loss, weight, log_sum = law.tilted(t)
    log_scale = steps * log_sum - t * epsilon + math.log(width / math.pi / t / (t + 1))
    if log_beyond - log_scale > 40:  # all else would be lost in rounding
        return log_beyond, t
    beyond = math.exp(log_beyond - log_scale)

    # Where most steps count, the law of the sum is smooth, and the integrand vanishes
    # within a few widths of the saddle. But runs that hardly saw the user are nearly an
    # atom, at the least of all sums, and do not vanish. They and the cut are ``room``
    # away from epsilon, and a smooth window takes out what is far away.
    window = max(110 / room, 8 * s, 20 * width)
    scale = _GRADING * width

    def integrand(u: NDArray) -> NDArray:
        y = scale * np.sinh(u / _GRADING)
        z = t + 1j * y
        rows = max(1, _CHUNK // len(loss))
        excess = [
            np.expm1(1j * np.outer(y[i : i + rows], loss)) @ weight
            for i in range(0, len(y), rows)
        ]
        values = np.exp(steps * _log1p(np.concatenate(excess)) - 1j * y * epsilon)
        values *= t * (t + 1) / (z * (z + 1)) * np.cosh(u / _GRADING)
        return values * erfc(7 * (y / window - 1)) / 2

    spacing = 0.5 / fineness
    count, last = 32, _GRADING * math.asinh(2 * window / scale) / spacing
    points = integrand(np.arange(1, count) * spacing)
    # little noise makes sums of a few great losses, after which it rises again
    if last * len(loss) > _ENTRIES:
        raise _TooHardError
    if s < 0.5 or abs(points[-1]) > 1e-18:
        points = np.append(points, integrand(np.arange(count, last) * spacing))
        count = len(points) + 1
    lost = 1e-14 * spacing * (0.5 + np.abs(points).sum())
    coarse = spacing * (0.5 + points.real.sum())
    while count < _FINEST and count * len(loss) < _ENTRIES:
        between = integrand((np.arange(count) + 0.5) * spacing)
        fine = (coarse + spacing * between.real.sum()) / 2
        spacing, count = spacing / 2, 2 * count
        delta = fine + beyond
        if abs(fine - coarse) <= (_STRICT if fineness > 1 else _TOLERANCE) * delta:
            if lost > _PRECISION * delta:
                break
            return log_scale + math.log(delta), t
        coarse = fine
    raise _TooHardError(log_scale + 0.5 * math.log(math.pi / 2))  # of a saddle


def _log_beyond(step: _Step, steps: float, epsilon: float, cut: float) -> float:
    """``log(P(A) - exp(epsilon) Q(A))``, A: a step's outcome lies beyond the cut."""
    j = np.arange(step.records + 1)
    log_tails = log_ndtr((j - cut) / step.noise)
    log_binomial = step.log_binomial()
    of_one = np.array([logsumexp(log_tails + log_binomial), log_tails[0]])
    # log(1 - (1 - p)^T), of a p that may be too small to be a number
    none = steps * np.log1p(-np.exp(np.minimum(of_one, -1e-16)))
    some = np.where(none < -1e-300, np.log(-np.expm1(none - 1e-300)), -np.inf)
    some = np.where(none < -1e-10, some, of_one + math.log(steps))
    gap = epsilon + some[1] - some[0]
    return some[0] + math.log(-math.expm1(gap)) if gap < 0 else -math.inf


def _slopes(law: _Law, steps: float, epsilon: float, t: float) -> Tuple[float, float]:
    """First and second derivative of ``K(t) - t epsilon - log(t (t + 1))``."""
    mean, variance = law.moments(t)
    first = steps * mean - epsilon - 1 / t - 1 / (t + 1)
    return first, steps * variance + 1 / t**2 + 1 / (t + 1) ** 2


def _saddle(law: _Law, steps: float, epsilon: float, t: float) -> float:
    """About where the integrand is least along the real axis, by Newton from ``t``."""
    low, high = 0.0, math.inf
    for i in range(100):
        slope, curvature = _slopes(law, steps, epsilon, t)
        change = slope / curvature
        if abs(change) < 0.1 * t and abs(change) * math.sqrt(curvature) < 0.5:
            return t
        low, high = (t, high) if slope < 0 else (low, t)
        t = min(max(t - change, t / 4), 4 * t)
        # where the law is nearly two, Newton overshoots and creeps back
        if not low < t < high or i % 3 == 2 and 0 < low < high < math.inf:
            t = math.sqrt(low * high)
    raise _TooHardError


def _log_profile(
    step: _Step, steps: float, epsilon: float, tilt: float = 1.0, fineness: float = 1.0
) -> Tuple[float, float]:
    """``log delta(epsilon)``, in closed form if there is one, and the saddle point."""
    s, q, k = step
    if s == 0:
        return math.log(_ever(q, steps * k)), tilt
    if q == 1:
        return float(_log_delta_gaussian(k * math.sqrt(steps) / s, epsilon)), tilt
    if steps == k == 1:
        log_delta = _log_delta_gaussian(1 / s, _of_the_sampled(epsilon, q))
        return float(log_delta) + math.log(q), tilt
    return _log_delta(step, steps, epsilon, tilt, fineness)


def _log_delta_gaussian(mu: ArrayLike, epsilon: ArrayLike) -> NDArray:
    """``log delta(epsilon)`` of N(0, 1), N(mu, 1) (Balle & Wang 2018, theorem 5)."""
    upper, lower = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    log_upper = log_ndtr(upper)
    gap = np.minimum(epsilon + log_ndtr(lower) - log_upper, -1e-300)
    return log_upper + np.log(-np.expm1(gap))


def _of_the_sampled(epsilon: float, q: float) -> float:
    """A mechanism's epsilon, from that of a sample: log(1 + (exp(epsilon) - 1) / q)."""
    if epsilon > 300:
        return epsilon - math.log(q)
    return math.log1p(math.expm1(epsilon) / q)


def _ever(q: float, draws: float) -> float:
    """The chance to be drawn at all."""
    return -math.expm1(draws * math.log1p(-q)) if q < 1 else 1.0


def delta(
    noise_multiplier: ArrayLike,
    sample_rate: ArrayLike,
    steps: ArrayLike,
    epsilon: ArrayLike = 0.0,
    records_per_user: ArrayLike = 1,
) -> Any:
    """
    The delta that DP-SGD with Poisson sampling has at ``epsilon``: its privacy profile.

    It is that of a user who is left out, as Opacus's and Microsoft's accountants have
    it. That of one who is put in has been smaller wherever it was compared.

    At epsilon 0 it is the advantage of the best membership inference: by how much its
    true positive rate may exceed its false positive rate. Plans of equal (epsilon,
    delta) differ in it (Kaissis et al. 2024). Of deterministic batches, take
    ``sample_rate=1`` and the number of batches that hold a user for ``steps``.

    Args:
        noise_multiplier: sigma, over the clipping norm; 0 for no noise
        sample_rate: chance of each record to be in a batch, in (0, 1]
        steps: whole numbers
        epsilon: at least 0
        records_per_user: that are drawn independently, all of a user's to be protected

    Returns:
        of the broadcast shape, a float for numbers; to a relative 1e-5, where it is
        above 1e-250

    Raises:
        ValueError: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> round(delta(1.0, 0.01, 1000), 4)
        0.161
        >>> delta(1.0, 0.01, 1000, epsilon=[1.0, 2.0]).round(7).tolist()
        [0.0026124, 2.7e-06]
    """
    columns = (
        _checked("noise_multiplier", noise_multiplier, at_least=0),
        _checked("sample_rate", sample_rate, above=0, at_most=1),
        _checked("steps", steps, at_least=1, whole=True),
        _checked("epsilon", epsilon, at_least=0),
        _checked("records_per_user", records_per_user, at_least=1, whole=True),
    )

    def solve(s: float, q: float, steps: float, epsilon: float, k: float) -> float:
        step = _Step(s, q, int(k))
        strict, tilt = _log_profile(step, steps, epsilon, fineness=1.2)

        def compare(fineness: float) -> float:
            other = _log_profile(step, steps, epsilon, tilt, fineness)[0]
            if abs(other - strict) > _MARGIN:
                raise _TooHardError
            return min(math.exp(strict), 1.0)

        return _surely(compare)

    return _on_cells(solve, ("noise", "rate", "steps", "epsilon", "records"), columns)


def epsilon(
    noise_multiplier: ArrayLike,
    sample_rate: ArrayLike,
    steps: ArrayLike,
    delta: ArrayLike,
    records_per_user: ArrayLike = 1,
) -> Any:
    """
    The least epsilon that DP-SGD with Poisson sampling has at ``delta``.

    Args:
        delta: in (0, 1)
        noise_multiplier, sample_rate, steps, records_per_user: as in :func:`delta`

    Returns:
        of the broadcast shape, a float for numbers; infinite where there is no noise

    Raises:
        ValueError: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> round(epsilon(1.0, 0.01, 1000, delta=1e-5), 4)
        1.8282
    """
    columns = (
        _checked("noise_multiplier", noise_multiplier, at_least=0),
        _checked("sample_rate", sample_rate, above=0, at_most=1),
        _checked("steps", steps, at_least=1, whole=True),
        _checked("delta", delta, above=0, below=1),
        _checked("records_per_user", records_per_user, at_least=1, whole=True),
    )

    def solve(s: float, q: float, steps: float, delta: float, k: float) -> float:
        step = _Step(s, q, int(k))
        log_delta = math.log(delta) + math.log1p(-_MARGIN)
        if _log_profile(step, steps, 0.0)[0] <= log_delta:
            return 0.0
        if s == 0:
            return math.inf

        # the central limit, as in _Guess
        mu = k * q * math.sqrt(steps * math.expm1(min(1 / s**2, 50.0)))
        start = np.linspace(-7.0, 7.0, 100)
        limit = _log_delta_gaussian(min(max(mu, 1e-4), 40.0), np.exp(start))
        start = float(start[np.abs(limit - log_delta).argmin()])

        def search(fineness: float) -> float:
            tilt = 1.0

            def profile(x: float) -> float:
                nonlocal tilt
                value, tilt = _log_profile(step, steps, math.exp(x), tilt, fineness)
                return value

            excess = _excess(profile, log_delta)
            result = math.exp(_root(excess, start, 1.0)[0])
            _check(step, steps, result, delta, tilt)
            return result

        return _surely(search)

    return _on_cells(solve, ("noise", "rate", "steps", "delta", "records"), columns)


# -- calibration ---------------------------------------------------------------------


def gaussian_noise_multiplier(
    epsilon: ArrayLike, delta: ArrayLike, participations: ArrayLike = 1
) -> Any:
    """
    The least noise for a budget without amplification, in closed form.

    It is that of a Gaussian mechanism (Balle & Wang 2018, "Improving the Gaussian
    Mechanism for Differential Privacy", theorem 8) with sqrt(participations) times the
    sensitivity of one.

    Args:
        epsilon: positive
        delta: in (0, 1)
        participations: number of batches that hold a user's record

    Raises:
        ValueError: if an argument is out of its range

    Example:
        >>> round(gaussian_noise_multiplier(1.0, 1e-5), 4)
        3.7306
        >>> gaussian_noise_multiplier(1.0, 1e-5, [4, 16]).round(3).tolist()
        [7.461, 14.923]
    """
    epsilon = _checked("epsilon", epsilon, above=0)
    delta = _checked("delta", delta, above=0, below=1)
    participations = _checked("participations", participations, at_least=1, whole=True)
    return _result(np.sqrt(participations) / _gaussian_mu(epsilon, _log_target(delta)))


def noise_multiplier(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    sample_rate: ArrayLike,
    records_per_user: ArrayLike = 1,
) -> Any:
    """
    The least noise for a budget under DP-SGD with Poisson sampling.

    0 where none is needed: if the chance that a user is ever sampled is at most delta.

    Args:
        epsilon: positive
        delta: in (0, 1)
        steps: whole numbers
        sample_rate: chance of each record to be in a batch, in (0, 1]
        records_per_user: that are drawn independently, all of a user's to be protected
            together (the noise is still relative to the clipping norm of one)

    Returns:
        of the broadcast shape, a float for numbers

    Raises:
        ValueError: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> round(noise_multiplier(8.0, 1e-5, steps=1000, sample_rate=0.01), 4)
        0.5863
        >>> noise_multiplier([1.0, 2.0], 1e-5, 1000, 0.01).round(3).tolist()
        [1.415, 0.959]
    """
    columns = (
        _checked("epsilon", epsilon, above=0),
        _checked("delta", delta, above=0, below=1),
        _checked("records_per_user", records_per_user, at_least=1, whole=True),
        _checked("steps", steps, at_least=1, whole=True),
        _checked("sample_rate", sample_rate, above=0, at_most=1),
    )
    guess = _Guess()

    def solve(*cell: float) -> float:
        try:
            return attempt(*cell)
        except _TooHardError:
            return _by_the_accountant(*cell)

    def attempt(
        epsilon: float, delta: float, k: float, steps: float, q: float
    ) -> float:
        # a hair's breadth: the rounding of a rate that is delta
        if _ever(q, steps * k) <= delta * (1 + 1e-12):
            return 0.0
        log_delta = _log_target(delta)
        if q == 1:
            return k * math.sqrt(steps) / _gaussian_mu(epsilon, log_delta)[()]
        if steps == k == 1:
            sampled = _of_the_sampled(epsilon, q)
            return 1 / _gaussian_mu(sampled, log_delta - math.log(q))[()]

        def search(fineness: float) -> float:
            if fineness > 1:
                guess.forget()

            def profile(x: float) -> float:
                step = _Step(math.exp(x), q, int(k))
                value, guess.tilt = _log_delta(
                    step, steps, epsilon, guess.tilt, fineness
                )
                return value

            excess = _excess(profile, log_delta)
            start = guess.start(epsilon, delta, k, steps, q)
            log_noise, guess.slope = _root(excess, start, guess.slope)
            result = math.exp(log_noise)
            _check(_Step(result, q, int(k)), steps, epsilon, delta, guess.tilt)
            guess.correct(log_noise)
            return result

        return _surely(search)

    names = ("epsilon", "delta", "records", "steps", "rate")
    return _on_cells(solve, names, columns)


def _by_the_accountant(
    epsilon: float, delta: float, k: float, steps: float, q: float
) -> float:
    """Seconds a cell: noise at which the accountant's upper bound is ``epsilon``."""
    if k > 1 or epsilon > 100:  # its grid would be too large
        raise _TooHardError
    from opacus_ext.accountants import PRVBoundsAccountant

    accountant = PRVBoundsAccountant()

    def excess(log_noise: float) -> float:
        accountant.history = [(math.exp(log_noise), q, int(steps))]
        return math.log(max(accountant.get_epsilon(delta), 1e-12) / epsilon)

    low = high = _Guess().start(epsilon, delta, k, steps, q)
    while excess(high) > 0:
        high += 0.5
    while excess(low) <= 0:
        low -= 0.5
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp(high)


class _Guess:
    """A start for the next cell: the central limit, and how far off it was last."""

    def __init__(self) -> None:
        self.budget: Any = None
        self.mu = self.limit = 0.0
        self.forget()

    def start(
        self, epsilon: float, delta: float, k: float, steps: float, q: float
    ) -> float:
        """log sigma of mu = k q sqrt(T (exp(1 / sigma^2) - 1)) (Bu et al. 2020)."""
        if self.budget != (epsilon, delta, k):
            self.forget()
            self.budget = epsilon, delta, k
            self.mu = float(_gaussian_mu(epsilon, math.log(delta)))
        self.limit = -0.5 * math.log(math.log1p((self.mu / q / k) ** 2 / steps))
        return self.limit + self.off

    def forget(self) -> None:
        self.tilt, self.slope, self.off = 1.0, 2.0, 0.0

    def correct(self, log_noise: float) -> None:
        self.off = log_noise - self.limit


def calibrate(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    batch_size: ArrayLike,
    users: ArrayLike,
    *,
    amplification: str = "lower",
    records_per_user: ArrayLike = 1,
    sampling: str = "users",
) -> Calibration:
    """
    The least noise for a budget, a batch size and a number of users.

    Args:
        epsilon: positive
        delta: in (0, 1)
        steps: whole numbers, T
        batch_size: expected number of users (of records, if these are sampled) in a
            batch, B, at most all
        users: N
        amplification: "poisson": each is in a batch with probability B / N. "none":
            deterministic batches, which hold each ``ceil(T B / N)`` times. "lower":
            what needs less noise of the two, as the paper does (appendix B.1); what you
            train with must be that one
        records_per_user: of the users' records
        sampling: what a batch is drawn of, and what is clipped to a norm of its own. Of
            "users" (the paper's appendix B.2: however much data each has), the number
            of records doesn't matter. Of "records", a user is protected with all of
            them: drawn independently by Poisson sampling; in deterministic batches all
            in the same ones at worst

    Raises:
        ValueError: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> found = calibrate(4.0, 1e-8, 16000, batch_size=[2**10, 2**16], users=2**24)
        >>> found.noise_multiplier.round(4).tolist()
        [0.471, 0.9641]
        >>> found.amplified.tolist()
        [True, True]
    """
    if amplification not in ("lower", "poisson", "none"):
        raise Refused(
            'amplification must be "lower", "poisson" or "none", '
            f"not {amplification!r}."
        )
    if sampling not in ("users", "records"):
        raise Refused(f'sampling must be "users" or "records", not {sampling!r}.')
    batch_size = _checked("batch_size", batch_size, above=0)
    users = _checked("users", users, at_least=1)
    steps = _checked("steps", steps, at_least=1, whole=True)
    records = _checked("records_per_user", records_per_user, at_least=1, whole=True)
    if sampling == "users":
        records = np.ones_like(records)
    rate = batch_size / (users * records)
    if (rate > 1).any():
        worst = np.unravel_index(rate.argmax(), rate.shape)
        batch, limit = np.broadcast_arrays(batch_size, users * records)
        raise Refused(
            f"batch_size must be at most the number of {sampling}, {limit[worst]:g}, "
            f"not {batch[worst]:g}."
        )

    poisson: Any = np.inf
    if amplification != "none":
        poisson = noise_multiplier(epsilon, delta, steps, rate, records)
    fixed: Any = np.inf
    if amplification != "poisson":
        # less a hair's breadth, the rounding of a whole number
        times = np.maximum(np.ceil(steps * rate * (1 - 1e-12)), 1)
        fixed = records * gaussian_noise_multiplier(epsilon, delta, times)
    least = np.minimum(poisson, fixed)
    least, batch_size, amplified = np.broadcast_arrays(
        least, batch_size, poisson <= fixed
    )
    return Calibration(_result(least), _result(least / batch_size), _result(amplified))


def noise_batch_ratio(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    batch_size: ArrayLike,
    users: ArrayLike,
    **options: Any,
) -> Any:
    """
    The standard deviation of the noise in an averaged gradient, over the clipping norm.

    That is sigma(epsilon, delta, T, B / N) / B, the variable of the scaling laws.

    Args:
        epsilon, delta, steps, batch_size, users: as in :func:`calibrate`
        options: likewise

    Returns:
        of the broadcast shape, a float for numbers

    Example:
        >>> round(1e6 * noise_batch_ratio(4.0, 1e-8, 16000, 65536, 2**24), 3)
        14.712
    """
    return calibrate(epsilon, delta, steps, batch_size, users, **options).ratio


def doubling(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    batch_size: ArrayLike,
    users: ArrayLike,
    **options: Any,
) -> Doubling:
    """
    What doubling epsilon, the batch or the users takes off the noise-batch ratio.

    Each as ``ratio(x) / ratio(2 x) - 1``, the arrows of the paper's Figure 4: 1 where
    the ratio is halved, 0 where nothing is won.

    Args:
        epsilon, delta, steps, batch_size, users: as in :func:`calibrate`
        options: likewise

    Returns:
        of the broadcast shape; NaN for a batch that can't be doubled, because it would
        hold more than all

    Example:
        >>> saved = doubling(4.0, 1e-8, 16000, 65536, 2**24)
        >>> [round(arrow, 3) for arrow in saved]
        [0.337, 0.238, 0.324]
    """
    records = options.pop("records_per_user", 1)
    epsilon, delta, steps, batch_size, users, records = np.broadcast_arrays(
        _checked("epsilon", epsilon, above=0),
        _checked("delta", delta, above=0, below=1),
        _checked("steps", steps, at_least=1, whole=True),
        _checked("batch_size", batch_size, above=0),
        _checked("users", users, at_least=1),
        _checked("records_per_user", records, at_least=1, whole=True),
    )
    everyone = users * (records if options.get("sampling") == "records" else 1)
    fits = 2 * batch_size <= everyone
    ratio = noise_batch_ratio(
        np.stack([epsilon, 2 * epsilon, epsilon, epsilon]),
        delta,
        steps,
        np.stack(
            [batch_size, batch_size, np.where(fits, 2, 1) * batch_size, batch_size]
        ),
        np.stack([users, users, users, 2 * users]),
        records_per_user=records,
        **options,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        saved = np.where(ratio[0] == ratio[1:], 0.0, ratio[0] / ratio[1:] - 1)
    saved[1] = np.where(fits, saved[1], np.nan)
    return Doubling(*map(_result, saved))


# -- helpers -------------------------------------------------------------------------


def _log_target(delta: ArrayLike) -> Any:
    return np.log(delta) + math.log1p(-_MARGIN)


def _gaussian_mu(epsilon: ArrayLike, log_delta: ArrayLike) -> NDArray:
    """The sensitivity, in standard deviations of the noise, that spends the budget."""
    epsilon, log_delta = np.broadcast_arrays(epsilon, log_delta)
    low, high = np.full(epsilon.shape, -35.0), np.full(epsilon.shape, 35.0)
    for _ in range(60):
        middle = (low + high) / 2
        fits = _log_delta_gaussian(np.exp(middle), epsilon) <= log_delta
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.exp(low)


def _excess(
    log_profile: Callable[[float], float], log_delta: float
) -> Callable[[float], float]:
    """Of noise or epsilon, increasing; on the way to its zero a rough value will do."""

    def excess(x: float) -> float:
        try:
            value = log_profile(x)
        except _TooHardError as error:
            if not error.args:
                raise
            value = error.args[0]
        return math.log(max(-value, 1e-300) / -log_delta)

    return excess


def _root(f: Callable[[float], float], x: float, slope: float) -> Tuple[float, float]:
    """Zero of an increasing function, by secants within a bracket, and its slope."""
    low, high, value = -math.inf, math.inf, f(x)
    for _ in range(100):
        low, high = (x, high) if value < 0 else (low, x)
        new = x - min(max(value / slope, -0.7), 0.7)
        if abs(value) < 3e-6:  # and less after this step
            return new, slope
        if not low < new < high:
            new = (low + high) / 2
        if new == x:  # what is left are errors of f
            break
        new_value = f(new)
        rise = (new_value - value) / (new - x)
        slope = max(rise, slope / 4)  # or it would stop on a plateau
        x, value = new, new_value
    raise _TooHardError


def _check(
    step: _Step, steps: float, epsilon: float, delta: float, tilt: float
) -> None:
    """Other sums than those that found it must find that the budget holds."""
    log_delta = _log_profile(step, steps, epsilon, tilt, 1.2)[0]
    if not -1e-3 < log_delta - math.log(delta) <= 0:
        raise _TooHardError


def _surely(attempt: Callable[[float], float]) -> float:
    """Once more with finer sums, if a result doesn't stand the check."""
    try:
        return attempt(1.0)
    except _TooHardError:
        pass
    return attempt(1.4)


def _on_cells(
    solve: Callable[..., float], names: Sequence[str], columns: Sequence[NDArray]
) -> Any:
    """``solve`` for each distinct row of the broadcast columns, neighbours in turn."""
    columns = np.broadcast_arrays(*columns)
    rows = np.stack([column.ravel() for column in columns], axis=1)
    rows, where = np.unique(rows, axis=0, return_inverse=True)
    values = np.empty(len(rows))
    for i, row in enumerate(rows):
        try:
            values[i] = solve(*row.tolist())
        except _TooHardError:
            cell = ", ".join(f"{name} = {x:g}" for name, x in zip(names, row))
            raise Refused(
                f"{cell}: too extreme for an answer that is certain to a part in "
                "10,000. Take an epsilon, delta, rate or number of steps less so."
            ) from None
    return _result(values[where.ravel()].reshape(columns[0].shape))


def _result(values: NDArray) -> Any:
    """Numbers for numbers."""
    return np.asarray(values).item() if np.ndim(values) == 0 else values


def _checked(
    name: str,
    value: ArrayLike,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    whole: bool = False,
) -> NDArray:
    """``value`` as doubles, all of them in the range, or an error that says it."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise Refused(f"{name} must be numbers, not {value!r}.") from None
    if not array.size:
        raise Refused(f"{name} is empty.")
    good = np.isfinite(array) & (array > above) & (array >= at_least)
    good &= (array < below) & (array <= at_most)
    if whole:
        good &= array == np.floor(array)
    if not good.all():
        limits = [("above", above), ("at least", at_least)]
        limits += [("below", below), ("at most", at_most)]
        wanted = ["whole" if whole else "finite"]
        wanted += [
            f"{word} {limit:g}" for word, limit in limits if abs(limit) < math.inf
        ]
        raise Refused(
            f"{name} must be {' and '.join(wanted)}, not {array[~good].flat[0]:g}."
        )
    return array
