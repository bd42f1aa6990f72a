"""Samples that run at once, each by itself, and the uses they make of parameters.

The code runs under vmap, so what is one a sample and what all samples share is known at
each op. :class:`SampleGroup` is the mode that sees the ops in which something made of
parameters meets data. An op with a rule (rules/) is computed with the value that all
samples share, and what it returns is noted with the data: the gradient that arrives
there is a factor of the per-sample gradients. Any other op is given one copy of the
value for each sample, expanded without memory, whose gradient is the answer.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.core.uses import (
    FactorsFn,
    ParameterUse,
    ParameterValue,
    of_copies,
)
from opacus_ext.grad_sample.core.vmap import (
    Level,
    is_batched,
    is_composite,
    opened,
    saved_tensor_hooks,
)
from opacus_ext.grad_sample.rules import HANDLERS, RULES, NotAtOnce, Op

T = torch.Tensor
_unsafe_view = torch.ops.aten._unsafe_view.default


def is_shared(x: Any) -> bool:
    """Whether it is made of parameters, the same for all samples."""
    return isinstance(x, T) and x.requires_grad and not is_batched(x)


def find_shared(args: Iterable, found: List[T]) -> bool:
    """
    Adds what is made of parameters to ``found``.

    Returns:
        whether something is one a sample
    """
    batched = False
    for x in args:
        if isinstance(x, T):
            if is_batched(x):
                batched = True
            elif x.requires_grad:
                found.append(x)
        elif type(x) in (list, tuple):
            batched |= find_shared(x, found)
    return batched


class BranchesDiffer(Exception):
    """
    Samples take different branches.

    Args:
        answers: the number of the answer of each sample, ``[B]``
    """

    def __init__(self, answers: T):
        super().__init__("samples take different branches")
        self.answers = answers


class SampleGroup(TorchFunctionMode):
    """
    Samples that run at once. What is done with a use is said by subclasses:
    :class:`EagerGroup`, and one for functions that are compiled (traced.py).

    Args:
        params: of which per-sample gradients are wanted
        size: number of samples

    Attributes:
        uses: of parameters, as the code came by them
    """

    eager = True  # whether code can step out of vmap
    is_batched = staticmethod(is_batched)
    is_shared = staticmethod(is_shared)
    find_shared = staticmethod(find_shared)

    def __init__(self, params: Iterable[T], size: int):
        super().__init__()
        self.params = {id(p) for p in params}
        self.size = size
        self.uses: List[ParameterUse] = []
        self._values: Dict[int, ParameterValue] = {}
        self._copies: Dict[int, T] = {}

    def agree(self, x: T) -> T:
        """
        The one value that all samples have, where the code asks for it.

        Raises:
            BranchesDiffer: if they have several
        """
        raise NotImplementedError

    def by_rule(self, func: Callable, op: Op, args: tuple, kwargs: dict) -> T:
        """An op whose rule states the factors."""
        raise NotImplementedError

    def copy(self, x: T) -> T:
        """One copy for each sample, without memory, as samples see it."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, *args, **(kwargs or {}))
        return self.call(func, *args, **(kwargs or {}))

    def call(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """An op on what samples see."""
        shared: List[T] = []
        batched = self.find_shared(args, shared)
        if kwargs:
            batched |= self.find_shared(kwargs.values(), shared)
        if not shared or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        constants = {id(x): x.detach() for x in shared if self._is_constant(x)}
        if constants:
            args, kwargs = swapped(args, constants), swapped_dict(kwargs, constants)
            return self.call(func, *args, **kwargs)
        op = self.rule_for(func, args, kwargs)
        if op is not None:
            return self.by_rule(func, op, args, kwargs)
        if batched:
            if is_composite(func):
                with self:
                    return opened(func)(*args, **kwargs)
            return self._by_copies(func, shared, args, kwargs)
        made = func(*args, **kwargs)
        if self.find_shared((made,), []):  # random numbers were drawn for each sample
            return self._by_copies(func, shared, args, kwargs)
        self.made(func, args, kwargs, made)
        return made

    def made(self, func: Callable, args: tuple, kwargs: dict, made: Any) -> None:
        """Is told what was made of parameters without data."""

    def _by_copies(
        self, func: Callable, shared: Sequence[T], args: tuple, kwargs: dict
    ) -> Any:
        """The general rule: one copy a sample of what is made of parameters."""
        swap = {id(x): self.copy(x) for x in shared}
        return func(*swapped(args, swap), **swapped_dict(kwargs, swap))

    def rule_for(self, func: Callable, args: tuple, kwargs: dict) -> Optional[Op]:
        """What the rule of an op says of a call; None where there is none for it."""
        for rule in RULES.get(func, ()):
            op = rule(*args, **kwargs)
            if op is not None and self._holds(op):
                return op
        return None

    def _holds(self, op: Op) -> bool:
        params = [p for p in op.params if p is not None]
        if not any(map(self.is_shared, params)) or any(map(is_batched, params)):
            return False
        if any(x.is_complex() for x in (*params, *op.data)):
            return False
        return not all(self.is_shared(x) for x in op.data)  # made of parameters alone

    def own(self, x: Optional[T]) -> Optional[T]:
        """What is made of parameters, as a copy for each sample; else as it is."""
        return self.copy(x) if self.is_shared(x) and torch.is_grad_enabled() else x

    def value(self, x: T) -> ParameterValue:
        """What is known of something made of parameters."""
        found = self._values.get(id(x))
        if found is None:
            found = self._values[id(x)] = ParameterValue(x)
        return found

    def _is_constant(self, x: T) -> bool:
        """Whether it is a leaf whose gradient is not wanted."""
        return x.is_leaf and id(x) not in self.params


class EagerGroup(SampleGroup):
    """
    Samples that run at once, op by op: autograd's graph is there at each use.

    Args:
        params: of which per-sample gradients are wanted
        size: number of samples
        attached: whether gradients of the whole group will be asked for as well

    Attributes:
        told_data: whether the code was told a number of the data
    """

    def __init__(self, params: Iterable[T], size: int, attached: bool = False):
        super().__init__(params, size)
        self.attached = attached
        self.level = Level(size)
        self.wrap = self.level.wrap
        self.told_data = False
        self._earlier: List[ParameterValue] = []  # of tensors changed in place since
        self._packing = saved_tensor_hooks()

    # -- what samples see and what they are --------------------------------------------

    def inner(self, x: T) -> T:
        """The values of all samples, ``[B, *shape]``, also of what they share."""
        return self.level.unwrap(x) if is_batched(x) else x.expand(self.size, *x.shape)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """
        Within, tensors are those of all samples; see :meth:`inner`.

        Raises:
            NotAtOnce: inside another transform of torch.func
        """
        if not self.level.innermost:
            raise NotAtOnce("a parameter or a branch inside another transform")
        with self.level.outside():
            yield

    def agree(self, x: T) -> T:
        if not is_batched(x):
            return x
        self.told_data = True
        with self.outside():
            values = self.level.unwrap(x).detach()
            flat = values.reshape(self.size, -1)
            if bool((flat == flat[:1]).all()):
                return values[0]
            answers = torch.unique(flat, dim=0, return_inverse=True)[1]
            if not bool(answers.any()):  # not a number, which equals nothing
                answers = torch.arange(self.size)
            raise BranchesDiffer(answers)

    # -- uses --------------------------------------------------------------------------

    def by_rule(self, func: Callable, op: Op, args: tuple, kwargs: dict) -> T:
        values = [self.value(p) if is_shared(p) else None for p in op.params]
        data = [self.copy(x) if is_shared(x) else x for x in op.data]
        kept = [self.inner(x) for x in data]
        if op.whole is None or not any(map(is_batched, data)):
            swap = {id(v.tensor): v.shared for v in values if v is not None}
            swap.update((id(x), y) for x, y in zip(op.data, data) if y is not x)
            y = func(*swapped(args, swap), **swapped_dict(kwargs, swap))
            with self.outside():
                return self._note(self.inner(y), values, op, kept)
        params = [p if v is None else v.shared for p, v in zip(op.params, values)]
        with self.outside():
            return self._note(op.whole(params, *kept), values, op, kept)

    def _note(
        self,
        y: T,
        values: Sequence[Optional[ParameterValue]],
        op: Op,
        kept: Sequence[T],
    ) -> T:
        rows = y.dim() - 1 - op.event_dims
        data_rows = tuple(x.dim() - 1 - n for x, n in zip(kept, op.data_dims))
        return self.note(y, values, op.factors, rows, kept, data_rows)

    def copy(self, x: T) -> T:
        value = self.value(x)
        found = self._copies.get(id(value))
        if found is None:
            with self.outside():
                wide = value.shared.expand(self.size, *value.shape)
                found = self.note(wide, [value], of_copies, 0, (), ())
            self._copies[id(value)] = found
        return found

    def value(self, x: T) -> ParameterValue:
        found = self._values.get(id(x))
        if found is not None and found.version != x._version:
            self._earlier.append(self._values.pop(id(x)))
        found = super().value(x)
        if found.version is None:
            found.version = x._version
            found.edge = None if x.is_leaf else get_gradient_edge(x)
        if self.attached and not found.shared.requires_grad:
            with self.outside():
                found.shared.requires_grad_()
        return found

    def note(
        self,
        y: T,
        values: Sequence[Optional[ParameterValue]],
        factors: FactorsFn,
        rows: int,
        kept: Sequence[T],
        data_rows: tuple,
    ) -> T:
        """
        Notes what an op made of parameters; called outside.

        Args:
            y: what it returned, ``[B, *rows, *event]``
            values: what it was made of
            factors: see :class:`~uses.ParameterUse`, as are the others

        Returns:
            ``y`` as samples see it.
        """
        if saved_tensor_hooks() != self._packing:
            raise NotAtOnce("activation checkpointing")
        if not y.requires_grad:
            y.requires_grad_()
        # Not a view, so that a later change in place leaves the edge where it is.
        is_source = not any(x.requires_grad for x in kept)
        source = get_gradient_edge(y) if is_source else None
        y = _unsafe_view(y, y.shape)
        edge = get_gradient_edge(y)
        use = ParameterUse(
            *(edge, source, tuple(values), factors, rows, kept, data_rows),
            versions=tuple(x._version for x in kept),
        )
        self.uses.append(use)
        return self.level.wrap(y)

    def of_others(
        self,
        run: Callable[..., T],
        given: Sequence[T],
        size: int,
        samples: Optional[T] = None,
    ) -> T:
        """
        What ``run`` makes of samples that are others than this group's; called outside.

        Args:
            run: called as one of them sees what is given
            given: of all that run, ``[n, ...]``
            size: the number of samples that they are among
            samples: which of these they are; None for all
        """
        inner = copy.copy(self)
        EagerGroup.__init__(inner, (), len(given[0]), self.attached)
        inner.params = self.params
        with inner.level:
            wrapped = [inner.wrap(x) for x in given]
            with inner:
                y = run(*wrapped)
            y = inner.inner(y)
        self.uses += [x._replace(size=size, samples=samples) for x in inner.uses]
        self._earlier += inner.values()
        self.told_data |= inner.told_data
        return y

    def forget(self) -> None:
        """Lets go of what samples see, which has no meaning after the run."""
        self._copies.clear()

    def values(self) -> List[ParameterValue]:
        """All values made of parameters that have met data."""
        return [*self._values.values(), *self._earlier]


def swapped(args: Any, swap: Dict[int, T]) -> Any:
    """Arguments with some tensors in the place of others, by their ids."""
    return type(args)(
        [
            (
                swap.get(id(x), x)
                if isinstance(x, T)
                else swapped(x, swap) if type(x) in (list, tuple) else x
            )
            for x in args
        ]
    )


def swapped_dict(kwargs: dict, swap: Dict[int, T]) -> dict:
    """The same of keyword arguments."""
    return dict(zip(kwargs, swapped(list(kwargs.values()), swap)))
