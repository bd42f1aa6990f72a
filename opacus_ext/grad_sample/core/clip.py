"""From per-sample gradients to norms and to the clipped sum.

Samples come in groups. A group gives norms, and the sum of its gradients weighted with
the clipping factors of these; the sums of all groups add up (:class:`ClippedSum`).
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.core.gradients import SMALL, Collector, backward
from opacus_ext.grad_sample.core.uses import ParameterUse
from opacus_ext.grad_sample.factors import GradSample, workspace
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.refused import Refused

T = torch.Tensor
Samples = Dict[int, GradSample]  # by the id of a parameter; zero where there is none


class GroupNorms:
    """
    The norms of a group's gradients, and what was computed on the way to them.

    Args:
        params: all parameters, in order
        size: number of samples
        per_parameter: whether each parameter's norms are wanted, or those of all
        keep: whether the sum will be asked for, or the norms alone

    Attributes:
        norms: ``[B]``, or ``[parameters, B]``; in float32 or wider
    """

    def __init__(
        self,
        params: Sequence[T],
        size: int,
        per_parameter: bool = False,
        keep: bool = True,
    ):
        self.params, self.size = params, size
        self.per_parameter, self.keep = per_parameter, keep
        self.dtype = torch.promote_types(params[0].dtype, torch.float32)
        self.samples: Samples = {}
        self._side_by_side: Tuple[List[int], Optional[T]] = ([], None)
        self._squares: Dict[int, T] = {}
        self._budget = workspace() if keep else 0

    def take(self, p: T, sample: GradSample) -> None:
        """All gradients of a parameter are known; those of small ones can wait."""
        if not (sample.numel <= SMALL and sample.flat() is not None):
            self._square(p, sample)

    def _square(self, p: T, sample: GradSample) -> None:
        squares = sample.squared_norm(cache=self._budget)
        self._squares[id(p)] = squares.to(self.params[0].device, self.dtype)
        self._budget -= sample.cached_bytes
        if not self.keep:
            sample.clear()

    def finish(self, samples: Samples) -> T:
        """The norms; gradients of parameters that are missing are zero."""
        self.samples = samples
        if not self.per_parameter:
            self._side_by_side = self._small_ones(self.dtype)
        places, rows = self._side_by_side
        squares = [] if rows is None else [_square_sum(rows)]
        for i, p in enumerate(self.params):
            sample = samples.get(id(p))
            if i in places:
                continue
            if sample is not None:
                if id(p) not in self._squares:
                    self._square(p, sample)
                squares.append(self._squares[id(p)])
            elif self.per_parameter or not squares:
                device = self.params[0].device
                squares.append(torch.zeros(self.size, dtype=self.dtype, device=device))
        total = torch.stack(squares)
        self.norms = (total if self.per_parameter else total.sum(0)).sqrt()
        return self.norms

    def _small_ones(self, dtype: torch.dtype) -> Tuple[List[int], Optional[T]]:
        """Small gradients that are there already, put side by side."""
        places, rows = [], []
        for i, p in enumerate(self.params):
            sample = self.samples.get(id(p))
            if sample is None or sample.numel > SMALL:
                continue
            flat = sample.flat()
            if flat is not None and flat.device == self.params[0].device:
                places.append(i)
                rows.append(flat.to(dtype))
        return (places, torch.cat(rows, dim=1)) if len(rows) > 1 else ([], None)

    def drop(self, bad: T) -> None:
        """Makes the gradients of some samples zero, whatever they are; ``[B]``."""
        for sample in self.samples.values():
            sample.drop(bad)
        places, rows = self._side_by_side
        if rows is not None:
            self._side_by_side = places, rows.masked_fill(bad[:, None], 0)

    def weighted_sums(self, factors: T) -> List[Optional[T]]:
        """
        The sum over samples of factors times gradients, for each parameter; None for
        those that were not used.

        Args:
            factors: as ``norms``
        """
        found: List[Optional[T]] = [None] * len(self.params)
        places, rows = self._side_by_side
        if rows is not None:
            sizes = [self.params[i].numel() for i in places]
            for i, total in zip(places, (factors.to(rows) @ rows).split(sizes)):
                found[i] = total.view(self.params[i].shape)
        for i, p in enumerate(self.params):
            sample = self.samples.get(id(p))
            if sample is not None and i not in places:
                own = factors[i] if factors.dim() > 1 else factors
                found[i] = sample.weighted_sum(own.to(p.device))
        return found


def _square_sum(rows: T) -> T:
    return torch.linalg.vector_norm(rows, dim=1).square()


class ClippedSum:
    """
    The clipped sum of gradients that come group by group.

    Args:
        params: by name
        size: number of samples
        clipping: a clipping function, see :func:`~opacus_ext.clipping.Clipping`
        on_nonfinite: what becomes of a sample whose gradient is not finite: "drop" (it
            counts as zero, with a warning) or "raise"
        scale: what the losses were multiplied by; the gradients are divided by it

    Attributes:
        norms: of the samples, before clipping ``[B]``; infinite if not finite
    """

    def __init__(
        self,
        params: Dict[str, T],
        size: int,
        clipping: Callable[[T], T],
        on_nonfinite: str = "drop",
        scale: float = 1.0,
    ):
        self.names, self.params = list(params), list(params.values())
        self.clipping, self.on_nonfinite, self.scale = clipping, on_nonfinite, scale
        self.per_parameter = getattr(clipping, "per_parameter", False)
        like = self.params[0]
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.norms = torch.zeros(size, dtype=dtype, device=like.device)
        self._totals: List[Optional[T]] = [None] * len(self.params)

    def add_group(
        self,
        rows: Optional[T],
        group: Any,
        outputs: Sequence[T],
        grads: Sequence[Optional[T]],
        params: Sequence[T],
        inputs: Sequence[T] = (),
    ) -> List[Optional[T]]:
        """
        Adds the gradients of samples that have run at once.

        Args:
            rows: which samples of the batch these are, ``[size]``; None: all
            group: in which they ran
            outputs: of all of them, with their graph
            grads: of these
            params: of the model, of which gradients may be wanted
            inputs: leaves whose gradients are wanted, too

        Returns:
            the gradients of the inputs
        """
        norms = self.group_norms(group.size)
        samples, of_inputs = gradients_of_group(
            group, outputs, grads, params, inputs, norms.take
        )
        with torch.no_grad():
            norms.finish(samples)
            self.add(rows, norms)
        return of_inputs

    def group_norms(self, size: int, keep: bool = True) -> GroupNorms:
        """Of a group, to be computed; see :class:`GroupNorms`."""
        return GroupNorms(self.params, size, self.per_parameter, keep)

    def factors_of(self, use: Optional[ParameterUse], factors: T) -> T:
        """Of all factors those of a use's samples; None for the group's."""
        return factors

    @torch.no_grad()
    def add_samples(self, samples: Samples) -> None:
        """Adds the gradients of all samples."""
        norms = GroupNorms(self.params, len(self.norms), self.per_parameter)
        norms.finish(samples)
        self.add(None, norms)

    @torch.no_grad()
    def add(self, rows: Optional[T], group: GroupNorms) -> None:
        """Adds the gradients of a group, whose norms are known."""
        factors, bad = self._clip(rows, group.norms)
        if bad is not None:
            group.drop(bad)
        self._add(group.weighted_sums(factors))

    def add_clipped(self, rows: Optional[T], norms: T, sums: List[Optional[T]]) -> None:
        """Adds sums that are clipped already, by these norms."""
        bad = self._not_finite(norms, rows)
        self._set_norms(
            rows, norms if bad is None else norms.masked_fill(bad, math.inf)
        )
        self._add(sums)

    def _clip(self, rows: Optional[T], norms: T) -> Tuple[T, Optional[T]]:
        """
        The factors of gradients with some norms, and which of these are not finite;
        None if all are.
        """
        norms = norms if self.scale == 1 else norms / self.scale
        bad = self._not_finite(norms, rows)
        if bad is not None:
            norms = norms.masked_fill(bad, math.inf)
        self._set_norms(rows, norms)
        return self._factors(norms, bad), bad

    @torch.no_grad()
    def add_one(self, row: int, by_id: Dict[int, T]) -> None:
        """Adds the gradient of one sample, by the ids of the parameters."""
        like = self.norms
        used = [i for i, p in enumerate(self.params) if id(p) in by_id]
        dense = [_wide(by_id[id(self.params[i])]) for i in used]
        each = like.new_zeros(len(self.params))
        if used:
            norms = torch._foreach_norm(dense)
            each[used] = torch.stack([n.to(like) for n in norms])
        each = each / self.scale
        norms = each[:, None] if self.per_parameter else each.norm()[None]
        rows = torch.tensor([row], device=like.device)
        bad = self._not_finite(norms, rows)
        if bad is not None:
            self._set_norms(rows, norms.masked_fill(bad, math.inf))
            return
        self._set_norms(rows, norms)
        factors = self._factors(norms, None)
        if self.per_parameter:
            dense = [g * factors[i, 0].to(g) for i, g in zip(used, dense)]
            factor = 1.0
        else:
            factor = float(factors[0])
        grads, old = dict(zip(used, dense)), []
        for i, g in grads.items():
            if self._totals[i] is None:
                self._totals[i] = (g * factor).contiguous()
            else:
                old.append(i)
        if old:
            totals = [self._totals[i] for i in old]
            torch._foreach_add_(totals, [grads[i] for i in old], alpha=factor)

    def sums(self) -> Dict[str, T]:
        """The clipped sums by name, in the types of the parameters."""
        return {
            name: (
                torch.zeros_like(p, requires_grad=False)
                if total is None
                else total.to(p.device, p.dtype)
            )
            for name, p, total in zip(self.names, self.params, self._totals)
        }

    def _set_norms(self, rows: Optional[T], norms: T) -> None:
        total = norms.norm(dim=0) if norms.dim() > 1 else norms
        if rows is None:
            self.norms = total.to(self.norms)
        else:
            self.norms[rows.to(self.norms.device)] = total.to(self.norms)

    def _factors(self, norms: T, bad: Optional[T]) -> T:
        factors = self.clipping(norms)
        if not isinstance(factors, T) or factors.shape != norms.shape:
            raise Refused(
                f"The clipping function gave {getattr(factors, 'shape', factors)} for "
                f"norms of shape {tuple(norms.shape)}.",
                parameter="clipping",
                remedy="It must give one factor for each norm.",
            )
        if bad is not None:
            factors = factors.masked_fill(bad, 0)
        return factors if self.scale == 1 else factors / self.scale

    def _not_finite(self, norms: T, rows: Optional[T]) -> Optional[T]:
        """Which samples have a gradient that is not finite; None if none has."""
        finite = norms.isfinite()
        if bool(finite.all()):
            return None
        bad = ~(finite.all(0) if norms.dim() > 1 else finite)
        places = range(len(bad)) if rows is None else rows.tolist()
        report_not_finite(
            [b for b, is_bad in zip(places, bad.tolist()) if is_bad],
            self.on_nonfinite,
        )
        return bad

    def _add(self, sums: Sequence[Optional[T]]) -> None:
        for i, new in enumerate(sums):
            if new is not None:
                old = self._totals[i]
                self._totals[i] = new if old is None else old.add_(new)


class DenseGrads:
    """
    Gradients of all samples ``[B, *shape]``, that come group by group.

    Args:
        params: by name
        size: number of samples
    """

    def __init__(self, params: Dict[str, T], size: int):
        self.params, self.size = params, size
        self._found: Dict[str, T] = {}

    def add_group(
        self, rows: Optional[T], group: Any, *given: Any
    ) -> List[Optional[T]]:
        """See :meth:`ClippedSum.add_group`."""
        samples, of_inputs = gradients_of_group(group, *given)
        self.add(rows, samples)
        return of_inputs

    @torch.no_grad()
    def add(self, rows: Optional[T], samples: Samples) -> None:
        """Adds the gradients of a group."""
        for name, p in self.params.items():
            sample = samples.get(id(p))
            if sample is None:
                continue
            new = sample.materialize()
            if rows is None:
                self._found[name] = new
            else:
                self._whole(name, new)[rows.to(new.device)] = new

    @torch.no_grad()
    def add_one(self, row: int, grads: Dict[int, T]) -> None:
        """Adds the gradient of one sample, by the ids of the parameters."""
        for name, p in self.params.items():
            g = grads.get(id(p))
            if g is not None:
                self._whole(name, g[None])[row] = g

    def merge(self, other: DenseGrads) -> None:
        """Adds the gradients of another forward pass of the same samples."""
        for name, new in other._found.items():
            old = self._found.get(name)
            self._found[name] = new if old is None else old + new

    def found(self) -> Iterator[Tuple[T, T]]:
        """Each parameter that was used, and its gradients ``[B, *shape]``."""
        for name, rows in self._found.items():
            yield self.params[name], rows

    def _whole(self, name: str, new: T) -> T:
        if name not in self._found:
            self._found[name] = new.new_zeros(self.size, *new.shape[1:])
        return self._found[name]

    def grads(self) -> Dict[str, T]:
        """By name, in the types of the parameters."""
        return {
            name: (
                self._found[name].to(p.device, p.dtype)
                if name in self._found
                else torch.zeros(self.size, *p.shape, dtype=p.dtype, device=p.device)
            )
            for name, p in self.params.items()
        }


def gradients_of_group(
    group: Any,
    outputs: Sequence[T],
    grads: Sequence[Optional[T]],
    params: Sequence[T],
    inputs: Sequence[T] = (),
    done: Optional[Callable[[T, GradSample], None]] = None,
    seen: Optional[Callable[[ParameterUse, T], None]] = None,
    retain_graph: bool = False,
) -> Tuple[Samples, List[Optional[T]]]:
    """
    The gradients of samples that have run at once.

    Args:
        group: in which they ran
        outputs: of all of them, with their graph
        grads: of these
        params: of the model, of which gradients may be wanted
        inputs: leaves whose gradients are wanted, too
        done: called with a parameter and its gradients when all of these are known
        seen: called with each use and the gradient that arrives there

    Returns:
        those of the parameters by their ids, and those of the inputs

    Raises:
        NotAtOnce: if a parameter was used where the group has not seen it
    """
    collector = Collector({id(p): p for p in params}, group.size, group.uses, done)

    def take(use: ParameterUse, backprops: T) -> None:
        if seen is not None:
            seen(use, backprops)
        collector.add(use, backprops)

    others = [*params, *inputs]
    found = backward(outputs, grads, group.uses, take, others, retain_graph)
    if any(g is not None for g in found[: len(params)]):
        raise NotAtOnce("a use of a parameter that is not seen (an autograd function)")
    with torch.no_grad():
        return collector.finish(), found[len(params) :]


def _wide(g: T) -> T:
    return g.float() if g.dtype.itemsize < 4 else g


def report_not_finite(samples: List[int], on_nonfinite: str) -> None:
    """
    Args:
        samples: the numbers of those whose gradient is not finite
        on_nonfinite: "drop" or "raise"

    Warns:
        RuntimeWarning: that they count as zero

    Raises:
        Refused: with "raise"
    """
    what = f"The gradient of sample {samples[0]} is not finite"
    advice = (
        "Look for a division by zero or a log of zero in the model or the loss, and "
        "where float16 overflows use bfloat16, or a smaller scale in "
        "loss.backward(scale=...)."
    )
    if on_nonfinite == "raise":
        raise Refused(
            f"{what}, so that it can't be clipped. Nothing was changed.", remedy=advice
        )
    warnings.warn(
        f'{what}: it counts as zero. make_private(on_nonfinite="raise") makes it an '
        f"error. {advice}",
        RuntimeWarning,
        stacklevel=4,
    )
