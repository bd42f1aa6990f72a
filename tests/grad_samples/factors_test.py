"""The operations of GradSample against dense einsum in float64.

The oracle writes every factor out as dense rows, one-hot ones included, sums their
outer products to ``[B, *shape]``, and adds up the uses.
"""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_ext import GradSample, OneHot, workspace
from opacus_ext.grad_sample.factors import grad_sample
from tests.grad_samples.structure_case import StructureCase, onehot, outer
from tests.grad_samples.structure_case import rows as random_rows
from tests.grad_samples.structure_case import squared

SHAPES = {1: (7,), 2: (5, 6), 3: (3, 4, 5)}
LENGTHS = (4, 9, 1)

# By axes and number of uses, all multisets of uses (of three uses of three axes one in
# five); a use is one letter an axis, "d"ense or "o"ne-hot.
USES = {
    (axes, count): list(
        itertools.combinations_with_replacement(
            ["".join(kinds) for kinds in itertools.product("do", repeat=axes)], count
        )
    )[:: 5 if (axes, count) == (3, 3) else 1]
    for axes in SHAPES
    for count in (1, 2, 3)
}
PAIRS = [uses for (_, count), group in USES.items() if count == 2 for uses in group]
every_use = pytest.mark.parametrize(
    "group", USES.values(), ids=[f"axes{axes}-uses{count}" for axes, count in USES]
)


@pytest.fixture(params=[2**27, 300], ids=["large", "tiny"])
def any_workspace(request):
    with workspace(request.param):
        yield


def random_use(kinds, shape, B, T, dtype=torch.float64):
    return tuple(
        (
            OneHot(torch.randint(width, (B, T)), width)
            if kind == "o"
            else torch.randn(B, T, width, dtype=dtype)
        )
        for kind, width in zip(kinds, shape)
    )


def build(uses, B=3, lengths=LENGTHS, materialized=False, dtype=torch.float64):
    """A GradSample of random uses, and what it stands for: ``[B, *shape]``."""
    shape = SHAPES[len(uses[0])]
    got, expected = GradSample(shape, B), torch.zeros(B, *shape, dtype=torch.float64)
    added = [random_use(k, shape, B, T, dtype) for k, T in zip(uses, lengths)]
    if materialized:
        added.insert(1, (torch.randn(B, 1, math.prod(shape), dtype=dtype),))
    for use in added:
        got.add(*use)
        expected += outer(use, shape)
    return got, expected


def assert_close(got, expected, exact=True):
    """Relative to the largest entry. Without a dense factor all is in float32."""
    assert got.shape == expected.shape
    assert got.dtype in (torch.float32, torch.float64)
    if expected.numel():
        scale = max(float(expected.abs().max()), 1.0)
        gap = float((got.double() - expected).abs().max())
        assert gap <= (1e-10 if exact else 1e-5) * scale


def is_exact(uses, materialized=False):
    return materialized or any("d" in kinds for kinds in uses)


# -- each structure by itself ---------------------------------------------------------


class TestFlat(StructureCase):
    shape = (7,)

    def create(self, B, T, dtype=torch.float64):
        return (random_rows(B, T, 7, dtype),)


class TestMaterialized(StructureCase):
    """One factor for all axes."""

    def create(self, B, T, dtype=torch.float64):
        return (random_rows(B, T, 12, dtype),)


class TestDense(StructureCase):
    def create(self, B, T, dtype=torch.float64):
        return random_rows(B, T, 3, dtype), random_rows(B, T, 4, dtype)


class TestDenseOfThreeAxes(StructureCase):
    shape = (3, 4, 5)

    def create(self, B, T, dtype=torch.float64):
        return tuple(random_rows(B, T, width, dtype) for width in self.shape)


class TestNeighboringAxesShareAFactor(StructureCase):
    shape = (3, 4, 5)

    def create(self, B, T, dtype=torch.float64):
        return random_rows(B, T, 3, dtype), random_rows(B, T, 20, dtype)


class TestOneHot(StructureCase):
    """An embedding."""

    def create(self, B, T, dtype=torch.float64):
        return onehot(B, T, 3), random_rows(B, T, 4, dtype)


class TestOneHotLast(StructureCase):
    def create(self, B, T, dtype=torch.float64):
        return random_rows(B, T, 3, dtype), onehot(B, T, 4)


class TestOneHotOnly(StructureCase):
    tolerance = 1e-5  # nothing says that it should be float64

    def create(self, B, T, dtype=torch.float64):
        return onehot(B, T, 3), onehot(B, T, 4)


class TestOneHotWithTwo(StructureCase):
    """Stacked experts."""

    shape = (3, 4, 5)

    def create(self, B, T, dtype=torch.float64):
        return onehot(B, T, 3), *(random_rows(B, T, n, dtype) for n in (4, 5))


class TestOneHotBetween(StructureCase):
    shape = (3, 4, 5)

    def create(self, B, T, dtype=torch.float64):
        left, right = (random_rows(B, T, n, dtype) for n in (3, 5))
        return left, onehot(B, T, 4), right


# -- two and three uses of all kinds ---------------------------------------------------


