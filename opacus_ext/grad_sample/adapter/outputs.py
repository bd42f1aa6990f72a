"""The outputs of single samples, combined to those of the batch, and their graph."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, NamedTuple, NoReturn, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from opacus_ext.grad_sample.adapter.objects import PLAIN, holds_data
from opacus_ext.grad_sample.core.values import are_same, as_bits
from opacus_ext.private_torch import (
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
    will_run,
)
from opacus_ext.refused import Refused

T = torch.Tensor

_KIND = "__dataclass__"
SQUEEZED = (
    "If the forward squeezes the batch dim away, write squeeze(-1) in place of "
    "squeeze(), so that the model returns [B, ...]."
)


def flatten(tree: Any) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """Returns the paths and leaves of a tree; packed sequences are leaves."""
    try:
        return tree_flatten_with_path(tree, is_leaf=_is_packed)
    except ValueError:
        # A class may be registered as a pytree without names for its parts.
        leaves, structure = tree_flatten(tree, is_leaf=_is_packed)
        return [*zip(_paths_in(tree), leaves)], structure


def _paths_in(tree: object) -> list[tuple]:
    """Returns the paths of the leaves of a tree, whose classes may give no names."""
    parts, _ = tree_flatten(tree, is_leaf=lambda part: part is not tree)
    if _is_packed(tree) or [*map(id, parts)] == [id(tree)]:
        return [()]
    keys: list[Any] = [SequenceKey(number) for number in range(len(parts))]
    # The outputs of transformers 5.12 are dicts, registered without names.
    if isinstance(tree, dict) and len(tree) == len(parts):
        keys = [MappingKey(key) for key in tree]
    return [(key, *path) for key, part in zip(keys, parts) for path in _paths_in(part)]


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


class Leaf(NamedTuple):
    """
    One value that the samples of a group returned.

    Attributes:
        value: all samples' values ``[B, *shape]`` if ``by_sample``, else shared
    """

    value: Any
    by_sample: bool


class Returned(NamedTuple):
    """
    The output of a group of samples, a tree.

    Attributes:
        rows: indices of the samples in the batch; None for all
        names: names of the leaves
    """

    rows: T | None
    size: int
    leaves: list[Leaf]
    names: list[str]
    spec: TreeSpec

    def with_graph(self) -> dict[int, T]:
        """Returns the leaves that have a graph, by their numbers."""
        return {
            number: leaf.value
            for number, leaf in enumerate(self.leaves)
            if leaf.by_sample and leaf.value.requires_grad
        }


def read_output(
    output: Any, read: Callable[[Any], Leaf], rows: T | None, size: int
) -> Returned:
    """Flattens the output of a model; ``read`` turns a value into a leaf."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, dict)):
        # To torch a dataclass is one leaf. A dict of its fields is a tree.
        parts = {_KIND: type(output)}
        for field in dataclasses.fields(output):
            parts[field.name] = getattr(output, field.name)
        output = parts
    values, names = [], []
    pairs, structure = flatten(output)
    for path, value in pairs:
        values.append(value)
        names.append(f"output{keystr(path)}")
    return Returned(rows, size, [*map(read, values)], names, structure)


class BatchOutput(NamedTuple):
    """
    The output of the batch, a tree.

    Attributes:
        values: the leaves; None for those in ``tensors``
        tensors: leaves that get a graph, detached, by their numbers
        dims: batch dims of these; None for a loss, ``[B]``
    """

    values: list[Any]
    tensors: dict[int, T]
    dims: dict[int, int | None]
    spec: TreeSpec

    def with_tensors(self, tensors: Sequence[T], mean_of: Callable[[T], T]) -> Any:
        """
        Returns the output, with these tensors as the leaves that have a graph; of
        losses ``[B]`` their mean.
        """
        values = list(self.values)
        for number, tensor in zip(self.tensors, tensors):
            if self.dims[number] is None:
                tensor = mean_of(tensor)
            values[number] = tensor
        output = tree_unflatten(values, self.spec)
        if isinstance(output, dict) and _KIND in output:
            return output.pop(_KIND)(**output)
        return output


