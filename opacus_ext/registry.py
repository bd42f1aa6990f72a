"""The only file that patches Opacus.

Opacus 1.6 chooses the classes of a ``grad_sample_mode`` in if-chains and fixes the
criterion of the ghost modes. Here modes and clipping functions are entries of tables,
and what has no entry goes to Opacus as before. An Opacus that has a table of modes
itself (upstream/02-mode-registry.patch) gets ours as entries of it, and keeps its
functions. :func:`register` names all that is replaced or added in Opacus, and
:func:`unregister` undoes it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from importlib import import_module
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Type

import opacus.accountants.registry
import opacus.grad_sample
import opacus.grad_sample.utils
import opacus.optimizers
import opacus.privacy_engine
import opacus.utils.batch_memory_manager
import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn

from opacus_ext import checkpoints, misuse, peft, validators
from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.clipping import CLIPPINGS, find_clipping
from opacus_ext.data.copies import refuse_copies
from opacus_ext.data.draws import Splits
from opacus_ext.engine import WRAPPERS, has_own_criterion
from opacus_ext.grad_sample import samplers, watched
from opacus_ext.grad_sample.modes import common
from opacus_ext.grad_sample.modes.auto import Auto
from opacus_ext.grad_sample.modes.ghost import (
    BookKeeping,
    ClippedCriterion,
    Ghost,
    Scan,
)
from opacus_ext.grad_sample.modes.hooks import GradSampleMode
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.grad_sample.rules import experts
from opacus_ext.optimizers.distributed import (
    DistributedGhostDPOptimizer,
    DistributedHooksDPOptimizer,
)
from opacus_ext.optimizers.loop import watch_loader, watch_steps
from opacus_ext.optimizers.optimizer import (
    ClippingOptimizer,
    GhostDPOptimizer,
    HooksDPOptimizer,
    optimizer_class,
)
from opacus_ext.private_torch import is_batched, take_checkpoints
from opacus_ext.refused import Refused
from opacus_ext.statement import privacy_statement

_table: Any = getattr(opacus.grad_sample, "modes", None)  # if Opacus has a registry


class Mode(NamedTuple):
    """The classes of a ``grad_sample_mode``."""

    module: Type[nn.Module]
    hooks: type
    optimizer: type
    distributed: type
    criterion: Optional[type] = None  # if the mode returns one


_RECORDING = common.classes(GradSampleMode, GradSampleHooks, GradSampleModule)
_FAST = GradSampleHooksFastGradientClipping, GradSampleModuleFastGradientClipping
_HOOKS = HooksDPOptimizer, DistributedHooksDPOptimizer
_GHOST = GhostDPOptimizer, DistributedGhostDPOptimizer, ClippedCriterion
MODES: Dict[str, Mode] = {
    "hooks": Mode(*_RECORDING, *_HOOKS),
    "functorch": Mode(*_RECORDING, *_HOOKS),
    "ghost": Mode(*common.classes(Ghost, *_FAST), *_GHOST),
    "ghost_bk": Mode(*common.classes(BookKeeping, *_FAST), *_GHOST),
    "scan": Mode(*common.classes(Scan, *_FAST), *_GHOST),
    "auto": Mode(*common.classes(Auto, *_FAST), *_GHOST),
}

_OF_OPACUS = ("flat", "per_layer", "adaptive")  # its own clipping functions

_undo: List[Callable[[], None]] = []


def register() -> None:
    """
    Registers everything with Opacus; importing ``opacus_ext`` does it. Idempotent.

    Example:
        >>> import opacus_ext
        >>> opacus_ext.unregister()
        >>> opacus_ext.register()
    """
    if _undo:
        return
    if _table is None:
        _replace_lookups()
    else:
        _enter_modes()
        _undo.append(_leave_modes)
    memory = opacus.utils.batch_memory_manager
    _replace(memory, "BatchSplittingSampler", Splits)
    for name, wrap in (("make_private", _make_private), *WRAPPERS.items()):
        _replace(PrivacyEngine, name, wrap(getattr(PrivacyEngine, name)))
    for name in ("__reduce_ex__", "__setstate__"):
        _replace(DPOptimizer, name, getattr(ClippingOptimizer, name))
    for name, method in checkpoints.METHODS.items():
        _replace(PrivacyEngine, name, method)
    PrivacyEngine.privacy_statement = privacy_statement
    _undo.append(lambda: delattr(PrivacyEngine, "privacy_statement"))
    _replace(ModuleValidator, "validate", classmethod(validators.validate))
    _replace(ModuleValidator, "fix", classmethod(validators.fix))
    _add(
        opacus.accountants.registry._ACCOUNTANTS,
        PRVBoundsAccountant.mechanism(),
        PRVBoundsAccountant,
    )
    for layer in samplers.LAYERS:
        _add(GradSampleHooks.GRAD_SAMPLERS, layer, samplers.grad_sampler)
        norms = GradSampleHooksFastGradientClipping.NORM_SAMPLERS
        _add(norms, layer, samplers.norm_sampler)
    for name in ("add_hooks", "iterate_submodules"):
        wrapped = getattr(watched, name)(getattr(GradSampleHooks, name))
        _replace(GradSampleHooks, name, wrapped)
    _undo.append(take_checkpoints())
    extend_transformers()


def unregister() -> None:
    """Leaves Opacus, torch and transformers as they were before. Idempotent."""
    global _extended
    while _undo:
        _undo.pop()()
    _extended = False


_extended = False  # True if transformers has our experts


def extend_transformers() -> None:
    """
    Adds the experts of samples that run at once to transformers, if it has been
    imported. ``make_private`` calls it again. Idempotent.
    """
    global _extended
    if _extended or "transformers.modeling_utils" not in sys.modules:
        return
    _extended = True
    functions = import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    _undo.append(experts.register_with(functions, is_batched))


def _replace(place: Any, name: str, new: Any) -> None:
    """Sets an attribute that is there, until ``unregister``."""
    if not hasattr(place, name):
        return
    old = vars(place).get(name, getattr(place, name))  # a classmethod stays one
    setattr(place, name, new)
    _undo.append(lambda: setattr(place, name, old))


def _add(table: Dict[Any, Any], key: Any, new: Any) -> None:
    """Sets an entry of a table of Opacus's, until ``unregister``."""
    old = table.get(key)
    table[key] = new

    def undo() -> None:
        """Puts back what was there."""
        if table.get(key) is not new:  # somebody else's by now
            return
        if old is None:
            del table[key]
        else:
            table[key] = old

    _undo.append(undo)


