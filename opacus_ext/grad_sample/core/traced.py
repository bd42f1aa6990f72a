"""Samples that run at once in a function that is compiled.

There autograd's graph is not there yet, and nothing can step out of vmap. So each use
has a *slot*, an argument of the function of all samples, ``[B, *shape]``: zeros that
are added to what an op with a rule returns, or the copies of a parameter. The gradients
of the slots are what arrives at the uses; the rest is the same.
"""

from __future__ import annotations

from contextlib import nullcontext
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
from opacus_ext.grad_sample.core.group import SampleGroup, call_with
from opacus_ext.grad_sample.core.groups import Samples, version
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.rules import NotAtOnce

T = torch.Tensor


# How something was made of parameters, without data: a function, its arguments, a place
# in what it returned if that was a tuple, what of the arguments is made of parameters,
# and what was made, kept for its id.
Recipe = tuple[Callable, tuple, dict, "int | None", list[T], T]

# What may give back what it was given.
_UNCHANGED = (T.to, T.type_as, T.contiguous, T.float, T.double, T.half, T.bfloat16)


class TracedValue(ParameterValue):
    """
    A parameter, or what a recipe has made of parameters. There is no graph yet, so it
    is made again to follow gradients back.
    """

    edge = None

    def __init__(self, tensor: T, recipes: dict[int, Recipe]):
        self.tensor, self.shape, self.shared = tensor, tensor.shape, tensor.detach()
        self.recipes = recipes

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


class TracedGroup(SampleGroup):
    """Samples that run at once, in a function that is compiled."""

    eager = False

    def __init__(self, params: Sequence[T], size: int):
        super().__init__(params, size)
        self.all = params
        self.slots: Sequence[T] | None = None  # as samples see them
        self.likes: list[tuple[torch.Size, torch.dtype]] = []  # the slots, by use
        self._recipes: dict[int, Recipe] = {}

    def inner(self, x: T) -> T:
        return x

    def outside(self) -> ContextManager:
        return nullcontext()

    def agree(self, x: T) -> T:
        if is_batched(x):
            raise NotAtOnce("a branch on data")
        return x

    # Inside a transform that differentiates, what was computed from parameters does
    # not say that it requires a gradient. If it does not, its gradient is zero.

    def is_shared(self, x: Any) -> bool:
        own = id(x) in self.params or id(x) in self._recipes
        return own or super().is_shared(x)

    def find_shared(self, args: Iterable, found: list[T]) -> None:
        super().find_shared(args, found)
        given = (x for y in args for x in (y if type(y) in (list, tuple) else (y,)))
        found += [x for x in given if id(x) in self._recipes and not x.requires_grad]

    def _is_constant(self, x: T) -> bool:
        return id(x) not in self._recipes and super()._is_constant(x)

    def made(self, func: Callable, args: tuple, kwargs: dict, made: Any) -> None:
        parts: list[T] = []
        self.find_shared((*args, *kwargs.values()), parts)
        several = isinstance(made, (tuple, list))
        if func is T.__setitem__:  # which gives None
            made = args[0]
        for place, x in enumerate(made if several else [made]):
            if not (isinstance(x, T) and (x.is_floating_point() or x.is_complex())):
                continue
            if not any(x is y for y in args):
                at = place if several else None
                self._recipes[id(x)] = (func, args, kwargs, at, parts, x)
            elif func not in _UNCHANGED:
                raise NotAtOnce("a parameter that is changed in place")

    def value(self, x: T) -> ParameterValue:
        if id(x) not in self._values:
            if id(x) not in self.params and id(x) not in self._recipes:
                raise NotAtOnce("an attribute of a parameter (w.T; write w.t())")
            self._values[id(x)] = TracedValue(x, self._recipes)
        return self._values[id(x)]

    def note(self, y: T, *use: Any) -> T:
        noted = ParameterUse(*use)
        # As they are now: the compiler copies what is changed in place later alone.
        data = tuple(x.clone() for x in noted.data)
        self.uses.append(noted._replace(data=data))
        self.likes.append((y.shape, y.dtype))
        return y if self.slots is None else y + self.slots[len(self.uses) - 1]

    def uses_in_words(self) -> str:
        """What each use is made of, and how: equal for runs that are the same."""
        numbers = {id(p): i for i, p in enumerate(self.all)}
        words = []
        for use, (shape, dtype) in zip(self.uses, self.likes):
            kind = type(use.factors).__name__
            words.append(f"{kind} {tuple(shape)} {dtype} {use.data_rows}")
            values = [v for v in use.values if v is not None]
            words += [f"{numbers.get(id(v.tensor))}{tuple(v.shape)}" for v in values]
        return " ".join(words)

    def make_slots(self) -> list[T]:
        """Makes slots of zeros, which take no memory."""
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
        Runs all samples, with their slots; the first run finds the uses.

        Returns:
            what they return ``[B, ...]``, and by use the data that its factors need
        """
        first = slots is None
        places = [i for i, own in enumerate(samples.by_sample) if own]

        def one(own: list[T], slots: list[T]) -> Any:
            leaves = list(samples.leaves)
            for i, x in zip(places, own):
                leaves[i] = x
            self.slots = None if first else slots
            with self:
                found = call(tree_unflatten(leaves, samples.spec))
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
        self, kept: list[list[T]], grads: Sequence[T | None], size: int
    ) -> GradSamples:
        """The per-sample gradients, of the data kept and the slots' gradients."""
        uses = [use._replace(data=data) for use, data in zip(self.uses, kept)]
        collector = Collector(self.all, size, uses)
        for use, g in zip(uses, grads):
            if g is not None:
                collector.add(use, g)
        return collector.finish()
