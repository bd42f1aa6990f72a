"""Attacks by what one record can do, a table for each kind.

What one record more or less moves in a sum without noise is at most the bound. Each
case moved it by more, silently, before it was mended.
"""

import copy
from typing import Any, Callable, NamedTuple

import pytest
import torch
from torch import nn

from opacus_ext import clipped_grads
from tests.adapter.common import EVERY_MODE
from tests.common import make_private, net, norms_of, oracle, trainable

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


def in_mode(model, batch, loss_fn, mode):
    """A function of a batch: the clipped sums of one step of a mode."""

    def call(some):
        fresh = copy.deepcopy(model)
        private = make_private(fresh, mode, batch_size=len(batch), max_grad_norm=C)
        private.step(some, loss_fn)
        return {n: p.grad * len(batch) for n, p in trainable(fresh).items()}

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
    "linear": (difference, lambda: nn.Linear(256, 256, bias=False), pairs(256)),
    "images": (siamese, lambda: nn.Linear(256, 64), 300 + torch.randn(3, 2, 256)),
    "two layers": (
        difference,
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 16)),
        pairs(8),
    ),
    "rows": (alternating, lambda: nn.Linear(64, 64), pairs(1, 64).repeat(1, 4, 1, 1)),
    "convolution": (difference, lambda: nn.Conv1d(8, 8, 3), pairs(8, 9)),
    "recurrent": (
        recurrent,
        lambda: nn.GRU(8, 16, batch_first=True),
        pairs(5, 8, size=1.0, gap=1e-4),
    ),
    "tied": (tied, lambda: nn.Embedding(4, 8), 1 + 1e-3 * torch.randn(3, 4, 8)),
    "looked up": (looked_up, lambda: nn.Embedding(5000, 8), opposite(64, 8)),
    "huge": (
        lambda m, x: m.layer(x).sum(1),
        lambda: nn.Linear(4, 3),
        torch.tensor([[1e25], [1.0], [2.0]]).expand(3, 4),
    ),
}


def output(model, batch):
    return model(batch)


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("name", CANCELING)
def test_norms_of_terms_that_cancel(name, mode):
    then, layer, batch = CANCELING[name]
    model = net(then, layer=layer)()
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


@pytest.mark.parametrize("backend", ["eager", "inductor"])
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
