"""nn.RNN, nn.LSTM, nn.GRU and their cells, through all of time."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.common import (
    CRASHES,
    MODES,
    PerSample,
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    make_private,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    trainable,
    wrapped,
)

KINDS = ("tanh", "relu", "LSTM", "GRU")
USES = ("output", "last", "h", "c", "all")
layer_modes = pytest.mark.parametrize("mode", (*MODES, "scan"))
every_kind = pytest.mark.parametrize("kind", KINDS)


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


@layer_modes
@every_kind
@given(N=st.integers(0, 4), T=st.integers(1, 4), data=st.data())
def test_recurrent(mode, kind, N, T, data):
    kwargs = data.draw(layers(kind))
    model = Recurrent(kind, **kwargs).double()
    freeze_some(data, model)
    x = torch.randn(N, T, kwargs["features"]).double()
    check(mode, True, model, x, square_loss)


# -- uses of the output --------------------------------------------------------------


@layer_modes
@pytest.mark.parametrize("proj_size", [0, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_only_the_cell_state(mode, proj_size, bidirectional):
    """At the last step neither output gate nor the last projection gets a gradient."""
    model = Recurrent(
        "LSTM", use="c", proj_size=proj_size, bidirectional=bidirectional
    ).double()
    for B, T in ((4, 3), (4, 1)):
        check(mode, True, model, torch.randn(B, T, 2).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("B, num_layers", [(4, 1), (2, 2), (1, 2)])
def test_layer_as_the_model(mode, kind, B, num_layers):
    """Its outputs are a tuple; the states ``[layers, B, width]`` may look batched."""
    model = rnn(kind, 2, 3, num_layers=num_layers, batch_first=True).double()

    def loss_fn(m, x):
        return squares(pick(*m(x), "all"))

    x = torch.randn(B, 3, 2).double()
    check(mode, True, model, x, loss_fn)


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM"])
def test_unused(mode, kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = rnn(kind, 2, 3), rnn(kind, 2, 3)
            self.dropped = rnn(kind, 2, 3)

        def forward(self, x):
            x = x.transpose(0, 1)
            self.dropped(x)
            return self.used(x)[0].transpose(0, 1)

    check(mode, True, Model().double(), torch.randn(4, 3, 2).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM"])
def test_output_of_some_samples_only(mode, kind):
    """Masked losses: a row whose gradient is zero, a sample without any."""
    model = Between(kind, num_layers=2).double()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 0]]).double()
    batch = torch.randn(4, 3, 2).double(), mask

    def loss_fn(m, batch):
        return squares(m(batch[0]) * batch[1][..., None])

    check(mode, True, model, batch, loss_fn)


# -- parameters ----------------------------------------------------------------------


@layer_modes
@pytest.mark.parametrize("kind", ["GRU"])
@pytest.mark.parametrize("frozen", ["weight_hh", "_l0", "rnn"])
def test_frozen(mode, kind, frozen):
    """The gradient goes on to the layer before."""
    model = Between(kind, num_layers=2, bidirectional=True).double()
    for name, p in model.named_parameters():
        p.requires_grad = frozen not in name
    check(mode, True, model, torch.randn(4, 3, 2).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("kind", ["tanh", "LSTM"])
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


@layer_modes
def test_weights_that_are_computed(mode):
    """From parameters, by weight_norm; one of them of each sample, by dropout."""

    class Dropped(Recurrent):
        def __init__(self, kind):
            super().__init__(kind)
            self.gain = nn.Linear(2, 1)

        def forward(self, x):
            w = self.rnn._flat_weights
            gain = self.gain(x[:, 0]).exp().squeeze()  # one a sample
            if gain.dim():  # the model itself takes a batch of one
                return torch.cat([self(y[None]) for y in x])
            h = x.new_zeros(1, 1, 3)
            out = torch._VF.gru(
                *(x, h, [w[0], w[1] * gain, *w[2:]], True, 1, 0.0, False, False, True)
            )
            return out[0]

    x = torch.randn(4, 3, 2).double()
    check(mode, True, Dropped("GRU").double(), x, square_loss)

    def build():
        model = Recurrent("LSTM", num_layers=2).double()
        nn.utils.parametrizations.weight_norm(model.rnn, "weight_hh_l0")
        return model

    model, alone = build(), build()
    alone.load_state_dict(model.state_dict())
    rows = []
    for b in range(4):
        alone.zero_grad()
        square_loss(alone, x[b : b + 1]).sum().backward()
        rows.append([p.grad.clone() for p in alone.parameters()])
    names = [name for name, _ in model.named_parameters()]
    grads = dict(zip(names, map(torch.stack, zip(*rows))))
    c = half_clipped(grads)
    private = make_private(model, mode, batch_size=4, max_grad_norm=c)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    private.step(x, square_loss)
    got = {n: (before[n] - p.detach()) * 4 for n, p in model.named_parameters()}
    assert_same(got, clipped_sum(grads, "flat", c))


@layer_modes
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


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
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


@layer_modes
@every_kind
@given(
    N=st.integers(0, 4),
    T=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    bias=st.booleans(),
    start=st.booleans(),
    data=st.data(),
)
def test_cell(mode, kind, N, T, sizes, bias, start, data):
    model = Loop(kind, *sizes, start=start, bias=bias).double()
    freeze_some(data, model)
    x = torch.randn(N, T, sizes[0]).double()
    check(mode, True, model, x, square_loss)


# -- initial state -------------------------------------------------------------------


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM"])
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


@layer_modes
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
    check(mode, True, Model().double(), x, square_loss)


# -- where the batch is --------------------------------------------------------------


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM"])
@pytest.mark.parametrize("B, T", [(4, 4), (1, 3), (3, 5)])
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


@layer_modes
@pytest.mark.parametrize("kind", ["GRU"])
def test_sample_by_sample(mode, kind):
    """Unbatched inputs ``[T, F]`` in a loop."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn(kind, 2, 3)

        def forward(self, x):
            return torch.stack([self.rnn(sample)[0] for sample in x])

    x = torch.randn(4, 3, 2).double()
    check(mode, True, Model().double(), x, square_loss)


