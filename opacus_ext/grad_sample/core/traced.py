"""Samples that run at once in a function that is compiled.

There autograd's graph is not there yet, and nothing can step out of vmap. So each use
has a *slot*, an argument of the function of all samples, ``[B, *shape]``: zeros that
are added to what an op with a rule returns, or the copies of a parameter. The gradients
of the slots are what arrives at the uses; the rest is the same.
"""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch

from opacus_ext.grad_sample.core.gradients import Collector
from opacus_ext.grad_sample.core.group import (
    SampleGroup,
    find_shared,
    is_shared,
    swapped,
    swapped_dict,
)
from opacus_ext.grad_sample.core.uses import (
    FactorsFn,
    ParameterUse,
    ParameterValue,
    of_copies,
)
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.rules import NotAtOnce, Op

T = torch.Tensor


class Recipe(NamedTuple):
    """
    How something was made of parameters, without data.

    Attributes:
        func: that was called
        args: with these, and with ``kwargs``
        place: in what it returned, if that is a tuple
        made: what it was, kept for its id
        parts: of the arguments, what is made of parameters
    """

    func: Callable
    args: tuple
    kwargs: dict
    place: Optional[int]
    made: T
    parts: List[T]


# What may give back what it was given.
_UNCHANGED = (T.to, T.type_as, T.contiguous, T.float, T.double, T.half, T.bfloat16)


class TracedValue(ParameterValue):
    """
    See :class:`~uses.ParameterValue`: there is no graph yet, so it is made again.

    Args:
        tensor: a parameter, or what a recipe has made
        recipes: by the id of what each has made
    """

    def __init__(self, tensor: T, recipes: Dict[int, Recipe]):
        super().__init__(tensor)
        self.recipes = recipes

    def leaves(self) -> List[T]:
        found: Dict[int, T] = {}
        todo = [self.tensor]
        while todo:
            x = todo.pop()
            recipe = self.recipes.get(id(x))
            if recipe is None:
                found[id(x)] = x
            else:
                todo += recipe.parts
        return list(found.values())

    def pull(self, leaves: List[T], grads: T) -> Sequence[Optional[T]]:
        def again(*given: T) -> T:
            made = {id(x): y for x, y in zip(leaves, given)}
            return self._again(self.tensor, made)

        _, vjp = torch.func.vjp(again, *(x.detach() for x in leaves))
        return torch.vmap(vjp)(grads)

    def _again(self, x: T, made: Dict[int, T]) -> T:
        recipe = self.recipes.get(id(x))
        if id(x) in made or recipe is None:
            return made.get(id(x), x)
        for y in recipe.parts:
            made[id(y)] = self._again(y, made)
        args = swapped(recipe.args, made)
        found = recipe.func(*args, **swapped_dict(recipe.kwargs, made))
        return found if recipe.place is None else found[recipe.place]


