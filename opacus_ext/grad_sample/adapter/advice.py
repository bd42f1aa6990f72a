"""What is said of inputs that can't be read, and what a user may do about them."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from opacus_ext.grad_sample.core.groups import Samples
from opacus_ext.refused import Refused

T = torch.Tensor


class Words(NamedTuple):
    """A refusal: what is meant, what is wrong with it, and what to do, as templates."""

    name: str
    reason: str
    remedy: str

    def of(self, model: str, name: str | None = None, **values: Any) -> Refused:
        """Makes the error of a model and one of its inputs."""
        values.update(model=model, name=name)
        reason = f"{self.name} {self.reason}.".format(**values)
        remedy = self.remedy.format(**values)
        return Refused(reason, module=model, parameter=name, remedy=remedy)


NOT_NAMED = Words(
    "{model}:",
    "shared={unknown} are no inputs of {model}",
    "Its inputs are {known}.",
)
NO_TENSOR = Words(
    "{model}:",
    "was called without a tensor of samples, with {given}",
    "Pass tensors [B, ...], or make_private(take=function), where function(inputs, i) "
    "gives sample i as a batch of one.",
)
NEVER_TAKEN = Words(
    "{model}:",
    "was called without samples before it was called with some, and take= knows "
    "nothing of these",
    "Begin with a batch that is not empty.",
)
NO_ROWS = Words(
    "{model}:",
    "was called with {shapes}, where the loader drew {size} records: which part is of "
    "which record is not known",
    "{other_dim}Give make_private(take={take}), where function(inputs, i) gives record "
    "i as a batch of one; or let the loader's collate_fn return a row for each record.",
)
OF_A_KIND = Words(
    "{model}: input {name}",
    "is {kind}, of which it is not known where its samples are",
    "Give make_private(take=opacus_ext.take.{take}), or a function take(inputs, i) of "
    "your own that gives sample i as a batch of one; where all samples share it, "
    'shared=["{name}"].',
)
ITEMS = Words(
    "{model}:",
    "the {count} items of input {name} may be samples",
    "If they are, give make_private(take=opacus_ext.take.items), or a function "
    "take(inputs, i) of your own that gives sample i as a batch of one; if not, "
    'make_private(shared=["{name}"]), or pass tensors [B, ...] as arguments of '
    "their own.",
)
SQUARE = Words(
    "{model}: input {name} of shape {shape}",
    "may be a state [layers, B, H], or samples [B, T, H]",
    "Begin with a batch of another size.",
)
NOT_AS_LONG = Words(
    "{model}: input {others}",
    "is not as long as the batch of {samples}",
    "{other_dim}What all samples share is to be named: make_private(shared={names}). "
    "If samples lie in another way (flat, packed), make_private(take={take}), where "
    "function(inputs, i) gives sample i as a batch of one.",
)
TRAINED = Words(
    "{model}: input {name} of shape {shape}",
    "is shared by all samples and requires a gradient, which it would not get",
    "Make what computes it a part of the model, or detach() it.",
)
TABLES = (
    "{model}: {names} is read as samples, of which each sees its row, and is one "
    "tensor in several calls. If all samples share it, name it: "
    "make_private(shared={shared})."
)


def kind_of(x: Any) -> dict[str, str]:
    """Returns what can't be cut along a dim, and the function that may take it."""
    if isinstance(x, PackedSequence):
        return {"kind": "a PackedSequence", "take": "packed"}
    if isinstance(x, T):
        return {"kind": "a nested or sparse tensor", "take": "items"}
    return {"kind": f"of type {type(x).__name__}", "take": "items"}


def take_of(module: nn.Module, tensors: Sequence[T]) -> str:
    """Returns the name of what may take samples from flat tensors."""
    if any(isinstance(m, nn.EmbeddingBag) for m in module.modules()):
        return "opacus_ext.take.bags"
    numbers = [x for x in tensors if x.dtype is torch.long]
    edges = any(x.dim() == 2 and len(x) == 2 for x in numbers)
    graphs_of_nodes = any(x.shape == tensors[0].shape[:1] for x in numbers)
    return "opacus_ext.take.graphs" if edges and graphs_of_nodes else "function"


def other_dim(tensors: Mapping[str, T], size: int, batch_dim: int) -> str:
    """Returns the advice for a tensor whose batch is in the other one of two dims."""
    of_size = {
        name: [dim for dim, n in enumerate(x.shape[:2]) if n == size]
        for name, x in tensors.items()
        if x.dim() > 1
    }
    other = 1 - batch_dim
    for name, dims in of_size.items():
        if dims == [other]:
            advice = f"If the batch is dim {other} of {name}, pass {name}.transpose"
            if any(batch_dim in dims for dims in of_size.values()):
                return f"{advice}(0, 1), and transpose it back in the forward. "
            first = bool(batch_dim)
            return f"{advice}(0, 1), or make_private(batch_first={first}). "
    return ""


def sample_of(samples: Samples, names: Sequence[str]) -> str:
    """Returns what a sample is made of: shapes, and names if there are some."""
    parts = []
    for i, (x, own) in enumerate(zip(samples.leaves, samples.by_sample)):
        if isinstance(x, T) and x.dim():
            shape = tuple(x.shape[1:]) if own else f"{tuple(x.shape)} (shared)"
            parts.append(f"{names[i]} {shape}" if names else str(shape))
    return ", ".join(parts)
