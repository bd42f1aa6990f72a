"""Models that are sharded by ``fully_shard`` (FSDP2); see core/sharded.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Mapping, cast

import torch
from torch import nn

from opacus_ext.grad_sample.adapter.forward import ForwardRecord, GroupOutputs
from opacus_ext.grad_sample.adapter.inputs import Inputs
from opacus_ext.grad_sample.adapter.model import ModelGroup, PrivateModel
from opacus_ext.grad_sample.adapter.objects import leaves_of
from opacus_ext.grad_sample.adapter.outputs import Returned
from opacus_ext.grad_sample.adapter.state import Change
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.gradients import Root
from opacus_ext.grad_sample.core.sharded import (
    BACKWARD,
    OUTPUTS,
    WITHOUT_MODEL,
    ShardedGroup,
    Shards,
    is_stand_in,
    sharded_sum,
)

T = torch.Tensor


class ShardedForward(ForwardRecord):
    """A forward pass, in which a sample of zeros may stand in for samples."""

    model: ShardedModel

    def __init__(
        self,
        model: ShardedModel,
        inputs: Inputs,
        call: Callable[[Any], Any],
        total: Any = None,
    ):
        call = partial(model.processes.forward, call)
        super().__init__(model, inputs, call, total)
        # The numbers of outputs that no loss uses.
        self._unused: set[int] = set()

    def initialize(self) -> None:
        """
        Runs a sample of zeros in all processes before the first batch. So flags that a
        model sets once are made without data, also where a process has a single sample.
        """
        model = self.model
        state = model.state
        model.initialized = True
        # An object on a module may hold flags, such as a config.
        if state.has_objects:
            state.remember()
            with suppress(Exception), torch.no_grad():
                self._of_zeros()
            for change in state.changes():
                if not all(map(_is_flag, leaves_of(change.value))):
                    state.restore()
                    break
        model.reset()

    def _left_by_zeros(self) -> list[Change] | None:
        # The other processes would not take part.
        return None

    def find_output_dim(self, name: str, shape: torch.Size) -> int | None:
        """See :class:`~adapter.forward.ForwardRecord`; other processes do not run."""
        return None

    def _keep(self, returned: Returned, some: GroupOutputs) -> None:
        stands_in = is_stand_in(some)
        # What stands in for a sample is none.
        super()._keep(returned._replace(size=0) if stands_in else returned, some)
        if not stands_in:
            return
        if self.groups:  # their gradients are zeros of the same shapes
            self.groups[-1] = some
        self._returned.pop()
        # A process without samples returns an empty output of this form.
        if not self.size and not self._returned:
            leaves = list(returned.leaves)
            for number, leaf in enumerate(leaves):
                if leaf.by_sample:
                    leaves[number] = leaf._replace(value=leaf.value[:0])
            empty = returned._replace(rows=torch.arange(0), size=0, leaves=leaves)
            self._returned.append(empty)

    def add_gradients(self, total: Any, grads: Sequence[T | None]) -> list[T | None]:
        """
        See :class:`~adapter.forward.ForwardRecord`. A backward pass gathers what has
        computed the outputs that the losses use, which must be the same everywhere.
        """
        # A loss is known to use the only output.
        if len(grads) == 1:
            return super().add_gradients(total, grads)
        uses = torch.tensor([[grad is not None for grad in grads]], device="cpu")
        used = self.model.processes.shared(OUTPUTS, uses[: self.size])
        if used is None:
            raise self.model.refused(
                "processes compute their losses from different outputs of the model, "
                "which fully_shard has sharded. No weight was changed.",
                "Compute the loss from the same outputs in all processes.",
            )
        pairs = zip(self.dims, used.tolist())
        self._unused = {number for number, is_used in pairs if is_used != 1}
        return super().add_gradients(total, grads)

    def _own(
        self, some: GroupOutputs, grads: Sequence[T | None]
    ) -> tuple[list[Root], list[T]]:
        if not is_stand_in(some):
            return super()._own(some, grads)
        # A stand-in's backward pass gathers the same parameters as the others'.
        pairs = cast(Mapping[int, T], some.outputs).items()
        outputs = [output for number, output in pairs if number not in self._unused]
        return [*outputs], [*map(torch.zeros_like, outputs)]


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, str, type, type(None)))


class _ShardedModelGroup(ShardedGroup, ModelGroup):
    """Samples of a sharded private model that run together."""


class ShardedModel(PrivateModel):
    """
    A private model that ``fully_shard`` has sharded. An error in one process ends in
    the timeout of the others: they are not told.
    """

    record_type = ShardedForward
    is_shared_out = frees_parameters = True
    # True once the attributes that a first forward sets are set.
    initialized = False

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.shards = shards = Shards(module)
        self.processes = shards.processes
        self.handles = self.processes.handles
        self.gathered = shards.gathered
        for name, parameter in self.gathered.items():
            self.names[parameter] = name

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, as they are gathered."""
        return {
            name: parameter
            for name, parameter in self.gathered.items()
            if parameter.requires_grad
        }

    def group(self, size: int) -> ModelGroup:
        """Makes a group for samples that run together."""
        return _ShardedModelGroup(self.processes, self, size)

    def begin_backward(self, through: bool) -> None:
        """See :class:`~adapter.model.PrivateModel`."""
        self.processes.meet(BACKWARD if through else WITHOUT_MODEL)

    def run(self, forward: Any) -> None:
        """Runs all samples in rounds of all processes."""
        self.shards.refuse_changes()
        if not self.initialized:
            forward.initialize()
        has_run = self.processes.run(
            forward.inputs.samples,
            forward.at_once,
            forward.alone,
            one_by_one=self.one_by_one or bool(self.vmap_fails),
            warn=forward.warn,
        )
        if not has_run:
            # Nor is there a backward pass, which would free what is gathered.
            forward.without_samples()
            self.reset()

    def reset(self) -> None:
        """Frees what a pass that failed has gathered."""
        self.processes.reset()

    def clipped_sum(self, params: Any, *args: Any, **kwargs: Any) -> ClippedSum:
        """See :class:`~adapter.model.PrivateModel`; all modes take one pass."""
        # The optimizer refuses scales here.
        for name in ("passes", "scales"):
            kwargs.pop(name, None)
        return sharded_sum(self.gathered, params, *args, **kwargs)
