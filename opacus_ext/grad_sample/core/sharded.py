"""What processes with shards of a model have in common: passes, and clipped sums.

Each process has samples of its own, and gathers whole parameters while a layer
computes. So norms are those of one process, and the clipped sums are reduced into the
shards, some parameters after the others.

Gathering is collective: all processes must run as many forward and backward passes, and
in each the same layers. Where samples branch on data, or run one by one, processes
differ, so passes are taken in *rounds*. A pass that fails in one process ends in the
others at the next layer that gathers.
"""

from __future__ import annotations

import zlib
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard

from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.group import BranchesDiffer
from opacus_ext.grad_sample.core.groups import Samples, put_back, why, written
from opacus_ext.refused import (
    STAGES,
    ProcessFailure,
    Refused,
    failed_elsewhere,
    waited_in_vain,
)

T = torch.Tensor

# What a process says when all meet: bits of a number, of which each is told the union.
MORE, ALONE, READS, FAILED = 1, 2, 4, 8
_BACKWARD, _WITHOUT_MODEL = -1, -2  # places where a backward pass begins
_OUTPUTS = 1024  # that a model may have in one process, and not in another


_BUCKET = 25 * 2**20  # bytes that are summed together


class FailedElsewhere(BaseException):
    """Raised in a pass that has failed in another process; no code should catch it."""


