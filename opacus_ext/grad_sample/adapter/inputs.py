"""The batch size of a call, and which of its inputs are samples.

The loader knows how many records it drew: tensors of that length are samples. A tensor
``[1, ...]`` beside them, if it is none of the loader's, is shared by all samples.
Anything else is refused by its name, unless ``shared=`` names it. To read a table as
samples is safe, since each sample sees its row; to read samples as a table is not: each
sample would see all of them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from opacus_ext.grad_sample.adapter import advice
from opacus_ext.grad_sample.adapter.objects import PLAIN
from opacus_ext.grad_sample.adapter.outputs import flatten
from opacus_ext.grad_sample.adapter.passes import Doubt, draw_of
from opacus_ext.grad_sample.core.groups import (
    Samples,
    samples_of,
    take_of_call,
    version,
)
from opacus_ext.grad_sample.core.values import set_apart
from opacus_ext.refused import Refused, warn_once

T = torch.Tensor
Take = Callable[[Any, int], Any]
_REST, _OTHERS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Inputs(NamedTuple):
    """The inputs of a call."""

    samples: list[Samples]  # one entry for each kind of sample
    size: int
    trained: Sequence[tuple[T, T]] = ()  # inputs with a gradient, and their leaves
    given: Any = None  # the ``(args, kwargs)`` of the call
    doubt: Doubt | None = None
    names: Sequence[str] = ()  # of the leaves of samples, if known


@dataclass(eq=False)
class Input:
    """A leaf of the arguments."""

    name: str  # such as ``state[0]``
    argument: str  # the argument that it is in
    items: int  # length of that, if it is a list, tuple, dict or ``*args``
    value: Any
    is_named: bool  # by ``shared=``
    dim: int | None = None  # the batch dim, if it has samples

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.value.shape)}"


class InputReader:
    """
    Finds the samples in the inputs of a model.

    Args:
        module: the model
        batch_dim: the batch dim of tensors
        take, shared: arguments of make_private

    Attributes:
        drawn: numbers of records of the batches that the loop may be at, the last one
            at the end
        ones: True if the loader's batches of several records have tensors [1, ...]
        most: the largest batch that it drew; None if unknown
        states: pairs (layers, width) of the hidden states of recurrent layers
    """

    def __init__(
        self,
        module: nn.Module,
        batch_dim: int = 0,
        take: Take | None = None,
        shared: Sequence[str] = (),
    ):
        self.module, self.name = module, type(module).__name__
        self.batch_dim, self.take, self.shared = batch_dim, take, set(shared)
        self.drawn: Sequence[int] = ()
        self.most: int | None = None
        self.ones = False
        #: Gives the keys of the loader's records, if they have some.
        self.fields: Callable[[], set[Any]] = set
        self.states = {
            (m.num_layers * (1 + m.bidirectional), width)
            for m in module.modules()
            if hasattr(m, "bidirectional")
            for width in (m.hidden_size, getattr(m, "proj_size", 0))
        }
        parameters = inspect.signature(module.forward).parameters
        kinds = {parameter.kind: name for name, parameter in parameters.items()}
        self._by_position = [n for n, p in parameters.items() if p.kind < _REST]
        self._rest = kinds.get(_REST, "args")  # what else is given by position
        unknown = {name.partition("[")[0] for name in self.shared} - {*parameters}
        if unknown and kinds.keys().isdisjoint({_REST, _OTHERS}):
            given = dict(unknown=sorted(unknown), known=", ".join(sorted(parameters)))
            raise advice.NOT_NAMED.of(self.name, "shared", **given)
        self._batched: dict[str, int] = {}  # batch dims of what has had samples
        self._longer: set[str] = set()  # what was longer than one: no table [1, ...]
        self._seen = WeakIdKeyDictionary()  # versions of tensors that had samples
        self._form: list[Samples] = []  # what take= gave, without data

    def read(self, args: tuple, kwargs: dict) -> Inputs:
        """Finds the samples of a call with these arguments, or refuses it."""
        if self.take is not None:
            return self._taken(self.take, args, kwargs)
        inputs, spec = self._read_arguments(args, kwargs)
        tensors = [x for x in inputs if self._may_be_samples(x)]
        names = [x.name for x in inputs]
        if not tensors:
            given = ", ".join(names) or "nothing"
            raise advice.NO_TENSOR.of(self.name, given=given)
        size = self._size(tensors)
        self._refuse_items(inputs, tensors, size)
        self._find_dims(tensors, size)
        doubt = self._doubt(tensors, size)
        self._tell_of_tables(tensors, size)
        leaves, trained = self._cut(inputs)
        by_sample = [x.dim is not None for x in inputs]
        samples = Samples(None, leaves, by_sample, spec, size)
        whole = tree_unflatten([x.value for x in inputs], spec)
        return Inputs([samples], size, trained, whole, doubt, names)

    def _taken(self, take: Take, args: tuple, kwargs: dict) -> Inputs:
        samples, size = samples_of((args, kwargs), take_of_call(take))
        if samples:
            self._form = [samples[0].select(torch.arange(0))]
        elif not self._form:
            raise advice.NEVER_TAKEN.of(self.name)
        return Inputs(samples or self._form, size, given=(args, kwargs))

    # -- arguments ---------------------------------------------------------------------

    def _read_arguments(
        self, args: tuple, kwargs: dict
    ) -> tuple[list[Input], TreeSpec]:
        """Returns the leaves of the arguments, and how these are made of them."""
        paths, spec = flatten((args, kwargs))
        rest = args[len(self._by_position) :]
        arguments = {**dict(zip(self._by_position, args)), self._rest: rest, **kwargs}
        names = [*self._by_position, *(f"{self._rest}[{i}]" for i in range(len(rest)))]
        inputs = []
        for (place, which, *inner), value in paths:
            top = str(which.key) if place.idx else names[which.idx]
            argument = top if top in arguments else self._rest
            whole, name = arguments[argument], top + keystr(tuple(inner))
            items = len(whole) if isinstance(whole, (list, tuple, dict)) else 0
            is_named = not self.shared.isdisjoint({name, top, argument})
            inputs.append(Input(name, argument, items, value, is_named))
        return inputs, spec

    def _may_be_samples(self, given: Input) -> bool:
        """Returns False for what all samples share; refuses what can't be cut."""
        x = given.value
        if given.is_named or isinstance(x, PLAIN) or inspect.isroutine(x):
            return False
        if isinstance(x, T) and x.layout is torch.strided and not x.is_nested:
            return x.dim() > 0
        raise advice.OF_A_KIND.of(self.name, given.name, **advice.kind_of(x))

    # -- the batch size ----------------------------------------------------------------

    def _length(self, x: T) -> int:
        return x.shape[min(self.batch_dim, x.dim() - 1)]

    def _is_state(self, x: T) -> bool:
        return x.dim() == 3 and (x.shape[0], x.shape[2]) in self.states

    def _size(self, tensors: list[Input]) -> int:
        """Returns the number of samples."""
        rows = [x for x in tensors if not self._is_state(x.value)]
        self._longer.update(x.name for x in rows if self._length(x.value) > 1)
        draws = [draw.size for x in tensors if (draw := draw_of(x.value)) is not None]
        if draws:
            lengths = [self._length(x.value) for x in tensors]
            lengths += [x.value.shape[1] for x in tensors if x not in rows]
            if draws[0] not in lengths:
                raise self._refused(advice.NO_ROWS, tensors, draws[0])
            return draws[0]
        had = [x for x in rows if x.name in self._batched]
        lengths = [self._length(x.value) for x in had or rows or tensors]
        # One sample beside tables may be meant: to share a sample is never safe.
        ones = {x.name for x in rows if self._length(x.value) == 1}
        if ones & self._longer or ones and not had and 1 in self.drawn:
            return 1
        if 0 in lengths:
            return 0
        return next((n for n in reversed(self.drawn) if n in lengths), lengths[0])

    def _doubt(self, tensors: list[Input], size: int) -> Doubt | None:
        """
        Returns why gradients of a call may not enter a step, if it seems to be on
        records that were drawn, and has another number of samples: other calls may be
        on what the loader did not draw.
        """
        if not self.drawn or size in {0, *self.drawn}:
            return None
        if any(draw_of(x.value) is not None for x in tensors):
            return None
        drawn = self.drawn[-1]
        is_turned = bool(self._other_dim(tensors, drawn))
        if not is_turned and (size > 1 or not self.ones):
            return None
        error = self._refused(advice.NO_ROWS, tensors, drawn)
        return Doubt(error, drawn, counts=not is_turned)

    # -- samples and tables ------------------------------------------------------------

    def _refuse_items(
        self, inputs: list[Input], tensors: list[Input], size: int
    ) -> None:
        """
        Refuses a list, dict or ``*args`` whose items may be samples: its length is the
        batch size, or the batch size is read from its items alone.
        """
        drawn = [*self.drawn]
        is_known = size in drawn or any(
            self._length(x.value) == size for x in tensors if not x.items
        )
        lists = {x.argument: x for x in inputs if x.items and not x.is_named}
        for name, x in lists.items():
            inside = [item for item in tensors if item.argument == name]
            may_be = x.items in (size, *drawn[-1:])
            if name == self._rest:  # a wrapper's, of a model with several inputs
                may_be = may_be and bool(drawn)
            elif inside and not is_known:
                may_be = True
            if may_be and size > 1 and not self._are_fields(name, inside):
                raise advice.ITEMS.of(self.name, name, count=x.items)

    def _are_fields(self, argument: str, tensors: list[Input]) -> bool:
        """
        Returns True for what is no records: it differs in kind, has had samples, or is
        a dict with keys of the loader's records.
        """
        kinds = {(x.value.dtype, x.value.shape[1:]) for x in tensors}
        had = [x.name in self._batched or self._is_state(x.value) for x in tensors]
        if len(kinds) > 1 or any(had) and all(had):
            return True
        keys = {f"{argument}[{key!r}]" for key in self.fields()} if tensors else set()
        return bool(tensors) and keys.issuperset(x.name for x in tensors)

    def _find_dims(self, tensors: list[Input], size: int) -> None:
        """Sets the batch dims; refuses what is neither samples nor shared by them."""
        for x in tensors:
            x.dim = self._dim(x, size, is_first=x is tensors[0])
        others = [x for x in tensors if x.dim is None and not self._is_shared(x.value)]
        if others:
            raise self._refused(
                advice.NOT_AS_LONG,
                tensors,
                size,
                name=others[0].name,
                others=" is not as long, and ".join(map(str, others)),
                names=[x.name for x in others],
                samples=f"{size} sample{'s' * (size != 1)}",
            )
        if size > 1:
            self._batched.update((x.name, x.dim) for x in tensors if x.dim is not None)

    def _dim(self, x: Input, size: int, is_first: bool) -> int | None:
        """Returns the batch dim of a tensor, if it is as long as the batch in one."""
        shape, dim = x.value.shape, min(self.batch_dim, x.value.dim() - 1)
        is_long = shape[dim] == size
        if not self._is_state(x.value) or shape[1] != size:
            return dim if is_long else None
        if dim == 1 or not is_long or size == 1:
            return 1
        if is_first or x.name in self._batched:
            return self._batched.get(x.name, 0)
        raise advice.SQUARE.of(self.name, x.name, shape=tuple(shape))

    def _is_shared(self, x: T) -> bool:
        """Returns True for a tensor ``[1, ...]`` that the loop makes."""
        return self._length(x) == 1 and not self.ones and draw_of(x) is None

    def _tell_of_tables(self, tensors: list[Input], size: int) -> None:
        """Warns of an input with samples that is the same tensor in two calls."""
        samples = [x for x in tensors if x.dim is not None]
        same = [x.name for x in samples if self._seen.get(x.value) == version(x.value)]
        self._seen.update({x.value: version(x.value) for x in samples})
        if same and size > 1 and tensors[0].name not in same:
            given = dict(model=self.name, names=", ".join(same), shared=same)
            warn_once(self, "tables", advice.TABLES.format(**given))

    def _cut(self, inputs: list[Input]) -> tuple[list[Any], list[tuple[T, T]]]:
        """Returns the leaves of samples, and inputs that get a gradient with theirs."""
        cut = [(x.value.detach(), x.dim) for x in inputs if x.dim is not None]
        apart = iter(set_apart([x for x, _ in cut], [dim for _, dim in cut]))
        leaves, trained = [], []
        for x in inputs:
            leaf, is_trained = x.value, isinstance(x.value, T) and x.value.requires_grad
            if x.dim is not None:
                leaf = next(apart).requires_grad_(is_trained)
                if is_trained:
                    trained.append((x.value, leaf))
                leaf = leaf.movedim(x.dim, 0).unsqueeze(1 + x.dim)
            elif is_trained:
                raise advice.TRAINED.of(self.name, x.name, shape=tuple(leaf.shape))
            leaves.append(leaf)
        return leaves, trained

    # -- errors ------------------------------------------------------------------------

    def _other_dim(self, tensors: list[Input], size: int) -> str:
        named = {x.name: x.value for x in tensors}
        return advice.other_dim(named, size, self.batch_dim)

    def _refused(
        self, words: advice.Words, tensors: list[Input], size: int, **values: Any
    ) -> Refused:
        """Makes an error of tensors, where so many samples were looked for."""
        return words.of(
            self.name,
            size=size,
            shapes=", ".join(map(str, tensors)),
            other_dim=self._other_dim(tensors, size),
            take=advice.take_of(self.module, [x.value for x in tensors]),
            **values,
        )
