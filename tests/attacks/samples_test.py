"""Attacks by what one record can do, a table for each kind.

What one record more or less moves in a sum without noise is at most the bound. Each
case moved it by more, silently, before it was mended.
"""

import collections
import contextlib
import copy
import dataclasses
import enum
import itertools
import math
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

import opacus_ext
from opacus_ext import GradSample, Refused, clipped_grads
from opacus_ext.grad_sample.core.clip import DenseGrads
from opacus_ext.grad_sample.core.values import set_apart
from tests.adapter.common import EVERY_MODE, rows, steps
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    net,
    norms_of,
    oracle,
    square_loss,
    trainable,
)
from tests.fuzz.ops import Opaque

pytestmark = pytest.mark.filterwarnings("ignore")
C = 1.0


def without(batch: Any, i: int) -> Any:
    """The batch without sample ``i``."""
    if isinstance(batch, dict):
        return {name: without(x, i) for name, x in batch.items()}
    if isinstance(batch, tuple):
        return tuple(without(x, i) for x in batch)
    if isinstance(batch, list):
        return batch[:i] + batch[i + 1 :]
    return torch.cat([batch[:i], batch[i + 1 :]])


def distance(one: dict, two: dict) -> float:
    gaps = [(one[n].double() - two[n].double()).norm() for n in one]
    return float(torch.stack(gaps).norm())


def moved(call: Callable[[Any], dict], batch: Any, size: int) -> float:
    """The most that a record moves the sums that ``call`` gives for a batch."""
    whole = call(batch)
    return max(distance(whole, call(without(batch, i))) for i in range(size))


def in_mode(model, batch, loss_fn, mode, size=None):
    """A function of a batch: the clipped sums of one step of a mode."""
    size = size or len(batch if isinstance(batch, torch.Tensor) else batch[0])

    def call(some):
        fresh = copy.deepcopy(model)
        private = make_private(fresh, mode, batch_size=size, max_grad_norm=C)
        private.step(some, loss_fn)
        return {n: p.grad * size for n, p in trainable(fresh).items()}

    return call


# -- norms of terms that cancel --------------------------------------------------------


def pairs(*shape: int, size: float = 1e3, gap: float = 0.1) -> torch.Tensor:
    """Three pairs ``[3, 2, *shape]`` of tensors that are nearly equal."""
    x = size * torch.randn(3, 1, *shape)
    return x + gap * torch.randn(3, 2, *shape)


def difference(m, x):
    """The square of the one output minus that of the other."""
    first, second = (m.layer(x[:, i]).flatten(1).square().sum(1) for i in (0, 1))
    return first - second


def siamese(m, x):
    return (m.layer(x[:, 0]) - m.layer(x[:, 1])).flatten(1).square().sum(1)


