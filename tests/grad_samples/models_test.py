"""Models in a few lines: which row belongs to which sample, and to which parameter.

Sizes run over those at which a shape alone would mislead: T = B, B = 1, B*T = another
B. Every model takes ``x [B, T, D]``, or ids ``[B, T]``, and is right for every B and T.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    spectral_norm,
    weight_norm,
)
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.common import (
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    make_private,
    oracle,
    square_loss,
    squares,
    trainable,
)
from tests.fuzz import ops
from tests.grad_samples.rule_case import modes

D, V = 4, 9
SIZES = ((4, 6), (4, 4), (1, 4), (2, 3), (6, 1))


class Net(nn.Module):
    """A forward ``then(net, *inputs)``, on parts: modules, parameters and numbers."""

    def __init__(self, then, **parts):
        super().__init__()
        self.then = then
        for name, value in parts.items():
            value = nn.Parameter(value) if isinstance(value, torch.Tensor) else value
            setattr(self, name, value)

    def forward(self, *inputs, **named):
        return self.then(self, *inputs, **named)


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


def relative(m, h):
    """Time first, with parameters of its own and masks in several orders (XLNet)."""
    h = m.fc(h).transpose(0, 1)
    mask = (h.detach()[None, :, :, 0] > 0.5).expand(len(h), -1, -1)
    q = torch.einsum("ibd,dhe->ibhe", h, m.q) + m.bias
    scores = torch.einsum("ibhe,jbhe->bhij", q, q)
    scores = scores.masked_fill(mask.permute(2, 0, 1)[:, None], -9.0)
    y = torch.einsum("bhij,jbhe->ibhe", scores.softmax(-1), q)
    return y.flatten(2).transpose(0, 1)


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


class Scaled(torch.autograd.Function):
    """Without ``setup_context``, so that vmap has no rule for it."""

    @staticmethod
    def forward(ctx, x, w, power):
        ctx.save_for_backward(x, w)
        ctx.power = power
        return x.pow(power) * w, x * w

    @staticmethod
    def backward(ctx, first, second):
        (x, w), k = ctx.saved_tensors, ctx.power
        grad = first * k * x.pow(k - 1) * w + second * w
        return grad, (first * x.pow(k) + second * x).flatten(0, -2).sum(0), None


class Reversible(torch.autograd.Function):
    """Recomputes a module in its backward pass, and trains it."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(grad)
        return x.grad, None


class Positive(nn.Module):
    def forward(self, w):
        return w.exp()


def centered(how):
    """Subtracts a batch mean, which for a sample alone is its own."""

    def then(m, x):
        h = m.fc(x - x.mean(0) if how == "input" else x)
        if how == "detached":
            h = h - h.mean(0).detach()
        with torch.set_grad_enabled(how == "output"):
            mean = h.mean(0)
        return m.head(torch.tanh(h - mean))

    return lambda: Net(then, fc=linear(), head=linear())


def gate(function):
    """Scales by a function of its weight, which is linear only by accident."""
    return lambda: Net(
        lambda m, x: m.head(m.fc(x) * function(m.w)),
        **dict(fc=linear(), w=weights(D), head=linear()),
    )


def hooked():
    net = Net(lambda m, x: m.fc(x).tanh(), fc=linear())
    net.fc.register_forward_hook(lambda m, args, out: out + m.weight.diagonal())
    return net


def net(then, *names, **parts):
    """Makes a model whose parts ``names`` are linear layers."""
    return lambda: Net(
        then,
        **{name: linear() for name in names},
        **{name: part() for name, part in parts.items()},
    )


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
    "relative": net(
        relative, "fc", q=lambda: weights(D, 2, 2), bias=lambda: weights(2, 2)
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
    "hook of the user": hooked,
    **{f"mean of the {how}": centered(how) for how in ("input", "detached", "output")},
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


def batch_of(name, B, T):
    return torch.randint(V, (B, T)) if name in IDS else torch.randn(B, T, D).double()


@modes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*FLOATS, *IDS])
def test_exact(mode, wrap, name):
    torch.manual_seed(1)
    for B, T in SIZES:
        model = {**FLOATS, **IDS}[name]().double()
        check(mode, wrap, model, batch_of(name, B, T), square_loss)


