"""nn.MultiheadAttention, with all its arguments, and torch's transformer layers."""

import copy
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from opacus import PrivacyEngine
from opacus.layers import DPMultiheadAttention
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
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
    wrapped_or_not,
)

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")

SIZES = [(4, 1), (4, 4), (1, 3), (3, 6), (6, 3), (2, 4)]
sizes = pytest.mark.parametrize("B, T", SIZES)
MASKS = (None, "bool", "float", "bool of each head", "float of each head", "causal")
PADDINGS = (None, "bool", "float")
INPUTS = ("self", "cross", "three")


def mask_of(kind, B, heads, T, S):
    """Every query sees the first key: ``[T, S]`` or ``[B, h, T, S]``."""
    if kind is None:
        return None
    if kind == "causal":
        return torch.ones(T, S).triu(1).bool()
    shape = (B, heads, T, S) if kind.endswith("head") else (T, S)
    if kind.startswith("float"):
        return torch.randn(shape).double()
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


def padding_of(kind, B, S):
    if kind is None:
        return None
    if kind == "float":
        return torch.randn(B, S).double()
    mask = torch.rand(B, S) < 0.4
    mask[..., 0] = False
    return mask


class Attend(nn.Module):
    """Attention on inputs with the batch first; masks of each head ``[B, h, T, S]``."""

    def __init__(self, inputs="self", loss="output", **kwargs):
        super().__init__()
        self.call = {
            key: kwargs.pop(key)
            for key in ("need_weights", "average_attn_weights", "is_causal")
            if key in kwargs
        }
        kwargs.setdefault("batch_first", True)
        self.attention = nn.MultiheadAttention(**kwargs)
        for name in ("bias", "in_proj_bias", "out_proj.bias"):
            bias = dict(self.attention.named_parameters()).get(name)
            if bias is not None:
                nn.init.normal_(bias)  # zeros by default
        self.inputs, self.loss = inputs, loss

    def forward(self, query, key=None, value=None, mask=None, padding=None):
        if not self.attention.batch_first:
            query, key, value = (
                None if x is None else x.transpose(0, 1) for x in (query, key, value)
            )
        if self.inputs == "self":
            key = value = query
        elif self.inputs == "cross":
            value = key
        if mask is not None and mask.dim() == 4:
            mask = mask.flatten(0, 1)
        output, weights = self.attention(
            query, key, value, key_padding_mask=padding, attn_mask=mask, **self.call
        )
        if not self.attention.batch_first:
            output = output.transpose(0, 1)
        if self.loss == "weights":
            return weights
        if self.loss == "both":
            return torch.cat([output.flatten(1), weights.flatten(1)], dim=1)
        return output


def attend_loss(mask=None):
    """With a mask for all samples, which is no part of the batch."""

    def loss_fn(model, batch):
        return squares(model(**batch) if mask is None else model(**batch, mask=mask))

    return loss_fn


@st.composite
def configurations(draw):
    heads = draw(st.integers(1, 2))
    inputs = draw(st.sampled_from(INPUTS))
    kwargs = dict(
        embed_dim=heads * draw(st.integers(3 - heads, 2)),
        num_heads=heads,
        bias=draw(st.booleans()),
        add_bias_kv=draw(st.booleans()),
        add_zero_attn=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        need_weights=draw(st.booleans()),
        inputs=inputs,
    )
    width = kwargs["embed_dim"]
    if inputs == "three" and draw(st.booleans()):
        kwargs.update(kdim=draw(st.integers(1, 3)), vdim=draw(st.integers(1, 3)))
    elif inputs == "cross" and draw(st.booleans()):
        kwargs["kdim"] = kwargs["vdim"] = draw(st.integers(1, 3))
    if kwargs["need_weights"]:
        kwargs["average_attn_weights"] = draw(st.booleans())
        kwargs["loss"] = draw(st.sampled_from(["output", "weights", "both"]))
    mask = draw(st.sampled_from(MASKS))
    if mask is not None:  # torch may take the hint and leave the mask unread
        kwargs["is_causal"] = draw(st.booleans())
    padding = draw(st.sampled_from(PADDINGS))
    T = draw(st.integers(1, 4))
    S = T if inputs == "self" else draw(st.integers(1, 4))
    widths = [width, kwargs.get("kdim") or width, kwargs.get("vdim") or width]
    return kwargs, mask, padding, T, S, widths


