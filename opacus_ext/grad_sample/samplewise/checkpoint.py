"""Activation checkpointing inside of a run, of both kinds.

torch's own checkpoint runs on the whole batch, outside of vmap, around a block that
enters it again: so do the block's recomputation in the backward pass, and the captures
inside keep their data where checkpointing keeps it.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.walk import map_tensors
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.run import Run


@contextmanager
def checkpointed(run: "Run") -> Iterator[None]:
    """Within it checkpoints are taken of whole batches."""
    with functorch.checkpoints(functools.partial(_checkpoint, run)):
        yield


_SETTINGS = (
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "preserve_rng_state",
    "use_reentrant",
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
    if not torch.is_grad_enabled() or run.inactive:
        return plain(*args, **kwargs)
    _pin_closure(run, plain)
    leaves, spec = tree_flatten((args, kwargs))
    wrapped = [isinstance(x, torch.Tensor) and is_batched(x) for x in leaves]
    shapes: List[Any] = []

    def block(*whole: Any) -> Tuple[Any, ...]:
        with run.reentered(recomputed=bool(shapes)) as level:
            inside = [level.wrap(x) if w else x for x, w in zip(whole, wrapped)]
            args, kwargs = tree_unflatten(inside, spec)
            out, shape = tree_flatten(plain(*args, **kwargs))
            shapes[:] = [shape, [is_batched(x) for x in out]]
            return tuple(level.unwrap(x) if b else x for x, b in zip(out, shapes[1]))

    reentrant = is_reentrant(settings)
    settings["use_reentrant"] = False
    with run.outside():
        whole = [run.level.unwrap(x) if w else x for x, w in zip(leaves, wrapped)]
        out = checkpoint(block, *whole, **settings)
        if reentrant:
            refuse_not_entered(run.engine, whole, out)
    shape, batched = shapes
    out = [run.track(run.level.wrap(x)) if b else x for x, b in zip(out, batched)]
    result = tree_unflatten(out, shape)
    return as_reentrant(result, run.track) if reentrant else result


# -- the reentrant kind, told apart from the other by what gets no gradient ------------


def is_reentrant(settings: Dict[str, Any]) -> bool:
    """Whether these arguments of ``checkpoint`` ask for the reentrant kind."""
    return settings.get("use_reentrant") in (True, None)


def refuse_not_entered(
    engine: "Engine", inputs: Iterable[Any], outputs: Iterable[Any]
) -> None:
    """
    Raises:
        Refused: if parameters inside get gradients, and would get none by plain
            autograd
    """
    if any(map(_is_trained, outputs)) and not any(map(_is_trained, inputs)):
        raise Refused(
            f"{engine.describe()}: no gradient enters a reentrant checkpoint, so the "
            "parameters inside would get none by plain autograd.",
            module=engine.describe(),
            remedy=(
                "Use use_reentrant=False, or let its inputs require gradients "
                "(model.enable_input_require_grads() in transformers)."
            ),
        )


def _is_trained(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def as_reentrant(result: Any, track: Callable = lambda x: x) -> Any:
    """
    Of nested outputs those of the first level alone have gradients.

    Args:
        track: what is done with those of samples that are cut off
    """

    def cut(x: torch.Tensor) -> torch.Tensor:
        return track(x.detach()) if is_batched(x) else x.detach()

    if isinstance(result, torch.Tensor):
        return result
    if type(result) is tuple:
        parts = (
            x if isinstance(x, torch.Tensor) else map_tensors(cut, x) for x in result
        )
        return tuple(parts)
    return map_tensors(cut, result)
