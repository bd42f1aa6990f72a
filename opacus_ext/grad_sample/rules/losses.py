"""Cross entropy by torch's kernel, as vmap copies all logits several times."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.rules.registry import handles

T = torch.Tensor


@handles(F.cross_entropy)
def cross_entropy(
    group: Any,
    func: Callable,
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
    samples = group.is_batched(input) and group.is_batched(target)
    if not (group.eager and samples and group.level.innermost) or by_vmap:
        given = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return group.call(func, input, target, *given)
    x, y = group.inner(input), group.inner(target)
    with group.outside():
        kind: Any = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
        logits, labels = (z.flatten(0, 1) if input.dim() > 1 else z for z in (x, y))
        losses = F.cross_entropy(logits, labels, reduction="none", **kind)
        losses = losses.view(y.shape)
        if reduction != "none":
            losses = _by_sample(losses)
        if reduction == "mean":
            losses = losses / _by_sample(y != ignore_index)
    return group.wrap(losses)


def _by_sample(x: T) -> T:
    """Returns the sum for each sample ``[B]``."""
    return x.view(len(x)) if x.numel() == len(x) else x.flatten(1).sum(1)
