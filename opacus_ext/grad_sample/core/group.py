"""Samples that run together under vmap, and their uses of parameters.

Under vmap each tensor is either batched (one per sample) or shared.
:class:`SampleGroup` intercepts each op of a parameter (or a value computed from
parameters) and data. An op with a rule (rules/) runs with the shared value; the data
are saved, and together with the gradient of the output they give the factors of the
per-sample gradients. Any other op gets one copy of the value for each sample, expanded
without memory, whose gradient is the per-sample gradient.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Callable, ContextManager, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.autograd.graph import (
    GradientEdge,
    get_gradient_edge,
    saved_tensors_hooks,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

from opacus_ext.grad_sample.core.generators import (
    DRAWS,
    is_own,
    random_state,
)
from opacus_ext.grad_sample.core.gradients import (
    ParameterUse,
    ParameterValue,
    no_factors,
    of_copies,
)
from opacus_ext.grad_sample.core.recompute import (
    NAME,
    Segment,
    drop,
    refuse_dropped,
    tied,
    with_graph,
)
from opacus_ext.grad_sample.core.values import Key, as_bits
from opacus_ext.grad_sample.core.vmap import (
    COMPOSITE,
    BranchesDiffer,
    Level,
    Outside,
    decomposed,
    saved_tensor_hooks,
    whole,
)
from opacus_ext.grad_sample.rules import HANDLERS, OF_ALL, RULES, NotAtOnce, Op
from opacus_ext.grad_sample.rules.mistakes import check_op
from opacus_ext.private_torch import (
    DeviceContext,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    current_level,
    function_modes,
    is_batched,
    pop_level,
    push_level,
    renewed,
    tree_flatten,
)
from opacus_ext.refused import Refused

T = torch.Tensor
# Tensors, each with the one that replaces it.
Pairs = Sequence[tuple[T, T]]
_OF_OTHERS = OpOverload, OpOverloadPacket, HigherOrderOperator
# The types of torch's own functions: checking for others, abstract, takes longer.
_PLAIN = {*map(type, (torch.add, T.add, T.__add__, torch.einsum))}
_PLAIN.add(type(getattr(T.data, "__get__")))
# The most frequent types of arguments: isinstance() takes longer.
_TENSORS = {T, nn.Parameter}
_NO_TENSORS = {int, float, bool, str, type(None), torch.dtype, torch.device}
_NO_TENSORS |= {torch.Size, slice, type(...), torch.memory_format, torch.layout}
_LISTS = {list, tuple}
_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_INSIDE = "a parameter or a branch inside another transform"


class SampleGroup(TorchFunctionMode):
    """Samples that run together; it records each use of the parameters ``params``."""

    # True if the memory of parameters is freed in the backward pass.
    frees_parameters = False
    # Compiled code, where this is False, can't leave the vmap level.
    eager = True
    # True if calls of torch's checkpoint come to :meth:`checkpoint`.
    takes_checkpoints = True
    is_batched = staticmethod(is_batched)
    tensor_key: Callable[..., Key] = staticmethod(id)

    def __init__(self, params: Iterable[T], size: int):
        super().__init__()
        self.params = set(map(self.tensor_key, params))
        self.size = size
        self.uses: list[ParameterUse] = []
        # The parts of the forward that run again in the backward pass.
        self.segments: list[Any] = []
        # Set while such a part runs for the first time; see Segment.
        self.anchor: T | None = None
        # True if the code has read a value of the data.
        self.read_data = False
        # True if code of others got samples that are not batched: the vmap rule of an
        # op or an autograd function, or what may be one.
        self.runs_others = False
        #: What an op has raised, as the code may catch it; see :meth:`watch`.
        self.signal: Exception | None = None
        self._values: dict[Key, ParameterValue] = {}
        self._copies: dict[ParameterValue, T] = {}
        self.level = Level(size)
        self.wrap = self.level.wrap
        # The ids of inputs, which outlive this group.
        self._inputs: set[int] = set()
        self._packing = self.eager and saved_tensor_hooks()
        # The states of torch's generators after the last draw.
        self._random: Any = None

    # -- batched and shared tensors ----------------------------------------------------

    def wrap_input(self, tensor: T) -> T:
        """Turns an input ``[B, *shape]`` into the tensor that one sample sees."""
        self._inputs.add(id(tensor))
        return self.wrap(tensor)

    def inner(self, tensor: T) -> T:
        """Returns the values of all samples ``[B, *shape]``; expands shared ones."""
        return self.level.unwrap(tensor)

    def outside(self) -> ContextManager:
        """Leaves the vmap level for a block, where tensors hold all samples."""
        if current_level() != self.level.number:
            raise NotAtOnce(_INSIDE)
        return Outside()

    def agree(self, tensor: T) -> T:
        """Returns the value that all samples share; raises if they differ."""
        if not is_batched(tensor):
            return tensor
        self.read_data = True
        with self.outside():
            values = self.level.unwrap(tensor).detach()
            # Bits are compared, so that a NaN is equal to itself, and 0 not to -0.
            flat = as_bits(values.reshape(self.size, -1))
            if bool((flat == flat[:1]).all()):
                return values[0]
            _, answers = torch.unique(flat, dim=0, return_inverse=True)
            raise BranchesDiffer(answers)

    def is_shared(self, tensor: T | None) -> bool:
        """Returns True for a parameter, or what is computed from parameters alone."""
        if tensor is None:
            return False
        return tensor.requires_grad and not is_batched(tensor)

    def find_shared(self, args: Iterable) -> dict[Key, T]:
        """Returns parameters, and values computed from them alone, by their keys."""
        shared, arguments = {}, [*args]
        for argument in arguments:
            kind = type(argument)
            if kind in _NO_TENSORS:
                continue
            if kind in _LISTS:
                # The loop goes on with the items of a list.
                arguments += argument
            elif kind in _TENSORS or isinstance(argument, T):
                if argument.requires_grad and not is_batched(argument):
                    shared[self.tensor_key(argument)] = argument
        return shared

    # -- ops ---------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        try:
            if saved_tensor_hooks() != self._packing:
                raise NotAtOnce(NAME)
            if type(func) not in _PLAIN and isinstance(func, _OF_OTHERS):
                self.runs_others = True
            if kwargs and "generator" in kwargs and is_own(kwargs["generator"]):
                raise NotAtOnce("a generator other than torch's own")
            if func in DRAWS:
                return self._draw(func, args, kwargs or {})
            if func in HANDLERS:
                return HANDLERS[func](self, func, *args, **kwargs or {})
            # Most ops have no parameter. That is told without a call.
            arguments = [*args, *kwargs.values()] if kwargs else [*args]
            for argument in arguments:
                kind = type(argument)
                if kind in _LISTS:
                    arguments += argument
                elif kind in _TENSORS and not argument.requires_grad:
                    continue
                elif kind not in _NO_TENSORS:
                    return self.call(func, *args, **kwargs or {})
            if func in OF_ALL:
                return self.run_op(func, *args, **kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            if self.signal is None:
                self.signal = error
            raise

    def _draw(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a function that may draw random numbers."""
        self._check_random()
        if function in HANDLERS:
            drawn = HANDLERS[function](self, function, *args, **kwargs)
        else:
            drawn = self.call(function, *args, **kwargs)
        self._random = random_state()
        return drawn

    def _check_random(self) -> None:
        """Raises if torch's generators do not go on from the last draw."""
        (before, devices_before), (state, devices) = self._random, random_state()
        # Their bytes are compared, and no device waits for that.
        same = before.numpy().data == state.numpy().data
        if not same or devices_before != devices:
            raise NotAtOnce("a seed that is set in the forward")

    def watch(self, code: Callable[[], Any]) -> Any:
        """
        Runs the code of a sample. If an op has raised an error, it is raised again,
        whatever the code did with it: another sample, or one alone, might have an
        answer.
        """
        self._random = random_state()
        try:
            with self:
                result = code()
            self._check_random()
        except Exception as error:
            if self.signal in (None, error):
                self.signal = None
                raise
        if self.signal is None:
            return result
        signal, self.signal = self.signal, None
        try:
            if isinstance(signal, (BranchesDiffer, NotAtOnce, Refused)):
                raise signal
            raise NotAtOnce(f"{type(signal).__name__}: {signal}") from signal
        finally:
            # The traceback of the error holds this frame, which must not hold it, too.
            del signal

    # -- activation checkpointing ------------------------------------------------------

    def checkpoint(
        self,
        function: Callable,
        *args: Any,
        use_reentrant: bool | None = None,
        context_fn: Callable = noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        preserve_rng_state: bool = True,
        **kwargs: Any,
    ) -> Any:
        """
        Runs a function that is to run again in the backward pass, where it draws the
        same random numbers, whatever ``preserve_rng_state`` says.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        try:
            if current_level() != self.level.number:
                raise NotAtOnce(_INSIDE)
            if context_fn is not noop_context_fn:
                raise NotAtOnce(f"{NAME} with context_fn")
            segment = Segment(self, self._modes_within(), function, args, kwargs)
            # torch's reentrant kind sees only tensors that are arguments themselves.
            is_reentrant = use_reentrant in (None, True)
            if is_reentrant and not with_graph(args):
                raise NotAtOnce(f"{NAME} of inputs that need no gradient")
            output = segment.run(self)
            if is_reentrant and _has_inner(output):
                raise NotAtOnce(f"{NAME} of a function that returns nested tensors")
            return output
        except Exception as error:
            if self.signal is None:
                self.signal = error
            raise

    def _modes_within(self) -> list[Any]:
        """Returns the modes that are entered again where a part runs again."""
        modes = []
        for mode in function_modes():
            if getattr(mode, "runs_again", False):
                modes.append(mode)
            # A default device is a mode, too, and is restored.
            elif mode is not self and not isinstance(mode, DeviceContext):
                raise NotAtOnce(f"{NAME} under {type(mode).__name__}")
        return modes

    @contextmanager
    def apart(self, anchor: T) -> Iterator[None]:
        """
        Keeps the uses and segments of a block apart, and drops them at its end. What
        autograd would save in it for a backward pass is dropped at once.
        """
        kept = dict(vars(self))
        self.uses, self.segments, self.anchor = [], [], anchor
        self._values, self._copies = dict(self._values), {}
        try:
            with saved_tensors_hooks(drop, refuse_dropped):
                self._packing = saved_tensor_hooks()
                yield
        finally:
            for name in ("uses", "segments", "anchor", "_values", "_copies"):
                setattr(self, name, kept[name])
            self._packing = kept["_packing"]

    def running(self) -> ContextManager:
        """Prepares the model to run in the backward pass, for a block."""
        return nullcontext()

    def call(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Runs an op of a sample, and records its uses of parameters."""
        arguments = (*args, *kwargs.values()) if kwargs else args
        shared = self.find_shared(arguments)
        if not shared or not torch.is_grad_enabled():
            return self.run_op(function, *args, **kwargs)
        for key in shared:
            # Constants are looked for only if an op uses more than the parameters.
            if key not in self.params:
                leaves = self.constants(shared)
                if leaves:
                    return self._call_detached(leaves, function, args, kwargs)
                break
        if function in RULES:
            for rule in RULES[function]:
                op = rule(*args, **kwargs)
                if op is None:
                    continue
                # To call check_op() each time would take longer.
                is_op = type(op) is Op and type(op.params) is type(op.data) is tuple
                is_op = is_op and type(op.data_dims) is tuple
                if not is_op or not 0 < len(op.data) == len(op.data_dims):
                    check_op(function, rule, op)
                output = self.by_rule(function, op, shared, args, kwargs)
                if output is not None:
                    return output
        batched = _any_batched(arguments)
        if batched and function not in OF_ALL and function in COMPOSITE:
            with self:
                return decomposed(function)(*args, **kwargs)
        if not batched:
            result = function(*args, **kwargs)
            # If the result is batched, the op has drawn random numbers for each sample.
            if not _any_batched((result,)):
                return self.made(function, args, kwargs, result)
        self.check_in_place(function, args, shared)
        copies = [(tensor, self.copy(tensor)) for tensor in shared.values()]
        return call_with(copies, partial(self.run_op, function), args, kwargs)

    def _call_detached(
        self, leaves: list[T], function: Callable, args: tuple, kwargs: dict
    ) -> Any:
        """Runs an op of leaves that are not among the parameters, as constants."""
        constants = [(leaf, leaf.detach()) for leaf in leaves]
        result = call_with(constants, partial(self.call, function), args, kwargs)
        # A new layer that the forward makes, and may drop, is initialized first.
        initializes = changes_in_place(function) and args[0] is leaves[0]
        if isinstance(result, (T, list, tuple)) and not initializes:
            self.check_leaves(leaves)
        return result

    def run_op(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Runs an op without parameters: as one op of all samples, if that is known."""
        if function in OF_ALL and current_level() == self.level.number:
            rows = self._rows_of((*args, *kwargs.values()))
            if rows:
                named = dict(zip(kwargs, rows[len(args) :]))
                with Outside():
                    output = OF_ALL[function](*rows[: len(args)], **named)
                if output is not NotImplemented:
                    return self.wrap(output.expand(self.size, *output.shape[1:]))
        return function(*args, **kwargs)

    def _rows_of(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns arguments with a row for each sample; [] if none is batched."""
        rows = [*arguments]
        shared = []
        has_batched = False
        for position, argument in enumerate(arguments):
            if type(argument) in _NO_TENSORS or not isinstance(argument, T):
                continue
            if is_batched(argument):
                has_batched = True
                rows[position] = self.level.unwrap(argument)
            else:
                shared.append(position)
        if not has_batched:
            return []
        for position in shared:
            rows[position] = rows[position][None]
        return rows

    def check_in_place(self, function: Callable, args: tuple, shared: dict) -> None:
        """Raises if an op changes a value computed from parameters."""
        if args and changes_in_place(function) and self.tensor_key(args[0]) in shared:
            raise NotAtOnce("a value computed from parameters that data change")

    def made(self, function: Callable, args: tuple, kwargs: dict, result: Any) -> Any:
        """Called with each op of parameters without data; returns its result."""
        return result

    def constants(self, shared: dict[Key, T]) -> list[T]:
        """Returns the leaves that are not among the parameters."""
        leaves = []
        for key, tensor in shared.items():
            if tensor.is_leaf and key not in self.params:
                leaves.append(tensor)
        return leaves

    def check_leaves(self, leaves: list[T]) -> None:
        """Called with leaves that are not among the parameters, where ops use them."""

    def reach(self, tensor: T) -> None:
        """Called with a tensor whose data may be written without a new version."""

    # -- uses --------------------------------------------------------------------------

    def value(self, tensor: T, key: Key) -> ParameterValue:
        """Returns the record of a parameter, or a value computed from some, by key."""
        if key not in self._values or self._values[key].version != tensor._version:
            self._values[key] = ParameterValue(tensor, key)
        return self._values[key]

    def values_of(
        self, op: Op, shared: dict[Key, T]
    ) -> tuple[ParameterValue | None, ...] | None:
        """
        Returns the values that an op uses, None for those that are not trained. Returns
        None instead of all if the rule does not apply.
        """
        keys = [*map(self.tensor_key, op.params)]
        for param, key in zip(op.params, keys):
            if param is None or key in shared and not param.dtype.is_complex:
                continue
            # A tensor that is no argument, but made of some, may need a gradient.
            if param.dtype.is_complex or param.requires_grad or is_batched(param):
                return None
        by_data = False
        for tensor, key in zip(op.data, map(self.tensor_key, op.data)):
            is_shared = key in shared
            if tensor.dtype.is_complex or tensor.requires_grad and not is_shared:
                return None
            by_data = by_data or not is_shared
        # If the first is not shared, the gradients of the others need no data.
        if not by_data or keys[0] not in shared:
            return None
        pairs: Any = zip(op.params, keys)
        return tuple(
            [self.value(param, key) if key in shared else None for param, key in pairs]
        )

    def by_rule(
        self,
        function: Callable,
        op: Op,
        shared: dict[Key, T],
        args: tuple,
        kwargs: dict,
    ) -> T | None:
        """
        Runs an op that has a rule, and records its uses of parameters. Returns None if
        the rule does not apply, or the output is complex, as factors are real.
        """
        values = self.values_of(op, shared)
        if values is None:
            return None
        data: Sequence[T] = op.data
        if True in map(_requires_grad, data):
            keys = map(self.tensor_key, data)
            data = [
                self.copy(tensor) if key in shared else tensor
                for tensor, key in zip(data, keys)
            ]
        run_all = op.run_all if True in map(is_batched, data) else None
        if run_all is None:
            output = call_with(swapped(op, values, data), function, args, kwargs)
        if current_level() != self.level.number:
            raise NotAtOnce(_INSIDE)
        # A block of Outside() would take twice as many calls.
        layer = pop_level()
        try:
            data = [*map(self.level.unwrap, data)]
            if run_all is None:
                output = self.inner(output)
            else:
                pairs = zip(op.params, values)
                params = [
                    param if value is None else value.shared for param, value in pairs
                ]
                output = run_all(params, *data)
            if output.dtype.is_complex:
                return None
            return self.note(
                output, values, op.factors, op.event_dims, data, op.data_dims
            )
        finally:
            push_level(layer)

    def own(self, tensor: T | None) -> T | None:
        """Returns per-sample copies of what is made of parameters, or the tensor."""
        if tensor is None or not self.is_shared(tensor) or not torch.is_grad_enabled():
            return tensor
        if self.constants({self.tensor_key(tensor): tensor}):
            self.check_leaves([tensor])
            return tensor.detach()
        return self.copy(tensor)

    def copy(self, tensor: T) -> T:
        """Returns one copy for each sample, without memory, at the vmap level."""
        value = self.value(tensor, self.tensor_key(tensor))
        copies = self._copies.get(value)
        if copies is None:
            with self.outside():
                rows, event_dims = self.inner(value.shared), value.tensor.ndim
                copies = self.note(rows, (value,), of_copies, event_dims, (), ())
            self._copies[value] = copies
        return copies

    def note(
        self,
        output: T,
        values: tuple[ParameterValue | None, ...],
        factors: Callable,
        event_dims: int,
        data: Sequence[T],
        data_dims: Sequence[int],
    ) -> T:
        """
        Records a use of parameters (see :class:`ParameterUse`), with the dims that
        belong to one row (see :class:`Op`). Called outside; returns the output
        ``[B, *rows, *event]`` at the vmap level.
        """
        if not output.requires_grad:
            if self.anchor is None:
                output.requires_grad_()
            else:
                output = tied(self.anchor, output)
        # Where no data have a graph, the graph of the samples ends at this use.
        source = None
        if True not in map(_requires_grad, data):
            source = get_gradient_edge(output)
        output = renewed(output, output.shape)
        node: Any = output.grad_fn
        edge, versions = GradientEdge(node, 0), tuple(map(_version, data))
        data_rows = tuple(
            [tensor.ndim - 1 - dims for tensor, dims in zip(data, data_dims)]
        )
        rows = output.ndim - 1 - event_dims
        use = ParameterUse(
            values, factors, rows, data, data_rows, versions, edge, source
        )
        self.uses += [use]
        return self.wrap(output)

    def begin_graph(self, tensor: T, requires_grad: bool = True) -> T:
        """
        Lets the graph of samples begin at a tensor, as fine-tuning under reentrant
        checkpointing does. No gradient of it is asked for.
        """
        leaf = whole(tensor)
        if leaf.requires_grad == requires_grad:
            return tensor
        # Another group may get the same inputs. In a segment all begins at the anchor.
        is_kept = id(leaf) in self._inputs or self.anchor is not None
        if is_kept or not requires_grad:
            raise NotAtOnce("requires_grad_ in the forward")
        with self.outside():
            edge = get_gradient_edge(leaf.requires_grad_())
        # A use of no parameter, so that the backward pass goes as far as here.
        use = ParameterUse((), no_factors, 0, (), (), edge=edge, source=edge)
        self.uses.append(use)
        return tensor

    def another(self, size: int) -> SampleGroup:
        """Makes a group of this kind, for other samples."""
        other = copy.copy(self)
        SampleGroup.__init__(other, (), size)
        other.params = self.params
        return other

    def of_others(
        self, run: Callable, rows: Sequence[T], size: int, samples: T | None = None
    ) -> T:
        """
        Runs samples of other processes ``[n, ...]``, and records their uses; called
        outside. ``samples`` are their indices among ``size`` samples.
        """
        inner = self.another(len(rows[0]))
        with inner.level:
            wrapped = map(inner.wrap, rows)
            output = inner.inner(inner.watch(partial(run, *wrapped)))
        if inner.segments:
            raise NotAtOnce(f"{NAME} of experts of other processes")
        for use in inner.uses:
            self.uses.append(use._replace(size=size, samples=samples))
        self.read_data |= inner.read_data
        self.runs_others |= inner.runs_others
        self._random = inner._random
        return output

    def free_copies(self) -> None:
        """Drops the per-sample copies, after the forward."""
        self._copies.clear()


def _any_batched(arguments: Iterable) -> bool:
    """Returns True if some argument is batched."""
    for argument in arguments:
        if isinstance(argument, T):
            if is_batched(argument):
                return True
        elif type(argument) in _LISTS and _any_batched(argument):
            return True
    return False


def _has_inner(output: Any) -> bool:
    """Returns True if it holds other tensors with a graph than those of a tuple."""
    outer = output if isinstance(output, tuple) else (output,)
    return len(with_graph(tree_flatten(output)[0])) > len(with_graph(outer))


def changes_in_place(function: Callable) -> bool:
    """Returns True if the name says that it changes its first argument."""
    name = getattr(function, "__name__", "")
    if name == "__setitem__" or name.startswith("__i"):
        return True
    return name.endswith("_") and not name.endswith("__")


def swapped(
    op: Op, values: Sequence[ParameterValue | None], data: Sequence[T]
) -> Pairs:
    """Returns what an op is called with instead of its parameters and shared data."""
    used = [value for value in values if value is not None]
    return [(value.tensor, value.shared) for value in used] + [*zip(op.data, data)]


def call_with(replaced: Pairs, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a function with some tensors replaced by others."""
    if kwargs:
        kwargs = dict(zip(kwargs, _swapped([*kwargs.values()], replaced)))
    return function(*_swapped(args, replaced), **kwargs)


def _swapped(args: tuple | list, replaced: Pairs) -> Any:
    """Replaces tensors in arguments, and in lists of these."""
    arguments = []
    for argument in args:
        if isinstance(argument, T):
            for tensor, other in replaced:
                if argument is tensor:
                    argument = other
                    break
        elif type(argument) in _LISTS:
            argument = _swapped(argument, replaced)
        arguments.append(argument)
    return type(args)(arguments)
