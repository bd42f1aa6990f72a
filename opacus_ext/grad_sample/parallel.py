"""Experts spread over processes: tokens travel to their expert and back.

Every process holds all of the model but of the experts only its share, and reads its
own samples. A token travels together with the number of its sample, in one all-to-all,
so the process that holds the expert knows the per-sample gradients of all samples
there; what a sample's gradients amount to over all processes is found by one
all-reduce of ``[B]`` squared norms (optimizers/clipping.py).

All processes must take part in every exchange, forward and backward, a process whose
batch is empty too. A forward pass is a row of meetings (:meth:`World.meet`): one at its
start, one for each layer of experts, one at its end; and what a process refuses in
between it tells the others at the next, wherever they are.

Source: DP mixture of experts, "Per-sample gradients with expert parallelism" and
appendix.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import nn

from opacus_ext.grad_sample.rules.experts import (
    OnRows,
    all_at_once,
    as_op,
    at_once,
    chosen_of,
    has_experts,
    is_experts,
    one_by_one,
    send_rows,
    weighted,
)
from opacus_ext.refused import Refused


class Elsewhere(RuntimeError):
    """What went wrong in another process, or between them."""


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

    def each(self, values: Iterable[float], **kwargs: Any) -> torch.Tensor:
        """One value a process as one value a sample, ``[B of all]``."""
        repeats = torch.tensor(self.batch_sizes)
        return torch.tensor(list(values)).repeat_interleave(repeats).to(**kwargs)

    @contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """
        A forward pass of all processes.

        Raises:
            RuntimeError: if another process refuses its own
        """
        nothing = torch.zeros(self.size, dtype=torch.long, device=device)
        try:
            yield
        except Elsewhere:
            raise
        except BaseException:
            self._told(nothing - 1)
            raise
        self.meet(nothing)

    def begin(self, batch_size: int, look: bool, device: torch.device) -> bool:
        """
        Tells all others how many samples this process has.

        Args:
            look: whether it would compare the model with itself

        Returns:
            Whether one of them would.
        """
        told = torch.full((self.size,), 2 * batch_size + look, device=device)
        found = self.meet(told)
        self.batch_sizes = [n // 2 for n in found]
        return any(n % 2 for n in found)

    def meet(self, counts: torch.Tensor) -> List[int]:
        """
        Tells each process a count, ``[processes]``, and is told one by each.

        Raises:
            RuntimeError: if another process refuses this pass
        """
        found = self._told(counts)
        if min(found) < 0:
            raise Elsewhere(
                "Another process refuses this step; its error says why. No weight was "
                "changed."
            )
        return found

    def _told(self, counts: torch.Tensor) -> List[int]:
        ones = [1] * self.size
        return self.exchange(counts, ones, ones).tolist()

    def largest(self, *values: int, device: torch.device) -> List[int]:
        """The largest of each value over all processes."""
        x = torch.tensor([int(value) for value in values], device=device)
        self._run(dist.all_reduce, x, op=dist.ReduceOp.MAX)
        return x.tolist()

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
            raise Elsewhere(
                f"Process {self.rank} of {self.size} waited in vain for the others "
                f"({error}). One of them has died, failed or come too late (see the "
                "timeout of init_process_group). This step was not taken here: start "
                "all processes again from the last checkpoint."
            ) from error


class _Exchange(torch.autograd.Function):
    """
    Rows and numbers beside them travel together; the gradient travels back, in every
    process or in none: so it hangs on the anchor of the run, whatever else it does.
    """

    @staticmethod
    def forward(ctx, world, rows, numbers, send, receive, anchor):
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
        back = ctx.world.exchange(grad, *ctx.back)
        return None, back, None, None, None, None


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
        expert: of each row, counted through the experts of this process
    """

    rows: torch.Tensor
    samples: torch.Tensor
    expert: torch.Tensor