@layer_modes
@pytest.mark.parametrize("B, k", [(4, 3), (4, 4)])
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


@layer_modes
@wrapped
@pytest.mark.parametrize("kind", ["LSTM"])
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


@layer_modes
@pytest.mark.parametrize("kind", ["tanh", "LSTM"])
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


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM"])
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


# -- beside the layer ----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)  # "scan" draws for one after the other
@pytest.mark.parametrize("kind", ["LSTM"])
def test_gradient_under_dropout(mode, kind):
    """The mask of the loss is the mask of the gradient."""
    model = Recurrent(kind, 2, 8, num_layers=2, dropout=0.5).double()
    x = torch.randn(1, 3, 2).double()  # more draw their numbers in another order

    def loss_fn(m, batch):
        torch.manual_seed(5)
        return square_loss(m, batch)

    plain = copy.deepcopy(model)
    loss_fn(plain, x).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    got = run_mode(mode, True, model, x, loss_fn, max_grad_norm=1e9)
    assert_same(got, expected)


@layer_modes
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


@layer_modes
def test_weight_used_elsewhere(mode):
    """A penalty, or a product with a weight, outside of the layer."""

    class Model(Recurrent):
        def forward(self, x):
            return F.linear(super().forward(x), self.rnn.weight_hh_l0)

    x = torch.randn(4, 3, 2).double()
    check(mode, True, Model("tanh").double(), x, square_loss)


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM"])
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
    check(mode, True, model, x, square_loss)


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


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_other_modes_refuse_it(wrap, layer):
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
            grad_sample_mode="ew",
            wrap_model=wrap,
        )
    assert not isinstance(info.value, CRASHES), info.value
    assert "forward" not in vars(model.rnn)
    assert list(model.rnn._forward_hooks) == before


# -- numbers -------------------------------------------------------------------------


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_float32(mode, kind):
    model = Between(kind, num_layers=2, bidirectional=True)
    check(mode, True, model, torch.randn(5, 8, 2), square_loss, tolerance=1e-4)


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM"])
def test_bf16_autocast(mode, kind):
    """Against the oracle under the same autocast, within bf16's resolution."""
    model = Between(kind, features=4, width=8)
    x = torch.randn(6, 5, 2)

    def loss_fn(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(x)
        return squares(out.float())

    grads = oracle(model, x, loss_fn)
    c = half_clipped(grads)
    got = run_mode(mode, True, model, x, loss_fn, max_grad_norm=c)
    expected = clipped_sum(grads, "flat", c)
    assert all(total.dtype == torch.float32 for total in got.values())
    difference = norms_of({n: (got[n] - e)[None] for n, e in expected.items()})
    assert difference <= 0.03 * norms_of({n: e[None] for n, e in expected.items()})


@layer_modes
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_saturated_gates(mode, kind):
    """Gates at exactly 0 and 1, with gradients of zero: no NaN."""
    model = Recurrent(kind, use="all").double()
    for name, p in model.named_parameters():
        if "bias_ih" in name:
            nn.init.constant_(p, 1e3)
    check(mode, True, model, torch.randn(4, 3, 2).double(), square_loss)
