"""transformers' Conv1D: a Linear whose weight lies transposed, [in, out]."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.common import check, layer_modes, square_loss, wrapped

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


@layer_modes
@wrapped
@given(
    N=st.integers(0, 4),
    inner=st.lists(st.integers(1, 4), max_size=2),
    W=st.integers(1, 5),
    out=st.integers(1, 5),
)
def test_conv1d(mode, wrap, N, inner, W, out):
    model = Conv1D(out, W).double()
    check(mode, wrap, model, torch.randn(N, *inner, W).double(), square_loss)


@layer_modes
def test_frozen_bias(mode):
    model = Conv1D(3, 4).double()
    model.bias.requires_grad = False
    check(mode, True, model, torch.randn(4, 5, 4).double(), square_loss)
