"""Which row belongs to which sample, above all where shapes coincide.

Every model here is right for every B and T; sizes run over those at which a shape alone
would mislead: T = B, B = 1, B*T = another B.
"""

import pytest
import torch
from torch import nn

from tests.common import (
    assert_same,
    check,
    clipped_sum,
    exact_or_refused,
    layer_modes,
    make_private,
    oracle,
    square_loss,
    wrapped,
)

SIZES = [(1, 3), (3, 1), (4, 4), (6, 2)]
sizes = pytest.mark.parametrize("B, T", SIZES)


@layer_modes
@wrapped
@sizes
def test_batched(mode, wrap, B, T):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    check(mode, wrap, model, torch.randn(B, T, 3).double(), square_loss)


class Flattened(nn.Module):
    """Inner layers see [B*T, d], as routers, experts and some heads do."""

    def __init__(self, d=3):
        super().__init__()
        self.before = nn.Linear(d, d)
        self.inner = nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d), nn.Linear(d, 2))

    def forward(self, x):
        x = self.before(x)
        return self.inner(x.reshape(-1, x.size(-1))).view(*x.shape[:-1], -1)


@layer_modes
@wrapped
@sizes
def test_flattened(mode, wrap, B, T):
    check(mode, wrap, Flattened().double(), torch.randn(B, T, 3).double(), square_loss)


@layer_modes
@sizes
def test_flattened_from_the_start(mode, B, T):
    """The first layer of all sees [B*T, d]: B can be told by the loss alone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x.flatten(0, 1)).view(*x.shape[:-1], -1)

    x = torch.randn(B, T, 3).double()
    check(mode, True, Model().double(), x, square_loss)


class Positions(nn.Module):
    """Token and position embeddings, as GPT-2, BERT and OPT have them."""

    def __init__(self, ids, V=11, d=4, T=8):
        super().__init__()
        self.tokens = nn.Embedding(V, d)
        self.positions = nn.Embedding(T, d)
        self.head = nn.Linear(d, V)
        self.ids = ids

    def forward(self, x):
        B, T = x.shape
        ids = torch.arange(T)
        if self.ids == "[1, T]":
            ids = ids.unsqueeze(0)
        elif self.ids == "[B, T]":
            ids = ids.expand(B, T)
        return self.head((self.tokens(x) + self.positions(ids)).tanh())


@layer_modes
@wrapped
@sizes
@pytest.mark.parametrize("ids", ["[T]", "[1, T]", "[B, T]"])
def test_positions_without_a_batch(mode, wrap, B, T, ids):
    """Also [T] with T = B, where the rows of the ids look like samples."""
    x = torch.randint(0, 11, (B, T))
    check(mode, wrap, Positions(ids).double(), x, square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("B, T", [(1, 3), (3, 3), (3, 4)])
def test_positions_given_by_the_caller(mode, wrap, B, T):
    """Position ids [T] as a keyword input of the whole model.

    With T = B an input [T] looks like one id for each sample; that may be refused.
    """

    class Model(Positions):
        def forward(self, x, position_ids):
            return self.head((self.tokens(x) + self.positions(position_ids)).tanh())

    batch = {"x": torch.randint(0, 11, (B, T)), "position_ids": torch.arange(T)}
    model = Model(None).double()
    if B == T:
        exact_or_refused(
            mode, wrap, model, batch, square_loss, ["shared="], batched=["x"]
        )
    else:
        check(mode, wrap, model, batch, square_loss, batched=["x"])


@layer_modes
@wrapped
@sizes
def test_keyword_inputs(mode, wrap, B, T):
    """The model and its layers are called by keyword."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 3)
            self.norm = nn.LayerNorm(3)
            self.fc = nn.Linear(3, 2)

        def forward(self, ids=None):
            return self.fc(input=self.norm(input=self.embedding(input=ids)))

    batch = {"ids": torch.randint(0, 7, (B, T))}
    check(mode, wrap, Model().double(), batch, square_loss)


