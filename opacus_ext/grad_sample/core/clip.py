"""From per-sample gradients to norms and to the clipped sum.

Samples run in groups. A group yields norms, then the sum of its gradients weighted by
the clipping factors; :class:`ClippedSum` adds the sums of all groups.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
)

import torch

from opacus_ext.clipping import check_parameters, is_built_in
from opacus_ext.grad_sample.core.gradients import SMALL, GradSamples, gradients_of_group
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.two_passes import add_in_two_passes
from opacus_ext.grad_sample.core.values import Key
from opacus_ext.grad_sample.factors import (
    ROUNDING,
    GradSample,
    Scale,
    Squares,
    dtype_of,
    full_precision,
    inverse_of,
    norm_of_each,
    real_rows,
    rounded_down,
    sample_norms,
    scaled_norms,
    square_sum,
    upcast,
    workspace,
)
from opacus_ext.refused import Refused

T = torch.Tensor
Reduce = Callable[[Iterable[Optional[T]]], Iterable[Optional[T]]]


def totals_of(norms: T) -> T:
    """Returns norms over all parameters ``[B]``, of norms ``[parameters, B]``, too."""
    return scaled_norms(norms.mT) if norms.dim() > 1 else norms


# -- the norms of a group --------------------------------------------------------------


class GroupNorms:
    """
    The gradient norms of a group, ``[B]`` or per parameter ``[parameters, B]``, in
    float32 or wider. A norm is NaN where rounding may have changed it, as large terms
    have canceled.

    Args:
        params: parameters
        size: number of samples
        per_parameter: True for norms of each parameter
        keep: True if the gradients are kept for the weighted sum
        tensor_key: gives the keys of parameters
    """

    norms: T  # set by :meth:`finish`

    def __init__(
        self,
        params: Sequence[T],
        size: int,
        per_parameter: bool = False,
        keep: bool = True,
        tensor_key: Callable[..., Key] = id,
    ):
        self.params, self.size = params, size
        self.per_parameter, self.keep = per_parameter, keep
        self.keys = list(map(tensor_key, params))
        self.device = params[0].device
        self.dtype = torch.promote_types(params[0].dtype, torch.float32)
        self.samples: GradSamples = {}
        self._squares: dict[int, Squares] = {}
        # Small gradients are concatenated: one product sums them all.
        self._small: list[int] = []  # their keys
        self._small_rows: T | None = None  # [B, entries]
        self._sums_wide = False  # True if some gradients are sums of bfloat16 products
        self._budget = workspace() if keep else 0

    def add(self, p: T, sample: GradSample) -> None:
        """Adds a parameter's gradients; small ones are left to :meth:`finish`."""
        if sample.numel > SMALL or sample.flat() is None:
            self._square(id(p), sample)

    def _square(self, key: int, sample: GradSample) -> None:
        squares = sample.squares(cache=self._budget)
        self._sums_wide |= sample.sums_wide
        self._budget -= sample.cached_bytes
        if not self.keep:
            sample.clear()
        values, least = squares
        if values.dtype != self.dtype or values.device != self.device:
            values = values.to(self.device, self.dtype)
            if least is not None:
                least = least.to(self.device, self.dtype)
            squares = Squares(values, least)
        self._squares[key] = squares

    def finish(self, samples: GradSamples) -> T:
        """Returns the norms; parameters that are missing have a gradient of zero."""
        self.samples = samples
        if not self.per_parameter:
            self._concatenate_small()
        small = set(self._small)
        for key in self.keys:
            if key in samples and key not in self._squares and key not in small:
                self._square(key, samples[key])
        if self.per_parameter:
            squares, least = self._of_each_parameter()
        else:
            squares, least = self._of_all_parameters()
        self._squares_and_least = squares, least
        self.norms = squares.sqrt()
        if least is not None:
            self.norms = self.norms.masked_fill(squares < least, math.nan)
        return self.norms

    def _concatenate_small(self) -> None:
        """Concatenates small gradients that are materialized already."""
        rows: dict[int, T] = {}
        for key, sample in self.samples.items():
            if sample.numel > SMALL or key in self._squares:
                continue
            flat = sample.flat()
            if flat is not None and flat.device == self.device:
                rows[key] = flat
        keys = [key for key in self.keys if key in rows]
        if len(keys) > 1:
            self._small = keys
            # torch.cat converts to the widest dtype, which is that of norms.
            parts = [rows[key] for key in keys]
            self._small_rows = torch.cat(parts, dim=1).to(self.dtype)

    def _zeros(self) -> T:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def _of_each_parameter(self) -> Squares:
        """Returns squares ``[parameters, B]``."""
        values, least, zeros = [], [], self._zeros()
        for key in self.keys:
            squares = self._squares.get(key, Squares(zeros))
            values.append(squares.values)
            least.append(zeros if squares.least is None else squares.least)
        return Squares(torch.stack(values).clamp_(min=0), torch.stack(least))

    def _of_all_parameters(self) -> Squares:
        """Returns squares ``[B]``."""
        parts = list(self._squares.values())
        if self._small_rows is not None:
            parts.append(Squares(square_sum(self._small_rows)))
        if not parts:
            return Squares(self._zeros())
        # Rounding can make a square slightly negative where gradients cancel.
        values = torch.stack([part.values for part in parts]).clamp_(min=0).sum(0)
        least = [part.least for part in parts if part.least is not None]
        if not least:
            return Squares(values)
        return Squares(values, torch.stack(least).sum(0))

    @property
    def norms_from_above(self) -> T:
        """The norms, with a bound from above where one is uncertain."""
        squares, least = self._squares_and_least
        if least is None:
            return self.norms
        above = (squares + ROUNDING * least).sqrt()
        return torch.where(squares < least, above, self.norms)

    def totals(self, norms: T) -> T:
        """Returns the norms over all parameters of this process's samples."""
        return totals_of(norms)

    def wide(self, p: T, sample: GradSample, samples: T) -> GradSample:
        """Returns the gradients of some samples, by their indices, in float64."""
        return sample.wide(samples)

    def exact(self, samples: T, wide: GradSamples) -> ExactGroup:
        """Returns the exact norms of some samples, given :meth:`wide` of each."""
        return ExactGroup(self, samples, wide)

    def drop(self, bad: T) -> None:
        """Sets the gradients of the samples of a mask ``[B]`` to zero."""
        for sample in self.samples.values():
            sample.drop(bad)
        if self._small_rows is not None:
            self._small_rows = self._small_rows.masked_fill(bad[:, None], 0)

    def rounded(self, factors: T) -> T:
        """
        Returns clipping factors that the weighted sum multiplies exactly. On a GPU
        those of bfloat16 models are rounded down to 8 bits: a clipped gradient has the
        same direction, and is up to 0.8 % shorter than the bound.
        """
        return rounded_down(factors).bfloat16() if self._sums_wide else factors

    def small_sums(self, factors: T) -> dict[int, T]:
        """
        Returns, by the ids of the parameters, the weighted sums of small gradients that
        :meth:`finish` has concatenated.
        """
        sums: dict[int, T] = {}
        if self._small_rows is not None:
            total = factors.to(self._small_rows) @ self._small_rows
            sizes = [self.samples[key].numel for key in self._small]
            for key, part in zip(self._small, total.split(sizes)):
                sums[key] = part.view(self.samples[key].shape)
        return sums

    def weighted_sums(self, factors: T) -> Iterator[T | None]:
        """
        Yields the sum over samples of factors times gradients for each parameter; None
        if it was not used. The factors have the shape of the norms.
        """
        small = self.small_sums(factors)
        for i, (key, p) in enumerate(zip(self.keys, self.params)):
            if key in small:
                yield small[key]
            elif key not in self.samples:
                yield None
            else:
                weights = factors[i] if self.per_parameter else factors
                if weights.device != p.device:
                    weights = weights.to(p.device)
                yield self.samples[key].weighted_sum(weights)

    def rows_of(self, p: T) -> slice | None:
        """
        Selects the samples to which gradients of ``p`` belong. None if none has any.
        """
        return slice(None) if id(p) in self.keys else None


