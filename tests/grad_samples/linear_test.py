"""Products with a matrix: linear layers, functions of torch, bilinear forms, PReLU."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from opacus_ext.grad_sample.rules.experts import grouped_linear
from tests.grad_samples.rule_case import RuleCase, RuleTests, op, rows


def addmm(x, w, b):
    return torch.addmm(b, x.flatten(0, 1), w).unflatten(0, x.shape[:2])


def by_experts(x, index, w):
    y = grouped_linear(x.flatten(0, -2), index.flatten(), w)
    return y.unflatten(0, index.shape)


class TestLinear(RuleTests):
    ops = (F.linear, torch.addmm)
    cases = {
        "linear": RuleCase(lambda: nn.Linear(3, 4), rows(3)),
        "a row": RuleCase(lambda: nn.Linear(3, 4), lambda B, T: torch.randn(B, 3)),
        "long": RuleCase(
            lambda: nn.Linear(3, 4, bias=False), lambda B, T: torch.randn(B, 70 + T, 3)
        ),
        "5-D": RuleCase(lambda: nn.Linear(3, 1), rows(2, 1, 3)),
        "Conv1D": RuleCase(lambda: Conv1D(4, 3), rows(3)),
    }


class TestFunctions(RuleTests):
    cases = {
        "addmm": RuleCase(op(addmm, (3, 4), (4,)), rows(3)),
        "matmul": RuleCase(op(torch.matmul, (3, 4)), rows(2, 3)),
        "matmul, first": RuleCase(op(lambda x, w: w @ x.mT, (4, 3)), rows(3)),
        "bmm": RuleCase(
            op(lambda x, w: torch.bmm(x, w.expand(len(x), 3, 4)), (1, 3, 4)),
            rows(3),
        ),
        "einsum": RuleCase(
            op(lambda x, w: torch.einsum("btd,edh->bteh", x, w), (2, 3, 2)),
            rows(3),
        ),
        "experts": RuleCase(
            op(by_experts, (3, 4, 2)),
            lambda B, T: (torch.randn(B, T, 4), torch.randint(3, (B, T))),
            without=("empty",),
        ),
        "experts, many rows": RuleCase(
            op(by_experts, (3, 4, 2)),
            lambda B, T: (torch.randn(B, 200 * T, 4), torch.randint(2, (B, 200 * T))),
            without=("test_flattened", "empty"),
        ),
    }


class TestBilinear(RuleTests):
    cases = {
        "bilinear": RuleCase(
            lambda: nn.Bilinear(2, 3, 4),
            lambda B, T: (torch.randn(B, T, 2), torch.randn(B, T, 3)),
        ),
        "quadratic": RuleCase(
            lambda: nn.Bilinear(3, 3, 2, bias=False),
            rows(3),
            lambda layer, x: layer(input2=x, input1=x),
        ),
    }


class TestPReLU(RuleTests):
    cases = {
        "one slope": RuleCase(nn.PReLU, rows(3)),
        "one slope, [B]": RuleCase(nn.PReLU, lambda B, T: torch.randn(B)),
        "channels": RuleCase(lambda: nn.PReLU(4), lambda B, T: torch.randn(B, 4, T)),
        "zeros": RuleCase(
            lambda: nn.PReLU(4), lambda B, T: torch.randn(B, 4, T).round().abs() - 1
        ),
    }