def build(configuration, B):
    """The model, the batch, and the mask that all samples share."""
    kwargs, mask, padding, T, S, widths = configuration
    model = Attend(**kwargs).double()
    batch = {"query": torch.randn(B, T, widths[0]).double()}
    if kwargs["inputs"] != "self":
        batch["key"] = torch.randn(B, S, widths[1]).double()
    if kwargs["inputs"] == "three":
        batch["value"] = torch.randn(B, S, widths[2]).double()
    mask = mask_of(mask, B, kwargs["num_heads"], T, S)
    if mask is not None and mask.dim() == 4:
        batch["mask"], mask = mask, None
    if padding is not None:
        batch["padding"] = padding_of(padding, B, S)
    return model, batch, mask


def freeze_some(data, model):
    """Any of the parameters but the first."""
    if data.draw(st.booleans()):
        for name, p in model.named_parameters():
            p.requires_grad = data.draw(st.booleans(), name)
        # The projection of the queries, without which the weights have no gradient.
        next(model.parameters()).requires_grad = True


@every_mode
@wrapped_or_not
@given(N=st.integers(0, 4), configuration=configurations(), data=st.data())
def test_attention(mode, wrap, N, configuration, data):
    model, batch, mask = build(configuration, N)
    freeze_some(data, model)
    check(mode, wrap, model, batch, attend_loss(mask))


@every_mode
@pytest.mark.parametrize("inputs", INPUTS)
@given(configuration=configurations(), N=st.integers(1, 4))
def test_attention_on(mode, inputs, N, configuration):
    """Each kind of input, alike in width."""
    kwargs, mask, padding, T, S, widths = configuration
    kwargs = {k: v for k, v in kwargs.items() if k not in ("kdim", "vdim")}
    kwargs["inputs"], S = inputs, T if inputs == "self" else S
    configuration = kwargs, mask, padding, T, S, [widths[0]] * 3
    model, batch, mask = build(configuration, N)
    check(mode, True, model, batch, attend_loss(mask))


@every_mode
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("inputs", INPUTS)
@sizes
def test_between_layers(mode, inputs, batch_first, B, T):
    """Inputs that need a gradient; T = B, S = T and B = heads tell nothing."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.attend = Attend(
                inputs, embed_dim=4, num_heads=2, batch_first=batch_first
            )
            self.after = nn.Linear(4, 2)

        def forward(self, x):
            return self.after(self.attend(*(layer(x) for layer in self.before)))

    check(mode, True, Model().double(), torch.randn(B, T, 4).double(), square_loss)


# -- masks ---------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("mask", MASKS[1:])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_masks(mode, mask, padding, need_weights):
    kwargs = dict(
        inputs="cross", embed_dim=4, num_heads=2, need_weights=need_weights, bias=True
    )
    model, batch, mask = build((kwargs, mask, padding, 3, 4, [4, 4, 4]), 4)
    check(mode, True, model, batch, attend_loss(mask))


@every_mode
@pytest.mark.parametrize("masked", ["padding", "mask", "both"])
@pytest.mark.parametrize("add_zero_attn", [True, False])
def test_rows_that_see_nothing(mode, masked, add_zero_attn):
    """A sample without keys, a query without keys: zeros, where torch gives zeros."""
    model = Attend(
        "cross",
        embed_dim=4,
        num_heads=2,
        need_weights=False,
        add_zero_attn=add_zero_attn,
    ).double()
    batch = {n: torch.randn(4, 3, 4).double() for n in ("query", "key")}
    mask = None
    if masked != "mask":
        batch["padding"] = torch.zeros(4, 3).bool()
        batch["padding"][1], batch["padding"][2, 1:] = True, True
    if masked != "padding":
        mask = torch.zeros(3, 3).bool()
        mask[1] = True
    loss_fn = attend_loss(mask)
    assert loss_fn(model, batch).isfinite().all()
    assert all(g.isfinite().all() for g in oracle(model, batch, loss_fn).values())
    check(mode, True, model, batch, loss_fn)


@every_mode
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padding", PADDINGS)
@sizes
def test_causal(mode, padding, need_weights, B, T):
    """The hint with its mask, alone and beside a padding mask."""
    kwargs = dict(embed_dim=4, num_heads=2, is_causal=True, need_weights=need_weights)
    kwargs["inputs"] = "self"
    model, batch, mask = build((kwargs, "causal", padding, T, T, [4] * 3), B)
    check(mode, True, model, batch, attend_loss(mask))
    later = {**batch, "query": batch["query"].clone()}
    later["query"][:, -1] += 1.0  # the mask is heeded: what comes later is not seen
    with torch.no_grad():
        outputs = [model(**b, mask=mask)[:, :-1] for b in (batch, later)]
    torch.testing.assert_close(*outputs)


@every_mode
@pytest.mark.parametrize("B", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [1, 2])
def test_learned_bias(mode, B, heads):
    """A float mask that is trained: relative positions of T = 4, the same for all."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative = nn.Embedding(7, heads)
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, heads, batch_first=True)

        def forward(self, x):
            t = torch.arange(4)
            bias = self.relative(t[:, None] - t + 3).permute(2, 0, 1)
            bias = bias.repeat(len(x), 1, 1)  # [B * heads, T, T]
            x = self.fc(x)
            return self.attention(x, x, x, attn_mask=bias)[0]

    x = torch.randn(B, 4, 4).double()
    names = ["relative", "attention"]
    exact_or_refused(mode, True, Model().double(), x, square_loss, names)


