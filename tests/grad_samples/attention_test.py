"""nn.MultiheadAttention and torch's transformer layers, which need no code here.

``F.multi_head_attention_forward`` is run as the ops that it is made of.
"""

import copy
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import Refused
from opacus_ext.losses import PerSample
from tests.common import (
    CRASHES,
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    layer_modes,
    make_private,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    wrapped,
)

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")

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


@layer_modes
@wrapped
@given(N=st.integers(0, 4), configuration=configurations(), data=st.data())
def test_attention(mode, wrap, N, configuration, data):
    model, batch, mask = build(configuration, N)
    freeze_some(data, model)
    check(mode, wrap, model, batch, attend_loss(mask))


@layer_modes
@pytest.mark.parametrize("B, T", [(4, 4), (4, 3)])
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


@layer_modes
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
        check(mode, True, Model(T).double(), x, square_loss)


@layer_modes
@pytest.mark.parametrize("table", ["embedding", "buffer"])
@pytest.mark.parametrize("B, T", [(4, 4), (1, 3)])
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
    check(mode, True, Model().double(), x, square_loss)


@layer_modes
def test_samples_attend_to_each_other(mode):
    """``[B, d]`` is one unbatched sequence: refused."""
    model = nn.MultiheadAttention(4, 2).double()
    x = torch.randn(3, 4).double()

    def loss_fn(m, x):
        return squares(m(x, x, x)[0])

    with pytest.raises(Refused, match="the model"):
        run_mode(mode, True, model, x, loss_fn)


@layer_modes
@pytest.mark.parametrize("B, k", [(4, 4), (1, 3)])
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
    check(mode, True, Model().double(), x, square_loss)


@layer_modes
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_encoder_with_masks(mode, norm_first, bias):
    layer = nn.TransformerEncoderLayer(
        *(4, 2, 6, 0.0), norm_first=norm_first, batch_first=True, bias=bias
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(4)).double()
    x = torch.randn(3, 4, 4).double()
    padding = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1]])
    causal = nn.Transformer.generate_square_subsequent_mask(4).double()

    def loss_fn(m, batch):
        x, padding = batch
        return squares(m(x, mask=causal, src_key_padding_mask=padding, is_causal=True))

    check(mode, True, model, (x, padding.bool()), loss_fn)


@layer_modes
@wrapped
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("S, T", [(5, 3), (4, 5)])
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


@layer_modes
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("B, S, T", [(4, 4, 4), (3, 5, 2)])
def test_transformer(mode, batch_first, B, S, T):
    source, target = torch.randint(0, 9, (B, S)), torch.randint(0, 9, (B, T))
    source[:, 0] = 1  # no sample is nothing but padding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Seq2Seq(batch_first).double()
    check(mode, True, model, (source, target), square_loss)


@layer_modes
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


def test_validator_leaves_it_alone():
    model = nn.TransformerEncoderLayer(4, 2, 6)
    assert ModuleValidator.is_valid(model)
    fixed = ModuleValidator.fix(model)
    assert type(fixed.self_attn) is nn.MultiheadAttention
    assert nn.MultiheadAttention in ModuleValidator.VALIDATORS


@pytest.mark.parametrize("wrap", [True, False])
def test_other_modes_refuse_it(wrap):
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    with pytest.raises(Exception, match="MultiheadAttention") as info:
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
    assert "forward" not in vars(model.self_attn)


@layer_modes
@wrapped
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
