"""The zoo: models that mislead whoever infers what belongs to which sample.

A :class:`Case` is a model with the batches of some steps; ``check`` trains it in a mode
and compares every step with each sample alone through plain autograd.

Models take ``x [B, T, D]``, ids ``[B, T]``, or ``x`` and a mask ``[B, T]``.
"""

import contextlib
import copy
import re
import warnings
from typing import Any, Callable, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from opacus_ext import Refused, clipped_grads, per_sample_grads
from tests.common import (
    Net,
    assert_same,
    clipped_sum,
    half_clipped,
    make_private,
    net,
    norms_of,
    oracle,
    sample_of,
    square_loss,
    squares,
    trainable,
)

D, V = 4, 9
GHOSTS = ("ghost", "ghost_bk", "scan")
MODES = ("hooks", *GHOSTS)
EVERY_MODE = ("functorch", *MODES, "auto")
every_mode = pytest.mark.parametrize("mode", EVERY_MODE)
ghost_modes = pytest.mark.parametrize("mode", [*GHOSTS, "auto"])

# -- one check -------------------------------------------------------------------------


class Case(NamedTuple):
    """
    Attributes:
        model: makes one
        batches: one each step: a tensor, or a tuple or dict of inputs
        refused: what the error says if it is not exact; None if it is
        loss: ``(model, batch)`` to losses ``[B]``
        batched: which inputs have a batch
        alone: a batch to batches of one, if these are not rows
        kwargs: of make_private, or of clipped_grads
        modes: those that it runs in, beside the modes of make_private "function"
            (clipped_grads) and "compiled" (the same, compiled as a whole)
        warns: what a warning says; "" if samples run at once; None if either may be
        tolerance: of gradients, relative
    """

    model: Callable[[], nn.Module]
    batches: Any
    refused: Optional[str] = None
    loss: Callable = square_loss
    batched: Any = None
    alone: Optional[Callable] = None
    kwargs: dict = {}
    modes: Tuple[str, ...] = ("ghost_bk", "scan")
    warns: Optional[str] = None
    tolerance: float = 1e-7


def refused(said: Optional[str]) -> Any:
    """A context in which an error says this; None if there must be none."""
    if said is None:
        return contextlib.nullcontext()
    return pytest.raises(Refused, match=said)


def check(case: Case, mode: str = "ghost_bk", wrapped: bool = True) -> Any:
    """Trains the model of a case, or has it refused; the private run of its mode."""
    torch.manual_seed(0)
    private = None
    with warnings.catch_warnings(record=True) as caught, refused(case.refused):
        warnings.simplefilter("always")
        private = _train(case, mode, wrapped)
    said = "\n".join(str(warning.message) for warning in caught)
    assert case.warns != "" or "one sample after the other" not in said
    assert not case.warns or re.search(case.warns, said), said
    return private


def _train(case: Case, mode: str, wrapped: bool) -> Any:
    model = case.model().double()
    clean = copy.deepcopy(model)
    first = _alone(case, clean, case.batches[0])
    bound, size = half_clipped(first), max(1, len(next(iter(first.values()))))
    private = step = None
    if mode in ("function", "compiled"):
        step = _function(case, model, bound, mode == "compiled")
    else:
        given = dict(batch_size=size, max_grad_norm=bound, lr=0.1, **case.kwargs)
        private = make_private(model, mode, wrapped, **given)
    for number, batch in enumerate(case.batches):
        with torch.no_grad():
            for name, p in trainable(model).items():
                dict(clean.named_parameters())[name].copy_(p)
        grads = _alone(case, clean, batch)
        if private is None:
            sums = step(batch, grads)
        else:
            private.step(batch, case.loss)
            sums = {n: size * p.grad.detach() for n, p in trainable(model).items()}
        said = f"step {number}"
        assert_same(sums, clipped_sum(grads, "flat", bound), case.tolerance, said)
    return private


