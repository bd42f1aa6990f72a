"""Each rule equals the copy rule, and plain autograd of each sample alone.

One case over how parameters come to an op: as they are, as views, computed, frozen,
used twice; over dtypes, complex ones among them.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from opacus_ext import clipped_grads, per_sample_grads, workspace
from opacus_ext.grad_sample.rules import RULES
from opacus_ext.grad_sample.rules.experts import grouped_linear
from opacus_ext.layers.linear_cross_entropy import linear_cross_entropy

B, T = 3, 5


def floats(*shape):
    return lambda: torch.randn(B, *shape, dtype=torch.float64)


def ids(high, *shape):
    return lambda: torch.randint(high, (B, *shape))


def recurrent(kind, **options):
    layer = getattr(nn, kind)(3, 4, batch_first=True, **options).double()
    shapes = {n.replace(".", "_"): p.shape for n, p in layer.named_parameters()}

    def call(x, *params):
        output, _ = functional_call(layer, dict(zip(shapes, params)), (x,))
        return output

    return call, list(shapes.values()), [floats(T, 3)]


# By name: a function of data and parameters, the shapes of these, and the data.
CASES = {
    "linear": (F.linear, [(4, 3), (4,)], [floats(T, 3)]),
    "linear, a row": (F.linear, [(4, 3), (4,)], [floats(3)]),
    "linear, long": (F.linear, [(4, 3)], [floats(70, 3)]),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w),
        [(3, 4), (4,)],
        [floats(T, 3)],
    ),
    "matmul": (lambda x, w: x @ w, [(3, 4)], [floats(2, T, 3)]),
    "matmul, first": (lambda x, w: w @ x.mT, [(4, 3)], [floats(T, 3)]),
    "bmm": (lambda x, w: torch.bmm(x[0], w), [(2, 3, 4)], [floats(2, T, 3)]),
    "embedding": (F.embedding, [(6, 4)], [ids(6, T)]),
    "embedding, padded": (
        lambda i, w: F.embedding(i, w, padding_idx=1),
        [(6, 4)],
        [ids(6, T)],
    ),
    "embedding, one a sample": (
        lambda i, w: F.embedding(i, w * i.sum(), padding_idx=1),
        [(6, 4)],
        [ids(6, T)],
    ),
    "torch.embedding": (
        lambda i, w: torch.embedding(w, i, 1),
        [(6, 4)],
        [ids(6, T)],
    ),
    "rows": (lambda i, w: w[i - 3], [(6, 2, 4)], [ids(6, 2, T)]),
    "conv1d": (
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, dilation=2),
        [(4, 3, 2), (4,)],
        [floats(3, 9)],
    ),
    "conv1d, few windows": (F.conv1d, [(4, 3, 8), (4,)], [floats(3, 9)]),
    "conv2d, groups": (
        lambda x, w, b: F.conv2d(x, w, b, padding="same", groups=2),
        [(4, 2, 3, 3), (4,)],
        [floats(4, 4, 5)],
    ),
    "conv2d, even": (
        lambda x, w: F.conv2d(x, w, padding="same"),
        [(4, 2, 2, 2)],
        [floats(2, 4, 5)],
    ),
    "conv3d": (F.conv3d, [(2, 2, 2, 1, 2)], [floats(2, 3, 2, 3)]),
    "conv_transpose": (F.conv_transpose1d, [(3, 4, 2), (4,)], [floats(3, 5)]),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        [(2, 3), (2, 3)],
        [floats(T, 2, 3)],
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w), [(3,)], [floats(T, 3)]),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        [(4,), (4,)],
        [floats(4, 3, 2)],
    ),
    "experts": (
        lambda x, i, w: grouped_linear(x[0], i[0], w),
        [(3, 4, 2)],
        [floats(T, 4), ids(4, T)],
    ),
    "experts, many rows": (
        lambda x, i, w: grouped_linear(x[0], i[0], w),
        [(3, 4, 2)],
        [floats(600, 4), ids(2, 600)],
    ),
    "head": (
        lambda x, i, w, b: linear_cross_entropy(x, w, b, i - 1),
        [(6, 4), (6,)],
        [floats(T, 4), ids(6, T)],
    ),
    "bilinear": (F.bilinear, [(2, 3, 4), (2,)], [floats(T, 3), floats(T, 4)]),
    "lstm": recurrent("LSTM", num_layers=2, bidirectional=True),
    "gru": recurrent("GRU", num_layers=2, bias=False),
    "rnn": recurrent("RNN", nonlinearity="relu", bidirectional=True),
}
# vmap's own kernel forgets the padding of what is copied.
NO_COPIES = ["embedding, padded", "torch.embedding"]
COMPLEX = [
    "linear",
    "addmm",
    "matmul",
    "matmul, first",
    "bmm",
    "rows",
    "conv1d",
]


def transposed(shape):
    whole = torch.randn(shape).double().mT.contiguous() if len(shape) > 1 else None
    return (whole, lambda p: p.mT) if len(shape) > 1 else as_it_is(shape)


def as_it_is(shape):
    return torch.randn(shape).double(), lambda p: p


def part(shape):
    whole = torch.randn(shape[0] + 2, *shape[1:]).double()
    return whole, lambda p: p[1:-1]


def flat(shape):
    whole = torch.randn(torch.Size(shape).numel()).double()
    return whole, lambda p: p.view(shape)


def computed(shape):
    return torch.randn(shape).double(), lambda p: p.sin() * 2


def overlapping(shape):
    """Windows of one row: entries are in the view more than once."""
    if len(shape) != 2:
        return as_it_is(shape)
    return torch.randn(sum(shape) - 1).double(), lambda p: p.unfold(0, shape[1], 1)


def complex_of(p):
    return torch.complex(p, p.cos())


WAYS = [as_it_is, transposed, part, flat, computed, overlapping]


def run(call, made, data, frozen=(), times=1):
    """Norms, clipped sums and gradients of one loss in float."""
    params = {f"p{i}": p for i, (p, _) in enumerate(made) if i not in frozen}
    used = {i: p for i, (p, _) in enumerate(made)}

    def loss(sample):
        own = [of(used[i]) for i, (_, of) in enumerate(made)]
        total = 0
        for k in range(1, times + 1):
            first = sample[0] * k if sample[0].is_floating_point() else sample[0]
            y = call(first, *sample[1:], *own)
            weights = torch.linspace(0.5, 1.5, y.numel()).to(y.real.dtype)
            y = y.flatten() if not y.is_complex() else torch.view_as_real(y).sum(-1)
            total = total + (y.flatten() * weights).tanh().square().sum()
        return total

    for i, p in used.items():
        p.requires_grad_(i not in frozen)
    found = clipped_grads(loss, params, tuple(data), 0.5)
    whole = per_sample_grads(loss, params, tuple(data)).grads
    alone = []
    for b in range(B):
        value = loss(tuple(x[b : b + 1] for x in data))
        given = list(params.values())
        grads = torch.autograd.grad(value, given, allow_unused=True)
        alone.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(given, grads)]
        )
    return found.norms, list(found.sums.values()), list(whole.values()), alone


def close(a, b, tolerance):
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def check(name, way=as_it_is, monkeypatch=None, tolerance=1e-8, dtype=None, **options):
    torch.manual_seed(0)
    call, shapes, data = CASES[name]
    made, data = [way(tuple(shape)) for shape in shapes], [make() for make in data]
    if dtype is not None:
        data = [x.to(dtype) if x.is_floating_point() else x for x in data]
        if dtype.is_complex:  # made of real parameters
            made = [(p, lambda p, of=of: complex_of(of(p))) for p, of in made]
        else:
            made = [(p.to(dtype), of) for p, of in made]
    made = [(p.detach(), of) for p, of in made]
    by_rule = run(call, made, data, **options)
    with monkeypatch.context() as patch:
        for key in list(RULES):
            patch.delitem(RULES, key)
        by_copies = by_rule
        if name not in NO_COPIES:
            by_copies = run(call, made, data, **options)
    norms, sums, grads, alone = by_rule
    close(norms, by_copies[0], tolerance)
    for a, b in zip(sums + grads, by_copies[1] + by_copies[2]):
        close(a, b, tolerance)
    expected = [torch.stack(column) for column in zip(*alone)]
    for a, b in zip(grads, expected):
        close(a, b, tolerance)
    squares = sum(g.abs().flatten(1).square().sum(1) for g in expected)
    close(norms, squares.sqrt().to(norms), tolerance)
    factors = (0.5 / (squares.sqrt() + 1e-6)).clamp(max=1)
    for a, b in zip(sums, expected):
        close(a, torch.einsum("b,b...->...", factors.to(b.dtype), b), tolerance)


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", CASES)
def test_as_copies(name, way, monkeypatch):
    check(name, way, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_twice(name, monkeypatch):
    """And in a workspace that holds next to nothing."""
    check(name, as_it_is, monkeypatch, times=2)
    with workspace(200):
        check(name, as_it_is, monkeypatch, times=2)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if len(case[1]) > 1])
def test_frozen(name, frozen, monkeypatch):
    check(name, as_it_is, monkeypatch, frozen=(frozen,))


@pytest.mark.parametrize("name", CASES)
def test_float32(name, monkeypatch):
    if name not in ("lstm", "gru", "rnn"):  # their layers are in float64
        check(name, as_it_is, monkeypatch, 1e-4, torch.float32)


@pytest.mark.parametrize("way", [as_it_is, transposed, part])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex(name, way, monkeypatch):
    check(name, way, monkeypatch, dtype=torch.complex128)
