"""
Statistics of a user-level data set, released once with noise: how popular items are,
and which item follows which.

Each release is one Gaussian mechanism, recorded in the accountant that the training
continues with. Neighboring data sets differ by one user with all actions. A user adds
one vector of norm 1 (or 0, where nothing is counted), so the sensitivity is 1, and
noise of std ``noise_multiplier`` is a Gaussian mechanism with that multiplier: one step
with sample rate 1. What is computed from a release is post-processing and costs nothing
more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, List, Optional, Sequence, Tuple, Union

import torch
from opacus.accountants.accountant import IAccountant
from torch import Tensor

from opacus_ext.accountants.profiles import gaussian_sensitivity
from opacus_ext.accountants.whole import record_whole
from opacus_ext.refused import Refused, check_number
from opacus_ext.secure import SecureSource, with_noise

__all__ = [
    "Popularity",
    "Transitions",
    "noise_for",
    "release_popularity",
    "release_transitions",
]

Generator = Union[None, torch.Generator, SecureSource]

# Of release_transitions: the best on MovieLens-1M (docs/how-to/releases.md).
WINDOW = 20  # the largest distance of two actions
DECAY = 0.75  # how fast pairs count less with their distance
BACK = 0.2  # the part of a pair that is counted in the other direction


@dataclass(frozen=True)
class Popularity:
    """
    The popularity of items, see :func:`release_popularity`. ``vars()`` of it can be
    saved, and ``Popularity(**saved)`` is it again.

    Attributes:
        counts: ``[num_items + 1]``, with noise, float64; entry 0, padding, is zero
        noise_multiplier: the std of the noise in each entry
    """

    counts: Tensor
    noise_multiplier: float

    @property
    def shares(self) -> Tensor:
        """
        ``[num_items + 1]``, float32, with sum 1; the share of padding is 0. Counts
        below the std of the noise are raised to it.
        """
        counts = self.counts.clamp(min=self.noise_multiplier)
        counts[0] = 0
        return (counts / counts.sum()).float()

    def relative(self, power: float) -> Tensor:
        """
        ``[num_items + 1]``, ``(p_i / mean(p) + 1)^power`` of the shares p: weights that
        favor rare items if the power is negative.
        """
        shares = self.shares
        return (shares / shares[1:].mean() + 1) ** power

    def top(self, size: int) -> Tensor:
        """
        ``[size]``, the ids of the most popular items in descending order.

        Raises:
            Refused: if there are fewer items
        """
        if not 1 <= size < len(self.counts):
            raise Refused(
                f"size={size} of {len(self.counts) - 1} items.",
                parameter="size",
                remedy="Pass a number from 1 to the number of items.",
            )
        return 1 + self.counts[1:].argsort(descending=True, stable=True)[:size]

    def above(self, count: float) -> Tensor:
        """The ids of the items with at least this count, or of the first item alone."""
        return self.top(max(int((self.counts[1:] >= count).sum()), 1))


@dataclass(frozen=True)
class Transitions:
    """
    The items that follow each item, see :func:`release_transitions`.

    Attributes:
        counts: ``[M, M]``, with noise, float64; entry ``[a, b]`` is about ``items[b]``
            after ``items[a]``
        noise_multiplier: the std of the noise in each entry
        items: ``[M]``, the ids of the items that take part
        weights: ``[M]``, of the items
    """

    counts: Tensor
    noise_multiplier: float
    items: Tensor
    weights: Tensor

    @property
    def unweighted(self) -> Tensor:
        """
        ``[M, M]``, ``counts`` without weights, and forward pairs only: unbiased, with
        more noise where weights are small.
        """
        forward = (self.counts - BACK * self.counts.T) / (1 - BACK**2)
        return forward / torch.outer(self.weights, self.weights)


def noise_for(epsilon: float, delta: float, share: float = 1.0) -> float:
    """
    The noise multiplier of a release that takes a share of a budget.

    Shares are of the square of mu, which adds up over Gaussian mechanisms: mu is one
    over the noise multiplier (Dong, Roth and Su 2019, corollary 3.3; Balle and Wang
    2018, theorem 8). Releases whose shares sum to 1 spend the budget exactly by
    "prv_bounds" and "prv". "rdp" bounds it less closely (8.6 of 8): take shares that
    sum to less there.

    Args:
        epsilon, delta: of the whole budget
        share: above 0 and up to 1

    Raises:
        Refused: for numbers out of range

    Example:
        >>> f"{noise_for(5.0, 1e-5):.3f} {noise_for(5.0, 1e-5, share=0.0225):.3f}"
        '0.892 5.946'
    """
    check_number("epsilon", epsilon)
    check_number("delta", delta, below=1)
    check_number("share", share)
    if share > 1:
        raise Refused(
            f"share={share} is more than the whole budget.",
            parameter="share",
            remedy="Pass a share above 0, up to 1.",
        )
    # A little below: what an accountant adds for its own rounding stays within.
    mu = gaussian_sensitivity(epsilon * (1 - 1e-8), math.log(delta))
    return 1 / (mu * math.sqrt(share))


def release_popularity(
    histories: Sequence[Tensor],
    num_items: int,
    *,
    noise_multiplier: float,
    accountant: IAccountant,
    generator: Generator = None,
) -> Popularity:
    """
    Counts how often items occur, with the same weight for each user: a user's vector
    holds how often the user had each item, divided by its L2 norm.

    Args:
        histories: the item ids ``[T]`` of each user, from 1; zeros are padding
        num_items: the largest id
        noise_multiplier: std of the noise, see :func:`noise_for`
        accountant: of the engine that trains afterwards; RDP, PRV or PRV bounds
        generator: of the noise; ``opacus_ext.secure.SecureSource()`` draws noise that
            is safe from attacks on floating-point numbers

    Raises:
        Refused: for ids out of range, or noise that is not positive; nothing has been
            recorded then

    Example:
        >>> from opacus.accountants import RDPAccountant
        >>> accountant = RDPAccountant()
        >>> popularity = release_popularity(
        ...     [torch.tensor([1, 2, 3]), torch.tensor([2])], 4,
        ...     noise_multiplier=0.01, accountant=accountant,
        ... )
        >>> popularity.top(1), accountant.history
        (tensor([2]), [(0.01, 1.0, 1)])
    """
    histories = _checked(histories, noise_multiplier, num_items)
    items = (ids[ids > 0] for ids in histories)
    vectors = ((keys, torch.ones(len(keys), dtype=torch.float64)) for keys in items)
    counts = _released(vectors, num_items + 1, noise_multiplier, accountant, generator)
    counts[0] = 0
    return Popularity(counts, noise_multiplier)


def release_transitions(
    histories: Sequence[Tensor],
    items: Tensor,
    *,
    noise_multiplier: float,
    accountant: IAccountant,
    weights: Optional[Tensor] = None,
    generator: Generator = None,
) -> Transitions:
    """
    Counts how often item b comes after item a, with the same weight for each user.

    A user's matrix has, for every two actions at most ``WINDOW`` apart and both of
    ``items``, ``distance ** -DECAY`` added at (earlier, later), and ``BACK`` times as
    much at (later, earlier), each times the weights of both items. It is then divided
    by its Frobenius norm.

    All entries have the same noise: ``weights=popularity.relative(-0.25)`` gives rare
    items more of the norm. :attr:`Transitions.unweighted` undoes ``weights`` and
    ``BACK``.

    Args:
        histories: the item ids ``[T]`` of each user, from 1, in the order of time;
            zeros are padding, and count as positions between two actions
        items: ``[M]``, the ids that take part; public or from a release
        noise_multiplier, accountant, generator: as in :func:`release_popularity`
        weights: ``[num_items + 1]``, positive; public or from a release. By default 1

    Raises:
        Refused: as :func:`release_popularity`, for items given twice, and for weights
            that are not one for each item, from 1e-20 to 1e20
    """
    histories = _checked(histories, noise_multiplier)
    size = len(items)
    different = items.dim() == 1 and len(items.unique()) == size > 0
    if not different or int(items.min()) < 1:
        raise Refused(
            f"items={items.tolist()}.",
            parameter="items",
            remedy="Give each id once, from 1 on, [M].",
        )
    most = int(items.max())
    if weights is None:
        weights = torch.ones(most + 1, dtype=torch.float64)
    fits = weights.dim() == 1 and len(weights) > most
    chosen = weights[items].double() if fits else weights
    if not (fits and 1e-20 < chosen.min() <= chosen.max() < 1e20):
        raise Refused(
            f"weights of shape {[*weights.shape]} do not fit.",
            parameter="weights",
            remedy="Pass one for each item, [num_items + 1], from 1e-20 to 1e20.",
        )
    place = torch.full((most + 1,), -1)
    place[items] = torch.arange(size)

    def pairs(ids: Tensor) -> Tuple[Tensor, Tensor]:
        """The places in the matrix of a user's pairs, and their weights."""
        at = place[torch.where(ids > most, 0, ids)]
        lag = torch.arange(1, WINDOW + 1).expand(len(ids), -1)
        later = torch.arange(len(ids))[:, None] + lag
        inside = later < len(ids)
        a, b = at[(later - lag)[inside]], at[later[inside]]
        known = (a >= 0) & (b >= 0)
        a, b, lag = a[known], b[known], lag[inside][known]
        weight = chosen[a] * chosen[b] * lag.double() ** -DECAY
        keys = torch.cat([a * size + b, b * size + a])
        return keys, torch.cat([weight, BACK * weight])

    vectors = map(pairs, histories)
    counts = _released(vectors, size**2, noise_multiplier, accountant, generator)
    return Transitions(counts.view(size, size), noise_multiplier, items, chosen)