_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"}
# The functions of sums with a tensor of several entries that are linear, or have no
# gradient: the mean over samples stands for the sample's own loss in these alone.
_LINEAR = _SUMS | {"mul", "__mul__", "__rmul__", "div", "__div__", "__truediv__", "neg"}
_LINEAR |= {"mean", "sum", "detach", "__get__", "size", "dim", "numel", "to", "float"}


class MeanLoss(torch.Tensor):
    """
    The mean over samples of a number that each sample returned as its loss. It is a
    tensor without dims. A value that is computed from such means alone is such a mean,
    too. It may be added to losses of samples if the mean of the sum follows.

    Raises:
        Refused: for any other use with a tensor of several entries, such as targets.
        Then
            it is no loss, but the output of a model that leaves out the batch dim
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Applies a function, unless it reads other tensors of several entries."""
        others = []
        sums = []
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, _SumWithOthers):
                sums.append(value)
            elif isinstance(value, T) and not isinstance(value, cls):
                if value.numel() > 1:
                    others.append(value)
        name = getattr(function, "__name__", "")
        if others and name not in _SUMS or sums and name not in _LINEAR:
            shape = tuple([*others, *sums][0].shape)
            raise _no_loss(f"used with a tensor of shape {shape}")
        try:
            result = super().__torch_function__(function, types, args, kwargs or {})
        except (IndexError, ValueError, RuntimeError) as error:
            # The errors of a backward pass are those of the model.
            if isinstance(error, Refused) or name == "backward":
                raise
            raise _no_loss(f"used in {name}, which fails ({error})") from error
        if not isinstance(result, MeanLoss):
            return result
        if (others or sums) and result.dim() > 0:
            return result.as_subclass(_SumWithOthers)
        return result.as_subclass(MeanLoss)

    def __format__(self, format_spec: str) -> str:
        """Formats the number, as a tensor does."""
        return format(self.as_subclass(T), format_spec)

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
    first = returned[0]
    model = record.model.describe()
    for group in returned:
        if group.spec != first.spec:
            reason = "has another structure for other samples"
            values, structure = tree_flatten(NotEqual(model, "output", reason))
            return BatchOutput(values, {}, {}, structure)
    output = BatchOutput([], {}, {}, first.spec)
    for number, name in enumerate(first.names):
        leaves = [group.leaves[number] for group in returned]
        batched = trained = False
        for leaf in leaves:
            batched |= leaf.by_sample
            trained |= leaf.by_sample and leaf.value.requires_grad
        if losses or batched:
            value, batch_dim = _tensor(record, name, returned, leaves, losses, trained)
        else:
            value, batch_dim = _shared(leaves)
        # A string is the reason why the values of samples can't be combined.
        if isinstance(batch_dim, str):
            value = NotEqual(model, name, batch_dim)
        elif trained:
            output.tensors[number] = value
            output.dims[number] = batch_dim
            value = None
        output.values.append(value)
    return output


def _tensor(
    record: Any,
    name: str,
    returned: Sequence[Any],
    leaves: list[Leaf],
    losses: bool,
    trained: bool,
) -> tuple[Any, int | None | str]:
    """Returns the tensor of the batch with its batch dim, or why there is none."""
    parts = []
    shapes = set()
    for group, (value, by_sample) in zip(returned, leaves):
        if not isinstance(value, T):
            return None, "is a tensor for some samples only"
        if not by_sample:
            value = value.expand(group.size, *value.shape)
        parts.append(value.detach())
        shapes.add(value.shape[1:])
    if len(shapes) > 1:
        several = ", ".join(map(str, map(tuple, sorted(shapes))))
        return None, f"has shapes {several} for single samples"
    (shape,) = shapes
    batch = parts[0]
    if len(parts) > 1 or returned[0].rows is not None:
        # The samples of a group may lie anywhere in the batch: their rows say where.
        batch = batch.new_empty(record.size, *shape)
        for group, part in zip(returned, parts):
            batch[group.rows.to(batch.device)] = part.to(batch)
    # A number that each sample returns is its loss, of which the mean is taken later.
    if not shape and (losses or trained):
        return batch, None
    batch_dim = _dim(record, name, shape)
    if batch_dim is not None:
        # Each sample has a dim of length one where the batch has its samples.
        batch = batch.movedim(0, batch_dim).flatten(batch_dim, batch_dim + 1)
        return batch.contiguous(), batch_dim
    if trained:
        return None, (
            f"has shape {tuple(shape)} for a sample alone, where dim "
            f"{record.model.batch_dim} should be the batch dim"
        )
    # What is equal may still be told apart by its bits, as 0.0 and -0.0 are.
    bits = as_bits(batch)
    if record.size and bool((bits == bits[:1]).all()):
        return batch[0], None
    return None, "differs from sample to sample"


