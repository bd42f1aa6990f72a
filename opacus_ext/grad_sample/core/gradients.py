"""From a group of samples to the per-sample gradients of each parameter.

An op of a parameter and data is one *use* of the parameter. The gradient of the op's
output and the saved data give the factors of the per-sample gradients (factors/). The
op may use a parameter, a view of one, or a value computed from several. The factors of
a view are permuted and padded; other values are differentiated by autograd.
"""

from __future__ import annotations

import functools
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

from opacus_ext.grad_sample.factors import (
    Factor,
    GradSample,
    OneHot,
    full_precision,
    upcast,
)
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.private_torch import gradients
from opacus_ext.refused import Refused

T = torch.Tensor
# By the id of a parameter; a gradient that is missing is zero.
GradSamples = dict[int, GradSample]
FactorsFn = Callable[..., Sequence[tuple[Factor, ...]]]

# Gradients with at most this many entries are bundled, which saves kernel launches.
SMALL = 2**16
# Numbers in a print, which are hardly ever all small by chance, and the longest rows
# that have signs of their own.
_SIGNS, _WIDE = 8, 2**14
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

    def check(self) -> None:
        """Refuses data that were changed since they were saved."""
        for x, version in zip(self.data, self.versions):
            if x._version != version:
                raise Refused(  # as autograd does
                    "The input of a layer was changed in place after the layer was "
                    "called, but the gradient needs the original values.",
                    remedy="Compute out of place: y = 2 * x instead of x.mul_(2), "
                    "inplace=False.",
                )

    def of(self, backprops: T) -> list[tuple[ParameterValue, tuple[Factor, ...]]]:
        """Returns the factors of each value's per-sample gradients."""
        tensors = []
        for x, rows in zip((backprops, *self.data), (self.rows, *self.data_rows)):
            if self.samples is not None:
                x = self._of_all(x)
            if rows == 0:
                x = x.unsqueeze(1)
            elif rows > 1:
                x = x.flatten(1, rows)
            tensors.append(x)
        pairs = zip(self.values, self.factors(*tensors))
        return [(value, factors) for value, factors in pairs if value is not None]

    def _of_all(self, x: T) -> T:
        """Adds zeros for the samples of which there are no rows."""
        return x.new_zeros(self.size, *x.shape[1:]).index_copy(0, self.samples, x)


def of_copies(backprops: T) -> list[tuple[T]]:
    """Returns the gradients of per-sample copies ``[B, 1, *shape]`` as factors."""
    return [(backprops.flatten(1).unsqueeze(1),)]