def alternating(m, x):
    """Rows of one use, each with a sign."""
    y = m.layer(x.flatten(1, 2)).square().sum(2)
    return (y * torch.tensor([1.0, -1.0]).to(y).repeat(y.shape[1] // 2)).sum(1)


def recurrent(m, x):
    first, second = (m.layer(x[:, i])[0].flatten(1).sum(1) for i in (0, 1))
    return 1e4 * (first - second)


def tied(m, x):
    """A table is used as it is, and as a matrix."""
    rows = m.layer(torch.arange(4).expand(len(x), 4))
    return 1e4 * (rows.flatten(1).sum(1) - (x @ m.layer.weight.T).flatten(1).sum(1))


def looked_up(m, x):
    """One row of a table, in which gradients of many tokens cancel."""
    rows = m.layer(torch.zeros(x.shape[:2], dtype=torch.long))
    return (rows * x).flatten(1).sum(1)


def opposite(*shape: int) -> torch.Tensor:
    """Rows in pairs ``x, -x``, but for a small rest."""
    x = 1e4 * torch.randn(3, shape[0] // 2, *shape[1:])
    return torch.cat([x, -x], 1) + torch.randn(3, *shape)


# By name: losses ``[B]`` of a model with one layer, the layer, and a batch of three.
CANCELING = {
    "linear": (difference, lambda: nn.Linear(256, 256, bias=False), lambda: pairs(256)),
    "images": (
        siamese,
        lambda: nn.Linear(256, 64),
        lambda: 300 + torch.randn(3, 2, 256),
    ),
    "two layers": (
        difference,
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 16)),
        lambda: pairs(8),
    ),
    "rows": (
        alternating,
        lambda: nn.Linear(64, 64),
        lambda: pairs(1, 64).repeat(1, 4, 1, 1),
    ),
    "convolution": (difference, lambda: nn.Conv1d(8, 8, 3), lambda: pairs(8, 9)),
    "recurrent": (
        recurrent,
        lambda: nn.GRU(8, 16, batch_first=True),
        lambda: pairs(5, 8, size=1.0, gap=1e-4),
    ),
    "tied": (tied, lambda: nn.Embedding(4, 8), lambda: 1 + 1e-3 * torch.randn(3, 4, 8)),
    "looked up": (looked_up, lambda: nn.Embedding(5000, 8), lambda: opposite(64, 8)),
    "huge": (
        lambda m, x: m.layer(x).sum(1),
        lambda: nn.Linear(4, 3),
        lambda: torch.tensor([[1e25], [1.0], [2.0]]).expand(3, 4),
    ),
}


def output(model, batch):
    return model(batch)


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("name", CANCELING)
def test_norms_of_terms_that_cancel(name, mode):
    then, layer, batch = CANCELING[name]
    model, batch = net(then, layer=layer)(), batch()
    private = make_private(copy.deepcopy(model), mode, batch_size=3, max_grad_norm=C)
    found = []
    private.optimizer.observers += (Observer(found),)
    private.step(batch, output)
    wide = oracle(copy.deepcopy(model).double(), batch.double(), output)
    torch.testing.assert_close(found[0].double(), norms_of(wide), rtol=1e-3, atol=0)
    assert moved(in_mode(model, batch, output, mode), batch, 3) <= C * 1.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_that_cancel_in_any_dtype(dtype):
    """In float64 as well, where gaps are smaller."""
    gap = 1e-4 if dtype is torch.float32 else 1e-12
    layer = nn.Linear(64, 32, dtype=dtype)
    x = torch.randn(3, 1, 64, dtype=dtype)
    batch = x + gap * torch.randn(3, 2, 64, dtype=dtype)

    def sums(batch):
        given = difference_of(layer), dict(layer.named_parameters()), batch, C
        return clipped_grads(*given).sums

    assert moved(sums, 1e6 * batch, 3) <= C * 1.001


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_norms_that_cancel_in_compiled_code(backend):
    """A norm that is not certain is replaced by a bound from above."""
    layer, batch = nn.Linear(64, 32), pairs(64)
    params = dict(layer.named_parameters())

    def step(batch):
        return clipped_grads(difference_of(layer), params, batch, C)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    norms, sums = step(batch).norms, compiled(batch).sums
    assert (compiled(batch).norms >= 0.999 * norms).all()
    assert distance(sums, {n: torch.zeros_like(g) for n, g in sums.items()}) <= 3 * C
    assert moved(lambda batch: compiled(batch).sums, batch, 3) <= C * 1.001


def difference_of(layer):
    def loss(sample):
        first, second = (layer(sample[:, i]).square().sum() for i in (0, 1))
        return first - second

    return loss


class Observer(NamedTuple):
    """Keeps the norms of each step."""

    found: list
    noise_factor: float = 1.0

    def observe(self, norms):
        self.found.extend(norms)


# -- samples alone ---------------------------------------------------------------------


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


def check(loss: Callable, batch: Callable[[], Any], take: Any = None) -> None:
    """
    Compares ``clipped_grads`` of a loss ``(sample, w)`` with each sample alone;
    ``batch`` makes a new one each time, as the loss may write to it.
    """
    w, size = weight(4, 4), len(batch()[0])

    def same():
        torch.manual_seed(0)
        return batch()

    rows = []
    for i in range(size):
        given = same()
        alone = take(given, i) if take else tuple(x[i : i + 1].clone() for x in given)
        rows.append(torch.autograd.grad(loss(alone, w), w)[0])
    norms = torch.stack(rows).flatten(1).norm(dim=1)
    expected = (
        (C / (norms + 1e-6)).clamp(max=1)[:, None, None] * torch.stack(rows)
    ).sum(0)
    found = clipped_grads(lambda s: loss(s, w), {"w": w}, same(), C, take=take)
    torch.testing.assert_close(found.norms, norms)
    torch.testing.assert_close(found.sums["w"], expected)


def caught(s):
    try:
        return int(s)
    except Exception:
        return 0


def caught_bare(s):
    try:
        return s.item()
    except:  # noqa: E722
        return 0


def suppressed(s):
    with contextlib.suppress(Exception):
        return s.tolist()[0]
    return 0


def returned(s):
    found = 0
    try:
        found = 5 * bool(s > 3)
    finally:
        return found


def as_array(s):
    try:
        return int(np.asarray(s.detach())[0])
    except Exception:
        return 0


def selected(s):
    try:
        return len(s.nonzero())
    except RuntimeError:
        return 0


def of_kernel(s):
    """An error of torch's own under vmap, and not of a sample alone."""
    try:
        return torch.nested.as_nested_tensor([s])[0].sum()
    except Exception:
        return 0


ASKED = (caught, caught_bare, suppressed, returned, as_array, selected, of_kernel)


def numbered(size: int = 5):
    return torch.randn(size, 4).double(), torch.arange(size) * 2


@pytest.mark.parametrize("ask", ASKED)
def test_answers_that_code_catches(ask):
    check(lambda s, w: (s[0] @ w).sum() * (1 + ask(s[1])), numbered)


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("ask", ASKED[::2])
def test_answers_that_a_model_catches(ask, mode):
    model = net(lambda m, x: m.fc(x) * (1 + ask(x[:, 3])), fc=(4, 3))().double()
    batch = torch.randn(5, 4).double()
    batch[:, 3] = 2 * torch.arange(5)
    expected = clipped_sum(oracle(model, batch, square_loss), "flat", C)
    assert_same(in_mode(model, batch, square_loss, mode)(batch), expected, 1e-8)


def test_answers_that_a_criterion_catches():
    def criterion(y, k):
        assert len(y) == 1  # it knows no batches, to which it could be compared
        return y.square().sum() * (1 + caught(k))

    model, batch = nn.Linear(4, 3).double(), numbered()
    private = make_private(model, "ghost_bk", batch_size=5, criterion=criterion, lr=0.0)
    expected = oracle(model, batch, lambda m, b: criterion(m(b[0]), b[1])[None])
    private.criterion(private.module(batch[0]), batch[1]).backward()
    got = {n: p.grad for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(expected, "flat", C), 1e-8)


def keeps(s, w):
    x, keep = s
    keep &= x.max() < 10
    return (Opaque.apply(x) @ w).sum() * keep.double().sum()


def keeps_at_once(s, w):
    x, keep = s
    keep &= x.max() < 10
    return (x @ w).sum() * keep.double().sum()


def halves(s, w):
    s[0].div_(2)
    return (Opaque.apply(s[0]) @ w).square().sum()


def triples(s, w):
    s[1].mul_(3)
    return (Opaque.apply(s[0]) @ w).square().sum()


def outlier():
    x = torch.arange(24.0).view(6, 4).double() / 24
    x[0] = 100
    return x


def shifted(make=torch.tensor):
    data = np.arange(28.0).reshape(7, 4) / 28
    data = make(data)
    return data[:-1], data[1:]


OVERLAPPING = {
    "expanded": (keeps, lambda: (outlier(), torch.ones(1, 1).bool().expand(6, 1))),
    "at once": (keeps_at_once, lambda: (outlier(), torch.ones(1).bool().expand(6, 1))),
    "windows": (halves, lambda: (torch.randn(9).double().unfold(0, 4, 1),)),
    "strided": (halves, lambda: (torch.randn(9).double().as_strided((6, 4), (1, 1)),)),
    "shifted": (triples, shifted),
    "arrays": (triples, lambda: tuple(map(torch.from_numpy, shifted(np.array)))),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_samples_that_share_memory(name):
    check(*OVERLAPPING[name])


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize("opaque", [True, False])
def test_inputs_that_share_memory(mode, opaque):
    """Windows of a sequence, which the model divides."""

    def then(m, x):
        x.div_(2)
        return Opaque.apply(m.fc(x)) if opaque else m.fc(x)

    model = net(then, fc=(4, 3))().double()
    batch = torch.randn(9).double().unfold(0, 4, 1)
    expected = clipped_sum(oracle(model, batch.clone(), square_loss), "flat", C)
    assert_same(in_mode(model, batch, square_loss, mode)(batch), expected, 1e-8)


class Holder:
    """An object that many samples hold."""

    def __init__(self):
        self.seen = 0.0


@pytest.mark.parametrize("make", [lambda: np.zeros(1), Holder], ids=["array", "object"])
def test_objects_that_share_memory(make):
    """What one sample writes to no other reads."""
    shared = []

    def batch():
        shared[:] = [make()]
        return (torch.randn(5, 4).double(),)

    def loss(s, w):
        x, kept = s
        if isinstance(kept, Holder):
            before, kept.seen = kept.seen, float(x.sum())
        else:
            before = kept.item()
            kept += float(x.sum())
        return (x @ w).sum() * (1 + before)

    def take(given, i):
        return given[0][i : i + 1], shared[0]

    w, (x,) = weight(4, 4), batch()
    found = clipped_grads(lambda s: loss(s, w), {"w": w}, (x,), C, take=take)
    expected = [torch.autograd.grad((a @ w).sum(), w)[0].norm() for a in x]
    torch.testing.assert_close(found.norms, torch.stack(expected))


def test_a_sample_is_no_view_of_the_batch():
    x = torch.randn(5, 4).double()
    x[4] *= 100
    w = weight(4, 4)

    def loss(s):
        with contextlib.suppress(RuntimeError):  # out of bounds
            return (s @ w).sum() * (1 + s.as_strided((5, 4), (4, 1), 0).max().item())
        return (s @ w).sum()

    one = clipped_grads(loss, {"w": w}, x, C).norms
    two = clipped_grads(loss, {"w": w}, x[:4].clone(), C).norms
    torch.testing.assert_close(one[:4], two)


def test_memory_is_copied_only_where_samples_share_it():
    """Next tokens, and parts of one tensor, are views as they were."""
    ids, dim = torch.arange(24).view(4, 6), [0, 0]
    for pair in ((ids[:, :-1], ids[:, 1:]), ids.split(3, 1), (ids, ids)):
        copies = set_apart(pair, dim)
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(pair, copies))
    time_first = set_apart([ids], [1])
    assert time_first[0].data_ptr() == ids.data_ptr()
    mask = torch.ones(4, 1).expand(4, 5)  # of each sample by itself
    assert set_apart([mask], [0])[0].data_ptr() == mask.data_ptr()


def by_index(batch, i):
    if i == 3:
        raise IndexError("of a table")
    return batch[i][None]


def by_iterator(batch, i):
    return batch[i][None] if i != 3 else next(iter([]))


def without_rows(batch, i):
    return batch[i : i + 1] if i != 3 else batch[:0]


def last_fails(batch, i):
    if i == 5:
        raise IndexError("of a table")
    return batch[i][None]


@pytest.mark.parametrize("take", [by_index, by_iterator, without_rows, last_fails])
@pytest.mark.parametrize(
    "kind", [list, torch.stack, tuple, collections.UserList, lambda x: {}]
)
def test_a_sample_that_fails_ends_no_batch(take, kind):
    w, rows = weight(4, 4), list(torch.randn(6, 4).double())
    if kind is not torch.stack and take is without_rows:
        pytest.skip("an item of a list has no rows to leave out")
    batch, of = kind(rows), take
    if isinstance(batch, dict):
        batch, take = {"x": rows, "y": rows}, lambda batch, i: of(batch["x"], i)
    with pytest.raises(Refused, match="take"):
        clipped_grads(lambda s: (s @ w).sum(), {"w": w}, batch, C, take=take)


def test_the_number_of_samples_is_that_of_take():
    def take(batch, i):
        return table[batch[i]][None]

    w, table = weight(4, 4), torch.randn(3, 4).double()
    take.size = len
    with pytest.raises(IndexError):
        clipped_grads(lambda s: (s @ w).sum(), {"w": w}, [0, 1, 2, 3], C, take=take)
    found = clipped_grads(lambda s: (s @ w).sum(), {"w": w}, [0, 1, 2], C, take=take)
    assert len(found.norms) == 3


def test_ready_made_functions_know_the_number():
    rows = [torch.randn(n, 4).double() for n in (1, 2, 3)]
    model = net(
        lambda m, xs, flag=False: torch.stack([m.fc(x).sum(0) for x in xs]), fc=(4, 2)
    )().double()
    private = make_private(model, "ghost_bk", batch_size=3, take=opacus_ext.take.items)
    private.step(rows, lambda model, xs: model(xs, flag=True).square().sum(1))
    assert len(private.handle.per_sample_gradient_norms) == 3


@dataclasses.dataclass
class Alike:
    """Objects that print alike, and call themselves equal."""

    k: int

    def __repr__(self):
        return "Alike()"

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


ALIKE = {
    "objects": [Alike(i) for i in range(5)],
    "arrays": [np.full(2000, float(i)) for i in range(5)],
    "lists": [[i] for i in range(5)],
    "sets": [frozenset([Alike(i)]) for i in range(5)],
    "zeros": [0.0, -0.0, 0.0, -0.0, 1.0],
    "ones": [1, True, 1.0, 2, 2.0],
    "slices": [slice(0, 1), slice(False, 1), slice(0, 1.0), slice(0, 2), slice(0, 1)],
}


def number_of(value):
    """A number that tells apart what is compared by type and bits."""
    if isinstance(value, Alike):
        return value.k
    if isinstance(value, (np.ndarray, list, frozenset)):
        return number_of(next(iter(value)))
    if isinstance(value, slice):
        return number_of(value.start) + 7 * number_of(value.stop)
    kinds = {bool: 3.0, int: 5.0}
    return math.copysign(2, value) + kinds.get(type(value), 0.0) + value


@pytest.mark.parametrize("name", ALIKE)
def test_values_that_seem_equal(name):
    def take(batch, i):
        return batch[0][i : i + 1], batch[1][i]

    x = torch.randn(5, 4).double()
    check(
        lambda s, w: (s[0] @ w).sum() * number_of(s[1]), lambda: (x, ALIKE[name]), take
    )


class Level(enum.Enum):
    """Members that call each other equal."""

    LOW, HIGH = 1, 2

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class Node:
    """A node of a tree, which prints as others do."""

    def __init__(self, x, k):
        self.x, self.k = x, k


pytree.register_pytree_node(
    Node, lambda n: ((n.x,), Alike(n.k)), lambda xs, about: Node(xs[0], about.k)
)
_KINDS = [collections.namedtuple("Kind", "x", defaults=[i]) for i in range(2)]
TREES = {
    "keys": lambda x, k: {Alike(k): x},
    "named tuples": lambda x, k: _KINDS[k](x),
    "nodes": Node,
    "members": lambda x, k: (x, Level(k + 1)),
}


def number_in(tree):
    """The number that makes trees differ that print alike."""
    if isinstance(tree, dict):
        return next(iter(tree)).k
    if isinstance(tree, Node):
        return tree.k
    kinds = [i for i, kind in enumerate(_KINDS) if type(tree) is kind]
    return kinds[0] if kinds else tree[1].value


@pytest.mark.parametrize("name", TREES)
def test_trees_that_print_alike(name):
    def take(batch, i):
        return TREES[name](batch[0][i : i + 1], i % 2)

    def loss(s, w):
        (x,) = (x for x in pytree.tree_leaves(s) if isinstance(x, torch.Tensor))
        return (x @ w).sum() * (1 + number_in(s))

    x = torch.randn(5, 4).double()
    check(loss, lambda: (x,), take)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize(
    "values", [[0.0, -0.0, 1.0], [math.nan, 0.0, math.nan]], ids=["zeros", "nan"]
)
def test_numbers_that_seem_equal(values, mode):
    """The sign of a zero is an answer."""

    def sign(x):
        return 20 + 19 * math.copysign(1, x.item())

    model = net(lambda m, x: m.fc(x[:, :3]) * sign(x[:, 3]), fc=(3, 3))().double()
    batch = torch.randn(3, 4).double()
    batch[:, 3] = torch.tensor(values)
    expected = clipped_sum(oracle(model, batch, square_loss), "flat", C)
    assert_same(in_mode(model, batch, square_loss, mode)(batch), expected, 1e-8)


@pytest.mark.parametrize("value", [-0.0, 1])
def test_state_that_seems_equal(value):
    """A forward that sets an attribute by data, to what is equal to what was there."""

    def then(m, x):
        y = m.fc(x) * (2 + math.copysign(1, m.kept))
        m.kept = value if x.detach().sum() > 0 else m.kept
        return y

    model = net(then, fc=(4, 3), kept=abs(float(value)))().double()
    private = make_private(model, "ghost_bk", batch_size=3)
    with pytest.raises(Refused, match="kept"):
        for _ in range(2):
            private.step(torch.ones(3, 4).double(), square_loss)


# -- random numbers of a seed ----------------------------------------------------------


def masked(h, generator=None):
    return h * (torch.rand(h.shape, generator=generator, dtype=h.dtype) > 0.5) * 2


def seeds(m, h):
    torch.manual_seed(3)
    return F.dropout(h, 0.5)


def seeds_behind(m, h):
    y = F.dropout(h, 0.5)
    torch.manual_seed(3)
    return y


def seeds_in_a_fork(m, h):
    with torch.random.fork_rng(devices=[]):
        return seeds(m, h)


def forks(m, h):
    with torch.random.fork_rng(devices=[]):
        return F.dropout(h, 0.5)


def sets_a_state(m, h):
    torch.set_rng_state(m.state)
    return F.dropout(h, 0.5)


def makes_a_generator(m, h):
    return masked(h, torch.Generator().manual_seed(3))


def draws_in_place(m, h):
    generator = torch.Generator().manual_seed(3)
    return h * torch.empty_like(h).bernoulli_(0.5, generator=generator)


def holds_a_generator(m, h):
    return masked(h, m.generator)


def seeds_its_generator(m, h):
    return masked(h, m.generator.manual_seed(3))


def permutes(m, h):
    torch.manual_seed(3)
    return h[..., torch.randperm(h.shape[-1])]


def of_kernel_of_torch(m, h):
    torch.manual_seed(3)
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5)