@layer_modes
@wrapped
@sizes
def test_batch_second(mode, wrap, B, T):
    """Inner layers work on [T, B, d]: never to be taken for a batch of T.

    Exact where it can be found out, and refused otherwise; with T = B and in fairseq's
    layers the shape says nothing.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(3, 3)
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(self.before(x).transpose(0, 1)).transpose(0, 1).tanh()

    x = torch.randn(B, T, 3).double()
    check(mode, wrap, Model().double(), x, square_loss)


@layer_modes
@sizes
def test_flattened_time_major(mode, B, T):
    """Rows [T*B, d], time first: as many rows as [B*T, d], in another order."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(3, 3)
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            B, T, d = x.shape
            h = self.before(x).transpose(0, 1).reshape(T * B, d)
            return self.inner(h).view(T, B, -1).transpose(0, 1)

    x = torch.randn(B, T, 3).double()
    check(mode, True, Model().double(), x, square_loss)


@layer_modes
@pytest.mark.parametrize("B, T", [(3, 4), (4, 4), (2, 2), (1, 4)])
def test_windows(mode, B, T):
    """[B*W, window, d] as in Swin, and heads before the batch [h*B, T, d]."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(3, 4)
            self.window = nn.Linear(4, 4)
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            B, T, _ = x.shape
            h = self.before(x)
            h = self.window(h.view(B * 2, T // 2, 4)).view(B, T, 4).tanh()
            h = h.view(B, T, 2, 2).permute(2, 0, 1, 3).reshape(2 * B, T, 2)
            return self.head(h).view(2, B, T, 2).permute(1, 2, 0, 3)

    x = torch.randn(B, T, 3).double()
    check(mode, True, Model().double(), x, square_loss)


@layer_modes
@wrapped
def test_pooled(mode, wrap):
    """Layers before the pooling see [B, T, d], those behind it [B, d]."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.pooler = nn.Linear(4, 2)

        def forward(self, x):
            return self.pooler(self.fc(x).tanh()[:, 0])

    check(mode, wrap, Model().double(), torch.randn(4, 4, 3).double(), square_loss)


@layer_modes
@wrapped
def test_two_inputs_of_different_lengths(mode, wrap):
    """Encoder and decoder: S = B in one, T = B in the next call."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 3)
            self.key, self.query = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, source, target):
            keys = self.key(self.embedding(source))
            queries = self.query(self.embedding(target))
            return (queries @ keys.mT).softmax(-1) @ keys

    for S, T in [(4, 3), (3, 4), (5, 6)]:
        batch = {
            "source": torch.randint(0, 7, (4, S)),
            "target": torch.randint(0, 7, (4, T)),
        }
        check(mode, wrap, Model().double(), batch, square_loss)


@layer_modes
def test_layout_follows_the_batch_size(mode):
    """What was found for one batch is not applied blindly to the next.

    The last batch of a data loader is smaller, and sequences have other lengths.
    """
    model = Flattened().double()
    clean = Flattened().double()
    private = make_private(model, mode, batch_size=4, max_grad_norm=1.0)
    for B, T in [(4, 3), (3, 4), (4, 4), (1, 4), (4, 1), (12, 1), (2, 6)]:
        x = torch.randn(B, T, 3).double()
        clean.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(clean, x, square_loss), "flat", 1.0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        private.step(x, square_loss)
        got = {n: (before[n] - p.detach()) * 4 for n, p in model.named_parameters()}
        assert_same(got, expected, message=f"{mode} at B={B}, T={T}")


@layer_modes
@pytest.mark.parametrize("silent", ["all", "all but the first", "none"])
@pytest.mark.parametrize("major", ["time", "flattened time"])
def test_first_batch_that_tells_nothing(mode, silent, major):
    """Batch second with T = B, after a batch whose gradients are (nearly) all zero.

    What is found out on the first batch must have been found out, not assumed.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inner = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            B, T, d = x.shape
            h = self.before(x).transpose(0, 1)
            if major == "flattened time":
                h = h.reshape(T * B, d)
            return self.inner(h).view(T, B, -1).transpose(0, 1)

    B = T = 4
    weights = torch.zeros(B, T, 1).double()
    if silent == "all but the first":
        weights[0, 0] = 1
    model, clean = Model().double(), Model().double()
    private = make_private(model, mode, batch_size=B, max_grad_norm=0.5)

    def first_loss(model, x):
        return square_loss(lambda x: model(x) * weights, x)

    if silent != "none":
        private.step(torch.randn(B, T, 3).double(), first_loss)
    for _ in range(2):
        x = torch.randn(B, T, 3).double()
        clean.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(clean, x, square_loss), "flat", 0.5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        private.step(x, square_loss)
        got = {n: (before[n] - p.detach()) * B for n, p in model.named_parameters()}
        assert_same(got, expected, message=mode)
