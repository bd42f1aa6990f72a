"""Statistics of a user-level data set, released once with noise.

A private training run learns from many noisy steps what some counts, released once,
say at a small part of the budget: how popular items are, and which item follows which.
Each release is one Gaussian mechanism, recorded in the accountant that the training
goes on with; neighboring data sets differ by one user, added or removed, with all that
the user did. ``noise_for`` gives the noise of a release that may take some share of a
budget, :func:`opacus_ext.accountants.noise_left` the training's for what is left.

What is computed from a release (shares, the most popular items, a model's scores) is
post-processing, and costs nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

import torch
from opacus.accountants.accountant import IAccountant
from torch import Tensor

from opacus_ext.accountants.profiles import gaussian_sensitivity
from opacus_ext.refused import Refused
from opacus_ext.secure import SecureSource, with_noise

_Kind = TypeVar("_Kind", bound="_Release")
_PAIRS = 2**22  # about as many are looked at in one go


@dataclass(frozen=True)
class _Release:
    """
    A statistic with noise.

    Attributes:
        counts: with noise of std ``noise_multiplier`` in each entry, float64
        noise_multiplier: the std of the noise, over the sensitivity, which is 1
    """

    counts: Tensor
    noise_multiplier: float

    def state_dict(self) -> Dict[str, Any]:
        """What ``from_state_dict`` makes it of again, with nothing but the release."""
        return dict(vars(self))

    @classmethod
    def from_state_dict(cls: Type[_Kind], state: Mapping[str, Any]) -> _Kind:
        """The release whose ``state_dict()`` this was."""
        return cls(**state)


@dataclass(frozen=True)
class Popularity(_Release):
    """
    How popular items are, see :func:`release_popularity`.

    Attributes:
        counts: ``[num_items + 1]``; entry 0, padding, is zero
    """

    @property
    def shares(self) -> Tensor:
        """
        ``[num_items + 1]``, float32, of sum 1. Counts below the noise's std, which
        can't be told from zero, count as that; padding has none.
        """
        counts = self.counts.clamp(min=self.noise_multiplier)
        counts[0] = 0
        return (counts / counts.sum()).float()

    def relative(self, power: float) -> Tensor:
        """
        ``[num_items + 1]``, ``(p_i / mean(p) + 1)^power`` of the shares p: weights that
        favor rare items where the power is negative, and hardly tell apart those that
        are rarer than the mean.
        """
        shares = self.shares
        return (shares / shares[1:].mean() + 1) ** power

    def top(self, size: int) -> Tensor:
        """
        ``[size]``, the ids of the most popular items, the first first.

        Raises:
            Refused: if there are not so many items
        """
        if not 1 <= size < len(self.counts):
            raise Refused(
                f"size={size} of {len(self.counts) - 1} items.",
                parameter="size",
                remedy="Give a number from 1 to the number of items.",
            )
        return 1 + self.counts[1:].argsort(descending=True, stable=True)[:size]

    def above(self, count: float) -> Tensor:
        """
        ``[M]``, the ids of the items of at least this count, the first first; of none,
        that of the first alone.
        """
        return self.top(max(int((self.counts[1:] >= count).sum()), 1))


@dataclass(frozen=True)
class Transitions(_Release):
    """
    Which item follows which, see :func:`release_transitions`.

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
        ``[M, M]``, ``counts`` without weights and with no pair counted backwards:
        unbiased, with noise that is larger where the weights are small.
        """
        forward = (self.counts - self.back * self.counts.T) / (1 - self.back**2)
        return forward / torch.outer(self.weights, self.weights)


def noise_for(epsilon: float, delta: float, share: float = 1.0) -> float:
    """
    The noise multiplier of a release that takes a share of a budget.

    One Gaussian mechanism of noise multiplier s is mu-GDP with mu = 1 / s, and the
    squares of mu add up over mechanisms (Dong, Roth and Su 2019, corollary 3.3). The mu
    that spends (epsilon, delta) alone is Balle and Wang's (2018, theorem 8); the
    release gets a share of its square. Releases whose shares sum to 1 spend the budget
    exactly: "prv_bounds" says so. Opacus's accountants bound it less closely, and say
    more ("prv" 8.01 of 8, "rdp" 8.6): with them give shares that sum to less.

    Args:
        epsilon: of the whole budget
        delta: of the whole budget
        share: of mu squared, above 0 and up to 1

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
            remedy="Give a positive, finite epsilon, a delta between 0 and 1, and a "
            "share of the budget above 0, up to 1.",
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
    generator: Union[None, torch.Generator, SecureSource] = None,
) -> Popularity:
    """
    How often items occur, each user counting as one.

    A user's contribution is the vector of how often the user had each item, divided by
    its L2 norm. The released vector is the sum over users plus noise. Sensitivity:
    adding or removing a user adds or removes one vector of norm 1 (or 0, of an empty
    history), so it is 1, and noise of std ``noise_multiplier`` is a Gaussian mechanism
    with that multiplier. It is recorded as one step of sample rate 1.

    Args:
        histories: for each user the item ids ``[T]``, from 1; zeros are padding
        num_items: the largest id
        noise_multiplier: std of the noise, see :func:`noise_for`
        accountant: of the engine that trains afterwards; RDP, PRV or PRV bounds
        generator: of the noise, which is drawn in float64 without protection from
            attacks on floating-point numbers; whoever knows its seed knows the noise.
            ``opacus_ext.secure.SecureSource()`` draws secure noise

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
    counts = _noisy(total, noise_multiplier, accountant, generator)
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
    generator: Union[None, torch.Generator, SecureSource] = None,
) -> Transitions:
    """
    How often item b comes after item a, each user counting as one.

    A user's contribution is the matrix that has, for every two actions of the user at
    most ``window`` apart and both of ``items``, ``distance ** -decay`` added at
    (earlier item, later item), and ``back`` times as much at (later, earlier), each
    times the weights of both items: pairs that occur repeatedly are summed first. It is
    then divided by its Frobenius norm. The released matrix is the sum over users plus
    noise. Sensitivity: adding or removing a user adds or removes one matrix of norm 1
    (or 0, of a user without such pairs), so it is 1, and noise of std
    ``noise_multiplier`` is a Gaussian mechanism with that multiplier. It is recorded as
    one step of sample rate 1.

    The noise is the same in each entry, so that the norm should go where it tells most:
    ``weights=popularity.relative(-0.25)`` gives rare items more of it, and ``back`` the
    direction less. :attr:`Transitions.unweighted` undoes both. The defaults are those
    that did best on MovieLens-1M (docs/how-to/releases.md).

    Args:
        histories: for each user the item ids ``[T]``, from 1, in the order of time;
            zeros are padding and keep their place
        items: ``[M]``, the ids that take part. They must be public or come from a
            release, as :meth:`Popularity.top` does
        noise_multiplier: std of the noise, see :func:`noise_for`
        accountant: as in :func:`release_popularity`
        window: how far apart two actions may be
        decay: how fast pairs count less with their distance
        back: from 0 to below 1; near 1, the direction is lost
        weights: ``[num_items + 1]``, positive, of all items; by default ones. They must
            be public or come from a release, as :meth:`Popularity.relative` does
        generator: as in :func:`release_popularity`

    Raises:
        Refused: as :func:`release_popularity`, for items given twice, and for weights
            that are not positive, not one for each item, or out of float64's range

    Example:
        >>> from opacus.accountants import RDPAccountant
        >>> transitions = release_transitions(
        ...     [torch.tensor([1, 2, 3])], torch.tensor([2, 3]),
        ...     noise_multiplier=0.01, accountant=RDPAccountant(),
        ... )
        >>> f"{transitions.unweighted[0, 1]:.1f}"
        '1.0'
    """
    size = len(items)
    largest = max([int(items.max()) if size else 0] + [_largest(h) for h in histories])
    _check(histories, largest, noise_multiplier)
    different = items.dim() == 1 and len(items.unique()) == size > 0
    if not different or int(items.min()) < 1 or window < 1:
        raise Refused(
            f"items {list(items.shape)}, from {items.min() if size else '-'} on, "
            f"{len(items.unique())} of them different, and window={window}.",
            parameter="items",
            remedy="Give each id once, from 1 on, [M], and a positive window.",
        )
    if not 0 <= back < 1 or not math.isfinite(decay):
        raise Refused(
            f"back={back}, decay={decay}.",
            parameter="back",
            remedy="Give a part from 0 to below 1, and a finite decay.",
        )
    chosen = torch.ones(size, dtype=torch.float64)
    if weights is not None:
        if weights.dim() != 1 or len(weights) <= int(items.max()):
            raise Refused(
                f"weights are {list(weights.shape)}, and items go up to {items.max()}.",
                parameter="weights",
                remedy="Give one for each item, [num_items + 1].",
            )
        chosen = weights[items].double()
    if not bool(((chosen > 0) & chosen.isfinite()).all()):
        raise Refused(
            f"weights from {chosen.min()} to {chosen.max()}.",
            parameter="weights",
            remedy="Give positive ones: an item of weight 0 belongs out of items.",
        )
    lags = torch.tensor([1.0, window], dtype=torch.float64) ** -decay
    pair = chosen.min() ** 2 * lags.min(), chosen.max() ** 2 * lags.max()
    if not 1e-100 < pair[0] <= pair[1] < 1e100:  # squares of float64 end at 1e-308
        raise Refused(
            f"Pairs weigh from {pair[0]:g} to {pair[1]:g}: norms would not be exact.",
            parameter="weights",
            remedy="Bring weights nearer to 1, or decay nearer to 0.",
        )
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
    counts = _noisy(total, noise_multiplier, accountant, generator)
    return Transitions(counts, noise_multiplier, items, chosen, back)


def _largest(history: Tensor) -> int:
    return int(history.max()) if len(history) else 0


def _check(histories: Sequence[Tensor], num_items: int, noise: float) -> None:
    if not 0 < noise < math.inf:
        raise Refused(
            f"noise_multiplier={noise} is no positive number.",
            parameter="noise_multiplier",
            remedy="noise_for(epsilon, delta, share) gives one for a budget.",
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
    """Users' numbers and their item ids, ``[N]`` each, of whole users at a time."""
    users: List[Tensor] = []
    ids: List[Tensor] = []
    size = 0
    for user, history in enumerate(histories):
        history = torch.as_tensor(history)
        users.append(torch.full((len(history),), user))
        ids.append(history.long())
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


def _noisy(
    total: Tensor,
    noise_multiplier: float,
    accountant: IAccountant,
    generator: Union[None, torch.Generator, SecureSource],
) -> Tensor:
    """Recorded before it is drawn: a release that failed has been paid for."""
    before = list(accountant.history)
    try:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    except ValueError:
        accountant.history = before  # "gdp" drops a run's cost when it refuses
        raise
    return with_noise(total, noise_multiplier, 1.0, generator)
