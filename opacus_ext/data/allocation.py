"""Batches that are drawn for an epoch or a run at once, and batches of bounded size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

from opacus_ext.accountants.mechanisms import Allocated, Binned, Fixed, Truncated
from opacus_ext.accountants.whole import add_steps
from opacus_ext.data.sampling import (
    Poisson,
    account_rounds,
    count_rounds,
    random_keys,
)
from opacus_ext.refused import Refused, check_number, warn_once
from opacus_ext.strategies import Strategy

if TYPE_CHECKING:
    import torch


class Begun:
    """
    The epochs of a run whose batches are drawn at once: how many were begun, and how
    many of these are recorded.

    Args:
        count: returns the number of those begun so far
        recorded: of these, those that the accountant has from before
        noise_multiplier: of the last one recorded
    """

    def __init__(
        self,
        count: Callable[[], int],
        recorded: int = 0,
        noise_multiplier: float = float("inf"),
    ):
        self.count, self.recorded = count, recorded
        self.noise_multiplier = noise_multiplier

    def forget(self) -> None:
        """Lets the epoch that is under way be recorded again: a history was loaded."""
        self.recorded = min(self.recorded, max(self.count() - 1, 0))


class _Allocating(Poisson):
    """Records are given to batches at once, see the classes below."""

    allocates = True

    def entry(
        self, noise_multiplier: float, epochs: int = 1
    ) -> Tuple[float, float, int]:
        """Returns the entry of an accountant's history for so many epochs."""
        raise NotImplementedError

    def allocate(self, records: int, generator: Any) -> torch.Tensor:
        """Returns the numbers of each record's batches, ``[records, k]``"""
        raise NotImplementedError

    def step_of(self, noise_multiplier: float, records: int) -> Tuple[float, float]:
        """Returns noise and rate of the entry, as accountants have them."""
        return self.entry(noise_multiplier)[:2]

    def account(
        self,
        accountant: Any,
        records: int,
        noise_multiplier: float,
        steps: int = 1,
        strategy: Optional[Strategy] = None,
    ) -> None:
        """Records steps with an accountant, or a Composition: epochs, rounded up."""
        epochs = -(-steps // self.steps_per_epoch(records))
        add_steps(accountant.history, *self.entry(noise_multiplier, epochs))

    def batch(self, allocation: torch.Tensor, step: int) -> torch.Tensor:
        """Returns the numbers of the records that are in a batch, ascending."""
        number = step % self.steps_per_epoch(len(allocation))
        return (allocation == number).any(1).nonzero()[:, 0]

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        """Returns the record numbers of one batch of a new allocation."""
        return self.batch(self.allocate(records, generator), step)

    def _record(self, accountant: Any, records: int, optimizer: Any) -> None:
        # An interrupt after the entry was added must not take it out again.
        self._count(accountant, records, optimizer)

    def _count(self, accountant: Any, records: int, optimizer: Any) -> None:
        """
        Records each allocation at the first step after it was begun, as a whole; once
        more if the noise has become less since.
        """
        begun, noise = optimizer.begun_epochs, float(optimizer.noise_multiplier)
        # A step without any draw counts as one, too.
        count = max(begun.count(), 1)
        epochs = count - begun.recorded
        if epochs <= 0 and noise < begun.noise_multiplier:
            warn_once(
                optimizer,
                "allocation",
                "The noise became less within an epoch, whose batches were drawn at "
                "once: the epoch counts once more. Change noise_multiplier between "
                "epochs.",
            )
            epochs = 1
        if epochs > 0:
            add_steps(accountant.history, *self.entry(noise, epochs))
            begun.recorded, begun.noise_multiplier = count, noise


@dataclass(frozen=True, kw_only=True)
class RandomAllocation(_Allocating):
    """
    In each epoch of t steps each record is in k of the t batches, drawn anew.

    Every record is seen equally often. "prv_bounds" and "prv" take an upper bound of
    the mechanism; other accountants that of k batches of all records an epoch. An epoch
    is recorded at its first step, and a loader that is begun anew begins another one.

    Args:
        steps: t, the length of an epoch
        selected: k, in how many of its batches each record is
        expected_batch_size: divides the sum of clipped gradients; by default k / t of
            the number of records
        public_records: a number of records that does not depend on the data, for the
            default of ``expected_batch_size``

    Example:
        >>> sampling = RandomAllocation(steps=20)
        >>> sampling.rate(records=1000), sampling.divisor(records=1000)
        (0.05, 50)
    """

    steps: int
    selected: int = 1
    sample_rate: Optional[float] = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("steps", self.steps, whole=True)
        check_number("selected", self.selected, whole=True)
        if self.selected > self.steps:
            raise Refused(
                f"selected={self.selected} of {self.steps} batches.",
                parameter="selected",
                remedy="Give a whole number from 1 to steps.",
            )
        object.__setattr__(self, "sample_rate", self.selected / self.steps)
        super().__post_init__()

    def entry(
        self, noise_multiplier: float, epochs: int = 1
    ) -> Tuple[float, float, int]:
        """Returns the entry of an accountant's history for so many epochs."""
        kind = Allocated(noise_multiplier, self.steps, self.selected)
        return kind, kind.rate, epochs * self.selected

    def drawn_at(self, step: int) -> int:
        """Returns the first step of the epoch, at which its batches are drawn."""
        return step - step % self.steps

    def allocate(self, records: int, generator: Any) -> torch.Tensor:
        """Returns the numbers of each record's batches, ``[records, k]``"""
        import torch

        chosen = torch.empty(records, self.selected, dtype=torch.int64)
        # Floyd's: the i-th is uniform up to a last one, which replaces one that is in.
        for i in range(self.selected):
            last = self.steps - self.selected + i
            new = _uniform(records, last + 1, generator)
            is_in = (chosen[:, :i] == new[:, None]).any(1)
            chosen[:, i] = torch.where(is_in, last, new)
        return chosen

    def describe(self, records: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        return {
            **super().describe(records),
            "scheme": "random_allocation",
            "steps": self.steps,
            "selected": self.selected,
        }


@dataclass(frozen=True, kw_only=True)
class BallsInBins(_Allocating):
    """
    Each record is in one of b batches, drawn once for the whole run: the batches come
    in turn, the same in each epoch.

    With independent noise this costs much more than :class:`RandomAllocation` as soon
    as there are several epochs: they are one allocation with noise that is
    sqrt(epochs) times less. It is for noise that is correlated.

    Args:
        bins: b, the length of an epoch
        expected_batch_size, public_records: as in :class:`RandomAllocation`
    """

    bins: int
    steps: Optional[int] = field(default=None, init=False, repr=False)
    sample_rate: Optional[float] = field(default=None, init=False, repr=False)

    keeps_allocation = True

    def __post_init__(self) -> None:
        check_number("bins", self.bins, whole=True)
        object.__setattr__(self, "steps", self.bins)
        object.__setattr__(self, "sample_rate", 1 / self.bins)
        super().__post_init__()

    @property
    def separation(self) -> int:
        """The number of steps between two of one record."""
        return self.bins

    def entry(
        self, noise_multiplier: float, epochs: int = 1
    ) -> Tuple[float, float, int]:
        """Returns the entry of an accountant's history for so many epochs."""
        kind = Binned(noise_multiplier, self.bins)
        return kind, kind.rate, epochs

    def kind_of_round(
        self, noise_multiplier: float, records: int, strategy: Optional[Strategy]
    ) -> Optional[Tuple[float, float]]:
        """
        Returns noise and rate of an epoch with correlated noise; None if more than one
        epoch's steps are correlated.

        Let the bin be known modulo b, for a b that divides the number of bins and is
        not less than the number of bands. Of the bins that are left, no two meet
        columns of the strategy that have a row in common, in any epochs, so that this
        is an allocation to as many bins as are left. By joint convexity it is a bound.
        """
        assert strategy is not None
        if strategy.span > self.bins:
            return None
        known = self.steps_of_round(strategy)
        if known == self.bins:
            return noise_multiplier, 1.0
        kind = Binned(noise_multiplier, self.bins // known)
        return kind, kind.rate

    def steps_of_round(self, strategy: Strategy) -> int:
        """
        Returns the number of steps that a statement tells as one: the least that
        divides the number of bins and is not less than the number of bands.
        """
        wide = range(strategy.span, self.bins)
        return next((b for b in wide if self.bins % b == 0), self.bins)

    def account(
        self,
        accountant: Any,
        records: int,
        noise_multiplier: float,
        steps: int = 1,
        strategy: Optional[Strategy] = None,
    ) -> None:
        """Records steps with an accountant, or a Composition: epochs, rounded up."""
        if strategy is None:
            super().account(accountant, records, noise_multiplier, steps)
            return
        rounds = -(-steps // self.bins)
        account_rounds(self, accountant, records, noise_multiplier, rounds, strategy)

    def _count(self, accountant: Any, records: int, optimizer: Any) -> None:
        if optimizer.correlated is None:
            super()._count(accountant, records, optimizer)
        else:
            count_rounds(self, accountant, records, optimizer)

    def drawn_at(self, step: int) -> int:
        """Returns the first step of the run, at which the bins are drawn."""
        return 0

    def allocate(self, records: int, generator: Any) -> torch.Tensor:
        """Returns the number of the batch that each record is in, ``[records, 1]``"""
        return _uniform(records, self.bins, generator)[:, None]

    def describe(self, records: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        described = super().describe(records)
        return {**described, "scheme": "balls_in_bins", "bins": self.bins}


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Poisson):
    """
    Poisson sampling with a greatest batch size: a larger draw is cut to a random subset
    of ``max_batch_size`` records, so that memory is bounded.

    Six standard deviations above the expected batch size cost nothing that can be seen,
    and no room at all costs twice the noise
    (:class:`~opacus_ext.accountants.mechanisms.Truncated` has the proof). "prv_bounds"
    and "prv" count it; others count twice the noise.

    Args:
        max_batch_size: the most records of a batch
    """

    max_batch_size: int

    def check(self, records: int) -> None:
        """Refuses impossible sizes."""
        super().check(records)
        mean, most = self.rate(records) * records, self.max_batch_size
        check_number("max_batch_size", most, whole=True)
        if most < mean:
            raise Refused(
                f"max_batch_size={most} is below the expected batch size, {mean:g}: "
                "most draws would be cut.",
                parameter="max_batch_size",
                remedy=f"Give at least {int(mean + 6 * max(mean, 1) ** 0.5) + 1}, six "
                "standard deviations above it.",
            )

    def step_of(self, noise_multiplier: float, records: int) -> Tuple[float, float]:
        """Returns noise and rate of the entry, as accountants have them."""
        rate, most = self.rate(records), self.max_batch_size
        kind = Truncated(noise_multiplier, rate, records, most)
        return kind, kind.rate

    def other_step(self, noise_multiplier: float, rate: float) -> Tuple[float, float]:
        """Returns noise and rate of a step whose batch may have been cut."""
        return Truncated.bound(noise_multiplier), rate

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        """Returns the record numbers of a batch, ascending."""
        drawn = super().draw(records, generator, step)
        if len(drawn) <= self.max_batch_size:
            return drawn
        return drawn[_smallest(len(drawn), self.max_batch_size, generator)]

    def describe(self, records: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        return {
            **super().describe(records),
            "scheme": "truncated_poisson",
            "max_batch_size": self.max_batch_size,
        }


@dataclass(frozen=True, kw_only=True)
class FixedSize(Poisson):
    """
    Every batch has the same size, and each set of so many records is equally likely.

    Neighbors are data sets of the same size in which one record is another one, so that
    the sum of clipped gradients moves by up to twice ``max_grad_norm``: at the same
    noise epsilon is more than twice that of Poisson sampling
    (:func:`~opacus_ext.accountants.profiles.exchanged`). "prv_bounds" and "prv" count
    it; others count batches of all records. Nothing else may be released beside it.

    Args:
        batch_size: of every batch
        steps: length of an epoch; by default the number of records over the batch size
    """

    batch_size: int
    expected_batch_size: Optional[float] = field(default=None, init=False, repr=False)
    sample_rate: Optional[float] = field(default=None, init=False, repr=False)
    public_records: Optional[int] = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("batch_size", self.batch_size, whole=True)
        object.__setattr__(self, "expected_batch_size", self.batch_size)
        super().__post_init__()

    def step_of(self, noise_multiplier: float, records: int) -> Tuple[float, float]:
        """Returns noise and rate of the entry, as accountants have them."""
        return self.other_step(noise_multiplier, self.rate(records))

    def other_step(self, noise_multiplier: float, rate: float) -> Tuple[float, float]:
        """Returns noise and rate of a step on so many of the records."""
        kind = Fixed(noise_multiplier, rate)
        return kind, kind.rate

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        """Returns the record numbers of a batch, ascending."""
        return _smallest(records, self.batch_size, generator)

    def describe(self, records: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        return {**super().describe(records), "scheme": "fixed_size"}


def _uniform(records: int, count: int, generator: Any) -> torch.Tensor:
    """Returns a uniform whole number below ``count`` for each record."""
    import torch

    keys = random_keys(records, generator)
    if keys.is_floating_point():
        return (keys * count).to(torch.int64)
    return keys % count  # of 63 bits: it is uniform up to count / 2^63


def _smallest(records: int, count: int, generator: Any) -> torch.Tensor:
    """Returns a random set of so many record numbers, ascending."""
    keys = random_keys(records, generator)
    return keys.topk(count, largest=False).indices.sort().values
