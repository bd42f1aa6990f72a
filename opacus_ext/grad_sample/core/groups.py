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
from torch.utils import _pytree as pytree

from opacus_ext.grad_sample.core.group import BranchesDiffer, SampleGroup
from opacus_ext.grad_sample.core.values import key_of, key_of_tree, set_apart
from opacus_ext.grad_sample.rules import NotAtOnce, handles
from opacus_ext.private_torch import is_batched
from opacus_ext.refused import Refused

T = torch.Tensor
Take = Callable[[Any, int], Any]


class Samples(NamedTuple):
    """Samples with one tree structure and shapes, each a batch of one."""

    rows: T | None  # their indices in the batch; None for all
    leaves: list[Any]  # tensors [B, 1, ...], or shared values
    by_sample: list[bool]  # for each leaf: True if it is a tensor [B, 1, ...]
    spec: pytree.TreeSpec  # structure of a sample
    size: int  # number of samples
    like: UserDict | None = None  # the mapping that a sample is, if it is no dict

    def select(self, index: T) -> Samples:
        """Returns the samples at some indices."""
        if len(index) == self.size and bool((index[1:] > index[:-1]).all()):
            return self
        pairs = zip(self.leaves, self.by_sample)
        leaves = [x[index.to(x.device)] if own else x for x, own in pairs]
        rows = index if self.rows is None else self.rows[index]
        return self._replace(rows=rows, leaves=leaves, size=len(index))

    def alone(self, i: int) -> Any:
        """Returns sample ``i`` as a tree of tensors ``[1, ...]``."""
        return self.tree(lambda x: x[i].clone())  # which is no view of the batch

    def zeros(self, value: int = 0) -> Any:
        """Returns a sample filled with zeros, or with another number."""
        return self.tree(lambda x: x.new_full(x.shape[1:], value))

    def tree(self, function: Callable[[T], Any]) -> Any:
        """Returns the tree of a sample, with a function applied to batched leaves."""
        pairs = zip(self.leaves, self.by_sample)
        leaves = [function(x) if own else x for x, own in pairs]
        found = pytree.tree_unflatten(leaves, self.spec)
        if self.like is None:
            return found
        sample = copy.copy(self.like)  # a BatchEncoding, say
        sample.data = found
        return sample


def samples_of(batch: Any, take: Take | None = None) -> tuple[list[Samples], int]:
    """
    Splits a batch into samples, grouped by structure and shapes, and returns these and
    the batch size; see :func:`~opacus_ext.clipped_grads` for the arguments.
    """
    if take is not None and not callable(take):
        raise Refused(
            f"take is a function, got {type(take).__name__}.",
            parameter="take",
            remedy="Give a function of the batch and a number i that returns sample i.",
        )
    if take is not None:
        return _taken(batch, take)
    like = batch if isinstance(batch, UserDict) else None
    is_mapping = (
        isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES
    )
    batch = dict(batch) if is_mapping else batch
    paths, spec = pytree.tree_flatten_with_path(batch)
    found: dict[int, str] = {}
    for name, x in ((pytree.keystr(path) or "batch", x) for path, x in paths):
        if isinstance(x, T) and x.layout is torch.strided and not x.is_nested:
            found.setdefault(x.shape[0] if x.dim() else -1, name)
        elif not isinstance(x, (bool, NoneType)):  # each sample would see all of it
            kind = f"type {type(x).__name__}"
            if isinstance(x, T):
                kind = "nested tensors" if x.is_nested else f"{x.layout}"
            found.setdefault(-2, f"{name} of {kind}")
    if len(found) != 1 or min(found) < 0:
        what = {-1: "has no dims", -2: "is no tensor that can be cut"}
        said = ", ".join(
            f"{name} {what.get(n, f'has first dim {n}')}" for n, name in found.items()
        )
        raise Refused(
            "A batch is a tree of tensors [B, ...] with one first dim, got "
            f"{said or 'no tensor'}.",
            parameter="batch",
            remedy="Close over what all samples share in the loss, make tensors of "
            "lists, or give take=function, where function(batch, i) gives sample i.",
        )
    (size,) = found
    by_sample = [isinstance(x, T) for _, x in paths]
    leaves = [x for _, x in paths]
    tensors = [x.detach() for x in leaves if isinstance(x, T)]
    if not torch.compiler.is_compiling():  # which copies all
        tensors = set_apart(tensors, [0] * len(tensors))
    apart = iter(tensors)
    leaves = [next(apart).unsqueeze(1) if isinstance(x, T) else x for x in leaves]
    return [Samples(None, leaves, by_sample, spec, size, like)], size


