"""Rows that a mixture of experts gathers by an index, in many ways of writing it."""

import pytest
import torch
from torch import nn

from tests.common import (
    assert_same,
    check,
    clipped_sum,
    layer_modes,
    make_private,
    oracle,
    run_mode,
    square_loss,
    trainable,
    wrapped,
)


def by_where(experts, x, weights, chosen):
    """Hugging Face's Switch and old Mixtral."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, choice = torch.where(chosen == i)
        if len(token):
            y = expert(x[None, token].reshape(-1, x.shape[-1]))
            out.index_add_(0, token, y * weights[token, choice, None])
    return out


def by_mask(experts, x, weights, chosen):
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            share = (weights * (chosen == i)).sum(-1)
            out[mask] += expert(x[mask]) * share[mask][:, None]
    return out


def by_index_select(experts, x, weights, chosen):
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, choice = torch.where(chosen == i)
        y = expert(x.index_select(0, token))  # also without any token
        out = out.index_add(0, token, y * weights[token, choice, None])
    return out


def by_sorting(experts, x, weights, chosen):
    """One permutation for all; the split hides where a row came from."""
    k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    parts = x[order // k].split(counts)
    y = torch.cat([expert(part) for expert, part in zip(experts, parts)])
    y = torch.zeros_like(y).index_copy(0, order, y)
    return (y.unflatten(0, (-1, k)) * weights[..., None]).sum(1)


ways = pytest.mark.parametrize(
    "way", [by_where, by_mask, by_index_select, by_sorting], ids=lambda f: f.__name__
)


class Mixture(nn.Module):
    def __init__(self, way, k=2, count=4):
        super().__init__()
        self.router = nn.Linear(4, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
            for _ in range(count)
        )
        self.way, self.k = way, k

    def forward(self, x, chosen=None):
        flat = x.flatten(0, 1)
        weights, best = self.router(flat).softmax(-1).topk(self.k, dim=-1)
        chosen = best if chosen is None else chosen.reshape(-1, 1)
        return self.way(self.experts, flat, weights, chosen).view_as(x)


class Model(nn.Module):
    """Two mixtures, so that the second one's input is the first one's output."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.mixtures = nn.ModuleList(Mixture(*args, **kwargs) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x, chosen=None):
        x = self.first(x)
        for mixture in self.mixtures:
            x = x + mixture(self.norm(x), chosen)
        return x


@layer_modes
@ways
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("B, T", [(4, 6), (5, 5), (1, 6), (6, 1), (0, 3), (3, 40)])
def test_exact(mode, way, k, B, T):
    model = Model(way, k).double()
    check(mode, True, model, torch.randn(B, T, 3).double(), square_loss)


ROUTES = {
    "each expert gets B tokens, one of each sample": torch.arange(4).expand(4, 4),
    "each expert gets B tokens, of mixed samples": torch.tensor(
        [[0, 0, 1, 2], [3, 0, 1, 1], [2, 2, 3, 0], [1, 3, 3, 2]]
    ),
    "one expert gets all": torch.full((4, 4), 2),
    "a sample has an expert of its own": torch.arange(4)[:, None].expand(4, 4),
    "one token for the last": (torch.arange(16) == 7).view(4, 4) * 3,
}


@layer_modes
@wrapped
@ways
@pytest.mark.parametrize("chosen", ROUTES.values(), ids=ROUTES)
def test_coincidences(mode, wrap, way, chosen):
    """Four samples, four tokens, four experts: every shape looks like a batch."""

    class Routed(Model):
        def forward(self, x):
            return super().forward(x[..., :3], x[..., 3].long())

    x = torch.cat([torch.randn(4, 4, 3), chosen[..., None]], dim=-1).double()
    check(mode, wrap, Routed(way, k=1).double(), x, square_loss)


@layer_modes
@ways
def test_frozen(mode, way):
    model = Model(way).double()
    for mixture in model.mixtures:
        mixture.router.requires_grad_(False)
    model.mixtures[0].experts[1].requires_grad_(False)
    check(mode, True, model, torch.randn(4, 6, 3).double(), square_loss)


@pytest.mark.parametrize(
    "mode, way",
    [("ghost_bk", way) for way in (by_where, by_mask, by_index_select, by_sorting)]
    + [("hooks", by_mask)],
)
def test_every_step(mode, way):
    """The rows move from step to step; each is as exact as the first."""
    model = Model(way).double()
    private = make_private(model, mode, batch_size=4, lr=0.1)
    for _ in range(4):
        x = torch.randn(4, 6, 3).double()
        expected = run_mode("hooks", True, _copy(model), x, square_loss, "flat", 1.0)
        before = {n: p.detach().clone() for n, p in trainable(model).items()}
        private.step(x, square_loss)
        for name, p in trainable(model).items():
            got = (before[name] - p.detach()) * 4 / 0.1
            torch.testing.assert_close(got, expected[name], rtol=1e-7, atol=1e-10)


