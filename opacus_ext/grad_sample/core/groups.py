"""The samples of a batch, which run at once, split by branches, or one by one.

Where the code reads a value of a sample, by ``if`` or ``.item()``, the values of all
samples are compared. If they differ, the group is split by value and each part runs
again (:class:`~group.BranchesDiffer`). Ops whose output shape depends on data are
treated likewise.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections import UserDict, UserList, deque
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any, Callable, Hashable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import init

from opacus_ext.grad_sample.core.group import BranchesDiffer, SampleGroup
from opacus_ext.grad_sample.core.values import key_of, key_of_tree, set_apart
from opacus_ext.grad_sample.rules import NotAtOnce, handles
from opacus_ext.private_torch import is_batched, pytree
from opacus_ext.refused import Refused

T = torch.Tensor
Take = Callable[[Any, int], Any]


class Samples(NamedTuple):
    """
    Samples with one tree structure and shapes, each a batch of one.

    Attributes:
        rows: their indices in the batch; None for all
        leaves: tensors ``[B, 1, ...]``, or values that all samples share
        by_sample: for each leaf, True if it is a tensor ``[B, 1, ...]``
        spec: structure of a sample
        size: number of samples
        like: the mapping that a sample is, such as a BatchEncoding, if it is no dict
    """

    rows: T | None
    leaves: list[Any]
    by_sample: list[bool]
    spec: pytree.TreeSpec
    size: int
    like: UserDict | None = None

    def select(self, index: T) -> Samples:
        """Returns the samples at some indices."""
        # All samples in their order need no copies.
        if len(index) == self.size and bool((index[1:] > index[:-1]).all()):
            return self
        leaves = self._map(lambda leaf: leaf[index.to(leaf.device)])
        rows = index
        if self.rows is not None:
            rows = self.rows[index]
        return self._replace(rows=rows, leaves=leaves, size=len(index))

    def alone(self, number: int) -> Any:
        """Returns a sample as a tree of tensors ``[1, ...]``, which are no views."""
        return self.tree(lambda leaf: leaf[number].clone())

    def zeros(self, value: int = 0) -> Any:
        """Returns a sample filled with zeros, or with another number."""
        return self.tree(lambda leaf: leaf.new_full(leaf.shape[1:], value))

    def tree(self, function: Callable[[T], Any]) -> Any:
        """Returns the tree of a sample, with a function applied to batched leaves."""
        tree = pytree.tree_unflatten(self._map(function), self.spec)
        if self.like is None:
            return tree
        # A copy keeps the type and other attributes, such as those of a BatchEncoding.
        sample = copy.copy(self.like)
        sample.data = tree
        return sample

    def _map(self, function: Callable[[T], Any]) -> list[Any]:
        """Applies a function to the batched leaves."""
        leaves = []
        for leaf, by_sample in zip(self.leaves, self.by_sample):
            leaves.append(function(leaf) if by_sample else leaf)
        return leaves


def samples_of(batch: Any, take: Take | None = None) -> tuple[list[Samples], int]:
    """
    Splits a batch into samples, grouped by structure and shapes, and returns these and
    the batch size; see :function:`~opacus_ext.clipped_grads` for the arguments.
    """
    if take is not None:
        return _taken(batch, take)
    like = None
    if isinstance(batch, UserDict):
        like = batch
    # A mapping of a type that pytree does not know would be a leaf.
    if isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES:
        batch = dict(batch)
    paths, structure = pytree.tree_flatten_with_path(batch)
    size = _size_of(paths)
    leaves = [leaf for _, leaf in paths]
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, T)]
    # Samples must not share memory. The compiler copies all of them.
    if not torch.compiler.is_compiling():
        tensors = set_apart(tensors, [0] * len(tensors))
    by_sample = [isinstance(leaf, T) for leaf in leaves]
    apart = iter(tensors)
    for position, is_tensor in enumerate(by_sample):
        if is_tensor:
            leaves[position] = next(apart).unsqueeze(1)
    return [Samples(None, leaves, by_sample, structure, size, like)], size


def _size_of(paths: Sequence[tuple[tuple, Any]]) -> int:
    """Returns the first dim that all tensors of a batch have; refuses other leaves."""
    # One leaf for each first dim is named; leaves without one have -1 or -2.
    names: dict[int, str] = {}
    for path, leaf in paths:
        name = pytree.keystr(path) or "batch"
        if isinstance(leaf, T) and leaf.layout is torch.strided and not leaf.is_nested:
            names.setdefault(leaf.shape[0] if leaf.dim() else -1, name)
        elif not isinstance(leaf, (bool, NoneType)):
            # Each sample would see all of a list, an array or a number.
            kind = f"type {type(leaf).__name__}"
            if isinstance(leaf, T):
                kind = "nested tensors" if leaf.is_nested else f"{leaf.layout}"
            names.setdefault(-2, f"{name} of {kind}")
    if len(names) == 1 and min(names) >= 0:
        return min(names)
    reasons = {-1: "has no dims", -2: "is no tensor that can be cut"}
    described = []
    for size, name in names.items():
        described.append(f"{name} {reasons.get(size, f'has first dim {size}')}")
    raise Refused(
        "A batch is a tree of tensors [B, ...] with one first dim, got "
        f"{', '.join(described) or 'no tensor'}.",
        parameter="batch",
        remedy="Close over what all samples share in the loss, make tensors of "
        "lists, or give take=function, where function(batch, i) gives sample i.",
    )


def _lengths(batch: Any) -> set[int]:
    """Returns the numbers of items that a batch may have, by its length and parts."""
    if isinstance(batch, (UserDict, UserList)):
        batch = batch.data
    if isinstance(batch, T):
        return _lengths_of_fields([batch])
    if isinstance(batch, Mapping):
        return _lengths_of_fields([*batch.values()])
    if not isinstance(batch, (list, tuple)):
        return set()
    lengths = _lengths_of_fields(batch)
    kinds: set[Any] = set()
    for item in batch:
        if isinstance(item, T):
            kinds.add((item.dtype, item.shape[1:]))
        else:
            kinds.add(type(item))
    # Items of one kind may be the samples; of several kinds, they are fields.
    if len(kinds) < 2:
        lengths.add(len(batch))
    return lengths


def _lengths_of_fields(fields: Sequence[Any]) -> set[int]:
    """Returns their length, if it is one."""
    lengths = set()
    for field in fields:
        if not isinstance(field, (list, tuple, T)):
            return set()
        if isinstance(field, T) and not field.dim():
            return set()
        lengths.add(len(field))
    if len(lengths) > 1:
        return set()
    return lengths


def _taken(batch: Any, take: Take) -> tuple[list[Samples], int]:
    """Makes samples of what ``take`` returns; see :function:`samples_of`."""
    if not callable(take):
        raise Refused(
            f"take is a function, got {type(take).__name__}.",
            parameter="take",
            remedy="Give a function of the batch and a number i that returns sample i.",
        )
    items = list(_items(batch, take))
    flattened = [pytree.tree_flatten(item) for item in _apart(items)]
    # The numbers of the samples that can run together.
    kinds: dict[Hashable, list[int]] = {}
    for number, (leaves, structure) in enumerate(flattened):
        kind = _kind_of(leaves, structure, number)
        kinds.setdefault(kind, []).append(number)
    samples = []
    for numbers in kinds.values():
        leaves, structure = flattened[numbers[0]]
        by_sample = [isinstance(leaf, T) for leaf in leaves]
        columns = zip(*(flattened[number][0] for number in numbers))
        for position, column in enumerate(columns):
            if by_sample[position]:
                rows_of_leaf = [leaf.detach() for leaf in column]
                leaves[position] = torch.stack(rows_of_leaf)
        # One kind is the whole batch, in its order.
        rows = None
        if len(kinds) > 1:
            rows = torch.tensor(numbers)
        samples.append(Samples(rows, leaves, by_sample, structure, len(numbers)))
    return samples, len(items)


def _apart(items: list[Any]) -> list[Any]:
    """Copies what several items hold, or may hold, and could write to."""
    seen: set[int] = set()

    def separate(leaf: Any) -> Any:
        # Arrays of several samples may be views of one.
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if isinstance(leaf, T) or key_of(leaf) is not None or isinstance(leaf, _CODE):
            return leaf
        if id(leaf) in seen:
            return _copied(leaf)
        seen.add(id(leaf))
        return leaf

    return [pytree.tree_map(separate, sample) for sample in items]


def _copied(leaf: object) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise Refused(
            f"Several samples hold one {type(leaf).__name__}, which can't be copied "
            f"({type(error).__name__}: {error}): one could write to what others read.",
            parameter="take",
            remedy="Close over it in the loss, or give each sample its own.",
        ) from error


def _kind_of(leaves: list[Any], structure: pytree.TreeSpec, number: int) -> Hashable:
    """Returns a key that is equal for samples that run together."""
    keys: list[Hashable | None] = [key_of_tree(structure)]
    for leaf in leaves:
        if isinstance(leaf, T):
            keys.append((leaf.shape, leaf.dtype, leaf.device))
        else:
            keys.append(key_of(leaf))
    # An object without a key may be unlike that of any other sample.
    if None in keys:
        return number
    return tuple(keys)


# Samples may share code, modules and classes: a copy would not be the same object.
_CODE = type, ModuleType, FunctionType, BuiltinFunctionType, nn.Module
# At least so many items after the last one are tried.
_BEYOND = 8


def _items(batch: Any, take: Take) -> Iterator[Any]:
    """
    Yields the samples. ``take.size(batch)`` is their number. Without it, the batch ends
    at an item that fails if all later items fail too. An error of a single item does
    not end the batch.
    """
    if hasattr(take, "size"):
        for number in range(take.size(batch)):
            yield _checked_item(take(batch, number), number)
        return
    lengths, count = _lengths(batch), 0
    sample, error = _attempt(batch, take, count)
    while error is None:
        yield _checked_item(sample, count)
        count += 1
        sample, error = _attempt(batch, take, count)
    last = max(count + _BEYOND, *lengths, 0)
    behind = range(count + 1, last + 1)
    goes_on = any(_attempt(batch, take, number)[1] is None for number in behind)
    # A batch that is longer, and has no part of this length, has not ended either.
    if goes_on or lengths and count not in lengths and count < max(lengths):
        raise Refused(
            f"take(batch, {count}) failed ({type(error).__name__}: {error}), and the "
            "batch does not end there.",
            parameter="take",
            remedy="Mend it; or if there are no more samples, set take.size = function,"
            " where function(batch) gives their number.",
        ) from error


def take_of_call(take: Take) -> Take:
    """Makes a function that takes samples of ``(args, kwargs)``."""

    def take_both(arguments: Any, number: int) -> Any:
        args, kwargs = arguments
        by_position, by_name = (), {}
        if args:
            by_position = take(args, number)
        if kwargs:
            by_name = take(kwargs, number)
        return tuple(by_position), dict(by_name)

    def size(arguments: Any) -> int:
        size_of = getattr(take, "size")
        sizes = {size_of(part) for part in arguments if part} - {None}
        if len(sizes) != 1:
            raise Refused(
                f"The arguments by position and by keyword hold {sorted(sizes)} "
                "samples.",
                parameter="take",
                remedy="Give as many samples in both.",
            )
        return min(sizes)

    # Without a size, a batch ends where `take` fails.
    if hasattr(take, "size"):
        vars(take_both)["size"] = size
    return take_both


def _attempt(batch: Any, take: Take, number: int) -> tuple[Any, Exception | None]:
    """Returns a sample, or the error that there is none."""
    try:
        sample = take(batch, number)
    except (IndexError, StopIteration) as error:
        return None, error
    # A slice after the last sample is empty, and raises no error.
    if _has_no_rows(_tensors_of(sample)):
        return sample, IndexError("no rows")
    return sample, None


def _tensors_of(sample: Any) -> list[T]:
    return [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, T)]


def _has_no_rows(tensors: list[T]) -> bool:
    is_empty = [tensor.dim() > 0 and not len(tensor) for tensor in tensors]
    return bool(is_empty) and all(is_empty)


def _checked_item(sample: Any, number: int) -> Any:
    tensors = _tensors_of(sample)
    if not tensors or _has_no_rows(tensors):
        raise Refused(
            f"take(batch, {number}) gave a sample without "
            f"{'rows' if tensors else 'a tensor'}.",
            parameter="take",
            remedy="It must give sample i as a tree of tensors [1, ...].",
        )
    return sample


def in_groups(
    samples: Sequence[Samples],
    at_once: Callable[[Samples], None],
    one: Callable[[Samples, int], None],
    *,
    microbatch: int | None = None,
    one_by_one: bool = False,
    warn: Callable[[str], None] | None = None,
) -> None:
    """
    Runs all samples: at once, split by branches, or one by one.

    Args:
        samples: one entry for each kind of sample
        at_once: runs samples together, or fails without side effects: with
            BranchesDiffer if they must be split, with another error if vmap can't run
            them
        one: runs a sample alone
        microbatch: the most samples that run together
        one_by_one: True to run each sample alone
        warn: called with the reason if vmap fails
    """
    todo = deque(samples)
    while todo:
        part, reason = todo.popleft(), None
        if microbatch is not None and part.size > microbatch:
            chunks = torch.arange(part.size).split(microbatch)
            todo.extendleft(map(part.select, reversed(chunks)))
            continue
        # Samples that fail together may have written to themselves before.
        if part.size > 1 and not one_by_one:
            before = written(part)
            try:
                at_once(part)
                continue
            except BranchesDiffer as differ:
                put_back(before)
                todo.extendleft(_split(part, differ.answers))
                continue
            except Refused:
                raise
            except Exception as error:
                # If the user's code has failed, and not vmap, it fails alone as well.
                put_back(before)
                reason = why(error)
        for number in range(part.size):
            one(part, number)
        if reason and warn is not None:
            warn(reason)


def _split(samples: Samples, answers: T) -> Iterator[Samples]:
    """Yields the samples with each of the answers ``[B]``."""
    answers = answers.cpu()
    for answer in answers.unique():
        yield samples.select((answers == answer).nonzero()[:, 0])


def version(tensor: T) -> int:
    """Returns the number of writes to a tensor."""
    if tensor.is_inference():
        return 0
    return tensor._version


def written(samples: Samples) -> list[tuple[T, int, T | None]]:
    """
    Returns samples, which code may write to, with their versions and copies; None for
    outputs of a model, which are large.
    """
    states: list[tuple[T, int, T | None]] = []
    for leaf, by_sample in zip(samples.leaves, samples.by_sample):
        if not by_sample:
            continue
        copied = None
        if not leaf.requires_grad:
            copied = leaf.detach().clone()
        states.append((leaf, version(leaf), copied))
    return states


def put_back(before: list[tuple[T, int, T | None]]) -> None:
    """Undoes the writes of a failed attempt to its samples."""
    for leaf, count, copied in before:
        if version(leaf) == count:
            continue
        # An output of a model was not copied, as it is large.
        if copied is None:
            raise Refused(
                f"A tensor of shape {tuple(leaf.shape)} that a model has computed was "
                "changed in place, by code that samples can't run together.",
                remedy="Compute out of place: y = 2 * x instead of x.mul_(2).",
            )
        leaf.detach().copy_(copied)


def why(error: BaseException) -> str:
    """Formats an error as one line of text, with the line of the user's code."""
    lines = filter(None, map(str.strip, str(error).splitlines()))
    text = next(lines, "")
    if not isinstance(error, NotAtOnce):
        text = f"{type(error).__name__}: {text}"
    text = text[:200]
    # The innermost frame that is neither torch's nor ours is the user's.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        ours = "opacus_ext/grad_sample/" in file or "opacus_ext/private_torch" in file
        if "/torch/" not in file and not ours:
            return f"{file}:{frame.lineno}: {frame.line} ({text})"
    return text