def deal(
    world: World,
    x: torch.Tensor,
    index: torch.Tensor,
    per_process: int,
    compute: Callable[[Dealt], torch.Tensor],
    anchor: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """
    Sends rows to the processes that hold their experts, and the results back.

    Args:
        x: ``[tokens * choices, width]``, sample after sample
        index: the expert of each row; no expert has as high a number, or higher, as
            there are experts: such rows stay here and give zero
        per_process: number of experts a process holds
        compute: what the experts here do with the rows they are given
        anchor: requires a gradient, in all processes or in none

    Returns:
        ``[tokens * choices, width]``
    """
    owner = index // per_process
    travels = (owner < world.size).nonzero()[:, 0]
    order = travels[owner[travels].argsort(stable=True)]
    counts = torch.bincount(owner[order], minlength=world.size)
    receive = world.meet(counts)
    send = counts.tolist()
    per_sample = max(1, len(x) // max(1, world.batch_sizes[world.rank]))
    numbers = torch.stack([order // per_sample, index[order] % per_process], dim=1)
    rows, numbers = _Exchange.apply(world, x[order], numbers, send, receive, anchor)
    sizes = torch.tensor(world.batch_sizes)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(torch.tensor(receive))
    samples, expert = numbers.unbind(1)
    out = compute(Dealt(rows, samples + first.to(samples.device), expert))
    out, _ = _Exchange.apply(world, out, None, receive, send, anchor)
    return out.new_zeros(len(x), out.shape[1]).index_copy(0, order, out)


@as_op
def spread(x: torch.Tensor, index: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """
    Every row through its expert, wherever that is.

    Args:
        x: ``[*rows, width]``
        index: ``[*rows]``; as many as there are experts, or more, for none

    Returns:
        ``[*rows, width]``, zero where there is no expert.
    """
    rows = x.flatten(0, -2)
    return spread_rows(rows, index.flatten(), layer, at_once).view(x.shape)


def spread_rows(
    x: torch.Tensor,
    index: torch.Tensor,
    layer: nn.Module,
    on_rows: OnRows,
    anchor: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """
    Args:
        x: ``[rows, width]``, sample after sample
        index: ``[rows]``
        on_rows: is told the sample of each row
        anchor: see :func:`deal`

    Returns:
        ``[rows, width]``
    """
    per_process = layer.world_experts // layer.world.size
    if is_experts(layer):
        experts = all_at_once(layer)
    else:
        experts = one_by_one(layer.values())

    def compute(dealt: Dealt) -> torch.Tensor:
        def here(function: Callable, rows: torch.Tensor, which: torch.Tensor):
            return on_rows(function, rows, dealt.samples[which])

        return send_rows(dealt.rows, dealt.expert, per_process, experts, here)

    return deal(layer.world, x, index, per_process, compute, anchor)


def _stacked(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """``forward`` of stacked experts that are spread; see ``experts_interface``."""
    x = hidden_states.unsqueeze(1).expand(-1, top_k_index.shape[1], -1)
    y = spread(x, top_k_index, layer)
    weights = top_k_weights.masked_fill(top_k_index >= layer.world_experts, 0)
    return weighted(y, weights, hidden_states)


def _modules(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """``forward`` of a ModuleDict that is spread; see ``switch_experts``."""
    index = chosen_of(selected_experts)
    x = hidden_states.unsqueeze(1).expand(-1, index.shape[1], -1)
    return weighted(spread(x, index, layer), routing_weights, hidden_states)


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
    if not stacked and not has_experts(layer):
        return False
    own = expert_parameters(layer)
    count = len(own[0]) if stacked else len(layer)
    inside = (p for child in layer.children() for p in child.parameters())
    if stacked and any(p.requires_grad for p in inside):
        raise Refused(
            f"{name} ({type(layer).__name__}) has trainable layers that all experts "
            "share, which can't be spread over processes. Freeze them with "
            "requires_grad_(False)."
        )
    if stacked and any(not p.dim() or len(p) != count for p in own):
        raise Refused(
            f"{name} ({type(layer).__name__}) has parameters that are not stacked by "
            "expert. Move them to another layer."
        )
    if count % world.size:
        raise Refused(
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
    layer.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    return True


def expert_parameters(layer: nn.Module) -> List[nn.Parameter]:
    """The parameters of a layer of experts that belong to one expert each."""
    if is_experts(layer):
        return [p for p in layer._parameters.values() if p is not None]
    spread = has_experts(layer) or spread_over(layer) is not None
    return list(layer.parameters()) if spread else []


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