def _lengths(batch: Any) -> set[int]:
    """Returns the numbers of items that a batch may have, by its length and parts."""
    if isinstance(batch, T):
        return {len(batch)} if batch.dim() else set()
    batch = batch.data if isinstance(batch, (UserDict, UserList)) else batch
    if isinstance(batch, Mapping):
        return _lengths_of_fields(list(batch.values()))
    if not isinstance(batch, (list, tuple)):
        return set()
    kinds = {(x.dtype, x.shape[1:]) if isinstance(x, T) else type(x) for x in batch}
    return _lengths_of_fields(batch) | ({len(batch)} if len(kinds) < 2 else set())


def _lengths_of_fields(fields: Sequence[Any]) -> set[int]:
    """Returns their length, if it is one."""
    sized = [len(x) for x in fields if isinstance(x, (list, tuple)) or _has_dims(x)]
    return {*sized} if len(sized) == len(fields) and len({*sized}) == 1 else set()


def _has_dims(x: Any) -> bool:
    return isinstance(x, T) and x.dim() > 0


def _taken(batch: Any, take: Take) -> tuple[list[Samples], int]:
    items = list(_items(batch, take))
    kinds: dict[Any, list[int]] = {}  # the numbers of samples that can run together
    flat = [pytree.tree_flatten(item) for item in _apart(items)]
    for i, (leaves, spec) in enumerate(flat):
        kinds.setdefault(_kind_of(leaves, spec, i), []).append(i)
    samples = []
    for rows in kinds.values():
        leaves, spec = flat[rows[0]]
        columns = zip(*(flat[i][0] for i in rows))
        leaves = [
            torch.stack([x.detach() for x in column]) if isinstance(x, T) else x
            for x, column in zip(leaves, columns)
        ]
        by_sample = [isinstance(x, T) for x in leaves]
        at = torch.tensor(rows) if len(kinds) > 1 else None
        samples.append(Samples(at, leaves, by_sample, spec, len(rows)))
    return samples, len(items)


