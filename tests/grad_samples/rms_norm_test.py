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
    inner=st.lists(st.integers(1, 3), max_size=2),
    shape=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    eps=st.sampled_from([None, 1e-5, 0.1]),
)
def test_rms_norm(mode, wrap, N, inner, shape, eps):
    model = nn.RMSNorm(shape, eps=eps).double()
    nn.init.normal_(model.weight)
    check(mode, wrap, model, torch.randn(N, *inner, *shape).double(), square_loss)


class LlamaLike(nn.Module):
    """The class that transformers copies under many names."""

    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaLike(LlamaLike):
    """Scales by 1 + weight: what looks alike may not be alike."""

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (1.0 + self.weight.float())).type_as(hidden_states)


class MeanLike(LlamaLike):
    """Carries the names of an RMSNorm and computes something else."""

    def forward(self, hidden_states):
        x = hidden_states - hidden_states.mean(-1, keepdim=True)
        return self.weight.sin() * x / (x.abs().mean(-1, keepdim=True) + 1)


@layer_modes
@pytest.mark.parametrize("kind", [LlamaLike, GemmaLike, MeanLike])
def test_recognised_by_what_it_computes(mode, kind):
    """In float32, as these classes compute their statistics in it."""
    norm = kind(6)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(6, 2))
    names = ["1", "weight", "Like"]
    exact_or_refused(
        mode, True, model, torch.randn(4, 5, 3), square_loss, names, tolerance=1e-4
    )


@layer_modes
def test_transformers_rms_norm(mode):
    """transformers' own Llama RMSNorm is exact, not refused."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm = llama.LlamaRMSNorm(6)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(6, 2))
    check(mode, True, model, torch.randn(4, 5, 3), square_loss, tolerance=1e-4)


@layer_modes
def test_elementwise_affine_false(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4, elementwise_affine=False))
    exact_or_refused(
        mode, True, model.double(), torch.randn(4, 5, 3).double(), square_loss, ["1"]
    )
