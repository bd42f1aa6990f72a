"""Sequences of items, one per user: readers, a synthetic data set, tensors."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch.utils.data import TensorDataset

from opacus_ext.recommend.actions import read_actions
from opacus_ext.refused import Refused


@dataclass(frozen=True)
class SequenceData:
    """
    One sequence of items per user, the last item held out for testing. A user is one
    sample, so that sample-level privacy is user-level.

    Attributes:
        name: name of the data in summaries
        histories: for each user the items before the last, ids 1 to ``num_items``
        held_out: ``[users]``, the last item of each user
        items: the names of all items; the first has id 1
        users: the names of users
        once: whether the data are of a kind in which nobody has an item twice, as
            ratings are; these records are not looked at for it
    """

    name: str
    histories: List[torch.Tensor]
    held_out: torch.Tensor
    items: List[str]
    users: List[str]
    once: bool = False

    @property
    def num_items(self) -> int:
        """The number of items, held-out ones included."""
        return len(self.items)

    def history(self, user: str) -> List[str]:
        """
        Returns the names of all items of a user, the held-out one last.

        Raises:
            Refused: for a name that no user has
        """
        if user not in self.users:
            raise Refused(
                f"{self.name}: no user {user!r}.",
                parameter="user",
                remedy="Users with fewer than min_actions actions are left out.",
            )
        place = self.users.index(user)
        ids = [*self.histories[place].tolist(), int(self.held_out[place])]
        return [self.items[i - 1] for i in ids]

    def training_set(self, max_len: int) -> TensorDataset:
        """
        Returns input ids and targets ``[users, max_len]``, 0-padded on the right: the
        end of each history, and the item after each position. Users are ordered by
        length, so that physical batches, which are ascending, have little padding.
        """
        by_length = sorted(self.histories, key=len)
        inputs = _pad([h[:-1] for h in by_length], max_len)
        return TensorDataset(inputs, _pad([h[1:] for h in by_length], max_len))

    def contexts(self, max_len: int) -> torch.Tensor:
        """Returns the end of each history, ``[users, max_len]``, 0-padded right."""
        return _pad(self.histories, max_len)

    def without_last(self) -> "SequenceData":
        """Returns the same data with the last but one item held out, for choices."""
        return replace(
            self,
            histories=[h[:-1] for h in self.histories],
            held_out=torch.stack([h[-1] for h in self.histories]),
        )

    def popularity(self) -> torch.Tensor:
        """Returns ``[num_items + 1]``, how often each item is in the histories."""
        return torch.bincount(torch.cat(self.histories), minlength=self.num_items + 1)

    def fingerprint(self) -> str:
        """Returns a digest that changes whenever a sequence does."""
        digest = hashlib.sha256(self.held_out.numpy().tobytes())
        digest.update("\n".join(self.items).encode())
        for history in self.histories:
            digest.update(history.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]


def read_sequences(
    path: Union[str, Path],
    min_actions: int = 5,
    max_users: Optional[int] = None,
    *,
    columns: Optional[Sequence[str]] = None,
    items: Optional[Sequence[str]] = None,
) -> SequenceData:
    """
    Reads each user's items in order of time, from a table of actions.

    A line is an action: ``user,item,timestamp`` with or without a header, MovieLens's
    ``user::item::rating::timestamp``, or SASRec's ``user item`` with a user's lines in
    order of time; see :func:`~opacus_ext.recommend.actions.read_actions`. Equal times
    keep the file's order. Data with ratings are ``once``: a user rates an item one
    time.

    Users of fewer than ``min_actions`` actions are dropped, and before that, where
    there are times, items of fewer, as in the DPFormer paper (appendix E.1). Then the
    list of items depends on the data, and privacy takes it as public. With ``items``
    it does not: actions with others are left out, and no item is dropped.

    Args:
        path: the file
        min_actions: fewest actions, at least 3 (an input, a target and the held-out
            item)
        max_users: keeps only so many users, by their numbers, and their items
        columns: the header's names of the user's, the item's and the time's column
        items: the names of all items, which are public

    Raises:
        OSError: if the file can't be read
        Refused: for a line of another form, which is named, or if no user is left
    """
    if min_actions < 3:
        raise Refused(
            f"min_actions must be at least 3, not {min_actions}.",
            parameter="min_actions",
            remedy="A user has an input, a target and the held-out item.",
        )
    actions = read_actions(path, columns)
    order = list(range(len(actions.users)))
    if actions.times is not None:
        order.sort(key=actions.times.__getitem__)  # stable
    names = list(dict.fromkeys(items or ()))
    if names:
        public = set(names)
        order = [i for i in order if actions.items[i] in public]
    elif actions.times is not None:
        count = Counter(actions.items)
        order = [i for i in order if count[actions.items[i]] >= min_actions]
    dropped = len(actions.users) - len(order)
    by_user: Dict[str, List[str]] = {}
    for i in order:
        by_user.setdefault(actions.users[i], []).append(actions.items[i])
    users = [u for u in by_user if len(by_user[u]) >= min_actions]
    users = sorted(users, key=_by_number)[:max_users]
    if not users:
        left = f", {dropped:,} of them of rare or unlisted items" * bool(dropped)
        raise Refused(
            f"{path}: no user has {min_actions} actions or more, of "
            f"{len(actions.users):,} in all{left}.",
            parameter="path",
            remedy="Lower min_actions (--min-actions), to 3 or more, or give a file "
            "with longer histories.",
        )
    names = names or [*dict.fromkeys(x for user in users for x in by_user[user])]
    ids = {name: i for i, name in enumerate(names, 1)}
    sequences = [torch.tensor([ids[x] for x in by_user[user]]) for user in users]
    return _held_out(Path(path).name, sequences, names, users, actions.rated)


def _by_number(name: str) -> Tuple[int, str]:
    """A key that orders numbers by size, and after them other names."""
    if name.isdecimal():
        return int(name), name
    return sys.maxsize, name


def synthetic_sequences(
    num_users: int = 6000,
    num_items: int = 400,
    seed: int = 0,
    length: int = 20,
    num_genres: int = 40,
) -> SequenceData:
    """
    Makes up data with a long tail and a next item that can be learned.

    They stand in where no real data are at hand, and say nothing about real people.
    Items belong to genres, whose popularity falls as rank^-0.7 (Zipf). The next item
    is, with probability

    - 0.5: the successor of the present one, in a cycle through its genre;
    - 0.4: an item of the present genre, Zipf-distributed by rank in the genre;
    - 0.1: an item of a genre drawn by popularity.

    Lengths are uniform in ``[length / 2, 3 * length / 2]``, and the global random state
    is untouched. ``num_genres`` must divide ``num_items``.
    """
    if num_items % num_genres:
        raise Refused(
            f"{num_genres} genres can't share {num_items} items equally.",
            parameter="num_genres",
            remedy="Take a divisor of num_items.",
        )
    rng = torch.Generator().manual_seed(seed)
    size = num_items // num_genres

    def zipf(n: int) -> torch.Tensor:
        weights = torch.arange(1.0, n + 1) ** -0.7
        return torch.multinomial(weights, num_users, replacement=True, generator=rng)

    lengths = torch.randint(
        length // 2, 3 * length // 2 + 1, (num_users,), generator=rng
    ).clamp(min=5)
    genre, rank = zipf(num_genres), zipf(size)
    columns = []
    for _ in range(int(lengths.max())):
        columns.append(genre * size + rank + 1)
        draw = torch.rand(num_users, generator=rng)
        genre = torch.where(draw < 0.9, genre, zipf(num_genres))
        rank = torch.where(draw < 0.5, (rank + 1) % size, zipf(size))
    rows = zip(torch.stack(columns, dim=1), lengths.tolist())
    sequences = [row[:n].clone() for row, n in rows]
    items, users = ([str(i + 1) for i in range(n)] for n in (num_items, num_users))
    return _held_out("synthetic", sequences, items, users)


def _held_out(
    name: str,
    sequences: List[torch.Tensor],
    items: List[str],
    users: List[str],
    once: bool = False,
) -> SequenceData:
    last = torch.stack([x[-1] for x in sequences])
    return SequenceData(name, [x[:-1] for x in sequences], last, items, users, once)


def _pad(sequences: List[torch.Tensor], max_len: int) -> torch.Tensor:
    """Returns ``[len(sequences), max_len]``: the end of each sequence, then zeros."""
    out = torch.zeros(len(sequences), max_len, dtype=torch.long)
    for row, sequence in zip(out, sequences):
        tail = sequence[-max_len:]
        row[: len(tail)] = tail
    return out
