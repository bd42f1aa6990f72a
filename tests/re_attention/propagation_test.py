"""Variances behind modules, against sampling of the parameters' noise.

Noise is small, so that what is compared is the first order, and sampled a few thousand
times at once (vmap), which is good to a few per cent.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations

from opacus_ext.layers import SelfAttention, re_attention
from opacus_ext.models.dpformer import Block
from opacus_ext.re_attention import Propagating, Uncertain
from opacus_ext.refused import Refused
from tests.re_attention.common import D, uncertain

pytestmark = pytest.mark.filterwarnings("ignore:.*performance drop")
STD = 1e-4


class Tanh(Propagating):
    """A user's module that computes its variance by itself, to first order."""

    def propagate(self, x):
        value, variance = torch.tanh(x.value), None
        if x.variance is not None:
            variance = x.variance * (1 - value.detach().square()).square()
        return Uncertain(value, variance, x.errors)


class Residual(Propagating):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def propagate(self, x):
        shifted = x.moved(lambda tokens: tokens.roll(1, 1))
        return 2 * shifted.through(self.layer) + x * 0.5


CASES = {
    "linear": lambda: nn.Linear(32, 24),
    "no bias": lambda: nn.Linear(32, 24, bias=False),
    "layer norm": lambda: nn.LayerNorm(32),
    "no affine": lambda: nn.LayerNorm(32, elementwise_affine=False),
    "RMS norm": lambda: nn.RMSNorm(32),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "sequential": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64)),
    "tanh": Tanh,
    "residual": lambda: Residual(nn.Linear(32, 32)),
    "evaluated": lambda: nn.Dropout(0.3).eval(),
    "attention": lambda: SelfAttention(32, 4, causal=True),
    "block": lambda: Block(32, 1, 0.0),
}


def with_noise(module, noise):
    """Sets parameters of any size, and gives them variances."""
    variances = {}
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
        variances[id(p)] = torch.tensor(noise, dtype=D)
    return variances


@pytest.mark.parametrize("case", CASES)
def test_against_sampling(case):
    torch.manual_seed(0)
    module = CASES[case]().double()
    variances = with_noise(module, STD**2)
    mean = torch.randn(2, 3, 32, dtype=D)
    variance = STD**2 * (0.2 + 3 * torch.rand(2, 3, 1, dtype=D))
    with torch.no_grad():
        got = uncertain(mean, variance, variances.items()).through(module)

        def once(noise, *noises):
            named = zip(module.named_parameters(), noises)
            params = {name: p + STD * z for (name, p), z in named}
            return functional_call(module, params, mean + variance.sqrt() * noise)

        shapes = mean.shape, *(p.shape for p in module.parameters())
        noises = [torch.randn(2000, *shape, dtype=D) for shape in shapes]
        sampled = vmap(once)(*noises).var(0).mean(-1, keepdim=True)
        torch.testing.assert_close(got.value, module(mean), rtol=1e-4, atol=1e-4)
    # In an attention the errors of a key are those of its query's weights, too.
    loose = case in ("attention", "block")
    found = got.variance.mean(-1, keepdim=True)
    torch.testing.assert_close(found, sampled, rtol=0.5 if loose else 0.15, atol=0)


def test_embedding_and_dropout():
    """Rows have variances of their own, or one; a draw of dropout is no error."""
    layer, ids = nn.Embedding(5, 8).double(), torch.tensor([[1, 4, 1]])
    rows = torch.rand(5, 1, dtype=D)
    for variance, expected in (
        (rows, rows[ids]),
        (rows[0, 0], rows[0].expand(1, 3, 1)),
    ):
        x = uncertain(ids, 0.0, {id(layer.weight): variance}.items()).through(layer)
        assert torch.equal(x.variance, expected)
    dropped = x.through(nn.Dropout(0.75))
    assert torch.equal(dropped.variance, 4 * x.variance)


