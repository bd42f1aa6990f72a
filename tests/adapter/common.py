"""Steps with fresh data, each beside every sample alone through plain autograd."""

import copy

import torch

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
