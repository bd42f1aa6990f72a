import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import nn

from tests.common import check, layer_modes, square_loss, wrapped


@layer_modes
@wrapped
@given(
    N=st.integers(0, 4),
    inner=st.lists(st.integers(1, 4), max_size=3),
    W=st.integers(1, 5),
    out=st.integers(1, 5),
    bias=st.booleans(),
)
def test_linear(mode, wrap, N, inner, W, out, bias):
    """2-D to 5-D inputs, N = 0 as from an empty Poisson batch."""
    model = nn.Linear(W, out, bias=bias).double()
    check(mode, wrap, model, torch.randn(N, *inner, W).double(), square_loss)


@layer_modes
@given(T=st.sampled_from([1, 3, 40]), bias=st.booleans())
def test_stacked(mode, T, bias):
    """Inputs that need a gradient; T on both sides of where Grams are cheaper."""
    model = nn.Sequential(
        nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2, bias=bias)
    ).double()
    check(mode, True, model, torch.randn(4, T, 3).double(), square_loss)


@layer_modes
@wrapped
def test_parts_frozen(mode, wrap):
    """A frozen weight beside a trainable bias, and the reverse."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad = False
    model[2].bias.requires_grad = False
    model[3].requires_grad_(False)
    check(mode, wrap, model.double(), torch.randn(4, 6, 3).double(), square_loss)


@layer_modes
def test_non_contiguous(mode):
    class Permuted(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x):
            return self.fc(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    check(
        mode, True, Permuted().double(), torch.randn(4, 3, 2, 5).double(), square_loss
    )


@layer_modes
def test_float32(mode):
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    check(mode, True, model, torch.randn(5, 7, 3), square_loss, tolerance=1e-4)
