"""Models that are sharded by ``fully_shard`` (FSDP2).

Each process has samples of its own, and gathers whole parameters while a layer
computes. So norms are those of one process, and the clipped sums are reduced into the
shards, one parameter after the other.

Gathering is collective: all processes must run as many forward and backward passes, and
in each the same layers. Where samples branch on data, or run one by one, processes
differ, so passes are taken in *rounds*. A process without samples for a round runs a
sample of zeros, which adds nothing. A pass that fails in one process ends in the others
at the next layer that gathers.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from opacus_ext.grad_sample.adapter.forward import ForwardRecord, GroupOutputs
from opacus_ext.grad_sample.adapter.inputs import Call, InputReader, Inputs
from opacus_ext.grad_sample.adapter.model import PrivateModel
from opacus_ext.grad_sample.adapter.outputs import Returned
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.gradients import gradients_alone, gradients_of_group
from opacus_ext.grad_sample.core.group import BranchesDiffer
from opacus_ext.grad_sample.core.groups import Samples, why
from opacus_ext.grad_sample.parallel.group import ProcessFailure
from opacus_ext.refused import Refused

T = torch.Tensor

# What a process says when all meet: bits of a number, of which each is told the union.
MORE, ALONE, TRIAL, GRADIENTS, READS, FAILED = 1, 2, 4, 8, 16, 32


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
        self._begun = False  # True once a unit has run
        self._group = None
        if "gloo" not in dist.get_backend():  # as no device should wait for a number
            self._group = dist.new_group(backend="gloo")
        self.handles = [
            unit.register_forward_pre_hook(self._before_unit, prepend=True)
            for unit in units
        ]

    def meet(self, flags: int) -> int:
        """Returns the union of what all processes say."""
        bits = torch.tensor([flags >> i & 1 for i in range(6)])
        try:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            self._tell = False
            raise ProcessFailure(
                f"Process {dist.get_rank()} waited in vain for the others ({error}). "
                "One of them has died, failed or come too late (see the timeout of "
                "init_process_group). This step was not taken here:",
                remedy="start all processes again from the last checkpoint.",
            ) from error
        said = sum(int(x) << i for i, x in enumerate(bits))
        if said & FAILED and not self._inside:
            self._tell = False
            raise ProcessFailure(
                "Another process refuses this step; its error says why. No weight was "
                "changed."
            )
        return said

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the others of an error, where they wait for this process."""
        self._tell = True
        try:
            yield
        except Exception:
            if self._tell:
                with suppress(ProcessFailure):
                    self.meet(FAILED)
            raise
        finally:
            self._tell = False

    def _before_unit(self, *args: Any) -> None:
        self._begun = True
        if self._inside and self.watching and self.meet(0) & FAILED:
            raise FailedElsewhere

    def run(self, function: Callable[[], Any], reads: Callable[[], bool]) -> Any:
        """
        Runs one pass. ``reads`` tells whether it has read values of the data, after
        which processes may differ; where none does, later passes need not be watched.
        """
        tell, self._tell, self._inside = self._tell, False, self.watching
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
                self.reset()
                self._tell = tell
            raise
        finally:
            self._inside = False
        self._tell = tell
        return found

    def finish(self, reads: bool) -> None:
        """Ends the forward pass, unless it has failed in another process."""
        if self._inside:
            said = self.meet(READS if reads else 0)
            self._inside = False
            if said & FAILED:
                raise FailedElsewhere
            self.watching = bool(said & READS)

    def try_out(self, trial: Callable[[int], Any], flags: int) -> Any:
        """Runs a trial that this process needs; others :meth:`follow`."""
        while True:
            said = self.meet(flags)
            with suppress(FailedElsewhere):
                return self.run(partial(trial, said), lambda: True)

    def follow(self, zeros: Callable[[int], Any]) -> None:
        """Takes part in trials of others by a pass of its own, until none needs one."""
        while (said := self.meet(0)) & TRIAL:
            with suppress(FailedElsewhere):
                self.run(partial(zeros, said), lambda: True)

    def reset(self) -> None:
        """Frees what a pass that failed has gathered, in all processes alike."""
        self.watching, root = True, self.units[0]
        if self._begun and hasattr(root, "reset_iter_state"):  # torch 2.13
            root.reset_iter_state()
        for unit in self.units:
            unit.reshard()


class ShardedForward(ForwardRecord):
    """A forward pass whose groups may be of nobody: of a sample of zeros."""

    model: ShardedModel
    nobody = False  # True while a sample of zeros runs
    read_data = False  # True if a group has read values of the data

    def _initialize(self) -> None:
        super()._initialize()
        self.model.rounds.reset()

    def find_output_dim(self, name: str, shape: torch.Size) -> int | None:
        """See :class:`~adapter.forward.ForwardRecord`; other processes do not run."""
        return None

    def _keep(self, returned: Returned, some: GroupOutputs) -> None:
        self.model.rounds.finish(self.read_data)
        if not self.nobody:
            super()._keep(returned, some)
            return
        if self.total is not None:
            self._add(self.total, some, *self._no_gradients(some))
        else:
            self.groups.append(some)
        if not self.size and not self._returned:  # the form of an empty output
            rows = torch.arange(0)
            leaves = [
                x._replace(value=x.value[:0]) if x.by_sample else x
                for x in returned.leaves
            ]
            self._returned.append(returned._replace(rows=rows, size=0, leaves=leaves))

    def _check_state(self, read_data: bool, *given: Any) -> None:
        self.read_data |= read_data
        super()._check_state(read_data, *given)

    def _is_of_nobody(self, some: GroupOutputs) -> bool:
        return some.rows is not None and not some.rows.numel()

    def _no_gradients(self, some: GroupOutputs) -> tuple[list[T], list[T]]:
        outputs = list(some.outputs.values())
        return outputs, [torch.zeros_like(y) for y in outputs]

    def _own(
        self, some: GroupOutputs, grads: Sequence[T | None]
    ) -> tuple[list[T], list[T]]:
        if self._is_of_nobody(some):
            return self._no_gradients(some)
        return super()._own(some, grads)

    def _add(
        self, total: Any, some: GroupOutputs, outputs: list[T], grads: list[T]
    ) -> list[T | None]:
        if not self._is_of_nobody(some):
            return super()._add(total, some, outputs, grads)
        params = list(self.params.values())
        if some.group is None:
            gradients_alone(outputs, grads, params)
        else:
            gradients_of_group(some.group, outputs, grads, params)
        total.add_nothing()
        return [None] * len(self.leaves)


class ShardedReader(InputReader):
    """Finds the samples; a process that needs no trial takes part in those of others."""

    rounds: Rounds
    follows = False  # True while this process takes part in a trial of another
    with_gradients = False  # True while a trial needs gradients

    def read(self, call: Call, args: tuple, kwargs: dict) -> Inputs:
        """See :class:`~adapter.inputs.InputReader`."""
        inputs = super().read(call, args, kwargs)

        def zeros(said: int) -> None:
            with torch.set_grad_enabled(bool(said & GRADIENTS)):
                output = self.run(call, inputs.zeros())
                if said & GRADIENTS:
                    self.gradients(output)

        self.follows = True
        try:
            self.rounds.follow(zeros)
        finally:
            self.follows = False
        return inputs

    def _try_alone(self, *args: Any) -> Any:
        self.with_gradients = True
        try:
            return super()._try_alone(*args)
        finally:
            self.with_gradients = False


class ShardedModel(PrivateModel):
    """A private model that ``fully_shard`` has sharded."""

    record_type, reader_type = ShardedForward, ShardedReader
    is_shared_out = frees_parameters = True
    inputs: ShardedReader

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self.rounds = self.inputs.rounds = Rounds(units)
        self.handles = self.rounds.handles
        self.gathered = gathered(module, units)
        self.inputs.parameters = self.gathered.values
        self.state.also_holds(self.gathered.values())
        self.names.update({p: n for n, p in self.gathered.items()})

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, as they are gathered."""
        return {n: p for n, p in self.gathered.items() if p.requires_grad}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`~adapter.model.PrivateModel`."""
        if not self.enabled or self.running or not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with self.rounds.telling():
            return super().__call__(*args, **kwargs)

    def losses(self, *args: Any) -> T:
        """See :class:`~adapter.model.PrivateModel`."""
        with self.rounds.telling():
            return super().losses(*args)

    def tried(self, call: Call, inputs: Any) -> Any:
        """Tries a call, or follows the trial of another process."""
        tried, reader = super().tried, self.inputs
        if reader.follows:
            return tried(call, inputs)

        def with_gradients(inputs: Any) -> Any:
            with torch.enable_grad():
                output = call(inputs)
            reader.gradients(output)
            return output

        def trial(said: int) -> Any:
            more = said & GRADIENTS and not reader.with_gradients  # for another process
            return tried(with_gradients if more else call, inputs)

        said = TRIAL | GRADIENTS * reader.with_gradients
        return self.rounds.try_out(trial, said)

    def run(self, forward: ShardedForward) -> None:
        """Runs all samples in rounds, as many as the process with the most needs."""
        samples, ran = forward.inputs.samples, 0
        todo = deque(some for some in samples if some.size)
        while True:
            alone = self.one_by_one or self.vmap_fails
            said = self.rounds.meet(MORE * bool(todo) | ALONE * alone)
            if not said & MORE:
                break
            ran, some = ran + 1, todo.popleft() if todo else None
            if some is not None and said & ALONE and some.size > 1:
                every = torch.arange(some.size)
                todo.extendleft(some.select(i) for i in every.flip(0).split(1))
                some = todo.popleft()
            left = [] if some is None else [some]
            try:
                self._round(forward, some, samples[0], bool(said & ALONE))
                left = []
            except FailedElsewhere:
                pass
            except BranchesDiffer as differ:
                answers = differ.answers.cpu()
                parts = (answers == k for k in answers.unique())
                left = [some.select(part.nonzero()[:, 0]) for part in parts]
            except Refused:
                raise
            except Exception as error:
                if said & ALONE or not self.rounds.watching:
                    raise
                forward.warn(why(error))
            todo.extendleft(left)
        if (
            not ran
        ):  # nor will there be a backward pass, which would free what is gathered
            forward.without_samples()
            self.rounds.reset()

    def _round(
        self, forward: ShardedForward, some: Samples | None, form: Samples, alone: bool
    ) -> None:
        """Runs samples, or one of zeros if this process has none left."""
        forward.nobody = some is None
        if some is None:
            pairs = zip(form.leaves, form.by_sample)
            leaves = [x.new_zeros(1, *x.shape[1:]) if own else x for x, own in pairs]
            some = form._replace(leaves=leaves, size=1, rows=torch.arange(0))
        run = (
            partial(forward.alone, some, 0) if alone else partial(forward.at_once, some)
        )
        try:
            self.rounds.run(run, lambda: forward.read_data)
        finally:
            forward.nobody = False

    def sum_of(self, kind: type) -> Callable[..., ClippedSum]:
        """Returns the clipped sum of this model; all modes have the same."""
        return partial(ShardedSum, self.gathered)


