"""Compositions of releases: lower bounds, estimates and upper bounds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Callable, Dict, List, Tuple

from opacus_ext.accountants import profiles
from opacus_ext.accountants.numerical import Bounds, Step, delta_bounds, epsilon_bounds
from opacus_ext.refused import Refused

# Distinct mechanisms that are convolved. Beyond, they are rounded: see _rounded.
_DISTINCT = 64

#: The mechanisms of :meth:`PRVBoundsAccountant.compose` and their parameters.
MECHANISMS: Dict[str, Tuple[str, ...]] = {
    "gaussian": ("noise_multiplier",),
    "laplace": ("noise_multiplier",),
    "pure": ("epsilon",),
    "approximate": ("epsilon", "delta"),
}
_RANGES: Dict[str, Tuple[Callable[[float], bool], str]] = {
    "noise_multiplier": (lambda x: 0 < x < math.inf, "positive and finite"),
    "epsilon": (lambda x: 0 <= x < math.inf, "0 or more, and finite"),
    "delta": (lambda x: 0 <= x < 1, "0 or more, and below 1"),
}


class Composition:
    """
    Steps of DP-SGD and other releases about the same records, and bounds of their joint
    epsilon and delta: :class:`~opacus_ext.accountants.PRVBoundsAccountant` without its
    base class of Opacus, and so without torch.

    Example:
        >>> spent = Composition()
        >>> spent.history.append((1.0, 0.01, 1000))
        >>> f"{spent.get_epsilon(delta=1e-5):.3f}"
        '1.828'
    """

    def __init__(self) -> None:
        self.history: List[Any] = []
        self.mechanisms: List[Dict[str, Any]] = []

    def __len__(self) -> int:
        """0 if nothing was released."""
        return len(self.history) + len(self.mechanisms)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """
        Records one step of DP-SGD.

        Args:
            noise_multiplier: std of the noise over the clipping norm
            sample_rate: the probability of a record to be in the batch

        Raises:
            Refused: for a negative noise, or a rate outside [0, 1]
        """
        new = check_step(noise_multiplier, sample_rate, 1)
        last = self.history[-1:]
        if last and tuple(last[0][:2]) == new[:2]:
            last = [(*new[:2], last[0][2] + 1)]
        else:
            last = [*last, new]
        self.history[-1:] = last  # at once: an interrupt leaves it as it was

    def compose(
        self, mechanism: str, *, participations: int = 1, **parameters: float
    ) -> None:
        """
        Records another release about the same records.

        Args:
            mechanism: "gaussian" or "laplace" with ``noise_multiplier``: the std, or
                Laplace's scale, over the sensitivity (in L2, or L1) to one record;
                "pure" with ``epsilon`` or "approximate" with ``epsilon`` and ``delta``:
                any mechanism with this guarantee
            participations: number of uses on the same record, or the most releases of
                a series that one record can take part in

        Raises:
            Refused: for another mechanism or parameters out of range

        Example:
            >>> accountant = Composition()
            >>> accountant.compose("gaussian", noise_multiplier=2.0, participations=4)
            >>> f"{accountant.get_epsilon(delta=1e-5):.2f}"
            '4.38'
        """
        entry = {
            "mechanism": mechanism,
            **{name: float(value) for name, value in parameters.items()},
            "participations": participations,
        }
        check_mechanism(entry)
        entry["participations"] = int(participations)
        last = self.mechanisms[-1:]
        if last and {**last[0], "participations": 0} == {**entry, "participations": 0}:
            entry["participations"] += last.pop()["participations"]
        self.mechanisms[-1:] = [*last, entry]  # at once, as in step

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
        of 100.

        Raises:
            Refused: for a delta outside (0, 1), and a history that is no list of steps
        """
        _check("delta", delta, 0 < delta < 1, "between 0 and 1, both excluded")
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
        _check("epsilon", epsilon, 0 <= epsilon < math.inf, "0 or more, and finite")
        return self._bounds(lambda steps: delta_bounds(steps, epsilon), 1.0)

    def _bounds(self, bounds_of: Callable[[List[Step]], Bounds], most: float) -> Bounds:
        """Returns the bounds of all steps; ``most`` is that of a step without noise."""
        pairs = self._pairs()
        if any(noise == 0 for noise, _ in pairs):
            return Bounds(0.0, most, most)
        if len(pairs) <= _DISTINCT:
            return bounds_of(self._steps(pairs))
        low, high = (bounds_of(self._steps(_rounded(pairs, side))) for side in (-1, 1))
        return Bounds(low.lower, (low.estimate + high.estimate) / 2, high.upper)

    # -- the steps that are composed -----------------------------------------------

    def _pairs(self) -> Counter:
        """Returns the number of steps of each noise multiplier and sampling rate."""
        steps = [check_step(*entry) for entry in self.history]
        steps += [
            (entry["noise_multiplier"], 1.0, entry["participations"])
            for entry in self.mechanisms
            if entry["mechanism"] == "gaussian"
        ]
        pairs: Counter = Counter()
        for noise, rate, count in steps:
            if rate > 0 and count > 0 and noise < math.inf:
                pairs[noise, rate] += count
        return pairs

    def _steps(self, pairs: Counter) -> List[Step]:
        """Returns the steps of these pairs and of the other mechanisms."""
        others: Counter = Counter()
        for entry in self.mechanisms:
            values = tuple(entry[name] for name in MECHANISMS[entry["mechanism"]])
            others[entry["mechanism"], values] += entry["participations"]
        steps = []
        squares = [k / noise**2 for (noise, rate), k in pairs.items() if rate == 1]
        if squares:
            steps.append(Step(profiles.gaussian(1 / math.sqrt(sum(squares))), 1))
        for (name, values), k in others.items():
            if name == "laplace":
                greatest = 1 / values[0]
                steps.append(Step(profiles.laplace(*values), k, greatest=greatest))
            elif name in ("pure", "approximate"):
                delta = (*values, 0.0)[1]
                steps.append(Step(profiles.pure(values[0]), k, delta, values[0]))
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


# -- checks ------------------------------------------------------------------------


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
        "between 0 and 1: it is the probability of a record to be in a batch",
    )
    _check("steps", steps, steps >= 0 and int(steps) == steps, "a whole number")
    return float(noise), float(rate), int(steps)


def check_mechanism(entry: Dict[str, Any]) -> None:
    """Refuses an entry that describes no known mechanism."""
    name = entry["mechanism"]
    known = ", ".join(map(repr, MECHANISMS))
    _check("mechanism", name, name in MECHANISMS, f"one of {known}")
    given = set(entry) - {"mechanism", "participations"}
    if given != set(MECHANISMS[name]):
        raise Refused(
            f"{name!r} takes {' and '.join(MECHANISMS[name])}; got "
            f"{', '.join(sorted(given)) or 'nothing'}.",
            parameter="mechanism",
            remedy="Give these parameters, and no others.",
        )
    for parameter in given:
        fits, text = _RANGES[parameter]
        _check(parameter, entry[parameter], fits(entry[parameter]), text)
    count = entry["participations"]
    whole = isinstance(count, int) and not isinstance(count, bool) and count > 0
    _check("participations", count, whole, "a whole number, 1 or more")
