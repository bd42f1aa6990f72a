"""nn.RNN, nn.LSTM, nn.GRU and their cells, through all of time."""

from functools import partial

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F

from opacus_ext.grad_sample.rules import recurrent
from tests.common import CRASHES, Net, make_private, net, square_loss
from tests.grad_samples.rule_case import BOTH, RuleCase, RuleTests, exact, rows


def everything(layer, x):
    """Outputs and states, samples first."""
    output, state = layer(x if layer.batch_first else x.transpose(0, 1))
    states = state if isinstance(state, tuple) else (state,)
    turned = [s.transpose(0, 1) for s in states]
    output = output if layer.batch_first else output.transpose(0, 1)
    return torch.cat([y.flatten(1) for y in (output, *turned)], 1)


def last_cell(layer, x):
    """No gate and no projection of the last step has a gradient."""
    return layer(x)[1][1].transpose(0, 1)


def case(kind, features=2, width=3, call=everything, **kwargs):
    kwargs.setdefault("batch_first", True)
    return RuleCase(
        lambda: getattr(nn, kind)(features, width, **kwargs),
        rows(features),
        call,
        without=("test_flattened",) if call is everything else (),
    )


class Saturated(nn.GRU):
    """Gates of exactly 0 and 1."""

    def __init__(self):
        super().__init__(2, 3, batch_first=True)
        for name, p in self.named_parameters():
            nn.init.constant_(p, 1e3 if "bias_ih" in name else 0.5)


class TestLayers(RuleTests):
    cases = {
        "tanh": case("RNN", bidirectional=True),
        "relu": case("RNN", nonlinearity="relu", num_layers=2, batch_first=False),
        "LSTM": case("LSTM", num_layers=2, bidirectional=True),
        "LSTM, projected": case("LSTM", proj_size=2, num_layers=2, bias=False),
        "LSTM, time first": case("LSTM", batch_first=False),
        "LSTM, last cell": case("LSTM", call=last_cell, proj_size=2),
        "GRU": case("GRU", num_layers=2, bidirectional=True, bias=False),
        "GRU, saturated": RuleCase(Saturated, rows(2)),
    }