@every_mode
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (3, 4)])
def test_mask_of_each_sample_that_is_trained(mode, B, T):
    """Computed from the sample: the gradient goes through the mask."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.fc = nn.Linear(4, 2), nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            gate = F.logsigmoid(self.gate(x)).transpose(1, 2)  # [B, heads, T]
            mask = gate[:, :, None].expand(-1, -1, x.size(1), -1).flatten(0, 1)
            x = self.fc(x)
            return self.attention(x, x, x, attn_mask=mask)[0]

    check(mode, True, Model().double(), torch.randn(B, T, 4).double(), square_loss)


@every_mode
def test_positions_as_queries(mode):
    """Queries without a sample, ``[T, d]`` expanded to the batch (as in DETR)."""

    class Model(nn.Module):
        def __init__(self, T):
            super().__init__()
            self.queries, self.T = nn.Embedding(T, 4), T
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            q = self.queries(torch.arange(self.T)).expand(len(x), -1, -1)
            x = self.fc(x)
            return self.attention(q, x, x)[0]

    for B, T in ((4, 3), (4, 4), (1, 4), (2, 4)):
        x = torch.randn(B, 5, 4).double()
        names = ["queries", "attention"]
        exact_or_refused(mode, True, Model(T).double(), x, square_loss, names)


@every_mode
@pytest.mark.parametrize("table", ["embedding", "buffer"])
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (1, 3)])
def test_of_constants(mode, table, B, T):
    """Positions attend to each other, ``[1, T, d]``, before they meet the samples."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            if table == "embedding":
                self.table = nn.Embedding(T, 4)
            else:
                self.register_buffer("table", torch.randn(T, 4))

        def forward(self, x):
            made = isinstance(self.table, nn.Module)
            y = (self.table(torch.arange(T)) if made else self.table).unsqueeze(0)
            y = self.attention(y, y, y)[0].expand(len(x), -1, -1)
            return torch.cat([y, self.fc(x)], dim=1)

    x = torch.randn(B, 2, 4).double()
    names = ["table", "attention"]
    exact_or_refused(mode, True, Model().double(), x, square_loss, names)


# -- weights -------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("loss", ["weights", "both"])
def test_loss_on_the_weights(mode, loss, average):
    """Without the output, neither values nor ``out_proj`` get a gradient."""
    model = Attend(
        "cross", loss, embed_dim=4, num_heads=2, average_attn_weights=average
    ).double()
    batch = {"query": torch.randn(4, 3, 4).double()}
    batch["key"] = torch.randn(4, 5, 4).double()
    check(mode, True, model, batch, square_loss)


# -- parameters ----------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("separate", [False, True], ids=["packed", "separate"])
@pytest.mark.parametrize(
    "frozen", ["proj_weight", "in_proj_bias", "in_proj", "out_proj", "bias_", "all"]
)
def test_frozen(mode, frozen, separate):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(3, 3 if separate else 4)
            self.attention = nn.MultiheadAttention(
                *(4, 2),
                **(dict(kdim=3, vdim=3) if separate else {}),
                add_bias_kv=True,
                batch_first=True,
            )
            self.query = nn.Linear(3, 4)

        def forward(self, x):
            key = self.before(x)
            return self.attention(self.query(x), key, key)[0]

    model = Model().double()
    for name, p in model.attention.named_parameters():
        p.requires_grad = frozen != "all" and frozen not in name
    for x in (torch.randn(4, 3, 3).double(), torch.randn(3, 4, 3).double()):
        check(mode, True, model, x, square_loss)


