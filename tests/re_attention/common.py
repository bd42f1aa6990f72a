"""Models whose averaged gradients have a known noise."""

import torch
from opacus.optimizers import DPOptimizer

from opacus_ext import track_errors


def optimizer_of(model, noise=0.1, c=1.0, batch=1):
    """An optimizer by hand whose averaged gradients have noise of std ``noise``."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return DPOptimizer(
        torch.optim.SGD(trained, lr=0.1),
        noise_multiplier=noise * batch / c,
        max_grad_norm=c,
        expected_batch_size=batch,
    )


def track(model, shares=None, noise=0.1, **options):
    return track_errors(model, optimizer_of(model, noise), shares, **options)
