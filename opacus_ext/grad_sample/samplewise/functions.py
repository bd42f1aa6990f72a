"""Autograd functions that vmap can't run: each sample by itself, stacked."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.native import NATIVE, call_outside, copies

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.run import Run

T = torch.Tensor


@contextmanager
def functions_by_sample(run: "Run") -> Iterator[None]:
    """Within it such functions are called for each sample."""
    with functorch.functions(functools.partial(_apply, run)):
        yield


def _is_known(function: type) -> bool:
    """Whether vmap knows what to do with it."""
    own = torch.autograd.Function
    two = function.setup_context is not own.setup_context
    return two and (function.generate_vmap_rule or function.vmap is not own.vmap)


def _apply(run: "Run", function: type, apply: Callable, *args: Any) -> Any:
    leaves, spec = tree_flatten(args)
    if run.inactive or not any(isinstance(x, T) and is_batched(x) for x in leaves):
        return apply(*args)
    if function in NATIVE:
        return call_outside(run, apply, args, {})
    if _is_known(function):
        return apply(*args)
    plain = (T, int, float, complex, str, bool, type(None), torch.dtype, torch.device)
    if not all(isinstance(x, plain) for x in leaves):
        # It could use parameters that are not among its arguments.
        raise NotImplementedError(
            f"{function.__name__} takes modules or other objects, and vmap has no rule "
            "for it"
        )
    if not run.level.innermost:
        raise NotImplementedError(f"{function.__name__} inside of another transform")
    leaves = [copies(run, x) for x in leaves]
    batched = [isinstance(x, T) and is_batched(x) for x in leaves]
    whole = [run.level.unwrap(x) if b else x for x, b in zip(leaves, batched)]
    with run.outside():
        each = []
        for b in range(run.size):
            alone = [x[b] if own else x for x, own in zip(whole, batched)]
            each.append(tree_flatten(apply(*tree_unflatten(alone, spec))))
        shape = each[0][1]
        out = [_stacked(column) for column in zip(*(found for found, _ in each))]
    return tree_unflatten(
        [run.track(run.level.wrap(x)) if isinstance(x, T) else x for x in out], shape
    )


def _stacked(column: tuple) -> Any:
    if isinstance(column[0], T):
        return torch.stack(column)
    if any(x != column[0] for x in column):
        raise NotImplementedError("numbers that differ from sample to sample")
    return column[0]
