"""nn.RNN, nn.LSTM, nn.GRU and their cells, through all of time."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from opacus import PrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)
from torch.utils.data import DataLoader, TensorDataset

from tests.common import (
    CRASHES,
    PerSample,
    assert_same,
    check,
    clipped_sum,
    every_mode,
    exact_or_refused,
    half_clipped,
    make_private,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    trainable,
    wrapped_or_not,
)

KINDS = ("tanh", "relu", "LSTM", "GRU")
USES = ("output", "last", "h", "c", "all")
SIZES = [(4, 1), (4, 4), (1, 3), (1, 1), (3, 6), (6, 3)]
every_kind = pytest.mark.parametrize("kind", KINDS)
sizes = pytest.mark.parametrize("B, T", SIZES)


def rnn(kind, features, width, **kwargs):
    if kind in ("tanh", "relu"):
        return nn.RNN(features, width, nonlinearity=kind, **kwargs)
    return getattr(nn, kind)(features, width, **kwargs)


def cell(kind, features, width, **kwargs):
    if kind in ("tanh", "relu"):
        return nn.RNNCell(features, width, nonlinearity=kind, **kwargs)
    return getattr(nn, f"{kind}Cell")(features, width, **kwargs)


def pick(output, state, use):
    """``output`` has the batch first; a state has it second."""
    h, c = state if isinstance(state, tuple) else (state, state)
    h, c = h.transpose(0, 1), c.transpose(0, 1)
    parts = {"output": output, "last": output[:, -1], "h": h, "c": c}
    if use == "all":
        return torch.cat([x.flatten(1) for x in parts.values()], dim=1)
    return parts[use]


class Recurrent(nn.Module):
    """Samples first, in and out; also the initial state ``[B, layers, width]``."""

    def __init__(self, kind, features=2, width=3, use="output", **kwargs):
        super().__init__()
        kwargs.setdefault("batch_first", True)
        self.rnn = rnn(kind, features, width, **kwargs)
        self.use = use

    def forward(self, x, *state):
        first = self.rnn.batch_first
        state = tuple(s.transpose(0, 1) for s in state)
        state = None if not state else state if len(state) == 2 else state[0]
        output, state = self.rnn(x if first else x.transpose(0, 1), state)
        return pick(output if first else output.transpose(0, 1), state, self.use)


class Between(nn.Module):
    """Layers before and after."""

    def __init__(self, kind, features=2, width=3, **kwargs):
        super().__init__()
        self.before = nn.Linear(2, features)
        self.inner = Recurrent(kind, features, width, **kwargs)
        wide = self.inner.rnn.proj_size or width
        self.after = nn.Linear(wide * (1 + self.inner.rnn.bidirectional), 2)

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


@st.composite
def layers(draw, kind):
    width = draw(st.integers(1, 3))
    kwargs = dict(
        features=draw(st.integers(1, 3)),
        width=width,
        use=draw(st.sampled_from(USES)),
        num_layers=draw(st.integers(1, 2)),
        bidirectional=draw(st.booleans()),
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
    )
    if kind == "LSTM":
        kwargs["proj_size"] = draw(st.integers(0, width - 1))
    return kwargs


def freeze_some(data, model):
    """Any of the parameters, not all."""
    names = [name for name, _ in model.named_parameters()]
    left = data.draw(st.sampled_from([names, names, names[1:], names[::2]]))
    for name, p in model.named_parameters():
        p.requires_grad = name in left or data.draw(st.booleans(), name)
    if not trainable(model):
        model.requires_grad_(True)


@every_mode
@wrapped_or_not
@every_kind
@given(N=st.integers(0, 4), T=st.integers(1, 4), data=st.data())
def test_recurrent(mode, wrap, kind, N, T, data):
    kwargs = data.draw(layers(kind))
    model = Recurrent(kind, **kwargs).double()
    freeze_some(data, model)
    x = torch.randn(N, T, kwargs["features"]).double()
    check(mode, wrap, model, x, square_loss)


@every_mode
@every_kind
@sizes
def test_between_layers(mode, kind, B, T):
    """The input needs a gradient; time first inside, where T = B tells nothing."""
    model = Between(kind, batch_first=B > T).double()
    check(mode, True, model, torch.randn(B, T, 2).double(), square_loss)


@every_mode
@every_kind
def test_last_layer_of_two_directions_from_the_last_step(mode, kind):
    """The reverse direction has made one step there, the others get no gradient."""
    for B, T in ((4, 4), (3, 5), (5, 3)):
        model = Between(kind, use="last", bidirectional=True, num_layers=2).double()
        check(mode, True, model, torch.randn(B, T, 2).double(), square_loss)


# -- uses of the output --------------------------------------------------------------


@every_mode
@every_kind
@pytest.mark.parametrize("use", USES)
def test_use(mode, kind, use):
    model = Recurrent(kind, use=use, num_layers=2, bidirectional=True).double()
    check(mode, True, model, torch.randn(4, 3, 2).double(), square_loss)


@every_mode
@pytest.mark.parametrize("proj_size", [0, 1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_only_the_cell_state(mode, proj_size, bidirectional):
    """At the last step neither output gate nor the last projection gets a gradient."""
    model = Recurrent(
        "LSTM", use="c", proj_size=proj_size, bidirectional=bidirectional
    ).double()
    for B, T in ((4, 3), (4, 1), (3, 3)):
        check(mode, True, model, torch.randn(B, T, 2).double(), square_loss)


@every_mode
@every_kind
@pytest.mark.parametrize("B, num_layers", [(4, 1), (3, 2), (2, 2), (2, 4), (1, 2)])
def test_layer_as_the_model(mode, kind, B, num_layers):
    """Its outputs are a tuple; the states ``[layers, B, width]`` may look batched."""
    model = rnn(kind, 2, 3, num_layers=num_layers, batch_first=True).double()

    def loss_fn(m, x):
        return squares(pick(*m(x), "all"))

    x = torch.randn(B, 3, 2).double()
    exact_or_refused(mode, True, model, x, loss_fn, ["the model", "l0"])


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("kind", ["tanh", "LSTM"])
def test_unused(mode, wrap, kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = rnn(kind, 2, 3), rnn(kind, 2, 3)
            self.dropped = rnn(kind, 2, 3)

        def forward(self, x):
            x = x.transpose(0, 1)
            self.dropped(x)
            return self.used(x)[0].transpose(0, 1)

    check(mode, wrap, Model().double(), torch.randn(4, 3, 2).double(), square_loss)


@every_mode
@pytest.mark.parametrize("kind", KINDS)
def test_output_of_some_samples_only(mode, kind):
    """Masked losses: a row whose gradient is zero, a sample without any."""
    model = Between(kind, num_layers=2).double()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 0]]).double()
    batch = torch.randn(4, 3, 2).double(), mask

    def loss_fn(m, batch):
        return squares(m(batch[0]) * batch[1][..., None])

    check(mode, True, model, batch, loss_fn)


# -- parameters ----------------------------------------------------------------------


@every_mode
@every_kind
@pytest.mark.parametrize("frozen", ["weight_hh", "weight_ih", "bias", "_l0", "rnn"])
def test_frozen(mode, kind, frozen):
    """The gradient goes on to the layer before."""
    model = Between(kind, num_layers=2, bidirectional=True).double()
    for name, p in model.named_parameters():
        p.requires_grad = frozen not in name
    check(mode, True, model, torch.randn(4, 3, 2).double(), square_loss)


@every_mode
@pytest.mark.parametrize("frozen", ["weight_hr", "weight_hh", "weight_ih"])
def test_frozen_beside_a_projection(mode, frozen):
    model = Recurrent("LSTM", proj_size=2, num_layers=2).double()
    for name, p in model.named_parameters():
        p.requires_grad = frozen not in name
    check(mode, True, model, torch.randn(4, 3, 2).double(), square_loss)


@every_mode
@every_kind
def test_two_layers_one_weight(mode, kind):
    """Input weights and states of two layers are one, biases their own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = rnn(kind, 3, 3, batch_first=True)
            self.two = rnn(kind, 3, 3, batch_first=True)
            self.two.weight_ih_l0 = self.one.weight_ih_l0
            self.two.weight_hh_l0 = self.one.weight_hh_l0

        def forward(self, x):
            return self.two(self.one(x)[0])[0]

    check(mode, True, Model().double(), torch.randn(4, 3, 3).double(), square_loss)