def warn_one_by_one(name: str, reason: str) -> None:
    """Warns that samples run one by one, with the reason."""
    text = f"{name} runs one sample after the other, as vmap can't run {reason}."
    warnings.warn(f"{text} That is exact, but slower for short samples.", stacklevel=3)


# -- handlers of functions whose output or its shape depends on values -----------------


def _both(*names: str) -> list[Callable]:
    """Returns the methods of tensors and the functions of torch with these names."""
    functions = []
    for name in names:
        for owner in (T, torch):
            if hasattr(owner, name):
                functions.append(getattr(owner, name))
    return functions


@handles(
    *_both("item", "tolist", "numpy", "is_nonzero", "nonzero", "argwhere", "bincount"),
    *_both("unique", "unique_consecutive"),
    *(T.__bool__, T.__int__, T.__float__, T.__index__, T.__complex__),
    *(T.__format__, T.__repr__, T.__str__),
)
def ask(
    group: SampleGroup, function: Callable, tensor: T, *args: Any, **kwargs: Any
) -> Any:
    """Uses the value that all samples share as the first argument."""
    return function(group.agree(tensor), *args, **kwargs)


@handles(
    *_both("new_zeros", "new_ones", "new_empty", "arange", "linspace"),
    *_both("narrow", "masked_select", "repeat_interleave"),
)
def ask_rest(group: SampleGroup, function: Callable, *args: Any, **kwargs: Any) -> T:
    """Uses values that all samples share as later arguments, such as shapes."""
    # The first argument is a tensor with samples, but for functions that make one.
    first = 0 if function in (torch.arange, torch.linspace) else 1
    shared = _agreed(group, args[first:])
    return group.call(function, *args[:first], *shared, **_agreed(group, kwargs))


