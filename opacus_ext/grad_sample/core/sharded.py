"""What processes with shards of a model have in common: questions, and clipped sums.

Each process has samples of its own, and gathers whole parameters while a layer
computes. So norms are those of one process, and the clipped sums are reduced into the
shards, some parameters after the others.

Gathering is collective: all processes must run the same layers in the same order. They
run one program, so they stay in step until it asks something of the data. A question is
asked of the samples of all processes. If these have one answer, all processes go on
with it. If not, all raise at this point and take their samples one by one, in as many
rounds as the process with the most samples needs. An op that vmap can't run fails in
all processes, so that all raise there too. Differences that no question shows (random
numbers of Python, code that depends on the shape of a batch, branches of samples that
run alone) are noticed at the next layer that gathers, where processes meet.

An error in one process ends in the timeout of the others, as with plain FSDP2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard

from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.group import BranchesDiffer, SampleGroup
from opacus_ext.grad_sample.core.groups import Samples, put_back, why, written
from opacus_ext.grad_sample.core.values import as_bits
from opacus_ext.private_torch import is_batched
from opacus_ext.refused import Refused, waited_in_vain

T = torch.Tensor

# Points of a program at which processes meet. Layers that gather have numbers from 0.
BEGIN, ALONE, FAILED, END, BACKWARD, WITHOUT_MODEL, OUTPUTS = range(-7, 0)
# A question has this number, plus the checksum of the form that its answers have.
_QUESTION = 2**32
_LOWEST = torch.iinfo(torch.int64).min
# So many bytes are summed together.
_BUCKET = 25 * 2**20


class Processes:
    """
    The processes that hold shards of one model, as one of them sees them.

    Args:
        units: the modules that gather their parameters, the root first
    """

    def __init__(self, units: Sequence[FSDPModule]):
        self.units = units
        # This is True while zeros run, as this process has no samples.
        self.stands_in = False
        # True while samples run together.
        self._at_once = False
        # True within a forward pass.
        self._inside = False
        # True once a unit has run.
        self._gathers = False
        # True once processes met at different points.
        self._apart = False
        self._group = None
        # With NCCL, the CPU would wait for the GPU to read a number.
        if "gloo" not in dist.get_backend():
            world: Any = dist.group.WORLD
            options = world._get_backend(next(units[0].parameters()).device).options
            self._group = dist.new_group(backend="gloo", timeout=options._timeout)
        self.handles = []
        for number, unit in enumerate(units):
            hook = partial(self._before_unit, number)
            self.handles.append(unit.register_forward_pre_hook(hook, prepend=True))

    # -- meetings ----------------------------------------------------------------------

    def meet(self, point: int, number: int = 0, other: int = 0) -> tuple[int, int]:
        """
        Waits for all processes, and returns the largest of their numbers. If they are
        at different points, all raise: BranchesDiffer while samples run together, as
        samples one by one may still agree; otherwise an error.
        """
        numbers = torch.tensor([point, -point, number, other], device="cpu")
        last, negative_first, number, other = self._largest(numbers).tolist()
        if last != -negative_first:
            self._refuse_apart()
        return number, other

    def _refuse_apart(self) -> None:
        self._apart = True
        if self._at_once:
            raise BranchesDiffer(torch.zeros(0))
        self.reset()
        raise Refused(
            "Processes run different layers that fully_shard has sharded, or in "
            "another order: by what their samples hold, by random numbers, or as one "
            "of them has failed before. No weight was changed.",
            remedy="Leave fully_shard out for layers that are not always run, so that "
            "they belong to the layer around them.",
        )

    def shared(self, point: int, rows: T) -> T | None:
        """
        Returns the row that all processes share; None if rows differ. A process without
        rows, or with shorter ones, goes by the others.

        Args:
            point: see :meth:`meet`
            rows: integers ``[rows, n]``
        """
        width, _ = self.meet(point, rows.shape[1])
        ends = torch.full((2, width), _LOWEST, device="cpu")
        if rows.numel():
            rows = rows.long()
            # -x - 1 orders integers the other way round, and can't overflow as -x can.
            largest, smallest = rows.amax(0), (-1 - rows).amax(0)
            ends[:, : rows.shape[1]] = torch.stack([largest, smallest])
        if width:
            ends = self._largest(ends)
        most, least = ends
        if bool((most > -1 - least).any()):
            return None
        return most

    def _largest(self, numbers: T) -> T:
        try:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise waited_in_vain(dist.get_rank(), error) from error
        return numbers

    # -- passes ------------------------------------------------------------------------

    def run(
        self,
        samples: Sequence[Samples],
        at_once: Callable[[Samples], None],
        one: Callable[[Samples, int], None],
        *,
        one_by_one: bool,
        warn: Callable[[str], None],
    ) -> int:
        """
        Runs all samples as :func:`~groups.in_groups`, in as many rounds as the process
        with the most kinds of samples needs; returns their number. Where this process
        has no more samples, it runs one of zeros, which adds nothing.
        """
        self.reshard()
        zeros = _stand_in(samples[0])
        kinds = [kind for kind in samples if kind.size]
        count, alone = self.meet(BEGIN, len(kinds), one_by_one)
        try:
            for kind in kinds + [zeros] * (count - len(kinds)):
                reason: str | None = ""
                if not alone:
                    reason = self._try(kind, at_once)
                if reason is None:
                    continue
                size = kind.size
                if kind is zeros:
                    size = 0
                # Layers gather in all processes or in none, so all take as many rounds.
                rounds, _ = self.meet(ALONE, size)
                for number in range(size):
                    one(kind, number)
                for _ in range(size, rounds):
                    one(zeros, 0)
                if reason:
                    warn(reason)
        except BaseException:
            self.reset()
            raise
        return count

    def _try(self, kind: Samples, at_once: Callable[[Samples], None]) -> str | None:
        """Runs samples together; returns why they can't, or None."""
        before = written(kind)
        self.stands_in, self._at_once = is_stand_in(kind), True
        try:
            at_once(kind)
            return None
        except BranchesDiffer:
            reason = ""  # for no process, as the error is raised in all of them
        except Refused:
            raise
        except Exception as error:
            reason = why(error)
            # The meeting raises if the other processes have not failed as this one.
            with suppress(BranchesDiffer):
                self.meet(FAILED)
        finally:
            self.stands_in = self._at_once = False
        self.reset()
        put_back(before)
        return reason

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward pass, in which all processes gather the same units."""
        self._inside, self._apart = True, False
        try:
            result = function(*args)
        finally:
            self._inside = False
        # The code of the model may have caught the error.
        if self._apart:
            self._refuse_apart()
        self.meet(END)
        return result

    def _before_unit(self, number: int, *args: Any) -> None:
        # Elsewhere, as in an evaluation, processes need not be in step.
        if self._inside:
            self.meet(number)
        self._gathers = True

    def reset(self) -> None:
        """Frees what a pass that failed has gathered."""
        root = self.units[0]
        # Versions before torch 2.13 lack the method.
        if self._gathers and hasattr(root, "reset_iter_state"):
            root.reset_iter_state()
        self.reshard()

    def reshard(self) -> None:
        """
        Frees what is gathered: by a pass that failed, or by an evaluation before the
        last step, whose weights are older than the shards.
        """
        for unit in self.units:
            unit.reshard()


class ShardedGroup(SampleGroup):
    """Samples of one process that run together, and answer with those of the others."""

    frees_parameters = True

    def __init__(self, processes: Processes, *args: Any):
        super().__init__(*args)
        self.processes = processes

    def agree(self, tensor: T) -> T:
        """Returns the value that the samples of all processes share."""
        if not is_batched(tensor):
            return tensor
        self.read_data = True
        with self.outside():
            values = self.level.unwrap(tensor).detach()
            shape, dtype = values.shape[1:], values.dtype
            rows = as_bits(values.reshape(self.size, -1)).flatten(1)
            # Processes whose answers have other shapes ask another question.
            form = zlib.crc32(repr((dtype, shape)).encode())
            if self.processes.stands_in:
                rows = rows[:0]
            answer = self.processes.shared(_QUESTION + form, rows)
            if answer is None:
                raise BranchesDiffer(torch.zeros(0))
            return answer.to(rows).view(dtype).view(shape)


def _stand_in(form: Samples) -> Samples:
    """Makes a sample of zeros for a process that has none. Its row is -1."""
    leaves = list(form.leaves)
    for position, leaf in enumerate(leaves):
        if form.by_sample[position]:
            leaves[position] = leaf.new_zeros(1, *leaf.shape[1:])
    return form._replace(leaves=leaves, size=1, rows=torch.tensor([-1]))


class _WithRows(Protocol):
    @property
    def rows(self) -> T | None:
        """The indices of samples in the batch; None for all."""


def is_stand_in(samples: _WithRows) -> bool:
    """Returns True for a sample of zeros that runs as other processes have more."""
    rows = samples.rows
    return rows is not None and bool((rows < 0).any())


class Shards:
    """
    The parameters of a model that ``fully_shard`` has sharded.

    Attributes:
        gathered: all parameters by name, as they are gathered; see :func:`gathered`
        shards: all parameters by name, as each process holds them
        own: the shards that are trained, by name
        processes: that hold the shards
    """

    def __init__(self, module: nn.Module):
        units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        refuse_shards(type(module).__name__, module, units)
        self.shards: dict[str, Any] = dict(module.named_parameters())
        self.own: dict[str, DTensor] = {}
        for name, shard in self.shards.items():
            if shard.requires_grad:
                self.own[name] = shard
        self.gathered = gathered(module, units)
        refuse_tensor_parallel(self.gathered)
        self._refuse_others()
        self.processes = Processes(units)

    def refuse_changes(self) -> None:
        """Refuses parameters that were frozen or unfrozen since the first gathering."""
        for name, shard in self.shards.items():
            if shard.requires_grad != self.gathered[name].requires_grad:
                raise Refused(
                    f"requires_grad of {name} was set to {shard.requires_grad} after "
                    "make_private: fully_shard keeps what it was before.",
                    parameter=name,
                    remedy="Freeze parameters before fully_shard.",
                )

    def _refuse_others(self) -> None:
        """Refuses shards of fewer processes than there are."""
        for name, shard in self.own.items():
            count = shard.device_mesh.size()
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
    for name, parameter in params.items():
        if isinstance(parameter, DTensor):
            raise Refused(
                f"{name}, of shape {tuple(parameter.shape)}, is a DTensor within the "
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
    for parameter, shard in module.named_parameters():
        if shard.is_meta:
            raise Refused(
                f"{parameter} is on the meta device: it has no values.",
                parameter=parameter,
                remedy="Between fully_shard and make_private call "
                'model.to_empty(device="cpu" or "cuda") and load or draw the weights.',
            )
        if not shard.requires_grad:
            continue
        kinds: tuple = ()
        if isinstance(shard, DTensor):
            kinds = shard.placements
        # Each process would have a sum of its own as the value of such a parameter.
        if not kinds or any(isinstance(kind, Partial) for kind in kinds):
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
    shards = dict(module.named_parameters())
    params = dict(shards)
    for unit in units:
        unit.unshard()
        for name, parameter in module.named_parameters():
            if parameter is not shards[name]:
                params[name] = parameter
        unit.reshard()
    return params


def sharded_sum(
    gathered: Mapping[str, T],
    params: Mapping[str, DTensor],
    size: int,
    clipping: Callable[[T], T],
    on_nonfinite: str = "drop",
    scale: float = 1.0,
) -> ClippedSum:
    """
    Makes the clipped sum over the samples of all processes, of which each has its
    shards.

    Args:
        gathered: the parameters as they are gathered, by name
        params: their shards, by name
        size, clipping, on_nonfinite, scale: see :class:`~core.clip.ClippedSum`
    """
    trained = {name: gathered[name] for name in params}
    reduce = partial(reduced_into, [*params.values()], [*trained.values()])
    return ClippedSum(trained, size, clipping, on_nonfinite, scale, reduce=reduce)


def reduced_into(
    shards: Sequence[DTensor], params: Sequence[T], sums: Iterable[T | None]
) -> Iterator[DTensor]:
    """Yields this process's shards of the sums over all processes, in buckets."""
    first = 0
    for bucket in in_buckets(map(_wide, params, sums)):
        last = first + len(bucket)
        yield from reduced(shards[first:last], bucket)
        first = last


