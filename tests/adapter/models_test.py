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
from tests.adapter.common import EVERY_MODE, steps
from tests.common import make_private, square_loss, squares

D = 3
SIZES = [4, 4, 1, 5, 3, 4, 1, 2, 4]
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


class Split(nn.Module):
    """The real tokens of all samples in one row, and taken apart by their lengths."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x, mask):
        h = self.first(x[mask]).tanh()
        parts = h.split(mask.sum(1).tolist())
        return torch.stack([self.last(part).sum(0) for part in parts])


class Restacked(nn.Module):
    """Unbound along the batch, and stacked in another order."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        backwards = list(self.first(x).unbind(0))[::-1]
        h = self.last(torch.stack(backwards, 1).tanh())  # [T, B, 2]
        return torch.stack(list(h.unbind(1))[::-1])


class Sorted(nn.Module):
    """Sorted by length, packed, encoded and put back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x, mask):
        lengths = mask.sum(1)
        order = lengths.argsort(descending=True)
        h = self.first(x[order]).tanh() * mask[order][..., None]
        return self.last(h.sum(1))[order.argsort()]


class LateDropPath(nn.Module):
    """The scale of a branch that begins to drop samples after some steps."""

    def __init__(self):
        super().__init__()
        self.scale, self.fc = nn.Parameter(torch.ones(D)), nn.Linear(D, D)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        keep = 1.0
        if self.calls > 3:  # by the data, so that one sample alone draws the same
            keep = (x[:, :1, :1] > 0).to(x)
        return x + self.scale * self.fc(x) * keep


class Column(nn.Module):
    """``[B, 1]``, which must not become ``[B, B, 1]``."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, 1)

    def forward(self, x):
        return self.fc(x.mean(1))


class TimeFirst(nn.Module):
    """Gives ``[T, B, d]``, beside a number of the batch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, 2)

    def forward(self, x):
        return self.fc(x.transpose(0, 1)).tanh(), torch.tensor(x.shape[1])


class Queries(nn.Module):
    """Learned queries without a batch, as many as there may be samples."""

    def __init__(self):
        super().__init__()
        self.queries, self.fc = nn.Parameter(torch.randn(4, D)), nn.Linear(D, D)

    def forward(self, x):
        q = self.queries.unsqueeze(1).expand(-1, len(x), -1)  # [4, B, d]
        k = self.fc(x).transpose(0, 1)
        scores = torch.einsum("qbd,tbd->bqt", q, k).softmax(-1)
        return torch.einsum("bqt,tbd->bqd", scores, k)


class Rotary(nn.Module):
    """A table of angles that grows with the longest input so far."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, D)
        self.register_buffer("table", torch.zeros(0, 1), persistent=False)

    def forward(self, x):
        if len(self.table) < x.shape[1]:
            places = torch.arange(x.shape[1]).to(x)[:, None]
            self.register_buffer("table", places.cos(), persistent=False)
        return self.fc(x).tanh() * self.table[: x.shape[1]]


