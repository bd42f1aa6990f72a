"""A private model: it runs samples separately, and is called like the module."""

from __future__ import annotations

import warnings
import weakref
from contextlib import contextmanager, nullcontext
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterable,
    Iterator,
    Mapping,
    Protocol,
    Sequence,
)

import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from opacus_ext.grad_sample.adapter.compiled import (
    CompiledModel,
    CompiledStep,
    Total,
)
from opacus_ext.grad_sample.adapter.forward import ForwardRecord, Ways
from opacus_ext.grad_sample.adapter.inputs import InputReader, Inputs
from opacus_ext.grad_sample.adapter.outputs import Leaf
from opacus_ext.grad_sample.adapter.passes import Passes
from opacus_ext.grad_sample.adapter.settings import (
    Settings,
    frame_to_count,
    settings_from,
    settings_of,
)
from opacus_ext.grad_sample.adapter.state import State
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.gradients import refuse_hooks
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import Samples, in_groups
from opacus_ext.grad_sample.core.values import memory
from opacus_ext.grad_sample.core.vmap import cache_kept, checkpoint_around
from opacus_ext.grad_sample.factors import Scale
from opacus_ext.ledger import note_broken
from opacus_ext.private_torch import is_batched, set_compiler, skip, tree_map_only
from opacus_ext.refused import ProcessFailure, Refused, warn_once

T = torch.Tensor
_TOKENS = "num_items_in_batch"  # of models of transformers


class PrivateOptimizer(Protocol):
    """What a mode asks of the optimizer (optimizers/optimizer.py)."""

    params: list[nn.Parameter]
    ready: bool  # True if it has a clipped sum that no step has used

    @property
    def clipping_function(self) -> Callable[[T], T]:
        """Returns the clipping function at its bound."""

    def take_scales(self) -> Mapping[int, Scale]:
        """Returns what gradients are divided by, by the ids of the parameters."""

    def set_clipped_sums(
        self, sums: Iterable[tuple[nn.Parameter, T]], norms: T
    ) -> None:
        """Takes the clipped sum of a batch."""


class Mode:
    """
    What a private model asks of the mode that trains it. These are the answers for a
    model that no mode trains, such as a copy.
    """

    one_by_one = False  # True if no samples run together
    compiles = False  # True if samples may run in compiled programs

    def begin_forward(self, size: int) -> None:
        """Called with the batch size before a forward pass."""

    def plain_backward(
        self, record: ForwardRecord, grads: Sequence[T | None]
    ) -> list[T | None]:
        """
        Called in a plain ``backward()`` with the gradients of the outputs of a forward
        pass; returns those of the record's leaves.
        """
        return [None] * len(record.leaves)

    def mean_of(self, record: ForwardRecord, losses: T) -> T:
        """Makes what the model returns for losses ``[B]`` of a forward pass."""
        return losses.mean()


class ModelGroup(SampleGroup):
    """Samples of a private model that run together."""

    def __init__(self, model: PrivateModel, size: int):
        super().__init__(model.params.values(), size)
        self.model = model
        self.frees_parameters = model.frees_parameters

    def reach(self, tensor: T) -> None:
        self.model.state.reach(tensor)

    def check_leaves(self, leaves: list[T]) -> None:
        for leaf in leaves:
            self.model.check_leaf(leaf)

    @contextmanager
    def running(self) -> Iterator[None]:
        before, self.model.running = self.model.running, True
        try:
            with self.model.eagerly():
                yield
        finally:
            self.model.running = before

    def read(self, value: Any) -> Leaf:
        """Wraps a value that the samples returned."""
        value = self.model.loss_in(value)
        if isinstance(value, T) and is_batched(value):
            return Leaf(self.level.unwrap(value), True)
        return Leaf(value, False)


def _as_it_is(tensor: T) -> T:
    return tensor


