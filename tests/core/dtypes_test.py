"""Values cast between real, complex and half types, against each sample alone."""

import pytest
import torch
from torch.nn import functional as F

from opacus_ext import Op
from opacus_ext.grad_sample.rules import RULES, as_op, register_rule
from tests.common import net
from tests.zoo import Case, check

pytestmark = pytest.mark.filterwarnings("ignore")
COMPLEX = torch.complex128


def measure(z):
    """Losses [B] that weigh real and imaginary parts differently."""
    z = z.flatten(1)
    return (2 * z.real.square() + z.real * z.imag + z.imag.square() + z.imag).sum(1)


def used_in_many_ways(s, x):
    z = s.w.to(COMPLEX)
    made = torch.complex(s.w, s.w.cos())
    h = (x.to(COMPLEX) @ z) * 1j + F.linear(x.to(COMPLEX), made)
    h = (
        torch.addmm(made[0], h, made)
        + torch.bmm(h[:, None], z.expand(len(h), 4, 4))[:, 0]
    )
    return measure(h + x @ s.w + z[0] * x + (x @ z.real).to(COMPLEX) + h @ z.mT)


def looked_up(s, x):
    ids = (x.abs() * 2).long().clamp(max=3)
    return measure(s.w.to(COMPLEX)[ids] * x[..., None] * (1 - 1j))


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


def scattered(s, x):
    h = torch.select_scatter(x[:, None].expand(-1, 3, -1), s.w[:1], 1, -1)
    return (h * s.w[:3]).sin().flatten(1).sum(1)


def scattered_into(s, x):
    h = torch.stack([torch.select_scatter(s.w, row, 1, 2) for row in x @ s.w])
    return (h.cos() * x[:, None]).flatten(1).sum(1)


def rounded(op, dtype):
    """The op is rounded in another type; in float64 the rest is exact."""
    return lambda s, x: measure(
        op(x.to(dtype)[:, None], s.w.to(dtype)).flatten(1).to(COMPLEX)
    )


#: Losses ``[B]`` of a weight ``s.w [4, 4]`` and inputs ``x [B, 4]``.
CASES = {
    "divided": lambda s, x: measure(x[:, None] / s.w.to(COMPLEX)),
    "transformed": lambda s, x: measure(F.linear(torch.fft.fft(x), s.w.to(COMPLEX))),
    # The gradient of the copies is a conjugate that is not resolved.
    "conjugated": lambda s, x: measure(
        (x[:, None] + s.w.to(COMPLEX)).conj() * (1 + 2j)
    ),
    "used in many ways": used_in_many_ways,
    "looked up": looked_up,
    "convolved": lambda s, x: measure(
        F.conv1d(x[:, None].to(COMPLEX), s.w[:, None].to(COMPLEX))
    ),
    "product": lambda s, x: measure(
        torch.einsum("bi,oi->bo", torch.fft.fft(x), s.w.to(COMPLEX))
    ),
    "attended": attended,
    "turned by a rule": lambda s, x: measure(turned(x, s.w)),
    "scattered": scattered,
    "scattered into": scattered_into,
}
ROUNDED = {
    (op, dtype): tolerance
    for op in (torch.mul, F.linear)
    for dtype, tolerance in {
        torch.complex64: 1e-5,
        torch.float16: 4e-3,
        torch.bfloat16: 3e-2,
    }.items()
}
modes = pytest.mark.parametrize("mode", ["ghost_bk", "hooks", "scan"])


@pytest.fixture(autouse=True)
def rule(monkeypatch):
    """A rule whose backprops would be complex."""
    monkeypatch.setitem(RULES, turned, ())
    register_rule(turned)(lambda x, w: Op((w,), (x,), lambda g, x: [(x, g)]))


def check_losses(then, mode, **kwargs):
    model, batch = net(then, w=lambda: torch.randn(4, 4)), torch.randn(3, 4).double()
    check(Case(model, [batch], loss=lambda model, x: model(x), **kwargs), mode)


@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums(name):
    """In one pass, and in the two of "ghost"."""
    for way in ("function", "ghost"):
        check_losses(CASES[name], way)


@modes
@pytest.mark.parametrize("name", CASES)
def test_modes(name, mode):
    check_losses(CASES[name], mode)


@modes
@pytest.mark.parametrize("op, dtype", ROUNDED)
def test_rounded(mode, op, dtype):
    check_losses(rounded(op, dtype), mode, tolerance=ROUNDED[op, dtype])
