"""A batch as samples: each is a batch of one."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from opacus_ext.refused import Refused

T = torch.Tensor
Take = Callable[[Any, int], Any]


class Samples(NamedTuple):
    """
    Some samples of one kind.

    Attributes:
        rows: which of the batch they are; None for all
        leaves: tensors ``[B, 1, ...]``, or what all samples share
        by_sample: whether each leaf is one a sample
        spec: of the tree that a sample is
        size: number of samples
    """

    rows: Optional[T]
    leaves: List[Any]
    by_sample: List[bool]
    spec: TreeSpec
    size: int

    def select(self, index: T) -> Samples:
        """Those at some places."""
        if len(index) == self.size and bool((index[1:] > index[:-1]).all()):
            return self
        leaves = [
            x[index.to(x.device)] if own else x
            for x, own in zip(self.leaves, self.by_sample)
        ]
        rows = index if self.rows is None else self.rows[index]
        return self._replace(rows=rows, leaves=leaves, size=len(index))

    def alone(self, i: int) -> Any:
        """Sample ``i`` as a tree of tensors ``[1, ...]``."""
        return self.tree(lambda x: x[i])

    def zeros(self, value: int = 0) -> Any:
        """A sample of zeros, or of another number."""
        return self.tree(lambda x: x.new_full(x.shape[1:], value))

    def tree(self, function: Callable[[T], Any]) -> Any:
        """The tree of a sample, with a function of what is one a sample."""
        leaves = [
            function(x) if own else x for x, own in zip(self.leaves, self.by_sample)
        ]
        return tree_unflatten(leaves, self.spec)


def samples_of(batch: Any, take: Optional[Take] = None) -> Tuple[List[Samples], int]:
    """
    A batch as samples, those of one kind together, and how many there are.

    Args:
        batch: a tree of tensors ``[B, ...]``; anything, with ``take``
        take: ``take(batch, i)`` gives sample ``i``, a tree of tensors ``[1, ...]``, and
            raises IndexError where there is none

    Raises:
        Refused: if the first dims of the tensors differ, or there is no tensor
    """
    if take is not None:
        return _taken(batch, take)
    paths, spec = tree_flatten_with_path(batch)
    sizes: Dict[int, str] = {}
    for path, x in paths:
        if isinstance(x, T):
            sizes.setdefault(x.shape[0] if x.dim() else -1, keystr(path) or "batch")
    if len(sizes) != 1 or -1 in sizes:
        found = ", ".join(
            f"{name} {f'has first dim {n}' if n >= 0 else 'has no dims'}"
            for n, name in sizes.items()
        )
        raise Refused(
            "A batch is a tree of tensors [B, ...] with one first dim, got "
            f"{found or 'no tensor'}.",
            parameter="batch",
            remedy="Close over what all samples share in the loss, or give "
            "take=function, where function(batch, i) gives sample i.",
        )
    (size,) = sizes
    by_sample = [isinstance(x, T) for _, x in paths]
    leaves = [x.detach().unsqueeze(1) if isinstance(x, T) else x for _, x in paths]
    return [Samples(None, leaves, by_sample, spec, size)], size


def _taken(batch: Any, take: Take) -> Tuple[List[Samples], int]:
    kinds: Dict[Any, Tuple[List[int], List[List[Any]], TreeSpec]] = {}
    size = 0
    for i, sample in enumerate(_each(batch, take)):
        leaves, spec = tree_flatten(sample)
        key = str(spec), *(
            (x.shape, x.dtype) if isinstance(x, T) else (type(x), repr(x))
            for x in leaves
        )
        rows, found, _ = kinds.setdefault(key, ([], [], spec))
        rows.append(i)
        found.append(leaves)
        size = i + 1
    samples = []
    for rows, found, spec in kinds.values():
        by_sample = [isinstance(x, T) for x in found[0]]
        leaves = [
            torch.stack([x.detach() for x in column]) if own else column[0]
            for column, own in zip(zip(*found), by_sample)
        ]
        some = torch.tensor(rows)
        samples.append(Samples(some, leaves, by_sample, spec, len(rows)))
    if len(samples) == 1:
        samples = [samples[0]._replace(rows=None)]
    return samples, size


def _each(batch: Any, take: Take) -> Iterator[Any]:
    """Samples until there is none: an IndexError, or slices that are empty."""
    i = 0
    while True:
        try:
            sample = take(batch, i)
        except IndexError:
            return
        tensors = [x for x in tree_flatten(sample)[0] if isinstance(x, T)]
        if tensors and all(x.dim() and not len(x) for x in tensors):
            return
        if not tensors:
            raise Refused(
                f"take(batch, {i}) gave {type(sample).__name__} without a tensor.",
                parameter="take",
                remedy="It must give sample i as a tree of tensors [1, ...], and raise "
                "IndexError where there is none.",
            )
        yield sample
        i += 1
