"""Cross entropy by torch's kernel, as vmap copies all logits several times."""

from __future__ import annotations

from typing import Any

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
    legacy = size_average is not None or reduce is not None
    known = reduction in ("none", "mean", "sum")  # others are torch's error
    by_vmap = weight is not None or legacy or target.is_floating_point() or not known
    if by_vmap or len(input) != len(target):
        return NotImplemented
    kind: Any = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
    logits, labels = (
        x.flatten(0, 1) if input.dim() > 2 else x for x in (input, target)
    )
    losses = F.cross_entropy(logits, labels, reduction="none", **kind)
    losses = losses.view(target.shape)
    if reduction != "none":
        losses = _by_sample(losses)
    if reduction == "mean":
        losses = losses / _by_sample(target != ignore_index)
    return losses


def _by_sample(x: T) -> T:
    """Returns the sum for each sample ``[B]``."""
    return x.view(len(x)) if x.numel() == len(x) else x.flatten(1).sum(1)
