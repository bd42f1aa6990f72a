"""A model whose forward runs one sample at a time, and is called as before."""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Callable, ContextManager, NamedTuple, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_ext.grad_sample.adapter.compiled import (
    CompiledGroup,
    CompiledModel,
    NotCompiled,
)
from opacus_ext.grad_sample.adapter.inputs import InputReader, Inputs
from opacus_ext.grad_sample.adapter.outputs import (
    Boundary,
    Joined,
    Leaf,
    Returned,
    join,
    read_output,
)
from opacus_ext.grad_sample.adapter.state import (
    AloneSample,
    Known,
    Notes,
    State,
    holds_data,
)
from opacus_ext.grad_sample.core.clip import DenseGrads
from opacus_ext.grad_sample.core.dynamo import (
    Settings,
    count_a_frame,
    set_compiler,
    settings_from,
    settings_of,
    skip,
)
from opacus_ext.grad_sample.core.gradients import gradients_alone, graph_of, no_autocast
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import (
    Samples,
    in_groups,
    version,
    warn_one_by_one,
)
from opacus_ext.grad_sample.core.vmap import cache_kept, is_batched
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.refused import Refused, warn_once

T = torch.Tensor

_NO_DATA = (torch.dtype, torch.device)  # kinds of values that do not tell of data


class ModelGroup(SampleGroup):
    """Samples of a private model that run at once."""

    def __init__(self, model: PrivateModel, size: int):
        super().__init__(model.params.values(), size)
        self.model, self.notes = model, Notes()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        run = partial(super().__torch_function__, func, types, args, kwargs)
        return self.notes.call(func, args, run)

    def _is_constant(self, x: T) -> bool:
        constant = super()._is_constant(x)
        if constant:
            self.model.check_leaf(x, self.notes.leaves)
        return constant

    def read(self, x: Any) -> Leaf:
        """A value that the samples returned."""
        own = isinstance(x, T) and is_batched(x)
        return Leaf(self.level.unwrap(x) if own else x, own)


