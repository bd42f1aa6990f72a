"""Values that no sample entered, where they meet the batch in unusual ways."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.common import (
    check,
    layer_modes,
    square_loss,
    wrapped,
)

D, H, W = 4, 2, 3  # width, heads, rows of a window


class Windows(nn.Module):
    """Attention within windows: rows ``[B * windows, W, D]`` meet one table."""

    def __init__(self, bias):
        super().__init__()
        self.qkv, self.bias, self.out = nn.Linear(D, 3 * D), bias, nn.Linear(D, D)

    def forward(self, x):
        windows = x.shape[1] // W
        rows = x.reshape(-1, W, D)
        q, k, v = self.qkv(rows).view(-1, W, 3, H, D // H).permute(2, 0, 3, 1, 4)
        mask = x.new_zeros(windows, 1, W, W)
        mask[-1, :, 0] = -1.0
        bias = self.bias() + mask.repeat(len(x), 1, 1, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Table(nn.Module):
    """A trained table of biases, as in Swin."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * W - 1, H))
        places = torch.arange(W)
        self.register_buffer("index", places[:, None] - places + W - 1)

    def forward(self):
        return self.table[self.index].permute(2, 0, 1).unsqueeze(0)


class Computed(nn.Module):
    """Biases that layers compute from coordinates, as in Swin v2."""

    def __init__(self, lora=False):
        super().__init__()
        self.one, self.two = nn.Linear(1, 5), nn.Linear(5, H, bias=False)
        self.beside = nn.Linear(1, 5) if lora else None
        places = torch.arange(W)
        self.register_buffer("index", places[:, None] - places + W - 1)
        self.register_buffer("places", torch.linspace(-1, 1, 2 * W - 1).double())

    def forward(self):
        x = self.places.view(1, -1, 1)
        h = self.one(x) if self.beside is None else self.one(x) + self.beside(x)
        table = self.two(h.relu()).view(-1, H)
        table = table[self.index.view(-1)].view(W, W, H).permute(2, 0, 1)
        return 2 * table.contiguous().sigmoid().unsqueeze(0)


class AddedInPlace(nn.Module):
    """The embeddings of the words are frozen, those of places are not."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, D).requires_grad_(False)
        self.places, self.kinds = nn.Embedding(8, D), nn.Embedding(3, D)
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, 2)

    def forward(self, ids):
        x = self.words(ids)
        x += self.places(torch.arange(ids.shape[1]))
        x += self.kinds(torch.zeros_like(ids))
        return self.out(self.norm(x).tanh())


class ChangedLater(AddedInPlace):
    def forward(self, ids):
        shift = self.words.weight.new_zeros(ids.shape[1], D)
        places = self.places(torch.arange(ids.shape[1])) + shift
        shift += 1
        return self.out(self.words(ids) + places)


class Relative(nn.Module):
    """Time first, with parameters of its own, inputs of several orders (XLNet)."""

    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.randn(D, H, 2))
        self.bias = nn.Parameter(torch.randn(H, 2))

    def forward(self, h, mask):
        q = torch.einsum("ibd,dhe->ibhe", h, self.q) + self.bias
        scores = torch.einsum("ibhe,jbhe->bhij", q, q)
        scores = scores.masked_fill(mask.permute(2, 0, 1)[:, None] > 0, -9.0)
        return torch.einsum("bhij,jbhe->ibhe", scores.softmax(-1), q).flatten(2)


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.attention = nn.Linear(D, D), Relative()
        self.out = nn.Linear(2 * H, D)

    def forward(self, x):
        h = self.one(x).transpose(0, 1)
        mask = (h.detach()[None, :, :, 0] > 0.5).expand(len(h), -1, -1).long()
        return self.out(self.attention(h, mask)).transpose(0, 1)


class Mix(nn.Module):
    """Several streams, samples in the second dim (AltUp)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, streams):
        return streams * self.scale + streams.mean(0, keepdim=True)


