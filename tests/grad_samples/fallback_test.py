"""Leaf modules without a rule, and parameters that a module lends."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F

from tests.common import (
    check,
    layer_modes,
    square_loss,
    squares,
    wrapped,
)


class Scale(nn.Module):
    """A leaf that no rule knows."""

    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(d))
        self.shift = nn.Parameter(torch.randn(d))

    def forward(self, x):
        return x * self.scale.exp() + self.shift.tanh()


class ClassToken(nn.Module):
    """Bare parameters beside layers: a class token and a position table."""

    def __init__(self, T=4, d=3):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, d))
        self.positions = nn.Parameter(torch.randn(1, T + 1, d))
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return self.fc(x + self.positions).tanh()


class TwoInputs(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x, y):
        return x * self.weight.sin() + y * self.weight.cos()


class TwoOutputs(nn.Module):
    """A router in small: the loss uses the second output as well."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x):
        return x * self.weight.sin(), x * self.weight.exp()


class WithBuffer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))
        self.register_buffer("factor", torch.tensor(2.5))

    def forward(self, x):
        return (x * self.weight * self.factor).sin()


@layer_modes
@wrapped
@given(N=st.integers(0, 4), T=st.integers(1, 4), d=st.integers(1, 4))
def test_unknown_leaf(mode, wrap, N, T, d):
    model = nn.Sequential(nn.Linear(d, d), Scale(d), nn.Linear(d, 2)).double()
    check(mode, wrap, model, torch.randn(N, T, d).double(), square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("B", [1, 3, 4, 5])
def test_bare_parameters_beside_layers(mode, wrap, B):
    """T = 4, and T + 1 = 5 positions: the table's rows coincide with B in two cases."""
    model = ClassToken().double()
    x = torch.randn(B, 4, 3).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@wrapped
def test_several_inputs(mode, wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.two = TwoInputs(3)

        def forward(self, x):
            return self.two(self.fc(x), x * 2)

    x = torch.randn(4, 5, 3).double()
    check(mode, wrap, Model().double(), x, square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_several_outputs(mode, wrap, used):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.two = TwoOutputs(3)

        def forward(self, x):
            outputs = self.two(self.fc(x))
            return sum(outputs[i] * (i + 1) for i in used)

    x = torch.randn(4, 5, 3).double()
    check(mode, wrap, Model().double(), x, square_loss)


@layer_modes
@wrapped
def test_buffer(mode, wrap):
    model = nn.Sequential(nn.Linear(3, 3), WithBuffer(3)).double()
    x = torch.randn(4, 5, 3).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@wrapped
def test_convolution(mode, wrap):
    """A layer that Opacus knows and this package has no rule for."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(4, 2, 5).double()
    check(mode, wrap, model.double(), x, square_loss)


@layer_modes
def test_padding_mode_of_a_convolution(mode):
    """Opacus pads with zeros whatever the padding mode; not to be wrong silently."""
    model = nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular").double()
    x = torch.randn(4, 2, 5).double()
    check(mode, True, model, x, square_loss)


@layer_modes
@pytest.mark.parametrize("T", [3, 4])
def test_parameter_that_meets_the_batch_late(mode, T):
    """A table that is processed by a layer of its own before it meets the batch."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(T, 3)
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            table = self.fc(self.table(torch.arange(T))).tanh()
            return self.fc(x) * table

    x = torch.randn(4, T, 3).double()
    check(mode, True, Model().double(), x, lambda m, b: squares(m(b)))


# -- parameters that a module lends ------------------------------------------------


class Mixer(nn.Module):
    """Reads the weight of a convolution that it never calls, as Mamba layers do."""

    def __init__(self, d=3):
        super().__init__()
        self.inner = nn.Linear(d, d)
        self.conv = nn.Conv1d(d, d, 2, groups=d)
        self.outer = nn.Linear(d, d)

    def forward(self, x):
        y = F.pad(self.inner(x).mT, (1, 0))
        y = F.conv1d(y, self.conv.weight, self.conv.bias, groups=len(self.conv.weight))
        return x + self.outer(F.silu(y).mT)


@layer_modes
@wrapped
@pytest.mark.parametrize("B, T", [(4, 5), (3, 3), (2, 4), (1, 3)])
def test_lent_parameters(mode, wrap, B, T):
    model = nn.Sequential(nn.Linear(3, 3), Mixer(), Mixer()).double()
    check(mode, wrap, model, torch.randn(B, T, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("frozen", ["conv", "conv.bias", "0", "inner"])
def test_lent_parameters_beside_frozen_ones(mode, frozen):
    model = nn.Sequential(nn.Linear(3, 3), Mixer()).double()
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name.replace(".weight", ""))
    check(mode, True, model, torch.randn(4, 5, 3).double(), square_loss)


@layer_modes
def test_lent_in_every_call(mode):
    """The same layer twice: each call accounts for its own use."""
    mixer = Mixer()
    model = nn.Sequential(mixer, nn.Tanh(), mixer).double()
    check(mode, True, model, torch.randn(4, 5, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("order", ["call first", "read first", "aside"])
def test_lent_and_used_otherwise(mode, order):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.lender = nn.Linear(3, 3)
            self.aside = 0.0

        def forward(self, x):
            x = self.fc(x)
            if order == "call first":
                x = self.lender(x)
            weight = self.lender.weight
            x = F.linear(x.tanh(), weight)
            if order == "read first":
                x = self.lender(x)
            if order == "aside":
                self.aside = weight.sum()
            return x

    class Model(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + self[1].aside

    model = Model(nn.Linear(3, 3), Both()).double()
    x = torch.randn(4, 5, 3).double()
    check(mode, True, model, x, square_loss)


class ByValue(nn.Module):
    """Control flow that depends on the data: one sample at a time."""

    def __init__(self, d=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, d))

    def forward(self, x):
        parts = [self.weight[int(row.sum() > 0)] * row for row in x.flatten(0, -2)]
        return torch.stack(parts).view_as(x)


class Square(torch.autograd.Function):
    """Of the old style, which functorch refuses."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class ByFunction(Scale):
    def forward(self, x):
        return Square.apply(super().forward(x))


@layer_modes
@wrapped
@pytest.mark.parametrize("layer", [ByValue, ByFunction])
@pytest.mark.parametrize("B, T", [(4, 5), (3, 3), (1, 2)])
def test_branches_and_functions_that_vmap_cannot_run(mode, wrap, layer, B, T):
    model = nn.Sequential(nn.Linear(3, 3), layer(3), nn.Linear(3, 2)).double()
    check(mode, wrap, model, torch.randn(B, T, 3).double(), square_loss)


class Places(nn.Module):
    """Multiplies each place by a number that comes as a second input ``[T, 1]``."""

    def __init__(self, d=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x, places):
        return x * places * self.weight.sin()


class Gated(nn.Module):
    """Takes ``[B, T, d]``, and the gates flattened: ``[B * T, 1]``."""

    def __init__(self, d=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x, gates):
        return (x.flatten(0, 1) * gates * self.weight.sin()).view_as(x)


class With(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.fc, self.gate, self.part = nn.Linear(3, 3), nn.Linear(3, 1), part

    def forward(self, x):
        x = self.fc(x)
        if isinstance(self.part, Gated):
            return self.part(x, self.gate(x).flatten(0, 1))
        places = torch.arange(1, x.shape[1] + 1).to(x)[:, None]
        return self.part(x, places) + self.gate(x)


@layer_modes
@pytest.mark.parametrize("part", [Places, Gated])
@pytest.mark.parametrize("B, T", [(4, 5), (3, 3), (2, 4)])
def test_inputs_with_and_without_a_batch(mode, part, B, T):
    model = With(part()).double()
    check(mode, True, model, torch.randn(B, T, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("B", [3, 4])
def test_inputs_that_the_output_does_not_tell_apart(mode, B):
    """T = 4. At a weight of zero the output is zero, whatever belongs to whom."""
    model = With(Places()).double()
    nn.init.zeros_(model.part.weight)
    x = torch.randn(B, 4, 3).double()
    check(mode, True, model, x, square_loss)


class Masked(nn.Module):
    """A table of places, still zero, beside a mask of each sample."""

    def __init__(self):
        super().__init__()
        self.fc, self.part = nn.Linear(3, 3), Table()

    def forward(self, x):
        mask = (x[..., 0] > 0).to(x) + 0.5
        return self.part(self.fc(x), mask, torch.arange(x.shape[1])).tanh()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 3))

    def forward(self, x, mask, places):
        return (x + self.table[places]) * mask[..., None]


@layer_modes
@pytest.mark.parametrize("B", [3, 4])
def test_inputs_with_and_without_a_batch_beside_a_table(mode, B):
    """T = 4. The mask has a batch, the places have none."""
    model, x = Masked().double(), torch.randn(B, 4, 3).double()
    check(mode, True, model, x, square_loss)


class Normalised(Table):
    def forward(self, *inputs):
        return super().forward(*inputs).softmax(-1)


@layer_modes
def test_rows_of_equal_sums_are_told_apart(mode):
    model = Masked().double()
    model.part = Normalised().double()
    nn.init.normal_(model.part.table)
    check(mode, True, model, torch.randn(4, 4, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("kind", [nn.RNN, nn.MultiheadAttention])
def test_read_beside_a_stand_in(mode, kind):
    """The layer's own use is recorded by what stands in for its forward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.layer = kind(4, 4 if kind is nn.RNN else 2, batch_first=True)

        def forward(self, x):
            x = self.fc(x)
            if kind is nn.RNN:
                return F.linear(self.layer(x)[0], self.layer.weight_hh_l0)
            return F.linear(self.layer(x, x, x)[0], self.layer.out_proj.weight)

    x = torch.randn(3, 5, 4).double()
    check(mode, True, Model().double(), x, square_loss)


@layer_modes
def test_autocast(mode):
    """It is run again in the precision it ran in."""

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 5) / 2)

        def forward(self, x):
            return torch.einsum("btd,edh->bteh", x, self.weight).tanh().sum(2)

    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square_loss(lambda x: model(x).float(), x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Stacked())
    check(mode, True, model, torch.randn(4, 6, 3), loss, tolerance=0.05)