@every_mode
def test_input_and_state_weights_are_one(mode):
    """One parameter in both places of one layer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 3, batch_first=True)
            self.rnn.weight_hh_l0 = self.rnn.weight_ih_l0
            self.rnn.bias_hh_l0 = self.rnn.bias_ih_l0

        def forward(self, x):
            return self.rnn(x)[0]

    check(mode, True, Model().double(), torch.randn(4, 3, 3).double(), square_loss)


# -- called several times ------------------------------------------------------------


class Again(nn.Module):
    def __init__(self, kind, how):
        super().__init__()
        self.rnn, self.how = rnn(kind, 3, 3, batch_first=True), how

    def forward(self, x):
        if self.how == "stacked":
            return self.rnn(self.rnn(x)[0])[0]
        if self.how == "two inputs":
            return self.rnn(x)[0][:, -1] * self.rnn(x.flip(1)[:, :2])[0][:, -1]
        first, state = self.rnn(x[:, :2])
        if self.how == "detached":
            state = torch.utils._pytree.tree_map(torch.detach, state)
        return torch.cat([first, self.rnn(x[:, 2:], state)[0]], dim=1)


@every_mode
@every_kind
@pytest.mark.parametrize("how", ["stacked", "two inputs", "chunks", "detached"])
def test_called_twice(mode, kind, how):
    model = Again(kind, how).double()
    for T in (4, 5):
        check(mode, True, model, torch.randn(4, T, 3).double(), square_loss)


class Loop(nn.Module):
    """A cell, step by step."""

    def __init__(self, kind, features=2, width=3, start=False, **kwargs):
        super().__init__()
        self.cell = cell(kind, features, width, **kwargs)
        self.start = nn.Linear(features, width) if start else None

    def forward(self, x):
        state = None
        if self.start is not None:
            state = self.start(x[:, 0]).tanh()
            state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        outputs = []
        for t in range(x.size(1)):
            state = self.cell(x[:, t], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, dim=1)


@every_mode
@wrapped_or_not
@every_kind
@given(
    N=st.integers(0, 4),
    T=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    bias=st.booleans(),
    start=st.booleans(),
    data=st.data(),
)
def test_cell(mode, wrap, kind, N, T, sizes, bias, start, data):
    model = Loop(kind, *sizes, start=start, bias=bias).double()
    freeze_some(data, model)
    check(mode, wrap, model, torch.randn(N, T, sizes[0]).double(), square_loss)


@every_mode
@every_kind
def test_many_steps(mode, kind):
    """Thirty uses of one weight by a cell; as many rows of one use by the layer."""
    x = torch.randn(3, 30, 2).double()
    check(mode, True, Loop(kind).double(), x, square_loss)
    check(mode, True, Recurrent(kind).double(), x, square_loss)


# -- initial state -------------------------------------------------------------------


@every_mode
@wrapped_or_not
@every_kind
@pytest.mark.parametrize("bidirectional", [False, True])
def test_initial_state_given(mode, wrap, kind, bidirectional):
    count = 2 * (1 + bidirectional)
    model = Recurrent(
        kind, use="all", num_layers=2, bidirectional=bidirectional, batch_first=False
    ).double()
    state = [torch.randn(4, count, 3).double() for _ in range(1 + (kind == "LSTM"))]
    x = torch.randn(4, 5, 2).double()
    check(mode, wrap, model, (x, *state), square_loss)


@every_mode
@every_kind
def test_initial_state_computed(mode, kind):
    """A decoder that starts from what an encoder ended with."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = rnn(kind, 2, 3, batch_first=True, bidirectional=True)
            self.bridge = nn.Linear(3, 3)
            self.decoder = rnn(kind, 2, 3, batch_first=True, num_layers=2)

        def forward(self, x):
            _, state = self.encoder(x)
            if isinstance(state, tuple):
                state = tuple(self.bridge(s).tanh() for s in state)
            else:
                state = self.bridge(state).tanh()
            return self.decoder(x[:, 1:], state)[0]

    for B, T in ((4, 3), (4, 5), (2, 3)):
        x = torch.randn(B, T, 2).double()
        check(mode, True, Model().double(), x, square_loss)


