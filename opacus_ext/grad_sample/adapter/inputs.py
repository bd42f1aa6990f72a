"""The batch size of a call, and which of its inputs are samples.

The loader knows how many records it drew: tensors of that length are samples. A tensor
``[1, ...]`` beside them, if it is none of the loader's, is shared by all samples.
Anything else is refused by its name, unless ``shared=`` names it. It is safe to read a
table as samples, since each sample sees only its row. It is not safe to read samples as
a table, because each sample would see all of them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from opacus_ext.grad_sample.adapter import advice
from opacus_ext.grad_sample.adapter.mixing import MixingMonitor
from opacus_ext.grad_sample.adapter.objects import PLAIN
from opacus_ext.grad_sample.adapter.outputs import flatten
from opacus_ext.grad_sample.adapter.passes import Doubt, Draw, draw_of
from opacus_ext.grad_sample.core.groups import (
    Samples,
    samples_of,
    take_of_call,
    version,
)
from opacus_ext.grad_sample.core.values import set_apart
from opacus_ext.private_torch import TreeSpec, keystr, tree_unflatten
from opacus_ext.refused import Refused, warn_once

T = torch.Tensor
Take = Callable[[Any, int], Any]
# What ``*args`` and ``**kwargs`` of a forward are.
_REST = inspect.Parameter.VAR_POSITIONAL
_OTHERS = inspect.Parameter.VAR_KEYWORD


class Inputs(NamedTuple):
    """
    The inputs of a call.

    Attributes:
        samples: one entry for each kind of sample
        trained: inputs with a gradient, and their leaves
        given: the ``(args, kwargs)`` of the call
        names: of the leaves of samples, if known
    """

    samples: list[Samples]
    size: int
    trained: Sequence[tuple[T, T]] = ()
    given: Any = None
    doubt: Doubt | None = None
    names: Sequence[str] = ()


@dataclass(eq=False)
class Input:
    """
    A leaf of the arguments.

    Attributes:
        name: such as ``state[0]``
        argument: the argument that it is in
        items: length of the argument, if that is a list, tuple, dict or ``*args``
        is_named: True if ``shared=`` names it
        length: of a tensor, along the batch dim
        is_state: True for hidden states of recurrent layers
        draw: the batch that a tensor is of, if the loader gave it
        dim: the batch dim, if it has samples
    """

    name: str
    argument: str
    items: int
    value: Any
    is_named: bool
    length: int = 0
    is_state: bool = False
    draw: Draw | None = None
    dim: int | None = None

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
        mixing: compares inputs with the records that were drawn
    """

    def __init__(
        self,
        module: nn.Module,
        batch_dim: int = 0,
        take: Take | None = None,
        shared: Sequence[str] = (),
    ):
        self.module = module
        self.name = type(module).__name__
        self.batch_dim = batch_dim
        self.take = take
        self.shared = set(shared)
        self.mixing = MixingMonitor()
        self.drawn: Sequence[int] = ()
        self.most: int | None = None
        self.ones = False
        #: Gives the keys of the loader's records, if they have some.
        self.fields: Callable[[], set[Any]] = set
        self.states: set[tuple[int, int]] = set()
        layer: Any
        for layer in module.modules():
            if hasattr(layer, "bidirectional"):
                layers = layer.num_layers * (1 + layer.bidirectional)
                self.states.add((layers, layer.hidden_size))
                self.states.add((layers, getattr(layer, "proj_size", 0)))
        parameters = inspect.signature(module.forward).parameters
        # The arguments that may be passed by position, and the name of ``*args``.
        self._by_position: list[str] = []
        self._rest = "args"
        takes_others = False
        for name, parameter in parameters.items():
            if parameter.kind < _REST:
                self._by_position.append(name)
            elif parameter.kind == _REST:
                self._rest = name
            takes_others |= parameter.kind in (_REST, _OTHERS)
        unknown = {name.partition("[")[0] for name in self.shared} - {*parameters}
        if unknown and not takes_others:
            known = ", ".join(sorted(parameters))
            raise advice.NOT_NAMED.of(
                self.name, "shared", unknown=sorted(unknown), known=known
            )
        # The batch dims of inputs that have had samples, by name.
        self._batched: dict[str, int] = {}
        # Inputs that were longer than one: they are no tables [1, ...].
        self._longer: set[str] = set()
        # The versions of tensors that had samples.
        self._seen = WeakIdKeyDictionary()
        # What ``take`` gave, without data.
        self._form: list[Samples] = []

    def read(self, args: tuple, kwargs: dict) -> Inputs:
        """Finds the samples of a call with these arguments, or refuses it."""
        if self.take is not None:
            return self._taken(self.take, args, kwargs)
        inputs, structure = self._read_arguments(args, kwargs)
        tensors = list(filter(self._may_be_samples, inputs))
        names = [leaf.name for leaf in inputs]
        if not tensors:
            raise advice.NO_TENSOR.of(self.name, given=", ".join(names) or "nothing")
        batch_size = self._size(tensors)
        self._refuse_items(inputs, tensors, batch_size)
        self._find_dims(tensors, batch_size)
        doubt = self._doubt(tensors, batch_size)
        self._tell_of_tables(tensors, batch_size)
        leaves, trained = self._cut(inputs)
        by_sample = [leaf.dim is not None for leaf in inputs]
        samples = Samples(None, leaves, by_sample, structure, batch_size)
        arguments = tree_unflatten([leaf.value for leaf in inputs], structure)
        return Inputs([samples], batch_size, trained, arguments, doubt, names)

    def _taken(self, take: Take, args: tuple, kwargs: dict) -> Inputs:
        samples, batch_size = samples_of((args, kwargs), take_of_call(take))
        # An empty batch has the form of a sample, without rows.
        if samples:
            self._form = [samples[0].select(torch.arange(0))]
        elif not self._form:
            raise advice.NEVER_TAKEN.of(self.name)
        return Inputs(samples or self._form, batch_size, given=(args, kwargs))

    # -- arguments ---------------------------------------------------------------------

    def _read_arguments(
        self, args: tuple, kwargs: dict
    ) -> tuple[list[Input], TreeSpec]:
        """Returns the leaves of the arguments, and how these are made of them."""
        paths, structure = flatten((args, kwargs))
        count = len(self._by_position)
        arguments = dict(zip(self._by_position, args))
        arguments.update({self._rest: args[count:], **kwargs})
        inputs = []
        for (position, key, *path), value in paths:
            # A path begins with 0 for positional arguments, and 1 for those by keyword.
            if position.idx:
                argument = label = key.key
            elif key.idx < count:
                argument = label = self._by_position[key.idx]
            else:
                argument = self._rest
                label = f"{argument}[{key.idx - count}]"
            name = label + keystr(tuple(path))
            holder = arguments[argument]
            items = 0
            if isinstance(holder, (list, tuple, dict)):
                items = len(holder)
            is_named = not self.shared.isdisjoint({name, label, argument})
            inputs.append(Input(name, argument, items, value, is_named))
        return inputs, structure

    def _may_be_samples(self, leaf: Input) -> bool:
        """
        Returns False for what all samples share; measures tensors, and refuses what
        can't be cut.
        """
        value = leaf.value
        if leaf.is_named or isinstance(value, PLAIN) or inspect.isroutine(value):
            return False
        if not isinstance(value, T) or value.is_nested or value.layout != torch.strided:
            raise advice.OF_A_KIND.of(self.name, leaf.name, **advice.kind_of(value))
        if not value.dim():
            return False
        leaf.length = value.shape[min(self.batch_dim, value.dim() - 1)]
        leaf.is_state = self.is_state(value.shape)
        leaf.draw = draw_of(value)
        return True

    def is_state(self, shape: torch.Size) -> bool:
        """Returns True for the shape of hidden states ``[layers, B, width]``."""
        return len(shape) == 3 and (shape[0], shape[2]) in self.states

    # -- the batch size ----------------------------------------------------------------

    def _size(self, tensors: list[Input]) -> int:
        """Returns the number of samples."""
        rows = [tensor for tensor in tensors if not tensor.is_state]
        ones: set[str] = set()
        for tensor in rows:
            if tensor.length > 1:
                self._longer.add(tensor.name)
            elif tensor.length:
                ones.add(tensor.name)
        for tensor in tensors:
            if tensor.draw is not None:
                self._check_rows(tensors, tensor.draw.size)
                return tensor.draw.size
        before = [tensor for tensor in rows if tensor.name in self._batched]
        lengths = [tensor.length for tensor in before or rows or tensors]
        # One sample beside tables may be meant: to share a sample is never safe.
        if ones & self._longer or ones and not before and 1 in self.drawn:
            return 1
        if 0 in lengths:
            return 0
        # Where several lengths are possible, the latest draw that has one tells.
        return next(
            (drawn for drawn in reversed(self.drawn) if drawn in lengths), lengths[0]
        )

    def _check_rows(self, tensors: list[Input], batch_size: int) -> None:
        """Refuses tensors of which none has a row for each record of a draw."""
        for tensor in tensors:
            if tensor.length == batch_size:
                return
            if tensor.is_state and tensor.value.shape[1] == batch_size:
                return
        raise self._refused(advice.NO_ROWS, tensors, batch_size)

    def _doubt(self, tensors: list[Input], batch_size: int) -> Doubt | None:
        """
        Returns why gradients of a call may not enter a step, if it seems to be on
        records that were drawn, and has another number of samples: other calls may be
        on what the loader did not draw.
        """
        if not self.drawn or batch_size in {0, *self.drawn}:
            return None
        if any(tensor.draw is not None for tensor in tensors):
            return None
        drawn = self.drawn[-1]
        # Samples may be parts of a draw, unless its batch lies in the other dim.
        is_turned = bool(advice.other_dim(_named(tensors), drawn, self.batch_dim))
        if not is_turned and (batch_size > 1 or not self.ones):
            return None
        error = self._refused(advice.NO_ROWS, tensors, drawn)
        return Doubt(error, drawn, counts=not is_turned)

    # -- samples and tables ------------------------------------------------------------

    def _refuse_items(
        self, inputs: list[Input], tensors: list[Input], batch_size: int
    ) -> None:
        """
        Refuses a list, dict or ``*args`` whose items may be samples: its length is the
        batch size, or the batch size is read from its items alone.
        """
        counts = {leaf.argument: leaf.items for leaf in inputs if not leaf.is_named}
        known = {tensor.length for tensor in tensors if not tensor.items}
        for argument, count in counts.items():
            if not count or batch_size < 2:
                continue
            inside = [tensor for tensor in tensors if tensor.argument == argument]
            may_be = count == batch_size
            if self.drawn:
                may_be |= count == self.drawn[-1]
            if argument == self._rest:
                # A wrapper of a model with several inputs has ``*args``, too: only a
                # loader's count of records tells that these are samples.
                may_be &= bool(self.drawn)
            elif inside and batch_size not in known.union(self.drawn):
                may_be = True
            if may_be and not self._are_fields(argument, inside):
                raise advice.ITEMS.of(self.name, argument, count=count)

    def _are_fields(self, argument: str, tensors: list[Input]) -> bool:
        """
        Returns True for what is no records: it differs in kind, has had samples, or is
        a dict with keys of the loader's records.
        """
        if not tensors:
            return False
        first = tensors[0].value
        kind = first.dtype, first.shape[1:]
        names, news = set(), set()
        for tensor in tensors:
            if (tensor.value.dtype, tensor.value.shape[1:]) != kind:
                return True
            names.add(tensor.name)
            if not tensor.is_state:
                news.add(tensor.name)
        if news <= self._batched.keys():
            return True
        return names <= {f"{argument}[{key!r}]" for key in self.fields()}

    def _find_dims(self, tensors: list[Input], batch_size: int) -> None:
        """Sets the batch dims; refuses what is neither samples nor shared by them."""
        others = []
        for tensor in tensors:
            tensor.dim = self._dim(tensor, batch_size, is_first=tensor is tensors[0])
            if tensor.dim is None and not self._is_shared(tensor):
                others.append(tensor)
        if others:
            raise self._refused(
                advice.NOT_AS_LONG,
                tensors,
                batch_size,
                name=others[0].name,
                others=" is not as long, and ".join(map(str, others)),
                names=[tensor.name for tensor in others],
                samples=f"{batch_size} sample{'s' * (batch_size != 1)}",
            )
        # A batch of one does not tell samples from tables ``[1, ...]``.
        if batch_size > 1:
            for tensor in tensors:
                if tensor.dim is not None:
                    self._batched[tensor.name] = tensor.dim

    def _dim(self, tensor: Input, batch_size: int, is_first: bool) -> int | None:
        """Returns the batch dim of a tensor, if it is as long as the batch in one."""
        shape = tensor.value.shape
        dim = min(self.batch_dim, len(shape) - 1)
        is_long = tensor.length == batch_size
        if not tensor.is_state or shape[1] != batch_size:
            return dim if is_long else None
        if dim == 1 or not is_long or batch_size == 1:
            return 1
        if is_first or tensor.name in self._batched:
            return self._batched.get(tensor.name, 0)
        raise advice.SQUARE.of(self.name, tensor.name, shape=tuple(shape))

    def _is_shared(self, tensor: Input) -> bool:
        """Returns True for a tensor ``[1, ...]`` that the loop makes."""
        return tensor.length == 1 and not self.ones and tensor.draw is None

    def _tell_of_tables(self, tensors: list[Input], batch_size: int) -> None:
        """Warns of an input with samples that is the same tensor in two calls."""
        versions: dict[T, int] = {}
        same = []
        for tensor in tensors:
            if tensor.dim is not None:
                now = versions[tensor.value] = version(tensor.value)
                if self._seen.get(tensor.value) == now:
                    same.append(tensor.name)
        self._seen.update(versions)
        # A loop over one batch gives its first input again, too: that is no table.
        if same and batch_size > 1 and tensors[0].name not in same:
            names = ", ".join(same)
            text = advice.TABLES.format(model=self.name, names=names, shared=same)
            warn_once(self, "tables", text)

    def _cut(self, inputs: list[Input]) -> tuple[list[Any], list[tuple[T, T]]]:
        """Returns the leaves of samples, and inputs that get a gradient with theirs."""
        batched, dims = [], []
        for entry in inputs:
            if entry.dim is not None:
                batched.append(entry.value.detach())
                dims.append(entry.dim)
        apart = iter(set_apart(batched, dims))
        leaves, trained = [], []
        for entry in inputs:
            leaf = entry.value
            is_trained = isinstance(leaf, T) and leaf.requires_grad
            if entry.dim is not None:
                leaf = next(apart).requires_grad_(is_trained)
                if is_trained:
                    trained.append((entry.value, leaf))
                leaf = leaf.movedim(entry.dim, 0).unsqueeze(1 + entry.dim)
            elif is_trained:
                shape = tuple(leaf.shape)
                raise advice.TRAINED.of(self.name, entry.name, shape=shape)
            leaves.append(leaf)
        return leaves, trained

    # -- errors ------------------------------------------------------------------------

    def _refused(
        self, words: advice.Words, tensors: list[Input], batch_size: int, **values: Any
    ) -> Refused:
        """Makes an error of tensors, where so many samples were looked for."""
        named = _named(tensors)
        return words.of(
            self.name,
            size=batch_size,
            shapes=", ".join(map(str, tensors)),
            other_dim=advice.other_dim(named, batch_size, self.batch_dim),
            take=advice.take_of(self.module, [*named.values()]),
            **values,
        )


def _named(tensors: list[Input]) -> dict[str, T]:
    return {tensor.name: tensor.value for tensor in tensors}