@every_mode
@pytest.mark.parametrize("inputs", INPUTS)
def test_only_one_parameter(mode, inputs):
    names = [n for n, _ in Attend(embed_dim=4, num_heads=2).named_parameters()]
    assert len(names) == 4
    for trained in names:
        model = Attend(inputs, embed_dim=4, num_heads=2).double()
        for name, p in model.named_parameters():
            p.requires_grad = name == trained
        batch = [torch.randn(4, 3, 4).double() for _ in range(3)]
        n = 1 + INPUTS.index(inputs)
        check(mode, True, model, tuple(batch[:n]), square_loss)


@every_mode
@wrapped_or_not
def test_twice(mode, wrap):
    """As self attention and as cross attention, at two lengths."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(
                4, 2, batch_first=True, add_bias_kv=True
            )

        def forward(self, x):
            y = self.attention(x, x, x, need_weights=False)[0]
            return self.attention(y[:, :2], x, x)[0]

    check(mode, wrap, Model().double(), torch.randn(4, 4, 4).double(), square_loss)


@every_mode
def test_projections_of_two_layers_are_one(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.MultiheadAttention(4, 2, batch_first=True)
            self.two = nn.MultiheadAttention(4, 1, batch_first=True, bias=False)
            self.two.in_proj_weight = self.one.in_proj_weight
            self.two.out_proj.weight = self.one.out_proj.weight

        def forward(self, x):
            x = x + self.one(x, x, x)[0]
            return self.two(x, x.tanh(), x)[0]

    check(mode, True, Model().double(), torch.randn(4, 3, 4).double(), square_loss)


@every_mode
def test_unused(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.MultiheadAttention(4, 2, batch_first=True)
            self.unused = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            self.unused(x, x, x)
            return self.used(x, x, x)[0]

    check(mode, True, Model().double(), torch.randn(4, 3, 4).double(), square_loss)


@every_mode
def test_sample_by_sample(mode):
    """Unbatched inputs ``[T, d]`` in a loop."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return torch.stack([self.attention(s, s, s)[0] for s in x])

    x = torch.randn(4, 3, 4).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["attention"])


@every_mode
@pytest.mark.parametrize("B", [1, 3, 4])
def test_samples_attend_to_each_other(mode, B):
    """``[B, d]`` is one unbatched sequence: refused, but for one sample."""
    model = nn.MultiheadAttention(4, 2).double()
    x = torch.randn(B, 4).double()

    def loss_fn(m, x):
        return squares(m(x, x, x)[0])

    if B == 1:
        exact_or_refused(mode, True, model, x, loss_fn, ["the model", "attention"])
        return
    with pytest.raises(Exception) as info:
        run_mode(mode, True, model, x, loss_fn)
    assert not isinstance(info.value, CRASHES), info.value


