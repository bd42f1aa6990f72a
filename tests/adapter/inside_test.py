"""Losses that run eagerly round a compiled model, as PrivateTrainer's do."""

import pytest
import torch
from torch import nn

from opacus_ext.grad_sample.core.dynamo import settings_of
from opacus_ext.grad_sample.core.groups import samples_of
from opacus_ext.refused import Refused
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    net,
    oracle,
    trainable,
)

build = net(lambda m, x: m.one(x).tanh(), one=(4, 3))


class ByItself(torch.autograd.Function):
    """A use of a parameter that no torch function shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w.sum(), (grad * x).sum() * torch.ones_like(w)


# By name: a loss, and why it is not compiled.
LOSSES = {
    "around": (lambda m, x: m(x).square().sum() * x.mean(), None),
    "twice": (lambda m, x: (m(x).square() + m(2 * x)).sum(), "model twice"),
    "weight": (lambda m, x: (m(x) @ m.one.weight).sum(), "by itself"),
    "function": (
        lambda m, x: ByItself.apply(m(x).square().sum(), m.one.bias),
        "by itself",
    ),
    "no call": (lambda m, x: (x @ m.one.weight.mT).sum(), None),
}


def private_of(model):
    """Private, and compiled by what needs no C++ compiler."""
    private = make_private(model, "ghost_bk", batch_size=4, max_grad_norm=0.2, lr=0.1)
    settings = settings_of(torch.compile(nn.Identity(), backend="aot_eager"))
    private.handle.private.settings = settings
    return private


def backward(private, loss, x):
    private.optimizer.zero_grad()
    samples, _ = samples_of(x)
    private.handle.clip(
        private.optimizer, samples, lambda sample: loss(private.module, sample)
    )


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, recwarn):
    loss, reason = LOSSES[name]
    model, plain = build().double(), build().double()
    private = private_of(model)
    for size in (4, 3, 0, 1, 4):
        x = torch.randn(size, 4).double()
        plain.load_state_dict(model.state_dict())
        grads = oracle(plain, x, lambda m, x: loss(m, x)[None])
        backward(private, loss, x)
        got = {n: p.grad for n, p in trainable(model).items()}
        assert_same(got, clipped_sum(grads, "flat", 0.2), 1e-8)
        private.optimizer.step()
    told = [str(w.message) for w in recwarn if "not compiled" in str(w.message)]
    assert len(told) == (reason is not None) and (reason or "") in "".join(told)
    programs = private.handle.private._compiled
    assert bool(programs) == (name != "no call")


def test_state_of_the_first_batch_is_refused():
    def stores(m, x):
        module = getattr(m, "_module", m)
        if not hasattr(module, "first"):
            module.first = x.sum()
        return m(x).square().sum()

    private = private_of(build().double())
    with pytest.warns(UserWarning), pytest.raises(Refused, match="changes first"):
        backward(private, stores, torch.randn(4, 4).double())
