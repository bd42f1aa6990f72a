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
from typing import Any, Callable

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
from tests.zoo import EVERY_MODE, Case
from tests.zoo import check as check_steps
from tests.zoo import every_mode, rows

pytestmark = pytest.mark.filterwarnings("ignore")
C = 1.0


def without(batch: torch.Tensor, i: int) -> torch.Tensor:
    """The batch without sample ``i``."""
    return torch.cat([batch[:i], batch[i + 1 :]])


def distance(one: dict, two: dict) -> float:
    gaps = [(one[n].double() - two[n].double()).norm() for n in one]
    return float(torch.stack(gaps).norm())


def moved(call: Callable[[torch.Tensor], dict], batch: torch.Tensor) -> float:
    """The most that a record moves the sums that ``call`` gives for a batch."""
    whole, size = call(batch), len(batch)
    return max(distance(whole, call(without(batch, i))) for i in range(size))


def in_mode(model, batch, loss_fn, mode):
    """A function of a batch: the clipped sums of one step of a mode."""
    size = len(batch if isinstance(batch, torch.Tensor) else batch[0])

    def call(some):
        fresh = copy.deepcopy(model)
        private = make_private(fresh, mode, batch_size=size, max_grad_norm=C)
        private.step(some, loss_fn)
        return {n: p.grad * size for n, p in trainable(fresh).items()}

    return call


def exact_in_mode(model, batch, mode):
    expected = clipped_sum(oracle(model, batch.clone(), square_loss), "flat", C)
    assert_same(in_mode(model, batch, square_loss, mode)(batch), expected, 1e-8)


# -- norms of terms that cancel --------------------------------------------------------


def pairs(*shape: int, size: float = 1e3, gap: float = 0.1) -> torch.Tensor:
    """Three pairs ``[3, 2, *shape]`` of tensors that are nearly equal."""
    x = size * torch.randn(3, 1, *shape)
    return x + gap * torch.randn(3, 2, *shape)


def difference(m, x):
    """The square of the one output minus that of the other."""
    first, second = (m.layer(x[:, i]).flatten(1).square().sum(1) for i in (0, 1))
    return first - second


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
    "in float64": (
        difference,
        lambda: nn.Linear(64, 32).double(),
        lambda: pairs(64, size=1e6, gap=0.0) + 1e-6 * torch.randn(3, 2, 64).double(),
    ),
}


def losses(model, batch):
    return model(batch)


@every_mode
@pytest.mark.parametrize("name", CANCELING)
def test_norms_of_terms_that_cancel(name, mode):
    then, layer, batch = CANCELING[name]
    model, batch = net(then, layer=layer)(), batch()
    if batch.dtype is torch.float32:
        private = make_private(copy.deepcopy(model), mode, batch_size=3)
        private.step(batch, losses)
        wide = oracle(copy.deepcopy(model).double(), batch.double(), losses)
        clipped = {n: p.grad for n, p in trainable(private.handle).items()}
        assert distance(clipped, dict.fromkeys(clipped, torch.zeros(()))) <= C * 1.001
        found = clipped_grads(model, dict(model.named_parameters()), batch, C).norms
        torch.testing.assert_close(found.double(), norms_of(wide), rtol=1e-3, atol=0)
    assert moved(in_mode(model, batch, losses, mode), batch) <= C * 1.001


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_norms_that_cancel_in_compiled_code(backend):
    """A norm that is not certain is replaced by a bound from above."""
    model, batch = net(difference, layer=(64, 32))(), pairs(64)
    params = dict(model.named_parameters())

    def step(batch):
        return clipped_grads(model, params, batch, C)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    norms, found = step(batch).norms, compiled(batch)
    assert (found.norms >= 0.999 * norms).all()
    assert distance(found.sums, dict.fromkeys(params, torch.zeros(()))) <= 3 * C
    assert moved(lambda batch: compiled(batch).sums, batch) <= C * 1.001


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

    grads = []
    for i in range(size):
        given = same()
        alone = take(given, i) if take else tuple(x[i : i + 1].clone() for x in given)
        grads.append(torch.autograd.grad(loss(alone, w), w)[0])
    expected = {"w": torch.stack(grads)}
    found = clipped_grads(lambda s: loss(s, w), {"w": w}, same(), C, take=take)
    torch.testing.assert_close(found.norms, norms_of(expected))
    assert_same(found.sums, clipped_sum(expected, "flat", C))


def caught(s):
    try:
        return int(s)
    except Exception:
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


ASKED = (caught, returned, as_array, selected, of_kernel)