def _alone(case: Case, model: nn.Module, batch: Any) -> dict:
    """The oracle: gradients of each sample, of a model that begins anew."""
    if case.alone is None:
        return oracle(copy.deepcopy(model), batch, case.loss, case.batched)
    rows = []
    for one in case.alone(batch):
        fresh = copy.deepcopy(model)
        case.loss(fresh, one).sum().backward()
        grads = {
            n: p.new_zeros(p.shape) if p.grad is None else p.grad
            for n, p in trainable(fresh).items()
        }
        rows.append(grads)
    return {n: torch.stack([row[n] for row in rows]) for n in rows[0]}


def _function(case: Case, model: nn.Module, bound: float, compiled: bool) -> Callable:
    """A step by clipped_grads, whose norms and gradients are compared as well."""
    params = dict(model.named_parameters())

    def loss(sample):
        return case.loss(model, sample).sum()

    def clip(batch):
        return clipped_grads(loss, params, batch, bound, **case.kwargs)

    if compiled:
        torch._dynamo.reset()
        clip = torch.compile(clip, backend="aot_eager", fullgraph=True)

    def step(batch, grads):
        found = clip(batch)
        # What cancels leaves the rounding of squares, under the root.
        torch.testing.assert_close(found.norms, norms_of(grads), rtol=1e-8, atol=1e-6)
        if not compiled:
            ones = (sample_of(batch, b, case.batched) for b in range(len(found.norms)))
            losses = [loss(one).detach() for one in ones]
            torch.testing.assert_close(list(found.losses), losses)
            dense = per_sample_grads(loss, params, batch, **case.kwargs).grads
            assert_same(dense, grads, case.tolerance)
        with torch.no_grad():
            for name, total in found.sums.items():
                params[name].sub_(0.01 * total)
        return found.sums

    return step


def every(**tables: dict) -> Any:
    """Cases by table and name; the first of a table in all modes, and not wrapped."""
    params = []
    for table, cases in tables.items():
        for number, (name, case) in enumerate(cases.items()):
            ways = {mode: (mode, True) for mode in case.modes}
            if number == 0:
                ways = {mode: (mode, True) for mode in EVERY_MODE}
                ways["nowrap"] = "ghost_bk", False
            for label, way in ways.items():
                params.append(pytest.param(case, *way, id=f"{table}: {name}-{label}"))
    return pytest.mark.parametrize("case, mode, wrap", params)


# -- batches ---------------------------------------------------------------------------

# At which a shape alone misleads: T = B, B = 1, another B times T; and B = 0.
SIZES = ((4, 5), (4, 4), (1, 3), (5, 4), (3, 1), (12, 1), (0, 3), (2, 2), (4, 4))


def floats(*sizes: Tuple[int, int], d: int = D, seed: int = 1) -> list:
    """Batches ``[B, T, d]``."""
    generator = torch.Generator().manual_seed(seed)
    given = dict(generator=generator, dtype=torch.double)
    return [torch.randn(*size, d, **given) for size in sizes]


def rows(*sizes: int, T: int = 4, d: int = 3) -> list:
    """Batches ``[B, T, d]`` of some B."""
    return floats(*((size, T) for size in sizes), d=d)


def masked(*sizes: int, d: int = D) -> list:
    """``(x [B, T, d], mask [B, T])``; the first batch has one length."""
    made = []
    for step, x in enumerate(rows(*sizes, d=d)):
        lengths = torch.randint(1, 5, (len(x),)) if step else torch.full((len(x),), 4)
        made.append((x, torch.arange(4) < lengths[:, None]))
    return made


X = floats(*SIZES)
IDS = [torch.randint(V, size) for size in SIZES]
MASKED = masked(4, 4, 1, 5, 3, 2)
MATRICES = [torch.randn(size, D).double() for size in (4, 1, 5, 0, 7)]

# -- forwards --------------------------------------------------------------------------


def linear(width: int = D) -> nn.Linear:
    return nn.Linear(D, width)


