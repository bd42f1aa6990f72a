"""From the gradients at the uses to the per-sample gradients of each parameter.

A use may be of a parameter itself, of a view of it, or of what was computed from
several. The factors of a view are those of the parameter in another order or place;
what was computed is followed back by autograd, one gradient a sample.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.core.uses import ParameterUse, ParameterValue, View
from opacus_ext.grad_sample.factors import Factor, GradSample, OneHot

T = torch.Tensor

# Entries up to which a gradient is handled beside others of its kind: to start kernels
# takes longer than to run them.
SMALL = 2**16


class Collector:
    """
    The per-sample gradients of one group of samples.

    Args:
        params: by id
        size: number of samples
        uses: of the parameters, in the order of the forward pass
        done: called with a parameter and its gradients when all of its uses are known

    Attributes:
        found: by the id of a parameter; those that are missing are zero
    """

    def __init__(
        self,
        params: Dict[int, T],
        size: int,
        uses: Sequence[ParameterUse],
        done: Optional[Callable[[T, GradSample], None]] = None,
    ):
        self.params, self.size, self.done = params, size, done
        self.found: Dict[int, GradSample] = {}
        self._views: Dict[int, Optional[View]] = {}  # by the id of the value
        self._computed: Dict[int, Tuple[ParameterValue, GradSample]] = {}
        self._alike: Dict[tuple, List[Tuple[ParameterUse, T]]] = {}
        self._left: Dict[int, float] = {}  # uses of each parameter that are to come
        for value in (v for use in uses for v in use.values if v is not None):
            view = self._view(value)
            for i in [id(view.param)] if view else self._params_of(value):
                more = 1 if view else math.inf  # known in the end
                self._left[i] = self._left.get(i, 0) + more
        # Small parameters with one use, by themselves.
        self._alone = {
            i
            for i, count in self._left.items()
            if count == 1 and size * params[i].numel() <= SMALL
        }

    def add(self, use: ParameterUse, backprops: T) -> None:
        """Takes the gradient that arrived at a use."""
        use.check()
        if (
            backprops.numel() <= SMALL
            and use.size is None
            and all(v is None or id(v.tensor) in self._alone for v in use.values)
        ):
            self._alike.setdefault(_kind(use, backprops), []).append((use, backprops))
            return
        for value, factors in use.of(backprops):
            self._add(value, factors, self.size if use.size is None else use.size)

    def _add(
        self, value: ParameterValue, factors: Tuple[Factor, ...], size: int
    ) -> None:
        view = self._view(value)
        if view is None:
            if id(value) not in self._computed:
                sample = GradSample(value.shape, size)
                self._computed[id(value)] = value, sample
            self._computed[id(value)][1].add(*factors)
            return
        if value.tensor is not view.param:
            factors = _of_param(view, value.tensor, factors, size)
        p = view.param
        self._sample(p, size).add(*factors)
        self._left[id(p)] -= 1
        if self.done is not None and not self._left[id(p)]:
            self.done(p, self.found[id(p)])

    def _params_of(self, value: ParameterValue) -> List[int]:
        """The ids of the parameters that a value was computed from."""
        return list(
            dict.fromkeys(id(x) for x in value.leaves() if id(x) in self.params)
        )

    def _sample(self, p: T, size: int) -> GradSample:
        if id(p) not in self.found:
            self.found[id(p)] = GradSample(p.shape, size)
        return self.found[id(p)]

    def _view(self, value: ParameterValue) -> Optional[View]:
        if id(value) not in self._views:
            self._views[id(value)] = view_of(value, self.params)
        return self._views[id(value)]

    def finish(self) -> Dict[int, GradSample]:
        """The per-sample gradients by the ids of parameters; none of those not used."""
        for uses in self._alike.values():
            self._add_together(uses)
        for value, sample in self._computed.values():
            grads = sample.materialize().to(value.tensor.dtype)
            leaves = [self.params[i] for i in self._params_of(value)]
            for p, g in zip(leaves, value.pull(leaves, grads) if leaves else ()):
                if g is not None:
                    self._sample(p, len(g)).add(g.reshape(len(g), 1, -1))
        self._alike, self._computed = {}, {}
        return self.found

    def _add_together(self, uses: List[Tuple[ParameterUse, T]]) -> None:
        """Uses of one kind, as one use of n times as many samples."""
        n, first = len(uses), uses[0][0]
        backprops = torch.cat([g for _, g in uses])
        data = [torch.cat(column) for column in zip(*(use.data for use, _ in uses))]
        given = (v for v in first.values if v is not None)
        places = [i for i, v in enumerate(first.values) if v is not None]
        whole = first._replace(data=data).of(backprops)
        for i, value, (_, factors) in zip(places, given, whole):
            sample = GradSample(value.shape, n * self.size)
            sample.add(*factors)
            rows = sample.materialize().view(n, self.size, -1)
            for (use, _), each in zip(uses, rows):
                p = use.values[i].tensor
                self.found[id(p)] = GradSample(p.shape, self.size, each)


def _kind(use: ParameterUse, backprops: T) -> tuple:
    """What uses have in common that are handled together."""
    of_values = tuple(None if v is None else v.shape for v in use.values)
    of_data = tuple((x.shape, x.dtype, x.device) for x in use.data)
    own = (backprops.shape, backprops.dtype, backprops.device)
    return (use.factors, use.rows, use.data_rows, of_values, own, of_data)


# -- views -----------------------------------------------------------------------------

# Casts and copies: entry by entry the same.
_SAME = ("ToCopyBackward0", "CloneBackward0")


def view_of(value: ParameterValue, params: Dict[int, T]) -> Optional[View]:
    """How a value is a view of a parameter; None if it is something else."""
    x = value.tensor
    if id(x) in params:
        return View(x, tuple(range(x.dim())), (0,) * x.dim())
    if value.edge is None or not _is_plain(value.edge.node):
        return None
    p = next(iter(value.leaves()))
    if id(p) not in params:
        return None
    if value.edge.node.name() in _SAME and x.shape == p.shape:
        direct = hasattr(value.edge.node.next_functions[0][0], "variable")
        return View(p, tuple(range(x.dim())), (0,) * x.dim()) if direct else None
    if x._base is not p or x.dtype != p.dtype or not p.is_contiguous():
        return None
    if _overlaps(x):
        return None
    offset = x.storage_offset() - p.storage_offset()
    starts = tuple(offset // stride % size for size, stride in zip(p.shape, p.stride()))
    strides = [s if n > 1 else -1 for s, n in zip(p.stride(), p.shape)]
    axes = None
    if x.dim() == p.dim() and all(
        n > 1 and s in strides for s, n in zip(x.stride(), x.shape)
    ):
        axes = tuple(strides.index(s) for s in x.stride())
        inside = all(starts[a] + n <= p.shape[a] for a, n in zip(axes, x.shape))
        if not inside or len(set(axes)) < len(axes):
            axes = None
    return View(p, axes, starts)


def _overlaps(x: T) -> bool:
    """Whether an entry of memory is in a view more than once, as by ``unfold``."""
    end = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride < end:
                return True
            end = stride * (size - 1) + end
    return False


def _is_plain(node: Any) -> bool:
    """Whether only torch's own ops of one argument lie between it and a leaf."""
    while not hasattr(node, "variable"):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        parents = [n for n, _ in node.next_functions if n is not None]
        if len(parents) != 1:
            return False
        node = parents[0]
    return True