@every_use
@pytest.mark.parametrize("materialized", [False, True], ids=["", "materialized"])
def test_operations(group, materialized, any_workspace):
    for uses in group:
        check_operations(uses, materialized)


def check_operations(uses, materialized):
    exact = is_exact(uses, materialized)
    got, expected = build(uses, materialized=materialized)
    weights = torch.rand(3, dtype=torch.float64)
    weighted = torch.einsum("b,b...->...", weights, expected)

    assert_close(got.weighted_sum(weights), weighted, exact)
    assert_close(got.materialize(), expected, exact)
    assert_close(got.squared_norm(), squared(expected), exact)
    # The norm may have rearranged the uses: all the same after it.
    assert_close(got.weighted_sum(weights), weighted, exact)
    assert_close(got.materialize(), expected, exact)


# -- ways to compute a norm ----------------------------------------------------------


@pytest.fixture(params=["gram", "segments", "few", "blocks", "cached"])
def forced_way(request, monkeypatch):
    few = request.param == "few"
    monkeypatch.setattr(grad_sample, "few", lambda *args: few)
    grams = grad_sample.of_grams  # infinite where terms do not fit each other
    blocks = request.param == "blocks"
    monkeypatch.setattr(
        grad_sample, "of_grams", lambda terms: math.inf if blocks else grams(terms)
    )
    value = 1.0 if blocks else 1e300
    monkeypatch.setattr(grad_sample, "of_blocks", lambda terms: value)
    cached = request.param == "cached"
    monkeypatch.setattr(grad_sample, "worth_caching", lambda *args: cached)
    if request.param == "gram":  # also where sums by segment would do
        monkeypatch.setattr(grad_sample, "by_segments", lambda term: False)
    return request.param


@every_use
@pytest.mark.parametrize("materialized", [False, True], ids=["", "materialized"])
def test_every_way_gives_the_same_norm(group, materialized, forced_way, any_workspace):
    for uses in group:
        check_norm(uses, materialized, forced_way)


def check_norm(uses, materialized, forced_way):
    exact = is_exact(uses, materialized)
    got, expected = build(uses, materialized=materialized)
    assert_close(got.squared_norm(), squared(expected), exact)
    summed = set(uses) == {"d"}  # a bias: materialized from the start
    assert (got.cached_bytes > 0) == (forced_way == "cached" and not summed)
    weights = torch.rand(3, dtype=torch.float64)
    weighted = torch.einsum("b,b...->...", weights, expected)
    assert_close(got.weighted_sum(weights), weighted, exact)


@pytest.mark.parametrize("uses", PAIRS, ids="+".join)
def test_add_after_caching(uses, monkeypatch):
    """A use that comes after the norm (a recomputed block) joins what was cached."""
    monkeypatch.setattr(grad_sample, "worth_caching", lambda *args: True)
    got, expected = build(uses[:1])
    got.squared_norm(cache=2**20)
    summed = uses[0] == "d"  # a bias: materialized from the start
    size = expected.numel() * got.materialize().element_size()
    assert got.cached_bytes == (0 if summed else size)
    late = random_use(uses[1], SHAPES[len(uses[1])], 3, 2)
    got.add(*late)
    expected = expected + outer(late, expected.shape[1:])
    exact = is_exact(uses[:1]) and is_exact(uses[1:])
    assert got.cached_bytes == 0
    assert_close(got.materialize(), expected, exact)
    for _ in range(2):  # the second norm caches again
        assert_close(got.squared_norm(cache=2**20), squared(expected), exact)
        weights = torch.rand(3, dtype=torch.float64)
        weighted = torch.einsum("b,b...->...", weights, expected)
        assert_close(got.weighted_sum(weights), weighted, exact)


def test_cached_only_within_the_bytes_allowed():
    size = 3 * 5 * 6 * 8
    for cache, cached in ((0, 0), (size - 1, 0), (size, size)):
        got, expected = build(["dd"], lengths=(300,))
        assert_close(got.squared_norm(cache), squared(expected))
        assert got.cached_bytes == cached
        got.clear()
        assert got.cached_bytes == 0
        assert not got.materialize().any()


def test_choice_follows_shape_and_results_do_not(monkeypatch, any_workspace):
    """Long sequences of narrow rows go by blocks, short ones of wide rows by Gram."""
    by_blocks = []
    blockwise = GradSample._square_by_blocks
    monkeypatch.setattr(
        GradSample,
        "_square_by_blocks",
        lambda self: by_blocks.append(1) or blockwise(self),
    )
    for T, shape, expects_blocks in (
        (300, (4, 5), True),
        (2, (90, 70), False),
        (1, (4, 5), False),
    ):
        for _ in range(2):  # the same each time
            by_blocks.clear()
            got = GradSample(shape, 3)
            use = random_use("dd", shape, 3, T)
            got.add(*use)
            assert_close(got.squared_norm(), squared(outer(use, shape)))
            assert bool(by_blocks) is expects_blocks


