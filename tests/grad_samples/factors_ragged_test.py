"""Ragged rows, alone and beside other uses, against dense float64 sums."""

import itertools
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from opacus_ext import GradSample, OneHot, workspace
from opacus_ext.grad_sample.factors import Ragged, cost, pad_rows
from tests.grad_samples.structure_case import StructureCase

SHAPE = (4, 2, 3)
KINDS = ["odd", "dod", "dd", "od", "d", "ood"]  # d: dense, o: one-hot, by axis


def widths(kind):
    """The last factor spans the axes that are left."""
    n = len(kind)
    return (*SHAPE[: n - 1], torch.Size(SHAPE[n - 1 :]).numel())


def factors_of(kind, rows):
    return [
        (
            torch.randn(1, rows, width, dtype=torch.float64)
            if axis == "d"
            else OneHot(torch.randint(width, (1, rows)), width)
        )
        for axis, width in zip(kind, widths(kind))
    ]


def dense(samples, factors, batch_size):
    """[B, *SHAPE], row by row."""
    out = torch.zeros(batch_size, *SHAPE, dtype=torch.float64)
    for r, sample in enumerate(samples.tolist()):
        product = torch.ones(1, dtype=torch.float64)
        for f in factors:
            if isinstance(f, OneHot):
                row = torch.zeros(f.size, dtype=torch.float64)
                row[f.index[0, r]] = 1
            else:
                row = f[0, r]
            product = torch.outer(product, row).flatten()
        out[sample] += product.view(SHAPE)
    return out


class RaggedCase(StructureCase):
    shape = SHAPE
    kind = ""

    def create(self, B, T, dtype=torch.float64):
        count = B * T
        factors = [
            f if isinstance(f, OneHot) else f.to(dtype)
            for f in factors_of(self.kind, count)
        ]
        return Ragged(torch.randint(max(1, B), (count,))), *factors


class TestDenseRows(RaggedCase):
    kind = "dd"


class TestOneFactor(RaggedCase):
    kind = "d"


class TestEmbedding(RaggedCase):
    kind = "od"


class TestStackedExperts(RaggedCase):
    kind = "odd"


class TestOneHotBetween(RaggedCase):
    kind = "dod"


class TestTwoOneHot(RaggedCase):
    kind = "ood"


def assert_all(sample, expected, batch_size):
    weights = torch.rand(batch_size, dtype=torch.float64)
    squares = expected.flatten(1).square().sum(1)
    summed = torch.einsum("b,b...->...", weights, expected)
    got = sample.weighted_sum(weights).to(summed.dtype)
    torch.testing.assert_close(got, summed, rtol=1e-9, atol=1e-9)
    norm = sample.squared_norm().to(squares.dtype)
    torch.testing.assert_close(norm, squares, rtol=1e-9, atol=1e-9)
    whole = sample.materialise().to(expected.dtype)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)
    got = sample.weighted_sum(weights).to(summed.dtype)
    torch.testing.assert_close(got, summed, rtol=1e-9, atol=1e-9)
    inner = sample.inner(sample).to(squares.dtype)
    torch.testing.assert_close(inner, squares, rtol=1e-9, atol=1e-9)


@given(
    kind=st.sampled_from(KINDS),
    batch_size=st.integers(1, 6),
    rows=st.integers(0, 12),
    few=st.booleans(),
    seed=st.integers(0, 99),
)
def test_alone(kind, batch_size, rows, few, seed):
    torch.manual_seed(seed)
    samples = torch.randint(batch_size, (rows,))
    factors = factors_of(kind, rows)
    sample = GradSample(torch.Size(SHAPE), batch_size)
    sample.add(Ragged(samples), *factors)
    with patch.object(cost, "few", lambda *args: few):
        assert_all(sample, dense(samples, factors, batch_size), batch_size)


@pytest.mark.parametrize("few", [True, False])
def test_what_is_not_finite_stays_in_its_sample(few, monkeypatch):
    monkeypatch.setattr(cost, "few", lambda *args: few)
    samples, rows = torch.tensor([0, 1, 2, 1]), factors_of("dd", 4)
    rows[0][0, 0], rows[1][0, 2] = float("inf"), float("nan")
    sample = GradSample(torch.Size(SHAPE), 3)
    sample.add(Ragged(samples), *rows)
    assert sample.squared_norm().isfinite().tolist() == [False, True, False]


@pytest.mark.parametrize("first,second", list(itertools.product(KINDS, KINDS)))
def test_beside_another_ragged_use(first, second):
    torch.manual_seed(0)
    sample = GradSample(torch.Size(SHAPE), 5)
    expected = 0
    for kind, rows in ((first, 7), (second, 3)):
        samples, factors = torch.randint(5, (rows,)), factors_of(kind, rows)
        sample.add(Ragged(samples), *factors)
        expected = expected + dense(samples, factors, 5)
    assert_all(sample, expected, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bound", [2**27, 300, 8])
def test_beside_a_batched_use(kind, bound):
    torch.manual_seed(0)
    samples, factors = torch.randint(5, (9,)), factors_of(kind, 9)
    expected = dense(samples, factors, 5)
    left = torch.randn(5, 2, 4, dtype=torch.float64)
    right = torch.randn(5, 2, 6, dtype=torch.float64)
    expected += torch.einsum("btx,bty->bxy", left, right).view(-1, *SHAPE)
    sample = GradSample(torch.Size(SHAPE), 5)
    sample.add(Ragged(samples), *factors)
    sample.add(left, right)
    with workspace(bound):
        assert_all(sample, expected, 5)


def test_samples_without_a_row_have_zero():
    sample = GradSample(torch.Size(SHAPE), 6)
    sample.add(Ragged(torch.tensor([4, 4])), *factors_of("odd", 2))
    norm = sample.squared_norm()
    assert (norm > 0).tolist() == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    "samples,kind,rows",
    [(3, "odd", 4), (4, "ooo", 4)],
    ids=["not one a row", "nothing dense"],
)
def test_refused(samples, kind, rows):
    sample = GradSample(torch.Size(SHAPE), 2)
    index = torch.zeros(samples, dtype=torch.long)
    with pytest.raises(ValueError, match="do not describe"):
        sample.add(Ragged(index), *factors_of(kind, rows))


def test_pad_rows():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    got = pad_rows(x, torch.tensor([2, 0, 2, 2]), 4)[..., 0]
    assert got.tolist() == [[2, 0, 0], [0, 0, 0], [1, 3, 4], [0, 0, 0]]


@pytest.mark.parametrize("empty", ["first", "last"])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_use_without_rows_leaves_the_others(empty, ragged):
    """A bias that one call used for no row, as a sample's call may."""
    bias = torch.randn(3, 2, 4, dtype=torch.float64)
    sample = GradSample(torch.Size([4]), 3)
    none = (bias[:1, :0], Ragged(torch.zeros(0, dtype=torch.long)))
    uses = [(none[1], none[0]) if ragged else (bias[:, :0],), (bias,)]
    for use in uses if empty == "first" else uses[::-1]:
        sample.add(*use)
    torch.testing.assert_close(sample.materialise(), bias.sum(1))
    torch.testing.assert_close(sample.squared_norm(), bias.sum(1).square().sum(1))
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(sample.weighted_sum(ones), bias.sum((0, 1)))
