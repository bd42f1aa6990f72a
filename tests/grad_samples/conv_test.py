"""Convolutions, plain and transposed, in every configuration torch knows."""

import copy
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from torch import nn
from torch.nn import functional as F

from opacus_ext import GradSample, workspace
from opacus_ext.grad_sample.core import clip, gradients
from tests.common import (
    CRASHES,
    assert_same,
    check,
    clipped_sum,
    exact_or_refused,
    half_clipped,
    layer_modes,
    make_private,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    wrapped,
)

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@st.composite
def convs(draw, dims):
    """Arguments of a convolution, and a size of its input."""

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 3))
    kernel, dilation = each(1, 3), each(1, 2)
    padding = draw(st.sampled_from(["int", "int", "tuple", "same", "valid"]))
    if padding in ("int", "tuple"):
        stride = each(1, 3 if dims < 3 else 2)
        padding = draw(st.integers(0, 2)) if padding == "int" else each(0, 2)
    else:
        stride = 1 if padding == "same" else each(1, 2)
    space = tuple(
        max(d * (k - 1) + 1, 3) + draw(st.integers(0, 2))
        for k, d in zip(kernel, dilation)
    )
    kwargs = dict(
        in_channels=groups * draw(st.integers(1, 2)),
        out_channels=groups * draw(st.integers(1, 2)),
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(
            st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])
        ),
    )
    return kwargs, space


