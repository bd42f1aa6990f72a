"""Samples that run together under vmap, and their uses of parameters.

Under vmap each tensor is either batched, one a sample, or shared. :class:`SampleGroup`
intercepts each op of a parameter (or a value computed from parameters) and data. An op
with a rule (rules/) runs with the shared value; the data are saved, and together with
the gradient of the output they give the factors of the per-sample gradients. Any other
op gets one copy of the value for each sample, expanded without memory, whose gradient
is the per-sample gradient.
"""

from __future__ import annotations

import copy
from functools import partial
from operator import attrgetter
from typing import Any, Callable, ContextManager, Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.core.generators import (
    DRAWS,
    is_own,
    random_state,
)
from opacus_ext.grad_sample.core.gradients import (
    ParameterUse,
    ParameterValue,
    of_copies,
)
from opacus_ext.grad_sample.core.values import as_bits
from opacus_ext.grad_sample.core.vmap import (
    Level,
    Outside,
    decomposed,
    is_composite,
    saved_tensor_hooks,
)
from opacus_ext.grad_sample.rules import HANDLERS, OF_ALL, RULES, NotAtOnce, Op
from opacus_ext.private_torch import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    current_level,
    is_batched,
    pop_level,
    push_level,
    renewed,
)
from opacus_ext.refused import Refused

T = torch.Tensor
_OF_OTHERS = OpOverload, OpOverloadPacket, HigherOrderOperator
# The types of torch's own functions: checking for others, abstract, takes longer.
_PLAIN = {type(x) for x in (torch.add, T.add, T.__add__, torch.einsum)}
_PLAIN.add(type(getattr(T.data, "__get__")))
# The most frequent types of arguments: isinstance() takes longer.
_TENSORS = {T, nn.Parameter}
_NO_TENSORS = {int, float, bool, str, type(None), torch.dtype, torch.device}
_NO_TENSORS |= {torch.Size, slice, type(...), torch.memory_format, torch.layout}
_LISTS = {list, tuple}
_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_INSIDE = "a parameter or a branch inside another transform"


class BranchesDiffer(Exception):
    """Raised when samples take different branches, numbered in ``answers [B]``."""

    def __init__(self, answers: T):
        super().__init__("samples take different branches")
        self.answers = answers

    def parts(self, samples: Any) -> list[Any]:
        """Returns the samples (groups.py) with each answer."""
        answers = self.answers.cpu()
        each = [(answers == k).nonzero()[:, 0] for k in answers.unique()]
        return [samples.select(part) for part in each]


