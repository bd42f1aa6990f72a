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
    """
    A refusal, as templates.

    Attributes:
        name: what is refused
        reason: what is wrong with it
        remedy: what to do
    """

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
    "was called without a tensor that has a row for each sample, with {given}",
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


def kind_of(value: Any) -> dict[str, str]:
    """Returns what can't be cut along a dim, and the function that may take it."""
    if isinstance(value, PackedSequence):
        return {"kind": "a PackedSequence", "take": "packed"}
    if isinstance(value, T):
        return {"kind": "a nested or sparse tensor", "take": "items"}
    return {"kind": f"of type {type(value).__name__}", "take": "items"}


def take_of(module: nn.Module, tensors: Sequence[T]) -> str:
    """Returns the name of what may take samples from flat tensors."""
    for layer in module.modules():
        if isinstance(layer, nn.EmbeddingBag):
            return "opacus_ext.take.bags"
    # A graph has its edges as numbers [2, edges], and the graph of each node.
    has_edges = has_graphs = False
    for tensor in tensors:
        if tensor.dtype is torch.long:
            has_edges |= tensor.dim() == 2 and len(tensor) == 2
            has_graphs |= tensor.shape == tensors[0].shape[:1]
    if has_edges and has_graphs:
        return "opacus_ext.take.graphs"
    return "function"


def other_dim(tensors: Mapping[str, T], size: int, batch_dim: int) -> str:
    """Returns the advice for a tensor whose batch is in the other one of two dims."""
    other = 1 - batch_dim
    turned = ""
    has_batch = False
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            if tensor.shape[batch_dim] == size:
                has_batch = True
            elif tensor.shape[other] == size:
                turned = turned or name
    if not turned:
        return ""
    advice = f"If the batch is dim {other} of {turned}, pass {turned}.transpose(0, 1)"
    # Another batch_dim would turn the tensors that are right.
    if has_batch:
        return f"{advice}, and transpose it back in the forward. "
    return f"{advice}, or make_private(batch_first={bool(batch_dim)}). "


def sample_of(samples: Samples, names: Sequence[str]) -> str:
    """Returns what a sample is made of: shapes, and names if there are some."""
    parts = []
    for number, leaf in enumerate(samples.leaves):
        if isinstance(leaf, T) and leaf.dim():
            described = f"{tuple(leaf.shape)} (shared)"
            if samples.by_sample[number]:
                described = f"{tuple(leaf.shape[1:])}"
            # take= gives samples of a user's own form, whose parts have no names.
            if names:
                described = f"{names[number]} {described}"
            parts.append(described)
    return ", ".join(parts)
