"""Ops that a compiled program runs on the whole batch, beside vmap.

Under vmap their kernels ask how many samples there are, and bind the program to that
number: it would be compiled again for each batch size.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.samplewise.functorch import is_batched

T = torch.Tensor
# Called as ``beside(outside, func, *args, **kwargs)``, where ``outside(function,
# *tensors)`` calls a function of whole batches ``[B, *shape]``; None: not this way.
WholeBatchOp = Callable[..., Optional[T]]
WHOLE_BATCH: Dict[Callable, WholeBatchOp] = {}


def on_whole_batch(
    *functions: Optional[Callable],
) -> Callable[[WholeBatchOp], WholeBatchOp]:
    """Registers how some functions of torch are run on whole batches."""

    def decorator(how: WholeBatchOp) -> WholeBatchOp:
        for function in filter(None, functions):
            WHOLE_BATCH[function] = how
        return how

    return decorator


def _named(*names: str, places: Sequence = (torch, T, F)) -> List[Optional[Callable]]:
    return [getattr(place, name, None) for name in names for place in places]


def _are_batched(*values: Any) -> bool:
    return any(isinstance(x, T) and is_batched(x) for x in values)


def _behind(dim: int) -> int:
    """A dim of a sample, behind that of the samples."""
    return dim if dim < 0 else dim + 1


@on_whole_batch(*_named("cat", "concat", "concatenate"))
def _cat(
    outside: Callable, func: Callable, tensors: Sequence[T], dim: int = 0
) -> Optional[T]:
    if len({x.dim() for x in tensors}) > 1:  # empty ones, which torch leaves out
        return None
    return outside(lambda *each: torch.cat(each, _behind(dim)), *tensors)


@on_whole_batch(*_named("gather", "index_select"))
def _index(
    outside: Callable, func: Callable, input: T, dim: int, index: T, **kwargs: Any
) -> Optional[T]:
    if func in (torch.index_select, T.index_select):
        if is_batched(index) or input.dim() == 0:
            return None
        return outside(lambda x: x.index_select(_behind(dim), index), input)
    if input.dim() == 0 or index.dim() != input.dim():
        return None
    return outside(lambda x, i: x.gather(_behind(dim), i), input, index)


@on_whole_batch(*_named("scatter", "scatter_add"))
def _scatter(
    outside: Callable,
    func: Callable,
    input: T,
    dim: int,
    index: T,
    src: Any,
    *rest: Any,
) -> Optional[T]:
    name = func.__name__
    if rest or not isinstance(src, T) or not input.dim():
        return None
    return outside(
        lambda x, i, s: getattr(x, name)(_behind(dim), i, s), input, index, src
    )


@on_whole_batch(F.layer_norm, torch.layer_norm)
def _layer_norm(
    outside: Callable,
    func: Callable,
    input: T,
    normalized_shape: Sequence[int],
    weight: Optional[T] = None,
    bias: Optional[T] = None,
    eps: float = 1e-5,
    *rest: Any,
) -> T:
    shape = tuple(normalized_shape)
    if not _are_batched(weight, bias):
        return outside(lambda x: F.layer_norm(x, shape, weight, bias, eps), input)
    y = outside(lambda x: F.layer_norm(x, shape, eps=eps), input)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@on_whole_batch(F.group_norm, torch.group_norm)
def _group_norm(
    outside: Callable,
    func: Callable,
    input: T,
    num_groups: int,
    weight: Optional[T] = None,
    bias: Optional[T] = None,
    eps: float = 1e-5,
    *rest: Any,
) -> T:
    if not _are_batched(weight, bias):
        return _rows(
            outside, lambda x: F.group_norm(x, num_groups, weight, bias, eps), input
        )
    y = _rows(outside, lambda x: F.group_norm(x, num_groups, eps=eps), input)
    shape = (-1,) + (1,) * (input.dim() - 2)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


@on_whole_batch(F.cross_entropy)
def _cross_entropy(
    outside: Callable,
    func: Callable,
    input: T,
    target: T,
    weight: Optional[T] = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Optional[T]:
    old = (weight, size_average, reduce)
    if any(x is not None for x in old) or target.is_floating_point():
        return None
    if input.dim() < 2 or target.dim() != input.dim() - 1:
        return None

    def rows(x: T, y: T) -> T:
        losses = F.cross_entropy(
            x.flatten(0, 1),
            y.flatten(0, 1),
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        losses = losses.unflatten(0, (y.shape[0], -1))
        if reduction == "none":
            return losses
        total = losses.flatten(1).sum(1)
        if reduction == "sum":
            return total
        return total / (y != ignore_index).flatten(1).sum(1)

    return outside(rows, input, target)


def _rows(outside: Callable, function: Callable, input: T) -> T:
    """What treats dim 0 of a sample, a batch of one, as the batch."""
    return outside(
        lambda x: function(x.flatten(0, 1)).unflatten(0, (x.shape[0], -1)), input
    )


def _spatial(dims: int, *names: str) -> None:
    # Not the methods of a tensor: its unfold is another function, which would see other
    # samples along dim 0.
    @on_whole_batch(*_named(*names, places=(torch, F)))
    def run(
        outside: Callable, func: Callable, input: T, *args: Any, **kwargs: Any
    ) -> Optional[T]:
        others = (*args, *kwargs.values())
        trained = any(isinstance(x, T) and x.requires_grad for x in others)
        if trained or _are_batched(*others):
            return None
        if input.dim() != dims + 2:
            return None
        return _rows(outside, lambda x: func(x, *args, **kwargs), input)


for _dims in (1, 2, 3):
    _spatial(
        _dims,
        *(f"{kind}_pool{_dims}d" for kind in ("max", "avg", "lp")),
        *(f"adaptive_{kind}_pool{_dims}d" for kind in ("max", "avg")),
        f"conv{_dims}d",
        f"conv_transpose{_dims}d",
    )
_spatial(2, "unfold", "pixel_shuffle", "pixel_unshuffle")


@on_whole_batch(F.interpolate, F.instance_norm)
def _images(
    outside: Callable, func: Callable, input: T, *args: Any, **kwargs: Any
) -> Optional[T]:
    others = (*args, *kwargs.values())
    if any(isinstance(x, T) for x in others) or input.dim() < 3:
        return None
    return _rows(outside, lambda x: func(x, *args, **kwargs), input)
