import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from tests.common import check, layer_modes, square_loss, wrapped


@layer_modes
@wrapped
@given(
    N=st.integers(0, 4),
    inner=st.lists(st.integers(1, 3), max_size=2),
    shape=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    eps=st.sampled_from([1e-5, 0.1]),
)
def test_layer_norm(mode, wrap, N, inner, shape, eps):
    model = nn.LayerNorm(shape, eps=eps).double()
    nn.init.normal_(model.weight)
    check(mode, wrap, model, torch.randn(N, *inner, *shape).double(), square_loss)


@layer_modes
@wrapped
def test_without_bias(mode, wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, bias=False)).double()
    check(mode, wrap, model, torch.randn(4, 5, 3).double(), square_loss)


@layer_modes
def test_without_affine(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False))
    check(mode, True, model.double(), torch.randn(4, 5, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_one_parameter_frozen(mode, frozen):
    model = nn.LayerNorm(4).double()
    getattr(model, frozen).requires_grad = False
    check(mode, True, model, torch.randn(4, 5, 4).double(), square_loss)
