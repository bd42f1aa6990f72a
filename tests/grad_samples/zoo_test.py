"""Small models of every family, as people assemble them, in every mode."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from opacus_ext import check_per_sample_gradients
from opacus_ext.refused import Refused
from tests.common import (
    CLIPPINGS,
    MODES,
    assert_same,
    check,
    clipped_sum,
    exact_or_refused,
    half_clipped,
    layer_modes,
    make_private,
    next_token_loss,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    wrapped,
)

V = 9  # vocabulary


class Video(nn.Module):
    """A CNN with GroupNorm and a residual on every frame, then an LSTM."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        rows = self.stem(x.flatten(0, 1))
        rows = rows + self.conv(self.norm(rows).relu())
        rows = rows.mean((2, 3)).unflatten(0, x.shape[:2])
        return self.head(self.lstm(rows)[0][:, -1])


class ClassToken(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))

    def forward(self, x):
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 2, stride=2)
        self.token, self.positions = ClassToken(4), nn.Embedding(5, 4)
        self.layer = nn.TransformerEncoderLayer(
            *(4, 2, 6, 0.0, "gelu"), batch_first=True, norm_first=True
        )
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, x):
        x = self.token(self.stem(x).flatten(2).transpose(1, 2))
        x = x + self.positions(torch.arange(x.size(1)))
        return self.head(self.layer(x)[:, 0])


class Translation(nn.Module):
    """A GRU reads, a GRU writes and attends to what was read; one embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 4, padding_idx=0)
        self.encoder = nn.GRU(4, 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source, target):
        memory, h = self.encoder(self.embedding(source))
        h = h.transpose(0, 1).flatten(1).unsqueeze(0)
        y = self.decoder(self.embedding(target), h)[0]
        padding = source == 0
        y = y + self.attention(y, memory, memory, padding, need_weights=False)[0]
        return self.head(y)


class SharedBlocks(nn.Module):
    """A ResNet whose blocks are one, run at two resolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.block = nn.Sequential(
            nn.GroupNorm(2, 4),
            nn.PReLU(4),
            nn.Conv2d(4, 4, 3, padding=1, groups=2),
            nn.InstanceNorm2d(4, affine=True),
            nn.PReLU(),
            nn.Conv2d(4, 4, 1, bias=False),
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        x = x + self.block(x)
        x = F.avg_pool2d(x, 2)
        return self.head((x + self.block(x)).mean((2, 3)))


class Separable(nn.Module):
    """Depthwise, then pointwise, with a gate of the channels (squeeze-and-excite)."""

    def __init__(self):
        super().__init__()
        self.deep = nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False)
        self.norm = nn.GroupNorm(1, 8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.wide = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = F.hardswish(self.norm(self.deep(x)))
        gate = self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu())
        return x + self.wide(y * gate.sigmoid())


class Patches(nn.Module):
    """A convolution on every patch, then one Linear on all of them."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 2), nn.GroupNorm(3, 3)
        self.head = nn.Linear(4 * 3 * 2 * 2, 2)

    def forward(self, x):
        patches = x.unfold(2, 3, 3).unfold(3, 3, 3).flatten(1, 3)  # [B, 4, 3, 3]
        rows = self.norm(self.conv(patches.flatten(0, 1).unsqueeze(1))).tanh()
        return self.head(rows.reshape(len(x), -1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 3)
        self.up = nn.ConvTranspose2d(4, 2, 3)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skip = self.one(x).tanh()
        return self.out(torch.cat([skip, self.up(self.two(skip).tanh())], dim=1))


class Autoencoder(nn.Module):
    """The decoder's weights are the encoder's, a convolution's and a Linear's."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv1d(1, 3, 3, stride=2)
        self.decode = nn.ConvTranspose1d(3, 1, 3, stride=2)
        self.decode.weight = self.encode.weight
        self.act = nn.PReLU()

    def forward(self, x):
        return self.decode(self.act(self.encode(x)))


class Siamese(nn.Module):
    """One encoder for both inputs, compared by a bilinear form."""

    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv1d(2, 3, 2), nn.PReLU(3)
        self.score = nn.Bilinear(3, 3, 1)

    def forward(self, a, b):
        a, b = (self.act(self.conv(x)).mean(2) for x in (a, b))
        return self.score(a, b)


