"""Values cast between real, complex and half types, against each sample alone."""

import pytest
import torch
from torch.nn import functional as F

from opacus_ext import Op, clipped_grads, per_sample_grads
from opacus_ext.grad_sample.rules import RULES, as_op, register_rule
from tests import common
from tests.common import (
    assert_same,
    clipped_sum,
    half_clipped,
    net,
    norms_of,
    oracle,
)

pytestmark = pytest.mark.filterwarnings("ignore")
COMPLEX = torch.complex128


def measure(z):
    """Losses [B] that weigh real and imaginary parts differently."""
    z = z.flatten(1)
    return (2 * z.real.square() + z.real * z.imag + z.imag.square() + z.imag).sum(1)


def divided(s, x):
    return measure(x[:, None] / s.w.to(COMPLEX))


def transformed(s, x):
    return measure(F.linear(torch.fft.fft(x), s.w.to(COMPLEX)))


def conjugated(s, x):
    """The gradient of the copies is a conjugate that is not resolved."""
    return measure((x[:, None] + s.w.to(COMPLEX)).conj() * (1 + 2j))


def used_in_many_ways(s, x):
    z = s.w.to(COMPLEX)
    made = torch.complex(s.w, s.w.cos())
    h = (x.to(COMPLEX) @ z) * 1j + F.linear(x.to(COMPLEX), made)
    return measure(h + x @ s.w + z[0] * x + (x @ z.real).to(COMPLEX))


def looked_up(s, x):
    ids = (x.abs() * 2).long().clamp(max=3)
    return measure(s.w.to(COMPLEX)[ids] * x[..., None] * (1 - 1j))


def convolved(s, x):
    return measure(F.conv1d(x[:, None].to(COMPLEX), s.w[:, None].to(COMPLEX)))


def product(s, x):
    return measure(torch.einsum("bi,oi->bo", torch.fft.fft(x), s.w.to(COMPLEX)))


def attended(s, x):
    """Complex outputs that go into real layers."""
    h = torch.fft.fft(x @ s.w)
    return F.layer_norm(torch.cat([h.real, h.imag], -1), (8,)).square().sum(1) + (
        h.abs() @ s.w
    ).sum(1)


@as_op
def turned(x, w):
    """``y [*, out]``, complex, of real numbers."""
    return torch.complex(x @ w, x @ w.cos())


def turned_by_rule(s, x):
    return measure(turned(x, s.w))


def scattered(s, x):
    h = torch.select_scatter(x[:, None].expand(-1, 3, -1), s.w[:1], 1, -1)
    return (h * s.w[:3]).sin().flatten(1).sum(1)


def scattered_into(s, x):
    h = torch.stack([torch.select_scatter(s.w, row, 1, 2) for row in x @ s.w])
    return (h.cos() * x[:, None]).flatten(1).sum(1)


CASES = {
    f.__name__: f
    for f in (
        divided,
        transformed,
        conjugated,
        used_in_many_ways,
        looked_up,
        convolved,
        product,
        attended,
        turned_by_rule,
        scattered,
        scattered_into,
    )
}


# Of another type, in which the op is rounded; in float64 the rest is exact.
ROUNDED = {torch.complex64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def rule(monkeypatch):
    """A rule whose backprops would be complex."""
    monkeypatch.setitem(RULES, turned, ())
    register_rule(turned)(lambda x, w: Op((w,), (x,), lambda g, x: [(x, g)]))


def models(then):
    torch.manual_seed(0)
    return net(then, w=torch.randn(4, 4).double())(), torch.randn(3, 4).double()


def check(mode, then, tolerance=1e-8):
    model, batch = models(then)
    common.check(mode, True, model, batch, lambda net, x: net(x), tolerance=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums(name, rule):
    model, batch = models(CASES[name])
    grads = oracle(model, batch, lambda net, x: net(x))
    params, bound = dict(model.named_parameters()), half_clipped(grads)
    dense = per_sample_grads(model, params, batch)
    assert_same(dense.grads, grads)
    found = clipped_grads(model, params, batch, bound)
    assert_same({"norms": found.norms}, {"norms": norms_of(grads)})
    assert_same(found.sums, clipped_sum(grads, "flat", bound))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["ghost_bk", "ghost", "hooks", "scan"])
def test_modes(name, mode, rule):
    check(mode, CASES[name])


def test_two_passes():
    check("ghost", conjugated)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("op", [torch.mul, F.linear])
@pytest.mark.parametrize("mode", ["ghost_bk", "ghost", "hooks", "scan"])
def test_rounded(mode, op, dtype):
    def then(s, x):
        h = op(x.to(dtype)[:, None], s.w.to(dtype)).flatten(1)
        return measure(h.to(COMPLEX))

    check(mode, then, ROUNDED[dtype])