class Seeded(nn.Module):
    """A model with a generator, of which a copy has its own."""

    def __init__(self, then):
        super().__init__()
        self.then, self.one, self.two = then, nn.Linear(4, 4), nn.Linear(4, 2)
        self.generator = torch.Generator().manual_seed(1)
        self.state = torch.Generator().manual_seed(7).get_state()

    def forward(self, x):
        return self.two(self.then(self, self.one(x)))

    def __deepcopy__(self, memo):
        new = Seeded(self.then).to(self.one.weight.dtype)
        new.load_state_dict(self.state_dict())
        return new


FIXED = (seeds, seeds_in_a_fork, sets_a_state, makes_a_generator, draws_in_place)
FIXED += (seeds_its_generator, permutes, of_kernel_of_torch)
SEEDED = (*FIXED, seeds_behind, forks, holds_a_generator)


def test_a_seed_that_is_there_already():
    """Set behind the draws of a sample, it told those of the next in any batch."""
    masks = []

    def draws(m, h):
        masks.append(F.dropout(torch.ones(64), 0.5))
        torch.manual_seed(3)
        return h

    for taken in (1, 2):
        torch.manual_seed(3)
        torch.rand(taken)  # the program is elsewhere in its stream
        call = in_mode(Seeded(draws), torch.randn(3, 5, 4), square_loss, "scan")
        torch.manual_seed(3)
        torch.rand(taken)
        call(torch.ones(3, 5, 4))
    first, second = masks[:3], masks[3:]
    assert not any(torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.parametrize("then", SEEDED)
def test_random_numbers_that_a_forward_seeds(then):
    """They were those of a place in the batch: a record less moved all behind it."""
    batch, model = 20 * torch.randn(9, 5, 4), Seeded(then)
    for mode in ("hooks", "ghost_bk", "scan"):
        sums = in_mode(model, batch, square_loss, mode)

        def call(some):
            torch.manual_seed(11)
            return sums(some)

        whole = call(batch)
        assert distance(whole, call(batch[1:])) < C + 1e-3


@pytest.mark.parametrize("then", FIXED)
def test_random_numbers_are_those_of_a_sample_alone(then):
    for mode in ("ghost_bk", "scan"):
        steps(Seeded(then), rows(3, 1, d=4), mode)


def test_a_generator_whose_state_data_decide():
    """How often it was drawn from would be known to the next batch."""

    def draws_by_data(m, h):
        return masked(h, m.generator) if h.sum() > 0 else h

    private = make_private(Seeded(draws_by_data), "scan", batch_size=4)
    with pytest.raises(Refused, match="changes generator"):
        for batch in torch.randn(3, 4, 5, 4):
            private.step(batch, square_loss)


# -- sums that fail, and gradients that others see -------------------------------------


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_an_error_in_the_middle_of_a_sum(mode, monkeypatch):
    """Memory is out at the second parameter: nothing may be added on top of a part."""
    model, batch = nn.Linear(300, 300).double(), torch.randn(3, 300).double()
    plain, expected = copy.deepcopy(model), expected_of(model, batch)
    private = make_private(model, mode, batch_size=3, lr=0.0)
    stock, count = GradSample.weighted_sum, itertools.count()

    def weighted_sum(self, weights):
        if next(count) == 1:
            raise torch.OutOfMemoryError("no memory")
        return stock(self, weights)

    monkeypatch.setattr(GradSample, "weighted_sum", weighted_sum)
    params = dict(plain.named_parameters())
    with contextlib.suppress(torch.OutOfMemoryError):
        given = lambda x: square_loss(plain, x).sum(), params, batch  # noqa: E731
        assert_same(clipped_grads(*given, C).sums, expected, 1e-8)
    count = itertools.count()
    with contextlib.suppress(torch.OutOfMemoryError):
        private.step(batch, square_loss)
        got = {n: 3 * p.grad for n, p in model.named_parameters()}
        assert_same(got, expected, 1e-8)


def expected_of(model, batch):
    return clipped_sum(oracle(model, batch, square_loss), "flat", C)


def test_an_error_in_the_middle_of_gradients(monkeypatch):
    model, batch = nn.Linear(4, 3).double(), torch.randn(3, 4).double()
    stock, count = DenseGrads._put, itertools.count()

    def put(self, *args):
        if next(count) == 1:
            raise torch.OutOfMemoryError("no memory")
        return stock(self, *args)

    monkeypatch.setattr(DenseGrads, "_put", put)
    with pytest.raises(torch.OutOfMemoryError):
        opacus_ext.per_sample_grads(
            lambda x: model(x).square().sum(), dict(model.named_parameters()), batch
        )


def after_gradients(model, step):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


def of_several(model, step):
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), step)


