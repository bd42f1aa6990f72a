"""nn.MultiheadAttention and torch's transformer layers, which need no rule."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opacus_ext import Refused
from tests.common import check, run_mode, square_loss, squares
from tests.grad_samples.rule_case import RuleCase, RuleTests, modes

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")

MASKS = (None, "bool", "float", "bool of each head", "float of each head", "causal")
PADDINGS = (None, "bool", "float")


class TestAttention(RuleTests):
    cases = {
        "self": RuleCase(
            lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            lambda B, T: torch.randn(B, T, 4),
            lambda layer, x: layer(x, x, x)[0],
        ),
        "separate": RuleCase(
            lambda: nn.MultiheadAttention(
                *(4, 2, 0.0), kdim=3, vdim=2, batch_first=True, add_bias_kv=True
            ),
            lambda B, T: (
                *(torch.randn(B, T, 4), torch.randn(B, T + 1, 3)),
                torch.randn(B, T + 1, 2),
            ),
        ),
        "encoder layer": RuleCase(
            lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True),
            lambda B, T: torch.randn(B, T, 4),
        ),
        "decoder layer": RuleCase(
            lambda: nn.TransformerDecoderLayer(
                *(4, 2, 6, 0.0), norm_first=True, batch_first=True
            ),
            lambda B, T: (torch.randn(B, T, 4), torch.randn(B, 3, 4)),
        ),
    }


def mask_of(kind, *shape):
    """Every query sees the first key."""
    if kind is None:
        return None
    if kind == "causal":
        return torch.ones(shape[-2:]).triu(1).bool()
    if kind.startswith("float"):
        return torch.randn(shape).double()
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


class Attend(nn.Module):
    """Attention on inputs with the batch first; masks of each head ``[B, h, T, S]``."""

    def __init__(self, outputs, call, **kwargs):
        super().__init__()
        self.attention, self.outputs = nn.MultiheadAttention(**kwargs), outputs
        self.call = call

    def forward(self, query, key, value, mask=None, padding=None):
        inputs, first = (query, key, value), self.attention.batch_first
        mask = mask.flatten(0, 1) if mask is not None and mask.dim() == 4 else mask
        output, weights = self.attention(
            *(inputs if first else (x.transpose(0, 1) for x in inputs)),
            key_padding_mask=padding,
            attn_mask=mask,
            **self.call,
        )
        output = output if first else output.transpose(0, 1)
        found = {"output": output, "weights": weights}
        return torch.cat([found[name].flatten(1) for name in self.outputs], 1)


@modes
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_settings(mode, wrap, mask, padding):
    """Random other arguments, frozen parameters and sizes with each kind of mask."""
    rng = random.Random(f"{mask} {padding}")
    for B in (0, 1, 4):
        T, S, heads = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 2)
        needed = rng.random() < 0.5
        call = {"need_weights": needed, "average_attn_weights": rng.random() < 0.5}
        if mask is not None:  # torch may take the hint and leave the mask unread
            call["is_causal"] = mask == "causal"
        model = Attend(
            rng.choice([["output"], ["output", "weights"]] if needed else [["output"]]),
            call,
            embed_dim=2 * heads,
            num_heads=heads,
            kdim=rng.choice([None, 3]),
            **{
                name: rng.random() < 0.5
                for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
            },
        ).double()
        for name, p in list(model.named_parameters())[1:]:
            nn.init.normal_(p)
            p.requires_grad = rng.random() < 0.8
        widths = (T, 2 * heads), (S, model.attention.kdim), (S, 2 * heads)
        batch = dict(
            zip(
                ("query", "key", "value"), (torch.randn(B, *w).double() for w in widths)
            )
        )
        made = mask_of(mask, *((B, heads) if "head" in str(mask) else ()), T, S)
        if made is not None and made.dim() == 4:
            batch["mask"], made = made, None
        if padding is not None:
            batch["padding"] = mask_of(padding, B, S)

        def loss_fn(model, batch, given={} if made is None else {"mask": made}):
            return squares(model(**batch, **given))

        check(mode, wrap, model, batch, loss_fn)


@modes
def test_mask_of_each_sample_that_is_trained(mode, wrap):
    """Computed from the sample: the gradient goes through the mask."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 2)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            gate = F.logsigmoid(self.gate(x)).transpose(1, 2)  # [B, heads, T]
            mask = gate[:, :, None].expand(-1, -1, x.size(1), -1).flatten(0, 1)
            return self.attention(x, x, x, attn_mask=mask)[0]

    for B, T in ((4, 4), (4, 3)):
        x = torch.randn(B, T, 4).double()
        check(mode, wrap, Model().double(), x, square_loss)


@modes
def test_samples_attend_to_each_other(mode, wrap):
    """``[B, d]`` is one unbatched sequence: refused."""
    model, x = nn.MultiheadAttention(4, 2).double(), torch.randn(3, 4).double()
    with pytest.raises(Refused, match="the model"):
        run_mode(mode, wrap, model, x, lambda m, x: squares(m(x, x, x)[0]))


class Seq2Seq(nn.Module):
    """nn.Transformer between an embedding and a head, which are one matrix."""

    def __init__(self, batch_first):
        super().__init__()
        self.embedding, self.batch_first = nn.Embedding(9, 4), batch_first
        self.transformer = nn.Transformer(
            4, 2, 1, 1, 6, dropout=0.0, batch_first=batch_first
        )

    def forward(self, source, target):
        x, y = self.embedding(source), self.embedding(target)
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        y = self.transformer(
            *(x, y),
            tgt_mask=mask.to(x.dtype),
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        y = y if self.batch_first else y.transpose(0, 1)
        return F.linear(y, self.embedding.weight)


@modes
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("B, S, T", [(4, 4, 4), (3, 5, 2)])
def test_transformer(mode, wrap, batch_first, B, S, T):
    source, target = torch.randint(0, 9, (B, S)), torch.randint(0, 9, (B, T))
    source[:, 0] = 1  # no sample is nothing but padding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Seq2Seq(batch_first).double()
    check(mode, wrap, model, (source, target), square_loss)