def _dim(record: Any, name: str, shape: torch.Size) -> int | None:
    """Returns the batch dim of an output that has this shape for one sample."""
    batch_dim = record.model.batch_dim
    either = batch_dim == 1 or record.model.inputs.is_state(shape)
    dims = [dim for dim, length in enumerate(shape[:2]) if length == 1]
    if dims == [0, 1] and (either or len(shape) > 2):
        dim = record.find_output_dim(name, shape)
        # Only the whole batch tells which of two dims of length one grows with it.
        if dim is None and (record.size < 2 or not either):
            return batch_dim
        return dim
    if dims and (dims[0] == 0 or either):
        return dims[0]
    return None


def _shared(leaves: list[Leaf]) -> tuple[Any, str | None]:
    """Returns the value that all samples share, or why there is none."""
    first = leaves[0].value
    if is_hidden(first):
        return None, f"is a {type(first).__name__}, which may hold values of samples"
    for leaf in leaves:
        if not are_same(leaf.value, first):
            return first, "differs from sample to sample"
    return first, None


def is_hidden(value: Any) -> bool:
    """Returns True for an object, not a tensor or array, that may hold samples."""
    known = isinstance(value, (*PLAIN, T, np.ndarray))
    return not known and holds_data(value, lambda part: True)


class NotEqual:
    """
    Replaces an output that differs between samples and has no batch dim; refuses any
    use.
    """

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
        # Python and torch ask for such names, to learn what an object can do.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, NotEqual))._refuse()


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
    def forward(context, record, anchor, count, *tensors):
        context.record = record
        context.count = count
        # An output that no loss uses has no gradient, which is not one of zeros.
        context.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(context, *grads):
        # autograd.grad() of inputs alone does not reach the anchor.
        if will_run(context.next_functions[0][0]):
            of_inputs = context.record.model.mode.plain_backward(context.record, grads)
        else:
            of_inputs = context.record.of_inputs(grads)
        return (None, None, None, *[None] * context.count, *of_inputs)


class Dependencies(NamedTuple):
    """
    The private models and leaves that a loss depends on.

    Attributes:
        nodes: Boundary nodes, also those behind the inputs of others
        leaves: other leaves that would get a gradient
        before: leaves that computed inputs of the private models
        nested: True if inputs were computed from outputs of private models
    """

    nodes: list[Any]
    leaves: list[T]
    before: list[T]
    nested: bool

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
    # The list grows while it is read, by the models that computed a model's inputs.
    for node in nodes:
        inputs = node.record.trained
        inner, sources = _walk(inputs)
        for tensor in (*sources, *inputs):
            if tensor.is_leaf:
                before[id(tensor)] = tensor
        nested |= bool(inner)
        nodes += [parent for parent in inner if parent not in nodes]
    return Dependencies(nodes, leaves, [*before.values()], nested)


def _walk(tensors: Sequence[T]) -> tuple[list[Any], list[T]]:
    """Returns the Boundary nodes and leaves where the graph of tensors ends."""
    nodes, leaves = [], []
    visited = set()
    pending = [tensor.grad_fn for tensor in tensors]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if getattr(node, "_forward_cls", None) is Boundary:
            # What is behind a private model is none of the loss's own graph.
            nodes.append(node)
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        pending += [parent for parent, number in node.next_functions]
    return nodes, leaves
