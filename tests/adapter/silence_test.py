"""What was silently wrong before the third core: exact now, or refused by name.

Each case is a model, and batches that are fine or that look so at first. The oracle is
each sample alone through plain autograd.
"""

import copy
import itertools
import pickle
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import opacus_ext
from opacus_ext import Refused
from tests.adapter.common import EVERY_MODE, rows, steps
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    oracle,
    square_loss,
    squares,
)

D = 3
pytestmark = pytest.mark.filterwarnings("ignore")


class Case(NamedTuple):
    """
    Attributes:
        model: makes one
        batches: one each step, tuples of inputs
        refused: what the error says if it is not exact; None if it is
        loss: ``(model, batch)`` to losses ``[B]``
        batched: which inputs have a batch
        alone: a batch to batches of one, if these are not rows
        kwargs: of make_private
    """

    model: Callable[[], nn.Module]
    batches: Any
    refused: Optional[str] = None
    loss: Callable = lambda model, batch: squares(model(*batch))
    batched: Any = None
    alone: Optional[Callable] = None
    kwargs: dict = {}


def run(case, mode, wrap=True):
    torch.manual_seed(0)
    given = dict(loss_fn=case.loss, batched=case.batched, alone=case.alone)
    act = lambda: steps(  # noqa: E731
        case.model(), case.batches, mode, wrap, **given, **case.kwargs
    )
    if case.refused is None:
        act()
        return
    with pytest.raises(Refused, match=case.refused):
        act()


def every(cases):
    """Each case at once and one by one; the first in all modes, and not wrapped."""
    found = []
    for i, (name, case) in enumerate(cases.items()):
        for mode in ("ghost_bk", "scan") if i else EVERY_MODE:
            found.append(pytest.param(case, mode, True, id=f"{name}-{mode}"))
        if not i:
            found.append(pytest.param(case, "ghost_bk", False, id=f"{name}-nowrap"))
    return pytest.mark.parametrize("case, mode, wrap", found)


class Model(nn.Module):
    """``forward`` returns ``self.then(h, *inputs)``."""

    def __init__(self, then, width=2):
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, width)
        self.then = then
        self.scale, self.seen, self.kept = 1.0, np.zeros(D), []
        self.register_buffer("ema", torch.zeros(D))
        self.frozen = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.held, self.queue = Held(), iter(())
        self.hidden, self.many = [nn.BatchNorm1d(4, affine=False)], [0.0] * 50

    total = 0.0

    def forward(self, x, *rest):
        return self.then(self, self.one(x).tanh(), x, *rest)


def model(then, width=2):
    return lambda: Model(then, width)


X = [(x,) for x in rows(4, 3, 4, 1, 5)]
ONES = [(x,) for x in rows(1, 1, 1)]  # physical batches of one
SAME = [(x[:1].expand(4, -1, -1).clone(),) for x in rows(4)] + X  # equal at first


def of_first(m, batch):
    """The second output is a number, or some."""
    y, number = m(*batch)
    return squares(y) * float(np.asarray(number).sum())


def list_of(m, h, x):
    return m.two(h), [int(n) for n in (h > 0).sum((0, 1))]


LENGTHS = [
    (x, torch.tensor(n))
    for x, n in zip(rows(3, 3, 2, 1), ([2, 2, 2], [4, 2, 1], [3, 1], [3]))
]


def told(m, batch):
    y, longest = m(*batch)
    return squares(y) / longest


def trimmed(m, h, x, lengths):
    return m.two(h)[:, : int(lengths.max())]


LEAVE = {
    "longest length": Case(
        model(lambda m, h, x, n: (m.two(h), n.max())), LENGTHS, r"output\[1\]", told
    ),
    "number of it": Case(
        model(lambda m, h, x, n: (m.two(h), int(n.max()))),
        LENGTHS,
        r"output\[1\]",
        told,
    ),
    "mean": Case(
        model(lambda m, h, x: (m.two(h), h.mean().item())),
        SAME,
        r"output\[1\]",
        of_first,
    ),
    "loads in a list": Case(model(list_of), SAME, r"output\[1\]\[0\]", of_first),
    "array": Case(
        model(lambda m, h, x: (m.two(h), h.detach().mean((0, 1)).numpy())),
        SAME,
        r"output\[1\]",
        of_first,
    ),
    "as long as the longest": Case(model(trimmed), LENGTHS, "Model: output"),
    "flattened": Case(
        model(lambda m, h, x: m.two(h).flatten(0, 1)),
        X,
        r"output has shape \(4, 2\)",
        loss=lambda m, batch: squares(m(*batch)).view(len(batch[0]), -1).sum(1),
    ),
}


