"""Where the batch is: of what has it in the last place no mean over the width is taken.

In evaluation the batch is a dimension as others are, and a mean over it would make one
sample's variance depend on the others.
"""

from __future__ import annotations

from typing import Union

from torch import Tensor

from opacus_ext.re_attention.rules.registry import Call
from opacus_ext.re_attention.variances import (
    Lost,
    Variance,
    tidy,
)

# These may bring the batch to the last place.
TURNS = frozenset(
    "transpose t permute movedim moveaxis swapaxes swapdims T mT H mH adjoint".split()
)
# These may bring it back from there.
BACK = frozenset("view reshape flatten unflatten unsqueeze contiguous clone".split())
RESHAPED = frozenset(("view", "reshape", "flatten", "view_as", "reshape_as"))
# These know of a tensor of one dimension what it is.
_PLACING = frozenset("stack einsum setitem".split())


def turned(call: Call, x: Tensor, known: Variance) -> bool:
    """
    Whether the first dimension, along which variances differ, became the last: their
    mean would be one over samples, and a sample's gradient would depend on others.
    """
    if not any(p is not None and p.dim() == x.dim() and p.size(0) > 1 for p in known):
        return False
    first = x.new_zeros((x.size(0),) + (1,) * (x.dim() - 1)).expand(x.shape)
    return call.func(first, *call.args[1:], **call.kwargs).stride(-1) != 0


def turned_on(call: Call, lost: Lost) -> Union[Variance, Lost]:
    """A move of what has, or gets, the batch in the last place."""
    x, (known, samples) = call.args[0], lost.turned
    # What is expanded can't be viewed in every form that x can.
    move = Tensor.reshape if call.name == "view" else call.func
    parts = [
        None if z is None else move(z.expand(x.shape), *call.args[1:], **call.kwargs)
        for z in (*known, samples)
    ]
    known, samples = Variance(*parts[:-1]), parts[-1]
    if samples.dim() < 2 or bool((samples == samples[..., :1]).all()):
        return tidy(known)
    return Lost(lost.operation, (known, samples))


def lies_down(call: Call, known: Variance) -> bool:
    """
    Whether a tensor of one dimension, which may well be the batch, becomes the last one
    of several. If it has rows of its own (``[B * T]`` as ``[B, T]``) it does not.
    """
    out = call.out
    if known.own.dim() != 1 or known.own.size(0) == 1 or call.name in _PLACING:
        return False
    if not isinstance(out, Tensor) or out.dim() < 2 or out.size(-1) == 1:
        return False
    return call.name not in RESHAPED | {"unflatten"} or out.size(0) == 1
