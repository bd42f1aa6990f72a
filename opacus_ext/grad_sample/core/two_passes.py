"""Ghost clipping: one pass for the norms, another for the clipped sum (Lee & Kifer).

The first pass keeps norms alone. The second one goes through the same graph with the
gradients of the outputs scaled by the clipping factors, and gives the sum as plain
autograd gives it.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.core.clip import ClippedSum, gradients_of_group
from opacus_ext.grad_sample.core.gradients import backward
from opacus_ext.grad_sample.core.uses import ParameterUse
from opacus_ext.refused import Refused

T = torch.Tensor


class TwoPassSum(ClippedSum):
    """The clipped sum of gradients, by two passes; see :class:`~clip.ClippedSum`."""

    def add_group(
        self,
        rows: Optional[T],
        group: Any,
        outputs: Sequence[T],
        grads: Sequence[Optional[T]],
        params: Sequence[T],
        inputs: Sequence[T] = (),
    ) -> List[Optional[T]]:
        if self.per_parameter:  # each parameter has factors of its own
            given = (rows, group, outputs, grads, params, inputs)
            return super().add_group(*given)
        norms = self.group_norms(group.size, keep=False)
        digests: Dict[int, T] = {}

        def note(use: ParameterUse, backprops: T) -> None:
            digests[id(use)] = digest(backprops)

        given = (group, outputs, grads, params, inputs)
        samples, of_inputs = gradients_of_group(
            *given, norms.take, note, retain_graph=True
        )
        with torch.no_grad():
            norms.finish(samples)
            finite = bool(norms.norms.isfinite().all())
        if not finite:  # a second pass would spread what is not
            return super().add_group(rows, *given)
        factors, _ = self._clip(rows, norms.norms)
        own = self.factors_of(None, factors)
        scaled = [None if g is None else _times(g, own) for g in grads]
        self._add(self._second_pass(group, outputs, scaled, digests, factors))
        return of_inputs

    def _second_pass(
        self,
        group: Any,
        outputs: Sequence[T],
        grads: Sequence[Optional[T]],
        digests: Dict[int, T],
        factors: T,
    ) -> List[Optional[T]]:
        gaps: List[Tuple[T, T]] = []  # and what was expected
        dtypes: List[torch.dtype] = []

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
        by_id = dict(zip(map(id, self.params), range(len(self.params))))
        sums: List[Optional[T]] = [None] * len(self.params)
        computed: List[Tuple[Any, T]] = []
        for value, g in zip(values, found):
            if g is None:
                continue
            if id(value.tensor) in by_id:
                _add_at(sums, by_id[id(value.tensor)], g)
            elif value.edge is not None:
                computed.append((value.edge, g))
        if computed:
            edges, gs = zip(*computed)
            rest = torch.autograd.grad(
                edges, self.params, gs, allow_unused=True, retain_graph=True
            )
            for i, g in enumerate(rest):
                if g is not None:
                    _add_at(sums, i, g)
        return sums


def _add_at(sums: List[Optional[T]], i: int, g: T) -> None:
    old = sums[i]
    sums[i] = g.float() if g.dtype.itemsize < 4 else g
    if old is not None:
        sums[i] = old + sums[i]


def _times(g: T, factors: T) -> T:
    """``[B, ...]`` times ``[B]``."""
    return g * factors.to(g).view((-1,) + (1,) * (g.dim() - 1))


def _differ(
    gaps: Sequence[Tuple[T, T]], largest: float, dtypes: Sequence[torch.dtype]
) -> bool:
    """
    Whether gradients differ by more than by rounding in these types.

    Args:
        gaps: and what each is a gap of
        largest: norm of a gradient that there is
    """
    width = min((dtype.itemsize for dtype in dtypes), default=8)
    fine, coarse = (1e-2, 0.1) if width < 4 else (1e-5 if width < 8 else 1e-7, 1e-3)
    return any(bool((gap > coarse * x + fine * largest).any()) for gap, x in gaps)


def _dtypes_in(outputs: Sequence[T]) -> List[torch.dtype]:
    """The types that a graph computes in."""
    found, seen, todo = [], set(), [y.grad_fn for y in outputs]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [x.dtype for x in getattr(node, "_input_metadata", ())]
            todo += [parent for parent, _ in node.next_functions]
    return [dtype for dtype in found if dtype.is_floating_point]


def digest(backprops: T) -> T:
    """``[2, B]``: the norm of each sample's gradient, and a sum of its entries."""
    flat = backprops.flatten(1) if backprops.dim() > 1 else backprops[:, None]
    flat = flat if flat.dtype.itemsize >= 4 else flat.float()
    norm = torch.linalg.vector_norm(flat, dim=1)
    return torch.stack([norm, flat.sum(1) / math.sqrt(max(1, flat.shape[1]))])
