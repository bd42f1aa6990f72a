"""Layers of experts whose shares lie in several processes, and how tokens get there."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import nn

from opacus_ext.grad_sample.core.gradients import no_factors
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.recompute import NAME
from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.rules import NotAtOnce, as_op, handles
from opacus_ext.grad_sample.rules.experts import experts_interface

T = torch.Tensor

# What the decorator use_experts_implementation of transformers 5 leaves on a class.
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
_SWITCH = ["hidden_states", "selected_experts", "routing_weights"]


class Sharding(NamedTuple):
    """
    Marks a layer of experts that is sharded, and its experts' parameters.

    Attributes:
        group: the processes that hold the experts
        position: of the layer in the model
        experts: how many there are in all processes
        names: of all experts, where these are modules
    """

    group: ExpertGroup
    position: int
    experts: int
    names: tuple[str, ...]


def is_experts(layer: nn.Module) -> bool:
    """Returns True if weights are stacked as in transformers 5's experts interface."""
    return all(hasattr(layer, mark) for mark in _MARKS)


def has_experts(layer: nn.Module) -> bool:
    """Returns True for a ModuleDict that sends tokens to its entries, as in Switch."""
    if not isinstance(layer, nn.ModuleDict):
        return False
    arguments = list(inspect.signature(type(layer).forward).parameters)
    return arguments[1:] == _SWITCH


def expert_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters of a layer of experts that belong to one expert each."""
    if is_experts(layer):
        return list(layer.parameters(recurse=False))
    if has_experts(layer) or group_of(layer) is not None:
        return list(layer.parameters())
    return []


def group_of(part: Any) -> ExpertGroup | None:
    """The processes that a layer's experts or a parameter of theirs are spread over."""
    sharding = getattr(part, "sharding", None)
    # A user's layer may have an attribute of this name.
    if isinstance(sharding, Sharding):
        return sharding.group
    return None


def find_group(layers: Iterable[nn.Module]) -> ExpertGroup | None:
    """The processes that experts among ``layers`` are spread over, if they are."""
    group = None
    for layer in layers:
        own_group = group_of(layer)
        if own_group is not None:
            # Copies of parameters have lost their marks.
            mark(layer, getattr(layer, "sharding"))
            group = group or own_group
    return group


def mark(layer: Any, sharding: Sharding) -> None:
    """Notes that a layer is sharded, there and on its experts' parameters."""
    layer.sharding = sharding
    for parameter in expert_parameters(layer):
        setattr(parameter, "sharding", sharding)


def run_sharded(layer: nn.Module) -> None:
    """Replaces the layer's forward by one that sends tokens to their experts."""
    forward = _stacked if is_experts(layer) else _modules
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def _stacked(layer: Any, hidden_states: T, top_k_index: T, top_k_weights: T) -> T:
    """``forward`` of stacked experts that are sharded; see ``experts_interface``."""
    # A choice beyond the last expert is no expert.
    weights = top_k_weights.masked_fill(top_k_index >= layer.sharding.experts, 0)
    rows = hidden_states.unsqueeze(-2).expand(*top_k_index.shape, -1)
    results = through_experts(rows.flatten(0, -2), top_k_index.flatten(), layer)
    results = results.view(rows.shape) * weights.unsqueeze(-1)
    return results.sum(-2).to(hidden_states.dtype)


def _modules(
    layer: Any, hidden_states: T, selected_experts: T, routing_weights: T
) -> T:
    """``forward`` of a ModuleDict that is sharded; experts are one-hot rows."""
    # Tokens beyond the capacity of their expert have a row of zeros.
    none = 1 - selected_experts.sum(-1, keepdim=True).clamp(max=1)
    index = torch.cat([selected_experts, none], dim=-1).argmax(-1)
    return _stacked(layer, hidden_states, index, routing_weights)


@as_op
def through_experts(rows: T, index: T, layer: Any) -> T:
    """
    Every row ``[rows, width]`` through its expert, wherever that is; zero where there
    is none, which is an index from the number of experts on.
    """
    if layer.sharding.group.silent:
        return torch.zeros_like(rows)
    return _dispatch(rows, index, layer, lambda run, samples, *parts: run(*parts))