class Start(nn.Module):
    """A trained vector, the same for all samples."""

    def __init__(self, count):
        super().__init__()
        self.start = nn.Parameter(torch.randn(count, 1, 3))

    def forward(self, x):
        return self.start.expand(-1, len(x), -1)


class Trained(nn.Module):
    """An initial state that is trained: a parameter, or the output of a module."""

    def __init__(self, kind, how, num_layers=1):
        super().__init__()
        self.rnn = rnn(kind, 2, 3, batch_first=True, num_layers=num_layers)
        self.how = how
        if how == "parameter":
            self.start = nn.Parameter(torch.randn(num_layers, 1, 3))
        elif how == "module":
            self.start = Start(num_layers)
        else:
            self.start = nn.Embedding(num_layers, 3)

    def forward(self, x):
        if self.how == "parameter":
            h = self.start.expand(-1, len(x), -1)
        elif self.how == "module":
            h = self.start(x)
        else:
            h = self.start(torch.arange(self.rnn.num_layers))
            h = h.unsqueeze(1).expand(-1, len(x), -1)
        h = h.contiguous()
        return self.rnn(x, (h, h.tanh()) if isinstance(self.rnn, nn.LSTM) else h)[0]


@every_mode
@every_kind
@pytest.mark.parametrize("B, num_layers", [(4, 1), (4, 2), (2, 2), (1, 1)])
def test_initial_state_is_a_parameter(mode, kind, B, num_layers):
    """Of the model itself, which is then run sample by sample."""
    model = Trained(kind, "parameter", num_layers).double()
    x = torch.randn(B, 3, 2).double()
    exact_or_refused(mode, True, model, x, square_loss, ["start"])


@every_mode
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("how", ["module", "embedding"])
@pytest.mark.parametrize("B, num_layers", [(4, 1), (4, 2), (2, 2), (1, 1)])
def test_initial_state_of_a_module(mode, kind, how, B, num_layers):
    """``[layers, B, width]``, where nothing tells that B is the batch."""
    model = Trained(kind, how, num_layers).double()
    x = torch.randn(B, 3, 2).double()
    exact_or_refused(mode, True, model, x, square_loss, ["start"])


