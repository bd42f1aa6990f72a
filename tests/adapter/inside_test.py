"""Losses that run in one program with a model, as PrivateTrainer's do."""

import pytest
import torch
from torch import nn

from opacus_ext.grad_sample.adapter.settings import settings_of
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


# From torch 2.14 on compiled code tells modes of attributes, too.
ATTRIBUTE = "w.T; write w.t()" if torch.__version__ < "2.14" else None
# By name: a loss, and why it is not compiled.
LOSSES = {
    "around": (lambda m, x: m(x).square().sum() * x.mean(), None),
    "twice": (lambda m, x: (m(x).square() + m(2 * x)).sum(), None),
    "weight": (lambda m, x: (m(x) @ m.one.weight).sum(), None),
    "function": (
        lambda m, x: ByItself.apply(m(x).square().sum(), m.one.bias),
        "vmap over",
    ),
    "no call": (lambda m, x: (x @ m.one.weight.t()).sum(), None),
    "attribute": (lambda m, x: (x @ m.one.weight.mT).sum(), ATTRIBUTE),
    "branch": (lambda m, x: m(x).sum() * (2 if x.sum() > 0 else 1), "x.sum() > 0"),
}


def private_of(model, mode="ghost_bk", **kwargs):
    """Private, and compiled by what needs no C++ compiler."""
    given = {"max_grad_norm": 0.2, **kwargs}
    private = make_private(model, mode, batch_size=4, lr=0.1, **given)
    settings = settings_of(torch.compile(nn.Identity(), backend="aot_eager"))
    private.handle.private.settings = settings
    return private


def backward(private, loss, x, samples=None):
    private.optimizer.zero_grad()
    samples = samples or samples_of(x)[0]
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
    (programs,) = private.handle.private._compiled.values()
    if name == "attribute" and programs.programs:
        reason = None  # torch 2.14 compiles it
    assert len(told) == (reason is not None) and (reason or "") in "".join(told)
    assert bool(programs.programs) == (reason is None)


def test_a_sample_that_is_not_finite():
    """It is dropped with a warning, or refused, as in eager steps."""
    model, plain = build().double(), build().double()
    plain.load_state_dict(model.state_dict())
    private, x = private_of(model), torch.randn(4, 4).double()

    def loss(m, x):
        return (m(x) / (x[..., 0] - 1)).sum()

    backward(private, loss, x)
    x[1, 0] = 1
    with pytest.warns(RuntimeWarning, match="sample 1 is not finite"):
        backward(private, loss, x)
    grads = oracle(plain, x[[0, 2, 3]], lambda m, x: loss(m, x)[None])
    got = {n: p.grad for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", 0.2), 1e-8)
    private.handle.on_nonfinite = "raise"
    with pytest.raises(Refused, match="sample 1 is not finite"):
        backward(private, loss, x)


def test_state_of_the_first_batch_is_refused():
    def stores(m, x):
        module = getattr(m, "_module", m)
        if not hasattr(module, "first"):
            module.first = x.sum()
        return m(x).square().sum()

    private = private_of(build().double())
    with pytest.warns(UserWarning), pytest.raises(Refused, match="changes first"):
        backward(private, stores, torch.randn(4, 4).double())
