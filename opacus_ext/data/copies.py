"""
Data sets in which one record has several numbers. Such a record is drawn several times,
and moves a step by more than the bound.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, TensorDataset

from opacus_ext.refused import Refused


class Copies(NamedTuple):
    """Two numbers of one record."""

    first: int
    second: int


def refuse_copies(dataset: Any, parameter: str = "data_loader") -> None:
    """
    Refuses a data set in which one record is known to have several numbers: by the
    parts of the data set (``Subset``, ``ConcatDataset``, ``Dataset.select``, wrappers
    with a ``dataset`` of the same length), or because two items are one object or share
    memory. Records with equal values are not looked for.
    """
    copies = find_copies(dataset)
    if copies is not None:
        raise Refused(
            f"Records {copies.first} and {copies.second} of the data set "
            f"({type(dataset).__name__}) are one and the same: in one step it could "
            "count several times, which no epsilon covers.",
            parameter=parameter,
            remedy="Give each record once, as "
            "torch.utils.data.Subset(dataset, sorted(set(indices))) does; or make all "
            "copies of a record those of one user by opacus_ext.data.UserRecords.",
        )


def find_copies(dataset: Any, owners: Any = None) -> Optional[Copies]:
    """
    Returns two numbers of one record, or None.

    Args:
        owners: the owner of each number; copies of one owner do not count
    """
    size = _size(dataset)
    if not size:
        return None
    places = _Places()
    copies = _find(places.of(dataset, size), owners)
    if copies is None and places.has_users:
        copies = _find(_Places(by_user=True).of(dataset, size), owners)
    return copies


def _find(places: np.ndarray, owners: Any) -> Optional[Copies]:
    if bool((np.diff(places[:, 0]) > 0).all()):  # nearly always
        return None
    order = np.lexsort(places.T)
    ordered = places[order]
    same = (ordered[1:] == ordered[:-1]).all(1)
    if owners is not None:
        of = np.asarray(owners)[order]
        same &= of[1:] != of[:-1]
    if not same.any():
        return None
    first, second = order[:-1][same], order[1:][same]  # ascending among equal ones
    at = int(first.argmin())
    return Copies(int(first[at]), int(second[at]))


class _Places:
    """
    Where the records of data sets come from: rows of integers ``[records, k]`` that are
    equal for one record. Those in memory are its addresses, and other ones negative.
    With ``by_user``, an item of ``UserRecords`` is its user.
    """

    has_users = False

    def __init__(self, by_user: bool = False) -> None:
        self.by_user = by_user
        self.bases: Dict[Any, int] = {}  # numbers of data sets that have no parts

    def of(self, dataset: Any, size: int) -> np.ndarray:
        """Returns the places of the records of a data set."""
        if isinstance(dataset, ConcatDataset):
            return _joined([self.of(x, _size(x) or 0) for x in dataset.datasets])
        if isinstance(dataset, StackDataset):
            parts = dataset.datasets
            every = parts.values() if isinstance(parts, dict) else parts
            return np.concatenate([self.of(part, size) for part in every], 1)
        if isinstance(dataset, TensorDataset):
            return self._of_tensors(dataset, size)
        if type(dataset) in (list, tuple):
            return self._of_objects(dataset, size)
        within = getattr(dataset, "dataset", None)
        if hasattr(dataset, "records_per_step"):  # UserRecords
            self.has_users = True
            if self.by_user:
                items = [self._of_base(("user", user), 1) for user in dataset.users]
                return np.concatenate(items)
        indices = _numbers(getattr(dataset, "indices", None))
        inner = _size(within)
        if within is not None and indices is not None and len(indices) == size:
            if inner:
                inside = self.of(within, inner)
            else:  # it has no length
                inside = self._of_base(id(within), int(indices.max()) + 1)
            return inside.take(indices, axis=0, mode="wrap")
        if inner == size:
            return self.of(within, size)
        if hasattr(dataset, "_data") or hasattr(dataset, "_indices"):
            return self._of_table(dataset, size)
        return self._of_base(id(dataset), size)

    def _of_base(self, key: Any, size: int, first: int = 0) -> np.ndarray:
        """Returns places in what has no parts, a data set by its id."""
        number = self.bases.setdefault(key, len(self.bases) + 1)
        return (number << 40) - (1 << 62) + np.arange(first, first + size)[:, None]

    def _of_tensors(self, dataset: Any, size: int) -> np.ndarray:
        columns = [self._of_base(id(dataset), size)] * (not dataset.tensors)
        for x in dataset.tensors:
            if x.is_meta or not x.numel() or x.layout is not torch.strided:
                columns.append(self._of_base(id(dataset), size))
            else:
                step = x.stride(0) * x.itemsize
                columns.append(x.data_ptr() + step * np.arange(size)[:, None])
        return np.concatenate(columns, 1)

    def _of_objects(self, dataset: Any, size: int) -> np.ndarray:
        places = np.fromiter(map(id, dataset), np.int64, size)[:, None]
        if len(np.unique(places)) == size:
            return places
        # Python keeps many a number, string and constant once for all who have it.
        single = np.fromiter(map(_is_of_one, dataset), bool, size)[:, None]
        return np.where(single, places, self._of_base(id(dataset), size))

    def _of_table(self, dataset: Any, size: int) -> np.ndarray:
        """Returns places of the rows of a ``datasets.Dataset``, by memory if known."""
        indices = _numbers(getattr(dataset, "_indices", None))
        data = getattr(dataset, "_data", dataset)
        try:
            blocks = _blocks(getattr(data, "table", data))
            places = np.concatenate([self._of_base(*block) for block in blocks])
        except (AttributeError, TypeError, ValueError):
            rows = size if indices is None else int(indices.max()) + 1
            places = self._of_base(id(data), rows)
        if indices is not None and len(indices) == size:
            return places.take(indices, axis=0, mode="wrap")
        return places if len(places) == size else self._of_base(id(dataset), size)


def _blocks(table: Any) -> List[Any]:
    """Returns the blocks of an Arrow table: where each is, its length and first row."""
    blocks = []
    for batch in table.to_batches():
        columns = batch.columns
        first = columns[0].offset
        key = tuple(
            (next((x.address for x in c.buffers() if x), None), c.offset - first)
            for c in columns
        )
        if all(address is None for address, _ in key):
            raise ValueError("a table without memory")
        blocks.append((key, batch.num_rows, first))
    return blocks


def _is_of_one(record: Any) -> bool:
    """Returns True for an object that two records do not share by chance."""
    if isinstance(record, tuple):
        return any(map(_is_of_one, record))
    return isinstance(record, (dict, list, torch.Tensor, np.ndarray))


def _numbers(values: Any) -> Optional[np.ndarray]:
    """Returns a list, tensor or table of whole numbers as an array, else None."""
    try:
        values = values.column(0) if hasattr(values, "column") else values
        values = values.to_numpy() if hasattr(values, "to_numpy") else values
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, LookupError):
        return None
    integers = array.ndim == 1 and array.dtype.kind in "iu"
    return array.astype(np.int64) if integers else None


def _size(dataset: Any) -> Optional[int]:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _joined(parts: List[np.ndarray]) -> np.ndarray:
    """Returns rows one after the other, filled up to the same width."""
    width = max((part.shape[1] for part in parts), default=1)
    wide = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in parts]
    return np.concatenate(wide) if wide else np.zeros((0, 1), np.int64)