class Streams(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.mix, self.out = nn.Linear(D, D), Mix(), nn.Linear(D, D)

    def forward(self, x):
        h = self.one(x)
        return self.out(self.mix(torch.stack([h, h.tanh(), -h, h * h]))).sum(0)


class Queries(nn.Module):
    """Learned queries, as many as it is told there are samples (Perceiver)."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(W, D))

    def forward(self, batch_size):
        return self.queries.expand(batch_size, -1, -1)


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.one = Queries(), nn.Linear(D, D)

    def forward(self, x):
        q, k = self.queries(len(x)), self.one(x)
        return (q @ k.transpose(1, 2)).softmax(-1) @ k


class Cache:
    """Keys and values of earlier calls, as transformers keeps them."""

    def __init__(self):
        self.keys = None

    def get_seq_length(self):
        return 0 if self.keys is None else self.keys.shape[1]

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


class Sinks(nn.Module):
    def __init__(self):
        super().__init__()
        self.sink, self.one = nn.Parameter(torch.randn(1)), nn.Linear(D, D)

    def forward(self, x, cache=None):
        k = self.one(x)
        if cache is not None:
            k = cache.update(k)
        scores = x @ k.transpose(1, 2)
        sinks = self.sink.expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ k


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.attention = nn.Linear(D, D), Sinks()

    def forward(self, x):
        return self.attention(self.one(x), Cache())


def rows(B, T):
    return torch.randn(B, T, D).double()


MODELS = {
    "table": lambda: Windows(Table()),
    "computed": lambda: Windows(Computed()),
    "computed by two": lambda: Windows(Computed(lora=True)),
    "time first": TimeFirst,
    "streams": Streams,
    "told": Told,
    "cached": Cached,
}


@layer_modes
@wrapped
@pytest.mark.parametrize("name", MODELS)
def test_exact(mode, wrap, name):
    torch.manual_seed(0)
    check(mode, wrap, MODELS[name]().double(), rows(4, 6), square_loss)


@layer_modes
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("B, T", [(1, 6), (2, 3), (3, 3), (6, 6), (5, 3)])
def test_coincidences(mode, name, B, T):
    """Of the batch size with windows, their rows, the entries of the table."""
    torch.manual_seed(0)
    check(mode, True, MODELS[name]().double(), rows(B, T), square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("B, T", [(3, 5), (4, 4), (1, 4)])
def test_in_place_on_frozen(mode, wrap, B, T):
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (B, T))
    check(mode, wrap, AddedInPlace().double(), ids, square_loss)


@layer_modes
def test_changed_in_place_later(mode):
    ids = torch.randint(0, 9, (3, 5))
    check(mode, True, ChangedLater().double(), ids, square_loss)


class Root(nn.Module):
    """A norm that is told by its structure."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return self.weight * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt())


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return x @ self.weight


class Softmax(Times):
    def forward(self, x):
        return (x @ self.weight).softmax(1)


class Dropped(Times):
    def forward(self, x):
        return F.dropout(x, 1e-9, self.training) @ self.weight


AFTER = {
    "as it is": lambda x: x,
    "features": lambda x: x.softmax(1),
    "flipped": lambda x: x.flip(0),
    "summed": lambda x: x.sum(1, keepdim=True),
    "first": lambda x: x[0],
}


class Along(nn.Module):
    """A value ``[T, D]`` whose dims are counted from the first."""

    def __init__(self, inner, after):
        super().__init__()
        self.words, self.places = nn.Embedding(9, D), nn.Embedding(8, D)
        self.inner, self.after = inner, after

    def forward(self, ids):
        places = self.inner(self.places(torch.arange(ids.shape[1])))
        return (self.words(ids) + self.after(places)).tanh()


@layer_modes
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("inner", [Root, Times, nn.LayerNorm])
@pytest.mark.parametrize("B, T", [(3, 5), (4, 4)])
def test_the_model_sees_no_other_shape(mode, inner, after, B, T):
    torch.manual_seed(0)
    inner = inner(D) if inner is nn.LayerNorm else inner()
    model = Along(inner, AFTER[after]).double()
    ids = torch.randint(0, 9, (B, T))
    check(mode, True, model, ids, square_loss)


@layer_modes
@pytest.mark.parametrize("inner", [Softmax, Dropped])
def test_dims_counted_in_a_layer(mode, inner):
    torch.manual_seed(0)
    model = Along(inner(), AFTER["features"]).double()
    ids = torch.randint(0, 9, (3, 5))
    check(mode, True, model, ids, square_loss)


class Einsum(Along):
    def forward(self, ids):
        places = self.places(torch.arange(ids.shape[1]))
        return torch.einsum("td,btd->btd", places, self.words(ids))


@layer_modes
def test_einsum(mode):
    model = Einsum(nn.Identity(), None).double()
    check(mode, True, model, torch.randint(0, 9, (3, 5)), square_loss)
