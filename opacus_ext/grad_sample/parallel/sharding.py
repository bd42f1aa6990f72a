"""Layers of experts of which each process holds its share, and the way to them."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import nn

from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.rules import as_op, handles
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
        place: of the layer in the model
        experts: how many there are in all processes
        names: of all experts, where these are modules
    """

    group: ExpertGroup
    place: int
    experts: int
    names: tuple[str, ...]


def is_experts(layer: nn.Module) -> bool:
    """Returns True if weights are stacked as in transformers 5's experts interface."""
    return all(hasattr(layer, mark) for mark in _MARKS)


def has_experts(layer: nn.Module) -> bool:
    """Returns True for a ModuleDict that sends tokens to its entries, as in Switch."""
    takes = list(inspect.signature(type(layer).forward).parameters)[1:]
    return isinstance(layer, nn.ModuleDict) and takes == _SWITCH


def expert_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters of a layer of experts that belong to one expert each."""
    if is_experts(layer):
        return [p for p in layer._parameters.values() if p is not None]
    as_modules = has_experts(layer) or group_of(layer) is not None
    return list(layer.parameters()) if as_modules else []


def group_of(part: Any) -> ExpertGroup | None:
    """The processes that a layer's experts or a parameter of theirs are spread over."""
    sharding = getattr(part, "sharding", None)
    return sharding.group if isinstance(sharding, Sharding) else None


def find_group(layers: Iterable[nn.Module]) -> ExpertGroup | None:
    """The processes that experts among ``layers`` are spread over, if they are."""
    sharded: list[Any] = [x for x in layers if group_of(x) is not None]
    for layer in sharded:  # copies of parameters have lost their marks
        mark(layer, layer.sharding)
    return group_of(sharded[0]) if sharded else None


def mark(layer: Any, sharding: Sharding) -> None:
    """Notes that a layer is sharded, there and on its experts' parameters."""
    layer.sharding = sharding
    for p in expert_parameters(layer):
        setattr(p, "sharding", sharding)


def run_sharded(layer: nn.Module) -> None:
    """Puts a forward in the place of the layer's that sends tokens to their experts."""
    forward = _stacked if is_experts(layer) else _modules
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def _stacked(layer: Any, hidden_states: T, top_k_index: T, top_k_weights: T) -> T:
    """``forward`` of stacked experts that are sharded; see ``experts_interface``."""
    weights = top_k_weights.masked_fill(top_k_index >= layer.sharding.experts, 0)
    rows = hidden_states.unsqueeze(-2).expand(*top_k_index.shape, -1)
    y = through_experts(rows.flatten(0, -2), top_k_index.flatten(), layer)
    y = y.view(rows.shape) * weights.unsqueeze(-1)
    return y.sum(-2).to(hidden_states.dtype)


def _modules(
    layer: Any, hidden_states: T, selected_experts: T, routing_weights: T
) -> T:
    """``forward`` of a ModuleDict that is sharded; experts are one-hot rows."""
    none = 1 - selected_experts.sum(-1, keepdim=True).clamp(max=1)
    index = torch.cat([selected_experts, none], dim=-1).argmax(-1)
    return _stacked(layer, hidden_states, index, routing_weights)


@as_op
def through_experts(x: T, index: T, layer: Any) -> T:
    """
    Every row ``[rows, width]`` through its expert, wherever that is; zero where there
    is none, which is an index from the number of experts on.
    """
    if layer.sharding.group.silent:
        return torch.zeros_like(x)
    return _dispatch(x, index, layer, lambda run, samples, *given: run(*given))


@handles(through_experts)
def _by_sample(group: Any, func: Callable, x: T, index: T, layer: Any) -> T:
    """Runs the samples of a group, and notes uses by the rows that come here."""
    x, index = group.own(x), group.inner(index)
    processes, count = layer.sharding.group, layer.sharding.experts
    size = processes.batch_size

    def call(run: Callable[..., T], samples: T, rows: T, *index: T) -> T:
        counts = torch.bincount(samples, minlength=size)
        first = counts.cumsum(0) - counts
        at = samples, torch.arange(len(samples)).to(first) - first[samples]
        x = rows.new_zeros(size, int(counts.max()), rows.shape[1]).index_put(at, rows)
        if index:  # rows that fill up go to no expert
            every = index[0].new_full(x.shape[:2], count).index_put(at, index[0])
            return group.of_others(run, (x, every), size)[at]
        for n in set(counts.tolist()) - {0}:  # a sample's rows, and no others
            some = (counts == n).nonzero()[:, 0]
            found = group.of_others(run, (x[some, :n],), size, some).to(x.dtype)
            x = x.index_put((some[:, None], torch.arange(n).to(some)), found)
        return x[at]

    with group.outside():
        x = group.inner(x)
        if not processes.batch_sizes[processes.rank]:  # what runs is no sample
            index = torch.full_like(index, count)
        # A use of no parameter, to which the gradient goes all the same.
        anchor = group.note(x.new_zeros(group.size), (), tuple, 0, (), ())
        rows = x.flatten(0, 1), index.flatten()
        y = _dispatch(*rows, layer, call, group.inner(anchor))
        return group.wrap(y.view(x.shape))


def _dispatch(
    x: T, index: T, layer: Any, call: Callable[..., T], anchor: T | None = None
) -> T:
    """
    Sends rows, sample after sample, to the processes that hold their experts, and the
    results back; rows of no expert stay here and give zero. Experts there run by
    ``call(run, samples, *given)``, with the numbers of the samples among those of all
    processes. The anchor requires a gradient, in all processes or in none.
    """
    group, place, count, _ = layer.sharding
    each = count // group.size
    owner = index // each
    travels = (owner < group.size).nonzero()[:, 0]
    order = travels[owner[travels].argsort(stable=True)]
    send = torch.bincount(owner[order], minlength=group.size).tolist()
    receive = group.meet(place, send)
    per_sample = max(1, len(x) // max(1, group.batch_sizes[group.rank]))
    sample = order // per_sample + group.own_samples.start
    numbers = torch.stack([sample, index[order] % each], dim=1)
    samples, expert = group.exchange(numbers, send, receive).unbind(1)
    rows = _Exchange.apply(group, x[order], send, receive, anchor)
    y = torch.zeros_like(rows)
    if isinstance(layer, nn.ModuleDict):
        for i, run in enumerate(layer.values()):
            mine = (expert == i).nonzero()[:, 0]
            if len(mine):
                found = call(run, samples[mine], rows[mine])
                y = y.index_copy(0, mine, found.to(y.dtype))
    elif len(rows):
        here = functools.partial(_stacked_here, layer)
        y = call(here, samples, rows, expert).to(rows.dtype)
    group.meet(place)
    y = _Exchange.apply(group, y, receive, send, rows)
    return y.new_zeros(x.shape).index_copy(0, order, y)


def _stacked_here(layer: Any, rows: T, expert: T) -> T:
    ones = torch.ones_like(rows[..., :1])
    return experts_interface(layer, rows, expert[..., None], ones)


class _Exchange(torch.autograd.Function):
    """
    Rows travel, and their gradient travels back, in every process or in none: so it
    hangs on an anchor, whatever else it does.
    """

    @staticmethod
    def forward(ctx, group, rows, send, receive, anchor):
        ctx.group, ctx.back = group, (receive, send)
        return group.exchange(rows, send, receive)

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.group.exchange(grad, *ctx.back), None, None, None
