"""Ghost clipping: one backward pass for norms, another for the clipped sum.

Both passes go through one graph (Lee & Kifer 2020). The first keeps only norms. In the
second, each parameter's gradients are summed, weighted by the clipping factors, and
dropped as soon as they are complete.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

from opacus_ext.grad_sample.core.clip import ClippedSum, ExactGroup
from opacus_ext.grad_sample.core.gradients import (
    Collector,
    GradSamples,
    ParameterUse,
    Prints,
    run_backward,
)
from opacus_ext.grad_sample.factors import GradSample, full_precision
from opacus_ext.refused import Refused

T = torch.Tensor


class TwoPassSum(ClippedSum):
    """The clipped sum by two backward passes; see :class:`~clip.ClippedSum`."""

    def add_group(self, rows: T | None, group: Any, *given: Any) -> list[T | None]:
        """See :meth:`~clip.ClippedSum.add_group`."""
        device = self.norms.device
        with torch.no_grad(), full_precision(device):
            return self._add_twice(rows, group, *given)

    def _add_twice(
        self,
        rows: T | None,
        group: Any,
        outputs: Sequence[T],
        grads: Sequence[T | None],
        params: Sequence[T],
        inputs: Sequence[T] = (),
    ) -> list[T | None]:
        norms = self.group_norms(group.size, keep=False)
        places = {id(p): i for i, p in enumerate(self.params)}

        def one_pass(
            take: Callable[[T, GradSample], None], prints: Prints | None = None
        ) -> list[T | None]:
            """
            Runs a backward pass. Calls ``take`` with each parameter and its gradients
            when these are complete.
            """
            frees = group.frees_parameters
            collector = Collector(params, group.size, group.uses, frees, prints=prints)
            samples = collector.samples

            def receive(use: ParameterUse, backprops: T) -> None:
                for p in collector.add(use, backprops):
                    take(p, samples.pop(id(p)))

            with torch.enable_grad():
                given = group.uses, outputs, grads, params, inputs
                _, of_inputs = run_backward(*given, receive, retain_graph=True)
            collector.finish()
            for p in params:
                if id(p) in samples:
                    take(p, samples.pop(id(p)))
            return of_inputs

        first, second = Prints(), Prints()
        small: GradSamples = {}

        def measure(p: T, sample: GradSample) -> None:
            norms.add(p, sample)
            small[id(p)] = sample

        one_pass(measure, first)

        def exact(at: T) -> ExactGroup:
            """Runs a pass for the samples whose norms are uncertain."""
            wide: GradSamples = {}

            def widen(p: T, sample: GradSample) -> None:
                if id(p) in places and norms.rows_of(p) is not None:
                    wide[id(p)] = norms.wide(p, sample, at)

            one_pass(widen)
            return norms.exact(at, wide)

        clipped = self._clip(rows, norms.finish(small), exact)
        factors = norms.rounded(clipped.factors)
        if clipped.apart is not None:
            norms.drop(clipped.apart)
        sums = norms.small_sums(factors)

        def add(p: T, sample: GradSample) -> None:
            samples = norms.rows_of(p)
            if samples is None or id(p) in sums:
                return
            if clipped.apart is not None:
                sample.drop(clipped.apart[samples])
            weights = factors[places[id(p)]] if self.per_parameter else factors
            sums[id(p)] = sample.weighted_sum(weights[samples].to(p.device))

        of_inputs = one_pass(add, second)
        if first.differ_from(second):
            raise Refused(
                "Two backward passes through the model gave other gradients (a hook or "
                "autograd function has state or draws random numbers), but mode "
                '"ghost" computes norms in one and the sum in the other.',
                remedy='Use grad_sample_mode="ghost_bk" or "hooks".',
            )
        self.reached |= bool(sums)
        self.put(clipped.join([sums.get(id(p)) for p in self.params]))
        return of_inputs
