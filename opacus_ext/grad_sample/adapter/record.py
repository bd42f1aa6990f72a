"""One forward pass of a private model, and the gradients that come back through it."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.adapter.compiled import CompiledGroup
from opacus_ext.grad_sample.core.clip import DenseGrads
from opacus_ext.grad_sample.core.groups import gradients_alone, no_autocast
from opacus_ext.grad_sample.core.vmap import will_run
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.refused import Refused

T = torch.Tensor


class Part(NamedTuple):
    """
    Samples of a forward pass that have run together, or one that has run alone.

    Attributes:
        rows: which of the batch they are; None for all
        group: in which they ran at once; None for one alone
        outputs: by the number of the leaf, what they returned, with its graph:
            ``[B, *shape]``, or of one alone ``[*shape]``
    """

    rows: Optional[T]
    group: Any
    outputs: Dict[int, T]


class ForwardRecord:
    """
    A forward pass.

    Args:
        model: the private model
        size: number of samples
        params: its trainable parameters, by name
        trained: inputs of the pass that require a gradient
        inputs: leaves in their places

    Attributes:
        parts: together all samples
        dims: of each output with a graph, the dim of the samples; None for losses
        done: whether its gradients have been taken
    """

    def __init__(
        self,
        model: Any,
        size: int,
        params: Dict[str, T],
        trained: Sequence[T] = (),
        inputs: Sequence[T] = (),
    ):
        self.model, self.size, self.params = model, size, params
        self.trained, self.inputs = list(trained), list(inputs)
        self.parts: List[Part] = []
        self.dims: Dict[int, Optional[int]] = {}
        self.done = False

    def take(self) -> None:
        """
        Raises:
            Refused: if the gradients have been taken before, or if there are more
                samples than the loader has drawn records
        """
        most = self.model.inputs.most
        if most is not None and self.size > most:
            raise Refused(
                f"{self.model.describe()} was called on {self.size} samples, and the "
                f"loader drew at most {most} records: some would count several times.",
                module=self.model.describe(),
                remedy="Call it on the records that were drawn: views of a record "
                "belong into one sample, of which the loss is the mean.",
            )
        if self.done:
            raise Refused(
                f"{self.model.describe()}: a second backward pass of one batch. Each "
                "would be clipped by itself, so that a sample counts twice.",
                module=self.model.describe(),
                remedy="Add the losses and call backward() once, or call the model "
                "again.",
            )
        self.model.check_hooks()
        self.done = True

    def add_gradients(
        self, total: Any, grads: Sequence[Optional[T]]
    ) -> List[Optional[T]]:
        """
        Adds the samples' gradients.

        Args:
            total: a ClippedSum, TwoPassSum or DenseGrads (core/)
            grads: of the outputs with a graph

        Returns:
            the gradients of the inputs
        """
        of_inputs: List[Optional[T]] = [None] * len(self.inputs)
        params = list(self.params.values())
        with no_autocast():
            for part in self.parts:
                outputs, own = self._own(part, grads)
                if part.group is None:
                    by_id = gradients_alone(outputs, own, [*params, *self.inputs])
                    total.add_one(int(part.rows), by_id)
                    found = [by_id.get(id(x)) for x in self.inputs]
                else:
                    found = self._of_group(total, part, outputs, own)
                of_inputs = [
                    g if old is None else old if g is None else old + g
                    for old, g in zip(of_inputs, found)
                ]
        return of_inputs

    def of_inputs(self, grads: Sequence[Optional[T]]) -> List[Optional[T]]:
        """The gradients of the inputs alone."""
        return self.add_gradients(DenseGrads({}, self.size), grads)

    def _of_group(
        self,
        total: Any,
        part: Part,
        outputs: List[T],
        grads: List[Optional[T]],
    ) -> List[Optional[T]]:
        if isinstance(part.group, CompiledGroup):
            part.group.add_to(total, part.rows, outputs, grads)
            return [None] * len(self.inputs)
        params = list(self.params.values())
        given = (part.rows, part.group, outputs, grads, params, self.inputs)
        try:
            return total.add_group(*given)
        except NotAtOnce as error:
            raise Refused(
                f"{self.model.describe()}: {error} uses a parameter, so that its "
                "per-sample gradients are not known.",
                module=self.model.describe(),
                remedy='Train one sample after the other: grad_sample_mode="scan".',
            ) from error

    def _own(
        self, part: Part, grads: Sequence[Optional[T]]
    ) -> Tuple[List[T], List[Optional[T]]]:
        """The outputs of a part and their gradients, both as the part has them."""
        outputs, own = [], []
        for (i, dim), g in zip(self.dims.items(), grads):
            y = part.outputs.get(i)
            if g is None or y is None:
                continue
            if dim is not None:  # [.., B, ..] as [B, .., 1, ..]
                g = g.unflatten(dim, (self.size, 1)).movedim(dim, 0)
            if part.rows is not None:
                g = g[part.rows.to(g.device)]
            outputs.append(y)
            own.append(g.to(y.dtype))
        return outputs, own


class Boundary(torch.autograd.Function):
    """
    Between the graphs of the samples and the graph of the user: gradients of outputs
    come here, and are handed to the record of the pass.
    """

    @staticmethod
    def forward(ctx, record, anchor, count, *tensors):
        ctx.record, ctx.count = record, count
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        # autograd.grad() of inputs alone does not come to the anchor.
        if will_run(ctx.next_functions[0][0]):
            found = ctx.record.model.backward(ctx.record, grads)
        else:
            found = ctx.record.of_inputs(grads)
        return (None, None, None, *[None] * ctx.count, *found)


def leave(record: ForwardRecord, outputs: Sequence[T]) -> List[T]:
    """Outputs of all samples, detached, as the user gets them: with a graph."""
    if not outputs:
        return []
    anchor = torch.zeros((), requires_grad=True)
    return list(Boundary.apply(record, anchor, len(outputs), *outputs, *record.trained))


class Met(NamedTuple):
    """
    What a loss depends on.

    Attributes:
        nodes: of the outputs of private models
        leaves: tensors that would get a gradient besides
    """

    nodes: List[Any]
    leaves: List[T]

    @property
    def records(self) -> List[ForwardRecord]:
        """The forward passes, each once."""
        return list({id(node.record): node.record for node in self.nodes}.values())


def met_by(tensors: Sequence[T]) -> Met:
    """What tensors depend on, as far as the outputs of private models."""
    nodes, leaves, seen = [], [], set()
    todo = [x.grad_fn for x in tensors]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "_forward_cls", None) is Boundary:
            nodes.append(node)
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [parent for parent, _ in node.next_functions]
    return Met(nodes, leaves)