# -- modes -------------------------------------------------------------------------

_stock = False  # True while an engine is at work that brings its own criterion
_before: Dict[str, Any] = {}  # what Opacus's table had under the names of our modes


def _enter_modes() -> None:
    """Enters our modes in Opacus's table."""
    for name, mode in MODES.items():
        _before[name] = _table.find_grad_sample_mode(name)
        parts = dict(module=mode.module, hooks=mode.hooks, criterion=mode.criterion)
        pick = functools.partial(_optimizer, name)
        _table.register_grad_sample_mode(name, **parts, optimizer=pick, force=True)


def _leave_modes() -> None:
    """Takes our modes out of Opacus's table again."""
    for name, old in _before.items():
        now = _table.find_grad_sample_mode(name)
        if getattr(now, "module", None) is not MODES[name].module:
            continue  # somebody else's by now
        _table.unregister_grad_sample_mode(name)
        if old is not None:
            _table.register_grad_sample_mode(name, **old._asdict(), force=True)
    _before.clear()


def _use_stock(stock: bool) -> bool:
    """Hides our modes from Opacus, or shows them; returns whether they were hidden."""
    global _stock
    before, _stock = _stock, stock
    if _table is not None and stock != before:
        (_leave_modes if stock else _enter_modes)()
    return before