def _apart(items: list[Any]) -> list[Any]:
    """Copies what several items hold, or may hold, and could write to."""
    seen: set[int] = set()

    def own(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.copy()
        if isinstance(x, T) or key_of(x) is not None or isinstance(x, _CODE):
            return x
        is_new = id(x) not in seen
        seen.add(id(x))
        return x if is_new else _copied(x)

    return [pytree.tree_map(own, item) for item in items]


def _copied(x: Any) -> Any:
    try:
        return copy.deepcopy(x)
    except Exception as error:
        raise Refused(
            f"Several samples hold one {type(x).__name__}, which can't be copied "
            f"({type(error).__name__}: {error}): one could write to what others read.",
            parameter="take",
            remedy="Close over it in the loss, or give each sample its own.",
        ) from error


def _kind_of(leaves: list[Any], spec: pytree.TreeSpec, i: int) -> Hashable:
    """Returns a key that is equal for samples that run together."""
    keys: list[Hashable | None] = [key_of_tree(spec)]
    for x in leaves:
        is_tensor = isinstance(x, T)
        keys.append((x.shape, x.dtype, x.device) if is_tensor else key_of(x))
    # Of a None, it can't be told whether others are the same.
    return i if None in keys else tuple(keys)


_CODE = type, ModuleType, FunctionType, BuiltinFunctionType, nn.Module
_BEYOND = 8  # how many items behind the last one are tried at least


def _items(batch: Any, take: Take) -> Iterator[Any]:
    """
    Yields the samples. ``take.size(batch)`` is their number. Without it, the batch ends
    where an item fails, and all behind it do: an error of one item is no end.
    """
    if hasattr(take, "size"):
        for i in range(take.size(batch)):
            yield _checked_item(take(batch, i), i)
        return
    sizes, i = _lengths(batch), 0
    item, error = _attempt(batch, take, i)
    while error is None:
        yield _checked_item(item, i)
        i += 1
        item, error = _attempt(batch, take, i)
    last = max(i + _BEYOND, *sizes, 0)
    goes_on = any(_attempt(batch, take, j)[1] is None for j in range(i + 1, last + 1))
    if goes_on or sizes and i not in sizes and i < max(sizes):
        raise Refused(
            f"take(batch, {i}) failed ({type(error).__name__}: {error}), and the batch "
            "does not end there.",
            parameter="take",
            remedy="Mend it; or if there are no more samples, set take.size = function,"
            " where function(batch) gives their number.",
        ) from error


def take_of_call(take: Take) -> Take:
    """Makes a function that takes samples of ``(args, kwargs)``."""

    def both(given: Any, i: int) -> Any:
        args, kwargs = given
        own = take(args, i) if args else (), take(kwargs, i) if kwargs else {}
        return tuple(own[0]), dict(own[1])

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


def _attempt(batch: Any, take: Take, i: int) -> tuple[Any, Exception | None]:
    """Returns an item, or the error that there is none."""
    try:
        item = take(batch, i)
    except (IndexError, StopIteration) as error:
        return None, error
    return item, IndexError("no rows") if _has_no_rows(item) else None


def _has_no_rows(item: Any) -> bool:
    tensors = [x for x in pytree.tree_leaves(item) if isinstance(x, T)]
    return bool(tensors) and all(x.dim() and not len(x) for x in tensors)


def _checked_item(item: Any, i: int) -> Any:
    is_empty = not any(isinstance(x, T) for x in pytree.tree_leaves(item))
    if is_empty or _has_no_rows(item):
        raise Refused(
            f"take(batch, {i}) gave a sample without "
            f"{'a tensor' if is_empty else 'rows'}.",
            parameter="take",
            remedy="It must give sample i as a tree of tensors [1, ...].",
        )
    return item


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
        some, reason = todo.popleft(), None
        if microbatch is not None and some.size > microbatch:
            every = torch.arange(some.size)
            todo.extendleft(some.select(i) for i in reversed(every.split(microbatch)))
            continue
        if some.size > 1 and not one_by_one:
            before = written(some)
            try:
                at_once(some)
                continue
            except BranchesDiffer as differ:
                put_back(before)
                todo.extendleft(differ.parts(some))
                continue
            except Refused:
                raise
            except Exception as error:  # of vmap, or of the user's code
                put_back(before)
                reason = why(error)
        for i in range(some.size):
            one(some, i)
        if reason and warn is not None:
            warn(reason)


def version(x: T) -> int:
    """Returns the number of writes to a tensor."""
    return 0 if x.is_inference() else x._version


def written(some: Samples) -> list[tuple[T, int, T | None]]:
    """
    Returns samples, which code may write to, with their versions and copies; None for
    outputs of a model, which are large.
    """
    own = [x for x, by_sample in zip(some.leaves, some.by_sample) if by_sample]
    return [
        (x, version(x), None if x.requires_grad else x.detach().clone()) for x in own
    ]


def put_back(before: list[tuple[T, int, T | None]]) -> None:
    """Undoes the writes of a failed attempt to its samples."""
    for x, count, kept in before:
        if version(x) == count:
            continue
        if kept is None:
            raise Refused(
                f"A tensor of shape {tuple(x.shape)} that a model has computed was "
                "changed in place, by code that samples can't run together.",
                remedy="Compute out of place: y = 2 * x instead of x.mul_(2).",
            )
        x.detach().copy_(kept)


def why(error: BaseException) -> str:
    """Formats an error as one line of text, with the line of the user's code."""
    inside = ("/torch/", "opacus_ext/grad_sample/")
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in inside)]
    text = next((x for x in str(error).splitlines() if x.strip()), "").strip()
    what = text if isinstance(error, NotAtOnce) else f"{type(error).__name__}: {text}"
    if not own:
        return what[:200]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line} ({what[:200]})"