class Penalised(nn.Module):
    """Beside the output, the slope of an inner network in its input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, 5), nn.Linear(5, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = self.two(self.one(x).tanh())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.cat([y, slope], -1)


class Branches(nn.Module):
    """Another layer for each sample, as its data say; and a float mask."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, 2) for _ in range(2))

    def forward(self, x, mask):
        weight = mask.to(x)
        h = (x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        if len(h) == 1:  # what one sample is asked alone
            return self.layers[int(h.sum() > 0)](h)
        return torch.cat([self.layers[int(r.sum() > 0)](r[None]) for r in h])


MODELS = {
    "split": (Split, with_lengths),
    "restacked": (Restacked, rows),
    "sorted": (Sorted, with_lengths),
    "column": (Column, rows),
    "queries": (Queries, rows),
    "rotary": (Rotary, rows),
    "branches": (Branches, with_lengths),
    "gradient inside the forward": (Penalised, rows),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_nine_steps(name):
    torch.manual_seed(0)
    build, batches = MODELS[name]
    steps(build(), batches())


@pytest.mark.parametrize("mode", ["hooks", "ghost", "scan"])
@pytest.mark.parametrize("name", ["split", "queries"])
def test_other_modes(mode, name):
    torch.manual_seed(0)
    build, batches = MODELS[name]
    steps(build(), batches()[:4], mode, wrap=False)


def test_time_first():
    """Its samples are not where those of its inputs are."""

    def loss(model, x):
        return squares(model(x)[0].transpose(0, 1))

    with pytest.raises(Refused, match=r"TimeFirst: output\[0\] has shape \(5, 1, 2\)"):
        steps(TimeFirst(), rows(), loss_fn=loss)


def test_column_keeps_its_shape():
    def loss(model, x):
        out = model(x)
        assert out.shape == (len(x), 1)
        targets = x[:, 0, :1]
        return F.mse_loss(out, targets, reduction="none").mean(1)

    steps(Column(), rows(), loss_fn=loss)


def test_float_masks():
    def loss(model, batch):
        x, mask = batch
        losses = model(x).square().mean(-1)
        return (losses * mask.double()).sum(1) / mask.sum(1)

    steps(nn.Linear(D, 2), with_lengths(), loss_fn=loss)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_inputs_attacked_before_the_step(mode):
    """FGSM: a gradient for the input between ``zero_grad`` and ``backward``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))

    def loss(model, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(squares(model(x)).sum(), x)
        return squares(model((x + 0.1 * grad.sign()).detach()))

    steps(model, rows(), mode, loss_fn=loss)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "scan"])
def test_two_forward_passes_before_one_backward(mode):
    torch.manual_seed(0)

    def loss(model, x):
        return squares(model(x)) + squares(model(x.flip(1)) * model(-x))

    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))
    steps(model, rows()[:5], mode, loss_fn=loss)


def test_generator_before_a_private_discriminator():
    """In "hooks" the gradient of the input is plain autograd's."""
    torch.manual_seed(0)
    generator = nn.Linear(2, D).double()
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()
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


class Keys(nn.Module):
    """Attends to rows that all samples share."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x, bank):
        return (self.fc(x) @ bank.T).softmax(-1) @ bank


def test_shared_input_of_as_many_rows_as_samples():
    bank = torch.randn(4, D).double()
    batches = [(x, bank) for x in rows()]
    steps(Keys(), batches, batched=[0], shared=["bank"])


class Bag(nn.Module):
    """``model(lengths [B], ids [N])``."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(7, D), nn.Linear(D, 2)

    def forward(self, lengths, ids):
        parts = self.words(ids).tanh().split(lengths.tolist())
        return self.last(torch.stack([part.mean(0) for part in parts]))


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


def test_ragged_tokens_taken_apart():
    def alone(batch):
        return [one_bag(batch, i) for i in range(len(batch[0]))]

    steps(Bag(), bags(), alone=alone, take=one_bag)


def test_a_batch_of_none_with_take():
    """After one with samples: their shapes are known."""

    def alone(batch):
        return [one_bag(batch, i) for i in range(len(batch[0]))]

    none = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    first, *rest = bags()[:3]
    private = make_private(Bag().double(), "ghost_bk", batch_size=4, take=one_bag)
    with pytest.raises(Refused, match="Begin with a batch that is not empty"):
        private.step(none, square_loss)
    private.step(first, square_loss)
    private.step(none, square_loss)
    assert all(not p.grad.any() for p in private.optimizer.params)
    steps(Bag(), [first, *rest], alone=alone, take=one_bag)


def test_ragged_tokens_are_refused_without_help():
    private = make_private(Bag().double(), "ghost_bk", batch_size=4)
    with pytest.raises(Refused, match="take="):
        private.step(bags()[0], square_loss)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_empty_batch_in_between(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))
    steps(model, rows((4, 0, 4, 1, 0, 3)), mode)


def test_drop_path_that_begins_later():
    """Nothing that is found out at the first step is taken for granted later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), LateDropPath()).double()
    private = make_private(model, "ghost_bk", batch_size=4)
    for x in rows((4,) * 9):
        before = model[1].calls
        clean = nn.Sequential(nn.Linear(D, D), LateDropPath()).double()
        clean.load_state_dict(model.state_dict())
        expected = []
        for one in x.split(1):
            clean[1].calls = before
            clean.zero_grad()
            squares(clean(one)).sum().backward()
            expected.append(torch.cat([p.grad.flatten() for p in clean.parameters()]))
        private.step(x, square_loss)
        assert model[1].calls == before + 1
        grads = torch.stack(expected)
        factors = (1 / (grads.norm(dim=1) + 1e-6)).clamp(max=1)
        got = torch.cat([p.grad.flatten() for p in model.parameters()]) * 4
        torch.testing.assert_close(got, factors @ grads, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_hooks_on_outputs(mode, capsys):
    """As users look at gradients."""
    private = make_private(nn.Linear(D, 2).double(), mode, batch_size=4)
    y = private.module(rows()[0])
    y.register_hook(print)
    losses = squares(y)
    (private.criterion(losses) if private.criterion else losses.mean()).backward()
    assert "tensor" in capsys.readouterr().out


class Alike(nn.Module):
    """Layers of one shape, small enough to be taken together; one is used twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, D)
        self.scale = nn.Parameter(torch.ones(D))
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.late = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        h = x + self.table(torch.arange(x.shape[1]))
        for layer, norm in zip(self.layers, self.norms):
            h = norm(layer(h)).tanh() * self.scale

        def block(y):
            return self.layers[1](y * h.sigmoid()) @ self.late.exp()

        return checkpoint(block, h, use_reentrant=False)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_nothing_is_kept_from_step_to_step(mode):
    private = make_private(Alike().double(), mode, batch_size=4)
    batch = (rows()[0],)
    gc.collect()
    gc.disable()  # what goes round through autograd Python never finds
    try:
        for _ in range(2):
            private.step(batch, square_loss)
        private.optimizer.zero_grad()
        assert not any(isinstance(x, ForwardRecord) for x in gc.get_objects())
    finally:
        gc.enable()


