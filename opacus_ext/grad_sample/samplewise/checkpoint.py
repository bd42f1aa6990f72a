"""Activation checkpointing inside of a run, of both kinds.

torch's own checkpoint runs on the whole batch, outside of vmap, around a block that
enters it again: so do the block's recomputation in the backward pass, and the captures
inside keep their data where checkpointing keeps it.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.functorch import is_batched

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.run import Run


@contextmanager
def checkpointed(run: "Run") -> Iterator[None]:
    """Within it checkpoints are taken of whole batches."""
    with functorch.checkpoints(functools.partial(_checkpoint, run)):
        yield


def _inner_function(function: Any) -> Tuple[Any, List[Any]]:
    """A partial as its function and all that it is given."""
    if isinstance(function, functools.partial):
        inner, given = _inner_function(function.func)
        return inner, [(function.args, function.keywords), *given]
    return function, []


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


_SETTINGS = (
    *("context_fn", "determinism_check", "debug", "early_stop"),
    "preserve_rng_state",
)


def _checkpoint(
    run: "Run",
    checkpoint: Callable,
    function: Callable,
    *args: Any,
    use_reentrant: Any = None,
    **kwargs: Any,
) -> Any:
    settings = {name: kwargs.pop(name) for name in _SETTINGS if name in kwargs}
    if not torch.is_grad_enabled() or run.away:
        return function(*args, **kwargs)
    plain, given = _inner_function(function)
    _pin_closure(run, plain)
    leaves, spec = tree_flatten((args, kwargs, given))
    wrapped = [isinstance(x, torch.Tensor) and is_batched(x) for x in leaves]
    shapes: List[Any] = []

    def block(*whole: Any) -> Tuple[Any, ...]:
        with run.entered_again(recomputed=bool(shapes)) as level:
            inside = [level.wrap(x) if w else x for x, w in zip(whole, wrapped)]
            args, kwargs, given = tree_unflatten(inside, spec)
            call = plain
            for more, named in reversed(given):
                call = functools.partial(call, *more, **named)
            out, shape = tree_flatten(call(*args, **kwargs))
            shapes[:] = [shape, [is_batched(x) for x in out]]
            return tuple(level.unwrap(x) if b else x for x, b in zip(out, shapes[1]))

    with run.outside():
        whole = [run.level.unwrap(x) if w else x for x, w in zip(leaves, wrapped)]
        out = checkpoint(block, *whole, use_reentrant=False, **settings)
    shape, batched = shapes
    out = [run.track(run.level.wrap(x)) if b else x for x, b in zip(out, batched)]
    return tree_unflatten(out, shape)
