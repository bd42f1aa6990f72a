"""How many samples a call has, and which of its inputs are samples.

There may be several ways to read a call: a tensor whose first dim is that of the batch
may be samples or a table that all samples share, a list may hold inputs or samples. The
model itself tells them apart: read in the right way it runs with any number of samples.
So where there are several readings, each runs on another number of samples. If one
alone runs, it is the right one, and that is remembered by the names of the inputs. If
several run and give the same, it makes no difference this time; if not, the call is
refused.
"""

from __future__ import annotations

import enum
import inspect
import itertools
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from opacus_ext.grad_sample.core.batch import Samples, samples_of
from opacus_ext.refused import Refused

T = torch.Tensor
Take = Callable[[Any, int], Any]
Call = Callable[[Any], Any]
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_DOUBTS = 5  # tensors of which every choice is tried
_PRIMES = [n for n in range(2, 2**12) if all(n % k for k in range(2, min(n, 64)))]
_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), enum.Enum, np.generic),
    *(torch.dtype, torch.device, torch.Size, slice, range, nn.Module, torch.Generator),
    *(torch.layout, torch.memory_format, T),
)


class Inputs(NamedTuple):
    """
    The inputs of a call.

    Attributes:
        samples: those of one kind each
        size: number of samples
        trained: inputs that require a gradient, and the leaves in their places
        zeros: makes a sample of zeros, or of another number, for a batch of none
    """

    samples: List[Samples]
    size: int
    trained: List[Tuple[T, T]]
    zeros: Callable[..., Any]


class Reading(NamedTuple):
    """
    A way to read a call.

    Attributes:
        size: number of samples
        dims: for each tensor where the samples are in it; None if all share it
    """

    size: int
    dims: Tuple[Optional[int], ...]


class Given(NamedTuple):
    """
    What a call was given.

    Attributes:
        names: of the leaves
        leaves: of the arguments
        spec: of their tree
        tensors: which leaves are tensors that may be samples
        lists: by name, how many items arguments have; ``*args`` are one
    """

    names: List[str]
    leaves: List[Any]
    spec: TreeSpec
    tensors: List[int]
    lists: Dict[str, int]

    @property
    def shapes(self) -> List[torch.Size]:
        """Of the tensors."""
        return [self.leaves[i].shape for i in self.tensors]


