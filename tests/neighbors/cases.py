"""The models, modes and loops that are searched."""

from typing import Any, Dict, List, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import opacus_ext
from opacus_ext.layers import SwitchFeedForward, TopKFeedForward
from opacus_ext.models.dpformer import DPFormer
from tests.adapter.common import EVERY_MODE
from tests.adapter.silence_test import Hidden, Opaque, Sequences, state_loss
from tests.common import square_loss
from tests.neighbors import loops
from tests.neighbors.records import (
    Field,
    Records,
    listed,
    padded,
    stacked,
    with_offsets,
    with_states,
)
from tests.neighbors.search import Setting

D, V = 3, 6
ONE_PASS = ("ghost", "ghost_bk", "scan", "auto")

# -- records ---------------------------------------------------------------------------

FLOATS = Records({"x": Field(D)}, stacked)
ROWS = Records({"x": Field(D, whole=True)}, stacked)
IDS = Records({"ids": Field(values=V)}, stacked)
LABELED = Records({"x": Field(D), "y": Field(values=V)}, stacked)
PADDED = Records({"x": Field(D)}, padded, ragged=True)
PADDED_IDS = Records({"ids": Field(values=V)}, padded, ragged=True)
LISTED = Records({"x": Field(D)}, listed, ragged=True)
BAGS = Records({"ids": Field(values=V)}, with_offsets, ragged=True)
STATES = Records(
    {"x": Field(D), "h": Field(D, whole=True), "c": Field(D, whole=True)}, with_states
)

# -- models ----------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, and between them the op of a case."""

    def __init__(self, then, **parts: nn.Module):
        super().__init__()
        self.one, self.two, self.then = nn.Linear(D, D), nn.Linear(D, 2), then
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x, *rest):
        return self.two(self.then(self, self.one(x).tanh(), *rest))


class Tied(nn.Module):
    """A language model over padded ids, one matrix in and out."""

    def __init__(self):
        super().__init__()
        self.table, self.cells = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True)

    def forward(self, ids, mask):
        hidden, _ = self.cells(self.table(ids))
        return F.linear(hidden, self.table.weight)


def tied_loss(model, batch):
    ids, mask = batch
    found = F.cross_entropy(model(*batch).mT, ids, reduction="none")
    return (found * mask).sum(1) / mask.sum(1)