def numbered(size: int = 5):
    return torch.randn(size, 4).double(), torch.arange(size) * 2


@pytest.mark.parametrize("ask", ASKED)
def test_answers_that_code_catches(ask):
    check(lambda s, w: (s[0] @ w).sum() * (1 + ask(s[1])), numbered)


@every_mode
def test_answers_that_a_model_catches(mode):
    for ask in ASKED[::2]:
        model = net(lambda m, x: m.fc(x) * (1 + ask(x[:, 3])), fc=(4, 3))().double()
        batch = torch.randn(5, 4).double()
        batch[:, 3] = 2 * torch.arange(5)
        exact_in_mode(model, batch, mode)


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


# -- samples that share memory ---------------------------------------------------------


def keeps(s, w, of=Opaque.apply):
    x, keep = s
    keep &= x.max() < 10
    return (of(x) @ w).sum() * keep.double().sum()


def halves(s, w):
    s[0].div_(2)
    return (Opaque.apply(s[0]) @ w).square().sum()


def triples(s, w):
    s[1].mul_(3)
    return (Opaque.apply(s[0]) @ w).square().sum()


def outlier():
    x = torch.arange(24.0).view(6, 4).double() / 24
    x[0] = 100
    return x, torch.ones(1, 1).bool().expand(6, 1)


def shifted(make):
    data = make(np.arange(28.0).reshape(7, 4) / 28)
    return data[:-1], data[1:]


OVERLAPPING = {
    "expanded": (keeps, outlier),
    "at once": (lambda s, w: keeps(s, w, lambda x: x), outlier),
    "windows": (halves, lambda: (torch.randn(9).double().unfold(0, 4, 1),)),
    "shifted": (triples, lambda: shifted(torch.tensor)),
    "arrays": (triples, lambda: tuple(map(torch.from_numpy, shifted(np.array)))),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_samples_that_share_memory(name):
    check(*OVERLAPPING[name])


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
def test_inputs_that_share_memory(mode):
    """Windows of a sequence, which the model divides."""
    for of in (Opaque.apply, torch.tanh):
        model = net(lambda m, x: of(m.fc(x.div_(2))), fc=(4, 3))().double()
        exact_in_mode(model, torch.randn(9).double().unfold(0, 4, 1), mode)


class Holder:
    """An object that many samples hold."""

    def __init__(self):
        self.seen = 0.0


def of_array(kept, x):
    before = kept.item()
    kept += float(x.sum())
    return before


def of_holder(kept, x):
    before, kept.seen = kept.seen, float(x.sum())
    return before


@pytest.mark.parametrize(
    "make, write", [(lambda: np.zeros(1), of_array), (Holder, of_holder)]
)
def test_objects_that_share_memory(make, write):
    """What one sample writes to no other reads."""
    shared = []

    def batch():
        shared[:] = [make()]
        return (torch.randn(5, 4).double(),)

    def take(given, i):
        return given[0][i : i + 1], make() if alone else shared[0]

    w, (x,), alone = weight(4, 4), batch(), False
    loss = lambda s: (s[0] @ w).sum() * (1 + write(s[1], s[0]))  # noqa: E731
    found = clipped_grads(loss, {"w": w}, (x,), C, take=take)
    expected = [torch.autograd.grad((a @ w).sum(), w)[0].norm() for a in x]
    torch.testing.assert_close(found.norms, torch.stack(expected))


def test_a_sample_is_no_view_of_the_batch():
    x, w = torch.randn(5, 4).double(), weight(4, 4)
    x[4] *= 100

    def loss(s):
        with contextlib.suppress(RuntimeError):  # out of bounds
            return (s @ w).sum() * (1 + s.as_strided((5, 4), (4, 1), 0).max().item())
        return (s @ w).sum()

    one = clipped_grads(loss, {"w": w}, x, C).norms
    two = clipped_grads(loss, {"w": w}, x[:4].clone(), C).norms
    torch.testing.assert_close(one[:4], two)


def test_memory_is_copied_only_where_samples_share_it():
    """Next tokens, parts of one tensor, time first and a mask of each sample."""
    ids, mask = torch.arange(24).view(4, 6), torch.ones(4, 1).expand(4, 5)
    groups = (ids[:, :-1], ids[:, 1:]), ids.split(3, 1), (ids, ids), (mask,)
    for tensors, dim in (*((group, 0) for group in groups), ([ids], 1)):
        copies = set_apart(tensors, [dim] * len(tensors))
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(tensors, copies))


