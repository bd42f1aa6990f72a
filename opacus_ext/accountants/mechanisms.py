"""
Steps that are no sampled Gaussian mechanisms, as entries of an accountant's history.

An entry is (noise_multiplier, sample_rate, steps). Here the noise multiplier is a
:class:`Mechanism`: a number with which the entry, read as Poisson sampling, is a bound,
and which knows what the batches were in truth. So every accountant of Opacus counts
enough, and :class:`~opacus_ext.accountants.composition.Composition` counts closely.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Dict, Iterable, List, Tuple, Type

from opacus_ext.accountants import profiles
from opacus_ext.accountants.allocation import allocated
from opacus_ext.accountants.numerical import Step
from opacus_ext.refused import Refused

_MECHANISM = "mechanism_of_steps"  # key of a mechanism in JSON


class Mechanism(float):
    """
    The noise multiplier of steps of another kind. It equals no other number, and no
    other mechanism, unless all have no noise. Copies, pickles and files of torch keep
    it; for JSON there are :func:`to_json` and :func:`from_json`.

    Attributes:
        values: noise multiplier over the clipping norm, and what follows in ``names``
        rate: the sampling rate with which the entry is a bound
    """

    name = ""
    names: Tuple[str, ...] = ()
    rate = 1.0
    is_drawn = True  # the batches, at random
    values: Tuple[Any, ...]

    def __new__(cls, *values: Any) -> Mechanism:
        number = super().__new__(cls, cls.bound(*values))
        number.values = values
        return number

    @classmethod
    def bound(cls, noise_multiplier: float, *others: Any) -> float:
        """Returns the noise multiplier with which the entry is a bound."""
        return noise_multiplier

    def upper(self, count: int) -> List[Step]:
        """Returns steps that are no more private than ``count`` of an entry."""
        raise NotImplementedError

    def lower(self) -> Tuple[float, float]:
        """Returns the noise and the rate of steps that are at least as private."""
        raise NotImplementedError

    def steps(self, count: int) -> int:
        """Returns the number of steps of the optimizer that an entry counts."""
        return count

    def describe(self, count: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        values = dict(zip(self.names, self.values))
        return {"sampling": self.name, **values, "steps": self.steps(count)}

    def _key(self) -> Any:
        return (self.name, self.values) if self > 0 else 0.0

    def __eq__(self, other: object) -> bool:
        return self._key() == (other._key() if isinstance(other, Mechanism) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        return type(self), self.values

    def __repr__(self) -> str:
        values = (f"{name}={x}" for name, x in zip(self.names, self.values))
        return f"{type(self).__name__}({', '.join(values)})"


class Allocated(Mechanism):
    """
    Each record is in ``selected`` of ``batches`` batches, drawn anew each epoch. An
    entry counts ``selected`` for an epoch.

    To draw k of t at random is to part the t batches at random into k blocks, of sizes
    that differ by at most one, and to draw one of each. With the blocks known, these
    are k independent allocations to one batch, so by joint convexity their composition
    is a bound.
    """

    name = "random_allocation"
    names = "noise_multiplier", "batches", "selected"

    def upper(self, count: int) -> List[Step]:
        noise, batches, selected = self.values
        epochs, (size, larger) = -(-count // selected), divmod(batches, selected)
        sizes = {size: selected - larger, size + 1: larger}
        return [Step(allocated(noise, n), epochs * k) for n, k in sizes.items() if k]

    def lower(self) -> Tuple[float, float]:
        # The sum of an epoch's outputs: k in noise of sqrt(t) times the deviation.
        noise, batches, selected = self.values
        return noise * math.sqrt(batches / selected), 1.0

    def steps(self, count: int) -> int:
        _, batches, selected = self.values
        return -(-count // selected) * batches


class Binned(Mechanism):
    """
    Each record is in one of ``bins`` batches, the same in each epoch. An entry counts
    one for an epoch.

    E epochs are one allocation with noise that is sqrt(E) times less: the sum of a
    bin's outputs says all. Two draws of the bins are independent, and count less than
    one draw, so that all are taken as one: the product of two means is the mean, over
    cyclic shifts, of what one draw would give.
    """

    name = "balls_in_bins"
    names = "noise_multiplier", "bins"

    def lower(self) -> Tuple[float, float]:
        noise, bins = self.values
        return noise * math.sqrt(bins), 1.0

    def steps(self, count: int) -> int:
        return count * self.values[1]


class Truncated(Mechanism):
    """
    Poisson batches that are cut to a random subset of ``max_batch_size`` records.

    **Claim.** Let D be a data set of n records and D+ the same with one more, x. A step
    is dominated by a mechanism that says whether a coin of probability ``p =
    P[Binomial(n, q) >= B]`` fell, and then gives, of D+ and D, ``(1 - q) N(0, s^2) + q
    N(m, s^2)`` and ``N(0, s^2)``, with m = 1 without the coin and m = 2 with it.

    **Proof.** The draw S from D is the same for both. Let it be known: by joint
    convexity the divergence is at most the mean over S. Of less than B records nothing
    is cut, with x or without: m = 1. Of B or more, D gives a random subset U of B of
    them. D+ gives the same, but that with probability ``q B / (|S| + 1) <= q`` x was
    drawn and kept, beside a random subset of B - 1. Let that be U without a random one
    of its records: x is in its place, so the sum moves by twice the bound at most. By
    joint convexity again, and as the divergence grows with the probability of x, this
    is dominated by m = 2, which dominates m = 1. So |S| matters only by the probability
    that it is B or more, which grows with n.
    """

    name = "truncated_poisson"
    names = "noise_multiplier", "sample_rate", "records", "max_batch_size"

    @classmethod
    def bound(cls, noise_multiplier: float, *others: Any) -> float:
        return noise_multiplier / 2

    @property
    def rate(self) -> float:  # type: ignore[override]
        return self.values[1]

    def upper(self, count: int) -> List[Step]:
        from scipy.stats import binom  # takes half a second to import

        noise, rate, records, most = self.values
        cut = float(binom.sf(most - 1, records, rate))
        once, twice = (
            profiles.sampled(profiles.gaussian(x), rate) for x in (noise, noise / 2)
        )
        return [Step(profiles.mixture(once, twice, cut), count)]

    def describe(self, count: int) -> Dict[str, Any]:
        """Returns all but the number of records, which may be private."""
        described = super().describe(count)
        del described["records"]
        return described

    def lower(self) -> Tuple[float, float]:
        # A record that alone has a gradient, by the probability that it is kept.
        from scipy.stats import binom

        noise, rate, records, most = self.values
        others = float(binom.cdf(most - 1, records - 1, rate))
        kept = most / records * float(binom.sf(most, records, rate))
        return noise, rate * others + kept


class Fixed(Mechanism):
    """
    Batches of a fixed size, and data sets of as many records, of which one is another.
    See :func:`~opacus_ext.accountants.profiles.exchanged`.
    """

    name = "fixed_size"
    names = "noise_multiplier", "sample_rate"

    @classmethod
    def bound(cls, noise_multiplier: float, *others: Any) -> float:
        return noise_multiplier / 2

    def upper(self, count: int) -> List[Step]:
        noise, rate = self.values
        removal = profiles.sampled(profiles.gaussian(noise / 2), rate)
        return [Step(profiles.exchanged(removal), count)]

    def lower(self) -> Tuple[float, float]:
        # All other gradients may be the opposite of the one that is exchanged.
        noise, rate = self.values
        return noise / 2, rate


MECHANISMS: Tuple[Type[Mechanism], ...] = (Allocated, Binned, Truncated, Fixed)


def rounded(mechanisms: Counter, most: int) -> Counter:
    """
    Returns so many entries at most, of less noise, from the counts of entries. If there
    are more even without regard to the noise, they stay.
    """
    fewer, width = mechanisms, 1e-4
    while len(fewer) > most and width < 1:
        fewer = Counter()
        for mechanism, count in mechanisms.items():
            noise, *others = mechanism.values
            less = math.exp(math.floor(math.log(noise) / width) * width)
            fewer[type(mechanism)(less, *others)] += count
        width *= 1.5
    return fewer


def upper_steps(mechanisms: Counter) -> List[Step]:
    """Returns steps that are no more private than entries, given their counts."""
    steps: List[Step] = []
    binned: Counter = Counter()
    for mechanism, count in mechanisms.items():
        if isinstance(mechanism, Binned):
            noise, bins = mechanism.values
            binned[bins] += count / noise**2
        else:
            steps += mechanism.upper(count)
    for bins, square in binned.items():
        steps.append(Step(allocated(1 / math.sqrt(square), bins), 1))
    return steps


def count_of(history: Iterable[Any]) -> int:
    """Returns the number of steps of the optimizer in a history."""
    return sum(
        noise.steps(steps) if isinstance(noise, Mechanism) else steps
        for noise, _, steps in history
    )


def refuse_mixed(history: Iterable[Any]) -> None:
    """Refuses batches of fixed size beside releases of another relation."""
    fixed = [isinstance(noise, Fixed) for noise, _, steps in history if steps]
    if any(fixed) and not all(fixed):
        raise Refused(
            "Steps with batches of fixed size are private for the exchange of a "
            "record, and other steps and releases for its addition or removal: they "
            "can't be composed.",
            parameter="sampling",
            remedy="Draw all batches by opacus_ext.data.FixedSize, or none, with a new "
            "engine; and release nothing else.",
        )


def to_json(value: Any) -> Any:
    """Returns lists and dicts with mechanisms as plain numbers and names."""
    if isinstance(value, Mechanism):
        return {_MECHANISM: value.name, **dict(zip(value.names, value.values))}
    if isinstance(value, dict):
        return {key: to_json(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(x) for x in value]
    return value


def from_json(value: Dict[str, Any]) -> Any:
    """Returns the mechanism that a dict stands for: an ``object_hook`` of json."""
    for kind in MECHANISMS:
        if value.get(_MECHANISM) == kind.name:
            return kind(*(value[name] for name in kind.names))
    if _MECHANISM in value:
        raise Refused(
            f"Steps of the kind {value[_MECHANISM]!r}, which this version does not "
            "know.",
            remedy="Read them with the version of opacus_ext that has written them.",
        )
    return value