def _checked(
    histories: Sequence[Tensor], noise: float, num_items: float = math.inf
) -> List[Tensor]:
    if not 0 < noise < math.inf:
        raise Refused(
            f"noise_multiplier={noise} is not a positive number.",
            parameter="noise_multiplier",
            remedy="opacus_ext.releases.noise_for(epsilon, delta, share) computes one.",
        )
    histories = [torch.as_tensor(ids).long() for ids in histories]
    for user, ids in enumerate(histories):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= num_items:
            raise Refused(
                f"User {user} has ids from {int(ids.min())} to {int(ids.max())}, and "
                f"num_items is {num_items}.",
                parameter="histories",
                remedy="Number the items from 1 to num_items; 0 is padding.",
            )
    return histories


def _released(
    vectors: Iterable[Tuple[Tensor, Tensor]],
    size: int,
    noise: float,
    accountant: IAccountant,
    generator: Generator,
) -> Tensor:
    """
    The sum of the users' vectors, each divided by its norm, with noise ``[size]``. A
    vector is given by indices and the values that are added there. The release is
    recorded before the noise is drawn, so that one that fails is counted too.
    """
    total = torch.zeros(size, dtype=torch.float64)
    for keys, values in vectors:
        keys, at = keys.unique(return_inverse=True)
        sums = torch.zeros(len(keys), dtype=torch.float64).index_add_(0, at, values)
        total[keys] += sums / sums.norm()
    record_whole(
        accountant,
        lambda: accountant.step(noise_multiplier=noise, sample_rate=1.0),
    )
    return with_noise(total, noise, 1.0, generator)