@every_mode
@pytest.mark.parametrize("table", ["embedding", "buffer"])
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (1, 3)])
def test_of_constants(mode, table, B, T):
    """Prompts from an LSTM over positions, ``[1, T, d]``, the same for all samples."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.lstm = nn.Linear(3, 3), nn.LSTM(3, 3, batch_first=True)
            if table == "embedding":
                self.table = nn.Embedding(T, 3)
            else:
                self.register_buffer("table", torch.randn(T, 3))

        def forward(self, x):
            made = isinstance(self.table, nn.Module)
            prompt = self.table(torch.arange(T)) if made else self.table
            prompt = self.lstm(prompt.unsqueeze(0))[0].expand(len(x), -1, -1)
            return torch.cat([prompt, self.fc(x)], dim=1)

    x = torch.randn(B, 2, 3).double()
    names = ["table", "lstm"]
    exact_or_refused(mode, True, Model().double(), x, square_loss, names)


# -- packed sequences ----------------------------------------------------------------

LENGTHS = {
    "sorted": [5, 3, 3, 1],
    "unsorted": [1, 4, 2, 5],
    "ones": [1, 1, 1],
    "equal": [3, 3, 3],
    "one": [4],
    "as many as samples": [4, 1, 4, 2],
}
every_length = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))


def pack(x, lengths, enforce_sorted=False):
    return pack_padded_sequence(
        x, lengths, batch_first=True, enforce_sorted=enforce_sorted
    )


def unpack(packed, length):
    return pad_packed_sequence(packed, batch_first=True, total_length=length)[0]


class Packs(nn.Module):
    """Packs, runs, and pads again."""

    def __init__(self, kind, use="output", enforce_sorted=False, **kwargs):
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.rnn = rnn(kind, 2, 3, **kwargs)
        self.use, self.enforce_sorted = use, enforce_sorted

    def forward(self, x, lengths):
        packed = pack(self.before(x), lengths, self.enforce_sorted)
        output, state = self.rnn(packed)
        return pick(unpack(output, x.size(1)), state, self.use)


@every_mode
@every_kind
@every_length
def test_packed_inside(mode, kind, lengths):
    model = Packs(kind, use="all", bidirectional=True, num_layers=2).double()
    batch = torch.randn(len(lengths), 5, 2).double(), torch.tensor(lengths)
    check(mode, True, model, batch, square_loss)


@every_mode
@every_kind
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    use=st.sampled_from(USES),
    bidirectional=st.booleans(),
    enforce_sorted=st.booleans(),
    num_layers=st.integers(1, 2),
)
def test_packed(mode, kind, lengths, enforce_sorted, **kwargs):
    if enforce_sorted:
        lengths.sort(reverse=True)
    model = Packs(kind, enforce_sorted=enforce_sorted, **kwargs).double()
    batch = torch.randn(len(lengths), 4, 2).double(), torch.tensor(lengths)
    check(mode, True, model, batch, square_loss)


@every_mode
@pytest.mark.parametrize("proj_size", [1, 2])
def test_packed_with_projection_and_state(mode, proj_size):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(2, 3, proj_size=proj_size, bidirectional=True)
            self.start = nn.Linear(2, 2 * (proj_size + 3))

        def forward(self, x, lengths):
            start = self.start(x[:, 0]).tanh().unflatten(1, (2, -1)).transpose(0, 1)
            state = start.split([proj_size, 3], dim=2)
            state = tuple(s.contiguous() for s in state)
            output, (h, c) = self.rnn(pack(x, lengths), state)
            h, c = h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1)
            output = unpack(output, x.size(1)).flatten(1)
            return torch.cat([output, h, c], dim=1)

    for lengths in LENGTHS.values():
        batch = torch.randn(len(lengths), 5, 2).double(), torch.tensor(lengths)
        check(mode, True, Model().double(), batch, square_loss)


class OnPacked(nn.Module):
    """The model's input is packed already, and maybe its output."""

    def __init__(self, kind, what):
        super().__init__()
        self.rnn = rnn(kind, 2, 3, bidirectional=True)
        self.head = nn.Linear(3, 2)
        self.what = what

    def forward(self, packed):
        if self.what == "data":  # a layer on the packed rows themselves
            data = self.head(packed.data.repeat(1, 2)[:, :3])
            packed = PackedSequence(data, *packed[1:])
        output, state = self.rnn(packed)
        h = state[0] if isinstance(state, tuple) else state
        if self.what == "state":
            return self.head(h.transpose(0, 1))
        return output


@every_mode
@pytest.mark.parametrize("kind", ["tanh", "LSTM", "GRU"])
@every_length
@pytest.mark.parametrize("what", ["output", "state"])
def test_packed_outside(mode, kind, lengths, what):
    model = OnPacked(kind, what).double()
    if what == "output":
        model.head = None
    batch = torch.randn(len(lengths), 5, 2).double(), torch.tensor(lengths)

    def loss_fn(m, batch):
        x, lengths = batch
        output = m(pack(x, lengths))
        return squares(output if what == "state" else unpack(output, 5))

    check(mode, True, model, batch, loss_fn)


@every_mode
@every_length
def test_layer_on_packed_rows(mode, lengths):
    """A Linear on ``packed.data``: rows of samples of different lengths."""
    model = OnPacked("LSTM", "data").double()
    model.head = nn.Linear(3, 2).double()
    batch = torch.randn(len(lengths), 5, 2).double(), torch.tensor(lengths)

    def loss_fn(m, batch):
        return squares(unpack(m(pack(*batch)), 5))

    exact_or_refused(mode, True, model, batch, loss_fn, ["head", "rnn"])


# -- where the batch is --------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("kind", ["tanh", "LSTM"])
@sizes
def test_model_that_takes_time_first(mode, kind, B, T):
    """``make_private(batch_first=False)``, as for Opacus's own layers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.Linear(2, 2), nn.Linear(3, 2)
            self.rnn = rnn(kind, 2, 3)

        def forward(self, x):
            return self.after(self.rnn(self.before(x))[0])

    def loss_fn(m, x):
        return squares(m(x.transpose(0, 1)).transpose(0, 1))

    model, x = Model().double(), torch.randn(B, T, 2).double()
    grads = oracle(model, x, loss_fn)
    c = half_clipped(grads)
    private = make_private(
        model, mode, True, batch_size=B, max_grad_norm=c, batch_first=False
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    private.step(x, loss_fn)
    got = {n: (before[n] - p.detach()) * B for n, p in model.named_parameters()}
    assert_same(got, clipped_sum(grads, "flat", c))


@every_mode
@sizes
def test_time_first_without_saying_so(mode, B, T):
    """
    The same without saying so is not wrong in silence, but where T = 1: that is one
    sample of B steps, and "hooks" sees no loss that says otherwise.
    """
    if T == 1 and mode == "hooks":
        return
    model = nn.LSTM(2, 3).double()

    def loss_fn(m, x):
        return squares(m(x.transpose(0, 1))[0].transpose(0, 1))

    x = torch.randn(B, T, 2).double()
    try:
        check(mode, True, model, x, loss_fn)
    except AssertionError:
        raise
    except Exception as error:
        assert not isinstance(error, CRASHES), error


@every_mode
@every_kind
def test_sample_by_sample(mode, kind):
    """Unbatched inputs ``[T, F]`` in a loop."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn(kind, 2, 3)

        def forward(self, x):
            return torch.stack([self.rnn(sample)[0] for sample in x])

    x = torch.randn(4, 3, 2).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["rnn"])


