"""Samples that run together in compiled code.

While code is traced there is no autograd graph, and it can't leave the vmap level. So
each use has a *slot* ``[B, *shape]``, an argument of the traced function that is zero
and is added to the output of the op, or to the copies of the parameter. The gradient of
the slot is the backprops of the use.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, ContextManager, Iterable, Sequence

import torch
from torch.utils._pytree import tree_unflatten

from opacus_ext.grad_sample.core.gradients import (
    UNSEEN,
    Collector,
    GradSamples,
    ParameterUse,
    ParameterValue,
)
from opacus_ext.grad_sample.core.group import SampleGroup, call_with, swapped
from opacus_ext.grad_sample.core.groups import Samples, version
from opacus_ext.grad_sample.rules import (
    HANDLERS,
    IN_COMPILED,
    RULES,
    NotAtOnce,
    Op,
)
from opacus_ext.private_torch import is_batched, renewed

T = torch.Tensor


# How a value was computed from parameters without data: function, args, kwargs, index
# in its output if that is a tuple, arguments that depend on parameters, and the value.
Recipe = tuple[Callable, tuple, dict, "int | None", list[T], T]

# Functions that may return their argument.
_UNCHANGED = (
    *(T.to, T.type, T.type_as, T.contiguous),
    *(T.float, T.double, T.half, T.bfloat16),
)


def _kind(x: T) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device


class TracedValue(ParameterValue):
    """A parameter, or a value that is computed again to backpropagate through it."""

    edge = None

    def __init__(self, tensor: T, recipes: dict[int, Recipe]):
        self.tensor, self.shape, self.key = tensor, tensor.shape, id(tensor)
        self.shared, self.recipes = tensor.detach(), recipes

    def leaves(self) -> list[T]:
        todo, found = [self.tensor], {}
        for x in todo:
            todo += self.recipes[id(x)][4] if id(x) in self.recipes else []
            found[id(x)] = x
        return [x for i, x in found.items() if i not in self.recipes]

    def pull(self, leaves: list[T], grads: T) -> Sequence[T | None]:
        def again(*given: T) -> T:
            made = {id(x): y for x, y in zip(leaves, given)}
            return self._again(self.tensor, made)

        _, vjp = torch.func.vjp(again, *(x.detach() for x in leaves))
        return torch.vmap(vjp)(grads)

    def _again(self, x: T, made: dict[int, T]) -> T:
        if id(x) in made or id(x) not in self.recipes:
            return made.get(id(x), x)
        func, args, kwargs, place, parts, _ = self.recipes[id(x)]
        for y in parts:
            made[id(y)] = self._again(y, made)
        found = call_with(made, func, args, kwargs)
        return found if place is None else found[place]


_forwards: list[list[Any]] = []  # for each running forward, what called forgets()


def forgets(module: Any) -> None:
    """
    Called by a module whose forward sets the attributes named in ``module.transient``.
    As these hold tensors of a sample, they are set to None after its forward.
    """
    if _forwards:
        _forwards[-1].append(module)


class _Attach(torch.autograd.Function):
    """The identity, whose gradient is that of the slot, too: no sum is computed."""

    @staticmethod
    def forward(context: Any, y: T, slot: T) -> T:
        return renewed(y, y.shape)

    @staticmethod
    def backward(context: Any, g: T) -> tuple[T, T]:
        return g, g


# An op, as Dynamo would look into the function; the compiler's autograd runs it.
_library = torch.library.Library("opacus_ext", "FRAGMENT")
_library.define("attach(Tensor y, Tensor slot) -> Tensor")
_library.impl("attach", _Attach.apply, "Autograd")
_attach = "opacus_ext::attach"


def _attach_all(info: Any, in_dims: tuple, y: T, slot: T) -> tuple[T, int]:
    slot = slot.movedim(in_dims[1], 0)
    if in_dims[0] is None:  # a parameter, of which no output may be a view
        return y + slot, 0
    return torch.ops.opacus_ext.attach(y.movedim(in_dims[0], 0), slot), 0


torch.library.register_vmap(_attach, _attach_all, lib=_library)


class TracedGroup(SampleGroup):
    """
    Samples that run together in compiled code. With ``attaches`` the slots are leaves
    of autograd, and Inductor does not add them.
    """

    eager = False

    def __init__(self, params: Sequence[T], size: int, attaches: bool = False):
        super().__init__(params, size)
        self.all, self.attaches = params, attaches
        self.slots: Sequence[T] | None = None  # at the vmap level
        self.likes: list[tuple[torch.Size, torch.dtype]] = []  # slots' shapes, dtypes
        self._recipes: dict[int, Recipe] = {}

    def inner(self, x: T) -> T:
        return x

    def outside(self) -> ContextManager:
        return nullcontext()

    def agree(self, x: T) -> T:
        if is_batched(x):
            raise NotAtOnce("a branch on data")
        return x

    # Inside torch.func.grad, values computed from parameters may lack requires_grad:
    # recipes tell them from constants.

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func is T.unflatten:
            func = torch.unflatten  # Dynamo does not trace super() in the method
        by_handler = func in HANDLERS and func not in IN_COMPILED
        run = partial(HANDLERS[func], self) if by_handler else self.call
        try:
            return run(func, *args, **kwargs or {})
        except Exception as error:
            if self.signal is None:
                self.signal = error
            raise

    def is_shared(self, x: Any) -> bool:
        own = id(x) in self.params or id(x) in self._recipes
        return own or super().is_shared(x)

    def find_shared(self, args: Iterable) -> dict[int, T]:
        found = super().find_shared(args)
        given = (x for y in args for x in (y if type(y) in (list, tuple) else (y,)))
        found.update((id(x), x) for x in given if id(x) in self._recipes)
        return found

    def constants(self, shared: dict[int, T]) -> list[T]:
        return [x for x in super().constants(shared) if id(x) not in self._recipes]

    def call(self, func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        own = IN_COMPILED.get(func, func)
        return super().call(own if own in RULES else func, *args, **kwargs)

    def run_op(self, func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        return IN_COMPILED.get(func, func)(*args, **kwargs)

    def check_in_place(self, func: Callable, args: tuple, shared: dict) -> None:
        """Does nothing: :meth:`made` and :meth:`run_op` see to it."""

    def made(self, func: Callable, args: tuple, kwargs: dict, made: Any) -> Any:
        same = func in _UNCHANGED and isinstance(made, T)  # w.type() gives a name
        if same and _kind(made) == _kind(args[0]):
            return args[0]  # a tracer may take them for two tensors
        parts = list(self.find_shared((*args, *kwargs.values())).values())
        several = isinstance(made, (tuple, list))
        whole = args[0] if func is T.__setitem__ else made  # which returns None
        for place, x in enumerate(whole if several else [whole]):
            if not (isinstance(x, T) and (x.is_floating_point() or x.is_complex())):
                continue
            if not any(x is y for y in args):
                at = place if several else None
                self._recipes[id(x)] = (func, args, kwargs, at, parts, x)
            else:
                raise NotAtOnce("a parameter that is changed in place")
        return made

    def value(self, x: T, key: int) -> ParameterValue:
        if key not in self._values:
            if key not in self.params and key not in self._recipes:
                raise NotAtOnce("an attribute of a parameter (w.T; write w.t())")
            self._values[key] = TracedValue(x, self._recipes)
        return self._values[key]

    def by_rule(
        self, func: Callable, op: Op, shared: dict[int, T], args: tuple, kwargs: dict
    ) -> T | None:
        values = self.values_of(op, shared)
        if values is None:
            return None
        data = [self.copy(x) if id(x) in shared else x for x in op.data]
        run = IN_COMPILED.get(func, func)
        y = call_with(swapped(op, values, data), run, args, kwargs)
        if y.dtype.is_complex:
            return None
        return self.note(y, values, op.factors, op.event_dims, data, op.data_dims)

    def note(
        self,
        y: T,
        values: tuple[ParameterValue | None, ...],
        factors: Callable,
        event_dims: int,
        data: Sequence[T],
        data_dims: Sequence[int],
    ) -> T:
        """Records a use; ``y`` and ``data`` are as a sample sees them."""
        rows = tuple([x.ndim - n for x, n in zip(data, data_dims)])
        # Clones, as data may be changed in place later; the compiler removes others.
        data = tuple(x.clone() for x in data)
        self.uses.append(ParameterUse(values, factors, y.ndim - event_dims, data, rows))
        self.likes.append((y.shape, y.dtype))
        if self.slots is None:
            return y
        slot = self.slots[len(self.uses) - 1]
        return torch.ops.opacus_ext.attach(y, slot) if self.attaches else y + slot

    def signature(self) -> str:
        """Describes the uses; equal for traces that use parameters in the same way."""
        numbers = {id(p): i for i, p in enumerate(self.all)}
        texts = []
        for use, (shape, dtype) in zip(self.uses, self.likes):
            kind = type(use.factors).__name__
            texts.append(f"{kind} {tuple(shape)} {dtype} {use.data_rows}")
            values = [v for v in use.values if v is not None]
            texts += [f"{numbers.get(id(v.tensor))}{tuple(v.shape)}" for v in values]
        return " ".join(texts)

    def make_slots(self) -> list[T]:
        """Makes slots: zeros, expanded without memory."""
        device = self.all[0].device
        return [
            torch.zeros((), dtype=dtype, device=device).expand(self.size, *shape)
            for shape, dtype in self.likes
        ]

    def run(
        self,
        call: Callable[[Any], list[T]],
        samples: Samples,
        slots: Sequence[T] | None = None,
    ) -> tuple[list[T], list[list[T]]]:
        """
        Runs all samples with their slots; the first run, without, finds the uses.
        Returns the outputs ``[B, ...]``, and the saved data of each use.
        """
        first = slots is None
        places = [i for i, own in enumerate(samples.by_sample) if own]

        def one(own: list[T], slots: list[T]) -> Any:
            leaves = list(samples.leaves)
            for i, x in zip(places, own):
                leaves[i] = x
            self.slots = None if first else slots
            _forwards.append([])
            try:
                with self:
                    found = call(tree_unflatten(leaves, samples.spec))
                if self.signal is not None:  # which the code has caught
                    raise NotAtOnce("code that catches an error")
            finally:
                for module in _forwards.pop():
                    for name in module.transient:
                        setattr(module, name, None)
            return found, [list(use.data) for use in self.uses]

        run = torch.vmap(one, randomness="different")
        own = [samples.leaves[i].clone() for i in places]
        found, kept = run(own, [*(slots or ())])
        self.uses = [use._replace(data=()) for use in self.uses]
        if not torch.compiler.is_compiling() and any(map(version, own)):
            raise NotAtOnce("code that writes to its inputs")
        if first and any(x.requires_grad for x in found):
            raise NotAtOnce(UNSEEN)
        return found, kept

    def collect(
        self,
        kept: list[list[T]],
        grads: Sequence[T | None],
        size: int,
        mask: T | None = None,
    ) -> GradSamples:
        """
        Returns per-sample gradients, from saved data and the slots' gradients. Those of
        samples outside of the mask ``[B]`` are not used.
        """
        uses = [use._replace(data=data) for use, data in zip(self.uses, kept)]
        collector = Collector(self.all, size, uses, bundles=False, mask=mask)
        for use, g in zip(uses, grads):
            if g is not None:
                collector.add(use, g)
        collector.finish()
        return collector.samples