LEAVE["function"] = Case(
    model(lambda m, h, x: (m.two(h), lambda: h)),
    X,
    r"output\[1\]",
    lambda m, batch: squares(m(*batch)[1]()),
)


@every(LEAVE)
def test_a_numbers_that_leave_the_model(case, mode, wrap):
    run(case, mode, wrap)


# -- (b) state -------------------------------------------------------------------------


def carries_a_number(m, h, x):
    old, m.scale = m.scale, 0.9 * m.scale + float(h.detach().mean())
    return m.two(h * old)


def carries_an_array(m, h, x):
    old = torch.from_numpy(m.seen.copy())
    m.seen += h.detach().numpy().mean((0, 1))
    return m.two(h + old)


def carries_in_a_list(m, h, x):
    m.kept.append(h.detach().mean((0, 1)))
    return m.two(h + m.kept[max(0, len(m.kept) - 2)])


def carries_in_a_buffer(m, h, x):
    m.ema.data.mul_(0.9).add_(h.detach().mean((0, 1)))
    return m.two(h + m.ema)


def carries_in_an_attribute(m, h, x):
    old, m.old = getattr(m, "old", 0), h.detach().mean((0, 1))
    return m.two(h + old)


def carries_a_shape(m, h, x):
    m.scale += x[x > 0].shape[0]
    return m.two(h) * m.scale


def carries_in_a_list_that_was_replaced(m, h, x):
    m.scale += 1
    if m.scale == 3:
        m.kept = list(m.kept)  # equal, but another
    if m.scale > 3:
        m.kept.append(h.detach().mean((0, 1)))
    return m.two(h + (m.kept[0] if m.kept else 0))


class Held:
    """A plain object on a module."""

    def __init__(self):
        self.value = torch.zeros(D).double()
        self.lists = {"a": [[]]}


def carries_deep_in_an_object(m, h, x):
    m.held.lists["a"][0].append(h.detach().mean((0, 1)))
    return m.two(h + m.held.lists["a"][0][0])


def carries_in_an_object(m, h, x):
    m.held.value.data.add_(h.detach().mean((0, 1)))
    return m.two(h + m.held.value)


def carries_in_a_parameter(m, h, x):
    with torch.no_grad():
        m.frozen.fill_(float(h.mean()))
    return m.two(h + m.frozen)


def carries_in_data(m, h, x):
    m.frozen.data = m.frozen.data + h.detach().mean((0, 1))
    return m.two(h + m.frozen)


def carries_on_the_class(m, h, x):
    old, type(m).total = type(m).total, type(m).total + float(h.mean())
    return m.two(h + old)


def carries_in_an_iterator(m, h, x):
    old, m.queue = list(m.queue), iter([h.detach().mean((0, 1)).tolist()])
    return m.two(h + torch.tensor(old).sum(0))


def carries_in_a_hidden_module(m, h, x):
    return m.two(h + m.hidden[0].to(h)(h).detach())


def carries_in_a_long_list(m, h, x):
    old, m.many[7] = m.many[7], float(h.detach().mean())
    return m.two(h + old)


def centred_at_the_first(m, h, x):
    m.old = getattr(m, "old", h.detach().mean((0, 1)))
    return m.two(h - m.old)


def scaled_by_the_first(m, h, x):
    if m.scale == 1:
        m.scale = float(h.detach().std())
    return m.two(h / m.scale)