class ExactGroup:
    """
    Some samples of a group, for which norms were uncertain or infinite. Gradients are
    in float64; norms are those of materialized gradients, without large squares.

    Args:
        group: norms of all samples
        samples: the indices of those samples in the group
        wide: their gradients, from :meth:`GroupNorms.wide`

    Attributes:
        norms: ``[samples]``, or per parameter ``[parameters, samples]``
    """

    def __init__(self, group: GroupNorms, samples: T, wide: GradSamples):
        self.group, self.params = group, group.params
        self.samples, self.gradients = samples, wide
        shape, device = (len(self.params), len(samples)), group.device
        norms = torch.zeros(shape, dtype=torch.float64, device=device)
        for i, p in enumerate(self.params):
            if id(p) in wide:
                norms[i, self._has(p)] = wide[id(p)].exact_norms().to(norms)
        self.norms = self._of_all(norms)

    def _has(self, p: T) -> slice | T:
        """Indexes those of the samples that have gradients of a parameter."""
        return slice(None)

    def _of_all(self, norms: T) -> T:
        """Returns the norms, given those of each parameter."""
        return norms if self.group.per_parameter else scaled_norms(norms.mT)

    def drop(self, bad: T) -> None:
        """Sets the gradients of the samples of a mask to zero."""
        for p in self.params:
            if id(p) in self.gradients:
                self.gradients[id(p)].drop(bad[self._has(p)])

    def weighted_sums(self, factors: T) -> Iterator[T | None]:
        """See :meth:`GroupNorms.weighted_sums`."""
        for i, p in enumerate(self.params):
            if id(p) not in self.gradients:
                yield None
                continue
            weights = factors[i] if self.group.per_parameter else factors
            weights = weights[self._has(p)].to(p.device, torch.float64)
            yield self.gradients[id(p)].weighted_sum(weights)