def weights(*shape: int) -> Callable:
    return lambda: torch.randn(*shape)


def layers(then: Callable, *names: str, **parts: Any) -> Callable:
    """Makes a model whose parts ``names`` are linear layers."""
    return net(then, **{name: (D, D) for name in names}, **parts)


def along(m, ids):
    """Values ``[T, D]`` without samples, whose dims are counted from the first."""
    h, table = m.words(ids), m.places(torch.arange(ids.shape[1]))
    scaled = m.scale * (table * (table.pow(2).mean(-1, True) + 1e-6).rsqrt())
    for inner in (m.norm(table), (table @ m.matrix).softmax(1), scaled):
        h = (h + inner.softmax(1) + inner.flip(0)).tanh()
        h = h * inner.sum(1, keepdim=True) + inner[0]
    return h


TABLES = dict(words=lambda: nn.Embedding(V, D), places=lambda: nn.Embedding(8, D))


def windows(m, x):
    """Rows ``[B * windows, 2, d]``, heads before the batch, a bias of each window."""
    B, T, _ = x.shape
    h = F.pad(m.fc(x), (0, 0, 0, T % 2))
    h = m.inner(h.reshape(-1, 2, D)).tanh()
    bias = m.bias.repeat(len(h), 1, 1)
    h = ((h @ h.mT + bias).softmax(-1) @ h).reshape(B, -1, D)[:, :T]
    h = h.unflatten(2, (2, 2)).permute(2, 0, 1, 3).reshape(2 * B, T, 2)
    return m.head(h).view(2, B, T, 2).permute(1, 2, 0, 3)


def added_in_place(m, ids):
    """The words are frozen, the places are not."""
    x = m.words(ids)
    x += m.places(torch.arange(ids.shape[1]))
    shift = m.words.weight.new_zeros(ids.shape[1], D)
    kinds = m.kinds(torch.zeros_like(ids)) + shift
    shift += 1
    x += kinds
    return m.norm(x).tanh()


def lent(m, x):
    """Reads the weight of a convolution that it never calls, as Mamba layers do."""
    y = F.pad(m.fc(x).mT, (1, 0))
    y = F.conv1d(y, m.conv.weight, m.conv.bias, groups=D)
    return x + m.head(F.silu(y).mT)


def read_and_called(m, x):
    """A weight is read before and after its layer is called, and kept aside."""
    y = m.fc(F.linear(m.fc(input=x).tanh(), m.fc.weight))
    return y + m.fc.weight.sum()


def writes(m, x):
    """Into tensors of zeros, views of them, and what is made of parameters."""
    h = m.fc(x[:, 0])
    out = h.new_zeros(len(x), 3, D)
    first = out[:, 0]
    first.copy_(2 * h)
    out[:, 1] = h
    out[:, 2].add_(h.tanh())
    table = m.w + h.new_zeros(len(x), 1, 1)
    table[:, 1] = h
    table[:, 2] *= 2
    made = F.linear(m.w, m.inner.weight)
    made *= m.r  # no longer what F.linear has made
    cast = m.w.clone()
    cast.mul_(m.r)
    rest = F.linear(F.linear(h, made), cast)
    return torch.cat([out.flatten(1), first, table.flatten(1), rest], dim=1)


def tied(m, ids):
    """One matrix for ids, for a head and, transposed, for a layer."""
    h = m.fc(m.words(ids)).tanh()
    h = m.words(ids.flip(1)) + h.mean(1, keepdim=True)
    logits = F.linear(h.flatten(0, 1), m.words.weight).view(*ids.shape, -1)
    return logits + F.linear(F.linear(logits, m.words.weight.T), m.words.weight)


def with_one_weight():
    """Two layers at different lengths, whose biases are their own."""
    model = layers(lambda m, x: m.two(m.fc(x).tanh()[:, :2]), "fc", "two")()
    model.two.weight = model.fc.weight
    return model


