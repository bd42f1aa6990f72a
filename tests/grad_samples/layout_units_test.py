"""The parts that find out which row belongs to which sample, each on its own.

tests/grad_samples/layout_test.py judges them together, through the engine.
"""

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opacus_ext.grad_sample.batchless import Source, Tripwire, Undecided, settled
from opacus_ext.grad_sample.graph import read, unclaimed
from opacus_ext.grad_sample.layout import (
    Evidence,
    Layout,
    arrange,
    candidates,
    code_weights,
    relation,
)

# -- layout.py -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, B, expected",
    [
        ((4, 8, 1, 5), 4, ("B", "kB", "1", "x")),
        ((4, 4), 4, ("B", "B")),
        ((2, 0), 4, ("x", "x")),
        ((1, 3), 1, ("B", "kB")),
        ((), 4, ()),
    ],
)
def test_relation(shape, B, expected):
    assert relation(shape, B) == expected


def plain(dim):
    return Layout(dim, "plain")


@pytest.mark.parametrize(
    "rows, B, expected",
    [
        ((4, 7), 4, [plain(0)]),
        ((7, 4), 4, [plain(1)]),
        ((4, 4), 4, [plain(0), plain(1)]),
        ((12,), 4, [Layout(0, "outer"), Layout(0, "inner")]),
        ((8, 4), 4, [plain(1), Layout(0, "outer"), Layout(0, "inner")]),
        ((3, 5), 4, []),
        ((), 4, []),
        ((7, 3), 1, [plain(-1)]),
        ((), 1, [plain(-1)]),
    ],
)
def test_candidates(rows, B, expected):
    assert candidates(rows, B) == expected


def owners(rows, layout, B):
    """The sample that each row belongs to, as defined: ``[*rows]``."""
    if layout.dim == -1:
        return torch.zeros(rows, dtype=torch.long)
    n = rows[layout.dim]
    position = torch.arange(n)
    owner = {
        "plain": position,
        "outer": position // (n // B),
        "inner": position % B,
    }[layout.kind]
    shape = [1] * len(rows)
    shape[layout.dim] = n
    return owner.view(shape).expand(rows)


LAID_OUT = [
    (rows, layout, B)
    for B in (1, 2, 3)
    for rows in [(B,), (6,), (B, 5), (5, B), (B, B), (6, B), (2, B, 4), (4, 5, 6)]
    for layout in candidates(rows, B)
]
every_layout = pytest.mark.parametrize("rows, layout, B", LAID_OUT)


@every_layout
@pytest.mark.parametrize("event", [(), (2,), (2, 3)])
def test_arrange_finds_the_sample_of_each_row(rows, layout, B, event):
    owner = owners(rows, layout, B).view(*rows, *[1] * len(event))
    found = arrange(owner.expand(*rows, *event), len(rows), layout, B)
    T = math.prod(rows) // B
    assert found.shape == (B, T, *event)
    assert (found == torch.arange(B).view(B, 1, *[1] * len(event))).all()


@every_layout
def test_arrange_keeps_every_row_once_and_whole(rows, layout, B):
    x = torch.arange(math.prod(rows) * 2).view(*rows, 2)
    found = arrange(x, len(rows), layout, B)
    assert torch.equal(found.flatten(0, 1).sort(0).values, x.view(-1, 2))


