"""A private model whose experts are sharded, and the clipped sum of its gradients."""

from __future__ import annotations

import functools
from typing import Any, Iterator, Sequence

import torch

from opacus_ext.grad_sample.adapter.model import ModelGroup, PrivateModel
from opacus_ext.grad_sample.adapter.outputs import Leaf
from opacus_ext.grad_sample.core.clip import ClippedSum, ExactGroup, GroupNorms
from opacus_ext.grad_sample.core.gradients import GradSamples
from opacus_ext.grad_sample.core.groups import why
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.parallel import group as places
from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.parallel.sharding import find_group, group_of
from opacus_ext.refused import ProcessFailure, Refused

T = torch.Tensor


class ParallelModel(PrivateModel):
    """
    A model with sharded experts. The samples of each process run at once, as all must
    send tokens at the same time; a process without any runs one of zeros, which sends
    none and returns nothing.
    """

    is_shared_out = True

    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.processes: Any = find_group(module.modules())

    def begin_forward(self, size: int) -> None:
        """See :class:`~adapter.model.PrivateModel`; all processes learn the sizes."""
        super().begin_forward(size)
        sizes = [size] * self.processes.size
        self.processes.batch_sizes = self.processes.meet(places.BEGIN, sizes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`~adapter.model.PrivateModel`."""
        if not self.enabled or self.running or not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        try:
            found = super().__call__(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, ProcessFailure):
                self.processes.meet(places.FAILED)
            raise
        self.processes.meet(places.END)
        return found

    def tried(self, *args: Any) -> Any:
        """Tries a call in this process alone, without an exchange."""
        self.processes.silent = True
        try:
            return super().tried(*args)
        finally:
            self.processes.silent = False

    def run(self, forward: Any) -> None:
        """Runs the samples at once, or refuses."""
        samples, *others = forward.inputs.samples
        if not samples.size:
            pairs = zip(samples.leaves, samples.by_sample)
            zeros = [x.new_zeros(1, *x.shape[1:]) if own else x for x, own in pairs]
            samples = samples._replace(leaves=zeros, size=1)
        try:
            if others:
                raise ValueError("take= gives samples of several shapes")
            forward.at_once(samples)
        except Refused:
            raise
        except Exception as error:  # what vmap can't run, or the code's own
            raise Refused(
                f"{self.describe()}: samples can't run at once ({why(error)}), which "
                "they must where experts are spread over processes.",
                module=self.describe(),
                remedy="Change that line, or train the model without expert_parallel.",
            ) from error

    def group(self, size: int) -> ModelGroup:
        """A new group, in which the samples run."""
        return _ParallelGroup(self, size)

    def clipped_sum(self, *args: Any, **kwargs: Any) -> ClippedSum:
        """See :class:`~adapter.model.PrivateModel`."""
        norms_of = functools.partial(ParallelNorms, self.processes)
        return ClippedSum(*args, **kwargs, norms_of=norms_of)


class _ParallelGroup(ModelGroup):
    model: ParallelModel

    def read(self, x: Any) -> Leaf:
        """A value that the samples returned."""
        leaf = super().read(x)
        nothing = leaf.by_sample and not self.model.size
        return leaf._replace(value=leaf.value[:0]) if nothing else leaf


class ParallelNorms(GroupNorms):
    """
    The norms of the samples of all processes, of which each knows a part: those of its
    own samples by all parameters but the sharded ones, those of all samples by its
    share of these. ``total`` is over all parameters, ``[B of all]``.
    """

    def __init__(self, processes: ExpertGroup, params: Sequence[T], *args: Any):
        super().__init__(params, *args)
        self.processes = processes
        self._part_of: dict[int, GroupNorms] = {}
        # Which parameters, of which samples, and their norms.
        self.parts: list[tuple[list[int], slice, GroupNorms]] = []
        every = slice(0, processes.batch_size)
        for sharded, rows in ((False, processes.own_samples), (True, every)):
            at = [i for i, p in enumerate(params) if bool(group_of(p)) == sharded]
            size = rows.stop - rows.start
            if at and size:
                part = GroupNorms([params[i] for i in at], size, *args[1:])
                self.parts.append((at, rows, part))
                self._part_of.update((id(params[i]), part) for i in at)

    def add(self, p: T, sample: GradSample) -> None:
        """Adds the gradients of a parameter."""
        if id(p) in self._part_of:
            self._part_of[id(p)].add(p, sample)

    def finish(self, samples: GradSamples) -> T:
        """The norms, by one sum over all processes."""
        like, size = self.params[0], self.processes.batch_size
        each = like.new_zeros(len(self.params), size, dtype=self.dtype)
        squares = each.new_zeros(size)
        for at, rows, part in self.parts:
            found = part.finish(samples)
            if self.per_parameter:
                each[at, rows] = found
                found = found.norm(dim=0)
            squares[rows] += found.square()
        self.total = self.processes.sum(squares).sqrt()
        self.norms = self.total
        if self.per_parameter:
            self.norms = each.masked_fill(~self.total.isfinite(), torch.inf)
        return self.norms

    def totals(self, norms: T) -> T:
        """See :class:`~core.clip.GroupNorms`."""
        total = self.total[self.processes.own_samples]
        return total.masked_fill(~total.isfinite(), torch.inf)

    def drop(self, bad: T) -> None:
        """Makes the gradients of some samples zero, whatever they are."""
        for _, rows, part in self.parts:
            part.drop(bad[rows])

    def wide(self, p: T, sample: GradSample, samples: T) -> GradSample:
        """See :class:`~core.clip.GroupNorms`."""
        rows = self.rows_of(p) or slice(0, 0)
        return sample.wide(samples[_within(samples, rows)] - rows.start)

    def exact(self, samples: T, wide: GradSamples) -> ExactGroup:
        """See :class:`~core.clip.GroupNorms`."""
        return _ParallelExact(self, samples, wide)

    def rows_of(self, p: T) -> slice | None:
        """See :class:`~core.clip.GroupNorms`."""
        found = (rows for at, rows, _ in self.parts for i in at if self.params[i] is p)
        return next(found, None)

    def small_sums(self, factors: T) -> dict[int, T]:
        """See :class:`~core.clip.GroupNorms`; the parts concatenate theirs."""
        return {}

    def weighted_sums(self, factors: T) -> Iterator[T | None]:
        """See :class:`~core.clip.GroupNorms`."""
        found: list[T | None] = [None] * len(self.params)
        for at, rows, part in self.parts:
            own = factors[at][:, rows] if self.per_parameter else factors[rows]
            for i, total in zip(at, part.weighted_sums(own)):
                found[i] = total
        return iter(found)


def _within(samples: T, rows: slice) -> T:
    """Returns a mask of the samples whose indices are in a slice."""
    return (samples >= rows.start) & (samples < rows.stop)


class _ParallelExact(ExactGroup):
    """Some samples of all processes, of which each knows a part."""

    group: ParallelNorms

    def _has(self, p: T) -> T:
        return _within(self.samples, self.group.rows_of(p) or slice(0, 0))

    def _of_all(self, norms: T) -> T:
        squares = self.group.processes.sum(norms.square().sum(0))
        total = squares.sqrt()
        self.group.total[self.samples] = total.to(self.group.total)
        if self.group.per_parameter:
            return norms.masked_fill(~total.isfinite(), torch.inf)
        return total
