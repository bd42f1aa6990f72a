"""Compositions of steps of DP-SGD: lower bounds, estimates and upper bounds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Callable, List, Tuple

from opacus_ext.accountants import profiles
from opacus_ext.accountants.mechanisms import (
    Fixed,
    Mechanism,
    refuse_mixed,
    rounded,
    upper_steps,
)
from opacus_ext.accountants.numerical import Bounds, Step, delta_bounds, epsilon_bounds
from opacus_ext.accountants.whole import add_steps
from opacus_ext.refused import Refused

# Distinct steps that are convolved. Beyond, they are rounded: see _rounded.
_DISTINCT = 64


class Composition:
    """
    Steps of DP-SGD and Gaussian releases about the same records, and bounds of their
    joint epsilon and delta: :class:`~opacus_ext.accountants.PRVBoundsAccountant`
    without its base class of Opacus, and so without torch.

    Attributes:
        history: of (noise_multiplier, sample_rate, steps), where the noise multiplier
            may be a :class:`~opacus_ext.accountants.mechanisms.Mechanism`

    Example:
        >>> spent = Composition()
        >>> spent.history.append((1.0, 0.01, 1000))
        >>> f"{spent.get_epsilon(delta=1e-5):.3f}"
        '1.828'
    """

    def __init__(self) -> None:
        self.history: List[Any] = []

    def __len__(self) -> int:
        """0 if nothing was released."""
        return len(self.history)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """
        Records one step of DP-SGD, or with a rate of 1 another release.

        Args:
            noise_multiplier: std of the noise over the clipping norm, or over the
                sensitivity to one record in L2
            sample_rate: the probability of a record to be in the batch

        Raises:
            Refused: for a negative noise, or a rate outside [0, 1]
        """
        add_steps(self.history, *check_step(noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta: float, **others: Any) -> float:
        """
        Returns the upper bound of :meth:`get_bounds`: no run of these steps spends
        more. Like Opacus's accountants it ignores other arguments.
        """
        return self.get_bounds(delta).upper

    def get_bounds(self, delta: float) -> Bounds:
        """
        Returns a lower bound, an estimate and an upper bound of epsilon at ``delta``.
        The lower bound is 1 % of epsilon below the estimate, and more where that would
        take more than a million points. The upper bound is nearer, mostly by a factor
        of 100. With batches that were allocated, cut or of a fixed size the lower
        bound is a coarse one, that of a simple attack.

        Raises:
            Refused: for a delta outside (0, 1), and a history that is no list of steps
        """
        given, delta = delta, _number(delta)
        _check("delta", given, 0 < delta < 1, "between 0 and 1, both excluded")
        return self._bounds(lambda steps: epsilon_bounds(steps, delta), math.inf)

    def get_delta(self, epsilon: float) -> Bounds:
        """
        Returns a lower bound, an estimate and an upper bound of delta. At epsilon 0 it
        is the membership advantage: the most by which the true positive rate of a
        membership inference can exceed its false positive rate.

        Args:
            epsilon: of the guarantee, 0 or more

        Raises:
            Refused: for a negative epsilon, and as :meth:`get_bounds`
        """
        given, epsilon = epsilon, _number(epsilon)
        _check("epsilon", given, 0 <= epsilon < math.inf, "0 or more, and finite")
        return self._bounds(lambda steps: delta_bounds(steps, epsilon), 1.0)

    def _bounds(self, bounds_of: Callable[[List[Step]], Bounds], most: float) -> Bounds:
        """Returns the bounds of all steps; ``most`` is that of a step without noise."""
        refuse_mixed(self.history)
        pairs: Counter = Counter()
        mechanisms: Counter = Counter()
        for noise, rate, steps in (check_step(*entry) for entry in self.history):
            if rate > 0 and steps > 0 and noise < math.inf:
                if isinstance(noise, Mechanism):
                    mechanisms[noise] += steps
                else:
                    pairs[noise, rate] += steps
        if any(noise == 0 for noise in (*mechanisms, *(noise for noise, _ in pairs))):
            return Bounds(0.0, most, most)
        if mechanisms:
            return _mixed_bounds(pairs, mechanisms, bounds_of)
        if len(pairs) <= _DISTINCT:
            return bounds_of(steps_of(pairs))
        low, high = (bounds_of(steps_of(_rounded(pairs, side))) for side in (-1, 1))
        return Bounds(low.lower, (low.estimate + high.estimate) / 2, high.upper)


def _mixed_bounds(
    pairs: Counter, mechanisms: Counter, bounds_of: Callable[[List[Step]], Bounds]
) -> Bounds:
    """
    Returns the bounds of sampled steps beside other mechanisms: the larger of those of
    removals and additions. In every case tried, removals have the larger one.
    """
    below = Counter(pairs)
    for mechanism, count in mechanisms.items():
        below[mechanism.lower()] += count
    low, high = (
        steps_of(_rounded(x, side) if len(x) > _DISTINCT else x)
        for x, side in ((below, -1), (pairs, 1))
    )
    high += upper_steps(rounded(mechanisms, _DISTINCT))
    bounds = bounds_of(high)
    if math.isinf(bounds.upper):  # the tail of an allocation's grid
        for mechanism, count in mechanisms.items():
            pairs[float(mechanism), mechanism.rate] += count
        bounds = bounds_of(steps_of(pairs))
        return bounds._replace(lower=min(bounds_of(low).lower, bounds.upper))
    if not any(isinstance(mechanism, Fixed) for mechanism in mechanisms):
        turned = [Step(profiles.turned(profile), k) for profile, k in high]
        bounds = max(bounds, bounds_of(turned), key=lambda x: x.upper)
    return bounds._replace(lower=min(bounds_of(low).lower, bounds.estimate))


def steps_of(pairs: Counter) -> List[Step]:
    """Returns the steps of each noise and rate; those of rate 1 are one Gaussian."""
    steps = []
    squares = [k / noise**2 for (noise, rate), k in pairs.items() if rate == 1]
    if squares:
        steps.append(Step(profiles.gaussian(1 / math.sqrt(sum(squares))), 1))
    for (noise, rate), k in sorted(pairs.items()):
        if rate < 1:
            steps.append(Step(profiles.sampled(profiles.gaussian(noise), rate), k))
    return steps


def _rounded(pairs: Counter, side: int) -> Counter:
    """
    Rounds many sampled pairs to at most 64: for a lower bound (``side`` -1) to more
    noise and lower rates, for an upper one (1) the reverse. Epsilon falls with the
    noise and rises with the rate.
    """

    def rounded(x: float, up: int) -> float:
        to = math.ceil if up > 0 else math.floor
        return math.exp(to(math.log(x) / width) * width)

    width = 1e-4
    while True:
        found: Counter = Counter()
        for (noise, rate), k in pairs.items():
            if rate < 1:
                # A rate is rounded up to what is still sampling.
                near = min(rounded(rate, side), (1 + rate) / 2)
                noise, rate = rounded(noise, -side), near
            found[noise, rate] += k
        if sum(rate < 1 for _, rate in found) <= _DISTINCT:
            return found
        width *= 1.25


def _number(value: Any) -> float:
    """Returns a tensor or a fraction as a plain number, and NaN for no number."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _check(name: str, value: Any, allowed: bool, text: str) -> None:
    if not allowed:
        raise Refused(f"{name}={value!r} must be {text}.", parameter=name)


def check_step(noise: float, rate: float, steps: int) -> Tuple[float, float, int]:
    """Returns the numbers of a step as plain ones; refuses those out of range."""
    _check("noise_multiplier", noise, noise >= 0, "0 or more")
    _check(
        "sample_rate",
        rate,
        0 <= rate <= 1,
        "between 0 and 1: it is the probability of a record to be in the batch",
    )
    _check("steps", steps, steps >= 0 and int(steps) == steps, "a whole number")
    if not isinstance(noise, Mechanism):
        noise = float(noise)
    return noise, float(rate), int(steps)
