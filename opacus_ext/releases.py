"""
Statistics of a user-level data set, released once with noise: how popular items are,
and which item follows which.

Each release is one Gaussian mechanism, recorded in the accountant that the training
continues with. Neighboring data sets differ by one user with all actions. What is
computed from a release is post-processing and costs nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from opacus.accountants.accountant import IAccountant
from torch import Tensor

from opacus_ext.accountants.profiles import gaussian_sensitivity
from opacus_ext.refused import Refused
from opacus_ext.secure import SecureSource, with_noise

Generator = Union[None, torch.Generator, SecureSource]
_PAIRS = 2**22  # about the number of pairs that are counted at once


@dataclass(frozen=True)
class _Release:
    """
    A statistic with noise.

    Attributes:
        counts: with noise of std ``noise_multiplier`` in each entry, float64
        noise_multiplier: the std of the noise over the sensitivity, which is 1
    """

    counts: Tensor
    noise_multiplier: float

    def state_dict(self) -> Dict[str, Any]:
        """The fields as a dict, for :meth:`from_state_dict`."""
        return dict(vars(self))

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Any:
        """The release with this ``state_dict()``."""
        return cls(**state)


@dataclass(frozen=True)
class Popularity(_Release):
    """
    The popularity of items, see :func:`release_popularity`.

    Attributes:
        counts: ``[num_items + 1]``; entry 0, padding, is zero
    """

    @property
    def shares(self) -> Tensor:
        """
        ``[num_items + 1]``, float32, with sum 1; padding has none. Counts below the std
        of the noise count as that.
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
class Transitions(_Release):
    """
    The items that follow each item, see :func:`release_transitions`.

    Attributes:
        counts: ``[M, M]``; entry ``[a, b]`` is about ``items[b]`` after ``items[a]``
        items: ``[M]``, the ids of the items that take part
        weights: ``[M]``, of the items
        back: the part of a pair that was counted in the other direction
    """

    items: Tensor
    weights: Tensor
    back: float

    @property
    def unweighted(self) -> Tensor:
        """
        ``[M, M]``, ``counts`` without weights, and forward pairs only: unbiased, with
        more noise where weights are small.
        """
        forward = (self.counts - self.back * self.counts.T) / (1 - self.back**2)
        return forward / torch.outer(self.weights, self.weights)


def noise_for(epsilon: float, delta: float, share: float = 1.0) -> float:
    """
    The noise multiplier of a release that takes a share of a budget.

    Shares are of the square of mu, which adds up over Gaussian mechanisms: mu is one
    over the noise multiplier (Dong, Roth and Su 2019, corollary 3.3; Balle and Wang
    2018, theorem 8). Releases whose shares sum to 1 spend the budget exactly by
    "prv_bounds". Opacus's accountants bound it less closely ("prv" 8.01 of 8, "rdp"
    8.6): take shares that sum to less there.

    Args:
        epsilon, delta: of the whole budget
        share: above 0 and up to 1

    Raises:
        Refused: for numbers out of range

    Example:
        >>> f"{noise_for(5.0, 1e-5):.3f} {noise_for(5.0, 1e-5, share=0.0225):.3f}"
        '0.892 5.946'
    """
    if not 0 < epsilon < math.inf or not 0 < delta < 1 or not 0 < share <= 1:
        raise Refused(
            f"epsilon={epsilon}, delta={delta}, share={share}.",
            parameter="share",
            remedy="Pass a positive, finite epsilon, a delta between 0 and 1, and a "
            "share above 0, up to 1.",
        )
    # A little below: what an accountant adds for its own rounding stays within.
    mu = float(gaussian_sensitivity(epsilon * (1 - 1e-8), math.log(delta)))
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
    Counts how often items occur, with the same weight for each user.

    A user's vector holds how often the user had each item, divided by its L2 norm; the
    release is the sum over users plus noise. Sensitivity: one user more or less adds or
    removes one vector of norm 1 (or 0, for an empty history), so it is 1, and noise of
    std ``noise_multiplier`` is a Gaussian mechanism with that multiplier. It is
    recorded as one step with sample rate 1.

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
    _check(histories, num_items, noise_multiplier)
    total = torch.zeros(num_items + 1, dtype=torch.float64)
    for users, ids in _chunks(histories, _PAIRS):
        users, ids = users[ids > 0], ids[ids > 0]
        _add_normalized(total, users, ids, torch.ones(len(ids), dtype=torch.float64))
    counts = _with_noise(total, noise_multiplier, accountant, generator)
    counts[0] = 0
    return Popularity(counts, noise_multiplier)


