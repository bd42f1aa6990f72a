"""Ready-made functions for ``make_private(take=...)`` and ``clipped_grads(take=...)``.

Each is called as ``take(inputs, i)`` and returns sample ``i``, as a batch of one, of
inputs that can't be cut along a dim. ``inputs`` are the positional arguments of the
model, a tuple, or its keyword arguments, a dict. ``take.size(inputs)`` is the number of
samples, or None if all samples share these inputs.

A function of your own that has no ``size`` raises IndexError after the last sample. If
a sample before the last one raises IndexError, the batch is refused.
"""

from __future__ import annotations

from typing import Any, List, Optional, Set

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from opacus_ext.private_torch import tree_leaves, tree_map
from opacus_ext.refused import Refused

__all__ = [
    "bags",
    "graphs",
    "items",
    "packed",
]

T = torch.Tensor


def items(inputs: Any, i: int) -> Any:
    """
    Takes item ``i`` of each list, tuple or dict of samples, or of ``*args``.

    Example:
        >>> sequences = [torch.ones(3, 2), torch.ones(5, 2)]
        >>> [x.shape for x in items((sequences,), 1)[0]]
        [torch.Size([5, 2])]
    """
    if _are_samples(inputs):
        return _item(inputs, i)

    def own(x: Any) -> Any:
        """The sample's part."""
        return x[i : i + 1] if isinstance(x, T) else _item(x, i)

    if isinstance(inputs, dict):
        return {key: own(x) for key, x in inputs.items()}
    return tuple(map(own, inputs))


def _are_samples(inputs: Any) -> bool:
    """Returns True for ``*args`` of which each argument is one sample."""
    if isinstance(inputs, dict):
        return False
    return not any(isinstance(x, (list, tuple, dict)) for x in inputs)


def _size_of_items(inputs: Any) -> Optional[int]:
    if _are_samples(inputs):
        return len(inputs)
    values = inputs.values() if isinstance(inputs, dict) else inputs
    lists = [x for x in values if isinstance(x, (list, tuple, dict))]
    tensors = [x for x in values if isinstance(x, T) and x.dim()]
    return _one_size({len(x) for x in lists or tensors})


def _one_size(sizes: Set[int]) -> Optional[int]:
    if len(sizes) > 1:
        raise Refused(
            f"The inputs hold {', '.join(map(str, sorted(sizes)))} samples.",
            parameter="take",
            remedy="Give lists of one length, an item for each sample.",
        )
    return min(sizes, default=None)


items.size = _size_of_items  # type: ignore[attr-defined]


def _item(x: Any, i: int) -> Any:
    """Item i of a container, in a container of its type."""
    if isinstance(x, dict):
        key = list(x)[i]
        return {key: x[key]}
    if isinstance(x, (list, tuple)):
        return type(x)([x[i]])
    return x


def bags(inputs: Any, i: int) -> Any:
    """
    Takes bag ``i`` of ``(values [N], offsets [B])``, and of weights ``[N]`` if there
    are some, as ``nn.EmbeddingBag`` has them: ``offsets`` say where each bag begins.
    Other tensors ``[B, ...]`` are cut.

    Example:
        >>> values, offsets = torch.arange(5), torch.tensor([0, 2])
        >>> bags((values, offsets), 1)
        (tensor([2, 3, 4]), tensor([0]))
    """
    named = isinstance(inputs, dict)
    given = list(inputs.values()) if named else list(inputs)
    values, offsets, *rest = given
    ends = [*offsets.tolist(), len(values)]
    own = slice(ends[i], ends[i + 1])
    found: List[Any] = [values[own], offsets.new_zeros(1)]
    for x in rest:
        if isinstance(x, T):
            x = x[own] if len(x) == len(values) else x[i : i + 1]
        found.append(x)
    return dict(zip(inputs, found)) if named else tuple(found)


def _size_of_bags(inputs: Any) -> int:
    _, offsets, *_ = inputs.values() if isinstance(inputs, dict) else inputs
    return len(offsets)


bags.size = _size_of_bags  # type: ignore[attr-defined]


