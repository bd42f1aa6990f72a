"""What single samples return, put together as the batch's."""

from __future__ import annotations

import dataclasses
import enum
from typing import (
    Any,
    Callable,
    Dict,
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

from opacus_ext.refused import Refused

T = torch.Tensor

_SAFE = (
    *(int, float, complex, bool, str, bytes, type(None), type, enum.Enum, np.generic),
    *(torch.dtype, torch.device, torch.Size, slice, range, nn.Module),
)


class Leaf(NamedTuple):
    """
    One value that samples of a group returned.

    Attributes:
        value: as samples see it, or of all of them ``[B, *shape]`` if ``by_sample``
        by_sample: whether it is a tensor that is one a sample
        dim: where in a sample's tensor the samples are: 0, or 1 of recurrent states
    """

    value: Any
    by_sample: bool
    dim: int = 0


class Returned(NamedTuple):
    """
    What the samples of a group returned.

    Attributes:
        rows: which samples of the batch they are; None for all
        size: number of samples
        leaves: the values
        names: of the leaves
        spec: of their tree
    """

    rows: Optional[T]
    size: int
    leaves: List[Leaf]
    names: List[str]
    spec: TreeSpec


def read_output(
    output: Any, read: Callable[[Any], Leaf], rows: Optional[T], size: int
) -> Returned:
    """
    Takes apart what a model returned.

    Args:
        read: makes a leaf of a value
    """
    output = _open(output)
    leaves, spec = tree_flatten(output, is_leaf=_is_whole)
    try:
        paths, _ = tree_flatten_with_path(output, is_leaf=_is_whole)
        names = [f"output{keystr(path)}" for path, _ in paths]
    except ValueError:  # a class of others that has no names for its parts
        names = [f"output, part {i}" for i in range(len(leaves))]
    return Returned(rows, size, [read(x) for x in leaves], names, spec)


def _is_whole(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _open(output: Any) -> Any:
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, dict)):
        found = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
        return {_KIND: type(output), **found}
    return output


_KIND = "__dataclass__"


def _close(output: Any) -> Any:
    if isinstance(output, dict) and _KIND in output:
        found = {k: v for k, v in output.items() if k != _KIND}
        return output[_KIND](**found)
    return output


class Joined(NamedTuple):
    """
    The outputs of all samples.

    Attributes:
        values: the leaves; in the place of those of ``tensors`` None
        tensors: by the number of the leaf, what goes to the user with a gradient:
            detached, the samples in dim ``dims``
        dims: of each, the dim of the samples; None for a loss, ``[B]``
        spec: of the tree
    """

    values: List[Any]
    tensors: Dict[int, T]
    dims: Dict[int, Optional[int]]
    spec: TreeSpec

    def with_tensors(self, tensors: Sequence[T]) -> Any:
        """The output, with tensors that have a graph in their places."""
        values = list(self.values)
        for i, x in zip(self.tensors, tensors):
            values[i] = x.mean() if self.dims[i] is None else x
        return _close(tree_unflatten(values, self.spec))


def join(
    model: str,
    returned: Sequence[Returned],
    batch_dim: int,
    size: int,
    losses: bool,
    first_dim: Set[str],
) -> Joined:
    """
    Args:
        model: what it is called in errors
        returned: by groups, together all samples
        batch_dim: where the samples are in tensors
        size: number of samples
        losses: whether a number that requires a gradient is wanted one a sample
        first_dim: outputs that have their samples in dim 0, whatever ``batch_dim``; it
            is added to
    """
    first = returned[0]
    if any(r.spec != first.spec for r in returned):
        whole = NotEqual(model, "output", "has another structure for other samples")
        spec = tree_flatten_with_path(whole)[1]
        return Joined([whole], {}, {}, spec)
    values, tensors, dims = [], {}, {}
    for i, name in enumerate(first.names):
        column = [(r.rows, r.size, r.leaves[i]) for r in returned]
        value, dim = _join(model, name, column, batch_dim, size, losses, first_dim)
        if isinstance(value, T) and _needs_grad(column):
            tensors[i], dims[i] = value, dim
            value = None
        values.append(value)
    return Joined(values, tensors, dims, first.spec)


Column = List[Tuple[Optional[T], int, Leaf]]


def _needs_grad(column: Column) -> bool:
    return any(leaf.by_sample and leaf.value.requires_grad for _, _, leaf in column)