def release_transitions(
    histories: Sequence[Tensor],
    items: Tensor,
    *,
    noise_multiplier: float,
    accountant: IAccountant,
    window: int = 20,
    decay: float = 0.75,
    back: float = 0.2,
    weights: Optional[Tensor] = None,
    generator: Generator = None,
) -> Transitions:
    """
    Counts how often item b comes after item a, with the same weight for each user.

    A user's matrix has, for every two actions at most ``window`` apart and both of
    ``items``, ``distance ** -decay`` added at (earlier, later), and ``back`` times as
    much at (later, earlier), each times the weights of both items. It is then divided
    by its Frobenius norm; the release is the sum over users plus noise. Sensitivity:
    one user more or less adds or removes one matrix of norm 1 (or 0, without such
    pairs), so it is 1, as in :func:`release_popularity`, and so is what is recorded.

    All entries have the same noise: ``weights=popularity.relative(-0.25)`` gives rare
    items more of the norm. :attr:`Transitions.unweighted` undoes ``weights`` and
    ``back``. The defaults did best on MovieLens-1M (docs/how-to/releases.md).

    Args:
        histories: the item ids ``[T]`` of each user, from 1, in the order of time;
            zeros are padding and keep their place
        items: ``[M]``, the ids that take part; public or from a release
        noise_multiplier, accountant, generator: as in :func:`release_popularity`
        window: the largest distance of two actions
        decay: how fast pairs count less with their distance
        back: from 0 to below 1; near 1, the direction is lost
        weights: ``[num_items + 1]``, positive; public or from a release. By default 1

    Raises:
        Refused: as :func:`release_popularity`, for items given twice, and for weights
            that are not positive, not one for each item, or out of float64's range
    """
    size = len(items)
    largest = max(map(_largest, [items, *histories]))
    _check(histories, largest, noise_multiplier)
    chosen = _check_pairs(items, window, decay, back, weights)
    place = torch.full((largest + 1,), -1)
    place[items] = torch.arange(size)
    total = torch.zeros(size * size, dtype=torch.float64)
    for users, ids in _chunks(histories, max(_PAIRS // window, 1)):
        at = place[ids]
        found: List[Tuple[Tensor, Tensor, Tensor]] = []
        for lag in range(1, min(window, len(ids) - 1) + 1):
            a, b = at[:-lag], at[lag:]
            pairs = (users[:-lag] == users[lag:]) & (a >= 0) & (b >= 0)
            a, b, owners = a[pairs], b[pairs], users[lag:][pairs]
            weight = chosen[a] * chosen[b] * lag**-decay
            found.append((owners, a * size + b, weight))
            if back:
                found.append((owners, b * size + a, back * weight))
        if found:
            _add_normalized(total, *(torch.cat(each) for each in zip(*found)))
    total = total.view(size, size)
    counts = _with_noise(total, noise_multiplier, accountant, generator)
    return Transitions(counts, noise_multiplier, items, chosen, back)


def _check_pairs(
    items: Tensor, window: int, decay: float, back: float, weights: Optional[Tensor]
) -> Tensor:
    """The weights ``[M]`` of the items; refuses arguments that can't be."""
    different = items.dim() == 1 and len(items.unique()) == len(items) > 0
    if not different or int(items.min()) < 1 or window < 1:
        raise Refused(
            f"items={items.tolist()} with window={window}.",
            parameter="items",
            remedy="Give each id once, from 1 on, [M], and a positive window.",
        )
    if not 0 <= back < 1 or not math.isfinite(decay):
        raise Refused(
            f"back={back}, decay={decay}.",
            parameter="back",
            remedy="Pass back from 0 to below 1, and a finite decay.",
        )
    if weights is None:
        weights = torch.ones(int(items.max()) + 1, dtype=torch.float64)
    fits = weights.dim() == 1 and len(weights) > int(items.max())
    if fits:
        chosen = weights[items].double()
        lags = torch.tensor([1.0, window], dtype=torch.float64) ** -decay
        least, most = chosen.min() ** 2 * lags.min(), chosen.max() ** 2 * lags.max()
        # Squares in float64 end at 1e-308.
        fits = bool((chosen > 0).all()) and bool(1e-100 < least <= most < 1e100)
    if not fits:
        raise Refused(
            f"weights of shape {[*weights.shape]} do not fit, with decay={decay}.",
            parameter="weights",
            remedy="Pass one positive, finite weight for each item, [num_items + 1], "
            "nearer to 1, or a decay nearer to 0.",
        )
    return chosen


def _largest(ids: Tensor) -> int:
    return int(ids.max()) if len(ids) else 0


def _check(histories: Sequence[Tensor], num_items: int, noise: float) -> None:
    if not 0 < noise < math.inf:
        raise Refused(
            f"noise_multiplier={noise} is not a positive number.",
            parameter="noise_multiplier",
            remedy="opacus_ext.releases.noise_for(epsilon, delta, share) computes one.",
        )
    for user, ids in enumerate(histories):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= num_items:
            raise Refused(
                f"User {user} has ids from {int(ids.min())} to {int(ids.max())}, and "
                f"num_items is {num_items}.",
                parameter="histories",
                remedy="Number the items from 1 to num_items; 0 is padding.",
            )


def _chunks(
    histories: Sequence[Tensor], actions: int
) -> Iterator[Tuple[Tensor, Tensor]]:
    """The users and item ids ``[N]`` of about so many actions, of whole users."""
    users: List[Tensor] = []
    ids: List[Tensor] = []
    size = 0
    for user, history in enumerate(histories):
        ids.append(torch.as_tensor(history).long())
        users.append(torch.full((len(history),), user))
        size += len(history)
        if size >= actions or user == len(histories) - 1:
            yield torch.cat(users), torch.cat(ids)
            users, ids, size = [], [], 0


def _add_normalized(
    total: Tensor, users: Tensor, keys: Tensor, weights: Tensor
) -> None:
    """Adds each user's vector, with the weights at the keys, divided by its norm."""
    if not len(keys):
        return
    users, which = users.unique(return_inverse=True)
    pairs, slot = (which * total.numel() + keys).unique(return_inverse=True)
    sums = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, slot, weights)
    owner, key = pairs // total.numel(), pairs % total.numel()
    squares = torch.zeros(len(users), dtype=torch.float64)
    squares.index_add_(0, owner, sums**2)
    total.index_add_(0, key, sums / squares.sqrt()[owner])


def _with_noise(
    total: Tensor, noise: float, accountant: IAccountant, generator: Generator
) -> Tensor:
    """Records the release, then draws: a release that fails has been paid for."""
    before = list(accountant.history)
    try:
        accountant.step(noise_multiplier=noise, sample_rate=1.0)
    except ValueError:
        accountant.history = before  # "gdp" drops a run's cost when it refuses
        raise
    return with_noise(total, noise, 1.0, generator)
