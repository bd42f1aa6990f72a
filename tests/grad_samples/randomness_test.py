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
    make_private,
    net,
    square_loss,
    trainable,
)
from tests.zoo import D, layers, linear, weights


def attends(m, x):
    """Attention with biases of its own (DeBERTa), dropout as a module and a number."""
    q, k, v = m.qkv(x).chunk(3, -1)
    y = m.drop(((q + m.q_bias) @ k.mT).softmax(-1)) @ (v + m.v_bias)
    return F.dropout(y, m.out_dropout, m.training)


def drop_path(m, x):
    """Leaves out whole samples, by numbers drawn for each of them."""
    keep = torch.rand(len(x), 1, 1, dtype=x.dtype) > 0.5
    return x + m.scale * m.fc(x) * keep


def recomputed(m, x):
    x = m.layer(m.layer(m.fc(x)))
    return checkpoint(m.layer, x, use_reentrant=m.reentrant)


def routed(m, x):
    """Dropout in experts draws as many numbers as each has tokens."""
    rows = m.fc(x).flatten(0, 1)
    chosen, out = m.router(rows).argmax(-1), torch.zeros_like(rows)
    for i, expert in enumerate(m.experts):
        (where,) = torch.where(chosen == i)
        out = out.index_add(0, where, F.dropout(expert(rows[where]), 0.5))
    return out.unflatten(0, x.shape[:2])


ATTENTION = net(
    attends,
    qkv=(D, 3 * D),
    q_bias=weights(D),
    v_bias=weights(D),
    drop=lambda: nn.Dropout(0.4),
    out_dropout=0.3,
)
TOGETHER = {
    "biases": lambda: nn.Sequential(linear(), ATTENTION()),
    "drop path": layers(drop_path, "fc", scale=lambda: torch.ones(D)),
}
# Samples that run one by one draw numbers one by one, so B = 1 for these.
ALONE = {
    **{
        f"checkpoint {kind}": layers(recomputed, "fc", layer=ATTENTION, reentrant=kind)
        for kind in (False, True)
    },
    "experts": layers(
        routed,
        "fc",
        router=(D, 2),
        experts=lambda: nn.ModuleList(linear() for _ in "ab"),
    ),
    "lstm": net(
        lambda m, x: m.lstm(x)[0],
        lstm=lambda: nn.LSTM(D, D, 2, batch_first=True, dropout=0.5),
    ),
}


def seeded(model, batch):
    torch.manual_seed(5)
    return square_loss(model, batch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TOGETHER, *ALONE])
def test_dropout(name):
    """Three steps, as what has been found out in the first is kept."""
    for B, T in ((4, 6), (5, 5)) if name in TOGETHER else ((1, 6),):
        model = {**TOGETHER, **ALONE}[name]().double()
        batch, rows = torch.randn(B, T, D).double(), []
        for b in range(B):
            alone = copy.deepcopy(model)
            seeded(alone, batch)[b].backward()
            rows.append({n: p.grad for n, p in trainable(alone).items()})
        grads = {
            n: torch.stack([r[n] if r[n] is not None else 0 * p for r in rows]).detach()
            for n, p in trainable(model).items()
        }
        c = half_clipped(grads)
        private = make_private(model, "ghost_bk", batch_size=B, max_grad_norm=c, lr=0.0)
        for _ in range(3):
            private.step(batch, seeded)
            got = {n: B * p.grad for n, p in trainable(model).items()}
            assert_same(got, clipped_sum(grads, "flat", c))