class Reader(nn.Module):
    """OCR: the columns of an image are steps, time first."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, (2, 2))
        self.lstm = nn.LSTM(2 * 2, 3, bidirectional=True, num_layers=2)
        self.head = nn.Linear(6, V)

    def forward(self, x):
        x = self.conv(x).tanh().flatten(1, 2).permute(2, 0, 1)
        return self.head(self.lstm(x)[0]).transpose(0, 1)


class Characters(nn.Module):
    """Words from their characters, ``[B * T, d, letters]``; sentences are packed."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(V, 2, padding_idx=0)
        self.conv = nn.Conv1d(2, 3, 2)
        self.lstm = nn.LSTM(3, 2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(4, 3)

    def forward(self, ids, lengths):
        x = self.letters(ids).flatten(0, 1).transpose(1, 2)
        x = self.conv(x).amax(2).unflatten(0, ids.shape[:2])
        x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = self.lstm(x)
        x, _ = pad_packed_sequence(x, batch_first=True, total_length=ids.size(1))
        return self.tags(x)


class ConvLSTM(nn.Module):
    """A convolution is the product of a recurrent cell, step by step."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 2, *x.shape[3:])
        for t in range(x.size(1)):
            gates = self.gates(torch.cat([x[:, t], h], dim=1))
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class Wave(nn.Module):
    """Dilated and causal convolutions with gates and skips."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, 2, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(2, 4, 2, dilation=d) for d in (1, 2))
        self.skip = nn.Conv1d(2, 2, 1)  # of both levels

    def forward(self, x):
        x, out = self.stem(x), 0
        for conv in self.dilated:
            y = F.glu(conv(F.pad(x, (conv.dilation[0], 0))), dim=1)
            x, out = x + y, out + self.skip(y)
        return out


class Conformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.point = nn.Conv1d(4, 8, 1)
        self.depth = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(1, 4)

    def forward(self, x):
        x = x + self.feed(self.norms[0](x)) / 2
        y = self.norms[1](x).transpose(0, 1)  # time first
        x = x + self.attention(y, y, y)[0].transpose(0, 1)
        y = F.glu(self.point(self.norms[2](x).transpose(1, 2)), dim=1)
        x = x + F.silu(self.norm(self.depth(y))).transpose(1, 2)
        return x + self.feed(self.norms[0](x)) / 2


class Pointer(nn.Module):
    """An LSTMCell steps; at each step it attends, and the weights are the output."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.start, self.cell = nn.Linear(4, 4), nn.LSTMCell(4, 4)
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x):
        memory = self.embed(x)
        h = c = self.start(memory.mean(1)).tanh()
        read, choices = memory[:, 0], []
        for _ in range(2):
            h, c = self.cell(read, (h, c))
            read, weights = self.attention(h.unsqueeze(1), memory, memory)
            read = read.squeeze(1)
            choices.append(weights.squeeze(1))
        return torch.stack(choices, dim=1)


def images(B, *shape):
    return torch.randn(B, *shape).double()


def tokens(B, *shape):
    return torch.randint(1, V, (B, *shape))


def padded(B, T):
    ids = tokens(B, T)
    ids[::2, T - 1 :] = 0
    return ids


# By name, the model and what makes a batch of it.
ZOO = {
    "video": (Video, lambda B: images(B, 3, 1, 4, 4)),
    "vision transformer": (VisionTransformer, lambda B: images(B, 1, 4, 4)),
    "translation": (Translation, lambda B: (padded(B, 4), tokens(B, 3))),
    "shared blocks": (SharedBlocks, lambda B: images(B, 1, 4, 4)),
    "separable": (Separable, lambda B: images(B, 4, 3, 3)),
    "patches": (Patches, lambda B: images(B, 1, 6, 6)),
    "u-net": (UNet, lambda B: images(B, 1, 5, 4)),
    "autoencoder": (Autoencoder, lambda B: images(B, 1, 7)),
    "siamese": (Siamese, lambda B: (images(B, 2, 4), images(B, 2, 5))),
    "reader": (Reader, lambda B: images(B, 1, 3, 5)),
    "characters": (
        Characters,
        lambda B: (tokens(B, 4, 3), torch.tensor([2, 4, 1, 3])[:B]),
    ),
    "conv-lstm": (ConvLSTM, lambda B: images(B, 3, 1, 3, 3)),
    "wave": (Wave, lambda B: images(B, 1, 6)),
    "conformer": (Conformer, lambda B: images(B, 4, 4)),
    "pointer": (Pointer, lambda B: images(B, 4, 2)),
}
every_model = pytest.mark.parametrize("name", ZOO)


def build(name):
    model, batch = ZOO[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model().double(), batch


@layer_modes
@wrapped
@every_model
def test_model(mode, wrap, name):
    """B = 4 is also the width, the number of tokens or patches of many of them."""
    model, batch = build(name)
    check(mode, wrap, model, batch(4), square_loss)


@layer_modes
@every_model
@pytest.mark.parametrize("B", [0, 1, 2, 3])
def test_batch_sizes(mode, name, B):
    """An empty one but for models on which torch itself can't run it."""
    if B == 0 and name in ("shared blocks", "patches", "characters"):
        return
    model, batch = build(name)
    check(mode, True, model, batch(B), square_loss)


@every_model
def test_check_finds_nothing(name):
    """What the package tells users about these models."""
    model, batch = build(name)
    report = check_per_sample_gradients(model, batch(3), square_loss, verbose=False)
    assert report.ok, str(report)
    assert report.modes == MODES


@layer_modes
def test_language_model_of_a_recurrent_layer(mode):
    """Cross-entropy over tokens, tied, with dropout switched off by its rate."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(V, 4)
            self.lstm = nn.LSTM(4, 6, 2, batch_first=True, proj_size=4)
            self.head = nn.Linear(4, V)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.lstm(self.embedding(ids))[0])

    def loss_fn(m, ids):
        return next_token_loss(m(ids), ids)

    for B, T in ((4, 5), (4, 4), (1, 3)):
        check(mode, True, Model().double(), tokens(B, T), loss_fn)


@layer_modes
@every_model
def test_bf16(mode, name):
    """Weights and all in bf16: the norms, which are accumulated in float32."""

    def low(x):
        return x.bfloat16() if x.is_floating_point() else x

    def loss_fn(m, batch):
        return squares(m(*batch).float())

    model, batch = build(name)
    batch = batch(4)
    batch = tuple(map(low, batch if isinstance(batch, tuple) else (batch,)))
    model = model.bfloat16()
    norms = norms_of({n: g.float() for n, g in oracle(model, batch, loss_fn).items()})
    private = make_private(model, mode, batch_size=4)
    private.backward(batch, loss_fn)
    if mode == "hooks":
        got = norms_of({n: p.grad_sample.float() for n, p in model.named_parameters()})
    else:
        got = private.handle.per_sample_gradient_norms
    torch.testing.assert_close(got, norms, rtol=0.02, atol=0)


@layer_modes
@pytest.mark.parametrize("name", ["video", "translation", "conformer"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_clipping(mode, name, clipping):
    model, batch = build(name)
    batch = batch(4)
    grads = oracle(model, batch, square_loss)
    c = half_clipped(grads)
    if clipping == "per_layer":
        c = [half_clipped({n: g}) for n, g in grads.items()]
    got = run_mode(mode, True, model, batch, square_loss, clipping, c)
    assert_same(got, clipped_sum(grads, clipping, c), message=mode)


class Beside(nn.Module):
    """A layer that its own forward leaves to the loss."""

    def __init__(self, other):
        super().__init__()
        self.body, self.other = nn.Linear(3, 3), other

    def forward(self, x):
        return self.body(x)


@layer_modes
@pytest.mark.parametrize("what", ["called", "penalised"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.Conv1d(2, 3, 1),
        lambda: nn.GRU(3, 3, batch_first=True),
        lambda: nn.GroupNorm(1, 2),
    ],
    ids=["linear", "conv", "gru", "norm"],
)
def test_layer_used_after_the_model(mode, what, build):
    """In the loss: exact, or refused; its gradient must not vanish in silence."""
    model = Beside(build()).double()

    def loss_fn(m, x):
        output = m(x)
        other = (m if isinstance(m, Beside) else m._module).other
        if what == "penalised":
            return squares(output) + next(other.parameters()).square().sum()
        output = other(output)
        return squares(output[0] if isinstance(output, tuple) else output)

    x = torch.randn(4, 2, 3).double()
    exact_or_refused(mode, True, model, x, loss_fn, ["other"])


# -- several steps -------------------------------------------------------------------


@layer_modes
@pytest.mark.parametrize("name", ["video", "translation", "separable", "reader"])
def test_poisson_batches(mode, name):
    """Batches of any size from Poisson sampling, the empty one included."""
    model, batch = build(name)
    whole = batch(8)
    whole = whole if isinstance(whole, tuple) else (whole,)
    private = make_private(
        model,
        mode,
        batch_size=1,
        dataset=TensorDataset(*whole),
        max_grad_norm=0.5,
        poisson_sampling=True,
        lr=0.1,
    )
    sizes = set()
    for _ in range(2):
        for some in private.loader:
            some = tuple(some)
            sizes.add(len(some[0]))
            clean, _ = build(name)
            clean.load_state_dict(model.state_dict())
            expected = clipped_sum(oracle(clean, some, square_loss), "flat", 0.5)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            private.step(some, square_loss)
            got = {
                n: (before[n] - p.detach()) / 0.1 for n, p in model.named_parameters()
            }
            assert_same(got, expected, message=f"{len(some[0])} samples")
    assert 0 in sizes and max(sizes) > 1


# -- checkpointing -------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block of convolutions, a recurrent and an attention layer, all recomputed."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first = nn.Conv1d(2, 4, 1)
        self.block = nn.Sequential(
            nn.Conv1d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.PReLU(4)
        )
        self.lstm = nn.LSTM(4, 4, batch_first=True, bidirectional=True, proj_size=2)
        self.cell = nn.GRUCell(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.use_reentrant = use_reentrant

    def again(self, function, *args):
        if self.use_reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.use_reentrant)

    def steps(self, x):
        h, outputs = None, []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            outputs.append(h)
        return torch.stack(outputs, dim=1)

    def forward(self, x):
        x = self.first(x)
        x = self.again(self.block, self.again(self.block, x)).transpose(1, 2)
        x, (h, c) = self.again(self.lstm, x)
        x = self.again(self.steps, x)
        x, _ = self.again(lambda x: self.attention(x, x, x), x)
        return torch.cat([x.flatten(1), h.transpose(0, 1).flatten(1)], dim=1)


@layer_modes
@wrapped
@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (1, 3)])
def test_checkpointing(mode, wrap, use_reentrant, B, T):
    model = Checkpointed(use_reentrant).double()
    check(mode, wrap, model, torch.randn(B, 2, T).double(), square_loss)


@layer_modes
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("part", ["block", "lstm", "steps", "attention"])
def test_checkpoint_of_one_part(mode, use_reentrant, part):
    class One(Checkpointed):
        def again(self, function, *args):
            name = getattr(self, part, None)
            mine = function is name or function == name
            if part == "attention":
                mine = "lambda" in getattr(function, "__name__", "")
            if not mine:
                return function(*args)
            return super().again(function, *args)

    model = One(use_reentrant).double()
    check(mode, True, model, torch.randn(4, 2, 3).double(), square_loss)


# -- cancelling ----------------------------------------------------------------------


class Cancelling(nn.Module):
    """Uses of one layer that take each other back, beside one that is used once."""

    def __init__(self, kind):
        super().__init__()
        layers = {
            "conv": lambda: nn.Conv1d(3, 3, 2, groups=3),
            "plain conv": lambda: nn.Conv1d(3, 3, 2),
            "lstm": lambda: nn.LSTM(4, 3, batch_first=True),
            "gru": lambda: nn.GRU(4, 3, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            "bilinear": lambda: nn.Bilinear(4, 4, 3),
            "norm": lambda: nn.GroupNorm(3, 3),
            "prelu": lambda: nn.PReLU(3),
        }
        self.kind, self.layer, self.other = kind, layers[kind](), layers[kind]()

    def call(self, layer, x):
        if self.kind == "attention":
            return layer(x, x, x)[0]
        if self.kind == "bilinear":
            return layer(x, x)
        output = layer(x)
        return output[0] if isinstance(output, tuple) else output

    def forward(self, x):
        y = self.call(self.layer, x) - self.call(self.layer, x.clone())
        return torch.cat([y.flatten(1), self.call(self.other, x).flatten(1)], dim=1)


CANCELLING = ["conv", "plain conv", "lstm", "gru", "attention", "bilinear", "norm"]
CANCELLING += ["prelu"]


def weighted(output):
    """A loss whose gradient does not vanish with the output."""
    flat = output.flatten(1)
    return (flat * torch.linspace(1, 2, flat.size(1), dtype=flat.dtype)).sum(1)


@layer_modes
@pytest.mark.parametrize("kind", CANCELLING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cancelling_to_zero(mode, kind, dtype):
    """<G1, G1> + <G2, G2> + 2 <G1, G2> = 0, or a little below: never NaN."""
    model, x = Cancelling(kind).to(dtype), torch.randn(4, 3, 4).to(dtype)
    tolerance = 1e-8 if dtype.itemsize == 8 else 1e-4

    def loss_fn(m, x):
        return weighted(m(x))

    check(mode, True, model, x, loss_fn, tolerance=tolerance)


@layer_modes
@pytest.mark.parametrize("kind", CANCELLING)
def test_all_gradients_cancel(mode, kind):
    """Nothing left at all: the clipping factor of a norm of zero is finite."""
    model, x = Cancelling(kind), torch.randn(4, 3, 4)
    model.other.requires_grad_(False)

    def loss_fn(m, x):
        return weighted(m(x))

    for name, total in run_mode(mode, True, model, x, loss_fn).items():
        assert total.isfinite().all(), name
        assert total.abs().max() < 1e-4, name


@layer_modes
@pytest.mark.parametrize("name", ["video", "vision transformer", "translation"])
def test_gradients_of_zero(mode, name):
    """Samples with a weight of zero in the loss, and a batch of nothing else."""
    model, batch = build(name)
    batch = batch(4)
    batch = batch if isinstance(batch, tuple) else (batch,)

    def loss_fn(m, batch):
        *inputs, weight = batch
        return squares(m(*inputs)) * weight

    for weight in ([0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]):
        weight = torch.tensor(weight).double()
        check(mode, True, copy.deepcopy(model), (*batch, weight), loss_fn)


@layer_modes
@pytest.mark.parametrize("cls", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_output_changed_in_place(mode, cls):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = cls(3, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0].relu_()

    check(mode, True, Model().double(), torch.randn(4, 3, 3).double(), square_loss)


@layer_modes
def test_hook_on_out_proj(mode):
    """Torch never calls out_proj, so its hooks do not count."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.attention.out_proj.register_forward_hook(lambda m, i, out: 2 * out)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    check(mode, True, Model().double(), torch.randn(4, 3, 4).double(), square_loss)


@layer_modes
def test_unfrozen_later(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.rnn = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(self.fc(x))[0]

    model = Model().double()
    model.rnn.requires_grad_(False)
    private = make_private(model, mode, batch_size=4, optimizer=_sgd(model))
    private.step(torch.randn(4, 3, 4).double(), square_loss)
    model.rnn.requires_grad_(True)
    x = torch.randn(4, 3, 4).double()
    expected = clipped_sum(oracle(_plain(model), x, square_loss), "flat", 1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    private.step(x, square_loss)
    got = {n: (before[n] - p.detach()) * 4 for n, p in model.named_parameters()}
    assert_same(got, expected)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def _plain(model):
    plain = type(model)().double()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("T", [3, 4])
def test_output_time_first(mode, T):
    """Inputs [B, T, d] and outputs [T, B, d]: where T = B the batch may be either."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4)

        def forward(self, x):
            return self.rnn(x.transpose(0, 1))[0]

    def loss(model, x):
        return squares(model(x).transpose(0, 1))

    with pytest.raises(Refused, match="dim 0 should be the samples'"):
        check(mode, True, Model().double(), torch.randn(4, T, 3).double(), loss)
