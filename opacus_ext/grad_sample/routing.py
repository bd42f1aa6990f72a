"""Rows that were gathered by an index, as the tokens of an expert are.

What an expert was given differs from sample to sample, and there are two ways to have
it by sample: :func:`expert_batching`. Which sample a row came from is written in
autograd's graph: the op that gathered it has kept its index. What is read there is a
guess like any other layout, and checked on the gradients (layout.py).
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

# Ops that may move rows from one place to another by what the data say.
MOVES = ("Index", "Gather", "Scatter", "Sort", "Topk", "Flip", "Roll", "Take")
MOVES += ("Masked", "Unique", "Kthvalue")


# Ops between a gather and the layer before it that may put rows in another order, where
# they work on the leading dim.
_REORDERS = ("TBackward", "Numpy_T", "Transpose", "Permute", "Swap", "Movedim", "Rot90")
_REORDERS += ("Cat", "Stack", "Split", "Slice", "Unbind", "Select", "Unfold", "AsStr")
_REORDERS += ("Mm", "Bmm", "Sparse", "Embedding", "Expand", "Repeat", "Diagonal")

_RAW = ("_raw_saved_indices", "_raw_saved_index", "_raw_saved_self", "_raw_saved_mat2")

_BATCHING = "gathered"


def expert_batching(way: Optional[str] = None) -> str:
    """
    How the tokens that experts were given are arranged for their per-sample gradients.
    Both ways give the same numbers.

    - "gathered": as they are, beside a table that names the sample (and, where experts
      are stacked in one parameter, the expert) of each. Time and memory grow with the
      number of tokens, whatever the experts' load (the paper's appendix).
    - "padded": each expert's tokens as ``[B, C_max, width]``, zeros after the last one
      of a sample, ``C_max`` the most that one expert was given of one sample (the
      paper's main text). Products of one shape only; the more uneven the load and the
      more experts, the more of them is padding. It wins, by a few percent, where
      experts are stacked and each sample uses all of them alike (benchmarks/moe.py).

    Args:
        way: "gathered" or "padded"; None leaves it as it is

    Returns:
        The way in force before the call.

    Raises:
        ValueError: for another word

    Source:
        DP mixture of experts, "Expert per-sample gradient computation" (padded; here
        only the per-sample gradients see the padding, not the experts) and appendix
        (gathered).

    Example:
        >>> import opacus_ext
        >>> before = opacus_ext.expert_batching("padded")
        >>> opacus_ext.expert_batching(before)
        'padded'
    """
    global _BATCHING
    before = _BATCHING
    if way is not None:
        if way not in ("gathered", "padded"):
            raise ValueError(
                f'expert_batching takes "gathered" or "padded", got {way!r}.'
            )
        _BATCHING = way
    return before


class Routing(NamedTuple):
    """
    The sample of each row, and the memory of the index tensors that say so. Of rows
    that came from all processes (parallel.py) the samples are counted through all of
    them, and it is known how many they are. ``above`` is the layer's record that the
    rows were gathered behind: theirs is the right order if its rows are sample-major.
    """

    samples: torch.Tensor
    indices: Set[int] = set()
    batch_size: Optional[int] = None
    above: Any = None


def index_tensors(node: Any) -> List[torch.Tensor]:
    """The index tensors of a graph node that moves rows; those it shows, at least."""
    found: List[torch.Tensor] = []
    for name in ("_saved_indices", "_saved_index"):
        saved = getattr(node, name, None)
        many = saved if isinstance(saved, (list, tuple)) else [saved]
        found += [x for x in many if isinstance(x, torch.Tensor)]
    return found


def recomputes(node: Any) -> bool:
    """
    Whether to look at the index tensors of a graph node would compute them again
    (activation checkpointing): in a forward pass, and not in all processes.
    """
    for name in _RAW:
        saved = getattr(node, name, None)
        many = saved if isinstance(saved, (list, tuple)) else [saved]
        if any(getattr(x, "unpack_hook", None) is not None for x in many):
            return True
    return False


def pointers(tensors: Sequence[torch.Tensor]) -> Set[int]:
    """Where the tensors lie in memory."""
    return {x.untyped_storage().data_ptr() for x in tensors}


def read_routing(x: torch.Tensor, batch_size: int) -> Optional[Routing]:
    """
    The sample of each row of ``x`` ``[rows, ...]``, if its rows were gathered from
    ``[B, ...]`` or from sample-major rows ``[B * T, ...]``; else None.
    """
    node = x.grad_fn
    for _ in range(32):
        if node is None:
            return None
        record = getattr(node, "record", None)
        if record is not None:
            routing = record.routing
            fits = routing is not None and len(routing.samples) == len(x)
            return routing if fits else None
        index = index_tensors(node)
        if index:
            if batch_size < 2:
                return None
            samples = _samples(node, index, batch_size)
            if samples is None or len(samples) != len(x):
                return None
            in_order, above = _in_order(node)
            return Routing(samples, pointers(index), above=above) if in_order else None
        node = _parent(node)
    return None


def _parent(node: Any) -> Any:
    return next((n for n, _ in node.next_functions if n is not None), None)


def _in_order(gather: Any) -> Tuple[bool, Any]:
    """
    Whether the rows that were gathered stood in the order of the samples, if they did
    so behind the nearest layer, and the record of that: not where they had been moved
    before themselves.
    """
    node = _parent(gather)
    for _ in range(32):
        if node is None:
            return True, None
        record = getattr(node, "record", None)
        if record is not None:
            return record.routing is None, record
        name = node.name()
        if name.startswith(MOVES) and not name.startswith("MaskedFill"):
            return False, None
        if name.startswith(_REORDERS) and _reorders(node):
            return False, None
        node = _parent(node)
    return False, None


def _reorders(node: Any) -> bool:
    """Whether an op works on the leading dim, or may do so."""
    after = shape_of(node, 0)
    child = next((c for c in node.next_functions if c[0] is not None), (None, 0))
    before = shape_of(*child)
    if not after or not before:
        return True
    dims = [getattr(node, f"_saved_{n}", None) for n in ("dim", "dim0", "dim1")]
    dims = [d - (d >> 63 << 64) for d in dims if isinstance(d, int)]
    if dims:
        return any(d % max(len(after), len(before)) == 0 for d in dims)
    order = getattr(node, "_saved_dims", None)
    if order:
        return order[0] not in (0, 2**64 - len(before))
    same = len(after) >= len(before) > 1 and after[0] == before[0]
    return not (same and node.name().startswith(("Expand", "Repeat")))


def shape_of(node: Any, number: int) -> Optional[Tuple[int, ...]]:
    """The shape of an output of an op; None where it is not known."""
    kept = getattr(node, "_input_metadata", None)
    if not kept or number >= len(kept):
        return None
    return tuple(kept[number].shape)


def _samples(
    node: Any, index: List[torch.Tensor], batch_size: int
) -> Optional[torch.Tensor]:
    if not node.name().startswith("Index") or "Put" in node.name():
        return None
    sizes = list(getattr(node, "_saved_self_sym_sizes", ()))
    saved = getattr(node, "_saved_indices", None)
    if saved is None:  # index_select
        dim = getattr(node, "_saved_dim", 0)
    else:
        dim = next((i for i, y in enumerate(saved) if y is not None), 0)
    first = index[0]
    if first.dtype in (torch.bool, torch.uint8):
        first = first.nonzero()[:, 0]
    if any(n != 1 for n in sizes[:dim]) or dim >= len(sizes):
        return None
    size = sizes[dim]
    if size == 0 or size % batch_size:
        return None
    first = first.flatten()
    return torch.where(first < 0, first + size, first) // (size // batch_size)