def repeated(m, x):
    """Blocks of every kind, in plain calls and recomputed."""
    for block in m.blocks:
        for reentrant in (False, True):
            x = x + block(x) + checkpoint(block, x, use_reentrant=reentrant)
    return x


def blocks():
    conv = nn.Sequential(nn.Conv1d(D, D, 3, padding=1, groups=2), nn.PReLU(D))
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    return nn.ModuleList(
        [
            nn.Sequential(nn.LayerNorm(D), linear(), nn.GELU(), linear()),
            Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, D, batch_first=True)),
            Net(lambda m, x: m.conv(x.mT).mT, conv=conv),
            Net(lambda m, x: m.attention(x, x, x)[0], attention=attention),
        ]
    )


def packed(m, x):
    """Sentences of several lengths, and words of letters ``[B * T, d, letters]``."""
    lengths = 1 + torch.arange(len(x)) % x.shape[1]
    rows = m.conv(F.pad(x.flatten(0, 1)[:, None], (1, 0))).amax(2)
    rows = rows.unflatten(0, x.shape[:2])
    rows = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
    y, _ = pad_packed_sequence(m.lstm(rows)[0], True, total_length=x.shape[1])
    return m.norm(y.mT).mT


def video(m, x):
    """A convolution with a residual on every frame, then an LSTM on the frames."""
    rows = m.stem(x.flatten(0, 1)[:, None])
    rows = rows + m.conv(m.norm(rows).relu())
    return m.lstm(rows.mean(2).unflatten(0, x.shape[:2]))[0][:, -1]


class Sine(nn.Linear):
    """A Linear by its type, but not by what it computes."""

    def forward(self, x):
        return F.linear(x, self.weight.sin(), self.bias) * 2