def of_any(model, step):
    given = list(model.parameters())
    torch.autograd.graph.register_multi_grad_hook(given, step, mode="any")


def plainly(model, x):
    return model(x).square().sum(1)


def by_function(model, x):
    return Opaque.apply(model(x)).square().sum(1)


def by_checkpoint(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum(1)


@pytest.mark.parametrize("run", [plainly, by_function, by_checkpoint])
@pytest.mark.parametrize("register", [after_gradients, of_several, of_any])
def test_an_optimizer_in_the_backward_pass(register, run):
    def made():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, lambda *args: optimizer.step(), copy.deepcopy(model)

    model, step, before = made()
    register(model, step)
    with pytest.raises(Refused, match="hook"):
        params = dict(model.named_parameters())
        clipped_grads(lambda x: run(model, x).sum(), params, torch.randn(3, 4), C)
    for mode in EVERY_MODE if run is not by_checkpoint else ():
        model, step, before = made()
        private = make_private(model, mode, batch_size=3, lr=0.0)
        register(model, step)
        with pytest.raises(Refused, match="hook"):
            private.step(torch.randn(3, 4), run)
        for p, q in zip(model.parameters(), before.parameters()):
            assert torch.equal(p, q)


def test_an_optimizer_that_the_loss_adds():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(x):
        after_gradients(model, lambda *args: optimizer.step())
        return by_function(model, x).sum()

    before = copy.deepcopy(model)
    with pytest.raises(Refused, match="hook"):
        clipped_grads(loss, dict(model.named_parameters()), torch.randn(3, 4), C)
    assert torch.equal(before.weight, model.weight)


class Writes(torch.autograd.Function):
    """Writes to a parameter in the backward pass."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            ctx.p.add_(grad.sum())
        return grad, None


def written_by_function(model, x):
    return Writes.apply(model(x), model.weight.detach())


def written_by_hook(model, x):
    y = model(x)

    def write(grad):
        with torch.no_grad():
            model.weight.add_(grad.sum())

    y.register_hook(write)
    return y


def written_by_loss(model, x):
    y = model(x)
    with torch.no_grad():
        model.weight.add_(x.sum())
    return y


@pytest.mark.parametrize("run", [written_by_function, written_by_hook, written_by_loss])
@pytest.mark.parametrize("mode", [None, *EVERY_MODE])
def test_parameters_that_are_written_to(run, mode):
    """Here, or by autograd, or by the check of the forward pass."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    said = "changed in the|modified by an inplace|its forward changes"
    if mode is None:
        params = dict(model.named_parameters())
        with pytest.raises((Refused, RuntimeError), match=said):
            clipped_grads(
                lambda x: run(model, x).square().sum(), params, torch.randn(3, 4), C
            )
        return

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, x):
            return run(self.layer, x)

    private = make_private(Around(), mode, batch_size=3, lr=0.0)
    with pytest.raises((Refused, RuntimeError), match=said):
        private.step(torch.randn(3, 4), square_loss)
    assert not private.engine.accountant.history


