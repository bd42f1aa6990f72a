"""GroupNorm: scale and shift of a channel, statistics over groups of them."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from opacus.validators import ModuleValidator
from torch import nn

from tests.common import (
    check,
    exact_or_refused,
    layer_modes,
    square_loss,
    wrapped,
)


def norm(groups, channels, **kwargs):
    layer = nn.GroupNorm(groups, channels, **kwargs).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


@layer_modes
@wrapped
@given(
    N=st.integers(0, 4),
    groups=st.integers(1, 3),
    width=st.integers(2, 3),
    space=st.lists(st.integers(1, 3), max_size=3),
    eps=st.sampled_from([1e-5, 0.1]),
)
def test_group_norm(mode, wrap, N, groups, width, space, eps):
    """``[N, C]`` to ``[N, C, D, H, W]``."""
    model = norm(groups, groups * width, eps=eps)
    x = torch.randn(N, groups * width, *space).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_inside(mode, wrap, groups):
    """Inputs that need a gradient; T = C = B = 4."""
    model = nn.Sequential(
        nn.Conv1d(2, 4, 1), norm(groups, 4), nn.Tanh(), nn.Conv1d(4, 4, 1), norm(2, 4)
    ).double()
    check(mode, wrap, model, torch.randn(4, 2, 4).double(), square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen(mode, wrap, frozen):
    model = nn.Sequential(nn.Conv1d(2, 4, 2), norm(2, 4), nn.Tanh(), nn.Conv1d(4, 2, 1))
    for name, p in model[1].named_parameters():
        p.requires_grad = frozen not in (name, "both")
    check(mode, wrap, model.double(), torch.randn(4, 2, 5).double(), square_loss)


@layer_modes
def test_without_affine(mode):
    model = nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4, affine=False), nn.Conv1d(4, 2, 1)
    ).double()
    check(mode, True, model, torch.randn(4, 2, 5).double(), square_loss)


@layer_modes
def test_twice(mode):
    """At two sizes, in between a residual."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 1), norm(2, 4)

        def forward(self, x):
            x = x + self.conv(self.norm(x)).tanh()
            return self.norm(x[..., ::2])

    check(mode, True, Model().double(), torch.randn(3, 4, 2, 4).double(), square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("B, k", [(4, 3), (4, 4), (1, 3), (2, 4)])
def test_flattened(mode, wrap, B, k):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(3, 3), norm(2, 4)

        def forward(self, x):
            return self.norm(self.fc(x).flatten(0, 1)).unflatten(0, x.shape[:2])

    check(mode, wrap, Model().double(), torch.randn(B, k, 4, 3).double(), square_loss)


@layer_modes
def test_flattened_from_the_start(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(2, 4)

        def forward(self, x):
            return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    x = torch.randn(4, 3, 4, 3).double()
    exact_or_refused(mode, True, Model(), x, square_loss, ["norm"])


@layer_modes
@pytest.mark.parametrize("B, T", [(4, 4), (3, 5), (1, 3)])
def test_of_constants(mode, B, T):
    """A table ``[1, C, T]`` that is no sample, added to every one."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 4, 1), norm(2, 4)
            self.register_buffer("table", torch.randn(1, 4, T))

        def forward(self, x):
            return self.conv(x) + self.norm(self.table)

    x = torch.randn(B, 4, T).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["norm"])


@layer_modes
def test_channels_last(mode):
    # A GroupNorm on channels-last data that need no gradient is a crash of torch 2.13.
    model = nn.Sequential(nn.Conv2d(4, 4, 1), norm(2, 4), nn.Tanh(), norm(1, 4))
    x = torch.randn(4, 4, 3, 2).double().to(memory_format=torch.channels_last)
    assert not model[0](x.float()).is_contiguous()
    check(mode, True, model.double(), x, square_loss)


@layer_modes
def test_what_replaces_batch_norm(mode):
    """``ModuleValidator.fix`` puts GroupNorm there."""
    model = ModuleValidator.fix(
        nn.Sequential(nn.Conv2d(2, 32, 2), nn.BatchNorm2d(32), nn.Tanh())
    ).double()
    assert isinstance(model[1], nn.GroupNorm)
    check(mode, True, model, torch.randn(4, 2, 3, 3).double(), square_loss)


@layer_modes
def test_float32(mode):
    model = nn.Sequential(nn.Conv2d(2, 8, 2), nn.GroupNorm(4, 8), nn.Conv2d(8, 2, 1))
    check(mode, True, model, torch.randn(5, 2, 6, 6), square_loss, tolerance=1e-4)