class TracedGroup(SampleGroup):
    """
    Samples that run at once, in a function that is compiled.

    Args:
        params: see :class:`~group.SampleGroup`
        size: the same
        slots: as samples see them; None to find out which there are
        tracked: what the run has found that found these out
    """

    eager = False

    def __init__(
        self,
        params: Sequence[T],
        size: int,
        slots: Optional[Sequence[T]] = None,
        tracked: Sequence[bool] = (),
    ):
        super().__init__(params, size)
        self.all, self.slots, self._known = params, slots, tracked
        self.likes: List[Tuple[Tuple[int, ...], torch.dtype]] = []  # the slots, by use
        self.kept: List[List[T]] = []  # by use, its data, as samples see them

        self._recipes: Dict[int, Recipe] = {}
        self.tracked: List[bool] = []  # of what was made of parameters: has a gradient

    def agree(self, x: T) -> T:
        if is_batched(x):
            raise NotAtOnce("a branch on data")
        return x

    # Inside a transform that differentiates, what was computed from parameters does
    # not say that it requires a gradient: the first run, outside, has found that out.

    def is_shared(self, x: Any) -> bool:
        return id(x) in self.params or id(x) in self._recipes or is_shared(x)

    def find_shared(self, args: Iterable, found: List[T]) -> bool:
        batched = find_shared(args, found)
        given = (x for y in args for x in (y if type(y) in (list, tuple) else (y,)))
        found += [x for x in given if id(x) in self._recipes and not x.requires_grad]
        return batched

    def _is_constant(self, x: T) -> bool:
        return id(x) not in self._recipes and super()._is_constant(x)

    def made(self, func: Callable, args: tuple, kwargs: dict, made: Any) -> None:
        parts: List[T] = []
        self.find_shared((*args, *kwargs.values()), parts)
        several = isinstance(made, (tuple, list))
        for place, x in enumerate(made if several else [made]):
            if not isinstance(x, T):
                continue
            n = len(self.tracked)
            first = self.slots is None
            self.tracked.append(x.requires_grad if first else self._known[n])
            if not self.tracked[n]:
                continue
            if not any(x is y for y in args):
                at = place if several else None
                self._recipes[id(x)] = Recipe(func, args, kwargs, at, x, parts)
            elif func not in _UNCHANGED:
                raise NotAtOnce("a parameter that is changed in place")

    def value(self, x: T) -> ParameterValue:
        found = self._values.get(id(x))
        if found is None:
            if id(x) not in self.params and id(x) not in self._recipes:
                raise NotAtOnce("an attribute of a parameter (w.T; write w.t())")
            found = self._values[id(x)] = TracedValue(x, self._recipes)
        return found

    def by_rule(self, func: Callable, op: Op, args: tuple, kwargs: dict) -> T:
        values = [self.value(p) if self.is_shared(p) else None for p in op.params]
        data = [self.copy(x) if self.is_shared(x) else x for x in op.data]
        swap = {id(v.tensor): v.shared for v in values if v is not None}
        swap.update((id(x), y) for x, y in zip(op.data, data) if y is not x)
        y = func(*swapped(args, swap), **swapped_dict(kwargs, swap))
        rows = y.dim() - op.event_dims
        data_rows = tuple(x.dim() - n for x, n in zip(data, op.data_dims))
        slot = self._slot((y.shape, y.dtype), values, op.factors, rows, data, data_rows)
        return y if slot is None else y + slot

    def uses_in_words(self) -> str:
        """What each use is made of, and how: equal for runs that are the same."""
        numbers = {id(p): i for i, p in enumerate(self.all)}
        words = []
        for use, (shape, dtype) in zip(self.uses, self.likes):
            words.append(type(use.factors).__name__)
            words.append(str(tuple(shape)) + str(dtype) + str(use.data_rows))
            for v in use.values:
                if v is not None:
                    words.append(str(numbers.get(id(v.tensor))) + str(tuple(v.shape)))
        return " ".join(words)

    def make_slots(self) -> List[T]:
        """Zeros, which take no memory."""
        device = self.all[0].device
        return [
            torch.zeros((), dtype=dtype, device=device).expand(self.size, *shape)
            for shape, dtype in self.likes
        ]

    def copy(self, x: T) -> T:
        value = self.value(x)
        found = self._copies.get(id(value))
        if found is None:
            like = (value.shape, value.shared.dtype)
            slot = self._slot(like, [value], of_copies, 0, [], ())
            found = value.shared if slot is None else value.shared + slot
            self._copies[id(value)] = found
        return found

    def _slot(
        self,
        like: Any,
        values: List[Optional[ParameterValue]],
        factors: FactorsFn,
        rows: int,
        data: List[T],
        data_rows: Tuple[int, ...],
    ) -> Optional[T]:
        number = len(self.uses)
        use = ParameterUse(number, None, tuple(values), factors, rows, [], data_rows)
        self.uses.append(use)
        self.likes.append(like)
        self.kept.append(data)
        return None if self.slots is None else self.slots[number]


class Traced(NamedTuple):
    """
    What a run of samples by slots returns.

    Attributes:
        output: of all samples ``[B, ...]``
        kept: by use, the data that its factors need ``[B, ...]``
        group: that saw the uses of parameters
    """

    output: Any
    kept: List[List[T]]
    group: TracedGroup


def find_uses(
    run: Callable[[List[Any]], Any],
    leaves: List[T],
    group: TracedGroup,
) -> None:
    """
    A first run of samples, which finds the uses they make of parameters.

    Args:
        run: what a sample returns, of its leaves
        leaves: tensors ``[B, ...]``
        group: without slots

    Raises:
        NotAtOnce: if parameters are used where it can't be seen
    """

    def first(leaves: List[T]) -> Any:
        with group:
            return run(leaves)

    with torch.enable_grad():
        output = torch.vmap(first, randomness="different")(leaves)
    if any(x.requires_grad for x in output):
        raise NotAtOnce("a use of a parameter that is not seen (an autograd function)")


def run_with_slots(
    run: Callable[[List[Any]], Any],
    leaves: List[T],
    params: Sequence[T],
    size: int,
    slots: List[T],
    tracked: Sequence[bool],
) -> Traced:
    """
    The samples with their slots.

    Args:
        run: see :func:`find_uses`
        slots: of the group that has run first
        tracked: of the same
    """
    groups: List[TracedGroup] = []

    def one(leaves: List[T], slots: List[T]) -> Any:
        group = TracedGroup(params, size, slots, tracked)
        groups.append(group)
        with group:
            output = run(leaves)
        return output, group.kept

    output, kept = torch.vmap(one, randomness="different")(leaves, slots)
    return Traced(output, kept, groups[0])


def collect(
    uses: List[ParameterUse],
    kept: List[List[T]],
    grads: Sequence[Optional[T]],
    params: List[T],
    size: int,
) -> Dict[int, GradSample]:
    """The per-sample gradients, by the ids of the parameters."""
    uses = [use._replace(data=data) for use, data in zip(uses, kept)]
    collector = Collector({id(p): p for p in params}, size, uses)
    for use, g in zip(uses, grads):
        if g is not None:
            collector.add(use, g)
    return collector.finish()
