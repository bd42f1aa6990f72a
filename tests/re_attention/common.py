"""Models whose averaged gradients have a known noise."""

import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from opacus_ext import track_errors
from opacus_ext.models import DPFormer
from opacus_ext.re_attention import Uncertain
from opacus_ext.re_attention.propagation import Errors

D = torch.float64


def track(model, shares=None, noise=0.1, **options):
    """Tracks the errors of a model whose averaged gradients have a known noise."""
    optimizer = DPOptimizer(
        torch.optim.SGD([*model.parameters(), torch.zeros(1)], lr=0.1),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    return track_errors(model, optimizer, shares, **options)


def dpformer(heads=1, **options):
    torch.manual_seed(0)
    model = DPFormer(9, 4, width=8, heads=heads, dropout=0.0, **options).double()
    nn.init.normal_(model.embedding.weight)
    return model


def sequences(batch=3, length=4):
    return torch.randint(1, 10, (batch, length))


def some_shares():
    """From common to never seen."""
    shares = torch.linspace(1.0, 0.05, 10)
    shares[0] = shares[3] = 0.0
    return shares


def uncertain(value, variance=0.0, variances=(), where="logits", cap=None):
    """A value with errors, outside of a model."""
    variance = torch.as_tensor(variance, dtype=D).expand(*value.shape[:-1], 1)
    return Uncertain(value, variance, Errors(dict(variances), where, cap))
