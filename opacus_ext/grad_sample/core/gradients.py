"""From a group of samples to the per-sample gradients of each parameter.

An op of a parameter and data is one *use* of the parameter. The gradient of the op's
output and the saved data give the factors of the per-sample gradients (factors/). The
op may use a parameter, a view of one, or a value computed from several. The factors of
a view are permuted and padded; other values are differentiated by autograd.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import (
    Any,
    Callable,
    Collection,
    Iterable,
    Iterator,
    NamedTuple,
    Sequence,
)

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, GradSample, OneHot
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.refused import Refused

T = torch.Tensor
# By the id of a parameter; a gradient that is missing is zero.
GradSamples = dict[int, GradSample]
FactorsFn = Callable[..., Sequence[tuple[Factor, ...]]]

# Gradients with at most this many entries are bundled, which saves kernel launches.
SMALL = 2**16
UNSEEN = "a use of a parameter that is not seen (an autograd function)"


class ParameterValue:
    """A parameter, a view of one, or what was computed from parameters without data."""

    def __init__(self, tensor: T):
        self.tensor, self.shape, self.key = tensor, tensor.shape, id(tensor)
        self.version = tensor._version  # it may be changed in place later
        # The edge of the graph that leads to the parameters; None for a leaf.
        self.edge = None if tensor.is_leaf else get_gradient_edge(tensor)
        self.shared = tensor.detach()  # input of the samples' ops

    def leaves(self) -> list[T]:
        """Returns the leaves that it was computed from; itself if it is a leaf."""
        return [self.tensor] if self.edge is None else graph_of([self.edge])[0]

    def pull(self, leaves: list[T], grads: T) -> Sequence[T | None]:
        """Backpropagates gradients ``[B, *shape]`` to the leaves."""
        edges: Any = [self.edge]
        kw = dict(is_grads_batched=True, retain_graph=True, allow_unused=True)
        return torch.autograd.grad(edges, leaves, [grads], **kw)


class ParameterUse(NamedTuple):
    """One use of parameters by an op, with the data for its per-sample gradients."""

    values: tuple[ParameterValue | None, ...]  # the values used; None if left out
    # Maps (backprops, *data), all [B, T, *event], to the factors of each value.
    factors: FactorsFn
    rows: int  # number of row dims in the output [B, *rows, *event]
    data: Sequence[T]  # saved for the factors, [B, *rows, *event]
    data_rows: tuple[int, ...]  # number of row dims in each of the data
    versions: tuple[int, ...] = ()  # versions of the data when they were saved
    edge: GradientEdge | None = None  # edge of the op's output
    source: GradientEdge | None = None  # edge behind it, if the graph ends there
    size: int | None = None  # number of samples, if not the group's (parallel/)
    samples: T | None = None  # indices of the samples among these, if not all

    def of(self, backprops: T) -> list[tuple[ParameterValue, tuple[Factor, ...]]]:
        """Returns the factors of each value's per-sample gradients."""
        given = []
        for x, rows in zip((backprops, *self.data), (self.rows, *self.data_rows)):
            if self.samples is not None:  # the others are zero
                zeros = x.new_zeros(self.size, *x.shape[1:])
                x = zeros.index_copy(0, self.samples, x)
            given.append(x.flatten(1, rows) if rows else x.unsqueeze(1))
        found = self.factors(*given)
        return [(v, f) for v, f in zip(self.values, found) if v is not None]


def of_copies(backprops: T) -> list[tuple[T]]:
    """Returns the gradients of per-sample copies ``[B, 1, *shape]`` as factors."""
    return [(backprops.flatten(1).unsqueeze(1),)]


