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


def steps(model, batches, mode="ghost_bk", wrap=True, loss_fn=square_loss, **kwargs):
    """
    Trains ``model`` on the batches, one after the other, and compares each clipped sum.

    Args:
        kwargs: of ``make_private``; with ``batched`` the inputs that have a batch, and
            ``alone(batch)`` the batches of one, where these are not rows
    """
    batched, alone = kwargs.pop("batched", None), kwargs.pop("alone", None)
    model, clean = model.double(), copy.deepcopy(model).double()

    def grads(batch):
        if alone is None:
            return oracle(clean, batch, loss_fn, batched)
        ones = [oracle(clean, one, loss_fn, [0]) for one in alone(batch)]
        return {n: torch.cat([one[n] for one in ones]) for n in ones[0]}

    first = grads(batches[0])
    c = half_clipped(first)
    size = len(next(iter(first.values())))
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
