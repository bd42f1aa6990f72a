"""Ghost clipping: one backward pass for norms, another for the clipped sum.

Both passes go through one graph (Lee & Kifer 2020). The first keeps only norms. In the
second, each parameter's gradients are summed, weighted by the clipping factors, and
dropped as soon as they are complete.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from opacus_ext.grad_sample.core.clip import ClippedSum, ExactGroup, digest
from opacus_ext.grad_sample.core.gradients import (
    GradSamples,
    ParameterUse,
    gradients_of_group,
)
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.refused import Refused

T = torch.Tensor


class TwoPassSum(ClippedSum):
    """The clipped sum by two backward passes; see :class:`~clip.ClippedSum`."""

    def add_group(self, rows: T | None, group: Any, *given: Any) -> list[T | None]:
        """See :meth:`~clip.ClippedSum.add_group`."""
        norms = self.group_norms(group.size, keep=False)
        digests: dict[int, T] = {}

        def note(use: ParameterUse, backprops: T) -> None:
            digests[id(use)] = digest(backprops)

        one_pass: Any = functools.partial(gradients_of_group, group, *given)
        samples, _ = one_pass(done=norms.add, seen=note)
        by_id = {id(p): i for i, p in enumerate(self.params)}

        def exact(at: T) -> ExactGroup:
            """Runs a pass for the samples whose norms are uncertain."""
            wide: GradSamples = {}

            def keep(p: T, sample: GradSample) -> None:
                if id(p) in by_id and norms.rows_of(p) is not None:
                    wide[id(p)] = norms.wide(p, sample, at)
                sample.clear()

            samples, _ = one_pass(done=keep, seen=lambda use, backprops: None)
            for p in self.params:
                if id(p) in samples and id(p) not in wide:
                    keep(p, samples[id(p)])
            return norms.exact(at, wide)

        with torch.no_grad():
            clipped = self._clip(rows, norms.finish(samples), exact)
            factors = norms.rounded(clipped.factors)
        differ: list[T] = []  # for each use in the second pass: True if it differs
        sums: dict[int, T] = {}

        def compare(use: ParameterUse, backprops: T) -> None:
            differ.append(_differ(digest(backprops), digests.get(id(use)), backprops))

        def add(p: T, sample: GradSample) -> None:
            own = norms.rows_of(p)
            if own is not None:
                if clipped.apart is not None:
                    sample.drop(clipped.apart[own])
                weights = factors[by_id[id(p)]] if factors.dim() > 1 else factors
                sums[id(p)] = sample.weighted_sum(weights[own].to(p.device))
            sample.clear()

        samples, of_inputs = one_pass(done=add, seen=compare)
        with torch.no_grad():
            for p in self.params:
                if id(p) in samples and id(p) not in sums:
                    add(p, samples[id(p)])
        if len(differ) != len(digests) or differ and bool(torch.stack(differ).any()):
            raise Refused(
                "Two backward passes through the model gave other gradients (a hook or "
                "autograd function has state or draws random numbers), but mode "
                '"ghost" computes norms in one and the sum in the other.',
                remedy='Use grad_sample_mode="ghost_bk" or "hooks".',
            )
        self.reached |= bool(sums)
        with torch.no_grad():
            self.put(clipped.join([sums.get(id(p)) for p in self.params]))
        return of_inputs


def _differ(new: T, old: T | None, backprops: T) -> T:
    """Returns True if the digests of some sample differ by more than rounding."""
    if old is None:
        return torch.ones((), dtype=torch.bool, device=new.device)
    new, old = new.nan_to_num(0, 0), old.nan_to_num(0, 0)
    tolerance = 1e-3 if backprops.dtype.itemsize >= 4 else 0.03
    return ((new - old).abs() > tolerance * old[0] + 1e-6 * old[0].max()).any()