@every_mode
@pytest.mark.parametrize("B, k", [(4, 3), (4, 4), (1, 3), (2, 4)])
def test_flattened(mode, B, k):
    """k sequences a sample, ``[B * k, T, F]``: sentences of a document."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(2, 2)
            self.words = nn.GRU(2, 3, batch_first=True)
            self.sentences = nn.LSTM(3, 2, batch_first=True)

        def forward(self, x):
            _, h = self.words(self.before(x).flatten(0, 1))
            return self.sentences(h[0].unflatten(0, x.shape[:2]))[0]

    x = torch.randn(B, k, 3, 2).double()
    check(mode, True, Model().double(), x, square_loss)


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("kind", ["tanh", "LSTM"])
def test_steps(mode, wrap, kind):
    """Batches of all sizes, one after the other, the empty one included."""
    model = Between(kind, num_layers=2).double()
    private = make_private(model, mode, wrap, batch_size=4, max_grad_norm=0.5)
    for B, T in ((4, 3), (3, 4), (4, 4), (1, 3), (3, 3), (0, 3), (4, 1), (2, 6)):
        x = torch.randn(B, T, 2).double()
        clean = Between(kind, num_layers=2).double()
        clean.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(clean, x, square_loss), "flat", 0.5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        private.step(x, square_loss)
        got = {n: (before[n] - p.detach()) * 4 for n, p in model.named_parameters()}
        assert_same(got, expected, message=f"B={B}, T={T}")


# -- norms ---------------------------------------------------------------------------


def norms_in(mode, model, x, loss_fn):
    private = make_private(copy.deepcopy(model), mode, batch_size=len(x))
    private.backward(x, loss_fn)
    if mode == "hooks":
        params = trainable(private.module)
        return norms_of({n: p.grad_sample for n, p in params.items()})
    return private.handle.per_sample_gradient_norms


@every_mode
@every_kind
def test_norm_through_time(mode, kind):
    """
    The loss looks at the last step, and the gradient goes back through all of them.
    Where only the last step's product is counted, the norm comes out too small.
    """
    model = Recurrent(kind, use="last").double()
    for p in model.parameters():
        nn.init.uniform_(p, 0.1, 0.3)  # so that the steps' gradients add up
    x = torch.rand(4, 6, 2).double()
    grads = oracle(model, x, square_loss)
    norms = norms_of(grads)

    def last_step_only(m, x):
        with torch.no_grad():
            _, state = m.rnn(x[:, :-1])
        return squares(m.rnn(x[:, -1:], state)[0][:, -1])

    truncated = norms_of(oracle(model, x, last_step_only))
    assert (truncated < 0.9 * norms).all()
    got = norms_in(mode, model, x, square_loss)
    torch.testing.assert_close(got, norms, rtol=1e-10, atol=0)
    # A C between the two clips only if the norm is the true one.
    c = float((truncated / norms).max().sqrt() * norms.min())
    check(mode, True, model, x, square_loss, max_grad_norm=c)
    check(mode, True, model, x, square_loss, max_grad_norm=c / 100)


@every_mode
@pytest.mark.parametrize("kind", ["tanh", "LSTM", "GRU"])
@pytest.mark.parametrize("build", [Recurrent, Loop])
def test_norm_counts_both_biases(mode, kind, build):
    """``b_ih`` and ``b_hh`` are two parameters, though their gradients are alike."""
    model = build(kind).double()
    for name, p in model.named_parameters():
        p.requires_grad = "bias" in name
    x = torch.randn(4, 3, 2).double()
    grads = oracle(model, x, square_loss)
    norms = norms_of(grads)
    one, two = grads.values()
    if kind != "GRU":
        assert torch.allclose(one, two)
        assert torch.allclose(norms, 2**0.5 * one.norm(dim=1))
    got = norms_in(mode, model, x, square_loss)
    torch.testing.assert_close(got, norms, rtol=1e-10, atol=0)
    c = float(norms.min()) / 1.2  # above one bias's norm, below that of both
    check(mode, True, model, x, square_loss, max_grad_norm=c)
    alone = run_mode(mode, True, model, x[:1], square_loss, max_grad_norm=c)
    norm = norms_of({n: g[None] for n, g in alone.items()})
    assert float(norm) == pytest.approx(c, rel=1e-4)


@every_mode
@every_kind
def test_loss_that_is_a_mean_over_time(mode, kind):
    model = Between(kind).double()
    x = torch.randn(4, 5, 2).double()

    def loss_fn(m, x):
        return m(x).square().mean((1, 2))

    norms = norms_of(oracle(model, x, loss_fn))
    got = norms_in(mode, model, x, loss_fn)
    torch.testing.assert_close(got, norms, rtol=1e-10, atol=0)
    check(mode, True, model, x, loss_fn)


# -- the stand-in --------------------------------------------------------------------


def leaves(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if x is not None]


def assert_equal(got, expected):
    got, expected = leaves(got), leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def compare(model, *args):
    """Outputs and all gradients of a private layer, beside those of its own forward."""
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    assert "forward" in vars(model) and "forward" not in vars(plain)
    results = []
    for layer in (plain, model):
        tensors = [x for x in leaves(args) if x.is_floating_point()]
        tensors = [x.requires_grad_() for x in tensors if x.is_leaf]
        output = layer.forward(*args)
        scalar = sum(squares(x).sum() for x in leaves(output) if x.is_floating_point())
        wanted = tensors + list(layer.parameters())
        results.append((output, torch.autograd.grad(scalar, wanted)))
    assert type(results[0][0]) is type(results[1][0])
    assert_equal(results[1], results[0])


@every_kind
@given(T=st.integers(1, 4), B=st.integers(1, 4), data=st.data())
def test_output_is_that_of_the_layer(kind, T, B, data):
    kwargs = data.draw(layers(kind))
    del kwargs["use"]
    features, width = kwargs.pop("features"), kwargs.pop("width")
    model = rnn(kind, features, width, **kwargs).double()
    how = data.draw(st.sampled_from(["padded", "packed", "sorted", "unbatched"]))
    x = torch.randn(B, T, features).double()
    if how == "padded":
        x = x if kwargs["batch_first"] else x.transpose(0, 1).contiguous()
    elif how == "unbatched":
        x = x[0].clone()
    else:
        lengths = [data.draw(st.integers(1, T)) for _ in range(B)]
        if how == "sorted":
            lengths.sort(reverse=True)
        x = pack(x, torch.tensor(lengths), how == "sorted")
    if not data.draw(st.booleans(), "state"):
        compare(model, x)
        return
    count = kwargs["num_layers"] * (1 + kwargs["bidirectional"])
    h = torch.randn(count, B, kwargs.get("proj_size") or width).double()
    c = torch.randn(count, B, width).double()
    if how == "unbatched":
        h, c = h[:, 0].clone(), c[:, 0].clone()
    compare(model, x, (h, c) if kind == "LSTM" else h)


@every_kind
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("given_state", [True, False])
def test_output_is_that_of_the_cell(kind, bias, batched, given_state):
    model = cell(kind, 2, 3, bias=bias).double()
    x, h, c = (torch.randn(4, n).double() for n in (2, 3, 3))
    if not batched:
        x, h, c = x[0].clone(), h[0].clone(), c[0].clone()
    state = (h, c) if kind == "LSTM" else h
    compare(model, x, *([state] if given_state else []))


@every_kind
def test_output_of_an_empty_batch(kind):
    model = rnn(kind, 2, 3, num_layers=2, bidirectional=True).double()
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    x = torch.zeros(5, 0, 2).double()
    assert_equal(model.forward(x), plain(x))


@pytest.mark.parametrize("kind", ["tanh", "LSTM", "GRU"])
@pytest.mark.parametrize("dropout", [0.5, 1.0])
def test_dropout_between_layers(kind, dropout):
    """Drawn as torch draws it; off in evaluation."""
    model = rnn(kind, 2, 4, num_layers=3, dropout=dropout).double()
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    x = torch.randn(5, 4, 2).double()
    outputs = []
    for layer in (plain, model):
        torch.manual_seed(3)
        outputs.append(layer.forward(x))
    assert_equal(outputs[1], outputs[0])
    model.eval()
    assert_equal(model.forward(x), plain.eval()(x))


@every_mode
@pytest.mark.parametrize("kind", ["tanh", "LSTM"])
def test_gradient_under_dropout(mode, kind):
    """The mask of the loss is the mask of the gradient."""
    model = Recurrent(kind, 2, 8, num_layers=2, dropout=0.5).double()
    x = torch.randn(4, 3, 2).double()

    def loss_fn(m, batch):
        torch.manual_seed(5)
        return square_loss(m, batch)

    plain = copy.deepcopy(model)
    loss_fn(plain, x).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    got = run_mode(mode, True, model, x, loss_fn, max_grad_norm=1e9)
    assert_same(got, expected)


@pytest.mark.parametrize("cls", [nn.RNN, nn.LSTM, nn.GRU])
def test_evaluation_runs_the_layers_own_forward(cls, monkeypatch):
    calls, forward = [], cls.forward

    def spy(self, *args):
        calls.append(self)
        return forward(self, *args)

    monkeypatch.setattr(cls, "forward", spy)
    model = cls(2, 3).double()
    x = torch.randn(4, 5, 2).double()
    expected = forward(model, x)
    make_private(model, "ghost_bk", False, batch_size=5)
    assert_equal(model.forward(x), expected)
    assert calls == [model]  # once, to be compared with
    calls.clear()
    assert_equal(model.forward(x), expected)
    with torch.no_grad():  # dropout may be on
        assert_equal(model.forward(x), expected)
    model.eval()
    assert_equal(model.forward(x), expected)  # a gradient may be wanted
    assert not calls
    with torch.no_grad():
        got = model(x)
    assert calls == [model]
    assert all(torch.equal(a, b) for a, b in zip(leaves(got), leaves(expected)))


def wrong_inputs(kind):
    x, h = torch.randn(4, 3, 2), torch.randn(2, 4, 3)

    def state(h):
        return (h, h.clone()) if kind == "LSTM" else h

    yield "features", (torch.randn(4, 3, 5),)
    yield "one dim", (torch.randn(2),)
    yield "four dims", (torch.randn(1, 4, 3, 2),)
    yield "layers of the state", (x, state(h[:1]))
    yield "batch of the state", (x, state(h[:, :3]))
    yield "state of one sample", (x, state(h[:, :1]))
    yield "width of the state", (x, state(h[..., :2]))
    yield "state without batch", (x[:1], state(h[:, 0]))
    yield "state with a batch", (x[0], state(h[:, :1]))
    if kind == "LSTM":
        yield "only one state", (x, h)
        yield "another cell state", (x, (h, h[:, :1]))


@every_kind
def test_refuses_what_the_layer_refuses(kind):
    """Nothing is broadcast that the layer would not take."""
    model = rnn(kind, 2, 3, num_layers=2, batch_first=True)
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    taken = []
    for what, args in wrong_inputs(kind):
        with pytest.raises(Exception):
            plain(*args)
        try:
            model.forward(*args)
            taken.append(what)
        except Exception:
            pass
    assert not taken


def wrong_cell_inputs(kind):
    x, h = torch.randn(4, 2), torch.randn(4, 3)

    def state(h):
        return (h, h.clone()) if kind == "LSTM" else h

    yield "features", (torch.randn(4, 5),)
    yield "three dims", (torch.randn(3, 4, 2),)
    yield "state of one sample", (x, state(h[:1]))
    yield "batch of the state", (x, state(h[:3]))
    yield "state without batch", (x, state(h[0]))
    yield "state of three dims", (x, state(h[None]))
    yield "width of the state", (x, state(h[:, :2]))
    if kind == "LSTM":
        yield "another cell state", (x, (h, h[:1]))
        yield "a narrow cell state", (x, (h, h[:, :1]))


@every_kind
def test_refuses_what_the_cell_refuses(kind):
    model = cell(kind, 2, 3)
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    taken = []
    for what, args in wrong_cell_inputs(kind):
        try:
            plain(*args)
            continue  # torch takes it
        except Exception:
            pass
        try:
            model.forward(*args)
            taken.append(what)
        except Exception:
            pass
    assert not taken


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_cleanup(mode, wrap, kind):
    """The layer's own forward is back; names and values of its state never change."""
    model = Between(kind).double()
    layer = model.inner.rnn
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3, 2).double()
    expected = model(x).detach()
    private = make_private(model, mode, wrap, batch_size=4)
    held = private.module.state_dict()
    assert list(held) == [("_module." if wrap else "") + name for name in state]
    assert all(torch.equal(a, b) for a, b in zip(held.values(), state.values()))
    assert "forward" in vars(layer)
    private.step(x, square_loss)
    if wrap:
        assert private.handle.to_standard_module() is model
    else:
        private.handle.cleanup()
    assert "forward" not in vars(layer)
    assert layer.forward.__func__ is type(layer).forward
    assert not layer._forward_hooks
    model.load_state_dict(state)
    assert torch.equal(model(x), expected)
    check(mode, wrap, model, x, square_loss)