def warn_one_by_one(name: str, reason: str) -> None:
    """Warns that samples run one by one, with the reason."""
    text = f"{name} runs one sample after the other, as vmap can't run {reason}."
    warnings.warn(f"{text} That is exact, but slower for short samples.", stacklevel=3)


# -- handlers of functions whose output or its shape depends on values -----------------


def _both(*names: str) -> list[Callable]:
    """Returns the methods of tensors and the functions of torch with these names."""
    return [f for name in names for x in (T, torch) if (f := getattr(x, name, None))]


@handles(
    *_both("item", "tolist", "numpy", "is_nonzero", "nonzero", "argwhere", "bincount"),
    *_both("unique", "unique_consecutive"),
    *(T.__bool__, T.__int__, T.__float__, T.__index__, T.__complex__),
    *(T.__format__, T.__repr__, T.__str__),
)
def ask(group: SampleGroup, func: Callable, x: T, *args: Any, **kwargs: Any) -> Any:
    """Uses the value that all samples share as the first argument."""
    return func(group.agree(x), *args, **kwargs)


@handles(
    *_both("new_zeros", "new_ones", "new_empty", "arange", "linspace"),
    *_both("narrow", "masked_select", "repeat_interleave"),
)
def ask_rest(group: SampleGroup, func: Callable, *args: Any, **kwargs: Any) -> T:
    """Uses values that all samples share as later arguments, such as shapes."""
    first = 0 if func in (torch.arange, torch.linspace) else 1
    given = *args[:first], *_agreed(group, args[first:])
    return group.call(func, *given, **_agreed(group, kwargs))


_NUMBERS = {int, float, type(None), type(...), torch.dtype, torch.device, bool}


def _agreed(group: SampleGroup, given: Any) -> Any:
    parts = given.values() if isinstance(given, dict) else given
    if _NUMBERS.issuperset(map(type, parts)):
        return given
    return pytree.tree_map(lambda x: group.agree(x) if isinstance(x, T) else x, given)


@handles(*_both("where"))
def where(group: SampleGroup, func: Callable, x: T, *args: Any) -> Any:
    """Handles ``where(condition)``, which is ``nonzero``."""
    return group.call(func, x, *args) if args else func(group.agree(x))


@handles(T.__getitem__)
def getitem(group: SampleGroup, func: Callable, x: T, index: Any) -> Any:
    """Handles masks and slices in an index, which decide the output shape."""
    if not _is_of_numbers(index):
        index = _agreed_index(group, index)
    return group.call(func, x, index)


def _is_of_numbers(index: Any) -> bool:
    """Returns True for the most frequent indices, which hold no tensors."""
    for x in index if type(index) is tuple else (index,):
        ends = (x.start, x.stop, x.step) if type(x) is slice else (x,)
        for end in ends:
            if type(end) not in _NUMBERS:
                return False
    return True


@handles(T.__setitem__)
def setitem(group: SampleGroup, func: Callable, x: T, index: Any, value: Any) -> Any:
    """Handles masks; a single value is written without comparing them."""
    if _is_mask(index) and not (isinstance(value, T) and value.dim()):
        with group:
            mask = index.reshape(index.shape + (1,) * (x.dim() - index.dim()))
            return x.masked_fill_(mask, value)
    return group.call(func, x, _agreed_index(group, index), value)


def _is_mask(x: Any) -> bool:
    return isinstance(x, T) and x.dtype in (torch.bool, torch.uint8)


def _agreed_index(group: SampleGroup, index: Any) -> Any:
    if _is_mask(index):
        return group.agree(index)
    if isinstance(index, slice):
        ends = (index.start, index.stop, index.step)
        return slice(*(int(group.agree(x)) if isinstance(x, T) else x for x in ends))
    if type(index) in (tuple, list):
        return type(index)([_agreed_index(group, x) for x in index])
    return index