def _check_mode(mode: Any) -> None:
    """Refuses a mode that nobody knows."""
    if _table is None or _table.find_grad_sample_mode(mode) is None:
        misuse.check_mode(mode, MODES)


def _replace_lookups() -> None:
    """Replaces what chooses the classes of a mode, where Opacus has no table."""
    utils, engine = opacus.grad_sample.utils, opacus.privacy_engine
    gsm = _lookup(utils.get_gsm_class, "module")
    hooks = _lookup(utils.get_hooks_class, "hooks")
    optimizer = _lookup_optimizer(opacus.optimizers.get_optimizer_class)
    for place in (utils, opacus.grad_sample, engine):
        _replace(place, "get_gsm_class", gsm)
    for place in (utils, opacus.grad_sample):
        _replace(place, "get_hooks_class", hooks)
    for place in (opacus.optimizers, engine):
        _replace(place, "get_optimizer_class", optimizer)
    criterion = _prepare_criterion(PrivacyEngine._prepare_criterion)
    _replace(PrivacyEngine, "_prepare_criterion", criterion)


def _lookup(opacus_lookup: Callable, part: str) -> Callable:
    """Wraps Opacus's lookup of a class: our own table comes first."""

    @functools.wraps(opacus_lookup)
    def lookup(grad_sample_mode: str) -> type:
        """The class of a mode."""
        if grad_sample_mode in MODES and not _stock:
            return getattr(MODES[grad_sample_mode], part)
        _check_mode(grad_sample_mode)
        return opacus_lookup(grad_sample_mode)

    return lookup


def _lookup_optimizer(opacus_lookup: Callable) -> Callable:
    """Wraps Opacus's lookup of an optimizer's class: our own table comes first."""

    @functools.wraps(opacus_lookup)
    def lookup(
        clipping: str, distributed: bool, grad_sample_mode: Optional[str] = None
    ) -> type:
        """The class of an optimizer."""
        if grad_sample_mode in MODES and not _stock:
            return _optimizer(grad_sample_mode, clipping, distributed)
        if clipping not in _OF_OPACUS:
            raise _not_of_opacus(clipping, grad_sample_mode)
        return opacus_lookup(clipping, distributed, grad_sample_mode)

    return lookup


def _optimizer(name: str, clipping: Any, distributed: bool) -> type:
    """Returns the class of an optimizer in one of our modes."""
    mode = MODES[name]
    if clipping != "adaptive":
        base = mode.distributed if distributed else mode.optimizer
        return optimizer_class(base, find_clipping(clipping))
    if mode.criterion is not None:
        raise Refused(
            f'grad_sample_mode="{name}" has no adaptive clipping; got '
            f"clipping={clipping!r}.",
            parameter="clipping",
            remedy='Use grad_sample_mode="hooks", or "ghost" of Opacus\'s '
            "PrivacyEngineAdaptiveClipping without clipping=.",
        )
    # Opacus's own: it reads per-sample gradients in any mode that leaves them.
    return opacus.optimizers.get_optimizer_class(clipping, distributed)


def _not_of_opacus(clipping: Any, mode: Optional[str]) -> Refused:
    """Makes the error for a clipping that one of Opacus's modes does not know."""
    return Refused(
        f"clipping={clipping!r} is for the modes {', '.join(MODES)}; got "
        f"grad_sample_mode={mode!r}.",
        parameter="clipping",
        remedy="Choose one of these modes, or "
        f"{', '.join(map(repr, _OF_OPACUS))} clipping.",
    )


def _prepare_criterion(prepare: Callable) -> Callable:
    """Wraps ``PrivacyEngine._prepare_criterion``: our modes get our criterion."""

    @functools.wraps(prepare)
    def prepare_criterion(self: PrivacyEngine, *, module: Any, **kwargs: Any) -> Any:
        """The criterion that the user gets."""
        if not hasattr(module, "clipped_backward"):
            return prepare(self, module=module, **kwargs)
        given = (kwargs["optimizer"], kwargs["criterion"])
        return ClippedCriterion(module, *given, kwargs.get("loss_reduction", "mean"))

    return prepare_criterion


