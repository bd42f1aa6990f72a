import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from tests.common import check, every_mode, square_loss, wrapped_or_not


@every_mode
@wrapped_or_not
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


@every_mode
@wrapped_or_not
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


@every_mode
def test_repeated_ids(mode):
    """<one-hot, one-hot> sums over pairs of positions, not positions."""
    model = nn.Embedding(4, 3).double()
    ids = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 1, 2, 3, 0]])
    check(mode, True, model, ids, square_loss)


@every_mode
def test_non_contiguous_ids(mode):
    model = nn.Embedding(9, 3).double()
    check(mode, True, model, torch.randint(0, 9, (6, 4)).t(), square_loss)


@every_mode
def test_int32_ids(mode):
    model = nn.Embedding(9, 3).double()
    check(mode, True, model, torch.randint(0, 9, (4, 6)).int(), square_loss)


@every_mode
def test_long_sequence(mode):
    """T large beside V and d, where a [T, T] table is not worth its memory."""
    model = nn.Embedding(11, 2).double()
    check(mode, True, model, torch.randint(0, 11, (3, 300)), square_loss)
