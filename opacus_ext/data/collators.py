"""Collators of records that consist of several sequences."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence, Union

import torch

from opacus_ext.refused import Refused

Sequences = Union[Sequence[Mapping[str, Any]], Mapping[str, Sequence[Any]]]


class RecordCollator:
    """
    Collates records of several sequences, for a model in
    :class:`~opacus_ext.losses.RecordModel`.

    A record is a list of sequences, each of which is a dict, or one dict of lists, like
    a row of ``datasets.Dataset``. Shorter records are padded by copies of their first
    sequence, without labels.

    Args:
        collate: collates sequences to tensors ``[B, ...]``, such as
            ``DataCollatorForSeq2Seq(tokenizer)``
        labels: name of the labels

    Raises:
        Refused: for a record without sequences

    Example:
        >>> from torch.utils.data import default_collate
        >>> a, b = ({"labels": torch.tensor([i, i])} for i in (1, 2))
        >>> RecordCollator(default_collate)([[a, b], [b]])["labels"].tolist()
        [[[1, 1], [2, 2]], [[2, 2], [-100, -100]]]
    """

    def __init__(
        self,
        collate: Callable[[List[Mapping[str, Any]]], Mapping[str, torch.Tensor]],
        labels: str = "labels",
    ):
        self.collate, self.labels = collate, labels

    def __call__(self, batch: Sequence[Sequences]) -> Dict[str, torch.Tensor]:
        """Returns tensors ``[R, S, ...]``."""
        records = [_sequences(record) for record in batch]
        if not all(records):
            raise Refused(
                f"Record {[bool(r) for r in records].index(False)} of the batch has no "
                "sequences.",
                remedy="Leave such records out of the data set.",
            )
        longest = max(map(len, records))
        rows = [x for r in records for x in [*r, *r[:1] * (longest - len(r))]]
        flat = self.collate(rows)
        if len(flat[self.labels]) != len(rows):
            raise Refused(
                f"The collator of the sequences made {len(flat[self.labels])} rows of "
                f"{len(rows)} sequences.",
                parameter="collate",
                remedy="Use one that keeps them apart.",
            )
        shape = len(records), longest
        collated = {name: x.unflatten(0, shape) for name, x in flat.items()}
        for i, record in enumerate(records):
            collated[self.labels][i, len(record) :] = -100
        return collated


def _sequences(record: Sequences) -> List[Mapping[str, Any]]:
    if not isinstance(record, Mapping):
        return list(record)
    return [dict(zip(record, values)) for values in zip(*record.values())]
