"""The batch size of a call, and which of its inputs are samples.

A tensor whose first dim is the batch size may hold samples, or be a table that all
samples share. Each assignment of the inputs is a *reading*. If a call has several, the
model is tried with another number of samples in each. If one runs, it is right, and is
remembered by the names of the inputs. If several run, each sample alone must have the
same outputs and gradients in all of them; otherwise the call is refused.
"""

from __future__ import annotations

import inspect
import itertools
from contextlib import suppress
from typing import Any, Callable, Iterable, NamedTuple, NoReturn, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, keystr, tree_leaves, tree_unflatten

from opacus_ext.grad_sample.adapter.outputs import flatten
from opacus_ext.grad_sample.adapter.state import PLAIN
from opacus_ext.grad_sample.core.groups import Samples, samples_of
from opacus_ext.grad_sample.core.values import set_apart
from opacus_ext.refused import Refused

T = torch.Tensor
Take = Callable[[Any, int], Any]
Call = Callable[[Any], Any]
_DOUBTS = 5  # up to so many doubtful tensors, every combination is tried
_PRIMES = [n for n in range(2, 2**12) if all(n % k for k in range(2, min(n, 64)))]


class Inputs(NamedTuple):
    """The inputs of a call."""

    samples: list[Samples]  # one entry for each kind of sample
    size: int
    trained: list[tuple[T, T]]  # inputs that require a gradient, and their leaves
    zeros: Callable[..., Any]  # makes a sample filled with zeros, or another number
    given: Any = None  # the ``(args, kwargs)`` of the call


