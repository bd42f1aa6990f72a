"""Blocks and Lazy rows, alone and beside other uses, against dense float64 sums."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional as F

from opacus_ext import GradSample, OneHot, workspace
from opacus_ext.grad_sample.factors import Blocks, Lazy

G, M, N = 3, 2, 5  # blocks, and the widths of the two other axes
SHAPE = (G, M, N)


@pytest.fixture(params=[2**27, 300, 8], ids=["large", "small", "tiny"])
def any_workspace(request):
    before = workspace(request.param)
    yield
    workspace(before)


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


def lazy(B, T, width, dtype=torch.float64):
    return Counted().lazy(B, T, width, dtype)


def summing(blocks=1):
    """Lazy rows that know their product with another factor, a block at a time."""

    def make(B, T, width, dtype=torch.float64):
        def summed(source, other):
            cut = (blocks, T // blocks)
            left, right = other.unflatten(1, cut), source.sin().to(other.dtype)
            return torch.einsum("bgtx,bgty->gxy", left, right.unflatten(1, cut))

        return Lazy(torch.sin, torch.randn(B, T, width, dtype=dtype), T, width, summed)

    return make


def rows(B, T, width, dtype=torch.float64):
    return torch.randn(B, T, width, dtype=dtype)


def onehot(B, T, size, dtype=None):
    return OneHot(torch.randint(size, (B, T)), size)


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


def squared(x):
    return x.flatten(1).square().sum(1)


def products(a, b):
    return (a * b).flatten(1).sum(1)


def assert_close(got, expected, tolerance=1e-10):
    assert got.shape == expected.shape
    if expected.numel():
        scale = max(float(expected.abs().max()), 1e-3)
        assert float((got.double() - expected).abs().max()) <= tolerance * scale


def check_operations(build, other):
    """The four operations, in each order, as a norm may rearrange the uses."""

    def norm(got, expected):
        assert_close(got.squared_norm(), squared(expected))

    def kept_norm(got, expected):
        assert_close(got.squared_norm(keep=2**20), squared(expected))

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

    operations = norm, kept_norm, materialise, weighted_sum, inner
    for first, second in itertools.permutations(operations, 2):
        got, expected = build()
        for operation in (first, second, first):
            operation(got, expected)


@pytest.mark.parametrize("name", DEFERRED)
def test_one_use(name, any_workspace):
    use = DEFERRED[name]
    kind = [plain(rows, rows)] if "blocks" not in name else [THREE["dense"]]
    if "one" in name:
        kind = [THREE["materialised"]]
    check_operations(lambda: build([use]), lambda: build(kind))
    check_operations(lambda: build([use]), lambda: build([use], lengths=(6,)))


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
    keep=st.sampled_from([0, 1000, 2**27]),
)
def test_sizes(name, B, T, num_bytes, keep):
    """T on both sides of where Grams are cheaper, and parts of any size."""
    before = workspace(num_bytes)
    try:
        got, expected = build([DEFERRED[name]], B, (T,))
        assert_close(got.squared_norm(keep), squared(expected))
        weights = torch.rand(B, dtype=torch.float64)
        wanted = torch.einsum("b,b...->...", weights, expected)
        assert_close(got.weighted_sum(weights), wanted)
        assert_close(got.materialise(), expected)
    finally:
        workspace(before)


@pytest.mark.parametrize("name", DEFERRED)
@pytest.mark.parametrize("T", [0, 1, 3])
def test_empty_batch(name, T):
    """As from Poisson sampling: no samples, and sums of zero."""
    got, expected = build([DEFERRED[name]], 0, (T,))
    assert got.materialise().shape == (0, *SHAPE)
    assert got.squared_norm().shape == (0,)
    total = got.weighted_sum(torch.zeros(0, dtype=torch.float64))
    assert total.shape == SHAPE and not total.any()
    assert got.inner(got).shape == (0,)


@pytest.mark.parametrize("name", DEFERRED)
def test_no_rows(name):
    got, expected = build([DEFERRED[name]], 2, (0,))
    assert not got.materialise().any()
    assert torch.equal(got.squared_norm(), torch.zeros(2).to(got.squared_norm()))
    assert not got.weighted_sum(torch.ones(2, dtype=torch.float64)).any()
    assert not got.inner(got).any()


# -- keeping -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks", "blocks, lazy", "lazy", "all lazy"])
def test_kept_within_the_bytes_allowed(name, any_workspace):
    size = 4 * math.prod(SHAPE) * 8
    for keep, kept in ((0, 0), (size - 1, 0), (size, size), (10 * size, size)):
        got, expected = build([DEFERRED[name]], lengths=(300,))
        assert_close(got.squared_norm(keep), squared(expected))
        assert got.kept_bytes == kept
        weights = torch.rand(4, dtype=torch.float64)
        wanted = torch.einsum("b,b...->...", weights, expected)
        assert_close(got.weighted_sum(weights), wanted)
        assert_close(got.materialise(), expected)


@pytest.mark.parametrize("name", ["blocks", "blocks, lazy", "lazy", "all lazy"])
@pytest.mark.parametrize("late", ["blocks, lazy", "one-hot", "dense", "materialised"])
def test_use_after_keeping(name, late):
    """From a block that was recomputed after the norm."""
    group = THREE if "blocks" in name else TWO
    late = late if late in group else "all lazy"
    got, expected = build([DEFERRED[name]], lengths=(300,))
    got.squared_norm(keep=2**20)
    assert got.kept_bytes
    use = group[late](4, 3)
    got.add(*use)
    expected = expected + outer(use)
    assert got.kept_bytes == 0
    assert_close(got.materialise(), expected)
    assert_close(got.squared_norm(keep=2**20), squared(expected))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(dtype, any_workspace):
    for name, use in DEFERRED.items():
        got, expected = build([use], lengths=(40,), dtype=dtype)
        weights = torch.rand(4)
        wanted = torch.einsum("b,b...->...", weights.double(), expected)
        for result, value in (
            (got.squared_norm(), squared(expected)),
            (got.materialise(), expected),
            (got.weighted_sum(weights), wanted),
            (got.inner(got), squared(expected)),
        ):
            assert result.dtype is torch.float32, name
            gap = (result.double() - value).abs().max()
            assert gap <= 1e-4 * value.abs().max(), name


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