@st.composite
def transposed_convs(draw, dims):
    groups = draw(st.integers(1, 3))
    kwargs = dict(
        in_channels=groups * draw(st.integers(1, 2)),
        out_channels=groups * draw(st.integers(1, 2)),
        groups=groups,
        bias=draw(st.booleans()),
    )
    names = ("kernel_size", "stride", "dilation", "padding", "output_padding")
    space, rows = [], []
    for _ in range(dims):
        k, s = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        d = draw(st.integers(1, 2))
        out = draw(st.integers(0, max(s, d) - 1))
        size = draw(st.integers(1, 3))
        whole = (size - 1) * s + d * (k - 1) + 1 + out
        rows.append((k, s, d, draw(st.integers(0, min(2, (whole - 1) // 2))), out))
        space.append(size)
    kwargs.update(zip(names, zip(*rows)))
    return kwargs, tuple(space)


@layer_modes
@wrapped
@pytest.mark.parametrize("dims", CONV)
@given(N=st.integers(0, 4), data=st.data())
def test_conv(mode, wrap, dims, N, data):
    kwargs, space = data.draw(convs(dims))
    model = CONV[dims](**kwargs).double()
    x = torch.randn(N, kwargs["in_channels"], *space).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 1, (2, 1), "same", "valid"])
def test_conv_settings(mode, padding, padding_mode):
    """What the examples above may leave out."""
    for groups, stride, dilation, bias in itertools.product(
        (1, 2, 4), (1, (2, 3)), (1, (1, 2)), (True, False)
    ):
        if padding == "same" and stride != 1:
            continue
        model = nn.Conv2d(
            *(4, 4, (3, 2), stride, padding, dilation, groups, bias, padding_mode)
        )
        x = torch.randn(3, 4, 5, 4).double()
        check(mode, True, model.double(), x, square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("dims", TRANSPOSED)
@given(N=st.integers(0, 4), data=st.data())
def test_conv_transpose(mode, wrap, dims, N, data):
    kwargs, space = data.draw(transposed_convs(dims))
    model = TRANSPOSED[dims](**kwargs).double()
    x = torch.randn(N, kwargs["in_channels"], *space).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@given(N=st.integers(0, 4), channels=st.integers(1, 4), multiplier=st.integers(1, 2))
def test_depthwise_separable(mode, N, channels, multiplier):
    wide = channels * multiplier
    model = nn.Sequential(
        nn.Conv2d(channels, wide, 3, padding=1, groups=channels),
        nn.Tanh(),
        nn.Conv2d(wide, 2, 1, bias=False),
    ).double()
    check(mode, True, model, torch.randn(N, channels, 4, 3).double(), square_loss)


@layer_modes
def test_output_size_given_at_the_call(mode):
    """``output_size`` sets the output padding of one call."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(2, 3, 3, stride=2, padding=1)
            self.up = nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1)

        def forward(self, x):
            return self.up(self.down(x).tanh(), output_size=x.shape[2:])

    x = torch.randn(4, 2, 6, 5).double()
    check(mode, True, Model().double(), x, square_loss)


# -- uses ----------------------------------------------------------------------------


class Twice(nn.Module):
    """One convolution on its own output, at two resolutions."""

    def __init__(self, cls, **kwargs):
        super().__init__()
        self.conv = cls(4, 4, 3, padding=1, **kwargs)

    def forward(self, x):
        x = self.conv(x).tanh()
        return self.conv(x[..., ::2]) + x[..., ::2]


@layer_modes
@wrapped
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d])
def test_twice(mode, wrap, cls, groups):
    model = Twice(cls, groups=groups).double()
    x = torch.randn(4, 4, *[6, 5][: 2 if cls is nn.Conv2d else 1]).double()
    check(mode, wrap, model, x, square_loss)


@layer_modes
@pytest.mark.parametrize("groups", [1, 2])
def test_weight_of_an_autoencoder(mode, groups):
    """Encoder and decoder share a weight; biases and strides are their own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=groups)
            self.decoder = nn.ConvTranspose2d(
                4, 2, 3, stride=2, padding=1, groups=groups
            )
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(self.encoder(x).tanh())

    check(mode, True, Model().double(), torch.randn(4, 2, 5, 7).double(), square_loss)


@layer_modes
def test_one_weight_at_two_dilations(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.near = nn.Conv1d(2, 2, 3, padding=1)
            self.far = nn.Conv1d(2, 2, 3, padding=4, dilation=4, bias=False)
            self.far.weight = self.near.weight

        def forward(self, x):
            return self.near(x).tanh() - self.far(x)

    check(mode, True, Model().double(), torch.randn(4, 2, 6).double(), square_loss)


@layer_modes
def test_one_weight_of_different_groups(mode):
    """Of one shape: ``[4, 4 / 2, k]`` and ``[4, 2, k]``."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.coarse, self.fine = nn.Conv1d(4, 4, 2, groups=2), nn.Conv1d(2, 4, 2)
            self.fine.weight = self.coarse.weight

        def forward(self, x):
            return self.coarse(x).tanh() + self.fine(x[:, :2])

    names = ["coarse", "fine"]
    x = torch.randn(4, 4, 5).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, names)


@layer_modes
@pytest.mark.parametrize("cls", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("B, T", [(4, 4), (3, 5), (1, 3)])
def test_of_constants(mode, cls, groups, B, T):
    """A map of coordinates, ``[1, C, T]``, added to every sample."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.conv = cls(2, 4, 1, groups=groups), nn.Conv1d(4, 4, 1)
            self.register_buffer("grid", torch.randn(1, 2, T))

        def forward(self, x):
            return self.conv(x) + self.embed(self.grid)

    x = torch.randn(B, 4, T).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["embed"])


class OnPatches(nn.Module):
    """Convolutions on ``[B * k, C, H, W]``, k images or patches a sample."""

    def __init__(self, inner=False, groups=1):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, groups=groups)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 2, 2, stride=2, groups=groups)
        self.head = nn.Linear(2, 3)
        self.inner = inner  # sample-minor rows

    def forward(self, x):
        x = x.transpose(0, 1) if self.inner else x
        rows = self.second(self.norm(self.first(x.flatten(0, 1))).tanh())
        rows = rows.mean((2, 3)).unflatten(0, x.shape[:2])
        return self.head(rows.transpose(0, 1) if self.inner else rows)


@layer_modes
@wrapped
@pytest.mark.parametrize("B, k", [(4, 3), (4, 4), (1, 3), (3, 1), (2, 4)])
@pytest.mark.parametrize("inner", [False, True])
def test_flattened(mode, wrap, B, k, inner):
    model = OnPatches(inner, groups=2).double()
    # Something ahead that sees the samples: else B is in no layer's shape.
    model = nn.Sequential(nn.Linear(4, 4), model).double()
    check(mode, wrap, model, torch.randn(B, k, 2, 4, 4).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("B, k", [(4, 3), (4, 4), (1, 3), (2, 4)])
def test_flattened_from_the_start(mode, B, k):
    x = torch.randn(B, k, 2, 4, 4).double()
    exact_or_refused(mode, True, OnPatches().double(), x, square_loss, ["first"])


@layer_modes
def test_batch_of_one_on_every_axis(mode):
    """B = C = T = 4: a shape tells nothing."""
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh(), nn.Conv1d(4, 4, 1)).double()
    check(mode, True, model, torch.randn(4, 4, 4).double(), square_loss)


@layer_modes
def test_sample_by_sample(mode):
    """Unbatched inputs ``[C, T]`` in a loop: exact, or refused."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 2)

        def forward(self, x):
            return torch.stack([self.conv(sample) for sample in x])

    x = torch.randn(4, 2, 5).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["conv"])


@layer_modes
def test_samples_as_channels(mode):
    """``[B, T]`` is an unbatched input of B channels: the samples mix."""
    model = nn.Conv1d(4, 4, 1).double()
    with pytest.raises(Exception) as info:
        run_mode(mode, True, model, torch.randn(4, 5).double(), square_loss)
    assert not isinstance(info.value, CRASHES), info.value


# -- parameters ----------------------------------------------------------------------


@layer_modes
@wrapped
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("cls", [nn.Conv2d, nn.ConvTranspose2d])
def test_frozen(mode, wrap, cls, frozen):
    """In the middle one of three; its neighbors are trained."""
    model = nn.Sequential(
        cls(2, 4, 2), nn.Tanh(), cls(4, 4, 2, groups=2), nn.Tanh(), cls(4, 1, 2)
    ).double()
    for name, p in model[2].named_parameters():
        p.requires_grad = frozen not in (name, "both")
    check(mode, wrap, model, torch.randn(4, 2, 5, 4).double(), square_loss)


@layer_modes
def test_input_needs_no_gradient(mode):
    """The stem is frozen, and the first trained layer meets constants."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 2)).double()
    model[0].requires_grad_(False)
    check(mode, True, model, torch.randn(4, 2, 6).double(), square_loss)


# -- memory formats ------------------------------------------------------------------


@layer_modes
@wrapped
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_channels_last(mode, wrap, dims, groups):
    form = torch.channels_last if dims == 2 else torch.channels_last_3d
    model = nn.Sequential(
        CONV[dims](2, 4, 2, groups=groups),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        TRANSPOSED[dims](4, 2, 2, groups=groups, stride=2),
    )
    model = model.double().to(memory_format=form)
    x = torch.randn(4, 2, *[3] * dims).double().to(memory_format=form)
    assert not x.is_contiguous()
    check(mode, wrap, model, x, square_loss)


@layer_modes
def test_not_contiguous(mode):
    """Permuted, strided and expanded inputs, as for a vision transformer's stem."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1)).double()
    x = torch.randn(4, 5, 8, 2).double()
    check(mode, True, model, x.permute(0, 3, 1, 2)[..., ::2], square_loss)
    check(mode, True, model, x[:, :1].mT.expand(4, 2, 2, 8), square_loss)


# -- ways to compute -----------------------------------------------------------------


@pytest.fixture
def tiny_workspace():
    before = workspace(64)
    yield
    workspace(before)


@pytest.fixture
def kept(monkeypatch):
    """How many bytes of per-sample gradients each parameter's norm has kept."""
    seen, running = [], []
    squared_norm = GradSample.squared_norm

    def spy(self, *args, **kwargs):
        running.append(self)
        norm = squared_norm(self, *args, **kwargs)
        running.pop()
        if not running:  # not a part of another norm
            seen.append(self.cached_bytes)
        return norm

    monkeypatch.setattr(GradSample, "squared_norm", spy)
    for module in (clip, gradients):
        monkeypatch.setattr(module, "SMALL", 0)  # or small ones are summed together
    return seen


def deep():
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(4, 4, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.ConvTranspose1d(4, 2, 3, groups=2, stride=2),
    ).double()


@layer_modes
@wrapped
@pytest.mark.parametrize("T", [4, 60])
def test_norms_in_parts(mode, wrap, T, tiny_workspace, kept):
    check(mode, wrap, deep(), torch.randn(5, 2, T).double(), square_loss)
    assert not any(kept)


@layer_modes
@pytest.mark.parametrize("shared", [False, True])
def test_norms_in_parts_of_a_shared_convolution(mode, shared, tiny_workspace):
    model = Twice(nn.Conv2d, groups=2 if shared else 1).double()
    check(mode, True, model, torch.randn(4, 4, 9, 8).double(), square_loss)


def test_gradients_are_kept(kept):
    """Book-keeping materializes them for the norm, and uses them for the sum."""
    model, x = deep(), torch.randn(5, 2, 400).double()
    check("ghost_bk", True, model, x, square_loss)
    assert sum(size > 0 for size in kept) == 2  # the weights of two, not the biases
    del kept[:]
    check("ghost", True, model, x, square_loss)
    assert kept and not any(kept)


def test_kept_memory_is_used_again():
    """Steps of other batch sizes after one that has kept its gradients."""
    model = deep()
    private = make_private(model, "ghost_bk", batch_size=4, max_grad_norm=0.5)
    for B, T in ((4, 400), (3, 420), (6, 400), (2, 4), (5, 450)):
        x = torch.randn(B, 2, T).double()
        clean = copy.deepcopy(deep())
        clean.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(clean, x, square_loss), "flat", 0.5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        private.step(x, square_loss)
        got = {n: (before[n] - p.detach()) * 4 for n, p in model.named_parameters()}
        assert_same(got, expected, message=f"B={B}")


# -- numbers -------------------------------------------------------------------------


@layer_modes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dims", CONV)
def test_norm_under_a_mean_loss(mode, dims, reduction):
    """
    The norm of a sample is that of its own loss, whatever the batch's loss divides by:
    other implementations scale the gradients of a convolution by B, or by the output's
    positions, in the norm only.
    """
    model = CONV[dims](2, 3, 2).double()
    x = torch.randn(4, 2, *[4] * dims).double()

    def mean_loss(m, x):  # over channels and positions
        return getattr((m(x) - 1).square().flatten(1), reduction)(dim=1)

    grads = oracle(model, x, mean_loss)
    norms = norms_of(grads)
    private = make_private(copy.deepcopy(model), mode, batch_size=4)
    private.backward(x, mean_loss)
    if mode == "hooks":
        got = norms_of({n: p.grad_sample for n, p in private.module.named_parameters()})
    else:
        got = private.handle.per_sample_gradient_norms
    torch.testing.assert_close(got, norms, rtol=1e-10, atol=0)

    for c in (float(norms.min()) / 100, half_clipped(grads)):
        check(mode, True, model, x, mean_loss, max_grad_norm=c)
    # One sample alone, clipped, has a norm of exactly C.
    c = float(norms[0]) / 100
    (alone,) = norms_of(
        {
            n: g[None]
            for n, g in run_mode(
                mode, True, model, x[:1], mean_loss, max_grad_norm=c
            ).items()
        }
    )
    assert float(alone) == pytest.approx(c, rel=1e-3)


@layer_modes
def test_float32(mode):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 2, 2, groups=2))
    x = torch.randn(5, 3, 8, 8)
    check(mode, True, model, x, square_loss, tolerance=1e-4)