class InputReader:
    """
    Reads the calls of a model.

    Args:
        module: the model
        run: ``run(call, inputs)`` gives what a call would, and leaves no trace
        batch_dim: where the samples of tensors are
        take: as given to make_private, as is ``shared``

    Attributes:
        drawn: numbers of records in the batches that the loader made so far
        most: records that it drew at once; None if that is not known
        states: numbers of layers and widths of the states of recurrent layers
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Call, Any], Any],
        batch_dim: int = 0,
        take: Optional[Take] = None,
        shared: Sequence[str] = (),
    ):
        self.name, self.run, self.batch_dim = type(module).__name__, run, batch_dim
        self.take, self.shared = take, set(shared)
        self.drawn: Set[int] = set()
        self.most: Optional[int] = None
        parameters = inspect.signature(module.forward).parameters
        kinds = [(p.name, p.kind) for p in parameters.values()]
        self._known = set(parameters)
        self._named = [name for name, kind in kinds if kind in _POSITIONAL]
        rest = [
            name for name, kind in kinds if kind == inspect.Parameter.VAR_POSITIONAL
        ]
        self._rest = rest[0] if rest else "args"
        self._dims: Dict[str, int] = {}  # inputs that are samples, and where
        self._tables: Dict[str, Set[torch.Size]] = {}  # shapes that all samples share
        self._sizes: Dict[str, Set[int]] = {}  # at which an input was taken for samples
        self._refused: Optional[Refused] = None  # in the last tries
        self._more: Optional[bool] = None  # whether any number of ``*args`` is taken
        layers = [m for m in module.modules() if hasattr(m, "bidirectional")]
        self.states = {
            (m.num_layers * (1 + m.bidirectional), width)
            for m in layers
            for width in (m.hidden_size, getattr(m, "proj_size", 0))
        }

    def read(self, call: Call, args: tuple, kwargs: dict) -> Inputs:
        """
        Args:
            call: is called with ``(args, kwargs)`` of some samples

        Raises:
            Refused: if it can't be told how many samples there are and which they are
        """
        if self.take is not None:
            samples, size = samples_of((args, kwargs), self._taken)
            return Inputs(samples, size, [], self._no_zeros)
        given = self._given(args, kwargs)
        if not given.tensors:
            self._refuse(
                f"was called without a tensor of samples, with "
                f"{', '.join(given.names) or 'nothing'}",
                "Pass tensors [B, ...], or make_private(take=function), where "
                "function(inputs, i) gives sample i as a batch of one.",
            )
        readings = [r for n in self._counts(given) for r in self._readings(given, n)]
        reading = readings[0]
        if len(readings) > 1:
            reading = self._decide(call, given, readings)
        self._check_lists(call, given, reading)
        self._learn(given, reading, sure=False)
        return self._inputs(given, reading)

    def _taken(self, given: Any, i: int) -> Any:
        args, kwargs = given
        return (
            tuple(self.take(args, i)) if args else (),
            dict(self.take(kwargs, i)) if kwargs else {},
        )

    # -- what there is -----------------------------------------------------------------

    def _given(self, args: tuple, kwargs: dict) -> Given:
        paths, spec = tree_flatten_with_path((args, kwargs), is_leaf=_is_whole)
        names, leaves, tensors = [], [], []
        for (place, which, *inner), x in paths:
            top = str(which.key) if place.idx else self._name(which.idx)
            name = top + keystr(tuple(inner))
            if not {name, top, top.partition("[")[0]} & self.shared:
                self._refuse_kind(name, x)
                if isinstance(x, T) and x.dim():
                    tensors.append(len(leaves))
            names.append(name)
            leaves.append(x)
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
        return Given(names, leaves, spec, tensors, lists)

    def _name(self, place: int) -> str:
        """Of a positional argument."""
        if place < len(self._named):
            return self._named[place]
        return f"{self._rest}[{place - len(self._named)}]"

    def _refuse_kind(self, name: str, x: Any) -> None:
        kind, take = None, "items"
        if isinstance(x, PackedSequence):
            kind, take = "a PackedSequence", "packed"
        elif isinstance(x, T) and (x.is_nested or x.layout is not torch.strided):
            kind = "a nested or sparse tensor"
        elif not isinstance(x, _PLAIN) and not inspect.isroutine(x):
            kind = f"of type {type(x).__name__}"
        if kind is not None:
            self._refuse(
                f"input {name} is {kind}, of which it is not known where its samples "
                "are",
                f"Give make_private(take=opacus_ext.take.{take}), or a function "
                "take(inputs, i) of your own that gives sample i as a batch of one; "
                f'where all samples share it, shared=["{name}"].',
                name,
            )

    # -- readings ----------------------------------------------------------------------

    def _options(self, name: str, x: T) -> List[int]:
        """Where the samples of a tensor may be."""
        if x.shape in self._tables.get(name, ()):
            return []
        if name in self._dims and x.dim() > self._dims[name]:
            return [self._dims[name]]
        dim = min(self.batch_dim, x.dim() - 1)
        if x.dim() == 3 and dim == 0 and (x.shape[0], x.shape[2]) in self.states:
            return [1, 0]
        return [dim]

    def _counts(self, given: Given) -> List[int]:
        """How many samples there may be."""
        known, sizes = set(), {}
        for i in given.tensors:
            name, x = given.names[i], given.leaves[i]
            for dim in self._options(name, x):
                sizes[x.shape[dim]] = None
                if name in self._dims:
                    known.add(x.shape[dim])
        drawn = [n for n in sizes if n in self.drawn]
        self._refuse_other_dim(given, set(sizes))
        found = [n for n in sizes if n in known] or drawn or list(sizes)
        return [0] if 0 in found else found or [0]

    def _refuse_other_dim(self, given: Given, sizes: Set[int]) -> None:
        """
        Raises:
            Refused: if not dim 0 but dim 1 is as long as a batch of the loader
        """
        if self.batch_dim or not self.drawn or sizes & self.drawn:
            return
        for i, shape in zip(given.tensors, given.shapes):
            if len(shape) > 1 and shape[1] in self.drawn:
                self._refuse(
                    f"input {given.names[i]} of shape {tuple(shape)} has as many "
                    "entries in dim 1 as the loader drew records, and not in dim 0",
                    "Give make_private(batch_first=False), or call the model on the "
                    "records that were drawn.",
                    given.names[i],
                )

    def _readings(self, given: Given, size: int) -> Iterator[Reading]:
        """Which tensors may be the samples, the most first."""
        choices: List[List[Optional[int]]] = []
        for i in given.tensors:
            name, x = given.names[i], given.leaves[i]
            dims = [d for d in self._options(name, x) if x.shape[d] == size]
            sure = dims and (name in self._dims or size < 2)
            choices.append(dims[:1] if sure else [*dims, None])
        doubtful = [i for i, dims in enumerate(choices) if len(dims) > 1]
        if len(choices) == 1:
            choices = [[d for d in choices[0] if d == self.batch_dim] or choices[0]]
        for dims in itertools.product(*choices):
            shared = sum(dims[i] is None for i in doubtful)
            if set(dims) != {None} and (len(doubtful) <= _DOUBTS or shared <= 2):
                yield Reading(size, dims)

    def _check_lists(self, call: Call, given: Given, reading: Reading) -> None:
        """
        Raises:
            Refused: if the items of a list, dict or ``*args`` may be samples: it is not
                known from elsewhere how many there are, or there are as many
        """
        if reading.size < 2:
            return
        known: Dict[str, bool] = {}  # by list, whether all its tensors are samples
        outside = reading.size in self.drawn
        for i, d in zip(given.tensors, reading.dims):
            name, x = given.names[i], given.leaves[i]
            top = name.partition("[")[0]
            if top not in given.lists:
                outside = outside or d is not None
                continue
            sure = name in self._dims or x.shape in self._tables.get(name, ())
            sure = sure or d == 1 and (x.shape[0], x.shape[2]) in self.states
            known[top] = known.get(top, True) and sure
        for name, count in given.lists.items():
            if (
                known.get(name, False)
                or count != reading.size
                and (outside or name not in known)
            ):
                continue
            if name != self._rest or self._takes_more(call, given):
                self._refuse_items(given, name)

    def _takes_more(self, call: Call, given: Given) -> bool:
        """Whether the model takes more ``*args`` than it was given."""
        if self._more is None:
            args, kwargs = tree_unflatten(given.leaves, given.spec)
            try:
                with torch.no_grad():
                    self.run(call, ((*args, args[-1], args[-1]), kwargs))
                self._more = True
            except Exception:
                self._more = False
        return self._more

    # -- decisions ---------------------------------------------------------------------

    def _decide(self, call: Call, given: Given, readings: List[Reading]) -> Reading:
        taken = set(itertools.chain(*given.shapes)) - {0}
        count = next(n for n in _PRIMES if all(m % n for m in taken))
        self._refused = None
        ran: List[Tuple[Reading, List[T]]] = []
        for grad in (False, True):  # where code asks for gradients it needs a graph
            with torch.set_grad_enabled(grad):
                for r in readings if not ran else ():
                    output = self._try(call, given, r, count)
                    ran += [] if output is None else [(r, output)]
        found = [x for x in ran if self._fits(x[1], count)] or ran
        if len(found) == 1:
            self._learn(given, found[0][0], sure=True)
        elif not found or not all(_same(y, found[0][1]) for _, y in found):
            if not found and self._refused is not None:  # not for its inputs
                raise self._refused
            self._refuse_doubtful(given, [r for r, _ in found] or readings)
        return found[0][0]

    def _try(
        self, call: Call, given: Given, reading: Reading, count: int
    ) -> Optional[List[T]]:
        """What the model gives for ``count`` samples, if it takes them."""
        leaves = list(given.leaves)
        for i, d in zip(given.tensors, reading.dims):
            x = leaves[i].detach()
            if d is not None:
                index = torch.arange(count, device=x.device) % max(1, x.shape[d])
                x = x.index_select(d, index)
            leaves[i] = x.clone()
        try:
            output = self.run(call, tree_unflatten(leaves, given.spec))
        except Exception as error:
            if isinstance(error, Refused):
                self._refused = error
            return None
        return [y.detach() for y in tree_flatten(output)[0] if isinstance(y, T)]

    def _fits(self, output: List[T], count: int) -> bool:
        """Whether the first output has as many rows as samples, or flattened ones."""
        first = next((y for y in output if y.is_floating_point() and y.dim()), None)
        return first is None or (
            first.shape[min(self.batch_dim, first.dim() - 1)] % count == 0
        )

    def _learn(self, given: Given, reading: Reading, sure: bool) -> None:
        """
        Args:
            sure: whether no other reading is possible
        """
        if reading.size < 2:
            return
        others = {
            n
            for shape, at in zip(given.shapes, reading.dims)
            for axis, n in enumerate(shape)
            if axis != at
        }
        for i, d in zip(given.tensors, reading.dims):
            name, x = given.names[i], given.leaves[i]
            if d is None:
                if sure or reading.size not in x.shape:
                    self._tables.setdefault(name, set()).add(x.shape)
            elif sure:
                self._dims[name] = d
            elif reading.size not in others:
                sizes = self._sizes.setdefault(name, set())
                sizes.add(reading.size)
                if len(sizes) > 1:  # it follows the batch
                    self._dims[name] = d

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

    def _refuse_doubtful(self, given: Given, readings: List[Reading]) -> NoReturn:
        names = [given.names[i] for i in given.tensors]
        columns = zip(names, given.shapes, zip(*(r.dims for r in readings)))
        doubtful = {n: tuple(shape) for n, shape, dims in columns if len(set(dims)) > 1}
        shapes = ", ".join(f"{name} {shape}" for name, shape in doubtful.items())
        last = list(doubtful)[-1:]
        if last[0].partition("[")[0] in given.lists:
            self._refuse_items(given, last[0].partition("[")[0])
        self._refuse(
            f"it can't be told which of {shapes} are samples, and which all samples "
            "share: the model runs in several ways, or with one number of samples only",
            f"Name those that all samples share: make_private(shared={last}); or give "
            "make_private(take=function), where function(inputs, i) gives sample i as "
            "a batch of one.",
            last[0],
        )

    def _refuse(self, what: str, remedy: str, name: Optional[str] = None) -> NoReturn:
        raise Refused(
            f"{self.name}: {what}.", module=self.name, parameter=name, remedy=remedy
        )

    def _no_zeros(self, value: int = 0) -> NoReturn:
        self._refuse(
            "was called without samples, which take= knows nothing of",
            "Skip the forward of an empty batch.",
        )

    # -- samples -----------------------------------------------------------------------

    def _inputs(self, given: Given, reading: Reading) -> Inputs:
        leaves, trained = list(given.leaves), []
        by_sample = [False] * len(leaves)
        for i, d in zip(given.tensors, reading.dims):
            x = leaves[i]
            if d is None:
                continue
            if x.requires_grad:
                leaf = x.detach().requires_grad_()
                trained.append((x, leaf))
                x = leaf
            leaves[i] = x.movedim(d, 0).unsqueeze(1 + d)
            by_sample[i] = True
        for name, x, own in zip(given.names, leaves, by_sample):
            if isinstance(x, T) and not own and x.requires_grad:
                self._refuse(
                    f"input {name} of shape {tuple(x.shape)} is shared by all samples "
                    "and requires a gradient, which it would not get",
                    "Make what computes it a part of the model, or detach() it.",
                    name,
                )
        samples = Samples(None, leaves, by_sample, given.spec, reading.size)

        def zeros(value: int = 0) -> Any:
            return samples.tree(lambda x: x.new_full(x.shape[1:], value))

        return Inputs([samples], reading.size, trained, zeros)


def _is_whole(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _same(output: List[T], other: List[T]) -> bool:
    """Whether two calls gave the same."""
    return len(output) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, 1e-6, 0.0, equal_nan=True)
        for a, b in zip(output, other)
    )