class Encoder(nn.Module):
    """An encoder with a branch on padding, as in torch and transformers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 1, 4, 0.0, batch_first=True)
        self.head = nn.Linear(D, 2)

    def forward(self, x, mask):
        h = self.layer(x, src_key_padding_mask=None if mask.all() else ~mask)
        h = h.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)
        return self.head(h)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(V, D), nn.Linear(D, 2)

    def forward(self, ids, offsets=None):
        return self.head(self.bag(ids, offsets))


class Formed(nn.Module):
    """DPFormer, whose item 0 is padding."""

    def __init__(self):
        super().__init__()
        self.former = DPFormer(V, 8, width=4, depth=1, heads=1, dropout=0.0)

    def forward(self, ids):
        return self.former(ids)


def formed_loss(model, batch):
    ids = batch[0] + 1
    logits = model(ids)
    targets = ids.roll(-1, 1) % logits.shape[-1]
    return F.cross_entropy(logits.mT, targets, reduction="none").mean(1)


def convolved(m, h):
    return m.norm(m.conv(h.mT)).mT


def branches(m, h):
    """Three ways to read a number of the data."""
    if h.sum() > 0:
        h = h * 2
    return h * float(h.detach().abs().max()) + h[h.detach() > 0].sum()


def mixed(m, h):
    """Ops that mix the samples of a batch: a mean over it, and its size."""
    return h - h.mean(0, keepdim=True) / 2 + m.norm(h) * len(h)


def low_rank(m, h):
    return F.linear(h, m.up.weight @ m.down.weight)


def frozen_first() -> nn.Module:
    net = Net(low_rank, up=nn.Linear(1, D), down=nn.Linear(D, 1))
    return net.requires_grad_(False) and _thaw(net, "up.weight", "down.weight")


def _thaw(net: nn.Module, *names: str) -> nn.Module:
    for name in names:
        net.get_parameter(name).requires_grad_(True)
    return net


class Model(NamedTuple):
    make: Any
    records: Records
    loss: Any = square_loss
    kwargs: Dict[str, Any] = {}


MODELS: Dict[str, Model] = {
    "rows": Model(lambda: nn.Linear(D, 2), ROWS),
    "sequences": Model(lambda: Net(lambda m, h: h.cumsum(1)), FLOATS),
    "states": Model(Hidden, STATES, state_loss),
    "tied": Model(Tied, PADDED_IDS, tied_loss),
    "mixture": Model(
        lambda: Net(lambda m, h: m.ffn(h), ffn=TopKFeedForward(D, 4, 3)), FLOATS
    ),
    "switch": Model(
        lambda: Net(lambda m, h: m.ffn(h), ffn=SwitchFeedForward(D, 4, 3)), FLOATS
    ),
    "encoder": Model(Encoder, PADDED),
    "bags": Model(Bag, IDS),
    "offsets": Model(Bag, BAGS, kwargs=dict(take=opacus_ext.take.bags)),
    "lists": Model(Sequences, LISTED, kwargs=dict(take=opacus_ext.take.items)),
    "convolution": Model(
        lambda: Net(
            convolved, conv=nn.Conv1d(D, D, 3, padding=2), norm=nn.GroupNorm(1, D)
        ),
        FLOATS,
    ),
    "weight norm": Model(
        lambda: Net(
            lambda m, h: m.normed(h),
            normed=parametrizations.weight_norm(nn.Linear(D, D)),
        ),
        FLOATS,
    ),
    "low rank": Model(frozen_first, FLOATS),
    "branches": Model(lambda: Net(branches), FLOATS),
    "no vmap": Model(lambda: Net(lambda m, h: Opaque.apply(h)), FLOATS),
    "batch": Model(lambda: Net(mixed, norm=nn.LayerNorm(D)), FLOATS),
    "time first": Model(
        lambda: Net(
            lambda m, h: m.rnn(h.transpose(0, 1))[0].transpose(0, 1), rnn=nn.LSTM(D, D)
        ),
        FLOATS,
    ),
    "dpformer": Model(Formed, IDS, formed_loss),
}


def setting(name: str, **changes: Any) -> Setting:
    """The setting of a model in the table, with the changes of a case."""
    make, records, loss, kwargs = MODELS[name]
    kwargs = {**kwargs, **changes.pop("kwargs", {})}
    return Setting(name, make, records, loss, kwargs=kwargs, **changes)


# -- criteria --------------------------------------------------------------------------


def unequal(private, batch):
    """Classes as targets; where a criterion ignores one, counts are unequal."""
    x, y = batch
    private.criterion(private.module(x).mT, y).backward()


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(D, V)

    def forward(self, x):
        return self.head(x)


CRITERIA = {
    "ignored": nn.CrossEntropyLoss(ignore_index=0),
    "weights": nn.CrossEntropyLoss(weight=torch.linspace(0, 2, V).double()),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2),
}

# -- all of them -----------------------------------------------------------------------

EVERYWHERE: List[Setting] = [
    setting(name, mode=mode) for name in MODELS for mode in EVERY_MODE
]
NOT_WRAPPED = [setting("encoder", mode=mode, wrap=False) for mode in EVERY_MODE]
CLIPPED = [
    setting(
        "tied",
        mode=mode,
        note=clipping,
        kwargs=dict(clipping=clipping, max_grad_norm=bound),
    )
    for mode in ("hooks", "ghost", "ghost_bk", "scan")
    for clipping, bound in (
        ("automatic", 0.5),
        ("normalized", 0.5),
        ("per_layer", [0.1, 0.2, 0.3, 0.4, 0.5]),
    )
]
LOOPS = [
    setting(name, mode=mode, loop=loop)
    for name, modes in (("encoder", EVERY_MODE), ("states", ("hooks", "ghost_bk")))
    for mode in modes
    for loop in (
        loops.physical,
        loops.resumed,
        loops.broken,
        loops.dropped,
        loops.left,
        loops.evaluated,
        loops.thawed,
    )
] + [setting(name, mode="hooks", loop=loops.accumulated) for name in ("tied", "rows")]
LOSSES = [
    Setting(
        f"criterion {name}",
        Classes,
        LABELED,
        square_loss,
        mode=mode,
        backward=unequal,
        kwargs=dict(criterion=criterion),
    )
    for name, criterion in CRITERIA.items()
    for mode in ONE_PASS
]
COMPILED = [
    setting(name, mode=mode, backend=backend)
    for name, mode, backend in (
        ("rows", "ghost_bk", "eager"),
        ("sequences", "ghost_bk", "aot_eager"),
        ("tied", "ghost_bk", "eager"),
        ("encoder", "ghost", "eager"),
        ("sequences", "hooks", "eager"),
    )
]
SETTINGS = EVERYWHERE + NOT_WRAPPED + CLIPPED + LOOPS + LOSSES