@modes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ops.UNARY])
def test_ops_of_the_fuzzer(mode, wrap, name):
    """Each op between two layers, of which one is frozen."""
    torch.manual_seed(1)
    step = ops.UNARY[name](random.Random(1))
    model = nn.Sequential(nn.Linear(3, 3), step, nn.Linear(3, 2)).double()
    model[2].requires_grad_(False)
    for m in model.modules():
        if getattr(m, "single", False):
            m.float()
    x = torch.randn(4, 4, 3).double()
    grads = {n: g.double() for n, g in oracle(model, x, square_loss).items()}
    tolerance = 1e-4 if step.single else 1e-8
    check(mode, wrap, model, x, square_loss, tolerance=tolerance, grads=grads)


@modes
@pytest.mark.parametrize("name", ["flattened", "time first", "lent", "video", "tied"])
@pytest.mark.parametrize("silent", [None, 0, 1], ids=["", "all zero", "but the first"])
def test_steps(mode, wrap, name, silent):
    """What was found out about one batch holds for that batch only.

    The last batch of a loader is smaller, sequences have other lengths, and the first
    batch may have no gradient to tell anything by.
    """
    torch.manual_seed(1)
    make = {**FLOATS, **IDS}[name]
    model, clean = make().double(), make().double()
    private = make_private(model, mode, wrap, batch_size=4, max_grad_norm=0.5)
    if silent is not None:

        def first(model, x):
            weight = torch.zeros(len(x)).double()
            weight[:silent] = 1
            return square_loss(model, x) * weight

        private.step(batch_of(name, 4, 4), first)
    for B, T in ((4, 3), (3, 4), (4, 4), (1, 4), (12, 1), (0, 3))[: 3 if silent else 6]:
        x = batch_of(name, B, T)
        clean.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(clean, x, square_loss), "flat", 0.5)
        before = {n: p.detach().clone() for n, p in trainable(model).items()}
        private.step(x, square_loss)
        got = {n: (before[n] - p.detach()) * 4 for n, p in trainable(model).items()}
        assert_same(got, expected, message=f"{mode} at B={B}, T={T}")


@modes
@pytest.mark.parametrize("name", ["lent", "windows", "read and called"])
def test_frozen(mode, wrap, name):
    """Each parameter in turn."""
    torch.manual_seed(1)
    for frozen in [n for n, _ in FLOATS[name]().named_parameters()]:
        model = FLOATS[name]().double()
        model.get_parameter(frozen).requires_grad_(False)
        if trainable(model):
            check(mode, wrap, model, batch_of(name, 4, 5), square_loss)


@modes
def test_several_named_inputs(mode, wrap):
    """Two sequences of different lengths, and places [T] that all samples share."""

    def then(m, source, target, places):
        keys = m.key(m.words(source))
        queries = m.query(m.words(target) + m.places(places))
        return (queries @ keys.mT).softmax(-1) @ keys

    for S, T in ((4, 3), (3, 5), (5, 6)):
        model = Net(
            *(then,),
            **dict(words=nn.Embedding(V, D), places=nn.Embedding(8, D)),
            **dict(key=linear(), query=linear()),
        ).double()
        batch = {n: torch.randint(V, (4, k)) for n, k in (("source", S), ("target", T))}
        batch["places"] = torch.arange(T)
        named = ["source", "target"]
        check(mode, wrap, model, batch, square_loss, batched=named)


@modes
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_several_outputs(mode, wrap, used):
    """A router in small: the loss uses the second output as well."""

    def loss(m, x):
        outputs = m(x)
        return squares(sum(outputs[i] * (i + 1) for i in used))

    model = Net(
        lambda m, x: ((h := m.fc(x)) * m.w.sin(), h * m.w.exp()),
        **dict(fc=linear(), w=weights(D)),
    ).double()
    check(mode, wrap, model, torch.randn(4, 5, D).double(), loss)


@modes
@pytest.mark.parametrize(
    "layer", [nn.LSTM(D, 3), nn.TransformerEncoderLayer(D, 2, 6, 0.0)]
)
def test_model_that_takes_time_first(mode, wrap, layer):
    """``make_private(batch_first=False)``, as for Opacus's own layers."""

    def loss_fn(m, x):
        y = m(x.transpose(0, 1))
        return squares((y[0] if isinstance(y, tuple) else y).transpose(0, 1))

    for B, T in ((4, 4), (1, 3), (3, 5)):
        model, x = nn.Sequential(layer).double(), torch.randn(B, T, D).double()
        grads = oracle(model, x, loss_fn)
        c = half_clipped(grads)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        given = dict(batch_size=B, max_grad_norm=c, batch_first=False)
        make_private(model, mode, wrap, **given).step(x, loss_fn)
        got = {n: (before[n] - p.detach()) * B for n, p in model.named_parameters()}
        assert_same(got, clipped_sum(grads, "flat", c))


