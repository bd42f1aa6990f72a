"""nn.MultiheadAttention and torch's transformer layers, which need no rule."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.grad_samples.rule_case import RuleCase, RuleTests

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def attention(*args, **kwargs):
    kwargs.setdefault("batch_first", True)
    return lambda: nn.MultiheadAttention(4, 2, *args, **kwargs)


def rows(B, T):
    return torch.randn(B, T, 4)


def of_itself(layer, x, **kwargs):
    return layer(x, x, x, **kwargs)[0]


def padded(layer, x):
    """Every query attends to the first key."""
    padding = (x[..., 0] > 0.2).index_fill(1, torch.tensor([0]), False)
    mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    return of_itself(layer, x, key_padding_mask=padding, attn_mask=mask)


def weights_of_heads(layer, x):
    """The weights are the output, under a trained mask of each sample and head."""
    gate = F.logsigmoid(x[..., :2]).transpose(1, 2)  # [B, heads, T]
    mask = gate[:, :, None].expand(-1, -1, x.size(1), -1).flatten(0, 1)
    return layer(x, x, x, attn_mask=mask, average_attn_weights=False)[1]


class TestAttention(RuleTests):
    cases = {
        "self": RuleCase(attention(), rows, of_itself),
        "separate": RuleCase(
            attention(kdim=3, vdim=2, add_bias_kv=True, add_zero_attn=True),
            lambda B, T: (rows(B, T), torch.randn(B, T, 3), torch.randn(B, T, 2)),
        ),
        "padded": RuleCase(attention(bias=False), rows, padded),
        "weights": RuleCase(attention(), rows, weights_of_heads),
        "time first": RuleCase(
            attention(batch_first=False),
            rows,
            lambda layer, x: of_itself(layer, x.transpose(0, 1)).transpose(0, 1),
        ),
        "encoder layer": RuleCase(
            lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), rows
        ),
        "transformer": RuleCase(
            lambda: nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True),
            lambda B, T: (rows(B, T), rows(B, 3)),
            without=("test_ways",),
        ),
    }
