"""Packed sequences as samples, and samples as packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Sequence, Union

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from opacus_ext.grad_sample.samplewise.functorch import is_batched

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.run import Run

T = torch.Tensor


def rows_of(packed: PackedSequence) -> List[T]:
    """For each sequence, in the order before packing, where its rows are."""
    every = torch.arange(int(packed.batch_sizes.sum()))
    order = [None if x is None else x.cpu() for x in packed[2:]]
    return unpack_sequence(PackedSequence(every, packed.batch_sizes, *order))


def unpacked(x: Union[T, PackedSequence]) -> T:
    """The rows of one sequence after the other, of what is packed."""
    if not isinstance(x, PackedSequence):
        return x
    return x.data[torch.cat(rows_of(x)).to(x.data.device)]


def agreed(run: "Run", x: Union[T, PackedSequence]) -> Union[T, PackedSequence]:
    """A packed sequence of each sample with the layout that all share."""
    if not isinstance(x, PackedSequence):
        return x
    return PackedSequence(x.data, *(y if y is None else run.agree(y) for y in x[1:]))


def as_one(
    packs: Sequence[PackedSequence],
    samples: Sequence[Sequence[int]],
    like: Optional[PackedSequence] = None,
) -> PackedSequence:
    """
    Packed sequences of some samples each as that of the batch.

    Args:
        packs: several, or one that all samples share the layout of
        samples: of each its samples, by number
        like: whose order is kept, where it has the same lengths

    Returns:
        In the place of its data where these are in the data one after the other.
    """
    found = {}
    start = 0
    for pack, own in zip(packs, samples):
        rows = rows_of(pack)
        n = len(rows) // len(own)  # a sample may have several
        for i, sample in enumerate(own):
            found[sample] = [start + x for x in rows[i * n : (i + 1) * n]]
        start += int(pack.batch_sizes.sum())
    rows = [x for sample in sorted(found) for x in found[sample]]
    in_order = packs[0].sorted_indices is None
    order = None if like is None or in_order else like.sorted_indices
    if order is not None and len(order) == len(rows):
        first = [rows[i] for i in order.tolist()]
        if all(len(x) >= len(y) for x, y in zip(first, first[1:])):
            new = pack_sequence(first)
            own = order.clone(), like.unsorted_indices.clone()
            return PackedSequence(*new.to(order.device)[:2], *own)
    return pack_sequence(rows, enforce_sorted=in_order).to(packs[0].data.device)


def of_batch(run: "Run", x: PackedSequence) -> PackedSequence:
    """That of the batch, from what samples have made and all share the lengths of."""
    if not is_batched(x.data):
        return x
    of_each = [agreed(run, x)] * run.size
    new = as_one(of_each, [[b] for b in range(run.size)])
    return PackedSequence(run.as_batch(x.data)[new.data], *new[1:])