@modes
@pytest.mark.parametrize("name", ["Function", "Reversible"])
def test_functions_of_autograd(mode, wrap, name):
    """What they do to parameters is seen one sample after the other alone."""
    model = Net(
        lambda m, x: (
            torch.cat(Scaled.apply(m.fc(x), m.w, 3), dim=1)
            if name == "Function"
            else Reversible.apply(m.fc(x).tanh(), m.inner)
        ),
        **dict(fc=linear(), inner=linear(), w=weights(D)),
    ).double()
    with pytest.warns(UserWarning, match="one sample after the other"):
        check(mode, wrap, model, torch.randn(4, D).double(), square_loss)


def positive(layer):
    parametrize.register_parametrization(layer, "weight", Positive())
    return layer


@modes
@pytest.mark.parametrize(
    "way",
    [
        *(parametrizations.weight_norm, parametrizations.spectral_norm),
        *(parametrizations.orthogonal, positive, weight_norm, spectral_norm),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    ],
    ids=[
        "weight_norm",
        "spectral",
        "orthogonal",
        "positive",
        "hook",
        "hook 2",
        "pruned",
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_parametrized(mode, wrap, way):
    """Power iterations go on as they do without privacy."""

    def make():
        torch.manual_seed(1)
        layers = way(nn.Linear(D, D)), way(nn.Conv1d(1, D, 2))
        return nn.Sequential(layers[0], nn.Unflatten(1, (1, D)), layers[1]).double()

    x = torch.randn(3, D).double()
    alone = [make() for _ in x]  # what a hook has computed can't be deep-copied
    for model, row in zip(alone, x):
        square_loss(model, row[None]).sum().backward()
    columns = zip(*(trainable(model).values() for model in alone))
    grads = [torch.stack([p.grad for p in column]) for column in columns]
    grads = dict(zip(trainable(alone[0]), grads))
    model, c = make(), half_clipped(grads)
    before = {n: p.detach().clone() for n, p in trainable(model).items()}
    private = make_private(model, mode, wrap, batch_size=3, max_grad_norm=c)
    private.step(x, square_loss)
    got = {n: (before[n] - p.detach()) * 3 for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c))
    for (n, x), y in zip(model.named_buffers(), alone[0].buffers()):
        assert torch.equal(x, y), n


@modes
def test_samples_that_take_other_branches(mode, wrap):
    """What is kept of each part of a batch is its own."""

    def then(m, x):
        signs = [bool(row.sum() > 0) for row in x]
        scale = torch.tensor(signs).to(x)[:, None, None, None] + 1
        return m.head((scale * m.conv(x)).transpose(1, 3))

    conv = nn.Conv2d(2, 2, (65, 1), padding=(32, 0), groups=2, bias=False)
    x = torch.randn(5, 2, 12, 8).double().abs()
    x[3:] *= -1
    model = Net(then, conv=conv, head=nn.Linear(2, 3)).double()
    check(mode, wrap, model, x, square_loss)


@modes
def test_unfrozen_later(mode, wrap):
    model, x = FLOATS["video"]().double(), torch.randn(4, 3, D).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.lstm.requires_grad_(False)
    private = make_private(model, mode, wrap, batch_size=4, optimizer=optimizer)
    private.step(x, square_loss)
    model.lstm.requires_grad_(True)
    plain = FLOATS["video"]().double()
    plain.load_state_dict(model.state_dict())
    expected = clipped_sum(oracle(plain, x, square_loss), "flat", 1.0)
    private.step(x, square_loss)
    assert_same({n: p.grad * 4 for n, p in model.named_parameters()}, expected)


@modes
def test_autocast(mode, wrap):
    """It is run again in the precision it ran in."""

    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square_loss(lambda x: model(x).float(), x)

    model = Net(
        lambda m, x: torch.einsum("btd,edh->bteh", m.fc(x), m.w / 2).tanh().sum(2),
        **dict(fc=linear(), w=weights(3, D, 5)),
    )
    check(mode, wrap, model, torch.randn(4, 6, D), loss, tolerance=0.05)
