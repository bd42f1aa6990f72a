"""Modes "hooks" and "functorch": a backward pass leaves ``p.grad_sample``."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import torch
from torch import nn

from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from opacus_ext.grad_sample.adapter.model import PrivateOptimizer
from opacus_ext.grad_sample.adapter.outputs import MeanLoss, dependencies_of
from opacus_ext.grad_sample.adapter.passes import second_pass
from opacus_ext.grad_sample.core.clip import DenseGrads, refuse_no_graph
from opacus_ext.grad_sample.core.groups import Samples
from opacus_ext.grad_sample.modes.common import (
    MEMORY_MANAGER,
    PrivateMode,
    feeds_another,
    not_private,
    of_other_sizes,
)
from opacus_ext.private_torch import call_after_backward, will_run

T = torch.Tensor


class _Edges(torch.autograd.Function):
    """A node of the graph whose edges lead to its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: T) -> T:
        return torch.zeros(())


def _reached(parameters: Iterable[T]) -> list[T]:
    """Returns the parameters that get a gradient in the running backward pass."""
    leaves = [p for p in parameters if p.requires_grad and p.is_leaf]
    if not leaves:
        return []
    # The node that adds up the gradient of a leaf stands behind an edge of any node
    # that is computed from it. A node is gone with its tensor, and torch 2.11 then can
    # no longer say what was before it.
    with torch.enable_grad():
        computed = _Edges.apply(*leaves)
        edges = computed.grad_fn.next_functions
    return [p for p, (node, _) in zip(leaves, edges) if will_run(node)]


class GradSampleMode(PrivateMode):
    """
    Modes "hooks" and "functorch": ``backward()`` leaves ``p.grad_sample``. Another
    model behind the private one, which computes the loss from its outputs, is not
    seen, and gets plain gradients.
    """

    loss_reduction: str  # of Opacus's classes

    def add_hooks(self, **kwargs: Any) -> None:
        """Intercepts the model's calls."""
        super().add_hooks(**kwargs)
        # What the running backward pass has reached, until it ends.
        self._backward: list[tuple[ForwardRecord, DenseGrads]] = []

    def begin_forward(self, size: int) -> None:
        """See :class:`~adapter.model.Mode`."""
        # A backward pass that failed may have left something.
        self._backward.clear()

    def mean_of(self, record: ForwardRecord, losses: T) -> T:
        """See :class:`~adapter.model.Mode`."""
        return losses.mean().as_subclass(MeanLoss)

    def plain_backward(
        self, record: ForwardRecord, grads: Sequence[T | None]
    ) -> list[T | None]:
        """Called in ``loss.backward()`` with the gradients of the outputs."""
        record.mark_done()
        # The callback comes once, at the end of the whole backward pass.
        if not self._backward:
            call_after_backward(self._finish)
        total = DenseGrads(record.params, record.size)
        self._backward.append((record, total))
        return record.add_gradients(total, grads)

    def clip(
        self,
        optimizer: PrivateOptimizer,
        samples: list[Samples],
        loss: Callable[[Any], T],
    ) -> T:
        """Sets ``p.grad_sample``; see :meth:`~modes.ghost.Ghost.clip`."""
        parameters = self.private.params
        total = DenseGrads(parameters, sum(part.size for part in samples))
        losses = self.private.clip(samples, loss, total)
        refuse_no_graph(total, losses.numel())
        for name, grad_sample in total.grads().items():
            parameters[name].grad_sample = grad_sample
        return losses

    def _feeds(self) -> bool:
        """
        Returns True if a model that computed an input gets gradients. Refuses gradients
        of the model's own parameters that were used elsewhere.
        """
        for parameter in _reached(self.private.names):
            raise not_private(self.private, parameter, "the loss is")
        inputs: list[T] = []
        for record, _ in self._backward:
            inputs += record.trained
        behind_inputs = [*inputs, *dependencies_of(inputs).leaves]
        return bool(_reached(x for x in behind_inputs if isinstance(x, nn.Parameter)))

    def _finish(self) -> None:
        """Sets ``p.grad_sample`` of every parameter, after the backward pass."""
        parameters = self.private.params
        grad_samples = [getattr(p, "grad_sample", None) for p in parameters.values()]
        feeds = self._feeds()
        backward, self._backward = self._backward, []
        if not parameters:
            return
        kept = any(old is not None for old in grad_samples)
        if not self.grad_accumulation_allowed and kept and not feeds:
            raise second_pass(
                "Poisson sampling is not compatible with grad accumulation: for "
                f"batches that don't fit in memory use {MEMORY_MANAGER}."
            )
        records = [record for record, _ in backward]
        sizes = {record.size for record in records}
        for record in records:
            if feeds:
                record.may_not_enter(feeds_another(self.private))
            elif len(sizes) > 1:
                record.may_not_enter(of_other_sizes(self.private, sizes))
        # Those of earlier passes were dropped, or are a part of the sum.
        if not kept:
            self.private.passes.forget(kept=False)
        self.private.passes.add(records)
        dense = [total.grads() for _, total in backward]
        for (name, parameter), old in zip(parameters.items(), grad_samples):
            new: Any = self._rows([grads[name] for grads in dense])
            # Opacus lists the gradients of several backward passes.
            if isinstance(old, list):
                new = [*old, new]
            elif old is not None:
                new = [old, new]
            parameter.grad_sample = new

    def _rows(self, grads: Sequence[T]) -> T:
        """Adds the gradients of calls; those of other samples, refused, come behind."""
        by_size: dict[int, T] = {}
        for grad in grads:
            size = len(grad)
            by_size[size] = by_size[size] + grad if size in by_size else grad
        # Opacus's optimizer divides by the batch size, as a mean over samples would.
        if self.loss_reduction == "mean":
            by_size = {size: grad * size for size, grad in by_size.items()}
        first, *others = by_size.values()
        return torch.cat([first, *others]) if others else first