def _make_private(make_private: Callable) -> Callable:
    """
    Wraps ``PrivacyEngine.make_private``: adds the arguments ``take``, ``shared`` and
    ``on_nonfinite``, refuses before anything is changed, and cleans up if something
    fails later.
    """
    known = inspect.signature(make_private).parameters

    @functools.wraps(make_private)
    def make(
        self: PrivacyEngine,
        *,
        module: nn.Module,
        take: Optional[Callable[[Any, int], Any]] = None,
        shared: Sequence[str] = (),
        on_nonfinite: str = "drop",
        **kwargs: Any,
    ) -> Any:
        """``PrivacyEngine.make_private``, or a refusal that leaves all as it is."""
        extend_transformers()
        # A subclass with a criterion of its own (adaptive clipping) needs the modules
        # that Opacus made for it.
        before = _use_stock(has_own_criterion(self))
        try:
            _refuse_sharded(module, _stock, **kwargs)
            if _stock or kwargs.get("grad_sample_mode", "hooks") not in MODES:
                _refuse_trained_as_is(module, kwargs.get("grad_sample_mode", "hooks"))
            if _stock:
                refuse_copies(getattr(kwargs["data_loader"], "dataset", None))
                return make_private(self, module=module, **kwargs)
            module = common.trained_of(module)
            mode, by_hand = MODES.get(kwargs.get("grad_sample_mode", "hooks")), None
            if mode is not None and kwargs.get("wrap_model", True):
                by_hand = common.ByHand.of(module, mode.module, **kwargs)
            if by_hand is not None and common.private_model_of(module) is not None:
                module, by_hand = vars(module)["made"], None  # a second time
            module = module if by_hand is None else by_hand.wrapper._module
            fresh = by_hand is not None
            fresh = fresh or not hasattr(module, "autograd_grad_sample_hooks")
            if on_nonfinite not in ("drop", "raise"):
                raise Refused(
                    f'on_nonfinite is "drop" or "raise", got {on_nonfinite!r}.',
                    parameter="on_nonfinite",
                    remedy='"drop" counts such a sample as zero, with a warning.',
                )
            misuse.check_arguments(self, known, module=module, **kwargs)
            _check(module, fresh, **kwargs)
            dataset = self.dataset
            given = common.settings.set(
                dict(take=take, shared=tuple(shared), on_nonfinite=on_nonfinite)
            )
            try:
                if by_hand is not None:
                    by_hand.remove()
                made = make_private(self, module=module, **kwargs)
                _attach(module, *made, on_nonfinite=on_nonfinite)
                if by_hand is not None:
                    by_hand.redirect(made[0])
                if mode is not None and mode.criterion and len(made) == 3:
                    first, optimizer, loader = made
                    criterion = self._prepare_criterion(
                        module=first,
                        optimizer=optimizer,
                        criterion=kwargs.get("criterion", nn.CrossEntropyLoss()),
                        loss_reduction=kwargs.get("loss_reduction", "mean"),
                    )
                    made = first, optimizer, criterion, loader
                watch_steps(self, module, made)
                if mode is not None:
                    named = kwargs.get("grad_sample_mode", "hooks")
                    samplers.tell_of_others(self, module, named)
                return made
            except BaseException:
                self.dataset = dataset
                if fresh:
                    _clean(module)
                if by_hand is not None:
                    by_hand.put_back()
                raise
            finally:
                common.settings.reset(given)
        finally:
            _use_stock(before)

    return make


def _attach(
    module: nn.Module, first: Any, optimizer: Any, *rest: Any, on_nonfinite: str
) -> None:
    """Lets what was made know of each other."""
    optimizer.on_nonfinite = on_nonfinite
    optimizer.mode = first
    private = common.private_model_of(module)
    if private is not None:
        private.optimizer = optimizer
        module.autograd_grad_sample_hooks.extend(peft.attach_checks(module))
        watch_loader(rest[-1], optimizer, private.inputs, private.passes)