# -- clipping factors ------------------------------------------------------------------


class Clipped(NamedTuple):
    """
    Clipping factors of a group.

    Attributes:
        factors: of the norms' shape; 0 for samples that are in ``exact``
        apart: mask ``[B]`` of the samples in ``exact``; None if there are none
        exact: what is added in float64, with factors of its own
    """

    factors: T
    apart: T | None = None
    exact: ExactGroup | None = None
    exact_factors: T | None = None

    def join(self, sums: Iterable[T | None]) -> Iterable[T | None]:
        """Adds what was computed anew to the sums of the other samples."""
        if self.exact is None or self.exact_factors is None:
            return sums
        return map(_added, sums, self.exact.weighted_sums(self.exact_factors))


def _added(total: T | None, other: T | None) -> T | None:
    """Adds two sums, of which one may be missing, in the dtype of the first."""
    if total is None or other is None:
        return other if total is None else total
    return total + other.to(total)


def clipping_factors(
    clipping: Callable[[T], T], norms: T, scale: float | T, bad: T | None = None
) -> T:
    """
    Returns clipping factors, divided by ``scale`` and 0 where ``bad``. The norms are
    those of the gradients divided by ``scale``.
    """
    factors = clipping(norms)
    if not isinstance(factors, T) or factors.shape != norms.shape:
        raise Refused(
            f"The clipping function gave {getattr(factors, 'shape', factors)} for "
            f"norms of shape {tuple(norms.shape)}.",
            parameter="clipping",
            remedy="It must give one factor for each norm.",
        )
    if bad is not None:
        factors = factors.masked_fill(bad, 0)
    return _over(factors, scale)


def is_finite(norms: T) -> bool:
    """Returns True if all norms are finite; it waits for the device."""
    return math.isfinite(float(norms.sum())) or bool(norms.isfinite().all())


def _not_finite(norms: T) -> T:
    """Returns a mask ``[B]`` of the samples with a norm that is not finite."""
    bad = ~norms.isfinite()
    return bad.any(0) if bad.dim() > 1 else bad


def _over(x: T, scale: float | T) -> T:
    """Divides by the scale of the losses, which is 1 but for float16."""
    return x if isinstance(scale, float) and scale == 1 else x / scale


def norms_and_sums(
    group: GroupNorms,
    clipping: Callable[[T], T],
    scale: float | T = 1.0,
    counts: T | bool = True,
) -> tuple[T, list[T | None]]:
    """
    Returns the norms and clipped sums of a finished group, in compiled code. Samples
    that are not in the mask ``counts`` add zero. The sums are valid only if all norms
    are finite.
    """
    norms = _over(group.norms, scale)
    bad = ~(~_not_finite(norms) & counts)
    factors = group.rounded(clipping_factors(clipping, norms, scale, bad))
    return norms, list(group.weighted_sums(factors))


