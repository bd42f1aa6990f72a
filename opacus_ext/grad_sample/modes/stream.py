"""Clipped sums of samples that run one after the other, each added as it comes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

import torch

from opacus_ext.grad_sample.modes.clip import Sums
from opacus_ext.optimizers.clipping import report_not_finite
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.modes.step import Step


class Stream:
    """Clips the gradients of one sample after the other, and adds them up."""

    def __init__(self, step: Step):
        self.step = step
        self.total: Optional[List[torch.Tensor]] = None
        self.norms: List[torch.Tensor] = []

    def sample(self, b: int, grads: Dict) -> None:
        """The gradients of sample ``b``."""
        step = self.step
        if b != len(self.norms):
            raise Refused(
                f"{step.engine.describe()}: sample {b} has gradients in several "
                "parts, which can't be clipped one after the other.",
                module=step.engine.describe(),
                remedy="Let the forward return all that the loss uses.",
            )
        params = step.params
        found = [grads.get(p) for p in params]
        used = [i for i, g in enumerate(found) if g is not None]
        own = [_wide(found[i]) for i in used]
        norms = step.losses.new_zeros(len(params), dtype=step.dtype)
        if own:
            norms[used] = torch.stack(torch._foreach_norm(own)).to(norms) / step.scale
        bad = not bool(norms.isfinite().all())
        if bad:
            each = [n[None] for n in norms]
            report_not_finite(each, step._names(), step.mode.on_nonfinite, b)
            self.norms.append(norms.new_full((), math.inf))
            return
        factors = step.clipping.factors(norms[:, None], step.bound)
        self.norms.append(torch.linalg.vector_norm(norms))
        if self.total is None:
            self.total = [None] * len(params)
        if factors.dim() > 1:
            scales = [factors[i, 0] / step.scale for i in used]
            for g, c in zip(own, scales):
                g.mul_(c)
            alpha = 1.0
        else:
            alpha = float(factors[0] / step.scale)
        new = [(i, g) for i, g in zip(used, own) if self.total[i] is None]
        more = [(i, g) for i, g in zip(used, own) if self.total[i] is not None]
        if new:
            if alpha != 1.0:
                torch._foreach_mul_([g for _, g in new], alpha)
            for i, g in new:
                self.total[i] = g
        if more:
            torch._foreach_add_(
                [self.total[i] for i, _ in more], [g for _, g in more], alpha=alpha
            )

    def finish(self) -> Tuple[Sums, torch.Tensor]:
        """The clipped sums and the norms."""
        params = self.step.params
        total = self.total or [None] * len(params)
        sums = {
            p: (
                torch.zeros_like(p, requires_grad=False) if t is None else t.to(p.dtype)
            )
            for p, t in zip(params, total)
        }
        norms = self.norms or [self.step.losses.detach().new_zeros(self.step.size)]
        return sums, torch.stack(norms).view(-1)


def _wide(g: torch.Tensor) -> torch.Tensor:
    g = g.to_dense() if g.is_sparse else g
    return g.float() if g.dtype.itemsize < 4 else g
