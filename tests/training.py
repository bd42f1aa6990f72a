"""What tests of trainers share: the draws of a seed, and the oracle of a run."""

import torch

from opacus_ext.data.logical import derive_seed

from .common import clipped_sum, norms_of, oracle


def drawn(seed, step, records, size):
    """The records of a step, each drawn with probability ``size / records``."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "draw", step))
    keys = torch.rand(records, generator=generator, dtype=torch.float64)
    return (keys < size / records).nonzero()[:, 0]


def train_alone(
    model, optimizer, draws, loss_of, size, bound, clipping="flat", noise=(0.0, None)
):
    """
    Trains on the clipped gradients of records alone. Returns how many were longer than
    ``bound``.

    ``loss_of(model, i)`` is the loss of record ``i``, ``size`` the expected batch size,
    and ``noise`` the standard deviation of the noise and its generator.
    """
    names = {p: name for name, p in model.named_parameters()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    sizes, clipped = [p.numel() for p in order], 0
    for numbers in draws:
        grads = oracle(model, numbers, lambda model, i: [loss_of(model, int(i))])
        sums = clipped_sum(grads, clipping, bound)
        clipped += int((norms_of(grads) > bound).sum())
        std, generator = noise
        parts = torch.normal(0, std, (sum(sizes),), generator=generator).split(sizes)
        for p, x in zip(order, parts):
            p.grad = (sums[names[p]] + x.view_as(p)) / size
        optimizer.step()
    return clipped


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(a, b):
    """The largest difference of two models' weights."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)
