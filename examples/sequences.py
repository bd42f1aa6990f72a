"""Sequences of items, one per user: readers, a synthetic data set, tensors."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple, Union

import torch
from torch.utils.data import TensorDataset

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
        num_items: number of different items, held-out ones included
        once: whether the data are of a kind in which nobody has an item twice, as
            ratings are; these records are not looked at for it
    """

    name: str
    histories: List[torch.Tensor]
    held_out: torch.Tensor
    num_items: int
    once: bool = False

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
        for history in self.histories:
            digest.update(history.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]


def read_sequences(
    path: Union[str, Path], min_actions: int = 5, max_users: Optional[int] = None
) -> SequenceData:
    """
    Reads user sequences from SASRec's text form or MovieLens's ratings.dat.

    The first line tells the form:

    - ``user item``, a user's lines in time order (SASRec); items are not filtered;
    - ``user::item::rating::timestamp`` in any order (MovieLens). Items of fewer than
      ``min_actions`` actions are dropped, and equal timestamps keep the file's order.
      These data are ``once``: a user rates an item one time.

    In both, users of fewer than ``min_actions`` actions are dropped, as in the DPFormer
    paper (appendix E.1). Items are numbered anew in order of appearance. The list of
    items and the filter depend on the data; the analysis takes them as public.

    Args:
        path: the file
        min_actions: fewest actions, at least 3 (an input, a target and the held-out
            item)
        max_users: keeps only so many users, by their numbers, and their items

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
    actions, rated = _read_actions(Path(path))
    if rated:
        actions.sort(key=lambda action: action[2])  # stable
        count = Counter(item for _, item, _ in actions)
        actions = [action for action in actions if count[action[1]] >= min_actions]
    by_user: Dict[int, List[int]] = {}
    for user, item, _ in actions:
        by_user.setdefault(user, []).append(item)
    chosen = [by_user[u] for u in sorted(by_user) if len(by_user[u]) >= min_actions]
    chosen = chosen[:max_users]
    if not chosen:
        raise Refused(
            f"{path}: no user has {min_actions} actions or more.",
            parameter="path",
            remedy="Lower min_actions, or give a file with longer sequences.",
        )
    ids: Dict[int, int] = {}
    sequences = [
        torch.tensor([ids.setdefault(i, len(ids) + 1) for i in items])
        for items in chosen
    ]
    return _held_out(Path(path).name, sequences, len(ids), rated)


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
    return _held_out("synthetic", sequences, num_items)


def _held_out(
    name: str, sequences: List[torch.Tensor], num_items: int, once: bool = False
) -> SequenceData:
    last = torch.stack([x[-1] for x in sequences])
    return SequenceData(name, [x[:-1] for x in sequences], last, num_items, once)


def _read_actions(path: Path) -> Tuple[List[Tuple[int, int, int]], bool]:
    """Reads (user, item, time), and tells whether they are ratings (ratings.dat)."""
    actions: List[Tuple[int, int, int]] = []
    rated = False
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if not actions:
                rated = "::" in line
            try:
                if rated:
                    user, item, _, time = line.split("::")
                else:
                    (user, item), time = line.split(), "0"
                actions.append((int(user), int(item), int(time)))
            except ValueError:
                form = "user::item::rating::timestamp" if rated else "user item"
                raise Refused(
                    f"{path}, line {number}: expected '{form}' in whole numbers, "
                    f"found {line.rstrip()[:80]!r}.",
                    parameter="path",
                    remedy="Put the file in this form, or leave the line out.",
                ) from None
    return actions, rated


def _pad(sequences: List[torch.Tensor], max_len: int) -> torch.Tensor:
    """Returns ``[len(sequences), max_len]``: the end of each sequence, then zeros."""
    out = torch.zeros(len(sequences), max_len, dtype=torch.long)
    for row, sequence in zip(out, sequences):
        tail = sequence[-max_len:]
        row[: len(tail)] = tail
    return out
