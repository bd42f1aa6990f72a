"""The models, modes and loops that are searched."""

import random
from typing import Any, Dict, List, NamedTuple

from torch import nn
from torch.nn import functional as F

import opacus_ext
from tests import events
from tests.adapter.silence_test import Hidden, Sequences, state_loss
from tests.common import net, square_loss
from tests.fuzz.ops import UNARY
from tests.neighbors import loops
from tests.neighbors.records import (
    Field,
    Records,
    listed,
    overlapping,
    padded,
    stacked,
    with_notes,
    with_offsets,
    with_states,
)
from tests.neighbors.search import Setting
from tests.zoo import EVERY_MODE

D, V = 3, 6
# One pass or two, sums or all gradients, samples together or one by one; other modes
# are made of these.
MODES = ("ghost_bk", "hooks", "ghost", "scan")

# -- records ---------------------------------------------------------------------------

FLOATS = Records({"x": Field(D)}, stacked)
ROWS = Records({"x": Field(D, whole=True)}, stacked)
IDS = Records({"ids": Field(values=V)}, stacked)
PADDED = Records({"x": Field(D)}, padded, ragged=True)
PADDED_IDS = Records({"ids": Field(values=V)}, padded, ragged=True)
LISTED = Records({"x": Field(D)}, listed, ragged=True)
BAGS = Records({"ids": Field(values=V)}, with_offsets, ragged=True)
NOTED = Records({"x": Field(D, whole=True)}, with_notes)
FLAGGED = Records({"x": Field(D, whole=True)}, overlapping)
STATES = Records(
    {"x": Field(D), "h": Field(D, whole=True), "c": Field(D, whole=True)}, with_states
)

# -- models ----------------------------------------------------------------------------


def tied(m, ids, mask):
    """A language model over padded ids, one matrix in and out."""
    return F.linear(m.cells(m.table(ids))[0], m.table.weight)


TIED = net(
    tied,
    table=lambda: nn.Embedding(V, D),
    cells=lambda: nn.GRU(D, D, batch_first=True),
)


def tied_loss(model, batch):
    ids, mask = batch
    found = F.cross_entropy(model(*batch).mT, ids, reduction="none")
    return (found * mask).sum(1) / mask.sum(1)


def encoder(m, x, mask):
    """An encoder with a branch on padding, as in torch and transformers."""
    h = m.layer(x, src_key_padding_mask=None if mask.all() else ~mask)
    h = h.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)
    return m.head(h)


ENCODER = net(
    encoder,
    layer=lambda: nn.TransformerEncoderLayer(D, 1, 4, 0.0, batch_first=True),
    head=(D, 2),
)
BAG = net(
    lambda m, ids, offsets=None: m.head(m.bag(ids, offsets)),
    bag=lambda: nn.EmbeddingBag(V, D),
    head=(D, 2),
)


def silenced(m, x, flag):
    """An outlier takes the flag down, for itself."""
    flag &= bool(x.abs().max() < 10)
    return m.head(x) * flag


SILENCED = net(silenced, head=(D, 2))
NOTES = net(lambda m, x, notes: m.head(x[0][None]) * notes[0].value, head=(D, 2))


def of_op(name: str) -> Any:
    """Makes two layers, and between them an op of the fuzzer."""

    def make() -> nn.Module:
        step = UNARY[name](random.Random(1))
        return nn.Sequential(nn.Linear(D, D), step, nn.Linear(D, 2))

    return make


OPS = (
    *("sums", "experts", "conv", "group norm", "weight norm", "low rank", "branch"),
    *("number", "chosen", "opaque", "minus mean", "times B", "time first"),
    *("caught", "cancels"),
)


class Model(NamedTuple):
    make: Any
    records: Records
    loss: Any = square_loss
    kwargs: Dict[str, Any] = {}


MODELS: Dict[str, Model] = {
    "rows": Model(lambda: nn.Linear(D, 2), ROWS),
    "states": Model(Hidden, STATES, state_loss),
    "tied": Model(TIED, PADDED_IDS, tied_loss),
    "encoder": Model(ENCODER, PADDED),
    "bags": Model(BAG, IDS),
    "offsets": Model(BAG, BAGS, kwargs=dict(take=opacus_ext.take.bags)),
    "silenced": Model(SILENCED, FLAGGED),
    "notes": Model(NOTES, NOTED, kwargs=dict(take=opacus_ext.take.items)),
    "lists": Model(Sequences, LISTED, kwargs=dict(take=opacus_ext.take.items)),
    **{name: Model(of_op(name), FLOATS) for name in OPS},
}


def setting(name: str, **changes: Any) -> Setting:
    """The setting of a model in the table, with the changes of a case."""
    make, records, loss, kwargs = MODELS[name]
    kwargs = {**kwargs, **changes.pop("kwargs", {})}
    return Setting(name, make, records, loss, kwargs=kwargs, **changes)


# -- all of them -----------------------------------------------------------------------

# Each model in "ghost_bk", and in one of the others in turn.
EVERYWHERE: List[Setting] = [
    setting(name, mode=mode)
    for i, name in enumerate(MODELS)
    for mode in (MODES[0], MODES[1 + i % 3])
]
NOT_WRAPPED = [setting("encoder", mode=mode, wrap=False) for mode in EVERY_MODE]
CLIPPED = [
    setting(
        "tied",
        mode=mode,
        note=clipping,
        kwargs=dict(clipping=clipping, max_grad_norm=bound),
    )
    for mode in MODES[:3]
    for clipping, bound in (
        ("automatic", 0.5),
        ("normalized", 0.5),
        ("per_layer", [0.1, 0.2, 0.3, 0.4, 0.5]),
    )
]
LOOPS = [
    setting(name, mode=mode, loop=loop)
    for name, modes in (("encoder", MODES[:1]), ("rows", MODES[1:]))
    for mode in modes
    for loop in (
        loops.physical,
        loops.resumed,
        loops.thawed,
        *map(loops.silent, events.SILENT),
    )
] + [setting(name, mode="hooks", loop=loops.accumulated) for name in ("tied", "rows")]
COMPILED = [
    setting(name, mode=mode, backend="eager")
    for name, mode in (
        ("tied", "ghost_bk"),
        ("encoder", "ghost"),
        ("sums", "hooks"),
    )
]
SETTINGS = EVERYWHERE + NOT_WRAPPED + CLIPPED + LOOPS
