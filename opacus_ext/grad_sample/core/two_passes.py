"""Ghost clipping: one pass for the norms, another for the clipped sum (Lee & Kifer).

The first pass keeps norms alone. The second one goes through the same graph with the
gradients of the outputs scaled by the clipping factors, and gives the sum as plain
autograd gives it.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from opacus_ext.grad_sample.core.clip import ClippedSum, digest
from opacus_ext.grad_sample.core.gradients import (
    ParameterUse,
    backward,
    gradients_of_group,
    nodes_of,
)
from opacus_ext.grad_sample.factors import wide
from opacus_ext.refused import Refused

T = torch.Tensor


class TwoPassSum(ClippedSum):
    """The clipped sum of gradients, by two passes; see :class:`~clip.ClippedSum`."""

    def add_group(self, rows: T | None, group: Any, *given: Any) -> list[T | None]:
        if self.per_parameter:  # each parameter has factors of its own
            return super().add_group(rows, group, *given)
        norms = self.group_norms(group.size, keep=False)
        digests: dict[int, T] = {}

        def note(use: ParameterUse, backprops: T) -> None:
            digests[id(use)] = digest(backprops)

        done = norms.take
        samples, of_inputs = gradients_of_group(group, *given, done=done, seen=note)
        with torch.no_grad():
            norms.finish(samples)
        if not bool(norms.norms.isfinite().all()):
            return super().add_group(rows, group, *given)  # two would spread it
        factors, _ = self._clip(rows, norms.norms)
        own = self.factors_of(None, factors)
        scaled = [
            None if g is None else g * own.to(g).view(-1, *[1] * (g.dim() - 1))
            for g in given[1]
        ]
        self._add(self._second_pass(group, given[0], scaled, digests, factors))
        return of_inputs

    def _second_pass(
        self,
        group: Any,
        outputs: Sequence[T],
        grads: Sequence[T | None],
        digests: dict[int, T],
        factors: T,
    ) -> list[T | None]:
        gaps: list[tuple[T, T]] = []  # and what was expected
        dtypes: list[torch.dtype] = []

        def compare(use: ParameterUse, backprops: T) -> None:
            if id(use) in digests:
                known = digests[id(use)]
                expected = known * self.factors_of(use, factors).to(known)
                gaps.append(((digest(backprops) - expected).abs(), expected[0]))
                dtypes.append(backprops.dtype)

        values = group.values()
        shared = [v.shared for v in values]
        found = backward(outputs, grads, group.uses, compare, shared)
        largest = max((float(d[0].max()) for d in digests.values()), default=0.0)
        if _differ(gaps, largest, dtypes) and _differ(
            gaps, largest, [*dtypes, *_dtypes_in(outputs)]
        ):
            raise Refused(
                "The backward pass of the model is not linear (a hook or an autograd "
                "function that clips or changes gradients of activations?), so that "
                'the second pass of mode "ghost" gives other gradients than the first.',
                remedy='Use grad_sample_mode="ghost_bk" or "hooks".',
            )
        pairs = [(v, g) for v, g in zip(values, found) if g is not None]
        if not pairs:
            return [None] * len(self.params)
        edges = [v.edge or get_gradient_edge(v.tensor) for v, _ in pairs]
        given = edges, self.params, [g for _, g in pairs]
        sums = torch.autograd.grad(*given, retain_graph=True, allow_unused=True)
        return [None if g is None else wide(g) for g in sums]


def _differ(
    gaps: Sequence[tuple[T, T]], largest: float, dtypes: Sequence[torch.dtype]
) -> bool:
    """
    Whether gradients differ by more than rounding in these types: by gaps, each with
    the norm that was expected, beside the largest norm that there is.
    """
    width = min((dtype.itemsize for dtype in dtypes), default=8)
    fine, coarse = (1e-2, 0.1) if width < 4 else (1e-5 if width < 8 else 1e-7, 1e-3)
    return any(bool((gap > coarse * x + fine * largest).any()) for gap, x in gaps)


def _dtypes_in(outputs: Sequence[T]) -> list[torch.dtype]:
    """The types that a graph computes in."""
    given = (
        getattr(node, "_input_metadata", ())
        for node in nodes_of(y for y in outputs if y.requires_grad)
    )
    return [x.dtype for each in given for x in each if x.dtype.is_floating_point]