@every_mode
def test_failed_make_private_leaves_the_forward(mode):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.add_module("rnn", nn.LSTM(2, 3))
    with pytest.raises(Exception, match="BatchNorm"):
        make_private(model, mode, batch_size=4)
    assert "forward" not in vars(model.rnn)


@every_mode
def test_hook_of_the_user(mode):
    """It sees what the layer returns, and may change it."""
    seen = []
    model = Recurrent("LSTM").double()

    def hook(layer, args, output):
        seen.append(output)
        return output[0] * 2, output[1]

    model.rnn.register_forward_hook(hook)
    check(mode, True, model, torch.randn(4, 3, 2).double(), square_loss)
    assert isinstance(seen[-1][1], tuple)


@every_mode
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_subclass_with_a_forward_of_its_own(mode, kind):
    class Mine(getattr(nn, kind)):
        def forward(self, x, hx=None):
            output, state = super().forward(x, hx)
            return output * self.weight_hh_l0.mean(), state

    for before in (nn.Identity(), nn.Linear(2, 2)):
        model = nn.Sequential(before, Recurrent(kind))
        model[1].rnn = Mine(2, 3, batch_first=True)
        x = torch.randn(4, 3, 2).double()
        exact_or_refused(mode, True, model.double(), x, square_loss, ["rnn", "Mine"])