@every_mode
@pytest.mark.parametrize("B, k", [(4, 3), (4, 4), (1, 3), (2, 4)])
def test_flattened(mode, B, k):
    """Windows of an image, ``[B * k, T, d]``."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(
                4, 2, batch_first=True, add_bias_kv=True
            )

        def forward(self, x):
            rows = self.fc(x).flatten(0, 1)
            return self.attention(rows, rows, rows)[0].unflatten(0, x.shape[:2])

    x = torch.randn(B, k, 3, 4).double()
    exact_or_refused(mode, True, Model().double(), x, square_loss, ["attention"])


# -- layers of a transformer ---------------------------------------------------------


@every_mode
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh])
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (1, 3)])
def test_encoder_layer(mode, norm_first, activation, B, T):
    model = nn.TransformerEncoderLayer(
        *(4, 2, 6, 0.0, activation), norm_first=norm_first, batch_first=True
    ).double()
    check(mode, True, model, torch.randn(B, T, 4).double(), square_loss)


@every_mode
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_encoder_with_masks(mode, norm_first, bias):
    layer = nn.TransformerEncoderLayer(
        *(4, 2, 6, 0.0), norm_first=norm_first, batch_first=True, bias=bias
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(4)).double()
    x = torch.randn(4, 4, 4).double()
    padding = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 0]])
    causal = nn.Transformer.generate_square_subsequent_mask(4).double()

    def loss_fn(m, batch):
        x, padding = batch
        return squares(m(x, mask=causal, src_key_padding_mask=padding, is_causal=True))

    check(mode, True, model, (x, padding.bool()), loss_fn)


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("S, T", [(5, 3), (4, 4)])
def test_decoder_layer(mode, wrap, norm_first, S, T):
    model = nn.TransformerDecoderLayer(
        *(4, 2, 6, 0.0), norm_first=norm_first, batch_first=True
    ).double()
    mask = nn.Transformer.generate_square_subsequent_mask(T).double()

    def loss_fn(m, batch):
        return squares(m(*batch, tgt_mask=mask, tgt_is_causal=True))

    batch = torch.randn(4, T, 4).double(), torch.randn(4, S, 4).double()
    check(mode, wrap, model, batch, loss_fn)


class Seq2Seq(nn.Module):
    """nn.Transformer between an embedding and a head, which are one matrix."""

    def __init__(self, batch_first):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.transformer = nn.Transformer(
            4, 2, 1, 1, 6, dropout=0.0, batch_first=batch_first
        )
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.batch_first = batch_first

    def forward(self, source, target):
        x, y = self.embedding(source), self.embedding(target)
        padding = source == 0
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        y = self.transformer(
            x,
            y,
            tgt_mask=mask.to(x.dtype),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(y if self.batch_first else y.transpose(0, 1))


@every_mode
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("B, S, T", [(4, 5, 3), (4, 4, 4), (1, 3, 2), (3, 4, 3)])
def test_transformer(mode, batch_first, B, S, T):
    source, target = torch.randint(0, 9, (B, S)), torch.randint(0, 9, (B, T))
    source[:, 0] = 1  # no sample is nothing but padding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Seq2Seq(batch_first).double()
    check(mode, True, model, (source, target), square_loss)


@every_mode
def test_model_that_takes_time_first(mode):
    """``make_private(batch_first=False)`` and layers as torch has them by default."""
    model = nn.TransformerEncoderLayer(4, 2, 6, 0.0).double()

    def loss_fn(m, x):
        return squares(m(x.transpose(0, 1)).transpose(0, 1))

    for B, T in ((4, 3), (4, 4), (3, 4)):
        x = torch.randn(B, T, 4).double()
        grads = oracle(model, x, loss_fn)
        c = half_clipped(grads)
        clean = copy.deepcopy(model)
        private = make_private(
            clean, mode, batch_size=B, max_grad_norm=c, batch_first=False
        )
        private.step(x, loss_fn)
        got = {
            n: (p - q).detach() * B
            for (n, p), q in zip(model.named_parameters(), clean.parameters())
        }
        assert_same(got, clipped_sum(grads, "flat", c))


@every_mode
def test_steps(mode):
    """Batches of all sizes, one after the other, the empty one included."""
    model = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True).double()
    private = make_private(model, mode, batch_size=4, max_grad_norm=0.5, lr=0.1)
    for B, T in ((4, 3), (3, 4), (4, 4), (1, 3), (3, 3), (0, 3), (4, 1), (2, 6)):
        x = torch.randn(B, T, 4).double()
        clean = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True).double()
        clean.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(clean, x, square_loss), "flat", 0.5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        private.step(x, square_loss)
        got = {n: (before[n] - p.detach()) * 40 for n, p in model.named_parameters()}
        assert_same(got, expected, message=f"B={B}, T={T}")


# -- the stand-in --------------------------------------------------------------------


def leaves(value):
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def compare(model, *args, **kwargs):
    """Outputs and all gradients of a private layer, beside those of its own forward."""
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    assert "forward" in vars(model) and "forward" not in vars(plain)
    results = []
    unique = {id(x): x for x in leaves((args, kwargs)) if x.is_floating_point()}
    for layer in (plain, model):
        tensors = [x.requires_grad_() for x in unique.values()]
        output = layer.forward(*args, **kwargs)
        scalar = sum(squares(x).sum() for x in leaves(output))
        wanted = tensors + list(layer.parameters())
        grads = torch.autograd.grad(scalar, wanted, allow_unused=True)
        results.append((output, grads))
    (expected, expected_grads), (got, grads) = results
    assert (got[1] is None) == (expected[1] is None)
    for a, b in zip(leaves(got) + list(grads), leaves(expected) + list(expected_grads)):
        if a is None or b is None:  # zero is as good as nothing
            assert all(x is None or not x.any() for x in (a, b))
        else:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def compare_configured(configuration, B, unbatched):
    model, batch, mask = build(configuration, B)
    kinds = {"self": [0, 0, 0], "cross": [0, 1, 1], "three": [0, 1, 2]}
    same = [batch[name] for name in ("query", "key", "value") if name in batch]
    if unbatched:
        same = [x[0].clone() for x in same]
    elif not model.attention.batch_first:
        same = [x.transpose(0, 1).contiguous() for x in same]
    padding, mask = batch.get("padding"), batch.get("mask", mask)
    if unbatched and padding is not None:
        padding = padding[0].clone()
    if mask is not None and mask.dim() == 4:
        mask = (mask[0] if unbatched else mask.flatten(0, 1)).clone()
    compare(
        model.attention,
        *(same[i] for i in kinds[configuration[0]["inputs"]]),
        key_padding_mask=padding,
        attn_mask=mask,
        **model.call,
    )


@given(configuration=configurations(), B=st.integers(1, 3), unbatched=st.booleans())
def test_output_is_that_of_the_layer(configuration, B, unbatched):
    compare_configured(configuration, B, unbatched)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("add_bias_kv", [True, False])
@pytest.mark.parametrize("add_zero_attn", [True, False])
@pytest.mark.parametrize("batch_first", [True, False, None])
def test_output_under_every_mask(inputs, add_bias_kv, add_zero_attn, batch_first):
    """None: without a batch."""
    for mask in MASKS:
        for padding in PADDINGS:
            for need_weights in (True, False):
                kwargs = dict(
                    inputs=inputs,
                    embed_dim=4,
                    num_heads=2,
                    add_bias_kv=add_bias_kv,
                    add_zero_attn=add_zero_attn,
                    batch_first=bool(batch_first),
                    need_weights=need_weights,
                    is_causal=mask is not None and add_bias_kv is add_zero_attn,
                )
                S = 3 if inputs == "self" else 4
                configuration = kwargs, mask, padding, 3, S, [4, 4, 4]
                compare_configured(configuration, 2, batch_first is None)


def test_output_of_an_empty_batch():
    for need_weights in (True, False):
        model = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
        plain = copy.deepcopy(model)
        make_private(model, "ghost_bk", False, batch_size=4)
        x = torch.zeros(0, 3, 4)
        got = model.forward(x, x, x, need_weights=need_weights)
        expected = plain(x, x, x, need_weights=need_weights)
        assert [x.shape for x in leaves(got)] == [x.shape for x in leaves(expected)]


def test_rows_that_see_nothing_as_torch_has_them():
    """NaN where torch gives NaN, zeros where it gives zeros."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    x = torch.randn(3, 2, 4)
    padding = torch.tensor([[True, True], [False, True], [False, False]])
    for need_weights in (True, False):
        kwargs = dict(key_padding_mask=padding, need_weights=need_weights)
        got, expected = model.forward(x, x, x, **kwargs), plain(x, x, x, **kwargs)
        assert bool(expected[0].isnan().any()) is need_weights
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dropout", [0.5, 1.0])
@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout(dropout, need_weights):
    """Drawn as torch draws it; off in evaluation."""
    model = nn.MultiheadAttention(4, 2, dropout, batch_first=True)
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    x = torch.randn(3, 5, 4)
    outputs = []
    for layer in (plain, model):
        torch.manual_seed(3)
        outputs.append(layer.forward(x, x, x, need_weights=need_weights))
    torch.testing.assert_close(outputs[1], outputs[0])
    model.eval(), plain.eval()
    got = model.forward(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(got, plain(x, x, x, need_weights=need_weights))


@every_mode
def test_gradient_under_dropout(mode):
    """The mask of the loss is the mask of the gradient."""
    model = Attend(embed_dim=4, num_heads=2, dropout=0.5).double()
    x = torch.randn(4, 3, 4).double()

    def loss_fn(m, batch):
        torch.manual_seed(5)
        return square_loss(m, batch)

    plain = copy.deepcopy(model)
    loss_fn(plain, x).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    got = run_mode(mode, True, model, x, loss_fn, max_grad_norm=1e9)
    assert_same(got, expected)


def test_evaluation_runs_the_layers_own_forward(monkeypatch):
    calls, forward = [], nn.MultiheadAttention.forward

    def spy(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(nn.MultiheadAttention, "forward", spy)
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(3, 5, 4)
    expected = forward(model, x, x, x)
    make_private(model, "ghost_bk", False, batch_size=3)
    torch.testing.assert_close(model.forward(x, x, x), expected)
    assert calls == [model]  # once, to be compared with
    calls.clear()
    torch.testing.assert_close(model.forward(x, x, x), expected)
    with torch.no_grad():  # dropout may be on
        torch.testing.assert_close(model.forward(x, x, x), expected)
    model.eval()
    torch.testing.assert_close(model.forward(x, x, x), expected)
    assert not calls
    with torch.no_grad():
        torch.testing.assert_close(model(x, x, x), expected)
    assert calls == [model]


@pytest.mark.parametrize("nested_tensor", [True, False])
def test_evaluation_of_an_encoder(nested_tensor):
    """Also where torch's fused kernel runs on the weights of the layers."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested_tensor)
    plain = copy.deepcopy(model)
    private = make_private(model, "ghost_bk", batch_size=3)
    x, padding = torch.randn(3, 5, 4), torch.zeros(3, 5).bool()
    padding[0, 3:] = True
    private.module.eval(), plain.eval()
    for grad in (False, True):
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = private.module(x, src_key_padding_mask=padding)
            expected = plain(x, src_key_padding_mask=padding)
        torch.testing.assert_close(got, expected)


def test_refuses_nested_tensors():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    make_private(model, "ghost_bk", False, batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with pytest.raises(ValueError, match="nested.*key_padding_mask"):
        model.forward(x, x, x, need_weights=False)


@every_mode
def test_refuses_nested_tensors_in_a_step(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x = torch.nested.as_nested_tensor(list(self.fc(x)))
            x = self.attention(x, x, x, need_weights=False)[0]
            return torch.nested.to_padded_tensor(x, 0.0)

    with pytest.raises(ValueError, match="nested"):
        run_mode(mode, True, Model(), torch.randn(4, 3, 4), square_loss)


def wrong_inputs():
    q, k = torch.randn(4, 3, 4), torch.randn(4, 5, 4)
    yield "is_causal alone", (q, q, q), dict(is_causal=True)
    yield "width", (q[..., :3], k, k), {}
    yield "length of the values", (q, k, k[:, :3]), {}
    yield "batch of the keys", (q, k[:1], k[:1]), {}
    yield "batch of the query", (q[:1], k, k), {}
    yield "dims", (q, k[0], k[0]), {}
    yield "four dims", (q[None], k[None], k[None]), {}
    for mask in (torch.randn(1, 5), torch.randn(3, 1), torch.randn(3, 4)):
        yield f"mask {tuple(mask.shape)}", (q, k, k), dict(attn_mask=mask)
    for batch in (1, 2, 4):
        mask = torch.randn(batch, 3, 5)
        yield f"mask of {batch}", (q, k, k), dict(attn_mask=mask)
    yield "integer mask", (q, k, k), dict(attn_mask=torch.ones(3, 5).long())
    for shape in ((1, 5), (4, 1), (4, 4), (5,), (4, 1, 5)):
        padding = torch.zeros(shape).bool()
        yield f"padding {shape}", (q, k, k), dict(key_padding_mask=padding)
    padding = torch.ones(4, 5).long()
    yield "integer padding", (q, k, k), dict(key_padding_mask=padding)


@every_mode
@pytest.mark.parametrize("heads", [2, 4])
def test_mask_of_each_sample_without_heads(mode, heads):
    """
    ``[B, T, T]``, which torch refuses. Where B is the number of heads it must not be
    read as one mask a head: a sample would see the masks of the others.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, heads, batch_first=True)

        def forward(self, x, mask):
            x = self.fc(x)
            return self.attention(x, x, x, attn_mask=mask)[0]

    model, B = Model().double(), heads
    batch = torch.randn(B, 3, 4).double(), torch.randn(B, 3, 3).double()
    with pytest.raises(RuntimeError, match="attn_mask"):
        model(*batch)
    with pytest.raises((RuntimeError, ValueError)):
        run_mode(mode, True, model, batch, square_loss)


@pytest.mark.parametrize("need_weights", [True, False])
def test_refuses_what_the_layer_refuses(need_weights):
    """Nothing is broadcast that the layer would not take."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    plain = copy.deepcopy(model)
    make_private(model, "ghost_bk", False, batch_size=4)
    taken = []
    for what, args, kwargs in wrong_inputs():
        kwargs["need_weights"] = need_weights
        with pytest.raises(Exception):
            plain(*args, **kwargs)
        try:
            model.forward(*args, **kwargs)
            taken.append(what)
        except Exception:
            pass
    assert not taken


@every_mode
@wrapped_or_not
def test_cleanup(mode, wrap):
    """The layer's own forward is back; names and values of its state never change."""
    model = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True).double()
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3, 4).double()
    expected = model(x).detach()
    private = make_private(model, mode, wrap, batch_size=4)
    held = private.module.state_dict()
    assert list(held) == [("_module." if wrap else "") + name for name in state]
    assert "forward" in vars(model.self_attn)
    private.step(x, square_loss)
    if wrap:
        assert private.handle.to_standard_module() is model
    else:
        private.handle.cleanup()
    assert "forward" not in vars(model.self_attn)
    model.load_state_dict(state)
    assert torch.equal(model(x), expected)
    check(mode, wrap, model, x, square_loss)