def test_arrange_copies_nothing_where_rows_are_in_order():
    x = torch.zeros(3, 4, 5)
    assert arrange(x, 2, plain(0), 3).data_ptr() == x.data_ptr()
    flat = x.flatten(0, 1)
    assert arrange(flat, 1, Layout(0, "outer"), 3).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("B", [1, 2, 15, 16, 17, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_code_weights_tell_samples_apart(B, dtype):
    codes = code_weights(B, dtype, torch.device("cpu"))
    assert torch.equal(codes[0], torch.ones(B, dtype=dtype))
    assert len(codes) <= 4
    table = torch.stack(codes, 1)
    assert table.dtype is dtype and table.shape[0] == B
    assert len(table.unique(dim=0)) == B
    mantissa, _ = torch.frexp(table.double())
    assert (mantissa == 0.5).all()  # powers of two: they scale without rounding


def evidence(rows, layout, B, dtype=torch.float64, row_gradients=None):
    """What the probes show of a layer whose output ``[*rows, 3]`` is laid out so."""
    codes = code_weights(B, torch.float64, torch.device("cpu"))
    owner = owners(rows, layout, B)
    if row_gradients is None:
        row_gradients = torch.randn(*rows, 3, dtype=dtype)
    found = Evidence("layer", torch.Size([*rows, 3]), len(rows))
    for code in codes:
        found.add(row_gradients * code[owner].to(dtype).unsqueeze(-1))
    return found, codes


@every_layout
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_evidence_finds_the_layout(rows, layout, B, dtype):
    found, codes = evidence(rows, layout, B, dtype)
    decided, _ = found.decide(codes)
    # Layouts can mean the same (a dim of 6 in 6 samples); the samples are what counts.
    assert torch.equal(owners(rows, decided, B), owners(rows, layout, B))


@pytest.mark.parametrize("B", [4, 300])
def test_evidence_is_sure_where_shapes_coincide(B):
    for layout in (plain(0), plain(1)):
        found, codes = evidence((B, B), layout, B)
        assert found.decide(codes) == (layout, True)


def test_rows_without_gradient_leave_it_undecided():
    zeros = torch.zeros(4, 4, 3)
    found, codes = evidence((4, 4), plain(0), 4, row_gradients=zeros)
    layout, sure = found.decide(codes)
    assert layout in candidates((4, 4), 4) and not sure
    # Only the diagonal tells nothing: there both layouts agree.
    found, codes = evidence(
        (4, 4), plain(0), 4, row_gradients=zeros + torch.eye(4)[..., None]
    )
    assert not found.decide(codes)[1]
    # One row off the diagonal does.
    zeros[1, 2] = 1.0
    found, codes = evidence((4, 4), plain(1), 4, row_gradients=zeros)
    assert found.decide(codes) == (plain(1), True)
    # And with one candidate there is nothing to find out.
    found, codes = evidence(
        (4, 7), plain(0), 4, row_gradients=torch.zeros(4, 7, 3, dtype=torch.float64)
    )
    assert found.decide(codes) == (plain(0), True)


@pytest.mark.parametrize(
    "shape, expected",
    [((4, 7, 3), (plain(0), True)), ((4, 4, 3), (None, False))],
)
def test_a_layer_no_gradient_reaches(shape, expected):
    codes = code_weights(4, torch.float64, torch.device("cpu"))
    assert Evidence("layer", torch.Size(shape), 2).decide(codes) == expected


@pytest.mark.parametrize("rows", [(4, 5), (4, 4), (8,), (5, 3)])
def test_rows_of_no_layout_are_an_error_that_names_the_layer(rows):
    """Each row's gradient comes from several samples (BatchNorm), or in no order."""
    codes = code_weights(4, torch.float64, torch.device("cpu"))
    mixed, shuffled = (Evidence(n, torch.Size([*rows, 3]), len(rows)) for n in "ab")
    owner = torch.randint(4, rows)
    gradients = torch.randn(*rows, 3, dtype=torch.float64)
    for code in codes:
        mixed.add(gradients * (code[owner] + 0.1 * code.sum())[..., None])
        shuffled.add(gradients * code[owner][..., None])
    with pytest.raises(ValueError, match=f"^a: .*{rows[0]}"):
        mixed.decide(codes)
    if len(rows) > 1:
        with pytest.raises(ValueError, match=f"^b: .*{rows[0]}"):
            shuffled.decide(codes)
    else:  # each row by itself says whose it is, for this step
        layout, unique = shuffled.decide(codes)
        assert not unique and layout.samples.tolist() == owner.tolist()


def test_a_small_share_of_another_sample_is_seen():
    codes = code_weights(4, torch.float64, torch.device("cpu"))
    found = Evidence("layer", torch.Size([4, 5, 3]), 2)
    gradients = torch.rand(4, 5, 3, dtype=torch.float64) + 0.5
    for code in codes:
        leak = 1e-6 * code.roll(1)[:, None, None]
        found.add(gradients * code[:, None, None] + leak)
    with pytest.raises(ValueError, match="depends on other samples"):
        found.decide(codes)


# -- graph.py ------------------------------------------------------------------------


def uses(*roots, stop=()):
    """Names of the ops that use each parameter, by shape."""
    return {tuple(p.shape): sorted(ops) for p, ops in read(roots, stop).uses.items()}


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(3, 3))


def test_uses_are_counted(weight):
    x = torch.randn(2, 3)
    assert uses((x @ weight).sum(), x.sum()) == {(3, 3): ["MmBackward0"]}
    twice = (x @ weight) @ weight
    assert uses(twice) == {(3, 3): ["MmBackward0"] * 2}
    assert uses(weight * weight) == {(3, 3): ["MulBackward0"] * 2}
    assert uses(twice, twice.sum()) == {(3, 3): ["MmBackward0"] * 2}  # seen once


def test_tied_weight():
    embedding = nn.Embedding(5, 3)
    logits = F.linear(embedding(torch.tensor([[1, 2]])), embedding.weight)
    assert uses(logits) == {(5, 3): ["EmbeddingBackward0", "MmBackward0"]}


def test_frozen_weight_has_no_uses(weight):
    x = torch.randn(2, 3, requires_grad=True)
    assert weight not in read([F.linear(x, weight.detach())]).uses


@pytest.mark.parametrize(
    "hand_on",
    [
        lambda w: w.double(),
        lambda w: w.double().t(),
        lambda w: w.mT.unsqueeze(0).squeeze(),
        lambda w: w.view(9).view(3, 3).clone(),
        lambda w: w.expand(2, 3, 3).permute(0, 2, 1),
    ],
    ids=["cast", "cast, transposed", "mT", "view, clone", "expand"],
)
def test_what_hands_a_weight_on_is_no_use(weight, hand_on):
    """One cast or transpose serves several uses, as under autocast."""
    handed = hand_on(weight)
    x = torch.randn(2, 3, dtype=handed.dtype)
    y = torch.matmul(x, handed)
    assert len(uses(y.exp())[3, 3]) == 1
    assert len(uses(y + torch.matmul(x, handed))[3, 3]) == 2


def test_squeeze_of_a_dim_is_no_use(weight):
    handed = weight.unsqueeze(0).squeeze(0)
    x = torch.randn(2, 3)
    assert uses(x @ handed + x @ handed) == {(3, 3): ["MmBackward0"] * 2}


def test_weight_handed_on_to_the_root_is_used(weight):
    """Losses [B] can be an expanded parameter, and a class token is one."""
    assert weight in read([weight.expand(2, 3, 3)]).uses


def test_walk_ends_at_stop(weight):
    inner = torch.randn(2, 3) @ weight
    outer = inner.exp() @ weight
    assert uses(outer) == {(3, 3): ["MmBackward0"] * 2}
    assert uses(outer, stop=[inner.grad_fn]) == {(3, 3): ["MmBackward0"]}
    assert uses(inner, stop=[inner.grad_fn]) == {}


def test_structure_is_that_of_the_computation(weight):
    def structure(f, rows=2):
        return read([f(torch.randn(rows, 3) @ weight)]).structure

    assert structure(torch.exp) == structure(torch.exp, rows=5)
    assert structure(torch.exp) != structure(torch.sin)


def test_reentrant_checkpointing_is_seen(weight):
    def block(x):
        return x @ weight

    x = torch.randn(2, 3, requires_grad=True)
    hidden = read([checkpoint(block, x, use_reentrant=True)])
    assert hidden.reentrant and weight not in hidden.uses
    seen = read([checkpoint(block, x, use_reentrant=False)])
    assert not seen.reentrant and weight in seen.uses


def test_roots_without_graph():
    assert not read([torch.ones(2)]).uses


def test_unclaimed(weight):
    name = {id(weight): "head.weight"}
    x = torch.randn(2, 3)
    graph = read([F.linear(x, weight) + x @ weight])
    assert unclaimed(graph, Counter({id(weight): 2}), name) is None
    assert unclaimed(graph, Counter(), {}) is None  # not a parameter of the model
    problem = unclaimed(graph, Counter({id(weight): 1}), name)
    for part in ("head.weight", "(3, 3)", "has 2 use", "MmBackward0", "for 1"):
        assert part in problem


# -- batchless.py --------------------------------------------------------------------


class Position:
    """A table's output that saw no sample, and what became of it."""

    def __init__(self, shape, B):
        self.value = torch.randn(shape, requires_grad=True)
        self.recorded = []
        self.source = Source(self.value, self._record, B, "position")
        self.anchor = torch.zeros((), requires_grad=True)
        self.undecided = Undecided.of(self.source, self.anchor)

    def _record(self, output):
        self.recorded.append(output.clone())
        return self.recorded[-1]

    def gradient(self, y):
        (recorded,) = self.recorded
        return torch.autograd.grad(y.square().sum(), recorded)[0]


SHAPE_OPS = {
    "none": lambda p: p,
    "unsqueeze": lambda p: p.unsqueeze(0),
    "permute": lambda p: p.permute(1, 0).unsqueeze(0).transpose(-1, -2),
    "view": lambda p: p.view(-1).view(p.shape),
    "view by sizes": lambda p: p.reshape(p.size(0), *p.shape[1:]),
    "slices": lambda p: p[:, :3].contiguous(),
    "mT": lambda p: p.mT.mT,
    "scaled": lambda p: (2 * p + 1).tanh() / 3,
    "cast": lambda p: p.double().to(torch.float32),
    "masked": lambda p: p.masked_fill(torch.eye(3)[0].bool(), 0.0),
    "several": lambda p: (-p).flatten().unflatten(0, (4, 3))[None],
}
every_op = pytest.mark.parametrize("op", SHAPE_OPS.values(), ids=SHAPE_OPS)


@every_op
@pytest.mark.parametrize("B", [2, 3, 4])
def test_ops_are_noted_and_replayed(op, B):
    """B = 3 and 4 are sizes of the value itself, here [T, d] = [4, 3]."""
    p = Position((4, 3), B)
    x = torch.randn(B, 4, 3)
    noted = op(p.undecided)
    assert isinstance(noted, Undecided) and not p.recorded
    assert noted.shape == op(p.value).shape

    y = noted + x
    assert type(y) is torch.Tensor
    assert torch.equal(y, op(p.value) + x)
    # Each sample has a gradient of its own, the one it has alone.
    assert p.recorded[0].shape == (B, 4, 3)
    got = p.gradient(y)
    for b in range(B):
        alone = (op(p.value) + x[b : b + 1]).square().sum()
        (expected,) = torch.autograd.grad(alone, p.value)
        torch.testing.assert_close(got[b], expected)


BATCHLESS = {
    "x + p": lambda x, p: x + p,
    "p + x": lambda x, p: p + x,
    "p - x": lambda x, p: p - x,
    "x * p": lambda x, p: x * p,
    "x / p": lambda x, p: x / p.exp(),
    "torch.add": lambda x, p: torch.add(x, p),
    "where": lambda x, p: torch.where(x > 0, x, p),
    "x += p": lambda x, p: x.clone().add_(p),
    "expand": lambda x, p: x + p.expand(x.shape),
    "expand_as": lambda x, p: x + p.expand_as(x),
    "repeat": lambda x, p: torch.cat([x, p.unsqueeze(0).repeat(len(x), 1, 1)], 1),
    "broadcast_to": lambda x, p: x + torch.broadcast_to(p, x.shape),
}


@pytest.mark.parametrize("meet", BATCHLESS.values(), ids=BATCHLESS)
@pytest.mark.parametrize("B", [2, 4])
def test_broadcasting_decides_for_no_batch(meet, B):
    """[T, d] meets [B, T, d]: it lacks the batch, also at T = B."""
    p, x = Position((4, 3), B), torch.randn(B, 4, 3)
    y = meet(x, p.undecided)
    assert type(y) is torch.Tensor and p.source.batched is False
    torch.testing.assert_close(y, meet(x, p.value * 1))
    got = p.gradient(y)
    for b in range(B):
        alone = meet(x[b : b + 1], p.value * 1).square().sum()
        (expected,) = torch.autograd.grad(alone, p.value)
        torch.testing.assert_close(got[b], expected)


@pytest.mark.parametrize("shape, B", [((4, 3), 4), ((4, 5, 3), 4), ((8, 3), 4)])
def test_broadcasting_decides_for_a_batch(shape, B):
    """The value has all dims of what it meets, and one of them holds the samples."""
    p, x = Position(shape, B), torch.randn(shape, requires_grad=True)
    y = p.undecided + x
    assert p.source.batched is True
    assert p.recorded[0].shape == shape
    assert torch.equal(y, p.value + x)


def test_constant_of_the_same_shape_decides_nothing():
    p = Position((8, 3), 4)
    y = p.undecided + torch.ones(8, 3)
    assert p.source.batched is None
    y = y + torch.randn(4, 8, 3, requires_grad=True)
    assert p.source.batched is False


def test_what_was_clear_once_is_remembered():
    remembered = {}
    for B in (5, 4):  # 4 divides 8
        p = Position((8, 3), B)
        p.source.remembered = remembered
        settled(p.undecided)
        assert p.source.batched is False


def test_leading_one_is_no_batch():
    p, x = Position((1, 4, 3), 4), torch.randn(4, 4, 3)
    assert torch.equal(x + p.undecided, x + p.value)
    assert p.recorded[0].shape == (4, 1, 4, 3)


def test_used_twice_is_recorded_once():
    p, x = Position((4, 3), 2), torch.randn(2, 4, 3)
    y = (x + p.undecided) * (2 * p.undecided)
    torch.testing.assert_close(y, (x + p.value) * (2 * p.value))
    assert len(p.recorded) == 1


def test_a_decision_stays():
    """Once it lacks the batch, what has its own shape lacks it too."""
    p, x, constant = Position((4, 3), 4), torch.randn(4, 4, 3), torch.randn(4, 3)
    torch.testing.assert_close(x + p.undecided, x + p.value)
    torch.testing.assert_close(x + (p.undecided + constant), x + (p.value + constant))
    assert len(p.recorded) == 1
    with pytest.raises(RuntimeError, match="position: .*both as a batch of 4"):
        p.source.recorded(True)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.add_(1),
        lambda p: p.masked_fill_(torch.eye(4, 3).bool(), 0.0),
        lambda p: p.__setitem__(0, 0.0),
        lambda p: F.relu(p, inplace=True),
    ],
    ids=["add_", "masked_fill_", "setitem", "relu"],
)
def test_changes_in_place(change):
    """They decide it, and are seen by what comes after."""
    p, x = Position((4, 3), 3), torch.randn(3, 4, 3)
    plain = p.value.detach().clone()
    change(p.undecided)
    change(plain)
    assert type(settled(p.undecided)) is torch.Tensor
    y = x + p.undecided
    assert torch.equal(y, x + plain)


