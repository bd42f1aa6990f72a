"""
Moves that bring the batch to the last place, where the error is lost.

In evaluation the batch is a dimension as others are. A mean over the last dimension
would make one sample's variance depend on the others.
"""

from __future__ import annotations

from torch import Tensor

from opacus_ext.re_attention.rules.registry import Call
from opacus_ext.re_attention.variances import Variance

# These may bring the batch to the last place.
TURNS = frozenset("transpose t T mT permute movedim".split())
RESHAPED = frozenset("view reshape flatten view_as".split())
# These know of a tensor of one dimension what it is.
_PLACING = frozenset("stack einsum setitem".split())


def turned(call: Call, x: Tensor, known: Variance) -> bool:
    """
    Returns True if a move brings the first dimension, along which variances differ, to
    the last place.
    """
    if not any(p is not None and p.dim() == x.dim() and p.size(0) > 1 for p in known):
        return False
    first = x.new_zeros((x.size(0),) + (1,) * (x.dim() - 1)).expand(x.shape)
    return call.func(first, *call.args[1:], **call.kwargs).stride(-1) != 0


def lies_down(call: Call, known: Variance) -> bool:
    """
    Returns True if a tensor of one dimension, which may be the batch, becomes the last
    dimension of several. It does not with rows of its own (``[B * T]`` as ``[B, T]``).
    """
    out = call.out
    if known.own.dim() != 1 or known.own.size(0) == 1 or call.name in _PLACING:
        return False
    if not isinstance(out, Tensor) or out.dim() < 2 or out.size(-1) == 1:
        return False
    return call.name not in RESHAPED | {"unflatten"} or out.size(0) == 1