@every_mode
def test_subclass_with_a_forward_of_its_own(mode):
    class Mine(nn.MultiheadAttention):
        def forward(self, query, key, value, **kwargs):
            output, weights = super().forward(query, key, value, **kwargs)
            return output * self.in_proj_weight.mean(), weights

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Mine(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    x = torch.randn(4, 3, 4).double()
    names = ["attention", "Mine"]
    for before in (nn.Identity(), nn.Linear(4, 4)):
        model = nn.Sequential(before, Model()).double()
        exact_or_refused(mode, True, model, x, square_loss, names)


@every_mode
@pytest.mark.parametrize("B, T", [(4, 3), (4, 4), (1, 3)])
def test_what_opacus_has_in_its_place(mode, B, T):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention = DPMultiheadAttention(4, 2, add_bias_kv=True)

        def forward(self, x):
            x = self.fc(x).transpose(0, 1)
            return self.attention(x, x, x)[0].transpose(0, 1)

    check(mode, True, Model().double(), torch.randn(B, T, 4).double(), square_loss)


# -- Opacus --------------------------------------------------------------------------


def test_validator_leaves_it_alone():
    model = nn.TransformerEncoderLayer(4, 2, 6)
    assert ModuleValidator.is_valid(model)
    fixed = ModuleValidator.fix(model)
    assert type(fixed.self_attn) is nn.MultiheadAttention
    assert nn.MultiheadAttention in ModuleValidator.VALIDATORS


@pytest.mark.parametrize("mode", ["functorch", "ew"])
@pytest.mark.parametrize("wrap", [True, False])
def test_other_modes_refuse_it(mode, wrap):
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    with pytest.raises(Exception, match="MultiheadAttention") as info:
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
    assert "forward" not in vars(model.self_attn)


# -- numbers -------------------------------------------------------------------------


@every_mode
def test_float32(mode):
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    check(mode, True, model, torch.randn(5, 6, 8), square_loss, tolerance=1e-4)


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("separate", [False, True], ids=["packed", "separate"])
def test_bf16_autocast(mode, wrap, separate):
    """Against the oracle under the same autocast, within bf16's resolution."""
    kwargs = dict(kdim=8, vdim=4) if separate else {}
    model = Attend("three", embed_dim=8, num_heads=2, add_bias_kv=True, **kwargs)
    batch = torch.randn(6, 5, 8), torch.randn(6, 4, 8)
    batch = (*batch, torch.randn(6, 4, 4 if separate else 8))

    def loss_fn(m, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(*batch)
        return squares(out.float())

    grads = oracle(model, batch, loss_fn)
    c = half_clipped(grads)
    got = run_mode(mode, wrap, model, batch, loss_fn, max_grad_norm=c)
    expected = clipped_sum(grads, "flat", c)
    assert all(total.dtype == torch.float32 for total in got.values())
    difference = norms_of({n: (got[n] - e)[None] for n, e in expected.items()})
    assert difference <= 0.02 * norms_of({n: e[None] for n, e in expected.items()})
