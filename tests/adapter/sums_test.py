"""Gradients of one parameter that come in pieces: of slices, of parts of the batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.common import (
    assert_same,
    clipped_sum,
    every_mode,
    half_clipped,
    make_private,
    oracle,
    square_loss,
    trainable,
)


class Slices(nn.Module):
    """A weight as a whole and two slices of it, from its start and its middle."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.1)

    def forward(self, x):
        rows = len(self.weight)
        middle = F.linear(x, self.weight[rows // 3 : rows // 2])
        start = F.linear(torch.tanh(x), self.weight[: rows // 3])
        whole = F.linear(x, self.weight)
        return torch.cat([middle, start.pow(3), whole], dim=-1).mean(1)


class Branches(nn.Module):
    """Samples that take two branches, in which the same is computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return torch.tanh(self.layer(x))
        return torch.tanh(self.layer(x.flip(0)).flip(0))


class Padded(nn.Module):
    """An embedding's function, with a padding index counted from the end."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3))

    def forward(self, ids):
        return F.embedding(ids, self.table, padding_idx=-1).pow(2).sum(1)


def twice(model, x):
    """Two passes, in which each sample takes one branch and the other."""
    return square_loss(model, x) + square_loss(model, -x)


# Gradients of over 2**16 entries are squared as soon as the last use of them is known.
@every_mode
@pytest.mark.parametrize(
    "build, batch, loss_fn",
    [
        (lambda: Slices(12, 4), torch.randn(4, 5, 4), square_loss),
        (lambda: Slices(300, 300), torch.randn(4, 5, 300), square_loss),
        (Branches, torch.tensor([[1.0], [-1], [2], [-3]]).expand(4, 4), twice),
        (Padded, torch.tensor([[0, 5, 2], [5, 5, 1]]), square_loss),
    ],
    ids=["slices", "large-slices", "branches", "padding"],
)
def test_pieces(mode, build, batch, loss_fn):
    torch.manual_seed(1)
    model = build().double()
    batch = batch.double() if batch.is_floating_point() else batch
    grads = oracle(copy.deepcopy(model), batch, loss_fn)
    c = half_clipped(grads)
    old = {n: p.detach().clone() for n, p in trainable(model).items()}
    private = make_private(model, mode, batch_size=len(batch), max_grad_norm=c)
    private.step(batch, loss_fn)
    got = {n: (old[n] - p.detach()) * len(batch) for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c), 1e-8, mode)
