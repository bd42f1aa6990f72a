"""Models that are sharded by ``fully_shard`` (FSDP2); see core/sharded.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from opacus_ext.grad_sample.adapter.forward import ForwardRecord, GroupOutputs
from opacus_ext.grad_sample.adapter.inputs import Inputs
from opacus_ext.grad_sample.adapter.model import ModelGroup, PrivateModel
from opacus_ext.grad_sample.adapter.objects import leaves_of
from opacus_ext.grad_sample.adapter.outputs import Returned
from opacus_ext.grad_sample.adapter.state import Change
from opacus_ext.grad_sample.core.clip import ClippedSum
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

    def __init__(self, model: Any, inputs: Inputs, call: Any, total: Any = None):
        call = partial(model.processes.forward, call)
        super().__init__(model, inputs, call, total)
        self._unused: set[int] = set()  # outputs that no loss uses

    def initialize(self) -> None:
        """
        Runs a sample of zeros in all processes before the first batch. So flags that a
        model sets once are made without data, also where a process has a single sample.
        """
        model, state = self.model, self.model.state
        model.initialized = True
        if state.has_objects:  # to hold flags, such as a config
            state.remember()
            with suppress(Exception), torch.no_grad():
                self._of_zeros()
            values = [x for change in state.changes() for x in leaves_of(change.value)]
            if not all(isinstance(x, (bool, str, type, type(None))) for x in values):
                state.restore()
        model.reset()

    def _left_by_zeros(self) -> list[Change] | None:
        return None  # the other processes would not take part

    def find_output_dim(self, name: str, shape: torch.Size) -> int | None:
        """See :class:`~adapter.forward.ForwardRecord`; other processes do not run."""
        return None

    def _keep(self, returned: Returned, some: GroupOutputs) -> None:
        super()._keep(returned, some)
        if not is_stand_in(some):
            return
        self._returned.pop()
        if not self.size and not self._returned:  # the form of an empty output
            leaves = [
                x._replace(value=x.value[:0]) if x.by_sample else x
                for x in returned.leaves
            ]
            empty = returned._replace(rows=torch.arange(0), size=0, leaves=leaves)
            self._returned.append(empty)

    def add_gradients(self, total: Any, grads: Sequence[T | None]) -> list[T | None]:
        """
        See :class:`~adapter.forward.ForwardRecord`. A backward pass gathers what has
        computed the outputs that the losses use, which must be the same everywhere.
        """
        if len(grads) == 1:  # which the loss is known to use
            return super().add_gradients(total, grads)
        uses = torch.tensor([[g is not None for g in grads]], device="cpu")
        used = self.model.processes.shared(OUTPUTS, uses[: self.size])
        if used is None:
            raise self.model.refused(
                "processes compute their losses from different outputs of the model, "
                "which fully_shard has sharded. No weight was changed.",
                "Compute the loss from the same outputs in all processes.",
            )
        self._unused = {i for i, uses in zip(self.dims, used.tolist()) if uses != 1}
        return super().add_gradients(total, grads)

    def _own(
        self, some: GroupOutputs, grads: Sequence[T | None]
    ) -> tuple[list[T], list[T]]:
        if not is_stand_in(some):
            return super()._own(some, grads)
        outputs = [y for i, y in some.outputs.items() if i not in self._unused]
        return outputs, [torch.zeros_like(y) for y in outputs]


class _ShardedModelGroup(ShardedGroup, ModelGroup):
    """Samples of a sharded private model that run together."""


class ShardedModel(PrivateModel):
    """
    A private model that ``fully_shard`` has sharded. An error in one process ends in
    the timeout of the others: they are not told.
    """

    record_type = ShardedForward
    is_shared_out = frees_parameters = True
    initialized = False  # True once attributes of a first forward are set

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.shards = shards = Shards(module)
        self.processes = shards.processes
        self.handles, self.gathered = self.processes.handles, shards.gathered
        self.names.update({p: n for n, p in self.gathered.items()})

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, as they are gathered."""
        return {n: p for n, p in self.gathered.items() if p.requires_grad}

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
        if not self.processes.run(
            forward.inputs.samples,
            forward.at_once,
            forward.alone,
            one_by_one=self.one_by_one or self.vmap_fails,
            warn=forward.warn,
        ):  # nor is there a backward pass, which would free what is gathered
            forward.without_samples()
            self.reset()

    def reset(self) -> None:
        """Frees what a pass that failed has gathered."""
        self.processes.reset()

    def clipped_sum(self, params: Any, *args: Any, **kwargs: Any) -> ClippedSum:
        """See :class:`~adapter.model.PrivateModel`; all modes take one pass."""
        kwargs.pop("passes", None)
        return sharded_sum(self.gathered, params, *args, **kwargs)