def _copy(model):
    fresh = Model(model.mixtures[0].way).double()
    fresh.load_state_dict(model.state_dict())
    return fresh


@layer_modes
def test_capacity_over_what_is_called_the_batch(mode):
    """No sample's tokens drop another's: the batch of each is itself."""

    class Capped(Mixture):
        def forward(self, x):
            flat = x.flatten(0, 1)
            weight, chosen = self.router(flat).softmax(-1).max(dim=-1)
            place = nn.functional.one_hot(chosen, 4).cumsum(0)
            place = place.gather(1, chosen[:, None])
            weight = weight[:, None] * (place <= 2)
            return self.way(self.experts, flat, weight, chosen[:, None]).view_as(x)

    model = nn.Sequential(nn.Linear(3, 4), Capped(by_where)).double()
    check(mode, True, model, torch.randn(8, 6, 3).double(), square_loss)


class Moved(nn.Module):
    """Rows that move in ways that an index along the first dim does not show."""

    def __init__(self, how):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.how = how

    def forward(self, x, keys):
        h = self.first(x)
        (B, T, d), order = h.shape, keys.flatten().argsort(stable=True)
        back = order.argsort()
        if self.how == "selected, time first":
            flat = h.transpose(0, 1).reshape(T * B, d)
            (chosen,) = torch.where(keys.t().flatten() > 0)
            y = torch.tanh(self.inner(flat[chosen]))
            y = torch.zeros_like(flat).index_add(0, chosen, y)
            y = y.view(T, B, d).transpose(0, 1)
        elif self.how == "behind a dim of one":
            y = self.inner(h.reshape(1, B * T, d).index_select(1, order))
            y = torch.tanh(y).index_select(1, back)
        elif self.how == "samples, time first":
            order = keys[:, 0].argsort(stable=True)[None, :, None].expand(T, B, d)
            y = torch.tanh(self.inner(h.transpose(0, 1).gather(1, order)))
            y = y.gather(1, order.argsort(1)).transpose(0, 1)
        elif self.how == "looked up":
            y = torch.tanh(self.inner(nn.functional.embedding(order, h.flatten(0, 1))))
            y = nn.functional.embedding(back, y)
        elif self.how == "multiplied":
            turn = nn.functional.one_hot(order, B * T).to(h)
            y = turn.T @ torch.tanh(self.inner(turn @ h.flatten(0, 1)))
        elif self.how == "multiplied and summed":
            turn, flat = nn.functional.one_hot(order, B * T).to(h), h.flatten(0, 1)
            y = torch.tanh(self.inner((turn[..., None] * flat[None]).sum(1)))
            y = (turn.T[..., None] * y[None]).sum(1)
        elif self.how == "multiplied by experts":
            turn = nn.functional.one_hot(order, B * T).to(h).expand(B, -1, -1)
            y = torch.bmm(turn, h.flatten(0, 1).expand(B, -1, -1))
            y = torch.bmm(turn.mT, torch.tanh(self.inner(y))).mean(0)
        else:  # GShard's dispatch, with the batch as one group
            chosen = nn.functional.one_hot(keys.flatten().clamp(0, 1), 2)
            place = nn.functional.one_hot((chosen.cumsum(0) - 1).clamp(min=0), B * T)
            turn = (place * chosen[..., None]).to(h)
            y = torch.einsum("sec,sd->ecd", turn, h.flatten(0, 1))
            y = torch.einsum("sec,ecd->sd", turn, torch.tanh(self.inner(y)))
        return self.last(torch.relu(h + y.reshape(h.shape)))


MOVED = ["selected, time first", "behind a dim of one", "samples, time first"]
MOVED += ["looked up", "multiplied", "multiplied and summed", "multiplied by experts"]
MOVED += ["GShard"]


def each(inputs, i):
    return [x[i : i + 1] for x in inputs]


@layer_modes
@pytest.mark.parametrize("how", MOVED)
def test_rows_that_move(mode, how):
    """Over what is called the batch, which is a batch of one: exact at each step."""
    torch.manual_seed(2)
    model = Moved(how).double()
    private = make_private(model, mode, batch_size=2, take=each)
    for _ in range(3):
        batch = torch.randn(2, 4, 3).double(), torch.randint(-3, 4, (2, 4))
        plain = Moved(how).double()
        plain.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(plain, batch, square_loss), "flat", 1.0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        private.step(batch, square_loss)
        got = {n: (before[n] - p.detach()) * 2 for n, p in model.named_parameters()}
        assert_same(got, expected)
