"""Ghost clipping: one backward pass for norms, another for the clipped sum.

Both passes go through one graph (Lee & Kifer 2020). The first keeps only norms. In the
second, each parameter's gradients are summed, weighted by the clipping factors, and
dropped as soon as they are complete.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

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


@torch.no_grad()
def add_in_two_passes(
    total: Any,
    rows: T | None,
    group: Any,
    outputs: Sequence[T],
    grads: Sequence[T | None],
    params: Sequence[T],
    inputs: Sequence[T] = (),
) -> list[T | None]:
    """Adds the gradients of a group; see :meth:`~clip.ClippedSum.add_group`."""
    with full_precision(total.norms.device):
        norms = total.group_norms(group.size, keep=False)
        places = {id(p): i for i, p in enumerate(total.params)}

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

        def exact(at: T) -> Any:
            """Runs a pass for the samples whose norms are uncertain."""
            wide: GradSamples = {}

            def widen(p: T, sample: GradSample) -> None:
                if id(p) in places and norms.rows_of(p) is not None:
                    wide[id(p)] = norms.wide(p, sample, at)

            one_pass(widen)
            return norms.exact(at, wide)

        norms.finish(small)
        clipped = total.clip(rows, norms, exact)
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
            weights = factors[places[id(p)]] if total.per_parameter else factors
            sums[id(p)] = sample.weighted_sum(weights[samples].to(p.device))

        of_inputs = one_pass(add, second)
        if first.differ_from(second):
            raise Refused(
                "Two backward passes through the model gave other gradients (a hook or "
                "autograd function has state or draws random numbers), but mode "
                '"ghost" computes norms in one and the sum in the other.',
                remedy='Use grad_sample_mode="ghost_bk" or "hooks".',
            )
        total.reached |= bool(sums)
        total.put(clipped.join([sums.get(id(p)) for p in total.params]))
        return of_inputs