def refuse_shards(name: str, module: nn.Module, units: Sequence[FSDPModule]) -> None:
    """Refuses parameters that are not sharded, or split within a sample's computation."""
    if not units or units[0] is not module:
        raise Refused(
            f"{name} has parts that are sharded by fully_shard, and is not itself.",
            module=name,
            remedy="Call fully_shard on the whole model, last.",
        )
    for parameter, p in module.named_parameters():
        if not p.requires_grad:
            continue
        kinds = p.placements if isinstance(p, DTensor) else ()
        if not kinds or any(not isinstance(k, (Shard, Replicate)) for k in kinds):
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
    found: dict[str, nn.Parameter] = {}
    for unit in units:
        unit.unshard()
        for name, p in module.named_parameters():
            if not isinstance(p, DTensor):
                found.setdefault(name, p)
        unit.reshard()
    return {name: found[name] for name, _ in module.named_parameters()}


class ShardedSum(ClippedSum):
    """
    The clipped sum over the samples of all processes, of which each has its shards.

    Args:
        gathered: the parameters as they are gathered, by name
        params: their shards, by name
        given: of :class:`~core.clip.ClippedSum`
    """

    def __init__(self, gathered: dict[str, T], params: dict[str, Any], *given: Any):
        super().__init__({name: gathered[name] for name in params}, *given)
        self.shards: list[DTensor] = list(params.values())
        self._sums: list[T | None] = [None] * len(self.shards)

    def add_nothing(self) -> None:
        """Takes part in the sum of a round without samples."""
        self._add([None] * len(self.params))

    def _add_dense(self, places: list[int], dense: list[T], factor: float) -> None:
        at = dict(zip(places, dense))
        every = range(len(self.params))
        self._add(at.pop(i) * factor if i in at else None for i in every)

    def _add(self, sums: Iterable[T | None]) -> None:
        places = iter(range(len(self.shards)))
        totals = (_whole(p, total) for p, total in zip(self.shards, sums))
        for bucket in in_buckets(totals):
            own = [next(places) for _ in bucket]
            for i, new in zip(own, reduced([self.shards[i] for i in own], bucket)):
                old = self._sums[i]
                self._sums[i] = new if old is None else old.add_(new)

    def sums(self) -> dict[str, T]:
        """Returns this process's shards of the clipped sums, by name."""
        if self._sums[0] is None:  # no process had samples
            self.add_nothing()
        return dict(zip(self.names, self._sums))


def _whole(p: DTensor, total: T | None) -> T:
    """Returns a sum in float32 or wider, as rounding it may exceed the noise."""
    dtype, device = torch.promote_types(p.dtype, torch.float32), p.to_local().device
    if total is None:
        return torch.zeros(p.shape, dtype=dtype, device=device)
    return total.to(device, dtype)


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


def reduced(shards: Sequence[DTensor], totals: Sequence[T]) -> list[DTensor]:
    """
    Sums over all processes, each of which keeps its shards of the sums: by one
    collective where all are cut along dim 0, as by default.
    """
    mesh = shards[0].device_mesh
    plain = mesh.ndim == 1 and all(
        p.placements == (Shard(0),) and p.device_mesh == mesh for p in shards
    )
    if not plain:
        return [
            DTensor.from_local(
                x, p.device_mesh, [Partial()] * p.device_mesh.ndim
            ).redistribute(placements=p.placements)
            for p, x in zip(shards, totals)
        ]
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
        size = dict(shape=p.shape, stride=p.stride())
        found.append(DTensor.from_local(part, mesh, p.placements, **size))
    return found
