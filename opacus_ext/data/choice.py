"""The choice of how a loader draws its batches, for ``make_private``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional, Tuple, Union

from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader

from opacus_ext.data.allocation import BallsInBins
from opacus_ext.data.draws import count_records
from opacus_ext.data.sampling import (
    CyclicPoisson,
    Poisson,
    Sampling,
    plain_count,
)
from opacus_ext.refused import Refused, check_number, describe
from opacus_ext.strategies import Banded, Strategy


def cyclic(
    sampling: Optional[Sampling], strategy: Strategy, loader: DataLoader
) -> Union[CyclicPoisson, BallsInBins]:
    """
    The sampling that correlated noise needs, of the same expected batch size: from as
    many parts as steps until noise is independent again, so that sampling amplifies
    privacy, or else from one part for each step of an epoch.
    """
    if isinstance(sampling, (CyclicPoisson, BallsInBins)):
        return sampling
    if sampling is None:
        sampling = Poisson(sample_rate=1 / len(loader))
    if type(sampling) is not Poisson:
        raise Refused(
            f"Correlated noise needs CyclicPoisson or BallsInBins, not {sampling}.",
            parameter="sampling",
            remedy="Leave sampling out.",
        )
    records = count_records(loader.dataset)
    parts = min(max(int(1 / sampling.rate(records) + 1e-9), 1), records)
    if isinstance(strategy, Banded):
        parts = strategy.bands
    return CyclicPoisson(bands=parts, **vars(sampling))


def public_sampling(
    sampling: Optional[Sampling], loader: DataLoader, records: int
) -> Sampling:
    """
    Returns Opacus's own sampling, for a public number of records in the place of that
    of the data set.
    """
    check_number("public_records", records, whole=True)
    records = plain_count(records)
    drawn = getattr(getattr(loader, "batch_sampler", None), "sampling", None)
    if sampling is None and drawn is not None and drawn.public_records == records:
        return drawn  # a loader of make_private
    if sampling is not None or loader.batch_size is None:
        what = "sampling" if sampling is not None else "the loader's batch sampler"
        raise Refused(
            f"public_records={records} and {what} both say how batches are drawn.",
            parameter="public_records",
            remedy="Give sampling=opacus_ext.data.Poisson(sample_rate=..., "
            "expected_batch_size=..., steps=...) alone, of public numbers.",
        )
    # A DistributedSampler shares the records out, and each process has such a batch.
    share = -(-records // getattr(loader.sampler, "num_replicas", 1))
    steps = -(-share // loader.batch_size)
    if loader.drop_last:
        steps = max(share // loader.batch_size, 1)
    return Poisson(sample_rate=1 / steps, steps=steps, public_records=records)


def public_batches(records: int, batch_size: int) -> Poisson:
    """Returns batches of a size of the user, from a public number of records."""
    check_number("public_records", records, whole=True)
    records = plain_count(records)
    return Poisson(
        expected_batch_size=min(batch_size, records),
        steps=-(-records // batch_size),
        public_records=records,
    )


def chosen_sampling(
    sampling: Optional[Sampling],
    loader: DataLoader,
    public_records: Optional[int],
    expected_batch_size: Optional[float],
) -> Optional[Sampling]:
    """Returns the sampling that arguments of ``make_private`` choose, if they do."""
    if expected_batch_size is not None:
        check_number("expected_batch_size", expected_batch_size)
    if public_records is not None:
        sampling = public_sampling(sampling, loader, public_records)
    elif expected_batch_size is not None and isinstance(sampling, Sampling):
        if sampling.expected_batch_size is not None:
            raise Refused(
                f"expected_batch_size={expected_batch_size} divides the sum of "
                f"gradients, and so does that of {sampling}.",
                parameter="expected_batch_size",
                remedy="Leave it out here, where batch sizes are given otherwise.",
            )
    if expected_batch_size is None or not isinstance(sampling, Sampling):
        return sampling
    return replace(sampling, expected_batch_size=expected_batch_size)


def stock_sampling(loader: DataLoader) -> Poisson:
    """Opacus's own sampling, by a loader that draws from any generator."""
    sampling = Poisson(sample_rate=1 / len(loader))
    if getattr(loader.batch_sampler, "sampling", None) != sampling:
        check_drawn(loader)
    return sampling


def check_drawn(data_loader: Any, poisson_sampling: bool = True) -> None:
    """Refuses a loader that draws by chance in another way than is accounted for."""
    sampler = getattr(data_loader, "batch_sampler", None)
    if not isinstance(sampler, UniformWithReplacementSampler):
        return
    sampling, rate = getattr(sampler, "sampling", None), sampler.sample_rate
    steps = len(sampler)
    if sampling is not None:
        raise Refused(
            f"The loader draws by {sampling}, and would be accounted for as Poisson "
            f"sampling with probability 1/{steps}.",
            parameter="sampling",
            remedy="Give make_private the same sampling=... as before.",
        )
    if not poisson_sampling and rate * steps > 1 + 1e-6:
        raise Refused(
            f"The loader draws with probability {rate:g} in each of {steps} steps, and "
            f"poisson_sampling=False would have it accounted for as 1/{steps}.",
            parameter="sampling",
            remedy="Leave poisson_sampling out, and give "
            f"sampling=opacus_ext.data.Poisson(sample_rate={rate:g}, steps={steps}).",
        )


def loader_of(
    sampling: Sampling,
    place: Optional[Tuple[int, int]],
    stock: DataLoader,
    batch_first: bool,
    rand_on_empty: bool,
) -> DataLoader:
    """Returns the loader that draws by ``sampling``, like another one in all else."""
    sampling.check(count_records(stock.dataset))
    sampler = getattr(stock, "batch_sampler", None)
    if place is None and getattr(sampler, "sampling", None) == sampling:
        return stock
    return sampling.loader(
        stock, batch_first=batch_first, rand_on_empty=rand_on_empty, place=place
    )


def check_sampling(sampling: Any, poisson_sampling: bool) -> None:
    """Refuses what does not draw the batches of this model."""
    if not isinstance(sampling, Sampling):
        raise Refused(
            f"sampling must say how batches are drawn, got {describe(sampling)}.",
            parameter="sampling",
            remedy="Leave it out for Poisson sampling with the loader's batch size, or "
            "give opacus_ext.data.Poisson(expected_batch_size=...).",
        )
    if not poisson_sampling:
        raise Refused(
            f"poisson_sampling=False leaves the loader as it is, and {sampling} "
            "replaces it.",
            parameter="poisson_sampling",
            remedy="Leave one of them out.",
        )
