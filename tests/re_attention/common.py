"""Models whose averaged gradients have a known noise."""

import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from opacus_ext import track_errors
from opacus_ext.models import DPFormer
from opacus_ext.re_attention import Uncertain
from opacus_ext.re_attention.propagation import Errors

D = torch.float64


def optimizer_of(model, noise=0.1, c=1.0, batch=1):
    """An optimizer by hand whose averaged gradients have noise of std ``noise``."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return DPOptimizer(
        torch.optim.SGD([*trained, torch.zeros(1)], lr=0.1),
        noise_multiplier=noise * batch / c,
        max_grad_norm=c,
        expected_batch_size=batch,
    )


def track(model, shares=None, noise=0.1, **options):
    return track_errors(model, optimizer_of(model, noise), shares, **options)


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