@layer_modes
@wrapped
def test_bf16_autocast(mode, wrap):
    """Against the oracle under the same autocast, within bf16's resolution."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 2, 2, stride=2),
    )
    x = torch.randn(6, 3, 6, 6)

    def loss_fn(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(x)
        return squares(out.float())

    grads = oracle(model, x, loss_fn)
    c = half_clipped(grads)
    got = run_mode(mode, wrap, model, x, loss_fn, max_grad_norm=c)
    expected = clipped_sum(grads, "flat", c)
    assert all(total.dtype == torch.float32 for total in got.values())
    difference = norms_of({n: (got[n] - e)[None] for n, e in expected.items()})
    assert difference <= 0.02 * norms_of({n: e[None] for n, e in expected.items()})


@layer_modes
@pytest.mark.parametrize("what", ["output", "relu", "input"])
def test_changed_in_place(mode, what):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv1d(2, 2, 2), nn.Conv1d(2, 2, 2)

        def forward(self, x):
            h = self.one(x)
            if what == "output":
                h.mul_(2.0)
            if what == "relu":
                h = F.relu(h, inplace=True)
            out = self.two(h)
            if what == "input":
                h.mul_(3.0)
            return out

    x = torch.randn(4, 2, 5).double()
    if what == "input":  # torch refuses it by itself
        with pytest.raises(Exception) as info:
            check(mode, True, Model().double(), x, square_loss)
        assert not isinstance(info.value, CRASHES), info.value
    else:
        exact_or_refused(mode, True, Model().double(), x, square_loss, ["one", "two"])


# -- Opacus's own modes --------------------------------------------------------------


@pytest.mark.parametrize("N", [0, 1, 3])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 4, 2, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 4, 2, groups=2, bias=False),
        nn.Conv3d(2, 4, 2, stride=2),
        nn.ConvTranspose1d(2, 4, 2, groups=2),
    ],
    ids=["circular", "grouped", "3d", "transposed"],
)
def test_samplers_for_opacus(layer, N):
    """Its other engines get rows a sample and norms from the same rule; N = 0 too."""
    layer = copy.deepcopy(layer).double()
    x = torch.randn(N, 2, *[4] * (layer.weight.dim() - 2)).double()
    expected = oracle(layer, x, square_loss)
    output = layer(x)
    if N:
        (backprops,) = torch.autograd.grad(squares(output).sum(), output)
    else:
        backprops = torch.zeros_like(output)
    named = {p: n for n, p in layer.named_parameters()}
    got = GradSampleHooks.GRAD_SAMPLERS[type(layer)](layer, [x], backprops)
    assert_same({named[p]: g for p, g in got.items()}, expected)
    norms = GradSampleHooksFastGradientClipping.NORM_SAMPLERS[type(layer)](
        layer, [x], backprops
    )
    for p, norm in norms.items():
        wanted = norms_of({named[p]: expected[named[p]]})
        torch.testing.assert_close(norm.to(wanted), wanted, rtol=1e-8, atol=1e-12)