def test_without_grad_nothing_is_recorded():
    p, x = Position((4, 3), 2), torch.randn(2, 4, 3)
    with torch.no_grad():
        assert torch.equal(x + p.undecided, x + p.value)
    assert not p.recorded and p.source.batched is None
    x + p.undecided
    assert p.source.batched is False


def test_detached_value_is_an_ordinary_tensor():
    p = Position((4, 3), 2)
    assert type(p.undecided.detach()) is torch.Tensor
    assert type(settled(p.undecided)) is torch.Tensor
    x = torch.ones(2)
    assert settled(x) is x


class Double(torch.autograd.Function):
    """A custom autograd function whose ops the bookkeeping does not see."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x.detach()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_tripwire_is_found():
    p, x = Position((4, 3), 2), torch.randn(2, 4, 3)
    escaped = x + Double.apply(p.undecided)
    assert read([escaped]).undecided == ["position"]
    p = Position((4, 3), 2)
    assert read([x + p.undecided]).undecided == []


class Reversed(torch.autograd.Function):
    """Its gradient is not that of its forward (gradient reversal, straight-through)."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_custom_gradient_is_kept_or_found():
    p, x = Position((4, 3), 2), torch.randn(2, 4, 3)
    y = x + Reversed.apply(p.undecided)
    if not read([y]).undecided:
        torch.testing.assert_close(p.gradient(y), -2 * y)


def test_tripwire_gives_no_gradient():
    anchor = torch.zeros((), requires_grad=True)
    Tripwire.apply(anchor, torch.ones(3), "position").sum().backward()
    assert anchor.grad is None