class PrivateModel:
    """
    Runs the samples of a model one at a time.

    Args:
        batch_first, take, shared: as given to make_private
        one_by_one: whether none run at once

    Attributes:
        backward: called with a record and the gradients of its outputs by an ordinary
            ``backward()``; returns those of the record's leaves
        begin: called with the number of samples before a pass
        size: number of samples of the last call
        compiles: whether samples may run in compiled programs
    """

    def __init__(
        self,
        module: nn.Module,
        batch_first: bool = True,
        take: Callable[[Any, int], Any] | None = None,
        shared: Sequence[str] = (),
        one_by_one: bool = False,
    ):
        self.module = module
        self.batch_dim = 0 if batch_first else 1
        self.one_by_one = one_by_one
        self.enabled, self.running, self.compiles = True, False, False
        self.names = {p: n for n, p in module.named_parameters()}
        self.inputs = InputReader(module, self.tried, self.batch_dim, take, shared)
        self.state = State(module)
        self.backward: Callable = _no_backward
        self.begin: Callable[[int], None] = lambda size: None
        self.size = 0
        self.output_dims: dict[tuple[str, torch.Size], int] = {}  # see ForwardRecord
        self.known = False  # whether what a forward sets once is set
        self.vmap_fails = False
        self.settings = settings_of(module)
        self.has_compiled = any(map(settings_of, module.modules()))
        self._compiled: CompiledModel | None = None

    # -- the model ---------------------------------------------------------------------

    def describe(self) -> str:
        """The name of the model in errors."""
        return type(self.module).__name__

    def refused(self, what: str, remedy: str, name: str | None = None) -> Refused:
        """An error that names this model."""
        given = dict(module=self.describe(), parameter=name, remedy=remedy)
        return Refused(f"{self.describe()}: {what}", **given)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, of those that there were at make_private."""
        return {n: p for p, n in self.names.items() if p.requires_grad}

    def check_leaf(self, x: T, made: Known | None) -> None:
        """
        Refuses a leaf that gets a gradient and is neither a parameter that the model
        had at make_private nor made in the forward.
        """
        if x in self.names or made is not None and x in made:
            return
        if made is None and not isinstance(x, nn.Parameter):
            return  # the code was not followed
        if isinstance(x, nn.Parameter):  # a view of one that there was?
            memory = x.untyped_storage().data_ptr()
            if any(memory == p.untyped_storage().data_ptr() for p in self.names):
                return
        raise self.refused(
            f"its forward uses a trainable parameter of shape {tuple(x.shape)} that "
            "the model did not have at make_private.",
            "Add adapters and layers before make_private, or freeze it.",
        )

    def tried(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """What a call gives; state and random numbers are put back."""
        cuda = torch.cuda.is_initialized()
        devices = list(range(torch.cuda.device_count())) if cuda else []
        self.state.remember()
        self.running = True
        try:
            with torch.random.fork_rng(
                devices
            ), warnings.catch_warnings(), cache_kept():
                warnings.simplefilter("ignore")
                return call(tree_map_only(T, T.clone, inputs))
        finally:
            self.running = False
            self.state.restore()

    def group(self, size: int) -> ModelGroup:
        """A new group, in which some samples run at once."""
        return ModelGroup(self, size)

    def run(self, forward: ForwardRecord) -> None:
        """Runs the samples of a forward pass."""
        if not forward.size:
            forward.without_samples()
            return
        in_groups(
            forward.inputs.samples,
            forward.at_once,
            forward.alone,
            one_by_one=self.one_by_one or self.vmap_fails,
            warn=forward.warn,
        )

    def check_hooks(self) -> None:
        """Refuses hooks that would be shown gradients of single samples."""
        for layer in self.state.modules:
            if layer._backward_hooks or layer._backward_pre_hooks:
                raise self.refused(
                    f"{type(layer).__name__} has a hook on its backward pass, which "
                    "would be shown, and could change, gradients of single samples.",
                    "Remove it.",
                )
        for name, p in self.params.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise Refused(
                    f"Parameter {name} has a hook (register_hook or "
                    "register_post_accumulate_grad_hook), which would change or use "
                    "its gradient before it is private.",
                    parameter=name,
                    remedy="Remove the hook, or freeze the parameter.",
                )

    # -- a call ------------------------------------------------------------------------

    @skip
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs when the user calls the model, or the wrapper around it."""
        if not self.enabled or self.running or not torch.is_grad_enabled():
            return module._call_impl(*args, **kwargs)
        compiler, settings = set_compiler(None), self.settings
        if compiler is not None:  # what is compiled is said below
            settings = settings_from(compiler) or settings

        def forward(sample: Any) -> Any:
            return module._call_impl(*sample[0], **sample[1])

        try:
            self.check_hooks()
            inputs = self.inputs.read(forward, args, kwargs)
            record = ForwardRecord(self, inputs, forward)
            if settings is not None:
                record.compiled = self._compiled_for(settings, module, inputs)
            return record.output()
        finally:
            set_compiler(compiler)
            if settings is not None and settings.fullgraph:
                count_a_frame()

    def losses(self, kwargs: dict[str, Any], loss_of: Callable) -> T:
        """The losses ``[B]`` that ``loss_of(model, **kwargs)`` gives for samples."""

        def loss(sample: Any) -> T:
            return loss_of(self.module._call_impl, **sample[1])

        self.check_hooks()
        return ForwardRecord(self, self.read_losses(kwargs, loss_of), loss).losses()

    def read_losses(self, kwargs: dict[str, Any], loss_of: Callable) -> Inputs:
        """Reads the inputs of :meth:`losses`, by all that the model returns."""

        def forward(sample: Any) -> Any:
            found = []

            def model(**given: Any) -> Any:
                found.append(self.module._call_impl(**given))
                return found[-1]

            loss = loss_of(model, **sample[1])
            leaves = [x for x in tree_leaves(found) if isinstance(x, T)]
            return loss, [torch.zeros(x.shape[:2]) for x in leaves if x.dim()]

        return self.inputs.read(forward, (), kwargs)

    def clip(self, samples: list[Samples], loss: Callable[[Any], T], total: Any) -> T:
        """
        Adds the gradients of the samples' losses to a total, as ``clipped_grads`` does:
        those of each group as soon as it has run. Returns the losses ``[B]``.
        """
        self.check_hooks()
        size = sum(some.size for some in samples)
        if not size:
            return torch.zeros(0)
        inputs = Inputs(samples, size, [], samples[0].zeros)
        return ForwardRecord(self, inputs, loss, total).losses()

    def _compiled_for(
        self, settings: Settings, module: nn.Module, inputs: Inputs
    ) -> CompiledModel | None:
        """The compiled programs for a call; None if it can't be compiled."""
        self.has_compiled = True
        reason = None
        if not self.compiles:
            reason = 'it is for modes "ghost", "ghost_bk" and "auto", of one process'
        elif inputs.trained:
            reason = "gradients of its inputs are asked for"
        elif module is not self.module and (
            module._forward_hooks or module._forward_pre_hooks
        ):
            reason = "there are forward hooks on what make_private has returned"
        if reason is not None:
            self.not_compiled(settings, reason)
            return None
        known, params = self._compiled, [id(p) for p in self.params.values()]
        same = known is not None and known.settings == settings
        if not same or [id(p) for p in known.params] != params:
            self._compiled = CompiledModel(self, settings)
        return self._compiled

    def not_compiled(self, settings: Settings, reason: str) -> None:
        """Warns once that the model is not compiled; refuses ``fullgraph=True``."""
        if settings.fullgraph:
            raise self.refused(
                f"can't be compiled as a whole (fullgraph=True): {reason}.",
                "Leave fullgraph out, and it is trained exactly, not compiled.",
            )
        text = f"{self.describe()} is trained exactly, and not compiled: {reason}."
        warn_once(self, text, text)


