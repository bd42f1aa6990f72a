"""Weights that are computed of parameters, and what a forward writes and defines."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    spectral_norm,
    weight_norm,
)

from tests.common import (
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    layer_modes,
    make_private,
    square_loss,
    trainable,
    wrapped,
)


class Positive(nn.Module):
    def forward(self, w):
        return w.exp()


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.3)


def positive(layer):
    parametrize.register_parametrization(layer, "weight", Positive())
    return layer


WAYS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "positive": positive,
    "weight_norm, a hook": weight_norm,
    "spectral_norm, a hook": spectral_norm,
    "pruned": pruned,
}


@layer_modes
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_parametrized(mode, name):
    """Linear and convolution. Power iterations go on as they do without privacy."""

    def make():
        torch.manual_seed(1)
        layers = WAYS[name](nn.Linear(4, 4)), WAYS[name](nn.Conv1d(1, 4, 2))
        return nn.Sequential(layers[0], nn.Unflatten(1, (1, 4)), layers[1]).double()

    x = torch.randn(3, 4).double()
    alone = [make() for _ in x]  # what a hook has computed can't be deep-copied
    for model, row in zip(alone, x):
        square_loss(model, row[None]).sum().backward()
    columns = zip(*(trainable(model).values() for model in alone))
    grads = [torch.stack([p.grad for p in column]) for column in columns]
    grads = dict(zip(trainable(alone[0]), grads))
    model, c = make(), half_clipped(grads)
    before = {n: p.detach().clone() for n, p in trainable(model).items()}
    private = make_private(model, mode, batch_size=3, max_grad_norm=c)
    private.step(x, square_loss)
    got = {n: (before[n] - p.detach()) * 3 for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c))
    for (n, x), y in zip(model.named_buffers(), alone[0].buffers()):
        assert torch.equal(x, y), n


class Writes(nn.Module):
    """Into tensors of zeros, views of them, and what is made of parameters."""

    def __init__(self):
        super().__init__()
        self.fc, self.w = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4))
        self.r = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        out = h.new_zeros(len(x), 3, 4)
        first = out[:, 0]
        first.copy_(2 * h)
        out[:, 1] = h
        out[:, 2].add_(h.tanh())
        table = self.w + h.new_zeros(len(x), 1, 1)
        table[:, 1] = h
        table[:, 2] *= 2
        made = F.linear(self.w, self.inner.weight)
        made *= self.r  # no longer what F.linear has made
        cast = self.w.clone()
        cast.mul_(self.r)
        rest = F.linear(F.linear(h, made), cast)
        return torch.cat([out.flatten(1), first, table.flatten(1), rest], dim=1)


@layer_modes
@wrapped
@pytest.mark.filterwarnings("error:.*one sample after the other")
def test_written_in_place(mode, wrap):
    check(mode, wrap, Writes().double(), torch.randn(4, 3).double(), square_loss)


class Scaled(torch.autograd.Function):
    """Without ``setup_context``, so that vmap has no rule for it."""

    @staticmethod
    def forward(ctx, x, w, power):
        ctx.save_for_backward(x, w)
        ctx.power = power
        return x.pow(power) * w, x * w

    @staticmethod
    def backward(ctx, first, second):
        x, w = ctx.saved_tensors
        k = ctx.power
        grad = first * k * x.pow(k - 1) * w + second * w
        return grad, (first * x.pow(k) + second * x).sum(0), None


class Defines(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.w = nn.Linear(3, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.cat(Scaled.apply(self.fc(x), self.w, 3), dim=1)


@layer_modes
@wrapped
def test_function_of_autograd(mode, wrap):
    with pytest.warns(UserWarning, match="one sample after the other"):
        check(mode, wrap, Defines().double(), torch.randn(4, 3).double(), square_loss)


class Reversible(torch.autograd.Function):
    """Recomputes a module in its backward pass."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(grad)
        return x.grad, None


@layer_modes
def test_function_that_trains_a_module(mode):
    """What it does to parameters is seen one sample after the other alone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            return Reversible.apply(self.first(x).tanh(), self.second)

    with pytest.warns(UserWarning, match="one sample after the other"):
        check(mode, True, Model().double(), torch.randn(4, 3).double(), square_loss)


@layer_modes
def test_parts_of_a_batch(mode):
    """Samples that take another branch: what is kept of each part is its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, (65, 1), padding=(32, 0), groups=2, bias=False)
            self.fc = nn.Linear(2, 3)

        def forward(self, x):
            signs = [bool(row.sum() > 0) for row in x]
            scale = torch.tensor(signs).to(x)[:, None, None, None] + 1
            return self.fc((scale * self.conv(x)).transpose(1, 3))

    x = torch.randn(5, 2, 12, 8).double()
    x[:3] = x[:3].abs()
    x[3:] = -x[3:].abs()
    check(mode, True, Model().double(), x, square_loss)