class Doubling(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * self.weight.norm(dim=-1).mean()


def split(m, x, mask):
    """The real tokens of all samples in one row, and taken apart by their lengths."""
    parts = m.one(x[mask]).tanh().split(mask.sum(1).tolist())
    return torch.stack([m.two(part).sum(0) for part in parts])


class Rotary(Net):
    """A table of angles that grows with the longest input so far."""

    def __init__(self):
        super().__init__(None, one=linear())
        self.register_buffer("table", torch.zeros(0, 1), persistent=False)

    def forward(self, x):
        if len(self.table) < x.shape[1]:
            places = torch.arange(x.shape[1]).to(x)[:, None]
            self.register_buffer("table", places.cos(), persistent=False)
        return self.one(x).tanh() * self.table[: x.shape[1]]


def branches_before_a_kernel(m, x):
    """What is kept of each part of a batch is its own."""
    scale = torch.tensor([bool(row.sum() > 0) for row in x]).to(x)[:, None, None] + 1
    return m.head((scale * m.conv(x.mT)).mT)


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


ALIKE = net(
    alike,
    table=lambda: nn.Embedding(7, D),
    scale=lambda: torch.ones(D),
    layers=lambda: nn.ModuleList(linear() for _ in range(4)),
    norms=lambda: nn.ModuleList(nn.LayerNorm(D) for _ in range(4)),
    late=weights(D, D),
)


def leaf(m, x):
    """Adds a leaf that it makes."""
    made = torch.zeros(D, dtype=x.dtype, requires_grad=True)
    return m.two(torch.tanh(m.one(x) + made))


def frozen_block():
    """Recomputed as well."""
    model = layers(
        lambda m, x: m.two(checkpoint(m.one, x, use_reentrant=True)), "one", "two"
    )()
    model.one.requires_grad_(False)
    return model


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


def unless_all(m, x, mask):
    """A mask that is not used if it hides nothing; no two calls are equal."""
    y = m.one(x)
    if not bool(mask.all()):
        y = y * mask.unsqueeze(-1)
    return y + torch.randn_like(y)


def small():
    return nn.Sequential(linear(), nn.Tanh(), linear(2))


class Scaled(torch.autograd.Function):
    """Without ``setup_context``, so that vmap has no rule for it."""

    @staticmethod
    def forward(ctx, x, w, power):
        ctx.save_for_backward(x, w)
        ctx.power = power
        return x.pow(power) * w, x * w

    @staticmethod
    def backward(ctx, first, second):
        (x, w), k = ctx.saved_tensors, ctx.power
        grad = first * k * x.pow(k - 1) * w + second * w
        return grad, (first * x.pow(k) + second * x).flatten(0, -2).sum(0), None


# -- models ----------------------------------------------------------------------------

BOTH = ("hooks", "ghost_bk")
FLOATS = {
    "read and called": layers(read_and_called, "fc"),
    "windows": layers(windows, "fc", "inner", head=(2, 2), bias=weights(1, 2, 2)),
    "lent": layers(lent, "fc", "head", conv=lambda: nn.Conv1d(D, D, 2, groups=D)),
    "writes": layers(writes, "fc", "inner", w=weights(D, D), r=weights(D)),
    "one weight": with_one_weight,
    "repeated": net(repeated, blocks=blocks),
    "packed": net(
        packed,
        conv=lambda: nn.Conv1d(1, 3, 2),
        lstm=lambda: nn.LSTM(3, 2, batch_first=True, bidirectional=True),
        norm=lambda: nn.GroupNorm(2, D),
    ),
    "video": net(
        video,
        stem=lambda: nn.Conv1d(1, 4, 3, padding=1),
        norm=lambda: nn.GroupNorm(2, 4),
        conv=lambda: nn.Conv1d(4, 4, 3, padding=1),
        lstm=lambda: nn.LSTM(4, 3, batch_first=True),
    ),
    "Linear subclass": lambda: nn.Sequential(Sine(D, D), linear(2)),
    "branches": layers(
        branches_before_a_kernel,
        "head",
        conv=lambda: nn.Conv1d(D, D, 65, padding=32, groups=2, bias=False),
    ),
}
WITH_IDS = {
    "along": net(
        along,
        **TABLES,
        norm=lambda: nn.LayerNorm(D),
        matrix=weights(D, D),
        scale=weights(D),
    ),
    "added in place": net(
        added_in_place,
        words=lambda: nn.Embedding(V, D).requires_grad_(False),
        places=lambda: nn.Embedding(8, D),
        kinds=lambda: nn.Embedding(3, D),
        norm=lambda: nn.LayerNorm(D),
    ),
    "tied, padded": layers(tied, "fc", words=lambda: nn.Embedding(V, D, padding_idx=2)),
    "Embedding subclass": lambda: nn.Sequential(Doubling(V, D)),
}
MODELS = {
    **{name: Case(make, X, modes=BOTH) for name, make in FLOATS.items()},
    **{name: Case(make, IDS, modes=BOTH) for name, make in WITH_IDS.items()},
    "split": Case(layers(split, "one", "two"), MASKED),
    "rotary": Case(Rotary, X, modes=("ghost_bk",)),
    "layers alike": Case(ALIKE, X, modes=MODES),
    "leaf that the forward makes": Case(layers(leaf, "one", "two"), X, modes=MODES),
    "frozen block": Case(frozen_block, X, modes=MODES),
    "function of autograd": Case(
        layers(
            lambda m, x: torch.cat(Scaled.apply(m.fc(x), m.w, 3), dim=-1),
            "fc",
            w=weights(D),
        ),
        X,
        modes=("ghost_bk",),
        warns="one sample after the other",
    ),
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


def silent(model, x):
    """At the first length no sample has a gradient."""
    return square_loss(model, x) * (x.shape[1] != 5)


def transposed(m, x):
    """Of a model that takes time first, as Opacus's own layers do."""
    y = m(x.transpose(0, 1))
    return squares((y[0] if isinstance(y, tuple) else y).transpose(0, 1))


NOT_EMPTY = [x for x in X if len(x)]
LOSSES = {
    "attacked": Case(small, NOT_EMPTY, loss=attacked, modes=MODES[:3]),
    "two passes": Case(small, X[:5], loss=two_passes, modes=MODES),
    "a column": Case(net(lambda m, x: m.one(x.mean(1)), one=(D, 1)), X, loss=of_column),
    "all silent": Case(FLOATS["video"], X, loss=silent),
    "a router": Case(
        layers(lambda m, x: (m.fc(x), m.fc(x) * m.w.exp()), "fc", w=weights(D)),
        X,
        loss=lambda m, x: squares(m(x)[0] + m(x)[1]) + squares(m(x)[1]),
    ),
    "time first": Case(
        net(lambda m, x: (m.one(x.transpose(0, 1)), x.shape[1]), one=(D, 2)),
        *(X, r"Net: output\[0\] has shape \(5, 1, 2\)"),
        loss=lambda model, x: squares(model(x)[0].transpose(0, 1)),
        modes=("ghost_bk",),
    ),
    **{
        f"batch_first=False {type(layer).__name__}": Case(
            lambda layer=layer: nn.Sequential(copy.deepcopy(layer)),
            NOT_EMPTY,
            loss=transposed,
            kwargs=dict(batch_first=False),
        )
        for layer in (nn.LSTM(D, 3), nn.TransformerEncoderLayer(D, 2, 6, 0.0))
    },
}

# -- gradients of one parameter in pieces ----------------------------------------------


def sliced(*shape):
    return net(slices, weight=lambda: torch.randn(*shape) * 0.1)


SIGNS = torch.tensor([[1.0], [-1], [2], [-3]]).expand(4, 4).double()
PIECES = {
    "slices": Case(sliced(12, 4), floats((4, 5)), modes=MODES[:3]),
    # Gradients of over 2**16 entries are squared as soon as they are complete.
    "large slices": Case(sliced(300, 300), floats((4, 5), d=300), modes=MODES[:3]),
    "branches": Case(layers(flips, "one"), [SIGNS], loss=both_signs, modes=MODES[:3]),
}

# -- several inputs --------------------------------------------------------------------


def one_bag(inputs, i):
    lengths, ids = inputs
    if i >= len(lengths):
        raise IndexError
    begin = int(lengths[:i].sum())
    return lengths[i : i + 1], ids[begin : begin + int(lengths[i])]


def bags(*sizes):
    lengths = [torch.randint(1, 4, (size,)) for size in sizes]
    return [(n, torch.randint(0, 7, (int(n.sum()),))) for n in lengths]


def attends(m, source, target, places):
    """Two sequences of different lengths, and places [T] that all samples share."""
    keys = m.key(m.words(source))
    queries = m.query(m.words(target) + m.places(places))
    return (queries @ keys.mT).softmax(-1) @ keys


def pairs_of(S, T):
    batch = {n: torch.randint(V, (4, k)) for n, k in (("source", S), ("target", T))}
    return {**batch, "places": torch.arange(T)}


BAG = layers(bag, "two", words=lambda: nn.Embedding(7, D))
SEVERAL = {
    "ragged": Case(
        BAG,
        bags(4, 4, 1, 5, 3, 2),
        alone=lambda batch: [one_bag(batch, i) for i in range(len(batch[0]))],
        kwargs=dict(take=one_bag),
    ),
    "ragged, not taken": Case(
        *(BAG, bags(4), "take="),
        alone=lambda batch: [one_bag(batch, i) for i in range(len(batch[0]))],
    ),
    "a mask of ones": Case(
        layers(unless_all, "one"),
        [(x, torch.ones(4, 3)) for x in floats((4, 3), (4, 3))] + MASKED[1:],
        loss=lambda model, batch: model(*batch).flatten(1).sum(1),
    ),
    "two lengths": Case(
        layers(attends, "key", "query", **TABLES),
        [pairs_of(4, 3), pairs_of(3, 5), pairs_of(5, 6)],
        batched=["source", "target"],
        kwargs=dict(shared=["places"]),
    ),
}
