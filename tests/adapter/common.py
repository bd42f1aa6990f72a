"""Steps with fresh data, each beside every sample alone through plain autograd."""

import copy
from typing import Any, Callable, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import nn

from opacus_ext import Refused
from tests.common import (
    assert_same,
    clipped_sum,
    half_clipped,
    make_private,
    oracle,
    square_loss,
    trainable,
)

EVERY_MODE = ("hooks", "functorch", "ghost", "ghost_bk", "scan", "auto")


class Case(NamedTuple):
    """
    Attributes:
        model: makes one
        batches: one each step, tensors or tuples of inputs
        refused: what the error says if it is not exact; None if it is
        loss: ``(model, batch)`` to losses ``[B]``
        batched: which inputs have a batch
        alone: a batch to batches of one, if these are not rows
        kwargs: of make_private
        modes: those it runs in; those in which samples run at once, and one by one
    """

    model: Callable[[], nn.Module]
    batches: Any
    refused: Optional[str] = None
    loss: Callable = square_loss
    batched: Any = None
    alone: Optional[Callable] = None
    kwargs: dict = {}
    modes: Tuple[str, ...] = ("ghost_bk", "scan")


def run(case, mode, wrap=True):
    """Trains the model of a case, or has it refused."""
    torch.manual_seed(0)
    given = dict(loss_fn=case.loss, batched=case.batched, alone=case.alone)
    given.update(case.kwargs)
    if case.refused is None:
        steps(case.model(), case.batches, mode, wrap, **given)
        return
    with pytest.raises(Refused, match=case.refused):
        steps(case.model(), case.batches, mode, wrap, **given)


def every(**tables):
    """Cases by table and name; the first of a table in all modes, and not wrapped."""
    found = []
    for table, cases in tables.items():
        for i, (name, case) in enumerate(cases.items()):
            ways = [(m, True) for m in (case.modes if i else EVERY_MODE)]
            for mode, wrap in ways + [("ghost_bk", False)] * (not i):
                way = mode if wrap else "nowrap"
                found.append(
                    pytest.param(case, mode, wrap, id=f"{table}: {name}-{way}")
                )
    return pytest.mark.parametrize("case, mode, wrap", found)


def steps(model, batches, mode="ghost_bk", wrap=True, loss_fn=square_loss, **kwargs):
    """
    Trains ``model`` on the batches, one after the other, and compares each clipped sum.

    Args:
        kwargs: of ``make_private``; with ``batched`` the inputs that have a batch, with
            ``alone(batch)`` the batches of one, where these are not rows
    """
    batched, alone = kwargs.pop("batched", None), kwargs.pop("alone", None)
    model, clean = model.double(), copy.deepcopy(model).double()

    def grads(batch):
        fresh = copy.deepcopy(clean)  # whatever it keeps, each sample begins anew
        if alone is None:
            return oracle(fresh, batch, loss_fn, batched)
        found = []
        for one in alone(batch):
            each = copy.deepcopy(fresh)
            loss_fn(each, one).sum().backward()
            found.append({n: p.grad for n, p in trainable(each).items()})
        return {n: torch.stack([one[n] for one in found]) for n in found[0]}

    first = grads(batches[0])
    c = half_clipped(first)
    size = max(1, len(next(iter(first.values()))))
    private = make_private(
        model, mode, wrap, batch_size=size, max_grad_norm=c, lr=0.1, **kwargs
    )
    for number, batch in enumerate(batches):
        state = {n: p.detach().clone() for n, p in trainable(model).items()}
        with torch.no_grad():
            for n, p in trainable(clean).items():
                p.copy_(state[n])
        expected = clipped_sum(grads(batch), "flat", c)
        private.step(batch, loss_fn)
        got = {n: p.grad.detach() * size for n, p in trainable(model).items()}
        assert_same(got, expected, 1e-7, f"step {number}")
    return private


def rows(*sizes, T=4, d=3, seed=1):
    """Batches of these sizes, ``[B, T, d]``."""
    generator = torch.Generator().manual_seed(seed)
    made = (
        torch.randn(n, T, d, generator=generator, dtype=torch.double) for n in sizes
    )
    return list(made)
