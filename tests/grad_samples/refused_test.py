"""What no mode may get wrong silently: it is exact, or an error names the culprit."""

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from opacus_ext.refused import Refused
from tests.common import (
    CRASHES,
    assert_same,
    check,
    clipped_sum,
    exact_or_refused,
    layer_modes,
    make_private,
    oracle,
    run_mode,
    square_loss,
    squares,
    wrapped,
)


class TiedByFunction(nn.Module):
    """The parent reads a child's weight: no hook of the child fires."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.fc = nn.Linear(4, 4)

    def forward(self, ids):
        return F.linear(self.fc(self.emb(ids)).tanh(), self.emb.weight)


class WithinF(nn.Module):
    """Only ever used through F.linear."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.hidden = nn.Linear(3, 3)

    def forward(self, x):
        return F.linear(self.fc(x).tanh(), self.hidden.weight, self.hidden.bias)


class Scaled(nn.Linear):
    """A Linear by type tests with isinstance, but not by what it computes."""

    def forward(self, x):
        return F.linear(x, self.weight.sin(), self.bias) * 2


class Doubling(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * self.weight.norm(dim=-1).mean()


class Regularised(nn.Module):
    """The weight enters the loss of each sample outside of any layer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x).tanh() + self.fc.weight.sum()


IDS = torch.tensor([[0, 1, 2], [3, 3, 1], [6, 5, 4], [1, 1, 1]])
X = torch.linspace(-1, 1, 36).view(4, 3, 3).double().sin()


@layer_modes
@wrapped
@pytest.mark.parametrize(
    "build, batch, names",
    [
        (TiedByFunction, IDS, ["emb.weight"]),
        (WithinF, X, ["hidden.weight", "hidden.bias"]),
        (
            lambda: nn.Sequential(Scaled(3, 4), nn.Linear(4, 2)),
            X,
            ["0.weight", "Scaled"],
        ),
        (lambda: nn.Sequential(Doubling(7, 3)), IDS, ["0.weight", "Doubling"]),
        (Regularised, X, ["fc.weight"]),
    ],
    ids=[
        "tied by F.linear",
        "F.linear only",
        "Linear subclass",
        "Embedding subclass",
        "in the loss",
    ],
)
def test_use_that_no_rule_sees(mode, wrap, build, batch, names):
    exact_or_refused(mode, wrap, build().double(), batch, square_loss, names)


@layer_modes
@wrapped
def test_hook_of_the_user_that_reads_the_weight(mode, wrap):
    """A forward hook turns the output into a function of the weight once more."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model[0].register_forward_hook(lambda m, args, out: out + m.weight.diagonal())
    exact_or_refused(mode, wrap, model, X, square_loss, ["0.weight"])


@layer_modes
@wrapped
@pytest.mark.parametrize(
    "flags",
    [{"max_norm": 0.5}, {"sparse": True}, {"scale_grad_by_freq": True}],
    ids=lambda flags: next(iter(flags)),
)
def test_embedding_flags(mode, wrap, flags):
    """Refused with the flag's name, if not exact."""
    model = nn.Sequential(nn.Embedding(7, 3, **flags), nn.Linear(3, 2)).double()
    (flag,) = flags
    if flag == "scale_grad_by_freq":
        # Counted over the batch: a sample's gradient depends on the others' ids.
        with pytest.raises(Exception, match=flag) as info:
            run_mode(mode, wrap, model, IDS, square_loss)
        assert not isinstance(info.value, CRASHES)
    else:
        exact_or_refused(mode, wrap, model, IDS, square_loss, [flag])


class InPlace(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.what = what

    def forward(self, x):
        h = self.one(x)
        if self.what == "output":
            h.mul_(2.0)
            return self.two(h)
        if self.what == "relu":
            return self.two(F.relu(h, inplace=True))
        if self.what == "residual":
            h += self.two(h.tanh())
            return h
        h = h.detach().tanh()
        out = self.two(h)
        h.mul_(3.0)  # "input"
        return out + self.one(x)


@layer_modes
@wrapped
@pytest.mark.parametrize("what", ["output", "relu", "residual"])
def test_output_changed_in_place(mode, wrap, what):
    """Legal in PyTorch, as no layer needs its own output for the backward."""
    exact_or_refused(mode, wrap, InPlace(what).double(), X, square_loss, ["one", "two"])


@layer_modes
def test_input_changed_in_place_after_use(mode):
    """PyTorch refuses this one by itself, where the layer's weight is trained."""
    model = InPlace("input").double()
    with pytest.raises(Exception) as info:
        check(mode, True, model, X, square_loss)
    assert not isinstance(info.value, CRASHES), info.value


@layer_modes
def test_ids_changed_in_place_after_use(mode):
    """The embedding's backward needs the ids: a change of them after the capture."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(7, 3)

        def forward(self, ids):
            ids = ids.clone()
            out = self.emb(ids)
            ids.fill_(0)
            return out

    with pytest.raises(Exception) as info:
        check(mode, True, Model().double(), IDS, square_loss)
    assert not isinstance(info.value, CRASHES), info.value


@layer_modes
@wrapped
def test_batch_norm(mode, wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with pytest.raises(UnsupportedModuleError, match="BatchNorm"):
        run_mode(mode, wrap, model, X[:, 0], square_loss)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_second_backward_before_a_step(mode):
    """Gradients of two batches must not add up under one C without a word."""
    model = nn.Linear(3, 2).double()
    private = make_private(model, mode, batch_size=4)
    private.backward(X, square_loss)
    first = {n: p.grad.clone() for n, p in model.named_parameters()}
    try:
        private.backward(X, square_loss)
    except Exception as error:
        assert not isinstance(error, CRASHES), error
        return
    for name, p in model.named_parameters():  # stock "ghost" starts from zero
        assert torch.allclose(p.grad, first[name]), name


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


@layer_modes
@wrapped
def test_detached_use(mode, wrap):
    """A forward without a backward of its own, as in a stop-gradient target."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return (
                self.fc(x) - self.fc(x).detach() + self.fc(self.fc(x).tanh().detach())
            )

    exact_or_refused(mode, wrap, Model().double(), X, square_loss, ["fc"])


@layer_modes
@wrapped
@pytest.mark.parametrize("discarded", [False, True])
def test_forward_between_steps(mode, wrap, discarded):
    """An evaluation, or a forward whose loss is dropped, leaves nothing behind."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    expected = clipped_sum(oracle(model, X, square_loss), "flat", 1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    private = make_private(model, mode, wrap, batch_size=4)
    with torch.set_grad_enabled(discarded):
        private.module(X[:3])
    private.step(X, square_loss)
    got = {n: (before[n] - p.detach()) * 4 for n, p in model.named_parameters()}
    assert_same(got, expected, message=mode)


def test_unknown_mode():
    with pytest.raises(ValueError, match="ghost_kb"):
        make_private(nn.Linear(3, 2), "ghost_kb", batch_size=4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 2, dtype=torch.complex128),
        nn.Conv1d(3, 2, 1, dtype=torch.complex128),
        nn.RNN(3, 2, dtype=torch.complex128),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_complex_weights(layer):
    with pytest.raises(ValueError, match="inner.*complex"):
        make_private(nn.ModuleDict({"inner": layer}), "ghost_bk", batch_size=2)


@layer_modes
def test_pruned_weights(mode):
    """They are computed before each call, of what is trained and a mask."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    prune.random_unstructured(model[0], "weight", 0.5)
    model[0].weight = model[0].weight.detach()  # so that it can be copied
    check(mode, True, model, X, square_loss)


@layer_modes
def test_kept_aside(mode):
    """What is computed of a batch and kept would reach the next one."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            y = self.fc(x)
            self.aside = y.mean((1, 2))
            return y

    with pytest.raises(Refused, match="changes aside"):
        run_mode(mode, True, Model().double(), X, square_loss)