# Arguments of these types are most frequent, and the same for all samples.
_NUMBERS = {int, float, type(None), type(...), torch.dtype, torch.device, bool}


def _agreed(group: SampleGroup, values: Any) -> Any:
    leaves = values
    if isinstance(values, dict):
        leaves = values.values()
    if _NUMBERS.issuperset(map(type, leaves)):
        return values
    return pytree.tree_map_only(T, group.agree, values)


@handles(*_both("where"))
def where(group: SampleGroup, function: Callable, tensor: T, *args: Any) -> Any:
    """Handles ``where(condition)``, which is ``nonzero``."""
    if args:
        return group.call(function, tensor, *args)
    return function(group.agree(tensor))


@handles(T.__getitem__)
def getitem(group: SampleGroup, function: Callable, tensor: T, index: Any) -> Any:
    """Handles masks and slices in an index, which decide the output shape."""
    if not _is_of_numbers(index):
        index = _agreed_index(group, index)
    return group.call(function, tensor, index)


def _is_of_numbers(index: Any) -> bool:
    """Returns True for the most frequent indices, which hold no tensors."""
    parts = index if type(index) is tuple else (index,)
    for part in parts:
        numbers: Sequence[Any] = (part,)
        if type(part) is slice:
            numbers = part.start, part.stop, part.step
        for number in numbers:
            if type(number) not in _NUMBERS:
                return False
    return True


