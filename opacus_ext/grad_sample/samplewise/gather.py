"""From what the uses of parameters were shown to the gradients of each parameter.

An op may have used a parameter itself, a view of it, a cast of it, or what was computed
of several. The factors of a view are those of the parameter in another order or place;
what was computed is followed back by autograd, one gradient a sample.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, GradSample, OneHot, known
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.grad_sample.samplewise.uses import Root, Use


class View(NamedTuple):
    """
    A view of a parameter without repeated entries.

    Attributes:
        axes: for each axis of the view that of the parameter; None if these are not
            told apart by their strides
        starts: where the view begins on each axis of the parameter
    """

    param: nn.Parameter
    axes: Optional[Tuple[int, ...]]
    starts: Tuple[int, ...]


def view_of(root: Root, params: Dict[int, nn.Parameter]) -> Optional[View]:
    """How a root is a view of a parameter; None if it is something else."""
    x = root.tensor
    if id(x) in params:
        axes = tuple(range(x.dim()))
        return View(x, axes, (0,) * x.dim())
    base = x._base
    if base is None or id(base) not in params or x.dtype != base.dtype:
        return None
    repeated = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape))
    if repeated or not base.is_contiguous() or not _is_plain(x.grad_fn):
        return None
    offset = _offset(x, base)
    starts = []
    for size, stride in zip(base.shape, base.stride()):
        starts.append(offset // stride % size)
    strides = [s if n > 1 else -1 for s, n in zip(base.stride(), base.shape)]
    told = len(x.shape) == len(base.shape) and len(set(strides)) == len(strides)
    axes = None
    if told and all(n > 1 and s in strides for s, n in zip(x.stride(), x.shape)):
        axes = tuple(strides.index(s) for s in x.stride())
        fits = all(
            starts[axis] + n <= base.shape[axis] for axis, n in zip(axes, x.shape)
        )
        axes = axes if fits and len(set(axes)) == len(axes) else None
    return View(base, axes, tuple(starts))


def _offset(x: torch.Tensor, base: torch.Tensor) -> int:
    # Not x.storage_offset(), which tensors of a compiler do not all have.
    ends = (torch.ops.aten.sym_storage_offset(y) for y in (x, base))
    return int(next(ends) - next(ends))


def _is_plain(node: object) -> bool:
    """Whether only torch's own ops lie between a view and its parameter."""
    while node is not None and not hasattr(node, "variable"):
        if isinstance(node, BackwardCFunction):
            return False
        parents = [n for n, _ in node.next_functions if n is not None]
        if len(parents) != 1:
            return False
        node = parents[0]
    return node is not None


def _of_param(
    view: View, x: torch.Tensor, factors: Tuple[Factor, ...], size: int
) -> Tuple[Factor, ...]:
    """The factors of a view's gradients as those of the parameter's."""
    p = view.param
    if x is p:
        return factors
    dense = [isinstance(f, (torch.Tensor, OneHot)) for f in factors]
    if view.axes is None or not all(dense) or len(factors) != x.dim():
        sample = GradSample(x.shape, size)
        sample.add(*factors)
        whole = sample.materialise()
        out = whole.new_zeros(size, p.numel())
        offset = _offset(x, p)
        strides = (p.numel(), *x.stride())
        out.as_strided((size, *x.shape), strides, offset).copy_(whole)
        return (out.unsqueeze(1),)
    found: List[Optional[Factor]] = [None] * p.dim()
    for axis, f in zip(view.axes, factors):
        start, width = view.starts[axis], p.shape[axis]
        if isinstance(f, OneHot):
            found[axis] = OneHot(f.index + start if start else f.index, width)
        elif f.shape[2] == width:
            found[axis] = f
        else:
            found[axis] = F.pad(f, (start, width - start - f.shape[2]))
    return tuple(found)


# Entries of what is worth being copied beside others of its kind: to start kernels
# takes longer than to run them.
SMALL = 2**16


class Part(NamedTuple):
    """Per-sample gradients of some samples of the batch, by parameter."""

    rows: Optional[torch.Tensor]  # which samples; None: all
    samples: Dict[int, GradSample]  # by the parameter's id


