"""Item sequences, one per user: readers, a synthetic set, tensors to train on."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch.utils.data import TensorDataset

from opacus_ext.refused import Refused


@dataclass(frozen=True)
class SequenceData:
    """One sequence of items per user, the last item held out for testing.

    A user is one sequence and so one sample: sample-level privacy is user-level.

    Attributes:
        name: what the summary calls the data.
        histories: for each user the items before the last, ids 1 to ``num_items``.
        held_out: ``[users]``, the last item of each user.
        num_items: number of different items, held-out ones included.
        once: whether the data are of a kind in which nobody has an item twice, as
            ratings are. It is no property of these records, which are not looked at.
    """

    name: str
    histories: List[torch.Tensor]
    held_out: torch.Tensor
    num_items: int
    once: bool = False

    def training_set(self, max_len: int) -> TensorDataset:
        """Per user (input ids ``[max_len]``, targets ``[max_len]``), 0-padded right.

        The target of a position is the item after it. Of a history longer than
        ``max_len + 1`` only the end is used. Users are ordered by length: Opacus's
        Poisson batches are ascending, so that parts of one hold users of like lengths
        and little padding.
        """
        by_length = sorted(self.histories, key=len)
        inputs = _pad([h[:-1] for h in by_length], max_len)
        targets = _pad([h[1:] for h in by_length], max_len)
        return TensorDataset(inputs, targets)

    def contexts(self, max_len: int) -> torch.Tensor:
        """What precedes each held-out item: ``[users, max_len]``, 0-padded right."""
        return _pad(self.histories, max_len)

    def without_last(self) -> "SequenceData":
        """
        The same without the items that are held out: each user's last but one is, in
        their place. Settings chosen on it have not seen what is reported on.
        """
        histories = [h[:-1] for h in self.histories]
        held_out = torch.stack([h[-1] for h in self.histories])
        return replace(self, histories=histories, held_out=held_out)

    def popularity(self) -> torch.Tensor:
        """``[num_items + 1]``, how often each item occurs in the histories."""
        return torch.bincount(torch.cat(self.histories), minlength=self.num_items + 1)

    def fingerprint(self) -> str:
        """A digest that changes whenever a sequence does."""
        digest = hashlib.sha256(self.held_out.numpy().tobytes())
        for history in self.histories:
            digest.update(history.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]


def read_sequences(
    path: Union[str, Path], min_actions: int = 5, max_users: Optional[int] = None
) -> SequenceData:
    """Reads user sequences from SASRec's text form or MovieLens's ratings.dat.

    The form is recognized by the first line:

    - ``user item``, a user's lines in time order (SASRec). This form is what the
      filter below leaves, so its items are not filtered a second time;
    - ``user::item::rating::timestamp`` in any order (MovieLens). Items of fewer than
      ``min_actions`` actions are dropped, and equal timestamps keep the file's order.

    In both, users of fewer than ``min_actions`` actions are dropped, as the DPFormer
    paper does (appendix E.1). Items are numbered anew in order of appearance, so the
    same actions give the same sequences in either form. The list of items and the
    filter depend on the data; like the paper's, the analysis takes them as public.
    Ratings (the second form) are ``once``: a user rates an item one time.

    Args:
        path: the file.
        min_actions: fewest actions of a user (at least 3: an input, a target and the
            held-out item) and, for ratings.dat, of an item.
        max_users: take only so many, by their numbers, and the items they have.

    Raises:
        OSError: if the file can't be read.
        Refused: if a line has another form (the error names it), or no user is left.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("few.txt").write_text("7 20\\n7 30\\n7 20\\n7 40\\n7 50\\n")
        >>> data = read_sequences("few.txt")
        >>> data.histories, data.held_out
        ([tensor([1, 2, 1, 3])], tensor([4]))
    """
    if min_actions < 3:
        raise Refused(
            f"min_actions must be at least 3, not {min_actions}.",
            parameter="min_actions",
            remedy="A user has an input, a target and the held-out item.",
        )
    actions, raw = _read_actions(Path(path))
    if raw:
        actions.sort(key=lambda action: action.time)  # stable
        of_item = Counter(action.item for action in actions)
        actions = [a for a in actions if of_item[a.item] >= min_actions]

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

    new_id: Dict[int, int] = {}
    sequences = [[new_id.setdefault(i, len(new_id) + 1) for i in seq] for seq in chosen]
    return SequenceData(
        name=Path(path).name,
        histories=[torch.tensor(seq[:-1]) for seq in sequences],
        held_out=torch.tensor([seq[-1] for seq in sequences]),
        num_items=len(new_id),
        once=raw,
    )


def synthetic_sequences(
    num_users: int = 6000,
    num_items: int = 400,
    seed: int = 0,
    length: int = 20,
    num_genres: int = 40,
) -> SequenceData:
    """A made-up data set with a long tail and a next item that can be learned.

    It stands in where no real data is at hand, and says nothing about how well a
    model does on real people: its structure is simple and every user follows the same
    rules. Items belong to genres, whose popularity falls as rank^-0.7 (Zipf). The next
    action is, with probability

    - 0.5: the successor of the present item, in a fixed cycle through its genre;
    - 0.4: an item of the present genre, Zipf-distributed by rank in the genre;
    - 0.1: an item of a genre drawn by popularity.

    Args:
        num_users: number of sequences.
        num_items: number of items; a multiple of ``num_genres``.
        seed: makes the data set; the global random state is untouched.
        length: mean number of actions of a user; lengths are uniform in
            ``[length / 2, 3 * length / 2]``.
        num_genres: number of genres.

    Raises:
        Refused: if ``num_genres`` doesn't divide ``num_items``.

    Example:
        >>> data = synthetic_sequences(num_users=100, num_items=30, num_genres=3)
        >>> len(data.histories), data.num_items
        (100, 30)
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
    actions = torch.stack(columns, dim=1)
    sequences = [row[:n] for row, n in zip(actions, lengths.tolist())]
    return SequenceData(
        name="synthetic",
        histories=[seq[:-1].clone() for seq in sequences],
        held_out=torch.stack([seq[-1] for seq in sequences]),
        num_items=num_items,
    )


class _Action(NamedTuple):
    user: int
    item: int
    time: int


def _read_actions(path: Path) -> Tuple[List[_Action], bool]:
    """All actions of a file, and whether it is a raw one (ratings.dat)."""
    actions: List[_Action] = []
    raw = False
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if not actions:
                raw = "::" in line
            try:
                if raw:
                    user, item, _, time = line.split("::")
                else:
                    user, item = line.split()
                    time = "0"
                actions.append(_Action(int(user), int(item), int(time)))
            except ValueError:
                form = "user::item::rating::timestamp" if raw else "user item"
                raise Refused(
                    f"{path}, line {number}: expected '{form}' in whole numbers, "
                    f"found {line.rstrip()[:80]!r}.",
                    parameter="path",
                    remedy="Put the file in this form, or leave the line out.",
                ) from None
    return actions, raw


def _pad(sequences: List[torch.Tensor], max_len: int) -> torch.Tensor:
    """``[len(sequences), max_len]``: the end of each sequence, then zeros."""
    out = torch.zeros(len(sequences), max_len, dtype=torch.long)
    for row, sequence in zip(out, sequences):
        tail = sequence[-max_len:]
        row[: len(tail)] = tail
    return out