class Collector:
    """
    Collects the per-sample gradients of a group from the backprops of its uses. Calls
    ``done`` with a parameter and its gradients when these are complete.
    """

    def __init__(
        self,
        params: Iterable[T],
        size: int,
        uses: Sequence[ParameterUse],
        done: Callable[[T, GradSample], None] | None = None,
        frees: bool = False,
        bundles: bool = True,
        mask: T | None = None,
    ):
        self.frees = frees  # True if parameters are freed in the backward pass
        self.params, self.size, self.done = {id(p): p for p in params}, size, done
        self.mask = mask  # samples that count ``[B]``, in compiled code; None for all
        self.found: GradSamples = {}
        self._views: dict[int, View | None] = {}  # by the id of the value
        self._computed: dict[int, tuple[ParameterValue, GradSample]] = {}
        self._alike: dict[tuple, list[tuple[ParameterUse, T]]] = {}
        # Pending uses of each parameter, and of each other value.
        self._left: dict[int, float] = defaultdict(int)
        self._of_value: dict[int, int] = defaultdict(int)
        for value in [v for use in uses for v in use.values if v is not None]:
            if value.key in self.params:
                self._left[value.key] += 1
                continue
            self._of_value[id(value)] += 1
            view = self._views[id(value)] = view_of(value, self.params)
            for p in [view[0]] if view else value.leaves():
                self._left[id(p)] += 1 if view else math.inf
        # Small parameters with a single use.
        self._single = {
            i
            for i, count in self._left.items()
            if bundles and count == 1 and size * self.params[i].numel() <= SMALL
        }

    def add(self, use: ParameterUse, backprops: T) -> None:
        """Adds the gradient of a use's output."""
        for x, version in zip(use.data, use.versions):
            if x._version != version:
                raise Refused(  # as autograd does
                    "The input of a layer was changed in place after the layer was "
                    "called, but the gradient needs the original values.",
                    remedy="Compute out of place: y = 2 * x instead of x.mul_(2), "
                    "inplace=False.",
                )
        if (
            backprops.numel() <= SMALL
            and use.size is None
            and self._single.issuperset([v.key for v in use.values if v is not None])
        ):
            self._alike.setdefault(_kind(use, backprops), []).append((use, backprops))
            return
        size = self.size if use.size is None else use.size
        for value, factors in use.of(backprops):
            if self.mask is not None:
                factors = self._masked(self.mask, factors)
            p: T | None = value.tensor
            if value.key not in self.params:
                view = self._views[id(value)]
                p = None
                if view is not None and len(view[1]) in (0, len(factors)):
                    p, factors = view[0], _of_param(view, factors)
            if p is None:  # backpropagated in finish()
                sample = GradSample(value.shape, size)
                self._computed.setdefault(id(value), (value, sample))[1].add(*factors)
                self._of_value[id(value)] -= 1
                if self.frees and not self._of_value[id(value)]:
                    self._pull(*self._computed.pop(id(value)))
                continue
            sample, key = self._sample(p, size), id(p)
            sample.add(*factors)
            self._left[key] -= 1
            if self.done is not None and not self._left[key]:
                self.done(p, sample)

    def _masked(self, mask: T, factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
        """
        Masks the rows that are summed to gradients: the compiler fuses only sums that
        read a tensor in common.
        """
        first = factors[0]
        if len(factors) > 1 or not isinstance(first, T):
            return factors
        return (first * mask.to(first.device)[:, None, None],)

    def _sample(self, p: T, size: int) -> GradSample:
        key = id(p)
        if key not in self.found:
            self.found[key] = GradSample(p.shape, size)
            self.found[key].mask = self.mask
        return self.found[key]

    def finish(self) -> GradSamples:
        """Returns the gradients of all parameters that were used."""
        for uses in self._alike.values():
            self._add_together(uses)
        for value, sample in self._computed.values():
            self._pull(value, sample)
        return self.found

    def _pull(self, value: ParameterValue, sample: GradSample) -> None:
        """Backpropagates the gradients of a computed value to its parameters."""
        grads = sample.materialize().to(value.tensor.dtype)
        leaves = [x for x in value.leaves() if id(x) in self.params]
        for p, g in zip(leaves, value.pull(leaves, grads) if leaves else ()):
            if g is not None:
                self._sample(p, len(g)).add(g.reshape(len(g), 1, -1))

    def _add_together(self, uses: list[tuple[ParameterUse, T]]) -> None:
        """Handles n uses of one kind as one use with n times as many samples."""
        n, first = len(uses), uses[0][0]
        columns = zip(*((g, *use.data) for use, g in uses))
        backprops, *data = (c[0] if n == 1 else torch.cat(c) for c in columns)
        places = [i for i, v in enumerate(first.values) if v is not None]
        found = first._replace(data=data).of(backprops)
        for i, (value, factors) in zip(places, found):
            sample = GradSample(value.shape, n * self.size)
            sample.add(*factors)
            rows = sample.materialize().view(n, self.size, -1)
            for (use, _), each in zip(uses, rows.unbind()):
                p = use.values[i].tensor
                self.found[id(p)] = GradSample(p.shape, self.size, each)


def _kind(use: ParameterUse, backprops: T) -> tuple:
    """Returns a key that is equal for uses that can be handled together."""
    given = [(x.shape, x.dtype, x.device) for x in (backprops, *use.data)]
    shapes = [None if v is None else v.shape for v in use.values]
    return (use.factors, use.rows, use.data_rows, *shapes, *given)


# -- views -----------------------------------------------------------------------------


# A parameter, its axis for each axis of the view (empty for a cast), and the offset of
# the view on each axis of the parameter. No entry occurs twice in the view.
View = tuple[T, tuple[int, ...], tuple[int, ...]]


def view_of(value: ParameterValue, params: dict[int, T]) -> View | None:
    """Describes a value as a view of a parameter; None if it is no view."""
    if value.edge is None:
        return None
    leaves, own_functions = graph_of([value.edge])
    if len(leaves) != 1 or own_functions or id(leaves[0]) not in params:
        return None
    x, node, p = value.tensor, value.edge.node, leaves[0]
    if node.name() in ("ToCopyBackward0", "CloneBackward0") and x.shape == p.shape:
        direct = hasattr(node.next_functions[0][0], "variable")
        return (p, (), ()) if direct else None
    plain = x._base is p and x.dtype == p.dtype and p.is_contiguous() and p.numel()
    strides = [s if n > 1 else -1 for s, n in zip(p.stride(), p.shape)]
    if not plain or x.dim() != p.dim() or not {*x.stride()} <= {*strides}:
        return None
    offset = x.storage_offset() - p.storage_offset()
    starts = tuple(offset // s % n for s, n in zip(p.stride(), p.shape))
    axes = tuple(strides.index(s) for s in x.stride())
    inside = all(n > 1 and starts[a] + n <= p.shape[a] for a, n in zip(axes, x.shape))
    return (p, axes, starts) if inside and len({*axes}) == len(axes) else None


def _of_param(view: View, factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Converts the factors of a view's gradients to those of the parameter's."""
    p, axes, starts = view
    if not axes:  # those of a cast to complex are one tensor: rules give no others
        cast = [f.real if isinstance(f, T) and f.is_complex() else f for f in factors]
        return tuple(cast)
    found: dict[int, Factor] = {}
    for axis, f in zip(axes, factors):
        start, width = starts[axis], p.shape[axis]
        if isinstance(f, OneHot):
            found[axis] = OneHot(f.index + start if start else f.index, width)
        else:
            rest = width - start - f.shape[2]
            found[axis] = F.pad(f, (start, rest)) if start or rest else f
    return tuple(found[axis] for axis in sorted(found))


# -- backward --------------------------------------------------------------------------


def gradients_of_group(
    group: Any,
    outputs: Sequence[T],
    grads: Sequence[T | None],
    params: Sequence[T],
    inputs: Sequence[T] = (),
    done: Callable[[T, GradSample], None] | None = None,
    seen: Callable[[ParameterUse, T], None] | None = None,
    retain_graph: bool = False,
) -> tuple[GradSamples, list[T | None]]:
    """
    Returns the per-sample gradients of a group, and the gradients of the inputs.

    Args:
        group: the group that has run
        outputs: outputs of all samples, with their graph
        grads: the gradients of the outputs
        params: parameters
        inputs: leaves
        done: called with a parameter and its gradients when these are complete
        seen: called with each use and its backprops; the graph is retained then
        retain_graph: True if the graph is retained
    """
    given = params, group.size, group.uses, done, group.frees_parameters
    collector = Collector(*given)

    def add(use: ParameterUse, backprops: T) -> None:
        if seen is not None:
            seen(use, backprops)
        collector.add(use, backprops)

    others, keep = [*params, *inputs], retain_graph or seen is not None
    found = _backward(outputs, grads, group.uses, add, others, retain_graph=keep)
    for grad in found[: len(params)]:
        if grad is not None:
            raise NotAtOnce(UNSEEN)
    with torch.no_grad():
        return collector.finish(), found[len(params) :]


def _backward(
    outputs: Sequence[T],
    grads: Sequence[T | None],
    uses: Sequence[ParameterUse],
    add: Callable[[ParameterUse, T], None],
    others: Sequence[T],
    retain_graph: bool = False,
) -> list[T | None]:
    """
    Runs one backward pass: calls ``add`` with each use and its backprops, and returns
    the gradients of ``others``.
    """
    pairs = [
        (y, g) for y, g in zip(outputs, grads) if g is not None and y.requires_grad
    ]
    if not pairs:
        return [None] * len(others)

    def arrive(use: ParameterUse, grads: tuple[T | None, ...]) -> None:
        if grads[0] is not None:
            add(use, grads[0])

    handles = [u.edge.node.register_prehook(partial(arrive, u)) for u in uses]
    sources = [use.source for use in uses if use.source is not None]
    leaves: list[Any] = [*others, *sources]
    ys, gs = zip(*pairs)
    try:
        found = torch.autograd.grad(
            ys, leaves, gs, allow_unused=True, retain_graph=retain_graph
        )
    finally:
        for handle in handles:
            handle.remove()
    return list(found[: len(others)])


def refuse_hooks(params: Iterable[tuple[str, T]]) -> None:
    """Refuses parameters whose gradients are shown to others in the backward pass."""
    for name, p in params:
        if (
            p._backward_hooks
            or p._post_accumulate_grad_hooks
            or "_in_backward_optimizers" in p.__dict__  # of torch.distributed.optim
        ):
            what = f"Parameter {name}" if name else f"A parameter {tuple(p.shape)}"
            raise Refused(
                f"{what} has a hook (register_hook, register_multi_grad_hook, "
                "register_post_accumulate_grad_hook, or an optimizer in the backward "
                "pass), which would change or use its gradient before it is private.",
                parameter=name or None,
                remedy="Remove the hook, or freeze the parameter.",
            )


@contextmanager
def unchanged(params: Collection[T]) -> Iterator[None]:
    """Refuses code in the block that writes to parameters, in which data could stay."""
    before = _versions(params)
    yield
    if before != _versions(params):
        raise Refused(
            "Parameters were changed in the forward or backward pass of samples, "
            "without noise: by a hook with an optimizer, or by the loss. The model has "
            "seen data now.",
            remedy="Remove what changes them, and go on from weights of before.",
        )


def _versions(params: Collection[T]) -> list[int]:
    if torch.compiler.is_compiling():
        return []
    return [0 if p.is_inference() else p._version for p in params]


def gradients_alone(
    outputs: Sequence[T],
    grads: Sequence[T | None],
    leaves: Sequence[T],
    names: Sequence[str] = (),
    retain_graph: bool = False,
) -> dict[int, T]:
    """
    Returns the gradients of one sample by plain autograd: dense, by the ids of the
    leaves that were used. ``names`` are those of the leaves, or of the first of them.
    The graph is kept if ``retain_graph``.
    """
    pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad]
    if not pairs or not leaves:
        return {}
    # The code of a sample may add some.
    refuse_hooks(zip(names or [""] * len(leaves), leaves))
    found: Sequence[T | None]
    ys, gs = zip(*pairs)
    reached, own_functions = graph_of(ys)
    if not own_functions:
        kw = dict(allow_unused=True, retain_graph=retain_graph)
        found = torch.autograd.grad(ys, leaves, gs, **kw)
    else:
        # An autograd function may call backward() itself, as checkpoints do, which
        # autograd.grad misses. FSDP2 would sum what it finds in ``x.grad``, in each
        # process other parameters where samples branch: so nothing stays there.
        everywhere = list({id(x): x for x in (*leaves, *reached)}.values())
        before = [x.grad for x in everywhere]
        for x in everywhere:
            x.grad = None  # or the backward pass would change it in place
        arrived: dict[int, T] = {}

        def arrive(x: T, grad: T) -> None:
            arrived[id(x)] = grad + arrived[id(x)] if id(x) in arrived else grad

        def clear(x: T) -> None:
            x.grad = None

        handles = [x.register_hook(partial(arrive, x)) for x in leaves]
        handles += [
            x.register_post_accumulate_grad_hook(clear) for x in leaves if x.is_leaf
        ]
        try:
            torch.autograd.backward(ys, gs, retain_graph=retain_graph)
        finally:
            for handle in handles:
                handle.remove()
            for x, grad in zip(everywhere, before):
                x.grad = grad
        found = [arrived.get(id(x)) for x in leaves]
    return {
        id(x): g.to_dense() if g.is_sparse else g
        for x, g in zip(leaves, found)
        if g is not None
    }


def nodes_of(
    roots: Iterable[T | GradientEdge], ends: Iterable[Any] = ()
) -> Iterator[Any]:
    """Yields the nodes of the graph of some tensors, up to the nodes ``ends``."""
    edges = (get_gradient_edge(x) if isinstance(x, T) else x for x in roots)
    todo: list[Any] = [edge.node for edge in edges]
    seen = set(ends)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
            yield node


def graph_of(roots: Iterable[T | GradientEdge]) -> tuple[list[T], bool]:
    """
    Returns the leaves of the graph of some tensors, and True if the graph has autograd
    functions written in Python, other than those of FSDP2.
    """
    nodes = list(nodes_of(roots))
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    own = (node for node in nodes if isinstance(node, BackwardCFunction))
    names = (getattr(node, "_forward_cls").__module__ for node in own)
    return leaves, not all(x.startswith("torch.distributed.fsdp") for x in names)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disables autocast, so that gradients, norms and sums keep their dtypes."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