def safe_norms_and_sums(
    group: GroupNorms, clipping: Callable[[T], T]
) -> tuple[T, list[T | None]]:
    """
    Returns the norms and clipped sums of a finished group, in compiled code that no
    eager code follows. A norm that is uncertain is replaced by a bound from above, and
    a gradient that is not finite adds zero.
    """
    bad = _not_finite(group.norms_from_above)
    group.drop(bad)
    norms = group.norms_from_above.masked_fill(bad, math.inf)
    factors = group.rounded(clipping_factors(clipping, norms, 1.0, bad))
    return norms, list(group.weighted_sums(factors))


def sums_by_name(params: dict[str, T], totals: Sequence[T | None]) -> dict[str, T]:
    """
    Returns the sums by name, in float32 or wider: rounding to bfloat16 before the noise
    can exceed the sensitivity. None becomes zero.
    """
    sums = {}
    for (name, p), total in zip(params.items(), totals):
        dtype = p.dtype
        if dtype != torch.float32:
            dtype = torch.promote_types(dtype, torch.float32)
        if total is None:
            total = p.new_zeros(p.shape, dtype=dtype)
        elif total.dtype != dtype or total.device != p.device:
            total = total.to(p.device, dtype)
        sums[name] = total
    return sums


# -- totals ----------------------------------------------------------------------------


class AllOrNothing:
    """
    Code that adds to a total. If it fails in its middle, a part of the gradients is in
    the total, so that later attempts to add to it fail with the same error.
    """

    _error: BaseException | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            error, self._error = self._error, RuntimeError("A sum has failed before.")
            raise error  # whose traceback holds the total: it is held no longer

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._error = error


def _keep_much(group: SampleGroup) -> bool:
    """
    Returns True if the gradients that come from segments would take more memory until
    the clipped sum than what these keep of the forward, and the factors of one.
    """
    if not group.segments:
        return False
    touched: dict[int, T] = {}
    for segment in group.segments:
        for params in segment.touched:
            touched |= params
    rows = group.size * sum(p.numel() for p in touched.values())
    saved = sum(segment.saved for segment in group.segments)
    return rows > saved + max(segment.factors for segment in group.segments)