class Collector:
    """
    Collects the per-sample gradients of a group from the backprops of its uses.

    Args:
        params: parameters
        size: number of samples
        uses: all uses of the group
        frees: True if parameters are freed in the backward pass
        bundles: False to handle each use by itself
        mask: samples that count ``[B]``, in compiled code; None for all
        prints: is given the backprops

    Attributes:
        samples: the gradients so far, by the ids of the parameters
    """

    def __init__(
        self,
        params: Iterable[T],
        size: int,
        uses: Sequence[ParameterUse],
        frees: bool = False,
        bundles: bool = True,
        mask: T | None = None,
        prints: Prints | None = None,
    ):
        params, self.prints = tuple(params), prints
        self.params = dict(zip(map(id, params), params))
        self.size, self.frees, self.bundles, self.mask = size, frees, bundles, mask
        self.samples: GradSamples = {}
        self._views: dict[int, View | None] = {}  # by the id of the value
        self._computed: dict[int, tuple[ParameterValue, GradSample]] = {}
        self._alike: dict[tuple, list[tuple[ParameterUse, T]]] = {}
        # Uses and computed values that are left of each parameter; uses of each value.
        self._left: dict[int, int] = defaultdict(int)
        self._of_value: dict[int, int] = defaultdict(int)
        for use in uses:
            for value in use.values:
                if value is None:
                    continue
                if value.key in self.params:
                    self._left[value.key] += 1
                else:
                    self._expect(value)
        self._several = {key for key, count in self._left.items() if count > 1}

    def _expect(self, value: ParameterValue) -> None:
        """Counts a use of a value that is no parameter itself."""
        is_new = id(value) not in self._of_value
        self._of_value[id(value)] += 1
        if is_new:
            self._views[id(value)] = view_of(value, self.params)
        view = self._views[id(value)]
        if view is not None:
            self._left[id(view[0])] += 1
        elif is_new:
            for p in value.leaves():
                self._left[id(p)] += 1

    def add(self, use: ParameterUse, backprops: T) -> list[T]:
        """
        Adds the gradient of a use's output. Returns the parameters whose gradients are
        complete.
        """
        use.check()
        if self.bundles and backprops.numel() <= SMALL and self._can_bundle(use):
            self._alike.setdefault(_kind(use, backprops), []).append((use, backprops))
            return []
        if self.prints is not None:
            self.prints.add(id(use), backprops)
        complete: list[T] = []
        for value, factors in use.of(backprops):
            if self.mask is not None:
                factors = self._masked(self.mask, factors)
            if value.key in self.params:
                complete += self._add(value.tensor, factors, use.size)
                continue
            view = self._views[id(value)]
            if view is not None and len(view[1]) in (0, len(factors)):
                complete += self._add(view[0], _of_param(view, factors), use.size)
            else:
                complete += self._add_computed(value, factors, use.size)
        return complete

    def _can_bundle(self, use: ParameterUse) -> bool:
        """Returns True for small parameters that have no other use."""
        if use.size is not None:
            return False
        for value in use.values:
            if value is None:
                continue
            key = value.key
            if key not in self.params or key in self._several:
                return False
            if self.size * value.shape.numel() > SMALL:
                return False
        return True

    def _masked(self, mask: T, factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
        """
        Masks the rows that are summed to gradients: the compiler fuses only sums that
        read a tensor in common.
        """
        first = factors[0]
        if len(factors) > 1 or not isinstance(first, T):
            return factors
        return (first * mask.to(first.device)[:, None, None],)

    def _add(self, p: T, factors: tuple[Factor, ...], size: int | None) -> list[T]:
        """Adds gradients of a parameter; returns it if these are complete."""
        key = id(p)
        sample = self.samples.get(key)
        if sample is None:
            sample = GradSample(p.shape, self.size if size is None else size)
            sample.mask, self.samples[key] = self.mask, sample
        sample.add(*factors)
        self._left[key] -= 1
        return [] if self._left[key] else [p]

    def _add_computed(
        self, value: ParameterValue, factors: tuple[Factor, ...], size: int | None
    ) -> list[T]:
        """Adds gradients of a value that was computed from parameters."""
        key = id(value)
        view = self._views[key]
        if key not in self._computed:
            sample = GradSample(value.shape, self.size if size is None else size)
            self._computed[key] = value, sample
            if view is not None:
                self._left[id(view[0])] += 1
        self._computed[key][1].add(*factors)
        self._of_value[key] -= 1
        if view is not None:
            self._left[id(view[0])] -= 1
        if self.frees and not self._of_value[key]:
            return self._pull(*self._computed.pop(key))
        return []

    def finish(self) -> list[T]:
        """
        Adds what has been left for the end of the backward pass. Returns the parameters
        whose gradients are complete now.
        """
        complete: list[T] = []
        for uses in self._alike.values():
            complete += self._add_together(uses)
        for value, sample in self._computed.values():
            complete += self._pull(value, sample)
        return complete

    def _pull(self, value: ParameterValue, sample: GradSample) -> list[T]:
        """Backpropagates the gradients of a computed value to its parameters."""
        complete: list[T] = []
        with full_precision(value.shared.device):
            grads = sample.materialize().to(value.tensor.dtype)
        leaves = [x for x in value.leaves() if id(x) in self.params]
        for p, g in zip(leaves, value.pull(leaves, grads) if leaves else ()):
            if g is not None:
                complete += self._add(p, (g.reshape(len(g), 1, -1),), len(g))
        return complete

    def _add_together(self, uses: list[tuple[ParameterUse, T]]) -> list[T]:
        """Handles n uses of one kind as one use with n times as many samples."""
        n, first, complete = len(uses), uses[0][0], list[T]()
        columns = zip(*((g, *use.data) for use, g in uses))
        backprops, *data = (c[0] if n == 1 else torch.cat(c) for c in columns)
        if self.prints is not None:
            self.prints.add(id(first), backprops)
        places = [i for i, v in enumerate(first.values) if v is not None]
        found = first._replace(data=data).of(backprops)
        for i, (value, factors) in zip(places, found):
            sample = GradSample(value.shape, n * self.size)
            sample.add(*factors)
            with full_precision(backprops.device):
                rows = sample.materialize().view(n, self.size, -1)
            for (use, _), some in zip(uses, rows.unbind()):
                p = use.values[i].tensor
                self.samples[id(p)] = GradSample(p.shape, self.size, some)
                complete.append(p)
        return complete


def _kind(use: ParameterUse, backprops: T) -> tuple:
    """Returns a key that is equal for uses that can be handled together."""
    factors: Any = use.factors
    if isinstance(factors, partial):  # which are not equal, even of equal arguments
        factors = factors.func, factors.args, *factors.keywords.items()
    key = [factors, use.rows, use.data_rows]
    for x in (backprops, *use.data):
        key += x.shape, x.dtype, x.device
    for value in use.values:
        key.append(value if value is None else value.shape)
    return tuple(key)


@functools.lru_cache(maxsize=64)
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> T:
    """Returns random signs ``[width, _SIGNS]``, the same each time."""
    generator = torch.Generator().manual_seed(width)
    signs = torch.randint(2, (width, _SIGNS), generator=generator) * 2 - 1
    return signs.to(device, dtype)


class Prints:
    """
    Prints of backprops, of which two passes have the same if their backprops are:
    products of each sample's entries with random signs.
    """

    def __init__(self) -> None:
        self._prints: dict[int, T] = {}  # [B, _SIGNS]
        self._tolerances: list[float] = []

    def add(self, key: int, backprops: T) -> None:
        """Adds the print of some backprops ``[B, ...]``, under a key."""
        self._tolerances.append(1e-3 if backprops.dtype.itemsize >= 4 else 0.03)
        if backprops.is_complex():
            backprops = torch.view_as_real(backprops.resolve_conj())
        flat = upcast(backprops).reshape(len(backprops), -1)
        while flat.shape[1] > _WIDE:  # products of parts, for few signs in memory
            end = flat.shape[1] // _WIDE * _WIDE
            parts = flat[:, :end].unflatten(1, (-1, _WIDE))
            parts = parts @ _signs(_WIDE, flat.dtype, flat.device)
            flat = torch.cat([parts.flatten(1), flat[:, end:]], dim=1)
        self._prints[key] = flat @ _signs(flat.shape[1], flat.dtype, flat.device)

    def differ_from(self, other: Prints) -> bool:
        """Returns True if some print differs by more than rounding."""
        if self._prints.keys() != other._prints.keys():
            return True
        if not self._prints:
            return False
        first = next(iter(self._prints.values()))
        old = [x.to(first) for x in self._prints.values()]
        new = [other._prints[key].to(first) for key in self._prints]
        sizes = torch.tensor([len(x) for x in old], device=first.device)
        before = torch.cat(old).nan_to_num_(0, 0)
        gaps = (torch.cat(new).nan_to_num_(0, 0) - before).norm(dim=1)
        sums = before.norm(dim=1)
        largest = torch.stack([x.max() for x in sums.split(sizes.tolist())])
        bounds = sums * first.new_tensor(self._tolerances).repeat_interleave(sizes)
        return bool((gaps > bounds + 1e-6 * largest.repeat_interleave(sizes)).any())


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
        retain_graph: True if the graph is retained
    """
    collector = Collector(params, group.size, group.uses, group.frees_parameters)
    # What is computed from parameters that are freed is differentiated before.
    receive = collector.add if group.frees_parameters else None
    given = group.uses, outputs, grads, params, inputs
    backprops, of_inputs = run_backward(*given, receive, retain_graph)
    with torch.no_grad():
        for use, g in zip(group.uses, backprops):
            if g is not None:
                collector.add(use, g)
        collector.finish()
    return collector.samples, of_inputs


def run_backward(
    uses: Sequence[ParameterUse],
    outputs: Sequence[T],
    grads: Sequence[T | None],
    params: Sequence[T],
    inputs: Sequence[T] = (),
    receive: Callable[[ParameterUse, T], Any] | None = None,
    retain_graph: bool = False,
) -> tuple[Sequence[T | None], list[T | None]]:
    """
    Runs one backward pass. Returns the backprops of each use, and the gradients of the
    inputs. With ``receive`` no backprops are kept: it is called with each use and its
    backprops, as soon as these are there.
    """
    pairs = [
        (y, g) for y, g in zip(outputs, grads) if g is not None and y.requires_grad
    ]
    if not pairs:
        return (), [None] * len(inputs)
    leaves: list[Any] = [*params, *inputs]
    count, handles = len(leaves), []
    if receive is None:
        leaves += [use.edge for use in uses]
    else:
        leaves += [use.source for use in uses if use.source is not None]
        for use in uses:
            hook = partial(_receive, receive, use)
            handles.append(use.edge.node.register_prehook(hook))
    ys, gs = zip(*pairs)
    try:
        found = gradients(ys, leaves, gs, retain_graph)
    except RuntimeError:
        for use in uses:  # torch's own error names no layer
            use.check()
        raise
    finally:
        for handle in handles:
            handle.remove()
    for grad in found[: len(params)]:
        if grad is not None:
            raise NotAtOnce(UNSEEN)
    backprops = found[count:] if receive is None else ()
    return backprops, list(found[len(params) : count])


def _receive(
    receive: Callable[[ParameterUse, T], Any],
    use: ParameterUse,
    grads: tuple[T | None, ...],
) -> None:
    if grads[0] is not None:
        receive(use, grads[0])


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
    try:
        return [p._version for p in params]
    except RuntimeError:  # tensors made in inference mode have none
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
