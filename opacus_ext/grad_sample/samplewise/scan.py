"""One sample after the other, by ordinary autograd: right for every model.

The outputs of all samples are put together as the model would have them. In the
backward pass each sample's part is followed back alone, and its gradients are handed
on before those of the next.

Source: nxBP of "Scaling up differentially private deep learning with fast per-example
gradient clipping" (Lee and Kifer 2021), with fused norms and sums.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_unflatten

from opacus_ext.grad_sample.samplewise.checkpoint import (
    arguments_of,
    as_reentrant,
    is_reentrant,
    refuse_not_entered,
)
from opacus_ext.grad_sample.samplewise.compare import Join, kind_of, padded
from opacus_ext.grad_sample.samplewise.functorch import checkpoints, replace_tensor
from opacus_ext.grad_sample.samplewise.hooks import HookCall, batch_hooks, of_all
from opacus_ext.grad_sample.samplewise.kinds import InputKind, joins_for
from opacus_ext.grad_sample.samplewise.packed import as_one, unpacked
from opacus_ext.grad_sample.samplewise.states import States, Watch
from opacus_ext.grad_sample.samplewise.walk import leaves_in, map_tensors
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.inputs import Part


class Samples(torch.autograd.Function):
    """Of the samples' outputs those of the batch, and the way back to each."""

    @staticmethod
    def forward(ctx, anchor, part, count, *tensors):
        ctx.part, ctx.count = part, count
        ctx.anchor_like = anchor.new_zeros(())
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors[count:])

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise Refused(
                f"{ctx.part.run.engine.describe()}: gradients of its gradients were "
                "asked for (create_graph=True) outside of its forward, where they "
                "can't be told apart by sample.",
                module=ctx.part.run.engine.describe(),
                remedy="Compute them inside the forward.",
            )
        run = ctx.part.run
        if run.engine.collector is not None:
            run.engine.collector.note_run(run)
        given = ctx.part.backward(grads)
        return (ctx.anchor_like, None, None, *given, *(None for _ in grads))


class _Part(NamedTuple):
    """Tensors that left a scan together, and where each sample's begin."""

    run: "ScanRun"
    edges: List[List[Any]]  # [tensor][sample]
    joins: List[Join]
    shapes: List[List[torch.Size]]

    def backward(self, grads: Tuple[Optional[torch.Tensor], ...]) -> List:
        """Each sample alone; returns the gradients of the inputs."""
        run = self.run
        if not run.size:
            return []
        found: List[List[Optional[torch.Tensor]]] = []
        each = [
            None if g is None else join.split(g, shapes)
            for g, join, shapes in zip(grads, self.joins, self.shapes)
        ]
        for b in range(run.size):
            roots = [e[b] for e, g in zip(self.edges, each) if g is not None]
            weights = [g[b] for g in each if g is not None]
            found.append(run.backward_of(b, roots, weights))
        return [
            None if all(x is None for x in column) else _put_back(column, dim, like)
            for column, (dim, like) in zip(zip(*found), run.wanted)
        ]


