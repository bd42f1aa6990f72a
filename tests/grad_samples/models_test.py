"""The models of models.py, and each op of the fuzzer, beside single samples.

Sizes run over those at which a shape alone would mislead: T = B, B = 1, B*T = another
B.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    spectral_norm,
    weight_norm,
)

from tests.adapter.common import steps
from tests.common import (
    Net,
    assert_same,
    clipped_sum,
    half_clipped,
    make_private,
    oracle,
    square_loss,
    squares,
    trainable,
)
from tests.fuzz import ops
from tests.grad_samples.models import FLOATS, IDS, D, V, linear, weights
from tests.grad_samples.rule_case import BOTH, MODE, exact

SIZES = ((4, 6), (4, 4), (1, 4), (2, 3))


def batch_of(name, B, T):
    return torch.randint(V, (B, T)) if name in IDS else torch.randn(B, T, D).double()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*FLOATS, *IDS])
def test_exact(name):
    torch.manual_seed(1)
    for B, T in SIZES:
        model = {**FLOATS, **IDS}[name]().double()
        exact(model, batch_of(name, B, T), square_loss, BOTH)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ops.UNARY])
def test_ops_of_the_fuzzer(name):
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
    rounded = getattr(step, "tolerance", 1e-8)
    tolerance = 1e-4 if hasattr(step, "single") else rounded
    exact(model, x, square_loss, tolerance=tolerance, grads=grads)


@pytest.mark.parametrize("name", ["flattened", "time first", "lent", "video", "tied"])
@pytest.mark.parametrize("silent", [None, "all", "some"])
def test_steps(name, silent):
    """What was found out about one batch holds for that batch only.

    The last batch of a loader is smaller, sequences have other lengths, and the first
    batch may have no gradient to tell anything by.
    """
    torch.manual_seed(1)

    def loss(model, x):
        weight = torch.ones(len(x)).double()
        if silent is not None and x.shape[1] == 5:
            mean = x.flatten(1).double().mean(1)
            weight *= (mean > (V / 2 if name in IDS else 0)) * (silent == "some")
        return square_loss(model, x) * weight

    sizes = (4, 5), (4, 3), (3, 4), (4, 4), (1, 4), (12, 1), (0, 3)
    batches = [batch_of(name, *size) for size in sizes]
    steps({**FLOATS, **IDS}[name](), batches, loss_fn=loss)


def test_several_named_inputs():
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
        exact(model, batch, square_loss, batched=named, shared=["places"])


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_several_outputs(used):
    """A router in small: the loss uses the second output as well."""

    def loss(m, x):
        outputs = m(x)
        return squares(sum(outputs[i] * (i + 1) for i in used))

    model = Net(
        lambda m, x: ((h := m.fc(x)) * m.w.sin(), h * m.w.exp()),
        **dict(fc=linear(), w=weights(D)),
    ).double()
    exact(model, torch.randn(4, 5, D).double(), loss)


@pytest.mark.parametrize(
    "layer", [nn.LSTM(D, 3), nn.TransformerEncoderLayer(D, 2, 6, 0.0)]
)
def test_model_that_takes_time_first(layer):
    """``make_private(batch_first=False)``, as for Opacus's own layers."""

    def loss_fn(m, x):
        y = m(x.transpose(0, 1))
        return squares((y[0] if isinstance(y, tuple) else y).transpose(0, 1))

    batches = [batch_of("", B, T) for B, T in ((4, 4), (1, 3), (3, 5))]
    steps(nn.Sequential(layer), batches, loss_fn=loss_fn, batch_first=False)


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


def test_function_of_autograd():
    """It is run one sample after the other, with a warning."""
    model = Net(
        lambda m, x: torch.cat(Scaled.apply(m.fc(x), m.w, 3), dim=1),
        **dict(fc=linear(), w=weights(D)),
    ).double()
    with pytest.warns(UserWarning, match="one sample after the other"):
        exact(model, torch.randn(4, D).double(), square_loss)


def positive(layer):
    parametrize.register_parametrization(layer, "weight", Net(lambda m, w: w.exp()))
    return layer


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize(
    "way",
    [
        *(parametrizations.weight_norm, parametrizations.spectral_norm),
        *(parametrizations.orthogonal, positive, weight_norm, spectral_norm, pruned),
    ],
    ids=lambda way: way.__name__,
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_parametrized(way):
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
    private = make_private(model, *MODE, batch_size=3, max_grad_norm=c)
    private.step(x, square_loss)
    got = {n: (before[n] - p.detach()) * 3 for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c))
    for (n, x), y in zip(model.named_buffers(), alone[0].buffers()):
        assert torch.equal(x, y), n


def test_samples_that_take_other_branches():
    """What is kept of each part of a batch is its own."""

    def then(m, x):
        signs = [bool(row.sum() > 0) for row in x]
        scale = torch.tensor(signs).to(x)[:, None, None, None] + 1
        return m.head((scale * m.conv(x)).transpose(1, 3))

    conv = nn.Conv2d(2, 2, (65, 1), padding=(32, 0), groups=2, bias=False)
    x = torch.randn(5, 2, 12, 8).double().abs()
    x[3:] *= -1
    model = Net(then, conv=conv, head=nn.Linear(2, 3)).double()
    exact(model, x, square_loss)


def test_unfrozen_later():
    model, x = FLOATS["video"]().double(), torch.randn(4, 3, D).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.lstm.requires_grad_(False)
    private = make_private(model, *MODE, batch_size=4, optimizer=optimizer)
    private.step(x, square_loss)
    model.lstm.requires_grad_(True)
    plain = FLOATS["video"]().double()
    plain.load_state_dict(model.state_dict())
    expected = clipped_sum(oracle(plain, x, square_loss), "flat", 1.0)
    private.step(x, square_loss)
    assert_same({n: p.grad * 4 for n, p in model.named_parameters()}, expected)


def test_autocast():
    """It is run again in the precision it ran in."""

    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square_loss(lambda x: model(x).float(), x)

    model = Net(
        lambda m, x: torch.einsum("btd,edh->bteh", m.fc(x), m.w / 2).tanh().sum(2),
        **dict(fc=linear(), w=weights(3, D, 5)),
    )
    exact(model, torch.randn(4, 6, D), loss, tolerance=0.05)
