"""One forward pass of a private model, and the gradients that come back through it."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Callable, ContextManager, NamedTuple, Sequence

import torch
from torch.utils._pytree import tree_leaves

from opacus_ext.grad_sample.adapter.compiled import (
    CompiledGroup,
    CompiledModel,
    InsideLoss,
    NotCompiled,
)
from opacus_ext.grad_sample.adapter.inputs import Inputs
from opacus_ext.grad_sample.adapter.outputs import (
    BatchOutput,
    Boundary,
    Leaf,
    Returned,
    combine_outputs,
    read_output,
)
from opacus_ext.grad_sample.adapter.passes import Doubt
from opacus_ext.grad_sample.adapter.state import AloneSample, holds_data
from opacus_ext.grad_sample.core.clip import DenseGrads
from opacus_ext.grad_sample.core.generators import HeldGenerators
from opacus_ext.grad_sample.core.gradients import (
    gradients_alone,
    graph_of,
    no_autocast,
    unchanged,
)
from opacus_ext.grad_sample.core.groups import Samples, version, warn_one_by_one
from opacus_ext.grad_sample.core.vmap import cache_kept, is_batched
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.refused import Refused

T = torch.Tensor

_NO_DATA = (torch.dtype, torch.device)  # types whose values do not depend on data


class GroupOutputs(NamedTuple):
    """Outputs with a graph, of samples that ran together or of one that ran alone."""

    rows: T | None  # indices of the samples in the batch; None for all
    group: Any  # None for a sample alone
    outputs: dict[int, T]  # by leaf: ``[B, *shape]``, or ``[*shape]`` of one sample


class ForwardRecord:
    """
    One call of a private model, and its backward pass.

    Args:
        model: a PrivateModel (model.py)
        inputs: the samples
        call: function that is called with each sample
        total: receives the gradients of the losses that ``call`` returns; None if a
            ``backward()`` follows
    """

    def __init__(
        self,
        model: Any,
        inputs: Inputs,
        call: Callable[[Any], Any],
        total: Any = None,
    ):
        self.model, self.inputs, self.call, self.total = model, inputs, call, total
        self.size, self.params = inputs.size, model.params
        self.trained = [x for x, _ in inputs.trained]  # inputs with a graph
        self.leaves = [leaf for _, leaf in inputs.trained]  # their copies in samples
        self.groups: list[GroupOutputs] = []
        self.dims: dict[int, int | None] = {}  # see BatchOutput
        self.done = False  # True after the backward pass
        self.taken = model.passes.taken  # batches that the loop has taken so far
        self.compiled: CompiledModel | None = None  # runs the whole call
        self.inside: Any = None  # gives the CompiledModel that the loss calls
        self._returned: list[Returned] = []
        self._count = 0  # number of groups so far
        self._followed = True  # True if each op of the code is intercepted
        self._clean = False  # True if the last group has left the state unchanged
        self._shared = [
            (x, version(x))
            for some in inputs.samples
            for x, own in zip(some.leaves, some.by_sample)
            if isinstance(x, T) and not own
        ]

    # -- forward -----------------------------------------------------------------------

    def output(self) -> Any:
        """Runs the samples, and returns the output of the batch."""
        output = self._forward(losses=False)
        return output.with_tensors(self._with_graph(output), self.model.loss_type)

    def losses(self) -> T:
        """Runs the samples, and returns their losses ``[B]``."""
        output = self._forward(losses=True)
        return output.values[0] if output.tensors == {} else self._with_graph(output)[0]

    def _with_graph(self, output: BatchOutput) -> list[T]:
        tensors = list(output.tensors.values())
        if not tensors:
            return []
        anchor = torch.empty((), requires_grad=True)
        return list(Boundary.apply(self, anchor, len(tensors), *tensors, *self.trained))

    def _forward(self, losses: bool) -> BatchOutput:
        model = self.model
        model.size = self.size
        model.begin(self.size)
        grads = [p.grad for p in self.params.values()]
        if not model.initialized:
            self._initialize()
        if model.state.lost is not None:  # in a trial
            raise self._changes(model.state.lost, "in place, and ")
        model.running = True
        try:
            model.run(self)
        except BaseException:
            if self._count:
                model.state.restore()
            raise
        finally:
            model.running = False
        for (name, p), grad in zip(self.params.items(), grads):
            if p.grad is not grad:
                p.grad = grad
                raise model.refused(
                    "backward() within the forward pass adds to the gradient of "
                    f"{name}, without clipping.",
                    "Take torch.autograd.grad(..., create_graph=True) there, or call "
                    "backward() outside.",
                )
        output = combine_outputs(self, self._returned, losses)
        self._returned, self.dims = [], output.dims
        return output

    def _initialize(self) -> None:
        """
        Runs a sample of zeros before the first batch, so that attributes that a model
        sets once (a problem type in its config) are not made of data. Keeps nothing if
        a number is set: values that depend on the first batch are refused.
        """
        self.model.initialized, state = True, self.model.state
        if not state.has_objects:
            return
        mode, self.model.running = AloneSample(state, sees_ops=True), True
        state.remember()
        try:
            with suppress(Exception), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with mode, cache_kept():
                    self._of_zeros()
        finally:
            self.model.running = False
        for name, value, hidden in state.changes(mode.written | mode.notes.written):
            told = mode.read_data and float in map(type, tree_leaves(value))
            in_place = hidden or isinstance(value, T) and state.holds(value)
            if told or in_place or holds_data(value, mode.is_data):
                if state.restore() is not None:
                    raise self._changes(name, "by what samples hold, and ")
                break

    def _of_zeros(self) -> Any:
        """Runs a sample of zeros, or of ones as zeros may be padding."""
        with torch.random.fork_rng(devices=[]), self._eagerly():
            try:
                return self.call(self.inputs.zeros())
            except Refused:
                raise
            except Exception:
                return self.call(self.inputs.zeros(1))

    def find_output_dim(self, name: str, shape: torch.Size) -> int | None:
        """
        Finds the batch dim of an output ``[1, 1, ...]`` by calling the model with the
        whole batch; returns None if that fails.
        """
        dims, given = self.model.output_dims, self.inputs.given
        if (name, shape) not in dims and self.size > 1 and given is not None:
            with suppress(Exception), torch.no_grad(), self._eagerly():
                whole = self.model.tried(self.call, given)
                paths = read_output(whole, lambda x: Leaf(x, False), None, self.size)
                found = dict(zip(paths.names, paths.leaves))[name].value.shape[:2]
                if sorted(found) == [1, self.size]:
                    dims[name, shape] = found.index(self.size)
        return dims.get((name, shape))

    def warn(self, reason: str) -> None:
        """Warns that vmap fails; later samples run one by one."""
        self.model.vmap_fails = True
        if not self.model.one_by_one:
            warn_one_by_one(self.model.describe(), reason)

    # -- groups ------------------------------------------------------------------------

    def _eagerly(self) -> ContextManager:
        """Disables ``torch.compile`` for a block."""
        stance = torch.compiler.set_stance
        return stance("force_eager") if self.model.has_compiled else nullcontext()

    def _begin(self) -> None:
        """Restores the state that the first group of samples has seen."""
        if not self._count:
            alone = self.model.one_by_one or self.model.vmap_fails
            self._followed = self.total is None or not alone
            self._generators = HeldGenerators(self.model.state.modules)
            self.model.state.remember(parameters=not self._followed)
        elif not self._clean:
            self._restore()
        self._generators.restore()
        self._count += 1
        self._clean = False

    def _restore(self) -> None:
        name = self.model.state.restore()
        if name is not None:
            raise self._changes(name, "and each sample of a batch ")

    def _by_program(self, samples: Samples) -> bool:
        """Runs samples in a compiled program; returns False if there is none."""
        if self.compiled is None:
            return False
        try:
            output, program = self.compiled.run(samples)
        except NotCompiled as error:
            self.model.not_compiled(self.compiled.settings, str(error))
            self.compiled = None
            return False
        given = samples.rows, samples.size
        returned = read_output(output, lambda x: Leaf(x, isinstance(x, T)), *given)
        self._keep(returned, GroupOutputs(samples.rows, program, returned.with_graph()))
        return True

    def at_once(self, samples: Samples) -> None:
        """Runs samples together."""
        if self._by_program(samples):
            return
        try:
            self._at_once(samples)
        except NotCompiled as error:
            self.model.not_compiled(self.model.settings, str(error))
            self.inside = None
            self._at_once(samples)

    def _at_once(self, samples: Samples) -> None:
        self._begin()
        group = self.model.group(samples.size)
        inside = InsideLoss(self.inside, group) if self.inside is not None else None
        with group.level:
            sample = samples.tree(group.wrap)
            with self._eagerly(), self.model.called_by(inside):
                output = group.watch(partial(self.call, sample))
            returned = read_output(output, group.read, samples.rows, samples.size)
            del sample, output
            self._check_state(
                group.read_data, is_batched, group.notes.written, group.runs_others
            )
        group.free_copies()
        program, outputs = None, returned.with_graph()
        if inside is not None and inside.program is not None:
            program = inside.program
            inside.check(list(outputs.values()))
        self._keep(returned, GroupOutputs(samples.rows, program or group, outputs))

    def alone(self, samples: Samples, i: int) -> None:
        """Runs one sample by plain autograd."""
        if samples.size == 1 and self._by_program(samples):
            return
        self._begin()
        own: list[T] = []

        def call() -> Any:  # with copies: code may write to its inputs
            pairs = zip(samples.leaves, samples.by_sample)
            own[:] = [x[i].clone() for x, by in pairs if by]
            given = iter(own)
            with self._eagerly():
                return self.call(samples.tree(lambda x: next(given)))

        # Ops are followed if outputs may be made of data, and all that they run if a
        # changed state may be.
        mode, state = AloneSample(self.model.state), self.model.state
        with mode if self._followed else nullcontext():
            output = call()
        changed = bool(state.changes(mode.written | mode.notes.written))
        changed = self._generators.changed() or changed
        if changed:
            self._restore()
            self._generators.restore()
            mode = AloneSample(state, sees_ops=True)
            with mode:
                output = call()
            written = mode.written | mode.notes.written
            self._check_state(mode.read_data, mode.is_data, written, True)
        name = self._generators.differs(mode.read_data)
        if name is not None:
            raise self._changes(name, "by what samples hold, and ")
        self._clean, follow = not changed, self._followed or changed

        def read(x: Any) -> Leaf:
            made = isinstance(x, T) and x.requires_grad and not x.is_leaf
            if made or isinstance(x, T) and mode.is_data(x):
                return Leaf(x[None], True)
            return Leaf(x, False)

        leaves = (x for x, by in zip(samples.leaves, samples.by_sample) if by)
        for x, copy in zip(leaves, own):
            if version(copy):
                x.detach()[i].copy_(copy.detach())
        rows = torch.arange(samples.size) if samples.rows is None else samples.rows
        row = rows[i : i + 1]
        returned = read_output(output, read, row, 1)
        outputs = {k: y[0] for k, y in returned.with_graph().items()}
        inputs = {id(x) for x in self.leaves}
        for leaf in graph_of(list(outputs.values()))[0]:
            if id(leaf) not in inputs:
                self.model.check_leaf(leaf, mode.notes.leaves if follow else None)
        self._keep(returned, GroupOutputs(row.squeeze(0), None, outputs))

    def without_samples(self) -> None:
        """Runs an empty batch: a sample of zeros, whose rows are dropped."""
        self._begin()
        output = self._of_zeros()
        self.model.state.restore()

        def read(x: Any) -> Leaf:
            return Leaf(x[None][:0], True) if isinstance(x, T) else Leaf(x, False)

        self._returned.append(read_output(output, read, None, 0))

    def _keep(self, returned: Returned, some: GroupOutputs) -> None:
        """Keeps a group for ``backward()``, or adds its gradients to the total now."""
        if any(version(x) != before for x, before in self._shared):
            raise self._changes("an input that all samples share", "in place, and ")
        if self.total is None:
            self.groups.append(some)
        else:
            outputs = list(some.outputs.values())
            with no_autocast():
                self._add(self.total, some, outputs, [*map(torch.ones_like, outputs)])
            leaves = [x._replace(value=x.value.detach()) for x in returned.leaves]
            returned = returned._replace(leaves=leaves)
        self._returned.append(returned)

    def _check_state(
        self,
        read_data: bool,
        is_data: Callable[[T], bool],
        written: set[int],
        hides: bool,
    ) -> None:
        """
        Refuses changed state that is made of data. If the code ``hides`` nothing and
        has read no data, it can't put data where no op is seen to write.
        """
        for name, value, hidden in self.model.state.changes(
            written, read_data or hides
        ):
            told = read_data and not isinstance(value, _NO_DATA)
            if told or hidden or holds_data(value, is_data):
                raise self._changes(name, "by what samples hold, and ")

    def _changes(self, name: str, how: str) -> Refused:
        return self.model.refused(
            f"its forward changes {name}, {how}would carry data from sample to sample "
            "or from batch to batch without noise.",
            "Return the value, or pass it as an argument, instead of storing it; "
            "replace layers with running statistics.",
            name,
        )

    # -- backward ----------------------------------------------------------------------

    def mark_done(self) -> None:
        """Marks it as done; refuses a second backward pass."""
        most = self.model.inputs.most
        if most is not None and self.size > most:
            error = self.model.refused(
                f"was called on {self.size} samples, and the loader drew at most "
                f"{most} records: some would count several times.",
                "Call it on the records that were drawn: views of a record belong into "
                "one sample, of which the loss is the mean. If it was called on what "
                "is no record, call zero_grad() before the private loss.",
            )
            doubt = Doubt(error, drawn=math.inf, counts=False)
            self.inputs = self.inputs._replace(doubt=doubt)
        if self.done:
            raise self.model.refused(
                "a second backward pass of one batch. Each would be clipped by itself, "
                "so that a sample counts twice.",
                "Add the losses and call backward() once.",
            )
        self.model.check_hooks()
        self.done = True

    def add_gradients(self, total: Any, grads: Sequence[T | None]) -> list[T | None]:
        """
        Adds the per-sample gradients to a ClippedSum, TwoPassSum or DenseGrads (core/),
        given the gradients of outputs with a graph; returns those of the leaves.
        """
        of_leaves: list[T | None] = [None] * len(self.leaves)
        for some in self.groups:
            outputs, own = self._own(some, grads)
            try:
                with no_autocast():
                    found = self._add(total, some, outputs, own)
            except NotAtOnce as error:
                raise self.model.refused(
                    f"{error} uses a parameter, so that its per-sample gradients are "
                    "not known.",
                    'Train one sample after the other: grad_sample_mode="scan".',
                ) from error
            of_leaves = [
                g if old is None else old if g is None else old + g
                for old, g in zip(of_leaves, found)
            ]
        return of_leaves

    def of_inputs(self, grads: Sequence[T | None]) -> list[T | None]:
        """Returns the gradients of the inputs only."""
        return self.add_gradients(DenseGrads({}, self.size), grads)

    def _add(
        self, total: Any, some: GroupOutputs, outputs: list[T], grads: list[T]
    ) -> list[T | None]:
        """Adds the gradients of a group; returns those of the leaves."""
        with unchanged(self.params.values()):
            return self._add_to(total, some, outputs, grads)

    def _add_to(
        self, total: Any, some: GroupOutputs, outputs: list[T], grads: list[T]
    ) -> list[T | None]:
        params = list(self.params.values())
        if some.group is None:
            leaves, names = [*params, *self.leaves], list(self.params)
            by_id = gradients_alone(outputs, grads, leaves, names)
            total.add_one(int(some.rows), by_id)
            return [by_id.get(id(x)) for x in self.leaves]
        if isinstance(some.group, CompiledGroup):
            some.group.add_to(total, some.rows, outputs, grads)
            return [None] * len(self.leaves)
        given = some.rows, some.group, outputs, grads, params, self.leaves
        return total.add_group(*given)

    def _own(
        self, some: GroupOutputs, grads: Sequence[T | None]
    ) -> tuple[list[T], list[T]]:
        """Returns the outputs of a group and their gradients, in the group's layout."""
        outputs, own = [], []
        for (i, dim), g in zip(self.dims.items(), grads):
            y = some.outputs.get(i)
            if g is None or y is None:
                continue
            if dim is not None:  # [.., B, ..] as [B, .., 1, ..]
                g = g.unflatten(dim, (self.size, 1)).movedim(dim, 0)
            if some.rows is not None:
                g = g[some.rows.to(g.device)]
            outputs.append(y)
            own.append(g.to(y.dtype))
        return outputs, own
