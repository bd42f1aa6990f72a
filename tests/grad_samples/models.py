"""Models in a few lines: which row belongs to which sample, and to which parameter.

Every model takes ``x [B, T, D]``, or ids ``[B, T]``, and is right for every B and T.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.common import Net
from tests.common import net as made

D, V = 4, 9


def linear(width=D):
    return nn.Linear(D, width)


def weights(*shape):
    return torch.randn(*shape)


def table_of(positions):
    """Places ``[T]``, ``[1, T]`` or ``[B, T]``."""

    def then(m, ids):
        places = positions(torch.arange(ids.shape[1]), len(ids))
        return m.head((m.words(ids) + m.places(places)).tanh())

    return lambda: Net(
        then, words=nn.Embedding(V, D), places=nn.Embedding(8, D), head=linear()
    )


def along(inner, after):
    """A value ``[T, D]`` whose dims are counted from the first."""

    def then(m, ids):
        places = after(m.inner(m.places(torch.arange(ids.shape[1]))))
        return (m.words(ids) + places).tanh()

    return lambda: Net(
        then, words=nn.Embedding(V, D), places=nn.Embedding(8, D), inner=inner()
    )


def time_first(m, x):
    """Rows ``[T * B, d]``, and then ``[T, B, d]``."""
    h = m.fc(x).transpose(0, 1)
    y = m.inner(h.reshape(-1, D)).view(h.shape).tanh()
    return m.head(y).transpose(0, 1)


def windows(m, x):
    """Rows ``[B * windows, 2, d]``, heads before the batch, a bias of each window."""
    B, T, _ = x.shape
    h = F.pad(m.fc(x), (0, 0, 0, T % 2))
    h = m.inner(h.reshape(-1, 2, D)).tanh()
    bias = m.bias().repeat(len(h) // 1, 1, 1)
    h = ((h @ h.mT + bias).softmax(-1) @ h).reshape(B, -1, D)[:, :T]
    h = h.unflatten(2, (2, 2)).permute(2, 0, 1, 3).reshape(2 * B, T, 2)
    return m.head(h).view(2, B, T, 2).permute(1, 2, 0, 3)


def added_in_place(m, ids):
    """The words are frozen, the places are not."""
    x = m.words(ids)
    x += m.places(torch.arange(ids.shape[1]))
    shift = m.words.weight.new_zeros(ids.shape[1], D)
    kinds = m.kinds(torch.zeros_like(ids)) + shift
    shift += 1
    x += kinds
    return m.norm(x).tanh()


def lent(m, x):
    """Reads the weight of a convolution that it never calls, as Mamba layers do."""
    y = F.pad(m.fc(x).mT, (1, 0))
    y = F.conv1d(y, m.conv.weight, m.conv.bias, groups=D)
    return x + m.head(F.silu(y).mT)


def read_and_called(m, x):
    """A weight is read before and after its layer is called, and kept aside."""
    y = m.fc(F.linear(m.fc(x).tanh(), m.fc.weight))
    return y + m.fc.weight.sum()


def writes(m, x):
    """Into tensors of zeros, views of them, and what is made of parameters."""
    h = m.fc(x[:, 0])
    out = h.new_zeros(len(x), 3, D)
    first = out[:, 0]
    first.copy_(2 * h)
    out[:, 1] = h
    out[:, 2].add_(h.tanh())
    table = m.w + h.new_zeros(len(x), 1, 1)
    table[:, 1] = h
    table[:, 2] *= 2
    made = F.linear(m.w, m.inner.weight)
    made *= m.r  # no longer what F.linear has made
    cast = m.w.clone()
    cast.mul_(m.r)
    rest = F.linear(F.linear(h, made), cast)
    return torch.cat([out.flatten(1), first, table.flatten(1), rest], dim=1)


def tied(m, ids):
    """One matrix for ids, for a head and, transposed, for a layer."""
    h = m.fc(m.words(ids)).tanh()
    h = m.words(ids.flip(1)) + h.mean(1, keepdim=True)
    logits = F.linear(h.flatten(0, 1), m.words.weight).view(*ids.shape, -1)
    return logits + F.linear(F.linear(logits, m.words.weight.T), m.words.weight)


def one_weight(m, x):
    """Two layers at different lengths, whose biases are their own."""
    return m.two(m.fc(x).tanh()[:, :2])


def with_one_weight():
    model = Net(one_weight, fc=linear(), two=linear())
    model.two.weight = model.fc.weight
    return model


def repeated(m, x):
    """Blocks of every kind, in plain calls and recomputed."""
    for block in m.blocks:
        for reentrant in (False, True):
            x = x + block(x) + checkpoint(block, x, use_reentrant=reentrant)
    return x


def blocks():
    yield nn.Sequential(nn.LayerNorm(D), linear(), nn.GELU(), linear())
    yield Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, D, batch_first=True))
    conv = nn.Sequential(nn.Conv1d(D, D, 3, padding=1, groups=2), nn.PReLU(D))
    yield Net(lambda m, x: m.conv(x.mT).mT, conv=conv)
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    yield Net(lambda m, x: m.attention(x, x, x)[0], attention=attention)


def detached(m, x):
    y = m.fc(x)
    return y - m.fc(x).detach() + m.fc(y.tanh().detach())


def in_place(m, x):
    """Legal in PyTorch, as no layer needs its own output for the backward pass."""
    h = m.fc(x)
    h.mul_(2.0)
    h += m.inner(F.relu(h, inplace=False))
    return F.relu(m.head(h), inplace=True)


def packed(m, x):
    """Sentences of several lengths, and words of letters ``[B * T, d, letters]``."""
    lengths = 1 + torch.arange(len(x)) % x.shape[1]
    rows = m.conv(F.pad(x.flatten(0, 1)[:, None], (1, 0))).amax(2)
    rows = rows.unflatten(0, x.shape[:2])
    rows = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
    y, _ = pad_packed_sequence(m.lstm(rows)[0], True, total_length=x.shape[1])
    return m.norm(y.mT).mT


def video(m, x):
    """A convolution with a residual on every frame, then an LSTM on the frames."""
    rows = m.stem(x.flatten(0, 1)[:, None])
    rows = rows + m.conv(m.norm(rows).relu())
    return m.lstm(rows.mean(2).unflatten(0, x.shape[:2]))[0][:, -1]


def bare(m, x):
    y = m.attention(x, x, x)[0]
    return F.linear(y, m.attention.out_proj.weight)


def gate(function):
    """Scales by a function of its weight, which is linear only by accident."""
    return lambda: Net(
        lambda m, x: m.head(m.fc(x) * function(m.w)),
        **dict(fc=linear(), w=weights(D), head=linear()),
    )


def net(then, *names, **parts):
    """Makes a model whose parts ``names`` are linear layers."""
    return made(then, **{name: (D, D) for name in names}, **parts)


FLOATS = {
    "keywords": net(
        lambda m, x: m.fc(input=m.norm(input=x)), "fc", norm=lambda: nn.LayerNorm(D)
    ),
    "flattened": lambda: Net(
        lambda m, x: m.inner(x.reshape(-1, D)).view(*x.shape[:-1], -1),
        inner=nn.Sequential(linear(), nn.LayerNorm(D), linear(2)),
    ),
    "time first": net(time_first, "fc", "inner", "head"),
    "windows": net(
        windows,
        *("fc", "inner"),
        head=lambda: nn.Linear(2, 2),
        bias=lambda: Net(lambda m: m.table[None], table=weights(2, 2)),
    ),
    "lent": net(lent, "fc", "head", conv=lambda: nn.Conv1d(D, D, 2, groups=D)),
    "read and called": net(read_and_called, "fc"),
    "lent, attention": net(
        bare, attention=lambda: nn.MultiheadAttention(D, 2, batch_first=True)
    ),
    "writes": net(writes, "fc", "inner", w=lambda: weights(D, D), r=lambda: weights(D)),
    "one weight": with_one_weight,
    "repeated": net(repeated, blocks=lambda: nn.ModuleList(blocks())),
    "detached": net(detached, "fc"),
    "in place": net(in_place, "fc", "inner", "head"),
    "packed": net(
        packed,
        conv=lambda: nn.Conv1d(1, 3, 2),
        lstm=lambda: nn.LSTM(3, 2, batch_first=True, bidirectional=True),
        norm=lambda: nn.GroupNorm(2, D),
    ),
    "video": net(
        video,
        stem=lambda: nn.Conv1d(1, 4, 3, padding=1),
        norm=lambda: nn.GroupNorm(2, 4),
        conv=lambda: nn.Conv1d(4, 4, 3, padding=1),
        lstm=lambda: nn.LSTM(4, 3, batch_first=True),
    ),
    **{
        f"gate {f.__name__}": gate(f)
        for f in (torch.relu, torch.abs, torch.sigmoid, torch.square)
    },
}
IDS = {
    "places [T]": table_of(lambda places, B: places),
    "places [1, T]": table_of(lambda places, B: places[None]),
    "places [B, T]": table_of(lambda places, B: places.expand(B, -1)),
    "added in place": lambda: Net(
        added_in_place,
        words=nn.Embedding(V, D).requires_grad_(False),
        places=nn.Embedding(8, D),
        kinds=nn.Embedding(3, D),
        norm=nn.LayerNorm(D),
    ),
    "tied": net(tied, "fc", words=lambda: nn.Embedding(V, D)),
    "tied, padded": net(tied, "fc", words=lambda: nn.Embedding(V, D, padding_idx=2)),
    **{
        f"{name}, {after}": along(inner, AFTER)
        for name, inner in {
            "layer norm": lambda: nn.LayerNorm(D),
            "product": lambda: Net(lambda m, x: (x @ m.w).softmax(1), w=weights(D, D)),
            "own norm": lambda: Net(
                lambda m, x: m.w * (x * (x.pow(2).mean(-1, True) + 1e-6).rsqrt()),
                w=weights(D),
            ),
        }.items()
        for after, AFTER in {
            "softmax": lambda x: x.softmax(1),
            "flipped": lambda x: x.flip(0),
            "summed": lambda x: x.sum(1, keepdim=True),
            "first": lambda x: x[0],
        }.items()
    },
}