def graphs(inputs: Any, i: int) -> Any:
    """
    Takes graph ``i`` of ``(x [N, ...], edge_index [2, E], batch [N])``, or of these by
    keyword, as PyTorch Geometric has them: ``batch`` is the graph of each node. From
    other tensors it takes the rows of the graph's nodes (``[N, ...]``), of its edges
    (``[E, ...]``), or the row of the graph itself (``[B, ...]``).

    Example:
        >>> x, batch = torch.arange(3.0)[:, None], torch.tensor([0, 1, 1])
        >>> graphs((x, torch.tensor([[1], [2]]), batch), 1)
        (tensor([[1.],
                [2.]]), tensor([[0],
                [1]]), tensor([0, 0]))
    """
    x, edges, batch = _graphs_of(inputs)
    mine = batch == i
    inside = mine[edges]
    if bool((inside[0] != inside[1]).any()):
        raise Refused(
            f"An edge of graph {i} leads to another graph.",
            parameter="take",
            remedy="Let edge_index number the nodes of the batch, as PyTorch Geometric "
            "does.",
        )
    places = mine.cumsum(0) - 1
    sizes = len(x), edges.shape[1], _size_of_graphs(inputs)
    parts = mine, inside[0], slice(i, i + 1)

    def own(value: Any) -> Any:
        """The graph's part of an input."""
        if value is edges:
            return places[edges[:, inside[0]]]
        if value is batch:
            return batch[mine] * 0
        if value is x:
            return x[mine]
        if not isinstance(value, T) or not value.dim():
            return value
        fit = [part for n, part in zip(sizes, parts) if n == len(value)]
        if len(fit) != 1:
            raise Refused(
                f"It is not known which rows of a tensor {tuple(value.shape)} belong "
                f"to which of {sizes[2]} graphs, with {sizes[0]} nodes and {sizes[1]} "
                "edges.",
                parameter="take",
                remedy="Give make_private(take=function) of your own, where "
                "function(inputs, i) gives graph i as a batch of one.",
            )
        return value[fit[0]]

    if isinstance(inputs, dict):
        return {name: own(value) for name, value in inputs.items()}
    return tuple(map(own, inputs))


def _graphs_of(inputs: Any) -> Any:
    """Returns the nodes, the edges, and the graph of each node."""
    names = "x", "edge_index", "batch"
    named = isinstance(inputs, dict)
    found = [inputs[n] for n in names if n in inputs] if named else inputs[:3]
    if len(found) < 3:
        raise Refused(
            f"Graphs need {', '.join(names)}, all by position or all by keyword.",
            parameter="take",
            remedy="Call the model so, or give make_private a function of your own.",
        )
    return found


def _size_of_graphs(inputs: Any) -> int:
    *_, batch = _graphs_of(inputs)
    return int(batch.max()) + 1 if len(batch) else 0


graphs.size = _size_of_graphs  # type: ignore[attr-defined]


def packed(inputs: Any, i: int) -> Any:
    """
    Takes sequence ``i`` of packed sequences. Tensors ``[layers, B, width]`` beside them
    are recurrent states and cut in dim 1. Other tensors ``[B, ...]`` are cut in dim 0.

    Example:
        >>> from torch.nn.utils.rnn import pack_sequence
        >>> sequences = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        >>> packed((sequences,), 1)[0].batch_sizes
        tensor([1])
    """
    size = _size_of_packed(inputs)

    def own(x: Any) -> Any:
        """The sequence, or the sample's part of a tensor."""
        if isinstance(x, PackedSequence):
            padded, lengths = pad_packed_sequence(x, batch_first=True)
            some = padded[i : i + 1, : int(lengths[i])]
            return pack_padded_sequence(some, lengths[i : i + 1], batch_first=True)
        if not isinstance(x, T):
            return x
        if x.dim() == 3 and x.shape[1] == size:
            return x[:, i : i + 1]
        return x[i : i + 1] if x.dim() and len(x) == size else x

    return tree_map(own, inputs, is_leaf=lambda x: isinstance(x, PackedSequence))


def _size_of_packed(inputs: Any) -> Optional[int]:
    leaves = tree_leaves(inputs, is_leaf=lambda x: isinstance(x, PackedSequence))
    packs = [x.batch_sizes for x in leaves if isinstance(x, PackedSequence)]
    return _one_size({int(x[0]) if len(x) else 0 for x in packs})


packed.size = _size_of_packed  # type: ignore[attr-defined]