class ClippedSum:
    """
    The clipped sum of gradients, added group by group.

    Args:
        params: parameters by name
        size: number of samples
        clipping: a clipping function, see :func:`~opacus_ext.clipping.Clipping`
        on_nonfinite: "drop" or "raise", for a sample whose gradient is not finite
        scale: factor of the losses, by which the gradients are divided
        passes: 2 to keep no gradients between norms and sum, see two_passes.py
        norms_of: makes the norms of a group, with the arguments of :class:`GroupNorms`
        reduce: maps sums of this process to what it has of those of all processes
        scales: what gradients are divided by before they are clipped, by the ids of the
            parameters

    Attributes:
        norms: norms of the gradients, divided by the scales, before clipping ``[B]``;
            infinite if not finite
        reached: True if a sample had gradients of some parameter
    """

    reached = False

    def __init__(
        self,
        params: dict[str, T],
        size: int,
        clipping: Callable[[T], T],
        on_nonfinite: str = "drop",
        scale: float = 1.0,
        passes: int = 1,
        norms_of: Callable[..., GroupNorms] = GroupNorms,
        reduce: Reduce | None = None,
        scales: Mapping[Key, Scale] | None = None,
    ):
        self.scales = scales or {}
        self.names, self.params = list(params), list(params.values())
        check_parameters(clipping, len(self.params))
        self.clipping, self.on_nonfinite, self.scale = clipping, on_nonfinite, scale
        self.passes, self.norms_of, self.reduce = passes, norms_of, reduce
        self.per_parameter = getattr(clipping, "per_parameter", False)
        dtype = torch.promote_types(self.params[0].dtype, torch.float32)
        self.norms = torch.zeros(size, dtype=dtype, device=self.params[0].device)
        self._totals: list[T | None] = [None] * len(self.params)
        self._adding = AllOrNothing()

    # -- groups ------------------------------------------------------------------------

    def add_group(
        self, rows: T | None, group: SampleGroup, *backward: Any
    ) -> list[T | None]:
        """
        Adds the gradients of a group, and returns those of the inputs.

        Args:
            rows: indices of its samples in the batch ``[size]``; None for all. A sample
                that only stands in, as other processes have more, has -1
            group: the group that has run
            backward: see :func:`~gradients.gradients_of_group`
        """
        if rows is not None and int(rows[0]) < 0:
            _, of_inputs = gradients_of_group(group, *backward)
            self.add_nothing()
            return of_inputs
        # Processes that share out parameters need not come to one answer.
        is_alone = self.reduce is None and self.norms_of is GroupNorms
        if self.passes == 2 or is_alone and _keep_much(group):
            return add_in_two_passes(self, rows, group, *backward)
        samples, of_inputs = gradients_of_group(group, *backward)
        self.add(rows, self.group_norms(group.size), samples)
        return of_inputs

    def divided(self, key: Key, sample: GradSample) -> GradSample:
        """Returns a parameter's gradients divided by its scale, if it has one."""
        scale = self.scales.get(key)
        if scale is None:
            return sample
        return sample.divided(scale)

    def group_norms(self, size: int, keep: bool = True) -> GroupNorms:
        """Makes norms for a group of this size; see :class:`GroupNorms`."""
        return self.norms_of(self.params, size, self.per_parameter, keep)

    def add_samples(self, samples: GradSamples) -> None:
        """Adds the gradients of all samples."""
        self.add(None, self.group_norms(len(self.norms)), samples)

    @torch.no_grad()
    def add(self, rows: T | None, group: GroupNorms, samples: GradSamples) -> None:
        """Adds the gradients of a group."""
        self.reached |= bool(samples)
        if self.scales:
            pairs = samples.items()
            samples = {key: self.divided(key, sample) for key, sample in pairs}
        with full_precision(self.norms.device):
            group.finish(samples)
            exact = functools.partial(self._exact, group, samples)
            clipped = self.clip(rows, group, exact)
            if clipped.apart is not None:
                group.drop(clipped.apart)
            sums = group.weighted_sums(group.rounded(clipped.factors))
            self.put(clipped.join(sums))

    def _exact(self, group: GroupNorms, samples: GradSamples, at: T) -> ExactGroup:
        wide: GradSamples = {}
        for p in self.params:
            if id(p) in samples:
                wide[id(p)] = group.wide(p, samples[id(p)], at)
        return group.exact(at, wide)

    def add_clipped(self, rows: T | None, norms: T, sums: list[T | None]) -> None:
        """Adds sums that were clipped with these norms, which are finite."""
        self.reached = True
        if not is_built_in(self.clipping):
            self._check_sensitivity(norms, self.clipping(norms))
        self._set_norms(rows, totals_of(norms))
        self.put(sums)

    def add_nothing(self) -> None:
        """Takes part in a sum of all processes without samples."""
        self._add([None] * len(self.params))

    def put(self, sums: Iterable[T | None]) -> None:
        """Adds the sums of some samples."""
        with self._adding:
            self._add(sums)

    def _add(self, sums: Iterable[T | None]) -> None:
        if self.reduce is not None:
            sums = self.reduce(sums)
        for i, new in enumerate(sums):
            if new is not None:
                old = self._totals[i]
                self._totals[i] = new if old is None else old.add_(new)

    # -- clipping ----------------------------------------------------------------------

    def clip(
        self, rows: T | None, group: GroupNorms, exact: Callable[[T], ExactGroup]
    ) -> Clipped:
        """
        Returns clipping factors. The norms that are not finite are computed anew by
        ``exact``, which is given the indices of their samples.
        """
        norms = _over(group.norms, self.scale)
        if is_finite(norms):
            self._set_norms(rows, group.totals(norms))
            return Clipped(self._factors(norms))
        apart = _not_finite(norms)
        (at,) = apart.nonzero(as_tuple=True)
        anew = exact(at)
        norms = norms.clone()
        norms[..., at] = _over(anew.norms, self.scale).to(norms)
        norms, bad = self._check_finite(norms, rows)
        self._set_norms(rows, group.totals(norms))
        factors = self._factors(norms, bad)
        if bad is not None:
            anew.drop(bad[at])
        return Clipped(factors.masked_fill(apart, 0), apart, anew, factors[..., at])

    def _factors(self, norms: T, bad: T | None = None) -> T:
        factors = clipping_factors(self.clipping, norms, self.scale, bad)
        if not is_built_in(self.clipping):
            self._check_sensitivity(norms, factors * self.scale)
        return factors

    def _check_sensitivity(self, norms: T, factors: T) -> None:
        """Refuses factors by which a gradient is longer than the sensitivity."""
        finite, lengths = norms.isfinite(), (norms * factors).abs()
        if norms.dim() > 1:
            finite, lengths = finite.all(0), lengths.norm(dim=0)
        clipping: Any = self.clipping
        most = clipping.sensitivity("add_or_remove_one")
        wrong = finite & ~(lengths <= most * (1 + 1e-4))
        if bool(wrong.any()):
            raise Refused(
                "The clipping function leaves a gradient of norm "
                f"{float(lengths[wrong][0]):g}, and states a sensitivity of {most:g}.",
                parameter="clipping",
                remedy="Its factors times the norms, of all parameters together, must "
                "not exceed what sensitivity or largest_norm returns.",
            )

    def _set_norms(self, rows: T | None, norms: T) -> None:
        if rows is None:
            self.norms = norms.to(self.norms)
        else:
            self.norms[rows.to(self.norms.device)] = norms.to(self.norms)

    def _check_finite(self, norms: T, rows: T | None) -> tuple[T, T | None]:
        """Makes norms that are not finite infinite; returns their mask, or None."""
        bad = _not_finite(norms)
        if not bool(bad.any()):
            return norms, None
        at = bad.nonzero()[:, 0] if rows is None else rows[bad.to(rows.device)]
        what = f"The gradient of sample {int(at[0])} is not finite"
        advice = (
            "Look for a division by zero or a log of zero in the model or the loss, "
            "and where float16 overflows use bfloat16, or a smaller scale in "
            "loss.backward(scale=...)."
        )
        if self.on_nonfinite == "raise":
            what += ", so that it can't be clipped. Nothing was changed."
            raise Refused(what, remedy=advice)
        what += ': it counts as zero. make_private(on_nonfinite="raise") makes it an '
        warnings.warn(f"{what}error. {advice}", RuntimeWarning, stacklevel=4)
        return norms.masked_fill(bad, math.inf), bad

    # -- one sample --------------------------------------------------------------------

    @torch.no_grad()
    def add_one(self, row: int, by_id: dict[int, T]) -> None:
        """
        Adds the gradient of one sample, given by the ids of the parameters. The row of
        a sample that only stands in is -1.
        """
        if row < 0:
            self.add_nothing()
            return
        used = [i for i, p in enumerate(self.params) if id(p) in by_id]
        self.reached |= bool(used)
        dense = [upcast(by_id[id(self.params[i])]) for i in used]
        for place, i in enumerate(used):
            scale = self.scales.get(id(self.params[i]))
            if scale is not None:
                gradient = dense[place]
                dense[place] = gradient * inverse_of(scale).view(gradient.shape)
        norms, bad = self._norms_alone(used, norm_of_each(dense)), None
        rows = torch.tensor([row], device=norms.device)
        norms = norms if self.per_parameter else norms.norm(dim=0)
        if not is_finite(norms):  # squares may be too large
            scaled = [scaled_norms(g.double().reshape(1, -1))[0] for g in dense]
            norms = self._norms_alone(used, scaled)
            norms = norms if self.per_parameter else scaled_norms(norms.mT)
            norms, bad = self._check_finite(norms, rows)
        self._set_norms(rows, totals_of(norms))
        factors = self._factors(norms, bad)
        if bad is not None:
            used, dense = [], []
        factor = 1.0
        if self.per_parameter:
            dense = [g * factors[i, 0].to(g) for i, g in zip(used, dense)]
        else:
            factor = float(factors[0])
        with self._adding:
            self._add_dense(used, dense, factor)

    def _norms_alone(self, used: list[int], norms_of_used: list[T]) -> T:
        """Returns norms ``[parameters, 1]``, given those of the used parameters."""
        dtypes = [norm.dtype for norm in norms_of_used]
        dtype = dtype_of(self.norms.dtype, *dtypes)
        norms = self.norms.new_zeros(len(self.params), 1, dtype=dtype)
        if used:
            norms[used, 0] = torch.stack([norm.to(norms) for norm in norms_of_used])
        return _over(norms, self.scale)

    def _add_dense(self, places: list[int], dense: list[T], factor: float) -> None:
        """Adds a multiple of gradients of the parameters at some places."""
        if self.reduce is not None:
            sums: list[T | None] = [None] * len(self.params)
            for i, g in zip(places, dense):
                sums[i] = g * factor
            self._add(sums)
            return
        for i, g in zip(places, dense):
            if self._totals[i] is None:
                layout = torch.contiguous_format
                self._totals[i] = torch.zeros_like(g, memory_format=layout)
        if places:
            torch._foreach_add_([self._totals[i] for i in places], dense, alpha=factor)

    def sums(self) -> dict[str, T]:
        """Returns the clipped sums by name."""
        if self.reduce is None:
            return sums_by_name(dict(zip(self.names, self.params)), self._totals)
        if self._totals[0] is None:  # no process had samples
            self.add_nothing()
        return dict(zip(self.names, self._totals))


