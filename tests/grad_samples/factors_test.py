"""The operations of GradSample against dense einsum in float64.

The oracle writes every factor out as dense rows, one-hot ones included, sums their
outer products to ``[B, *shape]``, and adds up the uses.
"""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from opacus_ext import GradSample, OneHot, workspace
from opacus_ext.clipping import as_clipping_function
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.factors import grad_sample

SHAPES = {1: (7,), 2: (5, 6), 3: (3, 4, 5)}
SIZES = [(0, 5), (1, 1), (1, 4), (3, 1), (4, 4), (3, 7), (2, 0), (3, 70)]  # B, T
LENGTHS = (4, 9, 1)

# All multisets of uses (of three uses of three axes one in five); a use is one letter
# an axis, "d"ense or "o"ne-hot. "m" is one factor for all axes, "j" a factor for the
# first axis and one for all others.
KINDS = {
    axes: ["".join(kinds) for kinds in itertools.product("do", repeat=axes)]
    for axes in SHAPES
}
USES = [
    list(itertools.combinations_with_replacement(kinds, count))[
        :: 5 if (axes, count) == (3, 3) else 1
    ]
    for axes, kinds in KINDS.items()
    for count in (1, 2, 3)
]
PAIRS = [uses for group in USES for uses in group if len(uses) == 2]
SINGLE = [(axes, kind) for axes, kinds in KINDS.items() for kind in kinds]
every_structure = pytest.mark.parametrize("axes, kinds", [*SINGLE, (2, "m"), (3, "j")])


@pytest.fixture(autouse=True)
def nothing_is_decided():
    """What was decided for equal sizes is forgotten, as tests force other choices."""
    grad_sample._choose.cache_clear()
    yield
    grad_sample._choose.cache_clear()


@pytest.fixture
def few_rows_are_no_reason(monkeypatch):
    monkeypatch.setattr(grad_sample, "_has_few_rows", lambda *args: False)


@pytest.fixture(params=[2**27, 300], ids=["large", "tiny"])
def any_workspace(request):
    with workspace(request.param):
        yield request.param


def random_use(kinds, shape, B, T, dtype=torch.float64):
    if kinds == "m":
        shape = (math.prod(shape),)
    elif kinds == "j":
        kinds, shape = "jj", (shape[0], math.prod(shape[1:]))
    return tuple(
        (
            OneHot(torch.randint(width, (B, T)), width)
            if kind == "o"
            else torch.randn(B, T, width, dtype=dtype)
        )
        for kind, width in zip(kinds, shape)
    )


def outer(factors, shape):
    """``[B, *shape]``: the sum over rows of outer products."""
    dense = [
        F.one_hot(f.index, f.size) if isinstance(f, OneHot) else f for f in factors
    ]
    axes = "xyz"[: len(factors)]
    rows = ",".join(f"bt{axis}" for axis in axes)
    full = torch.einsum(f"{rows}->b{axes}", *(f.double() for f in dense))
    return full.reshape(len(full), *shape)


def squared(x):
    return x.flatten(1).square().sum(1)


def built(uses, B=3, lengths=LENGTHS, axes=None, dtype=torch.float64, summed=False):
    """A GradSample of random uses, and what it stands for: ``[B, *shape]``."""
    shape = SHAPES[axes or len(uses[0])]
    got, expected = GradSample(shape, B), torch.zeros(B, *shape, dtype=torch.float64)
    added = [random_use(k, shape, B, T, dtype) for k, T in zip(uses, lengths)]
    if summed:
        added.insert(1, random_use("m", shape, B, 1, dtype))
    for use in added:
        got.add(*use)
        expected += outer(use, shape)
    return got, expected


def assert_close(got, expected, tolerance=1e-10):
    """Relative to the largest entry."""
    assert got.shape == expected.shape
    assert got.dtype in (torch.float32, torch.float64)
    if expected.numel():
        scale = max(float(expected.abs().max()), 1.0)
        assert float((got.double() - expected).abs().max()) <= tolerance * scale


def look(got, expected, tolerance=1e-10, cache=0):
    """All operations, twice: the norm may rearrange the uses, or cache a sum."""
    weights = torch.rand(len(expected), dtype=torch.float64)
    weighted = torch.einsum("b,b...->...", weights, expected)
    for _ in range(2):
        assert_close(got.weighted_sum(weights), weighted, tolerance)
        assert_close(got.materialize(), expected, tolerance)
        norm = got.squared_norm(cache)
        assert_close(norm, squared(expected), tolerance)
        assert (norm >= 0).all() and 0 <= got.cached_bytes <= cache
    assert_close(got.weighted_sum(weights), weighted, tolerance)


