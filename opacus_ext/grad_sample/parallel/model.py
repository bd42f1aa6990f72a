"""A private model whose experts are sharded, and the clipped sum of its gradients."""

from __future__ import annotations

import functools
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from opacus_ext.grad_sample.adapter.model import ModelGroup, PrivateModel
from opacus_ext.grad_sample.adapter.outputs import Leaf
from opacus_ext.grad_sample.core.clip import ClippedSum, ExactGroup, GroupNorms
from opacus_ext.grad_sample.core.gradients import GradSamples
from opacus_ext.grad_sample.core.groups import why
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.parallel import group as positions
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

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.processes: Any = find_group(module.modules())

    def begin_forward(self, size: int) -> None:
        """See :class:`~adapter.model.PrivateModel`; all processes learn the sizes."""
        super().begin_forward(size)
        sizes = [size] * self.processes.size
        self.processes.batch_sizes = self.processes.meet(positions.BEGIN, sizes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`~adapter.model.PrivateModel`."""
        if not self.enabled or self.running or not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException as error:
            # Others wait at their next layer of experts until they are told.
            if not isinstance(error, ProcessFailure):
                self.processes.meet(positions.FAILED)
            raise
        self.processes.meet(positions.END)
        return output

    def tried(self, *args: Any) -> Any:
        """Tries a call in this process alone, without an exchange."""
        self.processes.silent = True
        try:
            return super().tried(*args)
        finally:
            self.processes.silent = False

    def run(self, forward: ForwardRecord) -> None:
        """Runs the samples at once, or refuses."""
        samples, *others = forward.inputs.samples
        if not samples.size:
            leaves = list(samples.leaves)
            for number, by_sample in enumerate(samples.by_sample):
                if by_sample:
                    leaf = leaves[number]
                    leaves[number] = leaf.new_zeros(1, *leaf.shape[1:])
            samples = samples._replace(leaves=leaves, size=1)
        try:
            if others:
                raise ValueError("take= gives samples of several shapes")
            forward.at_once(samples)
        except Refused:
            raise
        except Exception as error:
            # The error is vmap's, or the code's own. Samples can't run alone instead:
            # all processes would have to run as many.
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
        kwargs["norms_of"] = functools.partial(ParallelNorms, self.processes)
        return ClippedSum(*args, **kwargs)


class _ParallelGroup(ModelGroup):
    model: ParallelModel

    def read(self, value: Any) -> Leaf:
        """A value that the samples returned."""
        leaf = super().read(value)
        # The sample of zeros is dropped.
        if leaf.by_sample and not self.model.size:
            return leaf._replace(value=leaf.value[:0])
        return leaf


class ParallelNorms(GroupNorms):
    """
    The norms of the samples of all processes, of which each knows a part: those of its
    own samples by all parameters but the sharded ones, those of all samples by its
    share of these. ``total`` is over all parameters, ``[B of all]``.
    """

    def __init__(self, processes: ExpertGroup, params: Sequence[T], *args: Any):
        super().__init__(params, *args)
        self.processes = processes
        # Which parameters, of which samples, and their norms.
        self.parts: list[tuple[list[int], slice, GroupNorms]] = []
        # The norms of a parameter, and the samples that have them, by its id.
        self._part_of: dict[int, GroupNorms] = {}
        self._rows_of: dict[int, slice] = {}
        every = slice(0, processes.batch_size)
        for sharded, rows in ((False, processes.own_samples), (True, every)):
            numbers = [
                number
                for number, parameter in enumerate(params)
                if bool(group_of(parameter)) == sharded
            ]
            if not numbers or rows.start == rows.stop:
                continue
            chosen = [params[number] for number in numbers]
            part = GroupNorms(chosen, rows.stop - rows.start, *args[1:])
            self.parts.append((numbers, rows, part))
            for parameter in chosen:
                self._part_of[id(parameter)] = part
                self._rows_of[id(parameter)] = rows

    def add(self, parameter: T, sample: GradSample) -> None:
        """Adds the gradients of a parameter."""
        if id(parameter) in self._part_of:
            self._part_of[id(parameter)].add(parameter, sample)

    def finish(self, samples: GradSamples) -> T:
        """The norms, by one sum over all processes."""
        first, batch_size = self.params[0], self.processes.batch_size
        norms = first.new_zeros(len(self.params), batch_size, dtype=self.dtype)
        squares = norms.new_zeros(batch_size)
        for numbers, rows, part in self.parts:
            part_norms = part.finish(samples)
            if self.per_parameter:
                norms[numbers, rows] = part_norms
                part_norms = part_norms.norm(dim=0)
            squares[rows] += part_norms.square()
        self.total = self.processes.sum(squares).sqrt()
        self.norms = self.total
        if self.per_parameter:
            # A sample whose gradients are infinite elsewhere is dropped here, too.
            self.norms = norms.masked_fill(~self.total.isfinite(), torch.inf)
        return self.norms

    def totals(self, norms: T) -> T:
        """See :class:`~core.clip.GroupNorms`."""
        # This process reports the norms of its own samples.
        total = self.total[self.processes.own_samples]
        return total.masked_fill(~total.isfinite(), torch.inf)

    def drop(self, bad: T) -> None:
        """Makes the gradients of some samples zero, whatever they are."""
        for numbers, rows, part in self.parts:
            part.drop(bad[rows])

    def wide(self, parameter: T, sample: GradSample, samples: T) -> GradSample:
        """See :class:`~core.clip.GroupNorms`."""
        rows = self.rows_of(parameter) or slice(0, 0)
        return sample.wide(samples[_within(samples, rows)] - rows.start)

    def exact(self, samples: T, wide: GradSamples) -> ExactGroup:
        """See :class:`~core.clip.GroupNorms`."""
        return _ParallelExact(self, samples, wide)

    def rows_of(self, parameter: T) -> slice | None:
        """See :class:`~core.clip.GroupNorms`."""
        return self._rows_of.get(id(parameter))

    def small_sums(self, factors: T) -> dict[int, T]:
        """See :class:`~core.clip.GroupNorms`; the parts concatenate theirs."""
        return {}

    def weighted_sums(self, factors: T) -> Iterator[T | None]:
        """See :class:`~core.clip.GroupNorms`."""
        sums: list[T | None] = [None] * len(self.params)
        for numbers, rows, part in self.parts:
            chosen = factors[numbers] if self.per_parameter else factors
            for number, total in zip(numbers, part.weighted_sums(chosen[..., rows])):
                sums[number] = total
        return iter(sums)


def _within(samples: T, rows: slice) -> T:
    """Returns a mask of the samples whose indices are in a slice."""
    return (samples >= rows.start) & (samples < rows.stop)


class _ParallelExact(ExactGroup):
    """Some samples of all processes, of which each knows a part."""

    group: ParallelNorms

    def _has(self, parameter: T) -> T:
        return _within(self.samples, self.group.rows_of(parameter) or slice(0, 0))

    def _of_all(self, norms: T) -> T:
        squares = self.group.processes.sum(norms.square().sum(0))
        total = squares.sqrt()
        self.group.total[self.samples] = total.to(self.group.total)
        if self.group.per_parameter:
            return norms.masked_fill(~total.isfinite(), torch.inf)
        return total
