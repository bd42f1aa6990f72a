"""From a group of samples to the per-sample gradients of each parameter.

An op of a parameter and data is one *use* of the parameter. The gradient of the op's
output and the saved data give the factors of the per-sample gradients (factors/). The
op may use a parameter, a view of one, or a value computed from several. The factors of
a view are permuted and padded; other values are differentiated by autograd.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import (
    Any,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    NamedTuple,
    Protocol,
    Sequence,
    Union,
)

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from opacus_ext.grad_sample.core.values import Key, key_of
from opacus_ext.grad_sample.factors import Factor, GradSample, OneHot, full_precision
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.grad_sample.rules.mistakes import check_factors, of_rule
from opacus_ext.private_torch import gradients
from opacus_ext.refused import Refused

T = torch.Tensor
Root = Union[T, GradientEdge]  # where a backward pass begins
# By the key of a parameter (core/values.py); a gradient that is missing is zero.
GradSamples = dict[Key, GradSample]
FactorsFn = Callable[..., Sequence[tuple[Factor, ...]]]

# Gradients with at most this many entries are bundled, which saves kernel launches.
SMALL = 2**16
_LISTS = {list, tuple}
_version = attrgetter("_version")
UNSEEN = "a use of a parameter that is not seen (an autograd function)"
OF_SEGMENT = "a tensor that a function under activation checkpointing does not return"
Show = Callable[[Hashable, T], None]


class ParameterValue:
    """A parameter, a view of one, or what was computed from parameters without data."""

    def __init__(self, tensor: T, key: Key):
        self.tensor = tensor
        self.shape = tensor.shape
        self.key = key
        # The version tells whether the value is changed in place later.
        self.version = tensor._version
        # The edge of the graph that leads to the parameters; a leaf has none.
        self.edge: GradientEdge | None = None
        if not tensor.is_leaf:
            self.edge = get_gradient_edge(tensor)
        # The ops of the samples take this as their input.
        self.shared = tensor.detach()

    def leaves(self) -> list[T]:
        """Returns the leaves that it was computed from; itself if it is a leaf."""
        if self.edge is None:
            return [self.tensor]
        return graph_of([self.edge])[0]

    def pull(self, leaves: list[T], grads: T) -> Sequence[T | None]:
        """Backpropagates gradients ``[B, *shape]`` to the leaves."""
        edges: Any = [self.edge]
        return torch.autograd.grad(
            edges,
            leaves,
            [grads],
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )


class ParameterUse(NamedTuple):
    """
    One use of parameters by an op, with the data for its per-sample gradients.

    Attributes:
        values: the values that the op uses; None for one that is left out
        factors: maps ``(backprops, *data)``, all ``[B, T, *event]``, to the factors of
            each value
        rows: number of row dims in the output ``[B, *rows, *event]``
        data: what is saved for the factors, ``[B, *rows, *event]``
        data_rows: number of row dims in each of the data
        versions: versions of the data when they were saved
        edge: edge of the op's output
        source: edge behind it, if the graph of the samples ends at this use
        size: number of samples, if it is not the group's (parallel/)
        samples: indices of the samples among ``size``, if there are not rows for all
    """

    values: tuple[ParameterValue | None, ...]
    factors: FactorsFn
    rows: int
    data: Sequence[T]
    data_rows: tuple[int, ...]
    versions: tuple[int, ...] = ()
    edge: GradientEdge | None = None
    source: GradientEdge | None = None
    size: int | None = None
    samples: T | None = None

    def check(self) -> None:
        """Refuses data that were changed since they were saved, as autograd does."""
        for tensor, version in zip(self.data, self.versions):
            if tensor._version != version:
                raise Refused(
                    "The input of a layer was changed in place after the layer was "
                    "called, but the gradient needs the original values.",
                    remedy="Compute out of place: y = 2 * x instead of x.mul_(2), "
                    "inplace=False.",
                )

    def about(self) -> Hashable:
        """Returns what tells it from uses of other parameters or settings."""
        # Functions that have no key are other objects where a part runs again.
        settings = _kind(self, self.data[0])[0] if self.data else None
        about: list[Any] = [settings if isinstance(settings, tuple) else None]
        for value in self.values:
            if value is not None:
                start = value.tensor.storage_offset()
                about.append((start, *map(id, value.leaves())))
        return tuple(about)

    def of(self, backprops: T) -> list[tuple[ParameterValue, tuple[Factor, ...]]]:
        """Returns the factors of each value's per-sample gradients."""
        tensors = []
        row_dims = self.rows, *self.data_rows
        for tensor, dims in zip((backprops, *self.data), row_dims):
            if self.samples is not None:
                # The other samples have no rows, and so a gradient of zero.
                zeros = tensor.new_zeros(self.size, *tensor.shape[1:])
                tensor = zeros.index_copy(0, self.samples, tensor)
            if dims == 0:
                tensor = tensor.unsqueeze(1)
            elif dims > 1:
                tensor = tensor.flatten(1, dims)
            tensors.append(tensor)
        terms = self.factors(*tensors)
        is_list = type(terms) in _LISTS and len(terms) == len(self.values)
        if not is_list or not {*map(type, terms)} <= _LISTS:
            check_factors(self.factors, terms, self.values)
        pairs = zip(self.values, terms)
        return [(value, factors) for value, factors in pairs if value is not None]