def _wide(parameter: T, total: T | None) -> T:
    """Returns a sum in float32 or wider, as rounding it may exceed the noise."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if total is None:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return total.to(parameter.device, dtype)


def in_buckets(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Yields tensors of one kind in a row, about 25 MB of them together, as DDP."""
    bucket: list[T] = []
    size, kind = 0, None
    for tensor in tensors:
        if bucket and (size >= _BUCKET or kind != (tensor.dtype, tensor.device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.itemsize
        kind = tensor.dtype, tensor.device
    if bucket:
        yield bucket


def reduced(shards: Sequence[DTensor], totals: Sequence[T]) -> list[DTensor]:
    """
    Sums over all processes, each of which keeps its shards of the sums: by one
    collective where all are cut along dim 0, as by default.

    Args:
        shards: of the parameters
        totals: sums of this process
    """
    mesh = shards[0].device_mesh
    is_default = mesh.ndim == 1
    for shard in shards:
        if shard.placements != (Shard(0),) or shard.device_mesh != mesh:
            is_default = False
    if not is_default:
        return list(map(_reduced, shards, totals))
    count = mesh.size()
    rows = []
    for total in totals:
        # Shards must have one size everywhere, so the last ones are filled with zeros.
        missing = -len(total) % count
        if missing:
            zeros = total.new_zeros(missing, *total.shape[1:])
            total = torch.cat([total, zeros])
        rows.append(total.reshape(count, -1))
    joined = DTensor.from_local(torch.cat(rows, 1), mesh, [Partial()])
    row = joined.redistribute(placements=[Shard(0)]).to_local()
    parts = row.split([columns.shape[1] for columns in rows], dim=1)
    sums = []
    for shard, part in zip(shards, parts):
        shape = shard.to_local().shape
        part = part.reshape(-1)[: shape.numel()].view(shape)
        sums.append(_as_shard(shard, part))
    return sums


def _reduced(shard: DTensor, total: T) -> DTensor:
    """Sums over the processes of a mesh of any number of dimensions."""
    mesh = shard.device_mesh
    partial_sum = DTensor.from_local(total, mesh, [Partial()] * mesh.ndim)
    part = partial_sum.redistribute(placements=shard.placements).to_local()
    return _as_shard(shard, part)


def _as_shard(shard: DTensor, part: T) -> DTensor:
    """Returns this process's part of a sum as a shard, as its parameter is one."""
    # Where parts differ in size, the shape of all can't be told from one of them.
    size: Any = dict(shape=shard.shape, stride=shard.stride())
    return DTensor.from_local(part, shard.device_mesh, shard.placements, **size)