@handles(through_experts)
def _by_sample(
    group: SampleGroup, function: Callable, inputs: T, index: Any, layer: Any
) -> T:
    """Runs the samples of a group, and notes uses by the rows that come here."""
    # Rows would travel again in the backward pass.
    if group.anchor is not None:
        raise NotAtOnce(f"{NAME} of experts of other processes")
    tokens: Any = group.own(inputs)
    index = group.inner(index)
    processes = layer.sharding.group
    count = layer.sharding.experts
    size = processes.batch_size

    def run_samples(run: Callable[..., T], samples: T, rows: T, *experts: T) -> T:
        counts = torch.bincount(samples, minlength=size)
        first = counts.cumsum(0) - counts
        # Rows lie sample after sample; each gets a cell (sample, number) of a table.
        cells = samples, torch.arange(len(samples)).to(first) - first[samples]
        table = rows.new_zeros(size, int(counts.max()), rows.shape[1])
        table = table.index_put(cells, rows)
        if experts:
            # Cells without a row go to no expert.
            choices = experts[0].new_full(table.shape[:2], count)
            choices = choices.index_put(cells, experts[0])
            return group.of_others(run, (table, choices), size)[cells]
        # A module is to see a sample's rows, and no others.
        for length in set(counts.tolist()) - {0}:
            some = (counts == length).nonzero()[:, 0]
            results = group.of_others(run, (table[some, :length],), size, some)
            columns = torch.arange(length).to(some)
            table = table.index_put((some[:, None], columns), results.to(table.dtype))
        return table[cells]

    with group.outside():
        rows: Any = group.inner(tokens)
        if not processes.batch_sizes[processes.rank]:
            # What runs here is a stand-in for samples, and sends no rows.
            index = torch.full_like(index, count)
        # A use of no parameter, to which the gradient goes all the same.
        use = group.note(rows.new_zeros(group.size), (), no_factors, 0, (), ())
        anchor = group.inner(use)
        flat = rows.flatten(0, 1)
        results = _dispatch(flat, index.flatten(), layer, run_samples, anchor)
        return group.wrap(results.view(rows.shape))


def _dispatch(
    inputs: T,
    index: T,
    layer: Any,
    run_samples: Callable[..., T],
    anchor: T | None = None,
) -> T:
    """
    Sends rows, sample after sample, to the processes that hold their experts, and the
    results back; rows of no expert stay here and give zero. Experts there run by
    ``run_samples(run, samples, *rows)``, with the numbers of the samples among those
    of all processes. The anchor requires a gradient, in all processes or in none.
    """
    group, position, count, names = layer.sharding
    # Each process has as many experts, in order.
    share = count // group.size
    owner = index // share
    travels = (owner < group.size).nonzero()[:, 0]
    # Rows of one process are sent together; the order of samples stays.
    order = travels[owner[travels].argsort(stable=True)]
    send = torch.bincount(owner[order], minlength=group.size).tolist()
    receive = group.meet(position, send)
    per_sample = max(1, len(inputs) // max(1, group.batch_sizes[group.rank]))
    sample = order // per_sample + group.own_samples.start
    numbers = torch.stack([sample, index[order] % share], dim=1)
    samples, expert = group.exchange(numbers, send, receive).unbind(1)
    rows = _Exchange.apply(group, inputs[order], send, receive, anchor)
    results = torch.zeros_like(rows)
    if isinstance(layer, nn.ModuleDict):
        for number, module in enumerate(layer.values()):
            chosen = (expert == number).nonzero()[:, 0]
            if len(chosen):
                part = run_samples(module, samples[chosen], rows[chosen])
                results = results.index_copy(0, chosen, part.to(results.dtype))
    elif len(rows):

        def stack(rows: T, expert: T) -> T:
            weights = torch.ones_like(rows[..., :1])
            return experts_interface(layer, rows, expert[..., None], weights)

        results = run_samples(stack, samples, rows, expert).to(rows.dtype)
    # Only if all have come so far do the results travel.
    group.meet(position)
    results = _Exchange.apply(group, results, receive, send, rows)
    return results.new_zeros(inputs.shape).index_copy(0, order, results)


class _Exchange(torch.autograd.Function):
    """
    Rows travel, and their gradient travels back, in every process or in none: so it
    hangs on an anchor, whatever else it does.
    """

    @staticmethod
    def forward(context, group, rows, send, receive, anchor):
        context.group = group
        context.back = receive, send
        return group.exchange(rows, send, receive)

    @staticmethod
    def backward(context, gradient):
        return None, context.group.exchange(gradient, *context.back), None, None, None
