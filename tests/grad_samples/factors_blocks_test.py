"""Blocks and Lazy rows, alone and beside other uses, against dense float64 sums."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional as F

from opacus_ext import GradSample, OneHot, workspace
from opacus_ext.grad_sample.factors import Blocks, Columns, Lazy
from tests.grad_samples.structure_case import (
    StructureCase,
    lazy,
    onehot,
    products,
    rows,
    squared,
)

G, M, N = 3, 2, 5  # blocks, and the widths of the two other axes
SHAPE = (G, M, N)


@pytest.fixture(params=[2**27, 300, 8], ids=["large", "small", "tiny"])
def any_workspace(request):
    with workspace(request.param):
        yield


class Counted:
    """Makes rows from a source half as wide, and notes for how many samples at once."""

    def __init__(self):
        self.samples = []

    def __call__(self, source):
        self.samples.append(len(source))
        return torch.cat([source, source.square()], dim=2)[..., : self.width]

    def lazy(self, B, T, width, dtype=torch.float64):
        self.width = width
        source = torch.randn(B, T, math.ceil(width / 2), dtype=dtype)
        return Lazy(self, source, T, width)


def summing(blocks=1):
    """Lazy rows that know their product with another factor, a block at a time."""

    def make(B, T, width, dtype=torch.float64):
        def summed(source, other):
            cut = (blocks, T // blocks)
            left, right = other.unflatten(1, cut), source.sin().to(other.dtype)
            return torch.einsum("bgtx,bgty->gxy", left, right.unflatten(1, cut))

        return Lazy(torch.sin, torch.randn(B, T, width, dtype=dtype), T, width, summed)

    return make


def blocks(*makers):
    """A use of G blocks of T rows; the last maker takes what is left of the shape."""

    def use(B, T, dtype=torch.float64):
        widths = (M, N) if len(makers) == 2 else (M * N,)
        return (
            Blocks(G),
            *(make(B, G * T, w, dtype) for make, w in zip(makers, widths)),
        )

    return use


def plain(*makers):
    """Factors without blocks: one, two (the first two axes share one), or three."""
    widths = {1: (G * M * N,), 2: (G * M, N), 3: SHAPE}[len(makers)]

    def use(B, T, dtype=torch.float64):
        return tuple(make(B, T, w, dtype) for make, w in zip(makers, widths))

    return use


# By name. Those that may meet on one parameter have as many factors, blocks included.
DEFERRED = {
    "blocks": blocks(rows, rows),
    "blocks, lazy": blocks(rows, lazy),
    "blocks, lazy first": blocks(lazy, rows),
    "blocks, all lazy": blocks(lazy, lazy),
    "blocks, summing": blocks(rows, summing(G)),
    "blocks, lazy and summing": blocks(lazy, summing(G)),
    "blocks of one factor": blocks(rows),
    "blocks of one lazy factor": blocks(lazy),
    "lazy": plain(rows, lazy),
    "lazy first": plain(lazy, rows),
    "all lazy": plain(lazy, lazy),
    "summing": plain(rows, summing()),
    "lazy and summing": plain(lazy, summing()),
    "one lazy factor": plain(lazy),
}
THREE = {
    "blocks": blocks(rows, rows),
    "blocks, lazy": blocks(rows, lazy),
    "blocks, summing": blocks(rows, summing(G)),
    "dense": plain(rows, rows, rows),
    "lazy": plain(rows, lazy, rows),
    "one-hot": plain(onehot, rows, rows),
    "one-hot in the middle": plain(rows, onehot, lazy),
    "one-hot twice": plain(onehot, onehot, rows),
    "materialised": lambda B, T, dtype=torch.float64: (rows(B, 1, G * M * N, dtype),),
}
TWO = {
    "lazy": plain(rows, lazy),
    "all lazy": plain(lazy, lazy),
    "summing": plain(rows, summing()),
    "dense": plain(rows, rows),
    "one-hot": plain(onehot, lazy),
    "one-hot last": plain(lazy, onehot),
    "materialised": THREE["materialised"],
}


def dense(factor):
    if isinstance(factor, OneHot):
        return F.one_hot(factor.index, factor.size).double()
    return (factor.rows() if isinstance(factor, Lazy) else factor).double()


def outer(use):
    """``[B, *SHAPE]`` of one use, row by row."""
    if isinstance(use[0], Blocks):
        size, use = use[0].size, use[1:]
        length = use[0].shape[1]
        index = torch.arange(length) // max(1, length // size)
        index = F.one_hot(index.clamp(max=size - 1), size).double()
        use = (index.expand(len(dense(use[0])), -1, -1), *use)
    axes = "xyz"[: len(use)]
    terms = ",".join(f"bt{axis}" for axis in axes)
    full = torch.einsum(f"{terms}->b{axes}", *map(dense, use))
    return full.reshape(len(full), *SHAPE)


def build(uses, B=4, lengths=(4, 9, 1), dtype=torch.float64):
    """A GradSample of uses, and what it stands for."""
    got = GradSample(torch.Size(SHAPE), B)
    expected = torch.zeros(B, *SHAPE, dtype=torch.float64)
    for make, T in zip(uses, lengths):
        use = make(B, T, dtype)
        got.add(*use)
        expected += outer(use)
    return got, expected


def assert_close(got, expected, tolerance=1e-10):
    assert got.shape == expected.shape
    if expected.numel():
        scale = max(float(expected.abs().max()), 1e-3)
        assert float((got.double() - expected).abs().max()) <= tolerance * scale


def check_operations(build, other):
    """The four operations, in each order, as a norm may rearrange the uses."""

    def norm(got, expected):
        assert_close(got.squared_norm(), squared(expected))

    def cached_norm(got, expected):
        assert_close(got.squared_norm(cache=2**20), squared(expected))

    def materialise(got, expected):
        assert_close(got.materialise(), expected)

    def weighted_sum(got, expected):
        weights = torch.rand(len(expected), dtype=torch.float64)
        wanted = torch.einsum("b,b...->...", weights, expected)
        assert_close(got.weighted_sum(weights), wanted)

    def inner(got, expected):
        another, another_expected = other()
        wanted = products(expected, another_expected)
        assert_close(got.inner(another), wanted)
        assert_close(another.inner(got), wanted)

    operations = norm, cached_norm, materialise, weighted_sum, inner
    for first, second in itertools.permutations(operations, 2):
        got, expected = build()
        for operation in (first, second, first):
            operation(got, expected)


class DeferredCase(StructureCase):
    shape = SHAPE
    name = ""

    def create(self, B, T, dtype=torch.float64):
        return DEFERRED[self.name](B, T, dtype)


class TestBlocks(DeferredCase):
    name = "blocks"


class TestBlocksOfOneFactor(DeferredCase):
    name = "blocks of one factor"


class TestLazyBlocks(DeferredCase):
    name = "blocks, lazy"


class TestLazyBlocksFirst(DeferredCase):
    name = "blocks, lazy first"


class TestSummingBlocks(DeferredCase):
    name = "blocks, summing"


class TestLazyBlocksOfOneFactor(DeferredCase):
    name = "blocks of one lazy factor"


class TestLazy(DeferredCase):
    name = "lazy"


class TestLazyFirst(DeferredCase):
    name = "lazy first"


class TestAllLazy(DeferredCase):
    name = "all lazy"


class TestSumming(DeferredCase):
    name = "summing"


class TestLazyAndSumming(DeferredCase):
    name = "lazy and summing"


class TestOneLazyFactor(DeferredCase):
    name = "one lazy factor"


class TestLazyBesideOneHot(StructureCase):
    def create(self, B, T, dtype=torch.float64):
        return onehot(B, T, 3), lazy(B, T, 4, dtype)


class TestColumns(StructureCase):
    shape = (130, 4)  # worked on in slices of 64 at least

    def columns(self, B, T, dtype):
        source = rows(B, T, self.shape[0], dtype)
        return Columns(
            lambda start, stop, columns: source[start:stop, :, columns],
            dtype,
            source.device,
            source.shape,
        )

    def create(self, B, T, dtype=torch.float64):
        return self.columns(B, T, dtype), rows(B, T, 4, dtype)


class TestColumnsBesideOneHot(TestColumns):
    def create(self, B, T, dtype=torch.float64):
        return self.columns(B, T, dtype), onehot(B, T, 4)


@pytest.mark.parametrize(
    "uses", list(itertools.combinations_with_replacement(THREE, 2)), ids="+".join
)
def test_two_uses_of_three_factors(uses):
    made = [THREE[name] for name in uses]
    check_operations(lambda: build(made), lambda: build(made[::-1]))


@pytest.mark.parametrize(
    "uses", list(itertools.combinations_with_replacement(TWO, 2)), ids="+".join
)
def test_two_uses_of_two_factors(uses):
    made = [TWO[name] for name in uses]
    check_operations(lambda: build(made), lambda: build(made[::-1]))


@pytest.mark.parametrize("group", [THREE, TWO], ids=["three", "two"])
def test_all_uses_at_once(group, any_workspace):
    made = list(group.values())
    lengths = range(1, len(made) + 1)
    check_operations(lambda: build(made, lengths=lengths), lambda: build(made[:2]))


@given(
    name=st.sampled_from(list(DEFERRED)),
    B=st.integers(1, 5),
    T=st.integers(1, 30),
    num_bytes=st.sampled_from([1, 100, 1000, 2**27]),
    cache=st.sampled_from([0, 1000, 2**27]),
)
def test_sizes(name, B, T, num_bytes, cache):
    """T on both sides of where Grams are cheaper, and parts of any size."""
    before = workspace(num_bytes)
    try:
        got, expected = build([DEFERRED[name]], B, (T,))
        assert_close(got.squared_norm(cache), squared(expected))
        weights = torch.rand(B, dtype=torch.float64)
        wanted = torch.einsum("b,b...->...", weights, expected)
        assert_close(got.weighted_sum(weights), wanted)
        assert_close(got.materialise(), expected)
    finally:
        workspace(before)


# -- caching -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks", "blocks, lazy", "lazy", "all lazy"])
def test_cached_within_the_bytes_allowed(name, any_workspace):
    size = 4 * math.prod(SHAPE) * 8
    for cache, cached in ((0, 0), (size - 1, 0), (size, size), (10 * size, size)):
        got, expected = build([DEFERRED[name]], lengths=(300,))
        assert_close(got.squared_norm(cache), squared(expected))
        assert got.cached_bytes == cached
        weights = torch.rand(4, dtype=torch.float64)
        wanted = torch.einsum("b,b...->...", weights, expected)
        assert_close(got.weighted_sum(weights), wanted)
        assert_close(got.materialise(), expected)


@pytest.mark.parametrize("name", ["blocks", "blocks, lazy", "lazy", "all lazy"])
@pytest.mark.parametrize("late", ["blocks, lazy", "one-hot", "dense", "materialised"])
def test_use_after_caching(name, late):
    """From a block that was recomputed after the norm."""
    group = THREE if "blocks" in name else TWO
    late = late if late in group else "all lazy"
    got, expected = build([DEFERRED[name]], lengths=(300,))
    got.squared_norm(cache=2**20)
    assert got.cached_bytes
    use = group[late](4, 3)
    got.add(*use)
    expected = expected + outer(use)
    assert got.cached_bytes == 0
    assert_close(got.materialise(), expected)
    assert_close(got.squared_norm(cache=2**20), squared(expected))
    assert_close(got.squared_norm(), squared(expected))


# -- memory --------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", [False, True])
def test_rows_are_made_for_some_samples_at_a_time(blocked):
    """Never more than the workspace holds, but at least one."""
    B, T, width = 6, 10 * G, N
    per_sample = T * width * 4
    for num_bytes, at_once in ((1, 1), (2 * per_sample, 2), (2**27, B)):
        made = Counted()
        use = (rows(B, T, M if blocked else G * M), made.lazy(B, T, width))
        use = (Blocks(G), *use) if blocked else use
        expected = outer(use)
        got = GradSample(torch.Size(SHAPE), B)
        got.add(*use)
        before = workspace(num_bytes)
        try:
            for operation in (
                got.squared_norm,
                lambda: got.weighted_sum(torch.ones(B, dtype=torch.float64)),
                got.materialise,
            ):
                del made.samples[:]
                operation()
                assert max(made.samples) == at_once and sum(made.samples) == B
        finally:
            workspace(before)
        assert_close(got.squared_norm(), squared(expected))


def test_sum_without_rows():
    """Of a use that is alone, rows that know their product are not made for the sum."""
    made = []

    def summed(source, other):
        return torch.einsum("btx,bty->xy", other, source)

    source = rows(4, 7, N)
    use = rows(4, 7, G * M), Lazy(lambda x: made.append(x) or x, source, 7, N, summed)
    got = GradSample(torch.Size(SHAPE), 4)
    got.add(*use)
    weights = torch.rand(4, dtype=torch.float64)
    total = got.weighted_sum(weights)
    assert not made
    expected = outer(use)
    assert_close(total, torch.einsum("b,b...->...", weights, expected))
    late = TWO["one-hot"](4, 3)
    got.add(*late)
    expected = torch.einsum("b,b...->...", weights, expected + outer(late))
    assert_close(got.weighted_sum(weights), expected)


def test_cancelling_uses(any_workspace):
    """What is left is rounding, of either sign; the norm is not negative."""
    left, right = torch.randn(64, 12, M), torch.randn(64, 12, N)
    source = Lazy(lambda x: -x, right, 12, N)
    got = GradSample(torch.Size(SHAPE), 64)
    got.add(Blocks(G), left, right)
    got.add(Blocks(G), left, source)
    norm = got.squared_norm()
    assert (norm >= 0).all() and (norm < 1e-2).all()


# -- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        (Blocks(G),),
        (Blocks(G), rows(2, 7, M), rows(2, 7, N)),
        (Blocks(G), rows(2, 6, M), rows(2, 3, N)),
        (Blocks(2), rows(2, 6, M), rows(2, 6, N)),
        (Blocks(G), rows(2, 6, G), rows(2, 6, M), rows(2, 6, N)),
        (Blocks(G), onehot(2, 6, M), rows(2, 6, N)),
        (Blocks(G), rows(3, 6, M), rows(3, 6, N)),
        (rows(2, 4, G * M), lazy(2, 4, N + 1)),
        (rows(2, 4, G * M), lazy(2, 5, N)),
        (rows(2, 4, G * M), lazy(3, 4, N)),
        (lazy(2, 4, M * N),),
    ],
)
def test_refuses_factors_that_do_not_fit(use):
    got = GradSample(torch.Size(SHAPE), 2)
    with pytest.raises(ValueError, match=r"parameter of shape \(3, 2, 5\).*batch of 2"):
        got.add(*use)
    assert not got.materialise().any()
