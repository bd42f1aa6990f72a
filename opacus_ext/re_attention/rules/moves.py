"""
Operations that move elements, or leave them as they are.

In evaluation the batch is a dimension as others are. A mean over the last dimension
would make one sample's variance depend on the others, so that the error is lost where
a move brings the batch to the last place.
"""

from __future__ import annotations

from typing import Any, List

import torch
from torch import Tensor

from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import Lost, Variance, tidy, variance_dtype

_MOVES = (
    "view reshape flatten unflatten transpose t T mT permute movedim expand expand_as "
    "view_as unsqueeze squeeze chunk split split_with_sizes unbind getitem select "
    "narrow flip roll repeat repeat_interleave index_select gather"
).split()
_COPIES = (
    "contiguous clone detach data to float double half bfloat16 type type_as cpu cuda "
    "neg abs clamp clamp_min clamp_max"
).split()
# These may bring the batch to the last place.
_TURNS = frozenset("transpose t T mT permute movedim".split())
_RESHAPED = frozenset("view reshape flatten view_as".split())
# These know of a tensor of one dimension what it is.
_PLACING = frozenset("stack setitem".split())


@register_propagation(*_MOVES)
def _moved(call: Call) -> Result:
    x = call.args[0]
    known = call.variance(x)
    if known is None:
        return None  # an index or a fill value has the error
    if call.name in _TURNS and _turned(call, x, known):
        return Lost(call.name)
    move, args, kwargs = call.func, call.args[1:], call.kwargs
    if call.name in ("view", "view_as"):
        if args and isinstance(args[0], torch.dtype):
            return Lost("view")
        # What is expanded can't be viewed in every form that x can.
        move = Tensor.reshape if call.name == "view" else Tensor.reshape_as
    merged = call.out.dim() - 1 if isinstance(call.out, Tensor) else x.dim()
    if known.passed is None and 0 < merged < x.dim() and call.name in _RESHAPED:
        if x.shape[:merged] == call.out.shape[:-1]:
            # The last dimensions become one: their mean, of what is not repeated.
            own = known.own[(None,) * (x.dim() - known.own.dim())]
            return Variance(own.flatten(merged).mean(-1, keepdim=True))
    parts: List[Any] = []
    for part in known:
        moved = None if part is None else move(part.expand(x.shape), *args, **kwargs)
        parts.append(list(moved) if isinstance(moved, (list, tuple)) else moved)
    if isinstance(parts[0], list):
        rest = [part or [None] * len(parts[0]) for part in parts[1:]]
        return [tidy(Variance(*each)) for each in zip(parts[0], *rest)]
    return tidy(Variance(*parts))


@register_propagation("pad")
def _pad(call: Call) -> Result:
    kwargs = {k: v for k, v in call.kwargs.items() if k != "value"}
    return _moved(call._replace(args=call.args[:3], kwargs=kwargs))


@register_propagation("copy")
def _copied(call: Call) -> Result:
    return call.variance(call.arg(1, "src"))


@register_propagation("zero", "fill")
def _filled(call: Call) -> Result:
    return None


@register_propagation(*_COPIES)
def _unchanged(call: Call) -> Result:
    # |x| and what is clamped far from its bounds, as it should be, err as x does.
    known = call.variance(call.args[0])
    dtype = variance_dtype(call.out)
    if known is not None and known.own.dtype != dtype:
        return Variance(*(None if z is None else z.to(dtype) for z in known))
    return known


def _turned(call: Call, x: Tensor, known: Variance) -> bool:
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
    return call.name not in _RESHAPED | {"unflatten"} or out.size(0) == 1