def _check(
    module: nn.Module,
    fresh: bool,
    optimizer: torch.optim.Optimizer,
    grad_sample_mode: str = "hooks",
    clipping: Any = "flat",
    wrap_model: bool = True,
    **kwargs: Any,
) -> None:
    _check_mode(grad_sample_mode)
    classes = opacus.grad_sample.utils
    lookup = classes.get_gsm_class if wrap_model else classes.get_hooks_class
    lookup(grad_sample_mode)
    if grad_sample_mode in MODES:
        # Distributed or not is Opacus's to find out; it decides about the class only.
        if not (clipping == "adaptive" and grad_sample_mode == "hooks"):
            opacus.optimizers.get_optimizer_class(clipping, False, grad_sample_mode)
        if fresh:
            common.refuse(module, grad_sample_mode)
        params = [p for g in optimizer.param_groups for p in g["params"]]
        peft.refuse(module, params)
        if not any(p.requires_grad for p in params):
            raise Refused(
                "The optimizer has no trainable parameter: all of its parameters are "
                "frozen.",
                parameter="optimizer",
                remedy="Build it from parameters that require gradients, after "
                "adapters were added (get_peft_model, without inference_mode).",
            )
    elif clipping not in _OF_OPACUS:
        raise _not_of_opacus(clipping, grad_sample_mode)


def _refuse_sharded(
    module: nn.Module,
    other_engine: bool,
    grad_sample_mode: str = "hooks",
    clipping: Any = "flat",
    **kwargs: Any,
) -> None:
    """Refuses experts sharded over processes where they can't be trained exactly."""
    group = find_group(module.modules())
    if group is None:
        return
    modes = ["ghost", "ghost_bk"]  # all samples send at once
    if other_engine or grad_sample_mode not in modes or clipping == "adaptive":
        raise Refused(
            "Experts spread over processes are trained in the modes "
            f"{', '.join(modes)} of PrivacyEngine, without adaptive clipping; got "
            f"grad_sample_mode={grad_sample_mode!r}, clipping={clipping!r}"
            f"{' of another engine' if other_engine else ''}.",
            parameter="grad_sample_mode",
            remedy="Choose one of these modes and another clipping, or train the model "
            "without opacus_ext.distributed.expert_parallel.",
        )
    if not isinstance(module, DPDDP):
        raise Refused(
            f"{type(module).__name__} has experts that are spread over processes.",
            module=type(module).__name__,
            remedy="Pass what opacus_ext.distributed.expert_parallel has returned.",
        )
    if group.size != dist.get_world_size():
        raise Refused(
            f"The experts are spread over {group.size} of {dist.get_world_size()} "
            "processes.",
            remedy="Call opacus_ext.distributed.expert_parallel without a group.",
        )


def _clean(module: nn.Module) -> None:
    """Removes hooks and attributes that make_private has left."""
    for handle in getattr(module, "autograd_grad_sample_hooks", []):
        handle.remove()
    if hasattr(module, "autograd_grad_sample_hooks"):
        del module.autograd_grad_sample_hooks
    for p in module.parameters():
        for name in (*OPACUS_PARAM_MONKEYPATCH_ATTRS, "summed_grad"):
            if hasattr(p, name):
                delattr(p, name)


def _refuse_trained_as_is(module: nn.Module, mode: str) -> None:
    """Refuses layers that only our own modes can train."""
    for name, layer in module.named_modules():
        trained = any(p.requires_grad for p in layer.parameters())
        if trained and type(layer) in validators.TRAINED_AS_IS:
            what = f"{name or 'the model'} ({type(layer).__name__})"
            raise Refused(
                f"{what} is trained as it is in the modes {', '.join(MODES)} of "
                f"PrivacyEngine alone; got grad_sample_mode={mode!r}.",
                module=what,
                remedy="Choose one of them, or replace the layer by that of "
                f"opacus.layers, DP{type(layer).__name__}.",
            )


__all__ = ["CLIPPINGS", "MODES", "Mode", "register", "unregister"]
