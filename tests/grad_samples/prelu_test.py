"""PReLU: one slope, or one a channel."""

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
@given(N=st.integers(0, 4), inner=st.lists(st.integers(1, 4), max_size=3))
def test_one_slope(mode, wrap, N, inner):
    """``[N]`` to ``[N, C, H, W]``."""
    model = nn.PReLU().double()
    check(mode, wrap, model, torch.randn(N, *inner).double(), square_loss)


@layer_modes
@wrapped
@given(
    N=st.integers(0, 4),
    channels=st.integers(2, 4),
    space=st.lists(st.integers(1, 4), max_size=3),
)
def test_slope_of_each_channel(mode, wrap, N, channels, space):
    model = nn.PReLU(channels, init=-0.3).double()
    x = torch.randn(N, channels, *space).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("slopes", [1, 4])
@pytest.mark.parametrize("B, T", [(4, 4), (3, 5), (1, 4), (2, 4)])
def test_inside(mode, wrap, slopes, B, T):
    """Used twice, at two lengths; B = C = T = 4."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv1d(4, 4, 1), nn.PReLU(slopes)

        def forward(self, x):
            return self.act(self.conv(self.act(self.conv(x)))[..., ::2])

    check(mode, wrap, Model().double(), torch.randn(B, 4, T).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("slopes", [1, 4])
def test_flattened(mode, slopes):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(3, 4), nn.PReLU(slopes)

        def forward(self, x):
            return self.act(self.fc(x).flatten(0, 1)).unflatten(0, x.shape[:2])

    for B, k in ((4, 3), (4, 4), (2, 4)):
        x = torch.randn(B, k, 3).double()
        check(mode, True, Model().double(), x, square_loss)


@layer_modes
@pytest.mark.parametrize("B, T", [(4, 4), (3, 5), (1, 3)])
def test_of_constants(mode, B, T):
    """A table ``[1, C, T]`` that is no sample, added to every one."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.curve = nn.Conv1d(4, 4, 1), nn.PReLU(4)
            self.register_buffer("table", torch.randn(1, 4, T))

        def forward(self, x):
            return self.conv(x) + self.curve(self.table)

    x = torch.randn(B, 4, T).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["curve"])


@layer_modes
def test_frozen(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 4), nn.PReLU())
    model[1].weight.requires_grad = False
    check(mode, True, model.double(), torch.randn(4, 3).double(), square_loss)


@layer_modes
def test_only_the_slope(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False), model[2].requires_grad_(False)
    check(mode, True, model, torch.randn(4, 5, 3).double(), square_loss)


@layer_modes
def test_zeros(mode):
    """Inputs of exactly zero, and samples without a negative entry: norm zero."""
    model = nn.PReLU(2).double()
    x = torch.tensor([[[0.0, -1.0], [0.0, 2.0]], [[1.0, 2.0], [0.0, 0.0]]]).double()
    check(mode, True, model, torch.cat([x, -x]), square_loss)