# -- samples that are taken ------------------------------------------------------------


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
@pytest.mark.parametrize("kind", [list, torch.stack, collections.UserList, dict])
def test_a_sample_that_fails_ends_no_batch(take, kind):
    w, rows, of = weight(4, 4), list(torch.randn(6, 4).double()), take
    if kind is not torch.stack and take is without_rows:
        pytest.skip("an item of a list has no rows to leave out")
    batch = {"x": rows, "y": rows} if kind is dict else kind(rows)
    if kind is dict:
        take = lambda batch, i: of(batch["x"], i)  # noqa: E731
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


# -- values that seem equal ------------------------------------------------------------


class Equal:
    """What calls itself equal to anything."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


@dataclasses.dataclass(eq=False)
class Alike(Equal):
    """Objects that print alike, too."""

    k: int

    def __repr__(self):
        return "Alike()"


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
    x = torch.randn(5, 4).double()
    check(
        lambda s, w: (s[0] @ w).sum() * number_of(s[1]),
        lambda: (x, ALIKE[name]),
        lambda batch, i: (batch[0][i : i + 1], batch[1][i]),
    )


class Level(Equal, enum.Enum):
    LOW, HIGH = 1, 2


class Node:
    """A node of a tree, which prints as others do."""

    def __init__(self, x, k):
        self.x, self.k = x, k


pytree.register_pytree_node(
    Node, lambda n: ((n.x,), Alike(n.k)), lambda xs, about: Node(xs[0], about.k)
)
KINDS = [collections.namedtuple("Kind", "x", defaults=[i]) for i in range(2)]
#: Trees of a tensor and a number, and the number that they hold.
TREES = {
    "keys": (lambda x, k: {Alike(k): x}, lambda tree: next(iter(tree)).k),
    "named tuples": (
        lambda x, k: KINDS[k](x),
        lambda tree: isinstance(tree, KINDS[1]),
    ),
    "nodes": (Node, lambda tree: tree.k),
    "members": (lambda x, k: (x, Level(k + 1)), lambda tree: tree[1].value),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_that_print_alike(name):
    make, number = TREES[name]

    def loss(s, w):
        (x,) = (x for x in pytree.tree_leaves(s) if isinstance(x, torch.Tensor))
        return (x @ w).sum() * (1 + number(s))

    x = torch.randn(5, 4).double()
    check(loss, lambda: (x,), lambda batch, i: make(batch[0][i : i + 1], i % 2))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize("values", [[0.0, -0.0, 1.0], [math.nan, 0.0, math.nan]])
def test_numbers_that_seem_equal(values, mode):
    """The sign of a zero is an answer."""

    def then(m, x):
        return m.fc(x[:, :3]) * (20 + 19 * math.copysign(1, x[:, 3].item()))

    batch = torch.cat([torch.randn(3, 3), torch.tensor(values)[:, None]], 1).double()
    exact_in_mode(net(then, fc=(3, 3))().double(), batch, mode)


@pytest.mark.parametrize("value", [-0.0, 1])
def test_state_that_seems_equal(value):
    """A forward that sets an attribute by data, to what is equal to what was there."""

    def then(m, x):
        y = m.fc(x) * (2 + math.copysign(1, m.kept))
        m.kept = value if x.detach().sum() > 0 else m.kept
        return y

    make = net(then, fc=(4, 3), kept=abs(float(value)))
    ones = [torch.ones(3, 4).double()] * 2
    check_steps(Case(make, ones, refused="kept"))


# -- random numbers of a seed ----------------------------------------------------------


def masked(h, generator=None):
    return h * (torch.rand(h.shape, generator=generator, dtype=h.dtype) > 0.5) * 2


def seeds(m, h, drop=lambda h: F.dropout(h, 0.5)):
    torch.manual_seed(3)
    return drop(h)


def seeds_behind(m, h):
    y = F.dropout(h, 0.5)
    torch.manual_seed(3)
    return y


def in_a_fork(m, h, then=seeds):
    with torch.random.fork_rng(devices=[]):
        return then(m, h)


def made():
    return torch.Generator().manual_seed(3)


class Seeded(nn.Module):
    """A model with a generator, of which a copy has its own."""

    def __init__(self, then):
        super().__init__()
        self.then, self.one, self.two = then, nn.Linear(4, 4), nn.Linear(4, 2)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return self.two(self.then(self, self.one(x)))

    def __deepcopy__(self, memo):
        new = Seeded(self.then).to(self.one.weight.dtype)
        new.load_state_dict(self.state_dict())
        return new


FIXED = {
    "seeds": seeds,
    "seeds in a fork": in_a_fork,
    "makes a generator": lambda m, h: masked(h, made()),
    "seeds its generator": lambda m, h: masked(h, m.generator.manual_seed(3)),
    "of a kernel": lambda m, h: seeds(
        m, h, lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5)
    ),
}
SEEDED = {
    **FIXED,
    "seeds behind": seeds_behind,
    "forks": lambda m, h: in_a_fork(m, h, lambda m, h: F.dropout(h, 0.5)),
    "holds a generator": lambda m, h: masked(h, m.generator),
}


@pytest.mark.parametrize("name", SEEDED)
def test_random_numbers_that_a_forward_seeds(name):
    """They were those of a place in the batch: a record less moved all behind it."""
    batch, model = 20 * torch.randn(9, 5, 4), Seeded(SEEDED[name])
    for mode in ("hooks", "ghost_bk", "scan"):
        sums = in_mode(model, batch, square_loss, mode)

        def call(some):
            torch.manual_seed(11)
            return sums(some)

        assert distance(call(batch), call(batch[1:])) < C + 1e-3


@pytest.mark.parametrize("name", FIXED)
def test_random_numbers_are_those_of_a_sample_alone(name):
    case = Case(lambda: Seeded(FIXED[name]), rows(3, 1, d=4))
    for mode in case.modes:
        check_steps(case, mode)


def test_a_seed_that_is_there_already():
    """Set behind the draws of a sample, it told those of the next in any batch."""
    masks = []

    def draws(m, h):
        masks.append(F.dropout(torch.ones(64), 0.5))
        torch.manual_seed(3)
        return h

    for taken in (1, 2):
        call = in_mode(Seeded(draws), torch.randn(3, 5, 4), square_loss, "scan")
        torch.manual_seed(3)
        torch.rand(taken)  # the program is elsewhere in its stream
        call(torch.ones(3, 5, 4))
    first, second = masks[:3], masks[3:]
    assert not any(torch.equal(x, y) for x, y in zip(first, second))


def test_a_generator_whose_state_data_decide():
    """How often it was drawn from would be known to the next batch."""

    def draws_by_data(m, h):
        return masked(h, m.generator) if h.sum() > 0 else h

    private = make_private(Seeded(draws_by_data), "scan", batch_size=4)
    with pytest.raises(Refused, match="changes generator"):
        for batch in torch.randn(3, 4, 5, 4):
            private.step(batch, square_loss)


# -- sums that fail, and gradients that others see -------------------------------------


def out_of_memory(monkeypatch, owner, name):
    """The second call of a method fails."""
    stock, count = getattr(owner, name), itertools.count()

    def fails(*args):
        if next(count) == 1:
            raise torch.OutOfMemoryError("no memory")
        return stock(*args)

    monkeypatch.setattr(owner, name, fails)


@every_mode
def test_an_error_in_the_middle_of_a_sum(mode, monkeypatch):
    """Memory is out at the second parameter: nothing may be added on top of a part."""
    model, batch = nn.Linear(300, 300).double(), torch.randn(3, 300).double()
    expected = clipped_sum(oracle(model, batch, square_loss), "flat", C)
    private = make_private(copy.deepcopy(model), mode, batch_size=3, lr=0.0)
    params = dict(model.named_parameters())
    loss = lambda x: square_loss(model, x).sum()  # noqa: E731
    for call in (
        lambda: clipped_grads(loss, params, batch, C).sums,
        lambda: private.step(batch, square_loss)
        or {n: 3 * p.grad for n, p in zip(params, private.optimizer.params)},
    ):
        with monkeypatch.context() as patch:
            out_of_memory(patch, GradSample, "weighted_sum")
            with contextlib.suppress(torch.OutOfMemoryError):
                assert_same(call(), expected, 1e-8)
    out_of_memory(monkeypatch, DenseGrads, "_put")
    with pytest.raises(torch.OutOfMemoryError):
        opacus_ext.per_sample_grads(loss, params, batch)


def after_gradients(model, step):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


def of_several(model, step, mode="all"):
    given = list(model.parameters())
    torch.autograd.graph.register_multi_grad_hook(given, step, mode=mode)


def of_any(model, step):
    of_several(model, step, "any")


def plainly(model, x):
    return model(x).square().sum(1)


def by_function(model, x):
    return Opaque.apply(model(x)).square().sum(1)


def by_checkpoint(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum(1)


@pytest.mark.parametrize("run", [plainly, by_function, by_checkpoint])
@pytest.mark.parametrize("register", [after_gradients, of_several, of_any])
def test_an_optimizer_in_the_backward_pass(register, run):
    """Registered before, or by the loss."""
    for mode in (None, "by the loss", *EVERY_MODE[: -1 if run is by_checkpoint else 9]):
        if run is by_checkpoint and mode in EVERY_MODE:
            continue
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before, step = copy.deepcopy(model), lambda *args: optimizer.step()
        params, x = dict(model.named_parameters()), torch.randn(3, 4)
        if mode in EVERY_MODE:
            private = make_private(model, mode, batch_size=3, lr=0.0)
        if mode != "by the loss":
            register(model, step)
        with pytest.raises(Refused, match="hook"):
            if mode in EVERY_MODE:
                private.step(x, run)
            elif mode is None:
                clipped_grads(lambda x: run(model, x).sum(), params, x, C)
            else:
                clipped_grads(
                    lambda x: register(model, step) or by_function(model, x).sum(),
                    *(params, x, C),
                )
        assert_same(model.state_dict(), before.state_dict(), 0)


class Writes(torch.autograd.Function):
    """Writes to a parameter in the backward pass."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        write(ctx.p, grad)
        return grad, None


