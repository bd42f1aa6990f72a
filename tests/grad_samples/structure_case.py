"""
What every structure of factors must fulfil: :class:`StructureCase`.

The oracle takes each sample by itself: its rows written out as dense ones, their outer
products added up in float64.
"""

import pytest
import torch
from torch.nn import functional as F

from opacus_ext import GradSample, OneHot, workspace

TOLERANCE = 1e-8
SIZES = [(0, 5), (1, 1), (1, 4), (3, 1), (4, 4), (3, 7), (2, 0), (3, 70)]  # B, T


def rows(B, T, width, dtype=torch.float64):
    return torch.randn(B, T, width, dtype=dtype)


def onehot(B, T, size, dtype=None):
    return OneHot(torch.randint(size, (B, T)), size)


def dense_rows(factor):
    """``[B, T, width]`` in float64."""
    if isinstance(factor, OneHot):
        return F.one_hot(factor.index, factor.size).double()
    return factor.double()


def outer(factors, shape):
    """``[B, *shape]``: the sum over rows of outer products."""
    axes = "xyz"[: len(factors)]
    rows = ",".join(f"bt{axis}" for axis in axes)
    full = torch.einsum(f"{rows}->b{axes}", *map(dense_rows, factors))
    return full.reshape(len(full), *shape)


def squared(x):
    return x.flatten(1).square().sum(1)


def weighted(weights, x):
    return torch.einsum("b,b...->...", weights, x)


def assert_close(got, expected, tolerance=TOLERANCE):
    """Relative to the largest entry."""
    assert got.shape == expected.shape
    assert got.dtype in (torch.float32, torch.float64)
    if expected.numel():
        scale = max(float(expected.abs().max()), 1.0)
        assert float((got.double() - expected).abs().max()) <= tolerance * scale


class StructureCase:
    """
    A structure's test inherits it and says how its factors are made.

    Attributes:
        shape: of the parameter
        tolerance: larger where nothing is dense, which is computed in float32
    """

    shape = (3, 4)
    tolerance = TOLERANCE

    def create(self, B, T, dtype=torch.float64):
        """Random factors of one use."""
        raise NotImplementedError

    def evaluate(self, factors, B):
        """``[B, *shape]``, what they stand for."""
        return outer(factors, self.shape)

    # -- what is tested ------------------------------------------------------------

    @pytest.fixture(autouse=True, params=[2**27, 300], ids=["large", "tiny"])
    def any_workspace(self, request):
        with workspace(request.param):
            yield

    def build(self, B, T, uses=1, dtype=torch.float64):
        """Of some uses the gradients, and what they must be."""
        torch.manual_seed(B + 10 * T)
        got, expected = GradSample(torch.Size(self.shape), B), 0
        for use in range(uses):
            factors = self.create(B, T + use, dtype)
            got.add(*factors)
            expected = expected + self.evaluate(factors, B)
        return got, expected

    def close(self, got, expected):
        assert_close(got, expected, self.tolerance)

    def test_materialize(self):
        for size in SIZES:
            got, expected = self.build(*size)
            self.close(got.materialize(), expected)

    @pytest.mark.parametrize("cache", [0, 1000, 2**27])
    def test_squared_norm(self, cache):
        for size in SIZES:
            got, expected = self.build(*size)
            norm = got.squared_norm(cache)
            self.close(norm, squared(expected))
            assert (norm >= 0).all() and 0 <= got.cached_bytes <= cache

    def test_weighted_sum(self):
        for size in SIZES:
            got, expected = self.build(*size)
            weights = torch.rand(size[0], dtype=torch.float64)
            self.close(got.weighted_sum(weights), weighted(weights, expected))

    @pytest.mark.parametrize("cache", [0, 2**27])
    def test_all_after_the_norm(self, cache):
        """It may have rearranged the uses, or cached what they give."""
        for size in SIZES:
            got, expected = self.build(*size)
            weights = torch.rand(size[0], dtype=torch.float64)
            for _ in range(2):
                self.close(got.squared_norm(cache), squared(expected))
                self.close(got.weighted_sum(weights), weighted(weights, expected))
                self.close(got.materialize(), expected)

    def test_used_three_times(self):
        for size in SIZES:
            got, expected = self.build(*size, uses=3)
            weights = torch.rand(size[0], dtype=torch.float64)
            self.close(got.materialize(), expected)
            self.close(got.weighted_sum(weights), weighted(weights, expected))
            self.close(got.squared_norm(), squared(expected))
            self.close(got.weighted_sum(weights), weighted(weights, expected))

    @pytest.mark.parametrize("cache", [None, 0, 2**27])
    def test_dropped_samples_have_zero(self, cache):
        got, expected = self.build(4, 5)
        if cache is not None:
            got.squared_norm(cache)
        which = torch.tensor([False, True, False, True])
        got.drop(which)
        expected[which] = 0
        self.close(got.squared_norm(), squared(expected))
        ones = torch.ones(4, dtype=torch.float64)
        self.close(got.weighted_sum(ones), expected.sum(0))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_accumulated_in_float32(self, dtype):
        got, expected = self.build(3, 40, dtype=dtype)
        weights = torch.rand(3)
        for result, wanted in (
            (got.squared_norm(), squared(expected)),
            (got.materialize(), expected),
            (got.weighted_sum(weights), weighted(weights.double(), expected)),
        ):
            assert result.dtype is torch.float32
            gap = (result.double() - wanted).abs().max()
            assert gap <= 1e-4 * wanted.abs().max()
