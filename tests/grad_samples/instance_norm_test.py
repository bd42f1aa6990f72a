"""InstanceNorm: each channel of each sample by itself."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from tests.common import (
    check,
    exact_or_refused,
    layer_modes,
    run_mode,
    square_loss,
    wrapped,
)

NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def norm(dims, channels, **kwargs):
    layer = NORMS[dims](channels, affine=True, **kwargs).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


@layer_modes
@wrapped
@pytest.mark.parametrize("dims", NORMS)
@given(
    N=st.integers(1, 4),
    channels=st.integers(1, 4),
    space=st.lists(st.integers(2, 4), min_size=3, max_size=3),
    eps=st.sampled_from([1e-5, 0.1]),
)
def test_instance_norm(mode, wrap, dims, N, channels, space, eps):
    """Not N = 0, on which torch's own forward crashes."""
    model = norm(dims, channels, eps=eps)
    x = torch.randn(N, channels, *space[:dims]).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("B, T", [(4, 4), (3, 5)])
def test_inside(mode, wrap, affine, B, T):
    layer = norm(1, 4) if affine else nn.InstanceNorm1d(4)
    model = nn.Sequential(nn.Conv1d(2, 4, 1), layer, nn.Tanh(), nn.Conv1d(4, 4, 1))
    check(mode, wrap, model.double(), torch.randn(B, 2, T).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen(mode, frozen):
    model = nn.Sequential(nn.Conv2d(2, 3, 1), norm(2, 3), nn.Tanh(), nn.Conv2d(3, 2, 1))
    for name, p in model[1].named_parameters():
        p.requires_grad = frozen not in (name, "both")
    check(mode, True, model.double(), torch.randn(4, 2, 3, 2).double(), square_loss)


@layer_modes
def test_twice(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 3, 1), norm(1, 3)

        def forward(self, x):
            return self.norm((x + self.conv(self.norm(x)).tanh())[..., ::2])

    check(mode, True, Model().double(), torch.randn(4, 3, 6).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("B, k", [(4, 3), (4, 4), (2, 4)])
def test_flattened(mode, B, k):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(3, 3), norm(1, 2)

        def forward(self, x):
            return self.norm(self.fc(x).flatten(0, 1)).unflatten(0, x.shape[:2])

    check(mode, True, Model().double(), torch.randn(B, k, 2, 3).double(), square_loss)


@layer_modes
def test_sample_by_sample(mode):
    """Unbatched inputs ``[C, T]``."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(1, 3)

        def forward(self, x):
            return torch.stack([self.norm(sample) for sample in x])

    x = torch.randn(4, 3, 5).double()
    exact_or_refused(mode, True, Model(), x, square_loss, ["norm"])


@layer_modes
def test_running_statistics(mode):
    """They are data of the batch without noise: refused."""
    model = norm(1, 3, track_running_stats=True)
    with pytest.raises(UnsupportedModuleError, match="running stats"):
        run_mode(mode, True, model, torch.randn(4, 3, 5).double(), square_loss)


@layer_modes
def test_channels_last(mode):
    model = nn.Sequential(norm(2, 4), nn.Conv2d(4, 4, 1), norm(2, 4)).double()
    x = torch.randn(4, 4, 3, 2).double().to(memory_format=torch.channels_last)
    check(mode, True, model, x, square_loss)
