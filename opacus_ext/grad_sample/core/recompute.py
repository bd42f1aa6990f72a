"""Activation checkpointing: parts of a forward that run again in the backward pass.

While samples run together, a call of ``torch.utils.checkpoint.checkpoint`` is a
:class:`Segment`. Of its forward only the inputs are kept. In the backward pass it runs
again, under the same vmap, in a group of its own. The per-sample gradients of that
group are delivered at once, to be added to norms or sums, so that no more than the
factors of one segment are in memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, ContextManager, Hashable, Iterator, Protocol, Sequence

import torch

from opacus_ext.grad_sample.core.generators import set_to, states
from opacus_ext.grad_sample.core.gradients import (
    OF_SEGMENT,
    ParameterUse,
    Receiver,
    gradients_of_group,
    graph_of,
    parameters_of,
)
from opacus_ext.grad_sample.core.vmap import BranchesDiffer, Level, whole
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.private_torch import (
    DisableTorchFunction,
    is_batched,
    renewed,
    tree_flatten,
    tree_unflatten,
)
from opacus_ext.refused import Refused

T = torch.Tensor

#: What vmap can't run in some cases; see :class:`~rules.NotAtOnce`.
NAME = "activation checkpointing"
# What holds no tensors that are not seen.
_LEAVES = T, int, float, complex, str, bytes, type(None), torch.dtype, torch.device


class SamplesTogether(Protocol):
    """What a segment needs of the samples that run together, a SampleGroup."""

    size: int
    level: Level
    params: set[int]
    uses: list[ParameterUse]
    segments: list[Any]  # of Segment
    anchor: T | None
    frees_parameters: bool

    def another(self, size: int) -> SamplesTogether:
        """Makes a group of this kind."""

    def outside(self) -> ContextManager:
        """Leaves the vmap level for a block."""

    def apart(self, anchor: T) -> ContextManager:
        """Keeps what a block uses apart."""

    def watch(self, code: Callable[[], Any]) -> Any:
        """Runs the code of a sample."""

    def running(self) -> ContextManager:
        """Prepares the model to run in the backward pass."""

    def free_copies(self) -> None:
        """Drops the per-sample copies."""


class Segment:
    """
    A call of torch's checkpoint by samples that run together.

    Args:
        group: the samples
        modes: function modes without state that the function runs in
        function: called with ``args`` and ``kwargs``

    Attributes:
        anchor: a leaf from which all is computed that needs a gradient: a path to it
            past the segment shows that a tensor has left it unseen
        touched: by their ids, the parameters that get a gradient, here and in each
            segment within this one
        saved: number of entries of its inputs, which are kept
        factors: number of entries of its factors, which are not
        receiver: takes gradients in a backward pass
    """

    receiver: Receiver | None = None

    def __init__(
        self,
        group: SamplesTogether,
        modes: Sequence[ContextManager],
        function: Callable,
        args: tuple,
        kwargs: dict,
    ):
        # Arguments of a partial function may need gradients, too.
        while isinstance(function, partial):
            args = (*function.args, *args)
            kwargs = {**function.keywords, **kwargs}
            function = function.func
        self._modes, self._function = modes, function
        self._leaves, self._structure = tree_flatten((args, kwargs))
        self._places = with_graph(self._leaves)
        # A group without uses, as one with them would keep this segment alive.
        self._group = group.another(group.size)
        self._level = group.level.number
        self._states = states()
        self._surroundings = _Surroundings()
        if group.anchor is not None:
            self.anchor = group.anchor
        else:
            with DisableTorchFunction():
                self.anchor = torch.zeros((), requires_grad=True)
        self.touched: list[dict[int, T]] = []
        self.saved = self.factors = 0

    # -- forward -----------------------------------------------------------------------

    def run(self, group: SamplesTogether) -> Any:
        """Runs it for the first time; returns its output."""
        # Only autograd is to hold the inputs, as it drops them after the last use.
        given = [self._leaves[place] for place in self._places]
        for place in self._places:
            self._leaves[place] = None
        versions = self._versions()
        with group.outside(), DisableTorchFunction():
            inputs = [group.level.unwrap(leaf) for leaf in given]
            starts = [tied(self.anchor, x.detach()) for x in inputs]
            versions += [x._version for x in starts]
        with group.apart(self.anchor):
            output = self._call(group.level, starts)
            leaves, structure = tree_flatten(output)
            self._form = structure, with_graph(leaves)
            for leaf in leaves:
                if not isinstance(leaf, _LEAVES):
                    kind = type(leaf).__name__
                    raise NotAtOnce(f"{NAME} of a function that returns {kind}")
            with group.outside(), DisableTorchFunction():
                if versions != self._versions() + [x._version for x in starts]:
                    raise NotAtOnce(f"{NAME} of a function that changes its inputs")
                roots = [group.level.unwrap(leaves[place]) for place in self._form[1]]
                self._note(group, inputs, roots)
                results = _detached(roots, inputs)
            del output, roots, starts
        # What has left it unseen is told by the anchor, whatever it returns.
        group.segments.append(self)
        if not results:
            return tree_unflatten(leaves, structure)
        with group.outside(), DisableTorchFunction():
            # If no input has a graph, the backward pass gets here through the anchor.
            anchor = None if inputs else self.anchor
            results = _RunAgain.apply(self, results, anchor, *inputs)
            for place, result in zip(self._form[1], results):
                leaves[place] = group.level.wrap(result)
        self._seen = self._versions()
        return tree_unflatten(leaves, structure)

    def _versions(self) -> list[int]:
        """Returns the versions of its arguments."""
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, T)]
        return [whole(tensor)._version for tensor in tensors]

    def _call(self, level: Level, inputs: Sequence[T]) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, inputs):
            leaves[place] = level.wrap(tensor)
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._function(*args, **kwargs)

    def _call_in_modes(self, level: Level, inputs: Sequence[T]) -> Any:
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            return self._call(level, inputs)

    def _note(self, group: SamplesTogether, inputs: list[T], roots: list[T]) -> None:
        """Notes what the backward pass must know; refuses inputs that are not seen."""
        leaves, _ = graph_of(roots)
        if any(leaf is not self.anchor for leaf in leaves):
            raise NotAtOnce(
                f"{NAME} of a function that takes tensors with a gradient from "
                "elsewhere than its arguments"
            )
        self.touched = _touched_by(group)
        data = {id(x): x for use in group.uses for x in use.data}
        self.saved = sum(x.numel() for x in inputs)
        self.factors = sum(x.numel() for x in data.values())

    # -- backward ----------------------------------------------------------------------

    def gradients(
        self, inputs: Sequence[T], grads: Sequence[T | None]
    ) -> list[T | None]:
        """
        Runs it again, delivers per-sample gradients, and returns those of the inputs.
        """
        receiver = self.receiver
        if receiver is None:
            # A plain backward pass, as of a criterion, which has no parameters.
            if any(self.touched):
                raise NotAtOnce(NAME)
            receiver = Receiver((), len)
        detached = [x.detach().requires_grad_() for x in inputs]
        group, outputs = self._again(detached)
        numbers = itertools.count()

        def show(_: Hashable, rows: T, what: Hashable = None) -> None:
            if receiver.show is not None:
                receiver.show((*receiver.key, next(numbers), what), rows)

        if receiver.show is not None:
            # The data of another pass were computed by another run.
            for use in group.uses:
                what = use.about()
                for rows in use.data:
                    show(None, rows, what)
        samples, of_inputs = gradients_of_group(
            group,
            outputs,
            grads,
            receiver.params,
            detached,
            receiver=receiver._replace(show=receiver.show and show),
        )
        receiver.deliver(samples)
        return of_inputs

    @torch.enable_grad()
    def _again(self, inputs: Sequence[T]) -> tuple[SamplesTogether, list[T]]:
        """Returns the group that has run again, and its outputs with a graph."""
        if self._versions() != self._seen:
            raise _refused("has arguments that were changed in place after the call")
        group = self._group.another(self._group.size)
        with set_to(self._states), self._surroundings.again(), group.running():
            with group.level as level:
                if level.number != self._level:
                    raise _refused("has been called inside a transform of torch.func")
                try:
                    output = group.watch(partial(self._call_in_modes, level, inputs))
                except (NotAtOnce, BranchesDiffer) as error:
                    raise _refused(f"can't be computed again: {error}") from error
                leaves, structure = tree_flatten(output)
                if self._form != (structure, with_graph(leaves)):
                    raise _refused("has returned other tensors when it ran again")
                outputs = [level.unwrap(leaves[place]) for place in self._form[1]]
                del output, leaves
        if list(map(set, self.touched)) != list(map(set, _touched_by(group))):
            raise _refused("has used other parameters when it ran again")
        group.free_copies()
        return group, outputs


def with_graph(leaves: Sequence[Any]) -> list[int]:
    """Returns the positions of tensors of samples that need a gradient."""
    places = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, T) and is_batched(leaf) and whole(leaf).requires_grad:
            places.append(place)
    return places


def drop(tensor: T) -> None:
    """Saves nothing of a tensor for a backward pass."""


def refuse_dropped(nothing: None) -> T:
    """Raises, as the graph of the first run has no backward pass."""
    raise NotAtOnce(OF_SEGMENT)


def _touched_by(group: SamplesTogether) -> list[dict[int, T]]:
    """Returns the parameters that get a gradient, here and in segments within."""
    touched = [parameters_of(group.uses, group.params)]
    for segment in group.segments:
        touched += segment.touched
    return touched


def _detached(outputs: Sequence[T], inputs: Sequence[T]) -> list[T]:
    """
    Detaches outputs. Those in the memory of inputs, or of other outputs, become views,
    as autograd refuses to change views that a function returns.
    """
    count = Counter(x.untyped_storage().data_ptr() for x in (*inputs, *outputs))
    detached = []
    for output in outputs:
        is_shared = count[output.untyped_storage().data_ptr()] > 1
        output = output.detach()
        detached.append(output.view_as(output) if is_shared else output)
    return detached


def _refused(what: str) -> Refused:
    return Refused(
        f"A function under activation checkpointing {what}, so that its per-sample "
        "gradients are not known.",
        remedy="Leave torch.utils.checkpoint.checkpoint out for it "
        "(gradient_checkpointing=False), or train one sample after the other: "
        'grad_sample_mode="scan".',
    )


class _Tie(torch.autograd.Function):
    """The identity, with a path to the anchor, whose gradient shows if it is taken."""

    @staticmethod
    def forward(context: Any, anchor: T, tensor: T) -> T:
        context.save_for_backward(anchor)
        return renewed(tensor, tensor.shape)

    @staticmethod
    def backward(context: Any, grad: T) -> tuple[T, T]:
        (anchor,) = context.saved_tensors
        return torch.zeros_like(anchor), grad


#: Returns a tensor with a path to an anchor: tied(anchor, tensor).
tied: Callable[[T, T], T] = _Tie.apply


class _RunAgain(torch.autograd.Function):
    """The outputs of a segment, which runs again in the backward pass."""

    @staticmethod
    def forward(
        context: Any, segment: Segment, outputs: list[T], anchor: T | None, *inputs: T
    ) -> tuple[T, ...]:
        context.set_materialize_grads(False)
        context.save_for_backward(*inputs)
        context.segment = segment
        return tuple(outputs)

    @staticmethod
    def backward(context: Any, *grads: T | None) -> tuple[T | None, ...]:
        of_inputs = context.segment.gradients(context.saved_tensors, grads)
        return None, None, None, *of_inputs


class _Surroundings:
    """The settings under which a segment runs: autocast, and the default device."""

    def __init__(self) -> None:
        self._device = torch.get_default_device()
        self._autocast = []
        for kind in ("cpu", "cuda"):
            enabled = torch.is_autocast_enabled(kind)
            self._autocast.append((kind, torch.get_autocast_dtype(kind), enabled))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restores them for a block."""
        with ExitStack() as stack:
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            for kind, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield
