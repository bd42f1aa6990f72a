"""
How a step draws its batch: ``make_private(..., sampling=...)``.

Opacus draws every record with probability 1 / k, k being the batches of the loader.
These are the others that are accounted for: Poisson sampling at any rate, the same with
a greatest batch size, and batches of one size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Union

from opacus_ext.refused import Refused

# A plan only names a way to draw, and is made without torch: it takes seconds to load.
if TYPE_CHECKING:
    import torch
    from opacus.accountants.accountant import IAccountant
    from opacus.optimizers import DPOptimizer
    from torch.utils.data import DataLoader, Dataset

    from opacus_ext.accountants.composition import Composition


@dataclass(frozen=True, kw_only=True)
class Sampling(ABC):
    """
    A way to draw batches.

    Args:
        steps: of an epoch, the length of the loader; by default the whole number next
            to one over the sampling rate
    """

    steps: Optional[int] = None

    #: What the entries of an accountant call it.
    name = ""
    #: What neighboring data sets differ by.
    neighbors = "add or remove one"

    @abstractmethod
    def rate(self, records: int) -> float:
        """The probability that a record is drawn, of so many."""

    @abstractmethod
    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        """
        The numbers of the records of one batch, ascending, ``[B]``; ``step`` counts the
        batches of the run.
        """

    def parameters(self, records: int) -> Dict[str, Any]:
        """What the accountant needs to know beside the noise."""
        return {"sample_rate": self.rate(records)}

    def steps_per_epoch(self, records: int) -> int:
        """The length of the loader."""
        return self.steps or max(round(1 / self.rate(records)), 1)

    def divisor(self, records: int) -> float:
        """
        What the sum of clipped gradients is divided by: ``q n``, also where batches are
        cut, since a divisor that depends on the draw would not be private.
        """
        size = self.rate(records) * records
        return round(size) if abs(size - round(size)) < 1e-9 * size else size

    def check(self, records: int, accountant: IAccountant) -> None:
        """
        Args:
            records: of the data set
            accountant: of the engine; it is not changed

        Raises:
            Refused: for steps or sizes that can't be, and an accountant that does not
                know this way to draw
        """
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
        # On a copy: what it refuses to compose is refused before anything is done.
        trial = type(accountant)()
        trial.load_state_dict(accountant.state_dict())
        self.account(trial, records, noise_multiplier=1.0)

    def account(
        self,
        accountant: Union[IAccountant, Composition],
        records: int,
        noise_multiplier: float,
        steps: int = 1,
    ) -> None:
        """Records steps with an accountant."""
        parameters = self.parameters(records)
        if self.name:
            accountant.compose(  # type: ignore[attr-defined]
                self.name,
                participations=steps,
                noise_multiplier=noise_multiplier,
                **parameters,
            )
            return
        rate = parameters["sample_rate"]
        if steps == 1:
            accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
        else:
            accountant.history.append((noise_multiplier, rate, steps))

    def hook(
        self, accountant: IAccountant, records: int
    ) -> Callable[[DPOptimizer], None]:
        """What the optimizer calls at each step, to record it."""
        from opacus_ext.accountants.whole import record_whole

        def record(optimizer: DPOptimizer) -> None:
            self._refuse_accumulated(optimizer)
            noise = optimizer.noise_multiplier
            record_whole(accountant, lambda: self.account(accountant, records, noise))

        return record

    def _refuse_accumulated(self, optimizer: DPOptimizer) -> None:
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
        """For the privacy statement: plain numbers and names."""
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
        A loader that draws this way; all but the batches is that of another one.

        Args:
            stock: its data set, collator, workers, generator and so on are taken
            batch_first: of an empty batch, as in Opacus's ``DPDataLoader``
            rand_on_empty: see there
            distributed: whether it gives each process its share of the batch

        Raises:
            Refused: for a data set whose records have no numbers
        """
        from opacus.data_loader import dtype_safe, shape_safe, wrap_collate_with_empty
        from torch.utils.data import DataLoader

        from opacus_ext.data.draws import Draws

        dataset = stock.dataset
        records = count_records(dataset)
        fields = list(dataset[0])
        draws = Draws(self, records, stock.generator, distributed)
        draws.ahead = stock.num_workers * (stock.prefetch_factor or 2)
        return DataLoader(
            dataset,
            batch_sampler=draws,
            collate_fn=wrap_collate_with_empty(
                collate_fn=stock.collate_fn,
                batch_first=batch_first,
                rand_on_empty=rand_on_empty,
                sample_empty_shapes=[(0, *shape_safe(x)) for x in fields],
                dtypes=[dtype_safe(x) for x in fields],
            ),
            num_workers=stock.num_workers,
            pin_memory=stock.pin_memory,
            timeout=stock.timeout,
            worker_init_fn=stock.worker_init_fn,
            multiprocessing_context=stock.multiprocessing_context,
            generator=stock.generator,
            prefetch_factor=stock.prefetch_factor,
            persistent_workers=stock.persistent_workers,
        )


def count_records(dataset: Dataset) -> int:
    """
    Raises:
        Refused: for a data set whose records have no numbers
    """
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        raise Refused(
            "The data set is an IterableDataset: its records can't be drawn.",
            parameter="data_loader",
            remedy="Use a data set with __getitem__ and __len__.",
        )
    return len(dataset)  # type: ignore[arg-type]


def _keys(records: int, generator: Any) -> torch.Tensor:
    """
    From 0 to below 1, of 53 bits: by those of float32 a rate of 1e-6 would be wrong by
    a percent. Of a ``SecureSource`` whole numbers below 2^63.
    """
    import torch

    from opacus_ext.secure import SecureSource

    if isinstance(generator, SecureSource):
        return generator.integers(records)
    return torch.rand(records, generator=generator, dtype=torch.float64)


def _below(keys: torch.Tensor, rate: float) -> torch.Tensor:
    """The places of the keys that are drawn; of whole ones never more than the rate."""
    if keys.is_floating_point():
        return (keys < rate).nonzero()[:, 0]
    return (keys <= int(rate * 2**63) - 1).nonzero()[:, 0]  # 2^63 is out of range


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """
    Each record is drawn with the same probability, independently of others.

    Opacus's own is this at rates 1 / k: of a million records it draws all or a half
    and nothing between. Every accountant knows it.

    Args:
        expected_batch_size: records of a batch on average, any number up to all
        sample_rate: instead of it, the probability of a record to be drawn
        steps: see :class:`Sampling`

    Example:
        >>> sampling = Poisson(expected_batch_size=2.5)
        >>> sampling.rate(10), sampling.steps_per_epoch(10)
        (0.25, 4)
        >>> Poisson(sample_rate=0.3, steps=7).divisor(10)
        3
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
    Poisson sampling from one part of the data set after the other.

    Record i belongs to part ``i mod b``. Steps draw from the parts in turn, each record
    of a part with b times the rate, so that no record takes part twice in b steps:
    what correlated noise of b bands is accounted for ("(Amplified) Banded Matrix
    Factorization", Choquette-Choo et al. 2023, theorem 4). Whatever b steps in a row
    say about a record is one sampled Gaussian mechanism of b times the rate, and that
    is what is recorded, at the first of them.

    To remove a record means here that its gradients are left out and all others stay
    in their parts. A data set without it, numbered anew, has other parts.

    Each batch of the loader must be one step. ``make_private(noise=...)`` makes one.

    Args:
        bands: b, the number of parts
        expected_batch_size: records of a batch on average
        sample_rate: instead of it, its share of the records, at most 1 / b
        steps: see :class:`Sampling`

    Example:
        >>> sampling = CyclicPoisson(bands=2, expected_batch_size=5)
        >>> [sampling.draw(10, None, step).tolist() for step in range(2)]
        [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
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
        self,
        accountant: Union[IAccountant, Composition],
        records: int,
        noise_multiplier: float,
        steps: int = 1,
    ) -> None:
        rounds = -(-steps // self.bands)
        rate = self.bands * self.rate(records)
        if rounds == 1:
            accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
        else:
            accountant.history.append((noise_multiplier, rate, rounds))

    def hook(
        self, accountant: IAccountant, records: int
    ) -> Callable[[DPOptimizer], None]:
        record = super().hook(accountant, records)

        def record_first(optimizer: DPOptimizer) -> None:
            self._refuse_accumulated(optimizer)
            noise = getattr(optimizer, "correlated", None)
            if noise is None or noise.bands > self.bands:
                raise Refused(
                    f"The batches are drawn for noise of {self.bands} bands.",
                    parameter="sampling",
                    remedy="Pass make_private(noise=...), which draws them so.",
                )
            # The hook comes after the noise of the step; one that failed had it, too.
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
    Poisson sampling with a greatest batch size: of a draw of more records a random
    subset of this size is taken, so that memory is bounded.

    The accounting is exact for what cutting does to the sum, which is to exchange a
    record for another where a draw fills the batch
    (:mod:`opacus_ext.accountants.truncation`). Six standard deviations above the
    expected batch size cost nothing that can be seen, none at all twice the noise. The
    accountant must be "prv_bounds".

    Args:
        expected_batch_size: records of a draw on average, before it is cut; the sum of
            clipped gradients is divided by it
        sample_rate: instead of it, the probability of a record to be drawn
        max_batch_size: the most records of a batch
        steps: see :class:`Sampling`

    Example:
        >>> import torch
        >>> from opacus_ext.data.draws import Draws
        >>> sampling = TruncatedPoisson(expected_batch_size=50, max_batch_size=52)
        >>> max(len(batch) for batch in Draws(sampling, 1000, torch.Generator()))
        52
    """

    max_batch_size: int

    name = "truncated_poisson"

    def check(self, records: int, accountant: IAccountant) -> None:
        super().check(records, accountant)
        mean = self.divisor(records)
        if self.max_batch_size != int(self.max_batch_size) or (
            self.max_batch_size < mean
        ):
            raise Refused(
                f"max_batch_size={self.max_batch_size} is below the expected batch "
                f"size, {mean:g}, or no whole number: most draws would be cut.",
                parameter="max_batch_size",
                remedy=f"Give at least {_six_deviations(mean)}, six standard "
                "deviations above it.",
            )

    def parameters(self, records: int) -> Dict[str, Any]:
        return {
            "sample_rate": self.rate(records),
            "records": records,
            "max_batch_size": self.max_batch_size,
        }

    def draw(self, records: int, generator: Any, step: int = 0) -> torch.Tensor:
        keys = _keys(records, generator)
        drawn = _below(keys, self.rate(records))
        if len(drawn) <= self.max_batch_size:
            return drawn
        # Of records drawn, each key is as likely to be among the smallest.
        least = keys[drawn].topk(self.max_batch_size, largest=False).indices
        return drawn[least].sort().values


def _six_deviations(mean: float) -> int:
    return int(mean + 6 * max(mean, 1) ** 0.5) + 1


@dataclass(frozen=True, kw_only=True)
class FixedSize(Sampling):
    """
    Every batch has the same size; each set of so many records is as likely. For
    accelerators with static shapes.

    Neighbors are data sets of the same size in which one record is another one, so
    that the sum of clipped gradients moves by up to twice the bound of clipping. At the
    same noise epsilon is more than twice that of Poisson sampling, which adds or
    removes a record. Its accounting is exact for one step
    (:func:`opacus_ext.accountants.profiles.exchanged`). The accountant must be
    "prv_bounds".

    Args:
        batch_size: records of a batch, at most all
        steps: see :class:`Sampling`

    Example:
        >>> import torch
        >>> FixedSize(batch_size=3).draw(5, torch.Generator().manual_seed(0))
        tensor([1, 2, 4])
    """

    batch_size: int

    name = "fixed_size"
    neighbors = "replace one"

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
