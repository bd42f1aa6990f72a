"""Models written to mislead whoever infers which row belongs to which sample.

Each is trained for nine steps with fresh data, lengths, orders and batch sizes.
"""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opacus_ext import Refused
from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from tests.adapter.common import EVERY_MODE, Case, every, run
from tests.common import Net, make_private, net, square_loss, squares

D = 3
SIZES = [4, 4, 1, 5, 3, 4, 1, 2, 4]
MODES = ("hooks", "ghost", "ghost_bk", "scan")
every_mode = pytest.mark.parametrize("mode", EVERY_MODE)
pytestmark = pytest.mark.filterwarnings("ignore:.*one sample after the other")


def rows(sizes=SIZES, lengths=(5, 4, 3, 4, 1, 2, 5, 2, 4), d=D):
    """Batches ``[B, T, d]``, T = B among them."""
    torch.manual_seed(1)
    return [torch.randn(b, t, d).double() for b, t in zip(sizes, lengths)]


def with_lengths(sizes=SIZES):
    """``(x [B, T, d], mask [B, T])``; the first batch has one length."""
    found = []
    for step, x in enumerate(rows(sizes, (4,) * 9)):
        lengths = torch.randint(1, 5, (len(x),)) if step else torch.full((len(x),), 4)
        found.append((x, torch.arange(4) < lengths[:, None]))
    return found


X, MASKED = rows(), with_lengths()

# -- forwards --------------------------------------------------------------------------


def split(m, x, mask):
    """The real tokens of all samples in one row, and taken apart by their lengths."""
    parts = m.one(x[mask]).tanh().split(mask.sum(1).tolist())
    return torch.stack([m.two(part).sum(0) for part in parts])


def restacked(m, x):
    """Unbound along the batch, and stacked in another order."""
    backwards = list(m.one(x).unbind(0))[::-1]
    h = m.two(torch.stack(backwards, 1).tanh())  # [T, B, 2]
    return torch.stack(list(h.unbind(1))[::-1])


def in_order(m, x, mask):
    """Sorted by length, packed, encoded and put back."""
    order = mask.sum(1).argsort(descending=True)
    h = m.one(x[order]).tanh() * mask[order][..., None]
    return m.two(h.sum(1))[order.argsort()]


def queries(m, x):
    """Learned queries without a batch, as many as there may be samples."""
    q = m.queries.unsqueeze(1).expand(-1, len(x), -1)  # [4, B, d]
    k = m.one(x).transpose(0, 1)
    scores = torch.einsum("qbd,tbd->bqt", q, k).softmax(-1)
    return torch.einsum("bqt,tbd->bqd", scores, k)


def rotary(m, x):
    """A table of angles that grows with the longest input so far."""
    if len(m.table) < x.shape[1]:
        places = torch.arange(x.shape[1]).to(x)[:, None]
        m.register_buffer("table", places.cos(), persistent=False)
    return m.one(x).tanh() * m.table[: x.shape[1]]


