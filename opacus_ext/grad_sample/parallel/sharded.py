"""Models that are sharded by ``fully_shard`` (FSDP2); see core/sharded.py.

A process without samples for a round of passes runs a sample of zeros, which adds
nothing.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any, Sequence

import torch
from torch import nn

from opacus_ext.grad_sample.adapter.forward import ForwardRecord, GroupOutputs
from opacus_ext.grad_sample.adapter.model import PrivateModel
from opacus_ext.grad_sample.adapter.objects import leaves_of
from opacus_ext.grad_sample.adapter.outputs import Returned
from opacus_ext.grad_sample.adapter.state import Change
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.gradients import gradients_alone, gradients_of_group
from opacus_ext.grad_sample.core.sharded import (
    Shards,
    in_rounds,
    is_of_nobody,
    sharded_sum,
)

T = torch.Tensor


class ShardedForward(ForwardRecord):
    """A forward pass whose groups may be of nobody: of a sample of zeros."""

    model: ShardedModel
    _used: set[int] | None = None  # outputs that losses use, or None for all

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
        model.rounds.reset()

    def _left_by_zeros(self) -> list[Change] | None:
        return None  # the other processes would not take part

    def find_output_dim(self, name: str, shape: torch.Size) -> int | None:
        """See :class:`~adapter.forward.ForwardRecord`; other processes do not run."""
        return None

    def _keep(self, returned: Returned, some: GroupOutputs) -> None:
        self.model.rounds.finish(self.read_data)
        if not is_of_nobody(some):
            super()._keep(returned, some)
            return
        if self.total is not None:
            self._add(self.total, some, *self._no_gradients(some))
        else:
            self.groups.append(some)
        if not self.size and not self._returned:  # the form of an empty output
            rows = torch.arange(0)
            leaves = [
                x._replace(value=x.value[:0]) if x.by_sample else x
                for x in returned.leaves
            ]
            self._returned.append(returned._replace(rows=rows, size=0, leaves=leaves))

    def add_gradients(self, total: Any, grads: Sequence[T | None]) -> list[T | None]:
        """See :class:`~adapter.forward.ForwardRecord`."""
        if len(grads) > 1:
            own = [g is not None for g in grads]
            used = self.model.rounds.used(own, self.size)
            self._used = {i for i, uses in zip(self.dims, used) if uses}
        return super().add_gradients(total, grads)

    def _no_gradients(self, some: GroupOutputs) -> tuple[list[T], list[T]]:
        used = some.outputs if self._used is None else self._used
        outputs = [y for i, y in some.outputs.items() if i in used]
        return outputs, [torch.zeros_like(y) for y in outputs]

    def _own(
        self, some: GroupOutputs, grads: Sequence[T | None]
    ) -> tuple[list[T], list[T]]:
        if is_of_nobody(some):
            return self._no_gradients(some)
        return super()._own(some, grads)

    def _add(
        self, total: Any, some: GroupOutputs, outputs: list[T], grads: list[T]
    ) -> list[T | None]:
        if not is_of_nobody(some):
            return super()._add(total, some, outputs, grads)
        params = list(self.params.values())
        if some.group is None:
            gradients_alone(outputs, grads, params)
        else:
            gradients_of_group(some.group, outputs, grads, params)
        total.add_nothing()
        return [None] * len(self.leaves)


class ShardedModel(PrivateModel):
    """A private model that ``fully_shard`` has sharded."""

    record_type = ShardedForward
    is_shared_out = frees_parameters = True
    initialized = False  # True once attributes of a first forward are set

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.shards = shards = Shards(module)
        self.rounds = shards.rounds
        self.handles, self.gathered = self.rounds.handles, shards.gathered
        self.names.update({p: n for n, p in self.gathered.items()})

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, as they are gathered."""
        return {n: p for n, p in self.gathered.items() if p.requires_grad}

    def telling(self, stage: str) -> Any:
        """See :class:`~adapter.model.PrivateModel`."""
        tells = torch.is_grad_enabled()
        return self.rounds.telling(stage) if tells else nullcontext()

    def begin_backward(self, through: bool) -> None:
        """See :class:`~adapter.model.PrivateModel`."""
        self.rounds.begin_backward(through)

    def run(self, forward: Any) -> None:
        """Runs all samples in rounds."""
        self.shards.refuse_changes()
        if not self.initialized:
            forward.initialize()
        samples = forward.inputs.samples
        ran = in_rounds(
            self.rounds,
            samples,
            forward.at_once,
            lambda some, i: forward.alone(some, i),
            one_by_one=self.one_by_one or self.vmap_fails,
            reads=lambda: forward.read_data,
            warn=forward.warn,
        )
        if not ran:  # nor is there a backward pass, which would free what is gathered
            forward.without_samples()
            self.rounds.reset()

    def reset(self) -> None:
        """Frees what a pass that failed has gathered."""
        self.rounds.reset()

    def clipped_sum(self, params: Any, *args: Any, **kwargs: Any) -> ClippedSum:
        """See :class:`~adapter.model.PrivateModel`; all modes take one pass."""
        kwargs.pop("passes", None)
        return sharded_sum(self.gathered, params, *args, **kwargs)