class RunGradients:
    """
    The per-sample gradients that one run delivers.

    Args:
        run: what was run
        params: the trainable parameters, by id
    """

    def __init__(self, run: Run, params: Dict[int, nn.Parameter]):
        self.run = run
        self.samples: Dict[int, GradSample] = {}
        self._params = params
        self._views: Dict[int, Optional[View]] = {}
        self._made: Dict[int, Tuple[Root, GradSample]] = {}
        # Of each parameter the uses that are still to come, and those of which more
        # comes in the end, with what was computed of them.
        self.uses_left: Dict[int, int] = {}
        self.deferred: Set[int] = set()
        for used in list(run.roots.values()):
            count = run.pending[id(used)]
            if not count:
                continue
            root = _resolved(used)
            i = id(root.tensor)
            if i not in params:
                view = self._view(root)
                if view is None:
                    if root.edge is not None:  # else a leaf that is not trained
                        self.deferred |= _made_of(root)
                    continue
                i = id(view.param)
            self.uses_left[i] = self.uses_left.get(i, 0) + count
        # Parameters with one small use, which those of others may be taken together
        # with: what is done for each sample is done for n times as many.
        self._alone = {
            i
            for i, count in self.uses_left.items()
            if count == 1 and known(run.size) * params[i].numel() <= SMALL
        } - self.deferred
        self._alike: Dict[tuple, List[Tuple[Use, torch.Tensor, Sequence]]] = {}

    def _view(self, root: Root) -> Optional[View]:
        if id(root) not in self._views:
            self._views[id(root)] = view_of(root, self._params)
        return self._views[id(root)]

    def add(
        self, use: Use, grad: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> List[nn.Parameter]:
        """
        Takes what a use was shown.

        Returns:
            parameters of which all uses are known now
        """
        size = use.size
        done = []
        if known(grad.numel()) <= SMALL and use.table is None and size:
            if all(r is None or id(r.tensor) in self._alone for r in use.roots):
                self._alike.setdefault(_kind(use, grad, saved), []).append(
                    (use, grad, saved)
                )
                return done
        for root, factors in use.uses(grad, saved):
            root = _resolved(root)
            p = self._params.get(id(root.tensor))
            if p is None:
                view = self._view(root)
                if view is None:
                    if id(root) not in self._made:
                        self._made[id(root)] = root, GradSample(root.shape, size)
                    self._made[id(root)][1].add(*factors)
                    continue
                p = view.param
                factors = _of_param(view, root.tensor, factors, size)
            i = id(p)
            sample = self.samples.get(i)
            if sample is None:
                sample = self.samples[i] = GradSample(p.shape, size)
            sample.add(*factors)
            self.uses_left[i] = left = self.uses_left.get(i, 0) - 1
            if left == 0 and i not in self.deferred:
                done.append(p)
        return done

    def _together(self, uses: List[Tuple[Use, torch.Tensor, Sequence]]) -> None:
        """Uses of one kind, as one use of n times as many samples."""
        first, grad, saved = uses[0]
        n, size = len(uses), first.size
        if n > 1:
            grad = torch.cat([g for _, g, _ in uses])
            saved = [torch.cat(column) for column in zip(*(x for _, _, x in uses))]
        roots = zip(*([r for r in use.roots if r is not None] for use, _, _ in uses))
        for column, (root, factors) in zip(roots, first.uses(grad, saved)):
            whole = GradSample(root.shape, n * size)
            whole.add(*factors)
            for root, rows in zip(column, whole.materialise().view(n, size, -1)):
                i = id(root.tensor)
                if i in self.samples:
                    self.samples[i].add(rows.unsqueeze(1))
                else:
                    self.samples[i] = GradSample(root.shape, size, rows)

    def finish(self) -> None:
        """What was put off: small uses, and what was computed of parameters."""
        while self._made:
            _, (root, sample) = self._made.popitem()
            if not sample.batch_size:
                continue
            grads = sample.materialise().to(root.tensor.dtype)
            if root.recipe is not None:
                use, saved = self.run.recipe(root)
                self.add(use, grads, saved)
                continue
            if root.edge is None:  # a leaf that the forward has made
                continue
            leaves = leaves_of([root.edge], self._params)
            for (p, _), g in zip(leaves, _each_vjp(root.edge, leaves, grads)):
                if id(p) not in self.samples:
                    self.samples[id(p)] = GradSample(p.shape, g.shape[0])
                self.samples[id(p)].add(g.reshape(g.shape[0], 1, p.numel()))
        for uses in self._alike.values():
            self._together(uses)
        self._alike = {}


def _each_vjp(
    edge: GradientEdge,
    leaves: List[Tuple[nn.Parameter, GradientEdge]],
    grads: torch.Tensor,
) -> Tuple[torch.Tensor, ...]:
    """Of each sample's gradient ``grads[b]`` those of the leaves, ``[B, *shape]``."""
    ends = [end for _, end in leaves]
    if not isinstance(grads.shape[0], torch.SymInt):
        # What checkpoints and others of autograd's own functions know of.
        return torch.autograd.grad(
            [edge], ends, [grads], is_grads_batched=True, retain_graph=True
        )

    def vjp(grad: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        return torch.autograd.grad([edge], ends, [grad], retain_graph=True)

    return torch.vmap(vjp)(grads)


def _kind(use: Use, grad: torch.Tensor, saved: Sequence[torch.Tensor]) -> tuple:
    """What uses have in common that can be taken together."""
    of_roots = tuple(None if r is None else r.shape for r in use.roots)
    of_saved = tuple((*map(known, x.shape), x.dtype, x.device) for x in saved)
    own = (*map(known, grad.shape), grad.dtype, grad.device)
    return (use.factors, use.rows, use.saved_rows, of_roots, own, of_saved)


def leaves_of(
    edges: Sequence[GradientEdge], params: Dict[int, nn.Parameter]
) -> List[Tuple[nn.Parameter, GradientEdge]]:
    """
    Where graphs end in parameters. One may have several ends: a forward that takes it
    out of its module and puts it back (torch.nn.utils.parametrize) may give it another.
    """
    found, seen, todo = [], set(), [edge.node for edge in edges]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        p = getattr(node, "variable", None)
        if p is not None and id(p) in params:
            found.append((params[id(p)], GradientEdge(node, 0)))
        todo += [parent for parent, _ in node.next_functions]
    return found


def _made_of(root: Root) -> Set[int]:
    """The ids of the parameters that a root was computed of."""
    found, todo, seen = set(), [root.edge.node], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [parent for parent, _ in node.next_functions]
    return found


def _resolved(root: Root) -> Root:
    while root.same is not None:
        root = root.same
    return root