class Reading(NamedTuple):
    """One assignment of the inputs: the batch size, and where the samples are."""

    size: int
    dims: tuple[int | None, ...]  # batch dim of each tensor; None if shared


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
        run: ``run(call, inputs)`` returns ``call(inputs)`` without side effects
        batch_dim: the batch dim of tensors
        take, shared: arguments of make_private

    Attributes:
        drawn: batch sizes that the loader has drawn so far
        most: the largest batch that it drew; None if unknown
        states: pairs (layers, width) of the hidden states of recurrent layers
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Call, Any], Any],
        batch_dim: int = 0,
        take: Take | None = None,
        shared: Sequence[str] = (),
    ):
        self.name, self.run, self.batch_dim = type(module).__name__, run, batch_dim
        self.take, self.shared, self.module = take, set(shared), module
        self.parameters: Callable[[], Iterable[T]] = module.parameters
        self.drawn: set[int] = set()
        self.most: int | None = None
        parameters = inspect.signature(module.forward).parameters.values()
        self._known = {p.name for p in parameters}
        self._named = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        rest = [p.name for p in parameters if p.kind == p.VAR_POSITIONAL]
        self._rest = rest[0] if rest else "args"
        # By name and number of dims: the batch dim of inputs for which it is certain,
        # and the batch sizes of inputs so far.
        self._dims: dict[tuple[str, int], int] = {}
        self._sizes: dict[tuple[str, int], set[int]] = {}
        self._tables: dict[str, set[torch.Size]] = {}  # shapes of shared inputs
        self._more: bool | None = None  # True if it takes any number of ``*args``
        self._zeros: Callable[..., Any] = self._no_zeros  # with take
        self.states = {
            (m.num_layers * (1 + m.bidirectional), width)
            for m in module.modules()
            if hasattr(m, "bidirectional")
            for width in (m.hidden_size, getattr(m, "proj_size", 0))
        }

    def read(self, call: Call, args: tuple, kwargs: dict) -> Inputs:
        """Finds the samples of ``call((args, kwargs))``, or refuses it."""
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
        readings = self._readings(given)
        reading = readings[0]
        if len(readings) > 1:
            reading = self._decide(call, given, readings)
        if reading.size > 1:
            self._check_lists(call, given, reading)
            self._learn(given, reading, sure=False)
        return self._inputs(given, reading)

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

    # -- readings ----------------------------------------------------------------------

    def _is_state(self, x: T) -> bool:
        return x.dim() == 3 and (x.shape[0], x.shape[2]) in self.states

    def _options(self, name: str, x: T) -> list[int]:
        """Returns the possible batch dims of a tensor."""
        if x.shape in self._tables.get(name, ()):
            return []
        if (name, x.dim()) in self._dims:
            return [self._dims[name, x.dim()]]
        dim = min(self.batch_dim, x.dim() - 1)
        return [1, 0] if dim == 0 and self._is_state(x) else [dim]

    def _readings(self, given: Given) -> list[Reading]:
        """Returns all readings of a call, those with the most samples first."""
        options = [self._options(name, x) for _, name, x in given.tensors]
        sizes: dict[int, bool] = {}  # possible batch sizes; True if certain
        for (_, name, x), dims in zip(given.tensors, options):
            for d in dims:
                sizes[x.shape[d]] = sizes.get(x.shape[d], False)
                sizes[x.shape[d]] |= (name, x.dim()) in self._dims
        if not (self.batch_dim or sizes.keys() & self.drawn):
            self._refuse_other_dim(given)
        found = [n for n, certain in sizes.items() if certain]
        found = found or [n for n in sizes if n in self.drawn] or list(sizes) or [0]
        readings = []
        for size in [0] if 0 in found else found:
            choices: list[list[int | None]] = []
            for (_, name, x), every in zip(given.tensors, options):
                dims = [d for d in every if x.shape[d] == size]
                sure = dims and ((name, x.dim()) in self._dims or size < 2)
                choices.append(dims[:1] if sure else [*dims, None])
            doubtful = [i for i, dims in enumerate(choices) if len(dims) > 1]
            if len(choices) == 1:
                choices = [[d for d in choices[0] if d == self.batch_dim] or choices[0]]
            for places in itertools.product(*choices):
                shared = sum(places[i] is None for i in doubtful)
                if set(places) != {None} and (len(doubtful) <= _DOUBTS or shared <= 2):
                    readings.append(Reading(size, places))
        return readings

    def _refuse_other_dim(self, given: Given) -> None:
        """Refuses tensors whose dim 1, and not dim 0, is as long as a batch."""
        for _, name, x in given.tensors:
            if x.dim() > 1 and x.shape[1] in self.drawn:
                self._refuse(
                    f"input {name} of shape {tuple(x.shape)} has as many entries in "
                    "dim 1 as the loader drew records, and not in dim 0",
                    "Give make_private(batch_first=False), or call the model on the "
                    "records that were drawn.",
                    name,
                )

    def _check_lists(self, call: Call, given: Given, reading: Reading) -> None:
        """
        Refuses a list, dict or ``*args`` whose items may be samples: its length is the
        batch size, or the batch size is read from its items alone.
        """
        certain: dict[str, bool] = {}  # by list: True if all of its tensors are certain
        outside = reading.size in self.drawn
        for (_, name, x), d in zip(given.tensors, reading.dims):
            top = name.partition("[")[0]
            if top not in given.lists:
                outside = outside or d is not None
                continue
            sure = (name, x.dim()) in self._dims or x.shape in self._tables.get(
                name, ()
            )
            sure = sure or d == 1 and self._is_state(x)
            certain[top] = certain.get(top, True) and sure
        for name, count in given.lists.items():
            fits = count == reading.size or name in certain and not outside
            if not fits or certain.get(name, False):
                continue
            if name != self._rest or self._takes_more(call, given):
                self._refuse_items(given, name)

    def _takes_more(self, call: Call, given: Given) -> bool:
        """True if the model runs with more ``*args``, unlike a wrapper of a model."""
        if self._more is None:
            self._more = False
            args, kwargs = tree_unflatten(given.leaves, given.spec)
            with torch.no_grad(), suppress(Exception):
                self.run(call, ((*args, args[-1], args[-1]), kwargs))
                self._more = True
        return self._more

    # -- decisions ---------------------------------------------------------------------

    def _decide(self, call: Call, given: Given, readings: list[Reading]) -> Reading:
        """Chooses the right reading, by trials with other numbers of samples."""
        sizes = {n for _, _, x in given.tensors for n in x.shape} - {0}
        # More than there are: code that looks rows up finds too few in a table.
        most = max(r.size for r in readings)
        primes = (n for n in _PRIMES if all(m % n for m in sizes))
        count = min(primes, key=lambda n: (n <= most, n))
        ran: list[tuple[Reading, list[T]]] = []
        refused: Refused | None = None
        for grad in (False, True):  # with a graph only if the model's code needs one
            for r in readings if not ran else ():
                with torch.set_grad_enabled(grad), suppress(Exception):
                    try:  # a reading that fails is not the right one
                        ran.append((r, self._try(call, given, r, count)))
                    except Refused as error:
                        refused = error
        found = [x for x in ran if self._fits(x[1], count)] or ran
        first = readings[0]
        if found and found[0][0].dims.count(None) > first.dims.count(None):
            with torch.no_grad(), suppress(Exception):  # or does it run on multiples?
                self._try(call, given, first, 2 * first.size)
                found = []
        if len(found) > 1:  # a mask of ones fits any number of samples
            found = self._run_with_zeros(call, given, found, count) or found
        same = True
        if len(found) > 1:  # which of them give rows that equal samples alone?
            alone: dict[Reading, list[tuple[list[T], list[T] | None]]] = {}
            for r, outputs in found:
                with torch.enable_grad():
                    calls = [self._try_alone(call, given, r, i) for i in range(r.size)]
                if self._by_rows(outputs, [own for own, _ in calls], count):
                    alone[r] = calls
            same = found[0][0] in alone
            same = same and all(self._alike(calls) for calls in zip(*alone.values()))
            found = [x for x in found if not same or x[0] in alone]
        if len(found) == 1:
            self._learn(given, found[0][0], sure=True)
        elif not found and refused is not None:  # for another reason than its inputs
            raise refused
        elif not found or not same:
            self._refuse_doubtful(given, [r for r, _ in found] or readings)
        return found[0][0]

    def _run_with_zeros(
        self, call: Call, given: Given, found: list[tuple[Reading, list[T]]], count: int
    ) -> list[tuple[Reading, list[T]]]:
        """Returns what of ``found`` runs where all that is in doubt is zero."""
        tensors = list(given.tensors)
        for k, dims in enumerate(zip(*(r.dims for r, _ in found))):
            if len({*dims}) > 1:
                tensors[k] = (*tensors[k][:2], torch.zeros_like(tensors[k][2]))
        given, run = given._replace(tensors=tensors), []
        for r, outputs in found:
            with torch.no_grad(), suppress(Exception):
                self._try(call, given, r, count)
                run.append((r, outputs))
        return run

    def _try(
        self, call: Call, given: Given, reading: Reading, count: int, first: int = 0
    ) -> list[T]:
        """Returns the outputs of the model for ``count`` samples."""
        leaves = list(given.leaves)
        for (i, _, x), d in zip(given.tensors, reading.dims):
            x = x.detach()
            if d is not None:
                index = torch.arange(first, first + count, device=x.device)
                index %= max(1, x.shape[d])
                x = x.index_select(d, index)
            leaves[i] = x
        output = self.run(call, tree_unflatten(leaves, given.spec))
        return [y for y in tree_leaves(output) if isinstance(y, T)]

    def _try_alone(
        self, call: Call, given: Given, reading: Reading, i: int
    ) -> tuple[list[T], list[T] | None]:
        """Returns the outputs for one sample, and their gradients if there are any."""
        grads: list[T] | None = None

        def with_gradients(inputs: Any) -> Any:
            nonlocal grads
            output = call(inputs)
            with suppress(RuntimeError):
                grads = self.gradients(output)
            return output

        outputs = self._try(with_gradients, given, reading, 1, i)
        return outputs, grads

    def _by_rows(self, whole: list[T], alone: list[list[T]], count: int) -> bool:
        """True if rows of outputs equal samples alone, wherever their shapes agree."""
        for i, y in enumerate(whole):
            rows = y.chunk(count, min(self.batch_dim, y.dim() - 1)) if y.dim() else ()
            for k, x in enumerate(rows):
                own = alone[k % len(alone)][i : i + 1]
                if len(rows) == count and own and own[0].shape == x.shape:
                    if not _near(x, own[0]):
                        return False
        return True

    def _alike(self, calls: Sequence[tuple[list[T], list[T] | None]]) -> bool:
        """True if outputs and gradients agree; a gate of zero hides the outputs."""
        same, first = [], calls[0][0]
        for outputs, grads in calls:
            if [y.shape for y in outputs] == [y.shape for y in first]:
                same.append(([y for y in outputs if y.dim()], grads))
        (outputs, grads), *others = same
        return grads is not None and all(
            _same(y, outputs, 1e-5, 1e-8)
            and g is not None
            and _same(g, grads, 1e-3, 1e-5)
            for y, g in others
        )

    def gradients(self, output: Any) -> list[T]:
        """Returns gradients of a weighted sum of outputs, over their largest entry."""
        params = [p for p in self.parameters() if p.requires_grad]
        leaves = (y for y in tree_leaves(output) if isinstance(y, T) and y.dim())
        outputs = [y for y in leaves if y.requires_grad]
        along = [torch.linspace(1, 2, y.numel()).to(y).view_as(y) for y in outputs]
        if not params or not outputs:
            return []
        found = torch.autograd.grad(outputs, params, along, allow_unused=True)
        grads = [g for g in found if g is not None and g.numel()]
        largest = max((float(g.abs().max()) for g in grads), default=0.0)
        return [g / (largest or 1.0) for g in grads]

    def _fits(self, output: list[T], count: int) -> bool:
        """True if ``count`` divides the rows of the first output."""
        first = next((y for y in output if y.is_floating_point() and y.dim()), None)
        return first is None or (
            first.shape[min(self.batch_dim, first.dim() - 1)] % count == 0
        )

    def _learn(self, given: Given, reading: Reading, sure: bool) -> None:
        """Remembers inputs by name; ``sure`` if no other reading is possible."""
        others = {
            n
            for (_, _, x), at in zip(given.tensors, reading.dims)
            for axis, n in enumerate(x.shape)
            if axis != at
        }
        for (_, name, x), d in zip(given.tensors, reading.dims):
            if d is None:
                if sure or reading.size not in x.shape:
                    self._tables.setdefault(name, set()).add(x.shape)
            elif sure:
                self._dims[name, x.dim()] = d
            elif reading.size not in others:
                sizes = self._sizes.setdefault((name, x.dim()), set())
                sizes.add(reading.size)
                if len(sizes) > 1:  # its length follows the batch size
                    self._dims[name, x.dim()] = d

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

    def _refuse_doubtful(self, given: Given, readings: list[Reading]) -> NoReturn:
        columns = zip(given.tensors, zip(*(r.dims for r in readings)))
        doubtful = [(n, x.shape) for (_, n, x), dims in columns if len(set(dims)) > 1]
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in doubtful)
        last = doubtful[-1][0]
        if last.partition("[")[0] in given.lists:
            self._refuse_items(given, last.partition("[")[0])
        self._refuse(
            f"it can't be told which of {shapes} are samples, and which all samples "
            "share: the model runs in several ways, or with one number of samples only",
            f"Name those that all samples share: make_private(shared={[last]}); or "
            "give make_private(take=function), where function(inputs, i) gives sample "
            "i as a batch of one.",
            last,
        )

    def _refuse(self, what: str, remedy: str, name: str | None = None) -> NoReturn:
        raise Refused(
            f"{self.name}: {what}.", module=self.name, parameter=name, remedy=remedy
        )

    # -- samples -----------------------------------------------------------------------

    def _inputs(self, given: Given, reading: Reading) -> Inputs:
        leaves, trained = list(given.leaves), []
        by_sample = [False] * len(leaves)
        pairs = zip(given.tensors, reading.dims)
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
        samples = Samples(None, leaves, by_sample, given.spec, reading.size)
        whole = tree_unflatten(given.leaves, given.spec)
        return Inputs([samples], reading.size, trained, samples.zeros, whole)


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


def _whole(x: T) -> T:
    """Returns all of a tensor that is split, so that all processes decide alike."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _near(x: T, y: T) -> bool:
    """True if tensors differ by accumulated rounding at most."""
    x, y = _whole(x), _whole(y)
    coarse = x.dtype.itemsize < 4 or torch.is_autocast_enabled(x.device.type)
    part = 0.1 if coarse else 1e-3 if x.dtype.itemsize == 4 else 1e-6
    sizes = y.to(torch.float64).abs()
    largest = float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0
    return torch.allclose(x, y, part, part * largest, equal_nan=True)


def _same(output: list[T], other: list[T], rtol: float, atol: float) -> bool:
    """True if two calls gave the same outputs within the tolerances."""
    return len(output) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol, atol, equal_nan=True)
        for a, b in zip(map(_whole, output), map(_whole, other))
    )
