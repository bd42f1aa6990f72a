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
from tests.adapter.common import steps
from tests.common import squares

# Inputs are taken apart alike in all modes, which run samples at once or one by one.
every_mode = pytest.mark.parametrize("mode", ("ghost_bk", "scan"))


@pytest.fixture(autouse=True)
def double():
    """Opacus's DPLSTM makes states of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_steps(mode, model, batches, loss_fn, alone, **kwargs):
    steps(model, batches, mode, loss_fn=loss_fn, alone=alone, **kwargs)


# -- packed sequences ----------------------------------------------------------------

LENGTHS = [1, 4, 2, 5], [3, 3, 3, 3], [4, 1, 4], [1, 1], [5, 3, 3, 1, 2], [4]


def padded_batches():
    return [(torch.randn(len(n), 5, 2), torch.tensor(n)) for n in LENGTHS]


def rows(batch):
    return [tuple(x[b : b + 1] for x in batch) for b in range(len(batch[0]))]


def pack(x, lengths):
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def pad(packed, length=None):
    return pad_packed_sequence(packed, batch_first=True, total_length=length)[0]


def states(state):
    """``[layers, B, width]``, maybe two, as ``[B, -1]``"""
    each = state if isinstance(state, tuple) else (state,)
    return torch.cat([x.transpose(0, 1).flatten(1) for x in each], dim=1)


KINDS = [nn.RNN, nn.LSTM, nn.GRU, DPRNN, DPLSTM, DPGRU]


class Packs(nn.Module):
    """Packs what is padded, and pads again; an initial state that is computed."""

    def __init__(self, kind, **kwargs):
        super().__init__()
        self.before, self.start = nn.Linear(2, 2), nn.Linear(2, 2 * 3)
        self.rnn = kind(2, 3, bidirectional=True)

    def forward(self, x, lengths):
        start = self.start(x[:, 0]).unflatten(1, (2, 3)).transpose(0, 1)
        two = isinstance(self.rnn, (nn.LSTM, DPLSTM))
        packed = pack(self.before(x), lengths)
        output, state = self.rnn(packed, (start, start.tanh()) if two else start)
        return torch.cat([pad(output, 5).flatten(1), states(state)], dim=1)


def on_tensors(model, batch):
    return squares(model(*batch))


@pytest.mark.parametrize(
    "mode, kind",
    [*(("ghost_bk", kind) for kind in KINDS)]
    + [("hooks", DPLSTM), ("ghost", nn.LSTM), ("scan", DPGRU), ("hooks", nn.GRU)],
)
def test_packed_inside(mode, kind):
    check_steps(mode, Packs(kind), padded_batches(), on_tensors, rows)


@every_mode
def test_several_sequences_in_a_sample(mode):
    """Documents of three sentences of several lengths, the same in each."""

    class Documents(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.GRU(2, 3, num_layers=2, bidirectional=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            lengths = torch.tensor([2, 4, 1]).repeat(len(x))
            output, state = self.words(pack(x.flatten(0, 1), lengths))
            output = PackedSequence(self.head(output.data), *output[1:])
            output, state = pad(output, 4), state.transpose(0, 1)
            return torch.cat([output.flatten(1), state.flatten(1)], 1).view(len(x), -1)

    batches = [(torch.randn(n, 3, 4, 2),) for n in (4, 3, 1)]
    check_steps(mode, Documents(), batches, on_tensors, rows)


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


@pytest.mark.parametrize(
    "mode, kind",
    [("ghost_bk", nn.RNN), ("ghost_bk", DPLSTM), ("ghost", nn.LSTM)]
    + [("hooks", nn.LSTM), ("scan", DPLSTM)],
)
def test_packed_outside(mode, kind):
    model, batches = OnPacked(kind), padded_batches()
    check_steps(mode, model, batches, packed_loss, rows, take=take.packed)


def test_packed_outside_is_refused_without_help():
    with pytest.raises(Refused, match="packed is a PackedSequence.*take.packed"):
        check_steps("ghost_bk", OnPacked(nn.GRU), padded_batches(), packed_loss, rows)


# -- lists ---------------------------------------------------------------------------


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 3), nn.Linear(3, 2)

    def forward(self, sequences):
        packed = pack_sequence(sequences, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])


class Means(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def forward(self, sequences):
        return torch.stack([self.fc(x).tanh().mean(0) for x in sequences])


@every_mode
@pytest.mark.parametrize("model", [Sequences, Means])
def test_list_of_samples(mode, model):
    """Of several lengths; where these are equal at first it is told all the same."""
    batches = [[torch.randn(n, 2) for n in lengths] for lengths in LENGTHS]

    def loss_fn(m, batch):
        return squares(m(batch))

    def alone(batch):
        return [[x] for x in batch]

    for some in (batches, batches[1:]):
        check_steps(mode, model(), some, loss_fn, alone, take=take.items)


@every_mode
def test_list_of_inputs(mode):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 3)

        def forward(self, pair):
            return self.fc(pair[0]) * self.fc(pair[1]).tanh()

    def loss_fn(model, batch):
        return squares(model(list(batch)))

    batches = [(torch.randn(n, 2), torch.randn(n, 2)) for n in (4, 3, 2)]
    check_steps(mode, Two(), batches, loss_fn, rows)


@every_mode
def test_list_of_lengths(mode):
    """Numbers may be samples as tensors may."""

    def loss_fn(model, batch):
        return squares(model(batch[0], batch[1].tolist()))

    with pytest.raises(Refused, match="items of input lengths may be samples"):
        check_steps(mode, Packs(nn.GRU), padded_batches(), loss_fn, rows)


# -- take ----------------------------------------------------------------------------


class Graphs(nn.Module):
    """Node features ``[N, d]``, edges ``[2, E]`` and the graph of each node ``[N]``."""

    def __init__(self):
        super().__init__()
        self.nodes, self.edges, self.head = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, edges, graph):
        for _ in range(2):
            messages = self.edges(x)[edges[0]]
            x = (self.nodes(x).index_add(0, edges[1], messages)).tanh()
        count = int(graph.max()) + 1
        pooled = x.new_zeros(count, 3).index_add(0, graph, x)
        return self.head(pooled)


def graph_of(inputs, i):
    x, edges, graph = inputs
    if i > int(graph.max()):
        raise IndexError
    nodes = (graph == i).nonzero()[:, 0]
    own = edges[:, graph[edges[0]] == i] - nodes[0]
    return x[nodes], own, torch.zeros_like(nodes)


def graphs(sizes):
    x = torch.randn(sum(sizes), 3)
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    start, edges = 0, []
    for n in sizes:
        edges.append(start + torch.randint(n, (2, 2 * n)))
        start += n
    return x, torch.cat(edges, dim=1), graph


class Ragged(nn.Module):
    """Tokens ``[N]`` of all samples, and how many each has ``[B]``."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 2)

    def forward(self, ids, lengths):
        parts = self.table(ids).tanh().split(lengths.tolist())
        return self.head(torch.stack([part.mean(0) for part in parts]))