def write(parameter, x):
    with torch.no_grad():
        parameter.add_(x.sum())


def written_by_function(layer, x):
    return Writes.apply(layer(x), layer.weight.detach())


def written_by_hook(layer, x):
    y = layer(x)
    y.register_hook(lambda grad: write(layer.weight, grad))
    return y


def written_by_loss(layer, x):
    y = layer(x)
    write(layer.weight, x)
    return y


@pytest.mark.parametrize("run", [written_by_function, written_by_hook, written_by_loss])
@pytest.mark.parametrize("mode", [None, *EVERY_MODE])
def test_parameters_that_are_written_to(run, mode):
    """Here, or by autograd, or by the check of the forward pass."""
    model = net(lambda m, x: run(m.layer, x), layer=(4, 3))()
    said = "changed in the|modified by an inplace|its forward changes"
    with pytest.raises((Refused, RuntimeError), match=said):
        if mode is None:
            params, x = dict(model.named_parameters()), torch.randn(3, 4)
            clipped_grads(lambda x: square_loss(model, x).sum(), params, x, C)
        private = make_private(model, mode, batch_size=3, lr=0.0)
        private.step(torch.randn(3, 4), square_loss)
    assert mode is None or not private.engine.accountant.history


# -- losses without a graph, and what is no loss ---------------------------------------