@handles(T.__setitem__)
def setitem(
    group: SampleGroup, function: Callable, tensor: T, index: Any, value: Any
) -> Any:
    """Handles masks; a single value is written without comparing them."""
    if _is_mask(index) and not (isinstance(value, T) and value.dim()):
        # The shape of the result does not depend on a mask that only fills.
        with group:
            missing = tensor.dim() - index.dim()
            mask = index.reshape(index.shape + (1,) * missing)
            return tensor.masked_fill_(mask, value)
    return group.call(function, tensor, _agreed_index(group, index), value)


def _is_mask(index: object) -> bool:
    return isinstance(index, T) and index.dtype in (torch.bool, torch.uint8)


def _agreed_index(group: SampleGroup, index: Any) -> Any:
    if _is_mask(index):
        return group.agree(index)
    if isinstance(index, slice):
        ends = [index.start, index.stop, index.step]
        for position, end in enumerate(ends):
            if isinstance(end, T):
                ends[position] = int(group.agree(end))
        return slice(*ends)
    if type(index) in (tuple, list):
        return type(index)([_agreed_index(group, part) for part in index])
    return index


@handles(*_both("equal", "allclose"), T.__contains__)
def compare(group: SampleGroup, function: Callable, *args: Any, **kwargs: Any) -> bool:
    """Handles comparisons of tensors that return a bool."""
    # Within the block the group sees these ops, and compares the bools of samples.
    with group:
        if function is T.__contains__:
            return bool((args[0] == args[1]).any())
        if function in (torch.allclose, T.allclose):
            return bool(torch.isclose(*args, **kwargs).all())
        first, second = args
        return first.shape == second.shape and bool((first == second).all())


