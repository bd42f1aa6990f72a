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

from opacus_ext import Refused, take
from tests.adapter.common import Case, every, rows, run, steps
from tests.common import Net, make_private, net, squares


@pytest.fixture(autouse=True)
def double():
    """Opacus's DPLSTM makes states of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# -- packed sequences ----------------------------------------------------------------

LENGTHS = [1, 4, 2, 5], [3, 3, 3, 3], [4, 1, 4], [1, 1], [5, 3, 3, 1, 2], [4]
KINDS = [nn.RNN, nn.LSTM, nn.GRU, DPRNN, DPLSTM, DPGRU]
PADDED = [
    (x, torch.tensor(n)) for x, n in zip(rows(*map(len, LENGTHS), T=5, d=2), LENGTHS)
]


def of_one(batch):
    return [tuple(x[b : b + 1] for x in batch) for b in range(len(batch[0]))]


def pack(x, lengths):
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def pad(packed, length=None):
    return pad_packed_sequence(packed, batch_first=True, total_length=length)[0]


def states(state):
    """``[layers, B, width]``, maybe two, as ``[B, -1]``"""
    each = state if isinstance(state, tuple) else (state,)
    return torch.cat([x.transpose(0, 1).flatten(1) for x in each], dim=1)


def packs(m, x, lengths):
    """Packs what is padded, and pads again; an initial state that is computed."""
    start = m.start(x[:, 0]).unflatten(1, (2, 3)).transpose(0, 1)
    two = isinstance(m.rnn, (nn.LSTM, DPLSTM))
    packed = pack(m.before(x), lengths)
    output, state = m.rnn(packed, (start, start.tanh()) if two else start)
    return torch.cat([pad(output, 5).flatten(1), states(state)], dim=1)


class Packs(Net):
    def forward(self, x, lengths):
        return self.then(self, x, lengths)


def documents(m, x):
    """Of three sentences of several lengths, the same in each."""
    lengths = torch.tensor([2, 4, 1]).repeat(len(x))
    output, state = m.words(pack(x.flatten(0, 1), lengths))
    output = PackedSequence(m.head(output.data), *output[1:])
    output, state = pad(output, 4), state.transpose(0, 1)
    return torch.cat([output.flatten(1), state.flatten(1)], 1).view(len(x), -1)


class OnPacked(nn.Module):
    """Its input is packed; ``[B, 5, 6]`` and the last states."""

    def __init__(self, kind):
        super().__init__()
        self.rows, self.rnn = nn.Linear(2, 2), kind(2, 3, bidirectional=True)

    def forward(self, packed):
        packed = PackedSequence(self.rows(packed.data), *packed[1:])
        output, state = self.rnn(packed)
        return pad(output, 5), state


def packed_loss(model, batch):
    output, state = model(pack(*batch))
    return squares(torch.cat([output.flatten(1), states(state)], dim=1))


def outside(kind, refused=None, modes=("ghost_bk",), **kwargs):
    return Case(
        *(lambda: OnPacked(kind), PADDED, refused, packed_loss),
        alone=of_one,
        kwargs=kwargs,
        modes=modes,
    )


def inside(kind):
    build = net(
        packs,
        before=(2, 2),
        start=(2, 6),
        rnn=lambda: kind(2, 3, bidirectional=True),
    )
    return Case(build, PADDED, modes=("ghost_bk",))


DOCUMENTS = net(
    documents,
    words=lambda: nn.GRU(2, 3, num_layers=2, bidirectional=True),
    head=(6, 2),
)
PACKED = {
    **{f"inside {kind.__name__}": inside(kind) for kind in reversed(KINDS)},
    "documents": Case(
        DOCUMENTS, [x.unflatten(1, (3, 4)) for x in rows(4, 3, 1, T=12, d=2)]
    ),
}
OUTSIDE = {
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


def graphs(m, x, edges, graph):
    """Features ``[N, d]``, edges ``[2, E]`` and the graph of each node ``[N]``."""
    for _ in range(2):
        messages = m.edges(x)[edges[0]]
        x = (m.nodes(x).index_add(0, edges[1], messages)).tanh()
    pooled = x.new_zeros(int(graph.max()) + 1, 3).index_add(0, graph, x)
    return m.head(pooled)


def weighted(m, x, edges, graph, weights, scale):
    """With weights of edges ``[E, 1]`` and a number of each graph ``[B, 1]``."""
    messages = m.edges(x)[edges[0]] * weights
    return graphs(m, x.index_add(0, edges[1], messages), edges, graph) * scale


def with_weights(*sizes):
    x, edges, graph = some_graphs(*sizes)
    weights = torch.rand(edges.shape[1], 1).double()
    return x, edges, graph, weights, torch.rand(len(sizes), 1).double()


def weighted_one(batch, i):
    x, edges, graph, weights, scale = batch
    own = weights[graph[edges[0]] == i]
    return *graph_of((x, edges, graph), i), own, scale[i : i + 1]


def graph_of(inputs, i):
    x, edges, graph = inputs
    if i > int(graph.max()):
        raise IndexError
    nodes = (graph == i).nonzero()[:, 0]
    own = edges[:, graph[edges[0]] == i] - nodes[0]
    return x[nodes], own, torch.zeros_like(nodes)


def some_graphs(*sizes):
    start, edges = 0, []
    for n in sizes:
        edges.append(start + torch.randint(n, (2, 2 * n)))
        start += n
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return torch.randn(start, 3).double(), torch.cat(edges, dim=1), graph


GIVEN = {
    "list of samples": samples(LISTS),
    "equal at first": samples(LISTS[1:]),
    "list of inputs": Case(
        net(lambda m, pair: m.fc(pair[0]) * m.fc(pair[1]).tanh(), fc=(2, 3)),
        [(torch.randn(n, 2).double(), torch.randn(n, 2).double()) for n in (4, 3, 2)],
        loss=lambda model, batch: squares(model(list(batch))),
    ),
    "list_of_lengths": Case(  # numbers may be samples as tensors may
        lambda: Packs(packs, **inside(nn.GRU).model()._modules),
        *(PADDED, "items of input lengths may be samples"),
        loss=lambda model, batch: squares(model(batch[0], batch[1].tolist())),
    ),
    "graphs": Case(
        net(graphs, nodes=(3, 3), edges=(3, 3), head=(3, 3)),
        [some_graphs(*n) for n in ([2, 4, 3], [3, 3], [1, 5, 2, 4], [3])],
        alone=lambda b: [graph_of(b, i) for i in range(int(b[2].max()) + 1)],
        kwargs=dict(take=graph_of),
    ),
    "graphs of take": Case(
        net(weighted, nodes=(3, 3), edges=(3, 3), head=(3, 3)),
        [with_weights(*n) for n in ([2, 4, 3], [3, 3], [1, 5, 2, 4], [3])],
        alone=lambda b: [weighted_one(b, i) for i in range(len(b[4]))],
        kwargs=dict(take=take.graphs),
    ),
    "graphs, not taken": Case(
        net(graphs, nodes=(3, 3), edges=(3, 3), head=(3, 3)),
        *([some_graphs(2, 4, 3)], "opacus_ext.take.graphs"),
        alone=lambda b: [graph_of(b, i) for i in range(3)],
    ),
}
GRAPHS = dict(zip(("x", "edge_index", "batch"), some_graphs(2, 3)))


def test_graphs_by_keyword():
    one = take.graphs(GRAPHS, 1)
    expected = graph_of(tuple(GRAPHS.values()), 1)
    assert all(map(torch.equal, one.values(), expected))


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


@every(packed=PACKED, outside=OUTSIDE, given=GIVEN)
def test_steps(case, mode, wrap):
    run(case, mode, wrap)


# -- recurrent layers as models -------------------------------------------------------

D, H, T = 3, 2, 4


def parts(output):
    y, state = output
    return [y, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize(
    "layers, length, mode",
    [(1, T, "ghost_bk"), (2, T, "hooks"), (2, 1, "ghost_bk"), (2, T, "scan")],
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, nn.LSTM, nn.GRU])
def test_states(kind, layers, first, length, mode):
    """Called with no state, and with the one that was returned."""
    build = net(
        lambda m, x, state=None: m.rnn(x, state),
        rnn=lambda: kind(D, H, num_layers=layers, batch_first=first),
    )
    torch.manual_seed(0)
    model, plain = build(), build()

    def given_back(m, x):
        x = x if first else x.transpose(0, 1)
        y, state = m(x)
        plain.load_state_dict(model.state_dict())
        for own, other in zip(parts((y, state)), parts(plain(x))):
            torch.testing.assert_close(own, other)
        detached = [s.detach() for s in parts((y, state))[1:]]
        again = m(x, tuple(detached) if len(detached) > 1 else detached[0])
        return sum(
            squares(s.transpose(0, d))
            for out in ((y, state), again)
            for s, d in zip(parts(out), (0 if first else 1, 1, 1))
        )

    batches = rows(4, 1, 3, 2, T=length, d=D)
    steps(model, batches, mode, loss_fn=given_back, batch_first=first)
