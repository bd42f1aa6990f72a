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
from typing import Any, Callable, ContextManager, Iterable, Sequence

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.core.generators import DRAWS, is_own, random_state
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
    is_batched,
    is_composite,
    saved_tensor_hooks,
)
from opacus_ext.grad_sample.rules import HANDLERS, RULES, NotAtOnce, Op
from opacus_ext.refused import Refused

T = torch.Tensor
_OF_OTHERS = OpOverload, OpOverloadPacket, HigherOrderOperator
# The types of torch's own functions: checking for others, abstract, takes longer.
_PLAIN = {type(x) for x in (torch.add, T.add, T.__add__, torch.einsum)}
_PLAIN.add(type(getattr(T.data, "__get__")))
# The most frequent types of arguments: isinstance() takes longer.
_TENSORS = {T, nn.Parameter}
_NO_TENSORS = {int, float, bool, str, type(None), torch.dtype, torch.device}
_unsafe_view = torch.ops.aten._unsafe_view.default


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
        self.params = {id(p) for p in params}
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
        self._packing = saved_tensor_hooks() if self.eager else None
        self._random: tuple = ()  # state of torch's generators after the last draw

    # -- batched and shared tensors ----------------------------------------------------

    def inner(self, x: T) -> T:
        """Returns the values of all samples ``[B, *shape]``; expands shared ones."""
        return self.level.unwrap(x) if is_batched(x) else x.expand(self.size, *x.shape)

    def outside(self) -> ContextManager:
        """Leaves the vmap level for a block, where tensors hold all samples."""
        if not self.level.innermost:
            raise NotAtOnce("a parameter or a branch inside another transform")
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

    def find_shared(self, args: Iterable, found: list[T]) -> None:
        """Appends parameters, and values computed from them alone, to ``found``."""
        for x in args:
            kind = type(x)
            if kind in _NO_TENSORS:
                continue
            if kind in _TENSORS or isinstance(x, T):
                if x.requires_grad and not is_batched(x):
                    found.append(x)
            elif kind in (list, tuple):
                self.find_shared(x, found)

    # -- ops ---------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if self.eager and saved_tensor_hooks() != self._packing:
            raise NotAtOnce("activation checkpointing")
        if self.eager and type(func) not in _PLAIN and isinstance(func, _OF_OTHERS):
            self.runs_others = True
        if func is T.unflatten:
            func = torch.unflatten  # Dynamo does not trace super() in the method
        run = partial(HANDLERS[func], self) if func in HANDLERS else self.call
        kwargs = kwargs or {}
        try:
            if self.eager and "generator" in kwargs and is_own(kwargs["generator"]):
                raise NotAtOnce("a generator other than torch's own")
            if self.eager and func in DRAWS:
                run = partial(self._draw, run)
            return run(func, *args, **kwargs)
        except Exception as error:
            if self.signal is None:
                self.signal = error
            raise

    def _draw(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs a function that may draw random numbers."""
        self._check_random()
        found = run(*args, **kwargs)
        self._random = random_state()
        return found

    def _check_random(self) -> None:
        """Raises if torch's generators do not go on from the last draw."""
        if self.eager and self._random != random_state():
            raise NotAtOnce("a seed that is set in the forward")

    def watch(self, code: Callable[[], Any]) -> Any:
        """
        Runs the code of a sample. If an op has raised an error, it is raised again,
        whatever the code did with it: another sample, or one alone, might have an
        answer.
        """
        if self.eager:
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
        shared: list[T] = []
        given = (*args, *kwargs.values()) if kwargs else args
        self.find_shared(given, shared)
        if not shared or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        leaves = [x for x in shared if self._is_constant(x)]
        if leaves:
            constants = {id(x): x.detach() for x in leaves}
            made = call_with(constants, partial(self.call, func), args, kwargs)
            # A new layer that the forward makes, and may drop, is initialized first.
            initializes = changes_in_place(func) and args[0] is leaves[0]
            if isinstance(made, (T, list, tuple)) and not initializes:
                self.check_leaves(leaves)
            return made
        for rule in RULES.get(func, ()):
            op = rule(*args, **kwargs)
            if op is not None and self._holds(op):
                made = self.by_rule(func, op, args, kwargs)
                if made is not None:
                    return made
        batched = _any_batched(given)
        if batched and is_composite(func):
            with self:
                return decomposed(func)(*args, **kwargs)
        if not batched:
            made = func(*args, **kwargs)
            if not _any_batched((made,)):
                return self.made(func, args, kwargs, made)
            # The op has drawn random numbers for each sample.
        if self.eager and changes_in_place(func) and shared[0] is args[0]:
            raise NotAtOnce("a value computed from parameters that data change")
        return call_with({id(x): self.copy(x) for x in shared}, func, args, kwargs)

    def made(self, func: Callable, args: tuple, kwargs: dict, made: Any) -> Any:
        """Called with each op of parameters without data; returns its result."""
        return made

    def _holds(self, op: Op) -> bool:
        for p in op.params:
            if p is not None and (is_batched(p) or p.dtype.is_complex):
                return False
        for x in op.data:
            if x.dtype.is_complex:
                return False
        # If the first is not shared, the gradients of the others need no data.
        return self.is_shared(op.params[0]) and not all(map(self.is_shared, op.data))

    def _is_constant(self, x: T) -> bool:
        """Returns True if it is a leaf that is not among the parameters."""
        return x.is_leaf and id(x) not in self.params

    def check_leaves(self, leaves: list[T]) -> None:
        """Called with leaves that are not among the parameters, where ops use them."""

    def reach(self, x: T) -> None:
        """Called with a tensor whose data may be written without a new version."""

    # -- uses --------------------------------------------------------------------------

    def value(self, x: T) -> ParameterValue:
        """Returns the record of a parameter, or of a value computed from some."""
        key = id(x)
        if key not in self._values or self._values[key].version != x._version:
            self._values[key] = ParameterValue(x)
        return self._values[key]

    def by_rule(self, func: Callable, op: Op, args: tuple, kwargs: dict) -> T | None:
        """
        Runs an op that has a rule, and records its uses of parameters. Returns None if
        its output is complex, as factors are real.
        """
        values = [self.value(p) if self.is_shared(p) else None for p in op.params]
        data = [self.copy(x) if self.is_shared(x) else x for x in op.data]
        whole = op.whole if self.eager and any(map(is_batched, data)) else None
        if whole is None:
            swap = {id(v.tensor): v.shared for v in values if v is not None}
            swap.update((id(x), y) for x, y in zip(op.data, data) if y is not x)
            y = call_with(swap, func, args, kwargs)
        with self.outside():
            data = [self.inner(x) for x in data]
            if whole is None:
                y = self.inner(y)
            else:
                params = zip(op.params, values)
                y = whole([p if v is None else v.shared for p, v in params], *data)
            if y.dtype.is_complex:
                return None
            first = 1 if self.eager else 0  # dims of samples
            rows = [x.ndim - first - n for x, n in zip(data, op.data_dims)]
            at = y.ndim - first - op.event_dims
            return self.note(y, tuple(values), op.factors, at, data, tuple(rows))

    def own(self, x: T | None) -> T | None:
        """Returns per-sample copies if ``x`` is made of parameters, else ``x``."""
        if x is None or not (self.is_shared(x) and torch.is_grad_enabled()):
            return x
        if self._is_constant(x):
            self.check_leaves([x])
            return x.detach()
        return self.copy(x)

    def copy(self, x: T) -> T:
        """Returns one copy for each sample, without memory, at the vmap level."""
        value = self.value(x)
        found = self._copies.get(id(value))
        if found is None:
            with self.outside():
                use = (value,), of_copies, 0, (), ()
                found = self.note(self.inner(value.shared), *use)
            self._copies[id(value)] = found
        return found

    def note(self, y: T, *use: Any) -> T:
        """
        Records a use of parameters, given by the first fields of ``ParameterUse``.
        Called outside; returns the output ``y [B, *rows, *event]`` at the vmap level.
        """
        if not y.requires_grad:
            y.requires_grad_()
        ends, versions = True, []
        for x in use[3]:
            ends &= not x.requires_grad
            versions.append(x._version)
        source = get_gradient_edge(y) if ends else None
        y = _unsafe_view(y, y.shape)  # a node that in-place changes do not replace
        edge = get_gradient_edge(y)
        given: Any = (*use, tuple(versions), edge, source)
        self.uses.append(ParameterUse(*given))
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
