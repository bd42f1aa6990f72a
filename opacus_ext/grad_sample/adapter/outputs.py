"""The outputs of single samples, combined to those of the batch, and their graph."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, NamedTuple, NoReturn, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from opacus_ext.grad_sample.adapter.objects import PLAIN, holds_data
from opacus_ext.grad_sample.core.values import are_same, as_bits
from opacus_ext.private_torch import will_run
from opacus_ext.refused import Refused

T = torch.Tensor

_KIND = "__dataclass__"
SQUEEZED = (
    "If the forward squeezes the batch dim away, write squeeze(-1) in place of "
    "squeeze(), so that the model returns [B, ...]."
)


def flatten(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """Returns the paths and leaves of a tree; packed sequences are leaves."""
    return tree_flatten_with_path(tree, is_leaf=_is_packed)


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


class Leaf(NamedTuple):
    """One value that the samples of a group returned."""

    value: Any  # all samples' values ``[B, *shape]`` if ``by_sample``, else shared
    by_sample: bool


class Returned(NamedTuple):
    """The output of a group of samples, a tree."""

    rows: T | None  # indices of the samples in the batch; None for all
    size: int
    leaves: list[Leaf]
    names: list[str]  # names of the leaves
    spec: TreeSpec

    def with_graph(self) -> dict[int, T]:
        """Returns the leaves that have a graph, by their numbers."""
        return {
            i: leaf.value
            for i, leaf in enumerate(self.leaves)
            if leaf.by_sample and leaf.value.requires_grad
        }


def read_output(
    output: Any, read: Callable[[Any], Leaf], rows: T | None, size: int
) -> Returned:
    """Flattens the output of a model; ``read`` turns a value into a leaf."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, dict)):
        fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
        output = {_KIND: type(output), **fields}
    try:
        pairs, spec = flatten(output)
        leaves = [x for _, x in pairs]
        names = [f"output{keystr(path)}" for path, _ in pairs]
    except ValueError:  # a pytree class without names
        leaves, spec = tree_flatten(output, is_leaf=_is_packed)
        names = [f"output, part {i}" for i in range(len(leaves))]
    return Returned(rows, size, [read(x) for x in leaves], names, spec)


class BatchOutput(NamedTuple):
    """The output of the batch, a tree."""

    values: list[Any]  # the leaves; None for those in ``tensors``
    tensors: dict[int, T]  # leaves that get a graph, detached, by their numbers
    dims: dict[int, int | None]  # batch dims of these; None for a loss, ``[B]``
    spec: TreeSpec

    def with_tensors(self, tensors: Sequence[T], mean_of: Callable[[T], T]) -> Any:
        """
        Returns the output, with these tensors as the leaves that have a graph; of
        losses ``[B]`` their mean.
        """
        values = list(self.values)
        for i, x in zip(self.tensors, tensors):
            values[i] = mean_of(x) if self.dims[i] is None else x
        output = tree_unflatten(values, self.spec)
        if isinstance(output, dict) and _KIND in output:
            return output.pop(_KIND)(**output)
        return output


_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"}
# Of sums with a tensor of several entries: what is linear, or has no gradient.
_LINEAR = _SUMS | {"mul", "__mul__", "__rmul__", "div", "__div__", "__truediv__", "neg"}
_LINEAR |= {"mean", "sum", "detach", "__get__", "size", "dim", "numel", "to", "float"}