# -- losses without a graph, and what is no loss ---------------------------------------


def no_grad(model, x):
    with torch.no_grad():
        return model(x).sum()


def inference(model, x):
    with torch.inference_mode():
        return model(x).sum()


def integers(model, x):
    return (model(x) > 0).sum()


def detached(model, x):
    return model(x).detach().sum()


def of_a_copy(model, x):
    return copy.deepcopy(model)(x).sum()


def of_another(model, x):
    other = nn.Linear(4, 3)
    return (other.weight * 2 @ x.mT).sum()


@pytest.mark.parametrize(
    "loss", [no_grad, inference, integers, detached, of_a_copy, of_another]
)
@pytest.mark.parametrize("size", [1, 3])
def test_losses_without_a_graph(loss, size):
    """No parameter is reached by any sample: torch refuses that, too."""
    model, batch = nn.Linear(4, 3), torch.randn(size, 4)
    given = (
        lambda x: loss(model, x),
        dict(model.named_parameters()),
        batch,
    )  # noqa: E731
    for call in (opacus_ext.per_sample_grads, lambda *args: clipped_grads(*args, C)):
        with pytest.raises(Refused, match="depends on a parameter"):
            call(*given)
    if loss is not of_another:
        for mode in EVERY_MODE:
            private = make_private(copy.deepcopy(model), mode, batch_size=size)
            with pytest.raises((RuntimeError, ValueError)):
                private.step(batch, lambda m, x: loss(m, x) * torch.ones(size))


