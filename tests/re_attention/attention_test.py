"""Corrected attention against its formula, written out with all weights in memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opacus_ext.layers import SelfAttention, corrected_attention, re_attention
from opacus_ext.re_attention import Uncertain
from tests.re_attention.common import D, track, uncertain

PLACES = ("logits", "scores")
every_place = pytest.mark.parametrize("where", PLACES)


def added(mask):
    return mask.to(D).log() if mask.dtype == torch.bool else mask


def formula(q, k, v, variance, mask=None, where="logits", scale=None):
    """The definition; ``mask`` is added, or boolean."""
    scale = q.size(-1) ** -0.5 if scale is None else scale
    logits = torch.einsum("...td,...ud->...tu", q, k) * scale
    if mask is not None:
        logits = logits + added(mask)
    # <q, q> sigma_i^2 / (2 d) where the scale is 1 / sqrt(d)
    variance = variance.expand(*k.shape[:-1], 1)[..., 0]
    wrong = torch.einsum("...td,...u->...tu", q.square(), variance) * scale**2 / 2
    if where == "logits":
        weights = torch.softmax(logits - wrong, -1)
    else:
        weights = torch.softmax(logits, -1) / torch.exp(wrong)
    return torch.einsum("...tu,...ue->...te", weights, v)


def some(batch=2, heads=2, queries=5, keys=5, width=4, value=None, dtype=D):
    q = torch.randn(batch, heads, queries, width, dtype=dtype)
    k = torch.randn(batch, heads, keys, width, dtype=dtype)
    v = torch.randn(batch, heads, keys, value or width, dtype=dtype)
    return q, k, v, torch.rand(batch, heads, keys, 1, dtype=dtype) * 3


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def masks(queries, keys):
    """None, a boolean and an added one; every query sees the first key."""
    seen = torch.rand(2, 1, queries, keys) > 0.4
    seen[..., 0] = True
    return None, seen, torch.randn(2, 2, queries, keys, dtype=D)


@every_place
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [{}, {"queries": 3}, {"keys": 7, "value": 3}, {"queries": 1, "keys": 1}]
)
def test_formula(where, is_causal, sizes):
    """Gradients, too: all inputs but the variance have them, through |q|^2 as well."""
    *qkv, variance = some(**sizes)
    qkv = [x.requires_grad_() for x in qkv]
    shape = qkv[0].size(-2), qkv[1].size(-2)
    for scale, var in ((None, variance.requires_grad_()), (0.3, variance[:1, :1])):
        for mask in masks(*shape):
            out = corrected_attention(*qkv, var, mask, 0.0, is_causal, scale, where)
            if is_causal:
                mask = added(causal(*shape)) + (0 if mask is None else added(mask))
            expected = formula(*qkv, var.detach(), mask, where, scale)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            found, wanted = (
                torch.autograd.grad(y.sin().sum(), (*qkv, variance), allow_unused=True)
                for y in (out, expected)
            )
            assert found[3] is None
            for a, b in zip(found[:3], wanted):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_variances(where, dtype):
    """A token that hardly ever occurs: exp(|q|^2 sigma^2 / 2d) is beyond any float."""
    q, k, v, variance = some(dtype=torch.float32)
    variance[:, :, 2:] = 1e6
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out = corrected_attention(q, k, v, variance, where=where)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *grads))
    expected = formula(*(x.double() for x in (q, k, v, variance)), None, where)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@every_place
def test_who_sees_nothing_gets_nothing(where):
    """scaled_dot_product_attention does so, too; no gradient becomes NaN."""
    *qkv, variance = some()
    seen = torch.tensor([[False] * 5, [True] * 5])[:, None, None]
    # A boolean mask, and one that is added.
    for mask in (seen, added(seen)):
        leaves = [x.requires_grad_() for x in qkv]
        out = corrected_attention(*leaves, variance, mask, where=where)
        assert not out[0].any() and out[1].all()
        for grad in torch.autograd.grad(out.square().sum(), leaves):
            assert grad.isfinite().all() and not grad[0].any()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation has made."""

    names, most = "", 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names += str(func)
        for x in tree_leaves(out):
            self.most = max(self.most, getattr(x, "numel", int)())
        return out


def test_memory_is_linear():
    """No [T, U] tensor, as the kernel makes none: it is flash attention still."""
    q, k, v, variance = some(1, 2, 512, 512, 16, dtype=torch.float32)
    with Largest() as seen:
        out = corrected_attention(q.requires_grad_(), k, v, variance, is_causal=True)
        out.sum().backward()
    assert "flash" in seen.names and seen.most < 512 * 512


@every_place
@pytest.mark.parametrize("cap", [0.2, None])
def test_re_attention(where, cap):
    """A key's variance counts up to so many times its mean square."""
    q, k, v, variance = some()
    _, mask, _ = masks(5, 5)
    known = uncertain(q, where=where, cap=cap)
    keys = Uncertain(k, variance, known.errors)
    got = re_attention(known, keys, known.known(v), attn_mask=mask)
    if cap is not None:
        variance = torch.minimum(variance, cap * k.square().mean(-1, keepdim=True))
    expected = formula(q, k, v, variance, mask, where)
    torch.testing.assert_close(got.value, expected, rtol=1e-12, atol=1e-12)
    assert got.variance.shape == (2, 2, 5, 1) and bool((got.variance > 0).all())


@every_place
def test_self_attention(where):
    """A token that is masked has no influence, be the model tracked or not."""
    model, x = SelfAttention(8, 2).double(), torch.randn(2, 5, 8, dtype=D)
    tracker = track(model, where=where)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]]).bool()
    square = mask[:, None, None, :] & torch.ones(2, 1, 5, 1, dtype=torch.bool)
    for tracker.enabled in (True, False):
        got, alone = model(x, mask), model(x[:1, mask[0]])
        torch.testing.assert_close(got[:1, mask[0]], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(model(x, square), got, rtol=1e-12, atol=1e-12)


def test_refused():
    with pytest.raises(ValueError, match="heads=3 must divide width=8"):
        SelfAttention(8, heads=3)
    with pytest.raises(ValueError, match="where must be .* not 'keys'"):
        corrected_attention(*some(), where="keys")
