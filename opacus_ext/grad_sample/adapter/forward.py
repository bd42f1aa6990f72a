"""A model whose forward runs one sample at a time, and is called as before."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext, suppress
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from opacus_ext.grad_sample.adapter.alone import AloneSample, Known, Notes
from opacus_ext.grad_sample.adapter.compiled import CompiledModel, NotCompiled
from opacus_ext.grad_sample.adapter.inputs import InputReader, Inputs
from opacus_ext.grad_sample.adapter.outputs import (
    Joined,
    Leaf,
    Returned,
    join,
    read_output,
)
from opacus_ext.grad_sample.adapter.record import ForwardRecord, Part, leave
from opacus_ext.grad_sample.adapter.state import State, is_opaque, tensors_in
from opacus_ext.grad_sample.core.batch import Samples
from opacus_ext.grad_sample.core.dynamo import (
    Settings,
    count_a_frame,
    set_compiler,
    settings_from,
    settings_of,
    skip,
)
from opacus_ext.grad_sample.core.group import EagerGroup
from opacus_ext.grad_sample.core.groups import (
    gradients_alone,
    graph_of,
    in_groups,
    no_autocast,
    warn_one_by_one,
)
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.refused import Refused, tell

T = torch.Tensor

_NO_DATA = (torch.dtype, torch.device)  # kinds of values that do not tell of data


class ModelGroup(EagerGroup):
    """Samples of a private model that run at once."""

    def __init__(self, model: PrivateModel, size: int, attached: bool):
        super().__init__(model.params.values(), size, attached)
        self.model, self.notes = model, Notes()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        self.notes.take(func, args, found)
        return found

    def _is_constant(self, x: T) -> bool:
        constant = super()._is_constant(x)
        if constant:
            self.model.check_leaf(x, self.notes.leaves)
        return constant

    def read(self, x: Any) -> Leaf:
        """A value that the samples returned."""
        if not isinstance(x, T) or not is_batched(x):
            return Leaf(x, False)
        return Leaf(self.level.unwrap(x), True, int(self.model.is_state(x, self.notes)))


class PrivateModel:
    """
    Runs the samples of a model one at a time.

    Args:
        module: the user's model
        batch_first: whether dim 0 of inputs and outputs is the batch, else dim 1
        take: ``take(inputs, i)`` gives sample ``i`` as a batch of one
        shared: names of inputs that all samples share
        one_by_one: whether none run at once
        attached: whether gradients of whole groups will be asked for as well

    Attributes:
        backward: called with a record and the gradients of its outputs by an ordinary
            ``backward()``; returns those of the record's inputs
    """

    def __init__(
        self,
        module: nn.Module,
        batch_first: bool = True,
        take: Optional[Callable[[Any, int], Any]] = None,
        shared: Sequence[str] = (),
        one_by_one: bool = False,
        attached: bool = False,
    ):
        self.module = module
        self.batch_dim = 0 if batch_first else 1
        self.one_by_one, self.attached = one_by_one, attached
        self.enabled, self.running = True, False
        self.names = {p: n for n, p in module.named_parameters()}
        self.inputs = InputReader(module, self.tried, self.batch_dim, take, shared)
        self.state = State(module)
        self.first_dim: Set[str] = set()  # see outputs.join
        self.backward: Callable = _no_backward
        self.begin: Callable[[int], None] = lambda size: None  # called before a pass
        self.size = 0  # number of samples of the last call
        self._vmap_fails = False
        self.settings = settings_of(module)
        self.has_compiled = any(map(settings_of, module.modules()))
        self.compiles = False  # whether programs can clip
        self._compiled: Optional[CompiledModel] = None
        self.known = False  # whether what a forward sets once is set

    # -- the model ---------------------------------------------------------------------

    def describe(self) -> str:
        """The model, in an error's words."""
        return type(self.module).__name__

    @property
    def params(self) -> Dict[str, nn.Parameter]:
        """The trainable parameters by name, of those that there were at the start."""
        return {n: p for p, n in self.names.items() if p.requires_grad}

    def is_state(self, x: T, notes: Notes) -> bool:
        """Whether an output is a recurrent state, ``[layers, 1, width]``."""
        kind = (x.shape[0], x.shape[2]) if x.dim() == 3 and x.shape[1] == 1 else ()
        return x in notes.states or kind in self.inputs.states and x.shape[0] > 1

    def check_leaf(self, x: T, made: Optional[Known]) -> None:
        """
        Raises:
            Refused: if something with a gradient of its own is neither a parameter that
                the model had at make_private nor made in the forward
        """
        if x in self.names or made is not None and x in made:
            return
        if made is None and not isinstance(x, nn.Parameter):
            return  # the code was not followed
        if isinstance(x, nn.Parameter):  # a view of one that there was?
            memory = x.untyped_storage().data_ptr()
            if any(memory == p.untyped_storage().data_ptr() for p in self.names):
                return
        raise Refused(
            f"{self.describe()}: its forward uses a trainable parameter of shape "
            f"{tuple(x.shape)} that the model did not have at make_private.",
            module=self.describe(),
            remedy="Add adapters and layers before make_private, or freeze it.",
        )

    def plain(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The user's own model, with its hooks."""
        return module._call_impl(*args, **kwargs)

    def tried(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """What a call would give; it leaves no trace."""
        devices = (
            range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        )
        self.state.remember()
        self.running = True
        try:
            with torch.random.fork_rng(list(devices)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return call(inputs)
        finally:
            self.running = False
            self.state.restore()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model is as it was, within."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    # -- a call ------------------------------------------------------------------------

    @skip
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The model, or the wrapper around it, called by the user."""
        if not self.enabled or self.running or not torch.is_grad_enabled():
            return self.plain(module, args, kwargs)
        compiler = set_compiler(None)  # what is compiled is said below
        settings = settings_from(compiler) or self.settings
        try:
            return self._output(module, args, kwargs, settings)
        finally:
            set_compiler(compiler)
            if settings is not None and settings.fullgraph:
                count_a_frame()

    def _output(
        self, module: nn.Module, args: tuple, kwargs: dict, settings: Any
    ) -> Any:
        self.check_hooks()

        def forward(sample: Any) -> Any:
            return self.plain(module, *sample)

        inputs = self.inputs.read(forward, args, kwargs)
        run = _Forward(self, inputs, forward)
        if settings is not None:
            run.compiled = self._compiled_for(settings, module, inputs)
        joined = run.joined(losses=False)
        tensors = leave(run.record, list(joined.tensors.values()))
        return joined.with_tensors(tensors)

    def losses(self, kwargs: Dict[str, Any], loss_of: Callable) -> T:
        """
        The loss of each sample, ``[B]``.

        Args:
            kwargs: of the model
            loss_of: called as ``loss_of(model, **kwargs)`` with a sample's; returns a
                number
        """
        self.check_hooks()

        def loss(sample: Any) -> T:
            return loss_of(self.module._call_impl, **sample[1])

        run = _Forward(self, self.read_losses(kwargs, loss_of), loss)
        joined = run.joined(losses=True)
        tensors = leave(run.record, list(joined.tensors.values()))
        return tensors[0] if tensors else joined.values[0]

    def read_losses(self, kwargs: Dict[str, Any], loss_of: Callable) -> Inputs:
        """The inputs of :meth:`losses`, told apart by all that the model returns."""

        def forward(sample: Any) -> Any:
            found = []

            def model(**given: Any) -> Any:
                found.append(self.module._call_impl(**given))
                return found[-1]

            loss = loss_of(model, **sample[1])
            # But logits that are computed part by part, by the loss alone.
            return loss, [x for x in tree_leaves(found) if type(x) is T]

        return self.inputs.read(forward, (), kwargs)

    def clip(self, samples: List[Samples], loss: Callable[[Any], T], total: Any) -> T:
        """
        Adds the gradients of the samples' losses to a total, as ``clipped_grads`` does:
        those of each group as soon as it has run.

        Args:
            samples: all of a batch
            loss: of a sample; it calls the model
            total: a ClippedSum, TwoPassSum or DenseGrads (core/)

        Returns:
            the losses ``[B]``, detached
        """
        self.check_hooks()
        size = sum(some.size for some in samples)
        if not size:
            return torch.zeros(0)
        inputs = Inputs(samples, size, [], samples[0].zeros)
        return _Forward(self, inputs, loss, total).joined(losses=True).values[0]

    def _compiled_for(
        self, settings: Settings, module: nn.Module, inputs: Inputs
    ) -> Optional[CompiledModel]:
        """
        The programs for a call; None where there are none.

        Raises:
            Refused: with ``fullgraph=True`` where nothing can be compiled
        """
        self.has_compiled = True
        reason = None
        if not self.compiles:
            reason = 'it is for modes "ghost", "ghost_bk" and "auto", of one process'
        elif inputs.trained:
            reason = "gradients of its inputs are asked for"
        elif module is not self.module and has_hooks(module):
            reason = "there are forward hooks on what make_private has returned"
        if reason is not None:
            self.not_compiled(settings, reason)
            return None
        known, params = self._compiled, list(map(id, self.params.values()))
        if (
            known is None
            or known.settings != settings
            or list(map(id, known.params)) != params
        ):
            self._compiled = CompiledModel(self, settings)
        return self._compiled

    def not_compiled(self, settings: Settings, reason: str) -> None:
        """
        Warns, once.

        Raises:
            Refused: with ``fullgraph=True``
        """
        name = self.describe()
        if settings.fullgraph:
            raise Refused(
                f"{name} can't be compiled as a whole (fullgraph=True): {reason}.",
                module=name,
                remedy="Leave fullgraph out, and it is trained exactly without being "
                "compiled.",
            )
        text = f"{name} is trained exactly, and not compiled: {reason}."
        tell(self, text, text)

    def run(self, forward: _Forward) -> None:
        """Runs the samples of a forward pass."""
        if not forward.inputs.size:
            forward.without_samples()
            return
        in_groups(
            forward.inputs.samples,
            forward.at_once,
            forward.alone,
            one_by_one=self.one_by_one or self._vmap_fails,
            tell=forward.tell,
        )

    def group(self, size: int) -> ModelGroup:
        """In which some samples run at once."""
        return ModelGroup(self, size, self.attached)

    def check_hooks(self) -> None:
        """
        Raises:
            Refused: if a parameter has a hook, which would change or use its gradient
                before it is private
        """
        for name, p in self.params.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise Refused(
                    f"Parameter {name} has a hook (register_hook or "
                    "register_post_accumulate_grad_hook), which would change or use "
                    "its gradient before it is private.",
                    parameter=name,
                    remedy="Remove the hook, or freeze the parameter.",
                )


def has_hooks(module: nn.Module) -> bool:
    """Whether there are forward hooks on a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _no_backward(record: ForwardRecord, grads: Sequence[Optional[T]]) -> List[None]:
    return [None] * len(record.inputs)


class _Forward:
    """
    One call of a private model.

    Args:
        model: the private model
        inputs: of the call
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
        self.model, self.inputs, self.call = model, inputs, call
        self.total = total
        trained, leaves = zip(*inputs.trained) if inputs.trained else ((), ())
        self.record = ForwardRecord(model, inputs.size, model.params, trained, leaves)
        self.returned: List[Returned] = []
        self.groups = 0
        self.clean = False  # whether the last group has left all as it was
        self.compiled: Optional[CompiledModel] = None

    def joined(self, losses: bool) -> Joined:
        """The outputs of all samples."""
        model = self.model
        model.size = self.inputs.size
        model.begin(model.size)
        grads = [p.grad for p in self.record.params.values()]
        if not model.known:
            self._learn()
        model.running = True
        try:
            model.run(self)
        except BaseException:
            if self.groups:
                model.state.restore()
            raise
        finally:
            model.running = False
        for name, p, grad in zip(model.params, self.record.params.values(), grads):
            if p.grad is not grad:
                p.grad = grad
                raise self._backward_inside(name)
        joined = join(
            model.describe(),
            self.returned,
            model.batch_dim,
            self.inputs.size,
            losses,
            model.first_dim,
        )
        self.record.dims = joined.dims
        return joined

    def _learn(self) -> None:
        """
        A sample of zeros, before the first batch of a model with objects that can't be
        put back: what it sets once (a problem type in its config) is not of data.
        """
        self.model.known = self.model.running = True
        try:
            if self.model.state.has_objects:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    with warnings.catch_warnings(), self._eagerly():
                        warnings.simplefilter("ignore")
                        for value in (0, 1):  # zeros may stand for padding
                            with suppress(Exception):
                                self.call(self.inputs.zeros(value))
                                break
        finally:
            self.model.running = False

    def tell(self, reason: str) -> None:
        self.model._vmap_fails = True
        if not self.model.one_by_one:
            warn_one_by_one(self.model.describe(), reason)

    def _backward_inside(self, name: str) -> Refused:
        return Refused(
            f"{self.model.describe()}: backward() within the forward pass adds to the "
            f"gradient of {name}, without clipping.",
            module=self.model.describe(),
            remedy="Take torch.autograd.grad(..., create_graph=True) there, or call "
            "backward() outside.",
        )

    # -- groups ------------------------------------------------------------------------

    def _eagerly(self) -> ContextManager:
        """Parts that torch.compile was used on run as if it were not."""
        if not self.model.has_compiled:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    def _begin(self) -> None:
        """Each group of samples finds the state that the first has found."""
        if not self.groups:
            self.model.state.remember()
        elif not self.clean:
            self._restore()
        self.groups += 1
        self.clean = False

    def _restore(self) -> None:
        name = self.model.state.restore()
        if name is not None:
            raise self._changes(name, "and single samples of a batch would each ")

    def _by_program(self, samples: Samples) -> bool:
        """Runs some samples by a program, where there is one for them."""
        if self.compiled is None:
            return False
        try:
            returned, program = self.compiled.run(samples)
        except NotCompiled as error:
            self.model.not_compiled(self.compiled.settings, str(error))
            self.compiled = None
            return False
        outputs = {i: leaf.value for i, leaf in _with_graph(returned)}
        self._keep(returned, Part(samples.rows, program, outputs))
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
        outputs = {i: leaf.value for i, leaf in _with_graph(returned)}
        self._keep(returned, Part(samples.rows, group, outputs))

    def alone(self, samples: Samples, i: int) -> None:
        """Runs one sample by ordinary autograd."""
        if samples.size == 1 and self._by_program(samples):
            return
        self._begin()
        own = [x[i] for x, by in zip(samples.leaves, samples.by_sample) if by]

        def call() -> Any:
            given = iter(own)
            return self.call(samples.tree(lambda x: next(given)))

        # What is made of data must be known of outputs, and of state that has changed.
        public = {id(x): x for x in self.model.state.tensors}
        mode, watch = AloneSample(public), self.total is None
        if not watch:
            output = call()
            self.clean = not self.model.state.changes()
            watch = not self.clean
        if watch:
            if self.total is not None:
                self._restore()
            with mode:
                output = call()
            self._check_state(
                mode.told_data, mode.is_data, mode.written | mode.notes.written
            )

        def read(x: Any) -> Leaf:
            by_sample = isinstance(x, T) and (
                mode.is_data(x) or (x.requires_grad and not x.is_leaf)
            )
            if not by_sample:
                return Leaf(x, False)
            return Leaf(x[None], True, int(self.model.is_state(x, mode.notes)))

        row = torch.tensor(i) if samples.rows is None else samples.rows[i]
        returned = read_output(output, read, row[None], 1)
        outputs = {i: leaf.value[0] for i, leaf in _with_graph(returned)}
        known = {id(x) for x in self.record.inputs}
        for leaf in graph_of(list(outputs.values()))[0]:
            if id(leaf) not in known:
                self.model.check_leaf(leaf, mode.notes.leaves if watch else None)
        self._keep(returned, Part(row, None, outputs))

    def _keep(self, returned: Returned, part: Part) -> None:
        """Samples have run: for a ``backward()``, or their gradients are taken now."""
        if self.total is None:
            self.record.parts.append(part)
        else:
            self._add(part)
            leaves = [x._replace(value=x.value.detach()) for x in returned.leaves]
            returned = returned._replace(leaves=leaves)
        self.returned.append(returned)

    def _add(self, part: Part) -> None:
        """Adds the gradients of the losses of some samples."""
        outputs, params = list(part.outputs.values()), list(self.model.params.values())
        ones = [torch.ones_like(y) for y in outputs]
        with no_autocast():
            if part.group is None:
                found = gradients_alone(outputs, ones, params)
                self.total.add_one(int(part.rows), found)
            else:
                self.total.add_group(part.rows, part.group, outputs, ones, params)

    def without_samples(self) -> None:
        """A batch of none: the outputs of a sample of zeros, of which none is taken."""
        sample = self.inputs.zeros()
        self._begin()
        with torch.random.fork_rng(devices=[]), self._eagerly():
            output = self.call(sample)
        self.model.state.restore()

        def read(x: Any) -> Leaf:
            if not isinstance(x, T):
                return Leaf(x, False)
            return Leaf(x[None][:0], True)

        self.returned.append(read_output(output, read, None, 0))

    def _check_state(
        self, told_data: bool, is_data: Callable[[T], bool], written: Set[int] = set()
    ) -> None:
        """
        Raises:
            Refused: if the forward has left something made of data
        """
        for change in self.model.state.changes(written):
            told = told_data and not isinstance(change.value, _NO_DATA)
            if (
                told
                or change.hidden
                or any(map(is_data, tensors_in(change.value)))
                or is_opaque(change.value)
            ):
                raise self._changes(change.name, "by what samples hold, and ")

    def _changes(self, name: str, how: str) -> Refused:
        model = self.model.describe()
        return Refused(
            f"{model}: its forward changes {name}, {how}would carry data from sample "
            "to sample or from batch to batch without noise.",
            module=model,
            parameter=name,
            remedy="Return what is computed, or give it to the model as an argument, "
            "in the place of keeping it; replace layers with running statistics.",
        )


def _with_graph(returned: Returned) -> Iterator[Tuple[int, Leaf]]:
    for i, leaf in enumerate(returned.leaves):
        if leaf.by_sample and leaf.value.requires_grad:
            yield i, leaf