def no_grad(model, x):
    with torch.no_grad():
        return model(x).sum()


def inference(model, x):
    with torch.inference_mode():
        return model(x).sum()


def of_another(model, x):
    return (nn.Linear(4, 3).weight * 2 @ x.mT).sum()


@pytest.mark.parametrize(
    "loss",
    [
        *(no_grad, inference, of_another),
        lambda model, x: (model(x) > 0).sum(),
        lambda model, x: model(x).detach().sum(),
        lambda model, x: copy.deepcopy(model)(x).sum(),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_losses_without_a_graph(loss, size):
    """No parameter is reached by any sample: torch refuses that, too."""
    model, batch = nn.Linear(4, 3), torch.randn(size, 4)
    given = (lambda x: loss(model, x)), dict(model.named_parameters()), batch
    for call in (opacus_ext.per_sample_grads, lambda *args: clipped_grads(*args, C)):
        with pytest.raises(Refused, match="depends on a parameter"):
            call(*given)
    for mode in EVERY_MODE if loss is not of_another else ():
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


def test_mappings_that_are_no_dicts():
    """A sample is a mapping of the same kind."""
    w, x = weight(4, 4), torch.randn(3, 4).double()
    batch = BatchEncoding({"x": x, "k": torch.tensor([1, 2, 3])})
    found = clipped_grads(lambda s: (s.x @ w).sum() * s["k"], {"w": w}, batch, C)
    expected = 2 * x.norm(dim=1) * torch.tensor([1, 2, 3])  # [1, 4]: all columns alike
    torch.testing.assert_close(found.norms, expected)


def test_compiled_calls_that_eager_ones_allow():
    model = nn.Linear(4, 3)

    def step(x, **kwargs):
        loss, params = lambda x: model(x).square().sum(), {}
        params.update(model.named_parameters())
        return clipped_grads(loss, params, x, C, **kwargs)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    found = compiled(torch.randn(0, 4))
    assert found.norms.shape == (0,) and not any(g.any() for g in found.sums.values())
    with pytest.raises(Exception, match="on_nonfinite"):
        compiled(torch.randn(2, 4), on_nonfinite="raise")