def _of_param(
    view: View, x: T, factors: Tuple[Factor, ...], size: int
) -> Tuple[Factor, ...]:
    """The factors of a view's gradients as those of the parameter's."""
    p = view.param
    if view.axes is None or len(factors) != x.dim():
        sample = GradSample(x.shape, size)
        sample.add(*factors)
        whole = sample.materialize()
        if x.shape == p.shape and x._base is None:
            return (whole.flatten(1).unsqueeze(1),)
        out = whole.new_zeros(size, p.numel())
        offset = x.storage_offset() - p.storage_offset()
        out.as_strided((size, *x.shape), (p.numel(), *x.stride()), offset).copy_(whole)
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


# -- backward --------------------------------------------------------------------------


def backward(
    outputs: Sequence[T],
    grads: Sequence[Optional[T]],
    uses: Sequence[ParameterUse],
    take: Callable[[ParameterUse, T], None],
    others: Sequence[T] = (),
    retain_graph: bool = False,
) -> List[Optional[T]]:
    """
    One backward pass of a group of samples that have run at once, without gradients of
    parameters.

    Args:
        outputs: of all samples, with their graph
        grads: of these
        uses: of parameters
        take: called with each use and the gradient that arrives there
        others: leaves whose gradients are wanted, too

    Returns:
        the gradients of the others
    """
    pairs = [
        (y, g) for y, g in zip(outputs, grads) if y.requires_grad and g is not None
    ]
    if not pairs:
        return [None] * len(others)
    ys, gs = zip(*pairs)
    handles = []
    for use in uses:
        handles.append(use.edge.node.register_prehook(_Arrival(use, take)))
    sources = [use.source for use in uses if use.source is not None]
    try:
        found = torch.autograd.grad(
            ys, [*sources, *others], gs, allow_unused=True, retain_graph=retain_graph
        )
    finally:
        for handle in handles:
            handle.remove()
    return list(found[len(sources) :])


class _Arrival:
    def __init__(self, use: ParameterUse, take: Callable[[ParameterUse, T], None]):
        self.use, self.take = use, take

    def __call__(self, grads: Tuple[Optional[T], ...]) -> None:
        if grads[0] is not None:
            self.take(self.use, grads[0])