STATE = {
    f"{f.__name__} {size}": Case(model(f), batches, rf"Model.*changes {name}")
    for size, batches in (("of some", X), ("of one", ONES))
    for f, name in (
        (carries_a_number, "scale"),
        (carries_an_array, "seen"),
        (carries_in_a_list, "kept"),
        (carries_in_a_buffer, "ema"),
        (carries_in_an_attribute, "old"),
        (carries_a_shape, "scale"),
        (carries_in_an_object, "held"),
        (carries_in_a_list_that_was_replaced, "kept"),
        (carries_deep_in_an_object, "held"),
        (carries_in_a_parameter, "frozen"),
        (carries_in_data, "frozen"),
        (carries_on_the_class, "Model.total"),
        (carries_in_an_iterator, "queue"),
        (carries_in_a_hidden_module, "hidden"),
        (carries_in_a_long_list, "many"),
        (centred_at_the_first, "old"),
        (scaled_by_the_first, "scale"),
    )
}


@every(STATE)
def test_b_state_from_batch_to_batch(case, mode, wrap):
    run(case, mode, wrap)


def counts(m, h, x):
    m.scale += 1
    m.ema += 1
    m.longest = max(getattr(m, "longest", 0), x.shape[1])
    return m.two(h)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_b_what_no_data_makes_may_stay(mode):
    run(Case(model(counts), X), mode)


class Running(nn.Module):
    """A criterion with a running mean of its losses."""

    reduction = "mean"

    def __init__(self):
        super().__init__()
        self.mean = 1.0

    def forward(self, y, target):
        loss = (y - target).square().mean()
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        return loss / self.mean


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "scan", "auto"])
def test_b_criteria_with_state(mode, size):
    private = make_private(
        nn.Linear(D, 2).double(), mode, batch_size=4, criterion=Running()
    )
    with pytest.raises(Refused, match="criterion Running changes mean"):
        for x in (torch.randn(size, D).double() for _ in range(3)):
            private.optimizer.zero_grad()
            private.criterion(private.module(x), torch.ones(size, 2)).backward()
            private.optimizer.step()


# -- (c) which inputs are samples, and how many ----------------------------------------


def tables(*shape, sizes=(4, 3, 4, 2, 1)):
    """``x [B, 4, D]`` and two tables."""
    return [
        (x, torch.randn(*shape).double(), torch.randn(*shape).double())
        for x in rows(*sizes)
    ]


def rotates(m, h, x, cos, sin):
    return m.two(h * cos + h.roll(1, -1) * sin)


def attends(m, h, x, mask):
    scores = h @ h.mT
    if not bool(mask.all()):
        scores = scores.masked_fill(~mask, -1e9)
    return m.two(scores.softmax(-1) @ h)


def looks_up(m, h, x, one, two):
    return m.two(h @ one.mT @ two)


FULL, TRIL = torch.ones(4, 4).bool(), torch.ones(4, 4).tril().bool()
MASKS = [(x, mask) for x, mask in zip(rows(4, 4, 3, 4), (FULL, TRIL, TRIL, TRIL))]
BANK = torch.randn(4, D).double()
SEQUENCES = [list(x) for x in rows(4, 4, 3)]  # as many as they are long, at first


class Gated(Model):
    """Attends to rows that all samples share, behind a gate that is zero at first."""

    def __init__(self):
        super().__init__(None)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x, bank):
        h = self.one(x)
        found = (h @ bank.mT).softmax(-1) @ bank
        return self.two(h + self.gate * found)


def writes(m, h, x, bank):
    bank.mul_(0.9).add_(h.detach().mean((0, 1)))
    return m.two(h + bank.mean(0))


def masked(*shapes):
    """``x [B, T, D]`` and masks of shapes that change."""
    found = []
    for x, shape in zip((torch.randn(n, t, D).double() for n, t in shapes), shapes):
        n, t = shape
        mask = torch.rand(n, 1, t) < 0.7 if n != t else torch.ones(t, t).bool()
        found.append((x, mask.tril() if n == t else mask | (torch.arange(t) == 0)))
    return found


def one_masked(batch):
    x, mask = batch
    own = [mask[b : b + 1] if mask.dim() == 3 else mask for b in range(len(x))]
    return [(x[b : b + 1], own[b]) for b in range(len(x))]


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, 2)

    def forward(self, xs):
        xs = xs.values() if isinstance(xs, dict) else xs
        return torch.stack([self.fc(x).tanh().mean(0) for x in xs])


