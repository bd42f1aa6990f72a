"""What no mode may get wrong silently: it is exact, or an error names the culprit."""

import copy

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from opacus_ext import Refused
from tests.common import (
    CRASHES,
    Net,
    make_private,
    net,
    run_mode,
    square_loss,
    squares,
)
from tests.grad_samples.rule_case import BOTH

modes = pytest.mark.parametrize("mode, wrap", BOTH)
IDS = torch.tensor([[0, 1, 2], [3, 3, 1], [6, 5, 4], [1, 1, 1]])
X = torch.linspace(-1, 1, 36).view(4, 3, 3).double().sin()


def shared_ids(m, ids):
    """An embedding's backward pass needs the ids, which change after the forward."""
    ids = ids.clone()
    out = m.words(ids)
    ids.fill_(0)
    return out


def input_changed(m, x):
    h = m.other(x).tanh()
    out = m.fc(h)
    h.mul_(3.0)
    return out


def after_a_convolution(norm):
    """Running statistics are data of the batch without noise."""
    return lambda: nn.Sequential(nn.Conv1d(3, 3, 1), norm)


STATS = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
# By name: the model, the batch, and what the error says.
REFUSED = {
    **{
        name: (lambda given=given: nn.Embedding(7, 3, **given), IDS, name)
        for name, given in (
            ("scale_grad_by_freq", dict(scale_grad_by_freq=True)),
            ("sparse", dict(sparse=True)),
            ("max_norm", dict(max_norm=0.5)),
        )
    },
    "batch norm": (after_a_convolution(nn.BatchNorm1d(3)), X, "BatchNorm"),
    "frozen batch norm": (
        after_a_convolution(nn.BatchNorm1d(3).requires_grad_(False)),
        *(X, "running|BatchNorm"),
    ),
    "running statistics": (after_a_convolution(STATS), X, "running"),
    "kept aside": (
        net(lambda m, x: setattr(m, "aside", (y := m.fc(x)).mean()) or y, fc=(3, 3)),
        *(X, "changes aside"),
    ),
    "ids changed": (lambda: Net(shared_ids, words=nn.Embedding(7, 3)), IDS, "in place"),
    "input changed": (net(input_changed, fc=(3, 3), other=(3, 3)), X, "in place"),
    "time first": (
        net(lambda m, x: m.rnn(x.transpose(0, 1))[0], rnn=lambda: nn.LSTM(3, 4)),
        *(X, "dim 0 should be the batch dim"),
    ),
    "complex": (
        lambda: nn.ModuleDict({"inner": nn.Linear(3, 2, dtype=torch.complex128)}),
        *(X, "inner.*complex"),
    ),
    "complex RNN": (
        lambda: nn.ModuleDict({"inner": nn.RNN(3, 2, dtype=torch.complex128)}),
        *(X, "inner.*complex"),
    ),
}


@modes
@pytest.mark.parametrize("name", REFUSED)
def test_refused(mode, wrap, name):
    make, batch, said = REFUSED[name]
    if name == "time first" and mode == "hooks":
        pytest.skip("it needs no dim of the outputs")
    model = make() if "complex" in name else make().double()
    with pytest.raises((Refused, UnsupportedModuleError), match=said):
        run_mode(mode, wrap, model, batch, square_loss)


@modes
@pytest.mark.parametrize("what", ["called", "penalised"])
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(3, 3), nn.Conv1d(3, 3, 1), nn.GRU(3, 3, batch_first=True)],
    ids=str,
)
def test_layer_used_after_the_model(mode, wrap, what, layer):
    """In the loss: its gradient must not vanish in silence."""
    parts = dict(body=nn.Linear(3, 3), other=copy.deepcopy(layer))
    model = Net(lambda m, x: m.body(x), **parts).double()

    def loss_fn(m, x):
        output, other = m(x), getattr(m, "_module", m).other
        if what == "penalised":
            return squares(output) + next(other.parameters()).square().sum()
        output = other(output)
        return squares(output[0] if isinstance(output, tuple) else output)

    with pytest.raises(Exception, match="other") as info:
        run_mode(mode, wrap, model, X, loss_fn)
    assert not isinstance(info.value, CRASHES), info.value


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 12])
def test_wrong_length_of_the_loss(mode, length):
    """A loss that has not one entry per sample, of B = 4 and T = 3."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    private = make_private(model, mode, batch_size=4)

    def loss_fn(model, batch):
        losses = squares(model(batch)).sum()
        return losses.expand(length) * torch.arange(1.0, length + 1).double()

    with pytest.raises(Exception) as info:
        private.step(X, loss_fn)
    assert not isinstance(info.value, CRASHES), info.value


@modes
def test_deepcopy_computes_alike_and_apart(mode, wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    private = make_private(model, mode, wrap, batch_size=4)
    private.backward(X, square_loss)
    other = copy.deepcopy(private.module)
    for n in (1, 2, 4):
        assert other(X[:n]).shape == (n, 3, 2)
    grads = [copy.deepcopy(p.grad) for p in model.parameters()]
    square_loss(other, X).sum().backward()
    for p, grad in zip(model.parameters(), grads):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)


def test_unknown_mode():
    with pytest.raises(ValueError, match="ghost_kb"):
        make_private(nn.Linear(3, 2), "ghost_kb", batch_size=4)