@every_mode
def test_subclass_that_keeps_the_forward(mode):
    class Mine(nn.GRU):
        pass

    model = Recurrent("GRU")
    model.rnn = Mine(2, 3, batch_first=True)
    check(mode, True, model.double(), torch.randn(4, 3, 2).double(), square_loss)


@every_mode
def test_weight_used_elsewhere(mode):
    """A penalty, or a product with a weight, outside of the layer."""

    class Model(Recurrent):
        def forward(self, x):
            return F.linear(super().forward(x), self.rnn.weight_hh_l0)

    x = torch.randn(4, 3, 2).double()
    names = ["rnn.weight_hh_l0"]
    exact_or_refused(mode, True, Model("tanh").double(), x, square_loss, names)


@every_mode
@every_kind
@pytest.mark.parametrize("what", ["output", "relu", "state", "input"])
def test_changed_in_place(mode, kind, what):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(2, 2)
            self.rnn = rnn(kind, 2, 3, batch_first=True)
            self.after = nn.Linear(3, 2)

        def forward(self, x):
            x = self.before(x)
            output, state = self.rnn(x)
            h = state[0] if isinstance(state, tuple) else state
            if what == "output":
                output.mul_(2.0)
            elif what == "relu":
                output = F.relu(output, inplace=True)
            elif what == "state":
                h.mul_(2.0)
            else:
                x.mul_(2.0)
            return self.after(output + h.transpose(0, 1))

    x = torch.randn(4, 3, 2).double()
    model = Model().double()
    try:
        oracle(model, x, square_loss)
    except RuntimeError:  # torch refuses it by itself
        with pytest.raises(Exception) as info:
            run_mode(mode, True, model, x, square_loss)
        assert not isinstance(info.value, CRASHES), info.value
        return
    names = ["before", "rnn", "after", "in place", "inplace"]
    exact_or_refused(mode, True, model, x, square_loss, names)


