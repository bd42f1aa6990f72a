"""No sample reaches another: each is computed as a batch of one."""

import copy

import pytest
import torch
from torch import nn

from tests.common import MODES, check, exact_or_refused, make_private, square_loss


class Centered(nn.Module):
    """Subtracts a batch mean, which for a sample alone is its own."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        if self.how == "input":
            x = x - x.mean(0)
        h = self.first(x)
        if self.how == "detached":
            h = h - h.mean(0).detach()
        if self.how == "no_grad":
            with torch.no_grad():
                mean = h.mean(0)
            h = h - mean
        return self.last(torch.tanh(h))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["input", "detached", "no_grad"])
def test_statistics_are_those_of_the_sample(mode, how):
    x = torch.randn(4, 3).double()
    check(mode, True, Centered(how).double(), x, square_loss)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3, affine=False), "frozen"])
def test_running_statistics_are_refused(mode, layer):
    if layer == "frozen":
        layer = nn.BatchNorm1d(3).requires_grad_(False)
    model = nn.Sequential(copy.deepcopy(layer), nn.Linear(3, 2)).double()
    with pytest.raises(Exception, match="(?i)BatchNorm|more than 1 value"):
        private = make_private(model, mode, batch_size=4)
        private.backward(torch.randn(4, 3).double(), square_loss)


class Gate(nn.Module):
    """Scales by a function of its weight: linear in it only by accident."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x):
        return x * self.function(self.weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "function", [torch.relu, torch.abs, torch.sigmoid, torch.square, lambda w: 1 + w]
)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero input"])
def test_scales_that_are_not_linear(mode, function, zero):
    first = nn.Linear(3, 4)
    if zero:  # at the first step every gate looks linear
        nn.init.zeros_(first.weight)
        nn.init.zeros_(first.bias)
    model = nn.Sequential(first, Gate(function), nn.Linear(4, 2)).double()
    x = torch.randn(4, 3).double()
    exact_or_refused(mode, True, model, x, square_loss, ["weight"])


@pytest.mark.parametrize("mode", MODES)
def test_deepcopy_computes_alike_and_apart(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x = torch.randn(4, 3).double()
    private = make_private(model, mode, batch_size=4)
    private.backward(x, square_loss)
    other = copy.deepcopy(private.module)
    for n in (1, 2, 4):
        assert other(x[:n]).shape == (n, 2)
    grads = [copy.deepcopy(p.grad) for p in model.parameters()]
    square_loss(other, x).sum().backward()
    for p, grad in zip(model.parameters(), grads):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_layer_called_outside_the_forward_is_refused(mode):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x))

    model = Split().double()
    private = make_private(model, mode, batch_size=4)
    private.backward(torch.randn(4, 3).double(), square_loss)
    private.optimizer.step()
    x = torch.randn(3, 3).double()
    losses = model.b(model.a(x)).square().sum(1)
    with pytest.raises((RuntimeError, ValueError)):
        private.criterion(losses, None).backward()


@pytest.mark.parametrize("mode", MODES)
def test_dropout_inside_experts_is_no_dependence(mode):
    """It draws as many numbers as an expert was given tokens."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.router = nn.Linear(4, 4), nn.Linear(4, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)
            )

        def forward(self, x):
            shape, x = x.shape, self.first(x).flatten(0, 1)
            out = torch.zeros_like(x)
            chosen = self.router(x).argmax(-1)
            for i, expert in enumerate(self.experts):
                (where,) = torch.where(chosen == i)
                out = out.index_add(0, where, expert(x[where]))
            return out.unflatten(0, shape[:2])

    private = make_private(Model().double(), mode, batch_size=4)
    for _ in range(4):
        private.step(torch.randn(4, 5, 4).double(), square_loss)