class Frozen(nn.Module):
    """Adds a leaf that it makes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        leaf = torch.zeros(D, dtype=x.dtype, requires_grad=True)
        return self.last(torch.tanh(self.first(x) + leaf))


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_autocast_reaches_what_runs_by_sample(kind):
    model = nn.Sequential(kind(3, 4, 2), nn.Flatten(), nn.Linear(16, 2))
    if kind is nn.ConvTranspose1d:
        model[2] = nn.Linear(24, 2)
    private = make_private(model, "ghost_bk", batch_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        y = private.module(torch.randn(4, 3, 5))
        assert y.dtype == torch.bfloat16
    private.criterion(y.float().square().sum(1), None).backward()


class FrozenCheckpoint(Frozen):
    """A block that is frozen and recomputed."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.last(checkpoint(self.first, x, use_reentrant=True))


class Numbers(nn.Module):
    """Parameters without dims: used as they are, and computed with."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.tensor(x)) for x in (0.5, -0.3))
        self.fc = nn.Linear(D, 2)

    def forward(self, x):
        return self.fc(x * self.last.exp() + self.first).tanh()


IN_EVERY_MODE = {
    "layers alike": Alike,
    "leaf that the forward makes": Frozen,
    "frozen block, reentrant checkpoint": FrozenCheckpoint,
    "parameters without dims": Numbers,
}


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "scan"])
@pytest.mark.parametrize("name", IN_EVERY_MODE)
def test_every_mode(mode, name):
    steps(IN_EVERY_MODE[name](), [(x,) for x in rows()], mode)


# -- gradients of one parameter in pieces ----------------------------------------------


class Slices(nn.Module):
    """A weight as a whole and two slices of it, from its start and its middle."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.1)

    def forward(self, x):
        rows = len(self.weight)
        middle = F.linear(x, self.weight[rows // 3 : rows // 2])
        start = F.linear(torch.tanh(x), self.weight[: rows // 3])
        whole = F.linear(x, self.weight)
        return torch.cat([middle, start.pow(3), whole], dim=-1).mean(1)


class Flips(nn.Module):
    """Samples that take two branches, in which the same is computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return torch.tanh(self.layer(x))
        return torch.tanh(self.layer(x.flip(0)).flip(0))


class Padded(nn.Module):
    """An embedding's function, with a padding index counted from the end."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3))

    def forward(self, ids):
        return F.embedding(ids, self.table, padding_idx=-1).pow(2).sum(1)


def twice(model, x):
    """Two forward passes, in which each sample takes one branch and the other."""
    return square_loss(model, x) + square_loss(model, -x)


SIGNS = torch.tensor([[1.0], [-1], [2], [-3]]).expand(4, 4)
PIECES = {
    "slices": (lambda: Slices(12, 4), torch.randn(4, 5, 4), square_loss),
    # Gradients of over 2**16 entries are squared as soon as they are complete.
    "large slices": (lambda: Slices(300, 300), torch.randn(4, 5, 300), square_loss),
    "branches": (Flips, SIGNS, twice),
    "padding": (Padded, torch.tensor([[0, 5, 2], [5, 5, 1]]), square_loss),
}


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("name", PIECES)
def test_pieces(mode, name):
    torch.manual_seed(1)
    build, batch, loss_fn = PIECES[name]
    batch = batch.double() if batch.is_floating_point() else batch
    steps(build(), [batch], mode, loss_fn=loss_fn)
