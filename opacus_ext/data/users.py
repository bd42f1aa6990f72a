"""Data sets whose records belong to people, with a person as the unit of privacy."""

from __future__ import annotations

import math
import numbers
import uuid
from typing import Any, Dict, Hashable, List, Mapping, Optional, Sequence, Union

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from opacus_ext.data.copies import find_copies
from opacus_ext.refused import Refused, check_argument, check_number
from opacus_ext.tables import in_a_line


class UserRecords(Dataset):
    """
    A data set with one item per user: some of the user's records, drawn anew each time.

    With it the unit of privacy is a user: a step draws users, and clips one gradient
    per user, however many records the user has. Records are drawn by torch's default
    generator, like random transforms. PrivateTrainer and PrivacyCallback seed it, so
    that a run that goes on draws what it would have drawn.

    Copies of a record (a ``Subset`` with an index twice, say) belong to one user, and
    are drawn as several of that user's records.

    Args:
        dataset: the records, by number
        users: the user of each record, ``[len(dataset)]``; or the key of a record that
            holds the user, and is left out of the items. Users are equal as whole
            numbers, strings, bytes or tuples of these, whatever type holds them
        records_per_step: number of records drawn of a user, without replacement. With
            1 an item is a record. With more, or None for all of them, it is a list of
            records, for :class:`~opacus_ext.data.collators.RecordCollator` and a model
            in :class:`~opacus_ext.losses.RecordModel`
        unit: what privacy statements call a user, "patient" or "author", say

    Attributes:
        users: the users of the items, in order of first appearance; numbers are ints,
            and UUIDs strings
        indices: the number of each user's first record

    Raises:
        Refused: if there are no records, if not each record has one user, if a user is
            another kind of value, or if two users have the same record, or differ in
            nothing but their type (7 and "7")

    Example:
        >>> texts = [{"text": "a", "by": 7}, {"text": "b", "by": 9},
        ...          {"text": "c", "by": 9}]
        >>> data = UserRecords(texts, "by", records_per_step=None)
        >>> len(data), data.users, data[1]
        (2, [7, 9], [{'text': 'b'}, {'text': 'c'}])
    """

    def __init__(
        self,
        dataset: Any,
        users: Union[str, Sequence[Hashable], torch.Tensor],
        records_per_step: Optional[int] = 1,
        *,
        unit: str = "user",
    ):
        check_argument(
            "dataset",
            dataset,
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"),
            "a data set with __len__ and __getitem__",
            "Give the records by number, such as list(records).",
        )
        check_argument(
            "users",
            users,
            hasattr(users, "__iter__") and getattr(users, "ndim", 1) > 0,
            "a key of the records, or the user of each record",
            'Give "user", say, or [record["user"] for record in dataset].',
        )
        self.unit = unit
        self.dataset, self.key = dataset, users if isinstance(users, str) else None
        if isinstance(users, str):
            users = [_user_in(dataset[i], users, i) for i in range(len(dataset))]
        if isinstance(users, Mapping):
            raise Refused(
                "users is a mapping, of which it isn't known what its keys are.",
                parameter="users",
                remedy="Give the user of each record, in the order of the records: "
                "[users[i] for i in range(len(dataset))], say.",
            )
        ids = list(users)
        if isinstance(users, (torch.Tensor, np.ndarray)) and users.ndim == 1:
            ids = users.tolist()
        if len(ids) != len(dataset) or not ids:
            raise Refused(
                f"The data set has {len(dataset)} records, and users has {len(ids)} "
                "entries.",
                parameter="users",
                remedy="Give the user of each record, in the order of the records.",
            )
        if records_per_step is not None:
            check_number("records_per_step", records_per_step, whole=True)
            records_per_step = int(records_per_step)
        self.records_per_step = records_per_step
        self._records: Dict[Hashable, List[int]] = {}  # numbers, by user
        ids = [_plain(user, i) for i, user in enumerate(ids)]
        users_by_text: Dict[Hashable, Any] = {}
        for i, user in enumerate(ids):
            first = users_by_text.setdefault(_text(user), user)
            if first != user:
                raise Refused(
                    f"Users {first!r} and {user!r} differ in nothing but their type.",
                    parameter="users",
                    remedy="Give all users as whole numbers, or all as strings.",
                )
            self._records.setdefault(user, []).append(i)
        self.users = list(self._records)
        self.indices = [numbers[0] for numbers in self._records.values()]
        copies = find_copies(dataset, [self._records[user][0] for user in ids])
        if copies is not None:
            first, second = (ids[i] for i in copies)
            raise Refused(
                f"Records {copies.first} and {copies.second} are one and the same, and "
                f"belong to users {first!r} and {second!r}.",
                parameter="users",
                remedy="Give all copies of a record the same user, or each record "
                "once.",
            )

    def __len__(self) -> int:
        return len(self.users)

    def __repr__(self) -> str:
        return in_a_line(
            self,
            users=len(self),
            records=len(self.dataset),
            records_per_step=self.records_per_step or "all",
        )

    def __getitem__(self, index: int) -> Any:
        """Draws records of user ``index``."""
        numbers, count = self._records[self.users[index]], self.records_per_step
        if count is None:
            return [self._record(i) for i in numbers]
        if count == 1:
            return self._record(numbers[int(torch.randint(len(numbers), ()))])
        some = torch.randperm(len(numbers))[:count].tolist()
        return [self._record(numbers[i]) for i in some]

    def _record(self, i: int) -> Any:
        record = self.dataset[i]
        if self.key is None or not isinstance(record, Mapping):
            return record
        return {name: x for name, x in record.items() if name != self.key}


def unit_of(dataset: Any) -> str:
    """Returns what statements call an item of a data set: "record" of most."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset.unit if isinstance(dataset, UserRecords) else "record"


def _user_in(record: Any, key: str, number: int) -> Any:
    try:
        return record[key]
    except (KeyError, IndexError, TypeError) as error:
        raise Refused(
            f"Record {number} has no user {key!r} ({type(error).__name__}: {error}).",
            parameter="users",
            remedy="Give the key of the user in each record, or a list of users.",
        ) from error


def _text(user: Hashable) -> Hashable:
    """Returns a user as text, which is equal for 7, "7" and b"7"."""
    if isinstance(user, tuple):
        return tuple(map(_text, user))
    return user.decode(errors="replace") if isinstance(user, bytes) else str(user)


def _plain(user: Any, record: int) -> Hashable:
    """
    Returns a user as an int, a string, bytes or a tuple. Two records of one user must
    have equal users, and two tensors, for example, never are.
    """
    if type(user) in (int, str):
        return user
    value: Any = user
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.item() if math.prod(value.shape) == 1 else None
    if isinstance(value, tuple):
        return tuple(_plain(part, record) for part in value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    real: Any = value if isinstance(value, numbers.Real) else math.nan
    if math.isfinite(real) and real == int(real):
        return int(real)
    raise Refused(
        f"The user of record {record} is {str(user)[:60]!r} ({type(user).__name__}): "
        "whether two of these are one user is not known.",
        parameter="users",
        remedy="Give users as whole numbers or strings, and leave out records whose "
        "user is not known.",
    )