class ScanRun:
    """
    A forward pass of samples one after the other.

    Args:
        engine: of the model
        size: number of samples
    """

    def __init__(self, engine: "Engine", size: int):
        self.engine, self.size, self.batch = engine, size, size
        self.rows: Optional[torch.Tensor] = None
        self.joins: Optional[List[Join]] = None  # of its outputs
        self.hook_calls: List[HookCall] = []  # calls of hooks, to come
        self.done, self.half = False, engine.in_half
        self.wanted: List[Tuple[Optional[int], torch.Tensor]] = []
        self._given: List[List[torch.Tensor]] = []  # inputs with gradients, by sample

    def forward(self, part: "Part", known: InputKind, raw: bool, size: int) -> Any:
        """
        The outputs of the batch; with ``raw`` its tensors, see ``Engine``.

        Args:
            known: of this kind of input
            size: of the batch that the samples are part of
        """
        tensors = [
            (dim, x)
            for x, dim in zip(part.leaves, part.batched)
            if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        self.wanted = tensors if torch.is_grad_enabled() else []
        engine = self.engine
        outputs: List[Any] = []
        seen: List[List[HookCall]] = []
        with batch_hooks(self, at_once=False), checkpoints(
            partial(_checkpoint, engine)
        ):
            states = States(engine, values=True)
            for b in range(self.size):
                if b:
                    states.back()
                alone = part.alone(b, leaf=bool(self.wanted))
                self._given.append([x for x in alone.leaves if x is not None])
                with Watch(engine) if engine.made_of_data else nullcontext():
                    outputs.append(engine.forward(*alone.args, **alone.kwargs))
                states.end()
                seen.append(self.hook_calls)
                self.hook_calls = []
        if raw:
            known.outputs.update(map(kind_of, outputs))
            columns = zip(*([unpacked(y) for y in leaves_in(x)] for x in outputs))
            return [(_side_by_side(c), True) for c in columns]
        if not self.size:
            return self._of_none(part)
        self.joins = [joins_for(engine, known, x, size) for x in outputs][0]
        left, seen = states.common(), of_all(engine, seen)
        self._join(list(zip(outputs, seen, left)), self.joins)
        states.put(left[0])
        self.hook_calls = seen[0]
        return outputs[0]

    def _of_none(self, part: "Part") -> Any:
        """What the model itself gives for a batch of none, or of one without it."""
        args, kwargs = tree_unflatten(part.leaves, part.spec)
        with torch.no_grad():
            try:
                output = self.engine.forward(*args, **kwargs)
            except Exception:  # shapes [0, -1], the longest of none
                zeros = [
                    (
                        x
                        if dim is None
                        else x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])
                    )
                    for x, dim in zip(part.leaves, part.batched)
                ]
                args, kwargs = tree_unflatten(zeros, part.spec)
                output = map_tensors(
                    lambda x: x[:0] if x.dim() else x,
                    self.engine.forward(*args, **kwargs),
                )
        own = _Part(self, [], [], [])
        for x in list(leaves_in(output)) if torch.is_grad_enabled() else ():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                replace_tensor(x, Samples.apply(self.engine.anchor, own, 0, x)[0])
        return output

    @torch.no_grad()
    def _together(self, column: tuple, join: Join) -> torch.Tensor:
        values = [x.detach() for x in column]
        alone = len(column) == 1 and not column[0].is_leaf
        if not alone and all(x is column[0] for x in column):  # no sample has made it
            return column[0]
        if len({x.shape for x in values}) > 1:
            dim = join.dim or 0
            return torch.cat(padded(values, dim), dim)
        return join(torch.stack(values), self.engine)

    def _join(
        self, outputs: List[Any], joins: Optional[List[Optional[Join]]] = None
    ) -> None:
        """Makes of the tensors in ``outputs[0]`` those of the batch."""
        leaves = [list(leaves_in(x)) for x in outputs]
        if len(set(map(len, leaves))) > 1:
            raise Refused(
                f"{self.engine.describe()} returns {sorted(set(map(len, leaves)))} "
                "tensors for single samples.",
                module=self.engine.describe(),
                remedy="Return the same from each.",
            )
        columns = list(zip(*leaves))
        packs = {
            i: c for i, c in enumerate(columns) if isinstance(c[0], PackedSequence)
        }
        for i, packed in packs.items():
            columns[i] = tuple(x.data for x in packed)
        joins = list(joins or ())
        joins += [Join()] * (len(columns) - len(joins))
        whole = [self._together(c, j) for c, j in zip(columns, joins)]
        trained = [
            i
            for i, c in enumerate(columns)
            if whole[i] is not c[0] and any(x.requires_grad for x in c)
        ]
        if trained:
            edge = torch.autograd.graph.get_gradient_edge
            part = _Part(
                self,
                [
                    [edge(x) if x.requires_grad else None for x in columns[i]]
                    for i in trained
                ],
                [joins[i] for i in trained],
                [[x.shape for x in columns[i]] for i in trained],
            )
            inputs = [x for _, x in self.wanted]
            found = Samples.apply(
                self.engine.anchor,
                part,
                len(inputs),
                *inputs,
                *(whole[i] for i in trained),
            )
            for i, x in zip(trained, found):
                whole[i] = joins[i].guarded(x, self.engine)
        for i, packed in packs.items():
            one = as_one(packed, [[b] for b in range(self.size)])
            columns += [(x,) for x in packed[0][1:]]
            whole += one[1:]
            whole[i] = whole[i][one.data]
        for column, new in zip(columns, whole):
            if new is not column[0]:
                replace_tensor(column[0], new)

    def backward_of(
        self, b: int, roots: List[Any], grads: List[torch.Tensor]
    ) -> List[Optional[torch.Tensor]]:
        """Hands on the gradients of sample ``b``; returns those of its inputs."""
        pairs = [(r, g) for r, g in zip(roots, grads) if r is not None]
        engine, inputs = self.engine, self._given[b]
        params = list(engine.params.values())
        kept = [p.grad for p in params]
        for x in (*params, *inputs):
            x.grad = None
        with engine.own_backward():
            if pairs:
                # backward, as autograd.grad refuses reentrant checkpointing
                # retained: samples may share what was computed of parameters once
                torch.autograd.backward(*map(list, zip(*pairs)), retain_graph=True)
        found = {p: p.grad for p in params}
        for p, grad in zip(params, kept):
            p.grad = grad
        engine.deliver_sample(self, b, found)
        return [x.grad for x in inputs]


def _checkpoint(
    engine: "Engine",
    checkpoint: Callable,
    function: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A sample's backward pass is inside of another, which the other kind refuses."""
    result = checkpoint(function, *args, **{**kwargs, "use_reentrant": False})
    if not is_reentrant(kwargs) or not torch.is_grad_enabled():
        return result
    given = arguments_of(function, args, kwargs)[1]
    refuse_not_entered(engine, given, leaves_in(result))
    return as_reentrant(result)


def _side_by_side(column: tuple) -> Any:
    column = tuple(x.detach() for x in column)
    same = len({x.shape for x in column}) == 1
    return torch.stack(column) if same else list(column)


def _put_back(column: tuple, dim: Optional[int], like: torch.Tensor) -> torch.Tensor:
    """The gradient of an input from those of the samples'."""
    if dim is None:
        return sum(x for x in column if x is not None)
    zero = torch.zeros_like(like.narrow(dim, 0, 1))
    return torch.cat([zero if x is None else x for x in column], dim)