class Arguments(Sequences):
    def forward(self, *xs):
        return super().forward(xs)


def sequences(how, taken):
    wrap = dict(
        args=lambda xs: tuple(xs),
        list=lambda xs: (list(xs),),
        tuple=lambda xs: (tuple(xs),),
        dict=lambda xs: ({f"user{i}": x for i, x in enumerate(xs)},),
    )[how]
    return Case(
        Arguments if how == "args" else Sequences,
        [wrap(xs) for xs in SEQUENCES],
        None if taken else r": the \d items of input .*take.items",
        alone=lambda batch: [wrap([x]) for x in _items(batch, how)],
        kwargs=dict(take=opacus_ext.take.items) if taken else {},
    )


def _items(batch, how):
    xs = batch if how == "args" else batch[0]
    return xs.values() if how == "dict" else xs


class Hidden(nn.Module):
    """``forward(x, (h, c))`` with states ``[layers, B, D]``, which it returns."""

    def __init__(self, kind=nn.LSTM, batch_first=True):
        super().__init__()
        self.rnn = kind(D, D, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(D, 2)

    def forward(self, x, state):
        y, state = self.rnn(x, state)
        return self.head(y), state


def with_states(sizes, two=True, layers=2):
    def made(n):
        one = lambda: torch.randn(layers, n, D).double()  # noqa: E731
        return (one(), one()) if two else one()

    return [(x, made(len(x))) for x in rows(*sizes)]


def one_with_state(batch):
    x, state = batch
    cut = lambda s, b: s[:, b : b + 1]  # noqa: E731
    return [
        (
            x[b : b + 1],
            tuple(cut(s, b) for s in state) if type(state) is tuple else cut(state, b),
        )
        for b in range(len(x))
    ]


def state_loss(m, batch):
    y, state = m(*batch)
    state = state if isinstance(state, tuple) else (state,)
    assert y.shape[0] == state[0].shape[1] and y.is_contiguous()
    return squares(y) + sum(squares(s.transpose(0, 1)) for s in state)


INPUTS = {
    "[1, T, d]": Case(model(rotates), tables(1, 4, D), batched=[0]),
    "[T, d]": Case(model(rotates), tables(4, D), batched=[0]),
    "K rows": Case(model(looks_up), tables(3, D), batched=[0]),
    "K rows at first": Case(
        model(looks_up),
        tables(3, D, sizes=(3, 4, 3)),
        "items of input rest may be",
        batched=[0],
    ),
    "T = B": Case(model(attends), MASKS, batched=[0]),
    "masks [B, 1, T], then [T, T]": Case(
        model(attends), masked((4, 5), (3, 5), (2, 3), (4, 4)), alone=one_masked
    ),
    "behind a gate of zero": Case(
        Gated, [(x, BANK) for x in rows(4, 4)], "which of bank", batched=[0]
    ),
    "written to": Case(
        model(writes),
        [(x, BANK.clone()) for x in rows(3, 3)],
        "changes an input that all",
        batched=[0],
    ),
    "hidden states": Case(
        Hidden, with_states((4, 3, 2, 1)), loss=state_loss, alone=one_with_state
    ),
    "hidden states, B = 2 layers": Case(
        Hidden, with_states((2, 3, 2)), loss=state_loss, alone=one_with_state
    ),
    "one hidden state": Case(
        lambda: Hidden(nn.GRU),
        with_states((4, 3, 1), two=False),
        loss=state_loss,
        alone=one_with_state,
    ),
    **{
        f"{how} {'taken' if taken else 'of sequences'}": sequences(how, taken)
        for how in ("list", "tuple", "args", "dict")
        for taken in (False, True)
    },
}


@every(INPUTS)
def test_c_inputs(case, mode, wrap):
    run(case, mode, wrap)


class Opaque(torch.autograd.Function):
    """What vmap has no rule for."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def on_a_copy(m, batch):
    return squares(m(*(x.clone() for x in batch)))


def doubles(then):
    """Code that writes to its inputs, and what may follow in the forward."""

    class Doubles(Model):
        def forward(self, x):
            return then(self, self.one(x.mul_(2)).tanh())

    return lambda: Doubles(None)


def branches(m, h):
    return m.two(2 * h if h.sum() > 0 else h)


IN_PLACE = {
    "plain": Case(doubles(lambda m, h: m.two(h)), X, loss=on_a_copy),
    "branches": Case(doubles(branches), X, loss=on_a_copy),
    "no vmap": Case(doubles(lambda m, h: m.two(Opaque.apply(h))), X, loss=on_a_copy),
}


@every(IN_PLACE)
def test_c_inputs_that_are_written_to(case, mode, wrap):
    run(case, mode, wrap)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_b_weights_that_are_computed_once(mode):
    """What is tried beforehand, without gradients, is not what they are."""
    net = Model(plain)
    parametrizations.weight_norm(net.one)

    def cached(m, batch):
        with parametrize.cached():
            return squares(m(*batch))

    steps(net, X, mode, loss_fn=cached)


# -- (d) hooks -------------------------------------------------------------------------


def plain(m, h, x):
    return m.two(m.one(h))


def hooked(register):
    def make():
        found = Model(plain)
        register(found)
        return found

    return make


def scaled(module, args, output):
    return output / (1 + float(output.detach().abs().max()))


def twice(module, args, output):
    output.mul_(2)


def centred(module, args, output):
    return output - output.mean(0, keepdim=True).detach() / 2


class Drifts:
    """A hook with state."""

    mean = 0.0

    def __call__(self, module, args, output):
        old, self.mean = self.mean, float(output.detach().mean())
        return output + old

    def method(self, module, args, output):
        return self(module, args, output)


HOOKS = {
    "an object": Case(
        hooked(lambda m: m.two.register_forward_hook(Drifts())), X, "changes"
    ),
    "its method": Case(
        hooked(lambda m: m.two.register_forward_hook(Drifts().method)), X, "changes"
    ),
    "on the model": Case(hooked(lambda m: m.register_forward_hook(centred)), X),
    "reads numbers": Case(hooked(lambda m: m.two.register_forward_hook(scaled)), X),
    "reads, on the model": Case(hooked(lambda m: m.register_forward_hook(scaled)), X),
    "in place": Case(hooked(lambda m: m.two.register_forward_hook(twice)), X),
    "before": Case(
        hooked(lambda m: m.register_forward_pre_hook(lambda m, args: (args[0].cos(),))),
        X,
    ),
}


@every(HOOKS)
def test_d_hooks(case, mode, wrap):
    run(case, mode, wrap)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_d_backward_hooks_added_later(mode):
    private, (x,) = private_model(mode), rows(4)
    layer = next(m for m in private.module.modules() if type(m) is nn.Linear)
    layer.register_full_backward_hook(lambda m, given, found: None)
    with pytest.raises(Refused, match="Linear has a hook on its backward pass"):
        private.module(x)


class Clips(torch.autograd.Function):
    """Its backward pass is not linear, or each time another."""

    calls: Any = None

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1) * (next(Clips.calls) if Clips.calls else 1)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "scan", "auto"])
def test_d_backward_passes_that_are_not_linear(mode):
    """In "hooks" they see the gradient of the mean, as without privacy."""
    run(Case(model(lambda m, h, x: m.two(Clips.apply(h))), X), mode)


def test_d_backward_passes_that_differ(monkeypatch):
    """One gave the norms, the other the sum."""
    monkeypatch.setattr(Clips, "calls", itertools.count(1))
    case = Case(model(lambda m, h, x: m.two(Clips.apply(h))), X)
    run(case._replace(refused="gave other gradients"), "ghost")


# -- (e) views that overlap, and complex numbers ---------------------------------------


class Own(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.weight, self.of = nn.Parameter(torch.randn(6)), of
        self.fc = nn.Linear(D, 4)

    def forward(self, x):
        return self.of(self.weight, self.fc(x))


def in_fourier_space(w, h):
    spectrum = torch.fft.rfft(h)
    return torch.fft.irfft(spectrum * torch.complex(w[:3], w[3:]), n=4)


VIEWS = {
    "unfold": Case(lambda: Own(lambda w, h: h @ w.unfold(0, 4, 1).mT), X),
    "as_strided": Case(lambda: Own(lambda w, h: h @ w.as_strided((4, 3), (1, 1))), X),
    "complex": Case(lambda: Own(in_fourier_space), X),
}


@every(VIEWS)
def test_e_views_and_complex_numbers(case, mode, wrap):
    run(case, mode, wrap)


# -- (f) criteria ----------------------------------------------------------------------

V, T = 5, 4


def labels(size, ignored=True):
    y = torch.randint(V, (size, T))
    if ignored:
        y[:, 1:][torch.rand(size, T - 1) < 0.5] = -100
    return y


CRITERIA = {
    "ignored": (nn.CrossEntropyLoss, {}, labels),
    "class weights": (
        nn.CrossEntropyLoss,
        dict(weight=torch.linspace(0.1, 2, V).double()),
        labels,
    ),
    "smoothed": (
        nn.CrossEntropyLoss,
        dict(weight=torch.linspace(0.1, 2, V).double(), label_smoothing=0.2),
        labels,
    ),
    "negative log likelihood": (nn.NLLLoss, {}, labels),
}


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "scan", "auto"])
@pytest.mark.parametrize("name", CRITERIA)
def test_f_criteria(name, mode):
    kind, kwargs, targets = CRITERIA[name]
    torch.manual_seed(0)
    net = nn.Linear(D, V).double()
    private = make_private(
        net, mode, batch_size=4, max_grad_norm=0.2, criterion=kind(**kwargs)
    )

    def loss(m, batch):
        return kind(**kwargs)(m(batch[0]).transpose(1, 2), batch[1])[None]

    for x in rows(4, 3, 1, 4):
        batch = x, targets(len(x))
        expected = clipped_sum(oracle(net, batch, loss), "flat", 0.2)
        private.optimizer.zero_grad()
        y = private.module(x).transpose(1, 2)
        private.criterion(y, batch[1]).backward()
        private.optimizer.step()
        assert_same({n: 4 * p.grad for n, p in net.named_parameters()}, expected)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "scan"])
def test_f_ctc(mode):
    """Scores ``[T, B, V]``: its samples are in dim 1."""
    torch.manual_seed(0)
    net = nn.Linear(D, V).double()
    private = make_private(
        net, mode, batch_size=4, max_grad_norm=0.1, criterion=nn.CTCLoss()
    )

    def ctc(m, x, y, sizes, criterion):
        scores = m(x).log_softmax(-1).transpose(0, 1)
        return criterion(scores, y, torch.full((len(x),), 6), sizes)

    for x in rows(4, 2, 3, T=6):
        y, sizes = torch.randint(1, V, (len(x), 3)), torch.randint(1, 4, (len(x),))
        batch = x, y, sizes
        loss = lambda m, b: ctc(m, *b, nn.CTCLoss())[None]  # noqa: E731
        expected = clipped_sum(oracle(net, batch, loss), "flat", 0.1)
        private.optimizer.zero_grad()
        ctc(private.module, *batch, private.criterion).backward()
        private.optimizer.step()
        assert_same({n: 4 * p.grad for n, p in net.named_parameters()}, expected)


# -- (g) parameters --------------------------------------------------------------------


def comes_later(m, h, x):
    m.times = getattr(m, "times", 0) + 1
    if m.times > 2 and not hasattr(m, "late"):
        m.late = nn.Parameter(torch.ones(D).double())
    return m.two(h * getattr(m, "late", 1))


def comes_later_where_vmap_fails(m, h, x):
    return comes_later(m, Opaque.apply(h), x)


LATER = {
    "at once": Case(model(comes_later), X, "did not have at make_private|changes"),
    "one by one": Case(
        model(comes_later_where_vmap_fails), X, "did not have at make_private|changes"
    ),
}


@every(LATER)
def test_g_parameters_that_come_later(case, mode, wrap):
    run(case, mode, wrap)


def private_model(mode, net=None):
    return make_private((net or Model(plain)).double(), mode, batch_size=4)


def loss_of(private, *outputs):
    losses = sum(squares(y) for y in outputs)
    return losses.mean() if private.criterion is None else private.criterion(losses)


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("when", ["before the forward", "after it"])
def test_g_parameter_hooks_added_later(mode, when):
    private, (x, y) = private_model(mode), rows(4, 4)
    loss_of(private, private.module(x)).backward()
    private.optimizer.step()
    private.optimizer.zero_grad()
    weight = next(p for p in private.module.parameters() if p.requires_grad)
    with pytest.raises(Refused, match="one.weight has a hook"):
        if when == "before the forward":
            weight.register_hook(lambda g: 100 * g)
        output = private.module(y)
        if when == "after it":
            weight.register_hook(lambda g: 100 * g)
        loss_of(private, output).backward()


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("where", ["before", "after"])
def test_g_other_models(mode, where):
    """They would be trained on gradients that are not private."""
    private, (x,) = private_model(mode), rows(4)
    other = nn.Linear(D if where == "before" else 2, D).double()
    with pytest.raises(Refused, match="another model|are not private"):
        if where == "before":
            y = private.module(other(x))
        else:
            y = other(private.module(x))
        loss_of(private, y).backward()
        private.optimizer.step()


HEADS = {
    "made later": lambda: nn.Linear(2, 2),
    "copied": lambda: copy.deepcopy(HEAD),
    "unpickled": lambda: pickle.loads(pickle.dumps(HEAD)),
}
BACKWARD = {
    "loss": lambda loss: loss.backward(),
    "loss, graph kept": lambda loss: loss.backward(retain_graph=True),
    "autograd": lambda loss: torch.autograd.backward([loss.clone()]),
}
HEAD = nn.Linear(2, 2)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("backward", BACKWARD)
def test_g_heads(backward, head):
    """Behind the model, whichever way they came to be; frozen ones are fine."""
    before = None if head == "made later" else HEADS[head]()
    private, (x, y) = private_model("hooks"), rows(4, 4)
    if head == "made later":
        private.module(y).square().mean().backward()
        private.optimizer.zero_grad()
    behind = (before or HEADS[head]()).double()
    with pytest.raises(Refused, match="the loss is computed by another model"):
        BACKWARD[backward](behind(private.module(x)).square().mean())
    assert not hasattr(behind.weight, "grad_sample")
    behind.requires_grad_(False)
    BACKWARD[backward](behind(private.module(y)).square().mean())
    private.optimizer.step()


@pytest.mark.parametrize("where", ["before", "behind", "beside"])
def test_g_own_parameters_outside(where):
    private, (x,) = private_model("hooks"), rows(4)
    weight = next(p for p in private.module.parameters() if p.requires_grad)
    with pytest.raises(Refused, match="outside of the model's forward"):
        y = private.module(x * weight.mean() if where == "before" else x)
        y = y * weight.mean() if where == "behind" else y
        loss = y.square().mean()
        (loss + weight.sum() if where == "beside" else loss).backward()


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_g_two_backward_passes(mode):
    private, (x,) = private_model(mode), rows(4)
    y = private.module(x)
    with pytest.raises(Refused, match="second"):
        loss_of(private, y).backward()
        loss_of(private, y).backward()


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_g_backward_inside(mode, opaque):
    def learns(m, h, x):
        h = Opaque.apply(h) if opaque else h
        m.two(h.detach()).square().mean().backward()
        return m.two(h)

    private, (x,) = private_model(mode, Model(learns)), rows(4)
    with pytest.raises(Refused, match="backward.. within the forward"):
        private.module(x)


# -- (h) kernels whose samples are in another dim --------------------------------------


class Kernel(nn.Module):
    """Time first, as torch's own layers have it by default; or the batch as time."""

    def __init__(self, kind, turn):
        super().__init__()
        self.turn, self.head = turn, nn.Linear(4, 2)
        if kind == "attention":
            self.layer = nn.MultiheadAttention(D + 1, 2)
            self.first = nn.Linear(D, D + 1)
        else:
            self.layer, self.first = getattr(nn, kind)(D, 4), nn.Identity()

    def forward(self, x):
        x = self.first(x)
        x = x.transpose(0, 1) if self.turn else x
        args = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        y = self.head(self.layer(*args)[0])
        return y.transpose(0, 1) if self.turn else y


KERNELS = {
    f"{kind} {'turned' if turn else 'over the batch'}": Case(
        lambda kind=kind, turn=turn: Kernel(kind, turn), X
    )
    for kind in ("LSTM", "GRU", "RNN", "attention")
    for turn in (True, False)
}


@every(KERNELS)
def test_h_kernels_with_samples_in_another_dim(case, mode, wrap):
    run(case, mode, wrap)


# -- what divides --------------------------------------------------------------------


def test_a_number_of_samples_that_must_divide_is_no_shared_input():
    """Tried on a prime number of samples the right reading fails, and a wrong runs."""

    class Even(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x, y):
            if len(y) > 1:
                y.reshape(2, -1)
            x = self.layer(x)
            return (x[: len(y)] * y.sum(1, keepdim=True)).sum(1)

    private = make_private(Even(), "ghost_bk", batch_size=4)
    with pytest.raises(Refused, match="which of x .* are samples"):
        private.module(torch.randn(4, 3), torch.randn(4, 3))


def test_each_record_twice_is_refused_where_draws_differ_in_size():
    """Each is clipped by itself, so a record would count twice."""
    torch.manual_seed(0)
    given = dict(dataset=torch.randn(400, 3), poisson_sampling=True, batch_size=6)
    private = make_private(nn.Linear(3, 2), "ghost_bk", **given)

    def step(x):
        private.step(x, lambda model, x: model(x).square().sum(1))

    refused = 0
    for count, x in enumerate(private.loader, start=1):
        try:
            step(torch.cat([x, x]))
        except Refused:
            refused += 1
    assert refused > 0.6 * count
    for x in list(private.loader):  # all of an epoch at hand
        step(x)


def test_b_what_a_trial_leaves_for_good_is_refused():
    """Which input is a table is found by a trial; the array can't be put back."""

    def remembers(m, h, x, mask):
        m.seen[0] += float(x.mean()) if m.training else 0.0
        return attends(m, h, x, mask)

    case = Case(model(remembers), MASKS, "changes seen", batched=[0])
    run(case, "ghost_bk")
    net = Model(remembers).double()
    private = make_private(net, "ghost_bk", batch_size=4)
    for _ in range(2):  # not at the first call alone
        with pytest.raises(Refused, match="changes seen"):
            private.module(*MASKS[1])


class Clamps(nn.Module):
    """As Gemma 3n does in training."""

    def __init__(self, least=0.3):
        super().__init__()
        self.layer, self.least = nn.Linear(3, 3), least

    def forward(self, x):
        most = 0.3 if self.least == 0.3 or x.mean() > 0 else self.least
        self.layer.weight.data.clamp_(-most, most)
        return self.layer(x)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_parameter_that_is_clamped(mode):
    """By numbers that data do not decide it may be."""
    private = make_private(Clamps().double(), mode, batch_size=3, lr=0.1)
    for x in rows(3, 3, 3, 3, d=3):
        private.step(x, square_loss)
    private = make_private(Clamps(0.1).double(), mode, batch_size=3, lr=0.1)
    with pytest.raises(Refused, match="changes layer.weight"):
        for x in rows(3, 3, 3, 3, d=3):
            private.step(x, square_loss)


class Attends(nn.Module):
    """With peaked attention rows that repeat change nothing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, table):
        return self.layer((300 * x @ table.T).softmax(-1) @ table)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_table_that_would_run_as_samples(mode):
    private = make_private(Attends().double(), mode, batch_size=3)
    batch = rows(3, d=3)[0], torch.randn(3, 3, dtype=torch.double)
    with pytest.raises(Refused, match="which of table"):
        private.step(batch, lambda model, batch: squares(model(*batch)))
    shared = dict(shared=["table"], batched=[0], loss_fn=lambda m, b: squares(m(*b)))
    steps(Attends(), [batch], mode, **shared)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(3, 3) for _ in range(3))
        self.two.requires_grad_(False)

    def forward(self, x):
        h = checkpoint(self.two, self.one(x), use_reentrant=False)
        return self.three(h.tanh())


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_frozen_layer_is_checkpointed(mode):
    steps(Recomputed(), rows(3, 2, d=3), mode)
