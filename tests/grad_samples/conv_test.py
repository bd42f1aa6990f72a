"""Convolutions, plain and transposed, in every configuration torch knows."""

import copy
import random

import pytest
import torch
from torch import nn

from opacus_ext import Refused
from tests.common import Net, run_mode, square_loss
from tests.grad_samples.rule_case import BOTH, MODE, RuleCase, RuleTests, exact

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def case(cls, *args, space=(), channels=4, **kwargs):
    """A convolution of maps ``[B, channels, *space, T + 3]``."""
    return RuleCase(
        lambda: cls(*args, **kwargs),
        lambda B, T: torch.randn(B, channels, *space, T + 3),
    )


class TestConv(RuleTests):
    ops = (torch.conv1d, torch.conv2d, torch.conv3d)
    cases = {
        "conv1d": case(nn.Conv1d, 4, 3, 2, stride=2, padding=1, dilation=2),
        "few windows": case(nn.Conv1d, 4, 8, 3, stride=3, dilation=2),
        "one place": case(nn.Conv1d, 4, 2, 1, bias=False),
        "depthwise": case(nn.Conv1d, 4, 8, 3, padding=1, groups=4),
        "conv2d": case(nn.Conv2d, 4, 2, (2, 3), padding="same", groups=2, space=(4,)),
        "circular": case(
            *(nn.Conv2d, 4, 2, 3), padding=(2, 1), padding_mode="circular", space=(4,)
        ),
        "conv3d": case(nn.Conv3d, 2, 2, (2, 1, 2), channels=2, space=(3, 2)),
        "turned": RuleCase(
            lambda: nn.Conv1d(3, 3, 3, padding=2),
            lambda B, T: torch.randn(B, 1, 3).mT,
        ),
    }


class TestConvTranspose(RuleTests):
    cases = {
        "conv1d": case(nn.ConvTranspose1d, 4, 3, 3, stride=2, output_padding=1),
        "groups": case(nn.ConvTranspose1d, 4, 4, 3, padding=1, groups=2, dilation=2),
        "conv2d": case(nn.ConvTranspose2d, 4, 2, 2, stride=(2, 1), space=(3,)),
        "conv3d": case(nn.ConvTranspose3d, 2, 2, 2, channels=2, space=(2, 2)),
    }


def settings_of(rng, dims):
    """Arguments of a convolution, and a size of its input."""

    def each(low, high):
        return tuple(rng.randint(low, high) for _ in range(dims))

    groups, kernel, dilation = rng.randint(1, 3), each(1, 3), each(1, 2)
    padding = rng.choice([rng.randint(0, 2), each(0, 2), "same", "valid"])
    space = tuple(
        max(d * (k - 1) + 1, 3) + rng.randint(0, 2) for k, d in zip(kernel, dilation)
    )
    return space, dict(
        in_channels=groups * rng.randint(1, 2),
        out_channels=groups * rng.randint(1, 2),
        kernel_size=kernel,
        stride=1 if padding == "same" else each(1, 3),
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=rng.random() < 0.5,
        padding_mode=rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"]),
    )


def transposed_settings_of(rng, dims):
    groups, space, rows = rng.randint(1, 3), [], []
    for _ in range(dims):
        k, s, d, size = (rng.randint(1, high) for high in (3, 3, 2, 3))
        out = rng.randint(0, max(s, d) - 1)
        whole = (size - 1) * s + d * (k - 1) + 1 + out
        rows.append((k, s, d, rng.randint(0, min(2, (whole - 1) // 2)), out))
        space.append(size)
    names = ("kernel_size", "stride", "dilation", "padding", "output_padding")
    channels = [groups * rng.randint(1, 2) for _ in range(2)]
    given = dict(zip(names, zip(*rows)), groups=groups, bias=rng.random() < 0.5)
    return space, dict(given, in_channels=channels[0], out_channels=channels[1])


@pytest.mark.parametrize("dims", CONV)
@pytest.mark.parametrize(
    "kinds, draw", [(CONV, settings_of), (TRANSPOSED, transposed_settings_of)]
)
def test_settings(dims, kinds, draw):
    rng = random.Random(dims)
    for _ in range(16 if dims < 3 else 8):
        space, kwargs = draw(rng, dims)
        model = kinds[dims](**kwargs).double()
        x = torch.randn(rng.choice([0, 1, 3, 4]), kwargs["in_channels"], *space)
        exact(model, x.double(), square_loss, BOTH)


def shared(first, second):
    """Makes two layers of one weight, the second on the output of the first."""

    def then(m, x):
        x = m.first(x).tanh()
        if isinstance(second, nn.ConvTranspose1d):
            return m.second(x, output_size=[6])
        return m.second(x[:, : second.in_channels])

    model = Net(then, first=copy.deepcopy(first), second=copy.deepcopy(second))
    model.second.weight = model.first.weight
    return model


DOWN = dict(kernel_size=3, stride=2, padding=1)
SHARED = {
    "autoencoder": (nn.Conv1d(4, 4, **DOWN), nn.ConvTranspose1d(4, 4, **DOWN)),
    "grouped autoencoder": (
        nn.Conv1d(4, 4, groups=2, **DOWN),
        nn.ConvTranspose1d(4, 4, groups=2, **DOWN),
    ),
    "two dilations": (
        nn.Conv1d(4, 4, 3, padding=1),
        nn.Conv1d(4, 4, 3, dilation=3, padding=4, bias=False),
    ),
    "other groups": (nn.Conv1d(4, 4, 2, groups=2), nn.Conv1d(2, 4, 2)),
}


@pytest.mark.parametrize("name", SHARED)
def test_one_weight_of_two_convolutions(name):
    """Their strides, dilations and biases are their own."""
    x = torch.randn(3, 4, 6).double()
    exact(shared(*SHARED[name]).double(), x, square_loss)


def test_sample_by_sample():
    """Unbatched inputs ``[C, T]`` in a loop."""
    model = Net(
        lambda m, x: torch.stack([m.conv(row) for row in x]), conv=nn.Conv1d(2, 3, 2)
    )
    exact(model.double(), torch.randn(4, 2, 5).double(), square_loss)


def test_samples_as_channels():
    """``[B, T]`` is an unbatched input of B channels: the samples mix."""
    model = nn.Conv1d(4, 4, 1).double()
    with pytest.raises((Refused, RuntimeError)):
        run_mode(*MODE, model, torch.randn(4, 5).double(), square_loss)


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last(dims):
    form = torch.channels_last if dims == 2 else torch.channels_last_3d
    model = nn.Sequential(
        CONV[dims](2, 4, 2, groups=2),
        nn.Tanh(),
        TRANSPOSED[dims](4, 2, 2, groups=2, stride=2),
    )
    model = model.double().to(memory_format=form)
    x = torch.randn(4, 2, *[3] * dims).double().to(memory_format=form)
    assert not x.is_contiguous()
    exact(model, x, square_loss)
