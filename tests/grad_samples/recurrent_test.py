"""nn.RNN, nn.LSTM, nn.GRU and their cells, through all of time."""

import pytest
import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.losses import PerSample
from tests.common import CRASHES, square_loss
from tests.grad_samples.rule_case import BOTH, RuleCase, RuleTests, exact


def rows(width):
    return lambda B, T: torch.randn(B, T, width)


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


class Loop(nn.Module):
    """A cell, step by step, from a state that is computed or zero."""

    def __init__(self, cell, start=False):
        super().__init__()
        self.cell, self.start = cell, nn.Linear(2, 3) if start else None

    def forward(self, x):
        state, outputs = None, []
        if self.start is not None:
            state = self.start(x[:, 0]).tanh()
            state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        for t in range(x.size(1)):
            state = self.cell(x[:, t], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, dim=1)


class TestCells(RuleTests):
    cases = {
        "tanh": RuleCase(lambda: Loop(nn.RNNCell(2, 3)), rows(2)),
        "LSTM": RuleCase(lambda: Loop(nn.LSTMCell(2, 3), start=True), rows(2)),
        "GRU": RuleCase(lambda: Loop(nn.GRUCell(2, 3, bias=False), True), rows(2)),
    }


class Again(nn.Module):
    """Two calls of one layer in some way."""

    def __init__(self, kind, how):
        super().__init__()
        self.rnn, self.how = kind(3, 3, batch_first=True), how
        if how in ("one weight in two layers", "encoder and decoder"):
            self.two = kind(3, 3, batch_first=True)
        if how == "one weight in two layers":
            self.two.weight_ih_l0 = self.rnn.weight_ih_l0
            self.two.weight_hh_l0 = self.rnn.weight_hh_l0
        if how == "one weight in two places":
            self.rnn.weight_hh_l0 = self.rnn.weight_ih_l0
            self.rnn.bias_hh_l0 = self.rnn.bias_ih_l0

    def forward(self, x):
        y, state = self.rnn(x)
        if self.how == "stacked":
            return self.rnn(y)[0]
        if self.how == "two inputs":
            return y[:, -1] * self.rnn(x.flip(1)[:, :2])[0][:, -1]
        if self.how in ("chunks", "detached"):
            if self.how == "detached":
                state = torch.utils._pytree.tree_map(torch.detach, state)
            return torch.cat([y, self.rnn(x, state)[0]], dim=1)
        if self.how == "one weight in two layers":
            return self.two(y)[0]
        if self.how == "encoder and decoder":
            return self.two(x[:, 1:], state)[0]
        if self.how == "sample by sample":
            return torch.stack([self.rnn(sample)[0] for sample in x])
        if self.how == "a weight used elsewhere":
            return F.linear(y, self.rnn.weight_hh_l0[:3])
        return y.relu_() if self.how == "in place" else y


HOWS = (
    *("stacked", "two inputs", "chunks", "detached", "encoder and decoder", "in place"),
    *("one weight in two layers", "one weight in two places", "sample by sample"),
    "a weight used elsewhere",
)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("how", HOWS)
def test_uses(kind, how):
    for B, T in ((3, 5), (4, 4), (1, 3)):
        x = torch.randn(B, T, 3).double()
        exact(Again(kind, how).double(), x, square_loss, BOTH)


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
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            criterion=PerSample(),
            data_loader=DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            grad_sample_mode="ew",
            wrap_model=wrap,
        )
    assert not isinstance(info.value, CRASHES), info.value
    assert "forward" not in vars(layer) and not layer._forward_hooks
