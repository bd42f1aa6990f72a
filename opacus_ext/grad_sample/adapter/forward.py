"""One forward pass of a private model, and the gradients that come back through it."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Mapping, NamedTuple, Sequence, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from opacus_ext.grad_sample.adapter.advice import sample_of
from opacus_ext.grad_sample.adapter.compiled import (
    ClippedStep,
    CompiledGroup,
    CompiledModel,
    Total,
)
from opacus_ext.grad_sample.adapter.functions import NotCompiled
from opacus_ext.grad_sample.adapter.inputs import Inputs
from opacus_ext.grad_sample.adapter.objects import (
    Outcome,
    holds_data,
    line_that_sets,
)
from opacus_ext.grad_sample.adapter.outputs import (
    BatchOutput,
    Boundary,
    Leaf,
    Returned,
    combine_outputs,
    read_output,
)
from opacus_ext.grad_sample.adapter.passes import Doubt, Passes, draw_of
from opacus_ext.grad_sample.adapter.state import Change
from opacus_ext.grad_sample.core.clip import DenseGrads
from opacus_ext.grad_sample.core.gradients import (
    Root,
    gradients_alone,
    graph_of,
    no_autocast,
    unchanged,
)
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import Samples, version, warn_one_by_one
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.private_torch import _BatchNorm, is_batched, tree_leaves
from opacus_ext.refused import Refused, add_note

T = torch.Tensor
ALONE = "one by one"  # a way to run, see Ways


class Ways:
    """
    How the samples of a step have run, each time with the reason why not faster. The
    step is the latest one in which a sample has run.
    """

    def __init__(self, passes: Passes):
        self._passes = passes
        self._ended = 0  # number of steps before this one
        self._reasons: dict[str, str] = {}

    def note(self, way: str, reason: str = "") -> None:
        """Notes that samples have run like this."""
        if self._ended != self._passes.ended:
            self._ended = self._passes.ended
            self._reasons = {}
        self._reasons[way] = reason

    def __str__(self) -> str:
        texts = []
        for way, reason in self._reasons.items():
            texts.append(f"{way} ({reason})" if reason else way)
        return f"Last step: {', '.join(texts) or 'none'}"


class GroupOutputs(NamedTuple):
    """Outputs with a graph, of samples that ran together or of one that ran alone."""

    rows: T | None  # indices of the samples in the batch; None for all
    group: Any  # None for a sample alone
    # By leaf: ``[B, *shape]``, or ``[*shape]`` of one sample, or the edges of these.
    outputs: Mapping[int, Root]

    def without_values(self) -> GroupOutputs:
        """Returns the same with the graph alone: nobody but the user keeps a value."""
        outputs = cast(Mapping[int, T], self.outputs)
        edges = {number: get_gradient_edge(x) for number, x in outputs.items()}
        return self._replace(outputs=edges)


class ForwardRecord:
    """
    One call of a private model, and its backward pass.

    Args:
        model: a PrivateModel (model.py)
        inputs: the samples
        call: function that is called with each sample
        total: receives the gradients of the losses that ``call`` returns; None if a
            ``backward()`` follows

    Attributes:
        groups: the outputs that a ``backward()`` may begin at
        dims: see BatchOutput
        done: True after the backward pass
        retain_graph: True if gradients of its inputs are not all
        taken: number of batches that the loop has taken so far
        compiled: runs the samples, if it can
        read_data: True if a group has read values of the data
    """

    def __init__(
        self,
        model: Any,
        inputs: Inputs,
        call: Callable[[Any], Any],
        total: Total | None = None,
    ):
        self.model, self.inputs, self.call, self.total = model, inputs, call, total
        self.size, self.params = inputs.size, model.params
        # Inputs with a graph, and their copies in samples.
        self.trained = [tensor for tensor, _ in inputs.trained]
        self.leaves = [leaf for _, leaf in inputs.trained]
        self.groups: list[GroupOutputs] = []
        self.dims: dict[int, int | None] = {}
        self.done = self.retain_graph = self.read_data = False
        self.taken = model.passes.taken
        self.compiled: CompiledModel | None = None
        self._returned: list[Returned] = []
        self._count = 0  # number of groups so far
        self._alone = False  # True if the last sample has run alone
        self._outcome = Outcome()  # of samples that run alone, or read data
        self._ran_zeros = False  # True if they are compared with a sample of zeros
        # What all samples share, and its version, as none of them may write to it.
        self._shared: list[tuple[T, int]] = []
        for samples in inputs.samples:
            for leaf, is_own in zip(samples.leaves, samples.by_sample):
                if isinstance(leaf, T) and not is_own:
                    self._shared.append((leaf, version(leaf)))

    # -- forward -----------------------------------------------------------------------

    def output(self) -> Any:
        """Runs the samples, and returns the output of the batch."""
        output = self._forward(losses=False)
        mean_of = partial(self.model.mode.mean_of, self)
        return output.with_tensors(self._with_graph(output), mean_of)

    def losses(self) -> T:
        """Runs the samples, and returns their losses ``[B]``."""
        output = self._forward(losses=True)
        return [*self._with_graph(output), *output.values][0]

    def _with_graph(self, output: BatchOutput) -> list[T]:
        """Returns the tensors of an output as the first ones of the user's graph."""
        tensors = list(output.tensors.values())
        if not tensors:
            return []
        # Outputs need a gradient also where no input has one.
        anchor = torch.empty((), requires_grad=True)
        return list(Boundary.apply(self, anchor, len(tensors), *tensors, *self.trained))

    def _forward(self, losses: bool) -> BatchOutput:
        model = self.model
        model.begin_forward(self.size)
        before = [parameter.grad for parameter in self.params.values()]
        model.running = True
        try:
            model.run(self)
        except BaseException as error:
            # A loop that goes on after the error finds the state of before.
            if self._count:
                model.state.restore()
            self._explain(error)
            raise
        finally:
            model.running = False
        for (name, parameter), grad in zip(self.params.items(), before):
            if parameter.grad is not grad:
                parameter.grad = grad
                raise model.refused(
                    "backward() within the forward pass adds to the gradient of "
                    f"{name}, without clipping.",
                    "Take torch.autograd.grad(..., create_graph=True) there, or call "
                    "backward() outside.",
                )
        output = combine_outputs(self, self._returned, losses)
        self._returned, self.dims = [], output.dims
        return output

    def _explain(self, error: BaseException) -> None:
        """Adds to an error of the model's code how that was called."""
        is_ours = isinstance(error, (Refused, torch.OutOfMemoryError))
        if is_ours or not isinstance(error, Exception):
            return
        sample = sample_of(self.inputs.samples[0], self.inputs.names)
        add_note(
            error,
            f"{self.model.describe()} runs each sample alone, as a batch of one: "
            f"{sample}. What needs others (an index into the batch, "
            "its statistics, its size) is to be computed of the sample alone, or "
            "before the call; where samples are no rows, give make_private(take="
            "function); for losses of any form there is opacus_ext.clipped_grads.",
        )

    def _of_zeros(self) -> Any:
        """Runs a sample of zeros, or of ones as zeros may be padding."""
        zeros = self.inputs.samples[0].zeros
        with torch.random.fork_rng(devices=[]), self.model.eagerly():
            try:
                return self.call(zeros())
            except Refused:
                raise
            except Exception:
                return self.call(zeros(1))

    def find_output_dim(self, name: str, shape: torch.Size) -> int | None:
        """
        Finds the batch dim of an output ``[1, 1, ...]`` by calling the model with the
        whole batch; returns None if that fails.
        """
        dims = self.model.output_dims
        batch = self.inputs.given
        # The dim that is as long as the batch is the one; of one sample both are 1.
        if (name, shape) not in dims and self.size > 1 and batch is not None:
            with suppress(Exception), torch.no_grad(), self.model.eagerly():
                output = self.model.tried(self.call, batch)
                paths = read_output(output, lambda x: Leaf(x, False), None, self.size)
                leaf = dict(zip(paths.names, paths.leaves))[name]
                lengths = leaf.value.shape[:2]
                if sorted(lengths) == [1, self.size]:
                    dims[name, shape] = lengths.index(self.size)
        return dims.get((name, shape))

    def warn(self, reason: str) -> None:
        """Warns that vmap fails; later samples run one by one."""
        self.model.vmap_fails = reason
        self.model.ways.note(ALONE, reason)
        if not self.model.one_by_one:
            warn_one_by_one(self.model.describe(), reason)

    # -- groups ------------------------------------------------------------------------

    def _begin(self, alone: bool = False) -> None:
        """Restores the state that the first group of samples has seen."""
        if self._count:
            self._restore()
        # No group sees what a sample alone may write to: parameters are copied, too.
        if not self._count or alone and not self._alone:
            self.model.state.remember(parameters=alone)
        self._alone = alone
        self._count += 1

    def _restore(self) -> None:
        name = self.model.state.restore()
        if name is not None:
            raise self._changes(name, "and each sample of a batch ")

    def _by_program(self, samples: Samples) -> bool:
        """Runs samples in a compiled program; returns False if there is none."""
        if self.compiled is None:
            return False
        # A program that fails has changed nothing: the samples run eagerly.
        try:
            result = self.compiled.run(samples, self.total)
        except NotCompiled as error:
            self.model.not_compiled(self.compiled.settings, str(error))
            self.compiled = None
            return False
        if result is None:
            self.model.ways.note("not compiled", "a norm is not finite")
            return False
        output, program = result
        rows, size = samples.rows, samples.size
        returned = read_output(output, lambda x: Leaf(x, isinstance(x, T)), rows, size)
        self._keep(returned, GroupOutputs(rows, program, returned.with_graph()))
        return True

    def at_once(self, samples: Samples) -> None:
        """Runs samples together."""
        if self._by_program(samples):
            return
        self._begin()
        rows, size = samples.rows, samples.size
        group = self.model.group(size)
        try:
            with group.level:
                sample = samples.tree(group.wrap_input)
                with self.model.eagerly():
                    output = group.watch(partial(self.call, sample))
                returned = read_output(output, group.read, rows, size)
                del sample, output
                changes = self._check_state(group)
        finally:
            self.read_data |= group.read_data
        if self.read_data:
            self._compare_state(changes)
        group.free_copies()
        self._keep(returned, GroupOutputs(rows, group, returned.with_graph()))

    def alone(self, samples: Samples, index: int) -> None:
        """Runs one sample by plain autograd."""
        if samples.size == 1 and self._by_program(samples):
            return
        self._begin(alone=True)
        # Autograd forbids writing to its leaves, but code may write to its inputs: it
        # gets copies, and what it has written is copied back.
        copies: list[tuple[T, T]] = []

        def copied(leaf: T) -> T:
            copies.append((leaf, leaf[index].clone()))
            return copies[-1][1]

        sample = samples.tree(copied)
        with self.model.eagerly():
            output = self.call(sample)
        self._compare_state(self.model.state.changes())
        for leaf, copy in copies:
            if version(copy):
                leaf.detach()[index].copy_(copy.detach())
        rows = samples.rows
        if rows is None:
            rows = torch.arange(samples.size)
        row = rows[index : index + 1]
        returned = read_output(output, self._read_alone, row, 1)
        outputs = {}
        for number, output in returned.with_graph().items():
            outputs[number] = output[0]
        inputs = set(map(id, self.leaves))
        for leaf in graph_of(list(outputs.values()))[0]:
            if id(leaf) not in inputs:
                self.model.check_leaf(leaf)
        self._keep(returned, GroupOutputs(row.squeeze(0), None, outputs))

    def _read_alone(self, value: Any) -> Leaf:
        """Wraps a value that one sample returned."""
        value = self.model.loss_in(value)
        if not isinstance(value, T):
            return Leaf(value, False)
        is_held = value in self.model.names or self.model.state.holds(value)
        return Leaf(value if is_held else value[None], not is_held)

    def without_samples(self) -> None:
        """Runs an empty batch: a sample of zeros, whose rows are dropped."""
        self._begin()
        # What the sample leaves on modules is made without data, and may stay.
        output = self._of_zeros()

        def read(value: Any) -> Leaf:
            value = self.model.loss_in(value)
            is_tensor = isinstance(value, T)
            return Leaf(value[None][:0] if is_tensor else value, is_tensor)

        self._returned.append(read_output(output, read, None, 0))

    def _keep(self, returned: Returned, part: GroupOutputs) -> None:
        """Keeps a group for ``backward()``, or adds its gradients to the total now."""
        for tensor, before in self._shared:
            if version(tensor) != before:
                raise self._changes("an input that all samples share", "in place, and ")
        way, reason = "eager at once", ""
        if part.group is None:
            way, reason = ALONE, "alone in its batch or branch"
            if self.model.one_by_one:
                reason = "by the mode"
            reason = self.model.vmap_fails or reason
        elif isinstance(part.group, (CompiledGroup, ClippedStep)):
            way = "compiled"
        if returned.size:
            self.model.ways.note(way, reason)
        if self.total is None:
            self.groups.append(part.without_values())
        else:
            outputs = list(part.outputs.values())
            ones = [*map(torch.ones_like, cast(list[T], outputs))]
            with no_autocast():
                self._add(self.total, part, outputs, ones)
            # Their graph is not needed any more.
            leaves = [x._replace(value=x.value.detach()) for x in returned.leaves]
            returned = returned._replace(leaves=leaves)
        self._returned.append(returned)

    def _check_state(self, group: SampleGroup) -> list[Change]:
        """
        Refuses state that is made of data, after samples that ran together; returns
        other changes.
        """
        # Code of other libraries may write data where no op is seen to write.
        compare = group.read_data or group.runs_others
        changes = self.model.state.changes(compare)
        for name, value, hidden in changes:
            if hidden or holds_data(value, is_batched):
                raise self._changes(name, "by what samples hold, and ")
        return changes

    def _compare_state(self, changes: list[Change]) -> None:
        """
        Refuses changes that may depend on the data, which are those that other samples,
        or a sample of zeros, do not make. A single sample must also make all changes
        that an empty batch would make.
        """
        model = self.model
        name = self._outcome.differs(changes)
        compares = changes or self.size == 1 and not model.zeros_leave_nothing
        if name is None and compares and not self._ran_zeros:
            self._ran_zeros = True
            zeros = self._left_by_zeros()
            model.zeros_leave_nothing = not zeros
            if zeros is not None:
                name = self._outcome.differs(zeros)
            elif self.size == 1 and changes:
                name = changes[0].name
        if name is not None:
            raise self._changes(name, "by what samples hold, and ")

    def _left_by_zeros(self) -> list[Change] | None:
        """Returns what a sample of zeros changes; None if the code can't run it."""
        bring_back = self.model.state.held_now()
        # Zeros must find the state that the samples have found.
        self._restore()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._of_zeros()
        except Exception:
            self._restore()
            bring_back()
            return None
        return self.model.state.changes()

    def _changes(self, name: str, how: str) -> Refused:
        modules = self.model.state.modules
        line = line_that_sets(modules, name)
        remedy = (
            "Return the value, or pass it as an argument, instead of storing it; "
            "replace layers with running statistics."
        )
        norms = [x for x in modules if isinstance(x, _BatchNorm) and x.training]
        if norms and name.rpartition(".")[2] in norms[0]._buffers:
            kind = type(norms[0]).__name__
            shown = f"torch.nn.{kind}" if hasattr(nn, kind) else kind
            remedy = (
                f"Call eval() on each {kind} after model.train(): it trains with the "
                "statistics that it has. For example: for layer in model.modules(): "
                f"layer.train(not isinstance(layer, {shown}))"
            )
        return self.model.refused(
            f"its forward changes {name}, {how}would carry data from sample to sample "
            f"or from batch to batch without noise{line}.",
            remedy,
            name,
        )

    # -- backward ----------------------------------------------------------------------

    def _is_drawn(self) -> bool:
        """Returns True for a batch that is known to be one of the loader's."""
        for leaf in tree_leaves(self.inputs.given):
            draw = draw_of(leaf) if isinstance(leaf, T) else None
            if draw is not None and draw.size == self.size:
                return True
        return False

    def mark_done(self) -> None:
        """Marks it as done; refuses a second backward pass."""
        most = self.model.inputs.most
        if most is not None and self.size > most and not self._is_drawn():
            reason = self.model.refused(
                f"was called on {self.size} samples, and the loader drew at most "
                f"{most} records: part would count several times.",
                "Call it on as many samples as records: for K views of a record give "
                "make_private opacus_ext.losses.RecordModel(model), and call it by "
                "keyword on [B, K, ...]: its outputs are [B, K, ...]; a GAN takes a "
                "fake for each record, noise = torch.randn(len(x), ...). After a loss "
                "that is not the private model's, call zero_grad() of the private "
                "optimizer.",
            )
            self.may_not_enter(reason)
        if self.done:
            raise self.model.refused(
                "a second backward pass of one batch. Each would be clipped by itself, "
                "so that a sample counts twice.",
                "Add the losses and call backward() once.",
            )
        # Hooks may have come after the forward.
        self.model.check_hooks()
        self.done = True

    def may_not_enter(self, reason: Refused) -> None:
        """Lets a step on its gradients be refused, unless they are dropped before."""
        self.inputs = self.inputs._replace(doubt=Doubt(reason))

    def add_gradients(self, total: Total, grads: Sequence[T | None]) -> list[T | None]:
        """
        Adds the per-sample gradients to a total, given the gradients of outputs with a
        graph; returns those of the leaves.
        """
        of_leaves: list[T | None] = [None] * len(self.leaves)
        for part in self.groups:
            outputs, of_outputs = self._own(part, grads)
            try:
                with no_autocast():
                    of_group = self._add(total, part, outputs, of_outputs)
            except NotAtOnce as error:
                raise self.model.refused(
                    f"{error} uses a parameter, so that its per-sample gradients are "
                    "not known.",
                    'Train one sample after the other: grad_sample_mode="scan".',
                ) from error
            of_leaves = [*map(_added, of_leaves, of_group)]
        return of_leaves

    def of_inputs(self, grads: Sequence[T | None]) -> list[T | None]:
        """Returns the gradients of the inputs only."""
        # Without parameters a total takes no memory.
        total = DenseGrads({}, self.size, self.retain_graph)
        return self.add_gradients(total, grads)

    def _add(
        self, total: Total, part: GroupOutputs, outputs: list[Root], grads: list[T]
    ) -> list[T | None]:
        """Adds the gradients of a group; returns those of the leaves."""
        rows = part.rows
        group = part.group
        params = list(self.params.values())
        with unchanged(self.params.values()):
            if group is None:
                leaves = [*params, *self.leaves]
                names = list(self.params)
                kept = isinstance(total, DenseGrads) and total.retain_graph
                by_id = gradients_alone(outputs, grads, leaves, names, kept)
                total.add_one(int(cast(T, rows)), by_id)
                return [*map(by_id.get, map(id, self.leaves))]
            if isinstance(group, (CompiledGroup, ClippedStep)):
                group.add_to(total, rows, outputs, grads)
                return [None] * len(self.leaves)
            return total.add_group(rows, group, outputs, grads, params, self.leaves)

    def _own(
        self, part: GroupOutputs, grads: Sequence[T | None]
    ) -> tuple[list[Root], list[T]]:
        """Returns the outputs of a group and their gradients, in the group's layout."""
        outputs, of_outputs = [], []
        for (number, dim), grad in zip(self.dims.items(), grads):
            output = part.outputs.get(number)
            # A loss may not depend on all outputs, nor a group have a graph of each.
            if grad is None or output is None:
                continue
            # Groups have [.., B, ..] as [B, .., 1, ..].
            if dim is not None:
                grad = grad.unflatten(dim, (self.size, 1)).movedim(dim, 0)
            if part.rows is not None:
                grad = grad[part.rows.to(grad.device)]
            outputs.append(output)
            of_outputs.append(grad)
        return outputs, of_outputs


def _added(total: T | None, grad: T | None) -> T | None:
    if total is None or grad is None:
        return grad if total is None else total
    return total + grad