@pytest.fixture
def by_kernel(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(recurrent, "by_kernel", lambda gates: True)


@pytest.mark.usefixtures("by_kernel")
class TestKernels(RuleTests):
    cases = {
        "tanh": case("RNN", batch_first=False),
        "LSTM": case("LSTM", num_layers=2, bidirectional=True, bias=False),
        "LSTM, last cell": case("LSTM", call=last_cell),
        "GRU": case("GRU", bidirectional=True),
    }


RELU = partial(nn.RNN, nonlinearity="relu")


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("kind", [nn.RNN, RELU, nn.LSTM, nn.GRU])
def test_infinite_gates(kind):
    """They are closed or open, and the others have gradients."""
    layer = kind(2, 3, batch_first=True).double()
    with torch.no_grad():
        layer.bias_ih_l0[0], layer.bias_ih_l0[-1] = -torch.inf, torch.inf
        if kind is RELU:  # it is closed only
            layer.bias_ih_l0[-1] = 0
    layer.bias_ih_l0.requires_grad_(False)
    model = Net(lambda m, x: everything(m.layer, x), layer=layer)
    exact(model, torch.randn(4, 5, 2).double(), square_loss, BOTH)


def loop(kind, start=False, **kwargs):
    """A cell, step by step, from a state that is computed or zero."""

    def then(m, x):
        state, outputs = None, []
        if start:
            state = m.start(x[:, 0]).tanh()
            state = (state, state) if kind is nn.LSTMCell else state
        for t in range(x.size(1)):
            state = m.cell(x[:, t], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, dim=1)

    parts = dict(start=(2, 3)) if start else {}
    return RuleCase(net(then, cell=lambda: kind(2, 3, **kwargs), **parts), rows(2))


class TestCells(RuleTests):
    cases = {
        "tanh": loop(nn.RNNCell),
        "LSTM": loop(nn.LSTMCell, start=True),
        "GRU": loop(nn.GRUCell, start=True, bias=False),
    }


def again(m, x, state):
    y, _ = m.rnn(x)
    return torch.cat([y, m.rnn(x, state)[0]], dim=1)


def two_layers(m):
    for name in ("weight_ih_l0", "weight_hh_l0"):
        setattr(m.two, name, getattr(m.rnn, name))


def two_places(m):
    m.rnn.weight_hh_l0, m.rnn.bias_hh_l0 = m.rnn.weight_ih_l0, m.rnn.bias_ih_l0


def detached(m, x):
    return torch.utils._pytree.tree_map(torch.detach, m.rnn(x)[1])


# Two calls of one layer, or of two of one weight, which ``shares`` makes.
HOWS = {
    "stacked": lambda m, x: m.rnn(m.rnn(x)[0])[0],
    "two inputs": lambda m, x: m.rnn(x)[0][:, -1] * m.rnn(x.flip(1)[:, :2])[0][:, -1],
    "chunks": lambda m, x: again(m, x, m.rnn(x)[1]),
    "detached": lambda m, x: again(m, x, detached(m, x)),
    "encoder and decoder": lambda m, x: m.two(x[:, 1:], m.rnn(x)[1])[0],
    "in place": lambda m, x: m.rnn(x)[0].relu_(),
    "one weight in two layers": lambda m, x: m.two(m.rnn(x)[0])[0],
    "one weight in two places": lambda m, x: m.rnn(x)[0],
    "sample by sample": lambda m, x: torch.stack([m.rnn(row)[0] for row in x]),
    "a weight used elsewhere": lambda m, x: F.linear(
        m.rnn(x)[0], m.rnn.weight_hh_l0[:3]
    ),
}
SHARES = {
    "one weight in two layers": two_layers,
    "one weight in two places": two_places,
}


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("how", HOWS)
def test_uses(kind, how, monkeypatch):
    for B, T in ((3, 5), (4, 4), (1, 3)):
        monkeypatch.setattr(recurrent, "by_kernel", lambda gates: B == T)
        layers = (kind(3, 3, batch_first=True) for _ in range(2))
        model = Net(HOWS[how], **dict(zip(("rnn", "two"), layers)))
        SHARES.get(how, lambda model: None)(model)
        x = torch.randn(B, T, 3).double()
        exact(model.double(), x, square_loss, BOTH)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_gpu(kind):
    torch.manual_seed(0)
    layer = kind(8, 16, num_layers=2, bidirectional=True, batch_first=True)
    model = Net(lambda m, x: m.layer(x)[0], layer=layer).to("cuda", torch.double)
    exact(model, torch.randn(4, 7, 8).to("cuda", torch.double), square_loss, BOTH)


def test_hook_of_the_user():
    """It gets what the layer returns, and may change it."""

    def hook(layer, args, output):
        assert isinstance(output[1], tuple)
        return output[0] * 2, output[1]

    model = nn.Sequential(nn.LSTM(2, 3, batch_first=True)).double()
    model[0].register_forward_hook(hook)
    x = torch.randn(4, 3, 2).double()
    exact(model, x, lambda m, x: square_loss(lambda x: m(x)[0], x))


LAYERS = [nn.LSTM(2, 3), nn.GRU(2, 3), nn.MultiheadAttention(4, 2)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_validator_leaves_it_alone(layer):
    """And still finds and replaces what is wrong beside it."""
    model = nn.ModuleDict({"layer": layer, "other": nn.Linear(2, 2)})
    assert ModuleValidator.is_valid(model)
    assert ModuleValidator.validate(model, strict=True) == []
    model["norm"] = nn.BatchNorm1d(16)
    assert not ModuleValidator.is_valid(model)
    fixed = ModuleValidator.fix(model)
    assert type(fixed.layer) is type(layer) and isinstance(fixed.norm, nn.GroupNorm)
    assert type(layer) in ModuleValidator.VALIDATORS  # for who looks it up


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_modes_of_opacus_refuse_it(wrap, layer):
    model = nn.ModuleDict({"layer": layer})
    with pytest.raises(Exception, match=type(layer).__name__) as info:
        make_private(model, "no_op", wrap, batch_size=4)
    assert not isinstance(info.value, CRASHES), info.value
    assert "forward" not in vars(layer) and not layer._forward_hooks