def _join(
    model: str,
    name: str,
    column: Column,
    batch_dim: int,
    size: int,
    losses: bool,
    first_dim: Set[str],
) -> Tuple[Any, Optional[int]]:
    """The value of all samples, and the dim of the samples in it."""
    leaves = [leaf for _, _, leaf in column]
    if not (losses or any(leaf.by_sample for leaf in leaves)):
        return _shared(model, name, [leaf.value for leaf in leaves]), None
    if not all(isinstance(leaf.value, T) for leaf in leaves):
        return NotEqual(model, name, "is a tensor for some samples only"), None
    dim = max(leaf.dim for leaf in leaves) or batch_dim
    whole: List[T] = []
    for rows, n, leaf in column:
        x = leaf.value if leaf.by_sample else leaf.value.expand(n, *leaf.value.shape)
        whole.append(x.detach())
    shapes = {x.shape[1:] for x in whole}
    if len(shapes) > 1:
        found = ", ".join(str(tuple(shape)) for shape in sorted(shapes))
        return NotEqual(model, name, f"has shapes {found} for single samples"), None
    (shape,) = shapes
    if not shape and (losses or _needs_grad(column)):
        return _in_order(column, whole, size), None
    if dim == batch_dim == 1 and shape[:1] == (1,):
        if shape[1:2] != (1,) or name in first_dim:
            first_dim.add(name)
            dim = 0
    if len(shape) > dim and shape[dim] == 1:
        found = _in_order(column, whole, size).movedim(0, dim).flatten(dim, dim + 1)
        return found.contiguous(), dim
    if _needs_grad(column):
        reason = (
            f"has shape {tuple(shape)} for a sample alone, where dim {dim} should be "
            "the samples': rows of all samples can't be told apart"
        )
        return NotEqual(model, name, reason), None
    every = _in_order(column, whole, size)
    if size and bool((every == every[:1]).all()):
        return every[0], None
    return NotEqual(model, name, "differs from sample to sample"), None


def _in_order(column: Column, whole: List[T], size: int) -> T:
    """``[B, *shape]``."""
    if len(whole) == 1 and column[0][0] is None:
        return whole[0]
    found = whole[0].new_empty(size, *whole[0].shape[1:])
    for (rows, _, _), x in zip(column, whole):
        found[rows.to(found.device)] = x.to(found)
    return found


def _shared(model: str, name: str, values: List[Any]) -> Any:
    """What is not one a sample must be equal for all."""
    first = values[0]
    if isinstance(first, T):
        same = all(
            x is first
            or (isinstance(x, T) and x.shape == first.shape and torch.equal(x, first))
            for x in values
        )
    elif isinstance(first, np.ndarray):
        same = all(
            isinstance(x, np.ndarray) and np.array_equal(x, first) for x in values
        )
    elif isinstance(first, _SAFE) or callable(first):
        same = all(x is first or type(x) is type(first) and x == first for x in values)
    else:
        reason = f"is a {type(first).__name__}, which may hold values of single samples"
        return NotEqual(model, name, reason)
    return first if same else NotEqual(model, name, "differs from sample to sample")


class NotEqual:
    """
    In the place of an output that is not the same for all samples and has no dim of
    samples: any use of it is refused.

    Args:
        model: what it is called in errors
        name: of the output
        reason: why it can't be put together
    """

    def __init__(self, model: str, name: str, reason: str):
        vars(self)["_text"] = (
            f"{model}: {name} {reason}. The model runs one sample at a time, and what "
            "it returns must be tensors with a dim for the samples, or the same for "
            "all samples."
        )

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _RefusedUse(
            self._text,
            remedy="Return [B, ...] from the forward, not rows of all samples or a "
            "number of the batch; or compute the loss of a sample with "
            "opacus_ext.clipped_grads.",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> NoReturn:
        for x in (*args, *(kwargs or {}).values()):
            if isinstance(x, NotEqual):
                x._refuse()
        raise Refused("An output that differs from sample to sample is used.")


class _RefusedUse(Refused, TypeError):
    """Also a TypeError, for code that looks whether something can be iterated."""


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow matmul neg abs lt "
    "le gt ge eq ne bool int float index len iter next getitem setitem contains call "
    "array and or xor invert round format hash"
).split():
    setattr(NotEqual, f"__{_name}__", NotEqual._refuse)