class SampleGroup(TorchFunctionMode):
    """Samples that run together; it records each use of the parameters ``params``."""

    frees_parameters = False  # True if their memory is freed in the backward pass
    eager = True  # False in compiled code, which can't leave the vmap level
    is_batched = staticmethod(is_batched)

    def __init__(self, params: Iterable[T], size: int):
        super().__init__()
        self.params = set(map(id, params))
        self.size = size
        self.uses: list[ParameterUse] = []
        self.read_data = False  # True if the code has read a value of the data
        # True if code of others got samples that are not batched: the vmap rule of an
        # op or an autograd function, or what may be one.
        self.runs_others = False
        #: What an op has raised, as the code may catch it; see :meth:`watch`.
        self.signal: Exception | None = None
        self._values: dict[int, ParameterValue] = {}
        self._copies: dict[int, T] = {}
        self.level = Level(size)
        self.wrap = self.level.wrap
        self._packing = self.eager and saved_tensor_hooks()
        self._random: Any = None  # states of torch's generators after the last draw

    # -- batched and shared tensors ----------------------------------------------------

    def inner(self, x: T) -> T:
        """Returns the values of all samples ``[B, *shape]``; expands shared ones."""
        return self.level.unwrap(x)

    def outside(self) -> ContextManager:
        """Leaves the vmap level for a block, where tensors hold all samples."""
        if current_level() != self.level.number:
            raise NotAtOnce(_INSIDE)
        return Outside()

    def agree(self, x: T) -> T:
        """Returns the value that all samples share; raises if they differ."""
        if not is_batched(x):
            return x
        self.read_data = True
        with self.outside():
            values = self.level.unwrap(x).detach()
            flat = as_bits(values.reshape(self.size, -1))
            if bool((flat == flat[:1]).all()):
                return values[0]
            answers = torch.unique(flat, dim=0, return_inverse=True)[1]
            raise BranchesDiffer(answers)

    def is_shared(self, x: T | None) -> bool:
        """Returns True if ``x`` is a parameter or computed from parameters alone."""
        return x is not None and x.requires_grad and not is_batched(x)

    def find_shared(self, args: Iterable) -> dict[int, T]:
        """Returns parameters, and values computed from them alone, by their ids."""
        shared, todo = {}, [*args]
        for x in todo:
            kind = type(x)
            if kind in _NO_TENSORS:
                continue
            if kind in _LISTS:
                todo += x
            elif kind in _TENSORS or isinstance(x, T):
                if x.requires_grad and not is_batched(x):
                    shared[id(x)] = x
        return shared

    # -- ops ---------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        try:
            if saved_tensor_hooks() != self._packing:
                raise NotAtOnce("activation checkpointing")
            if type(func) not in _PLAIN and isinstance(func, _OF_OTHERS):
                self.runs_others = True
            if kwargs and "generator" in kwargs and is_own(kwargs["generator"]):
                raise NotAtOnce("a generator other than torch's own")
            if func in DRAWS:
                return self._draw(func, args, kwargs or {})
            if func in HANDLERS:
                return HANDLERS[func](self, func, *args, **kwargs or {})
            # Most ops have no parameter: that is told without a call.
            todo = [*args, *kwargs.values()] if kwargs else [*args]
            for x in todo:
                kind = type(x)
                if kind in _LISTS:
                    todo += x
                elif kind in _TENSORS and not x.requires_grad:
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

    def _draw(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a function that may draw random numbers."""
        self._check_random()
        if func in HANDLERS:
            found = HANDLERS[func](self, func, *args, **kwargs)
        else:
            found = self.call(func, *args, **kwargs)
        self._random = random_state()
        return found

    def _check_random(self) -> None:
        """Raises if torch's generators do not go on from the last draw."""
        (state, on_devices), (now, others) = self._random, random_state()
        if not torch.equal(state, now) or on_devices != others:
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
                found = code()
            self._check_random()
        except Exception as error:
            if self.signal in (None, error):
                self.signal = None
                raise
        if self.signal is None:
            return found
        signal, self.signal = self.signal, None
        try:
            if isinstance(signal, (BranchesDiffer, NotAtOnce, Refused)):
                raise signal
            raise NotAtOnce(f"{type(signal).__name__}: {signal}") from signal
        finally:
            del signal  # its traceback holds this frame

    def call(self, func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Runs an op of a sample, and records its uses of parameters."""
        given = (*args, *kwargs.values()) if kwargs else args
        shared = self.find_shared(given)
        if not shared or not torch.is_grad_enabled():
            return self.run_op(func, *args, **kwargs)
        leaves: list[T] = []
        for key in shared:
            if key not in self.params:
                leaves = self.constants(shared)
        if leaves:
            constants = {id(x): x.detach() for x in leaves}
            made = call_with(constants, partial(self.call, func), args, kwargs)
            # A new layer that the forward makes, and may drop, is initialized first.
            initializes = changes_in_place(func) and args[0] is leaves[0]
            if isinstance(made, (T, list, tuple)) and not initializes:
                self.check_leaves(leaves)
            return made
        for rule in RULES[func] if func in RULES else ():
            op = rule(*args, **kwargs)
            made = None if op is None else self.by_rule(func, op, shared, args, kwargs)
            if made is not None:
                return made
        batched = _any_batched(given)
        if batched and func not in OF_ALL and is_composite(func):
            with self:
                return decomposed(func)(*args, **kwargs)
        if not batched:
            made = func(*args, **kwargs)
            if not _any_batched((made,)):
                return self.made(func, args, kwargs, made)
            # The op has drawn random numbers for each sample.
        self.check_in_place(func, args, shared)
        copies = {key: self.copy(x) for key, x in shared.items()}
        return call_with(copies, partial(self.run_op, func), args, kwargs)

    def run_op(self, func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Runs an op without parameters: as one op of all samples, if that is known."""
        if func in OF_ALL and current_level() == self.level.number:
            given = *args, *kwargs.values()
            batched = [
                type(x) not in _NO_TENSORS and _is_one_a_sample(x) for x in given
            ]
            if True in batched:
                rows = [
                    self.level.unwrap(x) if own else _as_row(x)
                    for x, own in zip(given, batched)
                ]
                named = dict(zip(kwargs, rows[len(args) :]))
                with Outside():
                    y = OF_ALL[func](*rows[: len(args)], **named)
                if y is not NotImplemented:
                    return self.wrap(y.expand(self.size, *y.shape[1:]))
        return func(*args, **kwargs)

    def check_in_place(self, func: Callable, args: tuple, shared: dict) -> None:
        """Raises if an op changes a value computed from parameters."""
        if args and changes_in_place(func) and id(args[0]) in shared:
            raise NotAtOnce("a value computed from parameters that data change")

    def made(self, func: Callable, args: tuple, kwargs: dict, made: Any) -> Any:
        """Called with each op of parameters without data; returns its result."""
        return made

    def constants(self, shared: dict[int, T]) -> list[T]:
        """Returns the leaves that are not among the parameters."""
        known = self.params
        return [x for key, x in shared.items() if x.is_leaf and key not in known]

    def check_leaves(self, leaves: list[T]) -> None:
        """Called with leaves that are not among the parameters, where ops use them."""

    def reach(self, x: T) -> None:
        """Called with a tensor whose data may be written without a new version."""

    # -- uses --------------------------------------------------------------------------

    def value(self, x: T, key: int) -> ParameterValue:
        """Returns the record of a parameter, or a value computed from some, by id."""
        if key not in self._values or self._values[key].version != x._version:
            self._values[key] = ParameterValue(x)
        return self._values[key]

    def values_of(
        self, op: Op, shared: dict[int, T]
    ) -> tuple[ParameterValue | None, ...] | None:
        """
        Returns the values that an op uses, None for those that are not trained. Returns
        None instead of all if the rule does not apply.
        """
        keys, by_data = [*map(id, op.params)], False
        for p, key in zip(op.params, keys):
            if p is None or key in shared and not p.dtype.is_complex:
                continue
            # A tensor that is no argument, but made of some, may need a gradient.
            if p.dtype.is_complex or p.requires_grad or is_batched(p):
                return None
        for x, key in zip(op.data, map(id, op.data)):
            is_shared = key in shared
            if x.dtype.is_complex or x.requires_grad and not is_shared:
                return None
            by_data = by_data or not is_shared
        # If the first is not shared, the gradients of the others need no data.
        if not by_data or keys[0] not in shared:
            return None
        pairs: Any = zip(op.params, keys)
        return tuple([self.value(p, k) if k in shared else None for p, k in pairs])

    def by_rule(
        self, func: Callable, op: Op, shared: dict[int, T], args: tuple, kwargs: dict
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
            data = [self.copy(x) if id(x) in shared else x for x in data]
        run_all = op.run_all if True in map(is_batched, data) else None
        if run_all is None:
            y = call_with(swapped(op, values, data), func, args, kwargs)
        if current_level() != self.level.number:
            raise NotAtOnce(_INSIDE)
        layer = pop_level()  # as Outside() does in twice as many calls
        try:
            data = [*map(self.level.unwrap, data)]
            if run_all is None:
                y = self.inner(y)
            else:
                params = zip(op.params, values)
                y = run_all([p if v is None else v.shared for p, v in params], *data)
            if y.dtype.is_complex:
                return None
            return self.note(y, values, op.factors, op.event_dims, data, op.data_dims)
        finally:
            push_level(layer)

    def own(self, x: T | None) -> T | None:
        """Returns per-sample copies if ``x`` is made of parameters, else ``x``."""
        if x is None or not (self.is_shared(x) and torch.is_grad_enabled()):
            return x
        if self.constants({id(x): x}):
            self.check_leaves([x])
            return x.detach()
        return self.copy(x)

    def copy(self, x: T) -> T:
        """Returns one copy for each sample, without memory, at the vmap level."""
        value = self.value(x, id(x))
        found = self._copies.get(id(value))
        if found is None:
            with self.outside():
                copies, dims = self.inner(value.shared), value.tensor.ndim
                found = self.note(copies, (value,), of_copies, dims, (), ())
            self._copies[id(value)] = found
        return found

    def note(
        self,
        y: T,
        values: tuple[ParameterValue | None, ...],
        factors: Callable,
        event_dims: int,
        data: Sequence[T],
        data_dims: Sequence[int],
    ) -> T:
        """
        Records a use of parameters (see :class:`ParameterUse`), with the dims that
        belong to one row (see :class:`Op`). Called outside; returns the output
        ``y [B, *rows, *event]`` at the vmap level.
        """
        if not y.requires_grad:
            y.requires_grad_()
        # Where no data have a graph, the graph of the samples ends at this use.
        source = None if True in map(_requires_grad, data) else get_gradient_edge(y)
        y = renewed(y, y.shape)
        node: Any = y.grad_fn
        edge, versions = GradientEdge(node, 0), tuple(map(_version, data))
        dims = tuple([x.ndim - 1 - n for x, n in zip(data, data_dims)])
        at = y.ndim - 1 - event_dims
        use = ParameterUse(values, factors, at, data, dims, versions, edge, source)
        self.uses += [use]
        return self.wrap(y)

    def of_others(
        self, run: Callable, given: Sequence[T], size: int, samples: T | None = None
    ) -> T:
        """
        Runs samples of other processes ``[n, ...]``, and records their uses; called
        outside. ``samples`` are their indices among ``size`` samples.
        """
        inner = copy.copy(self)
        SampleGroup.__init__(inner, (), len(given[0]))
        inner.params = self.params
        with inner.level:
            wrapped = [inner.wrap(x) for x in given]
            y = inner.inner(inner.watch(lambda: run(*wrapped)))
        self.uses += [x._replace(size=size, samples=samples) for x in inner.uses]
        self.read_data |= inner.read_data
        self.runs_others |= inner.runs_others
        self._random = inner._random
        return y

    def free_copies(self) -> None:
        """Drops the per-sample copies, after the forward."""
        self._copies.clear()


def _is_one_a_sample(x: Any) -> bool:
    return (type(x) in _TENSORS or isinstance(x, T)) and is_batched(x)


def _as_row(x: Any) -> Any:
    return x[None] if isinstance(x, T) else x


def _any_batched(args: Iterable) -> bool:
    """Returns True if some argument is batched."""
    return any(
        (
            is_batched(x)
            if isinstance(x, T)
            else type(x) in (list, tuple) and _any_batched(x)
        )
        for x in args
    )


def changes_in_place(func: Callable) -> bool:
    """Returns True if the name says that it changes its first argument."""
    name = getattr(func, "__name__", "")
    plain = name.endswith("_") and not name.endswith("__")
    return plain or name == "__setitem__" or name.startswith("__i")


def swapped(
    op: Op, values: Sequence[ParameterValue | None], data: Sequence[T]
) -> dict[int, T]:
    """Returns what an op is called with instead of its parameters and shared data."""
    swap = {id(x): y for x, y in zip(op.data, data) if y is not x}
    swap.update((id(v.tensor), v.shared) for v in values if v is not None)
    return swap


def call_with(swap: dict[int, T], func: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a function with some tensors replaced, by their ids."""
    if kwargs:
        kwargs = dict(zip(kwargs, _swapped(list(kwargs.values()), swap)))
    return func(*_swapped(args, swap), **kwargs)


def _swapped(args: Any, swap: dict[int, T]) -> Any:
    found = []
    for x in args:
        if isinstance(x, T):
            x = swap.get(id(x), x)
        elif type(x) in (list, tuple):
            x = _swapped(x, swap)
        found.append(x)
    return type(args)(found)