def parameters_of(uses: Iterable[ParameterUse], keys: set[int]) -> dict[int, T]:
    """Returns those parameters, by their ids, whose gradients some uses give."""
    found = {}
    for use in uses:
        for value in use.values:
            if value is None:
                continue
            for leaf in value.leaves():
                if id(leaf) in keys:
                    found[id(leaf)] = leaf
    return found


def of_copies(backprops: T) -> list[tuple[T]]:
    """Returns the gradients of per-sample copies ``[B, 1, *shape]`` as factors."""
    return [(backprops.flatten(1).unsqueeze(1),)]


def no_factors(*rows: T) -> list[tuple[Factor, ...]]:
    """Returns the factors of a use of no parameter."""
    return []


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
        show: called with a key for each use, or bundle of uses, and its backprops
        touched: parameters whose gradients others deliver, by their keys: one mapping
            for each delivery
        tensor_key: gives the keys of parameters

    Attributes:
        samples: the gradients so far, by the keys of the parameters
    """

    def __init__(
        self,
        params: Iterable[T],
        size: int,
        uses: Sequence[ParameterUse],
        frees: bool = False,
        bundles: bool = True,
        mask: T | None = None,
        show: Show | None = None,
        touched: Iterable[Iterable[Key]] = (),
        tensor_key: Callable[..., Key] = id,
    ):
        params = tuple(params)
        self.tensor_key = tensor_key
        self.params = dict(zip(map(self.tensor_key, params), params))
        self.size = size
        self.frees = frees
        self.bundles = bundles
        self.mask = mask
        self.show = show
        self.samples: GradSamples = {}
        self._views: dict[ParameterValue, View | None] = {}
        self._computed: dict[ParameterValue, GradSample] = {}
        self._bundles: dict[tuple, list[tuple[ParameterUse, T]]] = {}
        # Uses and computed values that are left of each parameter; uses of each value.
        self._left: dict[Key, int] = defaultdict(int)
        self._of_value: dict[ParameterValue, int] = defaultdict(int)
        for use in uses:
            for value in use.values:
                if value is None:
                    continue
                if value.key in self.params:
                    self._left[value.key] += 1
                else:
                    self._expect(value)
        for keys in touched:
            for key in keys:
                self._left[key] += 1
        self._several = {key for key, count in self._left.items() if count > 1}

    def _expect(self, value: ParameterValue) -> None:
        """Counts a use of a value that is no parameter itself."""
        is_new = value not in self._of_value
        self._of_value[value] += 1
        if is_new:
            self._views[value] = view_of(value, self.params)
        view = self._views[value]
        # Uses of a view are uses of its parameter. Any other value is pulled once.
        if view is not None:
            self._left[self.tensor_key(view.parameter)] += 1
        elif is_new:
            for leaf in value.leaves():
                self._left[self.tensor_key(leaf)] += 1

    def add(self, use: ParameterUse, backprops: T) -> list[T]:
        """
        Adds the gradient of a use's output. Returns the parameters whose gradients are
        complete.
        """
        use.check()
        if self.bundles and backprops.numel() <= SMALL and self._can_bundle(use):
            bundle = self._bundles.setdefault(_kind(use, backprops), [])
            bundle.append((use, backprops))
            return []
        if self.show is not None:
            self.show(id(use), backprops)
        # Experts get samples of several processes, more than this group has.
        size = self.size if use.size is None else use.size
        complete: list[T] = []
        for value, factors in use.of(backprops):
            # The compiler fuses only sums that read a tensor in common. So rows that
            # are summed to gradients are masked before.
            if self.mask is not None and len(factors) == 1:
                rows = factors[0]
                if isinstance(rows, T):
                    factors = (rows * self.mask.to(rows.device)[:, None, None],)
            # A rule may give factors of other dims than a view has.
            view = self._views.get(value)
            try:
                if value.key in self.params:
                    complete += self._add(value.tensor, factors, size)
                elif view is not None and _are_of_axes(factors, value, view):
                    factors = _of_param(view, factors)
                    complete += self._add(view.parameter, factors, size)
                else:
                    complete += self._add_computed(value, factors, size)
            except Refused as error:
                raise of_rule(error, use.factors) from None
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

    def _add(self, parameter: T, factors: tuple[Factor, ...], size: int) -> list[T]:
        """Adds gradients of a parameter; returns it if these are complete."""
        key = self.tensor_key(parameter)
        sample = self.samples.get(key)
        if sample is None:
            sample = GradSample(parameter.shape, size)
            sample.mask = self.mask
            self.samples[key] = sample
        sample.add(*factors)
        self._left[key] -= 1
        if self._left[key]:
            return []
        return [parameter]

    def _add_computed(
        self, value: ParameterValue, factors: tuple[Factor, ...], size: int
    ) -> list[T]:
        """Adds gradients of a value that was computed from parameters."""
        view = self._views[value]
        if value not in self._computed:
            self._computed[value] = GradSample(value.shape, size)
            # The value itself is one more use of the parameter, until it is pulled.
            if view is not None:
                self._left[self.tensor_key(view.parameter)] += 1
        self._computed[value].add(*factors)
        self._of_value[value] -= 1
        if view is not None:
            self._left[self.tensor_key(view.parameter)] -= 1
        # At the end of the backward pass, the freed parameters would be gone.
        if self.frees and not self._of_value[value]:
            return self._pull(value, self._computed.pop(value))
        return []

    def add_samples(self, samples: GradSamples, keeps: bool = False) -> list[T]:
        """
        Adds gradients that others have collected. Returns the parameters whose
        gradients are complete. What is kept, as it waits for other uses or ``keeps``
        says so, takes as little memory as it can.
        """
        complete = []
        for key, sample in samples.items():
            known = self.samples.setdefault(key, sample)
            if known is not sample:
                known.join(sample)
            self._left[key] -= 1
            if self._left[key] or keeps:
                with full_precision(self.params[key].device):
                    known.compact()
            if not self._left[key]:
                complete.append(self.params[key])
        return complete

    def finish(self) -> list[T]:
        """
        Adds what has been left for the end of the backward pass. Returns the parameters
        whose gradients are complete now.
        """
        complete: list[T] = []
        for bundle in self._bundles.values():
            complete += self._add_together(bundle)
        for value, sample in self._computed.items():
            complete += self._pull(value, sample)
        return complete

    def _pull(self, value: ParameterValue, sample: GradSample) -> list[T]:
        """Backpropagates the gradients of a computed value to its parameters."""
        # TF32 would round the gradients, which all else keeps exact.
        with full_precision(value.shared.device):
            grads = sample.materialize().to(value.tensor.dtype)
        leaves = [
            leaf for leaf in value.leaves() if self.tensor_key(leaf) in self.params
        ]
        complete: list[T] = []
        if not leaves:
            return complete
        for leaf, gradient in zip(leaves, value.pull(leaves, grads)):
            if gradient is not None:
                rows = gradient.reshape(len(gradient), 1, -1)
                if self.show is not None:
                    self.show((id(value), id(leaf)), rows)
                complete += self._add(leaf, (rows,), len(gradient))
        return complete

    def _add_together(self, uses: list[tuple[ParameterUse, T]]) -> list[T]:
        """Handles n uses of one kind as one use with n times as many samples."""
        count = len(uses)
        first, backprops = uses[0]
        data = first.data
        if count > 1:
            columns = zip(*((grads, *use.data) for use, grads in uses))
            backprops, *data = map(torch.cat, columns)
        if self.show is not None:
            self.show(id(first), backprops)
        complete: list[T] = []
        used = [index for index, value in enumerate(first.values) if value is not None]
        pairs = first._replace(data=data).of(backprops)
        for position, (value, factors) in zip(used, pairs):
            sample = GradSample(value.shape, count * self.size)
            try:
                sample.add(*factors)
            except Refused as error:
                raise of_rule(error, first.factors) from None
            with full_precision(backprops.device):
                rows = sample.materialize().view(count, self.size, -1)
            for (use, _), rows_of_use in zip(uses, rows.unbind()):
                parameter = use.values[position].tensor
                sample = GradSample(parameter.shape, self.size, rows_of_use)
                self.samples[self.tensor_key(parameter)] = sample
                complete.append(parameter)
        return complete


def _kind(use: ParameterUse, backprops: T) -> tuple:
    """Returns a key that is equal for uses that can be handled together."""
    factors: Any = use.factors
    # Two objects of `partial` are not equal, even if their arguments are.
    if isinstance(factors, partial) and not factors.keywords:
        # Numbers are compared by type and bits, as 1 == True and 0.0 == -0.0.
        arguments = key_of(factors.args)
        if arguments is not None:
            factors = factors.func, arguments
    key = [factors, use.rows, use.data_rows]
    for tensor in (backprops, *use.data):
        key += tensor.shape, tensor.dtype, tensor.device
    for value in use.values:
        key.append(value and value.shape)
    return tuple(key)


# -- views -----------------------------------------------------------------------------


class View(NamedTuple):
    """
    A view of a parameter, in which no entry occurs twice.

    Attributes:
        parameter: the parameter
        axes: its axis for each axis of the view; empty for a cast
        starts: the offset of the view on each axis of the parameter
    """

    parameter: T
    axes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


def view_of(value: ParameterValue, params: dict[Key, T]) -> View | None:
    """Describes a value as a view of a parameter; None if it is no view."""
    if value.edge is None:
        return None
    leaves, has_functions = graph_of([value.edge])
    if len(leaves) != 1 or has_functions or id(leaves[0]) not in params:
        return None
    tensor, node, parameter = value.tensor, value.edge.node, leaves[0]
    is_cast = node.name() in ("ToCopyBackward0", "CloneBackward0")
    if is_cast and tensor.shape == parameter.shape:
        # Other ops stand between the parameter and a cast whose source is no leaf.
        if hasattr(node.next_functions[0][0], "variable"):
            return View(parameter)
        return None
    if tensor._base is parameter and tensor.dtype == parameter.dtype:
        return _strided_view(tensor, parameter)
    return None


def _strided_view(tensor: T, parameter: T) -> View | None:
    """Describes a tensor by its strides in the memory of a parameter."""
    is_plain = parameter.is_contiguous() and parameter.numel()
    if not is_plain or tensor.dim() != parameter.dim():
        return None
    offset = tensor.storage_offset() - parameter.storage_offset()
    strides, starts = [], []
    for stride, width in zip(parameter.stride(), parameter.shape):
        # The stride of an axis with one entry says nothing, and may be that of another.
        strides.append(stride if width > 1 else -1)
        starts.append(offset // stride % width)
    axes: list[int] = []
    for stride, width in zip(tensor.stride(), tensor.shape):
        if stride not in strides or width < 2:
            return None
        axis = strides.index(stride)
        if axis in axes or starts[axis] + width > parameter.shape[axis]:
            return None
        axes.append(axis)
    return View(parameter, tuple(axes), tuple(starts))


def _are_of_axes(
    factors: tuple[Factor, ...], value: ParameterValue, view: View
) -> bool:
    """Returns True if there is one factor for each axis, or if no axis is moved."""
    widths: list[int] = []
    for factor in factors:
        widths += [factor.size] if type(factor) is OneHot else factor.shape[2:]
    is_each = len(factors) == len(view.axes) and tuple(widths) == value.shape
    return is_each or not view.axes


def _of_param(view: View, factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Converts the factors of a view's gradients to those of the parameter's."""
    # Rules give a single tensor for the gradients of a cast to complex numbers.
    if not view.axes:
        return tuple(map(_real, factors))
    by_axis: dict[int, Factor] = {}
    for axis, factor in zip(view.axes, factors):
        start, width = view.starts[axis], view.parameter.shape[axis]
        if isinstance(factor, OneHot):
            factor = OneHot(factor.index + start, width)
        else:
            end = width - start - factor.shape[2]
            if start or end:
                factor = F.pad(factor, (start, end))
        by_axis[axis] = factor
    return tuple(by_axis[axis] for axis in sorted(by_axis))