class DenseGrads:
    """
    Materialized gradients, added group by group; ``rows`` has ``[B, *shape]`` for each
    parameter that was used, by name. ``reached`` is True if there are some. The graph
    of a group is kept if ``retain_graph``.
    """

    @property
    def reached(self) -> bool:
        return bool(self.rows)

    def __init__(self, params: dict[str, T], size: int, retain_graph: bool = False):
        self.params, self.size, self.retain_graph = params, size, retain_graph
        self.rows: dict[str, T] = {}
        self._adding = AllOrNothing()

    def add_group(
        self, rows: T | None, group: SampleGroup, *backward: Any
    ) -> list[T | None]:
        """See :meth:`ClippedSum.add_group`."""
        one_pass = functools.partial(gradients_of_group, group, *backward)
        samples, of_inputs = one_pass(retain_graph=self.retain_graph)
        self.add(rows, samples)
        return of_inputs

    @torch.no_grad()
    def add(self, rows: T | None, samples: GradSamples) -> None:
        """Adds the gradients of a group."""
        used = {n: samples[id(p)] for n, p in self.params.items() if id(p) in samples}
        # Materializes all first, so that a group that fails has no effect.
        device = next((self.params[name].device for name in used), None)
        with full_precision(device):
            dense = [(name, sample.materialize()) for name, sample in used.items()]
        with self._adding:
            for name, new in dense:
                self._put(name, rows, new)

    @torch.no_grad()
    def add_one(self, row: int, grads: dict[int, T]) -> None:
        """Adds the gradient of one sample, given by the ids of the parameters."""
        with self._adding:
            for name, p in self.params.items():
                if id(p) in grads:
                    self._put(name, torch.tensor([row]), grads[id(p)][None])

    def _put(self, name: str, rows: T | None, new: T) -> None:
        old = self.rows.get(name)
        if rows is None:
            self.rows[name] = new if old is None else old + new
            return
        if old is None:
            old = self.rows[name] = new.new_zeros(self.size, *new.shape[1:])
        old[rows.to(new.device)] += new

    def grads(self) -> dict[str, T]:
        """Returns the gradients by name, in the dtypes of the parameters."""
        grads = {}
        for name, p in self.params.items():
            rows = self.rows.get(name)
            if rows is None:
                rows = p.new_zeros(self.size, *p.shape)
            grads[name] = rows.to(p.device, p.dtype)
        return grads


def refuse_no_graph(total: ClippedSum | DenseGrads, size: int) -> None:
    """Refuses losses of some samples of which none depends on a parameter."""
    if size and not total.reached:
        raise no_graph()


def no_graph() -> Refused:
    """Makes the error for losses that depend on no parameter."""
    return Refused(
        "The loss of no sample depends on a parameter that is trained: it was computed "
        "without a graph (torch.no_grad, inference_mode, detach, integers), or from "
        "the parameters of another model, such as a copy.",
        parameter="loss",
        remedy="Compute it in floating point from the parameters that are trained, "
        "outside of torch.no_grad().",
    )


def digest(backprops: T) -> T:
    """Returns each sample's gradient norm and a weighted sum of entries, ``[2, B]``."""
    flat = real_rows(backprops)
    weights = torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    parts = zip(flat.split(2**20, 1), weights.split(2**20))  # long products round
    total = functools.reduce(torch.add, (x @ w for x, w in parts))
    return torch.stack([sample_norms(flat), total / math.sqrt(max(1, flat.shape[1]))])
