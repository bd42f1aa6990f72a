"""Cross entropy by torch's kernel, as vmap copies all logits several times."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.rules.registry import of_all

T = torch.Tensor


@of_all(F.cross_entropy)
def cross_entropy(
    input: T,
    target: T,
    weight: T | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> T:
    """Runs torch's kernel for the rows of all samples, if targets are labels."""
    # torch's own error tells of another reduction.
    is_known = reduction in ("none", "mean", "sum")
    is_plain = weight is None and size_average is None and reduce is None
    if not is_known or not is_plain or target.is_floating_point():
        return NotImplemented
    if len(input) != len(target):
        return NotImplemented
    logits, labels = input, target
    if input.dim() > 2:
        logits, labels = input.flatten(0, 1), target.flatten(0, 1)
    losses = F.cross_entropy(
        logits,
        labels,
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    losses = losses.view(target.shape)
    if reduction != "none":
        losses = _by_sample(losses)
    if reduction == "mean":
        losses = losses / _by_sample(target != ignore_index)
    return losses


def _by_sample(terms: T) -> T:
    """Returns the sum for each sample ``[B]``."""
    # The sum of a single term would only be a copy.
    if terms.numel() == len(terms):
        return terms.view(len(terms))
    return terms.flatten(1).sum(1)
