"""The batch size of a call, and which of its inputs are samples.

The loader knows how many records it drew: tensors of that length are samples. A tensor
``[1, ...]`` beside them, if it is none of the loader's, is shared by all samples.
Anything else is refused by its name, unless ``shared=`` names it. To read a table as
samples is safe, since each sample sees its row; to read samples as a table is not: each
sample would see all of them.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Callable, NamedTuple, NoReturn, Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, keystr, tree_unflatten

from opacus_ext.grad_sample.adapter.objects import PLAIN
from opacus_ext.grad_sample.adapter.outputs import flatten
from opacus_ext.grad_sample.adapter.passes import Doubt, draw_of
from opacus_ext.grad_sample.core.groups import Samples, samples_of, version
from opacus_ext.grad_sample.core.values import set_apart
from opacus_ext.refused import Refused, warn_once

T = torch.Tensor
Take = Callable[[Any, int], Any]


class Inputs(NamedTuple):
    """The inputs of a call."""

    samples: list[Samples]  # one entry for each kind of sample
    size: int
    trained: list[tuple[T, T]]  # inputs that require a gradient, and their leaves
    zeros: Callable[..., Any]  # makes a sample filled with zeros, or another number
    given: Any = None  # the ``(args, kwargs)`` of the call
    doubt: Doubt | None = None
    names: Sequence[str] = ()  # of the leaves of samples, if known

    def of_one(self) -> str:
        """Returns names and shapes of what a sample of the first kind is made of."""
        if not self.samples:
            return "none"
        some, found = self.samples[0], []
        names = self.names or [""] * len(some.leaves)
        for name, x, own in zip(names, some.leaves, some.by_sample):
            if isinstance(x, T) and x.dim():
                shape = tuple(x.shape[1:]) if own else f"{tuple(x.shape)} (shared)"
                found.append(f"{name} {shape}".strip())
        return ", ".join(found)


class Given(NamedTuple):
    """The arguments of a call, as a flattened tree."""

    names: list[str]  # names of the leaves
    leaves: list[Any]
    spec: TreeSpec
    tensors: list[tuple[int, str, T]]  # possible samples: leaf number, name, value
    lists: dict[str, int]  # length of each list argument, by name; ``*args`` is one


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
        self.name, self.batch_dim, self.take = type(module).__name__, batch_dim, take
        self.shared, self.module = set(shared), module
        self.drawn: Sequence[int] = ()
        self.most: int | None = None
        self.ones = False
        #: Gives the keys of the loader's records, if they have some.
        self.fields: Callable[[], set[Any]] = set
        parameters = inspect.signature(module.forward).parameters.values()
        self._known = {p.name for p in parameters}
        self._named = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        rest = [p.name for p in parameters if p.kind == p.VAR_POSITIONAL]
        self._rest = rest[0] if rest else "args"
        self._batched: dict[str, int] = {}  # batch dims of what has had samples
        self._last: dict[str, tuple[weakref.ref, int]] = {}  # inputs, with versions
        self._zeros: Callable[..., Any] = self._no_zeros  # with take
        self.states = {
            (m.num_layers * (1 + m.bidirectional), width)
            for m in module.modules()
            if hasattr(m, "bidirectional")
            for width in (m.hidden_size, getattr(m, "proj_size", 0))
        }

    def read(self, args: tuple, kwargs: dict) -> Inputs:
        """Finds the samples of a call with these arguments, or refuses it."""
        if self.take is not None:
            samples, size = samples_of((args, kwargs), _of_both(self.take))
            if samples:  # without data, as it is kept
                self._zeros = samples[0].select(torch.arange(0)).zeros
            return Inputs(samples, size, [], self._zeros, (args, kwargs))
        given = self._given(args, kwargs)
        if not given.tensors:
            self._refuse(
                f"was called without a tensor of samples, with "
                f"{', '.join(given.names) or 'nothing'}",
                "Pass tensors [B, ...], or make_private(take=function), where "
                "function(inputs, i) gives sample i as a batch of one.",
            )
        size = self._size(given)
        self._check_lists(given, size)
        dims = self._dims(given, size)
        self._tell_of_tables(given, dims)
        return self._inputs(given, size, dims)._replace(doubt=self._doubt(given, size))

    def _no_zeros(self, value: int = 0) -> NoReturn:
        self._refuse(
            "was called without samples before it was called with some, and take= "
            "knows nothing of these",
            "Begin with a batch that is not empty.",
        )

    # -- arguments ---------------------------------------------------------------------

    def _given(self, args: tuple, kwargs: dict) -> Given:
        paths, spec = flatten((args, kwargs))
        names, tensors = [], []
        for (place, which, *inner), x in paths:
            top = str(which.key) if place.idx else self._name(which.idx)
            names.append(top + keystr(tuple(inner)))
            if not {names[-1], top, top.partition("[")[0]} & self.shared:
                self._refuse_kind(names[-1], x)
                if isinstance(x, T) and x.dim():
                    tensors.append((len(names) - 1, names[-1], x))
        rest = args[len(self._named) :]
        every = [*zip(self._named, args), (self._rest, rest), *kwargs.items()]
        lists = {
            name: len(x)
            for name, x in every
            if isinstance(x, (list, tuple, dict)) and x and name not in self.shared
        }
        unknown = self.shared - {n.partition("[")[0] for n in names} - {*names}
        unknown -= self._known
        if unknown and names:
            raise Refused(
                f"shared={sorted(unknown)} are no inputs of {self.name}.",
                parameter="shared",
                remedy=f"Its inputs are {', '.join(sorted(self._known))}.",
            )
        return Given(names, [x for _, x in paths], spec, tensors, lists)

    def _name(self, place: int) -> str:
        """Returns the name of a positional argument."""
        if place < len(self._named):
            return self._named[place]
        return f"{self._rest}[{place - len(self._named)}]"

    def _refuse_kind(self, name: str, x: Any) -> None:
        take = "items"
        if isinstance(x, PackedSequence):
            kind, take = "a PackedSequence", "packed"
        elif isinstance(x, T):
            if x.layout is torch.strided and not x.is_nested:
                return
            kind = "a nested or sparse tensor"
        elif isinstance(x, PLAIN) or inspect.isroutine(x):
            return
        else:
            kind = f"of type {type(x).__name__}"
        self._refuse(
            f"input {name} is {kind}, of which it is not known where its samples are",
            f"Give make_private(take=opacus_ext.take.{take}), or a function "
            "take(inputs, i) of your own that gives sample i as a batch of one; "
            f'where all samples share it, shared=["{name}"].',
            name,
        )

    # -- the batch size ----------------------------------------------------------------

    def _length(self, x: T) -> int:
        return x.shape[min(self.batch_dim, x.dim() - 1)]

    def _is_state(self, x: T) -> bool:
        return x.dim() == 3 and (x.shape[0], x.shape[2]) in self.states

    def _size(self, given: Given) -> int:
        """Returns the number of samples."""
        draws = [draw for *_, x in given.tensors if (draw := draw_of(x)) is not None]
        if draws:
            return self._size_of_draw(given, draws[0].size)
        tensors = [(name, x) for _, name, x in given.tensors]
        lengths = [self._length(x) for _, x in tensors if not self._is_state(x)]
        lengths = lengths or [self._length(x) for _, x in tensors]
        others = [n for n in lengths if n > 1]
        if 0 in lengths or not others:
            return min(lengths)
        drawn = [n for n in reversed(self.drawn) if n in others]
        size = drawn[0] if drawn else others[0]
        if 1 not in lengths:
            return size
        # Which is it, one sample beside tables or samples beside a tensor [1, ...]?
        had = {self._length(x) for name, x in tensors if name in self._batched}
        if had:
            return 1 if 1 in had else size
        if bool(drawn) != (1 in self.drawn):
            return size if drawn else 1
        return 1 if lengths[0] == 1 else size

    def _size_of_draw(self, given: Given, size: int) -> int:
        """Returns the number of records drawn; refuses inputs without a row for each"""
        for _, _, x in given.tensors:
            if size in (self._length(x), x.shape[1] if self._is_state(x) else size - 1):
                return size
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for _, name, x in given.tensors)
        self._refuse(
            f"was called with {shapes}, where the loader drew {size} records: which "
            "part is of which record is not known",
            f"{self._other_dim(given, size)}Give make_private(take="
            f"{self._take(given)}), where function(inputs, i) gives record i as a "
            "batch of one; or let the loader's collate_fn return a row for each "
            "record.",
        )

    def _take(self, given: Given) -> str:
        """Returns the name of what may take samples from flat tensors."""
        if any(isinstance(m, nn.EmbeddingBag) for m in self.module.modules()):
            return "opacus_ext.take.bags"
        numbers = [x for *_, x in given.tensors if x.dtype is torch.long]
        nodes = len(given.tensors[0][-1])
        if any(x.dim() == 2 and len(x) == 2 for x in numbers):  # edges
            if any(x.shape == (nodes,) for x in numbers):  # the graph of each node
                return "opacus_ext.take.graphs"
        return "function"

    def _other_dim(self, given: Given, size: int) -> str:
        """Returns the advice for batches in another dim."""
        other = 1 - self.batch_dim
        mixed = any(self._length(x) == size for *_, x in given.tensors)
        for _, name, x in given.tensors:
            if x.dim() > 1 and x.shape[other] == size != self._length(x):
                advice = f"If the batch is dim {other} of {name}, pass {name}.transpose"
                if mixed:  # another input has it where it is looked for
                    return f"{advice}(0, 1), and transpose it back in the forward. "
                first = bool(self.batch_dim)
                return f"{advice}(0, 1), or make_private(batch_first={first}). "
        return ""

    def _doubt(self, given: Given, size: int) -> Doubt | None:
        """
        Returns why gradients of a call may not enter a step, if it seems to be on
        records that were drawn, and has another number of samples: other calls may be
        on what the loader did not draw.
        """
        if not self.drawn or size in self.drawn or not size:
            return None
        if any(draw_of(x) is not None for *_, x in given.tensors):
            return None
        last = self.drawn[-1]
        advice = self._other_dim(given, last)
        if not advice and (size > 1 or not self.ones):
            return None
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for _, name, x in given.tensors)
        error = Refused(
            f"{self.name}: was called with {shapes}, as {size} samples, where the "
            f"loader drew {last} records.",
            module=self.name,
            parameter=given.tensors[0][1],
            remedy=f"{advice}Call it on the records that were drawn; or give "
            "make_private(take=function), where function(inputs, i) gives record i as "
            "a batch of one.",
        )
        return Doubt(error, last, counts=not advice)

    # -- samples and tables ------------------------------------------------------------

    def _check_lists(self, given: Given, size: int) -> None:
        """
        Refuses a list, dict or ``*args`` whose items may be samples: its length is the
        batch size, or the batch size is read from its items alone.
        """
        inside: dict[str, list[tuple[str, T]]] = {name: [] for name in given.lists}
        outside = size in self.drawn
        for _, name, x in given.tensors:
            top = name.partition("[")[0]
            if top in inside:
                inside[top].append((name, x))
            else:
                outside = outside or self._length(x) == size
        for top, count in given.lists.items():
            tensors = inside[top]
            known = tensors and all(
                name in self._batched or self._is_state(x) for name, x in tensors
            )
            # Fields of records differ in kind, where items are all of one.
            kinds = {(x.dtype, x.shape[1:]) for _, x in tensors}
            if known or size < 2 or len(kinds) > 1:
                continue
            of_records = count == size or count in [*self.drawn][-1:]
            if top == self._rest:  # a wrapper's, of a model with several inputs
                of_records = of_records and bool(self.drawn)
            elif tensors:
                of_records = of_records or not outside
            if of_records and not (tensors and self._are_fields(top, tensors)):
                self._refuse_items(given, top)

    def _are_fields(self, top: str, tensors: list[tuple[str, T]]) -> bool:
        """Returns True for a dict with keys of the loader's records."""
        fields = {f"{top}[{key!r}]" for key in self.fields()}
        return {name for name, _ in tensors} <= fields

    def _dims(self, given: Given, size: int) -> list[int | None]:
        """Returns the batch dim of each tensor; None if all samples share it."""
        dims: list[int | None] = []
        others = []
        for _, name, x in given.tensors:
            dim = min(self.batch_dim, x.dim() - 1)
            if self._is_state(x) and x.shape[1] == size:
                is_square = x.shape[dim] == size > 1 and dim != 1
                dim = self._dim_of_square(given, name, x) if is_square else 1
            elif x.shape[dim] != size:
                if x.shape[dim] != 1 or self.ones or draw_of(x) is not None:
                    others.append((name, x))
                dims.append(None)
                continue
            if size > 1:
                self._batched[name] = dim
            dims.append(dim)
        if others:
            self._refuse_others(given, others, size)
        return dims

    def _dim_of_square(self, given: Given, name: str, x: T) -> int:
        """Returns the batch dim of what is as long in dim 0 as in dim 1."""
        if name in self._batched:
            return self._batched[name]
        if name == given.tensors[0][1]:
            return 0
        self._refuse(
            f"input {name} of shape {tuple(x.shape)} may be a state [layers, B, H], or "
            "samples [B, T, H]",
            "Begin with a batch of another size.",
            name,
        )

    def _tell_of_tables(self, given: Given, dims: Sequence[int | None]) -> None:
        """Warns of an input with samples that is the same tensor in two calls."""
        same = []
        for (_, name, x), dim in zip(given.tensors, dims):
            before, written = self._last.get(name, (lambda: None, 0))
            self._last[name] = weakref.ref(x), version(x)
            if before() is x and written == version(x) and dim is not None:
                if x.shape[dim] > 1:
                    same.append(name)
        if same and given.tensors[0][1] not in same:
            warn_once(
                self,
                "tables",
                f"{self.name}: {', '.join(same)} is read as samples, of which each "
                "sees its row, and is one tensor in several calls. If all samples "
                f"share it, name it: make_private(shared={same}).",
            )

    # -- errors ------------------------------------------------------------------------

    def _refuse_items(self, given: Given, name: str) -> NoReturn:
        self._refuse(
            f"the {given.lists[name]} items of input {name} may be samples",
            "If they are, give make_private(take=opacus_ext.take.items), or a function "
            "take(inputs, i) of your own that gives sample i as a batch of one; if "
            f'not, make_private(shared=["{name}"]), or pass tensors [B, ...] as '
            "arguments of their own.",
            name,
        )

    def _refuse_others(
        self, given: Given, others: list[tuple[str, T]], size: int
    ) -> NoReturn:
        names = [name for name, _ in others]
        shapes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in others)
        one = len(others) == 1
        self._refuse(
            f"input{'' if one else 's'} {shapes} {'is' if one else 'are'} not as long "
            f"as the batch of {size} sample{'s' * (size != 1)}",
            f"{self._other_dim(given, size)}If all samples share "
            f"{'it' if one else 'them'}: make_private(shared={names}). If samples are "
            f"in it in another way (flat, packed), make_private(take="
            f"{self._take(given)}), where function(inputs, i) gives sample i as a "
            "batch of one.",
            names[0],
        )

    def _refuse(self, what: str, remedy: str, name: str | None = None) -> NoReturn:
        raise Refused(
            f"{self.name}: {what}.", module=self.name, parameter=name, remedy=remedy
        )

    # -- samples -----------------------------------------------------------------------

    def _inputs(self, given: Given, size: int, dims: list[int | None]) -> Inputs:
        leaves, trained = list(given.leaves), []
        by_sample = [False] * len(leaves)
        pairs = zip(given.tensors, dims)
        cut = [(i, x, d) for (i, _, x), d in pairs if d is not None]
        tensors = [x.detach() for _, x, _ in cut]
        for (i, x, d), own in zip(cut, set_apart(tensors, [d for *_, d in cut])):
            if x.requires_grad:
                trained.append((x, own.requires_grad_()))
            leaves[i] = own.movedim(d, 0).unsqueeze(1 + d)
            by_sample[i] = True
        for name, x, own in zip(given.names, leaves, by_sample):
            if isinstance(x, T) and not own and x.requires_grad:
                self._refuse(
                    f"input {name} of shape {tuple(x.shape)} is shared by all samples "
                    "and requires a gradient, which it would not get",
                    "Make what computes it a part of the model, or detach() it.",
                    name,
                )
        samples = Samples(None, leaves, by_sample, given.spec, size)
        whole = tree_unflatten(given.leaves, given.spec)
        names = given.names
        return Inputs([samples], size, trained, samples.zeros, whole, names=names)


def _of_both(take: Take) -> Take:
    """Takes samples of positional and of keyword arguments."""

    def both(given: Any, i: int) -> Any:
        args, kwargs = given
        return (
            tuple(take(args, i)) if args else (),
            dict(take(kwargs, i)) if kwargs else {},
        )

    def size(given: Any) -> int:
        found = {getattr(take, "size")(part) for part in given if part} - {None}
        if len(found) != 1:
            raise Refused(
                f"The arguments by position and by keyword hold {sorted(found)} "
                "samples.",
                parameter="take",
                remedy="Give as many samples in both.",
            )
        return min(found)

    if hasattr(take, "size"):
        vars(both)["size"] = size
    return both