@handles(*_both("equal", "allclose"), T.__contains__)
def compare(group: SampleGroup, func: Callable, *args: Any, **kwargs: Any) -> bool:
    """Handles comparisons of tensors that return a bool."""
    with group:
        if func is T.__contains__:
            return bool((args[0] == args[1]).any())
        if func in (torch.allclose, T.allclose):
            return bool(torch.isclose(*args, **kwargs).all())
        a, b = args
        return a.shape == b.shape and bool((a == b).all())


# -- handlers of functions that vmap gets wrong ----------------------------------------


_aten = torch.ops.aten


@handles(*_both("select_scatter"), _aten.select_scatter, _aten.select_scatter.default)
def select_scatter(
    group: SampleGroup, func: Callable, input: T, src: T, dim: int, index: int
) -> T:
    """Writes a slice: under vmap gradients of ``src`` count once a row of ``input``."""
    start = index + input.shape[dim] if index < 0 else index
    with group:
        return torch.slice_scatter(input, src.unsqueeze(dim), dim, start, start + 1)


@handles(*_both("as_strided_", "set_"), _aten.as_strided_, _aten.as_strided_.default)
def moved_in_place(group: SampleGroup, func: Callable, *args: Any, **kw: Any) -> Any:
    """Runs samples one by one: vmap leaves the tensor as it is."""
    raise NotAtOnce(f"{func.__name__}")


# -- handlers of autograd functions within the forward ---------------------------------


@handles(getattr(T.data, "__get__"))
def data_of(group: SampleGroup, func: Callable, x: T) -> T:
    """Tells the group, as what is written there has no new version."""
    group.reach(x)
    return group.call(func, x)


@handles(T.requires_grad.__get__)
def requires_grad(group: SampleGroup, func: Callable, x: T) -> bool:
    """Reads the flag, which vmap hides."""
    return func(group.level.unwrap(x) if is_batched(x) else x)


@handles(T.requires_grad_, init.uniform_, init.normal_, init.kaiming_uniform_)
def of_leaf(group: SampleGroup, func: Callable, tensor: T, *args: Any, **kw: Any) -> T:
    """Makes a leaf that all samples share, as the parameter of a new layer."""
    if func is T.requires_grad_:
        if is_batched(tensor) or not group.eager:
            return autograd_inside(group, func)
    elif is_batched(tensor) or not isinstance(tensor, nn.Parameter):
        return func(tensor, *args, **kw)
    with group.outside():
        return func(tensor, *args, **kw)


@handles(torch.autograd.grad, T.retain_grad)
def autograd_inside(group: SampleGroup, func: Callable, *args: Any, **kw: Any) -> Any:
    """Runs samples one by one: uses within a gradient are not intercepted."""
    raise NotAtOnce(f"{func.__name__} in the forward")


@handles(T.backward)
def backward_inside(group: SampleGroup, func: Callable, *args: Any, **kw: Any) -> Any:
    """Refuses ``backward()`` in the forward."""
    raise Refused(
        "backward() within the forward pass adds gradients that are not clipped.",
        remedy="Take torch.autograd.grad(..., create_graph=True) there, or call "
        "backward() outside.",
    )


@handles(T.register_hook)
def register_hook(group: SampleGroup, func: Callable, x: T, hook: Callable) -> Any:
    """Calls a hook on an activation with the gradients of all samples."""
    if group.is_shared(x):
        raise NotAtOnce("a hook on a parameter, or on a value computed from some")
    if not is_batched(x):
        return func(x, hook)

    def check(grad: T) -> None:
        found = hook(grad)
        if found is not None and found is not grad:
            raise Refused(
                f"A hook on a tensor ({getattr(hook, '__name__', hook)}) changes the "
                "gradient of an activation.",
                remedy="Remove it, or train one sample after the other: "
                'grad_sample_mode="scan".',
            )

    with group.outside():
        return func(group.level.unwrap(x), check)


#: The handlers that apply to a sample alone, too: most read values of the data.
READING = {ask, ask_rest, where, getitem, setitem, compare, backward_inside}