@every_mode
@pytest.mark.parametrize("cls", [DPRNN, DPLSTM, DPGRU])
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (1, 3)])
def test_what_opacus_has_in_its_place(mode, cls, B, T):
    model = Recurrent("LSTM")
    model.rnn = cls(2, 3, num_layers=2, bidirectional=True, batch_first=True)
    model = nn.Sequential(nn.Linear(2, 2), model).double()
    check(mode, True, model, torch.randn(B, T, 2).double(), square_loss)


# -- Opacus --------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.LSTM(2, 3), nn.GRU(2, 3), nn.RNN(2, 3)])
def test_validator_leaves_it_alone(layer):
    model = nn.ModuleDict({"rnn": layer, "other": nn.Linear(2, 2)})
    assert ModuleValidator.is_valid(model)
    assert ModuleValidator.validate(model, strict=True) == []
    assert ModuleValidator.fix(model).rnn.__class__ is type(layer)
    # What is wrong beside it is still found, and replaced.
    model["norm"] = nn.BatchNorm1d(16)
    assert not ModuleValidator.is_valid(model)
    fixed = ModuleValidator.fix(model)
    assert type(fixed.rnn) is type(layer) and isinstance(fixed.norm, nn.GroupNorm)
    assert nn.LSTM in ModuleValidator.VALIDATORS  # for who looks it up


@pytest.mark.parametrize("mode", ["functorch", "ew"])
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_other_modes_refuse_it(mode, wrap, layer):
    model = nn.ModuleDict({"rnn": layer(2, 3, batch_first=True)})
    before = list(model.rnn._forward_hooks)
    with pytest.raises(Exception, match=layer.__name__) as info:
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            criterion=PerSample(),
            data_loader=DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            wrap_model=wrap,
        )
    assert not isinstance(info.value, CRASHES), info.value
    assert "forward" not in vars(model.rnn)
    assert list(model.rnn._forward_hooks) == before


# -- numbers -------------------------------------------------------------------------


@every_mode
@every_kind
def test_float32(mode, kind):
    model = Between(kind, num_layers=2, bidirectional=True)
    check(mode, True, model, torch.randn(5, 8, 2), square_loss, tolerance=1e-4)


@every_mode
@wrapped_or_not
@every_kind
def test_bf16_autocast(mode, wrap, kind):
    """Against the oracle under the same autocast, within bf16's resolution."""
    model = Between(kind, features=4, width=8)
    x = torch.randn(6, 5, 2)

    def loss_fn(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(x)
        return squares(out.float())

    grads = oracle(model, x, loss_fn)
    c = half_clipped(grads)
    got = run_mode(mode, wrap, model, x, loss_fn, max_grad_norm=c)
    expected = clipped_sum(grads, "flat", c)
    assert all(total.dtype == torch.float32 for total in got.values())
    difference = norms_of({n: (got[n] - e)[None] for n, e in expected.items()})
    assert difference <= 0.03 * norms_of({n: e[None] for n, e in expected.items()})


@every_mode
@pytest.mark.parametrize("kind", ["tanh", "GRU"])
def test_chaotic(mode, kind):
    """
    Large weights and many steps, where rounding grows until two ways to compute the
    same states have nothing in common: trained all the same, and clipped.
    """
    model = Recurrent(kind, 8, 64, use="last")
    for part in model.rnn.weight_hh_l0.detach().split(64):
        nn.init.orthogonal_(part, 2.0)
    x = torch.randn(4, 200, 8)
    got = run_mode(mode, True, model, x, square_loss, max_grad_norm=1.0)
    assert all(total.isfinite().all() for total in got.values())
    assert 0 < norms_of({n: total[None] for n, total in got.items()}) <= 4 * 1.001


@every_mode
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_saturated_gates(mode, kind):
    """Gates at exactly 0 and 1, with gradients of zero: no NaN."""
    model = Recurrent(kind, use="all").double()
    for name, p in model.named_parameters():
        if "bias_ih" in name:
            nn.init.constant_(p, 1e3)
    check(mode, True, model, torch.randn(4, 3, 2).double(), square_loss)


@pytest.mark.parametrize("kind", ["LSTM", "DPLSTM"])
def test_grad_sample_in_packed_order(kind):
    """Where the model itself returns a packed sequence, rows come as it was packed."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            make = {"LSTM": nn.LSTM, "DPLSTM": DPLSTM}[kind]
            self.rnn = make(2, 3, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    model, lengths = Model().double(), [2, 4, 1, 3]
    x = torch.randn(4, 4, 2).double()

    def pack(x, lengths):
        return pack_padded_sequence(x, lengths, True, enforce_sorted=False)

    expected = []
    for b in (1, 3, 0, 2):  # longest first
        model.zero_grad()
        model(pack(x[b : b + 1], lengths[b : b + 1])).data.pow(2).sum().backward()
        expected.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    private = make_private(model, "hooks", batch_size=4, loss_reduction="sum")
    private.module(pack(x, lengths)).data.pow(2).sum().backward()
    for p, rows in zip(model.parameters(), zip(*expected)):
        torch.testing.assert_close(p.grad_sample, torch.stack(rows))
