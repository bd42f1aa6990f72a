"""How the batch of a step is drawn: ``make_private(..., sampling=...)``."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Dict, Optional, Tuple

from opacus_ext.accountants.whole import add_steps, record_whole
from opacus_ext.refused import Refused, check_number
from opacus_ext.strategies import Participation, Strategy

# A plan names a way to draw, and must not wait for the import of torch.
if TYPE_CHECKING:
    import torch
    from opacus.accountants.accountant import IAccountant
    from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """
    Each record is drawn with the same probability, independently of other records.

    Opacus's own sampling is the same with a rate of 1 / k, if the loader has k batches.
    Every accountant supports it.

    Args:
        steps: length of an epoch; by default one over the sampling rate, rounded
        expected_batch_size: records of a batch on average, any number up to all; it
            divides the sum of clipped gradients
        sample_rate: instead, the probability that a record is drawn. With both, nothing
            is computed from the number of records, which may then be private
        public_records: a number of records that does not depend on the data, for the
            computation of the one from the other

    Example:
        >>> sampling = Poisson(expected_batch_size=50, steps=10)
        >>> sampling.rate(records=1000), sampling.steps_per_epoch(records=1000)
        (0.05, 10)
        >>> sampling = Poisson(expected_batch_size=50, sample_rate=0.05)
        >>> sampling.rate(records=1001), sampling.divisor(records=1001)
        (0.05, 50)
    """

    #: True if the batches of an epoch, or of a run, are drawn at once.
    allocates: ClassVar[bool] = False
    #: True if an allocation is that of the whole run.
    keeps_allocation: ClassVar[bool] = False

    steps: Optional[int] = None
    expected_batch_size: Optional[float] = None
    sample_rate: Optional[float] = None
    public_records: Optional[int] = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            convert = plain if name in _SIZES else plain_count
            object.__setattr__(self, name, convert(value))
        records, size, rate = (
            self.public_records,
            self.expected_batch_size,
            self.sample_rate,
        )
        if records is None:
            return
        check_number("public_records", records, whole=True)
        if rate is None and size is not None:
            check_number("expected_batch_size", size)
            object.__setattr__(self, "sample_rate", size / records)
        if size is None and rate is not None:
            check_number("sample_rate", rate)
            object.__setattr__(self, "expected_batch_size", rate * records)

    @property
    def is_public(self) -> bool:
        """True if rate, divisor and steps are the same for any number of records."""
        return None not in (self.sample_rate, self.expected_batch_size)

    def rate(self, records: int) -> float:
        """Returns the probability that a record is drawn, of so many records."""
        if self.sample_rate is not None:
            return self.sample_rate
        assert self.expected_batch_size is not None
        return self.expected_batch_size / records

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        """Returns the record numbers of batch ``step`` of the run, ascending."""
        return _drawn(records, self.rate(records), generator)

    def drawn_at(self, step: int) -> int:
        """Returns the step of the run at which the batch of a step is drawn."""
        return step

    def steps_per_epoch(self, records: int) -> int:
        """Returns the length of the loader."""
        return self.steps or max(round(1 / self.rate(records)), 1)

    def divisor(self, records: int) -> float:
        """Returns the expected batch size, which divides the sum of gradients."""
        size = self.expected_batch_size
        if size is None:
            size = self.rate(records) * records
        return round(size) if abs(size - round(size)) < 1e-9 * size else size

    def check(self, records: int) -> None:
        """Refuses impossible sizes."""
        if self.steps is not None:
            check_number("steps", self.steps, whole=True)
        names = "expected_batch_size", "sample_rate"
        given = {name: getattr(self, name) for name in names}
        for name, value in given.items():
            if value is not None:
                check_number(name, value)
        if set(given.values()) == {None}:
            raise Refused(
                f"{type(self).__name__} has neither expected_batch_size nor "
                "sample_rate.",
                parameter="expected_batch_size",
                remedy="Give one of the two, or both where the number of records is "
                "private.",
            )
        if self.rate(records) > 1:
            most = self.public_records or records
            by_rate = self.sample_rate is not None and self.public_records is None
            raise Refused(
                f"{self} would draw each of {most} records with probability "
                f"{self.rate(records):g}.",
                parameter="sample_rate" if by_rate else "expected_batch_size",
                remedy=(
                    "Give a sample_rate of at most 1."
                    if by_rate
                    else f"Give an expected batch size above 0, at most {most}."
                ),
            )

    def account(
        self,
        accountant: Any,
        records: int,
        noise_multiplier: float,
        steps: int = 1,
        strategy: Optional[Strategy] = None,
    ) -> None:
        """
        Records steps with an accountant, or a Composition. ``strategy`` is that of
        correlated noise.
        """
        _account(accountant, *self.step_of(noise_multiplier, records), steps)

    def step_of(self, noise_multiplier: float, records: int) -> Tuple[float, float]:
        """Returns noise and rate of the entry, as accountants have them."""
        return noise_multiplier, self.rate(records)

    def other_step(self, noise_multiplier: float, rate: float) -> Tuple[float, float]:
        """
        Returns noise and rate of the entry of a step on records that were not drawn for
        it, but with this probability at most.
        """
        return noise_multiplier, rate

    def hook(self, accountant: IAccountant, records: int) -> Callable[[Any], None]:
        """Returns the step hook of the optimizer, which records each step."""

        def record(optimizer: Any) -> None:
            if optimizer.accumulated_iterations != 1:
                raise Refused(
                    f"{optimizer.accumulated_iterations} batches were accumulated to "
                    f"one step, which are not one draw of {type(self).__name__}.",
                    parameter="sampling",
                    remedy="Call optimizer.step() and zero_grad() after each batch, "
                    "and split large ones by opacus.utils.batch_memory_manager."
                    "BatchMemoryManager.",
                )
            self._record(accountant, records, optimizer)

        return record

    def _record(self, accountant: IAccountant, records: int, optimizer: Any) -> None:
        record_whole(accountant, lambda: self._count(accountant, records, optimizer))

    def _count(self, accountant: IAccountant, records: int, optimizer: Any) -> None:
        self.account(accountant, records, optimizer.noise_multiplier)

    def describe(self, records: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        return {
            "scheme": "poisson",
            "expected_batch_size": self.divisor(records),
            "sample_rate": self.rate(records),
        }

    def loader(
        self,
        stock: DataLoader,
        *,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        place: Optional[Tuple[int, int]] = None,
    ) -> DataLoader:
        """
        Returns a loader that draws this way, like ``stock`` in all else. Empty batches
        are those of Opacus's ``DPDataLoader``; with ``place`` each process has its
        share of the batch (see :class:`~opacus_ext.data.draws.Draws`).
        """
        from opacus.data_loader import dtype_safe, shape_safe, wrap_collate_with_empty

        from opacus_ext.data.draws import Draws, count_records, loader_like

        records, fields = count_records(stock.dataset), list(stock.dataset[0])
        draws = Draws(self, records, stock.generator, place)
        draws.ahead = stock.num_workers * (stock.prefetch_factor or 2)
        collate = wrap_collate_with_empty(
            collate_fn=stock.collate_fn,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            sample_empty_shapes=[(0, *shape_safe(x)) for x in fields],
            dtypes=[dtype_safe(x) for x in fields],
        )
        return loader_like(stock, stock.dataset, draws, collate, stock.generator)


_SIZES = "expected_batch_size", "sample_rate"


def plain(value: Any) -> Any:
    """Returns a number of numpy as one that statements and checkpoints can hold."""
    numpy = isinstance(value, numbers.Real) and hasattr(value, "item")
    return value.item() if numpy else value


def plain_count(value: Any) -> Any:
    """Returns a number of numpy, or a whole float, as a plain whole number."""
    value = plain(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


#: The type of all samplings.
Sampling = Poisson


def _account(accountant: Any, noise_multiplier: float, rate: float, steps: int) -> None:
    if steps == 1:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
    else:
        add_steps(accountant.history, noise_multiplier, rate, steps)


def _drawn(records: int, rate: float, generator: Any) -> torch.Tensor:
    """Returns the numbers of records whose key is below the rate."""
    keys = random_keys(records, generator)
    if keys.is_floating_point():
        drawn = keys < rate
    else:  # The rate is rounded down; 2^63 is out of range.
        drawn = keys <= int(rate * 2**63) - 1
    return drawn.nonzero()[:, 0]


def random_keys(records: int, generator: Any) -> torch.Tensor:
    """
    Returns a random number for each record: floats below 1 of 53 bits, as a rate of
    1e-6 would be wrong by a percent with 24; from a ``SecureSource`` integers of 63.
    """
    import torch

    from opacus_ext.secure import SecureSource

    if isinstance(generator, SecureSource):
        return generator.integers(records)
    return torch.rand(records, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson(Poisson):
    """
    Poisson sampling from the parts of the data set in turn, for correlated noise.

    Record i belongs to part ``i mod b``. A step draws from one part, each of its
    records with b times the rate, so that no record is drawn twice in b steps: what
    noise of b bands is accounted for ("(Amplified) Banded Matrix Factorization",
    Choquette-Choo et al. 2023, theorem 4). Any b steps in a row are one sampled
    Gaussian mechanism of b times the rate, which is recorded at the first of them.

    To remove a record means that its gradients are left out and all others stay in
    their parts. A data set without it, numbered anew, has other parts. Each batch of
    the loader must be one step. ``make_private(noise=...)`` makes one, of ``bands=b``.

    Example:
        >>> sampling = CyclicPoisson(expected_batch_size=2, bands=2)
        >>> sampling.draw(4, None, step=0).tolist()  # 2 of 4 records, from one half
        [0, 2]
    """

    bands: int

    def check(self, records: int) -> None:
        """Refuses impossible sizes of batches or parts."""
        super().check(records)
        if self.bands != int(self.bands) or not 1 <= self.bands <= records:
            raise Refused(
                f"bands={self.bands} parts of {records} records.",
                parameter="bands",
                remedy="Give a whole number from 1 to the number of records.",
            )
        if self.bands * self.rate(records) > 1:
            most = int(1 / self.rate(records))
            raise Refused(
                f"A part of 1/{self.bands} of the records is smaller than the expected "
                f"batch, {self.divisor(records):g} of {records} records.",
                parameter="bands",
                remedy=f"Give at most {most} bands, or a smaller batch.",
            )

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        """Returns the record numbers of batch ``step``, all of them in one part."""
        import torch

        part = torch.arange(step % self.bands, records, self.bands)
        return part[_drawn(len(part), self._rate_of_round(records), generator)]

    @property
    def separation(self) -> int:
        """The least number of steps between two of one record."""
        return self.bands

    def steps_of_round(self, strategy: Strategy) -> int:
        """Returns the number of steps that a statement tells as one."""
        return self.bands

    def kind_of_round(
        self, noise_multiplier: float, records: int, strategy: Optional[Strategy]
    ) -> Optional[Tuple[float, float]]:
        """
        Returns noise and rate of a round of steps, as accountants have them; None if
        the rounds of a record are not independent.
        """
        if strategy is not None and strategy.span > self.bands:
            return None
        return noise_multiplier, self._rate_of_round(records)

    def account(
        self,
        accountant: Any,
        records: int,
        noise_multiplier: float,
        steps: int = 1,
        strategy: Optional[Strategy] = None,
    ) -> None:
        """Records the steps of a run, by rounds of ``bands`` steps."""
        rounds = -(-steps // self.bands)
        account_rounds(self, accountant, records, noise_multiplier, rounds, strategy)

    def _rate_of_round(self, records: int) -> float:
        """Returns the probability that a record is drawn in a round of its part."""
        rate = self.bands * self.rate(records)
        return 1.0 if rate > 1 - 1e-9 else rate

    def _record(self, accountant: IAccountant, records: int, optimizer: Any) -> None:
        if getattr(optimizer, "correlated", None) is None:
            raise Refused(
                f"The batches are drawn for correlated noise, from {self.bands} parts.",
                parameter="sampling",
                remedy="Pass make_private(noise=...), which draws them so.",
            )
        count_rounds(self, accountant, records, optimizer)

    def describe(self, records: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        return {**super().describe(records), "scheme": "cyclic_poisson"}


def account_rounds(
    sampling: Any,
    accountant: Any,
    records: int,
    noise_multiplier: float,
    rounds: int,
    strategy: Optional[Strategy],
    known: int = 0,
) -> None:
    """
    Records rounds of ``sampling.separation`` steps, in each of which a record has one
    step at most, but for those that are ``known``. If rounds are not independent, they
    are one release on all records, and of Gaussian releases the squares of the
    sensitivities add up.

    Raises:
        Refused: for a round after the steps that the noise is planned for
    """
    begin = (rounds - 1) * sampling.separation
    if strategy is not None and not strategy.is_banded and begin >= strategy.steps:
        raise Refused(
            f"{strategy} is planned for {strategy.steps} steps: epsilon is not known "
            "for more.",
            parameter="noise",
            remedy="Plan as many steps as the run has.",
        )
    kind = sampling.kind_of_round(noise_multiplier, records, strategy)
    if kind is not None:
        noise, rate = kind
        _account(accountant, noise, rate, rounds - known)
        return
    assert strategy is not None
    square = 0.0
    for sign, times in ((1, rounds), (-1, known)):
        if times:
            participation = Participation(sampling.separation, times)
            square += sign * strategy.sensitivity(participation) ** 2
    if square > 0:
        _account(accountant, noise_multiplier / math.sqrt(square), 1.0, 1)


def count_rounds(
    sampling: Any, accountant: IAccountant, records: int, optimizer: Any
) -> None:
    """Records the round that the step of an optimizer has begun, if it has."""
    noise, multiplier = optimizer.correlated, float(optimizer.noise_multiplier)
    begun, known = -(-noise.taken // sampling.separation), noise.counted
    if begun > known:
        run = records, multiplier, begun, noise.strategy, known

        def record() -> None:
            """Adds the rounds, and what earlier ones add to noise of several runs."""
            account_rounds(sampling, accountant, *run)
            if noise.branches and not known and not sampling.allocates:
                # A record of the last steps before a branch is in the noise of all
                # branches by one draw, which is less private than a draw for each.
                less = multiplier / math.sqrt(1 + noise.branches)
                kind = sampling.kind_of_round(less, records, noise.strategy)
                if kind is not None:
                    _account(accountant, *kind, 1)

        record_whole(accountant, record)
        noise.counted = begun  # after that: an interrupt leaves no round uncounted
