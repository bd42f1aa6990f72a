"""Variances of ``moments`` against integrals and sampling, within the bounds stated."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import table3
from opacus_ext.re_attention import moments
from opacus_ext.re_attention.moments import Moments
from tests.re_attention.common import D

ACTIVATIONS = {
    # How far below and above the variance, in units of the input's.
    "relu": (F.relu, 4.1e-4, 4.1e-4),
    "gelu": (F.gelu, 0.0183, 0.00112),
}


Z = torch.linspace(-9, 9, 400_001, dtype=D)
DENSITY = torch.exp(-Z.square() / 2) / torch.exp(-Z.square() / 2).sum()


def by_integral(f, mean, std):
    """The variance of ``f`` of a Gaussian."""
    values = f(mean + std * Z)
    return float(((values - values @ DENSITY).square() @ DENSITY))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """Means in and out of the bend, errors from small to large."""
    f, below, above = ACTIVATIONS[name]
    for std in (1e-2, 0.5, 2.11, 30.0):
        means = (-1.73, 0.0, 0.4, -2.5 * std, 1.2 * std, 4 * std)
        mean = torch.tensor(means, dtype=D)[:, None]
        variance = torch.full_like(mean, std**2)
        got = getattr(moments, name)(Moments(mean, variance))
        for mean, variance in zip(means, got):
            exact = by_integral(f, mean, std)
            assert -below * std**2 <= float(variance) - exact <= above * std**2


@pytest.mark.parametrize("name", table3.ACTIVATIONS)
def test_table_3(name):
    """Of the paper, which takes ReLU's variances for GELU; sampled and by integrals."""
    draws = torch.randn(table3.DRAWS[-1], dtype=D)
    for std, paper in table3.PAPER.items():
        ours = table3.analytic(name, std)
        printed = paper[name][name == "ReLU"]  # of GELU what it sampled
        assert ours == pytest.approx(printed, rel=0.025)
        exact = by_integral(ACTIVATIONS[name.lower()][0], 0.0, std)
        sampled = table3.sampled(name, std, draws)
        assert sampled[-1] == pytest.approx(exact, rel=0.01)


def test_table_3_is_printed(capsys, tmp_path):
    """By a command, which draws figure 8 as well."""
    table3.main(["--plot", str(tmp_path / "figure8.png")])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    for std, name, *_, found, ours, drawn, printed in rows:
        std, name = float(std.strip("| ")), name.strip()
        assert f"{table3.analytic(name, std):.4g}" == ours
        assert float(found) == pytest.approx(float(ours), rel=0.02)
        both = (float(drawn), float(printed.strip("| ")))
        assert both == table3.PAPER[std][name]
    assert len(rows) == 6 and (tmp_path / "figure8.png").stat().st_size


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_extremes(name):
    """Zero without error; finite, and not below zero, anywhere."""
    mean, variance = torch.randn(5, 8, dtype=D), torch.rand(5, 1, dtype=D)
    for size in (0.0, 1e-30, 1e30):
        found = getattr(moments, name)(Moments(mean, variance * size))
        assert bool((found >= 0).all() & found.isfinite().all())
        assert size or not found.any()


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("size", [0.03, 1.0, 30.0])
@pytest.mark.parametrize("centered", [True, False])
def test_norms_against_sampling(centered, width, size):
    """With errors in weight and bias; the tolerance leaves room for the draws."""
    mean = torch.randn(4, 1, width, dtype=D)
    variance = (size * (1 + torch.rand(4, 1, 1, dtype=D))) ** 2
    weight, s = torch.rand(width, dtype=D) + 0.5, torch.tensor(0.09, dtype=D)
    x = mean + variance.sqrt() * torch.randn(4, 20000, width, dtype=D)
    w, b = (y + 0.3 * torch.randn(20000, width, dtype=D) for y in (weight, 0))
    norm = F.layer_norm if centered else F.rms_norm
    y = norm(x, (width,), eps=1e-5) * w + b
    got = moments.norm(Moments(mean, variance), weight, 1e-5, s, s, centered)
    expected = y.var(1, keepdim=True).mean(-1, keepdim=True)
    torch.testing.assert_close(got, expected, rtol=0.025, atol=0)


@pytest.mark.parametrize("source", "qkv")
def test_attention_against_sampling(source):
    """To first order in each source of error."""
    q, k, v = (
        Moments(
            torch.randn(2, 6, 8, dtype=D),
            1e-4 * (0.5 + torch.rand(2, 6, 1, dtype=D)) * (source == name),
        )
        for name in "qkv"
    )
    weights = torch.softmax(q.mean @ k.mean.mT / 8**0.5, -1)
    got = moments.attention(q, k, v, weights, weights @ v.mean, 8**-0.5)
    noisy = [
        x.mean + x.variance.sqrt() * torch.randn(4000, *x.mean.shape, dtype=D)
        for x in (q, k, v)
    ]
    sampled = F.scaled_dot_product_attention(*noisy).var(0).mean(-1, keepdim=True)
    # Errors of a query are the same for all scores, and taken as independent.
    if source == "q":
        got, sampled = got.mean(), sampled.mean()
    rtol = 0.4 if source == "q" else 0.15
    torch.testing.assert_close(got, sampled, rtol=rtol, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_some_queries_at_a_time(causal, monkeypatch):
    """Memory is linear in T, and the numbers are those of all queries at once."""
    q, k, v = (
        Moments(torch.randn(2, 2, 7, 4, dtype=D), torch.rand(2, 2, 7, 1, dtype=D))
        for _ in range(3)
    )
    correction, mask = k.variance / 2, torch.rand(2, 1, 1, 7) > 0.3
    mask[..., 0] = True  # a query sees the first key, and none behind it if causal
    seen = mask & (torch.ones(7, 7).tril() > 0) if causal else mask
    logits = q.mean @ k.mean.mT / 2
    logits = logits - correction.mT * q.mean.square().sum(-1, keepdim=True) / 8
    weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
    out = weights @ v.mean
    expected = moments.attention(q, k, v, weights, out, 0.5)
    # A boolean mask, and one that is added.
    for given in (mask, mask.to(D).log()):
        for chunk in (1 << 24, 7 * 4 * 3, 1):
            monkeypatch.setattr(moments, "_CHUNK_IN_CACHE", chunk)
            rest = out, correction, given, causal, 0.5
            found = moments.attention_variance(q, k, v, *rest)
            torch.testing.assert_close(found, expected)
