"""What processes with shards of a model have in common: questions, and clipped sums.

Each process has samples of its own, and gathers whole parameters while a layer
computes. So norms are those of one process, and the clipped sums are reduced into the
shards, some parameters after the others.

Gathering is collective: all processes must run the same layers in the same order. They
run one program, so they stay in step until it asks something of the data. A question is
asked of the samples of all processes: if these have one answer, all go on alike. If
not, all raise at this point and take their samples one by one, in as many rounds as the
process with the most samples. An op that vmap can't run is one in all processes, which
therefore raise alike as well. What is no such program (random numbers of Python, code
that goes by the shape of a batch, samples alone that branch) is noticed at the next
layer that gathers, where processes meet.

An error in one process ends in the timeout of the others, as with plain FSDP2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

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

# Places of a program where processes meet. Layers that gather are numbered from zero.
BEGIN, ALONE, FAILED, END, BACKWARD, WITHOUT_MODEL, OUTPUTS = range(-7, 0)
_QUESTION = 2**32  # and the checksum of the form that answers have
_LOWEST = torch.iinfo(torch.int64).min
_BUCKET = 25 * 2**20  # bytes that are summed together


class Processes:
    """
    The processes that hold shards of one model, as one of them sees them.

    Args:
        units: the modules that gather their parameters, the root first
    """

    def __init__(self, units: Sequence[FSDPModule]):
        self.units = units
        self.stands_in = False  # True while zeros run, as this process has no samples
        self._at_once = False  # True while samples run together
        self._inside = False  # True within a forward pass
        self._gathers = False  # True once a unit has run
        self._apart = False  # True once processes met at different places
        self._group = None
        if "gloo" not in dist.get_backend():  # reading a number must wait for no GPU
            world: Any = dist.group.WORLD
            options = world._get_backend(next(units[0].parameters()).device).options
            self._group = dist.new_group(backend="gloo", timeout=options._timeout)
        self.handles = [
            unit.register_forward_pre_hook(partial(self._before_unit, i), prepend=True)
            for i, unit in enumerate(units)
        ]

    # -- meetings ----------------------------------------------------------------------

    def meet(self, place: int, number: int = 0, other: int = 0) -> tuple[int, int]:
        """
        Waits for all processes, and returns the largest of their numbers. If they are
        at different places, all raise: BranchesDiffer while samples run together, as
        samples one by one may still agree; otherwise an error.
        """
        numbers = torch.tensor([place, -place, number, other], device="cpu")
        most, least, number, other = self._largest(numbers).tolist()
        if most != -least:
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

    def shared(self, place: int, rows: T) -> T | None:
        """
        Returns the row that all processes share; None if rows differ. A process without
        rows, or with shorter ones, goes by the others.

        Args:
            place: see :meth:`meet`
            rows: integers ``[rows, n]``
        """
        width, _ = self.meet(place, rows.shape[1])
        # -x - 1 orders integers the other way round, and can't overflow as -x can.
        ends = torch.full((2, width), _LOWEST, device="cpu")
        if rows.numel():
            rows = rows.long()
            ends[:, : rows.shape[1]] = torch.stack([rows.amax(0), (-1 - rows).amax(0)])
        most, least = self._largest(ends) if width else ends
        return None if bool((most > -1 - least).any()) else most

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
        kinds = [some for some in samples if some.size]
        count, alone = self.meet(BEGIN, len(kinds), one_by_one)
        try:
            for some in kinds + [zeros] * (count - len(kinds)):
                reason = "" if alone else self._try(some, at_once)
                if reason is None:
                    continue
                size = 0 if some is zeros else some.size
                rounds, _ = self.meet(ALONE, size)
                for i in range(size):
                    one(some, i)
                for _ in range(size, rounds):
                    one(zeros, 0)
                if reason:
                    warn(reason)
        except BaseException:
            self.reset()
            raise
        return count

    def _try(self, some: Samples, at_once: Callable[[Samples], None]) -> str | None:
        """Runs samples together; returns why they can't, or None."""
        before, reason = written(some), ""
        self.stands_in, self._at_once = is_stand_in(some), True
        try:
            at_once(some)
            return None
        except BranchesDiffer:  # in all processes
            pass
        except Refused:
            raise
        except Exception as error:
            reason = why(error)
            with suppress(BranchesDiffer):  # if the others have not failed alike
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
        if self._apart:  # and the code has caught the error
            self._refuse_apart()
        self.meet(END)
        return result

    def _before_unit(self, number: int, *args: Any) -> None:
        if self._inside:
            self.meet(number)
        self._gathers = True

    def reset(self) -> None:
        """Frees what a pass that failed has gathered."""
        root = self.units[0]
        if self._gathers and hasattr(root, "reset_iter_state"):  # torch 2.13
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

    def __init__(self, processes: Processes, *given: Any):
        super().__init__(*given)
        self.processes = processes

    def agree(self, x: T) -> T:
        """Returns the value that the samples of all processes share."""
        if not is_batched(x):
            return x
        self.read_data = True
        with self.outside():
            values = self.level.unwrap(x).detach()
            bits = as_bits(values.reshape(self.size, -1)).flatten(1)
            form = zlib.crc32(repr((values.dtype, values.shape[1:])).encode())
            rows = bits[:0] if self.processes.stands_in else bits
            answer = self.processes.shared(_QUESTION + form, rows)
            if answer is None:
                raise BranchesDiffer(torch.zeros(0))
            answer = answer.to(bits).view(values.dtype)
            return answer.view(values.shape[1:])


def _stand_in(form: Samples) -> Samples:
    """Makes a sample of zeros for a process that has none. Its row is -1."""
    pairs = zip(form.leaves, form.by_sample)
    leaves = [x.new_zeros(1, *x.shape[1:]) if cut else x for x, cut in pairs]
    return form._replace(leaves=leaves, size=1, rows=torch.tensor([-1]))


def is_stand_in(some: Any) -> bool:
    """Returns True for a sample of zeros that runs as other processes have more."""
    return some.rows is not None and bool((some.rows < 0).any())


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
        units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        refuse_shards(type(module).__name__, module, units)
        self.shards: dict[str, Any] = dict(module.named_parameters())
        self.own = {n: p for n, p in self.shards.items() if p.requires_grad}
        self.gathered = gathered(module, units)
        refuse_tensor_parallel(self.gathered)
        self._refuse_others()
        self.processes = Processes(units)

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