def _real(factor: Factor) -> Factor:
    """Returns the real part of dense rows of complex numbers."""
    if not isinstance(factor, T) or not factor.is_complex():
        return factor
    return factor.real


# -- backward --------------------------------------------------------------------------


class Receiver(NamedTuple):
    """
    What takes the gradients of segments in a backward pass.

    Attributes:
        params: all parameters
        deliver: called with the gradients of a segment's group
        show: see :class:`Collector`
        key: tells a segment from others, in the same way in each backward pass
    """

    params: Sequence[T]
    deliver: Callable[[GradSamples], Any]
    show: Show | None = None
    key: tuple[int, ...] = ()


class Group(Protocol):
    """What a backward pass needs of a :class:`~group.SampleGroup`."""

    size: int
    uses: list[ParameterUse]
    segments: list[Any]  # of recompute.Segment
    frees_parameters: bool


def gradients_of_group(
    group: Group,
    outputs: Sequence[Root],
    grads: Sequence[T | None],
    params: Sequence[T],
    inputs: Sequence[T] = (),
    retain_graph: bool = False,
    receiver: Receiver | None = None,
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
        receiver: takes the gradients of segments; if it is None they are returned with
            the others
    """
    uses = group.uses
    touched = touched_in(group) if receiver is None else ()
    show = receiver and receiver.show
    collector = Collector(
        params, group.size, uses, group.frees_parameters, show=show, touched=touched
    )
    if receiver is None:
        receiver = Receiver(params, partial(collector.add_samples, keeps=True))
    # What is computed from parameters that are freed is differentiated before.
    receive = collector.add if group.frees_parameters else None
    backprops, of_inputs = run_backward(
        group, outputs, grads, receiver, inputs, receive, retain_graph
    )
    with torch.no_grad():
        for use, of_output in zip(uses, backprops):
            if of_output is not None:
                collector.add(use, of_output)
        collector.finish()
    return collector.samples, of_inputs


def touched_in(group: Group) -> list[dict[int, T]]:
    """Returns the parameters that the segments of a group deliver gradients of."""
    touched = []
    for segment in group.segments:
        touched += segment.touched
    return touched


def run_backward(
    group: Group,
    outputs: Sequence[Root],
    grads: Sequence[T | None],
    receiver: Receiver,
    inputs: Sequence[T] = (),
    receive: Callable[[ParameterUse, T], Any] | None = None,
    retain_graph: bool = False,
) -> tuple[Sequence[T | None], list[T | None]]:
    """
    Runs one backward pass. Returns the backprops of each use, and the gradients of the
    inputs. With ``receive`` no backprops are kept: it is called with each use and its
    backprops, as soon as these are there.
    """
    uses, segments, params = group.uses, group.segments, receiver.params
    roots, of_roots = [], []
    for output, gradient in zip(outputs, grads):
        if gradient is not None and has_graph(output):
            roots.append(output)
            of_roots.append(gradient)
    if not roots:
        return (), [None] * len(inputs)
    anchors = [segment.anchor for segment in segments]
    unseen = len(params) + len(anchors)
    leaves: list[Any] = [*params, *anchors, *inputs]
    count = len(leaves)
    handles = []
    if receive is None:
        leaves += [use.edge for use in uses]
    else:
        leaves += [use.source for use in uses if use.source is not None]
        for use in uses:
            hook = partial(_receive, receive, use)
            handles.append(use.edge.node.register_prehook(hook))
    for number, segment in enumerate(segments):
        segment.receiver = receiver._replace(key=(*receiver.key, number))
    try:
        of_leaves = gradients(roots, leaves, of_roots, retain_graph)
    except RuntimeError:
        # The check names the cause; torch's own error names no layer.
        for use in uses:
            use.check()
        raise
    finally:
        for handle in handles:
            handle.remove()
        for segment in segments:
            segment.receiver = None
    # Gradients of all seen uses end at these. What reaches a parameter was not seen.
    for gradient in of_leaves[: len(params)]:
        if gradient is not None:
            raise NotAtOnce(UNSEEN)
    for gradient in of_leaves[len(params) : unseen]:
        if gradient is not None:
            raise NotAtOnce(OF_SEGMENT)
    backprops = of_leaves[count:] if receive is None else ()
    return backprops, list(of_leaves[unseen:count])


def _receive(
    receive: Callable[[ParameterUse, T], Any],
    use: ParameterUse,
    grads: tuple[T | None, ...],
) -> None:
    if grads[0] is not None:
        receive(use, grads[0])


def refuse_hooks(params: Iterable[tuple[str, T]]) -> None:
    """Refuses parameters whose gradients are shown to others in the backward pass."""
    for name, parameter in params:
        if (
            parameter._backward_hooks
            or parameter._post_accumulate_grad_hooks
            # torch.distributed.optim sets this attribute.
            or "_in_backward_optimizers" in parameter.__dict__
        ):
            what = (
                f"Parameter {name}" if name else f"A parameter {tuple(parameter.shape)}"
            )
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
        return list(map(_version, params))
    except RuntimeError:
        # Tensors that were made in inference mode have no version.
        return [0 if tensor.is_inference() else tensor._version for tensor in params]


def gradients_alone(
    outputs: Sequence[Root],
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
    pairs = [pair for pair in zip(outputs, grads) if has_graph(pair[0])]
    if not pairs or not leaves:
        return {}
    # The code of a sample may have added hooks.
    refuse_hooks(zip(names or [""] * len(leaves), leaves))
    roots, of_roots = zip(*pairs)
    reached, has_functions = graph_of(roots)
    of_leaves: Sequence[T | None]
    if has_functions:
        backward = partial(torch.autograd.backward, roots, of_roots, retain_graph)
        of_leaves = _gradients_by_hooks(backward, leaves, reached)
    else:
        of_leaves = torch.autograd.grad(
            roots, leaves, of_roots, retain_graph, allow_unused=True
        )
    dense = {}
    for leaf, gradient in zip(leaves, of_leaves):
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        dense[id(leaf)] = gradient
    return dense


def _gradients_by_hooks(
    backward: Callable[[], None], leaves: Sequence[T], reached: Sequence[T]
) -> list[T | None]:
    """
    Returns the gradients of leaves as they arrive in a backward pass, which reaches
    other leaves as well. An autograd function may call ``backward()`` itself, as
    checkpoints do, which ``torch.autograd.grad`` misses.
    """
    # FSDP2 would sum what it finds in ``x.grad``, in each process other parameters
    # where samples branch. So nothing stays there.
    kept = {id(leaf): (leaf, leaf.grad) for leaf in (*leaves, *reached)}
    for leaf, _ in kept.values():
        # The backward pass would change a gradient that is there in place.
        leaf.grad = None
    arrived: dict[int, T] = {}

    def arrive(leaf: T, gradient: T) -> None:
        before = arrived.get(id(leaf))
        arrived[id(leaf)] = gradient if before is None else gradient + before

    def clear(leaf: T) -> None:
        leaf.grad = None

    handles = []
    for leaf in leaves:
        handles.append(leaf.register_hook(partial(arrive, leaf)))
        if leaf.is_leaf:
            handles.append(leaf.register_post_accumulate_grad_hook(clear))
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
        for leaf, gradient in kept.values():
            leaf.grad = gradient
    return [arrived.get(id(leaf)) for leaf in leaves]


def has_graph(root: Root) -> bool:
    """Returns False for a tensor without a gradient."""
    return not isinstance(root, T) or root.requires_grad


def graph_of(roots: Iterable[Root]) -> tuple[list[T], bool]:
    """
    Returns the leaves of the graph of some tensors, and True if the graph has autograd
    functions written in Python, other than those of FSDP2.
    """
    nodes: list[Any] = []
    for root in roots:
        if isinstance(root, T):
            root = get_gradient_edge(root)
        nodes.append(root.node)
    leaves: list[T] = []
    has_functions = False
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        if isinstance(node, BackwardCFunction):
            module = getattr(node, "_forward_cls").__module__
            has_functions |= not module.startswith("torch.distributed.fsdp")
    return leaves, has_functions


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disables autocast, so that gradients, norms and sums keep their dtypes."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