def tolerance_of(uses, summed=False):
    """Without a dense factor all is in float32."""
    return 1e-10 if summed or set("dmj") & set("".join(uses)) else 1e-5


# -- results ---------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("cache, num_bytes", [(0, 300), (1000, 2**27), (2**27, 2**27)])
def test_sizes(axes, kinds, cache, num_bytes):
    for B, T in SIZES:
        uses = 3 if cache == 1000 else 1
        got, expected = built([kinds] * uses, B, range(T, T + uses), axes)
        with workspace(num_bytes):
            look(got, expected, tolerance_of([kinds]), cache)


@pytest.mark.parametrize("B", [1, 2])
def test_rows_of_a_transposed_output(B, few_rows_are_no_reason):
    """With one sample they are a view that is not contiguous."""
    use = OneHot(torch.randint(5000, (B, 40)), 5000), torch.randn(B, 3, 40).double().mT
    got = GradSample(torch.Size([5000, 3]), B)
    got.add(*use)
    assert_close(got.squared_norm(), squared(outer(use, (5000, 3))))


def test_weighted_sums_have_gradients():
    """Of rows that are contiguous or not."""
    left, right = torch.randn(2, 4, 3).mT.requires_grad_(), torch.randn(2, 3, 5)
    weights, got = torch.rand(2).requires_grad_(), GradSample(torch.Size([4, 5]), 2)
    got.add(left, right)
    sums = torch.einsum("b,bti,btj->ij", weights, left, right)
    torch.testing.assert_close(
        *(
            torch.autograd.grad(x.square().sum(), (left, weights))
            for x in (got.weighted_sum(weights), sums)
        )
    )


@every_structure
@pytest.mark.parametrize("cache", [None, 0, 2**27])
def test_dropped_samples_have_zero(axes, kinds, cache):
    got, expected = built([kinds], 4, [5], axes)
    if cache is not None:
        got.squared_norm(cache)
    which = torch.tensor([False, True, False, True])
    got.drop(which)
    expected[which] = 0
    tolerance = tolerance_of([kinds])
    assert_close(got.squared_norm(), squared(expected), tolerance)
    ones = torch.ones(4, dtype=torch.float64)
    assert_close(got.weighted_sum(ones), expected.sum(0), tolerance)


@every_structure
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(axes, kinds, dtype):
    got, expected = built([kinds], 3, [40], axes, dtype)
    look(got, expected, 1e-4)
    assert got.squared_norm().dtype is torch.float32


def test_parameter_without_uses():
    """It has a defined contribution: zero."""
    look(GradSample((5, 6), 3), torch.zeros(3, 5, 6, dtype=torch.float64))


# -- ways to compute a norm ------------------------------------------------------------


@pytest.fixture(params=["gram", "segments", "few", "blocks", "apart", "cached"])
def forced_way(request, monkeypatch):
    way = request.param
    grams = grad_sample._cost_of_grams  # infinite where terms do not fit each other
    blocks = way in ("apart", "blocks")
    forced = {
        "_has_few_rows": lambda *args: way == "few",
        "_cost_of_grams": lambda terms: math.inf if blocks else grams(terms),
        "_cost_of_blocks": lambda terms: 1.0 if blocks else 1e300,
        "_saves_apart": lambda *args: way == "apart",
        "_is_worth_caching": lambda *args: way == "cached",
    }
    for name, function in forced.items():
        monkeypatch.setattr(grad_sample, name, function)
    if way in ("gram", "segments"):  # whatever the length
        segments = property(
            lambda kind: way == "segments"
            and kind.has_onehot
            and len(kind.dense_widths) == 1
        )
        monkeypatch.setattr(grad_sample.Kind, "has_segments", segments)
    return way


@pytest.mark.parametrize("group", USES)
def test_every_way_gives_the_same_norm(group, forced_way, any_workspace):
    summed = any_workspace == 300
    for uses in group:
        got, expected = built(uses, summed=summed)
        tolerance = tolerance_of(uses, summed)
        assert_close(got.squared_norm(), squared(expected), tolerance)
        bias = set(uses) == {"d"}  # materialized from the start
        assert (got.cached_bytes > 0) == (forced_way == "cached" and not bias)
        total = got.weighted_sum(torch.ones(3, dtype=torch.float64))
        assert_close(total, expected.sum(0), tolerance)


