"""Compositions of releases: lower bounds, estimates and upper bounds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from opacus_ext.accountants import profiles
from opacus_ext.accountants.numerical import (
    Bounds,
    Step,
    delta_bounds,
    epsilon_bounds,
)
from opacus_ext.accountants.truncation import cut_probability, kept_rate
from opacus_ext.refused import Refused

# Distinct mechanisms that are convolved. Beyond, they are rounded: see _rounded.
_DISTINCT = 64

#: The mechanisms of :meth:`PRVBoundsAccountant.compose` and their parameters.
MECHANISMS: Dict[str, Tuple[str, ...]] = {
    "gaussian": ("noise_multiplier",),
    "laplace": ("noise_multiplier",),
    "pure": ("epsilon",),
    "approximate": ("epsilon", "delta"),
    "truncated_poisson": (
        "noise_multiplier",
        "sample_rate",
        "records",
        "max_batch_size",
    ),
    "fixed_size": ("noise_multiplier", "sample_rate"),
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
        refuse_mixed([new], self.mechanisms)
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
                any mechanism with this guarantee; "truncated_poisson" with
                ``noise_multiplier``, ``sample_rate``, ``records`` and
                ``max_batch_size``: steps with Poisson batches that were cut to this
                size (``opacus_ext.accountants.truncation`` has the proof);
                "fixed_size" with ``noise_multiplier`` (over the clipping norm) and
                ``sample_rate``: steps with batches of a fixed size
                (:func:`~opacus_ext.accountants.profiles.exchanged`)
            participations: number of uses on the same record, or the most releases of
                a series that one record can take part in

        Raises:
            Refused: for another mechanism or parameters out of range, and for
                "fixed_size" beside another mechanism, whose neighbors differ

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
        refuse_mixed(self.history, [*self.mechanisms[-1:], entry])
        last = self.mechanisms[-1:]
        if last and {**last[0], "participations": 0} == {**entry, "participations": 0}:
            entry["participations"] += last.pop()["participations"]
        self.mechanisms[-1:] = [*last, entry]  # at once, as in step

    def get_epsilon(
        self,
        delta: float,
        *,
        eps_error: Optional[float] = None,
        delta_error: Optional[float] = None,
        **others: Any,
    ) -> float:
        """
        Returns the upper bound of :meth:`get_bounds`: no run of these steps spends
        more. Like Opacus's accountants it ignores other arguments.
        """
        bounds = self.get_bounds(delta, eps_error=eps_error, delta_error=delta_error)
        return bounds.upper

    def get_bounds(
        self,
        delta: float,
        *,
        eps_error: Optional[float] = None,
        delta_error: Optional[float] = None,
    ) -> Bounds:
        """
        Returns a lower bound, an estimate and an upper bound of epsilon.

        Args:
            delta: of the guarantee
            eps_error: distance of the lower bound from the estimate; by default 1 % of
                epsilon, and more where that would take more than a million points. The
                upper bound is nearer, mostly by a factor of 100
            delta_error: the part of delta for losses outside the grid; by default a
                thousandth of it

        Raises:
            Refused: for a delta outside (0, 1), errors that are not positive, and a
                history that is no list of steps
        """
        _check("delta", delta, 0 < delta < 1, "between 0 and 1, both excluded")
        if eps_error is not None:
            _check("eps_error", eps_error, 0 < eps_error < math.inf, "positive")
        if delta_error is not None:
            allowed = 0 < delta_error < delta
            _check("delta_error", delta_error, allowed, f"between 0 and delta={delta}")
        return self._bounds(
            lambda steps: epsilon_bounds(steps, delta, eps_error, delta_error), math.inf
        )

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
        if any(noise == 0 for noise, *_ in self._pairs()[1]):
            return Bounds(0.0, most, most)
        low, high = self._steps()
        bounds = bounds_of(high)
        if low is not high:
            other = bounds_of(low)
            estimate = (bounds.estimate + other.estimate) / 2
            bounds = Bounds(other.lower, estimate, bounds.upper)
        return bounds

    # -- the steps that are composed -----------------------------------------------

    def _pairs(self) -> Tuple[Counter, Counter]:
        """
        Returns the steps of each (noise_multiplier, sample_rate, cut), for the lower
        bound and for the upper; ``cut`` is the probability in ``truncation``.
        """
        low: Counter = Counter()
        high: Counter = Counter()

        def add(noise: float, rate: float, steps: int, kept: float, cut: float) -> None:
            if rate > 0 and steps > 0 and noise < math.inf:
                low[noise, kept, 0.0] += steps
                high[noise, rate, cut] += steps

        for history in self.history:
            noise, rate, steps = check_step(*history)
            add(noise, rate, steps, rate, 0.0)
        for entry in self.mechanisms:
            name, steps = entry["mechanism"], entry["participations"]
            rate = entry.get("sample_rate", 1.0)
            if name == "gaussian":
                add(entry["noise_multiplier"], rate, steps, rate, 0.0)
            elif name == "fixed_size":
                # An exchange of a clipped gradient moves the sum by twice the norm.
                add(entry["noise_multiplier"] / 2, rate, steps, rate, 0.0)
            elif name == "truncated_poisson":
                sizes = rate, entry["records"], entry["max_batch_size"]
                chances = kept_rate(*sizes), cut_probability(*sizes)
                add(entry["noise_multiplier"], rate, steps, *chances)
        return low, high

    def _steps(self) -> Tuple[List[Step], List[Step]]:
        """Returns the steps of the lower bound and of the upper; one list if equal."""
        refuse_mixed(self.history, self.mechanisms)
        others: Counter = Counter()
        for entry in self.mechanisms:
            values = tuple(entry[name] for name in MECHANISMS[entry["mechanism"]])
            others[entry["mechanism"], values] += entry["participations"]
        common = []
        for (name, values), k in others.items():
            if name == "laplace":
                greatest = 1 / values[0]
                common.append(Step(profiles.laplace(*values), k, greatest=greatest))
            elif name in ("pure", "approximate"):
                delta = (*values, 0.0)[1]
                common.append(Step(profiles.pure(values[0]), k, delta, values[0]))

        def build(pairs: Counter, exchange: bool) -> List[Step]:
            steps = list(common)
            if mu := _mu(pairs):
                steps.insert(0, Step(profiles.gaussian(1 / mu), 1))
            for (noise, rate, cut), k in sorted(pairs.items()):
                if (rate, cut) == (1, 0):
                    continue  # in mu
                profile = profiles.sampled(profiles.gaussian(noise), rate)
                if cut:
                    twice = profiles.sampled(profiles.gaussian(noise / 2), rate)
                    profile = profiles.mixture(profile, twice, cut)
                steps.append(
                    Step(profiles.exchanged(profile) if exchange else profile, k)
                )
            return steps

        low, high = self._pairs()
        if max(len(low), len(high)) > _DISTINCT:
            low, high = _rounded(low, -1), _rounded(high, 1)
        # An exchange reaches a removal's profile where all other gradients are the
        # opposite of the removed one: that gives its lower bound.
        exchange = any(e["mechanism"] == "fixed_size" for e in self.mechanisms)
        lower = build(low, False)
        return lower, build(high, exchange) if exchange or low != high else lower


def _mu(pairs: Mapping[Tuple[float, float, float], int]) -> float:
    squares = (k / n**2 for (n, rate, cut), k in pairs.items() if (rate, cut) == (1, 0))
    return math.sqrt(sum(squares))


def _rounded(pairs: Counter, side: int) -> Counter:
    """
    Rounds many sampled pairs to at most 64: for a lower bound (``side`` -1) to more
    noise, lower rates and lower probabilities to be cut, for an upper one (1) the
    reverse. Epsilon falls with the noise and rises with the others.
    """

    def rounded(x: float, up: int) -> float:
        to = math.ceil if up > 0 else math.floor
        return math.exp(to(math.log(x) / width) * width) if x else 0.0

    width = 1e-4
    while True:
        found: Counter = Counter()
        for (noise, rate, cut), k in pairs.items():
            if (rate, cut) != (1, 0):
                # A rate is rounded up to what is still sampling.
                near = min(rounded(rate, side), (1 + rate) / 2)
                noise, rate = rounded(noise, -side), near
                cut = min(rounded(cut, side), 1.0)
            found[noise, rate, cut] += k
        if sum((rate, cut) != (1, 0) for _, rate, cut in found) <= _DISTINCT:
            return found
        width *= 1.25


def refuse_mixed(history: List[Any], mechanisms: List[Dict[str, Any]]) -> None:
    """Refuses batches of fixed size beside mechanisms of another relation."""
    kinds = {entry["mechanism"] for entry in mechanisms}
    if "fixed_size" in kinds and (history or len(kinds) > 1):
        raise Refused(
            "Steps with batches of fixed size are private for the exchange of a "
            "record, and other releases for its addition or removal: they can't be "
            "composed.",
            parameter="sampling",
            remedy="Draw all batches by opacus_ext.data.FixedSize, or all by "
            "opacus_ext.data.Poisson and opacus_ext.data.TruncatedPoisson, with a new "
            "engine; and release nothing else.",
        )


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
    if "sample_rate" in given:  # as in a history, the noise may be 0
        check_step(entry["noise_multiplier"], entry["sample_rate"], 1)
        given -= {"noise_multiplier", "sample_rate"}
    for parameter in given:
        value = entry[parameter]
        allowed, text = {
            "delta": (0 <= value < 1, "0 or more, and below 1"),
            "epsilon": (0 <= value < math.inf, "0 or more, and finite"),
            "noise_multiplier": (0 < value < math.inf, "positive and finite"),
        }.get(parameter, (value >= 1 and value % 1 == 0, "a whole number, 1 or more"))
        _check(parameter, value, allowed, text)
    count = entry["participations"]
    whole = isinstance(count, int) and not isinstance(count, bool) and count > 0
    _check("participations", count, whole, "a whole number, 1 or more")