class MeanLoss(torch.Tensor):
    """
    The mean over samples of a number that each returned, which is its loss. It is a
    tensor without dims. What is computed from such means alone is one, too; to losses
    of samples it may be added, if the mean of all follows.

    Raises:
        Refused: if it is used with a tensor of several entries in another way, such as
            targets: then it is no loss, but the output of a model that leaves out the
            batch dim
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Applies a function, unless it reads other tensors of several entries."""
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, T)]
        shapes = [x.shape for x in leaves if not isinstance(x, cls) and x.numel() > 1]
        sums = [x for x in leaves if isinstance(x, _SumWithOthers)]
        name = getattr(func, "__name__", "")
        if (shapes and name not in _SUMS) or (sums and name not in _LINEAR):
            shape = tuple(shapes[0] if shapes else sums[0].shape)
            raise _no_loss(f"used with a tensor of shape {shape}")
        try:
            found = super().__torch_function__(func, types, args, kwargs or {})
        except (IndexError, ValueError, RuntimeError) as error:
            if isinstance(error, Refused) or name == "backward":
                raise
            raise _no_loss(f"used in {name}, which fails ({error})") from error
        if not isinstance(found, MeanLoss):
            return found
        mixed = bool(shapes or sums) and found.dim() > 0
        return found.as_subclass(_SumWithOthers if mixed else MeanLoss)

    def __format__(self, spec: str) -> str:
        """Formats the number, as a tensor does."""
        return format(self.as_subclass(T), spec)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Returns the text of a tensor."""
        return repr(self.as_subclass(T))


def _no_loss(how: str) -> Refused:
    return Refused(
        "An output that is a number for each sample is taken for its loss, and is the "
        f"mean over samples. Here it is {how}: the forward squeezes the batch dim "
        "away, it seems.",
        remedy="Write squeeze(-1) in place of squeeze(), so that the model returns "
        "[B, ...]; weights of several losses belong into the model.",
    )


class _SumWithOthers(MeanLoss):
    """Its sum with a tensor of several entries, of which the mean is to be taken."""


def combine_outputs(
    record: Any, returned: Sequence[Returned], losses: bool
) -> BatchOutput:
    """
    Combines the outputs of the groups of a batch.

    Args:
        record: the ForwardRecord (forward.py)
        losses: True if each sample returned its loss
    """
    first, model = returned[0], record.model.describe()
    if any(r.spec != first.spec for r in returned):
        reason = "has another structure for other samples"
        values, spec = tree_flatten(NotEqual(model, "output", reason))
        return BatchOutput(values, {}, {}, spec)
    output = BatchOutput([], {}, {}, first.spec)
    for i, name in enumerate(first.names):
        column = [(r.rows, r.size, *r.leaves[i]) for r in returned]
        trained = any(by_sample and x.requires_grad for _, _, x, by_sample in column)
        if losses or any(by_sample for *_, by_sample in column):
            value, found = _tensor(record, name, column, losses, trained)
        else:
            value, found = _shared([x for _, _, x, _ in column])
        if isinstance(found, str):  # the reason why it can't be combined
            value = NotEqual(model, name, found)
        elif trained:
            output.tensors[i], output.dims[i] = value, found
            value = None
        output.values.append(value)
    return output


def _tensor(
    record: Any, name: str, column: list[tuple], losses: bool, trained: bool
) -> tuple[Any, int | None | str]:
    """Returns the tensor of the batch with its batch dim, or the reason for none."""
    if not all(isinstance(x, T) for _, _, x, _ in column):
        return None, "is a tensor for some samples only"
    whole = [
        (x if by_sample else x.expand(n, *x.shape)).detach()
        for _, n, x, by_sample in column
    ]
    shapes = {x.shape[1:] for x in whole}
    if len(shapes) > 1:
        found = ", ".join(str(tuple(shape)) for shape in sorted(shapes))
        return None, f"has shapes {found} for single samples"
    (shape,) = shapes
    every = whole[0]
    if len(whole) > 1 or column[0][0] is not None:  # in order
        every = every.new_empty(record.size, *shape)
        for (rows, *_), x in zip(column, whole):
            every[rows.to(every.device)] = x.to(every)
    if not shape and (losses or trained):
        return every, None
    dim = _dim(record, name, shape)
    if dim is not None:
        return every.movedim(0, dim).flatten(dim, dim + 1).contiguous(), dim
    if trained:
        return None, (
            f"has shape {tuple(shape)} for a sample alone, where dim "
            f"{record.model.batch_dim} should be the batch dim"
        )
    bits = as_bits(every)
    if record.size and bool((bits == bits[:1]).all()):
        return every[0], None
    return None, "differs from sample to sample"


def _dim(record: Any, name: str, shape: torch.Size) -> int | None:
    """Returns the batch dim of an output that has this shape for one sample."""
    batch_dim, states = record.model.batch_dim, record.model.inputs.states
    is_state = len(shape) == 3 and (shape[0], shape[2]) in states
    either = batch_dim == 1 or is_state
    dims = [d for d, n in enumerate(shape[:2]) if n == 1]
    if dims == [0, 1] and (either or len(shape) > 2):
        found = record.find_output_dim(name, shape)
        return batch_dim if found is None and (record.size < 2 or not either) else found
    return dims[0] if dims and (dims[0] == 0 or either) else None


def _shared(values: list[Any]) -> tuple[Any, str | None]:
    """Returns the value that all samples share, or the reason for none."""
    first = values[0]
    if not isinstance(first, (T, np.ndarray)) and is_hidden(first):
        return None, f"is a {type(first).__name__}, which may hold values of samples"
    same = all(are_same(x, first) for x in values)
    return first, None if same else "differs from sample to sample"


def is_hidden(x: Any) -> bool:
    """Returns True for an object, not a tensor or array, that may hold samples."""
    known = isinstance(x, (*PLAIN, T, np.ndarray))
    return not known and holds_data(x, lambda x: True)


class NotEqual:
    """Replaces an output that differs between samples and has no batch dim; refuses
    any use."""

    def __init__(self, model: str, name: str, reason: str):
        vars(self)["_text"] = (
            f"{model}: {name} {reason}. The model runs one sample at a time, so an "
            "output must be a tensor with a batch dim, or the same for all samples."
        )

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _RefusedUse(
            self._text,
            remedy="Return [B, ...] from the forward (a number of a sample as a tensor "
            "[1]), not rows of all samples or a number of the batch; or compute the "
            f"loss of a sample with opacus_ext.clipped_grads. {SQUEEZED}",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = tree_leaves((args, kwargs))
        next(x for x in leaves if isinstance(x, NotEqual))._refuse()


class _RefusedUse(Refused, TypeError):
    """Also a TypeError, for code that checks if a value can be iterated."""


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow matmul neg abs lt "
    "le gt ge eq ne bool int float index len iter next getitem setitem contains call "
    "array and or xor invert round format hash"
).split():
    setattr(NotEqual, f"__{_name}__", NotEqual._refuse)


# -- the graph behind outputs ----------------------------------------------------------


class Boundary(torch.autograd.Function):
    """
    The node between the graphs of samples and the graph of the user. It passes the
    gradients of outputs to the ForwardRecord.
    """

    @staticmethod
    def forward(ctx, record, anchor, count, *tensors):
        ctx.record, ctx.count = record, count
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        # autograd.grad() of inputs alone does not reach the anchor.
        if will_run(ctx.next_functions[0][0]):
            found = ctx.record.model.mode.plain_backward(ctx.record, grads)
        else:
            found = ctx.record.of_inputs(grads)
        return (None, None, None, *[None] * ctx.count, *found)


class Dependencies(NamedTuple):
    """The private models and leaves that a loss depends on."""

    nodes: list[Any]  # Boundary nodes, also those behind the inputs of others
    leaves: list[T]  # other leaves that would get a gradient
    before: list[T]  # leaves that computed inputs of the private models
    nested: bool  # True if inputs were computed from outputs of private models

    @property
    def records(self) -> list[Any]:
        """The ForwardRecords, each once."""
        return list({id(node.record): node.record for node in self.nodes}.values())


def dependencies_of(tensors: Sequence[T]) -> Dependencies:
    """
    Walks the graph of tensors back to the outputs of private models, and the graph of
    these models' inputs.
    """
    nodes, leaves = _walk(tensors)
    before: dict[int, T] = {}
    nested = False
    for node in nodes:  # which grows
        inputs = node.record.trained
        inner, more = _walk(inputs)
        more += [x for x in inputs if x.is_leaf]
        before.update((id(x), x) for x in more)
        nested |= bool(inner)
        nodes += [x for x in inner if x not in nodes]
    return Dependencies(nodes, leaves, [*before.values()], nested)


def _walk(tensors: Sequence[T]) -> tuple[list[Any], list[T]]:
    """Returns the Boundary nodes and leaves where the graph of tensors ends."""
    nodes, leaves, seen = [], [], set()
    todo = [x.grad_fn for x in tensors]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "_forward_cls", None) is Boundary:
            nodes.append(node)
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [parent for parent, _ in node.next_functions]
    return nodes, leaves
