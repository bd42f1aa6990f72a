"""Models that draw random numbers: each sample is trained with those of its forward.

The oracle is the batch's own forward, the random state reset: the gradient of one
sample's loss by plain autograd, where no sample depends on another.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.common import (
    assert_same,
    clipped_sum,
    half_clipped,
    layer_modes,
    make_private,
    square_loss,
    trainable,
    wrapped,
)

D = 4


class Biased(nn.Module):
    """Attention with biases of its own (DeBERTa), dropout as a module and a number."""

    def __init__(self):
        super().__init__()
        self.qkv, self.drop = nn.Linear(D, 3 * D), nn.Dropout(0.4)
        self.q_bias = nn.Parameter(torch.randn(D))
        self.v_bias = nn.Parameter(torch.randn(D))
        self.out_dropout = 0.3

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q + self.q_bias) @ k.transpose(-1, -2)
        y = self.drop(scores.softmax(-1)) @ (v + self.v_bias)
        return F.dropout(y, self.out_dropout, self.training)


class Vision(nn.Module):
    """Tokens and places of the whole model's own, dropout in the same forward."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.places = nn.Parameter(torch.randn(1, 7, D))
        self.drop, self.attention = nn.Dropout(0.3), Biased()
        self.out = nn.Linear(D, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.drop(x + self.places[:, : x.shape[1]])
        return self.out(x + self.attention(x))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.inner = Gate()

    def forward(self, x):
        return self.out(self.inner(self.one(x).transpose(0, 1))).transpose(0, 1)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.drop = nn.Parameter(torch.randn(D)), nn.Dropout(0.3)

    def forward(self, h):
        return self.drop(h * self.gate).cumsum(0)


class DropPath(nn.Module):
    """Leaves out whole samples, by numbers drawn for each of them."""

    def __init__(self):
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.ones(D)), nn.Linear(D, D)
        self.drop_prob = 0.5

    def forward(self, x):
        keep = torch.rand(len(x), 1, 1, dtype=x.dtype) > self.drop_prob
        return x + self.scale * self.one(x) * keep


class Repeated(nn.Module):
    """The same layer twice, and once under activation checkpointing."""

    def __init__(self, reentrant):
        super().__init__()
        self.one, self.layer, self.reentrant = nn.Linear(D, D), Biased(), reentrant

    def forward(self, x):
        x = self.layer(self.layer(self.one(x)))
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


MODELS = {
    "biases": lambda: nn.Sequential(nn.Linear(D, D), Biased()),
    "first": Biased,
    "whole model": Vision,
    "time first": TimeFirst,
    "drop path": lambda: nn.Sequential(nn.Linear(D, D), DropPath()),
    "checkpoint": lambda: Repeated(False),
    "reentrant": lambda: Repeated(True),
}


def seeded(model, batch):
    torch.manual_seed(5)
    return square_loss(model, batch)


def grads_of(model, batch):
    rows = []
    for b in range(len(batch)):
        alone = copy.deepcopy(model)
        seeded(alone, batch)[b].backward()
        rows.append([p.grad for p in trainable(alone).values()])
    return {n: torch.stack(gs) for n, gs in zip(trainable(model), zip(*rows))}


@layer_modes
@wrapped
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("B, T", [(4, 6), (5, 5)])
def test_dropout(mode, wrap, name, B, T):
    """Three steps, as what has been found out in the first is kept."""
    if name in ("checkpoint", "reentrant"):
        B = 1  # samples that run one by one draw numbers one by one
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    batch = torch.randn(B, T, D).double()
    grads = grads_of(model, batch)
    c = half_clipped(grads)
    private = make_private(model, mode, wrap, batch_size=B, max_grad_norm=c, lr=0.0)
    for _ in range(3):
        private.step(batch, seeded)
        got = {n: B * p.grad for n, p in trainable(model).items()}
        assert_same(got, clipped_sum(grads, "flat", c), 1e-8, mode)