# -- handlers of functions that vmap gets wrong ----------------------------------------


_aten = torch.ops.aten


@handles(*_both("select_scatter"), _aten.select_scatter, _aten.select_scatter.default)
def select_scatter(
    group: SampleGroup, function: Callable, input: T, src: T, dim: int, index: int
) -> T:
    """
    Writes a slice. Under vmap each row of ``input`` would count gradients of ``src``.
    """
    start = index
    if index < 0:
        start += input.shape[dim]
    with group:
        return torch.slice_scatter(input, src.unsqueeze(dim), dim, start, start + 1)


@handles(*_both("as_strided_", "set_"), _aten.as_strided_, _aten.as_strided_.default)
def moved_in_place(
    group: SampleGroup, function: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Runs samples one by one: vmap leaves the tensor as it is."""
    raise NotAtOnce(f"{function.__name__}")


# -- handlers of autograd functions within the forward ---------------------------------


@handles(getattr(T.data, "__get__"))
def data_of(group: SampleGroup, function: Callable, tensor: T) -> T:
    """Tells the group, as what is written there has no new version."""
    group.reach(tensor)
    return group.call(function, tensor)


@handles(T.requires_grad.__get__)
def requires_grad(group: SampleGroup, function: Callable, tensor: T) -> bool:
    """Reads the flag, which vmap hides."""
    if is_batched(tensor):
        tensor = group.level.unwrap(tensor)
    return function(tensor)


@handles(T.requires_grad_, init.uniform_, init.normal_, init.kaiming_uniform_)
def of_leaf(
    group: SampleGroup, function: Callable, tensor: T, *args: Any, **kwargs: Any
) -> T:
    """Makes a leaf: one that all samples share, or at which their graph begins."""
    if function is T.requires_grad_:
        if not group.eager:
            return autograd_inside(group, function)
        if is_batched(tensor):
            return group.begin_graph(tensor, *args, **kwargs)
    elif is_batched(tensor) or not isinstance(tensor, nn.Parameter):
        return function(tensor, *args, **kwargs)
    with group.outside():
        return function(tensor, *args, **kwargs)


@handles(torch.autograd.grad, T.retain_grad)
def autograd_inside(
    group: SampleGroup, function: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Runs samples one by one: uses within a gradient are not intercepted."""
    raise NotAtOnce(f"{function.__name__} in the forward")


@handles(T.backward)
def backward_inside(
    group: SampleGroup, function: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Refuses ``backward()`` in the forward."""
    raise Refused(
        "backward() within the forward pass adds gradients that are not clipped.",
        remedy="Take torch.autograd.grad(..., create_graph=True) there, or call "
        "backward() outside.",
    )


@handles(T.register_hook)
def register_hook(
    group: SampleGroup, function: Callable, tensor: T, hook: Callable
) -> Any:
    """Calls a hook on an activation with the gradients of all samples."""
    if group.is_shared(tensor):
        raise NotAtOnce("a hook on a parameter, or on a value computed from some")
    if not is_batched(tensor):
        return function(tensor, hook)

    def check(grad: T) -> None:
        changed = hook(grad)
        if changed is not None and changed is not grad:
            raise Refused(
                f"A hook on a tensor ({getattr(hook, '__name__', hook)}) changes the "
                "gradient of an activation.",
                remedy="Remove it, or train one sample after the other: "
                'grad_sample_mode="scan".',
            )

    with group.outside():
        return function(group.level.unwrap(tensor), check)
