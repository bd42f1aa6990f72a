"""nn.Bilinear, which has no rule."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from tests.common import (
    check,
    exact_or_refused,
    layer_modes,
    square_loss,
    wrapped,
)


@layer_modes
@wrapped
@given(
    N=st.integers(0, 4),
    inner=st.lists(st.integers(1, 4), max_size=2),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    bias=st.booleans(),
)
def test_bilinear(mode, wrap, N, inner, sizes, bias):
    model = nn.Bilinear(*sizes, bias=bias).double()
    first, second, _ = sizes
    batch = (torch.randn(N, *inner, n).double() for n in (first, second))
    check(mode, wrap, model, tuple(batch), square_loss)


class Pairs(nn.Module):
    """A score of pairs, called by keywords; its inputs come from layers."""

    def __init__(self, flatten=False, times=1):
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 4)
        self.score = nn.Bilinear(2, 4, 2)
        self.flatten, self.times = flatten, times

    def forward(self, x):
        first, second = self.one(x).tanh(), self.two(x).tanh()
        for _ in range(self.times):
            if self.flatten:
                rows = first.flatten(0, 1), second.flatten(0, 1)
                first = self.score(*rows).unflatten(0, x.shape[:2])
            else:
                first = self.score(input2=second, input1=first)
        return first


@layer_modes
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (1, 3), (3, 1)])
def test_inside(mode, flatten, times, B, T):
    model = Pairs(flatten, times).double()
    check(mode, True, model, torch.randn(B, T, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen(mode, frozen):
    model = Pairs(times=2).double()
    for name, p in model.score.named_parameters():
        p.requires_grad = frozen not in (name, "both")
    check(mode, True, model, torch.randn(4, 3, 3).double(), square_loss)


@layer_modes
def test_same_input_twice(mode):
    """A quadratic form."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.form = nn.Linear(3, 3), nn.Bilinear(3, 3, 2)

        def forward(self, x):
            x = self.fc(x)
            return self.form(x, x)

    check(mode, True, Model().double(), torch.randn(4, 2, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("T", [3, 4])
def test_second_input_the_same_for_all_samples(mode, T):
    """A table of positions, expanded to the batch."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.form = nn.Embedding(T, 2), nn.Bilinear(3, 2, 2)

        def forward(self, x):
            table = self.positions(torch.arange(T))
            return self.form(x, table.expand(len(x), T, 2))

    x = torch.randn(4, T, 3).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["positions"])


@layer_modes
def test_float32(mode):
    x = torch.randn(5, 4, 3)
    check(mode, True, Pairs(times=2), x, square_loss, tolerance=1e-4)