class Rounds:
    """
    Passes that all processes take together.

    Args:
        units: the modules that gather their parameters, the root first

    Attributes:
        watching: True if a pass may fail in one process, so that the others must know
    """

    def __init__(self, units: Sequence[FSDPModule]):
        self.units, self.watching, self._inside = units, True, False
        self._tell = False  # True while the others wait for what this process says
        self._order: list[int] = []  # numbers of the units of the last forward pass
        self._follows = False  # True while a forward pass runs
        self._begun = False  # True once a unit has run
        self._group = None
        if "gloo" not in dist.get_backend():  # as no device should wait for a number
            world: Any = dist.group.WORLD
            own = world._get_backend(next(units[0].parameters()).device).options
            self._group = dist.new_group(backend="gloo", timeout=own._timeout)
        self.handles = [
            unit.register_forward_pre_hook(partial(self._before_unit, i), prepend=True)
            for i, unit in enumerate(units)
        ]

    def meet(self, flags: int, place: int = 0, stage: int = 0) -> int:
        """
        Returns the union of what all processes say. Refuses if they are at different
        places, which are numbers. A process that has failed says at which stage.
        """
        who = dist.get_rank() * len(STAGES) + stage if flags & FAILED else -1
        bits = torch.tensor([*(flags >> i & 1 for i in range(4)), place, -place, who])
        try:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            self._tell = False
            raise waited_in_vain(dist.get_rank(), error) from error
        *found, most, least, who = bits.tolist()
        said = sum(x << i for i, x in enumerate(found))
        if most != -least and not said & FAILED:
            self._tell = self._inside = False
            self.reset()
            raise Refused(
                "Processes run different layers that fully_shard has sharded, or in "
                "another order, by what their samples hold or by random numbers. No "
                "weight was changed.",
                remedy="Leave fully_shard out for layers that are not always run, so "
                "that they belong to the layer around them.",
            )
        if said & FAILED and not self._inside:
            self._tell = False
            raise failed_elsewhere(*divmod(who, len(STAGES)))
        return said

    @contextmanager
    def telling(self, stage: str) -> Iterator[None]:
        """Tells the others of an error, where they wait for this process."""
        outer, self._tell = self._tell, True
        try:
            yield
        except Exception as error:
            if self._tell:
                with suppress(ProcessFailure):
                    self.meet(FAILED, stage=STAGES.index(stage))
                self.reset()
            elif not isinstance(error, ProcessFailure):
                if isinstance(error, dist.DistError) or "gloo" in str(error):
                    raise waited_in_vain(dist.get_rank(), error) from error
            raise
        finally:
            self._tell = self._tell and outer  # unless the others know, or go on

    def _before_unit(self, number: int, *args: Any) -> None:
        self._begun = True
        if self._follows:
            self._order.append(number)
        if self._inside and self.watching and self.meet(0, 1 + number) & FAILED:
            raise FailedElsewhere

    @property
    def order(self) -> int:
        """A number that is another one if the units of the last pass are others."""
        return zlib.crc32(repr(self._order).encode())

    def run(self, function: Callable[[], Any], reads: Callable[[], bool]) -> Any:
        """
        Runs one pass. ``reads`` tells whether it has read values of the data, after
        which processes may differ; where none does, later passes need not be watched.
        """
        tell, self._tell, self._inside = self._tell, False, self.watching
        self._order, self._follows = [], True
        try:
            found = function()
            self.finish(reads())
        except FailedElsewhere:
            self.reset()
            self._tell = tell
            raise
        except BaseException:
            if self._inside:
                self.meet(FAILED)
                self._tell = tell
            self.reset()
            raise
        finally:
            self._inside = self._follows = False
        self._tell = tell
        return found

    def begin_backward(self, through: bool) -> None:
        """
        Waits until all processes have a loss, which depends on the model or, in all
        alike, not; later errors are not told.
        """
        self.meet(0, _BACKWARD if through else _WITHOUT_MODEL)
        self._tell = False

    def used(self, own: Sequence[bool], samples: int) -> list[bool]:
        """
        Returns which outputs of the model the losses use: a backward pass gathers what
        has computed these. A process without samples goes by the others.
        """
        kept = torch.zeros(2, max(len(own), _OUTPUTS), dtype=torch.uint8)
        if samples:
            kept[:, : len(own)] = torch.tensor([[*own], [not x for x in own]])
        try:
            dist.all_reduce(kept, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise waited_in_vain(dist.get_rank(), error) from error
        if bool((kept[0] & kept[1]).any()):
            self.reset()
            raise Refused(
                "Processes compute their losses from different outputs of a model that "
                "fully_shard has sharded. No weight was changed.",
                remedy="Compute the loss from the same outputs in all processes.",
            )
        return kept[0, : len(own)].bool().tolist()

    def finish(self, reads: bool) -> None:
        """Ends the forward pass, unless it has failed in another process."""
        self._follows = False
        if self._inside:
            said = self.meet(READS if reads else 0, 1 + len(self.units))
            self._inside = False
            if said & FAILED:
                raise FailedElsewhere
            self.watching = bool(said & READS)

    def reset(self) -> None:
        """Frees what a pass that failed has gathered, in all processes alike."""
        self.watching, root, self._order = True, self.units[0], []
        if self._begun and hasattr(root, "reset_iter_state"):  # torch 2.13
            root.reset_iter_state()
        self.reshard()

    def reshard(self) -> None:
        """
        Frees what is gathered: by a pass that failed, or by an evaluation before the
        last step, whose weights are older than the shards.
        """
        for unit in self.units:
            unit.reshard()


def in_rounds(
    rounds: Rounds,
    samples: Sequence[Samples],
    at_once: Callable[[Samples], None],
    one: Callable[[Samples, int], None],
    *,
    one_by_one: bool,
    reads: Callable[[], bool],
    warn: Callable[[str], None],
) -> int:
    """
    Runs all samples as :func:`~groups.in_groups`, in as many rounds as the process with
    the most needs; returns their number. In rounds for which this process has no
    samples left, it runs one of zeros whose ``rows`` are empty.

    Args:
        rounds: of all processes
        reads: tells whether a group has read values of the data
    """
    todo, ran = deque(some for some in samples if some.size), 0
    rounds.reshard()
    while True:
        said = rounds.meet(
            MORE * bool(todo) | ALONE * one_by_one, rounds.order if ran else 0
        )
        if not said & MORE:
            return ran
        ran, alone = ran + 1, bool(said & ALONE)
        if alone and todo and todo[0].size > 1:
            some = todo.popleft()
            every = torch.arange(some.size)
            todo.extendleft(some.select(i) for i in every.flip(0).split(1))
        some = todo.popleft() if todo else _of_nobody(samples[0])
        run = partial(one, some, 0) if alone else partial(at_once, some)
        watched = rounds.watching
        before = written(some) if watched else []
        try:
            rounds.run(run, reads)
            continue
        except FailedElsewhere:
            left = [some]
        except BranchesDiffer as differ:
            if not watched:
                raise Refused(
                    "Samples take different branches, by what they hold, in a model "
                    "that read nothing of them before: the other processes did not "
                    "wait for that. No weight was changed.",
                    remedy='Train with grad_sample_mode="scan", or change the branch '
                    "into torch.where.",
                ) from differ
            left = differ.parts(some)
        except Refused:
            raise
        except Exception as error:
            if alone or not watched:  # the others are not told
                raise
            left, one_by_one = [some], True
            warn(why(error))
        put_back(before)
        todo.extendleft(x for x in left if not is_of_nobody(x))


def is_of_nobody(some: Any) -> bool:
    """Returns True for a sample of zeros, which runs as other processes have more."""
    return some.rows is not None and not some.rows.numel()


def _of_nobody(form: Samples) -> Samples:
    pairs = zip(form.leaves, form.by_sample)
    leaves = [x.new_zeros(1, *x.shape[1:]) if own else x for x, own in pairs]
    return form._replace(leaves=leaves, size=1, rows=torch.arange(0))


class Shards:
    """
    The parameters of a model that ``fully_shard`` has sharded.

    Attributes:
        gathered: all parameters by name, as they are gathered; see :func:`gathered`
        shards: all parameters by name, as each process holds them
        own: the shards that are trained, by name
        rounds: the passes of all processes
    """

    def __init__(self, module: nn.Module):
        units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        refuse_shards(type(module).__name__, module, units)
        self.shards: dict[str, Any] = dict(module.named_parameters())
        self.own = {n: p for n, p in self.shards.items() if p.requires_grad}
        self.gathered = gathered(module, units)
        refuse_tensor_parallel(self.gathered)
        self._refuse_others()
        self.rounds = Rounds(units)

    def refuse_changes(self) -> None:
        """Refuses parameters that were frozen or unfrozen since the first gathering."""
        for name, p in self.shards.items():
            if p.requires_grad != self.gathered[name].requires_grad:
                raise Refused(
                    f"requires_grad of {name} was set to {p.requires_grad} after "
                    "make_private: fully_shard keeps what it was before.",
                    parameter=name,
                    remedy="Freeze parameters before fully_shard.",
                )

    def _refuse_others(self) -> None:
        """Refuses shards of fewer processes than there are."""
        for name, p in self.own.items():
            count = p.device_mesh.size()
            if count != dist.get_world_size():
                raise Refused(
                    f"{name} is sharded by fully_shard over {count} of "
                    f"{dist.get_world_size()} processes: the others would train it by "
                    "themselves, with the same noise.",
                    parameter=name,
                    remedy="Give fully_shard a mesh of all processes.",
                )


def refuse_tensor_parallel(params: Mapping[str, T]) -> None:
    """
    Refuses parameters of which a process has only a part while it computes: their
    per-sample gradients and norms would be those of the part.
    """
    for name, p in params.items():
        if isinstance(p, DTensor):
            raise Refused(
                f"{name}, of shape {tuple(p.shape)}, is a DTensor within the "
                "computation of a sample. Tensor parallelism is not supported.",
                parameter=name,
                module=name.rpartition(".")[0] or None,
                remedy="Leave parallelize_module (a tp_plan, tp_size or ep_size of "
                "transformers) out, and use fully_shard or DDP. Give clipped_grads "
                "the model itself if fully_shard has sharded it.",
            )


def refuse_shards(name: str, module: nn.Module, units: Sequence[FSDPModule]) -> None:
    """Refuses parameters that are not sharded by ``fully_shard``."""
    if not units or units[0] is not module:
        raise Refused(
            f"{name} has parts that are sharded by fully_shard, and is not itself.",
            module=name,
            remedy="Call fully_shard on the whole model, last.",
        )
    for parameter, p in module.named_parameters():
        if p.is_meta:
            raise Refused(
                f"{parameter} is on the meta device: it has no values.",
                parameter=parameter,
                remedy="Between fully_shard and make_private call "
                'model.to_empty(device="cpu" or "cuda") and load or draw the weights.',
            )
        if not p.requires_grad:
            continue
        kinds = p.placements if isinstance(p, DTensor) else ()
        if not kinds or any(isinstance(k, Partial) for k in kinds):
            raise Refused(
                f"Parameter {parameter} is "
                f"{f'placed as {kinds}' if kinds else 'not sharded by fully_shard'}.",
                parameter=parameter,
                remedy="Shard all trainable parameters by fully_shard over processes "
                "that have samples of their own, and leave ignored_params out.",
            )


def gathered(module: nn.Module, units: Sequence[FSDPModule]) -> dict[str, nn.Parameter]:
    """
    Returns the parameters by name, as FSDP2 puts them into modules while these compute:
    the same tensors each time, whose memory is freed in between.
    """
    found = shards = dict(module.named_parameters())
    for unit in units:
        unit.unshard()
        now = module.named_parameters()
        found = {**found, **{n: p for n, p in now if p is not shards[n]}}
        unit.reshard()
    return found


def sharded_sum(
    gathered: Mapping[str, T], params: Mapping[str, DTensor], *args: Any
) -> ClippedSum:
    """
    Makes the clipped sum over the samples of all processes, of which each has its
    shards.

    Args:
        gathered: the parameters as they are gathered, by name
        params: their shards, by name
        args: later ones of :class:`~core.clip.ClippedSum`
    """
    whole = {name: gathered[name] for name in params}
    reduce = partial(reduced_into, list(params.values()), list(whole.values()))
    return ClippedSum(whole, *args, reduce=reduce)


def reduced_into(
    shards: Sequence[DTensor], params: Sequence[T], sums: Iterable[T | None]
) -> Iterator[DTensor]:
    """Yields this process's shards of the sums over all processes, in buckets."""
    totals = (_whole(p, total) for p, total in zip(params, sums))
    first = 0
    for bucket in in_buckets(totals):
        last = first + len(bucket)
        yield from reduced(shards[first:last], bucket)
        first = last


def _whole(p: T, total: T | None) -> T:
    """Returns a sum in float32 or wider, as rounding it may exceed the noise."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    if total is None:
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
    return total.to(p.device, dtype)


def in_buckets(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Yields tensors of one kind in a row, about 25 MB of them together, as DDP."""
    bucket: list[T] = []
    for x in tensors:
        like = bucket[0] if bucket else x
        full = sum(y.numel() * y.itemsize for y in bucket) >= _BUCKET
        if bucket and (full or (x.dtype, x.device) != (like.dtype, like.device)):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket


def reduced(shards: Sequence[DTensor], totals: Sequence[T]) -> list[T]:
    """
    Sums over all processes, each of which keeps its shards of the sums: by one
    collective where all are cut along dim 0, as by default.

    Args:
        shards: of the parameters
        totals: sums of this process
    """
    mesh = shards[0].device_mesh
    plain = mesh.ndim == 1 and all(
        p.placements == (Shard(0),) and p.device_mesh == mesh for p in shards
    )
    if not plain:
        return [_reduced(p, x) for p, x in zip(shards, totals)]
    count, rows = mesh.size(), []
    for x in totals:
        over = -len(x) % count
        padded = torch.cat([x, x.new_zeros(over, *x.shape[1:])]) if over else x
        rows.append(padded.reshape(count, -1))
    whole = DTensor.from_local(torch.cat(rows, 1), mesh, [Partial()])
    own = whole.redistribute(placements=[Shard(0)]).to_local()
    found = []
    for p, part in zip(shards, own.split([x.shape[1] for x in rows], dim=1)):
        shape = p.to_local().shape
        part = part.reshape(-1)[: shape.numel()].view(shape)
        found.append(_as_shard(p, part))
    return found


def _reduced(p: DTensor, total: T) -> T:
    """Sums over the processes of a mesh of any number of dimensions."""
    mesh = p.device_mesh
    whole = DTensor.from_local(total, mesh, [Partial()] * mesh.ndim)
    return _as_shard(p, whole.redistribute(placements=p.placements).to_local())


def _as_shard(p: DTensor, part: T) -> T:
    """Returns this process's part of a sum as a shard, as its parameter is one."""
    size: Any = dict(shape=p.shape, stride=p.stride())
    return DTensor.from_local(part, p.device_mesh, p.placements, **size)