def _has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class PrivateModel:
    """
    A model that runs each sample of a batch separately.

    Args:
        mode: trains it
        batch_first, take, shared: arguments of make_private

    Attributes:
        one_by_one: True if no samples run together
        size: batch size of the last call
        passes: the backward passes whose gradients the next step takes
        ways: how the samples of the last step have run
        compiles: True if samples may run in compiled programs
    """

    record_type = ForwardRecord
    handles: Sequence[Any] = ()  # of hooks on modules
    is_shared_out = False  # True if processes have shares of its parameters
    frees_parameters = False  # True if their memory is freed in the backward pass

    def __init__(
        self,
        module: nn.Module,
        mode: Mode,
        batch_first: bool = True,
        take: Callable[[Any, int], Any] | None = None,
        shared: Sequence[str] = (),
    ):
        self.module, self.mode = module, mode
        self.batch_dim = 0 if batch_first else 1
        self.one_by_one = mode.one_by_one
        self.compiles = mode.compiles and not self.is_shared_out
        self.enabled, self.running = True, False
        # Parameters that come later have no name here, and are refused.
        self.names = {p: name for name, p in module.named_parameters()}
        self.inputs = InputReader(module, self.batch_dim, take, shared)
        self.state = State(module)
        self._optimizer: weakref.ref[Any] | None = None
        self.size = 0
        self.passes = Passes()
        self.ways = Ways(self.passes)
        self.output_dims: dict[tuple[str, torch.Size], int] = {}  # see ForwardRecord
        self.vmap_fails = ""  # the reason, if there is one
        self.zeros_leave_nothing = False  # True if a sample of zeros changed no state
        self.settings = settings_of(module)
        self.has_compiled = any(map(settings_of, module.modules()))
        # By the type of the loss, or of what stands for it.
        self._compiled: dict[type, CompiledModel] = {}

    # -- the model ---------------------------------------------------------------------

    def describe(self) -> str:
        """Returns the name of the model for errors."""
        return type(self.module).__name__

    def refused(self, what: str, remedy: str, name: str | None = None) -> Refused:
        """Makes an error that names this model."""
        module = self.describe()
        return Refused(
            f"{module}: {what}", module=module, parameter=name, remedy=remedy
        )

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, among those present at make_private."""
        return {name: p for p, name in self.names.items() if p.requires_grad}

    @property
    def optimizer(self) -> Any:
        """The private optimizer that steps on its gradients; None if not known."""
        if self._optimizer is None:
            return None
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def check_leaf(self, leaf: T) -> None:
        """
        Refuses a parameter that the model did not have at make_private, and a tensor on
        a module that is trained and no parameter.
        """
        if leaf in self.names:
            return
        if not (isinstance(leaf, nn.Parameter) or self.state.holds(leaf)):
            return
        # A view of a parameter is as good as the parameter.
        if memory(leaf) in map(memory, self.names):
            return
        raise self.refused(
            f"its forward uses a trainable parameter of shape {tuple(leaf.shape)} that "
            "the model did not have at make_private.",
            "Add adapters and layers before make_private, or freeze it; "
            "torch.func.linearize makes copies of parameters, where torch.func.jvp "
            "does not.",
        )

    def tried(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Returns the result of a call; restores state and random numbers."""
        devices: list[int] = []
        # Keeping the numbers of a device that is not used would initialize it.
        if torch.cuda.is_initialized():
            devices = [*range(torch.cuda.device_count())]
        random_kept = torch.random.fork_rng(devices)
        self.state.remember()
        self.running = True
        try:
            with random_kept, warnings.catch_warnings(), cache_kept():
                warnings.simplefilter("ignore")
                return call(tree_map_only(T, T.clone, inputs))
        finally:
            self.running = False
            self.state.restore()

    def eagerly(self) -> ContextManager:
        """Disables ``torch.compile`` for a block."""
        if not self.has_compiled:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    def group(self, size: int) -> ModelGroup:
        """Makes a group for samples that run together."""
        return ModelGroup(self, size)

    @contextmanager
    def telling(self, stage: str) -> Iterator[None]:
        """Tells other processes of an error, where they wait for this one."""
        try:
            yield
        except Exception as error:
            # The others know of a failure that they have told. Where parameters are
            # shared out, the processes meet elsewhere.
            is_known = isinstance(error, ProcessFailure) or self.is_shared_out
            tell = getattr(self.optimizer, "tell", None)
            if tell is not None and torch.is_grad_enabled() and not is_known:
                tell(stage)
            raise

    def begin_forward(self, size: int) -> None:
        """Called with the batch size before a forward pass."""
        self.size = size
        self.mode.begin_forward(size)

    def begin_backward(self, through: bool) -> None:
        """
        Called before the first gradient of a backward pass, ``through`` the model if
        the loss depends on it.
        """

    def reset(self) -> None:
        """Called after a backward pass that has failed."""

    def clipped_sum(self, *args: Any, **kwargs: Any) -> ClippedSum:
        """Makes the clipped sum of a batch, with the arguments of ClippedSum."""
        return ClippedSum(*args, **kwargs)

    def run(self, forward: ForwardRecord) -> None:
        """Runs all samples of a forward pass."""
        if not forward.size:
            forward.without_samples()
            return
        in_groups(
            forward.inputs.samples,
            forward.at_once,
            forward.alone,
            one_by_one=self.one_by_one or bool(self.vmap_fails),
            warn=forward.warn,
        )

    def check_hooks(self) -> None:
        """Refuses what would see or change gradients of single samples."""
        # Set while a wrapper of DDP runs what is in it.
        around = DDP._active_ddp_module
        if around is not None:
            raise self.refused(
                "the private model was wrapped by DistributedDataParallel, which would "
                "wait for gradients or average those without noise.",
                "Wrap it before make_private (Accelerate's prepare comes first, too), "
                "and call what make_private returns.",
            )
        for layer in self.state.modules:
            if layer._backward_hooks or layer._backward_pre_hooks:
                raise self.refused(
                    f"{type(layer).__name__} has a hook on its backward pass, which "
                    "would be shown, and could change, gradients of single samples.",
                    "Remove it.",
                )
        refuse_hooks(self.params.items())

    # -- a call ------------------------------------------------------------------------

    @skip
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Handles a call of the model, or of the wrapper around it."""
        # A model within its own forward, or that is evaluated, is a plain module.
        if not self.enabled or self.running or not torch.is_grad_enabled():
            return module._call_impl(*args, **kwargs)
        # Where the user's loop is compiled, Dynamo would trace into our own code.
        compiler = set_compiler(None)
        settings = self.settings
        if compiler is not None:
            settings = settings_from(compiler) or settings

        def forward(sample: Any) -> Any:
            return module._call_impl(*sample[0], **sample[1])

        try:
            with self.telling("forward pass"), self._kept():
                self.check_hooks()
                inputs = self.inputs.read(args, self._of_samples(kwargs))
                if self.inputs.mixing.drawn:
                    self._look_for_mixing((args, kwargs))
                record = self.record_type(self, inputs, forward)
                if settings and self._can_compile(settings, inputs, module):
                    run = self._inner()._call_impl

                    def code(sample: Any) -> Any:
                        return run(*sample[0], **sample[1])

                    record.compiled = self._programs(
                        CompiledModel, type(None), settings, code
                    )
                return record.output()
        finally:
            set_compiler(compiler)
            # torch looks for a function that was compiled, and ours are by themselves.
            if settings is not None and settings.fullgraph:
                frame_to_count(torch.zeros(()))

    def _kept(self) -> ContextManager:
        """Keeps for the backward pass what a checkpoint around the model would not."""
        around = checkpoint_around()
        if not around:
            return nullcontext()
        if around == "again":
            raise self.refused(
                "torch.utils.checkpoint.checkpoint, around the private model and more, "
                "calls it a second time in the backward pass.",
                "Call the model outside of the checkpoint; checkpoints inside its "
                "forward save memory.",
            )
        warn_once(
            self,
            "checkpoint",
            f"{self.describe()}: a checkpoint around the private model saves no memory."
            " Checkpoints inside its forward do.",
        )
        return saved_tensors_hooks(_as_it_is, _as_it_is)

    def _look_for_mixing(self, inputs: Any) -> None:
        """Warns of inputs whose rows are made of several records of a draw."""
        found = self.inputs.mixing.look(inputs)
        if found is not None and self.optimizer is not None:
            note_broken(self.optimizer, "mixing", f"{self.describe()}: {found}")

    def _of_samples(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Leaves out the number of tokens in the batch that the Trainer passes."""
        if kwargs.get(_TOKENS) is None or _TOKENS in self.inputs.shared:
            return kwargs
        text = (
            f"{self.describe()}: {_TOKENS} is a number of the batch, by which a sample "
            "would change the losses of others. It is left out: the loss is the mean "
            "over samples of what the model computes for each."
        )
        warn_once(self, _TOKENS, text)
        return {**kwargs, _TOKENS: None}

    def loss_in(self, value: Any) -> Any:
        """
        Returns the loss of a sample in what Opacus's criterion of ghost clipping makes,
        where the model calls that by itself; other values as they are.
        """
        if not isinstance(value, DPTensorFastGradientClipping):
            return value
        if self.optimizer is None:
            self.optimizer = value.optimizer
        return getattr(value.loss_per_sample, value.loss_reduction)()

    def losses(self, kwargs: dict[str, Any], loss_of: Callable) -> T:
        """Returns losses ``[B]`` of ``loss_of(model, **kwargs)`` for each sample."""

        def loss(sample: Any) -> T:
            return loss_of(self.module._call_impl, **sample[1])

        with self.telling("forward pass"):
            self.check_hooks()
            inputs = self.inputs.read((), kwargs)
            record = self.record_type(self, inputs, loss)
            if self.settings is not None and self._can_compile(self.settings, inputs):
                run = self._inner()._call_impl

                def code(sample: Any) -> T:
                    return loss_of(run, **sample[1])

                record.compiled = self._programs(
                    CompiledModel, type(loss_of), self.settings, code
                )
            return record.losses()

    def clip(self, samples: list[Samples], loss: Callable[[Any], T], total: Total) -> T:
        """
        Adds the gradients of the losses to a total, group by group, as
        ``clipped_grads`` does. Returns the losses ``[B]``.
        """
        with self.telling("forward pass"):
            self.check_hooks()
            # An empty batch has no leaf of which the device would be known.
            if not samples:
                return torch.zeros(0)
            inputs = Inputs(samples, sum(part.size for part in samples))
            record = self.record_type(self, inputs, loss, total)
            if self.settings is not None and self._can_compile(self.settings, inputs):
                record.compiled = self._programs(
                    CompiledStep, CompiledStep, self.settings, loss
                )
            return record.losses()

    def _can_compile(
        self, settings: Settings, inputs: Inputs, module: nn.Module | None = None
    ) -> bool:
        """Returns False, with a warning, if a call can't be compiled."""
        self.has_compiled = True
        reason = None
        if not self.compiles:
            reason = (
                'it is for modes "ghost", "ghost_bk" and "auto", without fully_shard'
            )
        elif inputs.trained:
            reason = "gradients of its inputs are asked for"
        elif module not in (None, self.module) and _has_forward_hooks(module):
            reason = "there are forward hooks on what make_private has returned"
        if reason is not None:
            self.not_compiled(settings, reason)
        return reason is None

    def _inner(self) -> nn.Module:
        """Returns the module that is compiled, without what is wrapped around it."""
        # torch.compile, and then DDP.
        module = getattr(self.module, "_orig_mod", self.module)
        return module.module if isinstance(module, DDP) else module

    def _programs(
        self, kind: type[CompiledModel], key: type, settings: Settings, code: Callable
    ) -> CompiledModel:
        """Returns the programs of code that runs a sample, by the type of its loss."""
        programs = self._compiled.get(key)
        # Parameters that were frozen, or have come back, need other programs.
        params = [*map(id, self.params.values())]
        if (
            programs is None
            or programs.settings != settings
            or [*map(id, programs.params)] != params
        ):
            programs = self._compiled[key] = kind(self, settings, code)
        programs.code = code
        return programs

    def not_compiled(self, settings: Settings, reason: str) -> None:
        """Warns once that the model is not compiled; refuses ``fullgraph=True``."""
        if settings.fullgraph:
            raise self.refused(
                f"can't be compiled as a whole (fullgraph=True): {reason}.",
                "Leave fullgraph out, and it is trained exactly, not compiled.",
            )
        self.ways.note("not compiled", reason)
        text = f"{self.describe()} is trained exactly, and not compiled: {reason}."
        warn_once(self, text, text)
