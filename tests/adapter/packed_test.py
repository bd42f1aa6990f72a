"""Inputs that are no batch of tensors: packed sequences, lists, and ``take``."""

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)
from torch.utils._pytree import tree_leaves, tree_map

from opacus_ext import Refused, take
from tests.common import make_private, net, squares
from tests.zoo import Case, check, every, floats, rows


@pytest.fixture(autouse=True)
def double():
    """Opacus's DPLSTM makes states of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# -- packed sequences ----------------------------------------------------------------

LENGTHS = [1, 4, 2, 5], [3, 3, 3, 3], [4, 1, 4], [1, 1], [5, 3, 3, 1, 2], [4]
KINDS = nn.RNN, nn.LSTM, nn.GRU, DPRNN, DPLSTM, DPGRU
PADDED = [
    (x, torch.tensor(n)) for x, n in zip(rows(*map(len, LENGTHS), T=5, d=2), LENGTHS)
]


def of_one(batch):
    return [tuple(x[b : b + 1] for x in batch) for b in range(len(batch[0]))]


def pack(x, lengths):
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def pad(packed, length=None):
    return pad_packed_sequence(packed, batch_first=True, total_length=length)[0]


def with_states(output, state):
    """Outputs and ``[layers, B, width]``, maybe two, as ``[B, -1]``"""
    states = [x.transpose(0, 1) for x in tree_leaves(state)]
    return torch.cat([x.flatten(1) for x in (output, *states)], dim=1)


def packs(m, x, lengths):
    """Packs what is padded, and pads again; an initial state that is computed."""
    start = m.start(x[:, 0]).unflatten(1, (2, 3)).transpose(0, 1)
    two = isinstance(m.rnn, (nn.LSTM, DPLSTM))
    packed = pack(m.before(x), lengths)
    output, state = m.rnn(packed, (start, start.tanh()) if two else start)
    return with_states(pad(output, 5), state)


def documents(m, x):
    """Of three sentences of several lengths, the same in each."""
    lengths = torch.tensor([2, 4, 1]).repeat(len(x))
    output, state = m.words(pack(x.flatten(0, 1), lengths))
    output = PackedSequence(m.head(output.data), *output[1:])
    return with_states(pad(output, 4), state).view(len(x), -1)


class OnPacked(nn.Module):
    """Its input is packed; ``[B, 5, 6]`` and the last states."""

    def __init__(self, kind):
        super().__init__()
        self.rows, self.rnn = nn.Linear(2, 2), kind(2, 3, bidirectional=True)

    def forward(self, packed):
        packed = PackedSequence(self.rows(packed.data), *packed[1:])
        output, state = self.rnn(packed)
        return pad(output, 5), state


def outside(kind, refused=None, modes=("ghost_bk",), **kwargs):
    return Case(
        *(lambda: OnPacked(kind), PADDED, refused),
        loss=lambda model, batch: squares(with_states(*model(pack(*batch)))),
        alone=of_one,
        kwargs=kwargs,
        modes=modes,
    )


def inside(kind):
    rnn = lambda: kind(2, 3, bidirectional=True)  # noqa: E731
    build = net(
        lambda m, x, lengths: packs(m, x, lengths), before=(2, 2), start=(2, 6), rnn=rnn
    )
    return Case(build, PADDED, modes=("ghost_bk",))


PACKED = {
    **{f"inside {kind.__name__}": inside(kind) for kind in reversed(KINDS)},
    "documents": Case(
        net(
            documents,
            words=lambda: nn.GRU(2, 3, num_layers=2, bidirectional=True),
            head=(6, 2),
        ),
        [x.unflatten(1, (3, 4)) for x in rows(4, 3, 1, T=12, d=2)],
    ),
    "DPLSTM": outside(DPLSTM, take=take.packed),
    "RNN": outside(nn.RNN, take=take.packed),
    "LSTM": outside(nn.LSTM, take=take.packed, modes=("ghost", "hooks")),
    "alone": outside(nn.GRU, "packed is a PackedSequence.*take.packed"),
}

# -- lists and take ------------------------------------------------------------------


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 3), nn.Linear(3, 2)

    def forward(self, sequences):
        packed = pack_sequence(sequences, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])


LISTS = [[torch.randn(n, 2).double() for n in lengths] for lengths in LENGTHS]


def samples(batches):
    """Of several lengths; where these are equal at first it is told all the same."""
    return Case(
        *(Sequences, batches),
        alone=lambda batch: [[x] for x in batch],
        kwargs=dict(take=take.items),
    )


class Numbers(nn.Module):
    """Lengths are numbers of a list."""

    def __init__(self):
        super().__init__()
        self.inner = inside(nn.GRU).model()

    def forward(self, x, list_of_lengths):
        return self.inner(x, torch.tensor(list_of_lengths))


def graphs(m, x, edges, graph, weights=1.0, scale=1.0):
    """
    Features ``[N, d]``, edges ``[2, E]`` and the graph of each node ``[N]``; maybe
    weights of edges ``[E, 1]`` and a number of each graph ``[B, 1]``.
    """
    for _ in range(2):
        messages = m.edges(x)[edges[0]] * weights
        x = (m.nodes(x).index_add(0, edges[1], messages)).tanh()
    pooled = x.new_zeros(int(graph.max()) + 1, 3).index_add(0, graph, x)
    return m.head(pooled) * scale


def some_graphs(*sizes):
    start, edges = 0, []
    for n in sizes:
        edges.append(start + torch.randint(n, (2, 2 * n)))
        start += n
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    edges = torch.cat(edges, dim=1)
    weights = torch.rand(edges.shape[1], 1), torch.rand(len(sizes), 1)
    return torch.randn(start, 3).double(), edges, graph, *(w.double() for w in weights)


def graph_of(batch, i):
    x, edges, graph, weights, scale = batch
    if i > int(graph.max()):
        raise IndexError
    nodes, own = (graph == i).nonzero()[:, 0], graph[edges[0]] == i
    cut = edges[:, own] - nodes[0]
    return x[nodes], cut, torch.zeros_like(nodes), weights[own], scale[i : i + 1]


def of_graphs(refused=None, **kwargs):
    return Case(
        net(graphs, nodes=(3, 3), edges=(3, 3), head=(3, 3)),
        [some_graphs(*n) for n in ([2, 4, 3], [3, 3], [1, 5, 2, 4], [3])],
        refused,
        alone=lambda batch: [graph_of(batch, i) for i in range(len(batch[4]))],
        kwargs=kwargs,
    )


GIVEN = {
    "list of samples": samples(LISTS),
    "equal at first": samples(LISTS[1:]),
    "list of inputs": Case(
        net(lambda m, pair: m.fc(pair[0]) * m.fc(pair[1]).tanh(), fc=(2, 3)),
        [(torch.randn(n, 2).double(), torch.randn(n, 2).double()) for n in (4, 3, 2)],
        loss=lambda model, batch: squares(model(list(batch))),
    ),
    "list_of_lengths": Case(  # numbers may be samples as tensors may
        *(Numbers, PADDED, "items of input list_of_lengths may be samples"),
        loss=lambda model, batch: squares(model(batch[0], batch[1].tolist())),
    ),
    "graphs": of_graphs(take=graph_of),
    "graphs of take": of_graphs(take=take.graphs),
    "graphs, not taken": of_graphs("opacus_ext.take.graphs"),
}
GRAPHS = dict(zip(("x", "edge_index", "batch"), some_graphs(2, 3)))


def test_graphs_by_keyword():
    one = take.graphs(GRAPHS, 1)
    edges = GRAPHS["edge_index"]
    assert torch.equal(one["x"], GRAPHS["x"][2:])
    assert torch.equal(one["edge_index"], edges[:, edges[0] > 1] - 2)
    assert one["batch"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "given, words",
    [
        (GRAPHS | {"table": torch.ones(7, 2)}, "which rows of a tensor .7, 2."),
        (GRAPHS | {"edge_index": torch.tensor([[0], [4]])}, "leads to another graph"),
        ({"x": GRAPHS["x"]}, "need x, edge_index, batch"),
    ],
)
def test_graphs_that_are_refused(given, words):
    with pytest.raises(Refused, match=words):
        take.graphs(given, 0)


def test_the_first_batch_is_empty():
    """What a sample looks like is known by the first one that take= gives."""
    private = make_private(Sequences(), "ghost_bk", batch_size=2, take=take.items)
    with pytest.raises(Refused, match="Begin with a batch that is not empty"):
        private.module([])
    private.module(LISTS[0])
    assert private.module([]).shape == (0, 2)


@every(packed=PACKED, given=GIVEN)
def test_steps(case, mode, wrap):
    check(case, mode, wrap)


# -- recurrent layers as models -------------------------------------------------------


@pytest.mark.parametrize(
    "layers, length, mode",
    [(1, 4, "ghost_bk"), (2, 4, "hooks"), (2, 1, "ghost_bk"), (2, 4, "scan")],
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, nn.LSTM, nn.GRU])
def test_states(kind, layers, first, length, mode):
    """Called with no state, and with the one that was returned."""

    def given_back(m, x):
        x = x if first else x.transpose(0, 1)
        y, state = m(x)
        again = m(x, tree_map(torch.detach, state))
        return sum(
            squares(s.transpose(0, d))
            for out in ((y, state), again)
            for s, d in zip(tree_leaves(out), (0 if first else 1, 1, 1))
        )

    build = net(
        lambda m, x, state=None: m.rnn(x, state),
        rnn=lambda: kind(3, 2, num_layers=layers, batch_first=first),
    )
    batches = floats(*((size, length) for size in (4, 1, 3, 2)), d=3)
    kwargs = dict(batch_first=first)
    check(Case(build, batches, loss=given_back, kwargs=kwargs), mode)
