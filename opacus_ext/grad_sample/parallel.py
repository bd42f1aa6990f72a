"""Experts spread over processes: tokens travel to their expert and back.

Every process holds all of the model but of the experts only its share, and reads its
own samples. A token travels together with the number of its sample, in one all-to-all,
so the process that holds the expert knows the per-sample gradients of all samples
there; what a sample's gradients amount to over all processes is found by one
all-reduce of ``[B]`` squared norms (optimizers/clipping.py).

All processes must take part in every exchange, forward and backward, a process whose
batch is empty too. Where the tape would decide by itself to run the model once more,
the processes agree on it first.

Source: DP mixture of experts, "Per-sample gradients with expert parallelism" and
appendix.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence, Union

import torch
import torch.distributed as dist
from torch import nn

from opacus_ext.grad_sample.rules.experts import (
    Routes,
    experts_on_rows,
    is_experts,
    unrecorded,
)
from opacus_ext.grad_sample.rules.registry import STAND_IN_FALLBACKS, Record, StandIn


class World:
    """
    The processes that share the experts, as one of them sees it.

    Args:
        group: a process group; None for all processes

    Attributes:
        rank: number of this process in the group
        size: number of processes
        batch_sizes: samples that each process has in this step
    """

    def __init__(self, group: Optional[dist.ProcessGroup] = None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.batch_sizes: List[int] = [0] * self.size

    def __deepcopy__(self, memo: dict) -> "World":
        return self  # a process group can't be copied

    @property
    def batch_size(self) -> int:
        """Samples of all processes."""
        return sum(self.batch_sizes)

    @property
    def own(self) -> slice:
        """This process's samples among those of all."""
        start = sum(self.batch_sizes[: self.rank])
        return slice(start, start + self.batch_sizes[self.rank])

    def each(self, values: Sequence[float], **kwargs: Any) -> torch.Tensor:
        """One value a process as one value a sample, ``[B of all]``."""
        repeats = torch.tensor(self.batch_sizes)
        return torch.tensor(values).repeat_interleave(repeats).to(**kwargs)

    def begin(self, batch_size: int, device: torch.device) -> None:
        """Tells all others how many samples this process has."""
        sizes = torch.zeros(self.size, dtype=torch.long, device=device)
        sizes[self.rank] = batch_size
        self.batch_sizes = self.sum(sizes).tolist()

    def largest(self, *values: int, device: torch.device) -> List[int]:
        """The largest of each value over all processes."""
        x = torch.tensor([int(value) for value in values], device=device)
        self._run(dist.all_reduce, x, op=dist.ReduceOp.MAX)
        return x.tolist()

    def agree(self, value: int, refuses: bool, device: torch.device) -> int:
        """
        The largest value over all processes; what one of them refuses, all do.

        Raises:
            RuntimeError: if another process refuses
        """
        value, refused = self.largest(value, refuses, device=device)
        if refused and not refuses:
            raise RuntimeError(
                "Another process refuses this step; its error says why. No weight was "
                "changed."
            )
        return value

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        dense = x.contiguous()
        self._run(dist.all_reduce, dense)
        return x if dense is x else x.copy_(dense)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape from all processes, along dim 0."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run(dist.all_gather, parts, x)
        return torch.cat(parts)

    def exchange(
        self, x: torch.Tensor, send: List[int], receive: List[int]
    ) -> torch.Tensor:
        """Sends ``send[i]`` rows to process i, which come one after the other."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        self._run(dist.all_to_all_single, out, x.contiguous(), receive, send)
        return out

    def _run(self, collective: Callable, *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, group=self.group, **kwargs)
        except RuntimeError as error:  # DistBackendError is one
            raise RuntimeError(
                f"Process {self.rank} of {self.size} waited in vain for the others "
                f"({error}). One of them has died, failed or come too late (see the "
                "timeout of init_process_group). This step was not taken here: start "
                "all processes again from the last checkpoint."
            ) from error


class _Exchange(torch.autograd.Function):
    """Rows and numbers beside them travel together; the gradient travels back."""

    @staticmethod
    def forward(ctx, world, rows, numbers, send, receive):
        ctx.world, ctx.back = world, (receive, send)
        if numbers is None:
            return world.exchange(rows, send, receive), None
        # As bytes, so that one exchange carries both without rounding the numbers.
        width = numbers.shape[1] * numbers.element_size()
        parts = [_packed(x).view(torch.uint8) for x in (numbers, rows)]
        got = world.exchange(torch.cat(parts, dim=1), send, receive)
        numbers = _packed(got[:, :width]).view(numbers.dtype)
        ctx.mark_non_differentiable(numbers)
        return _packed(got[:, width:]).view(rows.dtype), numbers

    @staticmethod
    def backward(ctx, grad, _):
        return None, ctx.world.exchange(grad, *ctx.back), None, None, None


def _packed(x: torch.Tensor) -> torch.Tensor:
    """A copy whose bytes can be seen as another type: one row is not always, though
    ``contiguous`` takes it for that."""
    return x.clone(memory_format=torch.contiguous_format)


class Dealt(NamedTuple):
    """
    Rows that came from all processes.

    Attributes:
        rows: ``[received, width]``
        samples: of each row, counted through the samples of all processes
        order: the index that has sorted the rows of this process by expert
        expert: of each row, counted through the experts of this process
    """

    rows: torch.Tensor
    samples: torch.Tensor
    order: torch.Tensor
    expert: torch.Tensor


def deal(
    world: World,
    x: torch.Tensor,
    index: torch.Tensor,
    per_process: int,
    compute: Callable[[Dealt], torch.Tensor],
) -> torch.Tensor:
    """
    Sends rows to the processes that hold their experts, and the results back.

    Args:
        x: ``[tokens * choices, width]``, sample after sample
        index: the expert of each row; no expert has as high a number, or higher, as
            there are experts: such rows stay here and give zero
        per_process: number of experts a process holds
        compute: what the experts here do with the rows they are given

    Returns:
        ``[tokens * choices, width]``
    """
    owner = index // per_process
    travels = (owner < world.size).nonzero()[:, 0]
    order = travels[owner[travels].argsort(stable=True)]
    counts = torch.bincount(owner[order], minlength=world.size)
    receive = world.exchange(counts, [1] * world.size, [1] * world.size).tolist()
    send = counts.tolist()
    per_sample = max(1, len(x) // max(1, world.batch_sizes[world.rank]))
    numbers = torch.stack([order // per_sample, index[order] % per_process], dim=1)
    rows, numbers = _Exchange.apply(world, x[order], numbers, send, receive)
    sizes = torch.tensor(world.batch_sizes)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(torch.tensor(receive))
    samples, expert = numbers.unbind(1)
    out = compute(Dealt(rows, samples + first.to(samples.device), order, expert))
    out, _ = _Exchange.apply(world, out, None, receive, send)
    return out.new_zeros(len(x), out.shape[1]).index_copy(0, order, out)


def _stacked(
    layer: nn.Module,
    record: Record,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """``forward`` of stacked experts that are spread; see ``experts_interface``."""

    def compute(dealt: Dealt) -> torch.Tensor:
        here = record.dealt(dealt.samples, dealt.order)
        rows = here.mark(dealt.rows[:, None])
        index = dealt.expert[:, None]
        routes = Routes(dealt.expert, layer.world_experts // layer.world.size)
        return experts_on_rows(layer, here, rows, index, routes)[:, 0]

    return _spread(layer, record, hidden_states, top_k_index, top_k_weights, compute)


def _modules(
    layer: nn.Module,
    record: Record,
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """
    ``forward`` of a ModuleDict of experts (Switch).

    Args:
        hidden_states: ``[tokens, width]``
        selected_experts: one-hot, ``[tokens, choices, experts]``, zero for none
        routing_weights: ``[tokens, choices]``
    """
    none = 1 - selected_experts.sum(-1, keepdim=True).clamp(max=1)
    index = torch.cat([selected_experts, none], dim=-1).argmax(-1)

    def compute(dealt: Dealt) -> torch.Tensor:
        out = record.dealt(dealt.samples, dealt.order).mark(dealt.rows)
        for i, expert in enumerate(layer.values()):
            (where,) = (dealt.expert == i).nonzero(as_tuple=True)
            if len(where):
                here = record.dealt(dealt.samples[where], where)
                rows = here.mark(dealt.rows[where])
                out = out.index_copy(0, where, expert(rows).to(out.dtype))
        return out

    return _spread(layer, record, hidden_states, index, routing_weights, compute)


def _spread(
    layer: nn.Module,
    record: Record,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[Dealt], torch.Tensor],
) -> torch.Tensor:
    rows = x.unsqueeze(1).expand(-1, index.shape[1], -1)
    rows = record.mark(rows).flatten(0, 1)
    per_process = layer.world_experts // layer.world.size
    y = deal(layer.world, rows, index.flatten(), per_process, compute)
    weights = weights.masked_fill(index >= layer.world_experts, 0)
    y = y.view(*index.shape, y.shape[1])
    return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _has_experts(layer: nn.Module) -> bool:
    """Whether it is a ModuleDict that sends tokens to its entries, as Switch has it."""
    names = "hidden_states", "selected_experts", "routing_weights"
    code = getattr(type(layer).forward, "__code__", None)
    found = code is not None and code.co_varnames[1 : code.co_argcount] == names
    return isinstance(layer, nn.ModuleDict) and found


def spread_experts(
    name: str, layer: nn.Module, world: World, check: bool = False
) -> bool:
    """
    Leaves a layer of experts those of this process, in place.

    Args:
        check: only look whether it can be done

    Returns:
        Whether it is such a layer.

    Raises:
        ValueError: if the experts can't be shared out evenly; nothing is changed
    """
    stacked = is_experts(layer)
    if not stacked and not _has_experts(layer):
        return False
    own = expert_parameters(layer)
    count = len(own[0]) if stacked else len(layer)
    inside = (p for child in layer.children() for p in child.parameters())
    if stacked and any(p.requires_grad for p in inside):
        raise ValueError(
            f"{name} ({type(layer).__name__}) has trainable layers that all experts "
            "share, which can't be spread over processes. Freeze them with "
            "requires_grad_(False)."
        )
    if stacked and any(not p.dim() or len(p) != count for p in own):
        raise ValueError(
            f"{name} ({type(layer).__name__}) has parameters that are not stacked by "
            "expert. Move them to another layer."
        )
    if count % world.size:
        raise ValueError(
            f"{name} ({type(layer).__name__}) has {count} experts, which "
            f"{world.size} processes can't share evenly. Use a number of processes "
            "that divides it."
        )
    if check:
        return True
    each = count // world.size
    mine = slice(world.rank * each, (world.rank + 1) * each)
    if stacked:
        for key, p in layer._parameters.items():
            if p is not None:
                part = p.detach()[mine].clone()
                setattr(layer, key, nn.Parameter(part, requires_grad=p.requires_grad))
    else:
        layer.world_names = list(layer)
        for key in set(layer) - set(layer.world_names[mine]):
            del layer[key]
    _mark(layer, world)
    layer.world, layer.world_experts = world, count
    forward = _stacked if stacked else _modules
    cls = type(layer)
    plain = functools.partialmethod(forward, unrecorded)
    layer.__class__ = type(cls.__name__, (cls,), {"forward": plain})
    return True


def expert_parameters(layer: nn.Module) -> List[nn.Parameter]:
    """The parameters of a layer of experts that belong to one expert each."""
    if is_experts(layer):
        return [p for p in layer._parameters.values() if p is not None]
    spread = _has_experts(layer) or spread_over(layer) is not None
    return list(layer.parameters()) if spread else []


def _recognise(layer: nn.Module) -> Optional[StandIn]:
    if spread_over(layer) is None:
        return None
    return _stacked if is_experts(layer) else _modules


STAND_IN_FALLBACKS.insert(0, _recognise)


def spread_over(part: Union[nn.Module, nn.Parameter]) -> Optional[World]:
    """The processes that a layer's experts or a parameter of theirs are spread over."""
    world = getattr(part, "world", None)
    return world if isinstance(world, World) else None


def world_of(layers: Iterable[nn.Module]) -> Optional[World]:
    """
    The processes that experts among ``layers`` are spread over, if they are. Their
    parameters are marked, as copies of parameters lose such marks.
    """
    found = None
    for layer in layers:
        world = spread_over(layer)
        if world is not None:
            found = found or world
            _mark(layer, world)
    return found


def _mark(layer: nn.Module, world: World) -> None:
    for p in expert_parameters(layer):
        p.world = world