def branches(m, x, mask):
    """Another layer for each sample, as its data say; and a float mask."""
    weight = mask.to(x)
    h = (x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
    layers = m.one, m.other
    return torch.cat([layers[int(r.sum() > 0)](r[None]) for r in h])


def flips(m, x):
    """Samples that take two branches, in which the same is computed."""
    return torch.tanh(m.one(x) if x.sum() > 0 else m.one(x.flip(0)).flip(0))


def alike(m, x):
    """Layers of one shape, small enough to be taken together; one is used twice."""
    h = x + m.table(torch.arange(x.shape[1]))
    for layer, norm in zip(m.layers, m.norms):
        h = norm(layer(h)).tanh() * m.scale

    def block(y):
        return m.layers[1](y * h.sigmoid()) @ m.late.exp()

    return checkpoint(block, h, use_reentrant=False)


def leaf(m, x):
    """Adds a leaf that it makes."""
    made = torch.zeros(D, dtype=x.dtype, requires_grad=True)
    return m.two(torch.tanh(m.one(x) + made))


def frozen_block(m, x):
    """Recomputed as well."""
    return m.two(checkpoint(m.one, x, use_reentrant=True))


def slices(m, x):
    """A weight as a whole and two slices of it, from its start and its middle."""
    n = len(m.weight)
    middle = F.linear(x, m.weight[n // 3 : n // 2])
    start = F.linear(torch.tanh(x), m.weight[: n // 3])
    return torch.cat([middle, start.pow(3), F.linear(x, m.weight)], dim=-1).mean(1)


def bag(m, lengths, ids):
    """``lengths [B]``, ``ids [N]`` of all samples."""
    parts = m.words(ids).tanh().split(lengths.tolist())
    return m.two(torch.stack([part.mean(0) for part in parts]))


def drops_later(m, x):
    """A branch that drops samples at some later steps, by shape."""
    keep = (x[:, :1, :1] > 0).to(x) if x.shape[1] < 3 else 1.0
    return x + m.scale * m.one(x) * keep


class WithTable(Net):
    def __init__(self, then, **parts):
        super().__init__(then, **parts)
        self.register_buffer("table", torch.zeros(0, 1), persistent=False)


def two(then, **parts):
    return net(then, one=(D, D), two=(D, 2), **parts)


def small():
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))


def frozen():
    made = two(frozen_block)()
    made.one.requires_grad_(False)
    return made


ALIKE = net(
    alike,
    table=lambda: nn.Embedding(7, D),
    scale=lambda: torch.ones(D),
    layers=lambda: nn.ModuleList(nn.Linear(D, D) for _ in range(4)),
    norms=lambda: nn.ModuleList(nn.LayerNorm(D) for _ in range(4)),
    late=lambda: torch.randn(D, D),
)
MODELS = {
    "split": Case(two(split), MASKED),
    "restacked": Case(two(restacked), X),
    "sorted": Case(two(in_order), MASKED),
    "queries": Case(net(queries, one=(D, D), queries=lambda: torch.randn(4, D)), X),
    "rotary": Case(
        lambda: WithTable(rotary, one=nn.Linear(D, D)), X, modes=("ghost_bk",)
    ),
    "branches": Case(net(branches, one=(D, 2), other=(D, 2)), MASKED),
    "drops later": Case(net(drops_later, one=(D, D), scale=lambda: torch.ones(D)), X),
    "layers alike": Case(ALIKE, X, modes=MODES),
    "leaf that the forward makes": Case(two(leaf), X, modes=MODES),
    "frozen block": Case(frozen, X, modes=MODES),
    "empty in between": Case(small, rows((4, 0, 4, 1, 0, 3)), modes=MODES),
}

# -- losses ----------------------------------------------------------------------------


def of_column(model, x):
    """``[B, 1]``, which must not become ``[B, B, 1]``."""
    out = model(x)
    assert out.shape == (len(x), 1)
    return F.mse_loss(out, x[:, 0, :1], reduction="none").mean(1)


def attacked(model, x):
    """FGSM: a gradient for the input between ``zero_grad`` and ``backward``."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(squares(model(x)).sum(), x)
    return squares(model((x + 0.1 * grad.sign()).detach()))


def two_passes(model, x):
    return squares(model(x)) + squares(model(x.flip(1)) * model(-x))


def both_signs(model, x):
    """Each sample takes one branch and the other."""
    return square_loss(model, x) + square_loss(model, -x)


LOSSES = {
    "attacked": Case(small, X, loss=attacked, modes=MODES[:3]),
    "two passes": Case(small, X[:5], loss=two_passes, modes=MODES),
    "a column": Case(net(lambda m, x: m.one(x.mean(1)), one=(D, 1)), X, loss=of_column),
    "time first": Case(
        net(lambda m, x: (m.one(x.transpose(0, 1)), x.shape[1]), one=(D, 2)),
        *(X, r"Net: output\[0\] has shape \(5, 1, 2\)"),
        loss=lambda model, x: squares(model(x)[0].transpose(0, 1)),
        modes=("ghost_bk",),
    ),
}

# -- gradients of one parameter in pieces ----------------------------------------------


def weight(*shape):
    return net(slices, weight=lambda: torch.randn(*shape) * 0.1)


SIGNS = torch.tensor([[1.0], [-1], [2], [-3]]).expand(4, 4).double()
PIECES = {
    "slices": Case(weight(12, 4), rows([4], [5], 4), modes=MODES[:3]),
    # Gradients of over 2**16 entries are squared as soon as they are complete.
    "large slices": Case(weight(300, 300), rows([4], [5], 300), modes=MODES[:3]),
    "branches": Case(net(flips, one=(4, 4)), [SIGNS], loss=both_signs, modes=MODES[:3]),
}

# -- ragged tokens ---------------------------------------------------------------------


def bags():
    torch.manual_seed(2)
    found = []
    for size in SIZES:
        lengths = torch.randint(1, 4, (size,))
        found.append((lengths, torch.randint(0, 7, (int(lengths.sum()),))))
    return found


def one_bag(inputs, i):
    lengths, ids = inputs
    if i >= len(lengths):
        raise IndexError
    begin = int(lengths[:i].sum())
    return lengths[i : i + 1], ids[begin : begin + int(lengths[i])]


BAG = net(bag, words=lambda: nn.Embedding(7, D), two=(D, 2))
RAGGED = {
    "taken apart": Case(
        BAG,
        bags(),
        alone=lambda batch: [one_bag(batch, i) for i in range(len(batch[0]))],
        kwargs=dict(take=one_bag),
    ),
}


def unless_all(m, x, mask):
    """A mask that is not used if it hides nothing; no two calls are equal."""
    y = m.one(x)
    if not bool(mask.all()):
        y = y * mask.unsqueeze(-1)
    return y + torch.randn_like(y)


ONES = {
    "a mask of ones": Case(
        net(unless_all, one=(D, 2)),
        [(x, torch.ones(4, 3)) for x in torch.randn(2, 4, 3, D).double()] + MASKED[1:],
        loss=lambda model, batch: model(*batch).flatten(1).sum(1),
    )
}


@every(model=MODELS, loss=LOSSES, pieces=PIECES, ragged=RAGGED, ones=ONES)
def test_steps(case, mode, wrap):
    run(case, mode, wrap)


def test_a_batch_of_none_with_take():
    """After one with samples: their shapes are known."""
    none = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    private = make_private(BAG().double(), "ghost_bk", batch_size=4, take=one_bag)
    with pytest.raises(Refused, match="Begin with a batch that is not empty"):
        private.step(none, square_loss)
    private.step(bags()[0], square_loss)
    private.step(none, square_loss)
    assert all(not p.grad.any() for p in private.optimizer.params)


def test_ragged_tokens_are_refused_without_help():
    private = make_private(BAG().double(), "ghost_bk", batch_size=4)
    with pytest.raises(Refused, match="take="):
        private.step(bags()[0], square_loss)


def test_generator_before_a_private_discriminator():
    """In "hooks" the gradient of the input is plain autograd's."""
    generator, model = nn.Linear(2, D).double(), small().double()
    z = torch.randn(4, 2).double()
    model(generator(z)).square().mean().backward()
    expected = [p.grad.clone() for p in generator.parameters()]
    generator.zero_grad()
    private = make_private(model, "hooks", batch_size=4)
    private.module(generator(z)).square().mean().backward()
    for p, grad in zip(generator.parameters(), expected):
        torch.testing.assert_close(p.grad, grad)
    private.optimizer.zero_grad()
    private.step(torch.randn(4, D).double(), square_loss)


@every_mode
def test_hooks_on_outputs(mode, capsys):
    """As users look at gradients."""
    private = make_private(nn.Linear(D, 2).double(), mode, batch_size=4)
    y = private.module(X[0])
    y.register_hook(print)
    losses = squares(y)
    (private.criterion(losses) if private.criterion else losses.mean()).backward()
    assert "tensor" in capsys.readouterr().out


@every_mode
def test_nothing_is_kept_from_step_to_step(mode):
    private = make_private(ALIKE().double(), mode, batch_size=4)
    gc.collect()
    gc.disable()  # what goes round through autograd Python never finds
    try:
        for _ in range(2):
            private.step(X[0], square_loss)
        private.optimizer.zero_grad()
        assert not any(isinstance(x, ForwardRecord) for x in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("kind, length", [(nn.Conv1d, 16), (nn.ConvTranspose1d, 24)])
def test_autocast_reaches_what_runs_by_sample(kind, length):
    model = nn.Sequential(kind(3, 4, 2), nn.Flatten(), nn.Linear(length, 2))
    private = make_private(model, "ghost_bk", batch_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        y = private.module(torch.randn(4, 3, 5))
        assert y.dtype == torch.bfloat16
    private.criterion(y.float().square().sum(1), None).backward()
