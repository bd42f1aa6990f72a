"""A model's forward, run one sample at a time, all at once where that can be had.

A compiled model has a program for it (compiled/); any other is run in parts (parts.py),
which is exact for every model that runs on a batch of one. The first time that a kind
of input is met, the outputs are compared with those of the model on the batch: if they
differ, its samples are not independent, and it is refused (first_step.py).
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from contextlib import contextmanager, nullcontext
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Tuple,
)

import torch
from torch import nn

from opacus_ext.grad_sample.samplewise.compare import NewOutput
from opacus_ext.grad_sample.samplewise.compiled.forward import programs_for, run_program
from opacus_ext.grad_sample.samplewise.compiled.programs import Programs
from opacus_ext.grad_sample.samplewise.compiled.settings import (
    Settings,
    are_compiled,
    eagerly,
    settings_for,
    settings_in_force,
    settings_of,
    skip,
    uncompiled,
)
from opacus_ext.grad_sample.samplewise.compiled.trace import Changed, NotCompiled
from opacus_ext.grad_sample.samplewise.first_step import compare, inputs_of, known_of
from opacus_ext.grad_sample.samplewise.hooks import BACKWARD_HOOK, HookReturns
from opacus_ext.grad_sample.samplewise.kinds import InputKind
from opacus_ext.grad_sample.samplewise.parts import Parts
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.grad_sample.samplewise.sandbox import hook_tables
from opacus_ext.grad_sample.samplewise.scan import ScanRun
from opacus_ext.grad_sample.samplewise.states import MadeOfData
from opacus_ext.grad_sample.samplewise.uses import Use
from opacus_ext.refused import Refused


class Engine:
    """
    Stands in the place of a model's ``forward`` while it is private.

    Args:
        module: the user's model
        batch_first: whether dim 0 (else dim 1) of the inputs is the batch
        attached: whether gradients of the whole batch will be asked for as well
        take: ``take(inputs, i)`` gives sample ``i`` as a batch of one
        shared: names of inputs that all samples share
        scan: whether to run one sample after the other from the start
    """

    def __init__(
        self,
        module: nn.Module,
        batch_first: bool = True,
        attached: bool = False,
        take: Optional[Callable[[Any, int], Any]] = None,
        shared: Tuple[str, ...] = (),
        scan: bool = False,
    ):
        self.module = module
        self.batch_dim = 0 if batch_first else 1
        self.attached, self.take, self.shared, self.scan = attached, take, shared, scan
        self.enabled = True
        self.joins = True  # whether outputs are compared with the model's own
        self.current: Optional[Run] = None
        self.collector: Any = None  # who is shown gradients
        self._anchor: Optional[torch.Tensor] = None
        self.kinds: Dict[tuple, InputKind] = {}  # what is known of each
        self.made_of_data = MadeOfData()  # what runs have made of data
        # Calls the model's own forward where numbers are asked for one a sample.
        self.per_sample: Optional[Callable] = None
        self.lists_are_samples = False  # whether items of lists are samples
        self.hooks_that_return: set = (
            set()
        )  # hooks of the user that change what they see
        self._own_backward = False
        self.expert_group: Any = None  # the processes that experts are spread over
        self._runs: List[weakref.ref] = []
        self._params: Dict[int, nn.Parameter] = {}
        self._modules: Optional[Tuple[List[str], List[nn.Module]]] = None
        self.half = False  # whether parts of the model are in half precision
        self.names: Dict[nn.Parameter, str] = {}
        self.own: Optional[Callable] = None
        self._before: Optional[Callable] = None  # what the user had put in its place
        self._in_place: Optional[Callable] = None
        self._parts_compiled = False
        # Makes what clips in a program, of ``(engine, leaves, probe)``; None:
        # nothing is compiled.
        self.step: Optional[Callable] = None
        self.compiled: Optional[Settings] = None  # by the user
        self.chooser: Any = None  # whether samples run at once (modes/auto.py)
        self.natives: List[str] = []  # of stand-ins in the place of layers
        self.programs: List[Programs] = []

    # -- attached to the model -----------------------------------------------------

    def attach(self) -> None:
        """Takes the place of the model's ``forward``."""
        self._before = vars(self.module).get("forward")
        self.own = uncompiled(self.module) or self._before
        self.__signature__ = inspect.signature(self.module.forward)
        self.module.forward = self
        self.compiled = settings_of(self.module)
        # What the user has compiled in place would compile the engine.
        self._in_place = vars(self.module).pop("_compiled_call_impl", None)
        vars(self.module)["compile"] = self._compile
        self.learn()

    def _compile(self, **arguments: Any) -> None:
        """``model.compile()``: the next forward passes are compiled."""
        self.compiled = settings_for(**arguments)

    def detach(self) -> None:
        """Gives the model its own ``forward`` back."""
        self.enabled = False  # where somebody has wrapped it meanwhile
        vars(self.module).pop("compile", None)
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._before is not None:
                self.module.forward = self._before
            if self._in_place is not None:
                self.module._compiled_call_impl = self._in_place

    def __getstate__(self) -> dict:
        state = dict(vars(self))
        for name in ("_runs", "made_of_data", "current", "_params", "kinds", "_anchor"):
            state.pop(name, None)
        programs = {"compiled": None, "programs": [], "step": None}
        return {**state, "_modules": None, **programs}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._runs, self.made_of_data, self.current = [], MadeOfData(), None
        self._params, self.kinds, self._anchor = {}, {}, None

    @property
    def anchor(self) -> torch.Tensor:
        """
        A leaf that all captures hang on. Its gradient is asked for in place of those of
        parameters, and a ``backward()`` has passed all captures when it comes to it.
        """
        if self._anchor is None:
            device = next((p.device for p in self.module.parameters()), None)
            self._anchor = torch.zeros((), device=device, requires_grad=True)
            complete = getattr(self.collector, "complete", None)
            if complete is not None:
                self._anchor.register_hook(complete)
        return self._anchor

    @property
    def modules(self) -> Tuple[List[str], List[nn.Module]]:
        """The names and the modules of the model, as one forward pass finds them."""
        if self._modules is None:
            found = dict(self.module.named_modules())
            self._modules = list(found), list(found.values())
        return self._modules

    def forget_modules(self) -> None:
        """There may be others at the next look."""
        self._modules = None

    def hook_tables(self) -> Iterator[Dict[int, Callable]]:
        """
        Of forward hooks on the model's parts: those of the model itself are outside.

        Raises:
            Refused: if there is a hook on a part's backward pass
        """
        parts = self.modules[1][1:]
        for m in parts:
            if m._backward_hooks or m._backward_pre_hooks:
                name = self.name_of(m)
                raise Refused(
                    f"{name} {BACKWARD_HOOK}", module=name, remedy="Remove it."
                )
        return hook_tables(parts)

    def name_of(self, module: nn.Module) -> str:
        """A module, in an error's words."""
        names = (n for n, m in self.module.named_modules() if m is module)
        return f"{next(names, '?') or 'the model'} ({type(module).__name__})"

    def describe(self) -> str:
        """The model, in an error's words."""
        return type(uncompiled(self.module) or self.module).__name__

    def learn(self) -> None:
        """Looks which parameters the model has."""
        self.names = {p: n for n, p in self.module.named_parameters()}
        self._params = {id(p): p for p in self.names}
        self._parts_compiled = are_compiled(list(self.module.modules())[1:])
        self.half = any(
            x.is_floating_point() and x.itemsize < 4
            for x in (*self.module.parameters(), *self.module.buffers())
        )

    @property
    def in_half(self) -> bool:
        """Whether parts of the model are computed in half precision now."""
        return self.half or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))

    @property
    def params(self) -> Dict[int, nn.Parameter]:
        """The trainable parameters, by id."""
        if not self._params:
            self.learn()
        return {i: p for i, p in self._params.items() if p.requires_grad}

    def knows(self, p: nn.Parameter) -> bool:
        """Whether the model had this parameter when it was made private."""
        if not self._params:
            self.learn()
        return id(p) in self._params

    # -- forward -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``forward``."""
        own = self.own or functools.partial(type(self.module).forward, self.module)
        if self.per_sample is not None:
            own = functools.partial(self.per_sample, own)
        with eagerly() if self._parts_compiled and self.current else nullcontext():
            return own(*args, **kwargs)

    def plain_forward(self) -> Callable:
        """The model's own ``forward``, of which the compiler reads the code."""
        module = uncompiled(self.module) or self.module
        if module is self.module and self.own is not None:
            return self.own
        return types.MethodType(type(module).forward, module)

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``forward``, sample by sample where gradients are asked for."""
        if not self.enabled or self.current is not None or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return self._private(args, kwargs, settings_in_force())

    @torch.compiler.disable
    def _private(
        self, args: tuple, kwargs: dict, settings: Optional[Settings] = None
    ) -> Any:
        programs = programs_for(self, settings or self.compiled)
        if programs is None:
            self.forget_modules()
        with self._together():
            inputs = inputs_of(self, args, kwargs)
            for _ in range(8):
                known = known_of(self, inputs)
                try:
                    if programs is not None and inputs.part is not None:
                        try:
                            return run_program(self, programs, inputs, known)
                        except Changed:
                            self.programs.remove(programs)
                            programs = programs_for(self, programs.settings)
                            continue
                        except NotCompiled as error:
                            programs.report(error)
                            programs = None
                            self.forget_modules()
                    return Parts(self, inputs, known).run()
                except NewOutput:
                    compare(self, inputs, known)
                except HookReturns:
                    pass  # now with a hook that changes what the model computes
            raise Refused(
                f"{self.describe()}: its forward gives outputs of another structure at "
                "each call, so that they can't be put together.",
                remedy="Return the same from each.",
            )

    def _together(self) -> ContextManager:
        """What one process refuses within, all do."""
        if self.expert_group is None:
            return nullcontext()
        return self.expert_group.forward_pass(self.anchor.device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model is as it was, within."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def for_trace(
        self, leaves: Dict[str, torch.Tensor], probe: torch.Tensor
    ) -> Tuple["Engine", Any]:
        """
        What runs the samples of a program, and what clips their gradients.

        Args:
            leaves: what stands for the parameters, by name
            probe: whose gradient are the norms
        """
        traced = object.__new__(Engine)
        vars(traced).update(vars(self))
        traced.made_of_data, traced.kinds, traced._runs = MadeOfData(), {}, []
        traced.attached = False  # gradients of the whole batch are not asked for
        traced.names = {x: name for name, x in leaves.items()}
        traced._params = {id(x): x for x in leaves.values()}
        traced.collector = step = self.step(traced, leaves, probe)
        return traced, step

    # -- backward ------------------------------------------------------------------

    @property
    def in_own_backward(self) -> bool:
        """Whether gradients that reach parameters are known to be those of samples."""
        return self._own_backward

    def add_runs(self, runs: Iterable[Any]) -> None:
        """Remembers runs, for as long as somebody has their outputs."""
        self._runs = [r for r in self._runs if r() is not None]
        self._runs += map(weakref.ref, runs)

    def runs(self) -> List[Any]:
        """The runs whose outputs somebody has, and whose gradients nobody took."""
        alive = [r() for r in self._runs]
        return [run for run in alive if run is not None and not run.done]

    def deliver(self, use: Use, grad: torch.Tensor, saved: tuple) -> None:
        """Called by autograd, for each use of a parameter that it passes."""
        if self.collector is not None and self.enabled:
            self.collector.use(use, grad, saved)

    def deliver_sample(
        self, run: ScanRun, b: int, grads: Dict[nn.Parameter, Optional[torch.Tensor]]
    ) -> None:
        """The gradients of sample ``b`` of a scan."""
        if self.collector is not None and self.enabled:
            with torch.no_grad():
                self.collector.sample(run, b, grads)

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """Gradients that reach parameters within are known to be those of samples."""
        before, self._own_backward = self._own_backward, True
        try:
            yield
        finally:
            self._own_backward = before
