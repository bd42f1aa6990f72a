"""The choice of how a loader draws its batches, for ``make_private``."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader

from opacus_ext.data.draws import count_records
from opacus_ext.data.sampling import CyclicPoisson, Poisson, Sampling
from opacus_ext.refused import Refused, describe


def cyclic(
    sampling: Optional[Sampling], bands: int, loader: DataLoader
) -> CyclicPoisson:
    """The sampling that correlated noise needs, of the same expected batch size."""
    if sampling is None:
        return CyclicPoisson(bands=bands, sample_rate=1 / len(loader))
    if type(sampling) is Poisson:
        return CyclicPoisson(bands=bands, **vars(sampling))
    if not isinstance(sampling, CyclicPoisson) or sampling.bands != bands:
        raise Refused(
            f"Noise of {bands} bands needs CyclicPoisson of as many parts, not "
            f"{sampling}.",
            parameter="sampling",
            remedy="Leave sampling out.",
        )
    return sampling


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
