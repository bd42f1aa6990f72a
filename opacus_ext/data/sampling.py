"""Ways to draw the batch of a step: ``make_private(..., sampling=...)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional

from opacus_ext.accountants.whole import record_whole
from opacus_ext.refused import Refused

# A plan names a way to draw, and must not wait for the import of torch.
if TYPE_CHECKING:
    import torch
    from opacus.accountants.accountant import IAccountant
    from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True)
class Sampling(ABC):
    """A way to draw batches; ``steps`` is the length of an epoch."""

    steps: Optional[int] = None

    #: Mechanism in the entries of an accountant; "" for the Poisson sampled Gaussian.
    name = ""

    @abstractmethod
    def rate(self, records: int) -> float:
        """Returns the probability that a record is drawn, of so many records."""

    @abstractmethod
    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        """Returns the record numbers of batch ``step`` of the run, ascending."""

    def parameters(self, records: int) -> Dict[str, Any]:
        """Returns what the accountant needs to know beside the noise."""
        return {"sample_rate": self.rate(records)}

    def steps_per_epoch(self, records: int) -> int:
        """Returns the length of the loader."""
        return self.steps or max(round(1 / self.rate(records)), 1)

    def divisor(self, records: int) -> float:
        """Returns the expected batch size, which divides the sum of gradients."""
        size = self.rate(records) * records
        return round(size) if abs(size - round(size)) < 1e-9 * size else size

    def check(self, records: int, accountant: IAccountant) -> None:
        """Refuses sizes that can't be, and accountants that don't know this way."""
        if self.steps is not None and (self.steps != int(self.steps) or self.steps < 1):
            raise Refused(
                f"steps={self.steps} of an epoch is not a whole number above zero.",
                parameter="steps",
                remedy="Leave it out for one over the sampling rate.",
            )
        if not hasattr(accountant, "compose") and self.name:
            raise Refused(
                f"The accountant {accountant.mechanism()!r} knows Poisson sampling "
                f"alone, and not {type(self).__name__}.",
                parameter="sampling",
                remedy='Make the engine by PrivacyEngine(accountant="prv_bounds").',
            )
        # On a copy, so that a composition is refused before anything is done.
        trial = type(accountant)()
        trial.load_state_dict(accountant.state_dict())
        self.account(trial, records, noise_multiplier=1.0)

    def account(
        self, accountant: Any, records: int, noise_multiplier: float, steps: int = 1
    ) -> None:
        """Records steps with an accountant, or a Composition."""
        parameters = self.parameters(records)
        if not self.name:
            rate = parameters["sample_rate"]
            return _account_poisson(accountant, noise_multiplier, rate, steps)
        accountant.compose(
            self.name,
            participations=steps,
            noise_multiplier=noise_multiplier,
            **parameters,
        )

    def hook(self, accountant: IAccountant, records: int) -> Callable[[Any], None]:
        """Returns the step hook of the optimizer, which records each step."""

        def record(optimizer: Any) -> None:
            self._refuse_accumulated(optimizer)
            noise = optimizer.noise_multiplier
            record_whole(accountant, lambda: self.account(accountant, records, noise))

        return record

    def _refuse_accumulated(self, optimizer: Any) -> None:
        if optimizer.accumulated_iterations != 1:
            raise Refused(
                f"{optimizer.accumulated_iterations} batches were accumulated to "
                f"one step, which are not one draw of {type(self).__name__}.",
                parameter="sampling",
                remedy="Call optimizer.step() and zero_grad() after each batch, "
                "and split large ones by opacus.utils.batch_memory_manager."
                "BatchMemoryManager.",
            )

    def describe(self, records: int) -> Dict[str, Any]:
        """Returns plain numbers and names for the privacy statement."""
        return {
            "scheme": self.name or "poisson",
            "expected_batch_size": self.divisor(records),
            **self.parameters(records),
        }

    def loader(
        self,
        stock: DataLoader,
        *,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        distributed: bool = False,
    ) -> DataLoader:
        """
        Returns a loader that draws this way, like ``stock`` in all else. Empty batches
        are those of Opacus's ``DPDataLoader``; ``distributed`` gives each process its
        share of the batch.
        """
        from opacus.data_loader import dtype_safe, shape_safe, wrap_collate_with_empty

        from opacus_ext.data.draws import Draws, count_records, loader_like

        records, fields = count_records(stock.dataset), list(stock.dataset[0])
        draws = Draws(self, records, stock.generator, distributed)
        draws.ahead = stock.num_workers * (stock.prefetch_factor or 2)
        collate = wrap_collate_with_empty(
            collate_fn=stock.collate_fn,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            sample_empty_shapes=[(0, *shape_safe(x)) for x in fields],
            dtypes=[dtype_safe(x) for x in fields],
        )
        return loader_like(stock, stock.dataset, draws, collate, stock.generator)


def _account_poisson(
    accountant: Any, noise_multiplier: float, rate: float, steps: int
) -> None:
    if steps == 1:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
    else:
        accountant.history.append((noise_multiplier, rate, steps))


def _keys(records: int, generator: Any) -> torch.Tensor:
    """
    Returns a random number for each record: floats in [0, 1) of 53 bits (of 24, a rate
    of 1e-6 were wrong by a percent); from a ``SecureSource`` integers below 2^63.
    """
    import torch

    from opacus_ext.secure import SecureSource

    if isinstance(generator, SecureSource):
        return generator.integers(records)
    return torch.rand(records, generator=generator, dtype=torch.float64)


def _below(keys: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns the places of keys below the rate; the rate of integers rounds down."""
    if keys.is_floating_point():
        return (keys < rate).nonzero()[:, 0]
    return (keys <= int(rate * 2**63) - 1).nonzero()[:, 0]  # 2^63 is out of range


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """
    Each record is drawn with the same probability, independently of others.

    Opacus's own sampling is this at rates 1 / k, where the loader has k batches. Every
    accountant knows it.

    Args:
        expected_batch_size: records of a batch on average, any number up to all; it
            divides the sum of clipped gradients
        sample_rate: instead, the probability that a record is drawn
        steps: length of an epoch; by default one over the sampling rate, rounded
    """

    expected_batch_size: Optional[float] = None
    sample_rate: Optional[float] = None

    def rate(self, records: int) -> float:
        if self.sample_rate is not None:
            return self.sample_rate
        assert self.expected_batch_size is not None
        return self.expected_batch_size / records

    def check(self, records: int, accountant: IAccountant) -> None:
        if (self.expected_batch_size is None) == (self.sample_rate is None):
            raise Refused(
                f"{type(self).__name__} takes either expected_batch_size or "
                f"sample_rate; got {self.expected_batch_size} and {self.sample_rate}.",
                parameter="expected_batch_size",
                remedy="Give one of the two.",
            )
        if not 0 < self.rate(records) <= 1:
            raise Refused(
                f"{self} would draw each of {records} records with probability "
                f"{self.rate(records):g}.",
                parameter="expected_batch_size",
                remedy=f"Give an expected batch size above 0, at most {records}.",
            )
        super().check(records, accountant)

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        return _below(_keys(records, generator), self.rate(records))


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
    """

    bands: int

    def check(self, records: int, accountant: IAccountant) -> None:
        given = {k: v for k, v in vars(self).items() if k != "bands"}
        Poisson(**given).check(records, accountant)
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
        super().check(records, accountant)

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        import torch

        part = torch.arange(step % self.bands, records, self.bands)
        keys = _keys(len(part), generator)
        return part[_below(keys, self.bands * self.rate(records))]

    def account(
        self, accountant: Any, records: int, noise_multiplier: float, steps: int = 1
    ) -> None:
        rate, rounds = self.bands * self.rate(records), -(-steps // self.bands)
        _account_poisson(accountant, noise_multiplier, rate, rounds)

    def hook(self, accountant: IAccountant, records: int) -> Callable[[Any], None]:
        record = super().hook(accountant, records)

        def record_first(optimizer: Any) -> None:
            self._refuse_accumulated(optimizer)
            noise = getattr(optimizer, "correlated", None)
            if noise is None or noise.bands > self.bands:
                raise Refused(
                    f"The batches are drawn for noise of {self.bands} bands.",
                    parameter="sampling",
                    remedy="Pass make_private(noise=...), which draws them so.",
                )
            # A step that failed after its noise was drawn has begun a round, too.
            begun = -(-noise.taken // self.bands)
            if begun > noise.counted:
                record(optimizer)
                noise.counted = begun

        return record_first

    def describe(self, records: int) -> Dict[str, Any]:
        return {**super().describe(records), "scheme": "cyclic_poisson"}


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Poisson):
    """
    Poisson sampling with a greatest batch size: a larger draw is cut to a random subset
    of ``max_batch_size`` records, so that memory is bounded.

    Six standard deviations above the expected batch size cost nothing that can be seen,
    and no room at all costs twice the noise
    (:mod:`opacus_ext.accountants.truncation`). The accountant must be "prv_bounds".
    """

    max_batch_size: int

    name = "truncated_poisson"

    def check(self, records: int, accountant: IAccountant) -> None:
        super().check(records, accountant)
        mean, most = self.divisor(records), self.max_batch_size
        if most != int(most) or most < mean:
            raise Refused(
                f"max_batch_size={most} is below the expected batch size, {mean:g}, or "
                "no whole number: most draws would be cut.",
                parameter="max_batch_size",
                remedy=f"Give at least {int(mean + 6 * max(mean, 1) ** 0.5) + 1}, six "
                "standard deviations above it.",
            )

    def parameters(self, records: int) -> Dict[str, Any]:
        sizes = {"records": records, "max_batch_size": self.max_batch_size}
        return {**super().parameters(records), **sizes}

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        keys = _keys(records, generator)
        drawn = _below(keys, self.rate(records))
        if len(drawn) <= self.max_batch_size:
            return drawn
        # Each record drawn is as likely as others to have one of the smallest keys.
        least = keys[drawn].topk(self.max_batch_size, largest=False).indices
        return drawn[least].sort().values


@dataclass(frozen=True, kw_only=True)
class FixedSize(Sampling):
    """
    Every batch has the same size, and each set of so many records is equally likely.

    Neighbors are data sets of the same size in which one record is another one, so that
    the sum of clipped gradients moves by up to twice ``max_grad_norm``. At the same
    noise epsilon is more than twice that of Poisson sampling
    (:func:`opacus_ext.accountants.profiles.exchanged`). The accountant must be
    "prv_bounds".
    """

    batch_size: int

    name = "fixed_size"

    def rate(self, records: int) -> float:
        return self.batch_size / records

    def check(self, records: int, accountant: IAccountant) -> None:
        size = self.batch_size
        if size != int(size) or not 1 <= size <= records:
            raise Refused(
                f"batch_size={size} can't be drawn from {records} records.",
                parameter="batch_size",
                remedy=f"Give a whole number from 1 to {records}.",
            )
        super().check(records, accountant)

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        keys = _keys(records, generator)
        return keys.topk(self.batch_size, largest=False).indices.sort().values