def test_some_samples_without_a_graph():
    """One is enough: the others have a gradient of zero."""
    w = weight(4, 4)

    def loss(x):
        return (x @ w).sum() if x.sum() > 0 else torch.zeros((), dtype=torch.double)

    x = torch.ones(3, 4).double() * torch.tensor([[1.0], [-1.0], [1.0]])
    assert clipped_grads(loss, {"w": w}, x, C).norms.tolist() == [4, 0, 4]


@pytest.mark.parametrize(
    "aux, said",
    [
        ("a", "type str"),
        ({"x": [None]}, "type NoneType"),
        (object(), "type object"),
        (np.str_("a"), "type str_"),
        (np.array([None, "a"]), "type ndarray"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
    ],
)
def test_auxiliary_values_that_are_none(aux, said):
    w, x = weight(4, 4), torch.ones(2, 4).double()
    with pytest.raises(Refused, match=said):
        clipped_grads(lambda x: ((x @ w).sum(), aux), {"w": w}, x, C)
    assert clipped_grads(lambda x: ((x @ w).sum(), None), {"w": w}, x, C).aux is None


@pytest.mark.parametrize(
    "batch, said",
    [
        (torch.eye(4).to_sparse_csr(), "torch.sparse_csr"),
        (torch.eye(4).to_sparse(), "torch.sparse_coo"),
        ({"ids": [[1, 2], [3, 4]]}, "type int"),
        ({"x": torch.ones(2, 4), "names": ["a", "b"]}, "type str"),
        (torch.nested.nested_tensor([torch.ones(4)] * 2), "nested tensors"),
    ],
    ids=["csr", "coo", "lists", "strings", "nested"],
)
def test_batches_that_can_not_be_cut(batch, said):
    w = weight(4, 4)
    with pytest.raises(Refused, match=said):
        clipped_grads(lambda s: (s @ w).sum(), {"w": w}, batch, C)


@pytest.mark.parametrize(
    "params, given, said",
    [
        (lambda w: [w], {}, "params is a dict.*list"),
        (lambda w: nn.Linear(2, 2), {}, "params is a dict.*Linear"),
        (lambda w: None, {}, "params is a dict.*NoneType"),
        (lambda w: {"w": w}, {"microbatch": True}, "microbatch.*True"),
        (lambda w: {"w": w}, {"take": 3}, "take is a function.*int"),
    ],
)
def test_arguments_of_another_kind(params, given, said):
    w, x = weight(4, 4), torch.ones(2, 4).double()
    with pytest.raises(Refused, match=said):
        clipped_grads(lambda x: (x @ w).sum(), params(w), x, C, **given)


def test_complex_losses():
    w, x = weight(4, 4), torch.ones(2, 4).double()
    with pytest.raises(Refused, match="one real number.*complex"):
        clipped_grads(lambda x: (x @ w).sum() * 1j, {"w": w}, x, C)


def test_mappings_that_are_no_dicts():
    """A sample is a mapping of the same kind."""
    w, x = weight(4, 4), torch.randn(3, 4).double()
    batch = BatchEncoding({"x": x, "k": torch.tensor([1, 2, 3])})
    found = clipped_grads(lambda s: (s.x @ w).sum() * s["k"], {"w": w}, batch, C)
    plain = clipped_grads(
        lambda s: (s["x"] @ w).sum() * s["k"], {"w": w}, dict(batch), C
    )
    assert torch.equal(found.norms, plain.norms)


def test_compiled_calls_that_eager_ones_allow():
    model, params = nn.Linear(4, 3), {}
    params.update(model.named_parameters())

    def step(x, **kwargs):
        return clipped_grads(lambda x: model(x).square().sum(), params, x, C, **kwargs)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    found = compiled(torch.randn(0, 4))
    assert found.norms.shape == (0,) and not any(g.any() for g in found.sums.values())
    with pytest.raises(Exception, match="on_nonfinite"):
        compiled(torch.randn(2, 4), on_nonfinite="raise")
