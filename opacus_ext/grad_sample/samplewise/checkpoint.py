"""Activation checkpointing inside of a run, of both kinds.

torch's own checkpoint runs on the whole batch, outside of vmap, around a block that
enters it again: so do the block's recomputation in the backward pass, and the captures
inside keep their data where checkpointing keeps it.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.run import Refused
from opacus_ext.grad_sample.samplewise.walk import map_tensors

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.run import Run


@contextmanager
def checkpointed(run: "Run") -> Iterator[None]:
    """Within it checkpoints are taken of whole batches."""
    with functorch.checkpoints(functools.partial(_checkpoint, run)):
        yield


_SETTINGS = (
    *("context_fn", "determinism_check", "debug", "early_stop"),
    *("preserve_rng_state", "use_reentrant"),
)


def arguments_of(
    function: Callable, args: tuple, kwargs: Dict[str, Any]
) -> Tuple[Callable, tuple, Dict[str, Any], Dict[str, Any]]:
    """
    Of a call of ``checkpoint`` the function without its partials, all that it is
    given, and the settings.
    """
    settings = {n: kwargs[n] for n in _SETTINGS if n in kwargs}
    kwargs = {n: x for n, x in kwargs.items() if n not in settings}
    while isinstance(function, functools.partial):
        args, kwargs = function.args + args, {**function.keywords, **kwargs}
        function = function.func
    return function, args, kwargs, settings


def _pin_closure(run: "Run", function: Any) -> None:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        for x in tree_flatten(value)[0]:
            if isinstance(x, torch.Tensor) and is_batched(x):
                run.pin(x)
        if callable(value) and not isinstance(value, torch.nn.Module):
            _pin_closure(run, value)


def _checkpoint(
    run: "Run", checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any
) -> Any:
    plain, args, kwargs, settings = arguments_of(function, args, kwargs)
    if not torch.is_grad_enabled() or run.away:
        return plain(*args, **kwargs)
    _pin_closure(run, plain)
    leaves, spec = tree_flatten((args, kwargs))
    wrapped = [isinstance(x, torch.Tensor) and is_batched(x) for x in leaves]
    shapes: List[Any] = []

    def block(*whole: Any) -> Tuple[Any, ...]:
        with run.entered_again(recomputed=bool(shapes)) as level:
            inside = [level.wrap(x) if w else x for x, w in zip(whole, wrapped)]
            args, kwargs = tree_unflatten(inside, spec)
            out, shape = tree_flatten(plain(*args, **kwargs))
            shapes[:] = [shape, [is_batched(x) for x in out]]
            return tuple(level.unwrap(x) if b else x for x, b in zip(out, shapes[1]))

    reentrant = settings.get("use_reentrant") in (True, None)
    settings["use_reentrant"] = False
    with run.outside():
        whole = [run.level.unwrap(x) if w else x for x, w in zip(leaves, wrapped)]
        out = checkpoint(block, *whole, **settings)
        if reentrant and not any(is_trained(x) for x in whole):
            if any(is_trained(x) for x in out):
                raise Refused(NOT_ENTERED.format(run.engine.describe()))
    shape, batched = shapes
    out = [run.track(run.level.wrap(x)) if b else x for x, b in zip(out, batched)]
    result = tree_unflatten(out, shape)
    return _as_reentrant(run, result) if reentrant else result


NOT_ENTERED = (
    "{}: no gradient enters a reentrant checkpoint, so the parameters inside would get "
    "none by plain autograd. Use use_reentrant=False, or let its inputs require "
    "gradients (model.enable_input_require_grads() in transformers)."
)


def is_trained(x: Any) -> bool:
    """Whether gradients flow through it."""
    return isinstance(x, torch.Tensor) and x.requires_grad


def _as_reentrant(run: "Run", result: Any) -> Any:
    """Of nested outputs those of the first level alone have gradients."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        return run.track(x.detach()) if is_batched(x) else x.detach()

    if isinstance(result, torch.Tensor):
        return result
    if type(result) is tuple:
        parts = (
            x if isinstance(x, torch.Tensor) else map_tensors(cut, x) for x in result
        )
        return tuple(parts)
    return map_tensors(cut, result)