def _no_backward(record: ForwardRecord, grads: Sequence[T | None]) -> list[None]:
    return [None] * len(record.leaves)


class Part(NamedTuple):
    """Samples of a forward pass that have run together, or one that has run alone."""

    rows: T | None  # which of the batch they are; None for all
    group: Any  # None for one alone
    outputs: dict[int, T]  # with a graph, by leaf: ``[B, *shape]``, of one ``[*shape]``


class ForwardRecord:
    """
    One call of a private model, and the gradients that come back through it.

    Args:
        call: what is called with each sample
        total: takes the gradients of the losses that ``call`` returns; None if a
            ``backward()`` follows
    """

    def __init__(
        self,
        model: PrivateModel,
        inputs: Inputs,
        call: Callable[[Any], Any],
        total: Any = None,
    ):
        self.model, self.inputs, self.call, self.total = model, inputs, call, total
        self.size, self.params = inputs.size, model.params
        self.trained = [x for x, _ in inputs.trained]  # inputs with a graph
        self.leaves = [leaf for _, leaf in inputs.trained]  # in their places
        self.parts: list[Part] = []  # together all samples
        self.dims: dict[int, int | None] = {}  # see Joined
        self.done = False  # whether its gradients have been taken
        self.compiled: CompiledModel | None = None  # programs that may run samples
        self._returned: list[Returned] = []
        self._groups = 0
        self._followed = True  # whether each op of the code is looked at
        self._clean = False  # whether the last group has left all as it was
        self._shared = [
            (x, version(x))
            for some in inputs.samples
            for x, own in zip(some.leaves, some.by_sample)
            if isinstance(x, T) and not own
        ]

    # -- forward -----------------------------------------------------------------------

    def output(self) -> Any:
        """Runs the samples, and gives what the model would for the batch."""
        joined = self._run(losses=False)
        return joined.with_tensors(self._with_graph(joined))

    def losses(self) -> T:
        """Runs the samples, each of which gives a loss."""
        joined = self._run(losses=True)
        return joined.values[0] if joined.tensors == {} else self._with_graph(joined)[0]

    def _with_graph(self, joined: Joined) -> list[T]:
        tensors = list(joined.tensors.values())
        if not tensors:
            return []
        anchor = torch.zeros((), requires_grad=True)
        return list(Boundary.apply(self, anchor, len(tensors), *tensors, *self.trained))

    def _run(self, losses: bool) -> Joined:
        model = self.model
        model.size = self.size
        model.begin(self.size)
        grads = [p.grad for p in self.params.values()]
        if not model.known:
            self._learn()
        if model.state.lost is not None:  # when something was tried
            raise self._changes(model.state.lost, "in place, and ")
        model.running = True
        try:
            model.run(self)
        except BaseException:
            if self._groups:
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
        joined = join(self, self._returned, losses)
        self._returned, self.dims = [], joined.dims
        return joined

    def _learn(self) -> None:
        """
        Runs a sample of zeros before the first batch of a model with objects: what it
        sets once (a problem type in its config) is not of data. Keeps nothing if
        numbers are: what the first batch decides is refused, not computed of zeros.
        """
        self.model.known, state = True, self.model.state
        if not state.has_objects:
            return
        mode, self.model.running = AloneSample(state), True
        state.remember()
        try:
            with suppress(Exception), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with mode, cache_kept():
                    self._of_zeros()
        finally:
            self.model.running = False
        for name, value, hidden in state.changes(mode.written | mode.notes.written):
            told = mode.told_data and float in map(type, tree_leaves(value))
            in_place = hidden or isinstance(value, T) and state.holds(value)
            if told or in_place or holds_data(value, mode.is_data):
                if state.restore() is not None:
                    raise self._changes(name, "by what samples hold, and ")
                break

    def _of_zeros(self) -> Any:
        """What a sample of zeros gives, or one of ones: zeros may stand for padding."""
        with torch.random.fork_rng(devices=[]), self._eagerly():
            try:
                return self.call(self.inputs.zeros())
            except Refused:
                raise
            except Exception:
                return self.call(self.inputs.zeros(1))

    def look(self, name: str, shape: torch.Size) -> int | None:
        """
        Finds the dim of the samples in an output ``[1, 1, ...]`` of a sample: the one
        that it has if the model is called with the whole batch; None if that fails.
        """
        known, given = self.model.output_dims, self.inputs.given
        if (name, shape) not in known and self.size > 1 and given is not None:
            with suppress(Exception), torch.no_grad(), self._eagerly():
                whole = self.model.tried(self.call, given)
                paths = read_output(whole, lambda x: Leaf(x, False), None, self.size)
                found = dict(zip(paths.names, paths.leaves))[name].value.shape[:2]
                if sorted(found) == [1, self.size]:
                    known[name, shape] = found.index(self.size)
        return known.get((name, shape))

    def warn(self, reason: str) -> None:
        """Warns that vmap fails; from now on samples run one by one."""
        self.model.vmap_fails = True
        if not self.model.one_by_one:
            warn_one_by_one(self.model.describe(), reason)

    # -- groups ------------------------------------------------------------------------

    def _eagerly(self) -> ContextManager:
        """A block in which parts that are compiled run as if they were not."""
        stance = torch.compiler.set_stance
        return stance("force_eager") if self.model.has_compiled else nullcontext()

    def _begin(self) -> None:
        """Gives each group of samples the state that the first has found."""
        if not self._groups:
            alone = self.model.one_by_one or self.model.vmap_fails
            self._followed = self.total is None or not alone
            self.model.state.remember(parameters=not self._followed)
        elif not self._clean:
            self._restore()
        self._groups += 1
        self._clean = False

    def _restore(self) -> None:
        name = self.model.state.restore()
        if name is not None:
            raise self._changes(name, "and each sample of a batch ")

    def _by_program(self, samples: Samples) -> bool:
        """Runs samples in a compiled program; whether there is one for them."""
        if self.compiled is None:
            return False
        try:
            returned, program = self.compiled.run(samples)
        except NotCompiled as error:
            self.model.not_compiled(self.compiled.settings, str(error))
            self.compiled = None
            return False
        self._keep(returned, Part(samples.rows, program, returned.with_graph()))
        return True

    def at_once(self, samples: Samples) -> None:
        """Runs some samples at once."""
        if self._by_program(samples):
            return
        self._begin()
        group = self.model.group(samples.size)
        with group.level:
            sample = samples.tree(group.wrap)
            with group, self._eagerly():
                output = self.call(sample)
            returned = read_output(output, group.read, samples.rows, samples.size)
            del sample, output
            self._check_state(group.told_data, is_batched, group.notes.written)
        group.forget()
        self._keep(returned, Part(samples.rows, group, returned.with_graph()))

    def alone(self, samples: Samples, i: int) -> None:
        """Runs one sample by ordinary autograd."""
        if samples.size == 1 and self._by_program(samples):
            return
        self._begin()
        own: list[T] = []

        def call() -> Any:  # of copies: code may write to its inputs
            pairs = zip(samples.leaves, samples.by_sample)
            own[:] = [x[i].clone() for x, by in pairs if by]
            given = iter(own)
            with self._eagerly():
                return self.call(samples.tree(lambda x: next(given)))

        # What is made of data must be known of outputs, and of state that has changed.
        mode, watch = AloneSample(self.model.state), self._followed
        if not watch:
            output = call()
            self._clean = not self.model.state.changes()
            watch = not self._clean
            if watch:
                self._restore()
        if watch:
            with mode:
                output = call()
            written = mode.written | mode.notes.written
            self._check_state(mode.told_data, mode.is_data, written)

        def read(x: Any) -> Leaf:
            made = isinstance(x, T) and x.requires_grad and not x.is_leaf
            if made or isinstance(x, T) and mode.is_data(x):
                return Leaf(x[None], True)
            return Leaf(x, False)

        leaves = (x for x, by in zip(samples.leaves, samples.by_sample) if by)
        for x, copy in zip(leaves, own):
            if version(copy):
                x.detach()[i].copy_(copy.detach())
        row = torch.tensor(i) if samples.rows is None else samples.rows[i]
        returned = read_output(output, read, row[None], 1)
        outputs = {k: y[0] for k, y in returned.with_graph().items()}
        known = {id(x) for x in self.leaves}
        for leaf in graph_of(list(outputs.values()))[0]:
            if id(leaf) not in known:
                self.model.check_leaf(leaf, mode.notes.leaves if watch else None)
        self._keep(returned, Part(row, None, outputs))

    def without_samples(self) -> None:
        """Runs a batch of none: a sample of zeros, of whose outputs none is taken."""
        self._begin()
        output = self._of_zeros()
        self.model.state.restore()

        def read(x: Any) -> Leaf:
            return Leaf(x[None][:0], True) if isinstance(x, T) else Leaf(x, False)

        self._returned.append(read_output(output, read, None, 0))

    def _keep(self, returned: Returned, part: Part) -> None:
        """Keeps samples that have run for ``backward()``, or takes gradients now."""
        if any(version(x) != before for x, before in self._shared):
            raise self._changes("an input that all samples share", "in place, and ")
        if self.total is None:
            self.parts.append(part)
        else:
            outputs = list(part.outputs.values())
            with no_autocast():
                self._add(self.total, part, outputs, [*map(torch.ones_like, outputs)])
            leaves = [x._replace(value=x.value.detach()) for x in returned.leaves]
            returned = returned._replace(leaves=leaves)
        self._returned.append(returned)

    def _check_state(
        self, told_data: bool, is_data: Callable[[T], bool], written: set[int]
    ) -> None:
        """Refuses what the forward has left that is made of data."""
        for name, value, hidden in self.model.state.changes(written):
            told = told_data and not isinstance(value, _NO_DATA)
            if told or hidden or holds_data(value, is_data):
                raise self._changes(name, "by what samples hold, and ")

    def _changes(self, name: str, how: str) -> Refused:
        return self.model.refused(
            f"its forward changes {name}, {how}would carry data from sample to sample "
            "or from batch to batch without noise.",
            "Return what is computed, or give it to the model as an argument, in the "
            "place of keeping it; replace layers with running statistics.",
            name,
        )

    # -- backward ----------------------------------------------------------------------

    def take(self) -> None:
        """Marks it as taken; refuses a second time, or more samples than drawn."""
        most = self.model.inputs.most
        if most is not None and self.size > most:
            raise self.model.refused(
                f"was called on {self.size} samples, and the loader drew at most "
                f"{most} records: some would count several times.",
                "Call it on the records that were drawn: views of a record belong into "
                "one sample, of which the loss is the mean.",
            )
        if self.done:
            raise self.model.refused(
                "a second backward pass of one batch. Each would be clipped by itself, "
                "so that a sample counts twice.",
                "Add the losses and call backward() once, or call the model again.",
            )
        self.model.check_hooks()
        self.done = True

    def add_gradients(self, total: Any, grads: Sequence[T | None]) -> list[T | None]:
        """
        Adds the samples' gradients to a ClippedSum, TwoPassSum or DenseGrads (core/),
        and returns those of the leaves; ``grads`` are of the outputs with a graph.
        """
        of_leaves: list[T | None] = [None] * len(self.leaves)
        for part in self.parts:
            outputs, own = self._own(part, grads)
            try:
                with no_autocast():
                    found = self._add(total, part, outputs, own)
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
        """The gradients of the inputs alone."""
        return self.add_gradients(DenseGrads({}, self.size), grads)

    def _add(
        self, total: Any, part: Part, outputs: list[T], grads: list[T]
    ) -> list[T | None]:
        """Adds the gradients of some samples; returns those of the leaves."""
        params = list(self.params.values())
        if part.group is None:
            by_id = gradients_alone(outputs, grads, [*params, *self.leaves])
            total.add_one(int(part.rows), by_id)
            return [by_id.get(id(x)) for x in self.leaves]
        if isinstance(part.group, CompiledGroup):
            part.group.add_to(total, part.rows, outputs, grads)
            return [None] * len(self.leaves)
        given = part.rows, part.group, outputs, grads, params, self.leaves
        return total.add_group(*given)

    def _own(self, part: Part, grads: Sequence[T | None]) -> tuple[list[T], list[T]]:
        """The outputs of a part and their gradients, both as the part has them."""
        outputs, own = [], []
        for (i, dim), g in zip(self.dims.items(), grads):
            y = part.outputs.get(i)
            if g is None or y is None:
                continue
            if dim is not None:  # [.., B, ..] as [B, .., 1, ..]
                g = g.unflatten(dim, (self.size, 1)).movedim(dim, 0)
            if part.rows is not None:
                g = g[part.rows.to(g.device)]
            outputs.append(y)
            own.append(g.to(y.dtype))
        return outputs, own
