"""Experts in a run of samples: on the whole batch, with the sample of each row known."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Sequence

import torch
from torch import nn

from opacus_ext.grad_sample.parallel import spread, spread_rows
from opacus_ext.grad_sample.rules.experts import (
    Routes,
    expert_factors,
    expert_linear,
    route,
    send,
    send_rows,
)
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.native import copies
from opacus_ext.grad_sample.samplewise.run import Run, Use, handles

T = torch.Tensor
Expert = Callable[[T], T]


@handles(route)
def _route(run: Run, func: Callable, index: T, size: int) -> Routes:
    inner = run.inner(index)
    with run.outside():
        return func(inner, size)


@handles(expert_linear)
def _expert_linear(
    run: Run,
    func: Callable,
    x: T,
    routes: Routes,
    weight: T,
    bias: Optional[T] = None,
    transposed: bool = False,
) -> T:
    if is_batched(weight) or (bias is not None and is_batched(bias)):
        raise NotImplementedError("experts of each sample")
    inner = run.inner(copies(run, x))
    roots, shared = [], []
    for p in (weight, bias):
        noted = p is not None and p.requires_grad and torch.is_grad_enabled()
        roots.append(run.root(p) if noted else None)
        shared.append(roots[-1].shared if noted else p)
    with run.outside():
        y = func(inner, routes, *shared, transposed)
    if any(roots):
        rows = inner.dim() - 2
        index = routes.index.view(inner.shape[:-1])
        factors = functools.partial(
            expert_factors, len(weight), transposed, run.dealing
        )
        y = run._note(y, Use(run, tuple(roots), factors, rows, (rows, rows)), [index, inner])
    return run.level.wrap(y)


@handles(send)
def _send(run: Run, func: Callable, x: T, index: T, experts: Sequence[Expert]) -> T:
    if run.dealing:
        raise NotImplementedError("experts inside of experts")
    x, index = run.inner(copies(run, x)), run.inner(index)
    rows, chosen = x.flatten(0, -2), index.flatten()
    each = max(1, len(chosen) // max(1, run.size))  # rows a sample

    def one(expert: Expert) -> Callable[[T, T], T]:
        return lambda some, where: on_rows(run, expert, some, where // each, run.size)

    with run.outside():
        y = send_rows(rows, chosen, [one(expert) for expert in experts])
        return run.level.wrap(y.view(x.shape))


@handles(spread)
def _spread(run: Run, func: Callable, x: T, index: T, layer: nn.Module) -> T:
    if run.dealing:
        raise NotImplementedError("experts inside of experts")
    x, index = run.inner(copies(run, x)), run.inner(index)
    anchor = run.engine.anchor if torch.is_grad_enabled() else None

    def here(function: Expert, rows: T, samples: T) -> T:
        return on_rows(run, function, rows, samples, layer.world.batch_size)

    with run.outside():
        y = spread_rows(x.flatten(0, -2), index.flatten(), layer, here, anchor)
        return run.level.wrap(y.view(x.shape))


def on_rows(
    run: Run, function: Expert, rows: T, samples: T, size: int
) -> T:
    """
    A function of rows of known samples, each by itself.

    Args:
        rows: ``[rows, width]``
        samples: of each
        size: how many samples these are numbers of

    Returns:
        ``[rows, width]``
    """
    with run.dealt(samples, size) as level:
        y = level.unwrap(function(level.wrap(rows.unsqueeze(1))))
    return y.flatten(0, 1)