@pytest.mark.parametrize("uses", PAIRS, ids="+".join)
def test_add_after_caching(uses, monkeypatch):
    """A use that comes after the norm (a recomputed block) joins what was cached."""
    monkeypatch.setattr(grad_sample, "_is_worth_caching", lambda *args: True)
    got, expected = built(uses[:1])
    got.squared_norm(cache=2**20)
    assert (got.cached_bytes > 0) == (uses[0] != "d")
    late = random_use(uses[1], SHAPES[len(uses[1])], 3, 2)
    got.add(*late)
    assert got.cached_bytes == 0
    expected = expected + outer(late, expected.shape[1:])
    look(got, expected, max(tolerance_of(uses[:1]), tolerance_of(uses[1:])), 2**20)


def test_cached_only_within_the_bytes_allowed():
    size = 3 * 5 * 6 * 8
    for cache, cached in ((0, 0), (size - 1, 0), (size, size)):
        got, expected = built(["dd"], lengths=(300,))
        assert_close(got.squared_norm(cache), squared(expected))
        assert got.cached_bytes == cached
        got.clear()
        assert got.cached_bytes == 0 and not got.materialize().any()


@pytest.mark.parametrize("kinds", [("od", "od"), ("od", "dd"), ("dd", "dd")])
def test_cancelling_uses(kinds, forced_way, any_workspace):
    """They leave rounding, of which no norm may be made: it is computed anew."""
    B, T, V, d = 64, 7, 5, 4
    index, rows = torch.randint(V, (B, T)), 100 * torch.randn(B, T, d)
    got = GradSample((V, d), B)
    for kind, factor in zip(kinds, (1, -1)):
        i = index.flip(1) if factor < 0 else index
        one = OneHot(i, V) if kind == "od" else F.one_hot(i, V).float()
        got.add(one, factor * (rows.flip(1) if factor < 0 else rows))
    p = torch.zeros(V, d)
    total = ClippedSum({"p": p}, B, as_clipping_function(1.0))
    total.add_samples({id(p): got})
    cached = got.cached_bytes  # in float32, and what is released is what was measured
    assert (total.norms <= (1e-3 if cached else 1e-9)).all()
    assert total.sums()["p"].norm() <= total.norms.sum()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_samples_that_are_not_finite_change_no_others(value, few_rows_are_no_reason):
    """Groups of rows of one place are padded."""
    B, T, E = 24, 9, 4
    index = OneHot(torch.randint(E, (B, T)), E)
    factors = torch.randn(B, T, 3), torch.randn(B, T, 5)

    def norms(*rows):
        got = GradSample((E, 3, 5), B)
        got.add(index, *rows)
        return got.squared_norm()

    expected = norms(*factors)
    for bad, which in itertools.product(range(B), (0, 1)):
        changed = [x.clone() for x in factors]
        changed[which][bad] = value
        norm, others = norms(*changed), torch.arange(B) != bad
        assert not norm[bad].isfinite()
        assert_close(norm[others], expected[others])


# -- refusals --------------------------------------------------------------------------


def rows(*shape):
    return torch.zeros(shape)


def ids(*shape, size=3):
    return OneHot(torch.zeros(shape, dtype=torch.long), size)


@pytest.mark.parametrize(
    "use",
    [
        (),
        (rows(2, 5, 3),),
        (rows(2, 5, 4), rows(2, 5, 3)[..., :2]),
        (rows(2, 5, 3), rows(2, 6, 4)),
        (rows(2, 5, 3), rows(1, 5, 4)),
        (rows(3, 5, 3), rows(3, 5, 4)),
        (rows(2, 5, 3), rows(2, 5, 4), rows(2, 5, 2)),
        (ids(2, 5, size=4), rows(2, 5, 4)),
        (ids(2, 6), rows(2, 5, 4)),
        (ids(2), rows(2, 1, 4)),
        (rows(2, 1, 11),),
        (rows(2, 3), rows(2, 4)),
        (rows(2, 5, 3, 2), rows(2, 5, 4, 2)),
        (ids(2, 5, 1), rows(2, 5, 4)),
    ],
)
def test_refuses_factors_that_do_not_fit(use):
    got = GradSample((3, 4), 2)
    with pytest.raises(ValueError, match=r"parameter of shape \(3, 4\)"):
        got.add(*use)
    assert not got.materialize().any()


def test_workspace():
    before = workspace()
    for num_bytes in (0, -1):
        with pytest.raises(ValueError, match="above zero"):
            workspace(num_bytes)
    with workspace(123), workspace(45):
        assert workspace() == 45
    with pytest.raises(KeyError), workspace(123):
        raise KeyError
    assert workspace() == before
