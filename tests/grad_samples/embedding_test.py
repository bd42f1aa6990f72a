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
    inner=st.lists(st.integers(1, 4), max_size=3),
    V=st.integers(1, 7),
    d=st.integers(1, 4),
)
def test_embedding(mode, wrap, N, inner, V, d):
    """Ids of 1 to 4 dimensions; V = 1 makes every id of a sample the same row."""
    model = nn.Embedding(V, d).double()
    check(mode, wrap, model, torch.randint(0, V, (N, *inner)), square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("padding_idx", [0, 3, -1])
def test_padding_idx(mode, wrap, padding_idx):
    """The padding row gets no gradient, also from a sample that is all padding.

    The row is not zero: a model that was loaded may hold anything there.
    """
    model = nn.Sequential(
        nn.Embedding(5, 4, padding_idx=padding_idx), nn.Linear(4, 3)
    ).double()
    torch.nn.init.normal_(model[0].weight)
    pad = model[0].padding_idx
    ids = torch.tensor(
        [[pad, 1, 2, pad], [pad, pad, pad, pad], [1, 1, 2, 2], [2, pad, 0, 4]]
    )
    check(mode, wrap, model, ids, square_loss)


@layer_modes
def test_repeated_ids(mode):
    """<one-hot, one-hot> sums over pairs of positions, not positions."""
    model = nn.Embedding(4, 3).double()
    ids = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 1, 2, 3, 0]])
    check(mode, True, model, ids, square_loss)


@layer_modes
def test_non_contiguous_ids(mode):
    model = nn.Embedding(9, 3).double()
    check(mode, True, model, torch.randint(0, 9, (6, 4)).t(), square_loss)


@layer_modes
def test_int32_ids(mode):
    model = nn.Embedding(9, 3).double()
    check(mode, True, model, torch.randint(0, 9, (4, 6)).int(), square_loss)


@layer_modes
def test_long_sequence(mode):
    """T large beside V and d, where a [T, T] table is not worth its memory."""
    model = nn.Embedding(11, 2).double()
    check(mode, True, model, torch.randint(0, 11, (3, 300)), square_loss)


class Bag(nn.Module):
    """Three bags of each sample, the second empty, or one of all its ids."""

    def __init__(self, offsets, weighted=False, **kwargs):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 3, **kwargs)
        self.offsets, self.weighted = offsets, weighted

    def forward(self, ids, weights):
        B, T = ids.shape
        weights = weights if self.weighted else None
        if not self.offsets:
            return self.bag(ids, per_sample_weights=weights)
        offsets = (torch.arange(B)[:, None] * T + torch.tensor([0, 3, 3])).flatten()
        if self.bag.include_last_offset:
            offsets = torch.cat([offsets, torch.tensor([B * T])])
        if weights is not None:
            weights = weights.flatten()
        return self.bag(ids.flatten(), offsets, weights).view(B, -1)


@layer_modes
@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(mode="sum"),
        dict(mode="mean", padding_idx=-4),
        dict(mode="max", padding_idx=3),
        dict(mode="max"),
        dict(mode="sum", weighted=True, include_last_offset=True),
        dict(mode="mean", include_last_offset=True),
    ],
    ids=lambda kwargs: " ".join(map(str, kwargs.values())),
)
def test_bags(mode, offsets, kwargs):
    batch = torch.randint(0, 7, (4, 5)), torch.rand(4, 5).double()
    check(mode, True, Bag(offsets, **kwargs).double(), batch, square_loss)


@layer_modes
def test_bags_of_other_lengths_in_each_sample(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 3, mode="max")

        def forward(self, ids, first):
            rows = [
                self.bag(x, torch.stack([0 * n, n])).flatten()
                for x, n in zip(ids, first)
            ]
            return torch.stack(rows)

    batch = torch.randint(0, 7, (4, 5)), torch.tensor([1, 3, 1, 5])
    check(mode, True, Model().double(), batch, square_loss)
