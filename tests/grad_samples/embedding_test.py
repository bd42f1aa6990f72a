"""Embeddings, bags of them, and rows of a parameter that an index chooses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.common import Net, square_loss
from tests.grad_samples.rule_case import BOTH, RuleCase, RuleTests, exact, op


def ids(high, *shape):
    return lambda B, T: torch.randint(high, (B, T, *shape))


def padded(B, T):
    """Sample 0 is nothing but padding."""
    found = torch.randint(5, (B, T))
    found[:1] = 3
    return found


class TestEmbedding(RuleTests):
    ops = (F.embedding,)
    cases = {
        "ids": RuleCase(lambda: nn.Embedding(6, 4), ids(6)),
        "of several dims": RuleCase(lambda: nn.Embedding(6, 4), ids(6, 2, 2)),
        "int32": RuleCase(lambda: nn.Embedding(6, 4), lambda B, T: ids(6)(B, T).int()),
        "all one row": RuleCase(lambda: nn.Embedding(1, 2), ids(1)),
        "long": RuleCase(lambda: nn.Embedding(6, 2), lambda B, T: ids(6)(B, 50 * T)),
        **{
            f"padding {index}": RuleCase(
                lambda index=index: nn.Embedding(5, 4, padding_idx=index), padded
            )
            for index in (0, 3)
        },
    }


class TestRows(RuleTests):
    cases = {
        "rows": RuleCase(op(lambda i, w: w[i - 3], (6, 2, 4)), ids(6, 2)),
        "padding -2": RuleCase(
            op(lambda i, w: F.embedding(i, w, padding_idx=-2), (5, 4)), padded
        ),
        "torch.embedding": RuleCase(
            op(lambda i, w: torch.embedding(w, i, 1), (6, 4)), ids(6)
        ),
        "a table a sample": RuleCase(
            op(
                lambda i, w: torch.stack(
                    [F.embedding(row, w * row.sum(), padding_idx=1) for row in i]
                ),
                (6, 4),
            ),
            ids(6),
            without=("empty",),
        ),
    }


def bag(m, ids, weights):
    """Three bags of each sample, the second empty, or one of all its ids."""
    B, T = ids.shape
    weights = weights if m.weighted else None
    if not m.offsets:
        return m.bag(ids, per_sample_weights=weights)
    offsets = (torch.arange(B)[:, None] * T + torch.tensor([0, 3, 3])).flatten()
    if m.bag.include_last_offset:
        offsets = torch.cat([offsets, torch.tensor([B * T])])
    weights = None if weights is None else weights.flatten()
    return m.bag(ids.flatten(), offsets, weights).view(B, -1)


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(mode="sum"),
        dict(mode="mean", padding_idx=-4),
        dict(mode="max", padding_idx=3),
        dict(mode="sum", weighted=True, include_last_offset=True),
        dict(mode="mean", include_last_offset=True),
    ],
    ids=lambda kwargs: " ".join(map(str, kwargs.values())),
)
def test_bags(offsets, kwargs):
    given = dict(kwargs)
    parts = dict(offsets=offsets, weighted=given.pop("weighted", False))
    model = Net(bag, bag=nn.EmbeddingBag(7, 3, **given), **parts)
    batch = torch.randint(0, 7, (4, 5)), torch.rand(4, 5).double()
    exact(model.double(), batch, square_loss, BOTH)


def test_bags_of_other_lengths_in_each_sample():
    def then(m, ids, first):
        starts = (torch.stack([0 * n, n]) for n in first)
        return torch.stack([m.bag(x, n).flatten() for x, n in zip(ids, starts)])

    batch = torch.randint(0, 7, (4, 5)), torch.tensor([1, 3, 1, 5])
    model = Net(then, bag=nn.EmbeddingBag(7, 3, mode="max"))
    exact(model.double(), batch, square_loss)