def hooked(layer, register="register_forward_hook", hook=lambda *_: 2 * _[-1]):
    getattr(layer, register)(hook)
    return layer


def patched():
    layer = nn.Linear(32, 4)
    layer.forward = torch.tanh
    return layer


def parametrized():
    return parametrizations.weight_norm(nn.Linear(32, 4))


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x).square()


@pytest.mark.parametrize(
    "build, said",
    [
        (nn.Tanh, "Tanh: it does not state how errors pass it"),
        (lambda: Own(32, 4), "Own: it does not state how errors pass it"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Tanh()), "Tanh: it does not state"),
        (parametrized, r"Linear: its weight \[4, 32\] is no parameter of the model"),
        (lambda: nn.LayerNorm((3, 32)), r"through a norm of \(3, 32\)"),
        (patched, "Linear: it does not state how errors pass it"),
        (lambda: hooked(nn.ReLU()), "ReLU: a hook replaces its input or its output"),
        (
            lambda: hooked(
                nn.ReLU(), "register_forward_pre_hook", lambda _, x: x[0] * 2
            ),
            "ReLU: a hook replaces its input or its output",
        ),
        (lambda: hooked(nn.Sequential(nn.ReLU())), "Sequential: its hooks would not"),
    ],
)
def test_refused_where_errors_are_tracked(build, said):
    """And nowhere else; a subclass that keeps the forward is what it was."""
    module, x = build().double(), torch.randn(2, 3, 32, dtype=D)
    assert Uncertain(x).through(module).variance is None
    variances = {id(p): torch.tensor(0.1, dtype=D) for p in module.parameters()}
    with pytest.raises(Refused, match=said) as caught:
        uncertain(x, 0.0, variances.items()).through(module)
    assert caught.value.remedy


def test_hooks_may_look():
    """Those of make_private and of a user do, forward and backward."""
    seen, layer, x = [], nn.Linear(32, 4).double(), torch.randn(2, 3, 32, dtype=D)
    noise = [(id(p), torch.tensor(0.1, dtype=D)) for p in layer.parameters()]
    expected = uncertain(x, 0.2, noise).through(layer).variance
    layer.register_forward_hook(lambda _, args, out: seen.append(out))
    layer.register_full_backward_hook(lambda *_: seen.append(None))
    out = uncertain(x.requires_grad_(), 0.2, noise).through(layer)
    out.value.sum().backward()
    assert torch.equal(out.variance, expected) and len(seen) == 2
    assert len(layer._forward_hooks) == 1 and not layer._forward_pre_hooks


LOST = {
    "no errors": lambda x: Uncertain(x.value, x.variance),
    "no variance": lambda x: Uncertain(x.value, None, x.errors),
    "shape": lambda x: Uncertain(x.value, x.variance[..., 0], x.errors),
    "a tensor": lambda x: x + x.value,
    "a number": lambda x: x + 1.0,
    "a product": lambda x: x * x,
    "a sum": lambda x: x + Uncertain(x.value),
    "another pass": lambda x: x + uncertain(x.value),
    "attention": lambda x: re_attention(x, Uncertain(x.value), x),
}


@pytest.mark.parametrize("case", LOST)
def test_lost_errors(case):
    with pytest.raises(Refused) as caught:
        LOST[case](uncertain(torch.ones(2, 3, 8, dtype=D), 0.1))
    assert caught.value.remedy


def test_half_precision_and_gradients():
    """Variances are in float32, also under autocast, and have no gradient."""
    layer = nn.Linear(32, 4)
    noise = {id(p): torch.tensor(0.1) for p in layer.parameters()}.items()
    x = uncertain(torch.randn(2, 3, 32, requires_grad=True), 0.0, noise)
    with torch.autocast("cpu", torch.bfloat16):
        out = x.known(x.value).through(layer)
    assert out.value.dtype == torch.bfloat16 and out.value.requires_grad
    assert out.variance.dtype == torch.float32 and not out.variance.requires_grad