def tokens_of(inputs, i):
    ids, lengths = inputs
    start = int(lengths[:i].sum())
    return ids[start : start + int(lengths[i])], lengths[i : i + 1]


@every_mode
@pytest.mark.parametrize("what", ["graphs", "tokens"])
def test_take(mode, what):
    if what == "graphs":
        model, cut = Graphs(), graph_of
        batches = [graphs(sizes) for sizes in ([2, 4, 3], [3, 3], [1, 5, 2, 4], [3])]
    else:
        model, cut = Ragged(), tokens_of
        batches = [
            (torch.randint(7, (sum(sizes),)), torch.tensor(sizes))
            for sizes in ([2, 4, 3], [3, 3], [1, 5, 1, 4], [3])
        ]

    def alone(batch):
        size = int(batch[2].max()) + 1 if what == "graphs" else len(batch[1])
        return [cut(batch, i) for i in range(size)]

    check_steps(mode, model, batches, on_tensors, alone, take=cut)


# -- recurrent layers as models -------------------------------------------------------

D, H, T = 3, 2, 4
LAYERS = {"DPLSTM": DPLSTM, "DPGRU": DPGRU, "LSTM": nn.LSTM, "GRU": nn.GRU}


class Recurrent(nn.Module):
    def __init__(self, kind, layers, first):
        super().__init__()
        self.rnn = LAYERS[kind](D, H, num_layers=layers, batch_first=first)

    def forward(self, x, state=None):
        return self.rnn(x, state)


def parts(output):
    y, state = output
    return [y, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize(
    "layers, length, mode",
    [(1, T, "ghost_bk"), (2, T, "hooks"), (2, 1, "ghost_bk"), (2, T, "scan")],
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_states(kind, layers, first, length, mode):
    torch.manual_seed(0)
    dim = 0 if first else 1

    def given_back(model, x):
        """Twice: with no state, and with the one that was returned."""
        x = x if first else x.transpose(0, 1)
        y, state = model(x)
        for own, plain in zip(parts((y, state)), parts(plain_model()(x))):
            torch.testing.assert_close(own, plain)
        detached = [s.detach() for s in parts((y, state))[1:]]
        again = model(x, tuple(detached) if len(detached) > 1 else detached[0])
        return sum(
            squares(s.transpose(0, d))
            for out in ((y, state), again)
            for s, d in zip(parts(out), (dim, 1, 1))
        )

    model = Recurrent(kind, layers, first)
    plain = Recurrent(kind, layers, first).double()

    def plain_model():
        plain.load_state_dict(model.state_dict())
        return plain

    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(n, length, D, generator=generator).double() for n in (4, 1, 3, 2)
    ]
    steps(model, batches, mode, loss_fn=given_back, batch_first=first)