# -- numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_cancelling_gradients(tied, forced_way, any_workspace):
    """Uses that cancel leave rounding, of either sign, and its root must exist."""
    B, T, V, d = 64, 7, 5, 4
    index = torch.randint(V, (B, T))
    rows = 100 * torch.randn(B, T, d)
    got = GradSample((V, d), B)
    got.add(OneHot(index, V), rows)
    if tied:  # uses of two kinds, which can't be merged
        got.add(F.one_hot(index, V).float(), -rows)
    else:
        got.add(OneHot(index.flip(1), V), -rows.flip(1))
    norm = got.squared_norm()
    assert (norm >= 0).all()
    assert torch.isfinite(norm.sqrt()).all()
    assert (norm <= 1e-5 * 100**2 * T**2 * d).all()


def test_cancelling_dense_uses(forced_way, any_workspace):
    B, T = 64, 6
    left, right = torch.randn(B, T, 5), torch.randn(B, T, 4)
    got = GradSample((5, 4), B)
    got.add(left, right)
    got.add(-left.flip(1), right.flip(1))
    norm = got.squared_norm()
    assert (norm >= 0).all() and (norm < 1e-2).all()


def test_results_do_not_depend_on_the_order_of_uses(any_workspace):
    shape = SHAPES[2]
    added = [random_use(k, shape, 3, T) for k, T in zip(("do", "dd", "od"), LENGTHS)]
    norms = []
    for order in itertools.permutations(added):
        got = GradSample(shape, 3)
        for use in order:
            got.add(*use)
        norms.append(got.squared_norm())
    for norm in norms[1:]:
        assert_close(norm, norms[0])


def test_parameter_without_uses():
    """It has a defined contribution: zero."""
    got = GradSample((5, 6), 3)
    assert torch.equal(got.materialize(), torch.zeros(3, 5, 6))
    assert torch.equal(got.weighted_sum(torch.ones(3)), torch.zeros(5, 6))
    assert torch.equal(got.squared_norm(), torch.zeros(3))


# -- memory --------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest output of any op."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_tied_table_is_never_materialized():
    V, d, B, T = 20000, 16, 4, 8

    def tied():
        got = GradSample((V, d), B)
        got.add(OneHot(torch.randint(V, (B, T)), V), torch.randn(B, T, d))
        got.add(torch.randn(B, T, V), torch.randn(B, T, d))
        return got

    got = tied()
    for operation in (
        lambda: got.squared_norm(),
        lambda: got.squared_norm(cache=2**40),
        lambda: got.weighted_sum(torch.rand(B)),
    ):
        with Largest() as largest:
            operation()
        assert 0 < largest.numel < B * V * d
    with Largest() as largest:  # and the recorder sees it where it is asked for
        got.materialize()
    assert largest.numel >= B * V * d


def test_gram_chunks_stay_in_the_workspace(monkeypatch):
    """A long sequence never needs [B, T, T] at once."""
    B, T, num_bytes = 2, 400, 2**16
    got = GradSample((30, 30), B)
    use = random_use("dd", (30, 30), B, T, torch.float32)
    got.add(*use)
    monkeypatch.setattr(grad_sample, "of_blocks", lambda terms: math.inf)
    with workspace(num_bytes), Largest() as largest:
        norm = got.squared_norm()
    assert largest.numel <= max(num_bytes // 4, B * T * 30)
    expected = squared(outer(use, (30, 30)))
    torch.testing.assert_close(norm.double(), expected, rtol=1e-4, atol=0)


# -- refusals ------------------------------------------------------------------------


def rows(*shape):
    return torch.zeros(shape)


def ids(*shape):
    return torch.zeros(shape, dtype=torch.long)


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
        (OneHot(ids(2, 5), 4), rows(2, 5, 4)),
        (OneHot(ids(2, 6), 3), rows(2, 5, 4)),
        (OneHot(ids(2), 3), rows(2, 1, 4)),
        (rows(2, 1, 11),),
    ],
)
def test_refuses_factors_that_do_not_fit(use):
    got = GradSample((3, 4), 2)
    with pytest.raises(ValueError, match=r"parameter of shape \(3, 4\).*batch of 2"):
        got.add(*use)
    assert not got.materialize().any()


@pytest.mark.parametrize(
    "use",
    [
        (rows(2, 3), rows(2, 4)),
        (rows(2, 5, 3, 2), rows(2, 5, 4, 2)),
        (OneHot(ids(2, 5, 1), 3), rows(2, 5, 4)),
    ],
    ids=["[B, d]", "[B, T, d, k]", "index [B, T, 1]"],
)
def test_refuses_factors_of_other_dims(use):
    with pytest.raises(ValueError, match=r"parameter of shape \(3, 4\)"):
        GradSample((3, 4), 2).add(*use)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_refuses_an_empty_workspace(num_bytes):
    before = workspace()
    with pytest.raises(ValueError, match="positive"):
        workspace(num_bytes)
    assert workspace() == before


def test_workspace_of_a_block():
    before = workspace()
    with workspace(123), workspace(45):
        assert workspace() == 45
    assert workspace() == before
    with pytest.raises(KeyError), workspace(123):
        raise KeyError
    assert workspace() == before
